package goalstate

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Parse makes a goal state of files in the order in which they are merged: the main file first. It needs no disk and
// returns what Load returns; ErrNone for no files.
func Parse(files []Source) (*GoalState, error) { return parse(files, nil) }

// parse is Parse for files of which some could not be read, as errs says.
func parse(files []Source, errs Errors) (*GoalState, error) {
	if len(files) == 0 && len(errs) == 0 {
		return nil, ErrNone
	}
	d := &decoder{errs: errs, whole: len(errs) == 0, goal: &GoalState{Slots: map[string]*Slot{}}}
	var root *node
	for _, f := range files {
		d.goal.Sources = append(d.goal.Sources, f.Path)
		n, errs, whole := parseFile(&source{path: f.Path, data: bytes.TrimPrefix(f.Data, bom)})
		d.errs = append(d.errs, errs...)
		d.whole = d.whole && whole
		if root == nil {
			root = n
		} else {
			d.errs = append(d.errs, merge(root, n, "")...)
		}
	}
	if root != nil {
		d.decode(root)
	}
	if len(d.errs) == 0 {
		return d.goal, nil
	}

	d.errs.sort()
	partial := &GoalState{Partial: true, Sources: d.goal.Sources, Boot: d.goal.Boot, Slots: map[string]*Slot{}}
	for name := range d.goal.Slots {
		partial.Slots[name] = &Slot{Name: name}
	}
	return partial, d.errs
}

// tables are the tables that may stand at the top of the goal state and below each slot.
var tables = map[string]func(*Slot) any{
	"cluster":    func(s *Slot) any { return &s.Cluster },
	"kubelet":    func(s *Slot) any { return &s.Kubelet },
	"containerd": func(s *Slot) any { return &s.Containerd },
	"nvidia":     func(s *Slot) any { return &s.NVIDIA },
	"machine":    func(s *Slot) any { return &s.Machine },
	"timeouts":   func(s *Slot) any { return &s.Timeouts },
}

// defaults is what stands below the shared tables.
func defaults() *Slot {
	return &Slot{
		Cluster: Cluster{Domain: "cluster.local"},
		Kubelet: Kubelet{Binary: "/usr/local/bin/kubelet"},
		Containerd: Containerd{
			Binary:       "/usr/local/bin/containerd",
			Runc:         "/usr/local/bin/runc",
			SandboxImage: "registry.k8s.io/pause:3.10",
		},
		NVIDIA:   NVIDIA{Mode: Auto, RuntimeClass: "nvidia"},
		Machine:  Machine{KVM: Auto, InfiniBand: Auto},
		Timeouts: Timeouts{Ready: 2 * time.Minute, AfterStart: 3 * time.Minute, Settle: 2 * time.Second, Poll: 250 * time.Millisecond},
	}
}

// required are the keys that each slot must have, its own or shared. Of those with a slash between, one is enough.
var required = []struct{ table, keys, cure string }{
	{"cluster", "server", `server = "https://HOST:6443"`},
	{"cluster", "certificate_authority/certificate_authority_data", `certificate_authority = "/etc/berth/ca.crt"`},
	{"kubelet", "bootstrap_token/bootstrap_token_file/bootstrap_token_credential/bootstrap_token_encrypted_credential/exec",
		`bootstrap_token_file = "/etc/berth/bootstrap-token"`},
}

// maxSuggestions is the number of errors after which no unknown key is compared with those that exist: a file with more
// is not a goal state, and a megabyte of such keys costs the generator more than a minute without this bound.
const maxSuggestions = 100

// maxSlots bounds the slots of a goal state: without a peers key each has all others as its peers.
const maxSlots = 1000

// decoder turns the merged tree into slots.
type decoder struct {
	errs   Errors
	whole  bool // all files were read to their end, so what is not there is missing
	goal   *GoalState
	fields map[reflect.Type]map[string]int
}

// bad reports the value of n.
func (d *decoder) bad(n *node, key, problem, cure string) {
	d.errs = append(d.errs, n.src.error(n.value, key, problem, cure))
}

