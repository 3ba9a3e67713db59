//! The API server misbehaves: no status is lost, no container starts again or twice, nothing
//! spins, and when it is well again it shows what is.
//!
//! Not here, for want of a way: packets that vanish (the options of the sockets are tested where
//! they are set, and with an address that vanishes; a server that says nothing is here). What
//! has to do with time is in `clock.rs` and `certificates.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use coracle::model::api::Pod;
use serde_json::{Value, json};

use crate::support::dice::{Dice, random_seed};
use crate::support::fake_api::{FakeApi, Fault, What, status};
use crate::support::node::{NODE, container, is_ready, restarts, simple};
use crate::support::solo::{LONG, Solo};
use crate::support::wait::{pause, wait_for, wait_until};
use crate::{BOTH, side_by_side, tell, two};

/// Watches that failed for long are tried again after up to 45 s, and many agents start at once.
const PATIENCE: Duration = Duration::from_secs(150);

/// Requests of one agent in a second, on average over a fault in which pods start and stop.
pub(crate) const MAX_RATE: f64 = 25.0;

/// Requests of one agent in a second when all is well again and nothing happens.
const MAX_IDLE_RATE: f64 = 10.0;

pub(crate) struct Case {
    name: &'static str,
    lasts: u64,
    strike: fn(&FakeApi),
    heal: fn(&FakeApi),
    /// What the server does by itself, all the time.
    tick: fn(&FakeApi),
}

impl fmt::Debug for Case {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name)
    }
}

pub(crate) const fn case(name: &'static str, lasts: u64, strike: fn(&FakeApi)) -> Case {
    Case { name, lasts, strike, heal: |_| {}, tick: |_| {} }
}

/// Every request gets this, beginning with new watches.
fn all(api: &FakeApi, what: What) {
    every(api, "", "", what);
}

fn every(api: &FakeApi, method: &'static str, path: &str, what: What) {
    api.fault(Fault::always(method, path, what));
    api.cut();
}

/// Every watch gets these lines and then ends.
fn watches(api: &FakeApi, lines: &[Value]) {
    let lines = lines.iter().map(|line| line.as_str().map_or_else(|| line.to_string(), str::to_owned));
    every(api, "GET", "watch=true", What::Lines(lines.collect()));
}

fn patches(api: &FakeApi, code: u16, reason: &'static str) {
    api.fault(Fault::always("PATCH", "/status", What::Status(code, reason, None)));
}

/// Comes back as it was long ago.
fn restored(api: &FakeApi) {
    api.go_down();
    api.restore();
    api.go_up();
}

