//! Hostile image names, pull secrets, environments and logs.

use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::Value;

use super::container_config::{ContainerInputs, container_config};
use super::env_file;
use super::fields::Addresses;
use super::logs::read::{ReadOptions, read};
use super::settings::HostFeatures;
use crate::images::ImageUser;
use crate::kube::objects::{Key, Kind, Object, Objects};
use crate::kube::services::Services;
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::image_name as name;
use crate::model::mount::{MountedVolume, SubPath, SubPathFailure, SubPaths};
use crate::model::pod::Pod;
use crate::model::pod_size::{self, MAX_CONTAINER_ITEMS, MAX_VOLUMES};
use crate::model::{api, expand, typed};
use crate::util::fuzzing::{Budget, Named, Target, repeated};
use crate::util::stop::StopToken;
use crate::util::threads::Stack;

/// API servers store objects of up to 1.5 MiB; JSON is larger than what they count.
const OBJECT_BYTES: usize = 3 << 20;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "runtime/container",
            // Pod workers start containers.
            stack: Stack::Small,
            max_bytes: OBJECT_BYTES,
            // Whatever the size of the input, environment and arguments may take 2 MiB, the
            // work for them 16 MiB, and the config map has another 1 MiB.
            budget: Budget {
                base_kib: 48 * 1024,
                per_mib: std::time::Duration::from_secs(15),
                per_byte: 200,
                ..Budget::LINEAR
            },
            worst: hostile_containers,
            seeds: &[
                br#"{"metadata":{"name":"p","namespace":"n","uid":"u","labels":{"a":"b"}},"spec":{"containers":[{"name":"c","command":["sh","$(A)"],"args":["$$(A) $(B"],"workingDir":"/w","envFrom":[{"prefix":"x","configMapRef":{"name":"m"}}],"env":[{"name":"A","value":"1"},{"name":"B","value":"$(A)$(xk)"},{"name":"C","valueFrom":{"fieldRef":{"fieldPath":"metadata.labels['a']"}}},{"name":"D","valueFrom":{"resourceFieldRef":{"resource":"limits.cpu","divisor":"1m"}}},{"name":"E","valueFrom":{"secretKeyRef":{"name":"s","key":"k","optional":true}}}],"volumeMounts":[{"name":"v","mountPath":"/v","subPathExpr":"$(A)/x"},{"name":"w","mountPath":"/v/w","mountPropagation":"HostToContainer"}],"resources":{"limits":{"cpu":"1"}},"securityContext":{"runAsUser":1}}]}}"#,
            ],
            run: container,
        },
        Target {
            name: "runtime/env_file",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                let all = |line: &str| repeated("", |_| line.to_owned(), "", max);
                vec![
                    ("definitions", all("a='b'\n")),
                    ("lines of one value", [b"a='".as_slice(), &b"\n".repeat(max - 4), b"'"].concat()),
                    ("one value", [b"a='".as_slice(), &b"x".repeat(max - 4), b"'"].concat()),
                    ("one name", [b"x".repeat(max - 3), b"=''".to_vec()].concat()),
                    ("comments", all("#\n")),
                    ("blanks", b" ".repeat(max)),
                    ("quotes", b"'".repeat(max)),
                    ("equal signs", all("a= =\n")),
                ]
            },
            seeds: &[b"# c\n A='1'\nB='two\nlines' # note\nC= 'x'\nD=''\nK='v'\n"],
            run: |bytes| {
                let _ = (env_file::find(bytes, "K"), env_file::find(bytes, ""));
            },
        },
        Target {
            name: "runtime/image_name",
            stack: Stack::Small,
            max_bytes: 1 << 20,
            budget: Budget::LINEAR,
            worst: |max| {
                vec![
                    ("slashes", b"a/".repeat(max / 2)),
                    ("colons", b"a:".repeat(max / 2)),
                    ("at signs", b"a@".repeat(max / 2)),
                    ("separators", [b"a".as_slice(), &b"_".repeat(max - 2), b"a"].concat()),
                    ("dots", b"a.".repeat(max / 2)),
                    ("one word", b"a".repeat(max)),
                ]
            },
            seeds: &[b"localhost:5000/a/b-c__d.e:tag@sha256:0123", b"busybox", b"[::1]:5000/x", b"a.b/c:1"],
            run: |bytes| {
                let text = String::from_utf8_lossy(bytes);
                let _ = name::with_default_tag(&text);
                let _ = name::repository(&text);
                let _ = name::split_domain(&text);
            },
        },
        Target {
            name: "runtime/log",
            stack: Stack::Large,
            max_bytes: 4 << 20,
            budget: Budget { per_byte: 4, ..Budget::LINEAR },
            worst: |max| {
                let lines = |line: &str| repeated("2026-01-01T00:00:00.5Z stdout F x\n", |_| line.to_owned(), "", max);
                vec![
                    ("one line", lines("x")),
                    ("empty lines", lines("\n")),
                    ("parts", lines("2026-01-01T00:00:00.5Z stdout P x\n")),
                    ("lines of no form", lines("no log line at all\n")),
                    ("zeros", vec![0; max]),
                    ("Docker's lines", repeated("", |_| "{\"log\":\"x\\n\",\"stream\":\"stdout\",\"time\":\"2026-01-01T00:00:00Z\"}\n".to_owned(), "", max)),
                    ("nested JSON", crate::util::fuzzing::nested("[", "]", max)),
                ]
            },
            seeds: &[
                b"2026-01-01T00:00:00.123456789Z stdout F hello\n2026-01-01T00:00:01Z stderr P part\n2026-01-01T00:00:02Z stderr F end\n",
                b"{\"log\":\"hello\\n\",\"stream\":\"stderr\",\"time\":\"2026-01-01T00:00:00.5Z\"}\n",
            ],
            run: |bytes| {
                let file = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(file.path(), bytes).unwrap();
                for tail_lines in [None, Some(10), Some(u64::MAX)] {
                    let options = ReadOptions { tail_lines, timestamps: true, ..ReadOptions::default() };
                    let _ = read(file.path(), &options, &mut std::io::sink(), &|| false, &StopToken::never());
                }
            },
        },
    ]
}

