//! Spans of a running agent, which a collector in this process receives.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use coracle::transport::generated::{methods, traces as pb};
use coracle::transport::rpc_server::{RpcError, Server, Service};
use coracle::util::stop::{self, StopSource, StopToken};
use serde_json::{Value, json};

use crate::main_port::{client, guarded};
use crate::support::fake_api::ReceivedRequest;
use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::simple;
use crate::support::tls_client::Authority;
use crate::support::wait::wait_until;

const INTERNAL: i32 = 1;
const SERVER: i32 = 2;
const CLIENT: i32 = 3;
const ERROR: i32 = 2;

type Requests = Arc<Mutex<Vec<pb::ExportRequest>>>;

/// A collector on a Unix socket.
struct Collector {
    dir: tempfile::TempDir,
    requests: Requests,
    /// Dropped: calls that wait are answered.
    closed: Option<StopSource>,
    _server: Server,
}

impl Collector {
    fn start() -> Collector {
        Collector::with(None)
    }

    /// Its calls never end.
    fn hanging() -> Collector {
        let (closed, opened) = stop::pair();
        Collector { closed: Some(closed), ..Collector::with(Some(opened)) }
    }

    fn with(gate: Option<StopToken>) -> Collector {
        let dir = tempfile::tempdir().unwrap();
        let requests = Requests::default();
        let received = Arc::clone(&requests);
        let service = Service::new().unary(
            &methods::traces::EXPORT,
            move |request: pb::ExportRequest, stop: &StopToken| -> Result<pb::ExportResponse, RpcError> {
                received.lock().unwrap().push(request);
                if let Some(gate) = &gate {
                    crossbeam_channel::select! {
                        recv(gate.signal()) -> _ => {}
                        recv(stop.signal()) -> _ => {}
                    }
                }
                Ok(pb::ExportResponse::default())
            },
        );
        let server = Server::start(&dir.path().join("collector.sock"), [service]).unwrap();
        Collector { dir, requests, closed: None, _server: server }
    }

    /// The agent's configuration.
    fn config(&self, rate: i64) -> Value {
        let socket: PathBuf = self.dir.path().join("collector.sock");
        let endpoint = format!("unix://{}", socket.display());
        json!({"tracing": {"endpoint": endpoint, "samplingRatePerMillion": rate}})
    }

    fn spans(&self) -> Vec<pb::Span> {
        let requests = self.requests.lock().unwrap();
        let scopes =
            requests.iter().flat_map(|request| &request.resource_spans).flat_map(|all| &all.scope_spans);
        scopes.flat_map(|scope| scope.spans.iter().cloned()).collect()
    }
}

fn attribute(all: &[pb::KeyValue], key: &str) -> Option<String> {
    let value = all.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.clone()?;
    Some(match value {
        pb::any_value::Value::StringValue(text) => text,
        pb::any_value::Value::IntValue(number) => number.to_string(),
        _ => return None,
    })
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn header(span: &pb::Span) -> String {
    format!("00-{}-{}-01", hexadecimal(&span.trace_id), hexadecimal(&span.span_id))
}

/// The spans of a pod's steps with this name.
fn steps<'a>(spans: &'a [pb::Span], name: &str, pod: &str) -> Vec<&'a pb::Span> {
    let of_pod = |span: &&pb::Span| {
        attribute(&span.attributes, "k8s.pod.name").as_deref() == Some(full_name(pod).as_str())
    };
    spans.iter().filter(|span| span.name == name).filter(of_pod).collect()
}

fn children<'a>(spans: &'a [pb::Span], parents: &[&pb::Span], name: &str) -> Vec<&'a pb::Span> {
    let is_child = |span: &&pb::Span| {
        parents.iter().any(|parent| span.parent_span_id == parent.span_id && span.trace_id == parent.trace_id)
    };
    spans.iter().filter(|span| span.name == name).filter(is_child).collect()
}

