//! The `node` thread: registers the node, computes its status and writes changes.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select_biased};
use jiff::Timestamp;
use serde_json::Value;

use super::addresses::AddressError;
use super::api::{NodeApi, NodeError, NodeErrorKind};
use super::compose::NodeStatusInputs;
use super::conditions::{NodeEvent, READY};
use super::schedule::StatusSchedule;
use super::sensors::Sensors;
use super::settings::Settings;
use super::startup::StartupTimes;
use super::watch::NodeWatch;
use super::{compose, patch};
use crate::kube::Spread;
use crate::kube::client::CERTIFICATE_REMEDY;
use crate::model::api::{Node, NodeAddress};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::reasons;
use crate::resources::{Roots, stats};
use crate::util::backoff::{Failures, random_unit};
use crate::util::stop::StopToken;
use crate::util::{threads, timers};

/// Attempts to write a status in one turn; after these the next turn tries again.
const TRIES: u32 = 5;
/// The wait until a heartbeat differs from the last one: the API stores whole seconds.
const AGAIN: Duration = Duration::from_secs(1);

/// The state of the thread.
pub(super) struct Reporter {
    settings: Settings,
    api: Box<dyn NodeApi + Send>,
    sensors: Box<dyn Sensors + Send>,
    events: EventSink,
    watch: NodeWatch,
    schedule: StatusSchedule,
    registered: bool,
    /// Whether the corrections that a start makes to an existing object are still to be written.
    reconcile: bool,
    /// Whether extended resources of an existing object are still to be set to 0.
    resets_devices: bool,
    /// The UID of the object that was written last: a new object is corrected as at a start.
    uid: Option<String>,
    /// The last message of each topic, so that a message is not repeated.
    logged: HashMap<&'static str, String>,
    /// A change that the server accepted but did not store, such as an unknown field.
    ignored: Option<Value>,
    /// A request may be on its way that was not answered, at a start one of an earlier agent. The next
    /// one that is answered ends it: one of the two is refused.
    has_pending_request: bool,
    /// Why the last attempt found no addresses.
    no_addresses: Option<AddressError>,
    pod_cidrs: String,
    unschedulable: bool,
    failures: Failures,
    startup: StartupTimes,
}

impl Reporter {
    pub(super) fn new(
        settings: Settings,
        api: Box<dyn NodeApi + Send>,
        sensors: Box<dyn Sensors + Send>,
        events: EventSink,
        watch: NodeWatch,
        now: Instant,
    ) -> Self {
        let schedule = StatusSchedule::new(settings.update_every, settings.report_every, now);
        let resets_devices = settings.register && settings.resets_devices;
        Reporter {
            settings,
            api,
            sensors,
            events,
            watch,
            schedule,
            registered: false,
            reconcile: true,
            resets_devices,
            uid: None,
            logged: HashMap::new(),
            ignored: None,
            has_pending_request: true,
            no_addresses: None,
            pod_cidrs: String::new(),
            unschedulable: false,
            failures: Failures::default(),
            startup: StartupTimes::new(stats::booted(&Roots::default()), Timestamp::now()),
        }
    }

