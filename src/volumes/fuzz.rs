//! Hostile objects and pods in volumes of files.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use jiff::Timestamp;
use serde_json::Value;

use super::atomic_writer::{self, MAX_DEPTH, MAX_ENTRIES, Payload};
use super::file_owner::FileOwners;
use super::files::Nested;
use super::{config_map, downward_api, projected, secret};
use crate::kube::objects::{Key, Kind, Object, Objects};
use crate::kube::{PodDependencies, PodObjects};
use crate::model::event::EventSink;
use crate::model::fields::NodeAllocatable;
use crate::model::pod::Pod;
use crate::model::pod_size::{self, MAX_CONTAINER_ITEMS, MAX_VOLUMES};
use crate::model::{api, typed};
use crate::util::fuzzing::{Budget, Named, Target, repeated};
use crate::util::stop::StopToken;
use crate::util::threads::Stack;
use crate::util::tree;

/// API servers store objects of up to 1.5 MiB; JSON is larger than what they count.
const OBJECT_BYTES: usize = 3 << 20;
const LAST_VOLUME: usize = MAX_VOLUMES - 1;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "volumes/payload",
            // Pod workers collect the files of a volume.
            stack: Stack::Small,
            max_bytes: OBJECT_BYTES,
            // The files have 32 MiB at most, and each may be held twice for a moment.
            budget: Budget { base_kib: 96 * 1024, per_byte: 100, ..Budget::LINEAR },
            worst: hostile_volumes,
            seeds: &[
                br#"{"data":{"a":"1","b.c":"2"},"pod":{"metadata":{"name":"p","namespace":"n","uid":"u","labels":{"l":"\u0007x"}},"spec":{"containers":[{"name":"c","resources":{"limits":{"cpu":"1"}}}],"volumes":[{"name":"v","configMap":{"name":"m","items":[{"key":"a","path":"x/y","mode":256}]}},{"name":"w","secret":{"secretName":"m"}},{"name":"x","projected":{"defaultMode":256,"sources":[{"configMap":{"name":"m"}},{"secret":{"name":"m","items":[{"key":"b.c","path":"../z"}]}},{"serviceAccountToken":{"path":"token"}},{"downwardAPI":{"items":[{"path":"l","fieldRef":{"fieldPath":"metadata.labels"}},{"path":"c","resourceFieldRef":{"containerName":"c","resource":"limits.cpu"}}]}}]}},{"name":"y","downwardAPI":{"items":[{"path":"a","fieldRef":{"fieldPath":"metadata.annotations['x']"}}]}}]}}}"#,
            ],
            run: |bytes| payloads(bytes, &mut |_| {}),
        },
        Target {
            name: "volumes/write",
            stack: Stack::Small,
            max_bytes: OBJECT_BYTES,
            // Up to 10,000 files are made, compared and removed.
            budget: Budget { base: std::time::Duration::from_secs(30), per_byte: 100, ..Budget::LINEAR },
            worst: |max| {
                let entries = |path: &dyn Fn(usize) -> String, max: usize| {
                    object(&|i| format!(r#""{i}":"1""#), &|i| format!(r#"{{"key":"1","path":"{}"}}"#, path(i)), max)
                };
                vec![
                    ("as many keys as there may be", object(&|i| format!(r#""k{i}":"""#), &|_| String::new(), MAX_ENTRIES * 10)),
                    ("deep paths", entries(&|i| format!("{i}{}", "/a".repeat(MAX_DEPTH - 1)), 20_000)),
                    ("directories of one file", entries(&|i| format!("{i}/a"), 100_000)),
                    ("long names", entries(&|i| format!("{i:0255}"), 1 << 20)),
                    ("one large file", object(&|_| format!(r#""k":"{}""#, "x".repeat(1 << 20)), &|_| String::new(), max)),
                ]
            },
            seeds: &[
                br#"{"data":{"a":"1","b":"2"},"pod":{"metadata":{"name":"p","namespace":"n","uid":"u"},"spec":{"containers":[],"volumes":[{"name":"v","configMap":{"name":"m","items":[{"key":"a","path":"x/y","mode":256},{"key":"b","path":"x/z"}]}},{"name":"w","secret":{"secretName":"m"}}]}}}"#,
            ],
            run: written,
        },
        Target {
            name: "volumes/nested_mounts",
            stack: Stack::Small,
            max_bytes: OBJECT_BYTES,
            budget: Budget { per_mib: std::time::Duration::from_secs(20), per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                // Each container has as many mounts as it may have.
                let mounts = |path: &dyn Fn(usize) -> String| {
                    repeated(
                        r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","volumeMounts":[{"name":"v","mountPath":"/"}"#,
                        |i| {
                            let next = r#"]},{"name":"c","volumeMounts":[{"name":"v","mountPath":"/"}"#;
                            let next = if i % (MAX_CONTAINER_ITEMS - 1) == 0 { next } else { "" };
                            format!(r#"{next},{{"name":"v{}","mountPath":"{}"}}"#, i % 10, path(i))
                        },
                        "]}]}}",
                        max,
                    )
                };
                vec![
                    ("many", mounts(&|i| format!("/{i}"))),
                    ("below each other", mounts(&|i| "/a".repeat(i % 2000))),
                    ("deep", mounts(&|_| "/a".repeat(100_000))),
                    ("siblings", mounts(&|i| format!("/a/{i}/b"))),
                    ("slashes", mounts(&|_| "/".repeat(100_000))),
                    ("that climb", mounts(&|_| "/a/..".repeat(1000))),
                ]
            },
            seeds: &[
                br#"{"metadata":{"name":"p"},"spec":{"initContainers":[{"name":"i","volumeMounts":[{"name":"v","mountPath":"/a/./b//c"}]}],"containers":[{"name":"c","volumeMounts":[{"name":"v","mountPath":"/a"},{"name":"w","mountPath":"/a/b"},{"name":"v","mountPath":"/a/b/../c"}]}]}}"#,
            ],
            run: |bytes| {
                let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
                let Some(pod) = admitted(&value) else { return };
                let nested = Nested::from_pod(&pod);
                let _ = (nested.of_volume("v"), nested.of_volume("w"));
            },
        },
    ]
}

/// An object with these entries of its `data`, and a pod with volumes of all keys and of
/// these items. Empty: no more.
fn object(entry: &dyn Fn(usize) -> String, item: &dyn Fn(usize) -> String, max: usize) -> Vec<u8> {
    let all = |piece: &dyn Fn(usize) -> String, max: usize| {
        let mut text = piece(0);
        for i in 1.. {
            let next = piece(i);
            if next.is_empty() || text.len() + next.len() + 1 > max {
                break;
            }
            text.push(',');
            text += &next;
        }
        text
    };
    let (data, items) = (all(entry, max / 4), all(item, max / 4));
    format!(
        r#"{{"data":{{{data}}},"pod":{{"metadata":{{"name":"p","namespace":"n","uid":"u"}},"spec":{{"containers":[],"volumes":[
        {{"name":"a","configMap":{{"name":"m"}}}},{{"name":"b","configMap":{{"name":"m","items":[{items}]}}}},
        {{"name":"c","projected":{{"sources":[{{"secret":{{"name":"m"}}}},{{"configMap":{{"name":"m"}}}},{{"secret":{{"name":"m","items":[{items}]}}}}]}}}}]}}}}}}"#
    )
    .into_bytes()
}

