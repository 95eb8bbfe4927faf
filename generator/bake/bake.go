// Package bake puts berth's units, static and generated, into the root file system of a host image while it is built. The generated
// ones are those that the generator would make when the host boots with the same goal state, byte for byte: beside the generator they
// change nothing, and in its place they do.
package bake

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/plan"
	"berth/helpers/step"
	"berth/units"
)

// Options say what goes into an image.
type Options struct {
	// Goal names files of the machine that builds the image, which become its goal state: the first usr/lib/berth/goal.toml, each other one
	// a drop-in of its own name in usr/lib/berth/goal.toml.d. None: the image has its goal state already.
	Goal []string
	// GeneratedOnly leaves out the static files, and does not ask for the programs: the host has them from elsewhere.
	GeneratedOnly bool
	// Programs are copied into the image: paths on the machine that builds it, by the path in the image without a leading slash.
	Programs map[string]string
	// Epoch, if not zero, is the latest time that a file may have that is written, or a folder that holds one (SOURCE_DATE_EPOCH,
	// reproducible-builds.org): the same input gives the same tree, times included.
	Epoch time.Time
}

// Result is what a bake did. Paths are absolute, as in the image, and sorted.
type Result struct {
	Goal    []string `json:"goal"`    // files of the goal state, in the order in which they were merged
	Boot    string   `json:"boot"`    // the slot that starts at boot; empty: none
	Slots   []string `json:"slots"`   // sorted
	Wrote   []string `json:"wrote"`   // files and links that were not there, or not as they should be
	Removed []string `json:"removed"` // of slots that are not in the goal state any more
	Right   int      `json:"right"`   // number of files and links that were right already
	// Warnings tell what may keep the image from starting a node, or what it gives away.
	Warnings []string `json:"warnings"`
}

// Bake makes the image whose "/" is root hold what o says. It writes nothing unless all of it is known; what is right already is left
// alone, and what an earlier bake wrote for slots that are gone is removed. One bake waits for another of the same image, and completes one
// that was killed.
//
// Its errors are goalstate.Errors (with the names of o.Goal, where those files are to blame), step.Failure for a goal state that is not
// there or that is refused, and file.RefusedError for what is in the way.
func Bake(root *file.Root, o Options) (*Result, error) {
	lock, err := os.Open(root.Name())
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s: %w", root.Name(), err)
	}
	image, err := prepare(root, o)
	if err != nil {
		return nil, err
	}
	return image.write(root, o.Epoch)
}

// image is what belongs into an image.
type image struct {
	goal  *goalstate.GoalState
	files []file.File // sorted
	// gone is what an earlier bake wrote and this one would not; sorted.
	gone []string
	// folders of these, which go with them or, where a bake was killed, after them, unless somebody else's files are in them.
	folders  []string
	warnings []string
}

// prepare finds out what belongs into the image. It changes nothing.
func prepare(root *file.Root, o Options) (*image, error) {
	added, err := readGoal(o.Goal)
	if err != nil {
		return nil, err
	}
	goal, err := loadGoal(root, o.Goal, added)
	if err != nil {
		return nil, err
	}
	// Nothing holds a claim in an image, so this is what the generator makes at boot.
	generated, err := plan.Units(goal, nil)
	if err != nil {
		return nil, err
	}
	i := &image{goal: goal}
	for _, f := range generated {
		f.Path = path.Join(plan.BakedDir, f.Path)
		i.files = append(i.files, f)
	}
	for _, s := range added {
		i.files = append(i.files, file.File{Path: s.Path, Mode: 0o644, Content: s.Data})
	}
	for name, from := range o.Programs {
		content, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		i.files = append(i.files, file.File{Path: name, Mode: 0o755, Content: content})
	}
	if !o.GeneratedOnly {
		i.files = append(i.files, units.Files()...)
		if err := wantPrograms(root, i.files); err != nil {
			return nil, err
		}
		if _, err := root.Stat(nspawn); err != nil {
			i.warnings = append(i.warnings, fmt.Sprintf("/%s is not in the image, and no slot starts without it: install systemd-container", nspawn))
		}
	}
	for _, name := range goal.SlotNames() {
		if goal.Slots[name].Kubelet.BootstrapToken != "" { // of a file that was in the image already
			i.warnings = append(i.warnings, fmt.Sprintf("%s: kubelet.bootstrap_token is a secret that everybody has who has the image: %s",
				strings.Join(goal.Sources, ", "), tokenCure))
			break
		}
	}
	file.Sort(i.files)
	left, err := plan.Left(root, generated)
	if err != nil {
		return nil, err
	}
	for _, name := range left {
		i.gone = append(i.gone, path.Join(plan.BakedDir, name))
	}
	folders, err := plan.LeftFolders(root, generated)
	for _, name := range folders {
		i.folders = append(i.folders, path.Join(plan.BakedDir, name))
	}
	return i, err
}

