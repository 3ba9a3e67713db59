//! The `observe` thread: lists pods, compares, inspects what changed, reports it.

use std::collections::{BTreeSet, HashSet};
use std::time::Instant;

use crossbeam_channel::{Sender, select_biased};

use super::diff::{self, ExitedContainers};
use super::handle::{Observe, ObservedChange, inspect_listed};
use super::schedule::{self, RelistSchedule, StreamChange};
use crate::cri::{CriError, NotReady};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::util::backoff::Failures;
use crate::util::mailbox::Post;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

pub(super) fn spawn(
    observe: Observe,
    changes: Post<ObservedChange, ExitedContainers>,
    runtime_is_back: Sender<()>,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    threads::spawn("observe", Stack::Large, on_death, move |stop| {
        let observe = Observe { cri: observe.cri.with_stop(stop.clone()), ..observe };
        let schedule = RelistSchedule::new(Instant::now());
        Watcher {
            observe,
            changes,
            runtime_is_back,
            schedule,
            failures: Failures::default(),
            last_list: None,
            usable: None,
        }
        .run(&stop);
    })
}

struct Watcher {
    observe: Observe,
    changes: Post<ObservedChange, ExitedContainers>,
    /// Rung when the runtime responds again, so that the stream is requested immediately.
    runtime_is_back: Sender<()>,
    schedule: RelistSchedule,
    failures: Failures,
    last_list: Option<Instant>,
    usable: Option<(bool, bool)>,
}

/// The result of comparing and inspecting a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inspection {
    Unchanged,
    Changed,
    Failed,
}

impl Watcher {
    fn run(mut self, stop: &StopToken) {
        loop {
            let due = self.observe.cache.take_due();
            let stream = self.observe.cache.stream();
            let now = Instant::now();
            let change = self.schedule.update(&stream, due.unreported, now);
            self.log(change);
            if due.failed {
                self.schedule.inspection_failed(now);
            }
            if due.unknown {
                self.schedule.list_soon(now);
            }
            if self.schedule.is_status_due(now) {
                self.update_status();
            }
            // One list of all pods is cheaper than many lists of one pod.
            let many = due.pods.len() * 4 > self.observe.cache.listed().len() + 8;
            let acted = if many || self.schedule.is_relist_due(now) {
                self.list_all(&due.pods.into_iter().collect(), stop);
                true
            } else {
                due.pods.iter().for_each(|uid| self.list_one(uid));
                !due.pods.is_empty()
            };
            self.report_health();
            let acted = acted.then(Instant::now);
            if !self.wait(acted, stop) {
                return;
            }
        }
    }

    /// Waits until something is due. `acted`: when the last turn ended, if it listed pods. `false`: the
    /// thread has to stop.
    fn wait(&self, acted: Option<Instant>, stop: &StopToken) -> bool {
        let _waiting = threads::waiting(if self.schedule.is_streaming() { "events" } else { "next relist" });
        let next = self.schedule.next_turn(self.observe.cache.unreported(), acted);
        select_biased! {
            recv(stop.signal()) -> _ => false,
            recv(self.observe.cache.bell()) -> _ => {
                let waited = stop.wait(schedule::gathering(acted, Instant::now()));
                // The next turn handles the events that came meanwhile.
                let _ = self.observe.cache.bell().try_recv();
                waited == Waited::TimedOut
            }
            recv(timers::deadline_channel(Some(next))) -> _ => true,
        }
    }

    fn log(&self, change: Option<StreamChange>) {
        match change {
            Some(StreamChange::Trusted) => {
                metrics::EVENTED_PLEG_SUCCESSES.inc();
                log::info!("the runtime reports changes by its event stream");
            }
            Some(StreamChange::Ended(reason)) => {
                log::warn!(
                    "the runtime's event stream ended, listing every second until it is back: {reason}"
                );
            }
            Some(StreamChange::Unsupported) => {
                log::info!("the runtime has no event stream, listing every second");
            }
            Some(StreamChange::Silent) => {
                log::warn!("the runtime's event stream is open but reports no changes, listing every second");
            }
            None => {}
        }
    }

    fn update_status(&mut self) {
        let observe = &self.observe;
        let _waiting = threads::waiting("runtime status");
        // After an outage the runtime may have another version.
        if (observe.health.version().is_none() || observe.health.is_unreachable())
            && let Ok(version) = observe.cri.version()
        {
            observe.health.set_version(version);
        }
        let ready = match observe.cri.status() {
            Ok(status) => {
                let ready = status.ready.is_ok() && status.network_ready.is_ok();
                observe.health.set_features(status.features);
                observe.health.set_handlers(status.handlers);
                let problem = |found: Result<(), _>| found.err().map(|error: NotReady| error.to_string());
                let (ready_problem, network) = (problem(status.ready), problem(status.network_ready));
                observe.health.set_status(ready_problem, network, Instant::now());
                Some(ready)
            }
            Err(error) => {
                observe.health.set_unreachable(error.to_string());
                None
            }
        };
        self.schedule.status_updated(ready, Instant::now());
    }

