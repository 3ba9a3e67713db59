//! ureq over our sockets: the only file that knows ureq's interfaces for connectors, transports and
//! resolvers.
//!
//! ureq writes requests, reads heads and the framing of bodies, follows redirects, and keeps
//! connections. Ours are the connections themselves: look-ups, sockets and proxies that a
//! [`Breaker`] ends, TLS with our identity, and buffers that a connection without data does not
//! need.
//!
//! These interfaces are in `ureq::unversioned`, and may change with each release. Therefore
//! `Cargo.toml` names one version; a newer one needs a check of this file.
//!
//! ureq has no place for a caller's values in its calls to a transport. It sends a request and reads
//! the head of the response on the caller's thread, so that they are in a variable of this thread
//! meanwhile ([`Call::run_as_current`]). A transport takes them with the first bytes of a request.

use std::fmt;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ureq::config::{Config, ConfigBuilder, RedirectAuthHeaders};
use ureq::http::{HeaderMap, Method, Request, Response, Uri, header};
use ureq::typestate::AgentScope;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, NextTimeout, Transport};
use ureq::{Agent, AsSendBody, BodyReader, ResponseExt};

use super::breaker::{Breaker, RequestKind};
use super::call::Call;
use super::openings::{Opened, Openings};
use super::route::{CONNECT_LIMIT, Routes, Stream, Wire};
use super::usage::{Usage, Use};
use crate::transport::dial::{DialError, go_message};
use crate::transport::http1::{MAX_INTERIM, Malformed};
use crate::transport::proxy::Proxy;
use crate::transport::tls::TlsSetupError;
use crate::util::backoff::random_unit;
use crate::util::threads;

/// Idle connections that are kept; after a burst of pods, more may have been opened.
const MAX_IDLE: usize = 4;
/// API servers close connections after 90 s without a request, and balancers earlier; we close them
/// before, so that none is closed during a request. ureq uses the oldest idle connection first, so that
/// with a longer time all of a burst would stay open.
const MAX_IDLE_TIME: Duration = Duration::from_secs(25);
const MAX_REDIRECTS: u32 = 10;
/// The part of a request's time in which it is held back by connections that others open, at least, and
/// the random part beside it: requests that began together do not go on together.
const HOLD_BACK: (f64, f64) = (0.25, 0.5);
/// The limit of a head. A buffer does not grow beyond it.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// More line ends before a head are an error: ureq would skip them again after each byte.
const BLANK_BYTES: usize = 5;
/// How much is read at once.
const READ_BYTES: usize = 4 * 1024;
/// How much is sent at once, unless a line of the head is longer.
const SEND_BYTES: usize = 8 * 1024;

/// A client of some servers, with its kept connections.
pub(in crate::transport) struct Client {
    agent: Agent,
    routes: Arc<Routes>,
    pool: Arc<Pool>,
}

/// What the connections of a client share.
#[derive(Default)]
struct Pool {
    /// Counts the calls of [`Client::retire`].
    era: AtomicU64,
    usage: Usage,
    openings: Openings,
}

/// A connection could not be opened yet. It is no error for the caller of a request.
#[derive(Debug, thiserror::Error)]
#[error("too many connections are being opened")]
struct HeldBack;

/// The head of a final response, and its body.
pub(in crate::transport) struct FinalResponse {
    pub(in crate::transport) status: u16,
    pub(in crate::transport) headers: HeaderMap,
    /// The URL that sent it; after redirects not the request's.
    pub(in crate::transport) uri: Uri,
    pub(in crate::transport) body: ResponseBody,
}

/// The settings that all clients have.
pub(in crate::transport) fn settings() -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(MAX_REDIRECTS)
        .max_response_header_size(MAX_HEAD_BYTES)
        .max_idle_connections(MAX_IDLE)
        .max_idle_connections_per_host(MAX_IDLE)
        .max_idle_age(MAX_IDLE_TIME)
        .redirect_auth_headers(RedirectAuthHeaders::Never)
        // Proxies are chosen by `Routes`.
        .proxy(None)
        .accept_encoding("")
}

