package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/helpers/machine"
)

// troubleCases are about what a host can be short of, and about those who do not answer.
var troubleCases = []testCase{
	{"no room, or none to write in: the file is named, and the next try finds room", func(t *testing.T, h *host) {
		const root = "/var/lib/machines/node-a"
		h.start(t, "a") // so that there is something to lose
		h.Must(t, "systemctl stop node@a")
		h.write(t, "/run/systemd/system/node@a.service.d/99-test.conf", "[Service]\nRestartSec=500ms\n")
		for _, c := range []struct{ why, spoil, mend, reason string }{
			{"the machine's root file system is full", fill(root + "/etc/containerd"), "umount -l " + root + "/etc/containerd",
				`step node-render-containerd@a.service failed: "etc/containerd/config.toml" beneath`},
			{"/run is full, for the machine's settings", fill("/run/systemd/nspawn"), "umount -l /run/systemd/nspawn",
				`step node-render-nspawn@a.service failed: "/run/systemd/nspawn/node-a.nspawn": no space left on device: make room there`},
			{"/run is full, for the claim", fill("/run/berth"), "umount -l /run/berth",
				`step node-peer-guard@a.service failed: `},
			{"the machine's root file system is read-only", fmt.Sprintf("rm %[1]s/etc/systemd/system/kubelet.service; mount --bind %[1]s %[1]s; mount -o remount,bind,ro %[1]s", root),
				"umount -l " + root, `step node-render-kubelet@a.service failed: "etc/systemd/system/kubelet.service" beneath`},
		} {
			t.Run(c.why, func(t *testing.T) {
				cursor := h.cursor(t)
				h.Must(t, "set -e; systemctl daemon-reload; "+c.spoil)
				h.fails(t, "systemctl start node@a")
				out, _ := h.try(t, "journalctl --sync; journalctl --no-pager --quiet -u node@a --after-cursor='"+cursor+"'")
				want(t, out, c.reason)
				if strings.Contains(c.why, "full") {
					want(t, out, "no space left on device: make room there (see: df, df --inodes)")
				} else {
					want(t, out, "read-only file system: mount it so that it can be written to")
				}
				h.Must(t, c.mend)
				h.await(t, "the node", func(units map[string]machine.Unit) bool { return isUp(units, "a") })
				h.wantUp(t, "a")
				h.Must(t, "systemctl stop node@a")
				h.wantDown(t, "a")
				h.noStrays(t)
			})
		}
	}},
	{"who does not answer on D-Bus is named, within the budget", func(t *testing.T, h *host) {
		silent := func(pid, command, reason string) {
			t.Helper()
			begin := time.Now()
			out, exit := h.try(t, fmt.Sprintf(`pid=%s exit=0; kill -STOP $pid
				BERTH_BUDGET=2s timeout 60 /usr/lib/berth/%s || exit=$?
				kill -CONT $pid; exit $exit`, pid, command))
			if exit != 4 {
				t.Errorf("%s: exit code %d: %s", command, exit, out)
			}
			want(t, out, reason)
			// Of budgets 2 s, and 4 s for the kubelet; the rest is for a machine that does much else.
			if took := time.Since(begin); took > 30*time.Second {
				t.Errorf("%s: it took %v", command, took)
			}
		}
		const machined, bus = "$(systemctl show -P MainPID systemd-machined)", "$(systemctl show -P MainPID dbus)"
		h.Must(t, "systemctl start systemd-machined")
		silent(machined, "peer-guard a", "slot a: not within 2s: ask systemd-machined for node-")
		silent(bus, "peer-guard a", "slot a: not within 2s: the host's message bus: no answer on /run/dbus/system_bus_socket")

		h.start(t, "a")
		h.goal(t, strings.Replace(Goal+budgets, `ready = "30s"`, `ready = "4s"`, 1)) // shorter than a start may take
		innerBus := "$(head -n1 " + cgroupA + "/payload/system.slice/dbus.service/cgroup.procs)"
		const init = "$(head -n1 " + cgroupA + "/payload/init.scope/cgroup.procs)"
		silent(innerBus, "wait-dbus a", "D-Bus inside machine node-a: not within 2s: ")
		silent(innerBus, "machine-unit a kubelet.service", "D-Bus inside machine node-a: not within 1s: ")
		silent(innerBus, "machine-unit --stop a kubelet.service", "slot a: not within 2s: the message bus of machine node-a: no answer on ")
		silent(innerBus, "wait-kubelet a", "kubelet in slot a: not within 4.3s: ")
		silent(init, "wait-dbus a", "D-Bus inside machine node-a: not within 2s: ")
		silent(init, "machine-unit a kubelet.service", "D-Bus inside machine node-a: not within 1s: ")
		silent(init, "machine-unit --stop a kubelet.service", "not within 2s: ")
		h.wantUp(t, "a")

		// A stop does not wait for those who never answer, but for the budgets of the two steps.
		h.Must(t, "kill -STOP "+innerBus+"; timeout 60 systemctl stop node@a")
		h.wantDown(t, "a")
	}},
}

// fill covers a folder with a file system that is full.
func fill(dir string) string {
	return fmt.Sprintf("mkdir -p %[1]s; mount -t tmpfs -o size=4k full %[1]s; mkdir -p %[1]s/claims; head -c 4096 /dev/zero >%[1]s/fill", dir)
}
