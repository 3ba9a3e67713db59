//! Requests to the thread `clean` to free space at once, when disks are short.

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::eviction::Reclaim;
use crate::util::wake::Wake;

/// A request to free space.
pub(crate) struct Request {
    /// What to remove, in this order, also if one of them fails.
    pub what: &'static [Reclaim],
    done: Sender<()>,
    wake: Wake,
}

/// Makes the channel of requests. Only one waits.
#[must_use]
pub(crate) fn requests() -> (Sender<Request>, Receiver<Request>) {
    bounded(1)
}

/// Sends a request. The result is closed when it was carried out, or cannot be sent because one
/// waits already; then `wake` rings.
pub(crate) fn request(to: &Sender<Request>, what: &'static [Reclaim], wake: Wake) -> Receiver<()> {
    let (done, ended) = bounded(1);
    if let Err(error) = to.try_send(Request { what, done, wake }) {
        error.into_inner().finish();
    }
    ended
}

impl Request {
    /// The request was carried out.
    pub(super) fn finish(self) {
        let Request { done, wake, .. } = self;
        drop(done);
        wake.ring();
    }
}
