package kernlog

import (
	"strings"
	"testing"
)

// FuzzError logs any error: never more than the kernel takes, and each record with its priority.
func FuzzError(f *testing.F) {
	f.Add("a\n\nb")
	f.Add(strings.Repeat("ä", 1000) + "\n\r" + strings.Repeat("\n", 20))
	f.Add("\xff<0>x\x00\n<0>y")
	f.Fuzz(func(t *testing.T, text string) {
		written := records("prog", strings.Split(text, "\n"))
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
