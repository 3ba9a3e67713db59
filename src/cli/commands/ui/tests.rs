//! The pages over HTTP, from a real local API with made-up data.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::super::tests::Agent;
use super::gate::Gate;
use super::serve::{self, Server};
use crate::model::api::Pod;
use crate::offline::{Phase, Report};
use crate::server::PodView;
use crate::server::testing::FakeNode;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// Ends only a test that hangs.
const LONG: Duration = Duration::from_secs(60);
const SCRIPT: &str = "\"'><script>alert(1)";
const ESCAPED: &str = "&#34;&#39;&gt;&lt;script&gt;alert(1)";

/// `coracle ui` with an agent. When it is dropped, the signal ends the thread.
struct Site {
    agent: Agent,
    address: SocketAddr,
    token: String,
    _signal: UnixStream,
    _running: Running,
}

impl Site {
    fn start(change: impl FnOnce(&mut FakeNode)) -> Site {
        let agent = Agent::with(change);
        let (listener, address) = super::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let gate = Gate::new(address.port(), false).unwrap();
        let token = gate.token().to_owned();
        let (stopper, shutdown) = UnixStream::pair().unwrap();
        let server = Arc::new(Server::new(&agent.client(), gate, None, shutdown));
        let (signal, termination) = UnixStream::pair().unwrap();
        let running = threads::spawn("t/ui", Stack::Small, OnDeath::Unsupervised, move |_| {
            serve::run(&listener, &server, &termination).unwrap();
            drop(stopper);
        });
        Site { agent, address, token, _signal: signal, _running: running.unwrap() }
    }

