package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/testdata/gpu"
	"berth/testdata/lab"
	"berth/testdata/lab/bench"
)

var (
	rounds   = flag.Int("rounds", 0, "measure how fast berth is, this many times each; 0: do not")
	pictures = flag.String("pictures", "", "the `folder` for timelines of a start, as SVG; empty: only on the terminal")
)

// TestSpeed prints how long things take beside what they take without berth, in the same lab host and in turn, and a timeline of a
// start. It measures the marks that the README has; that one is missed is no failure of the test.
func TestSpeed(t *testing.T) {
	if *rounds == 0 {
		t.Skip("measures only with -rounds")
	}
	for _, suite := range lab.Suites {
		t.Run(suite, func(t *testing.T) {
			s := newSpeed(t, suite)
			s.starts(t)
			s.machinesMount(t)
			s.programs(t)
			s.generator(t)
			s.reload(t)
			s.sizes(t)
			fmt.Printf("\n%s, systemd %s, medians of %d:\n\n%s\n", suite, strings.TrimSpace(s.Must(t, "systemctl show -P Version")), *rounds, s.table())
		})
	}
}

// speed is a host on which is measured, and what was.
type speed struct {
	*host
	rows []row
}

// row is one line of the table: a value beside its floor, which may be empty, and what it should be.
type row struct {
	what, floor, value, ratio, mark string
	good                            bool
}

func (s *speed) table() string {
	var b strings.Builder
	b.WriteString("| What | Without berth | With | Ratio | Mark | |\n| --- | --: | --: | --: | --- | --- |\n")
	for _, r := range s.rows {
		verdict := "missed"
		if r.good {
			verdict = "reached"
		}
		if r.mark == "" {
			verdict = ""
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", r.what, r.floor, r.value, r.ratio, r.mark, verdict)
	}
	return b.String()
}

// Where things are in the lab host.
const (
	tools            = "/usr/local/lib/bench/"
	generatorProgram = "/usr/lib/systemd/system-generators/berth-generator"
	bareUnit         = "systemd-nspawn@node-b.service"
)

// newSpeed makes a host in which node-b is a bare machine: with all that berth renders for slot b and with the settings of its
// unit, but without a dependency or a process of berth's.
func newSpeed(t *testing.T, suite string) *speed {
	s := &speed{host: newHost(t, suite)}
	source, err := sourceDir()
	if err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-C", source, "-ldflags=-s -w", "-o", filepath.Join(s.Root(), tools)+"/", "./testdata/lab/bench/...")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if err := errors.Join(os.MkdirAll(filepath.Join(s.Root(), tools), 0o755), run(build)); err != nil {
		t.Fatal(err)
	}
	s.rest(t)
	s.start(t, "b")
	s.Must(t, "systemctl stop node@b")
	const dropIn = bareUnit + ".d/50-berth.conf"
	settings := s.Must(t, "grep -Ev '^(Requires|After|PartOf|Wants)=' /run/systemd/generator/"+dropIn)
	s.write(t, "/run/systemd/system/"+dropIn, settings)
	s.goal(t, strings.Replace(Goal, "[slot.b]\n", "", 1)+strings.Replace(budgets, `settle = "300ms"`, `settle = "0s"`, 1))
	return s
}

// measure has the stopwatch carry out a plan of so many rounds, after one that does not count.
func (s *speed) measure(t *testing.T, rounds int, commands ...bench.Command) bench.Results {
	t.Helper()
	plan, err := json.Marshal(bench.Plan{Rounds: rounds + 1, Commands: commands})
	if err != nil {
		t.Fatal(err)
	}
	cmd, err := s.Command(t.Context(), tools+"stopwatch")
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(plan), &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("stopwatch: %v: %s", err, errs.String())
	}
	var results bench.Results
	if err := json.Unmarshal(out.Bytes(), &results); err != nil {
		t.Fatal(err)
	}
	for name := range results {
		results[name] = results[name][1:]
	}
	return results
}

func command(name, script string) bench.Command {
	return bench.Command{Name: name, Args: strings.Fields(script)}
}

