package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Suites are the Debian releases a lab host can be built from: systemd 252, 257 and 262.
var Suites = []string{"bookworm", "trixie", "forky"}

// The packages of the two root file systems of a base. mount is named because it is not "required" in every suite.
var (
	commonPackages  = []string{"systemd", "systemd-sysv", "dbus", "kmod", "iproute2", "procps", "mount"}
	hostPackages    = []string{"systemd-container"}
	machinePackages = []string{"containerd", "runc"}
)

// defaultMirror is where Debian comes from when apt on this machine names no Debian mirror.
const defaultMirror = "http://deb.debian.org/debian"

// buildScript makes a base; one word, its argument, chooses the step.
//
//go:embed build.sh
var buildScript string

// CacheDir is where bases are kept: $BERTH_LAB_CACHE, or /var/cache/berth-lab.
func CacheDir() string {
	if dir, err := filepath.Abs(os.Getenv("BERTH_LAB_CACHE")); err == nil && os.Getenv("BERTH_LAB_CACHE") != "" {
		return dir
	}
	return "/var/cache/berth-lab"
}

// baseDir is where the base of a suite is once it is complete. All that decides what is in a base is hashed into the
// name, so that a changed package list or script gives a new base.
func baseDir(cache, suite string) string {
	sum := sha256.Sum256([]byte(strings.Join(slices.Concat(commonPackages, []string{"|"}, hostPackages, []string{"|"},
		machinePackages, []string{"|", buildScript}), " ")))
	return filepath.Join(cache, fmt.Sprintf("%s-%x", suite, sum[:6]))
}

// Build makes the base of a suite, the root file systems that every lab host of that suite begins from, unless it is
// there. It needs root and a Debian mirror, and installs what it needs on this machine if that is missing. Two builds
// of one suite wait for each other; a build that is killed leaves nothing that is taken as a base. log gets the
// progress, a line a call.
func Build(ctx context.Context, suite string, log func(format string, args ...any)) error {
	if !slices.Contains(Suites, suite) {
		return fmt.Errorf("suite %q: want one of %s", suite, strings.Join(Suites, ", "))
	}
	if os.Geteuid() != 0 {
		return errors.New("lab: not root: mounts, cgroups and systemd-nspawn need it")
	}
	cache := CacheDir()
	base := baseDir(cache, suite)
	if exists(base) {
		return nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	if err := installPrerequisites(ctx, cache, log); err != nil {
		return err
	}
	lock, err := lockFile(ctx, filepath.Join(cache, suite+".lock"),
		func() { log("%s: another build is running: waiting", suite) })
	if err != nil {
		return err
	}
	defer lock.Close()
	if exists(base) {
		return nil
	}
	work := filepath.Join(cache, ".building-"+suite)
	if err := os.RemoveAll(work); err != nil { // a build that was killed left it
		return err
	}
	if err := os.MkdirAll(filepath.Join(cache, "debs", suite), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(work, 0o755); err != nil {
		return err
	}
	logPath := filepath.Join(cache, suite+".log")
	logFile, err := os.Create(logPath)
	if err != nil {
		return err
	}
	defer logFile.Close()

	env := append(os.Environ(),
		"SUITE="+suite, "DIR="+work, "DEBS="+filepath.Join(cache, "debs", suite), "MIRROR="+Mirror(ctx),
		"COMMON="+strings.Join(commonPackages, " "), "HOST="+strings.Join(hostPackages, " "),
		"MACHINE="+strings.Join(machinePackages, " "), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8",
		"PATH="+searchPath, "TMPDIR=/tmp")
	begin := time.Now()
	for _, step := range []string{"debootstrap", "packages", "configure"} {
		log("%s: %s ...", suite, step)
		start := time.Now()
		// In a PID name space of its own, no process of a build outlives it, and in its mount name space no mount does.
		cmd := exec.CommandContext(ctx, "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
			"--mount-proc", "sh", "-eu", "-c", buildScript, "build.sh", step)
		cmd.Env, cmd.Stdout, cmd.Stderr = env, logFile, logFile
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		if err := runOnOneThread(cmd); err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("%s: %s: %w", suite, step, context.Cause(ctx))
			} else {
				err = fmt.Errorf("%s: %s: %w; the end of %s:\n%s", suite, step, err, logPath, tail(logPath, 20))
			}
			return errors.Join(err, os.RemoveAll(work))
		}
		log("%s: %s: %.1f s", suite, step, time.Since(start).Seconds())
	}
	if err := errors.Join(os.Rename(work, base), removeOld(cache, suite, base)); err != nil {
		return err
	}
	log("%s: built in %.1f s: %s", suite, time.Since(begin).Seconds(), base)
	return nil
}

