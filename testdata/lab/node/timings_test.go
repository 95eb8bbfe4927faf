package node

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/testdata/lab"
)

var timings = flag.Bool("timings", false, "measure how long a node takes beside a bare machine")

// TestTimings prints how long start, stop and restart of a node take, as ratios to the same of a bare machine on the same
// host: the distribution's own unit with the same .nspawn file, and wait-dbus until its message bus answers. Rounds of the two
// take turns.
func TestTimings(t *testing.T) {
	if !*timings {
		t.Skip("measures only with -timings")
	}
	const rounds = 7
	for _, suite := range lab.Suites {
		t.Run(suite, func(t *testing.T) {
			h := newHost(t, suite)
			h.rest(t)
			h.goal(t, Goal+strings.Replace(budgets, `settle = "300ms"`, `settle = "0s"`, 1))
			h.start(t, "a") // render once, so that the .nspawn file is there
			h.Must(t, "systemctl stop node@a")
			took := map[string][]time.Duration{}
			measure := func(what, command string) {
				begin := time.Now()
				h.Must(t, command)
				took[what] = append(took[what], time.Since(begin))
			}
			const (
				generator = "/usr/lib/systemd/system-generators/berth-generator"
				bareStart = "systemctl start systemd-nspawn@node-a; /usr/lib/berth/wait-dbus a"
				bareStop  = "systemctl stop systemd-nspawn@node-a"
			)
			for range rounds {
				measure("start", "systemctl start node@a")
				measure("restart", "systemctl restart node@a")
				measure("stop", "systemctl stop node@a")
				h.Must(t, "mv "+generator+" /run/; systemctl daemon-reload")
				measure("bare start", bareStart)
				measure("bare restart", bareStop+"; "+bareStart)
				measure("bare stop", bareStop)
				h.Must(t, "mv /run/berth-generator "+generator+"; systemctl daemon-reload")
			}
			var row strings.Builder
			for _, what := range []string{"start", "stop", "restart"} {
				node, bare := median(took[what]), median(took["bare "+what])
				fmt.Fprintf(&row, "  %s %.2f (%v / %v)", what, node.Seconds()/bare.Seconds(), node.Round(time.Millisecond), bare.Round(time.Millisecond))
			}
			t.Logf("%s: medians of %d, node / bare:%s", suite, rounds, row.String())
		})
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}
