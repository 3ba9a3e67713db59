package main

import (
	"encoding/json"

	"k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// Whether a patch leads where it should, and where it leads.
type patched struct {
	OK      bool   `json:"ok"`
	Error   string `json:"error"`
	Reached any    `json:"reached"`
	Wanted  any    `json:"wanted"`
}

func patch(request question) any {
	switch request.Kind {
	case "Pod":
		return patchAs[v1.Pod](request)
	case "Node":
		return patchAs[v1.Node](request)
	}
	return patched{Error: "unknown kind " + request.Kind}
}

// As the API server patches (apiserver: pkg/endpoints/handlers/patch.go): the object it has,
// as a map, patched and converted back.
func patchAs[T any](request question) any {
	var old, wanted, reached T
	for text, into := range map[*json.RawMessage]*T{&request.Old: &old, &request.Wanted: &wanted} {
		if err := json.Unmarshal(*text, into); err != nil {
			return patched{Error: err.Error()}
		}
	}
	var changes map[string]any
	if err := kjson.Unmarshal(request.Patch, &changes); err != nil {
		return patched{Error: err.Error()}
	}
	before, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&old)
	if err != nil {
		return patched{Error: err.Error()}
	}
	after, err := strategicpatch.StrategicMergeMapPatch(before, changes, &old)
	if err != nil {
		return patched{Error: err.Error()}
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(after, &reached); err != nil {
		return patched{Error: err.Error()}
	}
	if equality.Semantic.DeepEqual(reached, wanted) {
		return patched{OK: true}
	}
	return patched{Reached: reached, Wanted: wanted}
}
