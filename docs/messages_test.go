// Package docs tests the chapters for people against the source.
package docs

import (
	"bytes"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/cli"
	"berth/generator/hostcheck"
	"berth/helpers/step"
)

// The test of messages.md: every text that reads like a message must be in it, or belong to a class that it names, and it must
// hold no others. A message is compared with its values taken out: each is "…".

// notes are the functions whose first string is a message, however short; elsewhere, a text of two words or more counts.
var notes = []string{"Errorf", "errorf", "warnf", "Refusedf", "Invalidf", "usagef", "Info", "Notice", "Warn", "Status"}

// classes are the packages of which messages.md explains what they print as a whole, or by ids. Their errors count all the same.
var classes = []string{
	"generator/cli",       // what the commands print on the standard output, and the prefixes of what is on the other
	"generator/hostcheck", // findings: TestFindings
	"generator/needs",     // of berth diff
	"generator/status",    // of berth status
}

// help are the fields and functions whose texts are a program's --help.
var help = []string{"About", "ArgsUsage", "Description", "Usage", "Name", "BoolVar", "String", "Bool"}

// noMessages are texts that nobody gets to see as a message.
var noMessages = []string{
	// Content of files, and what is looked for in those of others.
	"# Made by berth",
	"# Made by berth-generator from",
	"# Last good goal state of a node slot, format 1, SHA-256 of the rest:", "# Last good goal state of a node slot, format 1, SHA-256 of the rest: …",
	"# Made by record-applied when the slot became ready. Used as it is or not at all: do not edit it.",
	"…slot … number … recorded …",
	"# Made by peer-guard: slot … holds this host. To release it: systemctl stop node@….service",
	"-----BEGIN CERTIFICATE-----",
	"DeviceAllow=… rwm",
	"Device Minor:",
	"PRIVATE KEY-----",
	"flag provided but not defined",
	"nests too deep",
	// --help.
	"Usage: … [OPTION…] … … Options:",
	"Exit codes: 0 done, 1 failed, 2 usage, 3 goal state invalid, 4 not ready within its budget, 5 refused (peer)",
	"no valid goal state, because the slot still holds a claim on the host",
	// What stands for a … of a message that messages.md has: places, kinds, and cures that speak for themselves.
	"a regular file", "a symbolic link",
	"all devices", "and … more", "device node", "does not exist", "nvidia-ctk cdi generate", "the host's name", "the root of machine …",
	"…: content of …", "kubelet.bootstrap_token_file: content of …",
	"find its process: pgrep --full --list-full …", "install libc-bin", "install the NVIDIA Container Toolkit 1.18 or newer",
	"machinectl terminate …", "remove what is in it first", "systemctl stop …",
	"systemctl stop …, or systemctl kill --signal=KILL …",
	"want a character device", "want a folder", "want a folder or a link to one", "want a regular file",
	"want a regular file, a symbolic link, or nothing in this place", "want a smaller file", "want a symbolic link",
	"want an executable file",
	"want kubelet.bootstrap_token_file, or a credential (kubelet.bootstrap_token_credential, kubelet.bootstrap_token_encrypted_credential), with a token that reaches the host after it was built",
}

