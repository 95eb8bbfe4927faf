package facts

import (
	"cmp"
	"debug/buildinfo"
	"regexp"
	"strings"

	"berth/generator/file"
)

// Packages that bring the programs of a slot, in Debian and from their own projects.
var (
	containerdPackages = []string{"containerd", "containerd.io"}
	kubeletPackages    = []string{"kubelet"}
)

// Versions are what runs in a slot, as far as the root file system of its machine tells. Nothing in it is run, and what is unknown is
// empty.
type Versions struct {
	OS                  string // PRETTY_NAME= of os-release(5)
	Containerd, Kubelet string
}

// DiscoverVersions finds the versions in the root file system of a machine. containerd and kubelet are the paths of the programs in
// there.
func DiscoverVersions(root *file.Root, containerd, kubelet string) Versions {
	return Versions{
		OS:         prettyName(cmp.Or(root.Text("/etc/os-release", textLimit), root.Text("/usr/lib/os-release", textLimit))),
		Containerd: version(root, containerd, containerdPackages...),
		Kubelet:    version(root, kubelet, kubeletPackages...),
	}
}

// prettyName reads PRETTY_NAME= of os-release(5), whose values are quoted as for a shell; one with an escape in it is rare enough
// to be shown as it is.
func prettyName(text string) string {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			return strings.Trim(value, `"'`)
		}
	}
	return ""
}

// version returns the version of a Go program: of the package that owns it, else as the build recorded it. Distributions' packages
// come first, as their builds record no version, or that of the source alone.
func version(root *file.Root, name string, packages ...string) string {
	if v := packageVersion(root, name, packages...); v != "" {
		return v
	}
	if info := buildInfo(root, name); info != nil {
		return buildVersion(info)
	}
	return ""
}

// linkedVersion finds the variable with which Kubernetes and containerd are told their version when they are linked
// (k8s.io/component-base/version.gitVersion, github.com/containerd/containerd/version.Version).
var linkedVersion = regexp.MustCompile(`-X[ =]['"]?[^ =]*/version\.(?:gitVersion|Version)=([^ '"]+)`)

// buildVersion returns the version in a program's build information. -trimpath leaves out the linker's flags, and a build outside of
// version control has no version of its module.
func buildVersion(info *buildinfo.BuildInfo) string {
	for _, s := range info.Settings {
		if s.Key == "-ldflags" {
			if m := linkedVersion.FindStringSubmatch(s.Value); m != nil {
				return m[1]
			}
		}
	}
	// The module that holds the main package need not be the main module.
	module := info.Main
	for _, m := range info.Deps {
		if strings.HasPrefix(info.Path, m.Path+"/") && (module == info.Main || len(m.Path) > len(module.Path)) {
			module = *m
		}
	}
	if module.Version == "(devel)" {
		return ""
	}
	return module.Version
}
