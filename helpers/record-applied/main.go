// record-applied stores the goal state with which a slot became ready: its last good one, with which the slot goes on when the host's
// is broken.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"berth/generator/file"
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
		Run:    run,
	}))
}

func run(_ context.Context, s *step.Step) error {
	result, err := record(s.Root, s.Slot, time.Now())
	if err != nil {
		return err
	}
	s.Status("%s", result.text)
	if result.refused {
		s.Notice("%s", result.text)
	}
	return nil
}

type result struct {
	text    string // for people
	refused bool
}

func record(root *file.Root, slot string, now time.Time) (result, error) {
	used, err := store.Used(root, slot)
	if errors.Is(err, fs.ErrNotExist) {
		return result{}, errors.New("the goal state is not recorded: the slot has not been started since the host booted")
	} else if err != nil {
		return result{}, err
	}
	// What is wrong with a goal state that was broken meanwhile is for the next start to tell.
	state, err := store.Load(root)
	_, lastGood := state.LastGood[slot]
	switch {
	case state.Digest(slot) != used || err != nil && !lastGood:
		return result{fmt.Sprintf("the goal state is not recorded as the slot's last good one, as it was changed while the slot started: "+
			"see berth diff %s, and systemctl restart node@%s", slot, slot), true}, nil
	case lastGood:
		return result{text: "the slot has become ready with its last good goal state"}, nil
	}
	return result{text: "the goal state is recorded as the slot's last good one"}, state.Record(root, slot, now)
}