impl Client {
    pub(in crate::transport) fn new(routes: Routes, config: Config) -> Client {
        let (routes, pool) = (Arc::new(routes), Arc::default());
        let dialer = Dialer { routes: Arc::clone(&routes), pool: Arc::clone(&pool) };
        Client { agent: Agent::with_parts(config, dialer, DeferredResolver), routes, pool }
    }

    /// Sends a request and reads the head of its response, after redirects.
    ///
    /// # Errors
    /// When there is no response before `deadline`, or the breaker was tripped.
    pub(in crate::transport) fn send<B: AsSendBody + Clone>(
        &self,
        request: &Request<B>,
        deadline: Instant,
        (kind, is_urgent): (RequestKind, bool),
        breaker: &Breaker,
    ) -> Result<FinalResponse, DialError> {
        // Method, version and the ends of the line.
        let first = request.uri().to_string().len() + 32;
        let fields = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 6);
        let longest = fields.fold(first, usize::max);
        let begun = Instant::now();
        let part = HOLD_BACK.0 + HOLD_BACK.1 * random_unit();
        let most =
            if is_urgent { Duration::ZERO } else { deadline.saturating_duration_since(begun).mul_f64(part) };
        let hold_until = begun + most;
        let mut reuse = true;
        loop {
            let call = Call::new(breaker, kind, (deadline, hold_until), reuse, longest);
            let changes = self.pool.openings.changes();
            let error = match run(&self.agent, request.clone(), &call) {
                Ok(response) => return final_response(response, call, &self.pool),
                Err(error) if is_held_back(&error) => {
                    let _waiting = threads::waiting("a connection");
                    self.pool.openings.wait(changes, hold_until, breaker);
                    if breaker.is_tripped() {
                        return Err(DialError::Stopped);
                    }
                    reuse = true;
                    continue;
                }
                Err(error) => failure(&error),
            };
            // The server may be closing a reused connection at this moment. A request with side effects
            // is sent again only if no byte of it was sent (Go: net/http, `shouldRetryRequest`).
            let is_lost = matches!(error, DialError::Eof | DialError::Broken { .. }) && call.is_reused();
            let is_harmless = request.method() == Method::GET || !call.has_sent();
            if !(reuse && is_lost && is_harmless) || breaker.is_tripped() {
                return Err(error);
            }
            reuse = false;
        }
    }

    /// Uses none of the present connections again: those in use are closed after their responses, idle
    /// ones by the next request.
    pub(in crate::transport) fn retire(&self) {
        self.pool.era.fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn openings(&self) -> &Openings {
        &self.pool.openings
    }

    /// The address of the proxy that gets requests for `uri` itself, and not a tunnel.
    pub(in crate::transport) fn forwarder(&self, uri: &Uri) -> Option<String> {
        self.routes.route(uri).ok()?.forwarder().map(Proxy::address)
    }
}

fn run<B: AsSendBody>(
    agent: &Agent,
    request: Request<B>,
    call: &Arc<Call>,
) -> Result<Response<ureq::Body>, ureq::Error> {
    // ureq 3.5.2 panics if a server ends the body of a redirect after its last chunk without an empty
    // line.
    call.run_as_current(|| catch_unwind(AssertUnwindSafe(|| agent.run(request))))
        .unwrap_or_else(|_| Err(ureq_error(DialError::Malformed("the response cannot be read".to_owned()))))
}

fn is_held_back(error: &ureq::Error) -> bool {
    matches!(error, ureq::Error::Io(error) if error.get_ref().is_some_and(|inner| inner.is::<HeldBack>()))
}

fn final_response(
    response: Response<ureq::Body>,
    call: Arc<Call>,
    pool: &Arc<Pool>,
) -> Result<FinalResponse, DialError> {
    let uri = response.get_uri().clone();
    let (head, body) = response.into_parts();
    let mut encodings = head.headers.get_all(header::CONTENT_ENCODING).iter();
    if let Some(other) = encodings.find(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(DialError::Malformed(format!("content encoding {other:?} was not requested")));
    }
    let ended = RequestEnded(Arc::clone(pool));
    let body = ResponseBody { reader: body.into_reader(), call, taken: 0, failed: None, _ended: ended };
    Ok(FinalResponse { status: head.status.as_u16(), headers: head.headers, uri, body })
}

