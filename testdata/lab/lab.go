// Package lab makes real systemd hosts for tests and for trying things out. A lab host is a systemd-nspawn container
// that boots the Debian release asked for, with the systemd of that release, in a second or two. In it node-a and
// node-b have root file systems under /var/lib/machines, with systemd, containerd and runc, ready to be started by the
// host's own systemd-nspawn@.service.
//
// The root file systems are built once (Build) and kept in CacheDir. A host runs on an overlay over them that is thrown
// away, in mount, PID and network name spaces and a cgroup of its own; so any number may run at once. It needs root, a
// Debian-like machine and Linux 5.14; whether PID 1 of that machine is systemd does not matter. When the process that
// started a host ends, for whatever reason, the host goes too.
//
// The go command's ./... leaves out testdata: name this package to test it, go test ./testdata/lab.
//
// What a lab host does not have: a kernel of its own (sysctls below vm and kernel are those of the machine that runs
// the tests), modules, devices, and any network but loopback. /dev/kmsg is the machine's.
package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Machines are the machines that have a root file system in every host.
var Machines = []string{"node-a", "node-b"}

// searchPath is $PATH of what runs in a host.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"

// bootTime bounds one boot or shutdown if the context has no deadline.
const bootTime = 2 * time.Minute

// Options choose a host. Only Suite is needed.
type Options struct {
	Suite string // one of Suites
	Name  string // host name; default: one that no other host has
	// NoKmsg leaves out /dev/kmsg, which real hosts have and containers have not.
	NoKmsg bool
	// Prepare, if not nil, changes the root file system before the first boot; root is where it can be reached.
	Prepare func(root string) error
	// Degraded accepts a host in which units failed during boot; otherwise that is an error.
	Degraded bool
	// Log gets the progress of a build, if one is needed; default: standard error.
	Log func(format string, args ...any)
}

// Host is a lab host. Its methods may be called from several goroutines.
type Host struct {
	opts  Options
	leash *net.UnixConn // nil for a host that another process started
	ended chan struct{} // closed when the supervisor has ended

	mu      sync.Mutex
	state   state
	changed chan struct{} // closed when state changes
}

var count atomic.Int64

// namePattern is what systemd takes as a machine's name, without dots (hostname_is_valid in systemd's source).
var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Start boots a host and returns when its systemd has finished booting. It builds the base of the suite if there is
// none. The host ends with Stop, or with this process.
func Start(ctx context.Context, opts Options) (*Host, error) {
	if opts.Log == nil {
		opts.Log = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	}
	if opts.Name == "" {
		opts.Name = fmt.Sprintf("lab-%d-%d", os.Getpid(), count.Add(1))
	}
	if !namePattern.MatchString(opts.Name) {
		return nil, fmt.Errorf("name %q: want lower-case letters, digits and inner dashes, at most 63", opts.Name)
	}
	if err := Build(ctx, opts.Suite, opts.Log); err != nil {
		return nil, err
	}
	h, err := startSupervisor(ctx, opts)
	if err != nil {
		return nil, err
	}
	err = h.await(ctx, func(s state) bool { return s.Phase == halted })
	if err == nil && opts.Prepare != nil {
		err = opts.Prepare(h.Root())
	}
	if err == nil {
		err = h.Boot(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lab host %s: %w", opts.Name, err), h.Stop())
	}
	return h, nil
}

// runDir holds, for each host, NAME.lock (locked as long as its supervisor lives) and NAME.json (its state).
func runDir(cache string) string { return filepath.Join(cache, "run") }

func cgroupName(name string) string { return "berth-lab-" + name }

func suiteOf(base string) string {
	suite, _, _ := strings.Cut(filepath.Base(base), "-")
	return suite
}

func startSupervisor(ctx context.Context, opts Options) (*Host, error) {
	run := runDir(CacheDir())
	if err := os.MkdirAll(run, 0o755); err != nil {
		return nil, err
	}
	lock, err := claimName(ctx, run, opts.Name)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	base := baseDir(CacheDir(), opts.Suite)
	dir, err := os.Open(base)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%s is being removed: %w", base, err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "leash"), os.NewFile(uintptr(fds[1]), "leash")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	spec, err := json.Marshal(spec{Name: opts.Name, Base: base, Run: run, Kmsg: !opts.NoKmsg})
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"berth-lab " + opts.Name}
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + searchPath, supervisorEnv + "=" + string(spec)}
	cmd.ExtraFiles = []*os.File{theirs, lock, dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Unshareflags: unix.CLONE_NEWNS}
	if err := cmd.Start(); err != nil {
		conn.Close()
		return nil, fmt.Errorf("supervisor: %w", err)
	}
	h := &Host{opts: opts, leash: conn.(*net.UnixConn), ended: make(chan struct{}), changed: make(chan struct{})}
	h.state.Supervisor = cmd.Process.Pid
	go h.follow(cmd)
	return h, nil
}

