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
	info "github.com/google/cadvisor/info/v1"
	"github.com/google/cadvisor/machine"
	"github.com/google/cadvisor/utils/sysfs"
	"github.com/google/cadvisor/utils/sysinfo"
	processors "k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/topology"
	_ "k8s.io/kubernetes/pkg/kubelet/util/swap"
)

// Facts about the machine, from a tree with "proc" and "sys" in it.
func init() { answers["machine"] = machineFacts }

//go:linkname parseCapacity github.com/google/cadvisor/machine.parseCapacity
func parseCapacity(text []byte, line *regexp.Regexp) (uint64, error)

//go:linkname memoryLine github.com/google/cadvisor/machine.memoryCapacityRegexp
var memoryLine *regexp.Regexp

//go:linkname swapLine github.com/google/cadvisor/machine.swapCapacityRegexp
var swapLine *regexp.Regexp

//go:linkname isSwapOn k8s.io/kubernetes/pkg/kubelet/util/swap.isSwapOnAccordingToProcSwaps
func isSwapOn(logger logr.Logger, text []byte) bool

//go:linkname countProcessors github.com/google/cadvisor/utils/sysfs.getCPUCount
func countProcessors(directory string) (int, error)

// The readers of sysfs, in another place than /sys/devices/system.
type system struct {
	sysfs.SysFs
	at string
}

func systemAt(at string) system {
	real := sysfs.NewRealSysFs()
	field := reflect.ValueOf(real).Elem().FieldByName("cpuPath")
	reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem().SetString(at + "/cpu")
	return system{real, at}
}

func (s system) GetNodesPaths() ([]string, error) { return filepath.Glob(s.at + "/node/node*[0-9]") }

func (s system) GetCPUsPaths(path string) ([]string, error) {
	if path == "/sys/devices/system/cpu" {
		path = s.at + "/cpu"
	}
	return s.SysFs.GetCPUsPaths(path)
}

func (s system) caches(cpu int) string { return fmt.Sprintf("%s/cpu/cpu%d/cache", s.at, cpu) }

func (s system) GetCaches(cpu int) ([]os.FileInfo, error) {
	entries, err := os.ReadDir(s.caches(cpu))
	if err != nil {
		return nil, err
	}
	var all []os.FileInfo
	for _, entry := range entries {
		one, err := entry.Info()
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// The directory is a constant in cadvisor, so these files are read here with the same formats.
func (s system) GetCacheInfo(cpu int, name string) (sysfs.CacheInfo, error) {
	var cache sysfs.CacheInfo
	directory := filepath.Join(s.caches(cpu), name)
	for _, one := range []struct {
		file, format string
		value        any
	}{{"id", "%d", &cache.Id}, {"size", "%dK", &cache.Size}, {"level", "%d", &cache.Level}} {
		text, err := os.ReadFile(filepath.Join(directory, one.file))
		if err != nil {
			return cache, err
		}
		if _, err := fmt.Sscanf(string(text), one.format, one.value); err != nil {
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
	var asked struct {
		Directory string `json:"dir"`
	}
	if err := json.Unmarshal(text, &asked); err != nil {
		return nil, err
	}
	answer := map[string]any{}
	add := func(name string, value any, err error) {
		if err != nil {
			answer[name] = map[string]any{"error": err.Error()}
			return
		}
		answer[name] = map[string]any{"ok": value}
	}
	meminfo, err := os.ReadFile(asked.Directory + "/proc/meminfo")
	if err != nil {
		return nil, err
	}
	memory, err := parseCapacity(meminfo, memoryLine)
	add("memory", memory, err)
	swap, err := parseCapacity(meminfo, swapLine)
	add("swap", swap, err)
	swaps, err := os.ReadFile(asked.Directory + "/proc/swaps")
	if err != nil {
		return nil, err
	}
	add("swaps", isSwapOn(logr.Discard(), swaps), nil)
	at := asked.Directory + "/sys/devices/system"
	readers := systemAt(at)
	pages, err := sysinfo.GetHugePagesInfo(readers, asked.Directory+"/sys/kernel/mm/hugepages/")
	add("pages", pages, err)
	modules, err := machine.GetMachineMemoryByType(at + "/edac/mc")
	add("modules", modules, err)
	add("cores", []int{
		sysfs.GetUniqueCPUPropertyCount(at+"/cpu/", sysfs.CPUCoreID),
		sysfs.GetUniqueCPUPropertyCount(at+"/cpu/", sysfs.CPUPhysicalPackageID),
	}, nil)
	nodes, count, err := sysinfo.GetNodesInfo(readers)
	add("nodes", nodes, err)
	if err == nil {
		found, err := processors.Discover(logr.Discard(), &info.MachineInfo{Topology: nodes, NumCores: count})
		details := map[string][]int{}
		if err == nil {
			for cpu, one := range found.CPUDetails {
				details[fmt.Sprint(cpu)] = []int{one.CoreID, one.SocketID, one.NUMANodeID, one.UncoreCacheID}
			}
		}
		add("cpus", details, err)
		answer["count"] = count
	} else {
		add("cpus", nil, fmt.Errorf("%s", strings.TrimSpace(err.Error())))
	}
	return answer, nil
}
