//! The index of archives on disk: what was found in each, so that an unchanged archive is not read
//! again after a restart. A damaged index is ignored; then the archives are read again.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::archive::{Archive, Stamp};
use crate::util::{atomic_file, disk_writes, sha256, state_files, untrusted};

/// The version of the format; a file of another version is ignored.
const VERSION: u32 = 2;
/// A larger file is ignored.
const MAX_BYTES: u64 = 64 << 20;

/// One archive in the file.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Saved<'a> {
    path: PathBuf,
    archive: std::borrow::Cow<'a, Archive>,
}

/// The first line of the file. The second line has the archives.
#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    /// Of the second line.
    sha256: String,
}

/// What an earlier run found, by path.
pub(super) type SavedArchives = HashMap<PathBuf, Archive>;

/// Reads the index. A missing, damaged or foreign file gives none.
pub(super) fn load(path: &Path) -> SavedArchives {
    match try_load(path) {
        Ok(known) => known,
        Err(error) if error.kind() == io::ErrorKind::NotFound => SavedArchives::new(),
        Err(error) => {
            state_files::report_damaged(path, &format!("{error}; the image archives are read again"));
            SavedArchives::new()
        }
    }
}

fn try_load(path: &Path) -> io::Result<SavedArchives> {
    let file = untrusted::open(path)?;
    let bytes = read_limited(file)?;
    let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text);
    let line_end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| invalid("it is incomplete"))?;
    let (head, body) = bytes.split_at(line_end);
    let head: Head = serde_json::from_slice(head)?;
    if head.version != VERSION {
        return Err(invalid("it has another version"));
    }
    let body = body.get(1..).unwrap_or_default();
    if sha256::sha256_hex(body) != head.sha256 {
        return Err(invalid("its checksum is wrong"));
    }
    let saved: Vec<Saved<'_>> = serde_json::from_slice(body)?;
    Ok(saved.into_iter().map(|entry| (entry.path, entry.archive.into_owned())).collect())
}

fn read_limited(file: std::fs::File) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether what was found in an archive still holds. Only size and time count: the numbers of a
/// removable disk and of its files are others after each start.
pub(super) fn is_same(before: &Stamp, now: &Stamp) -> bool {
    before.size == now.size && before.mtime_ns == now.mtime_ns
}

/// Writes the index, synced with its directory.
///
/// # Errors
/// When the directory or the file cannot be written; an old file is then unchanged.
pub(super) fn save<'a>(
    path: &Path,
    archives: impl Iterator<Item = (&'a PathBuf, &'a Arc<Archive>)>,
) -> io::Result<()> {
    let saved: Vec<Saved<'_>> = archives
        .map(|(path, archive)| Saved { path: path.clone(), archive: std::borrow::Cow::Borrowed(archive) })
        .collect();
    let body = serde_json::to_vec(&saved)?;
    let mut text = serde_json::to_vec(&Head { version: VERSION, sha256: sha256::sha256_hex(&body) })?;
    text.push(b'\n');
    text.extend_from_slice(&body);
    if text.len() as u64 > MAX_BYTES {
        let text = format!("it would have {} bytes; the limit is {MAX_BYTES}", text.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    let directory = path.parent().unwrap_or(Path::new("/"));
    disk_writes::make_directories(directory, 0o750)?;
    atomic_file::write(path, &text, 0o600)?;
    state_files::report_usable(path);
    atomic_file::sync_directory(directory)
}

#[cfg(test)]
mod tests {
    use super::super::archive::{ArchiveFormat, Compression};
    use super::*;

    fn archive() -> Arc<Archive> {
        Arc::new(Archive {
            form: ArchiveFormat::OciTar,
            compression: Compression::None,
            stamp: Stamp { dev: 1, ino: 2, size: 3, mtime_ns: 4, ctime_ns: 5 },
            images: Vec::new(),
            blobs: Default::default(),
            faults: Vec::new(),
        })
    }

    #[test]
    fn saved_index_is_read_again_and_a_damaged_one_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image_set/index.json");
        assert!(load(&path).is_empty());
        let (file, archive) = (PathBuf::from("/images/a.tar"), archive());
        save(&path, std::iter::once((&file, &archive))).unwrap();
        assert_eq!(load(&path).get(&file), Some(&*archive));

        let good = std::fs::read(&path).unwrap();
        for offset in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[offset] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert!(load(&path).is_empty(), "byte {offset}");
            assert!(state_files::problems().iter().any(|(damaged, _)| *damaged == path), "byte {offset}");
            std::fs::write(&path, &good[..offset]).unwrap();
            assert!(load(&path).is_empty(), "{offset} bytes");
        }
        save(&path, std::iter::once((&file, &archive))).unwrap();
        assert!(state_files::problems().iter().all(|(damaged, _)| *damaged != path));
    }

    #[test]
    fn numbers_of_a_removable_disk_do_not_make_an_archive_another_one() {
        let before = Stamp { dev: 1, ino: 2, size: 3, mtime_ns: 4, ctime_ns: 5 };
        assert!(is_same(&before, &Stamp { dev: 9, ino: 9, ctime_ns: 9, ..before }));
        assert!(!is_same(&before, &Stamp { mtime_ns: 9, ..before }));
        assert!(!is_same(&before, &Stamp { size: 9, ..before }));
    }
}