// nspawn is the distribution's unit of machines.
const nspawn = "usr/lib/systemd/system/systemd-nspawn@.service"

const (
	goalFile    = "usr/lib/berth/goal.toml"
	goalDropIns = goalFile + ".d"
	// maxGoal is more than goalstate takes, which tells that a file is too large.
	maxGoal = 2 << 20
)

const tokenCure = "want kubelet.bootstrap_token_file, or a credential (kubelet.bootstrap_token_credential, kubelet.bootstrap_token_encrypted_credential), with a token that reaches the host after it was built"

// readGoal reads the files that become the image's goal state; their Path is the one in the image, without a leading slash.
func readGoal(names []string) ([]goalstate.Source, error) {
	var sources []goalstate.Source
	var refused []error
	for i, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(io.LimitReader(f, maxGoal))
		f.Close()
		if err != nil {
			return nil, err
		}
		inImage := goalFile
		if i > 0 {
			inImage = path.Join(goalDropIns, filepath.Base(name))
			if !strings.HasSuffix(name, ".toml") || strings.HasPrefix(filepath.Base(name), ".") {
				return nil, usagef("%s: is to be a drop-in, as it is not the first file: want a name that ends with .toml and does not begin with a dot", name)
			}
		}
		if slices.ContainsFunc(sources, func(s goalstate.Source) bool { return s.Path == inImage }) {
			return nil, usagef("%s: another drop-in has this name", name)
		}
		if holdsToken(data) {
			refused = append(refused, fmt.Errorf("%s: kubelet.bootstrap_token is a secret, and every user of the host and everybody who has the image "+
				"could read the copy in it: %s", name, tokenCure))
		}
		sources = append(sources, goalstate.Source{Path: inImage, Data: data})
	}
	if err := errors.Join(refused...); err != nil {
		return nil, &step.Failure{Code: step.ExitRefused, Err: err}
	}
	return sources, nil
}

func usagef(format string, a ...any) error {
	return &step.Failure{Code: step.ExitUsage, Err: fmt.Errorf(format, a...)}
}

// holdsToken tells whether a file of a goal state holds a bootstrap token, also one that a later file replaces. What is no TOML is refused
// by goalstate.
func holdsToken(data []byte) bool {
	type kubelet struct {
		Token any `toml:"bootstrap_token"`
	}
	var goal struct {
		Kubelet kubelet
		Slot    map[string]struct{ Kubelet kubelet }
	}
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	if _, err := toml.Decode(string(data), &goal); err != nil {
		return false
	}
	for _, slot := range goal.Slot {
		if slot.Kubelet.Token != nil {
			return true
		}
	}
	return goal.Kubelet.Token != nil
}

// loadGoal reads the goal state that the image will have with the files of names in it.
func loadGoal(root *file.Root, names []string, added []goalstate.Source) (*goalstate.GoalState, error) {
	goal, err := goalstate.LoadImage(root, added)
	if errors.Is(err, goalstate.ErrNone) && len(added) == 0 {
		return nil, step.Invalidf("the image has no goal state: want etc/berth/goal.toml or usr/lib/berth/goal.toml beneath %s, or --goal FILE", root.Name())
	}
	if errs := goalstate.Errors(nil); errors.As(err, &errs) {
		for _, e := range errs {
			for i, s := range added {
				if e.File == "/"+s.Path {
					e.File = names[i]
				}
			}
		}
	}
	if err != nil && !errors.Is(err, goalstate.ErrNone) {
		return nil, err
	}
	var without []error
	for i, s := range added {
		if goal == nil || !slices.Contains(goal.Sources, "/"+s.Path) {
			without = append(without, fmt.Errorf("%s: would be without effect as /%s: it is empty, or hidden by the file of that name that "+
				"/etc/berth of the image has", names[i], s.Path))
		}
	}
	if err := errors.Join(without...); err != nil {
		return nil, &step.Failure{Code: step.ExitRefused, Err: err}
	}
	return goal, nil
}

