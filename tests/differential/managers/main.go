// Command managers answers, line by line, what the kubelet's resource managers decide
// (k8s.io/kubernetes/pkg/kubelet/cm), and how the kubelet reads files: of resolvers, of credentials,
// and the kernel's. A question and its answer are a JSON object each.
// It is a module apart from ../peer, because k8s.io/kubernetes takes minutes to build.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// What is answered, by the question's field "ask". Each file adds its own.
var handlers = map[string]func(json.RawMessage) (any, error){}

func main() {
	klog.SetLogger(logr.Discard())
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	out := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	for lines.Scan() {
		var request struct {
			Ask string `json:"ask"`
		}
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			fail(err)
		}
		handler, ok := handlers[request.Ask]
		if !ok {
			fail(fmt.Errorf("nothing answers %q", request.Ask))
		}
		response, err := handler(lines.Bytes())
		if err != nil {
			fail(err)
		}
		if err := encoder.Encode(response); err != nil {
			fail(err)
		}
		if err := out.Flush(); err != nil {
			fail(err)
		}
	}
	if err := lines.Err(); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "managers:", err)
	os.Exit(1)
}
