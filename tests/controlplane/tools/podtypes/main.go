// What src/sources/fingerprint needs to know of the Go kubelet: the shape of its internal Pod,
// and the UIDs that it gives to static pods. In this directory's module:
//
//	go run ./tools/podtypes types >../../src/sources/fingerprint/types.txt
//	go run ./tools/podtypes types NEWER... >../../src/sources/fingerprint/types-RELEASE.txt
//	go run ./tools/podtypes uids NODE MANIFEST... >../../src/sources/fingerprint/uids.txt
//	go run ./tools/podtypes text MANIFEST
//
// The second one, in a module of an older release, prints only the types that differ from those of the
// tables NEWER, of which the first is types.txt. The last one prints the text that is hashed. Each manifest counts as one of its base name in
// /etc/kubernetes/manifests; "-" reads manifests from standard input, one a line.
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	"k8s.io/utils/dump"
)

func main() {
	args := append(os.Args[1:], "", "")
	switch args[0] {
	case "types":
		types(os.Args[2:])
	case "uids":
		uids(args[1], os.Args[3:])
	case "text":
		data, err := os.ReadFile(args[1])
		must(err)
		text, err := text(data)
		must(err)
		fmt.Println(text)
	default:
		must(fmt.Errorf("want types, uids or text"))
	}
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// What a kubelet hashes of a manifest, but for its place.
func text(data []byte) (string, error) {
	json, err := yaml.ToJSON(data)
	if err != nil {
		return "", err
	}
	object, err := runtime.Decode(legacyscheme.Codecs.UniversalDecoder(), json)
	if err != nil {
		return "", err
	}
	return dump.ForHash(object.(*core.Pod)), nil
}

func uid(node, path string, data []byte) string {
	text, err := text(data)
	if err != nil {
		return "error: " + err.Error()
	}
	hash := fnv.New128a()
	fmt.Fprintf(hash, "%shost:%sfile:%s", text, node, path)
	return hex.EncodeToString(hash.Sum(nil))
}

func uids(node string, files []string) {
	for _, file := range files {
		if file == "-" {
			lines := bufio.NewScanner(os.Stdin)
			lines.Buffer(nil, 1<<24)
			for lines.Scan() {
				fmt.Println(uid(node, "/etc/kubernetes/manifests/-", lines.Bytes()))
			}
			continue
		}
		data, err := os.ReadFile(file)
		must(err)
		name := filepath.Base(file)
		fmt.Println(name, uid(node, "/etc/kubernetes/manifests/"+name, data))
	}
}

// The table, one type after the other. "#T" begins a struct, whose fields follow with their
// types; "=T U" says that T is a U. A third word is the field's name in JSON where it is not
// the Go name in lower case at its beginning; "." says that its fields are those of the
// surrounding object, "-" that it is never set, "?" before a name that only its absence counts.
func types(newer []string) {
	visit(reflect.TypeFor[core.Pod](), reflect.TypeFor[v1.Pod]())
	known := map[string]string{}
	for _, file := range newer {
		data, err := os.ReadFile(file)
		must(err)
		for _, block := range blocks(string(data)) {
			known[name(block)] = block
		}
	}
	fmt.Println("# Made by tests/controlplane/tools/podtypes.")
	for _, block := range blocks(table.String()) {
		if known[name(block)] != block {
			fmt.Println(block)
		}
	}
}

// The whole table.
var table strings.Builder

// The types of a table: a struct with its fields, or one line.
func blocks(table string) []string {
	var all []string
	for line := range strings.Lines(table) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(line, "# ") || line == "":
		case strings.HasPrefix(line, "#") || strings.HasPrefix(line, "="):
			all = append(all, line)
		default:
			all[len(all)-1] += "\n" + line
		}
	}
	return all
}

func name(block string) string {
	line, _, _ := strings.Cut(block, "\n")
	name, _, _ := strings.Cut(line[1:], " ")
	return name
}

var seen = map[reflect.Type]bool{
	reflect.TypeFor[resource.Quantity]():  true,
	reflect.TypeFor[intstr.IntOrString](): true,
	reflect.TypeFor[metav1.Time]():        true,
}

// Fields that the conversion moves, or that tell of a life elsewhere.
var odd = map[string]string{
	"core.PodSecurityContext.HostNetwork":           "",
	"core.PodSecurityContext.HostPID":               "",
	"core.PodSecurityContext.HostIPC":               "",
	"core.PodSecurityContext.ShareProcessNamespace": "",
	"core.PodSecurityContext.HostUsers":             "",
	"v1.TypeMeta.Kind":                              "-",
	"v1.TypeMeta.APIVersion":                        "-",
	"v1.ObjectMeta.ManagedFields":                   "?managedFields",
}

func visit(in, ex reflect.Type) {
	for in.Kind() == reflect.Pointer || in.Kind() == reflect.Slice && in.Name() == "" {
		in, ex = in.Elem(), elem(ex)
	}
	if seen[in] || in.PkgPath() == "" && in.Kind() != reflect.Map {
		return
	}
	seen[in] = true
	switch in.Kind() {
	case reflect.Struct:
		structure(in, ex)
	case reflect.Map:
		if in.PkgPath() != "" {
			fmt.Fprintf(&table, "=%s map[%s]%s\n", in, in.Key(), in.Elem())
		}
		visit(in.Elem(), elem(ex))
	case reflect.Slice:
		fmt.Fprintf(&table, "=%s []%s\n", in, in.Elem())
		visit(in.Elem(), elem(ex))
	default:
		fmt.Fprintf(&table, "=%s %s\n", in, in.Kind())
	}
}

func elem(ex reflect.Type) reflect.Type {
	switch ex.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		return ex.Elem()
	}
	return ex
}

func structure(in, ex reflect.Type) {
	fmt.Fprintf(&table, "#%s\n", in)
	type next struct{ in, ex reflect.Type }
	var later []next
	for i := range in.NumField() {
		field := in.Field(i)
		json, special := odd[in.String()+"."+field.Name]
		simple := strings.ToLower(field.Name[:1]) + field.Name[1:]
		if special {
			if json == "" {
				json = simple
			}
		} else {
			outer, found := direct(ex, field.Name)
			if !found {
				fmt.Fprintf(os.Stderr, "no counterpart of %s.%s\n", in, field.Name)
				continue
			}
			tag := outer.Tag.Get("json")
			json, _, _ = strings.Cut(tag, ",")
			if json == "" {
				json = "."
			}
			kind := field.Type.Kind()
			list := kind == reflect.Slice || kind == reflect.Pointer || kind == reflect.Map
			if in == reflect.TypeFor[core.PodStatus]() && list {
				json = "?" + json
			} else {
				later = append(later, next{field.Type, outer.Type})
			}
		}
		if json == simple {
			fmt.Fprintf(&table, "%s %s\n", field.Name, field.Type)
		} else {
			fmt.Fprintf(&table, "%s %s %s\n", field.Name, field.Type, json)
		}
	}
	for _, next := range later {
		visit(next.in, next.ex)
	}
}

func direct(t reflect.Type, name string) (reflect.StructField, bool) {
	for i := range t.NumField() {
		if t.Field(i).Name == name {
			return t.Field(i), true
		}
	}
	return reflect.StructField{}, false
}
