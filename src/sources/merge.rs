//! Merges all sources into one ordered stream of small typed updates (Go:
//! pkg/kubelet/config/config.go). Pure: sets in, updates out, time as an argument.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use jiff::tz::TimeZone;
use jiff::{Timestamp, fmt::strtime};

use super::set::Incarnations;
use crate::model::api;
use crate::model::ids::{FullName, PodUid};
use crate::model::pod::{CONFIG_MIRROR, CONFIG_SEEN, CONFIG_SOURCE, Pod, SourceName};

/// The kind of an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Op {
    /// The pods were removed from the source.
    Remove,
    /// The pods' UIDs are new to the source.
    Add,
    /// The pods' specification, labels or annotations changed.
    Update,
    /// The pods changed as for `Update`, and are being deleted.
    Delete,
    /// Only the pods' status changed at the source.
    Reconcile,
}

/// Pods of one source with the same kind of change.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Update {
    pub op: Op,
    pub source: SourceName,
    /// The pods after the change. Empty only in the `Add` of an empty first set.
    pub pods: Vec<Pod>,
}

/// The current pods of one source.
#[derive(Debug, Default)]
pub(crate) struct PodSet {
    pub pods: Vec<Pod>,
    pub incarnations: Incarnations,
    /// See [`SourceSet::is_stored`](super::SourceSet::is_stored).
    pub is_stored: bool,
}

impl From<Vec<Pod>> for PodSet {
    /// Pods of a source without incarnations.
    fn from(pods: Vec<Pod>) -> Self {
        PodSet { pods, ..PodSet::default() }
    }
}

/// A pod that was omitted from its set.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rejected {
    pub pod: Pod,
    /// The text of its `FailedValidation` event.
    pub message: String,
}

/// The last delivered pods of every source.
#[derive(Debug)]
pub(crate) struct Merge {
    sources: BTreeMap<SourceName, DeliveredSet>,
    rejected: Vec<Rejected>,
    zone: TimeZone,
}

#[derive(Debug, Default)]
struct DeliveredSet {
    pods: BTreeMap<PodUid, Pod>,
    incarnations: Incarnations,
    /// Rejections that were reported, so that a lasting duplicate is one event.
    reported: HashSet<(FullName, PodUid)>,
}

impl Default for Merge {
    /// An empty merge: no source has delivered. `zone` is the node's, in which `config.seen` is written.
    fn default() -> Self {
        Merge::new(TimeZone::system())
    }
}

impl Merge {
    /// No source has delivered yet.
    #[must_use]
    pub(crate) fn new(zone: TimeZone) -> Self {
        Merge { sources: BTreeMap::new(), rejected: Vec::new(), zone }
    }

    /// Returns the duplicates found since the last call.
    pub(crate) fn take_rejected(&mut self) -> Vec<Rejected> {
        std::mem::take(&mut self.rejected)
    }

