package cli

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/aymanbagabas/go-udiff"
	"github.com/urfave/cli/v2"

	"berth/generator/compare"
	"berth/generator/file"
	"berth/generator/needs"
)

func diffCommand() *cli.Command {
	return &cli.Command{
		Name:      "diff",
		Usage:     "compare what is on the host with what would be written",
		ArgsUsage: "[SLOT]",
		Description: `Compares what is on the host with what the generator and render-config
would write for SLOT (default: all slots). Of each file that is not the
same it prints what is different, and what the slot needs before the
change has an effect: nothing, no restart (it only has to be written), a
daemon-reload, or the restart of kubelet, of containerd or of the machine;
at the end, the command to type. "systemctl restart node@SLOT" is what
restarts any of them, and takes the machine along.

Nothing is written. Where nothing is different, nothing is printed. A slot
that is not running reads all but its units when it starts. Files are
compared, not processes: a restart that is still to be done for a file that
is written already is not seen.

The content of a file that holds a secret, of one that only root may read,
and of one that would be removed is not printed. Files of which only the
first comment differs, because the goal state is in other files now, are
counted.

   berth diff                  all slots
   berth diff --exit-code a    for scripts: exits with 1 on a difference

With --json, the document is {"slots": […]}, and a slot has:
   slot, running      its name; whether it holds the claim on the host
   changes            path, step; state (missing, differs, leftover);
                      secret; old and new (type, mode; target of a link;
                      owner, where it is a wrong one), null for no file;
                      diff (unified); needs, because
   needs              of all changes: of "daemon-reload", and one of
                      "kubelet", "containerd", "machine"; empty: nothing
   command            to type; empty: nothing, or a restart would fail
   warnings, errors   step, text

Exit codes: 0 done, 1 a step would fail or a file could not be read, or
with --exit-code something is different, 2 usage, 3 the goal state is not
valid or does not have the slot`,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "exit-code", Usage: "exit with 1 if something is different"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
		},
		Action: diff,
	}
}

// diffSlot, diffFile and diffSide are the keys of --json.
type diffSlot struct {
	Slot     string     `json:"slot"`
	Running  bool       `json:"running"`
	Changes  []diffFile `json:"changes"`
	Needs    []string   `json:"needs"`
	Command  string     `json:"command"`
	Warnings []note     `json:"warnings"`
	Errors   []note     `json:"errors"`

	sum needs.Need
}

type diffFile struct {
	Path    string        `json:"path"`
	Step    string        `json:"step"`
	State   compare.State `json:"state"`
	Secret  bool          `json:"secret"`
	Old     *diffSide     `json:"old"`
	New     *diffSide     `json:"new"`
	Diff    string        `json:"diff,omitempty"`
	Needs   []string      `json:"needs"`
	Because string        `json:"because"`

	need needs.Need
}

type diffSide struct {
	Type   string `json:"type"`
	Mode   string `json:"mode"`
	Target string `json:"target,omitempty"`
	Owner  *int   `json:"owner,omitempty"`
}

func diff(c *cli.Context) error {
	host, names, err := slots(c)
	if err != nil {
		return err
	}
	all := []diffSlot{}
	var failed error
	for _, name := range names {
		s := diffSlot{Slot: name, Running: host.Running(name), Changes: []diffFile{}, Warnings: []note{}, Errors: []note{}}
		var wants []needs.Need
		for _, p := range host.Slot(c.Context, name) {
			for _, w := range p.Output.Warnings {
				s.Warnings = append(s.Warnings, note{p.Step(), w})
			}
			changes, err := compare.Part(host.Root, p, s.Running)
			for _, e := range []error{p.Err, err} {
				if e == nil {
					continue
				}
				if n := (note{p.Step(), e.Error()}); !slices.Contains(s.Errors, n) { // what a step cannot read cannot be compared either
					s.Errors = append(s.Errors, n)
				}
			}
			for _, change := range changes {
				s.Changes = append(s.Changes, described(change))
				wants = append(wants, change.Need)
			}
		}
		s.sum = needs.Sum(wants)
		s.Needs, s.Command = s.sum.Words(), s.sum.Command(name)
		if len(s.Errors) > 0 && s.sum.Restart != needs.None {
			s.Command = "" // it would take the node down, and leave it so
		}
		if len(s.Errors) > 0 || c.Bool("exit-code") && len(s.Changes) > 0 {
			failed = errSilent
		}
		all = append(all, s)
	}
	if c.Bool("json") {
		return cmp.Or(printJSON(c.App.Writer, map[string]any{"slots": all}), failed)
	}
	for _, s := range all {
		printNotes(c.App.ErrWriter, s.Slot, s.Warnings, s.Errors)
	}
	w := bufio.NewWriter(c.App.Writer)
	printDiff(w, colours(c.App.Writer), all)
	return cmp.Or(w.Flush(), failed)
}

