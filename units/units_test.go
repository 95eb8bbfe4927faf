package units

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestFiles requires that each file of this folder is embedded, and installed somewhere, but for what an image does not get: completions
// and what packages are made of. That install.sh puts them into the same places is seen in the lab.
func TestFiles(t *testing.T) {
	want := map[string]string{}
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if name == "completion" || name == "package" {
			return fs.SkipDir
		}
		if err != nil || d.IsDir() || strings.HasSuffix(name, ".go") {
			return err
		}
		content, err := os.ReadFile(name)
		want[path.Base(path.Dir(name))+"/"+d.Name()] = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(Files()); n != len(want) || n < 10 {
		t.Errorf("%d files are installed of %d", n, len(want))
	}
	for _, f := range Files() {
		if !strings.HasPrefix(f.Path, "usr/lib/") && f.Path != "etc/needrestart/conf.d/50-berth.conf" {
			t.Errorf("%s is installed to nowhere", f.Path)
		}
		dir := path.Base(path.Dir(f.Path))
		switch dir {
		case "system":
			dir = "."
		case "conf.d":
			dir = "needrestart"
		}
		if diff := cmp.Diff(want[dir+"/"+path.Base(f.Path)], string(f.Content)); diff != "" || f.Mode != 0o644 {
			t.Errorf("%s %v:\n%s", f.Path, f.Mode, diff)
		}
	}
}

// TestPrograms requires that each program of helpers/ is run by a unit, and no other.
func TestPrograms(t *testing.T) {
	mains, err := filepath.Glob("../helpers/*/main.go")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range mains {
		want = append(want, "usr/lib/berth/"+path.Base(path.Dir(m)))
	}
	if diff := cmp.Diff(want, Programs()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
