//! Routes what the sources want and what the runtime shows to the pod workers (Go: syncLoop).
//!
//! Owns: the desired pods ([`core::Core`], pure) and the [`crate::pods::workers::Workers`].
//! Thread: `sync` (and `clean`, `shutdown` beside it). In: the mailboxes of `sources`, `observe` and of the workers that ended.
//! Out: worker mailboxes, statuses of rejected pods, a snapshot of all pods.
//! Invariants: a turn does no I/O and waits for nobody; a turn over 100 ms is logged. Pods that the
//! node's labels would refuse wait beside the turns until the node has been read anew.
//! Absent on purpose: a pause while the runtime is unhealthy. That is a state which the
//! workers look at; sources and health answers go on.

pub mod clean;
pub mod core;
pub mod ephemeral;
mod misplaced;
mod resize;
pub mod shutdown;
mod thread;
pub mod view;

pub use thread::{Deps, Settings, spawn};
