use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use serde_json::json;

use super::*;
use crate::transport::generated::from_bytes;
use crate::transport::grpc::{CallError, Channel, Kind, ResponseStream, UnaryMethod};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

fn pod(uid: &str) -> Pod {
    let object = json!({"metadata": {"namespace": "n", "name": format!("name-{uid}"), "uid": uid}});
    Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
}

fn status(phase: &str) -> Arc<PodStatus> {
    Arc::new(PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() })
}

fn stored(uid: &str, phase: &str, is_first: bool) -> Change {
    Change::Stored { pod: pod(uid), status: status(phase), is_first }
}

/// A server for the pods of these UIDs, of which `b` has a computed status.
struct Fixture {
    root: tempfile::TempDir,
    /// To the only watch.
    changes: Sender<Change>,
    _server: Server,
}

impl Fixture {
    fn new(uids: Option<&'static [&'static str]>, bucket: Bucket) -> Fixture {
        let root = tempfile::tempdir().unwrap();
        let (changes, of_watch) = bounded(BUFFERED_EVENTS);
        let deps = Deps {
            pods: Box::new(move || Some(uids?.iter().map(|uid| pod(uid)).collect())),
            status: Box::new(|uid| (uid.as_str() == "b").then(|| status("Running"))),
            changes: Box::new(move |_| Feed::new(of_watch.clone())),
        };
        let server = Server::start(&root.path().join(SOCKET), [service(deps, bucket)]).unwrap();
        Fixture { root, changes, _server: server }
    }

    fn full(uids: Option<&'static [&'static str]>) -> Fixture {
        Fixture::new(uids, Bucket::new(Instant::now()))
    }

    fn channel(&self) -> Channel {
        Channel::new(&format!("unix://{}", self.root.path().join(SOCKET).display())).unwrap()
    }
}

fn call<Req: Default, Resp: Unpin>(
    channel: &Channel,
    method: &'static UnaryMethod<Req, Resp>,
    request: &Req,
) -> Result<Resp, CallError> {
    channel.call_with_stop(method, request, LIMIT, &StopToken::never())
}

fn list(channel: &Channel) -> Result<Vec<Vec<u8>>, CallError> {
    Ok(call(channel, &methods::pods::LIST_PODS, &pb::ListPodsRequest::default())?.pods)
}

fn get(channel: &Channel, uid: &str) -> Result<Vec<u8>, CallError> {
    let request = pb::GetPodRequest { pod_uid: uid.to_owned(), ..Default::default() };
    Ok(call(channel, &methods::pods::GET_POD, &request)?.pod)
}

fn open(channel: &Channel) -> ResponseStream<pb::WatchPodsEvent> {
    channel.open(&methods::pods::WATCH_PODS, &pb::WatchPodsRequest::default()).unwrap()
}

fn next(watch: &mut ResponseStream<pb::WatchPodsEvent>) -> (pb::EventType, Vec<u8>) {
    let event = watch.next(&StopToken::never()).unwrap().unwrap();
    (event.type_.enum_value().unwrap(), event.pod)
}

fn shown(uid: &str, phase: &str) -> Vec<u8> {
    encode::pod(&compose::with_status(&pod(uid), Some(&status(phase)))).unwrap()
}

fn ended(uid: &str) -> Vec<u8> {
    encode::pod(&compose::identity(&PodUid::from(uid), "n", &format!("name-{uid}"))).unwrap()
}

fn failure(error: CallError) -> (Kind, String) {
    (error.kind, error.message)
}

#[test]
fn nothing_is_shown_before_every_source_has_delivered() {
    let fixture = Fixture::full(None);
    let channel = fixture.channel();
    let initializing = (Kind::FailedPrecondition, "Kubelet is initializing".to_owned());
    assert_eq!(failure(list(&channel).unwrap_err()), initializing);
    assert_eq!(failure(get(&channel, "a").unwrap_err()), initializing);
    assert_eq!(failure(open(&channel).next(&StopToken::never()).unwrap_err()), initializing);
}

