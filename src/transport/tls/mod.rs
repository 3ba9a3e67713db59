//! TLS: sessions with servers and with clients, and the verification of their certificates (Go:
//! crypto/tls, crypto/x509).
//!
//! - `client`: sessions with the API server, the manifest URL, proxies, and servers of probes and
//!   hooks.
//! - `server`: sessions of the node API.
//! - `authorities`, `usage`: which certificates prove who a client is.

mod authorities;
pub(super) mod client;
#[cfg(test)]
pub(super) mod fuzz;
mod server;
mod usage;

pub use authorities::{Authorities, Verdict};
pub use client::{Identity, Roots, TlsSetupError};
pub use server::{Acceptor, ServingCertificate, Session, Settings};
