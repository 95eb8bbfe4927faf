package wire

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/testdata/gpu"
)

const lib = "usr/lib/x86_64-linux-gnu"

// TestMain has the tests use a tmpfs, where there is one: how long a disk takes to make a link is not what the benchmark is about.
func TestMain(m *testing.M) {
	if unix.Access("/dev/shm", unix.W_OK) == nil {
		os.Setenv("TMPDIR", "/dev/shm")
	}
	os.Exit(m.Run())
}

// fixture is a host with a driver, a machine that was started with it, and a folder that is neither's.
type fixture struct {
	t      testing.TB
	top    string
	host   *file.Root
	m      *Machine
	driver *nvidia.Driver

	ran    []string // programs
	warned []string
	spec   string // what nvidia-ctk makes
	output string // what it says
	err    error  // how it ends
}

// newFixture makes a driver of a number of libraries, whose files have a name of their own and a soname each.
func newFixture(t testing.TB, libraries int) *fixture {
	t.Helper()
	f := &fixture{t: t, top: t.TempDir(), spec: spec}
	for _, name := range []string{
		"machine/usr/sbin/ldconfig", "machine/usr/bin/nvidia-ctk", "machine/usr/bin/nvidia-cdi-hook", "machine/" + lib + "/libc.so.6",
		"machine/etc/passwd", "machine/run/x", "outside/secret", "outside/nvidia.yaml", "host/x",
	} {
		f.write(name, name)
	}
	f.host, f.m = f.open("host"), &Machine{Name: "node-a", Unit: "node@a.service", Root: f.open("machine"), Run: f.run, Log: f}
	f.upgrade("550.54", libraries)
	if err := gpu.Make(f.path("machine"), gpu.Headless(1)...); err != nil {
		t.Skip(err) // needs CAP_MKNOD
	}
	return f
}

const spec = `cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
containerEdits:
  deviceNodes: [{path: /dev/nvidiactl}, {path: /dev/nvidia-uvm}]
  hooks: [{hookName: createContainer, path: /usr/bin/nvidia-cdi-hook}]
`

// upgrade gives the host a driver of another version, and starts the machine with it.
func (f *fixture) upgrade(version string, libraries int) {
	f.t.Helper()
	must(f.t, os.RemoveAll(f.path("host/"+lib)))
	must(f.t, os.RemoveAll(f.path("machine"+nvidia.Dir)))
	f.driver = &nvidia.Driver{Version: version, Folders: []string{"/" + lib}, Tools: []nvidia.Tool{{Name: "nvidia-smi", Path: "/usr/bin/nvidia-smi"}}}
	f.write("host/usr/bin/nvidia-smi", version)
	for i := range libraries {
		name := fmt.Sprintf("libnvidia-%03d.so", i)
		f.write("host/"+lib+"/"+name+"."+version, version)
		for _, n := range []string{name + ".1", name + "." + version} {
			f.driver.Libraries = append(f.driver.Libraries, nvidia.Library{Name: n, Path: "/" + lib + "/" + name + "." + version})
		}
	}
	for _, b := range f.driver.Binds() { // a hard link is the same file, as a bind mount is
		info, err := os.Stat(f.path("host" + b.Source))
		must(f.t, err)
		if !info.IsDir() {
			must(f.t, os.MkdirAll(filepath.Dir(f.path("machine"+b.Target)), 0o755))
			must(f.t, os.Link(f.path("host"+b.Source), f.path("machine"+b.Target)))
			continue
		}
		must(f.t, os.MkdirAll(f.path("machine"+b.Target), 0o755))
		entries, err := os.ReadDir(f.path("host" + b.Source))
		must(f.t, err)
		for _, e := range entries {
			must(f.t, os.Link(f.path("host"+b.Source, e.Name()), f.path("machine"+b.Target, e.Name())))
		}
	}
}

// run stands for the machine's systemd, its ldconfig and its nvidia-ctk.
func (f *fixture) run(_ context.Context, p machine.Program) (string, error) {
	f.ran = append(f.ran, p.Unit)
	if p.Unit == "berth-nvidia-ldconfig.service" {
		return "", nil
	}
	if f.spec != "" {
		if _, err := f.m.Root.Write(file.File{Path: p.Args[slices.Index(p.Args, "--output")+1], Mode: 0o644, Content: []byte(f.spec)}); err != nil {
			return "", err
		}
	}
	return f.output, f.err
}

