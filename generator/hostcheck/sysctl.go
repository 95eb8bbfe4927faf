package hostcheck

import (
	"bytes"
	"errors"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"berth/generator/file"
)

// sysctlDirs are where systemd-sysctl finds its files, the strongest first (sysctl.d(5)).
var sysctlDirs = []string{"etc/sysctl.d", "run/sysctl.d", "usr/local/lib/sysctl.d", "usr/lib/sysctl.d", "lib/sysctl.d"}

// Setting is one line of a sysctl.d file.
type Setting struct {
	Key   string // path below /proc/sys, or a glob of such paths
	Value string
	// Excluded says that the line assigns nothing, but keeps globs from setting Key ("-key").
	Excluded bool
	File     string // on the host
	Line     int    // begins at 1
}

// parseSysctl reads a file of sysctl.d(5). Lines that are no assignments are left out, as systemd-sysctl does.
func parseSysctl(name string, content []byte) []Setting {
	var settings []Setting
	number := 0
	for line := range bytes.Lines(content) {
		number++
		text := strings.TrimSpace(string(line))
		if text == "" || text[0] == '#' || text[0] == ';' {
			continue
		}
		key, value, assigns := strings.Cut(text, "=")
		key, minus := strings.CutPrefix(strings.TrimSpace(key), "-") // of an assignment: its failure does not matter
		if assigns || minus {
			settings = append(settings, Setting{sysctlPath(key), strings.TrimSpace(value), !assigns, name, number})
		}
	}
	return settings
}

// sysctlPath turns a variable's name into its path below /proc/sys: where the first separator is a dot, dots and slashes
// change places.
func sysctlPath(key string) string {
	if i := strings.IndexAny(key, "/."); i >= 0 && key[i] == '.' {
		key = strings.Map(func(r rune) rune {
			switch r {
			case '.':
				return '/'
			case '/':
				return '.'
			}
			return r
		}, key)
	}
	return path.Clean(key)
}

// sysctlName is the usual name of the variable with this path.
func sysctlName(key string) string {
	return strings.Map(func(r rune) rune {
		switch r {
		case '/':
			return '.'
		case '.':
			return '/'
		}
		return r
	}, key)
}

// resolve returns the setting that decides the variable with this path: the last one that names it, wherever it stands, else the
// last glob that matches. A later line with the same key and value leaves the earlier one in its place (systemd's sysctl.c).
func resolve(settings []Setting, key string) (decides Setting, ok bool) {
	last := map[string]Setting{}
	var order []string
	for _, s := range settings {
		if before, again := last[s.Key]; again {
			if before.Value == s.Value && before.Excluded == s.Excluded {
				continue
			}
			order = slices.DeleteFunc(order, func(k string) bool { return k == s.Key })
		}
		last[s.Key] = s
		order = append(order, s.Key)
	}
	if s, named := last[key]; named {
		return s, !s.Excluded
	}
	for _, pattern := range slices.Backward(order) {
		// glob(7) writes a complement with "!", path.Match with "^".
		if match, _ := path.Match(strings.ReplaceAll(pattern, "[!", "[^"), key); match && !last[pattern].Excluded {
			return last[pattern], true
		}
	}
	return Setting{}, false
}

// readSysctl returns all settings of the host in the order in which systemd-sysctl reads them, and the file that holds the place of
// berth's own: "/usr/lib/sysctl.d/90-berth.conf", or one that hides it.
func readSysctl(root *file.Root) (settings []Setting, own string) {
	files := map[string]string{}
	for _, dir := range sysctlDirs {
		list, _ := root.ReadDir(dir)
		for _, e := range list {
			if strings.HasSuffix(e.Name(), ".conf") && files[e.Name()] == "" {
				files[e.Name()] = path.Join(dir, e.Name())
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		// A link to /dev/null hides the name and sets nothing; so does what cannot be read.
		content, _ := root.Read(files[name], textLimit)
		settings = append(settings, parseSysctl("/"+files[name], content)...)
	}
	if f := files[path.Base(ownSysctl)]; f != "" {
		own = "/" + f
	}
	return settings, own
}

// Sysctl is one variable of the kernel that berth needs, and what the host does to it.
type Sysctl struct {
	Key, Want string // Key is the path below /proc/sys
	// Kernel is the value that the kernel has; Known is false where there is no such variable, or no kernel to ask.
	Kernel string
	Known  bool
	// Set is the line that decides the value at boot, nil: none.
	Set *Setting
}

// sysctls returns what berth's own file in /usr/lib asks for.
func sysctls(root *file.Root, running bool) (list []Sysctl, hiddenBy string, err error) {
	content, err := root.Read(ownSysctl, textLimit)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil // reported as a missing file
	} else if err != nil {
		return nil, "", err
	}
	settings, own := readSysctl(root)
	if own != "/"+ownSysctl {
		hiddenBy = own
	}
	for _, want := range parseSysctl("/"+ownSysctl, content) {
		s := Sysctl{Key: want.Key, Want: want.Value}
		if set, ok := resolve(settings, want.Key); ok {
			s.Set = &set
		}
		if running {
			value, err := root.Read(path.Join("proc/sys", want.Key), textLimit)
			s.Kernel, s.Known = strings.Join(strings.Fields(string(value)), " "), err == nil
		}
		list = append(list, s)
	}
	return list, hiddenBy, nil
}
