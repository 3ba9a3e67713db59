//! Certificates of the node: the one by which the API server knows it, and the one it
//! serves with (Go: pkg/kubelet/certificate, client-go's util/certificate).
//!
//! Owns: the files of `--cert-dir`, requests for certificates, and when to ask for a new one.
//! Threads: `certs` (one), only where a certificate is renewed. It waits on its stop token,
//! a bell and the next due time; a request to the API server ends with the client.
//! Inbox: the node's addresses, by `Certificates::set_addresses`; the newest count.
//! Invariants: keys are in files of mode 0600 and in no log line; a current file is whole;
//! a request that waits for its approval is found again after a restart.
//! Absent on purpose: who signed a certificate (the other side judges that), RSA, and an
//! exit when the certificate runs out: the thread asks anew with the bootstrap credentials.

pub mod bootstrap;
mod csr;
mod facts;
mod rotation;
pub mod serving;
mod signer;
mod store;
mod thread;

use std::path::PathBuf;

pub use csr::{Purpose, ServingNames, Template};
pub use facts::{Facts, Subject};
pub use signer::OpenBootstrap;
pub use store::{Identity, Store, facts_of_pem};
pub use thread::{Certificates, Numbers, Renewed, Settings, client_identity, spawn};

/// Why there is no certificate, or not yet.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No key.
    #[error("cannot make a private key")]
    Key {
        /// Why.
        source: rcgen::Error,
    },
    /// No request, or no certificate of our own making.
    #[error("cannot write the request for a {purpose}")]
    Request {
        /// What for.
        purpose: Purpose,
        /// Why.
        source: rcgen::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file or directory cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{} cannot be used: {why}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// Why.
        why: &'static str,
    },
    /// The API server does not answer, or not as wanted.
    #[error("cannot {verb} the certificate signing request {name} for the {purpose}: {detail}")]
    Api {
        /// What for.
        purpose: Purpose,
        /// What was attempted.
        verb: &'static str,
        /// The object.
        name: String,
        /// The client's words.
        detail: String,
    },
    /// Somebody said no.
    #[error(
        "certificate signing request {name} for the {purpose} is denied, reason: {reason:?}, message: {message:?}"
    )]
    Denied {
        /// What for.
        purpose: Purpose,
        /// The object.
        name: String,
        /// Of the condition.
        reason: String,
        /// Of the condition.
        message: String,
    },
    /// The signer could not.
    #[error(
        "certificate signing request {name} for the {purpose} failed, reason: {reason:?}, message: {message:?}"
    )]
    Failed {
        /// What for.
        purpose: Purpose,
        /// The object.
        name: String,
        /// Of the condition.
        reason: String,
        /// Of the condition.
        message: String,
    },
    /// Nobody decided in time.
    #[error(
        "certificate signing request {name} for the {purpose} was not approved and signed within {minutes} min: is there an approver (kubectl certificate approve {name})?"
    )]
    TimedOut {
        /// What for.
        purpose: Purpose,
        /// The object.
        name: String,
        /// How long it was waited for.
        minutes: u64,
    },
    /// The request was deleted, or is another one now.
    #[error("certificate signing request {name} for the {purpose} is gone")]
    Gone {
        /// What for.
        purpose: Purpose,
        /// The object.
        name: String,
    },
    /// There is a request of that name that is not ours.
    #[error("there is a certificate signing request {name} already, and {why}")]
    Foreign {
        /// The object.
        name: String,
        /// Why it is not ours.
        why: &'static str,
    },
    /// What was issued is of no use.
    #[error("the certificate issued for request {name} cannot be used: {why}")]
    Issued {
        /// The object.
        name: String,
        /// Why.
        why: &'static str,
    },
    /// The bootstrap credentials cannot be used.
    #[error("cannot use the bootstrap credentials: {0}")]
    Bootstrap(String),
}

/// An error with its causes, for a log line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(one) = cause {
        text.push_str(": ");
        text.push_str(&one.to_string());
        cause = one.source();
    }
    text
}
