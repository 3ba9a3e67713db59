use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::model::ids::PodUid;
use crate::sources::decode::{self, Lists};
use crate::sources::defaults;
use crate::sources::identity::{self, Origin};
use crate::sources::pods_at_start::PodsAtStart;

fn root() -> std::path::PathBuf {
    Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).to_owned()
}

fn manifest(name: &str) -> Vec<u8> {
    let places = ["tests/golden/data/manifests", "src/sources/fingerprint/manifests"];
    let found = places.iter().find_map(|place| std::fs::read(root().join(place).join(name)).ok());
    found.unwrap_or_else(|| panic!("no {name}"))
}

/// The UIDs of a manifest: that of the newest release if none is known, else the known one.
fn uid(name: &str, known: &PodsAtStart) -> String {
    let decoding = decode::decode(&manifest(name), Lists::Refused).unwrap();
    let written = decoding.pods[0].pod.as_ref().unwrap();
    let mut given = written.clone();
    defaults::set_defaults(&mut given);
    let origin = Origin::File(format!("/etc/kubernetes/manifests/{name}"));
    identity::uid(written, &given, "node-1", &origin, known).text
}

/// Pods of which only the directories are left.
fn with_directories(uids: &[&str]) -> PodsAtStart {
    let root = tempfile::tempdir().unwrap();
    for uid in uids {
        std::fs::create_dir(root.path().join(uid)).unwrap();
    }
    PodsAtStart::find(root.path(), [])
}

fn text(release: &Release, spec: Value) -> Result<String, NoFingerprint> {
    let written: api::Pod = serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap();
    let mut given = written.clone();
    defaults::set_defaults(&mut given);
    let mut out = String::new();
    write(release, &written, &given, &mut out)?;
    Ok(out)
}

/// Each line of `uids.txt` has a manifest and its UIDs by the Go kubelets 1.37.2, 1.36.3, 1.35.0 and
/// 1.34.0.
fn vectors() -> Vec<(&'static str, Vec<&'static str>)> {
    let line = |line: &'static str| {
        let mut words = line.split(' ');
        (words.next().unwrap(), words.collect::<Vec<_>>())
    };
    include_str!("uids.txt").lines().map(line).collect()
}

#[test]
fn static_pod_uids_equal_those_of_go_kubelets() {
    let vectors = vectors();
    let mut wrong = Vec::new();
    for (name, uids) in &vectors {
        assert_eq!(uids.len(), 4, "{name}");
        if uid(name, &PodsAtStart::default()) != uids[0] {
            wrong.push(format!("{name} 1.37"));
        }
        for (release, expected) in ["1.37", "1.36", "1.35", "1.34"].iter().zip(uids) {
            if uid(name, &with_directories(&[*expected])) != **expected {
                wrong.push(format!("{name} {release}"));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new(), "of {}", vectors.len());
    assert!(vectors.len() >= 51, "{}", vectors.len());
}

/// The Go kubelet 1.34.0 with the gate `ImageVolume`, without which it does not run such pods.
#[test]
fn pods_with_volumes_of_images_are_found_if_their_gate_was_on() {
    for (name, expected) in [
        ("wide.yaml", "8f5b91a9092889823cf16a6e3898191d"),
        ("whole.yaml", "aa96108b5dbe7976b9697b603a0d018b"),
    ] {
        assert_eq!(uid(name, &with_directories(&[expected])), expected, "{name}");
    }
}

#[test]
fn of_two_pods_of_a_manifest_the_one_that_was_to_run_is_continued() {
    let vectors = vectors();
    let (name, uids) = &vectors[0];
    let other = "0".repeat(32);
    assert_eq!(uid(name, &with_directories(&[other.as_str()])), uids[0], "another manifest's pod");
    assert_eq!(uid(name, &with_directories(&uids[1..])), uids[1], "the newest of the directories");
    assert_eq!(uid(name, &with_directories(uids)), uids[0]);
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join(uids[0])).unwrap();
    let known = PodsAtStart::find(root.path(), [PodUid::from(uids[2])]);
    assert_eq!(uid(name, &known), uids[2], "the one with allocated resources");
}

#[test]
fn machine_dependent_pods_have_no_fingerprint() {
    for release in &RELEASES {
        let plain = json!({"containers": [{"name": "c", "image": "i:1"}]});
        let start = "(*core.Pod){TypeMeta:(v1.TypeMeta){Kind:(string)";
        assert!(text(release, plain.clone()).unwrap().starts_with(start));
        for (pointer, value) in [
            ("creationTimestamp", json!("2026-01-01T00:00:00Z")),
            ("managedFields", json!([{"manager": "m"}])),
        ] {
            let pod = json!({"metadata": {"name": "a", pointer: value}, "spec": plain});
            let pod: api::Pod = serde_json::from_value(pod).unwrap();
            assert_eq!(write(release, &pod, &pod, &mut String::new()), Err(NoFingerprint), "{pointer}");
        }
        let started = json!({"metadata": {"name": "a"}, "spec": plain, "status": {"startTime": "2026-01-01T00:00:00Z"}});
        let pod: api::Pod = serde_json::from_value(started).unwrap();
        assert_eq!(write(release, &pod, &pod, &mut String::new()), Err(NoFingerprint));
    }
}

/// The Go kubelet 1.37 adds nothing to the resources of the whole pod; before, it added sums.
#[test]
fn sums_of_resources_have_no_fingerprint_before_1_37() {
    let pod = |resources: Value| {
        let container = json!({"name": "c", "image": "i:1", "resources": {"requests": {"cpu": "100m"}}});
        json!({"containers": [container], "resources": resources})
    };
    let [newest, older @ ..] = &RELEASES;
    for (resources, is_known) in [
        (json!({"limits": {"cpu": "1"}}), false),
        (json!({"limits": {"memory": "1Gi"}}), false),
        (json!({"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}}), true),
        (json!({"requests": {"memory": "1Gi"}}), true),
        (json!({}), true),
    ] {
        assert!(text(newest, pod(resources.clone())).is_ok(), "{resources}");
        for release in older {
            assert_eq!(
                text(release, pod(resources.clone())).is_ok(),
                is_known,
                "{} {resources}",
                release.name
            );
        }
    }
}

/// A field that is missing in the table would be ignored without a message.
#[test]
fn type_table_defines_every_type_it_names() {
    for tables in 1..=TABLES.len() {
        check_types(&types(tables));
    }
}

fn check_types(types: &BTreeMap<&str, &str>) {
    let special = ["v1.Time", "resource.Quantity", "intstr.IntOrString", "string", "bool", "int32", "int64"];
    for (name, body) in types {
        for line in body.lines().take_while(|line| !line.starts_with(['#', '='])) {
            let kind = match line.split(' ').collect::<Vec<_>>()[..] {
                [_, _, json] if json.starts_with(['?', '-']) => continue,
                [_, kind, ..] => kind,
                [kind] => kind,
                [] => continue,
            };
            let target = kind.rsplit(['*', ']']).next().unwrap();
            assert!(types.contains_key(target) || special.contains(&target), "{name}: {line}");
        }
    }
    assert!(types.len() > 150, "{}", types.len());
}
