//! The steps of a set-up: computed first, then shown or done.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::util::{atomic_file, untrusted};

/// What has to be done.
#[derive(Debug, Default)]
pub(super) struct SetupPlan {
    pub steps: Vec<Step>,
    /// What the operator should know.
    pub notes: Vec<String>,
    /// The service of the runtime.
    pub service: &'static str,
    /// Whether the runtime must be restarted.
    pub restart: bool,
}

/// One change.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Write {
        path: PathBuf,
        text: String,
        /// The mode of a new file; an existing one keeps its mode.
        mode: u32,
        /// Whether the present file is kept as `<name>.before-coracle`.
        copy: bool,
        /// The changes for people; a secret is not shown.
        shown: Vec<String>,
    },
    Link {
        path: PathBuf,
        target: PathBuf,
    },
}

impl Step {
    /// Prints the step. `applies`: it is done, too.
    pub(super) fn show(&self, applies: bool, out: &mut dyn Write) -> io::Result<()> {
        let would = if applies { "" } else { "would " };
        match self {
            Step::Write { path, copy, shown, .. } => {
                writeln!(out, "{would}write {}", path.display())?;
                for line in shown {
                    writeln!(out, "  + {line}")?;
                }
                if *copy {
                    writeln!(out, "  the present file stays as {}", backup_path(path).display())?;
                }
                Ok(())
            }
            Step::Link { path, target } => {
                writeln!(out, "{would}make {} a link to {}", path.display(), target.display())
            }
        }
    }

    /// Makes the change.
    ///
    /// # Errors
    /// The text names the file.
    pub(super) fn apply(&self) -> Result<(), String> {
        let (path, done) = match self {
            Step::Write { path, text, mode, copy, .. } => {
                // The directory of the file may be another one than that of its link.
                let written = write(path, text, *mode, *copy);
                (path, written.and_then(|real| sync_parents(&real)))
            }
            Step::Link { path, target } => {
                let link = || {
                    make_parent(path)?;
                    std::os::unix::fs::symlink(target, path)
                };
                (path, link())
            }
        };
        done.and_then(|()| sync_parents(path))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))
    }
}

/// Returns the path of the written file: a link to it stays a link.
fn write(path: &Path, text: &str, mode: u32, copy: bool) -> io::Result<PathBuf> {
    let real = real_path(path)?;
    make_parent(&real)?;
    let mode = match fs::metadata(&real) {
        Ok(present) => present.permissions().mode() & 0o7777,
        Err(_) => mode,
    };
    let backup = backup_path(path);
    // The first copy is the file as it was without coracle.
    if copy && fs::symlink_metadata(&backup).is_err() {
        let present = untrusted::read_own(&real, MAX_BYTES)?;
        atomic_file::write(&backup, &present, mode)?;
    }
    atomic_file::write(&real, text.as_bytes(), mode)?;
    Ok(real)
}

/// The file that a path means. It may be missing, also if the path is a link.
fn real_path(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::canonicalize(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            real => return real,
        }
        let Ok(target) = fs::read_link(&path) else { return Ok(path) };
        // A relative target counts from the directory of the link.
        path.set_file_name(target);
    }
    Err(rustix::io::Errno::LOOP.into())
}

/// A new name survives a loss of power, and so do the directories that were made for it.
fn sync_parents(path: &Path) -> io::Result<()> {
    for directory in path.ancestors().skip(1).filter(|directory| !directory.as_os_str().is_empty()) {
        rustix::fs::fsync(untrusted::directory(directory, 0)?)?;
    }
    Ok(())
}

fn make_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().ok_or(ErrorKind::InvalidInput)?;
    DirBuilder::new().recursive(true).mode(0o755).create(parent)
}

fn backup_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".before-coracle");
    path.with_file_name(name)
}

/// The most links that the kernel follows in a path.
const MAX_LINKS: usize = 40;

/// The largest configuration that is read.
pub(super) const MAX_BYTES: u64 = 1024 * 1024;

/// Reads a configuration; `None`: there is no such file.
///
/// # Errors
/// The text names the file.
pub(super) fn read(path: &Path, limit: u64) -> Result<Option<String>, String> {
    let failed = |error: io::Error| format!("cannot read {}: {error}", path.display());
    match untrusted::read_own(path, limit) {
        Ok(bytes) => {
            let text = String::from_utf8(bytes);
            text.map(Some).map_err(|_| format!("{}: this is not UTF-8 text", path.display()))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}
