package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/helpers/facts"
	"berth/helpers/machine"
	"berth/helpers/step"
)

var update = flag.Bool("update", false, "rewrite the expected reports")

// noon is the moment of all reports; the host has been up for an hour.
var noon = Moment{time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), time.Hour}

// ago is a time before noon on the monotonic clock.
func ago(d time.Duration) time.Duration { return noon.Monotonic - d }

// goal is a valid goal state of the slots.
func goal(boot string, slots ...string) *goalstate.GoalState {
	g := &goalstate.GoalState{Sources: []string{"/etc/berth/goal.toml"}, Boot: boot, Slots: map[string]*goalstate.Slot{}}
	for _, s := range slots {
		g.Slots[s] = &goalstate.Slot{Name: s}
	}
	return g
}

// host is a host with a goal state, and with these slots.
func host(g *goalstate.GoalState, slots ...SlotFacts) Facts {
	return Facts{Goal: g, Kernel: "6.12.0", Online: "active", Slots: slots}
}

var debian = facts.Versions{OS: "Debian GNU/Linux 13 (trixie)", Containerd: "1.7.24~ds1-6+b4", Kubelet: "v1.35.0"}

// down is a slot of which nothing runs.
func down(name string) SlotFacts {
	s := SlotFacts{Name: name, Versions: debian}
	for _, unit := range units(name) {
		s.Units = append(s.Units, machine.Service{Unit: machine.Unit{Name: unit, Load: "loaded", Active: "inactive", Sub: "dead"}, Result: "success"})
	}
	s.Units[nodeStep].FragmentPath = "/run/systemd/generator/node@" + name + ".service"
	return s
}

// said is what each step of a slot that is up said last.
var said = []string{"slot a holds the host", "files written: 1, right already: 0", "files written: 5, right already: 0",
	"files written: 7, right already: 0", "Container running: Ready.", "systemd 257.13 inside machine node-a answers",
	"no NVIDIA GPU", "containerd.service is started", "kubelet.service is started", "the node in slot a is ready"}

// up makes the first n steps of a slot done: each took 100 ms, and the last was done five minutes ago.
func up(s SlotFacts, n int) SlotFacts {
	s.Claim = n > 0
	for i := range s.Units[:n] {
		begin := 5*time.Minute + time.Duration(n-i)*100*time.Millisecond
		s.Units[i] = set(s.Units[i], "active", "exited", said[i], begin)
		s.Units[i].ActiveEnter = ago(begin - 100*time.Millisecond)
		s.Units[i].ActiveSince = noon.Wall.Add(-begin + 100*time.Millisecond)
	}
	return s
}

// ready is a slot that is ready.
func ready(name string) SlotFacts {
	s := up(down(name), nodeStep+1)
	s.Inside = &Inside{Systemd: "257.13", Containerd: service("containerd.service", "active"), Kubelet: service(kubelet, "active")}
	return s
}

func service(name, active string) machine.Service {
	return machine.Service{Unit: machine.Unit{Name: name, Load: "loaded", Active: active, Sub: "running"}}
}

// set gives a unit a state that it has had since it began.
func set(u machine.Service, active, sub, status string, began time.Duration) machine.Service {
	u.Active, u.Sub, u.StatusText = active, sub, status
	u.InactiveExit = ago(began)
	return u
}

// failed makes a unit one that failed after some time.
func failed(u machine.Service, status string, exit int32, took time.Duration) machine.Service {
	u = set(u, "failed", "failed", status, time.Minute)
	u.InactiveEnter = ago(time.Minute - took)
	u.Result, u.ExecMainStatus = "exit-code", exit
	return u
}

// change changes a slot.
func change(s SlotFacts, with func(*SlotFacts)) SlotFacts {
	with(&s)
	return s
}

func tries(u machine.Service, status string) machine.Service {
	u = failed(u, status, step.ExitFailed, time.Second)
	u.Active, u.Sub = "activating", "auto-restart"
	return u
}