// runOnOneThread runs cmd from a thread that lives as long as cmd does: the kernel sends Pdeathsig when the thread
// ends, not the process (prctl(2), PR_SET_PDEATHSIG).
func runOnOneThread(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// removeOld removes bases of a suite that were built from other package lists, save those that a lab host runs on.
func removeOld(cache, suite, base string) error {
	old, _ := filepath.Glob(filepath.Join(cache, suite+"-*"))
	for _, dir := range old {
		if dir == base {
			continue
		}
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// prerequisites are the files a lab needs on this machine, by the Debian package that has them.
var prerequisites = map[string]string{
	"systemd-container":      "/usr/bin/systemd-nspawn",
	"debootstrap":            "/usr/sbin/debootstrap",
	"debian-archive-keyring": "/usr/share/keyrings/debian-archive-keyring.gpg",
	"util-linux":             "/usr/bin/nsenter",
}

func installPrerequisites(ctx context.Context, cache string, log func(string, ...any)) error {
	lock, err := lockFile(ctx, filepath.Join(cache, "apt.lock"), func() {})
	if err != nil {
		return err
	}
	defer lock.Close()
	var missing []string
	for name, file := range prerequisites {
		if !exists(file) {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	log("installing %s", strings.Join(missing, " "))
	install := append([]string{"install", "-y", "--no-install-recommends"}, missing...)
	// The package lists may be absent or old; that another repository cannot be reached must not stop us.
	var out []byte
	for _, args := range [][]string{install, {"update"}, install} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		out, err = cmd.CombinedOutput()
		if err == nil && args[0] == "install" {
			return nil
		}
	}
	return fmt.Errorf("packages %s are missing and apt-get cannot install them: %w\n%s",
		strings.Join(missing, " "), err, out)
}

// Mirror asks apt which Debian mirror this machine uses.
func Mirror(ctx context.Context) string {
	// No apt, no answer: then the default.
	out, _ := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)",
		"Created-By: Packages").Output()
	return debianMirror(string(out))
}

// debianMirror picks, from repository URIs one a line, the first that debootstrap can use and that has all of Debian:
// archives of single releases (debian-security) and other vendors' have other paths.
func debianMirror(uris string) string {
	for line := range strings.Lines(uris) {
		u, err := url.Parse(strings.TrimRight(line, "/\n"))
		if err == nil && (u.Scheme == "http" || u.Scheme == "https") && strings.HasSuffix(u.Path, "/debian") {
			return u.String()
		}
	}
	return defaultMirror
}

// lockFile waits for the exclusive lock of a file, which it makes if need be; closing the file gives the lock up.
// waiting is called if the lock is not free.
func lockFile(ctx context.Context, path string, waiting func()) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		return f, nil
	}
	waiting()
	return f, awaitLock(ctx, f)
}

// awaitLock waits for the exclusive lock of f. If ctx ends first, f must not be used any more.
func awaitLock(ctx context.Context, f *os.File) error {
	done := make(chan error, 1)
	go func() { done <- retry(func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX) }) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		go func() { // flock(2) cannot be called off
			<-done
			f.Close()
		}()
		return context.Cause(ctx)
	}
}

// retry calls f again as long as a signal interrupts it.
func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// tail returns the last n lines of a file, for error messages.
func tail(path string, n int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimRight(data, "\n"), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-n):], []byte("\n")))
}
