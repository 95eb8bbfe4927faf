package node

import (
	"errors"
	"fmt"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"

	"berth/testdata/gpu"
)

const (
	// driverPlace is where the host's driver is in a machine, spec what its containerd reads of the GPUs.
	driverPlace = "/run/host-nvidia"
	spec        = "/run/cdi/nvidia.yaml"
	wire        = "node-nvidia-wire@a"

	modeRequired = "[nvidia]\nmode = \"required\"\n"
	modeOff      = "[nvidia]\nmode = \"off\"\n"
)

// The driver before and after an upgrade: the newer one is in two folders.
var (
	driver550 = gpu.Driver{Version: "550.54.15", Libraries: 60}
	driver560 = gpu.Driver{Version: "560.35.03", Libraries: 120, Folders: []string{libraryFolder, "opt/nvidia/lib"}}
)

// libraryFolder is Debian's, on the host as in the machine.
var libraryFolder = path.Dir(gpu.Driver{Libraries: 1}.Libs()[0].File)

var nvidiaCases = []testCase{
	{"23 a host's GPUs in the machine, from its first start until they are gone", func(t *testing.T, h *host) {
		// A driver that nobody has used yet has no nodes.
		nodes := slices.Concat(gpu.Headless(2), []gpu.Node{gpu.Modeset}, gpu.Caps(1, 2, 3, 4), gpu.IMEX(2), gpu.DRI(2))
		h.gpu(t, GPU{Driver: driver550, Makable: nodes})
		h.goal(t, Goal+budgets+modeRequired+userRuntime(h))
		h.start(t, "a")
		before := h.runs(t, "a")
		want(t, h.Must(t, "cat "+ModprobeRecord), "-u -c 0")

		openable(t, h, paths(nodes)...)
		wantWired(t, h, driver550)
		text := wantSpec(t, h, driver550)
		for _, n := range nodes {
			if !strings.Contains(n.Path, "channel") && !strings.HasSuffix(n.Path, "cap1") && !strings.HasSuffix(n.Path, "cap2") {
				want(t, text, "path: /"+n.Path+"\n")
			}
		}
		for _, hook := range []string{"create-symlinks", "update-ldcache", "disable-device-node-modification"} {
			want(t, text, "- "+hook+"\n")
		}
		for _, hook := range []string{"enable-cuda-compat", "update-application-profile"} {
			if strings.Contains(text, hook) {
				t.Errorf("the specification has the hook %s", hook)
			}
		}
		if out := h.inside(t, "nvidia-smi -L"); out != "nvidia-smi 550.54.15 -L" {
			t.Errorf("nvidia-smi -L in the machine: %q", out)
		}

		// Cases 27 and 28. runc 1.1.3 to 1.1.6 leaves devices without a link of this kind out of DeviceAllow=.
		var links, targets []string
		for _, n := range nodes {
			if !strings.Contains(n.Path, "dri/") {
				links, targets = append(links, fmt.Sprintf("/dev/char/%d:%d", n.Major, n.Minor)), append(targets, "/"+n.Path)
			}
		}
		if diff := cmp.Diff(targets, strings.Fields(h.inside(t, "readlink -f "+strings.Join(links, " ")))); diff != "" {
			t.Errorf("targets of /dev/char, -want +got:\n%s", diff)
		}
		containers := h.pods(t, nodes[3])
		h.Must(t, "systemctl daemon-reload; systemctl --machine=node-a daemon-reload")
		openable(t, h, paths(nodes)...)
		containers()
		closed(t, h)
		startedAfterWiring(t, h)
		if diff := cmp.Diff(before, h.runs(t, "a")); diff != "" {
			t.Errorf("a step ran again, -before +after:\n%s", diff)
		}
		want(t, property(t, h, wire, "StatusText"), "550.54.15")
		wantRuntimes(t, h)

		// Case 24. The newer one has no modeset, caps or channels, and more libraries, in one folder more.
		nodes = gpu.Headless(1)
		h.gpu(t, GPU{Driver: driver560, Nodes: nodes})
		h.Must(t, "systemctl restart node@a")
		h.awaitAnew(t, "a", before)
		openable(t, h, paths(nodes)...)
		wantWired(t, h, driver560)
		wantSpec(t, h, driver560)
		if out := h.inside(t, "find /dev -name '*nvidia*' -printf '%p ' -type d | xargs -n1 | grep -e modeset -e caps -e nvidia1 || true"); out != "" {
			t.Errorf("nodes of the driver before: %s", out)
		}

		// The links of the last run are still in the machine when the GPU is gone.
		if err := WithdrawGPU(h.Host); err != nil {
			t.Fatal(err)
		}
		h.goal(t, Goal+budgets)
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
		wantUnwired(t, h)

		// The same with the mode off, and a GPU.
		h.gpu(t, GPU{Driver: driver550, Nodes: nodes})
		h.Must(t, `cd /var/lib/machines/node-a
			ln -s /run/host-nvidia/1/libcuda.so.1 `+libraryFolder+`/libcuda.so.1
			ln -s /run/host-nvidia/bin/nvidia-smi usr/bin/nvidia-smi`)
		h.goal(t, Goal+budgets+modeOff)
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
		wantUnwired(t, h)
		if out := h.inside(t, "ls /dev"); strings.Contains(out, "nvidia") {
			t.Errorf("the mode is off, but the machine's /dev has %s", out)
		}
	}},
	{"23 GPUs without libraries", func(t *testing.T, h *host) {
		h.gpu(t, GPU{Driver: gpu.Driver{Version: "550.54.15"}, Nodes: gpu.Headless(1)})
		h.start(t, "a")
		want(t, h.Must(t, "journalctl --no-pager --output=cat PRIORITY=4 -u "+wire), "libcuda.so.1", "libnvidia-ml.so.1")
		wantUnwired(t, h)
		h.goal(t, Goal+budgets+modeRequired)
		want(t, h.failure(t, "systemctl restart node@a"), "step "+wire+".service failed: ", "libcuda.so.1", "libnvidia-ml.so.1")
	}},
	{"26 what is wrong with the GPUs keeps kubelet from starting", func(t *testing.T, h *host) {
		h.gpu(t, GPU{Driver: driver550, Nodes: gpu.Headless(1)})
		h.start(t, "a")
		h.Must(t, "cp "+h.machinePath(t)+spec+" /run/good.yaml")
		machine := "/var/lib/machines/node-a"
		ctk, hook, libcuda := machine+"/usr/bin/nvidia-ctk", machine+"/usr/bin/nvidia-cdi-hook", machine+"/"+libraryFolder+"/libcuda.so.1"
		for _, c := range []struct {
			reason     string
			knob       string // a file of testdata/stubctk
			value      string
			spoil, fix string // shell scripts
			want       []string
		}{
			{reason: "nvidia-ctk fails", knob: "fail", value: "NVML is on holiday", want: []string{"nvidia-ctk", "NVML is on holiday"}},
			{reason: "nvidia-ctk is too old", knob: "old", want: []string{"--disable-hook", "NVIDIA Container Toolkit 1.18 or newer"}},
			{reason: "no control node in the specification", knob: "omit", value: "nvidiactl", want: []string{"/dev/nvidiactl"}},
			{reason: "no uvm node in the specification", knob: "omit", value: "nvidia-uvm", want: []string{"/dev/nvidia-uvm"}},
			{reason: "a path that does not exist", knob: "extra-mount", value: "/none/such", want: []string{"/none/such"}},
			{reason: "no YAML", knob: "garbage", value: "}{", want: []string{"nvidia.yaml"}},
			{reason: "YAML, but no specification", knob: "garbage", value: "hello: world\n", want: []string{"nvidia.yaml"}},
			{reason: "nothing at all", knob: "garbage", want: []string{"nvidia.yaml"}},
			{reason: "devices that nobody asks for", knob: "kind", value: "example.com/device", want: []string{"example.com/device", "nvidia.com/gpu"}},
			{reason: "no nvidia-ctk", spoil: "mv " + ctk + " /run/ctk", fix: "mv /run/ctk " + ctk, want: []string{"nvidia-ctk", "NVIDIA Container Toolkit 1.18 or newer"}},
			{reason: "no hook", spoil: "rm " + hook, fix: "echo '#!/bin/sh' >" + hook + "; chmod 755 " + hook, want: []string{"/usr/bin/nvidia-cdi-hook"}},
			{reason: "the image has a libcuda of its own", spoil: "rm " + libcuda + "; echo >" + libcuda, fix: "rm " + libcuda,
				want: []string{"/" + libraryFolder + "/libcuda.so.1"}},
			{reason: "25 the kernel's module is another one", spoil: "echo 560.35.03 >/" + moduleVersion, fix: "echo 550.54.15 >/" + moduleVersion,
				want: []string{"550.54.15", "560.35.03"}},
			{reason: "the driver was upgraded under a running machine", spoil: "mkdir /run/old; mv /" + libraryFolder + "/libcuda.so.550* /run/old; cp /run/old/* /opt; " +
				"echo /opt >/etc/ld.so.conf.d/opt.conf; ldconfig",
				fix:  "mv /run/old/* /" + libraryFolder + "; rm -r /run/old /opt/libcuda* /etc/ld.so.conf.d/opt.conf; ldconfig; ln -sf libcuda.so.1 /" + libraryFolder + "/libcuda.so; ldconfig",
				want: []string{"systemctl restart node@a"}},
		} {
			t.Run(c.reason, func(t *testing.T) {
				if c.knob != "" {
					h.write(t, "node-a:/etc/stubctk/"+c.knob, c.value)
				}
				h.Must(t, c.spoil)
				h.wireFails(t, c.want...)
				h.Must(t, "rm -rf "+machine+"/etc/stubctk")
				h.Must(t, c.fix)
			})
		}
		t.Run("nvidia-ctk hangs", func(t *testing.T) {
			h.write(t, "node-a:/etc/stubctk/hang", "")
			h.goal(t, Goal+strings.Replace(budgets, `after_start = "30s"`, `after_start = "2s"`, 1))
			h.wireFails(t, "not within 2s: nvidia-ctk")
			if out, exit := h.try(t, "pgrep -x nvidia-ctk"); exit == 0 {
				t.Errorf("nvidia-ctk still runs: %s", out)
			}
			h.goal(t, Goal+budgets)
			h.Must(t, "rm -r "+machine+"/etc/stubctk")
		})
		h.Must(t, "systemctl restart "+wire)
		wantWired(t, h, driver550)
		wantSpec(t, h, driver550)
	}},
	{"26 the real nvidia-ctk", func(t *testing.T, h *host) {
		nodes := slices.Concat(gpu.Headless(2), gpu.Caps(1, 2), gpu.IMEX(1))
		h.gpu(t, GPU{Driver: driver560, Nodes: nodes})
		if err := InstallRealToolkit(h.MachineRoot("node-a")); errors.Is(err, exec.ErrNotFound) {
			t.Skipf("nvidia-ctk is written in C, too: %v", err)
		} else if err != nil {
			t.Fatal(err)
		}
		// Without a GPU it says what it could not do.
		said := h.failure(t, "systemctl start node@a")
		if strings.Contains(said, "GLIBC_") {
			t.Skip("nvidia-ctk is built for a newer C library than this machine's")
		}
		want(t, said, "step "+wire+".service failed: nvidia-ctk", "failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND")
		if state, exit := h.try(t, "systemctl --machine=node-a is-active kubelet"); exit == 0 {
			t.Errorf("kubelet is %s; want it not started", state)
		}
		if out := h.inside(t, "find /run -name '*nvidia*.yaml'"); out != "" {
			t.Errorf("a specification is left: %s", out)
		}
		// Its mode for programs that manage GPUs takes what is there, and asks no GPU.
		h.Must(t, "mv /var/lib/machines/node-a/usr/bin/nvidia-ctk /var/lib/machines/node-a/opt/")
		h.write(t, "node-a:/usr/bin/nvidia-ctk", "#!/bin/sh\nexec /opt/nvidia-ctk \"$@\" --mode=management\n")
		h.Must(t, "chmod 755 /var/lib/machines/node-a/usr/bin/nvidia-ctk; systemctl restart node@a")
		h.wantUp(t, "a")
		text := wantSpec(t, h, driver560)
		for _, node := range paths(nodes) {
			want(t, text, "- path: "+node+"\n")
		}
		// With a GPU, as far as that can be had without one.
		h.Must(t, "mv /var/lib/machines/node-a"+MockedCTK+" /var/lib/machines/node-a/usr/bin/nvidia-ctk; systemctl restart "+wire)
		text = wantSpec(t, h, driver560)
		want(t, text, "- name: \"0\"\n", "- name: \"1\"\n", "- name: GPU-", "- name: all\n", "- create-symlinks\n", "- update-ldcache\n",
			"- disable-device-node-modification\n", "hostPath: /dev/null\n")
	}},
	{"AMD's GPUs are bound", func(t *testing.T, h *host) {
		nodes := append(gpu.DRI(1), gpu.KFD)
		h.gpu(t, GPU{Driver: gpu.Driver{Version: "1.2"}, Nodes: nodes})
		h.Must(t, "rm -r /sys/module/nvidia; mkdir -p /sys/module/amdgpu; echo 6.7.0 >/sys/module/amdgpu/version")
		defer h.Must(t, "rm -r /sys/module/amdgpu")
		h.start(t, "a")
		openable(t, h, paths(nodes)...)
		if out := h.inside(t, "cat /sys/module/amdgpu/version; touch /sys/module/amdgpu/no 2>/dev/null && echo writable || true"); out != "6.7.0" {
			t.Errorf("/sys/module/amdgpu in the machine: %q", out)
		}
	}},
}

