//! The API server's certificate has expired or is not valid yet, while the agent runs and when it
//! starts; the connection to it is slow, or its packets are dropped. The node's own certificate has
//! expired: that it is refused is in `tests/cluster/certificates.rs`, as only a real API server does that.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::{Case, MAX_RATE, attempts, begin_on, case, config, meanwhile, settle, wait_reported};
use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::simple;
use crate::support::tls_front::{ConnectionBehavior, TlsFront};
use crate::support::wait::{pause, wait_until};
use crate::{in_parallel, print_line};

const CASE: Case = case("behind TLS", 10, |_| {});

/// A fault of the connection to the API server.
type ConnectionFault = fn(&TlsFront);

const CONNECTION_FAULTS: &[(&str, ConnectionFault)] = &[
    ("its certificate has expired", |front| front.set_certificate(-7200, -60)),
    ("its certificate is not valid yet", |front| front.set_certificate(600, 7200)),
    ("bytes come one by one", |front| {
        front.set_flow(ConnectionBehavior::Drops(64, Duration::from_millis(10)))
    }),
    ("packets are dropped", |front| front.set_flow(ConnectionBehavior::Sink)),
];

fn behind_tls() -> (FakeNode, TlsFront) {
    let mut node = FakeNode::prepare(config());
    let api = FakeApi::start();
    let front = TlsFront::before(api.port);
    let authority = node.path("ca.pem");
    fs::write(&authority, front.authority()).unwrap();
    node.join_cluster(api, json!({"server": front.url(), "certificate-authority": authority}));
    (node, front)
}

#[test]
fn pods_survive_bad_certificates_and_lost_connections() {
    in_parallel(CONNECTION_FAULTS, |(name, cause)| {
        let (node, front) = behind_tls();
        let (node, before) = begin_on(node.start_joined(), &CASE);
        let (sent, begun) = (attempts(&node), Instant::now());
        cause(&front);
        // Connections with the old certificate stay open, as on a real server.
        if name.contains("certificate") {
            front.cut();
        }
        meanwhile(&node, true);
        while begun.elapsed() < Duration::from_secs(15) {
            node.assert_no_duplicates();
            pause(Duration::from_millis(100));
        }
        let rate = (attempts(&node) - sent) / begun.elapsed().as_secs_f64();
        print_line(&format!("api server, {name}: {rate:.1} requests/s"));
        assert!(rate <= MAX_RATE, "{rate:.1} requests/s");
        if name.contains("certificate") {
            wait_until("the log to say what is wrong", LONG, || {
                node.log().contains("x509: certificate has expired or is not yet valid")
            });
        }
        front.set_certificate(-60, 3600);
        front.set_flow(ConnectionBehavior::Free);
        front.cut();
        settle(node, &CASE, &before, 0);
    });
}

/// The agent starts all the same, and runs its static pods.
#[test]
fn agent_starts_despite_an_invalid_server_certificate() {
    in_parallel(&[("run out", -7200, -60), ("not yet valid", 600, 7200)], |(_, from, until)| {
        let (mut node, front) = behind_tls();
        front.set_certificate(*from, *until);
        node.apply(&simple("fixed"));
        node.start_agent();
        node.wait_ready("fixed");
        node.measure();
        node.bind(&simple("web"));
        pause(Duration::from_secs(5));
        assert!(!node.node_is_ready() && node.running("web").is_empty());
        let running = node.running("fixed");
        front.set_certificate(-60, 3600);
        wait_until("the node to be ready at the API server", LONG, || node.node_is_ready());
        wait_reported(&node, &CASE, "web");
        wait_reported(&node, &CASE, "fixed");
        assert_eq!(node.running("fixed"), running);
        node.finish();
    });
}

/// A certificate and its key, both PEM, that ended with the year 2020.
fn expired_certificate() -> String {
    let key = rcgen::KeyPair::generate().expect("a key can be made");
    let mut parameters = rcgen::CertificateParams::default();
    parameters.not_before = rcgen::date_time_ymd(2020, 1, 1);
    parameters.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let certificate = parameters.self_signed(&key).expect("a certificate can be made");
    certificate.pem() + &key.serialize_pem()
}

/// A node that was off for longer than its certificate is valid: an operator sees what to do.
#[test]
fn expired_client_certificate_is_named_in_status_and_event() {
    // Without TLS the agent reads no certificate.
    let (node, _front) = behind_tls();
    let mut node = node.start_joined();
    node.bind(&simple("web"));
    wait_reported(&node, &CASE, "web");
    let before = node.running("web");
    node.kill_agent();
    let (config, certificate) = (node.path("kubeconfig"), node.path("node.pem"));
    fs::write(&certificate, expired_certificate()).expect("the certificate is written");
    let text = fs::read(&config).expect("the kubeconfig is there");
    let mut kubeconfig: Value = serde_json::from_slice(&text).expect("it is JSON");
    kubeconfig["users"][0]["user"] = json!({"client-certificate": certificate, "client-key": certificate});
    fs::write(&config, kubeconfig.to_string()).expect("the kubeconfig is written");
    node.start_agent();
    let problem = "the client certificate expired at 2021-01-01T00:00:00Z";
    wait_until("the problem in the status", LONG, || {
        String::from_utf8_lossy(&node.command(&["status", "-o", "json"]).stdout).contains(problem)
    });
    wait_until("the event", LONG, || {
        let events = node.api().objects("/api/v1/namespaces/default/events");
        events.iter().any(|event| {
            event["reason"] == "InvalidClientCertificate"
                && event["message"].as_str().is_some_and(|message| message.contains(problem))
        })
    });
    assert_eq!(node.running("web"), before);
    node.finish();
}
