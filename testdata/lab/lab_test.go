package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// helperEnv makes this test binary a program that does one thing and then waits, to be killed.
const helperEnv = "BERTH_LAB_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperEnv) {
	case "start":
		h, err := Start(context.Background(), Options{Suite: "trixie"})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		json.NewEncoder(os.Stdout).Encode(h.get())
		select {}
	case "build":
		err := Build(context.Background(), "trixie", func(string, ...any) { fmt.Println("building") })
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// helper starts this test binary as a helper and returns it with the first line it writes.
func helper(t *testing.T, what string, env ...string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(append(os.Environ(), helperEnv+"="+what), env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("helper %s wrote %q, then: %v", what, line, err)
	}
	return cmd, line
}

// readable waits until a file descriptor is readable: a pidfd is when its process has ended.
func readable(t *testing.T, fd int) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n := 0
	err := retry(func() (err error) { n, err = unix.Poll(fds, 20_000); return err })
	if n != 1 || err != nil {
		t.Fatalf("nothing happened for 20 s (%v)", err)
	}
}

func pidfd(t *testing.T, pid int) int {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatalf("pidfd_open %d: %v", pid, err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// inMountNamespaces returns the processes that are in one of the mount name spaces: as long as there are any, its mounts
// are there too.
func inMountNamespaces(t *testing.T, ns []string) (pids []string) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		target, _ := os.Readlink(link)
		for _, n := range ns {
			if target == n {
				pids = append(pids, strings.Split(link, "/")[2])
			}
		}
	}
	return pids
}

// mountNamespaces names those of processes. It keeps them open: else a name space that is gone could leave its number to one of
// another host's, where each sandbox of a unit makes one.
func mountNamespaces(t *testing.T, pids ...int) (ns []string) {
	t.Helper()
	for _, pid := range pids {
		handle, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { handle.Close() })
		n, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", handle.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		ns = append(ns, n)
	}
	return ns
}

// wantNothingLeft checks that no process, mount, cgroup or file of a host is left.
func wantNothingLeft(t *testing.T, name string, mountNamespaces []string) {
	t.Helper()
	if pids := inMountNamespaces(t, mountNamespaces); len(pids) != 0 {
		t.Errorf("processes %v are left in the mount name spaces of %s", pids, name)
	}
	root, err := cgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	if dir := filepath.Join(root, cgroupName(name)); exists(dir) {
		t.Errorf("%s is left", dir)
	}
	for _, path := range []string{lockPath(runDir(CacheDir()), name), statePath(runDir(CacheDir()), name)} {
		if exists(path) {
			t.Errorf("%s is left", path)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), labDir) {
		t.Errorf("mounts of a host leaked:\n%s", mounts)
	}
}

