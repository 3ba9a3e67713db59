//! Finds the archives in the directories of the set.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::archive::{self, Stamp};
use super::set::Key;

/// Archives of all directories together; further ones are not used.
pub(super) const MOST_ARCHIVES: usize = 1000;
/// Entries of one directory that are inspected.
const MOST_ENTRIES: usize = 10_000;

/// What a scan found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) files: Vec<(Key, Stamp)>,
    /// Layout directories, to be watched.
    pub(super) layouts: Vec<PathBuf>,
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
pub(super) fn scan(directories: &[PathBuf]) -> Found {
    let mut found = Found::default();
    for (number, directory) in directories.iter().enumerate() {
        if let Err(error) = scan_one(number, directory, &mut found)
            && error.kind() != io::ErrorKind::NotFound
        {
            found.problems.push(format!("cannot read {}: {error}", directory.display()));
        }
    }
    if found.files.len() > MOST_ARCHIVES {
        found.files.truncate(MOST_ARCHIVES);
        found
            .problems
            .push(format!("there are more than {MOST_ARCHIVES} image archives; the others are not used"));
    }
    found
}

fn scan_one(number: usize, directory: &Path, found: &mut Found) -> io::Result<()> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)?.take(MOST_ENTRIES) {
        let entry = entry?;
        let kind = entry.file_type()?;
        if is_candidate(&entry.file_name()) && (kind.is_file() || kind.is_dir()) {
            names.push((entry.path(), kind.is_dir()));
        }
    }
    names.sort();
    for (path, is_directory) in names {
        if is_directory && !path.join("oci-layout").is_file() {
            continue;
        }
        match archive::stamp(&path) {
            Ok(stamp) => {
                if is_directory {
                    found.layouts.push(path.clone());
                }
                found.files.push(((number, path), stamp));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => found.problems.push(format!("cannot read {}: {error}", path.display())),
        }
    }
    Ok(())
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
    }
}
