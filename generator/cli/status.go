package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"berth/generator/goalstate"
	"berth/generator/status"
	"berth/helpers/step"
)

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "tell the state of slots, step by step",
		ArgsUsage: "[SLOT…]",
		Description: `Tells for each SLOT what each step of its chain does, waits for, or why it
failed, and what to type next. By default: the slots of the goal state, and
those that still run though they are not in it any more.

A slot is ready, degraded (it was ready, and something of it is down now),
starting, stopping, retrying (it failed, and systemd tries again), failed,
refused (because of a peer) or down. A step is done, running, waiting (for
the one before it), stopping, retrying, failed, unusable (its unit is masked
or not installed) or down. The time of a step is how long its run took, or
takes; that of "node", how long it took until the node was ready.

With --watch each change is shown: live on a terminal, else a line for each.
With --until-ready that ends with 0 as soon as the exit code would be 0.

Any user may ask. Without root's rights the kubelet and containerd in the
machine are not asked, no journal may be read, and the versions are not
known.

EXAMPLES
   berth status                        all slots
   berth status --watch a              slot a, live; q ends it
   berth status --watch --until-ready a && echo up
   berth status --json | jq '.slots[] | select(.state != "ready") | .reason'

JSON
   time            when this was seen (RFC 3339)
   goal_state      state (valid, invalid, unreadable, none), sources, boot,
                   errors (a line each)
   next            what to type about the goal state: command, why
   slots           for each slot:
     name machine in_goal_state claim state since reason
                   since: when it became ready (RFC 3339), or null;
                   claim: it holds the host
     system        os, systemd (of the machine), kernel; as all versions,
                   empty where it is not known
     containerd kubelet
                   version, state (ActiveState of the service in the machine;
                   empty: not known)
     restarts      node, machine, containerd, kubelet: automatic ones;
                   null: not known
     steps         name, unit, state, seconds (or null), status, log (of what
                   failed: unit, machine, lines; or null)
     last_good     the goal state with which it became ready last, or null:
                   recorded (RFC 3339, or null), used (as the host's is not
                   valid), error (why it cannot be used)
     stale goal_state_newer
                   unit files that are not as the goal state says; whether it
                   was changed after the slot started
     left          processes in the machine's cgroup though the machine is
                   down
     next          what to type: command, why
   With --watch there is one such document a line.

EXIT CODES
   0   all of the SLOTs are ready; where none is named: at least one slot is
   1   systemd does not run, or cannot be asked
   2   wrong usage
   3   the goal state is not valid, there is none, or a SLOT is neither in it
       nor running
   4   not ready
   A watch that is ended by q or a signal ends with 0.`,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "print what another program reads"},
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "stay, and show each change"},
			&cli.BoolFlag{Name: "until-ready", Usage: "with --watch: end when ready"},
		},
		Action: func(c *cli.Context) error {
			slots := c.Args().Slice()
			for _, slot := range slots {
				if strings.HasPrefix(slot, "-") {
					return usagef("%s stands behind a slot: options go before slots", slot)
				}
				if !goalstate.ValidSlotName(slot) {
					return usagef("slot %q: want 1 to 16 of a-z and 0-9", slot)
				}
			}
			if c.Bool("until-ready") && !c.Bool("watch") {
				return usagef("--until-ready: want --watch, too")
			}
			return showStatus(c, slots)
		},
	}
}

func showStatus(c *cli.Context, slots []string) error {
	host, err := root(c)
	if err != nil {
		return err
	}
	defer host.Close()
	// A signal ends it in order: the terminal is as it was.
	ctx, stop := signal.NotifyContext(c.Context, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	live, err := status.NewLive(ctx, host)
	if err != nil {
		return err
	}
	defer live.Close()
	gather := func(ctx context.Context) (status.Facts, error) { return live.Gather(ctx, slots...) }
	if !c.Bool("watch") {
		facts, err := gather(ctx)
		if err != nil {
			return err
		}
		report := status.Judge(facts, status.Now()).Only(slots...)
		if c.Bool("json") {
			err = printJSON(c.App.Writer, report)
		} else {
			err = status.Text(c.App.Writer, report, style(c.App.Writer))
		}
		return codeOf(report, len(slots) > 0, err)
	}
	watch := status.Watch{Gather: gather, Events: live.Events(), Now: status.Now, After: time.After}
	var last status.Report
	until := func(show func(status.Report) error) func(status.Report) (bool, error) {
		return func(r status.Report) (bool, error) {
			last = r.Only(slots...)
			err := show(last)
			return c.Bool("until-ready") && last.Code(len(slots) > 0) == step.ExitDone, err
		}
	}
	switch {
	case c.Bool("json"):
		watch.Show = until(func(r status.Report) error { return json.NewEncoder(c.App.Writer).Encode(r) })
	case isTerminal(c.App.Writer):
		err := onScreen(ctx, c.App.Writer.(*os.File), c.App.Reader, func(ctx context.Context, s *screen) error {
			watch.Redraw, watch.Show = s.redraw, until(s.draw)
			return watch.Run(ctx)
		})
		if err == nil {
			err = status.Text(c.App.Writer, last, style(c.App.Writer)) // what the screen showed last stays
		}
		return err
	default:
		var before *status.Report
		watch.Show = until(func(r status.Report) error {
			for _, line := range status.Changes(before, r) {
				if _, err := fmt.Fprintf(c.App.Writer, "%s %s\n", r.Time.Format(time.TimeOnly), line); err != nil {
					return err
				}
			}
			before = &r
			return nil
		})
	}
	return watch.Run(ctx)
}

// codeOf makes the exit code of a report that was printed.
func codeOf(r status.Report, named bool, err error) error {
	if code := r.Code(named); err == nil && code != step.ExitDone {
		return &step.Failure{Code: code, Err: errSilent}
	}
	return err
}

// style is how a report is drawn on what it is written to.
func style(w io.Writer) status.Style {
	s := status.Style{ASCII: !utf8Locale(os.Getenv)}
	if f, ok := w.(*os.File); ok && isTerminal(w) {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			s.Width = int(size.Col)
		}
	}
	if p := colours(w); p {
		s.Paint = func(tone status.Tone, text string) string {
			return p.paint(map[status.Tone]colour{status.Good: green, status.Busy: yellow, status.Bad: red, status.Strong: bold}[tone], text)
		}
	}
	return s
}

