package node

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"berth/helpers/machine"
)

// lastGoodCases are about a goal state that is broken after slots have been ready with a valid one.
var lastGoodCases = []testCase{
	{"29 broken goal state: a slot goes on with its last good one, and with the next valid one", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.recorded(t, "a")
		units := h.generated(t)
		h.goal(t, "boot = \"b\"\n"+broken) // the link for the next boot is that of the last good one, too: none
		if now := h.generated(t); now != units {
			t.Errorf("units were:\n%s\nand now are:\n%s", units, now)
		}
		h.lastGood(t, "a", func() { h.Must(t, "systemctl restart node@a") })
		for _, crash := range []string{
			"kill -9 $(systemctl show -P MainPID systemd-nspawn@node-a)",
			"systemctl stop node@a; machinectl start node-a",
		} {
			h.lastGood(t, "a", func() { h.Must(t, crash) })
		}
		if out, exit := h.try(t, "berth check"); exit != 3 || !strings.Contains(out, "slot a: goes on with its last good goal state") {
			t.Errorf("berth check: exit status %d:\n%s", exit, out)
		}
		if out, exit := h.try(t, "berth status"); exit != 3 || !strings.Contains(out, "its last good one") {
			t.Errorf("berth status: exit status %d:\n%s", exit, out)
		}
		if out, exit := h.try(t, "berth diff --exit-code a"); exit != 0 || !strings.Contains(out, brokenAt[len("/etc/berth/goal.toml:2"):]) {
			t.Errorf("berth diff: exit status %d:\n%s", exit, out)
		}
		// A slot that has never been ready has none.
		h.stopsInOrder(t, "a")
		h.notInGoal(t, "b", strings.Replace(brokenAt, ":2:", ":3:", 1))
		h.start(t, "a")
		h.Must(t, "systemctl stop node@a")

		h.goal(t, strings.Replace(Goal, "[kubelet]\n", "[kubelet]\nlabels = { \"example.com/mended\" = \"yes\" }\n", 1)+budgets)
		cursor := h.cursor(t)
		h.start(t, "a")
		if out, _ := h.try(t, "journalctl --no-pager --quiet -u node@a --after-cursor='"+cursor+"' | grep 'last good'"); out != "" {
			t.Errorf("with a valid goal state:\n%s", out)
		}
		want(t, h.Must(t, "cat /var/lib/machines/node-a/etc/systemd/system/kubelet.service /var/lib/machines/node-a/var/lib/kubelet/config.yaml"), "mended")
		h.awaitEvent(t, "the record of the new goal state", func() (string, bool) {
			out, _ := h.try(t, "cat /var/lib/berth/a")
			return out, strings.Contains(out, "mended")
		})
	}},
	{"29 broken goal state: a last good one that is damaged is told, and not used", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.recorded(t, "a")
		h.Must(t, "systemctl stop node@a; sed -i s/10.0.0.1/10.0.0.2/ /var/lib/berth/a")
		h.goal(t, broken)
		h.notInGoal(t, "a", brokenAt, "the last good goal state of slot a is not used: /var/lib/berth/a: it is damaged")
		out, _ := h.try(t, "berth status; berth check")
		want(t, out, "/var/lib/berth/a: it is damaged")
		h.goal(t, Goal+budgets)
		h.start(t, "a")
		h.recorded(t, "a")
		h.goal(t, broken)
		h.lastGood(t, "a", func() { h.Must(t, "systemctl restart node@a") })
	}},
	{"29 a goal state that is changed while a slot starts is not recorded", func(t *testing.T, h *host) {
		h.Must(t, "systemctl start --no-block node@a")
		h.await(t, "the machine", func(units map[string]machine.Unit) bool {
			return units["systemd-nspawn@node-a.service"].Active == "active"
		})
		h.write(t, "/etc/berth/goal.toml", Goal+budgets+"# changed\n")
		h.await(t, "the node", func(units map[string]machine.Unit) bool { return isUp(units, "a") })
		h.awaitEvent(t, "the refusal to record", func() (string, bool) {
			out := h.Must(t, "journalctl --sync; journalctl --no-pager -u node@a")
			return out, strings.Contains(out, "the goal state is not recorded as the slot's last good one, as it was changed while the slot started")
		})
		h.Must(t, "test ! -e /var/lib/berth/a")
		want(t, h.Must(t, "berth status"), "changed since the slot started")
		h.Must(t, "systemctl restart node@a")
		h.recorded(t, "a")
		if out := h.Must(t, "stat -c '%a %n' /var/lib/berth /var/lib/berth/a"); out != "700 /var/lib/berth\n600 /var/lib/berth/a" {
			t.Errorf("modes:\n%s", out)
		}
	}},
	{"29 a record that is being made is in nobody's way, and none is made of a node that is not up", func(t *testing.T, h *host) {
		const dropIn = "/run/systemd/system/node-record-applied@a.service.d/99-test.conf"
		h.write(t, dropIn, "[Service]\nExecStartPre=/bin/sh -c 'until [ -e /run/go ]; do sleep 0.02; done'\n")
		defer h.Must(t, "rm -f /run/go "+dropIn+"; systemctl daemon-reload")
		h.Must(t, "systemctl daemon-reload")
		atWork := func() {
			t.Helper()
			h.Must(t, "rm -f /run/go")
			h.start(t, "a")
			h.awaitRecord(t, "start-pre") // beyond its condition
		}
		atWork()
		h.Must(t, "machinectl terminate node-a")
		h.awaitDown(t, "a")
		h.Must(t, "systemctl reset-failed; >/run/go")
		h.recorded(t, "a")

		atWork()
		h.Must(t, "systemctl stop node@a; >/run/go")
		h.awaitRecord(t, "dead")
		h.Must(t, "rm /var/lib/berth/a; systemctl start node-record-applied@a; test ! -e /var/lib/berth/a")
		if failed := h.Must(t, "systemctl --failed --no-legend"); failed != "" {
			t.Errorf("failed:\n%s", failed)
		}
	}},
	{"34 the last good goal state of a slot that was taken out goes with the next record", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.recorded(t, "a")
		h.Must(t, "systemctl stop node@a")
		h.goal(t, withoutA)
		h.start(t, "b")
		h.recorded(t, "b")
		h.Must(t, "test ! -e /var/lib/berth/a; systemctl stop node@b")
		h.goal(t, broken)
		h.notInGoal(t, "a", brokenAt)
		h.lastGood(t, "b", func() { h.Must(t, "systemctl start node@b") })
	}},
	{"29 boot with a broken goal state: the boot slot comes up with its last good one, on whatever file system that is", func(t *testing.T, h *host) {
		h = h.another(t, booting, nil)
		h.wantBooted(t, "a")
		h.recorded(t, "a")
		units := h.generated(t)
		h.write(t, "/etc/berth/goal.toml", broken)
		reboot := func() {
			t.Helper()
			if err := h.Reboot(t.Context()); err != nil {
				t.Fatal(err)
			}
			h.wantBooted(t, "a")
			if now := h.generated(t); now != units {
				t.Errorf("units were:\n%s\nand now are:\n%s", units, now)
			}
			want(t, h.Must(t, "journalctl --sync; journalctl --no-pager --boot -u node@a --priority=warning"), lastGoodWarning)
		}
		reboot()
		h.Must(t, "! systemctl show --property=ActiveEnterTimestampMonotonic berth-last-good.service | grep '=[1-9]'")

		// A file system that is not mounted when the generators run. The folder is there, and empty.
		h.write(t, "/etc/systemd/system/var-lib-berth.mount",
			"[Unit]\nBefore=local-fs.target\n[Mount]\nWhat=/srv/berth\nWhere=/var/lib/berth\nType=none\nOptions=bind\n[Install]\nWantedBy=local-fs.target\n")
		h.Must(t, "mv /var/lib/berth /srv; mkdir -m 700 /var/lib/berth; systemctl enable var-lib-berth.mount")
		reboot()
		want(t, h.Must(t, "journalctl --sync; journalctl --no-pager --boot -u berth-last-good.service"), "Finished")
	}},
}

