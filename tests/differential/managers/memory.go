package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/apis/config"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/memorymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

func init() { handlers["memory"] = memory }

const stateFile = "memory_manager_state"

type memoryNode struct {
	node
	Memory uint64 `json:"memory"`
	// KiB per page, and how many pages.
	HugePages [][2]uint64 `json:"hugePages"`
	// Bytes by resource.
	Reserved map[string]int64 `json:"reserved"`
}

type memoryStep struct {
	// admit, start, stop, end, hints, restart
	Do        string  `json:"do"`
	Pod       *v1.Pod `json:"pod"`
	UID       string  `json:"uid"`
	Container string  `json:"container"`
}

type memoryQuestion struct {
	Policy string       `json:"policy"`
	Scope  string       `json:"scope"`
	Nodes  []memoryNode `json:"nodes"`
	Steps  []memoryStep `json:"steps"`
	// A state file of coracle after the last step.
	TakeOver string `json:"takeOver"`
	// The gate PodLevelResourceManagers.
	PodLevel bool `json:"podLevel"`
}

type memoryResult struct {
	Admit   bool              `json:"admit"`
	Reason  string            `json:"reason"`
	Message string            `json:"message"`
	Hints   map[string][]hint `json:"hints"`
	Mems    map[string][]int  `json:"mems"`
	State   string            `json:"state"`
}

type memoryResponse struct {
	// Why the manager does not start.
	Error   string         `json:"error"`
	Results []memoryResult `json:"results"`
	// Why it does not start from TakeOver.
	TakeOver string `json:"takeOver"`
}

type ready struct{}

func (ready) AddSource(string) {}
func (ready) AllReady() bool   { return true }

// The two managers of a node, and its pods.
type memoryHost struct {
	request *memoryQuestion
	dir     string
	machine *cadvisor.MachineInfo
	manager memorymanager.Manager
	admits  topologymanager.Manager
	active  []*v1.Pod
	// Containers that started, as a runtime lists them at a start of the kubelet.
	known [][2]string
}

func (h *memoryHost) start() error {
	topology, err := topologymanager.NewManager(klog.Background(), h.machine.Topology, h.request.Policy, h.request.Scope, nil)
	if err != nil {
		return err
	}
	total := v1.ResourceList{}
	var reserved []config.MemoryReservation
	for _, node := range h.request.Nodes {
		limits := v1.ResourceList{}
		for name, bytes := range node.Reserved {
			quantity := *resource.NewQuantity(bytes, resource.BinarySI)
			limits[v1.ResourceName(name)] = quantity
			sum := total[v1.ResourceName(name)]
			sum.Add(quantity)
			total[v1.ResourceName(name)] = sum
		}
		if len(limits) > 0 {
			reserved = append(reserved, config.MemoryReservation{NumaNode: int32(node.ID), Limits: limits})
		}
	}
	h.manager, err = memorymanager.NewManager(klog.Background(), "Static", h.machine, total, reserved, h.dir, topology)
	if err != nil {
		return err
	}
	topology.AddHintProvider(klog.Background(), h.manager)
	h.admits = topology
	active := func() []*v1.Pod { return h.active }
	containers := containermap.NewContainerMap()
	for _, entry := range h.known {
		containers.Add(entry[0], entry[1], entry[0]+"/"+entry[1])
	}
	return h.manager.Start(context.Background(), active, ready{}, nil, nil, containers)
}

func (h *memoryHost) find(uid string) *v1.Pod {
	for _, pod := range h.active {
		if pod.UID == types.UID(uid) {
			return pod
		}
	}
	return nil
}

func (h *memoryHost) remove(uid string) {
	var left []*v1.Pod
	for _, pod := range h.active {
		if pod.UID != types.UID(uid) {
			left = append(left, pod)
		}
	}
	h.active = left
}

