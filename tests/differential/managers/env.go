package main

import (
	"encoding/json"
	"os"

	"k8s.io/kubernetes/pkg/kubelet/util/env"
)

// The values of keys in a file of variables (fileKeyRef).
func init() {
	answers["env file"] = func(text json.RawMessage) (any, error) {
		var asked struct {
			File string   `json:"file"`
			Data []byte   `json:"data"`
			Keys []string `json:"keys"`
		}
		if err := json.Unmarshal(text, &asked); err != nil {
			return nil, err
		}
		if err := os.WriteFile(asked.File, asked.Data, 0o600); err != nil {
			return nil, err
		}
		found := []map[string]any{}
		for _, key := range asked.Keys {
			value, err := env.ParseEnv(asked.File, key)
			if err != nil {
				found = append(found, map[string]any{"error": err.Error()})
				continue
			}
			found = append(found, map[string]any{"value": []byte(value)})
		}
		return found, nil
	}
}