    /// Compares the complete set of a source with its previous one. The updates come in the
    /// order remove, add, update, delete, (empty add,) reconcile, each at most once. Another
    /// incarnation of a pod is both removed and added.
    pub(crate) fn apply(
        &mut self,
        source: SourceName,
        set: impl Into<PodSet>,
        now: Timestamp,
    ) -> Vec<Update> {
        let PodSet { pods, incarnations, .. } = set.into();
        let first = !self.sources.contains_key(&source);
        let seen_text = seen_text(now, &self.zone);
        let delivered = self.sources.entry(source).or_default();
        let pods = distinct(source, pods, delivered, &mut self.rejected);

        let mut lists: BTreeMap<Op, Vec<Pod>> = BTreeMap::new();
        let present: BTreeSet<PodUid> = pods.iter().map(|pod| pod.uid().clone()).collect();
        let before = std::mem::replace(&mut delivered.incarnations, incarnations);
        let stays =
            |uid: &&PodUid| present.contains(*uid) && before.get(*uid) == delivered.incarnations.get(*uid);
        let gone: Vec<PodUid> = delivered.pods.keys().filter(|uid| !stays(uid)).cloned().collect();
        for pod in gone.iter().filter_map(|uid| delivered.pods.remove(uid)) {
            lists.entry(Op::Remove).or_default().push(pod);
        }
        for pod in pods {
            let (op, pod) = match delivered.pods.get(pod.uid()) {
                None if source == SourceName::File && is_marked(&pod) => (Op::Add, pod),
                None => (Op::Add, marked(pod, source, &seen_text)),
                Some(old) => match compare(old, &pod, source) {
                    Some(change) => change,
                    None => continue,
                },
            };
            delivered.pods.insert(pod.uid().clone(), pod.clone());
            lists.entry(op).or_default().push(pod);
        }

        let mut updates = Vec::new();
        for op in [Op::Remove, Op::Add, Op::Update, Op::Delete] {
            if let Some(pods) = lists.remove(&op) {
                updates.push(Update { op, source, pods });
            }
        }
        // An update must show that the source has delivered.
        if first && updates.is_empty() {
            updates.push(Update { op: Op::Add, source, pods: Vec::new() });
        }
        if let Some(pods) = lists.remove(&Op::Reconcile) {
            updates.push(Update { op: Op::Reconcile, source, pods });
        }
        updates
    }
}

/// Drops every pod whose full name, or UID, occurs earlier in the set.
fn distinct(
    source: SourceName,
    pods: Vec<Pod>,
    delivered: &mut DeliveredSet,
    rejected: &mut Vec<Rejected>,
) -> Vec<Pod> {
    let mut names: HashSet<FullName> = HashSet::new();
    let mut uids: HashSet<PodUid> = HashSet::new();
    let mut reported = HashSet::new();
    let mut unique = Vec::with_capacity(pods.len());
    for pod in pods {
        let name = pod.full_name();
        let reason = if names.contains(&name) {
            format!("duplicate pod name {:?}", pod.name())
        } else if uids.contains(pod.uid()) {
            // DIFFERS: upstream lets the later pod replace the earlier one.
            format!("duplicate UID {:?}", pod.uid().as_str())
        } else {
            names.insert(name);
            uids.insert(pod.uid().clone());
            unique.push(pod);
            continue;
        };
        let key = (name, pod.uid().clone());
        if !delivered.reported.contains(&key) && !reported.contains(&key) {
            let described = format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid());
            let message = format!(
                "Error validating pod {described} from {} due to {reason}, ignoring",
                source.as_str()
            );
            rejected.push(Rejected { pod, message });
        }
        reported.insert(key);
    }
    delivered.reported = reported;
    unique
}

/// Adds the marks to a pod that is new in its source.
fn marked(pod: Pod, source: SourceName, seen_text: &str) -> Pod {
    let mut object = pod.into_object();
    let annotations = object.metadata.annotations.get_or_insert_default();
    annotations.insert(CONFIG_SOURCE.to_owned(), source.as_str().to_owned());
    annotations.insert(CONFIG_SEEN.to_owned(), seen_text.to_owned());
    Pod::from(object)
}

fn is_marked(pod: &Pod) -> bool {
    [CONFIG_SOURCE, CONFIG_SEEN].iter().all(|key| pod.annotation(key).is_some())
}

/// The current pods of a file, with the marks that [`Merge::apply`] would add: so both share one
/// object instead of a copy each. An unchanged pod stays the same object.
pub(super) fn marked_files(before: &[Pod], pods: Vec<Pod>, now: Timestamp) -> Vec<Pod> {
    let seen_text = seen_text(now, &TimeZone::system());
    let marked_pod = |pod: Pod| {
        let same = |old: &&Pod| {
            old.uid() == pod.uid()
                && old.full_name() == pod.full_name()
                && !differ(old.object(), pod.object())
        };
        match before.iter().find(same) {
            Some(old) => old.clone(),
            None => marked(pod, SourceName::File, &seen_text),
        }
    };
    pods.into_iter().map(marked_pod).collect()
}

