//! Kubernetes events on their way to the API server. They are informational: a full queue drops and
//! counts them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};
use jiff::Timestamp;

use super::ids::PodUid;

/// Events that may wait for the recorder. A burst of 100 pods makes about 600.
pub const QUEUE: usize = 1000;

/// Kubernetes' two kinds of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum EventType {
    /// Expected.
    Normal,
    /// A problem that needs attention.
    Warning,
}

/// The object of an event.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind")]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Regarding {
    Pod {
        namespace: String,
        name: String,
        uid: PodUid,
        /// A field path such as `spec.containers{web}`; empty for the whole pod.
        #[serde(rename = "fieldPath", default)]
        field_path: String,
    },
    Node,
    /// A file or URL of manifests: it is no API object (not in upstream).
    Manifest {
        /// Path or URL.
        source: String,
    },
}

/// One event as raised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The time.
    pub time: Timestamp,
    /// The object.
    pub regarding: Regarding,
    /// Normal or Warning.
    pub kind: EventType,
    /// CamelCase reason, see `model::reasons`.
    pub reason: &'static str,
    /// The message.
    pub message: String,
    /// Annotations of the event's object.
    pub annotations: BTreeMap<&'static str, String>,
}

/// The posting end. Never blocks. Clones share it.
#[derive(Debug, Clone)]
pub struct EventSink {
    /// Boxed: the channel allocates its slots at the start.
    queue: Sender<Box<Event>>,
    lost: Arc<AtomicU64>,
}

impl EventSink {
    /// A sink and the queue that the recorder reads.
    #[must_use]
    pub fn new() -> (Self, Receiver<Box<Event>>) {
        let (queue, inbox) = bounded(QUEUE);
        (EventSink { queue, lost: Arc::default() }, inbox)
    }

    /// Raises an event now.
    pub fn raise(
        &self,
        regarding: Regarding,
        kind: EventType,
        reason: &'static str,
        message: impl Into<String>,
    ) {
        self.send(regarding, kind, reason, message.into(), BTreeMap::new());
    }

    /// A Warning event about a pod, with annotations.
    pub fn annotated_warning(
        &self,
        pod: &super::pod::Pod,
        reason: &'static str,
        message: impl Into<String>,
        annotations: BTreeMap<&'static str, String>,
    ) {
        self.send(pod.regarding(""), EventType::Warning, reason, message.into(), annotations);
    }

    fn send(
        &self,
        regarding: Regarding,
        kind: EventType,
        reason: &'static str,
        message: String,
        annotations: BTreeMap<&'static str, String>,
    ) {
        let event = Event { time: Timestamp::now(), regarding, kind, reason, message, annotations };
        if self.queue.try_send(Box::new(event)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A Normal event about a pod.
    pub fn normal(&self, pod: &super::pod::Pod, reason: &'static str, message: impl Into<String>) {
        self.raise(pod.regarding(""), EventType::Normal, reason, message);
    }

    /// A Warning event about a pod.
    pub fn warning(&self, pod: &super::pod::Pod, reason: &'static str, message: impl Into<String>) {
        self.raise(pod.regarding(""), EventType::Warning, reason, message);
    }

    /// Events that wait for the recorder.
    pub fn depth(&self) -> usize {
        self.queue.len()
    }

    /// Events dropped so far because the queue was full.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
