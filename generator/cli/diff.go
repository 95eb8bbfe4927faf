package cli

import "github.com/urfave/cli/v2"

func diffCommand() *cli.Command {
	return &cli.Command{Name: "diff", Usage: "compare what is on the host with what would be written", Hidden: true}
}
