//! Authentication and authorization at the node API's port; attacks are in `attacks`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle::kube::reviews::Reviewer;
use coracle::util::threads::{OnDeath, Stack, spawn};
use serde_json::{Value, json};

use crate::support::fake_api::{FakeApi, Fault, FaultResponse};
use crate::support::fake_node::{FakeNode, LONG, binary, free_port, full_name};
use crate::support::launch;
use crate::support::node::{NODE, simple};
use crate::support::tls_client::{Authority, Identity, TlsClient};
use crate::support::wait::{wait_for, wait_until};

/// Written whole, as tools replace such files.
fn replace(path: &Path, text: &str) {
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, path).unwrap();
}

/// `good-NAME` is the token of NAME in the group `people`; `readers` may read metrics, `admins`
/// and `tenant…` may do everything.
pub fn review(request: &Value) -> Value {
    if request["kind"] == "TokenReview" {
        let token = request["spec"]["token"].as_str().unwrap();
        return match token.strip_prefix("good-") {
            Some(name) => {
                let user =
                    json!({"username": name, "uid": "u1", "groups": ["people"], "extra": {"k": ["v"]}});
                json!({"authenticated": true, "user": user})
            }
            None => json!({"authenticated": false}),
        };
    }
    let spec = &request["spec"];
    let is_in = |group: &str| spec["groups"].as_array().is_some_and(|all| all.contains(&json!(group)));
    let metrics = spec["resourceAttributes"]["verb"] == "get"
        && spec["resourceAttributes"]["subresource"] == "metrics"
        && (is_in("readers") || spec["user"] == "scraper");
    let tenant = spec["user"].as_str().is_some_and(|user| user.starts_with("tenant"));
    json!({"allowed": is_in("admins") || tenant || metrics})
}

/// An agent with a client CA and an API server that answers reviews.
pub fn guarded(authority: &Authority, extra: &Value) -> FakeNode {
    let node = FakeNode::prepare(json!({}));
    fs::write(ca_file(&node), &authority.pem).unwrap();
    let mut config = json!({
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}},
        "authorization": {"mode": "Webhook"},
    });
    for (key, value) in extra.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config["authentication"]["x509"] = json!({"clientCAFile": ca_file(&node)});
    node.configure(config);
    node.joined(|api| api.review(review))
}

fn ca_file(node: &FakeNode) -> PathBuf {
    node.path("ca.crt")
}

pub fn client(node: &FakeNode, identity: Option<&Identity>) -> TlsClient {
    TlsClient::new(node.main_port(), identity)
}

fn reviews(node: &FakeNode, kind: &str) -> Vec<Value> {
    let all = node.api().received().into_iter().map(|request| request.body);
    all.filter(|body| body["kind"] == kind).collect()
}

