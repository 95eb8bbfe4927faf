package render

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"berth/generator/goalstate"
	"berth/generator/unit"
	"berth/helpers/facts"
	"berth/helpers/nvidia"
)

// Paths inside the machine.
const (
	containerdConfig = "/etc/containerd/config.toml"
	registries       = "/etc/containerd/certs.d"
	// noRefresh keeps a service of the container toolkit (1.18 and later) from writing the same CDI specification.
	noRefresh = units + "/nvidia-cdi-refresh.service.d/50-berth.conf"
)

// defaultPath is where systemd looks for programs, and what services get as PATH (systemd.exec(5), version 252; newer
// versions leave out the sbin folders where these are links).
var defaultPath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"}

// layout says where a version of containerd's configuration has berth's settings. Each of the two generations ignores the
// tables of the other without a word.
type layout struct {
	// images, runtime: the plugins that pull images and run containers.
	images, runtime string
	// foreign are what the other generation's plugins were called, and which of their keys do nothing here.
	foreign map[string][]string
}

const (
	criV1        = "io.containerd.grpc.v1.cri"
	criV2Images  = "io.containerd.cri.v1.images"
	criV2Runtime = "io.containerd.cri.v1.runtime"
)

// layouts by config version: 2 is containerd 1.x, 3 is containerd 2.x
// (https://github.com/containerd/containerd/blob/main/docs/cri/config.md).
var layouts = map[int]layout{
	2: {criV1, criV1, map[string][]string{criV2Images: nil, criV2Runtime: nil}},
	// In 2.x the old plugin still exists, for the settings of its streaming server.
	3: {criV2Images, criV2Runtime, map[string][]string{
		criV1: {"cdi_spec_dirs", "cni", "containerd", "enable_cdi", "registry", "sandbox_image"},
	}},
}

// Containerd renders, with paths relative to the machine's root, containerd's configuration, its registries and unit, and
// the target that the node's services are enabled in.
func Containerd(slot *goalstate.Slot, sources []string, h facts.Host, m facts.Machine) (Output, error) {
	r := &renderer{slot: slot, sources: sources}
	c := slot.Containerd
	r.binary("containerd.binary", c.Binary, m.Containerd, m)
	r.binary("containerd.runc", c.Runc, m.Runc, m)
	if version, ok := r.configVersion(m); ok {
		r.addConfig(version, h, m)
	}
	if h.GPU {
		r.add(noRefresh, "no-cdi-refresh.conf", map[string]string{"PATH": "/" + noRefresh})
	} else {
		r.out.Remove = append(r.out.Remove, noRefresh)
	}
	for _, host := range slices.Sorted(maps.Keys(c.Registry)) {
		add := r.add
		if slices.ContainsFunc(c.Registry[host].Mirrors, func(m goalstate.Mirror) bool { return len(m.Header) > 0 }) {
			add = r.secret // Authorization, for instance
		}
		add(path.Join(registries[1:], host, "hosts.toml"), "hosts.toml", map[string]string{"CONFIG": hosts(c.Registry[host])})
	}
	for _, host := range m.Registries {
		if _, wanted := c.Registry[host]; !wanted {
			r.out.Remove = append(r.out.Remove, path.Join(registries[1:], host, "hosts.toml"))
		}
	}
	r.add(units+"/containerd.service", "containerd.service", map[string]string{
		"PATH": pathLine(c.Binary, c.Runc), "COMMAND": r.command("containerd.binary", c.Binary, "--config", containerdConfig),
	})
	r.add(units+"/"+stack, "node-stack.target", map[string]string{})
	r.add(units+"/var-lib-machines.mount.d/50-berth.conf", "no-machines-wait.conf", map[string]string{})
	r.enable("containerd.service")
	r.disable("containerd.service", m)
	r.add("etc/tmpfiles.d/berth.conf", "machine-tmpfiles.conf", map[string]string{})
	return r.done()
}

