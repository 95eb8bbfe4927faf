package node

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"berth/generator/goalstate/store"
	"berth/testdata/gpu"
	"berth/testdata/lab"
)

var (
	faults = flag.Int("faults", 0, "number of `kills` of berth's programs on a host of each release")
	seed   = flag.Uint64("seed", uint64(time.Now().UnixNano()), "decides the moments of the kills")
)

// TestFaults kills what runs a node, at random moments, on a host of each release. Package faults does so with the programs that need no
// systemd.
func TestFaults(t *testing.T) {
	if *faults == 0 {
		t.Skip("only with -faults N")
	}
	patience = 20 * time.Minute // of hundreds of kills in one command
	for _, suite := range lab.Suites {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, suite)
			h.rest(t)
			defer h.explain(t)
			h.kills(t, *faults)
		})
	}
}

// killCases are a few kills of each kind.
var killCases = []testCase{
	{"14 kill -9 of anything at any moment", func(t *testing.T, h *host) { h.kills(t, 40) }},
}

// kills kills n processes: of programs that are run by hand, of generators in a daemon-reload, and of a chain that starts.
func (h *host) kills(t *testing.T, n int) {
	t.Logf("to see the same again: -seed=%d", *seed)
	choose := rand.New(rand.NewPCG(*seed, uint64(len(h.Suite()))))
	begin := time.Now()
	var table strings.Builder
	row := func(what string, kills int, more string) {
		fmt.Fprintf(&table, "%-50s %5d kills %6.1fs %s\n", what, kills, time.Since(begin).Seconds(), more)
		begin = time.Now()
	}
	defer func() { t.Logf("%s:\n%s", h.Suite(), &table) }()

	h.gpu(t, GPU{Driver: driver550, Nodes: gpu.Headless(1)})
	h.start(t, "a")
	commands := []struct {
		command string
		exit    int // when it is not killed
	}{
		{"wait-dbus a", 0},
		{"wait-kubelet a", 0},
		{"machine-unit a kubelet.service", 0},
		{"machine-unit --stop a kubelet.service", 0},
		{"machine-unit a containerd.service", 0},
		{"nvidia-wire a", 0},
		{"render-config nspawn a", 0},
		{"record-applied a", 0},
		{"peer-guard a", 5},           // its machine runs already
		{"peer-guard b", 5},           // refused
		{"peer-guard --release a", 1}, // alive
	}
	byHand := n * 7 / 10
	before := h.wired(t)
	for _, c := range commands {
		row(c.command, h.killByHand(t, choose, c.command, byHand/len(commands), c.exit), "")
		if t.Failed() {
			return
		}
	}
	h.Must(t, "/usr/lib/berth/machine-unit a kubelet.service; timeout 60 /usr/lib/berth/wait-kubelet a")
	h.wantUp(t, "a")
	h.wholeRecords(t)
	if after := h.wired(t); after != before {
		t.Errorf("what nvidia-wire made has changed from\n%s\nto\n%s", before, after)
	}
	h.noStrays(t)

	killed := h.killGenerator(t, choose, n/10)
	row("berth-generator in a daemon-reload", killed, "")

	both := h.watchBoth(t)
	chain := n - byHand - n/10
	for chain > 0 && !t.Failed() {
		group := min(chain, 10)
		chain -= group
		report := h.killChain(t, choose, group)
		up := h.consistent(t)
		if up != "a" && up != "b" {
			t.Errorf("after kills of %s: up is %q; want one slot", report, up)
		}
		h.wholeRecords(t)
		h.noStrays(t)
		row("in a chain", group, report+"; then up: "+up)
	}
	if out := both(); !strings.Contains(out, " looks, 0 at both") {
		t.Errorf("both machines were alive: %s", out)
	}
	h.Must(t, "rm -rf /run/systemd/system/*.d; systemctl daemon-reload; timeout 60 systemctl stop node@a node@b; systemctl reset-failed")
	h.consistent(t)

	for _, command := range []string{"peer-guard a", "peer-guard --release a"} { // of a host that is free
		row(command, h.killByHand(t, choose, command, byHand/len(commands), 0), "")
	}
	h.wantDown(t, "a")
	h.noStrays(t)
}

