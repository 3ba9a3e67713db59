//! A gRPC server on a Unix socket, with handlers that may block.
//!
//! A thread accepts connections and gives them to the library, whose thread only receives requests:
//! each call has a thread of its own, which ends with the call. The library's server is made when the
//! first client connects, so that a node without plugins does not pay for it. Above [`MAX_CALLS`] calls at once a further one fails
//! with `ResourceExhausted`.

use std::fs;
use std::future::Future;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use crossbeam_channel::Receiver;
use futures_util::sink::Sink as _;
use grpcio::{RpcStatus, RpcStatusCode, WriteFlags};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

use super::grpc::{Bell, Kind, StreamingMethod, UnaryMethod, Woken, environment};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Calls that are served at once, by all clients of one server.
pub const MAX_CALLS: usize = 32;
/// The largest request that is accepted.
const MAX_REQUEST_BYTES: i32 = 4 << 20;
/// How long a response may take to be sent: a client may stop to read.
const SEND_LIMIT: Duration = Duration::from_secs(10);
/// How long calls may take to end when the server is dropped.
const END_LIMIT: Duration = Duration::from_secs(2);
/// How long a server may take to stop: its calls, and then the library.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;
/// Open connections of one server: each holds memory of the agent, and a client that may open them
/// can be a container. Plugins and monitoring agents have one each.
const MAX_CONNECTIONS: usize = 64;
/// Open connections of one process, so that one that leaks them leaves places to others.
const MAX_OF_PROCESS: usize = 16;
/// How long no connection is accepted after a failure, such as a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Why a call fails. The client receives it as the status of the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    code: RpcStatusCode,
    message: String,
}

macro_rules! rpc_errors {
    ($($name:ident = $code:ident;)*) => {
        impl RpcError {
            $(
                /// The status with the code of this name.
                pub fn $name(message: impl Into<String>) -> RpcError {
                    RpcError { code: RpcStatusCode::$code, message: message.into() }
                }
            )*
        }
    };
}

rpc_errors! {
    canceled = CANCELLED;
    unknown = UNKNOWN;
    invalid_argument = INVALID_ARGUMENT;
    not_found = NOT_FOUND;
    failed_precondition = FAILED_PRECONDITION;
    resource_exhausted = RESOURCE_EXHAUSTED;
    unimplemented = UNIMPLEMENTED;
    internal = INTERNAL;
    unavailable = UNAVAILABLE;
}

impl RpcError {
    /// The kind of the status.
    pub fn kind(&self) -> Kind {
        Kind::from_code(self.code)
    }

    fn status(self) -> RpcStatus {
        RpcStatus::with_message(self.code, self.message)
    }
}

/// The client of a stream has left, or reads nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientGone;

/// The methods that a server offers.
pub struct Service {
    builder: grpcio::ServiceBuilder,
    calls: Calls,
}

impl Default for Service {
    fn default() -> Self {
        Service::new()
    }
}

impl Service {
    /// Without a method.
    #[must_use]
    pub fn new() -> Service {
        Service { builder: grpcio::ServiceBuilder::new(), calls: Calls::default() }
    }

