//! Room `image_set`: images from archives on this node, for nodes without a registry.
//!
//! Owns: the archives of the configured directories, what they contain, and the index of both on
//! disk. The runtime pulls the images from the agent's own registry on loopback (`server::registry`),
//! which reads them from the archives through [`ImageSet`].
//! Threads: `image-set` reads archives, `image-pull` makes the runtime pull missing images.
//! Invariants: an archive is never written; only blobs whose digest was verified are offered; a
//! fault of one archive or blob affects no other image; an unchanged archive is not read again.
//! Absent on purpose: any API of one runtime. The runtime pulls as from any registry.

pub mod report;

use std::io::Read;
use std::sync::Arc;

pub use report::{ArchiveReport, SetImageReport, SetReport};

/// The handle of the room. Clones share it.
#[derive(Clone, Default)]
pub struct ImageSet {}

/// A manifest or an index as the registry serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its media type.
    pub media_type: String,
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Its text; the digest is that of these bytes.
    pub bytes: Arc<[u8]>,
}

/// A blob that an archive has.
pub struct Blob {
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
    open: Box<dyn Fn(u64) -> Result<Box<dyn Read + Send>, String> + Send>,
}

impl Blob {
    /// Opens the blob for reading from an offset to its end.
    ///
    /// # Errors
    /// When the archive is gone, has changed since it was verified, or cannot be read. The text
    /// names the archive and the blob.
    pub fn open(&self, from: u64) -> Result<Box<dyn Read + Send>, String> {
        (self.open)(from)
    }
}

/// Why a manifest or blob is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No archive has it: 404.
    #[error("{0}")]
    Unknown(String),
    /// An archive has it, and it cannot be read now: 503.
    #[error("{0}")]
    Unavailable(String),
}

impl ImageSet {
    /// The manifest of an image. `repository` begins with the registry: `docker.io/library/nginx`.
    /// `reference` is a tag or a digest.
    ///
    /// # Errors
    /// When no archive has it, or it cannot be read.
    pub fn manifest(&self, repository: &str, reference: &str) -> Result<Document, Refusal> {
        Err(Refusal::Unknown(format!("no archive has {repository}:{reference}")))
    }

    /// A blob of any image.
    ///
    /// # Errors
    /// When no archive has it.
    pub fn blob(&self, digest: &str) -> Result<Blob, Refusal> {
        Err(Refusal::Unknown(format!("no archive has the blob {digest}")))
    }

    /// The tags of a repository.
    #[must_use]
    pub fn tags(&self, repository: &str) -> Vec<String> {
        let _ = repository;
        Vec::new()
    }

    /// Reads the directories again, now. Returns before that is done.
    pub fn rescan(&self) {}

    /// The state of the set.
    #[must_use]
    pub fn report(&self) -> SetReport {
        SetReport::default()
    }

    /// Told once by the server: the address of the registry.
    pub fn set_registry(&self, address: &str) {
        let _ = address;
    }
}
