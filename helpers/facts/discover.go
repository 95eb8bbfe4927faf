package facts

import (
	"debug/buildinfo"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/kubelet"
	"berth/helpers/nvidia"
)

// Mark is what files begin with that render made.
const Mark = "# Made by berth"

// Limits of what is read into memory. Both roots can hold anything; what is larger counts as unreadable.
const (
	textLimit   = 1 << 20
	statusLimit = 64 << 20 // dpkg's database, a few megabytes on a large system
	// programLimit is how far into a program its build information is looked for: a sparse file may say that it is larger than what can
	// be read in any time. Kubelet has about 100 MB with its symbols.
	programLimit = 256 << 20
)

// DiscoverHost finds what the slot needs to know about the host whose root folder is root, but for the NVIDIA driver. It is not
// an error that something is missing: the facts say so, and whether it matters is decided where the slot is rendered.
func DiscoverHost(root *file.Root, slot *goalstate.Slot) Host {
	h := Host{
		Name:    hostName(root),
		Modules: root.IsDir("/lib/modules"),
		BPF:     slices.Contains(strings.Fields(root.Text("/proc/filesystems", textLimit)), "bpf"),
		Uplink:  root.Exists("/run/systemd/resolve/resolv.conf"),
	}
	for line := range strings.Lines(root.Text("/etc/resolv.conf", textLimit)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" {
			h.Nameservers = append(h.Nameservers, f[1])
		}
	}
	for _, g := range Groups(slot) {
		if g.If != "" && len(nodes(root, g.If)) == 0 {
			continue
		}
		if g.If == kfd {
			h.SysPaths = slices.DeleteFunc(slices.Clone(amdSysPaths), func(p string) bool { return !root.Exists(p) })
		}
		for _, pattern := range g.Patterns {
			h.Devices = append(h.Devices, nodes(root, pattern)...)
		}
	}
	for _, m := range slot.Machine.Mounts {
		if !root.Exists(m.Source) {
			h.MissingMounts = append(h.MissingMounts, m.Source)
		}
	}
	h.GPU = slot.NVIDIA.Mode == goalstate.Required || slot.NVIDIA.Mode == goalstate.Auto && nvidia.Expected(root)
	h.Devices, h.MissingMounts = set(h.Devices), set(h.MissingMounts)
	if ca := slot.Cluster.CertificateAuthority; ca != "" {
		b, err := root.Read(ca, textLimit)
		h.CertificateAuthority = string(b)
		if err != nil {
			h.CertificateAuthorityProblem = err.Error()
		}
	}
	return h
}

// amdSysPaths are what ROCm reads beyond /dev/kfd: the module's version, and the topology.
var amdSysPaths = []string{"/sys/class/drm", "/sys/class/kfd", "/sys/module/amdgpu"}

// DiscoverMachine finds what the slot needs to know about its machine's root file system. It reads, and runs nothing.
func DiscoverMachine(root *file.Root, slot *goalstate.Slot) Machine {
	m := Machine{
		Root:       root.Name(),
		Containerd: binary(root, slot.Containerd.Binary),
		Runc:       binary(root, slot.Containerd.Runc),
		Kubelet:    binary(root, slot.Kubelet.Binary),
	}
	find := func(program string) string {
		for _, dir := range nvidiaFolders {
			if name := path.Join(dir, program); root.IsProgram(name) {
				return name
			}
		}
		return ""
	}
	m.NVIDIARuntime, m.NVIDIAToolkit = find("nvidia-container-runtime"), find("nvidia-ctk")
	if m.Containerd.Problem == "" {
		m.ContainerdMain = mainPackage(root, slot.Containerd.Binary)
		m.ContainerdPackage = packageVersion(root, slot.Containerd.Binary, containerdPackages...)
	}
	if m.Kubelet.Problem == "" {
		m.KubeletVersion = version(root, slot.Kubelet.Binary, kubeletPackages...)
	}
	for _, dir := range entries(root, "etc/systemd/system") {
		if ext := path.Ext(dir); ext != ".wants" && ext != ".requires" || path.Base(dir) == "node-stack.target.wants" {
			continue
		}
		for _, link := range entries(root, dir) {
			if base := path.Base(link); base == "containerd.service" || base == "kubelet.service" {
				m.Wants = append(m.Wants, link)
			}
		}
	}
	for _, dir := range entries(root, "etc/containerd/certs.d") {
		if strings.HasPrefix(root.Text(path.Join(dir, "hosts.toml"), textLimit), Mark) {
			m.Registries = append(m.Registries, path.Base(dir))
		}
	}
	m.Identity = identity(root)
	return m
}

// identity finds what an earlier kubelet left. What is not as kubelet writes it is left out.
func identity(root *file.Root) (id Identity) {
	for _, name := range entries(root, kubelet.PKI) {
		if strings.HasPrefix(path.Base(name), "kubelet") {
			id.Files = append(id.Files, name)
		}
	}
	for rest := []byte(root.Text(path.Join(kubelet.PKI, kubelet.ClientCertificate), textLimit)); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == "CERTIFICATE" {
			id.Certificate += string(pem.EncodeToMemory(block))
		}
	}
	_, err := root.Lstat(kubelet.Kubeconfig)
	id.Kubeconfig = err == nil
	// https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/
	var config struct {
		Clusters []struct {
			Cluster struct {
				Server               string `json:"server"`
				CertificateAuthority []byte `json:"certificate-authority-data"` // base64, as []byte in JSON
			} `json:"cluster"`
		} `json:"clusters"`
		Users []struct {
			User struct {
				ClientCertificate string `json:"client-certificate"`
			} `json:"user"`
		} `json:"users"`
	}
	if yaml.Unmarshal([]byte(root.Text(kubelet.Kubeconfig, textLimit)), &config) == nil && len(config.Clusters) == 1 && len(config.Users) == 1 {
		cluster := config.Clusters[0].Cluster
		id.Server, id.CertificateAuthority = cluster.Server, string(cluster.CertificateAuthority)
		id.User = config.Users[0].User.ClientCertificate
	}
	return id
}

