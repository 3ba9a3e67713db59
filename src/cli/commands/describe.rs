//! `coracle describe POD`.

use std::collections::BTreeMap;
use std::io;

use serde_json::Value;

use crate::cli::exit::Exit;
use crate::cli::table::Color;
use crate::model::Quantity;
use crate::model::api::{
    Container, ContainerState, ContainerStatus, EnvVar, PodSpec, PodStatus, Probe, Toleration,
};
use crate::model::meta::Time;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::reasons;
use crate::server::{PodCgroupReport, PodDescription};

use super::client::{Client, encode};
use super::console::{Console, size};
use super::error::Outcome;
use super::pod_status::summary;
use super::{age, devices, events, pods, volumes};

/// Why a container without its image waits.
const NO_IMAGE: [&str; 4] = [
    reasons::ERR_IMAGE_PULL,
    reasons::IMAGE_PULL_BACK_OFF,
    reasons::ERR_IMAGE_NEVER_PULL,
    reasons::REGISTRY_UNAVAILABLE,
];

pub(super) fn run(client: &Client, console: &mut Console<'_>, pod: &str) -> Outcome {
    let described: PodDescription = client.get(&format!("/v1/describe?pod={}", encode(pod)))?;
    print(console, &described)?;
    Ok(Exit::Success)
}

/// The limits of the pod's cgroup, and what it uses.
fn cgroup(console: &mut Console<'_>, report: Option<&PodCgroupReport>) -> io::Result<()> {
    let Some(report) = report else { return Ok(()) };
    console.field(0, "Cgroup", &report.path)?;
    if let Some(shares) = report.cpu_shares {
        let limit = report.cpu_limit_milli.map_or("no limit".to_owned(), |milli| format!("limit {milli}m"));
        let throttled = match report.throttled_periods {
            Some(count) if count > 0 => format!(", throttled in {count} periods"),
            _ => String::new(),
        };
        console.field(1, "CPU", &format!("shares {shares}, {limit}{throttled}"))?;
    }
    if let Some(used) = report.memory_bytes {
        let limit =
            report.memory_limit_bytes.map_or("no limit".to_owned(), |bytes| format!("limit {}", size(bytes)));
        let kills = match report.oom_kills {
            Some(count) if count > 0 => format!(", {count} processes killed at a limit"),
            _ => String::new(),
        };
        console.field(1, "Memory", &format!("{} used, {limit}{kills}", size(used)))?;
    }
    if let Some(count) = report.pids {
        let limit = report.pids_limit.map_or("no limit".to_owned(), |limit| format!("limit {limit}"));
        console.field(1, "Processes", &format!("{count}, {limit}"))?;
    }
    Ok(())
}

pub(super) fn print(console: &mut Console<'_>, described: &PodDescription) -> io::Result<()> {
    let view = &described.view;
    let (no_spec, no_status) = (PodSpec::default(), PodStatus::default());
    let spec = view.pod.spec.as_ref().unwrap_or(&no_spec);
    let status = view.pod.status.as_ref().unwrap_or(&no_status);
    let line = summary(view);

    console.field(0, "Name", view.name())?;
    console.field(0, "Namespace", view.namespace())?;
    console.field(0, "UID", view.uid())?;
    console.field(0, "Priority", &spec.priority.unwrap_or(0).to_string())?;
    if let Some(class) = &spec.priority_class_name {
        console.field(0, "Priority Class", class)?;
    }
    let node = [spec.node_name.as_deref(), status.host_ip.as_deref()];
    console.field(0, "Node", &node.into_iter().flatten().collect::<Vec<_>>().join("/"))?;
    let start = pods::creation_time(view).map(|time| time_with_age(time, console.now));
    console.field(0, "Start Time", start.as_deref().unwrap_or("<unknown>"))?;
    map(console, "Labels", view.pod.metadata.labels.as_ref())?;
    map(console, "Annotations", view.pod.metadata.annotations.as_ref())?;
    console.colored_field(0, "Status", &line.status, line.color())?;
    for (key, value) in [("Reason", &status.reason), ("Message", &status.message)] {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            console.field(0, key, value)?;
        }
    }
    worker(console, described)?;
    if !view.held.is_empty() {
        list(console, 0, "Exclusive", &view.held)?;
    }
    cgroup(console, described.cgroup.as_ref())?;
    let ips: Vec<&str> = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str()).collect();
    console.field(0, "IPs", &if ips.is_empty() { "<none>".to_owned() } else { ips.join(", ") })?;

    containers(
        console,
        "Init Containers",
        spec.init_containers.as_deref(),
        status.init_container_statuses.as_deref(),
    )?;
    containers(console, "Containers", Some(&spec.containers), status.container_statuses.as_deref())?;
    conditions(console, status)?;
    volumes::describe(console, spec.volumes.as_deref().unwrap_or_default(), &described.volumes)?;
    devices::describe(console, &described.devices, &described.claims)?;
    console.field(0, "QoS Class", Pod::from(view.pod.clone()).qos().as_str())?;
    map(console, "Node-Selectors", spec.node_selector.as_ref())?;
    let tolerations: Vec<String> = spec.tolerations.iter().flatten().map(toleration).collect();
    list(console, 0, "Tolerations", &tolerations)?;
    if described.events.is_empty() {
        return console.field(0, "Events", "<none>");
    }
    console.field(0, "Events", "")?;
    let rows: Vec<_> = described.events.iter().map(|event| events::row(event, console.now)).collect();
    console.table(&mut events::table(), &rows)
}

