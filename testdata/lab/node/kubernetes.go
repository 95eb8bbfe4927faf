package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"berth/testdata/lab"
)

// KubeletVersions are the releases of Kubernetes whose kubelet berth supports, the last of each minor version, oldest first. An API
// server supports kubelets that are up to three minor versions older (https://kubernetes.io/releases/version-skew-policy/).
var KubeletVersions = []string{"v1.34.4", "v1.35.4", "v1.36.3", "v1.37.2"}

// Kubernetes returns the path of a program of Kubernetes, such as kubelet, of a release. It builds the program from Kubernetes' own
// Go module, unless the lab's cache has it.
func Kubernetes(ctx context.Context, version, program string) (string, error) {
	dir := filepath.Join(lab.CacheDir(), "kubernetes", version)
	binary := filepath.Join(dir, program)
	return binary, once(binary, func(out string) error {
		module := filepath.Join(dir, "module")
		if err := writeModule(ctx, module, version); err != nil {
			return err
		}
		build := exec.CommandContext(ctx, "go", "build", "-C", module, "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion="+version,
			"-o", out, "k8s.io/kubernetes/cmd/"+program)
		build.Env = goEnv()
		return run(build)
	})
}

// goEnv is the environment of a build in a module that has no go.sum yet.
func goEnv() []string {
	return append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod -buildvcs=false")
}

// writeModule makes a Go module in dir that needs nothing but a release of k8s.io/kubernetes, which cannot be built from outside of its
// own repository without help: there, the modules of its staging folder take the place of others with no version. One module for all
// releases is not possible.
func writeModule(ctx context.Context, dir, version string) error {
	list := exec.CommandContext(ctx, "go", "mod", "download", "-json", "k8s.io/kubernetes@"+version)
	list.Env, list.Dir = goEnv(), os.TempDir()
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(list.Args, " "), err, out)
	}
	var info struct{ GoMod string }
	if err := json.Unmarshal(out, &info); err != nil {
		return err
	}
	text, err := os.ReadFile(info.GoMod)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "module kubernetes\n\nrequire k8s.io/kubernetes %s\n\n", version)
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 2 && (f[0] == "go" || f[0] == "godebug"):
			// The behaviour that the release was tested with.
			fmt.Fprintln(&b, f[0], f[1])
		case len(f) >= 2 && f[1] == "v0.0.0":
			fmt.Fprintf(&b, "replace %s => %[1]s v0%s\n", f[0], strings.TrimPrefix(version, "v1"))
		}
	}
	return write(filepath.Join(dir, "go.mod"), b.Bytes(), 0o644)
}

// debianPackages are Debian's packages of a control plane's other programs, of CNI plugins, and of what runs in a pod. kubectl must be about as new as the
// API server, and with Kubernetes' newest release that means those of Debian's newest; they need no library but libc, and no new one.
var debianPackages = []string{"etcd-server", "kubectl", "containernetworking-plugins", "busybox-static"}

// DebianPackages returns a folder in the lab's cache into which the files of debianPackages are unpacked.
func DebianPackages(ctx context.Context) (string, error) {
	suite := lab.Suites[len(lab.Suites)-1]
	dir := filepath.Join(lab.CacheDir(), "packages-"+suite)
	return dir, once(dir, func(out string) error {
		// apt with lists and settings of its own: this machine may be of another release.
		apt := out + ".apt"
		defer os.RemoveAll(apt)
		for _, sub := range []string{"state/lists/partial", "cache/archives/partial", "debs"} {
			if err := os.MkdirAll(filepath.Join(apt, sub), 0o755); err != nil {
				return err
			}
		}
		source := fmt.Sprintf("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", lab.Mirror(ctx), suite)
		if err := write(filepath.Join(apt, "sources.list"), []byte(source), 0o644); err != nil {
			return err
		}
		get := func(args ...string) error {
			cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "Dir::Etc::SourceList=" + apt + "/sources.list",
				"-o", "Dir::Etc::SourceParts=-", "-o", "Dir::State=" + apt + "/state", "-o", "Dir::State::Status=/dev/null",
				"-o", "Dir::Cache=" + apt + "/cache", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none",
				// As for a base of the lab: see build.sh.
				"-o", "Acquire::Check-Valid-Until=false"}, args...)...)
			cmd.Dir = filepath.Join(apt, "debs")
			return run(cmd)
		}
		if err := get("update"); err != nil {
			return err
		}
		if err := get(append([]string{"download"}, debianPackages...)...); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(apt, "debs/*.deb"))
		for _, deb := range debs {
			if err := run(exec.CommandContext(ctx, "dpkg-deb", "--extract", deb, out)); err != nil {
				return err
			}
		}
		return err
	})
}

// once has build make a file or folder under another name, unless it is there already or another process makes it meanwhile.
func once(path string, build func(out string) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	out := path + ".building"
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	if err := build(out); err != nil {
		return err
	}
	return os.Rename(out, path)
}
