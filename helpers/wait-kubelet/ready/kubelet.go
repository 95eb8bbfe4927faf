package ready

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/helpers/kubelet"
	"berth/helpers/machine"
	"berth/helpers/step"
)

const service = "kubelet.service"

// health is where kubelet serves /healthz. The goal state cannot move it: goalstate refuses healthzBindAddress and
// healthzPort.
var health = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 10248)

// Up waits until the slot's node is ready: its chain is up, and its kubelet is active, healthy and has not restarted for
// the settle time.
func Up(ctx context.Context, s *step.Step) error {
	begin := time.Now()
	state, slot, err := s.Goal()
	if err != nil {
		return err
	}
	last, lastGood := state.LastGood[s.Slot]
	if lastGood {
		s.Warn("the goal state is broken, and the slot goes on with its last good one, recorded %s: see berth check",
			last.Time.Format(time.RFC3339))
	}
	host, err := machine.Host(ctx, s.Root)
	if err != nil {
		return err
	}
	defer host.Close()
	w := &watcher{
		step: s, host: host, machine: slot.MachineName(), timeouts: slot.Timeouts,
		events: make(chan struct{}, 1),
		// A restart's stop may not be over yet, although Down waits for it: Down itself can be killed.
		halt: machine.NewHalt(s.Root, host, slot.MachineName()),
	}
	defer w.disconnect()
	go step.Forward(ctx, host.Events(machine.Chain(s.Slot)...), w.events)
	// It has no deadline of its own: each step has one, and before the first a host that boots may wait for its network.
	if err := s.Wait(ctx, "the steps of slot "+s.Slot, w.events, w.chain); err != nil {
		return err
	}
	s.Budget = slot.Timeouts.Ready + slot.Timeouts.Settle
	ctx, cancel := context.WithTimeout(ctx, s.Budget)
	defer cancel()
	err = s.Wait(ctx, "kubelet in slot "+s.Slot, w.events, w.check)
	var failure *step.Failure
	if errors.As(err, &failure) && failure.Code == step.ExitNotReady {
		failure.Err = fmt.Errorf("%w%s", failure.Err, machine.Journal(context.WithoutCancel(ctx), slot.MachineName(), service, begin))
	}
	if err == nil {
		s.Status("the node in slot %s is ready", s.Slot)
		if lastGood {
			s.Status("the node in slot %s is ready, with its last good goal state", s.Slot)
		} else if err := record(ctx, s, host); err != nil {
			s.Warn("the goal state is not recorded as the slot's last good one: %v", err)
		}
		s.Notice("the node in slot %s is ready", s.Slot)
		if slot.Kubelet.Exec == nil && !hasCertificate(s.Root, slot) {
			// It is healthy all the same, and tries for ever. Whether the cluster takes it is for Kubernetes to tell, but nobody looks
			// there for a node that has never been seen.
			s.Notice("kubelet has no client certificate yet: if it stays so, the cluster refuses the bootstrap token, or nobody has approved "+
				"the request (kubectl get csr): see journalctl -M %s -u %s", slot.MachineName(), service)
		}
	}
	return err
}

// record has the goal state stored as the slot's last good one, and does not wait for it. One that was changed while the slot started
// is not: some steps may have read the old one and some the new one.
func record(ctx context.Context, s *step.Step, host *machine.Manager) error {
	same, err := store.Unchanged(s.Root, s.Slot)
	switch {
	case err != nil:
		return err
	case !same:
		s.Notice("the goal state is not recorded as the slot's last good one, as it was changed while the slot started: see berth diff %s, "+
			"and systemctl restart node@%s", s.Slot, s.Slot)
		return nil
	}
	return host.Enqueue(ctx, "node-record-applied@"+s.Slot+".service")
}

// hasCertificate tells whether kubelet has been given a certificate for its bootstrap token, in this start or an earlier one.
func hasCertificate(host *file.Root, slot *goalstate.Slot) bool {
	root, err := host.Sub("var/lib/machines/" + slot.MachineName())
	if err != nil {
		return false
	}
	defer root.Close()
	_, err = root.Stat(path.Join(kubelet.PKI, kubelet.ClientCertificate))
	return err == nil
}