func plainHints(from map[string][]topologymanager.TopologyHint) map[string][]hint {
	to := map[string][]hint{}
	for resource, list := range from {
		if list == nil {
			continue
		}
		to[resource] = []hint{}
		for _, hint := range list {
			to[resource] = append(to[resource], plain(hint))
		}
	}
	return to
}

func (h *memoryHost) do(step memoryStep) (memoryResult, error) {
	var result memoryResult
	switch step.Do {
	case "admit":
		h.active = append(h.active, step.Pod)
		decided := h.admits.Admit(context.Background(), &lifecycle.PodAdmitAttributes{Pod: step.Pod, Operation: lifecycle.AddOperation})
		result.Admit, result.Reason, result.Message = decided.Admit, decided.Reason, decided.Message
		result.Mems = map[string][]int{}
		for _, list := range [][]v1.Container{step.Pod.Spec.InitContainers, step.Pod.Spec.Containers} {
			for _, container := range list {
				nodes := h.manager.GetMemoryNUMANodes(klog.Background(), step.Pod, &container)
				if nodes != nil {
					result.Mems[container.Name] = sets.List(nodes)
				}
			}
		}
		if !decided.Admit {
			h.remove(string(step.Pod.UID))
		}
	case "hints":
		// As if it was about to be admitted.
		h.active = append(h.active, step.Pod)
		if h.request.Scope == "pod" {
			result.Hints = plainHints(h.manager.GetPodTopologyHints(klog.Background(), step.Pod, lifecycle.AddOperation))
		} else {
			result.Hints = plainHints(h.manager.GetTopologyHints(klog.Background(), step.Pod, &step.Pod.Spec.Containers[0], lifecycle.AddOperation))
		}
		h.remove(string(step.Pod.UID))
	case "start":
		pod := h.find(step.UID)
		h.known = append(h.known, [2]string{step.UID, step.Container})
		for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for index := range list {
				if list[index].Name == step.Container {
					h.manager.AddContainer(klog.Background(), pod, &list[index], step.UID+"/"+step.Container)
				}
			}
		}
	case "stop":
		if err := h.manager.RemoveContainer(klog.Background(), step.UID+"/"+step.Container); err != nil {
			return result, err
		}
	case "end":
		h.remove(step.UID)
	case "restart":
		if err := h.start(); err != nil {
			return result, fmt.Errorf("restart: %w", err)
		}
	default:
		return result, fmt.Errorf("unknown step %q", step.Do)
	}
	state, err := os.ReadFile(filepath.Join(h.dir, stateFile))
	result.State = string(state)
	return result, err
}

func memory(raw json.RawMessage) (any, error) {
	var request memoryQuestion
	if err := json.Unmarshal(raw, &request); err != nil {
		return nil, err
	}
	gates := fmt.Sprintf("PodLevelResourceManagers=%t", request.PodLevel)
	if err := utilfeature.DefaultMutableFeatureGate.Set(gates); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "managers")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	machine := &cadvisor.MachineInfo{}
	for _, described := range request.Nodes {
		node := cadvisor.Node{Id: described.ID, Memory: described.Memory, Distances: described.Distances}
		for _, pages := range described.HugePages {
			node.HugePages = append(node.HugePages, cadvisor.HugePagesInfo{PageSize: pages[0], NumPages: pages[1]})
		}
		machine.Topology = append(machine.Topology, node)
	}
	host := &memoryHost{request: &request, dir: dir, machine: machine}
	var response memoryResponse
	if err := host.start(); err != nil {
		return memoryResponse{Error: err.Error()}, nil
	}
	for _, step := range request.Steps {
		result, err := host.do(step)
		if err != nil {
			response.Error = err.Error()
			return response, nil
		}
		response.Results = append(response.Results, result)
	}
	if request.TakeOver != "" {
		if err := os.WriteFile(filepath.Join(dir, stateFile), []byte(request.TakeOver), 0o600); err != nil {
			return nil, err
		}
		if err := host.start(); err != nil {
			response.TakeOver = err.Error()
		}
	}
	return response, nil
}
