package hostcheck

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/generator/goalstate"
	"berth/helpers/nvidia"
	"berth/helpers/render"
)

// Paths on the host, relative to its root.
const (
	ownSysctl      = "usr/lib/sysctl.d/90-berth.conf"
	ownModules     = "usr/lib/modules-load.d/berth.conf"
	ownTmpfiles    = "usr/lib/tmpfiles.d/berth.conf"
	ownNeedrestart = "etc/needrestart/conf.d/50-berth.conf"
	generator      = "berth-generator"
)

// minSystemd is the oldest systemd that berth is made for.
const minSystemd = 252

// ownUnits are the units that berth ships.
var ownUnits = []string{
	"berth-last-good.service", "node-call@.target", "node-chain@.target", "node-containerd@.service", "node-kubelet@.service", "node-nvidia-wire@.service",
	"node-peer-guard@.service", "node-record-applied@.service", "node-render-containerd@.service", "node-render-kubelet@.service",
	"node-render-nspawn@.service", "node-wait-dbus@.service", "node@.service",
}

// collector collects findings.
type collector []Finding

func (c *collector) ok(id, subject, found string) {
	*c = append(*c, Finding{ID: id, Severity: OK, Subject: subject, Problem: found})
}

func (c *collector) add(s Severity, id, subject, problem, cure string) {
	*c = append(*c, Finding{id, s, subject, problem, cure})
}

// require is ok, or an error.
func (c *collector) require(ok bool, id, subject, problem, cure string) {
	if ok {
		c.ok(id, subject, "")
	} else {
		c.add(Error, id, subject, problem, cure)
	}
}

// Check returns what follows from the facts about a host for the slots of goal, nil for none, sorted.
func Check(goal *goalstate.GoalState, f Facts) []Finding {
	c := collector(append(CheckSecrets(f), CheckLastGood(f)...))
	c.systemd(f)
	c.kernel(f)
	c.installed(f)
	c.restarts(f)
	if goal != nil && !goal.Partial {
		c.ports(goal, f)
		for _, name := range goal.SlotNames() {
			c.slot(goal, goal.Slots[name], f)
		}
	}
	for _, p := range f.Problems {
		c.add(Warning, "incomplete", host, p, "run berth check as root")
	}
	return sorted(c)
}

// CheckSecrets returns what follows from f.Secrets alone.
func CheckSecrets(f Facts) []Finding {
	var c collector
	for _, s := range f.Secrets {
		c.secret(s)
	}
	return sorted(c)
}

// CheckLastGood returns what follows from f.LastGood and f.Unusable alone.
func CheckLastGood(f Facts) []Finding {
	var c collector
	for slot, r := range f.LastGood {
		c.add(Warning, "last-good", "slot "+slot, "goes on with its last good goal state, recorded "+r.Time.Format(time.RFC3339),
			"correct the goal state")
	}
	for slot, err := range f.Unusable {
		subject, cure := "slot "+slot, "systemctl restart node@"+slot+" stores it anew, when the goal state is valid; remove it where there is no such slot"
		switch {
		case slot == "" && errors.Is(err, fs.ErrPermission):
			subject, cure = host, "run berth check as root"
		case slot == "":
			subject, cure = host, "remove it, or make it a folder of root's with mode 0700"
		}
		c.add(Warning, "last-good", subject, err.Error(), cure)
	}
	return sorted(c)
}

// Skipped are the checks that were left out, as there is no running host to ask.
func Skipped(f Facts) []string {
	var names []string
	for _, c := range Checks {
		if c.Running && !f.Running {
			names = append(names, c.Name)
		}
	}
	return names
}

const host = "host"

// secret finds who but its owner can read a file.
func (c *collector) secret(s Secret) {
	// A user needs to get through all folders above.
	group, others := s.Mode&0o040 != 0, s.Mode&0o004 != 0
	for _, dir := range s.Folders {
		group, others = group && dir&0o010 != 0, others && dir&0o001 != 0
	}
	who := ""
	switch {
	case others:
		who = "every user can read it"
	case group:
		who = "its group can read it"
	case s.Foreign:
		who = "it belongs to another user"
	default:
		c.ok("secret-readable", s.Path, "")
		return
	}
	cure := "chmod 0600 " + s.Path
	if s.Foreign {
		cure = "chown root:root " + s.Path + "; " + cure
	}
	c.add(Error, "secret-readable", s.Path, fmt.Sprintf("holds %s, and %s (mode %04o)", s.What, who, s.Mode.Perm()), cure)
}

