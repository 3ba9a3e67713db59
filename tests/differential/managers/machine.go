package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"unsafe"

	"github.com/go-logr/logr"
	"github.com/google/cadvisor/lib/machine"
	info "github.com/google/cadvisor/lib/model"
	"github.com/google/cadvisor/lib/utils/sysfs"
	"github.com/google/cadvisor/lib/utils/sysinfo"
	processors "k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/topology"
	_ "k8s.io/kubernetes/pkg/kubelet/util/swap"
)

// Facts about the machine, from a tree with "proc" and "sys" in it.
func init() { handlers["machine"] = machineFacts }

//go:linkname parseCapacity github.com/google/cadvisor/lib/machine.parseCapacity
func parseCapacity(text []byte, line *regexp.Regexp) (uint64, error)

//go:linkname memoryLine github.com/google/cadvisor/lib/machine.memoryCapacityRegexp
var memoryLine *regexp.Regexp

//go:linkname swapLine github.com/google/cadvisor/lib/machine.swapCapacityRegexp
var swapLine *regexp.Regexp

//go:linkname isSwapOn k8s.io/kubernetes/pkg/kubelet/util/swap.isSwapOnAccordingToProcSwaps
func isSwapOn(logger logr.Logger, text []byte) bool

//go:linkname countProcessors github.com/google/cadvisor/lib/utils/sysfs.getCPUCount
func countProcessors(directory string) (int, error)

// The readers of sysfs, in another place than /sys/devices/system.
type system struct {
	sysfs.SysFs
	directory string
}

func systemAt(directory string) system {
	real := sysfs.NewRealSysFs()
	field := reflect.ValueOf(real).Elem().FieldByName("cpuPath")
	reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem().SetString(directory + "/cpu")
	return system{real, directory}
}

func (s system) GetNodesPaths() ([]string, error) {
	return filepath.Glob(s.directory + "/node/node*[0-9]")
}

func (s system) GetCPUsPaths(path string) ([]string, error) {
	if path == "/sys/devices/system/cpu" {
		path = s.directory + "/cpu"
	}
	return s.SysFs.GetCPUsPaths(path)
}

func (s system) caches(cpu int) string { return fmt.Sprintf("%s/cpu/cpu%d/cache", s.directory, cpu) }

func (s system) GetCaches(cpu int) ([]os.FileInfo, error) {
	entries, err := os.ReadDir(s.caches(cpu))
	if err != nil {
		return nil, err
	}
	var all []os.FileInfo
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return nil, err
		}
		all = append(all, info)
	}
	return all, nil
}

// The directory is a constant in cadvisor, so these files are read here with the same formats.
func (s system) GetCacheInfo(cpu int, name string) (sysfs.CacheInfo, error) {
	var cache sysfs.CacheInfo
	directory := filepath.Join(s.caches(cpu), name)
	for _, source := range []struct {
		file, format string
		value        any
	}{{"id", "%d", &cache.Id}, {"size", "%dK", &cache.Size}, {"level", "%d", &cache.Level}} {
		text, err := os.ReadFile(filepath.Join(directory, source.file))
		if err != nil {
			return cache, err
		}
		if _, err := fmt.Sscanf(string(text), source.format, source.value); err != nil {
			return cache, err
		}
	}
	kind, err := os.ReadFile(filepath.Join(directory, "type"))
	if err != nil {
		return cache, err
	}
	cache.Type = strings.TrimSpace(string(kind))
	cache.Cpus, err = countProcessors(directory)
	return cache, err
}

func machineFacts(text json.RawMessage) (any, error) {
	var request struct {
		Directory string `json:"dir"`
	}
	if err := json.Unmarshal(text, &request); err != nil {
		return nil, err
	}
	response := map[string]any{}
	add := func(name string, value any, err error) {
		if err != nil {
			response[name] = map[string]any{"error": err.Error()}
			return
		}
		response[name] = map[string]any{"ok": value}
	}
	meminfo, err := os.ReadFile(request.Directory + "/proc/meminfo")
	if err != nil {
		return nil, err
	}
	memory, err := parseCapacity(meminfo, memoryLine)
	add("memory", memory, err)
	swap, err := parseCapacity(meminfo, swapLine)
	add("swap", swap, err)
	swaps, err := os.ReadFile(request.Directory + "/proc/swaps")
	if err != nil {
		return nil, err
	}
	add("swaps", isSwapOn(logr.Discard(), swaps), nil)
	devices := request.Directory + "/sys/devices/system"
	readers := systemAt(devices)
	pages, err := sysinfo.GetHugePagesInfo(readers, request.Directory+"/sys/kernel/mm/hugepages/")
	add("pages", pages, err)
	modules, err := machine.GetMachineMemoryByType(devices + "/edac/mc")
	add("modules", modules, err)
	add("cores", []int{
		sysfs.GetUniqueCPUPropertyCount(devices+"/cpu/", sysfs.CPUCoreID),
		sysfs.GetUniqueCPUPropertyCount(devices+"/cpu/", sysfs.CPUPhysicalPackageID),
	}, nil)
	nodes, count, err := sysinfo.GetNodesInfo(readers)
	add("nodes", nodes, err)
	if err == nil {
		found, err := processors.Discover(logr.Discard(), &info.MachineInfo{Topology: nodes, NumCores: count})
		details := map[string][]int{}
		if err == nil {
			for cpu, cpuInfo := range found.CPUDetails {
				details[fmt.Sprint(cpu)] = []int{cpuInfo.CoreID, cpuInfo.SocketID, cpuInfo.NUMANodeID, cpuInfo.UncoreCacheID}
			}
		}
		add("cpus", details, err)
		response["count"] = count
	} else {
		add("cpus", nil, fmt.Errorf("%s", strings.TrimSpace(err.Error())))
	}
	return response, nil
}
