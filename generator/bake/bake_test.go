package bake

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/plan"
	"berth/helpers/step"
	"berth/units"
)

var update = flag.Bool("update", false, "rewrite the expected tree")

// bakeEnv has the test's own program bake the image that it names, again and again if it is to be killed.
const bakeEnv, loopEnv = "BERTH_TEST_BAKE", "BERTH_TEST_BAKE_LOOP"

func TestMain(m *testing.M) {
	dir := os.Getenv(bakeEnv)
	if dir == "" {
		os.Exit(m.Run())
	}
	root, err := file.OpenRoot(dir)
	for n := 0; err == nil; n++ {
		// Two slots and one in turn, so that there is something to write and to remove each time.
		_, err = Bake(root, Options{Goal: []string{os.Getenv(loopEnv + fmt.Sprint(n%2))}, GeneratedOnly: true, Epoch: epoch})
		if os.Getenv(loopEnv) == "" {
			break
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

var epoch = time.Unix(1_700_000_000, 0)

const two = `boot = "a"
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"
[timeouts]
ready = "1m"
after_start = "4m"
[slot.a]
[slot.b]
`

var one = strings.Replace(two, "[slot.b]\n", "", 1)

// TestGeneratedUnits holds what is baked against the golden trees of the generator.
func TestGeneratedUnits(t *testing.T) {
	const cases = "../../testdata/generator"
	dirs, err := os.ReadDir(cases)
	must(t, err)
	baked := 0
	for _, d := range dirs {
		in := filepath.Join(cases, d.Name(), "in")
		if exists(filepath.Join(in, "run")) {
			continue // an image has no /run
		}
		t.Run(d.Name(), func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.CopyFS(dir, os.DirFS(in)))
			before := tree(t, dir)
			_, err := Bake(open(t, dir), Options{GeneratedOnly: true})
			out := filepath.Join(cases, d.Name(), "out")
			if exists(filepath.Join(cases, d.Name(), "stderr")) || !exists(out) {
				if step.Code(err) != step.ExitInvalid {
					t.Errorf("error %v, want that of an invalid goal state", err)
				}
				if diff := cmp.Diff(before, tree(t, dir)); diff != "" {
					t.Errorf("something was written:\n%s", diff)
				}
				return
			}
			must(t, err)
			if diff := cmp.Diff(contents(t, out), contents(t, filepath.Join(dir, plan.BakedDir))); diff != "" {
				t.Errorf("-generated +baked:\n%s", diff)
			}
			baked++
		})
	}
	if baked < 5 {
		t.Errorf("%d goal states were baked; want most of those of the generator", baked)
	}
}

// TestTree bakes everything, by different ways and umasks, and compares with the one tree, times included.
func TestTree(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	goal := write(t, t.TempDir(), "goal.toml", two)
	programs := fakePrograms(t)
	const golden = "testdata/tree"
	for _, tt := range []struct {
		why   string
		umask int
		image func(t *testing.T, dir string)
	}{
		{"a new folder", 0o077, func(*testing.T, string) {}},
		{"no umask, and all folders there already, younger than they may be", 0, func(t *testing.T, dir string) {
			for _, f := range units.Files() {
				must(t, os.MkdirAll(filepath.Join(dir, path.Dir(f.Path)), 0o755))
			}
		}},
		{"baked a moment ago with another goal state and without an epoch", 0o022, func(t *testing.T, dir string) {
			other := write(t, t.TempDir(), "goal.toml", strings.Replace(two, "[slot.b]", "[slot.b]\n[slot.c]", 1))
			_, err := Bake(open(t, dir), Options{Goal: []string{other}, Programs: programs})
			must(t, err)
		}},
	} {
		t.Run(tt.why, func(t *testing.T) {
			unix.Umask(tt.umask)
			dir := t.TempDir()
			must(t, os.Chmod(dir, 0o755))
			tt.image(t, dir)
			options := Options{Goal: []string{goal}, Programs: programs, Epoch: epoch}
			first, err := Bake(open(t, dir), options)
			must(t, err)
			var listing strings.Builder
			for _, name := range tree(t, dir).sorted() {
				fmt.Fprintln(&listing, name)
			}
			if *update {
				must(t, os.MkdirAll(filepath.Dir(golden), 0o755))
				must(t, os.WriteFile(golden, []byte(listing.String()), 0o644))
			}
			want, err := os.ReadFile(golden)
			must(t, err)
			if diff := cmp.Diff(string(want), listing.String()); diff != "" {
				t.Errorf("-want +got (rewrite with -update):\n%s", diff)
			}

			before := inodes(t, dir)
			again, err := Bake(open(t, dir), options)
			must(t, err)
			if diff := cmp.Diff(before, inodes(t, dir)); diff != "" || len(again.Wrote)+len(again.Removed) > 0 || again.Right != len(first.Wrote)+first.Right {
				t.Errorf("the second bake says %+v, and changed:\n%s", again, diff)
			}
		})
	}
}

// TestGone takes from the goal state what was baked before.
func TestGone(t *testing.T) {
	token := strings.Replace(one, "bootstrap_token_file = \"/etc/berth/bootstrap-token\"", "bootstrap_token_credential = \"token\"", 1)
	fresh := t.TempDir()
	mustBake(t, fresh, one)
	for _, tt := range []struct{ why, before, foreign string }{
		{"a slot", two, ""},
		{"the boot slot", strings.Replace(two, `"a"`, `"b"`, 1), ""},
		{"no slot but a drop-in", token, ""},
		{"somebody else's drop-in stays, and with it its folder", two, "node-wait-dbus@b.service.d/60-own.conf"},
		{"somebody else's unit of such a name stays", two, "node@c.service"},
		{"somebody else's link of such a name stays", two, "multi-user.target.wants/node@c.service"},
	} {
		t.Run(tt.why, func(t *testing.T) {
			dir := t.TempDir()
			mustBake(t, dir, tt.before)
			want := contents(t, fresh)
			if tt.foreign != "" {
				name := path.Join(plan.BakedDir, tt.foreign)
				if strings.Contains(name, ".wants/") {
					must(t, os.Symlink("/etc/other", filepath.Join(dir, name)))
					want[name] = "-> /etc/other"
				} else {
					write(t, dir, name, "[Unit]\n")
					want[name] = "[Unit]\n"
				}
			}
			result := mustBake(t, dir, one)
			if diff := cmp.Diff(want, contents(t, dir)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			each(t, dir, func(name string, info fs.FileInfo) {
				if info.ModTime().After(epoch) && !strings.HasSuffix(name, "/"+tt.foreign) {
					t.Errorf("%s: %v, later than the epoch", name, info.ModTime())
				}
			})
			if len(result.Removed) == 0 {
				t.Error("nothing is said to be removed")
			}
			if tt.foreign == "" {
				if diff := cmp.Diff(tree(t, fresh), tree(t, dir)); diff != "" {
					t.Errorf("a folder is left over:\n%s", diff)
				}
			}
		})
	}
}

// TestKill kills bakes at many moments; the next one has to make the same tree as one that was never disturbed.
func TestKill(t *testing.T) {
	goals := []string{write(t, t.TempDir(), "goal.toml", two), write(t, t.TempDir(), "goal.toml", one)}
	undisturbed, dir := t.TempDir(), t.TempDir()
	options := Options{Goal: goals[:1], GeneratedOnly: true, Epoch: epoch}
	_, err := Bake(open(t, undisturbed), options)
	must(t, err)
	halves := 0
	for range 25 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), bakeEnv+"="+dir, loopEnv+"=yes", loopEnv+"0="+goals[0], loopEnv+"1="+goals[1])
		cmd.Stderr = os.Stderr
		must(t, cmd.Start())
		time.Sleep(time.Duration(20_000+rand.IntN(30_000)) * time.Microsecond) // the moment is the point
		must(t, cmd.Process.Kill())
		cmd.Wait()
		for name := range tree(t, dir) {
			if strings.HasPrefix(path.Base(name), ".") && name != "." {
				halves++
			}
		}
		_, err := Bake(open(t, dir), options)
		must(t, err)
		if diff := cmp.Diff(tree(t, undisturbed), tree(t, dir)) + cmp.Diff(contents(t, undisturbed), contents(t, dir)); diff != "" {
			t.Fatalf("-want +got:\n%s", diff)
		}
	}
	t.Logf("%d half-written files", halves)
}

