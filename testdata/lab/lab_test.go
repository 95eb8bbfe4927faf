package lab

import "testing"

func TestBoot(t *testing.T) {
	h := New(t, Options{Suite: "trixie", Kmsg: true})
	t.Log(h.Must(t, "systemctl is-system-running; systemctl --version; machinectl; mount; cat /proc/self/cgroup"))
}
