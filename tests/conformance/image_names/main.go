// Prints a line for each image that upstream's tests use: its name, and the last part of its repository.
package main

import (
	"fmt"
	"path"
	"sort"
	"strings"

	"k8s.io/kubernetes/test/utils/image"
)

func main() {
	var lines []string
	for _, config := range image.GetImageConfigs() {
		name := config.GetE2EImage()
		lines = append(lines, fmt.Sprintf("%s %s", name, path.Base(name[:strings.LastIndex(name, ":")])))
	}
	sort.Strings(lines)
	for _, line := range lines {
		fmt.Println(line)
	}
}
