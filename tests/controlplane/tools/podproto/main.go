// What src/server/pods_api needs to know of the protobuf form of a Pod. In this directory's module:
//
//	go run ./tools/podproto table RELEASE >../../src/server/pods_api/fields.txt
//	go run ./tools/podproto digests RELEASE ../../src/server/pods_api/pods.json \
//	    ../golden/data/manifests/*.json >../../src/server/pods_api/digests.txt
//
// RELEASE is that of Kubernetes, such as 1.37, and of k8s.io/api, such as v0.37.2. The file pods.json is
// a list of pods, and each manifest is one pod.
package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"

	"k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func main() {
	args := append(os.Args[1:], "", "")
	switch args[0] {
	case "table":
		table(args[1])
	case "digests":
		digests(args[1], args[2], os.Args[min(4, len(os.Args)):])
	default:
		fmt.Fprintln(os.Stderr, "usage: podproto table RELEASE | digests RELEASE PODS MANIFEST...")
		os.Exit(2)
	}
}

// The fields of each message, by its name.
var messages = map[string][]string{}

func table(release string) {
	fields(reflect.TypeFor[v1.Pod]())
	names := make([]string, 0, len(messages))
	for name := range messages {
		names = append(names, name)
	}
	sort.Strings(names)
	fmt.Printf("# The messages of a pod (v1.Pod of Kubernetes %s, k8s.io/api/core/v1): the number of each field,\n", release)
	fmt.Println("# its name in JSON, and its kind. `?`: absent if it is not set; `*`: a list; `{}`: a map; without a")
	fmt.Println("# mark: always written. The name `+`: the fields of the part are beside the others in JSON.")
	for _, name := range names {
		fmt.Println(name)
		for _, field := range messages[name] {
			fmt.Println("", field)
		}
	}
}

func fields(message reflect.Type) {
	if _, known := messages[message.Name()]; known {
		return
	}
	messages[message.Name()] = nil
	texts := map[int]string{}
	var numbers []int
	for i := range message.NumField() {
		field := message.Field(i)
		tag := strings.Split(field.Tag.Get("protobuf"), ",")
		if len(tag) < 2 {
			continue // TypeMeta, which is not in the protobuf form
		}
		var number int
		if _, err := fmt.Sscan(tag[1], &number); err != nil {
			fail(fmt.Errorf("%s.%s: %w", message, field.Name, err))
		}
		name := strings.Split(field.Tag.Get("json"), ",")[0]
		if name == "" {
			name = "+"
		}
		numbers = append(numbers, number)
		texts[number] = fmt.Sprint(number, " ", name, " ", kind(field.Type))
	}
	sort.Ints(numbers)
	for _, number := range numbers {
		messages[message.Name()] = append(messages[message.Name()], texts[number])
	}
}

func kind(goType reflect.Type) string {
	switch goType {
	case reflect.TypeFor[metav1.Time]():
		return "time"
	case reflect.TypeFor[resource.Quantity]():
		return "quantity"
	case reflect.TypeFor[intstr.IntOrString]():
		return "intstr"
	case reflect.TypeFor[metav1.FieldsV1]():
		return "raw"
	}
	switch goType.Kind() {
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "bool"
	case reflect.Int32, reflect.Int64:
		return "int"
	case reflect.Struct:
		fields(goType)
		return goType.Name()
	case reflect.Pointer:
		return kind(goType.Elem()) + "?"
	case reflect.Slice:
		return kind(goType.Elem()) + "*"
	case reflect.Map:
		return kind(goType.Elem()) + "{}"
	}
	fail(fmt.Errorf("%s has a kind that src/server/pods_api does not know", goType))
	return ""
}

func digests(release, list string, manifests []string) {
	fmt.Printf("# Length and SHA-256 of Pod.Marshal() of k8s.io/api %s: of the pods of pods.json, by index, and of tests/golden/data/manifests.\n", release)
	var pods []v1.Pod
	read(list, &pods)
	for i := range pods {
		digest(fmt.Sprint(i), &pods[i])
	}
	for _, manifest := range manifests {
		var pod v1.Pod
		read(manifest, &pod)
		digest(filepath.Base(manifest), &pod)
	}
}

func digest(name string, pod *v1.Pod) {
	data, err := pod.Marshal()
	fail(err)
	fmt.Printf("%s %d %x\n", name, len(data), sha256.Sum256(data))
}

func read(path string, into any) {
	data, err := os.ReadFile(path)
	fail(err)
	if err := json.Unmarshal(data, into); err != nil {
		fail(fmt.Errorf("%s: %w", path, err))
	}
}

// Ends the program if there is an error.
func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
