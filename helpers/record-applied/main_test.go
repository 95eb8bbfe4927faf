package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate/store"
)

const goal = "[cluster]\nserver = \"https://10.0.0.1:6443\"\ncertificate_authority = \"/ca\"\n[kubelet]\nbootstrap_token_file = \"/t\"\n[slot.a]\n"

// TestRecord starts a slot with a goal state, changes the latter, and lets the slot become ready.
func TestRecord(t *testing.T) {
	for _, tt := range []struct {
		why, before, used, now string
		fails                  bool
		want                   string // that is in store then
	}{
		{why: "nothing has changed", used: goal, now: goal, want: goal},
		{why: "a later one", before: goal, used: goal + "# 2\n", now: goal + "# 2\n", want: goal + "# 2\n"},
		{why: "changed while the slot started", before: goal, used: goal + "# 2\n", now: goal + "# 3\n", want: goal},
		{why: "broken while the slot started", used: goal, now: goal + "x = 1\n"},
		{why: "broken while the slot started, which was ready before", before: goal, used: goal + "# 2\n", now: goal + "x = 1\n", want: goal},
		{why: "taken away while the slot started", used: goal, now: ""},
		{why: "the slot taken out while it started", used: goal, now: strings.Replace(goal, "slot.a", "slot.b", 1)},
		{why: "started with the last good one", before: goal, used: goal + "x = 1\n", now: goal + "x = 1\n", want: goal},
		{why: "mended while the slot started with the last good one", before: goal, used: goal + "x = 1\n", now: goal + "# mended\n", want: goal},
		{why: "not started in this boot", now: goal, fails: true},
	} {
		t.Run(tt.why, func(t *testing.T) {
			dir := t.TempDir()
			root, err := file.OpenRoot(dir)
			must(t, err)
			defer root.Close()
			now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
			write := func(text string) {
				if text == "" {
					must(t, root.Remove("etc/berth/goal.toml"))
					return
				}
				_, err := root.Write(file.File{Path: "etc/berth/goal.toml", Mode: 0o644, Content: []byte(text)})
				must(t, err)
			}
			if tt.before != "" {
				write(tt.before)
				state, err := store.Load(root)
				must(t, err)
				must(t, state.Record(root, "a", now))
			}
			if tt.used != "" {
				write(tt.used)
				state, _ := store.Load(root)
				must(t, state.Use(root, "a"))
			}
			write(tt.now)
			result, err := record(root, "a", now)
			if (err != nil) != tt.fails || !tt.fails && result.refused != (tt.used != tt.now) {
				t.Errorf("%+v, error %v", result, err)
			}
			stored, _ := store.Stored(root)
			got := ""
			if r, ok := stored["a"]; ok {
				got = string(r.Sources[0].Data)
			}
			if got != tt.want {
				t.Errorf("in store is %q, want %q", got, tt.want)
			}
			if entries, _ := os.ReadDir(filepath.Join(dir, store.Dir)); len(entries) > 1 {
				t.Errorf("in store are %v", entries)
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