#[test]
fn spans_of_a_pod_arrive_with_their_parents() {
    let collector = Collector::start();
    let mut node = FakeNode::start_with(collector.config(1_000_000));
    let mut pod = simple("web");
    let mut second = pod["spec"]["containers"][0].clone();
    second["name"] = json!("second");
    pod["spec"]["containers"].as_array_mut().unwrap().push(second);
    node.apply(&pod);
    node.wait_ready("web");
    node.fake.fail_times("StopContainer", 1, coracle::transport::grpc::Kind::Internal, "not now");
    node.remove("web");
    node.wait_gone("web", LONG);
    // The runtime has stopped the pod before the agent takes its last step.
    wait_until("the span of the last step", LONG, || {
        !steps(&collector.spans(), "syncTerminatedPod", "web").is_empty()
    });
    assert_eq!(node.read_only("/pods").0, 200);
    // What has not been sent is sent at the end.
    node.stop_agent();
    let spans = collector.spans();

    let syncs = steps(&spans, "syncPod", "web");
    let created = syncs.first().expect("the pod was synced");
    assert_eq!((created.kind, created.parent_span_id.len(), created.trace_id.len()), (INTERNAL, 0, 16));
    assert_eq!(attribute(&created.attributes, "k8s.pod.update_type").as_deref(), Some("create"));
    assert_eq!(attribute(&created.attributes, "k8s.namespace.name").as_deref(), Some("default"));
    assert_eq!(attribute(&created.attributes, "k8s.pod"), Some(format!("default/{}", full_name("web"))));
    assert!(created.end_time_unix_nano >= created.start_time_unix_nano);
    let sandboxes = children(&spans, &syncs, "runtime.v1.RuntimeService/RunPodSandbox");
    let [sandbox] = sandboxes.as_slice() else { panic!("{sandboxes:?}") };
    assert_eq!(sandbox.kind, CLIENT);
    assert_eq!(attribute(&sandbox.attributes, "rpc.response.status_code").as_deref(), Some("OK"));
    assert_eq!(attribute(&sandbox.attributes, "rpc.system.name").as_deref(), Some("grpc"));
    // The runtime continues the trace.
    assert_eq!(node.fake.traceparents("RunPodSandbox"), [header(sandbox)]);
    assert_eq!(children(&spans, &syncs, "runtime.v1.RuntimeService/StartContainer").len(), 2);

    let stops = steps(&spans, "syncTerminatingPod", "web");
    // Also of containers that are stopped at the same time, on other threads.
    let stopped = children(&spans, &stops, "runtime.v1.RuntimeService/StopContainer");
    assert!(stopped.len() >= 2, "{stopped:?}");
    let failed: Vec<_> = stopped.iter().filter(|span| span.status.code == ERROR).collect();
    let [failed] = failed.as_slice() else { panic!("{stopped:?}") };
    assert_eq!(failed.status.message, "not now");
    assert_eq!(attribute(&failed.attributes, "rpc.response.status_code").as_deref(), Some("INTERNAL"));
    let failed = stops.iter().filter(|span| span.status.code == ERROR).collect::<Vec<_>>();
    let [failed] = failed.as_slice() else { panic!("{stops:?}") };
    assert!(failed.events.iter().any(|event| event.name == "exception"), "{failed:?}");
    assert!(!steps(&spans, "syncTerminatedPod", "web").is_empty());

    let succeeded =
        |span: &&pb::Span| attribute(&span.attributes, "http.response.status_code").as_deref() == Some("200");
    let request = spans.iter().filter(|span| span.name == "/pods/").find(succeeded);
    let request = request.expect("a request to the read-only port has a span");
    assert_eq!((request.kind, request.parent_span_id.len()), (SERVER, 0));

    let requests = collector.requests.lock().unwrap();
    let resource = requests[0].resource_spans[0].resource.as_ref().unwrap();
    assert_eq!(attribute(&resource.attributes, "service.name").as_deref(), Some("kubelet"));
    assert_eq!(attribute(&resource.attributes, "host.name").as_deref(), Some(crate::support::node::NODE));
}

