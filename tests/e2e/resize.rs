//! Limits of a running container, changed in place.

use std::fs;

use serde_json::json;

use crate::support::node::{LONG, Node, condition, container, container_id, restarts, simple};
use crate::support::wait::wait_until;

/// The CPU quota of a process in percent of one CPU, from its own cgroup.
fn quota(pid: u32) -> Option<u64> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        if controllers.split(',').any(|one| one == "cpu") {
            for base in ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"] {
                let number = |file: &str| -> Option<u64> {
                    fs::read_to_string(format!("{base}{path}/{file}")).ok()?.trim().parse().ok()
                };
                if let (Some(quota), Some(period)) = (number("cpu.cfs_quota_us"), number("cpu.cfs_period_us"))
                {
                    return Some(quota * 100 / period);
                }
            }
        }
        if controllers.is_empty()
            && let Ok(text) = fs::read_to_string(format!("/sys/fs/cgroup{path}/cpu.max"))
        {
            let (quota, period) = text.trim().split_once(' ')?;
            return Some(quota.parse::<u64>().ok()? * 100 / period.parse::<u64>().ok()?);
        }
    }
    None
}

#[test]
fn a_running_container_gets_other_limits() {
    let node = Node::start("resize");
    let mut manifest = simple("web");
    manifest["metadata"]["uid"] = json!("fixed-resize");
    let resources = |cpu: &str| json!({"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"cpu": cpu, "memory": "64Mi"}});
    manifest["spec"]["containers"][0]["resources"] = resources("500m");
    node.apply("web.json", &manifest);
    let before = node.wait_ready("web");
    let id = container_id(&before, "main");
    let pid = node.process(&id);
    assert_eq!(quota(pid), Some(50));
    manifest["spec"]["containers"][0]["resources"] = resources("1500m");
    node.apply("web.json", &manifest);
    wait_until("the new quota", LONG, || quota(pid) == Some(150));
    assert_eq!(node.wait_told("web", "ResizeStarted", "Pod resize started: ").kind, "Normal");
    assert_eq!(node.wait_told("web", "ResizeCompleted", "Pod resize completed: ").kind, "Normal");
    let after = node.wait_pod("web", "without a resize under way", LONG, |pod| {
        condition(pod, "PodResizeInProgress").is_none() && condition(pod, "PodResizePending").is_none()
    });
    assert_eq!((container_id(&after, "main"), restarts(&after, "main")), (id, 0));
    let shown = container(&after, "main").and_then(|one| one.resources.clone()).and_then(|all| all.limits);
    assert_eq!(shown.and_then(|limits| limits.get("cpu").map(|cpu| cpu.0.clone())).as_deref(), Some("1500m"));
    node.finish();
}