// TestLinks has links of all kinds in the way: nothing outside the image is changed.
func TestLinks(t *testing.T) {
	for _, tt := range []struct {
		why, link, target string
		in                string // where the unit then is, in the image
		err               string
	}{
		{"a file that leads out is replaced", plan.BakedDir + "/node@a.service", "OUTSIDE/file", plan.BakedDir + "/node@a.service", ""},
		{"a file that leads out by .. is replaced", plan.BakedDir + "/node@a.service", "../../../../../outside/file", plan.BakedDir + "/node@a.service", ""},
		{"an absolute folder is one of the image", plan.BakedDir, "/lib/units", "lib/units/node@a.service", ""},
		{"a folder that leads out is refused", plan.BakedDir, "OUTSIDE", "", "which is not there; want a folder or a link to one"},
		{"a folder that leads out by .. is refused", "usr", "../outside", "", "which is not there; want a folder or a link to one"},
		{"a loop", "usr", "usr", "", "too many levels of symbolic links"},
	} {
		t.Run(tt.why, func(t *testing.T) {
			top := t.TempDir()
			image, outside := filepath.Join(top, "image"), filepath.Join(top, "outside")
			must(t, os.MkdirAll(filepath.Join(image, path.Dir(tt.link)), 0o755))
			must(t, os.MkdirAll(filepath.Join(image, "lib/units"), 0o755))
			write(t, outside, "file", "outside")
			must(t, os.Symlink(strings.Replace(tt.target, "OUTSIDE", outside, 1), filepath.Join(image, tt.link)))
			write(t, image, "etc/berth/goal.toml", one)
			before := tree(t, outside)
			_, err := Bake(open(t, image), Options{GeneratedOnly: true, Epoch: epoch})
			if tt.err == "" {
				must(t, err)
				info, err := os.Lstat(filepath.Join(image, tt.in))
				if err != nil || !info.Mode().IsRegular() || !info.ModTime().Equal(epoch) {
					t.Errorf("%s: %v, %v", tt.in, info, err)
				}
				if info, err := os.Stat(filepath.Join(image, path.Dir(tt.in))); err != nil || !info.ModTime().Equal(epoch) {
					t.Errorf("folder of %s: %v, %v", tt.in, info, err)
				}
			} else if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %s", err, tt.err)
			}
			if diff := cmp.Diff(before, tree(t, outside)); diff != "" {
				t.Errorf("outside was changed:\n%s", diff)
			}
		})
	}
}

