package node

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/bake"
)

// generator is where the generator is on a host.
const generator = "usr/lib/systemd/system-generators/berth-generator"

var bakeCases = []testCase{
	{"a baked host boots its node without the generator, and the same one with it", func(t *testing.T, h *host) {
		var kept []byte // the generator
		h = h.another(t, booting, func(root string) error {
			out, err := exec.Command(filepath.Join(root, "usr/bin/berth"), "bake", "--json", "--root", root).Output()
			if err != nil {
				return err
			}
			var result bake.Result
			if err := json.Unmarshal(out, &result); err != nil {
				return err
			}
			for _, name := range result.Wrote {
				if strings.HasSuffix(name, "@.service") || !strings.HasPrefix(name, "/usr/lib/systemd/system/") {
					t.Errorf("bake wrote %s, which install.sh had installed: want the same bytes and mode of both", name)
				}
			}
			kept, err = os.ReadFile(filepath.Join(root, generator))
			return errors.Join(err, os.Remove(filepath.Join(root, generator)))
		})
		h.wantBooted(t, "a")
		units := append(append(steps("a"), steps("b")...), "node-chain@a.target", "node-call@a.target", `run-bpffs-node\\x2da.mount`)
		before := h.runs(t, "a")
		baked := h.cat(t, units)
		want(t, baked, "SourcePath=/etc/berth/goal.toml", "# Made by berth-generator from /etc/berth/goal.toml")
		h.Must(t, "test ! -e /run/systemd/generator/node@a.service; systemctl daemon-reload")
		if diff := cmp.Diff(baked, h.cat(t, units)); diff != "" {
			t.Errorf("units before and after daemon-reload:\n%s", diff)
		}
		sameRuns(t, h, before)
		const stale = "journalctl --no-pager --boot -u node@a | grep -E 'reloading systemd|still not what the goal state says'"
		if out, _ := h.try(t, stale); out != "" {
			t.Errorf("the baked units were thought to be stale:\n%s", out)
		}

		// Another goal state reaches what is rendered, but no unit, and this is told.
		h.write(t, "/etc/berth/goal.toml", strings.Replace(booting, `ready = "30s"`, `ready = "31s"`, 1))
		h.Must(t, "systemctl restart node@a")
		h.wantUp(t, "a")
		out, _ := h.try(t, stale)
		want(t, out, "still not what the goal state says: usr/lib/systemd/system/", "build the image anew (berth bake)")
		h.write(t, "/etc/berth/goal.toml", booting)
		before = h.runs(t, "a")

		// As on the machine that builds the image.
		h.Must(t, "mount --bind / /mnt")
		if got := h.Must(t, "systemctl --root=/mnt is-enabled node@a.service || true"); got != "static" {
			t.Errorf("node@a.service is %q in the image; want static", got)
		}
		files := h.Must(t, "systemctl --root=/mnt list-unit-files --no-legend 'node*' 'systemd-nspawn@*' 'run-bpffs*'")
		want(t, files, "node@.service", "node@a.service", "node@b.service", "node-kubelet@.service", `run-bpffs-node\x2da.mount`)
		verify := "systemd-analyze verify --root=/mnt --man=no " + strings.Join(units, " ")
		if out, exit := h.try(t, verify); out != "" || exit != 0 {
			t.Errorf("%s: exit status %d: %s", verify, exit, out)
		}
		// That it looks at what was baked.
		const spoilt = "/usr/lib/systemd/system/node@a.service.d/99-test.conf"
		h.write(t, spoilt, "[Unit]\nNonsense=yes\n")
		out, _ = h.try(t, verify)
		want(t, out, "Nonsense")
		h.Must(t, "rm -r $(dirname "+spoilt+")")
		h.Must(t, "umount /mnt")

		h.write(t, generator, string(kept))
		h.Must(t, "chmod 755 /"+generator+"; systemctl daemon-reload; test -e /run/systemd/generator/node@a.service")
		if diff := cmp.Diff(baked, h.cat(t, units)); diff != "" {
			t.Errorf("baked and generated units:\n%s", diff)
		}
		// The host is given another goal state than its image was built for.
		h.goal(t, strings.Replace(booting, `boot = "a"`, `boot = "b"`, 1))
		atBoot := h.Must(t, "systemctl show --property=Wants multi-user.target")
		want(t, atBoot, "node@b.service")
		if strings.Contains(atBoot, "node@a.service") {
			t.Errorf("the slot of the image still starts at boot, too: %s", atBoot)
		}
		h.goal(t, booting)
		sameRuns(t, h, before)

		if err := h.Reboot(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.wantBooted(t, "a")
		if diff := cmp.Diff(baked, h.cat(t, units)); diff != "" {
			t.Errorf("baked and generated units, after boot:\n%s", diff)
		}
	}},
}

// cat returns what systemd has read for units, without where it read it.
func (h *host) cat(t *testing.T, units []string) string {
	t.Helper()
	var text strings.Builder
	for line := range strings.Lines(h.Must(t, "systemctl cat "+strings.Join(units, " "))) {
		if file, ok := strings.CutPrefix(line, "# /"); ok {
			line = "# " + path.Base(file)
		}
		text.WriteString(line)
	}
	return text.String()
}
