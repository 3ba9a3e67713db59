//! Compares the directory of an unpacked layer with the tar archive of the layer, and replaces what
//! differs.
//!
//! An archive says what the directory of its own layer contains, whatever other layers are above or
//! below it: a file that a later layer deletes stays in the directory of the earlier one. Deleted
//! names are device nodes 0:0, and directories that hide those of lower layers have an extended
//! attribute (overlayfs, "whiteouts and opaque directories").
//!
//! A damaged file is never written to. A new file is made beside it, synced, and renamed over it. So
//! containers that run keep the file that they have open, and a loss of power leaves the old file
//! or the new one. The hard links of a replaced file are made again.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{self, AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::usage::Meter;
use crate::util::sha256::Hasher;
use crate::util::stop::StopToken;
use crate::util::tar::{Archive, Entry, Input, Kind};
use crate::util::{backoff, disk_writes, tree, untrusted};

/// The most findings of an image that are kept. More are only counted.
pub(super) const MAX_FINDINGS: usize = 100;
/// The most entries of a layer that are replaced at once: about 5 MB of memory for each comparison, of which
/// up to three are kept.
const MAX_REPLACED: usize = 200_000;
/// Prefixes of names with a meaning in layers (OCI image specification, "Whiteouts").
const WHITEOUT: &[u8] = b".wh.";
const SPECIAL: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const OPAQUE_ATTRIBUTES: [&str; 2] = ["trusted.overlay.opaque", "user.overlay.opaque"];
/// Extended attributes that the kernel and overlayfs give a meaning: no archive may set them.
const RESERVED_ATTRIBUTES: [&[u8]; 2] = [b"trusted.", b"user.overlay."];
const BUFFER: usize = 64 * 1024;
const OPEN_DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// What to compare, and what to do about a difference.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerCheckOptions<'a> {
    /// Whether the contents of files are compared, too.
    pub contents: bool,
    /// What an earlier comparison with the same archive has found: that is replaced.
    pub mend: Option<&'a Findings>,
}

/// What is damaged in an image.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// The first ones: paths in the image, escaped, and what is wrong with each.
    pub first: BTreeMap<String, String>,
    /// The number of all.
    pub total: u64,
    /// The entries of the archive that differ, by a hash of their names: an archive may have a name many
    /// times, and the last entry counts.
    last: HashMap<u64, u64>,
    hasher: RandomState,
}

impl Findings {
    pub(super) fn add(&mut self, path: String, what: String) {
        self.total += 1;
        if self.first.len() < MAX_FINDINGS {
            self.first.insert(path, what);
        }
    }

    /// Notes whether an entry of the archive, by its number, differs from what is there.
    fn note(&mut self, path: &[u8], number: u64, difference: Option<&str>) {
        let hash = self.hasher.hash_one(path);
        let shown = shown(path);
        let Some(what) = difference else {
            if self.last.remove(&hash).is_some() {
                self.first.remove(&shown);
                self.total -= 1;
            }
            return;
        };
        if self.last.len() >= MAX_REPLACED && !self.last.contains_key(&hash) {
            self.total += 1;
            return;
        }
        if self.last.insert(hash, number).is_none() {
            self.total += 1;
        }
        if self.first.len() < MAX_FINDINGS || self.first.contains_key(&shown) {
            self.first.insert(shown, what.to_owned());
        }
    }

    /// Whether this entry is to be replaced. A hard link to a replaced file is made again, although it
    /// was the same file as before.
    fn has(&self, path: &[u8], number: u64, kind: Kind) -> bool {
        kind == Kind::HardLink || self.last.get(&self.hasher.hash_one(path)) == Some(&number)
    }
}

/// How the work on a layer ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// `sha256:` and the digest of the archive, which is to be compared with the image's.
    pub digest: String,
    /// Entries that were replaced.
    pub mended: u64,
    /// The first entry that could not be replaced, and why.
    pub failure: Option<String>,
}

struct Hashing<'a> {
    inner: &'a mut dyn Read,
    hasher: Hasher,
    stop: &'a StopToken,
}

impl Read for Hashing<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.is_stopped() {
            return Err(io::Error::other("the agent stops"));
        }
        let count = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}

impl Input for Hashing<'_> {}

