//! Operations that may hang: those that touch file systems which are not the agent's own, such as a
//! network mount behind a hostPath. Each runs on its own thread without a deadline; callers wait
//! for it up to a limit.
//!
//! At most one operation runs per pod and volume, and the number per pod is limited, so that a
//! hanging mount of one pod does not use all threads. Unmounts have a separate limit. A hanging
//! operation remains, and is named in the log, until the kernel ends the call; until then there is
//! no other operation on the volume.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, select_biased};

use super::error::VolumeError;
use crate::model::ids::PodUid;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// The longest wait of a caller: upstream's two minutes and three seconds.
pub(super) const LIMIT: Duration = Duration::from_secs(123);
/// Operations that may hang at the same time, which limits threads when a file server fails. It
/// applies to unmounts and to all others separately: pods must be able to end while others hang in
/// their set-up.
const MAX_PENDING: usize = 16;
/// The limit for one pod. In addition the pod may have one unmount.
const MAX_PENDING_OF_POD: usize = 3;
/// The key of the unmount of all volumes of a pod, in place of a volume's name.
pub(super) const UNMOUNT: &str = "";
/// The wait for a cancelled operation that is about to end.
const GRACE: Duration = Duration::from_millis(20);

type Key = (PodUid, String);

/// The running operations. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Operations {
    pending: Arc<Mutex<HashMap<Key, Instant>>>,
}

/// Takes the operation off the list when it ends, however it ends.
struct Entry {
    pending: Arc<Mutex<HashMap<Key, Instant>>>,
    key: Key,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

/// Reports the result of the operation once, or that it panicked.
struct Report<T, F: FnOnce(Result<T, VolumeError>)> {
    to: Option<F>,
    result: Option<Result<T, VolumeError>>,
}

impl<T, F: FnOnce(Result<T, VolumeError>)> Drop for Report<T, F> {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            to(self.result.take().unwrap_or(Err(VolumeError::Panicked)));
        }
    }
}

/// A running operation. Dropping it stops the operation, or detaches it if it does not stop.
pub(super) struct Operation(Option<Running>);

impl Operation {
    /// Joins the thread of an operation that has reported its result.
    pub(super) fn finish(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(running) = self.0.take() {
            running.stop(GRACE);
        }
    }
}

