package ready

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"testing"

	"berth/generator/file"
)

func TestParseSocket(t *testing.T) {
	for _, c := range []struct{ in, want, why string }{
		{"0100007F:2808", "127.0.0.1:10248", "words are in the host's byte order"},
		{"00000000:0016", "0.0.0.0:22", "all addresses"},
		{"00000000000000000000000001000000:2808", "[::1]:10248", "IPv6"},
		{"0000000000000000FFFF00000100007F:2808", "[::ffff:127.0.0.1]:10248", "IPv4 on an IPv6 socket"},
		{"0100007F", "", "no port"},
		{"xx:1", "", "not hexadecimal"},
		{"01:1", "", "no whole word"},
	} {
		got, err := parseSocket(c.in)
		if (err == nil) != (c.want != "") || err == nil && got.String() != c.want {
			t.Errorf("%s: %v, %v; want %q: %s", c.in, got, err, c.want, c.why)
		}
	}
}

func TestServes(t *testing.T) {
	for _, c := range []struct {
		local string
		want  bool
	}{
		{"127.0.0.1:10248", true},
		{"0.0.0.0:10248", true},
		{"[::]:10248", true},
		{"[::ffff:127.0.0.1]:10248", true},
		{"127.0.0.1:10249", false},
		{"10.0.0.1:10248", false},
		{"[::1]:10248", false},
	} {
		if got := serves(netip.MustParseAddrPort(c.local), health); got != c.want {
			t.Errorf("a socket on %s takes connections to %s: %v; want %v", c.local, health, got, c.want)
		}
	}
}

// TestOwner finds the test's own listening socket in the real /proc.
func TestOwner(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	host, err := file.OpenRoot("/")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	address := netip.MustParseAddrPort(l.Addr().String())
	inodes, err := listeners(host, "tcp", address)
	if err != nil || len(inodes) != 1 {
		t.Fatalf("listeners on %s: %v, %v; want one", address, inodes, err)
	}
	if !holds(host, uint32(os.Getpid()), inodes) {
		t.Error("the socket is not found among this process's descriptors")
	}
	if holds(host, uint32(os.Getpid()), []string{"1"}) {
		t.Error("a socket of somebody else is found among this process's descriptors")
	}
}

func TestAskHealth(t *testing.T) {
	for _, c := range []struct {
		handler http.HandlerFunc
		want    string
		why     string
	}{
		{func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("ok")) }, "", "healthy"},
		{func(w http.ResponseWriter, r *http.Request) {
			http.Error(w, "[-]syncloop failed", http.StatusInternalServerError)
		}, "500 Internal Server Error: [-]syncloop failed", "not healthy"},
		{func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }, "302 Found", "no redirect is followed"},
	} {
		server := httptest.NewServer(c.handler)
		err := askHealth(t.Context(), netip.MustParseAddrPort(server.Listener.Addr().String()))
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v; want %q: %s", err, c.want, c.why)
		}
		server.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := askHealth(ctx, health); err == nil {
		t.Error("no error although the time is over")
	}
}
