//! Which listener answers what.

use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::model::event::Regarding;
use crate::model::ids::PodUid;

use super::listener::Listener;
use super::query::{BadParam, Target};
use super::select::{Selection, container_names, default_container, resolve};
use super::streams::Stream;
use super::views::{self, Described, PodsReply, VersionReply};
use super::{Deps, LogOptions, PodView, debug, health, main_port, metrics, node_logs, stats};

/// A whole answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    /// Further ones.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub(super) fn text(status: u16, body: impl Into<String>) -> Self {
        let body = body.into().into_bytes();
        Answer { status, content_type: "text/plain; charset=utf-8", headers: Vec::new(), body }
    }

    pub(super) fn not_found() -> Self {
        Answer::text(404, "404 page not found\n")
    }

    /// As above where the path begins like one that is there.
    pub(super) fn no_route() -> Self {
        Answer::text(404, "404: Page Not Found")
    }

    /// The same path with a slash behind it is there.
    pub(super) fn with_slash(target: &Target) -> Self {
        let mut location = format!("{}/", target.path);
        if !target.query.is_empty() {
            location.push('?');
            location.push_str(&target.query);
        }
        let body = format!("<a href=\"{}\">Temporary Redirect</a>.\n\n", node_logs::plain(&location));
        Answer {
            content_type: "text/html; charset=utf-8",
            headers: vec![("Location", location)],
            ..Answer::text(307, body)
        }
    }

    /// The path takes other methods only.
    pub(super) fn not_allowed(methods: &str) -> Self {
        Answer {
            headers: vec![("Allow", methods.to_owned())],
            ..Answer::text(405, "405: Method Not Allowed")
        }
    }

    pub(super) fn json(value: &impl Serialize) -> Self {
        Answer::written(serde_json::to_vec(value))
    }

    pub(super) fn written(json: serde_json::Result<Vec<u8>>) -> Self {
        match json {
            Ok(body) => Answer { body, content_type: "application/json", ..Answer::text(200, "") },
            Err(why) => Answer::text(500, format!("cannot write the answer as JSON: {why}\n")),
        }
    }
}

impl From<BadParam> for Answer {
    fn from(bad: BadParam) -> Self {
        Answer::text(400, format!("{bad}\n"))
    }
}

/// The method of a vetted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Method {
    /// Reads; a HEAD is answered as one without its body.
    #[default]
    Get,
    /// As [`Method::Get`], but the main port asks for other rights.
    Head,
    /// Changes, or runs something.
    Post,
    /// Sets something.
    Put,
    /// Any other; few paths take one.
    Other,
}

impl Method {
    /// As it is written in a request line.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Other => "other",
        }
    }
}

/// A vetted request, as far as an answer depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Asked {
    pub method: Method,
    pub target: Target,
    /// The `Accept` header; empty without one.
    pub accept: String,
    /// Whether the client takes gzip.
    pub gzip: bool,
    /// Only the main port takes bodies, and only short ones.
    pub body: Vec<u8>,
}

/// What a request leads to.
pub(super) enum Reply {
    /// All of it at once.
    Whole(Answer),
    /// Bit by bit.
    Stream(Stream),
}

/// Paths that only the main port answers, and that one only with `enableDebuggingHandlers`.
const DEBUG_PATHS: [&str; 7] =
    ["/run/", "/exec/", "/attach/", "/portForward/", "/containerLogs/", "/logs/", "/debug/pprof/"];

/// The refusal of a path that is there for debugging only.
pub(super) fn debugging_disabled(path: &str) -> Option<Answer> {
    let debugs = DEBUG_PATHS.iter().any(|debug| path.starts_with(debug));
    debugs.then(|| Answer::text(405, "Debug endpoints are disabled.\n"))
}

/// Answers a vetted request.
pub(super) fn route(listener: Listener, asked: &Asked, deps: &Deps) -> Reply {
    let target = &asked.target;
    let changes = asked.method == Method::Post;
    let path = target.path.as_str();
    if listener == Listener::Main {
        return main_port::route(asked, deps).unwrap_or_else(Reply::Whole);
    }
    let is_health = path == "/healthz" || path.starts_with("/healthz/");
    let answer = match listener {
        _ if is_health && !changes => health::answer(&deps.checks, target),
        Listener::Healthz => Answer::not_found(),
        _ if path == "/metrics" || path.starts_with("/metrics/") => {
            metrics::answer(asked, deps).unwrap_or_else(Answer::not_found)
        }
        _ if path.starts_with("/stats/") => return stats::answer(asked, deps).unwrap_or_else(Reply::Whole),
        Listener::ReadOnly | Listener::Main => read_only(path, deps),
        Listener::Local if changes => debug::route(path, target, deps).unwrap_or_else(|refusal| refusal),
        Listener::Local => return local(path, target, deps).unwrap_or_else(Reply::Whole),
    };
    Reply::Whole(answer)
}