/// Pods whose first container is to be started, each as large as an object may be.
fn hostile_containers(max: usize) -> Vec<Named> {
    let text = |fields: &str, piece: &dyn Fn(usize) -> String, end: &str| {
        let before = format!(
            r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u"}},"spec":{{"containers":[{{"name":"c",{fields}"#
        );
        repeated(&before, piece, &format!("{end}}}]}}}}"), max)
    };
    // A list with as many items as it may have. Spaces that do not fit any more end it.
    let list = |fields: &str, piece: &dyn Fn(usize) -> String, end: &str| {
        text(fields, &|i| if i < MAX_CONTAINER_ITEMS - 1 { piece(i) } else { " ".repeat(max) }, end)
    };
    // Variables that are twice as long as the one before, or 1 MiB of a config map.
    let doubled = (1..40).map(|i| format!(r#",{{"name":"V{i}","value":"$(V{0})$(V{0})"}}"#, i - 1));
    let doubled: String = doubled.collect();
    let doubled = format!(r#""env":[{{"name":"V0","value":"12345678"}}{doubled}]"#);
    let large = r#""env":[{"name":"V","valueFrom":{"configMapKeyRef":{"name":"m","key":"k"}}}]"#;
    let quarter = "x".repeat(expand::MAX_BYTES / 4);
    let quarter = format!(r#""env":[{{"name":"V","value":"{quarter}"}}]"#);
    vec![
        ("variables that double", {
            let before =
                r#"{"metadata":{"name":"p","namespace":"n","uid":"u"},"spec":{"containers":[{"name":"c","#;
            format!("{before}{doubled}}}]}}}}").into_bytes()
        }),
        (
            "a large value named often",
            text(&format!(r#"{large},"args":[""#), &|_| "$(V)".to_owned(), r#""]"#),
        ),
        (
            "a large value in each argument",
            list(&format!(r#"{quarter},"args":["""#), &|_| r#","$(V)""#.to_owned(), "]"),
        ),
        (
            "a large value defined again and again",
            list(
                r#""env":[{"name":"V","valueFrom":{"configMapKeyRef":{"name":"m","key":"k"}}}"#,
                &|_| r#",{"name":"V","valueFrom":{"configMapKeyRef":{"name":"m","key":"k"}}}"#.to_owned(),
                "]",
            ),
        ),
        (
            "the config map again and again",
            list(
                r#""envFrom":[{}"#,
                &|i| format!(r#",{{"prefix":"p{i}","configMapRef":{{"name":"m"}}}}"#),
                "]",
            ),
        ),
        (
            "the config map under one name",
            list(r#""envFrom":[{}"#, &|_| r#",{"configMapRef":{"name":"m"}}"#.to_owned(), "]"),
        ),
        ("references without an end", text(r#""args":[""#, &|_| "$(".to_owned(), r#""]"#)),
        ("references to nothing", text(r#""args":[""#, &|_| "$()".to_owned(), r#""]"#)),
        ("dollar signs", text(r#""args":[""#, &|_| "$$".to_owned(), r#""]"#)),
        ("empty arguments", list(r#""args":["""#, &|_| r#","""#.to_owned(), "]")),
        (
            "variables that name the one before",
            list(
                r#""env":[{"name":"v0"}"#,
                &|i| format!(r#",{{"name":"v{}","value":"$(v{i})"}}"#, i + 1),
                "]",
            ),
        ),
        (
            "a label in each variable",
            list(
                r#""env":[{"name":"a"}"#,
                &|i| {
                    format!(
                        r#",{{"name":"v{i}","valueFrom":{{"fieldRef":{{"fieldPath":"metadata.labels['a']"}}}}}}"#
                    )
                },
                "]",
            ),
        ),
        (
            "mounts",
            list(
                r#""volumeMounts":[{"name":"v","mountPath":"/"}"#,
                &|i| format!(r#",{{"name":"v","mountPath":"/{i}"}}"#),
                "]",
            ),
        ),
        ("volumes that are mounted", mounted()),
        (
            "mounts below each other",
            list(
                r#""volumeMounts":[{"name":"v","mountPath":"/"}"#,
                &|i| format!(r#",{{"name":"v","mountPath":"{}"}}"#, "/a".repeat(i % 1000)),
                "]",
            ),
        ),
        (
            "a large value in each sub path",
            list(
                &format!(r#"{quarter},"volumeMounts":[{{"name":"v","mountPath":"/"}}"#),
                &|i| format!(r#",{{"name":"v","mountPath":"/{i}","subPathExpr":"$(V)"}}"#),
                "]",
            ),
        ),
        (
            "sub paths of variables that are not there",
            text(
                r#""volumeMounts":[{"name":"v","mountPath":"/","subPathExpr":""#,
                &|i| format!("$(v{i})"),
                r#""}]"#,
            ),
        ),
    ]
}

/// As many volumes and mounts as a pod and a container may have.
fn mounted() -> Vec<u8> {
    let volumes = (0..MAX_VOLUMES).map(|i| format!(r#"{{"name":"{i}"}}"#));
    let volumes = volumes.collect::<Vec<_>>().join(",");
    let mount = |i: usize| format!(r#"{{"name":"{}","mountPath":"/{i}"}}"#, MAX_VOLUMES - 1 - i % 10);
    let mounts = (0..MAX_CONTAINER_ITEMS).map(mount).collect::<Vec<_>>().join(",");
    format!(
        r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u"}},"spec":{{"containers":[{{"name":"c","volumeMounts":[{mounts}]}}],"volumes":[{volumes}]}}}}"#
    )
    .into_bytes()
}

/// Sub paths that are there at once.
struct AnySubPath;

impl SubPaths for AnySubPath {
    fn bind(&self, _: SubPath<'_>, _: &StopToken) -> Result<PathBuf, SubPathFailure> {
        Ok(PathBuf::from("/bound"))
    }
}

/// What the API server has: a config map of 1 MiB.
static API: LazyLock<PodDependencies> = LazyLock::new(|| {
    let object = Object { data: [("k".to_owned(), vec![b'x'; (1 << 20) - 1])].into(), ..Object::default() };
    let objects = Objects::fixed(vec![(Key::new(Kind::ConfigMap, "n", "m"), object)]);
    objects.set(&Key::new(Kind::Secret, "n", "s"), None);
    let services = Services::default();
    services.replace(Vec::new());
    PodDependencies { services, ..PodDependencies::for_tests(objects) }
});

/// Builds the configuration of the pod's first container.
fn container(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
    let Ok(pod) = typed::decode::<api::Pod>(&value) else { return };
    let pod = Pod::from(pod);
    let Some(container) = pod.containers().first() else { return };
    // Larger ones are refused before.
    if pod_size::excess(pod.spec()).is_some() {
        return;
    }
    let volume = |name: &str| MountedVolume {
        volume: name.to_owned(),
        host_path: PathBuf::from("/volume"),
        read_only: false,
        selinux_relabel: false,
    };
    let of_pod = pod.spec().volumes.iter().flatten().map(|spec| volume(&spec.name));
    let volumes: Vec<MountedVolume> = of_pod.chain([volume("v"), volume("w")]).collect();
    // Nothing is waited for: what was never read is an error.
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    let settings = super::tests::settings();
    let _ = container_config(ContainerInputs {
        pod: &pod,
        container,
        restart_count: 0,
        image_ref: "",
        image_user: &ImageUser::default(),
        addresses: Addresses::default(),
        volumes: &volumes,
        image_volumes: &[],
        sub_paths: &AnySubPath,
        recursive_read_only_mounts: false,
        stop: &stop,
        api: Some(&API),
        local: &LocalObjects::default(),
        hosts_file: None,
        termination_log: None,
        settings: &settings,
        host: &HostFeatures::default(),
        ids: None,
    });
}