func (f *fixture) Status(string, ...any) {}
func (f *fixture) Warn(format string, a ...any) {
	f.warned = append(f.warned, fmt.Sprintf(format, a...))
}
func (f *fixture) path(elem ...string) string {
	return filepath.Join(append([]string{f.top}, elem...)...)
}
func (f *fixture) wire() (string, error) { return f.m.Wire(f.t.Context(), f.host, f.driver, "amd64") }
func (f *fixture) link(target, name string) {
	f.t.Helper()
	must(f.t, os.Symlink(target, f.path(name)))
}
func (f *fixture) exists(name string) bool { _, err := os.Lstat(f.path(name)); return err == nil }
func (f *fixture) remove(name string)      { f.t.Helper(); must(f.t, os.RemoveAll(f.path(name))) }
func (f *fixture) write(name, content string) {
	f.t.Helper()
	must(f.t, os.MkdirAll(filepath.Dir(f.path(name)), 0o755))
	must(f.t, os.WriteFile(f.path(name), []byte(content), 0o755))
}

func (f *fixture) open(name string) *file.Root {
	f.t.Helper()
	root, err := file.OpenRoot(f.path(name))
	must(f.t, err)
	f.t.Cleanup(func() { root.Close() })
	return root
}

// links are all symbolic links in the machine, but those in /dev.
func (f *fixture) links() map[string]string {
	f.t.Helper()
	found := map[string]string{}
	must(f.t, filepath.WalkDir(f.path("machine"), func(p string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(p, f.path("machine")+"/")
		if err == nil && d.Type() == fs.ModeSymlink && !strings.HasPrefix(name, "dev/") {
			found[name], err = os.Readlink(p)
		}
		return err
	}))
	return found
}

// wantNoSpec: neither published nor staged.
func (f *fixture) wantNoSpec() {
	f.t.Helper()
	for _, name := range []string{"machine/run/cdi/nvidia.yaml", "machine/run/cdi/nvidia.coherent.yaml", "machine" + staging} {
		if f.exists(name) {
			f.t.Errorf("%s is left", name)
		}
	}
}

func wantLinks(version string, libraries int) map[string]string {
	want := map[string]string{"usr/bin/nvidia-smi": "/run/host-nvidia/bin/nvidia-smi"}
	for i := range libraries {
		target := fmt.Sprintf("/run/host-nvidia/0/libnvidia-%03d.so.%s", i, version)
		want[fmt.Sprintf("%s/libnvidia-%03d.so.1", lib, i)] = target
		want[lib+"/"+filepath.Base(target)] = target
	}
	return want
}

