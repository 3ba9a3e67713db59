//! What starts without the API server, and what waits for it.

use coracle::transport::grpc::Kind;
use jiff::Timestamp;

use crate::support::node::restarts;

use super::*;

const ACCOUNT: &str = "/api/v1/namespaces/default/serviceaccounts/default";
const BUNDLE: &str = "/apis/certificates.k8s.io/v1/clustertrustbundles/roots";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/namespaces/default/podcertificaterequests";

pub(super) fn node_path() -> String {
    format!("/api/v1/nodes/{NODE}")
}

/// Waits until so many pods are stored with their statuses.
pub(super) fn wait_stored_pods(node: &FakeNode, pods: u64) {
    wait_until("the pods to be stored", LONG, || {
        let objects = &status(node)["offline"]["objects"];
        ["node", "pod", "podstatus"].iter().all(|kind| objects[kind].as_u64().unwrap_or(0) >= 1)
            && objects["pod"] == pods
            && objects["podstatus"] == pods
    });
}

/// Waits until the check finds that the pod could start alone.
fn wait_checked(node: &FakeNode, pod: &str) {
    wait_until("the pod to be complete in the store", LONG, || {
        node.command(&["offline", "check", pod]).status.success()
    });
}

/// The machine restarts, and the API server is away.
pub(super) fn restart_alone(node: &mut FakeNode) {
    node.api().go_down();
    node.stop_agent();
    node.cut_power();
    node.fake.clear_journal();
    node.start_agent();
    wait_phase(node, "alone");
}

/// A node of a cluster with the ready and stored pod "web", whose image has the policy `Always`.
fn joined_with_policy_always(config: Value) -> FakeNode {
    let node = joined(config);
    let mut web = simple("web");
    web["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    node.bind(&web);
    node.wait_ready("web");
    wait_stored_pods(&node, 1);
    node
}

/// Ends the container of the pod "web", and waits for the next one.
pub(super) fn end_container(node: &FakeNode) {
    let running = node.running("web");
    assert!(node.fake.kill_container(&running["main"][0], 1));
    wait_until("the container to be started again", LONG, || {
        let now = node.running("web");
        now.contains_key("main") && now != running
    });
}

/// Gives the next start of the agent these programs for credentials.
fn set_credential_providers(node: &mut FakeNode, programs: &Path, config: &Value) {
    fs::write(node.path("providers.yaml"), config.to_string()).unwrap();
    node.add_flags(&[
        &format!("--image-credential-provider-config={}", node.path("providers.yaml").display()),
        &format!("--image-credential-provider-bin-dir={}", programs.display()),
    ]);
}

/// The policy `Always` is the default of the tag `latest`.
#[test]
fn present_image_with_the_policy_always_is_used_while_the_registry_is_away_as_well() {
    let mut node = joined_with_policy_always(json!({}));
    wait_checked(&node, "web");
    let error = "failed to do request: Head \"https://registry.test/v2/\": dial tcp: lookup registry.test: \
                 no such host";
    node.fake.fail("PullImage", Kind::Unknown, error);
    restart_alone(&mut node);
    node.wait_ready("web");
    let events = wait_event(&node, "its registry does not respond");
    assert_eq!(events.matches("its registry does not respond").count(), 1, "{events}");
    assert!(!events.contains("Failed to pull"), "{events}");
    let running = node.running("web");

    // With the API server, a new container pulls as ever.
    node.fake.behave("PullImage");
    node.api().go_up();
    wait_phase(&node, "online");
    assert_eq!(node.running("web"), running);
    let pulls = node.fake.count("PullImage");
    end_container(&node);
    assert!(node.fake.count("PullImage") > pulls);
    node.finish();
}

/// Four programs that hang for their own minute, one after the other, would take longer than the test waits.
#[test]
fn programs_for_credentials_that_hang_delay_a_present_image_for_a_short_time_only() {
    let mut node = joined_with_policy_always(json!({}));
    wait_checked(&node, "web");
    let programs = node.path("programs");
    fs::create_dir(&programs).unwrap();
    let providers = ["a", "b", "c", "d"].map(|name| {
        std::os::unix::fs::symlink("/bin/sleep", programs.join(name)).unwrap();
        json!({"name": name, "matchImages": ["localhost"], "defaultCacheDuration": "1h", "args": ["3600"],
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1"})
    });
    let config = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": providers});
    set_credential_providers(&mut node, &programs, &config);
    node.fake.fail("PullImage", Kind::Unknown, "dial tcp: lookup registry.test: no such host");
    restart_alone(&mut node);
    node.wait_ready("web");
    assert!(node.log().contains("credential provider d has no answer"), "{}", node.log());
    wait_event(&node, "its registry does not respond");
    node.fake.behave("PullImage");
    node.api().go_up();
    wait_phase(&node, "online");
    node.finish();
}

/// The program hangs in its first run only. The registry responds and refuses the pull without its response.
#[test]
fn program_for_credentials_that_is_slow_gets_its_own_time_when_the_registry_refuses_the_pull() {
    let mut node = joined_with_policy_always(json!({}));
    wait_checked(&node, "web");
    let programs = node.path("programs");
    fs::create_dir(&programs).unwrap();
    std::os::unix::fs::symlink("/bin/sh", programs.join("slow")).unwrap();
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let response = json!({"kind": "CredentialProviderResponse", "apiVersion": version, "cacheKeyType": "Image",
        "auth": {"localhost": {"username": "u", "password": "p"}}});
    let script = format!(
        "mkdir '{}' && exec sleep 3600\ncat >/dev/null\necho '{response}'\n",
        programs.join("has-run").display()
    );
    let config = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": [{"name": "slow", "matchImages": ["localhost"], "defaultCacheDuration": "1h",
            "args": ["-c", script], "apiVersion": version}]});
    set_credential_providers(&mut node, &programs, &config);
    node.fake.fail_times(
        "PullImage",
        1,
        Kind::Unknown,
        "unexpected status from HEAD request: 401 Unauthorized",
    );
    restart_alone(&mut node);
    node.wait_ready("web");
    let events = wait_event(&node, "Successfully pulled image");
    assert!(!events.contains("Failed to pull"), "{events}");
    node.api().go_up();
    wait_phase(&node, "online");
    node.finish();
}

