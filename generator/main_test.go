package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate/store"
)

// programEnv makes the test binary be berth-generator.
const programEnv = "BERTH_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(programEnv) != "" {
		main()
		os.Exit(0)
	}
	if tmpfs := "/dev/shm"; unix.Access(tmpfs, unix.W_OK) == nil {
		os.Setenv("TMPDIR", tmpfs) // as /run is, where generators write
	}
	os.Exit(m.Run())
}

// host is the folder that stands for "/", and the three folders that systemd hands to generators.
type host struct{ root, normal, early, late string }

// newHost makes a host with these files.
func newHost(t *testing.T, files map[string]string) host {
	t.Helper()
	dir := t.TempDir()
	h := host{filepath.Join(dir, "root"), filepath.Join(dir, "normal"), filepath.Join(dir, "early"), filepath.Join(dir, "late")}
	for _, d := range []string{h.root, h.normal, h.early, h.late} {
		must(t, os.Mkdir(d, 0o755))
	}
	for name, content := range files {
		p := filepath.Join(h.root, name)
		must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		must(t, os.WriteFile(p, []byte(content), 0o644))
	}
	return h
}

// program is berth-generator as systemd would run it, with more environment.
func (h host) program(env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], h.normal, h.early, h.late)
	cmd.Env = append([]string{programEnv + "=1", "BERTH_ROOT=" + h.root}, env...)
	return cmd
}

// run returns the exit code and all that was written to the standard streams.
func run(t *testing.T, cmd *exec.Cmd) (code int, output string) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

const kmsg = "dev/kmsg"

// valid is a goal state with n slots.
func valid(n int) string {
	s := "boot = \"s0\"\n[cluster]\nserver = \"https://10.0.0.1:6443\"\ncertificate_authority = \"/etc/berth/ca.crt\"\n" +
		"[kubelet]\nbootstrap_token_file = \"/etc/berth/token\"\n"
	for i := range n {
		s += fmt.Sprintf("[slot.s%d]\n", i)
	}
	return s
}

func TestArguments(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		why  string
	}{
		{nil, 2, "systemd gives three folders"},
		{[]string{"/a", "/b"}, 2, "one is missing"},
		{[]string{"/a", "/b", "/c", "/d"}, 2, "one too many"},
		{[]string{"--version"}, 2, "no such option"},
		{[]string{"--help"}, 0, "asked for"},
	} {
		cmd := exec.Command(os.Args[0], tt.args...)
		cmd.Env = []string{programEnv + "=1", "BERTH_ROOT=" + t.TempDir()}
		if code, out := run(t, cmd); code != tt.code || out != usage {
			t.Errorf("%s: %q: exit code %d, want %d:\n%s", tt.why, tt.args, code, tt.code, out)
		}
	}
}

// Where berth has nothing to do it leaves no trace.
func TestNothing(t *testing.T) {
	goal := map[string]string{"etc/berth/goal.toml": valid(2), "run/berth/claims/a": "", kmsg: ""}
	for _, tt := range []struct {
		why, env string
		files    map[string]string
	}{
		{"no goal state", "SYSTEMD_SCOPE=system", map[string]string{kmsg: ""}},
		{"a user's systemd", "SYSTEMD_SCOPE=user", goal},
		{"the initrd", "SYSTEMD_IN_INITRD=1", goal},
	} {
		h := newHost(t, tt.files)
		code, out := run(t, h.program(tt.env))
		if code != 0 || out != "" {
			t.Errorf("%s: exit code %d, output %q", tt.why, code, out)
		}
		if diff := cmp.Diff(map[string]string{}, readTree(t, h.normal)); diff != "" {
			t.Errorf("%s: wrote units:\n%s", tt.why, diff)
		}
		if diff := cmp.Diff(tt.files, readTree(t, h.root)); diff != "" {
			t.Errorf("%s: the host changed:\n%s", tt.why, diff)
		}
	}
	h := newHost(t, goal)
	if code, _ := run(t, h.program("SYSTEMD_SCOPE=system", "SYSTEMD_IN_INITRD=0")); code != 0 || len(readTree(t, h.normal)) == 0 {
		t.Errorf("the system's systemd on the host: exit code %d, or no units", code)
	}
}

