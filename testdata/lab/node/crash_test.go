package node

import (
	"testing"

	"berth/helpers/machine"
)

var crashCases = []testCase{
	{"14 kill -9 of systemd-nspawn", comesBack("kill -9 $(systemctl show -P MainPID systemd-nspawn@node-a)")},
	{"14 kill -9 of the machine's PID 1", comesBack("kill -9 $(machinectl show node-a -p Leader --value)")},
	{"14 machinectl reboot", comesBack("machinectl reboot node-a")},
	{"14 kill -9 of the machine's PID 1 while the node starts", func(t *testing.T, h *host) {
		h.Must(t, "systemctl start --no-block node@a")
		h.await(t, "the machine's boot", func(units map[string]machine.Unit) bool {
			return units["node-wait-dbus@a.service"].Active == "activating"
		})
		h.Must(t, "kill -9 $(machinectl show node-a -p Leader --value)")
		h.await(t, "the node", func(units map[string]machine.Unit) bool { return isUp(units, "a") })
		h.wantUp(t, "a")
	}},
	{"14 restart of systemd-machined", func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		h.Must(t, "systemctl restart systemd-machined")
		sameRuns(t, h, before)
		h.Must(t, "systemctl restart node@a")
		h.awaitAnew(t, "a", before)
	}},
	{"a stop while systemd-machined is dead", func(t *testing.T, h *host) {
		h.start(t, "a")
		cursor := h.cursor(t)
		// Whoever asks for it makes the bus start it, which waits for the stop, which waits for whoever asked.
		h.Must(t, "systemctl kill --signal=KILL systemd-machined; systemctl stop --no-block node@a")
		h.await(t, "the stop of all steps after the machine", func(units map[string]machine.Unit) bool {
			return !units["node-wait-dbus@a.service"].Running() && !units["node-containerd@a.service"].Running()
		})
		// systemd-nspawn itself asks for it, and would wait for 25 s and more, with or without berth. It alone is killed:
		// "systemctl kill" writes cgroup.kill on 262, which spoils the cgroup for the next start (see machine.Kill).
		h.Must(t, "kill -9 $(systemctl show -P MainPID systemd-nspawn@node-a)")
		h.awaitDown(t, "a")
		if out, _ := h.try(t, "journalctl --no-pager --quiet --output=cat --after-cursor='"+cursor+"' BERTH_SLOT=a --priority=err _COMM=machine-unit + _COMM=peer-guard"); out != "" {
			t.Errorf("a step could not do its work: %s", out)
		}
	}},
	{"kill -9 of kubelet", func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		h.Must(t, `pid=$(systemctl -M node-a show -P MainPID kubelet); systemctl -M node-a kill --signal=KILL kubelet
			for i in $(seq 200); do new=$(systemctl -M node-a show -P MainPID kubelet); [ $new != $pid ] && [ $new != 0 ] && exit; sleep 0.1; done; exit 1`)
		h.Must(t, `for i in $(seq 200); do systemctl -M node-a is-active --quiet kubelet && exit; sleep 0.1; done; exit 1`)
		sameRuns(t, h, before) // the machine's own systemd restarts it; the chain is not disturbed
	}},
	{"the end of the machine is the end of the node", func(t *testing.T, h *host) {
		for _, command := range []string{"machinectl poweroff node-a", "machinectl terminate node-a", "systemctl stop systemd-nspawn@node-a"} {
			h.start(t, "a")
			h.Must(t, command)
			h.awaitDown(t, "a")
			h.Must(t, "systemctl reset-failed")
		}
	}},
	{"a stop at any moment of a start returns soon, and all is down", func(t *testing.T, h *host) {
		for _, unit := range steps("a") {
			h.Must(t, "systemctl start --no-block node@a")
			h.await(t, unit+" at work", func(units map[string]machine.Unit) bool { return units[unit].Active != "inactive" })
			// Far less than the 90 s after which systemd would kill a machine that has not heard the signal.
			h.Must(t, "timeout 30 systemctl stop node@a")
			h.awaitDown(t, "a")
		}
	}},
	{"15 what the last run left behind is no obstacle", func(t *testing.T, h *host) {
		// The mount of 256 and later, a process in the cgroup of the machine's unit, and machined's memory of the machine.
		h.start(t, "a")
		h.Must(t, `mkdir -p /run/systemd/system/systemd-nspawn@node-a.service.d
			printf '[Service]\nRestart=no\n' >/run/systemd/system/systemd-nspawn@node-a.service.d/99-test.conf; systemctl daemon-reload
			cp /run/systemd/machines/node-a /run/kept
			kill -9 $(systemctl show -P MainPID systemd-nspawn@node-a)`)
		h.await(t, "the end of the machine", func(units map[string]machine.Unit) bool {
			return !units["systemd-nspawn@node-a.service"].Running() && !units["node@a.service"].Busy()
		})
		h.Must(t, `systemctl stop node@a
			mkdir -p /run/systemd/nspawn/unix-export/node-a; mountpoint -q /run/systemd/nspawn/unix-export/node-a || mount -t tmpfs left /run/systemd/nspawn/unix-export/node-a
			systemctl stop systemd-machined; cp /run/kept /run/systemd/machines/node-a
			cg=/sys/fs/cgroup/machine.slice/systemd-nspawn@node-a.service; mkdir -p $cg/left
			setsid sleep 1000 >/dev/null 2>&1 & echo $! >$cg/left/cgroup.procs
			rm -r /run/systemd/system/systemd-nspawn@node-a.service.d; systemctl daemon-reload`)
		h.start(t, "a")
		out, _ := h.try(t, "journalctl --no-pager --boot -u node-peer-guard@a")
		want(t, out, "ending what the last run of machine node-a left behind: process", "(sleep)", "unmounted")
	}},
}

// comesBack is the case of a crash after which the whole chain runs again by itself and ends ready.
func comesBack(crash string) func(t *testing.T, h *host) {
	return func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		h.Must(t, crash)
		h.awaitAnew(t, "a", before)
	}
}
