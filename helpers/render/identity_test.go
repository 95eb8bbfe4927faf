package render

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/goalstate"
	"berth/helpers/facts"
	"berth/testdata/pki"
)

// newAuthority makes a certificate authority.
func newAuthority(t *testing.T, name string) *pki.Authority {
	t.Helper()
	a, err := pki.New(name)
	must(t, err)
	return a
}

// client issues a node's certificate as Kubernetes does.
func client(t *testing.T, a *pki.Authority, node string) string {
	t.Helper()
	pair, err := a.Issue(x509.Certificate{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}})
	must(t, err)
	return pair.Certificate
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestIdentity(t *testing.T) {
	now, old, other := newAuthority(t, "now"), newAuthority(t, "old"), newAuthority(t, "clients")
	// A CA of the same name is not the same CA.
	again := newAuthority(t, "now")
	const server = "https://server:6443"
	const kubeconfig, current, key = "var/lib/kubelet/kubeconfig", "var/lib/kubelet/pki/kubelet-client-current.pem", "var/lib/kubelet/pki/kubelet.key"
	all := []string{kubeconfig, current, key}
	joined := func(certificate, ca string) facts.Identity {
		return facts.Identity{Kubeconfig: true, Server: server, CertificateAuthority: ca, User: "/" + current,
			Certificate: certificate, Files: []string{current, key}}
	}
	with := func(id facts.Identity, change func(*facts.Identity)) facts.Identity {
		change(&id)
		return id
	}
	for _, c := range []struct {
		id     facts.Identity
		ca     string
		remove []string
		warns  string
		reason string
	}{
		{facts.Identity{}, now.Certificate, nil, "", "the first start"},
		{joined(client(t, now, "host"), now.Certificate), now.Certificate, nil, "", "nothing changed"},
		{joined(client(t, now, "host"), now.Certificate), old.Certificate + now.Certificate, []string{kubeconfig}, "", "a CA is about to follow another: the certificate stays"},
		{joined(client(t, old, "host"), old.Certificate), now.Certificate, all, `issued by "CN=old"`, "another CA"},
		{joined(client(t, again, "host"), again.Certificate), now.Certificate, all, `issued by "CN=now"`, "another CA of the same name"},
		{joined(client(t, old, "host"), old.Certificate+now.Certificate), now.Certificate, all, `issued by "CN=old"`, "the CA has followed another, and kubelet has not renewed its certificate"},
		{joined(client(t, other, "host"), now.Certificate), now.Certificate, nil, "", "clients have a CA of their own"},
		{joined(client(t, other, "host"), now.Certificate), now.Certificate + old.Certificate, []string{kubeconfig}, "", "clients have a CA of their own, and that of the servers is about to change"},
		{joined(client(t, other, "host"), old.Certificate), now.Certificate, all, `issued by "CN=clients"`, "clients have a CA of their own, and the cluster is another"},
		{joined(client(t, now, "other"), now.Certificate), now.Certificate, all, `it is for "other", and the node's name now is "host"`, "another name"},
		{joined("", now.Certificate), now.Certificate, all, "has no certificate", "not a certificate: kubelet would fail"},
		{with(joined(client(t, now, "host"), now.Certificate), func(id *facts.Identity) { id.Server = "https://other" }), now.Certificate,
			[]string{kubeconfig}, "", "another server of the same cluster"},
		{with(joined("", now.Certificate), func(id *facts.Identity) { id.User, id.Files = "", nil }), now.Certificate,
			[]string{kubeconfig}, "", "kubelet.exec was set before, and never a token"},
		{with(joined(client(t, old, "host"), ""), func(id *facts.Identity) { id.Kubeconfig = false }), now.Certificate, nil, "",
			"no kubeconfig, and so nothing to go by"},
	} {
		slot := &goalstate.Slot{Name: "a", Cluster: goalstate.Cluster{Server: server}, Kubelet: goalstate.Kubelet{BootstrapToken: "x"}}
		h := facts.Host{Name: "host", CertificateAuthority: c.ca, Nameservers: []string{"192.0.2.53"}}
		m := facts.Machine{Identity: c.id}
		secrets := Secrets{BootstrapToken: "abcdef.0123456789abcdef"}
		out, err := Kubelet(slot, nil, h, m, secrets)
		must(t, err)
		if diff := cmp.Diff(c.remove, out.Remove); diff != "" {
			t.Errorf("%s: removed: -want +got:\n%s", c.reason, diff)
		}
		warning := strings.Join(out.Warnings, "\n")
		if c.warns == "" && warning != "" || !strings.Contains(warning, c.warns) {
			t.Errorf("%s: warning %q, want %q", c.reason, warning, c.warns)
		}

		slot.Kubelet = goalstate.Kubelet{Exec: &goalstate.Exec{Command: "/plugin"}}
		out, err = Kubelet(slot, nil, h, m, Secrets{})
		must(t, err)
		if diff := cmp.Diff([]string{Bootstrap}, out.Remove); diff != "" {
			t.Errorf("%s: removed with kubelet.exec: -want +got:\n%s", c.reason, diff)
		}
	}
}
