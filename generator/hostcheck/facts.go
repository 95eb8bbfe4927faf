package hostcheck

import (
	"io/fs"

	"berth/generator/goalstate/store"
	"berth/helpers/facts"
	"berth/helpers/nvidia"
)

// Facts are what is known of a host. The zero value is that of an empty image.
type Facts struct {
	// Running says that a systemd runs there, so that the kernel, its processes and systemd itself can be asked.
	Running bool

	// Systemd is systemd's version, such as "257.9-1"; empty: it is not known.
	Systemd string
	// Programs of systemd and of the message bus that are there.
	NSpawn, NSpawnUnit, Machined, Bus bool
	// BusProblem says why the running host's message bus could not be asked; empty: it was.
	BusProblem string

	// Unified says that control group version 2 is mounted, with the Controllers at its root.
	Unified     bool
	Controllers []string

	Modules []Module
	Sysctls []Sysctl
	// SysctlHiddenBy is the file that hides berth's own file of sysctl.d(5); empty: none does.
	SysctlHiddenBy string

	// Generator says that systemd finds berth-generator.
	Generator bool
	// Units are the units that berth ships.
	Units []Unit
	// Files are berth's other files that are missing.
	MissingFiles []string
	// Stale are, for each slot that was looked at, its generated files that are not what the goal state says.
	Stale map[string][]string
	// Loaded are the states (LoadState=, org.freedesktop.systemd1(5)) of the units that systemd was asked for.
	Loaded map[string]string
	// Held are the slots that hold a claim on the host.
	Held []string

	// Needrestart says that needrestart is installed, Reprieved that it is told to leave the machines alone.
	Needrestart, Reprieved bool
	// RebootedBy is the file that has unattended-upgrades reboot the host; empty: none.
	RebootedBy string

	// Ports are the TCP ports on which processes listen.
	Ports []Port
	// Addresses are those of the host's interfaces.
	Addresses []string

	// GPU says that the host has an NVIDIA GPU, or will have one once its driver is loaded, NVIDIA what was found of its driver.
	GPU    bool
	NVIDIA *nvidia.Driver
	// NVIDIAProblem says why the driver could not be looked for.
	NVIDIAProblem string

	// LastGood are the slots that go on with their last good goal state, as the host's own is broken; Unusable says by the slot's name
	// why one that is stored would not be used. The empty name stands for the folder.
	LastGood map[string]store.Record
	Unusable map[string]error

	// Secrets are the files that hold secrets.
	Secrets []Secret
	// Slots are what belongs to each slot of the goal state.
	Slots map[string]Slot
	// Problems are what kept facts from being gathered.
	Problems []string
}

// Module is a kernel module.
type Module struct {
	Name string
	// Loaded: it is, or it is built into the kernel. Available: it can be loaded. Kernel: that is known, as the kernel's folder in
	// /lib/modules is there.
	Loaded, Available, Kernel bool
}

// Unit is a unit file of berth's.
type Unit struct {
	Name string
	Path string // on the host; empty: it is not there
	// Missing are the programs that it runs and that are not there.
	Missing []string
}

// Port is a TCP port on which a process listens.
type Port struct {
	Address string
	Port    uint16
	Process string // "name (PID 1)"; empty: unknown
}

// Secret is a file that holds a secret.
type Secret struct {
	Path string
	What string // such as "kubelet.bootstrap_token (line 5)"
	Mode fs.FileMode
	// Folders are the modes of the folders above.
	Folders []fs.FileMode
	// Foreign says that it belongs to a user who is neither root nor the one who asks.
	Foreign bool
}

// Slot is what the host has for one slot.
type Slot struct {
	// Root says that the root file system is there, RootProblem why it cannot be used; neither is set: who asks may not look.
	Root         bool
	RootProblem  string
	Systemd, Bus bool
	Machine      facts.Machine
	Host         facts.Host
	// Token is the bootstrap token; where it cannot be known, one of the right form.
	Token              string
	TokenProblem       string
	CredentialNotFound bool // the credential of the bootstrap token is in no folder of systemd's
}
