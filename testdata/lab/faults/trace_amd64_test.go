package faults

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// takeAway makes a stopped thread skip the system call that it is about to make, and answer is what it gets in its place.
func takeAway(pid int) error {
	return change(pid, func(r *unix.PtraceRegs) { r.Orig_rax = ^uint64(0) })
}

func answer(pid int, errno syscall.Errno) error {
	return change(pid, func(r *unix.PtraceRegs) { r.Rax = -uint64(errno) })
}

func change(pid int, f func(*unix.PtraceRegs)) error {
	var r unix.PtraceRegs
	if err := unix.PtraceGetRegs(pid, &r); err != nil {
		return err
	}
	f(&r)
	return unix.PtraceSetRegs(pid, &r)
}
