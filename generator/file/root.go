package file

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// parentMode is what folders get that only had to be there for something below them.
const parentMode fs.FileMode = 0o755

// ErrRefused is wrapped by every error (a RefusedError) about something that is there, but is not of a kind that may be
// read or replaced.
var ErrRefused = errors.New("refused")

// RefusedError says why something that is there was refused. It wraps ErrRefused.
type RefusedError struct {
	Path, Root string // as they were given
	Is         string // what is in the way: "is a FIFO"
	Want       string // what would be right: "want a regular file"
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%s: %v: it %s; %s", place(e.Path, e.Root), ErrRefused, e.Is, e.Want)
}

func (e *RefusedError) Unwrap() error { return ErrRefused }

// Root reads and writes beneath one folder that may hold anything, such as the root file system of a machine whose
// root user is not trusted. It behaves as a chroot into that folder would: ".." stops there, an absolute link begins
// there, whoever swaps links and folders meanwhile. Lookups are openat2(2) with RESOLVE_IN_ROOT; on kernels before 5.6,
// and where a seccomp filter hides that call, filepath-securejoin walks the path handle by handle instead.
//
// Paths are slash-separated and clean, with or without a leading slash, without "..", and "." is the folder itself.
// Errors name the path, the root, what is in the way and what may be there.
//
// A Root may be used by many goroutines, and several processes may write the same file: the last one wins, none fails,
// no reader sees a mixture. It needs /proc.
type Root struct {
	dir    *os.File // O_PATH
	called string   // in messages, if not by its path
}

// SetUmask gives the process the umask that systemd gives to services (UMask= of systemd.exec(5)), whoever started it. Every program that
// writes calls it first: a folder then has its mode from the start, and keeps it if the program is killed at once.
func SetUmask() { unix.Umask(0o022) }

// OpenRoot returns a Root for dir, which must be a folder. Links in dir itself belong to the caller and are followed.
func OpenRoot(dir string) (*Root, error) {
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return &Root{dir: f}, nil
}

// Call makes messages call the root by another name than its path, such as that of the machine whose root it is.
func (r *Root) Call(name string) { r.called = name }

// Close gives up the handle; what Open and Handle returned stays open.
func (r *Root) Close() error { return r.dir.Close() }

// Name returns the folder as it was given to OpenRoot.
func (r *Root) Name() string { return r.dir.Name() }

// Write makes f exist exactly as described, and says whether anything had to change: what already has the right kind,
// mode, owner and content is left alone, inode and all. Folders above f are made as 0755 where they are missing.
//
// A regular file or a symbolic link is replaced by rename(2), after fsync(2), so that at any moment, and after a crash,
// the path shows either the old or the new. The last element of the path is never followed: a link there is itself
// replaced. Anything else in its place (a folder, device, FIFO or socket) is refused. A folder that is there already
// only gets its mode set; there a link to a folder counts as the folder, as /var/lib/kubelet often is one.
//
// Modes are exact whatever the umask; no file has a name before it has its mode and content. A kill in the short moment in which the
// new has a name beside the old leaves a temporary name, which the next Write or Remove of f.Path removes.
func (r *Root) Write(f File) (changed bool, err error) {
	changed, dir, err := r.write(f, nil)
	dir.close()
	return changed, err
}

// WriteAll writes files in the order given and returns the paths of those that had to change. An error does not keep
// the other files from being written: the errors are joined.
func (r *Root) WriteAll(files []File) (changed []string, err error) {
	var dir *folder // that of the file before, as neighbours mostly share one
	var errs []error
	for _, f := range files {
		var did bool
		did, dir, err = r.write(f, dir)
		if err != nil {
			errs = append(errs, err)
		} else if did {
			changed = append(changed, f.Path)
		}
	}
	dir.close()
	return changed, errors.Join(errs...)
}

