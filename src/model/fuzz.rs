//! Hostile input for the shared types: quantities, log lines, references, fields, API objects.

use std::borrow::Cow;

use serde_json::Value;

use super::api;
use super::expand::{self, Budget as ExpandBudget};
use super::pod::Pod;
use super::quantity::Amount;
use super::{fields, log_line, typed};
use crate::util::fuzzing::{Budget, Target, nested, repeated};
use crate::util::threads::Stack;

/// API servers store objects of up to 1.5 MiB; their size as JSON may be larger.
const OBJECT_BYTES: usize = 3 << 20;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "model/quantity",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                vec![
                    ("digits", b"9".repeat(max)),
                    ("zeros", [b"0.".as_slice(), &b"0".repeat(max - 3), b"1"].concat()),
                    ("exponent", [b"1e".as_slice(), &b"9".repeat(max - 2)].concat()),
                    ("negative exponent", [b"1e-".as_slice(), &b"9".repeat(max - 3)].concat()),
                ]
            },
            seeds: &[b"1", b"100m", b"1.5Gi", b"-0.5e3", b"12E", b"1e-9", b"+.5Ki", b"9223372036854775807"],
            run: |bytes| {
                if let Ok(amount) = Amount::parse(&String::from_utf8_lossy(bytes)) {
                    let _ = (amount.units(), amount.milli(), amount.divide(amount));
                }
            },
        },
        Target {
            name: "model/log_line",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                let lines = |line: &str| repeated("", |_| line.to_owned(), "", max);
                vec![
                    ("one line", [b"2026-01-01T00:00:00.5Z stdout F ".as_slice(), &b"x".repeat(max - 32)].concat()),
                    ("a long time", b"2".repeat(max)),
                    ("empty lines", lines("\n")),
                    ("parts", lines("2026-01-01T00:00:00.5Z stdout P x\n")),
                    ("nested JSON", nested("[", "]", max)),
                    ("JSON objects", nested("{\"a\":", "}", max)),
                ]
            },
            seeds: &[
                b"2026-01-01T00:00:00.123456789Z stdout F hello\n2026-01-01T00:00:00.5+01:00 stderr P:x part\n",
                br#"{"log":"hello\n","stream":"stderr","time":"2026-01-01T00:00:00.5Z"}"#,
            ],
            run: |bytes| {
                for line in bytes.split(|byte| *byte == b'\n') {
                    if let Ok(line) = log_line::parse(line) {
                        log_line::push_full_time(&mut Vec::new(), line.time_text);
                    }
                    let _ = log_line::parse_docker(line);
                }
                for cut in [false, true] {
                    let _ = log_line::termination_text(bytes, cut);
                }
            },
        },
        Target {
            name: "model/expand",
            stack: Stack::Small,
            max_bytes: OBJECT_BYTES,
            // The result has 2 MiB at most.
            budget: Budget { per_byte: 4, ..Budget::LINEAR },
            worst: |max| {
                let all = |piece: &str| piece.repeat(max / piece.len()).into_bytes();
                vec![
                    ("large values", "$(A)".repeat(170_000).into_bytes()),
                    ("empty values", all("$(E)")),
                    ("unknown names", all("$(N)")),
                    ("references without an end", all("$(")),
                    ("an end at the end", [all("$(").as_slice(), b")"].concat().split_off(1)),
                    ("dollar signs", all("$")),
                    ("ends", all(")")),
                    ("one long name", [b"$(".as_slice(), &b"x".repeat(max - 3), b")"].concat()),
                    ("references in references", nested("$(", ")", max)),
                    ("letters outside ASCII", all("ü")),
                ]
            },
            seeds: &[b"a $(A) $$(A) $(N) $(E)", b"$(A", b"$$$(E)$x$"],
            run: |bytes| {
                let text = String::from_utf8_lossy(bytes);
                let large = "x".repeat(64 * 1024);
                let value = |name: &str| match name {
                    "A" => Some(Cow::from(large.as_str())),
                    "E" => Some(Cow::from("")),
                    _ => None,
                };
                let mut expand_budget = ExpandBudget::default();
                for _ in 0..3 {
                    if let Ok(text) = expand_budget.expand(&text, value) {
                        assert!(text.len() <= expand::MAX_BYTES);
                    }
                }
            },
        },
        Target {
            name: "model/fields",
            stack: Stack::Small,
            // The size limit of all annotations of an object.
            max_bytes: 256 * 1024,
            budget: Budget { base_kib: 32 * 1024, ..Budget::LINEAR },
            worst: |max| {
                let all = |piece: &str| piece.repeat(max / piece.len()).into_bytes();
                vec![
                    ("a long path", all("a.")),
                    ("a long key", [b"metadata.labels['".as_slice(), &b"x".repeat(max - 19), b"']"].concat()),
                    ("subscripts", all("['")),
                    ("keys in keys", all("metadata.labels['']")),
                    ("control characters", vec![7; max]),
                    ("quotes", all("\"")),
                    ("characters that are not printed", all("\u{10ffff}")),
                    ("letters outside ASCII", all("ü")),
                    ("huge pages", [b"limits.hugepages-".as_slice(), &b"1".repeat(max - 17)].concat()),
                ]
            },
            seeds: &[
                b"metadata.labels['a']",
                b"metadata.annotations['']",
                b"metadata.name",
                b"limits.hugepages-2Mi",
                b"requests.cpu",
                b"metadata.labels",
            ],
            run: |bytes| {
                let text = String::from_utf8_lossy(bytes).into_owned();
                let mut object = api::Pod::default();
                object.metadata.labels = Some([(text.clone(), text.clone())].into());
                let pod = Pod::from(object);
                for path in [&*text, "metadata.labels", "metadata.annotations"] {
                    let _ = (fields::metadata_field(&pod, path), fields::file_field(&pod, path));
                }
                let own = api::Container { name: text.clone(), ..Default::default() };
                let selector = api::ResourceFieldSelector {
                    divisor: serde_json::from_value(text.clone().into()).ok(),
                    resource: text,
                    ..Default::default()
                };
                let node = fields::NodeAllocatable::default();
                let _ = fields::resource_field(&pod, Some(&own), &selector, &node);
            },
        },
        Target {
            name: "model/object",
            stack: Stack::Large,
            max_bytes: OBJECT_BYTES,
            // Each invalid field is set to null in a copy and the object is read again, 20 times at most.
            budget: Budget { per_mib: std::time::Duration::from_secs(60), per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let pod = |inside: &str, piece: &dyn Fn(usize) -> String, end: &str| {
                    let before = format!(r#"{{"kind":"Pod","metadata":{{"name":"p","uid":"u"}},{inside}"#);
                    repeated(&before, piece, end, max)
                };
                vec![
                    ("nested arrays", nested("[", "]", max)),
                    ("nested objects", nested("{\"a\":", "}", max)),
                    (
                        "containers",
                        pod(r#""spec":{"containers":[{}"#, &|i| format!(r#",{{"name":"c{i}","image":"a","imagePullPolicy":"Always","resources":{{}}}}"#), "]}}"),
                    ),
                    (
                        "variables",
                        pod(
                            r#""spec":{"containers":[{"name":"c","env":[{"name":"a"}"#,
                            &|i| format!(r#",{{"name":"v{i}","value":"$(v{})"}}"#, i.saturating_sub(1)),
                            "]}]}}",
                        ),
                    ),
                    (
                        "annotations",
                        repeated(
                            r#"{"kind":"Pod","metadata":{"annotations":{"a":"b""#,
                            |i| format!(r#","{i}":"""#),
                            "}}}",
                            max,
                        ),
                    ),
                    ("unknown fields", repeated(r#"{"kind":"Pod","x":1"#, |i| format!(r#","x{i}":1"#), "}", max)),
                    (
                        "wrong types",
                        pod(r#""spec":{"containers":[{}"#, &|i| format!(r#",{{"name":{i}}}"#), "]}}"),
                    ),
                    (
                        "addresses of a node",
                        repeated(
                            r#"{"kind":"Node","status":{"addresses":[{"type":"a","address":"b"}"#,
                            |i| format!(r#",{{"type":"InternalIP","address":"{i}"}}"#),
                            "]}}",
                            max,
                        ),
                    ),
                    (
                        "keys of a secret",
                        repeated(r#"{"kind":"Secret","data":{"a":"b""#, |i| format!(r#","{i}":"AAAA""#), "}}", max),
                    ),
                    (
                        "ports of a service",
                        repeated(
                            r#"{"kind":"Service","spec":{"ports":[{"port":1}"#,
                            |i| format!(r#",{{"port":{i}}}"#),
                            "]}}",
                            max,
                        ),
                    ),
                ]
            },
            seeds: &[
                br#"{"kind":"Pod","metadata":{"name":"p","namespace":"n","uid":"u","labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i","env":[{"name":"A","value":"$(B)"}],"ports":[{"containerPort":1}],"resources":{"limits":{"cpu":"1"}}}],"volumes":[{"name":"v","projected":{"sources":[{"configMap":{"name":"m","items":[{"key":"k","path":"p"}]}}]}}]},"status":{"phase":"Running"}}"#,
                br#"{"kind":"Node","metadata":{"name":"n"},"spec":{"taints":[{"key":"k","effect":"NoExecute"}]},"status":{"capacity":{"cpu":"1"},"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"2026-01-01T00:00:00Z"}]}}"#,
                br#"{"kind":"Secret","metadata":{"name":"s"},"data":{"k":"dg=="},"type":"Opaque"}"#,
                br#"{"kind":"ConfigMap","metadata":{"name":"s"},"data":{"k":"v"},"binaryData":{"b":"AA=="}}"#,
                br#"{"kind":"Service","metadata":{"name":"s"},"spec":{"clusterIP":"1.2.3.4","ports":[{"name":"p","port":1}]}}"#,
                br#"{"kind":"Lease","metadata":{"name":"s"},"spec":{"renewTime":"2026-01-01T00:00:00.000000Z"}}"#,
            ],
            run: |bytes| {
                let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
                match value.get("kind").and_then(Value::as_str) {
                    Some("Node") => drop(typed::decode::<api::Node>(&value)),
                    Some("Secret") => drop(typed::decode::<api::Secret>(&value)),
                    Some("ConfigMap") => drop(typed::decode::<api::ConfigMap>(&value)),
                    Some("Service") => drop(typed::decode::<api::Service>(&value)),
                    Some("Lease") => drop(typed::decode::<super::coordination::Lease>(&value)),
                    _ => {
                        if let Ok(pod) = typed::decode::<api::Pod>(&value) {
                            let pod = Pod::from(pod);
                            let _ = (pod.full_name(), pod.uid().clone(), pod.source_phase());
                        }
                    }
                }
            },
        },
    ]
}
