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
	handlers["registry files"] = func(text json.RawMessage) (any, error) {
		var request struct {
			Directory string   `json:"dir"`
			Images    []string `json:"images"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		inDirectory := func(name string) string { return filepath.Join(request.Directory, name) }
		credentialprovider.SetPreferredDockercfgPath(inDirectory("root"))
		workingDirPath, homeDirPath, rootDirPath = inDirectory("work"), inDirectory("home"), inDirectory("top")
		homeJSONDirPath, rootJSONDirPath = inDirectory("home/.docker"), inDirectory("top/.docker")
		ring := &credentialprovider.BasicDockerKeyring{}
		if config, err := credentialprovider.ReadDockerConfigFile(); err == nil {
			ring.Add(nil, config)
		}
		found := [][]string{}
		for _, image := range request.Images {
			names := []string{}
			if repository, _, _, err := parsers.ParseImageName(image); err == nil {
				credentials, _ := ring.Lookup(repository)
				for _, credential := range credentials {
					names = append(names, credential.Username)
				}
			}
			found = append(found, names)
		}
		return found, nil
	}
}
