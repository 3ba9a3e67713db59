// Prints random passes of upstream's eviction manager, one case a line: main COUNT SEED.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"time"

	"coracle.invalid/passes/eviction"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	statsapi "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

const mib = 1 << 20

type m = map[string]any

func pick[T any](r *rand.Rand, all ...T) T { return all[r.Intn(len(all))] }
func u(n uint64) *uint64                   { return &n }

func main() {
	count, _ := strconv.Atoi(os.Args[1])
	seed, _ := strconv.Atoi(os.Args[2])
	klog.LogToStderr(false)
	klog.SetOutput(nopWriter{})
	out := json.NewEncoder(os.Stdout)
	out.SetEscapeHTML(false)
	for i := 0; i < count; i++ {
		r := rand.New(rand.NewSource(int64(seed + i)))
		c := generate(r)
		if err := eviction.PeerRun(c); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		raw, err := json.Marshal(c)
		if err != nil {
			panic(err)
		}
		var all m
		decoder := json.NewDecoder(bytes.NewReader(raw))
		decoder.UseNumber()
		if err := decoder.Decode(&all); err != nil {
			panic(err)
		}
		// An empty field of a pod is not the same as none.
		pods := all["pods"]
		delete(all, "pods")
		compact(all)
		all["pods"] = pods
		if err := out.Encode(all); err != nil {
			panic(err)
		}
	}
}

// compact leaves out fields without a value.
func compact(value any) any {
	switch value := value.(type) {
	case m:
		for name, field := range value {
			if field = compact(field); field == nil {
				delete(value, name)
			} else {
				value[name] = field
			}
		}
		if len(value) == 0 {
			return nil
		}
	case []any:
		for i := range value {
			value[i] = compact(value[i])
		}
	}
	return value
}

type nopWriter struct{}

func (nopWriter) Write(b []byte) (int, error) { return len(b), nil }

func generate(r *rand.Rand) *eviction.PeerCase {
	signal := pick(r, "memory.available", "memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree", "pid.available")
	layout := pick(r, "one", "images", "split")
	value := pick(r, "500Mi", "0.5Gi", "524288k", "10%", "5%", "33.3%", "250")
	if signal == "pid.available" || signal == "nodefs.inodesFree" || signal == "imagefs.inodesFree" {
		value = pick(r, "1000", "1k", "10%", "5%", "1024", "1Ki")
	}
	c := &eviction.PeerCase{Layout: layout}
	c.Config.Max = int64(r.Intn(40))
	c.Config.Transition = int64(pick(r, 15, 60, 300))
	c.Config.Local = r.Intn(2) == 0
	if r.Intn(2) == 0 {
		c.Config.Hard = map[string]string{signal: value}
	} else {
		c.Config.Soft = map[string]string{signal: value}
		c.Config.Grace = map[string]string{signal: pick(r, "10s", "25s", "1m0s", "0s")}
	}
	if r.Intn(2) == 0 {
		c.Config.Reclaim = map[string]string{signal: pick(r, "100Mi", "2%", "1k", "0")}
	}
	specs := []json.RawMessage{}
	names := 1 + r.Intn(5)
	noStats := r.Intn(20)
	for i := 0; i < names; i++ {
		raw := pod(r, i)
		specs = append(specs, raw)
		p := &v1.Pod{}
		if err := json.Unmarshal(raw, p); err != nil {
			panic(err)
		}
		c.Pods = append(c.Pods, p)
	}
	c.Specs, _ = json.Marshal(specs)
	second := int64(0)
	for i := 0; i < 1+r.Intn(4); i++ {
		pass := eviction.PeerPass{Second: second}
		measured := second
		if i > 0 && r.Intn(6) == 0 {
			measured = c.Passes[i-1].Summary.Node.Memory.Time.Unix() - 1000000
		}
		pass.Summary = summary(r, c, layout, measured, noStats)
		if r.Intn(3) > 0 {
			pass.After = summary(r, c, layout, second, noStats)
			pass.After.Pods = nil
		}
		c.Passes = append(c.Passes, pass)
		second += int64(pick(r, 2, 10, 10, 30, 70))
	}
	return c
}

