package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"berth/testdata/gpu"
)

// wired are arguments as a caller gives them who wants only certain hooks.
var wired = []string{"cdi", "generate", "--output", "/run/cdi/nvidia.yaml", "--disable-hook", "all", "--enable-hook", "create-symlinks",
	"--enable-hook=update-ldcache"}

// machine makes a root with two GPUs, one of them with MIG, and a driver of 30 libraries.
func machine(t *testing.T, knobs map[string]string) string {
	t.Helper()
	root := t.TempDir()
	if err := (gpu.Driver{Version: "550.54.15", Libraries: 30}).Install(root); err != nil {
		t.Fatal(err)
	}
	if err := gpu.Make(root, slices.Concat(gpu.Headless(2), gpu.Caps(1, 2, 3, 4), gpu.DRI(1))...); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"usr/bin/nvidia-cdi-hook": "#!/bin/sh\n", "run/x": ""}
	for name, content := range knobs {
		files["etc/stubctk/"+name] = content
	}
	for name, content := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// call runs the program and returns what it wrote to /run/cdi/nvidia.yaml, its log and its standard output.
func call(t *testing.T, root string, args ...string) (written, log, stdout string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	c := &ctk{root: root, log: &errs, now: func() time.Time { return time.Unix(0, 0) }}
	err = c.run(args, &out)
	b, _ := os.ReadFile(filepath.Join(root, "run/cdi/nvidia.yaml"))
	return string(b), errs.String(), out.String(), err
}

