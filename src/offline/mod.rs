//! Room `offline`: the last known objects of the API server on disk, and whose set of pods counts while
//! the API server is away or has lost its data.
//!
//! Owns: the files below `<root-dir>/offline`, the key that seals Secrets and tokens, and the phase of
//! the node.
//! Threads: `offline` writes files and waits for what is due. Sets are decided on the thread that
//! delivers them, so that a slow disk delays no pod.
//! Pure cores: [`key`], [`mod@format`], [`decide`], `queue`, `clock`. [`fence`] decides which pods are stopped after a
//! time without the API server. `files` reads and writes, `key_file` reads or makes the key; `listing`, `check`
//! and `purge` are for the commands.
//! Invariants: a file is replaced only by a whole one; a body counts only if its checksum, kind and name
//! are right; no part of a file's name comes from an object; Secrets and tokens are in clear neither on
//! disk nor in logs, events or `Debug` output; only a complete list of the API server that knows this
//! node or one of its pods stops pods without an order.
//! Absent on purpose: requests to the API server; the rooms that send them pass in what they know.
//! No Go counterpart.

mod check;
mod clock;
pub mod decide;
pub mod fence;
pub mod files;
pub mod format;
#[cfg(test)]
pub(crate) mod fuzz;
mod handle;
pub mod key;
mod key_file;
mod listing;
mod problems;
mod purge;
mod queue;
mod settings;
mod state;
mod stops;
pub mod store;
mod stored;
#[cfg(test)]
pub(crate) mod test_store;
#[cfg(test)]
pub(crate) mod testing;
mod thread;

pub use check::PodNeeds;
pub use decide::NodeFact;
pub use fence::{FenceSettings, boot_time, is_in_memory};
pub use files::AUTHORITIES_FILE;
pub use handle::{Deliver, NothingHeld, Offline};
pub use key::{Key, Kind};
pub use purge::{ObjectNameError, PurgeError, PurgeScope};
pub use settings::Settings;
pub use state::{
    CheckReport, DamagedFile, HeldReason, Phase, PodCheck, PurgeReport, Report, SealState, StoredEntry,
    TrustReport,
};
pub(crate) use stored::decode;
pub use thread::{Bodies, ChangedStatuses, Deps, Needs, ReadPods, ReadServices, ReadStatuses};
