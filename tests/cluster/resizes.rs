//! `kubectl patch pod --subresource resize`: CPU and memory of running pods.

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, pod, reason, shared, text};
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::{holds_for, pause, wait_until};

fn start(name: &str, config: Value) -> JoinedNode<'static> {
    JoinedNode::prepare(shared(), name, config).start_and_wait()
}

/// A pod whose requests are its limits.
fn sized(name: &str, script: &str, cpu: &str, memory: &str) -> Value {
    let mut main = busybox("main", script);
    main["resources"] = resources(cpu, memory);
    pod(name, json!([main]))
}

fn resources(cpu: &str, memory: &str) -> Value {
    let both = json!({"cpu": cpu, "memory": memory});
    json!({"requests": both, "limits": both})
}

fn resize(joined: &JoinedNode<'_>, name: &str, cpu: &str, memory: &str) {
    let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources(cpu, memory)}]}});
    joined.plane.kubectl(&["patch", "pod", name, "--subresource", "resize", "--patch", &patch.to_string()]);
}

fn main_of(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]
}

/// Whether the resize is done and the container has these resources.
fn has(pod: &Value, cpu: &str, memory: &str) -> bool {
    let generation = &pod["metadata"]["generation"];
    main_of(pod)["resources"] == resources(cpu, memory)
        && main_of(pod)["allocatedResources"] == resources(cpu, memory)["requests"]
        && condition(pod, "PodResizePending").is_empty()
        && condition(pod, "PodResizeInProgress").is_empty()
        && pod["status"]["observedGeneration"] == *generation
}

fn wait_has(joined: &JoinedNode<'_>, name: &str, cpu: &str, memory: &str) -> Value {
    joined.wait_pod(name, &format!("resized to {cpu} and {memory}"), |pod| has(pod, cpu, memory))
}

/// The messages of the events with a reason, in no order.
fn event_messages(joined: &JoinedNode<'_>, name: &str, reason: &str) -> Vec<String> {
    let events = joined.events(name).into_iter();
    events.filter(|(event_reason, _)| event_reason == reason).map(|(_, message)| message).collect()
}

fn wait_event(joined: &JoinedNode<'_>, name: &str, reason: &str, words: &str) {
    let begun = std::time::Instant::now();
    while !event_messages(joined, name, reason).iter().any(|message| message.contains(words)) {
        let all = joined.events(name);
        assert!(
            begun.elapsed() < LIMIT,
            "timed out waiting for event {reason} about {words}; there are {all:?}"
        );
        pause(std::time::Duration::from_millis(200));
    }
}

// Runtimes: containerd 2.
#[test]
fn resize_up_and_down_without_a_restart() {
    let joined = start("resized", json!({}));
    joined.bind(&sized("resized-web", FOREVER, "100m", "64Mi"));
    let first = joined.wait_ready("resized-web");
    assert_eq!(main_of(&first)["resources"], resources("100m", "64Mi"));
    let running = joined.node.running_ids();
    // Of the pod's cgroup and the container's: weight, quota and memory.
    let values = |container: &str| {
        let cgroup = format!("kubepods/pod{}{container}", text(&first, "/metadata/uid"));
        [
            ["cpu.shares", "cpu.weight"],
            ["cpu.cfs_quota_us", "cpu.max"],
            ["memory.limit_in_bytes", "memory.max"],
        ]
        .map(|files| files.into_iter().find_map(|file| joined.node.cgroups().read(&cgroup, file)).unwrap())
    };
    let id = text(main_of(&first), "/containerID").rsplit('/').next().expect("an id").to_owned();
    for (generation, (cpu, memory, quota, mebibytes)) in (2..).zip([
        ("200m", "64Mi", 20_000, 64),
        ("200m", "128Mi", 20_000, 128),
        ("100m", "64Mi", 10_000, 64),
        ("150m", "96Mi", 15_000, 96),
    ]) {
        resize(&joined, "resized-web", cpu, memory);
        let now = wait_has(&joined, "resized-web", cpu, memory);
        assert_eq!(main_of(&now)["restartCount"], json!(0));
        for container in [String::new(), format!("/{id}")] {
            let [_, limit, bytes] = values(&container);
            assert_eq!(limit.split(' ').next(), Some(quota.to_string().as_str()), "{container}");
            assert_eq!(bytes, (mebibytes << 20).to_string(), "{container}");
        }
        assert_eq!(now["metadata"]["generation"], json!(generation));
        let all = resources(cpu, memory);
        let summary = format!(
            "{{\"containers\":[{{\"name\":\"main\",\"resources\":{{\"limits\":{},\"requests\":{}}}}}],\
             \"generation\":{generation}}}",
            all["limits"], all["requests"]
        );
        wait_event(&joined, "resized-web", "ResizeStarted", &format!("Pod resize started: {summary}"));
        wait_event(&joined, "resized-web", "ResizeCompleted", &format!("Pod resize completed: {summary}"));
    }
    assert_eq!(joined.node.running_ids(), running, "nothing was restarted");
    let metric = |series: &str| joined.node.metric(series);
    let requested = "kubelet_container_requested_resizes_total";
    assert!(
        metric(&format!("{requested}{{resource=\"memory\",requirement=\"limits\",operation=\"decrease\"}}"))
            > 0.0
    );
    assert!(metric("kubelet_pod_resize_duration_milliseconds_count{success=\"true\"}") >= 4.0);
    assert!(metric("kubelet_pod_in_progress_resizes").abs() < f64::EPSILON);
    joined.finish(&["resized-web"]);
}

