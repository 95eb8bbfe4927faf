package machine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/helpers/step"
)

// Watch gives an event each time that something of mask (inotify(7)) happens to path or, where it is a folder, in it. The
// watch ends with stop.
func Watch(path string, mask uint32) (events <-chan struct{}, stop func(), err error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, nil, fmt.Errorf("inotify_init1: %w", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, path, mask); err != nil {
		f.Close()
		return nil, nil, &os.PathError{Op: "inotify_add_watch", Path: path, Err: err}
	}
	out := make(chan struct{}, 1)
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			step.Wake(out)
		}
	}()
	return out, func() { f.Close() }, nil
}
