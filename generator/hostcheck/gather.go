package hostcheck

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	sdunit "github.com/coreos/go-systemd/v22/unit"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/generator/plan"
	"berth/helpers/facts"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
)

// textLimit bounds what is read of one file.
const textLimit = 16 << 20

// Systemd is what is asked of a running host's systemd; machine.Manager is one.
type Systemd interface {
	Version() (string, error)
	Units(ctx context.Context, names ...string) ([]machine.Unit, error)
}

// Host is where facts are gathered.
type Host struct {
	Root *file.Root // the directory that stands for "/"
	// Dial connects to the systemd that runs there.
	Dial func(context.Context, *file.Root) (Systemd, error)
	Arch string // of the host, in the words of GOARCH
}

// Running tells whether a systemd runs the host whose "/" is root: sd_booted(3).
func Running(root *file.Root) bool { return root.IsDir("run/systemd/system") }

// Gather finds the facts about a host that matter to the slots of goal, which may be nil. It changes nothing there. Installed
// says that goal is the host's own, so that its units must be those that the generator made.
func Gather(ctx context.Context, h Host, goal *goalstate.GoalState, installed bool) Facts {
	if goal == nil || goal.Partial {
		goal, installed = &goalstate.GoalState{}, false
	}
	root := h.Root
	f := Facts{Running: Running(root), Slots: map[string]Slot{}}
	f.programs(root)
	f.unified(root)
	f.modules(root)
	f.install(root)
	f.Needrestart, f.Reprieved = root.Exists("usr/sbin/needrestart"), root.Exists(ownNeedrestart)
	f.RebootedBy = rebootedBy(root)
	var err error
	f.Sysctls, f.SysctlHiddenBy, err = sysctls(root, f.Running)
	f.problem(err)
	f.Held, err = plan.Held(root)
	f.problem(err)
	_, f.Unusable = store.Stored(root)
	if f.Running {
		f.ask(ctx, h, goal, installed)
		f.network(root, goal)
	}
	if installed && f.Running {
		f.stale(root, goal)
	}
	if f.GPU = nvidia.Expected(root); f.GPU {
		f.NVIDIA, err = nvidia.Discover(ctx, root, h.Arch)
		if err != nil {
			f.NVIDIAProblem = err.Error()
		}
	}
	for name, slot := range goal.Slots {
		f.Slots[name] = f.slot(root, slot)
	}
	return f
}

// Dial connects to the systemd of a running host through the message bus, which every user may do.
func Dial(ctx context.Context, root *file.Root) (Systemd, error) { return machine.Inside(ctx, root) }

// NewHost is the host whose "/" is root.
func NewHost(root *file.Root) Host { return Host{root, Dial, runtime.GOARCH} }

func (f *Facts) problem(err error) {
	if err != nil {
		f.Problems = append(f.Problems, err.Error())
	}
}

// unitDirs are where systemd finds unit files, and above them its generators (systemd.unit(5), systemd.generator(7)).
var unitDirs = []string{
	"etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system",
}

// findUnit returns the path of a unit file; empty: there is none.
func findUnit(root *file.Root, name string) string {
	for _, dir := range unitDirs {
		if p := path.Join(dir, name); root.Exists(p) {
			return p
		}
	}
	return ""
}

func (f *Facts) programs(root *file.Root) {
	f.NSpawn = anyProgram(root, "usr/bin/systemd-nspawn", "bin/systemd-nspawn")
	f.NSpawnUnit = findUnit(root, "systemd-nspawn@.service") != ""
	f.Machined = findUnit(root, "systemd-machined.service") != ""
	f.Bus = hasBus(root)
	f.Systemd = fileVersion(root)
}

// hasBus tells whether a message bus is installed.
func hasBus(root *file.Root) bool {
	return anyProgram(root, "usr/bin/dbus-daemon", "usr/bin/dbus-broker", "bin/dbus-daemon")
}

// fileVersion is systemd's version by the name of its own library, "libsystemd-shared-257.so" or "-257.9-1.fc42.so".
func fileVersion(root *file.Root) string {
	dirs := []string{"usr/lib/systemd", "usr/lib64/systemd", "lib/systemd"}
	list, _ := root.ReadDir("usr/lib")
	for _, e := range list {
		if strings.Contains(e.Name(), "-linux-") {
			dirs = append(dirs, path.Join("usr/lib", e.Name(), "systemd"))
		}
	}
	for _, dir := range dirs {
		list, _ := root.ReadDir(dir)
		for _, e := range list {
			name, found := strings.CutPrefix(e.Name(), "libsystemd-shared-")
			if version, so := strings.CutSuffix(name, ".so"); found && so {
				return version
			}
		}
	}
	return ""
}

