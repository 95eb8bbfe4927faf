package status

import (
	"cmp"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Style is how a report is drawn.
type Style struct {
	// Width is that of the terminal, in columns; 0: there is none, and no line is cut.
	Width int
	// ASCII leaves out all that a terminal without UTF-8 does not show.
	ASCII bool
	// Paint colours a text; nil: there are no colours.
	Paint func(tone Tone, text string) string
}

// Tone is what a colour stands for.
type Tone int

// The tones.
const (
	Plain Tone = iota
	Good
	Busy
	Bad
	Strong
)

// look is how a state is drawn: as systemctl does it, and in ASCII.
type look struct {
	symbol, ascii string
	tone          Tone
}

var looks = map[string]look{
	Ready: {"●", "*", Good}, Degraded: {"●", "*", Bad}, Starting: {"●", "*", Busy}, Stopping: {"●", "*", Busy}, Retrying: {"✗", "x", Bad},
	Failed: {"✗", "x", Bad}, Refused: {"✗", "x", Bad}, Down: {"○", "-", Plain},
	Done: {"✓", "+", Good}, Running: {"●", "*", Busy}, Waiting: {"○", "-", Plain}, Unusable: {"✗", "x", Bad},
}

// labelWidth is that of the longest label, render-containerd.
const labelWidth = 17

// Text draws a report for people.
func Text(w io.Writer, r Report, style Style) error {
	t := text{Style: style}
	t.goal(r)
	for _, s := range r.Slots {
		t.gap()
		t.slot(r, s)
	}
	if len(r.Slots) == 0 && r.Goal.State == Valid {
		t.line("", "no slots")
	}
	_, err := io.WriteString(w, t.b.String())
	return err
}

type text struct {
	Style
	b strings.Builder
}

func (t *text) gap() {
	if t.b.Len() > 0 {
		t.b.WriteByte('\n')
	}
}

// goal tells of the goal state where something is wrong with it.
func (t *text) goal(r Report) {
	what := map[string]string{
		Invalid:    "not valid: no slot can be started; one that runs can be stopped",
		Unreadable: "not readable for this user: what it says is not known",
		None:       "there is none",
	}[r.Goal.State]
	if what == "" {
		return
	}
	var on []string
	for _, s := range r.Slots {
		if s.goesOn() {
			on = append(on, s.Name)
		}
	}
	if on != nil {
		what = "not valid; with their last good one go on: " + strings.Join(on, ", ")
	}
	t.b.WriteString(t.symbol(Failed) + " " + t.paint(Strong, "goal state") + ": " + what + "\n")
	for _, e := range r.Goal.Errors {
		t.wrap("  ", "    ", t.clean(e))
	}
	t.next(r.Next)
}

func (t *text) slot(r Report, s Slot) {
	head := t.symbol(s.State) + " " + t.paint(Strong, "slot "+s.Name)
	if s.Name == r.Goal.Boot {
		head += " (boot)"
	}
	head += ": " + t.paint(looks[s.State].tone, s.State)
	if s.Since != nil {
		head += " since " + s.Since.Format("Mon 2006-01-02 15:04:05 MST") + ", " + age(r.Time.Sub(*s.Since)) + " ago"
	}
	t.b.WriteString(head + "\n")
	system := []string{s.Machine, cmp.Or(s.System.OS, "unknown system")}
	if s.System.Systemd != "" {
		system = append(system, "systemd "+s.System.Systemd)
	}
	if s.System.Kernel != "" {
		system = append(system, "Linux "+s.System.Kernel)
	}
	t.row("  ", "machine", strings.Join(system, ", "))
	t.row("  ", "versions", "containerd "+cmp.Or(s.Containerd.Version, "unknown")+", kubelet "+cmp.Or(s.Kubelet.Version, "unknown"))
	if counts := restarts(s.Restarts); counts != "" {
		t.row("  ", "restarts", counts)
	}
	switch {
	case s.goesOn():
		t.row("  ", "goal state", "its last good one, recorded "+s.LastGood.Recorded.Format("Mon 2006-01-02 15:04:05 MST"))
	case r.Goal.State != Valid:
	case !s.InGoalState && s.State == Down:
		t.row("  ", "goal state", "the slot is not in it")
	case !s.InGoalState:
		t.row("  ", "goal state", "the slot is not in it (any more)")
	case len(s.Stale) > 0:
		t.row("  ", "goal state", "changed: not as it says: "+stale(s.Stale))
	case s.GoalNewer:
		t.row("  ", "goal state", "changed since the slot started")
	}
	if s.LastGood != nil && s.LastGood.Error != "" {
		t.row("  ", "last good", s.LastGood.Error)
	}
	if s.Reason != "" && (s.State == Degraded || s.State == Down) {
		t.row("  ", "reason", s.Reason)
	}
	if s.State != Down || slices.ContainsFunc(s.Steps, func(st Step) bool { return st.State != Down }) {
		t.steps(s.Steps)
	}
	t.next(s.Next)
}

// steps draws a line for each step, and one for several of which there is nothing to tell but a state that they share.
func (t *text) steps(steps []Step) {
	for i := 0; i < len(steps); {
		st, n := steps[i], 1
		for i+n < len(steps) && plain(st) && plain(steps[i+n]) && steps[i+n].State == st.State && steps[i+n].Status == st.Status {
			n++
		}
		switch {
		case n > 1 && st.Status != "":
			t.step(st.State, fmt.Sprintf("%d steps", n), nil, st.Status)
		case n > 1:
			t.step(st.State, fmt.Sprintf("%d steps", n), nil, st.Name+" to "+steps[i+n-1].Name)
		case st.Name == "node" && slices.ContainsFunc(steps[:i], blamed(st.Status)):
			t.step(st.State, st.Name, st.Seconds, "") // its status repeats what has been told
		default:
			t.step(st.State, st.Name, st.Seconds, st.Status)
		}
		t.log(st)
		i += n
	}
}

// plain tells whether a step was not run, and left no log.
func plain(st Step) bool { return st.Seconds == nil && st.Log == nil }

// blamed tells whether a status of node@ gives the reason of a step.
func blamed(status string) func(Step) bool {
	return func(st Step) bool {
		return looks[st.State].tone == Bad && strings.HasPrefix(status, "step "+st.Unit+" ")
	}
}

// idle tells whether there is nothing to tell of a step.
func idle(st Step) bool { return (st.State == Waiting || st.State == Down) && st.Status == "" }

// The columns of a step: its state is at most as long as "retrying", its time as "59min 59s".
const (
	stateWidth   = 8
	tookWidth    = 9
	statusColumn = 2 + 2 + labelWidth + 1 + stateWidth + 1 + tookWidth + 2
)

func (t *text) step(state, name string, seconds *float64, status string) {
	took := ""
	if seconds != nil {
		took = duration(*seconds)
	}
	line := fmt.Sprintf("  %s %-*s %s %*s  ", t.symbol(state), labelWidth, name,
		t.paint(looks[state].tone, fmt.Sprintf("%-*s", stateWidth, state)), tookWidth, took)
	status = t.clean(status)
	// What failed, and what is waited for, is told in full.
	if tone := looks[state].tone; (tone == Bad || tone == Busy) && t.cut(status, statusColumn) != status {
		t.b.WriteString(strings.TrimRight(line, " ") + "\n")
		t.wrap(detail, detail, status)
		return
	}
	t.b.WriteString(strings.TrimRight(line+t.cut(status, statusColumn), " ") + "\n")
}

// detail is the indentation of what belongs to a step.
const detail = "      "

// log draws the last line of what failed, unless it is what the step said itself.
func (t *text) log(st Step) {
	if st.Log == nil || len(st.Log.Lines) == 0 {
		return
	}
	last := strings.TrimSpace(st.Log.Lines[len(st.Log.Lines)-1])
	if last == st.Status {
		return
	}
	t.wrap(detail, detail+"  ", st.Log.Unit+": "+t.clean(last))
}

func (t *text) next(commands []Command) {
	width := 0
	for _, c := range commands {
		width = max(width, utf8.RuneCountInString(c.Command))
	}
	for i, c := range commands {
		label := "next"
		if i > 0 {
			label = ""
		}
		line := fmt.Sprintf("  %-*s ", labelWidth-7, label)
		// A command is never cut: it is there to be copied.
		comment := fmt.Sprintf("%*s  # %s", width-utf8.RuneCountInString(c.Command), "", c.Why)
		if t.Width > 0 && len(line)+width+2+2+utf8.RuneCountInString(c.Why) > t.Width {
			comment = "\n" + strings.Repeat(" ", len(line)) + "# " + c.Why
		}
		t.b.WriteString(line + t.paint(Strong, c.Command) + comment + "\n")
	}
}

func (t *text) row(indent, label, value string) {
	line := fmt.Sprintf("%s%-*s ", indent, labelWidth-7, label)
	t.wrap(line, strings.Repeat(" ", len(line)), t.clean(value))
}

func (t *text) line(indent, value string) {
	t.b.WriteString(indent + t.cut(t.clean(value), len(indent)) + "\n")
}

// wrap writes a text into lines of the terminal's width, at spaces where it can.
func (t *text) wrap(first, more, value string) {
	indent := first
	for {
		room := t.Width - len(indent)
		if t.Width == 0 || utf8.RuneCountInString(value) <= room || room < 20 {
			t.b.WriteString(strings.TrimRight(indent+value, " ") + "\n")
			return
		}
		runes := []rune(value)
		at := strings.LastIndex(string(runes[:room+1]), " ")
		if at <= 0 {
			at = len(string(runes[:room]))
		}
		t.b.WriteString(strings.TrimRight(indent+value[:at], " ") + "\n")
		value, indent = strings.TrimLeft(value[at:], " "), more
	}
}

// cut shortens a text that begins at a column to what the terminal has room for.
func (t *text) cut(value string, column int) string {
	room := t.Width - column
	if t.Width == 0 || utf8.RuneCountInString(value) <= room {
		return value
	}
	mark := "…"
	if t.ASCII {
		mark = "..."
	}
	room -= utf8.RuneCountInString(mark)
	if room <= 0 {
		return ""
	}
	return string([]rune(value)[:room]) + mark
}

func (t *text) symbol(state string) string {
	l := looks[state]
	if t.ASCII {
		return t.paint(l.tone, l.ascii)
	}
	return t.paint(l.tone, l.symbol)
}

func (t *text) paint(tone Tone, s string) string {
	if t.Paint == nil || tone == Plain {
		return s
	}
	return t.Paint(tone, s)
}

func (t *text) clean(s string) string { return clean(s, t.ASCII) }

// clean makes a text that came from elsewhere, a machine's log for instance, safe to write to a terminal.
func clean(s string, ascii bool) string {
	if ascii {
		s = strings.ReplaceAll(s, "…", "...")
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t' || r == '\n':
			return ' '
		case !unicode.IsPrint(r), ascii && r > unicode.MaxASCII:
			return '?'
		}
		return r
	}, s)
}

