//! The size of a file system whose server may not respond: measured on its own thread, with a limit
//! of time.
//!
//! A thread that hangs is left behind until the kernel ends its call. Its file system is not
//! measured again before that.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::bounded;

use super::sample::FileSystem;
use super::space;
use crate::util::threads::{self, OnDeath, Stack};

/// The wait for one file system.
const LIMIT: Duration = Duration::from_secs(5);
/// Measurements that may hang at the same time.
const MAX_HUNG: usize = 16;

static UNDER_WAY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The file system of a volume, unless it hangs.
pub(super) fn file_system(path: &Path) -> Option<FileSystem> {
    let measured = path.to_owned();
    within(path, LIMIT, move || space::file_system(&measured))
}

struct Entry(PathBuf);

impl Drop for Entry {
    fn drop(&mut self) {
        let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|path| *path != self.0);
    }
}

fn within<T: Send + 'static>(
    path: &Path,
    limit: Duration,
    measure: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    let entry = {
        let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_HUNG || all.iter().any(|other| other == path) {
            return None;
        }
        all.push(path.to_owned());
        Entry(path.to_owned())
    };
    let (report, reported) = bounded(1);
    let running = threads::spawn("vol/stat", Stack::Small, OnDeath::Unsupervised, move |_| {
        let entry = entry;
        let _waiting = threads::waiting("size of a volume's file system");
        let result = measure();
        drop(entry);
        // The caller may have stopped waiting.
        let _ = report.send(result);
    })
    .ok()?;
    match reported.recv_timeout(limit) {
        Ok(result) => {
            drop(running);
            result
        }
        Err(_) => {
            running.leave();
            log::warn!("the file system at {} does not respond", path.display());
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_that_hangs_costs_one_thread() {
        let (release, hold) = bounded::<()>(0);
        let path = Path::new("/t/hangs");
        let short = Duration::from_millis(20);
        let hang = move || {
            let _ = hold.recv();
            Some(1)
        };
        assert_eq!(within(path, short, hang), None);
        assert_eq!(within(path, LIMIT, || Some(2)), None, "the first one still hangs");
        assert_eq!(within(Path::new("/t/other"), LIMIT, || Some(3)), Some(3));
        drop(release);
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while within(path, LIMIT, || Some(4)).is_none() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(within(path, LIMIT, || Some(5)), Some(5));
        assert!(file_system(Path::new("/")).is_some());
    }
}
