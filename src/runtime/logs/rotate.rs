//! Log rotation: a file that is too large is renamed, older ones are compressed, the oldest are
//! removed (Go: pkg/kubelet/logs). The plan is pure.
//!
//! The newest rotated file is not compressed: the runtime may still write its last line to it.
//!
//! A pod with a writable log directory can replace each file and directory here at any moment. So
//! every operation uses an open descriptor of the log's directory; only regular files with names
//! that the rotation makes are listed, read or removed; no link is followed; no existing file is
//! opened for writing.
//! DIFFERS: upstream follows links, and removes and compresses every file whose name begins with the
//! log's.

mod workers;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use jiff::Zoned;
use rustix::fs::{AtFlags, Dir, FileType, RenameFlags, renameat, renameat_with, statat, unlinkat};
use rustix::io::Errno;

use super::LogError;
use crate::cri::RuntimeClient;
use crate::model::ids::ContainerId;
use crate::model::log_line::LOG_LEVELS;
use crate::util::disk_writes;
use crate::util::gzip::Gzip;
use crate::util::stop::StopToken;
use crate::util::untrusted::{self, UntrustedPath};

/// Bytes compressed between two checks of the stop token.
const BLOCK: usize = 64 * 1024;

/// Entries of a log's directory that one pass lists. Normal directories have a few files; in others
/// the next pass lists the rest.
const ENTRIES: usize = 10_000;

/// The limit of what one pass over all logs compresses: some ten seconds of a slow processor. Files
/// beyond it are compressed in a later pass, or removed when they are the oldest.
/// DIFFERS: upstream compresses any size.
const COMPRESS_BYTES: u64 = 256 * 1024 * 1024;

/// The limit of errors of single files that one pass returns.
const ERRORS: usize = 100;

/// Log files are for root and its group, as runtimes make them. DIFFERS: 0644 upstream.
const MODE: u32 = 0o640;

/// `containerLogMaxSize` and `containerLogMaxFiles`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// A file of this size is rotated; `None`: never.
    pub max_bytes: Option<u64>,
    /// The current file and the rotated ones together; at least 2.
    pub max_files: usize,
}

impl Settings {
    /// Bytes that one pass may compress: at least one log of the largest allowed size.
    fn compress_bytes(self) -> u64 {
        COMPRESS_BYTES.max(self.max_bytes.unwrap_or(0).saturating_mul(2))
    }
}

/// The one call to the runtime that rotation needs.
pub trait Reopen {
    /// Makes the runtime close the renamed log and open a new one under the old name.
    ///
    /// # Errors
    /// The runtime's message.
    fn reopen_log(&self, container: &ContainerId) -> Result<(), String>;
}

impl Reopen for RuntimeClient {
    fn reopen_log(&self, container: &ContainerId) -> Result<(), String> {
        self.reopen_container_log(container).map_err(|error| error.to_string())
    }
}

/// The actions for the log of one container, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RotationPlan {
    /// There is no log file: the runtime should open it.
    ReopenOnly,
    /// The log is small enough.
    Nothing,
    /// The log has to be rotated. All are names in the log's directory.
    Rotate {
        /// Partly written files, files that have been compressed, and the oldest ones.
        delete: Vec<String>,
        /// Rotated files that are not compressed yet.
        compress: Vec<String>,
        /// The new name of the current file.
        rename_to: String,
    },
}

/// Rotates the logs of all containers.
#[derive(Debug)]
pub struct Rotator<R> {
    settings: Settings,
    runtime: R,
}

impl<R: Reopen> Rotator<R> {
    /// Nothing happens before [`Rotator::rotate_all`].
    pub fn new(settings: Settings, runtime: R) -> Self {
        Rotator { settings, runtime }
    }

