//! Copies of collections that stay current (Go: client-go/tools/cache's Reflector).

mod cycle;
mod page;
mod waits;

use std::io;
use std::time::Instant;

use serde::de::DeserializeOwned;

use super::client::Client;
use super::target::Target;
use crate::util::backoff::random_unit;
use crate::util::stop::Waited;
use crate::util::threads::{self, OnDeath, Running, Stack};
use cycle::Reflector;
use waits::Waits;

/// What happened to a collection.
#[derive(Debug, Clone, PartialEq)]
pub enum Change<T> {
    /// This is all there is.
    Replaced(Vec<T>),
    /// This object is new or has changed.
    Set(T),
    /// This object was deleted; this is its last state.
    Removed(T),
}

/// What is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// The collection.
    pub target: Target,
    /// `spec.nodeName=node1`.
    pub field_selector: Option<String>,
    /// `app=x`.
    pub label_selector: Option<String>,
}

/// Starts the thread `watch/<name>`, which passes every change to `sink`: first what is there
/// ([`Change::Replaced`]), then what happens to it, and after a gap again all there is. It
/// never gives up. Stopping it breaks off its request.
///
/// # Errors
/// When the kernel refuses a thread.
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
        let mut waits = Waits::new(Instant::now());
        let mut reflector = Reflector::new(&client, &watched, &mut sink);
        loop {
            let generation = client.generation();
            match reflector.cycle(&mut waits) {
                Ok(()) => {}
                Err(error) if error.is_stopping() => break,
                // Broken off on purpose.
                Err(_) if client.generation() != generation => {}
                Err(error) => reflector.note(&error),
            }
            // Other credentials deserve a try at once.
            if client.generation() == generation
                && client.pause_with(generation, waits.next(Instant::now(), random_unit())) == Waited::Stopped
            {
                break;
            }
        }
        // The body must not return before the stop signal: that would count as a death. The
        // client may have been shut down first.
        let _waiting = threads::waiting("stop");
        let _ = stop.signal().recv();
    })?;
    Ok(running.with_waker(Box::new(move || waker.trip())))
}
