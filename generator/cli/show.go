package cli

import "github.com/urfave/cli/v2"

func showCommand() *cli.Command {
	return &cli.Command{Name: "show", Usage: "print every file that a slot would get", Hidden: true}
}