func TestWire(t *testing.T) {
	f := newFixture(t, 3)
	f.output = "time=\"2025-01-01T00:00:00Z\" level=info msg=\"Using /usr/lib\"\n" +
		"time=\"2025-01-01T00:00:00Z\" level=warning msg=\"Could not locate \\\"libx\\\"\"\n"
	f.write("machine/run/cdi/nvidia.coherent.yaml", "of an earlier run")
	f.write("machine/run/cdi/example.yaml", "of somebody else")
	f.write("machine"+staging+"/nvidia.yaml", "of a run that was killed")
	must(t, gpu.Make(f.path("machine"), append(gpu.Caps(1), append(gpu.IMEX(1), gpu.DRI(1)...)...)...))

	done, err := f.wire()
	must(t, err)
	if want := "NVIDIA driver 550.54 in machine node-a: 6 names of libraries, 1 programs, CDI devices of nvidia.com/gpu: 0"; done != want {
		t.Errorf("%q; want %q", done, want)
	}
	if diff := cmp.Diff(wantLinks("550.54", 3), f.links()); diff != "" {
		t.Errorf("links, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff([]string{`nvidia-ctk: Could not locate "libx"`}, f.warned); diff != "" {
		t.Errorf("warnings, -want +got:\n%s", diff)
	}
	if b, _ := os.ReadFile(f.path("machine/run/cdi/nvidia.yaml")); string(b) != spec {
		t.Errorf("published %q", b)
	}
	if f.exists("machine/run/cdi/nvidia.coherent.yaml") || f.exists("machine"+staging) || !f.exists("machine/run/cdi/example.yaml") {
		t.Error("want what earlier runs made to be gone, and nothing else")
	}
	got := map[string]string{}
	entries, err := os.ReadDir(f.path("machine/dev/char"))
	must(t, err)
	for _, e := range entries {
		got[e.Name()], _ = os.Readlink(f.path("machine/dev/char", e.Name()))
	}
	if diff := cmp.Diff(map[string]string{
		"195:0": "../nvidia0", "195:255": "../nvidiactl", "395:0": "../nvidia-uvm", "395:1": "../nvidia-uvm-tools",
		"394:1": "../nvidia-caps/nvidia-cap1", "393:0": "../nvidia-caps-imex-channels/channel0",
		"226:0": "../dri/card0", "226:128": "../dri/renderD128",
	}, got); diff != "" {
		t.Errorf("/dev/char, -want +got:\n%s", diff)
	}

	// Upgrades leave nothing old.
	f.upgrade("560.35", 2)
	_, err = f.wire()
	must(t, err)
	if diff := cmp.Diff(wantLinks("560.35", 2), f.links()); diff != "" {
		t.Errorf("links after the upgrade, -want +got:\n%s", diff)
	}

	// Nor does the end of it.
	f.ran = nil
	wired, err := f.m.Wired()
	must(t, err)
	must(t, f.m.Unwire(t.Context()))
	if diff := cmp.Diff(map[string]string{}, f.links()); diff != "" || !wired || len(f.ran) != 1 || f.ran[0] != "berth-nvidia-ldconfig.service" {
		t.Errorf("wired %v; ran %v; links left: %s", wired, f.ran, diff)
	}
	f.wantNoSpec()
	if wired, err = f.m.Wired(); wired || err != nil {
		t.Errorf("wired %v, %v", wired, err)
	}
}

// TestUnwireAgain: a run that ends before ldconfig has finished is made up for by the next one.
func TestUnwireAgain(t *testing.T) {
	f := newFixture(t, 2)
	_, err := f.wire()
	must(t, err)
	f.m.Run = func(context.Context, machine.Program) (string, error) { return "", errors.New("killed") }
	if err := f.m.Unwire(t.Context()); err == nil {
		t.Fatal("no error")
	}
	if wired, err := f.m.Wired(); !wired || err != nil {
		t.Errorf("wired %v, %v; want the next run to find the links", wired, err)
	}
	for name, target := range f.links() {
		if f.exists("machine" + target) {
			t.Errorf("%s leads to %s, which the linker's cache would keep", name, target)
		}
	}
}

func TestFolders(t *testing.T) {
	for _, tt := range []struct{ reason, arch, want, err string }{
		{"Debian", "amd64", "usr/lib/x86_64-linux-gnu", ""},
		{"Debian", "arm64", "usr/lib/aarch64-linux-gnu", ""},
		{"Fedora", "amd64", "usr/lib64", ""},
		{"Arch", "amd64", "usr/lib", ""},
		{"nothing", "amd64", "", "no folder of libraries in "},
	} {
		t.Run(tt.reason+" "+tt.arch, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.MkdirAll(filepath.Join(dir, tt.want), 0o755))
			root, err := file.OpenRoot(dir)
			must(t, err)
			defer root.Close()
			got, err := libraryFolder(root, tt.arch)
			if got != tt.want || tt.err == "" && err != nil || tt.err != "" && !strings.Contains(fmt.Sprint(err), tt.err) {
				t.Errorf("%q, %v; want %q", got, err, tt.want)
			}
		})
	}
}

