//! Finds damaged files of unpacked images, and replaces them. After a loss of
//! power, files that a runtime has just unpacked can be empty (containerd issues 9115 and 14164), and
//! the runtime never notices.
//!
//! A check compares each layer's directory with the layer's archive, which comes from the runtime's
//! store of blobs or from the image archives of this node. It is made on request (`coracle images
//! verify`), and by itself for an image whose container fails as if its files were damaged.
//!
//! What is damaged is replaced file by file in the layer's directory. To remove the image and to
//! pull it again does not help in most cases: the runtime keeps a layer while any container or any
//! other image uses it, and then does not unpack it again (tried with containerd 1.6 and 2.4); the image
//! is lost if the pull fails. So that is done only with `--remove-damaged-images` (`repull`), if a file
//! could not be replaced, or if no copy of a layer can be compared and its directory is missing or the
//! runtime's own copy is damaged. Containers that run keep the files that they have open.
//!
//! Users of pods cause these checks, and write the manifests and the archives that are read. So the
//! content of a copy decides what is damaged, and no text; and checks have limits.
//!
//! Threads: `image-check` exists while images of failed containers are checked, one at a time, at the
//! lowest priority, and until all names of removed images are back; a check on request runs on the thread
//! of its connection and waits for others on request.
//! Invariants: a layer is only replaced from a copy with the digest that the image's configuration
//! names; a damaged file is never written to; no link leads out of a layer; an image is checked by itself
//! at most once in an hour (for each namespace, if not all layers were compared), and once in a day if it
//! was intact as a whole; the bytes that these checks use in an hour are limited, by namespace and node.

mod checker;
mod documents;
mod layer;
mod missing;
mod repull;
mod storage;
mod suspicion;
mod turns;
mod usage;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select};

pub use checker::{CheckOptions, CheckReport, Finding};
pub use suspicion::{points_to_image, signs_of_damage};

use super::pull::{ImagePuller, PullError};
use super::set::ImageSet;
use crate::cri::{ImageClient, RuntimeClient};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::gate::Gate;
use crate::util::lock::LockExt;
use crate::util::permits::Permits;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;
use checker::{Checker, LayerState};
use missing::{CheckNamespace, MissingNames, Pull as NamePull};
use storage::Problem;
use turns::Turns;
use usage::{Budget, Meter, PERIOD, Usage};

/// The most images that wait for a check, and pods that wait for one image.
const MAX_WAITING: usize = 64;
/// How many of these places one namespace has.
const MAX_OF_NAMESPACE: usize = MAX_WAITING / 4;
/// How many of them are free for namespaces that have none.
const FOR_FIRST: usize = MAX_WAITING / 4;
/// The most images whose state is known.
const MAX_KNOWN: usize = 4096;
/// When an image is checked again, if its containers still fail.
const RETRY: Duration = PERIOD;
/// As [`RETRY`], for an image that was intact as a whole. Only a loss of power damages one later, after
/// which this agent starts again and knows no image.
const RECHECK: Duration = Duration::from_secs(24 * 3600);
/// The most damaged images that are known, and how many of them a report names.
const MAX_DAMAGED: usize = 1024;
const MAX_NAMED: usize = 64;
/// The weakest priority (nice(2)).
const NICE: i32 = 19;

/// What checks need.
pub struct CheckDeps {
    /// The runtime, to find containers of an image.
    pub runtime: RuntimeClient,
    /// Its image service.
    pub images: ImageClient,
    /// Events about images.
    pub events: EventSink,
    /// The image archives of this node, which have layers besides the store of the runtime.
    pub set: ImageSet,
    /// Pulls images that were removed.
    pub puller: Arc<ImagePuller>,
    /// Wakes the worker of a pod.
    pub wake: Box<dyn Fn(&PodUid) + Send + Sync>,
    /// Closed for the names of an image while they are removed: then no container of it is made.
    pub replaced: Arc<Gate>,
    /// Which containers may be removed for that.
    pub restarts: Restarts,
    /// The pods of this node.
    pub pods: Pods,
    /// `--remove-damaged-images`: whether an image that cannot be repaired may be removed and pulled again.
    pub removes: bool,
}

/// The pods of this node, also those that are stopping; `None` until all sources have delivered them.
pub(super) type Pods = Box<dyn Fn() -> Option<Vec<Pod>> + Send + Sync>;

/// See [`ImagePuller::pull_again`].
type Pull = Box<dyn Fn(Option<&Pod>, &str, Duration, &StopToken) -> Result<String, PullError> + Send + Sync>;

/// Whether a container that has ended runs again, so that nothing is lost if it is removed: of the
/// pod with this UID, with this name, and with this exit code.
pub(super) type Restarts = Box<dyn Fn(&PodUid, &str, i32) -> bool + Send + Sync>;

/// Why an image was not checked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// The stop token ended the wait for another check.
    #[error("context canceled")]
    Stopped,
    /// Its layers cannot be found.
    #[error(transparent)]
    Image(#[from] Problem),
}

/// The handle of the checks. Clones share it.
#[derive(Clone)]
pub struct ImageCheck {
    shared: Arc<Shared>,
}

struct Shared {
    checker: Checker,
    events: EventSink,
    wake: Box<dyn Fn(&PodUid) + Send + Sync>,
    /// For one check on request at a time.
    permits: Permits,
    /// Wakes the thread while it waits for its next pull.
    bell: (Sender<()>, Receiver<()>),
    state: Mutex<State>,
}

