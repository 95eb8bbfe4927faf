// render-config writes one part of a slot's configuration: the machine's settings on the host, or containerd's or kubelet's
// files in the machine's root file system. It is the last moment before the machine starts, so it decides all that depends
// on the host.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"runtime"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/plan"
	"berth/helpers/facts"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/helpers/render"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name: "render-config",
		About: `Writes one part of the slot's configuration. PART is
  nspawn      the machine's .nspawn file; reloads systemd where the slot's units are not what the goal state says
  containerd  containerd's configuration and unit, in the machine's root file system
  kubelet     kubelet's configuration, credentials and unit, in the machine's root file system
Files whose content is right already are left alone.`,
		Args:   []string{"PART", "SLOT"},
		Budget: 25 * time.Second, // the unit of the first part sets another one
		Run:    run,
	}))
}

func run(ctx context.Context, s *step.Step) error {
	goal, slot, err := s.Goal()
	if err != nil {
		return err
	}
	switch part := s.Args["PART"]; part {
	case "nspawn":
		return nspawn(ctx, s, goal, slot)
	case "containerd":
		return inMachine(s, slot, func(root *file.Root) (render.Output, error) {
			return render.Containerd(slot, goal.Sources, facts.DiscoverHost(s.Root, slot), facts.DiscoverMachine(root, slot))
		})
	case "kubelet":
		return inMachine(s, slot, func(root *file.Root) (render.Output, error) {
			token, err := token(s, slot)
			if err != nil {
				return render.Output{}, err
			}
			host, m := facts.DiscoverHost(s.Root, slot), facts.DiscoverMachine(root, slot)
			return render.Kubelet(slot, goal.Sources, host, m, render.Secrets{BootstrapToken: token})
		})
	default:
		return &step.Failure{Code: step.ExitUsage, Err: fmt.Errorf("part %q: want nspawn, containerd or kubelet", part)}
	}
}

// nspawn writes the machine's settings, and makes sure that systemd knows the slot's units as they are now.
func nspawn(ctx context.Context, s *step.Step, goal *goalstate.GoalState, slot *goalstate.Slot) error {
	driver, err := gpus(ctx, s, slot.NVIDIA.Mode)
	if err != nil {
		return err
	}
	host := facts.DiscoverHost(s.Root, slot)
	host.NVIDIA = driver
	out, err := render.NSpawn(slot, goal.Sources, host)
	changed, err := write(s, s.Root, out, err)
	if err != nil {
		return err
	}
	held, err := plan.Held(s.Root)
	if err != nil {
		return err
	}
	units, err := plan.Units(goal, held)
	if err != nil {
		return err
	}
	stale, err := plan.Stale(s.Root, slot.Name, units)
	if err != nil {
		return err
	}
	for _, name := range changed {
		if path.Ext(name) == ".conf" { // a drop-in of the machine's unit
			stale = append(stale, name)
		}
	}
	if len(stale) == 0 {
		return nil
	}
	s.Notice("reloading systemd, which does not know the slot's units as they are now: %s", stale[0])
	systemd, err := machine.Host(ctx, s.Root)
	if err != nil {
		return err
	}
	defer systemd.Close()
	if err := systemd.Reload(ctx); err != nil {
		return fmt.Errorf("systemctl daemon-reload: %w", err)
	}
	if stale, err = plan.Stale(s.Root, slot.Name, units); len(stale) > 0 {
		s.Warn("the slot's units are still not what the goal state says: %s; on a host without berth-generator they are those of the "+
			"goal state that was baked into its image: build the image anew (berth bake), or install berth-generator", stale[0])
	}
	return err
}

// gpus has the device nodes of the host's NVIDIA GPUs made, and finds their driver; nil: there is none, or it is not wanted.
func gpus(ctx context.Context, s *step.Step, mode goalstate.Mode) (*nvidia.Driver, error) {
	if mode == goalstate.Off || mode == goalstate.Auto && !nvidia.Expected(s.Root) {
		return nil, nil
	}
	s.Status("making the device nodes of the NVIDIA GPUs")
	done, err := nvidia.MakeNodes(ctx, s.Root)
	for _, line := range done {
		s.Info("%s", line)
	}
	switch {
	case err != nil && mode == goalstate.Required:
		return nil, fmt.Errorf("nvidia.mode is required: %w", err)
	case err != nil:
		s.Warn("nvidia: %v", err)
	}
	if !nvidia.Present(s.Root) {
		return nil, nil
	}
	return nvidia.Discover(ctx, s.Root, runtime.GOARCH)
}

// inMachine renders a part that goes into the root file system of the slot's machine.
func inMachine(s *step.Step, slot *goalstate.Slot, render func(*file.Root) (render.Output, error)) error {
	dir, err := s.Root.Sub("var/lib/machines/" + slot.MachineName())
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the slot has no root file system: want one in /var/lib/machines/%s", slot.MachineName())
	} else if err != nil {
		return err
	}
	defer dir.Close()
	out, err := render(dir)
	_, err = write(s, dir, out, err)
	return err
}

// write applies what was rendered beneath root and returns the paths of the files that were written or removed. What was rendered
// with an error is not written at all; its warnings are still told.
func write(s *step.Step, root *file.Root, out render.Output, err error) ([]string, error) {
	for _, w := range out.Warnings {
		s.Warn("%s", w)
	}
	if err != nil {
		return nil, err
	}
	changed, err := root.WriteAll(out.Files)
	for _, name := range changed {
		s.Info("wrote /%s", name)
	}
	s.Status("files written: %d, right already: %d", len(changed), len(out.Files)-len(changed))
	for _, name := range out.Remove {
		if _, e := root.Lstat(name); errors.Is(e, fs.ErrNotExist) {
			continue
		}
		if e := root.Remove(name); e != nil {
			err = errors.Join(err, e)
			continue
		}
		s.Info("removed /%s", name)
		changed = append(changed, name)
	}
	return changed, err
}

// token reads the bootstrap token from where the goal state says.
func token(s *step.Step, slot *goalstate.Slot) (string, error) {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	if dir == "" {
		return facts.Token(s.Root, nil, slot.Kubelet)
	}
	credentials, err := file.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer credentials.Close()
	return facts.Token(s.Root, credentials, slot.Kubelet)
}
