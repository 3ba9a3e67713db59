package main

import (
	"encoding/json"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/credentialprovider"
	"k8s.io/kubernetes/pkg/credentialprovider/secrets"
	"k8s.io/kubernetes/pkg/util/parsers"
)

// Which credentials of a pull secret are for which images.
func init() {
	handlers["credentials"] = func(text json.RawMessage) (any, error) {
		var request struct {
			Data   []byte   `json:"data"`
			Legacy bool     `json:"legacy"`
			Images []string `json:"images"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		secret := v1.Secret{Type: v1.SecretTypeDockerConfigJson, Data: map[string][]byte{v1.DockerConfigJsonKey: request.Data}}
		if request.Legacy {
			secret = v1.Secret{Type: v1.SecretTypeDockercfg, Data: map[string][]byte{v1.DockerConfigKey: request.Data}}
		}
		keyring, err := secrets.MakeDockerKeyring([]v1.Secret{secret}, &credentialprovider.BasicDockerKeyring{})
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		type pair struct {
			Username []byte `json:"username"`
			Password []byte `json:"password"`
		}
		found := [][]pair{}
		for _, image := range request.Images {
			pairs := []pair{}
			if repository, _, _, err := parsers.ParseImageName(image); err == nil {
				credentials, _ := keyring.Lookup(repository)
				for _, credential := range credentials {
					pairs = append(pairs, pair{[]byte(credential.Username), []byte(credential.Password)})
				}
			}
			found = append(found, pairs)
		}
		return map[string]any{"ok": true, "found": found}, nil
	}
}
