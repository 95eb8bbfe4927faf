package parts

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
	"berth/generator/plan"
	"berth/helpers/render"
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

// content returns a file of a part.
func content(t *testing.T, p Part, name string) string {
	t.Helper()
	for _, f := range p.Output.Files {
		if f.Path == name {
			return string(f.Content)
		}
	}
	t.Fatalf("%s: no file %s", p.Name, name)
	return ""
}

// TestCredential: who is not the step may not have the credential, and still is told all the rest; the step fails without it.
func TestCredential(t *testing.T) {
	const folder = "run/credentials/node-render-kubelet@a.service"
	for _, c := range []struct {
		files   map[string]string
		token   string // in the file for it
		noToken bool
		warning string
		err     string
		why     string
	}{
		{map[string]string{folder + "/token": "abcdef.0123456789abcdef\n"}, "abcdef.0123456789abcdef", false, "", "", "the slot runs"},
		{nil, standIn, true, "not known here", "", "it does not"},
		{map[string]string{folder + "/other": ""}, standIn, true, "", `"token" beneath`, "it runs with another credential"},
		{map[string]string{folder + "/token": "abcdef.SECRET"}, "", false, "", "kubelet.bootstrap_token_credential: content of token: not a bootstrap token", "no token"},
	} {
		host, err := Look(newHost(t, c.files))
		must(t, err)
		list := host.Slot(context.Background(), "a")
		p := list[len(list)-1]
		if p.Name != Kubelet || p.NoToken != c.noToken {
			t.Errorf("%s: part %s, no token: %t", c.why, p.Name, p.NoToken)
		}
		if c.token != "" {
			if text := content(t, p, render.Bootstrap); !strings.Contains(text, c.token) {
				t.Errorf("%s: %s", c.why, text)
			}
		} else if p.Output.Files != nil {
			t.Errorf("%s: there are files", c.why)
		}
		if got := strings.Join(p.Output.Warnings, "\n"); !strings.Contains(got, c.warning) || c.warning == "" && got != "" {
			t.Errorf("%s: warns %q, want %q", c.why, got, c.warning)
		}
		if (p.Err != nil) != (c.err != "") || p.Err != nil && !strings.Contains(p.Err.Error(), c.err) || p.Err != nil && strings.Contains(p.Err.Error(), "SECRET") {
			t.Errorf("%s: %v, want %q", c.why, p.Err, c.err)
		}

		step := Render(context.Background(), host.Root, nil, host.Goal, host.Goal.Slots["a"], Kubelet)
		if step.Err == nil || !strings.Contains(step.Err.Error(), "systemd passed no credentials") {
			t.Errorf("%s: the step without its credential: %v", c.why, step.Err)
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
