//! Copies of collections that stay current (Go: client-go/tools/cache's Reflector).

use std::io;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::client::{Client, PAGE, parse};
use super::error::ApiError;
use super::target::Target;
use crate::transport::api::{Lines, Use};
use crate::util::backoff::random_unit;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// What happened to a collection.
#[derive(Debug, Clone, PartialEq)]
pub enum Change<T> {
    /// This is all there is.
    Replaced(Vec<T>),
    /// This object is new or has changed.
    Set(T),
    /// This object has gone; as it last was.
    Removed(T),
}

/// What is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// The collection.
    pub target: Target,
    /// `spec.nodeName=node1`.
    pub field_selector: Option<String>,
    /// `app=x`.
    pub label_selector: Option<String>,
}

/// The first wait after a failure; the next ones double.
const FIRST_WAIT: Duration = Duration::from_millis(800);
/// The longest base of a wait.
const LAST_WAIT: Duration = Duration::from_secs(30);
/// Longer than any object that API servers store, as JSON.
const MAX_LINE_BYTES: usize = 64 * 1024 * 1024;

/// Starts the thread `watch/<name>`, which tells `sink` of every change: first what is there
/// ([`Change::Replaced`]), then what happens to it. It never gives up.
///
/// # Errors
/// When the kernel refuses a thread.
pub fn spawn_reflector<T: DeserializeOwned>(
    name: &'static str,
    client: Client,
    watched: Watched,
    on_death: OnDeath,
    mut sink: impl FnMut(Change<T>) + Send + 'static,
) -> io::Result<Running> {
    let breaker = client.breaker();
    let waker = breaker.clone();
    let client = client.with_breaker(breaker);
    let running = threads::spawn(&format!("watch/{name}"), Stack::Large, on_death, move |stop| {
        let mut wait = FIRST_WAIT;
        while !stop.is_stopped() {
            if let Err(error) = cycle(&client, &watched, &mut sink, &mut wait) {
                if error.is_stopping() {
                    return;
                }
                log::warn!("{error}");
            }
            if pause(&stop, &client, wait) == Waited::Stopped {
                return;
            }
            wait = (wait * 2).min(LAST_WAIT);
        }
    })?;
    Ok(running.with_waker(Box::new(move || waker.trip())))
}

fn pause(stop: &StopToken, client: &Client, base: Duration) -> Waited {
    let _ = client;
    stop.wait(base.mul_f64(1.0 + random_unit()))
}

fn cycle<T: DeserializeOwned>(
    client: &Client,
    watched: &Watched,
    sink: &mut impl FnMut(Change<T>),
    wait: &mut Duration,
) -> Result<(), ApiError> {
    let attempt = |verb: &str| format!("{verb} {}", watched.target);
    let mut selectors: Vec<(&str, &str)> = Vec::new();
    selectors.extend(watched.field_selector.as_deref().map(|text| ("fieldSelector", text)));
    selectors.extend(watched.label_selector.as_deref().map(|text| ("labelSelector", text)));
    let mut items = Vec::new();
    let mut token = String::new();
    let mut version;
    loop {
        let mut query = selectors.clone();
        query.push(("limit", PAGE));
        if !token.is_empty() {
            query.push(("continue", &token));
        }
        let mut body = client.stream("list", &watched.target, &query, Use::Call)?;
        let mut page =
            parse(&mut body).map_err(|_| ApiError::form(attempt("list"), "unreadable".to_owned()))?;
        let text = |page: &Value, field: &str| {
            page.get("metadata")
                .and_then(|meta| meta.get(field))
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        version = text(&page, "resourceVersion");
        token = text(&page, "continue");
        if let Some(Value::Array(found)) = page.get_mut("items").map(Value::take) {
            for item in found {
                items.push(
                    serde_json::from_value(item)
                        .map_err(|error| ApiError::form(attempt("list"), error.to_string()))?,
                );
            }
        }
        if token.is_empty() {
            break;
        }
    }
    sink(Change::Replaced(items));
    *wait = FIRST_WAIT;
    loop {
        let seconds = (300.0 + 300.0 * random_unit()) as u64;
        let text = seconds.to_string();
        let mut query = selectors.clone();
        query.extend([("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", &text)]);
        query.push(("resourceVersion", &version));
        let mut body = client.stream("watch", &watched.target, &query, Use::Stream)?;
        body.set_deadline(Instant::now() + Duration::from_secs(seconds + 30));
        let mut lines = Lines::new(body, MAX_LINE_BYTES);
        let mut last = None;
        while let Some(line) =
            lines.next().map_err(|error| ApiError::transport(attempt("watch"), client.origin(), error))?
        {
            let mut event: Value = serde_json::from_slice(line)
                .map_err(|error| ApiError::form(attempt("watch"), error.to_string()))?;
            let object = event.get_mut("object").map(Value::take).unwrap_or_default();
            if let Some(at) = object.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
                last = Some(at.to_owned());
            }
            let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
            match kind {
                "BOOKMARK" => {}
                "ERROR" => return Err(ApiError::from_event(attempt("watch"), object)),
                kind => {
                    let object = serde_json::from_value(object)
                        .map_err(|error| ApiError::form(attempt("watch"), error.to_string()))?;
                    sink(if kind == "DELETED" { Change::Removed(object) } else { Change::Set(object) });
                }
            }
        }
        match last {
            Some(last) => version = last,
            None => return Ok(()),
        }
    }
}