/// The phase stays `online` without a new start of the agent: what counts is the lease, which cannot be renewed.
#[test]
fn present_image_with_the_policy_always_is_used_when_the_lease_of_an_online_node_has_ended() {
    let node = joined_with_policy_always(json!({"nodeLeaseDurationSeconds": 4}));
    node.fake.fail("PullImage", Kind::Unknown, "dial tcp: lookup registry.test: no such host");
    node.api().go_down();
    wait_until("the lease to end", LONG, || {
        status(&node)["offline"]["secondsSinceContact"].as_u64().unwrap_or(0) > 4
    });
    end_container(&node);
    wait_event(&node, "its registry does not respond");
    assert_eq!(status(&node)["offline"]["phase"], "online");
    node.fake.behave("PullImage");
    node.api().go_up();
    node.finish();
}

/// The registry responds, and refuses the image.
#[test]
fn present_image_with_the_policy_always_is_not_used_if_the_registry_refuses_it() {
    let mut node = joined_with_policy_always(json!({}));
    node.fake.fail("PullImage", Kind::Unknown, "unexpected status from HEAD request: 401 Unauthorized");
    restart_alone(&mut node);
    wait_until("the pull to fail", LONG, || node.cli(&["events", "-o", "json"]).contains("401 Unauthorized"));
    assert!(!was_requested(&node, "CreateContainer", "web"), "{:?}", node.fake.calls());
    node.fake.behave("PullImage");
    node.wait_ready("web");
    node.api().go_up();
    wait_phase(&node, "online");
    node.finish();
}

