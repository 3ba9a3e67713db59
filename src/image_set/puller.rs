//! The thread `image-pull`: makes the runtime pull the images of the set that it lacks.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use super::Deps;
use super::pulls::Next;
use super::shared::Shared;
use crate::cri::{Class, ImageClient};
use crate::model::event::{EventType, Regarding};
use crate::model::reasons;
use crate::transport::generated::runtime::ImageSpec;
use crate::util::backoff::Failures;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Period of the list that finds images which were removed from the runtime.
const LIST_PERIOD: Duration = Duration::from_secs(300);
/// Wait after a failed list.
const FIRST_RETRY: Duration = Duration::from_secs(5);
/// Images are pulled in advance only if no pod has asked for one for this time: what pods need comes
/// first.
const QUIET: Duration = Duration::from_secs(3);

pub(super) struct Puller {
    images: ImageClient,
    deps: Deps,
    shared: Arc<Shared>,
    lists: Failures,
}

impl Puller {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel cannot create a thread.
    pub(super) fn spawn(deps: &Deps, shared: &Arc<Shared>) -> std::io::Result<Running> {
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
                list_due =
                    now + if self.list() { LIST_PERIOD } else { self.lists.delay(FIRST_RETRY, LIST_PERIOD) };
                Some(now)
            } else {
                let next = match self.shared.pulls().next(now) {
                    Next::Nothing => None,
                    Next::At(at) => Some(at),
                    Next::Pull(_) => Some(self.shared.last_asked().map_or(now, |asked| asked + QUIET)),
                };
                let idle = self.shared.pulls().is_empty();
                next.or(Some(list_due).filter(|_| !idle)).map(|next| next.min(list_due))
            };
            if due.is_none_or(|due| due > now) {
                let _waiting = threads::waiting("images to pull");
                select_biased! {
                    recv(stop.signal()) -> _ => return,
                    recv(self.shared.pull_rings()) -> _ => list_due = Instant::now(),
                    recv(timers::at(due)) -> _ => {}
                }
                continue;
            }
            let next = self.shared.pulls().next(now);
            if let Next::Pull(name) = next
                && now < list_due
            {
                self.pull(&name, stop);
            }
            if stop.is_stopped() {
                return;
            }
        }
    }

    /// Compares the set with the images of the runtime. False: the runtime did not respond.
    fn list(&mut self) -> bool {
        let images = match self.images.list_images() {
            Ok(images) => images,
            Err(error) => {
                if error.class() != Class::Stopping && self.lists.count() {
                    log::warn!("cannot list the images of the runtime: {error}");
                }
                return false;
            }
        };
        self.lists.end();
        let listed: HashSet<String> = images
            .into_iter()
            .flat_map(|image| image.repo_tags.into_iter().chain(image.repo_digests))
            .collect();
        let set = self.shared.set().clone();
        let wanted = set.images();
        let wanted = wanted.iter().map(|(name, (_, image))| (*name, image.target.as_str()));
        self.shared.pulls().update(wanted, &listed);
        true
    }

    fn pull(&self, name: &str, stop: &StopToken) {
        self.shared.pulls().begin(name);
        let requests = self.shared.manifest_requests.load(Ordering::Relaxed);
        let spec = ImageSpec {
            image: name.to_owned(),
            user_specified_image: name.to_owned(),
            ..ImageSpec::default()
        };
        let result = self.images.pull_image(spec, None, None, stop);
        let was_asked = self.shared.manifest_requests.load(Ordering::Relaxed) > requests;
        match result {
            Ok(_) => {
                log::info!("image {name} was pulled from its archive");
                self.shared.pulls().succeeded(name);
            }
            Err(error) if error.class() == Class::Stopping => {}
            Err(error) => {
                let text = if was_asked {
                    format!("the runtime cannot pull {name} from its archive: {error}")
                } else {
                    format!(
                        "the runtime does not use this agent's image registry, so it cannot pull {name}: run \
                         \"coracle setup runtime\" once ({error})"
                    )
                };
                if self.shared.pulls().failed(name, &text, Instant::now()) {
                    log::warn!("{text}");
                    let events = &self.deps.events;
                    events.raise(Regarding::Node, EventType::Warning, reasons::IMAGE_SET_PULL_FAILED, text);
                }
            }
        }
    }
}