fn read_only(path: &str, deps: &Deps) -> Answer {
    match path {
        "/pods" | "/pods/" => Answer::written(views::pod_list(&*deps.pods)),
        // DIFFERS: the Go kubelet answers 405 here, as for all debug paths of this port.
        "/runningpods" | "/runningpods/" => Answer::json(&views::running_list(&(deps.running)())),
        _ => debugging_disabled(path).unwrap_or_else(Answer::not_found),
    }
}

fn local(path: &str, target: &Target, deps: &Deps) -> Result<Reply, Answer> {
    let answer = match path {
        "/v1/pods" => Answer::json(&PodsReply { pods: sorted_pods(deps) }),
        "/v1/pods/watch" => return Ok(Reply::Stream(Stream::Pods)),
        "/v1/describe" => describe(target, deps)?,
        "/v1/logs" => return logs(target, deps).map(Reply::Stream),
        "/v1/status" => Answer::json(&(deps.status)()),
        "/v1/events" => {
            let since = target.parsed("since")?.unwrap_or(0);
            if target.flag("follow")? {
                return Ok(Reply::Stream(Stream::Events { since }));
            }
            Answer::json(&deps.events.recent(since))
        }
        "/v1/images" => match (deps.images)() {
            Ok(images) => Answer::json(&images),
            Err(why) => Answer::text(502, format!("{why}\n")),
        },
        "/v1/version" => Answer::json(&VersionReply::own()),
        _ => Answer::not_found(),
    };
    Ok(Reply::Whole(answer))
}

/// The pods in the order that people see.
pub(super) fn sorted_pods(deps: &Deps) -> Vec<PodView> {
    let mut pods = all_pods(deps);
    pods.sort_by(|a, b| (a.namespace(), a.name(), a.uid()).cmp(&(b.namespace(), b.name(), b.uid())));
    pods
}

fn all_pods(deps: &Deps) -> Vec<PodView> {
    let mut pods = Vec::new();
    (deps.pods)(&mut |view| pods.push(view));
    pods
}

pub(super) fn find(target: &Target, deps: &Deps) -> Result<PodView, Answer> {
    let wanted = target.get("pod").unwrap_or_default();
    let node = (deps.status)().node;
    let pods = all_pods(deps);
    match resolve(&pods, wanted, &node) {
        Selection::One(view) => Ok(view.clone()),
        Selection::None => Err(Answer::text(404, format!("there is no pod {wanted:?} on this node\n"))),
        Selection::Several(candidates) => {
            let list = candidates.join("\n  ");
            Err(Answer::text(409, format!("{wanted:?} means several pods; say which:\n  {list}\n")))
        }
    }
}

fn describe(target: &Target, deps: &Deps) -> Result<Answer, Answer> {
    let view = find(target, deps)?;
    let uid = PodUid::from(view.uid());
    let mut events = deps.events.recent(0);
    events.retain(|event| matches!(&event.regarding, Regarding::Pod { uid: of, .. } if *of == uid));
    Ok(Answer::json(&Described { view, events }))
}

fn logs(target: &Target, deps: &Deps) -> Result<Stream, Answer> {
    let options = LogOptions {
        follow: target.flag("follow")?,
        tail: target.parsed("tail")?,
        since: target.parsed::<Timestamp>("since")?,
        stream: None,
        timestamps: target.flag("timestamps")?,
        limit_bytes: target.parsed("limitBytes")?,
    };
    let previous = target.flag("previous")?;
    let view = find(target, deps)?;
    let names = container_names(&view.pod);
    let container = match target.get("container").filter(|name| !name.is_empty()) {
        Some(name) if names.contains(&name) => name,
        Some(name) => {
            let list = names.join(", ");
            return Err(Answer::text(
                404,
                format!(
                    "pod {}/{} has no container {name:?}; it has: {list}\n",
                    view.namespace(),
                    view.name()
                ),
            ));
        }
        None => {
            default_container(&view.pod).ok_or_else(|| Answer::text(404, "the pod has no containers\n"))?
        }
    };
    let source = (deps.log_path)(&PodUid::from(view.uid()), container, previous)
        .map_err(|why| Answer::text(404, format!("{why}\n")))?;
    Ok(Stream::Logs { source, options, container: container.to_owned(), of: names.len() })
}

/// How long a watcher's wait for news may take before it looks at its stop signal again.
pub(super) const WATCH_SLICE: Duration = Duration::from_secs(1);