// Fill is WriteAll for a folder that was empty, and that does not outlive the system, as a generator's output folder: nothing is put to
// a disk. New files are whole when they appear (O_TMPFILE of open(2)), by a few calls of the kernel each; what is there already is
// replaced as by WriteAll.
func (r *Root) Fill(files []File) error {
	var errs []error
	top := int(r.dir.Fd())
	dir, above := top, "." // the folder of the file before, as neighbours mostly share one; -1: only Write gets there
	leave := func() {
		if dir != top && dir != -1 {
			unix.Close(dir)
		}
	}
	for _, f := range files {
		made := false
		if p, err := clean(f.Path); err == nil && check(f, p) == nil && !f.Mode.IsDir() {
			if path.Dir(p) != above {
				leave()
				above = path.Dir(p)
				dir = fillDir(top, above)
			}
			made = dir != -1 && create(dir, path.Base(p), f) == nil
		}
		if !made { // Write can do it, or has a better way to say why not
			if _, err := r.Write(f); err != nil {
				errs = append(errs, err)
			}
		}
	}
	leave()
	return errors.Join(errs...)
}

// fillDir opens a folder in the folder top, made if need be; -1: it cannot, or it would be deeper than that.
func fillDir(top int, name string) int {
	switch {
	case name == ".":
		return top
	case strings.Contains(name, "/"):
		return -1
	}
	err := unix.Mkdirat(top, name, uint32(parentMode))
	if err == nil {
		err = unix.Fchmodat(top, name, uint32(parentMode), 0) // whatever the umask
	}
	if err != nil && err != unix.EEXIST {
		return -1
	}
	dir, err := unix.Openat(top, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return dir
}

// create makes a file or link that must not be there yet.
func create(dir int, base string, f File) error {
	if f.Mode.Type() == fs.ModeSymlink {
		return unix.Symlinkat(string(f.Content), dir, base)
	}
	return unnamed(dir, f, false, func(link func(string) error) error { return link(base) })
}

// Remove removes the file, link or empty folder at name, never what a link points at. Nothing there is no error.
func (r *Root) Remove(name string) error {
	dir, base, err := r.parent(name)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil
	} else if err != nil {
		return r.wrap(name, err)
	}
	defer dir.Close()
	(&folder{dir: dir}).sweep(base)
	err = unix.Unlinkat(int(dir.Fd()), base, 0)
	if err == unix.EISDIR {
		err = unix.Unlinkat(int(dir.Fd()), base, unix.AT_REMOVEDIR)
	}
	switch err {
	case nil, unix.ENOENT, unix.ENOTDIR: // the parent is not a folder
		return nil
	case unix.ENOTEMPTY:
		return r.refuse(name, "is a folder that is not empty", "remove what is in it first")
	}
	return r.wrap(name, err)
}

// SetTime sets the times of last access and change of content of what is at name. A link there is itself meant.
func (r *Root) SetTime(name string, t time.Time) error {
	times := []unix.Timespec{unix.NsecToTimespec(t.UnixNano()), unix.NsecToTimespec(t.UnixNano())}
	if p, err := clean(name); err == nil && p == "." {
		return r.wrap(name, unix.UtimesNanoAt(unix.AT_FDCWD, procPath(r.dir), times, 0))
	}
	dir, base, err := r.parent(name)
	if err != nil {
		return r.wrap(name, err)
	}
	defer dir.Close()
	return r.wrap(name, unix.UtimesNanoAt(int(dir.Fd()), base, times, unix.AT_SYMLINK_NOFOLLOW))
}

// Handle returns an O_PATH handle for whatever name leads to, with links followed inside the root. /proc/self/fd/N of
// it is how to connect(2) to a socket beneath the root.
func (r *Root) Handle(name string) (*os.File, error) {
	f, err := r.lookup(name)
	return f, r.wrap(name, err)
}

// Sub returns a Root for the folder that name leads to, with links followed inside this root.
func (r *Root) Sub(name string) (*Root, error) {
	dir, err := r.openDir(name)
	if err != nil {
		return nil, err
	}
	return &Root{dir: dir}, nil
}

