//! Converts the bytes of one manifest to static pods: decode, default, identify, validate, refuse.

use std::collections::HashSet;

use super::decode::{self, DecodedPod, Lists};
use super::identity::{self, Origin};
use super::pods_at_start::PodsAtStart;
use super::problem::Fault;
use super::{defaults, priority, references, validate};
use crate::model::ids::FullName;
use crate::model::pod::Pod;

/// The result for a manifest: its valid pods, and every fault of the others.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    /// The valid pods, in the order of the manifest.
    pub(super) pods: Vec<Pod>,
    /// The faults of the others.
    pub(super) faults: Vec<Fault>,
    /// Unknown fields and repeated keys; they have no effect.
    pub(super) unknown: Vec<Fault>,
}

/// Reads a manifest of a node without earlier pods.
pub(super) fn read(bytes: &[u8], node_name: &str, origin: &Origin) -> Manifest {
    read_pods(bytes, node_name, origin, &PodsAtStart::default())
}

/// Reads a manifest whose pods are to run: one that is among the `known` ones keeps its UID. Logs what is
/// unusual about them.
pub(super) fn read_with(bytes: &[u8], node_name: &str, origin: &Origin, known: &PodsAtStart) -> Manifest {
    let manifest = read_pods(bytes, node_name, origin, known);
    manifest.pods.iter().for_each(priority::log_warning);
    manifest
}

/// Reads a manifest. Each of its pods is validated separately.
fn read_pods(bytes: &[u8], node_name: &str, origin: &Origin, known: &PodsAtStart) -> Manifest {
    let lists = match origin {
        Origin::File(_) => Lists::Refused,
        Origin::Http(_) => Lists::Accepted,
    };
    let mut manifest = Manifest::default();
    let decoding = match decode::decode(bytes, lists) {
        Ok(decoding) => decoding,
        Err(fault) => {
            manifest.faults.push(fault);
            return manifest;
        }
    };
    manifest.unknown.extend(decoding.duplicates.iter().cloned());
    for decoded in &decoding.pods {
        let place = |fault: Fault| decoding.locate(decoded, fault);
        let unknown =
            decoded.unknown.iter().map(|path| Fault::in_field(path.as_str(), "unknown field, ignored"));
        manifest.unknown.extend(unknown.map(place));
        match static_pod(decoded, node_name, origin, known) {
            Ok(pod) => manifest.pods.push(pod),
            Err(faults) => manifest.faults.extend(faults.into_iter().map(place)),
        }
    }
    manifest
}

fn static_pod(
    decoded: &DecodedPod,
    node_name: &str,
    origin: &Origin,
    known: &PodsAtStart,
) -> Result<Pod, Vec<Fault>> {
    let written = decoded.pod.as_ref().map_err(Clone::clone)?;
    let mut pod = written.clone();
    defaults::set_defaults(&mut pod);
    let uid = identity::uid(written, &pod, node_name, origin, known);
    if uid.is_former {
        // It runs with these defaults. Without them it would have other resources, and perhaps another
        // class of service and thus another cgroup, for which its containers would be restarted.
        defaults::set_pod_level(&mut pod);
    }
    identity::identify(&mut pod, uid.text, node_name, origin).map_err(|fault| vec![fault])?;
    let mut faults = validate::validate(&pod);
    faults.extend(references::forbidden(&pod));
    if faults.is_empty() { Ok(Pod::from(pod)) } else { Err(faults) }
}

