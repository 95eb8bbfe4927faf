// wait-dbus waits until D-Bus inside a slot's machine answers.
package main

import (
	"context"
	"os"
	"time"

	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name:   "wait-dbus",
		About:  "Waits until the systemd inside the slot's machine answers over the machine's message bus.",
		Args:   []string{"SLOT"},
		Budget: 2 * time.Minute,
		Run:    run,
	}))
}

func run(ctx context.Context, s *step.Step) error {
	name := goalstate.MachineName(s.Slot)
	version, err := machine.Await(ctx, s, name, s.Budget)
	if err == nil {
		s.Status("systemd %s inside machine %s answers", version, name)
	}
	return err
}