fn worker(console: &mut Console<'_>, described: &PodDescription) -> io::Result<()> {
    let view = &described.view;
    let next = view.next_sync.map(|next| {
        let left = next.as_second().saturating_sub(console.now.as_second()).max(0);
        format!(", next sync in {}", age::human(left))
    });
    console.field(0, "Worker", &format!("{}{}", view.phase, next.unwrap_or_default()))?;
    match &view.last_error {
        Some(error) => console.colored_field(0, "Last Error", error, Some(Color::Red)),
        None => Ok(()),
    }
}

fn time_with_age(time: jiff::Timestamp, now: jiff::Timestamp) -> String {
    format!("{time} ({} ago)", age::since(time, now))
}

fn time_with_age_or_unknown(time: Option<&Time>, now: jiff::Timestamp) -> String {
    time.map_or_else(|| "<unknown>".to_owned(), |time| time_with_age(time.0, now))
}

fn map(console: &mut Console<'_>, key: &str, values: Option<&BTreeMap<String, String>>) -> io::Result<()> {
    let lines: Vec<String> =
        values.into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    list(console, 0, key, &lines)
}

/// The first value beside the key, the others below it.
fn list(console: &mut Console<'_>, depth: usize, key: &str, values: &[String]) -> io::Result<()> {
    let Some((first, rest)) = values.split_first() else { return console.field(depth, key, "<none>") };
    console.field(depth, key, first)?;
    rest.iter().try_for_each(|value| console.continued(value))
}

fn containers(
    console: &mut Console<'_>,
    heading: &str,
    specs: Option<&[Container]>,
    statuses: Option<&[ContainerStatus]>,
) -> io::Result<()> {
    let specs = specs.unwrap_or_default();
    if specs.is_empty() {
        return Ok(());
    }
    console.field(0, heading, "")?;
    for spec in specs {
        let status = statuses.unwrap_or_default().iter().find(|status| status.name == spec.name);
        container(console, spec, status)?;
    }
    Ok(())
}

