package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// marker is the part of a bootstrap token that is secret, and any other secret in these cases.
const marker = "0marker0secret0x"

// pattern finds marker, and is not found by it in the search's own command line.
var pattern = strings.TrimSuffix(marker, "x") + "[x]"

// secretCases follow a secret through a start.
var secretCases = []testCase{
	{"45 secrets are where they belong, and nowhere else", func(t *testing.T, h *host) {
		const token = "abcdef." + marker
		h.secret(t, "/run/lab-token", token)
		// Besides the token, all other secrets that a goal state can hold.
		const more = budgets + `
[kubelet.config]
staticPodURLHeader = { Authorization = ["Bearer ` + marker + `"] }
[containerd.registry."example.com"]
server = "https://example.com"
mirrors = [{ url = "http://127.0.0.1:5000", header = { Authorization = ["Basic ` + marker + `"] } }]
`
		const (
			machine   = "/var/lib/machines/node-a"
			bootstrap = machine + "/var/lib/kubelet/bootstrap-kubeconfig"
			goal      = "/etc/berth/goal.toml"
		)
		defer h.Must(t, "chmod 0644 "+goal+"; rm /run/lab-token")
		always := []string{goal, "/run/berth/used/a", "/run/lab-token", "/var/lib/berth/a", machine + "/etc/containerd/certs.d/example.com/hosts.toml", machine + "/var/lib/kubelet/config.yaml"}
		for _, c := range []struct {
			key     string   // in place of Goal's bootstrap_token_file
			prepare string   // a shell script
			at      []string // where the marker is, besides always
		}{
			{`bootstrap_token = "` + token + `"`, "", []string{bootstrap}},
			{`bootstrap_token_file = "/etc/berth/secret"`, "install -m 0600 /run/lab-token /etc/berth/secret", []string{"/etc/berth/secret", bootstrap}},
			{`bootstrap_token_credential = "token"`, "install -D -m 0600 /run/lab-token /etc/credstore/token", []string{"/etc/credstore/token", bootstrap}},
			{`bootstrap_token_encrypted_credential = "token"`, `mkdir -p /etc/credstore.encrypted
				systemd-creds encrypt --with-key=host /run/lab-token /etc/credstore.encrypted/token`, []string{bootstrap}},
			{`exec = { command = "/bin/false", env = { MY_TOKEN = "` + token + `" } }`, "", []string{machine + "/var/lib/kubelet/kubeconfig"}},
		} {
			name, _, _ := strings.Cut(c.key, " ")
			t.Run(name, func(t *testing.T) {
				text := strings.Replace(Goal, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, c.key, 1) + more
				h.secret(t, goal, text)
				since := strings.TrimSpace(h.Must(t, c.prepare+"\ntouch /run/since; journalctl --flush --sync; date +%s"))
				defer h.Must(t, "systemctl stop node@a; rm -rf /etc/berth/secret /etc/credstore /etc/credstore.encrypted")
				stop := watchProcesses(t)
				h.Must(t, "systemctl daemon-reload")
				defer h.explain(t)
				h.start(t, "a")
				h.Must(t, "systemctl restart node-kubelet@a; systemctl reload node@a || true")
				said := h.Must(t, `systemctl show 'node*@a.service' systemd-nspawn@node-a; systemctl cat 'node*@a.service' systemd-nspawn@node-a
					for command in 'show a' 'show --json a' 'show --list a' 'diff a' 'diff --json a' 'status a' 'status --json a' 'check' 'check --host' 'check --host --json'; do
						berth $command 2>&1 || true
					done
					mkdir -p /run/out/n /run/out/e /run/out/l; /usr/lib/systemd/system-generators/berth-generator /run/out/n /run/out/e /run/out/l 2>&1; cat $(find /run/out -type f)
					journalctl --no-pager --output=export --since=@`+since+`; journalctl --machine=node-a --no-pager --output=export --since=@`+since)
				stop()
				for line := range strings.Lines(said) {
					if strings.Contains(line, marker) {
						t.Errorf("a secret is told: %s", line)
					}
				}
				want(t, said, "node-render-kubelet@a.service", `"findings"`, "ExecStart=")

				// Every file that was written since, in the host, its machines, and what is mounted for a while; and where it may be from before.
				found := strings.Fields(h.Must(t, `rm -rf /run/out; systemctl start node-record-applied@a
					find / \( -path /proc -o -path /sys \) -prune -o -type f \( -cnewer /run/since -o -path /run/lab-token -o -path `+goal+` -o -path '/etc/credstore/*' -o -path '/etc/berth/*' \
						-o -path '`+machine+`/etc/*' -o -path '`+machine+`/var/lib/kubelet/*' \) -print0 |
					xargs -0 grep --files-with-matches --text -e `+pattern+` | xargs stat --format=%n:%a:%u`))
				var where []string
				for _, f := range found {
					place, access, _ := strings.Cut(f, ":")
					// systemd 252 keeps what it handed to a step until the step is stopped.
					if place == "/run/credentials/node-render-kubelet@a.service/token" && access == "400:0" {
						continue
					}
					where = append(where, place)
					if access != "600:0" {
						t.Errorf("%s holds a secret, with mode and owner %s; want 600:0", place, access)
					}
				}
				at := append(slices.Clone(always), c.at...)
				slices.Sort(at)
				slices.Sort(where)
				if diff := cmp.Diff(at, where); diff != "" {
					t.Errorf("files with a secret, -want +got:\n%s", diff)
				}
			})
		}
	}},
	{"45 a goal state with a secret that every user can read", func(t *testing.T, h *host) {
		h.goal(t, strings.Replace(Goal, `bootstrap_token_file = "/etc/berth/bootstrap-token"`, `bootstrap_token = "abcdef.`+marker+`"`, 1)+budgets)
		h.Must(t, "chmod 0644 /etc/berth/goal.toml")
		const finding = "/etc/berth/goal.toml: holds kubelet.bootstrap_token (line 7), and every user can read it (mode 0644): chmod 0600 /etc/berth/goal.toml"
		want(t, h.fails(t, "berth check"), finding)
		h.start(t, "a") // it warns, and does not keep the node down
		want(t, h.Must(t, "journalctl --no-pager --output=cat PRIORITY=4 -u node-render-kubelet@a"), finding)
		h.Must(t, "chmod 0600 /etc/berth/goal.toml; berth check; chmod 0644 /etc/berth/goal.toml")
	}},
}

// secret puts a file into the host that only root can read.
func (h *host) secret(t *testing.T, path, content string) {
	t.Helper()
	if err := os.RemoveAll(h.path(path)); err != nil {
		t.Fatal(err)
	}
	if err := write(h.path(path), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// watchProcesses looks at the command line and the environment of every process, again and again, until the function that it
// returns is called.
func watchProcesses(t *testing.T) (stop func()) {
	t.Helper()
	done, ended := make(chan struct{}), make(chan struct{})
	told := map[string]bool{}
	looks := 0
	go func() {
		defer close(ended)
		for {
			for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ"} {
				names, _ := filepath.Glob(pattern)
				for _, name := range names {
					text, _ := os.ReadFile(name) // of one that is gone
					if what := fmt.Sprintf("%s: %q", filepath.Base(name), text); strings.Contains(string(text), marker) {
						told[what] = true
					}
				}
			}
			looks++
			select {
			case <-done:
				return
			default:
			}
		}
	}()
	return func() {
		t.Helper()
		close(done)
		<-ended
		for what := range told {
			t.Errorf("a secret is in a process's %s", what)
		}
		t.Logf("looked %d times", looks)
	}
}
