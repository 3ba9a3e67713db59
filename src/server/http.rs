//! tiny_http on a private socket, and the thread that owns everything in this room.
//!
//! The listeners vet each request and pass a clean one on. tiny_http ends its accept loop
//! at the first failed accept, or with a panic when descriptors run out; then the owner
//! builds it anew while the listeners keep answering 503.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

use super::crowd::Crowd;
use super::listener::{self, Bound, Listener, Unlink};
use super::shares::Shares;
use super::{Deps, MainPort, ServerError, Settings, Started};

/// The header by which a request names the connection that it came through.
pub(super) const KEY_HEADER: &str = "Coracle-Key";

/// A pause between two attempts to build the HTTP server anew.
const REBUILD_PAUSE: Duration = Duration::from_secs(1);

/// Streams at once over all listeners but the main port: each holds two threads for as long as it lasts.
pub(super) const STREAMS: usize = 16;

/// DIFFERS: the Go kubelet has no limits here.
/// Such streams at the main port, for a cluster follows many logs at once.
pub(super) const MAIN_STREAMS: usize = 192;

/// Those of one address. An API server is one address, and mostly one certificate, for all its
/// users: it does not say for whom it asks, so nothing here can tell them apart, and to be fair
/// among them is its own matter. Hence a large share, which still leaves a third to callers
/// who come straight to the node.
pub(super) const STREAMS_PER_PEER: usize = 128;

/// Those of one user whom a token named, from wherever: no API server comes with a token, so
/// this is a person, or a program of somebody's. Two of them do not take what the API server
/// leaves.
pub(super) const STREAMS_PER_TOKEN: usize = 32;

/// Answers at once that grow with what runs on the node (a list of pods, metrics, statistics):
/// each is in memory as a whole until its client has taken it.
pub(super) const ANSWERS: usize = 32;

/// Those of one address.
pub(super) const ANSWERS_PER_PEER: usize = 24;

/// What listeners and connections share.
#[derive(Clone)]
pub(super) struct Gate {
    pub deps: Arc<Deps>,
    /// Readable (closed) as soon as the server stops.
    pub wake: Arc<UnixStream>,
    pub streams: Arc<Shares>,
    /// Those of the main port, which has more of them.
    pub main_streams: Arc<Shares>,
    /// Its large answers.
    pub answers: Arc<Shares>,
    /// How the main port knows its callers.
    pub main: Option<Arc<MainPort>>,
    /// Who is connected to it.
    pub crowd: Arc<Crowd>,
    /// Whether the local socket answers root of other namespaces, too.
    pub any_namespace: bool,
    /// The private socket.
    pub inner: PathBuf,
    table: Arc<Table>,
    broken: Sender<()>,
}

/// The connections that wait for their request to come out of tiny_http. Only the listeners
/// put keys in, so a request without one did not come through them.
struct Table {
    secret: u64,
    next: AtomicU64,
    waiting: Mutex<HashMap<String, Sender<tiny_http::Request>>>,
}

impl Table {
    fn take(&self, key: &str) -> Option<Sender<tiny_http::Request>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(key)
    }
}

/// A connection's place in the table; dropping it gives the place up.
pub(super) struct Ticket {
    pub key: String,
    pub request: Receiver<tiny_http::Request>,
    table: Arc<Table>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.table.take(&self.key);
    }
}

#[cfg(test)]
impl Gate {
    /// One without listeners and without anything behind it.
    pub(super) fn before(deps: Deps) -> Gate {
        let (_, wake) = UnixStream::pair().unwrap();
        Gate {
            deps: Arc::new(deps),
            wake: Arc::new(wake),
            streams: Shares::new(STREAMS),
            main_streams: Shares::new(MAIN_STREAMS),
            answers: Shares::new(ANSWERS),
            main: None,
            crowd: Arc::default(),
            any_namespace: false,
            inner: PathBuf::new(),
            table: Arc::new(Table { secret: 0, next: AtomicU64::new(0), waiting: Mutex::default() }),
            broken: bounded(1).0,
        }
    }
}

impl Gate {
    /// Announces a request.
    pub(super) fn announce(&self) -> Ticket {
        let number = self.table.next.fetch_add(1, Ordering::Relaxed);
        let key = format!("{:016x}-{number:x}", self.table.secret);
        let (give, request) = bounded(1);
        self.table.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), give);
        Ticket { key, request, table: Arc::clone(&self.table) }
    }

    /// Tells the owner that tiny_http does not answer.
    pub(super) fn report_broken(&self) {
        // One report is enough.
        let _ = self.broken.try_send(());
    }

    /// A number for the next connection's threads.
    pub(super) fn number(&self) -> u64 {
        self.table.next.load(Ordering::Relaxed) % 100_000
    }
}

/// tiny_http with the thread that takes requests from it.
struct Inner {
    server: Arc<tiny_http::Server>,
    taker: Option<Running>,
}

