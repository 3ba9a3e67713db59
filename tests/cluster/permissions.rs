//! The requests of a node to the API server are permitted, and no secret appears elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, pod, text};
use crate::recording::{requests_by, without_early_refusals};
use crate::support::control_plane::{ControlPlane, ControlPlaneOptions};
use crate::support::launch::skip_on_go_kubelet;
use crate::support::node::{FOREVER, Node, busybox, simple};
use crate::support::registry::{Registry, base64};

/// Every kind of request that the agent makes: the verb, the resource and the subresource, and
/// whether this scenario surely brings it about. The first two are made as the user of the
/// bootstrap token, or by the node for its next certificate.
const KINDS: &[(&str, bool)] = &[
    ("create certificatesigningrequests", true),
    ("get certificatesigningrequests", true),
    ("create nodes", true),
    ("patch nodes", false),
    ("patch nodes/status", true),
    ("get nodes", false),
    ("watch nodes", true),
    ("get leases", true),
    ("create leases", true),
    ("update leases", true),
    ("watch services", true),
    ("watch pods", true),
    ("get pods", false),
    ("create pods", true),
    ("delete pods", true),
    ("patch pods/status", true),
    ("create events", true),
    ("patch events", false),
    ("watch configmaps", true),
    ("watch secrets", true),
    // When the watch began before the API server knew the node of the pod.
    ("list configmaps", false),
    ("list secrets", false),
    ("get configmaps", false),
    ("get secrets", false),
    ("get runtimeclasses", false),
    ("create serviceaccounts/token", true),
    // At the start, when no driver has registered.
    ("deletecollection resourceslices", true),
];

const PASSWORD: &str = "swordfish-of-the-registry";
const SECRET: &str = "swordfish-of-the-volume";

/// A node that joins by token, with as many log lines as there are.
fn prepare<'a>(plane: &'a ControlPlane, name: &'static str) -> JoinedNode<'a> {
    let dir = Node::base(name);
    let flags = [
        "--kubeconfig",
        &dir.join("root/kubelet.conf").display().to_string(),
        "--bootstrap-kubeconfig",
        &plane.bootstrap_kubeconfig().display().to_string(),
        "--cert-dir",
        &dir.join("root/pki").display().to_string(),
        "--v=10",
    ];
    JoinedNode::prepare_with(plane, name, json!({"rotateCertificates": true}), &flags)
}

/// A pod with everything that comes from the API server.
fn rich(image: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["image"] = json!(image);
    main["imagePullPolicy"] = json!("Always");
    main["env"] = json!([
        {"name": "PW", "valueFrom": {"secretKeyRef": {"name": "rights-secret", "key": "pw"}}},
        {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "rights-cm", "key": "k"}}},
    ]);
    main["envFrom"] = json!([{"secretRef": {"name": "rights-secret"}}]);
    main["volumeMounts"] = json!([
        {"name": "cm", "mountPath": "/cm"}, {"name": "secret", "mountPath": "/secret"},
        {"name": "all", "mountPath": "/all"}, {"name": "secret", "mountPath": "/one", "subPath": "pw"},
    ]);
    let mut rich = pod("rights-rich", json!([main]));
    rich["spec"]["imagePullSecrets"] = json!([{"name": "rights-pull"}]);
    rich["spec"]["volumes"] = json!([
        {"name": "cm", "configMap": {"name": "rights-cm"}},
        {"name": "secret", "secret": {"secretName": "rights-secret"}},
        {"name": "all", "projected": {"sources": [
            {"secret": {"name": "rights-secret"}},
            {"configMap": {"name": "rights-cm"}},
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600, "audience": "rights"}},
        ]}},
    ]);
    rich
}

/// All files below a directory, but not on other file systems' links.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let kind = entry.file_type().expect("the entry has a type");
        if kind.is_dir() {
            files(&entry.path(), found);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(dir, &mut found);
    found
}

/// `None` when the file was just removed.
fn mode(path: &Path) -> Option<u32> {
    path.metadata().ok().map(|file| file.permissions().mode() & 0o777)
}

/// The lines of the private keys in PEM files: what a leak would hold.
fn key_lines(text: &str) -> Vec<String> {
    let mut inside = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.starts_with("-----") {
            inside = line.contains("BEGIN") && line.contains("PRIVATE KEY");
        } else if inside && line.len() > 40 {
            lines.push(line.to_owned());
        }
    }
    lines
}

