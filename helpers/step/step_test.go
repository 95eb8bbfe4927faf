package step

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
)

func TestCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
		why  string
	}{
		{nil, 0, "done"},
		{errors.New("x"), 1, "anything"},
		{fmt.Errorf("y: %w", Refusedf("x")), 5, "wrapped"},
		{errors.Join(errors.New("x"), Refusedf("x")), 5, "one of several"},
		{Invalidf("x"), 3, "the goal state does not fit"},
		{goalstate.Errors{{File: "/f", Problem: "p"}}, 3, "the goal state is broken"},
		{(&Step{}).Late("x", "y"), 4, "out of time"},
	} {
		if got := Code(c.err); got != c.want {
			t.Errorf("%v: code %d; want %d: %s", c.err, got, c.want, c.why)
		}
	}
}

// newStep returns a step that writes its log and what it tells systemd into the two buffers.
func newStep(t *testing.T, slot, root, budget string) (s *Step, log, told *bytes.Buffer, err error) {
	t.Helper()
	log, told = new(bytes.Buffer), new(bytes.Buffer)
	s = &Step{Slot: slot, log: log, journal: true, notify: func(state string) { fmt.Fprintln(told, state) }}
	return s, log, told, s.prepare(root, budget)
}

func TestPrepare(t *testing.T) {
	for _, c := range []struct{ slot, budget, want, why string }{
		{"a", "", "", "no budget of the environment"},
		{"a", "90s", "", "as the generator writes it"},
		{"../b", "", `slot "../b": want 1 to 16 of a-z and 0-9`, "a slot's name becomes part of paths"},
		{"a", "soon", `BERTH_BUDGET="soon": want a positive duration such as 2m`, "no duration"},
		{"a", "-1s", `BERTH_BUDGET="-1s": want a positive duration such as 2m`, "no budget at all"},
	} {
		_, _, _, err := newStep(t, c.slot, t.TempDir(), c.budget)
		if fmt.Sprint(err) != c.want && (err != nil || c.want != "") {
			t.Errorf("slot %q, budget %q: %v; want %q: %s", c.slot, c.budget, err, c.want, c.why)
		}
	}
}

