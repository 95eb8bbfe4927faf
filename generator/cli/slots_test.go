package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate/store"
	"berth/generator/plan"
	"berth/helpers/render/parts"
	"berth/helpers/step"
)

// golden is the folder of what the commands are expected to print.
const golden = "../../testdata/cli"

// Secrets of a host, and others that come later.
const (
	token, token2       = "abcdef.0123456789abcdef", "fedcba.fedcba9876543210"
	header, header2     = "Basic aGVhZGVyOm9uZQ==", "Basic aGVhZGVyOnR3bw=="
	password, password2 = "registry-password", "registry-password-2"
	podHeader           = "Bearer pod-header"
)

var secrets = []string{token, token2, header, header2, password, password2, podHeader}

const goal = `boot = "a"
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"
[containerd]
config_version = 3
[containerd.registry."docker.io"]
mirrors = [{ url = "http://127.0.0.1:5000" }]
[containerd.registry."private.example.com"]
mirrors = [{ url = "https://mirror.example.com", header = { Authorization = ["` + header + `"] } }]
[containerd.config.plugins."io.containerd.cri.v1.images".registry.auths."https://private.example.com"]
password = "` + password + `"
[machine]
mounts = [{ source = "/srv/data" }]
[slot.a]
`

// fakeHost is a host with the goal state and all that slot a needs.
type fakeHost struct {
	t    *testing.T
	root *file.Root
}

func newFakeHost(t *testing.T) fakeHost {
	t.Helper()
	root, err := file.OpenRoot(t.TempDir())
	must(t, err)
	t.Cleanup(func() { root.Close() })
	h := fakeHost{t, root}
	ca, err := os.ReadFile("../../testdata/render/full/want/machine/etc/kubernetes/pki/apiserver-client-ca.crt")
	must(t, err)
	h.write("etc/berth/goal.toml", goal)
	h.write("etc/berth/ca.crt", string(ca))
	h.write("etc/berth/bootstrap-token", token+"\n")
	h.write("etc/hostname", "host-1\n")
	h.write("etc/resolv.conf", "nameserver 192.0.2.1\n")
	h.write("srv/data/x", "")
	for _, program := range []string{"containerd", "runc", "kubelet"} {
		h.add(file.File{Path: "var/lib/machines/node-a/usr/local/bin/" + program, Mode: 0o755, Content: []byte("x")})
	}
	return h
}

func (h fakeHost) add(f file.File) {
	h.t.Helper()
	_, err := h.root.Write(f)
	must(h.t, err)
}

func (h fakeHost) write(name, content string) {
	h.t.Helper()
	h.add(file.File{Path: name, Mode: 0o644, Content: []byte(content)})
}

func (h fakeHost) link(name, target string) {
	h.t.Helper()
	h.add(file.File{Path: name, Mode: fs.ModeSymlink, Content: []byte(target)})
}

func (h fakeHost) remove(name string) {
	h.t.Helper()
	must(h.t, os.RemoveAll(h.path(name)))
}

func (h fakeHost) path(name string) string { return filepath.Join(h.root.Name(), name) }

// change replaces text in the goal state.
func (h fakeHost) change(old, new string) {
	h.t.Helper()
	text, err := h.root.Read("etc/berth/goal.toml", 1<<20)
	must(h.t, err)
	if !strings.Contains(string(text), old) {
		h.t.Fatalf("no %q in the goal state", old)
	}
	h.write("etc/berth/goal.toml", strings.Replace(string(text), old, new, 1))
}

// start writes what the generator and the steps of slot a write, and the claim.
func (h fakeHost) start() {
	h.t.Helper()
	h.write(plan.ClaimsDir+"/a", "")
	look, err := parts.Look(h.root)
	must(h.t, err)
	for _, p := range look.Slot(context.Background(), "a") {
		must(h.t, p.Err)
		must(h.t, os.MkdirAll(h.path(p.Base), 0o755))
		base, err := h.root.Sub(p.Base)
		must(h.t, err)
		_, err = base.WriteAll(p.Output.Files)
		must(h.t, errors.Join(err, base.Close()))
	}
}