/// Our error inside one of ureq's.
fn ureq_error(error: DialError) -> ureq::Error {
    // A kind with a meaning would make ureq end a body without a length.
    ureq::Error::Io(io::Error::other(error))
}

fn dial_error(error: &io::Error) -> Option<&DialError> {
    error.get_ref().and_then(|inner| inner.downcast_ref::<DialError>())
}

/// Why there is no head of a response.
fn failure(error: &ureq::Error) -> DialError {
    match error {
        ureq::Error::Io(error) => failure_of_io(error),
        ureq::Error::TooManyRedirects => DialError::TooManyRedirects,
        // DIFFERS: upstream follows a redirect from https to http, where any host on the way can read
        // and change the exchange.
        ureq::Error::RequireHttpsOnly(_) => {
            DialError::Request("a redirect from https to http is not followed".to_owned())
        }
        // DIFFERS: upstream sends the body once more.
        ureq::Error::RedirectFailed => {
            DialError::Request("a redirect of a request with a body is not followed".to_owned())
        }
        ureq::Error::Http(error) => DialError::Request(error.to_string()),
        ureq::Error::BadUri(what) => DialError::Request(what.clone()),
        // The data ends within a chunk's length.
        ureq::Error::BodyStalled => DialError::Eof,
        other => DialError::Malformed(other.to_string()),
    }
}

fn failure_of_io(error: &io::Error) -> DialError {
    if let Some(own) = dial_error(error) {
        return own.clone();
    }
    if let Some(inner) = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>()) {
        return failure(inner);
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof => DialError::Eof,
        _ => DialError::Malformed(go_message(error)),
    }
}

/// The body of a response. The connection is kept if it is read to its end.
pub(in crate::transport) struct ResponseBody {
    reader: BodyReader<'static>,
    call: Arc<Call>,
    taken: u64,
    failed: Option<DialError>,
    /// Dropped after `reader`.
    _ended: RequestEnded,
}

/// Says at its drop that a connection may be idle.
struct RequestEnded(Arc<Pool>);

impl Drop for RequestEnded {
    fn drop(&mut self) {
        self.0.openings.request_ended();
    }
}

impl ResponseBody {
    /// The number of bytes that were read.
    pub(in crate::transport) fn taken(&self) -> u64 {
        self.taken
    }

    pub(in crate::transport) fn follow_progress(&self, quiet: Duration, end: Instant) {
        self.call.follow_progress(quiet, end);
    }

    /// Why reading it failed with `error`.
    pub(in crate::transport) fn failed(error: &io::Error) -> DialError {
        match dial_error(error) {
            Some(own) => own.clone(),
            None => DialError::Body(go_message(error)),
        }
    }
}

impl Read for ResponseBody {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // After an error ureq would report the end of the body.
        let error = match &self.failed {
            Some(error) => error.clone(),
            None => match self.reader.read(into) {
                Ok(count) => {
                    self.taken = self.taken.saturating_add(count as u64);
                    return Ok(count);
                }
                Err(error) => match failure_of_io(&error) {
                    DialError::Timeout => DialError::BodyTimeout,
                    DialError::Eof => DialError::Body("unexpected EOF".to_owned()),
                    DialError::Malformed(what) => DialError::Body(what),
                    other => other,
                },
            },
        };
        self.failed = Some(error.clone());
        Err(io::Error::other(error))
    }
}

type UreqError = ureq::Error;

/// Opens connections for ureq.
struct Dialer {
    routes: Arc<Routes>,
    pool: Arc<Pool>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Dialer")
    }
}

