//! The list and watch of one resource, until an error.

use std::collections::HashMap;
use std::io::Read;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::backoff::WatchBackoff;
use super::page::{Page, decode};
use super::{Change, Watched};
use crate::kube::client::{Client, MAX_BODY_BYTES, Moment, PAGE, Unreadable};
use crate::kube::error::ApiError;
use crate::transport::api::{DialError, Lines, RequestKind};
use crate::util::backoff::{Failures, random_unit};
use crate::util::stop::Waited;

/// The server ends a watch after a random time between this number of seconds and twice as many.
const WATCH_SECONDS: u64 = 300;
/// If a watch does not end this long after that time, the server is considered unreachable.
const GRACE: Duration = Duration::from_secs(30);
/// A watch that is open and silent for this time is opened again: API servers send a bookmark each minute.
/// Keep-alive finds a connection that the network has forgotten sooner, but not one that a proxy on the way
/// keeps open. Go: the pings of HTTP/2 (apimachinery: pkg/util/net/http.go), after 30 s, for 15 s.
const QUIET: Duration = Duration::from_secs(150);
/// Attempts in a row to continue a watch while connections break before a response, or the server is silent;
/// there is no limit while there is no connection. DIFFERS: upstream lists again after the first one, and has
/// no limit for refused connections only. A list transfers all objects over a bad link.
const REOPENS: u32 = 2;
/// A watch that ends before this time without an event is a failure.
const SHORT: Duration = Duration::from_secs(1);
/// This many watches in a row that end before `SHORT` are a failure, too. DIFFERS: upstream has no
/// limit: it immediately reopens a watch that delivered an event.
const MAX_SHORT: u32 = 5;
/// A streaming list that takes longer than this is logged.
const SLOW: Duration = Duration::from_secs(10);
/// The limit of a line of a watch, in bytes. No object that an API server stores is larger as JSON.
const MAX_LINE_BYTES: usize = 8 * 1024 * 1024;
/// Marks the bookmark after which events are changes.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// The state that remains between two calls of `cycle`.
pub(super) struct Reflector<'a, S> {
    client: &'a Client,
    watched: &'a Watched,
    sink: &'a mut S,
    /// The last resource version that the server sent; empty before the first one.
    version: String,
    /// The server does not have this version yet, or no longer.
    version_unavailable: bool,
    /// The first list was returned in pages, although the request allowed a cached state.
    paged: bool,
    /// The number of failures since the last success.
    failures: Failures,
    /// How long a watch may be silent.
    quiet: Duration,
}

struct Stream {
    lines: Lines,
    opened: Instant,
    moment: Moment,
}

enum Event {
    Set(Value),
    Removed(Value),
    Bookmark(Value),
    Error(ApiError),
    Unknown(String),
}

/// How a watch ended.
enum End {
    /// The server's time limit was reached, or the connection broke.
    Closed { events: u64 },
    /// The watch failed in a way that must be logged.
    Failed(ApiError),
}

impl<'a, S> Reflector<'a, S> {
    pub(super) fn new(client: &'a Client, watched: &'a Watched, sink: &'a mut S) -> Self {
        let version = String::new();
        Reflector {
            client,
            watched,
            sink,
            version,
            version_unavailable: false,
            paged: false,
            failures: Failures::default(),
            quiet: QUIET,
        }
    }

    pub(super) fn count_failure(&mut self, error: &ApiError) {
        if self.failures.count() {
            log::warn!("watch of {}, failure {}: {error}", self.watched.target, self.failures);
        }
    }

    /// Lists and watches until an error.
    pub(super) fn cycle<T: DeserializeOwned>(&mut self, backoff: &mut WatchBackoff) -> Result<(), ApiError>
    where
        S: FnMut(Change<T>),
    {
        let stream = match self.streaming_list(backoff) {
            Ok(stream) => Some(stream),
            Err(error) if error.is_stopping() || error.is_transport() => return Err(error),
            Err(error) => {
                log::debug!("{}: the streaming list failed, a list follows: {error}", self.watched.target);
                self.list()?;
                None
            }
        };
        self.watch(stream, backoff)
    }

