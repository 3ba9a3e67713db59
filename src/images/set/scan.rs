//! Finds the archives in the directories of the set.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, DirEntry, statat};

use super::archive::{self, Stamp};
use super::entries::Key;

/// Archives of all directories together; further ones are not used.
pub(super) const MAX_ARCHIVES: usize = 1000;
/// Entries of one directory that are inspected.
const MAX_ENTRIES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct ScannedDirectories {
    pub(super) files: Vec<(Key, Stamp)>,
    /// Directories of the archives' directories, to be watched: layouts, and what may become one.
    pub(super) inner: Vec<PathBuf>,
    /// Directories and archives of which it is not known whether they are there.
    pub(super) unreadable: Vec<Key>,
    /// Directories that could not be read, and other problems, as sentences.
    pub(super) problems: Vec<String>,
}

/// Whether a file of this name can be an archive. Hidden files are incomplete copies, or belong to
/// an editor.
fn is_candidate(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    !bytes.starts_with(b".")
        && bytes != b"lost+found"
        && ![&b".part"[..], b".tmp", b"~"].iter().any(|end| bytes.ends_with(end))
}

/// Lists the archives: regular files, and directories with the file `oci-layout`. A directory that
/// does not exist has none.
pub(super) fn scan(directories: &[PathBuf]) -> ScannedDirectories {
    let mut found = ScannedDirectories::default();
    for (number, directory) in directories.iter().enumerate() {
        if let Err(error) = scan_directory(number, directory, &mut found)
            && error.kind() != io::ErrorKind::NotFound
        {
            found.unreadable.push((number, directory.clone()));
            found.problems.push(format!("cannot read {}: {error}", directory.display()));
        }
    }
    if found.files.len() > MAX_ARCHIVES {
        found.files.truncate(MAX_ARCHIVES);
        found
            .problems
            .push(format!("there are more than {MAX_ARCHIVES} image archives; the others are not used"));
    }
    found
}

fn scan_directory(number: usize, directory: &Path, found: &mut ScannedDirectories) -> io::Result<()> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)?.take(MAX_ENTRIES) {
        let entry = entry?;
        let kind = match entry.file_type() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            kind => kind?,
        };
        if is_candidate(&entry.file_name()) && (kind.is_file() || kind.is_dir()) {
            names.push((entry.path(), kind.is_dir()));
        }
    }
    names.sort();
    for (path, is_directory) in names {
        if is_directory {
            found.inner.push(path.clone());
            match std::fs::metadata(path.join("oci-layout")) {
                Ok(_) => found.inner.push(archive::blobs_path(&path)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // The stamp has the same error, or it will be found when the layout is read.
                Err(_) => {}
            }
        }
        match archive::stamp(&path) {
            Ok(stamp) => found.files.push(((number, path), stamp)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                found.problems.push(format!("cannot read {}: {error}", path.display()));
                // Another kind of file is no archive, for certain.
                if error.kind() != io::ErrorKind::InvalidInput {
                    found.unreadable.push((number, path));
                }
            }
        }
    }
    Ok(())
}

/// The blobs of a layout directory, which change without its `index.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Blobs {
    number: u64,
    bytes: u64,
    newest_ns: i64,
}

/// Number, size and time of the blobs of a layout, without reading them.
pub(super) fn blobs(layout: &Path) -> Blobs {
    let mut blobs = Blobs::default();
    let Ok(directory) = archive::blobs(layout) else { return blobs };
    let Ok(entries) = Dir::read_from(&directory) else { return blobs };
    let stamp = |entry: DirEntry| {
        let name = entry.file_name();
        let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
        if matches!(name.to_bytes(), b"." | b"..") { None } else { Some(Stamp::from_stat(&stat.ok()?)) }
    };
    for stamp in entries.take(MAX_ENTRIES).filter_map(|entry| stamp(entry.ok()?)) {
        blobs.number += 1;
        blobs.bytes = blobs.bytes.saturating_add(stamp.size);
        blobs.newest_ns = blobs.newest_ns.max(stamp.ctime_ns);
    }
    blobs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_visible_files_and_layout_directories_are_archives() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.tar", "a.tar.gz", ".c.tar.part", "d.tar.part", "notes~"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        for name in ["layout", "other", "lost+found"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        std::fs::write(dir.path().join("layout/oci-layout"), "{}").unwrap();
        std::fs::write(dir.path().join("layout/index.json"), "{}").unwrap();
        std::os::unix::fs::symlink("b.tar", dir.path().join("link.tar")).unwrap();
        let found = scan(&[dir.path().to_owned(), dir.path().join("missing")]);
        let names: Vec<_> =
            found.files.iter().map(|((number, path), _)| (*number, path.file_name().unwrap())).collect();
        assert_eq!(names, [(0, OsStr::new("a.tar.gz")), (0, OsStr::new("b.tar")), (0, OsStr::new("layout"))]);
        assert_eq!(found.problems, [""; 0]);
        // Also those that are not complete yet.
        let inner: Vec<_> = found.inner.iter().map(|path| path.strip_prefix(dir.path()).unwrap()).collect();
        assert_eq!(inner, ["layout", "layout/blobs/sha256", "other"].map(Path::new));
        assert_eq!(found.unreadable, []);
    }

    #[test]
    fn directory_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loop");
        std::os::unix::fs::symlink("loop", &path).unwrap();
        let found = scan(&[dir.path().join("missing"), path.clone()]);
        assert_eq!((found.problems.len(), found.unreadable), (1, vec![(1, path)]));
    }
}
