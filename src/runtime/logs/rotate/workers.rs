//! Several logs at once (Go: pkg/kubelet/logs, `processQueueItems`).
//!
//! Upstream has as many workers as the configuration says, always. Here a pass first finds the logs
//! that are too large, on the calling thread; only for several of them there are further threads
//! (`log-rotate`), which end with the pass.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::{ERRORS, Reopen, Rotator};
use crate::model::ids::ContainerId;
use crate::model::log_line::LOG_LEVELS;
use crate::runtime::logs::LogError;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::untrusted::{self, UntrustedPath};

/// Workers at once: each has a thread and uses a processor.
///
/// DIFFERS: upstream has no limit.
const MAX_WORKERS: usize = 32;

type Log = (ContainerId, PathBuf);

impl<R: Reopen + Clone + Send + 'static> Rotator<R> {
    /// As [`Rotator::rotate_all`], with up to `workers` logs at the same time, at most
    /// `MAX_WORKERS`. The limit of what is compressed applies to each worker.
    pub fn rotate_at_once(&self, containers: &[Log], workers: usize, stop: &StopToken) -> Vec<LogError> {
        let due = self.due(containers);
        let more = workers.min(MAX_WORKERS).min(due.len()).saturating_sub(1);
        if more == 0 {
            return self.rotate_all(&due, stop);
        }
        let (sender, queue) = bounded(due.len());
        // There is room for all.
        due.into_iter().for_each(|log| drop(sender.try_send(log)));
        drop(sender);
        let (report, reports) = bounded(more);
        let helpers: Vec<Running> =
            (0..more).filter_map(|_| self.help(queue.clone(), report.clone(), stop.clone())).collect();
        drop(report);
        let mut errors = self.rotate_from(&queue, stop);
        let _waiting = threads::waiting("log rotations");
        loop {
            select_biased! {
                recv(stop.signal()) -> _ => break,
                recv(reports) -> found => match found {
                    Ok(found) => errors.extend(found),
                    Err(_) => break,
                },
            }
        }
        if stop.is_stopped() {
            // Each ends with its file or its call.
            helpers.into_iter().for_each(Running::leave);
        }
        errors.truncate(ERRORS);
        errors
    }

    /// The logs that a pass cannot pass over; of several containers with the same file the first one,
    /// as two workers must not rotate the same file.
    fn due(&self, containers: &[Log]) -> Vec<Log> {
        let Some(limit) = self.settings.max_bytes else { return Vec::new() };
        let mut paths = BTreeSet::new();
        let is_due = |(_, log): &&Log| !is_small(log, limit) && paths.insert(log.clone());
        containers.iter().filter(is_due).cloned().collect()
    }

    fn rotate_from(&self, queue: &Receiver<Log>, stop: &StopToken) -> Vec<LogError> {
        let mut pass = self.pass();
        for (container, log) in queue.try_iter() {
            if !self.rotate_in(&mut pass, &container, &log, stop) {
                break;
            }
        }
        pass.errors
    }

    /// Starts another worker. `None`: without a thread, the others do its work.
    fn help(
        &self,
        queue: Receiver<Log>,
        report: Sender<Vec<LogError>>,
        pass_stop: StopToken,
    ) -> Option<Running> {
        let rotator = Rotator { settings: self.settings, runtime: self.runtime.clone() };
        let body = move |_: StopToken| {
            let _ = report.send(rotator.rotate_from(&queue, &pass_stop));
        };
        let started = threads::spawn("log-rotate", Stack::Large, OnDeath::Unsupervised, body);
        started.inspect_err(|error| log::warn!("cannot start a thread for log rotations: {error}")).ok()
    }
}

/// Whether it is a regular file below the limit. What cannot be read is not.
fn is_small(log: &Path, limit: u64) -> bool {
    let found = UntrustedPath::find(log, LOG_LEVELS).and_then(|place| place.stat());
    let is_below = |size: i64| u64::try_from(size).is_ok_and(|size| size < limit);
    matches!(found, Ok(Some(stat)) if untrusted::is_file(&stat) && is_below(stat.st_size))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use super::super::Settings;
    use super::*;

    /// A runtime whose calls wait for each other: all of them are made at the same time.
    #[derive(Clone)]
    struct Together(Arc<Barrier>);

    impl Reopen for Together {
        fn reopen_log(&self, container: &ContainerId) -> Result<(), String> {
            self.0.wait();
            if container.as_str() == "c0" { Err("no".to_owned()) } else { Ok(()) }
        }
    }

    fn fixture(logs: usize) -> (tempfile::TempDir, Vec<Log>) {
        let dir = tempfile::tempdir().unwrap();
        let log = |number: usize| {
            let path = dir.path().join(format!("a/b/c/{number}/0.log"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "large enough").unwrap();
            (ContainerId::from(format!("c{number}")), path)
        };
        let logs = (0..logs).map(log).collect();
        (dir, logs)
    }

    fn rotator(together: usize) -> Rotator<Together> {
        let settings = Settings { max_bytes: Some(4), max_files: 4 };
        Rotator::new(settings, Together(Arc::new(Barrier::new(together))))
    }

    #[test]
    fn large_logs_are_rotated_at_the_same_time() {
        let (_dir, mut logs) = fixture(3);
        let (_small_dir, small) = fixture(1);
        std::fs::write(&small[0].1, "abc").unwrap();
        logs.extend(small.clone());
        // With fewer workers no call would return.
        let errors = rotator(3).rotate_at_once(&logs, 3, &StopToken::never());
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["cannot reopen the log of container c0: no"]);
        let files = |log: &Path| std::fs::read_dir(log.parent().unwrap()).unwrap().count();
        // The first one has its name again; the others have their new names only.
        assert!(logs[0].1.exists() && !logs[1].1.exists() && !logs[2].1.exists());
        assert_eq!((files(&logs[1].1), files(&small[0].1)), (1, 1));
        assert!(small[0].1.exists());
    }

    #[test]
    fn one_log_needs_no_other_thread_and_a_shared_file_is_rotated_once() {
        let (_dir, logs) = fixture(1);
        let shared = [logs[0].clone(), (ContainerId::from("other"), logs[0].1.clone())];
        let rotator = rotator(1);
        assert_eq!(rotator.due(&shared).len(), 1);
        assert_eq!(rotator.rotate_at_once(&shared, 8, &StopToken::never()).len(), 1);
    }

    #[test]
    fn a_stopped_pass_ends() {
        let (_dir, logs) = fixture(4);
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        assert!(rotator(1).rotate_at_once(&logs, 2, &stop).is_empty());
        assert!(logs.iter().all(|(_, log)| log.exists()));
    }
}
