//! Sockets, accepted connections and who may have one.

pub(super) mod accept;
pub(super) mod bind;
pub(super) mod hangups;
pub(super) mod limiter;
mod peer;
