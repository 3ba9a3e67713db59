//! The one writer's knowledge of the files: what each has, so that nothing is written that is there
//! already, and how large all are together.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::files::{FileError, Files, MAX_BYTES, MAX_FILES, kind_of_file, read_bytes};
use super::key::{Key, Kind};
use crate::util::secret::Secret;
use crate::util::sha256::sha256;

/// What other kinds leave to the files of the Node object, of pods and of their statuses: without these
/// nothing starts, and one pod may name any number of other objects.
const RESERVED_BYTES: u64 = 4 * 1024 * 1024;
const RESERVED_FILES: usize = 512;
/// The most bytes of all pods, without their statuses: few pods start without their ConfigMaps, Secrets and
/// tokens, and one user may have many pods of more than a megabyte each.
const MAX_POD_BYTES: u64 = MAX_BYTES / 2;
/// The most files of a kind whose objects belong to no namespace and no pod, although each pod may name any
/// number of them, also of those that do not exist.
const MAX_SHARED: usize = 256;
/// The most problems that are named.
const MAX_PROBLEMS: usize = 16;

/// What became of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The file has it already.
    Same,
    /// The file was replaced.
    Written,
}

/// The beginning of the digest of a body, which may be secret: a digest can confirm a guess.
type Digest = Secret<[u8; 16]>;

#[derive(Debug, Clone)]
struct Known {
    /// `None`: the body is sealed and there is no key, or a write has failed.
    digest: Option<Digest>,
    file_bytes: u64,
}

/// What is stored. Only the thread `offline` has it.
#[derive(Debug, Default)]
pub struct Store {
    known: BTreeMap<Key, Known>,
    bytes: u64,
    /// See [`Store::take_evicted`].
    evicted: Vec<Key>,
}

impl Store {
    /// Reads all files once. Those that cannot be used are put aside, and returned as texts. Removes what
    /// interrupted writes have left, sealed objects if they are not to be stored, and the largest objects
    /// above the limit.
    #[must_use]
    pub fn open(files: &Files) -> (Store, Vec<String>) {
        let (mut store, mut problems) = (Store::default(), Problems::default());
        files.clean_up();
        let found = files.list().unwrap_or_else(|error| {
            problems.add(|| format!("the stored objects cannot be read: {error}"));
            Vec::new()
        });
        for (name, file_bytes) in remove_largest(files, found, &mut problems) {
            match files.object(&name) {
                Ok(Some(object)) => {
                    let digest = object.body.map(|body| digest(body.reveal()));
                    store.insert(object.key, digest, file_bytes);
                }
                Ok(None) => {}
                Err(error) => {
                    problems.add(|| format!("{name}: {error}"));
                    if error.is_damage() {
                        files.put_file_aside(&name, &error.to_string());
                    }
                }
            }
        }
        (store, problems.finish())
    }

    /// Writes a body, unless the file has it. At the limits, the largest objects of a namespace or a pod that
    /// has more than this one go, so that no single one takes all the space.
    ///
    /// # Errors
    /// When it cannot be written, or is larger than what is left; the former file is then still there.
    pub fn put(&mut self, files: &Files, key: &Key, body: &[u8]) -> Result<Stored, FileError> {
        let digest = digest(body);
        let known = self.known.get(key);
        let former = known.map_or(0, |known| known.file_bytes);
        // A reader may have put the file aside.
        if known.is_some_and(|known| known.digest.as_ref() == Some(&digest))
            && files.bytes(key).is_ok_and(|bytes| bytes == Some(former))
        {
            return Ok(Stored::Same);
        }
        let content = files.encode(key, body)?;
        let bytes = content.len() as u64;
        for evicted in self.evictions(key, former, bytes).ok_or(FileError::Full)? {
            self.remove(files, &evicted)?;
            self.evicted.push(evicted);
        }
        match files.replace(key, &content) {
            Ok(()) => {
                self.insert(key.clone(), Some(digest), bytes);
                Ok(Stored::Written)
            }
            Err(error) => {
                // The next body is written, whichever of the two the file has now.
                match files.bytes(key) {
                    Ok(None) => self.forget(key),
                    found => self.insert(key.clone(), None, found.ok().flatten().unwrap_or(former)),
                }
                Err(error.into())
            }
        }
    }

