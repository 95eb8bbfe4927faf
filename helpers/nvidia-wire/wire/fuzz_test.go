package wire

import (
	"strings"
	"testing"
)

// FuzzLogLine: a program in the machine may write anything.
func FuzzLogLine(f *testing.F) {
	for _, s := range []string{`time="x" level=warning msg="a \"b\""`, ` level= msg=`, ` level=error msg="a`, ` level=a msg=b level=c msg="\x`, ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		level, text := logLine(line)
		if level == "" && !strings.Contains(line, " level= msg=") && text != strings.TrimSpace(line) || !strings.Contains(line, level) {
			t.Errorf("%q: level %q, text %q", line, level, text)
		}
	})
}
