// wait-dbus waits until D-Bus inside a slot's machine answers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name:   "wait-dbus",
		About:  "Waits until the systemd inside the slot's machine answers over the machine's message bus.",
		Args:   []string{"SLOT"},
		Budget: 2 * time.Minute,
		Run:    run,
	}))
}

func run(ctx context.Context, s *step.Step) error {
	name := goalstate.MachineName(s.Slot)
	host, err := machine.Host(ctx, s.Root)
	if err != nil {
		return err
	}
	defer host.Close()
	m, err := machine.Find(ctx, s.Root, host, name)
	if err != nil {
		return err
	}
	root, err := m.Root()
	if err != nil {
		return err
	}
	defer root.Close()
	if err := installed(root, name); err != nil {
		return err
	}
	watch, err := machine.NewWatch()
	if err != nil {
		return err
	}
	defer watch.Close()
	events := step.Merge(ctx, watch.Events(), host.Events())
	return s.Wait(ctx, "D-Bus inside machine "+name, events, func(ctx context.Context) (step.State, error) {
		watchFolders(watch, root) // before the look at the socket: it may be made in between
		inside, err := machine.Inside(ctx, root)
		if err == nil {
			defer inside.Close()
			var version string
			if version, err = inside.Version(); err == nil {
				s.Status("systemd %s inside machine %s answers", version, name)
				return step.State{Done: true}, nil
			}
		}
		if unit, e := host.Unit(ctx, machine.NSpawnUnit(name)); e != nil || !unit.Running() || unit.Busy() {
			return step.State{}, errors.Join(e, fmt.Errorf("machine %s ended while it booted: %s is %s (%s)", name, unit.Name, unit.Active, unit.Sub))
		}
		if errors.Is(err, fs.ErrNotExist) {
			return step.State{Seen: "its socket is not there yet"}, nil // an event tells
		}
		return step.State{Seen: err.Error(), Again: 20 * time.Millisecond}, nil
	})
}

// installed fails at once where the root file system has no message bus: it would never answer.
func installed(root *file.Root, name string) error {
	for _, dir := range []string{"usr/lib", "lib", "etc", "usr/local/lib"} {
		if _, err := root.Stat(dir + "/systemd/system/dbus.socket"); err == nil {
			return nil
		}
	}
	return fmt.Errorf("D-Bus is not installed in machine %s (no dbus.socket): install dbus or dbus-broker in /var/lib/machines/%s", name, name)
}

// watchFolders makes an event of whatever is made in the machine's /run and /run/dbus, as far as they exist.
func watchFolders(watch *machine.Watch, root *file.Root) {
	for _, dir := range []string{"run", "run/dbus"} {
		if handle, err := root.Handle(dir); err == nil {
			_ = watch.Add(fmt.Sprintf("/proc/self/fd/%d", handle.Fd()), unix.IN_CREATE|unix.IN_MOVED_TO)
			handle.Close()
		}
	}
}
