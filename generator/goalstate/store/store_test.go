package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate"
)

const shared = `[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/ca"
[kubelet]
bootstrap_token_file = "/t"
`

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

var example = Record{Slot: "a", Number: 7, Time: noon, Sources: []goalstate.Source{
	{Path: "/etc/berth/goal.toml", Data: []byte(shared + "[slot.a]\n")},
	{Path: "/etc/berth/goal.toml.d/10 x.toml", Data: []byte("\xef\xbb\xbfboot = \"a\"\r\n# file 3 /x\nabc")}, // no line break at its end
	{Path: "/etc/berth/goal.toml.d/20.toml", Data: []byte("\n")},
}}

func TestEncode(t *testing.T) {
	data := encode(t, example)
	want := magic + "3e97ec4c8bd6c457b43842ddb37351183120e9f15efc9b3d48f898594c23d523\n" + what + "slot a\nnumber 7\nrecorded 2026-03-01T12:00:00Z\n" +
		"file 120 /etc/berth/goal.toml\n" + shared + "[slot.a]\n\n" +
		"file 30 /etc/berth/goal.toml.d/10 x.toml\n\xef\xbb\xbfboot = \"a\"\r\n# file 3 /x\nabc\n" +
		"file 1 /etc/berth/goal.toml.d/20.toml\n\n\n"
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the format has changed, so that no version of berth reads what another one has written:\n%s", diff)
	}
	got, err := Decode("a", data)
	if diff := cmp.Diff(example, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := (Record{Sources: []goalstate.Source{{Data: make([]byte, maxSize)}}}).Encode(); err == nil {
		t.Error("a goal state that could not be read again was encoded")
	}
}

// TestDamage requires that no single fault of a disk, or of a copy, goes unnoticed.
func TestDamage(t *testing.T) {
	data := encode(t, example)
	refused := func(why string, damaged []byte) {
		t.Helper()
		if r, err := Decode("a", damaged); err == nil {
			t.Errorf("%s: read as %v", why, r)
		}
	}
	for i := range data {
		refused(fmt.Sprint("cut off before byte ", i), data[:i])
		refused(fmt.Sprint("without byte ", i), append(bytes.Clone(data[:i]), data[i+1:]...))
		for bit := range 8 {
			flipped := bytes.Clone(data)
			flipped[i] ^= 1 << bit
			refused(fmt.Sprintf("bit %d of byte %d flipped", bit, i), flipped)
		}
	}
	for _, more := range []string{"\n", "\x00", "file 0 /x\n\n", string(data)} {
		refused(fmt.Sprintf("followed by %q", more), append(bytes.Clone(data), more...))
	}
	refused("the rest of a page is empty", append(bytes.Clone(data), make([]byte, 4096)...))
}

// TestHostileRest is about what has the right checksum all the same.
func TestHostileRest(t *testing.T) {
	for why, rest := range map[string]string{
		"nothing":                        "",
		"no slot":                        what,
		"a file that is too long":        what + "slot a\nnumber 1\nrecorded 2026-03-01T12:00:00Z\nfile 9 /x\nabc\n",
		"a file of all memory":           what + "slot a\nnumber 1\nrecorded 2026-03-01T12:00:00Z\nfile 9223372036854775807 /x\nabc\n",
		"a negative length":              what + "slot a\nnumber 1\nrecorded 2026-03-01T12:00:00Z\nfile -1 /x\nabc\n",
		"another way to write a length":  what + "slot a\nnumber 1\nrecorded 2026-03-01T12:00:00Z\nfile 03 /x\nabc\n",
		"another way to write the time":  what + "slot a\nnumber 1\nrecorded 2026-03-01T13:00:00+01:00\nfile 3 /x\nabc\n",
		"a number that is none":          what + "slot a\nnumber x\nrecorded 2026-03-01T12:00:00Z\nfile 3 /x\nabc\n",
		"fields in another order":        what + "number 1\nslot a\nrecorded 2026-03-01T12:00:00Z\nfile 3 /x\nabc\n",
		"no line break behind the files": what + "slot a\nnumber 1\nrecorded 2026-03-01T12:00:00Z\nfile 3 /x\nabc",
	} {
		if r, err := Decode("a", []byte(magic+checksum([]byte(rest))+"\n"+rest)); err == nil {
			t.Errorf("%s: read as %v", why, r)
		}
	}
}