// configVersion is the goal state's, else that of the containerd in the root file system.
func (r *renderer) configVersion(m facts.Machine) (version int, ok bool) {
	switch c := r.slot.Containerd; {
	case c.ConfigVersion != 0:
		return c.ConfigVersion, true
	case m.Containerd.Problem != "":
		return 0, false // already said, and there is nothing to go by
	case strings.HasPrefix(m.ContainerdMain, "github.com/containerd/containerd/v2/"):
		return 3, true
	case strings.HasPrefix(m.ContainerdMain, "github.com/containerd/containerd/"):
		return 2, true
	case strings.HasPrefix(m.ContainerdPackage, "1."):
		return 2, true
	case strings.HasPrefix(m.ContainerdPackage, "2."):
		return 3, true
	}
	r.errorf("containerd.config_version: cannot tell the version of %s in %s: it holds no Go build information, and no "+
		"installed package says: set containerd.config_version to 2 (containerd 1.x) or 3 (containerd 2.x)",
		r.slot.Containerd.Binary, m.Root)
	return 0, false
}

// credentials are the tables of containerd's registry settings that may hold some: "auths" by URL, "configs" by host with a table
// "auth", and the headers of every request (Registry of containerd's pkg/cri/config, 1.x and 2.x).
var credentials = []string{"auths", "configs", "headers"}

// addConfig adds containerd's configuration, as a secret if it holds credentials of registries.
func (r *renderer) addConfig(version int, h facts.Host, m facts.Machine) {
	config := r.containerdConfig(version, h, m)
	add := r.add
	for _, key := range credentials {
		if at(config, "plugins", layouts[version].images, "registry", key) != nil {
			add = r.secret
		}
	}
	add(containerdConfig[1:], "containerd-config.toml", map[string]string{"CONFIG": encode(config)})
}

// containerdConfig is berth's defaults with the user's tables over them.
func (r *renderer) containerdConfig(version int, h facts.Host, m facts.Machine) map[string]any {
	c, l := r.slot.Containerd, layouts[version]
	cni := map[string]any{"conf_dir": "/etc/cni/net.d"}
	if version == 2 {
		// In 2.x that is the default, and has to stay unsaid: 2.1 renamed bin_dir to bin_dirs, and who sets the one beside
		// the other gets a containerd without its CRI plugin.
		cni["bin_dir"] = "/opt/cni/bin"
	}
	runtime := map[string]any{
		// Unknown to 1.6 and older, which ignore it.
		"enable_cdi":    true,
		"cdi_spec_dirs": []any{"/etc/cdi", nvidia.CDIDir},
		"cni":           cni,
		"containerd": map[string]any{
			"default_runtime_name": "runc",
			"runtimes":             map[string]any{"runc": ociRuntime(c.Runc)},
		},
	}
	if h.GPU {
		r.addNVIDIA(at(runtime, "containerd"), m)
	}
	registry := map[string]any{"config_path": registries}
	plugins := map[string]any{l.runtime: runtime}
	if version == 2 {
		runtime["sandbox_image"] = c.SandboxImage
		runtime["registry"] = registry
	} else {
		plugins[l.images] = map[string]any{"registry": registry, "pinned_images": map[string]any{"sandbox": c.SandboxImage}}
	}
	config := map[string]any{
		"version": version,
		// An address would be open to all on the host's network, which the machine shares.
		"metrics": map[string]any{"address": ""},
		"plugins": plugins,
	}
	r.checkPlugins(version)
	merge(config, c.Config)
	if h.GPU {
		r.keepCDI(at(config, "plugins", l.runtime), l)
	}
	if _, set := c.Config["imports"]; set && version == 2 {
		r.warnf("containerd.config.imports: containerd 1.x replaces whole tables by those of an imported file: one with a runtime " +
			"in it takes away all others: put its tables into containerd.config instead")
	}
	return config
}

// ociRuntime is the table of a runtime that is called as runc is.
func ociRuntime(binary string) map[string]any {
	return map[string]any{
		"runtime_type": "io.containerd.runc.v2",
		// A session keyring per container would count against one quota of the host's kernel.
		"options": map[string]any{"BinaryName": binary, "SystemdCgroup": true, "NoNewKeyring": true},
	}
}

