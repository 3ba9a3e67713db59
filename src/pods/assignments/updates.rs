//! The thread `assignments`: gives running containers their new sets, and writes the state files.

use std::time::Instant;

use crossbeam_channel::select_biased;

use super::{Assignments, Shared};
use crate::runtime::Runtime;
use crate::util::backoff::Failures;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

impl Assignments {
    /// Starts the thread; `None`: the policies of both managers are `none`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn spawn(&self, runtime: Runtime, on_death: OnDeath) -> std::io::Result<Option<Running>> {
        let Some(shared) = self.shared.clone().filter(|shared| shared.has_files()) else {
            return Ok(None);
        };
        let body = move |stop: StopToken| run(&shared, &runtime, &stop);
        threads::spawn("assignments", Stack::Small, on_death, body).map(Some)
    }
}

fn run(shared: &Shared, runtime: &Runtime, stop: &StopToken) {
    let mut failures = Failures::default();
    let mut retry = None;
    loop {
        {
            let _waiting = threads::waiting("a changed set of CPUs");
            select_biased! {
                recv(stop.signal()) -> _ => {
                    shared.store();
                    return;
                }
                recv(shared.rings) -> _ => {}
                recv(timers::deadline_channel(retry)) -> _ => {}
            }
        }
        retry = None;
        // First, so that no container has a set that the file does not have.
        if !shared.store() {
            retry = Some(Instant::now() + shared.settings.retry);
        }
        let updates = shared.state().updates();
        for update in updates {
            match runtime.set_cpus(&update.id, &update.cpus.to_string(), stop) {
                Ok(true) => shared.state().updated(&update.id, Some(update.cpus)),
                Ok(false) => shared.state().updated(&update.id, None),
                Err(_) if stop.is_stopped() => return,
                Err(error) => {
                    if failures.count() {
                        log::warn!("cannot set the CPUs of container {}: {error}", update.id);
                    }
                    retry = Some(Instant::now() + shared.settings.retry);
                }
            }
        }
        if retry.is_none() {
            failures.end();
        }
    }
}
