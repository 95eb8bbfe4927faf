package faults

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
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

// killAt runs a program under ptrace(2) and kills it when any of its threads is about to make its n-th change (1 is the first),
// before that has an effect. It returns that call's name; empty: the program ended before, with the exit code. n = 0 kills never
// and returns the number of changes instead.
func killAt(cmd *exec.Cmd, n int) (call string, count, exit int, err error) {
	runtime.LockOSThread() // the thread is the tracer
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true, Setpgid: true, Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return "", 0, -1, err
	}
	leader := cmd.Process.Pid
	defer func() { _ = cmd.Process.Release() }()
	killed, seized := false, false
	for {
		var status unix.WaitStatus
		// Threads are in the process group of their program: other children of this process are not taken from who waits for them.
		pid, err := unix.Wait4(-leader, &status, unix.WALL, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return "", count, -1, fmt.Errorf("wait4: %w", err)
		case status.Exited() && pid == leader:
			return "", count, status.ExitStatus(), nil
		case status.Signaled() && pid == leader:
			if !killed {
				return "", count, -1, fmt.Errorf("ended by %v", status.Signal())
			}
			return call, count, -1, nil
		case !status.Stopped() || killed:
			continue
		}
		signal := 0
		switch stop := status.StopSignal(); {
		case !seized: // after execve
			seized = true
			if err := unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL); err != nil {
				return "", 0, -1, fmt.Errorf("ptrace: %w", err)
			}
		case stop == unix.SIGTRAP|0x80: // a system call begins or ends
			var info syscallInfo
			_, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceGetSyscallInfo, uintptr(pid), unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0)
			if errno != 0 {
				return "", count, -1, fmt.Errorf("PTRACE_GET_SYSCALL_INFO: %w", errno)
			}
			if info.Op == entry && isChange(info) {
				if count++; count == n {
					call, killed = changes[info.Nr], true
					if err := unix.Kill(leader, unix.SIGKILL); err != nil {
						return "", count, -1, err
					}
					continue
				}
			}
		case stop == unix.SIGTRAP || stop == unix.SIGSTOP: // a new thread, or its first stop
		default:
			signal = int(stop)
		}
		if err := unix.PtraceSyscall(pid, signal); err != nil && !errors.Is(err, unix.ESRCH) {
			return "", count, -1, fmt.Errorf("ptrace: %w", err)
		}
	}
}

// isChange leaves out what only reads, and what goes to the standard streams.
func isChange(info syscallInfo) bool {
	switch info.Nr {
	case unix.SYS_OPENAT:
		return info.Args[2]&(unix.O_CREAT|unix.O_TMPFILE&^unix.O_DIRECTORY|unix.O_TRUNC) != 0
	case unix.SYS_WRITE:
		return info.Args[0] > 2
	}
	return changes[info.Nr] != ""
}

func init() {
	if size := binary.Size(syscallInfo{}); size != 80 {
		panic(fmt.Sprintf("syscallInfo has %d bytes", size))
	}
}
