//! Whether the agent starts at all.

use std::path::Path;

use serde_json::json;

use crate::support::node::Node;

#[test]
fn the_old_cgroups_have_to_be_asked_for() {
    let mut node = Node::prepare("cgroups", json!({"failCgroupV1": true}));
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // The unified hierarchy: nothing to object to.
        node.start_agent();
        node.finish();
        return;
    }
    node.launch_agent();
    let (status, log) = node.wait_ended();
    assert!(!status.success(), "{status}");
    assert!(log.contains("cgroup v1") && log.contains("failCgroupV1"), "{log}");
    node.configure(json!({"failCgroupV1": false}));
    node.start_agent();
    node.finish();
}
