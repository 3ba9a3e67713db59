//! The API server and the manifest URL behind proxies: HTTP, HTTPS and SOCKS 5, with and
//! without credentials, and proxies that refuse, hang or cut connections.

use std::time::Duration;

use coracle::kube::client::{Client, Credentials};
use coracle::kube::target::Target;
use coracle::transport::api::{Breaker, Connections, DialError, Endpoint, Request, RequestKind, Roots};
use coracle::transport::proxy::Proxy as ProxyUrl;
use coracle::util::threads::{OnDeath, Stack, spawn};
use crossbeam_channel::bounded;
use serde_json::{Value, json};

use crate::hooks::refusing::refusing;
use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod};
use crate::support::proxy::{Proxy, ProxyBehavior};
use crate::support::tls_front::TlsFront;
use crate::support::wait::wait_until;
use crate::support::web::{FixedServer, Reply};

/// A host name that only the proxy can resolve.
const API: &str = "api.example";
const NODE: &str = "/api/v1/nodes/n1";
const AUTHORIZATION: &str = "Basic bWU6cDpAc3M=";

/// A server with TLS, behind a proxy.
struct ServerBehindProxy {
    api: FakeApi,
    front: TlsFront,
    proxy: Proxy,
}

impl ServerBehindProxy {
    fn start() -> ServerBehindProxy {
        let api = FakeApi::start();
        api.put(NODE, json!({}));
        let front = TlsFront::before(api.port);
        let proxy = Proxy::start(&[(&format!("{API}:443"), front.port())]);
        ServerBehindProxy { api, front, proxy }
    }

    fn endpoint(&self, proxy: &str) -> Endpoint {
        Endpoint {
            https: true,
            host: API.to_owned(),
            port: 443,
            roots: Roots::Pem(self.front.authority().into_bytes()),
            server_name: Some("127.0.0.1".to_owned()),
            identity: None,
            proxy: Some(ProxyUrl::parse(proxy).unwrap()),
        }
    }

    fn client(&self, proxy: &str) -> Client {
        client(self.endpoint(proxy))
    }

    /// The proxy's URL.
    fn url(&self) -> String {
        format!("http://{}", self.proxy.address())
    }
}

fn client(endpoint: Endpoint) -> Client {
    Client::new(Credentials { endpoint, base_path: String::new(), token: None }, None).unwrap()
}

/// The outcome of a request: nothing or the text of the error.
fn ask(client: &Client) -> Result<(), String> {
    client.get::<Value>(&Target::node("n1")).map(drop).map_err(|error| error.to_string())
}

#[test]
fn one_tunnel_serves_many_requests() {
    let behind = ServerBehindProxy::start();
    let client = behind.client(&behind.url());
    for _ in 0..3 {
        assert_eq!(ask(&client), Ok(()));
    }
    let heads = behind.proxy.heads();
    assert_eq!(heads.len(), 1, "the connection is kept: {heads:?}");
    assert!(
        heads[0].starts_with("CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n"),
        "{heads:?}"
    );
    assert!(!heads[0].contains("uthorization"), "{heads:?}");
    behind.proxy.cut();
    assert_eq!(ask(&client), Ok(()), "a cut tunnel is replaced");
    assert_eq!(behind.proxy.heads().len(), 2);
}

#[test]
fn proxy_credentials_are_sent_and_never_printed() {
    let behind = ServerBehindProxy::start();
    behind.proxy.require(AUTHORIZATION);
    let address = behind.proxy.address();
    assert_eq!(ask(&behind.client(&format!("http://me:p%3A%40ss@{address}"))), Ok(()));
    let client = behind.client(&format!("http://me:wrong@{address}"));
    let error = ask(&client).unwrap_err();
    assert_eq!(
        error,
        format!(
            "get nodes \"n1\": \"https://api.example:443/api/v1/nodes/n1\": proxyconnect tcp: \
             proxy {address}: CONNECT api.example:443: 407 Proxy Authentication Required"
        )
    );
    assert_eq!(client.last_failure(), Some(error));
    let shown = format!("{:?}", behind.endpoint(&format!("http://me:wrong@{address}")));
    assert!(shown.contains(&address) && !shown.contains("wrong"), "{shown}");
}

