package goalstate

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/BurntSushi/toml"
	"github.com/pelletier/go-toml/v2/unstable"
)

var bom = []byte("\xef\xbb\xbf")

// maxDepth bounds how deep a key and its value nest; containerd's own tables need about eight. Without a bound a
// megabyte of brackets costs the parser, which recurses and joins whole keys, minutes and gigabytes.
const maxDepth = 24

// source is a Source being read, which can tell the line of an offset.
type source struct {
	path  string
	data  []byte
	lines []int // the offset of each line's first byte; made when the first error needs it
}

// position turns an offset into a line and a column, which begin at 1; the column counts bytes.
func (s *source) position(offset int) (line, column int) {
	if s.lines == nil {
		s.lines = []int{0}
		for i, b := range s.data {
			if b == '\n' {
				s.lines = append(s.lines, i+1)
			}
		}
	}
	line = sort.Search(len(s.lines), func(i int) bool { return s.lines[i] > offset })
	return line, offset - s.lines[line-1] + 1
}

func (s *source) error(offset int, key, problem, cure string) *Error {
	line, column := s.position(offset)
	return &Error{File: s.path, Line: line, Column: column, Key: key, Problem: problem, Cure: cure}
}

// node is a TOML value that knows where it stands.
type node struct {
	src   *source
	key   int // offset of its key, or of itself in an array
	value int // offset of the value, as far as it is known: that of the key for a table and an array

	// One of the three; table and array are not nil even when empty.
	table  map[string]*node
	array  []*node
	scalar any // string, int64, float64, bool or time.Time
}

func (n *node) keys() []string { return slices.Sorted(maps.Keys(n.table)) }

// get returns what stands below n, or nil.
func (n *node) get(keys ...string) *node {
	for _, k := range keys {
		if n == nil {
			return nil
		}
		n = n.table[k]
	}
	return n
}

// kind is what n is called in a message, with its article.
func (n *node) kind() string {
	switch {
	case n.table != nil:
		return "a table"
	case n.array != nil:
		return "an array"
	}
	switch n.scalar.(type) {
	case string:
		return "a string"
	case int64:
		return "an integer"
	case float64:
		return "a float"
	case bool:
		return "a boolean"
	}
	return "a date or time"
}

// place is where a key and its value stand in a file. BurntSushi's parser, which says what a file means, keeps the
// positions of keys for itself, so a second parser, which only splits the text, supplies them.
type place struct {
	key, value int
	keys       map[string]*place
	elements   []*place
}

func (p *place) at(key string) *place {
	if p.keys == nil {
		p.keys = map[string]*place{}
	}
	q := p.keys[key]
	if q == nil {
		q = &place{key: -1}
		p.keys[key] = q
	}
	return q
}

// errDepth is what locate returns for a file that nests deeper than maxDepth.
var errDepth = errors.New("nests too deep")

// locate finds where each key and value of a file stands. On an error it also returns the error's offset.
func locate(data []byte) (root *place, offset int, err error) {
	root = &place{}
	current := root
	var p unstable.Parser
	p.Reset(data)

	// walk goes down a dotted key, to the newest element where the key is an array of tables.
	walk := func(from *place, key unstable.Iterator) (*place, error) {
		depth := 0
		for key.Next() {
			if len(from.elements) > 0 {
				from = from.elements[len(from.elements)-1]
			}
			offset = int(key.Node().Raw.Offset)
			if depth++; depth > maxDepth {
				return nil, errDepth
			}
			from = from.at(string(key.Node().Data))
			if from.key < 0 {
				from.key, from.value = offset, offset
			}
		}
		return from, nil
	}
	var value func(at *place, n *unstable.Node, depth int) error
	pair := func(table *place, n *unstable.Node, depth int) error {
		at, err := walk(table, n.Key())
		if err != nil {
			return err
		}
		return value(at, n.Value(), depth+1)
	}
	value = func(at *place, n *unstable.Node, depth int) error {
		if depth > maxDepth {
			return errDepth
		}
		if n.Raw.Length > 0 {
			at.value, offset = int(n.Raw.Offset), int(n.Raw.Offset)
		}
		for it := n.Children(); (n.Kind == unstable.Array || n.Kind == unstable.InlineTable) && it.Next(); {
			child := it.Node()
			if n.Kind == unstable.InlineTable {
				if err := pair(at, child, depth); err != nil {
					return err
				}
				continue
			}
			element := &place{key: at.key, value: at.value}
			at.elements = append(at.elements, element)
			if err := value(element, child, depth+1); err != nil {
				return err
			}
			element.key = element.value
		}
		return nil
	}

	for p.NextExpression() {
		n := p.Expression()
		switch n.Kind {
		case unstable.Table, unstable.ArrayTable:
			if current, err = walk(root, n.Key()); err != nil {
				return nil, offset, err
			}
			if n.Kind == unstable.ArrayTable {
				element := &place{key: offset, value: offset}
				current.elements = append(current.elements, element)
				current = element
			} else if len(current.elements) > 0 {
				current = current.elements[len(current.elements)-1]
			}
		case unstable.KeyValue:
			if err = pair(current, n, 0); err != nil {
				return nil, offset, err
			}
		}
	}
	if err = p.Error(); err != nil {
		if pe := (*unstable.ParserError)(nil); errors.As(err, &pe) {
			offset = int(p.Range(pe.Highlight).Offset)
		}
		return nil, offset, err
	}
	return root, 0, nil
}