fn container(
    console: &mut Console<'_>,
    spec: &Container,
    status: Option<&ContainerStatus>,
) -> io::Result<()> {
    let sidecar = if is_sidecar(spec) { "(sidecar)" } else { "" };
    console.field(1, &spec.name, sidecar)?;
    if let Some(status) = status {
        console.field(2, "Container ID", status.container_id.as_deref().unwrap_or_default())?;
    }
    console.field(2, "Image", spec.image.as_deref().unwrap_or_default())?;
    if let Some(status) = status {
        console.field(2, "Image ID", &status.image_id)?;
    }
    let ports: Vec<String> = spec
        .ports
        .iter()
        .flatten()
        .map(|port| {
            let host = port.host_port.map(|host| format!(" (host {host})")).unwrap_or_default();
            format!("{}/{}{host}", port.container_port, port.protocol.as_deref().unwrap_or("TCP"))
        })
        .collect();
    if !ports.is_empty() {
        console.field(2, "Ports", &ports.join(", "))?;
    }
    for (key, words) in [("Command", &spec.command), ("Args", &spec.args)] {
        if let Some(words) = words {
            list(console, 2, key, words)?;
        }
    }
    if let Some(status) = status {
        state(console, "State", status.state.as_ref())?;
        if status.last_state.as_ref().is_some_and(|last| *last != ContainerState::default()) {
            state(console, "Last State", status.last_state.as_ref())?;
        }
        console.field(2, "Ready", if status.ready { "True" } else { "False" })?;
        console.field(2, "Restart Count", &status.restart_count.to_string())?;
    }
    if let Some(resources) = &spec.resources {
        amounts(console, "Limits", resources.limits.as_ref())?;
        amounts(console, "Requests", resources.requests.as_ref())?;
    }
    for (key, probe) in [
        ("Liveness", &spec.liveness_probe),
        ("Readiness", &spec.readiness_probe),
        ("Startup", &spec.startup_probe),
    ] {
        if let Some(probe) = probe {
            console.field(2, key, &probe_line(probe))?;
        }
    }
    let env: Vec<String> = env_sources(spec).chain(spec.env.iter().flatten().map(env_line)).collect();
    list(console, 2, "Environment", &env)?;
    let mounts: Vec<String> = spec
        .volume_mounts
        .iter()
        .flatten()
        .map(|mount| {
            let mode = if mount.read_only == Some(true) { "ro" } else { "rw" };
            let sub = mount.sub_path.as_ref().map(|path| format!(", path={path:?}")).unwrap_or_default();
            format!("{} from {} ({mode}{sub})", mount.mount_path, mount.name)
        })
        .collect();
    list(console, 2, "Mounts", &mounts)
}

fn state(console: &mut Console<'_>, key: &str, state: Option<&ContainerState>) -> io::Result<()> {
    let now = console.now;
    let Some(state) = state else { return console.field(2, key, "<unknown>") };
    if let Some(running) = &state.running {
        console.colored_field(2, key, "Running", Some(Color::Green))?;
        return console.field(3, "Started", &time_with_age_or_unknown(running.started_at.as_ref(), now));
    }
    if let Some(ended) = &state.terminated {
        console.field(2, key, "Terminated")?;
        optional(console, "Reason", ended.reason.as_deref())?;
        optional(console, "Message", ended.message.as_deref())?;
        console.field(3, "Exit Code", &ended.exit_code.to_string())?;
        if let Some(signal) = ended.signal {
            console.field(3, "Signal", &signal.to_string())?;
        }
        console.field(3, "Started", &time_with_age_or_unknown(ended.started_at.as_ref(), now))?;
        return console.field(3, "Finished", &time_with_age_or_unknown(ended.finished_at.as_ref(), now));
    }
    console.colored_field(2, key, "Waiting", Some(Color::Yellow))?;
    let waiting = state.waiting.as_ref();
    let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
    optional(console, "Reason", reason)?;
    optional(console, "Message", waiting.and_then(|waiting| waiting.message.as_deref()))?;
    if reason.is_some_and(|reason| NO_IMAGE.contains(&reason)) {
        console.field(
            3,
            "Hint",
            "without a registry, an archive adds the image: coracle images import FILE",
        )?;
    }
    Ok(())
}

fn optional(console: &mut Console<'_>, key: &str, value: Option<&str>) -> io::Result<()> {
    // A termination message is often one line with its end.
    match value.map(str::trim_end).filter(|value| !value.is_empty()) {
        Some(value) => console.field(3, key, value),
        None => Ok(()),
    }
}

fn amounts(
    console: &mut Console<'_>,
    key: &str,
    amounts: Option<&BTreeMap<String, Quantity>>,
) -> io::Result<()> {
    let words: Vec<String> =
        amounts.into_iter().flatten().map(|(resource, amount)| format!("{resource} {}", amount.0)).collect();
    if words.is_empty() { Ok(()) } else { console.field(2, key, &words.join(", ")) }
}