func (d *decoder) decode(root *node) {
	base := defaults()
	for _, k := range root.keys() {
		switch n := root.table[k]; {
		case tables[k] != nil:
			d.table(n, base, k, k)
		case k != "boot" && k != "slot":
			d.unknown(n, "", "", k, append(slices.Sorted(maps.Keys(tables)), "boot", "slot"))
		}
	}

	slots := root.get("slot")
	if slots != nil && slots.table == nil {
		d.bad(slots, "slot", "is "+slots.kind(), "want a table a slot, such as [slot.a]")
		d.whole = false // so it is not "missing" as well
		slots = nil
	}
	if n := len(slots.keysOrNone()); n > maxSlots {
		// Each one names all others as its peers, if nobody says otherwise.
		d.bad(slots, "slot", fmt.Sprintf("has %d slots", n), fmt.Sprintf("want %d at most", maxSlots))
		d.whole = false
		slots = nil
	}
	for _, name := range slots.keysOrNone() {
		n, key := slots.table[name], joinKey("slot", name)
		if !ValidSlotName(name) {
			d.errs = append(d.errs, n.src.error(n.key, key, strconv.Quote(name)+" cannot be a slot's name",
				"want 1 to 16 of a-z and 0-9"))
		} else {
			s := *base
			s.Name = name
			d.goal.Slots[name] = &s
		}
	}
	names := slices.Sorted(maps.Keys(d.goal.Slots))
	for _, name := range names {
		d.slot(slots.table[name], d.goal.Slots[name], names)
	}
	if len(names) == 0 && slots.keysOrNone() == nil && d.whole {
		d.errs = append(d.errs, root.src.error(0, "slot", "there is no slot", "want a table for each slot, such as [slot.a]"))
	}
	if d.whole {
		for _, r := range required {
			d.require(root, r.table, strings.Split(r.keys, "/"), r.cure)
		}
	}
	if n := root.table["boot"]; n != nil {
		d.boot(n, names)
	}
}

func (n *node) keysOrNone() []string {
	if n == nil {
		return nil
	}
	return n.keys()
}

func (d *decoder) boot(n *node, names []string) {
	name, ok := d.str(n, "boot")
	switch {
	case !ok || name == "": // empty: a drop-in takes back what another file says
	case d.goal.Slots[name] != nil, ValidSlotName(name) && !d.whole:
		d.goal.Boot = name
	default:
		d.bad(n, "boot", strconv.Quote(name)+" is no slot", didYouMean(name, names, "want "+orList(names)))
	}
}

// table decodes one of the tables, over what s holds already.
func (d *decoder) table(n *node, s *Slot, name, key string) {
	group := alternatives[name]
	var chosen []string
	if n.table != nil {
		for _, k := range group {
			if n.table[k] != nil {
				chosen = append(chosen, k)
			}
		}
		slices.SortFunc(chosen, func(a, b string) int { return n.table[a].key - n.table[b].key })
	}
	for _, k := range chosen[min(1, len(chosen)):] {
		c := n.table[k]
		d.errs = append(d.errs, c.src.error(c.key, joinKey(key, k), "stands beside "+chosen[0], "want only one of "+strings.Join(group, ", ")))
	}
	if len(chosen) > 0 {
		// What a slot chooses takes the place of what is shared, as between files: see replaceAlternatives.
		switch name {
		case "cluster":
			s.Cluster.CertificateAuthority, s.Cluster.CertificateAuthorityData = "", ""
		case "kubelet":
			k := &s.Kubelet
			k.BootstrapToken, k.BootstrapTokenFile, k.BootstrapTokenCredential, k.BootstrapTokenEncryptedCredential = "", "", "", ""
			if n.table["exec"] == nil {
				k.Exec = nil
			}
		}
	}
	d.value(n, reflect.ValueOf(tables[name](s)).Elem(), key, name)
	if name == "containerd" && n.table != nil {
		d.registries(s)
	}
}