// TestStale is about links that are there before.
func TestStale(t *testing.T) {
	for _, tt := range []struct {
		reason       string
		name, target string // the link, in the machine
		left         bool
	}{
		{"of another driver", lib + "/libcuda.so.535.1", "/run/host-nvidia/0/libcuda.so.535.1", false},
		{"in another folder", "usr/lib/libcuda.so.535.1", "/run/host-nvidia/1/libcuda.so.535.1", false},
		{"program", "usr/bin/nvidia-imex", "/run/host-nvidia/bin/nvidia-imex", false},
		{"not ours: another target", lib + "/libfoo.so", "/run/host-nvidias/libfoo.so", true},
		{"not ours: leads nowhere", lib + "/libfoo.so", "libfoo.so.1", true},
		{"not ours: another folder", "usr/local/lib/libcuda.so.1", "/run/host-nvidia/0/libcuda.so.1", true},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			f := newFixture(t, 1)
			must(t, os.MkdirAll(filepath.Dir(f.path("machine", tt.name)), 0o755))
			f.link(tt.target, "machine/"+tt.name)
			_, err := f.wire()
			must(t, err)
			if f.exists("machine/"+tt.name) != tt.left {
				t.Errorf("left: %v; want %v", !tt.left, tt.left)
			}
		})
	}
	t.Run("the library folder by two paths", func(t *testing.T) {
		f := newFixture(t, 1)
		f.link("lib/x86_64-linux-gnu", "machine/usr/lib64")
		for range 2 {
			_, err := f.wire()
			must(t, err)
			want := wantLinks("550.54", 1)
			want["usr/lib64"] = "lib/x86_64-linux-gnu"
			if diff := cmp.Diff(want, f.links()); diff != "" {
				t.Errorf("links, -want +got:\n%s", diff)
			}
		}
	})
}

// TestInTheWay is about what is in the place of a link.
func TestInTheWay(t *testing.T) {
	const name = "machine/" + lib + "/libnvidia-000.so.1"
	for _, tt := range []struct {
		reason string
		make   func(f *fixture)
		err    string // a line of the error
	}{
		{"a link of ours", func(f *fixture) { f.link("/run/host-nvidia/7/libnvidia-000.so.535.1", name) }, ""},
		{"a link that leads nowhere", func(f *fixture) { f.link("libnvidia-000.so.535.1", name) }, ""},
		{"a link to itself", func(f *fixture) { f.link("libnvidia-000.so.1", name) }, ""},
		{"a link out of the root leads nowhere", func(f *fixture) { f.link(f.path("outside/secret"), name) }, ""},
		{"what ldconfig makes of our links", func(f *fixture) {
			f.link("/run/host-nvidia/0/libnvidia-000.so.550.54", "machine/"+lib+"/libnvidia-000.so.550.54")
			f.link("libnvidia-000.so.550.54", name)
		}, ""},
		{"the image's own library", func(f *fixture) { f.write(name, "535") }, "/" + lib + "/libnvidia-000.so.1 (-rwxr-xr-x, 3 bytes)"},
		{"a link to the image's own library", func(f *fixture) {
			f.write("machine/"+lib+"/libnvidia-000.so.535", "535")
			f.link("libnvidia-000.so.535", name)
		}, "/" + lib + "/libnvidia-000.so.1 -> libnvidia-000.so.535"},
		{"an absolute link to the image's own library", func(f *fixture) {
			f.write("machine/opt/libnvidia.so", "535")
			f.link("/opt/libnvidia.so", name)
		}, "/" + lib + "/libnvidia-000.so.1 -> /opt/libnvidia.so"},
		{"a folder", func(f *fixture) { f.write(name+"/x", "") }, "/" + lib + "/libnvidia-000.so.1 (drwxr-xr-x, "},
		{"a FIFO", func(f *fixture) { must(f.t, unix.Mkfifo(f.path(name), 0o600)) }, "/" + lib + "/libnvidia-000.so.1 (prw-------, 0 bytes)"},
		{"a device", func(f *fixture) { must(f.t, unix.Mknod(f.path(name), unix.S_IFCHR|0o600, 0x103)) }, "/" + lib + "/libnvidia-000.so.1 (Dcrw-------, 0 bytes)"},
		{"a socket", func(f *fixture) {
			f.t.Chdir(f.path("machine/" + lib)) // its path must be short
			l, err := net.Listen("unix", "libnvidia-000.so.1")
			must(f.t, err)
			f.t.Cleanup(func() { l.Close() })
		}, "/" + lib + "/libnvidia-000.so.1 (Srwxr-xr-x, 0 bytes)"},
		{"the image's own program", func(f *fixture) { f.write("machine/usr/bin/nvidia-smi", "535") }, "/usr/bin/nvidia-smi (-rwxr-xr-x, 3 bytes)"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			f := newFixture(t, 1)
			tt.make(f)
			before := f.links()
			_, err := f.wire()
			if tt.err == "" {
				must(t, err)
				if diff := cmp.Diff(wantLinks("550.54", 1), f.links()); diff != "" {
					t.Errorf("links, -want +got:\n%s", diff)
				}
				return
			}
			if !strings.Contains(fmt.Sprint(err), "remove the driver's packages from its root file system") || !strings.Contains(err.Error(), "\n  "+tt.err) {
				t.Errorf("error %v; want in it: %s", err, tt.err)
			}
			if diff := cmp.Diff(before, f.links()); diff != "" || f.ran != nil {
				t.Errorf("ran %v; links changed: %s", f.ran, diff)
			}
			f.wantNoSpec()
		})
	}
	t.Run("all at once", func(t *testing.T) {
		f := newFixture(t, 60)
		for i := range 50 {
			f.write(fmt.Sprintf("machine/%s/libnvidia-%03d.so.1", lib, i), "535")
		}
		f.remove("machine/usr/bin/nvidia-ctk")
		f.remove("machine/usr/sbin/ldconfig")
		_, err := f.wire()
		for _, part := range []string{
			"machine node-a has no ldconfig in any of /usr/sbin /sbin /usr/bin: install libc-bin in /var/lib/machines/node-a",
			"machine node-a has no nvidia-ctk in any of", "install the NVIDIA Container Toolkit 1.18 or newer in /var/lib/machines/node-a",
			"libnvidia-019.so.1", "and 30 more",
		} {
			if !strings.Contains(fmt.Sprint(err), part) {
				t.Errorf("error %v; want in it: %s", err, part)
			}
		}
	})
}

