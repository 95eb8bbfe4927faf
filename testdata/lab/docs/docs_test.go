// Package docs types the commands of README.md and of each document in docs/ into a lab host, and compares what they print
// with what the document says. A document follows these conventions.
//
// Its first line chooses the host, which it has to itself: a Debian 13.
//
//	<!-- lab: bare -->  without berth. /root has the .deb; the machines node-a and node-b have a root file system with
//	                    kubelet and containerd, and /etc/berth has the cluster's CA and a bootstrap token.
//	<!-- lab: node -->  the same with berth installed, and with the files that docs/first-node.md writes, its goal state
//	                    above all. Nothing runs.
//
// The blocks run in their order, in one bash whose working directory is /root:
//
//	```console          Lines that begin with "# " are commands for root, with "$ " for another user; a backslash at the end
//	                    continues one. Below a command stands all it prints, both outputs together. "…" stands for anything
//	                    within a line, and alone in a line for any lines. A command that fails is followed by "# echo $?".
//	```LANGUAGE /PATH   is written to the file.
//	```toml             is a whole goal state: berth check has nothing against it.
//	```sh               has commands that cannot run in the lab; notRun has each of them, with the reason.
//	```text             has no commands.
//	<!-- lab COMMANDS --> over several lines: what readers have no need to see. Run by root in the same bash; none may fail.
//
// An indented block is one of ```sh.
package docs

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"berth/testdata/lab"
	"berth/testdata/lab/node"
)

// source is the folder of berth's source.
const source = "../../.."

// notRun are, by document and the first line of the block, the commands that cannot run in the lab, and why.
var notRun = map[string]map[string]string{
	"README.md": {
		"go run ./testdata/lab/cmd/lab demo": "boots a lab host itself; what it shows is in docs/first-node.md",
		"go test -timeout 60m -parallel 3 ./... ./testdata/gpu ./testdata/stubctk ./testdata/unitfile ./testdata/lab/...": "runs this test",
		"./install.sh install": "needs Go and the source: the lab's hosts are made by it",
		"just bench":           "measures for many minutes",
		"just faults":          "kills for many minutes",
		"just real":            "builds Kubernetes, for many minutes",
	},
	"docs/blue-green.md": {
		"debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,kmod,iproute2,mount,containerd,runc \\": internet,
	},
	"docs/first-node.md": {
		"./install.sh packages":          "needs Go and the source: the package that the chapter installs is made by it",
		"apt-get install -y debootstrap": internet,
	},
	"docs/images.md": {
		"DESTDIR=/tmp/mkosi/mkosi.extra ./install.sh install": internet,
	},
}

// internet is why root file systems and images are not made.
const internet = "the lab has no network: the lab's own root file systems are made in the same way, from the same packages"

// patience bounds each command; it is no measure of anything.
const patience = 2 * time.Minute

// block is a part of a document that does something.
type block struct {
	line int // of the document, of its first line of content
	kind kind
	path string // of a file
	text string
}

type kind string

const (
	console kind = "console"
	hidden  kind = "hidden set-up"
	written kind = "file"
	goal    kind = "goal state"
	shown   kind = "not run"
)

// command is one of a console block.
type command struct {
	line int
	root bool
	text string
	want string // what it prints
}

// document is what there is to do in one.
type document struct {
	host   string // bare, node, or empty: there is nothing to run
	blocks []block
}

var hostLine = regexp.MustCompile(`^<!-- lab: (\S+) -->$`)