// utf8Locale tells whether the locale's encoding is UTF-8 (locale(7)). Where nothing is set it counts as such, as for systemctl.
func utf8Locale(env func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if value := strings.ToLower(env(name)); value != "" {
			return strings.Contains(value, "utf-8") || strings.Contains(value, "utf8")
		}
	}
	return true
}

// screen is a terminal while it shows one picture after the other in place.
type screen struct {
	out    *os.File
	in     *os.File // nil: keys are not read
	before *unix.Termios
	stop   func()
	redraw chan struct{}
}

// Sequences of ECMA-48 and xterm: the alternate screen, which leaves what was there before as it was; the cursor, hidden; and lines
// that are cut, not wrapped, at the edge.
const (
	screenBegin = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	screenEnd   = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	eraseLine   = "\x1b[K"
	eraseBelow  = "\x1b[J"
)

// onScreen runs a function that has the terminal, and gives it back as it was. The key q, and Ctrl-C, end the function's context.
func onScreen(ctx context.Context, out *os.File, in io.Reader, run func(context.Context, *screen) error) error {
	ctx, s, err := openScreen(ctx, out, in)
	if err != nil {
		return err
	}
	defer s.close()
	return run(ctx, s)
}

func openScreen(ctx context.Context, out *os.File, in io.Reader) (context.Context, *screen, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &screen{out: out, redraw: make(chan struct{}, 1)}
	if f, ok := in.(*os.File); ok {
		if t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			s.in, s.before = f, t
			keys := *t
			keys.Lflag &^= unix.ICANON | unix.ECHO | unix.ISIG // Ctrl-C and Ctrl-Z are keys, too
			keys.Cc[unix.VMIN], keys.Cc[unix.VTIME] = 1, 0
			if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, &keys); err != nil {
				cancel()
				return ctx, nil, fmt.Errorf("terminal: %w", err)
			}
			go readKeys(f, cancel)
		}
	}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	second := time.NewTicker(time.Second)
	go func() {
		for {
			select {
			case <-resized:
			case <-second.C:
			case <-ctx.Done():
				return
			}
			step.Wake(s.redraw)
		}
	}()
	s.stop = func() {
		cancel()
		signal.Stop(resized)
		second.Stop()
	}
	_, err := io.WriteString(out, screenBegin)
	if err != nil {
		s.close()
	}
	return ctx, s, err
}

// readKeys calls quit at the key q, Q, Ctrl-C or Ctrl-D, and where the terminal is gone.
func readKeys(in io.Reader, quit func()) {
	key := make([]byte, 16)
	for {
		n, err := in.Read(key)
		if err != nil || slices.ContainsFunc(key[:n], func(b byte) bool { return b == 'q' || b == 'Q' || b == 3 || b == 4 }) {
			quit()
			return
		}
	}
}

// close gives the terminal back as it was.
func (s *screen) close() {
	s.stop()
	_, _ = io.WriteString(s.out, screenEnd)
	if s.in != nil {
		_ = unix.IoctlSetTermios(int(s.in.Fd()), unix.TCSETS, s.before)
	}
}

// draw shows a report in place of the one before.
func (s *screen) draw(r status.Report) error {
	var text bytes.Buffer
	if err := status.Text(&text, r, style(s.out)); err != nil {
		return err
	}
	rows := 0 // not known
	if size, err := unix.IoctlGetWinsize(int(s.out.Fd()), unix.TIOCGWINSZ); err == nil {
		rows = int(size.Row)
	}
	foot := r.Time.Format("Mon 2006-01-02 15:04:05 MST") + "   q: quit"
	_, err := io.WriteString(s.out, picture(text.String(), foot, rows))
	return err
}

// picture makes one picture of a text and a last line, for a terminal of so many rows (0: not known). It is written over the one
// before, line by line, so that nothing flickers. A line is erased before it is written: after one that is as wide as the terminal the
// cursor still stands on its last character.
func picture(text, foot string, rows int) string {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if rows > 0 && len(lines) > rows-2 {
		keep := max(0, rows-3)
		lines = append(lines[:keep], fmt.Sprintf("(%d more lines)", len(lines)-keep))
	}
	if lines = append(lines, "", foot); rows > 0 && len(lines) > rows {
		lines = lines[:rows]
	}
	return home + eraseLine + strings.Join(lines, "\r\n"+eraseLine) + eraseBelow
}