// registries fills in what a registry's host decides.
func (d *decoder) registries(s *Slot) {
	for host, r := range s.Containerd.Registry {
		if r.Server == "" && host != "_default" {
			r.Server = "https://" + host
			if host == "docker.io" {
				r.Server = "https://registry-1.docker.io" // where docker.io keeps its images, by containerd's own rule
			}
			s.Containerd.Registry[host] = r
		}
	}
}

func (d *decoder) slot(n *node, s *Slot, names []string) {
	key := joinKey("slot", s.Name)
	if n.table == nil {
		d.bad(n, key, "is "+n.kind(), "want a table")
		return
	}
	for _, k := range n.keys() {
		switch v, full := n.table[k], joinKey(key, k); {
		case tables[k] != nil:
			d.table(v, s, k, full)
		case k == "peers":
			d.peers(v, s, full, names)
		default:
			d.unknown(v, key, "", k, append(slices.Sorted(maps.Keys(tables)), "peers"))
		}
	}
	if !s.PeersSet {
		// Copied in two pieces: with a thousand slots there are a million peers.
		i, _ := slices.BinarySearch(names, s.Name)
		s.Peers = slices.Concat(names[:i], names[i+1:])
	}
}

func (d *decoder) peers(n *node, s *Slot, key string, names []string) {
	s.PeersSet = true
	s.Peers = []string{}
	others := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == s.Name })
	d.elements(n, key, "strings", func(e *node, key string) {
		name, ok := d.str(e, key)
		switch {
		case !ok:
		case name == s.Name:
			d.bad(e, key, "is the slot itself", "want other slots")
		case slices.Contains(s.Peers, name):
			d.bad(e, key, strconv.Quote(name)+" is there twice", "want each once")
		case !slices.Contains(others, name) && (d.whole || !ValidSlotName(name)):
			d.bad(e, key, strconv.Quote(name)+" is no slot", didYouMean(name, others, "want "+orList(others)))
		default:
			s.Peers = append(s.Peers, name)
		}
	})
	slices.Sort(s.Peers)
}

// require reports the slots that have none of the keys, all in one error: it is one mistake.
func (d *decoder) require(root *node, table string, keys []string, cure string) {
	if root.table[table] != nil && root.table[table].table == nil {
		return // already reported
	}
	has := func(n *node) bool {
		return slices.ContainsFunc(keys, func(k string) bool { return n.get(table, k) != nil })
	}
	var without []string
	for _, name := range slices.Sorted(maps.Keys(d.goal.Slots)) {
		if !has(root) && !has(root.get("slot", name)) {
			without = append(without, name)
		}
	}
	if len(without) == 0 {
		return
	}
	at := root.get("slot", without[0])
	d.errs = append(d.errs, at.src.error(at.key, joinKey(table, keys[0]), "is missing in "+andList(without),
		fmt.Sprintf("want %s in [%s] or [slot.%s.%s]", oneOf(keys, cure), table, without[0], table)))
}

func oneOf(keys []string, example string) string {
	if len(keys) == 1 {
		return example
	}
	return "one of " + strings.Join(keys, ", ") + ", such as " + example + ","
}

