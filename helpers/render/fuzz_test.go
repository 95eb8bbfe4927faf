package render

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	sdunit "github.com/coreos/go-systemd/v22/unit"
	"github.com/google/go-cmp/cmp"
	yaml3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"

	"berth/generator/device"
	"berth/generator/goalstate"
	"berth/helpers/facts"
	"berth/testdata/pki"
	"berth/testdata/unitfile"
)

// The fuzz tests of this package render a goal state twice: once with harmless words in it, and once with whatever is accepted in
// their place. Both are read back, by other readers than what the writers come from; then the second has to be the first with the
// words replaced. So no value can add, hide or change anything but itself.

// skeleton is a goal state with a harmless word in each string that people choose, "free" with a number.
const skeleton = `
[cluster]
server = "https://free01.example:6443"
certificate_authority = "/ca.crt"
domain = "free02.local"
[kubelet]
binary = "/free03/kubelet"
node_name = "free04"
labels = { "free05/free06" = "free07" }
taints = ["free08=free09:NoSchedule"]
exec = { command = "/free10", args = ["free11", "-free12"], env = { A = "free13", "free14" = "x" } }
[kubelet.config]
staticPodURL = "free15"
staticPodURLHeader = { "free16" = ["x"], X = ["free17", ""] }
[containerd]
binary = "/free18/containerd"
runc = "/free19/runc"
sandbox_image = "free20"
[containerd.registry."free21.example"]
[containerd.registry.other]
server = "https://free22.example"
mirrors = [
    { url = "https://free23.example", ca = "/free24" },
    { url = "http://host/free25", header = { "free26" = ["x"], X = ["free27"] } },
]
[containerd.config]
"free28" = "x"
plugins.x = { "free29" = "x", string = "free30", list = ["free31", "x"], tables = [{ "free32" = "free33" }] }
plugins."free34" = {}
[nvidia]
runtime_class = "free35"
default_runtime = true
[machine]
devices = ["/dev/free36"]
mounts = [
    { source = "/free37", target = "/mnt", read_only = true },
    { source = "/srv", target = "/free38" },
    { source = "/free39" },
]
[slot.a]
`

// from is the path of that goal state.
const from = "/etc/berth/free00.toml"

// word is the harmless word of a number.
func word(number int) string { return fmt.Sprintf("free%02d", number) }

const words = 40

