package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/testdata/gpu"
)

// good is a specification as nvidia-ctk 1.18 writes it.
const good = `---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/card1
      hostPath: /dev/dri/card0
    hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, create-symlinks, --link, "../card1::/dev/dri/by-path/pci-0000:00:1e.0-card"]
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/card1
      hostPath: /dev/dri/card0
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  deviceNodes:
  - path: /dev/nvidia-uvm
  - path: /dev/nvidiactl
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib/x86_64-linux-gnu]
  mounts:
  - hostPath: /run/host-nvidia/0/libcuda.so.550.54.15
    containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15
    options: [ro, nosuid, nodev, rbind, rprivate]
`

// machine makes the root file system of a machine in which good is right.
func machine(t *testing.T) *file.Root {
	t.Helper()
	dir := t.TempDir()
	if err := gpu.Make(dir, append(gpu.Headless(1), gpu.DRI(1)...)...); err != nil {
		t.Skip(err) // needs CAP_MKNOD
	}
	for name, mode := range map[string]os.FileMode{
		"run/host-nvidia/0/libcuda.so.550.54.15": 0o644,
		"usr/bin/nvidia-cdi-hook":                0o755,
		"usr/bin/text":                           0o644,
		"etc/passwd":                             0o644,
	} {
		must(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, name), nil, mode))
	}
	must(t, unix.Mkfifo(filepath.Join(dir, "dev/fifo"), 0o600))
	must(t, os.Symlink("nvidia0", filepath.Join(dir, "dev/gpu")))
	must(t, os.Symlink("/../../outside", filepath.Join(dir, "dev/out")))
	must(t, os.Symlink("loop", filepath.Join(dir, "dev/loop")))
	root, err := file.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return root
}

