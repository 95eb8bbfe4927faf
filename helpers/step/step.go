// Package step is what berth's helpers have in common: arguments, budget, log lines, the status that "systemctl status"
// shows, and exit codes. Each helper is one step of a slot's chain and is run by one unit.
package step

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
	"unicode"

	"github.com/coreos/go-systemd/v22/daemon"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
)

// Exit codes of all of berth's programs.
const (
	ExitDone     = 0
	ExitFailed   = 1
	ExitUsage    = 2
	ExitInvalid  = 3 // the goal state is not valid
	ExitNotReady = 4 // not ready within its budget
	ExitRefused  = 5 // a peer's node stack is alive
)

// Failure is an error that decides how the program exits.
type Failure struct {
	Code int // one of the exit codes
	Err  error
}

func (f *Failure) Error() string { return f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// Refusedf makes the error of a step that refuses because of a peer.
func Refusedf(format string, a ...any) error { return &Failure{ExitRefused, fmt.Errorf(format, a...)} }

// Invalidf makes the error of a step that cannot go on with this goal state.
func Invalidf(format string, a ...any) error { return &Failure{ExitInvalid, fmt.Errorf(format, a...)} }

// Code is the exit code of a program that ends with err.
func Code(err error) int {
	var failure *Failure
	switch {
	case err == nil:
		return ExitDone
	case errors.As(err, &failure):
		return failure.Code
	case errors.As(err, new(goalstate.Errors)):
		return ExitInvalid
	}
	return ExitFailed
}

// Command describes a helper.
type Command struct {
	Name  string                    // of the program
	About string                    // what it does, for --help
	Args  []string                  // names of its arguments, SLOT among them
	Flags func(flags *flag.FlagSet) // adds flags of its own; may be nil
	Run   func(context.Context, *Step) error
	// Budget is what Run may take, unless the environment's BERTH_BUDGET says something else. 0: no bound of its own.
	Budget time.Duration
}

// Step is one run of a helper.
type Step struct {
	Slot string
	Args map[string]string // all arguments by name
	Root *file.Root        // the directory that stands for "/"
	// Budget is what Run's context was given.
	Budget time.Duration

	log     io.Writer
	journal bool // log lines carry their priority
	notify  func(state string)
}

// Main runs the command with the process's arguments and environment and returns its exit code.
func Main(c Command) int {
	runtime.GOMAXPROCS(1) // steps wait for one thing after the other: threads that look for work would take it from those waited for
	flags := flag.NewFlagSet(c.Name, flag.ContinueOnError)
	flags.SetOutput(os.Stderr)
	root := flags.String("root", cmp.Or(os.Getenv("BERTH_ROOT"), "/"), "the `directory` that stands for / (environment: BERTH_ROOT)")
	version := flags.Bool("version", false, "print the version and exit")
	if c.Flags != nil {
		c.Flags(flags)
	}
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), "Usage: %s [OPTION…] %s\n\n%s\n\nOptions:\n", c.Name, strings.Join(c.Args, " "), strings.TrimSpace(c.About))
		flags.PrintDefaults()
		fmt.Fprint(flags.Output(), "\nExit codes: 0 done, 1 failed, 2 usage, 3 goal state invalid, 4 not ready within its budget, 5 refused (peer)\n")
	}
	switch err := flags.Parse(os.Args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		return ExitDone
	case err != nil:
		return ExitUsage
	case *version:
		fmt.Println(c.Name, Version())
		return ExitDone
	case flags.NArg() != len(c.Args):
		fmt.Fprintf(os.Stderr, "%s: %d arguments: want %s (see %s --help)\n", c.Name, flags.NArg(), strings.Join(c.Args, " "), c.Name)
		return ExitUsage
	}
	s := &Step{
		Args:    make(map[string]string),
		Budget:  c.Budget,
		log:     os.Stderr,
		journal: os.Getenv("JOURNAL_STREAM") != "",
		notify:  func(state string) { _, _ = daemon.SdNotify(false, state) }, // nobody listens: nothing is lost
	}
	for i, name := range c.Args {
		s.Args[name] = flags.Arg(i)
	}
	s.Slot = s.Args["SLOT"]
	file.SetUmask()
	if err := s.prepare(*root, os.Getenv("BERTH_BUDGET")); err != nil {
		s.Error(err)
		return ExitUsage
	}
	ctx := context.Background()
	if s.Budget > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.Budget)
		defer cancel()
	}
	err := s.inBudget(ctx, c.Run(ctx, s))
	if err != nil {
		s.Error(err)
	}
	return Code(err)
}

