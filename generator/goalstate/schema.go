// Package goalstate reads berth's goal state: the TOML file, with its drop-ins, that says what the slots of a host must
// look like. Loading is strict, and reports every error of all files at once with the place and the cure.
package goalstate

import (
	"maps"
	"slices"
	"time"
)

// GoalState is what a host's slots must look like: all files merged, defaults filled in, everything checked.
type GoalState struct {
	// Sources are the files that the goal state was read from, in the order in which they were merged, as paths on the
	// host (without the root directory that stands for "/").
	Sources []string
	// Boot names the slot that starts at boot; empty: none.
	Boot string
	// Slots holds each slot by its name, with the shared tables and the slot's own already merged. Slots may share
	// maps and slices, so they must not be changed.
	Slots map[string]*Slot
	// Partial says that there were errors, and that only Sources, Boot and the names of Slots are set, as far as they
	// are certain: enough to make a slot that should run say why it does not, and for nothing else.
	Partial bool
}

// Slot is one slot's goal state. Nothing in it is inherited any more: the shared tables, the slot's own tables above
// them, and berth's defaults below them are merged.
type Slot struct {
	// Name is the slot's name, [a-z0-9]{1,16}.
	Name string
	// Peers are the slots whose node stack must not run at the same time, sorted. Default: all other slots.
	Peers []string
	// PeersSet says that the goal state names the peers itself (an empty list then means: none).
	PeersSet bool

	Cluster    Cluster
	Kubelet    Kubelet
	Containerd Containerd
	NVIDIA     NVIDIA
	Machine    Machine
	Timeouts   Timeouts
}

// Cluster is the control plane that the slot's kubelet joins.
type Cluster struct {
	Server                   string   `toml:"server"`                     // https://host[:port] of the API server
	CertificateAuthority     string   `toml:"certificate_authority"`      // absolute path on the host of a PEM file
	CertificateAuthorityData string   `toml:"certificate_authority_data"` // base64 of a PEM file, instead of the path
	DNS                      []string `toml:"dns"`                        // addresses of the cluster's DNS service
	Domain                   string   `toml:"domain"`                     // default "cluster.local"
}

// Kubelet is the slot's kubelet: where it is, as which node it registers, and how it proves who it is.
type Kubelet struct {
	Binary   string            `toml:"binary"`    // absolute path inside the machine
	NodeName string            `toml:"node_name"` // empty: the host's name, decided when the slot starts
	NodeIP   string            `toml:"node_ip"`   // empty, one address, or "IPv4,IPv6" in either order
	Labels   map[string]string `toml:"labels"`
	Taints   []string          `toml:"taints"` // key[=value]:effect

	// Exactly one of the next five. The third and fourth are names of systemd credentials (systemd.exec(5), LoadCredential= and
	// LoadCredentialEncrypted=): see Credential.
	BootstrapToken                    string `toml:"bootstrap_token"`      // a secret: never printed
	BootstrapTokenFile                string `toml:"bootstrap_token_file"` // absolute path on the host
	BootstrapTokenCredential          string `toml:"bootstrap_token_credential"`
	BootstrapTokenEncryptedCredential string `toml:"bootstrap_token_encrypted_credential"`
	Exec                              *Exec  `toml:"exec"`

	// Config holds KubeletConfiguration (v1beta1) fields that go over berth's defaults.
	Config map[string]any `toml:"config"`
}

// Credential returns the name of the systemd credential that holds the bootstrap token, and the full key that names it; empty: the
// token is not in one.
func (k Kubelet) Credential() (name, key string) {
	switch {
	case k.BootstrapTokenCredential != "":
		return k.BootstrapTokenCredential, "kubelet.bootstrap_token_credential"
	case k.BootstrapTokenEncryptedCredential != "":
		return k.BootstrapTokenEncryptedCredential, "kubelet.bootstrap_token_encrypted_credential"
	}
	return "", ""
}

// Exec is a client-go credential plugin, run by kubelet inside the machine.
type Exec struct {
	Command    string            `toml:"command"`
	Args       []string          `toml:"args"`
	Env        map[string]string `toml:"env"`
	APIVersion string            `toml:"api_version"` // default client.authentication.k8s.io/v1
}

// Containerd is the slot's container runtime.
type Containerd struct {
	Binary       string `toml:"binary"`        // absolute path inside the machine
	Runc         string `toml:"runc"`          // absolute path inside the machine
	SandboxImage string `toml:"sandbox_image"` // the pause image
	// ConfigVersion is 2 (containerd 1.x), 3 (containerd 2.x) or 0: by the containerd in the root file system ("auto").
	ConfigVersion int `toml:"config_version"`
	// Registry holds the hosts.toml of each registry host (or "_default").
	Registry map[string]Registry `toml:"registry"`
	// Config holds tables of containerd's configuration that go over berth's defaults.
	Config map[string]any `toml:"config"`
}

// Registry says where images of one registry host are pulled from.
type Registry struct {
	// Server is the URL of the registry itself. Default: https://<host>, for docker.io https://registry-1.docker.io;
	// empty for "_default", where containerd takes the host that the image names.
	Server  string   `toml:"server"`
	Mirrors []Mirror `toml:"mirrors"` // tried in this order, before Server
}

// Mirror is one [host."URL"] of a hosts.toml.
type Mirror struct {
	URL          string              `toml:"url"`
	Capabilities []string            `toml:"capabilities"` // pull, resolve, push; default pull and resolve
	CA           string              `toml:"ca"`           // absolute path inside the machine
	SkipVerify   bool                `toml:"skip_verify"`
	OverridePath bool                `toml:"override_path"`
	Header       map[string][]string `toml:"header"`
}

// Mode says whether something that depends on the host's hardware is wired into the slot.
type Mode string

// The modes: Auto wires what is found, Required makes the start fail where nothing is found, Off wires nothing.
const (
	Auto     Mode = "auto"
	Required Mode = "required"
	Off      Mode = "off"
)

// NVIDIA says how the host's NVIDIA GPUs get into the slot.
type NVIDIA struct {
	Mode           Mode   `toml:"mode"`
	RuntimeClass   string `toml:"runtime_class"`
	DefaultRuntime bool   `toml:"default_runtime"`
}

// Machine is the slot's nspawn machine.
type Machine struct {
	KVM        Mode     `toml:"kvm"`
	InfiniBand Mode     `toml:"infiniband"`
	Devices    []string `toml:"devices"` // absolute paths or globs of more device nodes
	Mounts     []Mount  `toml:"mounts"`
}

// Mount is a folder or file of the host that is bound into the machine. Its source must exist when the slot starts.
type Mount struct {
	Source   string `toml:"source"`
	Target   string `toml:"target"` // default: the same as Source
	ReadOnly bool   `toml:"read_only"`
}

// Timeouts are the budgets of a slot's start.
type Timeouts struct {
	Ready      time.Duration `toml:"ready"`       // wait for D-Bus, and for the kubelet; default 2m
	AfterStart time.Duration `toml:"after_start"` // GPU wiring; default 3m
	Settle     time.Duration `toml:"settle"`      // the kubelet must stay up this long; default 2s; 0s: not at all
	Poll       time.Duration `toml:"poll"`        // where nothing can be awaited as an event; default 250ms
}

// MachineName is the name of the slot's nspawn machine.
func (s *Slot) MachineName() string { return MachineName(s.Name) }

// MachineName is the name of a slot's nspawn machine.
func MachineName(slot string) string { return "node-" + slot }

// SlotNames are the names of the slots, sorted.
func (g *GoalState) SlotNames() []string { return slices.Sorted(maps.Keys(g.Slots)) }
