package main

import (
	"encoding/json"
	"fmt"

	allocations "k8s.io/kubernetes/pkg/kubelet/allocation/state"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	devices "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"
	claims "k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
)

// What the kubelet writes of a state file that it has read.
func init() {
	handlers["checkpoint"] = func(text json.RawMessage) (any, error) {
		var request struct {
			File string `json:"file"`
			Data string `json:"data"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, err
		}
		written, err := rewrite(request.File, []byte(request.Data))
		if err != nil {
			return map[string]any{"error": err.Error()}, nil
		}
		return map[string]any{"written": string(written)}, nil
	}
}

func rewrite(file string, blob []byte) ([]byte, error) {
	switch file {
	case "kubelet_internal_checkpoint":
		found := devices.New(nil, nil)
		if err := restore(found, blob); err != nil {
			return nil, err
		}
		return devices.New(found.GetData()).MarshalCheckpoint()
	case "dra_manager_state":
		found := &claims.Checkpoint{}
		if err := restore(found, blob); err != nil {
			return nil, err
		}
		list, err := found.GetClaimInfoStateList()
		if err != nil {
			return nil, err
		}
		again, err := claims.NewCheckpoint(list)
		if err != nil {
			return nil, err
		}
		return again.MarshalCheckpoint()
	case "allocated_pods_state", "actuated_pods_state":
		found := &allocations.Checkpoint{}
		if err := restore(found, blob); err != nil {
			return nil, err
		}
		resources, err := found.GetPodResourceCheckpointInfo()
		if err != nil {
			return nil, err
		}
		again, err := allocations.NewCheckpoint(resources)
		if err != nil {
			return nil, err
		}
		return again.MarshalCheckpoint()
	}
	return nil, fmt.Errorf("%q is not read", file)
}

// As the checkpoint manager reads a file.
func restore(checkpoint checkpointmanager.Checkpoint, blob []byte) error {
	if err := checkpoint.UnmarshalCheckpoint(blob); err != nil {
		return err
	}
	return checkpoint.VerifyChecksum()
}
