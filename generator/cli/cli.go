// Package cli is the command berth, with which people look at what the generator and the steps do: a command a file, thin over
// the packages that do the work.
package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"berth/generator/file"
	"berth/helpers/step"
)

// Main runs the command line args, the program's name first, and returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	app := &cli.App{
		Name:      "berth",
		Usage:     "check, show, compare and watch the Kubernetes nodes in slots",
		Version:   step.Version(),
		Writer:    stdout,
		ErrWriter: stderr,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "root", EnvVars: []string{"BERTH_ROOT"}, Value: "/", Usage: "the `DIRECTORY` that is /"},
		},
		Commands:                  []*cli.Command{checkCommand(), showCommand(), diffCommand(), statusCommand(), bakeCommand()},
		EnableBashCompletion:      true,
		DisableSliceFlagSeparator: true,
		HideHelpCommand:           true,
		OnUsageError:              usage,
		// A word that is no command, and no word at all.
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usagef("%s is no command: see berth --help", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
		ExitErrHandler: func(*cli.Context, error) {}, // the exit code is ours
	}
	for _, command := range app.Commands {
		command.OnUsageError = usage
		command.HideHelpCommand = true // "help" would be a slot
		command.BashComplete = completion(command)
	}
	err := app.Run(args)
	if err != nil && !errors.Is(err, errSilent) {
		fmt.Fprintf(stderr, "berth: %v\n", err)
	}
	return step.Code(err)
}

// errSilent is wrapped by errors that only decide the exit code: what is wrong has been printed already.
var errSilent = errors.New("")

func usage(c *cli.Context, err error, _ bool) error {
	return usagef("%w: see %s --help", err, strings.TrimSpace("berth "+strings.TrimPrefix(c.Command.Name, "berth")))
}

// usagef makes the error of a wrong command line.
func usagef(format string, a ...any) error {
	return &step.Failure{Code: step.ExitUsage, Err: fmt.Errorf(format, a...)}
}

// root opens the directory that stands for /.
func root(c *cli.Context) (*file.Root, error) {
	return openRoot(cmp.Or(c.String("root"), os.Getenv("BERTH_ROOT"), "/"))
}

// openRoot opens a folder that stands for /.
func openRoot(dir string) (*file.Root, error) {
	root, err := file.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("--root: %w: want the folder that stands for /", err)
	}
	return root, nil
}
