//! The files of ConfigMaps and Secrets for static pods: the state of each file, and the thread
//! `src-objects`, which waits on inotify, an eventfd and a timer.
//!
//! Invariants: a fault in a file removes no object that it had before; only regular files are read,
//! without following a link and without waiting; the number of files, their sizes and the bytes of
//! all objects are limited; no message contains a value.
//!
//! The last valid objects of a faulty file are in memory only: the agent writes no copy of a secret.

mod decode;
mod files;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::set::Deps;
use super::watch::{WakeReason, Watch};
use crate::kube::LocalObjects;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::wake::Wake;
use files::Files;

/// The time between full lists; inotify reports changes at once.
const CHECK: Duration = Duration::from_secs(15 * 60);
/// The same without inotify.
const POLL: Duration = Duration::from_secs(20);

/// Starts the thread `src-objects`, which keeps `objects` equal to the files of a directory. A
/// directory that does not exist has no objects.
///
/// # Errors
/// When the kernel cannot create a thread or an eventfd.
pub(crate) fn spawn(directory: &Path, objects: &LocalObjects, deps: &Deps) -> std::io::Result<Running> {
    let wake = Wake::new()?;
    let ring = wake.clone();
    let root = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let root: PathBuf = root.components().collect();
    let (objects, deps) = (objects.clone(), deps.clone());
    let on_death = OnDeath::Supervisor(deps.on_death.clone());
    let running = threads::spawn("src-objects", Stack::Large, on_death, move |stop| {
        run(Watch::new(&root, wake), Files::new(&root), &objects, &deps, &stop);
    })?;
    Ok(running.with_waker(Box::new(move || ring.ring())))
}

fn run(mut watch: Watch, mut files: Files, objects: &LocalObjects, deps: &Deps, stop: &StopToken) {
    while !stop.is_stopped() {
        watch.arm();
        for notice in files.scan(&mut watch, Timestamp::now()) {
            notice.report(deps);
        }
        objects.replace(files.objects(), files.problems());
        let due = Instant::now() + if watch.is_partial() { POLL } else { CHECK };
        if watch.wait(due) == WakeReason::Stopped {
            return;
        }
    }
}

/// Decodes a file, for the fuzz targets.
#[cfg(test)]
pub(super) fn decode_for_fuzzing(bytes: &[u8], exposed: Option<&str>) {
    let _ = decode::read(bytes, exposed);
}

/// The problems of the directory's files, without an agent. `None`: there is no such directory.
#[must_use]
pub(crate) fn check(directory: &Path) -> Option<Vec<String>> {
    let mut files = Files::new(directory);
    files.read_once(Timestamp::now()).then(|| files.problems())
}
