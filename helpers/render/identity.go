package render

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"

	"berth/helpers/facts"
	"berth/helpers/kubelet"
)

// clientCertificate is where kubelet keeps its client certificate and key, both in one file (certificate.FileStore of client-go).
const clientCertificate = "/" + kubelet.PKI + "/" + kubelet.ClientCertificate

// resetIdentity removes what kubelet has from an earlier start where that is not for this node or this cluster. Kubelet would not
// see it: as long as the certificate that its kubeconfig names has not expired, it goes on with that file, with the server and CA in
// it, and does not look at the bootstrap token; and it takes a certificate in its folder for its own, whatever name is on it
// (LoadClientConfig in pkg/kubelet/certificate/bootstrap, getCurrentCertificateOrBootstrap in client-go; 1.34 to 1.37). An expired
// one it replaces by itself.
func (r *renderer) resetIdentity(id facts.Identity, node, ca string) {
	switch reason := stale(id, node, ca); {
	case reason != "":
		r.warnf("kubelet's client certificate is removed, and it asks for a new one with the bootstrap token: %s", reason)
		r.out.Remove = append(r.out.Remove, id.Files...)
		r.out.Remove = append(r.out.Remove, kubelet.Kubeconfig)
	case id.Kubeconfig && (id.Server != r.slot.Cluster.Server || id.CertificateAuthority != ca || id.User != clientCertificate):
		// Kubelet makes it anew from the bootstrap kubeconfig, and keeps the certificate that it has.
		r.out.Remove = append(r.out.Remove, kubelet.Kubeconfig)
	}
}

// stale tells why the client certificate that kubelet has is of no use for a node's name and a cluster's CA; empty: it may be used,
// or there is none.
func stale(id facts.Identity, node, ca string) string {
	if !slices.ContainsFunc(id.Files, func(name string) bool { return "/"+name == clientCertificate }) {
		return ""
	}
	chain, err := certificates(id.Certificate)
	if err != nil {
		return fmt.Sprintf("%s: %v", clientCertificate, err)
	}
	leaf := chain[0]
	if subject := "system:node:" + node; leaf.Subject.CommonName != subject {
		return fmt.Sprintf("it is for %q, and the node's name now is %q", strings.TrimPrefix(leaf.Subject.CommonName, "system:node:"), node)
	}
	now, err := certificates(ca)
	if err != nil || issued(chain, now) {
		return ""
	}
	// Not every cluster has its clients' certificates signed by the CA of its servers. What such a certificate depends on is not
	// known here: it is kept as long as the CA of the servers is one that was there when it was issued.
	before, err := certificates(id.CertificateAuthority)
	if err != nil || !issued(chain, before) && slices.ContainsFunc(before, func(c *x509.Certificate) bool {
		return slices.ContainsFunc(now, c.Equal)
	}) {
		return ""
	}
	return fmt.Sprintf("it was issued by %q, and that is not in the cluster's certificate authority any more", leaf.Issuer.String())
}

// issued tells whether a certificate, the first of chain, was issued by one of the authorities, whether or not it has expired since. An
// authority outlives what it issues, but may be younger: Kubernetes' signers backdate by five minutes.
func issued(chain, authorities []*x509.Certificate) bool {
	options := x509.VerifyOptions{
		Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(),
		CurrentTime: chain[0].NotAfter, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	}
	for _, c := range authorities {
		options.Roots.AddCert(c)
	}
	for _, c := range chain[1:] {
		options.Intermediates.AddCert(c)
	}
	_, err := chain[0].Verify(options)
	return err == nil
}

// certificates reads PEM text that holds certificates, at least one, and nothing else. The error is what follows the text's name in a
// sentence.
func certificates(text string) (list []*x509.Certificate, err error) {
	for rest := []byte(text); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("has a block of type %q", block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	if list == nil {
		return nil, fmt.Errorf("has no certificate")
	}
	return list, nil
}
