//! The node API's responses without a port, and the fixture of the tests of its paths.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::routes;
use crate::server::http::request::{Method, Request};
use crate::server::http::response::Reply;
use crate::server::testing::FakeNode;
use crate::transport::http1::{Form, ResponseHead, ResponseWriter, Target};
use crate::util::stop::StopToken;

/// A node, and requests to it without a connection.
pub(crate) struct Fixture {
    pub node: Arc<FakeNode>,
}

/// A response as the client receives it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClientResponse {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl ClientResponse {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn brief(&self) -> (u16, String) {
        (self.status, self.text())
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

impl Fixture {
    pub(crate) fn new(change: impl FnOnce(&mut FakeNode)) -> Self {
        let mut node = FakeNode::new();
        change(&mut node);
        Fixture { node: Arc::new(node) }
    }

    pub(crate) fn send(&self, request: &Request) -> ClientResponse {
        let mut raw = Vec::new();
        let form = Form { is_1_1: false, keep_alive: false, head_only: false };
        let mut out = ResponseWriter::new(&mut raw, form, jiff::Timestamp::UNIX_EPOCH);
        match routes::route(request, &*self.node).unwrap_or_else(Reply::Whole) {
            Reply::Whole(response) => response.write(&mut out).unwrap(),
            Reply::Stream(stream) => stream(&mut out, &*self.node, &StopToken::never()).unwrap(),
        }
        out.finish().unwrap();
        let end = raw.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        let head = ResponseHead::parse(&raw[..end]).unwrap();
        let text = |value: &[u8]| String::from_utf8(value.to_vec()).unwrap();
        let headers = head.fields.iter().map(|(name, value)| (name.to_owned(), text(value))).collect();
        ClientResponse { status: head.status, headers, body: raw[end..].to_vec() }
    }

    pub(crate) fn get(&self, target: &str) -> ClientResponse {
        self.send(&request(Method::Get, target))
    }

    pub(crate) fn post(&self, target: &str) -> ClientResponse {
        self.send(&request(Method::Post, target))
    }
}

pub(crate) fn request(method: Method, target: &str) -> Request {
    Request { method, target: Target::parse(target), ..Request::default() }
}

#[test]
fn method_and_path_determine_the_status() {
    let fixture = Fixture::new(|_| {});
    let pods = fixture.get("/pods");
    assert_eq!((pods.status, pods.header("Content-Type")), (200, "application/json"));
    for (method, path, status) in [
        (Method::Get, "/healthz", 200),
        (Method::Get, "/pods/", 200),
        (Method::Post, "/pods", 405),
        (Method::Get, "/runningpods/", 200),
        (Method::Post, "/runningpods/", 405),
        (Method::Get, "/metrics", 200),
        (Method::Get, "/metrics/nothing", 404),
        (Method::Get, "/metrics/", 404),
        (Method::Get, "/healthz/", 404),
        (Method::Get, "/run/default/web/a", 405),
        (Method::Post, "/containerLogs/default/web/a", 405),
        (Method::Head, "/containerLogs/default/web/a", 405),
        (Method::Post, "/logs/", 405),
        (Method::Get, "/logs", 307),
        (Method::Get, "/stats", 307),
        (Method::Get, "/runningpods", 307),
        (Method::Get, "/runningpods/a", 404),
        (Method::Get, "/pods/a", 404),
        (Method::Get, "/configz/a", 404),
        (Method::Get, "/flagz/a", 404),
        (Method::Get, "/checkpoint", 307),
        (Method::Get, "/checkpoint/default/web/a", 405),
        (Method::Post, "/configz", 200),
        (Method::Get, "/configz", 200),
        (Method::Get, "/debug/pprof/", 404),
        (Method::Get, "/debug/pprof/heap", 404),
        (Method::Post, "/debug/pprof/heap", 405),
        (Method::Get, "/debug/flags", 404),
        (Method::Get, "/debug", 404),
        (Method::Get, "/exec/default/web/a", 404),
        (Method::Get, "/", 404),
        (Method::Get, "/v1/pods", 404),
    ] {
        let response = fixture.send(&request(method, path));
        assert_eq!(response.status, status, "{method:?} {path}: {}", response.text());
        if status == 405 {
            let acts = ["/run/", "/checkpoint/"].iter().any(|prefix| path.starts_with(prefix));
            let expected = (if acts { "POST" } else { "GET" }, "405: Method Not Allowed".to_owned());
            assert_eq!((response.header("Allow"), response.text()), expected, "{path}");
        }
    }
}

