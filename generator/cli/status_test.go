package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/status"
	"berth/helpers/step"
)

func TestStatusUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"status", "A"}, step.ExitUsage, `slot "A": want 1 to 16 of a-z and 0-9`},
		{[]string{"status", "a", "--json"}, step.ExitUsage, "--json stands behind a slot: options go before slots"},
		{[]string{"status", "--until-ready"}, step.ExitUsage, "want --watch"},
		{[]string{"status", "--nonsense"}, step.ExitUsage, "nonsense"},
		{[]string{"status"}, step.ExitFailed, "systemd does not run on this host"},
		{[]string{"status", "--watch"}, step.ExitFailed, "systemd does not run on this host"},
	} {
		var out, errs bytes.Buffer
		code := Main(append([]string{"berth", "--root", t.TempDir()}, c.args...), &out, &errs)
		if code != c.code || !strings.Contains(errs.String(), c.says) {
			t.Errorf("%v: exit code %d, %q; want %d, %q", c.args, code, errs.String(), c.code, c.says)
		}
	}
}

func TestUTF8Locale(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want bool
	}{
		{map[string]string{"LANG": "C"}, false},
		{map[string]string{"LANG": "en_GB.UTF-8"}, true},
		{map[string]string{"LANG": "de_DE.utf8"}, true},
		{map[string]string{"LANG": "de_DE@euro"}, false},
		{map[string]string{"LANG": "C.UTF-8", "LC_CTYPE": "POSIX"}, false},
		{map[string]string{"LANG": "C", "LC_ALL": "C.UTF-8", "LC_CTYPE": "C"}, true},
		{nil, true},
	} {
		if got := utf8Locale(func(name string) string { return c.env[name] }); got != c.want {
			t.Errorf("%v: %v, want %v", c.env, got, c.want)
		}
	}
}

func TestPicture(t *testing.T) {
	const h, e = home + eraseLine, "\r\n" + eraseLine
	for _, c := range []struct {
		text string
		rows int
		want string
	}{
		{"a\nb\n", 0, h + "a" + e + "b" + e + "" + e + "foot" + eraseBelow},
		{"a\nb\nc\n", 5, h + "a" + e + "b" + e + "c" + e + "" + e + "foot" + eraseBelow},
		{"a\nb\nc\nd\n", 5, h + "a" + e + "b" + e + "(2 more lines)" + e + "" + e + "foot" + eraseBelow},
		{"a\nb\n", 1, h + "(2 more lines)" + eraseBelow},
	} {
		if diff := cmp.Diff(c.want, picture(c.text, "foot", c.rows)); diff != "" {
			t.Errorf("%q in %d rows, -want +got:\n%s", c.text, c.rows, diff)
		}
	}
}

// TestScreen is about a real terminal: it is as it was, however the watch ends.
func TestScreen(t *testing.T) {
	failure := errors.New("test")
	for _, c := range []struct {
		reason string
		end    func(terminal io.Writer, cancel func()) // how it ends; nil: by itself
		want   error
	}{
		{"the key q", func(w io.Writer, _ func()) { _, _ = io.WriteString(w, "xq") }, nil},
		{"Ctrl-C", func(w io.Writer, _ func()) { _, _ = io.WriteString(w, "\x03") }, nil},
		{"a signal", func(_ io.Writer, cancel func()) { cancel() }, nil},
		{"an error", nil, failure},
	} {
		t.Run(c.reason, func(t *testing.T) {
			master, slave, err := pty.Open()
			if err != nil {
				t.Fatal(err)
			}
			defer master.Close()
			if err := pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
				t.Fatal(err)
			}
			before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			drawn := make(chan string)
			go func() {
				var all []byte // until the screen is given back: the keys' reader keeps the terminal open
				for buf := make([]byte, 4096); !bytes.HasSuffix(all, []byte(screenEnd)); {
					n, err := master.Read(buf)
					if err != nil {
						break
					}
					all = append(all, buf[:n]...)
				}
				drawn <- string(all)
			}()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			err = onScreen(ctx, slave, slave, func(ctx context.Context, s *screen) error {
				if err := s.draw(status.Report{Slots: []status.Slot{{Name: "a", Machine: "node-a", State: status.Down}}}); err != nil {
					return err
				}
				if c.end == nil {
					return failure
				}
				c.end(master, cancel)
				<-ctx.Done()
				return nil
			})
			if err != c.want {
				t.Errorf("error %v, want %v", err, c.want)
			}
			after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("the terminal's modes, -before +after:\n%s", diff)
			}
			text := <-drawn
			if !strings.HasPrefix(text, screenBegin) || !strings.HasSuffix(text, screenEnd) || !strings.Contains(text, "slot a") {
				t.Errorf("drawn: %q", text)
			}
		})
	}
}
