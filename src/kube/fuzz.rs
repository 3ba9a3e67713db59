//! Hostile objects of the API server, and certificates.

use serde_json::Value;

use super::certificates::CertificateFields;
use super::envelope::{self, Envelope};
use super::error::ApiError;
use super::objects::{self, Kind};
use super::services::Services;
use crate::model::pod::Pod;
use crate::model::{api, typed};
use crate::util::fuzzing::{Budget, Target, nested, repeated};
use crate::util::threads::Stack;
use crate::util::wire;

/// API servers store objects of up to 1.5 MiB; their size as JSON may be larger.
const OBJECT_BYTES: usize = 3 << 20;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "kube/certificate",
            // The stack size of a connection's thread.
            stack: Stack::Small,
            max_bytes: 256 * 1024,
            budget: Budget { per_byte: 100, ..Budget::LINEAR },
            worst: crate::transport::fuzz::hostile_certificates,
            seeds: crate::transport::fuzz::certificate_seeds(),
            run: |bytes| drop(CertificateFields::from_der(bytes)),
        },
        Target {
            name: "kube/error",
            // The stack size of pod workers, which read objects.
            stack: Stack::Small,
            max_bytes: 64 * 1024,
            budget: Budget { per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let causes = b"\x22\x02\x0a\0".repeat(max.saturating_sub(64) / 4);
                let mut object = Vec::new();
                wire::bytes(5, &causes, &mut object);
                let sealed = Envelope { api_version: b"v1", kind: b"Status", object: &object };
                vec![("causes", envelope::seal(&sealed)), ("nested details", nested(r#"{"details":"#, "}", max))]
            },
            seeds: &[
                b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\x12\x1e\x1a\x07changed\x22\x08Conflict\x2a\x06\x22\x02\x0a\0\x28\x03\x30\x99\x03",
                br#"{"kind":"Status","reason":"Conflict","message":"changed","details":{"causes":[{"reason":"r"}],"retryAfterSeconds":3},"code":409}"#,
            ],
            run: |bytes| drop(ApiError::from_response(String::new(), 409, bytes, None).to_string()),
        },
        Target {
            name: "kube/data",
            // The stack size of pod workers, which read objects.
            stack: Stack::Small,
            max_bytes: OBJECT_BYTES,
            budget: Budget { per_mib: std::time::Duration::from_secs(20), per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let keys = |field: &str, piece: &dyn Fn(usize) -> String| {
                    repeated(&format!(r#"{{"metadata":{{"name":"m"}},"{field}":{{"":"""#), piece, "}}", max)
                };
                vec![
                    ("short keys", keys("data", &|i| format!(r#","{i}":"""#))),
                    ("short binary keys", keys("binaryData", &|i| format!(r#","{i}":"""#))),
                    ("one key", keys("data", &|_| r#","k":"""#.to_owned())),
                    ("long keys", keys("data", &|i| format!(r#","{i:0253}":"""#))),
                    ("one large value", repeated(r#"{"data":{"k":""#, |_| "AAAA".to_owned(), r#""}}"#, max)),
                    ("one large binary value", repeated(r#"{"binaryData":{"k":""#, |_| "AAAA".to_owned(), r#""}}"#, max)),
                    ("escapes", repeated(r#"{"data":{"k":""#, |_| "\\u0041".to_owned(), r#""}}"#, max)),
                    ("unknown fields", repeated(r#"{"x":1"#, |i| format!(r#","x{i}":1"#), "}", max)),
                    ("managed fields", repeated(r#"{"metadata":{"managedFields":[{}"#, |_| ",{}".to_owned(), "]}}", max)),
                    ("nested arrays", nested("[", "]", max)),
                    ("nested unknown objects", nested(r#"{"x":"#, "}", max)),
                ]
            },
            seeds: &[
                br#"{"metadata":{"name":"m","uid":"u","resourceVersion":"1"},"type":"Opaque","immutable":true,"data":{"k":"dg==","l":"!"}}"#,
                br#"{"data":{"k":"v"},"binaryData":{"b":"AA=="}}"#,
            ],
            run: |bytes| {
                for kind in [Kind::ConfigMap, Kind::Secret] {
                    let Ok(stored) = serde_json::from_slice::<objects::Stored>(bytes) else { return };
                    let object = stored.into_object(kind);
                    let _ = (object.get("k"), format!("{object:?}"));
                }
            },
        },
        Target {
            name: "kube/services",
            stack: Stack::Large,
            max_bytes: OBJECT_BYTES,
            budget: Budget { per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                vec![
                    (
                        "services of one namespace",
                        repeated(
                            "[{}",
                            |i| format!(r#",{{"metadata":{{"name":"s{i}","namespace":"n"}},"spec":{{"clusterIP":"1.1.1.1","ports":[{{"port":1}}]}}}}"#),
                            "]",
                            max,
                        ),
                    ),
                    (
                        "ports of one service",
                        repeated(
                            r#"[{"metadata":{"name":"s","namespace":"n"},"spec":{"clusterIP":"1.1.1.1","ports":[{"port":1}"#,
                            |i| format!(r#",{{"name":"p{i}","port":{i}}}"#),
                            "]}}]",
                            max,
                        ),
                    ),
                ]
            },
            seeds: &[br#"[{"metadata":{"name":"s-1","namespace":"n"},"spec":{"clusterIP":"fd00::1","ports":[{"name":"a.b","port":1,"protocol":"UDP"}]}}]"#],
            run: |bytes| {
                let Ok(Value::Array(items)) = serde_json::from_slice::<Value>(bytes) else { return };
                let services = Services::default();
                services.replace(items.iter().filter_map(|item| typed::decode::<api::Service>(item).ok()).collect());
                let _ = services.variables("n", true);
            },
        },
        Target {
            name: "kube/references",
            stack: Stack::Large,
            max_bytes: OBJECT_BYTES,
            budget: Budget { per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let pod = |inside: &str, piece: &dyn Fn(usize) -> String, end: &str| {
                    repeated(&format!(r#"{{"metadata":{{"name":"p"}},"spec":{{"containers":[{{"name":"c"{inside}"#), piece, end, max)
                };
                vec![
                    (
                        "objects in the environment",
                        pod(
                            r#","envFrom":[{}"#,
                            &|i| format!(r#",{{"secretRef":{{"name":"s{i}"}}}}"#),
                            "]}]}}",
                        ),
                    ),
                    (
                        "one object in the environment",
                        pod(
                            r#","env":[{"name":"a"}"#,
                            &|i| format!(r#",{{"name":"v{i}","valueFrom":{{"configMapKeyRef":{{"name":"m","key":"k"}}}}}}"#),
                            "]}]}}",
                        ),
                    ),
                    (
                        "volumes",
                        pod(
                            r#"}],"volumes":[{"name":"v"}"#,
                            &|i| format!(r#",{{"name":"v{i}","secret":{{"secretName":"s{i}"}}}}"#),
                            "]}}",
                        ),
                    ),
                ]
            },
            seeds: &[],
            run: |bytes| {
                let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
                if let Ok(pod) = typed::decode::<api::Pod>(&value) {
                    let _ = objects::references(&Pod::from(pod));
                }
            },
        },
    ]
}