func TestCheck(t *testing.T) {
	root := machine(t)
	devices := good[strings.Index(good, "devices:"):strings.Index(good, "containerEdits:\n  env")]
	common := good[strings.Index(good, "containerEdits:\n  env"):]
	const dri, library, hook = "hostPath: /dev/dri/card0", "hostPath: /run/host-nvidia/0/libcuda.so.550.54.15", "/usr/bin/nvidia-cdi-hook"
	for _, tt := range []struct {
		reason string
		edit   []string // what is in good, and by what it is replaced
		err    []string // what each line of the error has behind the file's name
	}{
		{"as it should be", nil, nil},
		{"a device by a link", []string{dri, "hostPath: /dev/gpu"}, nil},
		{"a path upwards", []string{library, strings.Replace(library, "/", "/../../", 1)}, nil},
		{"control nodes in each device", []string{
			"  - path: /dev/nvidiactl\n", "",
			"    - path: /dev/nvidia0\n", "    - path: /dev/nvidiactl\n    - path:  /dev/nvidia0\n",
			"    - path: /dev/nvidia0\n", "    - path: /dev/nvidiactl\n    - path:  /dev/nvidia0\n",
		}, nil},

		{"empty", []string{good, ""}, []string{"containerd would refuse it: failed to unmarshal CDI Spec: EOF"}},
		{"only a comment", []string{good, "# nothing\n"}, []string{"containerd would refuse it: failed to unmarshal CDI Spec: EOF"}},
		{"null", []string{good, "null\n"}, []string{"containerd would refuse it: the file is empty"}},
		{"no YAML", []string{"devices:", "devices: ["}, []string{"containerd would refuse it: failed to unmarshal CDI Spec: yaml: "}},
		{"a key that is none", []string{"env:", "environment:"}, []string{"containerd would refuse it: failed to unmarshal CDI Spec: yaml: unmarshal errors: line 22: field environment not found"}},
		{"a version that is none", []string{"0.5.0", "9.9.9"}, []string{"containerd would refuse it: invalid CDI Spec: invalid version"}},
		{"newer than it says", []string{"0.5.0", "0.3.0"}, []string{"the spec version must be at least v0.5.0"}},
		{"another vendor", []string{"kind: nvidia.com/gpu", "kind: example.com/gpu"}, []string{`kind "example.com/gpu": want "nvidia.com/gpu"`}},
		{"no kind", []string{"kind: nvidia.com/gpu\n", ""}, []string{"containerd would refuse it: ", `kind "": want "nvidia.com/gpu"`}},
		{"no device", []string{devices, ""}, []string{"containerd would refuse it: invalid CDI Spec: invalid spec, no devices"}},
		{"a device twice", []string{"name: all", `name: "0"`}, []string{`containerd would refuse it: invalid CDI Spec: invalid spec, multiple device "0"`}},
		{"a device that changes nothing", []string{"- name: all\n", "- name: none\n  containerEdits: {}\n- name: all\n"}, []string{"containerd would refuse it: "}},
		{"nothing as a device node", []string{"- path: /dev/nvidia-uvm\n", "-\n  - path: /dev/nvidia-uvm\n"}, []string{"invalid (nil) device node"}},
		{"a hook at no moment", []string{"hookName: createContainer", "hookName: sometimes"}, []string{`invalid hook name "sometimes"`}},

		{"cut off, as by a full disk", []string{common, ""}, []string{
			`device "0": has no device node /dev/nvidiactl: no program could use the GPU`,
			`device "0": has no device node /dev/nvidia-uvm: no program could use the GPU`,
			`device "all": has no device node /dev/nvidiactl: no program could use the GPU`,
			`device "all": has no device node /dev/nvidia-uvm: no program could use the GPU`,
		}},
		{"no control node", []string{"  - path: /dev/nvidiactl\n", ""}, []string{
			`device "0": has no device node /dev/nvidiactl`, `device "all": has no device node /dev/nvidiactl`}},
		{"no unified memory", []string{"  - path: /dev/nvidia-uvm\n", ""}, []string{
			`device "0": has no device node /dev/nvidia-uvm`, `device "all": has no device node /dev/nvidia-uvm`}},
		{"a control node in one device only", []string{
			"  - path: /dev/nvidiactl\n", "",
			"    - path: /dev/nvidia0\n", "    - path: /dev/nvidiactl\n    - path: /dev/nvidia0\n",
		}, []string{`device "all": has no device node /dev/nvidiactl`}},
		{"a node that is not bound", []string{"- path: /dev/nvidia-uvm\n", "- path: /dev/nvidia-uvm\n  - path: /dev/nvidia-modeset\n"}, []string{
			"all devices: device node /dev/nvidia-modeset does not exist in the machine"}},
		{"a node that is not bound, by its other name", []string{dri, "hostPath: /dev/dri/card7"}, []string{
			`device "0": device node /dev/dri/card7 does not exist in the machine`}},
		{"a node that is a file", []string{dri, "hostPath: /etc/passwd"}, []string{
			`device "0": device node /etc/passwd is -rw-r--r-- in the machine: want a character device`}},
		{"a node that is a FIFO", []string{dri, "hostPath: /dev/fifo"}, []string{"device node /dev/fifo is prw------- in the machine"}},
		{"a node by a link out", []string{dri, "hostPath: /dev/out"}, []string{"device node /dev/out does not exist in the machine"}},
		{"a node by a link to itself", []string{dri, "hostPath: /dev/loop"}, []string{"device node /dev/loop: "}},
		{"a path that is none", []string{dri, "hostPath: dev/nvidia0"}, []string{`device node "dev/nvidia0": want an absolute path`}},
		{"a library of the driver before", []string{library, "hostPath: /run/host-nvidia/0/libcuda.so.535.1"}, []string{
			"all devices: mount /run/host-nvidia/0/libcuda.so.535.1 does not exist in the machine"}},
		{"a mount of nothing", []string{library, `hostPath: ""`}, []string{"containerd would refuse it", `mount "": want an absolute path`}},
		{"no hook program", []string{hook, "/usr/local/bin/nvidia-cdi-hook"}, []string{
			`device "0": hook /usr/local/bin/nvidia-cdi-hook does not exist in the machine`}},
		{"a hook that cannot be run", []string{hook, "/usr/bin/text"}, []string{
			`device "0": hook /usr/bin/text is -rw-r--r-- in the machine: want an executable file`}},
		{"a hook that is a folder", []string{hook, "/usr/bin"}, []string{"hook /usr/bin is drwxr-xr-x in the machine: want an executable file"}},
		{"several mistakes", []string{library, "hostPath: /none", hook, "/none", "  - path: /dev/nvidiactl\n", ""}, []string{
			"all devices: mount /none does not exist", `device "0": hook /none does not exist`,
			`device "0": has no device node /dev/nvidiactl`, `device "all": has no device node /dev/nvidiactl`}},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			text := good
			for edit := range slices.Chunk(tt.edit, 2) {
				if !strings.Contains(text, edit[0]) {
					t.Fatalf("%q is not in the specification", edit[0])
				}
				text = strings.Replace(text, edit[0], edit[1], 1)
			}
			devices, unused, err := Check(root, []Spec{{Main, []byte(text)}})
			if tt.err == nil {
				must(t, err)
				if diff := cmp.Diff([]string{"0", "all"}, devices); diff != "" || unused != nil {
					t.Errorf("devices: %s, unused: %v", diff, unused)
				}
				return
			}
			lines := strings.Split(errorText(err), "\n")
			if len(lines) != len(tt.err) {
				t.Fatalf("error\n%v\nwant %d lines", err, len(tt.err))
			}
			for i, line := range lines {
				if !strings.HasPrefix(line, "nvidia.yaml: ") || !strings.Contains(line, tt.err[i]) {
					t.Errorf("error\n%v\nwant in line %d: %s", err, i+1, tt.err[i])
				}
			}
		})
	}
}

