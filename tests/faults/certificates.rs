//! The API server's certificate has run out, or is not valid yet, while the agent runs and when
//! it starts; the connection to it is slow, or leads nowhere. What the node's own certificate
//! does when it runs out is in `tests/cluster/certificates.rs`: it takes a real server to refuse.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::api_server::{Case, MAX_RATE, attempts, begin_on, case, config, meanwhile, settle, wait_told};
use crate::support::fake_api::FakeApi;
use crate::support::front::{Flow, Front};
use crate::support::node::simple;
use crate::support::solo::{LONG, Solo};
use crate::support::wait::{pause, wait_until};
use crate::{side_by_side, tell};

const CASE: Case = case("behind TLS", 10, |_| {});

/// What happens to the way to the API server.
type Strike = fn(&Front);

const STRIKES: &[(&str, Strike)] = &[
    ("its certificate has run out", |front| front.set_certificate(-7200, -60)),
    ("its certificate is not valid yet", |front| front.set_certificate(600, 7200)),
    ("bytes come one by one", |front| front.set_flow(Flow::Drops(64, Duration::from_millis(10)))),
    ("connections lead nowhere", |front| front.set_flow(Flow::Sink)),
];

fn behind_tls() -> (Solo, Front) {
    let mut solo = Solo::prepare(config());
    let api = FakeApi::start();
    let front = Front::before(api.port);
    let authority = solo.path("ca.pem");
    fs::write(&authority, front.authority()).unwrap();
    solo.belong_to(api, json!({"server": front.url(), "certificate-authority": authority}));
    (solo, front)
}

#[test]
fn the_way_to_the_server_is_lost() {
    side_by_side(STRIKES, |(name, strike)| {
        let (solo, front) = behind_tls();
        let (solo, before) = begin_on(solo.start_joined(), &CASE);
        let (sent, begun) = (attempts(&solo), Instant::now());
        strike(&front);
        // Those whose certificate it was stay open, as they do on a real one.
        if name.contains("certificate") {
            front.cut();
        }
        meanwhile(&solo, true);
        while begun.elapsed() < Duration::from_secs(15) {
            solo.assert_no_twins();
            pause(Duration::from_millis(100));
        }
        let rate = (attempts(&solo) - sent) / begun.elapsed().as_secs_f64();
        tell(&format!("api server, {name}: {rate:.1} requests/s"));
        assert!(rate <= MAX_RATE, "{rate:.1} requests/s");
        if name.contains("certificate") {
            wait_until("the log to say what is wrong", LONG, || {
                solo.log().contains("x509: certificate has expired or is not yet valid")
            });
        }
        front.set_certificate(-60, 3600);
        front.set_flow(Flow::Free);
        front.cut();
        settle(solo, &CASE, &before, 0);
    });
}

/// The agent starts all the same, and runs what it has manifests for.
#[test]
fn a_certificate_is_no_good_at_a_start() {
    side_by_side(&[("run out", -7200, -60), ("not yet valid", 600, 7200)], |(_, from, until)| {
        let (mut solo, front) = behind_tls();
        front.set_certificate(*from, *until);
        solo.apply(&simple("fixed"));
        solo.start_agent();
        solo.wait_ready("fixed");
        solo.bind(&simple("web"));
        pause(Duration::from_secs(5));
        assert!(!solo.node_is_ready() && solo.running("web").is_empty());
        let running = solo.running("fixed");
        front.set_certificate(-60, 3600);
        wait_until("the node to be ready at the API server", LONG, || solo.node_is_ready());
        wait_told(&solo, &CASE, "web");
        wait_told(&solo, &CASE, "fixed");
        assert_eq!(solo.running("fixed"), running);
        solo.finish();
    });
}
