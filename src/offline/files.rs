//! The files of the room: one per object, and the key.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use super::format::{self, Body, FormatError};
use super::key::{self, Key, Kind};
use super::settings::Settings;
use super::state::SealState;
use crate::util::aead::{AeadError, SealKey};
use crate::util::secret::Secret;
use crate::util::{atomic_file, disk_writes, state_files, untrusted};

/// The most bytes of all files.
pub const MAX_BYTES: u64 = 64 * 1024 * 1024;
/// The most files.
pub const MAX_FILES: usize = 4096;

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
}

/// The directory and the key. Shared by the readers and the one writer; has no state that changes.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    node_name: String,
    seal: SealState,
    key: Option<SealKey>,
}

impl Files {
    /// The files of these settings, with the key of the key file, which is read, and made if there is none
    /// and no sealed object needs it. Whatever is wrong is returned as texts.
    #[must_use]
    pub fn open(settings: &Settings) -> (Files, Vec<String>) {
        if !settings.stores_secrets {
            return (Files::new(settings, SealState::Off, None), Vec::new());
        }
        let problem = "the key file is not read by this version".to_owned();
        (Files::new(settings, SealState::NoKey, None), vec![problem])
    }

    /// The files of these settings, with a key.
    #[must_use]
    pub fn new(settings: &Settings, seal: SealState, key: Option<SealKey>) -> Files {
        Files { directory: settings.directory.clone(), node_name: settings.node_name.clone(), seal, key }
    }

    /// Whether Secrets and tokens are to be stored at all.
    #[must_use]
    pub fn stores_secrets(&self) -> bool {
        self.key.is_some()
    }

    /// Whether Secrets and tokens can be stored.
    #[must_use]
    pub fn seal_state(&self) -> SealState {
        self.seal
    }

    /// The body of an object; `None` if it is not stored. Any thread may call this.
    ///
    /// # Errors
    /// See [`FileError`]; the caller puts a damaged file aside.
    pub fn read(&self, key: &Key) -> Result<Option<Secret<Vec<u8>>>, FileError> {
        let path = self.directory.join(key.file_name());
        let file = match untrusted::read_own(&path, format::MAX_FILE_BYTES as u64) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let (stored, body) = format::decode(&file)?;
        if stored != *key || body.is_sealed != key.kind.is_sealed() {
            return Err(FileError::OtherObject);
        }
        if !body.is_sealed {
            return Ok(Some(Secret::new(body.bytes.to_vec())));
        }
        Ok(Some(self.seal_key()?.open(&format::seal_context(&self.node_name, key), body.bytes)?))
    }

    /// Replaces the file of an object, and makes that permanent. Returns the bytes of the file.
    ///
    /// # Errors
    /// See [`FileError`]; the former file is then still there.
    pub fn write(&self, key: &Key, body: &[u8]) -> Result<u64, FileError> {
        let is_sealed = key.kind.is_sealed();
        let sealed = match is_sealed {
            true => Some(self.seal_key()?.seal(&format::seal_context(&self.node_name, key), body)?),
            false => None,
        };
        let file = format::encode(key, Body { bytes: sealed.as_deref().unwrap_or(body), is_sealed })?;
        disk_writes::make_directories(&self.directory, 0o700)?;
        atomic_file::write(&self.directory.join(key.file_name()), &file, 0o600)?;
        atomic_file::sync_directory(&self.directory)?;
        Ok(file.len() as u64)
    }

    /// Removes the file of an object.
    ///
    /// # Errors
    /// When it exists and cannot be removed.
    pub fn remove(&self, key: &Key) -> io::Result<()> {
        match std::fs::remove_file(self.directory.join(key.file_name())) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The names of all files of objects, and their bytes. Other files of the directory are left out.
    ///
    /// # Errors
    /// When the directory exists and cannot be read.
    pub fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let named = entries.filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            key::is_file_name(&name).then(|| Some((name, entry.metadata().ok()?.len())))?
        });
        Ok(named.take(MAX_FILES).collect())
    }

    /// The keys of all files of a kind that can be read.
    #[must_use]
    pub fn keys(&self, kind: Kind) -> Vec<Key> {
        let start = format!("{}-", kind.word());
        let names = self.list().unwrap_or_default().into_iter().filter(|(name, _)| name.starts_with(&start));
        let key = |name: String| {
            let file =
                untrusted::read_own(&self.directory.join(&name), format::MAX_FILE_BYTES as u64).ok()?;
            let (key, _) = format::decode(&file).ok()?;
            (key.file_name() == name).then_some(key)
        };
        names.filter_map(|(name, _)| key(name)).collect()
    }

    /// Reports a file that cannot be used, and renames it, so that the next write makes another one.
    pub fn put_aside(&self, key: &Key, error: &FileError) {
        state_files::damaged(&self.directory.join(key.file_name()), &error.to_string());
    }

    fn seal_key(&self) -> Result<&SealKey, FileError> {
        self.key.as_ref().ok_or(FileError::NotStored(self.seal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offline::Kind;
    use std::time::Duration;

    fn files(directory: PathBuf, key: Option<SealKey>) -> Files {
        let settings = Settings {
            directory,
            node_name: "n".to_owned(),
            stores_secrets: true,
            key_file: None,
            wait: Duration::ZERO,
            accept_after: Duration::ZERO,
        };
        Files::new(&settings, SealState::Sealed, key)
    }

    #[test]
    fn secrets_are_sealed_and_other_objects_are_not() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("offline");
        let files = files(directory.clone(), SealKey::generate().ok());
        let (secret, map) = (Key::new(Kind::Secret, "n/s"), Key::new(Kind::ConfigMap, "n/s"));
        assert!(files.read(&secret).unwrap().is_none() && files.list().unwrap().is_empty());
        for key in [&secret, &map] {
            files.write(key, b"former").unwrap();
            files.write(key, b"canary").unwrap();
            assert_eq!(files.read(key).unwrap().unwrap().reveal(), b"canary");
        }
        let has_canary = |key: &Key| {
            let file = std::fs::read(directory.join(key.file_name())).unwrap();
            file.windows(6).any(|part| part == b"canary")
        };
        assert!(!has_canary(&secret) && has_canary(&map));
        assert_eq!(files.list().unwrap().len(), 2);
        // The file of another object under this name.
        std::fs::copy(directory.join(map.file_name()), directory.join(secret.file_name())).unwrap();
        assert!(matches!(files.read(&secret), Err(FileError::OtherObject)));
        files.remove(&secret).unwrap();
        files.remove(&secret).unwrap();
        assert!(files.read(&secret).unwrap().is_none());
    }
}