// parseFile reads one file. Where its syntax is wrong, it returns what stands above the line of the error, if that is
// sound by itself, and whole is false.
func parseFile(src *source) (root *node, errs Errors, whole bool) {
	data := src.data
	refuse := func(offset int, problem, cure string) (*node, Errors, bool) {
		return &node{src: src, table: map[string]*node{}}, Errors{src.error(offset, "", problem, cure)}, false
	}
	if i := bytes.IndexByte(data, 0); i >= 0 {
		return refuse(i, "is not text: holds a NUL byte", "want TOML in UTF-8")
	}
	if !utf8.Valid(data) {
		i := 0
		for i < len(data) {
			r, n := utf8.DecodeRune(data[i:])
			if r == utf8.RuneError && n == 1 {
				break
			}
			i += n
		}
		return refuse(i, fmt.Sprintf("is not UTF-8: byte 0x%02x", data[i]), "want TOML in UTF-8")
	}

	// Both parsers recurse, one of them in quadratic time, before locate sees the first value. Brackets in strings and
	// comments count here too, but no goal state has a thousand more of them open than closed.
	for i, open := 0, 0; i < len(data); i++ {
		switch data[i] {
		case '[', '{':
			open++
		case ']', '}':
			open--
		}
		if open > 1000 {
			return refuse(i, fmt.Sprintf("nests deeper than %d tables and arrays", maxDepth), "want a goal state")
		}
	}

	places, offset, locateErr := locate(data)
	if errors.Is(locateErr, errDepth) {
		return refuse(offset, fmt.Sprintf("nests deeper than %d tables and arrays", maxDepth), "want a goal state")
	}
	var values map[string]any
	_, err := toml.Decode(string(data), &values)
	if err == nil && locateErr == nil {
		root, errs = build(src, values, places)
		return root, errs, true
	}

	e := src.error(offset, "", "", "want valid TOML, see https://toml.io")
	if pe := (toml.ParseError{}); errors.As(err, &pe) {
		// A position at the end of the text may lie behind its last byte.
		e = src.error(min(max(pe.Position.Start, 0), len(data)), pe.LastKey, strings.TrimSuffix(pe.Message, "."), e.Cure)
	} else if locateErr != nil {
		e.Problem = locateErr.Error()
	}
	e.Key, e.Problem = printable(e.Key), printable(e.Problem)
	if holdsSecret(e.Key) || holdsSecret(src.line(e.Line)) {
		e.Problem = "is not valid TOML" // the parser's own words quote the value
	}
	root, errs, _ = refuse(0, "", "")
	errs[0] = e
	// What stands above is read once more by itself: it has errors of its own to tell, and perhaps says what starts at
	// boot.
	above := data[:src.lines[e.Line-1]]
	values = nil
	if _, err := toml.Decode(string(above), &values); err == nil {
		if places, _, err := locate(above); err == nil {
			var more Errors
			root, more = build(src, values, places)
			errs = append(errs, more...)
		}
	}
	return root, errs, false
}

// printable escapes control characters, which a file's name may hold and BurntSushi's parser repeats from the file as they
// are.
func printable(s string) string {
	if !hasControl(s) && utf8.ValidString(s) {
		return s
	}
	q := strconv.Quote(s)
	return q[1 : len(q)-1]
}

// line returns a line's text.
func (s *source) line(line int) string {
	s.position(0)
	rest := s.data[s.lines[line-1]:]
	if i := bytes.IndexByte(rest, '\n'); i >= 0 {
		rest = rest[:i]
	}
	return string(rest)
}

