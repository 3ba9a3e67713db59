//! Delivery of events to the API server (Go: client-go's tools/record, its event sink).
//!
//! DIFFERS: upstream delivers in the recorder itself, so that an unavailable API server delays
//! every event by two minutes and loses those that no longer fit. Here delivery has its own queue
//! and thread: the log on the node continues, unsent events wait, a repeat replaces the waiting
//! entry of the same event, and only the oldest of more than [`WAITING`] events are lost. When the
//! others were sent, an event of the node has their number and times.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use jiff::Timestamp;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::client::{Client, Moment};
use super::correlator;
use super::error::ApiError;
use super::events::{self, EventLog, RecordedEvent};
use super::spread::Spread;
use super::target::Target;
use crate::model::event::{Event, EventType, Regarding};
use crate::model::{api, meta, reasons};
use crate::util::backoff::random_unit;
use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Events that may wait for the API server; equal to the capacity of the log.
pub const WAITING: usize = super::events::MAX_EVENTS;

/// Dropped events that are remembered until they are reported. A repeat has the name of an event only as long
/// as the correlator knows the event, so no other can be repeated.
const REMEMBERED: usize = correlator::CACHE + WAITING;

/// The pause between two attempts while there is no response; the first is a random part of it.
const PAUSE: Duration = Duration::from_secs(10);
/// After this many attempts without a response, the API server is considered unavailable; after this
/// many unexpected responses for one event, the event is dropped.
const TRIES: u32 = 12;
const LONG_PAUSE: Duration = Duration::from_secs(30);
/// Time limit for one request and its response.
const TIMEOUT: Duration = Duration::from_secs(30);
const COMPONENT: &str = "kubelet";

#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Done,
    /// The event does not exist: it was never sent, or has expired.
    Missing,
    Exists,
    /// There was no response, or one from a proxy in front of the API server.
    Away,
    /// An unexpected response; it may be temporary.
    Unexpected(String),
    /// The API server refuses the event, for this reason.
    Refused(String),
}

/// The requests to the API server for events.
trait EventApi {
    fn create(&self, namespace: &str, event: &api::Event) -> Outcome;
    /// PATCH, a strategic merge.
    fn patch(&self, namespace: &str, name: &str, change: &Value) -> Outcome;
    /// The present state of the client.
    fn moment(&self) -> Moment;
    /// Waits after a request that began at `moment`, but not longer than its reason lasts: with other
    /// credentials, or after a return of the API server, the next request may succeed.
    fn pause(&self, moment: Moment, limit: Duration, stop: &StopToken) -> Waited;
}

/// Counters of the delivery.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events that wait now.
    pub waiting: usize,
    /// Completed requests.
    pub sent: u64,
    /// Events that the API server refused.
    pub refused: u64,
    /// Events that were dropped because the queue was full, and were not repeated since.
    pub lost: u64,
}

#[derive(Debug, Clone)]
struct Entry {
    event: Arc<RecordedEvent>,
    /// Whether the event was never sent.
    new: bool,
}

/// A number of events, with the first and the last time at which they happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Summary {
    number: u64,
    first: Timestamp,
    last: Timestamp,
}

impl Summary {
    fn from_event(event: &RecordedEvent) -> Summary {
        Summary { number: 1, first: event.first_seen, last: event.last_seen }
    }

    fn merge(self, other: Summary) -> Summary {
        Summary {
            number: self.number + other.number,
            first: self.first.min(other.first),
            last: self.last.max(other.last),
        }
    }

    /// The event that reports it.
    fn event(self) -> Event {
        let Summary { number, first, last } = self;
        let (events, were) = if number == 1 { ("event", "was") } else { ("events", "were") };
        let message = format!(
            "{number} {events} from {first:.0} to {last:.0} {were} not sent: more than {WAITING} waited for \
             the API server"
        );
        Event {
            time: Timestamp::now(),
            regarding: Regarding::Node,
            kind: EventType::Warning,
            reason: reasons::EVENTS_DROPPED,
            message,
            annotations: BTreeMap::new(),
        }
    }
}

/// The events that were dropped since the last report.
#[derive(Debug, Default)]
struct Dropped {
    hasher: RandomState,
    /// By the hash of their name; at most [`REMEMBERED`].
    recent: HashMap<u64, Summary>,
    /// Earlier ones.
    former: Option<Summary>,
}

