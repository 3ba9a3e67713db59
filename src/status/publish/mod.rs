//! The `status` thread: reports the statuses of pods to the API server (Go: pkg/kubelet/status
//! manager's syncBatch, syncPod).
//!
//! Inbox: the bell of the status cache, and the pods as the API server shows them ([`ApiPodSender`]).
//! Out: status patches, and the deletion of pods that have completely ended on the node.
//! The thread wakes for a new status, a pod that the server shows with another status, a retry, the end
//! of the wait of a ready sandbox, and a return of the server while a retry waits.
//! Invariants: only the newest status is sent; a pod that fails delays no other; a patch contains
//! the UID of its pod; a status that the server already shows is not sent.

mod api_pod;
mod core;
mod request;
#[cfg(test)]
mod tests;

pub use api_pod::ApiPod;
pub use request::{Api, Operation, Request, Response};

use std::time::Instant;

use crossbeam_channel::{Receiver, select_biased};
use jiff::Timestamp;

use self::core::Core;
use super::cache::StatusCache;
use super::merge::Activity;
use crate::model::ids::PodUid;
use crate::util::mailbox::{self, Inbox, Post};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Where pods are posted, under the UID that they have at the API server.
pub type ApiPodSender = Post<PodUid, ApiPod>;

/// Makes the thread's mailbox.
#[must_use]
pub fn inbox() -> (ApiPodSender, Inbox<PodUid, ApiPod>) {
    mailbox::mailbox(mailbox::replace)
}

/// Handles and channel ends of the thread.
pub struct Deps {
    /// The statuses, and the bell.
    pub status: StatusCache,
    /// The pods as the API server shows them.
    pub pods: Inbox<PodUid, ApiPod>,
    /// The API server.
    pub api: Box<dyn Api>,
    /// Whether containers of a pod, by the UID that it has on this node, may still run.
    pub activity: Box<dyn Fn(&PodUid) -> Activity + Send>,
}

/// Starts the thread. To stop it, shut the client down, too: that ends a request in progress.
///
/// # Errors
/// When the thread cannot be started.
pub fn spawn(deps: Deps, on_death: OnDeath) -> std::io::Result<Running> {
    threads::spawn("status", Stack::Large, on_death, move |stop| {
        // The bell is registered before the first read, so that a later change rings it.
        let bell = deps.status.changes();
        Publisher { core: Core::default(), deps, bell }.run(&stop);
    })
}

struct Publisher {
    core: Core,
    deps: Deps,
    bell: Receiver<()>,
}

impl Publisher {
    fn run(mut self, stop: &StopToken) {
        let returns = self.deps.api.returns();
        let mut number = returns.number();
        loop {
            self.receive_changes();
            for uid in self.core.due(Instant::now()) {
                if stop.is_stopped() {
                    return;
                }
                // During a request a pod may be deleted, or the server may become unavailable.
                self.receive_changes();
                self.report(&uid);
            }
            if self.core.next_due().is_none() {
                self.deps.status.set_published(self.core.seen());
            }
            let waits = self.core.next_due().is_some();
            if !waits {
                // A return before the next failure is not one after it.
                number = returns.number();
            }
            let returned = if waits { returns.after(number) } else { StopToken::never() };
            let _waiting = threads::waiting("a status to report");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(self.deps.pods.bell()) -> _ => {}
                recv(self.bell) -> _ => {}
                recv(returned.signal()) -> _ => {
                    number = returns.number();
                    self.core.returned(Instant::now());
                }
                recv(timers::deadline_channel(self.core.next_due())) -> _ => {}
            }
        }
    }

    fn receive_changes(&mut self) {
        let now = Instant::now();
        for (uid, shown) in self.deps.pods.drain() {
            self.core.shown(uid, shown, now);
        }
        for (uid, version) in self.deps.status.newer_than(self.core.seen()) {
            self.core.stored(&uid, version, now);
        }
    }

    fn report(&mut self, uid: &PodUid) {
        let Some(local) = self.core.local(uid) else { return };
        // Before the status: if no container runs at this moment, the status read then is not older than that.
        let activity = (self.deps.activity)(&local);
        let Some(entry) = self.deps.status.entry(&local) else { return };
        let Some(request) = self.core.decide(uid, &entry, activity, Timestamp::now(), Instant::now()) else {
            return;
        };
        let response = {
            let _waiting = threads::waiting("the API server");
            self.deps.api.send(&request)
        };
        self.core.apply_response(uid, response, Instant::now());
    }
}
