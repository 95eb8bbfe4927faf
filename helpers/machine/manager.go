// Package machine speaks with systemd, on the host and inside a slot's machine, and with systemd-machined.
package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/helpers/step"
)

// Sockets of D-Bus, relative to the root of the host or of a machine.
const (
	privateSocket = "run/systemd/private"        // PID 1 itself, for root only
	busSocket     = "run/dbus/system_bus_socket" // the message bus (D-Bus specification, "System message bus")
)

// Manager is a connection to one systemd and the stream of its events. The host's is made anew when it is lost, so only one
// goroutine at a time may use it.
type Manager struct {
	*dbus.Conn
	bus    *godbus.Conn // the connection of Conn
	events chan struct{}
	closed <-chan struct{}
	// subscribed says that systemd is to tell of its units.
	subscribed bool
	// about holds the names and object paths of the units that events are about; nil: of all.
	about atomic.Pointer[map[string]bool]
	// dial makes a connection like the one that was lost; nil: there is none.
	dial func() (*godbus.Conn, error)
}

// Host connects to the systemd that runs the host, directly and not through the message bus, which may be down.
func Host(ctx context.Context, root *file.Root) (*Manager, error) {
	m := &Manager{
		events: make(chan struct{}, 1),
		dial:   func() (*godbus.Conn, error) { return dial(ctx, root, privateSocket, false) },
	}
	first, cancel := context.WithTimeout(ctx, reexec) // of connecting, not of the connection
	defer cancel()
	if err := m.reconnect(first); err != nil {
		return nil, fmt.Errorf("the host's systemd: %w", err)
	}
	return m, nil
}

// Look connects to the host's systemd as any user may: directly, which is for root alone, else through the host's message bus, where
// everyone may read. Unlike Host it does not wait for a systemd that executes itself anew, which may as well not be there.
func Look(ctx context.Context, root *file.Root) (*Manager, error) {
	if _, err := root.Lstat("run/systemd/system"); err != nil { // sd_booted(3)
		return nil, fmt.Errorf("systemd does not run on this host: %w", err)
	}
	m := &Manager{events: make(chan struct{}, 1)}
	m.dial = func() (*godbus.Conn, error) {
		conn, direct := dial(ctx, root, privateSocket, false)
		if direct == nil {
			return conn, nil
		}
		conn, err := dial(ctx, root, busSocket, true)
		if err != nil {
			return nil, fmt.Errorf("%w; nor does its message bus answer: %w", direct, err)
		}
		return conn, nil
	}
	if err := m.connect(ctx, m.dial); err != nil {
		return nil, fmt.Errorf("the host's systemd: %w", err)
	}
	return m, nil
}

// Inside connects to the systemd of a machine through the machine's own message bus. root is the machine's root as its
// processes see it (Machine.Root).
func Inside(ctx context.Context, root *file.Root) (*Manager, error) {
	m := &Manager{events: make(chan struct{}, 1)}
	if err := m.connect(ctx, func() (*godbus.Conn, error) { return dial(ctx, root, busSocket, true) }); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *Manager) connect(ctx context.Context, dial func() (*godbus.Conn, error)) error {
	bus, err := dial()
	if err != nil {
		return err
	}
	// It wants two connections, so that signals that nobody takes do not hold up answers: here they are always taken.
	conn, err := dbus.NewConnection(func() (*godbus.Conn, error) { return bus, nil })
	if err != nil {
		return err
	}
	signals := make(chan *godbus.Signal, 64)
	bus.Signal(signals)
	go func() {
		for signal := range signals {
			if m.concerns(signal) {
				step.Wake(m.events)
			}
		}
		step.Wake(m.events) // closed: whoever waits finds out with the next call
	}()
	if m.subscribed {
		if err := subscribe(ctx, conn); err != nil {
			conn.Close()
			return err
		}
	}
	m.Conn, m.bus, m.closed = conn, bus, bus.Context().Done()
	return nil
}

