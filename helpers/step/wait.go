package step

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// State is what a check of Wait found.
type State struct {
	Done bool
	Seen string // what there is instead of what is waited for; shown as the status, and in the error when time runs out
	// Again bounds the time to the next check where nothing tells of a change. 0: only an event does.
	Again time.Duration
	// Pause is the least time to the next check: what happens meanwhile is one event. It spares systemd questions whose answers do not
	// matter yet.
	Pause time.Duration
}

// Wait calls check at once, and again after each event, until it is done or fails. It is the only place in berth that
// waits. When ctx's deadline passes, the error says what was seen last and the program exits as not ready.
func (s *Step) Wait(ctx context.Context, what string, events <-chan struct{}, check func(context.Context) (State, error)) error {
	last := ""
	for {
		state, err := check(ctx)
		switch {
		case ctx.Err() != nil && !state.Done:
			return s.late(ctx, what, last)
		case err != nil || state.Done:
			return err
		}
		if state.Seen != last {
			last = state.Seen
			s.Status("waiting for %s: %s", what, last)
		}
		select {
		case <-time.After(state.Pause):
		case <-ctx.Done():
			return s.late(ctx, what, last)
		}
		var again <-chan time.Time
		if state.Again > 0 {
			again = time.After(state.Again)
		}
		select {
		case <-events:
		case <-again:
		case <-ctx.Done():
			return s.late(ctx, what, last)
		}
	}
}

// late is the error for a context that has ended.
func (s *Step) late(ctx context.Context, what, last string) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ctx.Err()
	}
	if last == "" {
		last = "no answer"
	}
	return s.Late(what, last)
}

// Late makes the error of a step that has used up its budget.
func (s *Step) Late(what, last string) error {
	return &Failure{ExitNotReady, fmt.Errorf("%s: not within %v: %s", what, s.Budget, last)}
}

// Forward puts the events of source into out until source is closed or ctx ends.
func Forward(ctx context.Context, source <-chan struct{}, out chan<- struct{}) {
	for {
		select {
		case _, open := <-source:
			if !open {
				return
			}
			Wake(out)
		case <-ctx.Done():
			return
		}
	}
}

// Wake puts an event into a channel of capacity one, unless one is already there.
func Wake(events chan<- struct{}) {
	select {
	case events <- struct{}{}:
	default:
	}
}