// Resolve returns the path of what name leads to, absolute as seen from the root, with no link in it. It holds as long as
// nobody changes the folders above, so it is for messages and for roots that are trusted.
func (r *Root) Resolve(name string) (string, error) {
	h, err := r.Handle(name)
	if err != nil {
		return "", err
	}
	defer h.Close()
	full, err := os.Readlink(procPath(h))
	if err != nil {
		return "", r.wrap(name, err)
	}
	top, err := os.Readlink(procPath(r.dir))
	if err != nil {
		return "", r.wrap(name, err)
	}
	return path.Join("/", strings.TrimPrefix(full, top)), nil
}

// Open opens the regular file that name leads to for reading, with links followed inside the root. It never blocks, and
// never so much as opens a device or FIFO.
func (r *Root) Open(name string) (*os.File, error) {
	h, err := r.Handle(name)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return nil, r.wrap(name, err)
	}
	if !info.Mode().IsRegular() {
		return nil, r.refuse(name, "is "+kind(info), "want a regular file")
	}
	f, err := reopen(h)
	return f, r.wrap(name, err)
}

// Read returns the content of the regular file that name leads to; more than limit bytes is an error.
func (r *Root) Read(name string, limit int64) ([]byte, error) {
	f, err := r.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, r.wrap(name, err)
	}
	if int64(len(b)) > limit {
		return nil, r.refuse(name, fmt.Sprintf("is larger than %d bytes", limit), "want a smaller file")
	}
	return b, nil
}

// Text is Read for where a file that cannot be read is as good as an empty one.
func (r *Root) Text(name string, limit int64) string {
	b, _ := r.Read(name, limit)
	return string(b)
}

// Exists tells whether name leads to something. What cannot be looked at does not exist.
func (r *Root) Exists(name string) bool {
	_, err := r.Stat(name)
	return err == nil
}

// IsDir tells whether name leads to a folder.
func (r *Root) IsDir(name string) bool {
	info, err := r.Stat(name)
	return err == nil && info.IsDir()
}

// IsProgram tells whether name leads to a regular file that somebody may execute.
func (r *Root) IsProgram(name string) bool {
	info, err := r.Stat(name)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// ReadDir returns the entries of the folder that name leads to, sorted by name.
func (r *Root) ReadDir(name string) ([]fs.DirEntry, error) {
	d, err := r.reopenDir(name)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return nil, r.wrap(name, err)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	for i, e := range entries {
		entries[i] = entry{e, r, path.Join(name, e.Name())}
	}
	return entries, nil
}

// Links returns the symbolic links in the folder that name leads to: their targets, as they stand there, by their names. It
// is much faster than Readlink for each of ReadDir's entries.
func (r *Root) Links(name string) (map[string]string, error) {
	d, err := r.reopenDir(name)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return nil, r.wrap(name, err)
	}
	links := map[string]string{}
	b := make([]byte, unix.PathMax)
	for _, e := range entries {
		if e.Type() != fs.ModeSymlink {
			continue
		}
		n, err := unix.Readlinkat(int(d.Fd()), e.Name(), b)
		if err == unix.ENOENT || err == unix.EINVAL { // it has just gone, or is no link any more
			continue
		}
		if err != nil {
			return nil, r.wrap(path.Join(name, e.Name()), err)
		}
		links[e.Name()] = string(b[:n])
	}
	return links, nil
}

// reopenDir opens the folder that name leads to for reading.
func (r *Root) reopenDir(name string) (*os.File, error) {
	h, err := r.Handle(name)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	// Opening "self/." of what is no folder fails before it could have an effect on a device.
	fd, err := unix.Open(procPath(h)+"/.", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, r.wrap(name, err)
	}
	return os.NewFile(uintptr(fd), h.Name()), nil
}

// Names returns the names in the folder that name leads to, in no order.
func (r *Root) Names(name string) ([]string, error) {
	d, err := r.reopenDir(name)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	return names, r.wrap(name, err)
}

// entry replaces os's Info, which would go by the path of a handle that is closed by then.
type entry struct {
	fs.DirEntry
	root *Root
	path string
}

