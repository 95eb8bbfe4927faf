package plan

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
)

// hostWith returns a host with these files.
func hostWith(t *testing.T, files ...file.File) *file.Root {
	t.Helper()
	root, err := file.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	if _, err := root.WriteAll(files); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestHeld(t *testing.T) {
	claim := func(name string) file.File { return file.File{Path: ClaimsDir + "/" + name, Mode: 0o600} }
	for _, tt := range []struct {
		why   string
		files []file.File
		want  []string
		err   string
	}{
		{"no folder: nothing was ever claimed", nil, nil, ""},
		{"sorted, and only names of slots", []file.File{claim("b"), claim("a"), claim(".a123"), claim("lock~"), claim("A")}, []string{"a", "b"}, ""},
		{"not a folder", []file.File{{Path: ClaimsDir, Mode: 0o600}}, nil, "not a directory"},
	} {
		got, err := Held(hostWith(t, tt.files...))
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.why, diff)
		}
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: error %v, want %q", tt.why, err, tt.err)
		}
	}
}

// installed returns a host on which the generator has written files.
func installed(t *testing.T, files []file.File) *file.Root {
	t.Helper()
	root := hostWith(t)
	dir := filepath.Join(root.Name(), UnitDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := file.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if _, err := out.WriteAll(files); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestStale(t *testing.T) {
	const (
		dropInA = UnitDir + "/systemd-nspawn@node-a.service.d/50-berth.conf"
		unitA   = UnitDir + "/node@a.service"
	)
	planned := mustUnits(t, mustParse(t, full), nil)
	for _, tt := range []struct {
		why    string
		change func(root *file.Root) error
		want   []string
	}{
		{"as planned", func(*file.Root) error { return nil }, nil},
		{"another slot's files", func(r *file.Root) error { return r.Remove(UnitDir + "/node@b.service") }, nil},
		{"not there", func(r *file.Root) error { return r.Remove(dropInA) }, []string{dropInA}},
		{"other bytes", func(r *file.Root) error {
			_, err := r.Write(file.File{Path: unitA, Mode: 0o644, Content: []byte("x")})
			return err
		}, []string{unitA}},
		{"a drop-in that is not planned any more", func(r *file.Root) error {
			_, err := r.Write(file.File{Path: UnitDir + "/node-peer-guard@a.service.d/50-berth.conf", Mode: 0o644})
			return err
		}, []string{UnitDir + "/node-peer-guard@a.service.d/50-berth.conf"}},
		{"another program's drop-in", func(r *file.Root) error {
			_, err := r.Write(file.File{Path: UnitDir + "/node-peer-guard@a.service.d/10-other.conf", Mode: 0o644})
			return err
		}, nil},
		{"a drop-in of a slot whose name begins the same", func(r *file.Root) error {
			_, err := r.Write(file.File{Path: UnitDir + "/node-peer-guard@ab.service.d/50-berth.conf", Mode: 0o644})
			return err
		}, nil},
		{"nothing was ever written", func(r *file.Root) error { return os.RemoveAll(filepath.Join(r.Name(), "run")) }, []string{
			UnitDir + "/node-containerd@a.service.d/50-berth.conf",
			UnitDir + "/node-kubelet@a.service.d/50-berth.conf",
			UnitDir + "/node-nvidia-wire@a.service.d/50-berth.conf",
			UnitDir + "/node-render-kubelet@a.service.d/50-berth.conf",
			UnitDir + "/node-render-nspawn@a.service.d/50-berth.conf",
			UnitDir + "/node-wait-dbus@a.service.d/50-berth.conf",
			unitA,
			UnitDir + `/run-bpffs-node\x2da.mount`,
			dropInA,
		}},
	} {
		root := installed(t, planned)
		if err := tt.change(root); err != nil {
			t.Fatal(err)
		}
		got, err := Stale(root, "a", planned)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.why, diff)
		}
	}

	root := installed(t, planned)
	if err := root.Remove(unitA); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(root.Name(), unitA), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := Stale(root, "a", planned); err == nil {
		t.Errorf("a FIFO in place of a unit: %q, want an error", got)
	}
}

