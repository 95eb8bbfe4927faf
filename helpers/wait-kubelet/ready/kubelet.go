package ready

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/step"
)

const kubelet = "kubelet.service"

// Up waits until the slot's node is ready: its chain is up, and its kubelet is active, healthy and has not restarted for
// the settle time.
func Up(ctx context.Context, s *step.Step) error {
	_, slot, err := s.Goal()
	if err != nil {
		return err
	}
	host, err := machine.Host(ctx, s.Root)
	if err != nil {
		return err
	}
	defer host.Close()
	if err := watchChain(ctx, s, host); err != nil {
		return err
	}
	s.Budget = slot.Timeouts.Ready + slot.Timeouts.Settle
	ctx, cancel := context.WithTimeout(ctx, s.Budget)
	defer cancel()
	inner, err := machine.Enter(ctx, s.Root, slot.MachineName())
	if err != nil {
		return err
	}
	defer inner.Close()
	w := &watcher{step: s, host: host, inner: inner, health: healthAddress(slot), timeouts: slot.Timeouts}
	err = s.Wait(ctx, "kubelet in slot "+s.Slot, step.Merge(ctx, host.Events(), inner.Events()), w.check)
	var failure *step.Failure
	if errors.As(err, &failure) && failure.Code == step.ExitNotReady {
		failure.Err = fmt.Errorf("%w%s", failure.Err, machine.Journal(context.WithoutCancel(ctx), inner.Name, kubelet))
	}
	if err == nil {
		s.Status("the node in slot %s is ready", s.Slot)
		s.Notice("the node in slot %s is ready", s.Slot)
	}
	return err
}

// watcher remembers what has to stay the same for the settle time.
type watcher struct {
	step     *step.Step
	host     *machine.Manager
	inner    *machine.Inner
	health   netip.AddrPort // the zero value: not asked
	timeouts goalstate.Timeouts

	run   run       // of kubelet
	since time.Time // when that run was first seen healthy
}

// run identifies one uninterrupted run of a service.
type run struct {
	invocation string
	restarts   uint32
}

// check is one look at kubelet and at the chain below it.
func (w *watcher) check(ctx context.Context) (step.State, error) {
	// While a step is about to change, this very process is about to be ended: a stop or restart takes node@ along.
	pending, err := chainPending(ctx, w.step, w.host)
	if err != nil || pending != "" {
		return step.State{Seen: pending}, err
	}
	service, err := w.inner.Service(ctx, kubelet)
	if err != nil {
		return step.State{}, err
	}
	if service.Active == "failed" {
		return step.State{}, errors.New("kubelet failed: " + w.inner.Explain(ctx, kubelet))
	}
	if service.Active != "active" {
		w.since = time.Time{}
		return step.State{Seen: fmt.Sprintf("%s is %s (%s)", kubelet, service.Active, service.Sub)}, nil
	}
	if w.health.IsValid() {
		if err := w.healthy(ctx, service); err != nil {
			w.since = time.Time{}
			return step.State{Seen: err.Error(), Again: w.timeouts.Poll}, nil
		}
	}
	now := time.Now()
	if r := (run{service.InvocationID, service.NRestarts}); r != w.run || w.since.IsZero() {
		w.run, w.since = r, now
	}
	left := w.timeouts.Settle - now.Sub(w.since)
	return step.State{
		Done:  left <= 0,
		Seen:  fmt.Sprintf("it is healthy, and must stay up for %v", w.timeouts.Settle),
		Again: left,
	}, nil
}

// healthAddress is where kubelet serves /healthz: healthzBindAddress and healthzPort of its configuration. Port 0 turns it
// off (KubeletConfiguration v1beta1).
func healthAddress(slot *goalstate.Slot) netip.AddrPort {
	address, port := netip.AddrFrom4([4]byte{127, 0, 0, 1}), int64(10248)
	if s, ok := slot.Kubelet.Config["healthzBindAddress"].(string); ok {
		if a, err := netip.ParseAddr(s); err == nil {
			address = a
		}
	}
	if p, ok := slot.Kubelet.Config["healthzPort"].(int64); ok {
		port = p
	}
	if port <= 0 || port > 0xffff {
		return netip.AddrPort{}
	}
	switch { // a server on all addresses is asked on the loopback one
	case address == netip.IPv4Unspecified():
		address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case address == netip.IPv6Unspecified():
		address = netip.IPv6Loopback()
	}
	return netip.AddrPortFrom(address, uint16(port))
}
