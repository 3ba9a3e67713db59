//! CSI: claims and inline volumes of the driver of `tests/controlplane/plugin`, which is made of the
//! libraries of real drivers. Its volumes are made when they are first used, so that persistent
//! volumes need no provisioner.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::{Value, json};

use crate::claims::{self, claim_spec, delete, of_claim, prepared, wait_log, wait_refusal, with_volume};
use crate::joined::{JoinedNode, LIMIT, condition, directory, pod, shared, text};
use crate::support::launch;
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::{holds_for, wait_until};

/// The access mode of the volumes.
const ONCE: &str = "ReadWriteOnce";

/// The running driver. It ends with SIGKILL.
struct CsiDriver {
    name: String,
    starts: u32,
    process: Option<Child>,
}

impl CsiDriver {
    /// Makes the objects of a test; the driver does not run yet.
    fn new(test: &str) -> CsiDriver {
        let name = format!("{test}.csi.test");
        shared().apply(&json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": name},
            "spec": {"attachRequired": false, "podInfoOnMount": true, "fsGroupPolicy": "File",
                "volumeLifecycleModes": ["Persistent", "Ephemeral"]},
        }));
        CsiDriver { name, starts: 0, process: None }
    }

    fn start(&mut self, joined: &JoinedNode<'_>) {
        self.starts += 1;
        let mut command = Command::new(shared().bin().join("plugin"));
        command.args(["csi", "--driver", &self.name, "--node", "the-node", "--root"]).arg(joined.node.root());
        command.arg("--state").arg(directory(&joined.name).join("volumes-of-driver"));
        self.process = Some(launch::spawn(&mut command, &self.log_of(joined, self.starts)));
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    fn log_of(&self, joined: &JoinedNode<'_>, start: u32) -> PathBuf {
        directory(&joined.name).join(format!("driver-{start}.log"))
    }

    /// The lines of all its starts.
    fn log(&self, joined: &JoinedNode<'_>) -> Vec<String> {
        let read = |start| fs::read_to_string(self.log_of(joined, start)).unwrap_or_default();
        (1..=self.starts)
            .flat_map(|start| read(start).lines().map(str::to_owned).collect::<Vec<_>>())
            .collect()
    }

    /// The number of successful calls of a method.
    fn calls(&self, joined: &JoinedNode<'_>, method: &str) -> usize {
        let is_it = |line: &&String| line.starts_with(&format!("{method} ")) && line.ends_with(" OK");
        self.log(joined).iter().filter(is_it).count()
    }

    fn assert_no_violation(&self, joined: &JoinedNode<'_>) {
        let log = self.log(joined);
        assert!(log.iter().all(|line| !line.starts_with("VIOLATION")), "{}", log.join("\n"));
    }

    /// Where the data of a volume are.
    fn source(&self, name: &str) -> Value {
        json!({"csi": {"driver": self.name, "volumeHandle": format!("handle-of-{name}"),
            "volumeAttributes": {"a": "b"}}})
    }

    /// A claim and its volume.
    fn claim(&self, name: &str, mode: &str) {
        claims::claim(name, (mode, ONCE), &self.source(name));
    }
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        self.kill();
    }
}

fn mounts_below(path: &Path) -> Vec<String> {
    claims::mounts_below(path, "csi")
}

/// The volumes of a pod are unmounted before it is deleted. A driver that is slow to unstage does not hold up
/// the deletion.
fn assert_no_mounts_in_pods(joined: &JoinedNode<'_>) {
    assert_eq!(mounts_below(&joined.node.root().join("pods")), Vec::<String>::new());
}