// escape returns a string as it stands between the quotes of TOML.
func escape(s string) string {
	var b strings.Builder
	for i := range len(s) { // bytes: what is not UTF-8 is for the goal state to refuse
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b.WriteString(`\` + string(c))
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&b, `\u%04x`, c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// parse reads the skeleton with some words replaced.
func parse(replace map[string]string) (*goalstate.Slot, []string, error) {
	text, path := skeleton, from
	var pairs []string
	for w, s := range replace {
		pairs = append(pairs, w, escape(s))
		path = strings.ReplaceAll(path, w, s)
	}
	text = strings.NewReplacer(pairs...).Replace(text)
	g, err := goalstate.Parse([]goalstate.Source{{Path: path, Data: []byte(text)}})
	if err != nil {
		return nil, nil, err
	}
	return g.Slots["a"], g.Sources, nil
}

// read renders a slot and returns, by path, what programs get to see of its files. The errors are those of rendering.
func read(t testing.TB, slot *goalstate.Slot, sources []string, version int) (map[string]any, error) {
	t.Helper()
	configured := *slot
	configured.Containerd.ConfigVersion = version
	h := facts.Host{
		Name: "host", Modules: true, BPF: true, GPU: true, Devices: slices.Concat([]string{"/dev/kmsg"}, slot.Machine.Devices),
		CertificateAuthority: authority,
	}
	m := facts.Machine{Root: "/root"}
	nspawn, err1 := NSpawn(&configured, sources, h)
	containerd, err2 := Containerd(&configured, sources, h, m)
	kubelet, err3 := Kubelet(&configured, sources, h, m, Secrets{})
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	seen := map[string]any{}
	for _, f := range slices.Concat(nspawn.Files, containerd.Files, kubelet.Files) {
		if !f.Mode.IsRegular() {
			seen[f.Path] = f.Mode.String() + string(f.Content)
			continue
		}
		what, err := readFile(f.Path, f.Content)
		if err != nil {
			t.Errorf("%s: %v\n%s", f.Path, err, f.Content)
		}
		seen[f.Path] = what
	}
	for _, name := range slices.Concat(nspawn.Remove, containerd.Remove, kubelet.Remove) {
		seen[name] = "removed"
	}
	return seen, nil
}

var authority = func() string {
	a, err := pki.New("test")
	if err != nil {
		panic(err)
	}
	return a.Certificate
}()

// replaced returns what was read with the words replaced, in keys and values.
func replaced(v any, words *strings.Replacer) any {
	switch v := v.(type) {
	case map[string]any:
		m := make(map[string]any, len(v))
		for k, e := range v {
			m[words.Replace(k)] = replaced(e, words)
		}
		return m
	case []any:
		list := slices.Clone(v)
		for i, e := range v {
			list[i] = replaced(e, words)
		}
		return list
	case string:
		return words.Replace(v)
	}
	return v
}

// sorted puts in order what berth sorts by a string that people choose, and whose order means nothing: mounts, variables, labels.
func sorted(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for _, e := range v {
			sorted(e)
		}
	case []any:
		for _, e := range v {
			sorted(e)
		}
		isSet := !slices.ContainsFunc(v, func(e any) bool {
			m, isTable := e.(map[string]any)
			list, isList := e.([]any)
			return !(isTable && m["name"] != nil || isList && len(list) > 0 && strings.HasPrefix(fmt.Sprint(list[0]), "Files.Bind"))
		})
		if isSet {
			slices.SortFunc(v, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
		}
	}
	return v
}

// FuzzValues puts two strings into the places of two words.
func FuzzValues(f *testing.F) {
	harmless, sources, err := parse(nil)
	if err != nil {
		f.Fatal(err)
	}
	base := map[int]map[string]any{}
	for _, version := range []int{2, 3} {
		if base[version], err = read(f, harmless, sources, version); err != nil {
			f.Fatal(err)
		}
		text := fmt.Sprint(base[version])
		for i := 1; i < words; i++ {
			if !strings.Contains(text, word(i)) {
				f.Errorf("config version %d: nothing of what is read has %s in it", version, word(i))
			}
		}
	}
	for i, s := range []string{
		`%n%%`, `$HOME ${X} $$`, `a b`, `a"b'c`, `a\`, `a\\`, `a\x41\n`, `;`, ` ; /bin/sh`, `#`, `:ro`, `a:b`, `[Service]`, "@SLOT@", "é\u2028\u0085\ufeff",
		"", "-", "--config=/x", "<<", "null", "~", "yes", "1e3", "0x1f", "1:30", "2026-11-30", "012", ".inf", "! x", "&a", "*a", "{}", "]]", "'", `"""`, "|", "a: b", "- a",
		"\n[Service]\nExecStart=/x", "\r", "\t", "\x00", "\xff", strings.Repeat("x", 3000),
	} {
		for j := range words {
			if (i+j)%7 == 0 {
				f.Add(uint8(j), s, uint8((i*j+3)%words), s)
			}
		}
	}
	f.Fuzz(func(t *testing.T, i uint8, a string, j uint8, b string) {
		version := 2 + int(i/128)
		with := map[string]string{word(int(i) % 128 % words): a, word(int(j) % words): b}
		slot, sources, err := parse(with)
		if err != nil {
			return
		}
		for _, s := range with {
			for _, known := range []string{"io.containerd.", "plugins", "metrics", "version"} {
				if strings.HasPrefix(s, known) {
					return // a table of berth's own, which the goal state may change
				}
			}
		}
		if device.Covers(slot.Machine.Devices[0]) || slot.Kubelet.NodeName == "" {
			return // nothing is written for the one, the host's name for the other
		}
		got, err := read(t, slot, sources, version)
		if err != nil {
			return
		}
		var pairs []string
		for w, s := range with {
			pairs = append(pairs, w, s)
		}
		want := replaced(base[version], strings.NewReplacer(pairs...)).(map[string]any)
		for _, tree := range []map[string]any{got, want} {
			if len(slot.Kubelet.NodeName) > 64 {
				drop(tree["run/systemd/nspawn/node-a.nspawn"], "Exec.Hostname") // it is cut off
			}
			for _, program := range []string{slot.Containerd.Binary, slot.Containerd.Runc} {
				if dir := path.Dir(program); strings.Contains(dir, ":") || slices.Contains(defaultPath, dir) {
					drop(tree["etc/systemd/system/containerd.service"], "Service.Environment") // it leaves this one out
				}
			}
		}
		if path.Dir(slot.Containerd.Binary) == path.Dir(slot.Containerd.Runc) {
			return // and has it once
		}
		if err := same(sorted(want), sorted(got)); err != nil {
			t.Errorf("%q: %v", with, err)
		}
	})
}

// FuzzTables puts any tables into those that berth hands on as they are.
func FuzzTables(f *testing.F) {
	for _, text := range []string{
		"a = 1\nb = [1, 2]\n[c]\nd = {}\n[[e]]\n[[e]]\nf = [[], [[]]]",
		"a = [1, \"x\", {b = [{c = {}}]}, [], [{}], 1.5, true]",
		"\"\" = 1\n\"a.b\" = 2\n'c\"d' = 3\n\"é\\u2028\\u0085\" = [\"\\u2028\", \"\\u0085\", \"\\ufeff\", \"\\ud7ff\"]",
		"a = [9223372036854775807, -9223372036854775808, 1e300, -0.0, 5e-324, 0x7f, 0o17, 0b1, 1_000, 1e21, 100000000000000000000.0]",
		"yes = \"no\"\nnull = \"~\"\n1 = \"1\"\ntrue = \"0x1f\"\n\"<<\" = \"*a\"\n\"1:30\" = \"2026-11-30\"\n\".inf\" = \"012\"",
		"a = \"\"\"\nx\"\"\"",
		"a = 2026-11-30\nb = 07:32:00\nc = inf\nd = nan",
		"[plugins]\n[server]\n[a]\nb.c.d = 1\nb.c.e = 2",
	} {
		f.Add(text)
	}
	harmless, sources, err := parse(nil)
	if err != nil {
		f.Fatal(err)
	}
	base, err := read(f, harmless, sources, 3)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		skeleton := strings.Replace(skeleton, "[nvidia]\n", "[containerd.config.any]\n"+text+"\n[nvidia]\n", 1)
		skeleton = strings.Replace(skeleton, "[containerd]\n", "[kubelet.config.featureGates]\n"+text+"\n[containerd]\n", 1)
		g, err := goalstate.Parse([]goalstate.Source{{Path: from, Data: []byte(skeleton)}})
		if err != nil || g.Slots["a"] == nil || len(g.Slots["a"].Machine.Devices) == 0 || device.Covers(g.Slots["a"].Machine.Devices[0]) {
			return
		}
		slot := g.Slots["a"]
		got, err := read(t, slot, sources, 3)
		if err != nil {
			return
		}
		for name, config := range map[string]map[string]any{
			"etc/containerd/config.toml": slot.Containerd.Config, "var/lib/kubelet/config.yaml": slot.Kubelet.Config,
		} {
			want, have := plain(base[name]), plain(got[name])
			if list, isTOML := want.([]any); isTOML {
				want, have = list[0], have.([]any)[0]
			}
			merge(want.(map[string]any), plain(config).(map[string]any))
			if err := same(want, have); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// drop empties the assignments of a key.
func drop(file any, key string) {
	for _, option := range file.([]any)[0].([]any) {
		if option := option.([]any); option[0] == key {
			clear(option[1:])
		}
	}
}

func readFile(name string, content []byte) (any, error) {
	switch path.Ext(name) {
	case ".toml":
		return readTOML(content)
	case ".yaml":
		return readYAML(content)
	case ".crt":
		list, err := certificates(string(content))
		return len(list), err
	case ".service", ".nspawn", ".target":
		return readUnit(content)
	case ".conf":
		if !strings.Contains(name, "tmpfiles.d") {
			return readUnit(content)
		}
		var lines []any
		for line := range strings.Lines(string(content)) {
			if !strings.HasPrefix(line, "#") {
				lines = append(lines, line)
			}
		}
		return lines, nil
	}
	return readYAML(content) // kubeconfig
}

func readTOML(content []byte) (any, error) {
	var tree map[string]any
	meta, err := toml.Decode(string(content), &tree)
	var hosts []any // in the order in which containerd tries them
	for _, key := range meta.Keys() {
		if len(key) == 2 && key[0] == "host" {
			hosts = append(hosts, key[1])
		}
	}
	return []any{plain(tree), hosts}, err
}

// readYAML reads YAML as Kubernetes does, and with a younger parser, which must see the same.
func readYAML(content []byte) (any, error) {
	var tree, again any
	err := errors.Join(yaml.UnmarshalStrict(content, &tree), yaml3.Unmarshal(content, &again))
	return plain(tree), errors.Join(err, same(plain(tree), plain(again)))
}

// same is an error if a and b are not the same. go-cmp alone would take most of the time.
func same(a, b any) error {
	if reflect.DeepEqual(a, b) {
		return nil
	}
	return fmt.Errorf("-want +got, or what two readers see:\n%s", cmp.Diff(a, b))
}

// plain makes arrays of tables, and numbers, look the same whatever read them.
func plain(v any) any {
	switch v := v.(type) {
	case map[string]any:
		m := make(map[string]any, len(v))
		for k, e := range v {
			m[k] = plain(e)
		}
		return m
	case []map[string]any:
		list := make([]any, len(v))
		for i, e := range v {
			list[i] = plain(e)
		}
		return list
	case []any:
		list := make([]any, len(v))
		for i, e := range v {
			list[i] = plain(e)
		}
		return list
	case int:
		return float64(v)
	case int64:
		return float64(v)
	case uint64:
		return float64(v)
	}
	return v
}

// readUnit reads a unit or .nspawn file, by two readers.
func readUnit(content []byte) (any, error) {
	options, err := unitfile.Parse(content)
	if err != nil {
		return nil, err
	}
	// go-systemd's reader has no long lines, and leaves a backslash at the end of a value, which continues nothing, with the space.
	if theirs, err := sdunit.DeserializeOptions(bytes.NewReader(content)); !errors.Is(err, sdunit.ErrLineTooLong) {
		if err != nil {
			return nil, err
		}
		var again []unitfile.Option
		for _, o := range theirs {
			again = append(again, unitfile.Option{Section: o.Section, Key: o.Name, Value: strings.Trim(o.Value, " \t")})
		}
		if err := same(options, again); err != nil {
			return nil, err
		}
	}
	var list, binds []any
	for _, o := range options {
		words, err := []string{o.Value}, error(nil)
		switch o.Key {
		case "ExecStart":
			words, err = unitfile.Exec(o.Value)
		case "Environment", "DeviceAllow":
			words, err = unitfile.Strings(o.Value)
		case "Bind", "BindReadOnly":
			if words, err = unitfile.Split(o.Value); len(words) == 1 {
				words = append(words, words[0])
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s=%s: %w", o.Key, o.Value, err)
		}
		value := []any{o.Section + "." + o.Key}
		for _, w := range words {
			value = append(value, w)
		}
		if strings.HasPrefix(o.Key, "Bind") {
			binds = append(binds, value)
		} else {
			list = append(list, value)
		}
	}
	return []any{list, binds}, nil
}