fn probe_line(probe: &Probe) -> String {
    let what = if probe.exec.is_some() {
        "exec"
    } else if probe.http_get.is_some() {
        "http-get"
    } else if probe.tcp_socket.is_some() {
        "tcp-socket"
    } else if probe.grpc.is_some() {
        "grpc"
    } else {
        "unknown"
    };
    format!(
        "{what} delay={}s timeout={}s period={}s #success={} #failure={}",
        probe.initial_delay_seconds.unwrap_or(0),
        probe.timeout_seconds.unwrap_or(1),
        probe.period_seconds.unwrap_or(10),
        probe.success_threshold.unwrap_or(1),
        probe.failure_threshold.unwrap_or(3)
    )
}

/// A name and where its value comes from. Values stay out: many are secrets.
fn env_line(env: &EnvVar) -> String {
    let Some(from) = &env.value_from else { return env.name.clone() };
    let from = crate::util::json::to_value(from).unwrap_or_default();
    format!("{} {}", env.name, from.as_object().map(origin).unwrap_or_default())
}

fn env_sources(spec: &Container) -> impl Iterator<Item = String> + '_ {
    spec.env_from.iter().flatten().map(|from| {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        let map = from.config_map_ref.as_ref().map(|map| format!("config map {}", map.name));
        let secret = from.secret_ref.as_ref().map(|secret| format!("secret {}", secret.name));
        format!("{prefix}* (all of {})", map.or(secret).unwrap_or_default())
    })
}

/// `(secretKeyRef: key=password name=db)` of the one set source.
fn origin(sources: &serde_json::Map<String, Value>) -> String {
    let Some((kind, fields)) = sources.iter().next() else { return String::new() };
    format!("({kind}: {})", fields.as_object().map(scalars).unwrap_or_default())
}

/// `key=value` of each field.
pub(super) fn scalars(fields: &serde_json::Map<String, Value>) -> String {
    let word = |(key, value): (&String, &Value)| match value {
        Value::String(text) => format!("{key}={text}"),
        other => format!("{key}={other}"),
    };
    fields.iter().map(word).collect::<Vec<_>>().join(" ")
}

fn conditions(console: &mut Console<'_>, status: &PodStatus) -> io::Result<()> {
    let conditions = status.conditions.as_deref().unwrap_or_default();
    if conditions.is_empty() {
        return Ok(());
    }
    console.field(0, "Conditions", "")?;
    let width = conditions.iter().map(|condition| condition.type_.chars().count()).max().unwrap_or(0);
    for condition in conditions {
        let details = [condition.reason.as_deref(), condition.message.as_deref()];
        let details: Vec<&str> = details.into_iter().flatten().filter(|text| !text.is_empty()).collect();
        let line = format!("{:width$}   {:7} {}", condition.type_, condition.status, details.join(": "));
        console.line(1, line.trim_end())?;
    }
    Ok(())
}

