package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"

	"berth/generator/bake"
	"berth/generator/file"
)

func bakeCommand() *cli.Command {
	return &cli.Command{
		Name:  "bake",
		Usage: "write a host's units into an image",
		UsageText: "berth bake --root DIRECTORY [--goal FILE]...\n" +
			"           [--with-programs | --generated-only] [--json]",
		Description: `Writes berth's units, static and generated, into the root file system of a
host image that is being built. The generated units are those that
berth-generator would make when the host boots, byte for byte, and go below
usr/lib/systemd/system: on a host without the generator they are what starts
the node; on a host with the generator, what that makes hides them.

The goal state is the image's own (etc/berth/goal.toml, else
usr/lib/berth/goal.toml, and drop-ins), or what --goal names: the first FILE
is copied to usr/lib/berth/goal.toml, each further one under its own name
into usr/lib/berth/goal.toml.d. The image must have berth's programs
(usr/lib/berth), for instance from its package, unless --with-programs copies
them from where this program is. --generated-only is for an extension image
(systemd-sysext) of a host that has berth.

What is right already is left alone, and units of slots that are not in the
goal state any more are removed: a second run changes nothing. Nothing is
written if the goal state is invalid or something is missing. Links are
followed inside DIRECTORY only. It needs no systemd, and no privileges but to
write there. Times are no later than SOURCE_DATE_EPOCH, if that is set.

Examples:
   berth bake --root /tmp/image
   berth bake --root /tmp/image --goal goal.toml --goal 50-gpu.toml
   berth bake --root /tmp/image --goal goal.toml --with-programs
   berth bake --root /tmp/extension --goal goal.toml --generated-only

--json prints one object: goal (files), boot, slots, wrote, removed (paths in
the image), right (number of files that were right already), warnings.

Exit codes: 0 done, 1 failed, 2 usage, 3 goal state invalid or not there,
5 refused (a secret would be readable by everybody, or a --goal file would be
without effect)`,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "root", Usage: "the `DIRECTORY` that is / of the image"},
			&cli.StringSliceFlag{Name: "goal", Usage: "copy `FILE` into the image"},
			&cli.BoolFlag{Name: "with-programs", Usage: "copy berth's programs, too"},
			&cli.BoolFlag{Name: "generated-only", Usage: "write the generated units alone"},
			&cli.BoolFlag{Name: "json", Usage: "print what was done as JSON"},
		},
		Action: runBake,
	}
}

func runBake(c *cli.Context) error {
	if c.Args().Present() {
		return usagef("%s: want no arguments: see berth bake --help", c.Args().First())
	}
	if c.Bool("with-programs") && c.Bool("generated-only") {
		return usagef("--with-programs and --generated-only: want one of them")
	}
	// The host's own root directory is not taken unless it is named.
	dir := ""
	for _, level := range c.Lineage() { // "berth --root DIRECTORY bake" means the same
		if level.IsSet("root") {
			dir = level.String("root")
			break
		}
	}
	if dir == "" {
		return usagef("want --root DIRECTORY, the / of the image")
	}
	options := bake.Options{Goal: c.StringSlice("goal"), GeneratedOnly: c.Bool("generated-only")}
	var err error
	if options.Epoch, err = sourceDateEpoch(os.Getenv("SOURCE_DATE_EPOCH")); err != nil {
		return err
	}
	if c.Bool("with-programs") {
		exe, err := os.Executable()
		if err == nil {
			exe, err = filepath.EvalSymlinks(exe)
		}
		if err == nil {
			options.Programs, err = bake.Programs(exe)
		}
		if err != nil {
			return err
		}
	}
	file.SetUmask()
	image, err := openRoot(dir)
	if err != nil {
		return err
	}
	defer image.Close()
	result, err := bake.Bake(image, options)
	if err != nil {
		return err
	}
	for _, warning := range result.Warnings {
		fmt.Fprintf(c.App.ErrWriter, "berth: warning: %s\n", warning)
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, result)
	}
	for _, name := range result.Removed {
		fmt.Fprintf(c.App.Writer, "removed %s\n", name)
	}
	for _, name := range result.Wrote {
		fmt.Fprintf(c.App.Writer, "wrote %s\n", name)
	}
	_, err = fmt.Fprintf(c.App.Writer, "%d removed, %d written, %d right already\n", len(result.Removed), len(result.Wrote), result.Right)
	return err
}

// sourceDateEpoch reads the value of SOURCE_DATE_EPOCH: seconds since 1970 (reproducible-builds.org/specs/source-date-epoch).
func sourceDateEpoch(value string) (time.Time, error) {
	if value == "" {
		return time.Time{}, nil
	}
	seconds, err := strconv.ParseInt(value, 10, 64)
	if err != nil || seconds < 0 {
		return time.Time{}, usagef("SOURCE_DATE_EPOCH=%q: want seconds since 1970", value)
	}
	return time.Unix(seconds, 0), nil
}
