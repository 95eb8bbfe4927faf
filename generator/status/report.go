package status

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/generator/goalstate"
	"berth/helpers/machine"
	"berth/helpers/step"
)

// Report is the state of a host's slots at one moment. Its JSON is what "berth status --json" prints, and its keys are stable.
type Report struct {
	Time  time.Time `json:"time"`
	Goal  Goal      `json:"goal_state"`
	Slots []Slot    `json:"slots"`
	// Next are the commands to type that no single slot calls for.
	Next []Command `json:"next"`
}

// Goal is the state of the goal state.
type Goal struct {
	State   string   `json:"state"`   // valid, invalid, unreadable, none
	Sources []string `json:"sources"` // the files that were read
	Boot    string   `json:"boot"`    // the slot that starts at boot; empty: none, or not known
	Errors  []string `json:"errors"`  // file:line:column: key: what is wrong: what would be right
}

// The states of a goal state.
const (
	Valid      = "valid"
	Invalid    = "invalid"
	Unreadable = "unreadable"
	None       = "none"
)

// Slot is the state of one slot.
type Slot struct {
	Name        string `json:"name"`
	Machine     string `json:"machine"`
	InGoalState bool   `json:"in_goal_state"`
	Claim       bool   `json:"claim"` // it holds the host
	State       string `json:"state"` // ready, degraded, starting, stopping, retrying, failed, refused, down
	// Since is when the node became ready; null: it is not.
	Since *time.Time `json:"since"`
	// Reason is why the state is not ready, in one line; empty: there is nothing to say.
	Reason     string  `json:"reason"`
	System     System  `json:"system"`
	Containerd Program `json:"containerd"`
	Kubelet    Program `json:"kubelet"`
	// Restarts counts the automatic ones since the last start by hand; null: unknown.
	Restarts Restarts `json:"restarts"`
	Steps    []Step   `json:"steps"`
	// LastGood is the goal state with which the slot became ready last; null: there is none, or it is not known.
	LastGood *LastGood `json:"last_good"`
	// Stale are the unit files that are not as the goal state says; GoalNewer says that the goal state was changed after the slot
	// started. Either way, what runs may not be what the goal state says.
	Stale     []string `json:"stale"`
	GoalNewer bool     `json:"goal_state_newer"`
	// Left are the processes in the cgroup of the slot's machine, which is down.
	Left []string  `json:"left"`
	Next []Command `json:"next"`
}

// LastGood is the last good goal state of a slot.
type LastGood struct {
	Recorded *time.Time `json:"recorded"` // null: it cannot be used
	Used     bool       `json:"used"`     // the host's is broken, and the slot goes by this one
	Error    string     `json:"error"`    // why it cannot be used; empty: it can
}

// The states of a slot.
const (
	Ready    = "ready"    // node@ is up, and so are containerd and kubelet as far as they may be asked
	Degraded = "degraded" // it was ready, and something of it is down now
	Starting = "starting"
	Stopping = "stopping"
	Retrying = "retrying" // it failed, and systemd tries again
	Failed   = "failed"
	Refused  = "refused" // because of a peer
	Down     = "down"
)

// System is what runs in a slot's machine. What is unknown is empty.
type System struct {
	OS      string `json:"os"`
	Systemd string `json:"systemd"` // of the machine that runs
	Kernel  string `json:"kernel"`  // of the host, for a machine that runs
}

// Program is a program in a slot's machine. What is unknown is empty.
type Program struct {
	Version string `json:"version"`
	State   string `json:"state"` // ActiveState of its service in the machine
}

// Restarts counts automatic restarts (NRestarts= of systemd); nil: unknown.
type Restarts struct {
	Node       *uint32 `json:"node"`
	Machine    *uint32 `json:"machine"`
	Containerd *uint32 `json:"containerd"`
	Kubelet    *uint32 `json:"kubelet"`
}

