package cli

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"berth/generator/goalstate"
)

// completion makes what prints the words that may come next on the command line, one a line, for the scripts in units/completion:
// the command's options after a dash, else the slots of the goal state where the command takes one.
func completion(command *cli.Command) cli.BashCompleteFunc {
	options := cli.DefaultCompleteWithFlags(command)
	return func(c *cli.Context) {
		options(c)
		if !strings.Contains(command.ArgsUsage, "SLOT") || c.Args().Present() {
			return
		}
		root, err := root(c)
		if err != nil {
			return // nobody reads messages in the middle of a command line
		}
		defer root.Close()
		goal, _ := goalstate.Load(root) // a broken one still has its slots' names
		if goal == nil {
			return
		}
		for _, name := range goal.SlotNames() {
			fmt.Fprintln(c.App.Writer, name)
		}
	}
}