/// Every secret that must not appear: its name and its text.
fn secrets(plane: &ControlPlane, root: &Path) -> Vec<(String, String)> {
    let mut secrets = vec![
        ("the secret's value".to_owned(), SECRET.to_owned()),
        ("the secret's value in base64".to_owned(), base64(SECRET.as_bytes())),
        ("the password".to_owned(), PASSWORD.to_owned()),
        ("the password in base64".to_owned(), base64(format!("user:{PASSWORD}").as_bytes())),
    ];
    let bootstrap = fs::read_to_string(plane.bootstrap_kubeconfig()).expect("the bootstrap kubeconfig");
    let token = bootstrap.lines().find_map(|line| line.split_once("token")).expect("it has a token").1;
    let token = token.trim_matches(|character: char| !character.is_ascii_alphanumeric());
    let token = token.split(['"', ',', '}']).next().unwrap_or_default();
    assert!(token.len() > 16 && token.contains('.'), "{token:?}");
    secrets.push(("the bootstrap token".to_owned(), token.to_owned()));
    for path in files_below(root) {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for line in key_lines(&text) {
            secrets.push((format!("the key of {}", path.display()), line));
        }
        if path.ends_with("token") {
            secrets.push((format!("the token {}", path.display()), text.trim().to_owned()));
        }
    }
    let count = |what: &str| secrets.iter().filter(|(name, _)| name.contains(what)).count();
    assert!(
        count("the key of") >= 2 && count("the token /") >= 2,
        "{:?}",
        secrets.iter().map(|(name, _)| name).collect::<Vec<_>>()
    );
    secrets
}

fn assert_none(secrets: &[(String, String)], place: &str, text: &str) {
    for (what, secret) in secrets {
        assert!(!text.contains(secret.as_str()), "{what} is in {place}");
    }
}

