// Package ready decides when a slot's node is ready, and why it is not.
package ready

import (
	"context"
	"fmt"
	"strings"
	"time"

	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/step"
)

// Down waits until no step of the slot is being stopped any more. A restart's stop is over when its job has become a start.
func Down(ctx context.Context, s *step.Step) error {
	host, err := machine.Host(ctx, s.Root)
	if err != nil {
		return err
	}
	defer host.Close()
	halt := machine.NewHalt(s.Root, host, goalstate.MachineName(s.Slot))
	chain := machine.Chain(s.Slot)
	return s.Wait(ctx, "the end of slot "+s.Slot, host.Events(chain...), func(ctx context.Context) (step.State, error) {
		// Only those that are loaded: to be asked for the others would make systemd load them again, one after the other as they end.
		units, err := host.Match(ctx, chain...)
		if err != nil {
			return step.State{}, err
		}
		var stopping []string
		var nspawn machine.Unit
		for _, u := range units {
			if u.Name == chain[machine.MachineStep] {
				nspawn = u
			}
			if u.Job == "stop" || u.Job == "restart" || u.Job == "try-restart" {
				stopping = append(stopping, u.Name)
			}
		}
		again, err := halt.Repeat(ctx, nspawn)
		return step.State{Done: len(stopping) == 0, Seen: strings.Join(stopping, " "), Again: again}, err
	})
}

// pendingOf names the first step that was not done at the moment of units, nothing where all were, and fails where that step has failed or
// nothing brings the chain up. One that failed behind a step that is still busy waits for that one: it may be why.
func pendingOf(ctx context.Context, s *step.Step, host *machine.Manager, units []machine.Unit) (string, error) {
	pending, failed, busy := "", false, false
	for _, u := range units {
		busy = busy || u.Busy() || u.Active == "deactivating" // whether it fails or is tried again is not known yet
		if pending == "" && (u.Active != "active" || u.Job != "") {
			pending = u.Name
			failed = u.Active == "failed" && u.Job == "" && u.Name != units[machine.MachineStep].Name
		}
	}
	switch {
	case pending == "":
		return "", nil
	case busy && !failed:
		return pending, hopeless(ctx, host, units[machine.MachineStep])
	}
	return "", why(ctx, s, host, units, pending)
}

// hopeless is an error where the machine came down by a failure and waits for systemd to start it again. Systemd does so in
// any case, with the whole chain and node@: what ends is this try. It is of no use to count tries and to be patient for the
// first few: each of them ends this process, and NRestarts= is 0 again with each, as the restart that it counts becomes a
// plain start by the stop of the units that the machine's is PartOf= (seen with systemd 257).
//
// A job is the restart itself, which has begun. A machine that reboots has not failed (SuccessExitStatus=133).
func hopeless(ctx context.Context, host *machine.Manager, u machine.Unit) error {
	if u.Sub != "auto-restart" || u.Job != "" {
		return nil
	}
	s, err := host.Service(ctx, u.Name)
	if err != nil || s.Result == "success" {
		return err
	}
	return failed(ctx, host, u)
}

// why is the error for a chain that is not up and that nothing brings up.
func why(ctx context.Context, s *step.Step, host *machine.Manager, units []machine.Unit, pending string) error {
	for _, u := range units {
		switch {
		case u.Load != "loaded": // "masked", "not-found", "bad-setting", …
			return fmt.Errorf("step %s cannot run: its unit is %s (see: systemctl cat %s)", u.Name, u.Load, u.Name)
		case u.Active == "failed":
			return failed(ctx, host, u)
		}
	}
	node, err := host.Service(ctx, "node@"+s.Slot+".service")
	if err != nil {
		return err
	}
	if strings.HasSuffix(node.FragmentPath, "/node@.service") { // the static one; the slot's own may also be part of the image
		return step.Invalidf("slot %s is in the goal state, but systemd has not read it (%s answers): systemctl daemon-reload",
			s.Slot, node.FragmentPath)
	}
	return fmt.Errorf("step %s was stopped while the node started", pending)
}

// failed tells which step failed and why: what it said last, and how to see more. The exit codes that mean "trying again
// does not help" are handed on.
func failed(ctx context.Context, host *machine.Manager, unit machine.Unit) error {
	s, err := host.Service(ctx, unit.Name)
	if err != nil {
		return err
	}
	own := strings.HasPrefix(unit.Name, "node-")
	reason := s.StatusText
	if !own || s.Result != "exit-code" || reason == "" {
		reason = "result " + s.Result
	}
	err = fmt.Errorf("step %s failed: %s (see: journalctl -u %s)", unit.Name, reason, unit.Name)
	if !own {
		err = fmt.Errorf("%w%s", err, machine.Journal(ctx, "", unit.Name, time.Time{}))
	}
	switch int(s.ExecMainStatus) {
	case step.ExitUsage, step.ExitInvalid, step.ExitNotReady, step.ExitRefused:
		if own && s.Result == "exit-code" {
			return &step.Failure{Code: int(s.ExecMainStatus), Err: err}
		}
	}
	return err
}
