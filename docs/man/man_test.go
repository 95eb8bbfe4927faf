// Package man tests the manual pages: that they are complete, name nothing that is not there, and can be read by man(1).
package man

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/generator/cli"
	"berth/generator/goalstate"
)

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A key as its entry in berth.toml(5) describes it; no default: empty.
type key struct{ Type, Default string }

// keys collects the keys of a struct of package goalstate; v holds the defaults.
func keys(v reflect.Value, prefix string, into map[string]key) {
	for i := range v.NumField() {
		name := prefix + v.Type().Field(i).Tag.Get("toml")
		switch f := v.Field(i).Interface().(type) {
		case string:
			into[name] = key{"string", quoted(f)}
		case goalstate.Mode:
			into[name] = key{"mode", quoted(string(f))}
		case bool:
			into[name] = key{"boolean", fmt.Sprint(f)}
		case int:
			into[name] = key{`2, 3 or "auto"`, `"auto"`} // containerd.config_version
		case time.Duration:
			into[name] = key{"duration", quoted(strings.TrimSuffix(f.String(), "m0s") + map[bool]string{true: "m"}[strings.HasSuffix(f.String(), "m0s")])}
		case []string:
			into[name] = key{"array of strings", list(f)}
		case map[string]string:
			into[name] = key{"table of strings", ""}
		case map[string][]string:
			into[name] = key{"table of arrays of strings", ""}
		case map[string]any:
			into[name] = key{"table", ""}
		case *goalstate.Exec:
			keys(reflect.ValueOf(f).Elem(), name+".", into)
		case map[string]goalstate.Registry:
			keys(reflect.ValueOf(f["example.com"]), name+".HOST.", into)
		case []goalstate.Mirror:
			into[name] = key{"array of tables", ""}
			keys(reflect.ValueOf(f[0]), name+".", into)
		case []goalstate.Mount:
			into[name] = key{"array of tables", ""}
			keys(reflect.ValueOf(f[0]), name+".", into)
		default:
			panic(fmt.Sprintf("%s: a type that this test does not know: %T", name, f))
		}
	}
}

func quoted(s string) string {
	if s == "" {
		return ""
	}
	return `"` + s + `"`
}

func list(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return `["` + strings.Join(s, `", "`) + `"]`
}

// schema is what the goal state's schema says: all keys, their types, and the defaults that are a value.
func schema(t *testing.T) map[string]key {
	t.Helper()
	// What is required, and one element of each array and table that has keys of its own.
	goal, err := goalstate.Parse([]goalstate.Source{{Path: "x", Data: []byte(`
[cluster]
server = "https://h"
certificate_authority = "/ca"
[kubelet.exec]
command = "c"
[containerd.registry."example.com"]
mirrors = [{ url = "https://m" }]
[machine]
mounts = [{ source = "/s" }]
[slot.a]
`)}})
	if err != nil {
		t.Fatal(err)
	}
	slot := reflect.ValueOf(*goal.Slots["a"])
	all := map[string]key{"boot": {"string", ""}, "slot.NAME.peers": {"array of strings", ""}}
	for _, table := range []string{"Cluster", "Kubelet", "Containerd", "NVIDIA", "Machine", "Timeouts"} {
		keys(slot.FieldByName(table), strings.ToLower(table)+".", all)
	}
	// These have the values that stand above, or follow from them.
	for _, name := range []string{"cluster.server", "cluster.certificate_authority", "kubelet.exec.command",
		"containerd.registry.HOST.mirrors.url", "machine.mounts.source", "machine.mounts.target"} {
		all[name] = key{all[name].Type, ""}
	}
	all["containerd.registry.HOST.server"] = key{"string", strings.Replace(all["containerd.registry.HOST.server"].Default, "example.com", "HOST", 1)}
	return all
}

func TestGoalStateKeys(t *testing.T) {
	documented := make(map[string]key)
	entry := regexp.MustCompile(`(?m)^\*\*([A-Za-z_.]+)\*\* \((.*?)(?:, (required|default .*))?\)\n:   `)
	for _, match := range entry.FindAllStringSubmatch(read(t, "berth.toml.5.md"), -1) {
		k := key{match[2], strings.TrimPrefix(match[3], "default ")}
		if !strings.HasPrefix(k.Default, `"`) && !strings.HasPrefix(k.Default, "[") && k.Default != "false" {
			k.Default = "" // a default that is told in words
		}
		documented[match[1]] = k
	}
	if diff := cmp.Diff(schema(t), documented); diff != "" {
		t.Errorf("-schema +berth.toml(5):\n%s", diff)
	}
}

