package claim

import (
	"context"
	"errors"
	"fmt"

	sdunit "github.com/coreos/go-systemd/v22/unit"

	"berth/helpers/machine"
	"berth/helpers/step"
)

// clear takes away what the last run of the slot's own machine left behind, so that the next start succeeds at the first
// try: processes in the cgroup of a unit that is down, the registration of a machine that is dead, and a mount. A machine
// that was started in another way is not ours to end, and is refused.
func (g *guard) clear(ctx context.Context, name string) error {
	unit := machine.NSpawnUnit(name)
	group, err := g.systemd.ControlGroup(ctx, unit)
	if err != nil {
		return err
	}
	state, err := g.systemd.Unit(ctx, unit)
	if err != nil {
		return err
	}
	if state.Running() && !state.Busy() {
		return refuseOwn(name, life{"not started through this claim", "systemctl stop " + unit})
	}
	cgroup := machine.CGroup(g.root, name, group)
	left, err := machine.Processes(g.root, cgroup)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		g.step.Warn("ending what the last run of machine %s left behind: %s", name, list(left))
		if err := machine.Kill(ctx, g.step, g.root, cgroup); err != nil {
			return err
		}
	}
	if err := g.forget(ctx, name); err != nil {
		return err
	}
	if hidden, err := g.locked(name); err != nil || hidden.alive() {
		return errors.Join(err, refuseOwn(name, hidden))
	}
	return g.unmount(ctx, name)
}

// refuseOwn is the error for a machine of the slot itself that is not ours to end; nil for one that is not alive.
func refuseOwn(name string, l life) error {
	if !l.alive() {
		return nil
	}
	return step.Refusedf("machine %s runs already: %s; to end it: %s", name, l.form, l.cure)
}

// forget removes a registration that has outlived its machine.
func (g *guard) forget(ctx context.Context, name string) error {
	m, err := g.machined.Machine(ctx, name)
	switch {
	case errors.Is(err, machine.ErrNoMachine):
		return nil
	case err != nil:
		return err
	case m.Alive():
		return refuseOwn(name, registered(m))
	}
	g.step.Warn("clearing the registration of machine %s, whose leader %d is gone", name, m.Leader)
	return g.machined.Unregister(ctx, name)
}

// unmount takes away the mount through which a machine exports its sockets (systemd 256 and later). systemd 257 leaves it
// behind when systemd-nspawn is killed, and then refuses to start the machine; 262 cleans up. systemd does it, to which a mount
// is a unit: what this process would unmount, it would in a mount name space of its own.
func (g *guard) unmount(ctx context.Context, name string) error {
	path := "/run/systemd/nspawn/unix-export/" + name
	unit, err := g.systemd.Unit(ctx, sdunit.UnitNamePathEscape(path)+".mount")
	if err != nil || !unit.Running() {
		return err
	}
	if err := g.systemd.Stop(ctx, unit.Name); err != nil {
		return fmt.Errorf("unmount %s, left over from the last run: %w", path, err)
	}
	g.step.Warn("unmounted %s, which the last run left behind", path)
	return nil
}