// Runtimes: containerd 2.
#[test]
fn restart_resize_policy_applies_to_its_resource_only() {
    let joined = start("policy", json!({}));
    let mut web = sized("policy-web", FOREVER, "100m", "64Mi");
    web["spec"]["containers"][0]["resizePolicy"] = json!([
        {"resourceName": "cpu", "restartPolicy": "NotRequired"},
        {"resourceName": "memory", "restartPolicy": "RestartContainer"},
    ]);
    joined.bind(&web);
    joined.wait_ready("policy-web");
    let running = joined.node.running_ids();
    resize(&joined, "policy-web", "200m", "64Mi");
    wait_has(&joined, "policy-web", "200m", "64Mi");
    assert_eq!(joined.node.running_ids(), running, "more CPU needs no restart");
    resize(&joined, "policy-web", "200m", "128Mi");
    let now = joined.wait_pod("policy-web", "restarted", |pod| {
        main_of(pod)["restartCount"] == json!(1) && has(pod, "200m", "128Mi")
    });
    assert_ne!(joined.node.running_ids(), running);
    assert!(!text(main_of(&now), "/lastState/terminated/containerID").is_empty());
    wait_event(&joined, "policy-web", "Killing", "Container main resize requires restart");
    joined.finish(&["policy-web"]);
}

/// The quota and the limit of memory in bytes of a Guaranteed pod's cgroup, or of its container `id`.
fn limits(joined: &JoinedNode<'_>, pod: &Value, id: &str) -> (String, String) {
    let cgroup = format!("kubepods/pod{}{id}", text(pod, "/metadata/uid"));
    let read = |files: [&str; 2]| {
        files
            .into_iter()
            .find_map(|file| joined.node.cgroups().read(&cgroup, file))
            .expect("the file is there")
    };
    let quota = read(["cpu.cfs_quota_us", "cpu.max"]);
    let quota = quota.split(' ').next().unwrap_or_default().to_owned();
    (quota, read(["memory.limit_in_bytes", "memory.max"]))
}

/// The container's directory below that of its pod.
fn directory_of(status: &Value) -> String {
    format!("/{}", text(status, "/containerID").rsplit('/').next().expect("an id"))
}

fn patch(joined: &JoinedNode<'_>, name: &str, spec: &Value) {
    let patch = json!({"spec": spec}).to_string();
    joined.plane.kubectl(&["patch", "pod", name, "--subresource", "resize", "--patch", &patch]);
}

/// Whether no resize waits or is under way, and the newest version was seen.
fn is_settled(pod: &Value) -> bool {
    condition(pod, "PodResizePending").is_empty()
        && condition(pod, "PodResizeInProgress").is_empty()
        && pod["status"]["observedGeneration"] == pod["metadata"]["generation"]
}

