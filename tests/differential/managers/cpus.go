package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/admission"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/state"
	cputopology "k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/topology"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager/bitmask"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
	"k8s.io/utils/cpuset"
)

func init() { handlers["cpus"] = cpus }

const cpuStateFile = "cpu_manager_state"

// Upstream's search for NUMA nodes can go on for ever; no other step takes this long.
const cpuStepLimit = 5 * time.Second

type cpuOfMachine struct {
	CPU    int  `json:"cpu"`
	Core   int  `json:"core"`
	Socket int  `json:"socket"`
	Node   int  `json:"node"`
	Cache  *int `json:"cache"`
}

type cpuStep struct {
	// hints, podHints, allocate, allocatePod, release
	Do        string `json:"do"`
	Pod       int    `json:"pod"`
	Container string `json:"container"`
	// The NUMA nodes that the topology manager chose; null for none.
	Affinity []int `json:"affinity"`
}

type cpuQuestion struct {
	Machine  []cpuOfMachine    `json:"machine"`
	Reserved string            `json:"reserved"`
	Count    int               `json:"count"`
	Options  map[string]string `json:"options"`
	// The topology manager's policy.
	Policy string    `json:"policy"`
	Pods   []*v1.Pod `json:"pods"`
	// The state file as it is at the start, if it is not empty, and the containers that run, by
	// their ID.
	File  string               `json:"file"`
	Known map[string][2]string `json:"known"`
	Steps []cpuStep            `json:"steps"`
	// The gate PodLevelResourceManagers, with which the file has another format.
	PodLevel bool `json:"podLevel"`
}

type cpuStepResult struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	CPUs    string `json:"cpus"`
	Default string `json:"default"`
	// null if there is none for the resource.
	Hints *[]hint `json:"hints"`
}

type cpuResult struct {
	// Why the policy does not start.
	Error   string          `json:"error"`
	Start   string          `json:"start"`
	Default string          `json:"default"`
	Steps   []cpuStepResult `json:"steps"`
	// The state file at the end.
	File string `json:"file"`
	// A step did not end; this program cannot be used any more.
	Hangs bool `json:"hangs"`
}

// What the policy asks the topology manager.
type chosen struct {
	policy   string
	affinity []int
}

type policyName struct {
	topologymanager.Policy
	name string
}

func (p policyName) Name() string { return p.name }

func (c *chosen) GetAffinity(klog.Logger, string, string) topologymanager.TopologyHint {
	if c.affinity == nil {
		return topologymanager.TopologyHint{}
	}
	mask, _ := bitmask.NewBitMask(c.affinity...)
	return topologymanager.TopologyHint{NUMANodeAffinity: mask, Preferred: true}
}

func (c *chosen) GetPolicy() topologymanager.Policy { return policyName{name: c.policy} }

func (c *chosen) Name() string { return "container" }

func machineInfo(machine []cpuOfMachine) *cadvisor.MachineInfo {
	info := &cadvisor.MachineInfo{NumCores: len(machine)}
	sockets := map[int]bool{}
	nodes := map[int]int{}
	cores := map[[3]int]int{}
	for _, cpu := range machine {
		sockets[cpu.Socket] = true
		if _, ok := nodes[cpu.Node]; !ok {
			nodes[cpu.Node] = len(info.Topology)
			info.Topology = append(info.Topology, cadvisor.Node{Id: cpu.Node})
		}
		node := &info.Topology[nodes[cpu.Node]]
		key := [3]int{cpu.Node, cpu.Socket, cpu.Core}
		if _, ok := cores[key]; !ok {
			cores[key] = len(node.Cores)
			core := cadvisor.Core{Id: cpu.Core, SocketID: cpu.Socket}
			if cpu.Cache != nil {
				core.UncoreCaches = []cadvisor.Cache{{Id: *cpu.Cache, Level: 3}}
			}
			node.Cores = append(node.Cores, core)
		}
		core := &node.Cores[cores[key]]
		core.Threads = append(core.Threads, cpu.CPU)
	}
	info.NumSockets = len(sockets)
	return info
}

