// Package claim holds a host for one slot among its peers. A claim is a file per slot below /run/berth/claims, looked at and
// changed under one lock. It counts as long as the slot's guard unit is up or its machine is alive: so two starts at once
// cannot both pass, a failed stop still protects, and what is left from a run that no longer exists blocks nothing.
package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/plan"
	"berth/helpers/machine"
	"berth/helpers/step"
)

// Take claims the host for the step's slot, or refuses.
func Take(ctx context.Context, s *step.Step) error {
	state, slot, err := s.Goal()
	if err != nil {
		return err
	}
	g, err := open(ctx, s, true)
	if err != nil {
		return err
	}
	defer g.close()
	peers, err := g.peers(slot)
	if err != nil {
		return err
	}
	var refusals []error
	for _, peer := range peers {
		if err := g.free(ctx, peer); err != nil {
			refusals = append(refusals, err)
		}
	}
	if err := errors.Join(refusals...); err != nil {
		return err
	}
	if err := g.clear(ctx, slot.MachineName()); err != nil {
		return err
	}
	// The claim comes first and goes last: a release looks for nothing else without it.
	_, err = s.Root.WriteAll(append([]file.File{{Path: claimFile(s.Slot), Mode: 0o644, Content: []byte(
		"# Made by peer-guard: slot " + s.Slot + " holds this host. To release it: systemctl stop node@" + s.Slot + ".service\n")}},
		plan.Hold(s.Slot)...))
	if err != nil {
		return err
	}
	s.Status("slot %s holds the host", s.Slot)
	return state.Use(s.Root, s.Slot)
}

