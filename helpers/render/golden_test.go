package render

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/facts"
)

var update = flag.Bool("update", false, "rewrite the expected trees")

// cases is the folder of golden cases. Each is a folder with the goal state (etc/berth/…, slot a), the facts
// (facts.toml), and what is expected: in want/ the files below the host's and the machine's root, and in want/list all
// that is not a file's content.
const cases = "../../testdata/render"

type input struct {
	Host    facts.Host
	Machine facts.Machine
	Secrets Secrets
}

func TestGolden(t *testing.T) {
	dirs, err := os.ReadDir(cases)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		t.Run(d.Name(), func(t *testing.T) {
			dir := filepath.Join(cases, d.Name())
			got := renderCase(t, dir)
			want := filepath.Join(dir, "want")
			if *update {
				writeTree(t, want, got)
			}
			if diff := cmp.Diff(readTree(t, want), got); diff != "" {
				t.Errorf("-want +got (rewrite with -update):\n%s", diff)
			}
			for range 100 {
				// Map order is random each time.
				if diff := cmp.Diff(got, renderCase(t, dir)); diff != "" {
					t.Fatalf("rendered again:\n%s", diff)
				}
			}
		})
	}
}

// renderCase returns all that a case renders, by its path below want/.
func renderCase(t *testing.T, dir string) map[string]string {
	t.Helper()
	goal := load(t, dir)
	var in input
	meta, err := toml.DecodeFile(filepath.Join(dir, "facts.toml"), &in)
	if err != nil || len(meta.Undecoded()) > 0 {
		t.Fatal(err, meta.Undecoded())
	}
	slot := goal.Slots["a"]
	got, list := map[string]string{}, new(strings.Builder)
	collect := func(root string, out Output, err error) {
		if err != nil {
			fmt.Fprintf(list, "error: %s\n", strings.ReplaceAll(err.Error(), "\n", "\nerror: "))
		}
		for _, f := range out.Files {
			fmt.Fprintf(list, "%v %s/%s", f.Mode, root, f.Path)
			switch {
			case f.Mode.IsRegular():
				got[root+"/"+f.Path] = string(f.Content)
			case f.Mode&fs.ModeSymlink != 0:
				fmt.Fprintf(list, " -> %s", f.Content)
			}
			if f.Secret {
				fmt.Fprint(list, " (secret)")
			}
			fmt.Fprintln(list)
		}
		for _, name := range out.Remove {
			fmt.Fprintf(list, "remove %s/%s\n", root, name)
		}
		for _, w := range out.Warnings {
			fmt.Fprintf(list, "warning: %s\n", w)
		}
	}
	out, err := NSpawn(slot, goal.Sources, in.Host)
	collect("host", out, err)
	out, err = Containerd(slot, goal.Sources, in.Host, in.Machine)
	collect("machine", out, err)
	out, err = Kubelet(slot, goal.Sources, in.Host, in.Machine, in.Secrets)
	collect("machine", out, err)
	got["list"] = list.String()
	return got
}

// load reads the goal state of a case.
func load(t *testing.T, dir string) *goalstate.GoalState {
	t.Helper()
	root, err := file.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	goal, err := goalstate.Load(root)
	if err != nil {
		t.Fatal(err)
	}
	return goal
}

func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		tree[strings.TrimPrefix(p, dir+"/")] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func writeTree(t *testing.T, dir string, tree map[string]string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for name, content := range tree {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHeaders makes sure that every generated file says what made it and from what.
func TestHeaders(t *testing.T) {
	for _, dir := range []string{"full", "exec"} {
		for name, content := range renderCase(t, filepath.Join(cases, dir)) {
			lines := strings.SplitN(content, "\n", 3)
			if name != "list" && (!strings.HasPrefix(lines[0], facts.Mark+"'s render-config from /etc/berth/goal.toml") ||
				!strings.Contains(lines[1], "systemctl restart node@a.service")) {
				t.Errorf("%s begins with %q", name, lines[:2])
			}
		}
	}
}