// berth runs a command line and returns what it printed, the two streams one after the other, and its exit code. No secret is ever in it.
func (h fakeHost) berth(args ...string) (stdout, stderr string, code int) {
	h.t.Helper()
	var out, errs bytes.Buffer
	code = Main(append([]string{"berth", "--root", h.root.Name()}, args...), &out, &errs)
	for _, secret := range secrets {
		if strings.Contains(out.String()+errs.String(), secret) {
			h.t.Errorf("%v: prints the secret %q:\n%s%s", args, secret, &out, &errs)
		}
	}
	stable := func(b bytes.Buffer) string { return strings.ReplaceAll(b.String(), h.root.Name(), "ROOT") }
	return stable(out), stable(errs), code
}

// isGolden compares what a command printed with the file called name.
func isGolden(t *testing.T, name, got string) {
	t.Helper()
	name = filepath.Join(golden, name)
	if *update {
		must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		must(t, os.WriteFile(name, []byte(got), 0o644))
	}
	want, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s, -want +got (rewrite with -update):\n%s", name, diff)
	}
}

// hosts are the states of a host in which show and diff are looked at, by the names of the golden files.
var hosts = []struct {
	name, why string
	change    func(h fakeHost)
	diff      bool // something is different
	fails     bool // a step would
	all       bool // of all that is printed there is a golden file, not only of what diff prints for people
}{
	{"fresh", "a host that has never started a slot", func(h fakeHost) {}, true, false, false},
	{"started", "as it was started", func(h fakeHost) { h.start() }, false, false, false},
	{"changed", "another goal state while the slot runs", func(h fakeHost) {
		h.start()
		changeAll(h)
	}, true, false, false},
	{"stopped", "the same, when the slot does not run", func(h fakeHost) {
		h.start()
		changeAll(h)
		h.remove(plan.ClaimsDir)
	}, true, false, false},
	{"budget", "a changed budget, which reaches the machine's unit too", func(h fakeHost) {
		h.start()
		h.change("[machine]", "[timeouts]\nready = \"5m\"\n[machine]")
	}, true, false, false},
	{"mirror", "another mirror, which containerd finds by itself", func(h fakeHost) {
		h.start()
		h.change("http://127.0.0.1:5000", "http://127.0.0.1:5001")
	}, true, false, false},
	{"public", "secrets that are on the host, and are in the goal state no more", func(h fakeHost) {
		h.start()
		h.change(`, header = { Authorization = ["`+header+`"] }`, "")
		h.change("password = \""+password+"\"", "")
		h.change(`.auths."https://private.example.com"`, "")
	}, true, false, false},
	{"drop-in", "one more file of the goal state, which changes nothing but the comments", func(h fakeHost) {
		h.start()
		h.write("etc/berth/goal.toml.d/10-same.toml", "boot = \"a\"\n")
	}, true, false, false},
	{"foreign", "what others did to the files", func(h fakeHost) {
		h.start()
		machine := "var/lib/machines/node-a/"
		must(h.t, os.Chmod(h.path(machine+"var/lib/kubelet/config.yaml"), 0o604|fs.ModeSetuid))
		must(h.t, os.Chmod(h.path(machine+"etc/kubernetes/manifests"), 0o755))
		h.link(machine+"etc/systemd/system/node-stack.target.wants/kubelet.service", "/dev/null")
		h.link(machine+"etc/systemd/system/kubelet.service", "\x1b[2J/dev/null")
		h.link(machine+"etc/systemd/system/multi-user.target.wants/kubelet.service", "/x")
		h.write(machine+"etc/systemd/system/containerd.service", "[Service]\nExecStart=/evil \x1b]0;\x07\u202e\xff\n")
		h.write(machine+"etc/containerd/certs.d/docker.io/hosts.toml", strings.Repeat("x", 2<<20))
		h.write(machine+"etc/containerd/certs.d/old.example.com/hosts.toml", "# Made by berth\nAuthorization = \""+header+"\"\n")
		h.remove(machine + "etc/tmpfiles.d/berth.conf")
		must(h.t, unix.Mkfifo(h.path(machine+"etc/tmpfiles.d/berth.conf"), 0o600))
		h.write(plan.UnitDir+"/node-peer-guard@a.service.d/50-berth.conf", "x")
	}, true, false, true},
	{"moved", "a slot that is not in the goal state any more while it runs, and another one instead", func(h fakeHost) {
		h.start()
		h.change("[slot.a]", "[slot.b]")
		h.change(`boot = "a"`, `boot = "b"`)
	}, true, true, true},
	{"broken-parts", "steps that would fail, beside one that would not", func(h fakeHost) {
		h.start()
		h.remove("srv/data")
		h.remove("etc/berth/bootstrap-token")
		h.change("config_version = 3", "binary = \"/opt/containerd\"")
		h.change("[kubelet]\n", "[kubelet]\nlabels = { a = \"b\" }\n")
	}, true, true, false},
	{"credential", "a token that only the step is given", func(h fakeHost) {
		h.start()
		h.change(`bootstrap_token_file = "/etc/berth/bootstrap-token"`, `bootstrap_token_credential = "token"`)
	}, true, false, false},
}

