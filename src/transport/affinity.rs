//! What the gRPC library believes of the machine's size.
//!
//! For each processor the library keeps two lists of timers, and looks into each list once a
//! second whether or not a timer is in it: on two processors four wake-ups a second, on
//! sixteen thirty-two, for ever. It counts the processors once, in the moment it starts, and
//! in a static build by the calling thread's affinity. So it is started by a thread that may
//! use one processor only. Its threads, which inherit that, get all of them back afterwards.
//!
//! With glibc the count comes from sysfs, and this changes nothing.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Runs `start` on one processor; then every thread of the process may use again what the
/// caller could before.
pub(super) fn on_one_processor<T>(start: impl FnOnce() -> T) -> T {
    // One at a time: where one ends, every thread gets its processors back.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let all = sched_getaffinity(None).ok().filter(|all| all.count() > 1);
    let narrowed = all.filter(|_| {
        let mut one = CpuSet::new();
        let here = sched_getcpu();
        // A set holds 1,024 processors; beyond these the library may count them all.
        if here < CpuSet::MAX_CPU {
            one.set(here);
        }
        sched_setaffinity(None, &one).is_ok()
    });
    let started = start();
    if let Some(all) = narrowed {
        restore(&all);
    }
    started
}

/// To the calling thread first: it is the one that goes on to do everything else.
fn restore(all: &CpuSet) {
    if let Err(why) = sched_setaffinity(None, all) {
        log::warn!("cannot get the processors back: {why}");
    }
    let mut done = BTreeSet::new();
    // Until there is none that was not there before: one that had not got them yet may have
    // started another.
    loop {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let fresh: Vec<i32> = threads
            .filter_map(|thread| thread.file_name().to_str().and_then(|id| id.parse().ok()))
            .filter(|id| done.insert(*id))
            .collect();
        if fresh.is_empty() {
            return;
        }
        for id in fresh.into_iter().filter_map(Pid::from_raw) {
            // One that has ended meanwhile needs none.
            let _ = sched_setaffinity(Some(id), all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{self, OnDeath, Stack};

    #[test]
    fn the_start_sees_one_processor_and_nobody_keeps_it() {
        let before = sched_getaffinity(None).unwrap();
        let (tell, told) = crossbeam_channel::bounded(1);
        let (during, thread) = on_one_processor(|| {
            let during = sched_getaffinity(None).unwrap();
            let body = move |stop: crate::util::stop::StopToken| {
                let _ = stop.wait(std::time::Duration::from_secs(60));
                tell.send(sched_getaffinity(None).unwrap()).unwrap();
            };
            (during, threads::spawn("affinity", Stack::Small, OnDeath::Nobody, body).unwrap())
        });
        assert_eq!(during.count(), 1);
        drop(thread);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
        assert_eq!(told.recv().unwrap(), before, "a thread that began meanwhile");
    }
}
