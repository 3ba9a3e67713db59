//! Images from a registry: credentials, order of pulls, and reports of failures.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::node::{LONG, Node, condition, is_ready, simple, waiting_message, waiting_reason};
use crate::support::registry::{Registry, base64};
use crate::support::wait::{holds_for, wait_until};

fn with_image(name: &str, image: &str, policy: &str) -> Value {
    let mut manifest = simple(name);
    manifest["spec"]["containers"][0]["image"] = json!(image);
    manifest["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
    manifest
}

/// The directory of a node that is yet to start, with its root directory.
fn prepare(name: &str) -> PathBuf {
    let base = Node::base(name);
    fs::create_dir_all(base.join("root")).expect("the root directory can be made");
    base
}

/// Writes registry credentials for the node, as "docker login" does.
fn log_in(base: &Path, registry: &Registry, password: &str) {
    let auths = json!({"auths": {registry.host(): {"auth": base64(password.as_bytes())}}});
    fs::write(base.join("root/config.json"), auths.to_string()).expect("the password file is written");
}

// Runtimes: containerd 2.
#[test]
fn node_credentials_give_access_to_private_registries() {
    let base = prepare("login");
    let open = Registry::with_password(&base.join("known"), "user", "secret");
    let closed = Registry::with_password(&base.join("unknown"), "user", "other");
    log_in(&base, &open, "user:secret");
    let node = Node::start("login");
    node.apply("known.json", &with_image("known", &open.image("app"), "IfNotPresent"));
    node.apply("unknown.json", &with_image("unknown", &closed.image("app"), "IfNotPresent"));
    node.wait_ready("known");
    let pulled = node.wait_event("known", "Pulled", "Successfully pulled image");
    let words = format!("Successfully pulled image {:?} in ", open.image("app"));
    assert!(
        pulled.message.starts_with(&words) && pulled.message.contains(" including waiting). Image size: "),
        "{}",
        pulled.message
    );
    assert_eq!(node.events_with_reason("known", "Pulling").len(), 1);

    let refused = node
        .wait_pod("unknown", "in back-off", LONG, |pod| waiting_reason(pod, "main") == "ImagePullBackOff");
    let message = waiting_message(&refused, "main");
    let start = format!("Back-off pulling image {:?}: ErrImagePull: ", closed.image("app"));
    assert!(
        message.starts_with(&start) && message.len() > start.len() + 10,
        "the earlier error is reported: {message}"
    );
    let event = node.wait_event("unknown", "BackOff", "Back-off pulling image");
    assert_eq!(event.kind, "Normal");
    assert_eq!(node.wait_event("unknown", "Failed", "Failed to pull image").kind, "Warning");
    node.wait_event("unknown", "Failed", "Error: ErrImagePull");
    node.wait_event("unknown", "Failed", "Error: ImagePullBackOff");

    // The waits between two attempts grow: 10 s, then 20 s.
    wait_until("three attempts", LONG, || closed.received("app").len() >= 3);
    let tries = closed.received("app");
    let waits: Vec<f64> = tries.windows(2).map(|two| (two[1] - two[0]).as_secs_f64()).collect();
    assert!((9.5..39.5).contains(&waits[0]) && (19.5..79.5).contains(&waits[1]), "{waits:?}");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn parallel_pulls_are_limited() {
    let base = prepare("parallel");
    let registry = Registry::start(&base);
    registry.hold();
    let node =
        Node::start_with("parallel", json!({"serializeImagePulls": false, "maxParallelImagePulls": 2}));
    let names = ["one", "two", "three"];
    for name in names {
        node.apply(&format!("{name}.json"), &with_image(name, &registry.image(name), "Always"));
    }
    for name in names {
        node.wait_event(name, "Pulling", "Pulling image");
    }
    wait_until("two pulls to be under way", LONG, || registry.waiting().0 == 2);
    holds_for("the third one waits", Duration::from_secs(12), || registry.waiting() == (2, 2));
    for name in names {
        // The sandbox exists, and the status shows it, while the image is pulled.
        let seen = node.wait_pod(name, "ready to start containers", LONG, |pod| {
            condition(pod, "PodReadyToStartContainers").is_some_and(|(status, _)| status == "True")
        });
        assert_eq!(waiting_reason(&seen, "main"), "ContainerCreating");
        assert_eq!(node.running_sandboxes(name).len(), 1);
    }
    registry.release();
    let mut waits: Vec<(f64, f64)> = Vec::new();
    for name in names {
        assert!(is_ready(&node.wait_ready(name)));
        let message = node.wait_event(name, "Pulled", "Successfully pulled image").message;
        waits.push(pull_durations(&message).unwrap_or_else(|| panic!("two durations in: {message}")));
    }
    assert_eq!(registry.waiting().1, 2, "never more than two at once");
    // The event of a pull that was queued has a longer time with the wait than without it. The
    // others may have been delayed for a moment.
    let queued = waits.iter().filter(|(pull, all)| all - pull > 11.0).count();
    assert_eq!(queued, 1, "{waits:?}");
    node.finish();
}

/// The two durations of a "Successfully pulled" message, in seconds.
fn pull_durations(message: &str) -> Option<(f64, f64)> {
    let (_, rest) = message.split_once("\" in ")?;
    let (pull, rest) = rest.split_once(" (")?;
    let (all, _) = rest.split_once(" including waiting)")?;
    Some((seconds(pull)?, seconds(all)?))
}

/// A duration below an hour in Go's format.
fn seconds(text: &str) -> Option<f64> {
    if let Some(milli) = text.strip_suffix("ms") {
        return milli.parse::<f64>().ok().map(|value| value / 1000.0);
    }
    if let Some(micro) = text.strip_suffix("µs") {
        return micro.parse::<f64>().ok().map(|value| value / 1_000_000.0);
    }
    let (minutes, rest) = text.split_once('m').unwrap_or(("0", text));
    Some(minutes.parse::<f64>().ok()? * 60.0 + rest.strip_suffix('s')?.parse::<f64>().ok()?)
}

/// A credential provider for one registry that records its requests.
fn provider(base: &Path, registry: &Registry, program: &str, script: &str) {
    let bin = base.join("bin");
    fs::create_dir_all(&bin).expect("the programs' directory can be made");
    fs::write(bin.join(program), format!("#!/bin/sh\n{script}\n")).expect("the program is written");
    fs::set_permissions(bin.join(program), fs::Permissions::from_mode(0o755)).expect("its mode can be set");
    let config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": [{
            "name": program, "matchImages": [registry.host()], "defaultCacheDuration": "1h",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "args": ["get"], "env": [{"name": "NOTES", "value": base.join("notes")}],
        }],
    });
    fs::write(base.join("providers.yaml"), config.to_string()).expect("the providers' file is written");
}

