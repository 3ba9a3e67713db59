//! Copies of collections that stay current (Go: client-go/tools/cache's Reflector).

mod backoff;
mod cycle;
mod page;

use std::io;
use std::time::Instant;

use serde::de::DeserializeOwned;

use super::client::Client;
use super::spread::Spread;
use super::target::Target;
use crate::util::stop::Waited;
use crate::util::threads::{self, OnDeath, Running, Stack};
use backoff::WatchBackoff;
use cycle::Reflector;

/// A change of a collection.
#[derive(Debug, Clone, PartialEq)]
pub enum Change<T> {
    /// These are all objects of the collection.
    Replaced(Vec<T>),
    /// An object is new or has changed; this is its state.
    Set(T),
    /// An object was deleted; this is its last state.
    Removed(T),
}

/// The objects to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// The collection.
    pub target: Target,
    /// A field selector such as `spec.nodeName=node1`.
    pub field_selector: Option<String>,
    /// A label selector such as `app=x`.
    pub label_selector: Option<String>,
    /// How soon a wait ends when the API server returns.
    pub spread: Spread,
}

/// Starts the thread `watch/<name>`, which passes every change to `sink`: first all existing
/// objects ([`Change::Replaced`]), then each change, and after a gap all objects again. It retries
/// without a limit, and within `watched.spread` when another request shows that the API server has returned.
/// Stopping it ends its request.
///
/// # Errors
/// When the kernel cannot create a thread.
pub fn spawn_reflector<T: DeserializeOwned + 'static>(
    name: &'static str,
    client: Client,
    watched: Watched,
    on_death: OnDeath,
    mut sink: impl FnMut(Change<T>) + Send + 'static,
) -> io::Result<Running> {
    let breaker = client.breaker();
    let waker = breaker.clone();
    let running = threads::spawn(&format!("watch/{name}"), Stack::Large, on_death, move |stop| {
        let client = client.with_breaker(breaker);
        let mut backoff = WatchBackoff::new(Instant::now());
        let mut reflector = Reflector::new(&client, &watched, &mut sink);
        loop {
            let moment = client.moment();
            match reflector.cycle(&mut backoff) {
                Ok(()) => {}
                Err(error) if error.is_stopping() => break,
                // The change of credentials ended the request.
                Err(_) if client.credential_generation() != moment.generation => {}
                Err(error) => reflector.count_failure(&error),
            }
            // After a change of credentials, retry immediately.
            if client.credential_generation() == moment.generation
                && reflector.pause(moment, &mut backoff) == Waited::Stopped
            {
                break;
            }
        }
        // The body must not return before the stop signal: that would be reported as a failed
        // thread. The client may have been shut down first.
        let _waiting = threads::waiting("stop");
        let _ = stop.signal().recv();
    })?;
    Ok(running.with_waker(Box::new(move || waker.trip())))
}
