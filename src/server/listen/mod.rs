//! Sockets, accepted connections and their limits.

pub(super) mod accept;
pub(super) mod bind;
pub(super) mod hangups;
pub(super) mod limiter;
mod peer;
