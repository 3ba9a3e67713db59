//! Room `server`: answers over HTTP, for probes, for tools and for the local commands.
//!
//! Owns: the health listener, the read-only listener, the node API's (TLS), the local socket,
//! one tiny_http server behind them on a private socket, and the claims ([`claim_root`],
//! [`claim_socket`]) that keep a second agent out.
//! Threads: `http` (owner of the others), `http/0` (hands requests to their connections),
//! `lst/<listener>` (accept), per open connection `conn/<n>` (moves bytes) and `strm/<n>`
//! (makes the answer), capped per listener; tiny_http has five unnamed ones.
//! Inbox: none; it reads snapshots through the closures in [`Deps`].
//! Invariants: only vetted requests reach tiny_http, which sets no limit on anything (a
//! body length alone can make it allocate without bound); a request is taken only from a
//! connection that a listener announced; every wait ends when the `http` thread stops; a
//! slow client, a slow answer or a panic concerns one connection.
//! Absent on purpose: HTTP/2, bodies beyond a few KiB, trust in any header but a token that
//! the API server vouches for.
//! Go counterpart: pkg/kubelet/server, and parts of crictl and kubectl.

mod auth;
mod claim;
mod client;
mod connection;
mod container_logs;
mod crowd;
mod debug;
mod endpoints;
mod exchange;
#[cfg(test)]
pub(crate) mod fuzz;
mod head;
mod health;
mod http;
mod listener;
mod main_connection;
mod main_port;
mod metrics;
mod node_logs;
mod node_query;
mod peer;
mod pump;
mod query;
mod routes;
mod run;
mod select;
mod shares;
mod stats;
mod streams;
#[cfg(test)]
mod tests;
mod upgrade;
mod views;
mod zpages;

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use auth::{Auth, Mode, Reviews, Settings as AuthSettings};
pub use claim::{Claim, claim_root, claim_socket};
pub use endpoints::{Checkpoint, Endpoints, FindInstance, FindObject, RunCommand, Switches};
pub use listener::connect_local;
pub use metrics::MetricsPage;
pub use select::{Selection, default_container, resolve};
pub use stats::{Detail, StatsDeps};
pub use views::{
    DebugReply, Described, ImageRow, KUBERNETES_VERSION, MemoryReport, NodeReport, PodChange, PodView,
    PodsReply, ProblemReport, QueueReport, RuntimeReport, SourceReport, ThreadRow, VersionReply,
};

use crate::cri::RuntimeClient;
use crate::kube::events::EventLog;
use crate::model::api::EphemeralContainer;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::transport::tls::Acceptor;
use crate::util::metrics::Page;
use crate::util::stop::StopToken;
use crate::util::threads::{OnDeath, Running};

/// Where the local socket is unless a flag says otherwise.
pub const LOCAL_SOCKET: &str = "/run/coracle/coracle.sock";

/// The node API's port.
pub struct MainPort {
    /// `address:port`; `::` takes both families.
    pub address: SocketAddr,
    /// Makes its sessions.
    pub tls: Acceptor,
    /// Knows who may ask for what.
    pub auth: Auth,
}

/// Where to listen.
pub struct Settings {
    /// `healthzBindAddress:healthzPort`; `None`: off.
    pub healthz: Option<SocketAddr>,
    /// `address:readOnlyPort`; `None`: off.
    pub read_only: Option<SocketAddr>,
    /// The node API; `None`: off.
    pub main: Option<MainPort>,
    /// The local commands' socket; its directory also holds the private one. To be claimed
    /// before ([`claim_socket`]).
    pub local_socket: PathBuf,
    /// Whether the local socket answers root of other mount and PID namespaces, too.
    pub any_namespace: bool,
}

