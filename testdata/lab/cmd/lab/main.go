// Command lab builds and runs the hosts of package lab by hand.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"berth/testdata/lab"
)

const usage = `Usage: lab [--cache DIR] COMMAND

Lab hosts are real systemd hosts (containers) with the root file systems of node-a and node-b in /var/lib/machines.

  build [SUITE...]              build the root file systems that hosts begin from (default: all suites)
  up [--name N] [--no-kmsg] SUITE
                                boot a host, building first if need be; it runs until "down" or until it is powered off
  in NAME [COMMAND [ARG...]]    run a command in it, by default a login shell
  list                          the hosts that run, and where their root file systems can be reached
  down NAME...                  end a host and throw it away
  demo [--keep] [SUITE]         show a node start on a host of its own (default: trixie); --keep leaves the host running

Suites: %s. Bases are kept in --cache, $BERTH_LAB_CACHE or /var/cache/berth-lab.
It needs root. Exit status: 0 done, 1 failed, 2 usage; of "in": the command's own.
`

var errUsage = errors.New("usage")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	code, err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Printf(usage, strings.Join(lab.Suites, ", "))
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "lab: %v\n"+usage, err, strings.Join(lab.Suites, ", "))
		code = 2
	case err != nil:
		fmt.Fprintln(os.Stderr, "lab:", err)
		code = 1
	}
	os.Exit(code)
}

func run(ctx context.Context, args []string) (int, error) {
	top := newFlags("lab")
	cache := top.String("cache", lab.CacheDir(), "")
	args, err := parse(top, args, false)
	if err != nil {
		return 0, err
	}
	if err := os.Setenv("BERTH_LAB_CACHE", *cache); err != nil {
		return 0, err
	}
	if len(args) == 0 {
		return 0, fmt.Errorf("%w: no command", errUsage)
	}
	command, args := args[0], args[1:]
	flags := newFlags(command)
	var name string
	var noKmsg, keep bool
	switch command {
	case "up":
		flags.StringVar(&name, "name", "", "")
		flags.BoolVar(&noKmsg, "no-kmsg", false, "")
	case "demo":
		flags.BoolVar(&keep, "keep", false, "")
	}
	if args, err = parse(flags, args, command != "in"); err != nil {
		return 0, err
	}
	switch command {
	case "build":
		if len(args) == 0 {
			args = lab.Suites
		}
		for _, suite := range args {
			if err := lab.Build(ctx, suite, progress); err != nil {
				return 0, err
			}
		}
		return 0, nil
	case "up":
		if len(args) != 1 {
			return 0, fmt.Errorf("%w: up: want one suite", errUsage)
		}
		return 0, bootHost(ctx, lab.Options{Suite: args[0], Name: name, NoKmsg: noKmsg, Degraded: true, Log: progress})
	case "in":
		if len(args) == 0 {
			return 0, fmt.Errorf("%w: in: want the name of a host", errUsage)
		}
		return enter(args[0], args[1:])
	case "list":
		if len(args) != 0 {
			return 0, fmt.Errorf("%w: list takes no arguments", errUsage)
		}
		return 0, list(ctx, os.Stdout)
	case "down":
		if len(args) == 0 {
			return 0, fmt.Errorf("%w: down: want the name of a host", errUsage)
		}
		var errs []error
		for _, name := range args {
			errs = append(errs, lab.Down(ctx, name))
		}
		return 0, errors.Join(errs...)
	case "demo":
		if len(args) > 1 {
			return 0, fmt.Errorf("%w: demo: want at most one suite", errUsage)
		}
		return 0, demo(ctx, os.Stdout, append(args, "trixie")[0], keep)
	}
	return 0, fmt.Errorf("%w: unknown command %q", errUsage, command)
}

func newFlags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	return flags
}

// parse parses flags, which may also stand after other arguments if mixed.
func parse(flags *flag.FlagSet, args []string, mixed bool) (rest []string, err error) {
	for {
		if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
			return nil, err
		} else if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", errUsage, flags.Name(), err)
		}
		args = flags.Args()
		if !mixed || len(args) == 0 {
			return append(rest, args...), nil
		}
		rest, args = append(rest, args[0]), args[1:]
	}
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func bootHost(ctx context.Context, opts lab.Options) error {
	start := time.Now()
	if opts.Name == "" {
		var err error
		if opts.Name, err = freeName(ctx, opts.Suite); err != nil {
			return err
		}
	}
	h, err := lab.Start(ctx, opts)
	if err != nil {
		return err
	}
	state, _, _, err := h.Run(ctx, "systemctl", "is-system-running")
	if err == nil {
		err = h.Detach()
	}
	if err != nil {
		return errors.Join(err, h.Stop())
	}
	progress("%s: %s after %.1f s; enter it with: lab in %s", h.Name(), strings.TrimSpace(state),
		time.Since(start).Seconds(), h.Name())
	return nil
}

// freeName is base, with a number if a host of that name runs already.
func freeName(ctx context.Context, base string) (string, error) {
	infos, err := lab.List(ctx)
	if err != nil {
		return "", err
	}
	name := base
	for n := 2; slices.ContainsFunc(infos, func(i lab.Info) bool { return i.Name == name }); n++ {
		name = fmt.Sprintf("%s-%d", base, n)
	}
	return name, nil
}

func list(ctx context.Context, w io.Writer) error {
	infos, err := lab.List(ctx)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tSUITE\tUP\tROOT")
	for _, i := range infos {
		fmt.Fprintf(table, "%s\t%s\t%t\t%s\n", i.Name, i.Suite, i.Up, i.Root)
	}
	return table.Flush()
}

// enter runs a command in a host. It becomes the command, so that terminal, signals and exit status need no care.
func enter(name string, command []string) (int, error) {
	h, err := lab.Attach(name)
	if err != nil {
		return 0, err
	}
	if len(command) == 0 {
		command = []string{"bash", "--login"}
	}
	cmd, err := h.Command(context.Background(), command[0], command[1:]...)
	if err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("%s: %w", cmd.Path, unix.Exec(cmd.Path, cmd.Args, cmd.Env))
}