#[test]
fn clients_authenticate_by_certificate_or_token() {
    let (authority, stranger) = (Authority::new("clients"), Authority::new("clients"));
    let node = guarded(&authority, &json!({}));
    let unauthorized = |client: &TlsClient, headers: &str| {
        let response = client.get_with("/metrics", headers);
        assert_eq!((response.status, response.body.as_str()), (401, "Unauthorized"), "{headers}");
    };
    let anonymous = client(&node, None);
    unauthorized(&anonymous, "");
    assert_eq!(anonymous.get("/healthz").status, 401);
    unauthorized(&anonymous, "X-Remote-User: admin\r\nX-Remote-Group: admins\r\nImpersonate-User: admin\r\n");
    unauthorized(&anonymous, "Authorization: Basic YTpi\r\n");
    unauthorized(&anonymous, "Authorization: Bearer bad\r\n");
    unauthorized(&client(&node, Some(&stranger.issue("admin", &["admins"]))), "");
    unauthorized(&client(&node, Some(&authority.issue_until("admin", &["admins"], 2020))), "");
    unauthorized(&client(&node, Some(&authority.issue("", &["admins"]))), "");
    assert_eq!(reviews(&node, "SubjectAccessReview").len(), 0);

    let reader = client(&node, Some(&authority.issue("jane", &["readers", "others"])));
    let response = reader.get_with("/metrics", "Accept: text/plain;version=0.0.4;escaping=dots\r\n");
    assert_eq!(response.status, 200, "{response:?}");
    let kind = "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8; escaping=dots\r\n";
    assert!(response.head.contains(kind), "{}", response.head);
    let packed = reader.get_with("/metrics", "Accept-Encoding: gzip\r\n");
    assert!(packed.head.contains("\r\nContent-Encoding: gzip\r\n"), "{}", packed.head);
    assert!(packed.body.len() < response.body.len() / 3, "{} of {}", packed.body.len(), response.body.len());
    assert!(response.head.starts_with("HTTP/1.1 200 OK\r\n"), "{}", response.head);
    let counted = |line: &str| line.starts_with("kubelet_http_requests_total") && line.contains("readwrite");
    assert!(response.body.lines().any(counted), "{}", response.body);
    let spec = reviews(&node, "SubjectAccessReview").remove(0)["spec"].clone();
    assert_eq!(
        spec["resourceAttributes"],
        json!({"verb": "get", "version": "v1", "resource": "nodes", "subresource": "metrics", "name": NODE})
    );
    assert_eq!(spec["user"], "jane");
    assert_eq!(spec["groups"], json!(["readers", "others", "system:authenticated"]));
    let id = &spec["extra"]["authentication.kubernetes.io/credential-id"][0];
    assert!(id.as_str().unwrap().starts_with("X509SHA256="), "{spec}");

    // The text of a 403 response; HEAD needs its own permission.
    let response = reader.get("/pods");
    let text = "Forbidden (user=jane, verb=get, resource=nodes, subresource(s)=[pods proxy])\n";
    assert_eq!((response.status, response.body.as_str()), (403, text));
    let response = reader.send("HEAD /metrics HTTP/1.1\r\nHost: n\r\n\r\n");
    assert_eq!((response.status, response.body.as_str()), (403, ""));

    // Tokens; one review is enough for many requests.
    for _ in 0..3 {
        assert_eq!(anonymous.get_by("/metrics", "good-scraper").status, 200);
    }
    let response = anonymous.get_by("/metrics", "good-other");
    let text = "Forbidden (user=other, verb=get, resource=nodes, subresource(s)=[metrics])\n";
    assert_eq!((response.status, response.body.as_str()), (403, text));
    let tokens = reviews(&node, "TokenReview");
    assert_eq!(tokens.iter().filter(|body| body["spec"]["token"] == "good-scraper").count(), 1);
    let spec = reviews(&node, "SubjectAccessReview").pop().unwrap()["spec"].clone();
    assert_eq!(spec["groups"], json!(["people", "system:authenticated"]));
    assert_eq!((&spec["uid"], &spec["extra"]), (&json!("u1"), &json!({"k": ["v"]})));
    // A valid token is accepted although the certificate is not.
    let odd = client(&node, Some(&stranger.issue("admin", &["admins"])));
    assert_eq!(odd.get_by("/metrics", "good-scraper").status, 200);

    // One connection for many requests, whole and in chunks, sent ahead or not.
    let admin = client(&node, Some(&authority.issue("root", &["admins"])));
    let mut connection = admin.connect().unwrap();
    for path in ["/healthz", "/pods", "/nothing", "/healthz/ping"] {
        let response = connection.ask(&format!("GET {path} HTTP/1.1\r\nHost: n\r\n\r\n")).unwrap();
        assert_eq!(response.status, if path == "/nothing" { 404 } else { 200 }, "{path}");
    }
    let two = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n".repeat(2);
    assert_eq!(connection.ask(&two).unwrap().body, "ok");
    assert_eq!(connection.read_response(false).unwrap().body, "ok");
    let response =
        connection.ask("POST /pods HTTP/1.1\r\nHost: n\r\nContent-Length: 5\r\n\r\nhello").unwrap();
    assert_eq!(response.status, 405);
    assert_eq!(connection.ask("HEAD /pods HTTP/1.1\r\nHost: n\r\n\r\n").unwrap().status, 200);
    assert_eq!(connection.ask("GET /healthz HTTP/1.0\r\n\r\n").unwrap().status, 200);

    // Another authority, while connections are open.
    let mut connection = admin.connect().unwrap();
    let ask = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n";
    assert_eq!(connection.ask(ask).unwrap().status, 200);
    replace(&ca_file(&node), &stranger.pem);
    wait_until("the old authority to be forgotten", LONG, || connection.ask(ask).unwrap().status == 401);
    assert_eq!(client(&node, Some(&stranger.issue("new", &["admins"]))).get("/healthz").status, 200);
    node.finish();
}

