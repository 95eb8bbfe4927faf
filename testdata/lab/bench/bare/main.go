// bare starts a machine as systemd alone does, and containerd and kubelet in it: the floor of a node's start. It waits for nothing
// but that the machine's message bus answers, and the two services' jobs.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"time"

	"berth/generator/file"
	"berth/helpers/machine"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: bare MACHINE")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := start(ctx, os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func start(ctx context.Context, name string) error {
	if out, err := exec.CommandContext(ctx, "systemctl", "start", machine.NSpawnUnit(name)).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	host, err := file.OpenRoot("/")
	if err != nil {
		return err
	}
	m, err := machine.Find(ctx, host, nil, name)
	if err != nil {
		return err
	}
	root, err := m.Root()
	if err != nil {
		return err
	}
	inner, err := machine.Inside(ctx, root)
	for ; err != nil; inner, err = machine.Inside(ctx, root) {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
	for _, service := range []string{"containerd.service", "kubelet.service"} {
		if err := inner.Start(ctx, service); err != nil {
			return err
		}
	}
	return nil
}