// reports are what testdata holds the reports of.
var reports = []struct {
	name, reason string
	code         int // the exit code where no slot is named
	facts        Facts
}{
	{"ready", "one slot runs, the other is there to be changed over to", step.ExitDone,
		host(goal("a", "a", "b"), ready("a"), down("b"))},
	{"starting", "a step that runs says for what it waits; its time is that until now", step.ExitNotReady,
		host(goal("a", "a"), change(up(down("a"), dbusStep), func(s *SlotFacts) {
			s.Units[dbusStep] = set(s.Units[dbusStep], "activating", "start",
				"waiting for D-Bus inside machine node-a: its socket is not there yet", 95*time.Second)
			for i := dbusStep; i <= kubeletStep; i++ {
				s.Units[i].Job = "start"
			}
			s.Units[nodeStep] = set(s.Units[nodeStep], "activating", "start", "waiting for the steps of slot a: node-wait-dbus@a.service", 2*time.Minute)
			s.Units[nodeStep].Job = "start"
		}))},
	{"boot", "before the first step a host that boots waits for its network", step.ExitNotReady,
		changeHost(host(goal("a", "a"), change(down("a"), func(s *SlotFacts) {
			for i := range s.Units {
				s.Units[i].Job = "start"
			}
		})), func(f *Facts) { f.Online = "inactive" })},
	{"retrying", "the kubelet's own last line tells why; that it holds what would disturb a terminal does not matter", step.ExitNotReady,
		host(goal("a", "a"), change(up(down("a"), kubeletStep), func(s *SlotFacts) {
			s.Units[kubeletStep] = failed(s.Units[kubeletStep], "machine node-a: kubelet.service: job failed: failed: "+
				"kubelet.service is activating (auto-restart): exit status 1 …", step.ExitFailed, 1800*time.Millisecond)
			s.Units[nodeStep] = tries(s.Units[nodeStep], "step node-kubelet@a.service failed: machine node-a: … (see: journalctl -u node-kubelet@a.service)")
			s.Inside = &Inside{Systemd: "257.13", Containerd: service("containerd.service", "active"), Kubelet: service(kubelet, "activating")}
			s.Inside.Kubelet.NRestarts = 4
			s.Log = Log{kubelet, "node-a", []string{"I0301 main.go:12] \"Kubelet version\"",
				"E0301 run.go:74] \"command failed\" err=\"\x1b[31mno such disk\x1b]0;title\x07\""}}
		}))},
	{"failed", "a step that was ended said nothing of it", step.ExitNotReady,
		host(goal("", "a"), change(up(down("a"), 3), func(s *SlotFacts) {
			s.Units[3] = failed(s.Units[3], "making it", 0, 40*time.Second)
			s.Units[3].Result = "timeout"
			s.Units[nodeStep] = failed(s.Units[nodeStep], "step node-render-kubelet@a.service failed: result timeout", step.ExitFailed, 41*time.Second)
		}))},
	{"refused", "the peer is named, and how to change over", step.ExitDone,
		host(goal("a", "a", "b"), ready("a"), change(down("b"), func(s *SlotFacts) {
			reason := "slot b refused: slot a holds the host (node@a.service is active); to release it: systemctl stop node@a.service"
			s.Units[guardStep] = failed(s.Units[guardStep], reason, step.ExitRefused, 80*time.Millisecond)
			s.Units[nodeStep] = failed(s.Units[nodeStep], "step node-peer-guard@b.service failed: "+reason, step.ExitRefused, 90*time.Millisecond)
			s.Log = Log{"node-peer-guard@b.service", "", []string{reason}}
		}))},
	{"refused-left", "it is no slot that holds the host", step.ExitNotReady,
		host(goal("", "a", "b"), change(down("a"), func(s *SlotFacts) { s.Left = []machine.Process{{PID: 4711, Command: "sleep"}} }),
			change(down("b"), func(s *SlotFacts) {
				s.Units[guardStep] = failed(s.Units[guardStep], "slot b refused: machine node-a is still alive: process 4711 (sleep) in the cgroup of "+
					"systemd-nspawn@node-a.service; to end it: systemctl stop systemd-nspawn@node-a.service", step.ExitRefused, 80*time.Millisecond)
			}))},
	{"broken", "a broken goal state does not hide a slot that runs", step.ExitInvalid,
		changeHost(host(&goalstate.GoalState{Partial: true, Sources: []string{"/etc/berth/goal.toml"}, Boot: "a",
			Slots: map[string]*goalstate.Slot{"a": nil, "b": nil}}, ready("a"), down("b")), func(f *Facts) {
			f.GoalError = goalstate.Errors{
				{File: "/etc/berth/goal.toml", Line: 14, Column: 3, Key: "kubelet.taints[0]",
					Problem: `effect "noschedule"`, Cure: "want NoSchedule, PreferNoSchedule or NoExecute"},
				{File: "/etc/berth/goal.toml.d/50-site.toml", Problem: "is a FIFO", Cure: "want a regular file"},
			}
		})},
	{"last-good", "a broken goal state where one slot goes on with its last good one, and that of another is damaged", step.ExitInvalid,
		changeHost(host(goal("a", "a"), change(ready("a"), func(s *SlotFacts) {
			s.Stored = &store.Record{Slot: "a", Time: noon.Wall.Add(-24 * time.Hour)}
			changed := false
			s.Changed = &changed
		}), change(down("b"), func(s *SlotFacts) {
			s.Unusable = errors.New("the last good goal state of slot b is not used: /var/lib/berth/b: it is damaged: its checksum is another one")
		})), func(f *Facts) {
			f.LastGood = map[string]store.Record{"a": *f.Slots[0].Stored}
			f.GoalError = goalstate.Errors{{File: "/etc/berth/goal.toml", Line: 14, Column: 3, Problem: "is a mistake"}}
		})},
	{"last-good-down", "a slot that would start with its last good one", step.ExitInvalid,
		changeHost(host(goal("a", "a"), change(down("a"), func(s *SlotFacts) {
			s.Stored = &store.Record{Slot: "a", Time: noon.Wall.Add(-24 * time.Hour)}
		})), func(f *Facts) {
			f.LastGood = map[string]store.Record{"a": *f.Slots[0].Stored}
			f.GoalError = goalstate.Errors{{File: "/etc/berth/goal.toml", Line: 14, Column: 3, Problem: "is a mistake"}}
		})},
	{"touched", "a goal state that was written after the start, with the same content", step.ExitDone,
		changeHost(host(goal("a", "a"), change(ready("a"), func(s *SlotFacts) {
			changed := false
			s.Changed = &changed
		})), func(f *Facts) { f.Written = noon.Wall })},
	{"taken-out", "34: a slot that runs and is not in the goal state any more", step.ExitDone,
		host(goal("", "b"), down("b"), ready("a"))},
	{"unknown", "the start of a slot that does not exist", step.ExitNotReady,
		host(goal("", "a"), down("a"), change(down("c"), func(s *SlotFacts) {
			s.Versions = facts.Versions{}
			s.Units[nodeStep] = failed(s.Units[nodeStep], "slot c is not in the goal state (slots: a)", step.ExitInvalid, 10*time.Millisecond)
			s.Units[nodeStep].FragmentPath = "/usr/lib/systemd/system/node@.service"
		}))},
	{"none", "there is no goal state and no slot", step.ExitInvalid,
		changeHost(host(&goalstate.GoalState{}), func(f *Facts) { f.GoalError = goalstate.ErrNone })},
	{"not-installed", "the goal state is there, the units are not", step.ExitNotReady,
		host(goal("", "a"), change(down("a"), func(s *SlotFacts) {
			s.Versions = facts.Versions{}
			for i := range s.Units {
				s.Units[i].Load = "not-found"
			}
			s.Units[machine.MachineStep].Load = "loaded"
		}))},
	{"masked", "a step that cannot run", step.ExitNotReady,
		host(goal("", "a"), change(up(down("a"), kubeletStep), func(s *SlotFacts) {
			s.Units[kubeletStep].Load = "masked"
			s.Units[nodeStep] = failed(s.Units[nodeStep], "step node-kubelet@a.service cannot run: its unit is masked "+
				"(see: systemctl cat node-kubelet@a.service)", step.ExitFailed, time.Second)
		}))},
	{"stale", "the goal state was changed after the start", step.ExitDone,
		changeHost(host(goal("a", "a"), change(ready("a"), func(s *SlotFacts) {
			s.Stale = []string{"run/systemd/generator/node@a.service", "run/systemd/generator/node-kubelet@a.service.d/50-berth.conf"}
		})), func(f *Facts) { f.Written = noon.Wall })},
	{"newer", "the units are right, but what the machine was started with may not be", step.ExitDone,
		changeHost(host(goal("a", "a"), ready("a")), func(f *Facts) { f.Written = noon.Wall.Add(-time.Minute) })},
	{"unread", "the slot is in the goal state, and systemd does not know", step.ExitNotReady,
		host(goal("", "a"), change(down("a"), func(s *SlotFacts) {
			s.Units[nodeStep].FragmentPath = "/usr/lib/systemd/system/node@.service"
		}))},
	{"degraded", "the kubelet of a node that was ready crashes", step.ExitNotReady,
		host(goal("a", "a"), change(ready("a"), func(s *SlotFacts) {
			s.Inside.Kubelet.Active, s.Inside.Kubelet.Sub, s.Inside.Kubelet.NRestarts = "activating", "auto-restart", 12
			s.Log = Log{kubelet, "node-a", []string{"E0301 run.go:74] \"command failed\""}}
		}))},
	{"restart", "what is up and waits for its turn to be stopped has no time", step.ExitNotReady,
		host(goal("a", "a"), change(ready("a"), func(s *SlotFacts) {
			for i := range s.Units {
				s.Units[i].Job = "restart"
			}
			s.Units[kubeletStep].Active, s.Units[kubeletStep].StatusText = "deactivating", "stopping kubelet.service"
			s.Units[kubeletStep].ActiveExit = ago(2500 * time.Millisecond)
		}))},
	{"ordinary-user", "who may neither read the goal state nor look into the machine", step.ExitDone,
		changeHost(host(&goalstate.GoalState{Partial: true}, change(ready("a"), func(s *SlotFacts) {
			s.Inside, s.Versions = nil, facts.Versions{}
		})), func(f *Facts) {
			f.Unreadable = true
			f.GoalError = goalstate.Errors{{File: "/etc/berth/goal.toml",
				Problem: "cannot be read: permission denied", Cure: "want a file that root can read"}}
		})},
}

