package goalstate

import (
	"encoding/base64"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// A check says what is wrong with a string and what would be right; an empty problem means nothing is wrong. A check of
// a secret does not repeat it.
type check func(s string) (problem, cure string)

// checks are by rule: see decoder.value.
var checks = map[string]check{
	"mode":                                         oneOfWords("auto", "required", "off"),
	"cluster.server":                               serverURL,
	"cluster.certificate_authority":                filePath,
	"cluster.certificate_authority_data":           certificateData,
	"cluster.dns":                                  dnsAddress,
	"cluster.domain":                               domain,
	"kubelet.binary":                               filePath,
	"kubelet.node_name":                            nodeName,
	"kubelet.node_ip":                              nodeIP,
	"kubelet.labels":                               labelValue,
	"kubelet.taints":                               taint,
	"kubelet.bootstrap_token":                      bootstrapToken,
	"kubelet.bootstrap_token_file":                 tokenFile,
	"kubelet.bootstrap_token_credential":           credentialName,
	"kubelet.bootstrap_token_encrypted_credential": credentialName,
	"kubelet.exec.command":                         command,
	"kubelet.exec.api_version":                     oneOfWords("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"),
	"containerd.binary":                            filePath,
	"containerd.runc":                              filePath,
	"containerd.sandbox_image":                     image,
	"containerd.registry.server":                   registryURL,
	"containerd.registry.mirrors.url":              registryURL,
	"containerd.registry.mirrors.capabilities":     oneOfWords("pull", "resolve", "push"),
	"containerd.registry.mirrors.ca":               filePath,
	"nvidia.runtime_class":                         runtimeClass,
	"machine.devices":                              device,
	"machine.mounts.source":                        absolutePath,
	"machine.mounts.target":                        mountTarget,
}

// keyChecks are the checks of keys that people choose.
var keyChecks = map[string]check{
	"kubelet.labels":                     label,
	"kubelet.exec.env":                   variable,
	"containerd.registry":                registryHost,
	"containerd.registry.mirrors.header": header,
}

// identity returns what makes an element of an array the same as another, or nothing where it may be there twice.
func identity(rule, s string) string {
	switch rule {
	case "kubelet.taints": // kubelet: one taint a key and effect, whatever its value
		key, effect := s, ""
		if i := strings.LastIndexByte(s, ':'); i >= 0 {
			key, effect = s[:i], s[i:]
		}
		key, _, _ = strings.Cut(key, "=")
		return key + effect
	case "cluster.dns", "containerd.registry.mirrors.capabilities", "machine.devices":
		return s
	}
	return ""
}

// hasControl says whether s holds a control character. No unit file has a way to write those of ASCII; of the others, not every writer of
// YAML quotes U+0085, which ends a line there.
func hasControl(s string) bool { return strings.ContainsFunc(s, unicode.IsControl) }

// ValidSlotName says whether s may be the name of a slot: 1 to 16 of a-z and 0-9.
func ValidSlotName(s string) bool {
	return len(s) >= 1 && len(s) <= 16 && all(s, isLower)
}

// isLower says whether c is of a-z and 0-9, isAlnum the same with A-Z.
func isLower(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }
func isAlnum(c byte) bool { return isLower(c) || c >= 'A' && c <= 'Z' }

func all(s string, ok func(byte) bool) bool {
	for i := range len(s) {
		if !ok(s[i]) {
			return false
		}
	}
	return true
}

func oneOfWords(words ...string) check {
	return func(s string) (problem, cure string) {
		if slices.Contains(words, s) {
			return "", ""
		}
		return strconv.Quote(s) + " is not allowed here", didYouMean(s, words, "want "+list2(words, " or "))
	}
}

// isSubdomain is IsDNS1123Subdomain of k8s.io/apimachinery/pkg/util/validation: up to 253 bytes of labels of a-z, 0-9
// and "-", which begin and end with a letter or digit.
func isSubdomain(s string) bool {
	if len(s) > 253 {
		return false
	}
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || !isLower(part[0]) || !isLower(part[len(part)-1]) ||
			!all(part, func(c byte) bool { return isLower(c) || c == '-' }) {
			return false
		}
	}
	return true
}

// isName is the name part of IsQualifiedName of the same package, and, if it is not empty, IsValidLabelValue.
func isName(s string) bool {
	return len(s) >= 1 && len(s) <= 63 && isAlnum(s[0]) && isAlnum(s[len(s)-1]) &&
		all(s, func(c byte) bool { return isAlnum(c) || c == '-' || c == '_' || c == '.' })
}

