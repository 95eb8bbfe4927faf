// stopwatch runs commands in turn, many times over, and tells how long each took. Package bench's Plan comes on standard input,
// its Results go to standard output. It runs in the lab host, so that the way into the host is not measured.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/testdata/lab/bench"
)

func main() {
	log.SetFlags(0)
	var plan bench.Plan
	if err := json.NewDecoder(os.Stdin).Decode(&plan); err != nil {
		log.Fatal(err)
	}
	results := bench.Results{}
	for range plan.Rounds {
		for _, c := range plan.Commands {
			if err := measure(c, results); err != nil {
				log.Fatal(fmt.Errorf("%q: %w", c.Args, err))
			}
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
		log.Fatal(err)
	}
}

func measure(c bench.Command, results bench.Results) error {
	runOnce := run
	if c.Memory {
		runOnce = runTraced
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if !c.Memory && c.Name != "" && !c.Output {
		// As systemd runs it: no pipe that somebody has to read.
		null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer null.Close()
		cmd.Stdout = null
	}
	result, err := runOnce(cmd)
	if err != nil {
		return fmt.Errorf("%w\n%s%s", err, stdout.String(), stderr.String())
	}
	result.Output = strings.TrimSpace(stdout.String())
	if c.Name != "" {
		results[c.Name] = append(results[c.Name], result)
	}
	return nil
}

func run(cmd *exec.Cmd) (bench.Result, error) {
	begin := time.Now()
	err := cmd.Run()
	return bench.Result{Took: time.Since(begin)}, err
}

// runTraced tells how much memory a command had at the most: VmHWM of proc_pid_status(5), at the moment when it exits. What
// wait4(2) tells would be no less than what this process has, from which the command is forked.
func runTraced(cmd *exec.Cmd) (bench.Result, error) {
	runtime.LockOSThread() // ptrace(2) is about threads
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &unix.SysProcAttr{Ptrace: true}
	if err := cmd.Start(); err != nil {
		return bench.Result{}, err
	}
	pid := cmd.Process.Pid
	var result bench.Result
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, 0, nil); err != nil { // its execve(2)
		return result, err
	}
	if err := unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACEEXIT); err != nil {
		return result, err
	}
	for signal := 0; ; {
		if err := unix.PtraceCont(pid, signal); err != nil {
			return result, err
		}
		if _, err := unix.Wait4(pid, &status, 0, nil); err != nil {
			return result, err
		}
		signal = 0
		switch {
		case status.Exited() && status.ExitStatus() == 0:
			_ = cmd.Wait() // it has been waited for already: only ends the copying of its output
			return result, nil
		case status.Exited(), status.Signaled():
			_ = cmd.Wait()
			return result, fmt.Errorf("ended with status %#x", int(status))
		case status.TrapCause() == unix.PTRACE_EVENT_EXIT:
			var err error
			if result.Memory, err = peak(pid); err != nil {
				return result, err
			}
		case status.Stopped():
			signal = int(status.StopSignal())
		}
	}
}

// peak is the most memory, in bytes, that a process had resident.
func peak(pid int) (int64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("no VmHWM in its status")
}
