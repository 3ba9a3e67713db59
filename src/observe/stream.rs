//! The `observe-ev` thread: reads the runtime's event stream. An event is believed in one
//! thing only, that something happened to its pod; what it is a look at the pod shows.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select_biased};

use super::Observe;
use super::cache::Cache;
use crate::cri::{Class, ContainerEvent, CriError};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Pause before a broken stream is opened again, doubled up to the maximum.
const RETRY_FIRST: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Pause before a runtime that does not offer the stream is asked again: it may have been
/// replaced by a newer one.
const RETRY_UNSUPPORTED: Duration = Duration::from_secs(300);
/// A stream that held for so long was a good one: the next pause is the first one again.
const HELD: Duration = Duration::from_secs(10);

/// Whether the runtime tells of changes by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StreamState {
    /// Nobody has asked it to.
    Off,
    /// As far as can be told: it does not say when it is ready to tell, and is silent while
    /// nothing happens.
    Open {
        /// When it was asked.
        since: Instant,
    },
    /// It did.
    Broken {
        /// How it ended.
        why: String,
    },
    /// It does not offer that.
    Unsupported,
}

pub(super) fn spawn(
    observe: Observe,
    runtime_is_back: Receiver<()>,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    threads::spawn("observe-ev", Stack::Small, on_death, move |stop| {
        run(&observe, &runtime_is_back, &stop);
    })
}

fn run(observe: &Observe, runtime_is_back: &Receiver<()>, stop: &StopToken) {
    let mut pause = RETRY_FIRST;
    loop {
        let since = match observe.cache.stream() {
            StreamState::Open { since } => since,
            _ => {
                let since = Instant::now();
                observe.cache.set_stream(StreamState::Open { since });
                since
            }
        };
        let ended = read(observe, stop);
        let now = Instant::now();
        let state = match ended {
            Ok(()) => StreamState::Broken { why: "the runtime ended it".to_owned() },
            Err(error) => match error.class() {
                Class::Stopping => return,
                Class::Unsupported => StreamState::Unsupported,
                Class::Retry | Class::Gone => StreamState::Broken { why: error.to_string() },
            },
        };
        if now.saturating_duration_since(since) >= HELD {
            pause = RETRY_FIRST;
        }
        let wait = match state {
            StreamState::Unsupported => RETRY_UNSUPPORTED,
            _ => {
                metrics::EVENTED_PLEG_ERRORS.inc();
                pause
            }
        };
        observe.cache.set_stream(state);
        let _waiting = threads::waiting("next try of the event stream");
        select_biased! {
            recv(stop.signal()) -> _ => return,
            recv(runtime_is_back) -> _ => pause = RETRY_FIRST,
            recv(timers::at(Some(now + wait))) -> _ => pause = (pause * 2).min(RETRY_MAX),
        }
    }
}

/// Reads until the stream ends.
fn read(observe: &Observe, stop: &StopToken) -> Result<(), CriError> {
    let mut events = observe.cri.container_events()?;
    while let Some(event) = events.next(stop)? {
        take(&observe.cache, &event, Instant::now());
    }
    Ok(())
}

/// Notes whose news an event brings.
fn take(cache: &Cache, event: &ContainerEvent, heard: Instant) {
    if let Some(age) =
        event.made_at.and_then(|at| Duration::try_from(jiff::Timestamp::now().duration_since(at)).ok())
    {
        metrics::EVENTED_PLEG_LATENCY.took(age);
    }
    log::debug!("event of {} uid={}", event.id, event.uid.as_ref().map_or("", PodUid::as_str));
    // What is gone already is told without its pod.
    let known = || cache.owner_of(&event.id);
    match event.uid.clone().or_else(known) {
        Some(uid) => cache.news(&uid, heard),
        // Another tool's sandbox: none of our business.
        None if event.sandbox_known => {}
        None => cache.unknown_news(heard),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::runtime::{ListedPod, ListedSandbox, SandboxState};

    #[test]
    fn events_are_ascribed_to_their_pods() {
        let cache = Cache::default();
        let pod = ListedPod {
            uid: "u1".into(),
            sandboxes: vec![ListedSandbox {
                id: "s1".into(),
                state: SandboxState::Ready,
                attempt: 0,
                created_at: None,
            }],
            ..ListedPod::default()
        };
        cache.set_listed([(pod.uid.clone(), pod)].into(), Instant::now());
        let check = |id: &str, uid: Option<&str>, sandbox_known, pods: &[&str], unknown| {
            let event =
                ContainerEvent { id: id.into(), uid: uid.map(PodUid::from), sandbox_known, made_at: None };
            take(&cache, &event, Instant::now());
            let due = cache.take_due();
            assert_eq!(due.pods.iter().map(PodUid::as_str).collect::<Vec<_>>(), pods, "{event:?}");
            assert_eq!(due.unknown, unknown, "{event:?}");
        };
        check("c1", Some("u2"), true, &["u2"], false);
        // The sandbox is gone: the runtime does not say whose it was.
        check("s1", None, false, &["u1"], false);
        check("s2", None, false, &[], true);
        // Somebody else's, or a lie about what is ours.
        check("x", None, true, &[], false);
        check("s1", None, true, &["u1"], false);
    }
}