// nvidiaFolders are where packages, and the toolkit's own installer, put the programs of the NVIDIA Container Toolkit.
var nvidiaFolders = []string{"/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit"}

// Token returns the bootstrap token that the slot's kubelet is to use, from where the goal state says. credentials is
// $CREDENTIALS_DIRECTORY (systemd.exec(5)), nil where there is none. A slot with kubelet.exec has no token.
func Token(host, credentials *file.Root, k goalstate.Kubelet) (string, error) {
	name, key := k.Credential()
	switch {
	case k.BootstrapTokenFile != "":
		b, err := host.Read(k.BootstrapTokenFile, textLimit)
		return string(b), wrap("kubelet.bootstrap_token_file", err)
	case name != "" && credentials == nil:
		return "", errors.New(key + ": systemd passed no credentials: run: systemctl daemon-reload")
	case name != "":
		b, err := credentials.Read(name, textLimit)
		return string(b), wrap(key, err)
	}
	return k.BootstrapToken, nil
}

// hostName is the configured name, else what the kernel has. In hostname(5) lines that begin with "#" are comments.
func hostName(root *file.Root) string {
	for _, name := range []string{"/etc/hostname", "/proc/sys/kernel/hostname"} {
		for line := range strings.Lines(root.Text(name, textLimit)) {
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				return line
			}
		}
	}
	return ""
}

// nodes returns the device nodes, and links to one, that match the pattern.
func nodes(root *file.Root, pattern string) []string {
	paths := []string{"/"}
	for component := range strings.SplitSeq(strings.Trim(pattern, "/"), "/") {
		var next []string
		for _, p := range paths {
			literal := path.Join(p, component)
			if !strings.ContainsAny(component, `*?[\`) {
				next = append(next, literal) // whether it exists turns out at the end
				continue
			}
			if root.Exists(literal) {
				next = append(next, literal)
			}
			for _, name := range entries(root, p) {
				if ok, _ := path.Match(component, path.Base(name)); ok {
					next = append(next, name)
				}
			}
		}
		paths = next
	}
	return slices.DeleteFunc(paths, func(p string) bool {
		info, err := root.Stat(p)
		return err != nil || info.Mode()&fs.ModeDevice == 0
	})
}

// binary looks at a program in the machine.
func binary(root *file.Root, name string) Binary {
	info, err := root.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Binary{"does not exist"}
	case err != nil:
		return Binary{"cannot be looked at (" + err.Error() + ")"}
	case !info.Mode().IsRegular():
		return Binary{"is not a regular file"}
	case info.Mode()&0o111 == 0:
		return Binary{"is not executable"}
	}
	return Binary{}
}

func mainPackage(root *file.Root, name string) string {
	if info := buildInfo(root, name); info != nil {
		return info.Path
	}
	return ""
}

// buildInfo returns what the go command recorded in a program; nil: nothing, or it cannot be read.
func buildInfo(root *file.Root, name string) *buildinfo.BuildInfo {
	f, err := root.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	return readBuildInfo(f)
}

func readBuildInfo(program io.ReaderAt) *buildinfo.BuildInfo {
	info, err := buildinfo.Read(io.NewSectionReader(program, 0, programLimit))
	if err != nil {
		return nil
	}
	return info
}

// packageVersion asks dpkg's database which of the packages owns name, and for its version.
func packageVersion(root *file.Root, name string, packages ...string) string {
	for _, pkg := range packages {
		owned := strings.Split(root.Text("/var/lib/dpkg/info/"+pkg+".list", textLimit), "\n")
		if !slices.Contains(owned, name) {
			continue
		}
		status, err := root.Read("/var/lib/dpkg/status", statusLimit)
		if err != nil {
			continue
		}
		for paragraph := range strings.SplitSeq(string(status), "\n\n") {
			if field(paragraph, "Package") == pkg && strings.HasSuffix(field(paragraph, "Status"), " installed") {
				version := field(paragraph, "Version")
				if _, noEpoch, found := strings.Cut(version, ":"); found {
					version = noEpoch
				}
				return version
			}
		}
	}
	return ""
}

// field returns a field of a paragraph of deb-control(5).
func field(paragraph, name string) string {
	for line := range strings.Lines(paragraph) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// entries returns the paths of what is in a folder, sorted; nothing if it cannot be read.
func entries(root *file.Root, dir string) []string {
	list, _ := root.ReadDir(dir)
	paths := make([]string, len(list))
	for i, e := range list {
		paths[i] = path.Join(dir, e.Name())
	}
	return paths
}

func set(paths []string) []string {
	slices.Sort(paths)
	return slices.Compact(paths)
}

func wrap(key string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}