func changeHost(f Facts, with func(*Facts)) Facts {
	with(&f)
	return f
}

// TestReports compares each report with testdata/NAME.json, and its text with NAME.txt and, for a terminal of 80 columns without
// UTF-8, NAME.80.txt.
func TestReports(t *testing.T) {
	for _, c := range reports {
		t.Run(c.name, func(t *testing.T) {
			r := Judge(c.facts, noon)
			if code := r.Code(false); code != c.code {
				t.Errorf("exit code %d, want %d: %s", code, c.code, c.reason)
			}
			var text, narrow, doc bytes.Buffer
			e := json.NewEncoder(&doc)
			e.SetIndent("", "  ")
			if err := errors.Join(e.Encode(r), Text(&text, r, Style{}), Text(&narrow, r, Style{Width: 80, ASCII: true})); err != nil {
				t.Fatal(err)
			}
			for name, got := range map[string]string{".json": doc.String(), ".txt": text.String(), ".80.txt": narrow.String()} {
				file := filepath.Join("testdata", c.name+name)
				if *update {
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), got); diff != "" {
					t.Errorf("%s: %s, -want +got (rewrite with -update):\n%s", file, c.reason, diff)
				}
			}
			for line := range strings.Lines(narrow.String()) {
				line = strings.TrimSuffix(line, "\n")
				if command, _, _ := strings.Cut(line, "  #"); len(line) > 80 && !strings.Contains(command, "systemctl") {
					t.Errorf("%d columns: %s", len(line), line)
				}
				for _, b := range []byte(line) {
					if b < ' ' || b > '~' {
						t.Errorf("byte %#x in %q", b, line)
					}
				}
			}
		})
	}
}

