package gpu

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestLibrary(t *testing.T) {
	for _, machine := range []elf.Machine{elf.EM_X86_64, elf.EM_AARCH64} {
		f, err := elf.NewFile(bytes.NewReader(Library("libcuda.so.1", machine, "libother.so.2")))
		if err != nil {
			t.Fatal(err)
		}
		soname, err := f.DynString(elf.DT_SONAME)
		if err != nil {
			t.Fatal(err)
		}
		libs, err := f.ImportedLibraries()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]any{machine, elf.ET_DYN, []string{"libcuda.so.1"}, []string{"libother.so.2", "libc.so.6"}},
			[]any{f.Machine, f.Type, soname, libs}); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// The real ld.so loads it.
func TestLibraryLoads(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libnothing.so.1")
	if err := os.WriteFile(lib, Library("libnothing.so.1", Driver{}.machine()), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/cat", "/proc/self/maps")
	cmd.Env = []string{"LD_PRELOAD=" + lib}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), lib) {
		t.Errorf("%v; %s is not loaded:\n%s", err, lib, out)
	}
}

func TestInstall(t *testing.T) {
	folder := MultiarchFolder(Driver{}.machine())
	for _, c := range []struct {
		reason  string
		driver  Driver
		folders int
	}{
		{"none", Driver{Version: "550.54.15"}, 0},
		{"those without which nothing works", Driver{Version: "550.54.15", Libraries: 2}, 1},
		{"invented ones, too", Driver{Version: "550.54.15", Libraries: 120}, 1},
		{"folders that ldconfig does not know", Driver{Version: "560.35.03", Libraries: 60, Folders: []string{"opt/nvidia/lib", "usr/lib/nvidia"}}, 2},
	} {
		t.Run(c.reason, func(t *testing.T) {
			root := t.TempDir()
			if err := c.driver.Install(root); err != nil {
				t.Fatal(err)
			}
			var want []string
			for _, lib := range c.driver.Libs() {
				dir := "/" + filepath.Dir(lib.File)
				want = append(want, lib.Soname+" "+dir)
				if real, err := filepath.EvalSymlinks(filepath.Join(root, dir, lib.Soname)); err != nil || real != filepath.Join(root, lib.File) {
					t.Errorf("%s leads to %s (%v); want %s", lib.Soname, real, err, lib.File)
				}
			}
			got := cached(t, root)
			slices.Sort(want)
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("ldconfig -p, -want +got:\n%s", diff)
			}
			folders := map[string]bool{}
			for _, lib := range c.driver.Libs() {
				folders[filepath.Dir(lib.File)] = true
			}
			if len(folders) != c.folders || len(c.driver.Libs()) != c.driver.Libraries {
				t.Errorf("%d libraries in %v", len(c.driver.Libs()), folders)
			}
			out, err := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), "-L").CombinedOutput()
			if err != nil || string(out) != "nvidia-smi "+c.driver.Version+" -L\n" {
				t.Errorf("nvidia-smi: %v: %s", err, out)
			}
		})
	}

	t.Run("an upgrade leaves nothing of the older", func(t *testing.T) {
		root := t.TempDir()
		for _, d := range []Driver{{Version: "550.54.15", Libraries: 60, Tools: IMEXTools}, {Version: "560.35.03", Libraries: 40}} {
			if err := d.Install(root); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range tree(t, root) {
			if strings.Contains(name, "550") || strings.Contains(name, "imex") {
				t.Errorf("%s is left", name)
			}
		}
		if got := cached(t, root); len(got) != 40 || slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "550") }) {
			t.Errorf("ldconfig -p: %d of 40: %q", len(got), got)
		}
	})
	t.Run("uninstall leaves nothing", func(t *testing.T) {
		root := t.TempDir()
		if err := Uninstall(root); err != nil {
			t.Fatal(err)
		}
		before := tree(t, root)
		d := Driver{Version: "550.54.15", Libraries: 60, Folders: []string{folder, "opt/lib"}}
		if err := d.Install(root); err != nil {
			t.Fatal(err)
		}
		if err := Uninstall(root); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, tree(t, root)); diff != "" {
			t.Errorf("-before +after:\n%s", diff)
		}
		if got := cached(t, root); len(got) != 0 {
			t.Errorf("ldconfig -p: %q", got)
		}
	})
}

// cached reads the names and folders in the cache, for this machine.
func cached(t *testing.T, root string) []string {
	t.Helper()
	out, err := exec.Command("/sbin/ldconfig", "-r", root, "-p").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var libs []string
	for line := range strings.Lines(string(out)) {
		var name, kind, path string
		if n, _ := fmt.Sscanf(line, " %s %s => %s", &name, &kind, &path); n < 3 {
			continue
		}
		if !strings.HasPrefix(kind, "(libc6,") {
			t.Errorf("want a library of libc6: %s", line)
		}
		libs = append(libs, name+" "+filepath.Dir(path))
	}
	return libs
}

// tree lists all that is no folder.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, strings.TrimPrefix(path, root))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func TestNodes(t *testing.T) {
	root := t.TempDir()
	nodes := slices.Concat(Headless(2), []Node{Modeset, KFD}, Caps(1, 2), IMEX(1), DRI(1))
	if err := Make(root, nodes...); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(root, n.Path), &st); err != nil {
			t.Error(err)
			continue
		}
		if st.Mode != unix.S_IFCHR|0o666 || st.Rdev != unix.Mkdev(n.Major, n.Minor) {
			t.Errorf("%s has mode %o and device %x", n.Path, st.Mode, st.Rdev)
		}
		if !strings.Contains("\n"+ProcDevices, fmt.Sprintf("\n%d ", n.Major)) {
			t.Errorf("%s: no major %d in ProcDevices", n.Path, n.Major)
		}
	}
	if err := Remove(root, All()...); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Join(root, "dev"))
	if err != nil || len(left) > 0 {
		t.Errorf("left of dev: %v, %v", left, err)
	}
}
