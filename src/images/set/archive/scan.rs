//! The one pass over an archive: which files and links it has, where, with which digests, and its
//! documents.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File as OpenFile;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::Dir;

use super::document::{Document, TEXT};
use super::error::{ArchiveError, Problem, of_reading, shortened};
use super::limits::Limits;
use super::paths;
use super::stamp::INDEX;
use super::types::{Digest, Fault, is_hex};
use crate::util::decompress::Compression;
use crate::util::sha256::Hasher;
use crate::util::tar::{self, Input, Kind};
use crate::util::untrusted;

/// The file of `docker save` that lists the images.
pub(super) const DOCKER: &str = "manifest.json";
/// The directory of blobs in an OCI layout.
pub(super) const BLOBS: &str = "blobs/sha256/";

/// Bytes that are read at a time, between two checks of the stop token.
const BLOCK: usize = 64 * 1024;
/// Links that lead to each other.
const LINKS: usize = 8;

/// What a pass found.
#[derive(Default)]
pub(super) struct Scan {
    /// By their names without `.` and empty parts. Directories are left out.
    pub(super) entries: BTreeMap<String, Entry>,
    /// Why the pass ended before the end of the archive.
    pub(super) cut: Option<Problem>,
    pub(super) faults: Vec<Fault>,
    /// Whether the file began like an archive.
    pub(super) begun: bool,
    memory: usize,
    names: usize,
    blobs: usize,
    references: usize,
}

pub(super) enum Entry {
    File(Box<File>),
    /// A link to another entry.
    Link(String),
    /// An entry that cannot be used.
    Other(Box<Problem>),
}

/// A regular file of an archive.
pub(super) struct File {
    /// In the tar archive.
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) digest: Digest,
    /// That its first bytes show.
    pub(super) compression: Compression,
    /// Its content if it is JSON.
    pub(super) document: Option<Box<Result<Document, Problem>>>,
    /// The same as text if it is an index or a manifest in a compressed archive: it is served from
    /// memory, because all that is before it would have to be decompressed each time.
    pub(super) text: Cell<Option<String>>,
}

impl File {
    /// What the content was parsed to, if it is JSON.
    pub(super) fn document(&self) -> Option<&Result<Document, Problem>> {
        self.document.as_deref()
    }
}

/// About the bytes of memory of a problem, whose texts are shortened.
const PROBLEM: usize = 300;

impl Entry {
    /// About the bytes of memory that it takes in the map of entries, with its key.
    fn memory_bytes(&mut self, name: &str) -> usize {
        // A node of the map is filled by half when names are inserted in their order.
        let slot = 2 * (size_of::<String>() + size_of::<Entry>()) + TEXT + name.len();
        slot + match self {
            Entry::File(file) => {
                let document = match file.document() {
                    Some(Ok(document)) => document.memory_bytes(),
                    Some(Err(_)) => size_of::<Document>() + PROBLEM,
                    None => 0,
                };
                size_of::<File>()
                    + TEXT
                    + file.digest.as_str().len()
                    + document
                    + file.text.get_mut().as_ref().map_or(0, String::len)
            }
            Entry::Link(target) => target.len(),
            Entry::Other(_) => size_of::<Problem>() + PROBLEM,
        }
    }
}

/// Is called before each block is read. Its error ends the pass.
pub(super) type BeforeBlock<'a> = dyn FnMut() -> Result<(), ArchiveError> + 'a;

impl Scan {
    /// The file of an entry. Links are followed inside the archive.
    pub(super) fn file(&self, name: &str) -> Result<&File, Problem> {
        let mut name = name;
        for _ in 0..LINKS {
            match self.entries.get(name) {
                Some(Entry::File(file)) => return Ok(file),
                Some(Entry::Link(target)) => name = target,
                Some(Entry::Other(problem)) => return Err(Problem::clone(problem)),
                None => return Err(self.cut.clone().unwrap_or(Problem::MissingBlob)),
            }
        }
        Err(Problem::NotAFile { kind: "a link without an end".to_owned() })
    }