// Release gives the slot's claim back. It fails, and the claim stays, while the slot's machine is still alive. A slot that
// was refused has none, and nothing is said that would hide the refusal.
func Release(ctx context.Context, s *step.Step) error {
	if _, err := s.Root.Lstat(claimFile(s.Slot)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	g, err := open(ctx, s, false) // a systemd-machined could not start while what it is ordered with stops
	if err != nil {
		return err
	}
	defer g.close()
	life, err := g.life(ctx, goalstate.MachineName(s.Slot))
	if err != nil {
		return err
	}
	if life.alive() {
		return fmt.Errorf("the claim of slot %s is kept: machine %s is still alive: %s; to end it: %s",
			s.Slot, goalstate.MachineName(s.Slot), life.form, life.cure)
	}
	if err := g.leave(); err != nil {
		return err
	}
	return s.Root.Remove(claimFile(s.Slot))
}

// leave removes what goes with the claim. The settings of the machine stay for its next start, and for who compares them, unless the slot
// was taken out of the goal state.
func (g *guard) leave() error {
	var gone []string
	for _, f := range plan.Hold(g.step.Slot) {
		gone = append(gone, f.Path)
	}
	goal, err := goalstate.Load(g.root)
	if errors.Is(err, goalstate.ErrNone) || err == nil && goal.Slots[g.step.Slot] == nil {
		nspawn, devices := plan.Settings(g.step.Slot)
		gone = append(gone, nspawn, devices)
	}
	var errs []error
	for _, name := range gone {
		errs = append(errs, g.root.Remove(name))
		// Its folder, if it is the unit's own and nothing of somebody else is in it.
		if dir := path.Dir(name); path.Base(dir) != "nspawn" {
			if err := g.root.Remove(dir); !errors.Is(err, file.ErrRefused) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

func claimFile(slot string) string { return plan.ClaimsDir + "/" + slot }

// guard is a look at, or a change of, the claims: it holds the lock.
type guard struct {
	step     *step.Step
	root     *file.Root
	lock     *os.File
	systemd  *machine.Manager
	machined *machine.Machined
}

func open(ctx context.Context, s *step.Step, activate bool) (*guard, error) {
	g := &guard{step: s, root: s.Root}
	if _, err := s.Root.Write(file.File{Path: plan.ClaimsDir, Mode: os.ModeDir | 0o755}); err != nil {
		return nil, err
	}
	var err error
	if g.lock, err = os.OpenFile(filepath.Join(s.Root.Name(), filepath.Dir(plan.ClaimsDir), "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, err
	}
	if err = g.acquire(ctx); err == nil {
		if g.systemd, err = machine.Host(ctx, s.Root); err == nil {
			g.machined, err = machine.DialMachined(ctx, s.Root, activate)
		}
	}
	if err != nil {
		g.close()
		return nil, err
	}
	return g, nil
}

// acquire waits for the lock. Another peer-guard holds it for a few calls over D-Bus.
func (g *guard) acquire(ctx context.Context) error {
	fd := int(g.lock.Fd())
	locked := make(chan error, 1)
	go func() { locked <- unix.Flock(fd, unix.LOCK_EX) }()
	select {
	case err := <-locked:
		return err
	case <-ctx.Done():
		return g.step.Late("the lock of the claims", "another peer-guard holds it (see: fuser --verbose "+g.lock.Name()+")")
	}
}

func (g *guard) close() {
	if g.machined != nil {
		_ = g.machined.Close()
	}
	if g.systemd != nil {
		g.systemd.Close()
	}
	_ = g.lock.Close()
}

// peers returns the slot's peers. Unless the goal state names them, a slot that was taken out of the goal state but still
// holds a claim is one, too.
func (g *guard) peers(slot *goalstate.Slot) ([]string, error) {
	if slot.PeersSet {
		return slot.Peers, nil
	}
	held, err := plan.Held(g.root)
	if err != nil {
		return nil, err
	}
	peers := append(slices.Clone(slot.Peers), held...)
	slices.Sort(peers)
	return slices.DeleteFunc(slices.Compact(peers), func(p string) bool { return p == slot.Name }), nil
}

// free returns nil where a peer holds nothing, else the refusal.
func (g *guard) free(ctx context.Context, peer string) error {
	guardUnit, nodeUnit := "node-peer-guard@"+peer+".service", "node@"+peer+".service"
	_, err := g.root.Lstat(claimFile(peer))
	if err == nil {
		units, err := g.systemd.Units(ctx, guardUnit, nodeUnit)
		if err != nil {
			return err
		}
		if units[0].Running() {
			return step.Refusedf("slot %s refused: slot %s holds the host (%s is %s); to release it: systemctl stop %s",
				g.step.Slot, peer, nodeUnit, units[1].Active, nodeUnit)
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	name := goalstate.MachineName(peer)
	life, err := g.life(ctx, name)
	if err != nil {
		return err
	}
	if life.alive() {
		return step.Refusedf("slot %s refused: machine %s is still alive: %s; to end it: %s", g.step.Slot, name, life.form, life.cure)
	}
	return nil
}

// life is the form in which a machine is alive, and how to end it. The zero value is not alive.
type life struct{ form, cure string }

func (l life) alive() bool { return l.form != "" }

// life looks for a machine in every form in which it can be alive.
func (g *guard) life(ctx context.Context, name string) (life, error) {
	unit := machine.NSpawnUnit(name)
	group, err := g.systemd.ControlGroup(ctx, unit)
	if err != nil {
		return life{}, err
	}
	left, err := machine.Processes(g.root, machine.CGroup(g.root, name, group))
	if err != nil {
		return life{}, err
	}
	if len(left) > 0 {
		return life{
			form: list(left) + " in the cgroup of " + unit,
			cure: "systemctl stop " + unit + ", or systemctl kill --signal=KILL " + unit,
		}, nil
	}
	m, err := g.machined.Machine(ctx, name)
	switch {
	case errors.Is(err, machine.ErrNoMachine):
	case err != nil:
		return life{}, err
	case m.Alive():
		return registered(m), nil
	}
	return g.locked(name)
}

func registered(m *machine.Machine) life {
	return life{fmt.Sprintf("it is registered with leader %d in %s", m.Leader, m.Unit), "machinectl terminate " + m.Name}
}

// locked looks at the lock that systemd-nspawn holds on the folder of a machine while it runs, registered or not, in
// whatever unit (image_path_lock() of systemd 252 to 262).
func (g *guard) locked(name string) (life, error) {
	f, err := g.root.Open("var/lib/machines/.#" + name + ".lck")
	if errors.Is(err, os.ErrNotExist) {
		return life{}, nil
	} else if err != nil {
		return life{}, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_RDLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
		return life{}, &os.PathError{Op: "F_OFD_GETLK", Path: f.Name(), Err: err}
	}
	if lock.Type == unix.F_UNLCK {
		return life{}, nil
	}
	return life{"a systemd-nspawn holds " + f.Name(), "find its process: pgrep --full --list-full " + name}, nil
}

func list(processes []machine.Process) string {
	const most = 5
	names := make([]string, 0, most+1)
	for i, p := range processes {
		if i == most {
			names = append(names, fmt.Sprintf("%d more", len(processes)-most))
			break
		}
		names = append(names, p.String())
	}
	if len(processes) == 1 {
		return "process " + names[0]
	}
	return "processes " + strings.Join(names, ", ")
}
