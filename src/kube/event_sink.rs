//! Events on their way to the API server (Go: client-go's tools/record, its event sink).
//!
//! DIFFERS: upstream delivers in the recorder itself, so that an API server that is away
//! holds up every event after two minutes and loses those that no longer fit. Here delivery
//! has a queue and a thread of its own: the log on the node goes on, what could not be sent
//! waits, a repeat replaces what waits for the same event, and only the oldest of more than
//! [`WAITING`] events are lost, and counted.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::client::Client;
use super::error::ApiError;
use super::events::{self, EventLog, RecordedEvent};
use super::target::Target;
use crate::model::event::{EventType, Regarding};
use crate::model::{api, meta};
use crate::util::backoff::random_unit;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Events that may wait for the API server; as many as the log keeps.
pub const WAITING: usize = super::events::KEPT;

/// Between two tries while there is no response; the first pause is a random part of it.
const PAUSE: Duration = Duration::from_secs(10);
/// After so many tries without a response the API server is away for long.
const TRIES: u32 = 12;
const LONG_PAUSE: Duration = Duration::from_secs(30);
/// For one request and its response.
const TIMEOUT: Duration = Duration::from_secs(30);
const COMPONENT: &str = "kubelet";

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Done,
    /// The event is not there: it was never sent, or has expired.
    Missing,
    /// The event is there already.
    Exists,
    /// There was no response, or one from a proxy in front of the API server.
    Away,
    /// An unexpected response; it may be temporary.
    Odd(String),
    /// The API server does not want it, for this reason.
    Refused(String),
}

/// The API server, as far as events go.
trait EventApi {
    fn create(&self, namespace: &str, event: &api::Event) -> Outcome;
    /// PATCH, a strategic merge.
    fn patch(&self, namespace: &str, name: &str, change: &Value) -> Outcome;
    /// Counts the changes of credentials.
    fn era(&self) -> u64;
    /// Waits, but not longer than the credentials of `era` last: with others it may work at once.
    fn pause(&self, era: u64, limit: Duration, stop: &StopToken) -> Waited;
}

/// Numbers of the delivery.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events that wait now.
    pub waiting: usize,
    /// Requests that were done.
    pub sent: u64,
    /// Events that the API server did not want.
    pub refused: u64,
    /// Events that were too many.
    pub lost: u64,
}

#[derive(Debug, Clone)]
struct Entry {
    event: Arc<RecordedEvent>,
    /// Whether the event was never sent.
    new: bool,
}

/// What waits, oldest first; at most one entry per event.
#[derive(Debug, Default)]
struct Queue {
    entries: BTreeMap<u64, Entry>,
    by_name: HashMap<(String, String), u64>,
    last: u64,
    counts: Counts,
}

impl Queue {
    fn put(&mut self, event: Arc<RecordedEvent>, new: bool) {
        let key = key(&event);
        if let Some(entry) = self.by_name.get(&key).and_then(|ticket| self.entries.get_mut(ticket)) {
            entry.event = event;
            return;
        }
        self.last += 1;
        self.by_name.insert(key, self.last);
        self.entries.insert(self.last, Entry { event, new });
        if self.entries.len() > WAITING
            && let Some((_, oldest)) = self.entries.pop_first()
        {
            self.by_name.remove(&self::key(&oldest.event));
            self.counts.lost += 1;
        }
    }

    fn first(&self) -> Option<(u64, Entry)> {
        self.entries.first_key_value().map(|(ticket, entry)| (*ticket, entry.clone()))
    }

