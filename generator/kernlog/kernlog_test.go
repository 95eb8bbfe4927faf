package kernlog

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
)

// logError logs err on a host whose /dev/kmsg make makes, and returns what was written.
func logError(t *testing.T, make func(path string) error, err error) (stderr string, root string) {
	t.Helper()
	root = t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := make(filepath.Join(root, "dev/kmsg")); err != nil {
		t.Fatal(err)
	}
	r, openErr := file.OpenRoot(root)
	if openErr != nil {
		t.Fatal(openErr)
	}
	defer r.Close()
	var b bytes.Buffer
	l := New(r, "prog", &b)
	l.Error(err)
	return b.String(), root
}

func regular(path string) error { return os.WriteFile(path, nil, 0o600) }

func TestError(t *testing.T) {
	pid := fmt.Sprintf("<3>prog[%d]: ", os.Getpid())
	long := strings.Repeat("ä", maxLine)
	lines := func(n int) string { return strings.TrimSuffix(strings.Repeat("x\n", n), "\n") }
	for _, tt := range []struct {
		why, err string
		want     string // kernel log, without the prefix
	}{
		{"one line", "a: b", "a: b\n"},
		{"a record a line", "a\nb\n", "a\nb\n"},
		{"all of them", lines(8), lines(8) + "\n"},
		{"the ninth takes the place of the count", lines(9), lines(9) + "\n"},
		{"cut short", lines(10), lines(8) + "\nand 2 more errors\n"},
		{"a line that is too long", long, strings.Repeat("ä", maxLine/2) + "…\n"},
	} {
		stderr, root := logError(t, regular, errors.New(tt.err))
		if want := "prog: " + strings.ReplaceAll(strings.TrimSpace(tt.err), "\n", "\nprog: ") + "\n"; stderr != want {
			t.Errorf("%s: standard error (-want +got):\n%s", tt.why, cmp.Diff(want, stderr))
		}
		got, err := os.ReadFile(filepath.Join(root, "dev/kmsg"))
		if err != nil {
			t.Fatal(err)
		}
		want := pid + strings.ReplaceAll(strings.TrimSuffix(tt.want, "\n"), "\n", "\n"+pid) + "\n"
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s: kernel log (-want +got):\n%s", tt.why, diff)
		}
		for record := range strings.Lines(string(got)) {
			if len(record) > 1024 || !utf8.ValidString(record) {
				t.Errorf("%s: a record of %d bytes, or not UTF-8", tt.why, len(record))
			}
		}
	}
}

// What is there instead of the kernel's log neither blocks nor is an error.
func TestOpen(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	for why, make := range map[string]func(string) error{
		"nothing":          func(string) error { return nil },
		"folder":           func(p string) error { return os.Mkdir(p, 0o700) },
		"link out of root": func(p string) error { return os.Symlink(outside, p) },
		"FIFO without a reader": func(p string) error {
			return unix.Mkfifo(p, 0o600)
		},
		"FIFO that is full": func(p string) error {
			if err := unix.Mkfifo(p, 0o600); err != nil {
				return err
			}
			f, err := os.OpenFile(p, os.O_RDWR|unix.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			t.Cleanup(func() { f.Close() })
			fd := int(f.Fd())
			if err := unix.SetNonblock(fd, true); err != nil { // Fd takes it away
				return err
			}
			for err == nil {
				_, err = unix.Write(fd, bytes.Repeat([]byte("x"), 4096))
			}
			if err == unix.EAGAIN {
				err = nil
			}
			return err
		},
	} {
		if stderr, _ := logError(t, make, errors.New("x")); stderr != "prog: x\n" {
			t.Errorf("%s: standard error %q", why, stderr)
		}
	}
	if got, _ := os.ReadFile(outside); string(got) != "mine" {
		t.Errorf("wrote outside the root: %q", got)
	}

	var b bytes.Buffer
	l := New(nil, "prog", &b)
	l.Error(errors.New("no root"))
	if b.String() != "prog: no root\n" {
		t.Errorf("without a root: %q", b.String())
	}
}
