package node

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/testdata/lab"
)

var realNodes = flag.Bool("real", false, "run real kubelets against a real control plane; builds these first, which takes a while")

// The kubelets that the tests run, and the control plane, which may be up to three minor versions newer than a node and never older.
// By default they are the oldest and the newest.
var (
	newest       = KubeletVersions[len(KubeletVersions)-1]
	slotA, slotB = flag.String("kubelet-a", KubeletVersions[0], "release of Kubernetes whose kubelet slot a has"), flag.String("kubelet-b", newest, "and slot b")
)

// TestReal runs nodes with Kubernetes' own kubelet and control plane, on a host of each release, each with its own containerd. Slot a
// has the oldest kubelet that is supported, slot b the newest, unless -kubelet-a and -kubelet-b say otherwise.
func TestReal(t *testing.T) {
	if !*realNodes {
		t.Skip("only with -real")
	}
	for _, suite := range lab.Suites {
		t.Run(suite, func(t *testing.T) {
			h := newHost(t, suite, func(root string) error {
				return errors.Join(prepareControlPlane(t, root),
					prepareMachine(t, filepath.Join(root, "var/lib/machines/node-a"), *slotA),
					prepareMachine(t, filepath.Join(root, "var/lib/machines/node-b"), *slotB))
			})
			for _, c := range realCases {
				t.Run(c.name, func(t *testing.T) {
					h.rest(t)
					h.Must(t, `systemctl stop kube-controller-manager kube-apiserver etcd
						rm -rf /var/lib/etcd /var/lib/machines/node-*/var/lib/kubelet`)
					h.startControlPlane(t)
					h.write(t, "/etc/berth/goal.toml.d/real.toml", realGoal)
					h.Must(t, "systemctl daemon-reload")
					defer func() {
						h.explain(t)
						if t.Failed() {
							out, _ := h.try(t, `for m in node-a node-b; do journalctl --machine=$m --boot --no-pager --lines=60 --unit=kubelet --unit=containerd; done
								`+kubectl+`get csr,nodes --output=wide; journalctl --no-pager --lines=60 --unit=kube-controller-manager`)
							t.Log(out)
						}
					}()
					c.run(t, h)
				})
			}
		})
	}
}

// prepareMachine puts a kubelet and CNI plugins into a machine, and what stands between a kubelet and the lab.
func prepareMachine(t *testing.T, root, version string) error {
	kubelet, err := Kubernetes(t.Context(), version, "kubelet")
	if err != nil {
		return err
	}
	packages, err := DebianPackages(t.Context())
	if err != nil {
		return err
	}
	return errors.Join(
		copyInto(filepath.Join(root, "usr/local/bin"), kubelet),
		copyInto(filepath.Join(root, "opt/cni/bin"), filepath.Join(packages, "usr/lib/cni/loopback")),
		write(filepath.Join(root, "etc/cni/net.d/10-loopback.conflist"),
			[]byte(`{"cniVersion": "1.0.0", "name": "loopback", "plugins": [{"type": "loopback"}]}`), 0o644),
		// The file system of the lab is an overlay, and there is no overlay over that.
		write(filepath.Join(root, "etc/fstab"), []byte("tmpfs /var/lib/containerd tmpfs mode=0711\n"), 0o644),
		// A lab host leaves the kernel's settings as they are, and kubelet wants them as units/sysctl.d has them.
		write(filepath.Join(root, "etc/systemd/system/kubelet.service.d/sysctl.conf"), []byte("[Service]\nExecStartPre=/usr/local/sbin/pretend-sysctl\n"), 0o644),
		write(filepath.Join(root, "usr/local/sbin/pretend-sysctl"), []byte(`#!/bin/sh -eu
for setting in kernel/keys/root_maxbytes=25000000 kernel/keys/root_maxkeys=1000000 kernel/panic=10 kernel/panic_on_oops=1 \
    vm/overcommit_memory=1 vm/panic_on_oom=0; do
    file=/proc/sys/${setting%=*} value=${setting#*=}
    [ "$(cat $file)" = $value ] && continue
    mkdir -p "/run/sysctl/${setting%/*}"
    echo $value >"/run/sysctl/${setting%=*}"
    mount --bind "/run/sysctl/${setting%=*}" $file
done
`), 0o755))
}

// nodeName is the node's name in realGoal.
const nodeName = "real-1"

// realGoal is what the real nodes have more in their goal state. Their budget is that of a machine that does much else.
const realGoal = `
[kubelet]
node_name = "` + nodeName + `"
node_ip = "` + serverIP + `"
labels = { "example.com/pool" = "gpu", "node.kubernetes.io/instance-type" = "lab" }
taints = ["dedicated=gpu:NoSchedule", "example.com/drained:PreferNoSchedule"]

[kubelet.config]
maxPods = 42

[timeouts]
ready = "5m"
`