// holdsSecret says whether a text that names keys may hold a secret beside them.
func holdsSecret(text string) bool {
	for _, word := range []string{"token", "env", "header", "password", "secret"} {
		if strings.Contains(strings.ToLower(text), word) {
			return true
		}
	}
	return false
}

// build joins a file's values with their places, and refuses control characters, which could end a line of a unit.
func build(src *source, values map[string]any, places *place) (root *node, errs Errors) {
	control := func(offset int, key, s, what string) {
		for _, r := range s {
			if unicode.IsControl(r) {
				errs = append(errs, src.error(offset, key, fmt.Sprintf("%s holds the control character U+%04X", what, r),
					"want text without line breaks, tabs and other control characters"))
				return
			}
		}
	}
	var join func(v any, p *place, key string) *node
	table := func(m map[string]any, p *place, key string) map[string]*node {
		t := make(map[string]*node, len(m))
		for k, v := range m {
			q := p.keys[k]
			if q == nil {
				// The two parsers do not agree; a place nearby is the best there is.
				q = &place{key: p.key, value: p.value}
			}
			full := joinKey(key, k)
			control(q.key, full, k, "the key")
			t[k] = join(v, q, full)
		}
		return t
	}
	join = func(v any, p *place, key string) *node {
		n := &node{src: src, key: p.key, value: p.value}
		element := func(i int, v any) {
			q := &place{key: p.key, value: p.value}
			if i < len(p.elements) {
				q = p.elements[i]
			}
			n.array = append(n.array, join(v, q, key+"["+strconv.Itoa(i)+"]"))
		}
		switch v := v.(type) {
		case map[string]any:
			n.table = table(v, p, key)
		case []map[string]any:
			n.array = []*node{}
			for i, m := range v {
				element(i, m)
			}
		case []any:
			n.array = []*node{}
			for i, v := range v {
				element(i, v)
			}
		case string:
			control(p.value, key, v, "the value")
			n.scalar = v
		case int64, float64, bool, time.Time:
			n.scalar = v
		default:
			panic(fmt.Sprintf("goalstate: the TOML parser returned a %T", v))
		}
		return n
	}
	return &node{src: src, table: table(values, places, "")}, errs
}

// joinKey appends a part to a full key, quoted where TOML needs it.
func joinKey(key, part string) string {
	bare := part != ""
	for _, c := range []byte(part) {
		bare = bare && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_')
	}
	if !bare {
		part = strconv.Quote(part)
	}
	if key == "" {
		return part
	}
	return key + "." + part
}

// merge puts a later file over what is there: tables merge, anything else replaces.
func merge(into, over *node, key string) (errs Errors) {
	for _, k := range over.keys() {
		later, full := over.table[k], joinKey(key, k)
		before := into.table[k]
		switch {
		case before == nil:
			into.table[k] = later
		case before.table != nil && later.table != nil:
			replaceAlternatives(before, later, full)
			errs = append(errs, merge(before, later, full)...)
		case before.table == nil && later.table == nil:
			into.table[k] = later
		default:
			line, _ := before.src.position(before.key)
			errs = append(errs, later.src.error(later.value, full, "is "+later.kind(),
				fmt.Sprintf("want %s, as in %s:%d", before.kind(), before.src.path, line)))
		}
	}
	return errs
}

// alternatives are the keys of which a table may hold one only.
var alternatives = map[string][]string{
	"cluster": {"certificate_authority", "certificate_authority_data"},
	"kubelet": {"bootstrap_token", "bootstrap_token_file", "bootstrap_token_credential", "bootstrap_token_encrypted_credential", "exec"},
}

// alternativesOf returns the alternatives of the table with this full key, be it shared or a slot's.
func alternativesOf(key string) []string {
	if rest, ok := strings.CutPrefix(key, "slot."); ok {
		_, key, _ = strings.Cut(rest, ".")
	}
	return alternatives[key]
}

// replaceAlternatives makes way for what a stronger table chooses: one that names a credential means this one instead
// of the weaker table's, not a second one.
func replaceAlternatives(weaker, stronger *node, key string) {
	group := alternativesOf(key)
	if !slices.ContainsFunc(group, func(k string) bool { return stronger.table[k] != nil }) {
		return
	}
	for _, k := range group {
		if stronger.table[k] == nil {
			delete(weaker.table, k)
		}
	}
}