func (e entry) Info() (fs.FileInfo, error) { return e.root.Lstat(e.path) }

// Stat describes what name leads to, with links followed inside the root.
func (r *Root) Stat(name string) (fs.FileInfo, error) {
	h, err := r.Handle(name)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	return h.Stat()
}

// Lstat is Stat, but describes a link at name instead of what it leads to.
func (r *Root) Lstat(name string) (fs.FileInfo, error) {
	if p, err := clean(name); err != nil || p == "." {
		return r.Stat(name)
	}
	dir, base, err := r.parent(name)
	if err != nil {
		return nil, r.wrap(name, err)
	}
	defer dir.Close()
	h, info, err := look(dir, base)
	h.Close()
	return info, r.wrap(name, err)
}

// Readlink returns the target of the symbolic link at name, as it stands there.
func (r *Root) Readlink(name string) (string, error) {
	dir, base, err := r.parent(name)
	if err != nil {
		return "", r.wrap(name, err)
	}
	defer dir.Close()
	h, info, err := look(dir, base)
	if err != nil {
		return "", r.wrap(name, err)
	}
	defer h.Close()
	if info.Mode().Type() != fs.ModeSymlink {
		return "", r.refuse(name, "is "+kind(info), "want a symbolic link")
	}
	target, err := readlink(h)
	return target, r.wrap(name, err)
}

// folder is an opened folder that is being written to.
type folder struct {
	path string
	dir  *os.File // O_PATH
	root *os.Root // the same folder, for renameio; nil until that must write something
}

func (d *folder) close() {
	if d == nil {
		return
	}
	d.dir.Close()
	if d.root != nil {
		d.root.Close()
	}
}

// write is Write. It takes the folder of a write just before, or nil, and returns the one it used, to be handed to the
// next write or closed.
func (r *Root) write(f File, d *folder) (bool, *folder, error) {
	p, err := clean(f.Path)
	if err == nil {
		err = check(f, p)
	}
	if err != nil {
		return false, d, r.wrap(f.Path, err)
	}
	if d == nil || d.path != path.Dir(p) {
		d.close()
		dir, err := r.mkdirAll(path.Dir(p))
		if err != nil {
			return false, nil, fmt.Errorf("cannot write %s: %w", p, err)
		}
		d = &folder{path: path.Dir(p), dir: dir}
	}
	var changed bool
	if f.Mode.IsDir() {
		changed, err = r.writeDir(d, p, f.Mode.Perm())
	} else {
		changed, err = r.replace(d, p, f)
	}
	return changed, d, err
}

// check refuses what no plan of ours should hold.
func check(f File, p string) error {
	switch mode := f.Mode &^ fs.ModePerm; {
	case p == ".":
		return fmt.Errorf("is the root itself: want a path beneath it")
	case mode != 0 && mode != fs.ModeDir && mode != fs.ModeSymlink:
		return fmt.Errorf("mode %v: want permission bits, with ModeDir or ModeSymlink at most", f.Mode)
	case mode == fs.ModeSymlink && (len(f.Content) == 0 || bytes.IndexByte(f.Content, 0) >= 0):
		return fmt.Errorf("link target %q: want a path", f.Content)
	case mode == fs.ModeDir && len(f.Content) > 0:
		return fmt.Errorf("is a folder with content: want none")
	}
	return nil
}

// replace puts a regular file or a link at p, whose last element is looked up in d.
func (r *Root) replace(d *folder, p string, f File) (bool, error) {
	base := path.Base(p)
	h, info, err := look(d.dir, base)
	if err == nil {
		defer h.Close()
		switch info.Mode().Type() {
		case 0, fs.ModeSymlink:
		default:
			return false, r.refuse(p, "is "+kind(info), "want a regular file, a symbolic link, or nothing in this place")
		}
		if same(h, info, f) {
			d.sweep(base)
			return false, nil
		}
	} else if !errors.Is(err, unix.ENOENT) {
		return false, r.wrap(p, err)
	}
	err = d.put(f, base)
	return err == nil, r.wrap(p, err)
}

