package file

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

const (
	noOpenat2Env = "BERTH_TEST_NO_OPENAT2" // makes the test binary hide openat2 and O_TMPFILE from itself
	writeLoopEnv = "BERTH_TEST_WRITE_LOOP" // makes the test binary write for ever beneath the folder that it names
)

// long is BERTH_LONG=1 in the environment. With it the tests that meet other processes at random moments go on for as long
// as it takes to trust them after a change of this package, and all use the temporary folder of the system, which mostly
// is on a disk: about a minute. Without it they take a few seconds and use a tmpfs, where fsync(2) costs nothing.
var long = os.Getenv("BERTH_LONG") == "1"

// rounds is the number of rounds of such a test.
func rounds(short, many int) int {
	if long {
		return many
	}
	return short
}

// tmpfs is where Linux mostly has one.
const tmpfs = "/dev/shm"

func TestMain(m *testing.M) {
	if os.Getenv(noOpenat2Env) != "" {
		if err := hideOpenat2(); err != nil {
			fmt.Fprintln(os.Stderr, "cannot hide openat2:", err)
			os.Exit(2)
		}
	}
	if dir := os.Getenv(writeLoopEnv); dir != "" {
		writeLoop(dir)
	}
	if !long && unix.Access(tmpfs, unix.W_OK) == nil {
		os.Setenv("TMPDIR", tmpfs)
	}
	os.Exit(m.Run())
}

// hideOpenat2 installs a seccomp filter with which openat2(2) does not exist, as on kernels before 5.6, and no file system has files
// without a name (O_TMPFILE), as NFS.
func hideOpenat2() error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // seccomp_data.nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_OPENAT2, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_OPENAT, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 16 + 2*8}, // seccomp_data.args[2]: the flags
		{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: unix.O_TMPFILE &^ unix.O_DIRECTORY, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EOPNOTSUPP)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// TSYNC also reaches the threads that Go has started already.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog))); errno != 0 {
		return errno
	}
	if _, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH}); err != unix.ENOSYS {
		return fmt.Errorf("openat2 still answers %v", err)
	}
	if _, err := unix.Open(os.TempDir(), unix.O_TMPFILE|unix.O_RDWR, 0o600); err != unix.EOPNOTSUPP {
		return fmt.Errorf("O_TMPFILE still answers %v", err)
	}
	return nil
}

// TestWithoutOpenat2 runs all other tests of this package again where neither openat2 nor O_TMPFILE exists.
func TestWithoutOpenat2(t *testing.T) {
	if os.Getenv(noOpenat2Env) != "" {
		t.Skip("this is that run")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), noOpenat2Env+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// hostile makes a folder with "root", a tree as a hostile machine could leave it, and "outside", which no operation
// beneath root may reach.
func hostile(t *testing.T) (r *Root, top string) {
	t.Helper()
	top = t.TempDir()
	root := filepath.Join(top, "root")
	for _, d := range []string{"etc", "data", "full/sub", "../outside"} {
		must(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(top, "outside/secret"), []byte("outside"), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "etc/plain"), []byte("old"), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "data/inside"), []byte("inside"), 0o644))
	for link, target := range map[string]string{
		"etc/abs-out":    filepath.Join(top, "outside/secret"),
		"etc/rel-out":    "../../outside/secret",
		"etc/up":         "../../../../../../../../data/inside",
		"etc/abs-in":     "/data/inside",
		"etc/dangling":   "/nowhere",
		"etc/loop":       "loop",
		"etc/self":       "/proc/self/root",
		"abs-dir":        "/data",
		"abs-out-dir":    filepath.Join(top, "outside"),
		"rel-out-dir":    "../outside",
		"dangling-dir":   "nowhere",
		"loop-a":         "loop-b",
		"loop-b":         "loop-a",
		"etc/to-fifo":    "fifo",
		"etc/to-null":    "/etc/null",
		"etc/link-chain": "abs-in",
	} {
		must(t, os.Symlink(target, filepath.Join(root, link)))
	}
	must(t, unix.Mkfifo(filepath.Join(root, "etc/fifo"), 0o644))
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(root, "etc/socket")})
	must(t, err)
	t.Cleanup(func() { l.Close() })
	if err := unix.Mknod(filepath.Join(root, "etc/null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		// The rows about the device then see another kind that is refused in the same way.
		t.Logf("no device nodes here (%v): a FIFO stands in", err)
		must(t, unix.Mkfifo(filepath.Join(root, "etc/null"), 0o666))
	}
	t.Cleanup(func() {
		got := tree(t, filepath.Join(top, "outside"))
		if diff := cmp.Diff(map[string]string{"secret": `-rw-r--r-- "outside"`}, got); diff != "" {
			t.Errorf("outside was touched (-want +got):\n%s", diff)
		}
		if got := tree(t, top); len(got) > 0 {
			for p := range got {
				if !strings.HasPrefix(p, "root") && !strings.HasPrefix(p, "outside") {
					t.Errorf("%s appeared beside the root", p)
				}
			}
		}
	})
	return open(t, root), top
}