func (f *Facts) unified(root *file.Root) {
	text, err := root.Read("sys/fs/cgroup/cgroup.controllers", textLimit)
	f.Unified, f.Controllers = err == nil, strings.Fields(string(text))
}

// modules looks for the modules that berth has loaded at boot.
func (f *Facts) modules(root *file.Root) {
	var kernels []string
	if release := root.Text("proc/sys/kernel/osrelease", textLimit); f.Running {
		kernels = []string{strings.TrimSpace(release)}
	} else {
		list, _ := root.ReadDir("lib/modules")
		for _, e := range list {
			kernels = append(kernels, e.Name())
		}
	}
	for line := range strings.Lines(root.Text(ownModules, textLimit)) {
		name := strings.TrimSpace(line)
		if name == "" || name[0] == '#' || name[0] == ';' {
			continue
		}
		m := Module{Name: name}
		m.Loaded = f.Running && loaded(root, name)
		for _, kernel := range kernels {
			dir := path.Join("lib/modules", kernel)
			m.Kernel = m.Kernel || root.Exists(path.Join(dir, "modules.dep"))
			m.Available = m.Available || listed(root.Text(path.Join(dir, "modules.dep"), textLimit), name)
			builtin := listed(root.Text(path.Join(dir, "modules.builtin"), textLimit), name)
			m.Available, m.Loaded = m.Available || builtin, m.Loaded || builtin
		}
		f.Modules = append(f.Modules, m)
	}
}

// loaded tells whether the running kernel has a module. One that is built in need not be in /sys/module.
func loaded(root *file.Root, name string) bool {
	switch name {
	case "overlay":
		return slices.Contains(strings.Fields(root.Text("proc/filesystems", textLimit)), name)
	case "br_netfilter":
		return root.Exists("proc/sys/net/bridge/bridge-nf-call-iptables")
	}
	return root.IsDir("sys/module/" + name)
}

// listed tells whether modules.dep(5) or modules.builtin has a module. Names may have "-" for "_".
func listed(text, name string) bool {
	for line := range strings.Lines(text) {
		file, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		base, _, _ := strings.Cut(path.Base(file), ".")
		if strings.ReplaceAll(base, "-", "_") == name {
			return true
		}
	}
	return false
}

// install looks for berth's own files.
func (f *Facts) install(root *file.Root) {
	for _, dir := range unitDirs {
		f.Generator = f.Generator || anyProgram(root, path.Join(path.Dir(dir), "system-generators", generator))
	}
	for _, name := range ownUnits {
		u := Unit{Name: name}
		if p := findUnit(root, name); p != "" {
			u.Path = "/" + p
			u.Missing = missingPrograms(root, p)
		}
		f.Units = append(f.Units, u)
	}
	for _, name := range []string{ownModules, ownSysctl, ownTmpfiles} {
		if !root.Exists(name) {
			f.MissingFiles = append(f.MissingFiles, "/"+name)
		}
	}
}

// missingPrograms returns those programs of a unit's ExecStart= and the like that do not exist.
func missingPrograms(root *file.Root, unit string) []string {
	content, _ := root.Read(unit, textLimit)
	options, _ := sdunit.DeserializeOptions(bytes.NewReader(content))
	var missing []string
	for _, o := range options {
		// Before the path there may be prefixes, "-" among them (systemd.service(5)).
		program, _, _ := strings.Cut(strings.TrimLeft(o.Value, "-@:+!"), " ")
		if strings.HasPrefix(o.Name, "Exec") && path.IsAbs(program) && !anyProgram(root, program) && !slices.Contains(missing, program) {
			missing = append(missing, program)
		}
	}
	return missing
}

// ask asks the host's systemd.
func (f *Facts) ask(ctx context.Context, h Host, goal *goalstate.GoalState, installed bool) {
	systemd, err := h.Dial(ctx, h.Root)
	if err != nil {
		f.BusProblem = fmt.Sprintf("the message bus cannot be used: %v", err)
		return
	}
	if c, ok := systemd.(interface{ Close() }); ok {
		defer c.Close()
	}
	if version, err := systemd.Version(); err == nil {
		f.Systemd = version
	}
	var names []string
	for _, slot := range goal.SlotNames() {
		if installed {
			names = append(names, "node@"+slot+".service", "node-peer-guard@"+slot+".service",
				machine.NSpawnUnit(goalstate.MachineName(slot)))
		}
	}
	f.Loaded = map[string]string{}
	if len(names) == 0 {
		return
	}
	units, err := systemd.Units(ctx, names...)
	f.problem(err)
	for _, u := range units {
		f.Loaded[u.Name] = u.Load
	}
}

