package node

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// complaints are the warnings and errors that kubelet and containerd log when a node starts, and for each the reason why it is there to
// stay. What is in the first part is so on every host.
var complaints = []struct{ pattern, reason string }{
	{`not registered yet|node \\?"\S+" not found|Failed to ensure lease exists|Unable to register node|Unable to write event|` +
		`nodes \\?"\S+\\?" is forbidden`, "until the node has its certificate and is registered"},
	{`Failed while requesting a signed certificate`, "until the API server answers"},
	{`Skipping pod synchronization|Image garbage collection failed once`, "until kubelet has looked at the runtime for the first time"},
	{`Failed to read data from checkpoint`, "there is none at the first start"},
	{`RuntimeConfig from runtime service failed`, "containerd 1.x has no such call; kubelet then takes cgroupDriver, up to 1.37"},
	{`snapshotter.v1.devmapper|could not use snapshotter devmapper`, "containerd 1.6 warns of a snapshotter that nobody has configured; " +
		"to switch it off would switch it off for who configures it, too"},
	// Of the lab.
	{`Failed to set rlimit on max file handles|failed to apply oom score`, "the lab lacks CAP_SYS_RESOURCE"},
	{`/sys/fs/cgroup/kubepods.slice\S*: no such file|controller \\?"\S+\\?" not available`, "the machine that runs the lab may have cgroup controllers in " +
		"another hierarchy than cgroup v2"},
	{`no imagefs label for configured runtime`, "cAdvisor knows nothing of the lab's file systems"},
}

// explained fails if a service of a machine has complained of something that has no reason. It shows everything, each kind once.
func (h *host) explained(t *testing.T, machine string) {
	t.Helper()
	serious := regexp.MustCompile(`^[WEF]\d{4} |level=(warning|error|fatal)`)
	// What is different each time.
	digits := regexp.MustCompile(`\d+`)
	var seen []string
	for line := range strings.Lines(h.Must(t, "journalctl --machine="+machine+" --boot --output=cat --unit=kubelet --unit=containerd")) {
		if !serious.MatchString(line) {
			continue
		}
		reason := "NO REASON"
		for _, c := range complaints {
			if regexp.MustCompile(c.pattern).MatchString(line) {
				reason = c.reason
				break
			}
		}
		if kind := reason + digits.ReplaceAllString(line, ""); !slices.Contains(seen, kind) {
			seen = append(seen, kind)
			t.Logf("%s: %s", reason, strings.TrimSpace(line))
			if reason == "NO REASON" {
				t.Fail()
			}
		}
	}
}
