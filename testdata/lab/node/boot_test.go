package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/helpers/machine"
	"berth/testdata/lab"
)

// booting is a goal state of which slot a starts at boot.
const booting = "boot = \"a\"\n" + Goal + budgets

// bootCases have a host of their own each, as most of them are about its first boot.
var bootCases = []testCase{
	{"the boot slot comes up by itself, again after a reboot, and goes down in order", func(t *testing.T, h *host) {
		h = h.another(t, booting, nil)
		h.wantBooted(t, "a")
		if err := h.Reboot(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.wantBooted(t, "a")

		begin := time.Now()
		if err := h.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		took := time.Since(begin)
		t.Logf("shutdown of the host: %v", took)
		if took > 30*time.Second {
			t.Errorf("the host was down after %v", took)
		}
		if err := h.Boot(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.wantBooted(t, "a")
		inOrder(t, "a", h.stops(t, "--boot=-1"))
		host, _ := h.try(t, "journalctl --no-pager --boot=-1 _PID=1 | grep -E 'timed out|SIGKILL|signal KILL'")
		if host != "" {
			t.Errorf("something had to be killed at shutdown:\n%s", host)
		}
		// A machine that was killed has not logged this.
		want(t, h.Must(t, "journalctl --no-pager --quiet -D /var/lib/machines/node-a/var/log/journal --boot=-1"), "Stopped target", "Journal stopped")
	}},
	{"a slot starts on a host that has just booted", func(t *testing.T, h *host) {
		h = h.another(t, Goal+budgets, nil)
		for _, slot := range []string{"a", "b"} {
			h.wantDown(t, slot)
		}
		h.start(t, "a")
	}},
	{"power fails while a slot runs", func(t *testing.T, h *host) {
		h = h.another(t, booting, nil)
		h.wantBooted(t, "a")
		if err := h.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := h.Boot(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.wantBooted(t, "a")
	}},
	{"power fails while slot b runs, and slot a starts at boot", func(t *testing.T, h *host) {
		h = h.another(t, booting, nil)
		h.wantBooted(t, "a")
		h.Must(t, "systemctl stop node@a")
		h.start(t, "b")
		if err := h.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := h.Boot(t.Context()); err != nil {
			t.Fatal(err)
		}
		h.wantBooted(t, "a")
		h.wantDown(t, "b")
	}},
	{"29 boot with a broken goal state: the host comes up, the node says why it does not", func(t *testing.T, h *host) {
		h = h.another(t, "boot = \"a\"\n"+broken, nil)
		if failed := h.Must(t, "systemctl --failed --no-legend --plain"); !strings.HasPrefix(failed, "node@a.service") || strings.Contains(failed, "\n") {
			t.Errorf("failed units are:\n%s\nwant node@a.service alone", failed)
		}
		h.isRefused(t, "a", strings.Replace(brokenAt, ":2:", ":3:", 1))
		h.goal(t, booting)
		h.start(t, "a")
	}},
	{"01 boot where a step fails at first", func(t *testing.T, h *host) {
		h = h.another(t, booting, func(root string) error {
			return errors.Join(
				os.Remove(filepath.Join(root, "etc/berth/bootstrap-token")),
				// As cloud-init or a configuration management would, some time after boot.
				write(filepath.Join(root, "etc/systemd/system/late.timer"), []byte("[Timer]\nOnBootSec=10s\nAccuracySec=100ms\n"), 0o644),
				write(filepath.Join(root, "etc/systemd/system/late.service"),
					[]byte("[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo abcdef.0123456789abcdef >/etc/berth/bootstrap-token'\n"), 0o644),
				os.MkdirAll(filepath.Join(root, "etc/systemd/system/timers.target.wants"), 0o755),
				os.Symlink("../late.timer", filepath.Join(root, "etc/systemd/system/timers.target.wants/late.timer")),
			)
		})
		h.wantBooted(t, "a")
		want(t, h.Must(t, "journalctl --no-pager --boot -u node@a"), "bootstrap-token")
	}},
	{"random operations never leave two machines or a stuck job", random},
}

// another boots one more host of the same release.
func (h *host) another(t *testing.T, goal string, prepare func(root string) error) *host {
	t.Helper()
	other := &host{Host: lab.New(t, lab.Options{Suite: h.Suite(), Degraded: true, Prepare: func(root string) error {
		err := errors.Join(
			Prepare(root, goal),
			// What one boot logged is asked for in the next.
			os.MkdirAll(filepath.Join(root, "var/log/journal"), 0o755),
			os.MkdirAll(filepath.Join(root, "var/lib/machines/node-a/var/log/journal"), 0o755))
		if err == nil && prepare != nil {
			err = prepare(root)
		}
		return err
	}})}
	t.Cleanup(func() {
		other.explain(t)
		other.reconnect()
	})
	return other
}

// wantBooted waits until the boot slot is up, and requires that the boot went as it should.
func (h *host) wantBooted(t *testing.T, slot string) {
	t.Helper()
	h.await(t, "the node after boot", func(units map[string]machine.Unit) bool { return isUp(units, slot) }, slot)
	h.wantUp(t, slot)
	if failed := h.Must(t, "systemctl --failed --no-legend"); failed != "" {
		t.Errorf("failed units:\n%s", failed)
	}
	if out, _ := h.try(t, "journalctl --no-pager --boot | grep -i 'ordering cycle'"); out != "" {
		t.Errorf("ordering cycle:\n%s", out)
	}
}
