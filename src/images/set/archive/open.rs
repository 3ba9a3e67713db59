//! Opens archives, and reads them as a whole or only their names.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::assemble::assemble;
use super::document::{Document, normalized};
use super::error::{ArchiveError, Problem, of_reading};
use super::limits::{LIMITS, Limits};
use super::paths;
use super::platform::Platform;
use super::scan::{self, DOCKER, Scan};
use super::stamp::{INDEX, Stamp, is_layout, stamp};
use super::types::{Archive, ArchiveFormat};
use crate::util::decompress::{self, Compression};
use crate::util::stop::StopToken;
use crate::util::tar::{self, Kind};
use crate::util::untrusted;

/// Reads an archive once, from its first to its last byte, and verifies the digest of every blob.
/// `progress` is called with the number of bytes read from the disk so far, at least once per 64 KiB
/// of decompressed data.
///
/// An image is offered if all blobs that `platform` needs are there and intact.
///
/// # Errors
/// When the archive offers nothing: see [`ArchiveError`]. Damage of a part is a fault of the archive.
pub fn read(
    path: &Path,
    platform: &Platform,
    stop: &StopToken,
    progress: &mut dyn FnMut(u64),
) -> Result<Archive, ArchiveError> {
    read_within(path, platform, &LIMITS, stop, progress)
}

/// Like [`read`], with other limits.
pub(super) fn read_within(
    path: &Path,
    platform: &Platform,
    limits: &Limits,
    stop: &StopToken,
    progress: &mut dyn FnMut(u64),
) -> Result<Archive, ArchiveError> {
    let first = stamp(path)?;
    let layout = is_layout(path)?;
    let file = Arc::new(untrusted::open(&if layout { path.join(INDEX) } else { path.to_owned() })?);
    if Stamp::of_file(&file)? != first {
        return Err(ArchiveError::Changed);
    }
    let bytes = Arc::new(AtomicU64::new(0));
    let mut before_block = || {
        progress(bytes.load(Ordering::Relaxed));
        if stop.is_stopped() { Err(ArchiveError::Stopped) } else { Ok(()) }
    };
    let scanned = if layout {
        let counter = bytes.clone();
        scan::layout(path, file.try_clone()?, &counter, limits, &mut before_block)
            .map(|scan| (scan, Compression::None))
    } else {
        let source = Box::new(CountingFile::new(file.clone(), bytes.clone(), stop));
        scan_tar(source, first.size, limits, &mut before_block)
    };
    // Data of a file that changed meanwhile may look damaged; that is not what is wrong.
    let same = Stamp::of_file(&file)? == first && stamp(path).is_ok_and(|last| last == first);
    let (scan, compression) = match scanned {
        // Also as an error of a decompressor.
        Err(_) if stop.is_stopped() => return Err(ArchiveError::Stopped),
        _ if !same => return Err(ArchiveError::Changed),
        scanned => scanned?,
    };
    progress(bytes.load(Ordering::Relaxed));
    let (images, blobs, faults) = assemble(&scan, layout, platform, limits)?;
    let form = match scan.entries.contains_key(INDEX) {
        _ if layout => ArchiveFormat::OciLayout,
        true => ArchiveFormat::OciTar,
        false => ArchiveFormat::DockerTar,
    };
    Ok(Archive { form, compression, stamp: first, images, blobs, faults })
}

/// Reads a tar archive of `size` bytes before decompression.
pub(super) fn scan_tar(
    source: Box<dyn Read + Send>,
    size: u64,
    limits: &Limits,
    before_block: &mut scan::BeforeBlock<'_>,
) -> Result<(Scan, Compression), ArchiveError> {
    let (mut reader, compression) = decompress::open(source, expanded(size, limits))?;
    let scan = scan::tar(&mut reader, compression != Compression::None, limits, before_block)?;
    if !scan.begun {
        return Err(match scan.cut {
            Some(problem) if compression != Compression::None => ArchiveError::Whole(problem),
            _ => ArchiveError::NotAnArchive,
        });
    }
    Ok((scan, compression))
}

/// The limit of decompressed bytes for a compressed archive of this size.
pub(super) fn expanded(size: u64, limits: &Limits) -> u64 {
    limits.expanded.max(size.saturating_mul(limits.ratio))
}

/// A file that counts the bytes read from it. Reading fails after the stop signal: a decompressor may
/// read far before it returns a byte.
pub(super) struct CountingFile {
    file: Arc<File>,
    bytes: Arc<AtomicU64>,
    stop: StopToken,
}

impl CountingFile {
    pub(super) fn new(file: Arc<File>, bytes: Arc<AtomicU64>, stop: &StopToken) -> CountingFile {
        CountingFile { file, bytes, stop: stop.clone() }
    }
}

