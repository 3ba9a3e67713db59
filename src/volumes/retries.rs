//! The wait after a failed set-up, one per pod and volume. Pure: time is a parameter.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::model::ids::PodUid;

const INITIAL: Duration = Duration::from_millis(500);
/// The longest wait: two minutes and two seconds.
const MAX: Duration = Duration::from_secs(122);

#[derive(Debug, Clone, Copy)]
struct Backoff {
    /// The time of the first failure.
    since: Instant,
    delay: Duration,
    until: Instant,
    cause_is_final: bool,
    /// Another pod has the volume.
    has_other_user: bool,
    /// The pod's count of changed objects at the time of the failure.
    changes: u64,
}

/// The present back-offs.
#[derive(Debug, Default)]
pub(super) struct Retries {
    waits: HashMap<PodUid, HashMap<String, Backoff>>,
    /// When the volumes of a pod were removed last.
    removed: Option<Instant>,
}

/// Whether a retry may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retryable {
    /// A retry may succeed, because the cause can change.
    Yes,
    /// A retry may succeed when another pod has ended, which has the volume. The try began at this time.
    AfterOthers(Instant),
    /// No retry can succeed with this version of the agent: the first wait is the longest one.
    No,
}

impl Retries {
    /// The time before which the volume must not be tried, if that is later than `now`. A changed
    /// object ends the wait, because it may have been the cause.
    pub(super) fn blocked(&self, uid: &PodUid, volume: &str, changes: u64, now: Instant) -> Option<Instant> {
        let wait = self.waits.get(uid)?.get(volume)?;
        (now < wait.until && wait.changes == changes).then_some(wait.until)
    }

    /// Counts a failure at `now` and returns the time of the retry.
    pub(super) fn failed(
        &mut self,
        uid: &PodUid,
        volume: &str,
        (retryable, changes): (Retryable, u64),
        now: Instant,
    ) -> Instant {
        let waits = self.waits.entry(uid.clone()).or_default();
        let delay = match (retryable, waits.get(volume)) {
            (Retryable::No, _) => MAX,
            // That pod has ended meanwhile perhaps.
            (Retryable::AfterOthers(begun), _) if self.removed.is_some_and(|removed| removed >= begun) => {
                INITIAL
            }
            (_, Some(wait)) if !wait.cause_is_final => (wait.delay * 2).min(MAX),
            (Retryable::Yes | Retryable::AfterOthers(_), _) => INITIAL,
        };
        let until = now + delay;
        let since = waits.get(volume).map_or(now, |wait| wait.since);
        let cause_is_final = retryable == Retryable::No;
        let has_other_user = matches!(retryable, Retryable::AfterOthers(_));
        let wait = Backoff { since, delay, until, cause_is_final, has_other_user, changes };
        waits.insert(volume.to_owned(), wait);
        until
    }

    /// The volumes of a pod were removed: the waits for other pods end. Returns the pods that waited.
    pub(super) fn end_waits(&mut self, now: Instant) -> Vec<PodUid> {
        self.removed = Some(now);
        let mut woken = Vec::new();
        for (uid, waits) in &mut self.waits {
            let mut is_woken = false;
            for wait in waits.values_mut().filter(|wait| wait.has_other_user && now < wait.until) {
                wait.until = now;
                is_woken = true;
            }
            if is_woken {
                woken.push(uid.clone());
            }
        }
        woken
    }

    /// The API server has returned, which may have been the cause: the waits end, and are as long as before
    /// after another failure. Returns the pods that waited.
    pub(super) fn end_all(&mut self, now: Instant) -> Vec<PodUid> {
        let mut woken = Vec::new();
        for (uid, waits) in &mut self.waits {
            let mut is_woken = false;
            for wait in waits.values_mut().filter(|wait| !wait.cause_is_final && now < wait.until) {
                wait.until = now;
                is_woken = true;
            }
            if is_woken {
                woken.push(uid.clone());
            }
        }
        woken
    }