    /// Checks the size of every given log and rotates what is too large. To be called
    /// with running containers only; entries with an empty path are skipped. An error of
    /// one log does not keep the others from being checked.
    pub fn rotate_all(&self, containers: &[(ContainerId, PathBuf)], stop: &StopToken) -> Vec<LogError> {
        let mut pass = self.pass();
        for (container, log) in containers {
            if !self.rotate_in(&mut pass, container, log, stop) {
                break;
            }
        }
        pass.errors
    }

    fn pass(&self) -> Pass {
        Pass { compress_bytes: self.settings.compress_bytes(), errors: Vec::new() }
    }

    /// Returns whether the pass continues.
    fn rotate_in(&self, pass: &mut Pass, container: &ContainerId, log: &Path, stop: &StopToken) -> bool {
        match self.rotate(container, log, self.settings, pass, stop) {
            Ok(_) => {}
            Err(LogError::Stopping) => return false,
            Err(error) => pass.errors.push(error),
        }
        true
    }

    /// Rotates the log of a running container, whatever its size. Returns the new name of the file;
    /// the runtime has closed it. `None`: it was not rotated.
    ///
    /// # Errors
    /// When it could not be rotated; it has its name then.
    pub fn rotate_now(
        &self,
        container: &ContainerId,
        log: &Path,
        stop: &StopToken,
    ) -> Result<Option<String>, LogError> {
        let mut pass = Pass { compress_bytes: 0, errors: Vec::new() };
        self.rotate(container, log, Settings { max_bytes: Some(1), ..self.settings }, &mut pass, stop)
    }

    /// Returns the new name of the file if it was rotated.
    fn rotate(
        &self,
        container: &ContainerId,
        log: &Path,
        settings: Settings,
        pass: &mut Pass,
        stop: &StopToken,
    ) -> Result<Option<String>, LogError> {
        let (Some(limit), Some(name)) = (settings.max_bytes, log.file_name().and_then(|name| name.to_str()))
        else {
            return Ok(None);
        };
        if stop.is_stopped() {
            return Err(LogError::Stopping);
        }
        let place = match UntrustedPath::find(log, LOG_LEVELS) {
            Ok(place) => place,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return self.reopen(container).map(|()| None);
            }
            Err(error) => return Err(LogError::io("inspect", log)(error)),
        };
        let size = match place.stat().map_err(LogError::io("inspect", log))? {
            None => None,
            Some(stat) if untrusted::is_file(&stat) => Some(u64::try_from(stat.st_size).unwrap_or(0)),
            // The runtime would open the target of a link.
            Some(_) => return Err(LogError::Kind { path: log.to_owned() }),
        };
        // The usual case needs few calls; the directory is listed only for a rotation.
        if size.is_some_and(|size| size < limit) {
            return Ok(None);
        }
        let files = Files { dir: place.dir(), log };
        let listing = if size.is_some() { files.list(name)? } else { Vec::new() };
        let now = Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
        match plan_rotation(name, size, &listing, settings, &now) {
            RotationPlan::Nothing => Ok(None),
            RotationPlan::ReopenOnly => self.reopen(container).map(|()| None),
            RotationPlan::Rotate { delete, compress, rename_to } => {
                // The current file is rotated even if one of these operations fails.
                for name in delete {
                    pass.record(files.remove(&name), stop)?;
                }
                for name in compress {
                    let compressed = files.compress(&name, &mut pass.compress_bytes, stop);
                    pass.record(compressed, stop)?;
                }
                // A file of the new name was created meanwhile: the next pass uses another name.
                if !files.rename_to_new(name, &rename_to)? {
                    return Ok(None);
                }
                let reopened = self.reopen(container).inspect_err(|_| {
                    // The runtime still writes to this file. If it opened the new one despite the
                    // error, that one has a few lines at most; upstream overwrites it, too.
                    if let Err(error) = renameat(files.dir, &rename_to, files.dir, name) {
                        log::warn!("cannot rename {} back: {error}", files.path(&rename_to).display());
                    }
                });
                reopened.map(|()| Some(rename_to))
            }
        }
    }

    fn reopen(&self, container: &ContainerId) -> Result<(), LogError> {
        self.runtime
            .reopen_log(container)
            .map_err(|cause| LogError::Reopen { container: container.clone(), cause })
    }
}