const (
	wantKey   = "want [prefix/]name: the name up to 63 of A-Z a-z 0-9 - _ . that begins and ends with a letter or digit, the prefix a DNS name"
	wantValue = "want nothing, or up to 63 of A-Z a-z 0-9 - _ . that begin and end with a letter or digit"
)

// isQualifiedName is IsQualifiedName of the same package: the syntax of the keys of labels and taints.
func isQualifiedName(s string) bool {
	prefix, name, ok := strings.Cut(s, "/")
	if !ok {
		return isName(prefix)
	}
	return isSubdomain(prefix) && isName(name)
}

// ownLabels are the labels of the name spaces kubernetes.io and k8s.io that a node may set on itself, besides those of
// kubelet.kubernetes.io and node.kubernetes.io (k8s.io/kubelet/pkg/apis, well_known_labels.go). Kubelet exits on others.
var ownLabels = []string{
	"beta.kubernetes.io/arch", "beta.kubernetes.io/instance-type", "beta.kubernetes.io/os",
	"failure-domain.beta.kubernetes.io/region", "failure-domain.beta.kubernetes.io/zone",
	"kubernetes.io/arch", "kubernetes.io/hostname", "kubernetes.io/os",
	"topology.kubernetes.io/region", "topology.kubernetes.io/zone",
}

func label(key string) (problem, cure string) {
	if !isQualifiedName(key) {
		return strconv.Quote(key) + " is not a label's key", wantKey
	}
	prefix, _, ok := strings.Cut(key, "/")
	within := func(domain string) bool { return prefix == domain || strings.HasSuffix(prefix, "."+domain) }
	if !ok || !within("kubernetes.io") && !within("k8s.io") ||
		within("kubelet.kubernetes.io") || within("node.kubernetes.io") || slices.Contains(ownLabels, key) {
		return "", ""
	}
	return "a node may not set this label on itself", "want a prefix of your own, or below kubernetes.io and k8s.io only " +
		"kubelet.kubernetes.io/…, node.kubernetes.io/…, " + strings.Join(ownLabels, ", ")
}

func labelValue(s string) (problem, cure string) {
	if s == "" || isName(s) {
		return "", ""
	}
	return strconv.Quote(s) + " is not a label's value", wantValue
}

func taint(s string) (problem, cure string) {
	effects := []string{"NoSchedule", "PreferNoSchedule", "NoExecute"}
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return strconv.Quote(s) + " has no effect", "want key[=value]:effect, the effect " + list2(effects, " or ")
	}
	key, value, _ := strings.Cut(s[:i], "=")
	if !isQualifiedName(key) {
		return strconv.Quote(key) + " is not a taint's key", wantKey
	}
	if value != "" && !isName(value) {
		return strconv.Quote(value) + " is not a taint's value", wantValue
	}
	if effect := s[i+1:]; !slices.Contains(effects, effect) {
		return "effect " + strconv.Quote(effect), didYouMean(effect, effects, "want "+list2(effects, " or "))
	}
	return "", ""
}

// bootstrapToken checks a bootstrap token (bootstrap-token-authentication of the Kubernetes documentation).
func bootstrapToken(s string) (problem, cure string) {
	id, secret, ok := strings.Cut(s, ".")
	if ok && len(id) == 6 && len(secret) == 16 && all(id+secret, isLower) {
		return "", ""
	}
	return "is not a bootstrap token", "want 6 of a-z 0-9, a dot, and 16 of a-z 0-9"
}

// tokenFile does not repeat what it refuses: people put the token itself there.
func tokenFile(s string) (problem, cure string) {
	if problem, _ := bootstrapToken(s); problem == "" {
		return "is a token, not a path", "want bootstrap_token, or the path of a file that holds it"
	}
	if problem, _ := filePath(s); problem != "" {
		return "is not a plain absolute path", "want the path of a file that holds the token"
	}
	return "", ""
}

// credentialName checks the name of a credential (systemd, credential_name_valid): a file name without ":".
func credentialName(s string) (problem, cure string) {
	if problem, _ := bootstrapToken(s); problem == "" {
		return "is a token, not a credential's name", "want bootstrap_token, or the name after LoadCredential="
	}
	if s != "" && s != "." && s != ".." && len(s) <= 255 &&
		all(s, func(c byte) bool { return c > ' ' && c < 0x7f && c != '/' && c != ':' }) {
		return "", ""
	}
	return "is not a credential's name", "want a file name, as after LoadCredential="
}

func nodeName(s string) (problem, cure string) {
	if s == "" || isSubdomain(s) {
		return "", ""
	}
	return strconv.Quote(s) + " is not a node's name", "want a DNS name: a-z 0-9 - ., each part beginning and ending with a letter or digit"
}