// follow keeps h.state up to date until the supervisor ends.
func (h *Host) follow(cmd *exec.Cmd) {
	defer close(h.ended)
	for in := json.NewDecoder(h.leash); ; {
		var s state
		if err := in.Decode(&s); err != nil {
			break
		}
		h.setState(s)
	}
	err := cmd.Wait()
	s := h.get()
	if s.Phase != failed {
		s.Phase, s.Leader, s.Error = failed, 0, fmt.Sprintf("the supervisor ended (%v)", errors.Join(err))
		h.setState(s)
	}
}

func (h *Host) setState(s state) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state = s
	close(h.changed)
	h.changed = make(chan struct{})
}

func (h *Host) get() state {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}

// await returns when the host is in a state that is wanted, or failed.
func (h *Host) await(ctx context.Context, wanted func(state) bool) error {
	for {
		h.mu.Lock()
		s, changed := h.state, h.changed
		h.mu.Unlock()
		switch {
		case s.Phase == failed:
			return errors.New(s.Error)
		case s.Phase != "" && wanted(s):
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := context.Cause(ctx)
			if errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("%w: the host is still %s; the end of its console:\n%s", err, s.Phase, h.console())
			}
			return err
		}
	}
}

// ours tells whether this process started the host: no other hears of its boots.
func (h *Host) ours(op string) error {
	if h.leash == nil {
		return fmt.Errorf("%s: only the process that started host %s can do this", op, h.Name())
	}
	return nil
}

func (h *Host) request(op string) error {
	if err := h.ours(op); err != nil {
		return err
	}
	return json.NewEncoder(h.leash).Encode(op)
}

// Boot boots a host that was shut down, with all that was written to its root file system. It returns when systemd has
// finished booting; that units failed is an error unless Options.Degraded.
func (h *Host) Boot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	if err := h.request(opBoot); err != nil {
		return err
	}
	return h.awaitBoot(ctx, h.get().Boot+1)
}

func (h *Host) awaitBoot(ctx context.Context, boot int) error {
	if err := h.await(ctx, func(s state) bool { return s.Phase == up && s.Boot >= boot }); err != nil {
		return err
	}
	state, stderr, _, err := h.Run(ctx, "systemctl", "is-system-running", "--wait")
	switch state = strings.TrimSpace(state); {
	case state == "stopping": // one that is still to end (seen once, with 257): nothing tells of that moment
		select {
		case <-time.After(100 * time.Millisecond):
			return h.awaitBoot(ctx, boot)
		case <-ctx.Done():
			return ctx.Err()
		}
	case err != nil:
		return fmt.Errorf("%w; the end of its console:\n%s", err, h.console())
	case state == "running", state == "degraded" && h.opts.Degraded:
		return nil
	}
	units, _, _, err := h.Run(ctx, "systemctl", "--failed", "--no-legend", "--plain")
	return errors.Join(err,
		fmt.Errorf("the host is %q after boot, want running; failed units:\n%s%s", state, units, stderr))
}

// Shutdown powers the host off in order, as `systemctl poweroff` does, and returns when it is off. Its files stay; Boot
// boots it again.
func (h *Host) Shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	if err := h.ours("shutdown"); err != nil {
		return err
	}
	// The host may end before systemctl returns: what counts is that it ends.
	h.Run(ctx, "systemctl", "poweroff")
	return h.await(ctx, func(s state) bool { return s.Phase == halted })
}

// Reboot reboots the host in order and returns when systemd has finished booting, as Boot does.
func (h *Host) Reboot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	if err := h.ours("reboot"); err != nil {
		return err
	}
	next := h.get().Boot + 1
	h.Run(ctx, "systemctl", "reboot")
	return h.awaitBoot(ctx, next)
}

// Crash ends the host at once, as a power failure does, and returns when it is off. Its files stay; Boot boots it
// again.
func (h *Host) Crash(ctx context.Context) error {
	if err := h.request(opKill); err != nil {
		return err
	}
	return h.await(ctx, func(s state) bool { return s.Phase == halted })
}

// Stop ends the host at once and throws it away. A second call does nothing.
func (h *Host) Stop() error {
	if h.leash == nil {
		return Down(context.Background(), h.get().Name)
	}
	// Not Close: the last state, with the error of the end, is still to be read.
	h.leash.CloseWrite()
	<-h.ended
	h.leash.Close()
	if exists(statePath(runDir(CacheDir()), h.opts.Name)) {
		return fmt.Errorf("host %s did not end in order: %s", h.opts.Name, h.get().Error)
	}
	return nil
}

// Detach lets the host live on after this process, until Down or until it is powered off.
func (h *Host) Detach() error { return h.request(opDetach) }

