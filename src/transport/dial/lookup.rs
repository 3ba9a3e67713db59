//! Look-ups of names through the system's resolver.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{bounded, select_biased};

use super::error::DialError;
use super::socket::Limit;
use crate::util::threads::{self, OnDeath, Stack};
use crate::util::timers;

/// The deadline of a look-up without a deadline of the caller.
const LOOKUP_LIMIT: Duration = Duration::from_secs(30);

/// Concurrent look-ups of one pool, including those whose caller no longer waits.
const MAX_LOOKUPS: usize = 64;

/// The look-ups in progress. Pods name the hosts of probes and hooks: a name whose DNS server does
/// not respond must not prevent look-ups of the API server.
pub(in crate::transport) struct Pool(AtomicUsize);

/// Hosts that pods name.
pub(in crate::transport) static PODS: Pool = Pool(AtomicUsize::new(0));
/// The API server, manifest URLs and their proxies.
pub(in crate::transport) static AGENT: Pool = Pool(AtomicUsize::new(0));

/// One look-up of a pool; dropping it frees the slot.
struct Slot(&'static AtomicUsize);

impl Slot {
    fn take(in_progress: &'static AtomicUsize) -> Option<Slot> {
        let next = |count| (count < MAX_LOOKUPS).then_some(count + 1);
        in_progress.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok().map(|_| Slot(in_progress))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The addresses of `host`. The resolver cannot be interrupted, so it runs on a thread that is not
/// waited for after the deadline; the resolver's own limits (`resolv.conf`) end it.
pub(in crate::transport) fn lookup(
    host: &str,
    port: u16,
    limit: &Limit,
    pool: &'static Pool,
) -> Result<Vec<SocketAddr>, DialError> {
    let failed = |detail: String| DialError::Lookup { host: host.to_owned(), detail };
    if host.contains('\0') || host.len() > 253 {
        return Err(failed("no such host".to_owned()));
    }
    let slot = Slot::take(&pool.0).ok_or_else(|| DialError::TooManyLookups { host: host.to_owned() })?;
    let (result_sender, result_receiver) = bounded(1);
    let name = host.to_owned();
    let running = threads::spawn("lookup", Stack::Small, OnDeath::Unsupervised, move |_| {
        let _slot = slot;
        let found = (name.as_str(), port).to_socket_addrs().map(|found| found.collect::<Vec<_>>());
        // The caller has stopped to read if its deadline is over.
        let _ = result_sender.send(found.map_err(|error| error.to_string()));
    })
    .map_err(|error| failed(error.to_string()))?;
    let _waiting = threads::waiting("name look-up");
    let late =
        limit.deadline.map_or_else(|| crossbeam_channel::after(LOOKUP_LIMIT), |at| timers::at(Some(at)));
    let outcome = select_biased! {
        recv(limit.stop.signal()) -> _ => Err(DialError::Stopped),
        recv(result_receiver) -> found => match found {
            Ok(Ok(found)) if !found.is_empty() => Ok(found),
            Ok(Ok(_)) => Err(failed("no such host".to_owned())),
            // Error texts of the C library depend on its version; Go's are well known.
            Ok(Err(error)) if error.contains("resolve") || error.contains("not known") => {
                log::debug!("look-up of {host}: {error}");
                Err(failed("no such host".to_owned()))
            }
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(failed("the resolver failed".to_owned())),
        },
        recv(late) -> _ => Err(failed("i/o timeout".to_owned())),
    };
    running.leave();
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_in_progress_are_limited() {
        static OWN: AtomicUsize = AtomicUsize::new(0);
        let mut held: Vec<Slot> = std::iter::from_fn(|| Slot::take(&OWN)).collect();
        assert_eq!(held.len(), MAX_LOOKUPS);
        held.pop();
        assert!(Slot::take(&OWN).is_some());
    }

    #[test]
    fn exhausted_pool_is_an_error_of_its_own_and_leaves_other_pools_alone() {
        static FULL: Pool = Pool(AtomicUsize::new(MAX_LOOKUPS));
        static OTHER: Pool = Pool(AtomicUsize::new(0));
        let limit = Limit::new(None, &crate::util::stop::pair().1);
        let error = lookup("localhost", 1, &limit, &FULL).unwrap_err();
        assert!(error.is_too_many_lookups(), "{error}");
        assert_ne!(lookup("localhost", 1, &limit, &OTHER).err(), Some(error));
    }
}