func shell(script string) bench.Command { return bench.Command{Args: []string{"sh", "-euc", script}} }

// lag prints, in microseconds, how long before node@a kubelet became active.
const lag = `echo $(($(systemctl show -P ActiveEnterTimestampMonotonic node@a) -
	$(systemctl -M node-a show -P ActiveEnterTimestampMonotonic kubelet)))`

// starts measures start and stop of a node, without and with GPUs.
func (s *speed) starts(t *testing.T) {
	round := []bench.Command{
		command("bare start", tools+"bare node-b"),
		command("bare stop", "systemctl stop "+bareUnit),
		command("start", "systemctl start node@a"),
		{Name: "lag", Output: true, Args: []string{"sh", "-euc", lag}},
		command("stop", "systemctl stop node@a"),
	}
	r := s.measure(t, *rounds, round...)
	floor, start := r.Took("bare start"), r.Took("start")
	more := r.More("start", "bare start")
	s.compare("start of node@a, no GPU", floor, start, 1.05)
	s.add(row{"the same, in milliseconds", ms(floor), ms(start), "+" + ms(more), "≤ +60 ms", more <= 60*time.Millisecond})
	s.timeline(t, "start", "a start of node@a")

	g := GPU{Driver: gpu.Driver{Version: "550.54.15", Libraries: 120}, Nodes: gpu.Headless(1)}
	if err := g.Install(t.Context(), s.Host); err != nil {
		t.Fatal(err)
	}
	wired := s.measure(t, *rounds, round...)
	s.timeline(t, "start-gpu", "a start of node@a with 120 NVIDIA libraries")
	if err := RemoveGPU(t.Context(), s.Host); err != nil {
		t.Fatal(err)
	}
	s.compare("start with 120 NVIDIA libraries", wired.Took("bare start"), wired.Took("start"), 1.08)
	s.compare("stop of node@a", r.Took("bare stop"), r.Took("stop"), 1.3)
	var lags []time.Duration
	for _, run := range r["lag"] {
		n, err := strconv.Atoi(run.Output)
		if err != nil {
			t.Fatal(err)
		}
		lags = append(lags, time.Duration(n)*time.Microsecond)
	}
	l := bench.Median(lags)
	s.add(row{"from kubelet active to node@a active", "", ms(l), "", "≤ 20 ms", l <= 20*time.Millisecond})
}

// machinesMount measures the start of a bare machine that has systemd-container in it, as images often do, without and with the drop-in
// of its var-lib-machines.mount that berth renders.
func (s *speed) machinesMount(t *testing.T) {
	const dropIn = "/var/lib/machines/node-b/etc/systemd/system/var-lib-machines.mount.d/50-berth.conf"
	s.Must(t, `cd /usr/lib/systemd/system; tar c var-lib-machines.mount machines.target machines.target.wants remote-fs.target.wants/var-lib-machines.mount |
		tar x -C /var/lib/machines/node-b/usr/lib/systemd/system`)
	r := s.measure(t, *rounds, shell("mv "+dropIn+" /run/kept"), command("without", tools+"bare node-b"), command("", "systemctl stop "+bareUnit),
		shell("mv /run/kept "+dropIn), command("with", tools+"bare node-b"), command("", "systemctl stop "+bareUnit))
	floor, value := r.Took("without"), r.Took("with")
	s.add(row{"bare start with systemd-container in the machine, without and with berth's drop-in", ms(floor), ms(value),
		fmt.Sprintf("%.3f", value.Seconds()/floor.Seconds()), "", true})
}

// programs measures each helper as a whole process, where it has nothing to wait for.
func (s *speed) programs(t *testing.T) {
	const lib = "/usr/lib/berth/"
	helper := func(args string) bench.Command { return command(args, lib+args) }
	down := []bench.Command{helper("peer-guard a"), helper("peer-guard --release a"), helper("wait-kubelet --down a")}
	up := []bench.Command{
		helper("render-config nspawn a"), helper("render-config containerd a"), helper("render-config kubelet a"),
		helper("wait-dbus a"), helper("nvidia-wire a"), helper("machine-unit a kubelet.service"), helper("wait-kubelet a"),
	}
	s.helpers(t, down)
	s.start(t, "a")
	s.helpers(t, up)
	s.Must(t, "systemctl stop node@a")
}