// Runtimes: containerd 2.
#[test]
fn claims_keep_their_data_over_pods_and_restarts_of_agent_and_driver() {
    let mut joined = prepared("csia");
    let mut driver = CsiDriver::new("csia");
    driver.claim("csia-claim", "Filesystem");
    let mut writer = with_volume(
        "csia-writer",
        of_claim("csia-claim"),
        false,
        "echo hello >/data/file; id; stat -c 'group %g' /data/file",
    );
    writer["spec"]["securityContext"] = json!({"fsGroup": 4711});
    joined.bind(&writer);
    let missing = format!("driver name {} not found in the list of registered CSI drivers", driver.name);
    wait_refusal(&joined, "csia-writer", &missing);
    driver.start(&joined);
    let entry = json!({"name": driver.name, "nodeID": "the-node", "allocatable": {"count": 20},
        "topologyKeys": [format!("topology.{}/node", driver.name)]});
    shared().wait(&["csinode", "csia"], "with the driver", LIMIT, |node| {
        node["spec"]["drivers"] == json!([entry])
    });
    let label = format!("/metadata/labels/topology.{}~1node", driver.name);
    let ids = json!({&driver.name: "the-node"}).to_string();
    shared().wait(&["node", "csia"], "with the label and the id of the driver", LIMIT, |node| {
        text(node, &label) == "the-node"
            && text(node, "/metadata/annotations/csi.volume.kubernetes.io~1nodeid") == ids
    });
    joined.wait_ready("csia-writer");
    wait_log("csia-writer", "group 4711");
    delete(&joined, "csia-writer");
    assert_no_mounts_in_pods(&joined);
    wait_until("no mounts", LIMIT, || mounts_below(&joined.node.root()).is_empty());

    joined.bind(&with_volume("csia-reader", of_claim("csia-claim"), false, "cat /data/file"));
    let before = joined.wait_ready("csia-reader");
    wait_log("csia-reader", "hello");
    let kind = format!("persistentVolumeClaim csia-claim ({})", driver.name);
    let listed = joined.node.cli(&["volumes"]);
    assert!(listed.lines().any(|line| line.contains(&kind) && line.contains("mounted")), "{listed}");
    let page = joined.node.read_only("/metrics").1;
    for metric in ["csi_operations_seconds_count{driver_name=", "operation_name=\"volume_unmount\""] {
        assert!(page.contains(metric), "{metric}");
    }
    // The pod does not notice that the agent is killed.
    let mounted = mounts_below(&joined.node.root());
    assert_eq!(mounted.len(), 2, "{mounted:?}");
    joined.node.kill_agent();
    joined.node.start_agent();
    let published = driver.calls(&joined, "NodePublishVolume");
    wait_until("the volume is found again", LIMIT, || {
        driver.calls(&joined, "NodePublishVolume") > published || joined.node.log().contains("is up after")
    });
    let id = |pod: &Value| text(pod, "/status/containerStatuses/0/containerID").to_owned();
    assert_eq!(id(&joined.wait_ready("csia-reader")), id(&before));
    assert_eq!(shared().kubectl(&["exec", "csia-reader", "--", "cat", "/data/file"]).trim(), "hello");
    assert_eq!(mounts_below(&joined.node.root()), mounted);

    // Without its driver the volume stays, and so does the pod that ends.
    driver.kill();
    assert_eq!(shared().kubectl(&["exec", "csia-reader", "--", "cat", "/data/file"]).trim(), "hello");
    shared().kubectl(&["delete", "pod", "csia-reader", "--wait=false", "--grace-period=1"]);
    joined.wait_pod("csia-reader", "stopped", |pod| {
        pod["status"]["containerStatuses"][0]["state"]["terminated"].is_object()
    });
    holds_for("the pod waits for the driver", Duration::from_secs(5), || {
        joined.plane.get(&["pod", "csia-reader"]).is_some()
    });
    assert_eq!(mounts_below(&joined.node.root()), mounted);
    driver.start(&joined);
    joined.wait_gone("csia-reader");
    driver.assert_no_violation(&joined);
    // The socket that is removed signs the driver off.
    driver.kill();
    let socket = joined.node.root().join(format!("plugins_registry/{}-reg.sock", driver.name));
    fs::remove_file(socket).expect("the socket is there");
    shared().wait(&["csinode", "csia"], "without drivers", LIMIT, |node| {
        node["spec"]["drivers"].as_array().is_none_or(Vec::is_empty)
    });
    joined.finish(&[]);
}

