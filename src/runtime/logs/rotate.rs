//! Log rotation: a file that has grown too large gets another name, older ones are
//! compressed, the oldest go (Go: pkg/kubelet/logs). The plan is pure.
//!
//! The newest rotated file stays plain: the runtime may still write its last line there.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Zoned;

use super::LogError;
use crate::cri::RuntimeClient;
use crate::model::ids::ContainerId;
use crate::util::stop::StopToken;

/// Compressed at once between two looks at the stop token.
const BLOCK: usize = 64 * 1024;

/// `containerLogMaxSize` and `containerLogMaxFiles`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// A file of this size is rotated; `None`: never.
    pub max_bytes: Option<u64>,
    /// The current file and the rotated ones together; at least 2.
    pub max_files: usize,
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

    /// Looks at the size of every given log and rotates what is too large. To be called
    /// with running containers only; entries with an empty path are skipped. An error of
    /// one log does not keep the others from being looked at.
    pub fn rotate_all(&self, containers: &[(ContainerId, PathBuf)], stop: &StopToken) -> Vec<LogError> {
        let mut errors = Vec::new();
        for (container, log) in containers {
            if stop.is_stopped() {
                break;
            }
            match self.rotate(container, log, stop) {
                Ok(()) => {}
                Err(LogError::Stopping) => break,
                Err(error) => errors.push(error),
            }
        }
        errors
    }

    fn rotate(&self, container: &ContainerId, log: &Path, stop: &StopToken) -> Result<(), LogError> {
        let (Some(limit), Some(name), Some(dir)) =
            (self.settings.max_bytes, log.file_name().and_then(|name| name.to_str()), log.parent())
        else {
            return Ok(());
        };
        let size = match fs::metadata(log) {
            Ok(metadata) => Some(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(LogError::io("look at", log)(error)),
        };
        // The usual case costs one call; the directory is listed only when it matters.
        if size.is_some_and(|size| size < limit) {
            return Ok(());
        }
        let listing = if size.is_some() { list(dir, name)? } else { Vec::new() };
        let now = Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
        match plan_rotation(name, size, &listing, self.settings, &now) {
            Plan::Nothing => Ok(()),
            Plan::ReopenOnly => self.reopen(container),
            Plan::Rotate { delete, compress, rename_to } => {
                for name in delete {
                    remove(&dir.join(name))?;
                }
                for name in compress {
                    compress_file(&dir.join(name), stop)?;
                }
                let rotated = dir.join(rename_to);
                fs::rename(log, &rotated).map_err(LogError::io("rename", log))?;
                self.reopen(container).inspect_err(|_| {
                    // The runtime still writes to this file. If it did open the new one after
                    // all, that one is a few lines old at most; upstream overwrites it, too.
                    if let Err(error) = fs::rename(&rotated, log) {
                        log::warn!("cannot rename {} back: {error}", rotated.display());
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

/// Decides from the log's name and size, the names `<log>.*` beside it, and the local
/// time as `YYYYMMDD-HHMMSS`.
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
    let prefix = format!("{log}.");
    let is_unused =
        |name: &String| name.ends_with(".tmp") || listing.iter().any(|other| *other == format!("{name}.gz"));
    let (mut delete, mut rotated): (Vec<String>, Vec<String>) =
        listing.iter().filter(|name| name.starts_with(&prefix)).cloned().partition(is_unused);
    // The time in the name orders them. The current file and the one it becomes need two places.
    rotated.sort();
    let excess = rotated.len().saturating_sub(settings.max_files.saturating_sub(2));
    delete.extend(rotated.drain(..excess));
    delete.sort();
    let compress = rotated.into_iter().filter(|name| !name.ends_with(".gz")).collect();
    Plan::Rotate { delete, compress, rename_to }
}

fn list(dir: &Path, log: &str) -> Result<Vec<String>, LogError> {
    let prefix = format!("{log}.");
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(LogError::io("list the directory of", dir))? {
        let entry = entry.map_err(LogError::io("list the directory of", dir))?;
        if let Some(name) = entry.file_name().to_str().filter(|name| name.starts_with(&prefix)) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn remove(path: &Path) -> Result<(), LogError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(LogError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// `<path>` becomes `<path>.gz` by way of `<path>.gz.tmp`, so that a half-written file is
/// known as such after a crash.
fn compress_file(path: &Path, stop: &StopToken) -> Result<(), LogError> {
    let with = |suffix: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        PathBuf::from(name)
    };
    let (temporary, finished) = (with(".gz.tmp"), with(".gz"));
    let result = write_compressed(path, &temporary, stop).and_then(|()| {
        fs::rename(&temporary, &finished).map_err(LogError::io("rename", &temporary))?;
        remove(path)
    });
    if result.is_err() {
        // Best effort: the next rotation removes it, too.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn write_compressed(path: &Path, temporary: &Path, stop: &StopToken) -> Result<(), LogError> {
    let mut source = File::open(path).map_err(LogError::io("open", path))?;
    let target = File::create(temporary).map_err(LogError::io("create", temporary))?;
    let mut encoder = GzEncoder::new(target, Compression::default());
    let mut block = vec![0; BLOCK];
    loop {
        if stop.is_stopped() {
            return Err(LogError::Stopping);
        }
        let length = source.read(&mut block).map_err(LogError::io("read", path))?;
        if length == 0 {
            break;
        }
        let part = block.get(..length).unwrap_or_default();
        encoder.write_all(part).map_err(LogError::io("write", temporary))?;
    }
    encoder.finish().map_err(LogError::io("write", temporary))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const NOW: &str = "20260102-030405";

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn plans() {
        let settings = Settings { max_bytes: Some(10), max_files: 5 };
        let rotate = |delete: &[&str], compress: &[&str]| Plan::Rotate {
            delete: names(delete),
            compress: names(compress),
            rename_to: format!("0.log.{NOW}"),
        };
        let check = |size, listing: &[&str], expected: Plan| {
            assert_eq!(plan_rotation("0.log", size, &names(listing), settings, NOW), expected, "{listing:?}");
        };
        check(None, &[], Plan::ReopenOnly);
        check(Some(9), &["0.log.1"], Plan::Nothing);
        check(Some(10), &[], rotate(&[], &[]));
        check(Some(10), &["0.log.1"], rotate(&[], &["0.log.1"]));
        check(Some(10), &["0.log.1.gz", "0.log.2"], rotate(&[], &["0.log.2"]));
        check(
            Some(10),
            &["0.log.4", "0.log.3.gz", "0.log.2.gz", "0.log.1.gz"],
            rotate(&["0.log.1.gz"], &["0.log.4"]),
        );
        check(
            Some(10),
            &["0.log.2", "0.log.2.gz", "0.log.3.gz.tmp", "0.log.3"],
            rotate(&["0.log.2", "0.log.3.gz.tmp"], &["0.log.3"]),
        );
        check(Some(10), &["10.log.1", "0.logs"], rotate(&[], &[]));
        check(Some(10), &[&format!("0.log.{NOW}")], Plan::Nothing);
        let least = Settings { max_bytes: Some(10), max_files: 2 };
        assert_eq!(
            plan_rotation("0.log", Some(10), &names(&["0.log.1"]), least, NOW),
            rotate(&["0.log.1"], &[])
        );
        let off = Settings { max_bytes: None, max_files: 5 };
        assert_eq!(plan_rotation("0.log", Some(1 << 40), &[], off, NOW), Plan::Nothing);
    }

    /// A runtime that opens the new file, unless it is told to fail.
    struct Fake {
        log: PathBuf,
        fail: bool,
        calls: RefCell<u32>,
    }

    impl Reopen for Fake {
        fn reopen_log(&self, _: &ContainerId) -> Result<(), String> {
            *self.calls.borrow_mut() += 1;
            if self.fail {
                return Err("no".to_owned());
            }
            fs::write(&self.log, "new").map_err(|error| error.to_string())
        }
    }

    fn rotate_once(log: &Path, fail: bool) -> (Vec<LogError>, u32) {
        let settings = Settings { max_bytes: Some(4), max_files: 3 };
        let fake = Fake { log: log.to_owned(), fail, calls: RefCell::default() };
        let rotator = Rotator::new(settings, fake);
        let errors = rotator.rotate_all(&[(ContainerId::from("c"), log.to_owned())], &StopToken::never());
        let calls = *rotator.runtime.calls.borrow();
        (errors, calls)
    }

    fn listing(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn rotates_and_compresses() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        fs::write(&log, "abc").unwrap();
        assert!(matches!(rotate_once(&log, false), (errors, 0) if errors.is_empty()));
        fs::write(&log, "current").unwrap();
        fs::write(dir.path().join("0.log.20200101-000000.gz"), "oldest").unwrap();
        fs::write(dir.path().join("0.log.20200102-000000"), "older older older").unwrap();
        assert!(matches!(rotate_once(&log, false), (errors, 1) if errors.is_empty()));
        let names = listing(dir.path());
        assert_eq!(names.len(), 3, "{names:?}");
        assert_eq!(names[..2], ["0.log", "0.log.20200102-000000.gz"]);
        assert_eq!(fs::read_to_string(&log).unwrap(), "new");
        assert_eq!(fs::read_to_string(dir.path().join(&names[2])).unwrap(), "current");
        let mut text = String::new();
        flate2::read::GzDecoder::new(File::open(dir.path().join(&names[1])).unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "older older older");
    }

    #[test]
    fn a_runtime_that_does_not_reopen_keeps_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        fs::write(&log, "current").unwrap();
        let (errors, _) = rotate_once(&log, true);
        assert!(matches!(&errors[..], [LogError::Reopen { cause, .. }] if cause == "no"));
        assert_eq!(listing(dir.path()), ["0.log"]);
        assert_eq!(fs::read_to_string(&log).unwrap(), "current");
    }

    #[test]
    fn a_missing_log_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        assert_eq!(rotate_once(&log, false).1, 1);
        assert!(log.exists());
    }
}
