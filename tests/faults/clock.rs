//! The machine's clock is set while the agent runs, and is wrong when it starts: no container
//! starts again for it, no wait becomes longer, nothing is asked for all the time, and statuses
//! and lease go on. The runtime's clock is the same; the API server's is another machine's.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::{Case, MAX_RATE, attempts, begin_on, case, config, meanwhile, settle, wait_told};
use crate::support::node::{busybox, pod, restarts, simple};
use crate::support::solo::{LONG, Solo};
use crate::support::wait::{pause, wait_until};
use crate::{side_by_side, tell, two};

const DAY: i64 = 24 * 3600;

/// Calls to the runtime in a second. A few pods that start and stop take some.
const MAX_CALLS: f64 = 50.0;

/// One after the other, in seconds ahead of everybody else.
const JUMPS: &[(&str, &[i64])] = &[
    ("an hour ahead", &[3600]),
    ("an hour back", &[-3600]),
    ("a day ahead", &[DAY]),
    ("a day back", &[-DAY]),
    ("ten years ahead", &[3653 * DAY]),
    ("twenty years back", &[-7305 * DAY]),
    ("to and fro", &[DAY, -DAY, 30, -30]),
];

const CASE: Case = case("the clock is set", 10, |_| {});

/// A pod that asks for a token.
fn with_token(name: &str) -> Value {
    let mut pod = simple(name);
    pod["spec"]["serviceAccountName"] = json!("default");
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 600}});
    pod["spec"]["volumes"] = json!([{"name": "token", "projected": {"sources": [token]}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "token", "mountPath": "/token"}]);
    pod
}

fn joined() -> Solo {
    let mut solo = Solo::prepare(config());
    solo.own_clock();
    solo.start_joined()
}

fn token_requests(solo: &Solo) -> usize {
    solo.api().asked().iter().filter(|asked| asked.path().ends_with("/token")).count()
}

/// How many more are right on a slow machine: to a clock that is ahead each token has run out, and
/// one that is a minute old is asked for again.
fn more_requests(bound: Instant) -> usize {
    (bound.elapsed().as_secs() / 60) as usize
}

#[test]
fn it_is_set() {
    side_by_side(JUMPS, |(name, jumps)| {
        let (solo, before) = begin_on(joined(), &CASE);
        let bound = Instant::now();
        solo.bind(&with_token("token"));
        wait_told(&solo, &CASE, "token");
        solo.bind(&pod("loop", json!([busybox("main", "sleep 1; exit 1")])));
        let loops = || solo.shown("loop").map_or(0, |pod| restarts(&pod, "main"));
        wait_until("a container that waits for its next start", LONG, || loops() >= 1);
        // Into the wait before the second one, which takes ten seconds.
        pause(Duration::from_secs(3));
        let (sent, called, begun) = (attempts(&solo), solo.fake.calls().len(), Instant::now());
        for ahead in *jumps {
            solo.set_clock(*ahead);
            pause(Duration::from_secs(1));
        }
        meanwhile(&solo, true);
        while begun.elapsed() < Duration::from_secs(10) {
            solo.assert_no_twins();
            pause(Duration::from_millis(100));
        }
        let per_second = |count: f64| count / begun.elapsed().as_secs_f64();
        let rate = per_second(attempts(&solo) - sent);
        let calls = per_second((solo.fake.calls().len() - called) as f64);
        tell(&format!("clock, {name}: {rate:.1} requests/s, {calls:.1} calls/s"));
        assert!(rate <= MAX_RATE && calls <= MAX_CALLS, "{rate:.1} requests/s, {calls:.1} calls/s");
        wait_until("the next start after its wait", LONG, || loops() >= 2);
        // Once at the beginning, once for a clock that says it has run out, and the same again.
        let asked = token_requests(&solo);
        let most = 1 + jumps.len() + more_requests(bound);
        assert!(asked <= most, "{asked} requests for a token, at most {most}");
        settle(solo, &CASE, &before, 0);
    });
}

/// As on a machine without a battery for its clock: it starts with a wrong time, and learns the
/// right one later.
#[test]
fn it_is_wrong_at_a_start() {
    side_by_side(&[("a day ahead", DAY), ("a day back", -DAY), ("long ago", -7305 * DAY)], |(_, ahead)| {
        let mut solo = joined();
        solo.bind(&two("web"));
        let bound = Instant::now();
        solo.bind(&with_token("token"));
        solo.apply(&simple("fixed"));
        for name in ["web", "token", "fixed"] {
            wait_told(&solo, &CASE, name);
        }
        let running = |solo: &Solo| ["web", "token", "fixed"].map(|name| solo.running(name));
        let before = running(&solo);
        solo.kill_agent();
        solo.set_clock(*ahead);
        solo.start_agent();
        solo.bind(&simple("late"));
        wait_told(&solo, &CASE, "late");
        solo.set_clock(0);
        solo.bind(&simple("later"));
        for name in ["web", "token", "fixed", "late", "later"] {
            wait_told(&solo, &CASE, name);
        }
        assert_eq!(running(&solo), before);
        assert_eq!(restarts(&solo.shown("web").unwrap(), "one"), 0);
        let asked = token_requests(&solo);
        let most = 3 + more_requests(bound);
        assert!(asked <= most, "{asked} requests for a token, at most {most}");
        solo.finish();
    });
}