func TestGoalStateExamples(t *testing.T) {
	examples := regexp.MustCompile("(?ms)^```toml\n(.*?)^```$").FindAllStringSubmatch(read(t, "berth.toml.5.md"), -1)
	if len(examples) == 0 {
		t.Error("no example")
	}
	for _, example := range examples {
		if _, err := goalstate.Parse([]goalstate.Source{{Path: "berth.toml(5)", Data: []byte(example[1])}}); err != nil {
			t.Errorf("%v in\n%s", err, example[1])
		}
	}
}

// TestReferences requires that each page that a unit or a page refers to is there.
func TestReferences(t *testing.T) {
	var files []string
	for _, glob := range []string{"../../units/*.service", "../../templates/*.in", "*.md"} {
		found, err := filepath.Glob(glob)
		if err != nil || found == nil {
			t.Fatal(glob, err)
		}
		files = append(files, found...)
	}
	reference := regexp.MustCompile(`(?:\bman:|\*\*)((?:berth|node)[-@.a-z]*)(?:\*\*)?\(([0-9])\)`)
	count := 0
	for _, name := range files {
		text := read(t, name)
		for _, match := range reference.FindAllStringSubmatch(text, -1) {
			count++
			if _, err := os.Stat(match[1] + "." + match[2] + ".md"); err != nil {
				t.Errorf("%s: %s: there is no such page", name, match[0])
			}
		}
		if strings.HasPrefix(filepath.Base(name), "node") && strings.HasSuffix(name, ".service") && !strings.Contains(text, "\nDocumentation=man:") {
			t.Errorf("%s: no Documentation=", name)
		}
	}
	if count < 50 {
		t.Errorf("found %d references only", count)
	}
}

// TestPrograms requires a page for each helper, and in berth(8) each command with each of its options.
func TestPrograms(t *testing.T) {
	mains, err := filepath.Glob("../../helpers/*/main.go")
	if err != nil || mains == nil {
		t.Fatal(mains, err)
	}
	for _, main := range mains {
		if page := "berth-" + filepath.Base(filepath.Dir(main)) + ".8.md"; !strings.Contains(read(t, page), "\n# EXIT STATUS\n") {
			t.Errorf("%s: no exit status", page)
		}
	}

	help := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		if code := cli.Main(append(append([]string{"berth"}, args...), "--help"), &out, &out); code != 0 {
			t.Fatalf("berth %v --help: exit code %d\n%s", args, code, &out)
		}
		return out.String()
	}
	page := read(t, "berth.8.md")
	section := func(name string) string {
		_, after, found := strings.Cut(page, "\n# "+name+"\n")
		if !found {
			t.Errorf("berth(8): no section %s", name)
		}
		before, _, _ := strings.Cut(after, "\n# ")
		return before
	}
	option := regexp.MustCompile(`(?m)^   +(--[a-z-]+)`)
	check := func(section, help string) {
		t.Helper()
		var documented, wanted []string
		for _, match := range regexp.MustCompile(`(?m)^\*\*(--[a-z-]+)\*\*.*\n:   `).FindAllStringSubmatch(section, -1) {
			documented = append(documented, match[1])
		}
		_, options, _ := strings.Cut(help, "OPTIONS:\n")
		for _, match := range option.FindAllStringSubmatch(options, -1) {
			wanted = append(wanted, match[1])
		}
		slices.Sort(documented)
		slices.Sort(wanted)
		if diff := cmp.Diff(wanted, documented); diff != "" {
			t.Errorf("-help +berth(8): %s\n%s", diff, help)
		}
	}
	top := help()
	check(section("OPTIONS"), top)
	_, list, _ := strings.Cut(top, "COMMANDS:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for line := range strings.Lines(list) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		text := help(name)
		// --help and, of bake, --root stand in OPTIONS.
		text = regexp.MustCompile(`(?m)^ +--(help|root).*\n`).ReplaceAllString(text, "")
		check(section("BERTH "+strings.ToUpper(name)), text)
	}
}

// TestLint has mandoc look at the pages. What it calls "style" is about the text that go-md2man makes, which nobody reads.
func TestLint(t *testing.T) {
	if _, err := exec.LookPath("mandoc"); err != nil {
		t.Skip("needs mandoc")
	}
	pages, err := filepath.Glob("*.md")
	if err != nil || pages == nil {
		t.Fatal(pages, err)
	}
	dir := t.TempDir()
	args := []string{"-T", "lint", "-W", "warning"}
	for _, page := range pages {
		made := filepath.Join(dir, strings.TrimSuffix(page, ".md"))
		args = append(args, made)
		if out, err := exec.Command("go", "tool", "go-md2man", "-in", page, "-out", made).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", page, err, out)
		}
	}
	if out, err := exec.Command("mandoc", args...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("mandoc -T lint: %v\n%s", err, out)
	}
}
