//go:build !former

package main

import (
	"context"
	"strings"
	"time"

	csi "github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// A report counts for 30 s: this is well below, also on a slow machine.
const reportPeriod = 5 * time.Second

// WatchHealthStatus reports all devices as healthy, again and again, until the kubelet goes.
func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	for {
		now := time.Now()
		var report kubeletplugin.DeviceHealthReport
		for _, name := range d.devices {
			report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
				PoolName: d.pool, DeviceName: name, Health: kubeletplugin.HealthStatusHealthy, LastUpdated: now,
			})
		}
		select {
		case reports <- report:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(reportPeriod):
		case <-ctx.Done():
			return nil
		}
	}
}

// What the driver of volumes can do besides.
var healthCapabilities = []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH}

// NodeGetVolumeHealth finds a volume degraded whose name has "unwell".
func (s *storage) NodeGetVolumeHealth(_ context.Context, request *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	health := &csi.VolumeHealth{VolumeId: request.VolumeId}
	if strings.Contains(request.VolumeId, "unwell") {
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{{
			Status: csi.VolumeHealthErrorType_DEGRADED, Reason: "SectorLost", Message: "a sector is lost",
		}}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}, nil
}