// subscribe asks systemd for its events. It closes the connection of a systemd that does not answer.
func subscribe(ctx context.Context, conn *dbus.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, greeting)
	defer cancel()
	stop := context.AfterFunc(ctx, conn.Close)
	err := conn.Subscribe()
	if !stop() && err != nil { // its own error is that the connection was closed
		err = fmt.Errorf("its systemd gives %w", unanswered(ctx.Err()))
	}
	return err
}

// concerns tells whether a signal is about a unit that events are about. One that is about no unit always is.
func (m *Manager) concerns(signal *godbus.Signal) bool {
	about := m.about.Load()
	if about == nil {
		return true
	}
	subject := string(signal.Path)
	switch signal.Name {
	case "org.freedesktop.DBus.Properties.PropertiesChanged":
		if !strings.HasPrefix(subject, unitPaths) {
			return !strings.HasPrefix(subject, jobPaths) // a job that is done is told of by JobRemoved
		}
	case "org.freedesktop.systemd1.Manager.JobNew", "org.freedesktop.systemd1.Manager.JobRemoved": // id, path, unit
		if len(signal.Body) > 2 {
			subject, _ = signal.Body[2].(string)
		}
	case "org.freedesktop.systemd1.Manager.UnitNew", "org.freedesktop.systemd1.Manager.UnitRemoved": // unit, path
		if len(signal.Body) > 0 {
			subject, _ = signal.Body[0].(string)
		}
	default:
		return true
	}
	return (*about)[subject]
}

// Object paths of org.freedesktop.systemd1(5).
const (
	unitPaths = "/org/freedesktop/systemd1/unit/"
	jobPaths  = "/org/freedesktop/systemd1/job/"
)

// reexec is more than the time in which a systemd that executes itself anew does not answer, also on a busy host where it does
// so several times. The budget of a step ends the wait before.
const reexec = time.Minute

// ask calls a function that asks systemd something, and calls it again where the answer did not come because the connection
// was lost. The host's systemd closes all connections to its private socket when it executes itself anew, as upgrades make it
// do ("systemctl daemon-reexec").
func (m *Manager) ask(ctx context.Context, call func() error) error {
	ctx, cancel := context.WithTimeout(ctx, reexec)
	defer cancel()
	for {
		err := call()
		if err != nil && ctx.Err() != nil { // which may have closed the connection: that would be the error
			return unanswered(ctx.Err())
		}
		var answer godbus.Error
		if err == nil || m.dial == nil || errors.As(err, &answer) && !away(answer) || errors.Is(err, context.DeadlineExceeded) {
			return unanswered(err)
		}
		m.Close()
		if m.reconnect(ctx) != nil || ctx.Err() != nil {
			return err
		}
	}
}

// away tells whether an answer is the message bus's own: that systemd is not there, as while it executes itself anew.
func away(answer godbus.Error) bool {
	switch answer.Name {
	case "org.freedesktop.DBus.Error.NoReply", "org.freedesktop.DBus.Error.NameHasNoOwner", "org.freedesktop.DBus.Error.ServiceUnknown":
		return true
	}
	return false
}

// reconnect connects until it succeeds or ctx ends.
func (m *Manager) reconnect(ctx context.Context) error {
	for {
		err := m.connect(ctx, m.dial)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond): // nothing tells when the socket is there again
		case <-ctx.Done():
			return err
		}
	}
}

// Reload has systemd run its generators and read all units again.
func (m *Manager) Reload(ctx context.Context) error {
	return m.ask(ctx, func() error { return m.ReloadContext(ctx) })
}

