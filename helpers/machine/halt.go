package machine

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/generator/file"
)

// sigHalt is what systemd-nspawn sends to PID 1 of a machine when it is itself told to stop: SIGRTMIN+3 (systemd(1)), in
// the C library's count, which keeps the first two real-time signals for itself.
const sigHalt = unix.Signal(34 + 3)

// Halt repeats the signal that halts a machine. The one that systemd-nspawn sends is lost if the machine's PID 1 has just
// been started and does not catch signals yet; the stop then hangs until TimeoutStopSec= (seen with systemd 252, 257 and
// 262, where a stop comes within half a second after a start).
type Halt struct {
	host *file.Root
	bus  *Manager
	name string
	sent uint32 // PID that got it
}

// NewHalt returns a Halt for a machine.
func NewHalt(host *file.Root, bus *Manager, name string) *Halt {
	return &Halt{host: host, bus: bus, name: name}
}

// Repeat sends the signal again, once, if unit is being stopped and the machine's PID 1 has come to the point from which it
// is not lost. Until then it says when to look again. A second signal changes nothing for a machine that got the first.
func (h *Halt) Repeat(ctx context.Context, unit Unit) (again time.Duration, err error) {
	if unit.Active != "deactivating" {
		return 0, nil
	}
	pid, status, err := leader(ctx, h.host, h.bus, h.name)
	switch {
	case err != nil:
		return 0, err
	case pid != 0 && pid == h.sent:
		return 0, nil
	case pid == 0, !blocks(status, sigHalt):
		// systemd-nspawn has not made it yet, or it is gone; or nothing tells when a process changes its signal mask.
		return 10 * time.Millisecond, nil
	}
	h.sent = pid
	if err := unix.Kill(int(pid), sigHalt); err != nil && err != unix.ESRCH {
		return 0, fmt.Errorf("halt machine %s (PID %d): %w", h.name, pid, err)
	}
	return 0, nil
}

// isInit tells whether a process is PID 1 of a PID name space just below that of proc's mount (NSpid: of
// proc_pid_status(5)). Those of pods are deeper.
func isInit(status string) bool {
	pids := strings.Fields(field(status, "NSpid:"))
	return len(pids) == 2 && pids[1] == "1"
}

// blocks tells whether a process blocks a signal, as systemd does with those that it reads from a file descriptor.
func blocks(status string, signal unix.Signal) bool {
	mask, err := strconv.ParseUint(field(status, "SigBlk:"), 16, 64)
	return err == nil && mask&(1<<(signal-1)) != 0
}

func field(status, name string) string {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