struct FailedContainer {
    pod: PodUid,
    namespace: String,
    regarding: Regarding,
}

/// An image that is still damaged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Damage {
    /// Its name as requested.
    image: String,
    /// The first damage.
    summary: String,
    /// The layers in which there is some, by their numbers.
    layers: BTreeSet<usize>,
}

/// What the thread does next.
enum Step {
    Check(String, Vec<FailedContainer>),
    Pull(NamePull),
    Wait(Duration),
    End,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(String, Vec<FailedContainer>)>,
    /// Turns of the namespaces that have the places in it.
    turns: Turns,
    /// Ids of images that were checked, and when they may be checked again: for one namespace, or with
    /// `None` for all.
    known: HashMap<(String, Option<String>), Instant>,
    budget: Budget,
    /// Images that are still damaged, by their ids.
    damaged: BTreeMap<String, Damage>,
    /// Names of images that were removed and have to be pulled. This is locked after the state.
    missing: Arc<Mutex<MissingNames>>,
    /// Whether the last step was a pull.
    has_pulled: bool,
    /// Whether the thread will take what waits.
    active: bool,
    thread: Option<Running>,
    stopped: bool,
}

impl State {
    /// Whether the image with this id may be checked now because of these containers; then it counts as
    /// checked. Returns the namespace that the check is charged to, and what it may use: of the namespaces
    /// that wait for it, the one with the most left.
    fn begin<'a>(
        &mut self,
        id: &str,
        failed: &'a [FailedContainer],
        now: Instant,
    ) -> Option<(&'a str, Usage)> {
        if !self.is_due(id, None, now) {
            return None;
        }
        let mut best: Option<(&str, Usage)> = None;
        for container in failed {
            let namespace = container.namespace.as_str();
            if self.is_due(id, Some(namespace), now) {
                let left = self.budget.left(namespace, now);
                if best.is_none_or(|(_, most)| usage::part(left) > usage::part(most)) {
                    best = Some((namespace, left));
                }
            }
        }
        let best = best?;
        // For all, also if the check fails or the thread dies.
        self.remember(id, None, now + RETRY, now);
        Some(best)
    }

    fn is_due(&self, id: &str, namespace: Option<&str>, now: Instant) -> bool {
        let key = (id.to_owned(), namespace.map(str::to_owned));
        self.known.get(&key).is_none_or(|again| now >= *again)
    }

    fn remember(&mut self, id: &str, namespace: Option<&str>, again: Instant, now: Instant) {
        let key = (id.to_owned(), namespace.map(str::to_owned));
        if self.known.len() >= MAX_KNOWN && !self.known.contains_key(&key) {
            self.known.retain(|_, again| now < *again);
            // The next one to be checked again. To forget all would permit their checks at once.
            if self.known.len() >= MAX_KNOWN
                && let Some(first) = self.known.iter().min_by_key(|(_, again)| **again)
            {
                let first = first.0.clone();
                self.known.remove(&first);
            }
        }
        self.known.insert(key, again);
    }

    /// Marks the thread as active. Returns whether it has to be started.
    fn activate(&mut self) -> bool {
        !self.stopped && !std::mem::replace(&mut self.active, true)
    }

    /// Adds a request. Returns whether the thread has to be started.
    fn push(&mut self, image: &str, failed: FailedContainer) -> bool {
        if self.stopped {
            return false;
        }
        if let Some((_, pods)) = self.waiting.iter_mut().find(|(waiting, _)| waiting == image) {
            if pods.iter().all(|container| container.regarding != failed.regarding)
                && has_place(&failed.namespace, pods.iter().map(|container| container.namespace.as_str()))
            {
                pods.push(failed);
            }
            // The thread may have died.
            return self.activate();
        }
        // An image has the place of the namespace whose pod was the first to wait for it.
        let first = self.waiting.iter().filter_map(|(_, pods)| pods.first());
        if !has_place(&failed.namespace, first.map(|container| container.namespace.as_str())) {
            return false;
        }
        self.waiting.push_back((image.to_owned(), vec![failed]));
        self.activate()
    }

    /// What the thread does next; it ends after [`Step::End`]. Checks and pulls that are due have turns, so
    /// neither waits for more than one of the other.
    fn next(&mut self, now: Instant) -> Step {
        let mut missing = self.missing.locked();
        if (self.waiting.is_empty() || !self.has_pulled)
            && let Some(pull) = missing.next(now)
        {
            self.has_pulled = true;
            return Step::Pull(pull);
        }
        let due = missing.due();
        drop(missing);
        self.has_pulled = false;
        match (self.next_waiting(), due) {
            (Some((image, failed)), _) => Step::Check(image, failed),
            (None, Some(due)) => Step::Wait(due.saturating_duration_since(now)),
            (None, None) => {
                self.active = false;
                Step::End
            }
        }
    }

    /// The image that has waited longest, of the namespace whose last turn is the longest ago.
    fn next_waiting(&mut self) -> Option<(String, Vec<FailedContainer>)> {
        let namespace = |pods: &[FailedContainer]| {
            pods.first().map(|container| container.namespace.clone()).unwrap_or_default()
        };
        let waiting = self.waiting.iter().enumerate();
        let (index, _) =
            waiting.min_by_key(|(index, (_, pods))| (self.turns.last(&namespace(pods)), *index))?;
        let next = self.waiting.remove(index)?;
        self.turns.take(&namespace(&next.1));
        Some(next)
    }

    /// Notes what a check has found out. Damage of a layer that it could not compare stays known.
    fn note(&mut self, image: &str, report: &CheckReport) {
        let id = &report.id;
        self.unname(image, id);
        if report.removed {
            self.damaged.remove(id);
            return;
        }
        let layers_in = |state| {
            let numbered = report.states.iter().enumerate();
            numbered.filter(move |(_, other)| **other == state).map(|(number, _)| number)
        };
        if let Some(known) = self.damaged.get_mut(id) {
            for number in layers_in(LayerState::Intact) {
                known.layers.remove(&number);
            }
        }
        if layers_in(LayerState::Damaged).next().is_some()
            && (self.damaged.len() < MAX_DAMAGED || self.damaged.contains_key(id))
        {
            let known = self.damaged.entry(id.clone()).or_default();
            image.clone_into(&mut known.image);
            known.layers.extend(layers_in(LayerState::Damaged));
            known.summary = report.summary();
        }
        self.damaged.retain(|_, damage| !damage.layers.is_empty());
    }

    /// The runtime does not have an image of this name or id.
    fn note_absent(&mut self, image: &str) {
        self.damaged.remove(image);
        self.unname(image, "");
    }

    /// No image but the one with the id `except` has this name any more. What was damaged under it may
    /// still be there and in use: it is known by its id from now on.
    fn unname(&mut self, image: &str, except: &str) {
        for (id, damage) in &mut self.damaged {
            if id != except && damage.image == image {
                damage.image.clone_from(id);
            }
        }
    }

    /// Decides when an image may be checked again for this namespace after a check that had no result,
    /// because its layers could not be found: by another name they may be.
    fn settle_failed(&mut self, id: &str, namespace: &str, is_exhausted: bool, now: Instant) {
        let again = if is_exhausted { self.budget.renewal(now) } else { now + RETRY };
        self.known.remove(&(id.to_owned(), None));
        self.remember(id, Some(namespace), again, now);
    }

    /// Decides when an image may be checked again after a check with repair that was charged to this
    /// namespace. `is_exhausted`: it was ended at its limit of bytes.
    ///
    /// How much of an image can be compared also depends on the namespace: on what it has left to use,
    /// and on the manifest behind the name that its pods use; and whether it can be pulled again, on how many
    /// of its names are missing. So such a check is not that of others.
    fn settle(&mut self, report: &CheckReport, namespace: &str, is_exhausted: bool, now: Instant) {
        let id = &report.id;
        if is_exhausted || report.verified < report.layers || report.lacks_places {
            self.settle_failed(id, namespace, is_exhausted, now);
        } else if report.intact && report.mended == 0 {
            self.remember(id, None, now + RECHECK, now);
        }
    }
}

