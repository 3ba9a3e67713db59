//! The `observe-ev` thread: reads the runtime's event stream. An event only marks its pod as due;
//! what happened is found out by an inspection.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select_biased};

use super::cache::Cache;
use super::handle::Observe;
use super::stream_state::StreamState;
use crate::cri::{ContainerEvent, CriError, ErrorClass};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Pause before a broken stream is requested again, doubled up to the maximum.
const RETRY_FIRST: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Pause before the stream is requested again from a runtime that does not offer it: the runtime
/// may have been upgraded.
const RETRY_UNSUPPORTED: Duration = Duration::from_secs(300);
/// After a stream of this length the pause is reset.
const GOOD: Duration = Duration::from_secs(10);

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
            Ok(()) => StreamState::Broken { reason: "the runtime ended it".to_owned() },
            Err(error) => match error.class() {
                ErrorClass::Stopping => return,
                ErrorClass::Unsupported => StreamState::Unsupported,
                ErrorClass::Retry | ErrorClass::Gone => StreamState::Broken { reason: error.to_string() },
            },
        };
        if now.saturating_duration_since(since) >= GOOD {
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
        let _waiting = threads::waiting("retry of the event stream");
        select_biased! {
            recv(stop.signal()) -> _ => return,
            recv(runtime_is_back) -> _ => pause = RETRY_FIRST,
            recv(timers::deadline_channel(Some(now + wait))) -> _ => pause = (pause * 2).min(RETRY_MAX),
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

/// Marks the pod of an event as due.
fn take(cache: &Cache, event: &ContainerEvent, received: Instant) {
    if let Some(age) = event
        .made_at
        .and_then(|made_at| Duration::try_from(jiff::Timestamp::now().duration_since(made_at)).ok())
    {
        metrics::EVENTED_PLEG_LATENCY.observe_duration(age);
    }
    log::debug!("event of {} uid={}", event.id, event.uid.as_ref().map_or("", PodUid::as_str));
    // The event of a removed sandbox or container does not name its pod.
    let known = || cache.pod_of(&event.id);
    match event.uid.clone().or_else(known) {
        Some(uid) => cache.event(&uid, received),
        // A sandbox of another tool, without a pod.
        None if event.sandbox_known => {}
        None => cache.unknown_event(received),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::runtime::{ListedPod, ListedSandbox, SandboxState};

    #[test]
    fn events_mark_their_pods_as_due() {
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
        // The sandbox was removed: the event does not name the pod.
        check("s1", None, false, &["u1"], false);
        check("s2", None, false, &[], true);
        // A sandbox of another tool.
        check("x", None, true, &[], false);
        check("s1", None, true, &["u1"], false);
    }
}
