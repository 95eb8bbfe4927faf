// Package unitfile reads systemd's unit files and .nspawn files as systemd itself does (config_parse(), extract_first_word()
// and their callers, versions 252 to 262), for tests: it shares nothing with the package that writes them. Where systemd only warns, and
// goes on without a line, this is an error.
package unitfile

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// white is WHITESPACE of systemd.
const white = " \t\n\r"

// Option is one assignment. Its value is as config_parse() hands it to the parser of its key.
type Option struct{ Section, Key, Value string }

// Parse reads a file.
func Parse(content []byte) ([]Option, error) {
	var options []Option
	section, pending := "", ""
	handle := func(line string) error {
		line = strings.Trim(line, white)
		if line == "" || strings.ContainsRune("#;", rune(line[0])) {
			return nil
		}
		if !utf8.ValidString(line) {
			return fmt.Errorf("line %q is not UTF-8", line)
		}
		if line[0] == '[' {
			if !strings.HasSuffix(line, "]") {
				return fmt.Errorf("section header %q has no end", line)
			}
			section = line[1 : len(line)-1]
			return nil
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || section == "" {
			return fmt.Errorf("line %q is no assignment in a section", line)
		}
		options = append(options, Option{section, strings.TrimRight(key, white), strings.TrimLeft(value, white)})
		return nil
	}
	// read_line() takes a carriage return and a NUL for the end of a line, too.
	lines := strings.FieldsFunc(string(content), func(r rune) bool { return r == '\n' || r == '\r' || r == 0 })
	for _, line := range lines {
		line = strings.TrimLeft(line, white)
		if line != "" && strings.ContainsRune("#;", rune(line[0])) {
			continue // also within an assignment that is continued
		}
		line = pending + line
		pending = ""
		escaped := false
		for i := range len(line) {
			escaped = !escaped && line[i] == '\\'
		}
		if escaped {
			pending = line[:len(line)-1] + " "
			continue
		}
		if err := handle(line); err != nil {
			return nil, err
		}
	}
	if pending != "" {
		return options, handle(pending)
	}
	return options, nil
}

// Words splits a value as extract_first_word() does with EXTRACT_UNQUOTE and EXTRACT_CUNESCAPE.
func Words(value string) ([]string, error) {
	var words []string
	for value = strings.TrimLeft(value, white); value != ""; value = strings.TrimLeft(value, white) {
		var word strings.Builder
		var quote byte
		i := 0
		for ; i < len(value); i++ {
			switch c := value[i]; {
			case c == '\\':
				n, err := unescape(&word, value[i+1:])
				if err != nil {
					return nil, err
				}
				i += n
			case quote != 0 && c == quote:
				quote = 0
			case quote == 0 && (c == '"' || c == '\''):
				quote = c
			case quote == 0 && strings.IndexByte(white, c) >= 0:
				goto end
			default:
				word.WriteByte(c)
			}
		}
		if quote != 0 {
			return nil, fmt.Errorf("%q: a quote is not closed", value)
		}
	end:
		words, value = append(words, word.String()), value[i:]
	}
	return words, nil
}

// unescape appends what an escape stands for and returns its length: cunescape_one(). s begins behind the backslash.
func unescape(to *strings.Builder, s string) (int, error) {
	if s == "" {
		return 0, fmt.Errorf("a backslash at the end")
	}
	const letters, meaning = "abfnrtv\\\"'s", "\a\b\f\n\r\t\v\\\"' "
	if i := strings.IndexByte(letters, s[0]); i >= 0 {
		to.WriteByte(meaning[i])
		return 1, nil
	}
	number := func(from, digits, base int) (uint64, error) {
		if len(s) < from+digits {
			return 0, fmt.Errorf("escape \\%s is too short", s)
		}
		n, err := strconv.ParseUint(s[from:from+digits], base, 32)
		if err == nil && n == 0 {
			err = fmt.Errorf("escape \\%s is a NUL", s[:from+digits])
		}
		return n, err
	}
	switch c := s[0]; {
	case c == 'x':
		n, err := number(1, 2, 16)
		to.WriteByte(byte(n))
		return 3, err
	case c == 'u':
		n, err := number(1, 4, 16)
		to.WriteRune(rune(n))
		return 5, err
	case c == 'U':
		n, err := number(1, 8, 16)
		to.WriteRune(rune(n))
		return 9, err
	case '0' <= c && c <= '7':
		n, err := number(0, 3, 8)
		to.WriteByte(byte(n))
		return 3, err
	}
	return 0, fmt.Errorf("unknown escape \\%c", s[0])
}

// Specifiers replaces "%%". Any other specifier is an error, as its value would be that of the host.
func Specifiers(s string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' {
			if i++; i == len(s) || s[i] != '%' {
				return "", fmt.Errorf("%q has a specifier", s)
			}
		}
		b.WriteByte(s[i])
	}
	return b.String(), nil
}

