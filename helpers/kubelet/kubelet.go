// Package kubelet names what kubelet makes by itself, relative to the root of its machine.
package kubelet

const (
	// Kubeconfig is what kubelet goes by once it has joined its cluster.
	Kubeconfig = "var/lib/kubelet/kubeconfig"
	// PKI is the folder of its certificates and keys.
	PKI = "var/lib/kubelet/pki"
	// ClientCertificate is a link in PKI to the client certificate and its key.
	ClientCertificate = "kubelet-client-current.pem"
)
