//! Routes what the sources desire and what the runtime reports to the pod workers (Go: syncLoop).
//!
//! Owns: the desired pods ([`core::Core`]) and the [`crate::pods::workers::Workers`].
//! Threads: `sync`, `clean`, `orphans`, `shutdown`.
//! Inbox: the mailboxes of `sources`, `observe`, `probes`, of objects and of workers that ended
//! (`event`). Out: worker mailboxes, statuses of rejected pods, a snapshot of all pods ([`view`]).
//! Pure cores: `core` and `resize` for pods, `deferred` for those that wait for the Node object,
//! `fence` for those that are stopped without the API server,
//! `departed` for those whose last status is being published, `preemptions` for critical pods that
//! wait for the end of others, `schedule` for the periods. The thread waits for an event, lets them
//! decide, and carries their effects out.
//! Invariants: a turn does no I/O and does not block; a turn over 100 ms is logged.
//! Absent on purpose: a pause while the runtime is unhealthy. Each worker checks the health
//! itself; sources and health checks continue.

pub(crate) mod clean;
pub(crate) mod core;
mod deferred;
mod departed;
mod effects;
pub(crate) mod ephemeral;
mod event;
pub(crate) mod evictions;
mod fence;
mod preemptions;
mod publish;
pub(crate) mod reclaim;
mod resize;
mod schedule;
pub(crate) mod shutdown;
mod thread;
pub(crate) mod view;

pub(crate) use thread::{Deps, Settings, spawn};
