package wire

import (
	"fmt"
	"io/fs"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/generator/file"
)

// deviceFolders are where nodes of GPUs are.
var deviceFolders = []string{"dev", "dev/dri", "dev/nvidia-caps", "dev/nvidia-caps-imex-channels"}

// linkDevices makes /dev/char/MAJOR:MINOR for the GPUs' nodes, which udev makes on a host, but not for NVIDIA's. runc 1.1.3 to
// 1.1.6 (Debian 12 has 1.1.5) leaves a device that has none out of the DeviceAllow= of its container's unit, and the next
// daemon-reload in the machine takes the GPU away from the container (opencontainers/runc issues 3671 and 3708).
func (m *Machine) linkDevices() error {
	var links []file.File
	for _, folder := range deviceFolders {
		entries, err := m.Root.ReadDir(folder)
		if err != nil {
			continue // no such devices
		}
		for _, e := range entries {
			if folder == "dev" && !strings.HasPrefix(e.Name(), "nvidia") {
				continue
			}
			// What the entry itself says is the type of what systemd-nspawn has mounted the node on, a regular file.
			info, err := e.Info()
			if err != nil {
				return err
			}
			stat, ok := info.Sys().(*syscall.Stat_t)
			if !ok || info.Mode()&fs.ModeCharDevice == 0 {
				continue // a folder
			}
			links = append(links, file.File{
				Path:    fmt.Sprintf("dev/char/%d:%d", unix.Major(stat.Rdev), unix.Minor(stat.Rdev)),
				Mode:    fs.ModeSymlink | 0o777,
				Content: []byte(path.Join("..", strings.TrimPrefix(folder, "dev"), e.Name())),
			})
		}
	}
	_, err := m.Root.WriteAll(links)
	return err
}
