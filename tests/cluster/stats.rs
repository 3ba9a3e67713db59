//! Numbers of a node of a cluster, by way of the API server.

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, pod, served, shared, text};
use crate::support::launch::{merged, runs_go_kubelet};
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::{wait_for, wait_until};

// Runtimes: containerd 2.
#[test]
fn summary_is_available_through_the_api_server() {
    let plane = shared();
    let config = merged(served(plane), json!({"serverTLSBootstrap": true}));
    let joined = JoinedNode::prepare(plane, "stats", config).start_and_wait();
    let two = pod("summed", json!([busybox("main", FOREVER), busybox("side", FOREVER)]));
    joined.bind(&two);
    let shown = joined.wait_ready("summed");
    let raw = |path: &str| {
        let target = format!("/api/v1/nodes/{}/proxy{path}", joined.name);
        let output = plane.try_kubectl(&["get", "--raw", &target], "");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(text)
    };
    // The API server asks for a certificate that it can check.
    let wanted = wait_for("a request for a serving certificate", LIMIT, || {
        let list = plane.poll(&["csr"])?;
        let all = list["items"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|csr| {
            text(csr, "/spec/signerName") == "kubernetes.io/kubelet-serving"
                && text(csr, "/spec/username") == "system:node:stats"
        })
    });
    plane.kubectl(&["certificate", "approve", text(&wanted, "/metadata/name")]);
    let summary = || -> Option<Value> { serde_json::from_str(&raw("/stats/summary")?).ok() };
    wait_until("numbers of the pod", LIMIT, || {
        summary().is_some_and(|summary| {
            let mut pods = summary["pods"].as_array().into_iter().flatten();
            pods.any(|pod| {
                pod["podRef"]["uid"] == shown["metadata"]["uid"]
                    && pod["containers"].as_array().is_some_and(|all| all.len() == 2)
                    && pod["memory"]["workingSetBytes"].as_u64() > Some(0)
            })
        })
    });
    // A busy node may not respond in time.
    assert_eq!(wait_for("a summary", LIMIT, summary)["node"]["nodeName"], *joined.name);
    let page = wait_for("the page", LIMIT, || raw("/metrics/resource"));
    assert!(page.contains("resource_scrape_error 0\n"), "{page}");
    for container in ["main", "side"] {
        let series = format!(
            "container_cpu_usage_seconds_total{{container=\"{container}\",namespace=\"default\",pod=\"summed\"}}"
        );
        let line = page
            .lines()
            .find(|line| line.starts_with(&series))
            .unwrap_or_else(|| panic!("{series} in {page}"));
        assert_eq!(line.split(' ').count(), 3, "a value and its time: {line}");
    }
    let own = wait_for("the page of the agent", LIMIT, || raw("/metrics"));
    for name in ["kubelet_node_startup_duration_seconds ", "kubelet_certificate_manager_server_ttl_seconds "]
    {
        assert!(own.lines().any(|line| line.starts_with(name)), "no {name}");
    }
    // The API server asks for the certificate that it gave out, of a year.
    let left = joined.node.metric("kubelet_certificate_manager_server_ttl_seconds");
    assert!((86_400.0..=366.0 * 86_400.0).contains(&left), "{left}");
    if !runs_go_kubelet() {
        assert!(joined.node.metric("kubelet_certificate_manager_client_ttl_seconds") > 1e9);
    }
    let parts = own.lines().filter(|line| line.starts_with("kubelet_node_startup_"));
    assert!(parts.clone().count() == 5 && parts.clone().all(|line| !line.contains(" -")), "{own}");
    for part in ["request", "response"] {
        let series = format!("rest_client_{part}_size_bytes_count{{verb=\"POST\"");
        assert!(own.lines().any(|line| line.starts_with(&series)), "{series} in {own}");
    }
    joined.finish(&["summed"]);
}
