//! Requests to an API server in a common form: those of the recording in `data` (a Go kubelet's,
//! from its server's audit log) and those of a node under test.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::joined::text;

/// One request of a node.
#[derive(Debug, Clone)]
pub struct Request {
    /// Seconds since the first one.
    pub time: f64,
    pub verb: String,
    pub path: String,
    pub query: String,
    pub code: u64,
    pub body: Value,
}

impl Request {
    fn new(time: f64, verb: &str, uri: &str, code: u64, body: &Value) -> Request {
        let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
        let (path, query) = (path.to_owned(), query.to_owned());
        Request { time, verb: verb.to_owned(), path, query, code, body: body.clone() }
    }

    /// What follows the group and version, without `namespaces/NAME`.
    fn parts(&self) -> Vec<&str> {
        let parts: Vec<&str> = self.path.trim_start_matches('/').split('/').collect();
        let below = if parts.first() == Some(&"api") { 2 } else { 3 };
        let mut rest = parts.get(below..).unwrap_or_default();
        if rest.first() == Some(&"namespaces") && rest.len() > 2 {
            rest = &rest[2..];
        }
        rest.to_vec()
    }

    /// Verb, resource and subresource.
    pub fn kind(&self) -> String {
        let parts = self.parts();
        let subresource = parts.get(2).map(|part| format!("/{part}")).unwrap_or_default();
        format!("{} {}{subresource}", self.verb, parts.first().unwrap_or(&"?"))
    }

    /// The name in the path, empty without one.
    pub fn name(&self) -> &str {
        self.parts().get(1).copied().unwrap_or_default()
    }

    /// The field selector of a watch or list, as it was sent.
    pub fn selector(&self) -> &str {
        let parts = self.query.split('&');
        parts.filter_map(|part| part.strip_prefix("fieldSelector=")).next().unwrap_or_default()
    }

    /// The pod or node that the request is for; an event's is the object that it is about.
    pub fn about(&self) -> Option<String> {
        let parts = self.parts();
        match (parts.first().copied(), self.verb.as_str()) {
            (Some("events"), "create") => Some(text(&self.body, "/involvedObject/name").to_owned()),
            (Some("events"), _) => self.name().rsplit_once('.').map(|(name, _)| name.to_owned()),
            (Some("pods"), "create") => Some(text(&self.body, "/metadata/name").to_owned()),
            (Some("pods"), _) => (!self.name().is_empty()).then(|| self.name().to_owned()),
            (Some("serviceaccounts"), _) => Some(text(&self.body, "/spec/boundObjectRef/name").to_owned()),
            _ => None,
        }
    }
}

/// The requests of the recording.
pub fn recorded() -> Vec<Request> {
    let lines = include_str!("data/requests.jsonl").lines();
    lines
        .map(|line| {
            let entry: Value = serde_json::from_str(line).expect("the recording is JSON");
            let time = entry["t"].as_f64().unwrap_or_default();
            let code = entry["code"].as_u64().unwrap_or_default();
            Request::new(time, text(&entry, "/verb"), text(&entry, "/uri"), code, &entry["body"])
        })
        .collect()
}

/// The requests of a user in an audit log, in the order in which they arrived; a watch counts when
/// it begins.
pub fn requests_by(log: &[Value], user: &str) -> Vec<Request> {
    let of_user = |entry: &&Value| {
        let begins = text(entry, "/stage") == "ResponseStarted";
        text(entry, "/user/username") == user && begins == (text(entry, "/verb") == "watch")
    };
    let mut all: Vec<(jiff::Timestamp, &Value)> = log
        .iter()
        .filter(of_user)
        .map(|entry| (text(entry, "/requestReceivedTimestamp").parse().expect("a time"), entry))
        .collect();
    all.sort_by_key(|(time, _)| *time);
    let first = all.first().map(|(time, _)| *time).unwrap_or_default();
    let request = |(time, entry): &(jiff::Timestamp, &Value)| {
        let code = entry["responseStatus"]["code"].as_u64().unwrap_or_default();
        let since = (time.as_microsecond() - first.as_microsecond()) as f64 / 1e6;
        Request::new(since, text(entry, "/verb"), text(entry, "/requestURI"), code, &entry["requestObject"])
    };
    all.iter().map(request).collect()
}