// wantPrograms is an error where a program that the units run is neither in the image nor about to be put there.
func wantPrograms(root *file.Root, files []file.File) error {
	var missing []string
	for _, name := range units.Programs() {
		if slices.ContainsFunc(files, func(f file.File) bool { return f.Path == name }) {
			continue
		}
		info, err := root.Stat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			missing = append(missing, "/"+name)
		case err != nil:
			return err
		case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
			missing = append(missing, "/"+name+" (is no program)")
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the image lacks programs that the units run: %s: install berth into it first (./install.sh, or its package), or have them "+
		"copied (--with-programs), or leave out all but the generated units (--generated-only)", strings.Join(missing, ", "))
}

// write makes the image as it was planned.
func (i *image) write(root *file.Root, epoch time.Time) (*Result, error) {
	var errs []error
	removed, wrote := []string{}, make(map[string]bool)
	for _, name := range i.gone {
		if err := root.Remove(name); err != nil {
			errs = append(errs, err)
			continue
		}
		removed = append(removed, "/"+name)
	}
	for _, name := range i.folders {
		if err := root.Remove(name); err != nil && !errors.Is(err, file.ErrRefused) {
			errs = append(errs, err)
		}
	}
	changed, err := root.WriteAll(i.files)
	errs = append(errs, err)
	for _, name := range changed {
		wrote[name] = true
	}
	if !epoch.IsZero() && errors.Join(errs...) == nil { // else the next bake does
		errs = append(errs, i.setTimes(root, epoch, wrote))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	r := &Result{
		Goal: i.goal.Sources, Boot: i.goal.Boot, Slots: i.goal.SlotNames(),
		Wrote: []string{}, Removed: removed, Warnings: append([]string{}, i.warnings...),
	}
	for _, f := range i.files {
		if wrote[f.Path] {
			r.Wrote = append(r.Wrote, "/"+f.Path)
		} else {
			r.Right++
		}
	}
	return r, nil
}

// setTimes makes no file, and no folder that holds one, younger than epoch, and adds to wrote the files whose time was still to be set:
// those of a bake that was killed. Of folders nobody knows which ones a bake made that was killed, so all are meant.
func (i *image) setTimes(root *file.Root, epoch time.Time, wrote map[string]bool) error {
	var errs []error
	set := func(name string) bool {
		info, err := root.Lstat(name)
		if err != nil || !info.ModTime().After(epoch) {
			errs = append(errs, err)
			return false
		}
		err = root.SetTime(name, epoch)
		errs = append(errs, err)
		return err == nil
	}
	folders := map[string]bool{".": true}
	hold := func(name string) {
		for dir := path.Dir(name); !folders[dir]; dir = path.Dir(dir) {
			folders[dir] = true
		}
	}
	for _, f := range i.files {
		wrote[f.Path] = set(f.Path) || wrote[f.Path]
		hold(f.Path)
	}
	for _, name := range i.gone {
		hold(name)
	}
	for dir := range folders {
		resolved, err := root.Resolve(dir) // a folder may be a link to one
		if err == nil {
			set(resolved)
		} else if !errors.Is(err, fs.ErrNotExist) { // removed
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Programs returns what Options.Programs has to be for all of berth's programs to come from where the program exe is: a folder that
// holds them all, or the bin folder beside lib/berth and lib/systemd/system-generators.
func Programs(exe string) (map[string]string, error) {
	dir := filepath.Dir(exe)
	from := map[string]string{"usr/bin/berth": exe}
	var missing []string
	for _, name := range append(units.Programs(), "usr/lib/systemd/system-generators/berth-generator") {
		beside := filepath.Join(dir, path.Base(name))
		installed := filepath.Join(dir, "..", strings.TrimPrefix(name, "usr/"))
		for _, p := range []string{beside, installed} {
			if info, err := os.Stat(p); err == nil && info.Mode().IsRegular() {
				from[name] = p
				break
			}
		}
		if from[name] == "" {
			missing = append(missing, beside+" or "+installed)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("programs to copy that are not where berth is: want %s", strings.Join(missing, ", "))
	}
	return from, nil
}
