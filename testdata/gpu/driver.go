// Package gpu puts a GPU that does not exist into a root file system, for unit tests as for lab hosts: a driver's libraries
// and tools, as NVIDIA's installer leaves them, and device nodes. Libraries are real ELF files, known to the real ldconfig.
package gpu

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Driver is the user's part of an NVIDIA driver.
type Driver struct {
	// Version is that of the driver, as 550.54.15. The libraries' files end in it.
	Version string
	// Libraries is how many there are. The first are real ones by name, libcuda and libnvidia-ml before all others; the rest
	// is invented.
	Libraries int
	// Folders are where they are, relative to the root: dealt out in turn, so libcuda is in the first and libnvidia-ml in the
	// second. Default: Debian's folder for Machine. Folders that ldconfig does not know by itself are made known to it.
	Folders []string
	// Machine is what the libraries are for; default: what this process runs on. ldconfig takes no other.
	Machine elf.Machine
	// Tools are the programs in usr/bin; default: Tools.
	Tools []string
}

// Tools are the programs of a driver. The stand-ins print their name, their version and what they are called with.
var Tools = []string{"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}

// IMEXTools come in a package of their own.
var IMEXTools = []string{"nvidia-imex", "nvidia-imex-ctl"}

// MultiarchFolder is Debian's folder of libraries for a machine, and what NVIDIA's own tools use in containers.
func MultiarchFolder(machine elf.Machine) string {
	if machine == elf.EM_AARCH64 {
		return "usr/lib/aarch64-linux-gnu"
	}
	return "usr/lib/x86_64-linux-gnu"
}

// named are libraries of driver 550 with their version in the soname; "" where the soname is the file's name.
var named = []struct{ name, soname string }{
	{"libcuda", "1"}, {"libnvidia-ml", "1"}, {"libnvidia-ptxjitcompiler", "1"}, {"libnvidia-nvvm", "4"}, {"libnvidia-cfg", "1"},
	{"libcudadebugger", "1"}, {"libnvidia-opencl", "1"}, {"libnvidia-glcore", ""}, {"libnvidia-eglcore", ""}, {"libnvidia-glsi", ""},
	{"libnvidia-tls", ""}, {"libnvidia-gpucomp", ""}, {"libnvidia-glvkspirv", ""}, {"libnvidia-rtcore", ""}, {"libEGL_nvidia", "0"},
	{"libGLX_nvidia", "0"}, {"libGLESv1_CM_nvidia", "1"}, {"libGLESv2_nvidia", "2"}, {"libnvcuvid", "1"}, {"libnvoptix", "1"},
	{"libvdpau_nvidia", "1"}, {"libnvidia-encode", "1"}, {"libnvidia-fbc", "1"}, {"libnvidia-opticalflow", "1"},
	{"libnvidia-ngx", "1"}, {"libnvidia-allocator", "1"},
}

// A Lib is one library of a driver.
type Lib struct {
	Soname string // as libcuda.so.1
	File   string // relative to the root, as usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15
}

// Libs returns the driver's libraries.
func (d Driver) Libs() []Lib {
	folders := d.folders()
	var libs []Lib
	for i := range d.Libraries {
		name, soname := fmt.Sprintf("libnvidia-fake%03d", i), "1"
		if i < len(named) {
			name, soname = named[i].name, named[i].soname
		} else if i%2 == 0 {
			soname = ""
		}
		if soname == "" {
			soname = d.Version
		}
		libs = append(libs, Lib{name + ".so." + soname, path.Join(folders[i%len(folders)], name+".so."+d.Version)})
	}
	return libs
}

func (d Driver) machine() elf.Machine {
	switch {
	case d.Machine != elf.EM_NONE:
		return d.Machine
	case runtime.GOARCH == "arm64":
		return elf.EM_AARCH64
	}
	return elf.EM_X86_64
}

func (d Driver) folders() []string {
	if len(d.Folders) == 0 {
		return []string{MultiarchFolder(d.machine())}
	}
	return d.Folders
}

const (
	// record lists what is installed, where NVIDIA's installer does so, too.
	record = "var/lib/nvidia/log"
	// search makes folders known to ldconfig.
	search = "etc/ld.so.conf.d/nvidia.conf"
)

// Install installs the driver below root in place of one that is there, and has `ldconfig -r` make its links and its cache.
// What is needed of a system that is not there, as in an empty folder, is made too. Links for linkers, as libcuda.so, are
// in the cache only after an ldconfig without -r has run in the system.
func (d Driver) Install(root string) error {
	if err := remove(root); err != nil {
		return err
	}
	var installed []string
	add := func(name string, content []byte, mode os.FileMode) error {
		installed = append(installed, name)
		return write(filepath.Join(root, name), content, mode)
	}
	for _, lib := range d.Libs() {
		name := path.Base(lib.File)
		soname := path.Join(path.Dir(lib.File), lib.Soname)
		var needed []string
		if lib.Soname == "libnvidia-ml.so.1" {
			// So that it cannot be loaded: nvidia-ctk then says that there is no NVML, instead of dying of a symbol that is missing.
			needed = []string{"libnvidia-not-there.so.1"}
		}
		if err := add(lib.File, Library(lib.Soname, d.machine(), needed...), 0o755); err != nil {
			return err
		}
		if lib.Soname == name {
			continue
		}
		installed = append(installed, soname) // made by ldconfig
		if base, _, _ := strings.Cut(lib.Soname, ".so."); slices.Contains([]string{"libcuda", "libnvidia-ml", "libnvcuvid"}, base) {
			link := path.Join(path.Dir(lib.File), base+".so")
			installed = append(installed, link)
			if err := os.Symlink(lib.Soname, filepath.Join(root, link)); err != nil {
				return err
			}
		}
	}
	tools := d.Tools
	if tools == nil {
		tools = Tools
	}
	for _, tool := range tools {
		script := fmt.Sprintf("#!/bin/sh\necho %s %s \"$@\"\n", tool, d.Version)
		if err := add(path.Join("usr/bin", tool), []byte(script), 0o755); err != nil {
			return err
		}
	}
	for _, folder := range d.folders() {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			return err
		}
	}
	if folders := d.Folders; len(folders) > 0 {
		if err := add(search, []byte("/"+strings.Join(folders, "\n/")+"\n"), 0o644); err != nil {
			return err
		}
	}
	if err := write(filepath.Join(root, record), []byte(strings.Join(installed, "\n")+"\n"), 0o644); err != nil {
		return err
	}
	return ldconfig(root)
}

// Uninstall takes away the driver below root, if there is one, and has ldconfig forget it.
func Uninstall(root string) error {
	return errors.Join(remove(root), ldconfig(root))
}

// remove removes the files of a driver, and no folder.
func remove(root string) error {
	list, err := os.ReadFile(filepath.Join(root, record))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, name := range append(strings.Fields(string(list)), record) {
		if err := os.Remove(filepath.Join(root, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// ldconfig has the real ldconfig of this machine make links and cache below root.
func ldconfig(root string) error {
	conf := filepath.Join(root, "etc/ld.so.conf")
	if _, err := os.Lstat(conf); errors.Is(err, fs.ErrNotExist) {
		known := "include /etc/ld.so.conf.d/*.conf\n/" + MultiarchFolder(elf.EM_X86_64) + "\n/" + MultiarchFolder(elf.EM_AARCH64) + "\n"
		if err := write(conf, []byte(known), 0o644); err != nil {
			return err
		}
	}
	cmd := exec.Command("/sbin/ldconfig", "-r", root)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

func write(path string, content []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, mode)
}
