package machine

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/generator/file"
)

// silent makes a host whose systemd and message bus take every connection and never say a word, as where a process is stopped.
func silent(t *testing.T) *file.Root {
	t.Helper()
	host := tree(t, map[string]string{"run/systemd/system/x": "", "run/dbus/x": ""})
	for _, name := range []string{privateSocket, busSocket} {
		// The kernel takes connections that nobody accepts.
		l, err := net.Listen("unix", filepath.Join(host.Name(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	return host
}

// Whoever is asked and does not answer costs no more than the budget, and is named.
func TestSilent(t *testing.T) {
	host := silent(t)
	for _, tt := range []struct {
		name, socket string
		ask          func(context.Context) error
	}{
		{"Host", privateSocket, func(ctx context.Context) error { _, err := Host(ctx, host); return err }},
		{"Look", busSocket, func(ctx context.Context) error { _, err := Look(ctx, host); return err }},
		{"Inside", busSocket, func(ctx context.Context) error { _, err := Inside(ctx, host); return err }},
		{"DialMachined", busSocket, func(ctx context.Context) error { _, err := DialMachined(ctx, host, true); return err }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- tt.ask(ctx) }()
			select {
			case err := <-done:
				if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no answer on /"+tt.socket) {
					t.Errorf("error %v", err)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("it hangs")
			}
		})
	}
}
