package main

import (
	"context"
	"encoding/json"
	"net"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/network/dns"
	netutils "k8s.io/utils/net"
)

// The resolver settings of a pod, and the warnings of the node's file.
func init() {
	answers["dns"] = func(text json.RawMessage) (any, error) {
		var asked struct {
			Pod     v1.Pod   `json:"pod"`
			File    string   `json:"file"`
			Servers []string `json:"servers"`
			Domain  string   `json:"domain"`
			NodeIPs []string `json:"node_ips"`
		}
		if err := json.Unmarshal(text, &asked); err != nil {
			return nil, err
		}
		addresses := func(texts []string) (all []net.IP) {
			for _, one := range texts {
				all = append(all, netutils.ParseIPSloppy(one))
			}
			return all
		}
		recorder := record.NewFakeRecorder(100)
		node := &v1.ObjectReference{Kind: "Node", Name: "n"}
		configurer := dns.NewConfigurer(recorder, node, addresses(asked.NodeIPs), addresses(asked.Servers), asked.Domain, asked.File)
		noted := func() (all []string) {
			for len(recorder.Events) > 0 {
				event := <-recorder.Events
				// The event about the node repeats that about the pod.
				if !strings.Contains(event, "MissingClusterDNS kubelet does not") {
					all = append(all, event)
				}
			}
			return all
		}
		answer := map[string]any{}
		settings, err := configurer.GetPodDNS(context.Background(), &asked.Pod)
		if err != nil {
			answer["error"] = err.Error()
		} else {
			answer["servers"], answer["searches"], answer["options"] = bytesOf(settings.Servers), bytesOf(settings.Searches), bytesOf(settings.Options)
		}
		answer["events"] = noted()
		if asked.File != "" {
			configurer.CheckLimitsForResolvConf(klog.Background())
			answer["limits"] = noted()
		}
		return answer, nil
	}
}

// Texts that may not be UTF-8.
func bytesOf(texts []string) [][]byte {
	all := [][]byte{}
	for _, text := range texts {
		all = append(all, []byte(text))
	}
	return all
}
