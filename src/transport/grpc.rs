//! gRPC calls that block only their caller.
//!
//! A call is started on the shared completion queue; the calling thread then waits on two channels,
//! the stop signal and a bell that the queue's thread rings when the response has arrived. So any
//! call can be ended immediately, and no thread polls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use futures_util::stream::Stream as _;

use super::endpoint::{self, EndpointError};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;
use crate::util::tracing::{self, Span};

/// The largest message that is accepted or sent; the Go kubelet's limit.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

// Reconnects after 100 ms, then after up to 3 s: a restarted runtime is available soon.
const DIAL_BACKOFF_FIRST: Duration = Duration::from_millis(100);
const DIAL_BACKOFF_MAX: Duration = Duration::from_secs(3);
/// Time limit of one attempt to connect.
const DIAL_LIMIT_MS: i32 = 5_000;

/// A remote method with one response.
pub struct UnaryMethod<Req: 'static, Resp: 'static> {
    /// The name without the service, such as `StopContainer`.
    pub name: &'static str,
    pub(crate) method: grpcio::Method<Req, Resp>,
}

impl<Req, Resp> UnaryMethod<Req, Resp> {
    /// The method at another path, such as that of an older service with the same messages.
    #[must_use]
    pub fn at_path(&self, path: &'static str) -> UnaryMethod<Req, Resp> {
        UnaryMethod { name: self.name, method: method_at_path(&self.method, path) }
    }

    /// The path of the method, such as `/runtime.v1.RuntimeService/StopContainer`.
    pub fn path(&self) -> &'static str {
        self.method.name
    }
}

fn marshaller<T>(original: &grpcio::Marshaller<T>) -> grpcio::Marshaller<T> {
    grpcio::Marshaller { ser: original.ser, de: original.de }
}

/// A remote method with a stream of responses.
pub struct StreamingMethod<Req: 'static, Resp: 'static> {
    /// The name without the service, such as `GetContainerEvents`.
    pub name: &'static str,
    pub(crate) method: grpcio::Method<Req, Resp>,
}

impl<Req, Resp> StreamingMethod<Req, Resp> {
    /// The method at another path, such as that of an older service with the same messages.
    #[must_use]
    pub fn at_path(&self, path: &'static str) -> StreamingMethod<Req, Resp> {
        StreamingMethod { name: self.name, method: method_at_path(&self.method, path) }
    }
}

/// A method at another path.
fn method_at_path<Req, Resp>(
    method: &grpcio::Method<Req, Resp>,
    path: &'static str,
) -> grpcio::Method<Req, Resp> {
    grpcio::Method {
        ty: method.ty,
        name: path,
        req_mar: marshaller(&method.req_mar),
        resp_mar: marshaller(&method.resp_mar),
    }
}

macro_rules! kinds {
    ($($kind:ident = $code:ident, $text:literal;)*) => {
        /// The status code of a failed call, by its Go name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "the names are those of the gRPC specification")]
        pub enum Kind {
            $($kind,)*
        }

        impl Kind {
            /// The name as Go clients print it.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Kind::$kind => $text,)*
                }
            }

            /// The name in the specification of gRPC.
            pub fn code_name(self) -> &'static str {
                match self {
                    $(Kind::$kind => stringify!($code),)*
                }
            }

            pub(super) fn from_code(code: grpcio::RpcStatusCode) -> Kind {
                match code {
                    $(grpcio::RpcStatusCode::$code => Kind::$kind,)*
                    _ => Kind::Unknown,
                }
            }
        }
    };
}