/// The pods that should run: the valid ones, and, while there is any fault, every pod of the last
/// valid version that no valid one replaces. A fault never removes a pod.
///
/// DIFFERS: upstream removes the pods of an invalid file at its next full list.
pub(super) fn carry_over(old: &[Pod], good: Vec<Pod>, faulty: bool) -> (Vec<Pod>, Vec<Pod>) {
    if !faulty {
        return (good, Vec::new());
    }
    let replaced: HashSet<FullName> = good.iter().map(Pod::full_name).collect();
    let carried_over: Vec<Pod> =
        old.iter().filter(|pod| !replaced.contains(&pod.full_name())).cloned().collect();
    let mut pods = good;
    pods.extend(carried_over.iter().cloned());
    (pods, carried_over)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn file() -> Origin {
        Origin::File("/m/a.yaml".to_owned())
    }

    fn faults(text: &str) -> Vec<String> {
        let manifest = read(text.as_bytes(), "node", &file());
        let show = |fault: Fault| {
            format!("{}: {}: {}", fault.line.unwrap_or(0), fault.field.unwrap_or_default(), fault.message)
        };
        manifest.faults.into_iter().map(show).collect()
    }

    const WEB: &str = "apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - name: web
    image: localhost/busybox:1
    command: [sleep, '1000']
    ports:
    - {containerPort: 80, hostPort: 8080}
    volumeMounts:
    - {name: data, mountPath: /data}
  volumes:
  - name: data
    emptyDir: {}
";

    #[test]
    fn a_good_manifest_becomes_a_static_pod() {
        let manifest = read(WEB.as_bytes(), "Node-1", &file());
        assert_eq!(manifest.faults, []);
        let pod = &manifest.pods[0];
        assert_eq!((pod.name(), pod.namespace()), ("web-node-1", "default"));
        assert_eq!(pod.annotation("kubernetes.io/config.hash"), Some(pod.uid().as_str()));
        assert_eq!(pod.source_phase(), "Pending");
        assert_eq!(pod.spec().restart_policy.as_deref(), Some("Always"));
        assert_eq!(read(WEB.as_bytes(), "Node-1", &file()).pods[0].uid(), pod.uid());
        // Another comment does not change the pod, another label does.
        let commented = format!("# hello\n{WEB}");
        assert_eq!(read(commented.as_bytes(), "Node-1", &file()).pods[0].uid(), pod.uid());
        let labelled = WEB.replace("  name: web\nspec", "  name: web\n  labels: {a: b}\nspec");
        assert_ne!(read(labelled.as_bytes(), "Node-1", &file()).pods[0].uid(), pod.uid());
    }

    #[test]
    fn all_faults_are_reported_at_once_with_their_lines() {
        let text = WEB
            .replace("    image: localhost/busybox:1\n", "")
            .replace("containerPort: 80,", "containerPort: 80000,")
            .replace("name: data, mount", "name: date, mount")
            .replace("  volumes:\n", "  restartPolicy: Maybe\n  serviceAccountName: sa\n  volumes:\n");
        assert_eq!(
            faults(&text),
            [
                "7: spec.containers[0].image: Required value",
                "10: spec.containers[0].ports[0].containerPort: Invalid value: 80000: must be between 1 and 65535, inclusive",
                "12: spec.containers[0].volumeMounts[0].name: Not found: \"date\"",
                "13: spec.restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"Never\", \"OnFailure\"",
                "14: spec.serviceAccountName: static pods may not reference serviceaccounts",
            ]
        );
    }

    #[test]
    fn invalid_document_does_not_affect_others() {
        let text = format!("{WEB}---\n{}", WEB.replace("name: web\nspec", "name: UP\nspec"));
        let manifest = read(text.as_bytes(), "node", &file());
        assert_eq!(manifest.pods.len(), 1);
        assert_eq!(manifest.faults[0].field.as_deref(), Some("metadata.name"));
        assert_eq!(manifest.faults[0].line, Some(21));
    }

    #[test]
    fn broken_document_does_not_affect_those_before_it() {
        let text = format!("{WEB}---\nkind: Pod\nspec: [\n");
        let manifest = read(text.as_bytes(), "node", &file());
        assert_eq!(manifest.pods.len(), 1);
        assert_eq!(manifest.faults.len(), 1);
        assert_eq!(manifest.faults[0].line, Some(19));
        assert!(manifest.faults[0].message.starts_with("no document is read from here on: "));
    }

    #[test]
    fn last_of_equal_keys_counts_and_both_lines_are_reported() {
        let text = WEB.replace(
            "    ports:",
            "    env: [{name: A, value: first}]\n    env: [{name: A, value: second}]\n    ports:",
        );
        let text = text.replace("spec:\n", "spec:\n  hostNetwork: true\n") + "  hostNetwork: false\n";
        for origin in [file(), Origin::Http("http://localhost/pods".to_owned())] {
            let manifest = read(text.as_bytes(), "node", &origin);
            assert_eq!(manifest.faults, []);
            let pod = &manifest.pods[0];
            let variable = &pod.spec().containers[0].env.as_ref().unwrap()[0];
            assert_eq!(variable.value.as_deref(), Some("second"));
            assert_eq!(pod.spec().host_network, Some(false));
            let warnings: Vec<_> =
                manifest.unknown.iter().map(|fault| (fault.line, fault.message.as_str())).collect();
            assert_eq!(
                warnings,
                [
                    (
                        Some(12),
                        "key \"env\" appears twice in one mapping, in lines 11 and 12; the last one counts"
                    ),
                    (
                        Some(20),
                        "key \"hostNetwork\" appears twice in one mapping, in lines 6 and 20; the last one counts"
                    ),
                ]
            );
        }
    }

    #[test]
    fn merge_keys_and_wrapped_quotes_are_read_as_by_the_kubelet() {
        let text = "apiVersion: v1\nkind: Pod\nx-a: &a\n  terminationMessagePolicy: FallbackToLogsOnError\n  \
            workingDir: /tmp\nx-b: &b\n  imagePullPolicy: Never\nmetadata:\n  name: merged\nspec:\n  \
            terminationGracePeriodSeconds: -1\n  containers:\n  - workingDir: /var\n    <<: *a\n    <<: *b\n    \
            name: c\n    image: busybox:1\n    command: [\"sh\", \"-c\"]\n    args:\n    - \"echo one\ntwo; sleep 1\"\n";
        let manifest = read(text.as_bytes(), "node", &file());
        assert_eq!(manifest.faults, []);
        let spec = manifest.pods[0].spec();
        let container = &spec.containers[0];
        assert_eq!(container.working_dir.as_deref(), Some("/tmp"));
        assert_eq!(container.image_pull_policy.as_deref(), Some("Never"));
        assert_eq!(container.termination_message_policy.as_deref(), Some("FallbackToLogsOnError"));
        assert_eq!(container.args.as_deref(), Some(["echo one two; sleep 1".to_owned()].as_slice()));
        assert_eq!(spec.termination_grace_period_seconds, Some(1));
    }

    #[test]
    fn unknown_fields_are_reported_and_pod_stays_valid() {
        let text = WEB.replace("    command:", "    comand: x\n    command:");
        let manifest = read(text.as_bytes(), "node", &file());
        assert_eq!(manifest.pods.len(), 1);
        assert_eq!(manifest.unknown[0].field.as_deref(), Some("spec.containers[0].comand"));
        assert_eq!(manifest.unknown[0].line, Some(9));
    }

    #[test]
    fn pods_of_last_version_remain_if_new_one_has_faults() {
        let named = |name: &str| {
            Pod::from(crate::model::api::Pod {
                metadata: crate::model::meta::ObjectMeta {
                    name: Some(name.to_owned()),
                    ..Default::default()
                },
                ..Default::default()
            })
        };
        let names = |pods: &[Pod]| pods.iter().map(|pod| pod.name().to_owned()).collect::<Vec<_>>();
        let old = [named("a"), named("b")];
        let (pods, carried_over) = carry_over(&old, vec![named("b"), named("c")], true);
        assert_eq!(
            (names(&pods), names(&carried_over)),
            (vec!["b".into(), "c".into(), "a".into()], vec!["a".into()])
        );
        let (pods, carried_over) = carry_over(&old, vec![named("c")], false);
        assert_eq!((names(&pods), names(&carried_over)), (vec!["c".into()], vec![]));
    }

    /// A pod that uses most of the fields of a manifest.
    fn rich() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "rich", "namespace": "golden", "labels": {"app": "x"},
                "annotations": {"example.org/note": "n"}},
            "spec": {
                "terminationGracePeriodSeconds": 1, "hostNetwork": true, "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["10.0.0.1"], "searches": ["a.b"], "options": [{"name": "ndots", "value": "2"}]},
                "hostAliases": [{"ip": "10.1.2.3", "hostnames": ["a", "b.c"]}],
                "tolerations": [{"key": "k", "operator": "Exists"}],
                "securityContext": {"runAsUser": 7, "supplementalGroups": [1], "sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}],
                    "seccompProfile": {"type": "RuntimeDefault"}},
                "initContainers": [{"name": "s", "image": "i:1", "restartPolicy": "Always",
                    "startupProbe": {"exec": {"command": ["true"]}}}],
                "containers": [{
                    "name": "main", "image": "localhost/busybox:1", "command": ["sh"], "args": ["-c", "x"],
                    "env": [{"name": "A", "value": "1"},
                        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
                        {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}}],
                    "ports": [{"name": "web", "containerPort": 80, "protocol": "TCP"}],
                    "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}, "requests": {"cpu": 0.25}},
                    "livenessProbe": {"httpGet": {"port": "web", "httpHeaders": [{"name": "X-A", "value": "b"}]}},
                    "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
                    "securityContext": {"capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}, "privileged": false},
                    "volumeMounts": [{"name": "e", "mountPath": "/e"}, {"name": "h", "mountPath": "/h", "readOnly": true}],
                }],
                "volumes": [{"name": "e", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                    {"name": "h", "hostPath": {"path": "/tmp", "type": "Directory"}},
                    {"name": "p", "projected": {"sources": [{"downwardAPI": {"items": [
                        {"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]}}],
            },
        })
    }

    #[test]
    fn a_pod_with_most_fields_is_valid() {
        assert_eq!(faults(&rich().to_string()), Vec::<String>::new());
    }

    #[test]
    fn deeply_nested_manifests_do_not_overflow_the_stack() {
        use crate::util::threads::{OnDeath, Stack, spawn};
        let deep = (0..60).fold(json!(1), |inner, _| json!({"a": [inner]}));
        let mut pod = rich();
        pod["spec"]["deep"] = deep;
        let texts =
            [rich().to_string(), pod.to_string(), format!("a: {}1{}", "[".repeat(9000), "]".repeat(9000))];
        let (tx, rx) = crossbeam_channel::bounded(1);
        let _running = spawn("t/stack", Stack::Large, OnDeath::Unsupervised, move |_| {
            let faults: Vec<usize> =
                texts.iter().map(|text| read(text.as_bytes(), "node", &file()).faults.len()).collect();
            let _ = tx.send(faults);
        })
        .unwrap();
        assert_eq!(rx.recv_timeout(std::time::Duration::from_secs(20)), Ok(vec![0, 0, 1]));
    }

    #[derive(Debug, Clone)]
    enum Mutation {
        Flip(usize, u8),
        Cut(usize),
        Insert(usize, Vec<u8>),
        Replace(usize, Value),
        Repeat(usize, usize),
    }

    fn odd_value() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(json!(null)),
            Just(json!({})),
            Just(json!([])),
            Just(json!(true)),
            Just(json!("")),
            Just(json!("../../../etc")),
            Just(json!("a\0b")),
            Just(json!(i64::MIN)),
            Just(json!(u64::MAX)),
            Just(json!(1e308)),
            Just(json!(-0.5)),
            Just(json!("9999999999999999999999Ei")),
            Just(json!("-1")),
            Just(json!([null, [], {}, 1, "x"])),
            Just(json!({"": {"": {"": null}}})),
            Just(json!("🦀".repeat(100))),
            (1..200_usize).prop_map(|depth| (0..depth).fold(json!(1), |inner, _| json!([inner]))),
            (1..200_usize).prop_map(|depth| (0..depth).fold(json!({}), |inner, _| json!({"spec": inner}))),
            ".{0,40}".prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
        ]
    }

    fn mutation() -> impl Strategy<Value = Mutation> {
        prop_oneof![
            (any::<usize>(), any::<u8>()).prop_map(|(position, bit)| Mutation::Flip(position, bit)),
            any::<usize>().prop_map(Mutation::Cut),
            (any::<usize>(), prop::collection::vec(any::<u8>(), 1..20))
                .prop_map(|(position, bytes)| Mutation::Insert(position, bytes)),
            (any::<usize>(), any::<usize>()).prop_map(|(position, times)| Mutation::Repeat(position, times)),
            (any::<usize>(), odd_value()).prop_map(|(position, value)| Mutation::Replace(position, value)),
            (any::<usize>(), odd_value()).prop_map(|(position, value)| Mutation::Replace(position, value)),
            (any::<usize>(), odd_value()).prop_map(|(position, value)| Mutation::Replace(position, value)),
        ]
    }

    fn count(value: &Value) -> usize {
        1 + match value {
            Value::Array(items) => items.iter().map(count).sum(),
            Value::Object(map) => map.values().map(count).sum(),
            _ => 0,
        }
    }

    /// Replaces the value with the number `position`, counted depth first.
    fn replace(value: &mut Value, position: &mut usize, new: &Value) {
        if *position == 0 {
            *value = new.clone();
            *position = usize::MAX;
            return;
        }
        *position -= 1;
        let children: Vec<&mut Value> = match value {
            Value::Array(items) => items.iter_mut().collect(),
            Value::Object(map) => map.values_mut().collect(),
            _ => Vec::new(),
        };
        for child in children {
            replace(child, position, new);
            if *position == usize::MAX {
                return;
            }
        }
    }

    fn mutate(seed: usize, mutations: &[Mutation]) -> Vec<u8> {
        let seeds = [rich(), json!({"apiVersion": "v1", "kind": "PodList", "items": [rich()]})];
        let mut value = seeds[seed % 2].clone();
        for mutation in mutations {
            if let Mutation::Replace(position, new) = mutation {
                let mut position = position % count(&value);
                replace(&mut value, &mut position, new);
            }
        }
        let mut bytes = match seed % 3 {
            0 => WEB.as_bytes().to_vec(),
            _ => value.to_string().into_bytes(),
        };
        for mutation in mutations {
            let within = |offset: usize| if bytes.is_empty() { 0 } else { offset % bytes.len() };
            match mutation {
                Mutation::Flip(place, bit) => {
                    let place = within(*place);
                    if let Some(byte) = bytes.get_mut(place) {
                        *byte ^= 1 << (bit % 8);
                    }
                }
                Mutation::Cut(place) => bytes.truncate(within(*place)),
                Mutation::Insert(place, new) => {
                    let place = within(*place);
                    bytes.splice(place..place, new.iter().copied());
                }
                Mutation::Repeat(place, times) => {
                    let place = within(*place);
                    let end = (place + 40).min(bytes.len());
                    let piece = bytes[place..end].repeat(times % 30);
                    bytes.splice(place..place, piece);
                }
                Mutation::Replace(..) => {}
            }
        }
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn mutated_manifests_never_panic(seed in 0..6_usize, mutations in prop::collection::vec(mutation(), 0..5)) {
            let bytes = mutate(seed, &mutations);
            for origin in [file(), Origin::Http("http://localhost/pods".to_owned())] {
                let manifest = read(&bytes, "node", &origin);
                for fault in &manifest.faults {
                    prop_assert!(fault.message.chars().count() <= 501 && !fault.message.contains('\n'));
                }
                for pod in &manifest.pods {
                    prop_assert!(!pod.uid().is_empty() && !pod.uid().as_str().contains('/'));
                    prop_assert!(pod.name().ends_with("-node") && !pod.namespace().is_empty());
                    let _ = super::super::unsupported_fields(pod);
                }
            }
        }
    }
}
