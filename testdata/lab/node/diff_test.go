package node

import (
	"strings"
	"testing"
)

var diffCases = []testCase{
	{"berth diff: nothing after a start, what a change needs, and nothing after the restart", diffTells},
	{"berth diff and show: a token that systemd gives to the step alone", diffWithCredential},
}

// same fails if anything on the host is not as it would be written.
func (h *host) same(t *testing.T, when string) {
	t.Helper()
	if out, exit := h.try(t, "berth diff --exit-code a"); out != "" || exit != 0 {
		t.Errorf("%s: exit status %d; want no difference:\n%s", when, exit, out)
	}
}

func diffTells(t *testing.T, h *host) {
	h.Must(t, "rm -f /run/systemd/nspawn/node-a.nspawn") // of a case before
	want(t, h.Must(t, "berth diff a"), "/run/systemd/nspawn/node-a.nspawn is missing",
		"needs nothing: the slot is not running, and reads it when it starts")
	h.start(t, "a")
	h.same(t, "after a start")
	// Each change of the goal state, one on top of the other, with what its files need.
	goal := Goal + budgets
	change := func(before, after, path string, needs ...string) {
		t.Helper()
		if goal = strings.Replace(goal, before, after, 1); !strings.Contains(goal, after) {
			t.Fatalf("no %q in the goal state", before)
		}
		h.write(t, "/etc/berth/goal.toml", goal)
		out := h.fails(t, "berth diff --exit-code a")
		want(t, out, append(needs, path)...)
	}
	const machine = "/var/lib/machines/node-a/"
	change("[kubelet]\n", "[kubelet.config]\nmaxPods = 7\n[kubelet]\n", machine+"var/lib/kubelet/config.yaml differs", "+maxPods: 7",
		"slot a needs restart of kubelet: systemctl restart node@a\n")
	change("settle = \"300ms\"", "settle = \"400ms\"", "/run/systemd/generator/node@a.service differs",
		"slot a needs daemon-reload and restart of kubelet: systemctl daemon-reload; systemctl restart node@a\n")
	change("[slot.a]\n", "[machine]\nmounts = [{ source = \"/srv\", target = \"/srv/of-host\" }]\n[slot.a]\n", "/run/systemd/nspawn/node-a.nspawn differs",
		"slot a needs daemon-reload and restart of the machine: systemctl daemon-reload; systemctl restart node@a\n")
	before := h.runs(t, "a")
	h.Must(t, "systemctl daemon-reload; systemctl restart node@a")
	h.awaitAnew(t, "a", before)
	h.same(t, "after the command that it printed")
	if got := h.seen(t).Config.MaxPods; got != 7 {
		t.Errorf("kubelet has maxPods %d; want 7", got)
	}

	// A registry's mirror needs no restart.
	change("[slot.a]\n", "[containerd.registry.\"example.com\"]\nmirrors = [{ url = \"http://127.0.0.1:5000\" }]\n[slot.a]\n",
		machine+"etc/containerd/certs.d/example.com/hosts.toml is missing", "slot a needs no restart: /usr/lib/berth/render-config containerd a\n")
	h.Must(t, "/usr/lib/berth/render-config containerd a")
	h.same(t, "after the command for what needs no restart")

	// A drop-in of the generator that is not wanted any more, and one that render-config has made.
	h.Must(t, `
		mkdir -p /run/systemd/generator/node-peer-guard@a.service.d /run/systemd/system/systemd-nspawn@node-a.service.d
		echo '[Unit]' | tee /run/systemd/generator/node-peer-guard@a.service.d/50-berth.conf > /run/systemd/system/systemd-nspawn@node-a.service.d/60-berth-devices.conf`)
	want(t, h.Must(t, "berth diff a"),
		"/run/systemd/generator/node-peer-guard@a.service.d/50-berth.conf is left over\nneeds daemon-reload: ",
		"/run/systemd/system/systemd-nspawn@node-a.service.d/60-berth-devices.conf is left over\nneeds daemon-reload and restart of the machine: ")
	h.Must(t, "rm -r /run/systemd/system/systemd-nspawn@node-a.service.d; systemctl daemon-reload")
	h.same(t, "after a daemon-reload")

	// Who is not root is told of what he cannot read, and sees the rest.
	out := h.fails(t, "setpriv --reuid=65534 --regid=65534 --clear-groups berth show a")
	want(t, out, "==> /run/systemd/generator/node@a.service (0644, generator)\n", "==> /run/systemd/nspawn/node-a.nspawn (0644, render-config nspawn)\n",
		"berth: slot a: render-config kubelet: ", "permission denied")
}

func diffWithCredential(t *testing.T, h *host) {
	const token = "abcdef.0123456789abcdef"
	h.Must(t, "mkdir -p /etc/credstore; printf "+token+" > /etc/credstore/token; chmod 600 /etc/credstore/token")
	h.goal(t, strings.Replace(Goal, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, `bootstrap_token_credential = "token"`, 1)+budgets)
	h.start(t, "a")
	const warning = "berth: slot a: render-config kubelet: warning: kubelet.bootstrap_token_credential: not known here: systemd gives it to the step alone"
	if out := h.Must(t, "berth diff --exit-code a 2>&1"); out != warning {
		t.Errorf("after a start; want only that the token was not compared:\n%s", out)
	}
	for _, command := range []string{"show a", "show --json a", "diff a"} {
		if out := h.Must(t, "berth "+command+" 2>&1"); strings.Contains(out, token) {
			t.Errorf("berth %s prints the token:\n%s", command, out)
		}
	}
}
