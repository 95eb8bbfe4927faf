package wire

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/helpers/nvidia"
)

// multiarch are Debian's folders of libraries, by GOARCH. Others use usr/lib64 or usr/lib.
var multiarch = map[string]string{"amd64": "usr/lib/x86_64-linux-gnu", "arm64": "usr/lib/aarch64-linux-gnu"}

const programFolder = "usr/bin"

// allFolders are those in which a run can have made links.
var allFolders = []string{multiarch["amd64"], multiarch["arm64"], "usr/lib64", "usr/lib", programFolder}

// libraryFolder is where the machine's linker looks for libraries of the architecture without being told.
func libraryFolder(root *file.Root, arch string) (string, error) {
	folders := []string{multiarch[arch], "usr/lib64", "usr/lib"}
	for _, folder := range folders {
		if folder == "" {
			continue
		}
		if info, err := root.Stat(folder); err == nil && info.IsDir() {
			return folder, nil
		}
	}
	return "", fmt.Errorf("no folder of libraries in the root file system: want one of %s", strings.Join(folders, " "))
}

// link makes the links that the driver needs, and removes those of other drivers.
func (m *Machine) link(host *file.Root, d *nvidia.Driver, arch string) error {
	folder, err := libraryFolder(m.Root, arch)
	if err != nil {
		return err
	}
	links := d.Links(folder)
	own, err := ownLinks(m.Root, append([]string{folder}, allFolders...))
	if err != nil {
		return err
	}
	if err := errors.Join(m.checkBound(host, links), m.checkPlaces(links)); err != nil {
		return err
	}
	files := make([]file.File, len(links))
	for i, l := range links {
		files[i] = l.File
		own = slices.DeleteFunc(own, func(p string) bool { return p == l.Path })
	}
	if err := m.remove(own); err != nil {
		return err
	}
	_, err = m.Root.WriteAll(files)
	return err
}

// isOwn tells whether only a run of ours can have made a link with this target.
func isOwn(target string) bool { return strings.HasPrefix(target, nvidia.Dir+"/") }

// ownLinks finds the links of earlier runs in folders. A folder that several paths lead to, as usr/lib64 often is one, counts
// as the first of them.
func ownLinks(root *file.Root, folders []string) ([]string, error) {
	var found []string
	var seen []fs.FileInfo
	for _, folder := range folders {
		info, err := root.Stat(folder)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !info.IsDir() || slices.ContainsFunc(seen, func(s fs.FileInfo) bool { return os.SameFile(s, info) }) {
			continue
		}
		seen = append(seen, info)
		links, err := root.Links(folder)
		if err != nil {
			return nil, err
		}
		for _, name := range slices.Sorted(maps.Keys(links)) {
			if isOwn(links[name]) {
				found = append(found, path.Join(folder, name))
			}
		}
	}
	return found, nil
}

// checkBound makes sure that the links will lead to the very files of the host: the driver may have been upgraded after the
// machine was started.
func (m *Machine) checkBound(host *file.Root, links []nvidia.Link) error {
	var wrong []string
	checked := map[string]bool{}
	for _, l := range links {
		target := string(l.Content)
		if checked[target] {
			continue
		}
		checked[target] = true
		want, err := host.Stat(l.Source)
		if err != nil {
			return fmt.Errorf("the host's driver: %w", err)
		}
		if info, err := m.Root.Stat(target); err != nil {
			wrong = append(wrong, fmt.Sprintf("%s is not there as %s", l.Source, target))
		} else if !os.SameFile(want, info) {
			wrong = append(wrong, fmt.Sprintf("%s is another file there, as %s", l.Source, target))
		}
	}
	if wrong == nil {
		return nil
	}
	return fmt.Errorf("machine %s does not have the host's NVIDIA driver as it is now, the driver has changed since the machine started: "+
		"run: systemctl restart %s%s", m.Name, m.Unit, few(wrong))
}

// checkPlaces makes sure that there is nothing in the place of a link but what an earlier run left.
func (m *Machine) checkPlaces(links []nvidia.Link) error {
	var taken []string
	for _, l := range links {
		if what := m.taken(l.Path); what != "" {
			taken = append(taken, "/"+l.Path+what)
		}
	}
	if taken == nil {
		return nil
	}
	return fmt.Errorf("machine %s has files of another NVIDIA driver, which the host's must not be mixed with: "+
		"remove the driver's packages from its root file system (those of the container toolkit may stay)%s", m.Name, few(taken))
}

// taken says what is in the place of a link that must not be replaced; empty: nothing.
func (m *Machine) taken(name string) string {
	info, err := m.Root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		return ": " + err.Error()
	}
	if info.Mode().Type() != fs.ModeSymlink {
		return fmt.Sprintf(" (%v, %d bytes)", info.Mode(), info.Size())
	}
	target, err := m.Root.Readlink(name)
	if isOwn(target) || err != nil {
		return ""
	}
	// ldconfig makes the name that a library has inside a link to one of our links.
	if next, err := m.Root.Readlink(path.Join(path.Dir(name), target)); err == nil && isOwn(next) && path.Base(target) == target {
		return ""
	}
	// A link that leads nowhere is of no use to anybody.
	if _, err := m.Root.Stat(name); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		return ""
	}
	return " -> " + target
}

func (m *Machine) remove(links []string) error {
	var errs []error
	for _, p := range links {
		errs = append(errs, m.Root.Remove(p))
	}
	return errors.Join(errs...)
}

// spoil makes links lead nowhere.
func (m *Machine) spoil(links []string) error {
	files := make([]file.File, len(links))
	for i, p := range links {
		files[i] = file.File{Path: p, Mode: fs.ModeSymlink | 0o777, Content: []byte(nvidia.Dir + "/none")}
	}
	_, err := m.Root.WriteAll(files)
	return err
}
