package facts

import (
	"path"
	"strings"

	"berth/generator/goalstate"
	"berth/helpers/nvidia"
)

// Group is one reason for which device nodes of the host are bound into a machine. A new kind of hardware is one more
// entry in Groups, and its classes in device.Allowed.
type Group struct {
	// Key is the key of the goal state that decides, for messages.
	Key string
	// Patterns are absolute paths, each component a glob as path.Match takes it.
	Patterns []string
	// Must is the pattern that has to match something, else the slot does not start; empty: none has to.
	Must string
	// If is the device node without which the host has none of the others for this reason; empty: there is no such node.
	If string
}

// kfd is the compute interface of AMD's GPUs, of which a host has one for all.
const kfd = "/dev/kfd"

// dri are the nodes of the kernel's Direct Rendering Manager, of GPUs of all makers.
var dri = []string{"/dev/dri/card*", "/dev/dri/renderD*"}

// Groups returns the reasons for device nodes in the slot's machine. What systemd-nspawn makes by itself in every
// version from 252 (null, zero, full, random, urandom, tty, net/tun) is not among them.
func Groups(slot *goalstate.Slot) []Group {
	groups := []Group{
		{Patterns: []string{"/dev/kmsg", "/dev/fuse"}},
	}
	if mode := slot.NVIDIA.Mode; mode != goalstate.Off {
		groups = hardware(groups, "nvidia.mode", mode, nvidia.Nodes...)
		groups = append(groups, Group{Key: "nvidia.mode", Patterns: dri, If: nvidia.Nodes[0]})
	}
	groups = append(groups, Group{Patterns: append([]string{kfd}, dri...), If: kfd})
	groups = hardware(groups, "machine.kvm", slot.Machine.KVM, "/dev/kvm", "/dev/vhost-net", "/dev/vhost-vsock")
	groups = hardware(groups, "machine.infiniband", slot.Machine.InfiniBand, "/dev/infiniband/*")
	for _, pattern := range slot.Machine.Devices {
		g := Group{Key: "machine.devices", Patterns: []string{pattern}}
		if !strings.ContainsAny(pattern, `*?[\`) {
			g.Must = pattern // a glob may match nothing, a path names something that is expected
		}
		groups = append(groups, g)
	}
	return groups
}

// hardware appends the group of a key whose value is a mode; if that is "required", the first pattern must match.
func hardware(groups []Group, key string, mode goalstate.Mode, patterns ...string) []Group {
	if mode == goalstate.Off {
		return groups
	}
	g := Group{Key: key, Patterns: patterns}
	if mode == goalstate.Required {
		g.Must = patterns[0]
	}
	return append(groups, g)
}

// Match returns those paths of devices that match pattern, in their order.
func Match(devices []string, pattern string) []string {
	var found []string
	for _, d := range devices {
		// A literal path may hold characters that a glob would not take literally.
		if ok, _ := path.Match(pattern, d); ok || pattern == d {
			found = append(found, d)
		}
	}
	return found
}