// gpu gives the host GPUs, until the next case.
func (h *host) gpu(t *testing.T, g GPU) {
	t.Helper()
	if err := g.Install(t.Context(), h.Host); err != nil {
		t.Fatal(err)
	}
}

func paths(nodes []gpu.Node) []string {
	var paths []string
	for _, n := range nodes {
		paths = append(paths, "/"+n.Path)
	}
	return paths
}

// machinePath is where the root of slot a's running machine is, as seen from the host: with its /run.
func (h *host) machinePath(t *testing.T) string {
	t.Helper()
	return "/proc/" + h.Must(t, "machinectl show --property=Leader --value node-a") + "/root"
}

// wireFails requires that the wiring of slot a fails with reasons, and leaves no specification, not even of an earlier run.
func (h *host) wireFails(t *testing.T, reasons ...string) {
	t.Helper()
	run := h.machinePath(t) + "/run"
	h.Must(t, "mkdir -p "+run+"/cdi; cd "+run+"/cdi; for kind in '' coherent.; do cp /run/good.yaml nvidia.${kind}yaml; done")
	// Not those of node@a: systemd 252 leaves out of them the first line of a step that is started alone.
	want(t, h.failureOf(t, "systemctl restart "+wire, wire), reasons...)
	if left := h.Must(t, "cd "+run+"; find . -name '*nvidia*.yaml' -o -name '*nvidia*.json'"); left != "" {
		t.Errorf("a specification is left: %s", left)
	}
	if out, exit := h.try(t, "systemctl --machine=node-a is-active kubelet"); exit == 0 {
		t.Errorf("kubelet runs: %s", out)
	}
}