func TestGenerate(t *testing.T) {
	root := machine(t, nil)
	written, log, _, err := call(t, root, wired...)
	if err != nil {
		t.Fatal(err)
	}
	var s spec
	if err := yaml.UnmarshalStrict([]byte(written), &s); err != nil {
		t.Fatal(err)
	}
	if s.Kind != "nvidia.com/gpu" || s.Version != "0.5.0" {
		t.Errorf("kind %s, version %s", s.Kind, s.Version)
	}
	nodes := map[string][]node{}
	for _, d := range s.Devices {
		nodes[d.Name] = d.Edits.Nodes
	}
	first := []node{{"/dev/nvidia0"}, {"/dev/dri/card0"}, {"/dev/dri/renderD128"}}
	caps := []node{{"/dev/nvidia-caps/nvidia-cap3"}, {"/dev/nvidia-caps/nvidia-cap4"}}
	if diff := cmp.Diff(map[string][]node{
		"0": first, "GPU-00000000-0000-4000-8000-000000000000": first,
		"1": {{"/dev/nvidia1"}}, "GPU-00000001-0000-4000-8000-000000000000": {{"/dev/nvidia1"}},
		"0:0": slices.Concat(first, caps), "MIG-00000000-0000-4000-8000-000000000000": slices.Concat(first, caps),
		"all": slices.Concat(first, caps, []node{{"/dev/nvidia1"}}),
	}, nodes); diff != "" {
		t.Errorf("devices, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff([]node{{"/dev/nvidia-uvm-tools"}, {"/dev/nvidia-uvm"}, {"/dev/nvidiactl"}}, s.Edits.Nodes); diff != "" {
		t.Errorf("common nodes, -want +got:\n%s", diff)
	}
	folder := "/" + filepath.Dir(gpu.Driver{Libraries: 1}.Libs()[0].File)
	if n := len(s.Edits.Mounts); n != 30+len(gpu.Tools)+1 || !slices.ContainsFunc(s.Edits.Mounts, func(m mount) bool {
		return m.Host == folder+"/libcuda.so.550.54.15" && m.Container == m.Host
	}) {
		t.Errorf("%d mounts: %v", n, s.Edits.Mounts)
	}
	var hooks []string
	for _, h := range s.Edits.Hooks {
		hooks = append(hooks, h.Path+" "+strings.Join(h.Args[1:min(4, len(h.Args))], " "))
	}
	if len(hooks) != 2 || !strings.HasPrefix(hooks[0], "/usr/bin/nvidia-cdi-hook create-symlinks --link lib") ||
		hooks[1] != "/usr/bin/nvidia-cdi-hook update-ldcache --folder "+folder {
		t.Errorf("hooks %q", hooks)
	}
	if want := `time="1970-01-01T00:00:00Z" level=warning msg="Could not locate /dev/nvidia-modeset: /dev/nvidia-modeset: not found"`; !strings.Contains(log, want) {
		t.Errorf("want %s in\n%s", want, log)
	}
	if record, err := os.ReadFile(filepath.Join(root, "run/stubctk")); err != nil || string(record) != strings.Join(wired, "\n")+"\n" {
		t.Errorf("record %q, %v", record, err)
	}
}

func TestHooks(t *testing.T) {
	for _, c := range []struct {
		reason string
		args   []string
		want   []string
	}{
		{"all of them, if nothing is said", nil, []string{"create-symlinks", "enable-cuda-compat", "update-ldcache",
			"disable-device-node-modification", "update-application-profile"}},
		{"no hook", []string{"--disable-hook", "all"}, nil},
		{"one is enabled after all; an unknown one is no error",
			[]string{"--disable-hooks=all", "--enable-hook=disable-device-node-modification", "--enable-hook", "none-such"},
			[]string{"disable-device-node-modification"}},
	} {
		o, err := parse(c.args, false, &bytes.Buffer{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, h := range (&ctk{root: "/none", log: &bytes.Buffer{}, now: time.Now}).hooks(o, nil, nil) {
			got = append(got, h.Args[1])
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s, -want +got:\n%s", c.reason, diff)
		}
	}
}

func TestMisbehaves(t *testing.T) {
	for _, c := range []struct {
		knob, value string
		args        []string
		err         string
		without     string // not in what is written
		with        string
	}{
		{knob: "fail", value: "no luck today\n", err: "no luck today"},
		{knob: "old", err: "flag provided but not defined: -disable-hook"},
		{knob: "none", args: []string{"--none-such"}, err: "flag provided but not defined: -none-such"},
		{knob: "none", args: []string{"--enable-hook", "all"}, err: "enabling all hooks is not supported"},
		{knob: "garbage", value: "}{", with: "}{", without: "kind"},
		{knob: "kind", value: "example.com/x", with: "kind: example.com/x", without: "nvidia.com/gpu"},
		{knob: "omit", value: "nvidiactl libcuda.so.550.54.15", with: "/dev/nvidia-uvm\n", without: "nvidiactl"},
		{knob: "omit", value: "nvidiactl libcuda.so.550.54.15", with: "libnvidia-ml.so.550.54.15", without: "libcuda.so.550.54.15\n"},
		{knob: "extra-mount", value: "/none/such", with: "hostPath: /none/such"},
	} {
		t.Run(c.knob, func(t *testing.T) {
			root := machine(t, map[string]string{c.knob: c.value})
			written, _, _, err := call(t, root, slices.Concat(wired, c.args)...)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) || written != "" {
					t.Errorf("error %v; want %q, and nothing written, not %q", err, c.err, written)
				}
				return
			}
			if err != nil || !strings.Contains(written, c.with) || c.without != "" && strings.Contains(written, c.without) {
				t.Errorf("error %v; want %q and not %q in\n%s", err, c.with, c.without, written)
			}
		})
	}
	t.Run("no NVML", func(t *testing.T) {
		root := machine(t, nil)
		if err := gpu.Uninstall(root); err != nil {
			t.Fatal(err)
		}
		if _, _, _, err := call(t, root, wired...); err == nil || !strings.Contains(err.Error(), "failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("standard output", func(t *testing.T) {
		_, _, stdout, err := call(t, machine(t, nil), "cdi", "generate")
		if err != nil || !strings.HasPrefix(stdout, "---\ncdiVersion: 0.5.0\n") {
			t.Errorf("%v\n%s", err, stdout)
		}
	})
}