func pod(r *rand.Rand, i int) json.RawMessage {
	container := func(name string) m {
		requests, limits := m{}, m{}
		if r.Intn(2) == 0 {
			requests["memory"] = pick(r, "16Mi", "0.125Gi", "100M", "1Gi", "250m")
		}
		if r.Intn(3) == 0 {
			requests["ephemeral-storage"] = pick(r, "10Mi", "20M", "1Gi", "0.5Gi")
		}
		if r.Intn(4) == 0 {
			limits["ephemeral-storage"] = pick(r, "40Mi", "60M", "61440Ki", "0", "0.125Gi")
		}
		return m{"name": name, "resources": m{"requests": requests, "limits": limits}}
	}
	spec := m{}
	containers := []m{}
	for j := 0; j < 1+r.Intn(3); j++ {
		containers = append(containers, container(fmt.Sprint("c", j)))
	}
	spec["containers"] = containers
	if r.Intn(4) == 0 {
		initContainer := container("init")
		if r.Intn(2) == 0 {
			initContainer["restartPolicy"] = "Always"
		}
		spec["initContainers"] = []m{initContainer}
	}
	if r.Intn(3) == 0 {
		spec["priority"] = pick(r, -10, 0, 5, 1000, 2000000000)
	}
	if r.Intn(2) == 0 {
		spec["terminationGracePeriodSeconds"] = pick(r, 0, 1, 7, 30)
	}
	if r.Intn(5) == 0 {
		spec["overhead"] = m{"memory": "10Mi", "ephemeral-storage": "5Mi"}
	}
	if r.Intn(5) == 0 {
		spec["resources"] = pick(r, m{"requests": m{"memory": "64Mi"}}, m{"requests": m{"cpu": "1"}}, m{"limits": m{"memory": "1Gi"}}, m{})
	}
	volumes := []m{}
	for j := 0; j < r.Intn(4); j++ {
		volume := pick(r, m{"emptyDir": m{}}, m{"emptyDir": m{"sizeLimit": pick(r, "30Mi", "40M", "0", "0.0625Gi")}},
			m{"emptyDir": m{"medium": "Memory", "sizeLimit": "50Mi"}}, m{"configMap": m{"name": "x"}},
			m{"secret": m{"secretName": "x"}}, m{"hostPath": m{"path": "/x"}})
		volume["name"] = fmt.Sprint("v", j)
		volumes = append(volumes, volume)
	}
	spec["volumes"] = volumes
	source := "api"
	if r.Intn(8) == 0 {
		source = "file"
	}
	name := fmt.Sprint("p", i)
	raw, _ := json.Marshal(m{"metadata": m{"name": name, "namespace": "ns", "uid": name, "annotations": m{"kubernetes.io/config.source": source}}, "spec": spec})
	return raw
}

func summary(r *rand.Rand, c *eviction.PeerCase, layout string, second int64, noStats int) *statsapi.Summary {
	now := metav1.NewTime(time.Unix(1000000+second, 0).UTC())
	s := &statsapi.Summary{}
	available := pick(r, uint64(100), 400, 499, 500, 525, 600, 700, 3000) * mib
	if r.Intn(10) == 0 {
		available = uint64(r.Intn(300))
	}
	used := uint64(6000) * mib
	s.Node.Memory = &statsapi.MemoryStats{Time: now, AvailableBytes: u(available), WorkingSetBytes: u(used)}
	fs := func() *statsapi.FsStats {
		return &statsapi.FsStats{Time: now, AvailableBytes: u(pick(r, uint64(100), 249, 400, 500, 600, 1000, 4000) * mib), CapacityBytes: u(8000 * mib),
			InodesFree: u(pick(r, uint64(10), 900, 1000, 1023, 1050, 9000)), Inodes: u(10000)}
	}
	s.Node.Fs = fs()
	images := fs()
	containers := images
	if layout == "one" {
		images, containers = s.Node.Fs, s.Node.Fs
	} else if layout == "split" {
		containers = s.Node.Fs
	}
	s.Node.Runtime = &statsapi.RuntimeStats{ImageFs: images, ContainerFs: containers}
	most, current := int64(10000), pick(r, int64(8976), 9000, 9001, 8000, 100, 10050)
	s.Node.Rlimit = &statsapi.RlimitStats{Time: now, MaxPID: &most, NumOfRunningProcesses: &current}
	for i, pod := range c.Pods {
		if i == noStats {
			continue
		}
		size := func(most int) *uint64 {
			return u(uint64(r.Intn(most))*mib + uint64(r.Intn(1024))*1024 + uint64(r.Intn(2))*uint64(r.Intn(1000)))
		}
		space := func(most int) *statsapi.FsStats {
			return &statsapi.FsStats{UsedBytes: size(most), InodesUsed: u(uint64(r.Intn(100000)))}
		}
		podStats := statsapi.PodStats{PodRef: statsapi.PodReference{Name: pod.Name, Namespace: "ns", UID: pod.Name}}
		podStats.Memory = &statsapi.MemoryStats{WorkingSetBytes: u(*size(400) + uint64(r.Intn(4096)))}
		podStats.ProcessStats = &statsapi.ProcessStats{ProcessCount: u(uint64(r.Intn(100000)))}
		if r.Intn(3) == 0 {
			podStats.EphemeralStorage = space(80)
		} else {
			podStats.EphemeralStorage = space(10)
		}
		for _, container := range append(append([]v1.Container{}, pod.Spec.Containers...), pod.Spec.InitContainers...) {
			if r.Intn(8) == 0 {
				continue
			}
			stats := statsapi.ContainerStats{Name: container.Name, Memory: &statsapi.MemoryStats{WorkingSetBytes: size(300)}, Logs: space(30)}
			if r.Intn(6) > 0 {
				stats.Rootfs = space(30)
			}
			podStats.Containers = append(podStats.Containers, stats)
		}
		for _, volume := range pod.Spec.Volumes {
			podStats.VolumeStats = append(podStats.VolumeStats, statsapi.VolumeStats{Name: volume.Name, FsStats: *space(45)})
		}
		s.Pods = append(s.Pods, podStats)
	}
	return s
}