// wantWired fails unless the machine has links to all of the driver, and to nothing else, and its linker's cache knows them.
func wantWired(t *testing.T, h *host, d gpu.Driver) {
	t.Helper()
	links, cached := map[string]string{}, map[string]bool{}
	for _, lib := range d.Libs() {
		links["/"+libraryFolder+"/"+lib.Soname], links["/"+libraryFolder+"/"+path.Base(lib.File)] = path.Base(lib.File), path.Base(lib.File)
		cached[lib.Soname] = true
		if soname := lib.Soname; soname == "libcuda.so.1" || soname == "libnvidia-ml.so.1" || soname == "libnvcuvid.so.1" {
			links["/"+libraryFolder+"/"+strings.TrimSuffix(soname, ".1")] = path.Base(lib.File)
		}
	}
	for _, tool := range gpu.Tools {
		links["/usr/bin/"+tool] = tool
	}
	got := map[string]string{}
	for line := range strings.Lines(h.inside(t, "find /usr -lname '"+driverPlace+"/*' -printf '%p %l\\n'")) {
		link, target, _ := strings.Cut(strings.TrimSpace(line), " ")
		got[link] = path.Base(target)
	}
	if diff := cmp.Diff(links, got); diff != "" {
		t.Errorf("links in the machine, -want +got:\n%s", diff)
	}
	if out := h.inside(t, "find /usr -lname '"+driverPlace+"/*' -xtype l"); out != "" {
		t.Errorf("links that lead nowhere: %s", out)
	}
	out := h.inside(t, "ldconfig -p")
	for line := range strings.Lines(out) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(line, "libcuda") && !strings.Contains(line, strings.TrimPrefix(libraryFolder, "usr")) {
			t.Errorf("cache of the linker: %s", line)
		}
		delete(cached, name)
	}
	if len(cached) > 0 {
		t.Errorf("not in the linker's cache: %v", cached)
	}
	for _, other := range []string{"550.54.15", "560.35.03"} {
		if other != d.Version && strings.Contains(out, other) {
			t.Errorf("the linker's cache has libraries of %s:\n%s", other, out)
		}
	}
}

