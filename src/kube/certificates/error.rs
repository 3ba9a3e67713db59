//! Errors of certificates and their requests.

use std::path::PathBuf;

use super::csr::Purpose;

/// Why there is no certificate, or not yet.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot make a private key")]
    Key { source: rcgen::Error },
    /// No request or certificate could be made.
    #[error("cannot write the request for a {purpose}")]
    Request { purpose: Purpose, source: rcgen::Error },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file or directory cannot be written.
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    /// The content of a file is invalid.
    #[error("{} cannot be used: {reason}", path.display())]
    Content { path: PathBuf, reason: &'static str },
    /// The request to the API server failed.
    #[error("cannot {verb} the certificate signing request {name} for the {purpose}: {detail}")]
    Api {
        purpose: Purpose,
        verb: &'static str,
        name: String,
        /// The client's error message.
        detail: String,
    },
    /// The request was denied.
    #[error(
        "certificate signing request {name} for the {purpose} is denied, reason: {reason:?}, message: {message:?}"
    )]
    Denied { purpose: Purpose, name: String, reason: String, message: String },
    /// The signer failed.
    #[error(
        "certificate signing request {name} for the {purpose} failed, reason: {reason:?}, message: {message:?}"
    )]
    Failed { purpose: Purpose, name: String, reason: String, message: String },
    /// The request was not decided or not signed in time.
    #[error(
        "certificate signing request {name} for the {purpose} was not approved and signed within {minutes} min: is there an approver (kubectl certificate approve {name})?"
    )]
    TimedOut {
        purpose: Purpose,
        name: String,
        /// The time limit that was reached.
        minutes: u64,
    },
    /// The request was deleted, or replaced by another one.
    #[error("certificate signing request {name} for the {purpose} is gone")]
    Gone { purpose: Purpose, name: String },
    /// Another request with this name exists.
    #[error("there is a certificate signing request {name} already, and {reason}")]
    Foreign { name: String, reason: &'static str },
    #[error("the certificate issued for request {name} cannot be used: {reason}")]
    Issued { name: String, reason: &'static str },
    /// The bootstrap credentials cannot be used.
    #[error("cannot use the bootstrap credentials: {0}")]
    Bootstrap(String),
}
