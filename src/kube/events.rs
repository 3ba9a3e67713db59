//! The event recorder: equal events become one with a count, and the newest [`MAX_EVENTS`] are stored.
//! The pure parts are `Correlator` and `EventTable`; the thread moves events from the queue through
//! them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::correlator::Correlator;
#[cfg(test)]
use super::event_sink::Counts;
use super::event_sink::Outbox;
use crate::model::event::{Event, EventType, Regarding};
use crate::model::names::is_dns_subdomain;
use crate::util::lock::LockExt;
use crate::util::sha256;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Distinct events that are stored; with long messages this stays below 1 MiB.
pub const MAX_EVENTS: usize = 1000;

/// Longer messages are cut: events are for people, and memory is bounded.
const MESSAGE_BYTES: usize = 1024;

/// Cuts a message that is too long; the result with its mark is within the limit.
pub(super) fn truncate(message: &mut String) {
    const MARK: char = '…';
    if message.len() > MESSAGE_BYTES {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES - MARK.len_utf8()));
        message.push(MARK);
    }
}

/// The component that events name as their source.
const COMPONENT: &str = "kubelet";

/// A stored event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Wire", from = "Wire")]
pub struct RecordedEvent {
    /// Increases with every new or repeated event; a repeat moves its event to the end.
    pub seq: u64,
    /// Unique name, `<object>.<time in hex>`, the same for repeats.
    pub name: String,
    /// Normal or Warning.
    pub kind: EventType,
    /// CamelCase reason.
    pub reason: String,
    /// The message.
    pub message: String,
    /// The object that it is about.
    pub regarding: Regarding,
    /// The node that reports it.
    pub host: String,
    /// The number of occurrences.
    pub count: u32,
    /// First time.
    pub first_seen: Timestamp,
    /// Last time.
    pub last_seen: Timestamp,
    /// Annotations of the event's object.
    pub annotations: BTreeMap<String, String>,
}

impl RecordedEvent {
    /// The namespace of its object, or `default` for objects without one.
    pub fn namespace(&self) -> &str {
        match &self.regarding {
            Regarding::Pod { namespace, .. } if !namespace.is_empty() => namespace,
            _ => "default",
        }
    }

    /// The object as `kubectl get events` writes it, such as `pod/web`.
    pub fn object(&self) -> String {
        match &self.regarding {
            Regarding::Pod { name, .. } => format!("pod/{name}"),
            Regarding::Node => format!("node/{}", self.host),
            Regarding::Manifest { source } => format!("manifest/{source}"),
        }
    }
}

/// A core/v1 Event, with the fields that are used here.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    seq: u64,
    metadata: WireName,
    involved_object: WireObject,
    #[serde(rename = "type")]
    kind: EventType,
    reason: String,
    #[serde(default)]
    message: String,
    source: WireSource,
    first_timestamp: Timestamp,
    last_timestamp: Timestamp,
    count: u32,
}

#[derive(Serialize, Deserialize)]
struct WireName {
    name: String,
    namespace: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct WireObject {
    kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    uid: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    api_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    field_path: String,
}

#[derive(Serialize, Deserialize)]
struct WireSource {
    component: String,
    host: String,
}

impl From<RecordedEvent> for Wire {
    fn from(event: RecordedEvent) -> Self {
        let namespace = event.namespace().to_owned();
        let involved_object = match event.regarding {
            Regarding::Pod { namespace, name, uid, field_path } => WireObject {
                kind: "Pod".to_owned(),
                namespace,
                name,
                uid: uid.to_string(),
                api_version: "v1".to_owned(),
                field_path,
            },
            Regarding::Node => WireObject {
                kind: "Node".to_owned(),
                name: event.host.clone(),
                api_version: "v1".to_owned(),
                ..WireObject::default()
            },
            Regarding::Manifest { source } => {
                WireObject { kind: "Manifest".to_owned(), name: source, ..WireObject::default() }
            }
        };
        Wire {
            seq: event.seq,
            metadata: WireName { name: event.name, namespace, annotations: event.annotations },
            involved_object,
            kind: event.kind,
            reason: event.reason,
            message: event.message,
            source: WireSource { component: COMPONENT.to_owned(), host: event.host },
            first_timestamp: event.first_seen,
            last_timestamp: event.last_seen,
            count: event.count,
        }
    }
}

impl From<Wire> for RecordedEvent {
    fn from(wire: Wire) -> Self {
        let object = wire.involved_object;
        let regarding = match object.kind.as_str() {
            "Pod" => Regarding::Pod {
                namespace: object.namespace,
                name: object.name,
                uid: object.uid.into(),
                field_path: object.field_path,
            },
            "Node" => Regarding::Node,
            _ => Regarding::Manifest { source: object.name },
        };
        RecordedEvent {
            seq: wire.seq,
            name: wire.metadata.name,
            kind: wire.kind,
            reason: wire.reason,
            message: wire.message,
            regarding,
            host: wire.source.host,
            count: wire.count,
            first_seen: wire.first_timestamp,
            last_seen: wire.last_timestamp,
            annotations: wire.metadata.annotations,
        }
    }
}

/// The stored events, and the threads that wait for the next one.
struct EventTable {
    host: String,
    correlator: Correlator,
    last: u64,
    by_seq: BTreeMap<u64, Arc<RecordedEvent>>,
    by_key: HashMap<u64, u64>,
    waiters: Vec<Sender<()>>,
    /// Delivery to the API server, if there is one.
    outbox: Option<Outbox>,
}

impl EventTable {
    fn new(host: &str) -> Self {
        EventTable {
            host: host.to_owned(),
            correlator: Correlator::new(),
            last: 0,
            by_seq: BTreeMap::new(),
            by_key: HashMap::new(),
            waiters: Vec::new(),
            outbox: None,
        }
    }

