package status

import (
	"testing"
	"unicode"
)

// FuzzClean: nothing that a terminal takes for a command is left of a text.
func FuzzClean(f *testing.F) {
	for _, s := range []string{"\x1b[2J", "\u009b2J", "a\tb\r\n", "é…", "\xff", "\u202e\u2028\ufeff"} {
		f.Add(s, true)
		f.Add(s, false)
	}
	f.Fuzz(func(t *testing.T, s string, ascii bool) {
		for _, r := range clean(s, ascii) {
			if !unicode.IsPrint(r) || ascii && r > unicode.MaxASCII {
				t.Errorf("%q leaves %q", s, r)
			}
		}
	})
}
