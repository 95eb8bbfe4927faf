package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"berth/generator/unit"
)

var valueCases = []testCase{
	{"33: systemd reads from a unit what was written into it, whatever it is", systemdReads},
}

// systemdReads has systemd load units with random values, which package unit wrote, and asks for them over D-Bus. What else reads the
// same language in tests (testdata/unitfile) is so known to be right.
func systemdReads(t *testing.T, h *host) {
	const units = 100
	alphabet := []rune("aZ0%n$H{}\"'\\;:#=[]-@+!|,x \t\n\u007f\u0085é\u2028\ufeff\ufffd~*?")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	text := func() string {
		s := make([]rune, random.IntN(12))
		for i := range s {
			s[i] = alphabet[random.IntN(len(alphabet))]
		}
		return string(s)
	}
	type values struct {
		Program             string
		Args, Environment   []string
		Source, Credentials string
	}
	name := func(i int) string { return fmt.Sprintf("values-%d.service", i) }
	wanted := make([]values, units)
	var errs []error
	for i := range wanted {
		v := values{Program: "/" + text(), Args: []string{text(), text(), "x" + text()}, Environment: []string{"A=" + text(), "B=" + text()}}
		for strings.ContainsAny(v.Program, "\"'\\*?[") || strings.ContainsFunc(v.Program, func(r rune) bool { return r < ' ' || r == 0x7f }) || filepath.Clean(v.Program) != v.Program || v.Program == "/" {
			v.Program = "/" + text() // systemd runs no other
		}
		source, err := "", error(nil)
		for v.Source, err = "", errors.New(""); err != nil || filepath.Clean(v.Source) != v.Source; {
			v.Source = "/" + text()
			source, err = unit.Value(v.Source)
		}
		credential := ""
		for err = errors.New(""); err != nil || strings.ContainsAny(v.Credentials, ":/\t\n\x7f") || strings.ContainsFunc(v.Credentials, func(r rune) bool { return r > 0x7e || r == ' ' }); {
			v.Credentials = "c" + text()
			credential, err = unit.Credential(v.Credentials)
		}
		wanted[i] = v
		errs = append(errs, write(filepath.Join(h.Root(), "run/systemd/system", name(i)), fmt.Appendf(nil,
			"# %s\n[Unit]\nSourcePath=%s\n[Service]\nExecStart=%s\nEnvironment=%s\nEnvironment=%s\nLoadCredential=%s\n",
			unit.Sources([]string{text(), v.Source}), source, unit.Command(v.Program, v.Args...),
			unit.Word(v.Environment[0]), unit.Word(v.Environment[1]), credential), 0o644))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	defer h.Must(t, "rm -f /run/systemd/system/values-*.service; systemctl daemon-reload")
	h.Must(t, "systemctl daemon-reload")
	bus := h.bus(t)
	for i, want := range wanted {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		properties, err := bus.GetAllPropertiesContext(ctx, name(i))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		var got values
		got.Source, _ = properties["SourcePath"].(string)
		got.Environment, _ = properties["Environment"].([]string)
		if commands, ok := properties["ExecStart"].([][]any); ok && len(commands) == 1 { // a(sasbttttuii)
			got.Program, _ = commands[0][0].(string)
			got.Args, _ = commands[0][1].([]string)
		}
		if credentials, ok := properties["LoadCredential"].([][]any); ok && len(credentials) == 1 { // a(ss)
			got.Credentials, _ = credentials[0][0].(string)
		}
		// Variables are replaced when it starts: here they are still doubled.
		args := []string{want.Program}
		for _, a := range want.Args {
			args = append(args, strings.ReplaceAll(a, "$", "$$"))
		}
		want.Args = args
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s -want +got:\n%s\n%s", name(i), diff, h.Must(t, "cat -A /run/systemd/system/"+name(i)+"; systemctl show -p LoadError,LoadState "+name(i)))
		}
	}
}
