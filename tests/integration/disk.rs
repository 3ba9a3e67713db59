//! What the agent writes to the disk, and the quota for the logs of all containers.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod, restarts, simple};
use crate::support::wait::wait_until;

/// The counters of files, bytes and syncs.
fn written(node: &FakeNode) -> [f64; 3] {
    let page = node.metrics();
    ["files_written_total", "written_bytes_total", "syncs_total"]
        .map(|name| crate::support::web::metric(&page, &format!("coracle_disk_{name}")))
}

/// Inode, size and times of everything below a directory.
fn tree(top: &Path) -> BTreeMap<PathBuf, [i64; 4]> {
    let (mut found, mut open) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(path) = open.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let inode = i64::try_from(meta.ino()).unwrap();
        found.insert(path, [inode, meta.mtime_nsec(), meta.ctime_nsec(), meta.mtime()]);
    }
    found
}

/// A pod with a volume of each kind that needs files.
fn with_volumes(name: &str) -> Value {
    let mut pod = pod(name, json!([busybox("main", FOREVER)]));
    pod["spec"]["volumes"] = json!([
        {"name": "data", "emptyDir": {}},
        {"name": "about", "downwardAPI": {"items": [
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
        ]}},
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "data", "mountPath": "/data"}, {"name": "about", "mountPath": "/about"}]);
    pod
}

#[test]
fn idle_agent_with_pods_writes_nothing() {
    // Without the event stream all pods are listed each second.
    let node = FakeNode::start_with(json!({"featureGates": {"EventedPLEG": false}}));
    for name in ["one", "two"] {
        node.apply(&with_volumes(name));
    }
    node.apply(&simple("three"));
    for name in ["one", "two", "three"] {
        node.wait_ready(name);
    }
    // The first removal of garbage after the start is over when images are listed.
    wait_until("the first clean-up", LONG, || node.fake.count("ListImages") >= 1);
    let lists = || node.metric("kubelet_pleg_relist_duration_seconds_count");
    let begin = lists();
    wait_until("the last statuses", LONG, || lists() >= begin + 2.0);
    let (begin, counted, root, logs) =
        (lists(), written(&node), tree(&node.root()), tree(&node.path("logs")));
    assert!(counted[0] > 0.0 && counted[1] > 0.0 && counted[2] > 0.0, "{counted:?}");
    // Longer than the ten seconds after which the sync loop compares all pods.
    wait_until("twelve lists", LONG, || lists() >= begin + 12.0);
    assert_eq!(written(&node), counted);
    assert_eq!(tree(&node.root()), root);
    assert_eq!(tree(&node.path("logs")), logs);
    let status = node.cli(&["status"]);
    assert!(status.contains("Disk writes:") && !status.contains("Container logs:"), "{status}");
    node.finish();
}

#[test]
fn restart_of_a_crashing_container_creates_two_files_and_syncs_none() {
    let node = FakeNode::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    node.fake.write_logs();
    node.apply(&pod("bad", json!([busybox("main", "exit 1")])));
    let until = |count| node.wait_pod("bad", "restarted", LONG, |pod| restarts(pod, "main") >= count);
    let first = restarts(&until(2), "main");
    let before = written(&node);
    until(first + 4);
    let after = written(&node);
    let last = f64::from(restarts(&node.pod("bad").unwrap(), "main"));
    // The termination message and the link to the log; a restart may be half done at both ends.
    let most = 2.0 * (last - f64::from(first) + 2.0);
    assert!(after[0] - before[0] <= most, "{before:?} {after:?}, at most {most}");
    assert_eq!(after[1..], before[1..], "bytes and syncs");
    node.finish();
}

/// A rotated log of this many KiB, from this day in 2026.
fn rotated(log: &Path, kib: usize, day: u64) -> PathBuf {
    let path = log.with_file_name(format!("0.log.202601{day:02}-000000"));
    // Whole before the agent can take it for a log: until its time is set, it is the newest one.
    let scratch = log.with_file_name("scratch");
    let mut file = File::create(&scratch).unwrap();
    file.write_all(&vec![b'x'; kib * 1024]).unwrap();
    file.set_modified(UNIX_EPOCH + Duration::from_secs(1_767_225_600 + day * 86_400)).unwrap();
    fs::rename(scratch, &path).unwrap();
    path
}

fn append(log: &Path, kib: usize) {
    let mut file = File::options().append(true).open(log).unwrap();
    file.write_all(&vec![b'x'; kib * 1024]).unwrap();
}

#[test]
fn logs_above_the_quota_go_by_age_and_no_open_file_is_removed() {
    let mut node = FakeNode::prepare(json!({
        "containerLogMaxSize": "100Mi",
        "containerLogMonitorInterval": "3s",
    }));
    node.set_flags(&["--container-logs-quota=1Mi"]);
    node.start_agent();
    node.fake.write_logs();
    let log = |name: &str| {
        node.apply(&simple(name));
        node.wait_ready(name);
        PathBuf::from(node.containers(name)[0].status.log_path.clone())
    };
    let (web, other) = (log("web"), log("other"));
    let newer = rotated(&other, 600, 9);
    let older = rotated(&web, 700, 2);
    wait_until("the oldest file to go", LONG, || !older.exists());
    assert!(newer.exists());
    append(&web, 800);
    wait_until("the last rotated file to go", LONG, || !newer.exists());
    assert_eq!(node.fake.count("ReopenContainerLog"), 0);
    assert!(fs::metadata(&web).unwrap().len() >= 800 * 1024);
    // Two current files together: the runtime opens a new one in the place of the larger.
    let held = File::open(&web).unwrap();
    append(&other, 500);
    wait_until("the larger log to be reopened", LONG, || node.fake.count("ReopenContainerLog") == 1);
    // The runtime makes the new file while it handles the request that was just counted.
    wait_until("the new file, without the rotated one", LONG, || {
        web.exists() && fs::read_dir(web.parent().unwrap()).unwrap().count() == 1
    });
    assert!(fs::metadata(&web).unwrap().len() < 1024);
    assert!(held.metadata().unwrap().len() >= 800 * 1024, "the removed file is not shortened");
    assert!(fs::metadata(&other).unwrap().len() >= 500 * 1024);
    wait_until("the count of three files", LONG, || {
        node.metric("coracle_container_logs_removed_total") == 3.0
    });
    assert!(node.metric("coracle_container_logs_bytes") < 1024.0 * 1024.0);
    assert_eq!(node.metric("coracle_container_logs_quota_bytes"), 1024.0 * 1024.0);
    let status = node.cli(&["status"]);
    assert!(status.contains("of 1.0 MiB, 3 files removed"), "{status}");
    wait_until("the event", LONG, || node.cli(&["events"]).contains("ContainerLogsRemoved"));
    for name in ["web", "other"] {
        assert_eq!(restarts(&node.wait_ready(name), "main"), 0);
    }
    node.finish();
}
