//! Resource claims: the driver of `tests/controlplane/plugin`, which is made of the library that real
//! drivers use, and the scheduler of a real control plane.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, directory, log_now, pod, shared, text};
use crate::support::containerd::kill;
use crate::support::control_plane::is_former;
use crate::support::launch;
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::{holds_for, wait_for, wait_until};

/// Where the runtime finds CDI files.
const CDI: &str = "/var/run/cdi";

/// Containerd before 1.7 does not know CDI.
fn skip_without_cdi(test: &str) -> bool {
    let is_old = std::env::var("E2E_CONTAINERD").is_ok_and(|version| version == "1");
    if is_old {
        let line = format!("{test}: skipped: containerd 1.6 does not know CDI\n");
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    }
    is_old
}

/// The running driver. It ends with SIGKILL.
struct DraDriver {
    process: Child,
    log: PathBuf,
}

impl DraDriver {
    fn start(joined: &JoinedNode<'_>, number: u32) -> DraDriver {
        fs::create_dir_all(CDI).expect("the directory can be made");
        let log = directory(&joined.name).join(format!("driver-{number}.log"));
        let mut command = Command::new(shared().bin().join("plugin"));
        command.args(["claims", "--devices", "2", "--cdi", CDI, "--node", &joined.name]);
        command.args(["--driver", &driver(joined), "--kubeconfig"]).arg(shared().admin_kubeconfig());
        command.arg("--root").arg(joined.node.root());
        let driver = DraDriver { process: launch::spawn(&mut command, &log), log };
        wait_until("the driver's devices", LIMIT, || slices(joined) == 1);
        // It publishes them without the agent, which deletes those of a driver that it has known.
        wait_until("the driver to be registered", LIMIT, || is_registered(joined));
        driver
    }

    /// How often a method was called for a claim.
    fn calls(&self, method: &str, claim: &str) -> usize {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().filter(|line| *line == format!("{method} {claim}")).count()
    }
}

impl Drop for DraDriver {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn driver(joined: &JoinedNode<'_>) -> String {
    format!("{}.example.com", joined.name)
}

/// Whether the agent has the driver among its plugins; that of a driver that was killed counts, too.
fn is_registered(joined: &JoinedNode<'_>) -> bool {
    let (page, driver) = (joined.node.read_only("/metrics").1, driver(joined));
    let mut plugins = page.lines().filter(|line| line.starts_with("plugin_manager_total_plugins{"));
    plugins.any(|line| line.contains(&driver) && line.contains("state=\"actual_state_of_world\""))
}

/// The number of ResourceSlices of the node.
fn slices(joined: &JoinedNode<'_>) -> usize {
    let selector = format!("spec.nodeName={}", joined.name);
    let list = joined.plane.get(&["resourceslices", "--field-selector", &selector]);
    list.as_ref().and_then(|list| list["items"].as_array()).map_or(0, Vec::len)
}

/// The CDI files of the driver's claims.
fn cdi_files(joined: &JoinedNode<'_>) -> Vec<String> {
    let names = fs::read_dir(CDI).into_iter().flatten().flatten();
    let names = names.map(|file| file.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&driver(joined))).collect()
}

/// One device of the test's class.
fn devices(joined: &JoinedNode<'_>) -> Value {
    json!({"devices": {"requests": [{"name": "dev", "exactly": {"deviceClassName": driver(joined)}}]}})
}

fn make_class(joined: &JoinedNode<'_>) {
    let expression = format!("device.driver == '{}'", driver(joined));
    joined.plane.apply(&json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": driver(joined)},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }));
}

fn make_claim(joined: &JoinedNode<'_>, name: &str) {
    joined.plane.apply(&json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": devices(joined),
    }));
}

fn make_template(joined: &JoinedNode<'_>, name: &str) {
    joined.plane.apply(&json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": devices(joined)},
    }));
}

/// Makes a pod with a claim, which prints its device. The scheduler allocates the device.
fn make_pod(joined: &JoinedNode<'_>, name: &str, source: Value) {
    let mut main = busybox("main", &format!("env | grep CLAIMED; {FOREVER}"));
    main["resources"] = json!({"claims": [{"name": "device"}]});
    let mut pod = pod(name, json!([main]));
    let mut entry = source;
    entry["name"] = json!("device");
    pod["spec"]["resourceClaims"] = json!([entry]);
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": joined.name});
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    joined.plane.apply(&pod);
}

/// The variable of the device, such as `CLAIMED_dev_0=claim`.
fn device_of(joined: &JoinedNode<'_>, pod: &str) -> String {
    wait_for("the name of the device", LIMIT, || {
        let log = log_now(joined.plane, pod);
        log.lines().last().filter(|line| line.starts_with("CLAIMED_")).map(str::to_owned)
    })
}

fn container(pod: &Value) -> &str {
    text(pod, "/status/containerStatuses/0/containerID")
}

fn in_use(joined: &JoinedNode<'_>, driver: &str) -> f64 {
    joined.node.metric(&format!("dra_resource_claims_in_use{{driver_name=\"{driver}\"}}"))
}

fn delete(joined: &JoinedNode<'_>, pod: &str) {
    joined.plane.kubectl(&["delete", "pod", pod, "--wait=false", "--grace-period=1"]);
}