impl Inner {
    fn start(path: &Path, table: &Arc<Table>, broken: &Sender<()>) -> Result<Self, ServerError> {
        let unix = listener::bind_inner(path)
            .map_err(|source| ServerError::Socket { path: path.to_owned(), source })?;
        let server = tiny_http::Server::from_listener(unix, None)
            .map_err(|why| ServerError::Http { path: path.to_owned(), why: why.to_string() })?;
        let server = Arc::new(server);
        let (queue, table, broken) = (Arc::clone(&server), Arc::clone(table), broken.clone());
        // Called when it ended unasked: tiny_http gave up, or the taker panicked.
        let on_death = OnDeath::Unit(Box::new(move |_| {
            let _ = broken.try_send(());
        }));
        let taker = threads::spawn("http/0", Stack::Small, on_death, move |stop| take(&queue, &table, &stop))
            .map_err(|source| ServerError::Thread { name: "http/0", source })?;
        Ok(Inner { server, taker: Some(taker) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(mut taker) = self.taker.take() {
            taker.ask_to_stop();
            self.server.unblock();
        }
        // The last owner of the server closes its accept thread and removes its socket.
    }
}

/// Takes requests from tiny_http and hands each to the connection that announced it.
fn take(server: &tiny_http::Server, table: &Table, stop: &StopToken) {
    loop {
        let request = {
            let _waiting = threads::waiting("requests");
            server.recv()
        };
        if stop.is_stopped() {
            return;
        }
        match request {
            Ok(request) => {
                let key = request
                    .headers()
                    .iter()
                    .find(|header| header.field.equiv(KEY_HEADER))
                    .map(|header| header.value.as_str().to_owned());
                match key.and_then(|key| table.take(&key)) {
                    // A connection that gave up drops the request, which ends it with a 500.
                    Some(give) => drop(give.try_send(request)),
                    None => {
                        let refusal = tiny_http::Response::from_string("not through a listener\n");
                        let _ = request.respond(refusal.with_status_code(403));
                    }
                }
            }
            Err(why) => {
                log::warn!("the HTTP server stopped accepting: {why}");
                return;
            }
        }
    }
}

/// Binds everything, then starts the owner.
pub(super) fn spawn(settings: Settings, deps: Deps, on_death: OnDeath) -> Result<Started, ServerError> {
    let local = Bound::local(&settings.local_socket)?;
    let unlink = Unlink(settings.local_socket.clone());
    let read_only =
        settings.read_only.map(|address| Bound::tcp("read-only port", address, false)).transpose()?;
    let healthz = settings.healthz.map(|address| Bound::tcp("healthz port", address, true)).transpose()?;
    let main_at = settings.main.as_ref().map(|main| main.address);
    let main = main_at.map(|address| Bound::tcp("node API", address, false)).transpose()?;
    let address = |bound: &Option<Bound>| bound.as_ref().and_then(Bound::address);
    let addresses = (address(&healthz), address(&read_only), address(&main));

    let pair = |source| ServerError::Thread { name: "http", source };
    let (wake_all, wake) = UnixStream::pair().map_err(pair)?;
    let (broken, news) = bounded(1);
    let table = Table {
        secret: RandomState::new().hash_one(std::process::id()),
        next: AtomicU64::new(0),
        waiting: Mutex::default(),
    };
    let gate = Gate {
        deps: Arc::new(deps),
        wake: Arc::new(wake),
        streams: Shares::new(STREAMS),
        main_streams: Shares::new(MAIN_STREAMS),
        answers: Shares::new(ANSWERS),
        main: settings.main.map(Arc::new),
        crowd: Arc::default(),
        any_namespace: settings.any_namespace,
        inner: listener::beside(&settings.local_socket, "http"),
        table: Arc::new(table),
        broken,
    };
    let inner = Inner::start(&gate.inner, &gate.table, &gate.broken)?;

    let mut listeners = Vec::new();
    let (died, deaths) = bounded(4);
    for (listener, bound) in [
        (Listener::Healthz, healthz),
        (Listener::ReadOnly, read_only),
        (Listener::Main, main),
        (Listener::Local, Some(local)),
    ] {
        let Some(bound) = bound else { continue };
        let (gate, died) = (gate.clone(), died.clone());
        let tell = OnDeath::Unit(Box::new(move |death| {
            let _ = died.try_send(death);
        }));
        let running = threads::spawn(listener.thread(), Stack::Small, tell, move |stop| {
            listener::run(listener, bound, &gate, &stop);
        })
        .map_err(|source| ServerError::Thread { name: listener.thread(), source })?;
        listeners.push(running);
    }
    let owned = Owned { wake_all: Some(wake_all), listeners, inner: Some(inner), gate, _unlink: unlink };
    let running = threads::spawn("http", Stack::Small, on_death, move |stop| {
        own(owned, &stop, &news, &deaths);
    })
    .map_err(pair)?;
    Ok(Started { running, healthz: addresses.0, read_only: addresses.1, main: addresses.2 })
}

/// Everything of this room. Dropping it stops all of it, in this order.
struct Owned {
    wake_all: Option<UnixStream>,
    listeners: Vec<Running>,
    inner: Option<Inner>,
    gate: Gate,
    _unlink: Unlink,
}

impl Drop for Owned {
    fn drop(&mut self) {
        for running in &mut self.listeners {
            running.ask_to_stop();
        }
        self.wake_all = None;
        self.listeners.clear();
        self.inner = None;
    }
}

/// The owner's loop: rebuilds tiny_http when it broke, and ends when a listener died.
fn own(
    mut owned: Owned,
    stop: &StopToken,
    news: &Receiver<()>,
    deaths: &Receiver<crate::util::threads::Died>,
) {
    loop {
        let broken = {
            let _waiting = threads::waiting("news");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(deaths) -> death => {
                    if let Ok(death) = death {
                        log::error!("thread {} of the HTTP server ended", death.thread);
                    }
                    // Returning unasked tells the supervisor.
                    return;
                }
                recv(news) -> _ => true,
            }
        };
        if broken {
            owned.inner = None;
            match Inner::start(&owned.gate.inner, &owned.gate.table, &owned.gate.broken) {
                Ok(inner) => {
                    log::info!("the HTTP server was started anew");
                    owned.inner = Some(inner);
                }
                Err(why) => {
                    log::warn!("{why}; trying again");
                    owned.gate.report_broken();
                }
            }
            // Also after success: no more than one attempt a second.
            if stop.wait(REBUILD_PAUSE) == Waited::Stopped {
                return;
            }
        }
    }
}
