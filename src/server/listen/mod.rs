//! Sockets, accepted connections and their limits.

pub(super) mod bind;
pub(super) mod hangups;
pub(super) mod limiter;
pub(super) mod peer;
pub(super) mod quota;