// wantUnwired fails if anything of a driver is left in the machine.
func wantUnwired(t *testing.T, h *host) {
	t.Helper()
	if out := h.inside(t, `find /usr -lname '`+driverPlace+`/*'
		ldconfig -p | grep -e libcuda -e libnvidia || true
		ls /run/cdi 2>/dev/null || true`); out != "" {
		t.Errorf("left of the driver: %s", out)
	}
}

// wantSpec fails unless the specification that containerd reads is the only one and has all of the driver. It returns it.
func wantSpec(t *testing.T, h *host, d gpu.Driver) string {
	t.Helper()
	if out := h.inside(t, "ls -A /run/cdi; stat -c '%a %U' "+spec+"; find "+driverPlace+" -maxdepth 2 -name '*.yaml'"); out != "nvidia.yaml\n644 root" {
		t.Errorf("in /run/cdi, or staged: %q", out)
	}
	text := h.inside(t, "cat "+spec) + "\n"
	want(t, text, "kind: nvidia.com/gpu\n", "path: /dev/nvidiactl\n", "path: /dev/nvidia-uvm\n", "path: /dev/nvidia0\n", "hostPath: /usr/bin/nvidia-smi\n")
	for _, lib := range d.Libs() {
		want(t, text, "/"+path.Base(lib.File)+"\n")
	}
	for _, other := range []string{"550.54.15", "560.35.03"} {
		if other != d.Version && strings.Contains(text, other) {
			t.Errorf("the specification has something of %s:\n%s", other, text)
		}
	}
	return text
}

