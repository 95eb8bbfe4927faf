package parts

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
	"berth/generator/plan"
)

const goal = `[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/ca.crt"
[kubelet]
bootstrap_token_credential = "token"
[containerd]
config_version = 3
[slot.a]
`

// newHost returns a host with a slot that can be rendered, and the files given.
func newHost(t *testing.T, files map[string]string) *file.Root {
	t.Helper()
	root, err := file.OpenRoot(t.TempDir())
	must(t, err)
	t.Cleanup(func() { root.Close() })
	ca, err := os.ReadFile("../../../testdata/render/full/want/machine/etc/kubernetes/pki/apiserver-client-ca.crt")
	must(t, err)
	all := []file.File{
		{Path: "etc/berth/goal.toml", Mode: 0o644, Content: []byte(goal)}, {Path: "ca.crt", Mode: 0o644, Content: ca},
		{Path: "etc/hostname", Mode: 0o644, Content: []byte("host-1")}, {Path: "etc/resolv.conf", Mode: 0o644, Content: []byte("nameserver 192.0.2.1\n")},
	}
	for _, program := range []string{"containerd", "runc", "kubelet"} {
		all = append(all, file.File{Path: "var/lib/machines/node-a/usr/local/bin/" + program, Mode: 0o755})
	}
	for name, content := range files {
		all = append(all, file.File{Path: name, Mode: 0o644, Content: []byte(content)})
	}
	_, err = root.WriteAll(all)
	must(t, err)
	return root
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestToken: who cannot have the token still is told all the rest, while the step fails without it.
func TestToken(t *testing.T) {
	for _, c := range []struct {
		key, file    string // the goal state's key for the token, and the token in /token
		warning, err string
		why          string
	}{
		{"bootstrap_token_file = \"/token\"", "abcdef.0123456789abcdef", "", "", "as it should be"},
		{"bootstrap_token_file = \"/none\"", "", "", "kubelet.bootstrap_token_file: ", "no file"},
		{"bootstrap_token_credential = \"token\"", "", "not known here", "", "only the step has it"},
		{"bootstrap_token_file = \"/token\"", "abcdef.SECRET", "", "kubelet.bootstrap_token_file: content of /token: not a bootstrap token", "no token"},
	} {
		root := newHost(t, map[string]string{
			"etc/berth/goal.toml": strings.Replace(goal, "bootstrap_token_credential = \"token\"", c.key, 1), "token": c.file,
		})
		host, err := Look(root)
		must(t, err)
		list := host.Slot(context.Background(), "a")
		p := list[len(list)-1]
		noToken, noFiles := c.file == "", strings.Contains(c.file, "SECRET")
		if p.Name != Kubelet || p.NoToken != noToken || (p.Output.Files == nil) != noFiles {
			t.Errorf("%s: part %s with %d files, no token: %t", c.why, p.Name, len(p.Output.Files), p.NoToken)
		}
		if got := strings.Join(p.Output.Warnings, "\n"); !strings.Contains(got, c.warning) || c.warning == "" && got != "" {
			t.Errorf("%s: warns %q, want %q", c.why, got, c.warning)
		}
		if got := fmt.Sprint(p.Err); p.Err != nil && c.err == "" || !strings.Contains(got, c.err) || strings.Contains(got, "SECRET") {
			t.Errorf("%s: %v, want %q", c.why, p.Err, c.err)
		}
		step := Render(context.Background(), root, nil, host.Goal, host.Goal.Slots["a"], Kubelet)
		if (step.Err == nil) != (c.file != "" && c.err == "") {
			t.Errorf("%s: the step: %v", c.why, step.Err)
		}
	}
}

// TestSlots: a slot is there as long as there is something to write or to remove.
func TestSlots(t *testing.T) {
	for _, c := range []struct {
		files map[string]string
		want  []string
		parts int // of the last slot
		why   string
	}{
		{nil, []string{"a"}, 4, "of the goal state"},
		{map[string]string{plan.ClaimsDir + "/a": "", plan.ClaimsDir + "/b": ""}, []string{"a", "b"}, 1, "one that runs and is not in the goal state"},
		{map[string]string{plan.UnitDir + "/node@c.service": ""}, []string{"a", "c"}, 1, "one whose unit is left over"},
	} {
		host, err := Look(newHost(t, c.files))
		must(t, err)
		got, err := host.Slots()
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v, -want +got:\n%s", c.why, err, diff)
		}
		if list := host.Slot(context.Background(), got[len(got)-1]); len(list) != c.parts {
			t.Errorf("%s: %d parts, want %d", c.why, len(list), c.parts)
		}
	}
}