/// Whether another request of a namespace may wait, with those of the namespaces in `taken`.
fn has_place<'a>(namespace: &str, taken: impl Iterator<Item = &'a str>) -> bool {
    let (mut all, mut own) = (0, 0);
    for other in taken {
        all += 1;
        own += usize::from(other == namespace);
    }
    let limit = if own == 0 { MAX_WAITING } else { MAX_WAITING - FOR_FIRST };
    own < MAX_OF_NAMESPACE && all < limit
}

impl ImageCheck {
    /// Makes the handle.
    #[must_use]
    pub fn new(deps: CheckDeps) -> ImageCheck {
        let CheckDeps { runtime, images, events, set, puller, wake, replaced, restarts, pods, removes } =
            deps;
        let state = State::default();
        let missing = Arc::clone(&state.missing);
        let pull: Pull = Box::new(move |pod, name, limit, stop| puller.pull_again(pod, name, limit, stop));
        let checker =
            Checker { runtime, images, archives: set, replaced, restarts, pods, pull, removes, missing };
        let (bell, state) = (bounded(1), Mutex::new(state));
        let permits = Permits::new(1, "another check of an image");
        ImageCheck { shared: Arc::new(Shared { checker, events, wake, permits, bell, state }) }
    }

    /// A container of `image` failed as if the image was damaged: checks the image on a thread, unless
    /// that was done a short time ago.
    ///
    /// DIFFERS: upstream does not detect damaged images.
    pub fn container_failed(&self, pod: &Pod, container: &str, image: &str, reason: &str) {
        let regarding = Regarding::Pod {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            uid: pod.uid().clone(),
            field_path: format!("spec.containers{{{container}}}"),
        };
        let failed =
            FailedContainer { pod: pod.uid().clone(), namespace: pod.namespace().to_owned(), regarding };
        log::debug!("image {image} may be damaged: {reason} pod={}", pod.full_name());
        let mut state = self.state();
        match state.push(image, failed) {
            true => self.start(&mut state),
            false => self.ring(),
        }
    }

    fn ring(&self) {
        let _ = self.shared.bell.0.try_send(());
    }

    /// Starts the thread, which the state has as active.
    fn start(&self, state: &mut State) {
        let handle = self.clone();
        // The last one has ended, or is about to.
        if let Some(old) = state.thread.take() {
            old.leave();
        }
        let shared = Arc::downgrade(&self.shared);
        let on_death = OnDeath::Unit(Box::new(move |died| {
            if let (Some(_), Some(shared)) = (died.panic, shared.upgrade()) {
                shared.state.locked().active = false;
            }
        }));
        match threads::spawn("image-check", Stack::Small, on_death, move |stop| handle.run(&stop)) {
            Ok(running) => state.thread = Some(running),
            Err(error) => {
                state.active = false;
                state.waiting.clear();
                log::warn!("cannot check images of failed containers, or pull removed ones: {error}");
            }
        }
    }