var realCases = []testCase{
	{"a node joins with a bootstrap token", func(t *testing.T, h *host) {
		h.start(t, "a")
		h.joined(t, *slotA)
		h.renewed(t)
		h.explained(t, "node-a")
	}},
	{"a node joins with a credential plugin, and then with a token", func(t *testing.T, h *host) {
		const plugin = "/usr/local/bin/plugin"
		ca := h.startControlPlane(t)
		pair, err := ca.Issue(x509.Certificate{
			Subject:     pkix.Name{CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		})
		if err != nil {
			t.Fatal(err)
		}
		credential, err := json.Marshal(map[string]any{
			"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
			"status": map[string]string{"clientCertificateData": pair.Certificate, "clientKeyData": pair.Key},
		})
		if err != nil {
			t.Fatal(err)
		}
		h.write(t, "node-b:"+plugin, fmt.Sprintf("#!/bin/sh\nprintf %%s '%s'\n", credential))
		h.Must(t, "chmod +x /var/lib/machines/node-b"+plugin)
		h.goal(t, strings.Replace(Goal, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, `exec = { command = "`+plugin+`" }`, 1)+budgets)
		h.start(t, "b")
		h.joined(t, *slotB)
		h.renewed(t)

		h.Must(t, "rm /var/lib/machines/node-b"+plugin)
		h.goal(t, Goal+budgets)
		h.Must(t, "systemctl restart node@b")
		h.renewed(t)
	}},
	{"a slot takes over from another with its own kubelet, and gives back", func(t *testing.T, h *host) {
		h.start(t, "a")
		node := h.joined(t, *slotA)
		for _, c := range []struct{ from, to, version string }{{"a", "b", *slotB}, {"b", "a", *slotA}} {
			h.Must(t, "systemctl stop node@"+c.from)
			h.start(t, c.to)
			if now := h.joined(t, c.version); now.Metadata.UID != node.Metadata.UID {
				t.Errorf("slot %s: the Node is another object", c.to)
			}
			h.renewed(t)
			h.explained(t, "node-"+c.to)
		}
	}},
	{"41: the cluster has another CA", func(t *testing.T, h *host) {
		h.start(t, "b")
		h.joined(t, *slotB)
		h.startControlPlane(t)
		h.Must(t, "systemctl restart node@b")
		h.renewed(t)
		want(t, h.Must(t, "journalctl -u node@b"), "kubelet's client certificate is removed, and it asks for a new one with the bootstrap token: "+
			`it was issued by "CN=kubernetes"`)
	}},
	{"41: the node has another name", func(t *testing.T, h *host) {
		h.start(t, "b")
		h.joined(t, *slotB)
		h.write(t, "/etc/berth/goal.toml.d/zz.toml", "[kubelet]\nnode_name = \"real-2\"\n")
		h.Must(t, "systemctl restart node@b; "+kubectl+"wait --for=create node/real-2 --timeout=3m")
		want(t, h.Must(t, "journalctl -u node@b"), `it is for "real-1", and the node's name now is "real-2"`)
	}},
	{"41: the token has expired", func(t *testing.T, h *host) {
		h.start(t, "b")
		h.joined(t, *slotB)
		h.Must(t, kubectl+"delete secret --namespace=kube-system bootstrap-token-abcdef; systemctl restart node@b")
		h.renewed(t) // who has joined needs no token
	}},
	{"41: the cluster refuses the token", func(t *testing.T, h *host) {
		h.Must(t, kubectl+"delete secret --namespace=kube-system bootstrap-token-abcdef")
		h.start(t, "b")
		want(t, h.Must(t, "journalctl -u node@b"), "kubelet has no client certificate yet", "journalctl -M node-b -u kubelet.service")
		h.apply(t, joining)
		h.joined(t, *slotB)
	}},
	{"a static pod runs", func(t *testing.T, h *host) {
		goal := "[containerd]\nsandbox_image = \"" + podImage + "\"\n"
		controllers := strings.Fields(h.Must(t, "cat /sys/fs/cgroup/cgroup.controllers"))
		for _, want := range []string{"cpu", "memory", "pids"} {
			if !slices.Contains(controllers, want) {
				t.Logf("this machine's cgroup v2 has only the controllers %q: without %s no pod gets limits, so that none are asked for", controllers, want)
				plugin := "io.containerd.grpc.v1.cri"
				if h.Suite() == "forky" { // containerd 2.x
					plugin = "io.containerd.cri.v1.runtime"
				}
				goal += strings.Replace(withoutLimits, "PLUGIN", plugin, 1)
				h.write(t, "node-b:"+unlimited, strings.Replace(unlimitedScript, "RUNC", "/usr/sbin/runc", 1))
				h.Must(t, "chmod +x /var/lib/machines/node-b"+unlimited)
				break
			}
		}
		h.write(t, "/etc/berth/goal.toml.d/zz.toml", goal)
		h.Must(t, "systemctl daemon-reload")
		h.start(t, "b")
		h.joined(t, *slotB)
		packages, err := DebianPackages(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := writeImage(h.path("node-b:/image.tar"), filepath.Join(packages, "usr/bin/busybox")); err != nil {
			t.Fatal(err)
		}
		h.Must(t, "systemd-run --machine=node-b --pipe --wait --quiet ctr --namespace=k8s.io images import /image.tar")
		h.write(t, "node-b:/etc/kubernetes/manifests/pod.yaml", `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"},
			"spec": {"hostNetwork": true, "containers": [{"name": "c", "image": "`+podImage+`", "imagePullPolicy": "Never"}]}}`)
		h.Must(t, kubectl+"wait --for=create pod/pod-"+nodeName+" --timeout=3m; "+kubectl+"wait --for=condition=Ready pod/pod-"+nodeName+" --timeout=3m")
	}},
}

// withoutLimits is what a host needs in its goal state that lacks the cgroup controllers and the capability (CAP_SYS_RESOURCE) by which
// kubelet and runc set limits. PLUGIN is containerd's.
const withoutLimits = `
runc = "` + unlimited + `"

[containerd.config.plugins."PLUGIN"]
restrict_oom_score_adj = true

[kubelet.config]
cgroupsPerQOS = false
enforceNodeAllocatable = []
`

// unlimited calls runc, without the limits that containerd asks for and without the name of the cgroup that would have them.
const unlimited = "/usr/local/sbin/unlimited-runc"

const unlimitedScript = `#!/bin/sh -eu
bundle=
previous=
for argument; do
    [ "$previous" != --bundle ] || bundle=$argument
    previous=$argument
done
if [ -n "$bundle" ]; then
    sed -E -i -e 's/"(cpu|memory|pids|unified)":\{[^{}]*\}/"\1":{}/g' -e 's/"cgroupsPath":"[^"]*"/"cgroupsPath":""/' "$bundle/config.json"
fi
exec RUNC "$@"
`

// podImage is the image that writeImage makes.
const podImage = "localhost/lab:1"

// writeImage writes an image, as docker save does, in which busybox sleeps.
func writeImage(path, busybox string) error {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	archive := func(files ...[2]string) string {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, f := range files {
			// A buffer takes all that is written.
			w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o755, Size: int64(len(f[1]))})
			w.Write([]byte(f[1]))
		}
		w.Close()
		return b.String()
	}
	layer := archive([2]string{"busybox", string(program)})
	config := fmt.Sprintf(`{"architecture": "%s", "os": "linux", "config": {"Cmd": ["/busybox", "sleep", "infinity"]},
		"rootfs": {"type": "layers", "diff_ids": ["sha256:%x"]}}`, runtime.GOARCH, sha256.Sum256([]byte(layer)))
	return write(path, []byte(archive([2]string{"layer.tar", layer}, [2]string{"config.json", config}, [2]string{"manifest.json",
		`[{"Config": "config.json", "RepoTags": ["` + podImage + `"], "Layers": ["layer.tar"]}]`})), 0o644)
}