impl Connector for Dialer {
    type Out = Connection<Stream>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        _: Option<()>,
    ) -> Result<Option<Connection<Stream>>, UreqError> {
        let Some(call) = Call::current() else { return Ok(None) };
        // ureq also accepts those of proxies.
        if !matches!(details.uri.scheme_str(), Some("http" | "https")) {
            let scheme = details.uri.scheme_str().unwrap_or_default();
            return Err(ureq_error(DialError::Request(format!("unsupported protocol scheme {scheme:?}"))));
        }
        let setup = |error: TlsSetupError| ureq_error(DialError::Request(error.to_string()));
        let route = self.routes.route(details.uri).map_err(setup)?;
        // After a redirect the first server has the request already.
        let begun = Instant::now();
        let Some(opening) = self.pool.openings.begin(call.has_sent() || call.hold_until <= begun) else {
            return Err(ureq::Error::Io(io::Error::other(HeldBack)));
        };
        let outcome = route.open(&call);
        opening.end(match &outcome {
            Ok(_) => Opened::InTime,
            // A request may have had less time than a server needs.
            Err(error) if error.is_late_handshake() && begun.elapsed() >= CONNECT_LIMIT => Opened::Late,
            Err(_) => Opened::Failed,
        });
        let stream = outcome.map_err(ureq_error)?;
        let authority = details.uri.authority().map_or("", |authority| authority.as_str());
        // ureq makes a field of a user name and password.
        let (_, host) = authority.rsplit_once('@').unwrap_or(("", authority));
        let origin = Arc::from(format!("{}://{host}", if route.is_secure() { "https" } else { "http" }));
        let absolute_form = route.forwarder().map(|proxy| AbsoluteForm {
            origin: format!("http://{host}"),
            authorization: proxy.authorization(),
        });
        let wire = ConnectedWire { wire: stream, is_tls: route.is_secure(), origin };
        Ok(Some(Connection::new(wire, absolute_form, &call, &self.pool)))
    }
}

/// ureq looks up names also for requests on kept connections, so that it gets no address here: the
/// [`Dialer`] looks them up.
#[derive(Debug)]
struct DeferredResolver;

impl Resolver for DeferredResolver {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        Ok(self.empty())
    }
}

/// The absolute form of requests, which a proxy that forwards them expects (RFC 9112, section
/// 3.2.2); ureq would open a tunnel.
struct AbsoluteForm {
    /// `http://host:port`, the start of the target.
    origin: String,
    authorization: Option<String>,
}

impl AbsoluteForm {
    /// Appends the start of a request that ureq wrote, with the whole URL in its first line.
    fn rewrite(&self, head: &[u8], into: &mut Vec<u8>) {
        let end_of = |wanted: u8| head.iter().position(|byte| *byte == wanted).map_or(0, |index| index + 1);
        let (method, rest) = head.split_at(end_of(b' '));
        let (target, fields) = rest.split_at(end_of(b'\n').saturating_sub(method.len()));
        let field = self.authorization.as_ref().map(|value| format!("Proxy-Authorization: {value}\r\n"));
        let field = field.unwrap_or_default();
        for part in [method, self.origin.as_bytes(), target, field.as_bytes(), fields] {
            into.extend_from_slice(part);
        }
    }
}

/// An open connection, and where it leads.
struct ConnectedWire<S> {
    wire: S,
    is_tls: bool,
    /// Scheme, host and port, as requests name them.
    origin: Arc<str>,
}

/// A connection with the buffers that ureq works on.
struct Connection<S> {
    wire: S,
    is_tls: bool,
    /// As [`ConnectedWire::origin`].
    origin: Arc<str>,
    absolute_form: Option<AbsoluteForm>,
    /// The request that it was last used for.
    call: Weak<Call>,
    memory: Memory,
    /// Bytes of a request that are not sent yet.
    unsent: Vec<u8>,
    /// Why the request could not be sent. A server may respond and close without reading the request:
    /// then the response counts, if it can be read.
    broken: Option<DialError>,
    /// Whether the next bytes to send begin a request.
    begins: bool,
    /// Whether it was used for a request.
    is_used: bool,
    /// The era in which it was opened.
    opened_in: u64,
    pool: Arc<Pool>,
    /// As `pool` counts it.
    present_use: Use,
}

impl<S: Wire> Connection<S> {
    fn new(
        connected: ConnectedWire<S>,
        absolute_form: Option<AbsoluteForm>,
        call: &Arc<Call>,
        pool: &Arc<Pool>,
    ) -> Self {
        let ConnectedWire { wire, is_tls, origin } = connected;
        let present_use = Use::Request(call.kind);
        pool.usage.change(&origin, Use::Closed, present_use, Instant::now());
        Connection {
            wire,
            is_tls,
            origin,
            absolute_form,
            call: Arc::downgrade(call),
            memory: Memory::default(),
            unsent: Vec::new(),
            broken: None,
            begins: true,
            is_used: false,
            opened_in: pool.era.load(Ordering::Relaxed),
            pool: Arc::clone(pool),
            present_use,
        }
    }