    /// Removes the file of an object, if there is one.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&mut self, files: &Files, key: &Key) -> Result<(), FileError> {
        files.remove(key)?;
        self.forget(key);
        Ok(())
    }

    /// [`Store::remove`], which a power cut does not undo.
    ///
    /// # Errors
    /// When it cannot be removed, or that cannot be made permanent; then it counts as stored.
    pub fn remove_for_good(&mut self, files: &Files, key: &Key) -> Result<(), FileError> {
        files.remove(key)?;
        if self.has(key) {
            files.sync()?;
        }
        self.forget(key);
        Ok(())
    }

    /// The keys of all stored objects.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.known.keys()
    }

    /// Whether an object is stored.
    #[must_use]
    pub fn has(&self, key: &Key) -> bool {
        self.known.contains_key(key)
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

    /// The bytes of the files by the word of their kind.
    #[must_use]
    pub fn kind_bytes(&self) -> BTreeMap<String, u64> {
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for (key, known) in &self.known {
            let sum = sums.entry(key.kind.word().to_owned()).or_default();
            *sum = sum.saturating_add(known.file_bytes);
        }
        sums
    }

    /// The objects that went since the last call because others needed the space.
    pub fn take_evicted(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.evicted)
    }

    /// The files that have to go so that a file may grow from `former` bytes (0: there is none) to `bytes`.
    /// `None`: it may not. Of each owner the largest goes first. Others than pods go for pods; else only
    /// those of an owner that has more than the owner of `key` then has: a body that comes back pushes
    /// nothing out again. Beyond [`MAX_POD_BYTES`] only pods go for pods. Tokens and certificates of pods push
    /// out only such: one tenant may have many pods with some of them each.
    fn evictions(&self, key: &Key, former: u64, bytes: u64) -> Option<Vec<Key>> {
        let is_first = comes_first(key.kind);
        let (reserved_bytes, reserved_files) =
            if is_first { (0, 0) } else { (RESERVED_BYTES, RESERVED_FILES) };
        let is_new = !self.known.contains_key(key);
        let mut space = Space {
            bytes: self.bytes.saturating_sub(former).saturating_add(bytes),
            files: self.known.len() + usize::from(is_new),
            max_bytes: if bytes > former { MAX_BYTES - reserved_bytes } else { u64::MAX },
            max_files: if is_new { MAX_FILES - reserved_files } else { usize::MAX },
        };
        let mut evicted = Vec::new();
        // A larger one takes the place of the smallest: those that do not exist are the smallest.
        if is_new && is_shared(key.kind) {
            let same: Vec<(&Key, &Known)> =
                self.known.iter().filter(|(other, _)| other.kind == key.kind).collect();
            if same.len() >= MAX_SHARED {
                // The name is in the file, too, and does not count.
                let content = |key: &Key, bytes: u64| bytes.saturating_sub(key.name.len() as u64);
                let smallest = same.into_iter().min_by_key(|(other, known)| content(other, known.file_bytes));
                let (other, known) = smallest
                    .filter(|(other, known)| content(other, known.file_bytes) < content(key, bytes))?;
                space.bytes = space.bytes.saturating_sub(known.file_bytes);
                space.files = space.files.saturating_sub(1);
                evicted.push(other.clone());
            }
        }
        // What pods have beyond their part.
        let mut surplus = 0;
        if key.kind == Kind::Pod && bytes > former {
            let pods = self.known.iter().filter(|(other, _)| other.kind == Kind::Pod);
            let sum: u64 = pods.map(|(_, known)| known.file_bytes).sum();
            surplus = sum.saturating_sub(former).saturating_add(bytes).saturating_sub(MAX_POD_BYTES);
        }
        if space.is_enough() && surplus == 0 {
            return Some(evicted);
        }
        let mut own = Group { bytes, files: vec![(bytes, key)] };
        let mut others: BTreeMap<(bool, (&str, &str)), Group<'_>> = BTreeMap::new();
        for (other, known) in self.known.iter().filter(|(other, _)| *other != key && !evicted.contains(other))
        {
            let group = (comes_first(other.kind), other.owner());
            if group == (is_first, key.owner()) {
                own.add(other, known.file_bytes);
            } else if (is_first || !group.0) && (!is_of_pod(key.kind) || is_of_pod(other.kind)) {
                others.entry(group).or_default().add(other, known.file_bytes);
            }
        }
        // The smallest first.
        others.values_mut().for_each(|group| group.files.sort_unstable());
        let own = (own.bytes, own.files.len());
        while surplus > 0 || !space.is_enough() {
            let is_surplus = surplus > 0;
            let by_bytes = is_surplus || space.bytes > space.max_bytes;
            let has_more = |group: &Group<'_>| match by_bytes {
                true => group.bytes > own.0,
                false => group.files.len() > own.1,
            };
            let size = |group: &Group<'_>| if by_bytes { group.bytes } else { group.files.len() as u64 };
            let (_, group) = others
                .iter_mut()
                .filter(|((is_pod, _), _)| *is_pod || !is_surplus)
                .filter(|((is_pod, _), group)| has_more(group) || (is_first && !is_pod))
                .filter(|(_, group)| group.files.iter().any(|(_, key)| may_go(key)))
                .max_by_key(|((is_pod, _), group)| (!is_pod, size(group)))?;
            let place = group.files.iter().rposition(|(_, key)| may_go(key))?;
            let (file_bytes, key) = group.files.remove(place);
            group.bytes = group.bytes.saturating_sub(file_bytes);
            surplus = surplus.saturating_sub(file_bytes);
            space.bytes = space.bytes.saturating_sub(file_bytes);
            space.files = space.files.saturating_sub(1);
            evicted.push(key.clone());
        }
        Some(evicted)
    }

    #[cfg(test)]
    pub(super) fn set_full(&mut self) {
        self.bytes = MAX_BYTES - RESERVED_BYTES;
    }

    fn insert(&mut self, key: Key, digest: Option<Digest>, file_bytes: u64) {
        let known = Known { digest, file_bytes };
        let former = self.known.insert(key, known).map_or(0, |former| former.file_bytes);
        self.bytes = self.bytes.saturating_sub(former).saturating_add(file_bytes);
    }

    fn forget(&mut self, key: &Key) {
        if let Some(known) = self.known.remove(key) {
            self.bytes = self.bytes.saturating_sub(known.file_bytes);
        }
    }
}

