//! Waits for signals and for the death of threads; decides when the process ends.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, after, bounded, never, select_biased, tick};

use crate::util::service_manager::ServiceManager;
use crate::util::signals::{Listener, Signal};
use crate::util::threads::{self, Died, OnDeath};

/// Deaths that may wait to be read; the first one decides.
const DEATHS: usize = 16;

/// How many reports fit into the time of the service manager's watchdog.
const REPORTS: u32 = 4;

/// The shortest time between two of them.
const SHORTEST: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StopReason {
    /// SIGTERM or SIGINT.
    Signal,
    /// A thread ended that must not end.
    Died(Died),
    /// The configuration cannot be enforced on this machine.
    Fatal(String),
    /// Another process opened the lock file.
    LockRequested,
}

/// Receives signals and deaths of threads on the main thread.
pub(super) struct Supervisor {
    listener: Listener,
    signals: Receiver<Signal>,
    deaths: Receiver<Died>,
    report: Sender<Died>,
    fatal: Receiver<String>,
    fatal_report: Sender<String>,
    lock_requested: Receiver<()>,
    lock_request: Sender<()>,
}

impl Supervisor {
    /// Starts to listen for signals.
    ///
    /// # Errors
    /// When the handlers or the thread cannot be set up.
    pub(super) fn listen() -> std::io::Result<Self> {
        let (listener, signals) = Listener::start()?;
        let (report, deaths) = bounded(DEATHS);
        let (fatal_report, fatal) = bounded(1);
        let (lock_request, lock_requested) = bounded(1);
        Ok(Supervisor {
            listener,
            signals,
            deaths,
            report,
            fatal,
            fatal_report,
            lock_requested,
            lock_request,
        })
    }

    /// Reports the death of a thread that must not end.
    pub(super) fn on_death(&self) -> OnDeath {
        OnDeath::Supervisor(self.report.clone())
    }

    /// The channel behind [`Supervisor::on_death`], for rooms that start several threads.
    pub(super) fn deaths(&self) -> Sender<Died> {
        self.report.clone()
    }

    /// For rooms that find out later that the agent cannot do what the configuration says.
    pub(super) fn fatal(&self) -> Sender<String> {
        self.fatal_report.clone()
    }

    /// For the watch of the lock file: other processes that open it.
    pub(super) fn lock_requests(&self) -> Sender<()> {
        self.lock_request.clone()
    }

    /// Waits for an event or for `limit`, before the agent runs. Returns whether a signal ended the
    /// wait, so that the process has to end.
    pub(super) fn is_stopped_within(&self, events: &Receiver<()>, limit: Duration) -> bool {
        let due = after(limit);
        loop {
            let _waiting = threads::waiting("the lock file and signals");
            select_biased! {
                recv(self.signals) -> signal => match signal {
                    Ok(Signal::DumpThreads) => dump_threads(),
                    Ok(Signal::Stop) | Err(_) => return true,
                },
                recv(events) -> _ => return false,
                recv(due) -> _ => return false,
            }
        }
    }

    /// Waits until the process has to end. On SIGQUIT it logs all threads. If the service manager
    /// has a watchdog, it gets reports while the last turn of the sync loop is younger than half of
    /// the watchdog's time.
    pub(super) fn wait(&self, manager: &ServiceManager, turn_age: impl Fn() -> Duration) -> StopReason {
        let limit = manager.watchdog();
        let reports = limit.map_or_else(never, |limit| tick((limit / REPORTS).max(SHORTEST)));
        loop {
            let _waiting = threads::waiting("signals and deaths");
            select_biased! {
                recv(self.deaths) -> died => {
                    if let Ok(died) = died {
                        return StopReason::Died(died);
                    }
                }
                recv(self.fatal) -> message => {
                    if let Ok(message) = message {
                        return StopReason::Fatal(message);
                    }
                }
                recv(self.lock_requested) -> request => {
                    if request.is_ok() {
                        return StopReason::LockRequested;
                    }
                }
                recv(reports) -> _ => {
                    if limit.is_some_and(|limit| turn_age() < limit / 2) {
                        manager.is_alive();
                    }
                }
                recv(self.signals) -> signal => match signal {
                    Ok(Signal::DumpThreads) => dump_threads(),
                    Ok(Signal::Stop) => return StopReason::Signal,
                    Err(_) => {
                        let panic = Some("the signal thread has ended".to_owned());
                        return StopReason::Died(Died { thread: "signals".to_owned(), panic });
                    }
                },
            }
        }
    }

    /// Ends the signal thread.
    pub(super) fn close(self) {
        self.listener.close();
    }
}

/// Logs each thread, the object of its wait and the duration.
fn dump_threads() {
    let mut lines = threads::report();
    lines.sort_by(|a, b| a.name.cmp(&b.name));
    log::info!("{} threads:", lines.len());
    for line in lines {
        log::info!("  {:<15} {:>9.3} s  {}", line.name, line.since.as_secs_f64(), line.waits_for);
    }
}
