package cli

import "github.com/urfave/cli/v2"

func checkCommand() *cli.Command {
	return &cli.Command{Name: "check", Usage: "report all mistakes of a goal state at once", Hidden: true}
}
