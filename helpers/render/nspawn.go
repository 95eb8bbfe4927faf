package render

import (
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"

	"berth/generator/device"
	"berth/generator/goalstate"
	"berth/generator/plan"
	"berth/generator/unit"
	"berth/helpers/facts"
)

// resolveDir is where systemd-resolved's folder of the host is in the machine. The folder is bound, not the file, which
// is replaced by another one whenever the servers change.
const resolveDir = "/run/host-resolve"

// NSpawn renders, with paths relative to the host's root, the settings of the slot's machine (systemd.nspawn(5)), and for
// devices that not every machine may use the drop-in that allows them. All that is missing on the host is reported at
// once.
func NSpawn(slot *goalstate.Slot, sources []string, h facts.Host) (Output, error) {
	r := &renderer{slot: slot, sources: sources}
	hostname := r.nodeName(h)
	if len(hostname) > 64 {
		// The kernel takes no longer one (HOST_NAME_MAX), while a node's name may be longer. Kubelet is told all of it.
		hostname = strings.TrimRight(hostname[:64], "-.")
	}

	binds := r.binds(h)
	nodes := r.devices(h)
	var allow []string
	for _, node := range nodes {
		binds = append(binds, bind{"Bind", node, node})
		if !device.Covers(node) {
			allow = append(allow, "DeviceAllow="+unit.Word(node)+" rwm")
		}
	}
	settings, extra := plan.Settings(slot.Name)
	r.add(settings, "machine.nspawn", map[string]string{
		"HOSTNAME": hostname, "BINDS": r.bindLines(binds),
	})
	if len(allow) > 0 {
		r.add(extra, "devices.conf", map[string]string{"DEVICES": strings.Join(allow, "\n")})
	} else {
		r.out.Remove = append(r.out.Remove, extra)
	}
	return r.done()
}

// bind is one Bind= or BindReadOnly=.
type bind struct{ key, source, target string }

// binds are the folders of the host in the machine.
func (r *renderer) binds(h facts.Host) []bind {
	var binds []bind
	if h.Modules {
		binds = append(binds, bind{"BindReadOnly", "/lib/modules", "/lib/modules"})
	}
	if h.BPF {
		// Mounted there by a generated unit.
		binds = append(binds, bind{"Bind", "/run/bpffs/" + r.slot.MachineName(), "/sys/fs/bpf"})
	}
	if loopbackOnly(h.Nameservers) && h.Uplink {
		binds = append(binds, bind{"BindReadOnly", "/run/systemd/resolve", resolveDir})
	}
	for _, p := range h.SysPaths {
		binds = append(binds, bind{"BindReadOnly", p, p})
	}
	if h.NVIDIA != nil {
		for _, b := range h.NVIDIA.Binds() {
			binds = append(binds, bind{"BindReadOnly", b.Source, b.Target})
		}
	}
	for _, m := range r.slot.Machine.Mounts {
		if slices.Contains(h.MissingMounts, m.Source) {
			r.errorf("machine.mounts: source %q does not exist on this host: make it, or take the mount out", m.Source)
		}
		b := bind{"Bind", m.Source, m.Target}
		if m.ReadOnly {
			b.key = "BindReadOnly"
		}
		if b.target == "" {
			b.target = b.source
		}
		binds = append(binds, b)
	}
	return binds
}

// devices are the device nodes that the slot gets, sorted.
func (r *renderer) devices(h facts.Host) []string {
	found := map[string]bool{}
	for _, g := range facts.Groups(r.slot) {
		matched := false
		for _, pattern := range g.Patterns {
			nodes := facts.Match(h.Devices, pattern)
			for _, node := range nodes {
				found[node] = true
			}
			matched = matched || len(nodes) > 0
			if len(nodes) == 0 && pattern == g.Must {
				r.errorf("%s: no device node %s on this host: load its driver, or do not ask for it", g.Key, pattern)
			}
		}
		if g.Key == "machine.devices" && g.Must == "" && !matched {
			r.warnf("machine.devices: %s matches no device node on this host", strings.Join(g.Patterns, " "))
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// bindLines writes binds so that what is mounted below the target of another comes after it: nspawn sorts them by target
// itself, the file is sorted for its reader.
func (r *renderer) bindLines(binds []bind) string {
	slices.SortStableFunc(binds, func(a, b bind) int { return strings.Compare(path.Clean(a.target), path.Clean(b.target)) })
	var lines []string
	for _, b := range binds {
		value, err := unit.Bind(b.source, b.target)
		if err != nil {
			r.errorf("machine: %s of %w", b.key+"=", err)
		}
		lines = append(lines, b.key+"="+value)
	}
	return strings.Join(lines, "\n")
}

// loopbackOnly says that pods cannot use these servers: in a pod's network a loopback address is the pod itself. Without
// any server the resolver asks 127.0.0.1 (resolv.conf(5)).
func loopbackOnly(nameservers []string) bool {
	return !slices.ContainsFunc(nameservers, func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err == nil && !a.Unmap().IsLoopback()
	})
}
