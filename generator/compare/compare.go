// Package compare tells what is on a host from what berth would write there. It reads, and changes nothing.
package compare

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/needs"
	"berth/helpers/render"
	"berth/helpers/render/parts"
)

// State is how a file on the host is to what would be written.
type State string

// The states of a Change.
const (
	Missing  State = "missing"  // it is not there
	Differs  State = "differs"  // it is there, and is not the same
	LeftOver State = "leftover" // it is there, and would be removed
)

// Change is a file that is not on the host as berth would write it.
type Change struct {
	Path  string // on the host
	Step  string // that writes it
	State State
	// Old is what is on the host, nil if nothing is; New is what would be written, nil if nothing would. Old has no content where it is
	// no regular file or link, or is too large.
	Old, New *file.File
	// Owner is the user ID that Old belongs to, where this is not that of the host's root folder; else -1.
	Owner int
	// Unknown says that New's content is not known, and was not compared.
	Unknown bool
	Need    needs.Need
}

// Secret tells whether the content of either side must not be shown: because of what would be written, or as the one on the host is
// closed to other users. What would be removed may hold a secret of an earlier goal state, and is not shown either.
func (c Change) Secret() bool {
	return c.New == nil || c.New.Secret || c.Old != nil && c.Old.Mode.IsRegular() && c.Old.Mode.Perm()&0o004 == 0
}

// limit is more than any file that berth writes.
const limit = 1 << 20

// Part returns the changes of a part of a slot, in the order of its files, those to be removed last. The errors, joined, are those of
// files that could not be looked at; they keep no other from being compared.
func Part(host *file.Root, part parts.Part, running bool) ([]Change, error) {
	base, err := host.Sub(part.Base)
	if errors.Is(err, fs.ErrNotExist) {
		base, err = nil, nil // the generator has never run
	}
	if err != nil {
		return nil, err
	}
	if base != nil {
		defer base.Close()
	}
	top, err := host.Stat(".")
	if err != nil {
		return nil, err
	}
	c := comparison{base: base, owner: owner(top)}
	var changes []Change
	var errs []error
	add := func(change Change, name string, err error) {
		if err != nil {
			errs = append(errs, err)
			return
		}
		if change.State == "" {
			return
		}
		change.Path, change.Step = part.Path(name), part.Step()
		change.Need = needs.Of(part.Name, name, change.Old, change.New, running)
		changes = append(changes, change)
	}
	for _, f := range part.Output.Files {
		change, err := c.file(f, part.NoToken && f.Path == render.Bootstrap)
		add(change, f.Path, err)
	}
	for _, name := range part.Output.Remove {
		old, _, err := c.read(file.File{Path: name}, true)
		change := Change{Old: old, Owner: -1}
		if old != nil {
			change.State = LeftOver
		}
		add(change, name, err)
	}
	return changes, errors.Join(errs...)
}

type comparison struct {
	base  *file.Root // nil: not there
	owner int        // of what is as it should be
}

func (c comparison) file(f file.File, unknown bool) (Change, error) {
	change := Change{New: &f, Owner: -1, Unknown: unknown}
	old, uid, err := c.read(f, unknown)
	if err != nil {
		return change, err
	}
	if change.Old = old; old == nil {
		change.State = Missing
		return change, nil
	}
	if uid != c.owner && !f.Mode.IsDir() { // as file.Root writes it
		change.Owner = uid
	}
	if old.Mode != f.Mode && f.Mode.Type() != fs.ModeSymlink || old.Mode.Type() != f.Mode.Type() || change.Owner != -1 ||
		!unknown && !bytes.Equal(old.Content, f.Content) {
		change.State = Differs
	}
	return change, nil
}

// read returns what is in the place of f, and its owner; nil: nothing is.
func (c comparison) read(f file.File, noContent bool) (*file.File, int, error) {
	if c.base == nil {
		return nil, 0, nil
	}
	look := c.base.Lstat
	if f.Mode.IsDir() {
		look = c.base.Stat // a link to a folder counts as the folder, as for file.Root
	}
	info, err := look(f.Path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	old := &file.File{Path: f.Path, Mode: info.Mode()}
	switch {
	case noContent:
	case info.Mode().IsRegular() && info.Size() <= limit:
		old.Content, err = c.base.Read(f.Path, limit)
	case info.Mode().Type() == fs.ModeSymlink:
		var target string
		target, err = c.base.Readlink(f.Path)
		old.Content = []byte(target)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("cannot be compared: %w", err)
	}
	return old, owner(info), nil
}

func owner(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }
