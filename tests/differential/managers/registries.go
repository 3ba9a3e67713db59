package main

import (
	"encoding/json"
	"path/filepath"
	_ "unsafe" // for linkname

	"k8s.io/kubernetes/pkg/credentialprovider"
	"k8s.io/kubernetes/pkg/util/parsers"
)

//go:linkname workingDirPath k8s.io/kubernetes/pkg/credentialprovider.workingDirPath
var workingDirPath string

//go:linkname homeDirPath k8s.io/kubernetes/pkg/credentialprovider.homeDirPath
var homeDirPath string

//go:linkname homeJSONDirPath k8s.io/kubernetes/pkg/credentialprovider.homeJSONDirPath
var homeJSONDirPath string

//go:linkname rootDirPath k8s.io/kubernetes/pkg/credentialprovider.rootDirPath
var rootDirPath string

//go:linkname rootJSONDirPath k8s.io/kubernetes/pkg/credentialprovider.rootJSONDirPath
var rootJSONDirPath string

// The user names for images, from the files of the node in the directories "root", "work", "home" and "top".
func init() {
	answers["registry files"] = func(text json.RawMessage) (any, error) {
		var asked struct {
			Directory string   `json:"dir"`
			Images    []string `json:"images"`
		}
		if err := json.Unmarshal(text, &asked); err != nil {
			return nil, err
		}
		at := func(name string) string { return filepath.Join(asked.Directory, name) }
		credentialprovider.SetPreferredDockercfgPath(at("root"))
		workingDirPath, homeDirPath, rootDirPath = at("work"), at("home"), at("top")
		homeJSONDirPath, rootJSONDirPath = at("home/.docker"), at("top/.docker")
		ring := &credentialprovider.BasicDockerKeyring{}
		if config, err := credentialprovider.ReadDockerConfigFile(); err == nil {
			ring.Add(nil, config)
		}
		found := [][]string{}
		for _, image := range asked.Images {
			names := []string{}
			if repository, _, _, err := parsers.ParseImageName(image); err == nil {
				credentials, _ := ring.Lookup(repository)
				for _, one := range credentials {
					names = append(names, one.Username)
				}
			}
			found = append(found, names)
		}
		return found, nil
	}
}
