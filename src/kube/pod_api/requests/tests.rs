//! Against a small server on the loopback interface.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard};

use crossbeam_channel::bounded;
use serde_json::json;

use super::*;
use crate::kube::client::{Credentials, LAGS};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::transport::api::{Endpoint, Roots};
use crate::util::stop::StopToken;
use crate::util::threads::{self, Stack};

const LONG: Duration = Duration::from_secs(20);

#[derive(Default)]
struct State {
    /// Method and path of each request.
    seen: Vec<String>,
    posted: Vec<Value>,
    /// Watches of secrets.
    streams: Vec<TcpStream>,
    connections: Vec<Running>,
    version: u32,
    /// Number of token requests that fail because the server does not know the pod yet, the last one because
    /// it knows the pod as it was before the scheduler bound it.
    lags: u32,
}

/// An API server with a service, a ConfigMap and a Secret; it lists them only if it receives the
/// right requests.
struct Server {
    state: Arc<Mutex<State>>,
    port: u16,
    _accepts: Running,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap()
}

fn secret(version: u32) -> Value {
    let text = if version == 1 { "b25l" } else { "dHdv" };
    json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "s1", "namespace": "default", "uid": "x",
        "resourceVersion": version.to_string()}, "type": "Opaque", "data": {"pw": text}})
}

fn items(path: &str, version: u32) -> (&'static str, Vec<Value>) {
    if path.starts_with("/api/v1/services?") && path.contains("fieldSelector=spec.clusterIP%21%3DNone") {
        let service = json!({"metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 443}]}});
        return ("Service", vec![service]);
    }
    if path.starts_with("/api/v1/namespaces/default/secrets?")
        && path.contains("fieldSelector=metadata.name%3Ds1")
    {
        return ("Secret", vec![secret(version)]);
    }
    ("ConfigMap", Vec::new())
}

fn chunk(stream: &mut TcpStream, event: &Value) {
    let line = format!("{event}\n");
    let _ = write!(stream, "{:x}\r\n{line}\r\n", line.len());
    let _ = stream.flush();
}

fn bookmark() -> Value {
    json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "5",
        "annotations": {"k8s.io/initial-events-end": "true"}}}})
}

/// Serves one connection until it is closed, or becomes a watch.
fn serve(state: &Mutex<State>, mut stream: TcpStream) {
    let Ok(copy) = stream.try_clone() else { return };
    let mut reader = BufReader::new(copy);
    loop {
        let (mut request, mut length) = (String::new(), 0);
        if reader.read_line(&mut request).unwrap_or(0) == 0 {
            return;
        }
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header).unwrap_or(0) <= 2 {
                break;
            }
            if let Some(value) = header.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
        let mut lags = 0;
        let version = {
            let mut state = lock(state);
            state.seen.push(format!("{method} {path}"));
            if method == "POST" {
                state.posted.push(serde_json::from_slice(&body).unwrap());
                lags = state.lags;
                state.lags = lags.saturating_sub(1);
            }
            state.version
        };
        let (kind, found) = items(&path, version);
        if path.contains("watch=true") {
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            );
            if path.contains("sendInitialEvents=true") {
                for object in found {
                    chunk(&mut stream, &json!({"type": "ADDED", "object": object}));
                }
                chunk(&mut stream, &bookmark());
            }
            if kind == "Secret" {
                lock(state).streams.push(stream.try_clone().unwrap());
            }
            // Until the client closes the connection.
            let _ = reader.read_line(&mut request);
            return;
        }
        let response = if lags > 1 {
            json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404,
                "message": "pod \"config\" not found"})
        } else if lags == 1 {
            json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
                "message": "serviceaccounts \"default\" is forbidden: node requested token bound to a pod \
                    scheduled on a different node"})
        } else if path.ends_with("/denied") {
            json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "no"})
        } else if method == "POST" {
            json!({"kind": "TokenRequest", "spec": {"expirationSeconds": 3607},
                "status": {"token": "t0", "expirationTimestamp": "2099-01-01T00:00:00Z"}})
        } else if path.contains('?') {
            json!({"kind": format!("{kind}List"), "metadata": {"resourceVersion": "5"}, "items": found})
        } else {
            json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "no"})
        };
        let status = match response["code"].as_u64() {
            Some(404) => "404 Not Found",
            Some(403) => "403 Forbidden",
            _ => "200 OK",
        };
        let text = response.to_string();
        let _ = write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        );
    }
}

