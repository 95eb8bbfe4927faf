package kernlog

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// records is a /dev/kmsg: each write is a record.
type records []string

func (r *records) Write(b []byte) (int, error) {
	*r = append(*r, string(b))
	return len(b), nil
}

func (r *records) Close() error { return nil }

// FuzzError logs any error: never more than the kernel takes, and each record with its priority.
func FuzzError(f *testing.F) {
	f.Add("a\n\nb")
	f.Add(strings.Repeat("ä", 1000) + "\n\r" + strings.Repeat("\n", 20))
	f.Add("\xff<0>x\x00\n<0>y")
	f.Fuzz(func(t *testing.T, text string) {
		var written records
		(&Log{name: "prog", kmsg: &written, err: io.Discard}).Error(errors.New(text))
		if len(written) == 0 || len(written) > 10 {
			t.Errorf("%d records", len(written))
		}
		for _, r := range written {
			if len(r) > 976 || !strings.HasPrefix(r, "<3>prog[") || strings.Count(r, "\n") != 1 { // LOG_LINE_MAX of kernel/printk
				t.Errorf("record %q", r)
			}
		}
	})
}
