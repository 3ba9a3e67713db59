//! The files of the room: one per object, and copies of damaged ones.
//!
//! A container may write below the root directory: no link is followed in the directory and below it,
//! only regular files are opened, and the number of entries that are read is limited.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use rustix::fs::{AtFlags, renameat, unlinkat};
use rustix::io::Errno;

use super::format::{self, Body, FormatError};
use super::key::{self, Key, Kind};
use super::key_file::{self, KeyFileError};
use super::settings::Settings;
use super::state::SealState;
use crate::util::aead::{AeadError, SealKey};
use crate::util::lock::LockExt;
use crate::util::secret::Secret;
use crate::util::untrusted::{self, UntrustedPath};
use crate::util::{atomic_file, disk_writes, state_files};

/// The most bytes of all files.
pub const MAX_BYTES: u64 = 64 * 1024 * 1024;
/// The most files.
pub const MAX_FILES: usize = 4096;
/// The most entries of a directory that are read: other processes may fill it.
const MAX_ENTRIES: usize = 4 * MAX_FILES;
/// The mode of the directories.
const DIRECTORY_MODE: u32 = 0o700;
/// The most bytes that are read of a short file.
const MAX_NOTE_BYTES: u64 = 256;
/// The directory of copies of files that cannot be used.
const ASIDE: &str = "damaged";
/// The most copies.
const MAX_ASIDE: usize = 16;
/// The key file, unless `--offline-key` names another one.
const KEY_FILE: &str = "key";

/// Authorities of the API server that an operator has added; `kube` writes and reads the file.
pub const AUTHORITIES_FILE: &str = "authorities.pem";

/// A time that has passed for certain; see `clock`.
pub(super) const CLOCK_FILE: &str = "clock";

/// Why an object is not stored or not read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file is damaged, or the object is too large.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The file is that of another object.
    #[error("it has another object than its name says")]
    OtherObject,
    /// The body is sealed and cannot be opened, or cannot be sealed.
    #[error("{0}")]
    Seal(#[from] AeadError),
    /// There is no key, or Secrets are not stored.
    #[error("Secrets and tokens are not stored: {}", match .0 {
        SealState::NoKey => "the key cannot be used",
        SealState::Off | SealState::Sealed => "--offline-secrets=none",
    })]
    NotStored(SealState),
    /// The files have as many bytes as they may have, or there are as many as there may be.
    #[error("the limit of {} MiB or {} files is reached", MAX_BYTES / 1024 / 1024, MAX_FILES)]
    Full,
}

impl FileError {
    /// Whether the file cannot be used, also at the next attempt.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            // Too many open files, or no memory.
            FileError::Io(error) => !matches!(
                Errno::from_io_error(error),
                Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR | Errno::AGAIN)
            ),
            FileError::Format(_)
            | FileError::OtherObject
            | FileError::Seal(AeadError::Refused | AeadError::Short) => true,
            FileError::Seal(AeadError::Random) | FileError::NotStored(_) | FileError::Full => false,
        }
    }
}

/// The object of a file.
#[derive(Debug)]
pub(super) struct StoredObject {
    pub(super) key: Key,
    /// `None`: it is sealed, and there is no key.
    pub(super) body: Option<Secret<Vec<u8>>>,
}

/// A file of an object.
#[derive(Debug)]
pub(super) struct FoundFile {
    /// The object, and whether it is sealed. `None`: the file cannot be used.
    pub(super) object: Option<(Key, bool)>,
    pub(super) bytes: u64,
    /// When it was written.
    pub(super) changed: Option<Timestamp>,
}

/// Whether Secrets and tokens are sealed, and the key.
#[derive(Debug)]
struct Sealing {
    state: SealState,
    key: Option<Arc<SealKey>>,
}

/// The directory and the key. Shared by the readers and the one writer; only a purge changes the key.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    node_name: String,
    /// Whether the key file is in `directory`: another one is the operator's.
    has_own_key: bool,
    /// Never locked while a file is read or written.
    sealing: Mutex<Sealing>,
}

