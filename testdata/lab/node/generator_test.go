package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/helpers/machine"
)

var (
	// broken is a goal state with a key that does not exist, and brokenAt how that is told.
	broken   = strings.Replace(Goal+budgets, "server", "sever", 1)
	brokenAt = "/etc/berth/goal.toml:2:1: cluster.sever: is not a key of the goal state: did you mean cluster.server?"
	// withoutA is the goal state after slot a was taken out.
	withoutA = strings.Replace(Goal+budgets, "[slot.a]\n", "", 1)
)

var generatorCases = []testCase{
	{"29 broken goal state: a start says where, and is not tried again", func(t *testing.T, h *host) {
		others := "systemctl show --property=Id --property=InvocationID --property=ActiveState dbus systemd-journald systemd-logind"
		before := h.Must(t, others)
		h.goal(t, broken)
		for _, slot := range []string{"a", "b"} {
			unit := "node@" + slot + ".service"
			// Systemd 252 says /lib.
			if got, want := property(t, h, unit, "FragmentPath"), "/lib/systemd/system/node@.service"; !strings.HasSuffix(got, want) {
				t.Errorf("%s answers for %s; want %s", got, unit, want)
			}
			h.notInGoal(t, slot, brokenAt)
		}
		if diff := cmp.Diff(before, h.Must(t, others)); diff != "" {
			t.Errorf("other units were disturbed:\n%s", diff)
		}
	}},
	{"29 broken goal state: the error is in the kernel's log", func(t *testing.T, h *host) {
		key := "sever_" + strings.ReplaceAll(h.Name(), "-", "_") // the log is the whole machine's
		h.goal(t, strings.Replace(Goal, "server", key, 1))
		want(t, h.Must(t, "dmesg"), "berth-generator[", "/etc/berth/goal.toml:2:1: cluster."+key+": is not a key")
	}},
	{"29 broken goal state: a node that runs is not disturbed, and stops in order", func(t *testing.T, h *host) {
		h.start(t, "a")
		before := h.runs(t, "a")
		h.goal(t, broken)
		sameRuns(t, h, before)
		h.stopsInOrder(t, "a")
	}},
	{"29 broken goal state: restart takes the node down in order and says why it stays down", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.forget(t, "a")
		h.goal(t, broken)
		out := h.fails(t, "systemctl restart node@a")
		want(t, out, "node@a.service")
		h.isRefused(t, "a", brokenAt)
		h.wantDown(t, "a")
	}},
	{"29 broken goal state: a machine that dies is not started again", staysDown(broken, brokenAt)},
	{"30 no goal state: no unit, no word, and a start says so", func(t *testing.T, h *host) {
		h.Must(t, "rm /etc/berth/goal.toml; systemctl daemon-reload")
		if out := h.Must(t, "find /run/systemd/generator* -name '*node*'"); out != "" {
			t.Errorf("units were made:\n%s", out)
		}
		if out, exit := h.try(t, "mkdir -p /tmp/n; /usr/lib/systemd/system-generators/berth-generator /tmp/n /tmp/n /tmp/n; ls /tmp/n"); out != "" || exit != 0 {
			t.Errorf("exit status %d, output %q; want none", exit, out)
		}
		h.notInGoal(t, "a", "there is no goal state: write /etc/berth/goal.toml")
	}},
	{"a slot that is not in the goal state", func(t *testing.T, h *host) {
		h.notInGoal(t, "c", "slot c is not in the goal state (slots: a, b)")
	}},
	{"a slot that systemd has not read yet", func(t *testing.T, h *host) {
		h.write(t, "/etc/berth/goal.toml", Goal+budgets+"[slot.c]\n")
		h.notInGoal(t, "c", "slot c is in the goal state, but systemd has not read it (", "/lib/systemd/system/node@.service answers): systemctl daemon-reload")
	}},
	{"32 a goal state that cannot be read does not hold PID 1 up", func(t *testing.T, h *host) {
		for _, make := range []string{"mkfifo", "mkdir", "ln -s /dev/zero", "ln -s goal.toml"} {
			h.Must(t, "rm -rf /etc/berth/goal.toml; "+make+" /etc/berth/goal.toml")
			begin := time.Now()
			h.Must(t, "systemctl daemon-reload; systemctl show --property=Version")
			if took := time.Since(begin); took > 3*time.Second {
				t.Errorf("%s: daemon-reload took %v", make, took)
			}
			h.notInGoal(t, "a", "/etc/berth/goal.toml: ")
		}
		h.Must(t, "rm -rf /etc/berth/goal.toml")
	}},
	{"33 values arrive unchanged", valuesArrive},
	{"34 a slot that is taken out while it runs keeps running and stops in order", func(t *testing.T, h *host) {
		h.start(t, "a")
		keepsRunning(t, h, func() { h.goal(t, withoutA) })
		h.stopsInOrder(t, "a")
		h.notInGoal(t, "a", "slot a is not in the goal state (slots: b)")
		if out := h.Must(t, "systemctl daemon-reload; find /run/systemd/generator* /run/systemd/nspawn /run/systemd/system -name unix-export -prune -o \\( -name '*@a.*' -o -name '*node-a*' -o -name '*2da.mount' \\) -print"); out != "" {
			t.Errorf("units of a slot that is neither wanted nor up:\n%s", out)
		}
		h.start(t, "b")
	}},
	{"34 a slot that is taken out while it runs holds the host against its peer", func(t *testing.T, h *host) {
		h.start(t, "a")
		keepsRunning(t, h, func() {
			h.goal(t, withoutA)
			h.fails(t, "systemctl start node@b")
			h.isRefused(t, "b", refusal)
			h.wantDown(t, "b")
		})
		h.fails(t, "systemctl restart node@a")
		h.isRefused(t, "a", "slot a is not in the goal state (slots: b)")
		h.wantDown(t, "a")
	}},
	{"34 a slot that is taken out is not started again when its machine dies",
		staysDown(withoutA, "slot a is not in the goal state (slots: b)")},
	{"34 the goal state is removed while a slot runs", func(t *testing.T, h *host) {
		h.start(t, "a")
		keepsRunning(t, h, func() { h.Must(t, "rm /etc/berth/goal.toml; systemctl daemon-reload") })
		h.stopsInOrder(t, "a")
		h.notInGoal(t, "a", "there is no goal state: write /etc/berth/goal.toml")
	}},
	{"daemon-reload at any moment disturbs nothing", anyMoment("daemon-reload")},
	{"daemon-reexec at any moment disturbs nothing", anyMoment("daemon-reexec")},
	{"a changed goal state is in force at the next start, without a daemon-reload", func(t *testing.T, h *host) {
		h.write(t, "/etc/berth/goal.toml", strings.Replace(Goal+budgets, `ready = "30s"`, `ready = "45s"`, 1))
		h.start(t, "a")
		if got, want := property(t, h, "node-wait-dbus@a", "TimeoutStartUSec"), "55s"; got != want {
			t.Errorf("TimeoutStartUSec=%s; want %s: the goal state's 45s and 10s for the helper to tell", got, want)
		}
		if env := property(t, h, "node-wait-dbus@a", "Environment"); env != "BERTH_BUDGET=45s" {
			t.Errorf("Environment=%s", env)
		}
	}},
	{"a restart brings a changed goal state into the machine", func(t *testing.T, h *host) {
		h.start(t, "a")
		if got := h.seen(t).Config.MaxPods; got == 123 {
			t.Fatal("maxPods is 123 before the change")
		}
		h.write(t, "/etc/berth/goal.toml", Goal+budgets+"[slot.a.kubelet.config]\nmaxPods = 123\n")
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
		if got := h.seen(t).Config.MaxPods; got != 123 {
			t.Errorf("maxPods is %d in the machine after the restart; want 123", got)
		}
	}},
	{"the units show what they are made of", func(t *testing.T, h *host) {
		h.goal(t, `boot = "a"`+"\n"+Goal+budgets)
		want(t, h.Must(t, "systemctl cat node@a systemd-nspawn@node-a node-wait-dbus@a"),
			"# /run/systemd/generator/node@a.service",
			"# /run/systemd/generator/systemd-nspawn@node-a.service.d/50-berth.conf",
			"# /run/systemd/generator/node-wait-dbus@a.service.d/50-berth.conf",
			"# Made by berth-generator from /etc/berth/goal.toml",
			"SourcePath=/etc/berth/goal.toml")
		want(t, h.Must(t, "systemctl list-dependencies --plain --all node@a"), steps("a")...)
		want(t, h.Must(t, "systemctl list-dependencies --plain multi-user.target"), "node@a.service")
		if got := h.Must(t, "readlink /run/systemd/generator/multi-user.target.wants/node@a.service"); got != "../node@a.service" {
			t.Errorf("multi-user.target.wants/node@a.service is a link to %s", got)
		}
		if out := h.Must(t, "systemctl list-dependencies --plain multi-user.target"); strings.Contains(out, "node@b") {
			t.Errorf("b starts at boot, too:\n%s", out)
		}
	}},
}

