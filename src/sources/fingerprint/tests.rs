use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::sources::decode::{self, Lists};
use crate::sources::defaults;
use crate::sources::identity::{self, Origin};

fn root() -> std::path::PathBuf {
    Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).to_owned()
}

fn uid(name: &str, bytes: &[u8]) -> String {
    let decoding = decode::decode(bytes, Lists::Refused).unwrap();
    let written = decoding.pods[0].pod.as_ref().unwrap();
    let mut given = written.clone();
    defaults::set_defaults(&mut given);
    let origin = Origin::File(format!("/etc/kubernetes/manifests/{name}"));
    identity::uid(written, &given, "node-1", &origin)
}

fn text(spec: Value) -> Result<String, NoFingerprint> {
    let mut pod: api::Pod = serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap();
    defaults::set_defaults(&mut pod);
    let mut out = String::new();
    write(&pod, &mut out)?;
    Ok(out)
}

/// `uids.txt` has the Go kubelet's UIDs of these manifests.
#[test]
fn static_pod_uids_equal_those_of_go_kubelet() {
    let places = ["tests/golden/data/manifests", "src/sources/fingerprint/manifests"];
    let mut wrong = Vec::new();
    let mut count = 0;
    for line in include_str!("uids.txt").lines() {
        let (name, expected) = line.split_once(' ').unwrap();
        let found = places.iter().find_map(|place| std::fs::read(root().join(place).join(name)).ok());
        if uid(name, &found.unwrap_or_else(|| panic!("no {name}"))) != expected {
            wrong.push(name);
        }
        count += 1;
    }
    assert_eq!(wrong, Vec::<&str>::new(), "of {count}");
    assert!(count >= 50, "{count}");
}

#[test]
fn machine_dependent_pods_have_no_fingerprint() {
    let plain = json!({"containers": [{"name": "c", "image": "i:1"}]});
    assert!(text(plain.clone()).unwrap().starts_with("(*core.Pod){TypeMeta:(v1.TypeMeta){Kind:(string)"));
    let mut limited = plain.clone();
    limited["resources"] = json!({"limits": {"cpu": "1"}});
    assert_eq!(text(limited), Err(NoFingerprint));
    for (pointer, value) in
        [("creationTimestamp", json!("2026-01-01T00:00:00Z")), ("managedFields", json!([{"manager": "m"}]))]
    {
        let pod = json!({"metadata": {"name": "a", pointer: value}, "spec": plain});
        let pod: api::Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(write(&pod, &mut String::new()), Err(NoFingerprint), "{pointer}");
    }
    let pod =
        json!({"metadata": {"name": "a"}, "spec": plain, "status": {"startTime": "2026-01-01T00:00:00Z"}});
    let pod: api::Pod = serde_json::from_value(pod).unwrap();
    assert_eq!(write(&pod, &mut String::new()), Err(NoFingerprint));
}

/// A field that is missing in the table would be ignored without a message.
#[test]
fn type_table_defines_every_type_it_names() {
    let types = types();
    let special = ["v1.Time", "resource.Quantity", "intstr.IntOrString", "string", "bool", "int32", "int64"];
    for (name, body) in &types {
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