    fn change_use(&mut self, to: Use) {
        let from = std::mem::replace(&mut self.present_use, to);
        self.pool.usage.change(&self.origin, from, to, Instant::now());
    }

    /// A connection that works becomes idle after a response, or is used for `next`. Returns whether it
    /// stays open.
    fn continue_with(&mut self, next: Option<RequestKind>) -> bool {
        match (self.present_use, next) {
            (Use::Idle, Some(kind)) if self.pool.usage.is_surplus(&self.origin, kind, Instant::now()) => {
                false
            }
            (Use::Idle, Some(kind)) => {
                self.change_use(Use::Request(kind));
                true
            }
            _ => {
                self.change_use(Use::Idle);
                true
            }
        }
    }

    fn flush(&mut self) {
        if self.broken.is_none() && !self.unsent.is_empty() {
            let sent = self.wire.write_all(&self.unsent).and_then(|()| self.wire.flush());
            if let Err(error) = sent {
                self.broken = Some(self.wire.failed(&error, "write"));
                self.wire.end_sending();
            }
        }
        self.unsent.clear();
    }
}

impl<S> Drop for Connection<S> {
    fn drop(&mut self) {
        self.pool.usage.change(&self.origin, self.present_use, Use::Closed, Instant::now());
    }
}

impl<S> fmt::Debug for Connection<S> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Connection")
    }
}

impl<S: Wire> Transport for Connection<S> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.memory
    }

    fn transmit_output(&mut self, amount: usize, _: NextTimeout) -> Result<(), ureq::Error> {
        if let Some(call) = Call::current().filter(|_| self.begins) {
            self.call = Arc::downgrade(&call);
            if std::mem::replace(&mut self.is_used, true) {
                self.wire.begin_call(&call);
            }
        }
        let written = self.memory.output.get(..amount).unwrap_or_default();
        match self.absolute_form.as_ref().filter(|_| self.begins) {
            Some(absolute_form) => absolute_form.rewrite(written, &mut self.unsent),
            None => self.unsent.extend_from_slice(written),
        }
        if std::mem::take(&mut self.begins) {
            self.memory.interim = Some(0);
        }
        if self.unsent.len() >= SEND_BYTES {
            self.flush();
        }
        Ok(())
    }

    fn await_input(&mut self, _: NextTimeout) -> Result<bool, ureq::Error> {
        if self.memory.has_too_many_interim() {
            let what = "too many 1xx informational responses".to_owned();
            return Err(ureq_error(DialError::Malformed(what)));
        }
        self.flush();
        self.unsent = Vec::new();
        self.begins = true;
        self.memory.shrink();
        // What the server sent is no response to a request that it did not get.
        if let Some(error) = &self.broken
            && self.call.upgrade().is_some_and(|call| call.is_reused() && !call.has_sent())
        {
            return Err(ureq_error(error.clone()));
        }
        loop {
            let outcome = self.wire.wait().and_then(|()| self.wire.read(self.memory.free_space()?));
            let is_stopped = self.call.upgrade().is_none_or(|call| call.breaker.is_tripped());
            return Err(ureq_error(match (outcome, &self.broken) {
                (Ok(0) | Err(_), _) if is_stopped => DialError::Stopped,
                (Ok(0) | Err(_), Some(error)) => error.clone(),
                (Ok(0), None) => return Ok(false),
                (Ok(count), _) if self.memory.receive(count) => return Ok(true),
                (Ok(_), _) => continue,
                (Err(error), None) => self.wire.failed(&error, "read"),
            }));
        }
    }

    /// Asked before the connection is kept, after its response was read, and before it is used again.
    fn is_open(&mut self) -> bool {
        // A call that follows a redirect goes on with another connection: it is released only once.
        let own = std::mem::take(&mut self.call);
        if let Some(call) = own.upgrade() {
            call.unregister_socket();
        }
        let current = Call::current();
        let next = current.as_ref().map(|call| call.kind);
        let other = current.filter(|call| !std::ptr::eq(own.as_ptr(), Arc::as_ptr(call)));
        let is_welcome = other.is_none_or(|call| call.reuse);
        self.unsent = Vec::new();
        self.memory.shrink();
        let is_present = self.opened_in == self.pool.era.load(Ordering::Relaxed);
        let works = is_welcome && is_present && self.broken.is_none() && self.wire.is_quiet();
        works && self.continue_with(next)
    }

    fn is_tls(&self) -> bool {
        self.is_tls
    }
}