func (s *speed) helpers(t *testing.T, commands []bench.Command) {
	took := s.measure(t, *rounds, commands...)
	memory := s.measure(t, 2, remember(commands)...)
	for _, c := range commands {
		d, m := took.Took(c.Name), memory.Memory(c.Name)
		s.add(row{c.Name, "", fmt.Sprintf("%s, %s", ms(d), mib(m)), "", "≤ 6 ms, 15 MiB", d <= 6*time.Millisecond && m <= 15<<20})
	}
}

// remember makes the memory of commands what is measured.
func remember(commands []bench.Command) []bench.Command {
	var all []bench.Command
	for _, c := range commands {
		c.Memory = c.Name != ""
		all = append(all, c)
	}
	return all
}

// generator measures the generator as a whole process, with new folders for its output, as systemd gives it.
func (s *speed) generator(t *testing.T) {
	const (
		out   = "/run/bench-out"
		clear = "rm -rf " + out + "; mkdir " + out
	)
	// root makes a host's root folder with a goal state of so many slots.
	root := func(slots int, more string) string {
		dir := fmt.Sprintf("/run/bench-%d", slots)
		text := strings.Replace(Goal, "[slot.a]\n[slot.b]\n", more, 1)
		for i := range slots {
			text += fmt.Sprintf("[slot.s%d]\n", i)
		}
		s.write(t, dir+"/etc/berth/goal.toml", text)
		return dir
	}
	generate := func(name, root string) bench.Command {
		c := command(name, generatorProgram+" "+out+" "+out+" "+out)
		c.Env = []string{"BERTH_ROOT=" + root}
		return c
	}
	two := []bench.Command{shell(clear), command("onefile", tools+"onefile "+out), shell(clear), generate("2 slots", root(2, ""))}
	r, memory := s.measure(t, 5**rounds, two...), s.measure(t, 2, remember(two)...)
	s.compare("generator, 2 slots; a Go program that writes one file", r.Took("onefile"), r.Took("2 slots"), 1.4)
	m := memory.Memory("2 slots")
	s.add(row{"its memory", mib(memory.Memory("onefile")), mib(m), "", "≤ 6 MiB", m <= 6<<20})

	const all = "[timeouts]\nready = \"1m\"\nafter_start = \"4m\"\n" // so that a slot has all files that it can have
	r = s.measure(t, *rounds, shell(clear), generate("500", root(500, all)), shell(clear), generate("1000", root(1000, all)))
	files, err := strconv.Atoi(s.Must(t, "find "+out+" -not -type d | wc -l"))
	if err != nil {
		t.Fatal(err)
	}
	half, whole := r.Took("500"), r.Took("1000")
	each := whole / time.Duration(files)
	s.add(row{fmt.Sprintf("generator, 1000 slots: each of %d files", files), "", fmt.Sprintf("%.1f µs", each.Seconds()*1e6), "",
		"≤ 40 µs", each <= 40*time.Microsecond})
	s.compare("generator, 1000 slots; twice that of 500", 2*half, whole, 1.1)
}

