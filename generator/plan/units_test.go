package plan

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	sdunit "github.com/coreos/go-systemd/v22/unit"
	"github.com/google/go-cmp/cmp"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/testdata/unitfile"
)

// options are a unit file's assignments in their order.
type options []*sdunit.UnitOption

func parse(t testing.TB, name string, content []byte) options {
	t.Helper()
	opts, err := sdunit.DeserializeOptions(bytes.NewReader(content))
	if err != nil || len(opts) == 0 {
		t.Fatalf("%s: %v, %d assignments:\n%s", name, err, len(opts), content)
	}
	return opts
}

// values returns the words of all assignments of these keys.
func (o options) values(keys ...string) (words []string) {
	for _, opt := range o {
		if slices.Contains(keys, opt.Name) {
			words = append(words, strings.Fields(opt.Value)...)
		}
	}
	return words
}

// one returns the value of the only assignment of the key.
func (o options) one(t *testing.T, key string) string {
	t.Helper()
	words := o.values(key)
	if len(words) != 1 {
		t.Errorf("%s=: %q, want one value", key, words)
		return ""
	}
	return words[0]
}

// static returns the units that berth ships, by name.
func static(t *testing.T) map[string]options {
	t.Helper()
	services, err := filepath.Glob("../../units/*.service")
	targets, err2 := filepath.Glob("../../units/*.target")
	if err != nil || err2 != nil || len(services) == 0 || len(targets) == 0 {
		t.Fatalf("no units: %v, %v", err, err2)
	}
	files := append(services, targets...)
	units := map[string]options{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		units[filepath.Base(f)] = parse(t, f, b)
	}
	return units
}

// generated returns the units of a goal state that needs every kind of file, by path.
func generated(t testing.TB) map[string]options {
	t.Helper()
	units := map[string]options{}
	for _, f := range mustUnits(t, mustParse(t, full), []string{"c"}) {
		if f.Mode.IsRegular() {
			units[f.Path] = parse(t, f.Path, f.Content)
		}
	}
	return units
}

const full = `boot = "a"
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[kubelet]
bootstrap_token_credential = "token"
[timeouts]
ready = "1m"
after_start = "4m"
[slot.a]
[slot.b]
`

