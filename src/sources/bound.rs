//! The pods that the API server has bound to this node (Go: config/apiserver.go).
//!
//! The reflector's thread `watch/pods` keeps the set; each change delivers the whole set, and the
//! newest delivery counts. While the API server is unavailable the last set stays.
//!
//! With `--offline`, the room `offline` decides whose set is delivered: that of the API server, or the
//! stored one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::set::{Deps, SourceSet};
use crate::kube::Spread;
use crate::kube::client::Client;
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::kube::watch::{self, Change, Watched};
use crate::model::api;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::offline::{Offline, ReadPods};
use crate::util::mailbox::Post;
use crate::util::threads::{OnDeath, Running};

/// The current set. By UID: when a pod is deleted and created again with the same name, the two
/// events may arrive in either order.
#[derive(Default)]
struct BoundPods(BTreeMap<String, Pod>);

impl BoundPods {
    /// Applies a change. Returns whether the set has changed.
    fn apply(&mut self, change: Change<api::Pod>) -> bool {
        let key = |pod: &api::Pod| pod.metadata.uid.clone().filter(|uid| !uid.is_empty());
        match change {
            Change::Replaced(pods) => {
                self.0 =
                    pods.into_iter().filter_map(|pod| Some((key(&pod)?, Pod::from_server(pod)))).collect();
                // Also for the first, empty set: the source has delivered.
                true
            }
            Change::Set(pod) => match key(&pod) {
                Some(uid) => {
                    self.0.insert(uid, Pod::from_server(pod));
                    true
                }
                None => false,
            },
            Change::Removed(pod) => key(&pod).is_some_and(|uid| self.0.remove(&uid).is_some()),
        }
    }

    fn pods(&self) -> Vec<Pod> {
        self.0.values().cloned().collect()
    }
}

/// The deadline of a request of a read. On a link of 64 kbit/s, ten usual pods take some seconds.
const PAGE_LIMIT: Duration = Duration::from_secs(15);
/// The time after which no request of a read begins, but the first one.
const READ_LIMIT: Duration = Duration::from_secs(30);
/// The pods of one request of a read: each may have more than a megabyte, and only a few fields count.
const READ_PAGE: &str = "10";
/// The most requests of a read.
const MAX_PAGES: usize = 250;

/// The part of a list of pods that shows which there are.
#[derive(serde::Deserialize)]
struct Shown {
    #[serde(default)]
    metadata: ShownList,
    #[serde(default)]
    items: Vec<ShownPod>,
}

#[derive(Default, serde::Deserialize)]
struct ShownList {
    /// Where the next page begins; empty after the last one.
    #[serde(default, rename = "continue")]
    next: String,
}

#[derive(serde::Deserialize)]
struct ShownPod {
    metadata: ShownMetadata,
    #[serde(default)]
    status: Option<ShownStatus>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct ShownMetadata {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    deletion_timestamp: Option<String>,
}

#[derive(serde::Deserialize)]
struct ShownStatus {
    #[serde(default)]
    phase: Option<String>,
}

impl Shown {
    /// The UIDs of the pods that are to run. One that was marked for deletion while the node was away has
    /// its object until the node confirms, and may run elsewhere already.
    fn into_run(self) -> BTreeSet<PodUid> {
        let ends = |pod: &ShownPod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed"))
        };
        self.items.into_iter().filter(|pod| !ends(pod)).map(|pod| pod.metadata.uid.into()).collect()
    }
}

/// Reads the UIDs of the pods of this node that are to run, as the API server has them now.
pub(crate) fn reader(node_name: &str, client: &Client) -> ReadPods {
    let client = client.with_limits(None, PAGE_LIMIT);
    let selector = format!("spec.nodeName={node_name}");
    Box::new(move || {
        let end = Instant::now() + READ_LIMIT;
        read_pages(end, |next| {
            let mut query = vec![("fieldSelector", selector.as_str()), ("limit", READ_PAGE)];
            query.extend(Some(("continue", next)).filter(|_| !next.is_empty()));
            query.sort_unstable();
            client.get_with(&Target::pods(), &query)
        })
    })
}

/// The pods of all pages that are to run. `None`: a page cannot be read, or the list has no end, or none before
/// this time.
fn read_pages(
    end: Instant,
    mut read: impl FnMut(&str) -> Result<Shown, ApiError>,
) -> Option<BTreeSet<PodUid>> {
    let (mut uids, mut next) = (BTreeSet::new(), String::new());
    for page in 0..MAX_PAGES {
        if page > 0 && Instant::now() >= end {
            return None;
        }
        let mut shown = read(&next).inspect_err(|error| log::debug!("{error}")).ok()?;
        next = std::mem::take(&mut shown.metadata.next);
        uids.extend(shown.into_run());
        if next.is_empty() {
            return Some(uids);
        }
    }
    None
}

