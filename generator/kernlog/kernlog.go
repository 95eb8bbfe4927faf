// Package kernlog writes log lines where they are seen before the journal runs: into the kernel's log, as generators do
// (systemd.generator(7)), and to the standard error stream, which systemd connects to nothing on a reload.
package kernlog

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"berth/generator/file"
)

// maxLine keeps a line below the size of one kernel log record (1024 bytes less the prefix: LOG_LINE_MAX of kernel/printk).
const maxLine = 900

// maxLines keeps below the number of records that the kernel takes from one opener in five seconds
// (printk_devkmsg "ratelimit", 10).
const maxLines = 8

// Log writes lines at one place.
type Log struct {
	root *file.Root // nil: there is no kernel's log
	name string
	err  io.Writer
}

// New returns a log for the program called name. root is the directory that stands for "/"; nil: it could not be opened. A
// host without /dev/kmsg is no error: a container has none.
func New(root *file.Root, name string, stderr io.Writer) *Log {
	return &Log{root, name, stderr}
}

// openKmsg takes a regular file as well as the device. Whatever else is there could block a program that PID 1 waits for.
func openKmsg(root *file.Root) (*os.File, error) {
	h, err := root.Handle("dev/kmsg")
	if err != nil {
		return nil, err
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return nil, err
	}
	if t := info.Mode().Type(); t != 0 && t != fs.ModeDevice|fs.ModeCharDevice {
		return nil, fs.ErrInvalid
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", h.Fd()), os.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}

// Error logs each line of err with priority "err" of syslog(3).
func (l *Log) Error(err error) {
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	for _, line := range lines {
		fmt.Fprintf(l.err, "%s: %s\n", l.name, line)
	}
	if l.root == nil {
		return
	}
	kmsg, openErr := openKmsg(l.root)
	if openErr != nil {
		return
	}
	defer kmsg.Close()
	for _, r := range records(l.name, lines) {
		// One write is one record. There is nowhere left to report that this failed.
		_, _ = kmsg.WriteString(r)
	}
}

// records are the lines as the kernel's log takes them.
func records(name string, lines []string) []string {
	var all []string
	for i, line := range lines {
		last := i == maxLines && len(lines) > maxLines+1
		if last {
			line = fmt.Sprintf("and %d more errors", len(lines)-maxLines)
		}
		if len(line) > maxLine {
			line = strings.ToValidUTF8(line[:maxLine], "") + "…"
		}
		all = append(all, fmt.Sprintf("<3>%s[%d]: %s\n", name, os.Getpid(), line))
		if last {
			break
		}
	}
	return all
}
