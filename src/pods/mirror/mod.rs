//! The `mirrors` thread: keeps a copy of each static pod at the API server, so that users see it
//! (Go: mirror client, and tryReconcileMirrorPods of the pod workers).
//!
//! Inbox: the static pods and mirrors that `sync` knows, complete, newest wins ([`View`]).
//! Out: creations and deletions of mirrors. A pod never waits for its mirror.
//! Invariants: a mirror stays until its static pod has ended; only mirrors are deleted; no mirror
//! is deleted for a missing static pod before all sources have delivered their sets.

mod core;
mod redact;
mod request;
#[cfg(test)]
mod tests;
mod view;

pub use request::Api;
pub use view::View;

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::select_biased;

use self::core::Core;
use crate::model::api;
use crate::util::mailbox::{self, Inbox, Post};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Where a view is posted.
pub type ViewSender = Post<(), View>;

/// Makes the thread's mailbox.
#[must_use]
pub fn inbox() -> (ViewSender, Inbox<(), View>) {
    mailbox::mailbox(mailbox::replace)
}

/// Handles and channel ends of the thread.
pub struct Deps {
    /// The newest view.
    pub views: Inbox<(), View>,
    /// The API server.
    pub api: Box<dyn Api>,
    /// The Node object as the API server showed it last.
    pub node: Box<dyn Fn() -> Option<Arc<api::Node>> + Send>,
}

/// Starts the thread. To stop it, shut the client down, too: that ends its request.
///
/// # Errors
/// When the thread cannot be started.
pub fn spawn(deps: Deps, on_death: OnDeath) -> std::io::Result<Running> {
    threads::spawn("mirrors", Stack::Large, on_death, move |stop| run(&deps, &stop))
}

fn run(deps: &Deps, stop: &StopToken) {
    let mut core = Core::default();
    let returns = deps.api.returns();
    let mut number = returns.number();
    loop {
        for (_, view) in deps.views.drain() {
            core.apply_view(view, Instant::now());
        }
        if stop.is_stopped() {
            return;
        }
        let node = (deps.node)();
        if let Some((name, request)) = core.next(node.as_deref(), Instant::now()) {
            let response = {
                let _waiting = threads::waiting("the API server");
                deps.api.send(&request)
            };
            core.apply_response(&name, &request, response, Instant::now());
            continue;
        }
        let waits = core.next_due().is_some();
        if !waits {
            // A return before the next failure is not one after it.
            number = returns.number();
        }
        let returned = if waits { returns.after(number) } else { StopToken::never() };
        let _waiting = threads::waiting("static pods, mirrors");
        select_biased! {
            recv(stop.signal()) -> _ => return,
            recv(deps.views.bell()) -> _ => {}
            recv(returned.signal()) -> _ => {
                number = returns.number();
                core.returned(Instant::now());
            }
            recv(timers::deadline_channel(core.next_due())) -> _ => {}
        }
    }
}