    /// Since when the volume has failed without a success between.
    pub(super) fn since(&self, uid: &PodUid, volume: &str) -> Option<Instant> {
        Some(self.waits.get(uid)?.get(volume)?.since)
    }

    /// Forgets a volume that is ready.
    pub(super) fn succeeded(&mut self, uid: &PodUid, volume: &str) {
        if let Some(waits) = self.waits.get_mut(uid) {
            waits.remove(volume);
            if waits.is_empty() {
                self.waits.remove(uid);
            }
        }
    }

    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.waits.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_another_pod_ends_when_a_pod_has_ended() {
        let mut retries = Retries::default();
        let (uid, other) = (PodUid::from("u"), PodUid::from("o"));
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let retryable = Retryable::AfterOthers(now);
        for _ in 0..9 {
            retries.failed(&uid, "v", (retryable, 0), now);
            retries.failed(&other, "v", (Retryable::Yes, 0), now);
        }
        assert_eq!(retries.blocked(&uid, "v", 0, later), Some(now + MAX));
        assert_eq!(retries.end_waits(later), std::slice::from_ref(&uid));
        assert_eq!(retries.blocked(&uid, "v", 0, later), None);
        assert!(retries.blocked(&other, "v", 0, later).is_some());
        assert!(retries.end_waits(later).is_empty());
        // That pod has ended during the try.
        assert_eq!(retries.failed(&uid, "v", (retryable, 0), later), later + INITIAL);
        assert_eq!(
            retries.failed(&uid, "v", (Retryable::AfterOthers(now + MAX), 0), later),
            later + INITIAL * 2
        );
    }

    #[test]
    fn return_of_the_api_server_ends_waits_but_those_with_a_final_cause() {
        let now = Instant::now();
        let mut retries = Retries::default();
        let (first, second) = (PodUid::from("first"), PodUid::from("second"));
        for _ in 0..5 {
            retries.failed(&first, "v", (Retryable::Yes, 0), now);
        }
        retries.failed(&second, "v", (Retryable::No, 0), now);
        let later = now + Duration::from_secs(1);
        assert_eq!(retries.end_all(later), std::slice::from_ref(&first));
        assert_eq!(retries.blocked(&first, "v", 0, later), None);
        assert!(retries.blocked(&second, "v", 0, later).is_some());
        assert!(retries.end_all(later).is_empty());
        assert_eq!(retries.failed(&first, "v", (Retryable::Yes, 0), later), later + INITIAL * 32);
    }

    #[test]
    fn wait_doubles_from_half_a_second_to_two_minutes() {
        let mut retries = Retries::default();
        let uid = PodUid::from("u");
        let start = Instant::now();
        let mut now = start;
        let mut waits = Vec::new();
        for _ in 0..10 {
            assert_eq!(retries.blocked(&uid, "v", 0, now), None);
            let until = retries.failed(&uid, "v", (Retryable::Yes, 0), now);
            assert_eq!(retries.blocked(&uid, "v", 0, now), Some(until));
            assert_eq!(retries.blocked(&uid, "v", 1, now), None);
            assert_eq!(retries.blocked(&uid, "other", 0, now), None);
            waits.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 122_000, 122_000]);
        assert_eq!(retries.since(&uid, "v"), Some(start));
        retries.succeeded(&uid, "v");
        assert_eq!(retries.since(&uid, "v"), None);
        assert_eq!(retries.failed(&uid, "v", (Retryable::Yes, 0), now) - now, INITIAL);
        assert_eq!(retries.failed(&uid, "v", (Retryable::No, 0), now) - now, MAX);
        assert_eq!(retries.failed(&uid, "v", (Retryable::Yes, 0), now) - now, INITIAL);
        retries.forget(&uid);
        assert_eq!(retries.blocked(&uid, "v", 0, now), None);
        assert!(retries.waits.is_empty());
    }
}