// notInGoal starts a slot that cannot start for a reason that lies in the goal state, and requires that it is told.
func (h *host) notInGoal(t *testing.T, slot string, reason ...string) {
	t.Helper()
	h.fails(t, "systemctl start node@"+slot)
	h.isRefused(t, slot, reason...)
	if got := property(t, h, "node@"+slot, "ExecMainStatus"); got != "3" {
		t.Errorf("node@%s ended with exit status %s; want 3", slot, got)
	}
	h.Must(t, "systemctl reset-failed node@"+slot)
}

// isRefused requires that a start has failed and that its reason is seen where people look, and that systemd does not try
// it again.
func (h *host) isRefused(t *testing.T, slot string, reason ...string) {
	t.Helper()
	unit := "node@" + slot + ".service"
	status, _ := h.try(t, "systemctl status --no-pager --lines=50 "+unit)
	want(t, status, reason...)
	want(t, h.Must(t, "journalctl --no-pager -u "+unit), reason...)
	u, err := h.bus(t).Unit(t.Context(), unit)
	if err != nil {
		t.Fatal(err)
	}
	if u.Active != "failed" || u.Busy() {
		t.Errorf("%s is %s (%s) %s; want it failed and at rest", unit, u.Active, u.Sub, u.Job)
	}
	if n := property(t, h, unit, "NRestarts"); n != "0" {
		t.Errorf("%s was tried again %s times", unit, n)
	}
}

