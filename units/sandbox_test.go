package units

import (
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestSandbox requires that all units have the same sandbox, but for what docs/trust.md tells of each. That it holds is seen in the
// lab.
func TestSandbox(t *testing.T) {
	own := []string{"CapabilityBoundingSet", "IPAddressAllow", "ReadWritePaths", "RestrictAddressFamilies",
		"RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve", "StateDirectory", "StateDirectoryMode"}
	var first, firstName string
	for _, f := range Files() {
		if path.Ext(f.Path) != ".service" {
			continue
		}
		_, text, ok := strings.Cut(string(f.Content), "\n# What the step may do, and why: docs/trust.md.\n")
		if !ok {
			t.Errorf("%s has no sandbox", f.Path)
			continue
		}
		var shared strings.Builder
		for line := range strings.Lines(text) {
			if key, _, _ := strings.Cut(line, "="); !slices.Contains(own, key) {
				shared.WriteString(line)
			}
		}
		if first == "" {
			first, firstName = shared.String(), f.Path
		}
		if diff := cmp.Diff(first, shared.String()); diff != "" {
			t.Errorf("-%s +%s:\n%s", firstName, f.Path, diff)
		}
	}
	for _, setting := range []string{"ReadOnlyPaths=/\n", "NoNewPrivileges=yes\n", "SystemCallArchitectures=native\n", "DevicePolicy=closed\n"} {
		if !strings.Contains(first, setting) {
			t.Errorf("the sandbox lacks %s", setting)
		}
	}
	// With these systemd 252 to 262 leave /run writable, or take openat2(2) away: see docs/trust.md.
	for _, setting := range []string{"ProtectControlGroups=", "RestrictSUIDSGID="} {
		if strings.Contains(first, setting) {
			t.Errorf("the sandbox has %s, which weakens it", setting)
		}
	}
}