// renewed waits until the node's kubelet renews the lease by which the cluster knows that it lives.
func (h *host) renewed(t *testing.T) {
	t.Helper()
	h.Must(t, kubectl+`wait --for=create --namespace=kube-node-lease lease/`+nodeName+` --timeout=3m
		timeout 180 `+kubectl+`get --namespace=kube-node-lease lease/`+nodeName+` --watch --output='jsonpath={.spec.renewTime}{"\n"}' | {
			read -r first
			while read -r now; do [ "$now" = "$first" ] || exit 0; done
			exit 1
		}`)
}

// joined waits until the node is Ready, with a kubelet of a version, and requires that the Node is as the goal state says.
func (h *host) joined(t *testing.T, version string) nodeObject {
	t.Helper()
	h.Must(t, fmt.Sprintf(kubectl+"wait --for=create node/%s --timeout=3m; "+
		kubectl+"wait --for=jsonpath={.status.nodeInfo.kubeletVersion}=%s node/%[1]s --timeout=3m; "+
		kubectl+"wait --for=condition=Ready node/%[1]s --timeout=3m", nodeName, version))
	n := h.node(t, nodeName)
	labels := map[string]string{}
	for key, value := range n.Metadata.Labels {
		if key == "example.com/pool" || key == "node.kubernetes.io/instance-type" || key == "kubernetes.io/hostname" {
			labels[key] = value
		}
	}
	want := map[string]string{"example.com/pool": "gpu", "node.kubernetes.io/instance-type": "lab", "kubernetes.io/hostname": nodeName}
	if diff := cmp.Diff(want, labels); diff != "" {
		t.Errorf("labels: -want +got:\n%s", diff)
	}
	taints := fmt.Sprint(n.Spec.Taints)
	for _, taint := range []string{"{dedicated gpu NoSchedule}", "{example.com/drained  PreferNoSchedule}"} {
		if !strings.Contains(taints, taint) {
			t.Errorf("taints %s; want %s", taints, taint)
		}
	}
	if n.Status.Capacity["pods"] != "42" {
		t.Errorf("capacity %v; want 42 pods", n.Status.Capacity)
	}
	return n
}
