// Package faults kills berth's programs at all moments, and looks at what they leave.
package faults

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"berth/generator/file"
	"berth/generator/goalstate/store"
	"berth/testdata/pki"
	"berth/units"
)

var (
	kills = flag.Int("faults", 0, "number of `kills` of programs that need no systemd; 0: some at chosen moments")
	seed  = flag.Uint64("seed", uint64(time.Now().UnixNano()), "decides the moments of the kills")
)

// TestMain gives the programs a umask that would take something from every mode.
func TestMain(m *testing.M) {
	unix.Umask(0o077)
	code := m.Run()
	if bin, err := built(); err == nil {
		os.RemoveAll(bin)
	}
	os.Exit(code)
}

// program is a program that writes files and can be run without systemd.
type program struct {
	name string
	args []string // @ is the folder that stands for "/"
	// ready does what comes before the program on a host, when the goal state is in place; nil: nothing.
	ready func(h *host, goal string) error
	// times says that the times of files belong to what the program promises.
	times bool
	// again says that the program tries a second way of writing where the first failed. One failure does not matter then.
	again bool
}

var programs = []program{
	{name: "generator", args: []string{"berth-generator", "@/" + generated, "@/early", "@/late"}, ready: emptied, again: true},
	{name: "bake", args: []string{"berth", "bake", "--root", "@/image", "--goal", "@/etc/berth/goal.toml"}, times: true},
	{name: "render-config nspawn", args: []string{"render-config", "nspawn", "a"}, ready: (*host).generate},
	{name: "render-config containerd", args: []string{"render-config", "containerd", "a"}},
	{name: "render-config kubelet", args: []string{"render-config", "kubelet", "a"}},
	{name: "record-applied", args: []string{"record-applied", "a"}, ready: (*host).used},
}

// generated is where systemd has generators write.
const generated = "run/systemd/generator"

// goals are two goal states that differ in each file that the programs write, and in which files they are.
var goals = map[string]string{
	"A": `boot = "a"
[kubelet]
bootstrap_token_file = "/etc/berth/bootstrap-token"
[containerd.registry."docker.io"]
server = "https://registry-1.docker.io"
mirrors = [{ url = "http://127.0.0.1:5000" }]
[machine]
mounts = [{ source = "/srv", target = "/srv" }]
[slot.a]
[slot.b]
`,
	"B": `[timeouts]
ready = "3m"
after_start = "4m"
[kubelet]
labels = { "example.com/pool" = "gpu" }
exec = { command = "/usr/bin/plugin", api_version = "client.authentication.k8s.io/v1" }
[kubelet.config]
maxPods = 42
[containerd]
sandbox_image = "registry.example.com/pause:3.10"
[containerd.registry."quay.io"]
mirrors = [{ url = "http://127.0.0.1:5001", header = { authorization = ["secret"] } }]
[slot.a]
[slot.c]
`}

const common = `
[cluster]
server = "https://10.0.0.1:6443"
certificate_authority = "/etc/berth/ca.crt"
[containerd]
config_version = 2
`

// goal is the text of a goal state: a table may be there only once, so what both have is a drop-in.
func (h *host) goal(name string) error {
	return os.WriteFile(filepath.Join(h.dir, "etc/berth/goal.toml"), []byte(goals[name]), 0o644)
}

// step brings a tree from one goal state to another one. An empty from is a tree that the program has not seen.
type transition struct{ from, to string }

var transitions = []transition{{"", "A"}, {"A", "B"}, {"B", "A"}}

// TestKill kills each program, on its way from one goal state to another, just before each of its changes of a file, and at random
// moments. What is there must be of one of the two goal states, file by file; and the next run, with either of them, must leave
// what a run leaves that nobody disturbed, and nothing else.
func TestKill(t *testing.T) {
	t.Logf("to see the same again: -seed=%d", *seed)
	bin := build(t)
	var all []*count
	var mu sync.Mutex
	t.Run("of", func(t *testing.T) {
		for i, p := range programs {
			t.Run(p.name, func(t *testing.T) {
				t.Parallel()
				k := newKiller(t, bin, i)
				k.run(t, *kills/len(programs))
				mu.Lock()
				defer mu.Unlock()
				all = append(all, k.count)
			})
		}
	})
	t.Logf("%s", table(all))
}

// newKiller returns what kills the i-th of programs, on a host of its own.
func newKiller(t *testing.T, bin string, i int) *killer {
	t.Helper()
	p := programs[i]
	return &killer{
		host: newHost(t, bin), program: p, count: &count{program: p.name},
		random: rand.New(rand.NewPCG(*seed, uint64(i))),
	}
}

