//! Room `server`: HTTP for probes, for tools and for the local commands.
//!
//! Owns: the health listener, the read-only listener, the node API's (TLS), the local socket,
//! and the claims ([`claim_root`], [`claim_socket`]) that keep a second agent out.
//! Threads: `listen` (accepts for all listeners, and watches the clients of requests under way),
//! per open connection `conn/<n>` (reads requests and responds to them), limited per listener.
//! Inbox: none; it reads snapshots through the closures in [`Deps`].
//! Layout: `listen` (sockets, who may connect), `http` (one connection, its requests and
//! responses), `auth` (callers of the node API), `route` (which listener serves what), `node`
//! (paths of the kubelet's ports), `local` (paths of the local socket), `upgrade` (streams of bytes
//! in both directions), `quota` and `context` (limits, and what connections share).
//! Invariants: a request is parsed once, strictly, and answered on its connection's thread; every
//! wait ends when the `listen` thread stops; a slow client, a slow response or a panic concerns
//! one connection.
//! Absent on purpose: HTTP/2, bodies beyond a few KiB, trust in any header but a token that
//! the API server vouches for.
//! Go counterpart: pkg/kubelet/server, and parts of crictl and kubectl.

mod auth;
mod claim;
mod context;
mod deps;
mod http;
mod listen;
mod local;
mod node;
mod quota;
mod route;
#[cfg(test)]
mod tests;
mod upgrade;

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

pub use auth::{Auth, Mode, Reviews, Settings as AuthSettings};
pub use claim::{Claim, claim_root, claim_socket};
pub use context::MainPort;
pub use deps::{
    AddEphemeral, Checkpoint, Deps, Detail, Endpoints, FindInstance, FindLog, FindObject, FindPod,
    HealthCheck, IsMirror, LogOptions, LogSource, MetricsPage, ReadLog, RunCommand, RuntimePod, ServerError,
    StatsDeps, StreamDeps, Summarize, Switches, WriteMetrics,
};
pub use listen::bind::connect_local;
pub use local::select::{Selection, default_container, resolve};
pub use local::views::{
    DebugReply, Described, EachPod, ImageRow, KUBERNETES_VERSION, MemoryReport, NodeReport, PodChange,
    PodView, PodsReply, ProblemReport, QueueReport, RuntimeReport, SourceReport, ThreadRow, VersionReply,
};

use crate::util::threads::{OnDeath, Running};
use context::Context;
use http::request::Listener;
use listen::accept::{self, Port};
use listen::hangups::Hangups;

/// Where the local socket is unless a flag says otherwise.
pub const LOCAL_SOCKET: &str = "/run/coracle/coracle.sock";

/// Where to listen.
pub struct Settings {
    /// `healthzBindAddress:healthzPort`; `None`: off.
    pub healthz: Option<SocketAddr>,
    /// `address:readOnlyPort`; `None`: off.
    pub read_only: Option<SocketAddr>,
    /// The node API; `None`: off.
    pub main: Option<MainPort>,
    /// The local commands' socket. To be claimed before ([`claim_socket`]).
    pub local_socket: PathBuf,
    /// Whether the local socket accepts root of other mount and PID namespaces, too.
    pub any_namespace: bool,
}

/// The running server.
pub struct Started {
    /// Owner of all its threads.
    pub running: Running,
    /// Address of the health listener (`None`: off, or its port is still in use and retried).
    pub healthz: Option<SocketAddr>,
    /// Address of the read-only listener.
    pub read_only: Option<SocketAddr>,
    /// Address of the node API.
    pub main: Option<SocketAddr>,
}

/// Starts the listeners. A health port in use is tried again every 5 s; for the others that is an
/// error.
///
/// # Errors
/// When another port or a socket cannot be bound, or the kernel refuses a thread.
pub fn spawn(settings: Settings, deps: Deps, on_death: OnDeath) -> Result<Started, ServerError> {
    let Settings { healthz, read_only, main, local_socket, any_namespace } = settings;
    let local = Port::local(&local_socket)?;
    let main_at = main.as_ref().map(|main| main.address);
    let read_only = read_only.map(|at| Port::tcp(Listener::ReadOnly, "read-only port", at)).transpose()?;
    let healthz = healthz.map(|at| Port::tcp_or_later(Listener::Healthz, "healthz port", at));
    let node_api = main_at.map(|at| Port::tcp(Listener::Main, "node API", at)).transpose()?;
    let address = |port: &Option<Port>| port.as_ref().and_then(Port::address);
    let addresses = (address(&healthz), address(&read_only), address(&node_api));

    let failed = |source| ServerError::Thread { name: "listen", source };
    let (stopper, shutdown) = UnixStream::pair().map_err(failed)?;
    let hangups = Hangups::new().map_err(failed)?;
    let context = Context::new(deps, main, any_namespace, hangups, shutdown);
    let ports = [healthz, read_only, node_api, Some(local)].into_iter().flatten().collect();
    let running = accept::spawn(ports, context, stopper, on_death).map_err(failed)?;
    Ok(Started { running, healthz: addresses.0, read_only: addresses.1, main: addresses.2 })
}
