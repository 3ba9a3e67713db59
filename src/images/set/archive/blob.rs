//! Reads single blobs of an archive.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use super::error::ArchiveError;
use super::limits::LIMITS;
use super::open::{CountingFile, expanded};
use super::scan::blobs;
use super::stamp::{INDEX, Stamp};
use super::types::{Archive, ArchiveFormat, BlobPlace, Digest};
use crate::util::decompress::{self, Compression};
use crate::util::stop::StopToken;
use crate::util::untrusted;

/// Is called with numbers of bytes that were read and are not of the blob: those before it in a compressed
/// archive, and all compressed ones. Its error ends the reading.
pub type CountBytes = Arc<dyn Fn(u64) -> io::Result<()> + Send + Sync>;

/// A [`CountBytes`] that counts nothing.
#[must_use]
pub fn count_nothing() -> CountBytes {
    Arc::new(|_| Ok(()))
}

/// Counts what is read from a file.
struct ReportingReader {
    inner: CountingFile,
    count: CountBytes,
}

impl Read for ReportingReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(out)?;
        (self.count)(length as u64)?;
        Ok(length)
    }
}

/// The bytes of a blob. A read fails if the archive was changed since it was read as a whole, or on
/// the stop signal. The data are not verified again: the receiver computes their digest.
pub struct BlobReader {
    source: Box<dyn Read + Send>,
    /// Bytes of the source before the first one that is wanted.
    skip: u64,
    left: u64,
    /// The file with the bytes, and what it was at first.
    file: Option<(Arc<File>, Stamp)>,
    count: CountBytes,
    stop: StopToken,
}

/// Opens a blob at a position. The reader supplies exactly the bytes from `from` to the end of the
/// blob. In a compressed archive, the first read decompresses all that is before the blob; `count` counts
/// it, and `stop` ends it.
///
/// # Errors
/// [`ArchiveError::NoBlob`], also if `from` is larger than the blob; [`ArchiveError::Changed`] if the
/// file is not the one that `archive` describes; [`ArchiveError::Io`].
pub fn open_blob(
    path: &Path,
    archive: &Archive,
    digest: &Digest,
    from: u64,
    count: &CountBytes,
    stop: &StopToken,
) -> Result<BlobReader, ArchiveError> {
    let no_blob = || ArchiveError::NoBlob(digest.clone());
    let blob = archive.blobs.get(digest).ok_or_else(no_blob)?;
    let left = blob.size.checked_sub(from).ok_or_else(no_blob)?;
    let layout = archive.form == ArchiveFormat::OciLayout;
    let mut file = untrusted::open(&if layout { path.join(INDEX) } else { path.to_owned() })?;
    if Stamp::of_file(&file)? != archive.stamp {
        return Err(ArchiveError::Changed);
    }
    let (offset, mut stamp) = match &blob.place {
        BlobPlace::Made { text } => {
            let rest = text.as_bytes().iter().skip(text.len() - left as usize).copied().collect::<Vec<u8>>();
            return Ok(BlobReader {
                source: Box::new(Cursor::new(rest)),
                skip: 0,
                left,
                file: None,
                count: Arc::clone(count),
                stop: stop.clone(),
            });
        }
        BlobPlace::File { offset } => (*offset, archive.stamp),
        BlobPlace::Layout => (0, archive.stamp),
    };
    if layout {
        file = untrusted::open_at(blobs(path)?.as_fd(), Path::new(digest.hex()))?;
        stamp = Stamp::of_file(&file)?;
        if stamp.size != blob.size {
            return Err(ArchiveError::Changed);
        }
    }
    let start = offset.checked_add(from).ok_or_else(no_blob)?;
    let mut skip = 0;
    if archive.compression == Compression::None {
        file.seek(SeekFrom::Start(start))?;
    } else {
        skip = start;
    }
    let file = Arc::new(file);
    let source: Box<dyn Read + Send> = match archive.compression {
        Compression::None => Box::new(file.clone()),
        _ => {
            let inner = CountingFile::new(file.clone(), Arc::default(), stop);
            let packed = Box::new(ReportingReader { inner, count: Arc::clone(count) });
            decompress::open(packed, expanded(stamp.size, &LIMITS))?.0
        }
    };
    let (count, stop) = (Arc::clone(count), stop.clone());
    Ok(BlobReader { source, skip, left, file: Some((file, stamp)), count, stop })
}

impl BlobReader {
    /// Bytes that were not read yet.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    fn skip_start(&mut self) -> io::Result<()> {
        let mut block = vec![0; 64 * 1024];
        while self.skip > 0 {
            if self.stop.is_stopped() {
                return Err(io::Error::other(ArchiveError::Stopped));
            }
            let most = usize::try_from(self.skip).map_or(block.len(), |skip| skip.min(block.len()));
            match self.read_source(block.get_mut(..most).unwrap_or_default())? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => {
                    self.skip -= length as u64;
                    (self.count)(length as u64)?;
                }
            }
        }
        Ok(())
    }

    /// Reads from the source. A decompressor may hide that the stop signal ended it.
    fn read_source(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.source.read(out).map_err(|error| match self.stop.is_stopped() {
            true => io::Error::other(ArchiveError::Stopped),
            false => error,
        })
    }

    /// Whether the file is still what it was.
    fn check(&self) -> io::Result<()> {
        match &self.file {
            Some((file, stamp)) if Stamp::of_file(file)? != *stamp => {
                Err(io::Error::other(ArchiveError::Changed))
            }
            _ => Ok(()),
        }
    }
}

impl Read for BlobReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).map_or(out.len(), |left| left.min(out.len()));
        if most == 0 {
            return Ok(0);
        }
        if self.stop.is_stopped() {
            return Err(io::Error::other(ArchiveError::Stopped));
        }
        if self.skip > 0 {
            self.skip_start()?;
        }
        let length = self.read_source(out.get_mut(..most).unwrap_or_default())?;
        // Before the last bytes are supplied, and not for each block.
        if length as u64 == self.left || length == 0 {
            self.check()?;
        }
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= length as u64;
        Ok(length)
    }
}
