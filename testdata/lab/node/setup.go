// Package node puts berth into lab hosts, with all that two slots need to start: the programs and units as install.sh
// installs them, a goal state, a cluster's CA and a bootstrap token, and package stubkubelet's program as the machines'
// kubelet.
package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"berth/testdata/lab"
	"berth/testdata/pki"
	"berth/units"
)

// Goal is a goal state for the lab's two machines with Debian's containerd. Other tables may be put behind it, and keys
// that belong to no table before it.
const Goal = `[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
dns = ["10.96.0.10"]

[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"

[containerd]
binary = "/usr/bin/containerd"
runc = "/usr/sbin/runc"

[slot.a]
[slot.b]
`

// Prepare is Install and WriteGoal. As lab.Options.Prepare it makes a host whose first boot finds everything in place.
func Prepare(root, goal string) error {
	return errors.Join(Install(root), WriteGoal(root, goal))
}

// Install installs berth below root, a lab host's root file system, and a kubelet into its machines. In a host that is up
// already, what boot does is up to the caller: systemd-tmpfiles --create and systemctl daemon-reload.
//
// All hosts of all processes share one build, which is brought up to date once a process.
func Install(root string) error {
	return withBuild(func(stage string) error {
		if err := run(exec.Command("cp", "--archive", filepath.Join(stage, "host")+"/.", root)); err != nil {
			return err
		}
		for _, machine := range lab.Machines {
			machineRoot := filepath.Join(root, "var/lib/machines", machine)
			if err := run(exec.Command("cp", "--archive", filepath.Join(stage, "machine")+"/.", machineRoot)); err != nil {
				return err
			}
		}
		return nil
	})
}

// InstallMachines is Install without berth itself: a kubelet into the machines of root, and a cluster's CA and a bootstrap
// token into /etc/berth.
func InstallMachines(root string) error {
	err := withBuild(func(stage string) error {
		const shield = "etc/sysctl.d/90-berth.conf" // see leaveKernel
		errs := []error{run(exec.Command("install", "-D", filepath.Join(stage, "host", shield), filepath.Join(root, shield)))}
		for _, machine := range lab.Machines {
			machineRoot := filepath.Join(root, "var/lib/machines", machine)
			errs = append(errs, run(exec.Command("cp", "--archive", filepath.Join(stage, "machine")+"/.", machineRoot)))
		}
		return errors.Join(errs...)
	})
	return errors.Join(err, WriteCluster(root))
}

// Packages makes the .deb and the .rpm of a version, for this machine's architecture, in dir/build.
func Packages(dir, version string) error {
	source, err := sourceDir()
	if err != nil {
		return err
	}
	return packagesFrom(source, dir, version)
}

func packagesFrom(source, dir, version string) error {
	cmd := exec.Command(filepath.Join(source, "install.sh"), "packages")
	cmd.Env = append(os.Environ(), "OUT="+dir, "VERSION="+version, "GOARCH="+runtime.GOARCH, "MAINTAINER=The berth authors <berth@example.org>",
		"SOURCE_DATE_EPOCH=1700000000")
	return run(cmd)
}

// withBuild calls use with the folder that holds the shared build, which nobody changes meanwhile.
func withBuild(use func(stage string) error) error {
	stage := filepath.Join(lab.CacheDir(), "stage")
	lock, err := os.OpenFile(stage+".lock", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	buildOnce.Do(func() { buildErr = build(stage) })
	if buildErr != nil {
		return buildErr
	}
	return use(stage)
}

var (
	buildOnce sync.Once
	buildErr  error
)

// build makes stage/host and stage/machine, which are copied over the root file systems, and stage/toolkit, which InstallToolkit copies.
func build(stage string) error {
	source, err := sourceDir()
	if err != nil {
		return err
	}
	if err := os.RemoveAll(stage); err != nil {
		return err
	}
	host, machine := filepath.Join(stage, "host"), filepath.Join(stage, "machine")
	install := exec.Command(filepath.Join(source, "install.sh"), "install")
	install.Env = append(os.Environ(), "DESTDIR="+host, "OUT="+stage)
	kubelet := exec.Command("go", "build", "-C", filepath.Join(source, "testdata/stubkubelet"), "-ldflags=-s -w",
		"-o", filepath.Join(machine, "usr/local/bin/kubelet"))
	kubelet.Env = append(os.Environ(), "CGO_ENABLED=0")
	if err := errors.Join(run(install), run(kubelet), buildToolkit(source, filepath.Join(stage, "toolkit"))); err != nil {
		return err
	}
	return leaveKernel(host, machine)
}

// sourceDir is the folder of berth's source.
func sourceDir() (string, error) {
	gomod, err := exec.Command("go", "env", "GOMOD").Output()
	source := filepath.Dir(strings.TrimSpace(string(gomod)))
	if _, statErr := os.Stat(filepath.Join(source, "install.sh")); err != nil || statErr != nil {
		return "", fmt.Errorf("berth's source is not here (go env GOMOD: %q): run this below its folder", gomod)
	}
	return source, nil
}

// PretendKernel returns a script that makes a lab host see the kernel's settings as berth's sysctl.d would have them, which the lab leaves as
// the machine that it runs on has them; see leaveKernel. It is a file over each one: /run/kernel.panic and so on.
func PretendKernel() string {
	var script strings.Builder
	for _, f := range units.Files() {
		if path.Base(f.Path) != "90-berth.conf" {
			continue
		}
		for line := range strings.Lines(string(f.Content)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), " = ")
			if strings.HasPrefix(key, "vm.") || strings.HasPrefix(key, "kernel.") {
				fmt.Fprintf(&script, "echo %s >/run/%s; mount --bind /run/%[2]s /proc/sys/%s\n", value, key, strings.ReplaceAll(key, ".", "/"))
			}
		}
	}
	return script.String()
}

// leaveKernel keeps a lab host from changing what it shares with the machine that runs the lab: of sysctl.d only what
// belongs to a network name space is left, and the kubelet is told not to look at the rest.
func leaveKernel(host, machine string) error {
	const name = "90-berth.conf"
	all, err := os.ReadFile(filepath.Join(host, "usr/lib/sysctl.d", name))
	if err != nil {
		return err
	}
	var own bytes.Buffer
	for line := range bytes.Lines(all) {
		if bytes.HasPrefix(line, []byte("net.")) {
			// The minus: that a setting is missing (no br_netfilter) is no error (sysctl.d(5)).
			own.WriteString("-" + string(line))
		}
	}
	return errors.Join(
		write(filepath.Join(host, "etc/sysctl.d", name), own.Bytes(), 0o644),
		write(filepath.Join(machine, "etc/systemd/system/kubelet.service.d/lab.conf"),
			[]byte("[Service]\nEnvironment=STUB_SKIP_SYSCTL=1\n"), 0o644))
}

// WriteGoal is WriteCluster, and writes the goal state below root.
func WriteGoal(root, goal string) error {
	return errors.Join(write(filepath.Join(root, "etc/berth/goal.toml"), []byte(goal), 0o644), WriteCluster(root))
}

// WriteCluster writes the CA and the bootstrap token that Goal names below root.
func WriteCluster(root string) error {
	ca, err := pki.New("kubernetes")
	if err != nil {
		return err
	}
	dir := filepath.Join(root, "etc/berth")
	return errors.Join(
		write(filepath.Join(dir, "ca.crt"), []byte(ca.Certificate), 0o644),
		write(filepath.Join(dir, "bootstrap-token"), []byte("abcdef.0123456789abcdef\n"), 0o600))
}

func write(path string, content []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, mode)
}

// run runs a command; its output is part of the error.
func run(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return nil
}
