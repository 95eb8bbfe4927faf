// nvidia-wire makes the host's NVIDIA GPUs usable inside a slot's machine, before anything in it could use them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/helpers/nvidia-wire/wire"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name: "nvidia-wire",
		About: `Makes the host's NVIDIA GPUs usable inside the slot's machine, as nvidia.mode of the goal state says: links the driver's
libraries and programs, renews the linker's cache, and has nvidia-ctk make a CDI specification, which is checked before
containerd sees it. Where there is nothing to wire, it removes what an earlier run left.`,
		Args:   []string{"SLOT"},
		Budget: 3 * time.Minute,
		Run:    run,
	}))
}

func run(ctx context.Context, s *step.Step) error {
	_, slot, err := s.Goal()
	if err != nil {
		return err
	}
	d, err := decide(ctx, s.Root, slot.NVIDIA.Mode)
	if err != nil || d.driver == nil {
		err = errors.Join(err, unwire(ctx, s)) // nor may what was wired before last longer than the reason for it
	} else {
		d.text, err = wireDriver(ctx, s, d.driver)
	}
	switch {
	case errors.Is(err, machine.ErrTimeout), err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return s.Late("NVIDIA GPUs of machine "+slot.MachineName(), err.Error())
	case err != nil:
		return err
	case d.warn:
		s.Warn("%s", d.text)
	default:
		s.Info("%s", d.text)
	}
	s.Status("%s", d.text)
	return nil
}

// decision is what is to be done: driver is to be wired, or there is none to wire, and text says why.
type decision struct {
	driver *nvidia.Driver
	text   string
	warn   bool // text is about something that should not be so
}

// decide goes by the mode and by what the host has.
func decide(ctx context.Context, host *file.Root, mode goalstate.Mode) (decision, error) {
	switch present := nvidia.Present(host); {
	case mode == goalstate.Off:
		return decision{text: "nvidia.mode is off: nothing to wire"}, nil
	case !present && mode == goalstate.Required:
		return decision{}, fmt.Errorf("nvidia.mode is required, but this host has no NVIDIA GPU (no %s): "+
			"load the driver, or set the mode to auto or off", nvidia.Control)
	case !present:
		return decision{text: "no NVIDIA GPU on this host: nothing to wire"}, nil
	}
	driver, err := nvidia.Discover(ctx, host, runtime.GOARCH)
	if err != nil {
		return decision{}, err
	}
	if missing := driver.Missing(); missing != nil {
		text := fmt.Sprintf("this host has an NVIDIA GPU (%s), but its linker does not find the driver's %s (ldconfig -p): "+
			"install the driver's libraries", nvidia.Control, strings.Join(missing, " and "))
		if mode == goalstate.Required {
			return decision{}, errors.New("nvidia.mode is required: " + text)
		}
		return decision{text: text + "; until then no container gets a GPU", warn: true}, nil
	}
	return decision{driver: driver}, driver.Mismatch()
}

func wireDriver(ctx context.Context, s *step.Step, driver *nvidia.Driver) (done string, err error) {
	inner, err := machine.Enter(ctx, s.Root, goalstate.MachineName(s.Slot))
	if err != nil {
		return "", err
	}
	defer inner.Close()
	return wireable(s, inner).Wire(ctx, s.Root, driver, runtime.GOARCH)
}

// unwire takes away what an earlier run left. The machine is only entered if there is something.
func unwire(ctx context.Context, s *step.Step) error {
	name := goalstate.MachineName(s.Slot)
	root, err := s.Root.Sub("var/lib/machines/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer root.Close()
	wired, err := (&wire.Machine{Root: root}).Wired()
	if err != nil || !wired {
		return err
	}
	inner, err := machine.Enter(ctx, s.Root, name)
	if err != nil {
		return err
	}
	defer inner.Close()
	s.Info("removing the NVIDIA driver of an earlier run from machine %s", name)
	return wireable(s, inner).Unwire(ctx)
}

func wireable(s *step.Step, inner *machine.Inner) *wire.Machine {
	return &wire.Machine{Name: inner.Name, Unit: "node@" + s.Slot + ".service", Root: inner.Root, Run: inner.Run, Log: s}
}
