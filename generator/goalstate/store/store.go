// Package store keeps the last good goal state of each slot: that with which it became ready. Where the host's goal state is broken,
// slots go on with it. Everything that goes by the goal state of a host reads it by this package's Load, so that all of it goes by the
// same.
package store

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
)

// Folders below the root directory.
const (
	// Dir holds a stored goal state for each slot that has been ready, by the slot's name. Only root may read it: a goal state may hold
	// a secret.
	Dir = "var/lib/berth"
	// usedDir holds for each slot the goal state with which its last start began, in the same form.
	usedDir = "run/berth/used"
	// looked is there as soon as Dir can be seen in this boot: berth-last-good.service makes it.
	looked = "run/berth/looked"
)

// State is the goal state that a host goes by.
type State struct {
	// Goal is the host's own, as goalstate.Load returns it; or, where that is broken and slots have a good one in store, those slots as
	// they are there, which is not Partial. Which slots there are and which one starts at boot then is as in the newest record.
	Goal *goalstate.GoalState
	// LastGood has the records of the slots that Goal has from the store; empty: Goal is the host's own.
	LastGood map[string]Record
	// Refused says by the slot's name why a stored goal state is not used. Nothing but a broken goal state makes Load look. The empty
	// name stands for the folder.
	Refused map[string]error
	// Own is the host's own goal state, whatever Goal is, and Files what it was read from, as far as it could be.
	Own   *goalstate.GoalState
	Files []goalstate.Source
	// Unseen says that the goal state is broken, that nothing is in store, and that this may be so only because Dir is on a file system
	// that is not mounted yet.
	Unseen bool
}

// Load reads the goal state of the host whose "/" is root, and the stored ones where it is broken. Its error is that of
// goalstate.Load, also where slots go on with their last good goal state.
func Load(root *file.Root) (State, error) {
	goal, files, err := goalstate.LoadFiles(root)
	s := State{Goal: goal, Own: goal, Files: files}
	if !errors.As(err, new(goalstate.Errors)) {
		return s, err
	}
	stored, refused := read(root)
	s.Refused = refused
	if len(stored) == 0 {
		s.Unseen = !root.Exists(looked)
		return s, err
	}
	newest := slices.MaxFunc(slices.Collect(maps.Values(stored)), func(a, b entry) int { return compare(a.Record, b.Record) }).goal
	s.Goal = &goalstate.GoalState{Sources: newest.Sources, Boot: newest.Boot, Slots: map[string]*goalstate.Slot{}}
	s.LastGood = map[string]Record{}
	for name, e := range stored {
		if newest.Slots[name] != nil {
			s.Goal.Slots[name] = e.goal.Slots[name]
			s.LastGood[name] = e.Record
		}
	}
	return s, err
}

// entry is a stored goal state that may be used.
type entry struct {
	Record
	goal *goalstate.GoalState
}

// compare orders records by their age. Two that were made at the same moment, which slots side by side may do, have the same number.
func compare(a, b Record) int {
	return cmp.Or(cmp.Compare(a.Number, b.Number), a.Time.Compare(b.Time), cmp.Compare(a.Slot, b.Slot))
}

// read reads all of the store. What is refused is no error: it is as if it were not there, but for what is said about it.
func read(root *file.Root) (stored map[string]entry, refused map[string]error) {
	stored, refused = map[string]entry{}, map[string]error{}
	entries, err := root.ReadDir(Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return stored, refused
	}
	if err == nil {
		err = trusted(root, root.Stat, Dir)
	}
	if err != nil {
		refused[""] = fmt.Errorf("no last good goal state is used: %w", err)
		return stored, refused
	}
	for _, e := range entries {
		slot := e.Name()
		if !goalstate.ValidSlotName(slot) {
			continue // a temporary file, of a power failure
		}
		if stored[slot], err = readSlot(root, slot); err != nil {
			delete(stored, slot)
			refused[slot] = fmt.Errorf("the last good goal state of slot %s is not used: /%s/%s: %w", slot, Dir, slot, err)
		}
	}
	return stored, refused
}

func readSlot(root *file.Root, slot string) (entry, error) {
	name := path.Join(Dir, slot)
	info, err := root.Lstat(name)
	if err != nil {
		return entry{}, err
	}
	if !info.Mode().IsRegular() {
		return entry{}, errors.New("it is not a regular file")
	}
	if err := trusted(root, root.Lstat, name); err != nil {
		return entry{}, err
	}
	data, err := root.Read(name, maxSize)
	if err != nil {
		return entry{}, err
	}
	r, err := Decode(slot, data)
	if err != nil {
		return entry{}, err
	}
	goal, err := goalstate.Parse(r.Sources)
	if err != nil {
		return entry{}, fmt.Errorf("this version of berth does not take it: %w", err)
	}
	if goal.Slots[slot] == nil {
		return entry{}, errors.New("the slot is not in it")
	}
	return entry{r, goal}, nil
}