// Step is one unit of a slot's chain.
type Step struct {
	Name    string   `json:"name"`
	Unit    string   `json:"unit"`
	State   string   `json:"state"`   // done, running, waiting, stopping, retrying, failed, unusable, down
	Seconds *float64 `json:"seconds"` // how long its run took, or takes; null: it was not run
	Status  string   `json:"status"`  // what it waits for, or said last
	Log     *Log     `json:"log"`     // of what failed; null: there is none
}

// The states of a step that are not those of a slot, too.
const (
	Done     = "done"
	Running  = "running"
	Waiting  = "waiting"  // for the step before
	Unusable = "unusable" // its unit is masked, not installed or broken
)

// Command is a command to type, and why.
type Command struct {
	Command string `json:"command"`
	Why     string `json:"why"`
}

// Moment is one moment on two clocks.
type Moment struct {
	Wall      time.Time
	Monotonic time.Duration // CLOCK_MONOTONIC
}

// Judge makes a report of what was seen. It is pure.
func Judge(f Facts, now Moment) Report {
	r := Report{Time: now.Wall, Goal: judgeGoal(f), Slots: []Slot{}, Next: []Command{}}
	for _, facts := range f.Slots {
		r.Slots = append(r.Slots, judgeSlot(f, facts, now))
	}
	r.Next = append(r.Next, nextGoal(f, r.Goal)...)
	for i := range r.Slots {
		r.Slots[i].Next = append([]Command{}, next(f, f.Slots[i], r, r.Slots[i])...)
	}
	return r
}

func judgeGoal(f Facts) Goal {
	g := Goal{State: Valid, Sources: append([]string{}, f.Goal.Sources...), Boot: f.Goal.Boot, Errors: []string{}}
	var mistakes goalstate.Errors
	switch {
	case errors.Is(f.GoalError, goalstate.ErrNone):
		g.State = None
	case f.Unreadable:
		g.State = Unreadable
	case f.GoalError != nil:
		g.State = Invalid
	}
	if errors.As(f.GoalError, &mistakes) {
		for _, m := range mistakes {
			g.Errors = append(g.Errors, m.Error())
		}
	} else if f.GoalError != nil {
		g.Errors = append(g.Errors, f.GoalError.Error())
	}
	return g
}

func judgeSlot(f Facts, s SlotFacts, now Moment) Slot {
	node := s.Units[nodeStep]
	_, in := f.Goal.Slots[s.Name]
	slot := Slot{
		Name: s.Name, Machine: goalstate.MachineName(s.Name), InGoalState: in, Claim: s.Claim,
		System:     System{OS: s.Versions.OS},
		Containerd: Program{Version: s.Versions.Containerd}, Kubelet: Program{Version: s.Versions.Kubelet},
		Restarts: Restarts{Node: &node.NRestarts, Machine: &s.Units[machine.MachineStep].NRestarts},
		Stale:    append([]string{}, s.Stale...), Left: []string{}, Next: []Command{},
	}
	if s.Units[machine.MachineStep].Active == "active" {
		slot.System.Kernel = f.Kernel
	}
	if in := s.Inside; in != nil {
		slot.System.Systemd = in.Systemd
		slot.Containerd.State, slot.Kubelet.State = in.Containerd.Active, in.Kubelet.Active
		slot.Restarts.Containerd, slot.Restarts.Kubelet = &in.Containerd.NRestarts, &in.Kubelet.NRestarts
	}
	for _, p := range s.Left {
		slot.Left = append(slot.Left, p.String())
	}
	slot.State = state(s)
	blame := culprit(s)
	for i, u := range s.Units {
		st := judgeStep(u, now)
		if st.State == Down && slot.State == Starting {
			st.State = Waiting
		}
		if i == guardStep && st.State == Waiting && f.Online != "active" {
			st.Status = "waiting for " + online
		}
		if i == blame && len(s.Log.Lines) > 0 {
			st.Log = &s.Log
		}
		slot.Steps = append(slot.Steps, st)
	}
	if slot.State == Ready && !node.ActiveSince.IsZero() {
		slot.Since = &node.ActiveSince
	}
	if guard := s.Units[guardStep]; guard.Active == "active" && !guard.ActiveSince.IsZero() {
		slot.GoalNewer = f.Written.After(guard.ActiveSince)
		if s.Changed != nil {
			slot.GoalNewer = *s.Changed
		}
	}
	switch _, used := f.LastGood[s.Name]; {
	case s.Stored != nil:
		slot.LastGood = &LastGood{Recorded: &s.Stored.Time, Used: used}
	case s.Unusable != nil:
		slot.LastGood = &LastGood{Error: s.Unusable.Error()}
	}
	slot.Reason = reason(s, slot, blame)
	return slot
}