/// One pass over all logs.
struct Pass {
    /// Bytes that may still be compressed.
    compress_bytes: u64,
    errors: Vec<LogError>,
}

impl Pass {
    /// Records an error so that the pass continues; returns it if the agent stops.
    fn record(&mut self, done: Result<(), LogError>, stop: &StopToken) -> Result<(), LogError> {
        match done {
            Err(LogError::Stopping) => return Err(LogError::Stopping),
            Err(error) if self.errors.len() < ERRORS => self.errors.push(error),
            _ => {}
        }
        if stop.is_stopped() { Err(LogError::Stopping) } else { Ok(()) }
    }
}

/// The forms of a rotated file's name: `<log>.YYYYMMDD-HHMMSS` and an ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Plain,
    Compressed,
    /// The output of an interrupted compression.
    Partial,
}

impl Form {
    /// `None`: not a file of the rotation.
    pub(super) fn parse(log: &str, name: &str) -> Option<Form> {
        let (stamp, ending) = name.strip_prefix(log)?.strip_prefix('.')?.split_at_checked(15)?;
        let is_time = stamp.bytes().enumerate().all(|(index, byte)| match index {
            8 => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
        match ending {
            _ if !is_time => None,
            "" => Some(Form::Plain),
            ".gz" => Some(Form::Compressed),
            ".tmp" | ".gz.tmp" => Some(Form::Partial),
            _ => None,
        }
    }
}

/// Decides from the log's name and size, the names of the files beside it, and the local time as
/// `YYYYMMDD-HHMMSS`. Names of other files are ignored.
#[must_use]
pub fn plan_rotation(
    log: &str,
    size: Option<u64>,
    listing: &[String],
    settings: Settings,
    now: &str,
) -> RotationPlan {
    let Some(size) = size else { return RotationPlan::ReopenOnly };
    if settings.max_bytes.is_none_or(|limit| size < limit) {
        return RotationPlan::Nothing;
    }
    let rename_to = format!("{log}.{now}");
    // Two rotations in one second would lose a file; the next pass follows in seconds.
    if listing.contains(&rename_to) {
        return RotationPlan::Nothing;
    }
    let compressed: BTreeSet<&str> = listing
        .iter()
        .filter(|name| Form::parse(log, name) == Some(Form::Compressed))
        .filter_map(|name| name.strip_suffix(".gz"))
        .collect();
    let (mut delete, mut rotated) = (Vec::new(), Vec::new());
    for name in listing {
        match Form::parse(log, name) {
            None => {}
            Some(Form::Partial) => delete.push(name.clone()),
            Some(Form::Plain) if compressed.contains(name.as_str()) => delete.push(name.clone()),
            Some(Form::Plain | Form::Compressed) => rotated.push(name.clone()),
        }
    }
    // The names sort by time. Two of the allowed files are the current one and its rotated copy.
    rotated.sort();
    let excess = rotated.len().saturating_sub(settings.max_files.saturating_sub(2));
    delete.extend(rotated.drain(..excess));
    delete.sort();
    let compress = rotated.into_iter().filter(|name| !name.ends_with(".gz")).collect();
    RotationPlan::Rotate { delete, compress, rename_to }
}

/// The directory of a log.
struct Files<'a> {
    dir: BorrowedFd<'a>,
    /// For messages.
    log: &'a Path,
}

impl Files<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.log.with_file_name(name)
    }

    fn failed(&self, attempt: &'static str, name: &str) -> impl FnOnce(io::Error) -> LogError + use<> {
        LogError::io(attempt, &self.path(name))
    }

    /// The names of the regular files that earlier rotations have made.
    fn list(&self, log: &str) -> Result<Vec<String>, LogError> {
        let failed = |errno: Errno| LogError::io("list the directory of", self.log)(errno.into());
        let mut names = Vec::new();
        for entry in Dir::read_from(self.dir).map_err(failed)?.take(ENTRIES) {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if Form::parse(log, name).is_none() {
                continue;
            }
            let is_file = match entry.file_type() {
                FileType::RegularFile => true,
                // Some file systems do not report the type in a directory listing.
                FileType::Unknown => statat(self.dir, name, AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|stat| untrusted::is_file(&stat)),
                _ => false,
            };
            if is_file {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// A file that does not exist is no error.
    fn remove(&self, name: &str) -> Result<(), LogError> {
        match unlinkat(self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(self.failed("remove", name)(errno.into())),
        }
    }

    /// Renames a file unless the new name exists; returns whether it was renamed.
    fn rename_to_new(&self, from: &str, to: &str) -> Result<bool, LogError> {
        let renamed = match renameat_with(self.dir, from, self.dir, to, RenameFlags::NOREPLACE) {
            // The file system or the kernel has no rename without replacement.
            Err(Errno::INVAL | Errno::NOSYS) => match statat(self.dir, to, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => renameat(self.dir, from, self.dir, to),
                Ok(_) => Err(Errno::EXIST),
                Err(errno) => Err(errno),
            },
            result => result,
        };
        match renamed {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(self.failed("rename", from)(errno.into())),
        }
    }

    /// `<name>` becomes `<name>.gz` by way of `<name>.gz.tmp`, so that a partly written file is
    /// recognized after a crash. A file larger than `left` is not compressed.
    fn compress(&self, name: &str, left: &mut u64, stop: &StopToken) -> Result<(), LogError> {
        let source = match untrusted::open_at(self.dir, Path::new(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened.map_err(self.failed("open", name))?,
        };
        let length = source.metadata().map_err(self.failed("open", name))?.len();
        if length > *left {
            log::debug!("{} stays uncompressed: it has {length} bytes", self.path(name).display());
            return Ok(());
        }
        let (finished, temporary) = (format!("{name}.gz"), format!("{name}.gz.tmp"));
        self.remove(&temporary)?;
        let mut result = self.write_compressed((name, source), &temporary, left, stop);
        if let Ok(true) = result {
            let renamed = renameat(self.dir, &temporary, self.dir, &finished);
            result = renamed.map_err(|errno| self.failed("rename", &temporary)(errno.into())).map(|()| true);
        }
        match result {
            Ok(true) => self.remove(name),
            // If this fails, the next rotation removes it.
            Ok(false) => self.remove(&temporary),
            Err(error) => {
                let _ = self.remove(&temporary);
                Err(error)
            }
        }
    }

    /// Whether all of the source was written: it may have grown.
    fn write_compressed(
        &self,
        (name, mut source): (&str, File),
        temporary: &str,
        left: &mut u64,
        stop: &StopToken,
    ) -> Result<bool, LogError> {
        let target = untrusted::create_at(self.dir, Path::new(temporary), MODE)
            .map_err(self.failed("create", temporary))?;
        let mut encoder = Gzip::small(target);
        let mut block = vec![0; BLOCK];
        loop {
            if stop.is_stopped() {
                return Err(LogError::Stopping);
            }
            let length = source.read(&mut block).map_err(self.failed("read", name))?;
            if length == 0 {
                break;
            }
            let Some(rest) = left.checked_sub(length as u64) else { return Ok(false) };
            *left = rest;
            let part = block.get(..length).unwrap_or_default();
            encoder.write_all(part).map_err(self.failed("write", temporary))?;
        }
        let target = encoder.finish().map_err(self.failed("write", temporary))?;
        disk_writes::file(target.metadata().map_or(0, |found| found.len()));
        // DIFFERS: upstream leaves the time of the compression. The quota removes the oldest files
        // first, so this one must be as old as its content.
        if let Ok(modified) = source.metadata().and_then(|found| found.modified()) {
            let _ = target.set_modified(modified);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