func domain(s string) (problem, cure string) {
	if isSubdomain(s) {
		return "", ""
	}
	return strconv.Quote(s) + " is not a domain", `want a DNS name without a dot at its end, such as "cluster.local"`
}

// nodeIP checks --node-ip: one address, or one of each family.
func nodeIP(s string) (problem, cure string) {
	if s == "" {
		return "", ""
	}
	parts := strings.Split(s, ",")
	var families []bool
	for _, part := range parts {
		a, err := netip.ParseAddr(part)
		if err != nil || a.Zone() != "" || a.Is4In6() {
			return strconv.Quote(part) + " is not an address", `want an IP address, or two as "IPv4,IPv6"`
		}
		if what := unfit(a); what != "" {
			return part + " is " + what, "want an address of this host"
		}
		families = append(families, a.Is4())
	}
	if len(parts) > 2 || len(parts) == 2 && families[0] == families[1] {
		return strconv.Quote(s) + " is not one address of each family", `want an IP address, or two as "IPv4,IPv6"`
	}
	return "", ""
}

func dnsAddress(s string) (problem, cure string) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return strconv.Quote(s) + " is not an address", `want the IP address of the cluster's DNS service, such as "10.96.0.10"`
	}
	// A pod's loopback is its own, so no DNS service can be there.
	if what := unfit(a); what != "" {
		return s + " is " + what, "want an address that pods can reach"
	}
	return "", ""
}

// unfit says why no node and no service can have an address.
func unfit(a netip.Addr) string {
	switch a = a.Unmap(); {
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsMulticast():
		return "a multicast address"
	}
	return ""
}

// webURL checks a URL with one of the schemes. Text that holds a password is not repeated.
func webURL(s, want string, bare bool, schemes ...string) (problem, cure string) {
	if strings.Contains(s, "@") {
		return "holds a user name or a password", "want " + want
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || !strings.Contains(s, "://"):
		return strconv.Quote(s) + " is not a URL", "want " + want
	case !slices.Contains(schemes, u.Scheme):
		return "scheme " + strconv.Quote(u.Scheme), "want " + want
	case u.RawQuery != "" || u.ForceQuery || strings.Contains(s, "#"):
		return strconv.Quote(s) + " holds more than a URL's place", "want " + want
	case bare && u.Path != "":
		return strconv.Quote(s) + " holds a path", "want " + want
	case !isHostPort(u.Host):
		return strconv.Quote(u.Host) + " is not a host", "want " + want
	}
	return "", ""
}

// isHostPort says whether s is host[:port], the host a DNS name or an IP address, IPv6 in brackets.
func isHostPort(s string) bool {
	host := s
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.HasSuffix(s, "]") {
		port, err := strconv.ParseUint(s[i+1:], 10, 16)
		if err != nil || port == 0 {
			return false
		}
		host = s[:i]
	}
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
		a, err := netip.ParseAddr(host[1 : len(host)-1])
		return err == nil && a.Is6() && a.Zone() == ""
	}
	return isSubdomain(strings.ToLower(host))
}

func serverURL(s string) (problem, cure string) {
	const want = "https://host[:port]"
	if strings.HasPrefix(s, "http://") {
		return "scheme \"http\"", "want " + want + ": the node's credentials go there"
	}
	return webURL(s, want, true, "https")
}

func registryURL(s string) (problem, cure string) {
	return webURL(s, "https://host[:port][/path] or http://…", false, "http", "https")
}

func registryHost(s string) (problem, cure string) {
	if s == "_default" || isHostPort(s) {
		return "", ""
	}
	return strconv.Quote(s) + " is not a registry's host", `want host[:port] as in an image's name, such as "docker.io", or "_default"`
}

// certificateData checks the base64 of PEM that a kubeconfig's certificate-authority-data is as well.
func certificateData(s string) (problem, cure string) {
	const want = "want one line, as of base64 -w0 ca.crt"
	pem, err := base64.StdEncoding.DecodeString(s)
	switch {
	case err != nil:
		return "is not base64", want
	case strings.Contains(string(pem), "PRIVATE KEY-----"):
		return "holds a private key", "want only the certificate"
	case !strings.Contains(string(pem), "-----BEGIN CERTIFICATE-----"):
		return "holds no PEM certificate", want
	}
	return "", ""
}

func absolutePath(s string) (problem, cure string) {
	switch {
	case !strings.HasPrefix(s, "/"):
		return strconv.Quote(s) + " is not an absolute path", "want one that begins with /"
	case path.Clean(s) != s:
		return strconv.Quote(s) + " is not a plain path", "want " + strconv.Quote(path.Clean(s))
	}
	return "", ""
}

