package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	godbus "github.com/godbus/dbus/v5"

	"berth/generator/file"
)

// ErrNoMachine says that there is no machine of that name.
var ErrNoMachine = errors.New("no such machine")

// Machine is one machine that systemd-machined knows.
type Machine struct {
	Name   string
	Leader uint32 // PID on the host of the machine's PID 1
	Unit   string // the host's unit that it runs in
	host   *file.Root
}

// Machined is a connection to systemd-machined, which the bus starts when it is needed.
type Machined struct {
	bus   *godbus.Conn
	root  *file.Root
	flags godbus.Flags
}

// DialMachined connects to systemd-machined over the host's message bus. Unless activate is set, a systemd-machined that does
// not run is not started, and counts as one that knows no machine.
func DialMachined(ctx context.Context, root *file.Root, activate bool) (*Machined, error) {
	bus, err := dial(ctx, root, busSocket, true)
	if err != nil {
		return nil, fmt.Errorf("the host's message bus: %w", err)
	}
	m := &Machined{bus: bus, root: root}
	if !activate {
		m.flags = godbus.FlagNoAutoStart
	}
	return m, nil
}

// Close ends the connection.
func (m *Machined) Close() error { return m.bus.Close() }

// Machine returns the machine of that name, or ErrNoMachine.
func (m *Machined) Machine(ctx context.Context, name string) (*Machine, error) {
	var path godbus.ObjectPath
	if err := m.call(ctx, "GetMachine", name).Store(&path); err != nil {
		return nil, noMachine(name, err)
	}
	var properties map[string]godbus.Variant
	err := m.bus.Object("org.freedesktop.machine1", path).CallWithContext(ctx,
		"org.freedesktop.DBus.Properties.GetAll", m.flags, "org.freedesktop.machine1.Machine").Store(&properties)
	if err != nil {
		return nil, noMachine(name, err)
	}
	found := &Machine{Name: name, host: m.root}
	found.Leader, _ = properties["Leader"].Value().(uint32)
	found.Unit, _ = properties["Unit"].Value().(string)
	return found, nil
}

// Unregister makes systemd-machined forget a machine. It ends no process.
func (m *Machined) Unregister(ctx context.Context, name string) error {
	err := noMachine(name, m.call(ctx, "UnregisterMachine", name).Err)
	if errors.Is(err, ErrNoMachine) {
		return nil
	}
	return err
}

func (m *Machined) call(ctx context.Context, method string, args ...any) *godbus.Call {
	return m.bus.Object("org.freedesktop.machine1", "/org/freedesktop/machine1").
		CallWithContext(ctx, "org.freedesktop.machine1.Manager."+method, m.flags, args...)
}

// noMachine turns all ways of saying that there is no such machine into ErrNoMachine: the second is what a machine gets that ends
// between GetMachine and the look at its properties, the last two are for a systemd-machined that does not run.
func noMachine(name string, err error) error {
	var e godbus.Error
	if errors.As(err, &e) {
		switch e.Name {
		case "org.freedesktop.machine1.NoSuchMachine", "org.freedesktop.DBus.Error.UnknownObject",
			"org.freedesktop.DBus.Error.NameHasNoOwner", "org.freedesktop.DBus.Error.ServiceUnknown":
			return fmt.Errorf("machine %s: %w", name, ErrNoMachine)
		}
	}
	if err != nil {
		return fmt.Errorf("ask systemd-machined for %s: %w", name, unanswered(err))
	}
	return nil
}

// Alive tells whether the machine's PID 1 still runs. A zombie does not.
func (m *Machine) Alive() bool { return alive(m.host, m.Leader) }

// Root opens the machine's root file system as its processes see it, with what is mounted there.
func (m *Machine) Root() (*file.Root, error) {
	root, err := file.OpenRoot(filepath.Join(proc(m.host, m.Leader), "root"))
	if err != nil {
		return nil, fmt.Errorf("root file system of machine %s: %w", m.Name, err)
	}
	root.Call("the root of machine " + m.Name)
	return root, nil
}

func proc(host *file.Root, pid uint32) string {
	return filepath.Join(host.Name(), "proc", strconv.FormatUint(uint64(pid), 10))
}

func alive(host *file.Root, pid uint32) bool {
	stat, err := os.ReadFile(filepath.Join(proc(host, pid), "stat"))
	return err == nil && running(string(stat))
}

// running reads the state in proc_pid_stat(5), the field after the command's name, which may hold anything.
func running(stat string) bool {
	_, state, _ := strings.Cut(stat[strings.LastIndexByte(stat, ')')+1:], " ")
	return state != "" && state[0] != 'Z' && state[0] != 'X'
}
