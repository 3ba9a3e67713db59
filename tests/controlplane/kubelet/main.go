// The Go kubelet: the incumbent that the end-to-end suite is proven on and measured against.
package main

import (
	"context"
	"flag"
	"os"
	"slices"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	setStatisticsSocket()
	os.Exit(cli.Run(app.NewKubeletCommand(context.Background())))
}

// The statistics have a connection to containerd of their own. Since 1.37 the kubelet has no flag for its
// socket, which is not at the usual place here: this takes "--containerd SOCKET" off the command line.
func setStatisticsSocket() {
	index := slices.Index(os.Args, "--containerd")
	if index < 0 || index+1 >= len(os.Args) {
		return
	}
	if err := flag.Set("containerd", os.Args[index+1]); err != nil {
		panic(err)
	}
	os.Args = slices.Delete(os.Args, index, index+2)
}
