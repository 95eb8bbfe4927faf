// Package bench is what the benchmarks of package node and their stopwatch, which runs in the lab host, have in common.
package bench

import (
	"slices"
	"time"
)

// Plan is what the stopwatch is to do: the commands one after the other, and that again and again. What is compared takes turns, so
// that the noise of the machine hits all alike.
type Plan struct {
	Rounds   int
	Commands []Command
}

// Command is one command that must succeed.
type Command struct {
	Name   string // of its results; empty: it is not measured
	Args   []string
	Env    []string // beyond that of the host's manager
	Output bool     // is to be kept
	Memory bool     // is measured, and not the time: to look makes it slow
}

// Result is one run of a command.
type Result struct {
	Took   time.Duration
	Memory int64 // the most that it had resident, in bytes
	Output string
}

// Results are all runs, in their order, by the command's name.
type Results map[string][]Result

// Took returns the median of how long a command took.
func (r Results) Took(name string) time.Duration {
	var took []time.Duration
	for _, run := range r[name] {
		took = append(took, run.Took)
	}
	return Median(took)
}

// Memory returns the most memory that a run of a command had.
func (r Results) Memory(name string) (most int64) {
	for _, run := range r[name] {
		most = max(most, run.Memory)
	}
	return most
}

// More returns the median of how much longer than another, in the same round, a command took.
func (r Results) More(name, than string) time.Duration {
	var more []time.Duration
	for i, run := range r[name] {
		more = append(more, run.Took-r[than][i].Took)
	}
	return Median(more)
}

// Median returns the median of d, the mean of the two in the middle where there are two; 0 where d is empty.
func Median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return (d[(len(d)-1)/2] + d[len(d)/2]) / 2
}
