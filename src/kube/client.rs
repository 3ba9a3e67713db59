//! Requests to the API server: rate, deadline, retries, credentials (Go: client-go/rest).

use std::fmt;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::ApiError;
use super::rate::Bucket;
use super::secret::Secret;
use super::target::{Target, query};
use crate::model::{metrics, typed};
use crate::transport::api::{
    Body, Breaker, Connections, DialError, Endpoint, Identity, Request, Response, Use,
};
use crate::util::stop::{self, StopSource, StopToken, Waited};

/// The time for a request and its response, unless [`Client::with_limits`] sets another: what API
/// servers grant themselves.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a request is retried while the server is busy.
const MAX_RETRIES: u32 = 10;
/// A server that wants to be left alone for longer is left to the caller's back-off.
/// How long it is left alone at least, the first time; doubles.
/// DIFFERS: upstream retries ten times at once if the server's `Retry-After` is 0.
const MIN_RETRY_AFTER: Duration = Duration::from_millis(50);
/// The longest of these.
const MAX_MIN_RETRY_AFTER: Duration = Duration::from_secs(1);
/// A body beyond this is none: API servers do not store objects above 3 MiB, and pages end
/// at 500 of them.
pub(super) const MAX_BODY_BYTES: u64 = 256 * 1024 * 1024;
/// Of an error's body.
const MAX_ERROR_BYTES: u64 = 64 * 1024;
/// Objects per page of a list.
pub(super) const PAGE: &str = "500";

/// Where the API server is and how we show who we are.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// The server, who vouches for it, and our certificate if we have one.
    pub endpoint: Endpoint,
    /// Before every path, without a slash at its end; mostly empty.
    pub base_path: String,
    /// The source of a bearer token or of certificates, if we have one.
    pub token: Option<Arc<dyn CredentialSource>>,
}

/// Supplies credentials that do not last.
pub trait CredentialSource: fmt::Debug + Send + Sync {
    /// What counts for the next request. May block, but ends when `breaker` is tripped.
    ///
    /// # Errors
    /// When there is nothing, in words.
    fn current(&self, deadline: Instant, breaker: &Breaker) -> Result<Issued, String>;

    /// The server did not accept `issued`. Returns whether asking again may help.
    fn refused(&self, issued: &Issued) -> bool;
}

/// What a [`CredentialSource`] gives out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Issued {
    /// A bearer token.
    pub token: Option<Secret<String>>,
    /// A client certificate; `None`: the one in use stays.
    pub identity: Option<Identity>,
}

/// The client of the API server. Clones share connections, credentials and rate.
///
/// Requests fail with the server's error response, without a response in time, and after
/// [`Client::shut_down`].
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
    bucket: Option<Arc<Bucket>>,
    timeout: Duration,
    breaker: Breaker,
}

struct Shared {
    session: Mutex<Arc<Session>>,
    user_agent: String,
    breaker: Breaker,
    /// Why the last request had no response, if it had none.
    trouble: Mutex<Option<String>>,
}

/// The connections made with one set of credentials.
struct Session {
    generation: u64,
    credentials: Credentials,
    connections: Connections,
    origin: String,
    /// Dropped when other credentials take over, which ends the waits for better times.
    current: Mutex<Option<StopSource>>,
    superseded: StopToken,
}

impl Session {
    fn new(generation: u64, credentials: Credentials) -> Result<Session, ApiError> {
        let connections = Connections::new(&credentials.endpoint).map_err(|error| ApiError::setup(&error))?;
        let Endpoint { https, host, port, .. } = &credentials.endpoint;
        let scheme = if *https { "https" } else { "http" };
        let host = crate::transport::dial::join_host_port(host, *port);
        let origin = format!("{scheme}://{host}");
        let (source, superseded) = stop::pair();
        let current = Mutex::new(Some(source));
        Ok(Session { generation, credentials, connections, origin, current, superseded })
    }

    /// `host:port`, as a label.
    fn host(&self) -> crate::util::metrics::Value {
        let (_, host) = self.origin.split_once("://").unwrap_or_default();
        host.to_owned().into()
    }
}

/// How an object is deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// Seconds until the object goes; `Some(0)`: at once.
    pub grace_seconds: Option<i64>,
    /// Only the object with this UID.
    pub uid: Option<String>,
}

