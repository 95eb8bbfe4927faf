package hostcheck

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"berth/generator/goalstate"
)

// Report is all that was found. Its JSON is for programs; names stay as they are.
type Report struct {
	Findings []Finding `json:"findings"`
	Errors   int       `json:"errors"`   // findings of severity error
	Warnings int       `json:"warnings"` // findings of severity warning
	// Skipped are the checks that were left out, as they need a running host.
	Skipped []string `json:"skipped"`
	// Goal is nil where there is no valid goal state.
	Goal *Goal `json:"goal"`
}

// Goal is which goal state was checked.
type Goal struct {
	Files []string `json:"files"` // in the order in which they were merged
	Slots []string `json:"slots"` // sorted
	Boot  string   `json:"boot"`  // the slot that starts at boot; empty: none
}

// NewReport makes a report of findings, and of what reading the goal state returned.
func NewReport(goal *goalstate.GoalState, err error, findings []Finding, skipped []string) Report {
	r := Report{Findings: append(goalFindings(err), findings...), Skipped: append([]string{}, skipped...)}
	if err == nil {
		r.Goal = &Goal{goal.Sources, goal.SlotNames(), goal.Boot}
	}
	for _, f := range r.Findings {
		switch f.Severity {
		case Error:
			r.Errors++
		case Warning:
			r.Warnings++
		}
	}
	return r
}

// goalFindings are the mistakes of a goal state.
func goalFindings(err error) []Finding {
	findings := []Finding{}
	var mistakes goalstate.Errors
	switch {
	case errors.As(err, &mistakes):
		for _, e := range mistakes {
			place := goalstate.Error{File: e.File, Line: e.Line, Column: e.Column}
			what := goalstate.Error{File: e.Key, Problem: e.Problem}
			findings = append(findings, Finding{GoalInvalid, Error, place.Error(), strings.TrimPrefix(what.Error(), ": "), e.Cure})
		}
	case err != nil:
		problem, cure, _ := strings.Cut(err.Error(), ": ")
		findings = append(findings, Finding{GoalMissing, Error, "goal state", problem, cure})
	}
	return findings
}

// String is one line: the subject, what is wrong, and what would be right.
func (f Finding) String() string {
	parts := []string{f.Subject}
	for _, part := range []string{f.Problem, f.Cure} {
		if part != "" {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, ": ")
}

// Style says how a report is written.
type Style struct {
	Quiet   bool // nothing but what is wrong
	Verbose bool // also what is not
	Host    bool // the findings are about a host: they are counted
	// Paint colours a severity; nil: it is written as it is.
	Paint func(Severity, string) string
}

// Write writes a report for people. A mistake of the goal state is a line that begins with its place, as compilers write it, any
// other finding one that begins with its severity and id.
func (r Report) Write(w io.Writer, s Style) error {
	var b strings.Builder
	if g := r.Goal; g != nil && !s.Quiet {
		boot := "no slot starts at boot"
		if g.Boot != "" {
			boot = "boot slot " + g.Boot
		}
		fmt.Fprintf(&b, "%s: valid: %s %s; %s\n", strings.Join(g.Files, ", "), noun(len(g.Slots)), strings.Join(g.Slots, ", "), boot)
	}
	fine := 0
	for _, f := range r.Findings {
		if f.Severity == OK {
			fine++
			if !s.Verbose || s.Quiet {
				continue
			}
		}
		if f.ID == GoalInvalid || f.ID == GoalMissing {
			fmt.Fprintln(&b, strings.TrimPrefix(f.String(), "goal state: "))
			continue
		}
		severity := fmt.Sprintf("%-7s", f.Severity)
		if s.Paint != nil {
			severity = s.Paint(f.Severity, severity)
		}
		fmt.Fprintf(&b, "%s %s: %s\n", severity, f.ID, f)
	}
	if s.Host && !s.Quiet {
		if len(r.Skipped) > 0 {
			fmt.Fprintf(&b, "left out, as no systemd runs there: %s\n", strings.Join(r.Skipped, ", "))
		}
		fmt.Fprintf(&b, "%s, %s, %d ok\n", count(r.Errors, "error"), count(r.Warnings, "warning"), fine)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}

func noun(slots int) string {
	if slots == 1 {
		return "slot"
	}
	return "slots"
}
