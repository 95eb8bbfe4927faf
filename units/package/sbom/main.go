// sbom prints what programs are made of, as a CycloneDX document (https://cyclonedx.org/docs/1.5/json/): what the go command has recorded
// in them, so that it is true for these very files, and the same for the same files.
//
//	sbom VERSION PROGRAM...
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
)

type document struct {
	Format       string       `json:"bomFormat"`
	Spec         string       `json:"specVersion"`
	Version      int          `json:"version"`
	Metadata     metadata     `json:"metadata"`
	Components   []component  `json:"components"`
	Dependencies []dependency `json:"dependencies"`
}

type metadata struct {
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version,omitempty"`
	PURL       string     `json:"purl,omitempty"` // https://github.com/package-url/purl-spec
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type dependency struct {
	Ref string   `json:"ref"`
	On  []string `json:"dependsOn"`
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: sbom VERSION PROGRAM...")
		os.Exit(2)
	}
	bom, err := inventory(os.Args[1], os.Args[2:])
	if err == nil {
		encoder := json.NewEncoder(os.Stdout)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(bom)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

// inventory lists the programs, each with its hash, the modules that they are linked of, and which program needs which of them.
func inventory(version string, programs []string) (*document, error) {
	bom := &document{Format: "CycloneDX", Spec: "1.5", Version: 1,
		// "berth" is also the name of one of the programs.
		Metadata: metadata{component{Type: "application", Ref: "package", Name: "berth", Version: version}}}
	modules := map[string]component{}
	var names []string
	for _, path := range programs {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return nil, err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		name, sum := filepath.Base(path), sha256.Sum256(content)
		names = append(names, name)
		bom.Components = append(bom.Components, component{Type: "application", Ref: name, Name: name, Version: version,
			Hashes: []hash{{"SHA-256", hex.EncodeToString(sum[:])}}, Properties: settings(info)})
		needs := dependency{Ref: name}
		std := &debug.Module{Path: "std", Version: strings.TrimPrefix(info.GoVersion, "go")}
		for _, m := range append([]*debug.Module{std}, info.Deps...) {
			c := library(m)
			modules[c.Ref] = c
			needs.On = append(needs.On, c.Ref)
		}
		bom.Dependencies = append(bom.Dependencies, needs)
	}
	bom.Dependencies = append(bom.Dependencies, dependency{Ref: bom.Metadata.Component.Ref, On: names})
	for _, ref := range slices.Sorted(maps.Keys(modules)) {
		bom.Components = append(bom.Components, modules[ref])
		bom.Dependencies = append(bom.Dependencies, dependency{Ref: ref, On: []string{}}) // the go command records no more
	}
	return bom, nil
}

// library is a module as it was linked.
func library(m *debug.Module) component {
	if m.Replace != nil {
		m = m.Replace
	}
	purl := "pkg:golang/" + m.Path + "@" + m.Version
	c := component{Type: "library", Ref: purl, Name: m.Path, Version: m.Version, PURL: purl}
	if m.Sum != "" { // of go.sum; none with a vendor folder
		c.Properties = []property{{"go:sum", m.Sum}}
	}
	return c
}

// settings are how a program was built, but for what depends on the folders of an installation.
func settings(info *buildinfo.BuildInfo) []property {
	list := []property{{"go:version", info.GoVersion}}
	for _, s := range info.Settings {
		if s.Key == "GOOS" || s.Key == "GOARCH" || s.Key == "CGO_ENABLED" || s.Key == "-trimpath" {
			list = append(list, property{"go:" + s.Key, s.Value})
		}
	}
	return list
}