// Runtimes: containerd 2, former control plane.
#[test]
fn node_sends_only_permitted_requests_and_leaks_no_secret() {
    if skip_on_go_kubelet("rights", "the list is of coracle's requests, and the logs are coracle's") {
        return;
    }
    let plane = ControlPlane::start_with(
        &directory("rights-cp"),
        &ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() },
    );
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    plane.wait(&["configmap", "kube-root-ca.crt"], "made", LIMIT, |_| true);
    let registry = Registry::with_password(&directory("rights-images"), "user", PASSWORD);
    let meta = |name: &str| json!({"name": name, "namespace": "default"});
    plane.apply(
        &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("rights-cm"), "data": {"k": "v"}}),
    );
    plane.apply(&json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta("rights-secret"), "stringData": {"pw": SECRET}}));
    let auths = json!({"auths": {registry.host(): {"auth": base64(format!("user:{PASSWORD}").as_bytes())}}});
    plane.apply(&json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": meta("rights-pull"),
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": auths.to_string()},
    }));

    let mut joined = prepare(&plane, "rights");
    joined.node.apply("st.json", &simple("st"));
    joined.node.start_agent();
    joined.wait_node_ready();
    let mut refused = pod("rights-refused", json!([busybox("main", FOREVER)]));
    refused["spec"]["nodeSelector"] = json!({"example.org/none": "x"});
    joined.bind(&refused);
    let mut missing = pod("rights-missing", json!([busybox("main", FOREVER)]));
    missing["spec"]["containers"][0]["envFrom"] = json!([{"secretRef": {"name": "rights-none"}}]);
    joined.bind(&missing);
    joined.bind(&pod("rights-crash", json!([busybox("main", "exit 3")])));
    joined.bind(&pod("rights-forced", json!([busybox("main", FOREVER)])));
    joined.wait_ready("rights-forced");
    joined.wait_ready("st-rights");
    joined.wait_pod("rights-refused", "refused", |pod| text(pod, "/status/reason") == "NodeAffinity");
    joined.wait_pod("rights-crash", "restarted", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)
    });
    joined.wait_pod("rights-missing", "waiting", |pod| {
        text(pod, "/status/containerStatuses/0/state/waiting/reason") == "CreateContainerConfigError"
    });
    // Last: an image that was pulled with credentials is not available to pods without them.
    joined.bind(&rich(&format!("{}/rights:1", registry.host())));
    joined.wait_ready("rights-rich");
    let key_files = |dir: &Path| {
        let keys: Vec<PathBuf> = files_below(dir)
            .into_iter()
            .filter(|path| fs::read_to_string(path).is_ok_and(|text| !key_lines(&text).is_empty()))
            .collect();
        assert!(!keys.is_empty(), "{keys:?}");
        for path in keys {
            // It may have been a temporary file.
            assert!(mode(&path).is_none_or(|mode| mode == 0o600), "{}", path.display());
        }
    };
    let root = joined.node.root();
    key_files(&root);
    let secrets = secrets(&plane, &root);

    // The value is in its place, so that the search is able to find it elsewhere.
    assert!(files_below(&root).iter().any(|path| fs::read_to_string(path).is_ok_and(|text| text == SECRET)));

    // The output of the node itself.
    for args in [
        &["status"][..],
        &["pods"],
        &["events"],
        &["pods", "-o", "json"],
        &["status", "-o", "json"],
        &["events", "-o", "json"],
        &["describe", "rights-rich"],
    ] {
        let output = joined.node.command(args);
        let printed = [output.stdout, output.stderr].concat();
        assert_none(&secrets, &format!("coracle {args:?}"), &String::from_utf8_lossy(&printed));
    }
    for page in ["/pods", "/metrics", "/configz", "/healthz?verbose", "/runningpods"] {
        assert_none(&secrets, page, &joined.node.read_only(page).1);
    }

    // Files: pods' volumes have the modes that the pods ask for, below a directory that only root can enter.
    assert_eq!(mode(&root.join("pods")).map(|mode| mode & 0o007), Some(0));
    for path in files_below(&root) {
        let of_volume = path.strip_prefix(&root).is_ok_and(|path| {
            path.components().nth(2).is_some_and(|component| {
                component.as_os_str() == "volumes" || component.as_os_str() == "volume-subpaths"
            })
        });
        if of_volume || mode(&path).is_none_or(|mode| mode & 0o077 == 0) {
            continue;
        }
        let text = fs::read(&path).unwrap_or_default();
        assert_none(&secrets, &path.display().to_string(), &String::from_utf8_lossy(&text));
    }

    // After a restart it knows its pods; then some are deleted, one by force.
    joined.node.stop_agent();
    joined.node.start_agent();
    joined.wait_node_ready();
    plane.kubectl(&["label", "pod", "rights-rich", "again=yes"]);
    plane.kubectl(&["delete", "pod", "rights-forced", "--force", "--grace-period=0", "--wait=false"]);
    joined.node.remove("st.json");
    joined.wait_gone("st-rights");
    let events = plane.kubectl(&["get", "events", "-A", "-o", "json"]);
    assert_none(&secrets, "the events", &events);
    let rest = ["rights-rich", "rights-refused", "rights-missing", "rights-crash", "rights-forced"];
    let logs = [1, 2].map(|start| directory("rights").join(format!("agent-{start}.log")));
    for name in rest {
        plane.kubectl(&["delete", "pod", name, "--ignore-not-found", "--wait=false", "--grace-period=1"]);
    }
    for name in rest {
        joined.wait_gone(name);
    }
    joined.node.stop_agent();
    for log in &logs {
        let logged = fs::read(log).expect("the agent's log");
        assert!(logged.len() > 1000);
        assert_none(&secrets, "the log", &String::from_utf8_lossy(&logged));
    }
    key_files(&root);

    // Every kind of request, and its responses.
    let log = plane.requests();
    let users: BTreeSet<&str> = log.iter().map(|entry| text(entry, "/user/username")).collect();
    let mut seen: BTreeMap<String, BTreeMap<u64, usize>> = BTreeMap::new();
    let mut refused = Vec::new();
    for user in users {
        for request in without_early_refusals(requests_by(&log, user)) {
            if request.code == 403 {
                refused.push(format!(
                    "{:.2} {user} {} {} {}",
                    request.time,
                    request.verb,
                    request.path,
                    request.selector()
                ));
            }
            *seen.entry(request.kind()).or_default().entry(request.code).or_default() += 1;
        }
    }
    println!("{:<44} answers", "request");
    for (kind, codes) in &seen {
        println!("{kind:<44} {codes:?}");
    }
    for kind in seen.keys() {
        assert!(KINDS.iter().any(|(listed, _)| listed == kind), "a new kind of request: {kind}");
    }
    for (kind, sure) in KINDS {
        assert!(!sure || seen.contains_key(*kind), "not requested any more: {kind}");
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}