/// Reads `source` to its end, and returns `sha256:` and the digest.
///
/// # Errors
/// When it cannot be read, or `stop` was closed.
pub(super) fn digest(source: &mut dyn Read, stop: &StopToken) -> io::Result<String> {
    let mut source = BufReader::with_capacity(BUFFER, source);
    let mut source = Hashing { inner: &mut source, hasher: Hasher::default(), stop };
    io::copy(&mut source, &mut io::sink())?;
    Ok(format!("sha256:{}", source.hasher.finish()))
}

/// Compares the directory `root` with the archive. With `options.mend` the digest of the archive must have
/// been verified by an earlier call. `found` gets what differed when it was compared. `meter` counts what is
/// read and written in the directory; what is read of the archive is counted by its reader.
///
/// # Errors
/// When the archive cannot be read to its end, the limit of `meter` is reached, or `stop` was closed.
pub(super) fn compare(
    root: OwnedFd,
    mut archive: Box<dyn Read + Send>,
    options: LayerCheckOptions<'_>,
    found: &mut Findings,
    meter: &Meter,
    stop: &StopToken,
) -> io::Result<Outcome> {
    let mut source = Hashing { inner: &mut archive, hasher: Hasher::default(), stop };
    let mut archive = Archive::new(&mut source);
    let (buffers, outcome) = (vec![0; 2 * BUFFER], Outcome::default());
    let mut layer = Layer { root, options, found, meter, last: None, number: 0, buffers, outcome };
    while let Some(entry) = archive.next_entry()? {
        if let Kind::Other(what) = entry.kind {
            let text = format!("{what} is not supported");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        layer.entry(&entry, &mut archive)?;
        layer.number += 1;
    }
    io::copy(&mut source, &mut io::sink())?;
    let mut outcome = layer.outcome;
    outcome.digest = format!("sha256:{}", source.hasher.finish());
    if outcome.mended > 0
        && let Err(error) = fs::syncfs(&layer.root)
    {
        outcome.failure.get_or_insert(format!("cannot write to the disk: {error}"));
    }
    Ok(outcome)
}

struct Layer<'a> {
    root: OwnedFd,
    options: LayerCheckOptions<'a>,
    found: &'a mut Findings,
    meter: &'a Meter,
    /// The number of the entry in the archive.
    number: u64,
    /// The directory of the last entry, which is usually that of the next one.
    last: Option<(Vec<u8>, OwnedFd)>,
    buffers: Vec<u8>,
    outcome: Outcome,
}

/// Why an entry differs, and how much of its content was read.
struct Difference {
    what: String,
    /// The disk has the same bytes up to here.
    same: u64,
    /// The file with these bytes.
    file: Option<File>,
    /// Bytes of the archive that follow these, and were already read.
    pending: Vec<u8>,
}

impl From<String> for Difference {
    fn from(what: String) -> Self {
        Difference { what, same: 0, file: None, pending: Vec::new() }
    }
}

impl From<&str> for Difference {
    fn from(what: &str) -> Self {
        what.to_owned().into()
    }
}

/// An error of the disk is a difference, too.
impl From<Errno> for Difference {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOENT | Errno::NOTDIR => "is missing".into(),
            other => format!("cannot be read: {}", io::Error::from(other)).into(),
        }
    }
}

type Checked = Result<(), Difference>;

