package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"berth/generator/file"
	"berth/helpers/step"
)

// interval is that between looks at the machine's socket. inotify(7) would tell when it is made, but to close it then takes the kernel
// 10 to 100 ms (flush of fsnotify's reaper, Linux 6.18). A look takes some microseconds, but each makes Go's sysmon wake up some
// dozen times, which at shorter intervals the machine's boot would miss.
const interval = 5 * time.Millisecond

// ofLooks says at how many of these looks the machine's PID 1 is looked at, too.
const ofLooks = 16

// Await waits until the systemd inside the step's machine answers over the machine's message bus, for so long as budget, and returns its
// version. Enter connects to it.
func Await(ctx context.Context, s *step.Step, name string, budget time.Duration) (version string, err error) {
	m, err := Find(ctx, s.Root, nil, name)
	if err != nil {
		return "", err
	}
	root, err := m.Root()
	if err != nil {
		return "", err
	}
	defer root.Close()
	if err := installed(root, name); err != nil {
		return "", err
	}
	defer func(whole time.Duration) { s.Budget = whole }(s.Budget)
	s.Budget = budget // for what is said when it is used up
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	looks := 0
	err = s.Wait(ctx, "D-Bus inside machine "+name, nil, func(ctx context.Context) (step.State, error) {
		inside, err := Inside(ctx, root)
		if err == nil {
			defer inside.Close()
			if version, err = inside.Version(); err == nil {
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
	return version, err
}

// ended is the error for a machine that ended before its bus answered.
func ended(ctx context.Context, root *file.Root, name string) error {
	host, err := Host(ctx, root)
	if err != nil {
		return err
	}
	defer host.Close()
	unit, err := host.Unit(ctx, NSpawnUnit(name))
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
