package cli

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"berth/helpers/step"
)

// TestHelp has all help fit on a terminal of 80 columns.
func TestHelp(t *testing.T) {
	for _, command := range []string{"", "check", "show", "diff", "status", "bake"} {
		var out bytes.Buffer
		args := append([]string{"berth"}, strings.Fields(command)...)
		if code := Main(append(args, "--help"), &out, io.Discard); code != step.ExitDone || out.Len() == 0 {
			t.Errorf("berth %s --help: exit code %d, %d bytes", command, code, out.Len())
		}
		for line := range strings.Lines(out.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("berth %s --help: %d columns: %s", command, n, line)
			}
		}
	}
}

func TestUnknownOption(t *testing.T) {
	for args, want := range map[string]string{
		"--bogus":       "berth: flag provided but not defined: -bogus: see berth --help\n",
		"check --bogus": "berth: flag provided but not defined: -bogus: see berth check --help\n",
	} {
		var stderr bytes.Buffer
		code := Main(append([]string{"berth"}, strings.Fields(args)...), io.Discard, &stderr)
		if stderr.String() != want || code != step.ExitUsage {
			t.Errorf("berth %s: %q, exit code %d; want %q, %d", args, stderr.String(), code, want, step.ExitUsage)
		}
	}
}
