// Package nvidia knows what a machine needs of the host's NVIDIA driver: which device nodes, libraries and programs, where
// they are on the host, and where they are to be in the machine. What a host has is found when a slot starts.
package nvidia

import (
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"berth/generator/file"
)

// Places in the machine. Both are on its /run, a tmpfs: nothing in them outlives a run of the machine.
const (
	// Dir is where the host's files are bound: folders of libraries as Dir/<n>, programs as Dir/bin/<name>.
	Dir = "/run/host-nvidia"
	// CDIDir is where the machine's containerd finds the CDI specifications of the GPUs.
	CDIDir = "/run/cdi"
)

// Nodes are the device nodes of the driver, as patterns of path.Match. A host has those of the modules that it has loaded: headless
// drivers come without nvidia-modeset, the last three need NVSwitches, MIG and IMEX.
var Nodes = []string{
	Control, device + "[0-9]*", Unified, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset", "/dev/nvidia-nvswitch*",
	"/dev/nvidia-nvlink", "/dev/nvidia-caps/*", "/dev/nvidia-caps-imex-channels/*",
}

// Nodes without which no program can use a GPU.
const (
	Control = "/dev/nvidiactl"  // of the driver
	Unified = "/dev/nvidia-uvm" // of unified virtual memory
)

const device = "/dev/nvidia" // of a GPU, with its number behind it

// Driver is the host's driver as far as a machine needs it.
type Driver struct {
	// Version is the loaded module's (/sys/module/nvidia/version), such as "550.54.14"; empty: the kernel does not say.
	Version string
	// Libraries are sorted by name; a name is there once.
	Libraries []Library
	// Folders are the folders of Libraries on the host, sorted. The n-th is bound at Dir/<n>.
	Folders []string
	// Tools are the driver's programs on the host, sorted: each is bound alone, at Dir/bin/<name>.
	Tools []Tool
	// Sockets are the folders on the host in which daemons of the driver have their sockets, sorted. They are bound at the same
	// path: nvidia-ctk looks for them there.
	Sockets []string
}

// Library is one name under which the dynamic linker is to find a library.
type Library struct {
	// Name is a name that the linker's cache of the host has ("libcuda.so.1"), or the file's own.
	Name string
	// Path is the regular file on the host, with all links resolved.
	Path string
}

// Tool is a program of the driver.
type Tool struct {
	Name string
	Path string // the regular file on the host, with all links resolved
}

// Missing returns those libraries without which no GPU can be used.
func (d *Driver) Missing() []string {
	var missing []string
	for _, name := range essential {
		if d.find(name) == "" {
			missing = append(missing, name)
		}
	}
	return missing
}

// essential: the driver's interface for programs, and the one for its management.
var essential = []string{"libcuda.so.1", "libnvidia-ml.so.1"}

func (d *Driver) find(name string) string {
	for _, l := range d.Libraries {
		if l.Name == name {
			return l.Path
		}
	}
	return ""
}

// Mismatch is an error where libraries are not those of the loaded module, as after an upgrade of the driver without a reboot, or half an
// upgrade. The driver would refuse them. A library that is known by a name with its version in it does no harm: only those of the same
// version ask for it.
func (d *Driver) Mismatch() error {
	if d.Version == "" {
		return nil
	}
	var wrong []string
	for _, l := range d.Libraries {
		_, version, _ := strings.Cut(path.Base(l.Path), ".so.")
		if l.Name != path.Base(l.Path) && driverVersion.MatchString(version) && version != d.Version && !slices.Contains(wrong, l.Path) {
			wrong = append(wrong, l.Path)
		}
	}
	if wrong == nil {
		return nil
	}
	slices.Sort(wrong)
	if more := len(wrong) - 3; more > 1 {
		wrong = append(wrong[:3], fmt.Sprintf("and %d more", more))
	}
	return fmt.Errorf("the NVIDIA driver's loaded kernel module has version %s, but these of its libraries have another one: %s: "+
		"reboot the host or reload the module, or install the libraries of %[1]s", d.Version, strings.Join(wrong, " "))
}

// driverVersion matches versions of drivers, as of 550.54.15. Some libraries that come with it have versions of their own (1.1.13).
var driverVersion = regexp.MustCompile(`^[0-9]{3,}\.[0-9]+(\.[0-9]+)?$`)

// Bind is one file or folder of the host in the machine, read-only.
type Bind struct{ Source, Target string }

// Binds returns what the machine gets of the host.
func (d *Driver) Binds() []Bind {
	var binds []Bind
	for n, folder := range d.Folders {
		binds = append(binds, Bind{folder, path.Join(Dir, strconv.Itoa(n))})
	}
	for _, tool := range d.Tools {
		binds = append(binds, Bind{tool.Path, toolTarget(tool)})
	}
	for _, folder := range d.Sockets {
		binds = append(binds, Bind{folder, folder})
	}
	return binds
}

// Link is a link that the machine needs.
type Link struct {
	file.File
	// Source is the file on the host that the link's target is, if the machine was started with Binds of the same Driver.
	Source string
}

// Links returns the links, sorted by path and relative to the machine's root: of the libraries in folder, which the machine's
// linker searches, and of the programs in usr/bin.
func (d *Driver) Links(folder string) []Link {
	var links []Link
	add := func(name, target, source string) {
		links = append(links, Link{file.File{Path: name, Mode: fs.ModeSymlink | 0o777, Content: []byte(target)}, source})
	}
	for _, l := range d.Libraries {
		n, _ := slices.BinarySearch(d.Folders, path.Dir(l.Path))
		add(path.Join(folder, l.Name), path.Join(Dir, strconv.Itoa(n), path.Base(l.Path)), l.Path)
	}
	for _, tool := range d.Tools {
		add(path.Join("usr/bin", tool.Name), toolTarget(tool), tool.Path)
	}
	slices.SortFunc(links, func(a, b Link) int { return strings.Compare(a.Path, b.Path) })
	return links
}

func toolTarget(tool Tool) string { return path.Join(Dir, "bin", tool.Name) }
