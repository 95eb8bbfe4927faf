package machine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/helpers/step"
)

// Watch gives events about files: inotify(7).
type Watch struct {
	file   *os.File
	fd     int
	events chan struct{}
}

// NewWatch returns a watch that watches nothing yet.
func NewWatch() (*Watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify_init1: %w", err)
	}
	w := &Watch{os.NewFile(uintptr(fd), "inotify"), fd, make(chan struct{}, 1)}
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := w.file.Read(buf); err != nil {
				return
			}
			step.Wake(w.events)
		}
	}()
	return w, nil
}

// Add makes each event of mask on path or, where it is a folder, in it, an event of the watch. Adding a path again is
// harmless.
func (w *Watch) Add(path string, mask uint32) error {
	if _, err := unix.InotifyAddWatch(w.fd, path, mask); err != nil {
		return &os.PathError{Op: "inotify_add_watch", Path: path, Err: err}
	}
	return nil
}

// Events gives an event after one or more of the watched things happened.
func (w *Watch) Events() <-chan struct{} { return w.events }

// Close ends the watch.
func (w *Watch) Close() error { return w.file.Close() }