func TestError(t *testing.T) {
	s, log, told, err := newStep(t, "a", t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	s.Error(errors.New("first\nsecond"))
	s.Info("%d files", 3)
	if got, want := log.String(), "<3>first\n<3>second\n<6>3 files\n"; got != want {
		t.Errorf("log %q; want %q: each line needs its priority", got, want)
	}
	if got, want := told.String(), "STATUS=first …\n"; got != want {
		t.Errorf("told systemd %q; want %q: a newline would end the status", got, want)
	}
}

// What is logged may come out of a machine.
func TestLogOfAnything(t *testing.T) {
	s, log, told, err := newStep(t, "a", t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	s.Warn("\x1b]0;title\a\tä\xff\r\n\x00last\u009b31m")
	if got, want := log.String(), "<4>\uFFFD]0;title\uFFFD\tä\uFFFD\uFFFD\n<4>\uFFFDlast\uFFFD31m\n"; got != want {
		t.Errorf("log %q; want %q: nothing may change how a terminal shows the rest", got, want)
	}
	s.Status("\x1b%s", strings.Repeat("ä", 10_000))
	if got, want := told.String(), "STATUS=\uFFFD"+strings.Repeat("ä", 498)+" …\n"; got != want {
		t.Errorf("told systemd %d bytes, %.20q; want %d: it takes 4096 in one message (sd_notify(3))", len(got), got, len(want))
	}
}

func TestGoal(t *testing.T) {
	dir := t.TempDir()
	root, err := file.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, _, _, err := newStep(t, "c", dir, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Goal(); Code(err) != ExitInvalid || !strings.Contains(err.Error(), "there is no goal state") {
		t.Errorf("no goal state: %v", err)
	}
	const text = "[cluster]\nserver = \"https://10.0.0.1:6443\"\ncertificate_authority = \"/ca\"\n" +
		"[kubelet]\nbootstrap_token_file = \"/t\"\n[slot.b]\n[slot.a]\n"
	if _, err := root.Write(file.File{Path: "etc/berth/goal.toml", Mode: 0o644, Content: []byte(text)}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Goal(); Code(err) != ExitInvalid || err.Error() != "slot c is not in the goal state (slots: a, b)" {
		t.Errorf("another slot: %v", err)
	}
	s.Slot = "a"
	state, slot, err := s.Goal()
	if err != nil || slot.Name != "a" || len(state.LastGood) > 0 {
		t.Errorf("slot a: %v, %v", slot, err)
	}

	// Where it is broken, a slot goes on with its last good one, and another one is told what is wrong.
	for _, slot := range []string{"a", "b"} {
		if err := errors.Join(state.Use(root, slot), store.Keep(root, slot, time.Now())); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"etc/berth/goal.toml": text + "x = 1\n", "var/lib/berth/b": "x"} {
		if _, err := root.Write(file.File{Path: name, Mode: 0o600, Content: []byte(content)}); err != nil {
			t.Fatal(err)
		}
	}
	if state, slot, err := s.Goal(); err != nil || slot.Kubelet.BootstrapTokenFile != "/t" || len(state.LastGood) != 1 {
		t.Errorf("broken, slot a: %v, %v", slot, err)
	}
	s.Slot = "b"
	_, _, err = s.Goal()
	mistake, damage, _ := strings.Cut(fmt.Sprint(err), "\n")
	if Code(err) != ExitInvalid || !strings.HasPrefix(mistake, "/etc/berth/goal.toml:8:1: slot.a.x: is not a key") ||
		!strings.HasPrefix(damage, "the last good goal state of slot b is not used: /var/lib/berth/b: ") {
		t.Errorf("broken, slot b: %v", err)
	}
}

func TestWait(t *testing.T) {
	s, _, told, err := newStep(t, "a", t.TempDir(), "1h")
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan struct{}, 1)
	looks := 0
	err = s.Wait(t.Context(), "it", events, func(context.Context) (State, error) {
		looks++
		Wake(events)
		Wake(events) // a second event while one is there is the same
		return State{Done: looks == 3, Seen: fmt.Sprint("look ", looks)}, nil
	})
	if err != nil || looks != 3 {
		t.Errorf("%d looks, %v; want 3: one at once, one for each event", looks, err)
	}
	if got, want := told.String(), "STATUS=waiting for it: look 1\nSTATUS=waiting for it: look 2\n"; got != want {
		t.Errorf("told systemd %q; want %q", got, want)
	}

	looks = 0
	if err := s.Wait(t.Context(), "it", nil, func(context.Context) (State, error) {
		looks++
		return State{Done: looks == 2, Again: time.Nanosecond}, nil
	}); err != nil || looks != 2 {
		t.Errorf("%d looks, %v; want a second one without an event", looks, err)
	}

	// With all that may happen during a pause, one look before it and one behind.
	const pause = 50 * time.Millisecond
	looks, begin := 0, time.Now()
	if err := s.Wait(t.Context(), "it", events, func(context.Context) (State, error) {
		looks++
		go func() {
			for range 100 {
				Wake(events)
			}
		}()
		return State{Done: looks == 2, Pause: pause}, nil
	}); err != nil || looks != 2 || time.Since(begin) < pause {
		t.Errorf("%d looks in %v, %v; want a second one after %v", looks, time.Since(begin), err, pause)
	}

	broken := errors.New("broken")
	if err := s.Wait(t.Context(), "it", nil, func(context.Context) (State, error) { return State{}, broken }); err != broken {
		t.Errorf("%v; want what the check failed with", err)
	}
}

func TestWaitEndsWithTheBudget(t *testing.T) {
	s, _, _, err := newStep(t, "a", t.TempDir(), "7s")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	for why, check := range map[string]func(context.Context) (State, error){
		"a check that saw something":            func(context.Context) (State, error) { return State{Seen: "no socket"}, nil },
		"a check that the end of time stopped":  func(ctx context.Context) (State, error) { return State{}, ctx.Err() },
		"a check that took longer than allowed": func(context.Context) (State, error) { return State{}, errors.New("late") },
	} {
		err := s.Wait(ctx, "it", nil, check)
		if Code(err) != ExitNotReady || !strings.HasPrefix(err.Error(), "it: not within 7s: ") {
			t.Errorf("%s: %v; want exit code 4 and what was waited for", why, err)
		}
	}
}

func TestInBudget(t *testing.T) {
	late, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	failed := errors.New("ask systemd for its units: no answer")
	for _, tt := range []struct {
		ctx  context.Context
		err  error
		want string
		code int
		why  string
	}{
		{t.Context(), nil, "", ExitDone, "done"},
		{late, nil, "", ExitDone, "done at the last moment"},
		{t.Context(), failed, failed.Error(), ExitFailed, "failed in time"},
		{late, failed, "slot a: not within 3s: " + failed.Error(), ExitNotReady, "failed because the time was over"},
		{late, Refusedf("refused"), "refused", ExitRefused, "it knows better"},
	} {
		err := (&Step{Slot: "a", Budget: 3 * time.Second}).inBudget(tt.ctx, tt.err)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != tt.want || Code(err) != tt.code {
			t.Errorf("%s: %q, exit code %d; want %q, %d", tt.why, text, Code(err), tt.want, tt.code)
		}
	}
}