// TestCheckAll is about several files.
func TestCheckAll(t *testing.T) {
	root := machine(t)
	spec := func(name, kind string) Spec {
		return Spec{name, []byte(strings.Replace(strings.Replace(good, "0.5.0", "0.6.0", 1), "kind: nvidia.com/gpu", "kind: "+kind, 1))}
	}
	main := spec(Main, Kind)
	coherent := spec("nvidia.coherent.yaml", "nvidia.com/gpu.coherent")
	for _, tt := range []struct {
		reason string
		specs  []Spec
		err    string
	}{
		{"Grace Hopper", []Spec{coherent, main, spec("nvidia.noncoherent.yaml", "nvidia.com/gpu.noncoherent")}, ""},
		{"nothing", nil, "nvidia.yaml: does not exist"},
		{"not the file of all GPUs", []Spec{coherent}, "nvidia.yaml: does not exist"},
		{"twice the same devices", []Spec{main, spec("nvidia.coherent.yaml", Kind)}, `nvidia.coherent.yaml: kind "nvidia.com/gpu": want "nvidia.com/gpu.coherent"`},
		{"all mistakes at once", []Spec{spec(Main, "x.com/y"), spec("nvidia.coherent.yaml", "x.com/z")},
			"nvidia.yaml: kind \"x.com/y\": want \"nvidia.com/gpu\"\nnvidia.coherent.yaml: kind \"x.com/z\": want \"nvidia.com/gpu.coherent\""},
	} {
		_, _, err := Check(root, tt.specs)
		if got := errorText(err); got != tt.err {
			t.Errorf("%s: error %q; want %q", tt.reason, got, tt.err)
		}
	}
	// A GPU that nvidia-ctk did not find.
	must(t, gpu.Make(root.Name(), gpu.Headless(2)[4], gpu.Modeset))
	if _, unused, err := Check(root, []Spec{main}); err != nil || cmp.Diff([]string{"/dev/nvidia1"}, unused) != "" {
		t.Errorf("unused %v, error %v; want /dev/nvidia1", unused, err)
	}
}

// TestCheckShort: a file that is something else is not told at length.
func TestCheckShort(t *testing.T) {
	var b strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&b, "key%d: välue\n", i)
	}
	_, _, err := Check(machine(t), []Spec{{Main, []byte(b.String())}})
	first, _, _ := strings.Cut(errorText(err), "\n")
	if !strings.Contains(first, "field key0 not found") || !strings.HasSuffix(first, "…") || len(first) > 600 {
		t.Errorf("an error of %d bytes: %.800s", len(first), first)
	}
}

func TestKindOf(t *testing.T) {
	for text, want := range map[string]string{good: Kind, "": "", "{": "", "kind: x/y": "x/y"} {
		if got := KindOf([]byte(text)); got != want {
			t.Errorf("%.20q: %q; want %q", text, got, want)
		}
	}
}

// FuzzCheck: a specification may hold anything.
func FuzzCheck(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("devices: [null]\ncontainerEdits: {deviceNodes: [null], mounts: [null], hooks: [null]}\n"))
	root, err := file.OpenRoot(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		if _, _, err := Check(root, []Spec{{Main, content}}); err == nil {
			t.Error("an empty root file system has no device") // whatever the specification says
		}
	})
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
