package machine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
)

// tree writes files into a folder and returns it as the root of a host.
func tree(t *testing.T, files map[string]string) *file.Root {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	root, err := file.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

func TestProcesses(t *testing.T) {
	const unit = "sys/fs/cgroup/machine.slice/systemd-nspawn@node-a.service"
	host := tree(t, map[string]string{
		unit + "/cgroup.procs":                    "",
		unit + "/supervisor/cgroup.procs":         "10\n",
		unit + "/payload/init.scope/cgroup.procs": "11\n12\n13\n",
		"proc/10/stat":                            "10 (systemd-nspawn) S 1",
		"proc/10/comm":                            "systemd-nspawn\n",
		"proc/11/stat":                            "11 (a) Z) b) R 1", // a command's name may hold anything
		"proc/11/comm":                            "a) Z) b\n",
		"proc/12/stat":                            "12 (gone) Z 1", // a zombie runs nothing
	})
	got, err := Processes(host, CGroup(host, "node-a", ""))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Process{{11, "a) Z) b"}, {10, "systemd-nspawn"}}, got); diff != "" {
		t.Error(diff)
	}
	if got, err := Processes(host, CGroup(host, "node-b", "")); err != nil || got != nil {
		t.Errorf("a cgroup that is not there: %v, %v", got, err)
	}
}

func TestPopulated(t *testing.T) {
	host := tree(t, map[string]string{
		"a/cgroup.events": "populated 1\nfrozen 0\n",
		"b/cgroup.events": "populated 0\nfrozen 1\n",
	})
	for name, want := range map[string]bool{"a": true, "b": false, "not there": false} {
		if got, err := populated(filepath.Join(host.Name(), name)); got != want || err != nil {
			t.Errorf("%s: %v, %v; want %v", name, got, err, want)
		}
	}
}

func TestInit(t *testing.T) {
	for _, c := range []struct {
		status     string
		init, halt bool
		why        string
	}{
		{"NSpid:\t300\t1\nSigBlk:\t7be3c0fe28014a03\n", true, true, "systemd, which reads its signals from a descriptor"},
		{"NSpid:\t300\t1\nSigBlk:\t0000000000000000\n", true, false, "systemd before that"},
		{"NSpid:\t300\n", false, false, "systemd-nspawn itself"},
		{"NSpid:\t300\t17\n", false, false, "another process of the machine"},
		{"NSpid:\t300\t40\t1\n", false, false, "the first process of a pod"},
		{"", false, false, "a process that is gone"},
	} {
		if got := isInit(c.status); got != c.init {
			t.Errorf("isInit(%q) = %v: %s", c.status, got, c.why)
		}
		if got := blocks(c.status, sigHalt); got != c.halt {
			t.Errorf("blocks(%q) = %v: %s", c.status, got, c.why)
		}
	}
}
