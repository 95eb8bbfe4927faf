package facts

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
)

// tree makes a root folder: a name that ends with "/" is a folder, a content that begins with "-> " a link.
func tree(t *testing.T, files map[string]string) *file.Root {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		p := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		switch {
		case name[len(name)-1] == '/':
			must(t, os.MkdirAll(p, 0o755))
		case len(content) > 3 && content[:3] == "-> ":
			must(t, os.Symlink(content[3:], p))
		default:
			must(t, os.WriteFile(p, []byte(content), 0o644))
		}
	}
	root, err := file.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return root
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestDiscoverHost(t *testing.T) {
	slot := &goalstate.Slot{
		Cluster: goalstate.Cluster{CertificateAuthority: "/etc/ca.crt"},
		Machine: goalstate.Machine{Mounts: []goalstate.Mount{{Source: "/srv/z"}, {Source: "/srv/data"}, {Source: "/srv/a"}, {Source: "/srv/z"}}},
	}
	root := tree(t, map[string]string{
		"etc/hostname":                    "# set by hand\n\nhost-1\n",
		"etc/ca.crt":                      "PEM",
		"etc/resolv.conf":                 "-> ../run/systemd/resolve/stub-resolv.conf",
		"run/systemd/resolve/resolv.conf": "nameserver 192.0.2.1\n",
		"run/systemd/resolve/stub-resolv.conf": "# nameserver 192.0.2.9\nnameserver 127.0.0.53 \noptions edns0\n" +
			"nameserver\t::1\nnameserver\n",
		"proc/filesystems": "nodev\tsysfs\nnodev\tbpf\n\text4\n",
		"usr/lib/modules/": "",
		"lib":              "-> /usr/lib",
		"srv/data/":        "",
	})
	want := Host{
		Name: "host-1", Modules: true, BPF: true, Uplink: true, CertificateAuthority: "PEM",
		MissingMounts: []string{"/srv/a", "/srv/z"},
		Nameservers:   []string{"127.0.0.53", "::1"},
	}
	if diff := cmp.Diff(want, DiscoverHost(root, slot)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDiscoverBareHost(t *testing.T) {
	root := tree(t, map[string]string{
		"proc/sys/kernel/hostname": "from-the-kernel\n",
		"proc/filesystems":         "nodev\tbpf_other\n",
		"lib/modules":              "a file",
	})
	got := DiscoverHost(root, &goalstate.Slot{Cluster: goalstate.Cluster{CertificateAuthority: "/etc/ca.crt"}})
	if got.CertificateAuthorityProblem == "" {
		t.Error("a missing certificate authority is no problem")
	}
	got.CertificateAuthorityProblem = ""
	if diff := cmp.Diff(Host{Name: "from-the-kernel"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDiscoverDevices(t *testing.T) {
	root := tree(t, map[string]string{
		"dev/infiniband/by-path/": "", // a folder that the glob matches
		"dev/vfio/":               "",
		"dev/kvm":                 "a file, no device",
		"dev/by-id":               "-> ../dev/vfio/12",
		"dev/dangling":            "-> /dev/none",
	})
	for _, name := range []string{"dev/kmsg", "dev/infiniband/uverbs0", "dev/vfio/12", "dev/vfio/vfio", "dev/a*b", "dev/aab"} {
		// 1:3 is /dev/null: nothing here opens it.
		err := unix.Mknod(filepath.Join(root.Name(), name), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
		if err == unix.EPERM {
			t.Skip("making device nodes needs CAP_MKNOD")
		}
		must(t, err)
	}
	slot := &goalstate.Slot{Machine: goalstate.Machine{
		Devices: []string{"/dev/vfio/[0-9]*", "/dev/vfio/*", "/dev/by-id", "/dev/dangling", "/dev/none/*", `/dev/a\*b`},
	}}
	want := []string{`/dev/a*b`, "/dev/by-id", "/dev/infiniband/uverbs0", "/dev/kmsg", "/dev/vfio/12", "/dev/vfio/vfio"}
	if diff := cmp.Diff(want, DiscoverHost(root, slot).Devices); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	slot.Machine.InfiniBand = goalstate.Off
	for _, d := range DiscoverHost(root, slot).Devices {
		if d == "/dev/infiniband/uverbs0" {
			t.Error("looked for what is off")
		}
	}
}

func TestGroups(t *testing.T) {
	must := func(m goalstate.Machine) (keys []string) {
		for _, g := range Groups(&goalstate.Slot{Machine: m}) {
			if g.Must != "" {
				keys = append(keys, g.Key+" "+g.Must)
			}
		}
		return keys
	}
	for _, c := range []struct {
		machine goalstate.Machine
		want    []string
		why     string
	}{
		{goalstate.Machine{KVM: goalstate.Auto, InfiniBand: goalstate.Auto}, nil, "auto asks for nothing"},
		{goalstate.Machine{KVM: goalstate.Required, InfiniBand: goalstate.Off}, []string{"machine.kvm /dev/kvm"}, "vhost is extra"},
		{goalstate.Machine{InfiniBand: goalstate.Required}, []string{"machine.infiniband /dev/infiniband/*"}, "any of them"},
		{goalstate.Machine{Devices: []string{"/dev/sda", "/dev/sd?"}}, []string{"machine.devices /dev/sda"}, "a path, not a glob"},
	} {
		if diff := cmp.Diff(c.want, must(c.machine)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", c.why, diff)
		}
	}
}

func TestDiscoverMachine(t *testing.T) {
	root := tree(t, map[string]string{
		"usr/bin/runc":       "text",
		"usr/bin/kubelet/":   "",
		"opt/outside":        "-> ../../../../../../../../../../etc/passwd",
		"etc/systemd/system": "-> /usr/units",
		"usr/units/multi-user.target.wants/containerd.service": "-> /usr/lib/systemd/system/containerd.service",
		"usr/units/multi-user.target.wants/ssh.service":        "-> /usr/lib/systemd/system/ssh.service",
		"usr/units/x.service.requires/kubelet.service":         "-> /usr/lib/systemd/system/kubelet.service",
		"usr/units/node-stack.target.wants/kubelet.service":    "-> /etc/systemd/system/kubelet.service",
		"usr/units/kubelet.service.d/containerd.service":       "no wants folder",
		"etc/containerd/certs.d/docker.io/hosts.toml":          Mark + "'s render-config\n",
		"etc/containerd/certs.d/mine.example.com/hosts.toml":   "# my own\n",
		"etc/containerd/certs.d/empty/":                        "",
	})
	// A Go program of which we know the main package: this test.
	self, err := os.Open("/proc/self/exe")
	must(t, err)
	defer self.Close()
	copied, err := os.OpenFile(filepath.Join(root.Name(), "usr/bin/containerd"), os.O_CREATE|os.O_WRONLY, 0o755)
	must(t, err)
	_, err = io.Copy(copied, self)
	must(t, err)
	must(t, copied.Close())

	slot := &goalstate.Slot{
		Kubelet:    goalstate.Kubelet{Binary: "/usr/bin/kubelet"},
		Containerd: goalstate.Containerd{Binary: "/usr/bin/containerd", Runc: "/usr/bin/runc"},
	}
	want := Machine{
		Root: root.Name(), Runc: Binary{"is not executable"}, Kubelet: Binary{"is not a regular file"},
		ContainerdMain: "berth/helpers/facts.test",
		Wants: []string{
			"etc/systemd/system/multi-user.target.wants/containerd.service",
			"etc/systemd/system/x.service.requires/kubelet.service",
		},
		Registries: []string{"docker.io"},
	}
	if diff := cmp.Diff(want, DiscoverMachine(root, slot)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	// A link that leaves the root leads nowhere, whatever the host has there.
	slot.Kubelet.Binary = "/opt/outside"
	if got := DiscoverMachine(root, slot).Kubelet.Problem; got != "does not exist" {
		t.Errorf("a link to the host's /etc/passwd: %q", got)
	}
}

// TestDiscoverIdentity reads what kubelet 1.37 leaves behind.
func TestDiscoverIdentity(t *testing.T) {
	const certificate = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
	const key = "-----BEGIN EC PRIVATE KEY-----\nAA==\n-----END EC PRIVATE KEY-----\n"
	const kubeconfig = `apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: Q0EK
    server: https://10.0.0.1:6443
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
`
	pki := map[string]string{
		"var/lib/kubelet/pki/kubelet-client-2026-11-30-19-00-00.pem": certificate + certificate + key,
		"var/lib/kubelet/pki/kubelet-client-current.pem":             "-> /var/lib/kubelet/pki/kubelet-client-2026-11-30-19-00-00.pem",
		"var/lib/kubelet/pki/kubelet.crt":                            certificate,
		"var/lib/kubelet/pki/mine.pem":                               key,
	}
	files := []string{"var/lib/kubelet/pki/kubelet-client-2026-11-30-19-00-00.pem", "var/lib/kubelet/pki/kubelet-client-current.pem",
		"var/lib/kubelet/pki/kubelet.crt"}
	for _, c := range []struct {
		reason, kubeconfig string
		want               Identity
	}{
		{"joined", kubeconfig, Identity{Kubeconfig: true, Server: "https://10.0.0.1:6443", CertificateAuthority: "CA\n",
			User: "/var/lib/kubelet/pki/kubelet-client-current.pem", Certificate: certificate + certificate, Files: files}},
		{"not YAML", "\t", Identity{Kubeconfig: true, Certificate: certificate + certificate, Files: files}},
		{"several clusters, of which one is chosen by a context", "clusters: [{}, {}]\nusers: [{}]", Identity{Kubeconfig: true,
			Certificate: certificate + certificate, Files: files}},
		{"no kubeconfig", "", Identity{Certificate: certificate + certificate, Files: files}},
	} {
		tr := maps.Clone(pki)
		if c.kubeconfig != "" {
			tr["var/lib/kubelet/kubeconfig"] = c.kubeconfig
		}
		if diff := cmp.Diff(c.want, identity(tree(t, tr))); diff != "" {
			t.Errorf("%s: -want +got:\n%s", c.reason, diff)
		}
	}
	if diff := cmp.Diff(Identity{}, identity(tree(t, nil))); diff != "" {
		t.Errorf("the first start: -want +got:\n%s", diff)
	}
}

func TestContainerdPackage(t *testing.T) {
	const status = `Package: containerd-doc
Status: install ok installed
Version: 9

Package: containerd
Status: deinstall ok config-files
Version: 1.6.20

Package: containerd.io
Status: install ok installed
Description: Version: 8
 Version: 7
Version: 1:2.1.4-1
`
	for _, c := range []struct{ list, binary, want, why string }{
		{"containerd.io.list", "/usr/bin/containerd", "2.1.4-1", "the package that owns the file, without the epoch"},
		{"containerd.io.list", "/usr/local/bin/containerd", "", "a program that no package owns"},
		{"containerd.list", "/usr/bin/containerd", "", "a package that is removed but for its configuration"},
	} {
		root := tree(t, map[string]string{
			"var/lib/dpkg/status":         status,
			"var/lib/dpkg/info/" + c.list: "/.\n/usr\n/usr/bin/containerd\n/usr/bin/containerd-shim\n",
		})
		if got := packageVersion(root, c.binary, containerdPackages...); got != c.want {
			t.Errorf("%s: got %q, want %q", c.why, got, c.want)
		}
	}
}

func TestToken(t *testing.T) {
	host := tree(t, map[string]string{"etc/token": "from-file\n"})
	credentials := tree(t, map[string]string{"token": "from-credential"})
	for _, c := range []struct {
		kubelet     goalstate.Kubelet
		credentials *file.Root
		want, err   string
	}{
		{goalstate.Kubelet{BootstrapToken: "literal"}, nil, "literal", ""},
		{goalstate.Kubelet{BootstrapTokenFile: "/etc/token"}, nil, "from-file\n", ""},
		{goalstate.Kubelet{BootstrapTokenCredential: "token"}, credentials, "from-credential", ""},
		{goalstate.Kubelet{BootstrapTokenEncryptedCredential: "token"}, credentials, "from-credential", ""},
		{goalstate.Kubelet{BootstrapTokenCredential: "token"}, nil, "",
			"kubelet.bootstrap_token_credential: systemd passed no credentials: run: systemctl daemon-reload"},
		{goalstate.Kubelet{Exec: &goalstate.Exec{}}, nil, "", ""},
	} {
		got, err := Token(host, c.credentials, c.kubelet)
		message := ""
		if err != nil {
			message = err.Error()
		}
		if got != c.want || message != c.err {
			t.Errorf("%+v: got %q, %q", c.kubelet, got, message)
		}
	}
	if _, err := Token(host, nil, goalstate.Kubelet{BootstrapTokenFile: "/none"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// TestDiscoverGPUs looks at nodes that belong to the slot only for a reason: those of graphics cards, if one of a GPU is there.
func TestDiscoverGPUs(t *testing.T) {
	const control, gpu0, uvm = "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"
	const amd, card, render = "/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128"
	sys := map[string]string{"sys/module/amdgpu/version": "6.7.0\n", "sys/class/drm/": ""}
	for _, c := range []struct {
		nodes   []string
		mode    goalstate.Mode
		devices []string
		sys     []string
		gpu     bool
		why     string
	}{
		{[]string{card, render}, goalstate.Auto, nil, nil, false, "a card that is neither NVIDIA's nor AMD's for computing"},
		{[]string{control, gpu0, uvm, card, render}, goalstate.Auto, []string{card, render, uvm, gpu0, control}, nil, true, "NVIDIA"},
		{[]string{control, gpu0, card, render}, goalstate.Off, nil, nil, false, "NVIDIA that is not wanted"},
		{nil, goalstate.Required, nil, nil, true, "NVIDIA that is wanted and not there yet"},
		{[]string{amd, card, render}, goalstate.Off, []string{card, render, amd}, []string{"/sys/class/drm", "/sys/module/amdgpu"}, false, "AMD, whatever NVIDIA's mode is"},
	} {
		root := tree(t, sys)
		for _, node := range c.nodes {
			name := filepath.Join(root.Name(), node)
			must(t, os.MkdirAll(filepath.Dir(name), 0o755))
			if err := unix.Mknod(name, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err == unix.EPERM {
				t.Skip("making device nodes needs CAP_MKNOD")
			} else {
				must(t, err)
			}
		}
		got := DiscoverHost(root, &goalstate.Slot{NVIDIA: goalstate.NVIDIA{Mode: c.mode}})
		if diff := cmp.Diff(Host{Devices: c.devices, SysPaths: c.sys, GPU: c.gpu}, got); diff != "" {
			t.Errorf("%s: -want +got:\n%s", c.why, diff)
		}
	}
}
