//! One connection: its bytes, the requests on it, and their responses.

pub(super) mod connection;
pub(super) mod request;
pub(super) mod response;
