package node

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/testdata/lab"
)

// The versions that are packaged: an upgrade needs two.
const (
	oldVersion = "1.0.0+1.g0123456789ab"
	newVersion = "1.0.0+2.g0123456789ab"
)

var packageCases = []testCase{
	{"the .deb is installed, upgraded while a node runs, and removed when none does", func(t *testing.T, h *host) {
		dir := packages(t)
		h = h.bare(t, func(root string) error {
			return errors.Join(
				run(exec.Command("cp", deb(dir, oldVersion), filepath.Join(root, "root/old.deb"))),
				run(exec.Command("cp", deb(dir, newVersion), filepath.Join(root, "root/new.deb"))),
				// Not berth's, and changed since boot (below): to install a package is no reason to go back.
				write(filepath.Join(root, "etc/sysctl.d/99-other.conf"), []byte("net.ipv4.conf.default.log_martians = 1\n"), 0o644))
		})
		h.Must(t, "sysctl -w net.ipv4.ip_forward=0 net.ipv4.conf.default.log_martians=0")

		const apt = "DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io "
		h.Must(t, apt+"install /root/old.deb")
		want(t, h.Must(t, "sysctl net.ipv4.ip_forward; ls -d /run/bpffs; systemctl cat node@a"),
			"ip_forward = 1", "/run/bpffs", "Made by berth-generator")
		// From Debian 13 on systemd's own package applies all settings whenever a package brings some.
		if other := h.Must(t, "sysctl -n net.ipv4.conf.default.log_martians"); other != "0" && h.Suite() == "bookworm" {
			t.Errorf("log_martians = %s; want it left alone", other)
		}
		for _, slot := range []string{"a", "b"} {
			h.wantDown(t, slot)
		}
		want(t, h.Must(t, "berth --version; /usr/lib/berth/wait-kubelet --version"), "berth version "+oldVersion, "wait-kubelet "+oldVersion)
		h.start(t, "a")

		before := h.runs(t, "a")
		h.Must(t, apt+"install /root/new.deb")
		want(t, h.Must(t, "berth --version"), newVersion)
		sameRuns(t, h, before)

		want(t, h.fails(t, apt+"remove berth"), "first run systemctl stop node@a.service")
		sameRuns(t, h, before)
		h.Must(t, "systemctl stop node@a")
		h.wantDown(t, "a")

		h.Must(t, apt+"remove berth")
		if out, exit := h.try(t, "systemctl cat node@a node-peer-guard@a"); exit == 0 {
			t.Errorf("systemd still knows:\n%s", out)
		}
		h.Must(t, "test -e /etc/needrestart/conf.d/50-berth.conf; "+apt+"purge berth; test ! -e /etc/needrestart/conf.d/50-berth.conf; test ! -e /var/lib/berth")
		h.Must(t, "test -e /etc/berth/goal.toml; test ! -e /usr/lib/berth")
	}},
}

// bare boots one more host of the same release, on which all is ready for berth but berth itself is not installed.
func (h *host) bare(t *testing.T, prepare func(root string) error) *host {
	t.Helper()
	other := &host{Host: lab.New(t, lab.Options{Suite: h.Suite(), Prepare: func(root string) error {
		return errors.Join(InstallMachines(root), WriteGoal(root, Goal+budgets), prepare(root))
	}})}
	t.Cleanup(func() {
		other.explain(t)
		other.reconnect()
	})
	return other
}

// packages makes the packages of both versions, once, and returns their folder.
func packages(t *testing.T) string {
	t.Helper()
	dir, err := makePackages()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "build")
}

// packagesDir is where makePackages has made something; TestMain removes it.
var packagesDir string

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(packagesDir)
	os.Exit(code)
}

var makePackages = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "berth-packages-")
	if err != nil {
		return "", err
	}
	packagesDir = dir
	for _, version := range []string{oldVersion, newVersion} {
		if err := Packages(dir, version); err != nil {
			return dir, err
		}
	}
	return dir, nil
})

func deb(dir, version string) string {
	return filepath.Join(dir, "berth_"+version+"_"+runtime.GOARCH+".deb")
}

func rpm(dir, version string) string {
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	return filepath.Join(dir, "berth-"+version+"-1."+arch+".rpm")
}