func filePath(s string) (problem, cure string) {
	if s == "/" {
		return `"/" is not a file`, "want the path of a file"
	}
	return absolutePath(s)
}

func device(s string) (problem, cure string) {
	if problem, cure = absolutePath(s); problem != "" {
		return problem, cure
	}
	if !strings.HasPrefix(s, "/dev/") {
		return strconv.Quote(s) + " is not below /dev", "want a device node or a glob of them, such as /dev/fuse or /dev/vfio/*"
	}
	if _, err := path.Match(s, ""); err != nil {
		return strconv.Quote(s) + " is a broken glob", "want * ? [a-z], or a backslash before one of them that is meant as it is"
	}
	return "", ""
}

// needed are the folders of the machine that a mount may not hide: what the machine boots from, and where berth and the
// machine's own systemd put things. Below those with closed true nothing may be mounted either: nspawn and the kernel
// fill them.
var needed = []struct {
	path   string
	closed bool
	why    string
}{
	{"/proc", true, "the kernel fills /proc"},
	{"/sys", true, "the kernel fills /sys"},
	{"/dev", true, "device nodes go into machine.devices"},
	{"/run/systemd", true, "systemd needs /run/systemd"},
	{"/run/dbus", true, "D-Bus needs /run/dbus"},
	{"/run/containerd", true, "containerd needs /run/containerd"},
	{"/run/host-nvidia", true, "berth needs /run/host-nvidia"},
	{"/usr/bin", false, "the machine's programs are in /usr"},
	{"/usr/sbin", false, "the machine's programs are in /usr"},
	{"/usr/lib", false, "the machine's programs are in /usr"},
	{"/bin", false, "the machine's programs are in /bin"},
	{"/sbin", false, "the machine's programs are in /sbin"},
	{"/lib", false, "the machine's libraries are in /lib"},
	{"/lib64", false, "the machine's libraries are in /lib64"},
	{"/etc/systemd/system", false, "berth writes /etc/systemd/system"},
	{"/etc/containerd", true, "berth writes /etc/containerd"},
	{"/etc/kubernetes/pki", false, "berth writes /etc/kubernetes/pki"},
	{"/var/lib/kubelet", false, "berth writes /var/lib/kubelet"},
}

func mountTarget(s string) (problem, cure string) {
	if problem, cure = absolutePath(s); problem != "" {
		return problem, cure
	}
	for _, n := range needed {
		if s == "/" || s == n.path || strings.HasPrefix(n.path, s+"/") || n.closed && strings.HasPrefix(s, n.path+"/") {
			return strconv.Quote(s) + " would hide what the machine needs", "want another folder: " + n.why
		}
	}
	return "", ""
}

func command(s string) (problem, cure string) {
	if s != "" && !strings.Contains(s, "/") {
		return "", "" // looked up in kubelet's PATH
	}
	if problem, _ = filePath(s); problem != "" {
		return problem, "want an absolute path inside the machine, or a name in PATH"
	}
	return "", ""
}

func variable(s string) (problem, cure string) {
	if s != "" && (s[0] < '0' || s[0] > '9') && all(s, func(c byte) bool { return isAlnum(c) || c == '_' }) {
		return "", ""
	}
	return strconv.Quote(s) + " is not a variable's name", "want A-Z a-z 0-9 _, not beginning with a digit"
}

// header checks a header's name, a token of RFC 9110.
func header(s string) (problem, cure string) {
	if s != "" && all(s, func(c byte) bool { return isAlnum(c) || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0 }) {
		return "", ""
	}
	return strconv.Quote(s) + " is not a header's name", `want a name such as "Authorization"`
}

// image checks an image's name only as far as a mistake would go unseen until the first pod.
func image(s string) (problem, cure string) {
	if s != "" && !strings.Contains(s, "://") && !strings.HasPrefix(s, "/") &&
		all(s, func(c byte) bool { return isAlnum(c) || strings.IndexByte("-_./:@", c) >= 0 }) {
		return "", ""
	}
	return strconv.Quote(s) + " is not an image's name", `want host/path:tag or host/path@digest, such as "registry.k8s.io/pause:3.10"`
}

// runtimeClass checks the name of a RuntimeClass's handler: a DNS label (node.k8s.io/v1).
func runtimeClass(s string) (problem, cure string) {
	if s == "runc" {
		return `"runc" is the runtime without GPUs`, `want another name, such as "nvidia"`
	}
	if len(s) <= 63 && isSubdomain(s) && !strings.Contains(s, ".") {
		return "", ""
	}
	return strconv.Quote(s) + " is not a runtime class", `want up to 63 of a-z 0-9 -, such as "nvidia"`
}