func TestWrite(t *testing.T) {
	for _, tt := range []struct {
		reason string
		file   File
		same   bool   // nothing has to change
		at     string // where the result is looked for; "": file.Path
		want   string // as tree tells it
		err    string // of what is refused
	}{
		{reason: "new file", file: File{Path: "etc/new", Mode: 0o644, Content: []byte("x")}, want: `-rw-r--r-- "x"`},
		{reason: "new empty file", file: File{Path: "etc/new", Mode: 0o600}, want: `-rw------- ""`},
		{reason: "leading slash", file: File{Path: "/etc/new", Mode: 0o644}, want: `-rw-r--r-- ""`},
		{reason: "missing parents", file: File{Path: "a/b/c", Mode: 0o600, Content: []byte("x")}, want: `-rw------- "x"`},
		{reason: "other bytes", file: File{Path: "etc/plain", Mode: 0o644, Content: []byte("new")}, want: `-rw-r--r-- "new"`},
		{reason: "other mode only", file: File{Path: "etc/plain", Mode: 0o600, Content: []byte("old")}, want: `-rw------- "old"`},
		{reason: "same", file: File{Path: "etc/plain", Mode: 0o644, Content: []byte("old")}, same: true, want: `-rw-r--r-- "old"`},
		{reason: "a prefix is not the same", file: File{Path: "etc/plain", Mode: 0o644, Content: []byte("ol")}, want: `-rw-r--r-- "ol"`},

		{reason: "final link out, absolute, is replaced", file: File{Path: "etc/abs-out", Mode: 0o644, Content: []byte("x")}, want: `-rw-r--r-- "x"`},
		{reason: "final link out, relative, is replaced", file: File{Path: "etc/rel-out", Mode: 0o644, Content: []byte("x")}, want: `-rw-r--r-- "x"`},
		{reason: "final link whose target already has the content", file: File{Path: "etc/abs-in", Mode: 0o644, Content: []byte("inside")}, want: `-rw-r--r-- "inside"`},
		{reason: "final dangling link", file: File{Path: "etc/dangling", Mode: 0o644, Content: []byte("x")}, want: `-rw-r--r-- "x"`},
		{reason: "final loop", file: File{Path: "etc/loop", Mode: 0o644, Content: []byte("x")}, want: `-rw-r--r-- "x"`},
		{reason: "final magic link", file: File{Path: "etc/self", Mode: 0o644, Content: []byte("x")}, want: `-rw-r--r-- "x"`},

		{reason: "absolute parent link begins at the root", file: File{Path: "abs-dir/f", Mode: 0o644}, at: "data/f", want: `-rw-r--r-- ""`},
		{reason: "relative parent link ends at the root", file: File{Path: "rel-out-dir/f", Mode: 0o644}, err: `"rel-out-dir" beneath ROOT: refused: it is a link to "../outside", which is not there; want a folder or a link to one`},
		{reason: "absolute parent link to what is only outside", file: File{Path: "abs-out-dir/f", Mode: 0o644}, err: `which is not there; want a folder`},
		{reason: "dangling parent, deep", file: File{Path: "dangling-dir/a/b", Mode: 0o644}, err: `"dangling-dir" beneath ROOT: refused`},
		{reason: "parent loop", file: File{Path: "loop-a/f", Mode: 0o644}, err: `"loop-a" beneath ROOT: too many levels of symbolic links`},
		{reason: "parent is a file", file: File{Path: "etc/plain/f", Mode: 0o644}, err: `cannot write etc/plain/f: "etc/plain" beneath ROOT: refused: it is a regular file; want a folder`},
		{reason: "parent's parent is a file", file: File{Path: "etc/plain/a/b", Mode: 0o644}, err: `"etc/plain" beneath ROOT: refused: it is a regular file; want a folder`},
		{reason: "parent is a FIFO", file: File{Path: "etc/fifo/f", Mode: 0o644}, err: `refused: it is a FIFO; want a folder`},

		{reason: "FIFO", file: File{Path: "etc/fifo", Mode: 0o644}, err: `"etc/fifo" beneath ROOT: refused: it is a FIFO; want a regular file, a symbolic link, or nothing in this place`},
		{reason: "socket", file: File{Path: "etc/socket", Mode: 0o644}, err: `refused: it is a socket`},
		{reason: "device", file: File{Path: "etc/null", Mode: 0o644}, err: `"etc/null" beneath ROOT: refused: it is a `},
		{reason: "folder", file: File{Path: "data", Mode: 0o644}, err: `refused: it is a folder`},
		{reason: "empty folder", file: File{Path: "full/sub", Mode: 0o644}, err: `refused: it is a folder`},

		{reason: "new link", file: File{Path: "a/l", Mode: fs.ModeSymlink, Content: []byte("/etc/plain")}, want: "-> /etc/plain"},
		{reason: "link in place of a link", file: File{Path: "etc/abs-in", Mode: fs.ModeSymlink | 0o777, Content: []byte("plain")}, want: "-> plain"},
		{reason: "link in place of a file", file: File{Path: "etc/plain", Mode: fs.ModeSymlink, Content: []byte("x")}, want: "-> x"},
		{reason: "same link", file: File{Path: "etc/abs-in", Mode: fs.ModeSymlink, Content: []byte("/data/inside")}, same: true, want: "-> /data/inside"},
		{reason: "link in place of a folder", file: File{Path: "full/sub", Mode: fs.ModeSymlink, Content: []byte("x")}, err: "refused: it is a folder"},
		{reason: "link to nothing", file: File{Path: "etc/l", Mode: fs.ModeSymlink}, err: `link target "": want a path`},

		{reason: "new folder", file: File{Path: "a/b", Mode: fs.ModeDir | 0o700}, want: "drwx------"},
		{reason: "same folder", file: File{Path: "data", Mode: fs.ModeDir | 0o755}, same: true, want: "drwxr-xr-x"},
		{reason: "folder with another mode", file: File{Path: "full", Mode: fs.ModeDir | 0o700}, want: "drwx------"},
		{reason: "a link to a folder is the folder", file: File{Path: "abs-dir", Mode: fs.ModeDir | 0o700}, at: "data", want: "drwx------"},
		{reason: "a link out is no folder", file: File{Path: "abs-out-dir", Mode: fs.ModeDir | 0o700}, err: "which is not there; want a folder"},
		{reason: "folder in place of a file", file: File{Path: "etc/plain", Mode: fs.ModeDir | 0o700}, err: "refused: it is a regular file; want a folder"},
		{reason: "folder in place of a FIFO", file: File{Path: "etc/fifo", Mode: fs.ModeDir | 0o700}, err: "refused: it is a FIFO; want a folder"},
		{reason: "folder with content", file: File{Path: "a", Mode: fs.ModeDir | 0o700, Content: []byte("x")}, err: "want none"},

		{reason: "upwards", file: File{Path: "../outside/secret", Mode: 0o644}, err: `want a clean path, without ".."`},
		{reason: "upwards inside", file: File{Path: "etc/../plain", Mode: 0o644}, err: `want a clean path`},
		{reason: "no path", file: File{Mode: 0o644}, err: `want a clean path`},
		{reason: "NUL", file: File{Path: "etc/a\x00b", Mode: 0o644}, err: `want a clean path`},
		{reason: "the root itself", file: File{Path: ".", Mode: fs.ModeDir | 0o700}, err: `is the root itself`},
		{reason: "set-user-ID", file: File{Path: "etc/x", Mode: fs.ModeSetuid | 0o755}, err: `want permission bits`},
		{reason: "device mode", file: File{Path: "etc/x", Mode: fs.ModeDevice | 0o755}, err: `want permission bits`},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			for _, umask := range []int{0o022, 0o077, 0} {
				r, _ := hostile(t)
				before := tree(t, r.Name())
				wasInode := inode(r, tt.file.Path)
				old := unix.Umask(umask)
				changed, err := r.Write(tt.file)
				unix.Umask(old)
				after := tree(t, r.Name())
				if tt.err != "" {
					if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), r.Name(), "ROOT"), tt.err) {
						t.Errorf("error %v, want %s", err, tt.err)
					}
					if diff := cmp.Diff(before, after); diff != "" || changed {
						t.Errorf("changed in spite of an error: %v\n%s", changed, diff)
					}
					continue
				}
				must(t, err)
				if changed == tt.same {
					t.Errorf("changed = %v", changed)
				}
				at := strings.TrimPrefix(tt.file.Path, "/")
				if tt.at != "" {
					at = tt.at
				}
				if after[at] != tt.want {
					t.Errorf("umask %03o: %s: got %s, want %s", umask, at, after[at], tt.want)
				}
				if tt.same && inode(r, tt.file.Path) != wasInode {
					t.Error("the same file has another inode")
				}
				// Nothing but the file and its parents is new.
				delete(after, at)
				delete(before, at)
				for p := filepath.Dir(at); p != "."; p = filepath.Dir(p) {
					if after[p] != "drwxr-xr-x" {
						t.Errorf("umask %03o: parent %s: %s", umask, p, after[p])
					}
					delete(after, p)
					delete(before, p)
				}
				if diff := cmp.Diff(before, after); diff != "" {
					t.Errorf("something else changed too:\n%s", diff)
				}
				if changed, err := r.Write(tt.file); changed || err != nil {
					t.Errorf("written again: changed = %v, %v", changed, err)
				}
			}
		})
	}
}

