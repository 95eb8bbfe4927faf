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
	{`system:anonymous|nodes? \\?"\S+ not found|not registered yet`, "until the node has its certificate and is registered"},
	{`Failed while requesting a signed certificate`, "until the API server answers"},
	{`use of closed network connection`, "when kubelet has its certificate it begins with new connections"},
	{`Skipping pod synchronization|Image garbage collection failed once`, "until kubelet has looked at the runtime for the first time"},
	{`Failed to read data from checkpoint`, "there is none at the first start"},
	{`RuntimeConfig from runtime service failed`, "containerd 1.x has no such call; kubelet then takes cgroupDriver, up to 1.37"},
	{`devmapper not configured`, "containerd 1.6 warns of a snapshotter that nobody has configured; without the plugin nobody could"},
	// Of the lab.
	{`error reading /dev/kmsg: read /dev/kmsg: broken pipe|exiting analyzeLines|short read from kmsg`,
		"the kernel's log has overrun its reader (EPIPE of Documentation/ABI/testing/dev-kmsg), as all of a machine's labs write to the one that there is"},
	{`Failed to set rlimit on max file handles|failed to apply oom score`, "the lab lacks CAP_SYS_RESOURCE"},
	{`/sys/fs/cgroup/kubepods.slice\S*: no such file|controller \\?"\S+ not available`,
		"the machine that runs the lab may have its cgroup controllers in another hierarchy than cgroup v2"},
	{`no imagefs label for configured runtime`, "cAdvisor knows nothing of the lab's file systems"},
}

// explained fails if a service of a machine has complained of something that has no reason. It shows one line of each kind.
func (h *host) explained(t *testing.T, machine string) {
	t.Helper()
	serious := regexp.MustCompile(`^[WEF]\d{4} |level=(warning|error|fatal)`)
	digits := regexp.MustCompile(`\d+`) // what is different each time
	var seen []string
	for line := range strings.Lines(h.Must(t, "journalctl --machine="+machine+" --boot --output=cat --unit=kubelet --unit=containerd")) {
		if !serious.MatchString(line) {
			continue
		}
		line, _, _ = strings.Cut(strings.TrimSpace(line), " event=") // all of an event that could not be sent
		i := slices.IndexFunc(complaints, func(c struct{ pattern, reason string }) bool {
			return regexp.MustCompile(c.pattern).MatchString(line)
		})
		message, _, _ := strings.Cut(line, " err=")
		if message = digits.ReplaceAllString(message, ""); slices.Contains(seen, message) && i >= 0 {
			continue
		}
		seen = append(seen, message)
		if i < 0 {
			t.Errorf("without a reason: %s", line)
		} else {
			t.Logf("%s: %s", complaints[i].reason, line)
		}
	}
}
