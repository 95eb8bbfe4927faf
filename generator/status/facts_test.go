package status

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
	"berth/helpers/machine"
)

// fakeBus is a systemd that knows these units; all others are at rest.
type fakeBus map[string]machine.Service

func (b fakeBus) Service(_ context.Context, name string) (machine.Service, error) {
	if s, ok := b[name]; ok {
		s.Name, s.Load = name, "loaded"
		return s, nil
	}
	return machine.Service{Unit: machine.Unit{Name: name, Load: "loaded", Active: "inactive", Sub: "dead"}}, nil
}

func (b fakeBus) Units(ctx context.Context, names ...string) (units []machine.Unit, err error) {
	for _, name := range names {
		s, err := b.Service(ctx, name)
		if err != nil {
			return nil, err
		}
		units = append(units, s.Unit)
	}
	return units, nil
}

func (b fakeBus) Match(ctx context.Context, patterns ...string) (units []machine.Unit, err error) {
	for name := range b {
		for _, p := range patterns {
			if ok, _ := path.Match(p, name); ok {
				s, err := b.Service(ctx, name)
				if err != nil {
					return nil, err
				}
				units = append(units, s.Unit)
			}
		}
	}
	return units, nil
}

// is makes a unit of a state.
func is(active, job string) machine.Service {
	return machine.Service{Unit: machine.Unit{Active: active, Job: job}}
}

