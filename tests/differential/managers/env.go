package main

import (
	"encoding/json"
	"os"

	"k8s.io/kubernetes/pkg/kubelet/util/env"
)

// The values of keys in a file of variables (fileKeyRef).
func init() {
	handlers["env file"] = func(text json.RawMessage) (any, error) {
		var request struct {
			File string   `json:"file"`
			Data []byte   `json:"data"`
			Keys []string `json:"keys"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		if err := os.WriteFile(request.File, request.Data, 0o600); err != nil {
			return nil, err
		}
		found := []map[string]any{}
		for _, key := range request.Keys {
			value, err := env.ParseEnv(request.File, key)
			if err != nil {
				found = append(found, map[string]any{"error": err.Error()})
				continue
			}
			found = append(found, map[string]any{"value": []byte(value)})
		}
		return found, nil
	}
}
