// Stubctk stands in for the nvidia-ctk of the NVIDIA Container Toolkit where tests have no GPU that the real one could ask. Of all
// its commands it knows `cdi generate`: it takes the flags of version 1.20 and no others, and writes the CDI specification that the
// real one writes in its NVML mode, from what it finds: device nodes in /dev, the driver's libraries as the dynamic linker's cache
// has them, programs in $PATH. What is missing it only warns about, as the real one does; without libnvidia-ml.so.1 it fails. A GPU's
// UUID and its MIG devices are made up: a MIG device of GPU 0 for each two capabilities from 3 on.
//
// Called nvidia-cdi-hook it does nothing, with success. The arguments of its last call go to /run/stubctk.
//
// Files in /etc/stubctk make it misbehave:
//
//	fail         print the content as an error and exit with 1
//	hang         never end
//	old          be version 1.17, which has no flags for single hooks
//	garbage      write the content instead of a specification
//	kind         the kind of the devices, instead of nvidia.com/gpu
//	omit         base names of nodes, libraries and programs, which are left out
//	extra-mount  a path that is mounted, too, whether it is there or not
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

func main() {
	if path.Base(os.Args[0]) == "nvidia-cdi-hook" {
		return
	}
	c := &ctk{root: "/", log: os.Stderr, now: time.Now}
	if err := c.run(os.Args[1:], os.Stdout); err != nil {
		c.say("error", "%v", err)
		os.Exit(1)
	}
}

// ctk is one run of the program.
type ctk struct {
	root string // of all paths, as an absolute path
	log  io.Writer
	now  func() time.Time
}

// say writes a log line as logrus does, the logger of the real one.
func (c *ctk) say(level, format string, args ...any) {
	fmt.Fprintf(c.log, "time=%q level=%s msg=%q\n", c.now().UTC().Format(time.RFC3339), level, fmt.Sprintf(format, args...))
}

func (c *ctk) path(name string) string { return filepath.Join(c.root, name) }

// knob returns the content of a file in /etc/stubctk, and whether there is one.
func (c *ctk) knob(name string) (string, bool) {
	b, err := os.ReadFile(c.path("etc/stubctk/" + name))
	return strings.TrimSpace(string(b)), err == nil
}

func (c *ctk) run(args []string, stdout io.Writer) error {
	if err := os.WriteFile(c.path("run/stubctk"), []byte(strings.Join(args, "\n")+"\n"), 0o644); err != nil {
		return err
	}
	_, old := c.knob("old")
	if slices.Equal(args, []string{"--version"}) {
		version := "1.20.2"
		if old {
			version = "1.17.8"
		}
		fmt.Fprintf(stdout, "NVIDIA Container Toolkit CLI version %s\n", version)
		return nil
	}
	if len(args) < 2 || args[0] != "cdi" || args[1] != "generate" {
		return fmt.Errorf("the stand-in for nvidia-ctk knows only `cdi generate`, not %q", args)
	}
	o, err := parse(args[2:], old, stdout)
	if err != nil {
		return err
	}
	for _, hang := c.knob("hang"); hang; {
		time.Sleep(time.Hour)
	}
	if msg, ok := c.knob("fail"); ok {
		return errors.New(msg)
	}
	if o.mode != "auto" && o.mode != "nvml" {
		return fmt.Errorf("the stand-in for nvidia-ctk has no mode %q", o.mode)
	}
	out, ok := c.knob("garbage")
	if !ok {
		s, err := c.generate(o)
		if err != nil {
			return fmt.Errorf("failed to generate CDI spec: %w", err)
		}
		b, err := yaml.Marshal(s)
		if err != nil {
			return err
		}
		out = "---\n" + string(b)
	}
	if o.output == "" {
		_, err := io.WriteString(stdout, out)
		return err
	}
	// The real one makes the folder, too (pkg/cdi/spec.go of the CDI library).
	if err := os.MkdirAll(filepath.Dir(c.path(o.output)), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(c.path(o.output), []byte(out), 0o644); err != nil {
		return err
	}
	c.say("info", "Generated CDI spec with version 0.5.0")
	return nil
}

// options are those flags that change something here.
type options struct {
	output, mode, hookPath string
	disabled, enabled      list
}

// list is a flag that may be given several times, or once with commas.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(v string) error {
	*l = append(*l, strings.Split(v, ",")...)
	return nil
}

