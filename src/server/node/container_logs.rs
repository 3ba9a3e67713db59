//! `/containerLogs/{namespace}/{pod}/{container}`: the log that `kubectl logs` shows.

use std::io::{self, Write};

use jiff::Timestamp;

use crate::model::api::{ContainerStatus, PodStatus};
use crate::model::ids::PodUid;
use crate::model::log_line;
use crate::runtime::logs::read::ReadOptions;
use crate::server::backend::NodeBackend;
use crate::server::http::request::{Method, Request};
use crate::server::http::response::{Reply, Response};
use crate::server::views::containers::container_names;
use crate::transport::http1::{ResponseWriter, Target};
use crate::util::stop::StopToken;

pub(super) fn respond(request: &Request, node: &dyn NodeBackend) -> Result<Reply, Response> {
    let target = &request.target;
    let elements: Vec<&str> = target.path.trim_start_matches('/').split('/').collect();
    let [_, namespace, name, container] = *elements.as_slice() else {
        return Err(Response::no_route());
    };
    if request.method != Method::Get {
        return Err(Response::not_allowed("GET"));
    }
    for (element, message) in [
        (name, r#"{"message": "Missing podID."}"#),
        (container, r#"{"message": "Missing container name."}"#),
        (namespace, r#"{"message": "Missing podNamespace."}"#),
    ] {
        if element.is_empty() {
            return Err(Response::text(400, message));
        }
    }
    let split_streams = node.switches().split_streams;
    let query = Query::read(target, Timestamp::now())?;
    query.check(split_streams)?;
    let pod = node
        .find_pod(namespace, name)
        .ok_or_else(|| Response::text(404, format!("pod {name:?} does not exist")))?;
    let pod = node.object(&pod);
    if !container_names(&pod).contains(&container) {
        return Err(Response::text(404, format!("container {container:?} not found in pod {name:?}")));
    }
    let stream = query.stream(split_streams)?;
    let options = ReadOptions { stream, ..query.options };
    let id = instance(pod.status.as_ref(), name, container, query.previous)
        .map_err(|error| Response::text(400, error))?;
    let uid = PodUid::from(pod.metadata.uid.unwrap_or_default());
    Ok(Reply::stream(move |out, node, stop| show(&uid, &id, &options, out, node, stop)))
}

/// Sends the response head before it opens the log, so that a client that follows the log gets the
/// head at once. A later error can only be sent as text in the body.
fn show(
    uid: &PodUid,
    id: &str,
    options: &ReadOptions,
    out: &mut ResponseWriter<'_>,
    node: &dyn NodeBackend,
    stop: &StopToken,
) -> io::Result<()> {
    out.start(200, &[("Content-Type", "text/plain; charset=utf-8")], None)?;
    let bare = id.split_once("://").map_or(id, |(_, id)| id);
    let outcome = match node.instance_log(uid, bare) {
        Ok(source) => node.read_log(&source, options, out, stop),
        Err(error) => {
            log::debug!("cannot find the log of container {id}: {error}");
            Err(format!("unable to retrieve container logs for {id}").into())
        }
    };
    match outcome {
        Err(error) if !stop.is_stopped() => write!(out, "{error}"),
        _ => Ok(()),
    }
}

/// The parsed parameters, not yet validated.
#[derive(Debug, PartialEq)]
struct Query {
    options: ReadOptions,
    previous: bool,
    since_seconds: Option<i64>,
    has_since_time: bool,
    tail: Option<i64>,
    limit: Option<i64>,
    stream: Option<String>,
}

impl Query {
    fn read(target: &Target, now: Timestamp) -> Result<Query, Response> {
        let number = |key: &str| target.get(key).map(integer).transpose();
        // `tail` is the old name of `tailLines`, and takes precedence.
        let tail = match target.get("tail").filter(|tail| !tail.is_empty()) {
            Some("all") => None,
            Some(tail) => Some(integer(tail)?),
            None => number("tailLines")?,
        };
        let (limit, since_seconds) = (number("limitBytes")?, number("sinceSeconds")?);
        let since_time = match target.get("sinceTime") {
            None => None,
            // Go reads these as the zero time.
            Some("" | "null") => Some(Timestamp::MIN),
            Some(text) => Some(text.parse().map_err(|_| undecodable())?),
        };
        let ago = since_seconds
            .map(|ago| now.checked_sub(jiff::SignedDuration::from_secs(ago)).unwrap_or(Timestamp::MIN));
        Ok(Query {
            options: ReadOptions {
                follow: bool_parameter(target, "follow"),
                // `check` rejects negative values.
                tail_lines: tail.and_then(|lines| u64::try_from(lines).ok()),
                since: ago.or(since_time),
                stream: None,
                timestamps: bool_parameter(target, "timestamps"),
                limit_bytes: limit.and_then(|bytes| u64::try_from(bytes).ok()),
            },
            previous: bool_parameter(target, "previous"),
            since_seconds,
            has_since_time: since_time.is_some(),
            tail,
            limit,
            stream: target.get("stream").map(str::to_owned),
        })
    }

    fn check(&self, split_streams: bool) -> Result<(), Response> {
        let stream = self.stream.as_deref().unwrap_or("All");
        let valid = self.tail.is_none_or(|lines| lines >= 0)
            && self.limit.is_none_or(|bytes| bytes >= 1)
            && self.since_seconds.is_none_or(|seconds| seconds >= 1)
            && !(self.since_seconds.is_some() && self.has_since_time)
            && (!split_streams
                || stream == "All"
                || (matches!(stream, "Stdout" | "Stderr") && self.tail.is_none()));
        if valid { Ok(()) } else { Err(Response::text(422, r#"{"message": "Invalid request."}"#)) }
    }

    fn stream(&self, split_streams: bool) -> Result<Option<log_line::Stream>, Response> {
        match self.stream.as_deref() {
            None | Some("All") => Ok(None),
            Some("Stdout") if split_streams => Ok(Some(log_line::Stream::Stdout)),
            Some("Stderr") if split_streams => Ok(Some(log_line::Stream::Stderr)),
            Some(other) => Err(Response::text(
                400,
                format!(
                    "unable to return the given log stream: {other:?}. Please enable PodLogsQuerySplitStreams feature gate in kubelet"
                ),
            )),
        }
    }
}

fn undecodable() -> Response {
    Response::text(400, r#"{"message": "Unable to decode query."}"#)
}

fn integer(text: &str) -> Result<i64, Response> {
    text.parse().map_err(|_| undecodable())
}

/// A boolean as in the API machinery: any value except `0` and `false` is true.
fn bool_parameter(target: &Target, key: &str) -> bool {
    target.get(key).is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
}

/// The id of the requested instance with the runtime's name, such as `containerd://1f3a`.
fn instance(
    status: Option<&PodStatus>,
    pod: &str,
    container: &str,
    previous: bool,
) -> Result<String, String> {
    let which = format!("container {container:?} in pod {pod:?}");
    let found = status.and_then(|status| status_of(status, container));
    let Some(found) = found else { return Err(format!("{which} is not available")) };
    let state = found.state.clone().unwrap_or_default();
    let last = found
        .last_state
        .as_ref()
        .and_then(|last| last.terminated.as_ref())
        .map(|ended| ended.container_id.clone().unwrap_or_default());
    let filled = |id: Option<String>| id.filter(|id| !id.is_empty());
    if previous {
        return filled(last).ok_or_else(|| format!("previous terminated {which} not found"));
    }
    if state.running.is_some() {
        return Ok(found.container_id.clone().unwrap_or_default());
    }
    if let Some(ended) = state.terminated {
        // Without an id this instance was never created: the previous one is shown.
        return filled(ended.container_id).or(filled(last)).ok_or_else(|| format!("{which} is terminated"));
    }
    if last.is_some() {
        return filled(last).ok_or_else(|| format!("{which} is terminated"));
    }
    Err(match state.waiting {
        None => format!("{which} is waiting to start - no logs yet"),
        Some(waiting) => {
            let reason = match waiting.reason.as_deref().unwrap_or_default() {
                "ErrImagePull" => "image can't be pulled",
                "ImagePullBackOff" => "trying and failing to pull image",
                other => other,
            };
            format!("{which} is waiting to start: {reason}")
        }
    })
}

fn status_of<'a>(status: &'a PodStatus, container: &str) -> Option<&'a ContainerStatus> {
    [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses]
        .into_iter()
        .flatten()
        .flatten()
        .find(|status| status.name == container)
}

#[cfg(test)]
mod tests;