    /// Checks an image now, on the caller's thread. `progress` gets the number of layers that are done,
    /// and of all.
    ///
    /// # Errors
    /// When the layers of the image cannot be found, or `stop` ends the wait for another check.
    pub fn verify(
        &self,
        image: &str,
        options: CheckOptions,
        progress: &mut dyn FnMut(usize, usize),
        stop: &StopToken,
    ) -> Result<CheckReport, CheckError> {
        let permit = self.shared.permits.take(stop, None);
        let _permit = permit.map_err(|_| CheckError::Stopped)?;
        let result = self.check((image, &None), options, progress, &Meter::unlimited(), stop);
        // Names that could not be pulled.
        let mut state = self.state();
        if state.missing.locked().due().is_some() {
            match state.activate() {
                true => self.start(&mut state),
                false => self.ring(),
            }
        }
        Ok(result?)
    }

    fn check(
        &self,
        (image, namespace): (&str, &CheckNamespace),
        options: CheckOptions,
        progress: &mut dyn FnMut(usize, usize),
        meter: &Arc<Meter>,
        stop: &StopToken,
    ) -> Result<CheckReport, Problem> {
        // This thread ends with its connection or after its checks. Without the priority, the check is
        // only faster.
        let _ = rustix::process::setpriority_process(None, NICE);
        let report = self.shared.checker.check((image, namespace), options, progress, meter, stop);
        let used = meter.used();
        metrics::IMAGE_CHECK_READ.add(used.read);
        metrics::IMAGE_CHECK_WRITTEN.add(used.written);
        match &report {
            Ok(report) => self.state().note(image, report),
            Err(Problem::Absent) => self.state().note_absent(image),
            Err(Problem::Unknown(_)) => {}
        }
        report
    }

    /// Forgets the damage of images that the runtime has no more under any name: `exists` knows the ids of
    /// all images.
    pub(super) fn retain(&self, exists: &dyn Fn(&str) -> bool) {
        self.state().damaged.retain(|id, _| exists(id));
    }

    /// Images that are damaged and could not be mended, with their first damage; and names of images that
    /// were removed and are not back.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let state = self.state();
        let named = state.damaged.values().take(MAX_NAMED);
        let damaged = named.map(|damage| format!("image {} is damaged: {}", damage.image, damage.summary));
        let more = state.damaged.len().saturating_sub(MAX_NAMED);
        let more = (more > 0).then(|| format!("{more} more images are damaged"));
        damaged.chain(more).chain(state.missing.locked().problems()).collect()
    }

    /// Ends the thread.
    pub fn stop(&self, limit: Duration) {
        let thread = {
            let mut state = self.state();
            state.stopped = true;
            state.thread.take()
        };
        if let Some(thread) = thread {
            thread.stop(limit);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.locked()
    }

    fn run(&self, stop: &StopToken) {
        while !stop.is_stopped() {
            let step = self.state().next(Instant::now());
            match step {
                Step::Check(image, failed) => self.check_failed(&image, &failed, stop),
                Step::Pull(pull) => self.pull_again(&pull, stop),
                Step::Wait(time) => select! {
                    recv(self.shared.bell.1) -> _ => {}
                    recv(timers::deadline_channel(Some(Instant::now() + time))) -> _ => {}
                    recv(stop.signal()) -> _ => return,
                },
                Step::End => return,
            }
        }
    }

    /// Checks and mends the image of containers that have failed.
    fn check_failed(&self, image: &str, failed: &[FailedContainer], stop: &StopToken) {
        let now = Instant::now();
        let id = match self.shared.checker.id_of(image, stop) {
            Ok(id) => id,
            Err(error) => return log::info!("image {image}: {error}"),
        };
        let Some((namespace, left)) = self.state().begin(&id, failed, now) else { return };
        let meter = Meter::new(left);
        log::info!("image {image} is checked because of a failed container in namespace {namespace}");
        let (options, check_namespace) =
            (CheckOptions { contents: true, mend: true }, Some(namespace.to_owned()));
        let result = self.check((image, &check_namespace), options, &mut |_, _| {}, &meter, stop);
        self.state().budget.spend(namespace, meter.used());
        let report = match result {
            Ok(report) => report,
            Err(error) => {
                self.state().settle_failed(&id, namespace, meter.is_exhausted(), Instant::now());
                return log::info!("image {image}: {error}");
            }
        };
        if stop.is_stopped() {
            return;
        }
        self.state().settle(&report, namespace, meter.is_exhausted(), Instant::now());
        let CheckReport { layers, verified, damaged, used, .. } = report;
        log::info!(
            "checked image {image} in {:?}: {verified} of {layers} layers compared, {damaged} damaged files, \
             {} bytes read, {} written",
            now.elapsed(),
            used.read,
            used.written
        );
        for problem in &report.problems {
            log::warn!("image {image}: {problem}");
        }
        // Only a blob that is not needed may be damaged.
        if report.mended > 0 || !report.intact {
            self.raise_events(image, &report, failed);
        }
    }

    /// Pulls an image that was removed by one of its names, unless a pod has pulled it meanwhile.
    fn pull_again(&self, pull: &NamePull, stop: &StopToken) {
        let (Shared { checker, events, .. }, NamePull { name, requested }) = (&*self.shared, pull);
        let result = match checker.id_of(name, stop) {
            Ok(_) => Ok(()),
            Err(_) => checker.pull(requested, name, repull::PULL_LIMIT, stop).map(drop),
        };
        if stop.is_stopped() {
            return;
        }
        self.state().missing.locked().pulled(name, &result, Instant::now());
        let (kind, reason, text) = match result {
            Ok(()) => {
                let text = format!("Image {name:?} is on the node again after its removal");
                (EventType::Normal, reasons::IMAGE_MENDED, text)
            }
            Err(error) => {
                let text = format!("Image {name:?} was removed and cannot be pulled again: {error}");
                (EventType::Warning, reasons::IMAGE_MEND_FAILED, text)
            }
        };
        log::info!("{text}");
        events.raise(Regarding::Node, kind, reason, text);
    }

    fn raise_events(&self, image: &str, report: &CheckReport, failed: &[FailedContainer]) {
        let events = &self.shared.events;
        let found = format!("Image {image:?} is damaged: {}", report.summary());
        let (kind, reason, result) = outcome(image, report);
        let pods = failed.iter().map(|container| container.regarding.clone());
        for regarding in pods.chain([Regarding::Node]) {
            events.raise(regarding.clone(), EventType::Warning, reasons::DAMAGED_IMAGE, found.as_str());
            events.raise(regarding, kind, reason, result.as_str());
        }
        if report.intact {
            failed.iter().for_each(|container| (self.shared.wake)(&container.pod));
        }
    }
}