// same says whether what h refers to is f already. Whatever cannot be read is not the same.
func same(h *os.File, info fs.FileInfo, f File) bool {
	if info.Mode().Type() != f.Mode.Type() || info.Size() != int64(len(f.Content)) || !ours(info) {
		return false
	}
	if f.Mode.Type() == fs.ModeSymlink {
		target, err := readlink(h)
		return err == nil && target == string(f.Content)
	}
	if info.Mode() != f.Mode {
		return false
	}
	old, err := reopen(h)
	if err != nil {
		return false
	}
	defer old.Close()
	b, err := io.ReadAll(io.LimitReader(old, info.Size()+1))
	return err == nil && bytes.Equal(b, f.Content)
}

// ours says whether the file belongs to the user that we run as. The owner can change a file, and read it whatever its
// mode is, so a secret that was handed to another user is not what was asked for.
func ours(info fs.FileInfo) bool { return int(info.Sys().(*syscall.Stat_t).Uid) == os.Geteuid() }

// put makes f exist in the folder, a regular file or a link, in place of a regular file or a link, if there is one.
func (d *folder) put(f File, base string) error {
	var err error
	// Another writer of the same file can take the temporary name away, but not all the time.
	for range 100 {
		if f.Mode.Type() == fs.ModeSymlink {
			err = d.install(base, func(name string) error { return unix.Symlinkat(string(f.Content), int(d.dir.Fd()), name) })
		} else {
			err = d.putFile(f, base)
		}
		if !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return err
}

func (d *folder) putFile(f File, base string) error {
	err := unnamed(int(d.dir.Fd()), f, true, func(link func(string) error) error { return d.install(base, link) })
	if err == unix.EOPNOTSUPP {
		return d.putNamedFile(f, base)
	}
	return err
}

// unnamed writes the content into a file without a name in the folder dir, which is gone if this process is (O_TMPFILE of open(2)).
// named is called when all is done, and on the disk if it is to be durable: link, given a name in dir, makes it appear there, at once with
// the right mode and content.
func unnamed(dir int, f File, durable bool, named func(link func(name string) error) error) error {
	fd, err := unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fchmod(fd, uint32(f.Mode.Perm())); err != nil {
		return err
	}
	for rest := f.Content; len(rest) > 0; {
		n, err := unix.Write(fd, rest)
		if err != nil && err != unix.EINTR {
			return err
		}
		rest = rest[max(n, 0):]
	}
	if durable {
		if err := unix.Fsync(fd); err != nil {
			return err
		}
	}
	return named(func(name string) error {
		// AT_EMPTY_PATH instead would need a capability.
		return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), dir, name, unix.AT_SYMLINK_FOLLOW)
	})
}

// install has link, which makes a name for something that is ready, make the name base. Only where there is something to replace,
// the new has another name first, for no longer than two system calls take. It is always the same: whoever writes, checks or
// removes base next removes what a kill has left in between. ENOENT tells that somebody has done so too early.
func (d *folder) install(base string, link func(name string) error) error {
	err := link(base)
	if err != unix.EEXIST {
		return err
	}
	fd, tmp := int(d.dir.Fd()), temporary(base)
	if err = link(tmp); err == unix.EEXIST {
		d.sweep(base)
		err = link(tmp)
	}
	if err != nil {
		return err
	}
	if err = unix.Renameat(fd, tmp, fd, base); err != nil {
		d.sweep(base)
	}
	return err
}

// temporary is the name that something has on its way to base. Nobody takes it for a unit, a drop-in or a part of a
// configuration: it begins with a dot and has an ending of its own.
func temporary(base string) string { return "." + base + ".berth" }

// sweep removes what a kill has left of a write of base. That it cannot, as where nothing can be written, does no harm.
func (d *folder) sweep(base string) { _ = unix.Unlinkat(int(d.dir.Fd()), temporary(base), 0) }

