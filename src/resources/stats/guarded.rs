//! The size of a file system whose server may not respond: measured on its own thread, while the
//! caller waits until a deadline that it shares with others.
//!
//! A slow measurement goes on, and its result is for a later call. A thread that hangs is left behind
//! until the kernel ends its call. Its file system is not measured again before that.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use crossbeam_channel::bounded;

use super::sample::FileSystem;
use super::space;
use crate::model::ids::PodUid;
use crate::util::lock::LockExt;
use crate::util::threads::{self, OnDeath, Stack};

/// Measurements that may be under way at the same time, of all pods and of one: the servers of one
/// pod must not take the places of others.
const MAX_UNDER_WAY: usize = 64;
const MAX_OF_POD: usize = 8;

/// What is known of a file system.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MeasuredSize<T> {
    Size(T),
    /// It is not measured yet; the last numbers are the newest.
    Pending,
    Failed,
}

/// A measurement that is under way, or whose result was not read yet.
struct Measurement<T> {
    pod: PodUid,
    /// `None`: it is under way.
    result: Option<Option<T>>,
}

struct Measurements<T>(Mutex<BTreeMap<PathBuf, Measurement<T>>>);

static SIZES: Measurements<FileSystem> = Measurements(Mutex::new(BTreeMap::new()));

/// The file system of a pod's volume. Waits for it until `until`.
pub(super) fn file_system(pod: &PodUid, path: &Path, until: Instant) -> MeasuredSize<FileSystem> {
    let measured = path.to_owned();
    SIZES.within(pod, path, until, move || space::file_system(&measured))
}

/// Drops results that were not read, of pods that are gone.
pub(super) fn forget(is_known: impl Fn(&PodUid) -> bool) {
    SIZES.forget(is_known);
}

impl<T: Send + 'static> Measurements<T> {
    fn forget(&self, is_known: impl Fn(&PodUid) -> bool) {
        self.0.locked().retain(|_, measurement| measurement.result.is_none() || is_known(&measurement.pod));
    }

    fn within(
        &'static self,
        pod: &PodUid,
        path: &Path,
        until: Instant,
        measure: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> MeasuredSize<T> {
        {
            let mut all = self.0.locked();
            match all.get(path).map(|measurement| measurement.result.is_some()) {
                Some(true) => {
                    let done = all.remove(path).and_then(|measurement| measurement.result).flatten();
                    return done.map_or(MeasuredSize::Failed, MeasuredSize::Size);
                }
                Some(false) => return MeasuredSize::Pending,
                None => {}
            }
            let under_way = |measurement: &&Measurement<T>| measurement.result.is_none();
            let count = all.values().filter(under_way).count();
            let of_pod = all.values().filter(under_way).filter(|measurement| measurement.pod == *pod).count();
            if count >= MAX_UNDER_WAY || of_pod >= MAX_OF_POD {
                return MeasuredSize::Pending;
            }
            all.insert(path.to_owned(), Measurement { pod: pod.clone(), result: None });
        }
        let (report, reported) = bounded::<()>(1);
        let guard = MeasurementGuard { all: self, path: path.to_owned(), has_begun: false, result: None };
        let spawned = threads::spawn("vol/stat", Stack::Small, OnDeath::Unsupervised, move |_| {
            let mut guard = guard;
            guard.has_begun = true;
            let _waiting = threads::waiting("size of a volume's file system");
            guard.result = measure();
            drop(guard);
            // The caller may have stopped waiting.
            let _ = report.send(());
        });
        // Without a thread the guard was dropped, and the next call measures.
        let Ok(running) = spawned else { return MeasuredSize::Pending };
        if reported.recv_deadline(until).is_err() {
            running.leave();
            return MeasuredSize::Pending;
        }
        drop(running);
        let done = self.0.locked().remove(path).and_then(|measurement| measurement.result).flatten();
        done.map_or(MeasuredSize::Failed, MeasuredSize::Size)
    }
}