    /// Stores an event and returns its current state; `None` when its object has used up its budget
    /// and the event is only counted.
    fn record(&mut self, mut event: Event) -> Option<Arc<RecordedEvent>> {
        truncate(&mut event.message);
        let report = self.correlator.take(&event)?;
        if let Some(old) = self.by_key.remove(&report.key) {
            self.by_seq.remove(&old);
        }
        self.last += 1;
        let recorded = Arc::new(RecordedEvent {
            seq: self.last,
            name: name_of(&event.regarding, &self.host, report.first),
            kind: event.kind,
            reason: event.reason.to_owned(),
            message: report.message,
            regarding: event.regarding,
            host: self.host.clone(),
            count: report.count,
            first_seen: report.first,
            last_seen: event.time,
            annotations: annotations(event.annotations),
        });
        self.by_key.insert(report.key, self.last);
        self.by_seq.insert(self.last, Arc::clone(&recorded));
        if let Some(outbox) = &self.outbox {
            outbox.put(Arc::clone(&recorded), report.count == 1);
        }
        if self.by_seq.len() > MAX_EVENTS
            && let Some((oldest, _)) = self.by_seq.pop_first()
        {
            // When the table is full, each event costs one pass over the map of MAX_EVENTS entries.
            self.by_key.retain(|_, seq| *seq != oldest);
        }
        for waiter in self.waiters.drain(..) {
            // A full bell already rings; a waiter that has ended is ignored.
            let _ = waiter.try_send(());
        }
        Some(recorded)
    }

    fn since(&self, seq: u64) -> Vec<RecordedEvent> {
        self.by_seq.range(seq.saturating_add(1)..).map(|(_, event)| RecordedEvent::clone(event)).collect()
    }
}

/// Cut as messages are: a pod has any number of containers.
fn annotations(values: BTreeMap<&'static str, String>) -> BTreeMap<String, String> {
    values
        .into_iter()
        .map(|(name, mut value)| {
            truncate(&mut value);
            (name.to_owned(), value)
        })
        .collect()
}

fn name_of(regarding: &Regarding, host: &str, time: Timestamp) -> String {
    let object = match regarding {
        Regarding::Pod { name, .. } => name.as_str(),
        Regarding::Node => host,
        Regarding::Manifest { .. } => "manifest",
    };
    let name = format!("{object}.{:x}", time.as_nanosecond());
    if is_dns_subdomain(&name) { name } else { uuid_of(&name) }
}

/// A UUID in place of a name that the API server would refuse. It is derived from the name, because
/// a repeat must find its event.
fn uuid_of(name: &str) -> String {
    let hex = sha256::sha256_hex(name.as_bytes());
    let part = |range: std::ops::Range<usize>| hex.get(range).unwrap_or_default();
    // Version 8, variant 1: a custom format.
    format!("{}-{}-8{}-8{}-{}", part(0..8), part(8..12), part(12..15), part(15..18), part(18..30))
}

/// A view of the recorded events, for readers. Clones share it.
#[derive(Clone)]
pub struct EventLog {
    table: Arc<Mutex<EventTable>>,
}

impl EventLog {
    /// An empty log without a recorder.
    fn new(host: &str) -> Self {
        EventLog { table: Arc::new(Mutex::new(EventTable::new(host))) }
    }