/// The event about the result of a check with repair.
fn outcome(image: &str, report: &CheckReport) -> (EventType, &'static str, String) {
    // The last one is of the image as it is now: why it was not pulled again, by which name it could
    // not be pulled, or which layer cannot be compared.
    let last = report.problems.last().map(String::as_str);
    if report.intact {
        let last = last.map(|problem| format!(" ({problem})")).unwrap_or_default();
        let text = format!("Replaced damaged files of image {image:?}: {}{last}", report.mended);
        (EventType::Normal, reasons::IMAGE_MENDED, text)
    } else {
        let problem = last.unwrap_or("some files are still damaged");
        (EventType::Warning, reasons::IMAGE_MEND_FAILED, format!("Cannot mend image {image:?}: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::pull::{PullDeps, PullSettings};
    use super::*;

    fn failed(pod: &str) -> FailedContainer {
        failed_in("default", pod)
    }

    fn failed_in(namespace: &str, pod: &str) -> FailedContainer {
        let regarding = Regarding::Manifest { source: pod.to_owned() };
        FailedContainer { pod: PodUid::from(pod), namespace: namespace.to_owned(), regarding }
    }

    fn begin(state: &mut State, id: &str, now: Instant) -> bool {
        state.begin(id, &[failed("1")], now).is_some()
    }

    fn report(damaged: u64, mended: u64, intact: bool) -> CheckReport {
        let states = vec![if intact { LayerState::Intact } else { LayerState::Damaged }];
        CheckReport { damaged, mended, intact, states, ..CheckReport::default() }
    }

    fn settle(state: &mut State, image: &str, report: &CheckReport, now: Instant) {
        state.note(image, report);
        state.settle(report, "default", false, now);
    }

    fn next(state: &mut State, now: Instant) -> Option<(String, usize)> {
        match state.next(now) {
            Step::Check(image, pods) => Some((image, pods.len())),
            _ => None,
        }
    }

    #[test]
    fn failed_containers_of_one_image_wait_for_one_check() {
        let (mut state, now) = (State::default(), Instant::now());
        assert!(state.push("a", failed("1")));
        // The thread is active, and the second pod waits for the same check.
        assert!(!state.push("a", failed("2")));
        assert!(!state.push("a", failed("2")));
        assert!(!state.push("b", failed("3")));
        assert_eq!(next(&mut state, now), Some(("a".to_owned(), 2)));
        assert_eq!(next(&mut state, now), Some(("b".to_owned(), 1)));
        assert_eq!(next(&mut state, now), None);
        assert!(state.push("a", failed("1")));
    }

    #[test]
    fn image_is_checked_at_most_once_in_an_hour_under_any_name() {
        let (mut state, now) = (State::default(), Instant::now());
        assert!(begin(&mut state, "sha256:1", now));
        // Crashes with another name of the image, and after another pull, change nothing.
        for minutes in [0, 10, 59] {
            assert!(!begin(&mut state, "sha256:1", now + Duration::from_secs(60 * minutes)));
        }
        assert!(begin(&mut state, "sha256:2", now));
        assert!(begin(&mut state, "sha256:1", now + RETRY));
        // It was mended: files of it may become damaged again.
        let mended = CheckReport { id: "sha256:1".to_owned(), ..report(1, 1, true) };
        settle(&mut state, "a", &mended, now + RETRY);
        assert!(begin(&mut state, "sha256:1", now + 2 * RETRY));
        let intact = CheckReport { id: "sha256:1".to_owned(), ..report(0, 0, true) };
        settle(&mut state, "a", &intact, now + 2 * RETRY);
        assert!(!begin(&mut state, "sha256:1", now + 4 * RETRY));
        assert!(begin(&mut state, "sha256:1", now + 2 * RETRY + RECHECK));
        // It was not checked as a whole.
        let part = CheckReport { id: "sha256:2".to_owned(), layers: 2, verified: 1, ..report(0, 0, true) };
        settle(&mut state, "a", &part, now);
        assert!(begin(&mut state, "sha256:2", now + RETRY));
    }

    #[test]
    fn check_is_charged_to_the_waiting_namespace_that_has_most_left() {
        let (mut state, now) = (State::default(), Instant::now());
        let spent = Usage { read: 1 << 30, written: 0 };
        assert_eq!(state.budget.left("a", now), state.budget.left("b", now));
        state.budget.spend("a", spent);
        state.budget.spend("b", Usage { written: 8 << 30, ..Usage::default() });
        let waiting = [failed_in("a", "1"), failed_in("b", "2"), failed_in("c", "3"), failed_in("d", "4")];
        assert_eq!(state.begin("sha256:1", &waiting, now).unwrap().0, "c");
        // A namespace that may not write can repair nothing.
        let left = state.budget.left("a", now);
        assert_eq!(state.begin("sha256:2", &waiting[..2], now), Some(("a", left)));
    }

    #[test]
    fn check_that_ends_at_a_limit_leaves_the_image_to_other_namespaces() {
        let (mut state, now) = (State::default(), Instant::now());
        let (own, all) = ([failed_in("a", "1")], [failed_in("a", "2"), failed_in("b", "3")]);
        let part = CheckReport { id: "sha256:1".to_owned(), layers: 2, verified: 1, ..report(0, 0, true) };
        assert_eq!(state.begin("sha256:1", &own, now).unwrap().0, "a");
        assert!(state.begin("sha256:1", &all, now).is_none(), "it is being checked");
        let minutes = |minutes| now + Duration::from_mins(minutes);
        state.settle(&part, "a", true, minutes(10));
        assert!(state.begin("sha256:1", &own, minutes(11)).is_none());
        assert_eq!(state.begin("sha256:1", &all, minutes(11)).unwrap().0, "b");
        state.settle(&CheckReport { verified: 2, ..part }, "b", true, minutes(12));
        assert!(state.begin("sha256:1", &all, minutes(59)).is_none());
        // Now both may use bytes again.
        assert_eq!(state.begin("sha256:1", &all, minutes(60)).unwrap().0, "a");
    }

    /// The manifest behind the name that a namespace uses may lead to no copies.
    #[test]
    fn check_that_compares_not_all_layers_leaves_the_image_to_other_namespaces() {
        let (mut state, now) = (State::default(), Instant::now());
        let (own, other) = ([failed_in("a", "1")], [failed_in("b", "2")]);
        let part = CheckReport { id: "sha256:1".to_owned(), layers: 2, verified: 1, ..report(0, 0, true) };
        assert!(state.begin("sha256:1", &own, now).is_some());
        state.settle(&part, "a", false, now);
        assert!(state.begin("sha256:1", &own, now).is_none());
        assert_eq!(state.begin("sha256:1", &other, now).unwrap().0, "b");
        state.settle(&CheckReport { verified: 2, ..part }, "b", false, now);
        assert!(state.begin("sha256:1", &[failed_in("c", "3")], now + RETRY).is_none());
    }

    #[test]
    fn known_images_are_limited_and_not_forgotten_at_once() {
        let (mut state, now) = (State::default(), Instant::now());
        for n in 0..=MAX_KNOWN {
            assert!(begin(&mut state, &n.to_string(), now + Duration::from_millis(n as u64)));
        }
        assert_eq!(state.known.len(), MAX_KNOWN);
        assert!(!begin(&mut state, "1", now) && begin(&mut state, "0", now));
    }

    #[test]
    fn image_that_stays_damaged_is_a_problem_until_it_is_mended_or_gone() {
        let (mut state, now) = (State::default(), Instant::now());
        settle(&mut state, "a", &report(1, 0, false), now);
        assert_eq!(state.damaged.len(), 1);
        settle(&mut state, "a", &report(1, 1, true), now);
        assert!(state.damaged.is_empty());
        // An image that is not there any more is not damaged.
        settle(&mut state, "a", &report(1, 0, false), now);
        assert_eq!(state.damaged.len(), 1);
        settle(&mut state, "a", &CheckReport { removed: true, ..report(1, 0, false) }, now);
        assert!(state.damaged.is_empty());
    }

    /// These names were removed, and their pulls by the check have failed.
    fn remove(state: &State, namespace: &str, names: &[&str]) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let namespace = Some(namespace.to_owned());
        missing::Reservation::new(&state.missing, &namespace, "app:1", &names).unwrap().removing();
    }

    #[test]
    fn checks_and_pulls_of_removed_names_have_turns() {
        let mut state = State::default();
        remove(&state, "many", &["app:1", "app:2", "app:3"]);
        let due = Instant::now() + Duration::from_mins(1);
        let mut steps = Vec::new();
        for n in 0..8 {
            // As many suspicious images as one namespace may have.
            for image in 0..2 * MAX_OF_NAMESPACE {
                state.push(&format!("image{n}/{image}"), failed("1"));
            }
            steps.push(match state.next(due) {
                Step::Check(..) => "check".to_owned(),
                Step::Pull(pull) => {
                    state.missing.locked().pulled(&pull.name, &Ok(()), due);
                    pull.name
                }
                _ => "nothing".to_owned(),
            });
        }
        assert_eq!(steps, ["app:1", "check", "app:2", "check", "app:3", "check", "check", "check"]);
        // Nor do pulls that fail delay a check.
        remove(&state, "many", &["app:1", "app:2", "app:3"]);
        state.has_pulled = true;
        assert!(matches!(state.next(due), Step::Check(..)) && matches!(state.next(due), Step::Pull(_)));
        assert!(matches!(state.next(due), Step::Check(..)));
        state.waiting.clear();
        for _ in 0..2 {
            assert!(matches!(state.next(due), Step::Pull(_)));
        }
        assert!(matches!(state.next(due), Step::Wait(_)) && state.active);
    }

    #[test]
    fn images_of_one_namespace_delay_those_of_another_by_one_check() {
        let (mut state, now) = (State::default(), Instant::now());
        for n in 0..4 {
            state.push(&format!("many{n}"), failed_in("many", "1"));
        }
        state.push("one1", failed_in("one", "1"));
        state.push("one2", failed_in("one", "1"));
        let mut order = Vec::new();
        for _ in 0..4 {
            order.push(next(&mut state, now).unwrap().0);
        }
        assert_eq!(order, ["many0", "one1", "many1", "one2"]);
        // A namespace that comes again and again is not the first each time.
        state.push("one3", failed_in("one", "1"));
        assert_eq!(next(&mut state, now).unwrap().0, "many2");
        assert_eq!(next(&mut state, now).unwrap().0, "one3");
    }

    /// The names of a namespace's own images must not prevent the repair of one that others use, too.
    #[test]
    fn image_that_a_namespace_has_no_places_for_is_left_to_others() {
        let (mut state, now) = (State::default(), Instant::now());
        let (own, other) = ([failed_in("a", "1")], [failed_in("b", "2")]);
        assert!(state.begin("sha256:1", &own, now).is_some());
        let full = CheckReport { id: "sha256:1".to_owned(), lacks_places: true, ..report(1, 0, false) };
        state.settle(&full, "a", false, now);
        assert!(state.begin("sha256:1", &own, now).is_none());
        assert_eq!(state.begin("sha256:1", &other, now).unwrap().0, "b");
    }

    #[test]
    fn thread_that_died_is_started_again_by_the_next_failed_container() {
        let mut state = State::default();
        assert!(state.push("a", failed("1")));
        state.active = false;
        assert!(state.push("a", failed("2")));
        state.active = false;
        state.stopped = true;
        assert!(!state.push("a", failed("2")) && !state.activate());
    }

    #[test]
    fn check_without_result_leaves_the_image_to_other_namespaces() {
        let (mut state, now) = (State::default(), Instant::now());
        let (own, other) = ([failed_in("a", "1")], [failed_in("b", "2")]);
        assert!(state.begin("sha256:1", &own, now).is_some());
        state.settle_failed("sha256:1", "a", false, now);
        assert!(state.begin("sha256:1", &own, now).is_none());
        assert_eq!(state.begin("sha256:1", &other, now).unwrap().0, "b");
    }

    #[test]
    fn known_damage_stays_known_when_a_check_was_ended_early_or_compared_less() {
        use LayerState::{Damaged, Intact, Unknown};
        let mut state = State::default();
        let check = |states: &[LayerState]| {
            let damaged = states.iter().filter(|layer_state| **layer_state == Damaged).count() as u64;
            let findings = vec![Finding { path: format!("/f{damaged}"), problem: "is missing".to_owned() }];
            let findings = if damaged > 0 { findings } else { Vec::new() };
            let (layers, intact) = (states.len(), damaged == 0);
            CheckReport {
                damaged,
                intact,
                layers,
                findings,
                states: states.to_vec(),
                ..CheckReport::default()
            }
        };
        state.note("a", &check(&[Intact, Damaged, Damaged]));
        let summary = |state: &State| state.damaged.get("").map(|damage| damage.summary.clone());
        let known = summary(&state);
        assert!(known.is_some());
        // Ended before the damaged layers, or by sizes only; then one of both was repaired.
        for states in [[Unknown, Unknown, Unknown], [Intact, Unknown, Unknown], [Intact, Intact, Unknown]] {
            state.note("a", &check(&states));
            assert_eq!(summary(&state), known, "{states:?}");
        }
        state.note("a", &check(&[Unknown, Unknown, Intact]));
        assert!(state.damaged.is_empty());
    }

    #[test]
    fn damaged_image_is_one_problem_under_all_of_its_names_until_it_is_gone() {
        let mut state = State::default();
        let damaged = CheckReport { id: "sha256:1".to_owned(), ..report(1, 0, false) };
        state.note("app:1", &damaged);
        state.note("registry/app:1", &damaged);
        assert_eq!(state.damaged.len(), 1);
        state.note_absent("app:1");
        assert_eq!(state.damaged.len(), 1);
        state.note_absent("sha256:1");
        assert!(state.damaged.is_empty());
    }

    #[test]
    fn damage_stays_known_when_the_name_of_the_image_is_removed_or_moved() {
        let (damaged, intact) = (report(1, 0, false), report(0, 0, true));
        let with_id = |id: &str, report: &CheckReport| CheckReport { id: id.to_owned(), ..report.clone() };
        let names = |state: &State| -> Vec<String> {
            state.damaged.values().map(|damage| damage.image.clone()).collect()
        };
        for is_moved in [true, false] {
            let mut state = State::default();
            state.note("app:1", &with_id("sha256:1", &damaged));
            match is_moved {
                true => state.note("app:1", &with_id("sha256:2", &intact)),
                false => state.note_absent("app:1"),
            }
            // Containers of it may still run.
            assert_eq!(names(&state), ["sha256:1"]);
            state.note("app:2", &with_id("sha256:1", &damaged));
            assert_eq!(names(&state), ["app:2"]);
            state.note("app:2", &with_id("sha256:1", &intact));
            assert!(state.damaged.is_empty());
        }
    }

    #[test]
    fn event_about_a_repair_names_the_last_problem() {
        let text = |report: &CheckReport| outcome("app:1", report).2;
        assert_eq!(text(&report(2, 2, true)), "Replaced damaged files of image \"app:1\": 2");
        let problems = vec!["first".to_owned(), "app:1 is another image".to_owned()];
        let named = CheckReport { problems, ..report(2, 2, true) };
        assert!(text(&named).ends_with(": 2 (app:1 is another image)"), "{}", text(&named));
        let failed = CheckReport { intact: false, ..named };
        assert_eq!(text(&failed), "Cannot mend image \"app:1\": app:1 is another image");
        assert_eq!(outcome("app:1", &failed).0, EventType::Warning);
    }

    /// Without a runtime.
    fn image_check() -> ImageCheck {
        let (runtime, images) = crate::cri::unreachable_clients();
        let (events, _events) = EventSink::new();
        let (set, wake) = (ImageSet::default(), Box::new(|_: &PodUid| {}));
        let (replaced, restarts) = (Arc::default(), Box::new(|_: &PodUid, _: &str, _| true));
        let pods: Pods = Box::new(|| None);
        let (local, settings) = (Default::default(), PullSettings::default());
        let deps =
            PullDeps { images: images.clone(), events: events.clone(), set: set.clone(), api: None, local };
        let puller = Arc::new(ImagePuller::new(&settings, deps));
        let removes = true;
        ImageCheck::new(CheckDeps {
            runtime,
            images,
            events,
            set,
            puller,
            wake,
            replaced,
            restarts,
            pods,
            removes,
        })
    }

    /// Other images are checked seldom, or never.
    #[test]
    fn damage_of_removed_images_is_forgotten_without_a_check() {
        let check = image_check();
        for n in 0..2 * MAX_DAMAGED {
            let id = format!("sha256:{n}");
            check.state().note(&format!("app:{n}"), &CheckReport { id, ..report(1, 0, false) });
        }
        assert_eq!(check.problems().len(), MAX_NAMED + 1);
        check.retain(&|id| ["sha256:1", "sha256:2"].contains(&id));
        let named = |name: &str| format!("image {name} is damaged: ");
        let problems = check.problems();
        assert!(problems.len() == 2 && problems[0].starts_with(&named("app:1")), "{problems:?}");
        // There is room for others again.
        let later = CheckReport { id: "sha256:later".to_owned(), ..report(1, 0, false) };
        check.state().note("app:later", &later);
        assert!(check.problems()[2].starts_with(&named("app:later")));
    }

    #[test]
    fn check_that_could_not_be_made_ends_without_a_finding() {
        let check = image_check();
        assert!(check.state().push("a", failed("1")));
        // On a thread of its own, because it lowers the priority.
        let handle = check.clone();
        let (done, ended) = crossbeam_channel::bounded::<()>(0);
        let run = move |_| {
            handle.run(&StopToken::never());
            drop(done);
        };
        let _running = threads::spawn("t/image-check", Stack::Small, OnDeath::Unsupervised, run).unwrap();
        ended.recv_timeout(Duration::from_secs(60)).unwrap_err();
        assert!(check.problems().is_empty() && !check.state().active);
    }

    #[test]
    fn waiting_checks_are_limited() {
        let mut state = State::default();
        for n in 0..200 {
            let namespace = format!("namespace{}", n / 2);
            state.push(&format!("image{n}"), failed_in(&namespace, "1"));
            state.push("image0", failed_in(&namespace, &format!("pod{n}")));
        }
        assert_eq!((state.waiting.len(), state.waiting[0].1.len()), (MAX_WAITING, MAX_WAITING));
        state.stopped = true;
        state.waiting.clear();
        state.active = false;
        assert!(!state.push("a", failed("1")));
    }

    #[test]
    fn namespace_with_many_failing_containers_leaves_places_to_others() {
        let mut state = State::default();
        for (namespace, n) in (0..10 * MAX_WAITING).map(|n| (format!("many{}", n % 5), n)) {
            state.push(&format!("image{n}"), failed_in(&namespace, "1"));
            state.push("shared", failed_in(&namespace, &format!("pod{n}")));
        }
        let waiting_of = |state: &State, namespace: &str| {
            state.waiting.iter().filter(|(_, pods)| pods[0].namespace == namespace).count()
        };
        assert!((0..5).all(|n| (1..=MAX_OF_NAMESPACE).contains(&waiting_of(&state, &format!("many{n}")))));
        state.push("own", failed_in("one", "1"));
        assert_eq!(waiting_of(&state, "one"), 1);
        // Also among the pods that wait for one image.
        state.push("shared", failed_in("one", "1"));
        let (_, pods) = state.waiting.iter().find(|(image, _)| image == "shared").unwrap();
        assert_eq!(pods.last().unwrap().namespace, "one");
        // One namespace alone does not use more than its part.
        let mut state = State::default();
        for n in 0..MAX_WAITING {
            state.push(&format!("image{n}"), failed_in("many", "1"));
        }
        assert_eq!(state.waiting.len(), MAX_OF_NAMESPACE);
    }
}
