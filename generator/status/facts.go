// Package status tells the state of a host's slots, step by step: what was seen (Facts) becomes a Report, and a report becomes text
// or JSON. Only the gathering of the facts touches the host; it reads, and changes nothing.
package status

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/generator/plan"
	"berth/helpers/facts"
	"berth/helpers/machine"
)

// Bus is what is asked of the host's systemd. A *machine.Manager is one.
type Bus interface {
	Units(ctx context.Context, names ...string) ([]machine.Unit, error)
	Match(ctx context.Context, patterns ...string) ([]machine.Unit, error)
	Service(ctx context.Context, name string) (machine.Service, error)
}

// Facts are what was seen of a host at one moment.
type Facts struct {
	// Goal is the goal state that the slots go by, as store.Load returns it, and GoalError what it says is wrong with the host's own.
	Goal      *goalstate.GoalState
	GoalError error
	// LastGood are the slots that Goal has from the store.
	LastGood map[string]store.Record
	// Unreadable says that a file of the goal state may not be read by this user. Whether it is right is then unknown.
	Unreadable bool
	// Written is when the goal state's files were written last.
	Written time.Time
	// Kernel is the release of the host's kernel, which the machines use, too.
	Kernel string
	// Online is the ActiveState of network-online.target, for which the first step waits.
	Online string
	Slots  []SlotFacts
}

// SlotFacts are what was seen of one slot.
type SlotFacts struct {
	Name string
	// Claim says that the slot has a claim on the host.
	Claim bool
	// Units are those of the slot's steps, in order, and node@ as the last.
	Units []machine.Service
	// Left are processes in the cgroup of the slot's machine, though its unit is down.
	Left []machine.Process
	// Stale are the unit files that are not as the goal state says (plan.Stale).
	Stale []string
	// Versions are of what is installed in the root file system of the slot's machine.
	Versions facts.Versions
	// Inside is what the machine's own systemd says; nil: it does not run, or may not be asked by this user.
	Inside *Inside
	// Log holds the last log lines of what failed.
	Log Log
	// Changed says whether the slot has started with another goal state than the present one; nil: not known.
	Changed *bool
	// Stored is the slot's last good goal state, and Unusable why the one that is there would not be used; nil: there is none, or this
	// user may not look.
	Stored   *store.Record
	Unusable error
}

// Inside is what the systemd of a machine says.
type Inside struct {
	Systemd             string // its version
	Containerd, Kubelet machine.Service
}

// Log holds the last lines that a unit has written to the journal.
type Log struct {
	Unit    string   `json:"unit"`
	Machine string   `json:"machine"` // empty: on the host
	Lines   []string `json:"lines"`   // the last one last
}

// Gatherer sees the facts of a host.
type Gatherer struct {
	Root *file.Root
	Bus  Bus
	// Inside asks the systemd of a machine that runs; nil: this user may not.
	Inside func(ctx context.Context, machine string) *Inside
	// Lines reads the last lines of a journal, as machine.Lines does.
	Lines func(ctx context.Context, machine string, n int, filter ...string) ([]string, error)

	versions, said map[string]seenVersions // by slot; of the root file system, and of kubelet's log
}

// logLines is how much of a log is told.
const logLines = 5

// nodeStep, dbusStep, containerdStep and kubeletStep are places among the units of a slot.
const (
	guardStep      = 0
	dbusStep       = 5
	containerdStep = 7
	kubeletStep    = 8
	nodeStep       = 9
)

// units are those of a slot.
func units(slot string) []string { return append(machine.Chain(slot), "node@"+slot+".service") }

const online = "network-online.target"

