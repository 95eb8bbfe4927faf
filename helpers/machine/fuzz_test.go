package machine

import (
	"strings"
	"testing"
)

func FuzzVersion(f *testing.F) {
	for text, want := range map[string]string{`"257.13-1~deb13u1"`: "257.13-1~deb13u1", `'2'`: "", `5`: "", `["a"]`: "", `{"a": <1>}`: "", `<"a">`: "", `@s`: "", `[]`: "", ``: ""} {
		f.Add(text)
		if got, err := parseVersion(text); got != want || (err != nil) != (want == "") {
			f.Errorf("%s: %q, %v", text, got, err)
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		if version, err := parseVersion(text); version != "" && err != nil {
			t.Errorf("%q, and the error %v", version, err)
		}
	})
}

// FuzzStatus reads proc_pid_status(5) and proc_pid_stat(5), in which a process has put its name. The kernel escapes line breaks of a name
// in the first alone.
func FuzzStatus(f *testing.F) {
	f.Add("x", "NSpid:\t300\t1\nSigBlk:\t7be3c0fe28014a03\n", "R")
	f.Add(") Z 1 (", "SigBlk:\tx\nNSpid:", "S")
	f.Add("NSpid:\t300\t1", "", "Z")
	f.Fuzz(func(t *testing.T, name, status, state string) {
		if state != "" && state[0] != ' ' && !strings.Contains(state, ")") {
			if got, want := running("10 ("+name+") "+state+" 1"), state[0] != 'Z' && state[0] != 'X'; got != want {
				t.Errorf("state %q of a process called %q: runs: %v", state, name, got)
			}
		}
		if named := "Name:\t" + name + "\n" + status; !strings.Contains(name, "\n") && (isInit(named) != isInit(status) || blocks(named, 64) != blocks(status, 64)) {
			t.Errorf("the name %q makes another process of %q", name, status)
		}
	})
}
