//! Which images of the set the runtime lacks, and when a pull is tried again (pure).

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use crate::util::backoff::Failures;

const FIRST_RETRY: Duration = Duration::from_secs(10);
const LAST_RETRY: Duration = Duration::from_secs(300);

/// The state of the pull of an image, by one of its names.
#[derive(Debug, Clone, Default)]
struct PullState {
    /// The digest in the set.
    digest: String,
    /// Whether the runtime had it at the last list.
    present: bool,
    /// Whether it was pulled while the set had this digest. The runtime may show another digest.
    pulled: bool,
    under_way: bool,
    failures: Failures,
    retry: Option<Instant>,
    error: String,
}

/// The pulls of all names.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    names: BTreeMap<String, PullState>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextPull {
    Pull(String),
    /// A failed pull is due then.
    RetryAt(Instant),
    Nothing,
}

impl Pulls {
    /// Takes over the images of the set (name and digest) and what the runtime lists (tags, and
    /// `repository@digest`).
    pub(super) fn update<'a>(
        &mut self,
        set: impl Iterator<Item = (&'a str, &'a str)>,
        listed: &HashSet<String>,
    ) {
        let mut before = std::mem::take(&mut self.names);
        let digests: HashSet<&str> = listed.iter().filter_map(|name| Some(name.split_once('@')?.1)).collect();
        for (name, digest) in set {
            let mut pull = match before.remove(name) {
                Some(pull) if pull.digest == digest => pull,
                _ => PullState { digest: digest.to_owned(), ..PullState::default() },
            };
            let is_there = listed.contains(name);
            pull.present = is_there && (pull.pulled || digests.contains(digest));
            // Removed from the runtime: it is pulled again.
            pull.pulled &= is_there;
            self.names.insert(name.to_owned(), pull);
        }
    }

    /// The next pull: in the order of names.
    pub(super) fn next(&self, now: Instant) -> NextPull {
        let mut earliest: Option<Instant> = None;
        for (name, pull) in &self.names {
            if pull.present {
                continue;
            }
            match pull.retry {
                Some(retry) if retry > now => earliest = Some(earliest.map_or(retry, |time| time.min(retry))),
                _ => return NextPull::Pull(name.clone()),
            }
        }
        earliest.map_or(NextPull::Nothing, NextPull::RetryAt)
    }

    pub(super) fn begin(&mut self, name: &str) {
        if let Some(pull) = self.names.get_mut(name) {
            pull.under_way = true;
        }
    }

    pub(super) fn succeeded(&mut self, name: &str) {
        if let Some(pull) = self.names.get_mut(name) {
            let digest = std::mem::take(&mut pull.digest);
            *pull = PullState { digest, present: true, pulled: true, ..PullState::default() };
        }
    }

    /// Returns whether to log the error.
    pub(super) fn failed(&mut self, name: &str, error: &str, now: Instant) -> bool {
        let Some(pull) = self.names.get_mut(name) else { return false };
        pull.under_way = false;
        let log = pull.failures.count();
        pull.retry = Some(now + pull.failures.delay(FIRST_RETRY, LAST_RETRY));
        error.clone_into(&mut pull.error);
        log
    }

    /// Failed pulls are due now: an archive has changed.
    pub(super) fn retry_all(&mut self) {
        for pull in self.names.values_mut() {
            pull.retry = None;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// `present`, `waiting`, `pulling` or `failed`, and the last error.
    pub(super) fn state(&self, name: &str) -> (&'static str, String) {
        let Some(pull) = self.names.get(name) else { return ("waiting", String::new()) };
        let state = match pull {
            PullState { under_way: true, .. } => "pulling",
            PullState { present: true, .. } => "present",
            PullState { error, .. } if !error.is_empty() => "failed",
            _ => "waiting",
        };
        (state, pull.error.clone())
    }

    /// The errors of the names whose last pull failed.
    pub(super) fn failures(&self) -> impl Iterator<Item = &str> {
        let failed = self.names.values().filter(|pull| !pull.present && !pull.error.is_empty());
        failed.map(|pull| pull.error.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(names: &[&str]) -> HashSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn missing_images_and_those_with_another_digest_are_pulled() {
        let now = Instant::now();
        let mut pulls = Pulls::default();
        let set = || [("r/a:1", "sha256:1"), ("r/b:1", "sha256:2"), ("r/c:1", "sha256:3")].into_iter();
        pulls.update(set(), &listed(&["r/a:1", "r/a@sha256:1", "r/b:1", "r/b@sha256:9"]));
        assert_eq!(pulls.next(now), NextPull::Pull("r/b:1".into()));
        pulls.succeeded("r/b:1");
        assert_eq!(pulls.next(now), NextPull::Pull("r/c:1".into()));
        pulls.succeeded("r/c:1");
        assert_eq!(pulls.next(now), NextPull::Nothing);
        // The runtime shows another digest for what was pulled: that is no reason to pull it again.
        pulls.update(set(), &listed(&["r/a:1", "r/a@sha256:1", "r/b:1", "r/c:1"]));
        assert_eq!(pulls.next(now), NextPull::Nothing);
    }

    #[test]
    fn pruned_image_is_pulled_again_and_a_released_one_is_not() {
        let now = Instant::now();
        let mut pulls = Pulls::default();
        pulls.update([("r/a:1", "sha256:1")].into_iter(), &listed(&[]));
        pulls.succeeded("r/a:1");
        pulls.update([("r/a:1", "sha256:1")].into_iter(), &listed(&["other:1"]));
        assert_eq!(pulls.next(now), NextPull::Pull("r/a:1".into()));
        pulls.update([].into_iter(), &listed(&[]));
        assert_eq!(pulls.next(now), NextPull::Nothing);
        assert!(pulls.is_empty());
    }

    #[test]
    fn failed_pull_is_retried_with_growing_waits() {
        let now = Instant::now();
        let mut pulls = Pulls::default();
        pulls.update([("r/a:1", "sha256:1"), ("r/b:1", "sha256:2")].into_iter(), &listed(&[]));
        assert!(pulls.failed("r/a:1", "refused", now));
        assert_eq!(pulls.next(now), NextPull::Pull("r/b:1".into()));
        pulls.succeeded("r/b:1");
        assert_eq!(pulls.next(now), NextPull::RetryAt(now + FIRST_RETRY));
        assert_eq!(pulls.state("r/a:1"), ("failed", "refused".to_owned()));
        let later = now + FIRST_RETRY;
        assert_eq!(pulls.next(later), NextPull::Pull("r/a:1".into()));
        pulls.failed("r/a:1", "refused", later);
        assert_eq!(pulls.next(later), NextPull::RetryAt(later + 2 * FIRST_RETRY));
        pulls.retry_all();
        assert_eq!(pulls.next(later), NextPull::Pull("r/a:1".into()));
    }
}