    /// Reads all objects with a watch, which then continues with the changes.
    fn streaming_list<T: DeserializeOwned>(&mut self, backoff: &mut WatchBackoff) -> Result<Stream, ApiError>
    where
        S: FnMut(Change<T>),
    {
        let mut short = 0;
        loop {
            let version = if self.version_unavailable { String::new() } else { self.version.clone() };
            let moment = self.client.moment();
            let mut stream = match self.open(&version, true) {
                Ok(stream) => stream,
                Err(error) if error.is_refused() || error.status() == Some(429) => {
                    self.count_failure(&error);
                    self.step(moment, backoff)?;
                    continue;
                }
                Err(error) if expired(&error) && !version.is_empty() => {
                    self.version_unavailable = true;
                    continue;
                }
                Err(error) => return Err(error),
            };
            match self.initial_events(&mut stream) {
                Ok(Some((items, version))) => {
                    if stream.opened.elapsed() > SLOW {
                        log::warn!("list of {} took {:?}", self.watched.target, stream.opened.elapsed());
                    }
                    self.version = version;
                    self.version_unavailable = false;
                    self.deliver(Change::Replaced(items));
                    return Ok(stream);
                }
                Err(error) if expired(&error) && !version.is_empty() => self.version_unavailable = true,
                // A list would be another large request to a busy server.
                Err(error) if error.status() == Some(429) => {
                    self.count_failure(&error);
                    self.step(stream.moment, backoff)?;
                }
                Err(error) => return Err(error),
                // The stream ended before all objects were sent: start again.
                Ok(None) => {
                    self.client_stopped()?;
                    short = if stream.opened.elapsed() < SHORT { short + 1 } else { 0 };
                    if short >= MAX_SHORT {
                        return Err(self.form("watch", "the server ends watches immediately"));
                    }
                    if self.client.credential_generation() == stream.moment.generation {
                        self.count_failure(&self.form("watch", "the server did not send all objects"));
                        if short > 0 {
                            self.step(stream.moment, backoff)?;
                        }
                    }
                }
            }
        }
    }

    /// Reads all objects and their version; `None` if the stream ended before the last object.
    fn initial_events<T: DeserializeOwned>(
        &self,
        stream: &mut Stream,
    ) -> Result<Option<(Vec<T>, String)>, ApiError> {
        let mut items: HashMap<(String, String), T> = HashMap::new();
        loop {
            let event = match self.event(&mut stream.lines) {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(None),
                Err(error) => return Err(error),
            };
            match event {
                Event::Set(object) => {
                    let key = key(&object);
                    let item = decode(object).map_err(|error| self.form("watch", &error.to_string()))?;
                    items.insert(key, item);
                }
                Event::Removed(object) => {
                    items.remove(&key(&object));
                }
                Event::Bookmark(object) => {
                    let mark =
                        object.pointer("/metadata/annotations").and_then(|all| all.get(INITIAL_EVENTS_END));
                    if mark.and_then(Value::as_str) == Some("true") {
                        return Ok(Some((
                            items.into_values().collect(),
                            version_of(&object).unwrap_or_default(),
                        )));
                    }
                }
                Event::Error(error) => return Err(error),
                Event::Unknown(kind) => {
                    log::warn!("watch of {}: unknown event {kind:?}", self.watched.target)
                }
            }
        }
    }

    /// Lists all objects, page by page.
    fn list<T: DeserializeOwned>(&mut self) -> Result<(), ApiError>
    where
        S: FnMut(Change<T>),
    {
        let wanted = match self.version.as_str() {
            _ if self.version_unavailable => "",
            "" => "0",
            version => version,
        }
        .to_owned();
        let outcome = match self.list_at(&wanted) {
            Err(error) if expired(&error) => {
                self.version_unavailable = true;
                self.list_at("")
            }
            outcome => outcome,
        };
        let (page, pages) = outcome?;
        if wanted == "0" && pages > 1 {
            self.paged = true;
        }
        self.version = page.version;
        self.version_unavailable = false;
        self.deliver(Change::Replaced(page.items));
        Ok(())
    }

    fn list_at<T: DeserializeOwned>(&self, version: &str) -> Result<(Page<T>, u32), ApiError> {
        let limit = if self.paged || version.is_empty() || version == "0" { PAGE } else { "" };
        let mut all: Page<T> = self.page(version, limit, "")?;
        let mut pages = 1;
        while !all.token.is_empty() {
            let page: Page<T> = match self.page("", PAGE, &all.token) {
                // The server no longer has the snapshot of these pages: list without pages.
                Err(error) if error.is_gone() => return Ok((self.page(version, "", "")?, pages)),
                page => page?,
            };
            all.items.extend(page.items);
            (all.version, all.token) = (page.version, page.token);
            pages += 1;
        }
        Ok((all, pages))
    }

    fn page<T: DeserializeOwned>(
        &self,
        version: &str,
        limit: &str,
        token: &str,
    ) -> Result<Page<T>, ApiError> {
        let mut query = self.selectors();
        query.extend([("resourceVersion", version), ("limit", limit), ("continue", token)]);
        query.retain(|(_, value)| !value.is_empty());
        query.sort_unstable();
        let target = &self.watched.target;
        let mut body = self.client.stream("list", target, &query, RequestKind::Call)?;
        self.client.follow_progress(&mut body);
        let page = serde_json::from_reader(body.by_ref().take(MAX_BODY_BYTES));
        self.client.observe_size("GET", &body);
        page.map_err(|error| {
            let cause = Unreadable::new(&mut body, error);
            self.client.unreadable("list", target, cause)
        })
    }