func (c *collector) systemd(f Facts) {
	const install = "install systemd-container (Debian, Fedora), or systemd with its nspawn"
	atLeast := fmt.Sprintf("want systemd %d or newer", minSystemd)
	digits := f.Systemd
	if i := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		digits = digits[:i] // of "252.39-1~deb12u1", "262~rc1"
	}
	switch version, err := strconv.Atoi(digits); {
	case f.Systemd == "":
		c.add(Warning, "systemd-version", host, "systemd's version cannot be found", atLeast)
	case err != nil:
		c.add(Warning, "systemd-version", host, fmt.Sprintf("systemd's version %q is no number", f.Systemd), atLeast)
	case version < minSystemd:
		c.add(Error, "systemd-version", host, "systemd is "+f.Systemd, atLeast)
	default:
		c.ok("systemd-version", host, f.Systemd)
	}
	if f.NSpawn {
		c.require(f.NSpawnUnit, "nspawn", host, "systemd-nspawn@.service does not exist", install)
	} else {
		c.add(Error, "nspawn", host, "/usr/bin/systemd-nspawn does not exist", install)
	}
	c.require(f.Machined, "machined", host, "systemd-machined does not exist", install)
	switch {
	case f.BusProblem != "":
		c.add(Error, "dbus", host, f.BusProblem, "systemctl start dbus.socket")
	case f.Running:
		c.ok("dbus", host, "")
	default:
		c.require(f.Bus, "dbus", host, "neither dbus-daemon nor dbus-broker exists", "install dbus or dbus-broker")
	}
}

func (c *collector) kernel(f Facts) {
	if f.Running {
		c.require(f.Unified, "cgroup", host, "/sys/fs/cgroup is not control group version 2",
			"boot the kernel with systemd.unified_cgroup_hierarchy=1")
	}
	if f.Running && f.Unified {
		missing := slices.DeleteFunc([]string{"cpu", "memory", "pids"}, func(name string) bool {
			return slices.Contains(f.Controllers, name)
		})
		if len(missing) == 0 {
			c.ok("cgroup-controllers", host, "")
		} else {
			c.add(Warning, "cgroup-controllers", host, "control group version 2 lacks "+strings.Join(missing, ", "),
				"take what mounts them as version 1, or cgroup_disable=, out of the kernel's command line: runc starts no pods without them")
		}
	}
	for _, m := range f.Modules {
		severity, without := Warning, "bridged packets of pods pass by the rules of Services"
		if m.Name == "overlay" {
			severity, without = Error, "containerd has no snapshots by default"
		}
		switch {
		case m.Loaded, m.Available && !f.Running:
			c.ok("kernel-module", m.Name, "")
		case m.Available:
			c.add(severity, "kernel-module", m.Name, "is not loaded", "systemctl restart systemd-modules-load systemd-sysctl")
		case m.Kernel:
			c.add(severity, "kernel-module", m.Name, "is neither built into the kernel nor in /lib/modules: "+without,
				"install the kernel's package of modules")
		case f.Running:
			c.add(severity, "kernel-module", m.Name, "is not loaded, and /lib/modules has no folder of this kernel: "+without,
				"install the kernel's package of modules")
		}
	}
	for _, s := range f.Sysctls {
		c.sysctl(s, f.SysctlHiddenBy)
	}
}