// reload measures what a daemon-reload takes where berth is installed and slot a starts at boot, and where it is not.
func (s *speed) reload(t *testing.T) {
	const away = "/run/bench-away"
	goal := s.Must(t, "cat /etc/berth/goal.toml")
	s.goal(t, "boot = \"a\"\n"+strings.Replace(goal, "[slot.a]", "[slot.a]\n[slot.b]", 1))
	installed := "/usr/lib/systemd/system/node*@.* " + generatorProgram
	remove := shell("mkdir -p " + away + "; mv " + installed + " " + away + "; systemctl daemon-reload")
	restore := shell("mv " + away + "/berth-generator " + generatorProgram + "; mv " + away + "/* /usr/lib/systemd/system/; systemctl daemon-reload")
	// What systemd itself takes for as many units as it loads of berth's: plain ones, each wanted by the one before.
	loaded, err := strconv.Atoi(s.Must(t, "systemctl list-units --all --no-legend --plain 'node@*' 'node-*@*' 'systemd-nspawn@node-*' 'run-bpffs-*' | wc -l"))
	if err != nil || loaded < 10 {
		t.Fatalf("%d units of berth's are loaded, %v", loaded, err)
	}
	const plain = "/run/systemd/system/"
	for i := range loaded {
		s.write(t, fmt.Sprintf("%sbench-plain-%d.service", plain, i), fmt.Sprintf("[Unit]\nWants=bench-plain-%[1]d.service\nAfter=bench-plain-%[1]d.service\n"+
			"[Service]\nType=oneshot\nExecStart=/bin/true\n", i+1))
	}
	const wanted = plain + "multi-user.target.wants/bench-plain-0.service"
	add := shell("mkdir -p " + plain + "multi-user.target.wants; ln -s ../bench-plain-0.service " + wanted + "; systemctl daemon-reload")
	take := shell("rm " + wanted + "; systemctl daemon-reload")
	reload := func(name string) bench.Command { return command(name, "systemctl daemon-reload") }
	r := s.measure(t, 3**rounds, remove, reload("without"), add, reload("plain"), take, restore, reload("with"))
	more, floor := r.More("with", "without"), r.More("plain", "without")
	s.add(row{"daemon-reload, 2 slots", ms(r.Took("without")), ms(r.Took("with")), "+" + ms(more), "≤ +3 ms", more <= 3*time.Millisecond})
	s.add(row{fmt.Sprintf("the same, %d plain units in berth's place", loaded), ms(r.Took("without")), ms(r.Took("plain")), "+" + ms(floor), "", true})
	s.goal(t, goal)
}

// sizes adds up the programs: those that a start of a node runs, and all.
func (s *speed) sizes(t *testing.T) {
	var six, sum int64
	var names []string
	for _, pattern := range []string{"/usr/bin/berth", generatorProgram, "/usr/lib/berth/*"} {
		found, err := filepath.Glob(filepath.Join(s.Root(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range found {
			info, err := os.Stat(name)
			if err != nil {
				t.Fatal(err)
			}
			sum += info.Size()
			switch filepath.Base(name) {
			case "berth-generator", "peer-guard", "render-config", "wait-dbus", "nvidia-wire", "wait-kubelet":
				six += info.Size()
			}
			names = append(names, filepath.Base(name))
		}
	}
	s.add(row{"generator, peer-guard, render-config, wait-dbus, nvidia-wire, wait-kubelet", "", fmt.Sprintf("%.1f MB", float64(six)/1e6), "", "≤ 30 MB", six <= 30e6})
	s.add(row{fmt.Sprintf("all %d programs", len(names)), "", fmt.Sprintf("%.1f MB", float64(sum)/1e6), "", "", true})
}

// timeline prints a picture of a start of slot a.
func (s *speed) timeline(t *testing.T, name, title string) {
	t.Helper()
	s.start(t, "a")
	defer s.Must(t, "systemctl stop node@a")
	spans, err := Spans(t.Context(), s.Host)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("\n%s: %s\n\n%s", s.Suite(), title, Timeline(spans))
	if *pictures == "" {
		return
	}
	if err := write(filepath.Join(*pictures, name+"-"+s.Suite()+".svg"), []byte(TimelineSVG(title+", "+s.Suite(), spans)), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (s *speed) add(r row) { s.rows = append(s.rows, r) }

// compare adds a row that must not be more than so many times its floor.
func (s *speed) compare(what string, floor, value time.Duration, mark float64) {
	ratio := value.Seconds() / floor.Seconds()
	s.add(row{what, ms(floor), ms(value), fmt.Sprintf("%.3f", ratio), fmt.Sprintf("≤ %g", mark), ratio <= mark})
}

func ms(d time.Duration) string {
	if d >= 100*time.Millisecond {
		return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.2f ms", d.Seconds()*1e3)
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