// parse takes the flags of cmd/nvidia-ctk/cdi/generate/generate.go.
func parse(args []string, old bool, stdout io.Writer) (options, error) {
	o := options{mode: "auto"}
	flags := flag.NewFlagSet("nvidia-ctk cdi generate", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	for _, name := range []string{"format", "dev-root", "driver-root", "ldconfig-path", "vendor", "cdi-vendor", "class", "cdi-class",
		"csv.compat-container-root"} {
		flags.String(name, "", "")
	}
	for _, name := range []string{"config-search-path", "device-name-strategy", "library-search-path", "csv.file", "csv.ignore-pattern",
		"feature-flag", "feature-flags", "device-id", "device-ids", "device", "devices"} {
		flags.Var(new(list), name, "")
	}
	flags.Bool("no-all-device", false, "")
	flags.StringVar(&o.output, "output", "", "")
	for _, name := range []string{"mode", "discovery-mode"} {
		flags.StringVar(&o.mode, name, o.mode, "")
	}
	for _, name := range []string{"nvidia-cdi-hook-path", "nvidia-ctk-path"} {
		flags.StringVar(&o.hookPath, name, "", "")
	}
	if !old {
		for _, suffix := range []string{"", "s"} {
			flags.Var(&o.disabled, "disable-hook"+suffix, "")
			flags.Var(&o.enabled, "enable-hook"+suffix, "")
		}
	}
	// The package's words for a flag that it does not know are those of urfave/cli, which the real one uses.
	if err := flags.Parse(args); err != nil {
		fmt.Fprintf(stdout, "Incorrect Usage: %v\n\nNAME:\n   NVIDIA Container Toolkit CLI cdi generate\n\n", err)
		return o, err
	}
	if slices.Contains(o.enabled, "all") {
		return o, errors.New("enabling all hooks is not supported")
	}
	return o, nil
}

// The parts of a CDI specification (github.com/cncf-tags/container-device-interface, SPEC.md) that are written.
type (
	spec struct {
		Version string   `json:"cdiVersion"`
		Kind    string   `json:"kind"`
		Devices []device `json:"devices"`
		Edits   edits    `json:"containerEdits"`
	}
	device struct {
		Name  string `json:"name"`
		Edits edits  `json:"containerEdits"`
	}
	edits struct {
		Env    []string `json:"env,omitempty"`
		Nodes  []node   `json:"deviceNodes,omitempty"`
		Hooks  []hook   `json:"hooks,omitempty"`
		Mounts []mount  `json:"mounts,omitempty"`
	}
	node struct {
		Path string `json:"path"`
	}
	hook struct {
		Name string   `json:"hookName"`
		Path string   `json:"path"`
		Args []string `json:"args"`
		Env  []string `json:"env"`
	}
	mount struct {
		Host      string   `json:"hostPath"`
		Container string   `json:"containerPath"`
		Options   []string `json:"options"`
	}
)

func (c *ctk) generate(o options) (*spec, error) {
	libraries, err := c.libraries()
	if err != nil {
		return nil, err
	}
	if libraries["libnvidia-ml.so.1"] == "" {
		return nil, errors.New("failed to create device CDI specs: failed to construct device spec generators: " +
			"failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND")
	}
	omitted, _ := c.knob("omit")
	omit := strings.Fields(omitted)
	s := &spec{Version: "0.5.0", Kind: "nvidia.com/gpu"}
	if kind, ok := c.knob("kind"); ok {
		s.Kind = kind
	}

	s.Devices = c.devices(omit)
	for _, name := range []string{"nvidia-modeset", "nvidia-uvm-tools", "nvidia-uvm", "nvidiactl"} {
		s.Edits.Nodes = append(s.Edits.Nodes, c.nodes(omit, name)...)
	}
	var dirs []string
	add := func(file string) {
		if !slices.Contains(omit, path.Base(file)) {
			s.Edits.Mounts = append(s.Edits.Mounts, mount{file, file, []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}})
		}
	}
	for _, file := range sorted(libraries) {
		add(file)
		dirs = append(dirs, path.Dir(file))
	}
	slices.Sort(dirs)
	dirs = slices.Compact(dirs)
	for _, name := range []string{"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
		if file := c.program(name); file != "" {
			add(file)
		} else {
			c.say("warning", "Could not locate %s: %[1]s: not found", name)
		}
	}
	if file, ok := c.knob("extra-mount"); ok {
		add(file)
	}
	s.Edits.Mounts = append(s.Edits.Mounts, mount{"/dev/null", "/var/run/nvidia-container-devices/void", []string{"ro", "nosuid", "nodev", "bind"}})
	s.Edits.Env = []string{"NVIDIA_CTK_LIBCUDA_DIR=" + strings.Join(dirs, ":"), "NVIDIA_VISIBLE_DEVICES=void"}
	s.Edits.Hooks = c.hooks(o, libraries, dirs)
	return s, nil
}

