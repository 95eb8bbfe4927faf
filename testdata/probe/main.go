// probe tries what a step of berth may need and what it must not be able to do, and prints the name of what it was let do, one a
// line. It runs in the place of a step's program, in the lab.
//
// usage: probe LEADER, the PID of a machine's PID 1
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// folders are where a file is made, and removed again.
var folders = []string{
	"/etc", "/usr/lib", "/var/lib", "/var/lib/machines/node-a/etc", "/home", "/root", "/run", "/run/berth", "/run/systemd/system",
	"/var/lib/berth", "/tmp", "/dev/shm",
}

// tries are system calls whose arguments do no harm where they are let through: what counts is whether that is for want of a right.
var tries = []struct {
	name string
	try  func() error
}{
	{"change a file in /etc", func() error { return open("/etc/hostname", unix.O_WRONLY) }},
	{"set a kernel variable", func() error { return open("/proc/sys/kernel/hostname", unix.O_WRONLY) }},
	{"move to another control group", func() error { return open("/sys/fs/cgroup/cgroup.procs", unix.O_WRONLY) }},
	{"use /dev/full", func() error { return open("/dev/full", unix.O_RDONLY) }},
	{"use /dev/kmsg", func() error { return open("/dev/kmsg", unix.O_WRONLY) }},
	{"read another user's file", func() error { return open("/home/probe", unix.O_RDONLY) }},
	{"make a device node", func() (err error) {
		for _, dir := range folders { // in one of them a file may be made
			name := filepath.Join(dir, ".berth-probe")
			if err = unix.Mknod(name, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err == nil {
				return os.Remove(name)
			}
		}
		return err
	}},
	{"give a file to another user", func() error { return unix.Chown("/run/probe/node", 1, 1) }},
	{"mount", func() error { return unix.Mount("none", "/run/probe", "tmpfs", 0, "") }},
	{"unmount", func() error { return unix.Unmount("/run/probe", 0) }},
	{"make a mount name space", func() error { return unix.Unshare(unix.CLONE_NEWNS) }},
	{"make a user name space", func() error { return unix.Unshare(unix.CLONE_NEWUSER | unix.CLONE_FS) }},
	{"change the root", func() error { return unix.Chroot("/") }},
	{"load a module", func() error { return unix.FinitModule(-1, "", 0) }},
	{"trace a process", func() error { return unix.PtraceAttach(-1) }},
	{"read a process's memory", func() error {
		_, err := unix.ProcessVMReadv(1, nil, nil, 0)
		return err
	}},
	{"signal a process of another user", func() error { return signal() }},
	{"enter a machine's root", func() error { return open("/proc/"+os.Args[1]+"/root/etc", unix.O_PATH) }},
	{"look up beneath a root", func() error {
		fd, err := unix.Openat2(unix.AT_FDCWD, "/etc", &unix.OpenHow{Flags: unix.O_PATH, Resolve: unix.RESOLVE_IN_ROOT})
		unix.Close(fd)
		return err
	}},
	{"open a file by its handle", func() error {
		_, err := unix.OpenByHandleAt(-1, unix.NewFileHandle(0, nil), 0)
		return err
	}},
	{"set the clock", func() error { return unix.ClockSettime(-1, &unix.Timespec{}) }},
	{"set the host's name", func() error { return unix.Sethostname(make([]byte, 1000)) }},
	{"reboot", func() error { return unix.Reboot(0x1234) }},
	{"swap", func() error { return call(unix.SYS_SWAPOFF, 0) }},
	{"load BPF", func() error { return call(unix.SYS_BPF, ^uintptr(0)) }},
	{"watch the kernel", func() error { return call(unix.SYS_PERF_EVENT_OPEN, 0) }},
	{"use keys", func() error { return call(unix.SYS_KEYCTL, ^uintptr(0)) }},
	{"use io_uring", func() error { return call(unix.SYS_IO_URING_SETUP, 0) }},
	{"run in real time", func() error {
		return unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
	}},
	{"emulate another system", func() error { return call(unix.SYS_PERSONALITY, 0x0008) }}, // PER_LINUX32
	{"run memory that it wrote", func() error {
		b, err := unix.Mmap(-1, 0, 4096, unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err == nil {
			err = unix.Munmap(b)
		}
		return err
	}},
	{"use Unix sockets", func() error { return socket(unix.AF_UNIX, unix.SOCK_STREAM, 0) }},
	{"use the Internet", func() error { return socket(unix.AF_INET, unix.SOCK_STREAM, 0) }},
	{"use the Internet by IPv6", func() error { return socket(unix.AF_INET6, unix.SOCK_STREAM, 0) }},
	{"make packets itself", func() error { return socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP) }},
	{"see all packets", func() error { return socket(unix.AF_PACKET, unix.SOCK_RAW, 0) }},
	{"set up networks", func() error { return socket(unix.AF_NETLINK, unix.SOCK_RAW, 0) }},
	{"speak to the host's own address", func() error { return send([4]byte{127, 0, 0, 1}) }},
	{"speak to another address", func() error { return send([4]byte{192, 0, 2, 1}) }},
	{"speak to systemd", func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Connect(fd, &unix.SockaddrUnix{Name: "/run/systemd/private"})
	}},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: probe LEADER")
		os.Exit(2)
	}
	for _, dir := range folders {
		name := filepath.Join(dir, ".berth-probe")
		report("write to "+dir, os.WriteFile(name, nil, 0o600))
		_ = os.Remove(name)
	}
	for _, t := range tries {
		report(t.name, t.try())
	}
}

// report prints what was let through: an error that is not about a right comes from beyond what would have refused it.
func report(name string, err error) {
	for _, refused := range []error{unix.EPERM, unix.EACCES, unix.EROFS, unix.ENOSYS, unix.EAFNOSUPPORT} {
		if errors.Is(err, refused) {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			return
		}
	}
	fmt.Println(name)
}

func open(name string, flags int) error {
	fd, err := unix.Open(name, flags|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

func socket(domain, kind, protocol int) error {
	fd, err := unix.Socket(domain, kind, protocol)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// send sends a datagram to the discard port.
func send(address [4]byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, []byte{0}, 0, &unix.SockaddrInet4{Port: 9, Addr: address})
}

// signal asks for the right to signal the process whose PID is in /run/probe/pid.
func signal() error {
	text, err := os.ReadFile("/run/probe/pid")
	if err != nil {
		return err
	}
	var pid int
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		return err
	}
	return unix.Kill(pid, 0)
}

// call makes a system call with one argument.
func call(number, argument uintptr) error {
	var room [128]byte // for what an argument that is left out would point to
	_, _, errno := unix.Syscall6(number, argument, uintptr(unsafe.Pointer(&room)), 0, 0, 0, 0)
	if errno == 0 {
		return nil
	}
	return errno
}
