package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/units"
)

// What a probe (testdata/probe) is let do in the place of every step's program, as far as it says something about the sandbox.
var everyStep = []string{"look up beneath a root", "speak to systemd", "use /dev/full", "use Unix sockets"}

// What a step may do beyond that. Where a process of the machine is looked into, it is by CAP_SYS_PTRACE.
var mayDo = map[string][]string{
	"berth-last-good":         nil, // a probe is no program of systemd's, so only what is in the table is looked at
	"node-peer-guard@":        {"enter a machine's root", "read another user's file", "signal a process of another user", "write to /run/berth", "write to /run/systemd/system"},
	"node-render-nspawn@":     {"read another user's file", "write to /run/systemd/system"},
	"node-render-containerd@": {"read another user's file", "write to /var/lib/machines/node-a/etc"},
	"node-render-kubelet@":    {"read another user's file", "write to /var/lib/machines/node-a/etc"},
	"node-wait-dbus@":         {"enter a machine's root"},
	"node-nvidia-wire@":       {"enter a machine's root", "read another user's file"},
	"node-containerd@":        {"enter a machine's root"},
	"node-kubelet@":           {"enter a machine's root"},
	"node-record-applied@":    {"read another user's file", "write to /var/lib/berth"},
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
		h.Must(t, `mkdir -p /run/probe; touch /run/probe/node /home/probe; chown daemon /home/probe; chmod 600 /home/probe
			systemd-run --quiet --unit=berth-other --uid=daemon sleep infinity
			systemctl show --property=MainPID --value berth-other >/run/probe/pid
			ip address add 192.0.2.1/32 dev lo`)
		defer h.Must(t, "systemctl stop berth-other; ip address del 192.0.2.1/32 dev lo; rm -r /run/probe /home/probe /usr/local/bin/probe")
		leader := h.Must(t, "machinectl show --property=Leader --value node-a")

		// Each step's unit with the probe for its program, and without what it depends on.
		settings := map[string]string{"all": "Type=oneshot\n"}
		for _, f := range units.Files() {
			if step, ok := strings.CutSuffix(filepath.Base(f.Path), "@.service"); ok {
				_, settings[step], _ = strings.Cut(string(f.Content), "\n[Service]\n")
			}
		}
		var all []string
		for step, text := range settings {
			h.write(t, "/run/systemd/system/berth-probe-"+step+"@.service", "[Service]\n"+text+fmt.Sprintf(`
ExecStart=
ExecStart=/usr/local/bin/probe %s
ExecStop=
ExecStopPost=
RemainAfterExit=no
Restart=no
StandardOutput=truncate:/run/probe/%s
StandardError=journal
`, leader, step))
			all = append(all, "berth-probe-"+step+"@a.service")
		}
		h.Must(t, "systemctl daemon-reload; systemctl start "+strings.Join(all, " "))
		probed := func(step string) []string {
			lines := strings.Split(strings.TrimSpace(h.Must(t, "cat /run/probe/"+step)), "\n")
			slices.Sort(lines)
			return lines
		}
		free := probed("all")
		t.Logf("without a sandbox: %s", strings.Join(free, ", "))
		if len(free) < 40 {
			t.Errorf("without a sandbox %d are let through: the lab host itself refuses what the sandbox is to refuse", len(free))
		}
		delete(settings, "all")
		for step := range settings {
			may, known := mayDo[step+"@"]
			if !known {
				t.Errorf("%s: what it may do is not in the table", step)
			}
			want := append(slices.Clone(everyStep), may...)
			slices.Sort(want)
			if diff := cmp.Diff(want, probed(step)); diff != "" {
				t.Errorf("%s, -want +got:\n%s", step, diff)
			}
		}
	}},
	{"sandbox: exposure is not above what docs/trust.md says", func(t *testing.T, h *host) {
		source, err := sourceDir()
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(source, "docs/trust.md"))
		if err != nil {
			t.Fatal(err)
		}
		version, _, _ := strings.Cut(h.Must(t, "systemctl --version | sed -n '1s/systemd \\([0-9]*\\).*/\\1/p'"), "\n")
		var column int
		seen := 0
		for line := range strings.Lines(string(text)) {
			cells := strings.Split(line, "|")
			if i := slices.Index(cells, " "+version+" "); i > 0 {
				column = i
			}
			if len(cells) < 3 || column == 0 || !strings.HasPrefix(cells[1], " node") && !strings.HasPrefix(cells[1], " berth") {
				continue
			}
			seen++
			unit := strings.Replace(strings.TrimSpace(cells[1])+".service", "@.", "@a.", 1)
			most, err := strconv.ParseFloat(strings.TrimSpace(cells[column]), 64)
			if err != nil {
				t.Errorf("docs/trust.md: %s: %v", unit, err)
			}
			out := h.Must(t, "systemd-analyze security --no-pager "+unit+" | tail -n 1")
			found := exposure.FindStringSubmatch(out)
			if found == nil {
				t.Fatalf("systemd-analyze security %s: %s", unit, out)
			}
			is, err := strconv.ParseFloat(found[1], 64)
			if err != nil || is > most {
				t.Errorf("%s: exposure %s, %v; docs/trust.md allows %v", unit, found[1], err, most)
			}
			t.Logf("%s %s", unit, found[1])
		}
		if seen != len(mayDo) {
			t.Errorf("docs/trust.md: %d steps in a table with systemd %s; want %d", seen, version, len(mayDo))
		}
	}},
}

var exposure = regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+) `)
