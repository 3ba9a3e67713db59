//! Room `image_check`: finds damaged files of unpacked images, and replaces them. After a loss of
//! power, files that a runtime has just unpacked can be empty (containerd issues 9115 and 14164), and
//! the runtime never notices.
//!
//! A check compares each layer's directory with the layer's archive, which comes from the runtime's
//! store of blobs or from the image archives of this node. It is made on request (`coracle images
//! verify`), and once for an image whose container fails as if its files were damaged.
//!
//! What is damaged is replaced file by file in the layer's directory. To remove the image and to
//! pull it again does not help in most cases: the runtime keeps a layer while any container or any
//! other image uses it, and then does not unpack it again (tried with containerd 1.6 and 2.4). It
//! would also end containers, and lose the image if the pull fails. Containers that run keep the files
//! that they have open; a container that starts gets the new ones. The image is pulled again only
//! if a file could not be replaced, or if no copy of a layer can be compared and its directory is
//! missing or the runtime's own copy is damaged; and not while a container of it runs or has to be kept
//! because it has ended for good.
//!
//! Threads: `image-check` exists while images of failed containers are checked, one at a time, at the
//! lowest priority; a check on request runs on the thread of its connection and waits for its turn.
//! Invariants: a layer is only replaced from a copy with the digest that the image's configuration
//! names; a damaged file is never written to; no link leads out of a layer; an image is checked by
//! itself once as a whole, until it is pulled again or was mended.

mod check;
mod layer;
mod repull;
mod storage;
mod suspicion;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select};

pub use check::{Finding, LayerSource, Options, Report};
pub use suspicion::{of_instance, points_to_image};

use crate::cri::{ImageClient, RuntimeClient};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::gate::Gate;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use check::Checker;

/// The most images that wait for a check, and pods that wait for one image.
const MAX_WAITING: usize = 64;
/// The most images whose state is known.
const MAX_KNOWN: usize = 4096;
/// When an image that could not be mended, or not be checked as a whole, is checked again, if its
/// containers still fail.
const RETRY: Duration = Duration::from_secs(300);
/// The weakest priority (nice(2)).
const NICE: i32 = 19;

/// What the room needs.
pub struct Deps {
    /// The runtime, to find containers of an image.
    pub runtime: RuntimeClient,
    /// Its image service.
    pub images: ImageClient,
    /// Events about images.
    pub events: EventSink,
    /// Where layers come from, besides the store of the runtime.
    pub sources: Vec<Arc<dyn LayerSource>>,
    /// Wakes the worker of a pod.
    pub wake: Box<dyn Fn(&PodUid) + Send + Sync>,
    /// Closed for the id and the names of an image while it is replaced: then no container of it is
    /// made.
    pub replaced: Arc<Gate>,
    /// Which containers may be removed for that.
    pub restarts: Restarts,
}

/// Whether a container that has ended runs again, so that nothing is lost if it is removed: of the
/// pod with this UID, with this name, and with this exit code.
pub type Restarts = Box<dyn Fn(&PodUid, &str, i32) -> bool + Send + Sync>;

/// The handle of the room. Clones share it.
#[derive(Clone)]
pub struct ImageCheck {
    shared: Arc<Shared>,
}

struct Shared {
    checker: Checker,
    events: EventSink,
    wake: Box<dyn Fn(&PodUid) + Send + Sync>,
    /// Full while a check is made.
    turn: (Sender<()>, Receiver<()>),
    state: Mutex<State>,
}

/// Ends a check when it is dropped, also by a panic.
struct Turn<'a>(&'a Receiver<()>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_recv();
    }
}

/// A container that failed.
struct Failed {
    pod: PodUid,
    regarding: Regarding,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(String, Vec<Failed>)>,
    /// Names of images that were checked, and when they may be checked again.
    known: HashMap<String, Option<Instant>>,
    /// Images that are still damaged, by their ids: the name as requested, and the first damage.
    damaged: BTreeMap<String, (String, String)>,
    /// Whether the thread will take what waits.
    active: bool,
    thread: Option<Running>,
    stopped: bool,
}

impl State {
    /// Whether an image may be checked now.
    fn is_due(&self, image: &str, now: Instant) -> bool {
        match self.known.get(image) {
            None => true,
            Some(again) => again.is_some_and(|again| again <= now),
        }
    }