    /// Adds a method with one response. The token is stopped when the server is dropped.
    #[must_use]
    pub fn unary<Req, Resp, F>(self, method: &'static UnaryMethod<Req, Resp>, handler: F) -> Service
    where
        Req: Send + 'static,
        Resp: Send + 'static,
        F: Fn(Req, &StopToken) -> Result<Resp, RpcError> + Send + Sync + 'static,
    {
        let (handler, calls) = (Arc::new(handler), self.calls.clone());
        let builder = self.builder.add_unary_handler(&method.method, move |ctx, request, sink| {
            let Some(permit) = calls.admit() else {
                // Not waited for: this is the library's thread.
                ctx.spawn(WithoutOutcome(sink.fail(too_many())));
                return;
            };
            let handler = Arc::clone(&handler);
            calls.start(permit, method.name, move |stop| {
                let done = match handler(request, stop) {
                    Ok(response) => sink.success(response),
                    Err(error) => sink.fail(error.status()),
                };
                let _ = complete(done, stop);
            });
        });
        Service { builder, ..self }
    }

    /// Adds a method with a stream of responses, which ends when the handler returns.
    #[must_use]
    pub fn stream<Req, Resp, F>(self, method: &'static StreamingMethod<Req, Resp>, handler: F) -> Service
    where
        Req: Send + 'static,
        Resp: Send + 'static,
        F: Fn(Req, &mut Outgoing<Resp>, &StopToken) -> Result<(), RpcError> + Send + Sync + 'static,
    {
        let (handler, calls) = (Arc::new(handler), self.calls.clone());
        let builder = self.builder.add_server_streaming_handler(&method.method, move |ctx, request, sink| {
            let Some(permit) = calls.admit() else {
                ctx.spawn(WithoutOutcome(sink.fail(too_many())));
                return;
            };
            let handler = Arc::clone(&handler);
            calls.start(permit, method.name, move |stop| {
                let mut out = Outgoing { sink, bell: Bell::new(), client_gone: false };
                match handler(request, &mut out, stop) {
                    _ if out.client_gone => {}
                    Ok(()) => out.close(stop),
                    Err(error) => {
                        let _ = complete(out.sink.fail(error.status()), stop);
                    }
                }
            });
        });
        Service { builder, ..self }
    }
}

fn too_many() -> RpcStatus {
    RpcStatus::with_message(RpcStatusCode::RESOURCE_EXHAUSTED, "too many calls at once".to_owned())
}

/// A future without its outcome, for the library's thread to drive.
struct WithoutOutcome<F>(F);

impl<F: Future + Unpin> Future for WithoutOutcome<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(drop)
    }
}

/// Waits until the library has sent a status. `None`: it was stopped, or the client did not read.
fn complete<F: Future + Unpin>(mut future: F, stop: &StopToken) -> Option<F::Output> {
    let bell = Bell::new();
    loop {
        if let Poll::Ready(outcome) = Pin::new(&mut future).poll(&mut Context::from_waker(&bell.waker)) {
            return Some(outcome);
        }
        if bell.wait_within(stop, SEND_LIMIT) != Woken::Progress {
            return None;
        }
    }
}

/// The responses of one call. Dropping it without an end cancels the call.
pub struct Outgoing<Resp> {
    sink: grpcio::ServerStreamingSink<Resp>,
    bell: Bell,
    /// The library panics when it is asked again about a call that ended.
    client_gone: bool,
}

impl<Resp> Outgoing<Resp> {
    /// Sends a response, and waits until the library has taken it.
    ///
    /// # Errors
    /// When the client has left or does not read, or when the server ends.
    pub fn send(&mut self, response: Resp, stop: &StopToken) -> Result<(), ClientGone> {
        self.wait(stop, |sink, context| sink.poll_ready(context))?;
        let started = Pin::new(&mut self.sink).start_send((response, WriteFlags::default()));
        self.client_gone |= started.is_err();
        started.map_err(|_| ClientGone)?;
        self.wait(stop, |sink, context| sink.poll_flush(context))
    }

    fn close(mut self, stop: &StopToken) {
        let _ = self.wait(stop, |sink, context| sink.poll_close(context));
    }

    /// Whether the client has left.
    pub fn has_client_left(&mut self) -> bool {
        let _ = self.poll(|sink, context| sink.poll_flush(context));
        self.client_gone
    }

    /// Receives when the client may have left: [`Outgoing::has_client_left`] says whether it has, and is
    /// to be called before each wait.
    pub fn progress(&self) -> Receiver<()> {
        self.bell.rung().clone()
    }

    fn poll(
        &mut self,
        poll: impl FnOnce(ResponseSink<'_, Resp>, &mut Context<'_>) -> SinkPoll,
    ) -> Poll<Result<(), ClientGone>> {
        if self.client_gone {
            return Poll::Ready(Err(ClientGone));
        }
        let polled = poll(Pin::new(&mut self.sink), &mut Context::from_waker(&self.bell.waker));
        self.client_gone = matches!(polled, Poll::Ready(Err(_)));
        polled.map_err(|_| ClientGone)
    }