// addNVIDIA adds the runtime class of the host's GPUs. nvidia-container-runtime calls runc, and understands the environment
// variables by which some pods ask for a GPU; without it, runc itself will do for all that ask by CDI.
func (r *renderer) addNVIDIA(containerd map[string]any, m facts.Machine) {
	n := r.slot.NVIDIA
	runtime := ociRuntime(cmp.Or(m.NVIDIARuntime, r.slot.Containerd.Runc))
	containerd["runtimes"].(map[string]any)[n.RuntimeClass] = runtime
	if n.DefaultRuntime {
		containerd["default_runtime_name"] = n.RuntimeClass
	}
	if old, _ := path.Match("1.[0-6].*", m.ContainerdPackage); old && m.NVIDIARuntime == "" {
		r.warnf("nvidia: containerd %s has no CDI (1.7 and later have), and there is no nvidia-container-runtime in %s: no pod can use a GPU: "+
			"install a newer containerd, or the NVIDIA Container Toolkit", m.ContainerdPackage, m.Root)
	}
}

// keepCDI makes sure that containerd looks for the GPUs' CDI specification where nvidia-wire puts it, whatever
// containerd.config says.
func (r *renderer) keepCDI(runtime map[string]any, l layout) {
	key := fmt.Sprintf("containerd.config.plugins.%q", l.runtime)
	if runtime["enable_cdi"] != true {
		r.errorf("%s.enable_cdi: the slot's GPUs need CDI: leave it true, or set nvidia.mode to off", key)
	}
	dirs, ok := runtime["cdi_spec_dirs"].([]any)
	if !ok {
		r.errorf("%s.cdi_spec_dirs: want a list of folders", key)
	} else if !slices.Contains(dirs, any(nvidia.CDIDir)) {
		runtime["cdi_spec_dirs"] = append(slices.Clone(dirs), nvidia.CDIDir)
	}
}

// checkPlugins refuses settings in the goal state that this version of containerd would ignore without a word.
func (r *renderer) checkPlugins(version int) {
	l := layouts[version]
	for _, plugin := range slices.Sorted(maps.Keys(l.foreign)) {
		keys, table := l.foreign[plugin], at(r.slot.Containerd.Config, "plugins", plugin)
		if keys == nil {
			keys = slices.Sorted(maps.Keys(table))
		}
		for _, key := range keys {
			if _, set := table[key]; set {
				r.errorf("containerd.config.plugins.%q.%s: has no effect in config version %d, which this slot's containerd takes: "+
					"its place is there in %s", plugin, key, version, strings.Join(slices.Compact([]string{l.images, l.runtime}), " or "))
			}
		}
	}
}

// hosts is the hosts.toml of a registry. The order of its mirrors is that of their tables in the file, so each is encoded
// by itself: https://github.com/containerd/containerd/blob/main/docs/hosts.md
func hosts(g goalstate.Registry) string {
	var parts []string
	if g.Server != "" {
		parts = append(parts, encode(map[string]any{"server": g.Server}))
	}
	for _, m := range g.Mirrors {
		t := map[string]any{}
		if len(m.Capabilities) > 0 {
			t["capabilities"] = m.Capabilities
		}
		if m.CA != "" {
			t["ca"] = m.CA
		}
		if m.SkipVerify {
			t["skip_verify"] = true
		}
		if m.OverridePath {
			t["override_path"] = true
		}
		if len(m.Header) > 0 {
			t["header"] = m.Header
		}
		// A parent's header line may stand in a file only once, and need not.
		parts = append(parts, strings.TrimPrefix(encode(map[string]any{"host": map[string]any{m.URL: t}}), "[host]\n"))
	}
	return strings.Join(parts, "\n\n")
}

// pathLine is the Environment= line for programs outside of the usual folders: containerd looks for its shim, and the shim
// for runc's helpers, in PATH. It is empty where the default will do.
func pathLine(programs ...string) string {
	var more []string
	for _, p := range programs {
		// PATH has no way to write a colon.
		if dir := path.Dir(p); !slices.Contains(defaultPath, dir) && !slices.Contains(more, dir) && !strings.Contains(dir, ":") {
			more = append(more, dir)
		}
	}
	if more == nil {
		return ""
	}
	return "Environment=" + unit.Word("PATH="+strings.Join(append(more, defaultPath...), ":"))
}
