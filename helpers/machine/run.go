package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// Program is a program that this systemd is to run once.
type Program struct {
	Unit        string // name of the service that it runs as
	Description string
	Args        []string // the first is its absolute path
}

// outputLimit bounds what Run keeps of an output. It is also what a pipe holds (pipe(7)).
const outputLimit = 64 << 10

// Run runs a program as a transient service and returns the end of what it wrote to standard output and standard error, at
// most 64 KiB, also where it failed. When the program ends, and before ctx's deadline, all processes that it left are
// killed. A service of that name, which a run that was killed can leave behind, is stopped first.
func (m *Manager) Run(ctx context.Context, p Program) (output string, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer r.Close()
	defer w.Close()
	tail := newTail(r)
	result, err := m.startTransient(ctx, p, w)
	w.Close()
	if err != nil {
		return "", fmt.Errorf("%s: %w", p.Unit, err)
	}
	err = m.await(ctx, p.Unit, result)
	output = tail.end()
	if errors.Is(err, ErrJob) {
		// The service of a program that failed stays until its state is taken back.
		if s, e := m.Service(ctx, p.Unit); e == nil {
			err = fmt.Errorf("%s: %w", p.Unit, s.failure())
		}
		_ = m.ResetFailedUnitContext(ctx, p.Unit)
	}
	return output, err
}

// startTransient begins to run a program, with w as its output.
func (m *Manager) startTransient(ctx context.Context, p Program, w *os.File) (result chan string, err error) {
	fd := int(w.Fd())
	if err := unix.SetNonblock(fd, false); err != nil { // programs do not expect it of their output
		return nil, err
	}
	property := func(name string, value any) dbus.Property {
		return dbus.Property{Name: name, Value: godbus.MakeVariant(value)}
	}
	properties := []dbus.Property{
		dbus.PropDescription(p.Description),
		dbus.PropType("oneshot"),
		// A $ is not to be replaced.
		property("ExecStartEx", []execStart{{p.Args[0], p.Args, []string{"no-env-expand"}}}),
		property("StandardOutputFileDescriptor", godbus.UnixFD(fd)),
		property("StandardErrorFileDescriptor", godbus.UnixFD(fd)),
		// Nothing that the program leaves behind, or that does not end in time, is worth a second wait.
		property("KillSignal", int32(unix.SIGKILL)),
	}
	if deadline, ok := ctx.Deadline(); ok {
		left := max(time.Until(deadline)*9/10, time.Millisecond) // the rest is for the answer
		properties = append(properties, property("TimeoutStartUSec", uint64(left.Microseconds())))
	}
	for {
		result = make(chan string, 1)
		_, err = m.StartTransientUnitContext(ctx, p.Unit, "replace", properties, result)
		var e godbus.Error
		if !errors.As(err, &e) || e.Name != "org.freedesktop.systemd1.UnitExists" {
			return result, err
		}
		if err := m.Stop(ctx, p.Unit); err != nil && !missing(err) {
			return nil, err
		}
		_ = m.ResetFailedUnitContext(ctx, p.Unit) // it need not have failed
		select {
		case <-m.events:
		case <-time.After(10 * time.Millisecond): // its removal may have been an event before
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// execStart is a command as ExecStartEx= of org.freedesktop.systemd1(5) takes it, an array of (sasas).
type execStart struct {
	Path  string
	Args  []string
	Flags []string
}

// missing tells whether an error says that there is no such unit.
func missing(err error) bool {
	var e godbus.Error
	return errors.As(err, &e) && e.Name == "org.freedesktop.systemd1.NoSuchUnit"
}

// tail keeps the end of what comes out of a pipe.
type tail struct {
	pipe *os.File
	done chan struct{}
	kept []byte
	cut  bool
}

func newTail(pipe *os.File) *tail {
	t := &tail{pipe: pipe, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		buf := make([]byte, outputLimit)
		for {
			n, err := pipe.Read(buf)
			t.keep(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	return t
}

func (t *tail) keep(b []byte) {
	t.kept = append(t.kept, b...)
	if n := len(t.kept) - outputLimit; n > 0 {
		t.kept, t.cut = append(t.kept[:0], t.kept[n:]...), true
	}
}

// end returns what a program has written that ended, without waiting for whoever else may have the other end of the pipe:
// what it wrote is in the pipe.
func (t *tail) end() string {
	_ = t.pipe.SetReadDeadline(time.Unix(0, 1))
	<-t.done
	if conn, err := t.pipe.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) {
			buf := make([]byte, outputLimit)
			n, _ := unix.Read(int(fd), buf) // os.Pipe's ends do not block
			t.keep(buf[:max(n, 0)])
		})
	}
	text := strings.ToValidUTF8(string(t.kept), "\uFFFD")
	if t.cut { // begin with a whole line
		_, text, _ = strings.Cut(text, "\n")
	}
	return strings.TrimRight(text, "\n")
}