    fn insert(&mut self, name: String, mut entry: Entry, limits: &Limits) -> Result<(), ArchiveError> {
        let too_large =
            |limit: usize, unit: &str| Err(ArchiveError::Whole(Problem::too_large(limit as u64, unit)));
        if let Entry::File(file) = &entry
            && let Some(Ok(document)) = file.document()
        {
            self.references += document.references();
        }
        self.memory += entry.memory_bytes(&name);
        self.names += name.len() + if let Entry::Link(target) = &entry { target.len() } else { 0 };
        self.blobs += usize::from(name.starts_with(BLOBS));
        self.entries.insert(name, entry);
        if self.entries.len() > limits.files {
            too_large(limits.files, "files")
        } else if self.names > limits.names {
            too_large(limits.names, "bytes of names of files")
        } else if self.blobs > limits.blobs {
            too_large(limits.blobs, "blobs")
        } else if self.references > limits.references {
            too_large(limits.references, "references to blobs")
        } else if self.memory > limits.memory {
            too_large(limits.memory, "bytes of names and documents in memory")
        } else {
            Ok(())
        }
    }
}

/// Reads a tar archive to its end. `texts`: those of indexes and manifests are kept.
pub(super) fn tar(
    input: &mut dyn Input,
    texts: bool,
    limits: &Limits,
    before_block: &mut BeforeBlock<'_>,
) -> Result<Scan, ArchiveError> {
    let mut scan = Scan::default();
    let mut tar = tar::Archive::new(input);
    let mut block = vec![0; BLOCK];
    for _ in 0..=limits.entries {
        before_block()?;
        let header = match tar.next_entry() {
            Ok(Some(header)) => header,
            Ok(None) => {
                scan.cut = (!tar.ended()).then_some(Problem::Truncated);
                return Ok(scan);
            }
            Err(error) => {
                scan.cut = Some(of_reading(error, tar.position())?);
                return Ok(scan);
            }
        };
        scan.begun = true;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (full_name, target) = (text(&header.name), text(&header.link));
        let name = paths::clean(&full_name);
        let content =
            content(&mut |block| tar.read(block), header.size, texts, &mut block, limits, before_block)?;
        let Some(name) = name else {
            if matters(&full_name) && scan.faults.len() < limits.faults {
                let name = shortened(&full_name);
                scan.faults.push(Fault { object: name.clone(), problem: Problem::UnsafeName { name } });
            }
            if let Err(error) = content {
                scan.cut = Some(of_reading(error, tar.position())?);
                return Ok(scan);
            }
            continue;
        };
        let linked = |path: Option<String>| match path {
            Some(path) => Entry::Link(path),
            None => Entry::Other(Box::new(Problem::UnsafeName { name: shortened(&target) })),
        };
        let not_a_file = |kind: &str| Entry::Other(Box::new(Problem::NotAFile { kind: kind.to_owned() }));
        let entry = match (content, header.kind) {
            (Err(error), _) => {
                let problem = of_reading(error, tar.position())?;
                scan.cut = Some(problem.clone());
                scan.insert(name, Entry::Other(Box::new(problem)), limits)?;
                return Ok(scan);
            }
            (Ok(_), Kind::Directory) => continue,
            (Ok(content), Kind::File) => Entry::File(Box::new(File { offset: header.offset, ..content })),
            (Ok(_), Kind::Symlink) => linked(paths::link_target(&name, &target)),
            (Ok(_), Kind::HardLink) => linked(paths::clean(&target)),
            (Ok(_), Kind::CharDevice | Kind::BlockDevice) => not_a_file("a device"),
            (Ok(_), Kind::Fifo) => not_a_file("a pipe"),
            (Ok(_), Kind::Other(kind)) => not_a_file(kind),
        };
        scan.insert(name, entry, limits)?;
    }
    Err(ArchiveError::Whole(Problem::too_large(limits.entries as u64, "entries")))
}

/// Whether an archive of images may have a file of this name, without the parts that lead out.
fn matters(name: &str) -> bool {
    let name: Vec<&str> = name.split('/').filter(|part| !matches!(*part, "" | "." | "..")).collect();
    matches!(name.as_slice(), ["blobs", ..] | [INDEX | DOCKER | "oci-layout"] | [.., "layer.tar"])
        || matches!(name.as_slice(), [.., "sha256", hex] if is_hex(hex))
}

