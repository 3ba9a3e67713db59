package main

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"

	yamlv2 "go.yaml.in/yaml/v2"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// The first document of a text as JSON, by the YAML library of Kubernetes. "ambiguous": two keys of
// different types have the same text, and it is random which of them counts.
func document(text []byte) map[string]any {
	value, err := yaml.YAMLToJSON(text)
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	var tree any
	ambiguous := yamlv2.Unmarshal(text, &tree) == nil && collides(tree)
	return map[string]any{"ok": true, "value": value, "ambiguous": ambiguous}
}

func collides(value any) bool {
	switch value := value.(type) {
	case []any:
		for _, item := range value {
			if collides(item) {
				return true
			}
		}
	case map[any]any:
		names := map[string]bool{}
		for key, item := range value {
			name := fmt.Sprint(key)
			if number, ok := key.(float64); ok {
				name = strconv.FormatFloat(number, 'g', -1, 32)
			}
			if names[name] || collides(item) {
				return true
			}
			names[name] = true
		}
	}
	return false
}

// Whether two JSON texts are the same pod for the decoder of the API's objects.
func samePod(texts [][]byte) map[string]any {
	pods := make([]v1.Pod, len(texts))
	for i, text := range texts {
		if err := kjson.UnmarshalCaseSensitivePreserveInts(text, &pods[i]); err != nil {
			return map[string]any{"error": err.Error(), "at": i}
		}
	}
	return map[string]any{"ok": true, "same": reflect.DeepEqual(pods[0], pods[1])}
}

// A duration in a configuration, as it is written again.
func duration(text string) map[string]any {
	var value metav1.Duration
	quoted, err := json.Marshal(text)
	if err == nil {
		err = json.Unmarshal(quoted, &value)
	}
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	return map[string]any{"ok": true, "text": value.Duration.String()}
}
