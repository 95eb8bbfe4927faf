package nvidia

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"berth/generator/file"
)

// MakeNodes makes those device nodes of the driver that are not there yet, as nothing on a host makes them before a program uses
// a GPU for the first time. It has the programs do it that know how, one after the other until nothing is missing, and returns
// what it did and why it could not, for the log. run runs a program, of which the first of args is the path, and returns what it
// wrote.
func MakeNodes(ctx context.Context, root *file.Root, run func(ctx context.Context, args []string) (string, error)) (done []string, err error) {
	missing := missingNodes(root)
	var failed []string
	for _, command := range makers(root) {
		if len(missing) == 0 {
			break
		}
		name := program(root, command[0])
		if name == "" {
			continue
		}
		text := strings.Join(command, " ")
		out, err := within(ctx, append([]string{filepath.Join(root.Name(), name)}, command[1:]...), run)
		if err != nil {
			failed = append(failed, fmt.Sprintf("%s: %v: %s", text, err, strings.TrimSpace(out)))
		}
		before := missing
		if missing = missingNodes(root); len(missing) < len(before) {
			done = append(done, fmt.Sprintf("%s made %s", text, strings.Join(difference(before, missing), " ")))
		}
	}
	if len(missing) == 0 {
		return done, nil
	}
	why := "none of nvidia-modprobe, nvidia-smi and nvidia-ctk, which make them, did"
	if len(failed) > 0 {
		why = strings.Join(failed, "; ")
	}
	return done, fmt.Errorf("no device node %s on this host: %s", strings.Join(missing, " "), why)
}

// within calls run with three quarters of the time that is left: the rest is for telling that the program hangs, as these do where
// the driver has lost a GPU, and for what can be done without.
func within(ctx context.Context, args []string, run func(context.Context, []string) (string, error)) (string, error) {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(deadline)*3/4)
		defer cancel()
	}
	return run(ctx, args)
}

// makers are the commands that make nodes.
func makers(root *file.Root) [][]string {
	// nvidia-modprobe(1): -u loads nvidia-uvm and makes its nodes, -c makes those of one GPU and the control node.
	modprobe := []string{"nvidia-modprobe", "-u"}
	for _, minor := range minors(root) {
		modprobe = append(modprobe, "-c", minor)
	}
	return [][]string{
		modprobe,
		{"nvidia-smi", "-L"}, // opens all GPUs
		{"nvidia-ctk", "system", "create-device-nodes", "--control-devices"},
	}
}

// missingNodes are the nodes that a driver has in any case, as far as they are not there.
func missingNodes(root *file.Root) []string {
	wanted := []string{Control, Unified}
	for _, minor := range minors(root) {
		wanted = append(wanted, device+minor)
	}
	return slices.DeleteFunc(wanted, func(node string) bool { return root.Exists(node) })
}

// minors are the minor numbers of the GPUs that the driver has found; where it does not say, of one that is there, else of the first.
func minors(root *file.Root) []string {
	var found []string
	gpus, _ := root.ReadDir("/proc/driver/nvidia/gpus")
	for _, g := range gpus {
		for line := range strings.Lines(root.Text(path.Join("/proc/driver/nvidia/gpus", g.Name(), "information"), textLimit)) {
			if minor, ok := strings.CutPrefix(line, "Device Minor:"); ok {
				found = append(found, strings.TrimSpace(minor))
			}
		}
	}
	if found != nil {
		return found
	}
	nodes, _ := root.ReadDir("/dev")
	for _, n := range nodes {
		if minor, ok := strings.CutPrefix(path.Join("/dev", n.Name()), device); ok && minor[0] >= '0' && minor[0] <= '9' {
			return []string{minor}
		}
	}
	return []string{"0"}
}

func difference(all, without []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(without, s) })
}