func (f *Facts) stale(root *file.Root, goal *goalstate.GoalState) {
	planned, err := plan.Host(root, goal, f.Held)
	f.problem(err)
	f.Stale = map[string][]string{}
	for _, slot := range goal.SlotNames() {
		f.Stale[slot], err = plan.Stale(root, slot, planned)
		f.problem(err)
	}
}

// rebootedBy returns the file of apt.conf(5) that has unattended-upgrades reboot the host; the last one decides.
func rebootedBy(root *file.Root) (by string) {
	const dir, key = "etc/apt/apt.conf.d", "unattended-upgrade::automatic-reboot"
	list, _ := root.ReadDir(dir)
	for _, e := range list {
		for line := range strings.Lines(root.Text(path.Join(dir, e.Name()), textLimit)) {
			words := strings.Fields(strings.ToLower(strings.ReplaceAll(line, ";", " ")))
			if len(words) < 2 || words[0] != key {
				continue
			}
			by = ""
			if slices.Contains([]string{"true", "yes", "on", "1", "enable", "with"}, strings.Trim(words[1], `"`)) {
				by = path.Join("/", dir, e.Name())
			}
		}
	}
	return by
}

// network finds listeners and addresses. It looks at what PID 1 has: the caller may be in another network name space.
func (f *Facts) network(root *file.Root, goal *goalstate.GoalState) {
	inodes := map[string][]int{} // of sockets: which of f.Ports they are
	for _, name := range []string{"proc/1/net/tcp", "proc/1/net/tcp6"} {
		for line := range strings.Lines(root.Text(name, textLimit)) {
			// proc_pid_net(5): number, local and remote address, state (0A: listens), …, the tenth is the inode.
			column := strings.Fields(line)
			if len(column) < 10 || column[3] != "0A" {
				continue
			}
			address, port, ok := parseSocket(column[1])
			if ok && needs(goal, port) {
				inodes["socket:["+column[9]+"]"] = append(inodes["socket:["+column[9]+"]"], len(f.Ports))
				f.Ports = append(f.Ports, Port{Address: address.String(), Port: port})
			}
		}
	}
	if len(inodes) > 0 {
		f.owners(root, inodes)
	}
	f.addresses(root)
}

func needs(goal *goalstate.GoalState, port uint16) bool {
	for _, s := range goal.Slots {
		if slices.ContainsFunc(kubeletPorts(s), func(w wanted) bool { return w.port == port }) {
			return true
		}
	}
	return false
}

// parseSocket reads "0100007F:2808". An address is a row of numbers of 32 bits, each as the host has it in memory.
func parseSocket(s string) (a netip.Addr, port uint16, ok bool) {
	host, number, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	p, err2 := strconv.ParseUint(number, 16, 16)
	if err != nil || err2 != nil || len(b)%4 != 0 {
		return a, 0, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, ok = netip.AddrFromSlice(b)
	return a.Unmap(), uint16(p), ok
}

// owners finds the processes that have these sockets. What a user may not look at stays unknown.
func (f *Facts) owners(root *file.Root, inodes map[string][]int) {
	processes, _ := root.ReadDir("proc")
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		dir := path.Join("proc", p.Name())
		handles, _ := root.ReadDir(path.Join(dir, "fd"))
		for _, h := range handles {
			target, _ := root.Readlink(path.Join(dir, "fd", h.Name()))
			for _, i := range inodes[target] {
				f.Ports[i].Process = fmt.Sprintf("%s (PID %s)", strings.TrimSpace(root.Text(path.Join(dir, "comm"), textLimit)), p.Name())
			}
		}
	}
}

func (f *Facts) addresses(root *file.Root) {
	last := ""
	for line := range strings.Lines(root.Text("proc/1/net/fib_trie", textLimit)) {
		if text, leaf := strings.CutPrefix(strings.TrimSpace(line), "|-- "); leaf {
			last = text
		} else if strings.TrimSpace(line) == "/32 host LOCAL" && !slices.Contains(f.Addresses, last) {
			f.Addresses = append(f.Addresses, last) // once in each of the tables local and main
		}
	}
	for line := range strings.Lines(root.Text("proc/1/net/if_inet6", textLimit)) {
		digits, _, _ := strings.Cut(line, " ")
		if b, err := hex.DecodeString(digits); err == nil {
			if a, ok := netip.AddrFromSlice(b); ok {
				f.Addresses = append(f.Addresses, a.String())
			}
		}
	}
}

