//! Waits for signals and for threads that die; decides when the process ends.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use signal_hook::consts::{SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::util::threads::{self, Died, OnDeath, Running, Stack};

/// Deaths that may wait to be read; the first one decides.
const DEATHS: usize = 16;
/// Signals that may wait to be handled; more of the same kind add nothing.
const SIGNALS: usize = 8;

/// Why the agent stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// SIGTERM or SIGINT.
    Asked,
    /// A thread that must not end did.
    Died(Died),
}

/// The ears of the main thread.
pub struct Supervisor {
    signals: Receiver<i32>,
    deaths: Receiver<Died>,
    tell: Sender<Died>,
    handle: Handle,
    thread: Option<Running>,
}

impl Supervisor {
    /// Starts to listen for signals.
    ///
    /// # Errors
    /// When the handlers or the thread cannot be set up.
    pub fn listen() -> std::io::Result<Self> {
        let mut incoming = Signals::new([SIGTERM, SIGINT, SIGQUIT])?;
        let handle = incoming.handle();
        let (signal_tx, signals) = bounded(SIGNALS);
        let (tell, deaths) = bounded(DEATHS);
        // Closing the handle is this thread's waker: it blocks in a read of a pipe.
        let thread = threads::spawn("signals", Stack::Small, OnDeath::Nobody, move |_| {
            let _waiting = threads::waiting("signal");
            for signal in incoming.forever() {
                if signal_tx.try_send(signal).is_err() {
                    log::warn!("signal {signal} came too often and was dropped");
                }
            }
        })?;
        Ok(Supervisor { signals, deaths, tell, handle, thread: Some(thread) })
    }

    /// What a thread that must not end is spawned with.
    #[must_use]
    pub fn on_death(&self) -> OnDeath {
        OnDeath::Supervisor(self.tell.clone())
    }

    /// Where deaths are told.
    #[must_use]
    pub fn deaths(&self) -> Sender<Died> {
        self.tell.clone()
    }

    /// Waits until the process has to end. Answers SIGQUIT meanwhile.
    pub fn wait(&self) -> Ending {
        loop {
            let _waiting = threads::waiting("signals and deaths");
            select_biased! {
                recv(self.deaths) -> died => {
                    if let Ok(died) = died {
                        return Ending::Died(died);
                    }
                }
                recv(self.signals) -> signal => match signal {
                    Ok(SIGQUIT) => dump_threads(),
                    Ok(_) => return Ending::Asked,
                    Err(_) => {
                        let panic = Some("the signal thread is gone".to_owned());
                        return Ending::Died(Died { thread: "signals".to_owned(), panic });
                    }
                },
            }
        }
    }

    /// Ends the signal thread.
    pub fn close(mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            thread.stop(Duration::from_secs(1));
        }
    }
}

/// Writes every thread, what it waits for and for how long, to the log.
fn dump_threads() {
    let mut lines = threads::report();
    lines.sort_by(|a, b| a.name.cmp(&b.name));
    log::info!("{} threads:", lines.len());
    for line in lines {
        log::info!("  {:<15} {:>9.3} s  {}", line.name, line.since.as_secs_f64(), line.waits_for);
    }
}
