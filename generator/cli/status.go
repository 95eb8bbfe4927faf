package cli

import "github.com/urfave/cli/v2"

func statusCommand() *cli.Command {
	return &cli.Command{Name: "status", Usage: "tell the state of slots, step by step", Hidden: true}
}
