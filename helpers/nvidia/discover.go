package nvidia

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path"
	"slices"
	"strings"

	"berth/generator/file"
)

// tools are the driver's programs that containers may be given, as nvidia-ctk looks for them. nvidia-modprobe is not among
// them: the host loads its modules itself.
var tools = []string{
	"nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-imex", "nvidia-imex-ctl",
	"nvidia-persistenced", "nvidia-smi",
}

// textLimit bounds what is read of a file of proc(5) or sysfs, where all that is looked for is a line.
const textLimit = 64 << 10

// programFolders are where programs are, on a host or in a machine, relative to its root.
var programFolders = []string{"usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "bin", "sbin"}

// sockets are folders of the sockets of nvidia-persistenced and nvidia-fabricmanager. The folder is bound, as a daemon makes
// a new socket whenever it starts.
var sockets = []string{"/run/nvidia-fabricmanager", "/run/nvidia-persistenced"}

// Expected tells whether the host has an NVIDIA GPU, or seems to have one whose driver has not made its nodes yet: the control
// node or the module is there, or the driver's programs and a display device of NVIDIA.
func Expected(root *file.Root) bool {
	if Present(root) || root.Exists("/sys/module/nvidia") {
		return true
	}
	if program(root, "nvidia-modprobe") == "" && program(root, "nvidia-smi") == "" {
		return false
	}
	devices, _ := root.ReadDir("/sys/bus/pci/devices")
	return slices.ContainsFunc(devices, func(d fs.DirEntry) bool {
		dir := path.Join("/sys/bus/pci/devices", d.Name())
		// Class 0x03: display controller (PCI Code and ID Assignment Specification).
		return strings.TrimSpace(root.Text(dir+"/vendor", textLimit)) == "0x10de" &&
			strings.HasPrefix(root.Text(dir+"/class", textLimit), "0x03")
	})
}

// Present tells whether the driver's control node is there.
func Present(root *file.Root) bool { return root.Exists(Control) }

// Discover finds the driver of the host whose root folder is root, for a machine of architecture arch, in the words of GOARCH.
// That something is missing is no error: see Missing.
func Discover(ctx context.Context, root *file.Root, arch string) (*Driver, error) {
	// The cache, not the folders, decides what a program on the host would get. -r: of this root.
	cmd := exec.CommandContext(ctx, "ldconfig", "-r", root.Name(), "-p")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cache, err := cmd.Output()
	if err != nil && root.Exists("/etc/ld.so.cache") {
		return nil, fmt.Errorf("the host's libraries: ldconfig -p: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	d := &Driver{Version: strings.TrimSpace(root.Text("/sys/module/nvidia/version", textLimit))}
	found := map[string]string{}
	for _, l := range parseCache(string(cache), arch) {
		file, err := root.Resolve(l.Path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since the cache was made
		} else if err != nil {
			return nil, fmt.Errorf("the host's library %s: %w", l.Name, err)
		}
		for _, name := range []string{l.Name, path.Base(file)} {
			if _, taken := found[name]; !taken { // the linker takes the first, too
				found[name] = file
				d.Libraries = append(d.Libraries, Library{name, file})
			}
		}
		d.Folders = append(d.Folders, path.Dir(file))
	}
	slices.SortFunc(d.Libraries, func(a, b Library) int { return strings.Compare(a.Name, b.Name) })
	slices.Sort(d.Folders)
	d.Folders = slices.Compact(d.Folders)
	for _, name := range tools {
		if file := program(root, name); file != "" {
			d.Tools = append(d.Tools, Tool{name, file})
		}
	}
	for _, dir := range sockets {
		if info, err := root.Stat(dir); err == nil && info.IsDir() {
			d.Sockets = append(d.Sockets, dir)
		}
	}
	return d, nil
}

// libraries are how the names of the driver's libraries begin. "libcuda." and not "libcuda": libcudart and libcudnn are not the
// driver's.
var libraries = []string{
	"libnvidia-", "libcuda.", "libcudadebugger.", "libEGL_nvidia.", "libGLX_nvidia.", "libGLESv1_CM_nvidia.", "libGLESv2_nvidia.",
	"libnvcuvid.", "libnvoptix.", "libvdpau_nvidia.",
}

// toolkit is the one of these that is not the driver's but the container toolkit's, which a machine has of its own.
const toolkit = "libnvidia-container"

// architectures are ldconfig's words for an architecture whose libraries are looked for, by GOARCH.
var architectures = map[string]string{"amd64": "x86-64", "arm64": "AArch64"}

// parseCache returns the driver's libraries out of what "ldconfig -p" printed, the first of each name. A line is
//
//	libcuda.so.1 (libc6,x86-64, hwcap: "x86-64-v3") => /usr/lib/x86_64-linux-gnu/libcuda.so.1
func parseCache(text, arch string) []Library {
	var found []Library
	for line := range strings.Lines(text) {
		entry, file, ok := strings.Cut(strings.TrimSpace(line), " => ")
		name, flags, ok2 := strings.Cut(entry, " (")
		if !ok || !ok2 || !path.IsAbs(file) || strings.Contains(name, "/") {
			continue
		}
		isFlag := func(flag string) bool { return strings.EqualFold(strings.TrimSpace(flag), architectures[arch]) }
		if !slices.ContainsFunc(strings.Split(strings.TrimSuffix(flags, ")"), ","), isFlag) {
			continue
		}
		isDrivers := slices.ContainsFunc(libraries, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
		again := slices.ContainsFunc(found, func(l Library) bool { return l.Name == name })
		if isDrivers && !again && !strings.HasPrefix(name, toolkit) {
			found = append(found, Library{name, path.Clean(file)})
		}
	}
	return found
}

// program returns where a program of the host is, with links resolved; empty: it is not there.
func program(root *file.Root, name string) string {
	for _, dir := range programFolders {
		file := path.Join(dir, name)
		if !root.IsProgram(file) {
			continue
		}
		if resolved, err := root.Resolve(file); err == nil {
			return resolved
		}
	}
	return ""
}