// changeAll changes something for each kind of file.
func changeAll(h fakeHost) {
	h.change("[kubelet]\n", "[kubelet.config]\nmaxPods = 200\n[kubelet.config.staticPodURLHeader]\nAuthorization = [\""+podHeader+"\"]\n"+
		"[kubelet]\nlabels = { a = \"b\" }\n")
	h.change(`mounts = [{ source = "/srv/data" }]`, "mounts = []\n[timeouts]\nready = \"3m\"\nsettle = \"5s\"")
	h.change(header, header2)
	h.change(password, password2)
	h.change("http://127.0.0.1:5000", "http://127.0.0.1:5001")
	h.change("boot = \"a\"\n", "")
	h.write("etc/berth/bootstrap-token", token2)
}

func TestShowAndDiff(t *testing.T) {
	for _, c := range hosts {
		t.Run(c.name, func(t *testing.T) {
			h := newFakeHost(t)
			c.change(h)
			before := tree(t, h.root.Name())
			exits := func(command string, code int, fails bool) {
				want := step.ExitDone
				if fails {
					want = step.ExitFailed
				}
				if code != want {
					t.Errorf("%s: exit code %d, want %d: %s", command, code, want, c.why)
				}
			}
			for _, command := range []string{"show", "diff"} {
				stdout, stderr, code := h.berth(command)
				exits(command, code, c.fails)
				if c.all || command == "diff" {
					isGolden(t, command+"/"+c.name, stdout)
				}
				if c.fails || stderr != "" {
					isGolden(t, command+"/"+c.name+".stderr", stderr)
				}
				document, stderr, code := h.berth(command, "--json")
				exits(command+" --json", code, c.fails)
				if !json.Valid([]byte(document)) || stderr != "" {
					t.Errorf("%s --json: no JSON, or something beside it:\n%s%s", command, document, stderr)
				}
				if c.all {
					isGolden(t, command+"/"+c.name+".json", document)
				}
				if command == "diff" && (stdout != "") != c.diff {
					t.Errorf("differences: %t, want %t: %s", stdout != "", c.diff, c.why)
				}
			}
			list, _, code := h.berth("show", "--list")
			exits("show --list", code, c.fails)
			if c.all {
				isGolden(t, "show/"+c.name+".list", list)
			}
			_, _, code = h.berth("diff", "--exit-code")
			exits("diff --exit-code", code, c.fails || c.diff)
			if diff := cmp.Diff(before, tree(t, h.root.Name())); diff != "" {
				t.Errorf("something was changed:\n%s", diff)
			}
		})
	}
}

// tree describes all that is below dir.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		all[p] = info.Mode().String() + info.ModTime().String()
		return err
	}))
	return all
}