func cpuHints(from map[string][]topologymanager.TopologyHint) *[]hint {
	list, ok := from[string(v1.ResourceCPU)]
	if !ok {
		return nil
	}
	to := []hint{}
	for _, hint := range list {
		to = append(to, plain(hint))
	}
	return &to
}

func cpus(raw json.RawMessage) (any, error) {
	var request cpuQuestion
	if err := json.Unmarshal(raw, &request); err != nil {
		return nil, err
	}
	gates := fmt.Sprintf("CPUManagerPolicyAlphaOptions=true,PodLevelResourceManagers=%t", request.PodLevel)
	if err := utilfeature.DefaultMutableFeatureGate.Set(gates); err != nil {
		return nil, err
	}
	logger := klog.Background()
	machine, err := cputopology.Discover(logger, machineInfo(request.Machine))
	if err != nil {
		return nil, err
	}
	reserved, err := cpuset.Parse(request.Reserved)
	if err != nil {
		return nil, err
	}
	store := &chosen{policy: request.Policy}
	var policy cpumanager.Policy
	if request.Policy == "" {
		policy, err = cpumanager.NewNonePolicy(request.Options)
	} else {
		policy, err = cpumanager.NewStaticPolicy(logger, machine, request.Count, reserved, store, request.Options)
	}
	if err != nil {
		return cpuResult{Error: err.Error()}, nil
	}
	directory, err := os.MkdirTemp("", "cpus")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(directory)
	file := filepath.Join(directory, cpuStateFile)
	if request.File != "" {
		if err := os.WriteFile(file, []byte(request.File), 0o600); err != nil {
			return nil, err
		}
	}
	known := containermap.NewContainerMap()
	for id, names := range request.Known {
		known.Add(names[0], names[1], id)
	}
	saved, err := state.NewCheckpointState(logger, directory, cpuStateFile, policy.Name(), known)
	if err != nil {
		return cpuResult{Start: err.Error()}, nil
	}
	if err := policy.Start(logger, saved); err != nil {
		return cpuResult{Start: err.Error()}, nil
	}
	response := cpuResult{Default: saved.GetDefaultCPUSet().String(), Steps: []cpuStepResult{}}
	for _, step := range request.Steps {
		done := make(chan cpuStepResult, 1)
		go func() { done <- cpuStepOf(policy, saved, store, request.Pods[step.Pod], step) }()
		select {
		case stepResult := <-done:
			response.Steps = append(response.Steps, stepResult)
		case <-time.After(cpuStepLimit):
			response.Hangs = true
			return response, nil
		}
	}
	written, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	response.File = string(written)
	return response, nil
}

func cpuStepOf(policy cpumanager.Policy, saved state.State, store *chosen, pod *v1.Pod, step cpuStep) (stepResult cpuStepResult) {
	defer func() {
		if panicked := recover(); panicked != nil {
			stepResult.Reason = "panic"
			stepResult.Message = fmt.Sprint(panicked)
		}
	}()
	logger := klog.Background()
	var container *v1.Container
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for number := range list {
			if list[number].Name == step.Container {
				container = &list[number]
			}
		}
	}
	var err error
	switch step.Do {
	case "hints":
		stepResult.Hints = cpuHints(policy.GetTopologyHints(logger, saved, pod, container, lifecycle.AddOperation))
	case "podHints":
		stepResult.Hints = cpuHints(policy.GetPodTopologyHints(logger, saved, pod, lifecycle.AddOperation))
	case "allocate":
		store.affinity = step.Affinity
		err = policy.Allocate(logger, saved, pod, container, lifecycle.AddOperation)
	case "allocatePod":
		store.affinity = step.Affinity
		err = policy.AllocatePod(logger, saved, pod, lifecycle.AddOperation)
	case "release":
		err = policy.RemoveContainer(logger, saved, string(pod.UID), step.Container)
	}
	if err != nil {
		result := admission.GetPodAdmitResult(err)
		stepResult.Reason, stepResult.Message = result.Reason, result.Message
	}
	if cpus, ok := saved.GetCPUSet(string(pod.UID), step.Container); ok {
		stepResult.CPUs = cpus.String()
	}
	stepResult.Default = saved.GetDefaultCPUSet().String()
	return stepResult
}