    /// Reads the changes from an open stream, or from a new one that begins at the last version.
    fn watch<T: DeserializeOwned>(
        &mut self,
        mut open: Option<Stream>,
        backoff: &mut WatchBackoff,
    ) -> Result<(), ApiError>
    where
        S: FnMut(Change<T>),
    {
        let mut short = 0;
        let mut broken = 0;
        // How long the last watches in a row were open in all, if none of them had an event.
        let mut silence: Option<Duration> = None;
        loop {
            let moment = self.client.moment();
            let stream = match open.take() {
                Some(stream) => Ok(stream),
                None => self.open(&self.version, false),
            };
            let mut stream = match stream {
                Ok(stream) => stream,
                Err(error) if continues(&error, broken) => {
                    broken += u32::from(error.is_broken());
                    self.count_failure(&error);
                    self.step(moment, backoff)?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            broken = 0;
            let end = self.follow(&mut stream);
            self.client_stopped()?;
            // The client ended the stream because its credentials changed.
            if self.client.credential_generation() != stream.moment.generation {
                continue;
            }
            let lasted = stream.opened.elapsed();
            let soon = lasted < SHORT;
            short = if soon { short + 1 } else { 0 };
            match end {
                End::Failed(error) if error.status() == Some(429) => {
                    self.count_failure(&error);
                    self.step(stream.moment, backoff)?;
                }
                End::Failed(error) => return Err(error),
                End::Closed { events } if soon && (events == 0 || short >= MAX_SHORT) => {
                    return Err(self.form("watch", "the server ended the watch immediately"));
                }
                // A server that was restored from a backup sends neither events nor bookmarks to a watch at a
                // version that it does not have yet; a list shows that (`expired`). DIFFERS: upstream's watch
                // continues until the server has reached the version.
                End::Closed { events: 0 } => {
                    let all = silence.map_or(lasted, |before| before.saturating_add(lasted));
                    if silence.is_some() && all >= self.quiet.saturating_mul(2) {
                        return Err(self.form("watch", "the server sends neither events nor bookmarks"));
                    }
                    silence = Some(all);
                }
                End::Closed { .. } => silence = None,
            }
        }
    }

    /// Reads one watch to its end.
    fn follow<T: DeserializeOwned>(&mut self, stream: &mut Stream) -> End
    where
        S: FnMut(Change<T>),
    {
        // Without a version the watch begins with all objects, in any order. Their versions are not
        // versions from which a watch can continue.
        let mut ordered = !matches!(self.version.as_str(), "" | "0");
        let mut events = 0;
        loop {
            let event = match self.event(&mut stream.lines) {
                Ok(Some(event)) => event,
                Ok(None) => return End::Closed { events },
                Err(error) => return End::Failed(error),
            };
            events += 1;
            let (object, removed) = match event {
                Event::Error(error) => return End::Failed(error),
                Event::Unknown(kind) => {
                    log::warn!("watch of {}: unknown event {kind:?}", self.watched.target);
                    continue;
                }
                Event::Bookmark(object) => {
                    let Some(version) = version_of(&object) else { continue };
                    if ordered && is_older(&version, &self.version) {
                        return self.version_went_back(&version);
                    }
                    self.version = version;
                    self.failures.end();
                    continue;
                }
                Event::Set(object) => (object, false),
                Event::Removed(object) => (object, true),
            };
            let version = version_of(&object);
            ordered |= removed;
            if let Some(version) =
                version.as_deref().filter(|version| ordered && is_older(version, &self.version))
            {
                return self.version_went_back(version);
            }
            match decode(object) {
                Ok(object) if removed => self.deliver(Change::Removed(object)),
                Ok(object) => self.deliver(Change::Set(object)),
                // DIFFERS: upstream ends the watch and lists again. Here the watch of the other
                // objects continues.
                Err(error) => {
                    log::error!("watch of {}: an object cannot be read: {error}", self.watched.target)
                }
            }
            if let (true, Some(version)) = (ordered, version) {
                self.version = version;
            }
        }
    }

    /// Handles a server that sends an older version than before: it was restored from a backup.
    /// All objects must be listed again.
    ///
    /// DIFFERS: upstream continues. Until a watch expires it misses the changes between the version
    /// of the backup and its own version.
    fn version_went_back(&mut self, version: &str) -> End {
        let what = format!("the server is at version {version}, but was at {} before", self.version);
        self.version_unavailable = true;
        End::Failed(self.form("watch", &what))
    }

    fn open(&self, version: &str, initial: bool) -> Result<Stream, ApiError> {
        let seconds = WATCH_SECONDS + (WATCH_SECONDS as f64 * random_unit()) as u64;
        let (text, go) = (seconds.to_string(), format!("{}m{}s", seconds / 60, seconds % 60));
        let mut query = self.selectors();
        query.extend([("watch", "true"), ("allowWatchBookmarks", "true")]);
        query.extend([("timeoutSeconds", text.as_str()), ("timeout", go.as_str())]);
        if initial {
            query.extend([("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")]);
        }
        query.push(("resourceVersion", version));
        query.retain(|(_, value)| !value.is_empty());
        query.sort_unstable();
        let moment = self.client.moment();
        let mut body = self.client.stream("watch", &self.watched.target, &query, RequestKind::Stream)?;
        let opened = Instant::now();
        body.follow_progress(self.quiet, opened + Duration::from_secs(seconds) + GRACE);
        Ok(Stream { lines: Lines::new(body, MAX_LINE_BYTES), opened, moment })
    }

    /// The next event; `None` at the regular end, and when the connection broke.
    fn event(&self, lines: &mut Lines) -> Result<Option<Event>, ApiError> {
        let line = match lines.next_line() {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(None),
            Err(DialError::Stopped) => return Err(self.stopping()),
            Err(error) => {
                log::debug!("watch of {}: {error}", self.watched.target);
                return Ok(None);
            }
        };
        let invalid = |what: &str| self.form("watch", &format!("unable to decode an event: {what}"));
        let mut event: Value = serde_json::from_slice(line).map_err(|error| invalid(&error.to_string()))?;
        let object = event.get_mut("object").map(Value::take).unwrap_or_default();
        let kind = event.get("type").and_then(Value::as_str).ok_or_else(|| invalid("no type"))?;
        Ok(Some(match kind {
            "ADDED" | "MODIFIED" => Event::Set(object),
            "DELETED" => Event::Removed(object),
            "BOOKMARK" => Event::Bookmark(object),
            "ERROR" => Event::Error(ApiError::from_event(self.attempt("watch"), object)),
            other => Event::Unknown(other.chars().take(50).collect()),
        }))
    }

    fn selectors(&self) -> Vec<(&'a str, &'a str)> {
        let field = self.watched.field_selector.as_deref().map(|text| ("fieldSelector", text));
        let label = self.watched.label_selector.as_deref().map(|text| ("labelSelector", text));
        field.into_iter().chain(label).collect()
    }

    fn deliver<T>(&mut self, change: Change<T>)
    where
        S: FnMut(Change<T>),
    {
        self.failures.end();
        (self.sink)(change);
    }

    /// Waits before a retry of a request that began at `moment`; see [`Client::pause_with`].
    fn step(&self, moment: Moment, backoff: &mut WatchBackoff) -> Result<(), ApiError> {
        match self.pause(moment, backoff) {
            Waited::Stopped => Err(self.stopping()),
            Waited::TimedOut => Ok(()),
        }
    }

    /// The wait of [`Reflector::step`].
    pub(super) fn pause(&self, moment: Moment, backoff: &mut WatchBackoff) -> Waited {
        let limit = backoff.next(Instant::now(), random_unit());
        self.client.pause_with(moment, limit, self.watched.spread.after_list(!self.version.is_empty()))
    }

    fn client_stopped(&self) -> Result<(), ApiError> {
        if self.client.is_stopping() { Err(self.stopping()) } else { Ok(()) }
    }

    fn attempt(&self, verb: &str) -> String {
        format!("{verb} {}", self.watched.target)
    }

    fn form(&self, verb: &str, what: &str) -> ApiError {
        ApiError::form(self.attempt(verb), what.to_owned())
    }

    fn stopping(&self) -> ApiError {
        ApiError::stopping(self.attempt("watch"))
    }
}

/// Whether a watch that was not opened is tried again at its version, after so many attempts that broke: the
/// server did not say that it has the version no longer.
fn continues(error: &ApiError, broken: u32) -> bool {
    error.is_unreachable() || error.status() == Some(429) || error.is_broken() && broken < REOPENS
}

/// Whether the server cannot serve the requested version.
fn expired(error: &ApiError) -> bool {
    error.is_gone() || error.is_too_large_version()
}

fn key(object: &Value) -> (String, String) {
    let text = |field: &str| {
        let value = object.get("metadata").and_then(|meta| meta.get(field)).and_then(Value::as_str);
        value.unwrap_or_default().to_owned()
    };
    (text("namespace"), text("name"))
}

/// Compares resource versions: if both are numbers, the smaller one is older.
fn is_older(version: &str, known: &str) -> bool {
    let number = |version: &str| version.parse::<u128>().ok();
    number(version).zip(number(known)).is_some_and(|(version, known)| version < known)
}

fn version_of(object: &Value) -> Option<String> {
    let version = object.pointer("/metadata/resourceVersion").and_then(Value::as_str);
    version.filter(|version| !version.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests;
