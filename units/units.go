// Package units holds the files that are the same for every slot of every host: the steps' units, and what a node needs of the
// host's kernel, systemd-tmpfiles and needrestart.
package units

import (
	"embed"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"

	"berth/generator/file"
)

//go:embed *.service *.target modules-load.d needrestart sysctl.d tmpfiles.d
var embedded embed.FS

// Dir is where units belong that a package or an image brings along (systemd.unit(5)), below the root directory.
const Dir = "usr/lib/systemd/system"

// folders says where the files of each folder belong, below the root directory.
var folders = map[string]string{
	".":              Dir,
	"modules-load.d": "usr/lib/modules-load.d",
	"needrestart":    "etc/needrestart/conf.d",
	"sysctl.d":       "usr/lib/sysctl.d",
	"tmpfiles.d":     "usr/lib/tmpfiles.d",
}

// Files returns the files as they are installed, with paths relative to the root directory.
func Files() []file.File {
	var files []file.File
	walk(func(name string, content []byte) {
		files = append(files, file.File{Path: path.Join(folders[path.Dir(name)], path.Base(name)), Mode: 0o644, Content: content})
	})
	file.Sort(files)
	return files
}

var program = regexp.MustCompile(`(?m)=-?/(usr/lib/berth/\S+)`)

// Programs returns the paths, relative to the root directory, of berth's own programs that the units run, sorted.
func Programs() []string {
	seen := make(map[string]bool)
	walk(func(_ string, content []byte) {
		for _, match := range program.FindAllSubmatch(content, -1) {
			seen[string(match[1])] = true
		}
	})
	return slices.Sorted(maps.Keys(seen))
}

// walk calls found for each file. What is embedded can be read.
func walk(found func(name string, content []byte)) {
	err := fs.WalkDir(embedded, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := embedded.ReadFile(name)
		found(name, content)
		return err
	})
	if err != nil {
		panic("this is a bug: " + err.Error())
	}
}
