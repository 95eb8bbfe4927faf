package cli

import (
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"berth/generator/goalstate"
	"berth/helpers/render/parts"
	"berth/helpers/step"
)

// slots returns the host, and the names of the slots that the command line is about: the one that it names, else all.
func slots(c *cli.Context) (*parts.Host, []string, error) {
	slot := c.Args().First()
	switch {
	case c.NArg() > 1:
		return nil, nil, usagef("%d arguments: want one slot, with the options before it (see berth %s --help)", c.NArg(), c.Command.Name)
	case slot != "" && !goalstate.ValidSlotName(slot):
		return nil, nil, usagef("slot %q: want 1 to 16 of a-z and 0-9", slot)
	}
	dir, err := root(c)
	if err != nil {
		return nil, nil, err
	}
	host, err := parts.Look(dir)
	if err != nil {
		return nil, nil, err
	}
	for line := range strings.Lines(host.Instead()) {
		fmt.Fprintln(c.App.ErrWriter, "berth: "+visible(strings.TrimSuffix(line, "\n")))
	}
	names, err := host.Slots()
	switch {
	case err != nil:
		return nil, nil, err
	case len(names) == 0:
		return nil, nil, step.NoGoal()
	case slot == "":
		return host, names, nil
	case !slices.Contains(names, slot) && host.Broken != nil:
		return nil, nil, host.Broken
	case !slices.Contains(names, slot):
		return nil, nil, step.NoSlot(host.Goal, slot)
	}
	return host, []string{slot}, nil
}

// note is a warning or an error of a step.
type note struct {
	Step string `json:"step"`
	Text string `json:"text"`
}

// printNotes writes notes line by line, each with the place that it is about.
func printNotes(w io.Writer, slot string, warnings, errors []note) {
	print := func(kind string, notes []note) {
		for _, n := range notes {
			for line := range strings.Lines(n.Text) {
				fmt.Fprintf(w, "berth: slot %s: %s: %s%s\n", slot, n.Step, kind, visible(strings.TrimSuffix(line, "\n")))
			}
		}
	}
	print("warning: ", warnings)
	print("", errors)
}

// notShown stands for the content of a file that holds a secret, or may hold one.
const notShown = "(secret: not shown)"

// fileType is the word for what a mode describes.
func fileType(mode fs.FileMode) string {
	switch mode.Type() {
	case 0:
		return "file"
	case fs.ModeDir:
		return "folder"
	case fs.ModeSymlink:
		return "link"
	}
	return "special"
}

// permissions are a mode's, as chmod(1) takes them.
func permissions(mode fs.FileMode) string {
	bits := uint32(mode.Perm())
	for i, special := range []fs.FileMode{fs.ModeSticky, fs.ModeSetgid, fs.ModeSetuid} {
		if mode&special != 0 {
			bits |= 0o1000 << i
		}
	}
	return fmt.Sprintf("%04o", bits)
}

// visible returns text with everything escaped that a terminal could take for a command: what is on a machine's root file system may
// have been written by anyone in it.
func visible(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(text[i:], string(utf8.RuneError)):
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == '\n' || r == '\t' || r != 0x7f && !unicode.IsControl(r) && !unicode.Is(unicode.Cf, r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}