    /// Adds a request. Returns whether the thread has to be started.
    fn push(&mut self, image: &str, failed: Failed, now: Instant) -> bool {
        if self.stopped {
            return false;
        }
        if let Some((_, pods)) = self.waiting.iter_mut().find(|(waiting, _)| waiting == image) {
            if pods.len() < MAX_WAITING && pods.iter().all(|one| one.regarding != failed.regarding) {
                pods.push(failed);
            }
            return false;
        }
        if self.waiting.len() >= MAX_WAITING || !self.is_due(image, now) {
            return false;
        }
        self.waiting.push_back((image.to_owned(), vec![failed]));
        !std::mem::replace(&mut self.active, true)
    }

    /// The next image; the thread ends after `None`.
    fn next(&mut self) -> Option<(String, Vec<Failed>)> {
        let next = self.waiting.pop_front();
        match &next {
            None => self.active = false,
            Some((image, _)) => {
                if self.known.len() >= MAX_KNOWN {
                    self.known.clear();
                }
                self.known.insert(image.clone(), None);
            }
        }
        next
    }

    fn note(&mut self, image: &str, report: &Report) {
        let id = &report.id;
        // The name may have been that of another image.
        self.damaged.retain(|other, (name, _)| other == id || name != image);
        if report.damaged == 0 || report.intact || report.removed {
            self.damaged.remove(id);
        } else if self.damaged.len() < MAX_WAITING || self.damaged.contains_key(id) {
            self.damaged.insert(id.clone(), (image.to_owned(), report.summary()));
        }
    }

    /// The runtime does not have an image of this name.
    fn note_absent(&mut self, image: &str) {
        self.damaged.retain(|id, (name, _)| id != image && name != image);
    }

    /// Decides when an image may be checked again after a check with repair; `None`: it could not be
    /// made.
    fn settle(&mut self, image: &str, report: Option<&Report>, now: Instant) {
        let Some(report) = report.filter(|report| report.intact && report.verified >= report.layers) else {
            self.known.insert(image.to_owned(), Some(now + RETRY));
            return;
        };
        if report.mended > 0 {
            self.known.remove(image);
        }
    }
}

impl ImageCheck {
    /// Makes the handle.
    #[must_use]
    pub fn new(deps: Deps) -> ImageCheck {
        let Deps { runtime, images, events, sources, wake, replaced, restarts } = deps;
        let checker = Checker { runtime, images, sources, replaced, restarts };
        let state = Mutex::default();
        ImageCheck { shared: Arc::new(Shared { checker, events, wake, turn: bounded(1), state }) }
    }

    /// A container of `image` failed as if the image was damaged: checks the image on a thread, unless
    /// that was done before.
    ///
    /// DIFFERS: upstream does not detect damaged images.
    pub fn suspect(&self, pod: &Pod, container: &str, image: &str, why: &str) {
        let regarding = Regarding::Pod {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            uid: pod.uid().clone(),
            field_path: format!("spec.containers{{{container}}}"),
        };
        let failed = Failed { pod: pod.uid().clone(), regarding };
        let mut state = self.state();
        if !state.push(image, failed, Instant::now()) {
            return;
        }
        log::info!("image {image} is checked because of a failed container: {why} pod={}", pod.full_name());
        let handle = self.clone();
        // The last one has ended, or is about to.
        if let Some(old) = state.thread.take() {
            old.leave();
        }
        let shared = Arc::downgrade(&self.shared);
        let on_death = OnDeath::Unit(Box::new(move |died| {
            if let (Some(_), Some(shared)) = (died.panic, shared.upgrade()) {
                shared.state.lock().unwrap_or_else(PoisonError::into_inner).active = false;
            }
        }));
        match threads::spawn("image-check", Stack::Small, on_death, move |stop| handle.run(&stop)) {
            Ok(running) => state.thread = Some(running),
            Err(error) => {
                state.active = false;
                state.waiting.clear();
                log::warn!("cannot check the image {image}: {error}");
            }
        }
    }

    /// The image was pulled: it may be checked again.
    pub fn pulled(&self, image: &str) {
        self.state().known.remove(image);
    }

    /// Checks an image now, on the caller's thread. `progress` gets the number of layers that are done,
    /// and of all.
    ///
    /// # Errors
    /// When the layers of the image cannot be found.
    pub fn verify(
        &self,
        image: &str,
        options: Options,
        progress: &mut dyn FnMut(usize, usize),
        stop: &StopToken,
    ) -> Result<Report, String> {
        let (enter, leave) = &self.shared.turn;
        select! {
            send(enter, ()) -> _ => {}
            recv(stop.signal()) -> _ => return Err("context canceled".to_owned()),
        }
        let _turn = Turn(leave);
        // This thread ends with its connection. Without the priority, the check is only faster.
        let _ = rustix::process::setpriority_process(None, NICE);
        let report = self.shared.checker.check(image, options, progress, stop);
        if let Err(storage::Problem::Absent) = report {
            self.state().note_absent(image);
        }
        let report = report.map_err(|problem| problem.to_string())?;
        self.state().note(image, &report);
        Ok(report)
    }