    fn wait(
        &mut self,
        stop: &StopToken,
        poll: impl Fn(ResponseSink<'_, Resp>, &mut Context<'_>) -> SinkPoll,
    ) -> Result<(), ClientGone> {
        loop {
            if let Poll::Ready(outcome) = self.poll(&poll) {
                return outcome;
            }
            if self.bell.wait_within(stop, SEND_LIMIT) != Woken::Progress {
                return Err(ClientGone);
            }
        }
    }
}

type ResponseSink<'a, Resp> = Pin<&'a mut grpcio::ServerStreamingSink<Resp>>;
type SinkPoll = Poll<Result<(), grpcio::Error>>;

/// The threads of the calls of one server.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Threads>>);

#[derive(Default)]
struct Threads {
    /// Calls that were admitted and have not ended.
    admitted: usize,
    running: Vec<Running>,
    ended: bool,
}

/// One call among [`MAX_CALLS`], counted until this is dropped.
struct CallPermit(Calls);

impl Drop for CallPermit {
    fn drop(&mut self) {
        self.0.0.locked().admitted -= 1;
    }
}

impl Calls {
    fn admit(&self) -> Option<CallPermit> {
        let mut threads = self.0.locked();
        if threads.ended || threads.admitted >= MAX_CALLS {
            return None;
        }
        threads.admitted += 1;
        Some(CallPermit(self.clone()))
    }

    /// Without a thread the call is cancelled, as `body` holds it.
    fn start(
        &self,
        permit: CallPermit,
        method: &'static str,
        body: impl FnOnce(&StopToken) + Send + 'static,
    ) {
        let spawned = threads::spawn("rpc-call", Stack::Large, OnDeath::Unsupervised, move |stop| {
            let _permit = permit;
            let _waiting = threads::waiting(method);
            body(&stop);
        });
        let mut threads = self.0.locked();
        threads.running.retain(|running| !running.is_finished());
        match spawned {
            Ok(mut running) => {
                if threads.ended {
                    running.request_stop();
                }
                threads.running.push(running);
            }
            Err(error) => log::warn!("cannot start a thread for a gRPC call: {error}"),
        }
    }

    /// Stops all calls, and waits for their threads.
    fn end(&self) {
        let mut running = {
            let mut threads = self.0.locked();
            threads.ended = true;
            std::mem::take(&mut threads.running)
        };
        running.iter_mut().for_each(Running::request_stop);
        for running in running {
            running.stop(END_LIMIT);
        }
    }
}

/// A server that accepts calls. Dropping it ends the calls and removes the socket.
pub struct Server {
    listening: Option<Running>,
    path: PathBuf,
}

