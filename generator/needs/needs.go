// Package needs knows what a running slot needs before a changed file of it has an effect: nothing, a daemon-reload, or the restart of
// something. It is pure: a file's part, its path and its bytes decide.
package needs

import (
	"bytes"
	"path"
	"slices"
	"strings"

	"berth/generator/file"
	"berth/helpers/render/parts"
	"berth/templates"
)

// Restart is what has to be restarted. Each one restarts all those before it, too.
type Restart int

// In the order of what they disturb.
const (
	None       Restart = iota
	Kubelet            // pods go on
	Containerd         // pods go on; kubelet waits for it
	Machine            // pods end
)

// Need is what a change asks for.
type Need struct {
	// Reload: systemd on the host has to read its units anew, for which the generator runs.
	Reload  bool
	Restart Restart
	// Live: it is enough that the file is written.
	Live bool
	// Because is the reason, as a sentence without a full stop.
	Because string
}

// OnlyComment is the reason why a change of what a file says of its own sources needs nothing.
const OnlyComment = "only its first comment differs"

// rule is a line of the table.
type rule struct {
	part string
	// pattern is matched with the path relative to the part's base (path.Match); empty: any path.
	pattern string
	need    Need
	// reloaded are keys of a unit file that a daemon-reload alone puts into effect.
	reloaded []string
}

const (
	system = "etc/systemd/system/" // of the machine
	// Reasons.
	atBoot      = "the machine reads it when it boots"
	nspawnReads = "systemd-nspawn reads it when the machine starts"
)

// table has the rules, of which the first that matches counts. What a new version of berth writes in addition gets a line here, and
// until then the restart of all that could read it.
var table = []rule{
	{parts.Generator, "systemd-nspawn@*.service.d/*", Need{Reload: true, Restart: Machine, Because: nspawnReads}, []string{
		"After", "PartOf", "Requires", "Restart", "RestartSec", "StartLimitIntervalSec", "TimeoutStartSec", "Wants",
	}},
	{parts.Generator, "", Need{Reload: true, Because: "systemd reads it then, and goes by it from then on"}, nil},

	{parts.NSpawn, "run/systemd/nspawn/*.nspawn", Need{Restart: Machine, Because: nspawnReads}, nil},
	// DeviceAllow=, which not every systemd applies to a running unit: 252 and 262 do at a daemon-reload, 257 does not.
	{parts.NSpawn, "", Need{Reload: true, Restart: Machine, Because: "the machine's devices are allowed when it starts"}, nil},

	// https://github.com/containerd/containerd/blob/main/docs/hosts.md
	{parts.Containerd, "etc/containerd/certs.d/*/hosts.toml", Need{Live: true, Because: "containerd reads it at each pull"}, nil},
	{parts.Containerd, "etc/containerd/config.toml", Need{Restart: Containerd, Because: "containerd reads it when it starts"}, nil},
	{parts.Containerd, system + "containerd.service", Need{Restart: Containerd, Because: "containerd is started by it"}, nil},
	// What is enabled there, or is no more, is started by the host's steps by its name, and by the machine itself only as it boots.
	{parts.Containerd, system + "*.wants/*", Need{Because: atBoot}, nil},
	{parts.Containerd, system + "*.requires/*", Need{Because: atBoot}, nil},
	{parts.Containerd, system + "node-stack.target", Need{Because: atBoot}, nil},
	{parts.Containerd, system + "var-lib-machines.mount.d/*", Need{Because: atBoot}, nil},
	{parts.Containerd, "", Need{Restart: Machine, Because: atBoot}, nil}, // tmpfiles.d, drop-ins of services that are there already

	{parts.Kubelet, system + "*.wants/*", Need{Because: atBoot}, nil},
	{parts.Kubelet, system + "*.requires/*", Need{Because: atBoot}, nil},
	{parts.Kubelet, system + "kubelet.service", Need{Restart: Kubelet, Because: "kubelet is started by it"}, nil},
	{parts.Kubelet, "", Need{Restart: Kubelet, Because: "kubelet reads it when it starts"}, nil},
}