// TestPackages compares what is in the .deb and in the .rpm.
func TestPackages(t *testing.T) {
	if testing.Short() {
		t.Skip("builds packages")
	}
	for _, program := range []string{"dpkg-deb", "rpm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip("needs ", program)
		}
	}
	t.Parallel()
	dir := packages(t)
	output := func(script string) string {
		t.Helper()
		out, err := exec.Command("sh", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return string(out)
	}
	files := func(list string) []string {
		var files []string
		for line := range strings.Lines(list) {
			// FILE or MODE FILE; of the .rpm only berth's own folders are part.
			name := strings.TrimPrefix(strings.TrimSpace(line), ".")
			if !strings.HasSuffix(name, "/") && !strings.Contains(name, "/doc/") && !strings.Contains(name, "/lintian/") &&
				!strings.Contains(name, "/licenses/") && !strings.Contains(name, "/vendor-completions/") {
				files = append(files, name)
			}
		}
		slices.Sort(files)
		return files
	}
	inDeb := files(output("dpkg-deb --fsys-tarfile " + deb(dir, oldVersion) + " | tar --list"))
	inRPM := files(output("rpm --query --queryformat '[%{FILEMODES:perms} %{FILENAMES}\n]' --package " + rpm(dir, oldVersion) + " | sed -n 's/^-[^ ]* //p'"))
	if diff := cmp.Diff(inDeb, inRPM); diff != "" || len(inDeb) < 30 {
		t.Errorf("%d files; -deb +rpm: %s", len(inDeb), diff)
	}
	for name, content := range map[string]string{
		"rpm --requires": output("rpm --query --requires --package " + rpm(dir, oldVersion)),
		"deb Depends":    output("dpkg-deb --field " + deb(dir, oldVersion) + " Depends | tr -d '()' | tr , '\n'"),
	} {
		for _, dependency := range []string{"systemd >= 252", "systemd-container >= 252", "dbus"} {
			if !strings.Contains(content, dependency) {
				t.Errorf("%s: %q; want %s", name, content, dependency)
			}
		}
	}
	if _, err := exec.LookPath("lintian"); err == nil {
		// What is not to be mended is in units/package/lintian-overrides.
		output("lintian --allow-root --fail-on error,warning " + deb(dir, newVersion))
	}
	scripts := output("rpm --query --scripts --package " + rpm(dir, oldVersion))
	want(t, scripts, "preuninstall scriptlet", "a node runs", "postinstall scriptlet", "postuninstall scriptlet")
	if configs := output("rpm --query --configfiles --package " + rpm(dir, oldVersion)); configs != "/etc/needrestart/conf.d/50-berth.conf\n" {
		t.Errorf("configuration files of the .rpm: %q", configs)
	}
	if configs := output("dpkg-deb --info " + deb(dir, oldVersion) + " conffiles"); configs != "/etc/needrestart/conf.d/50-berth.conf\n" {
		t.Errorf("configuration files of the .deb: %q", configs)
	}
}

// TestReproducible makes packages again, of a copy of the source in another folder with other times: programs and packages are the same
// bytes. Programs are static and stripped, and do not tell where they were built.
func TestReproducible(t *testing.T) {
	if testing.Short() {
		t.Skip("builds packages")
	}
	t.Parallel()
	source, err := sourceDir()
	if err != nil {
		t.Fatal(err)
	}
	first, again := filepath.Dir(packages(t)), t.TempDir()
	moved := filepath.Join(t.TempDir(), "another", "place")
	for _, name := range []string{"docs", "generator", "helpers", "templates", "units"} {
		if err := os.CopyFS(filepath.Join(moved, name), os.DirFS(filepath.Join(source, name))); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"LICENSE", "go.mod", "go.sum", "install.sh", "nfpm.yaml"} {
		if err := run(exec.Command("cp", filepath.Join(source, name), moved)); err != nil {
			t.Fatal(err)
		}
	}
	if err := packagesFrom(moved, again, newVersion); err != nil {
		t.Fatal(err)
	}

	bin, err := filepath.Glob(filepath.Join(again, "bin/*"))
	if err != nil {
		t.Fatal(err)
	}
	var programs []string
	for _, name := range append(bin, deb(again+"/build", newVersion), rpm(again+"/build", newVersion)) {
		if info, err := os.Stat(name); err != nil || info.IsDir() {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		content, err := os.ReadFile(name)
		before, err2 := os.ReadFile(filepath.Join(first, strings.TrimPrefix(name, again)))
		if err := errors.Join(err, err2); err != nil {
			t.Error(err)
		} else if !bytes.Equal(content, before) {
			t.Errorf("%s: %d bytes, which are not the %d of the first time", strings.TrimPrefix(name, again), len(content), len(before))
		}
		if program, err := elf.NewFile(bytes.NewReader(content)); err == nil {
			programs = append(programs, filepath.Base(name))
			for _, p := range program.Progs {
				if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
					t.Errorf("%s is not static: it has a segment %v", name, p.Type)
				}
			}
			for _, section := range program.Sections {
				if section.Type == elf.SHT_SYMTAB || strings.HasPrefix(section.Name, ".debug") || strings.HasPrefix(section.Name, ".zdebug") {
					t.Errorf("%s is not stripped: it has a section %s", name, section.Name)
				}
			}
			if bytes.Contains(content, []byte(moved)) {
				t.Errorf("%s has %s in it", name, moved)
			}
		}
	}
	// And the bill of materials is about just these.
	var bom struct {
		Components []struct {
			Type, Name, Version, PURL string
			Hashes                    []struct{ Content string }
		}
	}
	text, err := os.ReadFile(filepath.Join(again, "bin/berth.cdx.json"))
	if err := errors.Join(err, json.Unmarshal(text, &bom)); err != nil {
		t.Fatal(err)
	}
	var listed, libraries []string
	for _, c := range bom.Components {
		if c.Type == "library" {
			libraries = append(libraries, c.PURL)
			continue
		}
		listed = append(listed, c.Name)
		content, err := os.ReadFile(filepath.Join(again, "bin", c.Name))
		if sum := sha256.Sum256(content); err != nil || len(c.Hashes) != 1 || c.Hashes[0].Content != hex.EncodeToString(sum[:]) || c.Version != newVersion {
			t.Errorf("%+v: want version %s, SHA-256 %x (%v)", c, newVersion, sum, err)
		}
	}
	slices.Sort(listed)
	if diff := cmp.Diff(programs, listed); diff != "" || len(programs) != 9 {
		t.Errorf("programs, -built +listed: %s", diff)
	}
	for _, purl := range []string{"pkg:golang/std@" + strings.TrimPrefix(runtime.Version(), "go"), "pkg:golang/github.com/BurntSushi/toml@v"} {
		if !slices.ContainsFunc(libraries, func(l string) bool { return strings.HasPrefix(l, purl) }) {
			t.Errorf("no %s in %q", purl, libraries)
		}
	}
}

