//! The pods and containers that run (Go: pkg/kubelet/pleg, container cache, runtime state).
//!
//! Owns: the cache of inspected pods, and the health of the runtime.
//! Threads: `observe-ev` reads the runtime's event stream and marks pods as due; `observe` inspects
//! due pods, lists all pods (once a second without a stream, up to once a minute with one) and
//! requests the runtime's status.
//! Out: a mailbox of changed pods by UID, and changes of the runtime's health.
//! After a worker changed its pod, it inspects the pod on its own thread ([`Observe::inspect`]);
//! that also handles the events that came before the inspection began.
//! Invariants: an inspection never replaces a later one; a failed one is repeated within a second;
//! an event is only handled by an inspection that began after the event came, also while a worker
//! is changing the pod; a list follows each start and each end of the stream.
//! Absent on purpose: an event channel that can overflow.

mod cache;
pub(crate) mod diff;
mod handle;
mod health;
mod relist;
mod schedule;
mod stream;
mod stream_state;
mod termination;

use std::time::Instant;

use crossbeam_channel::{Sender, bounded};

use crate::util::mailbox::Post;
use crate::util::threads::{Died, OnDeath, Running};

pub(crate) use diff::ExitedContainers;
pub(crate) use handle::{Observe, ObservedChange, new};
pub(crate) use health::RuntimeHealth;
use stream_state::StreamState;

/// Settings of the room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Whether to use the runtime's event stream, if it has one.
    pub events: bool,
}

/// Starts the threads.
///
/// # Errors
/// When a thread cannot be started.
pub(crate) fn spawn(
    observe: &Observe,
    settings: Settings,
    changes: Post<ObservedChange, ExitedContainers>,
    deaths: &Sender<Died>,
) -> std::io::Result<Vec<Running>> {
    let on_death = || OnDeath::Supervisor(deaths.clone());
    let (runtime_is_back, back) = bounded(1);
    let mut threads = Vec::new();
    if settings.events {
        // So that the first list counts as the one after the start of the stream.
        observe.cache.set_stream(StreamState::Open { since: Instant::now() });
        threads.push(stream::spawn(observe.clone(), back, on_death())?);
    }
    threads.push(relist::spawn(observe.clone(), changes, runtime_is_back, on_death())?);
    Ok(threads)
}