func mustParse(t testing.TB, goal string) *goalstate.GoalState {
	t.Helper()
	g, err := goalstate.Parse([]goalstate.Source{{Path: "/etc/berth/goal.toml", Data: []byte(goal)}})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func mustUnits(t testing.TB, goal *goalstate.GoalState, held []string) []file.File {
	t.Helper()
	files, err := Units(goal, held)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestDependencies is about all units, those that berth ships and those that it makes.
func TestDependencies(t *testing.T) {
	all := static(t)
	for name, opts := range generated(t) {
		all["generator/"+name] = opts
	}
	bare := regexp.MustCompile(`@\.[a-z]+$`)
	for name, opts := range all {
		// A bare template name means an instance of the unit's own, if anything.
		for _, unit := range opts.values("Requires", "Requisite", "Wants", "Upholds", "PartOf", "After", "Before", "OnFailure",
			"OnSuccess", "PropagatesStopTo", "StopPropagatedFrom", "PropagatesReloadTo", "ReloadPropagatedFrom",
			"JoinsNamespaceOf", "WantedBy", "RequiredBy") {
			if bare.MatchString(unit) {
				t.Errorf("%s: depends on %s, which is a template", name, unit)
			}
		}
		// Requires= alone starts both at the same time.
		for _, unit := range opts.values("Requires", "Requisite") {
			if !slices.Contains(opts.values("After"), unit) {
				t.Errorf("%s: Requires=%s without its After=", name, unit)
			}
		}
		// BindsTo= would take the node down with a machine that restarts, Conflicts= kills the running slot, and of two
		// units that conflict at boot systemd drops both.
		if found := opts.values("BindsTo", "Conflicts", "RestartMode"); found != nil {
			t.Errorf("%s: BindsTo=, Conflicts= or RestartMode=: %q", name, found)
		}
	}
}

// TestRestart is about what units/node-chain@.target tells of: what a unit that is restarted automatically wants without
// being ordered after it is started at once, and not only after RestartSec=.
func TestRestart(t *testing.T) {
	for _, name := range []string{"node@a.service", "systemd-nspawn@node-a.service.d/50-berth.conf"} {
		opts := generated(t)[name]
		wants := opts.values("Wants", "Requires")
		if wants == nil {
			t.Errorf("%s pulls in nothing", name)
		}
		for _, unit := range wants {
			if !slices.Contains(opts.values("After"), unit) {
				t.Errorf("%s: Wants=%s without After=", name, unit)
			}
		}
	}
	for name, wants := range map[string]string{"node-chain@.target": "node-kubelet@%i.service", "node-call@.target": "node@%i.service"} {
		call := static(t)[name]
		if !slices.Equal(call.values("Wants"), []string{wants}) || call.values("After") != nil || call.one(t, "DefaultDependencies") != "no" ||
			call.one(t, "ConditionPathExists") != "!/" {
			t.Errorf("%s: %v; want it to pull in %s, not to wait for it, and not to become active", name, call, wants)
		}
	}
}

// TestSteps is about the units of the chain.
func TestSteps(t *testing.T) {
	steps := 0
	for name, opts := range static(t) {
		if strings.HasSuffix(name, ".target") {
			continue // no step: it only pulls them in
		}
		if strings.HasPrefix(name, "node-") {
			steps++
			if name == "node-record-applied@.service" {
				// A stop of the node that reached it would be refused while it is at work, where it is one with --job-mode=fail.
				for _, key := range []string{"Requires", "Requisite", "BindsTo", "PartOf", "StopPropagatedFrom"} {
					if values := opts.values(key); values != nil {
						t.Errorf("%s: %s=%s: want none", name, key, values)
					}
				}
			} else if !slices.Contains(opts.values("PartOf"), "node@%i.service") {
				t.Errorf("%s: is not PartOf= the node, which then does not stop or restart it", name)
			}
			if extra := opts.values("LogExtraFields"); !slices.Contains(extra, "OBJECT_SYSTEMD_UNIT=node@%i.service") {
				t.Errorf("%s: systemctl status of the node does not show its log: %q", name, extra)
			}
		}
		want := map[string][]string{"Type": {"oneshot"}, "RemainAfterExit": {"yes"}, "StartLimitIntervalSec": {"0"}}
		if name == "node-record-applied@.service" || name == "berth-last-good.service" {
			want["RemainAfterExit"] = nil // what they do is to be done each time that they are started
		}
		for key, want := range want {
			if got := opts.values(key); !slices.Equal(got, want) {
				t.Errorf("%s: %s=%s, want %s", name, key, got, want)
			}
		}
		if d, err := time.ParseDuration(opts.one(t, "TimeoutStartSec")); err != nil || d <= 0 {
			t.Errorf("%s: TimeoutStartSec= %v, %v: a oneshot without one waits for ever", name, d, err)
		}
	}
	if steps != 9 {
		t.Errorf("%d steps, want 9: did one get another name?", steps)
	}
}

// TestBudgets compares the numbers of the static units with those of a goal state that sets none, which makes no drop-ins, and with what
// total adds up.
func TestBudgets(t *testing.T) {
	units := static(t)
	budget := func(opts options) (helper, unit string) {
		for _, env := range opts.values("Environment") {
			helper, _ = strings.CutPrefix(env, "BERTH_BUDGET=")
		}
		return duration(t, helper), duration(t, opts.one(t, "TimeoutStartSec"))
	}
	for step, want := range budgets(defaultTimeouts) {
		helper, unit := budget(units[step+"@.service"])
		if helper != want.String() || unit != (want+grace).String() {
			t.Errorf("%s@.service: %s and %s, the goal state's defaults: %s and %s", step, helper, unit, want, want+grace)
		}
	}
	for _, f := range mustUnits(t, mustParse(t, strings.NewReplacer("1m", "2m", "4m", "3m").Replace(full)), nil) {
		if bytes.Contains(f.Content, []byte("BERTH_BUDGET")) {
			t.Errorf("%s says what the static unit says", f.Path)
		}
	}
	for step, want := range map[string]time.Duration{"node-peer-guard": guardBudget,
		"node-render-containerd": renderBudget, "node-render-kubelet": renderBudget} {
		if got := duration(t, units[step+"@.service"].one(t, "TimeoutStartSec")); got != want.String() {
			t.Errorf("%s@.service: TimeoutStartSec=%s, want %s", step, got, want)
		}
	}
	if defaults := mustParse(t, strings.NewReplacer(`ready = "1m"`, "", `after_start = "4m"`, "").Replace(full)).Slots["a"].Timeouts; defaults.Ready != defaultTimeouts.Ready || defaults.AfterStart != defaultTimeouts.AfterStart {
		t.Errorf("defaultTimeouts are %v, the goal state's defaults %v", defaultTimeouts, defaults)
	}
}

// duration writes a duration in one way.
func duration(t *testing.T, s string) string {
	t.Helper()
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Error(err)
	}
	return d.String()
}

// TestFallback compares the static node@.service with the generated one, which hides it. They differ in that only the
// generated one pulls in the chain, and waits for it.
func TestFallback(t *testing.T) {
	differ := []string{"Wants", "After", "TimeoutStartSec", "SourcePath"}
	shared := func(opts options) (lines []string) {
		for _, opt := range opts {
			if !slices.Contains(differ, opt.Name) {
				lines = append(lines, "["+opt.Section+"] "+opt.Name+"="+strings.ReplaceAll(opt.Value, "%i", "a"))
			}
		}
		return lines
	}
	fallback := static(t)["node@.service"]
	if diff := cmp.Diff(shared(generated(t)["node@a.service"]), shared(fallback)); diff != "" {
		t.Errorf("-generated +static:\n%s", diff)
	}
	if found := fallback.values("Wants", "Requires"); found != nil {
		t.Errorf("the static one pulls in %q, and would start a slot that is not in the goal state", found)
	}
}

// TestVerify has systemd load all units. It drops a job of an ordering cycle at random, and verify still exits with 0, so
// what it prints is what counts.
func TestVerify(t *testing.T) {
	const system = "usr/lib/systemd/system"
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("needs systemd-analyze")
	}
	if _, err := os.Stat("/" + system + "/systemd-nspawn@.service"); err != nil {
		t.Skip("needs the unit of systemd-nspawn: ", err)
	}
	verify := func(more ...file.File) string {
		root := t.TempDir()
		if err := os.CopyFS(filepath.Join(root, system), os.DirFS("/"+system)); err != nil {
			t.Skip("cannot copy this host's units: ", err)
		}
		r, err := file.OpenRoot(root)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for name, opts := range static(t) {
			b, err := os.ReadFile("../../units/" + name)
			if err != nil {
				t.Fatal(err)
			}
			more = append(more, file.File{Path: system + "/" + name, Mode: 0o644, Content: b})
			for _, key := range []string{"ExecStart", "ExecStop", "ExecStopPost"} {
				if words := opts.values(key); words != nil {
					more = append(more, file.File{Path: strings.TrimLeft(words[0], "-/"), Mode: 0o755, Content: []byte("#!/bin/sh\n")})
				}
			}
		}
		for _, f := range mustUnits(t, mustParse(t, full), []string{"c"}) {
			f.Path = "etc/systemd/system/" + f.Path // systemd-analyze looks into no generator's folder
			more = append(more, f)
		}
		if _, err := r.WriteAll(more); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(analyze, "verify", "--man=no", "--root="+root, "multi-user.target", "node@a.service", "node@b.service",
			"node@c.service")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return string(out)
	}
	ours := regexp.MustCompile(`(?m)^.*(node|nspawn|cycle).*$`) // and not what this host's other units are blamed for
	if found := ours.FindAllString(verify(), -1); found != nil {
		t.Errorf("systemd-analyze verify: %s", strings.Join(found, "\n"))
	}
	// It does see all of them: a cycle through the whole chain is found.
	cycle := verify(file.File{Path: system + "/node-peer-guard@.service.d/cycle.conf", Mode: 0o644,
		Content: []byte("[Unit]\nAfter=node-kubelet@%i.service\n")})
	if !strings.Contains(cycle, "ordering cycle") {
		t.Errorf("a cycle is not found: %s", cycle)
	}
}

