package lab

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// A lab host has one supervisor: this same program, started again in a mount name space of its own, which holds all that
// the host is made of (mounts, the tmpfs with everything written, the cgroup, systemd-nspawn). The socket to the process
// that started it is the leash: at its end of file the supervisor takes the host down. If the supervisor itself is
// killed, the mounts go with its name space, and the processes with the PID name space that they are in, which ends by
// parent death signal.

// supervisorEnv holds a supervisor's spec, and so tells a program that it is to be a supervisor.
const supervisorEnv = "BERTH_LAB_SUPERVISOR"

// What is inherited by the supervisor, after standard error.
const (
	leashFD = 3 + iota // socket to the starter: messages, one JSON value each
	lockFD             // the state file's lock, held as long as the supervisor lives
	baseFD             // the base's directory, locked (shared) so that no build removes it
)

// Where a host is put together, in the supervisor's mount name space: a tmpfs, private to it.
const (
	labDir     = "/run/lab"
	rootDir    = labDir + "/root"
	consoleLog = labDir + "/console.log"
	notifyPath = labDir + "/notify"
)

// spec is what a supervisor is told to run.
type spec struct {
	Name string
	Base string // directory of the base
	Run  string // directory with the host's lock and state file
	Kmsg bool
}

// state is what is known of a host, for its starter and for other processes.
type state struct {
	Name, Suite string
	Supervisor  int    // process id
	Phase       phase  // what the host is doing
	Boot        int    // counts boots from 1
	Leader      int    // process id of the host's PID 1, 0 unless it is up
	Error       string // why the supervisor gives up
}

type phase string

const (
	halted phase = "halted" // not booted yet, or powered off
	up     phase = "up"     // systemd runs in it; boot may not have finished
	failed phase = "failed"
)

// Requests of the starter to the supervisor.
const (
	opBoot   = "boot"   // boot the halted host
	opKill   = "kill"   // end the host at once, as a power failure does
	opDetach = "detach" // live on when the starter is gone
)

func init() {
	if value, ok := os.LookupEnv(supervisorEnv); ok {
		var s spec
		if err := json.Unmarshal([]byte(value), &s); err != nil {
			panic(err)
		}
		os.Exit(supervise(s))
	}
}

func supervise(s spec) int {
	// systemd-nspawn gets its parent death signal when the thread that started it ends; the main thread does not.
	runtime.LockOSThread()
	unix.Umask(0o022)
	conn, err := net.FileConn(os.NewFile(leashFD, "leash"))
	if err != nil {
		return 1
	}
	v := &supervisor{spec: s, leash: json.NewEncoder(conn)}
	v.state = state{Name: s.Name, Suite: suiteOf(s.Base), Supervisor: os.Getpid(), Phase: halted}
	for _, fd := range []int{leashFD, lockFD, baseFD} {
		unix.CloseOnExec(fd)
	}
	err = v.run(conn)
	if end := v.tearDown(); err == nil {
		err = end
	}
	if err != nil {
		v.state.Phase, v.state.Leader, v.state.Error = failed, 0, err.Error()
		v.leash.Encode(v.state)
		return 1
	}
	return 0
}

type supervisor struct {
	spec
	state  state
	leash  *json.Encoder
	cgroup string    // directory, once it was made
	nspawn *exec.Cmd // nil while halted
}