kinds! {
    Cancelled = CANCELLED, "Canceled";
    Unknown = UNKNOWN, "Unknown";
    InvalidArgument = INVALID_ARGUMENT, "InvalidArgument";
    DeadlineExceeded = DEADLINE_EXCEEDED, "DeadlineExceeded";
    NotFound = NOT_FOUND, "NotFound";
    AlreadyExists = ALREADY_EXISTS, "AlreadyExists";
    PermissionDenied = PERMISSION_DENIED, "PermissionDenied";
    ResourceExhausted = RESOURCE_EXHAUSTED, "ResourceExhausted";
    FailedPrecondition = FAILED_PRECONDITION, "FailedPrecondition";
    Aborted = ABORTED, "Aborted";
    OutOfRange = OUT_OF_RANGE, "OutOfRange";
    Unimplemented = UNIMPLEMENTED, "Unimplemented";
    Internal = INTERNAL, "Internal";
    Unavailable = UNAVAILABLE, "Unavailable";
    DataLoss = DATA_LOSS, "DataLoss";
    Unauthenticated = UNAUTHENTICATED, "Unauthenticated";
}

/// What Go clients print when a deadline has passed.
const DEADLINE_TEXT: &str = "context deadline exceeded";

/// How much later than the library the caller ends a call. The library's timers wait by the wall clock: when
/// it is set back, they are late by as much, which can be years on a machine without a battery for its clock.
const LIBRARY_DELAY: Duration = Duration::from_secs(1);

/// A call that failed. It is printed as by Go clients, because users see that text in events and
/// statuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rpc error: code = {} desc = {message}", kind.as_str())]
pub struct CallError {
    /// The method name without the service.
    pub method: &'static str,
    /// The status code.
    pub kind: Kind,
    /// The server's message alone.
    pub message: String,
}

impl CallError {
    fn new(method: &'static str, error: grpcio::Error) -> CallError {
        use grpcio::Error;
        let (kind, message) = match error {
            Error::RpcFailure(status) | Error::RpcFinished(Some(status)) => {
                let kind = Kind::from_code(status.code());
                match kind {
                    // Where the library's text differs from Go's: tools match Go's text.
                    Kind::DeadlineExceeded if status.message() == "Deadline Exceeded" => {
                        (kind, DEADLINE_TEXT.to_owned())
                    }
                    _ => (kind, status.message().to_owned()),
                }
            }
            Error::Codec(error) => (Kind::Internal, format!("unreadable message: {error}")),
            Error::RemoteStopped | Error::RpcFinished(None) => {
                (Kind::Unavailable, "the connection was closed".to_owned())
            }
            Error::QueueShutdown => (Kind::Cancelled, "the client is shutting down".to_owned()),
            other => (Kind::Internal, other.to_string()),
        };
        CallError { method, kind, message }
    }

    fn late(method: &'static str) -> CallError {
        CallError { method, kind: Kind::DeadlineExceeded, message: DEADLINE_TEXT.to_owned() }
    }

    fn stopped(method: &'static str) -> CallError {
        CallError { method, kind: Kind::Cancelled, message: "context canceled".to_owned() }
    }
}

/// The library and its one thread exist while any channel exists.
pub(super) fn environment() -> Arc<grpcio::Environment> {
    static SHARED: Mutex<Weak<grpcio::Environment>> = Mutex::new(Weak::new());
    let mut shared = SHARED.locked();
    shared.upgrade().unwrap_or_else(|| {
        let fresh = Arc::new(
            grpcio::EnvBuilder::new()
                .cq_count(1)
                .name_prefix("grpc")
                .after_start(|| threads::register_library("grpc-0", "responses of the runtime"))
                .build(),
        );
        *shared = Arc::downgrade(&fresh);
        fresh
    })
}

/// A connection to one endpoint, opened at the first call and again after it broke. Clones share
/// it.
#[derive(Clone)]
pub struct Channel {
    client: grpcio::Client,
    endpoint: Arc<str>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Channel({})", self.endpoint)
    }
}

impl Channel {
    /// Prepares a connection to `endpoint`; the server need not listen yet.
    ///
    /// # Errors
    /// When `endpoint` is neither a local socket nor a loopback address.
    pub fn new(endpoint: &str) -> Result<Channel, EndpointError> {
        let target = endpoint::target(endpoint)?;
        let agent = concat!("coracle/", env!("CARGO_PKG_VERSION"));
        Ok(Channel::to(&target, endpoint, agent, MAX_MESSAGE_BYTES as i32))
    }

