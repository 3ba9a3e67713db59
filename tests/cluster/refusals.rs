//! Error responses of the node API, byte by byte: the table was recorded from the Go kubelet.

use serde_json::json;

use crate::joined::{JoinedNode, pod, shared};
use crate::support::node::{FOREVER, busybox};
use crate::support::tls_client::{Response, TlsClient};

/// The request, and the answer: its code, the type of its body, and its body.
#[rustfmt::skip]
const TABLE: &[(&str, u16, &str, &str)] = &[
    ("GET /", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /nothing", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("POST /pods", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("GET /metrics/none", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /containerLogs/default/none/main", 404, "text/plain; charset=utf-8", "pod \"none\" does not exist"),
    ("GET /containerLogs/default/web/none", 404, "text/plain; charset=utf-8", "container \"none\" not found in pod \"web\""),
    ("GET /containerLogs/default/web/main?tailLines=x", 400, "text/plain; charset=utf-8", "{\"message\": \"Unable to decode query.\"}"),
    ("GET /containerLogs/default/web/main?tailLines=-1", 422, "text/plain; charset=utf-8", "{\"message\": \"Invalid request.\"}"),
    ("GET /containerLogs/default/web/main?limitBytes=0", 422, "text/plain; charset=utf-8", "{\"message\": \"Invalid request.\"}"),
    ("GET /containerLogs/default/web/main?sinceSeconds=1&sinceTime=2020-01-01T00:00:00Z", 422, "text/plain; charset=utf-8", "{\"message\": \"Invalid request.\"}"),
    ("GET /containerLogs/default/web/main?sinceTime=x", 400, "text/plain; charset=utf-8", "{\"message\": \"Unable to decode query.\"}"),
    ("GET /containerLogs/default/web/main?previous=true", 400, "text/plain; charset=utf-8", "previous terminated container \"main\" in pod \"web\" not found"),
    ("GET /containerLogs/default/web/main?stream=Stdout", 400, "text/plain; charset=utf-8", "unable to return the given log stream: \"Stdout\". Please enable PodLogsQuerySplitStreams feature gate in kubelet"),
    ("GET /containerLogs/default/web", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("POST /containerLogs/default/web/main", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("GET /exec/default/web/main", 400, "text/plain; charset=utf-8", "you must specify at least 1 of stdin, stdout, stderr"),
    ("GET /exec/default/web/main?output=1", 500, "text/plain; charset=utf-8", "Upgrade request required\n"),
    ("GET /exec/default/none/main?output=1", 404, "text/plain; charset=utf-8", "pod does not exist"),
    ("PUT /exec/default/web/main?output=1", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("POST /attach/default/web/main", 400, "text/plain; charset=utf-8", "you must specify at least 1 of stdin, stdout, stderr"),
    ("POST /attach/default/none/main?output=1", 404, "text/plain; charset=utf-8", "pod does not exist"),
    ("GET /portForward/default/none", 404, "text/plain; charset=utf-8", "pod does not exist"),
    ("POST /portForward/default/web", 500, "text/plain; charset=utf-8", "Upgrade request required\n"),
    ("POST /run/default/none/main?cmd=true", 404, "text/plain; charset=utf-8", "pod does not exist"),
    ("POST /run/default/web/none?cmd=true", 500, "text/plain; charset=utf-8", "container not found (\"none\")"),
    ("POST /run/default/web/main?cmd=false", 500, "text/plain; charset=utf-8", "command 'false' exited with 1: "),
    ("GET /run/default/web/main?cmd=true", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("GET /logs/none", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /logs", 307, "text/html; charset=utf-8", "<a href=\"/logs/\">Temporary Redirect</a>.\n\n"),
    ("POST /logs/", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("GET /debug/flags/v", 406, "text/plain", "unsupported http method\n"),
    ("GET /debug/flags", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /healthz/none", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /healthz/ping", 200, "text/plain; charset=utf-8", "ok"),
    ("GET /healthz?exclude=none", 200, "text/plain; charset=utf-8", "ok"),
    ("GET /stats/none", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /stats", 307, "text/html; charset=utf-8", "<a href=\"/stats/\">Temporary Redirect</a>.\n\n"),
    ("GET /stats/", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /spec", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /spec/", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /cri/none", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /checkpoint/default/web/main", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("POST /checkpoint/default/none/main", 404, "text/plain; charset=utf-8", "pod does not exist"),
    ("POST /checkpoint/default/web/none", 404, "text/plain; charset=utf-8", "container none does not exist"),
    ("GET /runningpods", 307, "text/html; charset=utf-8", "<a href=\"/runningpods/\">Temporary Redirect</a>.\n\n"),
    ("POST /runningpods/", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("GET /configz/x", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /pods/x", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /runningpods/x", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /run", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /run/a", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("POST /run/a", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /exec", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /exec/", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /exec/a", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /attach/a/b", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /portForward/a", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("POST /checkpoint/a", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /checkpoint", 307, "text/html; charset=utf-8", "<a href=\"/checkpoint/\">Temporary Redirect</a>.\n\n"),
    ("GET /containerLogs", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /containerLogs/", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("GET /debug", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /debug/", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /flagz/x", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /statusz/x", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /healthz/", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /metrics/", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("GET /metrics/cadvisor/", 404, "text/plain; charset=utf-8", "404 page not found\n"),
    ("PUT /stats/summary", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("POST /exec/default/web/main/x/y?output=1", 404, "text/plain; charset=utf-8", "404: Page Not Found"),
    ("DELETE /containerLogs/default/web/main", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("PUT /run/default/web/main?cmd=true", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("PUT /portForward/default/web", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("PUT /checkpoint/default/web/main", 405, "text/plain; charset=utf-8", "405: Method Not Allowed"),
    ("GET /stats?x=1", 307, "text/html; charset=utf-8", "<a href=\"/stats/?x=1\">Temporary Redirect</a>.\n\n"),
];

/// The body of an answer of one chunk, or of none.
fn body(response: &Response) -> &str {
    let chunk = response.head.contains("Transfer-Encoding: chunked").then_some(response.body.as_str());
    let chunk = chunk.and_then(|body| body.split_once("\r\n")?.1.strip_suffix("\r\n0\r\n\r\n"));
    chunk.unwrap_or(&response.body)
}

// Runtimes: containerd 2.
#[test]
fn error_responses_equal_the_go_kubelets() {
    let joined = JoinedNode::prepare(shared(), "refuses", json!({"address": "0.0.0.0"})).start_and_wait();
    joined.bind(&pod("web", json!([busybox("main", FOREVER)])));
    joined.wait_ready("web");
    let node = joined.object().expect("the node is there");
    let port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].as_u64().expect("its port");
    let client = TlsClient::new(u16::try_from(port).expect("a port"), None);
    let mut differences = Vec::new();
    for (request_line, code, kind, text) in TABLE {
        let head = "Host: n\r\nContent-Length: 0\r\nConnection: close";
        let response = client.send(&format!("{request_line} HTTP/1.1\r\n{head}\r\n\r\n"));
        let shown = response.head.lines().find_map(|line| line.strip_prefix("Content-Type: "));
        // The Go kubelet leaves it out where it has begun to send.
        let got = (response.status, shown.unwrap_or("text/plain; charset=utf-8"), body(&response));
        if got != (*code, *kind, *text) {
            differences.push(format!("{request_line}: {got:?} and not {:?}", (code, kind, text)));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    joined.finish(&["web"]);
}