func TestLeftover(t *testing.T) {
	planned := mustUnits(t, mustParse(t, full), nil)
	root := installed(t, planned)
	if got, err := Leftover(root, planned); got != nil || err != nil {
		t.Errorf("of what is planned: %q, %v", got, err)
	}
	// Without a goal state and without a claim, all of it; with other programs' units beside it, not these.
	for _, name := range []string{"tmp.mount", "multi-user.target.wants/x@a.service", "x.service.d/50-berth.conf", "a/b"} {
		if _, err := root.Write(file.File{Path: UnitDir + "/" + name, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
	}
	var want []string
	for _, f := range planned {
		want = append(want, f.Path)
	}
	got, err := Leftover(root, nil)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
}

func TestSlotOf(t *testing.T) {
	for _, f := range mustUnits(t, mustParse(t, full), []string{"ab"}) {
		if SlotOf(f.Path) == "" {
			t.Errorf("%s is planned, and belongs to no slot", f.Path)
		}
	}
	for _, c := range []struct{ name, want, why string }{
		{"node@a.service", "a", "the supervising unit"},
		{"node-kubelet@ab.service.d/50-berth.conf", "ab", "a step"},
		{"systemd-nspawn@node-a.service.d/50-berth.conf", "a", "the machine"},
		{`run-bpffs-node\x2da.mount`, "a", "its bpf file system"},
		{"multi-user.target.wants/node@b.service", "b", "the boot slot"},
		{"systemd-nspawn@other.service.d/50-berth.conf", "", "a machine that is no slot's"},
		{`run-bpffs-x\x2da.mount`, "", "another mount"},
		{"getty@a.service", "", "another unit of that instance"},
		{"node@.service", "", "the template"},
		{"node@a.socket", "", "another type"},
		{"other.target.wants/node@a.service", "", "another folder"},
		{"node@a.service.d/10-other.conf", "", "another program's drop-in"},
	} {
		if got := SlotOf(c.name); got != c.want {
			t.Errorf("%s: slot %q, want %q: %s", c.name, got, c.want, c.why)
		}
	}
}

// One direction of an ordered pair is enough, and two would be a cycle.
func TestOrder(t *testing.T) {
	for _, tt := range []struct {
		why   string
		peers map[string][]string
		want  map[string]string // slot: After= of its guard
	}{
		{"one slot", map[string][]string{"a": nil}, nil},
		{"no peers", map[string][]string{"a": nil, "b": nil}, nil},
		{"after all peers that come first by name", map[string][]string{"c": {"a", "b"}, "b": {"a", "c"}, "a": {"b", "c"}},
			map[string]string{"b": "node-peer-guard@a.service", "c": "node-peer-guard@a.service node-peer-guard@b.service"}},
		{"only the first one names the other", map[string][]string{"a": {"b"}, "b": nil}, map[string]string{"b": "node-peer-guard@a.service"}},
		{"only the second one names the other", map[string][]string{"a": nil, "b": {"a"}}, map[string]string{"b": "node-peer-guard@a.service"}},
		{"not after one that is no peer", map[string][]string{"a": nil, "b": {"c"}, "c": {"b"}}, map[string]string{"c": "node-peer-guard@b.service"}},
	} {
		goal := &goalstate.GoalState{Slots: map[string]*goalstate.Slot{}}
		for name, peers := range tt.peers {
			goal.Slots[name] = &goalstate.Slot{Name: name, Peers: peers}
		}
		got := map[string]string{}
		for _, f := range mustUnits(t, goal, nil) {
			if slot, ok := strings.CutPrefix(f.Path, "node-peer-guard@"); ok {
				slot, _, _ = strings.Cut(slot, ".")
				got[slot] = strings.Join(parse(t, f.Path, f.Content).values("After"), " ")
			}
		}
		if len(tt.want) == 0 && len(got) == 0 {
			continue
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.why, diff)
		}
	}
}

// node@ runs while every step of its chain uses up all that systemd gives it, and must not be ended before the last one.
func TestTotal(t *testing.T) {
	made, units := generated(t), static(t)
	var sum time.Duration
	timeout := func(opts options) time.Duration {
		d, err := time.ParseDuration(opts.one(t, "TimeoutStartSec"))
		if err != nil {
			t.Error(err)
		}
		return d
	}
	step := func(name string) time.Duration { return timeout(made[name+"@a.service.d/"+dropIn]) }
	sum += timeout(units["node-peer-guard@.service"]) + timeout(made["systemd-nspawn@node-a.service.d/"+dropIn])
	// Of what runs at the same time, the longest.
	sum += step("node-render-nspawn") + max(step("node-wait-dbus")+step("node-nvidia-wire"), step("node-containerd")) + step("node-kubelet")
	slot := mustParse(t, full).Slots["a"]
	sum += slot.Timeouts.Ready + slot.Timeouts.Settle // what wait-kubelet does when the chain is up
	got, err := time.ParseDuration(made["node@a.service"].one(t, "TimeoutStartSec"))
	if err != nil || got < sum {
		t.Errorf("TimeoutStartSec=%v, %v; the steps may take %v", got, err, sum)
	}
	if got > sum+time.Minute {
		t.Errorf("TimeoutStartSec=%v is much more than the %v that the steps may take", got, sum)
	}
}

func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", time.Second: "1s", 2 * time.Minute: "120s", 99 * time.Hour: "356400s", 1500 * time.Millisecond: "1500ms",
	} {
		if got := seconds(d); got != want {
			t.Errorf("seconds(%v) = %s, want %s", d, got, want)
		}
	}
}

