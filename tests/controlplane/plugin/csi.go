package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	csi "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/volume/util/volumepathhandler"
	"k8s.io/mount-utils"
)

// A CSI driver whose volumes are directories and files below its state directory, mounted with the
// libraries of real drivers. A volume is made when it is first used, and kept; an ephemeral one ends
// with its pod. It checks the order of the calls: a line that begins with VIOLATION is an error of
// the node. What it knows is in files, so that it may be killed at any time.
type storage struct {
	csi.UnimplementedNodeServer
	csi.UnimplementedIdentityServer
	name, node, state string
	mounter           *mount.SafeFormatAndMount
	mutex             sync.Mutex
}

func drivers(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("csi", flag.ExitOnError)
	root := flags.String("root", "", "the kubelet's root directory")
	name := flags.String("driver", "", "the name of the driver")
	node := flags.String("node", "", "the driver's name of the node")
	state := flags.String("state", "", "where the volumes are")
	if err := flags.Parse(args); err != nil {
		return err
	}
	driver := &storage{name: *name, node: *node, state: *state, mounter: mount.NewSafeFormatAndMount(mount.New(""), nil)}
	endpoint := filepath.Join(*root, "plugins", *name, "csi.sock")
	served := grpc.NewServer(grpc.UnaryInterceptor(printed))
	csi.RegisterNodeServer(served, driver)
	csi.RegisterIdentityServer(served, driver)
	if err := serve(served, endpoint); err != nil {
		return err
	}
	registrar := grpc.NewServer()
	registration.RegisterRegistrationServer(registrar, &registrant{name: *name, endpoint: endpoint})
	if err := serve(registrar, filepath.Join(*root, "plugins_registry", *name+"-reg.sock")); err != nil {
		return err
	}
	<-ctx.Done()
	registrar.Stop()
	served.GracefulStop()
	return nil
}

func serve(server *grpc.Server, socket string) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return err
	}
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	go server.Serve(listener)
	return nil
}

// printed prints a line per call and result.
func printed(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := info.FullMethod[strings.LastIndex(info.FullMethod, "/")+1:]
	volume := ""
	if named, ok := request.(interface{ GetVolumeId() string }); ok {
		volume = named.GetVolumeId()
	}
	response, err := handler(ctx, request)
	fmt.Println(method, volume, status.Code(err))
	if err != nil {
		fmt.Println("Error", err)
	}
	return response, err
}

type registrant struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (r *registrant) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r *registrant) NotifyRegistrationStatus(_ context.Context, result *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	fmt.Println("Registered", result.PluginRegistered, result.Error)
	return &registration.RegistrationStatusResponse{}, nil
}

func (s *storage) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: s.name, VendorVersion: "1"}, nil
}

func (s *storage) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (s *storage) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId:             s.node,
		MaxVolumesPerNode:  20,
		AccessibleTopology: &csi.Topology{Segments: map[string]string{"topology." + s.name + "/node": s.node}},
	}, nil
}

