package cli

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"text/tabwriter"

	"github.com/urfave/cli/v2"

	"berth/helpers/render"
	"berth/helpers/render/parts"
)

func showCommand() *cli.Command {
	return &cli.Command{
		Name:      "show",
		Usage:     "print every file that a slot would get",
		ArgsUsage: "[SLOT]",
		Description: `Prints every file that the generator and render-config would write for
SLOT (default: all slots) on this host, as it is now: its path, its mode,
the step that writes it, and its content; and the files that would be
removed. Nothing is written. The content of a file that holds a secret is
not printed. Warnings and errors of a step go to the standard error stream
(with --json into the document); a step that would fail does not hide what
the others write.

   berth show a                      all of slot a
   berth show --list                 one line a file: type, mode, step, path
   berth show --file /run/systemd/nspawn/node-a.nspawn
                                     a file's content, or a link's target
   berth --root /mnt/image show      of a host in an image

With --json, the document is {"slots": […]}, and a slot has:
   slot, running      its name; whether it holds the claim on the host
   files              path, type (file, link, folder), mode, step, secret;
                      target of a link; content, but not of a secret file,
                      nor with --list
   remove             path, step: what is removed if it is there
   warnings, errors   step, text

Exit codes: 0 done, 1 a step would fail, 2 usage, 3 the goal state is not
valid or does not have the slot`,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "list", Usage: "leave out the content"},
			&cli.StringFlag{Name: "file", Usage: "print only the content of the file at `PATH`"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
		},
		Action: show,
	}
}

// shownSlot, shownFile and shownRemoval are the keys of --json.
type shownSlot struct {
	Slot     string         `json:"slot"`
	Running  bool           `json:"running"`
	Files    []shownFile    `json:"files"`
	Remove   []shownRemoval `json:"remove"`
	Warnings []note         `json:"warnings"`
	Errors   []note         `json:"errors"`
}

type shownFile struct {
	Path    string  `json:"path"`
	Type    string  `json:"type"`
	Mode    string  `json:"mode"`
	Step    string  `json:"step"`
	Secret  bool    `json:"secret"`
	Target  string  `json:"target,omitempty"`
	Content *string `json:"content,omitempty"`
}

type shownRemoval struct {
	Path string `json:"path"`
	Step string `json:"step"`
}

func show(c *cli.Context) error {
	host, names, err := slots(c)
	if err != nil {
		return err
	}
	if c.IsSet("file") && (c.Bool("list") || c.Bool("json")) {
		return usagef("--file prints a file's content alone: leave out --list and --json")
	}
	all := []shownSlot{}
	var failed error
	for _, name := range names {
		s := shown(name, host.Running(name), host.Slot(c.Context, name))
		if len(s.Errors) > 0 {
			failed = errSilent
		}
		all = append(all, s)
	}
	if c.IsSet("file") {
		return showFile(c, all)
	}
	for _, s := range all {
		if c.Bool("list") {
			for i := range s.Files {
				s.Files[i].Content = nil
			}
		}
		if !c.Bool("json") {
			printNotes(c.App.ErrWriter, s.Slot, s.Warnings, s.Errors)
		}
	}
	switch w := c.App.Writer; {
	case c.Bool("json"):
		err = printJSON(w, map[string]any{"slots": all})
	case c.Bool("list"):
		err = listFiles(w, all)
	default:
		buffer := bufio.NewWriter(w)
		showFiles(buffer, colours(w), all)
		err = buffer.Flush()
	}
	return cmp.Or(err, failed)
}

// shown is what is told about a slot.
func shown(name string, running bool, list []parts.Part) shownSlot {
	s := shownSlot{Slot: name, Running: running, Files: []shownFile{}, Remove: []shownRemoval{}, Warnings: []note{}, Errors: []note{}}
	for _, p := range list {
		step := p.Step()
		for _, f := range p.Output.Files {
			file := shownFile{Path: p.Path(f.Path), Type: fileType(f.Mode), Mode: permissions(f.Mode), Step: step, Secret: f.Secret}
			switch {
			case f.Mode.Type() == fs.ModeSymlink:
				file.Target = string(f.Content)
			case f.Mode.IsRegular() && !f.Secret && !(p.NoToken && f.Path == render.Bootstrap):
				text := string(f.Content)
				file.Content = &text
			}
			s.Files = append(s.Files, file)
		}
		for _, name := range p.Output.Remove {
			s.Remove = append(s.Remove, shownRemoval{p.Path(name), step})
		}
		for _, w := range p.Output.Warnings {
			s.Warnings = append(s.Warnings, note{step, w})
		}
		if p.Err != nil {
			s.Errors = append(s.Errors, note{step, p.Err.Error()})
		}
	}
	return s
}

// showFile prints one file for a pipe, byte for byte.
func showFile(c *cli.Context, all []shownSlot) error {
	name := c.String("file")
	for _, s := range all {
		for _, f := range s.Files {
			switch {
			case f.Path != name:
				continue
			case f.Type == "link":
				_, err := fmt.Fprintln(c.App.Writer, f.Target)
				return err
			case f.Content != nil:
				_, err := io.WriteString(c.App.Writer, *f.Content)
				return err
			case f.Secret:
				return fmt.Errorf("%s holds a secret, which is not printed", name)
			default:
				return fmt.Errorf("%s is a folder", name)
			}
		}
	}
	// It may be of a step that fails.
	for _, s := range all {
		printNotes(c.App.ErrWriter, s.Slot, nil, s.Errors)
	}
	return fmt.Errorf("no step writes %s: for the files that are written, see berth show --list", name)
}

func listFiles(w io.Writer, all []shownSlot) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, s := range all {
		for _, f := range s.Files {
			name := f.Path
			if f.Target != "" {
				name += " -> " + f.Target
			}
			if f.Secret {
				name += " (secret)"
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f.Type, f.Mode, f.Step, visible(name))
		}
		for _, r := range s.Remove {
			fmt.Fprintf(t, "remove\t-\t%s\t%s\n", r.Step, visible(r.Path))
		}
	}
	return t.Flush()
}

func showFiles(w io.Writer, paint palette, all []shownSlot) {
	between := ""
	for _, s := range all {
		for _, f := range s.Files {
			fmt.Fprint(w, between)
			between = "\n"
			switch {
			case f.Type == "link":
				fmt.Fprintln(w, paint.paint(bold, visible(fmt.Sprintf("==> %s -> %s (%s)", f.Path, f.Target, f.Step))))
			case f.Type == "folder":
				fmt.Fprintln(w, paint.paint(bold, visible(fmt.Sprintf("==> %s/ (%s, %s)", f.Path, f.Mode, f.Step))))
			default:
				fmt.Fprintln(w, paint.paint(bold, visible(fmt.Sprintf("==> %s (%s, %s)", f.Path, f.Mode, f.Step))))
				if f.Content == nil {
					fmt.Fprintln(w, notShown)
				} else {
					fmt.Fprint(w, visible(*f.Content))
				}
			}
		}
		for _, r := range s.Remove {
			fmt.Fprint(w, between, paint.paint(bold, visible(fmt.Sprintf("==> %s (%s)", r.Path, r.Step))), "\n(removed if it is there)\n")
			between = "\n"
		}
	}
}
