package main

import (
	"encoding/json"
	"fmt"

	"k8s.io/mount-utils"
	"k8s.io/utils/cpuset"
)

// Texts of the kernel: the table of mounts, lists of CPUs.
func init() {
	type question struct {
		File string `json:"file"`
		Text string `json:"text"`
	}
	handlers["mounts"] = func(text json.RawMessage) (any, error) {
		var request question
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		table, err := mount.ParseMountInfo(request.File)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		lines := [][]string{}
		for _, entry := range table {
			lines = append(lines, []string{fmt.Sprintf("%d:%d", entry.Major, entry.Minor), entry.Root, entry.MountPoint, entry.FsType, entry.Source})
		}
		return map[string]any{"ok": true, "lines": lines}, nil
	}
	handlers["cpu lists"] = func(text json.RawMessage) (any, error) {
		var request question
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		set, err := cpuset.Parse(request.Text)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		return map[string]any{"ok": true, "text": set.String()}, nil
	}
}