impl Operations {
    /// Runs `work` and waits for its end up to `limit`. `work` gets a stop token that stops it when
    /// the wait is over.
    pub(super) fn run<T: Send + 'static>(
        &self,
        uid: &PodUid,
        volume: &str,
        limit: Duration,
        stop: &StopToken,
        work: impl FnOnce(&StopToken) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let (report, reported) = bounded(1);
        let to = move |result| {
            // The caller may have stopped waiting.
            let _ = report.send(result);
        };
        let operation = self.start(uid, volume, to, work)?;
        let _waiting = threads::waiting("volume operation");
        let result = select_biased! {
            recv(stop.signal()) -> _ => Err(VolumeError::Stopping),
            recv(reported) -> result => {
                operation.finish();
                return result.unwrap_or(Err(VolumeError::Panicked));
            }
            default(limit) => Err(VolumeError::Overdue),
        };
        drop(operation);
        // The operation may have ended at the last moment.
        reported.try_recv().unwrap_or(result)
    }

    /// Starts `work` on its own thread, which ends with a call of `report`, also when the work
    /// panics. `work` gets a token that stops it when the [`Operation`] is dropped.
    pub(super) fn start<T: 'static>(
        &self,
        uid: &PodUid,
        volume: &str,
        report: impl FnOnce(Result<T, VolumeError>) + Send + 'static,
        work: impl FnOnce(&StopToken) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<Operation, VolumeError> {
        let entry = self.enter(uid, volume)?;
        let short: String = uid.as_str().chars().take(8).collect();
        let running =
            threads::spawn(&format!("vol/{short}"), Stack::Small, OnDeath::Unsupervised, move |own_stop| {
                let mut report = Report { to: Some(report), result: None };
                let _entry = entry;
                let _waiting = threads::waiting("volume operation");
                report.result = Some(work(&own_stop));
            })
            .map_err(|source| VolumeError::Thread { source })?;
        Ok(Operation(Some(running)))
    }

    fn enter(&self, uid: &PodUid, volume: &str) -> Result<Entry, VolumeError> {
        let key = (uid.clone(), volume.to_owned());
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.contains_key(&key) {
            return Err(VolumeError::Pending);
        }
        let is_unmount = volume == UNMOUNT;
        let like_this = pending.keys().filter(|(_, other)| (other == UNMOUNT) == is_unmount);
        let of_pod = like_this.clone().filter(|(owner, _)| owner == uid).count();
        if like_this.count() >= MAX_PENDING || of_pod >= MAX_PENDING_OF_POD {
            return Err(VolumeError::TooManyPending);
        }
        pending.insert(key.clone(), Instant::now());
        Ok(Entry { pending: Arc::clone(&self.pending), key })
    }

    /// The operations that have run for `limit`, with the volume ([`UNMOUNT`] for the unmount of all
    /// volumes of the pod) and the time so far.
    pub(super) fn slow(&self, limit: Duration) -> Vec<(PodUid, String, Duration)> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<_> = pending
            .iter()
            .map(|((uid, volume), begun)| (uid.clone(), volume.clone(), begun.elapsed()))
            .filter(|(_, _, since)| *since >= limit)
            .collect();
        found.sort();
        found
    }

    /// Whether an operation of the pod still runs.
    pub(super) fn is_busy(&self, uid: &PodUid) -> bool {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).keys().any(|(busy, _)| busy == uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(10);

    fn uid() -> PodUid {
        PodUid::from("u")
    }

    #[test]
    fn result_of_operation_is_returned() {
        let operations = Operations::default();
        for _ in 0..2 {
            assert_eq!(operations.run(&uid(), "v", LIMIT, &StopToken::never(), |_| Ok(7)).unwrap(), 7);
        }
        let failed =
            operations.run(&uid(), "v", LIMIT, &StopToken::never(), |_| Err::<(), _>(VolumeError::Stopping));
        assert!(matches!(failed, Err(VolumeError::Stopping)));
        assert!(!operations.is_busy(&uid()));
    }

    #[test]
    fn operation_that_hangs_blocks_only_its_volume() {
        let operations = Operations::default();
        let (release, hold) = bounded::<()>(0);
        let begun = Instant::now();
        let hung = operations.run(&uid(), "v", SHORT, &StopToken::never(), move |_| {
            let _ = hold.recv();
            Ok(())
        });
        assert!(matches!(hung, Err(VolumeError::Overdue)));
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert!(operations.is_busy(&uid()));
        let slow = operations.slow(SHORT);
        assert_eq!(
            slow.iter().map(|(pod, volume, _)| (pod, volume.as_str())).collect::<Vec<_>>(),
            [(&uid(), "v")]
        );
        assert_eq!(operations.slow(LIMIT), []);
        let again = operations.run(&uid(), "v", SHORT, &StopToken::never(), |_| Ok(()));
        assert!(matches!(again, Err(VolumeError::Pending)));
        operations.run(&uid(), "w", LIMIT, &StopToken::never(), |_| Ok(())).unwrap();
        drop(release);
        // After the end of the operation the volume can be used again.
        let freed = (0..3000).any(|_| {
            let _ = StopToken::never().wait(SHORT);
            !operations.is_busy(&uid())
        });
        assert!(freed);
    }

    #[test]
    fn stop_and_panic_end_the_wait_with_an_error() {
        let operations = Operations::default();
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let stopped = operations.run(&uid(), "v", LIMIT, &stop, |own| {
            let _ = own.wait(LIMIT);
            Err::<(), _>(VolumeError::Stopping)
        });
        assert!(matches!(stopped, Err(VolumeError::Stopping)));
        let panicked = operations
            .run(&uid(), "v", LIMIT, &StopToken::never(), |_| -> Result<(), _> { panic!("a test's own") });
        assert!(matches!(panicked, Err(VolumeError::Panicked)));
        assert!(!operations.is_busy(&uid()));
    }

    #[test]
    fn result_is_reported_after_volume_is_free() {
        let operations = Operations::default();
        let (report, reported) = bounded(2);
        for volume in ["fine", "panics"] {
            let (report, again) = (report.clone(), operations.clone());
            let to = move |result: Result<u8, _>| {
                report.send((result, again.enter(&uid(), volume).is_ok())).unwrap()
            };
            let work = move |_: &StopToken| if volume == "fine" { Ok(7) } else { panic!("a test's own") };
            let operation = operations.start(&uid(), volume, to, work).unwrap();
            let (result, is_free) = reported.recv_timeout(LIMIT).unwrap();
            operation.finish();
            assert!(is_free);
            match volume {
                "fine" => assert_eq!(result.unwrap(), 7),
                _ => assert!(matches!(result, Err(VolumeError::Panicked))),
            }
        }
        assert!(reported.is_empty());
    }

    #[test]
    fn operations_over_the_limit_are_refused() {
        let operations = Operations::default();
        let pod = |n: usize| PodUid::from(format!("u{n}").as_str());
        for volume in ["v", UNMOUNT] {
            let entries: Vec<Entry> =
                (0..MAX_PENDING).map(|n| operations.enter(&pod(n), volume).unwrap()).collect();
            let more = operations.enter(&pod(MAX_PENDING), volume);
            assert!(matches!(more, Err(VolumeError::TooManyPending)));
            drop(entries);
            operations.enter(&pod(MAX_PENDING), volume).unwrap();
        }
    }

    /// A pod with many volumes on one hanging mount used all threads of the node.
    #[test]
    fn one_pod_cannot_use_threads_of_others_and_of_unmounts() {
        let operations = Operations::default();
        let (one, other) = (PodUid::from("u1"), PodUid::from("u2"));
        let entered: Vec<_> = (0..100).map(|n| operations.enter(&one, &format!("v{n}"))).collect();
        assert_eq!(entered.iter().flatten().count(), MAX_PENDING_OF_POD);
        assert!(entered.iter().skip(3).all(|entry| matches!(entry, Err(VolumeError::TooManyPending))));
        drop(operations.enter(&other, "v").unwrap());
        let full: Vec<Entry> = (0..MAX_PENDING - MAX_PENDING_OF_POD)
            .map(|n| operations.enter(&PodUid::from(format!("p{n}").as_str()), "v").unwrap())
            .collect();
        assert!(operations.enter(&other, "v").is_err());
        drop(operations.enter(&other, UNMOUNT).unwrap());
        drop((entered, full));
        operations.enter(&one, "v99").unwrap();
    }
}
