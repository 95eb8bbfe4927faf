package render

import (
	"encoding/base64"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"berth/generator/goalstate"
	"berth/helpers/facts"
	"berth/helpers/kubelet"
)

// Paths inside the machine.
const (
	kubeletDir    = "/var/lib/kubelet"
	kubeletConfig = kubeletDir + "/config.yaml"
	kubeconfig    = "/" + kubelet.Kubeconfig
	bootstrap     = "/" + Bootstrap
	clientCA      = "/etc/kubernetes/pki/apiserver-client-ca.crt"
	manifests     = "/etc/kubernetes/manifests"
	volumePlugins = "/etc/kubernetes/volumeplugins"
)

// Bootstrap is the file, relative to the machine's root, that holds the bootstrap token. No other file depends on it.
const Bootstrap = "var/lib/kubelet/bootstrap-kubeconfig"

// Secrets are what kubelet proves with who it is. They come from outside the goal state's files, and are never part of an
// error.
type Secrets struct {
	// BootstrapToken is needed unless kubelet.exec is set; white space around it is not part of it.
	BootstrapToken string
}

var (
	// tokenForm is that of bootstrap tokens: https://kubernetes.io/docs/reference/access-authn-authz/bootstrap-tokens/
	tokenForm = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`)
	// nodeNameForm is an RFC 1123 subdomain, as the API server takes it for a node's name.
	nodeNameForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// Kubelet renders, with paths relative to the machine's root, kubelet's configuration, credentials and unit.
func Kubelet(slot *goalstate.Slot, sources []string, h facts.Host, m facts.Machine, secrets Secrets) (Output, error) {
	r := &renderer{slot: slot, sources: sources}
	k := slot.Kubelet
	r.binary("kubelet.binary", k.Binary, m.Kubelet, m)
	node := r.nodeName(h)
	ca := r.certificateAuthority(h)

	addConfig := r.add
	if k.Config["staticPodURLHeader"] != nil {
		addConfig = r.secret // Authorization, for instance
	}
	addConfig(kubeletConfig[1:], "kubelet-config.yaml", map[string]string{"CONFIG": r.yaml("kubelet.config", r.kubeletConfig(h))})
	r.add(clientCA[1:], "apiserver-client-ca.crt", map[string]string{"CERTIFICATES": ca})
	r.folder(manifests[1:], 0o700)
	r.folder(volumePlugins[1:], 0o755)

	args := []string{"--config=" + kubeletConfig, "--kubeconfig=" + kubeconfig, "--hostname-override=" + node}
	if k.Exec != nil {
		r.secret(kubeconfig[1:], "kubeconfig", map[string]string{"CONFIG": r.yaml("kubelet.exec", clientConfig(slot, ca, execUser(k.Exec)))})
		// Of a slot that has joined with a token before. Its certificate may stay: the kubeconfig does not name it.
		r.out.Remove = append(r.out.Remove, bootstrap[1:])
	} else {
		token := strings.TrimSpace(secrets.BootstrapToken)
		if !tokenForm.MatchString(token) {
			r.errorf("%s: not a bootstrap token: want 6 and 16 characters of a-z and 0-9 with a dot between", tokenKey(k))
		}
		r.secret(bootstrap[1:], "kubeconfig", map[string]string{"CONFIG": r.yaml("kubelet", clientConfig(slot, ca, map[string]any{"token": token}))})
		args = append(args, "--bootstrap-kubeconfig="+bootstrap)
		r.resetIdentity(m.Identity, node, ca)
	}
	if k.NodeIP != "" {
		args = append(args, "--node-ip="+k.NodeIP)
	}
	if len(k.Labels) > 0 {
		var labels []string
		for _, key := range slices.Sorted(maps.Keys(k.Labels)) {
			labels = append(labels, key+"="+k.Labels[key])
		}
		args = append(args, "--node-labels="+strings.Join(labels, ","))
	}
	r.add(units+"/kubelet.service", "kubelet.service", map[string]string{
		"COMMAND": r.command("kubelet.binary", k.Binary, args...), "WATCHDOG": watchdog(m.KubeletVersion),
	})
	r.enable("kubelet.service")
	r.disable("kubelet.service", m)
	return r.done()
}

// watchdog is the line by which systemd restarts a kubelet that hangs, with the value that Kubernetes recommends:
// https://kubernetes.io/docs/reference/node/systemd-watchdog/. A kubelet before 1.32 never answers, and would be killed; so there is
// none where the version is not known.
func watchdog(version string) string {
	const since = 32
	f := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(f) < 3 || f[0] != "1" {
		return ""
	}
	if minor, err := strconv.Atoi(f[1]); err != nil || minor < since {
		return ""
	}
	return "WatchdogSec=30s"
}

// tokenKey is the goal state's key that the token came from.
func tokenKey(k goalstate.Kubelet) string {
	if k.BootstrapTokenFile != "" {
		return "kubelet.bootstrap_token_file: content of " + k.BootstrapTokenFile
	}
	if name, key := k.Credential(); name != "" {
		return key + ": content of " + name
	}
	return "kubelet.bootstrap_token"
}

// nodeName is the name under which the slot's kubelet registers, by default the host's.
func (r *renderer) nodeName(h facts.Host) string {
	name, from := r.slot.Kubelet.NodeName, "kubelet.node_name"
	if name == "" {
		// As kubelet does by itself (nodeutil.GetHostname).
		name, from = strings.ToLower(strings.TrimSpace(h.Name)), "the host's name"
	}
	if len(name) > 253 || !nodeNameForm.MatchString(name) {
		r.errorf("%s %q: not a node's name of letters a-z, digits, \"-\" and \".\" (RFC 1123): set kubelet.node_name", from, name)
	}
	return name
}

// kubeletConfig is the KubeletConfiguration: berth's defaults, the user's fields over them, and what has a key of its own
// in the goal state.
func (r *renderer) kubeletConfig(h facts.Host) map[string]any {
	slot := r.slot
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": clientCA},
		},
		"authorization":                  map[string]any{"mode": "Webhook"},
		"cgroupDriver":                   "systemd",
		"containerRuntimeEndpoint":       "unix:///run/containerd/containerd.sock",
		"enforceNodeAllocatable":         []string{"pods"},
		"eventRecordQPS":                 0,
		"nodeStatusUpdateFrequency":      "10s",
		"podPidsLimit":                   -1,
		"protectKernelDefaults":          true,
		"readOnlyPort":                   0,
		"runtimeRequestTimeout":          "15m",
		"staticPodPath":                  manifests,
		"streamingConnectionIdleTimeout": "4h",
		"tlsCipherSuites": []string{
			"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
			"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
			"TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
			"TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
			"TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
			"TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
		},
		"volumePluginDir": volumePlugins,
		// With an exec credential kubelet must not rotate: it would go on with client certificates alone, and drop the
		// credential (buildKubeletClientConfig of kubelet's cmd/kubelet/app/server.go).
		"rotateCertificates": slot.Kubelet.Exec == nil,
	}
	if len(slot.Cluster.DNS) > 0 {
		config["clusterDNS"] = slot.Cluster.DNS
	}
	if slot.Cluster.Domain != "" {
		config["clusterDomain"] = slot.Cluster.Domain
	}
	if len(slot.Kubelet.Taints) > 0 {
		var taints []map[string]any
		for _, t := range slot.Kubelet.Taints {
			taints = append(taints, taint(t))
		}
		config["registerWithTaints"] = taints
	}
	if _, set := slot.Kubelet.Config["resolvConf"]; !set {
		config["resolvConf"] = r.resolvConf(h)
	}
	merge(config, slot.Kubelet.Config)
	return config
}

// resolvConf is the file, inside the machine, that pods get their servers from.
func (r *renderer) resolvConf(h facts.Host) string {
	switch {
	case !loopbackOnly(h.Nameservers):
		return "/etc/resolv.conf"
	case h.Uplink:
		return resolveDir + "/resolv.conf"
	}
	r.warnf("the host's /etc/resolv.conf has only loopback servers (%s), which pods cannot reach: pods with dnsPolicy Default "+
		"get none; to change that, set kubelet.config.resolvConf", strings.Join(h.Nameservers, ", "))
	return ""
}

// taint reads key[=value]:effect, which the goal state's check has let through.
func taint(s string) map[string]any {
	rest, effect, _ := strings.Cut(s, ":")
	key, value, hasValue := strings.Cut(rest, "=")
	t := map[string]any{"key": key, "effect": effect}
	if hasValue {
		t["value"] = value
	}
	return t
}

// certificateAuthority returns the PEM text of the cluster's certificate authority.
func (r *renderer) certificateAuthority(h facts.Host) string {
	c := r.slot.Cluster
	key, text := "cluster.certificate_authority", h.CertificateAuthority
	if c.CertificateAuthorityData != "" {
		key = "cluster.certificate_authority_data"
		data, err := base64.StdEncoding.DecodeString(c.CertificateAuthorityData)
		if err != nil {
			r.errorf("%s: not base64 (%v): want the output of base64 -w0 FILE", key, err)
			return ""
		}
		text = string(data)
	} else if h.CertificateAuthorityProblem != "" {
		r.errorf("%s: %s: want a PEM file of certificates", key, h.CertificateAuthorityProblem)
		return ""
	}
	if _, err := certificates(text); err != nil {
		r.errorf("%s: %w: want a PEM file of certificates", key, err)
	}
	return text
}

// clientConfig is a kubeconfig with one cluster and one user.
func clientConfig(slot *goalstate.Slot, ca string, user map[string]any) map[string]any {
	const name = "berth"
	return map[string]any{
		"apiVersion": "v1",
		"kind":       "Config",
		"clusters": []any{map[string]any{"name": name, "cluster": map[string]any{
			"server":                     slot.Cluster.Server,
			"certificate-authority-data": base64.StdEncoding.EncodeToString([]byte(ca)),
		}}},
		"users":           []any{map[string]any{"name": name, "user": user}},
		"contexts":        []any{map[string]any{"name": name, "context": map[string]any{"cluster": name, "user": name}}},
		"current-context": name,
	}
}

// execUser is a user whose credential comes from a plugin: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
func execUser(e *goalstate.Exec) map[string]any {
	exec := map[string]any{"apiVersion": e.APIVersion, "command": e.Command, "interactiveMode": "Never"}
	if len(e.Args) > 0 {
		exec["args"] = e.Args
	}
	var env []any
	for _, name := range slices.Sorted(maps.Keys(e.Env)) {
		env = append(env, map[string]any{"name": name, "value": e.Env[name]})
	}
	if env != nil {
		exec["env"] = env
	}
	return map[string]any{"exec": exec}
}

// yaml writes YAML with sorted keys.
func (r *renderer) yaml(key string, table map[string]any) string {
	b, err := yaml.Marshal(table)
	if err != nil {
		r.errorf("%s: %w: want what JSON can hold", key, err) // TOML has numbers that neither JSON nor kubelet know: nan and inf
	}
	return string(b)
}