// A broken goal state is told where it is seen; what can be written is written.
func TestBroken(t *testing.T) {
	const message = "berth-generator: /etc/berth/goal.toml:1:8: boot: is an integer: want a string\n"
	h := newHost(t, map[string]string{"etc/berth/goal.toml": strings.Replace(valid(1), `"s0"`, "1", 1), "run/berth/claims/s0": "", kmsg: ""})
	cmd := h.program()
	code, out := run(t, cmd)
	if code != 3 {
		t.Errorf("exit code %d", code)
	}
	if diff := cmp.Diff(message, out); diff != "" {
		t.Errorf("standard error (-want +got):\n%s", diff)
	}
	record := fmt.Sprintf("<3>berth-generator[%d]%s", cmd.Process.Pid, strings.TrimPrefix(message, "berth-generator"))
	if diff := cmp.Diff(record, readTree(t, h.root)[kmsg]); diff != "" {
		t.Errorf("kernel log (-want +got):\n%s", diff)
	}
	if units := readTree(t, h.normal); units["systemd-nspawn@node-s0.service.d/50-berth.conf"] == "" {
		t.Errorf("the machine that may run has no drop-in: %v", units)
	}
}

// Where the goal state is broken, the slots that have been ready keep all their units, and the host its boot link, byte for byte.
func TestLastGood(t *testing.T) {
	h := newHost(t, map[string]string{"etc/berth/goal.toml": valid(3), kmsg: ""})
	root, err := file.OpenRoot(h.root)
	must(t, err)
	defer root.Close()
	if code, out := run(t, h.program()); code != 0 {
		t.Fatal(code, out)
	}
	want := readTree(t, h.normal)
	state, err := store.Load(root)
	must(t, err)
	for _, slot := range []string{"s0", "s1", "s2"} {
		must(t, errors.Join(state.Use(root, slot), store.Keep(root, slot, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))))
	}
	again := func() (string, map[string]string) {
		t.Helper()
		must(t, os.RemoveAll(h.normal))
		must(t, os.Mkdir(h.normal, 0o755))
		code, out := run(t, h.program())
		if code != 3 {
			t.Errorf("exit code %d: %s", code, out)
		}
		return out, readTree(t, h.normal)
	}

	must(t, os.WriteFile(filepath.Join(h.root, "etc/berth/goal.toml"), []byte("boot = \"s2\"\n[slot.s4]\n"+strings.Repeat("x", 100)), 0o644))
	out, got := again()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-before it was broken +now:\n%s", diff)
	}
	const notice = "berth-generator: the goal state is broken, and these slots go on with their last good one: " +
		"s0 (recorded 2026-03-01T12:00:00Z), s1 (recorded 2026-03-01T12:00:00Z), s2 (recorded 2026-03-01T12:00:00Z)\n"
	if !strings.HasPrefix(out, notice+"berth-generator: /etc/berth/goal.toml:") {
		t.Errorf("said:\n%s", out)
	}

	// One that cannot be used is told, and its slot is left to the static unit, also where it starts at boot.
	must(t, os.WriteFile(filepath.Join(h.root, store.Dir, "s0"), []byte("x"), 0o600))
	out, got = again()
	if !strings.Contains(out, "the last good goal state of slot s0 is not used: /var/lib/berth/s0: ") {
		t.Errorf("said:\n%s", out)
	}
	if got["node@s0.service"] != "" || got["node@s1.service"] != want["node@s1.service"] ||
		got["multi-user.target.wants/node@s0.service"] != "-> /usr/lib/systemd/system/node@.service" {
		t.Errorf("made:\n%v", got)
	}

	// Where there is none, it may be on a file system that is not mounted yet: the boot link waits for the second look.
	must(t, os.RemoveAll(filepath.Join(h.root, store.Dir)))
	_, got = again()
	if diff := cmp.Diff(map[string]string{"multi-user.target.wants/berth-last-good.service": "-> /usr/lib/systemd/system/berth-last-good.service"}, got); diff != "" {
		t.Errorf("first look:\n%s", diff)
	}
	must(t, os.MkdirAll(filepath.Join(h.root, "run/berth/looked"), 0o755))
	_, got = again()
	if diff := cmp.Diff(map[string]string{"multi-user.target.wants/node@s2.service": "-> /usr/lib/systemd/system/node@.service"}, got); diff != "" {
		t.Errorf("second look:\n%s", diff)
	}
}

func TestRootMissing(t *testing.T) {
	h := newHost(t, nil)
	must(t, os.Remove(h.root))
	if code, out := run(t, h.program()); code != 1 || !strings.Contains(out, "no such file or directory") {
		t.Errorf("exit code %d: %s", code, out)
	}
}

func TestOutputMissing(t *testing.T) {
	h := newHost(t, map[string]string{"etc/berth/goal.toml": valid(1)})
	must(t, os.Remove(h.normal))
	if code, out := run(t, h.program()); code != 1 || !strings.Contains(out, h.normal) {
		t.Errorf("exit code %d: %s", code, out)
	}
}

