// Package plan turns a goal state into the unit files of a host. It is pure: the same goal state and the same claims always
// give the same bytes. The generator, and everything that shows or compares what the generator makes, use this one package.
package plan

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	sdunit "github.com/coreos/go-systemd/v22/unit"

	"berth/generator/device"
	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/unit"
	"berth/templates"
)

// Budgets of the steps whose time does not depend on what is waited for, as in the static units.
const (
	guardBudget  = 30 * time.Second
	renderBudget = 30 * time.Second
	// grace is what systemd gives a helper beyond its own budget: a helper that keeps to it can still tell what it
	// waited for, one that hangs is ended.
	grace = 10 * time.Second
)

// Names in the generator's output folder.
const (
	dropIn = "50-berth.conf" // of every drop-in
	wants  = "multi-user.target.wants"
	mount  = ".mount"
)

// unitDir is where the static units are on the host; install.sh sets it when it links.
var unitDir = "/usr/lib/systemd/system"

// defaultTimeouts are the goal state's, those of the static units, and those of a slot that still runs but is not in the goal state any
// more.
var defaultTimeouts = goalstate.Timeouts{Ready: 2 * time.Minute, AfterStart: 3 * time.Minute}

// Units returns the unit files of all slots, with paths relative to the generator's output folder.
//
// held names the slots that hold a claim on the host (their node may be running). What keeps such a slot whole is made for
// it even if the goal state has lost it or is broken, so that a daemon-reload neither takes a device from the running
// machine nor leaves a machine that "systemctl stop node@<slot>" does not stop.
//
// Of a goal state that is Partial only the boot link is made: the static node@.service answers for its slots. goal may be
// nil.
func Units(goal *goalstate.GoalState, held []string) ([]file.File, error) {
	if goal == nil {
		goal = &goalstate.GoalState{}
	}
	p := planner{from: "no valid goal state, because the slot still holds a claim on the host"}
	if len(goal.Sources) > 0 {
		source, err := unit.Value(goal.Sources[0])
		if err != nil {
			return nil, fmt.Errorf("SourcePath=: %w", err)
		}
		p.source, p.from = source, unit.Sources(goal.Sources)
	}
	slots := goal.Slots
	if goal.Partial {
		slots = nil
	}
	names := slices.Sorted(maps.Keys(slots))
	var guards strings.Builder // of those before
	for i, name := range names {
		slot := slots[name]
		p.node(slot)
		p.machine(name, slot.Timeouts)
		if err := p.budgets(slot); err != nil {
			return nil, err
		}
		p.order(slot, names[:i], guards.String(), slots)
		guards.WriteString(guard(name))
	}
	for _, name := range held {
		if slots[name] == nil {
			p.machine(name, defaultTimeouts)
		}
	}
	if goal.Boot != "" {
		p.boot(goal.Boot, slots[goal.Boot] != nil)
	}
	file.Sort(p.files)
	return p.files, nil
}

type planner struct {
	source string // value of SourcePath=
	from   string // for the first line of each file
	files  []file.File
}

func (p *planner) add(name, template string, values map[string]string) {
	values["SOURCES"] = p.from
	p.files = append(p.files, file.File{Path: name, Mode: 0o644, Content: templates.Fill(template, values)})
}

func (p *planner) node(s *goalstate.Slot) {
	p.add("node@"+s.Name+".service", "node@.service", map[string]string{
		"SLOT": s.Name, "MACHINE": s.MachineName(), "SOURCE": p.source, "LIBDIR": templates.LibDir, "START": seconds(total(s.Timeouts)),
	})
}

// machine adds the drop-in of the distribution's own unit of the slot's machine, and what belongs to it.
func (p *planner) machine(slot string, t goalstate.Timeouts) {
	machine := goalstate.MachineName(slot)
	p.add(bpffs(slot), "bpffs.mount", map[string]string{"MACHINE": machine})
	p.add("systemd-nspawn@"+machine+".service.d/"+dropIn, "systemd-nspawn@.service.d", map[string]string{
		"SLOT":    slot,
		"BPFFS":   bpffs(slot),
		"START":   seconds(t.Ready),
		"DEVICES": device.Lines(),
		"BEFORE":  strings.Join(instances(slot, before...), " "),
	})
}

// before are the templates of the steps that the machine requires.
var before = []string{"node-peer-guard", "node-render-nspawn", "node-render-containerd", "node-render-kubelet"}

// bpffs is the unit that mounts the bpf file system of the slot's machine.
func bpffs(slot string) string {
	return sdunit.UnitNamePathEscape("/run/bpffs/"+goalstate.MachineName(slot)) + mount
}

