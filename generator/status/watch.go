package status

import (
	"context"
	"time"
)

// pause is the least time between two looks at the host. Systemd tells of many changes at once.
const pause = 100 * time.Millisecond

// Watch follows the state of the slots.
type Watch struct {
	Gather func(context.Context) (Facts, error)
	// Events tells when to gather again.
	Events <-chan struct{}
	// Redraw tells when to show again what is known: the time has passed, or the terminal has another size. May be nil.
	Redraw <-chan struct{}
	Now    func() Moment
	After  func(time.Duration) <-chan time.Time
	// Show shows what was seen, and may end the watch.
	Show func(Report) (done bool, err error)
}

// Run shows the state at once, and again after each event, until ctx ends, which is no error, or Show ends it.
func (w Watch) Run(ctx context.Context) error {
	for {
		facts, err := w.Gather(ctx)
		if ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		// Events are not taken before the pause is over; one of them waits meanwhile.
		events, rested := (<-chan struct{})(nil), w.After(pause)
		for changed, show := false, true; !changed; {
			if show {
				if done, err := w.Show(Judge(facts, w.Now())); done || err != nil {
					return err
				}
			}
			show = false
			select {
			case <-events:
				changed = true
			case <-rested:
				events, rested = w.Events, nil
			case <-w.Redraw:
				show = true
			case <-ctx.Done():
				return nil
			}
		}
	}
}