// parse reads a document. Errors tell its lines.
func parse(text string) (document, error) {
	var d document
	var errs []error
	lines := strings.Split(text, "\n")
	refuse := func(i int, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%d: "+format, append([]any{i + 1}, args...)...))
	}
	// until returns the lines from i on as far as the one that is end, whose number it returns.
	until := func(i int, end string) (string, int) {
		for n := i; n < len(lines); n++ {
			if lines[n] == end {
				return strings.Join(lines[i:n], "\n"), n
			}
		}
		refuse(i, "a block that begins here has no end: want a line %q", end)
		return "", len(lines)
	}
	for i := 0; i < len(lines); i++ {
		line, begin := lines[i], i
		info, fence := strings.CutPrefix(line, "```")
		language, path, isFile := strings.Cut(info, " ")
		b := block{line: i + 2}
		switch {
		case hostLine.MatchString(line):
			if d.host = hostLine.FindStringSubmatch(line)[1]; i != 0 || d.host != "bare" && d.host != "node" {
				refuse(i, "%s: want it in the first line, with bare or node", line)
			}
			continue
		case line == "<!-- lab":
			b.kind = hidden
			b.text, i = until(i+1, "-->")
		case strings.HasPrefix(line, "<!-- lab"):
			refuse(i, "%s: want <!-- lab: HOST -->, or <!-- lab alone in its line, the commands, and --> alone", line)
			continue
		case fence:
			b.text, i = until(i+1, "```")
			switch {
			case isFile && strings.HasPrefix(path, "/"):
				b.kind, b.path = written, path
			case info == "console":
				b.kind = console
			case info == "toml":
				b.kind = goal
			case info == "sh":
				b.kind = shown
			case info == "text":
				if regexp.MustCompile(`(?m)^ *[#$] `).MatchString(b.text) {
					refuse(begin, "a command in a block of text: want ```console")
				}
				continue
			default:
				refuse(begin, "a block of %q: want console, toml, sh, text, or a language and the path of a file", language)
				continue
			}
		case strings.HasPrefix(line, "    ") && (i == 0 || lines[i-1] == ""):
			b.line, b.kind = i+1, shown
			for ; i < len(lines) && strings.HasPrefix(lines[i], "    "); i++ {
				b.text += strings.TrimPrefix(lines[i], "    ") + "\n"
			}
			i--
		default:
			continue
		}
		if b.kind == console {
			if _, err := commands(b); err != nil {
				errs = append(errs, err)
			}
		}
		if d.host == "" && b.kind != shown {
			refuse(begin, "a block that is run: want the host in the document's first line, <!-- lab: node -->")
		}
		d.blocks = append(d.blocks, b)
	}
	return d, errors.Join(errs...)
}

