//! The node API as the API server and its users reach it.

use std::path::Path;

use serde_json::{Value, json};

use crate::joined::{Joined, LIMIT, patience, served, shared, text};
use crate::support::control_plane::ControlPlane;
use crate::support::launch::over;
use crate::support::tls_client::{Answer, Identity, TlsClient};
use crate::support::wait::{wait_for, wait_until};

/// The certificate of a kubeconfig.
fn identity(kubeconfig: &Path) -> Identity {
    let file = coracle::config::kubeconfig::load(kubeconfig).expect("a kubeconfig");
    let credentials = coracle::kube::kubeconfig::credentials(&file, kubeconfig).expect("credentials");
    let identity = credentials.endpoint.identity.expect("a certificate");
    let pem = |bytes| String::from_utf8(bytes).expect("PEM");
    Identity { certificate: pem(identity.certificate), key: pem(identity.key) }
}

/// A path of the node's API by way of the API server.
fn by_proxy(plane: &ControlPlane, node: &str, path: &str) -> Result<String, String> {
    let output = plane.try_kubectl(&["get", "--raw", &format!("/api/v1/nodes/{node}/proxy{path}")], "");
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// The node's request for a serving certificate.
fn request(plane: &ControlPlane, node: &str) -> Option<Value> {
    let user = format!("system:node:{node}");
    let list = plane.get(&["csr"])?;
    let all = list["items"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|csr| {
        text(csr, "/spec/signerName") == "kubernetes.io/kubelet-serving"
            && text(csr, "/spec/username") == user
    })
}

#[test]
fn the_api_server_and_its_users_are_let_in_as_they_may() {
    let plane = shared();
    let config = over(served(plane), json!({"serverTLSBootstrap": true}));
    let mut config = config;
    config["authentication"]["anonymous"]["enabled"] = json!(true);
    let joined = Joined::prepare(plane, "door", config).start_and_wait();
    let port =
        joined.object().expect("the node is there")["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok())
            .expect("the node tells its port");

    // Without a certificate there is no handshake; with the one that was asked for there is.
    assert!(by_proxy(plane, "door", "/healthz").is_err());
    let csr = wait_for("a request for a serving certificate", patience(), || request(plane, "door"));
    let name = text(&csr, "/metadata/name").to_owned();
    plane.kubectl(&["certificate", "approve", &name]);
    wait_until("the API server to reach the node", LIMIT, || by_proxy(plane, "door", "/healthz").is_ok());
    assert_eq!(by_proxy(plane, "door", "/healthz").as_deref(), Ok("ok"));
    let metrics = by_proxy(plane, "door", "/metrics").expect("the metrics are there");
    assert!(metrics.contains("kubelet_node_name{node=\"door\"} 1"), "{metrics:.2000}");
    assert!(by_proxy(plane, "door", "/pods").is_ok_and(|pods| pods.contains("\"PodList\"")));

    // Those that come straight to it.
    let client = TlsClient::new(port, None);
    let said = |answer: Answer| (answer.status, answer.body);
    let forbidden = |user: &str, subresources: &str| {
        let text =
            format!("Forbidden (user={user}, verb=get, resource=nodes, subresource(s)=[{subresources}])\n");
        (403, text)
    };
    assert_eq!(said(client.get("/metrics")), forbidden("system:anonymous", "metrics"));
    let forged = "X-Remote-User: admin\r\nX-Remote-Group: system:masters\r\nImpersonate-User: admin\r\n";
    assert_eq!(said(client.get_with("/pods", forged)), forbidden("system:anonymous", "pods proxy"));
    assert_eq!(said(client.get_by("/metrics", "nonsense")), (401, "Unauthorized".to_owned()));
    for account in ["door-scraper", "door-nobody"] {
        plane.kubectl(&["create", "serviceaccount", account]);
    }
    plane.kubectl(&["create", "clusterrole", "door-metrics", "--verb=get", "--resource=nodes/metrics"]);
    plane.kubectl(&[
        "create",
        "clusterrolebinding",
        "door-metrics",
        "--clusterrole=door-metrics",
        "--serviceaccount=default:door-scraper",
    ]);
    let token = |account: &str| plane.kubectl(&["create", "token", account]).trim().to_owned();
    let (scraper, nobody) = (token("door-scraper"), token("door-nobody"));
    let user = |account: &str| format!("system:serviceaccount:default:{account}");
    // The answer to who may what is some moments old.
    wait_until("the right to be known", LIMIT, || client.get_by("/metrics", &scraper).status == 200);
    assert_eq!(client.get_by("/metrics/probes", &scraper).status, 200);
    assert_eq!(said(client.get_by("/pods", &scraper)), forbidden(&user("door-scraper"), "pods proxy"));
    assert_eq!(said(client.get_by("/metrics", &nobody)), forbidden(&user("door-nobody"), "metrics"));

    // Another node is nobody here, the administrator somebody.
    let other = identity(&plane.node_kubeconfig("door-other"));
    let answer = TlsClient::new(port, Some(&other)).get("/pods");
    assert_eq!(said(answer), forbidden("system:node:door-other", "pods proxy"));
    let admin = identity(&plane.admin_kubeconfig());
    assert_eq!(said(TlsClient::new(port, Some(&admin)).get("/healthz")), (200, "ok".to_owned()));

    for (kind, name) in [
        ("serviceaccount", "door-scraper"),
        ("serviceaccount", "door-nobody"),
        ("clusterrolebinding", "door-metrics"),
        ("clusterrole", "door-metrics"),
        ("csr", name.as_str()),
    ] {
        plane.kubectl(&["delete", kind, name]);
    }
    joined.finish(&[]);
}
