// wait-kubelet is what a slot's supervising unit runs: it watches the chain come up, waits until the kubelet inside the
// machine is ready and stays so, and names the step that failed. With --down it watches the chain go down.
package main

import (
	"context"
	"flag"
	"os"

	"berth/helpers/step"
	"berth/helpers/wait-kubelet/ready"
)

func main() {
	var down bool
	os.Exit(step.Main(step.Command{
		Name: "wait-kubelet",
		About: `Waits until the steps of the slot are done and its kubelet is ready: kubelet.service is active, its /healthz answers,
and it has stayed up for the settle time. Fails with the name and the reason of the step that failed.
With --down, waits until the stop of all steps is done.`,
		Args:  []string{"SLOT"},
		Flags: func(flags *flag.FlagSet) { flags.BoolVar(&down, "down", false, "wait until all steps are stopped") },
		Run: func(ctx context.Context, s *step.Step) error {
			if down {
				return ready.Down(ctx, s)
			}
			return ready.Up(ctx, s)
		},
	}))
}
