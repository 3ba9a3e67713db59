// Runs whole passes of upstream's eviction manager. The script make adds this file to a copy of
// upstream's package, whose manager is not exported.
package eviction

import (
	"context"
	"encoding/json"
	"fmt"
	"sort"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	statsapi "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	testingclock "k8s.io/utils/clock/testing"
)

type PeerConfig struct {
	Hard, Soft, Grace, Reclaim map[string]string
	Max                        int64
	Transition                 int64
	Local                      bool
	Allocatable                bool
}

type PeerKill struct {
	Pod         string            `json:"pod"`
	Grace       int64             `json:"grace"`
	Message     string            `json:"message"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Disruption  bool              `json:"disruption,omitempty"`
}

type PeerPass struct {
	Second     int64             `json:"at"`
	Summary    *statsapi.Summary `json:"summary"`
	After      *statsapi.Summary `json:"after,omitempty"`
	Conditions []string          `json:"conditions"`
	Kills      []PeerKill        `json:"kills"`
	Events     []string          `json:"events"`
	Reclaimed  []string          `json:"reclaimed"`
}

type PeerCase struct {
	Config PeerConfig      `json:"config"`
	Layout string          `json:"layout"`
	Pods   []*v1.Pod       `json:"-"`
	Specs  json.RawMessage `json:"pods"`
	Passes []PeerPass      `json:"passes"`
}

type peer struct {
	layout    string
	summaries []*statsapi.Summary
	pass      *PeerPass
}

func (p *peer) Get(context.Context, bool) (*statsapi.Summary, error) {
	if len(p.summaries) == 0 {
		return nil, fmt.Errorf("none")
	}
	summary := p.summaries[0]
	p.summaries = p.summaries[1:]
	return summary, nil
}
func (p *peer) GetCPUAndMemoryStats(context.Context) (*statsapi.Summary, error) { return nil, nil }
func (p *peer) HasDedicatedImageFs(context.Context) (bool, error)               { return p.layout != "one", nil }
func (p *peer) HasDedicatedContainerFs(context.Context) (bool, error) {
	return p.layout == "split", nil
}
func (p *peer) DeleteUnusedImages(context.Context) error {
	p.pass.Reclaimed = append(p.pass.Reclaimed, "images")
	return nil
}
func (p *peer) DeleteAllUnusedContainers(context.Context) error {
	p.pass.Reclaimed = append(p.pass.Reclaimed, "containers")
	return nil
}
func (p *peer) Event(object runtime.Object, kind, reason, message string) {}
func (p *peer) Eventf(object runtime.Object, kind, reason, format string, args ...interface{}) {
	p.pass.Events = append(p.pass.Events, kind+" "+reason+" "+fmt.Sprintf(format, args...))
}
func (p *peer) AnnotatedEventf(object runtime.Object, annotations map[string]string, kind, reason, format string, args ...interface{}) {
	p.pass.Kills = append(p.pass.Kills, PeerKill{Message: fmt.Sprintf(format, args...), Annotations: annotations})
}

func PeerRun(c *PeerCase) error {
	p := &peer{layout: c.Layout}
	allocatable := []string{}
	if c.Config.Allocatable {
		allocatable = append(allocatable, "pods")
	}
	thresholds, err := ParseThresholdConfig(allocatable, c.Config.Hard, c.Config.Soft, c.Config.Grace, c.Config.Reclaim)
	if err != nil {
		return err
	}
	start := time.Unix(1000000, 0)
	clock := testingclock.NewFakeClock(start)
	gone := map[types.UID]bool{}
	kill := func(pod *v1.Pod, _ bool, grace *int64, change func(*v1.PodStatus)) error {
		gone[pod.UID] = true
		status := v1.PodStatus{}
		change(&status)
		last := &p.pass.Kills[len(p.pass.Kills)-1]
		if status.Phase != v1.PodFailed || status.Reason != "Evicted" || status.Message != last.Message {
			return fmt.Errorf("status %v", status)
		}
		last.Pod, last.Grace = pod.Name, *grace
		for _, condition := range status.Conditions {
			last.Disruption = condition.Type == v1.DisruptionTarget && condition.Message == last.Message
		}
		return nil
	}
	m := &managerImpl{
		clock: clock, killPodFunc: kill, imageGC: p, containerGC: p, recorder: p, summaryProvider: p,
		config: Config{PressureTransitionPeriod: time.Duration(c.Config.Transition) * time.Second,
			MaxPodGracePeriodSeconds: c.Config.Max, Thresholds: thresholds},
		nodeRef:                       &v1.ObjectReference{Kind: "Node", Name: "n"},
		nodeConditionsLastObservedAt:  nodeConditionsObservedAt{},
		thresholdsFirstObservedAt:     thresholdsObservedAt{},
		localStorageCapacityIsolation: c.Config.Local,
	}
	for i := range c.Passes {
		pass := &c.Passes[i]
		p.pass = pass
		p.summaries = []*statsapi.Summary{pass.Summary}
		if pass.After != nil {
			p.summaries = append(p.summaries, pass.After)
		}
		clock.SetTime(start.Add(time.Duration(pass.Second) * time.Second))
		active := func() []*v1.Pod {
			all := []*v1.Pod{}
			for _, pod := range c.Pods {
				if !gone[pod.UID] {
					all = append(all, pod)
				}
			}
			return all
		}
		if _, err := m.synchronize(context.Background(), p, active); err != nil {
			return err
		}
		for _, condition := range m.nodeConditions {
			pass.Conditions = append(pass.Conditions, string(condition))
		}
		sort.Strings(pass.Conditions)
	}
	return nil
}