// goesOn tells whether the slot goes by its last good goal state.
func (s Slot) goesOn() bool { return s.LastGood != nil && s.LastGood.Used }

// reason says why a slot is not ready.
func reason(s SlotFacts, slot Slot, blame int) string {
	switch {
	case slot.State == Ready:
		return ""
	case slot.State == Degraded && s.Inside != nil && s.Inside.Kubelet.Active != "active":
		return fmt.Sprintf("%s is %s (%s)", kubelet, s.Inside.Kubelet.Active, s.Inside.Kubelet.Sub)
	case slot.State == Degraded && s.Inside != nil && s.Inside.Containerd.Active != "active":
		return fmt.Sprintf("containerd.service is %s (%s)", s.Inside.Containerd.Active, s.Inside.Containerd.Sub)
	case len(slot.Left) > 0:
		return "processes are left in machine " + slot.Machine + ": " + strings.Join(slot.Left, ", ")
	}
	if blame >= 0 {
		return slot.Steps[blame].Name + ": " + slot.Steps[blame].Status
	}
	for _, st := range slot.Steps {
		if st.State == Unusable || st.State == Running || st.State == Stopping || st.State == Waiting && st.Status != "" {
			return strings.TrimSuffix(st.Name+": "+st.Status, ": ")
		}
	}
	return ""
}

// state is the state of a slot.
func state(s SlotFacts) string {
	node := s.Units[nodeStep]
	up, starts, stops, tries, failed := true, false, false, false, false
	for _, u := range s.Units {
		switch {
		case retries(u.Unit):
			tries = true
		case u.Active == "deactivating" || stopJob(u.Job) && u.Active != "inactive":
			stops = true
		case u.Job != "" || u.Active == "activating":
			starts = true
		case u.Active == "failed":
			failed = true
		}
		up = up && u.Active == "active"
	}
	switch {
	case starts:
		return Starting
	case tries:
		return Retrying
	case stops:
		return Stopping
	case up && (s.Inside == nil || s.Inside.Containerd.Active == "active" && s.Inside.Kubelet.Active == "active"):
		return Ready
	case node.Active == "active":
		return Degraded
	case failed && refused(s):
		return Refused
	case failed:
		return Failed
	case running(s):
		return Degraded
	}
	return Down
}

// refused tells whether a slot failed because of a peer.
func refused(s SlotFacts) bool {
	guard := s.Units[guardStep]
	return guard.Active == "failed" && guard.Result == "exit-code" && guard.ExecMainStatus == step.ExitRefused
}

// running tells whether a step is up.
func running(s SlotFacts) bool {
	return slices.ContainsFunc(s.Units, func(u machine.Service) bool { return u.Running() })
}

// stopJob tells whether a job stops a unit, if only to start it again.
func stopJob(job string) bool { return job == "stop" || job == "restart" || job == "try-restart" }