/// A pod without the marks, as in its manifest.
pub(super) fn unmarked(pod: &Pod) -> api::Pod {
    let mut object = pod.object().clone();
    if let Some(annotations) = &mut object.metadata.annotations {
        annotations.remove(CONFIG_SOURCE);
        annotations.remove(CONFIG_SEEN);
    }
    object
}

/// Annotations of the agent: they are not compared and stay over an update.
const LOCAL: [&str; 3] = [CONFIG_SOURCE, CONFIG_MIRROR, CONFIG_SEEN];

/// Compares the stored and the incoming object of one UID; returns the change and the result.
fn compare(old: &Pod, new: &Pod, source: SourceName) -> Option<(Op, Pod)> {
    let (before, after) = (old.object(), new.object());
    if differ(before, after) {
        let mut object = before.clone();
        object.spec.clone_from(&after.spec);
        object.status.clone_from(&after.status);
        object.metadata.labels.clone_from(&after.metadata.labels);
        object.metadata.deletion_timestamp.clone_from(&after.metadata.deletion_timestamp);
        object.metadata.deletion_grace_period_seconds = after.metadata.deletion_grace_period_seconds;
        object.metadata.generation = after.metadata.generation;
        object.metadata.resource_version.clone_from(&after.metadata.resource_version);
        let mut annotations = after.metadata.annotations.clone().unwrap_or_default();
        annotations.insert(CONFIG_SOURCE.to_owned(), source.as_str().to_owned());
        for key in LOCAL {
            if let Some(value) = old.annotation(key) {
                annotations.insert(key.to_owned(), value.to_owned());
            }
        }
        object.metadata.annotations = Some(annotations);
        let op = if after.metadata.deletion_timestamp.is_some() { Op::Delete } else { Op::Update };
        return Some((op, Pod::from(object)));
    }
    if before.status == after.status {
        return None;
    }
    let mut object = before.clone();
    object.status.clone_from(&after.status);
    object.metadata.resource_version.clone_from(&after.metadata.resource_version);
    Some((Op::Reconcile, Pod::from(object)))
}

fn differ(before: &api::Pod, after: &api::Pod) -> bool {
    let (old, new) = (&before.metadata, &after.metadata);
    before.spec != after.spec
        || old.labels.as_ref().filter(|map| !map.is_empty())
            != new.labels.as_ref().filter(|map| !map.is_empty())
        || old.deletion_timestamp != new.deletion_timestamp
        || old.deletion_grace_period_seconds != new.deletion_grace_period_seconds
        || !foreign_annotations(before).eq(foreign_annotations(after))
}

fn foreign_annotations(pod: &api::Pod) -> impl Iterator<Item = (&String, &String)> {
    pod.metadata.annotations.iter().flatten().filter(|(key, _)| !LOCAL.contains(&key.as_str()))
}