func TestErrors(t *testing.T) {
	inline := strings.Replace(two, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, `bootstrap_token = "abcdef.0123456789abcdef"`, 1)
	for _, tt := range []struct {
		why   string
		image map[string]string // files in the image
		goal  map[string]string // files to be copied, in the order of their names
		code  int
		err   string
	}{
		{"no goal state", nil, nil, step.ExitInvalid, "the image has no goal state: want etc/berth/goal.toml or usr/lib/berth/goal.toml beneath IMAGE, or --goal FILE"},
		{"a goal state in /run only", map[string]string{"run/berth/goal.toml": two}, nil, step.ExitInvalid, "the image has no goal state"},
		{"an invalid goal state of the image", map[string]string{"etc/berth/goal.toml": "boot = 1\n"}, nil, step.ExitInvalid, "/etc/berth/goal.toml:1:8: boot: "},
		{"an invalid goal state to be copied is named as it was given", nil, map[string]string{"1.toml": "boot = 1\n"}, step.ExitInvalid, "GOAL/1.toml:1:8: boot: "},
		{"an invalid drop-in", nil, map[string]string{"1.toml": two, "2.toml": "[slot.a.kubelet]\nlabel = {}\n"}, step.ExitInvalid, "GOAL/2.toml:2:1: slot.a.kubelet.label: "},
		{"too large", nil, map[string]string{"1.toml": two + strings.Repeat("#", 1<<20)}, step.ExitInvalid, "GOAL/1.toml: is larger than 1 MiB"},
		{"a secret", nil, map[string]string{"1.toml": inline}, step.ExitRefused, "GOAL/1.toml: kubelet.bootstrap_token is a secret"},
		{"a slot's secret", nil, map[string]string{"1.toml": two + "[slot.c.kubelet]\nbootstrap_token = \"abcdef.0123456789abcdef\"\n"}, step.ExitRefused, "want kubelet.bootstrap_token_file"},
		{"a secret that is replaced later on is in the image all the same", nil, map[string]string{"1.toml": inline, "2.toml": "[kubelet]\nbootstrap_token_file = \"/x\"\n"},
			step.ExitRefused, "GOAL/1.toml: kubelet.bootstrap_token is a secret"},
		{"hidden by the image's own", map[string]string{"etc/berth/goal.toml": two}, map[string]string{"1.toml": one}, step.ExitRefused,
			"GOAL/1.toml: would be without effect as /usr/lib/berth/goal.toml"},
		{"a drop-in hidden by the image's own", map[string]string{"etc/berth/goal.toml.d/2.toml": ""}, map[string]string{"1.toml": two, "2.toml": `boot = "b"`}, step.ExitRefused,
			"GOAL/2.toml: would be without effect as /usr/lib/berth/goal.toml.d/2.toml"},
		{"empty", nil, map[string]string{"1.toml": ""}, step.ExitRefused, "GOAL/1.toml: would be without effect"},
		{"a drop-in without .toml would not be read", nil, map[string]string{"1.toml": two, "2.conf": `boot = "b"`}, step.ExitUsage, "want a name that ends with .toml"},
		{"missing programs", map[string]string{"etc/berth/goal.toml": two, "usr/lib/berth/peer-guard": "no program"}, nil, step.ExitFailed,
			"/usr/lib/berth/nvidia-wire, /usr/lib/berth/peer-guard (is no program), /usr/lib/berth/record-applied"},
	} {
		t.Run(tt.why, func(t *testing.T) {
			dir, goals := t.TempDir(), t.TempDir()
			for name, content := range tt.image {
				write(t, dir, name, content)
			}
			var o Options
			for name, content := range tt.goal {
				write(t, goals, name, content)
			}
			entries, err := os.ReadDir(goals)
			must(t, err)
			for _, e := range entries {
				o.Goal = append(o.Goal, filepath.Join(goals, e.Name()))
			}
			before := tree(t, dir)
			_, err = Bake(open(t, dir), o)
			if step.Code(err) != tt.code {
				t.Errorf("exit code %d, want %d", step.Code(err), tt.code)
			}
			got := strings.NewReplacer(dir, "IMAGE", goals, "GOAL").Replace(fmt.Sprint(err))
			if !strings.Contains(got, tt.err) {
				t.Errorf("error %q, want %q", got, tt.err)
			}
			if strings.Contains(got, "0123456789abcdef") {
				t.Errorf("the error tells the secret: %s", got)
			}
			if diff := cmp.Diff(before, tree(t, dir)); diff != "" {
				t.Errorf("something was written:\n%s", diff)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "etc/berth/goal.toml", strings.Replace(two, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, `bootstrap_token = "abcdef.0123456789abcdef"`, 1))
	options := Options{Programs: fakePrograms(t)}
	result, err := Bake(open(t, dir), options)
	must(t, err)
	got := strings.Join(result.Warnings, "\n")
	for _, want := range []string{"/etc/berth/goal.toml: kubelet.bootstrap_token is a secret", "systemd-nspawn@.service is not in the image"} {
		if !strings.Contains(got, want) {
			t.Errorf("warnings %q, want %q", got, want)
		}
	}
	write(t, dir, "etc/berth/goal.toml", two)
	write(t, dir, nspawn, "[Service]\n")
	result, err = Bake(open(t, dir), options)
	must(t, err)
	if len(result.Warnings) > 0 {
		t.Errorf("warnings of an image that is in order: %q", result.Warnings)
	}
}

// TestGoalCopied merges what is copied with what the image has.
func TestGoalCopied(t *testing.T) {
	dir, goals := t.TempDir(), t.TempDir()
	write(t, dir, "etc/berth/goal.toml.d/90-boot.toml", `boot = "b"`)
	write(t, dir, "run/berth/goal.toml.d/95-boot.toml", `boot = "a"`) // not there when the host boots
	result, err := Bake(open(t, dir), Options{GeneratedOnly: true, Goal: []string{write(t, goals, "fleet", two), write(t, goals, "50-c.toml", "[slot.c]\n")}})
	must(t, err)
	want := &Result{
		Goal: []string{"/usr/lib/berth/goal.toml", "/usr/lib/berth/goal.toml.d/50-c.toml", "/etc/berth/goal.toml.d/90-boot.toml"},
		Boot: "b", Slots: []string{"a", "b", "c"},
		Wrote: result.Wrote, Removed: []string{}, Warnings: []string{},
	}
	if diff := cmp.Diff(want, result); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	// What was baked is what the host will make of the goal state that it finds.
	must(t, os.RemoveAll(filepath.Join(dir, "run")))
	goal, err := goalstate.Load(open(t, dir))
	must(t, err)
	planned, err := plan.Units(goal, nil)
	must(t, err)
	for _, f := range planned {
		if f.Mode.IsRegular() {
			b, err := os.ReadFile(filepath.Join(dir, plan.BakedDir, f.Path))
			if err != nil || !bytes.Equal(b, f.Content) {
				t.Errorf("%s differs (%v)", f.Path, err)
			}
		}
	}
}

// TestExample bakes the goal state of the documentation's image.
func TestExample(t *testing.T) {
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS("../../docs/examples/mkosi/mkosi.extra")))
	result, err := Bake(open(t, dir), Options{GeneratedOnly: true})
	must(t, err)
	if result.Boot != "a" || len(result.Warnings) > 0 {
		t.Errorf("baked %+v; want boot slot a, and no warning", result)
	}
}

// TestUnprivileged bakes as a user that is not root, into a folder of that user's.
func TestUnprivileged(t *testing.T) {
	const nobody = 65534
	dir, err := os.MkdirTemp("", "berth-bake")
	must(t, err)
	defer os.RemoveAll(dir)
	goal := write(t, dir, "goal.toml", one)
	image := filepath.Join(dir, "image")
	must(t, os.Mkdir(image, 0o755))
	must(t, os.Chmod(dir, 0o755))
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), bakeEnv+"="+image, loopEnv+"0="+goal)
	if os.Geteuid() == 0 {
		must(t, os.Chown(image, nobody, nobody))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	as := t.TempDir()
	_, err = Bake(open(t, as), Options{Goal: []string{goal}, GeneratedOnly: true, Epoch: epoch})
	must(t, err)
	want, got := tree(t, as), tree(t, image)
	delete(want, ".")
	delete(got, ".") // made by the test
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-as root +as nobody:\n%s", diff)
	}
}