    /// Body of the thread. `bell` rings when a condition may have changed.
    pub(super) fn run(mut self, stop: &StopToken, bell: &Receiver<()>) {
        self.sensors.end_with(stop);
        let object = self.watch.subscribe();
        let returns = self.api.returns();
        // A disconnected bell would always be ready.
        let mut bell = bell.clone();
        let mut number = returns.number();
        let mut is_due = true;
        loop {
            if std::mem::replace(&mut is_due, true) {
                number = returns.number();
                self.turn(Instant::now(), Timestamp::now(), random_unit());
                let now = Instant::now();
                if returns.number() == number && returns.is_away(now) {
                    self.server_is_away(now, random_unit());
                }
            }
            // A return of the API server ends the wait after a failure.
            let returned =
                if self.failures.number() > 0 { returns.after(number) } else { StopToken::never() };
            // Addresses are followed also while the status waits for the API server.
            let check = self.schedule.address_check(Instant::now());
            let next = timers::deadline_channel(check.or(Some(self.schedule.next())));
            let _waiting = threads::waiting("next node status");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(bell) -> rung => if rung.is_err() { bell = crossbeam_channel::never() },
                recv(object) -> _ => {}
                recv(returned.signal()) -> _ => {
                    number = returns.number();
                    is_due = false;
                    // Without a node no pod is placed on it.
                    let wait = if self.registered { Spread::OBJECTS.random() } else { Duration::ZERO };
                    self.schedule.within(wait, Instant::now());
                }
                recv(next) -> _ => if check.is_some() {
                    is_due = false;
                    self.find_addresses();
                }
            }
        }
    }

    /// The API server did not respond in the last turn. The thread of the lease notices its return, but while
    /// the node is not registered that thread may send nothing: it waits for the object.
    pub(super) fn server_is_away(&mut self, now: Instant, unit: f64) {
        if self.registered && self.failures.number() > 0 {
            self.schedule.record_outage(now, unit);
        }
    }

    /// Takes all steps that are due.
    pub(super) fn turn(&mut self, now: Instant, timestamp: Timestamp, unit: f64) {
        // First: stored pods may start before anything is reported.
        self.find_addresses();
        let facts = self.sensors.facts();
        if self.schedule.is_settling(facts.settled && self.watch.ready_for_pods(), now) {
            return;
        }
        self.check_certificate(timestamp);
        if self.registered && self.watch.is_absent() {
            self.handle_deletion(now, unit);
        }
        if !self.registered && !self.register(&facts, now, timestamp, unit) {
            return;
        }
        let ready = match self.report(&facts, now, timestamp, unit) {
            Ok(ready) => {
                self.succeeded();
                if ready {
                    self.startup.ready(timestamp);
                }
                Some(ready)
            }
            Err(error) if error.kind == NodeErrorKind::NotFound => {
                self.watch.remove(self.watch.uid().as_deref());
                self.handle_deletion(now, unit);
                return;
            }
            Err(error) => {
                self.failed(&error);
                None
            }
        };
        self.schedule.record_status(ready, now, unit);
        if ready.is_some() && self.has_pending_request {
            // The heartbeat of this second was written already.
            self.schedule.within(AGAIN, now);
        }
        // Last, because it sends a request to the runtime.
        self.read_object(facts.health.is_usable());
    }

    /// Raises an event when our certificate has expired.
    fn check_certificate(&mut self, timestamp: Timestamp) {
        const TOPIC: &str = "client certificate";
        match self.api.certificate_problem(timestamp) {
            // The message stays the same, so that there is one event.
            Some(problem) => self.raise(vec![NodeEvent {
                topic: TOPIC,
                kind: EventType::Warning,
                reason: reasons::INVALID_CLIENT_CERTIFICATE,
                message: format!("{problem}: {CERTIFICATE_REMEDY}"),
            }]),
            None => drop(self.logged.remove(TOPIC)),
        }
    }

    /// DIFFERS: a node that was deleted is registered again at once. The Go kubelet registers only
    /// at its start; until then the cluster has no pods of the node.
    fn handle_deletion(&mut self, now: Instant, unit: f64) {
        log::warn!("the node {} was deleted", self.settings.name);
        self.registered = false;
        self.reconcile = true;
        self.ignored = None;
        if self.uid.take().is_some() {
            self.schedule.at_once(now);
        } else {
            // Since the last deletion no status was written: wait, to avoid a busy loop.
            self.schedule.record_refusal(now, unit);
        }
    }

    /// Makes sure that the object exists. `false`: not yet; `schedule` has the next attempt's time.
    fn register(&mut self, facts: &NodeStatusInputs, now: Instant, timestamp: Timestamp, unit: f64) -> bool {
        if self.watch.confirmed().is_some() {
            self.registered = true;
            return true;
        }
        if !self.settings.register {
            // The watch wakes this thread when another client creates the object.
            self.schedule.record_status(None, now, unit);
            return false;
        }
        if !self.schedule.is_due(now) {
            return false;
        }
        match self.create(facts, now, timestamp, unit) {
            Ok(()) => {
                self.succeeded();
                self.registered = true;
                true
            }
            Err(error) => {
                self.failed(&error);
                self.schedule.record_refusal(now, unit);
                false
            }
        }
    }

    fn create(
        &mut self,
        facts: &NodeStatusInputs,
        now: Instant,
        timestamp: Timestamp,
        unit: f64,
    ) -> Result<(), NodeError> {
        let addresses = self.addresses(&[]);
        let (node, events) = compose::initial(&self.settings, facts, addresses, timestamp);
        self.startup.attempt(timestamp);
        match self.api.create(&node) {
            Ok(created) => {
                log::info!("registered node {}", self.settings.name);
                self.startup.registered(Timestamp::now());
                self.uid = created.metadata.uid.clone();
                (self.reconcile, self.resets_devices) = (false, false);
                self.has_pending_request = false;
                let stored = volumes_in_use(&created);
                self.watch.store_if_newer(created);
                self.sensors.volumes_stored(facts.volumes_number, &stored);
                self.sensors.registered();
                self.schedule.record_write(true, now, unit);
                self.raise(events);
            }
            // A server may refuse to create an object that it allows the agent to change.
            Err(error) if matches!(error.kind, NodeErrorKind::AlreadyExists | NodeErrorKind::Forbidden) => {
                let existing = self.api.get().map_err(|second| match second.kind {
                    NodeErrorKind::NotFound => error,
                    _ => second,
                })?;
                log::info!("node {} is already registered", self.settings.name);
                self.watch.store_if_newer(existing);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Computes the status and writes it if necessary. Returns whether the node is ready.
    fn report(
        &mut self,
        facts: &NodeStatusInputs,
        now: Instant,
        timestamp: Timestamp,
        unit: f64,
    ) -> Result<bool, NodeError> {
        let mut base = self.watch.confirmed();
        let mut attempt = 0;
        loop {
            let old = match base.take() {
                Some(old) => Ok(old),
                None => self.api.get().map(|node| {
                    self.watch.store_if_newer(node.clone());
                    std::sync::Arc::new(node)
                }),
            };
            let error = match old.and_then(|old| self.write(&old, facts, now, timestamp, unit)) {
                Ok(ready) => return Ok(ready),
                Err(error) => error,
            };
            attempt += 1;
            if attempt == TRIES || matches!(error.kind, NodeErrorKind::Stopping | NodeErrorKind::NotFound) {
                return Err(error);
            }
            if attempt > 1 && error.kind != NodeErrorKind::Conflict {
                self.api.drop_connections();
            }
        }
    }

    fn write(
        &mut self,
        old: &Node,
        facts: &NodeStatusInputs,
        now: Instant,
        timestamp: Timestamp,
        unit: f64,
    ) -> Result<bool, NodeError> {
        let is_other = old.metadata.uid != self.uid;
        if is_other {
            // The first object that we receive, or one that replaced ours.
            self.reconcile = true;
            self.ignored = None;
        }
        // An object that another client registers has that client's labels.
        let reconciled = (self.reconcile && self.settings.register)
            .then(|| compose::reconciled(&self.settings, facts, old, self.resets_devices));
        let known = self.known_addresses(old);
        let addresses = self.addresses(&known);
        let base = reconciled.as_ref().unwrap_or(old);
        let (new, events) = compose::refreshed(&self.settings, facts, addresses, base, timestamp);
        let ready = is_ready(&new);
        self.raise(events);
        let change = patch::significant(old, &new);
        let changed = change.is_some() && change != self.ignored;
        if self.schedule.must_write(changed || self.has_pending_request, now)
            && let Some(mut patch) = patch::between(old, &new)
        {
            patch::bind_volumes(&mut patch, old);
            self.has_pending_request = true;
            let written = self.api.patch_status(&patch)?;
            self.has_pending_request = false;
            self.schedule.record_write(changed, now, unit);
            // The server does not store the remaining differences: do not send them again.
            self.ignored = patch::significant(&written, &new).and_then(patch::without_volumes);
            self.uid = written.metadata.uid.clone();
            let stored = volumes_in_use(&written);
            // First, so that no older object is read when the list counts.
            self.watch.store_if_newer(written);
            self.sensors.volumes_stored(facts.volumes_number, &stored);
        } else {
            self.uid = old.metadata.uid.clone();
            if !self.has_pending_request {
                self.sensors.volumes_stored(facts.volumes_number, &volumes_in_use(old));
            }
        }
        (self.reconcile, self.resets_devices) = (false, false);
        if is_other {
            self.sensors.registered();
        }
        Ok(ready)
    }

    /// Finds the addresses of this machine, also while the API server is away: pods on the host's network
    /// have them, and the serving certificate.
    fn find_addresses(&mut self) {
        let object = self.watch.object().unwrap_or_default();
        let known = self.known_addresses(&object);
        // Without any, as while the link is down, the last ones stay.
        if let Some(found) = self.addresses(&known) {
            let is_shown = found == shown_addresses(&object);
            self.watch.set_addresses(if is_shown { Vec::new() } else { found });
        }
    }

    /// The addresses that the node had: those of the object while the machine has them, else those that were
    /// found last. A cloud controller's are in the object only.
    fn known_addresses(&self, object: &Node) -> Vec<NodeAddress> {
        let shown = shown_addresses(object);
        let own = if self.settings.external_cloud { Vec::new() } else { self.watch.own_addresses() };
        if own.is_empty() || self.sensors.has_internal(shown) { shown.to_vec() } else { own }
    }

    /// The node's addresses, which had those in `known`; `None` if they are unknown: it then keeps these.
    fn addresses(&mut self, known: &[NodeAddress]) -> Option<Vec<NodeAddress>> {
        match self.sensors.addresses(&self.settings, known) {
            Ok(addresses) => {
                self.no_addresses = None;
                Some(addresses)
            }
            Err(error) => {
                if self.no_addresses.as_ref() != Some(&error) {
                    log::warn!("cannot determine the addresses of node {}: {error}", self.settings.name);
                    self.no_addresses = Some(error);
                }
                None
            }
        }
    }

    /// Applies fields that other writers set, such as the pod address range.
    fn read_object(&mut self, runtime_is_usable: bool) {
        let Some(object) = self.watch.confirmed() else { return };
        let Some(spec) = &object.spec else { return };
        let unschedulable = spec.unschedulable.unwrap_or_default();
        if unschedulable != self.unschedulable {
            self.unschedulable = unschedulable;
            let reason =
                if unschedulable { reasons::NODE_NOT_SCHEDULABLE } else { reasons::NODE_SCHEDULABLE };
            self.raise(vec![NodeEvent::new("schedulable", &self.settings.name, reason)]);
        }
        let cidrs = spec.pod_cidrs.as_ref().map(|cidrs| cidrs.join(",")).unwrap_or_default();
        if runtime_is_usable && !cidrs.is_empty() && cidrs != self.pod_cidrs {
            match self.sensors.set_pod_cidrs(&cidrs) {
                Ok(()) => {
                    log::info!("pods of this node get addresses from {cidrs}");
                    self.pod_cidrs = cidrs;
                }
                // The next turn tries again.
                Err(error) => log::warn!("cannot send the pod address range {cidrs} to the runtime: {error}"),
            }
        }
    }

    /// Logs each change and raises its event, unless the last message of its topic was the same.
    fn raise(&mut self, events: Vec<NodeEvent>) {
        for event in events {
            if self.logged.get(event.topic) != Some(&event.message) {
                self.logged.insert(event.topic, event.message.clone());
                if event.kind == EventType::Warning {
                    log::warn!("{}", event.message);
                } else {
                    log::info!("{}", event.message);
                }
                self.events.raise(Regarding::Node, event.kind, event.reason, event.message);
            }
        }
    }

    fn succeeded(&mut self) {
        if self.failures.end() {
            log::info!("reporting the status of node {} succeeds again", self.settings.name);
        }
    }

    fn failed(&mut self, error: &NodeError) {
        if error.kind == NodeErrorKind::Stopping {
            return;
        }
        if self.failures.count() {
            log::warn!("{error} ({} times)", self.failures);
        }
    }
}

/// `status.addresses`.
fn shown_addresses(node: &Node) -> &[NodeAddress] {
    node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default()
}

/// `status.volumesInUse`.
fn volumes_in_use(node: &Node) -> BTreeSet<String> {
    let names = node.status.iter().flat_map(|status| status.volumes_in_use.iter().flatten());
    names.cloned().collect()
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == READY && condition.status == "True")
}