impl Files {
    /// The files of these settings, with the key of the key file, which is read, and made if there is none
    /// and no sealed object needs it. Whatever is wrong is returned as texts.
    #[must_use]
    pub fn open(settings: &Settings) -> (Files, Vec<String>) {
        if !settings.stores_secrets {
            return (Files::new(settings, SealState::Off, None), Vec::new());
        }
        let files = Files::new(settings, SealState::NoKey, None);
        let own = files.directory.join(KEY_FILE);
        // Links are followed only in paths that the operator chose.
        let (path, levels) = settings.key_file.as_deref().map_or((own.as_path(), 1), |path| (path, 0));
        let problem = match files.use_key(path, levels) {
            Ok(()) => return (files, Vec::new()),
            Err(error) => error,
        };
        let path = path.display();
        (
            files,
            vec![format!(
                "the key file {path} cannot be used, so Secrets and tokens are not stored: {problem}"
            )],
        )
    }

    /// The files of these settings, with a key.
    #[must_use]
    pub fn new(settings: &Settings, seal: SealState, key: Option<SealKey>) -> Files {
        Files {
            directory: settings.directory.clone(),
            node_name: settings.node_name.clone(),
            has_own_key: settings.key_file.is_none(),
            sealing: Mutex::new(Sealing { state: seal, key: key.map(Arc::new) }),
        }
    }

    /// The directory.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The name of the node, to which the objects belong.
    pub(super) fn node_name(&self) -> &str {
        &self.node_name
    }

    /// Whether Secrets and tokens are to be stored at all.
    #[must_use]
    pub fn stores_secrets(&self) -> bool {
        self.sealing.locked().key.is_some()
    }

    /// Whether Secrets and tokens can be stored.
    #[must_use]
    pub fn seal_state(&self) -> SealState {
        self.sealing.locked().state
    }

    /// The body of an object; `None` if it is not stored. Any thread may call this.
    ///
    /// # Errors
    /// See [`FileError`]; the caller puts a damaged file aside.
    pub fn read(&self, key: &Key) -> Result<Option<Secret<Vec<u8>>>, FileError> {
        let Some(file) = self.content(&key.file_name())? else { return Ok(None) };
        let (stored, body) = format::decode(&file)?;
        if stored != *key {
            return Err(FileError::OtherObject);
        }
        self.body(key, body).map(Some)
    }

    /// The object of the file with this name; `None` if there is no such file.
    ///
    /// # Errors
    /// See [`FileError`].
    pub(super) fn object(&self, name: &str) -> Result<Option<StoredObject>, FileError> {
        let Some(file) = self.content(name)? else { return Ok(None) };
        let (key, body) = format::decode(&file)?;
        if key.file_name() != name {
            return Err(FileError::OtherObject);
        }
        let body = match self.body(&key, body) {
            Err(FileError::NotStored(_)) => None,
            body => Some(body?),
        };
        Ok(Some(StoredObject { key, body }))
    }

    /// Replaces the file of an object, and makes that permanent. Returns the bytes of the file.
    ///
    /// # Errors
    /// See [`FileError`]; the former file is then still there, or the new one is not permanent yet.
    pub fn write(&self, key: &Key, body: &[u8]) -> Result<u64, FileError> {
        let file = self.encode(key, body)?;
        self.replace(key, &file)?;
        Ok(file.len() as u64)
    }

    /// The content of the file of an object.
    ///
    /// # Errors
    /// See [`FileError`].
    pub(super) fn encode(&self, key: &Key, body: &[u8]) -> Result<Vec<u8>, FileError> {
        let is_sealed = key.kind.is_sealed();
        let sealed = match is_sealed {
            true => Some(self.seal_key()?.seal(&format::seal_context(&self.node_name, key), body)?),
            false => None,
        };
        Ok(format::encode(key, Body { bytes: sealed.as_deref().unwrap_or(body), is_sealed })?)
    }