// sysctl compares what a variable is, and will be after the next boot, with what it should be.
func (c *collector) sysctl(s Sysctl, hiddenBy string) {
	name := sysctlName(s.Key)
	severity := Warning
	if !strings.HasPrefix(s.Key, "net/") {
		severity = Error // kubelet checks these (setupKernelTunables of its pkg/kubelet/cm), and ends
	}
	var cures []string
	switch {
	case s.Set == nil && hiddenBy != "":
		cures = append(cures, fmt.Sprintf("remove %s, which hides /%s", hiddenBy, ownSysctl))
	case s.Set != nil && s.Set.Value != s.Want:
		cures = append(cures, fmt.Sprintf("remove it from %s:%d, which sets it to %q", s.Set.File, s.Set.Line, s.Set.Value))
	}
	if s.Known && s.Kernel != s.Want {
		cures = append(cures, "systemctl restart systemd-sysctl")
	}
	cure := strings.Join(cures, "; ")
	switch {
	case s.Known && s.Kernel != s.Want:
		c.add(severity, "sysctl-value", name, fmt.Sprintf("is %s, not %s", s.Kernel, s.Want), cure)
	case s.Set != nil && s.Set.Value != s.Want:
		c.add(severity, "sysctl-override", name, fmt.Sprintf("will be %s after the next boot, not %s", s.Set.Value, s.Want), cure)
	case s.Set == nil && !s.Known:
		c.add(severity, "sysctl-override", name, fmt.Sprintf("nothing sets it to %s at boot", s.Want), cure)
	case !s.Known:
		c.ok("sysctl-override", name, s.Want)
	default:
		c.ok("sysctl-value", name, s.Want)
	}
}

func (c *collector) installed(f Facts) {
	found := func(u Unit) bool { return u.Path != "" }
	if !f.Generator && !slices.ContainsFunc(f.Units, found) {
		c.add(Error, "berth-file", host, "berth is not installed", "install its package")
		return
	}
	const reinstall = "install berth's package again"
	missing := f.MissingFiles
	if !f.Generator {
		missing = append(slices.Clone(missing), "/usr/lib/systemd/system-generators/"+generator)
	}
	for _, u := range f.Units {
		if u.Path == "" {
			missing = append(missing, "/usr/lib/systemd/system/"+u.Name)
		}
		missing = append(missing, u.Missing...)
	}
	slices.Sort(missing)
	for _, name := range slices.Compact(missing) {
		c.add(Error, "berth-file", name, "does not exist, or is not executable", reinstall)
	}
	if len(missing) == 0 {
		c.ok("berth-file", host, "")
	}
	for _, name := range slices.Sorted(maps.Keys(f.Loaded)) {
		c.require(f.Loaded[name] == "loaded", "unit-unknown", name, "systemd says: "+f.Loaded[name], "systemctl daemon-reload")
	}
	for _, slot := range slices.Sorted(maps.Keys(f.Stale)) {
		switch files := f.Stale[slot]; len(files) {
		case 0:
			c.ok("units-stale", "slot "+slot, "")
		case 1:
			c.add(Warning, "units-stale", "slot "+slot, "/"+files[0]+" is not what the goal state says", "systemctl daemon-reload")
		default:
			c.add(Warning, "units-stale", "slot "+slot,
				fmt.Sprintf("/%s and %d more files are not what the goal state says", files[0], len(files)-1), "systemctl daemon-reload")
		}
	}
}

// restarts is about what takes a node down behind its cluster's back.
func (c *collector) restarts(f Facts) {
	switch {
	case !f.Needrestart:
		c.ok("needrestart", host, "not installed")
	case f.Reprieved:
		c.ok("needrestart", host, "")
	default:
		c.add(Warning, "needrestart", host, "needrestart is installed, and may restart a slot's machine after an upgrade",
			"install berth's /"+ownNeedrestart)
	}
	if f.RebootedBy != "" {
		c.add(Warning, "automatic-reboot", f.RebootedBy, "has unattended-upgrades reboot the host without a drain of its node",
			`set Unattended-Upgrade::Automatic-Reboot "false"`)
	} else {
		c.ok("automatic-reboot", host, "")
	}
}

// wanted is a TCP port that a slot's kubelet needs.
type wanted struct {
	key     string // of the goal state
	address string
	port    uint16
}

