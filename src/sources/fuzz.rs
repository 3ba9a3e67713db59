//! Hostile manifests.

use super::identity::Origin;
use super::local;
use super::manifest;
use crate::util::fuzzing::{Budget, Target, nested, repeated};
use crate::util::threads::Stack;

const HEAD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n";

pub(crate) fn targets() -> Vec<Target> {
    vec![manifests(), local_objects()]
}

fn manifests() -> Target {
    Target {
        name: "sources/manifest",
        stack: Stack::Large,
        // The limit is 10 MiB; this target measures how the cost grows.
        max_bytes: 512 * 1024,
        budget: Budget { per_mib: std::time::Duration::from_secs(12), per_byte: 400, ..Budget::LINEAR },
        worst: |max| {
            let containers = |inside: &str| format!("{HEAD}  containers:\n  - {{name: c, image: i, {inside}");
            let list = |field: &str, piece: &dyn Fn(usize) -> String| {
                repeated(&containers(&format!("{field}: [")), piece, "]}\n", max)
            };
            vec![
                (
                    "containers",
                    repeated(
                        &format!("{HEAD}  containers:\n"),
                        |i| format!("  - {{name: c{i}, image: i}}\n"),
                        "",
                        max,
                    ),
                ),
                (
                    "containers of one name",
                    repeated(
                        &format!("{HEAD}  containers:\n"),
                        |_| "  - {name: c, image: i}\n".to_owned(),
                        "",
                        max,
                    ),
                ),
                (
                    "containers that mount every volume",
                    repeated(
                        &format!("{HEAD}  volumes: [{{name: v, emptyDir: {{}}}}]\n  containers:\n"),
                        |i| {
                            format!(
                                "  - {{name: c{i}, image: i, volumeMounts: [{{name: v, mountPath: /a}}, {{name: v, mountPath: /b}}]}}\n"
                            )
                        },
                        "",
                        max,
                    ),
                ),
                ("ports", list("ports", &|i| format!("{{containerPort: {}}},", i % 65_535 + 1))),
                (
                    "host ports",
                    list("ports", &|i| format!("{{containerPort: 1, hostPort: {}}},", i % 65_535 + 1)),
                ),
                ("variables", list("env", &|i| format!("{{name: v{i}, value: $(v0)}},"))),
                ("mounts", list("volumeMounts", &|i| format!("{{name: v, mountPath: /{i}}},"))),
                ("wrong types", list("args", &|i| format!("{{a: {i}}},"))),
                (
                    "volumes",
                    repeated(
                        &format!("{}}}\n  volumes:\n", containers("")),
                        |i| format!("  - {{name: v{i}, emptyDir: {{}}}}\n"),
                        "",
                        max,
                    ),
                ),
                (
                    "volumes that no container mounts, of one name",
                    repeated(
                        &format!("{}}}\n  volumes:\n", containers("")),
                        |_| "  - {name: v, hostPath: {path: /a}}\n".to_owned(),
                        "",
                        max,
                    ),
                ),
                (
                    "paths of one volume",
                    repeated(
                        &format!("{}}}\n  volumes:\n  - name: v\n    downwardAPI:\n      items:\n", containers("")),
                        |i| format!("      - {{path: p{i}, fieldRef: {{fieldPath: metadata.name}}}}\n"),
                        "",
                        max,
                    ),
                ),
                (
                    "labels",
                    repeated(
                        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels:\n",
                        |i| format!("    l{i}: x\n"),
                        "spec: {containers: [{name: c, image: i}]}\n",
                        max,
                    ),
                ),
                (
                    "tolerations",
                    repeated(
                        &format!("{}}}\n  tolerations:\n", containers("")),
                        |i| format!("  - {{key: k{i}, operator: Exists}}\n"),
                        "",
                        max,
                    ),
                ),
                (
                    "pods",
                    repeated(
                        "",
                        |i| {
                            format!(
                                "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p{i}}}\nspec: {{containers: [{{name: c, image: i}}]}}\n"
                            )
                        },
                        "",
                        max,
                    ),
                ),
                ("unknown fields", repeated(&containers("x: ["), |i| format!("{{x{i}: 1}},"), "]}\n", max)),
                ("nested", nested("[", "]", max)),
            ]
        },
        seeds: &[
            b"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  annotations: {a: b}\nspec:\n  hostNetwork: true\n  initContainers:\n  - {name: i, image: i, restartPolicy: Always}\n  containers:\n  - name: c\n    image: i\n    env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]\n    ports: [{containerPort: 80, hostPort: 80}]\n    resources: {limits: {cpu: 100m, memory: 1Gi}}\n    livenessProbe: {httpGet: {path: /, port: 80}}\n    securityContext: {runAsUser: 1, capabilities: {add: [NET_ADMIN]}}\n    volumeMounts: [{name: v, mountPath: /v, subPath: a/b}]\n  volumes:\n  - name: v\n    projected: {sources: [{downwardAPI: {items: [{path: a, fieldRef: {fieldPath: metadata.name}}]}}]}\n",
            br#"{"apiVersion":"v1","kind":"PodList","items":[{"metadata":{"name":"a"},"spec":{"containers":[{"name":"c","image":"i"}],"terminationGracePeriodSeconds":1}}]}"#,
        ],
        run: |bytes| {
            for origin in [Origin::File("/m/a.yaml".to_owned()), Origin::Http("http://a/b".to_owned())] {
                let _ = manifest::read(bytes, "node", &origin);
            }
        },
    }
}

/// Files of ConfigMaps and Secrets.
fn local_objects() -> Target {
    const HEAD: &str = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n";
    Target {
        name: "sources/local_objects",
        stack: Stack::Large,
        max_bytes: 512 * 1024,
        budget: Budget { per_mib: std::time::Duration::from_secs(12), per_byte: 400, ..Budget::LINEAR },
        worst: |max| {
            vec![
                ("values", repeated(&format!("{HEAD}data:\n"), |i| format!("  k{i}: eA==\n"), "", max)),
                ("wrong values", repeated(&format!("{HEAD}data:\n"), |i| format!("  k{i}: [1]\n"), "", max)),
                ("unknown fields", repeated(HEAD, |i| format!("x{i}: 1\n"), "", max)),
                (
                    "objects",
                    repeated(
                        "",
                        |i| format!("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m{i}}}\n"),
                        "",
                        max,
                    ),
                ),
                ("items", repeated("kind: List\nitems:\n", |_| "- {kind: Secret}\n".to_owned(), "", max)),
                ("nested", nested("[", "]", max)),
            ]
        },
        seeds: &[
            b"apiVersion: v1\nkind: Secret\nmetadata: {name: s, namespace: n}\ntype: Opaque\nimmutable: true\ndata: {k: eA==}\nstringData: {l: x}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndata: {k: x}\nbinaryData: {b: AP8=}\n",
            br#"{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Secret","metadata":{"name":"s"},"data":{"k":"eA=="}}]}"#,
        ],
        run: |bytes| {
            for exposed in [None, Some("must have mode 0600")] {
                local::decode_for_fuzzing(bytes, exposed);
            }
        },
    }
}