/// A user who may write a pod's status may write the id of any container there.
#[test]
fn container_id_of_another_pod_in_a_status_reveals_nothing() {
    let node = FakeNode::join(json!({}));
    node.fake.write_logs();
    node.bind(&simple("web"));
    node.assert_runs_once("web", &["main"]);
    let id = node.running("web")["main"].first().unwrap().clone();
    let gate = node.fake.hang("PullImage");
    let mut other = simple("other");
    other["spec"]["nodeName"] = json!(NODE);
    other["spec"]["containers"][0]["image"] = json!("localhost/none:1");
    let ended = json!({"exitCode": 0, "containerID": format!("containerd://{id}")});
    other["status"] = json!({"phase": "Pending", "containerStatuses": [{
        "name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
        "state": {"waiting": {"reason": "x"}}, "lastState": {"terminated": ended},
    }]});
    node.api().put(&FakeNode::pod_path("other"), other);
    wait_until("the pull", LONG, || gate.waiting() > 0);
    let anonymous = client(&node, None);
    let log = |pod: &str, query: &str| {
        anonymous.get(&format!("/containerLogs/default/{}/main{query}", full_name(pod))).body
    };
    fs::write(&node.containers("web")[0].status.log_path, "2026-01-01T00:00:00Z stdout F secret\n").unwrap();
    assert!(log("web", "").contains("secret"));
    let refused = format!("unable to retrieve container logs for containerd://{id}");
    for query in ["", "?previous=true"] {
        let text = log("other", query);
        assert!(text.contains(&refused) && !text.contains("secret"), "{text}");
    }
    gate.open();
    node.finish();
}

#[test]
fn cached_reviews_are_used_until_expiry_without_the_api_server() {
    let authority = Authority::new("clients");
    let node = guarded(
        &authority,
        &json!({
            "authentication": {
                "anonymous": {"enabled": false},
                // Long enough for a slow machine to see that it counts.
                "webhook": {"enabled": true, "cacheTTL": "20s"},
            },
            "authorization": {
                "mode": "Webhook",
                "webhook": {"cacheAuthorizedTTL": "20s", "cacheUnauthorizedTTL": "20s"},
            },
        }),
    );
    let anonymous = client(&node, None);
    let reader = client(&node, Some(&authority.issue("jane", &["readers"])));
    assert_eq!(anonymous.get_by("/metrics", "good-scraper").status, 200);
    assert_eq!(reader.get("/metrics").status, 200);
    node.api().go_down();
    assert_eq!(anonymous.get_by("/metrics", "good-scraper").status, 200);
    assert_eq!(reader.get("/metrics").status, 200);
    // A review that was not cached fails.
    assert_eq!(anonymous.get_by("/metrics", "good-new").status, 401);
    let response = reader.get("/pods");
    let text = "Authorization error (user=jane, verb=get, resource=nodes, subresource=pods)";
    assert_eq!((response.status, response.body.as_str()), (500, text));
    wait_until("the cached reviews to expire", LONG, || reader.get("/metrics").status == 500);
    wait_until("the cached review of the token to expire", LONG, || {
        anonymous.get_by("/metrics", "good-scraper").status == 401
    });
    // Other ports and clients are served as before.
    assert_eq!(node.read_only("/metrics").0, 200);
    node.api().go_up();
    wait_until("reviews to work again", LONG, || reader.get("/metrics").status == 200);
    assert_eq!(anonymous.get_by("/metrics", "good-scraper").status, 200);
    node.finish();
}

