package goalstate

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/testdata/cputime"
)

var update = flag.Bool("update", false, "rewrite testdata/errors/*.golden")

// minimal is the least goal state of one slot called a.
const minimal = `[slot.a]
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/token"
`

// Each mistake that a person can make, with the very words about it.
func TestErrors(t *testing.T) {
	files, err := filepath.Glob("testdata/errors/*.toml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".toml")
		t.Run(name, func(t *testing.T) {
			data := must(os.ReadFile(file))
			_, err := Parse([]Source{{Path: "/etc/berth/goal.toml", Data: data}})
			var errs Errors
			if !errors.As(err, &errs) {
				t.Fatalf("got %v, want Errors", err)
			}
			for _, e := range errs {
				if e.Line < 1 || e.Column < 1 || e.Problem == "" || e.Cure == "" {
					t.Errorf("no place, problem or cure: %#v", e)
				}
			}
			if strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), "0123456789abcdef") {
				t.Errorf("the error repeats a secret:\n%v", err)
			}
			golden := strings.TrimSuffix(file, ".toml") + ".golden"
			got := err.Error() + "\n"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(string(must(os.ReadFile(golden))), got); diff != "" {
				t.Errorf("errors (-want +got), rewrite with go test -update:\n%s", diff)
			}
		})
	}
}