func FuzzDecode(f *testing.F) {
	data, err := example.Encode()
	if err != nil {
		f.Fatal(err)
	}
	_, rest, _ := bytes.Cut(data, []byte("\n"))
	f.Add(rest)
	f.Fuzz(func(t *testing.T, rest []byte) {
		r, err := Decode("a", append([]byte(magic+checksum(rest)+"\n"), rest...))
		if err == nil && !bytes.HasSuffix(encode(t, r), rest) {
			t.Errorf("%q is read as %v", rest, r)
		}
	})
}

func TestLoad(t *testing.T) {
	h := newHost(t)
	h.goal(shared + "boot = \"a\"\n" + "[slot.a]\n[slot.b]\n") // boot belongs to kubelet here
	state, err := h.load()
	if err == nil || state.LastGood != nil || !state.Goal.Partial || !state.Unseen {
		t.Fatalf("broken, and nothing in store: %+v, %v", state, err)
	}
	must(t, os.MkdirAll(h.path(looked), 0o755))
	if state, _ = h.load(); state.Unseen {
		t.Error("looked in vain, and would look again")
	}

	first := "boot = \"a\"\n" + shared + "[slot.a]\n[slot.b]\n"
	h.goal(first)
	h.record("a", noon)
	h.goal(first + "# later\n")
	h.record("b", noon.Add(-24*time.Hour)) // the clock has jumped
	h.goal(first + "[slot.b.x]\n")
	state, err = h.load()
	if err == nil || state.Goal.Partial || state.Goal.Boot != "a" || len(state.LastGood) != 2 || state.Unseen || len(state.Refused) > 0 {
		t.Fatalf("both slots go on: %+v, %v", state, err)
	}
	if want := "these slots go on with their last good one: a (recorded 2026-03-01T12:00:00Z), b (recorded 2026-02-28T12:00:00Z)"; !strings.HasSuffix(state.Notice(), want) {
		t.Errorf("notice %q, want …%s", state.Notice(), want)
	}
	if a, b := state.Digest("a"), state.Digest("b"); a != Digest([]goalstate.Source{{Path: "/etc/berth/goal.toml", Data: []byte(first)}}) || a == b {
		t.Errorf("digests %s and %s: want those of what each slot has in store", a, b)
	}

	// The newest record says which slots there are, and which one starts at boot, whatever the clock says.
	h.goal(shared + "[slot.b]\n[slot.c]\n")
	h.record("b", noon.Add(-48*time.Hour))
	if _, err := os.Lstat(h.path(Dir + "/a")); err == nil {
		t.Error("what is in store of a slot that was taken out stays")
	}
	h.goal(first + "[")
	state, _ = h.load()
	if names := strings.Join(state.Goal.SlotNames(), " "); names != "b" || state.Goal.Boot != "" {
		t.Errorf("slots %s, boot %q; want b, which alone has been ready, and none", names, state.Goal.Boot)
	}

	// A valid goal state counts, and so does that there is none.
	h.goal(first)
	if state, err = h.load(); err != nil || state.LastGood != nil || state.Goal.Slots["a"] == nil {
		t.Errorf("valid: %+v, %v", state, err)
	}
	must(t, os.Remove(h.path("etc/berth/goal.toml")))
	if state, err = h.load(); err != goalstate.ErrNone || state.LastGood != nil || state.Goal != nil {
		t.Errorf("none: %+v, %v", state, err)
	}
}

// TestOlderRecordOfATakenOutSlot is about a record that could not be removed.
func TestOlderRecordOfATakenOutSlot(t *testing.T) {
	h := newHost(t)
	h.goal("boot = \"a\"\n" + shared + "[slot.a]\n[slot.b]\n")
	h.record("a", noon)
	kept, err := os.ReadFile(h.path(Dir + "/a"))
	must(t, err)
	h.goal(shared + "[slot.b]\n")
	h.record("b", noon)
	must(t, os.WriteFile(h.path(Dir+"/a"), kept, 0o600))
	h.goal("x = 1")
	if state, _ := h.load(); strings.Join(state.Goal.SlotNames(), " ") != "b" || state.Goal.Boot != "" {
		t.Errorf("%+v; want slot b alone, and none that starts at boot", state.Goal)
	}
}

