// peer-guard claims the host for a slot before its machine starts, and refuses where a peer's node stack is alive in any
// form. With --release it gives the claim back.
package main

import (
	"context"
	"flag"
	"os"
	"time"

	"berth/helpers/peer-guard/claim"
	"berth/helpers/step"
)

func main() {
	var release bool
	os.Exit(step.Main(step.Command{
		Name: "peer-guard",
		About: `Claims the host for the slot, or refuses with exit code 5 while the node stack of a peer is alive in any form:
its claim is held, its machine is registered, or processes are left in its cgroup. Left-overs of the slot's own last run
are cleared away. With --release, gives the claim back unless the slot's machine is still alive.`,
		Args:   []string{"SLOT"},
		Budget: 25 * time.Second,
		Flags: func(flags *flag.FlagSet) {
			flags.BoolVar(&release, "release", false, "give the claim back")
		},
		Run: func(ctx context.Context, s *step.Step) error {
			if release {
				return claim.Release(ctx, s)
			}
			return claim.Take(ctx, s)
		},
	}))
}
