//! The `shutdown` thread: holds the delay lock of logind, and carries out a shutdown.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::core::{Action, Core, ShutdownState};
use super::logind::{Logind, LogindError, LogindSignal, State};
use super::record::Record;
use super::{Deps, Orders, Settings};
use crate::model::api::PodStatus;
use crate::model::event::{EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::status;
use crate::util::stop::StopToken;
use crate::util::threads;
use crate::util::wake::Wake;

/// Wait before a new connection after the connection to the bus was lost; the lock is still held.
const RECONNECT_WAIT: Duration = Duration::from_secs(1);
/// Longest wait before the next attempt if no connection was ever made; the wait doubles.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// The state of the thread.
pub(super) struct Manager {
    settings: Settings,
    deps: Deps,
    wake: Wake,
    stop: StopToken,
    core: Core,
    record: Record,
    logind: Option<Logind>,
    /// The machine delays a shutdown while this is open. It outlives the connection.
    lock: Option<OwnedFd>,
    again: Instant,
    wait: Duration,
    /// The last problem that was logged.
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
            wait: RECONNECT_WAIT,
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
            let world = NodeWorld(&self.deps);
            for action in self.core.turn(&world, now) {
                self.carry_out(action);
            }
            let signal = {
                let _waiting = threads::waiting("a shutdown of the machine");
                let due = self.core.next_deadline();
                match &mut self.logind {
                    Some(logind) => logind.wait(due),
                    None => {
                        let until = due.map_or(self.again, |due| due.min(self.again));
                        self.wake
                            .wait(None, Some(until))
                            .map_err(|error| LogindError::Dbus(error.into()))
                            .map(|_| LogindSignal::Nothing)
                    }
                }
            };
            // The bell is silenced before the state is read, so that no later ring is lost.
            self.wake.silence();
            match signal {
                Ok(LogindSignal::Nothing) => {}
                Ok(LogindSignal::Prepare(on)) => self.prepare(on),
                Ok(LogindSignal::Restarted) => self.set_up(),
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

    /// Makes sure that logind delays shutdowns for the agent.
    fn set_up(&mut self) {
        let Some(logind) = &mut self.logind else { return };
        match logind.set_up(self.core.inhibit_delay(), &self.settings.logind_conf_dir) {
            Ok(State::Watched(lock)) => {
                if self.problem.take().is_some() || self.lock.is_none() {
                    log::info!(
                        "shutdowns of the machine wait for the pods, {:?} at most",
                        self.core.inhibit_delay()
                    );
                }
                self.wait = RECONNECT_WAIT;
                // This closes the old lock: the agent always holds at least one.
                self.lock = Some(lock);
                self.prepare(false);
            }
            // DIFFERS: the Go kubelet does not check for a shutdown that was signaled while it was
            // not connected, and gives up if the lock is refused for it. A machine whose lock was
            // released is not delayed again.
            Ok(State::Preparing) => {
                self.problem = None;
                self.wait = RECONNECT_WAIT;
                if self.lock.is_none() && !self.core.is_over() {
                    log::warn!("the machine is already shutting down, and does not wait for the pods");
                }
                self.prepare(true);
            }
            Err(error) => self.lost(&error),
        }
    }

    /// Handles a failure of the bus or of logind.
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
        // DIFFERS: the Go kubelet tries once at its start, and after a lost connection every
        // second.
        self.again = Instant::now() + self.wait;
        // Failures that a quick retry would not solve are retried less often.
        if !held || !matches!(error, LogindError::Dbus(_)) {
            self.wait = (self.wait * 2).min(MAX_WAIT);
        }
    }

    fn prepare(&mut self, on: bool) {
        if let Some(action) = self.core.prepare_for_shutdown(on, Instant::now()) {
            self.carry_out(action);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Begin => {
                log::warn!("the machine shuts down; all pods together get {:?}", self.core.inhibit_delay());
                self.announce(true, "Shutdown manager detected shutdown event");
                self.record.begin(Timestamp::now());
            }
            Action::Undo => {
                log::warn!("the shutdown of the machine was cancelled");
                self.announce(false, "Shutdown manager detected shutdown cancellation");
                // A lock that was never released is still valid.
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
                log::info!("pods have ended or their time is over; the machine may shut down");
            }
        }
    }

    /// Sets the flag, notifies `sync` and the `node` thread, and raises an event.
    fn announce(&self, on: bool, message: &'static str) {
        self.deps.flag.set(on);
        self.deps.orders.put((), Orders { shutting_down: Some(on), ..Orders::default() });
        if let Some(node) = &self.deps.node {
            // If the bell is full, the thread wakes anyway.
            let _ = node.try_send(());
        }
        self.deps.events.raise(Regarding::Node, EventType::Normal, reasons::SHUTDOWN, message);
    }
}

/// Whether a pod has ended by itself: it keeps its status. The containers of a failed one may still
/// run, and have a long grace period (Go: `isPodInactive`).
fn has_ended(status: &PodStatus) -> bool {
    let lists = [&status.init_container_statuses, &status.container_statuses];
    let mut containers = lists.into_iter().flatten().flatten();
    let runs =
        containers.any(|container| container.state.as_ref().is_some_and(|state| state.running.is_some()));
    status::is_terminal(status.phase.as_deref()) && !runs
}

/// Reads the state of the node for the core.
struct NodeWorld<'a>(&'a Deps);

impl ShutdownState for NodeWorld<'_> {
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
            works && !self.0.status.get(uid).is_some_and(|status| has_ended(&status))
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn failed_pod_whose_containers_still_run_belongs_to_the_shutdown() {
        for (phase, state, expected) in [
            ("Failed", json!({"running": {}}), false),
            ("Failed", json!({"terminated": {"exitCode": 1}}), true),
            ("Succeeded", json!({"terminated": {"exitCode": 0}}), true),
            ("Running", json!({"terminated": {"exitCode": 0}}), false),
        ] {
            let container = json!({"name": "c", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": state});
            let status = json!({"phase": phase, "containerStatuses": [container]});
            let status: PodStatus = serde_json::from_value(status).unwrap();
            assert_eq!(has_ended(&status), expected, "{phase} {state}");
        }
    }
}
