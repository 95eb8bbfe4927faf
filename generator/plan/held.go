package plan

import (
	"bytes"
	"errors"
	"io/fs"
	"maps"
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

// Stale returns the paths of a slot's planned files that are not on the host as they should be, and of generated drop-ins
// that are there but are not planned. NeedDaemonReload= of the units does not tell: a unit that was loaded after its source changed looks
// fresh.
func Stale(root *file.Root, slot string, planned []file.File) ([]string, error) {
	want := make(map[string][]byte)
	for _, f := range planned {
		if f.Mode.IsRegular() && of(slot, f.Path) {
			want[path.Join(UnitDir, f.Path)] = f.Content
		}
	}
	var stale []string
	for _, name := range slices.Sorted(maps.Keys(want)) {
		have, err := root.Read(name, maxUnit)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if !bytes.Equal(have, want[name]) {
			stale = append(stale, name)
		}
	}
	entries, err := root.ReadDir(UnitDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		drop := path.Join(UnitDir, e.Name(), dropIn)
		if _, planned := want[drop]; planned || !e.IsDir() || !of(slot, e.Name()) {
			continue
		}
		if _, err := root.Lstat(drop); err == nil {
			stale = append(stale, drop)
		}
	}
	return stale, nil
}

// maxUnit is more than any unit file that is planned.
const maxUnit = 1 << 20

// of tells whether a path of a plan belongs to the slot.
func of(slot, name string) bool {
	unit, _, _ := strings.Cut(name, "/")
	return strings.Contains(unit, "@"+slot+".service") || strings.Contains(unit, "@"+goalstate.MachineName(slot)+".service")
}
