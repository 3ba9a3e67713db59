//! The `observe` thread: list, compare, inspect what changed, pass the news on.

use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, select_biased};

use super::pace::{Pace, Turn};
use super::{Change, Observe, Subject, diff};
use crate::cri::CriError;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::util::backoff::Failures;
use crate::util::mailbox::Post;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// News that come within so short a time after others are answered together.
const GATHER: Duration = Duration::from_millis(10);

pub(super) fn spawn(
    observe: Observe,
    news: Post<Subject, Change>,
    runtime_is_back: Sender<()>,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    threads::spawn("observe", Stack::Large, on_death, move |stop| {
        let observe = Observe { cri: observe.cri.with_stop(stop.clone()), ..observe };
        let pace = Pace::new(Instant::now());
        Watcher {
            observe,
            news,
            runtime_is_back,
            pace,
            failures: Failures::default(),
            last_list: None,
            usable: None,
        }
        .run(&stop);
    })
}

struct Watcher {
    observe: Observe,
    news: Post<Subject, Change>,
    /// Rung when the runtime answers again: the stream need not wait any longer.
    runtime_is_back: Sender<()>,
    pace: Pace,
    failures: Failures,
    last_list: Option<Instant>,
    usable: Option<(bool, bool)>,
}

/// What a look at a pod found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    Change,
    /// It could not be inspected.
    Failed,
}

impl Watcher {
    fn run(mut self, stop: &StopToken) {
        loop {
            let due = self.observe.cache.take_due();
            let stream = self.observe.cache.stream();
            let now = Instant::now();
            let turn = self.pace.heard(&stream, due.untold, now);
            self.log(turn);
            if due.failed {
                self.pace.failed(now);
            }
            if due.unknown {
                self.pace.list_soon(now);
            }
            if self.pace.is_status_due(now) {
                self.ask_status();
            }
            // One list of all is cheaper than many lists of one.
            let crowd = due.pods.len() * 4 > self.observe.cache.listed().len() + 8;
            let acted = if crowd || self.pace.is_relist_due(now) {
                self.list_all(&due.pods.into_iter().collect(), stop);
                true
            } else {
                due.pods.iter().for_each(|uid| self.look(uid));
                !due.pods.is_empty()
            };
            self.tell_health();
            if !self.wait(acted, stop) {
                return;
            }
        }
    }

    /// Waits until something is due. `false`: asked to stop.
    fn wait(&self, acted: bool, stop: &StopToken) -> bool {
        let _waiting = threads::waiting(if self.pace.is_streaming() { "events" } else { "next relist" });
        // A storm of events costs a few looks per second and pod, not all of the machine.
        if acted && stop.wait(GATHER) == Waited::Stopped {
            return false;
        }
        let next = self.pace.next(self.observe.cache.untold());
        select_biased! {
            recv(stop.signal()) -> _ => false,
            recv(self.observe.cache.bell()) -> _ => true,
            recv(timers::at(Some(next))) -> _ => true,
        }
    }

    fn log(&self, turn: Option<Turn>) {
        match turn {
            Some(Turn::Trusted) => {
                metrics::EVENTED_PLEG_SUCCESSES.inc();
                log::info!("the runtime tells of changes by its event stream");
            }
            Some(Turn::Lost(why)) => {
                log::warn!("the runtime's event stream ended, listing every second until it is back: {why}");
            }
            Some(Turn::None) => log::info!("the runtime has no event stream, listing every second"),
            Some(Turn::Deaf) => {
                log::warn!("the runtime's event stream is open but tells nothing, listing every second");
            }
            None => {}
        }
    }

    fn ask_status(&mut self) {
        let observe = &self.observe;
        let _waiting = threads::waiting("runtime status");
        // A runtime that comes back may be another version.
        if (observe.health.version().is_none() || observe.health.is_silent())
            && let Ok(version) = observe.cri.version()
        {
            observe.health.set_version(version.runtime_name, version.runtime_version);
        }
        let well = match observe.cri.status() {
            Ok(status) => {
                let well = status.ready.is_ok() && status.network_ready.is_ok();
                observe.health.set_features(status.features);
                observe.health.set_handlers(status.handlers);
                observe.health.answered(status.ready, status.network_ready, Instant::now());
                well
            }
            Err(error) => {
                observe.health.silent(error.to_string());
                false
            }
        };
        self.pace.asked_status(well, Instant::now());
    }

