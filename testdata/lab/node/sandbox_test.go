package node

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/units"
)

// What a probe (testdata/probe) is let do in the place of every step's program, as far as it says something about the sandbox.
var everyStep = []string{"look up beneath a root", "speak to systemd", "use /dev/full", "use Unix sockets"}

// What a step may do beyond that. Where a process of the machine is looked into, it is by CAP_SYS_PTRACE.
var mayDo = map[string][]string{
	"node-chain@":             nil,
	"node-peer-guard@":        {"enter a machine's root", "read another user's file", "signal a process of another user", "write to /run/berth"},
	"node-render-nspawn@":     {"read another user's file", "write to /run/systemd/system"},
	"node-render-containerd@": {"read another user's file", "write to /var/lib/machines/node-a/etc"},
	"node-render-kubelet@":    {"read another user's file", "write to /var/lib/machines/node-a/etc"},
	"node-wait-dbus@":         {"enter a machine's root"},
	"node-nvidia-wire@":       {"enter a machine's root", "read another user's file"},
	"node-containerd@":        {"enter a machine's root"},
	"node-kubelet@":           {"enter a machine's root"},
	"node@":                   {"enter a machine's root", "read another user's file", "speak to the host's own address", "use the Internet"},
}

// sandboxCases are about what the steps' units let a program do, whatever it is.
var sandboxCases = []testCase{
	{"sandbox: a program in the place of a step's is let do what the step needs", func(t *testing.T, h *host) {
		source, err := sourceDir()
		if err != nil {
			t.Fatal(err)
		}
		build := exec.Command("go", "build", "-C", source, "-o", filepath.Join(h.Root(), "usr/local/bin/probe"), "./testdata/probe")
		build.Env = append(build.Environ(), "CGO_ENABLED=0")
		if err := run(build); err != nil {
			t.Fatal(err)
		}
		h.start(t, "a")
		h.Must(t, `mkdir -p /run/probe; touch /run/probe/node /home/probe; chown 1000 /home/probe; chmod 600 /home/probe
			systemd-run --quiet --unit=berth-other --uid=1000 sleep infinity
			systemctl show --property=MainPID --value berth-other >/run/probe/pid
			ip address add 192.0.2.1/32 dev lo`)
		defer h.Must(t, "systemctl stop berth-other; ip address del 192.0.2.1/32 dev lo; rm -r /run/probe /home/probe /usr/local/bin/probe")
		leader := h.Must(t, "machinectl show --property=Leader --value node-a")

		// probe runs the probe with a unit's settings, and returns what it was let do.
		probe := func(name, settings string) []string {
			h.write(t, "/run/systemd/system/berth-probe-"+name+"@.service", settings+fmt.Sprintf(`
ExecStart=
ExecStart=/usr/local/bin/probe %s
ExecStop=
ExecStopPost=
RemainAfterExit=no
Restart=no
StandardOutput=truncate:/run/probe/%s
`, leader, name))
			h.Must(t, "systemctl daemon-reload; systemctl start berth-probe-"+name+"@a; rm /run/systemd/system/berth-probe-"+name+"@.service")
			lines := strings.Split(strings.TrimSpace(h.Must(t, "cat /run/probe/"+name)), "\n")
			slices.Sort(lines)
			return lines
		}
		all := probe("all", "[Service]\nType=oneshot\n")
		t.Logf("without a sandbox: %s", strings.Join(all, ", "))
		if len(all) < 40 {
			t.Errorf("without a sandbox %d are let through: the lab host itself refuses what the sandbox is to refuse", len(all))
		}
		for _, f := range units.Files() {
			step, ok := strings.CutSuffix(filepath.Base(f.Path), ".service")
			if !ok {
				continue
			}
			may, known := mayDo[step]
			if !known {
				t.Errorf("%s: what it may do is not in the table", step)
			}
			_, settings, _ := strings.Cut(string(f.Content), "\n[Service]\n")
			want := append(slices.Clone(everyStep), may...)
			slices.Sort(want)
			if diff := cmp.Diff(want, probe(strings.TrimSuffix(step, "@"), "[Service]\n"+settings)); diff != "" {
				t.Errorf("%s, -want +got:\n%s", step, diff)
			}
		}
	}},
	{"sandbox: exposure is not above what docs/trust.md says", func(t *testing.T, h *host) {
		version, ok := map[string]string{"bookworm": "252", "trixie": "257", "forky": "262"}[h.suite]
		if !ok {
			t.Fatalf("no column for %s", h.suite)
		}
		_ = version
	}},
}

var exposure = regexp.MustCompile(`Overall exposure level for (\S+): ([0-9.]+) `)