func (f *Facts) slot(root *file.Root, slot *goalstate.Slot) Slot {
	have := Slot{Host: facts.DiscoverHost(root, slot)}
	have.Host.NVIDIA = f.NVIDIA
	machineRoot, err := root.Sub("var/lib/machines/" + slot.MachineName())
	switch {
	case errors.Is(err, fs.ErrPermission):
		f.problem(err)
	case err != nil:
		have.RootProblem = reason(err)
	default:
		defer machineRoot.Close()
		have.Root = true
		have.Systemd = anyProgram(machineRoot, "usr/lib/systemd/systemd", "lib/systemd/systemd")
		have.Bus = hasBus(machineRoot)
		have.Machine = facts.DiscoverMachine(machineRoot, slot)
	}
	k := slot.Kubelet
	credential, _ := k.Credential()
	switch {
	case k.BootstrapTokenFile != "":
		have.Token, err = facts.Token(root, nil, k)
		if errors.Is(err, fs.ErrPermission) {
			f.problem(err)
			have.Token = anyToken
		} else if err != nil {
			have.TokenProblem = "kubelet.bootstrap_token_file: " + k.BootstrapTokenFile + " " + reason(err)
		}
		f.Secrets = append(f.Secrets, TokenFile(root, k)...)
	case credential != "":
		have.Token = anyToken               // systemd hands it to the step alone
		have.CredentialNotFound = f.Running // an image gets it when it boots
		encrypted := k.BootstrapTokenEncryptedCredential != ""
		stores := credentials
		if encrypted {
			stores = encryptedCredentials
		}
		for _, dir := range stores {
			name := path.Join(dir, credential)
			have.CredentialNotFound = have.CredentialNotFound && !root.Exists(name)
			if s, ok := secretFile(root, name, "the bootstrap token"); ok && !encrypted {
				f.Secrets = append(f.Secrets, s)
			}
		}
	default:
		have.Token = k.BootstrapToken
	}
	return have
}

// anyToken has the form of a bootstrap token.
const anyToken = "000000.0000000000000000"

// credentials are where LoadCredential= without a path looks, encryptedCredentials LoadCredentialEncrypted= (systemd.exec(5)): what systemd itself was passed, then the stores.
var (
	credentials          = []string{"run/credentials/@system", "etc/credstore", "run/credstore", "usr/lib/credstore"}
	encryptedCredentials = []string{"run/credentials/@encrypted", "etc/credstore.encrypted", "run/credstore.encrypted", "usr/lib/credstore.encrypted"}
)

// Secrets returns the files of a goal state that hold secrets, with who can read them. Paths are beneath root.
func Secrets(root *file.Root, files []goalstate.Source) []Secret {
	var all []Secret
	for _, s := range goalstate.Secrets(files) {
		what := fmt.Sprintf("%s (line %d)", s.Key, s.Line)
		if n := len(all); n > 0 && all[n-1].Path == s.File {
			all[n-1].What += ", " + what
		} else if secret, ok := secretFile(root, s.File, what); ok {
			all = append(all, secret)
		}
	}
	return all
}

// TokenFile returns the file of a slot's bootstrap token, with who can read it; none, where the goal state names none, or it is not there.
func TokenFile(root *file.Root, k goalstate.Kubelet) []Secret {
	if k.BootstrapTokenFile == "" {
		return nil
	}
	if s, ok := secretFile(root, k.BootstrapTokenFile, "the bootstrap token"); ok {
		return []Secret{s}
	}
	return nil
}

// secretFile describes who can read a file; false: there is no such regular file.
func secretFile(root *file.Root, name, what string) (Secret, bool) {
	resolved, err := root.Resolve(name)
	if err != nil {
		return Secret{}, false
	}
	info, err := root.Stat(resolved)
	if err != nil || !info.Mode().IsRegular() {
		return Secret{}, false
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	s := Secret{Path: path.Join("/", name), What: what, Mode: info.Mode().Perm(), Foreign: owner != 0 && owner != os.Geteuid()}
	for dir := path.Dir(resolved); ; dir = path.Dir(dir) {
		if info, err := root.Stat(dir); err == nil {
			s.Folders = append(s.Folders, info.Mode().Perm())
		}
		if dir == "/" {
			return s, true
		}
	}
}

// reason is what follows a file's name in a sentence about err.
func reason(err error) string {
	var errno syscall.Errno
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "does not exist"
	case errors.As(err, &errno):
		return "cannot be read: " + errno.Error()
	}
	return err.Error()
}

// anyProgram tells whether one of the paths is a program.
func anyProgram(root *file.Root, names ...string) bool {
	return slices.ContainsFunc(names, root.IsProgram)
}