func TestSuites(t *testing.T) {
	for _, row := range []struct{ suite, systemd, containerd string }{
		{"bookworm", "252", "1.6."},
		{"trixie", "257", "1.7."},
		{"forky", "262", "2.1."},
	} {
		t.Run(row.suite, func(t *testing.T) {
			h := New(t, Options{Suite: row.suite})
			if out := h.Must(t, "systemctl --version"); !strings.HasPrefix(out, "systemd "+row.systemd) {
				t.Errorf("got %q, want systemd %s", out, row.systemd)
			}
			// Start accepts nothing but "running"; here the question is asked again from within.
			if out := h.Must(t, "systemctl is-system-running"); out != "running" {
				t.Errorf("the host is %s, want running", out)
			}
			if out := h.Must(t, "stat -c %t:%T /dev/kmsg"); out != "1:b" {
				t.Errorf("/dev/kmsg is device %s, want 1:b", out)
			}
			if out := h.Must(t, "hostname; cat /proc/self/cgroup | grep ^0::; ip -brief link show up"); out !=
				h.Name()+"\n0::/init.scope\nlo               UNKNOWN        00:00:00:00:00:00 <LOOPBACK,UP,LOWER_UP> " {
				t.Errorf("name, cgroup and links of the host: %q", out)
			}
			nodeA(t, h)
			if out := h.Must(t, "systemctl -M node-a is-system-running --wait"); out != "running" {
				t.Errorf("the machine is %s, want running", out)
			}
			if out := h.Must(t, "machinectl list --no-legend"); !strings.HasPrefix(out, "node-a ") {
				t.Errorf("machinectl lists %q, want node-a", out)
			}
			out := h.Must(t, "systemd-run -M node-a --quiet --pipe --wait containerd --version")
			if !strings.Contains(out, " "+row.containerd) {
				t.Errorf("containerd in the machine says %q, want %s", out, row.containerd)
			}
			out = h.Must(t, "journalctl -M node-a --no-pager -o cat -u dbus.service")
			if !strings.Contains(out, "Started dbus") {
				t.Errorf("the machine's journal does not tell of dbus.service: %q", out)
			}
			for _, m := range Machines {
				out := h.Must(t, "systemctl --root=/var/lib/machines/"+m+" is-enabled containerd.service || :")
				if out != "disabled" {
					t.Errorf("containerd.service in %s is %s, want disabled: nothing may start by surprise", m, out)
				}
			}
		})
	}
}

// nodeA starts the machine node-a, with the settings that a machine needs inside a container, and NotifyReady= so that its
// bus is there when the start returns.
func nodeA(t *testing.T, h *Host) {
	t.Helper()
	h.Must(t, `mkdir -p /run/systemd/nspawn
		printf '%s\n' '[Exec]' NotifyReady=yes PrivateUsers=no Capability=all \
			'SystemCallFilter=@keyring bpf perf_event_open' '[Network]' VirtualEthernet=no >/run/systemd/nspawn/node-a.nspawn
		systemctl start systemd-nspawn@node-a`)
}