// Runtimes: containerd 2.
#[test]
fn devices_of_claims_keep_their_data_and_volumes_grow_while_they_are_used() {
    let joined = prepared("csib");
    let mut driver = CsiDriver::new("csib");
    driver.start(&joined);
    driver.claim("csib-device", "Block");
    driver.claim("csib-grows", "Filesystem");
    let write = "printf device-data | dd of=/dev/data conv=notrunc,fsync && echo written";
    joined.bind(&with_volume("csib-writer", of_claim("csib-device"), true, write));
    joined.bind(&with_volume("csib-grower", of_claim("csib-grows"), false, "touch /data/x"));
    joined.wait_ready("csib-writer");
    wait_log("csib-writer", "written");
    delete(&joined, "csib-writer");
    joined.bind(&with_volume(
        "csib-reader",
        of_claim("csib-device"),
        true,
        "dd if=/dev/data bs=11 count=1; echo",
    ));
    joined.wait_ready("csib-reader");
    wait_log("csib-reader", "device-data");

    joined.wait_ready("csib-grower");
    shared().kubectl(&["patch", "pv", "csib-grows", "-p", r#"{"spec":{"capacity":{"storage":"2Gi"}}}"#]);
    shared().wait(&["pvc", "csib-grows"], "grown", LIMIT, |claim| {
        text(claim, "/status/capacity/storage") == "2Gi"
    });
    let log = driver.log(&joined);
    assert!(log.iter().any(|line| line == "Size handle-of-csib-grows 2147483648"), "{}", log.join("\n"));
    wait_until("the event of the growth", LIMIT, || {
        joined.events("csib-grower").iter().any(|(reason, _)| reason == "FileSystemResizeSuccessful")
    });
    delete(&joined, "csib-reader");
    delete(&joined, "csib-grower");
    let unstaged = || driver.calls(&joined, "NodeUnstageVolume");
    wait_until("the last volume to be unstaged", LIMIT, || unstaged() >= 3);
    assert_eq!(unstaged(), 3);
    driver.assert_no_violation(&joined);
    joined.finish(&[]);
}

/// The volume of a pod in `/stats/summary`.
fn measured(joined: &JoinedNode<'_>, pod: &str) -> Option<Value> {
    let (_, text) = joined.node.read_only("/stats/summary");
    let summary: Value = serde_json::from_str(&text).ok()?;
    let pods = summary.get("pods")?.as_array()?;
    let pod = pods.iter().find(|stats| stats.pointer("/podRef/name").and_then(Value::as_str) == Some(pod))?;
    pod.pointer("/volume/0").cloned()
}

// Runtimes: containerd 2.
#[test]
fn volumes_have_the_size_that_their_driver_reports_and_no_health() {
    let joined = prepared("csih");
    let mut driver = CsiDriver::new("csih");
    driver.start(&joined);
    driver.claim("csih-device", "Block");
    driver.claim("csih-unwell", "Filesystem");
    joined.bind(&with_volume("csih-user", of_claim("csih-device"), true, "true"));
    joined.bind(&with_volume("csih-patient", of_claim("csih-unwell"), false, "true"));
    for pod in ["csih-user", "csih-patient"] {
        joined.wait_ready(pod);
    }
    for (pod, claim) in [("csih-user", "csih-device"), ("csih-patient", "csih-unwell")] {
        wait_until(&format!("the size of the volume of {pod}"), LIMIT, || {
            measured(&joined, pod).is_some_and(|volume| {
                // The driver reports a condition; since 1.37 it is not read.
                volume["volumeHealthStats"].is_null()
                    && volume["pvcRef"]["name"] == json!(claim)
                    && volume["capacityBytes"].is_u64()
            })
        });
        let labels = format!("namespace=\"default\",persistentvolumeclaim=\"{claim}\"");
        let series = |name: &str| joined.node.metric(&format!("kubelet_volume_stats_{name}{{{labels}}}"));
        wait_until(&format!("the metrics of {claim}"), LIMIT, || series("capacity_bytes") > 0.0);
    }
    assert!(joined.events("csih-patient").iter().all(|(reason, _)| reason != "VolumeConditionAbnormal"));
    for pod in ["csih-user", "csih-patient"] {
        delete(&joined, pod);
    }
    driver.assert_no_violation(&joined);
    joined.finish(&[]);
}

// Runtimes: containerd 2.
#[test]
fn ephemeral_volumes_end_with_their_pods_also_of_force_deleted_ones() {
    let mut joined = prepared("csic");
    let mut driver = CsiDriver::new("csic");
    driver.start(&joined);
    let inline = json!({"csi": {"driver": driver.name, "volumeAttributes": {"greeting": "good-day"}}});
    joined.bind(&with_volume("csic-inline", inline.clone(), false, "cat /data/pod"));
    joined.wait_ready("csic-inline");
    wait_log("csic-inline", "default/csic-inline good-day");
    // The controller makes the claim of a generic ephemeral volume.
    claims::volume("csic-volume", "csic-generic-v", ("Filesystem", ONCE), &driver.source("csic-volume"));
    let generic = json!({"ephemeral": {"volumeClaimTemplate": {"spec": claim_spec("Filesystem", ONCE)}}});
    joined.bind(&with_volume("csic-generic", generic, false, "echo kept >/data/x; cat /data/x"));
    joined.wait_ready("csic-generic");
    wait_log("csic-generic", "kept");
    let state = directory("csic").join("volumes-of-driver");
    assert_eq!(fs::read_dir(state.join("ephemeral")).expect("a directory").count(), 1);
    assert!(state.join("volumes/handle-of-csic-volume/x").exists());
    for pod in ["csic-inline", "csic-generic"] {
        shared().kubectl(&["delete", "pod", pod, "--force", "--grace-period=0", "--wait=false"]);
    }
    wait_until("no mounts", LIMIT, || mounts_below(&joined.node.root()).is_empty());
    wait_until("no ephemeral volume", LIMIT, || {
        fs::read_dir(state.join("ephemeral")).is_ok_and(|mut dir| dir.next().is_none())
    });
    // The pod is deleted while neither agent nor driver runs.
    joined.bind(&with_volume("csic-lost", inline, false, "cat /data/pod"));
    joined.wait_ready("csic-lost");
    joined.node.kill_agent();
    driver.kill();
    shared().kubectl(&["delete", "pod", "csic-lost", "--force", "--grace-period=0", "--wait=false"]);
    joined.wait_gone("csic-lost");
    joined.node.start_agent();
    driver.start(&joined);
    wait_until("no mounts", LIMIT * 2, || mounts_below(&joined.node.root()).is_empty());
    assert!(state.join("volumes/handle-of-csic-volume/x").exists(), "data of claims stay");
    driver.assert_no_violation(&joined);
    joined.finish(&[]);
}

/// For how long the driver is away.
fn outage_duration() -> Duration {
    let seconds = std::env::var("AWAY_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(15))
}

// Runtimes: containerd 2.
#[test]
fn only_pods_that_need_a_driver_that_is_away_wait_and_they_go_on_when_it_is_back() {
    let joined = prepared("csid");
    let mut driver = CsiDriver::new("csid");
    driver.start(&joined);
    for claim in ["csid-running", "csid-ending", "csid-waiting"] {
        driver.claim(claim, "Filesystem");
    }
    let writes = "while true; do date +%s >>/data/file; sleep 1; done";
    for pod in ["csid-running", "csid-ending"] {
        joined.bind(&with_volume(pod, of_claim(pod), false, writes));
    }
    joined.wait_ready("csid-ending");
    let before = joined.wait_ready("csid-running");
    let file = directory("csid").join("volumes-of-driver/volumes/handle-of-csid-running/file");
    let lines = || fs::read_to_string(&file).map_or(0, |text| text.lines().count());

    driver.kill();
    let mounted = mounts_below(&joined.node.root());
    let written = lines();
    joined.bind(&with_volume("csid-waiting", of_claim("csid-waiting"), false, "true"));
    shared().kubectl(&["delete", "pod", "csid-ending", "--wait=false", "--grace-period=1"]);
    joined.wait_pod("csid-ending", "stopped", |pod| {
        pod["status"]["containerStatuses"][0]["state"]["terminated"].is_object()
    });
    // The wait is visible, in an event and on the node.
    wait_refusal(&joined, "csid-waiting", "csi");
    let listed = joined.node.cli(&["volumes"]);
    let is_listed = |line: &str| line.contains("csid-waiting") && !line.contains(" mounted");
    assert!(listed.lines().any(is_listed), "{listed}");
    // Other pods start.
    joined.bind(&pod("csid-other", json!([busybox("main", FOREVER)])));
    joined.wait_ready("csid-other");
    holds_for("only pods that need the driver wait", outage_duration(), || {
        let is_pending = |pod: &Value| text(pod, "/status/phase") == "Pending";
        joined.plane.get(&["pod", "csid-waiting"]).is_some_and(|pod| is_pending(&pod))
            && joined.plane.get(&["pod", "csid-ending"]).is_some()
            && joined
                .plane
                .get(&["pod", "csid-running"])
                .is_some_and(|pod| condition(&pod, "Ready") == "True")
    });
    assert_eq!(mounts_below(&joined.node.root()), mounted);
    assert!(lines() > written, "the pod goes on writing");

    driver.start(&joined);
    // After a long absence the next attempt may be two minutes away.
    wait_until("the end of csid-ending", LIMIT * 2, || joined.plane.get(&["pod", "csid-ending"]).is_none());
    wait_until("the start of csid-waiting", LIMIT * 2, || {
        joined.plane.poll(&["pod", "csid-waiting"]).is_some_and(|pod| condition(&pod, "Ready") == "True")
    });
    let id = |pod: &Value| text(pod, "/status/containerStatuses/0/containerID").to_owned();
    assert_eq!(id(&joined.wait_ready("csid-running")), id(&before));
    for pod in ["csid-running", "csid-waiting", "csid-other"] {
        delete(&joined, pod);
    }
    assert_no_mounts_in_pods(&joined);
    wait_until("no mounts", LIMIT, || mounts_below(&joined.node.root()).is_empty());
    driver.assert_no_violation(&joined);
    joined.finish(&[]);
}