/// The API server accepts it only if the node declares the feature. A container without limits has
/// those of the pod.
// Runtimes: containerd 2, former control plane.
#[test]
fn pod_level_resize_reaches_the_pod_and_its_containers() {
    let joined = start("whole", json!({}));
    let mut restarts = busybox("restarts", FOREVER);
    restarts["resizePolicy"] = json!([
        {"resourceName": "cpu", "restartPolicy": "NotRequired"},
        {"resourceName": "memory", "restartPolicy": "RestartContainer"},
    ]);
    let mut web = pod("whole-web", json!([busybox("main", FOREVER), restarts]));
    web["spec"]["resources"] = resources("100m", "64Mi");
    joined.bind(&web);
    joined.wait_ready("whole-web");
    for (cpu, memory, quota, mebibytes, count) in [
        ("200m", "64Mi", "20000", 64_i64, 0),
        ("200m", "128Mi", "20000", 128, 1),
        ("100m", "64Mi", "10000", 64, 2),
    ] {
        patch(&joined, "whole-web", &json!({"resources": resources(cpu, memory)}));
        let now = joined.wait_pod("whole-web", &format!("resized to {cpu} and {memory}"), |pod| {
            is_settled(pod)
                && pod["status"]["resources"] == resources(cpu, memory)
                && pod["status"]["containerStatuses"][1]["restartCount"] == json!(count)
                && condition(pod, "Ready") == "True"
        });
        assert_eq!(now["status"]["allocatedResources"], resources(cpu, memory)["requests"]);
        assert_eq!(main_of(&now)["restartCount"], json!(0));
        let expected = (quota.to_owned(), (mebibytes << 20).to_string());
        assert_eq!(limits(&joined, &now, ""), expected, "the pod");
        for status in now["status"]["containerStatuses"].as_array().expect("statuses") {
            assert_eq!(limits(&joined, &now, &directory_of(status)), expected, "{}", status["name"]);
        }
    }
    wait_event(&joined, "whole-web", "ResizeCompleted", "\"generation\":4}");
    joined.finish(&["whole-web"]);
}

// Runtimes: containerd 2, former control plane.
#[test]
fn running_init_containers_and_sidecars_are_resized() {
    let joined = start("inits", json!({}));
    let named = |name: &str, script: &str| {
        let mut container = busybox(name, script);
        container["resources"] = resources("100m", "64Mi");
        container
    };
    let mut side = named("side", FOREVER);
    side["restartPolicy"] = json!("Always");
    let mut web = pod("inits-web", json!([named("main", FOREVER)]));
    web["spec"]["initContainers"] = json!([side, named("first", FOREVER)]);
    joined.bind(&web);
    let init_status = |pod: &Value, index: usize| pod["status"]["initContainerStatuses"][index].clone();
    joined.wait_pod("inits-web", "initializing", |pod| init_status(pod, 1)["state"]["running"].is_object());
    let running = joined.node.running_ids();
    for (cpu, memory, quota, mebibytes) in
        [("200m", "128Mi", "20000", 128_i64), ("150m", "96Mi", "15000", 96)]
    {
        let all = resources(cpu, memory);
        let spec = json!({"initContainers": [
            {"name": "side", "resources": all}, {"name": "first", "resources": all}]});
        patch(&joined, "inits-web", &spec);
        let now = joined.wait_pod("inits-web", &format!("resized to {cpu} and {memory}"), |pod| {
            is_settled(pod) && [0, 1].iter().all(|index| init_status(pod, *index)["resources"] == all)
        });
        for index in [0, 1] {
            let status = init_status(&now, index);
            assert_eq!(status["restartCount"], json!(0));
            let expected = (quota.to_owned(), (mebibytes << 20).to_string());
            assert_eq!(limits(&joined, &now, &directory_of(&status)), expected, "{}", status["name"]);
        }
    }
    assert_eq!(joined.node.running_ids(), running, "nothing was restarted");
    joined.finish(&["inits-web"]);
}

