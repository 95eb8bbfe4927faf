// Package file is the one form in which berth's pure functions hand over what is to be written: planning a host's
// units and rendering a slot's configuration both return a list of File, and only then does anything touch a disk.
package file

import (
	"io/fs"
	"slices"
	"strings"
)

// File is one file, symbolic link or folder that berth wants to exist below some root.
type File struct {
	// Path is relative to the root that the File is meant for, clean, with forward slashes and without a leading one.
	Path string
	// Mode holds the permission bits, and fs.ModeSymlink or fs.ModeDir for what is not a regular file.
	Mode fs.FileMode
	// Content is a regular file's bytes or a symbolic link's target; empty for a folder.
	Content []byte
	// Secret says that Content must be shown to nobody who could not read the file itself.
	Secret bool
}

// Sort orders files by path, so that the same plan is the same list whatever made it.
func Sort(files []File) {
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
}