    /// Images that are damaged and could not be mended, with their first damage.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let state = self.state();
        state.damaged.values().map(|(image, what)| format!("image {image} is damaged: {what}")).collect()
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
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, stop: &StopToken) {
        let next = || self.state().next();
        while let Some((image, failed)) = next() {
            if stop.is_stopped() {
                return;
            }
            let options = Options { contents: true, mend: true };
            let begun = Instant::now();
            let report = match self.verify(&image, options, &mut |_, _| {}, stop) {
                Ok(report) => report,
                Err(why) => {
                    log::info!("image {image}: {why}");
                    self.state().settle(&image, None, Instant::now());
                    continue;
                }
            };
            if stop.is_stopped() {
                return;
            }
            self.state().settle(&image, Some(&report), Instant::now());
            let Report { layers, verified, damaged, .. } = report;
            log::info!(
                "checked image {image} in {:?}: {verified} of {layers} layers compared, {damaged} damaged files",
                begun.elapsed()
            );
            for problem in &report.problems {
                log::warn!("image {image}: {problem}");
            }
            // Only a blob that is not needed may be damaged.
            if report.mended > 0 || !report.intact {
                self.tell(&image, &report, &failed);
            }
        }
    }

    fn tell(&self, image: &str, report: &Report, failed: &[Failed]) {
        let events = &self.shared.events;
        let found = format!("Image {image:?} is damaged: {}", report.summary());
        let (kind, reason, result) = outcome(image, report);
        let pods = failed.iter().map(|one| one.regarding.clone());
        for regarding in pods.chain([Regarding::Node]) {
            events.raise(regarding.clone(), EventType::Warning, reasons::DAMAGED_IMAGE, found.as_str());
            events.raise(regarding, kind, reason, result.as_str());
        }
        if report.intact {
            failed.iter().for_each(|one| (self.shared.wake)(&one.pod));
        }
    }
}

