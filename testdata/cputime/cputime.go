// Package cputime measures for tests what something costs, however busy the machine is.
package cputime

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Of returns the time that a processor spent on f, but not on what f has other goroutines do.
func Of(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := used()
	f()
	return used() - begin
}

// used is the processor time of this thread, in user and kernel mode (getrusage(2)).
func used() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
