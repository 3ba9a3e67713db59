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
	answers["mounts"] = func(text json.RawMessage) (any, error) {
		var asked question
		if err := json.Unmarshal(text, &asked); err != nil {
			return nil, err
		}
		table, err := mount.ParseMountInfo(asked.File)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		lines := [][]string{}
		for _, one := range table {
			lines = append(lines, []string{fmt.Sprintf("%d:%d", one.Major, one.Minor), one.Root, one.MountPoint, one.FsType, one.Source})
		}
		return map[string]any{"ok": true, "lines": lines}, nil
	}
	answers["cpu lists"] = func(text json.RawMessage) (any, error) {
		var asked question
		if err := json.Unmarshal(text, &asked); err != nil {
			return nil, err
		}
		set, err := cpuset.Parse(asked.Text)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		return map[string]any{"ok": true, "text": set.String()}, nil
	}
}