impl Dropped {
    fn add(&mut self, key: &(String, String), event: &RecordedEvent) {
        self.recent.insert(self.hasher.hash_one(key), Summary::from_event(event));
        if self.recent.len() > REMEMBERED {
            // From here on each dropped event costs one pass over them.
            let oldest = self.recent.iter().min_by_key(|(_, summary)| summary.last).map(|(hash, _)| *hash);
            let summary = oldest.and_then(|hash| self.recent.remove(&hash));
            self.former = self.former.into_iter().chain(summary).reduce(Summary::merge);
        }
    }

    /// Removes an event; `false`: it is not remembered.
    fn remove(&mut self, key: &(String, String)) -> bool {
        self.recent.remove(&self.hasher.hash_one(key)).is_some()
    }

    /// Removes all.
    fn take(&mut self) -> Option<Summary> {
        let Dropped { recent, former, .. } = std::mem::take(self);
        former.into_iter().chain(recent.into_values()).reduce(Summary::merge)
    }
}

/// The events that wait, oldest first; at most one entry per event.
#[derive(Debug, Default)]
struct Queue {
    entries: BTreeMap<u64, Entry>,
    by_name: HashMap<(String, String), u64>,
    last: u64,
    counts: Counts,
    dropped: Dropped,
}

impl Queue {
    fn put(&mut self, event: Arc<RecordedEvent>, new: bool) {
        let key = key(&event);
        if let Some(entry) = self.by_name.get(&key).and_then(|ticket| self.entries.get_mut(ticket)) {
            entry.event = event;
            return;
        }
        // A repeat has the whole count of its event.
        self.restore(&key);
        self.last += 1;
        self.by_name.insert(key, self.last);
        self.entries.insert(self.last, Entry { event, new });
        if self.entries.len() > WAITING {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        // A report on dropped events has a number that would be lost with it.
        let is_report = |entry: &Entry| entry.event.reason == reasons::EVENTS_DROPPED;
        let oldest = self.entries.iter().find(|(_, entry)| !is_report(entry));
        let ticket = oldest.or(self.entries.first_key_value()).map(|(ticket, _)| *ticket);
        if let Some(entry) = ticket.and_then(|ticket| self.entries.remove(&ticket)) {
            let key = key(&entry.event);
            self.by_name.remove(&key);
            self.dropped.add(&key, &entry.event);
            self.counts.lost += 1;
        }
    }

    /// An event that may have been dropped is queued again, or was sent nevertheless.
    fn restore(&mut self, key: &(String, String)) {
        if self.dropped.remove(key) {
            self.counts.lost = self.counts.lost.saturating_sub(1);
        }
    }

    /// The dropped events, once all others were sent: the API server is back then, and a report on them is
    /// not dropped itself.
    fn take_dropped(&mut self) -> Option<Summary> {
        if self.entries.is_empty() { self.dropped.take() } else { None }
    }

    fn first(&self) -> Option<(u64, Entry)> {
        self.entries.first_key_value().map(|(ticket, entry)| (*ticket, entry.clone()))
    }

    /// Removes the entry with this ticket. If the event was repeated meanwhile, its entry stays.
    fn finish(&mut self, ticket: u64, sent: &Entry) {
        let Some(entry) = self.entries.get_mut(&ticket) else {
            // It was dropped for a new event while it was being sent.
            self.restore(&key(&sent.event));
            return;
        };
        if Arc::ptr_eq(&entry.event, &sent.event) {
            self.by_name.remove(&key(&sent.event));
            self.entries.remove(&ticket);
        } else {
            entry.new = false;
        }
    }
}

fn key(event: &RecordedEvent) -> (String, String) {
    (event.namespace().to_owned(), event.name.clone())
}

/// The recorder's end of the queue. Never blocks.
#[derive(Clone)]
pub(super) struct Outbox {
    queue: Arc<Mutex<Queue>>,
    bell: Sender<()>,
}

impl Outbox {
    /// Queues an event for delivery; `new` if it was never sent.
    pub(super) fn put(&self, event: Arc<RecordedEvent>, new: bool) {
        self.queue.locked().put(event, new);
        // If the bell is full, it rings already; after the end of the thread there is no reader.
        let _ = self.bell.try_send(());
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> Counts {
        let queue = self.queue.locked();
        Counts { waiting: queue.entries.len(), ..queue.counts }
    }
}

/// Returns the UID of the Node object, once it is known.
pub type NodeUid = Box<dyn Fn() -> Option<String> + Send>;

/// Starts to deliver what `log` records, and what it has recorded before, with the credentials of
/// `client` and the rate of `limits`. Events of the node have its UID.
///
/// # Errors
/// When the kernel cannot create the thread.
pub fn spawn(
    log: &EventLog,
    client: &Client,
    limits: Option<(f64, u32)>,
    node_uid: NodeUid,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    let breaker = client.breaker();
    let own = client.with_limits(limits, TIMEOUT).with_breaker(breaker.clone());
    let running = start(log, own, node_uid, on_death)?;
    Ok(running.with_waker(Box::new(move || breaker.trip())))
}

fn start(
    log: &EventLog,
    client: impl EventApi + Send + 'static,
    node_uid: NodeUid,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    let (ring, bell) = bounded(1);
    let outbox = Outbox { queue: Arc::default(), bell: ring };
    let (own, own_log) = (outbox.clone(), log.clone());
    let running = threads::spawn("events-api", Stack::Large, on_death, move |stop| {
        run(&stop, &bell, &own, &own_log, &client, &node_uid);
    })?;
    log.deliver_to(outbox);
    Ok(running)
}

impl EventApi for Client {
    fn create(&self, namespace: &str, event: &api::Event) -> Outcome {
        outcome(Client::create::<_, IgnoredAny>(self, &Target::events(namespace), event))
    }