    fn report_health(&mut self) {
        let health = self.observe.runtime_health();
        let state = (health.is_usable(), health.network.is_none());
        if self.usable == Some(state) {
            return;
        }
        if self.usable.is_some() || state.0 {
            log::info!(
                "container runtime: {}; network: {}",
                if state.0 { "usable".to_owned() } else { health.runtime.join("; ") },
                health.network.as_deref().unwrap_or("ready")
            );
        }
        self.usable = Some(state);
        self.changes.put(ObservedChange::Health, ExitedContainers::default());
    }

    /// Lists all pods. `reported`: the pods with events.
    fn list_all(&mut self, reported: &HashSet<PodUid>, stop: &StopToken) {
        let begun = Instant::now();
        let first = self.observe.last_relist().is_none();
        let result = self.relist(begun, reported, stop);
        let now = Instant::now();
        match result {
            Ok(missed) => {
                if self.failures.end() {
                    // If the bell is full, its thread wakes anyway.
                    let _ = self.runtime_is_back.try_send(());
                }
                let change = self.schedule.relisted(begun, missed, now);
                self.log(change);
                metrics::PLEG_RELIST.observe_duration(now.saturating_duration_since(begun));
                if let Some(last) = self.last_list.replace(begun) {
                    metrics::PLEG_RELIST_INTERVAL.observe_duration(begun.saturating_duration_since(last));
                }
            }
            Err(_) if stop.is_stopped() => {}
            Err(error) => {
                if self.failures.count() {
                    log::warn!("cannot list pods ({} times): {error}", self.failures);
                }
                self.schedule.list_failed(now);
            }
        }
        if first && self.observe.last_relist().is_some() {
            self.changes.put(ObservedChange::FirstList, ExitedContainers::default());
        }
    }

    /// Returns whether a change was found that no event had reported.
    fn relist(
        &self,
        requested_at: Instant,
        reported: &HashSet<PodUid>,
        stop: &StopToken,
    ) -> Result<bool, CriError> {
        let cache = &self.observe.cache;
        let listed = {
            let _waiting = threads::waiting("list of pods");
            crate::cri::list_pods(&self.observe.cri, None)?
        };
        let listed = cache.set_listed(listed, requested_at);
        let known: BTreeSet<PodUid> = listed.keys().cloned().chain(cache.uids()).collect();
        let mut missed = false;
        for uid in known {
            if stop.is_stopped() {
                return Ok(false);
            }
            let inspection = self.inspect(&uid, listed.get(&uid), requested_at);
            // The event may come during the inspection.
            missed |= inspection == Inspection::Changed && !reported.contains(&uid) && !cache.is_due(&uid);
        }
        cache.relisted(requested_at);
        Ok(missed)
    }

    /// Lists and inspects one pod that had an event.
    fn list_one(&self, uid: &PodUid) {
        let cache = &self.observe.cache;
        // Its worker has begun to change it and inspects it afterwards.
        if cache.is_busy(uid) {
            return;
        }
        let requested_at = Instant::now();
        let _waiting = threads::waiting("list of one pod");
        match crate::cri::list_pods(&self.observe.cri, Some(uid)) {
            Ok(mut listed) => {
                let pod = listed.remove(uid);
                cache.set_listed_pod(uid, pod.clone(), requested_at);
                self.inspect(uid, pod.as_ref(), requested_at);
            }
            Err(error) => cache.put_error(uid, error.to_string(), requested_at),
        }
        metrics::PLEG_POD_RELIST.observe_duration(requested_at.elapsed());
    }

    /// Compares a pod with its last inspection; inspects it and reports it if it has changed.
    fn inspect(&self, uid: &PodUid, new: Option<&ListedPod>, requested_at: Instant) -> Inspection {
        let cache = &self.observe.cache;
        // Its worker is changing it and inspects it afterwards; states in between do not count.
        if cache.is_busy(uid) {
            return Inspection::Unchanged;
        }
        let entry = cache.get(uid);
        // Its worker inspected it after the list was requested.
        if entry.as_ref().is_some_and(|entry| entry.requested_at > requested_at) {
            return Inspection::Unchanged;
        }
        let change = diff::compare(entry.as_ref().map(|entry| &*entry.pod), new);
        let inspection = if change.is_some() { Inspection::Changed } else { Inspection::Unchanged };
        let retry = entry.as_ref().is_some_and(|entry| entry.error.is_some());
        let Some(change) = change.or_else(|| retry.then(ExitedContainers::default)) else {
            cache.unchanged(uid, requested_at);
            if new.is_none() {
                cache.remove(uid, requested_at);
            }
            return Inspection::Unchanged;
        };
        match new {
            Some(pod) => match inspect_listed(&self.observe.cri, pod) {
                Ok(inspected) => {
                    cache.put(uid, inspected, requested_at);
                }
                Err(error) => {
                    // The last inspection stays, so the next list shows the same difference.
                    log::debug!("cannot inspect pod: {error} uid={uid}");
                    cache.put_error(uid, error.to_string(), requested_at);
                    return Inspection::Failed;
                }
            },
            None => {
                cache.put(uid, PodRuntime::absent(uid.clone()), requested_at);
            }
        }
        self.changes.put(ObservedChange::Pod(uid.clone()), change);
        inspection
    }
}