const CASES: &[Case] = &[
    Case { heal: FakeApi::go_up, ..case("refuses connections", 20, FakeApi::go_down) },
    Case { heal: FakeApi::thaw, ..case("answers late", 15, FakeApi::freeze) },
    Case {
        heal: |api| {
            api.cut();
            api.thaw();
        },
        ..case("takes connections and never answers", 15, FakeApi::freeze)
    },
    case("is slow", 15, |api| all(api, What::Late(Duration::from_secs(2)))),
    case("429, come back", 10, |api| all(api, What::Status(429, "TooManyRequests", Some(1)))),
    case("429", 10, |api| all(api, What::Status(429, "TooManyRequests", None))),
    case("500", 10, |api| all(api, What::Status(500, "InternalError", None))),
    case("503", 10, |api| all(api, What::Status(503, "ServiceUnavailable", Some(0)))),
    case("401", 5, |api| all(api, What::Status(401, "Unauthorized", None))),
    // A proxy without anything behind it.
    case("404 without a word of Kubernetes", 10, |api| {
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 19\r\n\r\n404 page not found\n";
        all(api, What::Raw(answer.as_bytes().to_vec()));
    }),
    case("cuts every connection", 10, |api| all(api, What::Cut)),
    case("watches are gone", 10, |api| every(api, "GET", "watch=true", What::Status(410, "Gone", None))),
    case("watches expire", 10, |api| {
        watches(
            api,
            &[json!({"type": "ERROR", "object": status(410, "Expired", "too old resource version")})],
        );
    }),
    case("history is forgotten", 5, FakeApi::compact),
    Case { tick: FakeApi::bookmark, ..case("restored from a backup", 8, restored) },
    Case { tick: FakeApi::bookmark, ..case("restored at once", 8, FakeApi::restore) },
    case("half a line", 10, |api| {
        every(api, "GET", "watch=true", What::HalfLine(r#"{"type":"MODIFIED","object":{"metad"#.to_owned()));
    }),
    case("garbage", 10, |api| watches(api, &[json!("<html>"), json!("\u{0}\u{1b}{}}")])),
    case("no answers of HTTP", 10, |api| all(api, What::Raw(b"SSH-2.0-x\r\n\r\n".to_vec()))),
    case("a line without end", 10, |api| {
        let what = What::HalfLine("x".repeat(66 << 20));
        api.fault(Fault { times: 2, ..Fault::once("GET", "watch=true", what) });
        api.cut();
    }),
    Case {
        heal: |api| {
            api.heal();
            api.cut();
        },
        ..case("odd events", 10, |api| {
            let lines = [
                json!({"type": "STRANGE", "object": {}}),
                json!({"type": "ADDED"}),
                json!({"type": "MODIFIED", "object": 7}),
                json!({"type": "DELETED", "object": {"kind": "Fish", "metadata": {"name": 7}}}),
                json!({"type": "BOOKMARK", "object": []}),
            ];
            let text = lines.map(|line| format!("{line}\n")).concat();
            every(api, "GET", "watch=true", What::ThenSilence(text));
        })
    },
    Case {
        heal: |api| api.page(None),
        ..case("pages expire", 8, |api| {
            api.page(Some(1));
            api.fault(Fault::always("GET", "continue=", What::Status(410, "Expired", None)));
            every(api, "GET", "sendInitialEvents", What::Status(422, "Invalid", None));
            api.compact();
        })
    },
    Case { heal: |api| api.stutter(false), ..case("events come twice", 5, |api| api.stutter(true)) },
    case("the node is deleted", 5, |api| api.remove(&format!("/api/v1/nodes/{NODE}"))),
    case("the lease is another's", 8, |api| {
        every(api, "PUT", "/leases/", What::Status(409, "Conflict", None))
    }),
    case("statuses conflict", 8, |api| patches(api, 409, "Conflict")),
    case("statuses are invalid", 8, |api| patches(api, 422, "Invalid")),
    case("statuses of nobody", 8, |api| patches(api, 404, "NotFound")),
    case("pods of nobody", 8, |api| {
        for method in ["PATCH", "DELETE"] {
            api.fault(Fault::always(method, "/pods/", What::Status(404, "NotFound", None)));
        }
    }),
    case("answers are lost", 8, |api| {
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            api.fault(Fault::always(method, "", What::Lost));
        }
    }),
];

pub(crate) fn config() -> Value {
    json!({"nodeStatusUpdateFrequency": "2s", "nodeLeaseDurationSeconds": 8})
}

/// Whether the API server shows what is: the pod is ready, and its containers are those that
/// run.
fn is_told(solo: &Solo, name: &str) -> bool {
    let (Some(shown), Some(own)) = (solo.shown(name), solo.pod(name)) else { return false };
    is_ready(&shown) && statuses(&shown) == statuses(&own) && ids(&shown) == solo.running(name)
}

fn statuses(pod: &Pod) -> Value {
    json!(pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()))
}

fn ids(pod: &Pod) -> BTreeMap<String, Vec<String>> {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    all.map(|one| {
        let id = one.container_id.as_deref().and_then(|id| id.rsplit('/').next()).unwrap_or_default();
        (one.name.clone(), vec![id.to_owned()])
    })
    .collect()
}

pub(crate) fn wait_told(solo: &Solo, case: &Case, name: &str) {
    let begun = Instant::now();
    while !is_told(solo, name) {
        solo.assert_no_twins();
        (case.tick)(solo.api());
        assert!(
            begun.elapsed() < PATIENCE,
            "{case:?}: pod {name} is not told of; shown: {}; own: {}; running: {:?}",
            json!(solo.shown(name).map(|pod| pod.status)),
            json!(solo.pod(name).map(|pod| pod.status)),
            solo.running(name)
        );
        pause(Duration::from_millis(200));
    }
}

