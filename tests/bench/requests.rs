//! The requests of nodes, as the audit log of the API server has them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde::Deserialize;

use crate::support::control_plane::ControlPlane;

/// A request of a node: when the API server received it, and what it is.
#[derive(Debug, Clone)]
pub struct NodeRequest {
    pub time: SystemTime,
    pub node: String,
    /// The verb and the resource with its subresource, or the path of what is no resource.
    pub kind: String,
    /// The status of the response.
    pub status: u16,
}

impl NodeRequest {
    /// Whether it has renewed the lease of its node.
    pub fn has_renewed_lease(&self) -> bool {
        let is_write = ["update leases", "patch leases", "create leases"].contains(&&*self.kind);
        is_write && (200..300).contains(&self.status)
    }
}

/// What is read of an entry. The rest are the bodies of requests.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(rename = "auditID")]
    id: String,
    request_received_timestamp: String,
    verb: String,
    #[serde(default, rename = "requestURI")]
    uri: String,
    user: User,
    #[serde(default)]
    object_ref: ObjectRef,
    #[serde(default)]
    response_status: Status,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Deserialize, Default)]
struct ObjectRef {
    #[serde(default)]
    resource: String,
    #[serde(default)]
    subresource: String,
}

#[derive(Deserialize, Default)]
struct Status {
    #[serde(default)]
    code: u16,
}

fn kind(entry: &Entry) -> String {
    let ObjectRef { resource, subresource } = &entry.object_ref;
    if resource.is_empty() {
        return format!("{} {}", entry.verb, entry.uri.split('?').next().unwrap_or_default());
    }
    if subresource.is_empty() {
        return format!("{} {resource}", entry.verb);
    }
    format!("{} {resource}/{subresource}", entry.verb)
}

/// All requests of nodes so far, in order. A watch has two entries with one identifier.
pub fn node_requests(plane: &ControlPlane) -> Vec<NodeRequest> {
    let log = fs::File::open(plane.dir().join("audit.log")).expect("the audit log is readable");
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    for line in BufReader::new(log).split(b'\n').map_while(Result::ok) {
        // The last line may be half written.
        let Ok(entry) = serde_json::from_slice::<Entry>(&line) else { continue };
        let Some(node) = entry.user.username.strip_prefix("system:node:").map(str::to_owned) else {
            continue;
        };
        let Ok(time) = entry.request_received_timestamp.parse::<Timestamp>() else { continue };
        let (kind, status) = (kind(&entry), entry.response_status.code);
        if seen.insert(entry.id) {
            all.push(NodeRequest { time: SystemTime::from(time), node, kind, status });
        }
    }
    all.sort_by_key(|request| request.time);
    all
}

/// The requests of a span, each with the time since its begin.
pub fn between(all: &[NodeRequest], from: SystemTime, span: Duration) -> Vec<(Duration, &NodeRequest)> {
    all.iter()
        .filter_map(|request| Some((request.time.duration_since(from).ok()?, request)))
        .filter(|(since, _)| *since < span)
        .collect()
}

/// How many there are of each kind.
pub fn by_kind<'a>(requests: &[(Duration, &'a NodeRequest)]) -> BTreeMap<&'a str, usize> {
    let mut kinds = BTreeMap::new();
    for (_, request) in requests {
        *kinds.entry(&*request.kind).or_default() += 1;
    }
    kinds
}

/// How many there are in each second, up to the last one with a request.
pub fn by_second(requests: &[(Duration, &NodeRequest)]) -> Vec<usize> {
    let mut seconds = Vec::new();
    for (since, _) in requests {
        let second = usize::try_from(since.as_secs()).unwrap_or(usize::MAX);
        // Spans have minutes.
        if seconds.len() <= second {
            seconds.resize(second + 1, 0);
        }
        seconds[second] += 1;
    }
    seconds
}

/// When each node has sent its first request that fulfils the condition.
pub fn first_of_each<'a>(
    requests: &[(Duration, &'a NodeRequest)],
    condition: impl Fn(&NodeRequest) -> bool,
) -> BTreeMap<&'a str, Duration> {
    let mut firsts = BTreeMap::new();
    for (since, request) in requests.iter().filter(|(_, request)| condition(request)) {
        firsts.entry(&*request.node).or_insert(*since);
    }
    firsts
}

/// A quotient of counts; none of nothing is zero.
pub fn ratio(count: usize, total: usize) -> f64 {
    number(count) / number(total.max(1))
}

/// A count as a number.
pub fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