// Runtimes: containerd 2, former control plane.
#[test]
fn claims_are_prepared_once_and_unprepared_when_their_pods_end_also_after_a_kill_of_the_agent() {
    if skip_without_cdi("claims_are_prepared_once") {
        return;
    }
    let mut joined = JoinedNode::prepare(shared(), "dra", crate::joined::served(shared())).start_and_wait();
    let driver = DraDriver::start(&joined, 1);
    make_class(&joined);
    make_claim(&joined, "dra-claim");
    make_template(&joined, "dra-template");
    make_pod(&joined, "dra-a", json!({"resourceClaimName": "dra-claim"}));
    let a = joined.wait_ready("dra-a");
    make_pod(&joined, "dra-b", json!({"resourceClaimTemplateName": "dra-template"}));
    let b = joined.wait_ready("dra-b");
    let generated = text(&b, "/status/resourceClaimStatuses/0/resourceClaimName").to_owned();
    let owned = [device_of(&joined, "dra-a"), device_of(&joined, "dra-b")];
    assert!(owned[0].ends_with("=dra-claim") && owned[1].ends_with(&format!("={generated}")), "{owned:?}");
    assert_ne!(owned[0].split('=').next(), owned[1].split('=').next());
    // The library of the former release reports no health without further code of the driver.
    let health = if is_former() { "Unknown" } else { "Healthy" };
    joined.wait_pod("dra-a", "shown with the health of its device", |pod| {
        let shown = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0];
        (text(shown, "/name"), text(shown, "/resources/0/health")) == ("claim:device", health)
    });
    assert_eq!((in_use(&joined, "<any>"), cdi_files(&joined).len()), (2.0, 2));
    let page = joined.node.read_only("/metrics").1;
    for metric in [
        "dra_operations_duration_seconds_count{operation_name=\"PrepareResources\",is_error=\"false\"}",
        "dra_grpc_operations_duration_seconds_count{driver_name=",
        "plugin_manager_total_plugins{socket_path=",
    ] {
        assert!(page.contains(metric), "{metric}");
    }
    let listed = joined.node.cli(&["devices"]);
    assert!(listed.contains("dra-claim") && listed.contains("DRAPlugin"), "{listed}");
    // The pods run on, and their claims are not prepared again.
    joined.node.kill_agent();
    joined.node.start_agent();
    wait_until("the driver registers again", LIMIT, || slices(&joined) == 1);
    for (name, before) in [("dra-a", &a), ("dra-b", &b)] {
        assert_eq!(container(&joined.wait_ready(name)), container(before), "{name} was not restarted");
    }
    // A container that is restarted has the same device.
    let id = container(&a).rsplit('/').next().expect("an id").to_owned();
    joined.node.containerd.kill_task(&id);
    joined.wait_pod("dra-a", "restarted", |pod| {
        container(pod) != container(&a) && condition(pod, "Ready") == "True"
    });
    assert_eq!(device_of(&joined, "dra-a"), owned[0]);
    assert_eq!((driver.calls("Prepare", "dra-claim"), driver.calls("Prepare", &generated)), (1, 1));
    // The agent is killed while the pod ends.
    delete(&joined, "dra-a");
    joined.node.kill_agent();
    assert_eq!(driver.calls("Unprepare", &generated), 0);
    joined.node.start_agent();
    joined.wait_gone("dra-a");
    assert!(driver.calls("Unprepare", "dra-claim") >= 1);
    delete(&joined, "dra-b");
    joined.wait_gone("dra-b");
    assert_eq!((driver.calls("Unprepare", &generated), cdi_files(&joined).len()), (1, 0));
    assert_eq!(in_use(&joined, "<any>"), 0.0);
    joined.finish(&[]);
}

// Runtimes: containerd 2.
#[test]
fn pod_waits_for_a_driver_that_is_away_and_the_slices_of_a_driver_that_is_gone_are_deleted() {
    if skip_without_cdi("pod_waits_for_a_driver") {
        return;
    }
    let joined = JoinedNode::prepare(shared(), "dralate", crate::joined::served(shared())).start_and_wait();
    make_class(&joined);
    make_template(&joined, "dralate-template");
    // A driver that hangs has slices, so that the pod is scheduled, and prepares no claim.
    let driver = DraDriver::start(&joined, 1);
    kill(driver.process.id(), "STOP");
    make_pod(&joined, "dralate-pod", json!({"resourceClaimTemplateName": "dralate-template"}));
    joined.wait_pod("dralate-pod", "scheduled", |pod| !text(pod, "/spec/nodeName").is_empty());
    drop(driver);
    let reported = || {
        joined
            .events("dralate-pod")
            .iter()
            .any(|(event_reason, _)| event_reason == "FailedPrepareDynamicResources")
    };
    wait_until("an event that names the driver", LIMIT, reported);
    let phase = || {
        let pod = joined.plane.get(&["pod", "dralate-pod"]).unwrap_or_default();
        text(&pod, "/status/phase").to_owned()
    };
    // The driver's library registers again: slices that were deleted are made again.
    wait_until("the slices of the driver are deleted", LIMIT * 2, || slices(&joined) == 0);
    holds_for("the pod waits for the driver", Duration::from_secs(3), || phase() == "Pending");
    let driver = DraDriver::start(&joined, 2);
    joined.wait_ready("dralate-pod");
    assert!(device_of(&joined, "dralate-pod").starts_with("CLAIMED_dev_"));
    assert_eq!(in_use(&joined, "<any>"), 1.0);
    delete(&joined, "dralate-pod");
    joined.wait_gone("dralate-pod");
    assert_eq!(cdi_files(&joined).len(), 0);
    drop(driver);
    joined.finish(&[]);
}
