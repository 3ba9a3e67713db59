//! HTTP/1.1 without sockets (RFC 9110, RFC 9112): heads, bodies and their framing, for servers
//! and clients alike (Go: net/http, net/textproto).
//!
//! The node API, the local socket, the upgrade to the runtime, probes, hooks, proxies and the local
//! commands all use this codec; requests to the API server and to the manifest URL are ureq's.
//! `httparse` splits heads of requests into lines and fields; whatever a caller accepts beyond the
//! grammar is decided here. `tiny_http` has the types of whole responses, and writes their heads.
//!
//! - [`request`]: heads of requests. They are read strictly: a head that two readers could
//!   understand in two ways is rejected. Those of our own clients are written here.
//! - [`response`]: heads of responses, as tolerant as Go's client.
//! - [`body`]: where a body ends, for both.
//! - [`writer`]: a server's response, framed as the client's version allows.

pub mod body;
pub mod fields;
#[cfg(test)]
pub(super) mod fuzz;
pub mod request;
pub mod response;
pub mod target;
pub mod writer;

pub use body::Framing;
pub use fields::is_token;
pub use request::{RequestError, RequestHead, RequestWriter};
pub(super) use response::MAX_INTERIM;
pub use response::{Malformed, ResponseHead};
pub use target::Target;
pub use writer::{BufferedResponse, Form, Header, ResponseWriter, StatusCode};