#[test]
fn https_proxy_certificate_is_verified() {
    let behind = ServerBehindProxy::start();
    behind.proxy.require(AUTHORIZATION);
    let tls = TlsFront::before(behind.proxy.port());
    let url = format!("https://me:p:%40ss@127.0.0.1:{}", tls.port());
    let error = ask(&behind.client(&url)).unwrap_err();
    let expected = format!(
        "proxyconnect tcp: proxy 127.0.0.1:{}: tls: failed to verify certificate: x509: ",
        tls.port()
    );
    assert!(error.contains(&expected), "{error}");
    assert_eq!(behind.proxy.heads(), Vec::<String>::new(), "no password was sent to another host");
    let both = behind.front.authority() + &tls.authority();
    let endpoint = Endpoint { roots: Roots::Pem(both.into_bytes()), ..behind.endpoint(&url) };
    let client = client(endpoint);
    assert_eq!((ask(&client), ask(&client)), (Ok(()), Ok(())));
    assert_eq!(behind.proxy.heads().len(), 1);
    // TLS to a proxy without TLS.
    let plain = format!("https://{}", behind.proxy.address());
    let error = ask(&behind.client(&plain)).unwrap_err();
    assert!(error.contains(&format!("proxy {}: ", behind.proxy.address())), "{error}");
}

#[test]
fn socks5_proxy_resolves_name() {
    let behind = ServerBehindProxy::start();
    let client = behind.client(&format!("socks5://{}", behind.proxy.address()));
    assert_eq!(ask(&client), Ok(()));
    assert_eq!(behind.proxy.heads(), ["SOCKS api.example:443"]);
    behind.proxy.set_behavior(ProxyBehavior::Respond(vec![5, 2, 0, 1]));
    behind.proxy.cut();
    let error = ask(&client).unwrap_err();
    let expected = format!(
        "proxy {}: SOCKS: connect to api.example:443: connection not allowed by ruleset",
        behind.proxy.address()
    );
    assert!(error.ends_with(&expected), "{error}");
}

#[test]
fn error_names_the_refusing_proxy() {
    let behind = ServerBehindProxy::start();
    let client = behind.client(&behind.url());
    let proxy = behind.proxy.address();
    for (response, expected) in [
        (
            &b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"[..],
            "CONNECT api.example:443: 403 Forbidden",
        ),
        (b"HTTP/1.0 502 Bad Gateway\r\n\r\n", "CONNECT api.example:443: 502 Bad Gateway"),
        (
            b"220 mail.example ESMTP\r\n\r\n",
            "CONNECT api.example:443: malformed HTTP status code \"mail.example\"",
        ),
        (b"HTTP/1.1 200 OK\r\nHalf: ", "CONNECT api.example:443: EOF"),
        (b"", "CONNECT api.example:443: EOF"),
    ] {
        behind.proxy.set_behavior(ProxyBehavior::Respond(response.to_vec()));
        let error = ask(&client).unwrap_err();
        assert!(error.ends_with(&format!(": proxyconnect tcp: proxy {proxy}: {expected}")), "{error}");
    }
    // A proxy that does not run.
    let (_bound, port) = refusing();
    let error = ask(&behind.client(&format!("http://me:word@127.0.0.1:{port}"))).unwrap_err();
    let expected = format!(
        "proxyconnect tcp: proxy 127.0.0.1:{port}: dial tcp 127.0.0.1:{port}: connect: connection refused"
    );
    assert!(error.ends_with(&expected), "{error}");
    // Again the host that the proxy can resolve.
    behind.proxy.set_behavior(ProxyBehavior::Forward);
    assert_eq!((ask(&client), client.last_failure()), (Ok(()), None));
    // And one that it cannot resolve.
    let elsewhere = Endpoint { host: "else.example".to_owned(), ..behind.endpoint(&behind.url()) };
    let error = ask(&self::client(elsewhere)).unwrap_err();
    assert!(error.ends_with(&format!("proxy {proxy}: CONNECT else.example:443: 502 Bad Gateway")), "{error}");
}