// restarts tells how often what was restarted by itself; empty: nothing was.
func restarts(r Restarts) string {
	var parts []string
	for _, c := range []struct {
		name string
		n    *uint32
	}{{"node", r.Node}, {"machine", r.Machine}, {"containerd", r.Containerd}, {"kubelet", r.Kubelet}} {
		if c.n != nil && *c.n > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", c.name, *c.n))
		}
	}
	return strings.Join(parts, ", ")
}

// duration writes the seconds of a step, in systemd's way (systemd.time(7)).
func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	return age(d)
}

// age writes a longer time, in its two largest units.
func age(d time.Duration) string {
	s := int64(max(d, 0) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 60*60:
		return fmt.Sprintf("%dmin %ds", s/60, s%60)
	case s < 24*60*60:
		return fmt.Sprintf("%dh %dmin", s/3600, s/60%60)
	}
	return fmt.Sprintf("%dd %dh", s/86400, s/3600%24)
}

// Changes tells what is different from an earlier report, a line each; of a report without an earlier one, all that is to tell.
func Changes(before *Report, now Report) []string {
	var lines []string
	say := func(format string, a ...any) { lines = append(lines, clean(fmt.Sprintf(format, a...), false)) }
	if before == nil && now.Goal.State != Valid || before != nil && now.Goal.State != before.Goal.State {
		say("goal state: %s", now.Goal.State)
	}
	if before == nil || !slices.Equal(now.Goal.Errors, before.Goal.Errors) {
		for _, e := range now.Goal.Errors {
			say("goal state: %s", e)
		}
	}
	for _, s := range now.Slots {
		old := find(before, s.Name)
		for i, st := range s.Steps {
			was := Step{State: Down}
			if old != nil {
				was = old.Steps[i]
			}
			if st.State == was.State && st.Status == was.Status || idle(st) {
				continue
			}
			line := fmt.Sprintf("slot %s: %s: %s", s.Name, st.Name, st.State)
			if st.Seconds != nil && st.State != Running && st.State != Stopping {
				line += " after " + duration(*st.Seconds)
			}
			if st.Status != "" {
				line += ": " + st.Status
			}
			say("%s", line)
		}
		if old == nil || old.State != s.State {
			line := fmt.Sprintf("slot %s: %s", s.Name, s.State)
			if s.Reason != "" && (s.State == Degraded || s.State == Down) {
				line += ": " + s.Reason
			}
			say("%s", line)
		}
	}
	if before != nil {
		for _, s := range before.Slots {
			if find(&now, s.Name) == nil {
				say("slot %s: gone", s.Name)
			}
		}
	}
	return lines
}

func find(r *Report, slot string) *Slot {
	if r == nil {
		return nil
	}
	for i := range r.Slots {
		if r.Slots[i].Name == slot {
			return &r.Slots[i]
		}
	}
	return nil
}

// stale names the unit files that are not as the goal state says: the first, as that of node@ or of a step tells enough.
func stale(files []string) string {
	name := path.Base(files[0])
	if dir := path.Base(path.Dir(files[0])); strings.HasSuffix(dir, ".d") || strings.HasSuffix(dir, ".wants") {
		name = dir + "/" + name // all drop-ins have one name
	}
	switch more := len(files) - 1; more {
	case 0:
		return name
	case 1:
		return name + " and 1 more file"
	default:
		return fmt.Sprintf("%s and %d more files", name, more)
	}
}
