// Package unit puts values into systemd's unit files and .nspawn files so that they arrive unchanged. It is the only
// place that knows how those two languages quote; nothing that a goal state holds can add a directive, a section or an
// argument.
package unit

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Value returns s as the right-hand side of an assignment that is not split into words (Description=, SourcePath=,
// RequiresMountsFor= with one path without spaces, …). Specifiers are taken literally: "%" is doubled
// (systemd.unit(5), "Specifiers").
//
// It is an error where the language has no way to write s: control characters, what is not UTF-8, and white space at either end,
// which the parser takes away.
func Value(s string) (string, error) {
	raw, err := Raw(s)
	return strings.ReplaceAll(raw, "%", "%%"), err
}

// Raw is Value for assignments whose specifiers are not expanded, as those of systemd.nspawn(5).
func Raw(s string) (string, error) {
	if i := strings.IndexFunc(s, isControl); i >= 0 {
		return "", fmt.Errorf("%q: a control character has no place in a unit file: remove it", s)
	}
	if !utf8.ValidString(s) {
		// Systemd ignores such a line (parse_line() of systemd 252 to 262).
		return "", fmt.Errorf("%q: what is not UTF-8 has no place in a unit file: use another name", s)
	}
	if strings.TrimSpace(s) != s {
		return "", fmt.Errorf("%q: white space at the ends is lost in a unit file: remove it", s)
	}
	if strings.HasSuffix(s, `\`) {
		// A backslash at the end of a line continues it. White space after it is dropped by the parser, and keeps the
		// backslash from being the last character (config_parse() of systemd 252 to 262).
		return s + " ", nil
	}
	return s, nil
}

// Credential returns a credential's name as LoadCredential= takes it (systemd.exec(5)). There a backslash escapes the next
// character, but quotes are part of the name (config_parse_load_credential() of systemd, tried on 252). The errors are those
// of Value.
func Credential(name string) (string, error) {
	return Value(strings.ReplaceAll(name, `\`, `\\`))
}

// Word returns s as one word of an assignment that is split into words with quotes (Environment=, LogExtraFields=,
// the arguments of ExecStart=): systemd.syntax(7), "Quoting". Any string can be written.
func Word(s string) string {
	s = strings.ReplaceAll(s, "%", "%%")
	if s != "" && strings.IndexFunc(s, needsQuotes) < 0 {
		return s
	}
	var b strings.Builder
	b.WriteByte('"')
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case isControl(r), r == utf8.RuneError && size == 1: // or systemd would ignore the line
			fmt.Fprintf(&b, `\x%02x`, s[0])
		default:
			b.WriteRune(r)
		}
		s = s[size:]
	}
	b.WriteByte('"')
	return b.String()
}

// Command returns an ExecStart= line that runs program, an absolute path, with just these arguments. Beside quotes and
// specifiers it takes "$" literally (systemd.service(5), "Command lines"): doubled in arguments; not in the program's
// path, in which variables are not replaced.
func Command(program string, args ...string) string {
	words := make([]string, 0, 1+len(args))
	words = append(words, Word(program))
	for _, a := range args {
		words = append(words, Word(strings.ReplaceAll(a, "$", "$$")))
	}
	return strings.Join(words, " ")
}

// Bind returns the value of Bind= or BindReadOnly= in a .nspawn file: source and target, whose colons and backslashes
// are escaped (systemd-nspawn(1), --bind=).
func Bind(source, target string) (string, error) {
	escape := strings.NewReplacer(`\`, `\\`, ":", `\:`)
	s := escape.Replace(source)
	if target != source {
		s += ":" + escape.Replace(target)
	}
	return Raw(s)
}

// Sources lists files for a comment, in a unit file or any other file whose comments end with the line. A file's name may
// hold anything but must not end the comment: to YAML 1.1, U+0085, U+2028 and U+2029 are line breaks too. Nor must it keep the rest
// of the file from being read, as what is not UTF-8 does in TOML.
func Sources(files []string) string {
	var shown []string
	length := 0
	for i, f := range files {
		if length += len(f); i > 0 && length > sourcesLimit {
			shown = append(shown, fmt.Sprintf("and %d more", len(files)-i))
			break
		}
		if _, err := Raw(f); err != nil || strings.ContainsFunc(f, func(r rune) bool { return !strconv.IsPrint(r) }) {
			f = strconv.Quote(f)
		}
		shown = append(shown, f)
	}
	return strings.TrimSuffix(strings.Join(shown, ", "), `\`)
}

// sourcesLimit bounds the names of sources in one comment, in bytes: systemd takes no line of more than 1 MiB (LONG_LINE_MAX, 252 to
// 262), and there may be thousands of drop-ins.
const sourcesLimit = 1000

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// needsQuotes is true for all that is not surely plain in every version's parser.
func needsQuotes(r rune) bool {
	switch {
	case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r > 0x7f && r != utf8.RuneError:
		return false
	}
	return !strings.ContainsRune("_@%+=:,./-$", r)
}
