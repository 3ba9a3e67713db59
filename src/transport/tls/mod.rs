//! TLS: sessions with servers and with clients, and the verification of their certificates (Go:
//! crypto/tls, crypto/x509).
//!
//! - `client`: sessions with the API server, the manifest URL, proxies, and servers of probes and
//!   hooks.
//! - `verify`, `names`: which certificates prove which server one speaks to, and why not.
//! - `ecdsa`: signatures that the library does not verify (pure).
//! - `cbc`: old suites, for probes only.
//! - `server`: sessions of the node API.
//! - `authorities`, `usage`: which certificates prove who a client is.

mod authorities;
mod cbc;
pub(super) mod client;
mod ecdsa;
#[cfg(test)]
pub(super) mod fuzz;
mod names;
mod server;
mod usage;
mod verify;

pub use authorities::{Authorities, Verification};
pub use client::{Identity, Roots, ServerAuthority, TlsSetupError, bundle_certificates, server_authorities};
pub use server::{Acceptor, ServingCertificate, Session, Settings};
