//! Log rotation: a file that has grown too large gets another name, older ones are
//! compressed, the oldest go (Go: pkg/kubelet/logs). The plan is pure.
//!
//! The newest rotated file stays plain: the runtime may still write its last line there.
//!
//! A pod with a writable log directory can put anything in the place of each file and directory
//! here, at any moment. So every operation is on the held directory of the log; only regular
//! files with names of the rotation's own form are listed, read or removed; no link is followed;
//! files are only made where nothing is.
//! DIFFERS: upstream follows links, and removes and compresses every file whose name begins with the
//! log's.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Zoned;
use rustix::fs::{AtFlags, Dir, FileType, RenameFlags, renameat, renameat_with, statat, unlinkat};
use rustix::io::Errno;

use super::LogError;
use crate::cri::RuntimeClient;
use crate::model::ids::ContainerId;
use crate::model::log_line::LOG_LEVELS;
use crate::util::stop::StopToken;
use crate::util::untrusted::{self, Place};

/// Bytes compressed between two checks of the stop token.
const BLOCK: usize = 64 * 1024;

/// Entries of a log's directory that one pass lists. Honest directories hold a few files; in
/// others the rest is for the next pass.
const ENTRIES: usize = 10_000;

/// What one pass over all logs compresses at most: some ten seconds of a slow processor. Files for
/// which nothing is left stay plain until a later pass, or until they are the oldest.
/// DIFFERS: upstream compresses any size.
const COMPRESS_BYTES: u64 = 256 * 1024 * 1024;

/// Errors of single files that one pass returns.
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
    /// Bytes that one pass may compress. Where logs may be larger than usual, one of them fits.
    fn compress_bytes(self) -> u64 {
        COMPRESS_BYTES.max(self.max_bytes.unwrap_or(0).saturating_mul(2))
    }
}

/// The one call to the runtime that rotation needs.
pub trait Reopen {
    /// Makes the runtime close the renamed log and open a new one under the old name.
    ///
    /// # Errors
    /// The runtime's words.
    fn reopen_log(&self, container: &ContainerId) -> Result<(), String>;
}

impl Reopen for RuntimeClient {
    fn reopen_log(&self, container: &ContainerId) -> Result<(), String> {
        self.reopen_container_log(container).map_err(|error| error.to_string())
    }
}

/// What to do with the log of one container, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// There is no log file: the runtime should open it.
    ReopenOnly,
    /// It is small enough.
    Nothing,
    /// It has to be rotated. All are names in the log's directory.
    Rotate {
        /// Half-written files, files that were compressed meanwhile, and the oldest ones.
        delete: Vec<String>,
        /// Plain rotated files.
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
        let mut pass = Pass { compress_bytes: self.settings.compress_bytes(), errors: Vec::new() };
        for (container, log) in containers {
            match self.rotate(container, log, &mut pass, stop) {
                Ok(()) => {}
                Err(LogError::Stopping) => break,
                Err(error) => pass.errors.push(error),
            }
        }
        pass.errors
    }

    fn rotate(
        &self,
        container: &ContainerId,
        log: &Path,
        pass: &mut Pass,
        stop: &StopToken,
    ) -> Result<(), LogError> {
        let (Some(limit), Some(name)) =
            (self.settings.max_bytes, log.file_name().and_then(|name| name.to_str()))
        else {
            return Ok(());
        };
        if stop.is_stopped() {
            return Err(LogError::Stopping);
        }
        let place = match Place::find(log, LOG_LEVELS) {
            Ok(place) => place,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.reopen(container),
            Err(error) => return Err(LogError::io("look at", log)(error)),
        };
        let size = match place.stat().map_err(LogError::io("look at", log))? {
            None => None,
            Some(stat) if untrusted::is_file(&stat) => Some(u64::try_from(stat.st_size).unwrap_or(0)),
            // The runtime would open whatever this leads to.
            Some(_) => return Err(LogError::Kind { path: log.to_owned() }),
        };
        // The usual case costs few calls; the directory is listed only when it matters.
        if size.is_some_and(|size| size < limit) {
            return Ok(());
        }
        let files = Files { dir: place.dir(), log };
        let listing = if size.is_some() { files.list(name)? } else { Vec::new() };
        let now = Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
        match plan_rotation(name, size, &listing, self.settings, &now) {
            Plan::Nothing => Ok(()),
            Plan::ReopenOnly => self.reopen(container),
            Plan::Rotate { delete, compress, rename_to } => {
                // Neither failure is a reason to let the current file grow on.
                for name in delete {
                    pass.go_on(files.remove(&name), stop)?;
                }
                for name in compress {
                    let compressed = files.compress(&name, &mut pass.compress_bytes, stop);
                    pass.go_on(compressed, stop)?;
                }
                // Something of the new name came meanwhile: the next look takes another one.
                if !files.rename_to_new(name, &rename_to)? {
                    return Ok(());
                }
                self.reopen(container).inspect_err(|_| {
                    // The runtime still writes to this file. If it did open the new one after
                    // all, that one is a few lines old at most; upstream overwrites it, too.
                    if let Err(error) = renameat(files.dir, &rename_to, files.dir, name) {
                        log::warn!("cannot rename {} back: {error}", files.path(&rename_to).display());
                    }
                })
            }
        }
    }

    fn reopen(&self, container: &ContainerId) -> Result<(), LogError> {
        self.runtime
            .reopen_log(container)
            .map_err(|cause| LogError::Reopen { container: container.clone(), cause })
    }
}

