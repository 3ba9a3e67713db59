//! Texts in files of a directory, to find copies of what must not be on a disk.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The regular files below a directory that have one of the texts, in their names or contents. Other file
/// systems are left out, such as the memory in which the volumes of Secrets are.
pub(crate) fn files_with(directory: &Path, texts: &[&str]) -> Vec<PathBuf> {
    files_with_except(directory, texts, &[])
}

/// The same without the directories `except`.
pub(crate) fn files_with_except(directory: &Path, texts: &[&str], except: &[&Path]) -> Vec<PathBuf> {
    let device = fs::metadata(directory).expect("the directory exists").dev();
    let (mut open, mut found) = (vec![directory.to_owned()], Vec::new());
    while let Some(path) = open.pop() {
        // A file may go at any time.
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        if meta.dev() != device || except.contains(&path.as_path()) {
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if texts.iter().any(|text| name.contains(text)) {
            found.push(path.clone());
        }
        if meta.is_dir() {
            open.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
        } else if meta.is_file() {
            let bytes = fs::read(&path).unwrap_or_default();
            let has = |text: &&str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
            if texts.iter().any(has) {
                found.push(path);
            }
        }
    }
    found
}
