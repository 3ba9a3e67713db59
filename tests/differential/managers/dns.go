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
	handlers["dns"] = func(text json.RawMessage) (any, error) {
		var request struct {
			Pod     v1.Pod   `json:"pod"`
			File    string   `json:"file"`
			Servers []string `json:"servers"`
			Domain  string   `json:"domain"`
			NodeIPs []string `json:"node_ips"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		addresses := func(texts []string) (all []net.IP) {
			for _, text := range texts {
				all = append(all, netutils.ParseIPSloppy(text))
			}
			return all
		}
		recorder := record.NewFakeRecorder(100)
		node := &v1.ObjectReference{Kind: "Node", Name: "n"}
		configurer := dns.NewConfigurer(recorder, node, addresses(request.NodeIPs), addresses(request.Servers), request.Domain, request.File)
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
		response := map[string]any{}
		settings, err := configurer.GetPodDNS(context.Background(), &request.Pod)
		if err != nil {
			response["error"] = err.Error()
		} else {
			response["servers"], response["searches"], response["options"] = bytesOf(settings.Servers), bytesOf(settings.Searches), bytesOf(settings.Options)
		}
		response["events"] = noted()
		if request.File != "" {
			configurer.CheckLimitsForResolvConf(klog.Background())
			response["limits"] = noted()
		}
		return response, nil
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