#[test]
fn silent_proxy_times_out_or_stops() {
    let behind = ServerBehindProxy::start();
    behind.proxy.set_behavior(ProxyBehavior::Hang);
    // Long enough for the connection to the proxy, also on a busy machine.
    let client = behind.client(&behind.url()).with_timeout(Duration::from_secs(5));
    let error = ask(&client).unwrap_err();
    let expected = format!("proxy {}: CONNECT api.example:443: i/o timeout", behind.proxy.address());
    assert!(error.ends_with(&expected), "{error}");
    // The same, stopped while it waits.
    let breaker = Breaker::default();
    let (child, endpoint) = (breaker.child(), behind.endpoint(&behind.url()));
    let (sender, results) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let deadline = std::time::Instant::now() + LONG;
        let request = Request {
            method: "GET",
            path: "/",
            headers: &[],
            body: None,
            deadline,
            kind: RequestKind::Stream,
            is_urgent: false,
        };
        let outcome = Connections::new(&endpoint).unwrap().send(&request, &child);
        let _ = sender.send(outcome.map(|response| response.status));
    })
    .unwrap();
    wait_until("a request to the proxy", LONG, || behind.proxy.heads().len() == 2);
    breaker.trip();
    // At the deadline the error would be another one.
    assert_eq!(results.recv_timeout(LONG).unwrap(), Err(DialError::Stopped));
}

#[test]
fn broken_tunnel_is_replaced() {
    let behind = ServerBehindProxy::start();
    behind.api.put("/api/v1/namespaces/ns/configmaps/c", json!({"data": {"key": "x".repeat(100_000)}}));
    let client = behind.client(&behind.url());
    let read = || client.get::<Value>(&Target::config_map("ns", "c")).map(drop);
    // In the handshake, and in the body.
    for bytes in [100, 20_000] {
        behind.proxy.set_behavior(ProxyBehavior::CutAfter(bytes));
        let error = read().unwrap_err();
        assert!(error.is_transport(), "{error}");
    }
    behind.proxy.set_behavior(ProxyBehavior::Forward);
    read().unwrap();
}

#[test]
fn server_without_tls_is_reached_through_proxy() {
    let api = FakeApi::start();
    api.put(NODE, json!({}));
    let proxy = Proxy::start(&[("api.example:8080", api.port)]);
    proxy.require(AUTHORIZATION);
    let endpoint = |user: &str| Endpoint {
        host: API.to_owned(),
        port: 8080,
        proxy: Some(ProxyUrl::parse(&format!("http://{user}@{}", proxy.address())).unwrap()),
        ..api.credentials().endpoint
    };
    let good = client(endpoint("me:p%3A%40ss"));
    assert_eq!(ask(&good), Ok(()));
    let heads = proxy.heads();
    let start = format!(
        "GET http://api.example:8080{NODE} HTTP/1.1\r\nProxy-Authorization: {AUTHORIZATION}\r\n\
         host: api.example:8080\r\n"
    );
    assert!(heads.len() == 1 && heads[0].starts_with(&start), "{heads:?}");
    let error = ask(&client(endpoint("me:wrong"))).unwrap_err();
    let expected = format!("proxyconnect tcp: proxy {}: 407 Proxy Authentication Required", proxy.address());
    assert!(error.ends_with(&expected), "{error}");
}