func TestShowFile(t *testing.T) {
	h := newFakeHost(t)
	h.start()
	machine := "/var/lib/machines/node-a/"
	for _, c := range []struct {
		path, stdout, stderr string
		code                 int
		why                  string
	}{
		{"/run/systemd/generator/multi-user.target.wants/node@a.service", "../node@a.service\n", "", 0, "a link"},
		{machine + "etc/kubernetes/manifests", "", "berth: " + machine + "etc/kubernetes/manifests is a folder\n", 1, "a folder"},
		{machine + "var/lib/kubelet/bootstrap-kubeconfig", "",
			"berth: " + machine + "var/lib/kubelet/bootstrap-kubeconfig holds a secret, which is not printed\n", 1, "the token"},
		{"/etc/passwd", "", "berth: no step writes /etc/passwd: for the files that are written, see berth show --list\n", 1, "another file"},
	} {
		stdout, stderr, code := h.berth("show", "--file", c.path)
		if stdout != c.stdout || stderr != c.stderr || code != c.code {
			t.Errorf("%s: %q, %q, exit code %d; want %q, %q, %d", c.why, stdout, stderr, code, c.stdout, c.stderr, c.code)
		}
	}
	// Byte for byte what was written.
	for _, name := range []string{"/run/systemd/nspawn/node-a.nspawn", machine + "etc/kubernetes/pki/apiserver-client-ca.crt"} {
		want, err := os.ReadFile(h.path(name))
		must(t, err)
		if got, _, code := h.berth("show", "--file", name, "a"); got != string(want) || code != 0 {
			t.Errorf("%s: exit code %d, -want +got:\n%s", name, code, cmp.Diff(string(want), got))
		}
	}
}

func TestSlotArguments(t *testing.T) {
	for _, c := range []struct {
		goal   string
		args   []string
		stderr string
		code   int
		why    string
	}{
		{goal, []string{"A"}, `slot "A": want 1 to 16 of a-z and 0-9`, 2, "no slot's name"},
		{goal, []string{"a", "--json"}, "2 arguments: want one slot, with the options before it (see berth COMMAND --help)", 2, "an option too late"},
		{goal, []string{"--bad"}, "flag provided but not defined: -bad", 2, "no option"},
		{goal, []string{"c"}, "slot c is not in the goal state (slots: a)", 3, "another slot"},
		{"", nil, "there is no goal state: write /etc/berth/goal.toml", 3, "nothing at all"},
		{goal + "x = 1\n", nil, "/etc/berth/goal.toml:18:1: slot.a.x: is not a key of the goal state", 3, "a broken goal state"},
	} {
		h := newFakeHost(t)
		h.write("etc/berth/goal.toml", c.goal)
		for _, command := range []string{"show", "diff"} {
			_, stderr, code := h.berth(append([]string{command}, c.args...)...)
			want := "berth: " + strings.ReplaceAll(c.stderr, "COMMAND", command)
			if !strings.HasPrefix(stderr, want) || code != c.code {
				t.Errorf("%s: %s prints %q and exits with %d; want %q and %d", c.why, command, stderr, code, want, c.code)
			}
		}
	}
	if _, stderr, code := newFakeHost(t).berth("show", "--file", "/x", "--json"); code != 2 {
		t.Errorf("--file with --json: exit code %d: %s", code, stderr)
	}
}

// fullDisk fails as a full disk or a closed pipe does.
type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, unix.ENOSPC }

// TestOutputLost has what could not be printed be told, as half of it in a file looks like all of it.
func TestOutputLost(t *testing.T) {
	h := newFakeHost(t)
	for _, args := range []string{"show", "show --list", "show --json", "diff", "diff --json", "check", "check --list",
		"show --file /run/systemd/generator/multi-user.target.wants/node@a.service"} {
		var stderr bytes.Buffer
		code := Main(append([]string{"berth", "--root", h.root.Name()}, strings.Fields(args)...), fullDisk{}, &stderr)
		if code != step.ExitFailed || !strings.Contains(stderr.String(), "no space left on device") {
			t.Errorf("%s: exit code %d, want %d: %s", args, code, step.ExitFailed, &stderr)
		}
	}
}

// TestDiffFails has nobody take a node down for a start that would fail, nor take what could not be compared for the same.
func TestDiffFails(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"", "", ""}, // the error alone
		{`boot = "a"`, "", "slot a needs daemon-reload, as far as is known: systemctl daemon-reload\n"},
		{"[containerd]\n", "[containerd]\nsandbox_image = \"x/pause:1\"\n", "slot a needs restart of containerd, as far as is known: first see to what fails\n"},
	} {
		h := newFakeHost(t)
		h.start()
		h.remove("etc/berth/ca.crt")
		h.change(c.old, c.new)
		stdout, stderr, code := h.berth("diff")
		if !strings.HasSuffix(stdout, c.want) || (stdout == "") != (c.want == "") || code != step.ExitFailed || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: exit code %d, and the end is not %q: %s\n%s", c.new, code, c.want, stderr, stdout)
		}
	}
}