// judgeStep is the state of a unit by itself.
func judgeStep(u machine.Service, now Moment) Step {
	st := Step{Name: stepName(u.Name), Unit: u.Name, State: Down, Status: u.StatusText}
	took := time.Duration(-1)
	switch {
	case u.Load != "loaded":
		st.State, st.Status = Unusable, "its unit is "+u.Load
	case retries(u.Unit):
		st.State = Retrying
		took = u.InactiveEnter - u.InactiveExit
	case u.Active == "failed":
		st.State = Failed
		took = u.InactiveEnter - u.InactiveExit
	case u.Active == "deactivating":
		st.State = Stopping
		took = now.Monotonic - max(u.ActiveExit, u.InactiveExit)
	case u.Active == "active" && stopJob(u.Job):
		st.State, st.Status = Stopping, "" // its turn has not come
	case u.Active == "active":
		st.State = Done
		took = u.ActiveEnter - u.InactiveExit
	case u.Active == "inactive" && u.Job != "":
		st.State = Waiting
	case u.Active != "inactive":
		st.State = Running
		took = now.Monotonic - u.InactiveExit
	}
	switch st.State {
	case Down, Waiting:
		st.Status = "" // of an earlier run
	case Failed, Retrying:
		if st.Status == "" || u.Result != "exit-code" {
			st.Status = result(u)
		}
	}
	if took >= 0 && u.InactiveExit > 0 {
		seconds := took.Seconds()
		st.Seconds = &seconds
	}
	return st
}

// result says how a run of a unit ended that said nothing about it.
func result(u machine.Service) string {
	text := u.Result
	switch text {
	case "exit-code":
		text = "exit status " + strconv.Itoa(int(u.ExecMainStatus))
	case "timeout":
		text = "not done within its time, and ended"
	case "success", "":
		return u.StatusText
	}
	if u.StatusText != "" {
		text += "; it said: " + u.StatusText
	}
	return text
}

// stepName is what the step of a unit is called: its BERTH_STEP= in the journal, where it has one.
func stepName(unit string) string {
	name, _, _ := strings.Cut(unit, "@")
	switch {
	case name == "systemd-nspawn":
		return "machine"
	case name == "node":
		return name
	}
	return strings.TrimPrefix(name, "node-")
}

// Only leaves the named slots in the report; none named: all.
func (r Report) Only(names ...string) Report {
	if len(names) > 0 {
		r.Slots = slices.DeleteFunc(slices.Clone(r.Slots), func(s Slot) bool { return !slices.Contains(names, s.Name) })
	}
	return r
}

// Code is the exit code that the report stands for. Of the slots that were asked for all must be ready; where none was named, one:
// the others are there to be changed over to.
func (r Report) Code(named bool) int {
	if r.Goal.State == Invalid || r.Goal.State == None {
		return step.ExitInvalid
	}
	ready := 0
	for _, s := range r.Slots {
		if s.State == Ready {
			ready++
		} else if r.Goal.State == Valid && named && !s.InGoalState && s.State == Down {
			return step.ExitInvalid
		}
	}
	if ready == 0 || named && ready < len(r.Slots) {
		return step.ExitNotReady
	}
	return step.ExitDone
}

// nextGoal is what to do about the goal state itself.
func nextGoal(f Facts, g Goal) []Command {
	var mistakes goalstate.Errors
	switch {
	case g.State == None:
		return []Command{{"berth check", "after /etc/berth/goal.toml is written"}}
	case g.State == Unreadable:
		return []Command{{"sudo berth status", "root may read the goal state"}}
	case g.State != Invalid || !errors.As(f.GoalError, &mistakes):
		return nil
	}
	first := mistakes[0]
	edit := "editor " + first.File
	if first.Line > 0 {
		edit = fmt.Sprintf("editor +%d %s", first.Line, first.File)
	}
	if strings.ContainsFunc(first.File, needsQuotes) {
		edit = "editor" // a name that a shell would take apart is in the message above
	}
	return []Command{{edit, "correct the goal state"}, {"berth check", "until nothing is wrong"}}
}

func needsQuotes(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+@%", r))
}