/// One named check of `/healthz`.
#[derive(Clone)]
pub struct HealthCheck {
    /// As in `/healthz/<name>`.
    pub name: &'static str,
    /// Says why it fails. Must not block.
    pub probe: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

/// A container's log file.
#[derive(Clone)]
pub struct LogSource {
    /// The current file.
    pub path: PathBuf,
    /// Whether the container still runs, asked while following.
    pub running: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// What to read of a log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Go on as the file grows, until the container ends.
    pub follow: bool,
    /// Only the last so many lines.
    pub tail: Option<u64>,
    /// Only lines at or after this time.
    pub since: Option<jiff::Timestamp>,
    /// Only what came out of one of the container's outputs.
    pub stream: Option<crate::model::log_line::Stream>,
    /// Put the time before each line.
    pub timestamps: bool,
    /// Stop after so many bytes.
    pub limit_bytes: Option<u64>,
}

/// Reads a log into a writer until its end or the stop signal; flushes as it goes.
pub type ReadLog = dyn Fn(&Path, &LogOptions, &mut dyn Write, &dyn Fn() -> bool, &StopToken) -> Result<(), String>
    + Send
    + Sync;

/// Finds the log of a pod's container, or of its previous instance.
pub type FindLog = dyn Fn(&PodUid, &str, bool) -> Result<LogSource, String> + Send + Sync;

/// Adds an ephemeral container to a pod that runs.
pub type AddEphemeral = dyn Fn(&PodUid, EphemeralContainer) -> Result<(), String> + Send + Sync;

/// Writes one page of metrics.
pub type WriteMetrics = dyn Fn(MetricsPage, &mut Page) + Send + Sync;

/// Shows every pod, one after the other.
pub type EachPod = dyn Fn(&mut dyn FnMut(PodView)) + Send + Sync;

/// Finds a pod of the configuration by namespace and name.
pub type FindPod = dyn Fn(&str, &str) -> Option<Pod> + Send + Sync;

/// What the runtime was last seen to have of a pod.
pub type RuntimePod = dyn Fn(&PodUid) -> Option<Arc<PodRuntime>> + Send + Sync;

/// Tells whether a UID is that of a pod's mirror.
pub type IsMirror = dyn Fn(&PodUid, &Pod) -> bool + Send + Sync;

/// What exec, attach and port-forward need.
#[derive(Clone)]
pub struct StreamDeps {
    /// `enableDebuggingHandlers`.
    pub enabled: bool,
    /// Whether WebSocket v5 and tunnels end here (gate ExtendWebSocketsToKubelet).
    pub websockets: bool,
    /// Finds a pod.
    pub find_pod: Arc<FindPod>,
    /// Whether this is the UID of the pod's mirror.
    pub is_mirror: Arc<IsMirror>,
    /// Looks at a pod's containers.
    pub runtime_pod: Arc<RuntimePod>,
    /// Is asked for URLs.
    pub cri: RuntimeClient,
}

#[cfg(test)]
impl StreamDeps {
    /// Those of a node without pods and without a runtime.
    pub(crate) fn none() -> StreamDeps {
        let (cri, _) = crate::cri::connect(crate::cri::Settings {
            runtime_endpoint: "unix:///nowhere/cri.sock".to_owned(),
            image_endpoint: None,
            request_timeout: crate::cri::DEFAULT_REQUEST_TIMEOUT,
        })
        .unwrap();
        StreamDeps {
            enabled: true,
            websockets: true,
            find_pod: Arc::new(|_, _| None),
            is_mirror: Arc::new(|_, _| false),
            runtime_pod: Arc::new(|_| None),
            cri,
        }
    }
}

/// Where the answers come from. Every closure reads a snapshot or has its own deadline.
#[derive(Clone)]
pub struct Deps {
    /// All pods of the configuration, status filled in. One at a time: copies of all of them
    /// are megabytes.
    pub pods: Arc<EachPod>,
    /// Waits up to the duration for a pod version above the given one; returns the newest.
    pub wait_pods: Arc<dyn Fn(u64, Duration) -> u64 + Send + Sync>,
    /// What runs, as the runtime lists it.
    pub running: Arc<dyn Fn() -> Vec<ListedPod> + Send + Sync>,
    /// The runtime's images.
    pub images: Arc<dyn Fn() -> Result<Vec<ImageRow>, String> + Send + Sync>,
    /// The node's own report.
    pub status: Arc<dyn Fn() -> NodeReport + Send + Sync>,
    /// The checks behind `/healthz`, in order.
    pub checks: Vec<HealthCheck>,
    /// Finds a log.
    pub log_path: Arc<FindLog>,
    /// Reads a log.
    pub read_log: Arc<ReadLog>,
    /// Recorded events.
    pub events: EventLog,
    /// Writes the metrics.
    pub metrics: Arc<WriteMetrics>,
    /// What is used of the machine.
    pub stats: StatsDeps,
    /// Takes what `coracle debug` wants.
    pub add_ephemeral: Arc<AddEphemeral>,
    /// What the main port's plain answers ask for.
    pub endpoints: Endpoints,
    /// What streams need.
    pub streams: StreamDeps,
}

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another agent has this root directory.
    #[error("another agent already runs here: it has {}", path.display())]
    AlreadyRunning {
        /// The directory.
        path: PathBuf,
    },
    /// Another agent, or another program, answers at the local socket.
    #[error("another process answers at {}; --local-socket gives this agent another socket", path.display())]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// The root directory or the local socket could not be claimed.
    #[error("cannot claim {}", path.display())]
    Claim {
        /// The directory or the socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A Unix socket could not be made.
    #[error("cannot listen on the socket {}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A TCP port could not be bound.
    #[error("cannot listen on {address} ({what})")]
    Bind {
        /// Which listener.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The HTTP server did not start.
    #[error("cannot start the HTTP server on {}: {why}", path.display())]
    Http {
        /// The private socket.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The kernel refused a thread or a pair of sockets.
    #[error("cannot start the server's thread {name}")]
    Thread {
        /// The thread's name.
        name: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// The running server.
pub struct Started {
    /// Owner of all its threads.
    pub running: Running,
    /// Where the health listener really is (`None`: off, or its port is still taken and retried).
    pub healthz: Option<SocketAddr>,
    /// Where the read-only listener really is.
    pub read_only: Option<SocketAddr>,
    /// Where the node API really is.
    pub main: Option<SocketAddr>,
}

/// Starts the listeners. A taken health port is tried again every 5 s; the others are errors.
///
/// # Errors
/// When the read-only port or a socket cannot be bound, or the kernel refuses a thread.
pub fn spawn(settings: Settings, deps: Deps, on_death: OnDeath) -> Result<Started, ServerError> {
    http::spawn(settings, deps, on_death)
}