/// Without early 403 responses: the API server learns the node of a new pod by its own watch, and the
/// node may request the objects of the pod before that. The same request is permitted later; of a list
/// that followed a refused watch, that watch.
pub fn without_early_refusals(all: Vec<Request>) -> Vec<Request> {
    let granted = |request: &Request, after: &[Request]| {
        after.iter().any(|later| {
            let same = (&later.path, later.selector()) == (&request.path, request.selector());
            let verb = later.verb == request.verb || (request.verb == "list" && later.verb == "watch");
            same && verb && later.code < 400
        })
    };
    let keep: Vec<bool> = (0..all.len())
        .map(|index| all[index].code != 403 || !granted(&all[index], &all[index + 1..]))
        .collect();
    all.into_iter().zip(keep).filter(|(_, keep)| *keep).map(|(request, _)| request).collect()
}

/// How many there are of each kind.
pub fn kinds(requests: &[Request]) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for request in requests {
        *kinds.entry(request.kind()).or_default() += 1;
    }
    kinds
}

const TIMES: &[&str] = &[
    "startTime",
    "startedAt",
    "finishedAt",
    "lastTransitionTime",
    "lastHeartbeatTime",
    "lastProbeTime",
    "firstTimestamp",
    "lastTimestamp",
    "creationTimestamp",
    "renewTime",
    "kubernetes.io/config.seen",
];

/// The same without what differs from run to run.
pub fn common(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            map.iter().map(|(key, value)| (key.clone(), common_field(key, value))).collect()
        }
        Value::Array(items) => items.iter().map(common).collect(),
        Value::String(text) => Value::String(common_text(text)),
        other => other.clone(),
    }
}

fn common_field(key: &str, value: &Value) -> Value {
    let known = match (key, value.as_str()) {
        (_, None | Some("")) => None,
        (key, _) if TIMES.contains(&key) => Some("<time>"),
        ("uid" | "kubernetes.io/config.hash" | "kubernetes.io/config.mirror", _) => Some("<uid>"),
        ("resourceVersion", _) => Some("<rv>"),
        ("containerID", _) => Some("containerd://<id>"),
        ("imageID", _) => Some("sha256:<id>"),
        ("podIP" | "ip", Some(address)) if address != "192.0.2.10" => Some("<podip>"),
        ("name", Some(name)) if name.starts_with("kube-api-access-") => Some("kube-api-access-<rand>"),
        _ => None,
    };
    known.map_or_else(|| common(value), |known| json!(known))
}

/// A pod's UID in a message, and what it says of the machine.
fn common_text(message: &str) -> String {
    let mut message = message.to_owned();
    for (before, after, instead) in [("_default(", ")", "<uid>"), ("capacity: ", "", "<machine>")] {
        if let Some(begin) = message.find(before).map(|start| start + before.len()) {
            let rest = &message[begin..];
            let end = if after.is_empty() {
                rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(rest.len())
            } else {
                rest.find(after).unwrap_or(rest.len())
            };
            if after.is_empty() && rest.starts_with("<") {
                continue;
            }
            message.replace_range(begin..begin + end, instead);
        }
    }
    message
}

/// Where two values differ: the path, the first and the second.
pub fn differences(path: &str, first: &Value, second: &Value) -> Vec<(String, Value, Value)> {
    match (first, second) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            keys.into_iter()
                .flat_map(|key| {
                    let field = |map: &Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                    differences(&format!("{path}/{key}"), &field(a), &field(b))
                })
                .collect()
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .flat_map(|(index, (a, b))| differences(&format!("{path}/{index}"), a, b))
            .collect(),
        (a, b) if a == b => Vec::new(),
        (a, b) => vec![(path.to_owned(), a.clone(), b.clone())],
    }
}

/// Applies a strategic merge patch of a pod: its conditions are merged by their type.
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return };
    if !target.is_object() {
        *target = json!({});
    }
    let Value::Object(target) = target else { return };
    for (key, value) in patch {
        match value {
            _ if key.starts_with("$setElementOrder/") => {}
            Value::Null => {
                target.remove(key);
            }
            Value::Object(_) => merge(target.entry(key).or_insert_with(|| json!({})), value),
            Value::Array(items) if key == "conditions" => {
                let list = target.entry(key).or_insert_with(|| json!([]));
                let Value::Array(list) = list else { continue };
                for item in items {
                    assert!(item.get("$patch").is_none(), "not expected here: {item}");
                    match list.iter_mut().find(|condition| condition["type"] == item["type"]) {
                        Some(condition) => merge(condition, item),
                        None => {
                            let mut new = json!({});
                            merge(&mut new, item);
                            list.push(new);
                        }
                    }
                }
            }
            other => {
                target.insert(key.clone(), other.clone());
            }
        }
    }
}