// Of returns what a slot needs after the file at path, relative to the base of its part, was changed from old to wanted. nil stands for
// a file that is not there. running says that the slot holds a claim; one that does not reads everything when it starts, but for the
// units, without which systemd may not even know it.
func Of(part, name string, old, wanted *file.File, running bool) Need {
	need, reloaded := find(part, name)
	if old != nil && wanted != nil && old.Mode.Type() == wanted.Mode.Type() {
		switch {
		case bytes.Equal(old.Content, wanted.Content):
			return Need{Because: "its content is the same"}
		case bytes.Equal(body(old.Content), body(wanted.Content)):
			return Need{Because: OnlyComment}
		case reloaded != nil && onlyKeys(old.Content, wanted.Content, reloaded):
			need, _ = find(part, "")
		}
	}
	switch {
	case running:
		return need
	case part == parts.Generator:
		need, _ = find(part, "")
		return need
	}
	return Need{Because: "the slot is not running, and reads it when it starts"}
}

func find(part, name string) (Need, []string) {
	for _, r := range table {
		if ok, _ := path.Match(r.pattern, name); r.part == part && (ok || r.pattern == "") {
			return r.need, r.reloaded
		}
	}
	return Need{Reload: true, Restart: Machine, Because: "nothing is known about it"}, nil
}

// body is content without the comment at its beginning. All of berth's files have their comments behind "#".
func body(content []byte) []byte {
	for bytes.HasPrefix(content, []byte("#")) {
		_, content, _ = bytes.Cut(content, []byte("\n"))
	}
	return content
}

// onlyKeys tells whether two unit files differ in comments and assignments of these keys alone.
func onlyKeys(a, b []byte, keys []string) bool {
	rest := func(text []byte) (lines []string) {
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			key, _, _ := strings.Cut(line, "=")
			if line != "" && line[0] != '#' && !slices.Contains(keys, strings.TrimSpace(key)) {
				lines = append(lines, line)
			}
		}
		return lines
	}
	return slices.Equal(rest(a), rest(b))
}

// Sum is what several changes need together.
func Sum(needs []Need) Need {
	var sum Need
	for _, n := range needs {
		sum.Reload = sum.Reload || n.Reload
		sum.Live = sum.Live || n.Live
		sum.Restart = max(sum.Restart, n.Restart)
	}
	return sum
}

// words for people, and as keys for programs.
var words = map[Restart]string{Kubelet: "kubelet", Containerd: "containerd", Machine: "machine"}

// Words returns the need as keys: "daemon-reload", and one of "kubelet", "containerd" and "machine", which is to be restarted.
func (n Need) Words() []string {
	keys := []string{}
	if n.Reload {
		keys = append(keys, "daemon-reload")
	}
	if n.Restart != None {
		keys = append(keys, words[n.Restart])
	}
	return keys
}

// String returns the need in words.
func (n Need) String() string {
	var text []string
	if n.Reload {
		text = append(text, "daemon-reload")
	}
	switch n.Restart {
	case None:
	case Machine:
		text = append(text, "restart of the machine")
	default:
		text = append(text, "restart of "+words[n.Restart])
	}
	switch {
	case text == nil && n.Live:
		return "no restart"
	case text == nil:
		return "nothing"
	}
	return strings.Join(text, " and ")
}

// Command returns what to type for the slot; empty: nothing. There is one way to restart anything, and it takes the machine along, as
// the steps of a start build on each other.
func (n Need) Command(slot string) string {
	var commands []string
	if n.Reload {
		commands = append(commands, "systemctl daemon-reload")
	}
	switch {
	case n.Restart != None:
		commands = append(commands, "systemctl restart node@"+slot)
	case n.Live:
		commands = append(commands, templates.LibDir+"/render-config "+parts.Containerd+" "+slot)
	}
	return strings.Join(commands, "; ")
}
