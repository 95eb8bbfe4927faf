package faults

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestClock has the clock on the wall jump while a helper waits, by a day at each look: a budget is measured by the clock that never
// jumps. What the helpers wait for is a systemd that takes connections and never answers.
func TestClock(t *testing.T) {
	bin := build(t)
	dir := t.TempDir()
	for _, name := range []string{"run/systemd/private", "run/dbus/system_bus_socket"} {
		must(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755))
		l, err := net.Listen("unix", filepath.Join(dir, name))
		must(t, err)
		defer l.Close()
	}
	h := &host{dir, bin}
	h.write(t, "etc/berth/goal.toml", goals["A"], 0o644)
	h.write(t, "etc/berth/goal.toml.d/common.toml", common, 0o644)
	for _, args := range [][]string{{"wait-dbus", "a"}, {"machine-unit", "a", "kubelet.service"}, {"peer-guard", "a"}} {
		for _, day := range []int64{86400, -86400} {
			t.Run(fmt.Sprintf("%s %+d", args[0], day), func(t *testing.T) {
				t.Parallel()
				cmd := exec.Command(filepath.Join(bin, args[0]), args[1:]...)
				cmd.Env = []string{"BERTH_ROOT=" + dir, "BERTH_BUDGET=1s"}
				out, err := os.CreateTemp(t.TempDir(), "")
				must(t, err)
				defer out.Close()
				cmd.Stderr = out
				begin, looks := time.Now(), int64(0)
				exit, err := trace(cmd, hideVDSO, func(pid int, info syscallInfo) (bool, error) {
					if info.Op != entry {
						return false, jump(pid, day, &looks)
					}
					return false, nil
				})
				took := time.Since(begin)
				text, _ := os.ReadFile(out.Name())
				if err != nil || exit != 4 || !strings.Contains(string(text), "not within 1s") {
					t.Errorf("exit code %d, error %v: %s", exit, err, text)
				}
				if took < time.Second || took > 20*time.Second {
					t.Errorf("it took %v", took)
				}
				if looks == 0 {
					t.Error("it never looked at the clock: this proves nothing")
				}
			})
		}
	}
}

// jump changes what the clock_gettime(2) that a thread has just made says of the clock on the wall.
func jump(pid int, day int64, looks *int64) error {
	var r unix.PtraceRegs
	if err := unix.PtraceGetRegs(pid, &r); err != nil {
		return err
	}
	if r.Orig_rax != unix.SYS_CLOCK_GETTIME || r.Rdi != unix.CLOCK_REALTIME || r.Rax != 0 {
		return nil
	}
	*looks++
	var b [8]byte // tv_sec
	if _, err := unix.PtracePeekData(pid, uintptr(r.Rsi), b[:]); err != nil {
		return err
	}
	binary.NativeEndian.PutUint64(b[:], uint64(int64(binary.NativeEndian.Uint64(b[:]))+day**looks))
	_, err := unix.PtracePokeData(pid, uintptr(r.Rsi), b[:])
	return err
}

// hideVDSO takes away, in the auxiliary vector (getauxval(3)) of a program that has just been started, the way to read clocks without a
// system call.
func hideVDSO(pid int) error {
	const atSysinfoEHDR, atIgnore = 33, 1
	var r unix.PtraceRegs
	if err := unix.PtraceGetRegs(pid, &r); err != nil {
		return err
	}
	at := uintptr(r.Rsp)
	word := func() (uint64, error) {
		var b [8]byte
		_, err := unix.PtracePeekData(pid, at, b[:])
		at += 8
		return binary.NativeEndian.Uint64(b[:]), err
	}
	// argc, the arguments, 0, the environment, 0, and pairs of a type and a value.
	for zeros := 0; zeros < 2; {
		w, err := word()
		if err != nil {
			return err
		}
		if w == 0 {
			zeros++
		}
	}
	for {
		kind, err := word()
		if err != nil || kind == 0 {
			return fmt.Errorf("no vDSO: %w", err)
		}
		if kind == atSysinfoEHDR {
			var b [8]byte
			binary.NativeEndian.PutUint64(b[:], atIgnore)
			_, err := unix.PtracePokeData(pid, at-8, b[:])
			return err
		}
		at += 8
	}
}