func TestRefused(t *testing.T) {
	for _, tt := range []struct {
		why  string
		make func(h host, name string) error
		want string
	}{
		{"a flipped bit", func(h host, name string) error {
			data, err := os.ReadFile(name)
			data[len(data)/2] ^= 4
			return errors.Join(err, os.WriteFile(name, data, 0o600))
		}, "it is damaged: its checksum is another one"},
		{"cut short", func(h host, name string) error { return os.Truncate(name, 500) }, "it is damaged: its checksum is another one"},
		{"empty, as some file systems leave a file after a power failure", func(h host, name string) error { return os.Truncate(name, 0) },
			"it does not begin as a stored goal state of this version of berth does"},
		{"larger than any", func(h host, name string) error { return os.Truncate(name, maxSize+1) },
			"\"var/lib/berth/a\" beneath ROOT: refused: it is larger than 4194304 bytes; want a smaller file"},
		{"the one of another slot", func(h host, name string) error { return os.Rename(filepath.Dir(name)+"/b", name) },
			"it is the one of slot b"},
		{"a FIFO", func(h host, name string) error { return errors.Join(os.Remove(name), unix.Mkfifo(name, 0o600)) },
			"it is not a regular file"},
		{"a link, even to a good one", func(h host, name string) error {
			return errors.Join(os.Rename(name, h.path("x")), os.Symlink("/x", name))
		}, "it is not a regular file"},
		{"a folder", func(h host, name string) error { return errors.Join(os.Remove(name), os.Mkdir(name, 0o700)) },
			"it is not a regular file"},
		{"writable for every user", func(h host, name string) error { return os.Chmod(name, 0o666) },
			"/var/lib/berth/a may be written by every user: want mode 0700 of the folder, 0600 of a file"},
		{"another user's", func(h host, name string) error { return os.Chown(name, 4711, 4711) },
			fmt.Sprintf("/var/lib/berth/a belongs to user 4711: want %d", os.Geteuid())},
		{"what this version does not take any more", func(h host, name string) error {
			r := example
			r.Sources = []goalstate.Source{{Path: "/etc/berth/goal.toml", Data: []byte(shared + "[slot.a]\nold = 1\n")}}
			return os.WriteFile(name, encode(h.t, r), 0o600)
		}, "this version of berth does not take it: /etc/berth/goal.toml:7:1: slot.a.old: is not a key of the goal state"},
		{"without the slot", func(h host, name string) error {
			r := example
			r.Sources = []goalstate.Source{{Path: "/etc/berth/goal.toml", Data: []byte(shared + "[slot.b]\n")}}
			return os.WriteFile(name, encode(h.t, r), 0o600)
		}, "the slot is not in it"},
	} {
		t.Run(tt.why, func(t *testing.T) {
			h := newHost(t)
			h.goal(shared + "[slot.a]\n[slot.b]\n")
			h.record("a", noon)
			h.record("b", noon)
			h.goal("x = 1")
			if state, _ := h.load(); len(state.LastGood) != 2 {
				t.Fatalf("before: %+v", state)
			}
			err := tt.make(h, h.path(Dir+"/a"))
			if os.IsPermission(err) {
				t.Skip("needs root: ", err)
			}
			must(t, err)
			state, _ := h.load()
			if _, used := state.LastGood["a"]; used || state.Goal.Slots["a"] != nil {
				t.Error("it is used")
			}
			got := strings.ReplaceAll(fmt.Sprint(state.Refusals()), h.Name(), "ROOT")
			if !strings.HasPrefix(got, "the last good goal state of slot a is not used: /var/lib/berth/a: "+tt.want) {
				t.Errorf("said: %s\nwant …%s", got, tt.want)
			}
			if _, other := state.LastGood["b"]; other == (tt.why == "the one of another slot") {
				t.Errorf("slot b: %+v", state.LastGood)
			}
			// The next start with a valid goal state makes it good again, whatever is there; a FIFO or folder it leaves to people.
			h.goal(shared + "[slot.a]\n[slot.b]\n")
			state, err = h.load()
			must(t, err)
			err = errors.Join(state.Use(h.Root, "a"), Keep(h.Root, "a", noon))
			if special := tt.want == "it is not a regular file" && !strings.HasPrefix(tt.why, "a link"); (err != nil) != special {
				t.Errorf("recorded anew: %v", err)
			}
		})
	}
}

func TestFolder(t *testing.T) {
	h := newHost(t)
	h.goal(shared + "[slot.a]\n")
	h.record("a", noon)
	must(t, os.WriteFile(h.path(Dir+"/.a4711"), nil, 0o600)) // of a record that was interrupted
	for name, want := range map[string]os.FileMode{Dir: 0o700 | os.ModeDir, Dir + "/a": 0o600} {
		if info, err := os.Stat(h.path(name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode(), err, want)
		}
	}
	h.goal("x = 1")
	if state, _ := h.load(); len(state.LastGood) != 1 || len(state.Refused) > 0 {
		t.Errorf("%+v", state)
	}
	must(t, os.Chmod(h.path(Dir), 0o777))
	state, _ := h.load()
	if want := "no last good goal state is used: /var/lib/berth may be written by every user"; len(state.LastGood) > 0 || !strings.HasPrefix(fmt.Sprint(state.Refusals()), want) {
		t.Errorf("a folder that everyone may write: %+v", state)
	}
}