// value decodes n over v. Key is n's full key; rule is the key without slot, indices and what a person may name,
// under which checks finds what is allowed.
func (d *decoder) value(n *node, v reflect.Value, key, rule string) {
	switch p := v.Addr().Interface().(type) {
	case *string:
		if s, ok := d.text(n, key, rule); ok {
			*p = s
		}
	case *Mode:
		if s, ok := d.text(n, key, "mode"); ok {
			*p = Mode(s)
		}
	case *bool:
		if b, ok := n.scalar.(bool); ok {
			*p = b
		} else {
			d.bad(n, key, "is "+n.kind(), "want true or false")
		}
	case *int:
		*p = d.configVersion(n, key)
	case *time.Duration:
		*p = d.duration(n, key, rule)
	case *[]string:
		list := []string{}
		seen := map[string]bool{}
		d.elements(n, key, "strings", func(e *node, key string) {
			s, ok := d.text(e, key, rule)
			if !ok {
				return
			}
			if id := identity(rule, s); id != "" && seen[id] {
				problem := " is there twice"
				if rule == "kubelet.taints" {
					problem = " has the key and effect of one before it"
				}
				d.bad(e, key, strconv.Quote(s)+problem, "want each once")
			} else {
				seen[id] = true
			}
			list = append(list, s)
		})
		*p = list
	case *map[string]string:
		*p = entries(d, n, *p, key, rule, func(e *node, s *string, key string) { d.value(e, reflect.ValueOf(s).Elem(), key, rule) })
	case *map[string][]string:
		*p = entries(d, n, *p, key, rule, func(e *node, s *[]string, key string) { d.value(e, reflect.ValueOf(s).Elem(), key, rule) })
	case *map[string]Registry:
		*p = entries(d, n, *p, key, rule, func(e *node, r *Registry, key string) { d.value(e, reflect.ValueOf(r).Elem(), key, rule) })
	case *map[string]any:
		if n.table == nil {
			d.bad(n, key, "is "+n.kind(), "want a table")
			return
		}
		if rule == "kubelet.config" {
			d.kubeletConfig(n, key)
		} else {
			d.containerdConfig(n, key)
		}
		*p = d.config(n, *p, key)
	case *[]Mount:
		*p = []Mount{}
		targets := map[string]bool{}
		d.elements(n, key, "tables", func(e *node, key string) {
			var m Mount
			d.value(e, reflect.ValueOf(&m).Elem(), key, rule)
			at := e.get("target")
			if e.table != nil && e.table["source"] == nil {
				d.bad(e, key, "has no source", `want source = "/a/path/on/the/host"`)
			} else if at == nil {
				// The source is the target as well, so it must be fit for both.
				m.Target, at = m.Source, e.get("source")
				if p, _ := absolutePath(m.Source); p == "" {
					if problem, cure := mountTarget(m.Target); problem != "" {
						d.bad(at, joinKey(key, "source"), "as the target too, "+problem, strings.Replace(cure, "another folder", "a target", 1))
					}
				}
			}
			if at != nil && m.Target != "" && targets[m.Target] {
				d.bad(at, key, "the target "+strconv.Quote(m.Target)+" is there twice", "want each once")
			}
			targets[m.Target] = true
			*p = append(*p, m)
		})
	case *[]Mirror:
		*p = []Mirror{}
		urls := map[string]bool{} // each is a table of a hosts.toml
		d.elements(n, key, "tables", func(e *node, key string) {
			m := Mirror{Capabilities: []string{"pull", "resolve"}}
			d.value(e, reflect.ValueOf(&m).Elem(), key, rule)
			if e.table != nil && e.table["url"] == nil {
				d.bad(e, key, "has no url", `want url = "https://host[:port]"`)
			}
			if at := e.get("url"); at != nil && m.URL != "" && urls[m.URL] {
				d.bad(at, joinKey(key, "url"), "is there twice", "want each once")
			}
			urls[m.URL] = true
			*p = append(*p, m)
		})
	case **Exec:
		e := Exec{APIVersion: "client.authentication.k8s.io/v1"}
		if *p != nil {
			e = **p
		}
		d.value(n, reflect.ValueOf(&e).Elem(), key, rule)
		if d.whole && e.Command == "" && n.table != nil && n.table["command"] == nil {
			d.bad(n, key, "has no command", `want command = "/path/inside/the/machine"`)
		}
		*p = &e
	default:
		d.structure(n, v, key, rule)
	}
}

// structure decodes a table whose keys are the toml tags of a struct.
func (d *decoder) structure(n *node, v reflect.Value, key, rule string) {
	if n.table == nil {
		d.bad(n, key, "is "+n.kind(), "want a table")
		return
	}
	fields := d.fieldsOf(v.Type())
	for _, k := range n.keys() {
		if i, ok := fields[k]; ok {
			d.value(n.table[k], v.Field(i), joinKey(key, k), rule+"."+k)
		} else {
			d.unknown(n.table[k], key, rule, k, slices.Sorted(maps.Keys(fields)))
		}
	}
}

