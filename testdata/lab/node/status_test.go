package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/status"
	"berth/helpers/step"
)

var statusCases = []testCase{
	{"status of a node that is ready, of its peer that is refused, and of a slot that was taken out", func(t *testing.T, h *host) {
		if out := h.status(t, step.ExitNotReady, ""); strings.Contains(out, "●") {
			t.Errorf("a host at rest:\n%s", out)
		}
		h.watchStart(t)
		h.wantUp(t, "a")
		h.fails(t, "systemctl start node@b")
		want(t, h.status(t, step.ExitDone, ""), "● slot a: ready since", "Debian GNU/Linux", "kubelet v0.0.0-stub",
			"✓ nvidia-wire", "✗ slot b: refused", "slot b refused: slot a holds the host", "systemctl stop node@a && systemctl start node@b")
		h.status(t, step.ExitDone, "a")
		h.status(t, step.ExitNotReady, "b")
		h.status(t, step.ExitNotReady, "a b")
		h.status(t, step.ExitInvalid, "c")

		var r status.Report
		if err := json.Unmarshal([]byte(h.status(t, step.ExitDone, "--json a")), &r); err != nil {
			t.Fatal(err)
		}
		a := r.Slots[0]
		if len(r.Slots) != 1 || a.State != status.Ready || a.Since == nil || !a.Claim || len(a.Stale) > 0 || a.GoalNewer || len(a.Steps) != 10 {
			t.Errorf("slot a: %+v", a)
		}
		installed := h.Must(t, "chroot /var/lib/machines/node-a dpkg-query --show --showformat='${Version}' containerd")
		if a.Containerd.Version != installed || a.Containerd.State != "active" || a.Kubelet.State != "active" {
			t.Errorf("containerd %+v, kubelet %+v; want containerd %s, both active", a.Containerd, a.Kubelet, installed)
		}
		for _, s := range a.Steps {
			if s.State != status.Done || s.Seconds == nil || *s.Seconds < 0 || *s.Seconds > 60 {
				t.Errorf("step %+v; want it done in a moment", s)
			}
		}
		// Through the message bus, as systemd's own socket is for root alone.
		const nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups berth status "
		want(t, h.Must(t, nobody+"a"), "slot a: ready since", "kubelet unknown", "the node in slot a is ready")
		h.Must(t, nobody+`--watch >/run/watch &
			watch=$!
			timeout 60 sh -c 'until grep "slot b: refused" /run/watch; do sleep 0.1; done'
			systemctl daemon-reexec
			systemctl reset-failed
			timeout 60 sh -c 'until grep "slot b: down" /run/watch; do sleep 0.1; done'
			kill $watch
			wait $watch`)

		h.goal(t, strings.Replace(Goal, "[slot.a]\n", "", 1)+budgets)
		want(t, h.status(t, step.ExitDone, ""), "slot a: ready", "the slot is not in it (any more)", "systemctl stop node@a")
		h.write(t, "/etc/berth/goal.toml", Goal+budgets+"[kubelet]\n")
		want(t, h.status(t, step.ExitInvalid, ""), "goal state: not valid", "/etc/berth/goal.toml:", "editor +", "slot a: ready")
		h.write(t, "/etc/berth/goal.toml", Goal+budgets)
		want(t, h.status(t, step.ExitDone, "a"), "changed: not as it says", "systemctl restart node@a")
		h.goal(t, Goal+budgets+"# changed\n")
		want(t, h.status(t, step.ExitDone, "a"), "changed since the slot started", "systemctl restart node@a")
	}},
	{"status of a kubelet that fails, and of one that crashes later", func(t *testing.T, h *host) {
		h.knob(t, "node-a", "fail", "no such disk")
		h.fails(t, "systemctl start node@a")
		want(t, h.status(t, step.ExitNotReady, "a"), "✗ kubelet", "✗ node", `"command failed" err="no such disk"`, "journalctl -M node-a -u kubelet.service")
		// A watch that is not on a terminal prints a line for each change, also for what happens inside the machine.
		h.Must(t, `
			rm /var/lib/machines/node-a/etc/stubkubelet/fail
			systemctl restart --no-block node@a
			timeout 60 berth status --watch --until-ready a >/run/until || { cat /run/until; exit 1; }
			tail -n 1 /run/until | grep 'slot a: ready$'
			berth status --watch a >/run/watch &
			watch=$!
			timeout 60 sh -c 'until grep "slot a: ready$" /run/watch; do sleep 0.1; done'
			echo now >/var/lib/machines/node-a/etc/stubkubelet/fail
			systemctl -M node-a kill --signal=KILL kubelet
			timeout 60 sh -c 'until grep "slot a: degraded: kubelet.service is" /run/watch; do sleep 0.1; done'
			kill $watch
			wait $watch
			timeout 60 sh -c 'until berth status a | grep "command failed.*now"; do sleep 0.1; done'`)
		want(t, h.status(t, step.ExitNotReady, "a"), "slot a: degraded", "✓ node")
	}},
}

// status runs berth status, requires an exit code, and returns what it printed.
func (h *host) status(t *testing.T, code int, args string) string {
	t.Helper()
	out, exit := h.try(t, fmt.Sprintf("LANG=C.UTF-8 berth status %s", args))
	if exit != code {
		t.Errorf("berth status %s: exit code %d, want %d\n%s", args, exit, code, out)
	}
	return out
}

// watchStart starts slot a, and sees it become ready on a terminal.
func (h *host) watchStart(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd, err := h.Command(ctx, "env", "TERM=xterm", "LANG=C.UTF-8", "berth", "status", "--watch", "a")
	if err != nil {
		t.Fatal(err)
	}
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if err := pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	before, err := unix.IoctlGetTermios(int(master.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	err = cmd.Start()
	slave.Close() // now the terminal ends with the command
	if err != nil {
		t.Fatal(err)
	}
	var drawn []byte // what has been read, and not been waited for yet
	until := func(what string) {
		t.Helper()
		for buf := make([]byte, 4096); !bytes.Contains(drawn, []byte(what)); {
			n, err := master.Read(buf)
			if err != nil {
				t.Fatalf("waiting for %q: %v: drawn: %q", what, err, drawn)
			}
			drawn = append(drawn, buf[:n]...)
		}
		_, drawn, _ = bytes.Cut(drawn, []byte(what))
	}
	until("slot a\x1b[0m: down")
	h.Must(t, "systemctl start --no-block node@a")
	until("ready\x1b[0m since")
	if err := pty.Setsize(master, &pty.Winsize{Rows: 6, Cols: 40}); err != nil {
		t.Fatal(err)
	}
	until("more lines)") // the signal of the new size
	if _, err := master.WriteString("q"); err != nil {
		t.Fatal(err)
	}
	until("\x1b[?1049l")        // the screen that was there before
	until("ready\x1b[0m since") // what was seen last stays
	if err := cmd.Wait(); err != nil {
		t.Errorf("q: %v", err)
	}
	after, err := unix.IoctlGetTermios(int(master.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the terminal's modes, -before +after:\n%s", diff)
	}
}