// commands are those of a console block.
func commands(b block) ([]command, error) {
	var all []command
	lines := strings.Split(b.text, "\n")
	for i := 0; i < len(lines); i++ {
		prompt, text, ok := strings.Cut(lines[i], " ")
		switch {
		case ok && (prompt == "#" || prompt == "$"):
			c := command{line: b.line + i, root: prompt == "#", text: text}
			for ; strings.HasSuffix(lines[i], `\`) && i+1 < len(lines); i++ {
				c.text += "\n" + lines[i+1]
			}
			all = append(all, c)
		case len(all) == 0:
			return nil, fmt.Errorf("%d: %q: want a command, \"# \" or \"$ \", before what it prints", b.line+i, lines[i])
		default:
			all[len(all)-1].want += lines[i] + "\n"
		}
	}
	return all, nil
}

// matches tells whether got is what a document says, where "…" stands for what it leaves out.
func matches(want, got string) bool {
	var pattern strings.Builder
	pattern.WriteString(`\A`)
	for _, line := range strings.Split(trim(want), "\n") {
		if strings.TrimSpace(line) == "…" {
			pattern.WriteString(`(?:.*\n)*`)
			continue
		}
		pattern.WriteString(strings.ReplaceAll(regexp.QuoteMeta(line), "…", ".*") + `\n`)
	}
	return regexp.MustCompile(pattern.String() + `\z`).MatchString(trim(got) + "\n")
}

// trim takes away what cannot be seen: blanks at the end of lines, and empty lines at the end.
func trim(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		lines = append(lines, strings.TrimRight(line, " \t\r\n"))
	}
	return strings.TrimRight(strings.Join(lines, "\n"), "\n")
}

// shell is a bash in a host.
type shell struct {
	in  io.WriteCloser
	out *bufio.Reader
}

func startShell(t *testing.T, h *lab.Host) *shell {
	t.Helper()
	cmd, err := h.Command(context.Background(), "bash", "--noprofile", "--norc")
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, w
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		r.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	return &shell{in: in, out: bufio.NewReader(r)}
}

// run types a command and returns all it printed and its exit status, which the next one finds in $?.
func (s *shell) run(t *testing.T, text string) (output string, status int) {
	t.Helper()
	type result struct {
		output string
		status int
		err    error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		// No program prints the character 1, which marks the end.
		_, r.err = fmt.Fprintf(s.in, "eval %s </dev/null; s=$?; printf '\\1%%d\\n' $s; (exit $s)\n", quote(text))
		if r.err == nil {
			r.output, r.err = s.out.ReadString(1)
		}
		if r.err == nil {
			_, r.err = fmt.Fscanf(s.out, "%d\n", &r.status)
		}
		r.output = strings.TrimSuffix(r.output, "\x01")
		done <- r
	}()
	select {
	case r := <-done:
		if r.err != nil {
			t.Fatalf("%s: %v\n%s", text, r.err, r.output)
		}
		return r.output, r.status
	case <-time.After(patience):
		t.Fatalf("%s: not done within %v", text, patience)
	}
	return "", 0
}

// quote makes one word of a shell's.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// names are the documents, by their path below source.
func names(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(source, "docs/*.md"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	all := []string{"README.md"}
	for _, file := range files {
		all = append(all, filepath.Join("docs", filepath.Base(file)))
	}
	return all
}

func read(t *testing.T, name string) document {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(source, name))
	if err != nil {
		t.Fatal(err)
	}
	d, err := parse(string(text))
	if err != nil {
		t.Fatalf("%s:\n%v", name, err)
	}
	return d
}

// TestDocuments runs what the documents say.
func TestDocuments(t *testing.T) {
	for _, name := range names(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := read(t, name)
			if d.host == "" {
				t.Skip("has no commands for the lab")
			}
			h := lab.New(t, lab.Options{Suite: "trixie", Prepare: func(root string) error { return prepare(t, root, d.host) }})
			begin := time.Now()
			play(t, h, name, d)
			t.Logf("%s: %.1f s", name, time.Since(begin).Seconds())
		})
	}
}

// prepare makes the host in which a document begins.
func prepare(t *testing.T, root, host string) error {
	if host == "bare" {
		dir := t.TempDir()
		if err := errors.Join(node.InstallMachines(root), node.Packages(dir, "1.0.0")); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(dir, "build/*.deb"))
		if err != nil || len(debs) != 1 {
			return fmt.Errorf("packages %q: want one .deb: %v", debs, err)
		}
		data, err := os.ReadFile(debs[0])
		return errors.Join(err, os.WriteFile(filepath.Join(root, "root", filepath.Base(debs[0])), data, 0o644))
	}
	return errors.Join(node.Install(root), node.WriteCluster(root))
}

func write(root string, b block) error {
	path := filepath.Join(root, b.path)
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(b.text+"\n"), 0o644))
}

// play runs a document in its host.
func play(t *testing.T, h *lab.Host, name string, d document) {
	t.Helper()
	h.Must(t, node.PretendKernel())
	if d.host == "node" {
		// Not before it is up: its boot would start the boot slot.
		for _, b := range read(t, "docs/first-node.md").blocks {
			if b.kind == written {
				if err := write(h.Root(), b); err != nil {
					t.Fatal(err)
				}
			}
		}
		h.Must(t, "systemctl daemon-reload")
	}
	bash := startShell(t, h)
	bash.run(t, "cd /root")
	// failing is the last command if it has failed, and the document does not show its exit status yet.
	failing := ""
	shownStatus := func(next string) {
		t.Helper()
		if failing != "" && next != "echo $?" {
			t.Errorf("%s: want \"# echo $?\" and the exit status below it, or no failure", failing)
		}
		failing = ""
	}
	for _, b := range d.blocks {
		at := fmt.Sprintf("%s:%d", name, b.line)
		switch b.kind {
		case written:
			if err := write(h.Root(), b); err != nil {
				t.Fatalf("%s: %v", at, err)
			}
		case goal:
			if err := write(h.Root(), block{path: "/tmp/goal.toml", text: b.text}); err != nil {
				t.Fatalf("%s: %v", at, err)
			}
			if out, status := bash.run(t, "berth check /tmp/goal.toml"); status != 0 {
				t.Errorf("%s: berth check: exit status %d\n%s", at, status, out)
			}
		case hidden:
			shownStatus("")
			if out, status := bash.run(t, "( set -eu\n"+b.text+"\n)"); status != 0 {
				t.Fatalf("%s: hidden set-up: exit status %d\n%s", at, status, out)
			}
		case console:
			all, err := commands(b)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range all {
				shownStatus(c.text)
				text := c.text
				if !c.root {
					text = "setpriv --reuid=nobody --regid=nogroup --clear-groups bash -c " + quote(text)
				}
				begin := time.Now()
				got, status := bash.run(t, text)
				at := fmt.Sprintf("%s:%d: %s", name, c.line, c.text)
				t.Logf("%s (%.2f s, exit status %d)", at, time.Since(begin).Seconds(), status)
				if !matches(c.want, got) {
					t.Errorf("%s\nprints, unlike the document:\n%s\nThe document says:\n%s", at, trim(got), trim(c.want))
				}
				if status != 0 {
					failing = fmt.Sprintf("%s: exit status %d", at, status)
				}
			}
		}
	}
	shownStatus("")
}

// TestNotRun requires that notRun has all that is not run, and nothing else.
func TestNotRun(t *testing.T) {
	got := map[string]map[string]string{}
	for _, name := range names(t) {
		for _, b := range read(t, name).blocks {
			if b.kind == shown {
				first, _, _ := strings.Cut(b.text, "\n")
				if got[name] == nil {
					got[name] = map[string]string{}
				}
				got[name][first] = cmp.Or(notRun[name][first], "the reason: it has to be in notRun, or in a block ```console")
			}
		}
	}
	if diff := gocmp.Diff(notRun, got); diff != "" {
		t.Errorf("commands that are not run: -notRun +documents:\n%s", diff)
	}
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		want, got string
		match     bool
		reason    string
	}{
		{"", "", true, "prints nothing"},
		{"", "x\n", false, "prints something, and the document says nothing"},
		{"x\n", "", false, "prints nothing any more"},
		{"a\nb\n", "a\nb", true, "the last line has no end"},
		{"a\n\n", "a \n\n", true, "what cannot be seen"},
		{"a\nb", "a\nb\nc", false, "more than the document says"},
		{"a … c\n", "a b c\n", true, "within a line"},
		{"a … c\n", "a b\n c\n", false, "… is no end of a line"},
		{"a\n…\nc\n", "a\nb\nb\nc\n", true, "lines are left out"},
		{"a\n…\nc\n", "a\nc\n", true, "none are left out"},
		{"a\n…\n", "a\nb\n", true, "at the end"},
		{"a\n…\n", "a\n", true, "nothing at the end"},
		{"…\nc\n", "a\nb\n", false, "what is not left out counts"},
		{"took 1.5 s\n", "took 1x5 s\n", false, "no regular expression"},
	} {
		if got := matches(c.want, c.got); got != c.match {
			t.Errorf("%s: %q, %q: %t", c.reason, c.want, c.got, got)
		}
	}
}

