//! Delays a shutdown of the machine until the pods have ended (Go: pkg/kubelet/nodeshutdown).
//!
//! Owns: the delay lock of logind, and the steps of a shutdown (`core`, pure).
//! Thread: `shutdown`, only if it is configured; it waits on D-Bus and on the [`Wake`] bell, which
//! `sync` rings while a shutdown is under way.
//! Out: [`Orders`] to `sync`, which refuses new pods and stops those that run; the flag for the
//! Node object; an event, two metrics and their state file.
//! Invariants: the lock is held until the pods have ended or their time has elapsed; signals are
//! accepted only from the owner of logind's name; without D-Bus everything else works, and one
//! warning is logged.
//! Absent on purpose: the end of the agent alone, which stops no pod.

mod core;
mod logind;
mod record;
#[cfg(test)]
mod tests;
mod thread;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::Sender;

use super::view::View;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::pods::plan::shutdown::Step;
use crate::status::StatusCache;
use crate::util::mailbox::{self, Inbox, Post};
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::wake::Wake;

/// The address of the system bus, unless the environment sets another.
pub(crate) const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";

/// Settings of the thread.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The time for the pods of each priority; never empty.
    pub steps: Vec<Step>,
    /// The address of the bus.
    pub bus: String,
    /// The directory of drop-in files of logind's configuration.
    pub logind_conf_dir: PathBuf,
    /// The file with the times of the last shutdown.
    pub state_file: PathBuf,
    /// Whether these times are stored and reported (gate `GracefulNodeShutdownBasedOnPodPriority`).
    pub keep_times: bool,
}

/// Handles and channel ends of the thread.
pub(crate) struct Deps {
    /// All pods.
    pub view: View,
    /// The statuses of the pods.
    pub status: StatusCache,
    /// Kubernetes events.
    pub events: EventSink,
    /// Orders to `sync`.
    pub orders: Post<(), Orders>,
    /// Whether the Node object shows a shutdown.
    pub flag: ShutdownFlag,
    /// Rung when the flag has changed, to update the Node object. `None` without one.
    pub node: Option<Sender<()>>,
    /// Whether statuses have to reach an API server.
    pub publishes: bool,
}

/// Whether the node is shutting down, readable by all threads.
#[derive(Debug, Clone, Default)]
pub(crate) struct ShutdownFlag(Arc<AtomicBool>);

impl ShutdownFlag {
    /// Whether the node is shutting down.
    #[must_use]
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, on: bool) {
        self.0.store(on, Ordering::Relaxed);
    }
}

/// Orders that `sync` has not received yet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Orders {
    /// The node shuts down, or no longer does.
    pub shutting_down: Option<bool>,
    /// Pods to stop, each with its grace in seconds.
    pub kills: BTreeMap<PodUid, i64>,
}

impl Orders {
    fn merge(&mut self, newer: Orders) {
        if newer.shutting_down.is_some() {
            self.shutting_down = newer.shutting_down;
            // The pending orders belong to a shutdown that has ended or was cancelled.
            self.kills.clear();
        }
        self.kills.extend(newer.kills);
    }
}

/// What `sync` holds of the channels to and from this thread.
pub(crate) struct SyncEnds {
    /// Orders to `sync`.
    pub orders: Inbox<(), Orders>,
    /// Rung after each turn while the node shuts down. `None`: there is no thread `shutdown`.
    pub wake: Option<Wake>,
}

/// Makes the channels to and from `sync`; `wake` is the thread's bell if there is one.
#[must_use]
pub(crate) fn channels(wake: Option<Wake>) -> (Post<(), Orders>, SyncEnds) {
    let (post, orders) = mailbox::mailbox(Orders::merge);
    (post, SyncEnds { orders, wake })
}

/// Starts the thread; `wake` is the bell that [`channels`] was given.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(
    settings: Settings,
    deps: Deps,
    wake: &Wake,
    on_death: OnDeath,
) -> std::io::Result<Running> {
    let (own, waker) = (wake.clone(), wake.clone());
    let running = threads::spawn("shutdown", Stack::Small, on_death, move |stop| {
        thread::Manager::new(settings, deps, own, stop).run();
    })?;
    Ok(running.with_waker(Box::new(move || waker.ring())))
}
