package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"berth/generator/goalstate"
)

// maxSize bounds a stored goal state, in bytes. One file of a goal state is at most 1 MiB (goalstate.Load).
const maxSize = 4 << 20

// Record is the goal state with which a slot became ready, as the files that it was read from: what is made of them is made of the
// same bytes again.
type Record struct {
	Slot string
	// Number counts the records of all slots of a host. It tells which is the newest, which a clock that jumps does not.
	Number uint64
	// Time is when it was recorded, for people; in UTC, and whole seconds.
	Time    time.Time
	Sources []goalstate.Source
}

// magic begins the first line of a stored goal state, behind which is the SHA-256 of all other lines. Another format has another one.
const magic = "# Last good goal state of a node slot, format 1, SHA-256 of the rest: "

// what is the second line.
const what = "# Made by record-applied when the slot became ready. Used as it is or not at all: do not edit it.\n"

// Encode returns the record as it is stored. A goal state that is too large is an error.
func (r Record) Encode() ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%sslot %s\nnumber %d\nrecorded %s\n", what, r.Slot, r.Number, r.Time.UTC().Format(time.RFC3339))
	writeSources(&b, r.Sources)
	data := append([]byte(magic+checksum(b.Bytes())+"\n"), b.Bytes()...)
	if len(data) > maxSize {
		return nil, fmt.Errorf("the goal state is too large to be recorded: %d bytes: want %d at most", len(data), maxSize)
	}
	return data, nil
}

// writeSources writes each file with its length before and a line break behind.
func writeSources(b *bytes.Buffer, sources []goalstate.Source) {
	for _, s := range sources {
		fmt.Fprintf(b, "file %d %s\n%s\n", len(s.Data), s.Path, s.Data)
	}
}

// Digest tells goal states apart by all bytes of all their files.
func Digest(sources []goalstate.Source) string {
	var b bytes.Buffer
	writeSources(&b, sources)
	return checksum(b.Bytes())
}

func checksum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Decode reads what Encode wrote for a slot. Whatever else data is, is an error.
func Decode(slot string, data []byte) (Record, error) {
	head, rest, _ := bytes.Cut(data, []byte("\n"))
	sum, ok := strings.CutPrefix(string(head), magic)
	if !ok {
		return Record{}, errors.New("it does not begin as a stored goal state of this version of berth does")
	}
	if sum != checksum(rest) {
		return Record{}, errors.New("it is damaged: its checksum is another one")
	}
	r := parse(string(rest))
	// Only what Encode makes of the record again was read whole.
	if again, err := r.Encode(); err != nil || !bytes.Equal(again, data) {
		return Record{}, errors.New("it is damaged: it was not written by record-applied")
	}
	if r.Slot != slot {
		return Record{}, fmt.Errorf("it is the one of slot %s", r.Slot)
	}
	return r, nil
}

// parse reads the fields of a record as far as they are there.
func parse(rest string) (r Record) {
	rest = strings.TrimPrefix(rest, what)
	field := func(key string) string {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		return strings.TrimPrefix(line, key+" ")
	}
	r.Slot = field("slot")
	r.Number, _ = strconv.ParseUint(field("number"), 10, 64)
	r.Time, _ = time.Parse(time.RFC3339, field("recorded"))
	for rest != "" {
		length, path, _ := strings.Cut(field("file"), " ")
		n, err := strconv.Atoi(length)
		if err != nil || n < 0 || n >= len(rest) {
			return Record{}
		}
		r.Sources = append(r.Sources, goalstate.Source{Path: path, Data: []byte(rest[:n])})
		rest = strings.TrimPrefix(rest[n:], "\n")
	}
	return r
}
