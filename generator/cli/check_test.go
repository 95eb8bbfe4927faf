package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/hostcheck"
	"berth/generator/plan"
	"berth/helpers/machine"
	"berth/helpers/step"
)

var update = flag.Bool("update", false, "rewrite what is expected")

// checkCases is the folder of golden cases. Each changes the host that fineHost makes by what its case.toml says and by the files
// in its folder in/, and expects what the command prints: for people (want.txt, with the exit code) and for programs (want.json).
const checkCases = "../../testdata/check"

type checkCase struct {
	Why     string
	Args    []string          // FILEs, in the case's folder
	Goal    bool              // the goal state only: no --host
	Quiet   bool              // --quiet
	Verbose bool              // --verbose
	Stdin   string            // the standard input
	Remove  []string          // paths of the host that are taken away
	Modes   map[string]uint32 // of files
	// Systemd is what the host's answers; nil: it does not.
	Systemd *fakeSystemd
}

// fakeSystemd is the systemd of a host that is a folder.
type fakeSystemd struct {
	Answer  string            // its version
	Unknown map[string]string // states of units that are not loaded
}

func (s *fakeSystemd) Version() (string, error) { return s.Answer, nil }

func (s *fakeSystemd) Units(_ context.Context, names ...string) ([]machine.Unit, error) {
	var units []machine.Unit
	for _, name := range names {
		u := machine.Unit{Name: name, Load: "loaded"}
		if load, ok := s.Unknown[name]; ok {
			u.Load = load
		}
		units = append(units, u)
	}
	return units, nil
}

func TestCheckGolden(t *testing.T) {
	defer unix.Umask(unix.Umask(0o022)) // of the folders above a secret, too
	dirs, err := filepath.Glob(checkCases + "/*/case.toml")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, name := range dirs {
		dir, err := filepath.Abs(filepath.Dir(name))
		must(t, err)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			var in checkCase
			meta, err := toml.DecodeFile(filepath.Join(dir, "case.toml"), &in)
			if err != nil || len(meta.Undecoded()) > 0 || in.Why == "" {
				t.Fatal(err, meta.Undecoded(), in.Why)
			}
			root := fineHost(t)
			for _, p := range in.Remove {
				must(t, os.RemoveAll(filepath.Join(root, p)))
			}
			if _, err := os.Stat(filepath.Join(dir, "in")); err == nil {
				copyTree(t, filepath.Join(dir, "in"), root)
			}
			for p, mode := range in.Modes {
				must(t, os.Chmod(filepath.Join(root, p), fs.FileMode(mode)))
			}
			t.Chdir(dir)
			run := func(asJSON bool) string {
				handle, err := file.OpenRoot(root)
				must(t, err)
				defer handle.Close()
				var out bytes.Buffer
				err = check{
					root: handle, files: in.Args, stdin: strings.NewReader(in.Stdin), json: asJSON, host: !in.Goal, quiet: in.Quiet, verbose: in.Verbose,
					dial: func(context.Context, *file.Root) (hostcheck.Systemd, error) {
						if in.Systemd == nil {
							return nil, errors.New("connection refused")
						}
						return in.Systemd, nil
					},
				}.run(t.Context(), &out)
				if err != nil && !errors.Is(err, errSilent) {
					fmt.Fprintf(&out, "berth: %v\n", err)
				}
				if !asJSON {
					fmt.Fprintf(&out, "exit code %d\n", step.Code(err))
				}
				return strings.NewReplacer(root, "ROOT", dir, "CASE").Replace(out.String())
			}
			for name, got := range map[string]string{"want.txt": run(false), "want.json": run(true)} {
				if *update {
					must(t, os.WriteFile(name, []byte(got), 0o644))
				}
				want, err := os.ReadFile(name)
				must(t, err)
				if diff := cmp.Diff(string(want), got); diff != "" {
					t.Errorf("%s (-want +got, rewrite with -update):\n%s", name, diff)
				}
			}
		})
	}
}

const fineGoal = `boot = "a"
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"
[containerd]
config_version = 2
[slot.a]
`