/// Attempts of the running agent so far, those without an answer included.
pub(crate) fn attempts(solo: &Solo) -> f64 {
    let page = solo.metrics();
    let lines = page.lines().filter(|line| line.starts_with("rest_client_requests_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// What ran when the fault began.
pub(crate) struct Before {
    web: BTreeMap<String, Vec<String>>,
    fixed: BTreeMap<String, Vec<String>>,
}

fn begin(case: &Case) -> (Solo, Before) {
    begin_on(Solo::join(config()), case)
}

/// The pods that are there when the fault begins.
pub(crate) fn begin_on(solo: Solo, case: &Case) -> (Solo, Before) {
    solo.bind(&two("web"));
    solo.bind(&simple("leaves"));
    solo.bind(&simple("hurt"));
    solo.apply(&simple("fixed"));
    for name in ["web", "leaves", "hurt", "fixed"] {
        wait_told(&solo, case, name);
    }
    let before = Before { web: solo.running("web"), fixed: solo.running("fixed") };
    (solo, before)
}

/// What happens meanwhile: a container dies, a user deletes a pod, pods come. An agent that
/// has not seen its pods yet leaves them as they are.
pub(crate) fn meanwhile(solo: &Solo, has_seen: bool) {
    let victim = solo.running("hurt")["main"][0].clone();
    assert!(solo.fake.kill_container(&victim, 3));
    solo.api().delete_pod(&Solo::pod_path("leaves"));
    solo.bind(&two("late"));
    solo.apply(&simple("fixed-late"));
    // These two need nobody.
    wait_until("the container to come back", LONG, || {
        !has_seen || solo.running("hurt").get("main").is_some_and(|ids| !ids.contains(&victim))
    });
    wait_until("the static pod to run", LONG, || !solo.running("fixed-late").is_empty());
    solo.assert_answers();
}

pub(crate) fn settle(solo: Solo, case: &Case, before: &Before, deaths: i32) {
    for name in ["web", "hurt", "late", "fixed", "fixed-late"] {
        wait_told(&solo, case, name);
    }
    wait_until("the deleted pod to be gone", PATIENCE, || {
        (case.tick)(solo.api());
        solo.shown("leaves").is_none() && solo.running("leaves").is_empty()
    });
    wait_until("the node to be ready", PATIENCE, || solo.node_is_ready());
    let lease = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}");
    let renewed = || solo.api().object(&lease).map(|lease| lease["spec"]["renewTime"].clone());
    let last = renewed();
    wait_until("the lease to be renewed", PATIENCE, || renewed().is_some() && renewed() != last);
    solo.assert_no_twins();
    assert_eq!((solo.running("web"), solo.running("fixed")), (before.web.clone(), before.fixed.clone()));
    assert_eq!(solo.containers("web").len(), BOTH.len(), "nothing was started in vain");
    let hurt = solo.shown("hurt").unwrap();
    // An agent that dies between the creation and the start costs a number.
    let count = restarts(&hurt, "main");
    assert!((1..=1 + deaths).contains(&count), "{count} restarts of a container that died once");
    assert!(container(&hurt, "main").is_some_and(|one| one.last_state.is_some()));
    // What was held back, such as events, may still be on its way for a while.
    wait_until(&format!("at most {MAX_IDLE_RATE} requests/s afterwards"), PATIENCE, || {
        let (sent, begun) = (solo.api().requests(), Instant::now());
        pause(Duration::from_secs(2));
        (solo.api().requests() - sent) as f64 / begun.elapsed().as_secs_f64() <= MAX_IDLE_RATE
    });
    solo.finish();
}

#[test]
fn it_misbehaves() {
    side_by_side(CASES, |case| {
        let (solo, before) = begin(case);
        let (sent, begun) = (attempts(&solo), Instant::now());
        (case.strike)(solo.api());
        meanwhile(&solo, true);
        while begun.elapsed() < Duration::from_secs(case.lasts) {
            solo.assert_no_twins();
            pause(Duration::from_millis(100));
        }
        let rate = (attempts(&solo) - sent) / begun.elapsed().as_secs_f64();
        tell(&format!("api server {case:?}: {rate:.1} requests/s during the fault"));
        solo.api().heal();
        (case.heal)(solo.api());
        settle(solo, case, &before, 0);
        assert!(rate <= MAX_RATE, "{rate:.1} requests/s during the fault");
    });
}

/// The agent dies at random moments of it, and the next one takes its pods over.
#[test]
fn it_misbehaves_and_the_agent_dies() {
    let seed = random_seed();
    tell(&format!("api server: seed of the kills {seed}"));
    let cases = [
        "refuses connections",
        "takes connections and never answers",
        "is slow",
        "429, come back",
        "500",
        "watches expire",
        "restored from a backup",
        "answers are lost",
    ];
    let cases: Vec<(usize, &Case)> =
        CASES.iter().filter(|case| cases.contains(&case.name)).enumerate().collect();
    side_by_side(&cases, |(number, case)| {
        let mut dice = Dice::new(seed + *number as u64);
        let (mut solo, before) = begin(case);
        (case.strike)(solo.api());
        let begun = Instant::now();
        pause(Duration::from_millis(dice.below(1500)));
        solo.kill_agent();
        solo.start_agent();
        meanwhile(&solo, false);
        for _ in 0..2 {
            pause(Duration::from_millis(dice.below(3000)));
            solo.kill_agent();
            solo.start_agent();
            solo.assert_no_twins();
        }
        pause(Duration::from_secs(case.lasts).saturating_sub(begun.elapsed()));
        solo.api().heal();
        (case.heal)(solo.api());
        settle(solo, case, &before, 3);
    });
}

/// It stops in time whatever state the server is in.
#[test]
fn it_misbehaves_and_the_agent_stops() {
    let cases: Vec<&Case> = CASES.iter().filter(|case| case.lasts >= 10).collect();
    side_by_side(&cases, |case| {
        let mut solo = Solo::join(config());
        solo.bind(&two("web"));
        wait_told(&solo, case, "web");
        (case.strike)(solo.api());
        solo.bind(&simple("late"));
        solo.assert_answers();
        pause(Duration::from_secs(2));
        solo.stop_agent();
    });
}

/// A secret that a node may not read yet: the authorizer learns of a binding a moment later.
#[test]
fn a_secret_is_forbidden_at_first() {
    let solo = Solo::join(config());
    let path = "/api/v1/namespaces/default/secrets/key";
    solo.api().put(path, json!({"data": {"word": "c2VzYW1l"}}));
    solo.api().fault(Fault::always("GET", "/secrets", What::Status(403, "Forbidden", None)));
    let mut pod = simple("web");
    pod["spec"]["volumes"] = json!([{"name": "key", "secret": {"secretName": "key"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "key", "mountPath": "/key"}]);
    pod["spec"]["containers"][0]["env"] =
        json!([{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "key", "key": "word"}}}]);
    let (sent, begun) = (attempts(&solo), Instant::now());
    solo.bind(&pod);
    pause(Duration::from_secs(8));
    assert!(solo.running("web").is_empty());
    solo.assert_answers();
    let rate = (attempts(&solo) - sent) / begun.elapsed().as_secs_f64();
    tell(&format!("api server, a secret is forbidden: {rate:.1} requests/s"));
    assert!(rate <= MAX_RATE, "{rate:.1} requests/s");
    solo.api().heal();
    wait_told(&solo, &CASES[0], "web");
    assert_eq!(solo.containers("web").len(), 1);
    assert!(!solo.log().contains("sesame") && !solo.log().contains("c2VzYW1l"));
    solo.finish();
}

/// While nobody hears of it a pod is deleted, and another gets its name.
#[test]
fn a_pod_is_created_again_between_two_lists() {
    side_by_side(&[1, 2, 3, 4], |_| created_again());
}

fn created_again() {
    let solo = Solo::join(config());
    solo.bind(&two("web"));
    wait_told(&solo, &CASES[0], "web");
    let before = ids(&solo.shown("web").unwrap());
    solo.api().go_down();
    solo.api().remove(&Solo::pod_path("web"));
    solo.bind(&two("web"));
    solo.api().go_up();
    wait_told(&solo, &CASES[0], "web");
    let after = ids(&solo.shown("web").unwrap());
    assert!(after.iter().all(|(name, ids)| before[name] != *ids), "{before:?}, {after:?}");
    wait_until("the first one's containers to end", LONG, || solo.running("web") == after);
    assert_eq!(restarts(&solo.shown("web").unwrap(), "one"), 0);
    solo.finish();
}

/// Who may make pods may write any mark. One that calls itself the mirror of a static pod under
/// another name is nobody's: it is not run, and the static pod is told of by its own.
#[test]
fn a_pod_that_calls_itself_a_mirror() {
    let solo = Solo::join(config());
    solo.apply(&simple("fixed"));
    wait_told(&solo, &CASES[0], "fixed");
    let running = solo.running("fixed");
    let uid = wait_for("the pod's UID", LONG, || solo.pod("fixed")?.metadata.uid);
    let mut forged = simple("forged");
    forged["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": uid,
        "kubernetes.io/config.hash": uid, "kubernetes.io/config.source": "file"});
    // A finalizer keeps it, so that what it would be told as can be seen.
    forged["metadata"]["finalizers"] = json!(["example.org/held"]);
    solo.bind(&forged);
    pause(Duration::from_secs(3));
    let patched = |name: &str| {
        let path = format!("{}/status", Solo::pod_path(name));
        solo.api().asked().iter().filter(|asked| asked.method == "PATCH" && asked.path() == path).count()
    };
    assert_eq!(patched("forged"), 0, "it has no status of ours");
    assert!(solo.running("forged").is_empty());
    // The real mirror goes on being told of.
    let before = patched("fixed");
    let victim = running["main"][0].clone();
    assert!(solo.fake.kill_container(&victim, 3));
    wait_until("the restart to be told", LONG, || {
        solo.shown("fixed").is_some_and(|pod| restarts(&pod, "main") == 1)
    });
    assert!(patched("fixed") > before);
    wait_told(&solo, &CASES[0], "fixed");
    solo.api().remove(&Solo::pod_path("forged"));
    solo.finish();
}