    /// Like [`Channel::new`], with another limit for messages than [`MAX_MESSAGE_BYTES`].
    ///
    /// # Errors
    /// Those of [`Channel::new`].
    pub fn limited(endpoint: &str, max_message_bytes: i32) -> Result<Channel, EndpointError> {
        let target = endpoint::target(endpoint)?;
        let agent = concat!("coracle/", env!("CARGO_PKG_VERSION"));
        Ok(Channel::to(&target, endpoint, agent, max_message_bytes))
    }

    /// A connection to a target in the library's notation.
    pub(super) fn to(target: &str, endpoint: &str, agent: &str, max_message_bytes: i32) -> Channel {
        let number = |name: &std::ffi::CStr, value: i32| (name.to_owned(), value);
        let mut builder = grpcio::ChannelBuilder::new(environment())
            .max_receive_message_len(max_message_bytes)
            .max_send_message_len(max_message_bytes)
            .initial_reconnect_backoff(DIAL_BACKOFF_FIRST)
            .max_reconnect_backoff(DIAL_BACKOFF_MAX)
            .primary_user_agent(agent)
            // A proxy variable in the environment must not redirect a local socket.
            .enable_http_proxy(false)
            // No bandwidth probes: they cause pings and are useless on one machine.
            .http2_bdp_probe(false)
            // The caller decides whether to repeat StopContainer or CreateContainer.
            .enable_retry(false)
            // Channels do not share connections, so a broken endpoint does not affect others.
            .use_local_subchannel_pool(true);
        for (name, value) in [
            number(c"grpc.min_reconnect_backoff_ms", DIAL_LIMIT_MS),
            number(c"grpc.service_config_disable_resolution", 1),
            number(c"grpc.enable_channelz", 0),
        ] {
            builder = builder.raw_cfg_int(name, value);
        }
        let client = grpcio::Client::new(builder.connect(target));
        Channel { client, endpoint: Arc::from(endpoint) }
    }

    /// Whether the channel is connected now.
    pub fn is_connected(&self) -> bool {
        self.client.channel().check_connectivity_state(false) == grpcio::ConnectivityState::GRPC_CHANNEL_READY
    }

    /// Begins to connect, unless the channel is connected or will try again soon. Does not wait.
    pub fn connect(&self) {
        let _ = self.client.channel().check_connectivity_state(true);
    }

    /// Calls `method` and waits for the response. The call ends immediately, with
    /// [`Kind::Cancelled`], when `stop` is given. Without a `limit` only the stop ends it early.
    ///
    /// # Errors
    /// The server's status, or the reason why there is no response.
    pub fn call_with_stop<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<Resp, CallError> {
        self.start(method, request, options(limit), limit, stop)
    }

    /// Like [`Channel::call_with_stop`], but waits instead of failing while the server is unavailable.
    pub(super) fn call_once_connected<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<Resp, CallError> {
        self.start(method, request, options(Some(limit)).wait_for_ready(true), Some(limit), stop)
    }