// fineHost makes a host on which all is well: what install.sh installs, what the generator writes, and of the rest just what is
// looked at.
func fineHost(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	write := func(name, content string, mode fs.FileMode) {
		t.Helper()
		path := filepath.Join(root, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(content), mode))
	}
	units := map[string]string{
		"*.service": "usr/lib/systemd/system", "*.target": "usr/lib/systemd/system", "sysctl.d/*": "usr/lib/sysctl.d", "modules-load.d/*": "usr/lib/modules-load.d",
		"tmpfiles.d/*": "usr/lib/tmpfiles.d", "needrestart/*": "etc/needrestart/conf.d",
	}
	for pattern, folder := range units {
		files, err := filepath.Glob("../../units/" + pattern)
		must(t, err)
		for _, f := range files {
			content, err := os.ReadFile(f)
			must(t, err)
			write(filepath.Join(folder, filepath.Base(f)), string(content), 0o644)
		}
	}
	for _, program := range []string{
		"usr/lib/systemd/system-generators/berth-generator", "usr/lib/berth/machine-unit", "usr/lib/berth/nvidia-wire",
		"usr/lib/berth/peer-guard", "usr/lib/berth/record-applied", "usr/lib/berth/render-config", "usr/lib/berth/wait-dbus",
		"usr/lib/berth/wait-kubelet",
		"usr/bin/systemd-nspawn", "usr/bin/dbus-daemon", "usr/bin/systemctl", "usr/sbin/needrestart",
		"var/lib/machines/node-a/usr/lib/systemd/systemd", "var/lib/machines/node-a/usr/bin/dbus-daemon",
		"var/lib/machines/node-a/usr/local/bin/containerd", "var/lib/machines/node-a/usr/local/bin/runc",
		"var/lib/machines/node-a/usr/local/bin/kubelet",
	} {
		write(program, "", 0o755)
	}
	ca, err := os.ReadFile(checkCases + "/ca.crt")
	must(t, err)
	for name, content := range map[string]string{
		"usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-252.so": "",
		"usr/lib/systemd/system/systemd-nspawn@.service":            "",
		"usr/lib/systemd/system/systemd-machined.service":           "",
		"etc/hostname":                      "host-1\n",
		"etc/resolv.conf":                   "nameserver 10.0.0.2\n",
		"etc/berth/goal.toml":               fineGoal,
		"etc/berth/ca.crt":                  string(ca),
		"lib/modules/6.1.0/modules.dep":     "kernel/net/bridge/br_netfilter.ko.xz: kernel/net/bridge/bridge.ko.xz\n",
		"lib/modules/6.1.0/modules.builtin": "kernel/fs/overlayfs/overlay.ko\n",
		// What a running host has.
		"run/systemd/system/.keep":         "",
		"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
		"proc/filesystems":                 "nodev\tbpf\n",
		"proc/sys/kernel/osrelease":        "6.1.0\n",
	} {
		write(name, content, 0o644)
	}
	write("etc/berth/bootstrap-token", "abcdef.0123456789abcdef\n", 0o600)
	own, err := os.ReadFile("../../units/sysctl.d/90-berth.conf")
	must(t, err)
	for line := range strings.Lines(string(own)) {
		if key, value, ok := strings.Cut(line, "="); ok && line[0] != '#' {
			write("proc/sys/"+strings.ReplaceAll(strings.TrimSpace(key), ".", "/"), strings.TrimSpace(value)+"\n", 0o644)
		}
	}
	goal, err := goalstate.Parse([]goalstate.Source{{Path: "/etc/berth/goal.toml", Data: []byte(fineGoal)}})
	must(t, err)
	planned, err := plan.Units(goal, nil)
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(root, plan.UnitDir), 0o755))
	out, err := file.OpenRoot(filepath.Join(root, plan.UnitDir))
	must(t, err)
	defer out.Close()
	_, err = out.WriteAll(planned)
	must(t, err)
	return root
}

// copyTree copies files and links over those in a folder.
func copyTree(t *testing.T, from, to string) {
	t.Helper()
	must(t, filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		if d.Type() == fs.ModeSymlink {
			link, err := os.Readlink(path)
			return errors.Join(err, os.Symlink(link, target))
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(target, content, 0o644)
	}))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