// inBudget makes the error of a run whose budget was used up one that says so, unless the run has said what its exit code is.
func (s *Step) inBudget(ctx context.Context, err error) error {
	if err == nil || !errors.Is(ctx.Err(), context.DeadlineExceeded) || Code(err) != ExitFailed {
		return err
	}
	return s.Late("slot "+s.Slot, err.Error())
}

// prepare checks what came with the command line and the environment.
func (s *Step) prepare(root, budget string) (err error) {
	if !goalstate.ValidSlotName(s.Slot) {
		return fmt.Errorf("slot %q: want 1 to 16 of a-z and 0-9", s.Slot)
	}
	if budget != "" {
		if s.Budget, err = time.ParseDuration(budget); err != nil || s.Budget <= 0 {
			return fmt.Errorf("BERTH_BUDGET=%q: want a positive duration such as 2m", budget)
		}
	}
	s.Root, err = file.OpenRoot(root)
	return err
}

// Goal reads the goal state, and returns it with the step's slot. Where it is broken, this is the slot's last good one.
func (s *Step) Goal() (store.State, *goalstate.Slot, error) {
	state, err := store.Load(s.Root)
	if _, ok := state.LastGood[s.Slot]; ok {
		return state, state.Goal.Slots[s.Slot], nil
	}
	if errors.Is(err, goalstate.ErrNone) {
		return state, nil, NoGoal()
	}
	if err != nil {
		// The first one is the reason; what is said about the store is behind it.
		return state, nil, errors.Join(err, cmp.Or(state.Refused[s.Slot], state.Refused[""]))
	}
	slot := state.Goal.Slots[s.Slot]
	if slot == nil {
		return state, nil, NoSlot(state.Goal, s.Slot)
	}
	return state, slot, nil
}

// NoGoal makes the error of a host without a goal state.
func NoGoal() error { return &Failure{ExitInvalid, goalstate.ErrNone} }

// NoSlot makes the error of a slot that is not in the goal state.
func NoSlot(goal *goalstate.GoalState, slot string) error {
	return Invalidf("slot %s is not in the goal state (slots: %s)", slot, strings.Join(goal.SlotNames(), ", "))
}

// Status tells systemd what the step does or waits for at the moment; "systemctl status" shows it. What was told last stays
// when the step ends.
func (s *Step) Status(format string, a ...any) {
	s.notify("STATUS=" + oneLine(fmt.Sprintf(format, a...)))
}

// Info, Warn and Notice write a log line.
func (s *Step) Info(format string, a ...any)   { s.write(6, fmt.Sprintf(format, a...)) }
func (s *Step) Notice(format string, a ...any) { s.write(5, fmt.Sprintf(format, a...)) }
func (s *Step) Warn(format string, a ...any)   { s.write(4, fmt.Sprintf(format, a...)) }

// Error writes err to the log and makes its first line the step's status.
func (s *Step) Error(err error) {
	s.Status("%v", err)
	s.write(3, err.Error())
}

// write logs each line of text with a priority of syslog(3), in the form that systemd takes off again
// (SyslogLevelPrefix=, systemd.exec(5)). The unit adds the fields BERTH_SLOT= and BERTH_STEP=.
func (s *Step) write(priority int, text string) {
	for line := range strings.SplitSeq(strings.TrimRight(printable(text), "\n"), "\n") {
		if s.journal {
			line = fmt.Sprintf("<%d>%s", priority, line)
		}
		fmt.Fprintln(s.log, line)
	}
}

// version is set by install.sh when it links.
var version string

// Version is the version of this program, the one it was installed as, else what the go command recorded in it, and that of Go.
func Version() string {
	of := version
	if info, ok := debug.ReadBuildInfo(); ok && of == "" {
		of = info.Main.Version
	}
	return cmp.Or(of, "unknown") + " (" + runtime.Version() + ")"
}

// statusLimit keeps a status well below what systemd takes in one message of sd_notify(3), 4096 bytes. It drops a larger one.
const statusLimit = 1000

func oneLine(s string) string {
	line, _, more := strings.Cut(strings.TrimSpace(printable(s)), "\n")
	if len(line) > statusLimit {
		line, more = strings.ToValidUTF8(line[:statusLimit], ""), true
	}
	if more {
		line += " …"
	}
	return line
}

// printable replaces what is no text, or would change how a terminal shows the rest: a log line may have come out of a machine.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return unicode.ReplacementChar
		}
		return r // also in place of a byte that is not UTF-8
	}, s)
}
