package cli

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const bakeGoal = `boot = "a"
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"
[slot.a]
`

func TestBake(t *testing.T) {
	for _, tt := range []struct {
		why            string
		args           []string
		env            map[string]string
		code           int
		stdout, stderr string
	}{
		{"no image", []string{"bake"}, nil, 2, "", "want --root DIRECTORY"},
		{"the root of all commands", []string{"--root", "IMAGE", "bake", "--generated-only"}, nil, 0, "written, 0 right already", ""},
		{"the root of the environment", []string{"bake", "--generated-only"}, map[string]string{"BERTH_ROOT": "IMAGE"}, 0, "wrote /usr/lib/systemd/system/node@a.service\n", ""},
		{"the command's own root wins", []string{"--root", "/absent", "bake", "--root", "IMAGE", "--generated-only"}, nil, 0, "written, 0 right already", ""},
		{"no such folder", []string{"bake", "--root", "/absent"}, nil, 1, "", "/absent"},
		{"an argument", []string{"bake", "--root", "IMAGE", "goal.toml"}, nil, 2, "", "goal.toml: want no arguments"},
		{"contrary flags", []string{"bake", "--root", "IMAGE", "--generated-only", "--with-programs"}, nil, 2, "", "want one of them"},
		{"no such flag", []string{"bake", "--rot", "IMAGE"}, nil, 2, "", "-rot"},
		{"a time that is none", []string{"bake", "--root", "IMAGE"}, map[string]string{"SOURCE_DATE_EPOCH": "today"}, 2, "", `SOURCE_DATE_EPOCH="today": want seconds since 1970`},
		{"missing programs", []string{"bake", "--root", "IMAGE"}, nil, 1, "", "the image lacks programs that the units run"},
		{"programs that are not beside berth", []string{"bake", "--root", "IMAGE", "--with-programs"}, nil, 1, "", "programs to copy that are not where berth is"},
	} {
		t.Run(tt.why, func(t *testing.T) {
			image := imageWith(t, bakeGoal)
			for name, value := range tt.env {
				t.Setenv(name, strings.Replace(value, "IMAGE", image, 1))
			}
			args := []string{"berth"}
			for _, a := range tt.args {
				args = append(args, strings.Replace(a, "IMAGE", image, 1))
			}
			var stdout, stderr bytes.Buffer
			if code := Main(args, &stdout, &stderr); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(stdout.String(), tt.stdout) || tt.stdout == "" && stdout.Len() > 0 {
				t.Errorf("standard output %q, want %q", &stdout, tt.stdout)
			}
			if !strings.Contains(stderr.String(), tt.stderr) || tt.stderr == "" && stderr.Len() > 0 {
				t.Errorf("standard error %q, want %q", &stderr, tt.stderr)
			}
		})
	}
}

func TestBakeInvalid(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := Main([]string{"berth", "bake", "--root", imageWith(t, "boot = 1\n")}, &stdout, &stderr); code != 3 || !strings.Contains(stderr.String(), "/etc/berth/goal.toml:1:8: boot: ") {
		t.Errorf("exit code %d, %q; want 3 and the place", code, &stderr)
	}
}

// TestBakeJSON pins the keys, which other programs rely on.
func TestBakeJSON(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := Main([]string{"berth", "bake", "--json", "--generated-only", "--root", imageWith(t, bakeGoal)}, &stdout, &stderr); code != 0 {
		t.Fatalf("exit code %d: %s", code, &stderr)
	}
	var got map[string]any
	if err := json.Unmarshal(stdout.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := []string{"boot", "goal", "removed", "right", "slots", "warnings", "wrote"}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(got))); diff != "" {
		t.Errorf("keys, -want +got:\n%s", diff)
	}
	for _, key := range []string{"removed", "warnings"} {
		if list, ok := got[key].([]any); !ok || len(list) > 0 {
			t.Errorf("%s is %v, want an empty list", key, got[key])
		}
	}
}

// imageWith returns an image with this goal state.
func imageWith(t *testing.T, goal string) string {
	t.Helper()
	image := t.TempDir()
	dir := filepath.Join(image, "etc/berth")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "goal.toml"), []byte(goal), 0o644); err != nil {
		t.Fatal(err)
	}
	return image
}
