package ready

import (
	"encoding/hex"
	"slices"
	"strings"
	"testing"
)

// FuzzSocket writes what it has read again, as the kernel does.
func FuzzSocket(f *testing.F) {
	for _, s := range []string{"0100007F:2808", "00000000000000000000000001000000:2808", "0000000000000000FFFF00000100007F:0001", ":", "0100007F:+1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		socket, err := parseSocket(s)
		if err != nil {
			return
		}
		raw := socket.Addr().AsSlice()
		for word := range slices.Chunk(raw, 4) {
			slices.Reverse(word)
		}
		port := hex.EncodeToString([]byte{byte(socket.Port() >> 8), byte(socket.Port())})
		host, digits, _ := strings.Cut(s, ":")
		if !strings.EqualFold(host, hex.EncodeToString(raw)) || strings.TrimLeft(strings.ToLower(digits), "0") != strings.TrimLeft(port, "0") {
			t.Errorf("%q became %v", s, socket)
		}
	})
}