fn provider_flags(base: &Path) -> [String; 2] {
    [
        format!("--image-credential-provider-config={}", base.join("providers.yaml").display()),
        format!("--image-credential-provider-bin-dir={}", base.join("bin").display()),
    ]
}

// Runtimes: containerd 2.
#[test]
fn credential_provider_supplies_credentials() {
    let base = prepare("provider");
    let registry = Registry::with_password(&base, "robot", "token");
    let response = json!({
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
        "cacheKeyType": "Registry", "auth": {registry.host(): {"username": "robot", "password": "token"}},
    });
    provider(&base, &registry, "vault", &format!("cat >> $NOTES; echo \" $1\" >> $NOTES; echo '{response}'"));
    let mut node = Node::prepare("provider", json!({}));
    node.set_flags(&provider_flags(&base));
    node.start_agent();
    node.apply("one.json", &with_image("one", &registry.image("one"), "IfNotPresent"));
    node.wait_ready("one");
    node.apply("two.json", &with_image("two", &registry.image("two"), "IfNotPresent"));
    node.wait_ready("two");
    let notes = fs::read_to_string(base.join("notes")).unwrap_or_default();
    let requests: Vec<&str> = notes.lines().collect();
    assert_eq!(requests.len(), 1, "the answer holds for the whole registry: {notes}");
    assert!(
        requests[0].contains("CredentialProviderRequest")
            && requests[0].contains(&format!("{}/one", registry.host()))
            && requests[0].ends_with(" get"),
        "{notes}"
    );
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn failing_credential_provider_does_not_prevent_pulls() {
    let base = prepare("provfail");
    let registry = Registry::start(&base);
    provider(&base, &registry, "broken", "cat >> $NOTES; exit 1");
    let mut node = Node::prepare("provfail", json!({}));
    node.set_flags(&provider_flags(&base));
    node.start_agent();
    node.apply("one.json", &with_image("one", &registry.image("one"), "IfNotPresent"));
    node.wait_ready("one");
    assert!(
        fs::read_to_string(base.join("notes")).unwrap_or_default().contains("CredentialProviderRequest"),
        "it was asked"
    );
    node.finish();

    // A provider whose program does not exist prevents the start of the agent.
    let base = prepare("provnone");
    provider(&base, &registry, "absent", "exit 0");
    fs::remove_file(base.join("bin/absent")).expect("the program was there");
    let mut node = Node::prepare("provnone", json!({}));
    node.set_flags(&provider_flags(&base));
    node.launch_agent();
    let (status, log) = node.wait_ended();
    assert!(!status.success(), "{status}");
    assert!(log.contains("absent"), "the log names the program: {log}");
}
