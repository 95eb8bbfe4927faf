// onefile writes one small file into a folder: what any generator in Go costs, before it has done anything of its own.
package main

import (
	"log"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: onefile DIR")
	}
	if err := os.WriteFile(filepath.Join(os.Args[1], "onefile.service"), []byte("[Service]\nExecStart=true\n"), 0o644); err != nil {
		log.Fatal(err)
	}
}
