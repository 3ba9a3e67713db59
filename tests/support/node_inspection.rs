//! More ways to inspect a node: its events, the files that its containers write, its processes.

use std::fs;
use std::time::{Duration, Instant};

use coracle::cri::{ImageClient, RuntimeClient};
use serde_json::{Value, json};

use super::manifest::push;
use super::node::{LONG, Node};
use super::wait::{pause, wait_for};

impl Node {
    /// The events of a pod, or all of the node's for an empty name, oldest first.
    pub(crate) fn events(&self, pod: &str) -> Vec<NodeEvent> {
        let full = self.full_name(pod);
        let events: Vec<Value> =
            serde_json::from_str(&self.cli(&["events", "-o", "json"])).expect("events are JSON");
        let mut events: Vec<NodeEvent> = events.iter().map(NodeEvent::from_event).collect();
        events.retain(|event| pod.is_empty() || event.name == full);
        events
    }

    /// The events of a pod with a reason.
    pub(crate) fn events_with_reason(&self, pod: &str, reason: &str) -> Vec<NodeEvent> {
        let mut events = self.events(pod);
        events.retain(|event| event.reason == reason);
        events
    }

    /// Waits for an event of a pod whose message contains `words`.
    pub(crate) fn wait_event(&self, pod: &str, reason: &str, words: &str) -> NodeEvent {
        let begun = Instant::now();
        loop {
            let events = self.events(pod);
            if let Some(event) =
                events.iter().find(|event| event.reason == reason && event.message.contains(words))
            {
                return event.clone();
            }
            assert!(
                begun.elapsed() < LONG,
                "timed out after {LONG:?} waiting for event {reason} {words:?} of {pod:?}; there are {events:#?}"
            );
            pause(Duration::from_millis(50));
        }
    }

    /// Clients of the runtime's own interface.
    pub(crate) fn cri(&self) -> (RuntimeClient, ImageClient) {
        coracle::cri::connect(coracle::cri::Settings {
            runtime_endpoint: self.containerd.endpoint(),
            image_endpoint: None,
            request_timeout: Duration::from_secs(60),
        })
        .expect("a local endpoint")
    }

    /// The process of a running container, as the host numbers it.
    pub(crate) fn process(&self, container: &str) -> u32 {
        self.containerd.running_task(container).pid
    }

    /// Lays [`Node::shared`] into every container of a pod, as /out.
    pub(crate) fn with_out(&self, mut manifest: Value) -> Value {
        let shared = self.shared();
        let spec = &mut manifest["spec"];
        for list in ["initContainers", "containers"] {
            for container in spec[list].as_array_mut().into_iter().flatten() {
                push(&mut container["volumeMounts"], json!({"name": "out", "mountPath": "/out"}));
            }
        }
        push(&mut spec["volumes"], json!({"name": "out", "hostPath": {"path": shared}}));
        manifest
    }

    /// The text of a file of [`Node::shared`]; empty while it is not there.
    pub(crate) fn out(&self, file: &str) -> String {
        fs::read_to_string(self.shared().join(file)).unwrap_or_default()
    }

    /// The moments that containers wrote into a file by [`STAMP`], in seconds.
    pub(crate) fn stamps(&self, file: &str) -> Vec<f64> {
        self.out(file).lines().filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
    }

    /// Waits for the first such moment.
    pub(crate) fn wait_stamp(&self, file: &str) -> f64 {
        wait_for(&format!("a moment in {file}"), LONG, || self.stamps(file).first().copied())
    }

    /// The last such moment. What appends can be killed at any point and leaves a whole last line.
    pub(crate) fn last_stamp(&self, file: &str) -> f64 {
        wait_for(&format!("a moment in {file}"), LONG, || self.stamps(file).last().copied())
    }

    /// Makes an empty file in [`Node::shared`], which a container waits for.
    pub(crate) fn touch(&self, file: &str) {
        fs::write(self.shared().join(file), "").expect("the shared directory is writable");
    }
}

/// This moment, by the clock of [`STAMP`](super::manifest::STAMP).
pub(crate) fn moment() -> f64 {
    let text = fs::read_to_string("/proc/uptime").expect("the kernel's clock");
    text.split_whitespace().next().and_then(|word| word.parse().ok()).expect("seconds")
}

/// An event as `coracle events -o json` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeEvent {
    pub kind: String,
    pub reason: String,
    pub message: String,
    /// What it is about: `Pod`, `Node` or `Manifest`, with name, uid and part.
    pub object: String,
    pub name: String,
    pub uid: String,
    pub field: String,
    pub namespace: String,
    pub count: u64,
}

impl NodeEvent {
    fn from_event(event: &Value) -> NodeEvent {
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        let object = &event["involvedObject"];
        NodeEvent {
            kind: text(&event["type"]),
            reason: text(&event["reason"]),
            message: text(&event["message"]),
            object: text(&object["kind"]),
            name: text(&object["name"]),
            uid: text(&object["uid"]),
            field: text(&object["fieldPath"]),
            namespace: text(&event["metadata"]["namespace"]),
            count: event["count"].as_u64().unwrap_or(0),
        }
    }
}