func (s *storage) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	response := &csi.NodeGetCapabilitiesResponse{}
	kinds := append([]csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}, healthCapabilities...)
	for _, kind := range kinds {
		response.Capabilities = append(response.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return response, nil
}

// made returns a directory or file below the state directory, which exists then.
func (s *storage) made(kind, id string, isFile bool) (string, error) {
	path := filepath.Join(s.state, kind, filepath.Base(id))
	dir := path
	if isFile {
		dir = filepath.Dir(path)
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", err
	}
	if !isFile {
		return path, nil
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || info.Size() > 0 {
		return path, err
	}
	return path, file.Truncate(8 << 20)
}

func violation(format string, values ...any) error {
	text := fmt.Sprintf(format, values...)
	fmt.Println("VIOLATION", text)
	return status.Error(codes.FailedPrecondition, text)
}

// bound mounts from at to, unless something is mounted there.
func (s *storage) bound(from, to string, options ...string) error {
	if mounted, err := s.mounter.IsMountPoint(to); err != nil || mounted {
		return err
	}
	return s.mounter.Mount(from, to, "", append([]string{"bind"}, options...))
}

// uses are the publish targets of a volume, one file each.
func (s *storage) uses(id string) ([]string, error) {
	dir, err := s.made("uses", id, false)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, err
}

func (s *storage) use(id, target string) string {
	return filepath.Join(s.state, "uses", filepath.Base(id), strings.ReplaceAll(target, "/", "_"))
}

func (s *storage) NodeStageVolume(_ context.Context, request *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	id, staging := request.VolumeId, request.StagingTargetPath
	if request.VolumeCapability.GetBlock() != nil {
		file, err := s.made("blocks", id, true)
		if err != nil {
			return nil, err
		}
		if _, err := (volumepathhandler.VolumePathHandler{}).AttachFileDevice(file); err != nil {
			return nil, err
		}
		return &csi.NodeStageVolumeResponse{}, nil
	}
	if info, err := os.Stat(staging); err != nil || !info.IsDir() {
		return nil, violation("staging path %s: %v", staging, err)
	}
	dir, err := s.made("volumes", id, false)
	if err == nil {
		err = s.bound(dir, staging)
	}
	return &csi.NodeStageVolumeResponse{}, err
}

func (s *storage) NodeUnstageVolume(_ context.Context, request *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	id := request.VolumeId
	if uses, err := s.uses(id); err != nil || len(uses) > 0 {
		return nil, violation("unstaged while published: %v %v", uses, err)
	}
	file := filepath.Join(s.state, "blocks", filepath.Base(id))
	if _, err := os.Stat(file); err == nil {
		return &csi.NodeUnstageVolumeResponse{}, (volumepathhandler.VolumePathHandler{}).DetachFileDevice(file)
	}
	if mounted, err := s.mounter.IsMountPoint(request.StagingTargetPath); err == nil && mounted {
		if err := s.mounter.Unmount(request.StagingTargetPath); err != nil {
			return nil, err
		}
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (s *storage) NodePublishVolume(_ context.Context, request *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	id, target := request.VolumeId, request.TargetPath
	if _, err := os.Stat(filepath.Dir(target)); err != nil {
		return nil, violation("the parent of the target: %v", err)
	}
	if _, err := s.uses(id); err != nil {
		return nil, err
	}
	if err := os.WriteFile(s.use(id, target), nil, 0o600); err != nil {
		return nil, err
	}
	var err error
	if request.VolumeCapability.GetBlock() != nil {
		err = s.publishDevice(id, target)
	} else {
		err = s.publishDirectory(request)
	}
	return &csi.NodePublishVolumeResponse{}, err
}

func (s *storage) publishDevice(id, target string) error {
	file, err := s.made("blocks", id, true)
	if err != nil {
		return err
	}
	device, err := (volumepathhandler.VolumePathHandler{}).GetLoopDevice(file)
	if err != nil {
		return violation("published before it was staged: %v", err)
	}
	made, err := os.OpenFile(target, os.O_CREATE, 0o660)
	if err != nil {
		return err
	}
	made.Close()
	return s.bound(device, target)
}

func (s *storage) publishDirectory(request *csi.NodePublishVolumeRequest) error {
	id, target := request.VolumeId, request.TargetPath
	from := request.StagingTargetPath
	context := request.VolumeContext
	if context["csi.storage.k8s.io/ephemeral"] == "true" {
		dir, err := s.made("ephemeral", id, false)
		if err != nil {
			return err
		}
		text := fmt.Sprintf("%s/%s %s\n", context["csi.storage.k8s.io/pod.namespace"], context["csi.storage.k8s.io/pod.name"], context["greeting"])
		if err := os.WriteFile(filepath.Join(dir, "pod"), []byte(text), 0o644); err != nil {
			return err
		}
		from = dir
	} else if mounted, err := s.mounter.IsMountPoint(from); err != nil || !mounted {
		return violation("published before it was staged at %q: %v", from, err)
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	var options []string
	if request.Readonly {
		options = append(options, "ro")
	}
	return s.bound(from, target, options...)
}

func (s *storage) NodeUnpublishVolume(_ context.Context, request *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	id, target := request.VolumeId, request.TargetPath
	if err := mount.CleanupMountPoint(target, s.mounter.Interface, true); err != nil {
		return nil, err
	}
	if err := os.Remove(s.use(id, target)); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, os.RemoveAll(filepath.Join(s.state, "ephemeral", filepath.Base(id)))
}

func (s *storage) NodeExpandVolume(_ context.Context, request *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	bytes := request.CapacityRange.GetRequiredBytes()
	fmt.Println("Size", request.VolumeId, bytes)
	return &csi.NodeExpandVolumeResponse{CapacityBytes: bytes}, nil
}

func (s *storage) NodeGetVolumeStats(_ context.Context, request *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	var found unix.Statfs_t
	if err := unix.Statfs(request.VolumePath, &found); err != nil {
		return nil, status.Error(codes.NotFound, err.Error())
	}
	size := found.Bsize
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{
		Unit: csi.VolumeUsage_BYTES, Total: int64(found.Blocks) * size, Available: int64(found.Bavail) * size,
		Used: int64(found.Blocks-found.Bfree) * size,
	}}}, nil
}
