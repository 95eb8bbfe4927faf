package plan

import (
	"bytes"
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"

	"berth/generator/file"
	"berth/generator/goalstate"
)

// ClaimsDir holds a file for each slot that holds a claim on the host, below the root directory. peer-guard writes them.
const ClaimsDir = "run/berth/claims"

// Held returns the slots that hold a claim on the host, sorted.
func Held(root *file.Root) ([]string, error) {
	entries, err := root.ReadDir(ClaimsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var held []string
	for _, e := range entries {
		if goalstate.ValidSlotName(e.Name()) {
			held = append(held, e.Name())
		}
	}
	return held, nil
}

// UnitDir is where systemd has generators write, below the root directory: their NORMAL-DIR (systemd.generator(7)).
const UnitDir = "run/systemd/generator"

// Stale returns the paths of a slot's planned files that are not on the host as they should be, and of those that are there but are
// not planned. NeedDaemonReload= of the units does not tell: a unit that was loaded after its source changed looks fresh.
func Stale(root *file.Root, slot string, planned []file.File) ([]string, error) {
	var stale []string
	for _, f := range planned {
		if !f.Mode.IsRegular() || SlotOf(f.Path) != slot {
			continue
		}
		name := path.Join(UnitDir, f.Path)
		have, err := root.Read(name, maxUnit)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err != nil || !bytes.Equal(have, f.Content) {
			stale = append(stale, name)
		}
	}
	left, err := Leftover(root, planned)
	if err != nil {
		return nil, err
	}
	for _, name := range left {
		if SlotOf(name) == slot {
			stale = append(stale, path.Join(UnitDir, name))
		}
	}
	return stale, nil
}

// maxUnit is more than any unit file that is planned.
const maxUnit = 1 << 20

// Leftover returns the paths, sorted and relative to UnitDir, of what the generator has made there and is not planned any more. It
// goes with the next daemon-reload: systemd empties UnitDir before it runs the generators.
func Leftover(root *file.Root, planned []file.File) ([]string, error) {
	var left []string
	add := func(name string) {
		if SlotOf(name) != "" && !slices.ContainsFunc(planned, func(f file.File) bool { return f.Path == name }) {
			left = append(left, name)
		}
	}
	entries, err := root.ReadDir(UnitDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == wants:
			links, err := root.ReadDir(path.Join(UnitDir, name))
			if err != nil {
				return nil, err
			}
			for _, link := range links {
				add(path.Join(name, link.Name()))
			}
		case !e.IsDir():
			add(name)
		default:
			if _, err := root.Lstat(path.Join(UnitDir, name, dropIn)); err == nil {
				add(path.Join(name, dropIn))
			}
		}
	}
	return left, nil
}

// SlotOf returns the slot that a path belongs to which the generator writes, relative to its output folder; empty: none.
func SlotOf(name string) string {
	unit := name
	switch dir, base := path.Split(name); {
	case dir == wants+"/":
		unit = base
	case base == dropIn && strings.HasSuffix(dir, ".d/"):
		unit = strings.TrimSuffix(dir, ".d/")
	}
	instance, isService := strings.CutSuffix(unit, ".service")
	template, slot, _ := strings.Cut(instance, "@")
	switch mounted, isMount := strings.CutPrefix(unit, strings.TrimSuffix(bpffs(""), mount)); {
	case isMount:
		slot = strings.TrimSuffix(mounted, mount)
	case !isService:
		return ""
	case template == "systemd-nspawn":
		var isNode bool
		if slot, isNode = strings.CutPrefix(slot, goalstate.MachineName("")); !isNode {
			return ""
		}
	case template != "node" && !strings.HasPrefix(template, "node-"):
		return ""
	}
	if !goalstate.ValidSlotName(slot) {
		return ""
	}
	return slot
}