// Whatever stands in place of the goal state, PID 1 does not have to wait, and the error says what is wrong.
func TestHostileGoal(t *testing.T) {
	for _, tt := range []struct {
		why  string
		make func(path string) error
		want string
	}{
		{"FIFO", func(p string) error { return unix.Mkfifo(p, 0o644) }, ": is a FIFO: want a regular file"},
		{"folder", func(p string) error { return os.Mkdir(p, 0o755) }, ": is a folder: want a regular file"},
		{"10 MB", content(strings.Repeat("# 8 bytes", 10<<20/8)), ": is larger than 1 MiB: want a goal state"},
		{"very many mistakes", content(mistakes(10_000)),
			`:7:1: slot.s0.kubelet.config.maxPads0: is not a field of KubeletConfiguration: did you mean maxPods?`},
		{"not UTF-8", content(valid(1) + "# \xff"), `:8:3: is not UTF-8: byte 0xff: want TOML in UTF-8`},
		{"NUL", content(valid(1) + "# \x00"), `:8:3: is not text: holds a NUL byte: want TOML in UTF-8`},
		{"brackets", content("x=" + strings.Repeat("[", 1<<20-2)), ":1:1003: nests deeper than 24 tables and arrays: want a goal state"},
		{"terminal", func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(5, 0))) },
			": is a device: want a regular file"},
		{"name with a line break", func(p string) error {
			must(t, os.Mkdir(p+".d", 0o755))
			return content(valid(1))(p + ".d/a\n[Service]\nExecStart=x.toml")
		}, `.d/a\n[Service]\nExecStart=x.toml: has a name with a control character or not in UTF-8: want another name`},
	} {
		t.Run(tt.why, func(t *testing.T) {
			h := newHost(t, map[string]string{"etc/berth/other": "", kmsg: "", "run/berth/looked/x": ""})
			if err := tt.make(filepath.Join(h.root, "etc/berth/goal.toml")); errors.Is(err, unix.EPERM) {
				t.Skip("needs root: ", err)
			} else if err != nil {
				t.Fatal(err)
			}
			start, cmd := time.Now(), h.program()
			code, out := run(t, cmd)
			// The first bound holds on a machine that is busy, too; the second one is about waiting for something.
			if cpu := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(); cpu > time.Second {
				t.Errorf("took %v of processor time", cpu)
			}
			if took := time.Since(start); took > bound/2 {
				t.Errorf("took %v", took)
			}
			first, _, _ := strings.Cut(out, "\n")
			if code != 3 || !strings.HasPrefix(first, "berth-generator: /etc/berth/goal.toml"+tt.want) {
				t.Errorf("exit code %d: %s, want …%s", code, first, tt.want)
			}
			if diff := cmp.Diff(map[string]string{}, readTree(t, h.normal)); diff != "" {
				t.Errorf("wrote units:\n%s", diff)
			}
		})
	}
}

// mistakes is a goal state with n errors, the first one on line 7.
func mistakes(n int) string {
	var b strings.Builder
	b.WriteString(strings.NewReplacer("boot = \"s0\"\n", "", "[slot.s0]", "[slot.s0.kubelet.config]").Replace(valid(1)))
	for i := range n {
		fmt.Fprintf(&b, "maxPads%d=1\n", i)
	}
	return b.String()
}

// The kernel drops what comes too fast, so a long list of errors is cut short there, and nowhere else.
func TestRate(t *testing.T) {
	for n, want := range map[int]int{8: 8, 9: 9, 10: 9, 1000: 9} {
		h := newHost(t, map[string]string{"etc/berth/goal.toml": mistakes(n), kmsg: ""})
		_, out := run(t, h.program())
		if got := strings.Count(out, "\n"); got != n {
			t.Errorf("%d errors: %d lines to standard error", n, got)
		}
		records := strings.Split(strings.TrimSpace(readTree(t, h.root)[kmsg]), "\n")
		if len(records) != want {
			t.Errorf("%d errors: %d records, want %d", n, len(records), want)
		}
		last := records[len(records)-1]
		if more := fmt.Sprintf(": and %d more errors", n-8); strings.HasSuffix(last, more) != (n > 9) {
			t.Errorf("%d errors: the last record is %s", n, last)
		}
		for _, r := range records {
			if !strings.HasPrefix(r, "<3>berth-generator[") || len(r) > 1024 {
				t.Errorf("record: %s", r)
			}
		}
	}
}

func content(s string) func(path string) error {
	return func(path string) error { return os.WriteFile(path, []byte(s), 0o644) }
}