// Gather sees the facts of the slots in the goal state, of those that hold a claim, of those of which a unit is not at rest, and of
// those named.
func (g *Gatherer) Gather(ctx context.Context, named ...string) (Facts, error) {
	f := Facts{Kernel: strings.TrimSpace(g.text("proc/sys/kernel/osrelease"))}
	var state store.State
	state, f.GoalError = store.Load(g.Root)
	f.Goal, f.LastGood = state.Goal, state.LastGood
	if f.Goal == nil {
		f.Goal = &goalstate.GoalState{}
	}
	f.Unreadable = g.unreadable(f.GoalError)
	for _, source := range f.Goal.Sources {
		if info, err := g.Root.Stat(source); err == nil && info.ModTime().After(f.Written) {
			f.Written = info.ModTime()
		}
	}
	held, err := plan.Held(g.Root)
	if err != nil {
		return Facts{}, err
	}
	var own []string // of a broken one, which has slots that do not go on
	if state.Own != nil {
		own = state.Own.SlotNames()
	}
	slots, err := g.slots(ctx, f.Goal, slices.Concat(own, named, held))
	if err != nil {
		return Facts{}, err
	}
	var planned []file.File
	if !f.Goal.Partial {
		if planned, err = plan.Host(g.Root, f.Goal, held); err != nil {
			return Facts{}, err
		}
	}
	network, err := g.Bus.Units(ctx, online)
	if err != nil {
		return Facts{}, err
	}
	f.Online = network[0].Active
	stored, refused := store.Stored(g.Root)
	for _, name := range slots {
		s, err := g.slot(ctx, name, f.Goal.Slots[name])
		if err != nil {
			return Facts{}, err
		}
		s.Claim = slices.Contains(held, name)
		if used, err := store.Used(g.Root, name); err == nil {
			changed := store.Digest(used.Sources) != state.Digest(name)
			s.Changed = &changed
		}
		if r, ok := stored[name]; ok {
			r.Time = r.Time.Local()
			s.Stored = &r
		}
		if s.Unusable = cmp.Or(refused[name], refused[""]); errors.Is(s.Unusable, fs.ErrPermission) {
			s.Unusable = nil
		}
		if !f.Goal.Partial && f.Goal.Slots[name] != nil {
			if s.Stale, err = plan.Stale(g.Root, name, planned); err != nil {
				return Facts{}, err
			}
		}
		f.Slots = append(f.Slots, s)
	}
	return f, nil
}

// slots returns the slots of the goal state, and then the others that are worth a look.
func (g *Gatherer) slots(ctx context.Context, goal *goalstate.GoalState, more []string) ([]string, error) {
	loaded, err := g.Bus.Match(ctx, units("*")...)
	if err != nil {
		return nil, err
	}
	others := map[string]bool{}
	for _, name := range more {
		others[name] = true
	}
	for _, u := range loaded {
		_, instance, _ := strings.Cut(strings.TrimSuffix(u.Name, ".service"), "@")
		if strings.HasPrefix(u.Name, "systemd-nspawn@") {
			instance = strings.TrimPrefix(instance, goalstate.MachineName(""))
		}
		if goalstate.ValidSlotName(instance) && (u.Active != "inactive" || u.Job != "") {
			others[instance] = true
		}
	}
	names := goal.SlotNames()
	for _, name := range slices.Sorted(maps.Keys(others)) {
		if _, ok := goal.Slots[name]; !ok {
			names = append(names, name)
		}
	}
	return names, nil
}

func (g *Gatherer) slot(ctx context.Context, name string, goal *goalstate.Slot) (SlotFacts, error) {
	s := SlotFacts{Name: name}
	states, err := g.Bus.Units(ctx, units(name)...)
	if err != nil {
		return s, err
	}
	for i, state := range states {
		service := machine.Service{Unit: state}
		// Of a unit that is at rest nothing else is of use, but of node@ where it comes from.
		if state.Load == "loaded" && (state.Active != "inactive" || state.Job != "" || i == nodeStep) {
			if service, err = g.Bus.Service(ctx, state.Name); err != nil {
				return s, err
			}
			service.Job = state.Job
		}
		s.Units = append(s.Units, service)
	}
	m := s.Units[machine.MachineStep]
	if !m.Running() {
		// Unreadable is as good as none: it is only a hint.
		s.Left, _ = machine.Processes(g.Root, machine.CGroup(g.Root, goalstate.MachineName(name), m.ControlGroup))
	}
	s.Versions = g.discover(name, goal)
	if g.Inside != nil && s.Units[dbusStep].Active == "active" && m.Active == "active" {
		s.Inside = g.Inside(ctx, goalstate.MachineName(name))
	}
	if s.Versions.Kubelet == "" {
		s.Versions.Kubelet = g.kubeletVersion(ctx, name, s.Inside)
	}
	s.Log = g.log(ctx, s)
	return s, nil
}

// kubeletVersion is what the kubelet that runs said when it started. Its own project's builds have nothing else to go by.
func (g *Gatherer) kubeletVersion(ctx context.Context, name string, in *Inside) string {
	if in == nil || g.Lines == nil || in.Kubelet.InvocationID == "" {
		return ""
	}
	of := in.Kubelet.InvocationID
	if seen, ok := g.said[name]; ok && seen.of == of {
		return seen.versions.Kubelet
	}
	lines, _ := g.Lines(ctx, goalstate.MachineName(name), 1, "_SYSTEMD_UNIT="+kubelet, "--grep=Kubelet version.*kubeletVersion=")
	seen := seenVersions{of: of}
	for _, line := range lines {
		if m := kubeletVersion.FindStringSubmatch(line); m != nil {
			seen.versions.Kubelet = m[1]
		}
	}
	if g.said == nil {
		g.said = map[string]seenVersions{}
	}
	if seen.versions.Kubelet != "" { // else it may yet say so
		g.said[name] = seen
	}
	return seen.versions.Kubelet
}