func (d *decoder) fieldsOf(t reflect.Type) map[string]int {
	fields := d.fields[t]
	if fields == nil {
		fields = map[string]int{}
		for i := range t.NumField() {
			fields[t.Field(i).Tag.Get("toml")] = i
		}
		if d.fields == nil {
			d.fields = map[reflect.Type]map[string]int{}
		}
		d.fields[t] = fields
	}
	return fields
}

// entries decodes a table whose keys people choose, over a copy of what is there.
func entries[V any](d *decoder, n *node, over map[string]V, key, rule string, value func(n *node, v *V, key string)) map[string]V {
	if n.table == nil {
		d.bad(n, key, "is "+n.kind(), "want a table")
		return over
	}
	m := maps.Clone(over)
	if m == nil {
		m = map[string]V{}
	}
	for _, k := range n.keys() {
		e, full := n.table[k], joinKey(key, k)
		if check := keyChecks[rule]; check != nil {
			if problem, cure := check(k); problem != "" {
				d.errs = append(d.errs, e.src.error(e.key, full, problem, cure))
			}
		}
		v := m[k]
		value(e, &v, full)
		m[k] = v
	}
	return m
}

func (d *decoder) elements(n *node, key, of string, each func(e *node, key string)) {
	if n.array == nil {
		d.bad(n, key, "is "+n.kind(), "want an array of "+of)
		return
	}
	for i, e := range n.array {
		each(e, key+"["+strconv.Itoa(i)+"]")
	}
}

func (d *decoder) str(n *node, key string) (string, bool) {
	s, ok := n.scalar.(string)
	if !ok {
		d.bad(n, key, "is "+n.kind(), "want a string")
	}
	return s, ok
}

// text decodes a string and checks it by its rule.
func (d *decoder) text(n *node, key, rule string) (string, bool) {
	s, ok := d.str(n, key)
	if check := checks[rule]; ok && check != nil && !hasControl(s) {
		if problem, cure := check(s); problem != "" {
			d.bad(n, key, problem, cure)
		}
	}
	return s, ok
}

func (d *decoder) configVersion(n *node, key string) int {
	switch v := n.scalar.(type) {
	case string:
		if v != "auto" {
			d.bad(n, key, strconv.Quote(v)+" is no version", `want 2, 3 or "auto"`)
		}
		return 0
	case int64:
		if v == 2 || v == 3 {
			return int(v)
		}
		d.bad(n, key, strconv.FormatInt(v, 10)+" is no version that berth writes", `want 2 (containerd 1.x), 3 (containerd 2.x) or "auto"`)
	default:
		d.bad(n, key, "is "+n.kind(), `want 2, 3 or "auto"`)
	}
	return 0
}

func (d *decoder) duration(n *node, key, rule string) time.Duration {
	const example = `such as "90s" or "2m30s"`
	s, ok := n.scalar.(string)
	if !ok {
		d.bad(n, key, "is "+n.kind(), "want a duration in quotes, "+example)
		return 0
	}
	t, err := time.ParseDuration(s)
	least, most := time.Second, 24*time.Hour
	switch rule {
	case "timeouts.settle":
		least = 0
	case "timeouts.poll":
		least, most = 10*time.Millisecond, time.Minute
	}
	if err != nil && !hasControl(s) {
		d.bad(n, key, strconv.Quote(s)+" is not a duration", "want a number with its unit, "+example)
	} else if err == nil && (t < least || t > most) {
		d.bad(n, key, strconv.Quote(s)+" is out of range", fmt.Sprintf("want %s to %s", short(least), short(most)))
	}
	return t
}

// short writes a whole duration without its zero units: 24h, not 24h0m0s.
func short(t time.Duration) string {
	s := t.String()
	s = strings.TrimSuffix(s, "m0s") + map[bool]string{true: "m"}[strings.HasSuffix(s, "m0s")]
	return strings.TrimSuffix(s, "h0m") + map[bool]string{true: "h"}[strings.HasSuffix(s, "h0m")]
}