// killByHand runs a helper as a person would, and kills it, n times, at moments that are spread over the time that it takes, and a bit more.
// Whenever a run has come to its end its exit code must be right, and so must be that of the last one, which is not killed.
func (h *host) killByHand(t *testing.T, choose *rand.Rand, command string, n, exit int) (killed int) {
	t.Helper()
	h.write(t, "/run/kill.sh", `
exec 9<> <(:)
RANDOM=$1 n=$2 exit=$3; shift 3
run() { "$@" >/run/kill.out 2>&1; code=$?; [ $code = $exit ] || { echo "exit code $code"; cat /run/kill.out; exit 1; }; }
begin=${EPOCHREALTIME/./}; for i in 1 2 3; do run "$@"; done; median=$((((${EPOCHREALTIME/./} - begin) / 3) * 11 / 10 + 1))
killed=0
for ((i = 0; i < n; i++)); do
	printf -v delay %d.%06d 0 $(((RANDOM * 32768 + RANDOM) % (median < 1000000 ? median : 999999)))
	"$@" >/run/kill.out 2>&1 & pid=$!
	read -t $delay -u 9
	kill -9 $pid 2>/dev/null
	wait $pid 2>/dev/null; code=$?
	case $code in 137) killed=$((killed+1)) ;; $exit) ;; *) echo "exit code $code"; cat /run/kill.out; exit 1 ;; esac
done 2>/dev/null
run "$@"
echo $killed
`)
	out, code := h.try(t, fmt.Sprintf("bash /run/kill.sh %d %d %d /usr/lib/berth/%s", choose.IntN(32768), n, exit, command))
	if _, err := fmt.Sscan(out, &killed); err != nil || code != 0 {
		t.Errorf("%s, killed at random moments; want exit code %d: %s", command, exit, out)
	}
	return killed
}

// wired is all that nvidia-wire makes in the machine, but for the time at which nvidia-ctk was run.
func (h *host) wired(t *testing.T) string {
	t.Helper()
	return h.Must(t, `nsenter -t $(machinectl show node-a -p Leader --value) -m sh -c '
		find /run/cdi /run/host-nvidia/cdi /usr/lib/*-linux-gnu /usr/bin /dev/char -lname "*nvidia*" -printf "%p -> %l\n" -o -path "*cdi*" -printf "%p %m\n" 2>/dev/null | sort; cat /run/cdi/*'`)
}