/// The stored Node object is older than the label that brought the pod here.
#[test]
fn pod_that_the_stored_node_excludes_waits_for_the_server_and_starts_then() {
    let mut node = joined(json!({}));
    let set_label = |node: &FakeNode, value: Value| {
        let mut object = node.api().object(&node_path()).expect("the node is registered");
        object["metadata"]["labels"]["example.org/rack"] = value;
        node.api().put(&node_path(), object);
    };
    let is_stored_with = |node: &FakeNode, label: &str| {
        let files = fs::read_dir(node.root().join("offline")).into_iter().flatten().flatten();
        let mut files = files.filter(|file| file.file_name().to_string_lossy().starts_with("node-"));
        files.any(|file| read_lossy(&file.path()).contains(label))
    };
    set_label(&node, json!("seven"));
    let mut web = simple("web");
    web["spec"]["nodeSelector"] = json!({"example.org/rack": "seven"});
    node.bind(&web);
    node.bind(&simple("other"));
    node.wait_ready("web");
    node.wait_ready("other");
    wait_stored_pods(&node, 2);
    set_label(&node, json!("eight"));
    wait_until("the other label to be stored", LONG, || is_stored_with(&node, "eight"));

    restart_alone(&mut node);
    node.wait_ready("other");
    wait_until("the pod to wait", LONG, || {
        node.pod("web").and_then(|pod| pod.status).is_some_and(|status| {
            status.phase.as_deref() == Some("Pending") && status.reason.as_deref() == Some("NodeAffinity")
        })
    });
    assert!(!was_requested(&node, "RunPodSandbox", "web"), "{:?}", node.fake.calls());
    wait_until("the event", LONG, || {
        node.cli(&["events", "-o", "json"]).contains("waits until the API server is back")
    });
    let other = node.running("other");

    set_label(&node, json!("seven"));
    node.api().go_up();
    wait_phase(&node, "online");
    node.wait_ready("web");
    assert_eq!(node.running("other"), other);
    wait_until("the status to be reported", LONG, || node.shown("web").is_some_and(|pod| is_ready(&pod)));
    node.finish();
}

/// The key of the certificate is in clear nowhere on the disk.
#[test]
fn trust_bundles_and_certificates_of_pods_are_there_without_the_server() {
    let mut node = joined(json!({}));
    let certificate =
        |base64: &str| format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END CERTIFICATE-----\n");
    node.api().put(ACCOUNT, json!({"metadata": {"name": "default", "namespace": "default"}}));
    node.api().put(BUNDLE, json!({"spec": {"trustBundle": certificate("cm9vdA==")}}));
    let mut main = busybox("main", FOREVER);
    main["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    let mut web = pod("web", json!([main]));
    web["spec"]["serviceAccountName"] = json!("default");
    web["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [
        {"clusterTrustBundle": {"name": "roots", "path": "ca.pem"}},
        {"clusterTrustBundle": {"name": "none", "optional": true, "path": "none.pem"}},
        {"podCertificate": {"signerName": "x.org/signer", "keyType": "ED25519", "keyPath": "key.pem",
            "certificateChainPath": "chain.pem"}}]}}]);
    node.bind(&web);
    let mut issued =
        wait_for("the request for a certificate", LONG, || node.api().objects(REQUESTS).first().cloned());
    issued["status"] = json!({
        "conditions": [{"type": "Issued", "status": "True", "reason": "Test", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        "certificateChain": certificate("b25l"),
        "notBefore": "2026-01-01T00:00:00Z",
        "beginRefreshAt": "2998-01-01T00:00:00Z",
        "notAfter": "2999-01-01T00:00:00Z",
    });
    let name = issued["metadata"]["name"].as_str().expect("the request has a name").to_owned();
    node.api().put(&format!("{REQUESTS}/{name}"), issued);
    node.wait_ready("web");
    wait_stored_pods(&node, 1);
    wait_until("the certificates to be stored", LONG, || {
        let objects = &status(&node)["offline"]["objects"];
        objects["trustbundles"] == 2 && objects["podcertificate"] == 1
    });
    wait_checked(&node, "web");
    let paths = ["ca.pem", "none.pem", "key.pem", "chain.pem"]
        .map(|file| volume(&node, "web", "projected", &format!("v/{file}")));
    let texts = || paths.each_ref().map(|path| read(path));
    let before = texts();
    assert!(before[2].starts_with("-----BEGIN PRIVATE KEY-----\n"), "{}", before[3]);
    let key = before[2].lines().nth(1).expect("the key has a second line");

    restart_alone(&mut node);
    node.wait_ready("web");
    assert!(texts() == before, "the files are other ones");
    assert_eq!(files_with(&node.path(""), &[key]), [""; 0].map(PathBuf::from));
    node.api().go_up();
    wait_phase(&node, "online");
    node.finish();
}

/// The time at which a token of the fake API server ends, in seconds since 1970.
fn token_end(token: &str) -> i64 {
    let end = token.rsplit('-').next().and_then(|end| end.parse().ok());
    end.unwrap_or_else(|| panic!("no token of the API server: {token:?}"))
}

/// Pods are not synced without a cause, so that the renewal is the effect of the return.
#[test]
fn expired_tokens_are_mounted_with_one_event_for_each_pod_and_replaced_at_the_return() {
    const SECONDS: i64 = 10;
    let mut node = joined(json!({"syncFrequency": "1h"}));
    node.api().token_seconds(Some(SECONDS));
    put_objects(&node);
    for name in ["web", "other"] {
        let mut manifest = manifest(name);
        // A second token.
        push(
            &mut manifest["spec"]["volumes"],
            json!({"name": "vault", "projected": {"sources": [
                {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 3600}}]}}),
        );
        push(
            &mut manifest["spec"]["containers"][0]["volumeMounts"],
            json!({"name": "vault", "mountPath": "/vault"}),
        );
        node.bind(&manifest);
    }
    ["web", "other"].iter().for_each(|name| drop(node.wait_ready(name)));
    wait_stored(&node, 2);
    ["web", "other"].iter().for_each(|name| wait_checked(&node, name));
    let files: Vec<PathBuf> = ["web", "other"]
        .iter()
        .flat_map(|pod| ["token/token", "vault/token"].map(|file| volume(&node, pod, "projected", file)))
        .collect();

    node.api().go_down();
    node.stop_agent();
    let end = Timestamp::now().as_second() + SECONDS;
    wait_until("the end of all tokens", LONG, || Timestamp::now().as_second() > end);
    node.cut_power();
    node.start_agent();
    wait_phase(&node, "alone");
    ["web", "other"].iter().for_each(|name| drop(node.wait_ready(name)));
    let expired: Vec<String> = files.iter().map(|file| read(file)).collect();
    for token in &expired {
        assert!(token.starts_with(TOKEN[0]) && token_end(token) <= end, "{token}");
    }
    let is_single = |events: &[Value]| events.len() == 1 && events[0]["count"] == 1;
    for name in ["web", "other"] {
        let events = wait_pod_events(&node, name, "ExpiredTokenUsed");
        assert!(is_single(&events), "{events:?}");
    }
    let running = ["web", "other"].map(|name| node.running(name));

    node.api().token_seconds(None);
    node.api().go_up();
    wait_phase(&node, "online");
    for (file, expired) in files.iter().zip(&expired) {
        wait_until(&format!("a new token in {}", file.display()), LONG, || {
            let token = read(file);
            token != *expired && token.starts_with(TOKEN[0]) && token_end(&token) > end + SECONDS
        });
    }
    let reported = |name: &str| {
        let events = node.api().objects("/api/v1/namespaces/default/events");
        events_of_pod(events, name, "ExpiredTokenUsed")
    };
    for name in ["web", "other"] {
        wait_until("the event to be reported", LONG, || !reported(name).is_empty());
        assert!(is_single(&reported(name)), "{:?}", reported(name));
    }
    assert_eq!(["web", "other"].map(|name| node.running(name)), running, "no container restarts");
    node.finish();
}