// config puts a free table over a copy of what is there: tables merge, anything else replaces.
func (d *decoder) config(n *node, over map[string]any, key string) map[string]any {
	m := maps.Clone(over)
	if m == nil {
		m = map[string]any{}
	}
	for _, k := range n.keys() {
		v, full := n.table[k], joinKey(key, k)
		before, isTable := m[k].(map[string]any)
		if m[k] != nil && isTable != (v.table != nil) {
			d.bad(v, full, "is "+v.kind(), "want the same kind as in the table that all slots share")
			continue
		}
		if v.table != nil {
			m[k] = d.config(v, before, full)
		} else {
			m[k] = d.free(v, full)
		}
	}
	return m
}

// free returns the value of n, which must be one that containerd's TOML and kubelet's YAML both have.
func (d *decoder) free(n *node, key string) any {
	switch v := n.scalar.(type) {
	case time.Time:
		d.bad(n, key, "is "+n.kind(), "want it in quotes")
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			d.bad(n, key, "is not a finite number", "want a number")
		}
	}
	switch {
	case n.table != nil:
		return d.config(n, nil, key)
	case n.array != nil:
		list := make([]any, 0, len(n.array))
		for i, e := range n.array {
			list = append(list, d.free(e, key+"["+strconv.Itoa(i)+"]"))
		}
		return list
	}
	return n.scalar
}

// kubeletField is one field of KubeletConfiguration.
type kubeletField struct{ name, kind string }

//go:generate sh -c "cd testdata/kubeletfields && go run . | gofmt >../../kubeletfields.go"

// protected are fields of KubeletConfiguration that belong to berth, each with what to do instead.
var protected = map[string]string{
	"apiVersion":               "want none: berth writes kubelet.config.k8s.io/v1beta1",
	"kind":                     "want none: berth writes KubeletConfiguration",
	"authentication":           "want none: clients prove themselves by cluster.certificate_authority or a token",
	"authorization":            "want none: the API server decides (Webhook)",
	"containerRuntimeEndpoint": "want none: it is the slot's own containerd",
	"cgroupDriver":             "want none: it is systemd, in containerd as well",
	"staticPodPath":            "want none: it is /etc/kubernetes/manifests",
	"rotateCertificates":       "want none: it is true",
	"clusterDNS":               "want cluster.dns",
	"clusterDomain":            "want cluster.domain",
	"registerWithTaints":       "want kubelet.taints",
	// Not the control plane's business, but berth's own: wait-kubelet asks 127.0.0.1:10248.
	"healthzPort":        "want none: berth asks port 10248 whether the kubelet is ready",
	"healthzBindAddress": "want none: berth asks 127.0.0.1 whether the kubelet is ready",
}

func findKubeletField(name string) *kubeletField {
	i, ok := slices.BinarySearchFunc(kubeletFields, name, func(f kubeletField, name string) int { return cmp.Compare(f.name, name) })
	if !ok {
		return nil
	}
	return &kubeletFields[i]
}

func (d *decoder) kubeletConfig(n *node, key string) {
	for _, k := range n.keys() {
		v, full := n.table[k], joinKey(key, k)
		f := findKubeletField(k)
		switch {
		case protected[k] != "":
			d.errs = append(d.errs, v.src.error(v.key, full, "belongs to berth", protected[k]))
		case f == nil:
			cure := "want a field of kubelet.config.k8s.io/v1beta1"
			if len(d.errs) < maxSuggestions {
				names := make([]string, len(kubeletFields))
				for i, f := range kubeletFields {
					names[i] = f.name
				}
				cure = didYouMean(k, names, cure)
			}
			d.errs = append(d.errs, v.src.error(v.key, full, "is not a field of KubeletConfiguration", cure))
		case f.kind == "a duration":
			s, ok := v.scalar.(string)
			if _, err := time.ParseDuration(s); !ok || err != nil {
				d.bad(v, full, "is not a duration", `want a number with its unit in quotes, such as "90s" or "2m30s"`)
			}
		case f.kind != v.kind() && !(f.kind == "a float" && v.kind() == "an integer"):
			d.bad(v, full, "is "+v.kind(), "want "+f.kind)
		}
		d.noMerge(v, full)
	}
}