#[test]
fn pods_are_listed_by_uid_with_their_newest_statuses() {
    let fixture = Fixture::full(Some(&["b", "a"]));
    let channel = fixture.channel();
    let (first, second) = (shown("a", "Pending"), shown("b", "Running"));
    assert_eq!(list(&channel).unwrap(), [first.clone(), second.clone()]);
    assert_eq!(get(&channel, "b").unwrap(), second);
    let missing = (Kind::NotFound, "pod with UID c not found".to_owned());
    assert_eq!(failure(get(&channel, "c").unwrap_err()), missing);
}

#[test]
fn only_requests_for_pods_have_a_rate() {
    // Full again in an hour.
    let fixture = Fixture::new(Some(&["a"]), Bucket::new(Instant::now() + Duration::from_secs(3_600)));
    let channel = fixture.channel();
    let limited = (Kind::ResourceExhausted, "rejected by rate limit".to_owned());
    assert_eq!(failure(list(&channel).unwrap_err()), limited);
    assert_eq!(failure(get(&channel, "a").unwrap_err()), limited);
    assert_eq!(next(&mut open(&channel)).0, pb::EventType::ADDED);
}

#[test]
fn a_watch_has_all_pods_and_then_every_change() {
    let fixture = Fixture::full(Some(&["b", "a"]));
    let channel = fixture.channel();
    let mut watch = open(&channel);
    assert_eq!(next(&mut watch), (pb::EventType::ADDED, shown("a", "Pending")));
    assert_eq!(next(&mut watch), (pb::EventType::ADDED, shown("b", "Running")));
    assert_eq!(next(&mut watch), (pb::EventType::INITIAL_SYNC_COMPLETE, Vec::new()));
    for change in [
        stored("c", "Pending", true),
        stored("a", "Running", false),
        Change::Ended(pod("a")),
        // Known already.
        stored("a", "Failed", false),
        Change::Ended(pod("a")),
        Change::Forgotten(PodUid::from("a")),
        Change::Forgotten(PodUid::from("unknown")),
        // Refused, so it has not run and not ended.
        Change::Forgotten(PodUid::from("b")),
    ] {
        fixture.changes.send(change).unwrap();
    }
    assert_eq!(next(&mut watch), (pb::EventType::ADDED, shown("c", "Pending")));
    assert_eq!(next(&mut watch), (pb::EventType::MODIFIED, shown("a", "Running")));
    assert_eq!(next(&mut watch), (pb::EventType::DELETED, ended("a")));
    assert_eq!(next(&mut watch), (pb::EventType::DELETED, ended("b")));
}

#[test]
fn a_watch_without_room_for_changes_ends() {
    let fixture = Fixture::full(Some(&[]));
    let Fixture { changes, _server, root } = fixture;
    let channel = Channel::new(&format!("unix://{}", root.path().join(SOCKET).display())).unwrap();
    let mut watch = open(&channel);
    assert_eq!(next(&mut watch).0, pb::EventType::INITIAL_SYNC_COMPLETE);
    changes.send(stored("a", "Running", true)).unwrap();
    drop(changes);
    // The end can overtake the last change.
    let error = loop {
        match watch.next(&StopToken::never()) {
            Ok(event) => assert_eq!(event.unwrap().pod, shown("a", "Running")),
            Err(error) => break error,
        }
    };
    assert_eq!(failure(error), (Kind::ResourceExhausted, SLOW.to_owned()));
}

#[test]
fn watches_have_a_limit_and_lists_continue() {
    let fixture = Fixture::full(Some(&[]));
    let channel = fixture.channel();
    let mut watches: Vec<_> = (0..MAX_WATCHES).map(|_| open(&channel)).collect();
    for watch in &mut watches {
        assert_eq!(next(watch).0, pb::EventType::INITIAL_SYNC_COMPLETE);
    }
    let error = open(&channel).next(&StopToken::never()).unwrap_err();
    assert_eq!(failure(error), (Kind::ResourceExhausted, "16 watches are open".to_owned()));
    assert_eq!(list(&channel).unwrap(), Vec::<Vec<u8>>::new());
}

#[test]
fn the_messages_have_the_numbers_of_upstream() {
    let request: pb::GetPodRequest = from_bytes(b"\x0a\x01u").unwrap();
    assert_eq!(request.pod_uid, "u");
    let event: pb::WatchPodsEvent = from_bytes(b"\x08\x02\x12\x01p").unwrap();
    assert_eq!((event.type_.enum_value(), event.pod), (Ok(pb::EventType::MODIFIED), b"p".to_vec()));
}