// cursor marks the place in the journal after which a case looks.
func (h *host) cursor(t *testing.T) string {
	t.Helper()
	_, cursor, ok := strings.Cut(h.Must(t, "journalctl --no-pager --lines=1 --quiet --show-cursor --output=cat"), "-- cursor: ")
	if !ok {
		t.Fatal("the journal has no cursor")
	}
	return cursor
}

// stops returns the units whose stop was done, in that order, from what the options of journalctl choose.
func (h *host) stops(t *testing.T, options string) []string {
	t.Helper()
	var units []string
	out := h.Must(t, "journalctl --no-pager --quiet --output=json --output-fields=UNIT,JOB_RESULT "+options+" JOB_TYPE=stop")
	for line := range strings.Lines(out) {
		var entry struct{ UNIT, JOB_RESULT string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if entry.JOB_RESULT == "done" {
			units = append(units, entry.UNIT)
		}
	}
	return units
}

// inOrder fails unless the units of a slot that must be stopped one after the other were.
func inOrder(t *testing.T, slot string, stopped []string) {
	t.Helper()
	last := -1
	for _, unit := range []string{"node-kubelet@" + slot, "node-containerd@" + slot, "systemd-nspawn@node-" + slot, "node-peer-guard@" + slot} {
		at := slices.Index(stopped, unit+".service")
		if at <= last {
			t.Errorf("%s was not stopped, or not in its place: %q", unit, stopped)
		}
		last = at
	}
}

// stopsInOrder stops a slot and requires that it goes down step by step and that nothing is left.
func (h *host) stopsInOrder(t *testing.T, slot string) {
	t.Helper()
	cursor := h.cursor(t)
	h.Must(t, "systemctl stop node@"+slot)
	h.wantDown(t, slot)
	inOrder(t, slot, h.stops(t, "--after-cursor='"+cursor+"'"))
}

// keepsRunning requires that what change does takes nothing from slot a, which runs.
func keepsRunning(t *testing.T, h *host, change func()) {
	t.Helper()
	before := h.runs(t, "a")
	units := "systemctl show --value --property=DeviceAllow --property=Restart --property=Requires --property=PartOf --property=Environment systemd-nspawn@node-a | tr ' ' '\\n' | sort"
	devices := h.Must(t, units)
	change()
	sameRuns(t, h, before)
	if diff := cmp.Diff(devices, h.Must(t, units)); diff != "" {
		t.Errorf("the machine's unit changed:\n%s", diff)
	}
	// Opening a node needs its DeviceAllow=, which systemd turns into a BPF program of the unit's cgroup.
	h.Must(t, "systemd-run --quiet --wait --pipe -M node-a sh -c ': </dev/null; : >/dev/kmsg'")
}

// staysDown is the case of a machine that dies while its slot is not wanted any more, or cannot be known to be: all goes
// down, nothing is tried again, and the claim is released.
func staysDown(goal, reason string) func(t *testing.T, h *host) {
	return func(t *testing.T, h *host) {
		for _, crash := range []string{
			"kill -9 $(systemctl show -P MainPID systemd-nspawn@node-a)",
			"kill -9 $(machinectl show node-a -p Leader --value)",
			"machinectl reboot node-a",
		} {
			h.start(t, "a")
			h.forget(t, "a")
			h.goal(t, goal)
			cursor := h.cursor(t)
			h.Must(t, crash)
			h.await(t, "the end of the node after "+crash, isDown)
			h.wantDown(t, "a")
			want(t, h.Must(t, "journalctl --no-pager -u node@a --after-cursor='"+cursor+"'"), reason)
			tries := strings.Count(h.Must(t, "journalctl --no-pager --quiet --output=cat --after-cursor='"+cursor+"' BERTH_STEP=peer-guard BERTH_SLOT=a PRIORITY=3"), reason)
			if tries > 1 {
				t.Errorf("%s: the guard was tried %d times; want once", crash, tries)
			}
			h.Must(t, "systemctl reset-failed")
			h.goal(t, Goal+budgets)
		}
		h.start(t, "a")
	}
}

// anyMoment is the case of a reload of systemd that runs again and again, without a pause, in each state of a slot.
func anyMoment(reload string) func(t *testing.T, h *host) {
	return func(t *testing.T, h *host) {
		// during gives a command to systemd, reloads it ten times while it is at work, and waits until it is done.
		during := func(command string, done func(units map[string]machine.Unit) bool) {
			t.Helper()
			if command != "" {
				h.Must(t, "systemctl --no-block "+command)
			}
			for range 10 {
				h.Must(t, "timeout 60 systemctl "+reload+"; systemctl show --property=Version") // the latter waits until systemd answers again
			}
			h.reconnect()
			h.await(t, command+" done", done)
		}
		up := func(units map[string]machine.Unit) bool { return isUp(units, "a") }
		cursor := h.cursor(t)
		during("", isDown)
		during("start node@a", up)
		h.wantUp(t, "a")
		before := h.runs(t, "a")
		during("", up)
		sameRuns(t, h, before)
		during("restart node@a", func(units map[string]machine.Unit) bool {
			return up(units) && h.runs(t, "a")["node@a.service"] != before["node@a.service"]
		})
		h.awaitAnew(t, "a", before)
		during("stop node@a", isDown)
		h.wantDown(t, "a")
		// All this went without a failed step, and so without one that was tried again. The machine's unit may lose its own
		// "systemctl start node@a", which does nothing where node@a is up or starts already; and the lab has no pids controller.
		out, _ := h.try(t, "journalctl --no-pager --quiet --after-cursor='"+cursor+"' -u 'node*' -u 'systemd-nspawn@*' --priority=warning | grep -v -e ' systemctl\\[' -e 'Failed to read pids.max'")
		if out != "" {
			t.Errorf("it did not go undisturbed:\n%s", out)
		}
		h.Must(t, "rm -rf /var/lib/berth")
		h.goal(t, broken)
		h.fails(t, "systemctl start node@a")
		during("", isDown)
		h.isRefused(t, "a", brokenAt)
	}
}

// reconnect makes the next look at the host use a new connection: a systemd that has executed itself anew has closed the
// old one.
func (h *host) reconnect() {
	if h.systemd != nil {
		h.systemd.Close()
	}
	h.systemd = nil
}

// insidePath is where a path of the running machine node-a is seen from here, with all that is mounted in the machine.
func (h *host) insidePath(t *testing.T, path string) string {
	t.Helper()
	leader := strings.TrimSpace(h.Must(t, "machinectl show node-a -p Leader --value"))
	return filepath.Join(h.Root(), "proc", leader, "root", path)
}

func valuesArrive(t *testing.T, h *host) {
	const hostile = `50%n $HOME ${X} "q" 'r' a:b \x41\ ; # é`
	var (
		source = "/srv/" + hostile + ` source\`
		target = "/mnt/" + hostile + ` target\`
		// systemd runs nothing with a quote or a backslash in its path, and berth says so.
		binary = "/opt/50%n $HOME ${X} a:b ; # é/kube let"
		token  = "/etc/berth/" + hostile + " token"
	)
	toml := func(s string) string {
		quoted, err := json.Marshal(s) // a TOML basic string as well
		if err != nil {
			t.Fatal(err)
		}
		return string(quoted)
	}
	kubelet, err := os.ReadFile(h.path("node-a:/usr/local/bin/kubelet"))
	if err := errors.Join(err,
		write(filepath.Join(h.Root(), source, "marker"), []byte("it is here"), 0o644),
		write(filepath.Join(h.Root(), token), []byte("abcdef.0123456789abcdef\n"), 0o600),
		write(filepath.Join(h.MachineRoot("node-a"), binary), kubelet, 0o755)); err != nil {
		t.Fatal(err)
	}
	goal := strings.Replace(Goal, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, fmt.Sprintf(`
binary = %s
node_name = "node.with-dots.example"
labels = { "example.com/A_b.c" = "x_y.Z-1", empty = "" }
exec = { command = %[2]s, args = [%[2]s, ""], env = { X = %[2]s } }
[kubelet.config.staticPodURLHeader]
X-Header = [%[2]s]
`, toml(binary), toml(hostile)), 1) + budgets + fmt.Sprintf(`
[containerd.registry."example.com:5000"]
mirrors = [{ url = "http://127.0.0.1:5000/a%%20b$x", header = { X-Header = [%s] } }]
[[machine.mounts]]
source = %s
target = %s
read_only = true
`, toml(hostile), toml(source), toml(target))
	h.goal(t, goal)
	h.start(t, "a")

	got := h.seen(t)
	if want := "node.with-dots.example"; got.Flags.HostnameOverride != want {
		t.Errorf("node name %q; want %q", got.Flags.HostnameOverride, want)
	}
	if want := "empty=,example.com/A_b.c=x_y.Z-1"; got.Flags.NodeLabels != want {
		t.Errorf("labels %q; want %q", got.Flags.NodeLabels, want)
	}
	if diff := cmp.Diff(map[string][]string{"X-Header": {hostile}}, got.Config.StaticPodURLHeader); diff != "" {
		t.Errorf("kubelet's configuration (-want +got):\n%s", diff)
	}
	if len(got.Credential.Users) != 1 {
		t.Fatalf("%d users in the kubeconfig", len(got.Credential.Users))
	}
	exec := got.Credential.Users[0].User.Exec
	if diff := cmp.Diff([]string{hostile, hostile, "", "X", hostile},
		append(append([]string{exec.Command}, exec.Args...), exec.Env[0].Name, exec.Env[0].Value)); diff != "" {
		t.Errorf("credential plugin (-want +got):\n%s", diff)
	}
	pid := strings.TrimSpace(h.Must(t, "systemctl -M node-a show -P MainPID kubelet"))
	line, err := os.ReadFile(h.insidePath(t, "/proc/"+pid+"/cmdline"))
	if err != nil {
		t.Fatal(err)
	}
	args := strings.Split(string(line), "\x00")
	// Not args[0], in which systemd replaces ${X}, unlike in the path of what it runs.
	if exe, err := os.Readlink(h.insidePath(t, "/proc/"+pid+"/exe")); err != nil || exe != binary {
		t.Errorf("kubelet is %q, %v; want %q", exe, err, binary)
	}
	if want := "--node-labels=" + got.Flags.NodeLabels; !slices.Contains(args, want) {
		t.Errorf("kubelet's arguments %q; want %q among them", args, want)
	}
	if marker, err := os.ReadFile(h.insidePath(t, filepath.Join(target, "marker"))); err != nil || string(marker) != "it is here" {
		t.Errorf("mount: %q, %v", marker, err)
	}
	if err := os.WriteFile(h.insidePath(t, filepath.Join(target, "marker")), nil, 0o644); err == nil {
		t.Error("the read-only mount can be written")
	}
	hosts := h.Must(t, "cat /var/lib/machines/node-a/etc/containerd/certs.d/example.com*/hosts.toml")
	want(t, hosts, `50%n $HOME ${X}`, "http://127.0.0.1:5000/a%20b$x")
	// With a token's file of such a name, too.
	h.goal(t, strings.Replace(Goal, "/etc/berth/bootstrap-token", strings.Trim(toml(token), `"`), 1)+budgets)
	h.Must(t, "systemctl restart node@a")
	h.wantUp(t, "a")
}
