package ready

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/generator/file"
	"berth/helpers/machine"
)

// healthy asks kubelet for its health. The slots share the host's network, so that anything may answer on that port: only
// a socket that belongs to a process of this machine's kubelet.service counts.
func (w *watcher) healthy(ctx context.Context, found machine.Service) error {
	if err := w.owned(ctx, found); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return askHealth(ctx, health)
}

// askHealth asks the address directly: a proxy of the environment has no business with it.
func askHealth(ctx context.Context, address netip.AddrPort) error {
	url := "http://" + address.String() + "/healthz"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	client := http.Client{
		Transport:     &http.Transport{Proxy: nil, DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(response.Body, 200))
		return fmt.Errorf("%s answers %s: %s", url, response.Status, strings.TrimSpace(string(body)))
	}
	return nil
}

// owned tells whether it is kubelet's own socket that listens on the health address.
func (w *watcher) owned(ctx context.Context, found machine.Service) error {
	if w.cgroup == "" {
		var err error
		if w.cgroup, err = w.host.ControlGroup(ctx, machine.NSpawnUnit(w.machine)); err != nil {
			return err
		}
	}
	cgroup, err := kubeletCGroup(w.step.Root, w.machine, w.cgroup, found.ControlGroup)
	if err != nil {
		return err
	}
	processes, err := machine.Processes(w.step.Root, cgroup)
	if err != nil {
		return err
	}
	some := false
	for _, table := range []string{"tcp", "tcp6"} { // each takes the kernel milliseconds, and kubelet mostly is in the first
		inodes, err := listeners(w.step.Root, table, health)
		if err != nil {
			return err
		}
		some = some || len(inodes) > 0
		for _, p := range processes {
			if holds(w.step.Root, p.PID, inodes) {
				return nil
			}
		}
	}
	if !some {
		return fmt.Errorf("nothing listens on %s", health)
	}
	return fmt.Errorf("something else than the kubelet of machine %s listens on %s", w.machine, health)
}

// kubeletCGroup finds the machine's kubelet.service among the host's cgroups. nspawn puts a machine's tree into "payload"
// below its unit (systemd-nspawn(1), --keep-unit with Delegate=).
func kubeletCGroup(host *file.Root, name, unit, inside string) (string, error) {
	if !filepath.IsLocal(strings.TrimPrefix(inside, "/")) {
		return "", fmt.Errorf("%s has no cgroup: %q", service, inside)
	}
	return filepath.Join(machine.CGroup(host, name, unit), "payload", inside), nil
}

// listeners returns the inodes of the TCP sockets in a table that listen on the address or on all addresses: proc_pid_net(5), where
// state 0A is TCP_LISTEN and an address is hexadecimal, in words of the host's byte order.
func listeners(host *file.Root, table string, address netip.AddrPort) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(host.Name(), "proc/self/net", table))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a kernel without IPv6
	} else if err != nil {
		return nil, err
	}
	var inodes []string
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != "0A" {
			continue
		}
		if local, err := parseSocket(f[1]); err == nil && serves(local, address) {
			inodes = append(inodes, f[9])
		}
	}
	return inodes, nil
}

// serves tells whether a socket bound to local takes connections to address.
func serves(local, address netip.AddrPort) bool {
	a := local.Addr().Unmap()
	return local.Port() == address.Port() && (a == address.Addr() || local.Addr().IsUnspecified() || a.IsUnspecified())
}

// parseSocket reads an address of /proc/net/tcp, such as 0100007F:2808.
func parseSocket(s string) (netip.AddrPort, error) {
	host, port, _ := strings.Cut(s, ":")
	raw, err := hex.DecodeString(host)
	if err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("%q is no socket address", s)
	}
	for word := range slices.Chunk(raw, 4) { // amd64 and arm64 are little-endian
		slices.Reverse(word)
	}
	addr, ok := netip.AddrFromSlice(raw)
	p, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is no socket address", s)
	}
	return netip.AddrPortFrom(addr, uint16(p)), nil
}

// holds tells whether a process has one of the sockets open.
func holds(host *file.Root, pid uint32, inodes []string) bool {
	if len(inodes) == 0 {
		return false
	}
	dir := filepath.Join(host.Name(), "proc", strconv.FormatUint(uint64(pid), 10), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if link, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			if inode, ok := strings.CutPrefix(link, "socket:["); ok && slices.Contains(inodes, strings.TrimSuffix(inode, "]")) {
				return true
			}
		}
	}
	return false
}