fn toleration(toleration: &Toleration) -> String {
    let mut text = toleration.key.clone().unwrap_or_default();
    if let Some(value) = toleration.value.as_deref().filter(|value| !value.is_empty()) {
        text.push_str(&format!("={value}"));
    }
    if let Some(effect) = toleration.effect.as_deref().filter(|effect| !effect.is_empty()) {
        text.push_str(&format!(":{effect}"));
    }
    if toleration.operator.as_deref() == Some("Exists") {
        let all = text.is_empty();
        text.push_str(if all { "op=Exists" } else { " op=Exists" });
    }
    if let Some(seconds) = toleration.toleration_seconds {
        text.push_str(&format!(" for {seconds}s"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use expect_test::expect;
    use serde_json::json;

    #[test]
    fn description_has_all_parts_of_a_pod() {
        let described: PodDescription = serde_json::from_value(json!({
            "pod": {
                "metadata": {"namespace": "default", "name": "web-node1", "uid": "u1", "labels": {"a": "b", "c": "d"}},
                "spec": {
                    "nodeName": "node1",
                    "initContainers": [{"name": "side", "image": "i", "restartPolicy": "Always"}],
                    "containers": [{
                        "name": "app", "image": "localhost/app:1", "command": ["sh", "-c"],
                        "ports": [{"containerPort": 80, "hostPort": 8080}],
                        "env": [{"name": "PASSWORD", "value": "hidden"},
                            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "db", "key": "pw"}}}],
                        "envFrom": [{"configMapRef": {"name": "cm"}}],
                        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
                        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": true}],
                        "livenessProbe": {"exec": {"command": ["x"]}},
                    }],
                    "volumes": [{"name": "data", "hostPath": {"path": "/srv", "type": ""}}, {"name": "tmp", "emptyDir": {}}],
                    "tolerations": [{"operator": "Exists", "effect": "NoExecute"}],
                },
                "status": {
                    "phase": "Running", "hostIP": "192.0.2.1", "startTime": "2026-01-01T00:00:00Z",
                    "podIPs": [{"ip": "10.0.0.7"}],
                    "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "x"}],
                    "containerStatuses": [{
                        "name": "app", "ready": false, "restartCount": 2, "image": "", "imageID": "sha256:1",
                        "containerID": "containerd://c1",
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "a\u{1b}[2Jb"}},
                        "lastState": {"terminated": {"exitCode": 1, "reason": "Error",
                            "startedAt": "2026-01-01T00:00:10Z", "finishedAt": "2026-01-01T00:00:20Z"}},
                    }],
                },
            },
            "phase": "Syncing", "lastError": "it failed", "nextSync": "2026-01-01T00:01:40Z", "events": [],
            "volumes": [
                {"volume": "data", "kind": "hostPath /srv", "state": "mounted", "since": "2026-01-01T00:00:50Z"},
                {"volume": "tmp", "kind": "emptyDir", "state": "failed", "error": "no\u{7} space"},
                {"volume": "kubernetes.io~nfs/pv1", "state": "cannot be unmounted", "error": "busy"},
            ],
            "devices": [{"resource": "example.com/cam", "device": "c1", "health": "Unhealthy", "numa": [1],
                "users": ["default/web-node1/app"]}],
            "claims": [{"namespace": "default", "claim": "gpu", "driver": "gpu.example.com", "pool": "node1",
                "device": "gpu-0", "prepared": true, "pods": ["web-node1"]}],
        }))
        .unwrap();
        let mut out = Vec::new();
        let now = "2026-01-01T00:01:00Z".parse().unwrap();
        print(&mut Console { out: &mut out, paint: Paint::new(false), now }, &described).unwrap();
        let text = String::from_utf8(out).unwrap();
        expect![[r#"
            Name:              web-node1
            Namespace:         default
            UID:               u1
            Priority:          0
            Node:              node1/192.0.2.1
            Start Time:        2026-01-01T00:00:00Z (60s ago)
            Labels:            a=b
                               c=d
            Annotations:       <none>
            Status:            CrashLoopBackOff
            Worker:            Syncing, next sync in 40s
            Last Error:        it failed
            IPs:               10.0.0.7
            Init Containers:
              side:            (sidecar)
                Image:         i
                Environment:   <none>
                Mounts:        <none>
            Containers:
              app:
                Container ID:  containerd://c1
                Image:         localhost/app:1
                Image ID:      sha256:1
                Ports:         80/TCP (host 8080)
                Command:       sh
                               -c
                State:         Waiting
                  Reason:      CrashLoopBackOff
                  Message:     a\u{1b}[2Jb
                Last State:    Terminated
                  Reason:      Error
                  Exit Code:   1
                  Started:     2026-01-01T00:00:10Z (50s ago)
                  Finished:    2026-01-01T00:00:20Z (40s ago)
                Ready:         False
                Restart Count: 2
                Limits:        cpu 1, memory 1Gi
                Liveness:      exec delay=0s timeout=1s period=10s #success=1 #failure=3
                Environment:   * (all of config map cm)
                               PASSWORD
                               KEY (secretKeyRef: key=pw name=db)
                Mounts:        /data from data (ro)
            Conditions:
              Ready   False   ContainersNotReady: x
            Volumes:
              data:            hostPath path=/srv type=
                State:         mounted for 10s
              tmp:             emptyDir
                State:         failed: no\u{7} space
              kubernetes.io~nfs/pv1:
                State:         cannot be unmounted: busy
            Devices:
              example.com/cam: c1, Unhealthy, NUMA node 1, in app
            Resource Claims:
              gpu:             gpu-0 of gpu.example.com in node1, prepared
            QoS Class:         Burstable
            Node-Selectors:    <none>
            Tolerations:       :NoExecute op=Exists
            Events:            <none>
        "#]]
        .assert_eq(&text);
    }
}