// TestWriteOwner sees to it that a file which was handed to another user is not taken for the one that we wrote.
func TestWriteOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to give a file away")
	}
	r, _ := hostile(t)
	f := File{Path: "etc/secret", Mode: 0o600, Content: []byte("x"), Secret: true}
	write(t, r, f)
	must(t, os.Chown(filepath.Join(r.Name(), f.Path), 1000, 1000))
	if changed, err := r.Write(f); !changed || err != nil {
		t.Fatal(changed, err)
	}
	info, err := r.Lstat(f.Path)
	must(t, err)
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 {
		t.Errorf("owner %d", uid)
	}
}

func TestWriteAll(t *testing.T) {
	r, _ := hostile(t)
	changed, err := r.WriteAll([]File{
		{Path: "new", Mode: fs.ModeDir | 0o700},
		{Path: "new/a", Mode: 0o600, Content: []byte("a")},
		{Path: "new/b", Mode: 0o600, Content: []byte("b")},
		{Path: "etc/fifo", Mode: 0o644},
		{Path: "etc/plain", Mode: 0o644, Content: []byte("old")},
		{Path: "etc/plain/x", Mode: 0o644},
		{Path: "data/x", Mode: 0o644},
	})
	if diff := cmp.Diff([]string{"new", "new/a", "new/b", "data/x"}, changed); diff != "" {
		t.Error(diff)
	}
	if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "etc/fifo") || !strings.Contains(err.Error(), "etc/plain/x") {
		t.Errorf("want both errors, got: %v", err)
	}
	if got := tree(t, r.Name())["new/b"]; got != `-rw------- "b"` {
		t.Error(got)
	}
}

