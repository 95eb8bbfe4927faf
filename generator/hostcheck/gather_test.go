package hostcheck

import (
	"encoding/binary"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
)

// tree is a host with these files; a content that begins with "-> " is a link's target.
func tree(t *testing.T, files map[string]string) *file.Root {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if len(content) > 3 && content[:3] == "-> " {
			err = os.Symlink(content[3:], path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := file.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// TestSysctlOrder is about which file decides a variable, by sysctl.d(5).
func TestSysctlOrder(t *testing.T) {
	const own = "usr/lib/sysctl.d/90-berth.conf"
	for _, tt := range []struct {
		why    string
		key    string
		files  map[string]string
		value  string // empty: nothing sets it
		at     string
		line   int
		hidden string
	}{
		{why: "berth's own", key: "vm/x", value: "1", at: "/" + own, line: 1},
		{why: "a file of a later name, from whichever folder", key: "vm/x",
			files: map[string]string{"etc/sysctl.d/10-a.conf": "vm.x=3", "usr/lib/sysctl.d/99-z.conf": "\n # 5\n;6\nvm.x = 2 3 \n"},
			value: "2 3", at: "/usr/lib/sysctl.d/99-z.conf", line: 4},
		{why: "the same name in a stronger folder, of three", key: "vm/x",
			files: map[string]string{"usr/local/lib/sysctl.d/99.conf": "vm.x=3", "run/sysctl.d/99.conf": "vm.x=2", "usr/lib/sysctl.d/99.conf": "vm.x=4"},
			value: "2", at: "/run/sysctl.d/99.conf", line: 1},
		{why: "berth's own name in a stronger folder", key: "vm/x", files: map[string]string{"etc/sysctl.d/90-berth.conf": "vm.y=1"},
			hidden: "/etc/sysctl.d/90-berth.conf"},
		{why: "hidden by a link to /dev/null", key: "vm/x", files: map[string]string{"run/sysctl.d/90-berth.conf": "-> /dev/null"},
			hidden: "/run/sysctl.d/90-berth.conf"},
		{why: "no .conf", key: "vm/x", files: map[string]string{"etc/sysctl.d/99-z.conf~": "vm.x=2", "etc/sysctl.d/README": "vm.x=2"},
			value: "1", at: "/" + own, line: 1},
		{why: "the last line of a file", key: "vm/x", files: map[string]string{"etc/sysctl.d/99.conf": "vm.x=2\nvm.x=3"},
			value: "3", at: "/etc/sysctl.d/99.conf", line: 2},
		{why: "Debian's link", key: "vm/x", files: map[string]string{"etc/sysctl.d/99-sysctl.conf": "-> ../sysctl.conf", "etc/sysctl.conf": "vm.x=2"},
			value: "2", at: "/etc/sysctl.d/99-sysctl.conf", line: 1},
		{why: "slashes", key: "vm/x", files: map[string]string{"etc/sysctl.d/99.conf": "vm/x=2"}, value: "2", at: "/etc/sysctl.d/99.conf", line: 1},
		{why: "an interface's name with a dot", key: "net/ipv4/conf/eth0.5/y", files: map[string]string{"etc/sysctl.d/99.conf": "net.ipv4.conf.eth0/5.y=2"},
			value: "2", at: "/etc/sysctl.d/99.conf", line: 1},
		{why: "the same with slashes", key: "net/ipv4/conf/eth0.5/y", files: map[string]string{"etc/sysctl.d/99.conf": "net/ipv4/conf/eth0.5/y=2"},
			value: "2", at: "/etc/sysctl.d/99.conf", line: 1},
		{why: "an assignment whose failure does not matter", key: "vm/x", files: map[string]string{"etc/sysctl.d/99.conf": "-vm.x = 2"},
			value: "2", at: "/etc/sysctl.d/99.conf", line: 1},
		{why: "no value at all", key: "vm/x", files: map[string]string{"etc/sysctl.d/99.conf": "vm.x"}, value: "1", at: "/" + own, line: 1},

		{why: "a later glob does not win against a name", key: "vm/x", files: map[string]string{"etc/sysctl.d/99.conf": "vm.* = 2"},
			value: "1", at: "/" + own, line: 1},
		{why: "a glob", key: "net/ipv4/conf/all/z", files: map[string]string{"etc/sysctl.d/10.conf": "net.ipv4.conf.*.z = 2"},
			value: "2", at: "/etc/sysctl.d/10.conf", line: 1},
		{why: "the later one of two globs", key: "net/ipv4/conf/all/z",
			files: map[string]string{"etc/sysctl.d/10.conf": "net.ipv4.conf.*.z = 2", "etc/sysctl.d/11.conf": "net.ipv4.*.all.z = 3"},
			value: "3", at: "/etc/sysctl.d/11.conf", line: 1},
		{why: "a glob again, as it was: it keeps its place", key: "net/ipv4/conf/all/z", files: map[string]string{
			"etc/sysctl.d/10.conf": "net.ipv4.conf.*.z = 2", "etc/sysctl.d/11.conf": "net.ipv4.*.all.z = 3", "etc/sysctl.d/12.conf": "net.ipv4.conf.*.z = 2"},
			value: "3", at: "/etc/sysctl.d/11.conf", line: 1},
		{why: "a glob again, with another value", key: "net/ipv4/conf/all/z", files: map[string]string{
			"etc/sysctl.d/10.conf": "net.ipv4.conf.*.z = 2", "etc/sysctl.d/11.conf": "net.ipv4.*.all.z = 3", "etc/sysctl.d/12.conf": "net.ipv4.conf.*.z = 4"},
			value: "4", at: "/etc/sysctl.d/12.conf", line: 1},
		{why: "a star is one part of the name", key: "net/ipv4/conf/all/z", files: map[string]string{"etc/sysctl.d/10.conf": "net.*.z = 2"}},
		{why: "characters", key: "net/ipv4/conf/all/z", files: map[string]string{"etc/sysctl.d/10.conf": "net.ipv[!6].conf.a[k-m]?.z = 2"},
			value: "2", at: "/etc/sysctl.d/10.conf", line: 1},
		{why: "kept from globs, as upstream's 50-default.conf does it", key: "net/ipv4/conf/all/z",
			files: map[string]string{"usr/lib/sysctl.d/50-default.conf": "net.ipv4.conf.*.z = 2\n-net.ipv4.conf.all.z"}},
		{why: "kept from globs, and then set", key: "net/ipv4/conf/all/z",
			files: map[string]string{"usr/lib/sysctl.d/50-default.conf": "net.ipv4.conf.*.z = 2\n-net.ipv4.conf.all.z", "etc/sysctl.d/99.conf": "net.ipv4.conf.all.z=1"},
			value: "1", at: "/etc/sysctl.d/99.conf", line: 1},
		{why: "taken back", key: "vm/x", files: map[string]string{"etc/sysctl.d/99.conf": "-vm.x"}},
	} {
		files := map[string]string{own: "vm.x = 1\n"}
		for name, content := range tt.files {
			files[name] = content
		}
		settings, place := readSysctl(tree(t, files))
		got, set := resolve(settings, tt.key)
		if !set {
			got = Setting{}
		}
		if place == "/"+own {
			place = ""
		}
		if diff := cmp.Diff([]any{tt.value, tt.at, tt.line, tt.hidden}, []any{got.Value, got.File, got.Line, place}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.why, diff)
		}
	}
}

// Who can read a file depends on the folders of the file itself, not of a link to it.
func TestSecretFile(t *testing.T) {
	defer unix.Umask(unix.Umask(0o022))
	root := tree(t, map[string]string{
		"etc/berth/token": "-> ../../srv/secrets/token", "srv/secrets/token": "x", "etc/berth/dir/x": "", "etc/berth/nowhere": "-> /none",
	})
	if err := os.Chmod(filepath.Join(root.Name(), "srv/secrets"), 0o700); err != nil {
		t.Fatal(err)
	}
	got, ok := secretFile(root, "/etc/berth/token", "it")
	want := Secret{Path: "/etc/berth/token", What: "it", Mode: 0o644, Folders: []fs.FileMode{0o700, 0o755, 0o755}}
	if diff := cmp.Diff(want, got); diff != "" || !ok {
		t.Errorf("%v, -want +got:\n%s", ok, diff)
	}
	for _, name := range []string{"/etc/berth/dir", "/etc/berth/nowhere", "/etc/none"} {
		if s, ok := secretFile(root, name, "it"); ok {
			t.Errorf("%s: %v; want nothing, as it is no regular file", name, s)
		}
	}
}

func TestParseSocket(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the texts are those of a little-endian host")
	}
	for text, want := range map[string]string{
		"0100007F:2808":                         "127.0.0.1:10248",
		"00000000:280A":                         "0.0.0.0:10250",
		"00000000000000000000000001000000:0016": "[::1]:22",
		"0000000000000000FFFF00000500000A:0016": "10.0.0.5:22", // a socket of IPv6 that is bound to an IPv4 address
		"B80D0120000000000000000001000000:FFFF": "[2001:db8::1]:65535",
		"0100007F":                              "", "0100007F:12345": "", "01007F:1": "", "x:y": "", "": "",
	} {
		got := ""
		if a, port, ok := parseSocket(text); ok {
			got = netip.AddrPortFrom(a, port).String()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

func TestRebootedBy(t *testing.T) {
	const dir = "etc/apt/apt.conf.d/"
	for _, tt := range []struct {
		why   string
		files map[string]string
		want  string
	}{
		{"Debian's own file has it as a comment", map[string]string{dir + "50": "//Unattended-Upgrade::Automatic-Reboot \"true\";\n"}, ""},
		{"set", map[string]string{dir + "50": "x;\n  Unattended-Upgrade::Automatic-Reboot \"true\";\n"}, "/" + dir + "50"},
		{"in other letters and words", map[string]string{dir + "50": "unattended-upgrade::automatic-reboot yes;"}, "/" + dir + "50"},
		{"another key", map[string]string{dir + "50": `Unattended-Upgrade::Automatic-Reboot-WithUsers "true";`}, ""},
		{"taken back by a later file", map[string]string{
			dir + "50": `Unattended-Upgrade::Automatic-Reboot "true";`, dir + "99": `Unattended-Upgrade::Automatic-Reboot "false";`}, ""},
	} {
		if got := rebootedBy(tree(t, tt.files)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.why, got, tt.want)
		}
	}
}

func TestFileVersion(t *testing.T) {
	for name, want := range map[string]string{
		"usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-257.so": "257",          // Debian
		"usr/lib/systemd/libsystemd-shared-257.7-1.fc42.so":         "257.7-1.fc42", // Fedora
		"usr/lib64/systemd/libsystemd-shared-252-46.el9.so":         "252-46.el9",   // CentOS
		"usr/lib/systemd/libsystemd-core-257.so":                    "",
	} {
		if got := fileVersion(tree(t, map[string]string{name: ""})); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