/// CPUs that the node has for pods, in thousandths.
fn allocatable(joined: &JoinedNode<'_>) -> i64 {
    let node = joined.object().expect("it is registered");
    let cpu = text(&node, "/status/allocatable/cpu");
    match cpu.strip_suffix('m') {
        Some(milli) => milli.parse().expect("a number"),
        None => cpu.parse::<i64>().expect("a number") * 1000,
    }
}

// Runtimes: containerd 2.
#[test]
fn deferred_resize_survives_agent_restart() {
    let mut joined = start("defers", json!({}));
    let all = allocatable(&joined);
    joined.bind(&sized("waits-big", FOREVER, &format!("{}m", all - 500), "64Mi"));
    joined.bind(&sized("waits-web", FOREVER, "200m", "64Mi"));
    joined.wait_ready("waits-big");
    joined.wait_ready("waits-web");
    resize(&joined, "waits-web", "700m", "64Mi");
    let message = format!(
        "Node didn't have enough resource: cpu, requested: 700, used: {}, capacity: {all}",
        all - 500
    );
    let deferred = |pod: &Value| {
        reason(pod, "PodResizePending") == "Deferred"
            && main_of(pod)["resources"] == resources("200m", "64Mi")
            && main_of(pod)["allocatedResources"]["cpu"] == json!("200m")
    };
    let waiting = joined.wait_pod("waits-web", "deferred", deferred);
    let conditions = waiting["status"]["conditions"].as_array().expect("conditions");
    let pending =
        conditions.iter().find(|condition| condition["type"] == "PodResizePending").expect("it is there");
    assert_eq!(
        (text(pending, "/message"), &pending["observedGeneration"]),
        (message.as_str(), &json!(2)),
        "{pending}"
    );
    wait_event(
        &joined,
        "waits-web",
        "ResizeDeferred",
        "Pod resize OutOfcpu: {\"containers\":[{\"name\":\"main\"",
    );
    wait_event(&joined, "waits-web", "ResizeDeferred", &message);

    // The allocation survives the agent: the pod is admitted with it, and its resize stays deferred.
    let running = joined.node.running_ids();
    joined.node.kill_agent();
    joined.node.start_agent();
    joined.wait_node_ready();
    let same = || joined.node.running_ids() == running;
    holds_for("the same containers run on", std::time::Duration::from_secs(5), same);
    joined.wait_pod("waits-web", "still deferred", deferred);
    // The API server may still show the report of the last agent.
    wait_until("the deferred resize to be counted", LIMIT, || {
        let series = "kubelet_pod_pending_resizes{reason=\"deferred\",priority_bucket=\"normal\"}";
        joined.node.metric(series) >= 1.0
    });

    joined.plane.kubectl(&["delete", "pod", "waits-big", "--grace-period=1", "--wait=false"]);
    let now = wait_has(&joined, "waits-web", "700m", "64Mi");
    assert_eq!(main_of(&now)["restartCount"], json!(0));
    let series = "kubelet_pod_deferred_accepted_resizes_total";
    let accepted = |trigger: &str| joined.node.metric(&format!("{series}{{retry_trigger=\"{trigger}\"}}"));
    assert!(accepted("pod_terminated") + accepted("pods_removed") > 0.0);
    let waited = "kubelet_pod_deferred_resize_duration_seconds_count{resolution=\"accepted\",priority_bucket=\"normal\"}";
    assert!(joined.node.metric(waited) > 0.0);
    wait_event(&joined, "waits-web", "ResizeCompleted", "\"generation\":2}");

    // A resize that was requested while the agent was stopped is done at its start.
    joined.node.stop_agent();
    resize(&joined, "waits-web", "300m", "128Mi");
    joined.node.start_agent();
    let now = wait_has(&joined, "waits-web", "300m", "128Mi");
    assert_eq!(main_of(&now)["restartCount"], json!(0));
    joined.finish(&["waits-web", "waits-big"]);
}