    fn tell_health(&mut self) {
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
        self.news.put(Subject::Health, Change::default());
    }

    /// Lists everything; of the pods in `told` something was heard.
    fn list_all(&mut self, told: &HashSet<PodUid>, stop: &StopToken) {
        let begun = Instant::now();
        let first = self.observe.last_relist().is_none();
        let result = self.relist(begun, told, stop);
        let now = Instant::now();
        match result {
            Ok(missed) => {
                if self.failures.end() {
                    // A full bell already rings.
                    let _ = self.runtime_is_back.try_send(());
                }
                let turn = self.pace.relisted(begun, missed, now);
                self.log(turn);
                metrics::PLEG_RELIST.took(now.saturating_duration_since(begun));
                if let Some(last) = self.last_list.replace(begun) {
                    metrics::PLEG_RELIST_INTERVAL.took(begun.saturating_duration_since(last));
                }
            }
            Err(error) => {
                if self.failures.count() {
                    log::warn!("cannot list pods ({} times): {error}", self.failures);
                }
                self.pace.list_failed(now);
            }
        }
        if first && self.observe.last_relist().is_some() {
            self.news.put(Subject::FirstList, Change::default());
        }
    }

    /// Returns whether a change was found that no event had told.
    fn relist(&self, at: Instant, told: &HashSet<PodUid>, stop: &StopToken) -> Result<bool, CriError> {
        let cache = &self.observe.cache;
        let listed = {
            let _waiting = threads::waiting("list of pods");
            crate::cri::list_pods(&self.observe.cri, None)?
        };
        let listed = cache.set_listed(listed, at);
        let known: BTreeSet<PodUid> = listed.keys().cloned().chain(cache.uids()).collect();
        let mut missed = false;
        for uid in known {
            if stop.is_stopped() {
                return Ok(false);
            }
            let found = self.settle(&uid, listed.get(&uid), at);
            // The event may come while we look.
            missed |= found == Found::Change && !told.contains(&uid) && !cache.is_due(&uid);
        }
        cache.relisted(at);
        Ok(missed)
    }

    /// Looks at one pod that something was heard of.
    fn look(&self, uid: &PodUid) {
        let cache = &self.observe.cache;
        // Its worker has taken it up meanwhile, and inspects it at the end.
        if cache.is_busy(uid) {
            return;
        }
        let at = Instant::now();
        let _waiting = threads::waiting("list of one pod");
        match crate::cri::list_pods(&self.observe.cri, Some(uid)) {
            Ok(mut listed) => {
                let pod = listed.remove(uid);
                cache.set_listed_pod(uid, pod.clone(), at);
                self.settle(uid, pod.as_ref(), at);
            }
            Err(error) => cache.put_error(uid, error.to_string(), at),
        }
        metrics::PLEG_POD_RELIST.took(at.elapsed());
    }

    /// Compares a pod with what is known of it; inspects it and passes the news on if it is
    /// not the same.
    fn settle(&self, uid: &PodUid, new: Option<&ListedPod>, at: Instant) -> Found {
        let cache = &self.observe.cache;
        // Its worker is at it and inspects it at the end; half-done states are not news.
        if cache.is_busy(uid) {
            return Found::Nothing;
        }
        let entry = cache.get(uid);
        // A worker looked at its pod while we listed: it knows better.
        if entry.as_ref().is_some_and(|entry| entry.at > at) {
            return Found::Nothing;
        }
        let change = diff::compare(entry.as_ref().map(|entry| &*entry.pod), new);
        let found = if change.is_some() { Found::Change } else { Found::Nothing };
        let retry = entry.as_ref().is_some_and(|entry| entry.error.is_some());
        let Some(change) = change.or_else(|| retry.then(Change::default)) else {
            cache.unchanged(uid, at);
            if new.is_none() {
                cache.remove(uid, at);
            }
            return Found::Nothing;
        };
        match new {
            Some(pod) => match super::inspect_listed(&self.observe.cri, pod) {
                Ok(inspected) => {
                    cache.put(uid, inspected, at);
                }
                Err(error) => {
                    // The old view stays, so the same difference shows again next time.
                    log::debug!("cannot inspect pod: {error} uid={uid}");
                    cache.put_error(uid, error.to_string(), at);
                    return Found::Failed;
                }
            },
            None => {
                cache.put(uid, PodRuntime::absent(uid.clone()), at);
            }
        }
        self.news.put(Subject::Pod(uid.clone()), change);
        found
    }
}
