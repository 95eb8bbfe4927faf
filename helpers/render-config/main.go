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
	"slices"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/hostcheck"
	"berth/generator/plan"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/helpers/render/parts"
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
	state, slot, err := s.Goal()
	if err != nil {
		return err
	}
	goal := state.Goal
	name := s.Args["PART"]
	switch name {
	case parts.NSpawn:
		if err := makeNodes(ctx, s, slot.NVIDIA.Mode); err != nil {
			return err
		}
	case parts.Containerd:
	case parts.Kubelet:
		warnOfSecrets(s, state.Files, slot)
	default:
		return &step.Failure{Code: step.ExitUsage, Err: fmt.Errorf("part %q: want nspawn, containerd or kubelet", name)}
	}
	credentials, err := credentials()
	if err != nil {
		return err
	}
	changed, err := write(s, parts.Render(ctx, s.Root, credentials, goal, slot, name))
	if err != nil || name != parts.NSpawn {
		return err
	}
	return reload(ctx, s, goal, changed)
}

// warnOfSecrets tells of secrets that users other than root can read. The slot starts all the same: they have been able to read them
// before, and a node that stays down helps nobody.
func warnOfSecrets(s *step.Step, files []goalstate.Source, slot *goalstate.Slot) {
	secrets := append(hostcheck.Secrets(s.Root, files), hostcheck.TokenFile(s.Root, slot.Kubelet)...)
	for _, f := range hostcheck.CheckSecrets(hostcheck.Facts{Secrets: secrets}) {
		if f.Severity == hostcheck.Error {
			s.Warn("%s: %s: %s", f.Subject, f.Problem, f.Cure)
		}
	}
}

// reload makes sure that systemd knows the slot's units as they are now. changed are the files that were written.
func reload(ctx context.Context, s *step.Step, goal *goalstate.GoalState, changed []string) error {
	held, err := plan.Held(s.Root)
	if err != nil {
		return err
	}
	units, err := plan.Host(s.Root, goal, held)
	if err != nil {
		return err
	}
	stale, err := plan.Stale(s.Root, s.Slot, units)
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
	if stale, err = plan.Stale(s.Root, s.Slot, units); len(stale) > 0 {
		s.Warn("the slot's units are still not what the goal state says: %s; on a host without berth-generator they are those of the "+
			"goal state that was baked into its image: build the image anew (berth bake), or install berth-generator", stale[0])
	}
	return err
}

// makeNodes has the device nodes of the host's NVIDIA GPUs made, where GPUs are wanted.
func makeNodes(ctx context.Context, s *step.Step, mode goalstate.Mode) error {
	if mode == goalstate.Off || mode == goalstate.Auto && !nvidia.Expected(s.Root) {
		return nil
	}
	s.Status("making the device nodes of the NVIDIA GPUs")
	done, err := nvidia.MakeNodes(ctx, s.Root, func(ctx context.Context, args []string) (string, error) {
		// By systemd: they load modules and make nodes, which this process has no right to.
		systemd, err := machine.Host(ctx, s.Root)
		if err != nil {
			return "", err
		}
		defer systemd.Close()
		return systemd.Run(ctx, machine.Program{
			Unit: "berth-nvidia-nodes-" + s.Slot + ".service", Description: "Device nodes of the NVIDIA GPUs", Args: args,
		})
	})
	for _, line := range done {
		s.Info("%s", line)
	}
	if err != nil && mode == goalstate.Required {
		return fmt.Errorf("nvidia.mode is required: %w", err)
	}
	if err != nil {
		s.Warn("nvidia: %v", err)
	}
	return nil
}

// write applies a part and returns the paths of the files that were written or removed. What was rendered with an error is not
// written at all; its warnings are still told.
func write(s *step.Step, part parts.Part) ([]string, error) {
	out := part.Output
	for _, w := range out.Warnings {
		s.Warn("%s", w)
	}
	if part.Err != nil {
		return nil, part.Err
	}
	root, err := s.Root.Sub(part.Base)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	changed, err := root.WriteAll(out.Files)
	for _, name := range changed {
		s.Info("wrote /%s", name)
	}
	s.Status("files written: %d, right already: %d", len(changed), len(out.Files)-len(changed))
	// Backwards: what kubelet has of an earlier start is removed for what its kubeconfig says, and that comes first in the alphabet.
	for _, name := range slices.Backward(out.Remove) {
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

// credentials opens $CREDENTIALS_DIRECTORY; nil: systemd passed none.
func credentials() (*file.Root, error) {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	if dir == "" {
		return nil, nil
	}
	return file.OpenRoot(dir)
}
