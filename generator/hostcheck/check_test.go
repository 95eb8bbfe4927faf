package hostcheck

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/helpers/facts"
	"berth/helpers/nvidia"
)

const goalText = `
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"
[containerd]
config_version = 2
[slot.a]
`

// goal is a goal state with slot a, and with what is appended to the text.
func goal(t *testing.T, more string) *goalstate.GoalState {
	t.Helper()
	g, err := goalstate.Parse([]goalstate.Source{
		{Path: "/etc/berth/goal.toml", Data: []byte(goalText)},
		{Path: "/etc/berth/goal.toml.d/more.toml", Data: []byte(more)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// fine are the facts about a host on which all is well.
func fine(t *testing.T) Facts {
	t.Helper()
	ca, err := os.ReadFile("../../testdata/check/ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	var units []Unit
	for _, name := range ownUnits {
		units = append(units, Unit{Name: name, Path: "/usr/lib/systemd/system/" + name})
	}
	return Facts{
		Running: true, Systemd: "252.39-1~deb12u1", NSpawn: true, NSpawnUnit: true, Machined: true, Bus: true,
		Unified: true, Controllers: []string{"cpuset", "cpu", "io", "memory", "pids"},
		Modules: []Module{{Name: "overlay", Loaded: true}, {Name: "br_netfilter", Loaded: true}},
		Sysctls: []Sysctl{
			{Key: "vm/overcommit_memory", Want: "1", Kernel: "1", Known: true, Set: &Setting{Value: "1"}},
			{Key: "net/ipv4/ip_forward", Want: "1", Kernel: "1", Known: true, Set: &Setting{Value: "1"}},
		},
		Generator: true, Units: units,
		Loaded:    map[string]string{"node@a.service": "loaded"},
		Stale:     map[string][]string{"a": nil},
		Addresses: []string{"10.0.0.5", "fd00::5"},
		Secrets:   []Secret{{Path: "/etc/berth/bootstrap-token", What: "the bootstrap token", Mode: 0o600, Folders: []fs.FileMode{0o755, 0o755}}},
		Slots: map[string]Slot{"a": {
			Root: true, Systemd: true, Bus: true, Token: "abcdef.0123456789abcdef\n",
			Host: facts.Host{Name: "host-1", CertificateAuthority: string(ca), Nameservers: []string{"10.0.0.2"}},
		}},
	}
}

// gpu gives the host a GPU with a driver, and the slot's machine the toolkit.
func gpu(f *Facts) {
	f.GPU = true
	f.NVIDIA = &nvidia.Driver{Version: "550.54.14", Libraries: []nvidia.Library{
		{Name: "libcuda.so.1", Path: "/usr/lib/libcuda.so.550.54.14"}, {Name: "libnvidia-ml.so.1", Path: "/usr/lib/libnvidia-ml.so.550.54.14"},
	}}
	slot(f, func(s *Slot) {
		s.Host.GPU, s.Host.NVIDIA = true, f.NVIDIA
		s.Host.Devices = []string{"/dev/nvidiactl"}
		s.Machine.NVIDIAToolkit, s.Machine.NVIDIARuntime = "/usr/bin/nvidia-ctk", "/usr/bin/nvidia-container-runtime"
	})
}

// image makes it an image of the host.
func image(f *Facts) {
	f.Running, f.Unified, f.Controllers, f.Loaded, f.Stale, f.Addresses = false, false, nil, nil, nil, nil
	for i := range f.Sysctls {
		f.Sysctls[i].Kernel, f.Sysctls[i].Known = "", false
	}
	for i := range f.Modules {
		f.Modules[i].Loaded, f.Modules[i].Available = false, true
	}
}

func slot(f *Facts, change func(*Slot)) {
	s := f.Slots["a"]
	change(&s)
	f.Slots["a"] = s
}

// TestCheck changes one thing of a host on which all is well. What is wanted are all findings that are not ok.
func TestCheck(t *testing.T) {
	seen := map[string]bool{}
	for _, tt := range []struct {
		why    string
		goal   string
		change func(f *Facts)
		want   []string
	}{
		{why: "all is well", change: func(*Facts) {}},

		{why: "the oldest systemd that will do", change: func(f *Facts) { f.Systemd = "252" }},
		{why: "a release candidate, and a version without a dot", change: func(f *Facts) { f.Systemd = "262~rc1-1" }},
		{why: "a distribution that calls it v", change: func(f *Facts) { f.Systemd = "v262" },
			want: []string{`warning systemd-version: host: systemd's version "v262" is no number: want systemd 252 or newer`}},
		{why: "too old", change: func(f *Facts) { f.Systemd = "249.11-0ubuntu3.17" },
			want: []string{"error systemd-version: host: systemd is 249.11-0ubuntu3.17: want systemd 252 or newer"}},
		{why: "no systemd found", change: func(f *Facts) { f.Systemd = "" },
			want: []string{"warning systemd-version: host: systemd's version cannot be found: want systemd 252 or newer"}},
		{why: "Debian without systemd-container", change: func(f *Facts) { f.NSpawn, f.NSpawnUnit, f.Machined = false, false, false }, want: []string{
			"error nspawn: host: /usr/bin/systemd-nspawn does not exist: install systemd-container (Debian, Fedora), or systemd with its nspawn",
			"error machined: host: systemd-machined does not exist: install systemd-container (Debian, Fedora), or systemd with its nspawn"}},
		{why: "nspawn without its unit", change: func(f *Facts) { f.NSpawnUnit = false }, want: []string{
			"error nspawn: host: systemd-nspawn@.service does not exist: install systemd-container (Debian, Fedora), or systemd with its nspawn"}},
		{why: "the bus is down", change: func(f *Facts) { f.BusProblem = "connection refused"; f.Loaded = nil },
			want: []string{"error dbus: host: connection refused: systemctl start dbus.socket"}},
		{why: "an image without a bus", change: func(f *Facts) { image(f); f.Bus = false },
			want: []string{"error dbus: host: neither dbus-daemon nor dbus-broker exists: install dbus or dbus-broker"}},

		{why: "control groups of version 1", change: func(f *Facts) { f.Unified = false },
			want: []string{"error cgroup: host: /sys/fs/cgroup is not control group version 2: boot the kernel with systemd.unified_cgroup_hierarchy=1"}},
		{why: "controllers that version 1 holds", change: func(f *Facts) { f.Controllers = []string{"io", "memory"} },
			want: []string{"warning cgroup-controllers: host: control group version 2 lacks cpu, pids: take what mounts them as version 1, " +
				"or cgroup_disable=, out of the kernel's command line: runc starts no pods without them"}},
		{why: "an image has no kernel", change: image},

		{why: "modules that boot will load", change: func(f *Facts) {
			f.Modules = []Module{{Name: "overlay", Available: true, Kernel: true}, {Name: "br_netfilter", Available: true, Kernel: true}}
		}, want: []string{
			"warning kernel-module: br_netfilter: is not loaded: systemctl restart systemd-modules-load systemd-sysctl",
			"error kernel-module: overlay: is not loaded: systemctl restart systemd-modules-load systemd-sysctl"}},
		{why: "a kernel without it", change: func(f *Facts) { f.Modules = []Module{{Name: "overlay", Kernel: true}} },
			want: []string{"error kernel-module: overlay: is neither built into the kernel nor in /lib/modules: containerd has no snapshots by default: " +
				"install the kernel's package of modules"}},
		{why: "a host without its kernel's modules", change: func(f *Facts) { f.Modules = []Module{{Name: "br_netfilter"}} },
			want: []string{"warning kernel-module: br_netfilter: is not loaded, and /lib/modules has no folder of this kernel: bridged packets of pods " +
				"pass by the rules of Services: install the kernel's package of modules"}},
		{why: "an image without a kernel may get one", change: func(f *Facts) { image(f); f.Modules = []Module{{Name: "overlay"}} }},

		{why: "somebody wrote to /proc/sys", change: func(f *Facts) { f.Sysctls[0].Kernel = "0" },
			want: []string{"error sysctl-value: vm.overcommit_memory: is 0, not 1: systemctl restart systemd-sysctl"}},
		{why: "kubelet does not look at the network's", change: func(f *Facts) { f.Sysctls[1].Kernel = "0" },
			want: []string{"warning sysctl-value: net.ipv4.ip_forward: is 0, not 1: systemctl restart systemd-sysctl"}},
		{why: "another file won at boot", change: func(f *Facts) {
			f.Sysctls[0].Kernel, f.Sysctls[0].Set = "2", &Setting{Value: "2", File: "/etc/sysctl.d/99-db.conf", Line: 3}
		}, want: []string{`error sysctl-value: vm.overcommit_memory: is 2, not 1: remove it from /etc/sysctl.d/99-db.conf:3, which sets it to "2"; systemctl restart systemd-sysctl`}},
		{why: "another file will win at the next boot", change: func(f *Facts) {
			f.Sysctls[1].Set = &Setting{Value: "0", File: "/etc/sysctl.d/99-router.conf", Line: 1}
		}, want: []string{`warning sysctl-override: net.ipv4.ip_forward: will be 0 after the next boot, not 1: remove it from /etc/sysctl.d/99-router.conf:1, which sets it to "0"`}},
		{why: "the file is hidden, and the kernel has another value", change: func(f *Facts) {
			f.SysctlHiddenBy, f.Sysctls[0].Set, f.Sysctls[0].Kernel = "/etc/sysctl.d/90-berth.conf", nil, "0"
		}, want: []string{"error sysctl-value: vm.overcommit_memory: is 0, not 1: remove /etc/sysctl.d/90-berth.conf, which hides /usr/lib/sysctl.d/90-berth.conf; systemctl restart systemd-sysctl"}},
		{why: "the file is hidden, and the kernel's own value will do", change: func(f *Facts) {
			f.SysctlHiddenBy, f.Sysctls[0].Set = "/etc/sysctl.d/90-berth.conf", nil
		}},
		{why: "the file is hidden in an image", change: func(f *Facts) {
			image(f)
			f.SysctlHiddenBy, f.Sysctls[0].Set = "/etc/sysctl.d/90-berth.conf", nil
		}, want: []string{"error sysctl-override: vm.overcommit_memory: nothing sets it to 1 at boot: remove /etc/sysctl.d/90-berth.conf, which hides /usr/lib/sysctl.d/90-berth.conf"}},
		{why: "a variable of a module that is not loaded is said by the module", change: func(f *Facts) { f.Sysctls[1].Known = false }},

		{why: "not installed", change: func(f *Facts) { f.Generator, f.Units, f.Loaded = false, []Unit{{Name: "node@.service"}}, nil },
			want: []string{"error berth-file: host: berth is not installed: install its package"}},
		{why: "installed in part", change: func(f *Facts) {
			f.Generator, f.Units[0].Path = false, ""
			f.Units[1].Missing, f.Units[2].Missing = []string{"/usr/lib/berth/machine-unit"}, []string{"/usr/lib/berth/machine-unit"}
			f.MissingFiles = []string{"/usr/lib/tmpfiles.d/berth.conf"}
		}, want: []string{
			"error berth-file: /usr/lib/berth/machine-unit: does not exist, or is not executable: install berth's package again",
			"error berth-file: /usr/lib/systemd/system-generators/berth-generator: does not exist, or is not executable: install berth's package again",
			"error berth-file: /usr/lib/systemd/system/berth-last-good.service: does not exist, or is not executable: install berth's package again",
			"error berth-file: /usr/lib/tmpfiles.d/berth.conf: does not exist, or is not executable: install berth's package again"}},
		{why: "a slot goes on with its last good goal state", change: func(f *Facts) {
			f.LastGood = map[string]store.Record{"a": {Time: time.Unix(0, 0).UTC()}}
		}, want: []string{"warning last-good: slot a: goes on with its last good goal state, recorded 1970-01-01T00:00:00Z: correct the goal state"}},
		{why: "stored goal states are damaged", change: func(f *Facts) {
			f.Unusable = map[string]error{"a": errors.New("damaged"), "": fs.ErrPermission}
		}, want: []string{
			"warning last-good: host: permission denied: run berth check as root",
			"warning last-good: slot a: damaged: systemctl restart node@a stores it anew, when the goal state is valid; remove it where there is no such slot"}},
		{why: "systemd was not reloaded", change: func(f *Facts) { f.Loaded["node@a.service"] = "not-found" },
			want: []string{"error unit-unknown: node@a.service: systemd says: not-found: systemctl daemon-reload"}},
		{why: "the goal state was changed", change: func(f *Facts) { f.Stale["a"] = []string{"run/systemd/generator/node@a.service"} },
			want: []string{"warning units-stale: slot a: /run/systemd/generator/node@a.service is not what the goal state says: systemctl daemon-reload"}},
		{why: "the goal state was changed much", change: func(f *Facts) { f.Stale["a"] = []string{"x", "y", "z"} },
			want: []string{"warning units-stale: slot a: /x and 2 more files are not what the goal state says: systemctl daemon-reload"}},

		{why: "needrestart without berth's override", change: func(f *Facts) { f.Needrestart = true },
			want: []string{"warning needrestart: host: needrestart is installed, and may restart a slot's machine after an upgrade: install berth's /etc/needrestart/conf.d/50-berth.conf"}},
		{why: "needrestart with it", change: func(f *Facts) { f.Needrestart, f.Reprieved = true, true }},
		{why: "reboots behind the cluster's back", change: func(f *Facts) { f.RebootedBy = "/etc/apt/apt.conf.d/52local" },
			want: []string{`warning automatic-reboot: /etc/apt/apt.conf.d/52local: has unattended-upgrades reboot the host without a drain of its node: set Unattended-Upgrade::Automatic-Reboot "false"`}},

		{why: "a kubelet of the host itself", change: func(f *Facts) {
			f.Ports = []Port{{"::", 10250, "kubelet (PID 7)"}, {"127.0.0.1", 10248, "kubelet (PID 7)"}}
		}, want: []string{
			"error port-in-use: slot a: kubelet (PID 7) listens on 127.0.0.1:10248, which is kubelet.config.healthzPort: stop it, or change kubelet.config.healthzPort",
			"error port-in-use: slot a: kubelet (PID 7) listens on [::]:10250, which is kubelet.config.port: stop it, or change kubelet.config.port"}},
		{why: "the same port of another address", change: func(f *Facts) { f.Ports = []Port{{"10.0.0.5", 10248, ""}} }},
		{why: "a port that the goal state chooses", goal: "[kubelet.config]\nport = 10350\nreadOnlyPort = 10255", change: func(f *Facts) {
			f.Ports = []Port{{"0.0.0.0", 10250, ""}, {"0.0.0.0", 10255, ""}}
		}, want: []string{"error port-in-use: slot a: a process listens on 0.0.0.0:10255, which is kubelet.config.readOnlyPort: stop it, or change kubelet.config.readOnlyPort"}},
		{why: "a slot that runs has its ports", change: func(f *Facts) { f.Held, f.Ports = []string{"a"}, []Port{{"::", 10250, ""}} }},

		{why: "no root file system: what is in it is not said to be missing", change: func(f *Facts) {
			f.Slots["a"] = Slot{RootProblem: "does not exist", Token: "abcdef.0123456789abcdef", Host: f.Slots["a"].Host}
		}, want: []string{"error slot-root: slot a: /var/lib/machines/node-a does not exist: make a root file system there"}},
		{why: "a root file system that its user may not look into", change: func(f *Facts) { slot(f, func(s *Slot) { *s = Slot{Host: s.Host, Token: s.Token} }) }},
		{why: "an empty root file system", change: func(f *Facts) {
			missing := facts.Binary{Problem: "does not exist"}
			slot(f, func(s *Slot) {
				s.Systemd, s.Bus, s.Machine = false, false, facts.Machine{Root: "/R", Kubelet: missing, Containerd: missing, Runc: missing}
			})
		}, want: []string{
			"error slot-systemd: slot a: /var/lib/machines/node-a/usr/lib/systemd/systemd does not exist: install systemd there",
			"error slot-dbus: slot a: neither dbus-daemon nor dbus-broker exists in /var/lib/machines/node-a: install dbus there",
			"error slot-kubelet: slot a: kubelet.binary: /usr/local/bin/kubelet in /R does not exist: install it there, or set kubelet.binary to where it is",
			"error slot-containerd: slot a: containerd.binary: /usr/local/bin/containerd in /R does not exist: install it there, or set containerd.binary to where it is",
			"error slot-runc: slot a: containerd.runc: /usr/local/bin/runc in /R does not exist: install it there, or set containerd.runc to where it is"}},
		{why: "a mount without its source", goal: "machine.mounts = [{ source = \"/srv/data\" }]", change: func(f *Facts) {
			slot(f, func(s *Slot) { s.Host.MissingMounts = []string{"/srv/data"} })
		}, want: []string{`error mount-source: slot a: machine.mounts: source "/srv/data" does not exist on this host: make it, or take the mount out`}},
		{why: "a pattern may match nothing", goal: "machine.devices = [\"/dev/none*\"]", change: func(*Facts) {},
			want: []string{"warning device: slot a: machine.devices: /dev/none* matches no device node on this host"}},
		{why: "devices", goal: "machine.kvm = \"required\"\nmachine.devices = [\"/dev/ttyS9\"]", change: func(*Facts) {}, want: []string{
			"error device: slot a: machine.devices: no device node /dev/ttyS9 on this host: load its driver, or do not ask for it",
			"error device: slot a: machine.kvm: no device node /dev/kvm on this host: load its driver, or do not ask for it"}},
		{why: "no CA file", change: func(f *Facts) {
			slot(f, func(s *Slot) { s.Host.CertificateAuthority, s.Host.CertificateAuthorityProblem = "", "no such file" })
		}, want: []string{"error certificate-authority: slot a: cluster.certificate_authority: no such file: want a PEM file of certificates"}},
		{why: "a CA file without a certificate", change: func(f *Facts) {
			slot(f, func(s *Slot) { s.Host.CertificateAuthority = "hello" })
		}, want: []string{"error certificate-authority: slot a: cluster.certificate_authority: has no certificate: want a PEM file of certificates"}},
		{why: "no token: said once", change: func(f *Facts) {
			slot(f, func(s *Slot) {
				s.Token, s.TokenProblem = "", "kubelet.bootstrap_token_file: /etc/berth/bootstrap-token does not exist"
			})
		}, want: []string{"error bootstrap-token: slot a: kubelet.bootstrap_token_file: /etc/berth/bootstrap-token does not exist: write the token there, for root alone"}},
		{why: "no token in the file", change: func(f *Facts) { slot(f, func(s *Slot) { s.Token = "hello" }) },
			want: []string{"error bootstrap-token: slot a: kubelet.bootstrap_token_file: content of /etc/berth/bootstrap-token: not a bootstrap token: " +
				"want 6 and 16 characters of a-z and 0-9 with a dot between"}},
		{why: "a credential, which only the step gets", goal: "kubelet.bootstrap_token_credential = \"token\"", change: func(*Facts) {}},
		{why: "a credential that is nowhere", goal: "kubelet.bootstrap_token_credential = \"token\"", change: func(f *Facts) {
			slot(f, func(s *Slot) { s.CredentialNotFound = true })
		}, want: []string{"warning bootstrap-token: slot a: kubelet.bootstrap_token_credential: no credential token in /etc/credstore and systemd's other folders: " +
			"write it to /etc/credstore/token, or pass it to the host"}},
		{why: "an encrypted credential that is nowhere", goal: "kubelet.bootstrap_token_encrypted_credential = \"token\"", change: func(f *Facts) {
			slot(f, func(s *Slot) { s.CredentialNotFound = true })
		}, want: []string{"warning bootstrap-token: slot a: kubelet.bootstrap_token_encrypted_credential: no credential token in /etc/credstore.encrypted and " +
			"systemd's other folders: run: systemd-creds encrypt FILE /etc/credstore.encrypted/token, or pass it to the host"}},
		{why: "a host's name that is no node's: said once, though two steps refuse it", change: func(f *Facts) { slot(f, func(s *Slot) { s.Host.Name = "host_1" }) },
			want: []string{`error node-name: slot a: the host's name "host_1": not a node's name of letters a-z, digits, "-" and "." (RFC 1123): set kubelet.node_name`}},
		{why: "addresses of the host", goal: "kubelet.node_ip = \"10.0.0.5,fd00:0::5\"", change: func(*Facts) {}},
		{why: "an address of another host", goal: "kubelet.node_ip = \"10.0.0.5,fd00::6\"", change: func(*Facts) {},
			want: []string{"warning node-ip: slot a: kubelet.node_ip: no interface of this host has fd00::6: want an address of the host"}},
		{why: "what a step warns about", change: func(f *Facts) { slot(f, func(s *Slot) { s.Host.Nameservers = []string{"127.0.0.53"} }) },
			want: []string{"warning slot-config: slot a: the host's /etc/resolv.conf has only loopback servers (127.0.0.53), which pods cannot reach: " +
				"pods with dnsPolicy Default get none; to change that, set kubelet.config.resolvConf"}},
		{why: "what a step refuses", goal: "containerd.config_version = \"auto\"", change: func(f *Facts) { slot(f, func(s *Slot) { s.Machine.Root = "/R" }) },
			want: []string{"error slot-config: slot a: containerd.config_version: cannot tell the version of /usr/local/bin/containerd in /R: it holds no Go build " +
				"information, and no installed package says: set containerd.config_version to 2 (containerd 1.x) or 3 (containerd 2.x)"}},

		{why: "no GPU is fine with auto, and with off one is not looked at", goal: "nvidia.mode = \"off\"", change: func(f *Facts) { f.GPU = true }},
		{why: "a GPU is required, and there is none", goal: "nvidia.mode = \"required\"", change: func(*Facts) {},
			want: []string{"error nvidia-missing: slot a: nvidia.mode: no device node /dev/nvidiactl on this host: load its driver, or do not ask for it"}},
		{why: "a GPU and its driver", goal: "nvidia.mode = \"required\"", change: gpu},
		{why: "the start makes the nodes", goal: "nvidia.mode = \"required\"", change: func(f *Facts) {
			gpu(f)
			slot(f, func(s *Slot) { s.Host.Devices = nil })
		}},
		{why: "no libraries: nothing is wired", change: func(f *Facts) { gpu(f); f.NVIDIA.Libraries = nil },
			want: []string{"warning nvidia-driver: slot a: the host has a GPU, but its linker does not find libcuda.so.1, libnvidia-ml.so.1: " +
				"install the NVIDIA driver's libraries and run ldconfig, or set nvidia.mode to off"}},
		{why: "no libraries: the start fails", goal: "nvidia.mode = \"required\"", change: func(f *Facts) { gpu(f); f.NVIDIA.Libraries = nil },
			want: []string{"error nvidia-driver: slot a: the host has a GPU, but its linker does not find libcuda.so.1, libnvidia-ml.so.1: " +
				"install the NVIDIA driver's libraries and run ldconfig, or set nvidia.mode to off"}},
		{why: "nobody could look", change: func(f *Facts) { gpu(f); f.NVIDIAProblem = "ldconfig: not found" },
			want: []string{"warning nvidia-driver: slot a: ldconfig: not found: run berth check as root, with ldconfig in $PATH"}},
		{why: "an upgrade without a reboot", change: func(f *Facts) { gpu(f); f.NVIDIA.Version = "535.1" },
			want: []string{"error nvidia-mismatch: slot a: the NVIDIA driver's loaded kernel module has version 535.1, but these of its libraries have another one: " +
				"/usr/lib/libcuda.so.550.54.14 /usr/lib/libnvidia-ml.so.550.54.14: " +
				"reboot the host or reload the module, or install the libraries of 535.1"}},
		{why: "no toolkit in the machine", change: func(f *Facts) { gpu(f); slot(f, func(s *Slot) { s.Machine.NVIDIAToolkit = "" }) },
			want: []string{"error nvidia-ctk: slot a: there is a GPU, but no nvidia-ctk in /var/lib/machines/node-a: install the NVIDIA Container Toolkit 1.18 or newer there, or set nvidia.mode to off"}},

		{why: "every user can read the token", change: func(f *Facts) { f.Secrets[0].Mode = 0o644 },
			want: []string{"error secret-readable: /etc/berth/bootstrap-token: holds the bootstrap token, and every user can read it (mode 0644): " +
				"chmod 0600 /etc/berth/bootstrap-token"}},
		{why: "its group can", change: func(f *Facts) { f.Secrets[0].Mode = 0o640 },
			want: []string{"error secret-readable: /etc/berth/bootstrap-token: holds the bootstrap token, and its group can read it (mode 0640): " +
				"chmod 0600 /etc/berth/bootstrap-token"}},
		{why: "nobody gets to it", change: func(f *Facts) { f.Secrets[0].Mode, f.Secrets[0].Folders = 0o644, []fs.FileMode{0o700, 0o755} }},
		{why: "only the group gets to it", change: func(f *Facts) { f.Secrets[0].Mode, f.Secrets[0].Folders = 0o604, []fs.FileMode{0o750, 0o755} }},
		{why: "another user's file", change: func(f *Facts) { f.Secrets[0].Foreign = true },
			want: []string{"error secret-readable: /etc/berth/bootstrap-token: holds the bootstrap token, and it belongs to another user (mode 0600): " +
				"chown root:root /etc/berth/bootstrap-token; chmod 0600 /etc/berth/bootstrap-token"}},
		{why: "what could not be looked at", change: func(f *Facts) { f.Problems = []string{"permission denied"} },
			want: []string{"warning incomplete: host: permission denied: run berth check as root"}},
	} {
		f := fine(t)
		tt.change(&f)
		var got []string
		for _, finding := range Check(goal(t, tt.goal), f) {
			if !slices.ContainsFunc(Checks, func(c ID) bool { return c.Name == finding.ID }) {
				t.Errorf("%s: the id %s is not in Checks", tt.why, finding.ID)
			}
			if slices.Contains(Skipped(f), finding.ID) {
				t.Errorf("%s: %s is said to be left out", tt.why, finding.ID)
			}
			if finding.Severity != OK {
				got = append(got, string(finding.Severity)+" "+finding.ID+": "+finding.String())
				seen[finding.ID] = true
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.why, diff)
		}
	}
	for _, c := range Checks {
		if !seen[c.Name] && c.Name != GoalMissing && c.Name != GoalInvalid {
			t.Errorf("no row is about %s", c.Name)
		}
	}
}

// Where all is well, everything that applies says so.
func TestOK(t *testing.T) {
	f := fine(t)
	gpu(&f)
	f.Held = nil
	said := map[string]bool{}
	for _, finding := range Check(goal(t, "kubelet.node_ip = \"10.0.0.5\""), f) {
		said[finding.ID] = true
	}
	// These only speak up when something is wrong.
	quiet := []string{GoalMissing, GoalInvalid, "last-good", "sysctl-override", "nvidia-missing", "incomplete"}
	for _, c := range Checks {
		if said[c.Name] == slices.Contains(quiet, c.Name) {
			t.Errorf("%s: is there: %v", c.Name, said[c.Name])
		}
	}
}

// Nothing of this comes into the generator, which runs at each daemon-reload.
func TestNotInGenerator(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "..").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	for _, bad := range []string{"berth/generator/hostcheck", "berth/generator/cli", "github.com/urfave/cli/v2", "berth/helpers/render"} {
		if slices.Contains(deps, bad) || !slices.Contains(deps, "berth/generator/plan") {
			t.Errorf("the generator imports %s, or %q are not its packages", bad, deps)
		}
	}
}

// What is looked for on a host is what install.sh puts there.
func TestOwnUnits(t *testing.T) {
	files, err := os.ReadDir("../../units")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, f := range files {
		if ext := filepath.Ext(f.Name()); ext == ".service" || ext == ".target" {
			want = append(want, f.Name())
		}
	}
	if diff := cmp.Diff(want, ownUnits); diff != "" {
		t.Errorf("-units +ownUnits:\n%s", diff)
	}
	for _, name := range []string{ownSysctl, ownModules, ownTmpfiles, ownNeedrestart} {
		dir := strings.TrimSuffix(filepath.Dir(name), "/conf.d")
		if _, err := os.Stat(filepath.Join("../../units", filepath.Base(dir), filepath.Base(name))); err != nil {
			t.Error(err)
		}
	}
}
