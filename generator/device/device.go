// Package device names the devices that a slot's machine may use. Both sides of the rule "what is bound is allowed" come
// from here: the generator writes Allowed into the machine's unit, and the step that binds devices asks Covers.
package device

import (
	"path"
	"strings"
)

// Allowed are the DeviceAllow= values of every machine, the same on every host and for every slot. "char-" names are those
// of /proc/devices and may hold globs (systemd.resource-control(5)); what a host does not have is skipped. Devices that
// share one major with others (the "misc" class: kmsg, kvm, fuse, tun) are named by their node.
var Allowed = []Rule{
	{"char-nvidia*", []string{"/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/nvidia-caps-imex-channels/*"}}, // nvidia, nvidia-frontend, -uvm, -modeset, -nvswitch, -caps, -caps-imex-channels
	{"char-drm", []string{"/dev/dri/*"}},
	{"char-kfd", []string{"/dev/kfd"}},                  // AMD
	{"char-infiniband*", []string{"/dev/infiniband/*"}}, // infiniband_verbs, infiniband_mad
	{"/dev/infiniband/rdma_cm", nil},                    // misc, though in the same folder (drivers/infiniband/core/ucma.c)
	{"char-ipvtap", nil},                                // network devices of pods, made inside the machine
	{"char-macvtap", nil},                               // the same
	{"/dev/kmsg", []string{"/dev/kmsg"}},
	{"/dev/kvm", []string{"/dev/kvm"}},
	{"/dev/vhost-net", []string{"/dev/vhost-net"}},
	{"/dev/vhost-vsock", []string{"/dev/vhost-vsock"}},
	{"/dev/net/tun", []string{"/dev/net/tun"}},
	{"/dev/fuse", []string{"/dev/fuse"}},
}

// Rule is one DeviceAllow= value and the device nodes that it covers.
type Rule struct {
	Allow string
	Nodes []string // globs of path.Match
}

// Covers tells whether the device node at path is allowed by one of Allowed.
func Covers(node string) bool {
	for _, r := range Allowed {
		for _, glob := range r.Nodes {
			if ok, _ := path.Match(glob, node); ok {
				return true
			}
		}
	}
	return false
}

// Lines returns the DeviceAllow= lines of Allowed.
func Lines() string {
	var b strings.Builder
	for _, r := range Allowed {
		b.WriteString("DeviceAllow=" + r.Allow + " rwm\n")
	}
	return b.String()
}