// noMerge refuses the key that YAML's writers do not quote, though to readers it means "merge this table into the one it is in"
// (https://yaml.org/type/merge.html). Kubelet has no such key.
func (d *decoder) noMerge(n *node, key string) {
	for _, k := range n.keys() {
		v, full := n.table[k], joinKey(key, k)
		if k == "<<" {
			d.errs = append(d.errs, v.src.error(v.key, full, "is no key: it merges tables in YAML", "want a key of KubeletConfiguration"))
		}
		d.noMerge(v, full)
	}
	for i, e := range n.array {
		d.noMerge(e, key+"["+strconv.Itoa(i)+"]")
	}
}

func (d *decoder) containerdConfig(n *node, key string) {
	if v := n.table["version"]; v != nil {
		d.errs = append(d.errs, v.src.error(v.key, joinKey(key, "version"), "belongs to berth", "want containerd.config_version"))
	}
	plugins := n.get("plugins")
	for _, p := range plugins.keysOrNone() {
		registry := plugins.get(p, "registry")
		for _, k := range registry.keysOrNone() {
			// containerd turns the CRI plugin off when one of these stands beside config_path (pkg/cri/config,
			// ValidatePluginConfig), which berth always writes.
			if k == "mirrors" || k == "configs" {
				v := registry.table[k]
				full := joinKey(joinKey(joinKey(joinKey(key, "plugins"), p), "registry"), k)
				d.errs = append(d.errs, v.src.error(v.key, full, "cannot stand beside config_path, which berth sets",
					`want [containerd.registry."HOST"]`))
			}
		}
	}
}

// unknown reports the key k of the table with this full key and rule.
func (d *decoder) unknown(n *node, table, rule, k string, siblings []string) {
	key := joinKey(table, k)
	prefix := "" // of a slot, where the key might belong to another of its tables
	if strings.HasPrefix(key, "slot.") {
		prefix = strings.Join(strings.SplitN(key, ".", 3)[:2], ".") + "."
	}
	cure := "want one of " + strings.Join(siblings, ", ")
	if len(d.errs) >= maxSuggestions {
		// See maxSuggestions.
	} else if c := closest(k, siblings); c != "" {
		cure = "did you mean " + joinKey(table, c) + "?"
	} else if other := d.elsewhere(k); other != "" && strings.Count(rule, ".") == 0 {
		cure = "did you mean " + prefix + other + "?"
	} else if fold(k) == "boot" {
		cure = "want boot at the top of the file"
	}
	d.errs = append(d.errs, n.src.error(n.key, key, "is not a key of the goal state", cure))
}

// elsewhere returns where a key that people put into the wrong table belongs.
func (d *decoder) elsewhere(k string) string {
	for _, t := range slices.Sorted(maps.Keys(tables)) {
		for _, name := range slices.Sorted(maps.Keys(d.fieldsOf(reflect.TypeOf(tables[t](&Slot{})).Elem()))) {
			if fold(name) == fold(k) {
				return t + "." + name
			}
		}
	}
	if findKubeletField(k) != nil && protected[k] == "" {
		return "kubelet.config." + k
	}
	return ""
}

func didYouMean(word string, candidates []string, otherwise string) string {
	if c := closest(word, candidates); c != "" {
		return "did you mean " + c + "?"
	}
	return otherwise
}

// orList and andList write names as prose, and no more of them than one cares to read.
func orList(names []string) string {
	if len(names) == 0 {
		return "a slot, such as [slot.a]"
	}
	return list2(names, " or ")
}

func andList(names []string) string {
	if len(names) == 1 {
		return "slot " + names[0]
	}
	return "slots " + list2(names, " and ")
}

func list2(names []string, last string) string {
	if len(names) > 5 {
		return strings.Join(names[:5], ", ") + fmt.Sprintf("%s%d more", last, len(names)-5)
	}
	if len(names) == 1 {
		return names[0]
	}
	return strings.Join(names[:len(names)-1], ", ") + last + names[len(names)-1]
}