// Runtimes: containerd 2.
#[test]
fn exclusive_cpus_are_not_resized() {
    let config = json!({"cpuManagerPolicy": "static", "kubeReserved": {"cpu": "500m"}});
    let joined = start("owncpu", config);
    joined.bind(&sized("owncpu-web", FOREVER, "100m", "64Mi"));
    joined.wait_ready("owncpu-web");
    let running = joined.node.running_ids();
    resize(&joined, "owncpu-web", "200m", "64Mi");
    let infeasible =
        joined.wait_pod("owncpu-web", "refused", |pod| reason(pod, "PodResizePending") == "Infeasible");
    assert_eq!(main_of(&infeasible)["resources"], resources("100m", "64Mi"));
    let words = "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \\\"static\\\"";
    wait_event(&joined, "owncpu-web", "ResizeInfeasible", words);
    // A withdrawn request is dropped; memory can still be resized.
    resize(&joined, "owncpu-web", "100m", "96Mi");
    let now = wait_has(&joined, "owncpu-web", "100m", "96Mi");
    assert_eq!(main_of(&now)["restartCount"], json!(0));
    assert_eq!(joined.node.running_ids(), running);
    joined.finish(&["owncpu-web"]);
}

// Runtimes: containerd 2.
#[test]
fn memory_limit_is_not_reduced_below_usage() {
    let joined = start("inuse", json!({}));
    let script =
        format!("dd if=/dev/zero of=/dev/shm/used bs=1M count=60 2>/dev/null; touch /tmp/done; {FOREVER}");
    let mut web = sized("inuse-web", &script, "100m", "128Mi");
    web["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["cat", "/tmp/done"]}, "periodSeconds": 1, "timeoutSeconds": 60});
    joined.bind(&web);
    joined.wait_ready("inuse-web");
    let running = joined.node.running_ids();
    resize(&joined, "inuse-web", "100m", "32Mi");
    let refused =
        joined.wait_pod("inuse-web", "refused", |pod| reason(pod, "PodResizeInProgress") == "Error");
    assert_eq!(main_of(&refused)["allocatedResources"]["memory"], json!("32Mi"));
    assert_eq!(main_of(&refused)["resources"]["limits"]["memory"], json!("128Mi"));
    let words = "attempting to set container \\\"main\\\" memory limit (33554432) below current usage (";
    wait_event(&joined, "inuse-web", "ResizeError", "Pod resize error: {");
    wait_event(&joined, "inuse-web", "ResizeError", words);
    wait_event(&joined, "inuse-web", "ResizeError", "cannot decrease memory limits: ");
    resize(&joined, "inuse-web", "100m", "96Mi");
    let now = wait_has(&joined, "inuse-web", "100m", "96Mi");
    assert_eq!(main_of(&now)["restartCount"], json!(0));
    assert_eq!(joined.node.running_ids(), running, "nothing was killed");
    joined.finish(&["inuse-web"]);
}

/// The state files are those of the Go kubelet. One that cannot be read must not keep a node down: it
/// is put aside, and pods have what their specs request.
// Runtimes: containerd 2.
#[test]
fn corrupt_resize_state_file_is_put_aside() {
    let mut joined = start("broken", json!({}));
    joined.bind(&sized("broken-web", FOREVER, "100m", "64Mi"));
    joined.wait_ready("broken-web");
    let running = joined.node.running_ids();
    let file = joined.node.root().join("allocated_pods_state");
    joined.node.kill_agent();
    let good = std::fs::read_to_string(&file).expect("it is written");
    assert!(good.starts_with("{\"data\":\"{\\\"entries\\\":{\\\""), "{good}");
    let uid =
        text(&joined.plane.get(&["pod", "broken-web"]).expect("it is there"), "/metadata/uid").to_owned();
    assert!(good.contains(&uid), "{good}");
    let bad = good.replace("100m", "101m");
    std::fs::write(&file, &bad).expect("it can be written");
    joined.node.start_agent();
    joined.wait_node_ready();
    let unusable = joined.node.root().join("allocated_pods_state.unusable");
    assert_eq!(std::fs::read_to_string(unusable).expect("it is put aside"), bad);
    // The new file is written with the next resize, at the latest.
    resize(&joined, "broken-web", "150m", "64Mi");
    wait_has(&joined, "broken-web", "150m", "64Mi");
    assert_eq!(joined.node.running_ids(), running, "nothing was restarted");
    assert!(std::fs::read_to_string(&file).expect("it is written again").contains(&uid));
    joined.finish(&["broken-web"]);
}
