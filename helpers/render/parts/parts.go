// Package parts gives all that berth writes for a slot, part by part: the generator's units, and what each step of render-config
// renders from what it finds on the host. It only looks: nothing is written, made or started here. The steps write what they get
// from this package, and what shows or compares a slot's files shows and compares the same.
package parts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"runtime"
	"slices"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/generator/plan"
	"berth/helpers/facts"
	"berth/helpers/nvidia"
	"berth/helpers/render"
)

// Names of the parts. All but Generator are render-config's, in the order of its steps, and its words for them.
const (
	Generator  = "generator"
	NSpawn     = "nspawn"
	Containerd = "containerd"
	Kubelet    = "kubelet"
)

// Names returns the names of all parts.
func Names() []string { return []string{Generator, NSpawn, Containerd, Kubelet} }

// Part is what one step writes for a slot.
type Part struct {
	Name string
	// Base is the folder on the host, relative to its root, beneath which the paths of Output are.
	Base   string
	Output render.Output
	// Err says why the step would fail, and write nothing.
	Err error
	// NoToken says that the bootstrap token could not be read, and that Err is about nothing else. Output then is what the step
	// would write, but for the content of render.Bootstrap.
	NoToken bool
}

// Step is what people call the step that writes the part.
func (p Part) Step() string {
	if p.Name == Generator {
		return p.Name
	}
	return "render-config " + p.Name
}

// Path is where something beneath Base is on the host.
func (p Part) Path(name string) string { return path.Join("/", p.Base, name) }

// Host is what decides about the slots of a host.
type Host struct {
	Root *file.Root
	Goal *goalstate.GoalState // no slots: there is none
	Held []string             // the slots that hold a claim, sorted
	// Broken says what is wrong with the host's own goal state. Goal then has the last good one of some slots.
	Broken error

	state store.State
}

// Instead says of a broken goal state what slots go on with, and what is wrong; else it is empty.
func (h *Host) Instead() string {
	if h.Broken == nil {
		return ""
	}
	return errors.Join(errors.New(h.state.Notice()), h.state.Refusals(), h.Broken).Error()
}

// Look reads the goal state and the claims of a host. The errors are those of store.Load where no slot goes on with its last good
// goal state, but for ErrNone, and of plan.Held.
func Look(root *file.Root) (*Host, error) {
	state, broken := store.Load(root)
	if errors.Is(broken, goalstate.ErrNone) {
		broken = nil
	}
	if broken != nil && len(state.LastGood) == 0 {
		return nil, errors.Join(broken, state.Refusals())
	}
	goal := state.Goal
	if goal == nil {
		goal = &goalstate.GoalState{}
	}
	held, err := plan.Held(root)
	return &Host{Root: root, Goal: goal, Held: held, Broken: broken, state: state}, err
}

// Running tells whether a slot holds a claim: it runs, or is about to, or did not stop whole.
func (h *Host) Running(slot string) bool { return slices.Contains(h.Held, slot) }

// Slots returns the names, sorted, of the slots that there is something to write or to remove of: those of the goal state, those that
// hold a claim, and those whose units are left over.
func (h *Host) Slots() ([]string, error) {
	left, err := plan.Leftover(h.Root, nil)
	if err != nil {
		return nil, err
	}
	names := append(h.Goal.SlotNames(), h.Held...)
	for _, name := range left {
		names = append(names, plan.SlotOf(name))
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Slot returns all parts of the slot called name, in the order of Names. One that fails does not keep the others from being
// returned. A slot that is not in the goal state has the generator's part alone.
func (h *Host) Slot(ctx context.Context, name string) []Part {
	host, goal := h.Root, h.Goal
	parts := []Part{h.generated(name)}
	slot := goal.Slots[name]
	if slot == nil {
		return parts
	}
	for _, part := range Names()[1:] {
		_, credential := slot.Kubelet.Credential()
		p := Render(ctx, host, nil, goal, slot, part)
		switch {
		case part == NSpawn && slot.NVIDIA.Mode != goalstate.Off && !nvidia.Present(host) && nvidia.Expected(host):
			p.Output.Warnings = append(p.Output.Warnings,
				"nvidia: the GPUs' device nodes are not there yet: the step makes them, and then gives the machine these and the driver")
		case p.NoToken && credential != "":
			// Systemd takes it away when the step is done.
			p.Err = nil
			p.Output.Warnings = append(p.Output.Warnings,
				credential+": not known here: systemd gives it to the step alone")
		}
		parts = append(parts, p)
	}
	return parts
}

// generated is the part of the plan that belongs to a slot.
func (h *Host) generated(slot string) Part {
	p := Part{Name: Generator}
	units, err := plan.Host(h.Root, h.Goal, h.Held)
	p.Base = plan.Dir(h.Root, units)
	if err != nil {
		p.Err = err
		return p
	}
	leftover := plan.Leftover
	if p.Base == plan.BakedDir {
		leftover = plan.Left
	}
	left, err := leftover(h.Root, units)
	p.Err = err
	for _, f := range units {
		if plan.SlotOf(f.Path) == slot {
			p.Output.Files = append(p.Output.Files, f)
		}
	}
	for _, name := range left {
		if plan.SlotOf(name) == slot {
			p.Output.Remove = append(p.Output.Remove, name)
		}
	}
	return p
}

// Render returns one of render-config's parts of a slot. credentials is $CREDENTIALS_DIRECTORY (systemd.exec(5)), nil where there is
// none.
func Render(ctx context.Context, host, credentials *file.Root, goal *goalstate.GoalState, slot *goalstate.Slot, name string) Part {
	p := Part{Name: name, Base: "."}
	found := facts.DiscoverHost(host, slot)
	if name == NSpawn {
		if found.NVIDIA, p.Err = driver(ctx, host, slot.NVIDIA.Mode); p.Err == nil {
			p.Output, p.Err = render.NSpawn(slot, goal.Sources, found)
		}
		return p
	}
	p.Base = "var/lib/machines/" + slot.MachineName()
	root, err := host.Sub(p.Base)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("the slot has no root file system: want one in /%s", p.Base)
	}
	if err != nil {
		p.Err = err
		return p
	}
	defer root.Close()
	m := facts.DiscoverMachine(root, slot)
	if name == Containerd {
		p.Output, p.Err = render.Containerd(slot, goal.Sources, found, m)
		return p
	}
	token, tokenErr := facts.Token(host, credentials, slot.Kubelet)
	if tokenErr != nil {
		token = standIn
	}
	p.Output, err = render.Kubelet(slot, goal.Sources, found, m, render.Secrets{BootstrapToken: token})
	p.NoToken = tokenErr != nil && err == nil
	p.Err = errors.Join(tokenErr, err)
	return p
}

// standIn has the form of a bootstrap token.
const standIn = "000000.0000000000000000"

// driver finds the driver of the host's NVIDIA GPUs; nil: there is none, or it is not wanted.
func driver(ctx context.Context, host *file.Root, mode goalstate.Mode) (*nvidia.Driver, error) {
	if mode == goalstate.Off || !nvidia.Present(host) {
		return nil, nil
	}
	return nvidia.Discover(ctx, host, runtime.GOARCH)
}