/// Watches the pods whose `spec.nodeName` is this node. `offline`: decides about each set.
///
/// # Errors
/// When the kernel cannot create a thread.
pub(crate) fn spawn(
    node_name: &str,
    client: Client,
    deps: &Deps,
    offline: Option<Offline>,
) -> std::io::Result<Running> {
    let watched = Watched {
        target: Target::pods(),
        field_selector: Some(format!("spec.nodeName={node_name}")),
        label_selector: None,
        spread: Spread::PODS,
    };
    let receive = receiver(deps.post.clone(), offline);
    watch::spawn_reflector("pods", client, watched, OnDeath::Supervisor(deps.on_death.clone()), receive)
}

/// Receives the changes of the watch, and delivers sets to `post`.
fn receiver(
    post: Post<SourceName, SourceSet>,
    offline: Option<Offline>,
) -> impl FnMut(Change<api::Pod>) + Send + 'static {
    let deliver = move |pods: Vec<Pod>, is_stored: bool| {
        post.put(SourceName::Api, SourceSet { pods: Some(pods), is_stored, ..SourceSet::default() });
    };
    if let Some(offline) = &offline {
        let deliver = deliver.clone();
        offline.deliver_to(Box::new(move |pods, phase| deliver(pods, phase.uses_stored())));
    }
    let mut bound = BoundPods::default();
    move |change| {
        let is_list = matches!(change, Change::Replaced(_));
        if bound.apply(change) {
            match &offline {
                Some(offline) => offline.server_set(bound.pods(), is_list),
                None => deliver(bound.pods(), false),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::merge::{Merge, Op};
    use super::*;
    use crate::offline::{Deps as OfflineDeps, NodeFact, testing};
    use crate::util::mailbox::{Inbox, mailbox, replace};
    use crossbeam_channel::bounded;
    use serde_json::json;

    fn pod(name: &str, uid: &str) -> api::Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns", "uid": uid},
            "spec": {"containers": [{"name": "c", "image": "i"}]}
        }))
        .unwrap()
    }

    fn uids(bound: &BoundPods) -> Vec<String> {
        bound.pods().iter().map(|pod| pod.uid().to_string()).collect()
    }

    #[test]
    fn watch_changes_update_the_set_by_uid() {
        let mut bound = BoundPods::default();
        assert!(bound.apply(Change::Replaced(vec![])), "an empty set is a change, too");
        assert!(bound.apply(Change::Set(pod("web", "1"))));
        assert!(bound.apply(Change::Set(pod("web", "2"))));
        assert!(bound.apply(Change::Removed(pod("web", "1"))), "created again before the deletion arrived");
        assert_eq!(uids(&bound), ["2"]);
        assert!(!bound.apply(Change::Removed(pod("web", "1"))));
        assert!(!bound.apply(Change::Set(pod("web", ""))), "an object without a UID is no pod");
        assert!(bound.apply(Change::Replaced(vec![pod("a", "3"), pod("b", "4")])));
        assert_eq!(uids(&bound), ["3", "4"]);
    }

    #[test]
    fn read_pods_that_end_do_not_start_again_after_a_stop() {
        let shown: Shown = serde_json::from_value(json!({"kind": "PodList", "metadata": {}, "items": [
            {"metadata": {"uid": "runs"}, "status": {"phase": "Running"}},
            {"metadata": {"uid": "new", "deletionTimestamp": null}},
            {"metadata": {"uid": "deleted", "deletionTimestamp": "2026-01-01T00:00:00Z"},
                "status": {"phase": "Running"}},
            {"metadata": {"uid": "failed"}, "status": {"phase": "Failed"}},
            {"metadata": {"uid": "done"}, "status": {"phase": "Succeeded"}}
        ]}))
        .unwrap();
        assert_eq!(shown.into_run(), ["new", "runs"].map(PodUid::from).into());
    }

    #[test]
    fn pods_are_read_in_pages_and_an_incomplete_list_shows_none() {
        let page = |uid: &str, next: &str| {
            let list = json!({"metadata": {"continue": next}, "items": [{"metadata": {"uid": uid}}]});
            serde_json::from_value::<Shown>(list).unwrap()
        };
        let read = |next: &str| match next {
            "" => Ok(page("a", "1")),
            "1" => Ok(page("b", "")),
            _ => Err(ApiError::no_server()),
        };
        let end = Instant::now() + Duration::from_secs(3600);
        assert_eq!(read_pages(end, read), Some(["a", "b"].map(PodUid::from).into()));
        assert_eq!(read_pages(Instant::now(), read), None, "it takes too long");
        let mut pages = 0;
        let endless = |_: &str| {
            pages += 1;
            Ok(page("a", "1"))
        };
        assert_eq!(read_pages(end, endless), None);
        assert_eq!(pages, MAX_PAGES);
        let breaks =
            |next: &str| if next.is_empty() { Ok(page("a", "1")) } else { Err(ApiError::no_server()) };
        assert_eq!(read_pages(end, breaks), None);
        let mut empty = serde_json::from_value::<Shown>(json!({"items": []})).ok();
        assert_eq!(
            read_pages(Instant::now(), |_| empty.take().ok_or_else(ApiError::no_server)),
            Some(BTreeSet::new())
        );
    }

    /// Else its user decides that `--offline-stop-after` does not hold for it while the agent starts.
    #[test]
    fn annotation_of_a_user_makes_no_static_pod_of_a_bound_one() {
        let forged = || {
            let mut pod = pod("a", "1");
            let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
            pod.metadata.annotations = Some([source].into());
            pod
        };
        let mut bound = BoundPods::default();
        bound.apply(Change::Replaced(vec![forged()]));
        assert!(!bound.pods()[0].is_static());
        bound.apply(Change::Set(forged()));
        assert!(!bound.pods()[0].is_static());
    }

    /// Waits for the next set.
    fn next_set(inbox: &Inbox<SourceName, SourceSet>) -> SourceSet {
        inbox.bell().recv_timeout(Duration::from_secs(60)).unwrap();
        inbox.drain().remove(&SourceName::Api).unwrap()
    }

    /// Waits for the next set of the API server.
    fn delivered(inbox: &Inbox<SourceName, SourceSet>) -> Vec<Pod> {
        let set = next_set(inbox);
        assert!(!set.is_stored);
        set.pods.unwrap()
    }

    #[test]
    fn without_a_store_each_set_is_delivered() {
        let (post, inbox) = mailbox(replace);
        let mut receive = receiver(post, None);
        receive(Change::Replaced(vec![pod("a", "1")]));
        assert_eq!(delivered(&inbox).len(), 1);
        receive(Change::Removed(pod("a", "1")));
        assert!(delivered(&inbox).is_empty());
    }

    #[test]
    fn with_a_store_nothing_is_delivered_before_the_decision_and_everything_after_it() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let (post, inbox) = mailbox(replace);
        let mut receive = receiver(post, Some(offline.clone()));
        // The thread reads the Node object, and has no result yet.
        let (begun, begin) = bounded(1);
        let (result, results) = bounded(1);
        let read = move || {
            let _ = begun.send(());
            results.recv().unwrap_or(NodeFact::Unknown)
        };
        let deps = OfflineDeps { read_node: Box::new(read), ..testing::deps() };
        let running = offline.spawn(deps, OnDeath::Unsupervised).unwrap();
        receive(Change::Replaced(Vec::new()));
        begin.recv_timeout(Duration::from_secs(60)).unwrap();
        receive(Change::Set(pod("x", "x")));
        assert!(inbox.is_empty(), "an empty list stops nothing");
        result.send(NodeFact::Absent).unwrap();
        let stored = next_set(&inbox);
        assert!(stored.is_stored, "pods may run that are not stored");
        assert_eq!(testing::uids(&stored.pods.unwrap()), ["a"]);
        // Changes of a server that does not count.
        receive(Change::Set(pod("y", "y")));
        assert!(inbox.is_empty());
        // It has its data again.
        receive(Change::Replaced(vec![pod("a", "a"), pod("b", "b")]));
        assert_eq!(testing::uids(&delivered(&inbox)), ["a", "b"]);
        receive(Change::Removed(pod("b", "b")));
        assert_eq!(testing::uids(&delivered(&inbox)), ["a"]);
        drop(result);
        drop(running);
    }

    #[test]
    fn pod_that_the_server_shows_as_it_was_stored_is_not_updated() {
        let shown: api::Pod = serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "n", "uid": "a", "resourceVersion": "7", "generation": 1,
                "creationTimestamp": "2026-01-02T03:04:05Z", "labels": {"app": "web"},
                "annotations": {"example.org/a": "b"}, "managedFields": [{"manager": "m"}]},
            "spec": {"nodeName": "node1", "enableServiceLinks": true, "tolerations": [
                    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}],
                "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "0.5",
                    "memory": "1.5Gi"}}, "env": [{"name": "A", "valueFrom": {"fieldRef": {
                    "fieldPath": "status.podIP"}}}], "readinessProbe": {"tcpSocket": {"port": 80}}}]},
            "status": {"phase": "Running"}
        }))
        .unwrap();
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &[]);
        let running = offline.spawn(testing::deps(), OnDeath::Unsupervised).unwrap();
        offline.server_set(vec![Pod::from(shown.clone())], true);
        // What waits is written.
        drop(running);
        let now = jiff::Timestamp::UNIX_EPOCH;
        let mut merge = Merge::default();
        let stored = testing::known(root.path());
        assert_eq!((stored.len(), stored[0].object().metadata.resource_version.as_deref()), (1, None));
        assert_eq!(merge.apply(SourceName::Api, stored, now)[0].op, Op::Add);
        let updates = merge.apply(SourceName::Api, vec![Pod::from(shown)], now);
        assert_eq!(updates.iter().map(|update| update.op).collect::<Vec<_>>(), [Op::Reconcile]);
    }
}
