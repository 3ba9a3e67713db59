//! Claims of volumes without a driver: directories and disks of the node, which an administrator has
//! made known as persistent volumes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::claims::{
    claim, claim_spec, delete, mounts_below, of_claim, prepared, wait_log, wait_refusal, with_volume,
};
use crate::joined::{JoinedNode, LIMIT, directory, shared, text};
use crate::support::wait::wait_until;

const ONCE: &str = "ReadWriteOnce";
/// The size of a new disk, in MiB.
const SIZE: u64 = 64;

/// A directory or device of the node.
fn local(joined: &JoinedNode<'_>, path: &Path) -> Value {
    let term = json!({"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": [joined.name]}]});
    json!({"local": {"path": path}, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}})
}

/// A file as a disk. It is detached when this is dropped, or when its last mount ends.
struct LoopDevice {
    device: PathBuf,
    file: PathBuf,
}

impl LoopDevice {
    fn new(file: &Path) -> LoopDevice {
        let made = fs::File::create(file).expect("the file can be made");
        made.set_len(SIZE << 20).expect("the file can have this size");
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let output = output.expect("losetup runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let device = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        LoopDevice { device, file: file.to_owned() }
    }

    fn grow(&self) {
        self.resize(128);
    }

    /// To the size of a new disk, which is that of its file system.
    fn shrink(&self) {
        self.resize(SIZE);
    }

    fn resize(&self, mebibytes: u64) {
        let file = fs::File::options().write(true).open(&self.file).expect("the file is there");
        file.set_len(mebibytes << 20).expect("the file can be resized");
        let status = Command::new("losetup").arg("--set-capacity").arg(&self.device).status();
        assert!(status.expect("losetup runs").success());
    }

    /// The file system on it, empty without one.
    fn file_system(&self) -> String {
        let args = ["--probe", "--match-tag", "TYPE", "--output", "value"];
        let output = Command::new("blkid").args(args).arg(&self.device).output().expect("blkid runs");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

// Runtimes: containerd 2.
#[test]
fn directories_of_claims_keep_their_data_over_pods() {
    let joined = prepared("pva");
    let base = directory("pva");
    let places = [("pva-path", base.join("path")), ("pva-local", base.join("local"))];
    for (_, place) in &places {
        fs::create_dir_all(place).expect("the directory can be made");
    }
    let path = json!({"hostPath": {"path": places[0].1, "type": "Directory"}});
    claim("pva-path", ("Filesystem", ONCE), &path);
    claim("pva-local", ("Filesystem", ONCE), &local(&joined, &places[1].1));
    for (name, place) in &places {
        let script = "echo hello >/data/file; stat -c 'group %g' /data/file";
        let mut writer = with_volume(&format!("{name}-writer"), of_claim(name), false, script);
        writer["spec"]["securityContext"] = json!({"fsGroup": 4711});
        joined.bind(&writer);
        joined.wait_ready(&format!("{name}-writer"));
        // The directory of a hostPath volume is not the pod's to change.
        wait_log(&format!("{name}-writer"), if *name == "pva-local" { "group 4711" } else { "group 0" });
        // A second pod has the volume at the same time, and cannot write where it must not.
        let mut volume = of_claim(name);
        volume["persistentVolumeClaim"]["readOnly"] = json!(true);
        let script = "cat /data/file; echo x >/data/other || echo refused";
        joined.bind(&with_volume(&format!("{name}-second"), volume, false, script));
        joined.wait_ready(&format!("{name}-second"));
        wait_log(&format!("{name}-second"), "hello");
        wait_log(&format!("{name}-second"), "refused");
        for pod in ["writer", "second"] {
            delete(&joined, &format!("{name}-{pod}"));
        }
        assert_eq!(fs::read_to_string(place.join("file")).expect("the data stay"), "hello\n");
        joined.bind(&with_volume(&format!("{name}-reader"), of_claim(name), false, "cat /data/file"));
        joined.wait_ready(&format!("{name}-reader"));
        wait_log(&format!("{name}-reader"), "hello");
        delete(&joined, &format!("{name}-reader"));
    }
    // The volumes of a pod are unmounted before it is deleted.
    assert_eq!(mounts_below(&joined.node.root(), "local-volume"), Vec::<String>::new());
    joined.finish(&[]);
}

// Runtimes: containerd 2.
#[test]
fn disks_of_claims_are_formatted_once_or_given_to_containers_as_they_are() {
    let mut joined = prepared("pvb");
    let base = directory("pvb");
    let [formatted, raw] = ["formatted", "raw"].map(|name| LoopDevice::new(&base.join(name)));
    claim("pvb-formatted", ("Filesystem", ONCE), &local(&joined, &formatted.device));
    claim("pvb-raw", ("Block", ONCE), &local(&joined, &raw.device));
    let script = "echo hello >/data/file; sync; grep /data /proc/mounts";
    joined.bind(&with_volume("pvb-writer", of_claim("pvb-formatted"), false, script));
    let script = "printf device-data | dd of=/dev/data conv=notrunc,fsync && echo written";
    joined.bind(&with_volume("pvb-raw-writer", of_claim("pvb-raw"), true, script));
    let before = joined.wait_ready("pvb-writer");
    wait_log("pvb-writer", "/data ext4 ");
    joined.wait_ready("pvb-raw-writer");
    wait_log("pvb-raw-writer", "written");
    assert_eq!((formatted.file_system().as_str(), raw.file_system().as_str()), ("ext4", ""));
    // A mount for all pods, and that of the pod. A restart of the agent changes neither.
    let mounted = mounts_below(&joined.node.root(), "local-volume");
    assert_eq!(mounted.len(), 2, "{mounted:?}");
    joined.node.kill_agent();
    joined.node.start_agent();
    let id = |pod: &Value| text(pod, "/status/containerStatuses/0/containerID").to_owned();
    assert_eq!(id(&joined.wait_ready("pvb-writer")), id(&before));
    assert_eq!(mounts_below(&joined.node.root(), "local-volume"), mounted);

    // Both grow while they are used.
    for (disk, claim) in [(&formatted, "pvb-formatted"), (&raw, "pvb-raw")] {
        disk.grow();
        shared().kubectl(&["patch", "pv", claim, "-p", r#"{"spec":{"capacity":{"storage":"2Gi"}}}"#]);
    }
    let is_grown = |claim: &Value| text(claim, "/status/capacity/storage") == "2Gi";
    shared().wait(&["pvc", "pvb-raw"], "grown", LIMIT, is_grown);
    if may_grow() {
        shared().wait(&["pvc", "pvb-formatted"], "grown", LIMIT, is_grown);
        let size = shared().kubectl(&["exec", "pvb-writer", "--", "stat", "-f", "-c", "%b %S", "/data"]);
        let numbers = size.split_whitespace().filter_map(|number| number.parse::<u64>().ok());
        assert!(numbers.product::<u64>() > 100 << 20, "{size}");
    } else {
        wait_until("the event of the failed growth", LIMIT, || {
            joined.events("pvb-writer").iter().any(|(reason, message)| {
                reason == "VolumeResizeFailed" && message.contains("Permission denied")
            })
        });
        // The next mount would try to grow the file system again.
        formatted.shrink();
    }

    for pod in ["pvb-writer", "pvb-raw-writer"] {
        delete(&joined, pod);
    }
    joined.bind(&with_volume("pvb-reader", of_claim("pvb-formatted"), false, "cat /data/file"));
    let script = "dd if=/dev/data bs=11 count=1; echo";
    joined.bind(&with_volume("pvb-raw-reader", of_claim("pvb-raw"), true, script));
    wait_both(&joined, [("pvb-reader", "hello"), ("pvb-raw-reader", "device-data")]);
    for pod in ["pvb-reader", "pvb-raw-reader"] {
        delete(&joined, pod);
    }
    wait_until("the disk is unmounted", LIMIT, || {
        mounts_below(&joined.node.root(), "local-volume").is_empty()
    });
    joined.finish(&[]);
}

/// Each pod finds the file that the test has taken from the group.
// Runtimes: containerd 2.
#[test]
fn group_is_given_to_all_files_unless_the_policy_is_content_with_the_root() {
    let joined = prepared("pvg");
    let place = directory("pvg").join("local");
    fs::create_dir_all(place.join("sub")).expect("the directory can be made");
    fs::write(place.join("sub/file"), "kept").expect("the file can be made");
    let group = |path: &str| fs::metadata(place.join(path)).expect("the file is there").gid();
    claim("pvg-claim", ("Filesystem", ONCE), &local(&joined, &place));
    for (name, group_of_pod, policy, expected) in [
        ("pvg-first", 4711, "OnRootMismatch", 4711),
        ("pvg-same", 4711, "OnRootMismatch", 0),
        ("pvg-always", 4711, "Always", 4711),
        ("pvg-other", 4712, "OnRootMismatch", 4712),
    ] {
        let mut pod = with_volume(name, of_claim("pvg-claim"), false, "stat -c 'group %g' /data/sub/file");
        pod["spec"]["securityContext"] = json!({"fsGroup": group_of_pod, "fsGroupChangePolicy": policy});
        std::os::unix::fs::chown(place.join("sub/file"), None, Some(0)).expect("the test is root");
        joined.bind(&pod);
        joined.wait_ready(name);
        wait_log(name, &format!("group {expected}"));
        assert_eq!((group("sub/file"), group("")), (expected, group_of_pod), "{name}");
        delete(&joined, name);
    }
    joined.finish(&[]);
}

// Runtimes: containerd 2.
#[test]
fn unbound_claim_is_reported_at_once_and_its_pod_can_be_deleted() {
    let joined = prepared("pvu");
    let mut unbound = claim_spec("Filesystem", ONCE);
    unbound["volumeName"] = json!("pvu-is-nowhere");
    shared().apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "pvu-claim", "namespace": "default"}, "spec": unbound,
    }));
    let begun = Instant::now();
    joined.bind(&with_volume("pvu-waits", of_claim("pvu-claim"), false, "true"));
    let absent = json!({"configMap": {"name": "pvu-absent"}});
    joined.bind(&with_volume("pvu-absent", absent, false, "true"));
    wait_refusal(&joined, "pvu-waits", "PVC is not bound");
    // Not after the two minutes for which volumes are waited for.
    assert!(begun.elapsed() < Duration::from_secs(115), "{:?}", begun.elapsed());
    wait_refusal(&joined, "pvu-absent", "not found");
    // A volume of another node, to whose pod no scheduler objects.
    let mut elsewhere = local(&joined, &directory("pvu"));
    elsewhere["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] =
        json!(["another-node"]);
    claim("pvu-elsewhere", ("Filesystem", ONCE), &elsewhere);
    joined.bind(&with_volume("pvu-elsewhere", of_claim("pvu-elsewhere"), false, "true"));
    wait_refusal(&joined, "pvu-elsewhere", "no matching NodeSelectorTerms");
    for pod in ["pvu-waits", "pvu-absent", "pvu-elsewhere"] {
        delete(&joined, pod);
    }
    shared().kubectl(&["delete", "pvc", "pvu-claim", "--wait=false"]);
    joined.finish(&[]);
}

/// Whether the kernel lets root of this machine grow a file system that is mounted
/// (`CAP_SYS_RESOURCE`, which root of a container may not have).
fn may_grow() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("the status is readable");
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("the capabilities");
    u64::from_str_radix(set.trim(), 16).expect("a number") & (1 << 24) != 0
}

fn wait_both(joined: &JoinedNode<'_>, pods: [(&str, &str); 2]) {
    for (pod, wanted) in pods {
        joined.wait_ready(pod);
        wait_log(pod, wanted);
    }
}

/// The scheduler would not send the second pod to the node; the pods of this test have none.
// Runtimes: containerd 2.
#[test]
fn volume_for_one_pod_is_refused_to_a_second_one_until_the_first_is_gone() {
    let joined = prepared("pvc");
    let place = directory("pvc").join("local");
    fs::create_dir_all(&place).expect("the directory can be made");
    claim("pvc-single", ("Filesystem", "ReadWriteOncePod"), &local(&joined, &place));
    joined.bind(&with_volume("pvc-first", of_claim("pvc-single"), false, "echo first >/data/file"));
    let before = joined.wait_ready("pvc-first");
    joined.bind(&with_volume("pvc-second", of_claim("pvc-single"), false, "cat /data/file"));
    let refusal = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
    wait_refusal(&joined, "pvc-second", refusal);
    let waiting = shared().get(&["pod", "pvc-second"]).expect("the pod is there");
    assert_eq!(text(&waiting, "/status/phase"), "Pending");
    let id = |pod: &Value| text(pod, "/status/containerStatuses/0/containerID").to_owned();
    assert_eq!(id(&joined.wait_ready("pvc-first")), id(&before));
    delete(&joined, "pvc-first");
    joined.wait_ready("pvc-second");
    wait_log("pvc-second", "first");
    joined.finish(&["pvc-second"]);
}
