//! Converts a snapshot to the JSON of the kubelet's `/stats/summary`.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::sample::{
    ContainerUse, FileSystem, Interface, Network, NodeUse, Numbers, PodUse, PsiData, PsiStats, Snapshot,
    VolumeUse,
};

type Object = Map<String, Value>;

pub(crate) fn json(snapshot: &Snapshot) -> Value {
    json!({"node": node(&snapshot.node), "pods": snapshot.pods.iter().map(pod).collect::<Vec<Value>>()})
}

fn set(object: &mut Object, name: &str, value: impl Into<Value>) {
    object.insert(name.to_owned(), value.into());
}

/// Sets a field, or leaves it out if the value is unknown.
fn put<T: Into<Value>>(object: &mut Object, name: &str, value: Option<T>) {
    if let Some(value) = value {
        set(object, name, value);
    }
}

/// Formats a time as the API does: in whole seconds.
fn time(timestamp: Timestamp) -> String {
    Timestamp::from_second(timestamp.as_second()).unwrap_or(timestamp).to_string()
}

/// Sets `startTime`, which clients expect: an unknown time is `null`, like Go's zero time.
fn since(object: &mut Object, started: Option<Timestamp>) {
    set(object, "startTime", started.map_or(Value::Null, |started| time(started).into()));
}

/// A new object with the time of its values.
fn timed(timestamp: Timestamp) -> Object {
    let mut object = Object::new();
    set(&mut object, "time", time(timestamp));
    object
}

fn node(node: &NodeUse) -> Object {
    let mut object = Object::new();
    set(&mut object, "nodeName", node.name.as_str());
    since(&mut object, node.booted);
    let system = node.system.iter().map(|part| {
        let mut object = Object::new();
        set(&mut object, "name", part.name);
        since(&mut object, part.started);
        numbers(&mut object, &part.numbers);
        Value::Object(object)
    });
    set(&mut object, "systemContainers", system.collect::<Vec<Value>>());
    numbers(&mut object, &node.numbers);
    put(&mut object, "network", node.network.as_ref().map(network));
    put(&mut object, "fs", node.fs.as_ref().map(space));
    if let Some(images) = &node.image_fs {
        let containers = node.container_fs.as_ref().unwrap_or(images);
        set(&mut object, "runtime", json!({"imageFs": space(images), "containerFs": space(containers)}));
    }
    if let Some(processes) = &node.processes {
        let mut limit = timed(processes.time);
        put(&mut limit, "maxpid", processes.most);
        put(&mut limit, "curproc", processes.now);
        set(&mut object, "rlimit", limit);
    }
    object
}

fn pod(pod: &PodUse) -> Value {
    let mut object = Object::new();
    let reference = json!({"name": pod.name, "namespace": pod.namespace, "uid": pod.uid.as_str()});
    set(&mut object, "podRef", reference);
    since(&mut object, pod.started);
    set(&mut object, "containers", pod.containers.iter().map(container).collect::<Vec<Value>>());
    numbers(&mut object, &pod.numbers);
    put(&mut object, "network", pod.network.as_ref().map(network));
    if !pod.volumes.is_empty() {
        let volumes = pod.volumes.iter().map(|mounted| volume(mounted, &pod.namespace));
        set(&mut object, "volume", volumes.collect::<Vec<Value>>());
    }
    put(&mut object, "ephemeral-storage", pod.local_storage.as_ref().map(space));
    // The pod's own cgroup has no processes. Without containers' numbers, those of the runtime.
    let containers = pod.containers.iter().map(|container| &container.numbers);
    let parts = containers.chain(pod.sandbox.iter().map(|sandbox| &sandbox.numbers));
    let count = parts.filter_map(|part| part.processes).reduce(u64::saturating_add).or(pod.numbers.processes);
    let processes = count.map(|count| json!({"process_count": count}));
    put(&mut object, "process_stats", processes);
    Value::Object(object)
}

fn container(container: &ContainerUse) -> Value {
    let mut object = Object::new();
    set(&mut object, "name", container.name.as_str());
    since(&mut object, container.started);
    numbers(&mut object, &container.numbers);
    put(&mut object, "rootfs", container.rootfs.as_ref().map(space));
    put(&mut object, "logs", container.logs.as_ref().map(space));
    Value::Object(object)
}

/// Sets the fields for CPU, memory, I/O and swap.
fn numbers(object: &mut Object, numbers: &Numbers) {
    let mut cpu = timed(numbers.time);
    put(&mut cpu, "usageNanoCores", numbers.rate);
    put(&mut cpu, "usageCoreNanoSeconds", numbers.cpu);
    put(&mut cpu, "psi", numbers.cpu_pressure.as_ref().map(pressure));
    set(object, "cpu", cpu);
    let mut memory = timed(numbers.time);
    put(&mut memory, "availableBytes", numbers.available);
    put(&mut memory, "usageBytes", numbers.usage);
    put(&mut memory, "workingSetBytes", numbers.working_set);
    put(&mut memory, "rssBytes", numbers.rss);
    put(&mut memory, "pageFaults", numbers.faults);
    put(&mut memory, "majorPageFaults", numbers.major_faults);
    put(&mut memory, "psi", numbers.memory_pressure.as_ref().map(pressure));
    set(object, "memory", memory);
    if let Some(waits) = &numbers.io_pressure {
        let mut io = timed(numbers.time);
        set(&mut io, "psi", pressure(waits));
        set(object, "io", io);
    }
    if numbers.swap.is_some() {
        let mut swap = timed(numbers.time);
        put(&mut swap, "swapAvailableBytes", numbers.swap_available);
        put(&mut swap, "swapUsageBytes", numbers.swap);
        set(object, "swap", swap);
    }
}

fn pressure(pressure: &PsiStats) -> Value {
    let data = |data: &PsiData| json!({"total": data.total, "avg10": data.avg10, "avg60": data.avg60, "avg300": data.avg300});
    json!({"full": data(&pressure.full), "some": data(&pressure.some)})
}

fn network(network: &Network) -> Object {
    let fields = |interface: &Interface| {
        json!({
            "name": interface.name,
            "rxBytes": interface.received.bytes,
            "rxErrors": interface.received.errors,
            "txBytes": interface.sent.bytes,
            "txErrors": interface.sent.errors,
        })
    };
    let mut object = timed(network.time);
    match network.interfaces.iter().find(|interface| interface.name == "eth0").map(fields) {
        Some(Value::Object(default)) => object.extend(default),
        _ => set(&mut object, "name", ""),
    }
    set(&mut object, "interfaces", network.interfaces.iter().map(fields).collect::<Vec<Value>>());
    object
}

fn space(space: &FileSystem) -> Object {
    let mut object = timed(space.time);
    put(&mut object, "availableBytes", space.available);
    put(&mut object, "capacityBytes", space.capacity);
    put(&mut object, "usedBytes", space.used);
    put(&mut object, "inodesFree", space.inodes_free);
    put(&mut object, "inodes", space.inodes);
    put(&mut object, "inodesUsed", space.inodes_used);
    object
}

fn volume(volume: &VolumeUse, namespace: &str) -> Value {
    let mut object = space(&volume.space);
    set(&mut object, "name", volume.name.as_str());
    let claim = volume.claim.as_ref().map(|claim| json!({"name": claim, "namespace": namespace}));
    put(&mut object, "pvcRef", claim);
    Value::Object(object)
}
