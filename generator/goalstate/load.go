package goalstate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"berth/generator/file"
)

// searchPath is where a goal state may be, the strongest first, relative to the root directory.
var searchPath = []string{"etc/berth", "run/berth", "usr/lib/berth"}

const (
	mainFile = "goal.toml"
	dropIns  = "goal.toml.d"
	// maxSize bounds what the generator reads: a thousand slots with a dozen keys each are a fifth of it.
	maxSize = 1 << 20
)

// Source is one file of a goal state.
type Source struct {
	Path string // on the host
	Data []byte
}

// Load reads the goal state of the host whose "/" is root: the first main file of /etc/berth, /run/berth and
// /usr/lib/berth, and over it the drop-ins of all three, by the rules of systemd.unit(5): sorted by name, a name in an
// earlier folder hides the same name in a later one, and an empty file or a link to /dev/null hides it altogether.
//
// It returns ErrNone where there is no goal state, and Errors with a Partial goal state where there are mistakes (which
// include files that cannot be read). It never blocks, whatever kind of file it finds.
func Load(root *file.Root) (*GoalState, error) {
	goal, _, err := LoadFiles(root)
	return goal, err
}

// LoadFiles is Load, and also returns the files that were merged, in that order, as far as they could be read.
func LoadFiles(root *file.Root) (*GoalState, []Source, error) {
	files, errs := find(root, searchPath, nil)
	goal, err := parse(files, errs)
	return goal, files, err
}

// Files returns the files that Load would merge, in that order, as far as they can be read, without looking at what is in them.
func Files(root *file.Root) []Source {
	files, _ := find(root, searchPath, nil)
	return files
}

// LoadImage reads the goal state of a host that boots from the image whose "/" is root. It is Load but for /run, which is empty
// when a host boots. The files of add count as if they were in the image already, or as they are instead of those there.
func LoadImage(root *file.Root, add []Source) (*GoalState, error) {
	added := make(map[string][]byte)
	for _, s := range add {
		added[strings.TrimPrefix(s.Path, "/")] = s.Data
	}
	files, errs := find(root, slices.DeleteFunc(slices.Clone(searchPath), func(dir string) bool {
		return strings.HasPrefix(dir, "run/")
	}), added)
	return parse(files, errs)
}

// find returns the files that make up the goal state, in the order in which they are merged. Those of added, by their path relative
// to root, are there whether or not they are.
func find(root *file.Root, searchPath []string, added map[string][]byte) (files []Source, errs Errors) {
	read := func(name string) {
		data, isAdded := added[name]
		hidden, err := empty(data), (*Error)(nil)
		if !isAdded {
			data, hidden, err = readSource(root, name)
		} else if len(data) > maxSize {
			err = tooLarge("/" + name)
		}
		switch {
		case err != nil:
			errs = append(errs, err)
		case !hidden:
			files = append(files, Source{Path: "/" + name, Data: data})
		}
	}

	for _, dir := range searchPath {
		name := path.Join(dir, mainFile)
		// A link that leads nowhere is there, too. Anything but "not there" is reported by the read.
		_, isAdded := added[name]
		if _, err := root.Lstat(name); isAdded || !errors.Is(err, fs.ErrNotExist) {
			read(name)
			break
		}
	}

	dropIn := map[string]string{}
	for _, dir := range searchPath {
		dir = path.Join(dir, dropIns)
		names, err := list(root, dir)
		if err != nil {
			errs = append(errs, err)
		}
		for name := range added {
			if path.Dir(name) == dir {
				names = append(names, path.Base(name))
			}
		}
		for _, name := range names {
			if strings.HasSuffix(name, ".toml") && !strings.HasPrefix(name, ".") && dropIn[name] == "" {
				dropIn[name] = path.Join(dir, name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(dropIn)) {
		read(dropIn[name])
	}
	return files, errs
}

// list returns what a folder of drop-ins holds. A folder that is not there is empty.
func list(root *file.Root, name string) ([]string, *Error) {
	entries, err := root.ReadDir(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, unix.ENOTDIR):
		return nil, &Error{File: "/" + name, Problem: "is not a folder", Cure: "want a folder of *.toml files"}
	case err != nil:
		return nil, unreadable("/"+name, err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// readSource reads one file. Hidden says that it is empty or a link to /dev/null, which stands for "not there".
func readSource(root *file.Root, name string) (data []byte, hidden bool, e *Error) {
	if hasControl(name) || !utf8.ValidString(name) {
		// The generated units name their source, and a unit file has no way to write such a name.
		return nil, false, &Error{File: "/" + name, Problem: "has a name with a control character or not in UTF-8",
			Cure: "want another name"}
	}
	f, err := root.Open(name)
	var refused *file.RefusedError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		target, _ := root.Readlink(name) // of what is no link, and vanished just now: none
		if path.Join("/", path.Dir(name), target) == "/dev/null" || path.Clean(target) == "/dev/null" {
			return nil, true, nil // an image being built has no /dev/null of its own
		}
		return nil, false, &Error{File: "/" + name, Problem: fmt.Sprintf("is a link to %q, which does not exist", target),
			Cure: "want a file, or a link to /dev/null to hide it"}
	case errors.As(err, &refused):
		if isNull(root, name) {
			return nil, true, nil
		}
		return nil, false, &Error{File: "/" + name, Problem: refused.Is, Cure: refused.Want}
	case err != nil:
		return nil, false, unreadable("/"+name, err)
	}
	defer f.Close()
	data, e = readAll("/"+name, f)
	return data, e == nil && empty(data), e
}

// Read makes a Source of what r holds; path is for messages. Its error is of type Errors.
func Read(path string, r io.Reader) (Source, error) {
	data, err := readAll(path, r)
	if err != nil {
		return Source{}, Errors{err}
	}
	return Source{path, data}, nil
}

func readAll(path string, r io.Reader) ([]byte, *Error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	switch {
	case err != nil:
		return nil, unreadable(path, err)
	case len(data) > maxSize:
		return nil, tooLarge(path)
	}
	return data, nil
}

func empty(data []byte) bool { return len(bytes.TrimPrefix(data, bom)) == 0 }

func tooLarge(path string) *Error {
	return &Error{File: path, Problem: "is larger than 1 MiB", Cure: "want a goal state"}
}

// isNull says whether name leads to the device that is called /dev/null (null(4)).
func isNull(root *file.Root, name string) bool {
	info, err := root.Stat(name)
	return err == nil && info.Mode().Type() == fs.ModeDevice|fs.ModeCharDevice &&
		info.Sys().(*syscall.Stat_t).Rdev == unix.Mkdev(1, 3)
}

func unreadable(path string, err error) *Error {
	e := &Error{File: path, Problem: "cannot be read: " + err.Error()}
	if errno := unix.Errno(0); errors.As(err, &errno) {
		e.Problem = "cannot be read: " + errno.Error() // without the path, which is not the one on the host
	}
	switch {
	case errors.Is(err, unix.ELOOP):
		e.Cure = "want a link that leads to a file"
	case errors.Is(err, fs.ErrPermission):
		e.Cure = "want a file that root can read"
	default:
		e.Cure = "want a readable file"
	}
	return e
}