func TestRemove(t *testing.T) {
	for _, tt := range []struct{ reason, path, err string }{
		{"file", "etc/plain", ""},
		{"link, not its target", "etc/abs-in", ""},
		{"link out", "etc/abs-out", ""},
		{"link to a folder, not the folder", "abs-dir", ""},
		{"FIFO", "etc/fifo", ""},
		{"empty folder", "full/sub", ""},
		{"through a link", "abs-dir/inside", ""},
		{"absent", "etc/absent", ""},
		{"absent parent", "absent/absent", ""},
		{"parent is a file", "etc/plain/x", ""},
		{"parent link out", "rel-out-dir/secret", ""},
		{"absolute parent link out", "abs-out-dir/secret", ""},
		{"full folder", "full", `"full" beneath ROOT: refused: it is a folder that is not empty; remove what is in it first`},
		{"the root", ".", "is the root itself"},
		{"upwards", "../outside/secret", "want a clean path"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			r, _ := hostile(t)
			before := tree(t, r.Name())
			err := r.Remove(tt.path)
			if tt.err != "" {
				if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), r.Name(), "ROOT"), tt.err) {
					t.Errorf("error %v, want %s", err, tt.err)
				}
			} else if err != nil {
				t.Error(err)
			} else {
				delete(before, strings.Replace(tt.path, "abs-dir/", "data/", 1))
			}
			if diff := cmp.Diff(before, tree(t, r.Name())); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestSetTime(t *testing.T) {
	when := time.Unix(1_700_000_000, 5)
	for _, tt := range []struct{ reason, path, err string }{
		{"file", "etc/plain", ""},
		{"link, not its target", "etc/abs-in", ""},
		{"link out, not its target", "etc/abs-out", ""},
		{"folder", "etc", ""},
		{"the root", ".", ""},
		{"through a link", "abs-dir/inside", ""},
		{"absent", "etc/absent", "no such file"},
		{"parent link out", "rel-out-dir/secret", "no such file"},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			r, top := hostile(t)
			outside, err := os.Stat(filepath.Join(top, "outside/secret"))
			must(t, err)
			if err := r.SetTime(tt.path, when); tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %s", err, tt.err)
				}
			} else {
				must(t, err)
				info, err := r.Lstat(tt.path)
				must(t, err)
				if !info.ModTime().Equal(when) {
					t.Errorf("%v, want %v", info.ModTime(), when)
				}
			}
			if now, err := os.Stat(filepath.Join(top, "outside/secret")); err != nil || !now.ModTime().Equal(outside.ModTime()) {
				t.Errorf("outside was changed: %v, %v", now.ModTime(), err)
			}
		})
	}
}

