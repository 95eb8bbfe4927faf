package goalstate

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
)

// Secret is a place in a goal state's file where a secret itself stands, and not the path of a file that holds it.
type Secret struct {
	File         string // as in Source
	Line, Column int    // begin at 1; Column counts bytes
	Key          string // full key
}

// Secrets returns the secrets in files, by file, line and column. What a file with a mistake holds is only
// found as far as it can be read.
func Secrets(files []Source) []Secret {
	var found []Secret
	for _, f := range files {
		n, _, _ := parseFile(&source{path: f.Path, data: bytes.TrimPrefix(f.Data, bom)})
		n.secrets(nil, "", func(n *node, key string) {
			line, column := n.src.position(n.key)
			found = append(found, Secret{f.Path, line, column, key})
		})
	}
	slices.SortStableFunc(found, func(a, b Secret) int {
		if a.File != b.File {
			return 0 // the files stay in their order
		}
		return (a.Line-b.Line)<<20 + a.Column - b.Column
	})
	return found
}

// secrets calls report for each secret at and below n, whose full key is key, of the parts in path.
func (n *node) secrets(path []string, key string, report func(n *node, key string)) {
	for _, k := range n.keys() {
		n.table[k].secrets(append(path, k), joinKey(key, k), report)
	}
	for i, e := range n.array {
		e.secrets(path, key+"["+strconv.Itoa(i)+"]", report)
	}
	if s, _ := n.scalar.(string); s != "" && isSecret(path, s) {
		report(n, key)
	}
}

// isSecret tells whether a string at a key is a secret.
func isSecret(path []string, value string) bool {
	if len(path) > 2 && path[0] == "slot" {
		path = path[2:]
	}
	has := func(keys ...string) bool {
		return slices.ContainsFunc(keys, func(k string) bool { return slices.Contains(path, k) })
	}
	switch name := strings.ToLower(path[len(path)-1]); {
	case path[0] == "kubelet" && has("exec", "env"):
		// Most of what a credential plugin needs is no secret, such as the name of a profile, or the path of a file that holds one.
		return !strings.HasPrefix(value, "/") && slices.ContainsFunc([]string{"token", "secret", "passw", "key"}, func(word string) bool {
			return strings.Contains(name, word)
		})
	case path[0] == "kubelet":
		return name == "bootstrap_token" || has("staticPodURLHeader")
	case path[0] == "containerd":
		return has("header", "auth", "auths", "password", "identitytoken")
	}
	return false
}