func TestParse(t *testing.T) {
	got, err := parse(strings.Join([]string{
		"<!-- lab: node -->", "# Title", "",
		"```console", "# one \\", "    --more", "out", "", "$ two", "```",
		"```toml /etc/x.toml", "[a]", "```",
		"<!-- lab", "set up", "-->",
		"", "    indented", "", "    and on", "",
		"- a list", "    continued",
	}, "\n"))
	want := document{host: "node", blocks: []block{
		{line: 5, kind: console, text: "# one \\\n    --more\nout\n\n$ two"},
		{line: 12, kind: written, path: "/etc/x.toml", text: "[a]"},
		{line: 15, kind: hidden, text: "set up"},
		{line: 18, kind: shown, text: "indented\n"},
		{line: 20, kind: shown, text: "and on\n"},
	}}
	if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(document{}, block{})); diff != "" || err != nil {
		t.Errorf("error %v, -want +got:\n%s", err, diff)
	}
	all, err := commands(got.blocks[0])
	wantCommands := []command{{5, true, "one \\\n    --more", "out\n\n"}, {9, false, "two", ""}}
	if diff := gocmp.Diff(wantCommands, all, gocmp.AllowUnexported(command{})); diff != "" || err != nil {
		t.Errorf("error %v, -want +got:\n%s", err, diff)
	}

	for text, message := range map[string]string{
		"```\nx\n```":                               "1: a block of \"\"",
		"```bash\nx\n```":                           "1: a block of \"bash\"",
		"```console\n# x\n```":                      "1: a block that is run: want the host",
		"<!-- lab: node -->\n```console\nx\n```":    "3: \"x\": want a command",
		"<!-- lab: node -->\n```console\n# x":       "3: a block that begins here has no end",
		"<!-- lab: other -->":                       "want it in the first line, with bare or node",
		"\n<!-- lab: node -->":                      "want it in the first line",
		"<!-- lab: node -->\n<!-- lab x -->":        "2: <!-- lab x -->: want <!-- lab: HOST -->, or",
		"```text\nto be typed:\n# systemctl\n```":   "1: a command in a block of text",
		"<!-- lab: node -->\n```toml etc/x\nx\n```": "2: a block of \"toml\"",
	} {
		if _, err := parse(text); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%q: error %v; want %q", text, err, message)
		}
	}
}

// TestLinks requires that what a document links to in this source is there.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`)
	for _, name := range names(t) {
		text, err := os.ReadFile(filepath.Join(source, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			target := filepath.Join(source, filepath.Dir(name), m[1])
			if m[1] == "" {
				target = filepath.Join(source, name)
			}
			content, err := os.ReadFile(target)
			if info, statErr := os.Stat(target); statErr == nil && info.IsDir() {
				err = nil
			}
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if m[2] != "" && !slices.Contains(anchors(string(content)), m[2]) {
				t.Errorf("%s: %s has no heading for #%s", name, target, m[2])
			}
		}
	}
}

// anchors are what GitHub calls the headings of a document.
func anchors(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		if title, ok := strings.CutPrefix(strings.TrimLeft(strings.TrimSpace(line), "#"), " "); ok && strings.HasPrefix(line, "#") {
			title = regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(title), "")
			all = append(all, strings.ReplaceAll(title, " ", "-"))
		}
	}
	return all
}
