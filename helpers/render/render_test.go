package render

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"
	"sigs.k8s.io/yaml"

	"berth/generator/device"
	"berth/generator/goalstate"
	"berth/helpers/facts"
	"berth/helpers/nvidia"
)

// TestDevicesAllowed proves the rule that every device that is bound is allowed: a device without its DeviceAllow= gives
// EPERM inside the machine and not one log line.
func TestDevicesAllowed(t *testing.T) {
	for _, c := range []string{"minimal", "full", "hostile"} {
		files := renderCase(t, filepath.Join(cases, c))
		allowed := files["host/run/systemd/system/systemd-nspawn@node-a.service.d/60-berth-devices.conf"]
		bound := 0
		for line := range strings.Lines(files["host/run/systemd/nspawn/node-a.nspawn"]) {
			value, isBind := strings.CutPrefix(strings.TrimSpace(line), "Bind=/dev/")
			if !isBind {
				continue
			}
			bound++
			node := strings.NewReplacer(`\:`, ":", `\\`, `\`).Replace("/dev/" + value)
			// The escaping itself is unit's, and tested there.
			quoted := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%").Replace(node)
			line := strings.Contains(allowed, "DeviceAllow="+node+" rwm\n") || strings.Contains(allowed, `DeviceAllow="`+quoted+"\" rwm\n")
			if device.Covers(node) == line {
				t.Errorf("%s: %q is bound: covered by a class: %v, by a line: %[3]v; want exactly one", c, node, line)
			}
		}
		if bound == 0 {
			t.Errorf("%s binds no device", c)
		}
	}
}

// TestHostileValues reads back what was rendered, as the programs that it is for do.
func TestHostileValues(t *testing.T) {
	dir := filepath.Join(cases, "hostile")
	slot, files := load(t, dir).Slots["a"], renderCase(t, dir)

	var kubeconfig struct {
		Users []struct {
			User struct {
				Exec struct {
					Command string
					Args    []string
					Env     []struct{ Name, Value string }
				}
			}
		}
	}
	if err := yaml.Unmarshal([]byte(files["machine/var/lib/kubelet/kubeconfig"]), &kubeconfig); err != nil {
		t.Fatal(err)
	}
	exec := kubeconfig.Users[0].User.Exec
	if diff := cmp.Diff(slot.Kubelet.Exec.Args, exec.Args); diff != "" || exec.Command != slot.Kubelet.Exec.Command ||
		exec.Env[0].Value != slot.Kubelet.Exec.Env["A"] {
		t.Errorf("kubeconfig: %+v: args -want +got:\n%s", exec, diff)
	}

	var config map[string]any
	if err := toml.Unmarshal([]byte(files["machine/etc/containerd/config.toml"]), &config); err != nil {
		t.Fatal(err)
	}
	const plugin = `a.b "c" 'd'`
	if diff := cmp.Diff(at(slot.Containerd.Config, "plugins", plugin), at(config, "plugins", plugin)); diff != "" {
		t.Errorf("containerd: -want +got:\n%s", diff)
	}
}

// TestMirrorOrder reads the tables of a hosts.toml in the order of the file, by which containerd tries them.
func TestMirrorOrder(t *testing.T) {
	got := hosts(goalstate.Registry{Mirrors: []goalstate.Mirror{{URL: "http://c"}, {URL: "http://a"}, {URL: "http://b"}}})
	if want := "[host.'http://c']\n\n[host.'http://a']\n\n[host.'http://b']"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := toml.Unmarshal([]byte(got), &map[string]any{}); err != nil {
		t.Error(err)
	}
}

// TestInputsStay makes sure that rendering changes neither the goal state nor what it shares with an earlier result.
func TestInputsStay(t *testing.T) {
	full := func() *goalstate.Slot { return load(t, filepath.Join(cases, "full")).Slots["a"] }
	slot := full()
	_, _ = Containerd(slot, nil, facts.Host{GPU: true}, facts.Machine{})
	_, _ = Kubelet(slot, nil, facts.Host{}, facts.Machine{}, Secrets{})
	if diff := cmp.Diff(full(), slot); diff != "" {
		t.Error(diff)
	}
}

