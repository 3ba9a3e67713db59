//! The state that all connections share: the dependencies, the limits, and the signal of the
//! server's stop.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::auth::Auth;
use super::backend::NodeBackend;
use super::listen::hangups::Hangups;
use super::listen::limiter::ConnectionLimiter;
use super::listen::quota::Quota;
use super::registry::settings::RegistrySettings;
use crate::transport::tls::Acceptor;

/// Maximum of concurrent streams on all listeners except the node API; each holds a thread.
pub(super) const STREAMS: usize = 16;

/// DIFFERS: the Go kubelet has no limits here.
/// Streams of the node API: a cluster follows many logs at the same time.
pub(super) const MAIN_STREAMS: usize = 192;

/// Maximum per client address. An API server is one address, and mostly one certificate, for all
/// its users: a request does not name its user, so the API server is responsible for fairness among
/// them. The rest is for callers that connect to the node directly.
pub(super) const STREAMS_PER_PEER: usize = 128;

/// Maximum per user of a token, from all addresses: no API server sends a token, so this is a
/// person or a program. Two of them do not use up the rest.
pub(super) const STREAMS_PER_TOKEN: usize = 32;

/// Maximum of concurrent responses that grow with the number of pods (a list of pods, metrics,
/// statistics): each is in memory as a whole until its client has read it.
pub(super) const RESPONSES: usize = 32;

/// Maximum of those per client address.
pub(super) const RESPONSES_PER_PEER: usize = 24;

/// The node API's port.
pub(crate) struct MainPort {
    /// `address:port`; `::` accepts both families.
    pub address: SocketAddr,
    pub tls: Acceptor,
    /// Authenticates and authorizes its callers.
    pub auth: Auth,
}

/// The state that listeners and connections share.
pub(super) struct Context {
    /// The agent.
    pub node: Arc<dyn NodeBackend>,
    /// Readable as soon as the server stops.
    pub shutdown: Arc<UnixStream>,
    /// The running requests.
    pub hangups: Arc<Hangups>,
    pub streams: Arc<Quota>,
    /// Streams of the node API.
    pub main_streams: Arc<Quota>,
    /// Large responses of the node API.
    pub responses: Arc<Quota>,
    /// The node API; `None`: off.
    pub main: Option<MainPort>,
    /// The connections of the node API.
    pub limiter: Arc<ConnectionLimiter>,
    /// The registry of image archives; `None`: off.
    pub registry: Option<RegistrySettings>,
    /// Whether the local socket accepts root of other namespaces, too.
    pub any_namespace: bool,
    connections: AtomicU64,
}

impl Context {
    pub(super) fn new(
        node: Arc<dyn NodeBackend>,
        main: Option<MainPort>,
        registry: Option<RegistrySettings>,
        any_namespace: bool,
        hangups: Arc<Hangups>,
        shutdown: UnixStream,
    ) -> Arc<Context> {
        Arc::new(Context {
            node,
            shutdown: Arc::new(shutdown),
            hangups,
            streams: Quota::new(STREAMS),
            main_streams: Quota::new(MAIN_STREAMS),
            responses: Quota::new(RESPONSES),
            main,
            registry,
            limiter: Arc::default(),
            any_namespace,
            connections: AtomicU64::new(0),
        })
    }

    /// A number for the next connection's thread.
    pub(super) fn number(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) % 100_000
    }
}

#[cfg(test)]
impl Context {
    /// A context without listeners, and the other end of its `shutdown`.
    pub(super) fn alone(node: Arc<dyn NodeBackend>) -> (Arc<Context>, UnixStream) {
        let (end, shutdown) = UnixStream::pair().unwrap();
        (Context::new(node, None, None, false, Hangups::new().unwrap(), shutdown), end)
    }
}
