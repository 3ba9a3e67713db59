//! What the registry for the runtime serves: manifests and blobs of the set.

use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ImageSet;
use super::archive::{self, Archive, ArchiveError, BlobPlace, Compression, CountBytes, Digest};
use crate::util::sha256;
use crate::util::stop::StopToken;

/// A larger manifest is not served; containerd has the same limit.
const MAX_DOCUMENT: u64 = 4 << 20;

/// A manifest or an index as the registry serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its media type.
    pub media_type: String,
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Its text; the digest is that of these bytes.
    pub bytes: Vec<u8>,
}

/// A blob that an archive has.
#[derive(Debug, Clone)]
pub struct ArchiveBlob {
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
    path: PathBuf,
    archive: Arc<Archive>,
    key: Digest,
}

impl ArchiveBlob {
    /// Opens the blob for reading from an offset to its end. `stop` also ends the reading.
    ///
    /// # Errors
    /// When the archive is gone, has changed since it was verified, or cannot be read.
    pub fn open(&self, from: u64, stop: &StopToken) -> Result<Box<dyn Read + Send>, BlobError> {
        self.open_counted(from, &archive::count_nothing(), stop)
    }

    /// As [`ArchiveBlob::open`]. `count` counts what is read besides the bytes of the blob; its error ends
    /// the reading.
    ///
    /// # Errors
    /// As [`ArchiveBlob::open`].
    pub fn open_counted(
        &self,
        from: u64,
        count: &CountBytes,
        stop: &StopToken,
    ) -> Result<Box<dyn Read + Send>, BlobError> {
        match archive::open_blob(&self.path, &self.archive, &self.key, from, count, stop) {
            Ok(reader) => Ok(Box::new(reader)),
            Err(error) => Err(BlobError { path: self.path.clone(), digest: self.digest.clone(), error }),
        }
    }
}

/// Why a blob cannot be read from its archive.
#[derive(Debug, thiserror::Error)]
#[error("archive {}, blob {digest}: {error}", path.display())]
pub struct BlobError {
    /// The archive.
    pub path: PathBuf,
    /// The digest of the blob.
    pub digest: String,
    /// Why; [`ArchiveError::Stopped`] if the stop token ended it.
    pub error: ArchiveError,
}

/// Why a manifest or blob is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
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
    pub fn manifest(&self, repository: &str, reference: &str) -> Result<Document, LookupError> {
        self.shared.manifest_requests.fetch_add(1, Ordering::Relaxed);
        let unknown = || LookupError::Unknown(format!("no archive has the image {repository}:{reference}"));
        let digest = match Digest::parse(reference) {
            Ok(digest) => digest,
            Err(_) => {
                let set = self.shared.lock_set();
                let (_, _, image) = set.find(&format!("{repository}:{reference}")).ok_or_else(unknown)?;
                image.target.clone()
            }
        };
        let (path, archive, blob) = {
            let set = self.shared.lock_set();
            let (path, archive, blob) = set.blob(&digest).ok_or_else(unknown)?;
            (path.clone(), Arc::clone(archive), blob.clone())
        };
        if blob.size > MAX_DOCUMENT {
            return Err(LookupError::Unknown(format!("{digest} has {} bytes and is no manifest", blob.size)));
        }
        // The manifests of a compressed archive are in memory. Nothing is decompressed here, because
        // neither the client nor a stop of the agent could end that.
        if archive.compression != Compression::None && !matches!(blob.place, BlobPlace::Made { .. }) {
            return Err(LookupError::Unknown(format!("{digest} is no manifest")));
        }
        let media_type = blob.media_type;
        let bytes = read_whole(&ArchiveBlob {
            digest: digest.to_string(),
            size: blob.size,
            path,
            archive,
            key: digest.clone(),
        })
        .map_err(|error| self.unavailable(error))?;
        if sha256::sha256_hex(&bytes) != digest.hex() {
            return Err(self.unavailable(format!("manifest {digest} has changed since it was verified")));
        }
        Ok(Document { media_type, digest: digest.to_string(), bytes })
    }

    /// A blob of any image.
    ///
    /// # Errors
    /// When no archive has it.
    pub fn blob(&self, digest: &str) -> Result<ArchiveBlob, LookupError> {
        let unknown = || LookupError::Unknown(format!("no archive has the blob {digest}"));
        let key = Digest::parse(digest).map_err(|_| unknown())?;
        let set = self.shared.lock_set();
        let (path, archive, blob) = set.blob(&key).ok_or_else(unknown)?;
        Ok(ArchiveBlob {
            digest: digest.to_owned(),
            size: blob.size,
            path: path.clone(),
            archive: Arc::clone(archive),
            key,
        })
    }

    /// The tags of a repository, sorted.
    #[must_use]
    pub fn tags(&self, repository: &str) -> Vec<String> {
        let set = self.shared.lock_set();
        let tags = set.images().into_keys().filter_map(|name| {
            let (named_repository, tag) = name.rsplit_once(':')?;
            (named_repository == repository).then(|| tag.to_owned())
        });
        tags.collect()
    }

    /// The archive that cannot be read may have changed: it is inspected again.
    fn unavailable(&self, error: String) -> LookupError {
        self.shared.wake_reader();
        LookupError::Unavailable(error)
    }
}

