package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"berth/testdata/lab"
	"berth/testdata/lab/node"
)

// demo shows a node start: a host, berth on it, slot a started, what that took and made, slot b refused, slot a stopped.
func demo(ctx context.Context, w io.Writer, suite string, keep bool) (err error) {
	name, err := freeName(ctx, "demo")
	if err != nil {
		return err
	}
	h, err := lab.Start(ctx, lab.Options{Suite: suite, Name: name, Log: progress})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil || !keep {
			err = errors.Join(err, h.Stop())
		}
	}()
	d := demonstration{h, w}
	if err := d.install(ctx); err != nil {
		return err
	}
	if err := d.start(ctx); err != nil {
		return err
	}
	if err := d.rendered(ctx); err != nil {
		return err
	}
	d.title("A peer is refused as long as slot a runs")
	switch exit, err := d.command(ctx, "systemctl", "start", "node@b"); {
	case err != nil:
		return err
	case exit == 0:
		return errors.New("slot b started beside slot a")
	}
	if _, err := d.command(ctx, "systemctl", "show", "--property=ActiveState,StatusText", "node@b"); err != nil {
		return err
	}
	if keep {
		d.title("The host runs on, with slot a ready")
		const lab = "go run ./testdata/lab/cmd/lab"
		fmt.Fprintf(w, "A shell in it:       %s in %[2]s\nOne command in it:   %[1]s in %[2]s systemctl status node@a\n"+
			"Throw it away:       %[1]s down %[2]s\n", lab, name)
		return h.Detach()
	}
	d.title("Stop")
	switch exit, err := d.command(ctx, "systemctl", "stop", "node@a"); {
	case err != nil:
		return err
	case exit != 0:
		return errors.New("slot a did not stop")
	}
	if _, err := d.command(ctx, "machinectl", "list"); err != nil {
		return err
	}
	d.title("The host is thrown away now")
	fmt.Fprintln(w, "To keep it and look around by hand:  go run ./testdata/lab/cmd/lab demo --keep")
	return nil
}

// startTime is far beyond what a start takes in the lab, and short of what systemd would wait.
const startTime = 2 * time.Minute

// demonstration is a host and where to tell of it.
type demonstration struct {
	*lab.Host
	w io.Writer
}

func (d *demonstration) title(text string) { fmt.Fprintf(d.w, "\n== %s\n", text) }

// command runs a command in the host as one would see it in a shell there, and returns its exit status.
func (d *demonstration) command(ctx context.Context, name string, args ...string) (exit int, err error) {
	fmt.Fprintf(d.w, "%s# %s\n", d.Name(), strings.Join(append([]string{name}, args...), " "))
	begin := time.Now()
	stdout, stderr, exit, err := d.Run(ctx, name, args...)
	fmt.Fprint(d.w, stdout, stderr)
	if err == nil && exit != 0 {
		fmt.Fprintf(d.w, "(exit status %d after %.2f s)\n", exit, time.Since(begin).Seconds())
	}
	return exit, err
}

func (d *demonstration) install(ctx context.Context) error {
	d.title("A host without berth gets berth (install.sh install), a goal state, and a kubelet in its machines")
	if err := node.Prepare(d.Root(), node.Goal); err != nil {
		return err
	}
	for _, command := range [][]string{
		{"systemctl", "--version"},
		{"cat", "/etc/berth/goal.toml"},
		{"systemd-tmpfiles", "--create", "berth.conf"},
		{"systemctl", "daemon-reload"},
	} {
		if exit, err := d.command(ctx, command[0], command[1:]...); err != nil || exit != 0 {
			return cmp.Or(err, fmt.Errorf("exit status %d", exit))
		}
	}
	return nil
}

func (d *demonstration) start(ctx context.Context) error {
	d.title("Start slot a")
	begin := time.Now()
	bounded, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	exit, failure := d.command(bounded, "systemctl", "start", "node@a")
	fmt.Fprintf(d.w, "(%.2f s)\n\n", time.Since(begin).Seconds())
	if _, err := d.command(ctx, "systemctl", "status", "--no-pager", "--full", "--lines=30", "node@a"); err != nil {
		return err
	}
	if failure != nil || exit != 0 {
		return errors.Join(errors.New("slot a did not start"), failure)
	}
	d.title("The steps")
	return d.steps(ctx)
}

// steps prints the units of slot a in the order in which they began.
func (d *demonstration) steps(ctx context.Context) error {
	spans, err := node.Spans(ctx, d.Host)
	if err != nil {
		return err
	}
	fmt.Fprint(d.w, node.Timeline(spans))
	fmt.Fprintln(d.w, "\nWhat they said last:")
	table := tabwriter.NewWriter(d.w, 0, 0, 2, ' ', 0)
	for _, s := range spans {
		if s.Status != "" {
			fmt.Fprintf(table, "%s\t%s\n", s.Unit, s.Status)
		}
	}
	return table.Flush()
}

func (d *demonstration) rendered(ctx context.Context) error {
	d.title("What the generator made at the daemon-reload")
	if _, err := d.command(ctx, "find", "/run/systemd/generator", "-path", "*node*", "-not", "-type", "d"); err != nil {
		return err
	}
	d.title("What the render steps wrote: on the host, and below /var/lib/machines/node-a")
	out, _, _, err := d.Run(ctx, "journalctl", "--boot", "--output=cat", "BERTH_SLOT=a")
	if err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		if path, ok := strings.CutPrefix(line, "wrote "); ok {
			fmt.Fprint(d.w, path)
		}
	}
	for _, path := range []string{
		"/run/systemd/nspawn/node-a.nspawn",
		"/var/lib/machines/node-a/etc/containerd/config.toml",
		"/var/lib/machines/node-a/var/lib/kubelet/config.yaml",
	} {
		content, err := os.ReadFile(filepath.Join(d.Root(), path))
		if err != nil {
			return err
		}
		d.title(path)
		d.w.Write(content)
	}
	return nil
}
