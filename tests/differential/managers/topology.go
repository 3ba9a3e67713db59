package main

import (
	"context"
	"encoding/json"
	"errors"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager/bitmask"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

func init() { handlers["topology"] = topology }

type node struct {
	ID        int      `json:"id"`
	Distances []uint64 `json:"distances"`
}

// A hint: which nodes, none for any of them.
type hint struct {
	Nodes     []int `json:"nodes"`
	Preferred bool  `json:"preferred"`
}

type hints map[string][]hint

// What a provider says of each container, and of the pod.
type provider struct {
	Containers []hints `json:"containers"`
	Pod        hints   `json:"pod"`
	// The container for which Allocate fails, if it is not negative.
	Fails int `json:"fails"`

	chosen *[]hint
	store  topologymanager.Store
}

type topologyQuestion struct {
	Policy     string            `json:"policy"`
	Scope      string            `json:"scope"`
	Options    map[string]string `json:"options"`
	Nodes      []node            `json:"nodes"`
	Containers int               `json:"containers"`
	Providers  []*provider       `json:"providers"`
}

type topologyResult struct {
	Error   string `json:"error"`
	Admit   bool   `json:"admit"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	// What each Allocate found, in order.
	Chosen []hint `json:"chosen"`
}

func converted(from hints) map[string][]topologymanager.TopologyHint {
	if from == nil {
		return nil
	}
	to := map[string][]topologymanager.TopologyHint{}
	for resource, list := range from {
		to[resource] = nil
		if list != nil {
			to[resource] = []topologymanager.TopologyHint{}
		}
		for _, hint := range list {
			converted := topologymanager.TopologyHint{Preferred: hint.Preferred}
			if hint.Nodes != nil {
				converted.NUMANodeAffinity, _ = bitmask.NewBitMask(hint.Nodes...)
			}
			to[resource] = append(to[resource], converted)
		}
	}
	return to
}

// The containers are called by their number, which has two digits.
func index(container *v1.Container) int {
	return int(container.Name[0]-'0')*10 + int(container.Name[1]-'0')
}

func (p *provider) GetTopologyHints(_ klog.Logger, _ *v1.Pod, container *v1.Container, _ lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	return converted(p.Containers[index(container)])
}

func (p *provider) GetPodTopologyHints(klog.Logger, *v1.Pod, lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	return converted(p.Pod)
}

func (p *provider) AllocatePod(klog.Logger, *v1.Pod, lifecycle.Operation) error {
	return errors.New("not used")
}

func (p *provider) Allocate(_ context.Context, pod *v1.Pod, container *v1.Container, _ lifecycle.Operation) error {
	found := p.store.GetAffinity(klog.Background(), string(pod.UID), container.Name)
	*p.chosen = append(*p.chosen, plain(found))
	if index(container) == p.Fails {
		return errors.New("no room")
	}
	return nil
}

func plain(from topologymanager.TopologyHint) hint {
	to := hint{Preferred: from.Preferred}
	if from.NUMANodeAffinity != nil {
		to.Nodes = append([]int{}, from.NUMANodeAffinity.GetBits()...)
	}
	return to
}

func topology(raw json.RawMessage) (any, error) {
	var request topologyQuestion
	if err := json.Unmarshal(raw, &request); err != nil {
		return nil, err
	}
	var nodes []cadvisor.Node
	for _, node := range request.Nodes {
		nodes = append(nodes, cadvisor.Node{Id: node.ID, Distances: node.Distances})
	}
	manager, err := topologymanager.NewManager(klog.Background(), nodes, request.Policy, request.Scope, request.Options)
	if err != nil {
		return topologyResult{Error: err.Error()}, nil
	}
	var response topologyResult
	for _, provider := range request.Providers {
		provider.chosen = &response.Chosen
		provider.store = manager
		manager.AddHintProvider(klog.Background(), provider)
	}
	pod := &v1.Pod{}
	pod.UID = types.UID("pod")
	for number := range request.Containers {
		name := string(rune('0'+number/10)) + string(rune('0'+number%10))
		pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Name: name})
	}
	result := manager.Admit(context.Background(), &lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation})
	response.Admit, response.Reason, response.Message = result.Admit, result.Reason, result.Message
	return response, nil
}
