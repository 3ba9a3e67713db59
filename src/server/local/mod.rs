//! The paths of the local socket, which the `coracle` commands use.

pub(super) mod debug;
pub(super) mod routes;
pub(super) mod select;
pub(super) mod streams;
