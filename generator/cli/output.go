package cli

import (
	"encoding/json"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// printJSON writes v as what another program reads: one document, indented, with a newline at its end.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// isTerminal tells whether a person reads what is written to w.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// A colour is a Select Graphic Rendition parameter (ECMA-48).
type colour string

const (
	bold   colour = "1"
	red    colour = "31"
	green  colour = "32"
	yellow colour = "33"
)

// palette paints text, or leaves it alone.
type palette bool

// colours are used on a terminal only, and not where NO_COLOR says so (no-color.org).
func colours(w io.Writer) palette { return palette(isTerminal(w) && os.Getenv("NO_COLOR") == "") }

func (p palette) paint(c colour, text string) string {
	if !p || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}
