package wire

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"berth/generator/file"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/helpers/nvidia-wire/cdi"
)

// Places of programs in a machine. toolkitFolders are those of NVIDIA's packages, of hand-made installations and of the
// toolkit's own installer.
var (
	linkerFolders  = []string{"/usr/sbin", "/sbin", "/usr/bin"}
	toolkitFolders = []string{"/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit"}
)

// toolkitVersion is the first of the NVIDIA Container Toolkit that can leave out hooks.
const toolkitVersion = "1.18"

// staging is where nvidia-ctk puts its specifications, on the machine's tmpfs and out of containerd's sight.
const staging = nvidia.Dir + "/cdi"

// find returns the path of a program in the machine.
func (m *Machine) find(name, cure string, folders []string) (string, error) {
	for _, folder := range folders {
		p := path.Join(folder, name)
		if m.Root.IsProgram(p) {
			return p, nil
		}
	}
	return "", fmt.Errorf("machine %s has no %s in any of %s: %s in /var/lib/machines/%[1]s", m.Name, name, strings.Join(folders, " "), cure)
}

// runLinker makes the machine's linker cache anew.
func (m *Machine) runLinker(ctx context.Context, ldconfig string) error {
	m.Log.Status("running ldconfig in machine %s", m.Name)
	output, err := m.Run(ctx, machine.Program{
		Unit: "berth-nvidia-ldconfig.service", Description: "Linker cache with the NVIDIA driver of the host", Args: []string{ldconfig},
	})
	return m.failure("ldconfig", output, err)
}

// generate has nvidia-ctk make CDI specifications. Of the hooks only those are wanted that make links and a linker cache in
// containers; the third keeps containers from making nodes of their own. nvidia-ctk ignores names that it does not know.
func (m *Machine) generate(ctx context.Context, toolkit string) error {
	if _, err := m.Root.Write(file.File{Path: staging, Mode: fs.ModeDir | 0o755}); err != nil {
		return err
	}
	m.Log.Status("running nvidia-ctk in machine %s", m.Name)
	output, err := m.Run(ctx, machine.Program{
		Unit: "berth-nvidia-cdi.service", Description: "CDI specification of the NVIDIA GPUs",
		Args: []string{toolkit, "cdi", "generate", "--output", path.Join(staging, cdi.Main), "--disable-hook", "all",
			"--enable-hook", "create-symlinks", "--enable-hook", "update-ldcache", "--enable-hook", "disable-device-node-modification"},
	})
	if err != nil {
		// 1.17 and older show their usage, too, which tells nothing.
		if strings.Contains(output, "flag provided but not defined") {
			return fmt.Errorf("%s in machine %s is too old, it has no --disable-hook and --enable-hook: "+
				"install the NVIDIA Container Toolkit %s or newer in /var/lib/machines/%[2]s", toolkit, m.Name, toolkitVersion)
		}
		return m.failure("nvidia-ctk cdi generate", output, err)
	}
	for line := range strings.Lines(output) {
		if level, text := logLine(line); level == "warning" {
			m.Log.Warn("nvidia-ctk: %s", text)
		}
	}
	return nil
}

// outputLines is how much of a program's output is worth telling, as systemd tries again and again.
const outputLines = 50

// failure says why a program failed: in the first line by its last one, then by what it wrote.
func (m *Machine) failure(program, output string, err error) error {
	if err == nil {
		return nil
	}
	lines := strings.Split(output, "\n")
	_, last := logLine(lines[len(lines)-1])
	if last != "" {
		last = ": " + last
	}
	err = fmt.Errorf("%s in machine %s: %w%s", program, m.Name, err, last)
	if n := len(lines) - outputLines; n > 1 {
		lines = append([]string{fmt.Sprintf("(%d lines before)", n)}, lines[n:]...)
	}
	if len(lines) > 1 {
		err = errors.Join(err, errors.New("  "+strings.Join(lines, "\n  ")))
	}
	return err
}

// logLine takes apart a line as logrus writes it, with which nvidia-ctk logs: time="…" level=warning msg="…". Other lines
// have no level.
func logLine(line string) (level, text string) {
	line = strings.TrimSpace(line)
	_, rest, found := strings.Cut(line, " level=")
	level, msg, found2 := strings.Cut(rest, " msg=")
	if !found || !found2 {
		return "", line
	}
	if quoted, err := strconv.QuotedPrefix(msg); err == nil {
		msg, _ = strconv.Unquote(quoted)
	}
	return level, msg
}
