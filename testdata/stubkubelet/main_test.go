package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://10.0.0.1:6443", certificate-authority-data: Y2E=}}]
users: [{name: u, user: {token: abcdef.0123456789abcdef}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

// node is a folder with all that a stub needs to become ready, and the socket to which it says so.
type node struct {
	dir    string
	port   int
	notify *net.UnixConn
	args   []string
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{dir: t.TempDir()}
	runtime, err := net.Listen("unix", n.path("containerd.sock"))
	must(t, err)
	t.Cleanup(func() { runtime.Close() })
	n.notify, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: n.path("notify"), Net: "unixgram"})
	must(t, err)
	t.Cleanup(func() { n.notify.Close() })
	t.Setenv("NOTIFY_SOCKET", n.path("notify"))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	n.port = free.Addr().(*net.TCPAddr).Port
	must(t, free.Close())

	for _, d := range []string{"etc/stubkubelet", "run", "manifests"} {
		must(t, os.MkdirAll(n.path(d), 0o755))
	}
	for _, s := range sysctls {
		n.write(t, "proc/sys/"+s.name, strconv.Itoa(s.want)+"\n")
	}
	n.write(t, "ca.crt", "ca")
	n.write(t, "resolv.conf", "")
	n.write(t, "bootstrap-kubeconfig", kubeconfig)
	n.write(t, "config.yaml", fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {x509: {clientCAFile: %[1]s/ca.crt}}
staticPodPath: %[1]s/manifests
resolvConf: %[1]s/resolv.conf
containerRuntimeEndpoint: unix://%[1]s/containerd.sock
healthzPort: %[2]d
protectKernelDefaults: true
maxPods: 200
`, n.dir, n.port))
	n.args = []string{"--config", n.path("config.yaml"), "--kubeconfig=" + n.path("kubeconfig"),
		"--bootstrap-kubeconfig", n.path("bootstrap-kubeconfig"), "--hostname-override=node-1",
		"--node-ip=10.0.0.2", "--node-labels=example.com/pool=gpu,node.kubernetes.io/x=y"}
	return n
}

func (n *node) path(p string) string { return filepath.Join(n.dir, p) }

func (n *node) write(t *testing.T, p, content string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(n.path(p)), 0o755))
	must(t, os.WriteFile(n.path(p), []byte(content), 0o644))
}

// edit replaces old, which must be there, by new in one of the files.
func (n *node) edit(t *testing.T, p, old, new string) {
	t.Helper()
	b, err := os.ReadFile(n.path(p))
	must(t, err)
	if !strings.Contains(string(b), old) {
		t.Fatalf("no %q in %s", old, p)
	}
	n.write(t, p, strings.ReplaceAll(string(b), old, new))
}

// start runs the stub until the test ends. What run returns comes out of the channel.
func (n *node) start(t *testing.T) (stop context.CancelFunc, ended <-chan error) {
	ctx, stop := context.WithCancel(t.Context())
	c := make(chan error, 1)
	go func() { c <- run(ctx, n.dir, n.args) }()
	return stop, c
}

// message returns the next one that the stub sent to systemd, "" for none.
func (n *node) message(t *testing.T, wait time.Duration) string {
	t.Helper()
	b := make([]byte, 100)
	must(t, n.notify.SetReadDeadline(time.Now().Add(wait)))
	l, err := n.notify.Read(b)
	if err != nil {
		return ""
	}
	return string(b[:l])
}

// get asks for /healthz until it is answered: the stub listens at about the time of READY=1, as kubelet does.
func (n *node) get(t *testing.T) (status int, body string) {
	t.Helper()
	url := fmt.Sprintf("http://127.0.0.1:%d/healthz", n.port)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		r, err := http.Get(url)
		if err != nil && time.Now().Before(deadline) {
			continue
		}
		must(t, err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		must(t, err)
		return r.StatusCode, string(b)
	}
}

func TestReady(t *testing.T) {
	n := newNode(t)
	t.Setenv("WATCHDOG_USEC", "20000")
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	stop, ended := n.start(t)
	for _, want := range []string{"READY=1", "WATCHDOG=1", "WATCHDOG=1"} {
		if got := n.message(t, 10*time.Second); got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	if status, body := n.get(t); status != 200 || body != "ok" {
		t.Errorf("healthz: %d %q", status, body)
	}
	n.write(t, "etc/stubkubelet/healthz-status", "500\n")
	n.write(t, "etc/stubkubelet/healthz-delay", "30ms\n")
	begin := time.Now()
	if status, _ := n.get(t); status != 500 || time.Since(begin) < 30*time.Millisecond {
		t.Errorf("healthz: %d after %v", status, time.Since(begin))
	}
	var got seen
	b, err := os.ReadFile(n.path("run/stubkubelet.json"))
	must(t, err)
	must(t, json.Unmarshal(b, &got))
	if got.Config.MaxPods != 200 || got.Flags.HostnameOverride != "node-1" || got.Credential.AuthInfos[0].AuthInfo.Token != "abcdef.0123456789abcdef" {
		t.Errorf("wrote %s", b)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
}

func TestMisbehave(t *testing.T) {
	t.Run("fail", func(t *testing.T) {
		n := newNode(t)
		n.write(t, "etc/stubkubelet/fail", "no luck\n")
		_, ended := n.start(t)
		if err := <-ended; err == nil || err.Error() != "no luck" || n.message(t, 0) != "" {
			t.Error(err)
		}
	})
	t.Run("exit-after", func(t *testing.T) {
		n := newNode(t)
		n.write(t, "etc/stubkubelet/exit-after", "10ms")
		_, ended := n.start(t)
		if got := n.message(t, 10*time.Second); got != "READY=1" {
			t.Errorf("%q", got)
		}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "exit-after") {
			t.Error(err)
		}
	})
	t.Run("no-notify no-healthz", func(t *testing.T) {
		n := newNode(t)
		n.write(t, "etc/stubkubelet/no-notify", "")
		n.write(t, "etc/stubkubelet/no-healthz", "")
		n.write(t, "etc/stubkubelet/exit-after", "50ms")
		_, ended := n.start(t)
		<-ended
		if got := n.message(t, time.Millisecond); got != "" {
			t.Errorf("%q", got)
		}
		if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", n.port)); err == nil {
			c.Close()
			t.Error("listens")
		}
	})
}

func TestRefuse(t *testing.T) {
	for _, tt := range []struct {
		reason string
		change func(*testing.T, *node)
		ready  bool // READY=1 is sent first
		err    string
	}{
		{"removed flag", func(t *testing.T, n *node) { n.args = append(n.args, "--pod-infra-container-image=x") }, false,
			"failed to parse kubelet flag: unknown flag: --pod-infra-container-image"},
		{"argument", func(t *testing.T, n *node) { n.args = append(n.args, "x") }, false, "unknown command x"},
		{"reserved label", func(t *testing.T, n *node) { n.args = append(n.args, "--node-labels=node-role.kubernetes.io/x=") }, false,
			"unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [node-role.kubernetes.io/x]"},
		{"bad label", func(t *testing.T, n *node) { n.args = append(n.args, "--node-labels=a b=c") }, false, "invalid node labels"},
		{"bad node address", func(t *testing.T, n *node) { n.args = append(n.args, "--node-ip=x") }, false, `bad --node-ip "x"`},
		{"bad node name", func(t *testing.T, n *node) { n.args = append(n.args, "--hostname-override=A") }, false, "RFC 1123"},
		{"no configuration", func(t *testing.T, n *node) { os.Remove(n.path("config.yaml")) }, false, "no such file"},
		{"unknown field", func(t *testing.T, n *node) { n.edit(t, "config.yaml", "maxPods", "maxPod") }, false,
			`strict decoding error: unknown field "maxPod"`},
		{"duplicate field", func(t *testing.T, n *node) { n.edit(t, "config.yaml", "maxPods: 200", "maxPods: 200\nmaxPods: 200") }, false,
			`"maxPods" already set`},
		{"wrong type", func(t *testing.T, n *node) { n.edit(t, "config.yaml", "200", "many") }, false, "maxPods"},
		{"wrong version", func(t *testing.T, n *node) { n.edit(t, "config.yaml", "v1beta1", "v1beta2") }, false, "v1beta2"},
		{"wrong kind", func(t *testing.T, n *node) {
			n.write(t, "config.yaml", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: CredentialProviderConfig\nproviders: []\n")
		}, false, "unexpected kind"},
		{"no client CA", func(t *testing.T, n *node) { os.Remove(n.path("ca.crt")) }, false, "unable to load client CA file"},
		{"no manifests", func(t *testing.T, n *node) { os.Remove(n.path("manifests")) }, false, "staticPodPath"},
		{"no resolv.conf", func(t *testing.T, n *node) { os.Remove(n.path("resolv.conf")) }, false, "resolvConf"},
		{"no containerd", func(t *testing.T, n *node) { os.Remove(n.path("containerd.sock")) }, false,
			"failed to run Kubelet: validate service connection: validate CRI v1 runtime API"},
		{"no credential", func(t *testing.T, n *node) { os.Remove(n.path("bootstrap-kubeconfig")) }, false, "unable to load kubeconfig"},
		{"kubeconfig wins", func(t *testing.T, n *node) { n.write(t, "kubeconfig", "{}") }, false, "unable to load kubeconfig"},
		{"unknown field in the kubeconfig", func(t *testing.T, n *node) { n.edit(t, "bootstrap-kubeconfig", "token", "tokn") }, false,
			`unknown field "users[0].user.tokn"`},
		{"no such context", func(t *testing.T, n *node) { n.edit(t, "bootstrap-kubeconfig", "context: x", "context: other") }, false,
			`context "other" does not exist`},
		{"no such user", func(t *testing.T, n *node) { n.edit(t, "bootstrap-kubeconfig", "user: u", "user: v") }, false,
			`user "v" does not exist`},
		{"half an exec credential", func(t *testing.T, n *node) {
			n.edit(t, "bootstrap-kubeconfig", "token: abcdef.0123456789abcdef", "exec: {command: x}")
		}, false, "needs command, apiVersion and interactiveMode"},
		{"kernel settings as kubelet only after READY=1", func(t *testing.T, n *node) {
			n.write(t, "proc/sys/vm/overcommit_memory", "0\n")
			n.write(t, "proc/sys/kernel/panic", "0\n")
		}, true, "[invalid kernel flag: kernel/panic, expected value: 10, actual value: 0, " +
			"invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0]"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			n := newNode(t)
			tt.change(t, n)
			_, ended := n.start(t)
			select {
			case err := <-ended:
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %s", err, tt.err)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("still runs")
			}
			if ready := n.message(t, time.Millisecond) == "READY=1"; ready != tt.ready {
				t.Errorf("READY=1: %v", ready)
			}
		})
	}
	t.Run("kernel settings unchecked", func(t *testing.T) {
		n := newNode(t)
		must(t, os.RemoveAll(n.path("proc")))
		t.Setenv("STUB_SKIP_SYSCTL", "1")
		stop, ended := n.start(t)
		n.message(t, 10*time.Second)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
