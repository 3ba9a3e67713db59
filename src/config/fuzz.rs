//! Hostile input for YAML and the node's configuration.

use super::{load, yaml};
use crate::util::fuzzing::{Budget, Target, nested, repeated};
use crate::util::threads::Stack;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "config/yaml",
            stack: Stack::Large,
            // The limit for manifests is 10 MiB; the cost per byte does not depend on the size.
            max_bytes: 2 << 20,
            // Aliases may copy up to 16 MiB.
            budget: Budget {
                per_mib: std::time::Duration::from_secs(30),
                per_byte: 200,
                base_kib: 48 * 1024,
                ..Budget::LINEAR
            },
            worst: |max| {
                let anchors = |width: usize| {
                    let item = |name: &str| format!("[{}]", vec![format!("*{name}"); width].join(","));
                    let mut text = "a0: &a0 [x,x]\n".to_owned();
                    for level in 1..40 {
                        text.push_str(&format!("a{level}: &a{level} {}\n", item(&format!("a{}", level - 1))));
                    }
                    text.into_bytes()
                };
                vec![
                    ("aliases doubled", anchors(2)),
                    ("aliases times nine", anchors(9)),
                    ("flow sequences", nested("[", "]", max)),
                    ("flow maps", nested("{a: ", "}", max)),
                    ("block sequences", b"- ".repeat(max / 2)),
                    ("deeper and deeper", repeated("", |i| format!("{}a:\n", " ".repeat(i)), "", max)),
                    ("keys", repeated("", |i| format!("k{i}: 1\n"), "", max)),
                    ("equal keys", repeated("", |_| "k: 1\n".to_owned(), "", max)),
                    ("documents", repeated("", |_| "---\na: 1\n".to_owned(), "", max)),
                    ("anchors", repeated("", |i| format!("- &a{i} x\n"), "", max)),
                    ("one word", b"a".repeat(max)),
                    ("one quoted word", [b"\"".as_slice(), &b"a".repeat(max - 2), b"\""].concat()),
                    ("escapes", [b"\"".as_slice(), &b"\\x41".repeat((max - 2) / 4), b"\""].concat()),
                    ("blank lines", b"\n".repeat(max)),
                    ("comments", b"#\n".repeat(max / 2)),
                    ("tabs", b"\t".repeat(max)),
                    ("question marks", b"? ".repeat(max / 2)),
                    ("merge keys", repeated("a: &a {b: 1}\n", |i| format!("m{i}: {{<<: *a}}\n"), "", max)),
                    ("literals", repeated("", |i| format!("k{i}: |\n  x\n"), "", max)),
                    ("a literal", [b"a: |\n".as_slice(), &b"  x\n".repeat(max / 4 - 2)].concat()),
                ]
            },
            seeds: &[
                b"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {a: b, \"c\": 'd'}\nspec:\n  containers:\n  - &c\n    name: c\n    image: i\n    args: [a, 1, 1.5, yes, ~]\n  - <<: *c\n    name: d\n    command: |\n      a\n      b\n---\n# two\nkind: >-\n  x\n...\n",
                br#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"}}"#,
            ],
            run: |bytes| {
                if let Ok(documents) = yaml::parse_bytes(bytes) {
                    for document in documents {
                        let _ = document.line_of("spec.containers[0].image");
                    }
                }
            },
        },
        Target {
            name: "config/kubelet",
            stack: Stack::Large,
            max_bytes: 1 << 20,
            budget: Budget { per_mib: std::time::Duration::from_secs(60), per_byte: 200, ..Budget::LINEAR },
            worst: |max| {
                let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
                vec![
                    ("unknown fields", repeated(head, |i| format!("x{i}: 1\n"), "", max)),
                    ("gates", repeated(&format!("{head}featureGates:\n"), |i| format!("  G{i}: true\n"), "", max)),
                    ("servers", repeated(&format!("{head}clusterDNS:\n"), |_| "- 1.2.3.4\n".to_owned(), "", max)),
                    (
                        "reservations",
                        repeated(&format!("{head}systemReserved:\n"), |i| format!("  r{i}: 1\n"), "", max),
                    ),
                ]
            },
            seeds: &[b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nsyncFrequency: 1m\nclusterDNS: [10.0.0.1]\nevictionHard: {memory.available: 100Mi}\nfeatureGates: {EventedPLEG: true}\nauthentication: {x509: {clientCAFile: /a}}\n"],
            run: |bytes| drop(load::load_bytes(bytes)),
        },
    ]
}
