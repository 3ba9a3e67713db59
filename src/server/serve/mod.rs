//! Accepts connections, reads their requests, and finds and writes the responses.

pub(super) mod accept;
mod exchange;
mod requests;
pub(super) mod route;
mod span;