// TestBound: the machine must have the very files that the host has now.
func TestBound(t *testing.T) {
	for _, tt := range []struct {
		reason string
		change func(f *fixture)
		err    string
	}{
		{"upgraded in place, in another folder", func(f *fixture) {
			f.remove("host/" + lib + "/libnvidia-000.so.550.54")
			f.write("host/"+lib+"/libnvidia-000.so.550.54", "again")
		}, "/usr/lib/x86_64-linux-gnu/libnvidia-000.so.550.54 is another file there, as /run/host-nvidia/0/libnvidia-000.so.550.54"},
		{"a program was upgraded", func(f *fixture) {
			f.remove("host/usr/bin/nvidia-smi")
			f.write("host/usr/bin/nvidia-smi", "again")
		}, "/usr/bin/nvidia-smi is another file there, as /run/host-nvidia/bin/nvidia-smi"},
		{"not bound", func(f *fixture) { f.remove("machine/run/host-nvidia") },
			"/usr/lib/x86_64-linux-gnu/libnvidia-000.so.550.54 is not there as /run/host-nvidia/0/libnvidia-000.so.550.54"},
		{"a copy of the host's file", func(f *fixture) {
			f.remove("machine/run/host-nvidia/0/libnvidia-000.so.550.54")
			f.write("machine/run/host-nvidia/0/libnvidia-000.so.550.54", "550.54")
		}, "is another file there"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			f := newFixture(t, 1)
			tt.change(f)
			_, err := f.wire()
			if !strings.Contains(fmt.Sprint(err), tt.err) || !strings.Contains(err.Error(), "run: systemctl restart node@a.service") {
				t.Errorf("error %v; want in it: %s", err, tt.err)
			}
			if links := f.links(); len(links) > 0 || f.ran != nil {
				t.Errorf("ran %v, linked %v", f.ran, links)
			}
			f.wantNoSpec()
		})
	}
}

