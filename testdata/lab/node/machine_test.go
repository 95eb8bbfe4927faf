package node

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/helpers/machine"
)

const (
	nspawnA = "systemd-nspawn@node-a.service"
	// settings is what render-config tells systemd-nspawn about slot a's machine.
	settings = "/run/systemd/nspawn/node-a.nspawn"
	// extraDevices is the drop-in for what machine.devices adds.
	extraDevices = "/run/systemd/system/" + nspawnA + ".d/60-berth-devices.conf"
	// spoilInit makes a PID 1 of slot a's machine that ends at once. All three places where systemd-nspawn looks for one are
	// links to this.
	spoilInit = "cd /var/lib/machines/node-a/usr/lib/systemd; mv systemd systemd.away; ln -s /bin/false systemd"
	mendInit  = "cd /var/lib/machines/node-a/usr/lib/systemd; mv systemd.away systemd"
)

// quick are budgets in which what waits for them fails soon.
var quick = strings.Replace(budgets, `ready = "30s"`, `ready = "5s"`, 1)

var machineCases = []testCase{
	{"16 an optional device that is not there is left out", func(t *testing.T, h *host) {
		h.Must(t, "test ! -e /dev/kvm && test ! -e /dev/infiniband")
		defer hideKmsg(t, h)()
		h.goal(t, Goal+budgets+"[machine]\nkvm = \"auto\"\ninfiniband = \"auto\"\ndevices = [\"/dev/berth-none*\"]\n")
		h.start(t, "a")
		if text := h.Must(t, "cat "+settings); strings.Contains(text, "/dev/") {
			t.Errorf("devices are bound which this host does not have:\n%s", text)
		}
		// Case 19: kubelet wants it nevertheless.
		if link := h.inside(t, "readlink /dev/kmsg"); link != "/dev/console" {
			t.Errorf("/dev/kmsg in the machine is a link to %q; want /dev/console", link)
		}
	}},
	{"16 what the goal state lists and the host has not is an error before the machine starts", func(t *testing.T, h *host) {
		for _, c := range []struct{ table, reason string }{
			{`kvm = "required"`, "machine.kvm: no device node /dev/kvm on this host"},
			{`infiniband = "required"`, "machine.infiniband: no device node /dev/infiniband/* on this host"},
			{`devices = ["/dev/berth-none"]`, "machine.devices: no device node /dev/berth-none on this host"},
			{`mounts = [{source = "/srv/none", target = "/srv/none"}]`, `machine.mounts: source "/srv/none" does not exist on this host`},
		} {
			before := property(t, h, nspawnA, "ExecMainStartTimestampMonotonic")
			h.goal(t, Goal+budgets+"[machine]\n"+c.table+"\n")
			want(t, h.failure(t, "systemctl start node@a"), "step node-render-nspawn@a.service failed: "+c.reason)
			h.Must(t, "systemctl stop node@a")
			if after := property(t, h, nspawnA, "ExecMainStartTimestampMonotonic"); after != before {
				t.Errorf("%s: the machine was started", c.table)
			}
		}
	}},
	{"16 a listed mount is mounted as it says", func(t *testing.T, h *host) {
		h.Must(t, `mkdir -p "/srv/da ta:1"; echo text >"/srv/da ta:1/file"`)
		h.goal(t, Goal+budgets+`[machine]
mounts = [{source = "/srv/da ta:1", target = "/srv/read", read_only = true}, {source = "/srv/da ta:1"}]
`)
		h.start(t, "a")
		out := h.inside(t, `cat "/srv/read/file"; touch "/srv/da ta:1/new"; touch /srv/read/no 2>/dev/null && echo writable || true`)
		if out != "text" {
			t.Errorf("got %q; want the file's text, and no way to write below /srv/read", out)
		}
		h.Must(t, `test -e "/srv/da ta:1/new"`)
	}},
	{"17 a device that machine.devices names is bound and allowed, in that very start", func(t *testing.T, h *host) {
		// The second is one that no machine may use by itself. That the kernel has no such device matters not: EPERM comes first.
		h.Must(t, "mkdir -p /dev/berth; mknod /dev/berth/test0 c 1 3; mknod /dev/berth/test1 c 10 253")
		defer h.Must(t, "rm -r /dev/berth")
		before := property(t, h, nspawnA, "DeviceAllow")
		h.goal(t, Goal+budgets+"[machine]\ndevices = [\"/dev/berth/test*\"]\n")
		h.start(t, "a")
		want(t, h.Must(t, "cat "+extraDevices), "DeviceAllow=/dev/berth/test0 rwm\nDeviceAllow=/dev/berth/test1 rwm")
		want(t, property(t, h, nspawnA, "DeviceAllow"), "/dev/berth/test0 rwm", "/dev/berth/test1 rwm")
		openable(t, h, "/dev/berth/test0", "/dev/berth/test1")
		closed(t, h)

		// The same without the key.
		h.goal(t, Goal+budgets)
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
		h.Must(t, "test ! -e "+extraDevices)
		if diff := cmp.Diff(before, property(t, h, nspawnA, "DeviceAllow")); diff != "" {
			t.Errorf("DeviceAllow= is not as before, -before +now:\n%s", diff)
		}
		if got := h.inside(t, "test -e /dev/berth && echo there || true"); got != "" {
			t.Error("a device that the goal state no longer lists is still bound")
		}
	}},
	{"17 a daemon-reload takes no device from a running machine and gives it none", func(t *testing.T, h *host) {
		h.Must(t, "mkdir -p /dev/berth; mknod /dev/berth/test0 c 10 253; mknod /dev/berth/test1 c 10 254")
		defer h.Must(t, "rm -r /dev/berth")
		listed := Goal + budgets + "[machine]\ndevices = [\"/dev/berth/test0\"]\n"
		h.goal(t, listed)
		h.start(t, "a")
		before := property(t, h, nspawnA, "DeviceAllow")
		for _, c := range []struct{ reason, goal string }{
			{"the same goal state", listed},
			{"another device is listed", strings.Replace(listed, "test0", "test1", 1)},
			{"the key is gone", Goal + budgets},
			{"the slot is gone", strings.Replace(listed, "[slot.a]\n", "", 1)},
			{"the goal state is broken", listed + "kvm = 1\n"},
			{"the goal state is gone", ""},
		} {
			if c.goal == "" {
				h.Must(t, "rm /etc/berth/goal.toml; systemctl daemon-reload")
			} else {
				h.goal(t, c.goal)
			}
			if diff := cmp.Diff(before, property(t, h, nspawnA, "DeviceAllow")); diff != "" {
				t.Errorf("%s: DeviceAllow= changed, -before +after:\n%s", c.reason, diff)
			}
			openable(t, h, "/dev/berth/test0")
			closed(t, h)
		}
	}},
	{"18 the host gets the kernel settings that kubelet wants", func(t *testing.T, h *host) {
		got := map[string]string{}
		for line := range strings.Lines(h.Must(t, "cat /usr/lib/sysctl.d/90-berth.conf")) {
			if key, value, ok := strings.Cut(line, "="); ok && line[0] != '#' {
				got[strings.TrimSpace(key)] = strings.TrimSpace(value)
			}
		}
		if diff := cmp.Diff(map[string]string{
			"vm.overcommit_memory":                 "1",
			"vm.panic_on_oom":                      "0",
			"kernel.panic":                         "10",
			"kernel.panic_on_oops":                 "1",
			"kernel.keys.root_maxkeys":             "1000000",
			"kernel.keys.root_maxbytes":            "25000000",
			"net.bridge.bridge-nf-call-iptables":   "1",
			"net.bridge.bridge-nf-call-ip6tables":  "1",
			"net.ipv4.ip_forward":                  "1",
			"net.ipv4.conf.all.src_valid_mark":     "1",
			"net.ipv4.conf.default.src_valid_mark": "1",
			"net.ipv4.conf.all.rp_filter":          "0",
			"net.ipv4.conf.default.rp_filter":      "0",
		}, got); diff != "" {
			t.Errorf("sysctl.d, -want +got:\n%s", diff)
		}
		if diff := cmp.Diff([]string{"overlay", "br_netfilter"},
			strings.Fields(h.Must(t, "grep -v '^#' /usr/lib/modules-load.d/berth.conf"))); diff != "" {
			t.Errorf("modules-load.d, -want +got:\n%s", diff)
		}
	}},
	{"18 a kubelet that finds other kernel settings fails the start with what it says", func(t *testing.T, h *host) {
		// The kernel's own are shared with the machine that runs the lab: the kubelet is shown others.
		h.write(t, "node-a:/etc/systemd/system/kubelet.service.d/z.conf", "[Service]\nEnvironment=STUB_SKIP_SYSCTL= STUB_ROOT=/srv/fake\n")
		h.write(t, "node-a:/srv/fake/run/x", "")
		defer h.Must(t, "rm -r /var/lib/machines/node-a/srv/fake /var/lib/machines/node-a/etc/systemd/system/kubelet.service.d/z.conf")
		show := func(panic string) {
			for name, value := range map[string]string{
				"kernel/keys/root_maxbytes": "25000000", "kernel/keys/root_maxkeys": "1000000", "kernel/panic": panic,
				"kernel/panic_on_oops": "1", "vm/overcommit_memory": "1", "vm/panic_on_oom": "0",
			} {
				h.write(t, "node-a:/srv/fake/proc/sys/"+name, value+"\n")
			}
		}
		h.goal(t, Goal+quick)
		show("0")
		want(t, h.failure(t, "systemctl start node@a"), "invalid kernel flag: kernel/panic, expected value: 10, actual value: 0")
		show("10")
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
	}},
	{"19 what nspawn takes from a machine by default", func(t *testing.T, h *host) {
		h.start(t, "a")
		if kind := h.inside(t, "stat -c %t:%T /dev/kmsg"); kind != "1:b" {
			t.Errorf("/dev/kmsg in the machine is device %s; want 1:b", kind)
		}
		openable(t, h, "/dev/kmsg")
		if kind := h.inside(t, "stat -f -c %T /sys/fs/bpf"); kind != "bpf_fs" {
			t.Errorf("/sys/fs/bpf in the machine is %s; want bpf_fs", kind)
		}
		if max := property(t, h, nspawnA, "TasksMax"); max != "infinity" {
			t.Errorf("TasksMax=%s; want infinity", max)
		}
		// A limit that is higher than the outermost machine's own cannot be given.
		rendered, own := uint64(1048576), hardLimit(t, h.Must(t, "cat /proc/1/limits"))
		for _, service := range []string{"kubelet", "containerd"} {
			limits := h.inside(t, "cat /proc/$(systemctl show -P MainPID "+service+")/limits")
			if got := hardLimit(t, limits); got < min(rendered, own) {
				t.Errorf("%s may open %d files; want at least %d", service, got, min(rendered, own))
			}
		}
		// Null pointers get an error of the call itself, if it is allowed.
		for name, call := range map[string]int{"bpf": unix.SYS_BPF, "keyctl": unix.SYS_KEYCTL, "perf_event_open": unix.SYS_PERF_EVENT_OPEN} {
			script := fmt.Sprintf(`perl -e '$! = 0; syscall(%d, 0, 0, 0, 0, 0); print $!+0'`, call)
			host, inside := h.Must(t, script), h.inside(t, script)
			if host != inside {
				t.Errorf("%s: errno %s in the machine, %s on the host", name, inside, host)
			}
			if host == strconv.Itoa(int(unix.EPERM)) {
				t.Logf("%s: refused by this machine's kernel, also on the host", name)
			}
		}
	}},
	{"20 a root file system without D-Bus is told at once", func(t *testing.T, h *host) {
		h.Must(t, "cd /var/lib/machines/node-a/usr/lib/systemd/system; mv dbus.socket dbus.away")
		defer h.Must(t, "cd /var/lib/machines/node-a/usr/lib/systemd/system; mv dbus.away dbus.socket")
		want(t, h.failure(t, "systemctl start node@a"), "step node-wait-dbus@a.service failed: D-Bus is not installed in machine node-a (no dbus.socket)")
		begin := monotonic(t, h, "node-wait-dbus@a", "ExecMainStart")
		if took := monotonic(t, h, "node-wait-dbus@a", "ExecMainExit") - begin; took > 5_000_000 {
			t.Errorf("wait-dbus took %d µs of its 30 s", took)
		}
	}},
	{"21 the machine's host name and resolv.conf", func(t *testing.T, h *host) {
		h.Must(t, "cp /etc/resolv.conf /etc/resolv.kept")
		defer h.Must(t, "mv /etc/resolv.kept /etc/resolv.conf; rm -rf /run/systemd/resolve")
		const stub, uplink = "nameserver 127.0.0.53\noptions edns0\n", "nameserver 192.0.2.7\n"
		for _, c := range []struct{ reason, resolv, uplink, want string }{
			{"servers of the network", uplink, "", "/etc/resolv.conf"},
			{"systemd-resolved runs too, but is not used", uplink, uplink, "/etc/resolv.conf"},
			{"only systemd-resolved's stub", stub, uplink, "/run/host-resolve/resolv.conf"},
			{"only a stub of something else", stub, "", ""},
		} {
			h.Must(t, "rm -rf /run/systemd/resolve")
			h.write(t, "/etc/resolv.conf", c.resolv)
			if c.uplink != "" {
				h.write(t, "/run/systemd/resolve/resolv.conf", c.uplink)
			}
			h.Must(t, "systemctl restart node@a")
			config := h.seen(t).Config
			if config.ResolvConf == nil || *config.ResolvConf != c.want {
				t.Errorf("%s: resolvConf %v; want %q", c.reason, config.ResolvConf, c.want)
			}
			if c.want != "" {
				want(t, h.inside(t, "cat "+c.want), strings.TrimSpace(uplink))
			}
		}
		want(t, h.Must(t, "journalctl --no-pager --output=cat PRIORITY=4 -u node-render-kubelet@a"),
			"the host's /etc/resolv.conf has only loopback servers (127.0.0.53)")

		host := strings.ToLower(h.Must(t, "cat /etc/hostname"))
		if name, got := h.inside(t, "cat /proc/sys/kernel/hostname"), h.seen(t).Flags.HostnameOverride; name != host || got != host {
			t.Errorf("the machine's name is %q, kubelet's node %q; want the host's, %q", name, got, host)
		}
		h.goal(t, strings.Replace(Goal, "[kubelet]\n", "[kubelet]\nnode_name = \"n1.example\"\n", 1)+budgets)
		h.Must(t, "systemctl restart node@a")
		if name, got := h.inside(t, "cat /proc/sys/kernel/hostname"), h.seen(t).Flags.HostnameOverride; name != "n1.example" || got != name {
			t.Errorf("the machine's name is %q, kubelet's node %q; want the goal state's", name, got)
		}
	}},
	{"22 kubelet, containerd and the machine stop in order", func(t *testing.T, h *host) {
		units := "node-a:/etc/systemd/system/"
		for _, service := range []string{"kubelet", "containerd"} {
			h.write(t, units+service+".service.d/z.conf", "[Service]\nExecStopPost=/bin/sh -c 'echo "+service+" >>/srv/order'\n")
		}
		h.write(t, units+"last.service", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=true\nExecStop=/bin/sh -c 'echo machine >>/srv/order'\n")
		defer h.Must(t, `cd /var/lib/machines/node-a; rm -f srv/order etc/systemd/system/last.service
			rm etc/systemd/system/kubelet.service.d/z.conf etc/systemd/system/containerd.service.d/z.conf`)
		for _, op := range []string{"stop", "restart"} {
			h.start(t, "a")
			h.Must(t, "systemctl -M node-a start last; rm -f /var/lib/machines/node-a/srv/order; systemctl "+op+" node@a")
			order := strings.Fields(h.Must(t, "cat /var/lib/machines/node-a/srv/order"))
			if diff := cmp.Diff([]string{"kubelet", "containerd", "machine"}, order); diff != "" {
				t.Errorf("%s, -want +got:\n%s", op, diff)
			}
		}
	}},
	{"containerd takes its configuration", func(t *testing.T, h *host) {
		h.start(t, "a")
		dump := h.inside(t, "containerd config dump 2>/dev/null")
		var config struct {
			Version int
			Plugins map[string]map[string]any
		}
		if _, err := toml.Decode(dump, &config); err != nil {
			t.Fatalf("%v\n%s", err, dump)
		}
		images, runtime := config.Plugins["io.containerd.cri.v1.images"], config.Plugins["io.containerd.cri.v1.runtime"]
		version, sandbox := 3, at(images, "pinned_images", "sandbox")
		if strings.Contains(h.inside(t, "containerd --version"), " 1.") {
			version, images = 2, config.Plugins["io.containerd.grpc.v1.cri"]
			runtime, sandbox = images, images["sandbox_image"]
		}
		if diff := cmp.Diff([]any{version, "registry.k8s.io/pause:3.10", "/etc/containerd/certs.d", true, "/usr/sbin/runc"}, []any{
			config.Version, sandbox, at(images, "registry", "config_path"),
			at(runtime, "containerd", "runtimes", "runc", "options", "SystemdCgroup"),
			at(runtime, "containerd", "runtimes", "runc", "options", "BinaryName"),
		}); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}},
	{"nothing in the machine starts containerd and kubelet but the chain", func(t *testing.T, h *host) {
		// As the package does when it is installed.
		wants := "/etc/systemd/system/multi-user.target.wants/"
		h.Must(t, "ln -s /usr/lib/systemd/system/containerd.service /var/lib/machines/node-a"+wants)
		h.start(t, "a")
		check := func() {
			t.Helper()
			startedAfterWiring(t, h)
			for _, service := range []string{"containerd.service", "kubelet.service"} {
				if state := h.inside(t, "systemctl is-enabled "+service); state != "enabled" {
					t.Errorf("%s is %s; want enabled, in node-stack.target", service, state)
				}
				if out := h.inside(t, "systemctl list-dependencies --all --plain default.target | grep "+service+" || true"); out != "" {
					t.Errorf("boot pulls in %s", out)
				}
			}
			h.Must(t, "test ! -e /var/lib/machines/node-a"+wants+"containerd.service")
		}
		check()
		before := h.runs(t, "a")
		h.Must(t, "machinectl reboot node-a")
		h.awaitAnew(t, "a", before)
		check()
	}},
	{"kubelet gets its files and flags", func(t *testing.T, h *host) {
		h.goal(t, strings.Replace(Goal, "[kubelet]\n", `[kubelet]
node_ip = "10.0.0.2"
labels = { "example.com/pool" = "gpu", "node.kubernetes.io/x" = "y" }
taints = ["dedicated=gpu:NoSchedule"]
`, 1)+budgets+"[kubelet.config]\nmaxPods = 200\n")
		h.start(t, "a")
		modes := h.inside(t, `stat -c '%a %n' /etc/kubernetes/manifests /var/lib/kubelet/bootstrap-kubeconfig
			test ! -e /var/lib/kubelet/kubeconfig; cat /etc/kubernetes/pki/apiserver-client-ca.crt`)
		want(t, modes, "700 /etc/kubernetes/manifests", "600 /var/lib/kubelet/bootstrap-kubeconfig",
			strings.TrimSpace(h.Must(t, "cat /etc/berth/ca.crt")))
		got := h.seen(t)
		if diff := cmp.Diff(seenFlags{
			Config: "/var/lib/kubelet/config.yaml", Kubeconfig: "/var/lib/kubelet/kubeconfig",
			BootstrapKubeconfig: "/var/lib/kubelet/bootstrap-kubeconfig", HostnameOverride: h.Must(t, "cat /etc/hostname"),
			NodeIP: "10.0.0.2", NodeLabels: "example.com/pool=gpu,node.kubernetes.io/x=y",
		}, got.Flags); diff != "" {
			t.Errorf("flags, -want +got:\n%s", diff)
		}
		if c := got.Config; c.MaxPods != 200 || c.CgroupDriver != "systemd" || !c.ProtectKernelDefaults || len(c.RegisterWithTaints) != 1 ||
			cmp.Diff(c.ClusterDNS, []string{"10.96.0.10"}) != "" {
			t.Errorf("kubelet read %+v", c)
		}
	}},
	{"kubelet with an exec credential", func(t *testing.T, h *host) {
		h.goal(t, strings.Replace(Goal, "bootstrap_token_file = \"/etc/berth/bootstrap-token\"\n",
			"exec = { command = \"/usr/local/bin/token\", args = [\"get\"] }\n", 1)+budgets)
		h.start(t, "a")
		if mode := h.inside(t, "stat -c %a /var/lib/kubelet/kubeconfig; test ! -e /var/lib/kubelet/bootstrap-kubeconfig"); mode != "600" {
			t.Errorf("kubeconfig has mode %s; want 600", mode)
		}
		if flags := h.seen(t).Flags; flags.Kubeconfig != "/var/lib/kubelet/kubeconfig" || flags.BootstrapKubeconfig != "" {
			t.Errorf("flags %+v", flags)
		}
		// Back to a token.
		h.goal(t, Goal+budgets)
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
		if flags := h.seen(t).Flags; flags.BootstrapKubeconfig == "" {
			t.Errorf("flags %+v", flags)
		}
	}},
	{"a machine that cannot boot fails the start with its reason, and is tried on", func(t *testing.T, h *host) {
		h.Must(t, spoilInit)
		defer h.try(t, mendInit)
		for range 2 { // the second time with a machine that has failed before
			want(t, h.failure(t, "timeout 60 systemctl start node@a"),
				"step "+nspawnA+" failed: result exit-code (see: journalctl -u "+nspawnA+")",
				"  "+nspawnA+": Main process exited, code=exited, status=1/FAILURE")
		}
		begin, tries := time.Now(), map[string]bool{}
		h.awaitEvent(t, "two more tries", func() (string, bool) {
			tries[h.runs(t, "a")[nspawnA]] = true
			return fmt.Sprint(len(tries)), len(tries) == 3
		})
		if took := time.Since(begin); took < 4*time.Second { // RestartSec=3s before each of the two, less what has passed
			t.Errorf("two more tries came within %v", took)
		}
		h.Must(t, mendInit)
		h.await(t, "the node", func(units map[string]machine.Unit) bool { return isUp(units, "a") })
		h.wantUp(t, "a")
	}},
	{"a stop ends the tries of a machine that cannot boot", func(t *testing.T, h *host) {
		h.Must(t, spoilInit)
		defer h.Must(t, mendInit)
		h.fails(t, "timeout 60 systemctl start node@a")
		h.Must(t, "timeout 30 systemctl stop node@a")
		// The stop of a node that has failed does not wait for the rest: no process of it runs that could.
		h.await(t, "the end", func(units map[string]machine.Unit) bool {
			for _, u := range units {
				if u.Running() || u.Busy() {
					return false
				}
			}
			return true
		})
		h.wantDown(t, "a")
	}},
	{"39 a kubelet in a crash loop is never ready", func(t *testing.T, h *host) {
		h.goal(t, Goal+quick)
		h.knob(t, "node-a", "exit-after", "200ms")
		want(t, h.failure(t, "systemctl start node@a"), "kubelet in slot a: not within 5.3s", "exit-after has passed")
		if status := property(t, h, "node@a", "ExecMainStatus"); status != "4" {
			t.Errorf("exit status %s; want 4", status)
		}
	}},
	{"39 a kubelet that fails before it is ready", func(t *testing.T, h *host) {
		h.knob(t, "node-a", "fail", "no luck today")
		want(t, h.failure(t, "systemctl start node@a"), "step node-kubelet@a.service failed: machine node-a: kubelet.service: job failed", "no luck today")
	}},
	{"what the steps say of themselves", func(t *testing.T, h *host) {
		h.start(t, "a")
		version, _, _ := strings.Cut(h.Must(t, "systemctl --version"), " (")
		version = strings.TrimPrefix(version, "systemd ")
		status := property(t, h, "node-wait-dbus@a", "StatusText")
		if want := "systemd " + version; !strings.HasPrefix(status, want) || strings.Contains(status, `"`) {
			t.Errorf("wait-dbus says %q; want it to begin with %q, without quotes", status, want)
		}
		want(t, property(t, h, "node-render-nspawn@a", "StatusText"), "files written: ")
	}},
}

// inside runs a shell script in slot a's machine, as a unit of it and so with all that limits its processes, and returns
// what it wrote to standard output, without the last newline.
func (h *host) inside(t *testing.T, script string) string {
	t.Helper()
	h.write(t, "node-a:/root/script", script)
	return h.Must(t, "systemd-run --machine=node-a --pipe --wait --quiet sh -eu /root/script")
}

// failure runs a script that must fail, and returns what journalctl shows of slot a's supervising unit from then on, the log
// lines of all steps among them.
func (h *host) failure(t *testing.T, script string) string {
	t.Helper()
	return h.failureOf(t, script, "node@a")
}

// failureOf is failure with what journalctl shows of another unit.
func (h *host) failureOf(t *testing.T, script, unit string) string {
	t.Helper()
	cursor := h.Must(t, "journalctl --sync; journalctl --lines=1 --output=cat --show-cursor | sed -n 's/^-- cursor: //p'")
	h.fails(t, script)
	return h.Must(t, "journalctl --sync; journalctl --no-pager --output=cat --after-cursor='"+cursor+"' -u "+unit)
}

// seenFlags and seen are what the stand-in kubelet was given (testdata/stubkubelet).
type seenFlags struct {
	Config, Kubeconfig, BootstrapKubeconfig, HostnameOverride, NodeIP, NodeLabels string
}

type seen struct {
	Flags  seenFlags
	Config struct {
		ResolvConf            *string
		ClusterDNS            []string
		CgroupDriver          string
		MaxPods               int
		ProtectKernelDefaults bool
		RegisterWithTaints    []any
		StaticPodURLHeader    map[string][]string
	}
	Credential struct {
		Users []struct {
			User struct {
				Exec struct {
					Command string
					Args    []string
					Env     []struct{ Name, Value string }
				}
			}
		}
	}
}

// seen returns what the kubelet of slot a's machine was given.
func (h *host) seen(t *testing.T) seen {
	t.Helper()
	var s seen
	if err := json.Unmarshal([]byte(h.inside(t, "cat /run/stubkubelet.json")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// openable fails unless the device nodes can be opened in slot a's machine. That there is no such device is fine: the
// question is whether the machine may.
func openable(t *testing.T, h *host, nodes ...string) {
	t.Helper()
	for line := range strings.Lines(h.inside(t, "for node in "+strings.Join(nodes, " ")+"; do ( : <$node ) 2>&1 || true; done")) {
		if !strings.Contains(line, "No such device") {
			t.Errorf("in the machine: %s", line)
		}
	}
}

// closed fails if slot a's machine may make a node of a class of device that is none of its own.
func closed(t *testing.T, h *host) {
	t.Helper()
	if out := h.inside(t, "mknod /root/node c 10 252 2>&1 && rm /root/node && echo made || true"); !strings.Contains(out, "not permitted") {
		t.Errorf("mknod of a device that is not allowed: %s", out)
	}
}

// startedAfterWiring fails unless containerd and kubelet were started once in slot a's machine, and kubelet after its devices were wired.
func startedAfterWiring(t *testing.T, h *host) {
	t.Helper()
	wired := monotonic(t, h, "node-nvidia-wire@a", "ActiveEnter")
	for _, service := range []string{"containerd.service", "kubelet.service"} {
		var begun, restarts uint64
		out := h.inside(t, "systemctl show -P InactiveExitTimestampMonotonic "+service+"; systemctl show -P NRestarts "+service)
		if _, err := fmt.Sscan(out, &begun, &restarts); err != nil || begun < wired && service == "kubelet.service" || restarts > 0 {
			t.Errorf("%s was started at %d and restarted %d times (%v); the devices were wired at %d", service, begun, restarts, err, wired)
		}
	}
}

// hideKmsg takes /dev/kmsg from the host, and returns what gives it back.
func hideKmsg(t *testing.T, h *host) (back func()) {
	t.Helper()
	h.Must(t, "touch /run/kmsg; mount --bind /dev/kmsg /run/kmsg; umount --lazy /dev/kmsg; rm /dev/kmsg")
	return func() {
		h.Must(t, "touch /dev/kmsg; mount --bind /run/kmsg /dev/kmsg; umount --lazy /run/kmsg; rm /run/kmsg")
	}
}

// hardLimit reads how many files may be open from proc_pid_limits(5).
func hardLimit(t *testing.T, limits string) uint64 {
	t.Helper()
	for line := range strings.Lines(limits) {
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok {
			n, err := strconv.ParseUint(strings.Fields(rest)[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no limit of open files in %s", limits)
	return 0
}

// monotonic returns one of a unit's times in microseconds, as ActiveEnter for ActiveEnterTimestampMonotonic=.
func monotonic(t *testing.T, h *host, unit, what string) uint64 {
	t.Helper()
	v, err := strconv.ParseUint(property(t, h, unit, what+"TimestampMonotonic"), 10, 64)
	if err != nil {
		t.Fatalf("%s of %s: %v", what, unit, err)
	}
	return v
}

// at returns what is at a path of keys in TOML tables, nil for nothing.
func at(value any, keys ...string) any {
	for _, key := range keys {
		table, _ := value.(map[string]any)
		value = table[key]
	}
	return value
}