func TestConfigVersion(t *testing.T) {
	const v1, v2 = "github.com/containerd/containerd/cmd/containerd", "github.com/containerd/containerd/v2/cmd/containerd"
	for _, c := range []struct {
		version   int
		main, pkg string
		want      int
		why       string
	}{
		{2, v2, "", 2, "what the goal state says wins"},
		{0, v1, "", 2, "1.x"},
		{0, v2, "", 3, "2.x"},
		{0, v2, "1.7.24~ds1-6", 3, "the binary knows better than the package"},
		{0, "", "1.7.24~ds1-6", 2, "the package, where the binary does not say"},
		{0, "", "2.1.9+ds1-1", 3, "the same for 2.x"},
		{0, "", "3.0", 0, "a version that is not known"},
		{0, "example.com/wrapper", "", 0, "another program"},
	} {
		slot := &goalstate.Slot{Containerd: goalstate.Containerd{ConfigVersion: c.version}}
		r := &renderer{slot: slot}
		got, ok := r.configVersion(facts.Machine{ContainerdMain: c.main, ContainerdPackage: c.pkg})
		if got != c.want || ok != (c.want != 0) || ok != (len(r.errs) == 0) {
			t.Errorf("%s: got %d, %v, %v; want %d", c.why, got, ok, r.errs, c.want)
		}
	}
}

func TestNodeName(t *testing.T) {
	long := strings.Repeat("a", 63) + ".example.com"
	for _, c := range []struct {
		set, host, want string
		ok              bool
		why             string
	}{
		{"", "Host-1.Example.com\n", "host-1.example.com", true, "lower case, as kubelet does"},
		{"gpu-7", "host", "gpu-7", true, "the goal state wins"},
		{"", long, long, true, "longer than a host name may be"},
		{"", "my_host", "my_host", false, "an underscore"},
		{"", "", "", false, "no name at all"},
		{"", strings.Repeat("a", 254), strings.Repeat("a", 254), false, "too long"},
	} {
		r := &renderer{slot: &goalstate.Slot{Kubelet: goalstate.Kubelet{NodeName: c.set}}}
		if got := r.nodeName(facts.Host{Name: c.host}); got != c.want || (len(r.errs) == 0) != c.ok {
			t.Errorf("%s: got %q, %v", c.why, got, r.errs)
		}
	}
	out, err := NSpawn(&goalstate.Slot{Name: "a"}, nil, facts.Host{Name: long})
	if err != nil || !strings.Contains(string(out.Files[0].Content), "\nHostname="+strings.Repeat("a", 63)+"\n") {
		t.Errorf("a name that the kernel does not take is not cut: %v\n%s", err, out.Files[0].Content)
	}
}

func TestUnrunnable(t *testing.T) {
	slot := &goalstate.Slot{Containerd: goalstate.Containerd{Binary: `/opt/"containerd"`, ConfigVersion: 3}}
	want := `containerd.binary: /opt/"containerd": systemd runs no program with a quote, a backslash or one of *?[ in its path: rename it`
	if _, err := Containerd(slot, nil, facts.Host{}, facts.Machine{}); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestLoopbackOnly(t *testing.T) {
	for _, c := range []struct {
		servers []string
		want    bool
		why     string
	}{
		{nil, true, "the resolver falls back to 127.0.0.1"},
		{[]string{"127.0.0.53"}, true, "systemd-resolved"},
		{[]string{"::1", "127.0.0.1", "::ffff:127.0.0.1"}, true, "a local unbound"},
		{[]string{"127.0.0.1", "192.0.2.1"}, false, "one server is real"},
		{[]string{"fe80::1%eth0"}, false, "with a zone"},
		{[]string{"nonsense"}, true, "no address at all"},
	} {
		if got := loopbackOnly(c.servers); got != c.want {
			t.Errorf("%v: %v: %s", c.servers, got, c.why)
		}
	}
}

func TestCertificates(t *testing.T) {
	ca := certificate(t)
	for _, c := range []struct {
		text, want string
		why        string
	}{
		{ca, "", "comments before the certificate, as in our own file"},
		{ca + ca, "", "several"},
		{"", "has no certificate", "an empty file"},
		{"-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n", `has a block of type "PRIVATE KEY"`, "a key must not get into the machine"},
		{"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n", "x509: malformed certificate", "not a certificate"},
	} {
		got := ""
		if _, err := certificates(c.text); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", c.why, got, c.want)
		}
	}
}

func TestWatchdog(t *testing.T) {
	for _, c := range []struct {
		version string
		want    bool
		reason  string
	}{
		{"v1.37.2", true, "as Kubernetes writes it"},
		{"1.32.0-1.1", true, "the first that answers, as a package's version"},
		{"v1.31.14", false, "never answers, and would be killed"},
		{"", false, "unknown"},
		{"v2.40.0", false, "nobody knows"},
		{"v1.next.0", false, "no number"},
	} {
		if got := watchdog(c.version); (got != "") != c.want {
			t.Errorf("%s: %q: %q", c.reason, c.version, got)
		}
	}
}

