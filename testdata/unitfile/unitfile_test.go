package unitfile

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		text string
		want []Option // nil: an error
		why  string
	}{
		{"[A]\nK=v\n", []Option{{"A", "K", "v"}}, "plain"},
		{"# [B]\n; x\n[A]\n K = v w \n", []Option{{"A", "K", "v w"}}, "comments, and white space around"},
		{"[A]\nK=a\\\nL=b\n", []Option{{"A", "K", "a L=b"}}, "a continued line"},
		{"[A]\nK=a\\\n# x\nb\n", []Option{{"A", "K", "a b"}}, "a comment within one"},
		{"[A]\nK=a\\\\\nL=b\n", []Option{{"A", "K", `a\\`}, {"A", "L", "b"}}, "an escaped backslash continues nothing"},
		{"[A]\nK=a\\ \nL=b\n", []Option{{"A", "K", `a\`}, {"A", "L", "b"}}, "nor does one with a space behind it"},
		{"[A]\nK=a\rL=b\n", []Option{{"A", "K", "a"}, {"A", "L", "b"}}, "a carriage return ends a line"},
		{"[A\nK=v\n", nil, "half a section"},
		{"K=v\n", nil, "no section"},
		{"[A]\nK\n", nil, "no assignment"},
		{"[A]\nK=\xff\n", nil, "not UTF-8"},
	} {
		got, err := Parse([]byte(c.text))
		if (err != nil) != (c.want == nil) {
			t.Errorf("%s: error %v", c.why, err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" && err == nil {
			t.Errorf("%s: -want +got:\n%s", c.why, diff)
		}
	}
}

func TestSplitting(t *testing.T) {
	for _, c := range []struct {
		read  func(string) ([]string, error)
		value string
		want  []string // nil: an error
		why   string
	}{
		{Strings, `a "b c" 'd"e' f"g h"i`, []string{"a", "b c", `d"e`, "fg hi"}, "quotes, also within a word"},
		{Strings, `"" a`, []string{"", "a"}, "an empty word"},
		{Strings, `\x41\101\u00e9\s\\\"`, []string{`AAé \"`}, "escapes"},
		{Strings, `100%%`, []string{"100%"}, "no specifier"},
		{Strings, `%n`, nil, "a specifier"},
		{Strings, `"a`, nil, "an open quote"},
		{Strings, `\q`, nil, "an unknown escape"},
		{Strings, `\x00`, nil, "a NUL"},
		{Exec, `/a b$c $$d ";"`, []string{"/a", "b$c", "$d", ";"}, "dollars and a quoted semicolon"},
		{Exec, `/a ; /b`, nil, "two commands"},
		{Exec, `"/ ; b/a" " ; " "x;" y;`, []string{"/ ; b/a", " ; ", "x;", "y;"}, "semicolons that separate nothing (tried on 252, 257, 262)"},
		{Exec, `/a ${B}`, nil, "a variable"},
		{Exec, `/a $B`, nil, "a variable without braces"},
		{Exec, `-/a`, nil, "a prefix"},
		{Exec, `"/a\"b"`, nil, "a path that systemd refuses"},
		{Split, `/a\:b:/c\\:"d`, []string{"/a:b", `/c\`, `"d`}, "escapes, no quotes"},
		{Split, `a::`, []string{"a", "", ""}, "empty parts"},
		{Split, `a\`, nil, "a backslash at the end"},
	} {
		got, err := c.read(c.value)
		if (err != nil) != (c.want == nil) {
			t.Errorf("%s: error %v", c.why, err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" && err == nil {
			t.Errorf("%s: -want +got:\n%s", c.why, diff)
		}
	}
}
