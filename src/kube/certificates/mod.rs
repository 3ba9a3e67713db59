//! Certificates of the node: the client certificate for the API server, and the serving certificate
//! (Go: pkg/kubelet/certificate, client-go's util/certificate).
//!
//! Owns: the files of `--cert-dir`, certificate signing requests, and the time of renewals.
//! Threads: `certs` (one), only where a certificate is renewed. It waits on its stop token,
//! a bell and the next due time; a request to the API server ends with the client.
//! Inbox: the node's addresses, by `Certificates::set_addresses`; the last call counts.
//! Invariants: keys are in files of mode 0600 and in no log line; a current file is complete; after
//! a restart a request that waits for its approval is continued.
//! Absent on purpose: verification of the issuer (the other side does that), RSA, and an exit when
//! the certificate expires: the thread makes a request with the bootstrap credentials.

pub mod bootstrap;
mod csr;
mod error;
mod facts;
mod rotation;
pub mod serving;
mod signer;
mod store;
#[cfg(test)]
pub(crate) mod testing;
mod thread;

pub use csr::{Purpose, Template};
pub use facts::{CertificateFields, Subject};
pub use signer::OpenBootstrap;
pub use store::{Identity, Store};
pub use thread::{Certificates, ClientRenewal, Settings, client_identity, spawn};
