package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"berth/helpers/machine"
)

// operations are what a person, or bad luck, does to a host with slots a and b; %s is the slot.
var operations = []string{
	"systemctl start node@%s",
	"systemctl start node@%s",
	"systemctl stop node@%s",
	"systemctl restart node@%s",
	"systemctl start --no-block node@%s",
	"systemctl start --no-block node@%s",
	"systemctl stop --no-block node@%s",
	"systemctl restart --no-block node@%s",
	"systemctl start --no-block systemd-nspawn@node-%s",
	"systemctl stop --no-block systemd-nspawn@node-%s",
	"kill -9 $(systemctl show -P MainPID systemd-nspawn@node-%s)",
	"kill -9 $(machinectl show node-%s -p Leader --value)",
	"machinectl reboot node-%s",
	"machinectl poweroff node-%s",
	"machinectl terminate node-%s",
	"systemctl daemon-reload",
	"systemctl restart systemd-machined",
	"systemctl reset-failed",
}

// random does operations in an order that its seed decides (BERTH_SEED, else the time). Now and then it lets the host come to rest and looks
// whether all is as it must be.
func random(t *testing.T, h *host) {
	rounds := 60
	if os.Getenv("BERTH_LONG") != "" {
		rounds = 600
	}
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("BERTH_SEED"); s != "" {
		if _, err := fmt.Sscan(s, &seed); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("to see this again: BERTH_SEED=%d", seed)
	choose := rand.New(rand.NewPCG(seed, 0))

	both := h.watchBoth(t)
	var done []string
	up := map[string]int{}
	for round := range rounds {
		operation := strings.ReplaceAll(operations[choose.IntN(len(operations))], "%s", []string{"a", "b"}[choose.IntN(2)])
		begin := time.Now()
		out, exit := h.try(t, "timeout 60 "+"sh -c '"+operation+"'")
		done = append(done, fmt.Sprintf("%3d %-60s exit status %d after %v %s", round, operation, exit,
			time.Since(begin).Round(time.Millisecond), strings.SplitN(out, "\n", 2)[0]))
		if exit == 124 {
			t.Errorf("%s: hangs", operation)
		}
		if choose.IntN(3) == 0 {
			up[h.consistent(t)]++
		}
		if t.Failed() {
			t.Fatalf("operations:\n%s", strings.Join(done, "\n"))
		}
	}
	t.Logf("what was up at rest: %v; operations:\n%s", up, strings.Join(done, "\n"))
	h.Must(t, "timeout 60 systemctl stop node@a node@b; systemctl reset-failed")
	h.consistent(t)
	h.wantDown(t, "a")
	h.wantDown(t, "b")
	if out := both(); !strings.Contains(out, " looks, 0 at both") {
		t.Errorf("both machines were alive: %s", out)
	}
}

// consistent waits until the host is at rest with each slot either up as a whole or down as a whole, and returns which is up.
// All of it is awaited: a machine that was told to reboot or to power off looks unchanged from outside, for a moment.
func (h *host) consistent(t *testing.T) string {
	t.Helper()
	var up []string
	h.awaitEvent(t, "the host at rest, each slot up or down", func() (string, bool) {
		jobs, err := h.bus(t).ListJobsContext(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if len(jobs) > 0 {
			return fmt.Sprint(jobs), false
		}
		up = nil
		for _, slot := range []string{"a", "b"} {
			units, sound := h.units(t, slot), "test ! -e /run/berth/claims/"+slot+
				" && ! grep -s 'populated 1' /sys/fs/cgroup/machine.slice/systemd-nspawn@node-"+slot+".service/cgroup.events"
			if isUp(units, slot) {
				up = append(up, slot)
				sound = "test -e /run/berth/claims/" + slot + " && systemctl -M node-" + slot + " is-active containerd kubelet"
			} else if !isDown(units) {
				return fmt.Sprint(units), false
			}
			if out, exit := h.try(t, sound); exit != 0 {
				return "slot " + slot + ": " + sound + ": " + out, false
			}
		}
		return "", true
	})
	if len(up) > 1 {
		t.Errorf("up are %v", up)
	}
	return strings.Join(up, " ")
}

// isDown tells whether no step runs or is about to.
func isDown(units map[string]machine.Unit) bool {
	for _, u := range units {
		if u.Running() || u.Busy() {
			return false
		}
	}
	return true
}

// watchBoth starts a watcher in the host that looks at the cgroups of both machines all the time, as fast as it can. What it
// returns ends it and tells what it saw: "N looks, M at both".
func (h *host) watchBoth(t *testing.T) (end func() string) {
	t.Helper()
	h.write(t, "/run/watch.sh", `
a=/sys/fs/cgroup/machine.slice/systemd-nspawn@node-a.service/cgroup.events b=${a/node-a/node-b}
trap 'echo $looks looks, $both at both >/run/watch.out; exit' TERM
while :; do
	x= y=
	{ read -r _ x <$a; read -r _ y <$b; } 2>/dev/null
	looks=$((looks+1))
	[ "$x$y" = 11 ] && both=$((both+1))
done
`)
	h.Must(t, "rm -f /run/watch.out; systemd-run --quiet --unit=watch --property=Environment=both=0 --property=Nice=5 bash /run/watch.sh")
	return func() string {
		return h.Must(t, "systemctl stop watch; cat /run/watch.out")
	}
}
