// Package wire makes the host's NVIDIA driver usable inside a running machine: libraries and programs where the machine's
// linker and shell look for them, and the CDI specification where its containerd does.
//
// The machine's root file system is not trusted: all of it is read and written through a file.Root, and its programs are run
// by its own systemd.
package wire

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"berth/generator/file"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/helpers/nvidia-wire/cdi"
)

// Machine is the machine of a slot.
type Machine struct {
	Name string // node-a
	Unit string // what starts it, for messages: node@a.service
	// Root is its root file system. Wire needs it as the machine's processes see it.
	Root *file.Root
	// Run runs a program inside, and returns what it wrote; see machine.Manager.
	Run func(context.Context, machine.Program) (output string, err error)
	Log Log
}

// Log takes what is worth knowing before the end.
type Log interface {
	Status(format string, a ...any)
	Warn(format string, a ...any)
}

// Wire gives the machine the host's driver, for architecture arch, in the words of GOARCH. It returns what it did in one
// line. If it fails no CDI specification is left, neither of this run nor of an earlier one, so that no container gets half a
// GPU.
func (m *Machine) Wire(ctx context.Context, host *file.Root, d *nvidia.Driver, arch string) (done string, err error) {
	defer func() {
		err = errors.Join(err, m.unstage())
		if err != nil {
			err = errors.Join(err, m.unpublish())
		}
	}()
	if err := errors.Join(m.unpublish(), m.unstage()); err != nil {
		return "", err
	}
	m.Log.Status("linking the driver's files")
	ldconfig, err1 := m.find("ldconfig", "install libc-bin", linkerFolders)
	toolkit, err2 := m.find("nvidia-ctk", "install the NVIDIA Container Toolkit "+toolkitVersion+" or newer", toolkitFolders)
	if err := errors.Join(err1, err2, m.link(host, d, arch), m.linkDevices()); err != nil {
		return "", err
	}
	if err := m.runLinker(ctx, ldconfig); err != nil {
		return "", err
	}
	if err := m.generate(ctx, toolkit); err != nil {
		return "", err
	}
	devices, err := m.publish(ctx)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("NVIDIA driver %s in machine %s: %d names of libraries, %d programs, CDI devices of %s: %s",
		orUnknown(d.Version), m.Name, len(d.Libraries), len(d.Tools), cdi.Kind, strings.Join(devices, " ")), nil
}

func orUnknown(version string) string {
	if version == "" {
		return "(version unknown)"
	}
	return version
}

// Wired tells whether an earlier run left links in the machine.
func (m *Machine) Wired() (bool, error) {
	links, err := ownLinks(m.Root, allFolders)
	return len(links) > 0, err
}

// Unwire takes away what an earlier run left in the machine, for one that gets no GPU any more.
func (m *Machine) Unwire(ctx context.Context) error {
	links, err := ownLinks(m.Root, allFolders)
	if err := errors.Join(err, m.unpublish(), m.unstage()); err != nil {
		return err
	}
	ldconfig, err := m.find("ldconfig", "install libc-bin", linkerFolders)
	if err != nil {
		return err
	}
	// Links that lead nowhere are as good as none for ldconfig, and if this run ends here the next one finds them.
	if err := m.spoil(links); err != nil {
		return err
	}
	if err := m.runLinker(ctx, ldconfig); err != nil {
		return err
	}
	return m.remove(links)
}

// few joins lines, at most as many as a person wants to read, each on a line of its own after a newline.
func few(lines []string) string {
	const limit = 20
	var b strings.Builder
	for i, line := range lines {
		if i == limit && len(lines) > limit+1 {
			fmt.Fprintf(&b, "\n  and %d more", len(lines)-limit)
			break
		}
		b.WriteString("\n  " + line)
	}
	return b.String()
}
