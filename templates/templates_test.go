package templates

import "testing"

func TestFillLine(t *testing.T) {
	values := map[string]string{"A": "x", "LINES": "1\n2", "NONE": ""}
	for _, c := range []struct{ in, want, why string }{
		{"a @A@ b\n", "a x b\n", "inside a line"},
		{"node@@A@.service\n", "node@x.service\n", "an @ that is part of a unit's name"},
		{"node@.service @a@\n", "node@.service @a@\n", "no placeholder"},
		{"@LINES@\n", "1\n2\n", "whole lines"},
		{"@NONE@\n", "", "no lines"},
		{"k=@NONE@\n", "k=\n", "an empty value"},
	} {
		if got := string(fillLine(nil, "t", c.in, values, map[string]bool{})); got != c.want {
			t.Errorf("%q: got %q, want %q: %s", c.in, got, c.want, c.why)
		}
	}
}

func TestFillPanicsOnBugs(t *testing.T) {
	for why, fill := range map[string]func(){
		"no such template":          func() { Fill("no-such", nil) },
		"placeholder without value": func() { fillLine(nil, "t", "@X@\n", nil, map[string]bool{}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", why)
				}
			}()
			fill()
		}()
	}
}
