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

// Hold returns what a claim brings with it, with paths relative to the root directory: links by which systemd knows what the slot's
// machine requires (systemd.unit(5), "UNIT.requires/"). The generated drop-in says the same, but not after a daemon-reload whose
// generator was killed, or found no room to write in /run. Nothing would need the guard then, which is StopWhenUnneeded=, and
// systemd would stop it, and the node with it.
func Hold(slot string) []file.File {
	dir := "run/systemd/system/systemd-nspawn@" + goalstate.MachineName(slot) + ".service.requires"
	var links []file.File
	for _, template := range before {
		links = append(links, file.File{
			Path: path.Join(dir, template+"@"+slot+".service"), Mode: fs.ModeSymlink | 0o777,
			Content: []byte(path.Join(unitDir, template+"@.service")),
		})
	}
	return links
}

// Settings returns where render-config puts the settings of a slot's machine (systemd.nspawn(5)), and the drop-in with the devices that
// not every machine has, relative to the root directory.
func Settings(slot string) (nspawn, devices string) {
	machine := goalstate.MachineName(slot)
	return "run/systemd/nspawn/" + machine + ".nspawn", "run/systemd/system/systemd-nspawn@" + machine + ".service.d/60-berth-devices.conf"
}

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

// Left returns what earlier plans left in BakedDir and planned does not hold, with paths relative to it, sorted: files that have a name
// from a plan and begin with the header, and links from a plan. planned is relative to BakedDir, too.
func Left(root *file.Root, planned []file.File) ([]string, error) {
	left, err := leftover(root, BakedDir, planned)
	return slices.DeleteFunc(left, func(name string) bool { return !made(root, path.Join(BakedDir, name)) }), err
}

// LeftFolders returns the folders in BakedDir that are there for files of a plan, and of planned hold none, with paths relative to it.
// What else is in them is somebody else's.
func LeftFolders(root *file.Root, planned []file.File) ([]string, error) {
	wanted := make(map[string]bool, len(planned))
	for _, f := range planned {
		wanted[path.Dir(f.Path)] = true
	}
	entries, err := root.ReadDir(BakedDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var left []string
	for _, e := range entries {
		if name := e.Name(); e.IsDir() && !wanted[name] && (name == wants || SlotOf(path.Join(name, dropIn)) != "") {
			left = append(left, name)
		}
	}
	return left, err
}

// made tells whether a file with a name from a plan comes from one. What cannot be read does not.
func made(root *file.Root, name string) bool {
	if path.Base(path.Dir(name)) == wants {
		target, err := root.Readlink(name)
		return err == nil && target == "../"+path.Base(name)
	}
	content, err := root.Read(name, maxUnit)
	return err == nil && bytes.HasPrefix(content, []byte(Header))
}

// masks returns what the generator has to add to the plan of a host into whose image another goal state was baked: links to
// /dev/null, which hide the boot link of another slot, and drop-ins that a slot does not need any more (systemd.unit(5)). Units and
// drop-ins of slots that are not in the goal state stay: the slot may run, and its steps look at the goal state themselves.
func masks(root *file.Root, goal *goalstate.GoalState, planned []file.File) ([]file.File, error) {
	left, err := Left(root, planned)
	var masks []file.File
	for _, name := range left {
		hide := false
		switch dir := path.Dir(name); {
		case goal == nil:
			hide = dir == wants
		case dir == wants:
			// Of a broken goal state that does not tell, the slot starts, and says what is wrong.
			hide = !goal.Partial || goal.Boot != ""
		case dir != ".":
			hide = !goal.Partial && goal.Slots[SlotOf(name)] != nil
		}
		if hide {
			masks = append(masks, file.File{Path: name, Mode: fs.ModeSymlink | 0o777, Content: []byte(mask)})
		}
	}
	return masks, err
}

// Host returns the plan of a host: Units of its goal state and claims, and what hides units that were baked into its image from
// another goal state.
func Host(root *file.Root, goal *goalstate.GoalState, held []string) ([]file.File, error) {
	files, err := Units(goal, held)
	hide, maskErr := masks(root, goal, files)
	files = append(files, hide...)
	file.Sort(files)
	return files, errors.Join(err, maskErr)
}

// Dir returns where the units of a host are, UnitDir or BakedDir: the latter where the generator has made none of planned and the image
// has some.
func Dir(root *file.Root, planned []file.File) string {
	for _, dir := range []string{UnitDir, BakedDir} {
		for _, f := range planned {
			if _, err := root.Lstat(path.Join(dir, f.Path)); err == nil {
				return dir
			}
		}
	}
	return UnitDir
}

// mask is the target of a link that hides a unit, a drop-in or a boot link.
const mask = "/dev/null"

// Stale returns the paths of a slot's planned files that are not on the host as they should be, and of those that are there but are
// not planned. NeedDaemonReload= of the units does not tell: a unit that was loaded after its source changed looks fresh.
func Stale(root *file.Root, slot string, planned []file.File) ([]string, error) {
	var stale []string
	for _, f := range planned {
		if SlotOf(f.Path) != slot || path.Dir(f.Path) == wants {
			continue // the boot link is for the next boot, which makes it anew
		}
		name := effective(root, f.Path)
		fresh, err := isPlanned(root, name, f)
		if err != nil {
			return nil, err
		}
		if !fresh {
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

// isPlanned tells whether what is at name is what f says. What has another kind is not.
func isPlanned(root *file.Root, name string, f file.File) (bool, error) {
	if f.Mode.Type() == fs.ModeSymlink {
		target, err := root.Readlink(name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, file.ErrRefused) {
			return false, nil
		}
		return target == string(f.Content), err
	}
	have, err := root.Read(name, maxUnit)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return bytes.Equal(have, f.Content), err
}

// effective returns the path below the root directory of what systemd reads for a file of a plan: the generator's, else the image's,
// else where the generator would put it.
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

// Leftover returns the paths, sorted and relative to UnitDir, of what the generator has made there and is not planned any more. It
// goes with the next daemon-reload: systemd empties UnitDir before it runs the generators.
func Leftover(root *file.Root, planned []file.File) ([]string, error) {
	return leftover(root, UnitDir, planned)
}

func leftover(root *file.Root, dir string, planned []file.File) ([]string, error) {
	wanted := make(map[string]bool, len(planned))
	for _, f := range planned {
		wanted[f.Path] = true
	}
	var left []string
	add := func(name string) {
		if SlotOf(name) != "" && !wanted[name] {
			left = append(left, name)
		}
	}
	names, err := root.Names(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, name := range names {
		switch {
		case name == wants:
			links, err := root.Names(path.Join(dir, name))
			if err != nil {
				return nil, err
			}
			for _, link := range links {
				add(path.Join(name, link))
			}
		case !strings.HasSuffix(name, ".d"):
			add(name)
		case SlotOf(path.Join(name, dropIn)) != "":
			if _, err := root.Lstat(path.Join(dir, name, dropIn)); err == nil {
				add(path.Join(name, dropIn))
			}
		}
	}
	slices.Sort(left)
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
