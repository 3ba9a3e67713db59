//go:build former

package main

import csi "github.com/container-storage-interface/spec/lib/go/csi"

// The libraries of the former release do not have what health.go is made of.
var healthCapabilities []csi.NodeServiceCapability_RPC_Type
