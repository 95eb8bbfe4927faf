package machine

import (
	"context"
	"fmt"
	"os/exec"
	"strings"

	"berth/generator/file"
)

// Inner is a running machine together with a connection to its systemd.
type Inner struct {
	*Machine
	*Manager
	// Root is the machine's root file system as its processes see it.
	Root *file.Root
}

// Enter finds a machine through systemd-machined and connects to its systemd. It returns ErrNoMachine where there is none.
func Enter(ctx context.Context, host *file.Root, name string) (*Inner, error) {
	machined, err := DialMachined(ctx, host)
	if err != nil {
		return nil, err
	}
	defer machined.Close()
	m, err := machined.Machine(ctx, name)
	if err != nil {
		return nil, err
	}
	root, err := m.Root()
	if err != nil {
		return nil, err
	}
	manager, err := Inside(ctx, root)
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("the message bus of machine %s: %w", name, err)
	}
	return &Inner{m, manager, root}, nil
}

// Close ends the connection; the machine goes on.
func (i *Inner) Close() {
	i.Manager.Close()
	_ = i.Root.Close()
}

// Explain says what systemd inside the machine knows about a service that is not as it should be, with its last log lines.
func (i *Inner) Explain(ctx context.Context, service string) string {
	s, err := i.Service(ctx, service)
	if err != nil {
		return err.Error()
	}
	text := fmt.Sprintf("%s is %s (%s)", service, s.Active, s.Sub)
	switch {
	case s.Load == "not-found":
		text = service + " does not exist in machine " + i.Name
	case s.Result == "exit-code":
		text += fmt.Sprintf(": exit status %d", s.ExecMainStatus)
	case s.Result != "success" && s.Result != "":
		text += ": " + s.Result
	}
	if s.StatusText != "" {
		text += ": " + s.StatusText
	}
	return text + Journal(ctx, i.Name, service)
}

// Journal returns the last log lines of a unit inside a machine, or on the host where machine is empty, each on a line of its
// own after a newline. It is for messages: where the journal cannot be read it says so. The host's own journalctl reads it;
// nothing of the machine runs.
func Journal(ctx context.Context, machine, unit string) string {
	args := []string{"--unit=" + unit, "--lines=8", "--output=cat", "--no-pager", "--quiet"}
	if machine != "" {
		args = append(args, "--machine="+machine)
	}
	out, err := exec.CommandContext(ctx, "journalctl", args...).Output()
	if err != nil {
		return fmt.Sprintf("\n(its journal cannot be read: %v)", err)
	}
	var b strings.Builder
	for line := range strings.Lines(string(out)) {
		b.WriteString("\n  " + strings.TrimRight(line, "\n"))
	}
	return b.String()
}
