//! The one writer's knowledge of the files: what each has, so that nothing is written that is there
//! already, and how large all are together.

use std::collections::BTreeMap;

use super::files::{FileError, Files, MAX_BYTES, MAX_FILES};
use super::format::FormatError;
use super::key::{Key, Kind};
use crate::util::sha256::sha256;

/// What became of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The file has it already.
    Same,
    /// The file was replaced.
    Written,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    /// The beginning of the digest of the body. Bodies may be secret, so they are not here.
    digest: [u8; 16],
    file_bytes: u64,
}

/// What is stored. Only the thread `offline` has it.
#[derive(Debug, Default)]
pub struct Store {
    known: BTreeMap<Key, Known>,
    bytes: u64,
}

impl Store {
    /// Reads all files once. Those that cannot be used are put aside, and returned as texts.
    #[must_use]
    pub fn open(files: &Files) -> (Store, Vec<String>) {
        let (mut store, mut problems) = (Store::default(), Vec::new());
        for key in Kind::ALL.into_iter().flat_map(|kind| files.keys(kind)) {
            match files.read(&key) {
                Ok(Some(body)) => store.insert(key, body.reveal(), body.reveal().len() as u64),
                Ok(None) => {}
                Err(error) => problems.push(format!("{} {}: {error}", key.kind.word(), key.name)),
            }
        }
        (store, problems)
    }

    /// Writes a body, unless the file has it.
    ///
    /// # Errors
    /// When it cannot be written, or is larger than what is left; the former file is then still there.
    pub fn put(&mut self, files: &Files, key: &Key, body: &[u8]) -> Result<Stored, FileError> {
        let known = self.known.get(key);
        if known.is_some_and(|known| known.digest == digest(body)) {
            return Ok(Stored::Same);
        }
        let others = self.bytes.saturating_sub(known.map_or(0, |known| known.file_bytes));
        let is_full = known.is_none() && self.known.len() >= MAX_FILES;
        if is_full || others.saturating_add(body.len() as u64) > MAX_BYTES {
            return Err(FormatError::TooLarge.into());
        }
        let file_bytes = files.write(key, body)?;
        self.insert(key.clone(), body, file_bytes);
        Ok(Stored::Written)
    }

    /// Removes the file of an object, if there is one.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&mut self, files: &Files, key: &Key) -> Result<(), FileError> {
        files.remove(key)?;
        if let Some(known) = self.known.remove(key) {
            self.bytes = self.bytes.saturating_sub(known.file_bytes);
        }
        Ok(())
    }

    /// The keys of all stored objects.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.known.keys()
    }

    /// Bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of objects by the word of their kind.
    #[must_use]
    pub fn objects(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for key in self.known.keys() {
            *counts.entry(key.kind.word().to_owned()).or_default() += 1;
        }
        counts
    }

    fn insert(&mut self, key: Key, body: &[u8], file_bytes: u64) {
        let known = Known { digest: digest(body), file_bytes };
        let former = self.known.insert(key, known).map_or(0, |former| former.file_bytes);
        self.bytes = self.bytes.saturating_sub(former).saturating_add(file_bytes);
    }
}

fn digest(body: &[u8]) -> [u8; 16] {
    sha256(body).first_chunk().copied().unwrap_or_default()
}