/// A node whose API server is reached only through the proxy that `proxy-url` names. The
/// certificate of the proxy is verified with the system authorities, that of the server with the
/// authority of the kubeconfig.
#[test]
fn node_joins_through_https_proxy_of_kubeconfig() {
    let api = FakeApi::start();
    let front = TlsFront::before(api.port);
    let proxy = Proxy::start(&[("api.example:6443", front.port())]);
    proxy.require(AUTHORIZATION);
    let tls = TlsFront::before(proxy.port());
    let address = format!("127.0.0.1:{}", tls.port());
    let mut node = FakeNode::prepare(json!({}));
    let authority = serde_json::to_value(k8s_openapi::ByteString(front.authority().into_bytes())).unwrap();
    let cluster = json!({
        "server": "https://api.example:6443",
        "tls-server-name": "127.0.0.1",
        "certificate-authority-data": authority,
        "proxy-url": format!("https://me:p%3A%40ss@{address}"),
    });
    node.join_cluster(api, cluster);
    let bundle = node.path("bundle.pem");
    std::fs::write(&bundle, tls.authority()).unwrap();
    node.set_variable("SSL_CERT_FILE", &bundle.to_string_lossy());
    // The kubeconfig wins over the environment.
    node.set_variable("HTTPS_PROXY", "http://127.0.0.1:9");
    let node = node.start_joined();
    node.bind(&pod("web", json!([busybox("main", FOREVER)])));
    wait_until("the pod to run", LONG, || node.running("web").contains_key("main"));
    let heads = proxy.heads();
    assert!(heads.iter().all(|head| head.starts_with("CONNECT api.example:6443 ")), "{heads:?}");

    proxy.set_behavior(ProxyBehavior::Respond(b"HTTP/1.1 403 Forbidden\r\n\r\n".to_vec()));
    proxy.cut();
    let message = format!("proxyconnect tcp: proxy {address}: CONNECT api.example:6443: 403 Forbidden");
    wait_until("the refusal to be shown", LONG, || node.cli(&["status"]).contains(&message));
    wait_until("the refusal in the log", LONG, || {
        let log = node.log();
        log.contains(&format!("through the proxy https://{address}")) && log.contains(&message)
    });
    proxy.set_behavior(ProxyBehavior::Forward);
    wait_until("the API server to be reached", LONG, || !node.cli(&["status"]).contains("proxyconnect"));
    let log = node.log();
    for secret in ["p%3A%40ss", "p:@ss", "bWU6cDpAc3M"] {
        assert!(!log.contains(secret), "{secret}: {log}");
    }
    node.finish();
}

/// The environment's proxies serve the API server and the manifest URL, and nothing else.
#[test]
fn environment_proxies_serve_api_server_and_manifest_url() {
    let web = FixedServer::start();
    // Its probe must go directly to the address, which is not a loopback one: the kernel refuses it.
    let mut manifest = pod("site", json!([busybox("main", FOREVER)]));
    manifest["spec"]["containers"][0]["readinessProbe"] = json!({
        "httpGet": {"host": "255.255.255.255", "port": 80, "path": "/probe"},
        "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1,
    });
    web.set("/pods.json", Reply::text(200, &manifest.to_string()));
    let api = FakeApi::start();
    let front = TlsFront::before(api.port);
    let proxy = Proxy::start(&[("api.example:443", front.port()), ("manifests.example", web.port)]);
    proxy.require(AUTHORIZATION);
    let mut node = FakeNode::prepare(json!({
        "staticPodPath": null,
        "staticPodURL": "http://manifests.example/pods.json",
        "httpCheckFrequency": "1s",
    }));
    let authority = serde_json::to_value(k8s_openapi::ByteString(front.authority().into_bytes())).unwrap();
    let cluster = json!({
        "server": "https://api.example",
        "tls-server-name": "127.0.0.1",
        "certificate-authority-data": authority,
    });
    node.join_cluster(api, cluster);
    let url = format!("http://me:p%3A%40ss@{}", proxy.address());
    node.set_variable("HTTPS_PROXY", &url);
    node.set_variable("http_proxy", &url);
    let node = node.start_joined();
    wait_until("the pod of the URL to run", LONG, || node.running("site").contains_key("main"));
    wait_until("its probe to fail", LONG, || node.cli(&["events"]).contains("Unhealthy"));
    let heads = proxy.heads();
    let expected = ["CONNECT api.example:443 ", "GET http://manifests.example/pods.json HTTP/1.1\r\n"];
    for start in expected {
        assert!(heads.iter().any(|head| head.starts_with(start)), "{start}: {heads:?}");
    }
    assert!(heads.iter().all(|head| expected.iter().any(|start| head.starts_with(start))), "{heads:?}");
    assert!(!web.received("/pods.json").is_empty());

    proxy.set_behavior(ProxyBehavior::Respond(b"HTTP/1.1 503 Away\r\nContent-Length: 0\r\n\r\n".to_vec()));
    let message = format!("GET failed with status 503 through proxy {}", proxy.address());
    wait_until("the refusal to be shown", LONG, || node.cli(&["status"]).contains(&message));
    let configz = node.read_only("/configz").1;
    for text in [node.log(), configz, node.cli(&["status", "-o", "json"])] {
        for secret in ["p%3A%40ss", "p:@ss", "bWU6cDpAc3M"] {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
    }
    proxy.set_behavior(ProxyBehavior::Forward);
    web.set("/pods.json", Reply::text(200, ""));
    node.finish();
}
