// nvidia-wire makes the host's NVIDIA GPUs usable inside a slot's machine. So far it knows the cases in which there is nothing
// to wire.
package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/step"
)

func main() {
	os.Exit(step.Main(step.Command{
		Name: "nvidia-wire",
		About: `Makes the host's NVIDIA GPUs usable inside the slot's machine, as nvidia.mode of the goal state says.
This version wires nothing: it is done where the mode is off, or where the host has no NVIDIA GPU and none is required.`,
		Args:   []string{"SLOT"},
		Budget: 3 * time.Minute,
		Run: func(_ context.Context, s *step.Step) error {
			_, slot, err := s.Goal()
			if err != nil {
				return err
			}
			present, err := hasGPU(s.Root)
			if err != nil {
				return err
			}
			return wire(s, slot.NVIDIA.Mode, present)
		},
	}))
}

// wire decides by the mode and by whether the host has a GPU.
func wire(s *step.Step, mode goalstate.Mode, present bool) error {
	switch {
	case mode == goalstate.Off:
		s.Status("NVIDIA is off")
		return nil
	case !present && mode == goalstate.Required:
		return errors.New("nvidia.mode is required, but this host has no NVIDIA GPU (no /dev/nvidiactl, no /sys/module/nvidia): " +
			"load the driver, or set the mode to auto or off")
	case !present:
		s.Status("no NVIDIA GPU")
		s.Info("no NVIDIA GPU on this host: nothing to wire")
		return nil
	}
	return errors.New("this host has an NVIDIA GPU, which this version cannot wire: set nvidia.mode to off")
}

// hasGPU looks for the driver: its control node, or the module.
func hasGPU(root *file.Root) (bool, error) {
	for _, path := range []string{"dev/nvidiactl", "sys/module/nvidia"} {
		switch _, err := root.Lstat(path); {
		case err == nil:
			return true, nil
		case !errors.Is(err, fs.ErrNotExist):
			return false, err
		}
	}
	return false, nil
}
