// Package hostcheck tells whether a host can run the slots of its goal state. What the host is like is gathered first (Gather);
// what follows from it is found by pure functions of these facts (Check).
package hostcheck

import (
	"cmp"
	"slices"
)

// Severity says what a finding means for the slots.
type Severity string

// The severities: an Error keeps a slot from running as it should, a Warning may do so, or do so later.
const (
	Error   Severity = "error"
	Warning Severity = "warning"
	OK      Severity = "ok"
)

// Finding is the outcome of one check of one subject.
type Finding struct {
	// ID names the check, see Checks. It never changes its meaning.
	ID       string   `json:"id"`
	Severity Severity `json:"severity"`
	// Subject is what was looked at: "host", "slot a", a path, a variable of sysctl(8), …
	Subject string `json:"subject"`
	// Problem is what is wrong; where nothing is, what was found, if there is more to tell than that.
	Problem string `json:"problem,omitempty"`
	// Cure is what would be right, or what to do; empty where nothing is wrong.
	Cure string `json:"cure,omitempty"`
}

// ID is one check that this package, or who else makes findings, knows.
type ID struct {
	Name, Meaning string
	// Running says that the check asks a host that runs, and is left out in an image.
	Running bool
}

// The checks of the goal state itself.
const (
	GoalMissing = "goal-missing"
	GoalInvalid = "goal-invalid"
)

// Checks are all checks, in the order in which they are made.
var Checks = []ID{
	{Name: GoalMissing, Meaning: "there is no goal state"},
	{Name: GoalInvalid, Meaning: "the goal state has a mistake"},
	{Name: "last-good", Meaning: "a slot goes on with its last good goal state, as the host's has a mistake; or has one that cannot be used"},
	{Name: "secret-readable", Meaning: "users other than root can read the bootstrap token's file, or a goal state with a secret in it"},
	{Name: "systemd-version", Meaning: "systemd is older than 252"},
	{Name: "nspawn", Meaning: "systemd-nspawn or its unit is not installed"},
	{Name: "machined", Meaning: "systemd-machined is not installed"},
	{Name: "dbus", Meaning: "the message bus is not installed, or does not answer"},
	{Name: "cgroup", Meaning: "the control groups are not those of version 2 alone", Running: true},
	{Name: "cgroup-controllers", Meaning: "control group version 2 lacks a controller that pods need", Running: true},
	{Name: "kernel-module", Meaning: "a module of modules-load.d/berth.conf is not loaded, or not there"},
	{Name: "sysctl-value", Meaning: "a kernel variable has another value than sysctl.d/90-berth.conf wants", Running: true},
	{Name: "sysctl-override", Meaning: "a kernel variable will get another value at boot, because of another sysctl.d file"},
	{Name: "berth-file", Meaning: "a file of berth's own is missing"},
	{Name: "unit-unknown", Meaning: "systemd does not know a unit of a slot", Running: true},
	{Name: "units-stale", Meaning: "the slots' units are not what the goal state says", Running: true},
	{Name: "needrestart", Meaning: "needrestart may restart a slot's machine"},
	{Name: "automatic-reboot", Meaning: "unattended-upgrades reboots the host by itself"},
	{Name: "port-in-use", Meaning: "a process has a port that a slot's kubelet needs; looked at when no slot holds the host", Running: true},
	{Name: "slot-root", Meaning: "a slot has no root file system"},
	{Name: "slot-systemd", Meaning: "no systemd in a slot's root file system"},
	{Name: "slot-dbus", Meaning: "no message bus in a slot's root file system"},
	{Name: "slot-kubelet", Meaning: "no kubelet where kubelet.binary says"},
	{Name: "slot-containerd", Meaning: "no containerd where containerd.binary says"},
	{Name: "slot-runc", Meaning: "no runc where containerd.runc says"},
	{Name: "mount-source", Meaning: "the source of a mount of machine.mounts does not exist"},
	{Name: "device", Meaning: "a device node that machine.devices, machine.kvm or machine.infiniband asks for does not exist"},
	{Name: "certificate-authority", Meaning: "the cluster's CA file is missing, or has no certificates in it"},
	{Name: "bootstrap-token", Meaning: "the bootstrap token is missing, or is none"},
	{Name: "node-name", Meaning: "the host's name cannot be that of a node"},
	{Name: "node-ip", Meaning: "kubelet.node_ip is no address of this host", Running: true},
	{Name: "slot-config", Meaning: "anything else that a start of a slot would refuse or warn about"},
	{Name: "nvidia-missing", Meaning: "nvidia.mode is required, and there is no NVIDIA GPU"},
	{Name: "nvidia-driver", Meaning: "libraries of the NVIDIA driver are missing on the host"},
	{Name: "nvidia-mismatch", Meaning: "the NVIDIA driver's libraries are not those of the loaded kernel module", Running: true},
	{Name: "nvidia-ctk", Meaning: "no nvidia-ctk in the root file system of a slot that gets GPUs"},
	{Name: "incomplete", Meaning: "something could not be looked at"},
}

// sorted brings findings into the order of Checks, then of their subjects, and drops what is there twice.
func sorted(findings []Finding) []Finding {
	order := map[string]int{}
	for i, c := range Checks {
		order[c.Name] = i
	}
	slices.SortStableFunc(findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(order[a.ID], order[b.ID]), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Problem, b.Problem))
	})
	return slices.Compact(findings)
}