// shape is a file's sections and keys, in their order. A credential is the same whether it is encrypted or not.
func shape(opts options) (s []string) {
	for _, opt := range opts {
		s = append(s, opt.Section+"."+strings.TrimSuffix(opt.Name, "Encrypted"))
	}
	return s
}

// kind is a file's path without its slot.
func kind(p string) string { return ofSlot.ReplaceAllString(p, "${1}SLOT${2}") }

var ofSlot = regexp.MustCompile(`(@|node-|node\\x2d)[a-z0-9]{1,16}(\.service|\.mount)`)

// FuzzUnits plans whatever goal state is accepted, and reads the units back: no value can add or hide a section or a key.
func FuzzUnits(f *testing.F) {
	want := map[string][]string{}
	for p, opts := range generated(f) {
		want[kind(p)] = shape(opts)
	}
	for _, credential := range []string{`a`, `a\`, `"`, `'a"`, `%n%%`, `$x`, `a;b#c`, `[Service]`, `ExecStart=x`, `@SLOT@`} {
		f.Add("/etc/berth/goal.toml", strings.Replace(full, `"token"`, "'''"+credential+"'''", 1))
	}
	f.Add("/x", strings.Replace(full, "token_credential", "token_encrypted_credential", 1))
	for _, source := range []string{`/a\`, `/%i $x "q" 'q`, "/a\n[Service]\nExecStart=x", "/ ", "/\xff", "/@SLOT@", "/a\r", "/[Unit]"} {
		f.Add(source, full)
	}
	f.Add("/x", strings.NewReplacer("1m", "1500ms", "4m", "24h", "[slot.a]", "[slot.a]\npeers = []").Replace(full))
	f.Fuzz(func(t *testing.T, source, goal string) {
		if len(source) > len("/usr/lib/berth/goal.toml.d/")+255 {
			return // there is no such file (NAME_MAX)
		}
		g, err := goalstate.Parse([]goalstate.Source{{Path: source, Data: []byte(goal)}, {Path: source, Data: []byte("# twice")}})
		if errors.Is(err, goalstate.ErrNone) {
			t.Fatal(err)
		}
		files, err := Units(g, []string{"held"})
		if err != nil {
			return // refused
		}
		if !slices.IsSortedFunc(files, func(a, b file.File) int { return strings.Compare(a.Path, b.Path) }) {
			t.Error("not sorted")
		}
		for _, f := range files {
			if !f.Mode.IsRegular() {
				if path.Dir(f.Path) != "multi-user.target.wants" {
					t.Errorf("link %s", f.Path)
				}
				continue
			}
			opts := parse(t, f.Path, f.Content)
			if want, got := want[kind(f.Path)], shape(opts); !slices.Equal(want, got) {
				t.Errorf("%s: sections and keys (-want +got):\n%s\n%s", f.Path, cmp.Diff(want, got), f.Content)
			}
			if bytes.ContainsRune(f.Content, '\r') {
				t.Errorf("%s: %q", f.Path, f.Content)
			}
		}
		// But for the two strings that people choose, each value is that of a goal state without such.
		harmless := *g
		harmless.Slots = map[string]*goalstate.Slot{}
		for name, slot := range g.Slots {
			s := *slot
			for _, name := range []*string{&s.Kubelet.BootstrapTokenCredential, &s.Kubelet.BootstrapTokenEncryptedCredential} {
				if *name != "" {
					*name = "token"
				}
			}
			harmless.Slots[name] = &s
		}
		if len(g.Sources) > 0 {
			harmless.Sources = []string{"/harmless"}
		}
		for i, f := range mustUnits(t, &harmless, []string{"held"}) {
			if f.Path != files[i].Path {
				t.Fatalf("%s instead of %s", files[i].Path, f.Path)
			}
			if !f.Mode.IsRegular() {
				continue
			}
			want, got := readOptions(t, f.Content), readOptions(t, files[i].Content)
			if len(want) != len(got) {
				t.Fatalf("%s: %d assignments, want %d", f.Path, len(got), len(want))
			}
			for j, o := range want {
				switch o.Key {
				case "SourcePath":
					want[j].Value = source
					got[j].Value = read(t, unitfile.Specifiers, got[j].Value)
				case "LoadCredential", "LoadCredentialEncrypted":
					_, slot, _ := strings.Cut(strings.TrimSuffix(path.Dir(f.Path), ".service.d"), "@")
					want[j].Value, _ = g.Slots[slot].Kubelet.Credential()
					words := read(t, unitfile.Split, got[j].Value)
					got[j].Value = read(t, unitfile.Specifiers, strings.Join(words, ":")) // a colon would be seen
				}
			}
			if !slices.Equal(want, got) {
				t.Errorf("%s: values (-want +got):\n%s\n%s", f.Path, cmp.Diff(want, got), files[i].Content)
			}
		}
	})
}

// readOptions reads a unit as systemd does, apart from go-systemd.
func readOptions(t *testing.T, content []byte) []unitfile.Option {
	t.Helper()
	return read(t, unitfile.Parse, content)
}

func read[A, B any](t *testing.T, reader func(A) (B, error), text A) B {
	t.Helper()
	b, err := reader(text)
	if err != nil {
		t.Error(err)
	}
	return b
}