// budgets adds the drop-ins of those steps whose time the goal state sets to something else than what the static units say, and of the
// step that is given a credential.
func (p *planner) budgets(s *goalstate.Slot) error {
	static := budgets(defaultTimeouts)
	for step, budget := range budgets(s.Timeouts) {
		if budget != static[step] {
			p.add(step+"@"+s.Name+".service.d/"+dropIn, "budget.conf", map[string]string{
				"BUDGET": seconds(budget), "TIMEOUT": seconds(budget + grace),
			})
		}
	}
	if name, key := s.Kubelet.Credential(); name != "" {
		setting := "LoadCredential"
		if s.Kubelet.BootstrapTokenEncryptedCredential != "" {
			setting = "LoadCredentialEncrypted"
		}
		credential, err := unit.Credential(name)
		if err != nil {
			return fmt.Errorf("LoadCredential=: %w", err)
		}
		p.add("node-render-kubelet@"+s.Name+".service.d/"+dropIn, "credential.conf",
			map[string]string{"KEY": key, "SETTING": setting, "CREDENTIAL": credential})
	}
	return nil
}

// budgets are those of the steps, by the first part of their units' names.
func budgets(t goalstate.Timeouts) map[string]time.Duration {
	return map[string]time.Duration{
		"node-render-nspawn": max(renderBudget, t.AfterStart), // may initialise GPUs
		"node-wait-dbus":     t.Ready,
		"node-nvidia-wire":   t.AfterStart,
		"node-containerd":    2 * t.Ready, // for the machine's D-Bus, and for containerd
		"node-kubelet":       t.Ready,
	}
}

// total bounds node@ itself, which runs while all steps of its chain run.
func total(t goalstate.Timeouts) time.Duration {
	const steps = 5 // guard, render, machine, kubelet, wait-kubelet
	step := budgets(t)
	beside := max(step["node-wait-dbus"]+grace+step["node-nvidia-wire"], step["node-containerd"]) + grace
	return guardBudget + step["node-render-nspawn"] + t.Ready + beside + step["node-kubelet"] + t.Ready + t.Settle + steps*grace
}

// order adds the ordering of the slot's guard after those of its peers that come first by name, of which earlier are all, and guards
// their units. Either of the two can name the other as its peer.
func (p *planner) order(s *goalstate.Slot, earlier []string, guards string, slots map[string]*goalstate.Slot) {
	// Mostly it is all of them, and of a thousand slots there are half a million pairs.
	if i, _ := slices.BinarySearch(s.Peers, s.Name); i < len(earlier) {
		guards = ""
		for _, name := range earlier {
			_, is := slices.BinarySearch(s.Peers, name)
			_, has := slices.BinarySearch(slots[name].Peers, s.Name)
			if is || has {
				guards += guard(name)
			}
		}
	}
	if guards != "" {
		p.add("node-peer-guard@"+s.Name+".service.d/"+dropIn, "guard-order.conf", map[string]string{"GUARDS": guards[1:]})
	}
}

// guard is the guard's unit of a slot, with a space before it.
func guard(slot string) string { return " node-peer-guard@" + slot + ".service" }

// boot adds the link that starts a slot at boot. Units from a generator cannot be enabled by systemctl, and the boot slot
// of a broken goal state gets the link too: its start fails and says why, instead of a host that silently has no node.
func (p *planner) boot(slot string, valid bool) {
	target := path.Join(unitDir, "node@.service") // which answers for a slot without a valid goal state
	if valid {
		target = "../node@" + slot + ".service"
	}
	p.files = append(p.files, file.File{
		Path: path.Join(wants, "node@"+slot+".service"), Mode: fs.ModeSymlink | 0o777, Content: []byte(target),
	})
}

// LookAgain is the link that has the generator look again for the last good goal states, when their folder is mounted.
func LookAgain() file.File {
	const again = "berth-last-good.service"
	return file.File{
		Path: path.Join(wants, again), Mode: fs.ModeSymlink | 0o777, Content: []byte(path.Join(unitDir, again)),
	}
}

func instances(slot string, templates ...string) []string {
	units := make([]string, len(templates))
	for i, t := range templates {
		units[i] = t + "@" + slot + ".service"
	}
	return units
}

// seconds writes d for systemd (systemd.time(7)) and for time.ParseDuration alike.
func seconds(d time.Duration) string {
	if d%time.Second == 0 {
		return strconv.FormatInt(int64(d/time.Second), 10) + "s"
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
}