func described(c compare.Change) diffFile {
	d := diffFile{
		Path: c.Path, Step: c.Step, State: c.State, Secret: c.Secret(), Old: side(c.Old), New: side(c.New),
		Needs: c.Need.Words(), Because: c.Need.Because, need: c.Need,
	}
	if c.Owner >= 0 {
		d.Old.Owner = &c.Owner
	}
	if c.New == nil || !c.New.Mode.IsRegular() || d.Secret || c.Unknown {
		return d
	}
	from, old := "/dev/null", ""
	if c.Old != nil {
		if !c.Old.Mode.IsRegular() {
			return d
		}
		from, old = c.Path, string(c.Old.Content)
	}
	d.Diff = udiff.Unified(from, c.Path, old, string(c.New.Content))
	return d
}

func side(f *file.File) *diffSide {
	if f == nil {
		return nil
	}
	s := &diffSide{Type: fileType(f.Mode), Mode: permissions(f.Mode)}
	if f.Mode.Type() == fs.ModeSymlink {
		s.Target = string(f.Content)
	}
	return s
}

// states are the words for people.
var states = map[compare.State]string{compare.Missing: "is missing", compare.Differs: "differs", compare.LeftOver: "is left over"}

func printDiff(w io.Writer, paint palette, all []diffSlot) {
	between := ""
	for _, s := range all {
		if len(s.Changes) == 0 {
			continue
		}
		fmt.Fprint(w, between)
		between = "\n"
		comments := 0
		for _, f := range s.Changes {
			if f.Because == needs.OnlyComment && *f.Old == *f.New {
				comments++
				continue
			}
			fmt.Fprintln(w, paint.paint(bold, visible(f.Path)+" "+states[f.State]))
			fmt.Fprintf(w, "needs %s: %s\n", f.need, f.Because)
			printSides(w, f)
			for line := range strings.Lines(f.Diff) {
				line = strings.TrimSuffix(line, "\n")
				colour := map[byte]colour{'+': green, '-': red}[(line + " ")[0]]
				if colour == "" {
					fmt.Fprintln(w, visible(line))
				} else {
					fmt.Fprintln(w, paint.paint(colour, visible(line)))
				}
			}
			fmt.Fprintln(w)
		}
		if comments > 0 {
			fmt.Fprintf(w, "different only in the first comment, which names the files of the goal state: %d\n\n", comments)
		}
		text := fmt.Sprintf("slot %s needs %s", s.Slot, s.sum)
		if len(s.Errors) > 0 {
			text += ", as far as is known"
		}
		switch {
		case s.Command != "":
			text += ": " + s.Command
		case len(s.Errors) > 0:
			text += ": first see to what fails"
		}
		fmt.Fprintln(w, paint.paint(yellow, text))
	}
}

// printSides tells what the two sides are, beside the content.
func printSides(w io.Writer, f diffFile) {
	if f.New == nil {
		return
	}
	text := func(s *diffSide) string {
		if s.Type == "link" {
			return "link -> " + visible(s.Target)
		}
		return s.Type + " " + s.Mode
	}
	if f.Old == nil {
		fmt.Fprintf(w, "new %s\n", text(f.New))
		return
	}
	if was, is := text(f.Old), text(f.New); was != is {
		fmt.Fprintf(w, "was %s, is to be %s\n", was, is)
	}
	if f.Old.Owner != nil {
		fmt.Fprintf(w, "belongs to user %d\n", *f.Old.Owner)
	}
	if f.Secret {
		fmt.Fprintln(w, notShown)
	}
}
