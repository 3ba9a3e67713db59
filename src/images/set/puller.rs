//! The thread `image-pull`: makes the runtime pull the images of the set that it lacks.

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use super::super::listed::{RuntimeImage, requested};
use super::SetDeps;
use super::pulls::NextPull;
use super::shared::Shared;
use crate::cri::{ErrorClass, ImageClient};
use crate::model::event::{EventType, Regarding};
use crate::model::reasons;
use crate::util::backoff::Failures;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Period of the list that finds images which were removed from the runtime.
const LIST_PERIOD: Duration = Duration::from_secs(300);
/// Wait after a failed list, at first and at last: a runtime may start after the agent.
const FIRST_RETRY: Duration = Duration::from_secs(2);
const LAST_RETRY: Duration = Duration::from_secs(30);
/// Images are pulled in advance only if no pod has requested one for this time: what pods need comes
/// first.
const QUIET: Duration = Duration::from_secs(3);
/// How often it is looked whether the disk pressure has ended, while there is something to pull.
const PRESSURE_PERIOD: Duration = Duration::from_secs(30);

pub(super) struct Puller {
    images: ImageClient,
    deps: SetDeps,
    shared: Arc<Shared>,
    lists: Failures,
}

impl Puller {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel cannot create a thread.
    pub(super) fn spawn(deps: &SetDeps, shared: &Arc<Shared>) -> std::io::Result<Running> {
        let (deps, shared) = (deps.clone(), Arc::clone(shared));
        let on_death = OnDeath::Supervisor(deps.on_death.clone());
        threads::spawn("image-pull", Stack::Large, on_death, move |stop| {
            let images = deps.images.with_stop(stop.clone());
            Puller { images, deps, shared, lists: Failures::default() }.run(&stop);
        })
    }

    fn run(&mut self, stop: &StopToken) {
        let mut list_due = Instant::now();
        loop {
            let now = Instant::now();
            let due = if self.shared.registry().is_none() {
                None
            } else if now >= list_due {
                let pause = if self.list() { LIST_PERIOD } else { self.lists.delay(FIRST_RETRY, LAST_RETRY) };
                list_due = Instant::now() + pause;
                continue;
            } else {
                let next = self.next_pull(now);
                // A set without images needs no further lists.
                let idle =
                    self.shared.lock_set().ready().next().is_none() && self.shared.lock_pulls().is_empty();
                next.or(Some(list_due).filter(|_| !idle)).map(|next| next.min(list_due))
            };
            if due.is_none_or(|due| due > now) {
                let _waiting = threads::waiting("images to pull");
                select_biased! {
                    recv(stop.signal()) -> _ => return,
                    recv(self.shared.pull_bell()) -> _ => list_due = Instant::now(),
                    recv(timers::deadline_channel(due)) -> _ => {}
                }
                continue;
            }
            let next = self.shared.lock_pulls().next(now);
            if let NextPull::Pull(name) = next {
                self.pull(&name, stop);
            }
            if stop.is_stopped() {
                return;
            }
        }
    }

    /// When to look for an image to pull.
    fn next_pull(&self, now: Instant) -> Option<Instant> {
        let next = self.shared.lock_pulls().next(now);
        let held_back = matches!(next, NextPull::Pull(_)) && (self.deps.has_disk_pressure)();
        if self.shared.held_back.swap(held_back, Ordering::Relaxed) != held_back {
            let what = if held_back { "held back" } else { "no longer held back" };
            log::info!("pulls of images of archives in advance are {what} because of disk pressure");
        }
        match next {
            NextPull::Nothing => None,
            NextPull::RetryAt(time) => Some(time),
            NextPull::Pull(_) if held_back => Some(now + PRESSURE_PERIOD),
            NextPull::Pull(_) => Some(self.shared.last_request().map_or(now, |request| request + QUIET)),
        }
    }