#[test]
fn missing_slash_is_redirected() {
    let fixture = Fixture::new(|_| {});
    let response = fixture.get("/logs?query=a&boot=<0>");
    assert_eq!(response.header("Location"), "/logs/?query=a&boot=<0>");
    assert_eq!(response.text(), "<a href=\"/logs/?query=a&amp;boot=&lt;0&gt;\">Temporary Redirect</a>.\n\n");
}

#[test]
fn debug_paths_return_405_when_debugging_is_off() {
    let fixture = Fixture::new(|node| node.switches.debugging = false);
    for path in [
        "/run/default/web/a",
        "/exec/default/web/a",
        "/attach/default/web/a",
        "/portForward/default/web",
        "/containerLogs/default/web/a",
        "/logs/",
        "/runningpods/",
        "/debug/pprof/",
    ] {
        assert_eq!(fixture.get(path).brief(), (405, "Debug endpoints are disabled.\n".to_owned()), "{path}");
    }
    for path in ["/configz", "/checkpoint/default/web/a", "/debug/flags/v", "/flagz", "/statusz"] {
        assert_eq!(fixture.get(path).status, 404, "{path}");
    }
    for path in ["/healthz", "/pods", "/metrics"] {
        assert_eq!(fixture.get(path).status, 200, "{path}");
    }
}

#[test]
fn each_switched_off_endpoint_is_rejected() {
    let fixture = Fixture::new(|node| {
        node.switches.system_logs = false;
        node.switches.debug_flags = false;
        node.switches.profiling = false;
        node.switches.checkpoint = false;
        node.switches.flagz = false;
        node.switches.statusz = false;
    });
    for (path, status, text) in [
        ("/logs/", 405, "logs endpoint is disabled.\n"),
        ("/logs/syslog", 405, "logs endpoint is disabled.\n"),
        ("/debug/flags/v", 405, "flags endpoint is disabled.\n"),
        ("/debug/pprof/heap", 405, "profiling endpoint is disabled.\n"),
        ("/flagz", 404, "404 page not found\n"),
        ("/statusz", 404, "404 page not found\n"),
    ] {
        assert_eq!(fixture.get(path).brief(), (status, text.to_owned()), "{path}");
    }
    assert_eq!(fixture.post("/checkpoint/default/web/a").status, 404);
}

#[test]
fn commands_run_and_checkpoints_are_made() {
    let fixture = Fixture::new(|_| {});
    let run = fixture.post("/run/default/web/a?cmd=echo+a++b");
    assert_eq!(run.brief(), (200, r#"uid1 a ["echo", "a", "", "b"]"#.to_owned()));
    assert_eq!(run.header("Content-Type"), "application/json");
    assert_eq!(run.header("Content-Length"), run.body.len().to_string());
    assert_eq!(fixture.post("/run/default/web/any-uid/a?cmd=x").text(), r#"uid1 a ["x"]"#);
    assert_eq!(
        fixture.post("/run/default/web/a?cmd=fail").brief(),
        (500, "command 'fail' exited with 1: ".to_owned())
    );
    assert_eq!(fixture.post("/run/default/absent/a?cmd=x").brief(), (404, "pod does not exist".to_owned()));
    assert_eq!(fixture.post("/run/default/web").status, 404);

    for (target, status, text) in [
        ("/checkpoint/default/web/a", 200, r#"{"items":["/ck/Some(\"web\")-a-0.tar"]}"#),
        ("/checkpoint/default/web/a?timeout=1&timeout=7", 200, r#"{"items":["/ck/Some(\"web\")-a-7.tar"]}"#),
        ("/checkpoint/default/web/a?timeout=x", 404, "cannot parse value of timeout parameter"),
        ("/checkpoint/default/web/a?timeout=13", 500, "checkpointing of default/web/a failed (not offered)"),
        ("/checkpoint/default/web/none", 404, "container none does not exist"),
        ("/checkpoint/default/absent/a", 404, "pod does not exist"),
    ] {
        let response = fixture.post(target);
        assert_eq!(response.status, status, "{target}");
        let path = response.text().replace("\\\"", "\"");
        assert_eq!(path, text.replace("\\\"", "\""), "{target}");
    }
}
