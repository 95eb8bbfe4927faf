package goalstate

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"strings"
)

// ErrNone says that there is no goal state: neither a main file nor a drop-in, or all of them hidden.
var ErrNone = errors.New("there is no goal state: write /etc/berth/goal.toml")

// Error is one mistake in a goal state.
type Error struct {
	// File is the path on the host, without the root directory that stands for "/".
	File string
	// Line and Column begin at 1; Column counts bytes, as compilers do. Both are 0 where the file as a whole is refused.
	Line, Column int
	// Key is the full key, such as slot.a.kubelet.taints[0]; empty where no key is to blame.
	Key string
	// Problem is what is wrong, Cure what would be right. Neither ever holds a secret.
	Problem, Cure string
}

// Error returns file:line:column: key: what is wrong: what would be right.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(printable(e.File)) // a file's name may hold a line break, and an error is one line
	if e.Line > 0 {
		b.WriteString(":" + strconv.Itoa(e.Line) + ":" + strconv.Itoa(e.Column))
	}
	for _, s := range []string{e.Key, e.Problem, e.Cure} {
		if s != "" {
			b.WriteString(": " + s)
		}
	}
	return b.String()
}

// Errors are all mistakes of all files of a goal state, sorted by file, line and column.
type Errors []*Error

// Error returns one mistake a line.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find a single Error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

func (e Errors) sort() {
	slices.SortStableFunc(e, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column),
			cmp.Compare(a.Key, b.Key))
	})
}
