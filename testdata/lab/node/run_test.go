package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/helpers/machine"
)

// runCases are about Manager.Run. The host's systemd stands for that of a machine, which has the same version.
var runCases = []testCase{
	{"run: result and output", func(t *testing.T, h *host) {
		flood := strings.Repeat("0123456789abcde\n", 4<<10) // 64 KiB
		for _, c := range []struct{ script, output, err, reason string }{
			{"echo out; echo error >&2; echo out", "out\nerror\nout", "", "both outputs, in order"},
			{"true", "", "", "silent"},
			{"echo no; exit 7", "no", "exit status 7", "fails"},
			{"kill -SEGV $$", "", "killed by signal 11 (SIGSEGV)", "is killed"},
			{"yes 0123456789abcde 2>/dev/null | head -c 10000000", flood[16 : len(flood)-1], "", "output is bounded, the end of it is kept"},
			{"printf '\\377x'", "\uFFFDx", "", "no UTF-8"},
			{"setsid sh -c 'trap \"\" TERM HUP; sleep 1000' & echo done", "done", "", "a process that stays must not make it hang"},
			{"exec >/dev/null 2>&1; echo none", "", "", "closes its output"},
		} {
			begin := time.Now()
			output, err := h.run(t, "/bin/sh", "-c", c.script)
			if diff := cmp.Diff(c.output, output); diff != "" {
				t.Errorf("%s: %s: -want +got:\n%.2000s", c.reason, c.script, diff)
			}
			if want := "berth-test.service: " + c.err; c.err == "" && err != nil || c.err != "" && fmt.Sprint(err) != want {
				t.Errorf("%s: %s: error %v; want %q", c.reason, c.script, err, c.err)
			}
			t.Logf("%v: %s", time.Since(begin), c.script)
		}
		if _, err := h.run(t, "/nowhere"); err == nil || !strings.Contains(err.Error(), "cannot be executed") {
			t.Errorf("a program that does not exist: %v", err)
		}
		if left := h.Must(t, "systemctl list-units --all --plain --no-legend 'berth-test*'; pgrep -x sleep || true"); left != "" {
			t.Errorf("left over: %s", left)
		}
	}},
	{"run: the deadline ends the program, and its last words are kept", func(t *testing.T, h *host) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		output, err := h.bus(t).Run(ctx, machine.Program{
			Unit: "berth-test.service", Description: "Test", Args: []string{"/bin/sh", "-c", "echo waiting; trap '' TERM; sleep 1000"},
		})
		if output != "waiting" || fmt.Sprint(err) != "berth-test.service: not done in time" {
			t.Errorf("output %q, error %v", output, err)
		}
	}},
	{"run: what a killed run left behind is replaced", func(t *testing.T, h *host) {
		for _, left := range []string{
			"systemd-run --unit=berth-test sleep 1000",
			"systemd-run --unit=berth-test --service-type=oneshot --no-block sleep 1000",
			"systemd-run --unit=berth-test --service-type=oneshot false || true",
			"systemd-run --unit=berth-test --remain-after-exit true",
		} {
			h.Must(t, left)
			if output, err := h.run(t, "/bin/echo", "new"); output != "new" || err != nil {
				t.Errorf("%s: output %q, error %v", left, output, err)
			}
		}
		for i := range 50 { // systemd forgets a unit a moment after its job is done
			if output, err := h.run(t, "/bin/echo", fmt.Sprint(i)); output != fmt.Sprint(i) || err != nil {
				t.Fatalf("run %d: output %q, error %v", i, output, err)
			}
		}
	}},
	{"run: a cancelled run returns at once", func(t *testing.T, h *host) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		_, err := h.bus(t).Run(ctx, machine.Program{Unit: "berth-test.service", Args: []string{"/bin/sleep", "1000"}})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		h.Must(t, "systemctl stop berth-test; systemctl reset-failed berth-test || true")
	}},
}

// run runs a program with the host's systemd.
func (h *host) run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return h.bus(t).Run(ctx, machine.Program{Unit: "berth-test.service", Description: "Test", Args: args})
}