// TestInstall installs below another prefix, has the generator make units, and uninstalls.
func TestInstall(t *testing.T) {
	if testing.Short() {
		t.Skip("builds all programs")
	}
	t.Parallel()
	source, err := sourceDir()
	if err != nil {
		t.Fatal(err)
	}
	dest, out := t.TempDir(), t.TempDir()
	install := func(verb, prefix string) (string, error) {
		cmd := exec.Command(filepath.Join(source, "install.sh"), verb)
		cmd.Env = append(os.Environ(), "DESTDIR="+dest, "OUT="+out, "PREFIX="+prefix, "VERSION="+oldVersion)
		text, err := cmd.CombinedOutput()
		return string(text), err
	}
	for _, prefix := range []string{"opt", "/opt/", "/opt/%i", "/opt/a b"} {
		if text, err := install("install", prefix); err == nil || !strings.Contains(text, "want an absolute path") {
			t.Errorf("PREFIX=%q: %v, %s; want it refused: it becomes part of units", prefix, err, text)
		}
	}
	if text, err := install("install", "/opt/berth"); err != nil {
		t.Fatal(err, text)
	}
	units := filepath.Join(dest, "usr/lib/systemd/system")
	generated := t.TempDir()
	if err := WriteGoal(dest, Goal); err != nil {
		t.Fatal(err)
	}
	generator := exec.Command(filepath.Join(dest, "usr/lib/systemd/system-generators/berth-generator"), generated, generated, generated)
	generator.Env = append(os.Environ(), "BERTH_ROOT="+dest)
	if err := run(generator); err != nil {
		t.Fatal(err)
	}
	commands := 0
	for _, dir := range []string{units, generated} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(path)
			for _, match := range regexp.MustCompile(`(?m)^Exec\w+=-?(/\S*berth/\S+)`).FindAllStringSubmatch(string(text), -1) {
				commands++
				if _, err := os.Stat(filepath.Join(dest, match[1])); err != nil {
					t.Errorf("%s: %s: %v", path, match[0], err)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if commands < 15 {
		t.Errorf("%d commands in units; want those of all steps", commands)
	}
	version, err := exec.Command(filepath.Join(dest, "opt/berth/bin/berth"), "--version").Output()
	if want := "berth version " + oldVersion + " (" + runtime.Version() + ")\n"; string(version) != want || err != nil {
		t.Errorf("berth --version: %q, %v; want %q", version, err, want)
	}

	if text, err := install("uninstall", "/opt/berth"); err != nil {
		t.Fatal(err, text)
	}
	err = filepath.WalkDir(dest, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !strings.HasPrefix(path, filepath.Join(dest, "etc/berth")+"/") {
			t.Errorf("uninstall left %s", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