/// The watch of the node may lie behind that of pods. A refusal is final, so the node is read anew
/// before its labels refuse a pod, once for each.
#[test]
fn a_label_that_no_watch_has_told_counts() {
    // No patch of the status, whose answer would show the label, comes in this time.
    let solo = Solo::join(json!({"nodeStatusUpdateFrequency": "10m"}));
    solo.bind(&simple("first"));
    solo.wait_ready("first");
    let (one, all) = (format!("/api/v1/nodes/{NODE}"), "/api/v1/nodes?");
    let asked = |what: &str| {
        let is =
            |uri: &str| uri.split('?').next() == Some(what) || (what.ends_with('?') && uri.starts_with(what));
        solo.api().asked().iter().filter(|asked| asked.method == "GET" && is(&asked.uri)).count()
    };
    let mut node = solo.api().object(&one).unwrap();
    let version = &node["metadata"]["resourceVersion"];
    let bookmark = json!({"type": "BOOKMARK", "object": {"kind": "Node", "apiVersion": "v1",
        "metadata": {"resourceVersion": version}}});
    let before = asked(all);
    every(solo.api(), "GET", all, What::ThenSilence(format!("{bookmark}\n")));
    wait_until("the node to be watched again", LONG, || asked(all) > before);
    node["metadata"]["labels"]["example.org/room"] = json!("here");
    solo.api().put(&one, node);
    let reads = asked(&one);

    for (name, room) in [("here", "here"), ("there", "there")] {
        let mut pod = simple(name);
        pod["spec"]["nodeSelector"] = json!({"example.org/room": room});
        solo.bind(&pod);
        if name == "here" {
            solo.wait_ready(name);
            assert_eq!(asked(&one) - reads, 1);
        }
    }
    wait_until("the other pod to be refused", LONG, || {
        let status = solo.shown("there").and_then(|pod| pod.status);
        status.and_then(|status| status.reason).as_deref() == Some("NodeAffinity")
    });
    // Those that are known do not have it read again.
    solo.bind(&simple("last"));
    solo.wait_ready("last");
    assert_eq!(asked(&one) - reads, 2);
    solo.api().heal();
    solo.api().cut();
    solo.finish();
}