fn read_whole(blob: &ArchiveBlob) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = |error: io::Error| format!("archive {}, blob {}: {error}", blob.path.display(), blob.digest);
    let reader = blob.open(0, &StopToken::never()).map_err(|error| error.to_string())?;
    reader.take(MAX_DOCUMENT).read_to_end(&mut bytes).map_err(read)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::archive::testing::{image, layout, tar};
    use super::super::archive::{Platform, read, stamp};
    use super::super::entries::State;
    use super::*;
    use crate::util::testing::zstd;

    #[test]
    fn manifest_of_compressed_archive_is_served_without_decompression() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar.zst");
        let content = image("linux/amd64", &["x"]);
        std::fs::write(&path, zstd(&tar(&layout(&[("r.example/a:1", &content)])))).unwrap();
        let mut archive =
            read(&path, &Platform::new("linux", "amd64", ""), &StopToken::never(), &mut |_| {}).unwrap();
        // What is before a layer is read and decompressed for it.
        let layer = archive.images[0].layers[0].digest.to_string();
        let blob = {
            let key = Digest::parse(&layer).unwrap();
            let stored = archive.blobs[&key].clone();
            let (path, archive) = (path.clone(), Arc::new(archive.clone()));
            ArchiveBlob { digest: layer.clone(), size: stored.size, path, archive, key }
        };
        let packed = std::fs::metadata(&path).unwrap().len();
        let counted = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let count: CountBytes = {
            let counted = Arc::clone(&counted);
            Arc::new(move |bytes| {
                counted.fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            })
        };
        let mut whole = Vec::new();
        blob.open_counted(0, &count, &StopToken::never()).unwrap().read_to_end(&mut whole).unwrap();
        assert!(counted.load(Ordering::Relaxed) > packed, "{counted:?} of {packed}");
        let count: CountBytes = Arc::new(|_| Err(io::Error::other("the limit")));
        let limited = blob.open_counted(0, &count, &StopToken::never());
        assert!(!limited.is_ok_and(|mut reader| reader.read(&mut [0]).is_ok()));
        // Decompression would fail.
        let size = std::fs::metadata(&path).unwrap().len();
        std::fs::write(&path, vec![0xff; size as usize]).unwrap();
        archive.stamp = stamp(&path).unwrap();
        let set = ImageSet::default();
        let key = (0, path.clone());
        set.shared.lock_set().list(vec![(key.clone(), archive.stamp)], |_, _| None);
        set.shared.lock_set().get_mut(&key).unwrap().state = State::Ready(Arc::new(archive));

        let document = set.manifest("r.example/a", "1").unwrap();
        assert_eq!(*document.bytes, content[2].1);
        assert_eq!(set.manifest("r.example/a", &document.digest), Ok(document));
        let refusal = set.manifest("r.example/a", &layer).unwrap_err();
        assert_eq!(refusal, LookupError::Unknown(format!("{layer} is no manifest")));
    }
}