// Events gives an event after one of the units, or any where none is named, changed or got or lost a job, and when the connection
// is lost. Until it is called, systemd has no work with telling; an event makes whoever waits ask it, so units are best named.
func (m *Manager) Events(units ...string) <-chan struct{} {
	if len(units) > 0 {
		about := make(map[string]bool)
		for _, unit := range units {
			about[unit] = true
			about[unitPaths+dbus.PathBusEscape(unit)] = true
		}
		m.about.Store(&about)
	}
	if !m.subscribed {
		m.subscribed = true
		if subscribe(context.Background(), m.Conn) != nil {
			m.Close() // an event, and the next call connects and subscribes anew, or fails
		}
	}
	return m.events
}

// dial connects to a D-Bus socket beneath root: a root file system that is not trusted cannot lead to another socket by a
// symbolic link.
func dial(ctx context.Context, root *file.Root, socket string, hello bool) (*godbus.Conn, error) {
	handle, err := root.Handle(socket)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	if info, err := handle.Stat(); err != nil || info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("/%s is not a socket", socket)
	}
	conn, err := godbus.Dial("unix:path=/proc/self/fd/"+strconv.Itoa(int(handle.Fd())), godbus.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	greet, cancel := context.WithTimeout(ctx, greeting)
	defer cancel()
	stop := context.AfterFunc(greet, func() { conn.Close() })
	err = conn.Auth([]godbus.Auth{godbus.AuthExternal(strconv.Itoa(os.Getuid()))})
	if err == nil && hello {
		err = conn.Hello()
	}
	if !stop() && err != nil { // its own error is that the connection was closed
		err = fmt.Errorf("no answer on /%s: %w: see whether what serves it is stopped, or overloaded", socket, greet.Err())
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// greeting bounds the first words on a connection: a process that is stopped (SIGSTOP, a frozen cgroup) takes connections, and never
// answers. It is what libsystemd gives every call (BUS_DEFAULT_TIMEOUT), more than a bus needs that is just being started.
const greeting = 25 * time.Second

// unanswered says in plain words that there was no answer in time.
func unanswered(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no answer: %w", err)
	}
	return err
}

// Version returns systemd's version, as in "257.13-1~deb13u1".
func (m *Manager) Version() (string, error) {
	text, err := m.GetManagerProperty("Version")
	if err != nil {
		return "", err
	}
	return parseVersion(text)
}

// Booted returns when this systemd began to run, UserspaceTimestamp of org.freedesktop.systemd1(5).
func (m *Manager) Booted() (time.Time, error) {
	text, err := m.GetManagerProperty("UserspaceTimestamp") // a variant as godbus writes it: @t 1764547200000000
	if err != nil {
		return time.Time{}, err
	}
	micro, err := strconv.ParseInt(strings.TrimPrefix(text, "@t "), 10, 64)
	if err != nil || micro <= 0 {
		return time.Time{}, strconv.ErrRange // nobody is told
	}
	return time.UnixMicro(micro), nil
}

// parseVersion reads a string as godbus writes a variant. A machine's systemd may say anything, and godbus' own reader panics on some
// of that ("[]", 5.1.0).
func parseVersion(text string) (string, error) {
	version, err := strconv.Unquote(text)
	if err != nil || text[0] != '"' {
		return "", fmt.Errorf("the version of systemd: %s is not a string", text)
	}
	return version, nil
}

// Unit is the state of a unit, in the words of org.freedesktop.systemd1(5).
type Unit struct {
	Name, Load, Active, Sub string
	// Job is the type of the unit's job ("start", "restart", …); empty where there is none.
	Job string
}

// Busy tells whether the unit is about to change by itself: it has a job, or waits for its automatic restart. The latter
// is not always a job: "auto-restart" (up to systemd 257 at least), "auto-restart-queued" (254 and later).
func (u Unit) Busy() bool {
	return u.Job != "" || u.Sub == "auto-restart" || u.Sub == "auto-restart-queued"
}

// Running tells whether the unit is up, or on its way up or down.
func (u Unit) Running() bool { return u.Active != "inactive" && u.Active != "failed" }

// Units returns the state of the named units at one moment, in the order of the names.
func (m *Manager) Units(ctx context.Context, names ...string) ([]Unit, error) {
	var list []dbus.UnitStatus
	err := m.ask(ctx, func() (err error) {
		list, err = m.ListUnitsByNamesContext(ctx, names)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ask systemd for its units: %w", err)
	}
	found := make(map[string]Unit, len(list))
	for _, u := range list {
		found[u.Name] = Unit{u.Name, u.LoadState, u.ActiveState, u.SubState, u.JobType}
	}
	units := make([]Unit, len(names))
	for i, name := range names {
		u, ok := found[name]
		if !ok {
			return nil, fmt.Errorf("ask systemd for its units: no answer for %s", name)
		}
		units[i] = u
	}
	return units, nil
}

// Unit returns the state of one unit.
func (m *Manager) Unit(ctx context.Context, name string) (Unit, error) {
	units, err := m.Units(ctx, name)
	if err != nil {
		return Unit{}, err
	}
	return units[0], nil
}

// Match returns the loaded units whose names match one of the patterns (glob(7)).
func (m *Manager) Match(ctx context.Context, patterns ...string) ([]Unit, error) {
	var list []dbus.UnitStatus
	err := m.ask(ctx, func() (err error) {
		list, err = m.ListUnitsByPatternsContext(ctx, nil, patterns)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ask systemd for its units: %w", err)
	}
	units := make([]Unit, len(list))
	for i, u := range list {
		units[i] = Unit{u.Name, u.LoadState, u.ActiveState, u.SubState, u.JobType}
	}
	return units, nil
}

// ControlGroup returns the cgroup of a service as this systemd sees it, ControlGroup= of org.freedesktop.systemd1(5); empty: it has
// none, as one that is not loaded. Unlike a look at all its properties it does not make systemd load the unit, and with it all those
// that it names, which takes tens of milliseconds.
func (m *Manager) ControlGroup(ctx context.Context, service string) (string, error) {
	var path godbus.ObjectPath
	var value godbus.Variant
	err := m.ask(ctx, func() error {
		object := m.bus.Object("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
		if err := object.CallWithContext(ctx, "org.freedesktop.systemd1.Manager.GetUnit", 0, service).Store(&path); err != nil {
			return err
		}
		return m.bus.Object("org.freedesktop.systemd1", path).CallWithContext(ctx,
			"org.freedesktop.DBus.Properties.Get", 0, "org.freedesktop.systemd1.Service", "ControlGroup").Store(&value)
	})
	if missing(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("ask systemd for %s: %w", service, err)
	}
	group, _ := value.Value().(string)
	return group, nil
}

// Service holds what systemd knows of a service beyond its state.
type Service struct {
	Unit
	FragmentPath   string
	InvocationID   string // hexadecimal
	NRestarts      uint32
	StatusText     string // the last STATUS= of sd_notify(3)
	Result         string // "success", "exit-code", "timeout", …
	ExecMainStatus int32  // exit status, or the signal that ended it
	ControlGroup   string // path below the cgroup file system, as this systemd sees it
	// When the unit last left "inactive" or "failed", became active, ceased to be so, and came back to "inactive" or "failed", on
	// CLOCK_MONOTONIC; 0: never.
	InactiveExit, ActiveEnter, ActiveExit, InactiveEnter time.Duration
	// ActiveSince is ActiveEnter on the clock on the wall; zero: never.
	ActiveSince time.Time
}

// Service returns the properties of a service unit.
func (m *Manager) Service(ctx context.Context, name string) (Service, error) {
	var p map[string]any
	err := m.ask(ctx, func() (err error) {
		p, err = m.GetAllPropertiesContext(ctx, name)
		return err
	})
	if err != nil {
		return Service{}, fmt.Errorf("ask systemd for %s: %w", name, err)
	}
	s := Service{Unit: Unit{Name: name}}
	get(p, "LoadState", &s.Load)
	get(p, "ActiveState", &s.Active)
	get(p, "SubState", &s.Sub)
	get(p, "FragmentPath", &s.FragmentPath)
	get(p, "NRestarts", &s.NRestarts)
	get(p, "StatusText", &s.StatusText)
	get(p, "Result", &s.Result)
	get(p, "ExecMainStatus", &s.ExecMainStatus)
	get(p, "ControlGroup", &s.ControlGroup)
	var id []byte
	get(p, "InvocationID", &id)
	s.InvocationID = fmt.Sprintf("%x", id)
	for name, field := range map[string]*time.Duration{
		"InactiveExit": &s.InactiveExit, "ActiveEnter": &s.ActiveEnter, "ActiveExit": &s.ActiveExit, "InactiveEnter": &s.InactiveEnter,
	} {
		var micro uint64
		get(p, name+"TimestampMonotonic", &micro)
		*field = time.Duration(micro) * time.Microsecond
	}
	var wall uint64
	if get(p, "ActiveEnterTimestamp", &wall); wall != 0 {
		s.ActiveSince = time.UnixMicro(int64(wall))
	}
	return s, nil
}

// ErrTimeout is the kind of error that Run returns when the program was not done in time.
var ErrTimeout = errors.New("not done in time")

// failure says why a service failed, in a few words.
func (s Service) failure() error {
	switch s.Result {
	case "exit-code":
		if s.ExecMainStatus == 203 { // EXIT_EXEC, see systemd.exec(5)
			return errors.New("cannot be executed (exit status 203)")
		}
		return fmt.Errorf("exit status %d", s.ExecMainStatus)
	case "signal", "core-dump":
		return fmt.Errorf("killed by signal %d (%s)", s.ExecMainStatus, unix.SignalName(unix.Signal(s.ExecMainStatus)))
	case "timeout":
		return ErrTimeout
	case "resources":
		return errors.New("could not be executed (result resources, as where systemd itself lacks libraries or memory)")
	}
	return errors.New(s.Result) // in systemd's words: oom-kill, …
}

// get leaves the field empty where a property is missing or, in some version, of another type.
func get[T any](properties map[string]any, name string, field *T) {
	if v, ok := properties[name].(T); ok {
		*field = v
	}
}

// ErrJob is the kind of error that Start and Stop return when systemd did not bring the unit there.
var ErrJob = errors.New("job failed")

// Start starts a unit and returns when its job is done.
func (m *Manager) Start(ctx context.Context, unit string) error {
	return m.job(ctx, unit, m.StartUnitContext)
}

// Enqueue asks for the start of a unit and does not wait for it. It gives way to a job that the unit has already.
func (m *Manager) Enqueue(ctx context.Context, unit string) error {
	if _, err := m.StartUnitContext(ctx, unit, "fail", nil); err != nil {
		return fmt.Errorf("%s: %w", unit, err)
	}
	return nil
}

// Stop stops a unit and returns when its job is done.
func (m *Manager) Stop(ctx context.Context, unit string) error {
	return m.job(ctx, unit, m.StopUnitContext)
}

func (m *Manager) job(ctx context.Context, unit string, enqueue func(context.Context, string, string, chan<- string) (int, error)) error {
	result := make(chan string, 1)
	if _, err := enqueue(ctx, unit, "replace", result); err != nil {
		return fmt.Errorf("%s: %w", unit, err)
	}
	return m.await(ctx, unit, result)
}

// await waits for the result of a unit's job.
func (m *Manager) await(ctx context.Context, unit string, result <-chan string) error {
	select {
	case r := <-result:
		if r != "done" && r != "skipped" {
			return fmt.Errorf("%s: %w: %s", unit, ErrJob, r)
		}
		return nil
	case <-m.closed:
		return fmt.Errorf("%s: the connection to its systemd was lost", unit)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", unit, ctx.Err())
	}
}