// Strings are Words with Specifiers replaced in each, as of Environment= and DeviceAllow=.
func Strings(value string) ([]string, error) {
	words, err := Words(value)
	for i := range words {
		if err == nil {
			words[i], err = Specifiers(words[i])
		}
	}
	return words, err
}

// Exec returns what execve(2) gets of an ExecStart= line with one command: config_parse_exec() and replace_env_argv().
// A variable, a second command and a special prefix are errors.
func Exec(value string) ([]string, error) {
	if !strings.HasPrefix(strings.TrimLeft(value, "\"'"), "/") {
		return nil, fmt.Errorf("%q does not begin with a path", value)
	}
	if separates(value) {
		return nil, fmt.Errorf("%q has two commands", value)
	}
	argv, err := Strings(value)
	if err != nil {
		return nil, err
	}
	// string_is_safe() of the program's path; 262 takes no globs, either.
	if strings.ContainsFunc(argv[0], func(r rune) bool { return r < ' ' || r == 0x7f || strings.ContainsRune("\"'\\*?[", r) }) {
		return nil, fmt.Errorf("systemd runs no program %q", argv[0])
	}
	for i, word := range argv[1:] {
		if argv[1+i], err = variables(word); err != nil {
			return nil, err
		}
	}
	return argv, nil
}

// separates tells whether a line of commands has a semicolon that is a word of its own, and not in quotes.
func separates(value string) bool {
	quote, begin := byte(0), true
	for i := 0; i < len(value); i++ {
		c := value[i]
		isWhite := strings.IndexByte(white, c) >= 0
		switch {
		case c == '\\':
			i++
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case begin && c == ';' && (i+1 == len(value) || strings.IndexByte(white, value[i+1]) >= 0):
			return true
		}
		begin = quote == 0 && isWhite
	}
	return false
}

func variables(word string) (string, error) {
	if strings.HasPrefix(word, "$") && !strings.HasPrefix(word, "$$") {
		return "", fmt.Errorf("%q is a variable", word)
	}
	var b strings.Builder
	for i := 0; i < len(word); i++ {
		if word[i] == '$' && i+1 < len(word) {
			switch word[i+1] {
			case '{':
				return "", fmt.Errorf("%q has a variable", word)
			case '$':
				i++
			}
		}
		b.WriteByte(word[i])
	}
	return b.String(), nil
}

// Split splits a value at colons as extract_first_word() does with EXTRACT_DONT_COALESCE_SEPARATORS alone: a backslash escapes
// the next character, quotes mean nothing. So do Bind= of .nspawn files (bind_mount_parse()) and LoadCredential=.
func Split(value string) ([]string, error) {
	parts := []string{""}
	for i := 0; i < len(value); i++ {
		last := &parts[len(parts)-1]
		switch value[i] {
		case '\\':
			if i++; i == len(value) {
				return nil, fmt.Errorf("%q ends with a backslash", value)
			}
			*last += value[i : i+1]
		case ':':
			parts = append(parts, "")
		default:
			*last += value[i : i+1]
		}
	}
	return parts, nil
}
