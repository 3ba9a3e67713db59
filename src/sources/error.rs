//! Errors of reading manifests.

use std::path::PathBuf;

use super::settings::MAX_MANIFEST_BYTES;

/// Why a manifest or its path could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot open {0}")]
    Open(PathBuf, #[source] std::io::Error),
    #[error("cannot read {0}")]
    Read(PathBuf, #[source] std::io::Error),
    #[error("cannot list directory {0}")]
    List(PathBuf, #[source] std::io::Error),
    #[error("{0} is {1}; only regular files are read")]
    NotAFile(PathBuf, &'static str),
    #[error("{0} is larger than the limit of {MAX_MANIFEST_BYTES} bytes")]
    TooLarge(PathBuf),
}
