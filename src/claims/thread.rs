//! The thread `claims`: it unprepares the claims of pods that are gone, and deletes ResourceSlices.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select_biased};

use super::manager::ResourceClaims;
use super::wipes::{self, Slices};
use crate::kube::error::ApiError;
use crate::model::ids::PodUid;
use crate::util::backoff::random_unit;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// The time between two clean-ups, while there are claims.
const CLEAN: Duration = Duration::from_secs(60);

/// The pods that may still use claims, also those that end; `None`: not all sources have delivered
/// their pods.
pub type Active = Box<dyn Fn() -> Option<BTreeSet<PodUid>> + Send>;

impl ResourceClaims {
    /// Starts the thread. `rings` is the other end of the channel that [`ResourceClaims::open`] got.
    ///
    /// # Errors
    /// When the kernel cannot create a thread.
    pub fn start(&self, active: Active, rings: Receiver<()>, on_death: OnDeath) -> io::Result<Running> {
        let claims = self.clone();
        threads::spawn("claims", Stack::Large, on_death, move |stop| claims.run(&active, &rings, &stop))
    }

    fn run(&self, active: &Active, rings: &Receiver<()>, stop: &StopToken) {
        let mut next_clean = Instant::now();
        let mut last = PodUid::default();
        while !stop.is_stopped() {
            self.wipe();
            let now = Instant::now();
            if next_clean <= now && !self.shared.state.locked().is_empty() {
                if let Some(active) = active() {
                    self.unprepare_unused(&active, &mut last, stop, CLEAN);
                }
                next_clean = Instant::now() + CLEAN;
            }
            let clean = (!self.shared.state.locked().is_empty()).then_some(next_clean);
            let until = self.shared.wipes.locked().next().into_iter().chain(clean).min();
            let _waiting = threads::waiting("resource claims");
            match until {
                Some(until) => select_biased! {
                    recv(stop.signal()) -> _ => return,
                    recv(rings) -> _ => {}
                    default(until.saturating_duration_since(Instant::now())) => {}
                },
                None => select_biased! {
                    recv(stop.signal()) -> _ => return,
                    recv(rings) -> _ => {}
                },
            }
        }
    }

    /// Deletes the slices that are due.
    fn wipe(&self) {
        let due = self.shared.wipes.locked().due(Instant::now());
        for slices in due {
            let outcome = self.wipe_one(&slices);
            let mut wipes = self.shared.wipes.locked();
            match outcome {
                Ok(()) => wipes.done(&slices),
                Err(error) => {
                    log::info!("the ResourceSlices of {} cannot be deleted: {error}", shown(&slices));
                    wipes.failed(&slices, Instant::now(), random_unit());
                }
            }
        }
    }

    fn wipe_one(&self, slices: &Slices) -> Result<(), ApiError> {
        if slices.as_ref().is_some_and(|driver| self.shared.is_usable(driver)) {
            return Ok(());
        }
        let Some(api) = &self.shared.api else { return Ok(()) };
        api.delete_slices(&wipes::selector(&self.shared.settings.node, slices))?;
        log::info!("the ResourceSlices of {} were deleted", shown(slices));
        Ok(())
    }
}

fn shown(slices: &Slices) -> String {
    slices.as_ref().map_or_else(|| "this node".to_owned(), |driver| format!("DRA driver {driver}"))
}