/// Reads the index and all blobs of a layout directory.
/// `bytes` counts what is read.
pub(super) fn layout(
    path: &Path,
    index: OpenFile,
    bytes: &AtomicU64,
    limits: &Limits,
    before_block: &mut BeforeBlock<'_>,
) -> Result<Scan, ArchiveError> {
    let mut scan = Scan { begun: true, ..Scan::default() };
    let mut block = vec![0; BLOCK];
    add(&mut scan, INDEX.to_owned(), index, bytes, &mut block, limits, before_block)?;
    let directory = match blobs(path) {
        Ok(directory) => directory,
        // Each image then reports its missing blob.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(scan),
        Err(error) => return Err(error.into()),
    };
    for entry in Dir::read_from(&directory).map_err(io::Error::from)? {
        let entry = entry.map_err(io::Error::from)?;
        let Some(hex) = entry.file_name().to_str().ok().filter(|name| is_hex(name)) else { continue };
        let name = format!("{BLOBS}{hex}");
        match untrusted::open_at(directory.as_fd(), Path::new(hex)) {
            Ok(file) => add(&mut scan, name, file, bytes, &mut block, limits, before_block)?,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let problem = Problem::NotAFile { kind: "a link or a special file".to_owned() };
                scan.insert(name, Entry::Other(Box::new(problem)), limits)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(scan)
}

/// The path of the directory of the blobs of a layout.
pub fn blobs_path(layout: &Path) -> PathBuf {
    layout.join(BLOBS.trim_end_matches('/'))
}

/// Opens that directory. Links in its path below the layout, and the layout as a link, are refused.
///
/// # Errors
/// When it cannot be opened or is not a directory.
pub fn blobs(layout: &Path) -> io::Result<OwnedFd> {
    untrusted::directory(&blobs_path(layout), 3)
}

fn add(
    scan: &mut Scan,
    name: String,
    mut file: OpenFile,
    bytes: &AtomicU64,
    block: &mut [u8],
    limits: &Limits,
    before_block: &mut BeforeBlock<'_>,
) -> Result<(), ArchiveError> {
    let size = file.metadata()?.len();
    // A file that grows meanwhile is read up to the size that it had.
    let mut left = size;
    let mut read = |block: &mut [u8]| {
        let most = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
        let length = file.read(block.get_mut(..most).unwrap_or_default())?;
        left -= length as u64;
        bytes.fetch_add(length as u64, Ordering::Relaxed);
        Ok(length)
    };
    let content = content(&mut read, size, false, block, limits, before_block)??;
    scan.insert(name, Entry::File(Box::new(content)), limits)
}

/// Reads the content of one file. The inner error is that of `read`.
fn content(
    read: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    size: u64,
    texts: bool,
    block: &mut [u8],
    limits: &Limits,
    before_block: &mut BeforeBlock<'_>,
) -> Result<io::Result<File>, ArchiveError> {
    let mut hasher = Hasher::default();
    let (mut done, mut compression, mut text) = (0, Compression::None, None);
    loop {
        before_block()?;
        let length = match read(block) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) => return Ok(Err(error)),
        };
        let part = block.get(..length).unwrap_or_default();
        hasher.update(part);
        if done == 0 {
            compression = Compression::detect(part);
            let room = if size > limits.document { 0 } else { size as usize };
            text = matches!(part.trim_ascii_start().first(), Some(b'{' | b'['))
                .then(|| Vec::with_capacity(room));
        }
        done += length as u64;
        if let Some(text) = text.as_mut().filter(|_| size <= limits.document) {
            text.extend_from_slice(part);
        }
    }
    let parsed = text.map(|text| {
        if size > limits.document {
            return Err(Problem::too_large(limits.document, "bytes of JSON"));
        }
        Document::parse(text, texts, limits)
    });
    let (document, text) = match parsed {
        Some(Ok((document, text))) => (Some(Ok(document)), text),
        Some(Err(problem)) => (Some(Err(problem)), None),
        None => (None, None),
    };
    let (digest, document) = (Digest::of_hex(&hasher.finish()), document.map(Box::new));
    Ok(Ok(File { offset: 0, size: done, digest, compression, document, text: Cell::new(text) }))
}