// TestCode is about slots that are asked for by name.
func TestCode(t *testing.T) {
	r := Judge(host(goal("a", "a", "b"), ready("a"), down("b"), down("c"), ready("d")), noon)
	for _, c := range []struct {
		reason string
		named  []string
		want   int
	}{
		{"no name: one ready slot is enough", nil, step.ExitDone},
		{"a slot that is ready", []string{"a"}, step.ExitDone},
		{"all must be ready", []string{"a", "b"}, step.ExitNotReady},
		{"a slot that nobody knows", []string{"c"}, step.ExitInvalid},
		{"a slot that was taken out of the goal state, and runs", []string{"d"}, step.ExitDone},
	} {
		if got := r.Only(c.named...).Code(len(c.named) > 0); got != c.want {
			t.Errorf("%s: exit code %d, want %d", c.reason, got, c.want)
		}
	}
}

func TestChanges(t *testing.T) {
	before := Judge(host(goal("a", "a"), change(up(down("a"), kubeletStep), func(s *SlotFacts) {
		s.Units[kubeletStep] = set(s.Units[kubeletStep], "activating", "start", "starting kubelet.service", time.Second)
		s.Units[nodeStep] = set(s.Units[nodeStep], "activating", "start", "waiting", time.Second)
	})), noon)
	now := Judge(host(goal("a", "a", "b"), change(ready("a"), func(s *SlotFacts) {
		s.Inside.Kubelet.Active, s.Inside.Kubelet.Sub = "failed", "failed"
	}), down("b")), noon)
	for _, c := range []struct {
		reason string
		before *Report
		now    Report
		want   []string
	}{
		{"the first report", nil, before, []string{
			"slot a: peer-guard: done after 100ms: slot a holds the host",
			"slot a: render-nspawn: done after 100ms: files written: 1, right already: 0",
			"slot a: render-containerd: done after 100ms: files written: 5, right already: 0",
			"slot a: render-kubelet: done after 100ms: files written: 7, right already: 0",
			"slot a: machine: done after 100ms: Container running: Ready.",
			"slot a: wait-dbus: done after 100ms: systemd 257.13 inside machine node-a answers",
			"slot a: nvidia-wire: done after 100ms: no NVIDIA GPU",
			"slot a: containerd: done after 100ms: containerd.service is started",
			"slot a: kubelet: running: starting kubelet.service",
			"slot a: node: running: waiting",
			"slot a: starting",
		}},
		{"that time passes is no change", &before, before, nil},
		{"steps, slots", &before, now, []string{
			"slot a: kubelet: done after 100ms: kubelet.service is started",
			"slot a: node: done after 100ms: the node in slot a is ready",
			"slot a: degraded: kubelet.service is failed (failed)",
			"slot b: down",
		}},
		{"a slot is gone, and the goal state too", &now, Judge(changeHost(host(goal("", "a"), ready("a")), func(f *Facts) {
			f.GoalError = goalstate.ErrNone
		}), noon), []string{
			"goal state: none", "goal state: there is no goal state: write /etc/berth/goal.toml", "slot a: ready", "slot b: gone",
		}},
	} {
		if diff := cmp.Diff(c.want, Changes(c.before, c.now)); diff != "" {
			t.Errorf("%s, -want +got:\n%s", c.reason, diff)
		}
	}
}