// TestSecretsStaySecret looks for the token in all that is not a secret file.
func TestSecretsStaySecret(t *testing.T) {
	slot := &goalstate.Slot{Name: "a", Kubelet: goalstate.Kubelet{BootstrapTokenFile: "/token"}}
	h := facts.Host{Name: "h", CertificateAuthority: certificate(t)}
	out, err := Kubelet(slot, nil, h, facts.Machine{}, Secrets{BootstrapToken: "abcdef.0123456789abcdef"})
	if err != nil {
		t.Fatal(err)
	}
	holders := 0
	for _, f := range out.Files {
		if strings.Contains(string(f.Content), "0123456789abcdef") {
			holders++
			if !f.Secret || f.Mode != 0o600 {
				t.Errorf("%s has the token, with mode %v", f.Path, f.Mode)
			}
		}
	}
	if holders != 1 {
		t.Errorf("%d files have the token, want one", holders)
	}
	_, err = Kubelet(slot, nil, h, facts.Machine{}, Secrets{BootstrapToken: "abcdef.SECRET"})
	if err == nil || strings.Contains(err.Error(), "SECRET") {
		t.Errorf("a broken token: %v", err)
	}
}

// TestMoreSecrets: credentials that people put into a component's own tables.
func TestMoreSecrets(t *testing.T) {
	table := func(keys ...string) map[string]any {
		var value any = "SECRET"
		for _, key := range slices.Backward(keys) {
			value = map[string]any{key: value}
		}
		return value.(map[string]any)
	}
	h := facts.Host{Name: "h", CertificateAuthority: certificate(t)}
	for _, c := range []struct {
		version             int
		containerd, kubelet map[string]any
		why                 string
	}{
		{3, table("plugins", criV2Images, "registry", "auths", "https://r", "password"), nil, "2.x: by URL"},
		{2, table("plugins", criV1, "registry", "configs", "r", "auth", "password"), nil, "1.x: by host"},
		{2, table("plugins", criV1, "registry", "headers", "Authorization"), nil, "1.x: headers of all requests"},
		{3, nil, table("staticPodURLHeader", "Authorization"), "kubelet's static pods"},
	} {
		slot := &goalstate.Slot{
			Name: "a", Kubelet: goalstate.Kubelet{Exec: &goalstate.Exec{}, Config: c.kubelet},
			Containerd: goalstate.Containerd{ConfigVersion: c.version, Config: c.containerd},
		}
		one, err := Containerd(slot, nil, h, facts.Machine{})
		if err != nil {
			t.Fatal(err)
		}
		two, err := Kubelet(slot, nil, h, facts.Machine{}, Secrets{})
		if err != nil {
			t.Fatal(err)
		}
		holders := 0
		for _, f := range append(one.Files, two.Files...) {
			if strings.Contains(string(f.Content), "SECRET") {
				holders++
				if !f.Secret || f.Mode != 0o600 {
					t.Errorf("%s: %s has it, with mode %v", c.why, f.Path, f.Mode)
				}
			}
		}
		if holders != 1 {
			t.Errorf("%s: %d files have it, want one", c.why, holders)
		}
	}
}

// certificate is one that the golden cases use, with berth's comments before it.
func certificate(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(cases, "full/want/machine/etc/kubernetes/pki/apiserver-client-ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestKeepCDI refuses settings with which containerd would not find the GPUs.
func TestKeepCDI(t *testing.T) {
	slot := func(runtime map[string]any) *goalstate.Slot {
		return &goalstate.Slot{
			NVIDIA: goalstate.NVIDIA{Mode: goalstate.Auto, RuntimeClass: "nvidia"},
			Containerd: goalstate.Containerd{ConfigVersion: 3, Config: map[string]any{
				"plugins": map[string]any{criV2Runtime: runtime},
			}},
		}
	}
	const key = `containerd.config.plugins."io.containerd.cri.v1.runtime".`
	for _, c := range []struct {
		runtime map[string]any
		gpu     bool
		want    string // error
		why     string
	}{
		{map[string]any{"enable_cdi": false}, true, key + "enable_cdi: the slot's GPUs need CDI: leave it true, or set nvidia.mode to off", "no CDI"},
		{map[string]any{"enable_cdi": false}, false, "", "no CDI, and no GPU"},
		{map[string]any{"cdi_spec_dirs": "/run/cdi"}, true, key + "cdi_spec_dirs: want a list of folders", "no list"},
		{map[string]any{"cdi_spec_dirs": []any{}}, true, "", "a list without the folder gets it"},
	} {
		r := &renderer{slot: slot(c.runtime)}
		config := r.containerdConfig(3, facts.Host{GPU: c.gpu}, facts.Machine{})
		if got := fmt.Sprint(errors.Join(r.errs...)); got != c.want && (c.want != "" || r.errs != nil) {
			t.Errorf("%s: %s; want %q", c.why, got, c.want)
		}
		if c.want == "" && c.gpu {
			if diff := cmp.Diff([]any{nvidia.CDIDir}, at(config, "plugins", criV2Runtime)["cdi_spec_dirs"]); diff != "" {
				t.Errorf("%s: -want +got:\n%s", c.why, diff)
			}
		}
	}
}