// count is what came of the kills of a program.
type count struct {
	program               string
	chosen, random        int // kills, by how the moment was found
	before, within, after int // by what was there afterwards: of the old goal state, of both, of the new one
	stray                 int // after how many there was a temporary file, until the next run
	faults                int
	took                  time.Duration
}

func table(all []*count) string {
	var b strings.Builder
	sum := count{program: "all"}
	row := func(c *count) {
		fmt.Fprintf(&b, "%-26s %6d %7d %7d %7d %7d %7d %7d %6.0fs\n", c.program, c.chosen, c.random, c.before, c.within, c.after, c.stray,
			c.faults, c.took.Seconds())
	}
	fmt.Fprintf(&b, "\n%-26s %6s %7s %7s %7s %7s %7s %7s %7s\n", "kills", "chosen", "random", "before", "within", "after", "stray", "faults", "time")
	slices.SortFunc(all, func(a, b *count) int { return strings.Compare(a.program, b.program) })
	for _, c := range all {
		row(c)
		sum.chosen, sum.random, sum.took = sum.chosen+c.chosen, sum.random+c.random, sum.took+c.took
		sum.before, sum.within, sum.after, sum.stray, sum.faults = sum.before+c.before, sum.within+c.within, sum.after+c.after, sum.stray+c.stray,
			sum.faults+c.faults
	}
	row(&sum)
	return b.String()
}

type killer struct {
	*host
	program program
	count   *count
	random  *rand.Rand
	states  map[string]tree          // after runs that nobody disturbed, by the goal state; "": none yet; "first": A's first
	time    map[string]time.Duration // that such a run takes, by the goal state
	last    string                   // where the transition before began
}

// epoch is the latest time that a file in an image may have.
const epoch = 1_700_000_000

// few is how many moments are chosen for each transition if nobody asks for a number of kills.
const few = 8

func (k *killer) run(t *testing.T, kills int) {
	begin := time.Now()
	defer func() { k.count.took = time.Since(begin) }()
	k.undisturbed(t)
	for _, tr := range transitions {
		_, changes := k.kill(t, tr, 0)
		step := 1
		if kills == 0 {
			step = max(1, changes/few)
		}
		for n := 1 + k.random.IntN(step); n <= changes && !t.Failed(); n += step {
			k.kill(t, tr, n)
		}
	}
	for k.count.chosen+k.count.random < kills && !t.Failed() {
		k.kill(t, transitions[k.random.IntN(len(transitions))], -1)
	}
}

// undisturbed learns what the program leaves when nobody kills it.
func (k *killer) undisturbed(t *testing.T) {
	k.states, k.time = map[string]tree{}, map[string]time.Duration{}
	k.fresh(t)
	k.states[""] = k.tree(t)
	for _, goal := range []string{"A", "B", "A", "B"} {
		must(t, k.prepare(goal))
		begin := time.Now()
		k.succeed(t)
		k.time[goal] = time.Since(begin)
		k.states[goal] = k.tree(t)
		if k.states["first"] == nil {
			k.states["first"] = k.states["A"]
		}
	}
}

func (k *killer) prepare(goal string) error {
	err := k.goal(goal)
	if k.program.ready != nil {
		err = errors.Join(err, k.program.ready(k.host, goal))
	}
	return err
}

func (k *killer) command() *exec.Cmd {
	var args []string
	for _, a := range k.program.args {
		args = append(args, strings.ReplaceAll(a, "@", k.dir))
	}
	cmd := exec.Command(filepath.Join(k.bin, args[0]), args[1:]...)
	cmd.Env = []string{"BERTH_ROOT=" + k.dir, fmt.Sprintf("SOURCE_DATE_EPOCH=%d", epoch)}
	return cmd
}

// succeed runs the program.
func (k *killer) succeed(t *testing.T) {
	if out, err := k.command().CombinedOutput(); err != nil {
		k.count.faults++
		t.Fatalf("%s: %v\n%s", k.program.name, err, out)
	}
}

// begin brings the host to where a transition begins. It returns what is there, and what is to be there at the end.
func (k *killer) begin(t *testing.T, tr transition) (old, new tree) {
	new = k.states[tr.to]
	if tr.from == "" {
		new = k.states["first"]
		k.fresh(t)
	} else {
		if k.last == "" { // this one begins where both goal states have been
			must(t, k.prepare(tr.to))
			k.succeed(t)
		}
		must(t, k.prepare(tr.from))
		k.succeed(t)
	}
	k.last = tr.from
	must(t, k.prepare(tr.to))
	return k.tree(t), new
}