    fn patch(&self, namespace: &str, name: &str, change: &Value) -> Outcome {
        let target = Target::event(namespace, name);
        outcome(Client::patch::<IgnoredAny>(self, &target, change))
    }

    fn moment(&self) -> Moment {
        Client::moment(self)
    }

    fn pause(&self, moment: Moment, limit: Duration, _: &StopToken) -> Waited {
        // Stopping the thread also trips the client's breaker.
        self.pause_with(moment, limit, Spread::OTHERS)
    }
}

/// The outcome for an event. The client has already obeyed `Retry-After`.
fn outcome(result: Result<IgnoredAny, ApiError>) -> Outcome {
    let Err(error) = result else { return Outcome::Done };
    match error.status() {
        _ if error.is_already_exists() => Outcome::Exists,
        _ if error.is_not_found() => Outcome::Missing,
        // DIFFERS: upstream drops the event. These statuses are not about the event: the node's
        // certificate is being renewed, or there is no API server behind a proxy.
        Some(401 | 404 | 502..=504) => Outcome::Away,
        Some(_) => Outcome::Refused(error.to_string()),
        // No event is sent before the first certificate of the node is approved.
        None if error.is_transport() || error.is_stopping() || error.is_unauthenticated() => Outcome::Away,
        None => Outcome::Unexpected(error.to_string()),
    }
}

/// Rate and burst of events; `None`: `eventRecordQPS` is 0, which its documentation defines as no
/// limit.
#[must_use]
pub fn limits(event_record_qps: i32, event_burst: i32) -> Option<(f64, u32)> {
    (event_record_qps > 0).then(|| client_limits(event_record_qps, event_burst))
}

/// Rate and burst of requests; zero means the client library's default.
#[must_use]
pub fn client_limits(qps: i32, burst: i32) -> (f64, u32) {
    let qps = if qps > 0 { f64::from(qps) } else { 5.0 };
    (qps, u32::try_from(burst).ok().filter(|burst| *burst > 0).unwrap_or(10))
}

fn run(
    stop: &StopToken,
    bell: &Receiver<()>,
    outbox: &Outbox,
    log: &EventLog,
    client: &impl EventApi,
    node_uid: &NodeUid,
) {
    let mut tries = Tries::default();
    loop {
        let first = outbox.queue.locked().first();
        let Some((ticket, entry)) = first else {
            let dropped = outbox.queue.locked().take_dropped();
            if let Some(dropped) = dropped {
                log.record(dropped.event());
                continue;
            }
            let _waiting = threads::waiting("events");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                // `outbox` has the other end of the bell, so the channel stays open.
                recv(bell) -> _ => continue,
            }
        };
        let moment = client.moment();
        let outcome = deliver(client, &entry, node_uid);
        if stop.is_stopped() {
            return;
        }
        let pause = tries.after(ticket, &outcome);
        if pause.is_none() {
            let mut queue = outbox.queue.locked();
            queue.finish(ticket, &entry);
            match &outcome {
                Outcome::Refused(reason) | Outcome::Unexpected(reason) => {
                    queue.counts.refused += 1;
                    log_rejection(queue.counts.refused, &entry.event, reason);
                }
                _ => queue.counts.sent += 1,
            }
        }
        if let Some(pause) = pause
            && client.pause(moment, pause, stop) == Waited::Stopped
        {
            return;
        }
        if stop.is_stopped() {
            return;
        }
    }
}

/// Logs a refusal at doubling counts.
fn log_rejection(refused: u64, event: &RecordedEvent, reason: &str) {
    // As upstream, it is no problem that a namespace takes no events while it is deleted.
    let level = if reason.contains("because it is being terminated") || !refused.is_power_of_two() {
        log::Level::Debug
    } else {
        log::Level::Warn
    };
    let again = if refused > 1 { format!(" ({refused} so far)") } else { String::new() };
    log::log!(
        level,
        "the API server refuses event {} {} of {}{again}: {reason}",
        event.name,
        event.reason,
        event.object()
    );
}

/// The number of attempts.
#[derive(Debug, Default)]
struct Tries {
    /// The last event.
    ticket: u64,
    /// Unexpected responses for this event.
    unexpected: u32,
    /// Attempts without success in a row, also for events that were dropped meanwhile.
    failed: u32,
}

impl Tries {
    /// The pause before the next attempt for the same event; `None`: continue with the next event.
    fn after(&mut self, ticket: u64, outcome: &Outcome) -> Option<Duration> {
        if self.ticket != ticket {
            (self.ticket, self.unexpected) = (ticket, 0);
        }
        let again = match outcome {
            Outcome::Away => true,
            Outcome::Unexpected(_) => {
                self.unexpected += 1;
                self.unexpected < TRIES
            }
            _ => false,
        };
        if !again {
            *self = Tries::default();
            return None;
        }
        self.failed = self.failed.saturating_add(1);
        Some(match self.failed {
            1 => PAUSE.mul_f64(random_unit()),
            few if few <= TRIES => PAUSE,
            _ => LONG_PAUSE,
        })
    }
}

fn deliver(client: &impl EventApi, entry: &Entry, node_uid: &NodeUid) -> Outcome {
    let event = &*entry.event;
    let namespace = event.namespace();
    if !entry.new {
        match client.patch(namespace, &event.name, &change(event)) {
            // The event has expired: create it again.
            Outcome::Missing => {}
            outcome => return outcome,
        }
    }
    match client.create(namespace, &body(event, node_uid)) {
        // An earlier attempt succeeded but its response was lost: no other event has this name.
        Outcome::Exists if event.count > 1 => match client.patch(namespace, &event.name, &change(event)) {
            Outcome::Missing => Outcome::Done,
            outcome => outcome,
        },
        Outcome::Missing => Outcome::Refused(format!("there is no namespace {namespace}")),
        outcome => outcome,
    }
}

/// The fields that a repeat changes.
fn change(event: &RecordedEvent) -> Value {
    json!({
        "count": event.count,
        "lastTimestamp": meta::Time(event.last_seen),
        "message": message(event),
    })
}

/// The event as the API server stores it.
fn body(event: &RecordedEvent, node_uid: &NodeUid) -> api::Event {
    let some = |text: &str| Some(text.to_owned());
    let involved_object = match &event.regarding {
        Regarding::Pod { namespace, name, uid, field_path } => api::ObjectReference {
            api_version: some("v1"),
            kind: some("Pod"),
            namespace: some(namespace),
            name: some(name),
            uid: some(uid.as_str()),
            field_path: Some(field_path.clone()).filter(|path| !path.is_empty()),
            ..api::ObjectReference::default()
        },
        // A manifest is no object of the cluster; users find its events on the node.
        // DIFFERS: upstream leaves the UID out of some events of the node.
        Regarding::Node | Regarding::Manifest { .. } => api::ObjectReference {
            api_version: some("v1"),
            kind: some("Node"),
            name: some(&event.host),
            uid: node_uid(),
            ..api::ObjectReference::default()
        },
    };
    api::Event {
        metadata: meta::ObjectMeta {
            name: some(&event.name),
            namespace: some(event.namespace()),
            annotations: Some(event.annotations.clone()).filter(|all| !all.is_empty()),
            ..meta::ObjectMeta::default()
        },
        involved_object,
        reason: some(&event.reason),
        message: Some(message(event)),
        source: Some(api::EventSource { component: some(COMPONENT), host: some(&event.host) }),
        first_timestamp: Some(meta::Time(event.first_seen)),
        last_timestamp: Some(meta::Time(event.last_seen)),
        count: Some(i32::try_from(event.count).unwrap_or(i32::MAX)),
        type_: some(match event.kind {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        }),
        reporting_component: some(COMPONENT),
        reporting_instance: some(&event.host),
        ..api::Event::default()
    }
}

fn message(event: &RecordedEvent) -> String {
    let mut message = match &event.regarding {
        Regarding::Manifest { source } if !event.message.contains(source) => {
            format!("{source}: {}", event.message)
        }
        _ => event.message.clone(),
    };
    // A cut message keeps the prefix.
    events::truncate(&mut message);
    message
}

#[cfg(test)]
#[path = "event_sink_tests.rs"]
mod tests;