fn hostile_volumes(max: usize) -> Vec<Named> {
    let keys = |key: &dyn Fn(usize) -> String| {
        object(&|i| format!(r#""{}":"""#, key(i)), &|_| String::new(), max * 2)
    };
    let items = |path: &dyn Fn(usize) -> String| {
        object(&|_| r#""k":"x""#.to_owned(), &|i| format!(r#"{{"key":"k","path":"{}"}}"#, path(i)), max)
    };
    let pod = |before: &str, piece: &dyn Fn(usize) -> String, end: &str| {
        let before = format!(
            r#"{{"data":{{"k":"{}"}},"pod":{{"metadata":{{"name":"p","namespace":"n","uid":"u""#,
            "x".repeat((1 << 20) - 1)
        ) + before;
        repeated(&before, piece, end, max)
    };
    let volume = r#"},"spec":{"containers":[{"name":"c"}],"volumes":["#;
    vec![
        ("short keys", keys(&|i| format!("{i:x}"))),
        ("long keys", keys(&|i| format!("{i:0253}"))),
        ("sibling paths", items(&|i| i.to_string())),
        ("paths in one directory", items(&|i| format!("a/{i}"))),
        ("paths below each other", items(&|i| "a/".repeat(i % 128) + "b")),
        ("one path", items(&|_| "a".to_owned())),
        (
            "a path and what is below it",
            items(&|i| if i % 2 == 0 { "a".to_owned() } else { format!("a/{i}") }),
        ),
        ("deep paths", items(&|i| "a/".repeat(127) + &i.to_string())),
        ("long paths", items(&|_| "/a".repeat(100_000))),
        ("slashes", items(&|i| "a".to_owned() + &"/".repeat(4000) + &i.to_string())),
        (
            "a large value in each of many files",
            pod(
                &format!(
                    r#"{volume}{{"name":"v","configMap":{{"name":"m","items":[{{"key":"k","path":"p"}}"#
                ),
                &|i| format!(r#",{{"key":"k","path":"p{i}"}}"#),
                "]}}]}}}",
            ),
        ),
        (
            "a large value in one file, again and again",
            pod(
                &format!(
                    r#"{volume}{{"name":"v","configMap":{{"name":"m","items":[{{"key":"k","path":"p"}}"#
                ),
                &|_| r#",{"key":"k","path":"p"}"#.to_owned(),
                "]}}]}}}",
            ),
        ),
        (
            "the object in each source",
            pod(
                &format!(r#"{volume}{{"name":"v","projected":{{"sources":[{{}}"#),
                &|_| r#",{"configMap":{"name":"m"}}"#.to_owned(),
                "]}}]}}}",
            ),
        ),
        (
            "sources that are missing",
            pod(
                &format!(r#"{volume}{{"name":"v","projected":{{"sources":[{{}}"#),
                &|i| format!(r#",{{"configMap":{{"name":"m","items":[{{"key":"{i}","path":"p"}}]}}}}"#),
                "]}}]}}}",
            ),
        ),
        (
            "fields that are missing",
            pod(
                &format!(
                    r#"{volume}{{"name":"v","downwardAPI":{{"items":[{{"path":"p","fieldRef":{{"fieldPath":"metadata.name"}}}}"#
                ),
                &|i| format!(r#",{{"path":"p","fieldRef":{{"fieldPath":"x{i}"}}}}"#),
                "]}}]}}}",
            ),
        ),
        (
            "all labels in each file",
            pod(
                &format!(
                    r#","labels":{{"l":"{}"}}{volume}{{"name":"v","downwardAPI":{{"items":[{{"path":"p","fieldRef":{{"fieldPath":"metadata.labels"}}}}"#,
                    "\\u0007".repeat(10_000)
                ),
                &|i| format!(r#",{{"path":"p{i}","fieldRef":{{"fieldPath":"metadata.labels"}}}}"#),
                "]}}]}}}",
            ),
        ),
        (
            "labels",
            pod(
                r#","labels":{"l":"x""#,
                &|i| format!(r#","{i}":"\u0007""#),
                &format!(
                    r#"}}{volume}{{"name":"v","downwardAPI":{{"items":[{{"path":"p","fieldRef":{{"fieldPath":"metadata.labels"}}}}]}}}}]}}}}}}"#
                ),
            ),
        ),
        (
            "volumes of the object",
            pod(
                &format!(r#"{volume}{{"name":"v"}}"#),
                // Spaces that do not fit any more: an end.
                &|i| match i {
                    LAST_VOLUME.. => " ".repeat(max),
                    _ => format!(
                        r#",{{"name":"v{i}","configMap":{{"name":"m","items":[{{"key":"none","path":"p"}}]}}}}"#
                    ),
                },
                "]}}}",
            ),
        ),
    ]
}

/// Calls `each` with the files of each volume of the pod: `{"data": {key: text}, "pod": {}}`,
/// with the data in a ConfigMap and a Secret `m`.
fn payloads(bytes: &[u8], each: &mut dyn FnMut(&Payload)) {
    let Ok(Value::Object(mut value)) = serde_json::from_slice::<Value>(bytes) else { return };
    let data = value.remove("data").unwrap_or_default();
    let Ok(data) = serde_json::from_value::<BTreeMap<String, String>>(data) else { return };
    let data = data.into_iter().map(|(key, text)| (key, text.into_bytes())).collect();
    let object = Object { data, ..Object::default() };
    let Some(pod) = admitted(value.get("pod").unwrap_or(&Value::Null)) else { return };
    drop(value);
    let (map, keys) = (Key::new(Kind::ConfigMap, "n", "m"), Key::new(Kind::Secret, "n", "m"));
    let objects = Objects::fixed(vec![(map, object.clone()), (keys, object)]);
    let api = PodDependencies::for_tests(objects);
    // Objects that were never read are not waited for.
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    let allocatable = NodeAllocatable::default();
    let known = PodObjects::Api(&api.objects);
    let (events, _queue) = EventSink::new();
    let all = projected::ProjectionInputs {
        objects: Some(known),
        api: Some(&api),
        allocatable: &allocatable,
        events: &events,
        has_user_fields: true,
    };
    for volume in pod.spec().volumes.iter().flatten() {
        let payload = if let Some(source) = &volume.config_map {
            config_map::payload(known, &pod, source, FileOwners::new(true, source.default_user), &stop)
        } else if let Some(source) = &volume.secret {
            secret::payload(known, &pod, source, FileOwners::new(true, source.default_user), &stop)
        } else if let Some(source) = &volume.downward_api {
            let defaults = (source.default_mode, FileOwners::new(true, source.default_user));
            downward_api::payload(&pod, source.items.as_deref(), defaults, &allocatable)
        } else if let Some(source) = &volume.projected {
            projected::payload(&pod, &volume.name, source, &all, &stop)
        } else {
            continue;
        };
        match payload {
            Ok(payload) => each(&payload),
            Err(error) => drop(error.to_string()),
        }
    }
}

/// The pod, if it is not refused for its size.
fn admitted(value: &Value) -> Option<Pod> {
    let pod = Pod::from(typed::decode::<api::Pod>(value).ok()?);
    pod_size::excess(pod.spec()).is_none().then_some(pod)
}

/// Writes the volumes of the pod, each at the path of the previous one.
fn written(bytes: &[u8]) {
    let root = tempfile::tempdir().unwrap();
    let dir = tree::open(root.path()).unwrap();
    payloads(bytes, &mut |payload| {
        for _ in 0..2 {
            let now = Timestamp::now();
            let _ = atomic_writer::write(dir.as_fd(), payload, now, &|| Ok(()), &StopToken::never());
        }
    });
}