// messages walks the source and returns each message with the place of its first use.
func messages(t *testing.T) map[string]string {
	found := map[string]string{}
	for _, top := range []string{"generator", "helpers", "templates", "units"} {
		err := filepath.WalkDir(filepath.Join("..", top), func(dir string, e fs.DirEntry, err error) error {
			switch {
			case err != nil || !e.IsDir():
				return err
			case e.Name() == "testdata", e.Name() == "sbom": // a tool of install.sh
				return fs.SkipDir
			}
			return packageMessages(dir, found)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	// Of the mistakes of a goal state, messages.md leaves the examples to the golden files.
	mistakes := ""
	golden, err := filepath.Glob("../generator/goalstate/testdata/errors/*.golden")
	if err != nil || len(golden) == 0 {
		t.Fatal(golden, err)
	}
	for _, name := range golden {
		mistakes += read(t, name)
	}
	maps.DeleteFunc(found, func(text, at string) bool {
		return strings.Contains(at, "generator/goalstate/") && matcher(text).MatchString(mistakes)
	})
	for _, name := range []string{"install.sh", "units/package/prerm"} {
		for line := range strings.Lines(read(t, "../"+name)) {
			if m := regexp.MustCompile(`\becho (.*) >&2`).FindStringSubmatch(line); m != nil {
				text := strings.NewReplacer(`\"`, `"`, `"`, "").Replace(m[1])
				found[normal(regexp.MustCompile(`\$\w+`).ReplaceAllString(text, "…"))] = name
			}
		}
	}
	return found
}

func packageMessages(dir string, found map[string]string) error {
	fset := token.NewFileSet()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return err
	}
	var files []*ast.File
	for _, p := range paths {
		if strings.HasSuffix(p, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	// Only constants are asked for, which need no other package.
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	config := types.Config{Importer: noPackages{}, Error: func(error) {}}
	_, _ = config.Check(dir, fset, files, info)

	class := slices.Contains(classes, strings.TrimPrefix(filepath.ToSlash(dir), "../"))
	for _, f := range files {
		var visit func(n ast.Node) bool
		visit = func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ImportSpec:
				return false
			case *ast.Ident:
				if n.Name == "usage" { // a program's --help
					return false
				}
			case *ast.ValueSpec:
				if n.Names[0].Name == "usage" {
					return false
				}
			case *ast.KeyValueExpr:
				if key, ok := n.Key.(*ast.Ident); ok && slices.Contains(help, key.Name) {
					return false
				}
			case *ast.CallExpr:
				name, of := called(n)
				switch {
				case name == "panic", of == "flags" && name == "Output", of == "flags" && slices.Contains(help, name), of == "regexp":
					return false
				case len(n.Args) > 0 && (slices.Contains(notes, name) || of == "errors" && name == "New"):
					if p, ok := pattern(info, n.Args[0]); ok {
						if regexp.MustCompile(`\pL`).MatchString(p) {
							found[normal(p)] = fset.Position(n.Pos()).String()
						}
						for _, arg := range n.Args[1:] {
							ast.Inspect(arg, visit)
						}
						return false
					}
				}
			}
			if e, ok := n.(ast.Expr); ok {
				if p, ok := pattern(info, e); ok {
					if words.MatchString(p) && !class {
						found[normal(p)] = fset.Position(e.Pos()).String()
					}
					return false
				}
			}
			return true
		}
		ast.Inspect(f, visit)
	}
	return nil
}

type noPackages struct{}

func (noPackages) Import(path string) (*types.Package, error) {
	p := types.NewPackage(path, filepath.Base(path))
	p.MarkComplete()
	return p, nil
}

// called returns the name of a called function, and of what is before its dot.
func called(c *ast.CallExpr) (name, of string) {
	switch f := c.Fun.(type) {
	case *ast.Ident:
		return f.Name, ""
	case *ast.SelectorExpr:
		if x, ok := f.X.(*ast.Ident); ok {
			of = x.Name
		}
		return f.Sel.Name, of
	}
	return "", ""
}

var (
	words = regexp.MustCompile(`\pL{2}.*\s.*\pL{2}`)
	verb  = regexp.MustCompile(`%[-+# 0]*[*\d]*(\.\d+)?(\[\d+\])?[a-zA-Z]`)
)

// pattern returns the text of a string expression: a constant, a sum, or a call of Sprintf or Quote. What is not known
// before the program runs is "…".
func pattern(info *types.Info, e ast.Expr) (string, bool) {
	if v := info.Types[e].Value; v != nil && v.Kind() == constant.String {
		return verb.ReplaceAllStringFunc(constant.StringVal(v), func(verb string) string {
			if strings.HasSuffix(verb, "q") {
				return `"…"`
			}
			return "…"
		}), true
	}
	switch e := e.(type) {
	case *ast.BinaryExpr:
		x, xok := pattern(info, e.X)
		y, yok := pattern(info, e.Y)
		if e.Op == token.ADD && (xok || yok) {
			return x + y, true
		}
	case *ast.CallExpr:
		switch name, of := called(e); {
		case of == "fmt" && name == "Sprintf":
			return pattern(info, e.Args[0])
		case of == "strconv" && name == "Quote":
			return `"…"`, true
		}
	case *ast.ParenExpr:
		return pattern(info, e.X)
	}
	return "…", false
}

// matcher finds a message in what a program said.
func matcher(message string) *regexp.Regexp {
	return regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(message), "…", ".*"))
}