/// The entry of a measurement that is under way. Dropping it stores the result, also after a panic;
/// if the measurement has not begun, it removes the entry.
struct MeasurementGuard<T: Send + 'static> {
    all: &'static Measurements<T>,
    path: PathBuf,
    has_begun: bool,
    result: Option<T>,
}

impl<T: Send + 'static> Drop for MeasurementGuard<T> {
    fn drop(&mut self) {
        let result = self.result.take();
        let mut all = self.all.0.locked();
        if !self.has_begun {
            all.remove(&self.path);
        } else if let Some(measurement) = all.get_mut(&self.path) {
            measurement.result = Some(result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    static NUMBERS: Measurements<u32> = Measurements(Mutex::new(BTreeMap::new()));

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn file_system_that_hangs_costs_one_thread_and_its_result_is_used_later() {
        let pod = PodUid::from("hangs");
        let (release, hold) = bounded::<()>(0);
        let path = Path::new("/t/hangs");
        let hang = move || {
            let _ = hold.recv();
            Some(1)
        };
        assert_eq!(NUMBERS.within(&pod, path, Instant::now(), hang), MeasuredSize::Pending);
        assert_eq!(NUMBERS.within(&pod, path, late(), || Some(2)), MeasuredSize::Pending, "still under way");
        assert_eq!(NUMBERS.within(&pod, Path::new("/t/other"), late(), || Some(3)), MeasuredSize::Size(3));
        drop(release);
        let until = late();
        let mut found = MeasuredSize::Pending;
        while found == MeasuredSize::Pending && Instant::now() < until {
            found = NUMBERS.within(&pod, path, late(), || Some(4));
            std::thread::yield_now();
        }
        assert_eq!(found, MeasuredSize::Size(1), "the late result");
        assert_eq!(NUMBERS.within(&pod, path, late(), || Some(5)), MeasuredSize::Size(5));
        assert_eq!(NUMBERS.within(&pod, path, late(), || None), MeasuredSize::Failed);
        assert!(matches!(file_system(&pod, Path::new("/"), late()), MeasuredSize::Size(_)));
    }

    #[test]
    fn measurement_without_a_thread_has_no_result() {
        static ALL: Measurements<u32> = Measurements(Mutex::new(BTreeMap::new()));
        let (pod, path) = (PodUid::from("u"), PathBuf::from("/t/refused"));
        ALL.0.locked().insert(path.clone(), Measurement { pod: pod.clone(), result: None });
        // As when the kernel refuses a thread.
        drop(MeasurementGuard { all: &ALL, path: path.clone(), has_begun: false, result: None });
        assert_eq!(ALL.within(&pod, &path, late(), || Some(1)), MeasuredSize::Size(1));
        assert!(ALL.0.locked().is_empty());
    }

    #[test]
    fn servers_of_one_pod_leave_places_for_other_pods() {
        static ALL: Measurements<u32> = Measurements(Mutex::new(BTreeMap::new()));
        let (hostile, other) = (PodUid::from("hostile"), PodUid::from("other"));
        let (release, hold) = bounded::<()>(0);
        for number in 0..MAX_OF_POD + 10 {
            let hold = hold.clone();
            let path = PathBuf::from(format!("/t/many/{number}"));
            let hang = move || {
                let _ = hold.recv();
                Some(0)
            };
            assert_eq!(ALL.within(&hostile, &path, Instant::now(), hang), MeasuredSize::Pending);
        }
        assert_eq!(ALL.0.locked().len(), MAX_OF_POD);
        assert_eq!(ALL.within(&other, Path::new("/t/one"), late(), || Some(1)), MeasuredSize::Size(1));
        drop(release);
        let until = late();
        while ALL.0.locked().values().any(|measurement| measurement.result.is_none())
            && Instant::now() < until
        {
            std::thread::yield_now();
        }
        ALL.forget(|pod| *pod != hostile);
        assert!(ALL.0.locked().is_empty());
    }
}
