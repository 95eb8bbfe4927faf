package gpu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Node is a character device.
type Node struct {
	Path         string // relative to the root, as dev/nvidia0
	Major, Minor uint32
}

// Majors of devices. NVIDIA's 195 and DRM's 226 are fixed (Documentation/admin-guide/devices.txt of Linux); the others are
// given out by the kernel from the top, 511, down, and are chosen here so that no driver is likely to have them.
const (
	nvidia   = 195
	drm      = 226
	uvm      = 395
	caps     = 394
	channels = 393
	kfd      = 392
)

// ProcDevices are the lines of /proc/devices (proc_devices(5)) that a kernel with the drivers of all these devices has
// among its character devices.
const ProcDevices = `195 nvidia
195 nvidia-modeset
195 nvidiactl
226 drm
392 kfd
393 nvidia-caps-imex-channels
394 nvidia-caps
395 nvidia-uvm
`

// Control and UVM are the nodes without which nothing works.
var (
	Control  = Node{"dev/nvidiactl", nvidia, 255}
	UVM      = Node{"dev/nvidia-uvm", uvm, 0}
	UVMTools = Node{"dev/nvidia-uvm-tools", uvm, 1}
)

// Modeset is there where the driver can show something on a screen: headless variants of it have none.
var Modeset = Node{"dev/nvidia-modeset", nvidia, 254}

// KFD is that of AMD's GPUs.
var KFD = Node{"dev/kfd", kfd, 0}

// Headless returns the nodes of a driver with a number of GPUs: Control, UVM, UVMTools, and one for each GPU.
func Headless(gpus int) []Node {
	nodes := []Node{Control, UVM, UVMTools}
	for i := range gpus {
		nodes = append(nodes, Node{fmt.Sprintf("dev/nvidia%d", i), nvidia, uint32(i)})
	}
	return nodes
}

// Caps returns nodes of capabilities, as MIG has them: 1 is config, 2 is monitor, then come those of the instances.
func Caps(minors ...uint32) []Node {
	var nodes []Node
	for _, m := range minors {
		nodes = append(nodes, Node{fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", m), caps, m})
	}
	return nodes
}

// IMEX returns the nodes of a number of IMEX channels.
func IMEX(count int) []Node {
	var nodes []Node
	for i := range count {
		nodes = append(nodes, Node{fmt.Sprintf("dev/nvidia-caps-imex-channels/channel%d", i), channels, uint32(i)})
	}
	return nodes
}

// DRI returns the nodes of a number of graphics cards: two for each.
func DRI(cards int) []Node {
	var nodes []Node
	for i := range cards {
		nodes = append(nodes, Node{fmt.Sprintf("dev/dri/card%d", i), drm, uint32(i)},
			Node{fmt.Sprintf("dev/dri/renderD%d", 128+i), drm, 128 + uint32(i)})
	}
	return nodes
}

// Make makes nodes below root, with mode 0666. It needs CAP_MKNOD.
func Make(root string, nodes ...Node) error {
	for _, n := range nodes {
		path := filepath.Join(root, n.Path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(n.Major, n.Minor))); err != nil {
			return fmt.Errorf("mknod %s: %w", path, err)
		}
		// The umask counts for mknod.
		if err := os.Chmod(path, 0o666); err != nil {
			return err
		}
	}
	return nil
}

// Remove removes nodes below root, those that are there, and the folders that only they were in.
func Remove(root string, nodes ...Node) error {
	for _, n := range nodes {
		path := filepath.Join(root, n.Path)
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if strings.Count(n.Path, "/") > 1 {
			os.Remove(filepath.Dir(path)) // stays as long as something else is in it
		}
	}
	return nil
}

// All returns every node there may be, to remove them.
func All() []Node {
	nodes := append(Headless(8), Modeset, KFD)
	nodes = append(nodes, Caps(1, 2, 3, 4, 5, 6, 7, 8)...)
	nodes = append(nodes, IMEX(8)...)
	return append(nodes, DRI(8)...)
}

// Modprobe returns a shell script in place of nvidia-modprobe(1): it makes those of nodes that are not there, and adds what it is
// called with to the file record, an absolute path.
func Modprobe(record string, nodes ...Node) string {
	var b strings.Builder
	fmt.Fprintf(&b, "#!/bin/sh -e\necho \"$@\" >>%s\n", record)
	for _, n := range nodes {
		fmt.Fprintf(&b, "[ -e /%s ] || { mkdir -p /%s; mknod -m 666 /%[1]s c %[3]d %d; }\n", n.Path, filepath.Dir(n.Path), n.Major, n.Minor)
	}
	return b.String()
}
