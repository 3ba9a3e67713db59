//! Counts what the agent writes to disk: on eMMC and SD cards each write shortens the life of the
//! card. Every place of the program that creates or writes a file counts here (`tests/tidy.rs`
//! checks it). No thread and no timer: a write finds the minute to which it belongs.
//!
//! Log lines are not counted, because they go to standard error; neither are removals of files,
//! changes of owners and modes, and files of cgroups, `/proc` and `/sys`. Files on a tmpfs, such
//! as Secrets, are counted.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use rustix::time::{ClockId, clock_gettime};

use crate::util::lock::LockExt;

/// The minutes of the last hour, the current one included.
const MINUTES: usize = 60;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Files that were created or written, and links and directories that were created.
    pub files: u64,
    /// Bytes of their content.
    pub bytes: u64,
    /// Calls of fsync.
    pub syncs: u64,
}

impl Written {
    const NONE: Written = Written { files: 0, bytes: 0, syncs: 0 };

    fn add(&mut self, more: Written) {
        self.files = self.files.saturating_add(more.files);
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.syncs = self.syncs.saturating_add(more.syncs);
    }
}

/// Counts per minute. A slot is used again after an hour.
struct Counts {
    total: Written,
    /// The minute of each slot, and what was written in it.
    slots: [(u64, Written); MINUTES],
}

impl Counts {
    const fn new() -> Self {
        Counts { total: Written::NONE, slots: [(0, Written::NONE); MINUTES] }
    }

    fn add(&mut self, more: Written, minute: u64) {
        self.total.add(more);
        if let Some((slot_minute, written)) = self.slots.get_mut(minute as usize % MINUTES) {
            if *slot_minute != minute {
                *written = Written::NONE;
                *slot_minute = minute;
            }
            written.add(more);
        }
    }

    fn last_hour(&self, minute: u64) -> Written {
        let mut sum = Written::NONE;
        for (slot_minute, written) in &self.slots {
            if minute.saturating_sub(*slot_minute) < MINUTES as u64 {
                sum.add(*written);
            }
        }
        sum
    }
}

static COUNTS: Mutex<Counts> = Mutex::new(Counts::new());

/// Minutes of the machine's uptime.
fn minute() -> u64 {
    u64::try_from(clock_gettime(ClockId::Monotonic).tv_sec).unwrap_or(0) / 60
}

fn count(more: Written) {
    COUNTS.locked().add(more, minute());
}

/// A file of `bytes` bytes was written, or, with 0, a file, link or directory was created.
pub fn file(bytes: u64) {
    count(Written { files: 1, bytes, syncs: 0 });
}

/// [`file()`] without bytes, if it was created.
///
/// # Errors
/// That of `result`.
pub fn created<T, E>(result: Result<T, E>) -> Result<T, E> {
    if result.is_ok() {
        file(0);
    }
    result
}

/// A file or a directory was synced.
pub fn sync() {
    count(Written { files: 0, bytes: 0, syncs: 1 });
    #[cfg(test)]
    THREAD_SYNCS.set(THREAD_SYNCS.get() + 1);
}

#[cfg(test)]
thread_local! {
    static THREAD_SYNCS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Calls of fsync by the current thread: other tests of the process sync at the same time.
#[cfg(test)]
pub(crate) fn thread_syncs() -> u64 {
    THREAD_SYNCS.get()
}

/// What was written since the start of the process.
pub fn written() -> Written {
    COUNTS.locked().total
}

/// What was written in the last hour.
pub fn written_last_hour() -> Written {
    COUNTS.locked().last_hour(minute())
}

/// Creates a directory and the missing ones above it. The mode applies to all, reduced by the umask.
///
/// # Errors
/// When one of them cannot be created.
pub fn make_directories(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let missing = path
        .ancestors()
        .take_while(|directory| !directory.as_os_str().is_empty() && !directory.exists())
        .count();
    std::fs::DirBuilder::new().recursive(true).mode(mode).create(path)?;
    if missing > 0 {
        count(Written { files: missing as u64, bytes: 0, syncs: 0 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_leave_the_last_hour_without_further_writes() {
        let single = Written { files: 1, bytes: 10, syncs: 1 };
        let mut counts = Counts::new();
        // The first minutes after the start of the machine.
        assert_eq!(counts.last_hour(0), Written::default());
        counts.add(single, 0);
        counts.add(single, 59);
        assert_eq!(counts.last_hour(59), Written { files: 2, bytes: 20, syncs: 2 });
        assert_eq!(counts.last_hour(60), single);
        assert_eq!(counts.last_hour(118), single);
        assert_eq!(counts.last_hour(119), Written::default());
        // The slot of minute 59 is used again, and has nothing of the first hour.
        counts.add(single, 119);
        assert_eq!(counts.last_hour(119), single);
        assert_eq!(counts.total, Written { files: 3, bytes: 30, syncs: 3 });
        // Counters do not wrap.
        counts.add(Written { bytes: u64::MAX, ..single }, 120);
        assert_eq!(counts.total.bytes, u64::MAX);
    }

    /// Other tests of this process count at the same time, so only lower bounds hold.
    #[test]
    fn directories_that_exist_are_not_counted() {
        let dir = tempfile::tempdir().unwrap();
        let before = written().files;
        make_directories(&dir.path().join("a/b/c"), 0o700).unwrap();
        assert!(written().files >= before + 3);
        assert!(written_last_hour().files >= 3);
        make_directories(&dir.path().join("a/b/c"), 0o700).unwrap();
        std::fs::write(dir.path().join("f"), "").unwrap();
        assert!(make_directories(&dir.path().join("f/x"), 0o700).is_err());
    }
}
