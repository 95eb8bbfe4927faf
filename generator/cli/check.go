package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/generator/hostcheck"
	"berth/helpers/step"
)

const checkAbout = `Reads the goal state of --root (/etc/berth/goal.toml, else
/run/berth/goal.toml, else /usr/lib/berth/goal.toml, and goal.toml.d/*.toml
of all three), or the FILEs instead, the first one as the main file and the
others as drop-ins over it; "-" is the standard input. All mistakes are
printed at once, one a line, as

    file:line:column: key: what is wrong: what would be right

A file that holds a secret itself and that other users can read is an error,
too, and so is such a file of a bootstrap token.

With --host the host is checked as well: systemd, control groups, kernel
modules and variables, berth's own files and units, ports, each slot's root
file system and what its start would refuse. Nothing is changed, no slot need
be stopped. Findings are printed as

    SEVERITY ID: subject: what is wrong: what would be right

where an error keeps a slot from running as it should, and a warning may do
so. With --root on an image, what only a running host can tell is left out,
and the last line but one says what that is. --list prints all IDs with their
meaning; they stay the same.

--json prints one object:
    findings   what was found, each with id, severity (error, warning, ok),
               subject, problem, cure
    errors     how many findings are errors
    warnings   how many findings are warnings
    skipped    IDs that were left out
    goal       files, slots and boot of the goal state; null if it is not
               valid

Exit codes: 0 nothing is wrong, or there are only warnings; 1 an error was
found, and the goal state is valid; 2 usage; 3 there is no goal state, or it
is not valid

Examples:
    berth check                       the host's goal state
    berth check --host                the host, too
    berth check new.toml && mv new.toml /etc/berth/goal.toml
    berth check --host new.toml       would this host run that goal state?
    berth --root /mnt/image check --host
                                      an image of a host`

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:        "check",
		Usage:       "report all that is wrong with a goal state, and a host",
		ArgsUsage:   "[FILE…]",
		Description: checkAbout,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "host", Usage: "check the host, too"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
			&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "print nothing but what is wrong"},
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "with --host: print also what is not wrong"},
			&cli.BoolFlag{Name: "list", Usage: "print the IDs of all checks, and end"},
		},
		Action: func(c *cli.Context) error {
			if c.Bool("list") {
				return listChecks(c.App.Writer)
			}
			root, err := root(c)
			if err != nil {
				return err
			}
			defer root.Close()
			return check{
				root: root, files: c.Args().Slice(), stdin: os.Stdin, dial: hostcheck.Dial,
				host: c.Bool("host"), json: c.Bool("json"), quiet: c.Bool("quiet"), verbose: c.Bool("verbose"),
			}.run(c.Context, c.App.Writer)
		},
	}
}

func listChecks(w io.Writer) error {
	for _, check := range hostcheck.Checks {
		if _, err := fmt.Fprintf(w, "%-22s %s\n", check.Name, check.Meaning); err != nil {
			return err
		}
	}
	return nil
}

// check is one run of the command.
type check struct {
	root                       *file.Root
	files                      []string
	stdin                      io.Reader
	dial                       func(context.Context, *file.Root) (hostcheck.Systemd, error)
	host, json, quiet, verbose bool
}

func (c check) run(ctx context.Context, w io.Writer) error {
	state, secrets, goalErr := c.goal()
	goal := state.Goal
	if goalErr != nil && !errors.As(goalErr, new(goalstate.Errors)) && !errors.Is(goalErr, goalstate.ErrNone) {
		return goalErr
	}
	var skipped []string
	facts := hostcheck.Facts{}
	if c.host {
		h := hostcheck.NewHost(c.root)
		h.Dial = c.dial
		facts = hostcheck.Gather(ctx, h, goal, len(c.files) == 0)
		skipped = hostcheck.Skipped(facts)
	}
	facts.Secrets = append(facts.Secrets, secrets...)
	facts.LastGood = state.LastGood
	if facts.Unusable == nil {
		facts.Unusable = state.Refused
	}
	findings := append(hostcheck.CheckSecrets(facts), hostcheck.CheckLastGood(facts)...)
	if c.host {
		findings = hostcheck.Check(goal, facts)
	}
	report := hostcheck.NewReport(goal, goalErr, findings, skipped)
	if err := c.write(w, report); err != nil {
		return err
	}
	switch {
	case goalErr != nil:
		return &step.Failure{Code: step.ExitInvalid, Err: errSilent}
	case report.Errors > 0:
		return &step.Failure{Code: step.ExitFailed, Err: errSilent}
	}
	return nil
}

func (c check) write(w io.Writer, report hostcheck.Report) error {
	if c.json {
		return printJSON(w, report)
	}
	of := map[hostcheck.Severity]colour{hostcheck.Error: red, hostcheck.Warning: yellow, hostcheck.OK: green}
	p := colours(w)
	return report.Write(w, hostcheck.Style{
		Quiet: c.quiet, Verbose: c.verbose, Host: c.host,
		Paint: func(s hostcheck.Severity, text string) string { return p.paint(of[s], text) },
	})
}

// goal reads the goal state, and finds who can read what is secret in it.
func (c check) goal() (store.State, []hostcheck.Secret, error) {
	if len(c.files) == 0 {
		state, err := store.Load(c.root)
		secrets := hostcheck.Secrets(c.root, state.Files)
		if state.Goal != nil {
			for _, slot := range state.Goal.Slots {
				secrets = append(secrets, hostcheck.TokenFile(c.root, slot.Kubelet)...)
			}
		}
		return state, secrets, err
	}
	top, err := file.OpenRoot("/") // files of the command line are not those of --root
	if err != nil {
		return store.State{}, nil, err
	}
	defer top.Close()
	var sources []goalstate.Source
	var secrets []hostcheck.Secret
	for _, name := range c.files {
		source, err := c.read(name)
		if err != nil {
			return store.State{}, nil, err
		}
		sources = append(sources, source)
		if full, err := filepath.Abs(name); err == nil && name != "-" {
			secrets = append(secrets, hostcheck.Secrets(top, []goalstate.Source{{Path: full, Data: source.Data}})...)
		}
	}
	goal, err := goalstate.Parse(sources)
	return store.State{Goal: goal}, secrets, err
}

// read reads a file of the command line.
func (c check) read(name string) (goalstate.Source, error) {
	switch {
	case name == "-":
		return goalstate.Read("<standard input>", c.stdin)
	case strings.HasPrefix(name, "-"):
		return goalstate.Source{}, usagef("%s stands behind a file: options go before files", name)
	}
	f, err := os.Open(name)
	if err != nil {
		return goalstate.Source{}, usagef("%w", err)
	}
	defer f.Close()
	return goalstate.Read(name, f)
}
