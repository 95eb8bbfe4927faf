package wire

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/helpers/machine"
	"berth/helpers/nvidia"
	"berth/helpers/nvidia-wire/cdi"
)

// specLimit bounds a specification; those of large hosts have about 200 KB.
const specLimit = 8 << 20

// otherFolder is the other folder that containerd looks into (cdi_spec_dirs).
const otherFolder = "/etc/cdi"

// isOurs tells whether a file in nvidia.CDIDir is one that a run of ours can have published.
func isOurs(name string) bool { return isSpec(name) && strings.HasPrefix(name, "nvidia.") }

// isSpec tells whether containerd would read a file of this name.
func isSpec(name string) bool { return path.Ext(name) == ".yaml" || path.Ext(name) == ".json" }

// publish checks what nvidia-ctk made and puts it where containerd looks. It returns the names of the devices.
func (m *Machine) publish(ctx context.Context) (devices []string, err error) {
	m.Log.Status("checking the CDI specification of machine %s", m.Name)
	specs, err := m.staged()
	if err != nil {
		return nil, err
	}
	// Decoding YAML takes time in the square of its keys, minutes for what specLimit lets through.
	type result struct {
		devices []string
		err     error
	}
	checked := make(chan result, 1)
	go func() {
		devices, err := m.check(specs)
		checked <- result{devices, err}
	}()
	select {
	case r := <-checked:
		if r.err != nil {
			return nil, r.err
		}
		devices = r.devices
	case <-ctx.Done():
		return nil, fmt.Errorf("checking the CDI specifications in machine %s: %w", m.Name, machine.ErrTimeout)
	}
	files := make([]file.File, len(specs))
	for i, s := range specs {
		files[i] = file.File{Path: path.Join(nvidia.CDIDir, s.Name), Mode: 0o644, Content: s.Content}
	}
	_, err = m.Root.WriteAll(files)
	return devices, err
}

// check checks specifications, and those that are there beside them. It returns the names of the devices.
func (m *Machine) check(specs []cdi.Spec) (devices []string, err error) {
	devices, unused, err := cdi.Check(m.Root, specs)
	if err != nil {
		return nil, fmt.Errorf("the CDI specification that nvidia-ctk made in machine %s cannot be used, no container will get a GPU:%s",
			m.Name, few(strings.Split(err.Error(), "\n")))
	}
	if unused != nil {
		m.Log.Warn("no CDI device for %s: nvidia-ctk did not find these GPUs", strings.Join(unused, " "))
	}
	return devices, m.checkOthers()
}

// staged reads what nvidia-ctk made.
func (m *Machine) staged() ([]cdi.Spec, error) {
	entries, err := m.Root.ReadDir(staging)
	if err != nil {
		return nil, err
	}
	var specs []cdi.Spec
	var errs []error
	for _, e := range entries {
		name := path.Join(staging, e.Name())
		if !isOurs(e.Name()) {
			errs = append(errs, fmt.Errorf("nvidia-ctk in machine %s made %s, which is not known: want %s", m.Name, name, cdi.Main))
			continue
		}
		content, err := m.Root.Read(name, specLimit)
		errs = append(errs, err)
		specs = append(specs, cdi.Spec{Name: e.Name(), Content: content})
	}
	return specs, errors.Join(errs...)
}

// checkOthers looks for specifications of the same devices that are not ours. Beside ours they make containerd refuse all
// devices that are in both; in the other folder, ours win, but devices that ours does not have can be stale.
func (m *Machine) checkOthers() error {
	var errs []error
	for _, folder := range []string{nvidia.CDIDir, otherFolder} {
		entries, _ := m.Root.ReadDir(folder)
		for _, e := range entries {
			name := path.Join(folder, e.Name())
			if !isSpec(e.Name()) {
				continue
			}
			content, err := m.Root.Read(name, specLimit)
			if err != nil {
				continue // containerd cannot read it either
			}
			kind := cdi.KindOf(content)
			if kind != cdi.Kind && !strings.HasPrefix(kind, cdi.Kind+".") {
				continue
			}
			if folder == nvidia.CDIDir {
				errs = append(errs, fmt.Errorf("%s in machine %s is another CDI specification of %s: remove it, and what makes it", name, m.Name, kind))
			} else {
				m.Log.Warn("%s in machine %s is another CDI specification of %s, whose devices may be stale: remove it", name, m.Name, kind)
			}
		}
	}
	return errors.Join(errs...)
}

// unpublish removes the specifications of earlier runs, or of this one.
func (m *Machine) unpublish() error { return m.empty(nvidia.CDIDir, isOurs) }

// unstage removes what nvidia-ctk made.
func (m *Machine) unstage() error {
	err := m.Root.Remove(staging)
	if !errors.Is(err, file.ErrRefused) {
		return err
	}
	// It is a folder, and not a link to one, whose files would be something else.
	if err := m.empty(staging, func(string) bool { return true }); err != nil {
		return err
	}
	return m.Root.Remove(staging)
}

// empty removes some of the files in a folder, if it is there.
func (m *Machine) empty(folder string, which func(name string) bool) error {
	entries, err := m.Root.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if which(e.Name()) {
			errs = append(errs, m.Root.Remove(path.Join(folder, e.Name())))
		}
	}
	return errors.Join(errs...)
}