/// RFC 3339 in local time with exactly nine digits of a second.
fn seen_text(now: Timestamp, zone: &TimeZone) -> String {
    let local = now.to_zoned(zone.clone());
    let format =
        if local.offset().seconds() == 0 { "%Y-%m-%dT%H:%M:%S.%9fZ" } else { "%Y-%m-%dT%H:%M:%S.%9f%:z" };
    // The format is fixed and a zoned time has all its fields.
    strtime::format(format, &local).unwrap_or_else(|_| now.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    const FILE: SourceName = SourceName::File;
    const API: SourceName = SourceName::Api;

    fn pod(uid: &str, name: &str, rest: Value) -> Pod {
        let mut value = json!({"metadata": {"name": name, "namespace": "ns", "uid": uid},
                               "spec": {"containers": []}});
        fn lay(onto: &mut Value, over: Value) {
            match (onto, over) {
                (Value::Object(map), Value::Object(over)) => {
                    for (key, value) in over {
                        lay(map.entry(key).or_insert(Value::Null), value);
                    }
                }
                (onto, over) => *onto = over,
            }
        }
        lay(&mut value, rest);
        Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
    }

    fn plain(uid: &str) -> Pod {
        pod(uid, uid, json!({}))
    }

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn utc() -> Merge {
        Merge::new(TimeZone::UTC)
    }

    fn brief(updates: &[Update]) -> Vec<(Op, Vec<String>)> {
        let uids = |update: &Update| update.pods.iter().map(|pod| pod.uid().to_string()).collect();
        updates.iter().map(|update| (update.op, uids(update))).collect()
    }

    fn change(op: Op, uids: &[&str]) -> (Op, Vec<String>) {
        (op, uids.iter().map(|uid| (*uid).to_owned()).collect())
    }

    #[test]
    fn source_and_merge_share_unchanged_pod_objects() {
        let first = marked_files(&[], vec![plain("a"), plain("b")], timestamp(1));
        let mut merge = Merge::default();
        let added = merge.apply(FILE, first.clone(), timestamp(2)).remove(0).pods;
        assert!(std::ptr::eq(added[0].object(), first[0].object()));
        assert_eq!(added[0].annotation(CONFIG_SOURCE), Some("file"));
        let edited = pod("b", "b", json!({"spec": {"hostNetwork": true}}));
        let second = marked_files(&first, vec![plain("a"), edited], timestamp(3));
        assert!(std::ptr::eq(second[0].object(), first[0].object()), "read again, not changed");
        let updates = merge.apply(FILE, second, timestamp(3));
        assert_eq!(brief(&updates), [change(Op::Update, &["b"])]);
        let seen = |pod: &Pod| pod.annotation(CONFIG_SEEN).unwrap().to_owned();
        assert_eq!(seen(&updates[0].pods[0]), seen(&first[1]), "seen first when it was added");
        // Only files may contain the marks already, because the file source adds them.
        let forged = pod(
            "c",
            "c",
            json!({"metadata": {"annotations":
            {"kubernetes.io/config.source": "file", "kubernetes.io/config.seen": "never"}}}),
        );
        assert_ne!(seen(&marked_files(&[], vec![forged.clone()], timestamp(4))[0]), "never");
        assert_ne!(seen(&merge.apply(API, vec![forged], timestamp(4))[0].pods[0]), "never");
        assert!(unmarked(&first[0]).metadata.annotations.is_some_and(|left| left.is_empty()));
    }

    #[test]
    fn updates_are_ordered_by_kind() {
        let mut merge = utc();
        let names = ["gone", "edited", "dying", "ran", "same"];
        merge.apply(FILE, names.map(plain).to_vec(), timestamp(1));
        let next = vec![
            pod("ran", "ran", json!({"status": {"phase": "Running"}})),
            pod(
                "dying",
                "dying",
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 3}}),
            ),
            pod("edited", "edited", json!({"spec": {"hostNetwork": true}})),
            plain("same"),
            plain("new"),
        ];
        let updates = merge.apply(FILE, next.clone(), timestamp(2));
        assert_eq!(
            brief(&updates),
            [
                change(Op::Remove, &["gone"]),
                change(Op::Add, &["new"]),
                change(Op::Update, &["edited"]),
                change(Op::Delete, &["dying"]),
                change(Op::Reconcile, &["ran"]),
            ]
        );
        assert_eq!(merge.apply(FILE, next, timestamp(3)), []);
    }

    #[test]
    fn another_incarnation_is_removed_and_added() {
        let mut merge = utc();
        let set = |numbers: [u64; 2]| PodSet {
            pods: ["a", "b"].map(plain).to_vec(),
            incarnations: ["a", "b"].map(PodUid::from).into_iter().zip(numbers).collect(),
            ..PodSet::default()
        };
        merge.apply(FILE, set([1, 2]), timestamp(1));
        assert_eq!(merge.apply(FILE, set([1, 2]), timestamp(2)), []);
        let updates = merge.apply(FILE, set([1, 3]), timestamp(3));
        assert_eq!(brief(&updates), [change(Op::Remove, &["b"]), change(Op::Add, &["b"])]);
        assert!(updates[1].pods[0].annotation(CONFIG_SEEN).unwrap().ends_with(":03.000000000Z"), "a new pod");
        assert_eq!(merge.apply(FILE, set([1, 3]), timestamp(4)), []);
        // The set without it was delivered, too: it is not restarted twice.
        assert_eq!(brief(&merge.apply(FILE, vec![], timestamp(5))), [change(Op::Remove, &["a", "b"])]);
        assert_eq!(brief(&merge.apply(FILE, set([4, 5]), timestamp(6))), [change(Op::Add, &["a", "b"])]);
    }

    #[test]
    fn first_set_of_a_source_always_gives_an_update() {
        let mut merge = utc();
        assert_eq!(brief(&merge.apply(FILE, vec![], timestamp(1))), [change(Op::Add, &[])]);
        assert_eq!(merge.apply(FILE, vec![], timestamp(2)), []);
        assert_eq!(brief(&merge.apply(API, vec![plain("a")], timestamp(3))), [change(Op::Add, &["a"])]);
        // The sources are independent of each other.
        assert_eq!(brief(&merge.apply(FILE, vec![plain("a")], timestamp(4))), [change(Op::Add, &["a"])]);
        assert_eq!(merge.apply(API, vec![plain("a")], timestamp(5)), []);
    }

    #[test]
    fn pods_are_annotated_with_source_and_time_of_arrival() {
        let mut merge = utc();
        let mirror = json!({"metadata": {"annotations": {
            "kubernetes.io/config.source": "file", "kubernetes.io/config.mirror": "h",
            "kubernetes.io/config.seen": "before"}}});
        let added = merge.apply(API, vec![pod("a", "a", mirror)], timestamp(1)).remove(0).pods.remove(0);
        assert_eq!(added.annotation(CONFIG_SOURCE), Some("api"));
        assert_eq!(added.annotation(CONFIG_SEEN), Some("1970-01-01T00:00:01.000000000Z"));
        let edit = json!({"metadata": {"annotations": {"a": "b"}, "resourceVersion": "9"}});
        let updates = merge.apply(API, vec![pod("a", "a", edit)], timestamp(2));
        assert_eq!(brief(&updates), [change(Op::Update, &["a"])]);
        let edited = &updates[0].pods[0];
        assert_eq!(edited.annotation(CONFIG_SEEN), added.annotation(CONFIG_SEEN));
        assert_eq!(edited.annotation(CONFIG_MIRROR), Some("h"));
        assert_eq!(edited.annotation("a"), Some("b"));
        // The resource version shows which of two objects is newer.
        assert_eq!(edited.object().metadata.resource_version.as_deref(), Some("9"));
    }

    #[test]
    fn local_annotations_and_empty_maps_cause_no_update() {
        let mut merge = utc();
        merge.apply(FILE, vec![plain("a")], timestamp(1));
        let marked = json!({"metadata": {"labels": {}, "annotations": {"kubernetes.io/config.seen": "x"}}});
        assert_eq!(merge.apply(FILE, vec![pod("a", "a", marked)], timestamp(2)), []);
    }

    #[test]
    fn every_change_of_a_deleting_pod_is_a_delete() {
        let mut merge = utc();
        let dying = |grace: i64| {
            pod(
                "a",
                "a",
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}}),
            )
        };
        merge.apply(API, vec![plain("a")], timestamp(1));
        assert_eq!(brief(&merge.apply(API, vec![dying(30)], timestamp(2))), [change(Op::Delete, &["a"])]);
        assert_eq!(brief(&merge.apply(API, vec![dying(1)], timestamp(3))), [change(Op::Delete, &["a"])]);
        assert_eq!(merge.apply(API, vec![dying(1)], timestamp(4)), []);
        // A pod that is new and already being deleted is an addition.
        assert_eq!(brief(&utc().apply(API, vec![dying(1)], timestamp(1))), [change(Op::Add, &["a"])]);
    }

    #[test]
    fn second_pod_with_same_name_is_rejected_and_reported_once() {
        let mut merge = utc();
        let set = vec![pod("a", "web", json!({})), pod("b", "web", json!({})), pod("a", "other", json!({}))];
        assert_eq!(brief(&merge.apply(FILE, set.clone(), timestamp(1))), [change(Op::Add, &["a"])]);
        let messages: Vec<String> =
            merge.take_rejected().into_iter().map(|rejected| rejected.message).collect();
        assert_eq!(
            messages,
            [
                "Error validating pod web_ns(b) from file due to duplicate pod name \"web\", ignoring",
                "Error validating pod other_ns(a) from file due to duplicate UID \"a\", ignoring",
            ]
        );
        merge.apply(FILE, set.clone(), timestamp(2));
        assert_eq!(merge.take_rejected(), []);
        merge.apply(FILE, vec![plain("z")], timestamp(3));
        merge.apply(FILE, set, timestamp(4));
        assert_eq!(merge.take_rejected().len(), 2);
    }

    #[test]
    fn seen_annotation_is_local_time_with_nanoseconds() {
        let now = Timestamp::new(1_700_000_000, 5_000).unwrap();
        assert_eq!(seen_text(now, &TimeZone::UTC), "2023-11-14T22:13:20.000005000Z");
        let east = TimeZone::fixed(jiff::tz::offset(2));
        assert_eq!(seen_text(now, &east), "2023-11-15T00:13:20.000005000+02:00");
    }

    /// A random pod with few UIDs and names, so that collisions are frequent.
    fn any_pod() -> impl Strategy<Value = Pod> {
        (0..6_u8, 0..4_u8, 0..3_u8, 0..3_u8, any::<bool>()).prop_map(|(uid, name, label, phase, deleting)| {
            let mut rest = json!({"metadata": {"labels": {"l": label.to_string()}},
                                  "status": {"phase": phase.to_string()}});
            if deleting {
                rest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            pod(&format!("u{uid}"), &format!("n{name}"), rest)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

        /// The updates describe the set completely: no UID is missing, none is left over, and spec,
        /// labels, deletion and status are the newest.
        #[test]
        fn all_updates_give_the_set(sets in prop::collection::vec(prop::collection::vec(any_pod(), 0..8), 1..8)) {
            let mut merge = utc();
            let mut followed: BTreeMap<PodUid, Pod> = BTreeMap::new();
            for (turn, set) in sets.into_iter().enumerate() {
                let updates = merge.apply(FILE, set.clone(), timestamp(i64::try_from(turn).unwrap()));
                let ops: Vec<Op> = updates.iter().map(|update| update.op).collect();
                prop_assert!(ops.is_sorted() && ops.windows(2).all(|pair| pair[0] != pair[1]));
                for update in updates {
                    for pod in update.pods {
                        let before = match update.op {
                            Op::Remove => followed.remove(pod.uid()),
                            _ => followed.insert(pod.uid().clone(), pod.clone()),
                        };
                        prop_assert_eq!(before.is_none(), update.op == Op::Add);
                        if update.op != Op::Add {
                            let seen = before.as_ref().and_then(|before| before.annotation(CONFIG_SEEN));
                            prop_assert_eq!(seen, pod.annotation(CONFIG_SEEN));
                        }
                    }
                }
                let rejected = merge.take_rejected().len();
                prop_assert!(followed.len() + rejected <= set.len());
                let mut names = HashSet::new();
                let mut uids = HashSet::new();
                for wanted in set {
                    if names.contains(&wanted.full_name()) || uids.contains(wanted.uid()) {
                        continue;
                    }
                    names.insert(wanted.full_name());
                    uids.insert(wanted.uid().clone());
                    let found = &followed[wanted.uid()];
                    prop_assert_eq!(&found.object().metadata.labels, &wanted.object().metadata.labels);
                    prop_assert_eq!(&found.object().status, &wanted.object().status);
                    prop_assert_eq!(found.is_deleting(), wanted.is_deleting());
                }
                prop_assert_eq!(followed.len(), uids.len());
            }
        }
    }
}