// putNamedFile is putFile for file systems that have no files without a name, as NFS, and overlayfs of older kernels.
// Its temporary file has a name all the time, and a lock by which the next writer of the same file knows that it is still being
// written. renameio makes it and renames it.
func (d *folder) putNamedFile(f File, base string) (err error) {
	if d.root == nil {
		if d.root, err = os.OpenRoot(procPath(d.dir)); err != nil {
			return err
		}
	}
	d.sweep(base) // a link
	if err := d.sweepNamed(base); err != nil {
		return err
	}
	t, err := renameio.NewPendingFile(base, renameio.WithRoot(d.root), renameio.WithStaticPermissions(f.Mode.Perm()))
	if err != nil {
		return err
	}
	defer t.Cleanup()
	// Where there are no locks either, a kill leaves the file for good.
	_ = unix.Flock(int(t.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if _, err := t.Write(f.Content); err != nil {
		return err
	}
	return t.CloseAtomicallyReplace()
}

// sweepNamed removes what killed writers of base have left: regular files with a name of renameio's that nobody has locked.
func (d *folder) sweepNamed(base string) error {
	list, err := d.root.Open(".")
	if err != nil {
		return err
	}
	defer list.Close()
	entries, err := list.ReadDir(-1)
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "."+base)
		if _, err := strconv.ParseUint(number, 10, 64); !ok || err != nil || !e.Type().IsRegular() {
			continue
		}
		h, _, err := look(d.dir, e.Name())
		if err != nil {
			continue
		}
		if f, err := reopen(h); err == nil {
			if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
				_ = unix.Unlinkat(int(d.dir.Fd()), e.Name(), 0)
			}
			f.Close()
		}
		h.Close()
	}
	return err
}

func (r *Root) writeDir(d *folder, p string, mode fs.FileMode) (bool, error) {
	h, err := r.openDir(p)
	if errors.Is(err, unix.ENOENT) {
		if h, err = mkdir(d.dir, path.Base(p), mode); err == nil {
			return true, h.Close()
		}
		if !errors.Is(err, unix.EEXIST) {
			return false, r.wrap(p, err)
		}
		h, err = r.openDir(p)
	}
	if err != nil {
		return false, err
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil || info.Mode() == fs.ModeDir|mode {
		return false, r.wrap(p, err)
	}
	err = os.Chmod(procPath(h), mode)
	return err == nil, r.wrap(p, err)
}

// mkdirAll opens the folder p and makes it and those above it as far as they are missing. It is not securejoin's
// MkdirAllHandle because that obeys the umask, and does not tell which folders are new.
func (r *Root) mkdirAll(p string) (*os.File, error) {
	dir, err := r.openDir(p)
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		return dir, err
	}
	above, err := r.mkdirAll(path.Dir(p))
	if err != nil {
		return nil, err
	}
	defer above.Close()
	dir, err = mkdir(above, path.Base(p), parentMode)
	if errors.Is(err, unix.EEXIST) {
		return r.openDir(p)
	}
	return dir, r.wrap(p, err)
}