    /// Events that are new or were repeated since `since_seq` (0: all), in order.
    #[must_use]
    pub fn recent(&self, since_seq: u64) -> Vec<RecordedEvent> {
        self.table.locked().since(since_seq)
    }

    /// Waits until there is something newer than `seq`, up to `limit` or the stop signal.
    /// Returns whether there is.
    #[must_use]
    pub fn wait_newer(&self, seq: u64, stop: &StopToken, limit: Duration) -> bool {
        let (ring, bell) = bounded(1);
        {
            let mut table = self.table.locked();
            if table.last > seq {
                return true;
            }
            table.waiters.push(ring.clone());
        }
        let _waiting = threads::waiting("an event");
        select_biased! {
            recv(stop.signal()) -> _ => {}
            recv(bell) -> _ => {}
            default(limit) => {}
        }
        let mut table = self.table.locked();
        // Without events the list of waiters is never emptied, so a waiter removes its own bell.
        table.waiters.retain(|waiter| !waiter.same_channel(&ring));
        table.last > seq
    }

    /// Delivers later events, and those recorded so far.
    pub(super) fn deliver_to(&self, outbox: Outbox) {
        let mut table = self.table.locked();
        for event in table.by_seq.values() {
            outbox.put(Arc::clone(event), true);
        }
        table.outbox = Some(outbox);
    }

    #[cfg(test)]
    pub(super) fn delivery(&self) -> Option<Counts> {
        self.table.locked().outbox.as_ref().map(Outbox::counts)
    }