/// What all files need, and may need.
struct Space {
    bytes: u64,
    files: usize,
    max_bytes: u64,
    max_files: usize,
}

impl Space {
    fn is_enough(&self) -> bool {
        self.bytes <= self.max_bytes && self.files <= self.max_files
    }
}

/// The files of an owner, with their bytes.
#[derive(Default)]
struct Group<'a> {
    bytes: u64,
    files: Vec<(u64, &'a Key)>,
}

impl<'a> Group<'a> {
    fn add(&mut self, key: &'a Key, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.files.push((bytes, key));
    }
}

/// Whether another object may push this one out: without its status an ended pod would run again, and
/// without the last contact a pod too long. Without the UID of the cluster, another one would be accepted.
fn may_go(key: &Key) -> bool {
    !matches!(key.kind, Kind::Node | Kind::PodStatus | Kind::Contact | Kind::Cluster)
}

/// See [`MAX_SHARED`].
fn is_shared(kind: Kind) -> bool {
    matches!(kind, Kind::CsiDriver | Kind::TrustBundles)
}

/// Removes the largest files that are not of pods, until all have at most [`MAX_BYTES`], and returns the
/// others: another version may have had another limit. None of them is read. Files that are larger than
/// any file of ours are put aside first, and, if those of pods alone are too large, the largest of these.
fn remove_largest(
    files: &Files,
    mut found: Vec<(String, u64)>,
    problems: &mut Problems,
) -> Vec<(String, u64)> {
    let mut sum: u64 = found.iter().map(|(_, bytes)| read_bytes(*bytes)).sum();
    if sum <= MAX_BYTES {
        return found;
    }
    let is_pod = |name: &str| kind_of_file(name).is_some_and(comes_first);
    let is_foreign = |bytes: u64| bytes > read_bytes(bytes);
    found.sort_by_key(|(name, bytes)| (!is_foreign(*bytes), is_pod(name), Reverse(*bytes)));
    found.retain(|(name, bytes)| {
        if sum <= MAX_BYTES {
            return true;
        }
        sum = sum.saturating_sub(read_bytes(*bytes));
        let reason = FileError::Full;
        if is_foreign(*bytes) || is_pod(name) {
            files.put_file_aside(name, &reason.to_string());
        } else if let Err(error) = files.remove_file(name) {
            log::warn!("cannot remove the stored object {name}: {error}");
        }
        problems.add(|| format!("{name} ({bytes} bytes) is not used any more: {reason}"));
        false
    });
    found
}

/// Whether the limits reserve space for this kind.
fn comes_first(kind: Kind) -> bool {
    matches!(kind, Kind::Node | Kind::Pod | Kind::PodStatus | Kind::Contact | Kind::Cluster)
}

/// Whether each pod has its own objects of this kind, which do not come first.
fn is_of_pod(kind: Kind) -> bool {
    matches!(kind, Kind::Token | Kind::PodCertificate)
}

fn digest(body: &[u8]) -> Digest {
    Secret::new(sha256(body).first_chunk().copied().unwrap_or_default())
}

/// Texts, of which a damaged directory may cause thousands.
#[derive(Debug, Default)]
struct Problems {
    named: Vec<String>,
    more: usize,
}

impl Problems {
    fn add(&mut self, text: impl FnOnce() -> String) {
        match self.named.len() < MAX_PROBLEMS {
            true => self.named.push(text()),
            false => self.more += 1,
        }
    }

    fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.named.push(format!("{} more stored objects", self.more));
        }
        self.named
    }
}

#[cfg(test)]
mod tests;