func TestPrograms(t *testing.T) {
	want := append(units.Programs(), "usr/bin/berth", "usr/lib/systemd/system-generators/berth-generator")
	for _, layout := range []string{"built", "installed"} {
		dir := t.TempDir()
		for _, name := range want {
			if layout == "built" {
				name = "usr/bin/" + path.Base(name)
			}
			write(t, dir, name, "program")
		}
		exe := filepath.Join(dir, "usr/bin/berth")
		from, err := Programs(exe)
		must(t, err)
		for _, name := range want {
			if b, err := os.ReadFile(from[name]); err != nil || string(b) != "program" {
				t.Errorf("%s: %s is to be copied from %q: %v", layout, name, from[name], err)
			}
		}
		must(t, os.Remove(from["usr/lib/berth/wait-dbus"]))
		if _, err := Programs(exe); err == nil || !strings.Contains(err.Error(), from["usr/lib/berth/wait-dbus"]) {
			t.Errorf("%s: error %v for a program that is missing", layout, err)
		}
	}
}

// fakePrograms returns programs for Options that are not worth to be built.
func fakePrograms(t *testing.T) map[string]string {
	t.Helper()
	programs := make(map[string]string)
	program := write(t, t.TempDir(), "program", "#!/bin/sh\n")
	for _, name := range append(units.Programs(), "usr/bin/berth", "usr/lib/systemd/system-generators/berth-generator") {
		programs[name] = program
	}
	return programs
}