    /// Records an event at once, and not through the queue of the recorder.
    pub fn record(&self, event: Event) {
        let recorded = {
            let mut table = self.table.locked();
            table.record(event)
        };
        if let Some(recorded) = recorded {
            log_event(&recorded);
        }
    }
}

/// Logs an event when it is new, then at doubling counts.
fn log_event(event: &RecordedEvent) {
    if !event.count.is_power_of_two() {
        return;
    }
    let level = match event.kind {
        EventType::Normal => log::Level::Info,
        EventType::Warning => log::Level::Warn,
    };
    let again = if event.count > 1 { format!(" (seen {} times)", event.count) } else { String::new() };
    let (reason, message) = (&event.reason, &event.message);
    match &event.regarding {
        Regarding::Pod { namespace, name, uid, field_path } => {
            let part = if field_path.is_empty() { String::new() } else { format!(" part={field_path}") };
            log::log!(level, "{reason}: {message}{again} pod={namespace}/{name} uid={uid}{part}");
        }
        Regarding::Node => log::log!(level, "{reason}: {message}{again} node={}", event.host),
        Regarding::Manifest { source } => log::log!(level, "{reason}: {message}{again} manifest={source}"),
    }
}

/// Starts the recorder for the node `host`.
///
/// # Errors
/// When the kernel cannot create the thread.
pub fn spawn(
    host: &str,
    inbox: Receiver<Box<Event>>,
    on_death: OnDeath,
) -> std::io::Result<(Running, EventLog)> {
    let log = EventLog::new(host);
    let table = log.clone();
    let running = threads::spawn("events", Stack::Small, on_death, move |stop| run(&stop, &inbox, &table))?;
    Ok((running, log))
}

fn run(stop: &StopToken, inbox: &Receiver<Box<Event>>, log: &EventLog) {
    loop {
        let event = {
            let _waiting = threads::waiting("events");
            select_biased! {
                recv(stop.signal()) -> _ => None,
                recv(inbox) -> event => match event {
                    Ok(event) => Some(event),
                    // All senders are dropped: there will be no event, but the owner ends this thread.
                    Err(_) => { let _ = stop.signal().recv(); None }
                },
            }
        };
        match event {
            Some(event) => log.record(*event),
            None => break,
        }
    }
    // Events from before the stop still get their log lines.
    for event in inbox.try_iter().take(crate::model::event::QUEUE) {
        log.record(*event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::event::EventSink;
    use crate::model::ids::PodUid;

    fn event(name: &str, message: &str, second: i64) -> Event {
        Event {
            time: Timestamp::from_second(1_700_000_000 + second).unwrap(),
            regarding: Regarding::Pod {
                namespace: "default".into(),
                name: name.into(),
                uid: PodUid::from("u1"),
                field_path: String::new(),
            },
            kind: EventType::Warning,
            reason: "BackOff",
            message: message.into(),
            annotations: BTreeMap::new(),
        }
    }

    #[test]
    fn equal_events_become_one_with_a_count() {
        let mut table = EventTable::new("node");
        table.record(event("a", "again", 0));
        table.record(event("b", "again", 1));
        table.record(event("a", "again", 2));
        let all = table.since(0);
        let line = |e: &RecordedEvent| (e.object(), e.count, e.seq);
        assert_eq!(
            all.iter().map(line).collect::<Vec<_>>(),
            [("pod/b".into(), 1, 2), ("pod/a".into(), 2, 3)]
        );
        assert_eq!(all[1].last_seen.as_second() - all[1].first_seen.as_second(), 2);
        assert_eq!(table.since(2).len(), 1);
        assert!(table.since(u64::MAX).is_empty());
    }

    #[test]
    fn the_log_is_bounded_and_drops_the_oldest() {
        let mut table = EventTable::new("node");
        for index in 0..MAX_EVENTS + 50 {
            table.record(event(&format!("pod{index}"), "again", 0));
        }
        assert_eq!((table.by_seq.len(), table.by_key.len()), (MAX_EVENTS, MAX_EVENTS));
        assert_eq!(table.since(0)[0].object(), "pod/pod50");
        // Events that the table has dropped are still counted by the correlator.
        table.record(event("pod0", "again", 1));
        assert_eq!(table.since(table.last - 1)[0].count, 2);
    }

    #[test]
    fn many_different_failures_become_one_event_and_floods_end() {
        let mut table = EventTable::new("node");
        for index in 0..12 {
            table.record(event("a", &format!("failure {index}"), index));
        }
        let all = table.since(0);
        let last = all.last().unwrap();
        assert_eq!((all.len(), last.count), (10, 3));
        assert_eq!(last.message, "(combined from similar events): failure 11");
        assert_eq!(last.name, format!("a.{:x}", last.first_seen.as_nanosecond()));
        // A crash loop is one event with a growing count, until its budget is used up.
        for second in 0..50 {
            table.record(event("loop", "Back-off restarting failed container", second));
        }
        let last = table.since(0).pop().unwrap();
        assert_eq!((last.object(), last.count), ("pod/loop".into(), 25));
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let mut table = EventTable::new("node");
        let recorded = table.record(event("a", &"ä".repeat(4000), 0)).unwrap();
        assert!(recorded.message.len() <= MESSAGE_BYTES && recorded.message.ends_with('…'));
    }

    #[test]
    fn the_json_is_that_of_an_event_and_reads_back() {
        let mut table = EventTable::new("node1");
        let recorded = table.record(event("web", "text", 0)).unwrap();
        let json = serde_json::to_value(&recorded).unwrap();
        assert_eq!(json["involvedObject"]["kind"], "Pod");
        assert_eq!(json["involvedObject"]["uid"], "u1");
        assert_eq!(json["metadata"]["namespace"], "default");
        assert_eq!(json["source"]["host"], "node1");
        assert_eq!(json["type"], "Warning");
        assert_eq!(json["firstTimestamp"], "2023-11-14T22:13:20Z");
        assert_eq!(serde_json::from_value::<RecordedEvent>(json).unwrap(), *recorded);
        let node = Event { regarding: Regarding::Node, ..event("", "x", 0) };
        let json = serde_json::to_value(table.record(node).unwrap()).unwrap();
        assert_eq!(json["involvedObject"]["name"], "node1");
        assert!(json["involvedObject"].get("uid").is_none());
    }

    #[test]
    fn an_invalid_name_becomes_a_uuid() {
        let time = Timestamp::from_second(1_700_000_000).unwrap();
        let name = |host: &str| name_of(&Regarding::Node, host, time);
        assert_eq!(name("node1"), "node1.17979cfe362a0000");
        for odd in ["Node_1", "-a", "", &"a".repeat(250)] {
            let uuid = name(odd);
            assert_eq!(uuid.len(), 36, "{uuid}");
            assert!(is_dns_subdomain(&uuid), "{uuid}");
            assert_eq!(uuid, name(odd));
        }
        assert_ne!(name("-a"), name("-b"));
    }

    #[test]
    fn a_waiter_is_woken_by_an_event_and_by_the_stop() {
        let (sink, inbox) = EventSink::new();
        let (running, log) = spawn("node", inbox, OnDeath::Unsupervised).unwrap();
        sink.raise(Regarding::Node, EventType::Normal, "Starting", "here");
        assert!(log.wait_newer(0, &StopToken::never(), Duration::from_secs(30)));
        assert_eq!(log.recent(0)[0].reason, "Starting");
        let (source, token) = crate::util::stop::pair();
        drop(source);
        let last = log.table.locked().last;
        assert!(!log.wait_newer(last, &token, Duration::from_secs(30)));
        drop(running);
    }
}
