//! What the local socket serves: the requests of `coracle` and its documents.

pub(super) mod debug;
pub(super) mod routes;
pub(super) mod select;
pub(super) mod streams;
pub(super) mod views;