// Name is the host's name.
func (h *Host) Name() string { return h.get().Name }

// Suite is the Debian release that the host runs.
func (h *Host) Suite() string { return h.get().Suite }

// Leader is the process id of the host's PID 1, 0 while it is shut down.
func (h *Host) Leader() int { return h.get().Leader }

// Root is where the host's root file system can be read and written from this process: with all that is mounted in the
// host while it is up, without /run, /dev and the like while it is shut down. It changes with each boot.
func (h *Host) Root() string {
	s := h.get()
	if s.Leader != 0 {
		return fmt.Sprintf("/proc/%d/root", s.Leader)
	}
	return fmt.Sprintf("/proc/%d/root%s", s.Supervisor, rootDir)
}

// MachineRoot is where the root file system of a machine (node-a) can be read and written from this process.
func (h *Host) MachineRoot(machine string) string {
	return filepath.Join(h.Root(), machinePath(machine))
}

func machinePath(machine string) string { return filepath.Join("/var/lib/machines", machine) }

func (h *Host) console() string {
	return tail(fmt.Sprintf("/proc/%d/root%s", h.get().Supervisor, consoleLog), 30)
}

// Command prepares a command to run in the host, as root and in all of the host's name spaces, with a minimal
// environment. The caller may set what it reads and writes. Ending ctx kills it.
func (h *Host) Command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	leader := h.Leader()
	if leader == 0 {
		return nil, fmt.Errorf("%s: host %s is not up", name, h.Name())
	}
	// The cgroup name space that nsenter enters moves nobody: to be seen in the host as a process of the host, and to
	// end with it, the command joins the cgroup of the leader.
	cgroup, err := cgroupOf(leader)
	if err != nil {
		return nil, fmt.Errorf("%s: host %s: %w", name, h.Name(), err)
	}
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c",
		`echo $$ >"$1/cgroup.procs" && shift && exec nsenter "$@"`, "sh", cgroup,
		"--target", fmt.Sprint(leader), "--all", "--", name}, args...)...)
	cmd.Env = []string{"PATH=" + searchPath, "HOME=/root", "LANG=C.UTF-8", "SYSTEMD_PAGER=cat",
		"TERM=" + os.Getenv("TERM")}
	return cmd, nil
}

// Run runs a command in the host and returns what it wrote and its exit status (128 and the signal's number if a signal
// ended it). err is for a command that could not be run or was ended by ctx, not for one that failed.
func (h *Host) Run(ctx context.Context, name string, args ...string) (stdout, stderr string, exit int, err error) {
	cmd, err := h.Command(ctx, name, args...)
	if err != nil {
		return "", "", -1, err
	}
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	// nsenter forks to enter the PID name space: kill both. A daemon that holds the pipes must not hold us.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	if cmd.ProcessState != nil {
		exit = exitStatus(cmd.ProcessState)
	}
	var failure *exec.ExitError
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), context.Cause(ctx))
	case errors.As(err, &failure), errors.Is(err, exec.ErrWaitDelay):
		err = nil
	}
	return out.String(), errOut.String(), exit, err
}

func exitStatus(p *os.ProcessState) int {
	if ws, ok := p.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return p.ExitCode()
}

// Sh runs a shell script in the host, as Run does; the first command that fails ends it.
func (h *Host) Sh(ctx context.Context, script string) (stdout, stderr string, exit int, err error) {
	return h.Run(ctx, "sh", "-euc", script)
}

// Must runs a shell script in the host and returns what it wrote to standard output, without the last newline. If it
// fails, so does the test.
func (h *Host) Must(t testing.TB, script string) string {
	t.Helper()
	stdout, stderr, exit, err := h.Sh(t.Context(), script)
	if err != nil || exit != 0 {
		t.Fatalf("in %s:\n%s\nexit status %d, error %v\n%s%s", h.Name(), script, exit, err, stdout, stderr)
	}
	return strings.TrimSuffix(stdout, "\n")
}

