//! The `observe` thread: list, compare, inspect what changed, pass the news on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Change, Observe, Subject, diff};
use crate::model::ids::PodUid;
use crate::util::mailbox::Post;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Pause between the end of one list and the start of the next.
const RELIST_PERIOD: Duration = Duration::from_secs(1);
/// Pause between two looks at the runtime's own status.
const STATUS_PERIOD: Duration = Duration::from_secs(5);

pub(super) fn spawn(
    observe: Observe,
    news: Post<Subject, Change>,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    threads::spawn("observe", Stack::Large, on_death, move |stop| {
        let observe = Observe { cri: observe.cri.with_stop(stop.clone()), ..observe };
        run(&observe, &news, &stop);
    })
}

fn run(observe: &Observe, news: &Post<Subject, Change>, stop: &StopToken) {
    let mut status_due = Instant::now();
    let mut failures: u32 = 0;
    let mut usable = None;
    loop {
        let now = Instant::now();
        if now >= status_due {
            ask_status(observe);
            status_due = now + STATUS_PERIOD;
        }
        let first = observe.last_relist().is_none();
        match relist(observe, news, stop) {
            Ok(()) => failures = 0,
            Err(error) => {
                failures = failures.saturating_add(1);
                // Once, then at doubling intervals.
                if failures.is_power_of_two() {
                    log::warn!("cannot list pods ({failures} times): {error}");
                }
                // An outage is over the moment a status answer says so.
                status_due = Instant::now();
            }
        }
        if first && observe.last_relist().is_some() {
            news.put(Subject::FirstList, Change::default());
        }
        let health = observe.runtime_health();
        let state = (health.is_usable(), health.network.is_none());
        if usable != Some(state) {
            if usable.is_some() || state.0 {
                log::info!(
                    "container runtime: {}; network: {}",
                    if state.0 { "usable".to_owned() } else { health.runtime.join("; ") },
                    health.network.as_deref().unwrap_or("ready")
                );
            }
            usable = Some(state);
            news.put(Subject::Health, Change::default());
        }
        let _waiting = threads::waiting("next relist");
        if stop.wait(RELIST_PERIOD) == Waited::Stopped {
            return;
        }
    }
}

fn ask_status(observe: &Observe) {
    let _waiting = threads::waiting("runtime status");
    // A runtime that comes back may be another version.
    if (observe.health.version().is_none() || observe.health.is_silent())
        && let Ok(version) = observe.cri.version()
    {
        observe.health.set_version(version.runtime_name, version.runtime_version);
    }
    match observe.cri.status() {
        Ok(status) => {
            observe.health.set_features(status.features);
            observe.health.set_handlers(status.handlers);
            observe.health.answered(status.ready, status.network_ready, Instant::now());
        }
        Err(error) => observe.health.silent(error.to_string()),
    }
}

fn relist(
    observe: &Observe,
    news: &Post<Subject, Change>,
    stop: &StopToken,
) -> Result<(), crate::cri::CriError> {
    let at = Instant::now();
    let listed = {
        let _waiting = threads::waiting("list of pods");
        Arc::new(crate::cri::list_pods(&observe.cri, None)?)
    };
    observe.cache.set_listed(Arc::clone(&listed));
    let known: BTreeSet<PodUid> = listed.keys().cloned().chain(observe.cache.uids()).collect();
    for uid in known {
        if stop.is_stopped() {
            return Ok(());
        }
        // Its worker is at it and inspects it at the end; half-done states are not news.
        if observe.cache.is_busy(&uid) {
            continue;
        }
        let entry = observe.cache.get(&uid);
        // A worker looked at its pod while we listed: it knows better.
        if entry.as_ref().is_some_and(|entry| entry.at > at) {
            continue;
        }
        let new = listed.get(&uid);
        let change = diff::compare(entry.as_ref().map(|entry| &*entry.pod), new);
        let retry = entry.as_ref().is_some_and(|entry| entry.error.is_some());
        let Some(change) = change.or_else(|| retry.then(Change::default)) else {
            if new.is_none() {
                observe.cache.remove(&uid, at);
            }
            continue;
        };
        match new {
            Some(pod) => match super::inspect_listed(&observe.cri, pod) {
                Ok(inspected) => {
                    observe.cache.put(&uid, inspected, at);
                }
                Err(error) => {
                    // The old view stays, so the same difference shows again next time.
                    log::debug!("cannot inspect pod: {error} uid={uid}");
                    observe.cache.put_error(&uid, error.to_string(), at);
                    continue;
                }
            },
            None => {
                let gone = crate::model::runtime::PodRuntime::absent(uid.clone());
                observe.cache.put(&uid, gone, at);
            }
        }
        news.put(Subject::Pod(uid), change);
    }
    observe.cache.relisted(at);
    Ok(())
}