#[test]
fn requests_of_authorized_callers_continue_their_traces() {
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let collector = Collector::start();
    let authority = Authority::new("clients");
    // Without a rate nothing is recorded but traces of callers.
    let mut node = guarded(&authority, &collector.config(0));
    let header = format!("traceparent: {PARENT}\r\n");
    assert_eq!(client(&node, None).get_with("/metrics/probes", &header).status, 401);
    let admin = client(&node, Some(&authority.issue("admin", &["admins"])));
    assert_eq!(admin.get_with("/metrics/cadvisor", "").status, 200);
    assert_eq!(admin.get_with("/pods/", &header).status, 200);
    node.stop_agent();
    let spans = collector.spans();
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["/pods/"]);
    let span = &spans[0];
    assert_eq!(hexadecimal(&span.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!((hexadecimal(&span.parent_span_id).as_str(), span.flags), ("b7ad6b7169203331", 0x301));
}

#[test]
fn requests_to_the_api_server_have_spans_and_carry_them() {
    let collector = Collector::start();
    let mut node = FakeNode::join(collector.config(1_000_000));
    node.stop_agent();
    let received = node.api().received();
    let registration =
        |request: &&ReceivedRequest| request.method == "POST" && request.path() == "/api/v1/nodes";
    let registration = received.iter().find(registration).expect("the node registers");
    let spans = collector.spans();
    let span = spans.iter().find(|span| header(span) == registration.header("traceparent"));
    let span = span.expect("the registration has a span");
    assert_eq!((span.name.as_str(), span.kind), ("HTTP POST", CLIENT));
    let value = |key| attribute(&span.attributes, key);
    assert!(value("url.full").is_some_and(|url| url.ends_with("/api/v1/nodes")), "{span:?}");
    assert_eq!(value("http.response.status_code").as_deref(), Some("201"));
    assert!(value("server.address").is_some() && value("server.port").is_some(), "{span:?}");
}

#[test]
fn without_tracing_there_is_no_thread_and_no_header() {
    let node = FakeNode::start();
    node.apply(&simple("web"));
    node.wait_ready("web");
    assert_eq!(node.fake.traceparents("RunPodSandbox"), [""; 0]);
    let tasks = fs::read_dir(format!("/proc/{}/task", node.pid())).unwrap();
    let names: Vec<String> =
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()).collect();
    assert!(names.iter().any(|name| name == "sync\n"), "{names:?}");
    assert!(!names.iter().any(|name| name == "traces\n"), "{names:?}");
    node.finish();
}

#[test]
fn collector_that_hangs_delays_neither_pods_nor_the_end_of_the_agent() {
    let collector = Collector::hanging();
    let mut node = FakeNode::start_with(collector.config(1_000_000));
    wait_until("a call to the collector", LONG, || !collector.requests.lock().unwrap().is_empty());
    // From here on no call has ended.
    node.apply(&simple("web"));
    node.wait_ready("web");
    node.remove("web");
    node.wait_gone("web", LONG);
    node.stop_agent();
    assert!(collector.closed.is_some());
}

#[test]
fn collector_that_is_away_costs_only_a_log_line() {
    let missing = json!({"tracing": {"endpoint": "unix:///nonexistent/collector.sock", "samplingRatePerMillion": 1_000_000}});
    let begun = Instant::now();
    let mut node = FakeNode::start_with(missing);
    node.apply(&simple("web"));
    node.wait_ready("web");
    wait_until("a report of the lost spans", LONG, || node.log().contains("spans are lost"));
    node.remove("web");
    node.wait_gone("web", LONG);
    node.stop_agent();
    // One in a minute, which a busy machine may need.
    let (reports, most) = (node.log().matches("spans are lost").count(), 1 + begun.elapsed().as_secs() / 60);
    assert!((1..=most).contains(&(reports as u64)), "{reports} reports, at most {most}");
}

#[test]
fn endpoint_that_cannot_be_used_is_refused_with_its_field() {
    let mut node = FakeNode::prepare(json!({"tracing": {"endpoint": "http://localhost:4317"}}));
    node.launch_agent();
    assert!(!node.wait_end().success());
    assert!(node.log().contains("tracing.endpoint"), "{}", node.log());
}