    /// Compares the set with the images of the runtime. False: the runtime did not respond.
    fn list(&mut self) -> bool {
        let images = match self.images.list_images() {
            Ok(images) => images,
            Err(error) => {
                if error.class() != ErrorClass::Stopping && self.lists.count() {
                    log::warn!("cannot list the images of the runtime: {error}");
                }
                return false;
            }
        };
        self.lists.end();
        let listed: HashSet<String> =
            images.into_iter().flat_map(|image| RuntimeImage::from(image).names).collect();
        let set = self.shared.lock_set().clone();
        let wanted = set.images();
        let wanted = wanted.iter().map(|(name, (_, image))| (*name, image.target.as_str()));
        self.shared.lock_pulls().update(wanted, &listed);
        true
    }

    fn pull(&self, name: &str, stop: &StopToken) {
        self.shared.lock_pulls().begin(name);
        let requests = self.shared.manifest_requests.load(Ordering::Relaxed);
        let result = self.images.pull_image(requested(name), None, None, None, stop);
        let was_requested = self.shared.manifest_requests.load(Ordering::Relaxed) > requests;
        if result.as_ref().is_err_and(|error| error.class() == ErrorClass::Stopping) {
            return;
        }
        match check_pull(name, result.map(drop), was_requested) {
            Ok(()) => {
                log::info!("image {name} was pulled from its archive");
                self.shared.lock_pulls().succeeded(name);
            }
            Err(text) => {
                if self.shared.lock_pulls().failed(name, &text, Instant::now()) {
                    log::warn!("{text}");
                    let events = &self.deps.events;
                    events.raise(Regarding::Node, EventType::Warning, reasons::IMAGE_SET_PULL_FAILED, text);
                }
            }
        }
    }
}

/// What the end of a pull means. A runtime resolves a tag by a request for its manifest, also if it has
/// the content; without one (`was_requested`), the image is that of another registry.
fn check_pull(name: &str, result: Result<(), impl Display>, was_requested: bool) -> Result<(), String> {
    let unused = "the runtime does not use this agent's image registry";
    let advice = "run \"coracle setup runtime\" once";
    match (result, was_requested) {
        (Ok(()), true) => Ok(()),
        (Ok(()), false) => Err(format!("{unused}, so {name} is not that of its archive: {advice}")),
        (Err(error), true) => Err(format!("the runtime cannot pull {name} from its archive: {error}")),
        (Err(error), false) => Err(format!("{unused}, so it cannot pull {name}: {advice} ({error})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::event::EventSink;

    #[test]
    fn pull_without_a_request_to_this_registry_is_not_one_from_the_archive() {
        let good = || Ok::<(), &str>(());
        assert_eq!(check_pull("r/a:1", good(), true), Ok(()));
        assert!(check_pull("r/a:1", good(), false).unwrap_err().contains("coracle setup runtime"));
        assert!(check_pull("r/a:1", Err("no"), false).unwrap_err().contains("coracle setup runtime"));
        assert!(!check_pull("r/a:1", Err("no"), true).unwrap_err().contains("coracle setup runtime"));
    }

    #[test]
    fn nothing_is_pulled_in_advance_while_the_node_has_disk_pressure() {
        let (_, images) = crate::cri::unreachable_clients();
        let pressure = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let seen = Arc::clone(&pressure);
        let deps = SetDeps {
            images: images.clone(),
            events: EventSink::new().0,
            available: Arc::new(|_| {}),
            has_disk_pressure: Arc::new(move || seen.load(Ordering::Relaxed)),
            on_death: crossbeam_channel::bounded(1).0,
        };
        let shared = Arc::new(Shared::default());
        let puller = Puller { images, deps, shared: Arc::clone(&shared), lists: Failures::default() };
        let now = Instant::now();
        assert_eq!(puller.next_pull(now), None);
        assert_eq!(shared.problems(), [""; 0], "there is nothing to pull");
        shared.lock_pulls().update([("r/a:1", "sha256:1")].into_iter(), &HashSet::new());
        assert_eq!(puller.next_pull(now), Some(now + PRESSURE_PERIOD));
        assert!(shared.problems().concat().contains("disk pressure"));
        pressure.store(false, Ordering::Relaxed);
        assert_eq!(puller.next_pull(now), Some(now));
        assert_eq!(shared.problems(), [""; 0]);
    }
}
