package hostcheck

import (
	"path"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"berth/testdata/cputime"
)

// FuzzHost reads what files of a host may hold: sysctl.d(5), proc_pid_net(5), modules.dep(5).
func FuzzHost(f *testing.F) {
	f.Add([]byte("net.ipv4.ip_forward = 1\n-kernel/panic=10\n-a.*\n# x\n;\n=\na.b/c.d = 1\n[!x]/*=\n"), "net/ipv4/ip_forward", "0100007F:2808", "kernel/a-b.ko.xz: kernel/c.ko")
	f.Add([]byte("*=1\n*=1\n*=2\na=1\na=2"), "a", "00000000000000000000000001000000:ffff", "/")
	f.Add([]byte("[=1\n\\=2\n//=3\n..=4\n\x00=\xff"), "..", ":", "")
	f.Fuzz(func(t *testing.T, sysctl []byte, key, socket, modules string) {
		var settings []Setting
		took := cputime.Of(func() {
			settings = parseSysctl("/x", sysctl)
			resolve(settings, key)
			listed(modules, key)
		})
		last := 0
		for _, s := range settings {
			if s.Key != path.Clean(s.Key) || strings.TrimSpace(s.Value) != s.Value || s.Line <= last {
				t.Errorf("%+v after line %d", s, last)
			}
			last = s.Line
		}
		if s, ok := resolve(settings, key); ok && s.Excluded {
			t.Errorf("%+v decides, but sets nothing", s)
		}
		if again := sysctlName(sysctlName(key)); utf8.ValidString(key) && again != key {
			t.Errorf("%q became %q", key, again)
		}
		if a, _, ok := parseSocket(socket); ok && !a.IsValid() {
			t.Errorf("%q: no address", socket)
		}
		if took > time.Second+time.Duration(len(sysctl)+len(modules))*10*time.Microsecond {
			t.Errorf("took %v", took)
		}
	})
}
