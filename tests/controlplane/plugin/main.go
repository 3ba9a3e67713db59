// Plugins of a node for the tests, made of the libraries that real plugins are made of.
//
//	plugin device --socket-dir DIR --registration SOCKET --resource NAME --devices N
//	plugin csi --root DIR --driver NAME --node NAME --state DIR
//	plugin claims --kubeconfig FILE --node NAME --driver NAME --root DIR --cdi DIR --devices N
//
// "device" is a device plugin. Its devices are dev-0, dev-1 and so on; a container gets the variable
// DEVICES with their names. It registers with the kubelet's socket, and again when that is made
// anew.
// "claims" is a driver for resource claims. It publishes its devices, and a container gets the
// variable CLAIMED_<device> by CDI. "csi" is a driver for volumes (csi.go). All print a line per call, and end with SIGTERM.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	resource "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	device "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	stub "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("which plugin? device, claims or csi"))
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	var err error
	switch name := os.Args[1]; name {
	case "device":
		err = devices(ctx, os.Args[2:])
	case "csi":
		err = drivers(ctx, os.Args[2:])
	case "claims":
		err = claims(ctx, os.Args[2:])
	default:
		err = fmt.Errorf("%q is no plugin", name)
	}
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "plugin:", err)
	os.Exit(1)
}

func devices(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("device", flag.ExitOnError)
	dir := flags.String("socket-dir", "", "where the plugin's socket is made")
	registration := flags.String("registration", "", "the kubelet's socket")
	name := flags.String("resource", "", "the name of the resource")
	count := flags.Int("devices", 2, "the number of devices")
	if err := flags.Parse(args); err != nil {
		return err
	}
	all := make([]*device.Device, *count)
	for i := range all {
		all[i] = &device.Device{ID: fmt.Sprintf("dev-%d", i), Health: device.Healthy}
	}
	socket := filepath.Join(*dir, "test.sock")
	plugin := stub.NewDevicePluginStub(klog.FromContext(ctx), all, socket, *name, false, false)
	plugin.SetAllocFunc(func(request *device.AllocateRequest, _ map[string]*device.Device) (*device.AllocateResponse, error) {
		response := &device.AllocateResponse{}
		for _, container := range request.ContainerRequests {
			ids := strings.Join(container.DevicesIds, ",")
			fmt.Println("Allocate", ids)
			response.ContainerResponses = append(response.ContainerResponses,
				&device.ContainerAllocateResponse{Envs: map[string]string{"DEVICES": ids}})
		}
		return response, nil
	})
	if err := plugin.Start(ctx); err != nil {
		return err
	}
	if err := plugin.Register(ctx, *registration, *name, ""); err != nil {
		return err
	}
	fmt.Println("Registered")
	plugin.SetRegisterControlFunc(func() bool { return true })
	go plugin.Watch(ctx, *registration, *name, "")
	<-ctx.Done()
	return plugin.Stop(klog.FromContext(ctx))
}

type driver struct {
	name, cdi string
	// What it publishes.
	pool    string
	devices []string
}

func claims(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("claims", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "with the rights of a driver")
	node := flags.String("node", "", "the name of the node")
	name := flags.String("driver", "", "the name of the driver")
	root := flags.String("root", "", "the kubelet's root directory")
	cdi := flags.String("cdi", "/var/run/cdi", "the directory of CDI files")
	count := flags.Int("devices", 2, "the number of devices")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(*root, "plugins", *name)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}
	own := &driver{name: *name, cdi: *cdi, pool: *node}
	for i := range *count {
		own.devices = append(own.devices, fmt.Sprintf("dev-%d", i))
	}
	helper, err := kubeletplugin.Start(ctx, own,
		kubeletplugin.DriverName(*name),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(*node),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(*root, "plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(data))
	if err != nil {
		return err
	}
	defer helper.Stop()
	slice := resourceslice.Slice{}
	for _, name := range own.devices {
		slice.Devices = append(slice.Devices, resource.Device{Name: name})
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{slice}}
	published := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{own.pool: pool}}
	if err := helper.PublishResources(ctx, published); err != nil {
		return err
	}
	fmt.Println("Published")
	<-ctx.Done()
	return nil
}

func (d *driver) file(claim types.UID) string {
	return filepath.Join(d.cdi, fmt.Sprintf("%s-%s.json", d.name, claim))
}

// PrepareResourceClaims writes a CDI file per claim.
func (d *driver) PrepareResourceClaims(_ context.Context, claims []*resource.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		fmt.Println("Prepare", claim.Name)
		results[claim.UID] = d.prepare(claim)
	}
	return results, nil
}

func (d *driver) prepare(claim *resource.ResourceClaim) kubeletplugin.PrepareResult {
	var result kubeletplugin.PrepareResult
	if claim.Status.Allocation == nil {
		return kubeletplugin.PrepareResult{Err: fmt.Errorf("claim %s is not allocated", claim.Name)}
	}
	kind := d.name + "/claim"
	var made []any
	for _, allocated := range claim.Status.Allocation.Devices.Results {
		if allocated.Driver != d.name {
			continue
		}
		name := fmt.Sprintf("%s-%s", claim.UID, allocated.Device)
		variable := "CLAIMED_" + strings.ReplaceAll(allocated.Device, "-", "_") + "=" + claim.Name
		made = append(made, map[string]any{
			"name":           name,
			"containerEdits": map[string]any{"env": []string{variable}},
		})
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests:     []string{allocated.Request},
			PoolName:     allocated.Pool,
			DeviceName:   allocated.Device,
			CDIDeviceIDs: []string{kind + "=" + name},
		})
	}
	text, err := json.Marshal(map[string]any{"cdiVersion": "0.5.0", "kind": kind, "devices": made})
	if err == nil {
		err = os.WriteFile(d.file(claim.UID), text, 0o644)
	}
	if err != nil {
		return kubeletplugin.PrepareResult{Err: err}
	}
	return result
}

// UnprepareResourceClaims removes the files.
func (d *driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		fmt.Println("Unprepare", claim.Name)
		err := os.Remove(d.file(claim.UID))
		if os.IsNotExist(err) {
			err = nil
		}
		results[claim.UID] = err
	}
	return results, nil
}

// HandleError prints what went wrong in the background.
func (d *driver) HandleError(_ context.Context, err error, message string) {
	fmt.Println("Error", message, err)
}
