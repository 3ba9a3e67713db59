package main

import (
	"encoding/json"
	"sort"
	"strings"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	logsapi "k8s.io/component-base/logs/api/v1"
	metricsfeatures "k8s.io/component-base/metrics/features"
	_ "k8s.io/kubernetes/pkg/features"
)

// gate is a feature gate of the kubelet in the release that this program is built from.
type gate struct {
	Name   string   `json:"name"`
	Stage  string   `json:"stage"`
	Preset bool     `json:"preset"`
	Locked bool     `json:"locked"`
	Needs  []string `json:"needs"`
}

func init() {
	// As the kubelet's main package and its server do; pkg/features adds all others.
	if err := logsapi.AddFeatureGates(utilfeature.DefaultMutableFeatureGate); err != nil {
		fail(err)
	}
	if err := metricsfeatures.AddFeatureGates(utilfeature.DefaultMutableFeatureGate); err != nil {
		fail(err)
	}
	handlers["gates"] = func(json.RawMessage) (any, error) {
		needs := utilfeature.DefaultMutableFeatureGate.Dependencies()
		all := []gate{}
		for name, spec := range utilfeature.DefaultMutableFeatureGate.GetAll() {
			stage := strings.ToLower(string(spec.PreRelease))
			if stage == "" {
				stage = "ga"
			}
			entry := gate{Name: string(name), Stage: stage, Preset: spec.Default, Locked: spec.LockToDefault, Needs: []string{}}
			for _, other := range needs[name] {
				entry.Needs = append(entry.Needs, string(other))
			}
			sort.Strings(entry.Needs)
			all = append(all, entry)
		}
		sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
		return all, nil
	}
}