    fn open(&self, method: &str, target: &str, fields: &[(&str, &str)]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut head = format!("{method} {target} HTTP/1.1\r\n");
        if !fields.iter().any(|(name, _)| *name == "Host") {
            head.push_str(&format!("Host: {}\r\n", self.address));
        }
        for (name, value) in fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    /// Status, and the whole response.
    fn request(&self, method: &str, target: &str, fields: &[(&str, &str)]) -> (u16, String) {
        let mut bytes = Vec::new();
        self.open(method, target, fields).read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let status = text.get(9..12).and_then(|digits| digits.parse().ok());
        (status.unwrap_or_else(|| panic!("{target}: {text}")), text)
    }

    fn cookie(&self) -> String {
        let (status, text) = self.request("GET", &format!("/?token={}", self.token), &[]);
        assert_eq!(status, 303, "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix("Set-Cookie: ")).unwrap();
        line.split(';').next().unwrap().to_owned()
    }

    /// A page of a new session.
    fn pages(&self, targets: &[&str]) -> Vec<(u16, String)> {
        let cookie = self.cookie();
        targets.iter().map(|target| self.request("GET", target, &[("Cookie", cookie.as_str())])).collect()
    }
}

#[test]
fn link_works_once_and_its_cookie_opens_the_pages() {
    let site = Site::start(|_| {});
    let link = format!("/?token={}", site.token);
    // A program that only checks a link does not use it up.
    assert_eq!(site.request("HEAD", &link, &[]).0, 401);
    assert_eq!(site.request("GET", &link, &[("Sec-Purpose", "prefetch")]).0, 503);
    assert_eq!(site.request("GET", "/?token=00000000000000000000000000000000", &[]).0, 403);
    let cookie = site.cookie();
    let (status, text) = site.request("GET", &link, &[("Cookie", cookie.as_str())]);
    assert!(status == 403 && text.contains("used already") && text.contains("start it again"), "{text}");
    let (status, text) = site.request("GET", "/", &[("Cookie", cookie.as_str())]);
    assert!(status == 200 && text.contains("<h1>Node node1</h1>"), "{text}");
    assert!(text.contains("Content-Security-Policy: default-src 'none'; script-src 'self'"), "{text}");
    let (status, head) = site.request("HEAD", "/", &[("Cookie", cookie.as_str())]);
    assert!(status == 200 && head.ends_with("\r\n\r\n") && !head.contains("<h1>"), "{head}");
}

#[test]
fn requests_without_session_from_other_sites_and_with_other_methods_are_refused() {
    let site = Site::start(|_| {});
    let cookie = site.cookie();
    let session = ("Cookie", cookie.as_str());
    for target in ["/", "/pod?uid=uid1", "/logs/follow?uid=uid1&container=a", "/nothing"] {
        let (status, text) = site.request("GET", target, &[]);
        assert!(status == 401 && !text.contains("web-node1"), "{target}: {text}");
    }
    // The script shows the reason as text.
    let (_, text) = site.request("GET", "/logs/follow?uid=uid1&container=a", &[]);
    assert!(text.contains("Content-Type: text/plain") && text.contains("no session"), "{text}");
    assert!(!text.contains('<'), "{text}");
    for (fields, expected) in [
        ([session, ("Host", "evil.example:80")], 421),
        ([session, ("Origin", "http://evil.example")], 403),
        ([session, ("Sec-Fetch-Site", "cross-site")], 403),
        ([session, ("Content-Length", "1")], 413),
        ([session, ("Accept", "text/html")], 200),
    ] {
        assert_eq!(site.request("GET", "/", &fields).0, expected, "{fields:?}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        assert_eq!(site.request(method, "/", &[session]).0, 405, "{method}");
    }
    assert_eq!(site.request("GET", "/", &[("A", "x".repeat(20_000).as_str())]).0, 431);
    assert_eq!(site.request("GET", "/nothing", &[session]).0, 404);
}

#[test]
fn each_page_shows_what_the_agent_has() {
    let site = Site::start(|node| {
        *node.offline.get_mut().unwrap() = Some(Report { phase: Phase::Alone, ..Report::default() });
    });
    let pages = site.pages(&[
        "/",
        "/pod?uid=uid1",
        "/storage",
        "/images",
        "/events",
        "/offline",
        "/logs?uid=uid1&container=a",
        "/pod?uid=web",
        "/pod?uid=uid9",
    ]);
    for ((status, text), (expected, words)) in pages.iter().zip([
        (200, &["/pod?uid=uid1\">web-node1</a>", "State of the node", "Pods (2)"][..]),
        (200, &["<h1>Pod default/web-node1</h1>", "/logs?uid=uid1&amp;container=a\">a</a>"][..]),
        (200, &["example.com/cam", "data\\u{1b}[31m"][..]),
        (200, &["a:1", "Archives"][..]),
        (200, &["<h1>Events</h1>"][..]),
        (200, &["<h1>Offline</h1>"][..]),
        (200, &["data-follow=\"/logs/follow?uid=uid1&amp;container=a\"", "\\u{1b}[31m\u{fffd}"][..]),
        // A name is no UID.
        (404, &["there is no pod with this UID"][..]),
        (404, &["there is no pod"][..]),
    ]) {
        assert_eq!(*status, expected, "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }
}

#[test]
fn each_page_names_its_node_and_one_without_access_does_not() {
    let mut site = Site::start(|_| {});
    let cookie = site.cookie();
    let session = ("Cookie", cookie.as_str());
    let named = |target: &str, fields: &[(&str, &str)]| {
        let (_, text) = site.request("GET", target, fields);
        let title = text.split("</title>").next().is_some_and(|head| head.contains("node1 - coracle"));
        (title, text.contains("<header><p id=\"node\">Node node1</p>"))
    };
    for target in [
        "/nothing",
        "/events",
        "/storage",
        "/images",
        "/offline",
        "/pod?uid=uid1",
        "/logs?uid=uid1&container=a",
        "/pod?uid=uid9",
        "/",
    ] {
        assert_eq!(named(target, &[session]), (true, true), "{target}");
    }
    assert_eq!(named("/events", &[]), (false, false));
    site.agent.stop();
    let (status, text) = site.request("GET", "/events", &[session]);
    assert!(status == 503 && text.contains("Node node1</p>"), "{text}");
}

#[test]
fn long_log_shows_its_end_from_the_start_of_a_line() {
    let site = Site::start(|node| {
        node.read_log = Box::new(|_, options, out, _| {
            let line = |number: usize| format!("line {number} {}\n", "x".repeat(1000)).into_bytes();
            let mut text: Vec<u8> = (0..500).flat_map(line).collect();
            text.truncate(options.limit_bytes.map_or(usize::MAX, |limit| limit as usize));
            Ok(out.write_all(&text).map_err(|error| error.to_string())?)
        });
    });
    let target = "/logs?uid=uid1&container=a";
    for (status, text) in site.pages(&[target, &format!("{target}&previous=1")]) {
        assert_eq!(status, 200);
        assert!(text.contains("line 499 x") && !text.contains("line 0 x"), "{}", text.len());
        assert!(text.contains("\">line ") && text.contains(", of them the end"), "{}", text.len());
    }
}

#[test]
fn pod_whose_every_text_is_a_script_stays_text() {
    let site = Site::start(|node| {
        node.pods = Box::new(|_| {
            let pod = json!({
                "metadata": {"namespace": SCRIPT, "name": SCRIPT, "uid": SCRIPT,
                    "labels": {SCRIPT: SCRIPT}, "annotations": {SCRIPT: SCRIPT}},
                "spec": {"containers": [{"name": SCRIPT, "image": SCRIPT, "args": [SCRIPT]}],
                    "volumes": [{"name": SCRIPT}]},
                "status": {"phase": SCRIPT, "reason": SCRIPT, "message": SCRIPT,
                    "conditions": [{"type": SCRIPT, "status": SCRIPT, "reason": SCRIPT, "message": SCRIPT}],
                    "containerStatuses": [{"name": SCRIPT, "ready": false, "restartCount": 1,
                        "image": SCRIPT, "imageID": SCRIPT,
                        "state": {"waiting": {"reason": SCRIPT, "message": SCRIPT}}}]},
            });
            let pod = serde_json::from_value(pod).unwrap();
            vec![PodView { pod, phase: SCRIPT.into(), last_error: Some(SCRIPT.into()), ..PodView::default() }]
        });
        node.read_log = Box::new(|_, _, out, _| {
            Ok(out.write_all(SCRIPT.as_bytes()).map_err(|error| error.to_string())?)
        });
    });
    let uid = super::super::client::encode(SCRIPT);
    let pages = site.pages(&["/", &format!("/pod?uid={uid}"), &format!("/logs?uid={uid}&container={uid}")]);
    for ((status, text), least) in pages.iter().zip([3, 20, 2]) {
        assert_eq!(*status, 200, "{text}");
        assert!(!text.contains("<script>") && !text.contains(SCRIPT), "{text}");
        assert_eq!(text.matches("<script").count(), 1, "only that of the page: {text}");
        assert!(text.matches(ESCAPED).count() >= least, "{text}");
    }
}

#[test]
fn pods_that_need_an_operator_come_first_of_200() {
    let site = Site::start(|node| {
        node.pods = Box::new(|_| {
            let status = |number: usize| {
                let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
                let running = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
                json!({"phase": "Running", "containerStatuses": [{"name": "a", "ready": number != 150,
                    "restartCount": 0, "image": "", "imageID": "",
                    "state": if number == 150 { waiting } else { running }}]})
            };
            let view = |number: usize| {
                let pod = json!({
                    "metadata": {"namespace": "n", "name": format!("pod-{number:03}"), "uid": format!("u{number:03}")},
                    "spec": {"containers": [{"name": "a"}]},
                    "status": status(number),
                });
                PodView { pod: serde_json::from_value(pod).unwrap(), ..PodView::default() }
            };
            (0..200).map(view).collect()
        });
    });
    let (status, text) = site.pages(&["/"]).remove(0);
    assert_eq!(status, 200);
    assert_eq!(text.matches("<td data-label=\"Name\"><a href=\"/pod?uid=").count(), 200);
    assert!(text.contains("<a href=\"#pods\">Pods that do not run as they should: 1 of 200</a>"), "{text}");
    assert!(text.contains("<h2 id=\"pods\" "), "{text}");
    let place = |name: &str| text.find(name).unwrap();
    assert!(place("pod-150") < place("pod-000") && place("pod-000") < place("pod-199"));
}

#[test]
fn agent_that_is_away_has_a_page_that_tries_again() {
    let mut site = Site::start(|_| {});
    let cookie = site.cookie();
    site.agent.stop();
    for target in ["/", "/pod?uid=uid1", "/events", "/images", "/storage", "/offline"] {
        let (status, text) = site.request("GET", target, &[("Cookie", cookie.as_str())]);
        assert!(status == 503 && text.contains("The agent is away"), "{target}: {text}");
        assert!(text.contains("no agent runs here") && text.contains("data-refresh=\"5\""), "{text}");
    }
    let follow = site.request("GET", "/logs/follow?uid=uid1&container=a", &[("Cookie", cookie.as_str())]);
    assert_eq!(follow.0, 503);
}

#[test]
fn log_is_followed_until_the_client_leaves_and_only_a_few_at_the_same_time() {
    let (stopped, has_stopped) = crossbeam_channel::bounded(16);
    let site = Site::start(|node| {
        node.read_log = Box::new(move |_, options, out, stop| {
            let _ = out.write_all(b"first <line>\n");
            let _ = out.flush();
            if options.follow {
                let _ = stop.wait(LONG);
                let _ = stopped.try_send(());
            }
            Ok(())
        });
    });
    let cookie = site.cookie();
    let target = "/logs/follow?uid=uid1&container=a";
    let open = || {
        let mut stream = site.open("GET", target, &[("Cookie", cookie.as_str())]);
        let mut text = Vec::new();
        let mut byte = [0];
        while !text.ends_with(b"first <line>\n") && stream.read(&mut byte).unwrap() == 1 {
            text.extend(byte);
        }
        assert!(text.starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&text));
        stream
    };
    let streams: Vec<TcpStream> = (0..8).map(|_| open()).collect();
    let (status, text) = site.request("GET", target, &[("Cookie", cookie.as_str())]);
    assert_eq!(status, 429, "{text}");
    // Pages do not wait for the logs.
    assert_eq!(site.request("GET", "/", &[("Cookie", cookie.as_str())]).0, 200);
    drop(streams);
    for _ in 0..8 {
        has_stopped.recv_timeout(LONG).expect("the agent ends each log");
    }
}

#[test]
fn followed_log_has_an_end_only_if_its_container_has_ended() {
    for (state, has_end) in [
        (json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}}), false),
        (json!({"terminated": {"exitCode": 1}}), true),
        (json!({"waiting": {"reason": "CrashLoopBackOff"}}), true),
    ] {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"namespace": "default", "name": "web-node1", "uid": "uid1"},
            "spec": {"containers": [{"name": "a"}]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "a", "ready": false,
                "restartCount": 0, "image": "", "imageID": "", "state": state.clone()}]},
        }))
        .unwrap();
        let site = Site::start(|node| {
            node.pods = Box::new(move |_| vec![PodView { pod: pod.clone(), ..PodView::default() }]);
            node.read_log =
                Box::new(|_, _, out, _| Ok(out.write_all(b"line\n").map_err(|error| error.to_string())?));
        });
        let (status, text) = site.pages(&["/logs/follow?uid=uid1&container=a"]).remove(0);
        assert!(status == 200 && text.contains("\r\n\r\n5\r\nline\n\r\n"), "{text}");
        assert_eq!(text.ends_with("\r\n0\r\n\r\n"), has_end, "{state}: {text}");
    }
}