impl Server {
    fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State { version: 1, ..State::default() }));
        let shared = Arc::clone(&state);
        let accepts = threads::spawn("t/api", Stack::Small, OnDeath::Unsupervised, move |stop| {
            for stream in listener.incoming().map_while(Result::ok) {
                if stop.is_stopped() {
                    return;
                }
                let state = Arc::clone(&shared);
                let serves = threads::spawn("t/conn", Stack::Small, OnDeath::Unsupervised, move |_| {
                    serve(&state, stream)
                });
                lock(&shared).connections.push(serves.unwrap());
            }
        })
        .unwrap()
        .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
        Server { state, port, _accepts: accepts }
    }

    fn client(&self) -> Client {
        let endpoint = Endpoint {
            https: false,
            host: "127.0.0.1".into(),
            port: self.port,
            roots: Roots::System,
            server_name: None,
            identity: None,
            proxy: None,
        };
        Client::new(Credentials { endpoint, base_path: String::new(), token: None }, None).unwrap()
    }

    /// Sends the secret's new version to its watch.
    fn send_event(&self, kind: &str, version: u32) {
        for _ in 0..2000 {
            if let Some(stream) = lock(&self.state).streams.last_mut() {
                chunk(stream, &json!({"type": kind, "object": secret(version)}));
                return;
            }
            let _ = StopToken::never().wait(Duration::from_millis(10));
        }
        panic!("the secret has no watch");
    }

    fn seen(&self, start: &str) -> Vec<String> {
        lock(&self.state).seen.iter().filter(|line| line.starts_with(start)).cloned().collect()
    }
}