// A boot slot of a broken goal state gets its link all the same, to the unit that says what is broken.
func TestBoot(t *testing.T) {
	for _, tt := range []struct {
		why  string
		goal goalstate.GoalState
		want string
	}{
		{"none", goalstate.GoalState{}, ""},
		{"valid", goalstate.GoalState{Boot: "a", Slots: map[string]*goalstate.Slot{"a": {Name: "a"}}}, "../node@a.service"},
		{"broken", goalstate.GoalState{Boot: "a", Partial: true, Slots: map[string]*goalstate.Slot{"a": {Name: "a"}}}, unitDir + "/node@.service"},
	} {
		got := ""
		for _, f := range mustUnits(t, &tt.goal, nil) {
			if f.Path == "multi-user.target.wants/node@a.service" && f.Mode.Type() == fs.ModeSymlink {
				got = string(f.Content)
			}
		}
		if got != tt.want {
			t.Errorf("%s: the link leads to %q, want %q", tt.why, got, tt.want)
		}
	}
}

// TestLeft puts a plan where an image has it, and requires that it is known again, whatever lies beside it.
func TestLeft(t *testing.T) {
	root := hostWith(t)
	var want []string
	for _, f := range mustUnits(t, mustParse(t, full), nil) {
		want = append(want, f.Path)
		f.Path = BakedDir + "/" + f.Path
		if _, err := root.Write(f); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"node@c.service", "node@.service", "node-own@a.service.d/50-berth.conf", "systemd-nspawn@node-a.service.d/60-own.conf", "dbus.service"} {
		if _, err := root.Write(file.File{Path: BakedDir + "/" + name, Mode: 0o644, Content: []byte("# Made by me\n")}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Left(root, nil)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v, -want +got:\n%s", err, diff)
	}
	if got, err := Left(root, mustUnits(t, mustParse(t, full), nil)); len(got) > 0 || err != nil {
		t.Errorf("with the same plan: %v, %v", got, err)
	}
	if got, err := Left(hostWith(t), nil); len(got) > 0 || err != nil {
		t.Errorf("of a host without a folder for units: %v, %v", got, err)
	}
}

// TestMasks has a host find another goal state than its image was baked with, which is full.
func TestMasks(t *testing.T) {
	source := file.File{Path: "etc/berth/goal.toml", Mode: 0o644}
	const (
		boot       = wants + "/node@a.service"
		credential = "node-render-kubelet@a.service.d/" + dropIn
		order      = "node-peer-guard@b.service.d/" + dropIn
	)
	tokenFile := strings.Replace(full, `bootstrap_token_credential = "token"`, `bootstrap_token_file = "/x"`, 1)
	for _, tt := range []struct {
		why, goal string
		want      []string
	}{
		{"the same", full, nil},
		{"another boot slot", strings.Replace(full, `"a"`, `"b"`, 1), []string{boot}},
		{"no boot slot", strings.Replace(full, `boot = "a"`, "", 1), []string{boot}},
		{"no credential", tokenFile, []string{credential, strings.Replace(credential, "@a", "@b", 1)}},
		{"no order among peers", strings.Replace(strings.Replace(full, "[slot.a]", "[slot.a]\npeers = []", 1), "[slot.b]", "[slot.b]\npeers = []", 1), []string{order}},
		{"a slot that is gone keeps its files, which its stop may need, but does not start at boot",
			strings.Replace(strings.Replace(full, `"a"`, `"b"`, 1), "[slot.a]\n", "", 1), []string{boot, order}},
		{"no goal state", "", []string{boot}},
		{"broken, and the boot slot is certain", strings.Replace(full, `"a"`, `"b"`, 1) + "[nonsense]\n", []string{boot}},
		{"broken, and the boot slot is not certain: the slot starts, and says what is wrong", "boot = 1\n", nil},
	} {
		t.Run(tt.why, func(t *testing.T) {
			root := hostWith(t)
			for _, f := range mustUnits(t, mustParse(t, full), nil) {
				f.Path = BakedDir + "/" + f.Path
				if _, err := root.Write(f); err != nil {
					t.Fatal(err)
				}
			}
			source.Content = []byte(tt.goal)
			if _, err := root.Write(source); err != nil {
				t.Fatal(err)
			}
			goal, _ := goalstate.Load(root)
			planned := mustUnits(t, goal, nil)
			hide, err := masks(root, goal, planned)
			var got []string
			for _, m := range hide {
				got = append(got, m.Path)
				if m.Mode.Type() != fs.ModeSymlink || string(m.Content) != "/dev/null" {
					t.Errorf("%s is no mask: %v %q", m.Path, m.Mode, m.Content)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
				t.Errorf("error %v, -want +got:\n%s", err, diff)
			}

			// The steps of a start agree that nothing is stale then.
			if goal == nil || goal.Partial {
				return
			}
			planned = append(planned, hide...)
			for _, f := range planned {
				f.Path = UnitDir + "/" + f.Path
				if _, err := root.Write(f); err != nil {
					t.Fatal(err)
				}
			}
			for _, slot := range goal.SlotNames() {
				if stale, err := Stale(root, slot, planned); len(stale) > 0 || err != nil {
					t.Errorf("slot %s: stale %q, %v", slot, stale, err)
				}
			}
		})
	}
}

// TestStaleBaked is about hosts without the generator.
func TestStaleBaked(t *testing.T) {
	root := hostWith(t)
	planned := mustUnits(t, mustParse(t, full), nil)
	for _, f := range planned {
		f.Path = BakedDir + "/" + f.Path
		if _, err := root.Write(f); err != nil {
			t.Fatal(err)
		}
	}
	if stale, err := Stale(root, "a", planned); len(stale) > 0 || err != nil {
		t.Errorf("of the same goal state: %q, %v", stale, err)
	}
	other, err := Host(root, mustParse(t, strings.NewReplacer(`bootstrap_token_credential = "token"`, `bootstrap_token_file = "/x"`, "1m", "7m").Replace(full)), nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Stale(root, "a", other)
	want := []string{"node-containerd@a.service.d/50-berth.conf", "node-kubelet@a.service.d/50-berth.conf",
		"node-render-kubelet@a.service.d/50-berth.conf", "node-wait-dbus@a.service.d/50-berth.conf", "node@a.service",
		"systemd-nspawn@node-a.service.d/50-berth.conf"}
	for i := range want {
		want[i] = BakedDir + "/" + want[i]
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("of another goal state: error %v, -want +got:\n%s", err, diff)
	}
}