impl Layer<'_> {
    fn entry(&mut self, entry: &Entry, archive: &mut Archive<'_>) -> io::Result<()> {
        let Some(path) = normal(&entry.name) else { return Ok(()) };
        let (parent, name) = split(&path);
        if name.is_empty() || parent.split(|byte| *byte == b'/').any(|part| part.starts_with(WHITEOUT)) {
            return Ok(());
        }
        if self.options.mend.is_some_and(|before| !before.has(&path, self.number, entry.kind)) {
            return Ok(());
        }
        self.meter.find()?;
        let result = match name.strip_prefix(WHITEOUT) {
            Some(_) if name == OPAQUE => self.opaque(parent),
            Some(_) if name.starts_with(SPECIAL) => return Ok(()),
            Some(hidden) => self.whiteout(parent, hidden),
            None => self.check(parent, name, entry, archive)?,
        };
        let difference = result.err();
        self.found.note(&path, self.number, difference.as_ref().map(|difference| difference.what.as_str()));
        let Some(difference) = difference else { return Ok(()) };
        if self.options.mend.is_none() {
            return Ok(());
        }
        // A new file is made at each time, also for a name that cannot be replaced.
        let content = if entry.kind == Kind::File { entry.size } else { entry.link.len() as u64 };
        let attributes = entry.xattrs.iter().map(|(name, value)| (name.len() + value.len()) as u64);
        self.meter.write(content.saturating_add(attributes.sum()))?;
        let mended = match name.strip_prefix(WHITEOUT) {
            Some(_) if name == OPAQUE => self.make_parent(parent).and_then(|dir| {
                Ok(fs::fsetxattr(&dir, OPAQUE_ATTRIBUTES[0], b"y", fs::XattrFlags::empty())?)
            }),
            Some(hidden) => self.make_parent(parent).and_then(|dir| {
                let (kind, mode) = (FileType::CharacterDevice, Mode::empty());
                Ok(fs::mknodat(&dir, hidden, kind, mode, 0)?)
            }),
            None => self.replace(parent, name, entry, difference, archive),
        };
        match mended {
            Ok(()) => self.outcome.mended += 1,
            // The archive itself failed: nothing that follows can be trusted.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(error),
            Err(error) => {
                let shown = shown(&path);
                self.outcome.failure.get_or_insert(format!("{shown} cannot be replaced: {error}"));
            }
        }
        Ok(())
    }

    /// Opens a directory of the layer. Links lead to other places of the layer only, as they did
    /// when it was unpacked.
    fn parent(&mut self, path: &[u8]) -> Result<OwnedFd, Errno> {
        if let Some((last, dir)) = &self.last
            && last == path
        {
            return rustix::io::fcntl_dupfd_cloexec(dir, 0);
        }
        let below = if path.is_empty() { &b"."[..] } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        let dir = match fs::openat2(&self.root, below, OPEN_DIRECTORY, Mode::empty(), resolve) {
            // Linux before 5.6 has no `openat2`: links in the path are not followed.
            Err(Errno::NOSYS) => {
                let mut dir = fs::openat(&self.root, ".", OPEN_DIRECTORY, Mode::empty())?;
                for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
                    dir = fs::openat(&dir, part, OPEN_DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
                }
                dir
            }
            result => result?,
        };
        let copy = rustix::io::fcntl_dupfd_cloexec(&dir, 0)?;
        self.last = Some((path.to_vec(), copy));
        Ok(dir)
    }

    /// Opens a directory of the layer, and makes missing ones.
    fn make_parent(&mut self, path: &[u8]) -> io::Result<OwnedFd> {
        match self.parent(path) {
            Err(Errno::NOENT) => {
                let mut dir = fs::openat(&self.root, ".", OPEN_DIRECTORY, Mode::empty())?;
                for part in path.split(|byte| *byte == b'/') {
                    let made;
                    (dir, made) = tree::make_at(dir.as_fd(), &std::ffi::CString::new(part)?, 0o755)?;
                    if made {
                        self.meter.write(0)?;
                    }
                }
                Ok(dir)
            }
            result => Ok(result?),
        }
    }

    fn whiteout(&mut self, parent: &[u8], hidden: &[u8]) -> Checked {
        let dir = self.parent(parent)?;
        // The same layer may have a new entry of this name.
        match fs::statat(&dir, hidden, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(()),
            Err(Errno::NOENT) => Err("is missing, so a deleted file is visible again".into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn opaque(&mut self, parent: &[u8]) -> Checked {
        let dir = self.parent(parent)?;
        let is_set =
            |name: &&str| fs::fgetxattr(&dir, *name, &mut [0u8; 4][..]).is_ok_and(|length| length > 0);
        if OPAQUE_ATTRIBUTES.iter().any(is_set) {
            return Ok(());
        }
        Err("is missing, so deleted files are visible again".into())
    }

    /// Compares one entry. The outer error is one of the archive.
    fn check(
        &mut self,
        parent: &[u8],
        name: &[u8],
        entry: &Entry,
        archive: &mut Archive<'_>,
    ) -> io::Result<Checked> {
        let dir = match self.parent(parent) {
            Ok(dir) => dir,
            Err(errno) => return Ok(Err(errno.into())),
        };
        let stat = match fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(errno) => return Ok(Err(errno.into())),
        };
        if entry.kind == Kind::File && is(&stat, FileType::RegularFile) {
            return self.check_file(&dir, name, entry, &stat, archive);
        }
        Ok(self.check_other(&dir, name, entry, &stat))
    }

    fn check_file(
        &mut self,
        dir: &OwnedFd,
        name: &[u8],
        entry: &Entry,
        stat: &Stat,
        archive: &mut Archive<'_>,
    ) -> io::Result<Checked> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size != entry.size {
            return Ok(Err(format!("has {size} bytes instead of {}", entry.size).into()));
        }
        if !self.options.contents {
            return Ok(Ok(()));
        }
        let file = match untrusted::open_at(dir.as_fd(), Path::new(std::ffi::OsStr::from_bytes(name))) {
            Ok(file) => file,
            Err(error) => return Ok(Err(format!("cannot be opened: {error}").into())),
        };
        let (wanted, present) = self.buffers.split_at_mut(BUFFER);
        let mut same = 0;
        loop {
            let count = archive.read(wanted)?;
            self.meter.read(count as u64)?;
            let (wanted, present) = (&wanted[..count], &mut present[..count]);
            if count == 0 {
                return Ok(Ok(()));
            }
            let what = match file.read_exact_at(present, same) {
                Ok(()) if wanted == present => {
                    same += count as u64;
                    continue;
                }
                Ok(()) => {
                    let index = wanted.iter().zip(present.iter()).position(|(a, b)| a != b).unwrap_or(0);
                    format!("has other content from byte {} on", same + index as u64)
                }
                Err(error) => format!("cannot be read: {error}"),
            };
            return Ok(Err(Difference { what, same, file: Some(file), pending: wanted.to_vec() }));
        }
    }

    fn check_other(&mut self, dir: &OwnedFd, name: &[u8], entry: &Entry, stat: &Stat) -> Checked {
        let wanted = match entry.kind {
            Kind::HardLink => return self.check_hard_link(entry, stat),
            Kind::File => (FileType::RegularFile, "a regular file"),
            Kind::Symlink => (FileType::Symlink, "a link"),
            Kind::Directory => (FileType::Directory, "a directory"),
            Kind::CharDevice => (FileType::CharacterDevice, "a device"),
            Kind::BlockDevice => (FileType::BlockDevice, "a device"),
            Kind::Fifo => (FileType::Fifo, "a pipe"),
            Kind::Other(what) => (FileType::Unknown, what),
        };
        if !is(stat, wanted.0) {
            return Err(format!("is not {}", wanted.1).into());
        }
        match entry.kind {
            Kind::Symlink => {
                let target = fs::readlinkat(dir, name, Vec::new())?;
                if target.as_bytes() == entry.link { Ok(()) } else { Err("has another target".into()) }
            }
            Kind::CharDevice | Kind::BlockDevice => {
                let wanted = fs::makedev(entry.device.0, entry.device.1);
                if stat.st_rdev == wanted { Ok(()) } else { Err("is another device".into()) }
            }
            _ => Ok(()),
        }
    }

    /// A hard link must be the same file as its target, or, if the storage was copied, one of the
    /// same size.
    fn check_hard_link(&mut self, entry: &Entry, stat: &Stat) -> Checked {
        let target = self.target(entry)?;
        let same = (stat.st_dev, stat.st_ino) == (target.st_dev, target.st_ino);
        if same
            || (self.options.mend.is_none()
                && stat.st_mode == target.st_mode
                && stat.st_size == target.st_size)
        {
            return Ok(());
        }
        Err(format!("is not a link to {}", shown(&entry.link)).into())
    }

    fn target(&mut self, entry: &Entry) -> Result<Stat, Errno> {
        let path = normal(&entry.link).ok_or(Errno::INVAL)?;
        let (parent, name) = split(&path);
        let dir = self.parent(parent)?;
        fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Puts an entry in the place of what is there.
    fn replace(
        &mut self,
        parent: &[u8],
        name: &[u8],
        entry: &Entry,
        difference: Difference,
        archive: &mut Archive<'_>,
    ) -> io::Result<()> {
        let dir = self.make_parent(parent)?;
        let new = format!(".coracle-mend-{:016x}", backoff::random_u64());
        let made = self.make(&dir, &new, entry, difference, archive).and_then(|()| {
            let old = fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW);
            if old.is_ok_and(|old| is(&old, FileType::Directory)) {
                let name = std::ffi::CString::new(name)?;
                tree::remove_at(dir.as_fd(), &name, &StopToken::never())
                    .map_err(|left| io::Error::other(format!("{left:?}")))?;
            } else if entry.kind == Kind::Directory && old.is_ok() {
                fs::unlinkat(&dir, name, AtFlags::empty())?;
            }
            fs::renameat(&dir, new.as_str(), &dir, name)?;
            Ok(())
        });
        if made.is_err() {
            let flags = if entry.kind == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let _ = fs::unlinkat(&dir, new.as_str(), flags);
        }
        self.last = None;
        made
    }

    fn make(
        &mut self,
        dir: &OwnedFd,
        new: &str,
        entry: &Entry,
        difference: Difference,
        archive: &mut Archive<'_>,
    ) -> io::Result<()> {
        let device = fs::makedev(entry.device.0, entry.device.1);
        let node = |kind, device| fs::mknodat(dir, new, kind, Mode::empty(), device);
        match entry.kind {
            Kind::File => {
                let mut file = untrusted::create_at(dir.as_fd(), Path::new(new), 0o600)?;
                if let Some(before) = difference.file {
                    self.meter.read(difference.same)?;
                    io::copy(&mut before.take(difference.same), &mut file)?;
                    file.write_all(&difference.pending)?;
                }
                io::copy(archive, &mut file)?;
                if file.metadata()?.len() != entry.size {
                    return Err(io::Error::other("its intact part cannot be read"));
                }
                apply_attributes(&file, entry)?;
                disk_writes::file(entry.size);
                file.sync_all()?;
                disk_writes::sync();
                return Ok(());
            }
            Kind::HardLink => {
                let path = normal(&entry.link).ok_or(Errno::INVAL)?;
                let (parent, name) = split(&path);
                let target = self.parent(parent)?;
                return Ok(fs::linkat(&target, name, dir, new, AtFlags::empty())?);
            }
            Kind::Symlink => disk_writes::created(fs::symlinkat(&entry.link[..], dir, new))?,
            Kind::Directory => {
                disk_writes::created(fs::mkdirat(dir, new, Mode::RWXU))?;
                return apply_attributes(&tree::open_at(dir.as_fd(), &std::ffi::CString::new(new)?)?, entry);
            }
            Kind::CharDevice => node(FileType::CharacterDevice, device)?,
            Kind::BlockDevice => node(FileType::BlockDevice, device)?,
            Kind::Fifo => node(FileType::Fifo, 0)?,
            Kind::Other(what) => return Err(io::Error::other(format!("{what} is not supported"))),
        }
        let owner = (Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)));
        fs::chownat(dir, new, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
        if entry.kind != Kind::Symlink {
            fs::chmodat(dir, new, Mode::from_raw_mode(entry.mode), AtFlags::empty())?;
        }
        fs::utimensat(dir, new, &times(entry), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }
}

