package node

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/hostcheck"
)

var checkCases = []testCase{
	{"berth check --host finds nothing wrong, and then what was broken", func(t *testing.T, h *host) {
		h.Must(t, PretendKernel())
		// These alone: systemd-nspawn has mounts there, too, such as the boot ID, by which systemd 262 knows its processes again.
		defer h.Must(t, `for key in $(cd /run; ls -d vm.* kernel.*); do umount "/proc/sys/$(echo "$key" | tr . /)"; rm "/run/$key"; done`)
		if errors := h.check(t, 0); len(errors) > 0 {
			t.Errorf("a host on which all is well: %q", errors)
		}

		h.Must(t, `
			mv /var/lib/machines/node-a/usr/local/bin/kubelet /var/lib/machines/node-a/usr/local/bin/kubelet-1
			chmod 0644 /etc/berth/bootstrap-token
			echo 1 >/run/vm.panic_on_oom
			systemd-run --unit=blocker --socket-property=ListenStream=127.0.0.1:10248 /bin/true`)
		defer h.Must(t, `
			mv /var/lib/machines/node-a/usr/local/bin/kubelet-1 /var/lib/machines/node-a/usr/local/bin/kubelet
			chmod 0600 /etc/berth/bootstrap-token
			systemctl stop blocker.socket`)
		diff := cmp.Diff([]string{
			"secret-readable: /etc/berth/bootstrap-token: holds the bootstrap token, and every user can read it (mode 0644)",
			"sysctl-value: vm.panic_on_oom: is 1, not 0",
			"port-in-use: slot a: systemd (PID 1) listens on 127.0.0.1:10248, which is kubelet.config.healthzPort",
			"port-in-use: slot b: systemd (PID 1) listens on 127.0.0.1:10248, which is kubelet.config.healthzPort",
			"slot-kubelet: slot a: kubelet.binary: /usr/local/bin/kubelet in /var/lib/machines/node-a does not exist",
		}, h.check(t, 1))
		if diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		if out, exit := h.try(t, "chmod 0600 /etc/berth/bootstrap-token; berth check"); exit != 0 {
			t.Errorf("the goal state alone: exit status %d:\n%s", exit, out)
		}
		h.write(t, "/etc/berth/goal.toml", broken)
		if out, exit := h.try(t, "berth check"); exit != 3 || !strings.HasPrefix(out, brokenAt) {
			t.Errorf("a broken goal state: exit status %d, want %s:\n%s", exit, brokenAt, out)
		}
	}},

	// Which file decides is what systemd-sysctl does, and not what we think it does.
	{"berth check --host agrees with systemd-sysctl", func(t *testing.T, h *host) {
		defer h.Must(t, "rm -f /etc/sysctl.d/*-lab.conf /run/sysctl.d/*-lab.conf; systemctl restart systemd-sysctl")
		h.Must(t, `
			mkdir -p /run/sysctl.d
			echo 'net.ipv4.conf.*.rp_filter = 2' >/etc/sysctl.d/95-lab.conf
			echo 'net.ipv4.ip_forward = 1' >/run/sysctl.d/99-lab.conf
			echo 'net/ipv4/ip_forward = 0' >/etc/sysctl.d/99-lab.conf
			printf -- '-net.ipv4.conf.all.src_valid_mark\nnet.ipv4.conf.d*.src_valid_mark = 0\nnet.ipv4.conf.default.src_valid_mark = 0' >/etc/sysctl.d/98-lab.conf
			echo 0 >/proc/sys/net/ipv4/conf/all/src_valid_mark
			systemctl restart systemd-sysctl`)
		var got []string
		for _, f := range h.findings(t) {
			if strings.HasPrefix(f.ID, "sysctl-") && strings.HasPrefix(f.Subject, "net.ipv4.") && f.Severity != hostcheck.OK {
				got = append(got, f.ID+": "+f.String())
			}
		}
		diff := cmp.Diff([]string{
			"sysctl-value: net.ipv4.conf.all.src_valid_mark: is 0, not 1: remove /etc/sysctl.d/90-berth.conf, which hides /usr/lib/sysctl.d/90-berth.conf; systemctl restart systemd-sysctl",
			`sysctl-value: net.ipv4.conf.default.src_valid_mark: is 0, not 1: remove it from /etc/sysctl.d/98-lab.conf:3, which sets it to "0"; systemctl restart systemd-sysctl`,
			`sysctl-value: net.ipv4.ip_forward: is 0, not 1: remove it from /etc/sysctl.d/99-lab.conf:1, which sets it to "0"; systemctl restart systemd-sysctl`,
		}, got)
		if diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}},
}

// check runs berth check --host, which must end with this exit status, and returns its errors without their cures.
func (h *host) check(t *testing.T, exit int) []string {
	t.Helper()
	out, got := h.try(t, "berth check --host")
	if got != exit {
		t.Errorf("berth check --host: exit status %d; want %d:\n%s", got, exit, out)
	}
	var errors []string
	for _, f := range h.findings(t) {
		if f.Severity == hostcheck.Error {
			f.Cure = ""
			errors = append(errors, f.ID+": "+f.String())
		}
	}
	return errors
}

func (h *host) findings(t *testing.T) []hostcheck.Finding {
	t.Helper()
	out, _ := h.try(t, "berth check --host --json")
	var report hostcheck.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	return report.Findings
}
