//! Room `server`: HTTP for health checks, for the API server and tools, for the local commands, and
//! for the runtime's pulls from image archives.
//!
//! Owns: the listeners (health, read-only, node API with TLS, local socket, registry), and the locks
//! ([`lock_root_dir`], [`lock_local_socket`]) that exclude a second agent.
//! Threads: `listen` (accepts connections, and detects clients that disconnect during a request), per
//! open connection `conn/<n>` (reads requests and responds to them), limited per listener.
//! Inbox: none; responses come from the agent, as [`NodeBackend`].
//! Layout, from the top: `serve` (accepts connections, reads requests, finds the handler by listener
//! and path), `node` (paths of the kubelet's ports), `local` (paths of the local socket), `registry`
//! (images of archives, for the runtime), `upgrade` (streams of bytes in both directions), `context`
//! (shared state), `auth` (callers of the node API), `listen` (sockets, limits of connections, of streams
//! and of large responses), `backend` (what the agent provides), `views` (documents), `http` (one
//! connection, its requests and responses). `pod_resources` and `pods_api` are gRPC servers of their own.
//! Invariants: a request is parsed once, strictly, and served on its connection's thread; every wait
//! ends when the `listen` thread stops; a slow client, a slow response or a panic affects one
//! connection.
//! Absent on purpose: HTTP/2, bodies beyond a few KiB, trust in any header but a token that the API
//! server has reviewed.
//! Go counterpart: pkg/kubelet/server, and parts of crictl and kubectl.

mod auth;
mod backend;
mod bucket;
mod context;
mod error;
mod http;
mod instance_lock;
mod listen;
mod local;
mod node;
pub(crate) mod pod_resources;
pub(crate) mod pods_api;
mod registry;
mod serve;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod upgrade;
mod views;

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use auth::{Auth, Mode, Reviews, Settings as AuthSettings};
pub(crate) use backend::{
    AgentCheck, BackendError, Detail, LogSource, MetricsPage, NodeBackend, OfflineError, Switches,
};
pub(crate) use context::MainPort;
pub(crate) use error::ServerError;
pub(crate) use http::connection::{Connection, Pace, Ready, Socket};
pub(crate) use instance_lock::{InstanceLock, lock_local_socket, lock_root_dir, root_dir_owner};
pub(crate) use listen::bind::connect_local;
pub(crate) use views::containers::default_container;
pub(crate) use views::holdings::{
    ClaimRow, DeviceRow, DevicesReply, MOST_ROWS, PluginRow, VolumeRow, VolumesReply, clip,
};
pub(crate) use views::{
    DebugReply, DiskWritesReport, ImageRow, KUBERNETES_VERSION, LogsReport, MemoryReport, NodeReport,
    PodCgroupReport, PodChange, PodDescription, PodView, PodsReply, ProblemReport, QueueReport,
    ResourceReport, RuntimeReport, SourceReport, ThreadRow, ThresholdReport, VerifyLine, VersionReply,
};

#[cfg(test)]
pub(crate) use registry::images::BlobSource;
pub(crate) use registry::images::Images;
pub(crate) use registry::publish::remove_stale as remove_stale_mirror;
pub(crate) use registry::settings::RegistrySettings;

use crate::util::threads::{OnDeath, Running};
use context::Context;
use http::request::ListenerKind;
use listen::hangups::Hangups;
use registry::publish::Publication;
use serve::accept::{self, Listener};

/// The default path of the local socket.
pub(crate) const LOCAL_SOCKET: &str = "/run/coracle/coracle.sock";

pub(crate) struct Settings {
    /// `healthzBindAddress:healthzPort`; `None`: off.
    pub healthz: Option<SocketAddr>,
    /// `address:readOnlyPort`; `None`: off.
    pub read_only: Option<SocketAddr>,
    /// The node API; `None`: off.
    pub main: Option<MainPort>,
    /// The socket of the local commands; the caller has locked it ([`lock_local_socket`]).
    pub local_socket: PathBuf,
    /// The registry of image archives; `None`: off.
    pub registry: Option<RegistrySettings>,
    /// Whether the local socket accepts root of other mount and PID namespaces, too.
    pub any_namespace: bool,
}

/// Starts the listeners. A health port or a registry's port in use is retried every 5 s; for the
/// other ports this is an error.
///
/// # Errors
/// When another port or a socket cannot be bound, or the kernel refuses a thread.
pub(crate) fn spawn(
    settings: Settings,
    node: Arc<dyn NodeBackend>,
    on_death: OnDeath,
) -> Result<Running, ServerError> {
    let listeners = bind(&settings, &*node)?;
    start(listeners, settings, node, on_death).map_err(|source| ServerError::Thread { source })
}

fn bind(settings: &Settings, node: &dyn NodeBackend) -> Result<Vec<Listener>, ServerError> {
    let mut listeners = vec![Listener::local(&settings.local_socket)?];
    let main = settings.main.as_ref().map(|main| main.address);
    for (kind, what, address) in [
        (ListenerKind::ReadOnly, "read-only port", settings.read_only),
        (ListenerKind::Main, "node API", main),
    ] {
        listeners.extend(address.map(|address| Listener::tcp(kind, what, address)).transpose()?);
    }
    listeners.extend(
        settings.registry.as_ref().map(|registry| {
            Listener::registry(registry.address, Publication::new(registry, node.image_set()))
        }),
    );
    listeners.extend(
        settings
            .healthz
            .map(|address| Listener::tcp_or_later(ListenerKind::Healthz, "healthz port", address)),
    );
    Ok(listeners)
}

fn start(
    listeners: Vec<Listener>,
    settings: Settings,
    node: Arc<dyn NodeBackend>,
    on_death: OnDeath,
) -> io::Result<Running> {
    let (stopper, shutdown) = UnixStream::pair()?;
    let Settings { main, registry, any_namespace, .. } = settings;
    let context = Context::new(node, main, registry, any_namespace, Hangups::new()?, shutdown);
    accept::spawn(listeners, context, stopper, on_death)
}