// next is what to do about a slot.
func next(f Facts, facts SlotFacts, r Report, s Slot) []Command {
	node := "node@" + s.Name
	blame := culprit(facts)
	unread := facts.Units[nodeStep].Load == "loaded" && path.Base(facts.Units[nodeStep].FragmentPath) == "node@.service"
	startable := s.InGoalState && (r.Goal.State == Valid || s.goesOn())
	for _, st := range s.Steps {
		switch u := facts.Units[slices.IndexFunc(facts.Units, func(u machine.Service) bool { return u.Name == st.Unit })]; {
		case u.Load == "masked":
			return []Command{{"systemctl unmask " + u.Name, "the step cannot run; with --runtime, if that does not help"}}
		case u.Load == "not-found" && st.Name == "machine":
			return []Command{{"systemctl cat " + u.Name, "systemd-nspawn is not installed: install systemd-container"}}
		case u.Load == "not-found":
			return []Command{{"systemctl daemon-reload", "systemd does not know the unit: is berth installed?"}}
		case st.State == Unusable:
			return []Command{{"systemctl cat " + u.Name, "the unit is " + u.Load}}
		}
	}
	switch {
	case len(s.Left) > 0:
		return []Command{{"systemctl kill --signal=KILL " + machine.NSpawnUnit(s.Machine), "end what the last run left behind"}}
	case s.State == Ready && !s.InGoalState && r.Goal.State == Valid:
		return []Command{{"systemctl stop " + node, "the slot is not in the goal state any more"}}
	case s.State == Ready && startable && (len(s.Stale) > 0 || s.GoalNewer):
		return []Command{
			{"berth diff " + s.Name, "what the goal state would change"},
			{"systemctl restart " + node, "bring the slot to the goal state"},
		}
	case s.State == Refused || s.State == Down && startable:
		if peer := holder(f, r, s); peer != "" {
			return []Command{{fmt.Sprintf("systemctl stop node@%s && systemctl start %s", peer, node), "change over from slot " + peer}}
		}
		if s.State == Refused {
			return []Command{
				{"journalctl -b -u " + facts.Units[guardStep].Name, "what holds the host, and how to end it"},
				{"systemctl start " + node, "after that"},
			}
		}
		if unread {
			return []Command{{"systemctl daemon-reload && systemctl start " + node, "systemd has not read the goal state yet"}}
		}
		return []Command{{"systemctl start " + node, "start it"}}
	case s.State == Failed || s.State == Retrying || s.State == Degraded:
		var todo []Command
		if blame >= 0 {
			todo = append(todo, Command{journal(facts, s, blame), "see why"})
		}
		switch {
		case unread && startable:
			return []Command{{"systemctl daemon-reload && systemctl restart " + node, "systemd has not read the goal state yet"}}
		case s.State == Degraded && facts.Inside != nil && (facts.Inside.Kubelet.Busy() || facts.Inside.Containerd.Busy()):
			return todo // the machine's systemd starts it again; a restart of the node would end its pods
		case startable && s.State == Retrying:
			return append(todo, Command{"systemctl restart " + node, "try again at once; systemd does so soon"})
		case startable:
			return append(todo, Command{"systemctl restart " + node, "try again"})
		case r.Goal.State == Valid && running(facts):
			return append(todo, Command{"systemctl stop " + node, "the slot is not in the goal state any more"})
		case r.Goal.State == Valid:
			return append(todo, Command{"systemctl reset-failed " + node, "the slot is not in the goal state: forget it"})
		}
		return todo
	}
	return nil
}

// journal is the command that shows why a unit failed.
func journal(f SlotFacts, s Slot, i int) string {
	if f.Log.Machine != "" {
		return fmt.Sprintf("journalctl -M %s -u %s", f.Log.Machine, f.Log.Unit)
	}
	return "journalctl -b -u " + f.Units[i].Name
}

// holder is the peer of a slot that holds the host; empty: none does.
func holder(f Facts, r Report, s Slot) string {
	goal := f.Goal.Slots[s.Name]
	for _, other := range r.Slots {
		peer := goal == nil || !goal.PeersSet || slices.Contains(goal.Peers, other.Name)
		if other.Name != s.Name && peer && other.Claim && other.State != Down {
			return other.Name
		}
	}
	return ""
}