/// Gives a new file or directory its owner, mode, attributes and time. The owner is first, because
/// a change of it clears set-user-ID and capabilities.
fn apply_attributes(file: &impl AsFd, entry: &Entry) -> io::Result<()> {
    fs::fchown(file, Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)))?;
    fs::fchmod(file, Mode::from_raw_mode(entry.mode))?;
    let is_reserved = |name: &[u8]| RESERVED_ATTRIBUTES.iter().any(|prefix| name.starts_with(prefix));
    for (name, value) in entry.xattrs.iter().filter(|(name, _)| !is_reserved(name)) {
        match fs::fsetxattr(file, &name[..], value, fs::XattrFlags::empty()) {
            // As when a layer is unpacked: the file system does not have such attributes.
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(fs::futimens(file, &times(entry))?)
}

fn times(entry: &Entry) -> Timestamps {
    let time = Timespec { tv_sec: entry.mtime, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

fn is(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}

/// The parts of a name, joined by slashes. `None`: it leads out of the layer.
fn normal(name: &[u8]) -> Option<Vec<u8>> {
    let parts = name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    let parts: Vec<&[u8]> = parts.collect();
    (!parts.contains(&&b".."[..])).then(|| parts.join(&b'/'))
}

/// The directory and the last part of a path.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(index) => (&path[..index], &path[index + 1..]),
        None => (b"", path),
    }
}

fn shown(path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    let path: String = path.chars().take(300).collect();
    format!("/{}", path.trim_start_matches('/').escape_debug())
}

#[cfg(test)]
mod tests {
    use super::super::usage::{Metered, Usage};
    use super::*;
    use crate::util::tar::tests::{end, entry};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;
    use std::sync::Arc;

    fn archive() -> Vec<u8> {
        [
            entry("./", b'5', "", b""),
            entry("bin/", b'5', "", b""),
            entry("bin/tool", b'0', "", &[b'x'; 200_000]),
            entry("bin/other", b'1', "bin/tool", b""),
            entry("sbin", b'2', "bin", b""),
            // Below a link, as in images with a merged /usr.
            entry("sbin/late", b'0', "", b"late"),
            entry("etc/empty", b'0', "", b""),
            entry("twice", b'0', "", b"first"),
            entry("twice", b'0', "", b"second"),
            entry("../outside", b'0', "", b""),
            entry(".wh..wh.plnk/x", b'0', "", b""),
            end(),
        ]
        .concat()
    }

    /// The directory of the layer, as a runtime would unpack it.
    fn unpacked() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("fs");
        std::fs::create_dir(&root).unwrap();
        let outcome = run(&root, true, true).1;
        assert_eq!(outcome.failure, None);
        (dir, root)
    }

    fn run(root: &Path, contents: bool, mend: bool) -> (Vec<String>, Outcome) {
        let (found, outcome) = run_on(root, &archive(), contents, mend);
        (found.first.into_iter().map(|(path, what)| format!("{path} {what}")).collect(), outcome)
    }

    fn run_on(root: &Path, archive: &[u8], contents: bool, mend: bool) -> (Findings, Outcome) {
        let (found, outcome) = pass(root, archive, LayerCheckOptions { contents, mend: None });
        if !mend {
            return (found, outcome);
        }
        let (_, outcome) = pass(root, archive, LayerCheckOptions { contents, mend: Some(&found) });
        (found, outcome)
    }

    fn pass(root: &Path, archive: &[u8], options: LayerCheckOptions<'_>) -> (Findings, Outcome) {
        let (mut found, meter) = (Findings::default(), Meter::unlimited());
        let bytes = io::Cursor::new(archive.to_vec());
        let root = tree::open(root).unwrap();
        let outcome =
            compare(root, Box::new(bytes), options, &mut found, &meter, &StopToken::never()).unwrap();
        (found, outcome)
    }

    #[test]
    fn unpacked_layer_has_no_findings() {
        let (_dir, root) = unpacked();
        let (found, outcome) = run(&root, true, false);
        assert_eq!((found, outcome.mended), (Vec::<String>::new(), 0));
        assert_eq!(outcome.digest, format!("sha256:{}", crate::util::sha256::sha256_hex(&archive())));
        assert_eq!(std::fs::read(root.join("twice")).unwrap(), b"second");
        assert_eq!(std::fs::read(root.join("bin/late")).unwrap(), b"late");
        assert!(!root.join("../outside").exists());
        let tool = std::fs::metadata(root.join("bin/tool")).unwrap();
        assert_eq!((tool.permissions().mode() & 0o7777, tool.mtime(), tool.nlink()), (0o754, 15, 2));
    }

    #[test]
    fn each_damage_is_found_and_mended() {
        type Damage = fn(&Path);
        let cases: [(&str, Damage); 9] = [
            ("/bin/tool has 0 bytes instead of 200000", |root| {
                File::options().write(true).open(root.join("bin/tool")).unwrap().set_len(0).unwrap();
            }),
            ("/bin/tool has other content from byte 70000 on", |root| {
                let file = File::options().write(true).open(root.join("bin/tool")).unwrap();
                file.write_all_at(&[0; 4096], 70_000).unwrap();
            }),
            ("/bin/tool is missing", |root| std::fs::remove_file(root.join("bin/tool")).unwrap()),
            ("/bin/other is missing", |root| std::fs::remove_file(root.join("bin/other")).unwrap()),
            ("/bin/other is not a link to /bin/tool", |root| {
                std::fs::remove_file(root.join("bin/other")).unwrap();
                std::fs::write(root.join("bin/other"), "").unwrap();
            }),
            ("/sbin has another target", |root| {
                std::fs::remove_file(root.join("sbin")).unwrap();
                symlink("/", root.join("sbin")).unwrap();
            }),
            ("/etc/empty is missing", |root| std::fs::remove_dir_all(root.join("etc")).unwrap()),
            ("/twice is not a regular file", |root| {
                std::fs::remove_file(root.join("twice")).unwrap();
                std::fs::create_dir_all(root.join("twice/deep")).unwrap();
            }),
            ("/bin is not a directory", |root| {
                std::fs::remove_dir_all(root.join("bin")).unwrap();
                std::fs::write(root.join("bin"), "").unwrap();
            }),
        ];
        for (expected, damage) in cases {
            let (_dir, root) = unpacked();
            damage(&root);
            let (found, _) = run(&root, true, false);
            assert!(found.contains(&expected.to_owned()), "{expected}: {found:?}");
            let by_size = run(&root, false, false).0;
            assert_eq!(by_size.is_empty(), expected.contains("content"), "{expected}: {by_size:?}");
            let mended = run(&root, true, true).1;
            assert_eq!(mended.failure, None, "{expected}");
            assert!(mended.mended > 0, "{expected}");
            assert_eq!(run(&root, true, false).0, Vec::<String>::new(), "{expected}");
            let (tool, other) = (root.join("bin/tool"), root.join("bin/other"));
            assert_eq!(tool.metadata().unwrap().ino(), other.metadata().unwrap().ino(), "{expected}");
            let left = |dir: &Path| std::fs::read_dir(dir).unwrap().count();
            assert_eq!((left(&root), left(&root.join("bin"))), (4, 3), "{expected}");
        }
    }

    #[test]
    fn open_damaged_file_is_replaced_and_not_written_to() {
        let (_dir, root) = unpacked();
        File::options().write(true).open(root.join("bin/tool")).unwrap().set_len(10).unwrap();
        let open = File::open(root.join("bin/tool")).unwrap();
        assert_eq!(run(&root, true, true).1.failure, None);
        assert_eq!(
            (open.metadata().unwrap().len(), root.join("bin/tool").metadata().unwrap().len()),
            (10, 200_000)
        );
    }

    #[test]
    fn deleted_names_are_compared() {
        let dir = tempfile::tempdir().unwrap();
        let layer =
            [entry("d/.wh.gone", b'0', "", b""), entry("o/.wh..wh..opq", b'0', "", b""), end()].concat();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::create_dir(dir.path().join("o")).unwrap();
        let found = run_on(dir.path(), &layer, true, false).0;
        assert_eq!(found.first.keys().collect::<Vec<_>>(), ["/d/.wh.gone", "/o/.wh..wh..opq"]);
        // Any entry hides the one of a lower layer.
        std::fs::write(dir.path().join("d/gone"), "").unwrap();
        let found = run_on(dir.path(), &layer, true, false).0;
        assert_eq!(found.first.keys().collect::<Vec<_>>(), ["/o/.wh..wh..opq"]);
    }

    #[test]
    fn links_never_lead_out_of_the_layer() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("fs"), dir.path().join("outside"));
        std::fs::create_dir(&root).unwrap();
        std::fs::create_dir(&outside).unwrap();
        let layer =
            [entry("out", b'2', outside.to_str().unwrap(), b""), entry("out/f", b'0', "", b"text"), end()]
                .concat();
        let (found, outcome) = run_on(&root, &layer, true, true);
        assert_eq!(found.total, 2);
        assert!(outcome.failure.is_some(), "{outcome:?}");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn many_findings_are_counted_and_the_first_are_stored() {
        let dir = tempfile::tempdir().unwrap();
        let mut layer: Vec<u8> = (0..250).flat_map(|n| entry(&format!("f{n}"), b'0', "", b"")).collect();
        layer.extend(end());
        let found = run_on(dir.path(), &layer, false, false).0;
        assert_eq!((found.first.len(), found.total), (MAX_FINDINGS, 250));
    }

    #[test]
    fn archive_that_ends_early_is_an_error_and_mends_nothing_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = archive();
        let (before, _) = pass(dir.path(), &bytes, LayerCheckOptions { contents: true, mend: None });
        let mut found = Findings::default();
        let cut = io::Cursor::new(bytes[..3000].to_vec());
        let root = tree::open(dir.path()).unwrap();
        let options = LayerCheckOptions { contents: true, mend: Some(&before) };
        let (meter, stop) = (Meter::unlimited(), StopToken::never());
        assert!(compare(root, Box::new(cut), options, &mut found, &meter, &stop).is_err());
        assert!(std::fs::read_dir(dir.path().join("bin")).unwrap().next().is_none());
    }

    #[test]
    fn layer_with_an_entry_of_an_unsupported_form_cannot_be_compared() {
        let dir = tempfile::tempdir().unwrap();
        for (kind, expected) in [(b'S', "a sparse file is not"), (b'M', "an entry of an unknown type is not")]
        {
            let bytes = io::Cursor::new([entry("f", kind, "", b"data"), end()].concat());
            let (root, mut found) = (tree::open(dir.path()).unwrap(), Findings::default());
            let options = LayerCheckOptions { contents: true, mend: Some(&Findings::default()) };
            let (meter, stop) = (Meter::unlimited(), StopToken::never());
            let error = compare(root, Box::new(bytes), options, &mut found, &meter, &stop).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}");
            assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
        }
    }

    #[test]
    fn only_the_last_entry_of_a_name_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut layer: Vec<u8> = (0..50)
            .flat_map(|n| entry("f", b'0', "", if n % 2 == 0 { &[b'a'; 9000] } else { b"x" }))
            .collect();
        layer.extend([entry("g", b'0', "", b"old"), entry("g", b'0', "", b"new"), end()].concat());
        std::fs::write(dir.path().join("f"), "damaged").unwrap();
        std::fs::write(dir.path().join("g"), "new").unwrap();
        let (found, outcome) = run_on(dir.path(), &layer, true, true);
        assert_eq!((found.total, outcome.mended, outcome.failure), (1, 1, None));
        assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"x");
        assert_eq!(run_on(dir.path(), &layer, true, true).1.mended, 0);
    }

    #[test]
    fn nothing_is_read_or_written_beyond_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let layer = [entry("a", b'0', "", &[b'a'; 9000]), entry("b", b'0', "", b"text"), end()].concat();
        let (before, _) = pass(dir.path(), &layer, LayerCheckOptions { contents: true, mend: None });
        let limited = |limit: Usage| {
            let (mut found, meter) = (Findings::default(), Meter::new(limit));
            let options = LayerCheckOptions { contents: true, mend: Some(&before) };
            let (root, inner) = (tree::open(dir.path()).unwrap(), io::Cursor::new(layer.clone()));
            let bytes = Metered { inner, meter: Arc::clone(&meter), stop: StopToken::never() };
            let result = compare(root, Box::new(bytes), options, &mut found, &meter, &StopToken::never());
            assert!(result.is_err() && meter.is_exhausted(), "{result:?}");
            std::fs::read_dir(dir.path()).unwrap().count()
        };
        assert_eq!(limited(Usage { read: u64::MAX, written: 9000 }), 0);
        assert_eq!(limited(Usage { read: 2000, written: u64::MAX }), 0);
        // The first of both files.
        assert_eq!(limited(Usage { read: u64::MAX, written: 14_000 }), 1);
    }

    /// What a comparison with repair has used, and what a second one with the same findings uses.
    fn used(root: &Path, archive: &[u8], before: &Findings) -> Usage {
        let (mut found, meter) = (Findings::default(), Meter::unlimited());
        let bytes = Box::new(io::Cursor::new(archive.to_vec()));
        let options = LayerCheckOptions { contents: true, mend: Some(before) };
        let root = tree::open(root).unwrap();
        compare(root, bytes, options, &mut found, &meter, &StopToken::never()).unwrap();
        meter.used()
    }

    #[test]
    fn directories_attributes_and_the_copied_part_of_a_file_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let content = [b'x'; 200_000];
        let deep = [entry("a/b/c/d/f", b'0', "", b""), end()].concat();
        let (before, _) = pass(dir.path(), &deep, LayerCheckOptions { contents: true, mend: None });
        // Four directories and the file.
        assert_eq!(used(dir.path(), &deep, &before).written, 5 * 4096);
        // The file differs in its last block: what is before is compared and copied.
        let layer = [entry("f", b'0', "", &content), end()].concat();
        let mut damaged = content;
        damaged[199_999] = 0;
        std::fs::write(dir.path().join("f"), damaged).unwrap();
        let (before, _) = pass(dir.path(), &layer, LayerCheckOptions { contents: true, mend: None });
        let used = used(dir.path(), &layer, &before);
        assert!(used.read >= 2 * 196_608 && used.written == 200_000 + 4096, "{used:?}");
    }

    #[test]
    fn archive_sets_no_attributes_that_the_kernel_or_overlayfs_interprets() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let archive = io::Cursor::new([entry("f", b'0', "", b""), end()].concat());
        let mut archive: Box<dyn Read + Send> = Box::new(archive);
        let mut entry = Archive::new(&mut archive).next_entry().unwrap().unwrap();
        (entry.uid, entry.gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let names = ["trusted.overlay.redirect", "trusted.x", "user.overlay.opaque", "user.kept"];
        entry.xattrs = names.map(|name| (name.as_bytes().to_vec(), b"y".to_vec())).to_vec();
        apply_attributes(&file, &entry).unwrap();
        let has = |name: &&str| fs::fgetxattr(&file, *name, &mut [0u8; 4][..]).is_ok();
        let present: Vec<&str> = names.into_iter().filter(has).collect();
        // The file system may have no such attributes at all.
        assert!(present.is_empty() || present == ["user.kept"], "{present:?}");
    }
}