#[test]
fn connections_without_session_give_way_and_those_with_one_stay() {
    let site = Site::start(|node| {
        node.read_log = Box::new(|_, options, out, stop| {
            let _ = out.write_all(b"first");
            let _ = out.flush();
            if options.follow {
                let _ = stop.wait(LONG);
            }
            Ok(())
        });
    });
    let cookie = site.cookie();
    let session = ("Cookie", cookie.as_str());
    let mut log = site.open("GET", "/logs/follow?uid=uid1&container=a", &[session]);
    log.read_exact(&mut [0]).unwrap();
    let idle: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(site.address).unwrap()).collect();
    assert_eq!(site.request("GET", "/", &[session]).0, 200);
    log.set_nonblocking(true).unwrap();
    let outcome = log.read_to_end(&mut Vec::new());
    assert_eq!(outcome.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "the log goes on");
    drop(idle);
}

#[test]
fn assets_are_small_and_the_script_makes_no_markup_of_text() {
    let (style, script) = (include_str!("style.css"), include_str!("ui.js"));
    assert!(style.len() + script.len() < 40 * 1024);
    for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http:", "https:"]
    {
        assert!(!script.contains(word) && !style.contains(word), "{word}");
    }
    assert!(!style.contains("url(") && !style.contains("@import"));
}
