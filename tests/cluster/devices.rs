//! Device plugins: the plugin of `tests/controlplane/plugin`, which is made of the library that real
//! ones use.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, log_now, pod, shared, text};
use crate::support::containerd::kill;
use crate::support::launch::{self, go_kubelet_config, skip_on_go_kubelet};
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::{holds_for, pause, wait_for, wait_until};

const RESOURCE: &str = "example.com/widget";

/// The running plugin. It ends with SIGKILL, as after a power failure.
struct DevicePlugin {
    process: Child,
    log: PathBuf,
}

impl DevicePlugin {
    /// `place`: the directory of the kubelet's socket for device plugins.
    fn start(place: &Path, log: PathBuf) -> DevicePlugin {
        let mut command = Command::new(shared().bin().join("plugin"));
        command.args(["device", "--resource", RESOURCE, "--devices", "2", "--socket-dir"]).arg(place);
        command.arg("--registration").arg(place.join("kubelet.sock"));
        DevicePlugin { process: launch::spawn(&mut command, &log), log }
    }

    fn calls(&self) -> usize {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().filter(|line| line.starts_with("Allocate")).count()
    }
}

impl Drop for DevicePlugin {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A pod with one device, which prints which one it is.
fn with_device(name: &str) -> Value {
    let mut main = busybox("main", &format!("echo \"device $DEVICES\"; {FOREVER}"));
    main["resources"] = json!({"limits": {RESOURCE: "1"}});
    let mut pod = pod(name, json!([main]));
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    pod
}

/// What the Node object has: capacity and allocatable.
fn counts(joined: &JoinedNode<'_>) -> (String, String) {
    let node = joined.object().unwrap_or_default();
    let quantity = |field: &str| node["status"][field][RESOURCE].as_str().unwrap_or_default().to_owned();
    (quantity("capacity"), quantity("allocatable"))
}

fn wait_counts(joined: &JoinedNode<'_>, allocatable: &str) {
    let expected = ("2".to_owned(), allocatable.to_owned());
    // Less than the five minutes after which a status without a change is reported.
    wait_until(&format!("{allocatable} devices"), LIMIT, || counts(joined) == expected);
}

fn device_of(joined: &JoinedNode<'_>, pod: &str) -> String {
    wait_for("the name of the device", LIMIT, || {
        let log = log_now(joined.plane, pod);
        log.lines().last().filter(|line| line.starts_with("device ")).map(str::to_owned)
    })
}

fn container(pod: &Value) -> &str {
    text(pod, "/status/containerStatuses/0/containerID")
}

// Runtimes: containerd 2.
#[test]
fn pods_keep_their_devices_over_restarts_of_agent_and_plugin() {
    let mut joined =
        JoinedNode::prepare(shared(), "devices", crate::joined::served(shared())).start_and_wait();
    let place = joined.node.root().join("device-plugins");
    let log = |number: u32| directory("devices").join(format!("plugin-{number}.log"));
    let plugin = DevicePlugin::start(&place, log(1));
    wait_counts(&joined, "2");
    joined.bind(&with_device("devices-a"));
    let a = joined.wait_ready("devices-a");
    joined.bind(&with_device("devices-b"));
    let b = joined.wait_ready("devices-b");
    let owned = [device_of(&joined, "devices-a"), device_of(&joined, "devices-b")];
    let mut sorted = owned.clone();
    sorted.sort();
    assert_eq!(sorted, ["device dev-0", "device dev-1"]);
    assert_eq!(plugin.calls(), 2);
    let rejected = |name: &str| {
        joined.bind(&with_device(name));
        let pod = joined.wait_pod(name, "rejected", |pod| text(pod, "/status/phase") == "Failed");
        assert_eq!(text(&pod, "/status/reason"), "UnexpectedAdmissionError");
        let message = text(&pod, "/status/message");
        assert!(
            message.contains(&format!("requested number of devices unavailable for {RESOURCE}")),
            "{message}"
        );
    };
    rejected("devices-c");
    joined.node.kill_agent();
    joined.node.start_agent();
    // The plugin registers again as soon as the agent's socket is made. Until then the Node object has the
    // counts of the agent before.
    let registrations = format!("kubelet_device_plugin_registration_total{{resource_name=\"{RESOURCE}\"}}");
    wait_until("the plugin to register again", LIMIT, || joined.node.metric(&registrations) >= 1.0);
    wait_counts(&joined, "2");
    for (name, before) in [("devices-a", &a), ("devices-b", &b)] {
        assert_eq!(container(&joined.wait_ready(name)), container(before), "{name} was not restarted");
    }
    joined.bind(&with_device("devices-d"));
    joined.wait_pod("devices-d", "rejected", |pod| text(pod, "/status/phase") == "Failed");
    // Without the plugin no device can be allocated; the pods run on.
    drop(plugin);
    wait_counts(&joined, "0");
    let plugin = DevicePlugin::start(&place, log(2));
    wait_counts(&joined, "2");
    // A container that is restarted has the same device, without a call.
    let id = container(&a).rsplit('/').next().expect("an id").to_owned();
    joined.node.containerd.kill_task(&id);
    joined.wait_pod("devices-a", "restarted", |pod| {
        container(pod) != container(&a) && crate::joined::condition(pod, "Ready") == "True"
    });
    assert_eq!(device_of(&joined, "devices-a"), owned[0]);
    assert_eq!(plugin.calls(), 0);
    joined.finish(&["devices-a", "devices-b", "devices-c", "devices-d"]);
}

/// How long after the start of the agent the plugin comes.
const LATE: Duration = Duration::from_secs(60);

/// The machine restarts, and the plugin registers a minute after the agent. Returns the phase of the
/// pod at the end.
fn reboot(name: &'static str, go_kubelet: bool) -> String {
    let kubeconfig = shared().node_kubeconfig(name).display().to_string();
    let socket = directory(name).join("cd/containerd.sock").display().to_string();
    let mut flags = vec!["--kubeconfig", &kubeconfig];
    if go_kubelet {
        flags.extend(["--containerd", &socket]);
    }
    let config = if go_kubelet { go_kubelet_config(&directory(name)) } else { json!({}) };
    let mut joined = JoinedNode::prepare_with(shared(), name, config, &flags);
    let place = if go_kubelet {
        joined.node.use_go_kubelet(true);
        let own = directory(name).join("var");
        fs::create_dir_all(own.join("device-plugins")).expect("a directory can be made");
        joined.node.set_kubelet_place(own.clone());
        own.join("device-plugins")
    } else {
        joined.node.root().join("device-plugins")
    };
    let mut joined = joined.start_and_wait();
    let log = |number: u32| directory(name).join(format!("plugin-{number}.log"));
    let pod_name = format!("{name}-pod");
    {
        let _plugin = DevicePlugin::start(&place, log(1));
        wait_counts(&joined, "2");
        joined.bind(&with_device(&pod_name));
        joined.wait_ready(&pod_name);
        joined.node.kill_agent();
    }
    // A list leaves out tasks whose shim is slow, and the runtime notices the end of a task later. A
    // container that it still lists as running would keep its devices, and its restart would not wait for
    // the plugin.
    wait_until("no container to run", LIMIT, || {
        let tasks = joined.node.containerd.tasks();
        tasks.iter().filter(|task| task.running).for_each(|task| kill(task.pid, "KILL"));
        tasks.iter().all(|task| !task.running) && joined.node.running_ids().is_empty()
    });
    joined.node.start_agent();
    let phase = || {
        let pod = joined.plane.poll(&["pod", &pod_name]).unwrap_or_default();
        text(&pod, "/status/phase").to_owned()
    };
    if go_kubelet {
        pause(LATE);
    } else {
        holds_for("the pod waits for the plugin", LATE, || phase() != "Failed");
        let waits =
            joined.events(&pod_name).into_iter().any(|(reason, _)| reason == "WaitingForDevicePlugin");
        assert!(waits, "{:?}", joined.events(&pod_name));
    }
    let _plugin = DevicePlugin::start(&place, log(2));
    wait_counts(&joined, "2");
    let end = joined.wait_pod(&pod_name, "running or failed", |pod| {
        let runs = crate::joined::condition(pod, "Ready") == "True"
            && pod["status"]["containerStatuses"][0]["restartCount"] != json!(0);
        runs || text(pod, "/status/phase") == "Failed"
    });
    let end =
        format!("{} {}", text(&end, "/status/phase"), text(&end, "/status/reason")).trim_end().to_owned();
    joined.finish(&[&pod_name]);
    end
}

// Runtimes: containerd 2.
#[test]
fn pod_waits_for_its_plugin_after_a_reboot_and_fails_on_the_go_kubelet() {
    if skip_on_go_kubelet("reboot_with_devices", "it runs both agents") {
        return;
    }
    let own = reboot("bootown", false);
    let go = reboot("bootgo", true);
    let line = format!("devices: after a reboot, plugin {LATE:?} late: coracle: {own}; Go kubelet: {go}\n");
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    assert_eq!(own, "Running");
    assert_eq!(go, "Failed UnexpectedAdmissionError");
}
