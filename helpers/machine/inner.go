package machine

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"berth/generator/file"
)

// Inner is a running machine together with a connection to its systemd.
type Inner struct {
	*Machine
	*Manager
	// Root is the machine's root file system as its processes see it.
	Root *file.Root
}

// Find returns the machine that runs in the slot's machine unit, or ErrNoMachine. bus is a connection to the host's systemd; nil: one is
// made where it is needed. It does not ask systemd-machined: one that was killed cannot come back while the node stops, as its start
// would have to wait for the stop.
func Find(ctx context.Context, host *file.Root, bus *Manager, name string) (*Machine, error) {
	pid, _, err := leader(ctx, host, bus, name)
	if err != nil {
		return nil, err
	}
	if pid == 0 {
		return nil, fmt.Errorf("machine %s: %w", name, ErrNoMachine)
	}
	return &Machine{Name: name, Leader: pid, Unit: NSpawnUnit(name), host: host}, nil
}

// leader returns PID 1 of the machine, as the host numbers it, and its proc_pid_status(5). 0: there is none.
//
// Systemd is only asked for the unit's cgroup where the machine is not in its stock place: while a node starts it has enough to do.
func leader(ctx context.Context, host *file.Root, bus *Manager, name string) (pid uint32, status string, err error) {
	stock := CGroup(host, name, "")
	if pid, status, err = initOf(host, stock); pid != 0 || err != nil {
		return pid, status, err
	}
	if bus == nil {
		if bus, err = Host(ctx, host); err != nil {
			return 0, "", err
		}
		defer bus.Close()
	}
	group, err := bus.ControlGroup(ctx, NSpawnUnit(name))
	if cgroup := CGroup(host, name, group); err == nil && cgroup != stock {
		return initOf(host, cgroup)
	}
	return 0, "", err
}

// initOf returns PID 1 of a machine among the processes of a cgroup.
func initOf(host *file.Root, cgroup string) (pid uint32, status string, err error) {
	processes, err := Processes(host, cgroup)
	for _, p := range processes {
		if status, err := os.ReadFile(filepath.Join(proc(host, p.PID), "status")); err == nil && isInit(string(status)) {
			return p.PID, string(status), nil
		}
	}
	return 0, "", err
}

// Enter finds a slot's machine and connects to its systemd. It returns ErrNoMachine where there is none.
func Enter(ctx context.Context, host *file.Root, name string) (*Inner, error) {
	return EnterBy(ctx, host, nil, name)
}

// EnterBy is Enter by way of a connection to the host's systemd that is there already.
func EnterBy(ctx context.Context, host *file.Root, bus *Manager, name string) (*Inner, error) {
	m, err := Find(ctx, host, bus, name)
	if err != nil {
		return nil, err
	}
	root, err := m.Root()
	if err != nil {
		return nil, err
	}
	manager, err := Inside(ctx, root)
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("the message bus of machine %s: %w", name, err)
	}
	return &Inner{m, manager, root}, nil
}

// Close ends the connection; the machine goes on.
func (i *Inner) Close() {
	i.Manager.Close()
	_ = i.Root.Close()
}

// Explain says what systemd inside the machine knows about a service that is not as it should be, with its last log lines.
func (i *Inner) Explain(ctx context.Context, service string) string {
	s, err := i.Service(ctx, service)
	if err != nil {
		return err.Error()
	}
	text := fmt.Sprintf("%s is %s (%s)", service, s.Active, s.Sub)
	switch {
	case s.Load == "not-found":
		text = service + " does not exist in machine " + i.Name
	case s.Result != "success" && s.Result != "":
		text += ": " + s.failure().Error()
	}
	if s.StatusText != "" {
		text += ": " + s.StatusText
	}
	booted, _ := i.Booted() // else lines of an earlier run of the machine may be among them
	return text + Journal(ctx, i.Name, service, booted)
}

// Since is the filter for Lines that leaves out what is older, such as what a machine's journal has of its earlier runs; none for a zero t.
func Since(t time.Time) []string {
	if t.IsZero() {
		return nil
	}
	return []string{fmt.Sprintf("--since=@%d.%06d", t.Unix(), t.Nanosecond()/1000)}
}

// Journal returns the last log lines of a unit inside a machine, or on the host where machine is empty, each on a line of its
// own after a newline. A zero since is no bound. It is for messages: where the journal cannot be read it says so. The host's own
// journalctl reads it; nothing of the machine runs.
func Journal(ctx context.Context, machine, unit string, since time.Time) string {
	// A service that is restarted over and over has the reason of its last end before the lines of its next start: systemd's own are
	// eight in all.
	lines, err := Lines(ctx, machine, 16, append(Since(since), "--unit="+unit)...)
	if err != nil {
		return fmt.Sprintf("\n(its journal cannot be read: %v)", err)
	}
	var b strings.Builder
	for _, line := range lines {
		b.WriteString("\n  " + line)
	}
	return b.String()
}

// Lines returns the last lines, n at the most, of those in a journal that the filter lets through: options and matches of
// journalctl(1). See Journal.
func Lines(ctx context.Context, machine string, n int, filter ...string) ([]string, error) {
	args := append([]string{"--lines=" + strconv.Itoa(n), "--output=cat", "--no-pager", "--quiet"}, filter...)
	if machine != "" {
		args = append(args, "--machine="+machine)
	}
	out, err := exec.CommandContext(ctx, "journalctl", args...).Output()
	if err != nil {
		return nil, err
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		lines = append(lines, strings.TrimRight(line, "\n"))
	}
	// An entry of several lines counts as one for journalctl.
	return lines[max(0, len(lines)-n):], nil
}
