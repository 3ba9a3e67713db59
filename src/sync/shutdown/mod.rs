//! Gives pods their time when the machine shuts down (Go: pkg/kubelet/nodeshutdown).
//!
//! Owns: the delay lock of logind, and the course of a shutdown (`core`, pure).
//! Thread: `shutdown`, only where the configuration asks for it; it waits on D-Bus and on the
//! [`Wake`] bell, which `sync` rings while a shutdown is under way.
//! Out: [`Orders`] to `sync`, which refuses new pods and stops those that run; the word to
//! the Node object; an event, two metrics and their state file.
//! Invariants: the lock is held until the pods have had their time; signals count only from
//! the owner of logind's name; without D-Bus everything else works, and one warning says so.
//! Absent on purpose: anything about the end of the agent alone, which stops no pod.

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

/// Where the bus of the machine is, unless the environment says otherwise.
pub const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";

/// What the thread needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Who gets how much time; never empty.
    pub steps: Vec<Step>,
    /// The address of the bus.
    pub bus: String,
    /// Where logind reads more of its configuration.
    pub logind_conf_dir: PathBuf,
    /// Where the times of the last shutdown are kept.
    pub state_file: PathBuf,
    /// Whether they are stored and reported (the gate `GracefulNodeShutdownBasedOnPodPriority`).
    pub keep_times: bool,
}

/// What the thread works with.
pub struct Deps {
    /// All pods.
    pub view: View,
    /// Their statuses.
    pub status: StatusCache,
    /// Tells users.
    pub events: EventSink,
    /// What `sync` shall do.
    pub orders: Post<(), Orders>,
    /// What the Node object says.
    pub flag: Flag,
    /// Rung when the flag has changed: the Node object tells of it. `None` without one.
    pub node: Option<Sender<()>>,
    /// Whether statuses have to reach an API server.
    pub publishes: bool,
}

/// Whether the node is shutting down, readable by all threads.
#[derive(Debug, Clone, Default)]
pub struct Flag(Arc<AtomicBool>);

impl Flag {
    /// Whether it is.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, on: bool) {
        self.0.store(on, Ordering::Relaxed);
    }
}

/// What `sync` has not taken up yet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Orders {
    /// The node shuts down, or no longer does.
    pub shutting_down: Option<bool>,
    /// Pods to stop, each with its grace in seconds.
    pub kills: BTreeMap<PodUid, i64>,
}

impl Orders {
    fn merge(&mut self, newer: Orders) {
        if newer.shutting_down.is_some() {
            self.shutting_down = newer.shutting_down;
            // Whatever has not begun belongs to a shutdown that is over.
            self.kills.clear();
        }
        self.kills.extend(newer.kills);
    }
}

/// What `sync` has of this room.
pub struct Link {
    /// What it shall do.
    pub orders: Inbox<(), Orders>,
    /// Rung when it has done something, while the node shuts down. `None`: no thread listens.
    pub wake: Option<Wake>,
}

/// Makes the two ends of the link; `wake` is the thread's bell if there is one.
#[must_use]
pub fn link(wake: Option<Wake>) -> (Post<(), Orders>, Link) {
    let (post, orders) = mailbox::mailbox(Orders::merge);
    (post, Link { orders, wake })
}

/// Starts the thread; `wake` is the bell that [`link`] was given.
///
/// # Errors
/// When the thread cannot be started.
pub fn spawn(settings: Settings, deps: Deps, wake: &Wake, on_death: OnDeath) -> std::io::Result<Running> {
    let (own, waker) = (wake.clone(), wake.clone());
    let running = threads::spawn("shutdown", Stack::Small, on_death, move |stop| {
        thread::Manager::new(settings, deps, own, stop).run();
    })?;
    Ok(running.with_waker(Box::new(move || waker.ring())))
}
