//! Where the thread of a probe leaves the probe when it ends, because no check can be due before
//! the next update: the startup probe has passed, or the container has exited.

use std::sync::{Mutex, MutexGuard};

use super::probe::{Probe, Update};
use crate::util::lock::LockExt;
use crate::util::mailbox::Inbox;

/// Holds the probe if it has no thread. The registry locks it while it posts an update, so that
/// the update is received by the thread or starts the next one.
#[derive(Default)]
pub(super) struct Parking(Mutex<Option<Box<Probe>>>);

impl Parking {
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Box<Probe>>> {
        self.0.locked()
    }

    /// Parks a probe. Returns the probe if there is an update for it.
    pub(super) fn park(&self, probe: Box<Probe>, inbox: &Inbox<(), Update>) -> Option<Box<Probe>> {
        let mut parked = self.lock();
        if !inbox.is_empty() {
            return Some(probe);
        }
        *parked = Some(probe);
        None
    }
}