// kubeletPorts are those of the slot's KubeletConfiguration, with the defaults of kubelet (v1beta1) for what it leaves out.
func kubeletPorts(s *goalstate.Slot) []wanted {
	number := func(key string, otherwise int64) uint16 {
		if n, ok := s.Kubelet.Config[key].(int64); ok {
			otherwise = n
		}
		return uint16(otherwise)
	}
	text := func(key, otherwise string) string {
		t, _ := s.Kubelet.Config[key].(string)
		return cmp.Or(t, otherwise)
	}
	all := []wanted{
		{"port", text("address", "0.0.0.0"), number("port", 10250)},
		{"healthzPort", text("healthzBindAddress", "127.0.0.1"), number("healthzPort", 10248)},
		{"readOnlyPort", text("address", "0.0.0.0"), number("readOnlyPort", 0)},
	}
	return slices.DeleteFunc(all, func(w wanted) bool { return w.port == 0 })
}

func (c *collector) ports(goal *goalstate.GoalState, f Facts) {
	if len(f.Held) > 0 || !f.Running {
		return // they may be the slot's own
	}
	for _, name := range goal.SlotNames() {
		taken := false
		for _, w := range kubeletPorts(goal.Slots[name]) {
			for _, p := range f.Ports {
				if p.Port == w.port && overlap(p.Address, w.address) {
					taken = true
					address := netip.AddrPortFrom(parseAddr(p.Address), p.Port)
					c.add(Error, "port-in-use", "slot "+name,
						fmt.Sprintf("%s listens on %s, which is kubelet.config.%s", cmp.Or(p.Process, "a process"), address, w.key),
						"stop it, or change kubelet.config."+w.key)
				}
			}
		}
		if !taken {
			c.ok("port-in-use", "slot "+name, "")
		}
	}
}

// parseAddr is the zero Addr for what is no address; the goal state's check lets nothing of the kind through.
func parseAddr(s string) netip.Addr {
	a, _ := netip.ParseAddr(s)
	return a.Unmap()
}

// overlap tells whether two listeners on one port would be in each other's way.
func overlap(a, b string) bool {
	x, y := parseAddr(a), parseAddr(b)
	return x == y || x.IsUnspecified() || y.IsUnspecified()
}

// folder is where the root file system of a slot's machine is.
func folder(s *goalstate.Slot) string { return "/var/lib/machines/" + s.MachineName() }

func (c *collector) slot(goal *goalstate.GoalState, s *goalstate.Slot, f Facts) {
	have, subject := f.Slots[s.Name], "slot "+s.Name
	if have.RootProblem != "" {
		c.add(Error, "slot-root", subject, folder(s)+" "+have.RootProblem, "make a root file system there")
	}
	if have.Root {
		c.ok("slot-root", subject, "")
		c.require(have.Systemd, "slot-systemd", subject, folder(s)+"/usr/lib/systemd/systemd does not exist", "install systemd there")
		c.require(have.Bus, "slot-dbus", subject, "neither dbus-daemon nor dbus-broker exists in "+folder(s), "install dbus there")
	}
	c.token(s, have)
	c.rendered(goal, s, f)
	c.nvidia(s, f)
	if s.Kubelet.NodeIP != "" && f.Running {
		for ip := range strings.SplitSeq(s.Kubelet.NodeIP, ",") {
			if slices.ContainsFunc(f.Addresses, func(a string) bool { return parseAddr(a) == parseAddr(ip) }) {
				c.ok("node-ip", subject, ip)
			} else {
				c.add(Warning, "node-ip", subject, "kubelet.node_ip: no interface of this host has "+ip, "want an address of the host")
			}
		}
	}
}

func (c *collector) token(s *goalstate.Slot, have Slot) {
	subject := "slot " + s.Name
	switch {
	case have.TokenProblem != "":
		c.add(Error, "bootstrap-token", subject, have.TokenProblem, "write the token there, for root alone")
	case have.CredentialNotFound:
		name, key := s.Kubelet.Credential()
		store, cure := "/etc/credstore", "write it to /etc/credstore/"+name
		if s.Kubelet.BootstrapTokenEncryptedCredential != "" {
			store = "/etc/credstore.encrypted"
			cure = "run: systemd-creds encrypt FILE " + store + "/" + name
		}
		c.add(Warning, "bootstrap-token", subject,
			fmt.Sprintf("%s: no credential %s in %s and systemd's other folders", key, name, store), cure+", or pass it to the host")
	}
}

