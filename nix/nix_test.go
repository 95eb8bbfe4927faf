// Package nix tests the Nix expressions: it evaluates them over a stand-in for nixpkgs, which is not where the tests run, and runs
// the package's phases with the Go of this machine. No derivation is built.
package nix

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"berth/generator/goalstate"
)

// eval evaluates an expression, in which "standin" is standin.nix, and returns its value or what nix says is wrong.
func eval(t *testing.T, expression string) (any, string) {
	t.Helper()
	nix, err := exec.LookPath("nix-instantiate")
	if err != nil {
		t.Skip("needs nix-instantiate")
	}
	var out, stderr bytes.Buffer
	cmd := exec.Command(nix, "--store", "dummy://", "--eval", "--strict", "--json", "--expr", "let standin = import ./standin.nix; in "+expression)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if cmd.Run() != nil {
		return nil, stderr.String()
	}
	d := json.NewDecoder(&out)
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return v, ""
}

func module(user string) string { return `(standin.eval ./module.nix "berth" ` + user + `)` }

// plain makes integers of JSON's numbers.
func plain(v any) any {
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
	case map[string]any:
		for k, e := range v {
			v[k] = plain(e)
		}
	case []any:
		for i, e := range v {
			v[i] = plain(e)
		}
	}
	return v
}

func TestGoal(t *testing.T) {
	v, problem := eval(t, `(`+module(`{
		enable = true;
		goal = {
			boot = "a";
			cluster = { server = "https://10.0.0.1:6443"; certificate_authority = "/etc/berth/ca.crt"; dns = [ "10.96.0.10" ]; };
			kubelet = { bootstrap_token_file = "/run/keys/token"; labels."example.com/pool" = "gpu"; config.maxPods = 200; };
			containerd.registry."docker.io".mirrors = [ { url = "http://127.0.0.1:5000"; skip_verify = true; } ];
			timeouts.ready = "90s";
			slot.a = { };
			slot.b.peers = [ ];
		};
	}`)+`.environment.etc."berth/goal.toml".source.goal).content`)
	if problem != "" {
		t.Fatal(problem)
	}
	text, err := toml.Marshal(plain(v))
	if err != nil {
		t.Fatal(err)
	}
	goal, err := goalstate.Parse([]goalstate.Source{{Path: "goal.toml", Data: text}})
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	a := goal.Slots["a"]
	if goal.Boot != "a" || a.Kubelet.Labels["example.com/pool"] != "gpu" || a.Timeouts.Ready.Seconds() != 90 ||
		!a.Containerd.Registry["docker.io"].Mirrors[0].SkipVerify || len(goal.Slots["b"].Peers) != 0 {
		t.Errorf("%+v", goal)
	}
}

func TestModule(t *testing.T) {
	v, problem := eval(t, `let c = `+module(`{ enable = true; goal.slot.a = { }; }`)+`; in {
		etc = builtins.attrNames c.environment.etc;
		check = c.environment.etc."berth/goal.toml".source.script;
		services = builtins.attrNames c.systemd.services;
		restart = builtins.any (s: s.restartIfChanged) (builtins.attrValues c.systemd.services);
	}`)
	if problem != "" {
		t.Fatal(problem)
	}
	got := v.(map[string]any)
	if diff := cmp.Diff([]any{"berth/goal.toml", "modules-load.d/berth.conf", "sysctl.d/90-berth.conf"}, got["etc"]); diff != "" {
		t.Errorf("environment.etc: -want +got: %s", diff)
	}
	if check := got["check"].(string); !strings.Contains(check, "/bin/berth check $goal\n") {
		t.Errorf("the goal state is not checked: %s", check)
	}
	// All units, as a node must not be restarted by a change of the system.
	units, err := filepath.Glob("../units/*.service")
	if err != nil {
		t.Fatal(err)
	}
	want := []any{"systemd-nspawn@"}
	for _, unit := range units {
		want = append(want, strings.TrimSuffix(filepath.Base(unit), ".service"))
	}
	slices.SortFunc(want, func(a, b any) int { return strings.Compare(a.(string), b.(string)) })
	if diff := cmp.Diff(want, got["services"]); diff != "" || got["restart"] != false {
		t.Errorf("systemd.services: restart %v; -want +got: %s", got["restart"], diff)
	}

	for _, c := range []struct{ user, want, why string }{
		{`{ }`, `null`, "not enabled"},
		{`{ enable = "yes"; }`, "services.berth.enable: want boolean", "a wrong type"},
		{`{ enable = true; goal = "a"; }`, "services.berth.goal: want null or attribute set of TOML value", "no attribute set"},
		{`{ enable = true; goal.slot.a.x = y: y; }`, "services.berth.goal: want null or attribute set of TOML value", "TOML has no functions"},
		{`{ enable = true; gaol = { }; }`, "services.berth: no option gaol", "a misspelt option"},
	} {
		v, problem := eval(t, module(c.user))
		if text, _ := json.Marshal(v); !strings.Contains(problem, c.want) && string(text) != c.want {
			t.Errorf("%s: %s %s; want %s: %s", c.user, text, problem, c.want, c.why)
		}
	}
	if v, problem := eval(t, module(`{ enable = true; }`)+`.environment.etc ? "berth/goal.toml"`); v != false {
		t.Errorf("a goal state that is left to others is written: %v %s", v, problem)
	}
}