// run answers requests and events until the host is to be taken down.
func (v *supervisor) run(conn net.Conn) error {
	term := make(chan os.Signal, 1)
	signal.Notify(term, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	requests := make(chan string)
	go func() {
		defer close(requests)
		for in := json.NewDecoder(conn); ; {
			var op string
			if in.Decode(&op) != nil {
				return
			}
			requests <- op
		}
	}()
	if err := v.assemble(); err != nil {
		return err
	}
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notifyPath, Net: "unixgram"})
	if err != nil {
		return err
	}
	if err := passCredentials(notify); err != nil {
		return err
	}
	notices := make(chan notice)
	go readNotices(notify, notices)
	exits := make(chan error)
	if err := v.tell(); err != nil {
		return err
	}
	detached := false
	var leader notice
	for {
		select {
		case <-term:
			return nil
		case op, open := <-requests:
			switch {
			case !open && !detached:
				return nil
			case !open:
				requests = nil
			case op == opDetach:
				detached = true
			case op == opKill && v.nspawn != nil:
				v.nspawn.Process.Kill()
			case op == opBoot && v.nspawn == nil:
				if err := v.boot(exits); err != nil {
					return err
				}
			}
		case n := <-notices:
			if n.leader != 0 {
				leader = n
			}
			if n.ready && v.nspawn != nil {
				if v.state.Leader, err = leaderOf(leader.sender, leader.leader); err != nil {
					return err
				}
				v.state.Phase = up
				v.state.Boot++
				if err := v.tell(); err != nil {
					return err
				}
			}
		case <-exits:
			code := v.nspawn.ProcessState.ExitCode()
			wasUp := v.state.Phase == up
			v.nspawn, v.state.Phase, v.state.Leader = nil, halted, 0
			if err := errors.Join(v.emptyCgroup(), v.tell()); err != nil {
				return err
			}
			switch {
			case code == 133: // the host asked for a reboot (systemd-nspawn(1), --keep-unit)
				if err := v.boot(exits); err != nil {
					return err
				}
			case !wasUp:
				return fmt.Errorf("systemd-nspawn ended (status %d) before the host was up:\n%s", code, tail(consoleLog, 30))
			case detached:
				return nil
			}
		}
	}
}

// tell makes the state known to the starter, which may be gone, and to others.
func (v *supervisor) tell() error {
	data, err := json.Marshal(v.state)
	if err != nil {
		return err
	}
	v.leash.Encode(v.state)
	return renameio.WriteFile(statePath(v.Run, v.Name), data, 0o644)
}

// assemble mounts what the host needs: the unified cgroup hierarchy where systemd looks for it, and root file systems
// whose changes are kept on a tmpfs. This mount name space is private already (os/exec sees to it).
func (v *supervisor) assemble() error {
	unix.Unmount("/sys/fs/cgroup", unix.MNT_DETACH) // with what is below it; absent is fine
	if err := mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""); err != nil {
		return err
	}
	if err := mount("tmpfs", "/run", "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	if err := overlay(filepath.Join(v.Base, "host"), rootDir, "host"); err != nil {
		return err
	}
	for _, m := range Machines {
		if err := overlay(filepath.Join(v.Base, "machine"), filepath.Join(rootDir, machinePath(m)), m); err != nil {
			return err
		}
	}
	if v.Kmsg {
		if err := unix.Mknod(filepath.Join(labDir, "kmsg"), unix.S_IFCHR|0o644, int(unix.Mkdev(1, 11))); err != nil {
			return fmt.Errorf("mknod kmsg: %w", err)
		}
	}
	return os.WriteFile(filepath.Join(rootDir, "etc/hostname"), []byte(v.Name+"\n"), 0o644)
}

func overlay(lower, target, name string) error {
	upper, work := filepath.Join(labDir, "upper", name), filepath.Join(labDir, "work", name)
	for _, dir := range []string{upper, work, target} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return mount("overlay", target, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work)
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s (%s): %w", fstype, target, data, err)
	}
	return nil
}

// boot starts systemd-nspawn in the host's cgroup; exits tells of its end.
func (v *supervisor) boot(exits chan<- error) error {
	// A host that was killed leaves mounts and locks in systemd-nspawn's runtime directory, which would keep it from
	// booting again.
	unix.Unmount("/run/systemd", unix.MNT_DETACH)
	if err := os.MkdirAll("/run/systemd", 0o755); err != nil {
		return err
	}
	if err := mount("tmpfs", "/run/systemd", "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	dir := filepath.Join("/sys/fs/cgroup", cgroupName(v.Name))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("cgroup of the host (one of the same name may run from another cache): %w", err)
	}
	v.cgroup = dir
	cgroup, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer cgroup.Close()
	console, err := os.OpenFile(consoleLog, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer console.Close()
	args := []string{"--quiet", "--register=no", "--keep-unit", "--boot", "--notify-ready=yes", "--directory=" + rootDir,
		"--machine=" + v.Name, "--private-users=no", "--private-network", "--capability=all",
		"--system-call-filter=@keyring bpf perf_event_open @mount", "--resolv-conf=off", "--timezone=off",
		"--link-journal=no", "--console=read-only"}
	if v.Kmsg {
		args = append(args, "--bind="+labDir+"/kmsg:/dev/kmsg")
	}
	// systemd-nspawn's end alone does not end the host, but the end of a PID name space around both does. Its PID 1 is a
	// shell, since programs of systemd do not log to standard error as PID 1.
	cmd := exec.Command("unshare", append([]string{"--pid", "--fork", "--kill-child", "--mount-proc",
		"sh", "-c", `"$@"; exit $?`, "sh", "systemd-nspawn"}, args...)...)
	cmd.Env = []string{"PATH=" + searchPath, "NOTIFY_SOCKET=" + notifyPath, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1",
		"SYSTEMD_NSPAWN_API_VFS_WRITABLE=1"}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd()), Setsid: true,
		Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("systemd-nspawn: %w", err)
	}
	v.nspawn = cmd
	go func() { exits <- cmd.Wait() }()
	return nil
}