// byKey are the checks that are about one key of the goal state. A key is named by how it begins.
var byKey = []struct{ key, id string }{
	{"kubelet.binary", "slot-kubelet"},
	{"containerd.binary", "slot-containerd"},
	{"containerd.runc", "slot-runc"},
	{"machine.mounts", "mount-source"},
	{"machine.devices", "device"},
	{"machine.kvm", "device"},
	{"machine.infiniband", "device"},
	{"cluster.certificate_authority", "certificate-authority"},
	{"kubelet.bootstrap_token", "bootstrap-token"},
	{"kubelet.node_name", "node-name"},
	{"the host's name", "node-name"},
	{"nvidia.mode", "nvidia-missing"},
}

// rendered finds what the steps that render the slot's configuration would refuse and warn about, by rendering it. Their errors
// have the form "key: what is wrong: what would be right".
func (c *collector) rendered(goal *goalstate.GoalState, s *goalstate.Slot, f Facts) {
	have, subject := f.Slots[s.Name], "slot "+s.Name
	found := map[string]bool{}
	report := func(severity Severity, text string) {
		id := "slot-config"
		for _, k := range byKey {
			if strings.HasPrefix(text, k.key) {
				id = k.id
				break
			}
		}
		found[id] = true
		switch {
		case id == "nvidia-missing" && f.GPU: // the start makes the driver's nodes
		case id == "bootstrap-token" && (have.TokenProblem != "" || have.CredentialNotFound): // said already
		default:
			problem, cure := text, ""
			if i := strings.LastIndex(text, ": "); i > 0 {
				problem, cure = text[:i], text[i+2:]
			}
			c.add(severity, id, subject, problem, cure)
		}
	}
	collect := func(out render.Output, err error) {
		for _, w := range out.Warnings {
			report(Warning, w)
		}
		if err != nil {
			for line := range strings.Lines(err.Error()) {
				report(Error, strings.TrimSuffix(line, "\n"))
			}
		}
	}
	collect(render.NSpawn(s, goal.Sources, have.Host))
	collect(render.Kubelet(s, goal.Sources, have.Host, have.Machine, render.Secrets{BootstrapToken: have.Token}))
	ids := []string{"mount-source", "device", "certificate-authority", "bootstrap-token", "node-name"}
	if have.Root {
		collect(render.Containerd(s, goal.Sources, have.Host, have.Machine))
		ids = append(ids, "slot-kubelet", "slot-containerd", "slot-runc", "slot-config")
	}
	for _, id := range ids {
		if !found[id] && (id != "bootstrap-token" || have.TokenProblem == "" && !have.CredentialNotFound) {
			c.ok(id, subject, "")
		}
	}
}

func (c *collector) nvidia(s *goalstate.Slot, f Facts) {
	subject, mode := "slot "+s.Name, s.NVIDIA.Mode
	if mode == goalstate.Off || !f.GPU {
		return // a slot that requires one has said so by now
	}
	severity := Warning // of mode auto: nothing is wired, and the slot runs
	if mode == goalstate.Required {
		severity = Error
	}
	driver := cmp.Or(f.NVIDIA, &nvidia.Driver{})
	missing := strings.Join(driver.Missing(), ", ")
	switch {
	case f.NVIDIAProblem != "":
		c.add(Warning, "nvidia-driver", subject, f.NVIDIAProblem, "run berth check as root, with ldconfig in $PATH")
		return
	case missing != "":
		c.add(severity, "nvidia-driver", subject, "the host has a GPU, but its linker does not find "+missing,
			"install the NVIDIA driver's libraries and run ldconfig, or set nvidia.mode to off")
		return
	}
	c.ok("nvidia-driver", subject, driver.Version)
	if err := driver.Mismatch(); err != nil {
		problem, cure, _ := strings.Cut(err.Error(), ": ")
		c.add(Error, "nvidia-mismatch", subject, problem, cure)
	} else if f.Running {
		c.ok("nvidia-mismatch", subject, driver.Version)
	}
	if have := f.Slots[s.Name]; have.Root {
		c.require(have.Machine.NVIDIAToolkit != "", "nvidia-ctk", subject, "there is a GPU, but no nvidia-ctk in "+folder(s),
			"install the NVIDIA Container Toolkit 1.18 or newer there, or set nvidia.mode to off")
	}
}