// TestPackage runs the phases of the package with its vendored modules and nothing else.
func TestPackage(t *testing.T) {
	if testing.Short() {
		t.Skip("builds all programs")
	}
	v, problem := eval(t, `let p = import ./default.nix { inherit (standin) pkgs; }; in {
		inherit (p.args) vendorHash buildPhase installPhase version;
	}`)
	if problem != "" {
		t.Fatal(problem)
	}
	args := v.(map[string]any)
	source, out := t.TempDir(), filepath.Join(t.TempDir(), "out")
	for _, name := range []string{"generator", "helpers", "templates", "units", "docs"} {
		if err := os.CopyFS(filepath.Join(source, name), os.DirFS("../"+name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"go.mod", "go.sum", "install.sh"} {
		text, err := os.ReadFile("../" + name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(source, name), text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	vendor := filepath.Join(source, "vendor")
	if text, err := exec.Command("go", "mod", "vendor", "-o", vendor).CombinedOutput(); err != nil {
		t.Fatalf("go mod vendor: %v\n%s", err, text)
	}
	hash, err := exec.Command("nix-hash", "--type", "sha256", vendor).Output()
	if err != nil {
		t.Fatal("nix-hash: ", err)
	}
	sum, err := hex.DecodeString(strings.TrimSpace(string(hash)))
	if err != nil {
		t.Fatal(err)
	}
	if sri := "sha256-" + base64.StdEncoding.EncodeToString(sum); args["vendorHash"] != sri {
		t.Errorf("package.nix: vendorHash = %q; want %q, as go.mod or what is imported has changed", args["vendorHash"], sri)
	}

	cmd := exec.Command("bash", "-euc", `
		runHook() { :; }
		substituteInPlace() { # FILE --replace-fail OLD NEW
			grep -q "$3" "$1"
			sed -i "s|$3|$4|" "$1"
		}
		`+args["buildPhase"].(string)+args["installPhase"].(string))
	cmd.Dir = source
	cmd.Env = append(os.Environ(), "out="+out, "GOFLAGS=-mod=vendor -trimpath", "GOPROXY=off", "GOSUMDB=off", "GOTOOLCHAIN=local")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	version, err := exec.Command(filepath.Join(out, "bin/berth"), "--version").Output()
	if want := "berth version " + args["version"].(string) + " (" + runtime.Version() + ")\n"; string(version) != want || err != nil {
		t.Errorf("berth --version: %q, %v; want %q", version, err, want)
	}
	for name, want := range map[string]string{
		"lib/systemd/system/node-chain@.target":         "Wants=node-kubelet@%i.service",
		"lib/systemd/system/node-kubelet@.service":      "ExecStart=" + out + "/lib/berth/machine-unit %i",
		"lib/systemd/system-generators/berth-generator": out + "/lib/berth", // in the link that it makes
		"lib/tmpfiles.d/berth.conf":                     "/run/berth",
		"lib/sysctl.d/90-berth.conf":                    "vm.overcommit_memory",
		"lib/modules-load.d/berth.conf":                 "overlay",
		"share/man/man5/berth.toml.5":                   "berth",
		"share/doc/berth/berth.cdx.json":                "pkg:golang/github.com/BurntSushi/toml@v",
	} {
		if text, err := os.ReadFile(filepath.Join(out, name)); !bytes.Contains(text, []byte(want)) {
			t.Errorf("%s: %v; want %q in it", name, err, want)
		}
	}
}
