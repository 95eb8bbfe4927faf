// wait-dbus waits until D-Bus inside a slot's machine answers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

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

// interval is that between looks at the machine's socket. inotify(7) would tell when it is made, but to close it then takes the kernel
// 10 to 100 ms (flush of fsnotify's reaper, Linux 6.18). A look takes some microseconds, but each makes Go's sysmon wake up some
// dozen times, which at shorter intervals the machine's boot would miss.
const interval = 5 * time.Millisecond

// ofLooks says at how many of these looks the machine's PID 1 is looked at, too.
const ofLooks = 16

func run(ctx context.Context, s *step.Step) error {
	name := goalstate.MachineName(s.Slot)
	m, err := machine.Find(ctx, s.Root, nil, name)
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
	looks := 0
	return s.Wait(ctx, "D-Bus inside machine "+name, nil, func(ctx context.Context) (step.State, error) {
		inside, err := machine.Inside(ctx, root)
		if err == nil {
			defer inside.Close()
			var version string
			if version, err = inside.Version(); err == nil {
				s.Status("systemd %s inside machine %s answers", version, name)
				return step.State{Done: true}, nil
			}
		}
		if looks++; looks%ofLooks == 0 && !m.Alive() {
			return step.State{}, ended(ctx, s.Root, name)
		}
		seen := err.Error()
		if errors.Is(err, fs.ErrNotExist) {
			seen = "its socket is not there yet"
		}
		return step.State{Seen: seen, Again: interval}, nil
	})
}

// ended is the error for a machine that ended before its bus answered.
func ended(ctx context.Context, root *file.Root, name string) error {
	host, err := machine.Host(ctx, root)
	if err != nil {
		return err
	}
	defer host.Close()
	unit, err := host.Unit(ctx, machine.NSpawnUnit(name))
	return errors.Join(err, fmt.Errorf("machine %s ended while it booted: %s is %s (%s)", name, unit.Name, unit.Active, unit.Sub))
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
