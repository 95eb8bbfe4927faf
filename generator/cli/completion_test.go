package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
)

func TestCompletion(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "etc/berth")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ goal, args, argsUsage, want, why string }{
		{"[slot.b]\n[slot.a]\n", "", "[SLOT]", "a\nb\n", "slots, though the goal state lacks all else"},
		{"[slot.b]\n[slot.a]\n", "a", "[SLOT]", "", "there is a slot already"},
		{"[slot.b]\n[slot.a]\n", "", "[FILE…]", "", "the shell completes files itself"},
		{"[", "", "[SLOT]", "", "nobody wants messages in the middle of a command line"},
	} {
		if err := os.WriteFile(filepath.Join(dir, "goal.toml"), []byte(c.goal), 0o644); err != nil {
			t.Fatal(err)
		}
		command := &cli.Command{Name: "x", ArgsUsage: c.argsUsage, HideHelpCommand: true}
		command.BashComplete = completion(command)
		var out bytes.Buffer
		app := &cli.App{
			Name: "berth", Writer: &out, EnableBashCompletion: true, Commands: []*cli.Command{command},
			Flags: []cli.Flag{&cli.StringFlag{Name: "root"}},
		}
		words := append([]string{"berth", "--root", root, "x"}, strings.Fields(c.args)...)
		if err := app.Run(append(words, "--generate-bash-completion")); err != nil {
			t.Fatal(err)
		}
		if out.String() != c.want {
			t.Errorf("%v (goal state %q): %q; want %q: %s", words, c.goal, out.String(), c.want, c.why)
		}
	}
}

// TestBash has bash's script ask a berth that answers with what it was asked.
func TestBash(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash")
	}
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "berth"), []byte("#!/bin/sh\nprintf '%s\\n' --asked \"$@\" ask\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ words, want, why string }{
		{`berth ''`, "--asked --generate-bash-completion ask ", "all words"},
		{`berth sh`, "", "no answer begins so"},
		{`berth as`, "ask ", "what is being typed is no command yet"},
		{`berth show --a`, "--asked --a ", "the beginning of an option decides what comes"},
		{`berth show --`, "--asked --generate-bash-completion ", "-- alone is the beginning of an option"},
		{`berth bake -- a`, "", "berth would bake: after -- nothing is an option"},
	} {
		script := `source ../../units/completion/berth; COMP_WORDS=(` + c.words + `); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _berth
			[ ${#COMPREPLY[@]} = 0 ] || printf '%s ' "${COMPREPLY[@]}"`
		cmd := exec.Command(bash, "--norc", "-c", script)
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if err != nil || string(out) != c.want {
			t.Errorf("%s: %q, %v; want %q: %s", c.words, out, err, c.want, c.why)
		}
	}
}