// trusted refuses what others than the owner of the root folder, root that is, could have put there.
func trusted(root *file.Root, look func(string) (fs.FileInfo, error), name string) error {
	top, err := root.Stat(".")
	if err != nil {
		return err
	}
	info, err := look(name)
	if err != nil {
		return err
	}
	if owner, want := info.Sys().(*syscall.Stat_t).Uid, top.Sys().(*syscall.Stat_t).Uid; owner != want {
		return fmt.Errorf("/%s belongs to user %d: want %d", name, owner, want)
	}
	if info.Mode()&0o002 != 0 {
		return fmt.Errorf("/%s may be written by every user: want mode 0700 of the folder, 0600 of a file", name)
	}
	return nil
}

// Digest tells the goal state of a slot from others.
func (s State) Digest(slot string) string { return Digest(s.sources(slot)) }

// sources are the files of the goal state that a slot goes by.
func (s State) sources(slot string) []goalstate.Source {
	if r, ok := s.LastGood[slot]; ok {
		return r.Sources
	}
	return s.Files
}

// Notice says which slots go on with their last good goal state, in one line; empty: none does.
func (s State) Notice() string {
	var slots []string
	for _, name := range slices.Sorted(maps.Keys(s.LastGood)) {
		slots = append(slots, fmt.Sprintf("%s (recorded %s)", name, s.LastGood[name].Time.Format(time.RFC3339)))
	}
	if slots == nil {
		return ""
	}
	return "the goal state is broken, and these slots go on with their last good one: " + strings.Join(slots, ", ")
}

// Refusals are all of Refused, by the slots' names.
func (s State) Refusals() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.Refused)) {
		errs = append(errs, s.Refused[name])
	}
	return errors.Join(errs...)
}

// Stored returns what is in store of each slot, and why what else is there would not be used.
func Stored(root *file.Root) (map[string]Record, map[string]error) {
	stored, refused := read(root)
	records := make(map[string]Record, len(stored))
	for name, e := range stored {
		records[name] = e.Record
	}
	return records, refused
}

// Use notes that a start of the slot begins with this goal state.
func (s State) Use(root *file.Root, slot string) error {
	r := Record{Slot: slot, Sources: s.sources(slot)}
	data, err := r.Encode()
	if err != nil {
		return err
	}
	_, err = root.Write(file.File{Path: path.Join(usedDir, slot), Mode: 0o600, Content: data, Secret: true})
	return err
}

// Used returns the goal state with which the last start of the slot began; only Slot and Sources are set. The error is fs.ErrNotExist
// where it has not been started since the host booted.
func Used(root *file.Root, slot string) (Record, error) {
	data, err := root.Read(path.Join(usedDir, slot), maxSize)
	if err != nil {
		return Record{}, err
	}
	return Decode(slot, data)
}

// Unchanged tells whether the host's goal state still is the one with which the last start of the slot began, byte for byte.
func Unchanged(root *file.Root, slot string) (bool, error) {
	used, err := Used(root, slot)
	return err == nil && Digest(used.Sources) == Digest(goalstate.Files(root)), err
}

// Keep stores the goal state with which the last start of the slot began as its last good one, and removes those of slots that are not
// in it: they would not be used any more.
func Keep(root *file.Root, slot string, now time.Time) error {
	r, err := Used(root, slot)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("the goal state is not recorded: the slot has not been started since the host booted")
	} else if err != nil {
		return err
	}
	goal, err := goalstate.Parse(r.Sources)
	if err != nil || goal.Slots[slot] == nil {
		return fmt.Errorf("the goal state is not valid, or has no slot %s", slot)
	}
	stored, refused := read(root)
	r.Number, r.Time = 1, now.UTC().Truncate(time.Second)
	for _, e := range stored {
		r.Number = max(r.Number, e.Number+1)
	}
	data, err := r.Encode()
	if err != nil {
		return err
	}
	if _, err := root.Write(file.File{Path: Dir, Mode: fs.ModeDir | 0o700}); err != nil {
		return err
	}
	if _, err := root.Write(file.File{Path: path.Join(Dir, slot), Mode: 0o600, Content: data, Secret: true}); err != nil {
		return err
	}
	var errs []error
	for _, name := range slices.Concat(slices.Collect(maps.Keys(stored)), slices.Collect(maps.Keys(refused))) {
		if name != "" && goal.Slots[name] == nil {
			errs = append(errs, root.Remove(path.Join(Dir, name)))
		}
	}
	return errors.Join(errs...)
}