// devices are the GPUs by index and by UUID, their MIG devices, and all together.
func (c *ctk) devices(omit []string) []device {
	var devices []device
	var all []node
	for i := range 16 {
		name := fmt.Sprintf("nvidia%d", i)
		if _, err := os.Lstat(c.path("dev/" + name)); err != nil {
			continue
		}
		nodes := c.nodes(omit, name)
		for _, dri := range []string{fmt.Sprintf("dri/card%d", i), fmt.Sprintf("dri/renderD%d", 128+i)} {
			if _, err := os.Lstat(c.path("dev/" + dri)); err == nil {
				nodes = append(nodes, c.nodes(omit, dri)...)
			}
		}
		uuid := fmt.Sprintf("%08x-0000-4000-8000-000000000000", i)
		devices = append(devices, device{fmt.Sprint(i), edits{Nodes: nodes}}, device{"GPU-" + uuid, edits{Nodes: nodes}})
		all = append(all, nodes...)
		for m := 0; i == 0; m++ {
			gpuInstance, computeInstance := fmt.Sprintf("nvidia-caps/nvidia-cap%d", 3+2*m), fmt.Sprintf("nvidia-caps/nvidia-cap%d", 4+2*m)
			if _, err := os.Lstat(c.path("dev/" + computeInstance)); err != nil {
				break
			}
			mig := slices.Concat(nodes, c.nodes(omit, gpuInstance), c.nodes(omit, computeInstance))
			devices = append(devices, device{fmt.Sprintf("0:%d", m), edits{Nodes: mig}},
				device{fmt.Sprintf("MIG-%08x-0000-4000-8000-000000000000", m), edits{Nodes: mig}})
			all = append(all, mig[len(nodes):]...)
		}
	}
	return append(devices, device{"all", edits{Nodes: all}})
}

// nodes returns a node by its name in /dev; none and a warning if it is not there.
func (c *ctk) nodes(omit []string, name string) []node {
	file := "/dev/" + name
	info, err := os.Stat(c.path(file))
	switch {
	case err != nil || info.Mode()&fs.ModeCharDevice == 0:
		c.say("warning", "Could not locate %s: %[1]s: not found", file)
		return nil
	case slices.Contains(omit, path.Base(name)):
		return nil
	}
	return []node{{file}}
}

// libraries are the driver's libraries, by the names that the dynamic linker's cache has, with links resolved.
func (c *ctk) libraries() (map[string]string, error) {
	args := []string{"-p"}
	if c.root != "/" {
		args = append(args, "-r", c.root)
	}
	out, err := exec.Command("/sbin/ldconfig", args...).Output()
	if err != nil {
		return nil, fmt.Errorf("ldconfig -p: %w", err)
	}
	found := map[string]string{}
	for line := range bytes.Lines(out) {
		entry, file, ok := strings.Cut(strings.TrimSpace(string(line)), " => ")
		name, _, _ := strings.Cut(entry, " ")
		if !ok || !strings.Contains(name, "nvidia") && !strings.HasPrefix(name, "libcuda") && !strings.HasPrefix(name, "libnv") {
			continue
		}
		resolved, err := filepath.EvalSymlinks(c.path(file))
		if err != nil {
			c.say("warning", "Failed to resolve symlink chain for library %q: %v", file, err)
			continue
		}
		found[name] = path.Join("/", strings.TrimPrefix(resolved, c.root))
	}
	return found, nil
}

// sorted returns the different values of m.
func sorted(m map[string]string) []string {
	var values []string
	for _, v := range m {
		values = append(values, v)
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// program finds a program in $PATH; empty: it is not there.
func (c *ctk) program(name string) string {
	for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		file := path.Join(dir, name)
		if info, err := os.Stat(c.path(file)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file
		}
	}
	return ""
}

// hooks are those that the flags leave.
func (c *ctk) hooks(o options, libraries map[string]string, dirs []string) []hook {
	program := o.hookPath
	if program == "" {
		if program = c.program("nvidia-cdi-hook"); program == "" {
			c.say("warning", "Failed to locate nvidia-cdi-hook: nvidia-cdi-hook: not found")
			program = "/usr/bin/nvidia-cdi-hook"
		}
	}
	var links []string
	if file := libraries["libcuda.so.1"]; file != "" {
		links = []string{"--link", "libcuda.so.1::" + path.Join(path.Dir(file), "libcuda.so")}
	}
	var folders []string
	for _, dir := range dirs {
		folders = append(folders, "--folder", dir)
	}
	var hooks []hook
	for _, h := range []struct {
		name string
		args []string
	}{
		{"create-symlinks", links}, {"enable-cuda-compat", []string{"--host-driver-version=0.0"}}, {"update-ldcache", folders},
		{"disable-device-node-modification", nil}, {"update-application-profile", nil},
	} {
		disabled := slices.Contains(o.disabled, "all") || slices.Contains(o.disabled, h.name)
		if !disabled || slices.Contains(o.enabled, h.name) {
			args := append([]string{"nvidia-cdi-hook", h.name}, h.args...)
			hooks = append(hooks, hook{"createContainer", program, args, []string{"NVIDIA_CTK_DEBUG=false"}})
		}
	}
	return hooks
}
