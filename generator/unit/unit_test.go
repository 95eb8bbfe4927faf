package unit

import (
	"slices"
	"strings"
	"testing"

	"berth/testdata/unitfile"
)

func TestValue(t *testing.T) {
	for _, c := range []struct{ in, want, why string }{
		{"/etc/berth/goal.toml", "/etc/berth/goal.toml", "plain"},
		{"100%i", "100%%i", "a specifier is text"},
		{`C:\`, `C:\ `, "a backslash at the end continues the line"},
		{`a"b'c`, `a"b'c`, "quotes mean nothing where words are not split"},
		{"a\nExecStart=/bin/sh", "", "a newline would add a directive"},
		{"a\x7f", "", "DEL is a control character"},
		{" a", "", "the parser strips it"},
		{"a\xff", "", "the parser ignores the line"},
	} {
		got, err := Value(c.in)
		if (err != nil) != (c.want == "") || err == nil && got != c.want {
			t.Errorf("Value(%q) = %q, %v; want %q: %s", c.in, got, err, c.want, c.why)
		}
	}
}

func TestCommand(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
		why  string
	}{
		{[]string{"/usr/bin/kubelet", "--config=/a.yaml"}, "/usr/bin/kubelet --config=/a.yaml", "plain words stay readable"},
		{[]string{"/a b", "c d"}, `"/a b" "c d"`, "spaces"},
		{[]string{"/x", "$HOME", "${A}"}, `/x $$HOME "$${A}"`, "variables are text"},
		{[]string{"/x$y"}, "/x$y", "a program's path knows no variables"},
		{[]string{"/x", "%n"}, "/x %%n", "specifiers are text"},
		{[]string{"/x", ";", "#"}, `/x ";" "#"`, "a bare semicolon would begin a second command"},
		{[]string{"/x", ""}, `/x ""`, "an empty argument is one"},
		{[]string{"/x", `a\`, `"`}, `/x "a\\" "\""`, "backslash and quote"},
		{[]string{"/x", "a\nb"}, `/x "a\x0ab"`, "a newline arrives as one, and ends no line"},
		{[]string{"/x", "grün"}, "/x grün", "UTF-8 passes"},
		{[]string{"/x", "gr\xfcn"}, `/x "gr\xfcn"`, "what is not UTF-8 arrives, and does not make systemd ignore the line"},
		{[]string{"/x", "\ufffd"}, "/x \"\ufffd\"", "the sign for what cannot be read is itself a character"},
	} {
		if got := Command(c.args[0], c.args[1:]...); got != c.want {
			t.Errorf("Command(%q) = %s; want %s: %s", c.args, got, c.want, c.why)
		}
	}
}

func TestBind(t *testing.T) {
	for _, c := range []struct{ source, target, want, why string }{
		{"/dev/kvm", "/dev/kvm", "/dev/kvm", "the same path is not repeated"},
		{"/a", "/b", "/a:/b", "two paths"},
		{"/a:b", "/c", `/a\:b:/c`, "a colon in a path"},
		{`/a\`, `/a\`, `/a\\ `, "a backslash at the end"},
		{"/a%n", "/a%n", "/a%n", ".nspawn files know no specifiers here"},
		{"/a b", "/c d", "/a b:/c d", "only colons separate"},
	} {
		if got, err := Bind(c.source, c.target); err != nil || got != c.want {
			t.Errorf("Bind(%q, %q) = %q, %v; want %q: %s", c.source, c.target, got, err, c.want, c.why)
		}
	}
}

func TestCredential(t *testing.T) {
	for _, c := range []struct{ in, want, why string }{
		{"kubelet.token", "kubelet.token", "plain"},
		{`a"b'c!;#$`, `a"b'c!;#$`, "quotes would become part of the name"},
		{"100%i", "100%%i", "a specifier is text"},
		{`a\b`, `a\\b`, "a backslash escapes"},
		{`a\`, `a\\ `, "and must not continue the line"},
		{"a\nb", "", "a newline would add a directive"},
	} {
		got, err := Credential(c.in)
		if (err != nil) != (c.want == "") || err == nil && got != c.want {
			t.Errorf("Credential(%q) = %q, %v; want %q: %s", c.in, got, err, c.want, c.why)
		}
	}
}

func TestSources(t *testing.T) {
	for _, c := range []struct {
		in   []string
		want string
		why  string
	}{
		{[]string{"/etc/berth/goal.toml", `/x/50% "q" é.toml`}, `/etc/berth/goal.toml, /x/50% "q" é.toml`, "as they are"},
		{[]string{"/a\nb", "/a "}, `"/a\nb", "/a "`, "a line break, and white space at an end"},
		{[]string{"/a\u0085b", "/a\u2028b", "/a\u2029b"}, `"/a\u0085b", "/a\u2028b", "/a\u2029b"`, "what ends a comment in YAML only"},
		{[]string{"/a\xe5"}, `"/a\xe5"`, "not UTF-8"},
		{[]string{`/a\`}, `/a`, "a backslash at the end"},
		{append([]string{"/etc/berth/goal.toml"}, slices.Repeat([]string{"/" + strings.Repeat("n", 254)}, 5000)...),
			"/etc/berth/goal.toml" + strings.Repeat(", /"+strings.Repeat("n", 254), 3) + ", and 4997 more", "more than a line has room for"},
	} {
		if got := Sources(c.in); got != c.want {
			t.Errorf("Sources(%q) = %s; want %s: %s", c.in, got, c.want, c.why)
		}
	}
}

// FuzzUnit reads back whatever can be written, by the rules of systemd's own parser.
func FuzzUnit(f *testing.F) {
	for _, s := range []string{"", "a b", `a\`, `a\\ `, `"'`, "%n%%", "$a ${b} $$", ";", "a:b", "\n[A]", "\r", "\x00", "\xff\ufffd", "\u0085\u2028\ufeff", "-@:+!|", "#"} {
		f.Add(s, "/"+s)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		value := func(text string) string {
			options, err := unitfile.Parse([]byte("# " + Sources([]string{a, b}) + "\n[S]\nBefore=x\nKey=" + text + "\nAfter=y\n"))
			if err != nil || len(options) != 3 || options[1].Key != "Key" || options[2].Value != "y" {
				t.Fatalf("%q: %q, %v", text, options, err)
			}
			return options[1].Value
		}
		check := func(what string, got, want []string, err error) {
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%s of %q: %q, %v", what, want, got, err)
			}
		}
		if text, err := Value(a); err == nil {
			got, err := unitfile.Specifiers(value(text))
			check("Value", []string{got}, []string{a}, err)
		}
		if text, err := Credential(a); err == nil && !strings.Contains(a, ":") {
			got, err := unitfile.Split(value(text))
			if err == nil {
				got[0], err = unitfile.Specifiers(got[0])
			}
			check("Credential", got, []string{a}, err)
		}
		if text, err := Bind(a, b); err == nil {
			want := []string{a, b}
			if a == b {
				want = want[:1]
			}
			got, err := unitfile.Split(value(text))
			check("Bind", got, want, err)
		}
		if strings.Contains(a+b, "\x00") {
			return // no program takes one
		}
		got, err := unitfile.Strings(value(Word(a) + " " + Word(b)))
		check("Word", got, []string{a, b}, err)
		if strings.HasPrefix(b, "/") && !strings.ContainsAny(b, "\"'\\*?[") && strings.IndexFunc(b, isControl) < 0 {
			got, err := unitfile.Exec(value(Command(b, a, b)))
			check("Command", got, []string{b, a, b}, err)
		}
	})
}
