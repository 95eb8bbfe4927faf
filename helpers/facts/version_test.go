package facts

import (
	"debug/buildinfo"
	"runtime/debug"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBuildVersion(t *testing.T) {
	for _, c := range []struct {
		reason, want string
		info         buildinfo.BuildInfo
	}{
		{"the linker was told, as in Kubernetes' own builds without -trimpath", "v1.35.0", buildinfo.BuildInfo{
			Main: debug.Module{Path: "k8s.io/kubernetes", Version: "(devel)"}, Path: "k8s.io/kubernetes/cmd/kubelet",
			Settings: []debug.BuildSetting{{Key: "-ldflags", Value: "all=-s -w -X 'k8s.io/client-go/pkg/version.gitMajor=1' " +
				"-X 'k8s.io/component-base/version.gitVersion=v1.35.0'"}}}},
		{"the linker was told, as in containerd's Makefile", "v1.7.24", buildinfo.BuildInfo{
			Main: debug.Module{Path: "github.com/containerd/containerd", Version: "(devel)"}, Path: "github.com/containerd/containerd/cmd/containerd",
			Settings: []debug.BuildSetting{{Key: "-ldflags", Value: "-X github.com/containerd/containerd/version.Version=v1.7.24 -s -w"}}}},
		{"built by go install module@version", "v2.1.9", buildinfo.BuildInfo{
			Main: debug.Module{Path: "github.com/containerd/containerd/v2", Version: "v2.1.9"}, Path: "github.com/containerd/containerd/v2/cmd/containerd"}},
		{"built from another module, which needs Kubernetes' own", "v1.34.1", buildinfo.BuildInfo{
			Main: debug.Module{Path: "example.com/build", Version: "v0.1.0"}, Path: "k8s.io/kubernetes/cmd/kubelet",
			Deps: []*debug.Module{{Path: "k8s.io/kube", Version: "v9"}, {Path: "k8s.io/kubernetes", Version: "v1.34.1"}}}},
		{"a build outside of version control knows nothing", "", buildinfo.BuildInfo{
			Main: debug.Module{Path: "k8s.io/kubernetes", Version: "(devel)"}, Path: "k8s.io/kubernetes/cmd/kubelet"}},
		{"a distribution's build without modules", "", buildinfo.BuildInfo{Path: "github.com/containerd/containerd/cmd/containerd"}},
	} {
		if got := buildVersion(&c.info); got != c.want {
			t.Errorf("%s: got %q, want %q", c.reason, got, c.want)
		}
	}
}

func TestDiscoverVersions(t *testing.T) {
	root := tree(t, map[string]string{
		"usr/lib/os-release":                "NAME=\"Debian GNU/Linux\"\nPRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\n",
		"usr/bin/containerd":                "",
		"var/lib/dpkg/info/containerd.list": "/usr/bin/containerd\n",
		"usr/bin/kubelet":                   "",
		"var/lib/dpkg/info/kubelet.list":    "/usr/bin/kubelet\n",
		"var/lib/dpkg/status":               "Package: kubelet\nStatus: install ok installed\nVersion: 1.35.0-1.1\n\nPackage: containerd\nStatus: install ok installed\nVersion: 1.7.24~ds1-6+b4\n",
	})
	want := Versions{OS: "Debian GNU/Linux 13 (trixie)", Containerd: "1.7.24~ds1-6+b4", Kubelet: "1.35.0-1.1"}
	if diff := cmp.Diff(want, DiscoverVersions(root, "/usr/bin/containerd", "/usr/bin/kubelet")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff(Versions{}, DiscoverVersions(tree(t, nil), "/usr/bin/containerd", "/usr/bin/kubelet")); diff != "" {
		t.Errorf("nothing there, -want +got:\n%s", diff)
	}
}