// kill kills the program on one of the transitions, before its n-th change; -1: at a random moment; 0: not at all. It returns the
// call before which it was killed, and the number of changes up to there.
func (k *killer) kill(t *testing.T, tr transition, n int) (call string, changes int) {
	old, new := k.begin(t, tr)
	moment := fmt.Sprintf("from %q to %q, ", tr.from, tr.to)
	if n >= 0 {
		r, err := disturb(k.command(), n, 0)
		must(t, err)
		if r.call == "" && r.exit != 0 {
			t.Fatalf("%s: exit code %d", k.program.name, r.exit)
		}
		call, changes = r.call, r.changes
		moment += fmt.Sprintf("before change %d, %s", n, call)
	} else {
		after := time.Duration(k.random.Float64() * 1.1 * float64(k.time[tr.to]))
		moment += fmt.Sprintf("after %v", after)
		cmd := k.command()
		must(t, cmd.Start())
		timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		timer.Stop()
		if err == nil { // it was faster
			return "", 0
		}
		call = "kill"
	}
	if call == "" {
		return "", changes
	}
	if n > 0 {
		k.count.chosen++
	} else {
		k.count.random++
	}
	k.inspect(t, "killed "+moment, old, new)
	k.next(t, "killed "+moment, tr, new)
	return call, changes
}

// next runs the program once more, with either goal state, and looks at all that is there then.
func (k *killer) next(t *testing.T, before string, tr transition, new tree) {
	next, want := tr.to, new
	if tr.from != "" && k.random.IntN(2) == 0 {
		next, want = tr.from, k.states[tr.from]
	}
	must(t, k.prepare(next))
	k.succeed(t)
	if diff := cmp.Diff(want, k.tree(t)); diff != "" {
		k.count.faults++
		t.Errorf("%s: %s; the next run, to %q, -want +got:\n%s", k.program.name, before, next, diff)
	}
}

// inspect looks at what a disturbed program left.
func (k *killer) inspect(t *testing.T, moment string, old, new tree) {
	olds, news, strays := 0, 0, 0
	// Times are the program's last act.
	old, new, got := old.timeless(), new.timeless(), k.tree(t).timeless()
	for name, e := range got {
		o, isOld := old[name]
		n, isNew := new[name]
		switch {
		case !isOld && !isNew:
			strays++
		case e == o && e == n:
		case e == o:
			olds++
		case e == n:
			news++
		default:
			k.count.faults++
			t.Errorf("%s: %s: torn: %s is\n%.300v", k.program.name, moment, name, e)
		}
	}
	for name := range old {
		if _, there := got[name]; there {
			continue
		}
		news++
		if _, stays := new[name]; stays {
			k.count.faults++
			t.Errorf("%s: %s: %s is gone", k.program.name, moment, name)
		}
	}
	for name := range new {
		if _, there := got[name]; !there {
			olds++
		}
	}
	switch {
	case news == 0 && strays == 0:
		k.count.before++
	case olds == 0 && strays == 0:
		k.count.after++
	default:
		k.count.within++
	}
	if strays > 0 {
		k.count.stray++
	}
}

// host is a folder that stands for "/", with what programs look for in it.
type host struct{ dir, bin string }

func newHost(t *testing.T, bin string) *host {
	dir := t.TempDir()
	if unix.Access("/dev/shm", unix.W_OK) == nil && strings.HasPrefix(dir, "/tmp") { // fsync(2) costs nothing there
		var err error
		dir, err = os.MkdirTemp("/dev/shm", "berth-faults")
		must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
	}
	return &host{dir, bin}
}

// fresh makes all anew as it is before the first run.
func (h *host) fresh(t *testing.T) {
	entries, err := os.ReadDir(h.dir)
	must(t, err)
	for _, e := range entries {
		must(t, os.RemoveAll(filepath.Join(h.dir, e.Name())))
	}
	ca := authority(t)
	h.write(t, "etc/berth/goal.toml.d/common.toml", common, 0o644)
	h.write(t, "etc/berth/ca.crt", ca, 0o644)
	h.write(t, "etc/berth/bootstrap-token", "abcdef.0123456789abcdef\n", 0o600)
	h.write(t, "etc/hostname", "host\n", 0o644)
	h.write(t, "image/etc/hostname", "image\n", 0o644)
	h.write(t, "image/usr/lib/berth/goal.toml.d/common.toml", common, 0o644)
	for _, name := range units.Programs() {
		h.write(t, "image/"+name, "a program", 0o755)
	}
	for _, name := range []string{"usr/local/bin/containerd", "usr/local/bin/runc", "usr/local/bin/kubelet", "usr/bin/plugin"} {
		h.write(t, "var/lib/machines/node-a/"+name, "a program", 0o755)
	}
	for _, dir := range []string{"srv", "early", "late", generated} {
		must(t, os.MkdirAll(filepath.Join(h.dir, dir), 0o755))
	}
	must(t, filepath.WalkDir(filepath.Join(h.dir, "image"), func(p string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(p, time.Time{}, time.Unix(epoch-1, 0)))
	}))
}

