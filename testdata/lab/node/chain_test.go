package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/helpers/machine"
)

var chainCases = []testCase{
	{"start, status, stop", func(t *testing.T, h *host) {
		h.start(t, "a")
		status := h.Must(t, "systemctl status --no-pager --lines=50 node@a")
		want(t, status, "the node in slot a is ready", "no NVIDIA GPU on this host") // a line of a step, too
		h.Must(t, "systemctl stop node@a")
		h.wantDown(t, "a")
		if failed := h.Must(t, "systemctl --failed --no-legend"); failed != "" {
			t.Errorf("a stop left units failed: %s", failed)
		}
	}},
	{"restart runs every step again", func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a") // at once: restart returns when it is done
		h.awaitAnew(t, "a", before)
	}},
	{"the steps run in order", func(t *testing.T, h *host) {
		h.start(t, "a")
		at := func(unit, what string) string {
			return property(t, h, unit, what+"TimestampMonotonic")
		}
		before := []string{"node-peer-guard@a", "node-render-nspawn@a", "systemd-nspawn@node-a"}
		for _, chain := range [][]string{
			append(before, "node-wait-dbus@a", "node-nvidia-wire@a", "node-kubelet@a"),
			append(before, "node-containerd@a", "node-kubelet@a"),
		} {
			for i := 1; i < len(chain); i++ {
				done, begun := at(chain[i-1], "ActiveEnter"), at(chain[i], "InactiveExit")
				if len(done) > len(begun) || len(done) == len(begun) && done > begun {
					t.Errorf("%s began at %s, before %s was done at %s", chain[i], begun, chain[i-1], done)
				}
			}
		}
	}},
	{"01 a step waits for what comes late, within its budget", func(t *testing.T, h *host) {
		// The message bus of the machine comes up only when a file appears.
		h.write(t, "node-a:/etc/systemd/system/dbus.socket.d/late.conf",
			"[Socket]\nExecStartPre=/bin/sh -c 'until test -e /run/go; do sleep 0.1; done'\n")
		defer h.Must(t, "rm -r /var/lib/machines/node-a/etc/systemd/system/dbus.socket.d")
		h.Must(t, "systemctl start --no-block node@a")
		h.await(t, "wait-dbus waiting", func(units map[string]machine.Unit) bool {
			return units["node-wait-dbus@a.service"].Active == "activating"
		})
		h.awaitStatus(t, "node-wait-dbus@a.service", "waiting for D-Bus inside machine node-a: its socket is not there yet")
		h.Must(t, "nsenter -t $(machinectl show node-a -p Leader --value) -m touch /run/go")
		h.await(t, "the node", func(units map[string]machine.Unit) bool { return isUp(units, "a") })
	}},
	{"01 a step that failed once is tried again without a person", func(t *testing.T, h *host) {
		h.Must(t, "mv /etc/berth/bootstrap-token /etc/berth/away")
		h.fails(t, "systemctl start node@a")
		h.Must(t, "mv /etc/berth/away /etc/berth/bootstrap-token")
		h.await(t, "the node", func(units map[string]machine.Unit) bool { return isUp(units, "a") })
		h.wantUp(t, "a")
	}},
	{"01 there is a pause between the tries", func(t *testing.T, h *host) {
		h.Must(t, "mv /etc/berth/bootstrap-token /etc/berth/away")
		defer h.Must(t, "mv /etc/berth/away /etc/berth/bootstrap-token")
		const attempts = "journalctl --no-pager --quiet --boot --output=cat _PID=1 | grep -c '^Starting node-render-kubelet@a' || :"
		count := func() (n int) {
			fmt.Sscan(h.Must(t, attempts), &n)
			return n
		}
		before := count()
		h.fails(t, "systemctl start node@a")
		begin := time.Now()
		// Not by NRestarts=: the stops that come with a restart make it 0 again.
		h.awaitEvent(t, "the third try", func() (string, bool) {
			n := count() - before
			return fmt.Sprint(n), n >= 3
		})
		// RestartSec=5s before each of the two.
		if took := time.Since(begin); took < 8*time.Second {
			t.Errorf("two more tries came within %v", took)
		}
		if n := count() - before; n != 3 {
			t.Errorf("the failing step was run %d times in three tries", n)
		}
	}},
	{"02 a step that fails for good is named with its reason", func(t *testing.T, h *host) {
		h.Must(t, "mv /etc/berth/bootstrap-token /etc/berth/away")
		defer h.Must(t, "mv /etc/berth/away /etc/berth/bootstrap-token")
		h.fails(t, "systemctl start node@a")
		reason := "step node-render-kubelet@a.service failed: kubelet.bootstrap_token_file"
		out, _ := h.try(t, "systemctl status --no-pager --lines=50 node@a")
		want(t, out, reason)
		out, _ = h.try(t, "journalctl --no-pager _SYSTEMD_UNIT=node@a.service")
		want(t, out, reason, "journalctl -u node-render-kubelet@a.service")
		h.Must(t, "systemctl stop node@a")
		h.awaitDown(t, "a") // node@ is between two tries, and does not wait for the others
	}},
	{"02 a step that is masked is named", func(t *testing.T, h *host) {
		h.Must(t, "systemctl mask --runtime node-kubelet@a")
		defer h.Must(t, "systemctl unmask --runtime node-kubelet@a")
		h.fails(t, "systemctl start node@a")
		out, _ := h.try(t, "journalctl --no-pager _SYSTEMD_UNIT=node@a.service")
		want(t, out, "step node-kubelet@a.service cannot run: its unit is masked")
	}},
	{"03 an unrelated transaction runs no step again", func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		h.write(t, "/run/systemd/system/other.service", "[Unit]\nRequires=node@a.service node-kubelet@a.service\nWants=node-peer-guard@a.service\n[Service]\nType=oneshot\nExecStart=/bin/true\n")
		h.Must(t, "systemctl daemon-reload; systemctl start other; systemctl start node@a; systemctl start systemd-nspawn@node-a")
		sameRuns(t, h, before)
	}},
	{"05 no ordering cycle, no ignored line", func(t *testing.T, h *host) {
		var units []string
		for _, slot := range []string{"a", "b", "c"} {
			for _, u := range steps(slot) {
				if !strings.HasPrefix(u, "systemd-nspawn@node-c") {
					units = append(units, u)
				}
			}
		}
		units = append(units, "node-chain@a.target", "node-call@a.target", `run-bpffs-node\\x2da.mount`, `run-bpffs-node\\x2db.mount`)
		// verify does not look at what generators made, unless it is told to; the lab has no man pages, which the
		// distribution's own unit names.
		verify := "SYSTEMD_UNIT_PATH=/run/systemd/generator: systemd-analyze verify --man=no "
		for _, u := range units {
			if out, exit := h.try(t, verify+u); out != "" || exit != 0 {
				t.Errorf("systemd-analyze verify %s: exit status %d: %s", u, exit, out)
			}
		}
		// That it looks at them at all.
		h.write(t, "/run/systemd/generator/node@a.service.d/99-test.conf", "[Unit]\nNonsense=yes\n")
		defer h.Must(t, "rm -r /run/systemd/generator/node@a.service.d")
		out, _ := h.try(t, verify+"node@a.service")
		want(t, out, "Nonsense")
	}},
	{"06 every step has a finite budget", func(t *testing.T, h *host) {
		for _, u := range steps("a") {
			if v := property(t, h, u, "TimeoutStartUSec"); v == "infinity" || v == "" {
				t.Errorf("%s: TimeoutStartUSec=%s", u, v)
			}
		}
		if got, want := property(t, h, "node-wait-dbus@a", "TimeoutStartUSec"), "40s"; got != want {
			t.Errorf("node-wait-dbus@a: TimeoutStartUSec=%s; want %s: the goal state's 30s and 10s for the helper to tell", got, want)
		}
	}},
	{"06 a step that uses up its budget says what it waited for", func(t *testing.T, h *host) {
		h.goal(t, Goal+quick)
		h.knob(t, "node-a", "no-healthz", "")
		h.fails(t, "systemctl start node@a")
		out, _ := h.try(t, "journalctl --no-pager _SYSTEMD_UNIT=node@a.service")
		want(t, out, "kubelet in slot a: not within 5.3s: nothing listens on 127.0.0.1:10248")
		if status := property(t, h, "node@a", "ExecMainStatus"); status != "4" {
			t.Errorf("exit status %s; want 4", status)
		}
	}},
	{"06 a containerd that hangs is told by its state, not by what an earlier one said, and keeps nobody busy", func(t *testing.T, h *host) {
		replace, back := h.standIn(t, "containerd")
		defer back()
		replace("echo an earlier one >&2; exit 1")
		want(t, h.failure(t, "systemctl start node@a"), "containerd.service", "an earlier one")
		h.Must(t, "systemctl stop node@a")
		replace("exec sleep 1000")
		h.goal(t, Goal+quick)
		defer h.goal(t, Goal+budgets)
		h.Must(t, "systemctl start --no-block node@a")
		h.awaitStatus(t, "node-containerd@a.service", "starting containerd.service")
		// Whoever asks for a kubelet.service that is not loaded has it loaded, and unloaded again.
		if out := h.Must(t, "timeout 2 busctl -M node-a monitor --match=\"type='signal',member='UnitNew'\" org.freedesktop.systemd1 2>/dev/null | grep -c kubelet.service || :"); out != "0" {
			t.Errorf("kubelet.service was loaded %s times in 2 s", out)
		}
		h.awaitStatus(t, "node@a.service", "step node-containerd@a.service failed: ")
		said := property(t, h, "node-containerd@a", "StatusText")
		want(t, said, "start of containerd.service in machine node-a: not within 10s: containerd.service is activating (start)")
		if out, _ := h.try(t, "berth status a"); strings.Contains(out, "an earlier one") {
			t.Errorf("what an earlier containerd said is told of this one:\n%s", out)
		}
	}},
	{"06 all that waits for a D-Bus that never answers ends with its budget", func(t *testing.T, h *host) {
		replace, back := h.standIn(t, "dbus-daemon")
		defer back()
		replace("exec sleep 1000")
		h.goal(t, Goal+quick)
		defer h.goal(t, Goal+budgets)
		want(t, h.failure(t, "systemctl start node@a"), "step node-wait-dbus@a.service failed: D-Bus inside machine node-a: not within 5s: ")
		h.await(t, "the end of containerd's step", func(units map[string]machine.Unit) bool {
			return units["node-containerd@a.service"].Active == "failed"
		})
		if out, _ := h.try(t, "berth status a"); !strings.Contains(out, "retrying") {
			t.Errorf("want retrying:\n%s", out)
		}
	}},
	{"07 NVIDIA off starts the node, required without a GPU does not", func(t *testing.T, h *host) {
		h.goal(t, Goal+budgets+"[nvidia]\nmode = \"off\"\n")
		h.start(t, "a")
		h.Must(t, "systemctl stop node@a")
		h.goal(t, Goal+budgets+"[nvidia]\nmode = \"required\"\n")
		h.fails(t, "systemctl start node@a")
		out, _ := h.try(t, "systemctl status --no-pager --lines=50 node@a")
		want(t, out, "step node-render-nspawn@a.service failed: nvidia.mode is required: no device node /dev/nvidiactl")
		if state, exit := h.try(t, "systemctl -M node-a is-active kubelet"); exit == 0 {
			t.Errorf("kubelet is %s; want it not started", state)
		}
	}},
	{"log lines carry priorities and the fields of slot and step", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.fails(t, "systemctl start node@b")
		for _, match := range []string{
			"BERTH_SLOT=a BERTH_STEP=nvidia-wire PRIORITY=6",
			"BERTH_SLOT=a BERTH_STEP=wait-kubelet PRIORITY=5",
			"BERTH_SLOT=b BERTH_STEP=peer-guard PRIORITY=3",
		} {
			if out, _ := h.try(t, "journalctl --no-pager --quiet --boot --output=cat "+match); out == "" {
				t.Errorf("no line with %s", match)
			}
		}
	}},
}

// standIn takes a program of machine node-a away. It returns what puts a shell script in its place, and what stops the node and puts the
// program back.
func (h *host) standIn(t *testing.T, program string) (replace func(script string), back func()) {
	t.Helper()
	file := "/usr/bin/" + program
	path := "/var/lib/machines/node-a" + file
	h.Must(t, "mv "+path+" "+path+".real")
	return func(script string) {
			t.Helper()
			h.write(t, "node-a:"+file, "#!/bin/sh\n"+script+"\n")
			h.Must(t, "chmod 755 "+path)
		}, func() {
			t.Helper()
			h.Must(t, "systemctl stop node@a; mv "+path+".real "+path)
		}
}

// sameRuns fails unless each step is still in the run that it was in before.
func sameRuns(t *testing.T, h *host, before map[string]string) {
	t.Helper()
	for name, id := range h.runs(t, "a") {
		if id != before[name] {
			t.Errorf("%s was run again", name)
		}
	}
	h.wantUp(t, "a")
}
