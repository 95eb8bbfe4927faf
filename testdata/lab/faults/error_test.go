package faults

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestErrors has, one by one, the changes of files fail that each program makes. It either succeeds all the same, with all as it should
// be, or says which file could not be written and why, and each file is the old or the new one. The next run makes up for it.
func TestErrors(t *testing.T) {
	bin := build(t)
	for i, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			k := newKiller(t, bin, i)
			k.undisturbed(t)
			exits := map[int]int{}
			for _, tr := range transitions {
				changes, _ := k.fail(t, tr, 0, 0)
				step := 1
				if *kills == 0 {
					step = max(1, changes/few)
				}
				for n := 1 + k.random.IntN(step); n <= changes && !t.Failed(); n += step {
					_, exit := k.fail(t, tr, n, []syscall.Errno{unix.ENOSPC, unix.EIO, unix.EROFS, unix.EDQUOT, unix.EMFILE}[k.random.IntN(5)])
					exits[exit]++
				}
			}
			t.Logf("exit codes: %v", exits)
			if exits[1] <= exits[0] && !p.again {
				t.Error("most of the changes must matter")
			}
		})
	}
}

// fail has the n-th change on one of the transitions fail; 0: none. It returns the number of changes, and the
// exit code.
func (k *killer) fail(t *testing.T, tr transition, n int, errno syscall.Errno) (changes, exit int) {
	old, new := k.begin(t, tr)
	cmd := k.command()
	out, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	r, err := disturb(cmd, n, errno)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("not on this architecture")
	}
	must(t, err)
	text, err := os.ReadFile(out.Name())
	must(t, err)
	what := fmt.Sprintf("from %q to %q, change %d, %s, fails with %v", tr.from, tr.to, n, r.call, errno)
	switch {
	case r.call == "" && r.exit != 0:
		t.Fatalf("%s: exit code %d: %s", k.program.name, r.exit, text)
	case r.exit == 0:
		if diff := cmp.Diff(new, k.tree(t)); diff != "" {
			t.Errorf("%s: %s: exit code 0, but -want +got:\n%s\n%s", k.program.name, what, diff, text)
		}
	case r.exit != 1:
		t.Errorf("%s: %s: exit code %d: %s", k.program.name, what, r.exit, text)
	default:
		k.inspect(t, what, old, new)
		if !strings.Contains(string(text), errno.Error()) || !strings.Contains(string(text), "/") {
			t.Errorf("%s: %s: want a message with the path and the reason: %s", k.program.name, what, text)
		}
	}
	if n > 0 {
		k.next(t, what, tr, new)
	}
	return r.changes, r.exit
}