impl Server {
    /// Listens on a socket at `path`, which only root can connect to. A socket that is there
    /// already is replaced.
    ///
    /// # Errors
    /// When `path` has something else than a socket, or when the kernel refuses the socket.
    pub fn start(path: &Path, services: impl IntoIterator<Item = Service>) -> std::io::Result<Server> {
        remove_socket(path)?;
        let listener = listen(path)?;
        let shut = listener.try_clone()?;
        let services = services.into_iter().collect();
        let listening = threads::spawn("rpc-listen", Stack::Large, OnDeath::Unsupervised, move |stop| {
            serve(&listener, services, &stop);
        })?;
        // This ends the wait for a connection.
        let waker = Box::new(move || {
            let _ = rustix::net::shutdown(&shut, Shutdown::Both);
        });
        Ok(Server { listening: Some(listening.with_waker(waker)), path: path.to_owned() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(listening) = self.listening.take() {
            listening.stop(STOP_LIMIT);
        }
        let _ = remove_socket(&self.path);
    }
}

/// Removes a socket that an earlier process left.
fn remove_socket(path: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path),
        Ok(_) => {
            let text = format!("{} exists and is not a socket", path.display());
            Err(Error::new(ErrorKind::AlreadyExists, text))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the mode of the descriptor to the file that `bind` makes (unix(7)). Not by path
    // afterwards: a container with this directory could have put a link to another file there.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Accepts connections until the stop signal.
fn serve(listener: &UnixListener, services: Vec<Service>, stop: &StopToken) {
    let mut waiting = Some(services);
    let mut library: Option<Library> = None;
    let mut connections = Connections::default();
    loop {
        let accepted = {
            let _waiting = threads::waiting("connection");
            listener.accept()
        };
        if stop.is_stopped() {
            return;
        }
        let connected = accepted.and_then(|(connection, _)| {
            if let Err(reason) = connections.add(&connection)? {
                // Closed at once, without a pause for others.
                log::warn!("refused a connection to a gRPC server: {reason}");
                return Ok(());
            }
            if let Some(services) = waiting.take() {
                library = Some(Library::start(services)?);
            }
            library.as_mut().map_or(Ok(()), |library| library.serve(connection))
        });
        if let Err(error) = connected {
            log::warn!("cannot serve a connection to a gRPC server: {error}");
            let _ = stop.wait(ACCEPT_PAUSE);
        }
    }
}

/// The connections that the library has. It closes them without a report, so they are recognized by
/// the inode of the socket behind their descriptor.
#[derive(Default)]
struct Connections(Vec<Connection>);

struct Connection {
    descriptor: RawFd,
    socket: PathBuf,
    /// The peer's process; 0 for all of other PID namespaces.
    process: i32,
}

impl Connections {
    /// Adds a connection, or says why there are too many.
    fn add(&mut self, connection: &UnixStream) -> std::io::Result<Result<(), String>> {
        // The library has no value for process 0.
        let process = rustix::net::sockopt::socket_peercred(connection);
        let process = process.map_or(0, |peer| peer.pid.as_raw_pid());
        if self.check_limits(process).is_err() {
            self.0.retain(|existing| socket_of(existing.descriptor).is_ok_and(|now| now == existing.socket));
        }
        if let Err(reason) = self.check_limits(process) {
            return Ok(Err(reason));
        }
        let descriptor = connection.as_raw_fd();
        self.0.push(Connection { descriptor, socket: socket_of(descriptor)?, process });
        Ok(Ok(()))
    }

    fn check_limits(&self, process: i32) -> Result<(), String> {
        let of_process = self.0.iter().filter(|connection| connection.process == process).count();
        if self.0.len() >= MAX_CONNECTIONS {
            return Err(format!("{MAX_CONNECTIONS} are open"));
        }
        if of_process >= MAX_OF_PROCESS {
            return Err(format!("{MAX_OF_PROCESS} of process {process} are open"));
        }
        Ok(())
    }
}

/// `socket:[INODE]`.
fn socket_of(descriptor: RawFd) -> std::io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{descriptor}"))
}

/// The library's server. It exists from the first connection on, because it costs more memory than
/// all else of an idle server.
struct Library {
    server: grpcio::Server,
    calls: Vec<Calls>,
}

impl Library {
    fn start(services: Vec<Service>) -> std::io::Result<Library> {
        let environment = environment();
        let arguments = grpcio::ChannelBuilder::new(Arc::clone(&environment))
            .max_receive_message_len(MAX_REQUEST_BYTES)
            .http2_bdp_probe(false)
            .max_concurrent_stream(i32::try_from(MAX_CALLS).unwrap_or(i32::MAX))
            .build_args();
        let mut builder = grpcio::ServerBuilder::new(environment)
            .channel_args(arguments)
            // Requests that wait to be received; each holds memory of the library.
            .requests_slot_per_cq(4);
        let mut calls = Vec::new();
        for service in services {
            calls.push(service.calls);
            builder = builder.register_service(service.builder.build());
        }
        let mut server = builder.build().map_err(Error::other)?;
        server.start();
        Ok(Library { server, calls })
    }

    fn serve(&mut self, connection: UnixStream) -> std::io::Result<()> {
        connection.set_nonblocking(true)?;
        let descriptor = connection.into_raw_fd();
        #[expect(unsafe_code, reason = "the library takes a descriptor as a number")]
        // SAFETY: it is a connected stream socket that only the library has from here on.
        unsafe {
            self.server.add_channel_from_fd(descriptor);
        }
        Ok(())
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        let ended = self.server.shutdown();
        self.calls.iter().for_each(Calls::end);
        self.server.cancel_all_calls();
        let _ = complete(ended, &StopToken::never());
    }
}

#[cfg(test)]
#[path = "rpc_server_tests.rs"]
mod tests;