// TestToolkit is about what nvidia-ctk does.
func TestToolkit(t *testing.T) {
	for _, tt := range []struct {
		reason string
		set    func(f *fixture)
		err    string
	}{
		{"fails", func(f *fixture) {
			f.output, f.err = "level=info\ntime=\"…\" level=error msg=\"failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND\"", errors.New("exit status 1")
		}, "nvidia-ctk cdi generate in machine node-a: exit status 1: failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND\n  level=info\n  time="},
		{"fails without a word", func(f *fixture) { f.err = errors.New("killed by signal 9 (SIGKILL)") },
			"nvidia-ctk cdi generate in machine node-a: killed by signal 9 (SIGKILL)"},
		{"fails with many words", func(f *fixture) {
			f.output, f.err = strings.Repeat("line\n", 1000)+"last", errors.New("exit status 1")
		}, "nvidia-ctk cdi generate in machine node-a: exit status 1: last\n  (951 lines before)\n" + strings.Repeat("  line\n", 49) + "  last"},
		{"is too old", func(f *fixture) {
			f.output, f.err = "Incorrect Usage: flag provided but not defined: -disable-hook\n\nNAME:\n", errors.New("exit status 1")
		}, "/usr/bin/nvidia-ctk in machine node-a is too old, it has no --disable-hook and --enable-hook: " +
			"install the NVIDIA Container Toolkit 1.18 or newer in /var/lib/machines/node-a"},
		{"makes nothing", func(f *fixture) { f.spec = "" }, "nvidia.yaml: does not exist"},
		{"makes what is wrong", func(f *fixture) { f.spec = strings.Replace(spec, "/dev/nvidia0", "/dev/nvidia1", 1) },
			"the CDI specification that nvidia-ctk made in machine node-a cannot be used, no container will get a GPU:\n" +
				"  nvidia.yaml: device \"0\": device node /dev/nvidia1 does not exist in the machine"},
		{"makes too much", func(f *fixture) { f.spec = strings.Repeat("#", specLimit+1) }, "is larger than 8388608 bytes"},
		{"another specification beside ours", func(f *fixture) { f.write("machine/run/cdi/gpus.yaml", spec) },
			"/run/cdi/gpus.yaml in machine node-a is another CDI specification of nvidia.com/gpu: remove it, and what makes it"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			f := newFixture(t, 1)
			_, err := f.wire() // with a specification that must not stay
			must(t, err)
			tt.set(f)
			_, err = f.wire()
			if !strings.Contains(fmt.Sprint(err), tt.err) {
				t.Errorf("error %v; want in it: %s", err, tt.err)
			}
			f.wantNoSpec()
		})
	}
	t.Run("another specification in the other folder", func(t *testing.T) {
		f := newFixture(t, 1)
		f.write("machine/etc/cdi/nvidia.json", spec)
		f.write("machine/etc/cdi/broken.yaml", "{")
		_, err := f.wire()
		must(t, err)
		if len(f.warned) != 1 || !strings.HasPrefix(f.warned[0], "/etc/cdi/nvidia.json in machine node-a is another CDI specification of nvidia.com/gpu") {
			t.Errorf("warnings %q", f.warned)
		}
	})
}

// TestSlowCheck: a specification that takes seconds to decode, as larger ones take minutes, does not take longer than there is time.
func TestSlowCheck(t *testing.T) {
	f := newFixture(t, 1)
	var b strings.Builder
	b.WriteString(spec)
	for i := range 100_000 {
		fmt.Fprintf(&b, "key%d: 1\n", i)
	}
	f.spec = b.String()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	_, err := f.m.Wire(ctx, f.host, f.driver, "amd64")
	if took := time.Since(begin); !errors.Is(err, machine.ErrTimeout) || took > 3*time.Second {
		t.Errorf("after %v: %v", took, err)
	}
	f.wantNoSpec()
}

// outside is everything that is not the machine's, with what would change if it was written.
func (f *fixture) outside() map[string]string {
	f.t.Helper()
	all := map[string]string{}
	for _, dir := range []string{"outside", "host"} {
		must(f.t, filepath.WalkDir(f.path(dir), func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(p, &st); err != nil {
				return err
			}
			b, _ := os.ReadFile(p) // not of folders
			all[p] = fmt.Sprintf("%o %d %d %v %s", st.Mode, st.Ino, st.Nlink, st.Mtim, b)
			return nil
		}))
	}
	return all
}

