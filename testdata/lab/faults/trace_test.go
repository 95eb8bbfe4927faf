package faults

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// changes are the system calls by which a program can change files. Those of one architecture only are not among them: the
// programs are Go's, which uses the newer ones everywhere.
var changes = map[uint64]string{
	unix.SYS_OPENAT: "openat", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_SYMLINKAT: "symlinkat", unix.SYS_LINKAT: "linkat",
	unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_UNLINKAT: "unlinkat",
	unix.SYS_WRITE: "write", unix.SYS_PWRITE64: "pwrite64", unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FSYNC: "fsync",
	unix.SYS_FCHMOD: "fchmod", unix.SYS_FCHMODAT: "fchmodat", unix.SYS_FCHOWNAT: "fchownat", unix.SYS_UTIMENSAT: "utimensat",
	unix.SYS_FLOCK: "flock",
}

// syscallInfo is the part of struct ptrace_syscall_info (linux/ptrace.h) that is asked for here.
type syscallInfo struct {
	Op     uint8
	_      [3]uint8
	Arch   uint32
	IP, SP uint64
	Nr     uint64 // of the call, where Op is entry
	Args   [6]uint64
}

const (
	ptraceGetSyscallInfo = 0x420e
	entry                = 1 // PTRACE_SYSCALL_INFO_ENTRY
)

// result is how a program ended that was run by disturb.
type result struct {
	call    string // the change that was disturbed; empty: none
	changes int    // that it was about to make, up to there
	exit    int    // -1: it was killed
}

// disturb runs a program. When any of its threads is about to make its n-th change (1 is the first), the program is killed before that
// has an effect or, where errno is not 0, the call fails with it. n = 0 disturbs nothing, and counts.
func disturb(cmd *exec.Cmd, n int, errno syscall.Errno) (r result, err error) {
	failing := 0
	r.exit, err = trace(cmd, nil, func(pid int, info syscallInfo) (kill bool, err error) {
		switch {
		case pid == failing: // the call that was taken away ends
			failing = 0
			return false, answer(pid, errno)
		case info.Op != entry || !isChange(pid, info):
			return false, nil
		}
		if r.changes++; r.changes != n {
			return false, nil
		}
		r.call = changes[info.Nr]
		if errno == 0 {
			return true, nil
		}
		failing = pid
		return false, takeAway(pid)
	})
	return r, err
}

// trace runs a program under ptrace(2) and returns its exit code; -1: it was killed. started, if not nil, is called before its first
// instruction, and call whenever a system call of any of its threads begins or ends; it says whether to kill the program.
func trace(cmd *exec.Cmd, started func(pid int) error, call func(pid int, info syscallInfo) (kill bool, err error)) (exit int, err error) {
	runtime.LockOSThread() // the thread is the tracer
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true, Setpgid: true, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	leader := cmd.Process.Pid
	defer func() { _ = cmd.Process.Release() }()
	traced, killed := false, false
	for {
		var status unix.WaitStatus
		// Threads are in the process group of their program: other children of this process are not taken from who waits for them.
		pid, err := unix.Wait4(-leader, &status, unix.WALL, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, fmt.Errorf("wait4: %w", err)
		case status.Exited() && pid == leader:
			return status.ExitStatus(), nil
		case status.Signaled() && pid == leader:
			if !killed {
				return -1, fmt.Errorf("ended by %v", status.Signal())
			}
			return -1, nil
		case !status.Stopped() || killed:
			continue
		}
		signal := 0
		switch stop := status.StopSignal(); {
		case !traced: // after execve
			traced = true
			err = unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL)
			if err == nil && started != nil {
				err = started(pid)
			}
		case stop == unix.SIGTRAP|0x80: // a system call begins or ends
			var info syscallInfo
			_, _, e := unix.Syscall6(unix.SYS_PTRACE, ptraceGetSyscallInfo, uintptr(pid), unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0)
			if e != 0 {
				err = fmt.Errorf("PTRACE_GET_SYSCALL_INFO: %w", e)
				break
			}
			if killed, err = call(pid, info); killed {
				if err := unix.Kill(leader, unix.SIGKILL); err != nil {
					return 0, err
				}
				continue
			}
		case stop == unix.SIGTRAP || stop == unix.SIGSTOP: // a new thread, or its first stop
		default:
			signal = int(stop)
		}
		if err == nil {
			err = unix.PtraceSyscall(pid, signal)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return 0, fmt.Errorf("ptrace: %w", err)
		}
	}
}

// isChange leaves out what only reads, and what goes to standard streams, pipes and the like.
func isChange(pid int, info syscallInfo) bool {
	switch info.Nr {
	case unix.SYS_OPENAT:
		return info.Args[2]&(unix.O_CREAT|unix.O_TMPFILE&^unix.O_DIRECTORY|unix.O_TRUNC) != 0
	case unix.SYS_WRITE:
		target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, info.Args[0]))
		return err == nil && info.Args[0] > 2 && strings.HasPrefix(target, "/")
	}
	return changes[info.Nr] != ""
}

func init() {
	if size := binary.Size(syscallInfo{}); size != 80 {
		panic(fmt.Sprintf("syscallInfo has %d bytes", size))
	}
}