// kubeletVersion is in a line of kubelet's log, of klog: "Kubelet version" kubeletVersion="v1.35.0".
var kubeletVersion = regexp.MustCompile(`kubeletVersion="?(v[0-9][^"\s]*)`)

// log returns the last lines of what failed first.
func (g *Gatherer) log(ctx context.Context, s SlotFacts) Log {
	i := culprit(s)
	if i < 0 || g.Lines == nil {
		return Log{}
	}
	// What a service in the machine said itself tells more than the step that started it, and systemd's words about both.
	if inside := map[int]string{containerdStep: "containerd.service", kubeletStep: kubelet, nodeStep: kubelet}[i]; inside != "" && s.Inside != nil {
		name := goalstate.MachineName(s.Name)
		if lines, err := g.Lines(ctx, name, logLines, append(machine.Since(s.Units[machine.MachineStep].ActiveSince), "_SYSTEMD_UNIT="+inside)...); err == nil && len(lines) > 0 {
			return Log{inside, name, lines}
		}
	}
	u := s.Units[i]
	lines, err := g.Lines(ctx, "", logLines, "_SYSTEMD_INVOCATION_ID="+u.InvocationID)
	if err != nil || len(lines) == 0 {
		return Log{}
	}
	return Log{u.Name, "", lines}
}

const kubelet = "kubelet.service" // in the machine

// culprit is the place of the first unit that failed; -1: none did. A node that is up while its kubelet is not is one, too.
func culprit(s SlotFacts) int {
	for i, u := range s.Units {
		if u.Active == "failed" || retries(u.Unit) && u.Result != "success" {
			return i
		}
	}
	if s.Inside != nil && s.Units[nodeStep].Active == "active" && s.Inside.Kubelet.Active != "active" {
		return nodeStep
	}
	return -1
}

// retries tells whether the unit waits for its automatic restart.
func retries(u machine.Unit) bool { return u.Sub == "auto-restart" || u.Sub == "auto-restart-queued" }

type seenVersions struct {
	of       string // the files, or the run, that they were read from
	versions facts.Versions
}

// discover reads the versions of a slot again only where a file has changed: these are large.
func (g *Gatherer) discover(name string, goal *goalstate.Slot) facts.Versions {
	root, err := g.Root.Sub("var/lib/machines/" + goalstate.MachineName(name))
	if err != nil {
		return facts.Versions{}
	}
	defer root.Close()
	containerd, kubelet := "", ""
	if goal != nil {
		containerd, kubelet = goal.Containerd.Binary, goal.Kubelet.Binary
	}
	containerd = installed(root, containerd, "/usr/local/bin/containerd", "/usr/bin/containerd")
	kubelet = installed(root, kubelet, "/usr/local/bin/kubelet", "/usr/bin/kubelet")
	var of strings.Builder
	for _, path := range []string{containerd, kubelet, "/etc/os-release"} {
		of.WriteString(path)
		if info, err := root.Stat(path); err == nil {
			of.WriteString(info.ModTime().String())
		}
	}
	if seen, ok := g.versions[name]; ok && seen.of == of.String() {
		return seen.versions
	}
	if g.versions == nil {
		g.versions = map[string]seenVersions{}
	}
	seen := seenVersions{of.String(), facts.DiscoverVersions(root, containerd, kubelet)}
	g.versions[name] = seen
	return seen.versions
}

// installed is the program that the goal state names; where it names none, or is not known, the first of the usual ones that exists.
func installed(root *file.Root, name string, usual ...string) string {
	for _, path := range usual {
		if _, err := root.Stat(path); name == "" && err == nil {
			return path
		}
	}
	return name
}

// unreadable tells whether a file of the goal state may not be read by this user.
func (g *Gatherer) unreadable(err error) bool {
	var mistakes goalstate.Errors
	if !errors.As(err, &mistakes) {
		return false
	}
	for _, m := range mistakes {
		if m.Line > 0 {
			continue
		}
		f, err := g.Root.Open(m.File)
		if errors.Is(err, fs.ErrPermission) {
			return true
		} else if err == nil {
			f.Close()
		}
	}
	return false
}

func (g *Gatherer) text(name string) string {
	b, _ := g.Root.Read(name, 1<<20)
	return string(b)
}