func TestBoots(t *testing.T) {
	h := New(t, Options{Suite: "bookworm", NoKmsg: true, Prepare: func(root string) error {
		return os.WriteFile(filepath.Join(root, "etc/prepared"), nil, 0o644)
	}})
	ctx := t.Context()
	h.Must(t, "test -e /etc/prepared && test ! -e /dev/kmsg")
	first := h.Must(t, "cat /etc/machine-id; logger -t lab boot-one")
	if err := h.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := h.Run(ctx, "true"); err == nil {
		t.Error("a command ran in a host that is shut down")
	}
	if err := os.WriteFile(filepath.Join(h.MachineRoot("node-b"), "etc/marker"), nil, 0o644); err != nil {
		t.Errorf("files of a host that is shut down: %v", err)
	}
	if err := h.Boot(ctx); err != nil {
		t.Fatal(err)
	}
	if out := h.Must(t, "cat /etc/machine-id"); out != first {
		t.Errorf("machine id %s after a shutdown, was %s", out, first)
	}
	h.Must(t, "test -e /var/lib/machines/node-b/etc/marker")
	if out := h.Must(t, "journalctl --boot=-1 -t lab -o cat"); out != "boot-one" {
		t.Errorf("the journal of the boot before says %q, want boot-one", out)
	}
	leader := h.Leader()
	if err := h.Reboot(ctx); err != nil {
		t.Fatal(err)
	}
	if h.Leader() == leader {
		t.Error("no new PID 1 after a reboot")
	}
	nodeA(t, h) // so that there is something that a crash leaves behind
	if err := h.Crash(ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.Boot(ctx); err != nil {
		t.Fatal(err)
	}
	if out := h.Must(t, "journalctl --field=_BOOT_ID | wc -l"); out != "4" {
		t.Errorf("the journal knows %s boots, want 4", out)
	}
}

func TestDegraded(t *testing.T) {
	broken := func(root string) error {
		unit := "[Service]\nType=oneshot\nExecStart=false\n"
		return errors.Join(os.WriteFile(filepath.Join(root, "etc/systemd/system/broken.service"), []byte(unit), 0o644),
			os.Symlink("../broken.service", filepath.Join(root, "etc/systemd/system/multi-user.target.wants/broken.service")))
	}
	if testing.Short() {
		t.Skip("a lab host is not for -short")
	}
	h, err := Start(t.Context(), Options{Suite: "trixie", Prepare: broken})
	if err == nil {
		h.Stop()
	}
	if err == nil || !strings.Contains(err.Error(), "broken.service") {
		t.Errorf("error %v, want one that names broken.service", err)
	}
	New(t, Options{Suite: "trixie", Prepare: broken, Degraded: true})
}

func TestRun(t *testing.T) {
	h := New(t, Options{Suite: "trixie"})
	for _, row := range []struct {
		why, script    string
		stdout, stderr string
		exit           int
	}{
		{"both outputs are told apart", "echo out; echo err >&2", "out\n", "err\n", 0},
		{"the exit status is the command's", "exit 7", "", "", 7},
		{"a signal is no exit status 0", "kill -9 $$", "", "", 137},
		{"the first failing command ends a script", "false; echo on", "", "", 1},
		{"a daemon that keeps the pipes does not keep the caller", "sleep 1000 & echo $?", "0\n", "", 0},
	} {
		stdout, stderr, exit, err := h.Sh(t.Context(), row.script)
		if stdout != row.stdout || stderr != row.stderr || exit != row.exit || err != nil {
			t.Errorf("%s: got %q %q %d %v, want %q %q %d", row.why, stdout, stderr, exit, err, row.stdout, row.stderr, row.exit)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, _, err := h.Run(ctx, "sleep", "1001"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the deadline", err)
	}
	if out := h.Must(t, "pgrep -f 'sleep 100[1]' || :"); out != "" {
		t.Errorf("process %s outlives its context", out)
	}
}

// Two hosts at once must share neither ports nor cgroups nor names of machines.
func TestTwoHosts(t *testing.T) {
	one, two := New(t, Options{Suite: "trixie"}), New(t, Options{Suite: "bookworm"})
	for _, h := range []*Host{one, two} {
		nodeA(t, h)
		h.Must(t, "systemd-run --quiet --unit=port --socket-property=ListenStream=127.0.0.1:10248 true")
	}
	if err := one.Stop(); err != nil {
		t.Fatal(err)
	}
	if out := two.Must(t, "systemctl is-active systemd-nspawn@node-a"); out != "active" {
		t.Errorf("the end of one host made the machine of the other %s", out)
	}
	_, err := Start(t.Context(), Options{Suite: "trixie", Name: two.Name()})
	if err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("error %v, want that the name is taken", err)
	}
}

func TestStarterKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("a lab host is not for -short")
	}
	for _, row := range []struct {
		victim string
		pid    func(starter int, s state) int
	}{
		{"starter", func(starter int, _ state) int { return starter }},
		{"supervisor", func(_ int, s state) int { return s.Supervisor }},
	} {
		t.Run(row.victim, func(t *testing.T) {
			starter, line := helper(t, "start")
			var s state
			if err := json.Unmarshal([]byte(line), &s); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			h, err := Attach(s.Name)
			if err != nil {
				t.Fatal(err)
			}
			nodeA(t, h)
			namespaces := mountNamespaces(t, s.Supervisor, s.Leader)
			supervisor, leader := pidfd(t, s.Supervisor), pidfd(t, s.Leader)
			if err := unix.Kill(row.pid(starter.Process.Pid, s), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			readable(t, supervisor)
			readable(t, leader)
			if row.victim == "supervisor" {
				// Nobody is left to remove its cgroup: whoever comes next does.
				if _, err := List(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			wantNothingLeft(t, s.Name, namespaces)
		})
	}
}

func TestStop(t *testing.T) {
	h := New(t, Options{Suite: "trixie"})
	nodeA(t, h)
	namespaces := mountNamespaces(t, h.get().Supervisor, h.Leader())
	if err := h.Stop(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, h.Name(), namespaces)
}

func TestDetach(t *testing.T) {
	h := New(t, Options{Suite: "trixie"})
	if err := h.Detach(); err != nil {
		t.Fatal(err)
	}
	namespaces := mountNamespaces(t, h.get().Supervisor, h.Leader())
	h.leash.Close()
	other, err := Attach(h.Name())
	if err != nil {
		t.Fatal(err)
	}
	other.Must(t, "true")
	if err := other.Reboot(t.Context()); err == nil {
		t.Error("a host of another process says that it was rebooted, which it cannot know")
	}
	if err := other.Stop(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, h.Name(), namespaces)
}

func TestBuildKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("a build is not for -short")
	}
	cache := t.TempDir()
	builder, _ := helper(t, "build", "BERTH_LAB_CACHE="+cache)
	awaitContent(t, filepath.Join(cache, "trixie.log"))
	unshare := child(t, builder.Process.Pid)
	script := child(t, unshare)
	namespaces := mountNamespaces(t, script)
	end := pidfd(t, script)
	builder.Process.Kill()
	readable(t, end)
	if pids := inMountNamespaces(t, namespaces); len(pids) != 0 {
		t.Errorf("processes %v of the build go on", pids)
	}
	if exists(baseDir(cache, "trixie")) {
		t.Error("half a base is taken as one")
	}
}

// awaitContent returns when an existing file is no longer empty.
func awaitContent(t *testing.T, path string) {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if info, err := os.Stat(path); err == nil && info.Size() > 0 {
		return
	}
	readable(t, fd)
}

// child returns the first child of a process.
func child(t *testing.T, pid int) (child int) {
	t.Helper()
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range files {
		data, _ := os.ReadFile(file)
		if n, _ := fmt.Sscan(string(data), &child); n == 1 {
			return child
		}
	}
	t.Fatalf("process %d has no child", pid)
	return 0
}

func TestLockFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := lockFile(t.Context(), path, func() { t.Error("waits for a lock that is free") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := lockFile(ctx, path, cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v of a wait that was cancelled, want %v", err, context.Canceled)
	}
	second, err := lockFile(t.Context(), path, func() { first.Close() })
	if err != nil {
		t.Fatalf("no lock after it was given up: %v", err)
	}
	second.Close()
}

func TestDebianMirror(t *testing.T) {
	for _, row := range []struct{ why, uris, want string }{
		{"the archive of security updates has no whole suites",
			"http://deb.debian.org/debian-security/\nhttp://ftp.de.debian.org/debian/\n", "http://ftp.de.debian.org/debian"},
		{"other vendors' archives are not Debian", "https://deb.nodesource.com/node_20.x/\n", defaultMirror},
		{"debootstrap cannot read apt's own transports", "mirror+file:/etc/apt/mirrors/debian\n", defaultMirror},
		{"a machine without apt", "", defaultMirror},
	} {
		if got := debianMirror(row.uris); got != row.want {
			t.Errorf("%s: got %s, want %s", row.why, got, row.want)
		}
	}
}

func TestCgroup2Mount(t *testing.T) {
	const v1 = "32 24 0:28 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n"
	for _, row := range []struct{ why, mountinfo, want string }{
		{"optional fields end at the dash", "31 24 0:27 / /sys/fs/cgroup rw shared:8 master:1 - cgroup2 cgroup2 rw\n",
			"/sys/fs/cgroup"},
		{"beside version 1", v1 + "41 24 0:37 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			"/sys/fs/cgroup/unified"},
		{"version 1 alone", v1, ""},
	} {
		if got := cgroup2Mount(row.mountinfo); got != row.want {
			t.Errorf("%s: got %q, want %q", row.why, got, row.want)
		}
	}
}