func TestRead(t *testing.T) {
	for _, tt := range []struct{ reason, path, want, err string }{
		{"file", "etc/plain", "old", ""},
		{"leading slash", "/etc/plain", "old", ""},
		{"absolute link", "etc/abs-in", "inside", ""},
		{"link to a link", "etc/link-chain", "inside", ""},
		{"dots stop at the root", "etc/up", "inside", ""},
		{"through a link", "abs-dir/inside", "inside", ""},
		{"absolute link out", "etc/abs-out", "", "no such file"},
		{"relative link out", "etc/rel-out", "", "no such file"},
		{"parent link out", "rel-out-dir/secret", "", "no such file"},
		{"loop", "etc/loop", "", "too many levels"},
		{"magic link", "etc/self", "", "no such file"},
		{"FIFO must not block", "etc/fifo", "", "refused: it is a FIFO; want a regular file"},
		{"link to a FIFO", "etc/to-fifo", "", "refused: it is a FIFO"},
		{"link to a device", "etc/to-null", "", "refused: it is a"},
		{"socket", "etc/socket", "", "refused: it is a socket"},
		{"folder", "etc", "", "refused: it is a folder"},
		{"too large", "etc/large", "", "refused: it is larger than 10 bytes"},
		{"just small enough", "etc/ten", "0123456789", ""},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			r, _ := hostile(t)
			write(t, r, File{Path: "etc/ten", Mode: 0o644, Content: []byte("0123456789")})
			write(t, r, File{Path: "etc/large", Mode: 0o644, Content: []byte("0123456789x")})
			got, err := r.Read(tt.path, 10)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %q, error %v, want %s", got, err, tt.err)
				}
				return
			}
			must(t, err)
			if string(got) != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestLook(t *testing.T) {
	r, top := hostile(t)
	for _, p := range []string{"abs-out-dir", "rel-out-dir", "rel-out-dir/secret", "absent"} {
		if _, err := r.Stat(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Stat(%s): %v, want ErrNotExist", p, err)
		}
		if _, err := r.ReadDir(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("ReadDir(%s): %v, want ErrNotExist", p, err)
		}
	}
	for p, want := range map[string]fs.FileMode{"etc/abs-in": 0, "abs-dir": fs.ModeDir, ".": fs.ModeDir, "/": fs.ModeDir, "etc/to-fifo": fs.ModeNamedPipe} {
		if info, err := r.Stat(p); err != nil || info.Mode().Type() != want {
			t.Errorf("Stat(%s): %v, %v", p, info, err)
		}
	}
	for p, want := range map[string]fs.FileMode{"etc/abs-in": fs.ModeSymlink, "abs-dir": fs.ModeSymlink, "abs-dir/inside": 0, ".": fs.ModeDir, "etc/fifo": fs.ModeNamedPipe} {
		if info, err := r.Lstat(p); err != nil || info.Mode().Type() != want {
			t.Errorf("Lstat(%s): %v, %v", p, info, err)
		}
	}
	if target, err := r.Readlink("etc/abs-out"); err != nil || target != filepath.Join(top, "outside/secret") {
		t.Errorf("Readlink: %q, %v", target, err)
	}
	if _, err := r.Readlink("etc/plain"); !errors.Is(err, ErrRefused) {
		t.Errorf("Readlink of a file: %v", err)
	}
	links, err := r.Links("abs-dir/../full") // not clean
	if err == nil {
		t.Errorf("Links: %v", links)
	}
	links, err = r.Links("etc")
	must(t, err)
	for name, target := range links {
		if want, err := os.Readlink(filepath.Join(r.Name(), "etc", name)); err != nil || target != want {
			t.Errorf("Links: %s -> %q, want %q (%v)", name, target, want, err)
		}
	}
	if links["abs-out"] == "" || links["plain"] != "" {
		t.Errorf("Links: %v", links)
	}
	entries, err := r.ReadDir("abs-dir/../full") // not clean
	if err == nil {
		t.Errorf("ReadDir: %v", entries)
	}
	entries, err = r.ReadDir("abs-dir")
	must(t, err)
	info, err := entries[0].Info()
	must(t, err)
	if len(entries) != 1 || entries[0].Name() != "inside" || info.Size() != 6 {
		t.Errorf("ReadDir: %v", entries)
	}
	for _, p := range []string{"etc/fifo", "etc/null", "etc/plain"} {
		if _, err := r.ReadDir(p); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("ReadDir(%s): %v", p, err)
		}
		if _, err := r.Links(p); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("Links(%s): %v", p, err)
		}
	}

	h, err := r.Handle("etc/socket")
	must(t, err)
	defer h.Close()
	conn, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d", h.Fd()))
	must(t, err)
	conn.Close()
}

