package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"berth/testdata/gpu"
	"berth/testdata/lab"
)

// GPU is what makes a lab host seem to have NVIDIA GPUs: all that their driver brings, but for the kernel's side of the
// device nodes. To open one fails with ENXIO, where it is allowed.
type GPU struct {
	Driver gpu.Driver
	Nodes  []gpu.Node
	// Makable are nodes that are not there, but that the host's nvidia-modprobe makes. It adds its arguments to ModprobeRecord.
	Makable []gpu.Node
	Module  string // version of the kernel module; default: the driver's
}

// ModprobeRecord is where the host's nvidia-modprobe writes what it was called with.
const ModprobeRecord = "/run/nvidia-modprobe"

// Install gives the host the GPUs in place of those it has, and package stubctk's program as the nvidia-ctk of its machines.
// The host must be up, and berth be installed in it.
func (g GPU) Install(ctx context.Context, h *lab.Host) error {
	if err := RemoveGPU(ctx, h); err != nil {
		return err
	}
	root := h.Root()
	if err := errors.Join(g.Driver.Install(root), gpu.Make(root, g.Nodes...)); err != nil {
		return err
	}
	module := g.Module
	if module == "" {
		module = g.Driver.Version
	}
	if len(g.Makable) > 0 {
		if err := write(filepath.Join(root, modprobe), []byte(gpu.Modprobe(ModprobeRecord, g.Makable...)), 0o755); err != nil {
			return err
		}
	}
	// Of a lab host's /sys only parts are the kernel's: /sys/module is not, and may be made.
	if err := write(filepath.Join(root, moduleVersion), []byte(module+"\n"), 0o644); err != nil {
		return err
	}
	for _, machine := range lab.Machines {
		if err := InstallToolkit(h.MachineRoot(machine)); err != nil {
			return err
		}
	}
	// Without -r, ldconfig takes links for linkers into the cache, too. /proc/devices is for DeviceAllow=char-nvidia*, which
	// systemd looks up there (systemd.resource-control(5)).
	return inHost(ctx, h, `ldconfig
		printf %s "$1" | sed '1r /dev/stdin' /proc/devices >/run/devices
		mount --bind /run/devices /proc/devices`, gpu.ProcDevices)
}

const (
	modprobe      = "usr/bin/nvidia-modprobe"
	moduleVersion = "sys/module/nvidia/version"
)

// WithdrawGPU takes the GPUs and their driver from the host, and leaves its machines as they are.
func WithdrawGPU(h *lab.Host) error {
	root := h.Root()
	return errors.Join(gpu.Remove(root, gpu.All()...), gpu.Uninstall(root), os.RemoveAll(filepath.Join(root, modprobe)),
		os.RemoveAll(filepath.Dir(filepath.Join(root, moduleVersion))))
}

// RemoveGPU takes from the host, and from its machines, what Install and berth put there.
func RemoveGPU(ctx context.Context, h *lab.Host) error {
	if _, err := os.Lstat(filepath.Join(h.Root(), "run/devices")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := WithdrawGPU(h); err != nil {
		return err
	}
	return inHost(ctx, h, `umount /proc/devices
		rm -f /run/devices "$1"
		shift
		for m; do
			cd "/var/lib/machines/$m"
			rm -rf usr/bin/nvidia-ctk usr/bin/nvidia-cdi-hook opt/nvidia-ctk* etc/stubctk
			find usr/lib usr/bin -lname '/run/host-nvidia/*' -delete
			ldconfig -r .
		done`, append([]string{ModprobeRecord}, lab.Machines...)...)
}

// InstallToolkit puts package stubctk's program into a machine's root file system, as /usr/bin/nvidia-ctk.
func InstallToolkit(root string) error {
	return withBuild(func(stage string) error {
		return run(exec.Command("cp", "--archive", filepath.Join(stage, "toolkit")+"/.", root))
	})
}

// buildToolkit makes the files of InstallToolkit below dir.
func buildToolkit(source, dir string) error {
	ctk := exec.Command("go", "build", "-C", source, "-ldflags=-s -w", "-o", filepath.Join(dir, "usr/bin/nvidia-ctk"), "./testdata/stubctk")
	ctk.Env = append(os.Environ(), "CGO_ENABLED=0")
	return errors.Join(run(ctk), write(filepath.Join(dir, "usr/bin/nvidia-cdi-hook"), []byte("#!/bin/sh\n"), 0o755))
}

// InstallRealToolkit puts NVIDIA's own nvidia-ctk and nvidia-cdi-hook into a machine's root file system, in place of package
// stubctk's, and beside them MockedCTK: module nvidiactk builds them. Where there is no C compiler, which that needs, the error
// is exec.ErrNotFound.
func InstallRealToolkit(root string) error {
	return withBuild(func(stage string) error {
		realOnce.Do(func() { realErr = buildRealToolkit(filepath.Join(stage, "real-toolkit")) })
		if realErr != nil {
			return realErr
		}
		return run(exec.Command("cp", "--archive", filepath.Join(stage, "real-toolkit")+"/.", root))
	})
}

// MockedCTK is a nvidia-ctk for which NVIDIA's mock of NVML answers, in the place of GPUs.
const MockedCTK = "/opt/nvidia-ctk-mocked"

var (
	realOnce sync.Once
	realErr  error
)

func buildRealToolkit(dir string) error {
	source, err := sourceDir()
	if err != nil {
		return err
	}
	cc, err := exec.Command("go", "env", "CC").Output()
	if err != nil {
		return err
	}
	if _, err := exec.LookPath(strings.TrimSpace(string(cc))); err != nil {
		return err
	}
	build := func(output, pkg string) error {
		cmd := exec.Command("go", "build", "-C", filepath.Join(source, "testdata/nvidiactk"), "-ldflags=-s -w", "-o", filepath.Join(dir, output), pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
		return run(cmd)
	}
	const toolkit = "github.com/NVIDIA/nvidia-container-toolkit/cmd/"
	return errors.Join(build("usr/bin/nvidia-ctk", toolkit+"nvidia-ctk"), build("usr/bin/nvidia-cdi-hook", toolkit+"nvidia-cdi-hook"),
		build(MockedCTK, "./mocked"))
}

// inHost runs a shell script in the host, args as $1 and so on.
func inHost(ctx context.Context, h *lab.Host, script string, args ...string) error {
	stdout, stderr, exit, err := h.Run(ctx, "sh", append([]string{"-euc", script, "sh"}, args...)...)
	if err != nil || exit != 0 {
		return fmt.Errorf("in %s: %s: exit status %d, error %v\n%s%s", h.Name(), script, exit, err, stdout, stderr)
	}
	return nil
}
