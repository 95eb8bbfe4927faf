package cli

import "github.com/urfave/cli/v2"

func bakeCommand() *cli.Command {
	return &cli.Command{Name: "bake", Usage: "write a host's units into an image", Hidden: true}
}
