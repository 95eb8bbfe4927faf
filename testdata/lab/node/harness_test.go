package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/generator/file"
	"berth/helpers/machine"
	"berth/testdata/lab"
)

// budgets makes the waits of a start short enough for tests of what happens when they end, and long enough for a machine
// that runs three labs at once.
const budgets = `
[timeouts]
ready = "30s"
after_start = "30s"
settle = "300ms"
poll = "100ms"
`

// patience bounds the wait for what a test expects to happen; it is no measure of anything.
var patience = 2 * time.Minute

// testCase is one test in a lab host. It finds the host at rest: no slot runs, the goal state is Goal with budgets.
type testCase struct {
	name string // begins with the number of the condition that it stands for, where there is one
	run  func(t *testing.T, h *host)
}

// TestNode runs all cases on a host of each release.
func TestNode(t *testing.T) {
	for _, suite := range lab.Suites {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, suite)
			for _, c := range cases() {
				t.Run(c.name, func(t *testing.T) {
					h.rest(t)
					defer h.explain(t)
					c.run(t, h)
				})
			}
		})
	}
}

func cases() []testCase {
	var all []testCase
	for _, group := range [][]testCase{
		chainCases,
		crashCases,
		peerCases,
		machineCases,
		runCases,
		nvidiaCases,
		generatorCases,
		bootCases,
		checkCases,
		diffCases,
		packageCases,
		bakeCases,
		statusCases,
		valueCases,
		lastGoodCases,
		sandboxCases,
		secretCases,
		killCases,
		troubleCases,
	} {
		all = append(all, group...)
	}
	return all
}

// host is a lab host on which berth is installed.
type host struct {
	*lab.Host
	systemd *machine.Manager // of the host; a new one after each boot
	leader  int              // of the boot that systemd belongs to
}

// newHost makes a host; more, each called with the root of its file system, change it before it boots.
func newHost(t *testing.T, suite string, more ...func(root string) error) *host {
	t.Helper()
	h := &host{Host: lab.New(t, lab.Options{Suite: suite, Prepare: func(root string) error {
		err := Prepare(root, Goal+budgets)
		for _, change := range more {
			err = errors.Join(err, change(root))
		}
		return err
	}})}
	t.Cleanup(func() {
		if h.systemd != nil {
			h.systemd.Close()
		}
	})
	return h
}

// bus returns a connection to the host's systemd.
func (h *host) bus(t *testing.T) *machine.Manager {
	t.Helper()
	if h.systemd != nil && h.leader == h.Leader() {
		return h.systemd
	}
	root, err := file.OpenRoot(h.Root())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	// Through the message bus: systemd's private socket takes no client whose PID it cannot see.
	if h.systemd, err = machine.Inside(context.Background(), root); err != nil {
		t.Fatal(err)
	}
	h.leader = h.Leader()
	return h.systemd
}