// tree makes a host's root folder.
func tree(t *testing.T, files map[string]string) *file.Root {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
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

const goalText = `boot = "b"
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/token"
[containerd]
binary = "/opt/containerd"
[slot.b]
[slot.a]
`

// TestSlots is about which slots are worth a look.
func TestSlots(t *testing.T) {
	bus := fakeBus{
		"node@c.service":                  is("failed", ""),
		"node-peer-guard@d.service":       is("inactive", "start"),
		"systemd-nspawn@node-e.service":   is("active", ""),
		"node@f.service":                  is("inactive", ""),
		"systemd-nspawn@other.service":    is("active", ""),
		"systemd-nspawn@node-.service":    is("active", ""),
		"node@not\\x2da\\x2dslot.service": is("failed", ""),
		"node-exporter@g.service":         is("active", ""),
	}
	for _, c := range []struct {
		reason string
		files  map[string]string
		named  []string
		want   string
	}{
		{"those of the goal state first, then what is not at rest, then claims", map[string]string{
			"etc/berth/goal.toml": goalText, "run/berth/claims/h": ""}, nil, "a b c d e h"},
		{"also where the goal state is broken", map[string]string{"etc/berth/goal.toml": goalText + "boat = 1\n"}, nil, "a b c d e"},
		{"no goal state", nil, nil, "c d e"},
		{"one that is asked for", nil, []string{"z"}, "c d e z"},
	} {
		g := Gatherer{Root: tree(t, c.files), Bus: bus}
		f, err := g.Gather(t.Context(), c.named...)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range f.Slots {
			got = append(got, s.Name)
			if len(s.Units) != nodeStep+1 {
				t.Errorf("slot %s has %d units", s.Name, len(s.Units))
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: got %v, want %s", c.reason, got, c.want)
		}
	}
}

func TestGather(t *testing.T) {
	root := tree(t, map[string]string{
		"etc/berth/goal.toml":       goalText,
		"run/berth/claims/a":        "",
		"proc/sys/kernel/osrelease": "6.12.0\n",
		"proc/17/stat":              "17 (sleep) S 1",
		"proc/17/comm":              "sleep\n",
		"sys/fs/cgroup/machine.slice/systemd-nspawn@node-b.service/cgroup.procs": "17\n",
		"var/lib/machines/node-a/etc/os-release":                                 "PRETTY_NAME=\"Debian\"\n",
		"var/lib/machines/node-a/opt/containerd":                                 "",
		"var/lib/machines/node-a/var/lib/dpkg/info/containerd.list":              "/opt/containerd\n",
		"var/lib/machines/node-a/var/lib/dpkg/status":                            "Package: containerd\nStatus: install ok installed\nVersion: 2.1.9\n",
	})
	written := time.Date(2026, 2, 28, 0, 0, 0, 0, time.UTC)
	if err := os.Chtimes(filepath.Join(root.Name(), "etc/berth/goal.toml"), written, written); err != nil {
		t.Fatal(err)
	}
	bus := fakeBus{online: is("active", "")}
	for _, unit := range units("a") {
		bus[unit] = is("active", "")
	}
	asked := []string{}
	g := Gatherer{
		Root: root, Bus: bus,
		Inside: func(_ context.Context, name string) *Inside {
			asked = append(asked, name)
			return &Inside{Systemd: "257", Containerd: service("containerd.service", "active"),
				Kubelet: machine.Service{Unit: machine.Unit{Active: "active"}, InvocationID: "1"}}
		},
		Lines: func(_ context.Context, name string, n int, filter ...string) ([]string, error) {
			asked = append(asked, fmt.Sprint(name, " ", n, " ", filter))
			return []string{`I0301 12:00:00.0 7 server.go:530] "Kubelet version" kubeletVersion="v1.35.0"`}, nil
		},
	}
	for range 2 { // the second look finds the versions again
		f, err := g.Gather(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		a, b := f.Slots[0], f.Slots[1]
		if f.GoalError != nil || f.Kernel != "6.12.0" || f.Online != "active" || !f.Written.Equal(written) || f.Unreadable {
			t.Errorf("the host: %+v", f)
		}
		if !a.Claim || b.Claim {
			t.Errorf("claims: a %v, b %v; want that of a", a.Claim, b.Claim)
		}
		if v := a.Versions; v.OS != "Debian" || v.Containerd != "2.1.9" || v.Kubelet != "v1.35.0" {
			t.Errorf("versions: %+v", v)
		}
		if a.Left != nil || len(b.Left) != 1 || b.Left[0].PID != 17 {
			t.Errorf("processes left: a %v, b %v; want 17 in b", a.Left, b.Left)
		}
		// Nothing was generated on this host.
		if len(a.Stale) == 0 || !strings.Contains(strings.Join(a.Stale, " "), "run/systemd/generator/node@a.service") {
			t.Errorf("stale: %v", a.Stale)
		}
	}
	want := []string{"node-a", "node-a 1 [_SYSTEMD_UNIT=kubelet.service --grep=Kubelet version.*kubeletVersion=]", "node-a"}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Errorf("asked, -want +got:\n%s", diff)
	}
}

// TestLog is about whose last lines tell why a slot failed.
func TestLog(t *testing.T) {
	failed := is("failed", "")
	failed.InvocationID = "f00"
	inside := func(context.Context, string) *Inside {
		return &Inside{Kubelet: machine.Service{Unit: machine.Unit{Active: "activating"}, InvocationID: "1"}}
	}
	for _, c := range []struct {
		reason string
		up     int // so many steps are up
		fails  int // this one failed; -1: none
		inside func(context.Context, string) *Inside
		want   Log
	}{
		{"a step of the host", 1, 1, inside, Log{"node-render-nspawn@a.service", "", []string{"[_SYSTEMD_INVOCATION_ID=f00]"}}},
		{"containerd: what it said itself", 7, 7, inside, Log{"containerd.service", "node-a", []string{"node-a[_SYSTEMD_UNIT=containerd.service]"}}},
		{"kubelet, too", 8, 8, inside, Log{kubelet, "node-a", []string{"node-a[_SYSTEMD_UNIT=kubelet.service]"}}},
		{"kubelet, where the machine may not be asked", 8, 8, nil, Log{"node-kubelet@a.service", "", []string{"[_SYSTEMD_INVOCATION_ID=f00]"}}},
		{"the node itself: it waits for kubelet", 9, 9, inside, Log{kubelet, "node-a", []string{"node-a[_SYSTEMD_UNIT=kubelet.service]"}}},
		{"a node that is up, whose kubelet crashes", 10, -1, inside, Log{kubelet, "node-a", []string{"node-a[_SYSTEMD_UNIT=kubelet.service]"}}},
		{"nothing failed, as far as this user sees", 10, -1, nil, Log{}},
	} {
		bus := fakeBus{}
		for i, unit := range units("a") {
			if i < c.up {
				bus[unit] = is("active", "")
			} else if i == c.fails {
				bus[unit] = failed
			}
		}
		lines := func(_ context.Context, name string, _ int, filter ...string) ([]string, error) {
			return []string{fmt.Sprint(name, filter)}, nil
		}
		g := Gatherer{Root: tree(t, nil), Bus: bus, Inside: c.inside, Lines: lines}
		f, err := g.Gather(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, f.Slots[0].Log); diff != "" {
			t.Errorf("%s, -want +got:\n%s", c.reason, diff)
		}
	}
}

// TestWatch steps through the event loop: each channel is unbuffered, so that a send is over when the loop has taken it.
func TestWatch(t *testing.T) {
	events, redraw, rested := make(chan struct{}), make(chan struct{}), make(chan time.Time)
	looks := 0
	shown, last := make(chan int), time.Time{}
	ctx, cancel := context.WithCancel(t.Context())
	now := noon
	w := Watch{
		Gather: func(context.Context) (Facts, error) {
			looks++
			return host(goal("", "a"), down("a")), nil
		},
		Events: events, Redraw: redraw,
		Now: func() Moment {
			now.Wall = now.Wall.Add(time.Second)
			return now
		},
		After: func(d time.Duration) <-chan time.Time {
			if d != pause {
				t.Errorf("a pause of %v", d)
			}
			return rested
		},
		Show: func(r Report) (bool, error) {
			last = r.Time
			shown <- looks
			return looks == 3, nil
		},
	}
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	next := func(want int) {
		t.Helper()
		if got := <-shown; got != want {
			t.Errorf("shown: what was seen in look %d, want %d", got, want)
		}
	}
	next(1)
	for range 20 { // time passes, and nobody asks the host: not even where it has an event, until the pause is over
		select {
		case redraw <- struct{}{}:
			next(1)
		case events <- struct{}{}:
			t.Fatal("an event was taken before the pause was over")
		}
	}
	rested <- time.Time{}
	redraw <- struct{}{}
	next(1)
	events <- struct{}{}
	next(2)
	rested <- time.Time{}
	events <- struct{}{}
	next(3) // Show ends it
	if err := <-done; err != nil {
		t.Error(err)
	}
	if want := noon.Wall.Add(24 * time.Second); !last.Equal(want) {
		t.Errorf("the last report is of %v, want %v: each is of the moment at which it is shown", last, want)
	}

	looks = 0
	go func() { done <- w.Run(ctx) }()
	next(1)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("the end by a signal is an error: %v", err)
	}
}