// tearDown ends the host and removes what the kernel does not remove by itself when the supervisor ends.
func (v *supervisor) tearDown() error {
	if v.nspawn != nil {
		v.nspawn.Process.Kill()
	}
	return errors.Join(v.emptyCgroup(), removeIfExists(statePath(v.Run, v.Name)), removeIfExists(lockPath(v.Run, v.Name)))
}

func (v *supervisor) emptyCgroup() error {
	if v.cgroup == "" {
		return nil
	}
	return removeCgroup(v.cgroup)
}

// removeCgroup kills what is in a cgroup and below it, waits until it is empty, and removes it.
func removeCgroup(dir string) error {
	events, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer events.Close()
	// Absent before Linux 5.14; then the parent death signals must do.
	err = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for {
		// Reading arms the notification: a change after the read wakes the poll (cgroups(7), cgroup.events).
		buf := make([]byte, 256)
		n, err := events.ReadAt(buf, 0)
		if n == 0 {
			return fmt.Errorf("%s: %w", events.Name(), err)
		}
		if bytes.Contains(buf[:n], []byte("populated 0")) {
			break
		}
		fds := []unix.PollFd{{Fd: int32(events.Fd()), Events: unix.POLLPRI}}
		if err := retry(func() error { n, err = unix.Poll(fds, 10_000); return err }); err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("%s: still populated 10 s after its processes were killed", dir)
		}
	}
	var dirs []string
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	for _, d := range slices.Backward(dirs) {
		err = errors.Join(err, removeIfExists(d))
	}
	return err
}

func removeIfExists(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// notice is what systemd-nspawn tells over NOTIFY_SOCKET: the leader once it exists, and (--notify-ready=yes) that the
// host's systemd is up.
type notice struct {
	leader int // process id in systemd-nspawn's name space
	ready  bool
	sender int // process id of systemd-nspawn in ours
}

func readNotices(conn *net.UnixConn, notices chan<- notice) {
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for {
		n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
		if err != nil {
			return
		}
		notice := parseNotice(string(buf[:n]))
		if control, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(control) == 1 {
			if cred, err := unix.ParseUnixCredentials(&control[0]); err == nil {
				notice.sender = int(cred.Pid)
			}
		}
		notices <- notice
	}
}

// passCredentials makes the kernel tell who sent a message, in our PID name space (unix(7), SO_PASSCRED).
func passCredentials(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	return errors.Join(err, set)
}

// parseNotice reads a message of sd_notify(3).
func parseNotice(message string) (n notice) {
	for line := range strings.Lines(message) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		switch key {
		case "READY":
			n.ready = value == "1"
		case "X_NSPAWN_LEADER_PID":
			n.leader, _ = strconv.Atoi(value)
		}
	}
	return n
}

// leaderOf finds the child of systemd-nspawn that systemd-nspawn knows by the process id inner.
func leaderOf(nspawn, inner int) (int, error) {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", nspawn))
	if err != nil {
		return 0, err
	}
	for _, child := range strings.Fields(string(children)) {
		status, err := os.ReadFile(filepath.Join("/proc", child, "status"))
		if err != nil {
			continue // ended meanwhile
		}
		// Our id, systemd-nspawn's, and the child's own (proc_pid_status(5), NSpid).
		_, ids, _ := strings.Cut(string(status), "\nNSpid:")
		ids, _, _ = strings.Cut(ids, "\n")
		f := strings.Fields(ids)
		if len(f) >= 3 && f[len(f)-2] == strconv.Itoa(inner) && f[len(f)-1] == "1" {
			return strconv.Atoi(child)
		}
	}
	return 0, fmt.Errorf("systemd-nspawn (process %d) has no child that is %d in its PID name space", nspawn, inner)
}