    /// `sent` of this ticket is dealt with. If the event was repeated meanwhile, that is left.
    fn finish(&mut self, ticket: u64, sent: &Entry) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
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

/// Where the recorder leaves events for delivery. Never blocks.
#[derive(Clone)]
pub(super) struct Outbox {
    queue: Arc<Mutex<Queue>>,
    bell: Sender<()>,
}

impl Outbox {
    /// Queues an event for delivery; `new` if it was never sent.
    pub(super) fn put(&self, event: Arc<RecordedEvent>, new: bool) {
        self.lock().put(event, new);
        // A full bell already rings; after the end of the thread there is no reader.
        let _ = self.bell.try_send(());
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> Counts {
        let queue = self.lock();
        Counts { waiting: queue.entries.len(), ..queue.counts }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts to deliver what `log` records, and what it has recorded so far, with the credentials
/// of `client` and the rate of `limits`.
///
/// # Errors
/// When the kernel refuses the thread.
pub fn spawn(
    log: &EventLog,
    client: &Client,
    limits: (f64, u32),
    on_death: OnDeath,
) -> std::io::Result<Running> {
    let breaker = client.breaker();
    let own = client.with_limits(Some(limits), TIMEOUT).with_breaker(breaker.clone());
    let running = start(log, own, on_death)?;
    Ok(running.with_waker(Box::new(move || breaker.trip())))
}

fn start(
    log: &EventLog,
    client: impl EventApi + Send + 'static,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    let (ring, bell) = bounded(1);
    let outbox = Outbox { queue: Arc::default(), bell: ring };
    let own = outbox.clone();
    let running = threads::spawn("events-api", Stack::Large, on_death, move |stop| {
        run(&stop, &bell, &own, &client);
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

    fn era(&self) -> u64 {
        self.generation()
    }

    fn pause(&self, era: u64, limit: Duration, _: &StopToken) -> Waited {
        // Who stops the thread trips the client's breaker.
        self.pause_with(era, limit)
    }
}

/// What a response means for an event. The client has obeyed `Retry-After` already.
fn outcome(answer: Result<IgnoredAny, ApiError>) -> Outcome {
    let Err(error) = answer else { return Outcome::Done };
    match error.status() {
        _ if error.is_already_exists() => Outcome::Exists,
        _ if error.is_not_found() => Outcome::Missing,
        // DIFFERS: upstream drops the event. These statuses do not concern it: the node's
        // certificate is being renewed, or there is no API server behind a proxy.
        Some(401 | 404 | 502..=504) => Outcome::Away,
        Some(_) => Outcome::Refused(error.to_string()),
        // Before the first certificate nothing is sent at all, for as long as its approval takes.
        None if error.is_transport() || error.is_stopping() || error.is_unauthenticated() => Outcome::Away,
        None => Outcome::Odd(error.to_string()),
    }
}

/// Rate and burst as the configuration means them: zero is the library's default.
#[must_use]
pub fn limits(event_record_qps: i32, event_burst: i32) -> (f64, u32) {
    let qps = if event_record_qps > 0 { f64::from(event_record_qps) } else { 5.0 };
    (qps, u32::try_from(event_burst).ok().filter(|burst| *burst > 0).unwrap_or(10))
}

fn run(stop: &StopToken, bell: &Receiver<()>, outbox: &Outbox, client: &impl EventApi) {
    let mut tries = Tries::default();
    loop {
        let first = outbox.lock().first();
        let Some((ticket, entry)) = first else {
            let _waiting = threads::waiting("events");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                // The other end is in `outbox`, so the bell is never cut off.
                recv(bell) -> _ => continue,
            }
        };
        let era = client.era();
        let outcome = deliver(client, &entry);
        if stop.is_stopped() {
            return;
        }
        let pause = tries.after(&outcome);
        if pause.is_none() {
            let mut queue = outbox.lock();
            queue.finish(ticket, &entry);
            match &outcome {
                Outcome::Refused(why) | Outcome::Odd(why) => {
                    queue.counts.refused += 1;
                    log_rejection(queue.counts.refused, &entry.event, why);
                }
                _ => queue.counts.sent += 1,
            }
        }
        if let Some(pause) = pause
            && client.pause(era, pause, stop) == Waited::Stopped
        {
            return;
        }
        if stop.is_stopped() {
            return;
        }
    }
}

/// Logs a refusal at doubling counts.
fn log_rejection(refused: u64, event: &RecordedEvent, why: &str) {
    // As upstream: a namespace that is being deleted takes no events; that is no problem.
    let level = if why.contains("because it is being terminated") || !refused.is_power_of_two() {
        log::Level::Debug
    } else {
        log::Level::Warn
    };
    let again = if refused > 1 { format!(" ({refused} so far)") } else { String::new() };
    log::log!(
        level,
        "the API server refuses event {} {} of {}{again}: {why}",
        event.name,
        event.reason,
        event.object()
    );
}

/// How often the first event in the queue was tried.
#[derive(Debug, Default)]
struct Tries(u32);

impl Tries {
    /// The pause before the next try of the same event; `None`: on to the next event.
    fn after(&mut self, outcome: &Outcome) -> Option<Duration> {
        let again = match outcome {
            Outcome::Away => true,
            Outcome::Odd(_) => self.0 + 1 < TRIES,
            _ => false,
        };
        if !again {
            *self = Tries::default();
            return None;
        }
        self.0 = self.0.saturating_add(1);
        Some(match self.0 {
            1 => PAUSE.mul_f64(random_unit()),
            few if few <= TRIES => PAUSE,
            _ => LONG_PAUSE,
        })
    }
}

fn deliver(client: &impl EventApi, entry: &Entry) -> Outcome {
    let event = &*entry.event;
    let namespace = event.namespace();
    if !entry.new {
        match client.patch(namespace, &event.name, &change(event)) {
            // The event has expired: it is created again.
            Outcome::Missing => {}
            outcome => return outcome,
        }
    }
    match client.create(namespace, &body(event)) {
        // An earlier try arrived and its response did not; the name is of one event only.
        Outcome::Exists if event.count > 1 => match client.patch(namespace, &event.name, &change(event)) {
            Outcome::Missing => Outcome::Done,
            outcome => outcome,
        },
        Outcome::Missing => Outcome::Refused(format!("there is no namespace {namespace}")),
        outcome => outcome,
    }
}

/// What a repeat changes.
fn change(event: &RecordedEvent) -> Value {
    json!({
        "count": event.count,
        "lastTimestamp": meta::Time(event.last_seen),
        "message": message(event),
    })
}

/// The event as the API server stores it.
fn body(event: &RecordedEvent) -> api::Event {
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
        // A manifest is no object of the cluster; users look for it on the node.
        Regarding::Node | Regarding::Manifest { .. } => api::ObjectReference {
            api_version: some("v1"),
            kind: some("Node"),
            name: some(&event.host),
            ..api::ObjectReference::default()
        },
    };
    api::Event {
        metadata: meta::ObjectMeta {
            name: some(&event.name),
            namespace: some(event.namespace()),
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
    // What was put in front of it counts, too.
    events::cut(&mut message);
    message
}

#[cfg(test)]
#[path = "event_sink_tests.rs"]
mod tests;
