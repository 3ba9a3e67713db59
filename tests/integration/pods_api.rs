//! The pods API of a running agent, called over its socket.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use coracle::transport::generated::{methods::pods as api, pods as pb};
use coracle::transport::grpc::{Channel, Kind, ResponseStream};
use coracle::util::stop::StopToken;
use serde_json::json;

use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::simple;
use crate::support::wait::{wait_for, wait_until};

const LIMIT: Option<Duration> = Some(LONG);

fn channel(node: &FakeNode) -> Channel {
    let socket = node.root().join("pods-api/pods-api.sock");
    Channel::new(&format!("unix://{}", socket.display())).unwrap()
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// The content of a message's field; empty without it.
fn field(mut message: &[u8], wanted: u64) -> &[u8] {
    while let Some(key) = varint(&mut message) {
        let number = varint_or_length(&mut message, key);
        if key & 7 != 2 {
            continue;
        }
        let (content, rest) = message.split_at(number);
        if key >> 3 == wanted {
            return content;
        }
        message = rest;
    }
    &[]
}

fn varint_or_length(message: &mut &[u8], key: u64) -> usize {
    assert!([0, 2].contains(&(key & 7)), "field {key}");
    let number = varint(message).unwrap();
    if key & 7 == 2 { usize::try_from(number).unwrap() } else { 0 }
}

fn text(pod: &[u8], path: [u64; 2]) -> String {
    String::from_utf8(field(field(pod, path[0]), path[1]).to_vec()).unwrap()
}

fn name(pod: &[u8]) -> String {
    text(pod, [1, 1])
}

fn uid(pod: &[u8]) -> String {
    text(pod, [1, 5])
}

fn phase(pod: &[u8]) -> String {
    text(pod, [3, 1])
}

/// `None`: the agent does not listen yet, although it is healthy, or has not published yet that all
/// sources have delivered their pods, although it shows them.
fn list(channel: &Channel) -> Option<Vec<Vec<u8>>> {
    let request = pb::ListPodsRequest::default();
    match channel.call_with_stop(&api::LIST_PODS, &request, LIMIT, &StopToken::never()) {
        Ok(listed) => Some(listed.pods),
        Err(error) => {
            assert!([Kind::Unavailable, Kind::FailedPrecondition].contains(&error.kind), "{error}");
            None
        }
    }
}

fn get(channel: &Channel, uid: &str) -> Result<Vec<u8>, (Kind, String)> {
    let request = pb::GetPodRequest { pod_uid: uid.to_owned(), ..Default::default() };
    let found = channel.call_with_stop(&api::GET_POD, &request, LIMIT, &StopToken::never());
    found.map(|found| found.pod).map_err(|error| (error.kind, error.message))
}

/// The next event of a kind about a pod that `is_wanted`.
fn wait_event(
    watch: &mut ResponseStream<pb::WatchPodsEvent>,
    kind: pb::EventType,
    is_wanted: impl Fn(&[u8]) -> bool,
) -> Vec<u8> {
    loop {
        let event = watch.next(&StopToken::never()).unwrap().unwrap();
        if event.type_.enum_value() == Ok(kind) && is_wanted(&event.pod) {
            return event.pod;
        }
    }
}

#[test]
fn clients_read_pods_and_watch_them_start_and_end() {
    let mut node = FakeNode::start_with(json!({"featureGates": {"PodsAPI": true}}));
    let channel = channel(&node);
    node.apply(&simple("first"));
    node.wait_ready("first");
    let (first, second) = (full_name("first"), full_name("second"));
    let listed = wait_for("the pod to run", LONG, || {
        list(&channel)?.into_iter().find(|pod| name(pod) == first && phase(pod) == "Running")
    });
    assert_eq!(get(&channel, &uid(&listed)).map(|pod| uid(&pod)), Ok(uid(&listed)));
    let missing = "pod with UID nosuch not found".to_owned();
    assert_eq!(get(&channel, "nosuch"), Err((Kind::NotFound, missing)));

    let request = pb::WatchPodsRequest::default();
    let mut watch = channel.open(&api::WATCH_PODS, &request).unwrap();
    wait_event(&mut watch, pb::EventType::ADDED, |pod| name(pod) == first);
    wait_event(&mut watch, pb::EventType::INITIAL_SYNC_COMPLETE, <[u8]>::is_empty);
    node.apply(&simple("second"));
    let added = wait_event(&mut watch, pb::EventType::ADDED, |pod| name(pod) == second);
    if phase(&added) != "Running" {
        let running = |pod: &[u8]| name(pod) == second && phase(pod) == "Running";
        wait_event(&mut watch, pb::EventType::MODIFIED, running);
    }
    node.remove("second");
    let deleted = wait_event(&mut watch, pb::EventType::DELETED, |pod| name(pod) == second);
    // Only its identity: a pod's own phase is never empty.
    assert_eq!((uid(&deleted).is_empty(), phase(&deleted)), (false, String::new()));
    drop(watch);
    let metric = |name: &str, code: &str| {
        let labels = format!("{{server_api_version=\"v1alpha1\",status_code=\"{code}\"}}");
        node.metric(&format!("kubelet_pod_requests_{name}_total{labels}"))
    };
    wait_until("the end of the watch to be counted", LONG, || metric("watch", "Canceled") == 1.0);
    assert!(metric("list", "OK") >= 1.0);
    assert_eq!([metric("get", "OK"), metric("get", "NotFound")], [1.0, 1.0]);
    // Only root can use it.
    let place = node.root().join("pods-api");
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&place), mode(&place.join("pods-api.sock"))), (0o750, 0o600));
    node.kill_agent();
    node.start_agent();
    node.wait_ready("first");
    let channel = self::channel(&node);
    let listed = wait_for("a list of the next agent", LONG, || list(&channel));
    assert_eq!(listed.iter().map(|pod| name(pod)).collect::<Vec<_>>(), [first]);
    node.finish();
}

#[test]
fn without_its_gate_there_is_no_socket() {
    let node = FakeNode::start_with(json!({"featureGates": {"PodsAPI": false}}));
    assert!(!node.root().join("pods-api").exists());
    node.finish();
}