// New starts a host for a test and stops it with the test; see Start for what opts may hold. If the test fails, the
// host's journal is logged. Tests that need a host are skipped with -short, and for no other reason.
func New(t testing.TB, opts Options) *Host {
	t.Helper()
	if testing.Short() {
		t.Skip("a lab host is not for -short")
	}
	h, err := Start(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("journal of %s:\n%s", h.Name(), h.journal())
		}
		if err := h.Stop(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// journal is for people who look for the reason of a failure.
func (h *Host) journal() string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stdout, stderr, _, err := h.Run(ctx, "journalctl", "--no-pager", "--boot", "--lines=300", "--output=short-monotonic")
	if err != nil {
		return fmt.Sprintf("%v; the end of its console:\n%s", err, h.console())
	}
	return stdout + stderr
}

// Info tells of a running host.
type Info struct {
	Name, Suite string
	Root        string // see Host.Root
	Up          bool   // whether it is booted
}

// List tells of all hosts that run from this CacheDir, sorted by name, and clears away what killed ones left.
func List(ctx context.Context) ([]Info, error) {
	run := runDir(CacheDir())
	if !exists(run) {
		return nil, nil
	}
	lock, err := lockFile(ctx, filepath.Join(run, ".lock"), func() {})
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := sweep(run); err != nil {
		return nil, err
	}
	files, _ := filepath.Glob(statePath(run, "*"))
	var infos []Info
	for _, file := range files {
		h, err := attach(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			return nil, err
		}
		s := h.get()
		infos = append(infos, Info{Name: s.Name, Suite: s.Suite, Root: h.Root(), Up: s.Phase == up})
	}
	return infos, nil
}

// Attach finds a host that another process started. Commands run in it and Stop work; Boot, Shutdown, Reboot, Crash and
// Detach are its starter's.
func Attach(name string) (*Host, error) {
	if !namePattern.MatchString(name) {
		return nil, fmt.Errorf("name %q: want lower-case letters, digits and inner dashes, at most 63", name)
	}
	h, err := attach(statePath(runDir(CacheDir()), name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no lab host %q runs", name)
	}
	return h, err
}

func attach(file string) (*Host, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	h := &Host{}
	return h, json.Unmarshal(data, &h.state)
}

// Down ends a host, whoever started it, and returns when it is gone.
func Down(ctx context.Context, name string) error {
	h, err := Attach(name)
	if err != nil {
		return err
	}
	run := runDir(CacheDir())
	lock, err := os.Open(lockPath(run, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // gone meanwhile
	}
	if err != nil {
		return err
	}
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		// The lock is held, so the process id is the supervisor's and not one used again.
		if err := unix.Kill(h.get().Supervisor, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("supervisor of %s: %w", name, err)
		}
		if err := awaitLock(ctx, lock); err != nil {
			return err
		}
	}
	lock.Close()
	_, err = List(ctx) // clears away what a killed supervisor left
	return err
}

func lockPath(run, name string) string  { return filepath.Join(run, name+".lock") }
func statePath(run, name string) string { return filepath.Join(run, name+".json") }

// claimName takes the lock of a host's name, which the supervisor inherits.
func claimName(ctx context.Context, run, name string) (*os.File, error) {
	// Nobody may remove a lock file between its creation and its being locked.
	all, err := lockFile(ctx, filepath.Join(run, ".lock"), func() {})
	if err != nil {
		return nil, err
	}
	defer all.Close()
	if err := sweep(run); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(lockPath(run, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("a lab host %q runs already", name)
	}
	if err != nil {
		return nil, err
	}
	return f, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
}

// sweep removes files and cgroups of hosts whose supervisor is gone: one that was killed cannot do it. run/.lock must
// be held.
func sweep(run string) error {
	locks, err := filepath.Glob(lockPath(run, "?*"))
	if err != nil {
		return err
	}
	for _, path := range locks {
		name := strings.TrimSuffix(filepath.Base(path), ".lock")
		held, err := locked(path)
		if err != nil {
			return err
		}
		if held {
			continue
		}
		root, err := cgroupRoot()
		if err != nil {
			return err
		}
		if err := errors.Join(removeCgroup(filepath.Join(root, cgroupName(name))), removeIfExists(statePath(run, name)),
			removeIfExists(path)); err != nil {
			return err
		}
	}
	return nil
}

// locked tells whether some process holds the lock of a file.
func locked(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

// cgroupRoot is where this process sees the unified cgroup hierarchy: /sys/fs/cgroup, or /sys/fs/cgroup/unified beside
// version 1.
func cgroupRoot() (string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	if dir := cgroup2Mount(string(data)); dir != "" {
		return dir, nil
	}
	return "", errors.New("no cgroup2 file system is mounted; one is needed to end lab hosts")
}

// cgroupOf is the directory of the cgroup that a process is in, in the unified hierarchy.
func cgroupOf(pid int) (string, error) {
	root, err := cgroupRoot()
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return filepath.Join(root, strings.TrimSuffix(path, "\n")), nil
		}
	}
	return "", fmt.Errorf("process %d is in no cgroup of the unified hierarchy", pid)
}

// cgroup2Mount finds the first mount point of type cgroup2 in a mountinfo file (proc_pid_mountinfo(5)).
func cgroup2Mount(mountinfo string) string {
	for line := range strings.Lines(mountinfo) {
		fields := strings.Fields(line)
		if i := slices.Index(fields, "-"); i > 4 && i+1 < len(fields) && fields[i+1] == "cgroup2" {
			return fields[4]
		}
	}
	return ""
}
