// machine-unit starts units inside a slot's machine, or stops them with --stop, through the machine's own systemd.
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
		About: `Starts each UNIT inside the slot's machine, as soon as D-Bus there answers, and returns when its start is done; fails with the
unit's last log lines.
With --stop, stops them, one after the other. A machine that is not there has nothing to stop.`,
		Args:   []string{"SLOT", "UNIT…"},
		Budget: 2 * time.Minute,
		Flags:  func(flags *flag.FlagSet) { flags.BoolVar(&stop, "stop", false, "stop the units") },
		Run: func(ctx context.Context, s *step.Step) error {
			if stop {
				return stopAll(ctx, s)
			}
			return startAll(ctx, s)
		},
	}))
}

func stopAll(ctx context.Context, s *step.Step) error {
	inner, err := machine.Enter(ctx, s.Root, goalstate.MachineName(s.Slot))
	if errors.Is(err, machine.ErrNoMachine) || errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer inner.Close()
	for _, unit := range s.Rest {
		s.Status("stopping %s", unit)
		if err := inner.Stop(ctx, unit); err != nil {
			return err
		}
	}
	return nil
}

func startAll(ctx context.Context, s *step.Step) error {
	inner, _, err := machine.Await(ctx, s, goalstate.MachineName(s.Slot))
	if err != nil {
		return err
	}
	defer inner.Close()
	for _, unit := range s.Rest {
		s.Status("starting %s", unit)
		if err := started(ctx, s, inner, unit); err != nil {
			return err
		}
	}
	return nil
}

func started(ctx context.Context, s *step.Step, inner *machine.Inner, unit string) error {
	err := inner.Start(ctx, unit)
	switch {
	case err == nil:
		s.Status("%s is started", unit)
		return nil
	case errors.Is(err, machine.ErrJob):
		return fmt.Errorf("machine %s: %w: %s", inner.Name, err, inner.Explain(ctx, unit))
	case ctx.Err() != nil:
		return s.Late(fmt.Sprintf("start of %s in machine %s", unit, inner.Name), explainLate(inner, unit))
	}
	return fmt.Errorf("machine %s: %w", inner.Name, err)
}

// explainLate looks once more after the budget is used up, for a few seconds at the most.
func explainLate(inner *machine.Inner, unit string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return inner.Explain(ctx, unit)
}
