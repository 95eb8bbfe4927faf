// record-applied stores the goal state with which a slot became ready: its last good one, with which the slot goes on when the host's
// is broken.
package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"berth/generator/goalstate/store"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name: "record-applied",
		About: `Stores the goal state with which the slot became ready as its last good one, in /var/lib/berth/SLOT, and removes those of
slots that are not in it. A goal state that was changed while the slot started is not stored: nobody knows which parts of
it the slot has.`,
		Args:   []string{"SLOT"},
		Budget: 25 * time.Second,
		Run:    func(_ context.Context, s *step.Step) error { return record(s, time.Now()) },
	}))
}

func record(s *step.Step, now time.Time) error {
	used, err := store.Used(s.Root, s.Slot)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("the goal state is not recorded: the slot has not been started since the host booted")
	} else if err != nil {
		return err
	}
	// What is wrong with a goal state that was broken meanwhile is for the next start to tell.
	state, err := store.Load(s.Root)
	_, lastGood := state.LastGood[s.Slot]
	switch {
	case state.Digest(s.Slot) != used || err != nil && !lastGood:
		s.Notice("the goal state is not recorded as the slot's last good one, as it was changed while the slot started: see berth diff %s, "+
			"and systemctl restart node@%s", s.Slot, s.Slot)
		return nil
	case lastGood:
		s.Info("the slot has become ready with its last good goal state")
		return nil
	}
	if err := state.Record(s.Root, s.Slot, now); err != nil {
		return err
	}
	s.Status("the goal state is recorded as the slot's last good one")
	return nil
}
