use super::*;
use crate::model::pod::Pod;
use crate::probes::container::ContainerIndex;
use crate::probes::state::Kind;
use crate::util::testing::{refusing, unblocked};
use crate::util::threads::{OnDeath, Running, Stack, spawn};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;

fn serve(response: &'static [u8]) -> (u16, Running) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let running = spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (mut stream, _) = listener.accept().unwrap();
        let mut some = [0; 1024];
        let _ = stream.read(&mut some);
        let _ = stream.write_all(response);
    })
    .unwrap();
    (port, running)
}

fn check(probe: Value, ip: Option<&str>) -> CheckResult {
    let pod: crate::model::api::Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"containers": [{"name": "c", "livenessProbe": probe,
            "ports": [{"containerPort": 1, "name": "web"}]}]}}))
    .unwrap();
    let check = ProbeRun {
        kind: Kind::Liveness,
        container: ContainerIndex::Regular(0),
        id: "c1".into(),
        pod: Pod::from(pod),
        ip: ip.map(|ip| ip.parse().unwrap()),
        stop: StopToken::never(),
    };
    run(&check, &crate::cri::unreachable_clients().0)
}

#[test]
fn http_responses_give_results() {
    let redirected = "Probe terminated redirects, Response body: moved";
    for (response, expected) in [
        (b"HTTP/1.1 200 OK\r\n\r\n".as_slice(), CheckResult::Success),
        (b"HTTP/1.1 204 No\r\n\r\n", CheckResult::Success),
        (
            b"HTTP/1.1 302 F\r\nLocation: http://other.example/\r\n\r\nmoved",
            CheckResult::Warning(redirected.to_owned()),
        ),
        (
            b"HTTP/1.1 304 Same\r\n\r\n",
            CheckResult::Warning("Probe terminated redirects, Response body: ".to_owned()),
        ),
        (
            b"HTTP/1.1 500 No\r\n\r\nsecret",
            CheckResult::Failure("HTTP probe failed with statuscode: 500".to_owned()),
        ),
        (
            b"HTTP/1.1 404 No\r\n\r\n",
            CheckResult::Failure("HTTP probe failed with statuscode: 404".to_owned()),
        ),
    ] {
        let (port, _server) = serve(response);
        let probe = json!({"httpGet": {"port": port, "path": "/x"}, "timeoutSeconds": 20});
        assert_eq!(check(probe, Some("127.0.0.1")), expected);
    }
}

#[test]
fn tcp_checks_connect_to_probe_host_or_pod_address() {
    let probe =
        |port: u16, host: Value| json!({"tcpSocket": {"port": port, "host": host}, "timeoutSeconds": 20});
    for (host, ip) in [(json!(null), "127.0.0.1"), (json!("127.0.0.1"), "192.0.2.1")] {
        let (port, _server) = serve(b"");
        assert_eq!(check(probe(port, host), Some(ip)), CheckResult::Success);
    }
    assert_eq!(
        check(probe(1, json!("")), None),
        CheckResult::Error("unknown", "the pod has no IP address".to_owned())
    );
    let (_socket, free) = refusing();
    let refused = format!("dial tcp 127.0.0.1:{free}: connect: connection refused");
    let probe = json!({"tcpSocket": {"port": free}, "timeoutSeconds": 20});
    assert_eq!(check(probe, Some("127.0.0.1")), CheckResult::Failure(refused));
}

#[test]
fn grpc_check_without_a_server_fails() {
    let (_socket, free) = refusing();
    let late = format!(
        "timeout: failed to connect service \"127.0.0.1:{free}\" within 1s: context deadline exceeded"
    );
    assert_eq!(check(json!({"grpc": {"port": free}}), Some("127.0.0.1")), CheckResult::Failure(late));
}

#[test]
fn check_that_cannot_be_made_is_an_error() {
    let unknown = |message: &str| CheckResult::Error("unknown", message.to_owned());
    let here = Some("127.0.0.1");
    assert_eq!(
        check(json!({"httpGet": {"port": "nope", "path": "/"}}), here),
        unknown("port \"nope\" not found")
    );
    // A number in quotes is a name.
    assert_eq!(check(json!({"tcpSocket": {"port": "8080"}}), here), unknown("port \"8080\" not found"));
    assert_eq!(check(json!({"tcpSocket": {"port": 99999}}), here), unknown("invalid port number: 99999"));
    assert_eq!(check(json!({}), here), unknown("missing probe handler for p_n:c"));
    let CheckResult::Error("unknown", message) = check(json!({"exec": {"command": ["true"]}}), None) else {
        panic!("no runtime is there")
    };
    assert!(message.starts_with("rpc error: code = Unavailable desc = "), "{message}");
}

#[test]
fn ports_are_found_by_number_or_name_and_a_number_in_quotes_is_a_name() {
    let container: Container = serde_json::from_value(json!({"name": "c", "ports": [
        {"containerPort": 8080, "name": "web"}, {"containerPort": 0, "name": "zero"}]}))
    .unwrap();
    for (value, expected) in [
        (json!(80), Ok(80)),
        (json!("web"), Ok(8080)),
        (json!("81"), Err("port \"81\" not found")),
        (json!(0), Err("invalid port number: 0")),
        (json!(70000), Err("invalid port number: 70000")),
        (json!("zero"), Err("invalid port number: 0")),
        (json!("-1"), Err("port \"-1\" not found")),
    ] {
        let given: IntOrString = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(resolve_port(&given, &container), expected.map_err(str::to_owned), "{value}");
    }
}

#[test]
fn commands_are_expanded_with_literal_values_only() {
    let container: Container = serde_json::from_value(json!({"name": "c", "env": [
        {"name": "A", "value": "old"}, {"name": "A", "value": "$(B)"},
        {"name": "F", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}))
    .unwrap();
    let words: Vec<String> = ["x$(A)", "[$(F)]", "$(NOPE)", "$$(A)"].map(str::to_owned).to_vec();
    assert_eq!(command(&words, &container).unwrap(), ["x$(B)", "[]", "$(NOPE)", "$(A)"]);
}

/// Each check builds the command again, so its cost is bounded like that of a start.
#[test]
fn commands_cost_neither_memory_nor_time_without_limit() {
    let many: Vec<Value> = (0..50_000).map(|n| json!({"name": format!("V{n}"), "value": "x"})).collect();
    for (env, word, expected) in [
        (vec![json!({"name": "V", "value": "x".repeat(1 << 20)})], "$(V)".repeat(170_000), Err(TooLarge)),
        // A search through all variables for each name would be 10,000,000,000 comparisons.
        (many, "$(N)".repeat(200_000), Ok(800_000)),
    ] {
        let container: Container = serde_json::from_value(json!({"name": "c", "env": env})).unwrap();
        let found = unblocked(move || command(&[word], &container));
        assert_eq!(found.map(|words| words[0].len()), expected);
    }
}