// TestUse starts a slot with a goal state, changes the latter, and lets the slot become ready.
func TestUse(t *testing.T) {
	const goal = shared + "[slot.a]\n"
	for _, tt := range []struct {
		why, before, used, now string
		unchanged              bool
		kept                   string // where it is kept although it was changed, as it was just afterwards
	}{
		{"nothing has changed", "", goal, goal, true, goal},
		{"a later one", goal, goal + "# 2\n", goal + "# 2\n", true, goal + "# 2\n"},
		{"changed", goal, goal + "# 2\n", goal + "# 3\n", false, goal + "# 2\n"},
		{"broken", "", goal, goal + "x = 1\n", false, goal},
		{"not a goal state any more", "", goal, "\x00", false, goal},
		{"taken away", "", goal, "", false, goal},
		{"the slot was taken out", "", goal, shared + "[slot.b]\n", false, goal},
		{"mended while the slot started with the last good one", goal, goal + "x = 1\n", goal + "# mended\n", false, goal},
	} {
		t.Run(tt.why, func(t *testing.T) {
			h := newHost(t)
			if _, err := Unchanged(h.Root, "a"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("before the first start: %v", err)
			}
			if err := Keep(h.Root, "a", noon); fmt.Sprint(err) != "the goal state is not recorded: the slot has not been started since the host booted" {
				t.Errorf("kept before the first start: %v", err)
			}
			if tt.before != "" {
				h.goal(tt.before)
				h.record("a", noon)
			}
			h.goal(tt.used)
			state, _ := h.load()
			must(t, state.Use(h.Root, "a"))
			if used, err := Used(h.Root, "a"); err != nil || Digest(used.Sources) != state.Digest("a") {
				t.Errorf("used: %+v, %v", used, err)
			}
			h.goal(tt.now)
			if tt.now == "" {
				must(t, os.Remove(h.path("etc/berth/goal.toml")))
			}
			if unchanged, err := Unchanged(h.Root, "a"); err != nil || unchanged != tt.unchanged {
				t.Errorf("unchanged: %v, %v", unchanged, err)
			}
			// What was ready, and is changed before it is kept, is kept as it was.
			must(t, Keep(h.Root, "a", noon))
			stored, refused := Stored(h.Root)
			if got := stored["a"]; len(refused) > 0 || len(got.Sources) != 1 || string(got.Sources[0].Data) != tt.kept {
				t.Errorf("in store: %+v, %v", got, refused)
			}
			if info, err := os.Stat(h.path(usedDir + "/a")); err != nil || info.Mode() != 0o600 {
				t.Errorf("mode %v, %v; it may hold a secret", info.Mode(), err)
			}
		})
	}
}

func TestKeepWithoutTheSlot(t *testing.T) {
	h := newHost(t)
	h.goal(shared + "[slot.b]\n")
	state, err := h.load()
	must(t, err)
	must(t, state.Use(h.Root, "a"))
	if err := Keep(h.Root, "a", noon); err == nil {
		t.Error("kept for a slot that is not in it")
	}
}

type host struct {
	*file.Root
	t *testing.T
}

func newHost(t *testing.T) host {
	t.Helper()
	root, err := file.OpenRoot(t.TempDir())
	must(t, err)
	t.Cleanup(func() { root.Close() })
	return host{root, t}
}

func (h host) path(name string) string { return filepath.Join(h.Name(), name) }

func (h host) goal(text string) {
	h.t.Helper()
	_, err := h.Write(file.File{Path: "etc/berth/goal.toml", Mode: 0o644, Content: []byte(text)})
	must(h.t, err)
}

func (h host) load() (State, error) { return Load(h.Root) }

func (h host) record(slot string, now time.Time) {
	h.t.Helper()
	state, err := h.load()
	must(h.t, err)
	must(h.t, errors.Join(state.Use(h.Root, slot), Keep(h.Root, slot, now)))
}

func encode(t *testing.T, r Record) []byte {
	t.Helper()
	data, err := r.Encode()
	must(t, err)
	return data
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
