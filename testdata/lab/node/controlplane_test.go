package node

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/testdata/pki"
)

// serverIP is where the API server of Goal listens, and the node's address. It is on the loopback interface, as the lab has no other,
// but no loopback address: kubelet and API server refuse those.
const serverIP = "10.0.0.1"

// controlPlaneUnits are the services of a control plane, each as the arguments of its program in controlPlaneBin. All are the
// programs' defaults but for what has none, what takes the network as it is, and less work for two processors.
var controlPlaneUnits = map[string][]string{
	"etcd": {"--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn"},
	"kube-apiserver": {
		"--advertise-address=" + serverIP, "--endpoint-reconciler-type=none", "--etcd-servers=http://127.0.0.1:2379",
		"--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--enable-bootstrap-token-auth",
		"--client-ca-file=" + controlPlaneDir + "/ca.crt",
		"--tls-cert-file=" + controlPlaneDir + "/server.crt", "--tls-private-key-file=" + controlPlaneDir + "/server.key",
		"--kubelet-client-certificate=" + controlPlaneDir + "/admin.crt", "--kubelet-client-key=" + controlPlaneDir + "/admin.key",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + controlPlaneDir + "/server.crt", "--service-account-signing-key-file=" + controlPlaneDir + "/server.key",
	},
	"kube-controller-manager": {
		"--kubeconfig=" + controlPlaneDir + "/kube-controller-manager.conf", "--leader-elect=false", "--bind-address=127.0.0.1",
		"--cluster-signing-cert-file=" + controlPlaneDir + "/ca.crt", "--cluster-signing-key-file=" + controlPlaneDir + "/ca.key",
		"--root-ca-file=" + controlPlaneDir + "/ca.crt", "--service-account-private-key-file=" + controlPlaneDir + "/server.key",
		"--use-service-account-credentials",
	},
}

const (
	controlPlaneBin = "/opt/control-plane"
	controlPlaneDir = "/etc/control-plane"
	kubectl         = controlPlaneBin + "/kubectl --kubeconfig=" + controlPlaneDir + "/admin.conf "
)

// prepareControlPlane puts the programs and units of a control plane of the newest version below the root of a host.
func prepareControlPlane(t *testing.T, root string) error {
	packages, err := DebianPackages(t.Context())
	if err != nil {
		return err
	}
	programs := []string{filepath.Join(packages, "usr/bin/etcd"), filepath.Join(packages, "usr/bin/kubectl")}
	for _, name := range []string{"kube-apiserver", "kube-controller-manager"} {
		program, err := Kubernetes(t.Context(), newest, name)
		if err != nil {
			return err
		}
		programs = append(programs, program)
	}
	if err := copyInto(filepath.Join(root, controlPlaneBin), programs...); err != nil {
		return err
	}
	for name, args := range controlPlaneUnits {
		// An API server whose etcd is gone would take its time to stop, and nothing of a control plane is kept.
		kind := "notify"
		if name == "kube-controller-manager" {
			kind = "exec"
		}
		// kube-controller-manager gives up if the API server is not healthy within ten seconds, which on a busy machine it may not be.
		unit := fmt.Sprintf("[Unit]\nStartLimitIntervalSec=0\n[Service]\nType=%s\nExecStart=%s/%s %s\nTimeoutStartSec=infinity\nKillSignal=SIGKILL\n"+
			"Restart=on-failure\nRestartSec=1s\n", kind, controlPlaneBin, name, strings.Join(args, " "))
		if err := write(filepath.Join(root, "etc/systemd/system", name+".service"), []byte(unit), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// startControlPlane starts the control plane, anew if it runs, with a CA of its own, which the node is told. The token of WriteGoal is
// good for joining, and nothing but that.
func (h *host) startControlPlane(t *testing.T) *pki.Authority {
	t.Helper()
	ca, err := pki.New("kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	h.write(t, controlPlaneDir+"/ca.crt", ca.Certificate)
	h.write(t, controlPlaneDir+"/ca.key", ca.Key)
	h.write(t, "/etc/berth/ca.crt", ca.Certificate)
	issue := func(name string, template x509.Certificate) pki.Pair {
		pair, err := ca.Issue(template)
		if err != nil {
			t.Fatal(err)
		}
		h.write(t, controlPlaneDir+"/"+name+".crt", pair.Certificate)
		h.write(t, controlPlaneDir+"/"+name+".key", pair.Key)
		return pair
	}
	issue("server", x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, DNSNames: []string{"kubernetes.default.svc"},
		IPAddresses: []net.IP{net.ParseIP(serverIP), net.ParseIP("10.96.0.1")},
	})
	for name, subject := range map[string]pkix.Name{
		"admin":                   {CommonName: "admin", Organization: []string{"system:masters"}},
		"kube-controller-manager": {CommonName: "system:kube-controller-manager"},
	} {
		pair := issue(name, x509.Certificate{Subject: subject, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		h.write(t, controlPlaneDir+"/"+name+".conf", clientConfig(ca, pair))
	}
	h.Must(t, `
		ip addr replace `+serverIP+`/32 dev lo
		systemctl daemon-reload
		for unit in etcd kube-apiserver kube-controller-manager; do
			systemctl restart $unit || { journalctl --no-pager --lines=20 --unit=$unit; exit 1; }
		done
		for object in namespace/kube-system clusterrole/system:node-bootstrapper; do
			`+kubectl+`wait --for=create $object --timeout=60s
		done`)
	h.apply(t, joining)
	return ca
}

func clientConfig(ca *pki.Authority, pair pki.Pair) string {
	encode := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s:6443", certificate-authority-data: %s}}]
users: [{name: u, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, serverIP, encode(ca.Certificate), encode(pair.Certificate), encode(pair.Key))
}

// joining is what a cluster has for nodes that join by a bootstrap token, which kubeadm, for instance, makes so:
// https://kubernetes.io/docs/reference/access-authn-authz/kubelet-tls-bootstrapping/
const joining = `
apiVersion: v1
kind: Secret
metadata: {name: bootstrap-token-abcdef, namespace: kube-system}
type: bootstrap.kubernetes.io/token
stringData: {token-id: abcdef, token-secret: "0123456789abcdef", usage-bootstrap-authentication: "true"}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: may-ask}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:node-bootstrapper"}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:bootstrappers"}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: is-approved}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:certificates.k8s.io:certificatesigningrequests:nodeclient"}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:bootstrappers"}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: may-renew}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:nodes"}]
`

// apply makes objects as they are described.
func (h *host) apply(t *testing.T, objects string) {
	t.Helper()
	h.write(t, "/run/objects.yaml", objects)
	h.Must(t, kubectl+"apply --filename=/run/objects.yaml")
}

// nodeObject is what the tests look at of a Node.
type nodeObject struct {
	Metadata struct {
		UID    string
		Labels map[string]string
	}
	Spec struct {
		Taints []struct{ Key, Value, Effect string }
	}
	Status struct {
		Capacity map[string]string
		NodeInfo struct{ KubeletVersion, ContainerRuntimeVersion string }
	}
}

func (h *host) node(t *testing.T, name string) (n nodeObject) {
	t.Helper()
	if err := json.Unmarshal([]byte(h.Must(t, kubectl+"get node --output=json "+name)), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// copyInto copies files into a folder, which it makes.
func copyInto(dir string, files ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return run(exec.Command("cp", append([]string{"--archive", "--target-directory", dir}, files...)...))
}