/// The event about the result of a check with repair.
fn outcome(image: &str, report: &Report) -> (EventType, &'static str, String) {
    // The last one is of the image as it is now: why it was not pulled again, by which name it could
    // not be pulled, or which layer cannot be compared.
    let last = report.problems.last().map(String::as_str);
    if report.intact {
        let last = last.map(|problem| format!(" ({problem})")).unwrap_or_default();
        let text = format!("Replaced damaged files of image {image:?}: {}{last}", report.mended);
        (EventType::Normal, reasons::IMAGE_MENDED, text)
    } else {
        let why = last.unwrap_or("some files are still damaged");
        (EventType::Warning, reasons::IMAGE_MEND_FAILED, format!("Cannot mend image {image:?}: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(pod: &str) -> Failed {
        Failed { pod: PodUid::from(pod), regarding: Regarding::Manifest { source: pod.to_owned() } }
    }

    fn report(damaged: u64, mended: u64, intact: bool) -> Report {
        Report { damaged, mended, intact, ..Report::default() }
    }

    fn settle(state: &mut State, image: &str, report: &Report, now: Instant) {
        state.note(image, report);
        state.settle(image, Some(report), now);
    }

    #[test]
    fn image_is_checked_once_until_it_was_mended_or_pulled() {
        let (mut state, now) = (State::default(), Instant::now());
        assert!(state.push("a", failed("1"), now));
        // The thread is active, and the second pod waits for the same check.
        assert!(!state.push("a", failed("2"), now));
        assert!(!state.push("a", failed("2"), now));
        assert!(!state.push("b", failed("3"), now));
        let (image, pods) = state.next().unwrap();
        assert_eq!((image.as_str(), pods.len()), ("a", 2));
        settle(&mut state, "a", &report(0, 0, true), now);
        assert_eq!(state.next().unwrap().0, "b");
        settle(&mut state, "b", &report(2, 2, true), now);
        assert!(state.next().is_none());
        assert!(!state.push("a", failed("1"), now + Duration::from_secs(86400)));
        assert!(state.push("b", failed("3"), now));
        state.known.remove("a");
        assert!(!state.push("a", failed("1"), now));
        assert_eq!(state.waiting.len(), 2);
    }

    #[test]
    fn image_that_stays_damaged_is_a_problem_and_is_checked_again_later() {
        let (mut state, now) = (State::default(), Instant::now());
        assert!(state.push("a", failed("1"), now));
        assert!(state.next().is_some());
        settle(&mut state, "a", &report(1, 0, false), now);
        assert!(state.next().is_none());
        assert_eq!(state.damaged.len(), 1);
        assert!(!state.push("a", failed("1"), now));
        assert!(state.push("a", failed("1"), now + RETRY));
        settle(&mut state, "a", &report(1, 1, true), now);
        assert!(state.damaged.is_empty());
        // An image that is not there any more is not damaged.
        settle(&mut state, "a", &report(1, 0, false), now);
        assert_eq!(state.damaged.len(), 1);
        settle(&mut state, "a", &Report { removed: true, ..report(1, 0, false) }, now);
        assert!(state.damaged.is_empty());
    }

    #[test]
    fn damaged_image_is_one_problem_under_all_of_its_names_until_it_is_gone() {
        let mut state = State::default();
        let damaged = Report { id: "sha256:1".to_owned(), ..report(1, 0, false) };
        state.note("app:1", &damaged);
        state.note("registry/app:1", &damaged);
        assert_eq!(state.damaged.len(), 1);
        state.note("registry/app:1", &Report { id: "sha256:2".to_owned(), ..report(0, 0, true) });
        assert!(state.damaged.is_empty(), "the name is that of an intact image now");
        state.note("registry/app:1", &damaged);
        state.note_absent("app:1");
        assert_eq!(state.damaged.len(), 1);
        state.note_absent("registry/app:1");
        assert!(state.damaged.is_empty());
    }

    #[test]
    fn event_about_a_repair_names_the_last_problem() {
        let text = |report: &Report| outcome("app:1", report).2;
        assert_eq!(text(&report(2, 2, true)), "Replaced damaged files of image \"app:1\": 2");
        let problems = vec!["first".to_owned(), "app:1 is another image".to_owned()];
        let named = Report { problems, ..report(2, 2, true) };
        assert!(text(&named).ends_with(": 2 (app:1 is another image)"), "{}", text(&named));
        let failed = Report { intact: false, ..named };
        assert_eq!(text(&failed), "Cannot mend image \"app:1\": app:1 is another image");
        assert_eq!(outcome("app:1", &failed).0, EventType::Warning);
    }

    #[test]
    fn image_that_was_not_checked_as_a_whole_is_checked_again_later() {
        let (mut state, now) = (State::default(), Instant::now());
        assert!(state.push("a", failed("1"), now));
        assert!(state.next().is_some());
        let part = Report { layers: 2, verified: 1, ..report(0, 0, true) };
        settle(&mut state, "a", &part, now);
        assert!(!state.is_due("a", now) && state.is_due("a", now + RETRY));
    }

    #[test]
    fn check_that_could_not_be_made_is_repeated_later() {
        let (runtime, images) = crate::cri::unreachable();
        let (events, _events) = EventSink::new();
        let (sources, wake) = (Vec::new(), Box::new(|_: &PodUid| {}));
        let (replaced, restarts) = (Arc::default(), Box::new(|_: &PodUid, _: &str, _| true));
        let deps = Deps { runtime, images, events, sources, wake, replaced, restarts };
        let check = ImageCheck::new(deps);
        let now = Instant::now();
        assert!(check.state().push("a", failed("1"), now));
        // On a thread of its own, because it lowers the priority.
        let handle = check.clone();
        let (done, ended) = crossbeam_channel::bounded::<()>(0);
        let run = move |_| {
            handle.run(&StopToken::never());
            drop(done);
        };
        let _running = threads::spawn("t/image-check", Stack::Small, OnDeath::Unsupervised, run).unwrap();
        ended.recv_timeout(Duration::from_secs(60)).unwrap_err();
        let state = check.state();
        assert!(!state.is_due("a", now) && state.is_due("a", Instant::now() + RETRY));
    }

    #[test]
    fn waiting_checks_are_limited() {
        let (mut state, now) = (State::default(), Instant::now());
        for n in 0..200 {
            state.push(&format!("image{n}"), failed("1"), now);
            state.push("image0", failed(&format!("pod{n}")), now);
        }
        assert_eq!((state.waiting.len(), state.waiting[0].1.len()), (MAX_WAITING, MAX_WAITING));
        state.stopped = true;
        state.waiting.clear();
        state.active = false;
        assert!(!state.push("a", failed("1"), now));
    }
}