// watcher remembers what has to stay the same for the settle time.
type watcher struct {
	step     *step.Step
	host     *machine.Manager
	machine  string         // its name
	inner    *machine.Inner // nil: not connected
	events   chan struct{}  // of the host and of the machine
	timeouts goalstate.Timeouts
	halt     *machine.Halt

	cgroup      string    // of the machine, as the host's systemd tells it; empty: not asked yet
	run         run       // of kubelet
	since, last time.Time // when that run was first, and last, seen healthy
}

// run identifies one uninterrupted run of a service.
type run struct {
	invocation string
	restarts   uint32
}

// farPause is the time between two looks at the steps while the machine has not booted. A start has some forty events of units before
// that, and systemd enough to do.
const farPause = 50 * time.Millisecond

// chain is one look at the steps. It already looks at kubelet while the last one ends, so that there is less to do when it has.
func (w *watcher) chain(ctx context.Context) (step.State, error) {
	steps := machine.Chain(w.step.Slot)
	units, err := w.host.Units(ctx, steps...)
	if err != nil {
		return step.State{}, err
	}
	again, err := w.halt.Repeat(ctx, units[machine.MachineStep])
	if err != nil {
		return step.State{}, err
	}
	pending, err := pendingOf(ctx, w.step, w.host, units)
	var pause time.Duration
	if err == nil && pending == steps[len(steps)-1] {
		_, _ = w.look(ctx) // what is wrong with it is told when the steps are done
	} else if slices.Index(steps, pending) <= machine.BusStep {
		pause = farPause
	}
	return step.State{Done: err == nil && pending == "", Seen: pending, Again: again, Pause: pause}, err
}

// check is one look at kubelet and at the chain below it.
func (w *watcher) check(ctx context.Context) (step.State, error) {
	// While a step is about to change, this very process is about to be ended: a stop or restart takes node@ along.
	units, err := w.host.Units(ctx, machine.Chain(w.step.Slot)...)
	if err != nil {
		return step.State{}, err
	}
	pending, err := pendingOf(ctx, w.step, w.host, units)
	if err != nil || pending != "" {
		return step.State{Seen: pending}, err
	}
	return w.look(ctx)
}

// look is one look at kubelet.
func (w *watcher) look(ctx context.Context) (step.State, error) {
	found, err := w.kubelet(ctx)
	if err != nil {
		w.disconnect()
		w.since = time.Time{}
		return step.State{Seen: err.Error(), Again: w.timeouts.Poll}, nil
	}
	if found.Active == "failed" {
		return step.State{}, errors.New("kubelet failed: " + w.inner.Explain(ctx, service))
	}
	if found.Active != "active" {
		w.since = time.Time{}
		return step.State{Seen: fmt.Sprintf("%s is %s (%s)", service, found.Active, found.Sub)}, nil
	}
	r := run{found.InvocationID, found.NRestarts}
	same := r == w.run && !w.since.IsZero()
	if !same || time.Since(w.last) >= w.timeouts.Poll {
		if err := w.healthy(ctx, found); err != nil {
			w.since = time.Time{}
			return step.State{Seen: err.Error(), Again: w.timeouts.Poll}, nil
		}
		w.last = time.Now()
	}
	if !same {
		w.run, w.since = r, w.last
	}
	left := w.timeouts.Settle - time.Since(w.since)
	return step.State{
		Done:  left <= 0,
		Seen:  fmt.Sprintf("it is healthy, and must stay up for %v", w.timeouts.Settle),
		Again: left,
	}, nil
}

// kubelet asks the machine's systemd for kubelet's state. The connection is made anew after it was lost: a message bus that
// is restarted, or a machine that is about to be, is no reason to give up within the budget.
func (w *watcher) kubelet(ctx context.Context) (machine.Service, error) {
	if w.inner == nil {
		inner, err := machine.EnterBy(ctx, w.step.Root, w.host, w.machine)
		if err != nil {
			return machine.Service{}, err
		}
		w.inner = inner
		go step.Forward(ctx, inner.Events(service), w.events)
	}
	if w.since.IsZero() {
		// One that has not been started is not loaded. To be asked for it, systemd would load it and unload it again, and tell of both.
		units, err := w.inner.Match(ctx, service)
		if err != nil || len(units) == 0 {
			return machine.Service{Unit: machine.Unit{Name: service, Active: "inactive", Sub: "dead"}}, err
		}
	}
	return w.inner.Service(ctx, service)
}

func (w *watcher) disconnect() {
	if w.inner != nil {
		w.inner.Close()
		w.inner = nil
		w.cgroup = ""
	}
}
