// record-applied stores the goal state with which a slot became ready: its last good one, with which the slot goes on when the host's
// is broken.
package main

import (
	"context"
	"os"
	"time"

	"berth/generator/goalstate/store"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name: "record-applied",
		About: `Stores the goal state with which the slot was started as its last good one, in /var/lib/berth/SLOT, and removes those of
slots that are not in it. wait-kubelet has it run when the slot has become ready.`,
		Args:   []string{"SLOT"},
		Budget: 25 * time.Second,
		Run:    run,
	}))
}

func run(_ context.Context, s *step.Step) error {
	if err := store.Keep(s.Root, s.Slot, time.Now()); err != nil {
		return err
	}
	s.Status("the goal state is recorded as the slot's last good one")
	return nil
}