/// What one request needs.
struct Call<'a> {
    method: &'static str,
    verb: &'static str,
    target: &'a Target,
    query: &'a [(&'a str, &'a str)],
    body: Option<(&'static str, Vec<u8>)>,
    kind: Use,
}

impl fmt::Debug for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Client({})", self.session().origin)
    }
}

impl Client {
    /// A client without a connection. `qps` is the rate and the burst; `None`: no
    /// limit.
    ///
    /// # Errors
    /// When certificates or keys cannot be used.
    pub fn new(credentials: Credentials, qps: Option<(f64, u32)>) -> Result<Client, ApiError> {
        let version = env!("CARGO_PKG_VERSION");
        let user_agent = format!("kubelet/v1.36.3 (linux/{}) coracle/{version}", go_arch());
        let breaker = Breaker::default();
        let session = Mutex::new(Arc::new(Session::new(0, credentials)?));
        let trouble = Mutex::default();
        let shared = Arc::new(Shared { session, user_agent, breaker: breaker.clone(), trouble });
        Ok(Client { shared, bucket: bucket(qps), timeout: DEFAULT_TIMEOUT, breaker })
    }

    /// One with the same credentials and connections, and a rate and a deadline of its own.
    #[must_use]
    pub fn with_limits(&self, qps: Option<(f64, u32)>, timeout: Duration) -> Client {
        Client { bucket: bucket(qps), timeout, ..self.clone() }
    }

