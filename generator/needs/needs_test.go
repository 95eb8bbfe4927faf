package needs

import (
	"io/fs"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
	"berth/helpers/render/parts"
)

const (
	machineDropIn = "systemd-nspawn@node-a.service.d/50-berth.conf"
	units         = "etc/systemd/system/"
)

func regular(text string) *file.File { return &file.File{Mode: 0o644, Content: []byte(text)} }
func link(target string) *file.File {
	return &file.File{Mode: fs.ModeSymlink | 0o777, Content: []byte(target)}
}

func TestOf(t *testing.T) {
	x, y := regular("x"), regular("y")
	for _, c := range []struct {
		part, path string
		old, new   *file.File
		want       string
		why        string
	}{
		{parts.Generator, "node-kubelet@a.service.d/50-berth.conf", x, y, "daemon-reload", "a budget"},
		{parts.Generator, "multi-user.target.wants/node@a.service", nil, link("x"), "daemon-reload", "the boot slot"},
		{parts.Generator, "node@a.service", x, nil, "daemon-reload", "a slot that was taken out"},
		{parts.Generator, machineDropIn, nil, x, "daemon-reload and restart of the machine", "a machine that runs without it"},
		{parts.Generator, machineDropIn, regular("[Service]\nTimeoutStartSec=1s\n# a\n"), regular("[Service]\n TimeoutStartSec = 2s\n\n# b\n"),
			"daemon-reload", "a budget of the machine, and a comment"},
		{parts.Generator, machineDropIn, regular("[Service]\nTimeoutStartSec=1s\n"), regular("[Service]\nTimeoutStartSec=1s\nDeviceAllow=char-drm\n"),
			"daemon-reload and restart of the machine", "another device"},
		{parts.Generator, machineDropIn, regular("[Service]\nEnvironment=A=1\n"), regular("[Service]\nEnvironment=A=2\n"),
			"daemon-reload and restart of the machine", "what systemd-nspawn reads"},
		{parts.Generator, "node@a.service", regular("# from a\n# b\nx"), regular("# from a, b\nx"), "nothing", "the sources in the first comment"},
		{parts.Generator, "node@a.service", regular("x\n# a"), regular("x\n# b"), "daemon-reload", "a \"#\" further down may be no comment"},

		{parts.NSpawn, "run/systemd/nspawn/node-a.nspawn", x, y, "restart of the machine", "a mount"},
		{parts.NSpawn, "run/systemd/system/systemd-nspawn@node-a.service.d/60-berth-devices.conf", x, nil,
			"daemon-reload and restart of the machine", "a device less"},

		{parts.Containerd, "etc/containerd/config.toml", x, y, "restart of containerd", "containerd's configuration"},
		{parts.Containerd, "etc/containerd/certs.d/docker.io/hosts.toml", x, y, "no restart", "a mirror"},
		{parts.Containerd, "etc/containerd/certs.d/docker.io/hosts.toml", x, nil, "no restart", "a registry less"},
		{parts.Containerd, "etc/containerd/certs.d/docker.io/hosts.toml", nil, x, "no restart", "a registry more"},
		{parts.Containerd, units + "containerd.service", x, link("x"), "restart of containerd", "a link in its place, with the same bytes"},
		{parts.Containerd, units + "multi-user.target.wants/containerd.service", link("x"), nil, "nothing", "it has been started at boot already"},
		{parts.Containerd, units + "node-stack.target", x, y, "nothing", "nothing pulls it in"},
		{parts.Containerd, "etc/tmpfiles.d/berth.conf", x, y, "restart of the machine", "read at its boot"},

		{parts.Kubelet, "var/lib/kubelet/config.yaml", x, y, "restart of kubelet", "a field of its configuration"},
		{parts.Kubelet, "var/lib/kubelet/config.yaml", regular("# a\nx"), regular("# b\nx"), "nothing", "the sources in the first comment"},
		{parts.Kubelet, "var/lib/kubelet/config.yaml", x, &file.File{Mode: 0o600, Content: []byte("x")}, "nothing", "the mode alone"},
		{parts.Kubelet, units + "kubelet.service", x, y, "restart of kubelet", "a label"},
		{parts.Kubelet, units + "node-stack.target.wants/kubelet.service", nil, link("x"), "nothing", "the host starts it by its name"},
		{parts.Kubelet, "etc/kubernetes/manifests", nil, &file.File{Mode: fs.ModeDir}, "restart of kubelet", "a folder that it watches"},

		{"new part", "x", x, y, "daemon-reload and restart of the machine", "not known: the safe side"},
	} {
		need := Of(c.part, c.path, c.old, c.new, true)
		if got := need.String(); got != c.want || need.Because == "" {
			t.Errorf("%s: %s needs %s (%s), want %s: %s", c.part, c.path, got, need.Because, c.want, c.why)
		}
		// At rest only systemd has to be told, of nothing but units.
		want := "nothing"
		if c.part == parts.Generator && c.want != "nothing" {
			want = "daemon-reload"
		}
		if got := Of(c.part, c.path, c.old, c.new, false).String(); got != want {
			t.Errorf("%s: %s needs %s while the slot does not run, want %s", c.part, c.path, got, want)
		}
	}
}

func TestSum(t *testing.T) {
	for _, c := range []struct {
		needs         []Need
		text, command string
		words         []string
	}{
		{nil, "nothing", "", []string{}},
		{[]Need{{Because: "x"}}, "nothing", "", []string{}},
		{[]Need{{Live: true}, {}}, "no restart", "/usr/lib/berth/render-config containerd a", []string{}},
		{[]Need{{Restart: Containerd}, {Live: true}, {Restart: Kubelet}}, "restart of containerd", "systemctl restart node@a", []string{"containerd"}},
		{[]Need{{Restart: Kubelet}}, "restart of kubelet", "systemctl restart node@a", []string{"kubelet"}},
		{[]Need{{Reload: true}, {Live: true}}, "daemon-reload", "systemctl daemon-reload; /usr/lib/berth/render-config containerd a", []string{"daemon-reload"}},
		{[]Need{{Restart: Machine}, {Reload: true}, {Restart: Kubelet}}, "daemon-reload and restart of the machine",
			"systemctl daemon-reload; systemctl restart node@a", []string{"daemon-reload", "machine"}},
	} {
		sum := Sum(c.needs)
		if sum.String() != c.text || sum.Command("a") != c.command {
			t.Errorf("%v: %s: %s; want %s: %s", c.needs, sum, sum.Command("a"), c.text, c.command)
		}
		if diff := cmp.Diff(c.words, sum.Words()); diff != "" {
			t.Errorf("%v: -want +got:\n%s", c.needs, diff)
		}
	}
}
