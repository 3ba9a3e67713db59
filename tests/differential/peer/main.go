// Command peer answers, line by line, how Go reads what coracle reads: heads of requests, and
// responses (net/http), certificates (crypto/x509), YAML and JSON (sigs.k8s.io), quantities, durations
// and strategic merge patches (k8s.io/apimachinery).
// A question and its answer are a JSON object each.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

// A question; which fields are set depends on what is asked.
type question struct {
	Ask string `json:"ask"`
	// Bytes of a head, a certificate in DER.
	Data []byte `json:"data"`
	// A quantity, a duration.
	Text string `json:"text"`
	// Certificates in DER, the client's own one first; or JSON texts.
	Chain [][]byte `json:"chain"`
	// Certificates of the authorities in DER.
	Roots [][]byte `json:"roots"`
	// Seconds since 1970.
	Time int64 `json:"time"`
	// A kind of object, the object, what is wanted of it, and a patch that should lead there.
	Kind   string          `json:"kind"`
	Old    json.RawMessage `json:"old"`
	Wanted json.RawMessage `json:"wanted"`
	Patch  json.RawMessage `json:"patch"`
}

func main() {
	handlers := map[string]func(question) any{
		"document": func(request question) any { return document(request.Data) },
		"pods":     func(request question) any { return samePod(request.Chain) },
		"duration": func(request question) any { return duration(request.Text) },
		"response": func(request question) any { return response(request.Data) },
		"head":     newHeads().read,
		"subject":  subject,
		"chain":    chain,
		"quantity": quantity,
		"patch":    patch,
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	out := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	for lines.Scan() {
		var request question
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			fail(err)
		}
		handler, ok := handlers[request.Ask]
		if !ok {
			fail(fmt.Errorf("nothing is known of %q", request.Ask))
		}
		if err := encoder.Encode(handler(request)); err != nil {
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
	fmt.Fprintln(os.Stderr, "peer:", err)
	os.Exit(1)
}