// wholeRecords requires that what is stored as the last good goal states is whole, and that there is one.
func (h *host) wholeRecords(t *testing.T) {
	t.Helper()
	entries, err := os.ReadDir(h.path("/" + store.Dir))
	if err != nil || len(entries) == 0 {
		t.Errorf("want a last good goal state: %v %v", entries, err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(h.path("/" + store.Dir + "/" + e.Name()))
		if err == nil {
			_, err = store.Decode(e.Name(), data)
		}
		if err != nil {
			t.Errorf("%s: %v", e.Name(), err)
		}
	}
}

// noStrays requires that no temporary file is where berth writes.
func (h *host) noStrays(t *testing.T) {
	t.Helper()
	out := h.Must(t, `find /run/berth /var/lib/berth /run/systemd/generator* /run/systemd/nspawn /run/systemd/system /var/lib/machines/node-*/etc \
		/var/lib/machines/node-*/var/lib/kubelet -name '.*' ! -name '.' ! -name '.pwd.lock' ! -name '.updated' ! -name '.#*' -newer /run/systemd/private 2>/dev/null
		for m in a b; do pid=$(machinectl show node-$m -p Leader --value 2>/dev/null) && find /proc/$pid/root/run/cdi /proc/$pid/root/run/host-nvidia \
		/proc/$pid/root/dev/char /proc/$pid/root/usr/lib -maxdepth 2 -name '.*' 2>/dev/null; done; :`)
	if out != "" {
		t.Errorf("temporary files that stay: %s", out)
	}
}

// killGenerator kills the generator in each of n daemon-reloads, and looks after each group whether one more makes all units as they were.
func (h *host) killGenerator(t *testing.T, choose *rand.Rand, n int) (killed int) {
	t.Helper()
	const units = "cd /run/systemd/generator && find . -name '*node*' -o -path '*node*' | sort | while read -r f; do echo $f; [ -f $f ] && cat $f; done"
	before := h.Must(t, units)
	want(t, before, "./node@a.service")
	runs := h.runs(t, "a")
	// A generator of this name in /run hides the one in /usr/lib (systemd.generator(7)).
	h.write(t, "/run/systemd/system-generators/berth-generator", `#!/bin/bash
exec 9<> <(:)
RANDOM=$$
/usr/lib/systemd/system-generators/berth-generator "$@" & pid=$!
printf -v delay 0.%06d $((RANDOM % 8000))
read -t $delay -u 9
kill -9 $pid && kill -9 $$
`)
	for killed < n && !t.Failed() {
		group := min(10, n-killed)
		killed += group
		h.Must(t, fmt.Sprintf(`chmod 755 /run/systemd/system-generators/berth-generator
			for i in $(seq %d); do systemctl daemon-reload || exit; done
			chmod 644 /run/systemd/system-generators/berth-generator; mv /run/systemd/system-generators/berth-generator /run/killer
			systemctl daemon-reload; mv /run/killer /run/systemd/system-generators/berth-generator`, group))
		if after := h.Must(t, units); after != before {
			t.Errorf("after killed generators, the next one made\n%s\ninstead of\n%s", after, before)
		}
	}
	h.Must(t, "rm -r /run/systemd/system-generators; systemctl daemon-reload")
	sameRuns(t, h, runs)
	h.wantUp(t, "a")
	return killed
}

// killChain has both slots start, again and again, and kills n of the processes that do so: of a step, a systemd-nspawn or a machine's
// PID 1, each as soon as it is there and a random time has passed. It returns what was killed.
func (h *host) killChain(t *testing.T, choose *rand.Rand, n int) string {
	t.Helper()
	for _, unit := range []string{"node@a", "node@b", "systemd-nspawn@node-a", "systemd-nspawn@node-b"} {
		h.write(t, "/run/systemd/system/"+unit+".service.d/99-test.conf", "[Service]\nRestartSec=200ms\n")
	}
	h.write(t, "/run/chain.sh", `
exec 9<> <(:)
RANDOM=$1 n=$2
systemctl daemon-reload
steps=(peer-guard render-nspawn render-containerd render-kubelet machine init wait-dbus nvidia-wire containerd kubelet node record-applied)
most=(60 60 40 40 900 900 600 900 300 300 600 30) # milliseconds that they take
for ((killed = 0, tries = 0; killed < n && tries < 20 * n; tries++)); do
	case $((RANDOM % 4)) in
	0) systemctl start --no-block node@a ;;
	1) systemctl restart --no-block node@a ;;
	2) systemctl start --no-block node@b ;;
	3) systemctl restart --no-block node@b ;;
	esac
	i=$((RANDOM % ${#steps[@]})) pid=
	for ((look = 0; look < 1500; look++)); do
		for slot in a b; do
			case ${steps[i]} in
			machine) cg=machine.slice/systemd-nspawn@node-$slot.service/supervisor ;;
			init) cg=machine.slice/systemd-nspawn@node-$slot.service/payload/init.scope ;;
			node) cg=system.slice/system-node.slice/node@$slot.service ;;
			*) cg='system.slice/system-node\x2d'${steps[i]/-/\\x2d}.slice/node-${steps[i]}@$slot.service ;;
			esac
			read -r pid 2>/dev/null </sys/fs/cgroup/$cg/cgroup.procs && break 2
		done
		read -t 0.002 -u 9
	done
	[ "$pid" ] || continue
	printf -v delay 0.%06d $((RANDOM * 32768 % (most[i] * 1000)))
	read -t $delay -u 9
	kill -9 $pid 2>/dev/null || continue
	killed=$((killed+1)); echo -n "${steps[i]} "
done
[ $killed = $n ]
`)
	out, exit := h.try(t, fmt.Sprintf("bash /run/chain.sh %d %d", choose.IntN(32768), n))
	if exit != 0 {
		t.Errorf("fewer than %d kills: %s", n, out)
	}
	// Of two that were refused at a moment when the other one was just going down, none is up: this is not about them.
	h.Must(t, "systemctl start --no-block node@a")
	return strings.TrimSpace(out)
}