    /// Calls `method` with a header.
    ///
    /// # Errors
    /// Those of [`Channel::call_with_stop`].
    pub fn call_with_header<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        (name, value): (&str, &str),
        limit: Duration,
        stop: &StopToken,
    ) -> Result<Resp, CallError> {
        let mut headers = grpcio::MetadataBuilder::with_capacity(1);
        if let Err(error) = headers.add_str(name, value) {
            return Err(CallError::new(method.name, error));
        }
        self.start(method, request, options(Some(limit)).headers(headers.build()), Some(limit), stop)
    }

    /// Calls `method` within a span, whose identity the call carries; without the recording of spans it
    /// is [`Channel::call_with_stop`].
    ///
    /// # Errors
    /// Those of [`Channel::call_with_stop`].
    pub fn call_in_span<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        limit: Option<Duration>,
        span: &Span,
        stop: &StopToken,
    ) -> Result<Resp, CallError> {
        self.start(method, request, in_span(options(limit), span), limit, stop)
    }

    fn start<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        options: grpcio::CallOption,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<Resp, CallError> {
        let write = |slice: &mut grpcio::GrpcSlice| (method.method.req_mar.ser)(request, slice);
        let reader = self.start_any((method.name, method.method.name), &write, options, limit, stop)?;
        (method.method.resp_mar.de)(reader).map_err(|error| CallError::new(method.name, error))
    }

    /// The part of a call that does not depend on the types of its messages: it is compiled once, and
    /// so is what it calls in the library.
    fn start_any(
        &self,
        (name, path): (&'static str, &'static str),
        request: &Writer<'_>,
        options: grpcio::CallOption,
        limit: Option<Duration>,
        stop: &StopToken,
    ) -> Result<grpcio::MessageReader, CallError> {
        if stop.is_stopped() {
            return Err(CallError::stopped(name));
        }
        let method = grpcio::Method {
            ty: grpcio::MethodType::Unary,
            name: path,
            req_mar: grpcio::Marshaller { ser: write_any, de: no_request },
            resp_mar: grpcio::Marshaller { ser: no_response, de: Ok },
        };
        let mut receiver = self
            .client
            .unary_call_async(&method, &request, options)
            .map_err(|error| CallError::new(name, error))?;
        let _waiting = threads::waiting(name);
        let bell = Bell::new();
        let end = limit.and_then(|limit| Instant::now().checked_add(limit.saturating_add(LIBRARY_DELAY)));
        loop {
            // The library panics on a success without a message; that must not end the agent.
            let polled = catch_unwind(AssertUnwindSafe(|| {
                Pin::new(&mut receiver).poll(&mut Context::from_waker(&bell.waker))
            }));
            match polled {
                Ok(Poll::Ready(response)) => return response.map_err(|error| CallError::new(name, error)),
                Ok(Poll::Pending) => {}
                Err(_) => {
                    let message = "the server responded without a message".to_owned();
                    return Err(CallError { method: name, kind: Kind::Internal, message });
                }
            }
            let woken = match end {
                Some(end) => bell.wait_within(stop, end.saturating_duration_since(Instant::now())),
                None => bell.wait(stop),
            };
            let error = match woken {
                Woken::Progress => continue,
                Woken::Stop => CallError::stopped(name),
                Woken::Late => CallError::late(name),
            };
            receiver.cancel();
            return Err(error);
        }
    }

    /// Opens a stream of responses. It has no deadline; its reader holds a stop token.
    ///
    /// # Errors
    /// When the call cannot be started; errors of the server are returned by the first read.
    pub fn open<Req, Resp>(
        &self,
        method: &'static StreamingMethod<Req, Resp>,
        request: &Req,
    ) -> Result<ResponseStream<Resp>, CallError> {
        let receiver = self
            .client
            .server_streaming(&method.method, request, options(None))
            .map_err(|error| CallError::new(method.name, error))?;
        Ok(ResponseStream { method: method.name, receiver, bell: Bell::new() })
    }
}

/// An open stream of responses. Dropping it cancels the call.
pub struct ResponseStream<Resp> {
    method: &'static str,
    receiver: grpcio::ClientSStreamReceiver<Resp>,
    bell: Bell,
}

impl<Resp> ResponseStream<Resp> {
    /// Waits for the next response; `None` when the server ended the stream without an error.
    ///
    /// # Errors
    /// The server's status, a broken connection, or [`Kind::Cancelled`] after `stop`.
    pub fn next(&mut self, stop: &StopToken) -> Result<Option<Resp>, CallError> {
        self.next_or_check(stop, None, &mut || true)
    }

    /// Like [`ResponseStream::next`], but calls `check` after each `interval` without a response until it
    /// returns `true`.
    ///
    /// # Errors
    /// Those of [`ResponseStream::next`].
    pub fn next_with_check(
        &mut self,
        stop: &StopToken,
        interval: Duration,
        mut check: impl FnMut() -> bool,
    ) -> Result<Option<Resp>, CallError> {
        self.next_or_check(stop, Some(interval), &mut check)
    }

