//! The state of the runtime's event stream.

use std::time::Instant;

/// Whether the runtime reports changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StreamState {
    /// It was not requested.
    Off,
    /// It was requested. The runtime does not confirm it, and sends nothing while nothing changes.
    Open { since: Instant },
    /// It has ended.
    Broken { reason: String },
    /// The runtime does not offer one.
    Unsupported,
}
