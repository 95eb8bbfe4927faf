// Package cdi checks specifications of the Container Device Interface before containerd gets to see them, as nvidia-ctk
// only warns about what it did not find.
package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"berth/generator/file"
	"berth/helpers/nvidia"
)

// Main is the file with all GPUs. On hosts with coherent memory (Grace Hopper) nvidia-ctk can write nvidia.coherent.yaml and
// nvidia.noncoherent.yaml beside it, with some of them each.
const Main = "nvidia.yaml"

// Kind is what pods' requests for a GPU begin with.
const Kind = "nvidia.com/gpu"

// Spec is one specification file.
type Spec struct {
	Name    string // of the file, without folder
	Content []byte
}

// Check checks the specifications that nvidia-ctk made for a machine whose root file system, as its processes see it, is
// root. It returns the names of Main's devices, and the GPUs' nodes (/dev/nvidia<N>) of the machine that none of them has. The
// error holds all mistakes, one a line, each with its file.
func Check(root *file.Root, all []Spec) (devices, unused []string, err error) {
	c := checker{root: root, seen: map[string]bool{}}
	if !slices.ContainsFunc(all, func(s Spec) bool { return s.Name == Main }) {
		c.file = Main
		c.errorf("does not exist")
	}
	for _, s := range all {
		c.file = s.Name
		spec := c.parse(s)
		if spec == nil {
			continue
		}
		c.check(spec)
		if s.Name == Main {
			for _, d := range spec.Devices {
				devices = append(devices, d.Name)
			}
			unused = unusedGPUs(root, spec)
		}
	}
	return devices, unused, errors.Join(c.errs...)
}

// KindOf returns the kind that a specification says it is of, such as "nvidia.com/gpu"; empty where it cannot be read.
func KindOf(content []byte) string {
	spec, err := cdi.ParseSpec(content)
	if err != nil || spec == nil {
		return ""
	}
	return spec.Kind
}

type checker struct {
	root *file.Root
	file string
	seen map[string]bool // mistakes of this file that were said already: all devices share most paths
	errs []error
}

func (c *checker) errorf(format string, a ...any) {
	text := c.file + ": " + fmt.Sprintf(format, a...)
	if !c.seen[text] {
		c.seen[text] = true
		c.errs = append(c.errs, errors.New(text))
	}
}

// parse is what containerd does with the file. It returns nil where the rest cannot be checked.
func (c *checker) parse(s Spec) *specs.Spec {
	spec, err := cdi.ParseSpec(s.Content) // ReadSpec does it again, but its error would begin with the path
	if err == nil && spec == nil {
		err = errors.New("the file is empty")
	}
	if err == nil {
		err = validate(s.Content)
	}
	if err != nil {
		c.errorf("containerd would refuse it: %s", short(err.Error()))
	}
	return spec
}

// short makes one line of an error. YAML's has a line for each mistake, with what is in the file.
func short(text string) string {
	const limit = 500
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}

// validate has the library of containerd read the specification, which it only does from a file.
func validate(content []byte) error {
	fd, err := unix.MemfdCreate("spec", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "spec")
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	_, err = cdi.ReadSpec(fmt.Sprintf("/proc/self/fd/%d", fd), 0)
	return err
}

func (c *checker) check(spec *specs.Spec) {
	if want := Kind + strings.TrimSuffix(strings.TrimPrefix(c.file, "nvidia"), path.Ext(c.file)); spec.Kind != want {
		c.errorf("kind %q: want %q", spec.Kind, want)
	}
	c.edits("all devices", &spec.ContainerEdits)
	for _, d := range spec.Devices {
		what := fmt.Sprintf("device %q", d.Name)
		c.edits(what, &d.ContainerEdits)
		for _, node := range []string{nvidia.Control, nvidia.Unified} {
			if !has(&spec.ContainerEdits, node) && !has(&d.ContainerEdits, node) {
				c.errorf("%s: has no device node %s: no program could use the GPU", what, node)
			}
		}
	}
}

// edits checks that everything is there which the container runtime would have to take from the machine.
func (c *checker) edits(what string, e *specs.ContainerEdits) {
	for _, d := range e.DeviceNodes {
		if d != nil {
			c.path(what, "device node", hostPath(d), "want a character device", func(mode fs.FileMode) bool { return mode&fs.ModeCharDevice != 0 })
		}
	}
	for _, m := range e.Mounts {
		if m != nil {
			c.path(what, "mount", m.HostPath, "", func(fs.FileMode) bool { return true })
		}
	}
	for _, h := range e.Hooks {
		if h != nil {
			c.path(what, "hook", h.Path, "want an executable file", func(mode fs.FileMode) bool { return mode.IsRegular() && mode&0o111 != 0 })
		}
	}
}

// path checks one path in the machine.
func (c *checker) path(what, kind, name, want string, good func(fs.FileMode) bool) {
	switch info, err := c.root.Stat(path.Clean(name)); {
	case !path.IsAbs(name):
		c.errorf("%s: %s %q: want an absolute path", what, kind, name)
	case errors.Is(err, fs.ErrNotExist):
		c.errorf("%s: %s %s does not exist in the machine", what, kind, name)
	case err != nil:
		c.errorf("%s: %s %s: %v", what, kind, name, err)
	case !good(info.Mode()):
		c.errorf("%s: %s %s is %v in the machine: %s", what, kind, name, info.Mode(), want)
	}
}

// hostPath is where the device is outside of the container (CDI specification, "hostPath").
func hostPath(d *specs.DeviceNode) string { return cmp.Or(d.HostPath, d.Path) }

func has(e *specs.ContainerEdits, node string) bool {
	return slices.ContainsFunc(e.DeviceNodes, func(d *specs.DeviceNode) bool { return d != nil && hostPath(d) == node })
}

// unusedGPUs are the GPUs' nodes in the machine that no device of the specification has.
func unusedGPUs(root *file.Root, spec *specs.Spec) []string {
	var unused []string
	entries, _ := root.ReadDir("dev")
	for _, e := range entries {
		node := "/dev/" + e.Name()
		if gpuNode.MatchString(e.Name()) && !has(&spec.ContainerEdits, node) &&
			!slices.ContainsFunc(spec.Devices, func(d specs.Device) bool { return has(&d.ContainerEdits, node) }) {
			unused = append(unused, node)
		}
	}
	return unused
}

var gpuNode = regexp.MustCompile(`^nvidia[0-9]+$`)