    fn next_or_check(
        &mut self,
        stop: &StopToken,
        mut interval: Option<Duration>,
        check: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Resp>, CallError> {
        let _waiting = threads::waiting(self.method);
        loop {
            let mut context = Context::from_waker(&self.bell.waker);
            match Pin::new(&mut self.receiver).poll_next(&mut context) {
                Poll::Ready(None) => return Ok(None),
                Poll::Ready(Some(response)) => {
                    return response.map(Some).map_err(|error| CallError::new(self.method, error));
                }
                Poll::Pending => {}
            }
            let woken = match interval {
                Some(interval) => self.bell.wait_within(stop, interval),
                None => self.bell.wait(stop),
            };
            match woken {
                Woken::Progress => {}
                Woken::Late => interval = interval.filter(|_| !check()),
                Woken::Stop => {
                    self.receiver.cancel();
                    return Err(CallError::stopped(self.method));
                }
            }
        }
    }
}

impl<Resp> Drop for ResponseStream<Resp> {
    fn drop(&mut self) {
        self.receiver.cancel();
    }
}

/// Writes a request, whatever its type is.
type Writer<'a> = dyn Fn(&mut grpcio::GrpcSlice) -> grpcio::Result<()> + 'a;

fn write_any(request: &&Writer<'_>, slice: &mut grpcio::GrpcSlice) -> grpcio::Result<()> {
    request(slice)
}

fn no_request<'a>(_: grpcio::MessageReader) -> grpcio::Result<&'a Writer<'a>> {
    Err(grpcio::Error::QueueShutdown)
}

fn no_response(_: &grpcio::MessageReader, _: &mut grpcio::GrpcSlice) -> grpcio::Result<()> {
    Err(grpcio::Error::QueueShutdown)
}

fn in_span(options: grpcio::CallOption, span: &Span) -> grpcio::CallOption {
    let Some(identity) = span.header() else { return options };
    let mut headers = grpcio::MetadataBuilder::with_capacity(1);
    match headers.add_str(tracing::HEADER, &identity) {
        Ok(_) => options.headers(headers.build()),
        Err(_) => options,
    }
}

fn options(limit: Option<Duration>) -> grpcio::CallOption {
    // Fail immediately: the caller handles an unavailable runtime, and must not block.
    let options = grpcio::CallOption::default().wait_for_ready(false);
    match limit {
        Some(limit) => options.timeout(limit),
        None => options,
    }
}

#[derive(PartialEq, Eq)]
pub(super) enum Woken {
    Progress,
    Stop,
    /// Nothing has happened within the limit.
    Late,
}

/// Rung by the completion queue's thread when a call has made progress.
pub(super) struct Bell {
    pub(super) waker: Waker,
    rung: Receiver<()>,
}

struct Ringer(Sender<()>);

impl Wake for Ringer {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A full bell already rings.
        let _ = self.0.try_send(());
    }
}

impl Bell {
    pub(super) fn new() -> Bell {
        let (tx, rung) = bounded(1);
        Bell { waker: Waker::from(Arc::new(Ringer(tx))), rung }
    }

    /// Receives when it rings.
    pub(super) fn rung(&self) -> &Receiver<()> {
        &self.rung
    }

    /// Like [`Bell::wait`], with a limit.
    pub(super) fn wait_within(&self, stop: &StopToken, limit: Duration) -> Woken {
        select_biased! {
            recv(stop.signal()) -> _ => Woken::Stop,
            recv(self.rung) -> _ => Woken::Progress,
            default(limit) => Woken::Late,
        }
    }

    fn wait(&self, stop: &StopToken) -> Woken {
        select_biased! {
            recv(stop.signal()) -> _ => Woken::Stop,
            recv(self.rung) -> _ => Woken::Progress,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::generated::deviceplugin::RegisterRequest;
    use crate::transport::generated::methods;

    #[test]
    fn call_ends_at_its_limit_also_without_the_timers_of_the_library() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("silent.sock");
        let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let channel = Channel::new(path.to_str().unwrap()).unwrap();
        let limit = Some(Duration::from_millis(1));
        let request = RegisterRequest::default();
        let without_deadline = options(None);
        let result =
            channel.start(&methods::REGISTER, &request, without_deadline, limit, &StopToken::never());
        assert_eq!(result.unwrap_err(), CallError::late("Register"));
    }
}