impl Read for CountingFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.stop.is_stopped() {
            return Err(io::Error::other(ArchiveError::Stopped));
        }
        let length = self.file.read(out)?;
        self.bytes.fetch_add(length as u64, Ordering::Relaxed);
        Ok(length)
    }
}

/// Whether a file can be an archive of images, by what costs little: the headers of a plain tar
/// archive, and the first header of a compressed one. For a file that is to be copied to a slow disk.
///
/// # Errors
/// Those of [`read`]. Success does not mean that the archive is intact.
pub fn check(path: &Path) -> Result<(), ArchiveError> {
    let mut file = BufReader::with_capacity(512, untrusted::open(path)?);
    let size = file.get_ref().metadata()?.len();
    let compression = Compression::detect(io::BufRead::fill_buf(&mut file)?);
    if compression != Compression::None {
        let (mut reader, _) = decompress::open(Box::new(file), expanded(size, &LIMITS))?;
        let mut tar = tar::Archive::new(&mut reader);
        return match tar.next_entry() {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(ArchiveError::NotAnArchive),
            Err(error) => Err(ArchiveError::Whole(of_reading(error, tar.position())?)),
        };
    }
    let mut tar = tar::Archive::new(&mut file);
    let mut begun = false;
    for _ in 0..=LIMITS.entries {
        let entry = match tar.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) if begun && !tar.ended() => return Err(ArchiveError::Whole(Problem::Truncated)),
            Ok(None) => return Err(ArchiveError::NotAnArchive),
            Err(error) => {
                let problem = of_reading(error, tar.position())?;
                return Err(if begun { ArchiveError::Whole(problem) } else { ArchiveError::NotAnArchive });
            }
        };
        begun = true;
        let name = paths::clean(&String::from_utf8_lossy(&entry.name));
        if matches!(name.as_deref(), Some(INDEX | DOCKER)) {
            return Ok(());
        }
    }
    Err(ArchiveError::Whole(Problem::too_large(LIMITS.entries as u64, "entries")))
}

/// The names of the images of an archive, normalized, without reading blobs: only the headers of a
/// tar archive and its lists of images are read. Nothing is verified, so that images may be missing
/// when the archive is read as a whole. `None`: the archive is compressed or has a list that exceeds a
/// limit, and has to be read.
///
/// # Errors
/// Those of [`read`].
pub fn names(path: &Path, stop: &StopToken) -> Result<Option<Vec<String>>, ArchiveError> {
    let limits = &LIMITS;
    if is_layout(path)? {
        let file = untrusted::open(&path.join(INDEX))?;
        let size = file.metadata()?.len();
        return Ok(listed(&mut { file }, size, limits));
    }
    let mut file = BufReader::with_capacity(512, untrusted::open(path)?);
    if Compression::detect(io::BufRead::fill_buf(&mut file)?) != Compression::None {
        return Ok(None);
    }
    let mut tar = tar::Archive::new(&mut file);
    // Of the last entry of each name, as in the whole archive.
    let (mut index, mut docker, mut begun) = (Some(Vec::new()), Some(Vec::new()), false);
    for _ in 0..limits.entries {
        if stop.is_stopped() {
            return Err(ArchiveError::Stopped);
        }
        // The rest of a truncated or damaged archive has no names.
        let Ok(Some(entry)) = tar.next_entry() else { break };
        begun = true;
        let path = paths::clean(&String::from_utf8_lossy(&entry.name));
        let list = match path.as_deref() {
            Some(INDEX) => &mut index,
            Some(DOCKER) => &mut docker,
            _ => continue,
        };
        match entry.kind {
            Kind::File => *list = listed(&mut tar, entry.size, limits),
            Kind::Directory => {}
            _ => *list = Some(Vec::new()),
        }
    }
    if !begun {
        return Err(ArchiveError::NotAnArchive);
    }
    let (Some(mut found), Some(more)) = (index, docker) else { return Ok(None) };
    found.extend(more);
    found.sort();
    found.dedup();
    Ok(Some(found))
}

/// The names of a list of images; none if it is invalid. `None`: it exceeds a limit.
fn listed(file: &mut dyn Read, size: u64, limits: &Limits) -> Option<Vec<String>> {
    let mut bytes = Vec::new();
    if size > limits.document || file.take(size).read_to_end(&mut bytes).is_err() {
        return Some(Vec::new());
    }
    let document = match Document::parse(bytes, false, limits) {
        Ok((document, _)) if document.references() <= limits.references => document,
        Ok(_) | Err(Problem::TooLarge { .. }) => return None,
        Err(_) => return Some(Vec::new()),
    };
    let names: Vec<Result<String, Problem>> = match document {
        Document::Index { manifests, .. } => manifests.iter().map(|manifest| manifest.name()).collect(),
        Document::Docker(images) => {
            images.iter().flat_map(|image| &image.names).map(|name| normalized(name)).collect()
        }
        _ => Vec::new(),
    };
    Some(names.into_iter().flatten().collect())
}