func mustBake(t *testing.T, dir, goal string) *Result {
	t.Helper()
	result, err := Bake(open(t, dir), Options{Goal: []string{write(t, t.TempDir(), "goal.toml", goal)}, GeneratedOnly: true, Epoch: epoch})
	must(t, err)
	return result
}

// listing tells everything below a folder by its path, with its mode and time.
type listing map[string]string

func (l listing) sorted() []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		lines = append(lines, l[name]+" "+name)
	}
	return lines
}

func tree(t *testing.T, dir string) listing {
	t.Helper()
	all := listing{}
	each(t, dir, func(name string, info fs.FileInfo) {
		all[name] = info.Mode().String() + " " + info.ModTime().UTC().Format(time.RFC3339Nano)
	})
	return all
}

// contents tells the files and links below a folder by their path; a link as an arrow and its target.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	each(t, dir, func(name string, info fs.FileInfo) {
		var content []byte
		var err error
		switch info.Mode().Type() {
		case fs.ModeDir:
			return
		case fs.ModeSymlink:
			var target string
			target, err = os.Readlink(filepath.Join(dir, name))
			content = []byte("-> " + target)
		default:
			content, err = os.ReadFile(filepath.Join(dir, name))
		}
		must(t, err)
		all[name] = string(content)
	})
	return all
}

// inodes changes with whatever is written below a folder, and be it a time.
func inodes(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	each(t, dir, func(name string, info fs.FileInfo) {
		st := info.Sys().(*syscall.Stat_t)
		all[name] = fmt.Sprint(st.Ino, st.Ctim)
	})
	return all
}

func each(t *testing.T, dir string, f func(name string, info fs.FileInfo)) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			f(name, info)
		}
		return err
	}))
}

func write(t *testing.T, dir, name, content string) string {
	t.Helper()
	p := filepath.Join(dir, name)
	must(t, os.MkdirAll(filepath.Dir(p), 0o755))
	must(t, os.WriteFile(p, []byte(content), 0o644))
	must(t, os.Chmod(p, 0o644))
	return p
}

func open(t *testing.T, dir string) *file.Root {
	t.Helper()
	root, err := file.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return root
}

func exists(p string) bool {
	_, err := os.Lstat(p)
	return !errors.Is(err, fs.ErrNotExist)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
