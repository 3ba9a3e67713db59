//! Programs with credentials of registries that receive a token of the pod's service account.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod};
use crate::support::wait::wait_until;

const ACCOUNTS: &str = "/api/v1/namespaces/default/serviceaccounts";
const VERSION: &str = "credentialprovider.kubelet.k8s.io/v1";

fn pod_of(account: &str, name: &str, policy: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["imagePullPolicy"] = json!(policy);
    let mut pod = pod(name, json!([main]));
    pod["spec"]["serviceAccountName"] = json!(account);
    pod
}

#[test]
fn image_pulled_with_the_token_of_a_service_account_is_for_pods_of_this_account() {
    let mut node = FakeNode::join(json!({}));
    for account in ["first", "second"] {
        let metadata = json!({"name": account, "namespace": "default", "annotations": {"team": account}});
        node.api().put(&format!("{ACCOUNTS}/{account}"), json!({"metadata": metadata}));
    }
    let programs = node.path("programs");
    fs::create_dir(&programs).unwrap();
    symlink("/bin/sh", programs.join("exchange")).unwrap();
    let requests = programs.join("requests");
    let response = json!({"kind": "CredentialProviderResponse", "apiVersion": VERSION, "cacheKeyType": "Image",
        "auth": {"localhost": {"username": "exchanged", "password": "p"}}});
    let script = format!("cat >>'{0}' && echo >>'{0}'\necho '{response}'\n", requests.display());
    let attributes = json!({"serviceAccountTokenAudience": "registry", "cacheType": "ServiceAccount",
        "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["team"]});
    let config = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": [{"name": "exchange", "matchImages": ["localhost"], "defaultCacheDuration": "1h",
            "args": ["-c", script], "apiVersion": VERSION, "tokenAttributes": attributes}]});
    fs::write(node.path("providers.yaml"), config.to_string()).unwrap();
    node.stop_agent();
    node.add_flags(&[
        &format!("--image-credential-provider-config={}", node.path("providers.yaml").display()),
        &format!("--image-credential-provider-bin-dir={}", programs.display()),
    ]);
    node.start_agent();

    node.bind(&pod_of("first", "web", "Always"));
    node.wait_ready("web");
    let text = fs::read_to_string(&requests).unwrap();
    let request: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert!(
        request["serviceAccountToken"].as_str().is_some_and(|token| token.starts_with("token-of-first-")),
        "{request}"
    );
    assert_eq!(request["serviceAccountAnnotations"], json!({"team": "first"}));
    let journal = node.fake.journal();
    let pull = journal.iter().find(|entry| entry.method == "PullImage").expect("the image is pulled");
    assert_eq!(pull.request["auth"]["username"], "exchanged");
    let uid = node.api().object(&format!("{ACCOUNTS}/first")).unwrap()["metadata"]["uid"].clone();
    let expected = json!([{"uid": uid, "namespace": "default", "name": "first"}]);
    let mut records = fs::read_dir(node.root().join("image_manager/pulled")).unwrap();
    let text = fs::read_to_string(records.next().unwrap().unwrap().path()).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    let access = &record["credentialMapping"]["localhost/busybox"];
    assert_eq!(access["kubernetesServiceAccounts"], expected, "{record}");

    let pulls = node.fake.count("PullImage");
    node.bind(&pod_of("first", "same", "Never"));
    node.wait_ready("same");
    node.bind(&pod_of("second", "other", "Never"));
    wait_until("the image to be refused to a pod of another account", LONG, || {
        node.cli(&["events"]).contains("is not present with pull policy of Never")
    });
    assert!(node.running("other").is_empty());
    assert_eq!(node.fake.count("PullImage"), pulls);
    node.finish();
}