// TestDiffOwner finds files that were handed to another user, who could read and change them.
func TestDiffOwner(t *testing.T) {
	h := newFakeHost(t)
	h.start()
	if err := os.Chown(h.path("var/lib/machines/node-a/var/lib/kubelet/bootstrap-kubeconfig"), 4711, -1); errors.Is(err, fs.ErrPermission) {
		t.Skip("giving a file away needs CAP_CHOWN")
	} else {
		must(t, err)
	}
	if stdout, _, _ := h.berth("diff"); !strings.Contains(stdout, "belongs to user 4711\n") {
		t.Errorf("got:\n%s", stdout)
	}
}

func TestVisible(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"tab\t, line\n, ü, �", "tab\t, line\n, ü, �"},
		{"\x1b[2J\x07\r\x7f\u009b\u202e", `\u001b[2J\u0007\u000d\u007f\u009b\u202e`},
		{"a\xffb", `a\xffb`},
	} {
		if got := visible(c.text); got != c.want {
			t.Errorf("%q: got %q, want %q", c.text, got, c.want)
		}
	}
}

// TestLastGood is about a goal state that is broken where the slot has been ready with another one.
func TestLastGood(t *testing.T) {
	h := newFakeHost(t)
	h.start()
	units, _, _ := h.berth("show", "a")
	state, err := store.Load(h.root)
	must(t, err)
	must(t, errors.Join(state.Use(h.root, "a"), store.Keep(h.root, "a", time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))))
	h.change("[slot.a]", "[slot.b]\n[slot.a]\nx = 1")

	const mistake = "/etc/berth/goal.toml:19:1: slot.a.x: is not a key of the goal state"
	const notice = "berth: the goal state is broken, and these slots go on with their last good one: a (recorded 2026-03-01T12:00:00Z)\nberth: " + mistake
	out, errs, code := h.berth("show", "a")
	if diff := cmp.Diff(units, out); diff != "" || code != 0 || !strings.HasPrefix(errs, notice) {
		t.Errorf("show a: exit code %d, %s\n%s", code, errs, diff)
	}
	if out, errs, code := h.berth("diff", "--exit-code"); out != "" || code != 0 || !strings.HasPrefix(errs, notice) {
		t.Errorf("diff: exit code %d, %s\n%s", code, errs, out)
	}
	if _, errs, code := h.berth("show", "b"); code != 3 || !strings.Contains(errs, mistake) {
		t.Errorf("show b, which has never been ready: exit code %d, %s", code, errs)
	}
	const goesOn = "warning last-good: slot a: goes on with its last good goal state, recorded 2026-03-01T12:00:00Z: correct the goal state\n"
	if out, _, code := h.berth("check"); code != 3 || !strings.HasPrefix(out, mistake) || !strings.HasSuffix(out, goesOn) {
		t.Errorf("check: exit code %d:\n%s", code, out)
	}

	h.write(store.Dir+"/a", "x")
	const damaged = "the last good goal state of slot a is not used: /var/lib/berth/a: it does not begin as"
	if out, errs, code := h.berth("show"); code != 3 || out != "" || !strings.Contains(errs, mistake) || !strings.Contains(errs, damaged) {
		t.Errorf("show with a damaged store: exit code %d, %s\n%s", code, errs, out)
	}
	if out, _, code := h.berth("check"); code != 3 || !strings.Contains(out, "warning last-good: slot a: "+damaged) {
		t.Errorf("check with a damaged store: exit code %d:\n%s", code, out)
	}
	h.change("\nx = 1", "")
	if out, _, _ := h.berth("check", "--host"); !strings.Contains(out, "warning last-good: slot a: "+damaged) {
		t.Errorf("check --host with a damaged store and a valid goal state:\n%s", out)
	}
}
