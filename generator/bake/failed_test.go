package bake

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/generator/file"
)

// TestNothingWritten tells of a file that cannot be written once, and not again that it is not there.
func TestNothingWritten(t *testing.T) {
	dir := t.TempDir()
	goal := filepath.Join(t.TempDir(), "goal.toml")
	text := "[cluster]\nserver = \"https://10.0.0.1:6443\"\ncertificate_authority = \"/ca.crt\"\n" +
		"[kubelet]\nbootstrap_token_file = \"/token\"\n[slot.a]\n"
	if err := os.MkdirAll(filepath.Join(dir, "usr/lib/systemd"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(t.TempDir(), filepath.Join(dir, "usr/lib/systemd/system")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goal, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	root, err := file.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_, err = Bake(root, Options{Goal: []string{goal}, GeneratedOnly: true, Epoch: time.Unix(1, 0)})
	if err == nil {
		t.Fatal("no error")
	}
	for line := range strings.Lines(err.Error()) {
		if !strings.Contains(line, "is a link to") {
			t.Errorf("%s", line)
		}
	}
}