func TestFull(t *testing.T) {
	goal, err := Parse([]Source{{"/etc/berth/goal.toml", must(os.ReadFile("testdata/full.toml"))}})
	if err != nil {
		t.Fatal(err)
	}
	slot := func(name, peer string) *Slot {
		s := defaults()
		s.Name, s.Peers = name, []string{peer}
		s.Cluster.Server = "https://10.0.0.1:6443"
		s.Cluster.CertificateAuthority = "/etc/berth/ca.crt"
		s.Cluster.DNS = []string{"10.96.0.10"}
		s.Kubelet.Labels = map[string]string{"example.com/pool": "gpu"}
		s.Kubelet.Taints = []string{"dedicated=gpu:NoSchedule"}
		s.Kubelet.BootstrapTokenFile = "/etc/berth/bootstrap-token"
		s.Kubelet.Config = map[string]any{"maxPods": int64(200)}
		s.Containerd.Registry = map[string]Registry{"docker.io": {
			Server:  "https://registry-1.docker.io",
			Mirrors: []Mirror{{URL: "http://127.0.0.1:5000", Capabilities: []string{"pull", "resolve"}}},
		}}
		s.Containerd.Config = map[string]any{}
		s.Machine.Devices = []string{}
		s.Machine.Mounts = []Mount{{Source: "/srv/data", Target: "/srv/data", ReadOnly: true}}
		return s
	}
	want := &GoalState{
		Sources: []string{"/etc/berth/goal.toml"},
		Boot:    "a",
		Slots:   map[string]*Slot{"a": slot("a", "b"), "b": slot("b", "a")},
	}
	if diff := cmp.Diff(want, goal); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What a file or slot says goes over what is below it.
func TestLayers(t *testing.T) {
	parse := func(t *testing.T, files ...string) *GoalState {
		t.Helper()
		var sources []Source
		for i, f := range files {
			sources = append(sources, Source{fmt.Sprintf("/etc/berth/%d.toml", i), []byte(f)})
		}
		goal, err := Parse(sources)
		if err != nil {
			t.Fatal(err)
		}
		return goal
	}
	for _, tc := range []struct {
		why   string
		files []string
		got   func(*GoalState) any
		want  any
	}{
		{"tables merge, from shared to slot", []string{minimal + `labels = { a = "1", b = "1" }
[slot.a.kubelet.labels]
b = "2"
c = "2"`}, func(g *GoalState) any { return g.Slots["a"].Kubelet.Labels }, map[string]string{"a": "1", "b": "2", "c": "2"}},
		{"a slot leaves what the others share alone", []string{minimal + `labels = { a = "1" }
[slot.b]
[slot.a.kubelet.labels]
a = "2"`}, func(g *GoalState) any { return g.Slots["b"].Kubelet.Labels }, map[string]string{"a": "1"}},
		{"arrays replace, between files", []string{minimal + `taints = ["a:NoExecute", "b:NoExecute"]`, `[kubelet]
taints = ["c:NoExecute"]`}, func(g *GoalState) any { return g.Slots["a"].Kubelet.Taints }, []string{"c:NoExecute"}},
		{"arrays of tables replace", []string{minimal + `[[machine.mounts]]
source = "/x"`, `[[machine.mounts]]
source = "/y"`}, func(g *GoalState) any { return g.Slots["a"].Machine.Mounts }, []Mount{{Source: "/y", Target: "/y"}}},
		{"a shared value of a later file does not beat a slot's of an earlier one", []string{minimal + `
[slot.a.timeouts]
ready = "1m"`, `[timeouts]
ready = "9m"`}, func(g *GoalState) any { return g.Slots["a"].Timeouts.Ready }, time.Minute},
		{"a slot's credential takes the place of the shared one", []string{minimal + `
[slot.a.kubelet]
bootstrap_token_credential = "token"`}, func(g *GoalState) any {
			k := g.Slots["a"].Kubelet
			return []string{k.BootstrapToken, k.BootstrapTokenFile, k.BootstrapTokenCredential}
		}, []string{"", "", "token"}},
		{"and a later file's the earlier one's", []string{minimal, `[kubelet.exec]
command = "login"`}, func(g *GoalState) any {
			return []any{g.Slots["a"].Kubelet.BootstrapTokenFile, *g.Slots["a"].Kubelet.Exec}
		}, []any{"", Exec{Command: "login", APIVersion: "client.authentication.k8s.io/v1"}}},
		{"the same credential merges", []string{minimal, `[kubelet.exec]
command = "login"
env = { A = "1" }
[slot.a.kubelet.exec.env]
B = "2"`}, func(g *GoalState) any { return g.Slots["a"].Kubelet.Exec.Env }, map[string]string{"A": "1", "B": "2"}},
		{"a slot's authority takes the place of the shared one", []string{minimal + `
[slot.a.cluster]
certificate_authority_data = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="`}, func(g *GoalState) any { return g.Slots["a"].Cluster.CertificateAuthority }, ""},
		{"free tables merge", []string{minimal + `
[containerd.config.plugins.x]
a = 1
l = [1, { b = 2 }]
[slot.a.containerd.config.plugins.x]
a = 2
c.d = "e"`}, func(g *GoalState) any { return g.Slots["a"].Containerd.Config },
			map[string]any{"plugins": map[string]any{"x": map[string]any{"a": int64(2), "l": []any{int64(1),
				map[string]any{"b": int64(2)}}, "c": map[string]any{"d": "e"}}}}},
		{"a registry's server follows from its host", []string{minimal + `
[containerd.registry]
"docker.io" = {}
"ghcr.io:443" = {}
_default = {}`}, func(g *GoalState) any { return g.Slots["a"].Containerd.Registry }, map[string]Registry{
			"docker.io": {Server: "https://registry-1.docker.io"}, "ghcr.io:443": {Server: "https://ghcr.io:443"}, "_default": {}}},
		{"no peers at all", []string{minimal + "\n[slot.b]\npeers = []"}, func(g *GoalState) any {
			return []any{g.Slots["a"].Peers, g.Slots["a"].PeersSet, g.Slots["b"].Peers, g.Slots["b"].PeersSet}
		}, []any{[]string{"b"}, false, []string{}, true}},
		{"a drop-in takes the boot slot back", []string{"boot = \"a\"\n" + minimal, `boot = ""`}, func(g *GoalState) any { return g.Boot }, ""},
		{"settle may be nothing", []string{minimal + "[timeouts]\nsettle = \"0s\""}, func(g *GoalState) any { return g.Slots["a"].Timeouts.Settle }, time.Duration(0)},
		{"config_version as a number", []string{minimal + "[containerd]\nconfig_version = 3"}, func(g *GoalState) any { return g.Slots["a"].Containerd.ConfigVersion }, 3},
		{"signs that mean something to systemd arrive unchanged", []string{minimal, `[kubelet.exec]
command = "login"
args = ["100%", "$HOME", "a\"b", 'c\', " d:e "]`}, func(g *GoalState) any { return g.Slots["a"].Kubelet.Exec.Args },
			[]string{"100%", "$HOME", `a"b`, `c\`, " d:e "}},
	} {
		t.Run(tc.why, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, tc.got(parse(t, tc.files...))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// load is Load for a path.
func load(t testing.TB, root string) (*GoalState, error) {
	t.Helper()
	r, err := file.OpenRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	return Load(r)
}

// tree makes a root directory. A content that begins with "->" makes a link.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		name = filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(name), 0o755)
		if target, ok := strings.CutPrefix(content, "->"); ok && err == nil {
			err = os.Symlink(target, name)
		} else if err == nil {
			err = os.WriteFile(name, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// Which files are read, and in which order.
func TestLoadSources(t *testing.T) {
	const slotB = "[slot.b]"
	for _, tc := range []struct {
		why   string
		files map[string]string
		want  []string // none: ErrNone
	}{
		{"nothing at all", nil, nil},
		{"other files are not ours", map[string]string{"etc/berth/ca.crt": "x", "etc/berth/goal.toml.d/README": "x",
			"etc/berth/goal.toml.d/.a.toml": "x", "etc/berth/goal.toml.d/a.toml~": "x"}, nil},
		{"the first main file wins", map[string]string{"run/berth/goal.toml": minimal, "usr/lib/berth/goal.toml": "x"},
			[]string{"/run/berth/goal.toml"}},
		{"drop-ins of all folders by name, with a main file of another", map[string]string{
			"usr/lib/berth/goal.toml": minimal, "etc/berth/goal.toml.d/30.toml": slotB,
			"run/berth/goal.toml.d/20.toml": slotB, "usr/lib/berth/goal.toml.d/10.toml": slotB},
			[]string{"/usr/lib/berth/goal.toml", "/usr/lib/berth/goal.toml.d/10.toml", "/run/berth/goal.toml.d/20.toml",
				"/etc/berth/goal.toml.d/30.toml"}},
		{"drop-ins alone are a goal state", map[string]string{"etc/berth/goal.toml.d/10.toml": minimal},
			[]string{"/etc/berth/goal.toml.d/10.toml"}},
		{"the same name hides", map[string]string{"etc/berth/goal.toml": minimal, "etc/berth/goal.toml.d/1.toml": slotB,
			"run/berth/goal.toml.d/1.toml": "x", "usr/lib/berth/goal.toml.d/1.toml": "x"},
			[]string{"/etc/berth/goal.toml", "/etc/berth/goal.toml.d/1.toml"}},
		{"an empty file hides", map[string]string{"etc/berth/goal.toml": minimal, "run/berth/goal.toml.d/1.toml": "",
			"usr/lib/berth/goal.toml.d/1.toml": "x"}, []string{"/etc/berth/goal.toml"}},
		{"a link to /dev/null hides", map[string]string{"etc/berth/goal.toml": minimal,
			"etc/berth/goal.toml.d/1.toml": "->/dev/null", "usr/lib/berth/goal.toml.d/1.toml": "x",
			"etc/berth/goal.toml.d/2.toml": "->../../../dev/null", "usr/lib/berth/goal.toml.d/2.toml": "x"},
			[]string{"/etc/berth/goal.toml"}},
		{"a hidden main file", map[string]string{"etc/berth/goal.toml": "->/dev/null", "usr/lib/berth/goal.toml": "x"}, nil},
		{"an empty main file", map[string]string{"etc/berth/goal.toml": "", "usr/lib/berth/goal.toml": "x"}, nil},
		{"absolute links resolve inside root", map[string]string{"etc/berth/goal.toml": "->/srv/goal.toml",
			"srv/goal.toml": minimal}, []string{"/etc/berth/goal.toml"}},
		{"links that climb stay inside root", map[string]string{
			"etc/berth/goal.toml": "->../../../../../../../../../srv/goal.toml", "srv/goal.toml": minimal}, []string{"/etc/berth/goal.toml"}},
		{"a linked folder of drop-ins", map[string]string{"etc/berth/goal.toml.d": "->/srv/d", "srv/d/1.toml": minimal},
			[]string{"/etc/berth/goal.toml.d/1.toml"}},
		{"CRLF and a BOM", map[string]string{"etc/berth/goal.toml": "\xef\xbb\xbf" + strings.ReplaceAll(minimal, "\n", "\r\n")},
			[]string{"/etc/berth/goal.toml"}},
	} {
		t.Run(tc.why, func(t *testing.T) {
			goal, err := load(t, tree(t, tc.files))
			if tc.want == nil {
				if !errors.Is(err, ErrNone) {
					t.Fatalf("got %v, want ErrNone", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, goal.Sources); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Whatever stands where a goal state should be, the answer is quick and clear.
func TestLoadHostile(t *testing.T) {
	const name = "/etc/berth/goal.toml"
	for _, tc := range []struct {
		why  string
		make func(path string) error
		want string
	}{
		{"FIFO", func(p string) error { return unix.Mkfifo(p, 0o644) }, "is a FIFO: want a regular file"},
		{"folder", func(p string) error { return os.Mkdir(p, 0o755) }, "is a folder: want a regular file"},
		{"socket", func(p string) error {
			t.Chdir(filepath.Dir(p)) // a socket's path is short
			l, err := net.Listen("unix", "goal.toml")
			if err == nil {
				l.(*net.UnixListener).SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		}, "is a socket: want a regular file"},
		{"device", func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))) },
			"is a device: want a regular file"},
		{"too large", func(p string) error { return os.WriteFile(p, bytes.Repeat([]byte("#"), maxSize+1), 0o644) },
			"is larger than 1 MiB: want a goal state"},
		{"endless", func(p string) error { return os.Truncate(must(os.Create(p)).Name(), 1<<40) },
			"is larger than 1 MiB: want a goal state"},
		{"link to itself", func(p string) error { return os.Symlink("goal.toml", p) },
			"cannot be read: too many levels of symbolic links: want a link that leads to a file"},
		{"link to nowhere", func(p string) error { return os.Symlink("/nowhere", p) },
			`is a link to "/nowhere", which does not exist: want a file, or a link to /dev/null to hide it`},
	} {
		t.Run(tc.why, func(t *testing.T) {
			root := tree(t, map[string]string{"etc/berth/goal.toml.d/1.toml": minimal + "x"})
			if err := tc.make(root + name); errors.Is(err, unix.EPERM) {
				t.Skip("needs root: ", err)
			} else if err != nil {
				t.Fatal(err)
			}
			goal, err := load(t, root)
			var errs Errors
			if !errors.As(err, &errs) || len(errs) != 2 {
				t.Fatalf("got %v, want this error and the drop-in's", err)
			}
			if got, want := errs[0].Error(), name+": "+tc.want; got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
			if !goal.Partial || goal.Slots["a"] == nil {
				t.Errorf("got %+v, want slot a, which is certain", goal)
			}
		})
	}

	t.Run("names that no unit file can hold", func(t *testing.T) {
		goal, err := load(t, tree(t, map[string]string{"etc/berth/goal.toml": minimal,
			"run/berth/goal.toml.d/a\nb.toml": "x", "run/berth/goal.toml.d/\xff.toml": "x"}))
		want := `/run/berth/goal.toml.d/a\nb.toml: has a name with a control character or not in UTF-8: want another name
/run/berth/goal.toml.d/\xff.toml: has a name with a control character or not in UTF-8: want another name`
		if err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
		if diff := cmp.Diff([]string{"/etc/berth/goal.toml"}, goal.Sources); diff != "" {
			t.Errorf("sources (-want +got):\n%s", diff)
		}
	})
	t.Run("drop-in folder is a file", func(t *testing.T) {
		_, err := load(t, tree(t, map[string]string{"etc/berth/goal.toml": minimal, "run/berth/goal.toml.d": "x"}))
		if want := "/run/berth/goal.toml.d: is not a folder: want a folder of *.toml files"; err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	})
	t.Run("unreadable", func(t *testing.T) {
		if os.Geteuid() == 0 {
			t.Skip("root reads everything")
		}
		root := tree(t, map[string]string{"etc/berth/goal.toml": minimal})
		if err := os.Chmod(root+name, 0); err != nil {
			t.Fatal(err)
		}
		_, err := load(t, root)
		if want := name + ": cannot be read: permission denied: want a file that root can read"; err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	})
}

// What two files say may not fit together, and the later one is to blame.
func TestConflict(t *testing.T) {
	_, err := Parse([]Source{
		{"/usr/lib/berth/goal.toml", []byte(minimal + "[kubelet.config]\nmaxPods = 3\n")},
		{"/etc/berth/goal.toml.d/b.toml", []byte("[timeouts]\npoll = 1\n\n[kubelet]\n  config = \"x\"\n")},
		{"/etc/berth/goal.toml.d/a.toml", []byte("kubelet = 3\n[cluster.server]\n")},
	})
	want := `/etc/berth/goal.toml.d/a.toml:1:11: kubelet: is an integer: want a table, as in /usr/lib/berth/goal.toml:5
/etc/berth/goal.toml.d/a.toml:2:10: cluster.server: is a table: want a string, as in /usr/lib/berth/goal.toml:3
/etc/berth/goal.toml.d/b.toml:2:8: timeouts.poll: is an integer: want a duration in quotes, such as "90s" or "2m30s"
/etc/berth/goal.toml.d/b.toml:5:12: kubelet.config: is a string: want a table, as in /usr/lib/berth/goal.toml:7`
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What stays certain when there are errors.
func TestPartial(t *testing.T) {
	for _, tc := range []struct {
		why, file string
		boot      string
		slots     []string
	}{
		{"a mistake in one slot", "boot = \"a\"\n" + minimal + "[slot.b]\nx = 1\n", "a", []string{"a", "b"}},
		{"broken below", "boot = \"a\"\n[slot.b]\n=", "a", []string{"b"}},
		{"broken above", "=\nboot = \"a\"\n[slot.a]\n", "", nil},
		{"boot is no slot", "boot = \"c\"\n" + minimal, "", []string{"a"}},
		{"bad name", "boot = \"A\"\n[slot.A]\n[slot.b]\n=", "", []string{"b"}},
	} {
		goal, err := Parse([]Source{{"/etc/berth/goal.toml", []byte(tc.file)}})
		want := &GoalState{Partial: true, Sources: []string{"/etc/berth/goal.toml"}, Boot: tc.boot, Slots: map[string]*Slot{}}
		for _, name := range tc.slots {
			want.Slots[name] = &Slot{Name: name}
		}
		if err == nil {
			t.Errorf("%s: no error", tc.why)
		}
		if diff := cmp.Diff(want, goal); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.why, diff)
		}
	}
}

// The list of fields is the one of the module that it was made from.
func TestKubeletFields(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program")
	}
	cmd := exec.Command("go", "run", ".")
	cmd.Dir = "testdata/kubeletfields"
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=-mod=mod")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("k8s.io/kubelet is not in the module cache: %v\n%s", err, &stderr)
	}
	if diff := cmp.Diff(string(must(os.ReadFile("kubeletfields.go"))), string(out)); diff != "" {
		t.Errorf("go generate changes it (-have +want):\n%s", diff)
	}
	for name := range protected {
		if findKubeletField(name) == nil && name != "apiVersion" && name != "kind" {
			t.Errorf("the protected field %s does not exist", name)
		}
	}
}

// Nothing that is costly to start may come into the generator through this package.
func TestImports(t *testing.T) {
	out := must(exec.Command("go", "list", "-deps", ".").Output())
	for _, bad := range []string{"net/http", "text/template", "regexp", "crypto/x509", "k8s.io/", "encoding/json/v2"} {
		for dep := range strings.Lines(string(out)) {
			if dep = strings.TrimSpace(dep); dep == bad || strings.HasSuffix(bad, "/") && strings.HasPrefix(dep, bad) {
				t.Errorf("imports %s", dep)
			}
		}
	}
}

// FuzzParse parses any files: a main file, and drop-ins that are separated by form feeds, which no TOML has.
func FuzzParse(f *testing.F) {
	for _, file := range append(must(filepath.Glob("testdata/errors/*.toml")), "testdata/full.toml") {
		f.Add(must(os.ReadFile(file)), []byte(minimal))
	}
	for _, file := range must(filepath.Glob("../../testdata/*/*/*/etc/berth/goal.toml")) {
		f.Add(must(os.ReadFile(file)), []byte("boot = \"\"\f\f[slot.b]\f\xef\xbb\xbf[slot.b.kubelet.labels]\r\n"))
	}
	f.Add([]byte(minimal), bytes.Repeat([]byte("[slot.a]\nmachine.devices = [\"/dev/x\"]\f"), 300)) // many drop-ins
	f.Add([]byte("x = "+strings.Repeat("[", 900)+strings.Repeat("]", 900)), []byte(strings.Repeat("a.", 900)+"a = 1"))
	f.Add([]byte(minimal+"[kubelet]\ntaints = ["+strings.Repeat(`"a:NoSchedule",`, 2000)+"]"), []byte{})
	f.Add([]byte(minimal), []byte(strings.Repeat("[[machine.mounts]]\nsource = \"/a\"\n", 500)))
	f.Fuzz(func(t *testing.T, main, dropIns []byte) {
		files, size := []Source{{"/main", main}}, len(main)+len(dropIns)
		for i, data := range bytes.Split(dropIns, []byte("\f")) {
			files = append(files, Source{fmt.Sprintf("/drop-in%d", i), data})
		}
		var goal *GoalState
		var err error
		took := cputime.Of(func() { goal, err = Parse(files) })
		// A hundred times what a goal state of that size takes.
		if took > time.Second+time.Duration(size)*20*time.Microsecond {
			t.Errorf("%d bytes in %d files took %v", size, len(files), took)
		}
		if goal.Partial != (err != nil) {
			t.Fatalf("Partial is %v, the error %v", goal.Partial, err)
		}
		if goal.Boot != "" && (!ValidSlotName(goal.Boot) || !goal.Partial && goal.Slots[goal.Boot] == nil) {
			t.Errorf("slot %q starts at boot, of %q", goal.Boot, goal.SlotNames())
		}
		for name, slot := range goal.Slots {
			if slot.Name != name || !ValidSlotName(name) {
				t.Errorf("slot %q is called %q", name, slot.Name)
			}
			if goal.Partial && !reflect.DeepEqual(slot, &Slot{Name: name}) {
				t.Errorf("more than names of a goal state with mistakes: %+v", slot)
			}
			for _, peer := range slot.Peers {
				if goal.Slots[peer] == nil || peer == name {
					t.Errorf("slot %q has the peer %q", name, peer)
				}
			}
		}
		var errs Errors
		errors.As(err, &errs)
		for _, e := range errs {
			if e.Line < 1 || e.Column < 1 || e.Problem == "" || e.Cure == "" || hasControl(e.Error()) {
				t.Fatalf("not a whole error on one line: %#v", e)
			}
		}
		Secrets(files)
	})
}

// Each slot names all others as its peers: without a bound, a megabyte of empty tables costs gigabytes of memory.
func TestSlotsAreBounded(t *testing.T) {
	slots := func(n int) (*GoalState, error) {
		var b strings.Builder
		b.WriteString(strings.Replace(minimal, "[slot.a]\n", "", 1))
		for i := range n {
			fmt.Fprintf(&b, "[slot.s%d]\n", i)
		}
		return Parse([]Source{{"/etc/berth/goal.toml", []byte(b.String())}})
	}
	if goal, err := slots(maxSlots); err != nil || len(goal.Slots) != maxSlots {
		t.Errorf("%d slots: %v", maxSlots, err)
	}
	took := cputime.Of(func() {
		_, err := slots(60000)
		if err == nil || !strings.HasSuffix(err.Error(), ": slot: has 60000 slots: want 1000 at most") {
			t.Errorf("60000 slots: %v", err)
		}
	})
	if took > 10*time.Second {
		t.Errorf("60000 slots took %v", took)
	}
}

// What a megabyte of mistakes costs: everything but brackets is still parsed to its end.
func BenchmarkHostile(b *testing.B) {
	var keys strings.Builder
	keys.WriteString(minimal + "[kubelet.config]\n")
	for i := 0; keys.Len() < maxSize-16; i++ {
		fmt.Fprintf(&keys, "maxPads%d=1\n", i)
	}
	for _, tc := range []struct{ name, data string }{
		{"keys", keys.String()},
		{"brackets", "x=" + strings.Repeat("[", maxSize-2)},
		{"dots", strings.Repeat("a.", maxSize/2-1) + "a=1"},
		{"tables", strings.Repeat("[[slot.a]]\n", maxSize/11)},
		{"line", "x=[" + strings.Repeat("\"\\u0001\",", maxSize/9-1) + "]"},
	} {
		b.Run(tc.name, func(b *testing.B) {
			for b.Loop() {
				if _, err := Parse([]Source{{"/etc/berth/goal.toml", []byte(tc.data)}}); err == nil {
					b.Fatal("no error")
				}
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	shared, _, _ := strings.Cut(string(must(os.ReadFile("testdata/full.toml"))), "[slot.a]")
	for _, slots := range []int{2, 1000} {
		goal := strings.Builder{}
		goal.WriteString(shared)
		goal.WriteString("[slot.a]\n")
		for i := range slots - 1 {
			fmt.Fprintf(&goal, "[slot.s%d.kubelet]\nnode_name = \"node-%d\"\nlabels = { \"example.com/slot\" = \"%d\" }\n", i, i, i)
		}
		root := b.TempDir()
		os.MkdirAll(root+"/etc/berth", 0o755)
		if err := os.WriteFile(root+"/etc/berth/goal.toml", []byte(goal.String()), 0o644); err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprint(slots), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if goal, err := load(b, root); err != nil || len(goal.Slots) != slots {
					b.Fatal(err)
				}
			}
		})
	}
}
