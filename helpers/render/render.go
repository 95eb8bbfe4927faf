// Package render makes the files of a slot that depend on its host and on the root file system of its machine: the
// .nspawn file, and the configuration of containerd and of kubelet. It is pure: the same goal state and facts give the
// same bytes.
package render

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/unit"
	"berth/helpers/facts"
	"berth/templates"
)

// Output is what one render step is to write and to remove below its root.
type Output struct {
	// Files are sorted by path.
	Files []file.File
	// Remove are paths, sorted, that berth or a distribution once made and that must not be there; what is missing is
	// fine.
	Remove []string
	// Warnings are for the step's log, one line each.
	Warnings []string
}

// stack is the target inside the machine that containerd and kubelet are enabled in.
const stack = "node-stack.target"

// units is where systemd in the machine looks first for what an administrator has made.
const units = "etc/systemd/system"

// renderer collects an Output and all that is wrong on the way.
type renderer struct {
	slot    *goalstate.Slot
	sources []string
	out     Output
	errs    []error
}

// errorf adds an error, one line of the form "key: what is wrong: what would be right".
func (r *renderer) errorf(format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf(format, args...))
}

func (r *renderer) warnf(format string, args ...any) {
	r.out.Warnings = append(r.out.Warnings, fmt.Sprintf(format, args...))
}

// add fills the template of a file. An empty map will do for one that takes nothing but the header's values.
func (r *renderer) add(name, template string, values map[string]string) {
	values["SOURCES"], values["SLOT"] = unit.Sources(r.sources), r.slot.Name
	r.out.Files = append(r.out.Files, file.File{Path: name, Mode: 0o644, Content: templates.Fill(template, values)})
}

// secret is add for what only root may read.
func (r *renderer) secret(name, template string, values map[string]string) {
	r.add(name, template, values)
	f := &r.out.Files[len(r.out.Files)-1]
	f.Mode, f.Secret = 0o600, true
}

func (r *renderer) folder(name string, mode fs.FileMode) {
	r.out.Files = append(r.out.Files, file.File{Path: name, Mode: fs.ModeDir | mode})
}

// enable adds the link that "systemctl enable" would make for a service that is WantedBy= the node stack.
func (r *renderer) enable(service string) {
	r.out.Files = append(r.out.Files, file.File{
		Path:    path.Join(units, stack+".wants", service),
		Mode:    fs.ModeSymlink | 0o777,
		Content: []byte("/" + path.Join(units, service)),
	})
}

// disable removes the links that start a service at the machine's boot, before the host has made the machine ready. A
// distribution's package makes such a link when it is installed.
func (r *renderer) disable(service string, m facts.Machine) {
	for _, link := range m.Wants {
		if path.Base(link) == service {
			r.out.Remove = append(r.out.Remove, link)
		}
	}
}

// binary checks a program inside the machine that the goal state names with key.
func (r *renderer) binary(key, name string, b facts.Binary, m facts.Machine) {
	if b.Problem != "" {
		r.errorf("%s: %s in %s %s: install it there, or set %[1]s to where it is", key, name, m.Root, b.Problem)
	}
}

// command returns the ExecStart= of a program that the goal state names with key. Systemd takes no such name with a quote or
// backslash in it, however it is escaped, nor, seen in 262 but not in 257, one with a glob (config_parse_exec(), string_is_safe()).
func (r *renderer) command(key, program string, args ...string) string {
	if strings.ContainsAny(program, "\"'\\*?[") {
		r.errorf("%s: %s: systemd runs no program with a quote, a backslash or one of *?[ in its path: rename it", key, program)
	}
	return unit.Command(program, args...)
}

// done ends a rendering: what could not be rendered whole is not handed out at all.
func (r *renderer) done() (Output, error) {
	if len(r.errs) > 0 {
		return Output{}, errors.Join(r.errs...)
	}
	file.Sort(r.out.Files)
	slices.Sort(r.out.Remove)
	return r.out, nil
}

// merge puts over's values over base's: tables merge, everything else replaces.
func merge(base, over map[string]any) {
	for key, value := range over {
		b, isTable := base[key].(map[string]any)
		o, overTable := value.(map[string]any)
		if isTable && overTable {
			merge(b, o)
		} else {
			base[key] = value
		}
	}
}

// at returns the table at a path of keys, nil where there is none.
func at(table map[string]any, keys ...string) map[string]any {
	for _, key := range keys {
		table, _ = table[key].(map[string]any)
	}
	return table
}

// encode writes TOML. The tables are built from the goal state's TOML and from our own literals: there is nothing in them
// that could not be written.
func encode(table map[string]any) string {
	var b bytes.Buffer
	if err := toml.NewEncoder(&b).Encode(table); err != nil {
		panic(fmt.Sprintf("this is a bug: %v", err))
	}
	return strings.TrimSuffix(b.String(), "\n")
}
