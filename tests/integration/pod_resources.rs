//! The pod-resources API of a running agent, called over its socket.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use coracle::transport::generated::{methods::podresources as api, podresources as pb};
use coracle::transport::grpc::{CallError, Channel, Kind, UnaryMethod};
use coracle::util::stop::StopToken;
use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::{FOREVER, busybox, pod, simple};
use crate::support::wait::wait_until;

fn channel(node: &FakeNode) -> Channel {
    let socket = node.root().join("pod-resources/kubelet.sock");
    // The agent is healthy before it listens there, and an agent that was killed has left its socket.
    wait_until("the socket of the agent", LONG, || UnixStream::connect(&socket).is_ok());
    Channel::new(&format!("unix://{}", socket.display())).unwrap()
}

fn call<Req: Default, Resp: Unpin>(
    channel: &Channel,
    method: &'static UnaryMethod<Req, Resp>,
    request: &Req,
) -> Result<Resp, CallError> {
    channel.call_with_stop(method, request, Some(LONG), &StopToken::never())
}

fn list(channel: &Channel) -> Vec<pb::PodResources> {
    call(channel, &api::LIST, &pb::ListPodResourcesRequest::default()).unwrap().pod_resources
}

fn get(channel: &Channel, name: &str) -> Result<pb::PodResources, CallError> {
    let request = pb::GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
        ..Default::default()
    };
    let found = call(channel, &api::GET, &request)?;
    Ok(found.pod_resources.unwrap_or_default())
}

/// One CPU is reserved, so that the others can be exclusive.
fn config() -> Value {
    json!({"cpuManagerPolicy": "static", "kubeReserved": {"cpu": "500m"}})
}

fn guaranteed(name: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"limits": {"cpu": "1", "memory": "64Mi"}});
    pod(name, json!([main]))
}

#[test]
fn running_pods_are_listed_with_their_cpus_also_after_a_restart_of_the_agent() {
    let mut node = FakeNode::start_with(config());
    node.apply(&guaranteed("gu"));
    node.apply(&simple("be"));
    node.wait_ready("gu");
    node.wait_ready("be");
    let (own, shared) = (full_name("gu"), full_name("be"));
    let api_channel = channel(&node);
    let before = get(&api_channel, &own).unwrap();
    assert_eq!((before.name.as_str(), before.namespace.as_str()), (own.as_str(), "default"));
    assert_eq!((before.containers.len(), before.containers[0].cpu_ids.len()), (1, 1));
    assert_eq!(get(&api_channel, &shared).unwrap().containers[0].cpu_ids, [0_i64; 0]);
    let mut names: Vec<String> = list(&api_channel).into_iter().map(|pod| pod.name).collect();
    names.sort();
    assert_eq!(names, [shared.clone(), own.clone()]);
    let all =
        call(&api_channel, &api::GET_ALLOCATABLE_RESOURCES, &pb::AllocatableResourcesRequest::default())
            .unwrap();
    assert!(all.cpu_ids.contains(&before.containers[0].cpu_ids[0]), "{:?}", all.cpu_ids);
    let missing = get(&api_channel, "nosuch").unwrap_err();
    assert_eq!(missing.kind, Kind::Unknown);
    assert_eq!(missing.message, "pod nosuch in namespace default not found");
    let metric = |name: &str| {
        node.metric(&format!("kubelet_pod_resources_endpoint_{name}{{server_api_version=\"v1\"}}"))
    };
    let counts =
        ["requests_total", "requests_list", "requests_get", "requests_get_allocatable", "errors_get"];
    assert_eq!(counts.map(metric), [5.0, 1.0, 3.0, 1.0, 1.0]);
    // Only root can use it.
    let place = node.root().join("pod-resources");
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&place), mode(&place.join("kubelet.sock"))), (0o750, 0o600));
    node.kill_agent();
    node.start_agent();
    node.wait_ready("gu");
    let api_channel = channel(&node);
    assert_eq!(get(&api_channel, &own), Ok(before));
    node.remove("gu");
    node.wait_gone("gu", LONG);
    wait_until("the pod to be left out", LONG, || list(&api_channel).len() == 1);
    node.finish();
}