/// One look at all logs.
struct Pass {
    /// What may still be compressed.
    compress_bytes: u64,
    errors: Vec<LogError>,
}

impl Pass {
    /// Keeps an error, but ends with the agent.
    fn go_on(&mut self, done: Result<(), LogError>, stop: &StopToken) -> Result<(), LogError> {
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
enum Form {
    Plain,
    Compressed,
    /// Of a compression that was broken off.
    Partial,
}

impl Form {
    /// `None`: the rotation has not made it.
    fn of(log: &str, name: &str) -> Option<Form> {
        let (stamp, ending) = name.strip_prefix(log)?.strip_prefix('.')?.split_at_checked(15)?;
        let is_time = stamp.bytes().enumerate().all(|(at, byte)| match at {
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

/// Decides from the log's name and size, the names of the files beside it, and the local
/// time as `YYYYMMDD-HHMMSS`. Names that the rotation has not made do not matter.
#[must_use]
pub fn plan_rotation(
    log: &str,
    size: Option<u64>,
    listing: &[String],
    settings: Settings,
    now: &str,
) -> Plan {
    let Some(size) = size else { return Plan::ReopenOnly };
    if settings.max_bytes.is_none_or(|limit| size < limit) {
        return Plan::Nothing;
    }
    let rename_to = format!("{log}.{now}");
    // Two rotations in one second would lose a file; the next look is seconds away.
    if listing.contains(&rename_to) {
        return Plan::Nothing;
    }
    let compressed: BTreeSet<&str> = listing
        .iter()
        .filter(|name| Form::of(log, name) == Some(Form::Compressed))
        .filter_map(|name| name.strip_suffix(".gz"))
        .collect();
    let (mut delete, mut rotated) = (Vec::new(), Vec::new());
    for name in listing {
        match Form::of(log, name) {
            None => {}
            Some(Form::Partial) => delete.push(name.clone()),
            Some(Form::Plain) if compressed.contains(name.as_str()) => delete.push(name.clone()),
            Some(Form::Plain | Form::Compressed) => rotated.push(name.clone()),
        }
    }
    // The time in the name orders them. The current file and the one it becomes need two places.
    rotated.sort();
    let excess = rotated.len().saturating_sub(settings.max_files.saturating_sub(2));
    delete.extend(rotated.drain(..excess));
    delete.sort();
    let compress = rotated.into_iter().filter(|name| !name.ends_with(".gz")).collect();
    Plan::Rotate { delete, compress, rename_to }
}

/// The files beside a log.
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
            if Form::of(log, name).is_none() {
                continue;
            }
            let is_file = match entry.file_type() {
                FileType::RegularFile => true,
                // Some file systems do not tell the type when listing.
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

    /// Gone is fine.
    fn remove(&self, name: &str) -> Result<(), LogError> {
        match unlinkat(self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(self.failed("remove", name)(errno.into())),
        }
    }

    /// Renames a file unless there is something of the new name already; whether it did.
    fn rename_to_new(&self, from: &str, to: &str) -> Result<bool, LogError> {
        let renamed = match renameat_with(self.dir, from, self.dir, to, RenameFlags::NOREPLACE) {
            // A file system, or a kernel, that cannot do both in one step.
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

    /// `<name>` becomes `<name>.gz` by way of `<name>.gz.tmp`, so that a half-written file is
    /// known as such after a crash. One that is larger than `left` stays as it is.
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
            // The next rotation would remove it, too.
            Ok(false) => self.remove(&temporary),
            Err(error) => {
                let _ = self.remove(&temporary);
                Err(error)
            }
        }
    }

    /// Whether all of the source could be written: it may have grown.
    fn write_compressed(
        &self,
        (name, mut source): (&str, File),
        temporary: &str,
        left: &mut u64,
        stop: &StopToken,
    ) -> Result<bool, LogError> {
        let target = untrusted::create_at(self.dir, Path::new(temporary), MODE)
            .map_err(self.failed("create", temporary))?;
        let mut encoder = GzEncoder::new(target, Compression::default());
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
        encoder.finish().map_err(self.failed("write", temporary))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
