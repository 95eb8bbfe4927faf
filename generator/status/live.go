package status

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/helpers/machine"
	"berth/helpers/step"
)

// patience bounds a question to a machine: what answers there is not trusted to do so.
const patience = 2 * time.Second

// Live sees the facts of a host that runs.
type Live struct {
	Gatherer
	bus    *machine.Manager
	inner  map[string]*machine.Inner
	cancel map[string]context.CancelFunc
	events chan struct{}
}

// NewLive connects to the systemd of the host whose "/" is root. Without root's rights less is seen: nothing of the inside of
// machines, and no journals. ctx ends the stream of its events.
func NewLive(ctx context.Context, root *file.Root) (*Live, error) {
	bus, err := machine.Look(ctx, root)
	if err != nil {
		return nil, err
	}
	l := &Live{
		Gatherer: Gatherer{Root: root, Bus: bus, Lines: machine.Lines}, bus: bus,
		inner: map[string]*machine.Inner{}, cancel: map[string]context.CancelFunc{}, events: make(chan struct{}, 1),
	}
	l.Inside = func(_ context.Context, name string) *Inside { return l.inside(ctx, name) }
	go step.Forward(ctx, bus.Events(), l.events)
	return l, nil
}

// Events gives an event after something changed in the systemd of the host or of a machine that was seen.
func (l *Live) Events() <-chan struct{} { return l.events }

// Close ends all connections.
func (l *Live) Close() {
	for name := range l.inner {
		l.leave(name)
	}
	l.bus.Close()
}

func (l *Live) leave(name string) {
	l.inner[name].Close()
	l.cancel[name]()
	delete(l.inner, name)
	delete(l.cancel, name)
}

// inside asks the systemd of a machine; nil: it cannot be asked. A connection is kept for the next time, for its events.
func (l *Live) inside(ctx context.Context, name string) *Inside {
	if in := l.ask(ctx, name); in != nil {
		return in
	}
	// A connection to a machine that has ended since, or whose message bus was restarted, is made anew.
	if l.inner[name] != nil {
		l.leave(name)
	}
	connection, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(patience, cancel)
	inner, err := machine.EnterBy(connection, l.Root, l.bus, name)
	if !late.Stop() || err != nil {
		cancel()
		return nil
	}
	l.inner[name], l.cancel[name] = inner, cancel
	go step.Forward(connection, inner.Events(), l.events)
	return l.ask(ctx, name)
}

func (l *Live) ask(ctx context.Context, name string) *Inside {
	inner := l.inner[name]
	if inner == nil || !inner.Alive() {
		return nil
	}
	late := time.AfterFunc(patience, l.cancel[name]) // the version's call takes no context
	defer late.Stop()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var in Inside
	var err error
	if in.Systemd, err = inner.Version(); err != nil {
		return nil
	}
	if in.Containerd, err = inner.Service(ctx, "containerd.service"); err != nil {
		return nil
	}
	if in.Kubelet, err = inner.Service(ctx, kubelet); err != nil {
		return nil
	}
	return &in
}

// Now is the present moment.
func Now() Moment {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // it has no way to fail
	return Moment{time.Now(), time.Duration(t.Nano())}
}
