//! What the registry serves, as an interface: tests have made-up images.

use std::io::Read;

use crate::images::{ArchiveSetReport, BlobError, Document, ImageSet, LookupError};
use crate::util::stop::StopToken;

/// The set of images as the registry and the local API need it.
pub(crate) trait Images: Send + Sync {
    /// See [`ImageSet::manifest`].
    ///
    /// # Errors
    /// When no archive has it, or it cannot be read.
    fn manifest(&self, repository: &str, reference: &str) -> Result<Document, LookupError>;

    /// See [`ImageSet::blob`].
    ///
    /// # Errors
    /// When no archive has it.
    fn blob(&self, digest: &str) -> Result<BlobSource, LookupError>;

    /// See [`ImageSet::tags`].
    fn tags(&self, repository: &str) -> Vec<String>;

    /// See [`ImageSet::report`].
    fn report(&self) -> ArchiveSetReport;

    /// See [`ImageSet::rescan`].
    fn rescan(&self);

    /// See [`ImageSet::set_registry`].
    fn set_registry(&self, address: &str);

    /// See [`ImageSet::report_no_registry`].
    fn report_no_registry(&self, reason: &str);
}

/// A blob that can be opened.
pub(crate) struct BlobSource {
    /// Its size in bytes.
    pub size: u64,
    /// Opens it for reading from an offset to its end, or to the stop signal.
    pub open: Box<OpenBlob>,
}

pub(crate) type OpenBlob = dyn Fn(u64, &StopToken) -> Result<Box<dyn Read + Send>, BlobError> + Send;

impl Images for ImageSet {
    fn manifest(&self, repository: &str, reference: &str) -> Result<Document, LookupError> {
        ImageSet::manifest(self, repository, reference)
    }

    fn blob(&self, digest: &str) -> Result<BlobSource, LookupError> {
        let blob = ImageSet::blob(self, digest)?;
        Ok(BlobSource { size: blob.size, open: Box::new(move |from, stop| blob.open(from, stop)) })
    }

    fn tags(&self, repository: &str) -> Vec<String> {
        ImageSet::tags(self, repository)
    }

    fn report(&self) -> ArchiveSetReport {
        ImageSet::report(self)
    }

    fn rescan(&self) {
        ImageSet::rescan(self);
    }

    fn set_registry(&self, address: &str) {
        ImageSet::set_registry(self, address);
    }

    fn report_no_registry(&self, reason: &str) {
        ImageSet::report_no_registry(self, reason);
    }
}
