//go:build !amd64

package faults

import (
	"errors"
	"syscall"
)

// Only the architecture of the lab has it.
func takeAway(int) error { return errors.ErrUnsupported }

func answer(int, syscall.Errno) error { return errors.ErrUnsupported }