    /// Replaces the file of an object by one with this content, and makes that permanent.
    ///
    /// # Errors
    /// When it cannot be written; the former file is then still there, or the new one is not permanent yet.
    pub(super) fn replace(&self, key: &Key, content: &[u8]) -> io::Result<()> {
        self.make_directory()?;
        let place = self.place(&key.file_name())?;
        let directory = place.dir_path();
        atomic_file::write(&directory.join(place.name()), content, 0o600)?;
        atomic_file::sync_directory(&directory)?;
        state_files::report_usable(&self.directory.join(place.name()));
        Ok(())
    }

    /// Bytes of the file of an object; `None`: there is none.
    ///
    /// # Errors
    /// When its directory cannot be read.
    pub(super) fn bytes(&self, key: &Key) -> io::Result<Option<u64>> {
        let stat = match self.place(&key.file_name()).and_then(|place| place.stat()) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            stat => stat?,
        };
        Ok(stat.filter(untrusted::is_file).and_then(|stat| u64::try_from(stat.st_size).ok()))
    }

    /// Removes the file of an object.
    ///
    /// # Errors
    /// When it exists and cannot be removed.
    pub fn remove(&self, key: &Key) -> io::Result<()> {
        self.remove_file(&key.file_name())
    }

    /// The names of all files of objects, and their bytes. Other files of the directory are left out.
    ///
    /// # Errors
    /// When the directory exists and cannot be read.
    pub fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let (entries, _) = self.entries(MAX_ENTRIES)?;
        Ok(entries.into_iter().filter(|(name, _)| key::is_file_name(name)).take(MAX_FILES).collect())
    }

    /// The keys of all files of a kind that can be read.
    #[must_use]
    pub fn keys(&self, kind: Kind) -> Vec<Key> {
        let key = |name: String| {
            let file = self.content(&name).ok()??;
            let (key, _) = format::decode(&file).ok()?;
            (key.file_name() == name).then_some(key)
        };
        self.names(|other| other == kind).into_iter().filter_map(key).collect()
    }

    /// Reports a file that cannot be used, and renames it, so that the next write makes another one. A file
    /// that can be used at another attempt stays.
    pub fn put_aside(&self, key: &Key, error: &FileError) {
        let name = key.file_name();
        if !error.is_damage() {
            log::warn!("cannot read {}: {error}", self.directory.join(name).display());
        } else if self.read(key).is_err() {
            // Otherwise another thread has put it aside or replaced it meanwhile.
            self.put_file_aside(&name, &error.to_string());
        }
    }

    /// [`Files::put_aside`] for a file whose object is not known.
    pub(super) fn put_file_aside(&self, name: &str, reason: &str) {
        let path = self.directory.join(name);
        match self.rename_aside(name) {
            Ok(copy) => {
                let path = path.display();
                state_files::report_damaged(
                    &copy,
                    &format!("{reason}; it was {path} and is not used any more"),
                );
            }
            Err(error) => {
                state_files::report_damaged(&path, &format!("{reason}; it cannot be renamed: {error}"));
            }
        }
    }

    /// Removes what an interrupted write has left, and without sealed objects (`--offline-secrets=none`)
    /// those of former runs. Reports the copies of former runs. Only the one writer may call this.
    pub(super) fn clean_up(&self) {
        let (entries, _) = self.entries(MAX_ENTRIES).unwrap_or_default();
        let is_off = self.seal_state() == SealState::Off;
        for (name, _) in entries {
            if (is_temporary(&name) || (is_off && is_sealed_file(&name)))
                && let Err(error) = self.remove_file(&name)
            {
                log::warn!("cannot remove {}: {error}", self.directory.join(name).display());
            }
        }
        let aside = self.directory.join(ASIDE);
        let Ok(directory) = untrusted::directory(&aside, 2) else { return };
        for (_, name) in copies(directory.as_fd()).unwrap_or_default() {
            match name.to_str() {
                Some(copy) if is_off && is_sealed_file(copy) => {
                    if let Err(error) = remove_copy(directory.as_fd(), &name) {
                        log::warn!("cannot remove {}: {error}", aside.join(copy).display());
                    }
                }
                _ => state_files::was_put_aside(&self.directory.join(&name), &aside.join(&name)),
            }
        }
    }

    /// The beginning of a short file that is no object. `None`: there is none.
    pub(super) fn read_note(&self, name: &str) -> io::Result<Option<String>> {
        let file = match self.place(name).and_then(|place| place.open()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut text = String::new();
        file.take(MAX_NOTE_BYTES).read_to_string(&mut text)?;
        Ok(Some(text))
    }

    /// Replaces such a file by a whole one.
    pub(super) fn write_note(&self, name: &str, text: &str) -> io::Result<()> {
        self.make_directory()?;
        let place = self.place(name)?;
        let directory = place.dir_path();
        atomic_file::write(&directory.join(place.name()), text.as_bytes(), 0o600)?;
        atomic_file::sync_directory(&directory)?;
        state_files::report_usable(&self.directory.join(place.name()));
        Ok(())
    }

    /// The place of a file in the directory, which must not be a link.
    fn place(&self, name: &str) -> io::Result<UntrustedPath> {
        UntrustedPath::find(&self.directory.join(name), 1)
    }

    fn make_directory(&self) -> io::Result<()> {
        match untrusted::directory(&self.directory, 1) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            directory => return directory.map(drop),
        }
        untrusted::make_directory(&self.directory, 1, DIRECTORY_MODE)?;
        // Otherwise it could be gone after a power cut, with all files.
        let parent = self.directory.parent().filter(|parent| !parent.as_os_str().is_empty());
        atomic_file::sync_directory(parent.unwrap_or(Path::new(".")))
    }

    /// Reads the key, or makes one.
    fn use_key(&self, path: &Path, levels: usize) -> Result<(), KeyFileError> {
        let mut key = key_file::read(path, levels)?;
        let is_new = key.is_none();
        if is_new {
            let (entries, is_complete) = self.entries(MAX_ENTRIES)?;
            if !is_complete || entries.iter().any(|(name, _)| is_sealed_file(name)) {
                return Err(KeyFileError::Missing);
            }
            if levels > 0 {
                self.make_directory()?;
            }
            key_file::make(path, levels)?;
            // As the next start will do: a file system may change the mode.
            key = key_file::read(path, levels)?;
        }
        let key = Arc::new(key.ok_or(KeyFileError::Missing)?);
        *self.sealing.locked() = Sealing { state: SealState::Sealed, key: Some(key) };
        if !is_new && self.opens_none() {
            *self.sealing.locked() = Sealing { state: SealState::NoKey, key: None };
            return Err(KeyFileError::Other);
        }
        Ok(())
    }

    /// Removes the key file and makes another one: what the former key has sealed can then not be opened,
    /// also from remains on the disk. Only for a key file of ours; otherwise returns `false`. All sealed
    /// objects must be gone.
    pub(super) fn replace_key(&self) -> Result<bool, KeyFileError> {
        if !self.has_own_key || self.seal_state() == SealState::Off {
            return Ok(false);
        }
        let (entries, is_complete) = self.entries(MAX_ENTRIES)?;
        if !is_complete || entries.iter().any(|(name, _)| is_sealed_file(name)) {
            return Err(KeyFileError::Needed);
        }
        *self.sealing.locked() = Sealing { state: SealState::NoKey, key: None };
        self.remove_file(KEY_FILE)?;
        self.use_key(&self.directory.join(KEY_FILE), 1)?;
        Ok(true)
    }

    /// Makes removals permanent.
    pub(super) fn sync(&self) -> io::Result<()> {
        let place = match self.place(KEY_FILE) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            place => place?,
        };
        atomic_file::sync_directory(&place.dir_path())
    }

    /// All files of objects, by their names. Reads each of them; has no body.
    pub(super) fn found(&self) -> Vec<(String, FoundFile)> {
        let files = self.list().unwrap_or_default().into_iter();
        let found = |(name, bytes): (String, u64)| {
            let content = match self.content(&name) {
                // It was removed meanwhile.
                Ok(None) => return None,
                content => content.ok().flatten(),
            };
            let object = content.and_then(|content| {
                let (key, body) = format::decode(&content).ok()?;
                (key.file_name() == name).then_some((key, body.is_sealed))
            });
            let metadata =
                self.place(&name).and_then(|place| place.dir_path().join(place.name()).symlink_metadata());
            let changed = metadata.ok().and_then(|metadata| Timestamp::from_second(metadata.mtime()).ok());
            Some((name, FoundFile { object, bytes, changed }))
        };
        files.filter_map(found).collect()
    }

    /// The copies of files that could not be used: name, bytes and when they were put aside.
    pub(super) fn copies(&self) -> Vec<(String, u64, Option<Timestamp>)> {
        let Ok(directory) = untrusted::directory(&self.directory.join(ASIDE), 2) else { return Vec::new() };
        let copy = |((seconds, _), name): ((i64, i64), OsString)| {
            let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
            let bytes = Path::new(&path).join(&name).symlink_metadata().map_or(0, |metadata| metadata.len());
            (name.to_string_lossy().into_owned(), bytes, Timestamp::from_second(seconds).ok())
        };
        copies(directory.as_fd()).unwrap_or_default().into_iter().map(copy).collect()
    }

    /// Removes a copy of a file that could not be used.
    ///
    /// # Errors
    /// When it exists and cannot be removed.
    pub(super) fn remove_aside(&self, name: &str) -> io::Result<()> {
        let directory = untrusted::directory(&self.directory.join(ASIDE), 2)?;
        remove_copy(directory.as_fd(), OsStr::new(name))
    }

    /// Whether there are sealed objects, but the key opens none of them. Usually the first one is opened.
    fn opens_none(&self) -> bool {
        let mut is_refused = false;
        for name in self.names(Kind::is_sealed) {
            match self.object(&name) {
                Ok(Some(_)) => return false,
                Err(FileError::Seal(AeadError::Refused)) => is_refused = true,
                _ => {}
            }
        }
        is_refused
    }

    /// The names of the files of some kinds, the smallest first, up to the limit of all files together:
    /// their number and their size must not delay the start.
    fn names(&self, is_wanted: impl Fn(Kind) -> bool) -> Vec<String> {
        let mut files = self.list().unwrap_or_default();
        files.retain(|(name, _)| kind_of_file(name).is_some_and(&is_wanted));
        files.sort_by_key(|(_, bytes)| *bytes);
        let mut sum = 0;
        let names = files.into_iter().map_while(|(name, bytes)| {
            sum += read_bytes(bytes);
            (sum <= MAX_BYTES).then_some(name)
        });
        names.collect()
    }

    /// The content of a file; `None`: there is no such file.
    fn content(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let file = match self.place(name).and_then(|place| place.open()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let limit = format::MAX_FILE_BYTES as u64;
        let expected = file.metadata()?.len().min(limit);
        let mut content = Vec::with_capacity(usize::try_from(expected).unwrap_or_default());
        file.take(limit + 1).read_to_end(&mut content)?;
        if content.len() as u64 > limit {
            return Err(io::Error::new(ErrorKind::FileTooLarge, format!("larger than {limit} bytes")));
        }
        Ok(Some(content))
    }

    fn body(&self, key: &Key, body: Body<'_>) -> Result<Secret<Vec<u8>>, FileError> {
        // A body in clear must not stand in for a sealed one.
        if body.is_sealed != key.kind.is_sealed() {
            return Err(FileError::OtherObject);
        }
        if !body.is_sealed {
            return Ok(Secret::new(body.bytes.to_vec()));
        }
        Ok(self.seal_key()?.open(&format::seal_context(&self.node_name, key), body.bytes)?)
    }

    fn seal_key(&self) -> Result<Arc<SealKey>, FileError> {
        let sealing = self.sealing.locked();
        sealing.key.clone().ok_or(FileError::NotStored(sealing.state))
    }

    /// Removes a file, if there is one.
    ///
    /// # Errors
    /// When it exists and cannot be removed.
    pub(super) fn remove_file(&self, name: &str) -> io::Result<()> {
        let removed =
            self.place(name).and_then(|place| Ok(unlinkat(place.dir(), place.name(), AtFlags::empty())?));
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Up to `most` entries of the directory with their bytes, and whether these are all.
    fn entries(&self, most: usize) -> io::Result<(Vec<(String, u64)>, bool)> {
        let directory = match self.place(KEY_FILE) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok((Vec::new(), true)),
            place => place?,
        };
        let (mut entries, mut read, mut is_complete) = (Vec::new(), 0, true);
        for entry in std::fs::read_dir(directory.dir_path())? {
            read += 1;
            if read > most {
                return Ok((entries, false));
            }
            let Ok(entry) = entry else {
                is_complete = false;
                continue;
            };
            // Names of ours are text.
            let Ok(name) = entry.file_name().into_string() else { continue };
            entries.push((name, entry.metadata().map_or(0, |metadata| metadata.len())));
        }
        Ok((entries, is_complete))
    }

    /// Renames a file to a copy, and returns the path of that.
    fn rename_aside(&self, name: &str) -> io::Result<PathBuf> {
        let place = self.place(name)?;
        let aside = self.directory.join(ASIDE);
        let directory = untrusted::make_directory(&aside, 2, DIRECTORY_MODE)?;
        make_room(directory.as_fd(), name)?;
        disk_writes::created(renameat(place.dir(), place.name(), &directory, name))?;
        Ok(aside.join(name))
    }
}