#[test]
fn serving_certificate_is_read_from_the_configured_files() {
    let authority = Authority::new("servers");
    let der = |identity: &Identity| {
        use rustls::pki_types::{CertificateDer, pem::PemObject};
        CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap().to_vec()
    };
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let (first, second) = (authority.issue("first", &[]), authority.issue("second", &[]));
    let put = |identity: &Identity| {
        replace(&key, &identity.key);
        replace(&certificate, &identity.certificate);
    };
    put(&first);
    let node = FakeNode::start_with(json!({
        "tlsCertFile": certificate,
        "tlsPrivateKeyFile": key,
        "tlsMinVersion": "VersionTLS13",
        "tlsCurvePreferences": [23],
    }));
    let client = client(&node, None);
    assert_eq!(client.connect().unwrap().shown(), der(&first));
    // Every client may do anything here.
    assert_eq!(client.get("/healthz").body, "ok");
    assert!(TlsClient::with_versions(node.main_port(), None, &[&rustls::version::TLS12]).connect().is_err());
    put(&second);
    wait_until("the new certificate to be shown", LONG, || client.connect().unwrap().shown() == der(&second));
    node.finish();

    // Without files the agent signs its own certificate, and keeps it.
    let mut node = FakeNode::start();
    let client = TlsClient::new(node.main_port(), None);
    let own = client.connect().unwrap().shown();
    node.stop_agent();
    node.start_agent();
    assert_eq!(client.connect().unwrap().shown(), own);
    node.finish();
}

#[test]
fn requested_serving_certificate_is_used_once_issued() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({"serverTLSBootstrap": true}));
    let client = client(&node, None);
    assert!(client.connect().is_err());
    let csr = wait_for("a request for a serving certificate", LONG, || {
        let all = node.api().objects("/apis/certificates.k8s.io/v1/certificatesigningrequests");
        all.into_iter().find(|csr| csr["spec"]["signerName"] == "kubernetes.io/kubelet-serving")
    });
    assert!(csr["spec"]["usages"].as_array().unwrap().contains(&json!("server auth")), "{csr}");
    assert!(client.connect().is_err());
    node.finish();
}

#[test]
fn webhook_reviews_without_an_api_server_prevent_the_start() {
    for (config, words) in [
        (json!({"authentication": {"webhook": {"enabled": true}}}), "cannot use webhook authentication"),
        (json!({"authorization": {"mode": "Webhook"}}), "cannot use webhook authorization"),
        (
            json!({"authentication": {"webhook": {"enabled": false}, "x509": {"clientCAFile": "/no/such/file"}}}),
            "unable to load client CA file",
        ),
    ] {
        let output = FakeNode::prepare(config).agent_command().output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert!(message.contains(words), "{message}");
    }
}

/// An agent that is configured by flags; the file, if there is one, has only its kind.
struct AgentByFlags(Child);

impl AgentByFlags {
    fn start(node: &FakeNode, port: u16, more: &[&str]) -> AgentByFlags {
        let (main, healthz) = (port.to_string(), free_port());
        let mut command = Command::new(binary());
        command
            .args(["--container-runtime-endpoint", &node.fake.endpoint()])
            .args(["--root-dir", &node.root().to_string_lossy()])
            .args(["--local-socket", &node.local_socket().to_string_lossy()])
            .args(["--cert-dir", &node.path("own").to_string_lossy()])
            .args(["--address=127.0.0.1", "--read-only-port=0", "--port", &main])
            .args(["--healthz-port", &healthz.to_string()])
            .args(["--hostname-override", NODE, "--node-ip=192.0.2.10"])
            .args(["--fail-swap-on=false", "--fail-cgroupv1=false", "--cgroups-per-qos=false"])
            .args(["--enforce-node-allocatable=none", "--cgroup-driver=cgroupfs"])
            .args(more)
            .stdin(Stdio::null());
        let mut agent = AgentByFlags(launch::spawn(&mut command, &node.path("by-flags.log")));
        launch::wait_healthy(&mut agent.0, healthz, LONG);
        agent
    }
}

