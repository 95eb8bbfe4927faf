package file

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// harmless are what programs may use everywhere of packages that can reach files: it takes no path.
var harmless = map[string][]string{
	"os": {"Args", "Environ", "ErrNotExist", "Exit", "File", "Geteuid", "Getenv", "Getpid", "Getuid", "IsNotExist",
		"ModeDir", "NewFile", "PathError", "Pipe", "SameFile", "Signal", "Stderr", "Stdin", "Stdout"},
	"path/filepath": {"Abs", "Base", "Clean", "Dir", "Ext", "IsLocal", "Join", "Rel", "SkipAll", "SkipDir"},
	"golang.org/x/sys/unix": {"ClockGettime", "Close", "Errno", "FcntlFlock", "Flock", "Flock_t", "InotifyInit1", "IoctlGetTermios", "IoctlGetWinsize", "IoctlSetTermios",
		"Kill", "Major", "MemfdCreate", "Minor", "Mkdev", "Read", "SetNonblock", "Signal", "SignalName", "Termios", "Timespec"},
	"syscall":         {"Errno", "Kill", "Signal", "Stat_t", "SysProcAttr"},
	"debug/buildinfo": {"BuildInfo", "Read"}, // Read takes a file that is open
	"os/exec":         {"ErrWaitDelay"},
}

// reachers are packages of which everything is looked at.
var reachers = []string{"debug/buildinfo", "debug/elf", "io/ioutil", "net", "os/exec", "github.com/google/renameio/v2", "github.com/cyphar/filepath-securejoin",
	"github.com/cyphar/filepath-securejoin/pathrs-lite"}

// allowed says, for each use of the rest, why it cannot lead out of a root that is not trusted.
var allowed = map[string]string{
	"generator/bake/bake.go os.Open":                   "the lock on the root folder itself, which the caller has named",
	"generator/bake/bake.go os.ReadFile":               "berth's own programs, which are put into the image",
	"generator/bake/bake.go os.Stat":                   "where these are",
	"generator/cli/bake.go filepath.EvalSymlinks":      "the same",
	"generator/cli/bake.go os.Executable":              "the same",
	"generator/cli/check.go os.Open":                   "goal states that the caller names, with the caller's rights",
	"generator/kernlog/kernlog.go os.OpenFile":         "a handle of file.Root, by /proc/self/fd",
	"helpers/machine/cgroup.go filepath.WalkDir":       "cgroups of the host: the kernel's file system, without links; a folder that others name is checked to be local",
	"helpers/machine/cgroup.go os.ReadFile":            "the same, and the host's /proc",
	"helpers/machine/inner.go exec.CommandContext":     "the host's journalctl",
	"helpers/machine/inner.go os.ReadFile":             "the host's /proc",
	"helpers/machine/machined.go os.ReadFile":          "the same",
	"helpers/machine/watch.go unix.InotifyAddWatch":    "a handle of file.Root, by /proc/self/fd, or a cgroup",
	"helpers/nvidia/discover.go exec.CommandContext":   "the host's ldconfig, of the host's libraries",
	"helpers/peer-guard/claim/claim.go os.OpenFile":    "the lock in the host's /run/berth",
	"helpers/wait-kubelet/ready/health.go os.ReadDir":  "the host's /proc",
	"helpers/wait-kubelet/ready/health.go os.ReadFile": "the same",
	"helpers/wait-kubelet/ready/health.go os.Readlink": "the same",
}

// TestCallers: nothing but this package opens a path beneath a machine's root. What else opens a path opens one of the host's own.
func TestCallers(t *testing.T) {
	found := map[string]token.Position{}
	for _, top := range []string{"../../generator", "../../helpers"} {
		err := filepath.WalkDir(top, func(name string, d fs.DirEntry, err error) error {
			if d.IsDir() && d.Name() == "testdata" || name == "../../generator/file" {
				return fs.SkipDir
			}
			if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return err
			}
			return uses(name, found)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, use := range slices.Sorted(maps.Keys(found)) {
		if allowed[use] == "" {
			t.Errorf("%v: %s: beneath a root that is not trusted this follows links out of it: use file.Root, or say in allowed why it does not matter",
				found[use], use)
		}
	}
	for use := range allowed {
		if _, ok := found[use]; !ok {
			t.Errorf("allowed has %s, which is not there any more", use)
		}
	}
}

// uses finds what a file uses of packages that can reach files, as "folder/file.go package.Name".
func uses(name string, found map[string]token.Position) error {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, nil, 0)
	if err != nil {
		return err
	}
	imports := map[string]string{} // by what they are called in this file
	for _, spec := range f.Imports {
		importPath, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		called := filepath.Base(importPath)
		if spec.Name != nil {
			called = spec.Name.Name
		} else if called[0] == 'v' && strings.Trim(called[1:], "0123456789") == "" {
			called = filepath.Base(filepath.Dir(importPath))
		}
		imports[called] = importPath
	}
	ast.Inspect(f, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		x, ok := s.X.(*ast.Ident)
		if !ok {
			return true
		}
		importPath := imports[x.Name]
		safe, reaches := harmless[importPath]
		if (reaches || slices.Contains(reachers, importPath)) && !slices.Contains(safe, s.Sel.Name) && !isConstant(s.Sel.Name) {
			found[strings.TrimPrefix(name, "../../")+" "+x.Name+"."+s.Sel.Name] = fset.Position(s.Pos())
		}
		return true
	})
	return nil
}

// isConstant tells whether a name is one of the constants of syscalls: no function there is all in capitals.
func isConstant(name string) bool { return strings.ToUpper(name) == name }
