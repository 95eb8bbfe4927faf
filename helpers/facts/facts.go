// Package facts is what rendering a slot needs to know about the host and about the root file system of the slot's
// machine. The facts are plain data, found when the slot starts; render is a pure function of them and the goal state.
package facts

import "berth/helpers/nvidia"

// Host is what was found on the host.
type Host struct {
	// Name is the host's name as the host has it: of /etc/hostname, else of the kernel.
	Name string
	// Modules says that /lib/modules is a folder.
	Modules bool
	// BPF says that the kernel has the bpf file system (/proc/filesystems).
	BPF bool
	// Devices are the paths of the device nodes (or links to one) that match a pattern of Groups, sorted.
	Devices []string
	// SysPaths are those paths below /sys that programs for the host's devices read and a machine has not by itself, sorted.
	SysPaths []string
	// GPU says that the slot is to have the host's NVIDIA GPUs, and that the host has some, or will have once their driver is
	// loaded.
	GPU bool
	// NVIDIA is the driver of these; nil: it is not there, or was not looked for.
	NVIDIA *nvidia.Driver
	// MissingMounts are the sources of machine.mounts that do not exist, sorted.
	MissingMounts []string
	// Nameservers are those of /etc/resolv.conf, in order.
	Nameservers []string
	// Uplink says that systemd-resolved's list of the real servers, /run/systemd/resolve/resolv.conf, exists.
	Uplink bool
	// CertificateAuthority is the content of the file that cluster.certificate_authority names.
	CertificateAuthority string
	// CertificateAuthorityProblem says why that file could not be read; empty: it was, or none is named.
	CertificateAuthorityProblem string
}

// Machine is what was found in the root file system of the slot's machine. Nothing in it was run.
type Machine struct {
	// Root is where the root file system is on the host, for messages.
	Root string

	Containerd, Runc, Kubelet Binary

	// ContainerdMain is the path of containerd's main package in the build information of the binary, such as
	// "github.com/containerd/containerd/v2/cmd/containerd"; empty where the build left it out.
	ContainerdMain string
	// ContainerdPackage is the version of the Debian package that containerd's binary belongs to; empty: none.
	ContainerdPackage string
	// KubeletVersion is kubelet's, such as "v1.37.2"; empty: unknown.
	KubeletVersion string
	// NVIDIARuntime is the path of nvidia-container-runtime in the machine; empty: it is not there.
	NVIDIARuntime string
	// NVIDIAToolkit is the path of nvidia-ctk in the machine; empty: it is not there.
	NVIDIAToolkit string
	// Wants are the links in /etc/systemd/system that pull in containerd.service or kubelet.service at boot, from other
	// targets than berth's; relative to Root, sorted.
	Wants []string
	// Registries are the folders in /etc/containerd/certs.d whose hosts.toml berth made, sorted.
	Registries []string
	// Identity is what kubelet has from an earlier start.
	Identity Identity
}

// Identity is what kubelet proves with who it is once it has joined its cluster, and with which it goes on at the next start. Keys are
// no part of it.
type Identity struct {
	// Kubeconfig says that there is a kubeconfig, kubelet's own or another. Server, CertificateAuthority (PEM) and User (the file of the
	// client certificate) are what it says; empty: it says nothing of the kind, or cannot be read.
	Kubeconfig                         bool
	Server, CertificateAuthority, User string
	// Certificate are the certificates, in PEM, of kubelet.ClientCertificate, the client's first; empty: there are none.
	Certificate string
	// Files are the paths of what kubelet keeps in kubelet.PKI, relative to Root, sorted.
	Files []string
}

// Binary is a program in the machine's root file system.
type Binary struct {
	// Problem says why it cannot be run, as what follows its name in a sentence ("does not exist"); empty: it is an
	// executable regular file.
	Problem string
}