    /// One with the same credentials, connections and rate, and a deadline of its own.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Client {
        Client { timeout, ..self.clone() }
    }

    /// One whose requests `breaker` ends, too.
    #[must_use]
    pub fn with_breaker(&self, breaker: Breaker) -> Client {
        Client { breaker, ..self.clone() }
    }

    /// A breaker for part of this client's requests, which goes when the client goes.
    #[must_use]
    pub fn breaker(&self) -> Breaker {
        self.breaker.child()
    }

    /// Reads an object.
    pub fn get<T: DeserializeOwned>(&self, target: &Target) -> Result<T, ApiError> {
        self.get_with(target, &[])
    }

    /// Reads an object or a list with parameters.
    pub fn get_with<T: DeserializeOwned>(
        &self,
        target: &Target,
        parameters: &[(&str, &str)],
    ) -> Result<T, ApiError> {
        let call =
            Call { method: "GET", verb: "get", target, query: parameters, body: None, kind: Use::Call };
        self.object(&call)
    }

    /// Makes an object by POST to its collection.
    pub fn create<B: Serialize, T: DeserializeOwned>(
        &self,
        target: &Target,
        body: &B,
    ) -> Result<T, ApiError> {
        let body = encode("create", target, body)?;
        self.object(&Call { method: "POST", verb: "create", target, query: &[], body, kind: Use::Call })
    }

    /// Replaces an object by PUT.
    pub fn update<B: Serialize, T: DeserializeOwned>(
        &self,
        target: &Target,
        body: &B,
    ) -> Result<T, ApiError> {
        let body = encode("update", target, body)?;
        self.object(&Call { method: "PUT", verb: "update", target, query: &[], body, kind: Use::Call })
    }

    /// Changes parts of an object with a strategic merge patch.
    pub fn patch<T: DeserializeOwned>(&self, target: &Target, body: &Value) -> Result<T, ApiError> {
        let body = Some(("application/strategic-merge-patch+json", body.to_string().into_bytes()));
        self.object(&Call { method: "PATCH", verb: "patch", target, query: &[], body, kind: Use::Call })
    }

    /// Deletes an object.
    pub fn delete(&self, target: &Target, options: &DeleteOptions) -> Result<(), ApiError> {
        let mut body = serde_json::json!({"kind": "DeleteOptions", "apiVersion": "v1"});
        if let Some(map) = body.as_object_mut() {
            if let Some(seconds) = options.grace_seconds {
                map.insert("gracePeriodSeconds".to_owned(), seconds.into());
            }
            if let Some(uid) = &options.uid {
                map.insert("preconditions".to_owned(), serde_json::json!({ "uid": uid }));
            }
        }
        let body = Some(("application/json", body.to_string().into_bytes()));
        let call = Call { method: "DELETE", verb: "delete", target, query: &[], body, kind: Use::Call };
        let mut response = self.send(&call)?;
        drain(&mut response.body);
        self.took(call.method, &response.body);
        Ok(())
    }

    /// Opens a body that is read by the caller: a page of a list, or a watch.
    pub(super) fn stream(
        &self,
        verb: &'static str,
        target: &Target,
        query: &[(&str, &str)],
        kind: Use,
    ) -> Result<Body, ApiError> {
        Ok(self.send(&Call { method: "GET", verb, target, query, body: None, kind })?.body)
    }

    /// Breaks off every request in progress, those of all clones included; later ones fail.
    /// Does not block.
    pub fn shut_down(&self) {
        self.shared.breaker.trip();
    }

    /// Closes idle connections; the others are closed after use.
    pub fn drop_connections(&self) {
        self.session().connections.close_idle();
    }

    /// Uses another client certificate, and no other credentials. New requests use it at once;
    /// watches are broken off and opened again.
    ///
    /// DIFFERS: calls in progress end as they are, upstream breaks them off.
    ///
    /// # Errors
    /// When certificate or key cannot be used; then the old ones stay.
    pub fn set_identity(&self, identity: Identity) -> Result<(), ApiError> {
        self.replace(|old| {
            let endpoint = Endpoint { identity: Some(identity), ..old.endpoint.clone() };
            Credentials { endpoint, base_path: old.base_path.clone(), token: None }
        })
    }

    /// Goes on with a certificate that the source of credentials has given out.
    fn take_identity(&self, identity: Identity) -> Result<(), ApiError> {
        self.replace(|old| {
            let endpoint = Endpoint { identity: Some(identity), ..old.endpoint.clone() };
            Credentials { endpoint, ..old.clone() }
        })
    }

    fn replace(&self, change: impl FnOnce(&Credentials) -> Credentials) -> Result<(), ApiError> {
        let (old, streams) = {
            let mut place = self.shared.session.lock().unwrap_or_else(PoisonError::into_inner);
            let session = Session::new(place.generation + 1, change(&place.credentials))?;
            // Before the new session can be seen: its own streams must not be broken off. One of
            // the old session that is opened from now on breaks itself off, see `send`.
            let streams = self.shared.breaker.streams();
            (std::mem::replace(&mut *place, Arc::new(session)), streams)
        };
        old.current.lock().unwrap_or_else(PoisonError::into_inner).take();
        old.connections.close_idle();
        streams.break_off();
        Ok(())
    }

    /// Counts the changes of credentials.
    pub(super) fn generation(&self) -> u64 {
        self.session().generation
    }

    /// The server's address, as `https://host:port`.
    pub fn origin(&self) -> String {
        self.session().origin.clone()
    }

    /// Why the last request of any clone had no response; `None` if it had one.
    pub fn trouble(&self) -> Option<String> {
        self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits, but not longer than the credentials last.
    pub(super) fn pause(&self, limit: Duration) -> Waited {
        self.wait_with(&self.session(), limit)
    }

    /// Waits, but not longer than the credentials of this generation last; not at all if they
    /// are gone already.
    pub(super) fn pause_with(&self, generation: u64, limit: Duration) -> Waited {
        // The session is read once: credentials that change in between would be waited with.
        let session = self.session();
        self.wait_with(&session, if session.generation == generation { limit } else { Duration::ZERO })
    }

    fn wait_with(&self, session: &Session, limit: Duration) -> Waited {
        select_biased! {
            recv(self.breaker.token().signal()) -> _ => Waited::Stopped,
            recv(session.superseded.signal()) -> _ => Waited::TimedOut,
            default(limit) => Waited::TimedOut,
        }
    }

    /// Whether it was shut down, or the part of it that a breaker ends.
    pub fn is_stopping(&self) -> bool {
        self.breaker.is_tripped()
    }

    fn session(&self) -> Arc<Session> {
        Arc::clone(&self.shared.session.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn object<T: DeserializeOwned>(&self, call: &Call<'_>) -> Result<T, ApiError> {
        let mut response = self.send(call)?;
        let value = parse(&mut response.body);
        self.took(call.method, &response.body);
        let value = value.map_err(|wrong| self.unreadable(call.verb, call.target, wrong))?;
        typed::decode(&value).map_err(|error| {
            ApiError::form(call.attempt(), format!("the response is no object of this kind: {error}"))
        })
    }

    /// Records the size of a response that was read.
    pub(super) fn took(&self, method: &'static str, body: &Body) {
        metrics::CLIENT_RESPONSE_SIZE.observe([method.into(), self.session().host()], body.bytes() as f64);
    }

    /// The error for a body that cannot be read.
    pub(super) fn unreadable(&self, verb: &str, target: &Target, wrong: Unreadable) -> ApiError {
        let attempt = format!("{verb} {target}");
        match wrong {
            Unreadable::Broken(error) => {
                ApiError::transport(attempt, format!("{}{}", self.session().origin, target.path()), error)
            }
            Unreadable::Form(what) => ApiError::form(attempt, what),
        }
    }

    /// Sends until there is a final response, and returns a successful one.
    fn send(&self, call: &Call<'_>) -> Result<Response, ApiError> {
        let mut retries = 0;
        let mut refreshed = false;
        // For all attempts together; a stream has its time for the head of its response only.
        let mut limit = None;
        loop {
            let stopping = || ApiError::stopping(call.attempt());
            if let Some(bucket) = &self.bucket {
                let begin = Instant::now();
                if bucket.take(self.breaker.token()) == Waited::Stopped {
                    return Err(stopping());
                }
                metrics::CLIENT_THROTTLED.took([call.method.into(), self.session().host()], begin.elapsed());
            }
            if self.breaker.is_tripped() {
                return Err(stopping());
            }
            let mut session = self.session();
            let deadline = *limit.get_or_insert_with(|| Instant::now() + self.timeout);
            let source = session.credentials.token.clone();
            let issued = match &source {
                Some(source) => self.issue(&mut session, source.as_ref(), deadline, call)?,
                None => Issued::default(),
            };
            let outcome = self.ask(&session, call, issued.token.as_ref(), deadline);
            // A stream that was opened while other credentials took over may not be among those
            // that are broken off. INVARIANT: these are listed under the lock under which the
            // session is replaced, so a stream that passes here was open before, or is new.
            if call.kind == Use::Stream
                && self.generation() != session.generation
                && !outcome.as_ref().is_err_and(ApiError::is_stopping)
            {
                limit = None;
                continue;
            }
            let mut response = outcome?;
            let status = response.status;
            if (200..300).contains(&status) {
                return Ok(response);
            }
            if status == 401 && !refreshed && source.is_some_and(|source| source.refused(&issued)) {
                refreshed = true;
                drain(&mut response.body);
                continue;
            }
            let after = retry_after(response.retry_after.as_deref());
            let in_time =
                |after: &Duration| Instant::now().checked_add(*after).is_some_and(|again| again < deadline);
            if let Some(after) = after.filter(in_time)
                && (status == 429 || status >= 500)
                && retries < MAX_RETRIES
            {
                let least = MIN_RETRY_AFTER.saturating_mul(1 << retries).min(MAX_MIN_RETRY_AFTER);
                let after = after.max(least);
                retries += 1;
                metrics::CLIENT_RETRIES.inc([status.to_string().into(), call.method.into(), session.host()]);
                drain(&mut response.body);
                log::debug!("{}: status {status}, again in {after:?}", call.attempt());
                if self.pause(after) == Waited::Stopped {
                    return Err(stopping());
                }
                continue;
            }
            let mut body = Vec::new();
            let _ = response.body.by_ref().take(MAX_ERROR_BYTES).read_to_end(&mut body);
            self.took(call.method, &response.body);
            return Err(ApiError::from_answer(call.attempt(), status, &body, after));
        }
    }

    /// Gets the current credentials of the source, and changes to another certificate if it has one.
    fn issue(
        &self,
        session: &mut Arc<Session>,
        source: &dyn CredentialSource,
        deadline: Instant,
        call: &Call<'_>,
    ) -> Result<Issued, ApiError> {
        let issued =
            source.current(deadline, &self.breaker).map_err(|what| match self.breaker.is_tripped() {
                true => ApiError::stopping(call.attempt()),
                false => ApiError::credentials(call.attempt(), what),
            })?;
        let present = &session.credentials.endpoint;
        if let Some(identity) =
            issued.identity.as_ref().filter(|other| Some(*other) != present.identity.as_ref())
        {
            match self.take_identity(identity.clone()) {
                Ok(()) => *session = self.session(),
                // Half-written files: the next check will find them complete.
                Err(error) if present.identity.is_some() => {
                    log::error!("{error}; the old certificate stays in use");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(issued)
    }

    fn ask(
        &self,
        session: &Session,
        call: &Call<'_>,
        token: Option<&Secret<String>>,
        deadline: Instant,
    ) -> Result<Response, ApiError> {
        let bearer = token.map(|token| format!("Bearer {}", token.reveal()));
        let mut headers =
            vec![("Accept", "application/json"), ("User-Agent", self.shared.user_agent.as_str())];
        headers.extend(bearer.as_ref().map(|bearer| ("Authorization", bearer.as_str())));
        let path = format!("{}{}{}", session.credentials.base_path, call.target.path(), query(call.query));
        let body = call.body.as_ref().map(|(kind, bytes)| (*kind, bytes.as_slice()));
        let size = body.map_or(0, |(_, bytes)| bytes.len());
        metrics::CLIENT_REQUEST_SIZE.observe([call.method.into(), session.host()], size as f64);
        let request =
            Request { method: call.method, path: &path, headers: &headers, body, deadline, kind: call.kind };
        let begin = Instant::now();
        let outcome = session.connections.send(&request, &self.breaker);
        metrics::CLIENT_DURATION.took([call.method.into(), session.host()], begin.elapsed());
        let code = outcome.as_ref().map_or("<error>".into(), |answer| answer.status.to_string().into());
        metrics::CLIENT_REQUESTS.inc([code, call.method.into(), session.host()]);
        let outcome = outcome.map_err(|error| {
            // What stood beside the one that broke is likely to be dead, too.
            session.connections.close_idle();
            ApiError::transport(call.attempt(), format!("{}{path}", session.origin), error)
        });
        if !outcome.as_ref().is_err_and(ApiError::is_stopping) {
            let trouble = outcome.as_ref().err().map(ToString::to_string);
            *self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        }
        outcome
    }
}

impl Call<'_> {
    fn attempt(&self) -> String {
        format!("{} {}", self.verb, self.target)
    }
}

/// Go's name of this machine's architecture.
fn go_arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn bucket(qps: Option<(f64, u32)>) -> Option<Arc<Bucket>> {
    qps.map(|(qps, burst)| Arc::new(Bucket::new(qps, burst, Instant::now())))
}

fn encode<B: Serialize>(
    verb: &str,
    target: &Target,
    body: &B,
) -> Result<Option<(&'static str, Vec<u8>)>, ApiError> {
    let bytes = serde_json::to_vec(body)
        .map_err(|error| ApiError::form(format!("{verb} {target}"), error.to_string()))?;
    Ok(Some(("application/json", bytes)))
}

/// The seconds of a `Retry-After`.
fn retry_after(value: Option<&str>) -> Option<Duration> {
    value.and_then(|value| value.trim().parse().ok()).map(Duration::from_secs)
}

/// Reads a short body to its end, so that the connection can be kept.
fn drain(body: &mut Body) {
    // What is longer costs the connection, no more.
    let _ = std::io::copy(&mut body.take(MAX_ERROR_BYTES), &mut std::io::sink());
}

/// Why a body is no document.
pub(super) enum Unreadable {
    Broken(DialError),
    Form(String),
}

impl Unreadable {
    pub(super) fn new(body: &mut Body, error: serde_json::Error) -> Unreadable {
        if error.is_io() {
            Unreadable::Broken(body.failed(&std::io::Error::from(error)))
        } else {
            Unreadable::Form(format!("the response is no object of this kind: {error}"))
        }
    }
}

/// Reads a JSON document straight from the connection.
pub(super) fn parse(body: &mut Body) -> Result<Value, Unreadable> {
    let outcome = serde_json::from_reader::<_, Value>(body.by_ref().take(MAX_BODY_BYTES));
    outcome.map_err(|error| Unreadable::new(body, error))
}
