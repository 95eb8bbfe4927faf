// berth is the command for people: it checks, shows and compares what the generator and the steps make, tells the state of slots, and
// bakes units into host images.
//
// It is a program of its own, though it shares all packages with the generator: systemd runs the generator at each daemon-reload, and
// with a command line's packages in it that takes half as long again.
package main

import (
	"os"

	"berth/generator/cli"
)

func main() { os.Exit(cli.Main(os.Args, os.Stdout, os.Stderr)) }