// openDir opens the folder that p leads to.
func (r *Root) openDir(p string) (*os.File, error) {
	h, err := r.lookup(p)
	if errors.Is(err, unix.ENOENT) {
		if info, lerr := r.Lstat(p); lerr == nil && info.Mode().Type() == fs.ModeSymlink {
			target, _ := r.Readlink(p)
			return nil, r.refuse(p, fmt.Sprintf("is a link to %q, which is not there", target), "want a folder or a link to one")
		}
	}
	if err != nil {
		return nil, r.wrap(p, err)
	}
	info, err := h.Stat()
	if err == nil && !info.IsDir() {
		err = r.refuse(p, "is "+kind(info), "want a folder")
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// mkdir makes a folder and opens it as O_PATH. Where the umask or an access control list takes something from the mode, the
// folder is without it for a moment.
func mkdir(dir *os.File, base string, mode fs.FileMode) (*os.File, error) {
	if err := unix.Mkdirat(int(dir.Fd()), base, uint32(mode.Perm())); err != nil {
		return nil, err
	}
	h, info, err := look(dir, base)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() { // somebody was faster
		err = unix.ENOTDIR
	} else if info.Mode().Perm() != mode {
		err = os.Chmod(procPath(h), mode)
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// lookup opens what name leads to as O_PATH. Securejoin's OpenatInRoot makes the same call, but then asks /proc for the
// name of what it got, which takes four times as long; so it only gets what a first try leaves open: retries while the
// tree is being changed (EAGAIN), and kernels without the call.
func (r *Root) lookup(name string) (*os.File, error) {
	p, err := clean(name)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Openat2(int(r.dir.Fd()), p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch err {
	case nil:
		return os.NewFile(uintptr(fd), path.Join(r.Name(), p)), nil
	case unix.ENOENT:
		return nil, err
	}
	return pathrs.OpenatInRoot(r.dir, p)
}

// parent opens the folder that holds the last element of name.
func (r *Root) parent(name string) (dir *os.File, base string, err error) {
	p, err := clean(name)
	if err != nil {
		return nil, "", err
	}
	if p == "." {
		return nil, "", errors.New("is the root itself: want a path beneath it")
	}
	dir, err = r.lookup(path.Dir(p))
	return dir, path.Base(p), err
}

func clean(name string) (string, error) {
	p := cmp.Or(strings.TrimPrefix(name, "/"), ".")
	if name == "" || !fs.ValidPath(p) || strings.IndexByte(p, 0) >= 0 {
		return "", errors.New("want a clean path, without \"..\"")
	}
	return p, nil
}

// look opens base in dir as O_PATH, which has no effect on a device or FIFO and does not follow a link.
func look(dir *os.File, base string) (*os.File, fs.FileInfo, error) {
	fd, err := unix.Openat(int(dir.Fd()), base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	h := os.NewFile(uintptr(fd), base)
	info, err := h.Stat()
	if err != nil {
		h.Close()
		return nil, nil, err
	}
	return h, info, nil
}

// reopen opens an O_PATH handle for reading. O_NONBLOCK is for leases (fcntl(2)): a process in the machine could hold one
// and make open wait for up to /proc/sys/fs/lease-break-time.
func reopen(h *os.File) (*os.File, error) {
	fd, err := unix.Open(procPath(h), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), h.Name()), nil
}

func readlink(h *os.File) (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(h.Fd()), "", b)
	return string(b[:max(n, 0)]), err
}

func procPath(h *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(h.Fd())) }

func kind(info fs.FileInfo) string {
	switch info.Mode().Type() {
	case 0:
		return "a regular file"
	case fs.ModeDir:
		return "a folder"
	case fs.ModeSymlink:
		return "a symbolic link"
	case fs.ModeNamedPipe:
		return "a FIFO"
	case fs.ModeSocket:
		return "a socket"
	}
	return "a device"
}

func (r *Root) refuse(name, is, want string) error {
	return &RefusedError{Path: name, Root: r.shown(), Is: is, Want: want}
}

// shown is what messages call the root.
func (r *Root) shown() string { return cmp.Or(r.called, r.Name()) }

// place tells where something is, in a message.
func place(name, root string) string {
	if root == "/" {
		return strconv.Quote(path.Join("/", name))
	}
	return fmt.Sprintf("%q beneath %s", name, root)
}

func (r *Root) wrap(name string, err error) error {
	if err == nil {
		return nil
	}
	// The libraries' PathErrors would repeat the path, as a temporary name or as it looks from outside.
	for perr := (*fs.PathError)(nil); errors.As(err, &perr); {
		err = perr.Err
	}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		err = fmt.Errorf("%w: make room there (see: df, df --inodes)", err)
	case errors.Is(err, unix.EROFS):
		err = fmt.Errorf("%w: mount it so that it can be written to", err)
	}
	return fmt.Errorf("%s: %w", place(name, r.shown()), err)
}
