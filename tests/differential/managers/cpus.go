package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	cadvisor "github.com/google/cadvisor/info/v1"
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
	"k8s.io/utils/cpuset"
)

func init() { answers["cpus"] = cpus }

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

type cpuStepAnswer struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	CPUs    string `json:"cpus"`
	Default string `json:"default"`
	// null if there is none for the resource.
	Hints *[]hint `json:"hints"`
}

type cpuAnswer struct {
	// Why the policy does not start.
	Error   string          `json:"error"`
	Start   string          `json:"start"`
	Default string          `json:"default"`
	Steps   []cpuStepAnswer `json:"steps"`
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

func (c *chosen) GetAffinity(string, string) topologymanager.TopologyHint {
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
	for _, one := range machine {
		sockets[one.Socket] = true
		if _, ok := nodes[one.Node]; !ok {
			nodes[one.Node] = len(info.Topology)
			info.Topology = append(info.Topology, cadvisor.Node{Id: one.Node})
		}
		node := &info.Topology[nodes[one.Node]]
		key := [3]int{one.Node, one.Socket, one.Core}
		if _, ok := cores[key]; !ok {
			cores[key] = len(node.Cores)
			core := cadvisor.Core{Id: one.Core, SocketID: one.Socket}
			if one.Cache != nil {
				core.UncoreCaches = []cadvisor.Cache{{Id: *one.Cache, Level: 3}}
			}
			node.Cores = append(node.Cores, core)
		}
		core := &node.Cores[cores[key]]
		core.Threads = append(core.Threads, one.CPU)
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
	for _, one := range list {
		to = append(to, plain(one))
	}
	return &to
}

func cpus(raw json.RawMessage) (any, error) {
	var asked cpuQuestion
	if err := json.Unmarshal(raw, &asked); err != nil {
		return nil, err
	}
	gates := fmt.Sprintf("CPUManagerPolicyAlphaOptions=true,PodLevelResourceManagers=%t", asked.PodLevel)
	if err := utilfeature.DefaultMutableFeatureGate.Set(gates); err != nil {
		return nil, err
	}
	logger := klog.Background()
	machine, err := cputopology.Discover(logger, machineInfo(asked.Machine))
	if err != nil {
		return nil, err
	}
	reserved, err := cpuset.Parse(asked.Reserved)
	if err != nil {
		return nil, err
	}
	store := &chosen{policy: asked.Policy}
	var policy cpumanager.Policy
	if asked.Policy == "" {
		policy, err = cpumanager.NewNonePolicy(asked.Options)
	} else {
		policy, err = cpumanager.NewStaticPolicy(logger, machine, asked.Count, reserved, store, asked.Options)
	}
	if err != nil {
		return cpuAnswer{Error: err.Error()}, nil
	}
	directory, err := os.MkdirTemp("", "cpus")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(directory)
	file := filepath.Join(directory, cpuStateFile)
	if asked.File != "" {
		if err := os.WriteFile(file, []byte(asked.File), 0o600); err != nil {
			return nil, err
		}
	}
	known := containermap.NewContainerMap()
	for id, names := range asked.Known {
		known.Add(names[0], names[1], id)
	}
	kept, err := state.NewCheckpointState(logger, directory, cpuStateFile, policy.Name(), known)
	if err != nil {
		return cpuAnswer{Start: err.Error()}, nil
	}
	if err := policy.Start(logger, kept); err != nil {
		return cpuAnswer{Start: err.Error()}, nil
	}
	answer := cpuAnswer{Default: kept.GetDefaultCPUSet().String(), Steps: []cpuStepAnswer{}}
	for _, step := range asked.Steps {
		done := make(chan cpuStepAnswer, 1)
		go func() { done <- cpuStepOf(policy, kept, store, asked.Pods[step.Pod], step) }()
		select {
		case one := <-done:
			answer.Steps = append(answer.Steps, one)
		case <-time.After(cpuStepLimit):
			answer.Hangs = true
			return answer, nil
		}
	}
	written, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	answer.File = string(written)
	return answer, nil
}

func cpuStepOf(policy cpumanager.Policy, kept state.State, store *chosen, pod *v1.Pod, step cpuStep) (answer cpuStepAnswer) {
	defer func() {
		if panicked := recover(); panicked != nil {
			answer.Reason = "panic"
			answer.Message = fmt.Sprint(panicked)
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
		answer.Hints = cpuHints(policy.GetTopologyHints(logger, kept, pod, container))
	case "podHints":
		answer.Hints = cpuHints(policy.GetPodTopologyHints(logger, kept, pod))
	case "allocate":
		store.affinity = step.Affinity
		err = policy.Allocate(logger, kept, pod, container)
	case "allocatePod":
		store.affinity = step.Affinity
		err = policy.AllocatePod(logger, kept, pod)
	case "release":
		err = policy.RemoveContainer(logger, kept, string(pod.UID), step.Container)
	}
	if err != nil {
		result := admission.GetPodAdmitResult(err)
		answer.Reason, answer.Message = result.Reason, result.Message
	}
	if cpus, ok := kept.GetCPUSet(string(pod.UID), step.Container); ok {
		answer.CPUs = cpus.String()
	}
	answer.Default = kept.GetDefaultCPUSet().String()
	return answer
}