// try runs a shell script in the host and returns all it printed and its exit status.
func (h *host) try(t *testing.T, script string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, errs, exit, err := h.Sh(ctx, script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out + errs, exit
}

// fails runs a script that must fail, and returns what it printed.
func (h *host) fails(t *testing.T, script string) string {
	t.Helper()
	out, exit := h.try(t, script)
	if exit == 0 {
		t.Fatalf("%s: exit status 0; want a failure\n%s", script, out)
	}
	return out
}

// write puts a file into the host, or into one of its machines where path begins with its name and a colon.
func (h *host) write(t *testing.T, path, content string) {
	t.Helper()
	path = h.path(path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (h *host) path(path string) string {
	if name, inside, ok := strings.Cut(path, ":"); ok {
		return filepath.Join(h.MachineRoot(name), inside)
	}
	return filepath.Join(h.Root(), path)
}

// goal writes the goal state and has systemd read it.
func (h *host) goal(t *testing.T, text string) {
	t.Helper()
	h.write(t, "/etc/berth/goal.toml", text)
	h.Must(t, "systemctl daemon-reload")
}

// knob tells the stand-in kubelet of a machine what to do (testdata/stubkubelet).
func (h *host) knob(t *testing.T, machine, name, value string) {
	t.Helper()
	h.write(t, machine+":/etc/stubkubelet/"+name, value)
}

// rest brings the host to the state in which each case begins.
func (h *host) rest(t *testing.T) {
	t.Helper()
	h.Must(t, `
		rm -rf /run/systemd/system/*.d /run/systemd/system/*.service /etc/systemd/system/node*.d /etc/berth/goal.toml.d /var/lib/berth
		rm -rf /var/lib/machines/node-*/etc/stubkubelet
		systemctl stop --no-block node@a node@b`)
	h.write(t, "/etc/berth/goal.toml", Goal+budgets)
	h.Must(t, "systemctl daemon-reload; systemctl stop node@a node@b node-peer-guard@a node-peer-guard@b systemd-nspawn@node-a systemd-nspawn@node-b; systemctl reset-failed")
	h.await(t, "the host at rest", func(units map[string]machine.Unit) bool {
		for _, u := range units {
			if u.Active != "inactive" || u.Busy() {
				return false
			}
		}
		return true
	}, "a", "b")
	if err := RemoveGPU(t.Context(), h.Host); err != nil {
		t.Fatal(err)
	}
}

// steps are the units of a slot, the supervising one last.
func steps(slot string) []string {
	units := []string{"systemd-nspawn@node-" + slot + ".service"}
	for _, step := range []string{"peer-guard", "render-nspawn", "render-containerd", "render-kubelet", "wait-dbus", "nvidia-wire", "containerd", "kubelet"} {
		units = append(units, "node-"+step+"@"+slot+".service")
	}
	return append(units, "node@"+slot+".service")
}

// await waits until the units of the slots (default: a) are as wanted, looking again after each of systemd's events.
func (h *host) await(t *testing.T, what string, wanted func(map[string]machine.Unit) bool, slots ...string) {
	t.Helper()
	if len(slots) == 0 {
		slots = []string{"a"}
	}
	h.awaitEvent(t, what, func() (string, bool) {
		units := make(map[string]machine.Unit)
		for _, slot := range slots {
			maps.Copy(units, h.units(t, slot))
		}
		return fmt.Sprint(units), wanted(units)
	})
}

// awaitStatus waits until a unit's status (STATUS= of sd_notify) holds text.
func (h *host) awaitStatus(t *testing.T, unit, text string) {
	t.Helper()
	h.awaitEvent(t, unit+" says "+text, func() (string, bool) {
		s, err := h.bus(t).Service(context.Background(), unit)
		if err != nil {
			t.Fatal(err)
		}
		return s.StatusText, strings.Contains(s.StatusText, text)
	})
}

// awaitEvent calls check, and again after each of systemd's events, until it is true.
func (h *host) awaitEvent(t *testing.T, what string, check func() (seen string, done bool)) {
	t.Helper()
	events, late := h.bus(t).Events(), time.After(patience)
	for {
		seen, done := check()
		if done {
			return
		}
		select {
		case <-events:
		case <-late:
			t.Fatalf("not within %v: %s; last: %s", patience, what, seen)
		}
	}
}

// isUp tells whether all steps of a slot are done and at rest.
func isUp(units map[string]machine.Unit, slot string) bool {
	for _, name := range steps(slot) {
		if units[name].Active != "active" || units[name].Busy() {
			return false
		}
	}
	return true
}

// wantUp fails unless the slot is up now: its steps, its claim, and containerd and kubelet inside.
func (h *host) wantUp(t *testing.T, slot string) {
	t.Helper()
	units := h.units(t, slot)
	if !isUp(units, slot) {
		t.Fatalf("slot %s is not up: %v", slot, units)
	}
	if out, exit := h.try(t, "test -e /run/berth/claims/"+slot+" && systemctl -M node-"+slot+" is-active containerd kubelet"); exit != 0 {
		t.Fatalf("slot %s is not up: %s", slot, out)
	}
}

// awaitDown waits until no unit of a slot is up or about to be, and requires that nothing is left.
func (h *host) awaitDown(t *testing.T, slot string) {
	t.Helper()
	h.await(t, "the end of slot "+slot, isDown, slot)
	h.wantDown(t, slot)
}

// wantDown fails unless all steps of a slot are down now, its claim is released, and nothing is left of its machine.
func (h *host) wantDown(t *testing.T, slot string) {
	t.Helper()
	for name, u := range h.units(t, slot) {
		if u.Running() || u.Busy() {
			t.Errorf("%s is %s (%s) %s; want it down", name, u.Active, u.Sub, u.Job)
		}
	}
	if out, exit := h.try(t, "test ! -e /run/berth/claims/"+slot+" && ! grep 'populated 1' /sys/fs/cgroup/machine.slice/systemd-nspawn@node-"+slot+".service/cgroup.events"); exit != 0 {
		t.Errorf("slot %s left something behind: %s", slot, out)
	}
}

func (h *host) units(t *testing.T, slot string) map[string]machine.Unit {
	t.Helper()
	list, err := h.bus(t).Units(context.Background(), steps(slot)...)
	if err != nil {
		t.Fatal(err)
	}
	units := make(map[string]machine.Unit)
	for _, u := range list {
		units[u.Name] = u
	}
	return units
}

// runs identifies the present run of each of a slot's steps: their InvocationID=.
func (h *host) runs(t *testing.T, slot string) map[string]string {
	t.Helper()
	ids := make(map[string]string)
	for _, name := range steps(slot) {
		s, err := h.bus(t).Service(context.Background(), name)
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = s.InvocationID
	}
	return ids
}

// awaitAnew waits until the slot is up in a run of which every step is a later one than in before.
func (h *host) awaitAnew(t *testing.T, slot string, before map[string]string) {
	t.Helper()
	h.await(t, "all steps of slot "+slot+" done anew", func(units map[string]machine.Unit) bool {
		if !isUp(units, slot) {
			return false
		}
		for name, id := range h.runs(t, slot) {
			if id == before[name] {
				return false
			}
		}
		return true
	}, slot)
	h.wantUp(t, slot)
}

// start starts a slot, and requires that it is up when the command returns.
func (h *host) start(t *testing.T, slot string) {
	t.Helper()
	h.Must(t, "systemctl start node@"+slot)
	h.wantUp(t, slot)
}

// want fails unless text holds each of the parts.
func want(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("want %q in:\n%s", p, text)
		}
	}
}

// explain shows what the steps said, where a case failed.
func (h *host) explain(t *testing.T) {
	t.Helper()
	if !t.Failed() {
		return
	}
	out, _ := h.try(t, "journalctl --no-pager --output=short-monotonic --lines=60 -u 'node*' -u 'systemd-nspawn@*'")
	t.Log(out)
}

func property(t *testing.T, h *host, unit, name string) string {
	t.Helper()
	return strings.TrimSpace(h.Must(t, fmt.Sprintf("systemctl show --property=%s --value %s", name, unit)))
}