fn pod() -> Pod {
    let value = json!({"metadata": {"name": "config", "namespace": "default", "uid": "u1"},
        "spec": {"serviceAccountName": "default", "containers": [],
            "volumes": [{"name": "s", "secret": {"secretName": "s1"}}, {"name": "m", "configMap": {"name": "nope"}}]}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

#[test]
fn a_pods_needs_become_the_right_requests() {
    let server = Server::start();
    let client = server.client();
    let (uid_sender, changed_pods) = bounded(10);
    let (deaths, _died) = bounded(1);
    let changed: SyncPod = Box::new(move |uid| drop(uid_sender.try_send(uid.clone())));
    let (api, services) =
        PodDependencies::start(&client, Strategy::Watch, Box::new(|| None), changed, &deaths, None).unwrap();
    let never = StopToken::never();
    assert!(api.services.wait_until_read(LONG, &never));
    let variables = api.services.variables("n", true);
    assert!(variables.contains(&("KUBERNETES_SERVICE_HOST".to_owned(), "10.96.0.1".to_owned())));

    api.register(&pod());
    let key = |kind, name: &str| Key::new(kind, "default", name);
    let read = || {
        let object = api.objects.get(&key(Kind::Secret, "s1"), LONG, &never)?;
        Ok::<_, ObjectError>(String::from_utf8_lossy(object.get("pw").unwrap()).into_owned())
    };
    assert_eq!(read(), Ok("one".to_owned()));
    let missing = api.objects.get(&key(Kind::ConfigMap, "nope"), LONG, &never).unwrap_err();
    assert_eq!(missing.to_string(), "configmap \"nope\" not found");
    server.send_event("MODIFIED", 6);
    assert_eq!(changed_pods.recv_timeout(LONG), Ok(PodUid::from("u1")));
    assert_eq!(read(), Ok("two".to_owned()));
    server.send_event("DELETED", 7);
    assert_eq!(changed_pods.recv_timeout(LONG), Ok(PodUid::from("u1")));
    assert_eq!(read().unwrap_err().to_string(), "secret \"s1\" not found");

    // The server's own cache is older than what it has sent.
    lock(&server.state).lags = 2;
    assert_eq!(api.tokens.get(&pod(), "", Some(3607), &StopToken::never()).unwrap().expose(), "t0");
    assert_eq!(server.seen("POST"), ["POST /api/v1/namespaces/default/serviceaccounts/default/token"; 3]);
    assert_eq!(lock(&server.state).posted[0]["spec"]["boundObjectRef"]["uid"], "u1");
    let get = Requests { client: client.clone(), token_limit: TIMEOUT, deaths };
    assert_eq!(get.read(&key(Kind::Secret, "other")), Err(objects::not_found(&key(Kind::Secret, "other"))));
    assert_eq!(
        server.seen("GET /api/v1/namespaces/default/secrets/"),
        ["GET /api/v1/namespaces/default/secrets/other"]
    );

    let missing = api.classes.handler("gvisor").unwrap_err();
    assert_eq!(missing.to_string(), "runtimeclass.node.k8s.io \"gvisor\" not found");
    assert_eq!(server.seen("GET /apis/node"), ["GET /apis/node.k8s.io/v1/runtimeclasses/gvisor"]);

    api.forget(&PodUid::from("u1"));
    assert!(matches!(read(), Err(ObjectError::NotRegistered { .. })));
    api.shut_down(LONG);
    drop(services);
    client.shut_down();
    client.drop_connections();
    let connections = std::mem::take(&mut lock(&server.state).connections);
    lock(&server.state).streams.clear();
    drop(connections);
}

#[test]
fn refused_read_is_repeated_only_if_the_server_may_not_know_the_pod() {
    let server = Server::start();
    let (deaths, _died) = bounded(1);
    let requests = Requests { client: server.client(), token_limit: TIMEOUT, deaths };
    let denied = Key::new(Kind::Secret, "default", "denied");
    assert!(matches!(requests.read(&denied), Err(ObjectError::Forbidden { .. })));
    assert_eq!(server.seen("GET").len(), 1);
    assert!(matches!(requests.read_new(&denied), Err(ObjectError::Forbidden { .. })));
    assert_eq!(server.seen("GET").len(), 1 + 1 + LAGS.len());
    let missing = Key::new(Kind::Secret, "default", "missing");
    assert_eq!(requests.read_new(&missing), Err(objects::not_found(&missing)));
    assert_eq!(server.seen("GET /api/v1/namespaces/default/secrets/missing").len(), 1);
    // Closes the connections.
    drop(requests);
    let connections = std::mem::take(&mut lock(&server.state).connections);
    drop(connections);
}

#[test]
fn refused_token_is_requested_again_only_if_the_server_may_not_know_the_binding() {
    let lags = |code, reason, text: &str| may_lag(&ApiError::for_test(code, reason, text));
    let refused =
        |reason: &str| lags(403, "Forbidden", &format!("serviceaccounts \"a\" is forbidden: {reason}"));
    assert!(refused("node requested token bound to a pod scheduled on a different node"));
    assert!(refused(
        "the UID in the bound object reference (u2) does not match the UID in record. The object might have \
         been deleted and then recreated"
    ));
    assert!(refused(
        "User \"system:node:n\" cannot create resource \"serviceaccounts/token\" in API group \"\" in the \
         namespace \"default\": no relationship found between node 'n' and this object"
    ));
    assert!(!refused("audience \"vault\" not found in pod spec volume"));
    assert!(lags(404, "NotFound", "pod \"web\" not found"));
    assert!(!lags(404, "NotFound", "pods \"web\" not found"));
    assert!(!lags(404, "NotFound", "serviceaccounts \"a\" not found"));
}

/// A response 403 was taken for the absence of the object.
#[test]
fn only_a_response_404_means_that_an_object_does_not_exist() {
    let read = |code, reason, text: &str| read_error(&ApiError::for_test(code, reason, text));
    let text = || "words".to_owned();
    assert_eq!(read(404, "NotFound", "words"), ReadError::NotFound { text: text() });
    assert_eq!(read(403, "Forbidden", "words"), ReadError::Forbidden { text: text() });
    for (code, reason) in [(401, "Unauthorized"), (404, "Unknown"), (429, "TooManyRequests"), (500, "")] {
        assert_eq!(read(code, reason, "words"), ReadError::Unavailable { text: text() }, "{code}");
    }
    let unserved = "the server could not find the requested resource";
    assert!(matches!(read(404, "NotFound", unserved), ReadError::Unavailable { .. }));
}