// pods starts in slot a's machine a unit that may use the GPU, as runc makes them for containers, and returns what fails unless it
// still may, and a unit made then may, too.
func (h *host) pods(t *testing.T, node gpu.Node) (check func()) {
	t.Helper()
	unit := func(name string) {
		args := "--property=DevicePolicy=strict"
		for _, number := range []string{"1:3", "195:255", fmt.Sprintf("%d:%d", node.Major, node.Minor)} { // the first is /dev/null
			args += " --property=DeviceAllow='/dev/char/" + number + " rwm'"
		}
		h.inside(t, "systemd-run --quiet --unit="+name+" "+args+" sleep 1000")
	}
	probe := func(name string) string {
		return h.inside(t, fmt.Sprintf(`echo $$ >/sys/fs/cgroup/system.slice/%s.service/cgroup.procs
			for node in /%s /dev/nvidiactl /dev/nvidia1; do ( : <$node ) 2>&1 || true; done`, name, node.Path))
	}
	verify := func(name string) {
		t.Helper()
		var reasons []string
		for line := range strings.Lines(probe(name)) {
			reasons = append(reasons, strings.TrimSpace(line[strings.LastIndex(line, ":")+1:]))
		}
		// The last one is not among those that it may open.
		if diff := cmp.Diff([]string{"No such device or address", "No such device or address", "Operation not permitted"}, reasons); diff != "" {
			t.Errorf("what opening devices says in %s, -want +got:\n%s", name, diff)
		}
	}
	unit("pod-before")
	verify("pod-before")
	return func() {
		t.Helper()
		unit("pod-after")
		verify("pod-before")
		verify("pod-after")
		h.inside(t, "systemctl stop pod-before pod-after")
	}
}

// userRuntime is a runtime class of the user's own, in the words of the machine's containerd.
func userRuntime(h *host) string {
	plugin := "io.containerd.grpc.v1.cri"
	if h.Suite() == "forky" {
		plugin = "io.containerd.cri.v1.runtime"
	}
	return fmt.Sprintf(`[containerd.config.plugins."%s".containerd.runtimes.mine]
runtime_type = "io.containerd.runc.v2"
`, plugin)
}

// wantRuntimes fails unless slot a's containerd has the runtime classes that it should have, with a GPU and userRuntime.
func wantRuntimes(t *testing.T, h *host) {
	t.Helper()
	var config struct{ Plugins map[string]map[string]any }
	if _, err := toml.Decode(h.inside(t, "containerd config dump 2>/dev/null"), &config); err != nil {
		t.Fatal(err)
	}
	plugin := config.Plugins["io.containerd.cri.v1.runtime"]
	if plugin == nil {
		plugin = config.Plugins["io.containerd.grpc.v1.cri"]
	}
	table, _ := at(plugin, "containerd", "runtimes").(map[string]any)
	var names []string
	for name := range table {
		names = append(names, name)
	}
	slices.Sort(names)
	if diff := cmp.Diff([]any{[]string{"mine", "nvidia", "runc"}, "runc"}, []any{names, at(plugin, "containerd", "default_runtime_name")}); diff != "" {
		t.Errorf("runtime classes, and the default, -want +got:\n%s", diff)
	}
	// containerd 1.6 knows no CDI: its config dump does not have the keys.
	if h.Suite() != "bookworm" {
		if diff := cmp.Diff([]any{true, []any{"/etc/cdi", "/run/cdi"}}, []any{plugin["enable_cdi"], plugin["cdi_spec_dirs"]}); diff != "" {
			t.Errorf("CDI, -want +got:\n%s", diff)
		}
	}
}
