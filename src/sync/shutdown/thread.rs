//! The `shutdown` thread: keeps the lock of logind, and takes a shutdown through its course.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::core::{Action, Core, World};
use super::logind::{Heard, Logind, LogindError, State};
use super::record::Record;
use super::{Deps, Orders, Settings};
use crate::model::event::{EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::status;
use crate::util::stop::StopToken;
use crate::util::threads;
use crate::util::wake::Wake;

/// Wait before the next connection to a bus that was lost; the machine waits for us meanwhile.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest wait before the next attempt to find a bus that was never there. It doubles up to this.
const RARELY: Duration = Duration::from_secs(300);

/// Everything that the thread knows.
pub(super) struct Manager {
    settings: Settings,
    deps: Deps,
    wake: Wake,
    stop: StopToken,
    core: Core,
    record: Record,
    logind: Option<Logind>,
    /// The machine waits as long as this is open. It outlives the connection.
    lock: Option<OwnedFd>,
    again: Instant,
    wait: Duration,
    /// The last word about what does not work.
    problem: Option<String>,
}

impl Manager {
    pub(super) fn new(settings: Settings, deps: Deps, wake: Wake, stop: StopToken) -> Self {
        let now = Instant::now();
        let file = settings.keep_times.then(|| settings.state_file.clone());
        Manager {
            core: Core::new(settings.steps.clone(), now),
            record: Record::load(file),
            settings,
            deps,
            wake,
            stop,
            logind: None,
            lock: None,
            again: now,
            wait: AGAIN,
            problem: None,
        }
    }

    /// Body of the thread.
    pub(super) fn run(mut self) {
        while !self.stop.is_stopped() {
            if self.logind.is_none() && self.again <= Instant::now() {
                self.connect();
            }
            let now = Instant::now();
            let seen = Seen(&self.deps);
            for action in self.core.turn(&seen, now) {
                self.carry_out(action);
            }
            let heard = {
                let _waiting = threads::waiting("a shutdown of the machine");
                let due = self.core.due();
                match &mut self.logind {
                    Some(logind) => logind.wait(due),
                    None => {
                        let until = due.map_or(self.again, |due| due.min(self.again));
                        self.wake
                            .wait(None, Some(until))
                            .map_err(|error| LogindError::Dbus(error.into()))
                            .map(|_| Heard::Nothing)
                    }
                }
            };
            // Before the look around that its ringing asks for.
            self.wake.silence();
            match heard {
                Ok(Heard::Nothing) => {}
                Ok(Heard::Prepare(on)) => self.prepare(on),
                Ok(Heard::Another) => self.set_up(),
                Err(error) => self.lost(&error),
            }
        }
    }

    fn connect(&mut self) {
        match Logind::connect(&self.settings.bus, &self.wake, &self.stop) {
            Ok(logind) => {
                self.logind = Some(logind);
                self.set_up();
            }
            Err(error) => self.lost(&error),
        }
    }

    /// Makes sure that logind waits for us.
    fn set_up(&mut self) {
        let Some(logind) = &mut self.logind else { return };
        match logind.set_up(self.core.total(), &self.settings.logind_conf_dir) {
            Ok(State::Watched(lock)) => {
                if self.problem.take().is_some() || self.lock.is_none() {
                    log::info!("shutdowns of the machine wait for the pods, {:?} at most", self.core.total());
                }
                self.wait = AGAIN;
                // The old one goes only now: no shutdown slips through between.
                self.lock = Some(lock);
                self.prepare(false);
            }
            // DIFFERS: the Go kubelet does not ask what was signaled while it did not listen, and
            // gives up where it is refused a lock for it. A machine that was let go is not held
            // up again.
            Ok(State::Preparing) => {
                self.problem = None;
                self.wait = AGAIN;
                if self.lock.is_none() && !self.core.is_over() {
                    log::warn!("the machine shuts down already, and waits for the pods no more");
                }
                self.prepare(true);
            }
            Err(error) => self.lost(&error),
        }
    }

    /// The bus or logind does not work.
    fn lost(&mut self, error: &LogindError) {
        if error.is_stopping() {
            return;
        }
        let held = self.lock.is_some();
        // Logged once per problem.
        let text = error.to_string();
        if self.problem.as_ref() != Some(&text) {
            if held {
                log::warn!("cannot watch for shutdowns of the machine for now: {text}");
            } else {
                log::warn!(
                    "shutdownGracePeriod is set, but shutdowns of the machine cannot be watched: {text}; \
                     until that works, pods get no time of their own when it shuts down"
                );
            }
            self.problem = Some(text);
        }
        self.logind = None;
        // DIFFERS: the Go kubelet looks once at its start, and where it had a bus, every second.
        self.again = Instant::now() + self.wait;
        // What asking again soon would not mend is asked for rarely.
        if !held || !matches!(error, LogindError::Dbus(_)) {
            self.wait = (self.wait * 2).min(RARELY);
        }
    }

    fn prepare(&mut self, on: bool) {
        if let Some(action) = self.core.prepare(on, Instant::now()) {
            self.carry_out(action);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Begin => {
                log::warn!("the machine shuts down; pods get {:?} together", self.core.total());
                self.tell(true, "Shutdown manager detected shutdown event");
                self.record.begin(Timestamp::now());
            }
            Action::Undo => {
                log::warn!("the machine does not shut down after all");
                self.tell(false, "Shutdown manager detected shutdown cancellation");
                // One that was never released is as good.
                if self.lock.is_none() {
                    self.set_up();
                }
            }
            Action::Kill(pods) => {
                log::info!("{} pods are stopped for the shutdown", pods.len());
                self.deps.orders.put((), Orders { shutting_down: None, kills: pods.into_iter().collect() });
            }
            Action::Overdue(pods) => {
                let pods: Vec<&str> = pods.iter().map(PodUid::as_str).collect();
                log::warn!("pods did not end in the time that the shutdown gives them: {}", pods.join(", "));
            }
            Action::Release => {
                self.record.end(Timestamp::now());
                self.lock = None;
                log::info!("the pods have had their time; the machine may shut down");
            }
        }
    }

    /// Tells everyone.
    fn tell(&self, on: bool, message: &'static str) {
        self.deps.flag.set(on);
        self.deps.orders.put((), Orders { shutting_down: Some(on), ..Orders::default() });
        if let Some(node) = &self.deps.node {
            // A full bell already rings.
            let _ = node.try_send(());
        }
        self.deps.events.raise(Regarding::Node, EventType::Normal, reasons::SHUTDOWN, message);
    }
}

/// The node as the shutdown sees it.
struct Seen<'a>(&'a Deps);

impl World for Seen<'_> {
    fn is_acknowledged(&self) -> bool {
        self.0.view.get().shutting_down
    }

    fn is_complete(&self) -> bool {
        let view = self.0.view.get();
        view.sources_ready || (view.shutting_down && !view.workerless)
    }

    fn pods(&self) -> Vec<Pod> {
        let view = self.0.view.get();
        let active = view.pods.iter().filter(|(uid, entry)| {
            let works = entry.worker.as_ref().is_some_and(|worker| !worker.report().is_finished());
            // What ended by itself keeps its status.
            works
                && !self.0.status.get(uid).is_some_and(|status| status::is_terminal(status.phase.as_deref()))
        });
        active.filter_map(|(_, entry)| entry.any_pod().cloned()).collect()
    }

    fn has_ended(&self, uid: &PodUid) -> bool {
        let view = self.0.view.get();
        let worker = view.pods.get(uid).and_then(|entry| entry.worker.as_ref());
        worker.is_none_or(|worker| worker.report().is_finished())
    }

    fn is_written(&self) -> bool {
        !self.0.publishes || self.0.status.is_all_published()
    }
}