impl Drop for AgentByFlags {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn default_authentication_depends_on_a_configuration_file() {
    let (authority, port) = (Authority::new("clients"), free_port());
    let mut node = FakeNode::prepare(json!({}));
    let anonymous = TlsClient::new(port, None);
    let ask = |path: &str| {
        let response = anonymous.get(path);
        (response.status, response.body)
    };
    // Flags alone: as in the Go kubelet every client may do everything.
    let agent = AgentByFlags::start(&node, port, &[]);
    let (status, body) = ask("/pods");
    assert!(status == 200 && body.contains("\"PodList\""), "{status} {body}");
    assert_eq!(ask("/healthz"), (200, "ok".to_owned()));
    drop(agent);
    // With an empty file: only authenticated clients with permission.
    fs::write(
        node.config_file(),
        json!({"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}).to_string(),
    )
    .unwrap();
    let api = FakeApi::start();
    api.review(review);
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    fs::write(ca_file(&node), &authority.pem).unwrap();
    let (config, kubeconfig) = (node.config_file(), node.path("kubeconfig"));
    let ca = ca_file(&node);
    let more = [
        "--config",
        &config.to_string_lossy(),
        "--kubeconfig",
        &kubeconfig.to_string_lossy(),
        "--client-ca-file",
        &ca.to_string_lossy(),
    ];
    let agent = AgentByFlags::start(&node, port, &more);
    for path in ["/pods", "/healthz", "/metrics", "/nothing"] {
        assert_eq!(ask(path), (401, "Unauthorized".to_owned()), "{path}");
    }
    let identity = |user, group| TlsClient::new(port, Some(&authority.issue(user, &[group])));
    assert_eq!(identity("root", "admins").get("/pods").status, 200);
    assert_eq!(identity("jane", "readers").get("/pods").status, 403);
    assert_eq!(anonymous.get_by("/metrics", "good-scraper").status, 200);
    drop(agent);
}

#[test]
fn reviews_are_retried_at_a_limited_rate() {
    let reviewed = || {
        let api = FakeApi::start();
        api.review(review);
        let reviewer = Reviewer::new(&api.client());
        (api, reviewer)
    };
    let (mut api, mut reviewer) = reviewed();
    let strike = |times, what| {
        api.fault(Fault { method: "POST", path: "tokenreviews".into(), times, what });
    };
    strike(2, FaultResponse::Status(500, "InternalError", None));
    assert_eq!(reviewer.token("good-a").unwrap().unwrap().name, "a");
    assert_eq!(api.requests(), 3);
    strike(1, FaultResponse::Cut);
    assert_eq!(reviewer.token("bad").unwrap(), None);
    strike(1, FaultResponse::Status(403, "Forbidden", None));
    let error = reviewer.token("good-a").unwrap_err().to_string();
    assert!(error.starts_with("cannot review a token: "), "{error}");
    assert!(!error.contains("good-a"), "{error}");

    // A hundred unknown clients, and an API server that does not respond. A review has ten seconds,
    // its time in the queue included: if all of this took longer, the results prove nothing.
    for round in 1..=5 {
        let (before, begun) = (api.requests(), Instant::now());
        api.freeze();
        let (sender, results) = crossbeam_channel::bounded(100);
        let requesters: Vec<_> = (0..100)
            .map(|n| {
                let (reviewer, sender) = (reviewer.clone(), sender.clone());
                spawn("asker", Stack::Small, OnDeath::Unsupervised, move |_| {
                    let _ = sender.send(reviewer.token(&format!("good-{n}")).is_ok());
                })
                .unwrap()
            })
            .collect();
        let take_results =
            |count: usize| -> Vec<bool> { (0..count).map(|_| results.recv_timeout(LONG).unwrap()).collect() };
        let refused = take_results(28);
        wait_until("the first request", LONG, || api.requests() - before >= 8);
        let first = api.requests() - before;
        api.thaw();
        let granted = take_results(72);
        drop(requesters);
        if begun.elapsed() >= Duration::from_secs(10) && round < 5 {
            (api, reviewer) = reviewed();
            continue;
        }
        assert!(!refused.contains(&true), "more than can wait are refused at once");
        assert!(!granted.contains(&false), "{granted:?}");
        assert_eq!((first, api.requests() - before), (8, 72));
        break;
    }
}