/// A server that does not show the node keeps nobody else waiting, and nobody for ever.
#[test]
fn a_node_that_cannot_be_read_counts_as_it_was_seen() {
    let solo = Solo::join(config());
    for name in ["first", "leaves"] {
        solo.bind(&simple(name));
        wait_told(&solo, &CASES[0], name);
    }
    let one = format!("/api/v1/nodes/{NODE}");
    let asked = || {
        let asked = solo.api().asked();
        asked.iter().filter(|asked| asked.method == "GET" && asked.uri.starts_with(&one)).count()
    };
    solo.api().fault(Fault::always("GET", &one, What::Hang));
    let (before, begun) = (asked(), Instant::now());
    let mut pod = simple("there");
    pod["spec"]["nodeSelector"] = json!({"example.org/room": "there"});
    solo.bind(&pod);
    wait_until("the node to be asked for", LONG, || asked() > before);
    solo.api().delete_pod(&Solo::pod_path("leaves"));
    solo.bind(&simple("comes"));
    let phase = |name: &str| solo.shown(name)?.status?.phase;
    wait_until("what goes on meanwhile", LONG, || {
        solo.shown("leaves").is_none() && phase("comes").as_deref() == Some("Running")
    });
    // A slow machine shows no order.
    if begun.elapsed() < Duration::from_secs(4) {
        assert_eq!(phase("there").as_deref(), Some("Pending"));
    }
    wait_until("the pod to be refused", LONG, || phase("there").as_deref() == Some("Failed"));
    assert!(begun.elapsed() >= Duration::from_secs(5), "it was not waited for");
    assert_eq!(asked() - before, 1, "one question, however many sets of pods come");
    solo.api().heal();
    solo.finish();
}

