// Package templates holds the text of every file that berth makes for a slot. A template is the file itself with
// @NAME@ where a value goes in; it has no logic. A placeholder that stands alone on its line takes any number of whole
// lines, none included.
package templates

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed *.in
var files embed.FS

// LibDir is the folder of the steps' programs on the host, which units name; install.sh sets it when it links.
var LibDir = "/usr/lib/berth"

// Fill returns the template with each @NAME@ replaced by values["NAME"], which the caller has escaped for the
// template's language. A placeholder without a value, and a value without a placeholder, is our own bug and panics.
func Fill(name string, values map[string]string) []byte {
	text, err := files.ReadFile(name + ".in")
	if err != nil {
		panic(fmt.Sprintf("this is a bug: no template %q", name))
	}
	size := len(text)
	for _, value := range values {
		size += len(value)
	}
	out := make([]byte, 0, size)
	used := make(map[string]bool, len(values))
	for line := range strings.Lines(string(text)) {
		out = fillLine(out, name, line, values, used)
	}
	for key := range values {
		if !used[key] {
			panic(fmt.Sprintf("this is a bug: template %q has no @%s@", name, key))
		}
	}
	return out
}

// fillLine appends a line of a template to out.
func fillLine(out []byte, name, line string, values map[string]string, used map[string]bool) []byte {
	rest := line
	for {
		before, key, after, ok := cutPlaceholder(rest)
		if !ok {
			return append(out, rest...)
		}
		value, have := values[key]
		if !have {
			panic(fmt.Sprintf("this is a bug: template %q: no value for @%s@", name, key))
		}
		used[key] = true
		if rest == line && before == "" && after == "\n" { // alone on its line: whole lines
			out = append(out, value...)
			if value != "" && !strings.HasSuffix(value, "\n") {
				out = append(out, '\n')
			}
			return out
		}
		out = append(out, before...)
		out = append(out, value...)
		rest = after
	}
}

// cutPlaceholder finds the first @NAME@, NAME being upper-case letters and underscores: "node@.service" is none.
func cutPlaceholder(s string) (before, key, after string, ok bool) {
	for from := 0; ; {
		i := strings.IndexByte(s[from:], '@')
		if i < 0 {
			return s, "", "", false
		}
		i += from
		j := i + 1
		for j < len(s) && (s[j] >= 'A' && s[j] <= 'Z' || s[j] == '_') {
			j++
		}
		if j > i+1 && j < len(s) && s[j] == '@' {
			return s[:i], s[i+1 : j], s[j+1:], true
		}
		from = i + 1
	}
}
