// kubeadm of the release under test, which makes a node of a machine on which coracle is the kubelet.
package main

import (
	"k8s.io/kubernetes/cmd/kubeadm/app"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/errors"
)

func main() { errors.HandleError(app.Run()) }
