package plan

import (
	"errors"
	"io/fs"

	"berth/generator/file"
	"berth/generator/goalstate"
)

// ClaimsDir holds a file for each slot that holds a claim on the host, below the root directory. peer-guard writes them.
const ClaimsDir = "run/berth/claims"

// Held returns the slots that hold a claim on the host, sorted.
func Held(root *file.Root) ([]string, error) {
	entries, err := root.ReadDir(ClaimsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var held []string
	for _, e := range entries {
		if goalstate.ValidSlotName(e.Name()) {
			held = append(held, e.Name())
		}
	}
	return held, nil
}