const lastGoodWarning = "the goal state is broken, and the slot goes on with its last good one, recorded 2"

// generated returns all that the generator has made for slot a, and the boot link.
func (h *host) generated(t *testing.T) string {
	t.Helper()
	return h.Must(t, `cd /run/systemd/generator && for f in $(find . -path '*@a.*' -o -path '*node-a*' -o -path '*2da.mount' -o -path '*.wants/node@*' | sort); do
			[ -d "$f" ] || { echo "$f $(readlink "$f")"; cat "$f"; }
		done`)
}

// recorded waits until the goal state with which a slot has come up is in store. A start may return before.
func (h *host) recorded(t *testing.T, slot string) {
	t.Helper()
	node, err := h.bus(t).Service(t.Context(), "node@"+slot+".service")
	if err != nil {
		t.Fatal(err)
	}
	h.awaitEvent(t, "the record of slot "+slot, func() (string, bool) {
		info, err := os.Stat(h.path("/var/lib/berth/" + slot))
		return fmt.Sprint(err), err == nil && info.ModTime().After(node.ActiveSince)
	})
	want(t, h.Must(t, "cat /var/lib/berth/"+slot), "# Last good goal state", "\nslot "+slot+"\n", "[cluster]")
}

// awaitRecord waits for a state of the step that records slot a.
func (h *host) awaitRecord(t *testing.T, state string) {
	t.Helper()
	h.awaitEvent(t, "the record, "+state, func() (string, bool) {
		now := property(t, h, "node-record-applied@a", "SubState")
		return now, now == state
	})
}

// forget makes a slot one that has never been ready.
func (h *host) forget(t *testing.T, slot string) {
	t.Helper()
	h.recorded(t, slot)
	h.Must(t, "rm /var/lib/berth/"+slot)
}

// lastGood requires that a command brings the slot up anew with its last good goal state, and that this is told.
func (h *host) lastGood(t *testing.T, slot string, command func()) {
	t.Helper()
	cursor, before := h.cursor(t), h.runs(t, slot)
	command()
	h.awaitAnew(t, slot, before)
	// Without --priority=: behind a cursor that does not match, journalctl 252 leaves out the first entry that does.
	want(t, h.Must(t, "journalctl --sync; journalctl --no-pager -u node@"+slot+" --after-cursor='"+cursor+"'"), lastGoodWarning)
	want(t, property(t, h, "node@"+slot, "StatusText"), "is ready, with its last good goal state")
}
