package main

import (
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
)

var update = flag.Bool("update", false, "rewrite the expected trees")

// cases is the folder of golden cases. Each is a folder with the host's files (in/), the units that are expected of it
// (out/; not there: none), and what is written to the standard error stream (stderr; not there: nothing).
const cases = "../testdata/generator"

func TestGolden(t *testing.T) {
	dirs, err := os.ReadDir(cases)
	must(t, err)
	for _, d := range dirs {
		t.Run(d.Name(), func(t *testing.T) {
			dir := filepath.Join(cases, d.Name())
			root, err := file.OpenRoot(filepath.Join(dir, "in"))
			must(t, err)
			defer root.Close()
			files, unitsErr := units(root)
			stderr := ""
			if unitsErr != nil {
				stderr = unitsErr.Error() + "\n"
			}
			out, errFile := filepath.Join(dir, "out"), filepath.Join(dir, "stderr")
			if *update {
				must(t, os.RemoveAll(out))
				must(t, os.RemoveAll(errFile))
				if len(files) > 0 {
					must(t, os.Mkdir(out, 0o755))
				}
				if stderr != "" {
					must(t, os.WriteFile(errFile, []byte(stderr), 0o644))
				}
				_ = generate(root, out) // the same error again
			}

			got := t.TempDir()
			if err := generate(root, got); (err == nil) != (unitsErr == nil) {
				t.Errorf("generate: %v, units: %v", err, unitsErr)
			}
			if diff := cmp.Diff(readTree(t, out), readTree(t, got)); diff != "" {
				t.Errorf("-want +got (rewrite with -update):\n%s", diff)
			}
			want, err := os.ReadFile(errFile)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), stderr); diff != "" {
				t.Errorf("standard error, -want +got (rewrite with -update):\n%s", diff)
			}
			for range 100 {
				// Map order is random each time.
				again, _ := units(root)
				if !reflect.DeepEqual(files, again) { // cmp takes a hundred times as long
					t.Fatalf("planned again:\n%s", cmp.Diff(files, again))
				}
			}
		})
	}
}

// readTree returns the files and links below dir by their path; a link as an arrow and its target. No dir is an empty tree.
func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		if d.Type() == fs.ModeSymlink {
			target, err := os.Readlink(p)
			tree[name] = "-> " + target
			return err
		}
		b, err := os.ReadFile(p)
		tree[name] = string(b)
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return tree
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