// TestHostile wires machines whose root file system leads elsewhere: nothing outside of it changes, and nothing hangs.
func TestHostile(t *testing.T) {
	for _, tt := range []struct {
		reason string
		make   func(f *fixture)
		err    string // empty: it works
	}{
		{"library folder is an absolute link", func(f *fixture) { f.remove("machine/" + lib); f.link("/etc", "machine/"+lib) }, ""},
		{"library folder is a relative link", func(f *fixture) { f.remove("machine/" + lib); f.link("../../../../../etc", "machine/"+lib) }, ""},
		{"library folder is a link out", func(f *fixture) {
			f.remove("machine/" + lib)
			f.link(f.path("outside"), "machine/"+lib) // usr/lib is taken instead
		}, ""},
		{"library folder is a chain of links out", func(f *fixture) {
			f.remove("machine/usr/lib")
			f.link("lib2", "machine/usr/lib")
			f.link("../../outside", "machine/usr/lib2")
		}, "no folder of libraries"},
		{"library folder is a FIFO", func(f *fixture) {
			f.remove("machine/usr/lib")
			must(f.t, unix.Mkfifo(f.path("machine/usr/lib"), 0o600))
		}, "no folder of libraries"},
		{"program folder is a link out", func(f *fixture) {
			f.remove("machine/usr/bin")
			f.link("../../outside", "machine/usr/bin")
			f.write("machine/usr/local/bin/nvidia-ctk", "")
		}, "usr/bin"},
		{"the host's files are a link out", func(f *fixture) {
			f.remove("machine/run/host-nvidia")
			f.link("../../outside", "machine/run/host-nvidia")
		}, "is not there as /run/host-nvidia/0/libnvidia-000.so.550.54"},
		{"a link of the host's files out, to the same", func(f *fixture) {
			f.remove("machine/run/host-nvidia/0")
			f.link(f.path("host", lib), "machine/run/host-nvidia/0")
		}, "is not there as"},
		{"CDI folder is a link out", func(f *fixture) { f.link("../../outside", "machine/run/cdi") }, "run/cdi"},
		{"CDI folder is an absolute link out", func(f *fixture) { f.link(f.path("outside"), "machine/run/cdi") }, "run/cdi"},
		{"CDI folder is a link in", func(f *fixture) { f.link("/etc", "machine/run/cdi") }, ""},
		{"CDI folder is a file", func(f *fixture) { f.write("machine/run/cdi", "") }, "run/cdi"},
		{"the published specification is a link out", func(f *fixture) {
			must(f.t, os.Mkdir(f.path("machine/run/cdi"), 0o755))
			f.link(f.path("outside/nvidia.yaml"), "machine/run/cdi/nvidia.yaml")
		}, ""},
		{"the published specification is a folder", func(f *fixture) { f.write("machine/run/cdi/nvidia.yaml/x", "") }, "is a folder that is not empty"},
		{"staging folder is a link out", func(f *fixture) { f.link("../../../outside", "machine"+staging) }, ""},
		{"staging folder is a link in", func(f *fixture) { f.link("/etc", "machine"+staging) }, ""},
		{"staging folder is a FIFO", func(f *fixture) { must(f.t, unix.Mkfifo(f.path("machine"+staging), 0o600)) }, ""},
		{"staging folder becomes a link out", func(f *fixture) {
			f.spec = ""
			f.m.Run = swap(f, func() { f.link("../../../outside", "machine"+staging) })
		}, "run/host-nvidia/cdi"},
		{"the specification is a FIFO", func(f *fixture) {
			f.spec = ""
			f.m.Run = swap(f, func() {
				must(f.t, os.Mkdir(f.path("machine"+staging), 0o755))
				must(f.t, unix.Mkfifo(f.path("machine"+staging+"/nvidia.yaml"), 0o600))
			})
		}, "refused: it is a FIFO"},
		{"the specification is a link out", func(f *fixture) {
			f.write("outside/nvidia.yaml", spec)
			f.spec = ""
			f.m.Run = swap(f, func() {
				must(f.t, os.Mkdir(f.path("machine"+staging), 0o755))
				f.link(f.path("outside/nvidia.yaml"), "machine"+staging+"/nvidia.yaml")
			})
		}, "no such file"},
		{"nodes are links out", func(f *fixture) {
			f.remove("machine/dev/nvidia0")
			f.link(f.path("outside/secret"), "machine/dev/nvidia0")
		}, "device node /dev/nvidia0 does not exist in the machine"},
		{"/dev/char is a link out", func(f *fixture) { f.link("../../outside", "machine/dev/char") }, "dev/char"},
		{"another specification is a FIFO", func(f *fixture) {
			must(f.t, os.Mkdir(f.path("machine/etc/cdi"), 0o755))
			must(f.t, unix.Mkfifo(f.path("machine/etc/cdi/x.yaml"), 0o600))
		}, ""},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			f := newFixture(t, 1)
			tt.make(f)
			before := f.outside()
			done := make(chan error, 1)
			go func() { _, err := f.wire(); done <- err }()
			select {
			case err := <-done:
				if tt.err == "" {
					must(t, err)
				} else if !strings.Contains(fmt.Sprint(err), tt.err) {
					t.Errorf("error %v; want in it: %s", err, tt.err)
				}
			case <-time.After(time.Minute):
				t.Fatal("it hangs")
			}
			if diff := cmp.Diff(before, f.outside()); diff != "" {
				t.Errorf("changed outside:\n%s", diff)
			}
			f.m.Run = f.run
			_ = f.m.Unwire(t.Context())
			if diff := cmp.Diff(before, f.outside()); diff != "" {
				t.Errorf("changed outside by the end:\n%s", diff)
			}
		})
	}
}

