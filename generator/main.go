// berth-generator turns the goal state into the units of the host's slots, at boot and at every daemon-reload.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/generator/goalstate/store"
	"berth/generator/kernlog"
	"berth/generator/plan"
)

const usage = `Usage: berth-generator NORMAL-DIR EARLY-DIR LATE-DIR

A systemd generator (systemd.generator(7)): reads the goal state (/etc/berth/goal.toml, else /run/berth/goal.toml, else
/usr/lib/berth/goal.toml, and goal.toml.d/*.toml of all three) and writes the units of its slots into NORMAL-DIR.
BERTH_ROOT in the environment is the directory that stands for /.

Exit codes: 0 done, 1 failed, 2 usage, 3 goal state invalid
`

// bound is what the generator allows itself. PID 1 does nothing else meanwhile, and would wait for 90 s.
const bound = 10 * time.Second

// memory is what the generator uses before it collects garbage: more than a thousand slots take.
const memory = 256 << 20

func main() {
	if len(os.Args) != 4 {
		fmt.Fprint(os.Stderr, usage)
		if len(os.Args) == 2 && os.Args[1] == "--help" {
			os.Exit(0)
		}
		os.Exit(2)
	}
	// Slots belong to the system, and to the host proper: not to a user's systemd, not to the initrd.
	if os.Getenv("SYSTEMD_SCOPE") == "user" || os.Getenv("SYSTEMD_IN_INITRD") == "1" {
		return
	}
	file.SetUmask()
	// There is nothing to do at once, and threads that look for work cost more than it. What is allocated is needed to the end.
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(memory)
	root, err := file.OpenRoot(cmp.Or(os.Getenv("BERTH_ROOT"), "/"))
	log := kernlog.New(root, "berth-generator", os.Stderr)
	time.AfterFunc(bound, func() {
		log.Error(fmt.Errorf("gave up after %v", bound))
		os.Exit(1)
	})
	if err == nil {
		err = generate(root, os.Args[1])
	}
	if err != nil {
		log.Error(err)
		if errors.As(err, new(goalstate.Errors)) {
			os.Exit(3)
		}
		os.Exit(1)
	}
}

// generate writes the units of the host into the folder dir. An error does not keep what can be written from being written:
// a slot that runs needs its units also when the goal state is broken.
func generate(root *file.Root, dir string) error {
	files, err := units(root)
	if len(files) == 0 {
		return err
	}
	out, openErr := file.OpenRoot(dir)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	return errors.Join(err, out.Fill(files))
}

// units returns the units of the host, and what is wrong with the goal state, which may be both. What follows from that for the slots
// is said first: of many mistakes the kernel's log does not take all.
func units(root *file.Root) ([]file.File, error) {
	state, broken := store.Load(root)
	if errors.Is(broken, goalstate.ErrNone) {
		broken = nil
	}
	var notice error
	if n := state.Notice(); n != "" {
		notice = errors.New(n)
	}
	goal := state.Goal
	if state.Unseen {
		// Which slot starts at boot is for the next look to say.
		again := *goal
		again.Boot, goal = "", &again
	}
	held, heldErr := plan.Held(root)
	files, err := plan.Host(root, goal, held)
	if state.Unseen {
		files = append(files, plan.LookAgain())
		file.Sort(files)
	}
	return files, errors.Join(notice, state.Refusals(), broken, heldErr, err)
}
