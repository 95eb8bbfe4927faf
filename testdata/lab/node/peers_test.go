package node

import (
	"strings"
	"testing"

	"berth/helpers/machine"
)

// refusal is what a slot that is refused because of slot a must be told.
const refusal = "slot b refused: slot a holds the host (node@a.service is active); to release it: systemctl stop node@a.service"

// cgroupA is the cgroup of slot a's machine.
const cgroupA = "/sys/fs/cgroup/machine.slice/systemd-nspawn@node-a.service"

var peerCases = []testCase{
	{"08 a peer of a running slot is refused, however it is started", func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		for _, command := range []string{"systemctl start node@b", "systemctl start systemd-nspawn@node-b", "machinectl start node-b"} {
			h.fails(t, command)
			out, _ := h.try(t, "systemctl status --no-pager --lines=50 node@b")
			want(t, out, refusal)
			h.awaitDown(t, "b")
			h.Must(t, "systemctl reset-failed")
		}
		sameRuns(t, h, before)
	}},
	{"08 a refused slot is not tried again when the peer stops", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.fails(t, "systemctl start node@b")
		h.Must(t, "systemctl stop node@a")
		b := h.units(t, "b")["node@b.service"]
		if b.Active != "failed" || b.Busy() {
			t.Errorf("node@b is %s (%s); want it failed, and to stay so", b.Active, b.Sub)
		}
		h.wantDown(t, "a")
	}},
	{"09 of two starts at once one wins, fifty times", func(t *testing.T, h *host) {
		const rounds = 50
		both := h.watchBoth(t)
		winners := map[string]int{}
		for round := range rounds {
			// In one transaction, and from two shells at once; each fifth time until the winner is ready, else until it is
			// decided who that is.
			start, block := "systemctl start node@a node@b", "--no-block"
			if round%2 == 1 {
				start = "systemctl start node@a & systemctl start node@b & wait"
			}
			if round%5 == 0 {
				block = ""
			}
			h.try(t, strings.ReplaceAll(start, "start ", "start "+block+" "))
			winner := ""
			h.await(t, "one winner, one refusal", func(units map[string]machine.Unit) bool {
				for slot, peer := range map[string]string{"a": "b", "b": "a"} {
					if units["systemd-nspawn@node-"+slot+".service"].Active == "active" && units["node@"+peer+".service"].Active == "failed" {
						winner = slot
						return true
					}
				}
				return false
			}, "a", "b")
			if block == "" {
				h.wantUp(t, winner)
			}
			winners[winner]++
			h.Must(t, "systemctl stop node@a node@b; systemctl reset-failed")
		}
		out := both()
		want(t, out, " looks, 0 at both")
		t.Logf("winners: %v; %s", winners, out)
	}},
	{"10 a failed stop still protects", func(t *testing.T, h *host) {
		h.start(t, "a")
		// A process that no stop of the machine reaches: it is put into the cgroup of the unit and ignores what it can, and
		// systemd is told to kill nothing.
		h.write(t, "/run/systemd/system/systemd-nspawn@node-a.service.d/99-test.conf", "[Service]\nSendSIGKILL=no\nTimeoutStopSec=2s\n")
		pid := strings.TrimSpace(h.Must(t, `systemctl daemon-reload
			setsid sh -c 'trap "" TERM HUP; while :; do sleep 1000; done' >/dev/null 2>&1 & p=$!
			for c in supervisor payload .; do echo $p >`+cgroupA+`/$c/cgroup.procs && break; done 2>/dev/null
			echo $p`))
		h.try(t, "systemctl stop node@a")
		if _, exit := h.try(t, "test -e /run/berth/claims/a"); exit != 0 {
			t.Error("the claim was released while a process was left")
		}
		h.fails(t, "systemctl start node@b")
		out, _ := h.try(t, "journalctl --no-pager --boot -u node@b")
		want(t, out, "slot b refused: machine node-a is still alive: ", pid+" (sh)", "in the cgroup of systemd-nspawn@node-a.service")
		h.wantDown(t, "b")
		h.Must(t, "kill -9 -"+pid+"; while grep -q 'populated 1' "+cgroupA+`/cgroup.events 2>/dev/null; do :; done
			rm -r /run/systemd/system/systemd-nspawn@node-a.service.d; systemctl daemon-reload; systemctl reset-failed`)
		h.start(t, "b")
	}},
	{"11 machined has forgotten a machine that runs", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.Must(t, "systemctl stop systemd-machined; rm -f /run/systemd/machines/*; systemctl start systemd-machined")
		h.fails(t, "machinectl show node-a")
		h.fails(t, "systemctl start node@b")
		h.wantDown(t, "b")
		// Also when the claim is gone, too.
		h.Must(t, "rm /run/berth/claims/a; systemctl reset-failed")
		h.fails(t, "systemctl start node@b")
		out, _ := h.try(t, "journalctl --no-pager --boot -u node@b")
		want(t, out, "slot b refused: machine node-a is still alive: processes ", "in the cgroup of systemd-nspawn@node-a.service")
	}},
	{"11 a peer's machine that was started by hand, registered or not", func(t *testing.T, h *host) {
		for _, option := range []string{"--register=yes", "--register=no"} {
			h.Must(t, "systemd-run --quiet --property=Delegate=yes --property=Type=notify --unit=byhand systemd-nspawn --quiet --keep-unit "+option+
				` --boot --directory=/var/lib/machines/node-a --machine=node-a --private-users=no --capability=all "--system-call-filter=@keyring bpf perf_event_open"`)
			h.fails(t, "systemctl start node@b")
			out, _ := h.try(t, "journalctl --no-pager --boot -u node@b")
			want(t, out, "slot b refused: machine node-a is still alive: ")
			h.fails(t, "systemctl start node@a")
			out, _ = h.try(t, "journalctl --no-pager --boot -u node@a")
			want(t, out, "step node-peer-guard@a.service failed: machine node-a runs already: ")
			h.Must(t, "systemctl stop byhand; systemctl stop node@a node@b; systemctl reset-failed")
		}
	}},
	{"12 a claim of a run that no longer exists blocks nothing", func(t *testing.T, h *host) {
		h.Must(t, "mkdir -p /run/berth/claims; echo >/run/berth/claims/a")
		h.start(t, "b")
	}},
	{"13 something else answers kubelet's port", func(t *testing.T, h *host) {
		h.goal(t, Goal+quick)
		h.knob(t, "node-a", "no-healthz", "")
		// The host's systemd itself answers, for whoever connects. The slots share the host's network.
		h.write(t, "/run/systemd/system/other-health.socket", "[Socket]\nListenStream=127.0.0.1:10248\nAccept=yes\n")
		h.write(t, "/run/systemd/system/other-health@.service", "[Service]\nStandardInput=socket\nExecStart=/bin/echo HTTP/1.0 200 OK\n")
		h.Must(t, "systemctl daemon-reload; systemctl start other-health.socket")
		defer h.Must(t, "systemctl stop other-health.socket; rm /run/systemd/system/other-health*; systemctl daemon-reload")
		h.fails(t, "systemctl start node@a")
		out, _ := h.try(t, "journalctl --no-pager _SYSTEMD_UNIT=node@a.service")
		want(t, out, "something else than the kubelet of machine node-a listens on 127.0.0.1:10248")
	}},
	{"a start waits for a pending stop of the peer", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.Must(t, "systemctl stop --no-block node@a; systemctl start node@b")
		h.wantUp(t, "b")
		h.wantDown(t, "a")
	}},
	{"peers = [] lets two slots run at once", func(t *testing.T, h *host) {
		both := strings.NewReplacer("[slot.a]", "[slot.a]\npeers = []", "[slot.b]", "[slot.b]\npeers = []").Replace(Goal)
		h.goal(t, both+budgets)
		h.start(t, "a")
		// Both kubelets want the same port in this lab, so that b does not become ready; but it is not refused.
		h.Must(t, "systemctl start --no-block node@b")
		h.await(t, "slot b's claim", func(units map[string]machine.Unit) bool {
			return units["node-peer-guard@b.service"].Active == "active"
		}, "b")
	}},
}