// swap is a Run whose nvidia-ctk takes the staging folder away and does something else.
func swap(f *fixture, do func()) func(context.Context, machine.Program) (string, error) {
	return func(ctx context.Context, p machine.Program) (string, error) {
		if p.Unit == "berth-nvidia-cdi.service" {
			f.remove("machine" + staging)
			do()
		}
		return f.run(ctx, p)
	}
}

// TestSwap exchanges folders for links out of the root, again and again, while the machine is wired.
func TestSwap(t *testing.T) {
	f := newFixture(t, 3)
	names := []string{"machine/" + lib, "machine/run/cdi", "machine/usr/bin", "machine/dev/char", "machine/usr"}
	for _, name := range names {
		must(t, os.MkdirAll(f.path(name), 0o755))
		f.link(f.path("outside"), name+".swap")
	}
	// Names that a write, a removal or a look at what is in the way would meet.
	f.link("/run/host-nvidia/0/libcuda.so.1", "outside/libcuda.so.1")
	f.write("outside/libnvidia-000.so.1", "outside")
	before := f.outside()

	stop := make(chan struct{})
	var swaps atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			name := f.path(names[int(swaps.Load())/2%len(names)])
			if err := unix.Renameat2(-1, name, -1, name+".swap", unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
			swaps.Add(1)
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	var good, bad int
	for begin := time.Now(); good+bad < 200 || (good == 0 || bad == 0) && time.Since(begin) < time.Minute; {
		if _, err := f.wire(); err != nil {
			bad++
		} else {
			good++
		}
		if bad%10 == 1 {
			_ = f.m.Unwire(t.Context())
		}
	}
	for swaps.Load() < 10_000 && !t.Failed() { // only of interest where the machine is slow
		_, _ = f.wire()
	}
	close(stop)
	wg.Wait()
	t.Logf("%d swaps, wired %d times, failed %d times", swaps.Load(), good, bad)
	if diff := cmp.Diff(before, f.outside()); diff != "" {
		t.Errorf("changed outside:\n%s", diff)
	}
	if bad == 0 {
		t.Error("the swaps did not meet the wiring")
	}
}

// BenchmarkWire wires 120 libraries into a machine with as many links as a large one has: for the first time, and again. What
// counts is the time of the processor, as this machine may have other things to do.
func BenchmarkWire(b *testing.B) {
	const limit = 50 * time.Millisecond
	f := newFixture(b, 120)
	for i := range 1000 {
		f.write("machine/"+lib+"/libother"+strconv.Itoa(i)+".so.1.0", "")
		f.link("libother"+strconv.Itoa(i)+".so.1.0", "machine/"+lib+"/libother"+strconv.Itoa(i)+".so.1")
	}
	for _, again := range []bool{false, true} {
		name := map[bool]string{false: "first", true: "again"}[again]
		b.Run(name, func(b *testing.B) {
			var own time.Duration
			n, fastest := 0, time.Hour
			for b.Loop() {
				if !again {
					b.StopTimer()
					must(b, f.m.Unwire(b.Context()))
					b.StartTimer()
				}
				f.ran = nil
				begin, used := time.Now(), processorTime(b)
				_, err := f.wire()
				n, own, fastest = n+1, own+processorTime(b)-used, min(fastest, time.Since(begin))
				must(b, err)
				if len(f.ran) != 2 {
					b.Fatalf("ran %v; want ldconfig and nvidia-ctk, whatever the number of libraries", f.ran)
				}
			}
			own /= time.Duration(n)
			b.ReportMetric(float64(own.Microseconds())/1000, "cpu-ms/op")
			b.ReportMetric(float64(fastest.Microseconds())/1000, "ms/fastest")
			if own > limit {
				b.Errorf("%v of the processor; want at most %v", own, limit)
			}
		})
	}
}

// processorTime is what this process has used so far.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
