package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/step"
)

// Process is a process on the host.
type Process struct {
	PID     uint32
	Command string // its name, as in proc_pid_comm(5)
}

func (p Process) String() string { return fmt.Sprintf("%d (%s)", p.PID, p.Command) }

// NSpawnUnit is the host's unit of a machine.
func NSpawnUnit(machine string) string { return "systemd-nspawn@" + machine + ".service" }

// Chain returns the units of a slot's steps in order, without the supervising node@, which comes after them.
func Chain(slot string) []string {
	return []string{
		"node-peer-guard@" + slot + ".service",
		"node-render-nspawn@" + slot + ".service",
		"node-render-containerd@" + slot + ".service",
		"node-render-kubelet@" + slot + ".service",
		NSpawnUnit(goalstate.MachineName(slot)),
		"node-wait-dbus@" + slot + ".service",
		"node-nvidia-wire@" + slot + ".service",
		"node-containerd@" + slot + ".service",
		"node-kubelet@" + slot + ".service",
	}
}

// MachineStep is the place of the machine's unit in the chain, BusStep that of wait-dbus.
const (
	MachineStep = 4
	BusStep     = 5
)

// CGroup returns the folder of a unit's cgroup (cgroup v2). controlGroup is the unit's ControlGroup= as the host's systemd
// tells it; where that is empty, because systemd no longer tracks the unit, the place that a machine's unit has in the stock
// slice is taken: processes that a failed stop left behind are still there.
func CGroup(host *file.Root, machine, controlGroup string) string {
	if controlGroup == "" {
		controlGroup = "machine.slice/" + NSpawnUnit(machine)
	}
	return filepath.Join(host.Name(), "sys/fs/cgroup", controlGroup)
}

// Processes returns the processes in a cgroup and those below it. A cgroup that does not exist has none.
func Processes(host *file.Root, cgroup string) ([]Process, error) {
	var found []Process
	err := filepath.WalkDir(cgroup, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return ignoreGone(err)
		}
		pids, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return ignoreGone(err)
		}
		for _, field := range strings.Fields(string(pids)) {
			pid, err := strconv.ParseUint(field, 10, 32)
			if err != nil {
				return fmt.Errorf("%s/cgroup.procs: %q is not a PID", path, field)
			}
			if !alive(host, uint32(pid)) {
				continue
			}
			comm, _ := os.ReadFile(filepath.Join(proc(host, uint32(pid)), "comm"))
			found = append(found, Process{uint32(pid), strings.TrimSpace(string(comm))})
		}
		return nil
	})
	return found, err
}

// ignoreGone makes nothing of a cgroup that is removed while it is read: ENOENT for its files, ENODEV for open ones.
func ignoreGone(err error) error {
	if os.IsNotExist(err) || isENODEV(err) {
		return nil
	}
	return err
}

func isENODEV(err error) bool { return errors.Is(err, unix.ENODEV) }

// Kill ends all processes of a cgroup and returns when they are gone.
//
// It does so one by one. cgroup.kill does it at once, but Linux 6.18 then also kills, at its very start, whatever is later put
// into the same cgroup by clone3(2) with CLONE_INTO_CGROUP, as systemd 257 and later start services.
func Kill(ctx context.Context, s *step.Step, host *file.Root, cgroup string) error {
	watch, err := NewWatch()
	if err != nil {
		return err
	}
	defer watch.Close()
	if err := watch.Add(filepath.Join(cgroup, "cgroup.events"), unix.IN_MODIFY); err != nil {
		return ignoreGone(err)
	}
	return s.Wait(ctx, "the end of all processes in "+cgroup, watch.Events(), func(context.Context) (step.State, error) {
		processes, err := Processes(host, cgroup)
		for _, p := range processes {
			if e := unix.Kill(int(p.PID), unix.SIGKILL); e != nil && e != unix.ESRCH {
				err = errors.Join(err, fmt.Errorf("kill process %v: %w", p, e))
			}
		}
		still, e := populated(cgroup)
		// An event tells of the last one's end; nothing tells of a new one that one of them made meanwhile.
		return step.State{Done: !still, Seen: "some are still there", Again: 50 * time.Millisecond}, errors.Join(err, e)
	})
}

// populated tells whether a cgroup or one below it has processes (cgroups(7), cgroup.events). One that does not exist has
// none.
func populated(cgroup string) (bool, error) {
	text, err := os.ReadFile(filepath.Join(cgroup, "cgroup.events"))
	if err != nil {
		return false, ignoreGone(err)
	}
	return strings.Contains(string(text), "populated 1"), nil
}