// normal is how a message is compared: on one line, values that touch are one.
func normal(s string) string {
	s = regexp.MustCompile(`……+`).ReplaceAllString(strings.Join(strings.Fields(s), " "), "…")
	return s
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// entries returns the messages of messages.md and the line of each: the code with which an item of a list begins, several
// with a hard break between. What follows is what the messages mean. It must be there, and does not begin with code.
func entries(t *testing.T, text string) map[string]string {
	found := map[string]string{}
	line := 0
	for item := range strings.SplitSeq("\n"+text, "\n- ") {
		at := "messages.md:" + strconv.Itoa(line)
		line += strings.Count(item, "\n") + 1
		if !strings.HasPrefix(item, "`") {
			continue
		}
		item, _, _ = strings.Cut(item, "\n\n")
		for strings.HasPrefix(item, "`") {
			fence := item[:len(item)-len(strings.TrimLeft(item, "`"))]
			code, rest, ok := strings.Cut(item[len(fence):], fence)
			if !ok {
				t.Fatalf("%s: no end of the code", at)
			}
			found[normal(code)] = at
			item = strings.TrimSpace(strings.TrimPrefix(rest, "\\"))
		}
		if item == "" {
			t.Errorf("%s: nothing is said about this message", at)
		}
	}
	return found
}

func TestMessages(t *testing.T) {
	source, document := messages(t), entries(t, read(t, "messages.md"))
	for _, text := range noMessages {
		if source[text] == "" {
			t.Errorf("noMessages: %q is nowhere in the source: take it out", text)
		}
		delete(source, text)
	}
	for _, text := range slices.Sorted(maps.Keys(source)) {
		if document[text] == "" {
			t.Errorf("%s: messages.md does not have: %s", source[text], text)
		}
	}
	for _, text := range slices.Sorted(maps.Keys(document)) {
		if source[text] == "" {
			t.Errorf("%s: no program says: %s", document[text], text)
		}
	}
}

// rows returns the cells of the tables' rows whose first cell the pattern matches, in text after the heading.
func rows(t *testing.T, text, heading, first string) [][]string {
	t.Helper()
	_, text, found := strings.Cut(text, "\n"+heading+"\n")
	var all [][]string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "## ") {
			break
		}
		cells := strings.Split(strings.Trim(line, "|\n"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if strings.HasPrefix(line, "|") && regexp.MustCompile("^"+first+"$").MatchString(cells[0]) {
			all = append(all, cells)
		}
	}
	if !found || all == nil {
		t.Fatalf("messages.md: no table below %q", heading)
	}
	return all
}

// TestFindings holds that the table of findings has the ids of berth check, in their order.
func TestFindings(t *testing.T) {
	var want, got []string
	for _, c := range hostcheck.Checks {
		want = append(want, c.Name)
	}
	for _, row := range rows(t, read(t, "messages.md"), "### check", `[a-z][a-z-]+`) {
		if got = append(got, row[0]); len(row) != 3 || row[1] == "" || row[2] == "" {
			t.Errorf("messages.md: %s: want what comes of it, and what to do", row[0])
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestSaid holds that what programs are known to say, of golden files, is found by who looks it up: each line by one of
// the messages.
func TestSaid(t *testing.T) {
	messages := slices.Sorted(maps.Keys(entries(t, read(t, "messages.md"))))
	lines := 0
	for _, glob := range []string{"generator/*/stderr", "cli/*/*.stderr"} {
		files, err := filepath.Glob("../testdata/" + glob)
		if err != nil || files == nil {
			t.Fatal(glob, err)
		}
		for _, name := range files {
			for line := range strings.Lines(read(t, name)) {
				if form.MatchString(line) {
					continue
				}
				lines++
				if !slices.ContainsFunc(messages, func(m string) bool { return len(m) > 20 && matcher(m).MatchString(line) }) {
					t.Errorf("%s: messages.md does not help with: %s", name, line)
				}
			}
		}
	}
	if lines == 0 {
		t.Error("the golden files have no messages")
	}
}

// form is that of messages which messages.md does not list: mistakes of the goal state, and the kernel's word about a file.
var form = regexp.MustCompile(`^/\S+\.toml:\d+:\d+: |"[^"]+"( beneath \S+)?: [a-z ]+\n$`)

// TestExitCodes holds the table of exit codes to the constants, and that of the commands to what they do where this needs no
// host that runs.
func TestExitCodes(t *testing.T) {
	text := read(t, "messages.md")
	meaning := map[string]string{}
	for _, row := range rows(t, text, "## Exit codes", `\d`) {
		meaning[row[0]] = row[1]
	}
	for code, word := range map[int]string{
		step.ExitDone: "done", step.ExitFailed: "failed", step.ExitUsage: "usage", step.ExitInvalid: "goal state",
		step.ExitNotReady: "not ready", step.ExitRefused: "refused",
	} {
		if !strings.Contains(meaning[strconv.Itoa(code)], word) {
			t.Errorf("messages.md: exit code %d: %q: want %q in it", code, meaning[strconv.Itoa(code)], word)
		}
	}
	// A node's unit tries again but for the codes of which the table says no.
	var never []string
	for _, row := range rows(t, text, "## Exit codes", `\d`) {
		if len(row) == 3 && row[2] == "no" {
			never = append(never, row[0])
		}
	}
	if want := "\nRestartPreventExitStatus=" + strings.Join(never, " ") + "\n"; !strings.Contains(read(t, "../units/node@.service"), want) {
		t.Errorf("node@.service does not have %q", want)
	}

	goal := `
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/token"
[slot.a]
`
	roots := map[string]string{}
	for name, goal := range map[string]string{"valid": goal, "invalid": goal + "x = 1\n", "none": "", "token": strings.ReplaceAll(goal, "token_file = \"/etc/berth/token", "token = \"abcdef.0123456789abcdef")} {
		roots[name] = t.TempDir()
		if err := os.MkdirAll(filepath.Join(roots[name], "etc/berth"), 0o755); err != nil {
			t.Fatal(err)
		}
		if goal != "" {
			if err := os.WriteFile(filepath.Join(roots[name], "etc/berth/goal.toml"), []byte(goal), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	cells := map[string][]string{}
	for _, row := range rows(t, text, "## Exit codes", "`berth[ a-z-]*`") {
		cells[strings.Trim(row[0], "`")] = row
	}
	for _, c := range []struct {
		row, root string // of the table, of roots
		args      []string
		want      int
		why       string
	}{
		{"berth check", "valid", []string{"check"}, 0, "nothing is wrong"},
		{"berth check", "valid", []string{"check", "--host"}, 1, "the folder is no host"},
		{"berth check", "valid", []string{"check", "--no"}, 2, "no such option"},
		{"berth check", "invalid", []string{"check"}, 3, "an unknown key"},
		{"berth check", "none", []string{"check"}, 3, "no goal state"},
		{"berth show", "valid", []string{"show"}, 1, "the slot has no root file system"},
		{"berth show", "valid", []string{"show", "a", "b"}, 2, "two slots"},
		{"berth show", "invalid", []string{"show"}, 3, "an unknown key"},
		{"berth show", "none", []string{"show"}, 3, "no goal state"},
		{"berth show", "valid", []string{"show", "b"}, 3, "no such slot"},
		{"berth diff", "valid", []string{"diff"}, 1, "the slot has no root file system"},
		{"berth diff", "invalid", []string{"diff"}, 3, "an unknown key"},
		{"berth diff --exit-code", "valid", []string{"diff", "--exit-code"}, 1, "all is new"},
		{"berth status", "valid", []string{"status"}, 1, "no systemd runs"},
		{"berth status", "valid", []string{"status", "A"}, 2, "no slot's name"},
		{"berth bake", "valid", []string{"bake", "--generated-only"}, 0, "written"},
		{"berth bake", "valid", []string{"bake"}, 1, "the image has no programs"},
		{"berth bake", "valid", []string{"bake", "x"}, 2, "an argument"},
		{"berth bake", "none", []string{"bake"}, 3, "no goal state"},
		{"berth bake", "none", []string{"bake", "--goal", filepath.Join(roots["token"], "etc/berth/goal.toml")}, 5, "a secret"},
	} {
		if row := cells[c.row]; len(row) < c.want+2 || row[c.want+1] == "" {
			t.Errorf("messages.md: %s: code %d is not in the table", c.row, c.want)
		}
		args := []string{"berth", "--root", roots[c.root]}
		if c.args[0] == "bake" {
			args = append([]string{"berth", "bake", "--root", roots[c.root]}, c.args[1:]...)
		} else {
			args = append(args, c.args...)
		}
		var out bytes.Buffer
		if got := cli.Main(args, &out, &out); got != c.want {
			t.Errorf("berth %v with a goal state that is %s: exit code %d, want %d (%s):\n%s", c.args, c.root, got, c.want, c.why, &out)
		}
	}
}
