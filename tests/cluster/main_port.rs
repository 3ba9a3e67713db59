//! The node API as the API server and its users reach it.

use std::path::Path;

use coracle::util::secret::Secret;
use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, patience, served, shared, text};
use crate::support::control_plane::ControlPlane;
use crate::support::launch::merged;
use crate::support::tls_client::{Identity, Response, TlsClient};
use crate::support::wait::{wait_for, wait_until};

/// The certificate of a kubeconfig.
fn identity(kubeconfig: &Path) -> Identity {
    let file = coracle::config::kubeconfig::load(kubeconfig).expect("a kubeconfig");
    let credentials = coracle::kube::kubeconfig::credentials(&file, kubeconfig).expect("credentials");
    let identity = credentials.endpoint.identity.expect("a certificate");
    let pem = |bytes: Secret<Vec<u8>>| String::from_utf8(bytes.reveal().clone()).expect("PEM");
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
    let list = plane.poll(&["csr"])?;
    let all = list["items"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|csr| {
        text(csr, "/spec/signerName") == "kubernetes.io/kubelet-serving"
            && text(csr, "/spec/username") == user
    })
}

// Runtimes: containerd 2, former control plane.
#[test]
fn node_api_allows_what_rbac_allows() {
    let plane = shared();
    let config = merged(served(plane), json!({"serverTLSBootstrap": true}));
    let mut config = config;
    config["authentication"]["anonymous"]["enabled"] = json!(true);
    let joined = JoinedNode::prepare(plane, "door", config).start_and_wait();
    let port =
        joined.object().expect("the node is there")["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok())
            .expect("the node reports its port");

    // Without a serving certificate there is no handshake; with the issued one there is.
    assert!(by_proxy(plane, "door", "/healthz").is_err());
    let csr = wait_for("a request for a serving certificate", patience(), || request(plane, "door"));
    let name = text(&csr, "/metadata/name").to_owned();
    plane.kubectl(&["certificate", "approve", &name]);
    wait_until("the API server to reach the node", LIMIT, || by_proxy(plane, "door", "/healthz").is_ok());
    // A busy node may not respond in time.
    let page = |path: &str| wait_for(path, LIMIT, || by_proxy(plane, "door", path).ok());
    assert_eq!(page("/healthz"), "ok");
    let metrics = page("/metrics");
    assert!(metrics.contains("kubelet_node_name{node=\"door\"} 1"), "{metrics:.2000}");
    assert!(page("/pods").contains("\"PodList\""));

    // Clients that connect directly.
    let client = TlsClient::new(port, None);
    let status_and_body = |response: Response| (response.status, response.body);
    let forbidden = |user: &str, subresources: &str| {
        let text =
            format!("Forbidden (user={user}, verb=get, resource=nodes, subresource(s)=[{subresources}])\n");
        (403, text)
    };
    assert_eq!(status_and_body(client.get("/metrics")), forbidden("system:anonymous", "metrics"));
    let forged = "X-Remote-User: admin\r\nX-Remote-Group: system:masters\r\nImpersonate-User: admin\r\n";
    assert_eq!(
        status_and_body(client.get_with("/pods", forged)),
        forbidden("system:anonymous", "pods proxy")
    );
    assert_eq!(status_and_body(client.get_by("/metrics", "nonsense")), (401, "Unauthorized".to_owned()));
    for account in ["door-scraper", "door-unbound", "door-looker", "door-reader"] {
        plane.kubectl(&["create", "serviceaccount", account]);
    }
    const ROLES: [(&str, &str, &str); 3] = [
        ("door-metrics", "metrics", "door-scraper"),
        ("door-pods", "pods", "door-looker"),
        ("door-log", "log", "door-reader"),
    ];
    for (role, subresource, account) in ROLES {
        let resource = format!("--resource=nodes/{subresource}");
        plane.kubectl(&["create", "clusterrole", role, "--verb=get", &resource]);
        let (role_flag, account_flag) =
            (format!("--clusterrole={role}"), format!("--serviceaccount=default:{account}"));
        plane.kubectl(&["create", "clusterrolebinding", role, &role_flag, &account_flag]);
    }
    let token = |account: &str| plane.kubectl(&["create", "token", account]).trim().to_owned();
    let (scraper, unbound) = (token("door-scraper"), token("door-unbound"));
    let user = |account: &str| format!("system:serviceaccount:default:{account}");
    // Cached authorizations are some seconds old.
    wait_until("the permission to take effect", LIMIT, || client.get_by("/metrics", &scraper).status == 200);
    for page in ["cadvisor", "resource", "probes", "slis"] {
        assert_eq!(client.get_by(&format!("/metrics/{page}"), &scraper).status, 200, "{page}");
    }
    // HEAD is another verb, which no account may use.
    let head = format!("HEAD /metrics HTTP/1.1\r\nHost: n\r\nAuthorization: Bearer {scraper}\r\n\r\n");
    assert_eq!(client.send(&head).status, 403);
    let (looker, reader) = (token("door-looker"), token("door-reader"));
    wait_until("the permission to list pods", LIMIT, || client.get_by("/pods", &looker).status == 200);
    assert_eq!(client.get_by("/runningpods/", &looker).status, 200);
    wait_until("the permission to read logs", LIMIT, || client.get_by("/logs/", &reader).status == 200);
    assert_eq!(status_and_body(client.get_by("/logs/", &looker)), forbidden(&user("door-looker"), "log"));
    assert_eq!(
        status_and_body(client.get_by("/pods", &reader)),
        forbidden(&user("door-reader"), "pods proxy")
    );
    assert_eq!(
        status_and_body(client.get_by("/pods", &scraper)),
        forbidden(&user("door-scraper"), "pods proxy")
    );
    assert_eq!(
        status_and_body(client.get_by("/metrics", &unbound)),
        forbidden(&user("door-unbound"), "metrics")
    );

    // Another node has no rights here, the administrator has.
    let other = identity(&plane.node_kubeconfig("door-other"));
    let response = TlsClient::new(port, Some(&other)).get("/pods");
    assert_eq!(status_and_body(response), forbidden("system:node:door-other", "pods proxy"));
    let admin = identity(&plane.admin_kubeconfig());
    assert_eq!(status_and_body(TlsClient::new(port, Some(&admin)).get("/healthz")), (200, "ok".to_owned()));

    for (role, _, account) in ROLES {
        for (kind, name) in [("serviceaccount", account), ("clusterrolebinding", role), ("clusterrole", role)]
        {
            plane.kubectl(&["delete", kind, name]);
        }
    }
    plane.kubectl(&["delete", "serviceaccount", "door-unbound"]);
    plane.kubectl(&["delete", "csr", &name]);
    joined.finish(&[]);
}