var authority = func() func(t *testing.T) string {
	make := sync.OnceValues(func() (*pki.Authority, error) { return pki.New("kubernetes") })
	return func(t *testing.T) string {
		ca, err := make()
		must(t, err)
		return ca.Certificate
	}
}()

func (h *host) write(t *testing.T, name, content string, mode fs.FileMode) {
	name = filepath.Join(h.dir, name)
	must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	must(t, os.WriteFile(name, []byte(content), mode))
}

// emptied does what systemd does before it runs generators.
func emptied(h *host, _ string) error {
	dir := filepath.Join(h.dir, generated)
	return errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755))
}

// generate has the units made of the goal state, as a daemon-reload would.
func (h *host) generate(goal string) error {
	cmd := exec.Command(filepath.Join(h.bin, "berth-generator"), filepath.Join(h.dir, generated), h.dir, h.dir)
	cmd.Env = []string{"BERTH_ROOT=" + h.dir}
	err := emptied(h, goal)
	out, runErr := cmd.CombinedOutput()
	if runErr != nil {
		err = errors.Join(err, fmt.Errorf("generator: %w\n%s", runErr, out))
	}
	return err
}

// used does what has been done when slot a has become ready: its goal state is noted. One that has a slot b is that one's last good one.
func (h *host) used(goal string) error {
	root, err := file.OpenRoot(h.dir)
	if err != nil {
		return err
	}
	defer root.Close()
	state, err := store.Load(root)
	if err == nil {
		err = state.Use(root, "a")
	}
	if err == nil && state.Goal.Slots["b"] != nil {
		err = errors.Join(state.Use(root, "b"), store.Keep(root, "b", time.Unix(epoch, 0)))
	}
	return err
}

// tree is all that is in a host, but for what the test itself changes.
type tree map[string]node

type node struct {
	Mode    fs.FileMode
	Content string // of a file, or the target of a link
	Time    time.Time
}

func (tr tree) timeless() tree {
	out := maps.Clone(tr)
	for name, n := range out {
		n.Time = time.Time{}
		out[name] = n
	}
	return out
}

func (k *killer) tree(t *testing.T) tree {
	all := tree{}
	err := filepath.WalkDir(k.dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(k.dir, p)
		switch {
		case err != nil:
			return err
		case name == "etc", k.program.name != "generator" && name == generated:
			return fs.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		n := node{Mode: info.Mode()}
		if k.program.times && strings.HasPrefix(name, "image/") {
			n.Time = info.ModTime()
		}
		switch info.Mode().Type() {
		case 0:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			n.Content = string(b)
			// The number and the time of a stored goal state are other ones in each run. One that is whole is told by its files.
			if dir, slot := path.Split(name); path.Clean(dir) == store.Dir {
				if r, err := store.Decode(slot, b); err == nil {
					n.Content = "the goal state " + store.Digest(r.Sources)
				}
			}
		case fs.ModeSymlink:
			if n.Content, err = os.Readlink(p); err != nil {
				return err
			}
		}
		all[name] = n
		return nil
	})
	must(t, err)
	return all
}

// build returns the folder with the programs.
func build(t *testing.T) string {
	t.Helper()
	bin, err := built()
	must(t, err)
	return bin
}

var built = sync.OnceValues(func() (string, error) {
	bin, err := os.MkdirTemp("", "berth-faults")
	if err != nil {
		return "", err
	}
	gomod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return bin, err
	}
	for _, args := range [][]string{{"-o", bin + "/berth-generator", "./generator"}, {"-o", bin + "/", "./generator/berth", "./helpers/..."}} {
		cmd := exec.Command("go", append([]string{"build"}, args...)...)
		cmd.Dir, cmd.Env = path.Dir(string(gomod)), append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return bin, fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
		}
	}
	return bin, nil
})

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
