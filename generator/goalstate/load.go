package goalstate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
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

// Load reads the goal state of the host whose "/" is the directory root: the first main file of /etc/berth, /run/berth
// and /usr/lib/berth, and over it the drop-ins of all three, by the rules of systemd.unit(5): sorted by name, a name in
// an earlier folder hides the same name in a later one, and an empty file or a link to /dev/null hides it altogether.
// Absolute links resolve inside root.
//
// It returns ErrNone where there is no goal state, Errors with a Partial goal state where there are mistakes (which
// include files that cannot be read), and another error where root itself cannot be opened. It never blocks, whatever
// kind of file it finds.
func Load(root string) (*GoalState, error) {
	dir, err := os.Open(root)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	files, errs := find(dir)
	return parse(files, errs)
}

// find returns the files that make up the goal state, in the order in which they are merged.
func find(root *os.File) (files []Source, errs Errors) {
	read := func(name string) (found bool) {
		data, hidden, err := readSource(root, name)
		switch {
		case err != nil:
			errs = append(errs, err)
		case !hidden:
			files = append(files, Source{Path: "/" + name, Data: data})
		}
		return true
	}

	for _, dir := range searchPath {
		if name := path.Join(dir, mainFile); exists(root, name) {
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

// exists says whether there is something called name, be it a link that leads nowhere.
func exists(root *os.File, name string) bool {
	f, err := openSource(root, name, unix.O_PATH|unix.O_NOFOLLOW)
	if err == nil {
		f.Close()
	}
	// Anything but "not there" is reported by the read that follows.
	return !errors.Is(err, fs.ErrNotExist)
}

// list returns what a folder of drop-ins holds. A folder that is not there is empty.
func list(root *os.File, name string) ([]string, *Error) {
	f, err := openSource(root, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err == nil {
		defer f.Close()
		var names []string
		if names, err = f.Readdirnames(-1); err == nil {
			return names, nil
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, unix.ENOTDIR):
		return nil, &Error{File: "/" + name, Problem: "is not a folder", Cure: "want a folder of *.toml files"}
	}
	return nil, unreadable(name, err)
}

// readSource reads one file. Hidden says that it is empty or a link to /dev/null, which stands for "not there".
func readSource(root *os.File, name string) (data []byte, hidden bool, e *Error) {
	// What it is must be known before it is opened for reading: opening a device may already do something.
	f, err := openSource(root, name, unix.O_PATH)
	if errors.Is(err, fs.ErrNotExist) {
		target := readlink(root, name)
		if path.Join("/", path.Dir(name), target) == "/dev/null" || path.Clean(target) == "/dev/null" {
			return nil, true, nil // an image being built has no /dev/null of its own
		}
		return nil, false, &Error{File: "/" + name, Problem: fmt.Sprintf("is a link to %q, which does not exist", target),
			Cure: "want a file, or a link to /dev/null to hide it"}
	}
	if err != nil {
		return nil, false, unreadable(name, err)
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	f.Close()
	if err != nil {
		return nil, false, unreadable(name, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3) {
		return nil, true, nil
	}
	if kind := kindOfFile(st.Mode); kind != "" {
		return nil, false, &Error{File: "/" + name, Problem: "is " + kind, Cure: "want a regular file"}
	}

	// O_NONBLOCK: should it have become a FIFO since, the open does not wait for a writer.
	if f, err = openSource(root, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY); err == nil {
		defer f.Close()
		data, err = io.ReadAll(io.LimitReader(f, maxSize+1))
	}
	if err != nil {
		return nil, false, unreadable(name, err)
	}
	if len(data) > maxSize {
		return nil, false, &Error{File: "/" + name, Problem: "is larger than 1 MiB", Cure: "want a goal state"}
	}
	return data, len(bytes.TrimPrefix(data, bom)) == 0, nil
}

// openSource is the one place that opens a file of the goal state: beneath root, as a chroot would resolve it.
func openSource(root *os.File, name string, flags uint64) (*os.File, error) {
	for {
		fd, err := unix.Openat2(int(root.Fd()), name, &unix.OpenHow{
			Flags:   flags | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), name), nil
		case unix.EINTR, unix.EAGAIN: // openat2(2): a rename or mount elsewhere raced with the resolution
		default:
			return nil, err
		}
	}
}

// readlink returns what the link called name holds, or nothing.
func readlink(root *os.File, name string) string {
	f, err := openSource(root, name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return ""
	}
	defer f.Close()
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(f.Fd()), "", buf)
	if err != nil {
		return ""
	}
	return string(buf[:n])
}

func kindOfFile(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return ""
	case unix.S_IFDIR:
		return "a folder"
	case unix.S_IFIFO:
		return "a FIFO"
	case unix.S_IFSOCK:
		return "a socket"
	}
	return "a device"
}

func unreadable(name string, err error) *Error {
	e := &Error{File: "/" + name, Problem: "cannot be read: " + err.Error()}
	var errno unix.Errno
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) && errors.As(pe.Err, &errno) {
		e.Problem = "cannot be read: " + errno.Error() // without the path, which may be relative to root
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