// A generator writes below its first argument, and to the kernel's log; nowhere else.
func TestWritesOnlyThere(t *testing.T) {
	for why, goal := range map[string]string{"valid": valid(3), "broken": valid(3) + "x = 1\n"} {
		h := newHost(t, map[string]string{"etc/berth/goal.toml": goal, "run/berth/claims/b": "", "var/lib/berth/x": "", kmsg: ""})
		before := stamps(t, h.root, h.early, h.late)
		run(t, h.program())
		after := stamps(t, h.root, h.early, h.late)
		if why == "broken" {
			delete(before, filepath.Join(h.root, kmsg))
			delete(after, filepath.Join(h.root, kmsg))
		}
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("%s:\n%s", why, diff)
		}
		if len(readTree(t, h.normal)) == 0 {
			t.Errorf("%s: no units", why)
		}
	}
}

// stamps returns when each file and folder below dirs was last changed, in content or otherwise.
func stamps(t *testing.T, dirs ...string) map[string]syscall.Timespec {
	t.Helper()
	all := map[string]syscall.Timespec{}
	for _, dir := range dirs {
		must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err == nil {
				all[p] = info.Sys().(*syscall.Stat_t).Ctim
			}
			return err
		}))
	}
	return all
}

// expect returns what a host's units must be.
func expect(t *testing.T, h host) map[string]string {
	t.Helper()
	root, err := file.OpenRoot(h.root)
	must(t, err)
	defer root.Close()
	files, err := units(root)
	must(t, err)
	want := map[string]string{}
	for _, f := range files {
		want[f.Path] = string(f.Content)
		if f.Mode&fs.ModeSymlink != 0 {
			want[f.Path] = "-> " + want[f.Path]
		}
	}
	return want
}

// temporary says whether a file was left by a kill. Its name begins with a dot, and systemd does not take it for a unit.
func temporary(name string) bool { return strings.HasPrefix(filepath.Base(name), ".") }

// Two systemctl daemon-reload never run at once, but an image builder or a person may run a generator meanwhile.
func TestTwoAtOnce(t *testing.T) {
	h := newHost(t, map[string]string{"etc/berth/goal.toml": valid(8)})
	want := expect(t, h)
	for range 10 {
		one, two := h.program(), h.program()
		var out bytes.Buffer
		one.Stderr = &out
		must(t, one.Start())
		code, twoOut := run(t, two)
		if err := one.Wait(); err != nil || code != 0 || twoOut != "" {
			t.Errorf("%v %s; exit code %d %s", err, &out, code, twoOut)
		}
		if diff := cmp.Diff(want, readTree(t, h.normal)); diff != "" {
			t.Fatalf("-want +got:\n%s", diff)
		}
		must(t, os.RemoveAll(h.normal))
		must(t, os.Mkdir(h.normal, 0o755))
	}
}

// A generator that is killed leaves whole files only, and the next one completes them.
func TestKill(t *testing.T) {
	h := newHost(t, map[string]string{"etc/berth/goal.toml": valid(60)})
	want := expect(t, h)
	halfWay := 0
	for range 50 {
		cmd := h.program()
		must(t, cmd.Start())
		exited := make(chan error, 1)
		go func() { exited <- cmd.Wait() }()
		// From so many entries on, however far it gets then.
		for n, done := 1+rand.IntN(50), false; !done; {
			select {
			case <-exited:
				done = true
				exited <- nil
			default:
				entries, err := os.ReadDir(h.normal)
				must(t, err)
				done = len(entries) >= n
			}
		}
		_ = cmd.Process.Kill() // it may be through already
		<-exited

		written := 0
		for name, got := range readTree(t, h.normal) {
			if temporary(name) {
				continue
			}
			written++
			if got != want[name] {
				t.Fatalf("%s is torn:\n%s", name, cmp.Diff(want[name], got))
			}
		}
		if written > 0 && written < len(want) {
			halfWay++
		}
		if code, out := run(t, h.program()); code != 0 {
			t.Fatalf("the next one: exit code %d: %s", code, out)
		}
		got := readTree(t, h.normal)
		maps.DeleteFunc(got, func(name, _ string) bool { return temporary(name) })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("the next one did not complete them, -want +got:\n%s", diff)
		}
		must(t, os.RemoveAll(h.normal))
		must(t, os.Mkdir(h.normal, 0o755))
	}
	t.Logf("%d of 50 were killed half-way", halfWay)
	if halfWay < 10 {
		t.Error("too few to prove anything")
	}
}

// PID 1 waits for generators one after the other, so nothing that is costly to start may come in.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	must(t, err)
	for dep := range strings.FieldsSeq(string(out)) {
		for _, bad := range []string{"k8s.io", "sigs.k8s.io", "net/http", "crypto/tls", "text/template"} {
			if dep == bad || strings.HasPrefix(dep, bad+"/") {
				t.Errorf("imports %s", dep)
			}
		}
	}
}