// TestSwap has a hostile process exchange a parent folder, and a file itself, for links that leave the root while files are
// written, read and removed there.
func TestSwap(t *testing.T) {
	r, top := hostile(t)
	root := r.Name()
	must(t, os.Mkdir(filepath.Join(root, "swap"), 0o755))
	must(t, os.Symlink("../outside", filepath.Join(root, "swap-rel")))
	must(t, os.Symlink(filepath.Join(top, "outside"), filepath.Join(root, "swap-abs")))
	must(t, os.WriteFile(filepath.Join(root, "last"), nil, 0o600))

	stop := make(chan struct{})
	var swaps atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		exchange := func(a, b string) error {
			swaps.Add(1)
			return unix.Renameat2(-1, filepath.Join(root, a), -1, filepath.Join(root, b), unix.RENAME_EXCHANGE)
		}
		for {
			for _, link := range []string{"swap-rel", "swap-abs"} {
				for range 2 {
					if err := exchange("swap", link); err != nil {
						t.Error(err)
						return
					}
				}
			}
			// What is written takes the place of a link, and what is removed is gone: there is a new one each time.
			os.Remove(filepath.Join(root, "last-link"))
			if err := os.Symlink("../outside/secret", filepath.Join(root, "last-link")); err != nil {
				t.Error(err)
				return
			}
			if err := exchange("last", "last-link"); err != nil && err != unix.ENOENT {
				t.Error(err)
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	n, least := rounds(500, 10_000), int64(rounds(10_000, 200_000))
	if os.Getenv(noOpenat2Env) != "" {
		n /= 5 // ten times slower there
	}
	var written, refused int
	for i := 0; i < n || (written == 0 || refused == 0 || swaps.Load() < least) && i < 100*n; i++ {
		// "secret" is also the name of the file outside.
		for _, name := range []string{"swap/secret", "last"} {
			_, err := r.Write(File{Path: name, Mode: 0o600, Content: []byte(strconv.Itoa(i))})
			if err == nil {
				written++
			} else {
				refused++
			}
			if b, err := r.Read(name, 100); err == nil && string(b) == "outside" {
				t.Fatal("read the file outside")
			}
		}
		r.Write(File{Path: "swap/new/dir", Mode: fs.ModeDir | 0o700})
		r.Remove("swap/secret")
		if i%10 == 0 {
			r.Remove("last")
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d swaps, %d written, %d refused", swaps.Load(), written, refused)
	if written == 0 || refused == 0 || swaps.Load() < least {
		t.Error("the swaps did not meet the writes")
	}
}

// TestRace lets many write the same files: no error, and no reader sees anything but one of the contents.
func TestRace(t *testing.T) {
	r, _ := hostile(t)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			own := open(t, r.Name())
			content := bytes.Repeat([]byte{byte('a' + w)}, 10_000)
			for i := range 50 {
				for _, f := range []File{
					{Path: fmt.Sprintf("race%d", i), Mode: fs.ModeDir | 0o700},
					{Path: fmt.Sprintf("race%d/deep/file", i), Mode: 0o644, Content: content},
					{Path: fmt.Sprintf("race%d/link", i), Mode: fs.ModeSymlink, Content: content[:10]},
				} {
					if _, err := own.Write(f); err != nil {
						t.Error(err)
					}
				}
				b, err := own.Read(fmt.Sprintf("race%d/deep/file", i), 1<<20)
				if err != nil || len(b) != 10_000 || !bytes.Equal(b, bytes.Repeat(b[:1], 10_000)) {
					t.Errorf("torn: %d bytes, %v", len(b), err)
				}
			}
		})
	}
	wg.Wait()
	for p := range tree(t, r.Name()) {
		if strings.HasPrefix(filepath.Base(p), ".") {
			t.Errorf("%s is left over", p)
		}
	}
}

// TestSecretMode looks at every name in the folder while a secret is written anew and anew without a umask.
func TestSecretMode(t *testing.T) {
	r, _ := hostile(t)
	defer unix.Umask(unix.Umask(0))
	stop := make(chan struct{})
	var seen atomic.Int32
	var wg sync.WaitGroup
	must(t, os.Mkdir(filepath.Join(r.Name(), "s"), 0o755))
	wg.Go(func() {
		for {
			entries, err := r.ReadDir("s")
			if err != nil {
				t.Error(err)
				return
			}
			for _, e := range entries {
				info, err := e.Info()
				if err != nil {
					continue // renamed meanwhile
				}
				if strings.HasPrefix(e.Name(), ".secret") {
					seen.Add(1)
				}
				if info.Mode() != 0o600 {
					t.Errorf("%s: %v", e.Name(), info.Mode())
					return
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	n := rounds(100, 1000)
	for i := 0; i < n || seen.Load() == 0 && i < 100*n; i++ {
		write(t, r, File{Path: "s/secret", Mode: 0o600, Content: []byte(strconv.Itoa(i)), Secret: true})
	}
	close(stop)
	wg.Wait()
	if seen.Load() == 0 {
		t.Error("no temporary file was ever seen")
	}
}

// TestKill kills a writer with SIGKILL at many moments.
func TestKill(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir)
	for range rounds(10, 30) {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), writeLoopEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		lines := bufio.NewScanner(out)
		for range 1 + rand.IntN(20) { // and from then on, however far the next write gets
			lines.Scan()
		}
		must(t, cmd.Process.Kill())
		cmd.Wait()
		b, err := r.Read("d/file", 10<<20)
		must(t, err)
		if len(b) != loopSize || !bytes.Equal(b, bytes.Repeat(b[:1], loopSize)) {
			t.Fatalf("torn: %d bytes", len(b))
		}
		if changed, err := r.Write(File{Path: "d/file", Mode: 0o600, Content: []byte("finished")}); err != nil || !changed {
			t.Fatalf("the next run: %v, %v", changed, err)
		}
	}
	for p := range tree(t, dir) {
		if strings.HasPrefix(filepath.Base(p), ".") {
			t.Errorf("left over: %s", p)
		}
	}
}

// What a kill leaves is gone after whatever is done next with the file. Not everything that looks like it is.
func TestLeftOver(t *testing.T) {
	f := File{Path: "d/file", Mode: 0o644, Content: []byte("new")}
	for _, tt := range []struct {
		why string
		was string // content before
		do  func(r *Root) error
	}{
		{"written", "old", func(r *Root) error { _, err := r.Write(f); return err }},
		{"right already", "new", func(r *Root) error { _, err := r.Write(f); return err }},
		{"replaced by a link", "old", func(r *Root) error {
			_, err := r.Write(File{Path: f.Path, Mode: fs.ModeSymlink, Content: []byte("new")})
			return err
		}},
		{"removed", "old", func(r *Root) error { return r.Remove(f.Path) }},
	} {
		t.Run(tt.why, func(t *testing.T) {
			r := open(t, t.TempDir())
			dir := filepath.Join(r.Name(), "d")
			must(t, os.Mkdir(dir, 0o755))
			must(t, os.WriteFile(filepath.Join(dir, "file"), []byte(tt.was), 0o644))
			must(t, os.WriteFile(filepath.Join(dir, ".file.berth"), []byte("half"), 0o600))
			for _, other := range []string{".file", ".file.old", ".file2.berth", "file.berth"} {
				must(t, os.WriteFile(filepath.Join(dir, other), nil, 0o644))
			}
			must(t, tt.do(r))
			got := tree(t, dir)
			if got[".file.berth"] != "" {
				t.Error("it is still there")
			}
			if len(got) < 4 {
				t.Errorf("somebody else's is gone: %v", got)
			}
		})
	}
	t.Run("of a killed writer, and of one that is at work, where files always have names", func(t *testing.T) {
		r := open(t, t.TempDir())
		for _, name := range []string{".file17", ".file18", ".file17.old", ".filex"} {
			must(t, os.WriteFile(filepath.Join(r.Name(), name), []byte("half"), 0o600))
		}
		must(t, os.Mkdir(filepath.Join(r.Name(), ".file19"), 0o700))
		held, err := os.Open(filepath.Join(r.Name(), ".file18"))
		must(t, err)
		defer held.Close()
		must(t, unix.Flock(int(held.Fd()), unix.LOCK_EX))
		dir, err := os.Open(r.Name())
		must(t, err)
		d := &folder{dir: dir}
		defer d.close()
		must(t, d.putNamedFile(File{Mode: 0o644, Content: []byte("new")}, "file"))
		var got []string
		for name := range tree(t, r.Name()) {
			got = append(got, name)
		}
		slices.Sort(got)
		if diff := cmp.Diff([]string{".file17.old", ".file18", ".file19", ".filex", "file"}, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	})
}

const loopSize = 1 << 20

func writeLoop(dir string) {
	r, err := OpenRoot(dir)
	for i := 0; err == nil; i++ {
		_, err = r.Write(File{Path: "d/file", Mode: 0o600, Content: bytes.Repeat([]byte{byte('a' + i%26)}, loopSize)})
		fmt.Println(i)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// TestFill fills a folder twice: what Fill makes is what WriteAll makes, whatever was there before.
func TestFill(t *testing.T) {
	files := []File{
		{Path: "a.service", Mode: 0o644, Content: []byte("a")},
		{Path: "a.service.d/50-berth.conf", Mode: 0o640, Content: []byte("b")},
		{Path: "a.service.d/deep/er.conf", Mode: 0o644, Content: []byte("deep")},
		{Path: "b.service", Mode: 0o644},
		{Path: "folder", Mode: fs.ModeDir | 0o750},
		{Path: "multi-user.target.wants/a.service", Mode: fs.ModeSymlink | 0o777, Content: []byte("../a.service")},
	}
	want := t.TempDir()
	_, err := open(t, want).WriteAll(files)
	must(t, err)
	defer unix.Umask(unix.Umask(0o077))
	for _, c := range []struct {
		why    string
		before func(r *Root)
	}{
		{"an empty folder", func(*Root) {}},
		{"old files in the way, of another mode and content", func(r *Root) {
			write(t, r, File{Path: "a.service", Mode: 0o600, Content: []byte("old and longer")})
			write(t, r, File{Path: "multi-user.target.wants/a.service", Mode: 0o644, Content: []byte("x")})
		}},
		{"a link in the way", func(r *Root) {
			write(t, r, File{Path: "b.service", Mode: fs.ModeSymlink | 0o777, Content: []byte("a.service")})
		}},
	} {
		dir := t.TempDir()
		r := open(t, dir)
		c.before(r)
		for range 2 {
			must(t, r.Fill(files))
			if diff := cmp.Diff(tree(t, want), tree(t, dir)); diff != "" {
				t.Errorf("%s: (-WriteAll +Fill)\n%s", c.why, diff)
			}
		}
	}
}

func TestFillRefuses(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	must(t, os.Symlink(outside, filepath.Join(dir, "a.service.d")))
	must(t, os.Mkdir(filepath.Join(dir, "b.service"), 0o755))
	err := open(t, dir).Fill([]File{
		{Path: "a.service.d/x.conf", Mode: 0o644, Content: []byte("x")},
		{Path: "b.service", Mode: 0o644, Content: []byte("b")},
		{Path: "../c.service", Mode: 0o644},
		{Path: "d.service", Mode: 0o644, Content: []byte("d")},
	})
	for _, want := range []string{"a.service.d", "b.service", "../c.service"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want it to tell of %s", err, want)
		}
	}
	if got := tree(t, outside); len(got) != 0 {
		t.Errorf("written outside of the root: %v", got)
	}
	if _, err := os.Stat(filepath.Join(dir, "d.service")); err != nil {
		t.Errorf("%v; want what can be written to be written", err)
	}
}

// BenchmarkWrite is about what the generator writes for 1000 slots: per slot a unit and a drop-in in its own folder.
func BenchmarkWrite(b *testing.B) {
	dir := b.TempDir()
	if err := unix.Access(tmpfs, unix.W_OK); err == nil { // as the generator's output folders are
		if dir, err = os.MkdirTemp(tmpfs, "berth"); err != nil {
			b.Fatal(err)
		}
		defer os.RemoveAll(dir)
	}
	var files []File
	for i := range 1000 {
		content := bytes.Repeat([]byte("Key=value\n"), 100)
		files = append(files,
			File{Path: fmt.Sprintf("node@%d.service", i), Mode: 0o644, Content: content},
			File{Path: fmt.Sprintf("systemd-nspawn@node-%d.service.d/50-berth.conf", i), Mode: 0o644, Content: content})
	}
	Sort(files)
	run := func(b *testing.B, fresh bool, apply func(*Root) error) {
		for i := range b.N {
			sub := dir
			if fresh {
				sub = filepath.Join(dir, b.Name(), strconv.Itoa(b.N), strconv.Itoa(i))
			}
			if err := os.MkdirAll(sub, 0o755); err != nil {
				b.Fatal(err)
			}
			r, err := OpenRoot(sub)
			if err != nil {
				b.Fatal(err)
			}
			if err := apply(r); err != nil {
				b.Fatal(err)
			}
			r.Close()
		}
		b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*len(files)), "µs/file")
	}
	writeAll := func(r *Root) error { _, err := r.WriteAll(files); return err }
	b.Run("fill", func(b *testing.B) { run(b, true, func(r *Root) error { return r.Fill(files) }) })
	b.Run("new", func(b *testing.B) { run(b, true, writeAll) })
	b.Run("same", func(b *testing.B) { run(b, false, writeAll) })
}

func open(t *testing.T, dir string) *Root {
	t.Helper()
	r, err := OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

func write(t *testing.T, r *Root, f File) {
	t.Helper()
	_, err := r.Write(f)
	must(t, err)
}

func inode(r *Root, path string) uint64 {
	info, err := r.Lstat(path)
	if err != nil {
		return 0
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

// tree tells everything below dir in a form that can be compared.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		what := info.Mode().String()
		switch info.Mode().Type() {
		case 0:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			what += fmt.Sprintf(" %q", b)
		case fs.ModeSymlink:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			what = "-> " + target
		}
		rel, err := filepath.Rel(dir, p)
		all[rel] = what
		return err
	}))
	return all
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