/// What the pod reads is good at every moment, though each token lives for seconds only.
#[test]
fn a_token_is_renewed_before_it_runs_out() {
    let mut config = config();
    config["syncFrequency"] = json!("1s");
    let solo = Solo::join(config);
    // A fifth of it is more than a busy machine holds anybody up.
    solo.api().token_seconds(Some(40));
    let mut pod = simple("web");
    pod["spec"]["serviceAccountName"] = json!("default");
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 600}});
    pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [token]}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    solo.bind(&pod);
    wait_told(&solo, &CASES[0], "web");
    let uid = solo.shown("web").and_then(|pod| pod.metadata.uid).unwrap();
    let file = solo.root().join("pods").join(uid).join("volumes/kubernetes.io~projected/v/token");
    let asked = || solo.api().asked().iter().filter(|asked| asked.path().ends_with("/token")).count();
    let mut seen = std::collections::BTreeSet::new();
    let earlier = asked();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(80) {
        let now = jiff::Timestamp::now().as_second();
        let text = std::fs::read_to_string(&file).unwrap();
        let end: i64 = text.rsplit('-').next().unwrap().parse().unwrap();
        assert!(now < end, "{text} has run out");
        seen.insert(text);
        pause(Duration::from_millis(100));
    }
    // A fifth of its life is left, or up to ten seconds more; never at every look.
    assert!((3..=8).contains(&seen.len()), "{seen:?}");
    // One for each but the first, and perhaps one for the next.
    let asked = asked() - earlier;
    assert!(asked <= seen.len(), "{asked} requests, {seen:?}");
    assert!(seen.iter().all(|token| !solo.log().contains(token)));
    solo.finish();
}
