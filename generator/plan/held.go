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

// BakedDir is where an image holds units that were generated when it was built, below the root directory. systemd reads it after
// UnitDir (systemd.unit(5)), so that what the generator makes hides what was baked.
const BakedDir = "usr/lib/systemd/system"

// Header begins the first line of each generated unit and drop-in.
const Header = "# Made by berth-generator from "

// names are those that files of a plan may have, as patterns of path.Match.
var names = []string{
	"node@?*.service",
	"run-bpffs-node*.mount",
	"node-*@?*.service.d/" + dropIn,
	"systemd-nspawn@node-?*.service.d/" + dropIn,
	bootLinks + "/node@?*.service",
}

// Left returns what earlier plans left in BakedDir and planned does not hold, with paths relative to it, sorted: files that have a name
// from a plan and begin with the header, and links from a plan. planned is relative to BakedDir, too.
func Left(root *file.Root, planned []file.File) ([]string, error) {
	wanted := make(map[string]bool, len(planned))
	for _, f := range planned {
		wanted[f.Path] = true
	}
	var left []string
	for _, dir := range []string{".", bootLinks} {
		entries, err := root.ReadDir(path.Join(BakedDir, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			name := path.Join(dir, e.Name())
			if dir == "." && e.IsDir() {
				name = path.Join(name, dropIn)
			}
			if !wanted[name] && hasPlanName(name) && made(root, path.Join(BakedDir, name)) {
				left = append(left, name)
			}
		}
	}
	slices.Sort(left)
	return left, nil
}

// hasPlanName tells whether a file of a plan may have this name.
func hasPlanName(name string) bool {
	return slices.ContainsFunc(names, func(pattern string) bool {
		ok, _ := path.Match(pattern, name)
		return ok
	})
}

// made tells whether a file with a name from a plan comes from one. What cannot be read does not.
func made(root *file.Root, name string) bool {
	if path.Base(path.Dir(name)) == bootLinks {
		target, err := root.Readlink(name)
		return err == nil && target == "../"+path.Base(name)
	}
	content, err := root.Read(name, maxUnit)
	return err == nil && bytes.HasPrefix(content, []byte(Header))
}

// Masks returns what the generator has to add to the plan of a host into whose image another goal state was baked: links to
// /dev/null, which hide the boot link of another slot, and drop-ins that a slot does not need any more (systemd.unit(5)). Units and
// drop-ins of slots that are not in the goal state stay: the slot may run, and its steps look at the goal state themselves.
func Masks(root *file.Root, goal *goalstate.GoalState, planned []file.File) ([]file.File, error) {
	left, err := Left(root, planned)
	var masks []file.File
	for _, name := range left {
		hide := false
		switch dir := path.Dir(name); {
		case goal == nil:
			hide = dir == bootLinks
		case dir == bootLinks:
			// Of a broken goal state that does not tell, the slot starts, and says what is wrong.
			hide = !goal.Partial || goal.Boot != ""
		case dir != ".":
			hide = !goal.Partial && slices.ContainsFunc(goal.SlotNames(), func(slot string) bool { return of(slot, name) })
		}
		if hide {
			masks = append(masks, file.File{Path: name, Mode: fs.ModeSymlink | 0o777, Content: []byte("/dev/null")})
		}
	}
	return masks, err
}

// Stale returns the paths of a slot's planned files that are not on the host as they should be, and of generated drop-ins
// that are there but are not planned. NeedDaemonReload= of the units does not tell: a unit that was loaded after its source changed looks
// fresh.
func Stale(root *file.Root, slot string, planned []file.File) ([]string, error) {
	want := make(map[string][]byte)
	for _, f := range planned {
		if f.Mode.IsRegular() && of(slot, f.Path) {
			want[f.Path] = f.Content
		}
	}
	var stale []string
	for _, name := range slices.Sorted(maps.Keys(want)) {
		where := effective(root, name)
		have, err := root.Read(where, maxUnit)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if !bytes.Equal(have, want[name]) {
			stale = append(stale, where)
		}
	}
	drops := make(map[string]bool)
	for _, dir := range []string{UnitDir, BakedDir} {
		entries, err := root.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			drop := path.Join(e.Name(), dropIn)
			if _, planned := want[drop]; !planned && e.IsDir() && of(slot, e.Name()) {
				drops[drop] = true
			}
		}
	}
	for _, drop := range slices.Sorted(maps.Keys(drops)) {
		// The link of a mask is none.
		if info, err := root.Lstat(effective(root, drop)); err == nil && info.Mode().IsRegular() {
			stale = append(stale, effective(root, drop))
		}
	}
	return stale, nil
}

// effective returns the path below the root directory of what systemd reads for a file of a plan: the generator's, else the image's.
func effective(root *file.Root, name string) string {
	for _, dir := range []string{UnitDir, BakedDir} {
		if _, err := root.Lstat(path.Join(dir, name)); err == nil {
			return path.Join(dir, name)
		}
	}
	return path.Join(UnitDir, name)
}

// maxUnit is more than any unit file that is planned.
const maxUnit = 1 << 20

// of tells whether a path of a plan belongs to the slot.
func of(slot, name string) bool {
	unit, _, _ := strings.Cut(name, "/")
	return strings.Contains(unit, "@"+slot+".service") || strings.Contains(unit, "@"+goalstate.MachineName(slot)+".service")
}
