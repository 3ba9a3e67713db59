package main

import (
	"encoding/json"
	"errors"
	"sync"
	_ "unsafe" // for linkname

	"github.com/go-logr/logr"
	"github.com/google/cadvisor/lib/container"
	"github.com/google/cadvisor/lib/container/common"
	_ "github.com/google/cadvisor/lib/container/libcontainer"
	info "github.com/google/cadvisor/lib/model"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fs"
	"github.com/opencontainers/cgroups/fs2"
	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm"
)

// The numbers and limits of a cgroup "/x" of version 1 or 2 whose hierarchies are in a directory.
func init() {
	cgroups.TestMode = true
	handlers["cgroup"] = cgroupFacts
	handlers["interfaces"] = func(text json.RawMessage) (any, error) {
		var request struct {
			File string `json:"file"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		found, err := interfaces(request.File)
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		return map[string]any{"ok": true, "interfaces": found}, nil
	}
}

//go:linkname unifiedOnce github.com/opencontainers/cgroups.isUnifiedOnce
var unifiedOnce sync.Once

//go:linkname unified github.com/opencontainers/cgroups.isUnified
var unified bool

//go:linkname containerStats github.com/google/cadvisor/lib/container/libcontainer.newContainerStats
func containerStats(from *cgroups.Stats, included container.MetricSet) *info.ContainerStats

//go:linkname interfaces github.com/google/cadvisor/lib/container/libcontainer.scanInterfaceStats
func interfaces(file string) ([]info.InterfaceStats, error)

type noMachine struct{}

func (noMachine) GetMachineInfo() (*info.MachineInfo, error) {
	return &info.MachineInfo{NumCores: 4}, nil
}
func (noMachine) GetVersionInfo() (*info.VersionInfo, error) { return &info.VersionInfo{}, nil }

func cgroupFacts(text json.RawMessage) (any, error) {
	var request struct {
		Directory string `json:"dir"`
		Unified   bool   `json:"unified"`
	}
	if err := json.Unmarshal(text, &request); err != nil {
		return nil, err
	}
	unifiedOnce.Do(func() {})
	unified = request.Unified
	response := map[string]any{}
	stats, paths, mounts, err := read(request.Directory, request.Unified)
	if err != nil {
		response["error"] = err.Error()
	} else {
		spec, err := common.GetSpec(paths, noMachine{}, false, false)
		if err != nil {
			return nil, err
		}
		response["stats"], response["spec"] = containerStats(stats, container.AllMetrics), spec
		response["pids"], response["kernel"] = stats.PidsStats, stats.MemoryStats.KernelUsage.Usage
	}
	// What a pod's cgroup has, for a resize.
	subsystems := &cm.CgroupSubsystems{MountPoints: mounts}
	manager := cm.NewCgroupV1Manager(logr.Discard(), subsystems, "cgroupfs")
	if request.Unified {
		manager = cm.NewCgroupV2Manager(logr.Discard(), subsystems, "cgroupfs")
	}
	for _, resource := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
		values, err := manager.GetCgroupConfig(cm.CgroupName{"x"}, resource)
		if err != nil {
			response["config "+string(resource)] = map[string]any{"error": err.Error()}
			continue
		}
		response["config "+string(resource)] = map[string]any{
			"shares": values.CPUShares, "quota": values.CPUQuota, "period": values.CPUPeriod, "memory": values.Memory,
		}
	}
	return response, nil
}

func read(directory string, unified bool) (*cgroups.Stats, map[string]string, map[string]string, error) {
	if unified {
		path := directory + "/x"
		mounts := map[string]string{"cpu": directory, "memory": directory}
		manager, err := fs2.NewManager(&cgroups.Cgroup{Resources: &cgroups.Resources{}}, path)
		if err != nil {
			return nil, nil, mounts, err
		}
		stats, err := manager.GetStats()
		return stats, map[string]string{"": path}, mounts, err
	}
	paths, mounts := map[string]string{}, map[string]string{}
	for _, controller := range []string{"cpu", "cpuacct", "memory", "blkio", "pids", "cpuset"} {
		mounts[controller] = directory + "/" + controller
		paths[controller] = directory + "/" + controller + "/x"
	}
	stats := cgroups.NewStats()
	err := errors.Join(
		(&fs.CpuGroup{}).GetStats(paths["cpu"], stats),
		(&fs.CpuacctGroup{}).GetStats(paths["cpuacct"], stats),
		(&fs.MemoryGroup{}).GetStats(paths["memory"], stats),
		(&fs.BlkioGroup{}).GetStats(paths["blkio"], stats),
		(&fs.PidsGroup{}).GetStats(paths["pids"], stats),
	)
	return stats, paths, mounts, err
}