/// Buffers that are allocated only while they have data.
#[derive(Default)]
struct Memory {
    input: Vec<u8>,
    /// The part of `input` that was received and not yet consumed.
    from: usize,
    to: usize,
    output: Vec<u8>,
    /// Whether ureq could use the input the last time.
    progress: bool,
    /// How many interim responses came before the final one; `None` after its head.
    interim: Option<usize>,
}

impl Memory {
    fn shrink(&mut self) {
        self.output = Vec::new();
        if self.from == self.to {
            (self.input, self.from, self.to) = (Vec::new(), 0, 0);
        }
    }

    fn has_too_many_interim(&self) -> bool {
        self.interim.is_some_and(|count| count > MAX_INTERIM)
    }

    fn free_space(&mut self) -> io::Result<&mut [u8]> {
        let blank =
            self.input().iter().take(BLANK_BYTES).filter(|byte| matches!(byte, b'\r' | b'\n')).count();
        let free_space = self.input_append_buf();
        if free_space.is_empty() || blank == BLANK_BYTES {
            return Err(Malformed("line or head is too long".to_owned()).into());
        }
        Ok(free_space)
    }

    /// Takes bytes that were read. Returns whether ureq may be able to use them: if it could not use
    /// those before them, it waits for the end of a line or head, and would read a head again from its
    /// start for each byte.
    fn receive(&mut self, count: usize) -> bool {
        let before = self.to;
        self.input_appended(count);
        before == self.from || self.input.get(before..self.to).is_some_and(|new| new.contains(&b'\n'))
    }
}

impl Buffers for Memory {
    fn output(&mut self) -> &mut [u8] {
        self.tmp_and_output().1
    }

    fn input(&self) -> &[u8] {
        self.input.get(self.from..self.to).unwrap_or_default()
    }

    /// Room for more input; empty if the input is as long as allowed.
    fn input_append_buf(&mut self) -> &mut [u8] {
        if self.from > 0 {
            self.input.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let wanted = (self.to + READ_BYTES).min(MAX_HEAD_BYTES + READ_BYTES);
        self.input.resize(wanted.max(self.to), 0);
        self.input.get_mut(self.to..).unwrap_or_default()
    }

    fn input_appended(&mut self, amount: usize) {
        self.to = (self.to + amount).min(self.input.len());
    }

    fn input_consume(&mut self, amount: usize) {
        self.progress = amount > 0;
        if amount > 0 {
            let is_interim = is_interim(self.input());
            self.interim = self.interim.filter(|_| is_interim).map(|count| count + 1);
        }
        self.from = (self.from + amount).min(self.to);
    }

    /// Only chunked bodies of requests need the first buffer, and ours have a length.
    fn tmp_and_output(&mut self) -> (&mut [u8], &mut [u8]) {
        let longest = Call::current().map_or(0, |call| call.longest_line);
        self.output.resize(longest.max(SEND_BYTES), 0);
        (&mut [], &mut self.output)
    }

    fn can_use_input(&self) -> bool {
        // `await_input` reports the error.
        self.from < self.to && self.progress && !self.has_too_many_interim()
    }
}

/// Whether this is the head of an interim response: 1xx, but not 101, after which HTTP ends.
fn is_interim(head: &[u8]) -> bool {
    let start = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or_default();
    let status = head.get(start..).unwrap_or_default().get("HTTP/1.1 ".len()..).unwrap_or_default();
    status.starts_with(b"1") && !status.starts_with(b"101")
}

#[cfg(test)]
pub(in crate::transport) mod fuzz;
