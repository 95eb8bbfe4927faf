// machine-unit starts a unit inside a slot's machine, or stops it with --stop, through the machine's own systemd.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/step"
)

func main() {
	var stop bool
	os.Exit(step.Main(step.Command{
		Name: "machine-unit",
		About: `Starts UNIT inside the slot's machine, as soon as D-Bus there answers, and returns when its start is done; fails with the
unit's last log lines.
With --stop, stops it. A machine that is not there has nothing to stop.`,
		Args:   []string{"SLOT", "UNIT"},
		Budget: 2 * time.Minute,
		Flags:  func(flags *flag.FlagSet) { flags.BoolVar(&stop, "stop", false, "stop the unit") },
		Run: func(ctx context.Context, s *step.Step) error {
			if stop {
				return stopUnit(ctx, s, s.Args["UNIT"])
			}
			return startUnit(ctx, s, s.Args["UNIT"])
		},
	}))
}

func stopUnit(ctx context.Context, s *step.Step, unit string) error {
	inner, err := machine.Enter(ctx, s.Root, goalstate.MachineName(s.Slot))
	if errors.Is(err, machine.ErrNoMachine) || errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer inner.Close()
	s.Status("stopping %s", unit)
	return inner.Stop(ctx, unit)
}

func startUnit(ctx context.Context, s *step.Step, unit string) error {
	// No longer than wait-dbus waits, which begins at the same time as the step of containerd and has half of its budget.
	name := goalstate.MachineName(s.Slot)
	if _, err := machine.Await(ctx, s, name, s.Budget/2); err != nil {
		return err
	}
	inner, err := machine.Enter(ctx, s.Root, name)
	if err != nil {
		return err
	}
	defer inner.Close()
	s.Status("starting %s", unit)
	err = inner.Start(ctx, unit)
	switch {
	case err == nil:
		s.Status("%s is started", unit)
		return nil
	case errors.Is(err, machine.ErrJob):
		return fmt.Errorf("machine %s: %w: %s", inner.Name, err, inner.Explain(ctx, unit))
	case ctx.Err() != nil:
		return s.Late(fmt.Sprintf("start of %s in machine %s", unit, inner.Name), explainLate(s, unit))
	}
	return fmt.Errorf("machine %s: %w", inner.Name, err)
}

// explainLate looks once more after the budget is used up, for a few seconds at the most.
// The connection that there was has ended with the budget.
func explainLate(s *step.Step, unit string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	inner, err := machine.Enter(ctx, s.Root, goalstate.MachineName(s.Slot))
	if err != nil {
		return err.Error()
	}
	defer inner.Close()
	return inner.Explain(ctx, unit)
}