/// How much of a file of `bytes` bytes is read.
pub(super) fn read_bytes(bytes: u64) -> u64 {
    bytes.min(format::MAX_FILE_BYTES as u64)
}

/// The kind of the object of a file.
pub(super) fn kind_of_file(name: &str) -> Option<Kind> {
    let (word, _) = name.split_once('-')?;
    if key::is_file_name(name) { Kind::parse(word) } else { None }
}

fn is_sealed_file(name: &str) -> bool {
    kind_of_file(name).is_some_and(Kind::is_sealed)
}

/// Whether [`atomic_file::write`] has left a file of this name.
fn is_temporary(name: &str) -> bool {
    let parts = name.strip_suffix(".tmp").and_then(|rest| rest.rsplit_once('.'));
    parts.is_some_and(|(name, digits)| {
        ([KEY_FILE, AUTHORITIES_FILE, CLOCK_FILE].contains(&name) || key::is_file_name(name))
            && digits.len() == 8
            && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// The copies in their directory, the oldest first.
fn copies(directory: BorrowedFd<'_>) -> io::Result<Vec<((i64, i64), OsString)>> {
    let entries = std::fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
    let mut copies = Vec::new();
    for entry in entries.take(MAX_ENTRIES).flatten() {
        let metadata = entry.metadata()?;
        // A change of the name changes this time.
        copies.push(((metadata.ctime(), metadata.ctime_nsec()), entry.file_name()));
    }
    copies.sort();
    Ok(copies)
}

/// Removes a copy with this name, and the oldest ones, so that there is room for another one.
fn make_room(directory: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let (former, others): (Vec<_>, Vec<_>) =
        copies(directory)?.into_iter().partition(|(_, copy)| copy == name);
    if !former.is_empty() {
        remove_copy(directory, OsStr::new(name))?;
    }
    let mut left = others.len();
    for (_, copy) in others {
        if left < MAX_ASIDE {
            break;
        }
        // A directory with files stays, and counts.
        left -= usize::from(remove_copy(directory, &copy).is_ok());
    }
    match left < MAX_ASIDE {
        true => Ok(()),
        false => Err(io::Error::other(format!("{ASIDE} is full"))),
    }
}

fn remove_copy(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => Ok(unlinkat(directory, name, AtFlags::REMOVEDIR)?),
        removed => Ok(removed?),
    }
}

#[cfg(test)]
mod tests;
