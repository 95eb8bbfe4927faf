// Mocked is `nvidia-ctk cdi generate` on a machine with two A100: NVIDIA's own package makes the CDI specification, out of the
// files and device nodes that are there, but asks NVIDIA's mock of NVML about the GPUs. It has only the flags that berth uses.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	"github.com/sirupsen/logrus"
	"github.com/urfave/cli/v3"
)

func main() {
	var output string
	var disabled, enabled []string
	generate := &cli.Command{
		Name: "generate",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "output", Destination: &output, Required: true},
			&cli.StringSliceFlag{Name: "disable-hook", Destination: &disabled},
			&cli.StringSliceFlag{Name: "enable-hook", Destination: &enabled},
		},
		Action: func(context.Context, *cli.Command) error { return run(output, disabled, enabled) },
	}
	ctk := &cli.Command{Name: "nvidia-ctk", Commands: []*cli.Command{{Name: "cdi", Commands: []*cli.Command{generate}}}}
	if err := ctk.Run(context.Background(), os.Args); err != nil {
		logrus.Error(err)
		os.Exit(1)
	}
}

func run(output string, disabled, enabled []string) error {
	lib, err := mock()
	if err != nil {
		return err
	}
	index, err1 := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyIndex)
	uuid, err2 := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyUUID)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	cdi, err := nvcdi.New(
		nvcdi.WithLogger(logrus.StandardLogger()), nvcdi.WithMode(nvcdi.ModeNvml), nvcdi.WithNvmlLib(lib),
		nvcdi.WithNVIDIACDIHookPath("/usr/bin/nvidia-cdi-hook"), nvcdi.WithDisabledHooks(disabled...), nvcdi.WithEnabledHooks(enabled...),
		nvcdi.WithDeviceNamers(index, uuid), nvcdi.WithVendor("nvidia.com"), nvcdi.WithClass("gpu"),
		nvcdi.WithMergedDeviceOptions(transform.WithName("all"), transform.WithSkipIfExists(true)),
	)
	if err != nil {
		return err
	}
	spec, err := cdi.GetSpec("all")
	if err != nil {
		return err
	}
	return spec.Save(output)
}

// mock returns an NVML of the driver that is installed.
func mock() (*server.Server, error) {
	files, err := filepath.Glob("/usr/lib/*/libcuda.so.*.*")
	if err != nil || len(files) != 1 {
		return nil, fmt.Errorf("libcuda: found %q, %v", files, err)
	}
	_, version, _ := strings.Cut(filepath.Base(files[0]), ".so.")
	s, err := server.New(server.WithGPUs(gpus.Multiple(2, gpus.A100_SXM4_40GB)...), server.WithDriverVersion(version))
	if err != nil {
		return nil, err
	}
	for _, d := range s.Devices {
		// The mock has it not.
		d.(*server.Device).GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 0, nvml.SUCCESS }
	}
	return s, nil
}
