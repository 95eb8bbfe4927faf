package main

import (
	"debug/elf"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/testdata/gpu"
)

func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		reason    string
		mode      goalstate.Mode
		node      bool
		libraries int
		module    string // version of the loaded module
		wire      bool
		warn      bool
		fail      bool
		text      string // what the log line or the error has in it
	}{
		{"off", goalstate.Off, true, 3, "", false, false, false, "nvidia.mode is off: nothing to wire"},
		{"auto, no GPU", goalstate.Auto, false, 0, "", false, false, false, "no NVIDIA GPU on this host: nothing to wire"},
		{"auto, libraries without a GPU", goalstate.Auto, false, 3, "", false, false, false, "no NVIDIA GPU on this host"},
		{"auto", goalstate.Auto, true, 3, "550.54.15", true, false, false, ""},
		{"auto, no libraries", goalstate.Auto, true, 0, "", false, true, false,
			"its linker does not find the driver's libcuda.so.1 and libnvidia-ml.so.1 (ldconfig -p): install the driver's libraries; until then no container gets a GPU"},
		{"auto, one library", goalstate.Auto, true, 1, "", false, true, false, "does not find the driver's libnvidia-ml.so.1 (ldconfig -p)"},
		{"auto, another module", goalstate.Auto, true, 3, "560.35.03", false, false, true, "has version 560.35.03, but these of its libraries have another one: /usr/lib/"},
		{"required, no GPU", goalstate.Required, false, 3, "", false, false, true, "nvidia.mode is required, but this host has no NVIDIA GPU (no /dev/nvidiactl)"},
		{"required", goalstate.Required, true, 3, "550.54.15", true, false, false, ""},
		{"required, the kernel does not say", goalstate.Required, true, 3, "", true, false, false, ""},
		{"required, no libraries", goalstate.Required, true, 0, "", false, false, true, "nvidia.mode is required: this host has an NVIDIA GPU"},
		{"required, another module", goalstate.Required, true, 3, "560.35.03", false, false, true, "has version 560.35.03, but these of its libraries have another one: /usr/lib/"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			dir := t.TempDir()
			machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
			must(t, gpu.Driver{Version: "550.54.15", Libraries: tt.libraries, Machine: machine}.Install(dir))
			if tt.node {
				write(t, dir+"/dev/nvidiactl")
			}
			if tt.module != "" {
				write(t, dir+"/sys/module/nvidia/version", tt.module+"\n")
			}
			root, err := file.OpenRoot(dir)
			must(t, err)
			defer root.Close()
			d, err := decide(t.Context(), root, tt.mode)
			text := d.text
			if err != nil {
				text = err.Error()
			}
			if (d.driver != nil && err == nil) != tt.wire || d.warn != tt.warn || tt.fail != (err != nil) || !strings.Contains(text, tt.text) {
				t.Errorf("driver %v, warn %v, text %q, error %v", d.driver != nil, d.warn, d.text, err)
			}
		})
	}
}

func write(t *testing.T, name string, content ...string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	must(t, os.WriteFile(name, []byte(strings.Join(content, "")), 0o644))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