/// As with a CNI plugin that starts late, or needs the API server.
#[test]
fn network_that_is_not_ready_delays_only_pods_with_a_network_of_their_own() {
    let mut node = joined(json!({}));
    let mut host = simple("host");
    host["spec"]["hostNetwork"] = json!(true);
    node.bind(&host);
    node.bind(&simple("web"));
    node.wait_ready("host");
    node.wait_ready("web");
    wait_stored_pods(&node, 2);
    node.fake.set_condition("NetworkReady", false, "NetworkPluginNotReady", "cni plugin not initialized");
    restart_alone(&mut node);
    node.wait_ready("host");
    wait_pod_events(&node, "web", "NetworkNotReady");
    assert!(!was_requested(&node, "RunPodSandbox", "web"), "{:?}", node.fake.calls());
    wait_until("the network in the status", LONG, || {
        let output = node.command(&["status"]);
        String::from_utf8_lossy(&output.stdout).contains("cni plugin not initialized")
    });

    node.fake.set_condition("NetworkReady", true, "", "");
    node.wait_ready("web");
    // Only that of the power cut: a pod that waits does not count.
    node.wait_pod("web", "ready after one restart", LONG, |pod| is_ready(pod) && restarts(pod, "main") == 1);
    assert_eq!(status(&node)["offline"]["phase"], "alone");
    let running = ["host", "web"].map(|name| node.running(name));
    node.api().go_up();
    wait_phase(&node, "online");
    wait_until("the pods to be reported", LONG, || {
        ["host", "web"].iter().all(|name| node.shown(name).is_some_and(|pod| is_ready(&pod)))
    });
    assert_eq!(["host", "web"].map(|name| node.running(name)), running, "no container restarts");
    node.finish();
}

/// The text of a file with other bytes in it.
pub(super) fn read_lossy(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
