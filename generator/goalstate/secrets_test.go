package goalstate

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSecrets(t *testing.T) {
	main := `boot = "a"
[cluster]
server = "https://10.0.0.1:6443"
[kubelet]
bootstrap_token = "abcdef.0123456789abcdef"
exec = { command = "/usr/bin/login", args = ["--token-file"], env = { AWS_PROFILE = "x", TOKEN_FILE = "/etc/token", CLIENT_SECRET = "s3cret", EMPTY_TOKEN = "" } }
[kubelet.labels]
"example.com/token" = "x"
[kubelet.config.staticPodURLHeader]
X-Any = ["s3cret"]
[containerd.registry."example.com"]
mirrors = [{ url = "http://127.0.0.1:5000", header = { Authorization = ["Basic x"] } }]
[slot.a.containerd.config.plugins."io.containerd.grpc.v1.cri".registry.configs."example.com".auth]
username = "u"
password = "s3cret"
[slot.b.kubelet]
bootstrap_token_credential = "token"
[slot.c.kubelet]
bootstrap_token_file = "/etc/token"
[slot.d.kubelet]
bootstrap_token = "abcdef.0123456789abcdef"
`
	got := Secrets([]Source{{"/etc/berth/goal.toml", []byte(main)}, {"/drop-in", []byte("\xef\xbb\xbfkubelet.bootstrap_token = 'x'\nkubelet = ")}})
	want := []Secret{
		{"/etc/berth/goal.toml", 5, 1, "kubelet.bootstrap_token"},
		{"/etc/berth/goal.toml", 6, 117, "kubelet.exec.env.CLIENT_SECRET"},
		{"/etc/berth/goal.toml", 10, 10, "kubelet.config.staticPodURLHeader.X-Any[0]"},
		{"/etc/berth/goal.toml", 12, 73, `containerd.registry."example.com".mirrors[0].header.Authorization[0]`},
		{"/etc/berth/goal.toml", 14, 1, `slot.a.containerd.config.plugins."io.containerd.grpc.v1.cri".registry.configs."example.com".auth.username`},
		{"/etc/berth/goal.toml", 15, 1, `slot.a.containerd.config.plugins."io.containerd.grpc.v1.cri".registry.configs."example.com".auth.password`},
		{"/etc/berth/goal.toml", 21, 1, "slot.d.kubelet.bootstrap_token"},
		{"/drop-in", 1, 9, "kubelet.bootstrap_token"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
