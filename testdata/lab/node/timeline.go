package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/testdata/lab"
)

// Span is when a unit was being started. The times are since the start of the first unit of the same slot.
type Span struct {
	Unit        string // those in the machine begin with "node-a: "
	Status      string // STATUS= of sd_notify(3)
	Began, Done time.Duration
}

// Spans returns the units of slot a, which is up, and some of those in its machine, in the order in which they began. It asks both
// systemds, which use the same clock: CLOCK_MONOTONIC.
func Spans(ctx context.Context, h *lab.Host) ([]Span, error) {
	host, err := show(ctx, h, "", "", "node@a.service", "node-*@a.service", "systemd-nspawn@node-a.service")
	inside, insideErr := show(ctx, h, "node-a: ", "--machine=node-a", "systemd-journald.service", "local-fs.target",
		"systemd-tmpfiles-setup.service", "sysinit.target", "dbus.socket", "containerd.service", "kubelet.service")
	spans := append(host, inside...)
	if err := errors.Join(err, insideErr); err != nil || len(spans) == 0 {
		return nil, err
	}
	slices.SortFunc(spans, func(a, b Span) int { return cmp.Or(cmp.Compare(a.Began, b.Began), cmp.Compare(a.Done, b.Done)) })
	first := spans[0].Began
	for i := range spans {
		spans[i].Began -= first
		spans[i].Done -= first
	}
	return spans, nil
}

// show asks a systemd for units that are up. The times are those of its clock.
func show(ctx context.Context, h *lab.Host, prefix, option string, units ...string) ([]Span, error) {
	args := []string{"show", "--property=Id,StatusText,InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic"}
	if option != "" {
		args = append(args, option)
	}
	out, stderr, exit, err := h.Run(ctx, "systemctl", append(args, units...)...)
	if err != nil || exit != 0 {
		return nil, cmp.Or(err, fmt.Errorf("systemctl show: exit status %d: %s", exit, stderr))
	}
	var spans []Span
	for block := range strings.SplitSeq(strings.TrimSpace(out), "\n\n") {
		p := map[string]string{}
		for line := range strings.Lines(block) {
			key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			p[key] = value
		}
		if done := microseconds(p["ActiveEnterTimestampMonotonic"]); done > 0 {
			began := microseconds(p["InactiveExitTimestampMonotonic"])
			spans = append(spans, Span{prefix + strings.TrimSuffix(p["Id"], ".service"), p["StatusText"], min(began, done), done})
		}
	}
	return spans, nil
}

func microseconds(s string) time.Duration {
	n, _ := strconv.ParseInt(s, 10, 64) // empty where systemd knows none
	return time.Duration(n) * time.Microsecond
}

// Timeline draws spans with characters, one a line.
func Timeline(spans []Span) string {
	const columns = 60
	whole := end(spans)
	var b strings.Builder
	for _, s := range spans {
		from := min(int(s.Began*columns/whole), columns-1)
		to := max(int(s.Done*columns/whole), from+1)
		fmt.Fprintf(&b, "%-38s %5d ms %+6d ms |%s%s%s|\n", s.Unit, s.Began.Milliseconds(), (s.Done - s.Began).Milliseconds(),
			strings.Repeat(" ", from), strings.Repeat("█", to-from), strings.Repeat(" ", columns-to))
	}
	return b.String()
}

// TimelineSVG draws spans as an SVG image.
func TimelineSVG(title string, spans []Span) string {
	const (
		left, width, line = 330, 700, 20
	)
	whole := end(spans)
	var b strings.Builder
	height := (len(spans) + 2) * line
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n",
		left+width+80, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/><text x="4" y="14" font-weight="bold">%s: %.0f ms</text>`+"\n",
		html.EscapeString(title), whole.Seconds()*1e3)
	for at := time.Duration(0); at <= whole; at += 200 * time.Millisecond {
		x := left + int(at*width/whole)
		fmt.Fprintf(&b, `<line x1="%[1]d" y1="%[2]d" x2="%[1]d" y2="%[3]d" stroke="#ddd"/><text x="%[1]d" y="14" fill="#888">%[4]d</text>`+"\n",
			x, line, height, at.Milliseconds())
	}
	for i, s := range spans {
		y := (i + 1) * line
		x, to := left+int(s.Began*width/whole), left+int(s.Done*width/whole)
		colour := "#36a"
		if strings.HasPrefix(s.Unit, "node-a: ") {
			colour = "#9b6"
		}
		fmt.Fprintf(&b, `<text x="4" y="%d">%s</text><rect x="%d" y="%d" width="%d" height="%d" fill="%s"/><text x="%d" y="%d" fill="#555">%.0f ms</text>`+"\n",
			y+14, html.EscapeString(s.Unit), x, y+3, max(to-x, 1), line-6, colour, max(to, x+1)+4, y+14, (s.Done-s.Began).Seconds()*1e3)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// end is when the last of the spans was done.
func end(spans []Span) time.Duration {
	whole := time.Duration(1)
	for _, s := range spans {
		whole = max(whole, s.Done)
	}
	return whole
}
