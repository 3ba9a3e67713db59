//! Compares composed statuses with the recorded ones, and tests rules that no recording covers.

use std::collections::BTreeMap;
use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::model::api::{self, PodStatus};
use crate::model::pod::Pod;
use crate::model::runtime::{
    AppliedResources, ContainerState, ContainerStatus as Instance, LinuxUser, PodRuntime, SandboxState,
    SandboxStatus,
};
use crate::model::verdict::Verdict;

pub(super) fn timestamp(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// An instance with default values.
pub(super) fn instance(name: &str, state: ContainerState) -> Instance {
    Instance {
        created_at: Some(timestamp(100)),
        started_at: (state != ContainerState::Created).then(|| timestamp(101)),
        finished_at: (state == ContainerState::Exited).then(|| timestamp(102)),
        image: "localhost/busybox:1".to_owned(),
        image_id: "sha256:5d1f".into(),
        sandbox_id: "sandbox".into(),
        ..Instance::blank(&format!("{name}/0"), name, state)
    }
}

fn sandbox(state: SandboxState) -> SandboxStatus {
    SandboxStatus {
        id: "sandbox".into(),
        attempt: 0,
        state,
        created_at: Some(timestamp(99)),
        host_network: false,
        network_reported: true,
        ips: vec!["10.88.0.5".parse().unwrap()],
    }
}

fn runtime(instances: Vec<Instance>) -> PodRuntime {
    PodRuntime {
        ips: vec!["10.88.0.5".parse().unwrap()],
        sandboxes: vec![sandbox(SandboxState::Ready)],
        containers: instances,
        ..PodRuntime::default()
    }
}

fn pod(object: Value) -> Pod {
    Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
}

fn static_pod(spec: Value) -> Pod {
    pod(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u",
        "annotations": {"kubernetes.io/config.source": "file"}}, "spec": spec}))
}

fn api_pod(spec: Value) -> Pod {
    pod(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 1}, "spec": spec}))
}

/// `c=Running`, `c=Exited:3`, `c=Created`, `c=Unknown`; newest first.
fn instances(text: &str) -> Vec<Instance> {
    let parse = |word: &str| {
        let (word, code) = word.split_once(':').unwrap_or((word, "0"));
        let (name, state) = word.split_once('=').unwrap();
        let state = match state {
            "Created" => ContainerState::Created,
            "Running" => ContainerState::Running,
            "Exited" => ContainerState::Exited,
            _ => ContainerState::Unknown,
        };
        Instance { exit_code: code.parse().unwrap(), ..instance(name, state) }
    };
    text.split_whitespace().map(parse).collect()
}

// ---- the recordings ----

fn time_of(value: &Value) -> Option<Timestamp> {
    value.as_str().map(|text| text.parse().unwrap())
}

fn runtime_id(value: &Value) -> Option<&str> {
    value.as_str().map(|id| id.trim_start_matches("containerd://"))
}

/// The instances that the runtime had when the status `recorded` was composed, newest first, and
/// the reason why the container did not start then, if there was one.
fn rebuild(recorded: &Value, applied: &Value) -> (Vec<Instance>, Option<(String, String)>) {
    let name = recorded["name"].as_str().unwrap();
    let base = Instance {
        image: recorded["image"].as_str().unwrap().to_owned(),
        image_id: recorded["imageID"].as_str().unwrap().into(),
        restart_count: u32::try_from(recorded["restartCount"].as_u64().unwrap()).unwrap(),
        user: recorded["user"]["linux"]["uid"].as_i64().map(|uid| LinuxUser {
            uid,
            gid: recorded["user"]["linux"]["gid"].as_i64().unwrap(),
            supplemental_groups: serde_json::from_value(
                recorded["user"]["linux"]["supplementalGroups"].clone(),
            )
            .unwrap(),
        }),
        resources: applied.is_object().then(|| AppliedResources {
            cpu_shares: applied["cpu_shares"].as_i64(),
            cpu_quota: applied["cpu_quota"].as_i64(),
            cpu_period: applied["cpu_period"].as_i64(),
            memory_limit_bytes: applied["memory_limit_in_bytes"].as_i64(),
        }),
        ..instance(name, ContainerState::Running)
    };
    let exited = |ended: &Value| Instance {
        id: runtime_id(&ended["containerID"]).unwrap().into(),
        state: ContainerState::Exited,
        exit_code: i32::try_from(ended["exitCode"].as_i64().unwrap()).unwrap(),
        reason: ended["reason"].as_str().unwrap_or_default().to_owned(),
        message: ended["message"].as_str().unwrap_or_default().to_owned(),
        started_at: time_of(&ended["startedAt"]),
        finished_at: time_of(&ended["finishedAt"]),
        ..base.clone()
    };
    let mut found = Vec::new();
    let state = &recorded["state"];
    if state["running"].is_object() {
        found.push(Instance {
            id: runtime_id(&recorded["containerID"]).unwrap().into(),
            started_at: time_of(&state["running"]["startedAt"]),
            ..base.clone()
        });
    }
    for ended in [&state["terminated"], &recorded["lastState"]["terminated"]] {
        if ended.is_object() {
            found.push(exited(ended));
        }
    }
    let waiting = &state["waiting"];
    let failure = (waiting.is_object() && waiting["message"].is_string()).then(|| {
        let text = |key: &str| waiting[key].as_str().unwrap().to_owned();
        (text("reason"), text("message"))
    });
    (found, failure)
}

const REASONS: [&str; 5] = [
    "ErrImageNeverPull",
    "RunContainerError",
    "CrashLoopBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
];

#[test]
fn composed_statuses_equal_the_recorded_ones() {
    let now: Timestamp = "2026-01-01T00:00:10.5Z".parse().unwrap();
    let mut count = 0;
    for line in include_str!("golden.jsonl").lines() {
        let golden: Value = serde_json::from_str(line).unwrap();
        let expected = &golden["status"];
        let pod = static_pod(golden["spec"].clone());
        let mut failures = BTreeMap::new();
        let mut containers = Vec::new();
        for list in ["initContainerStatuses", "containerStatuses"] {
            for recorded in expected[list].as_array().into_iter().flatten() {
                let name = recorded["name"].as_str().unwrap();
                let (found, failure) = rebuild(recorded, &golden["applied"][name]);
                containers.extend(found);
                failures.extend(failure.map(|failure| (name.to_owned(), failure)));
            }
        }
        let problem = expected["conditions"][0]["message"].as_str();
        let mut runtime = runtime(containers);
        runtime.sandboxes[0].host_network = pod.host_network();
        runtime.sandboxes[0].created_at = Some(now);
        if !expected["podIP"].is_string() {
            runtime.ips.clear();
        }
        let node = NodeAddresses::default();
        let failures = |name: &str| {
            failures.get(name).map(|(reason, message): &(String, String)| StartReason {
                reason: REASONS.iter().find(|known| *known == reason).unwrap(),
                message: message.clone(),
            })
        };
        let inputs = Inputs {
            failures: &failures,
            sandbox_problem: problem,
            ..Inputs::new(&pod, &runtime, &node, now)
        };
        let cache = StatusCache::new();
        assert!(cache.set(&pod, compose(&inputs), now).changed);
        let stored = cache.get(pod.uid()).unwrap();
        assert_eq!(&serde_json::to_value(&*stored).unwrap(), expected, "{}", golden["pod"]);
        // If the stored status is the old one, composing again changes nothing.
        let again = Inputs { old: Some(&stored), now: timestamp(4_000_000_000), ..inputs };
        assert!(!cache.set(&pod, compose(&again), timestamp(4_000_000_000)).changed, "{}", golden["pod"]);
        count += 1;
    }
    assert_eq!(count, 27);
}

/// Compares with the first status that a Go kubelet sends for an API pod with an init container.
#[test]
fn first_status_of_an_api_pod_equals_the_go_kubelets() {
    let pod = api_pod(json!({
        "initContainers": [{"name": "i", "image": "localhost/busybox:1"}],
        "containers": [{"name": "c", "image": "localhost/busybox:1", "volumeMounts": [
            {"name": "token", "mountPath": "/t", "readOnly": true}, {"name": "w", "mountPath": "/w"}]}]}));
    let runtime = PodRuntime::default();
    let node = NodeAddresses { host_ips: vec!["192.0.2.10".parse().unwrap()] };
    let no_sandbox = "no pod sandbox exists";
    let inputs =
        Inputs { sandbox_problem: Some(no_sandbox), ..Inputs::new(&pod, &runtime, &node, timestamp(5)) };
    let cache = StatusCache::new();
    cache.set(&pod, compose(&inputs), timestamp(5));
    let waiting = |name: &str| {
        json!({"image": "localhost/busybox:1", "imageID": "", "lastState": {}, "name": name, "ready": false,
            "restartCount": 0, "started": false, "state": {"waiting": {"reason": "PodInitializing"}}})
    };
    let condition = |kind: &str, status: &str, reason: Value, message: Value| {
        let mut condition = json!({"lastTransitionTime": "1970-01-01T00:00:05Z", "observedGeneration": 1,
            "status": status, "type": kind});
        if !reason.is_null() {
            condition["reason"] = reason;
            condition["message"] = message;
        }
        condition
    };
    let unready = json!("containers with unready status: [c]");
    let mut main = waiting("c");
    main["volumeMounts"] = json!([
        {"mountPath": "/t", "name": "token", "readOnly": true, "recursiveReadOnly": "Disabled"},
        {"mountPath": "/w", "name": "w"}]);
    assert_eq!(
        serde_json::to_value(&*cache.get(pod.uid()).unwrap()).unwrap(),
        json!({
            "conditions": [
                condition("PodReadyToStartContainers", "False", json!("PodSandboxNotReady"), json!(no_sandbox)),
                condition("Initialized", "False", json!("ContainersNotInitialized"),
                    json!("containers with incomplete status: [i]")),
                condition("Ready", "False", json!("ContainersNotReady"), unready.clone()),
                condition("ContainersReady", "False", json!("ContainersNotReady"), unready),
                condition("PodScheduled", "True", Value::Null, Value::Null)],
            "containerStatuses": [main], "hostIP": "192.0.2.10", "hostIPs": [{"ip": "192.0.2.10"}],
            "initContainerStatuses": [waiting("i")], "observedGeneration": 1, "phase": "Pending",
            "qosClass": "BestEffort", "resources": {}, "startTime": "1970-01-01T00:00:05Z"})
    );
}

// ---- phases ----

/// The inputs of a phase test.
struct Case<'a> {
    spec: Value,
    now: &'a str,
    old: Option<&'a PodStatus>,
    terminal: bool,
    startup: Verdict,
}

fn case(spec: Value, now: &str) -> Case<'_> {
    Case { spec, now, old: None, terminal: false, startup: Verdict::NoProbe }
}

impl Case<'_> {
    fn compose(&self, pod: &Pod) -> PodStatus {
        let runtime = runtime(instances(self.now));
        let node = NodeAddresses::default();
        compose(&Inputs {
            old: self.old,
            terminal: self.terminal,
            startup: &|_| self.startup,
            ..Inputs::new(pod, &runtime, &node, timestamp(200))
        })
    }

    fn check(&self, phase: &str) {
        let status = self.compose(&api_pod(self.spec.clone()));
        assert_eq!(status.phase.as_deref(), Some(phase), "{} {}", self.spec, self.now);
    }
}

fn two_containers(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]})
}

#[test]
fn phase_follows_regular_containers_and_restart_policy() {
    for policy in ["Always", "OnFailure", "Never"] {
        case(two_containers(policy), "").check("Pending");
        case(two_containers(policy), "a=Running").check("Pending");
        case(two_containers(policy), "a=Created b=Running").check("Pending");
        case(two_containers(policy), "a=Running b=Running").check("Running");
        case(two_containers(policy), "a=Running b=Exited:1").check("Running");
    }
    for (policy, ended, phase) in [
        ("Always", "a=Exited b=Exited", "Running"),
        ("Always", "a=Exited:1 b=Exited:1", "Running"),
        ("OnFailure", "a=Exited b=Exited", "Succeeded"),
        ("OnFailure", "a=Exited b=Exited:1", "Running"),
        ("Never", "a=Exited b=Exited", "Succeeded"),
        ("Never", "a=Exited b=Exited:1", "Failed"),
    ] {
        case(two_containers(policy), ended).check(phase);
        let all_good = ended == "a=Exited b=Exited";
        let closed = Case { terminal: true, ..case(two_containers(policy), ended) };
        closed.check(if all_good { "Succeeded" } else { "Failed" });
        // A static pod that is stopped gets no terminal phase.
        let status = closed.compose(&static_pod(two_containers(policy)));
        assert_eq!(status.phase.as_deref(), Some(phase), "static {policy} {ended}");
    }
    let rules = json!({"restartPolicy": "Never", "containers": [{"name": "a", "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]});
    case(rules.clone(), "a=Exited:42").check("Running");
    case(rules, "a=Exited:41").check("Failed");
}

#[test]
fn pod_is_pending_or_failed_until_initialization_succeeds() {
    let spec = |policy: &str| {
        json!({"restartPolicy": policy, "containers": [{"name": "c"}],
            "initContainers": [{"name": "i"}, {"name": "j"}]})
    };
    for policy in ["Always", "OnFailure", "Never"] {
        case(spec(policy), "").check("Pending");
        case(spec(policy), "i=Running").check("Pending");
        case(spec(policy), "i=Exited").check("Pending");
        case(spec(policy), "i=Exited j=Exited").check("Pending");
        case(spec(policy), "i=Exited j=Exited c=Running").check("Running");
        let failed = if policy == "Never" { "Failed" } else { "Pending" };
        case(spec(policy), "i=Exited:1").check(failed);
        case(spec(policy), "i=Exited j=Exited:1").check(failed);
        // Only the records of the init containers were removed: the pod continues.
        case(spec(policy), "c=Running").check("Running");
    }
}

#[test]
fn sidecar_start_and_end_delay_the_phase_but_restarts_do_not() {
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "c"}],
        "initContainers": [{"name": "s", "restartPolicy": "Always"}]});
    case(spec.clone(), "").check("Pending");
    case(spec.clone(), "s=Running").check("Pending");
    case(spec.clone(), "s=Running c=Running").check("Running");
    case(spec.clone(), "s=Exited:1 c=Running").check("Running");
    Case { startup: Verdict::Pending, ..case(spec.clone(), "s=Running") }.check("Pending");
    // Once regular containers exist, a restarting sidecar does not change the phase.
    Case { startup: Verdict::Pending, ..case(spec.clone(), "s=Running c=Running") }.check("Running");
    case(spec.clone(), "s=Running c=Exited").check("Running");
    case(spec.clone(), "s=Exited:137 c=Exited").check("Succeeded");
    case(spec, "s=Exited c=Exited:1").check("Failed");
}

#[test]
fn terminal_phase_and_its_reason_do_not_change() {
    let evicted = PodStatus {
        phase: Some("Failed".into()),
        reason: Some("Evicted".into()),
        message: Some("The node was low on resource: memory.".into()),
        ..PodStatus::default()
    };
    let case_of_evicted =
        Case { old: Some(&evicted), terminal: true, ..case(two_containers("Always"), "a=Exited b=Exited") };
    let status = case_of_evicted.compose(&api_pod(two_containers("Always")));
    assert_eq!(status.phase, evicted.phase);
    assert_eq!(status.reason, evicted.reason);
    assert_eq!(status.message, evicted.message);
    // A terminal phase that only the API server shows does not change either.
    let pod = pod(
        json!({"metadata": {"name": "p"}, "spec": two_containers("Always"), "status": {"phase": "Succeeded"}}),
    );
    assert_eq!(case(Value::Null, "a=Running b=Running").compose(&pod).phase.as_deref(), Some("Succeeded"));
}

#[test]
fn active_deadline_fails_a_pod_that_runs_longer() {
    let spec = json!({"restartPolicy": "Never", "activeDeadlineSeconds": 50, "containers": [{"name": "c"}]});
    let pod = api_pod(spec.clone());
    let started = |second| PodStatus {
        start_time: Some(crate::model::meta::Time(timestamp(second))),
        ..PodStatus::default()
    };
    assert_eq!(active_deadline(&pod, None, timestamp(200)), None);
    let left = active_deadline(&pod, Some(&started(160)), timestamp(200));
    assert_eq!(left, Some(Deadline::Remaining(std::time::Duration::from_secs(10))));
    assert_eq!(active_deadline(&pod, Some(&started(150)), timestamp(200)), Some(Deadline::Exceeded));
    let none = api_pod(json!({"containers": [{"name": "c"}]}));
    assert_eq!(active_deadline(&none, Some(&started(0)), timestamp(200)), None);

    let check = |old: i64, now: &str, phase: &str, reason: Option<&str>| {
        let old = started(old);
        let status = Case { old: Some(&old), ..case(spec.clone(), now) }.compose(&pod);
        assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some(phase), reason));
        status
    };
    check(160, "c=Running", "Running", None);
    let over = check(150, "c=Running", "Failed", Some("DeadlineExceeded"));
    let message = "Pod was active on the node longer than the specified deadline";
    assert_eq!(over.message.as_deref(), Some(message));
    let ready = over.conditions.iter().flatten().find(|condition| condition.type_ == "Ready").unwrap();
    assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("False", Some("PodFailed")));
    // The container ended by itself before the deadline was checked.
    check(150, "c=Exited", "Succeeded", None);
    // A pod that exceeded its deadline stays failed although its container exits with 0.
    let stopped = Case { old: Some(&over), terminal: true, ..case(spec.clone(), "c=Exited") }.compose(&pod);
    assert_eq!(stopped.reason.as_deref(), Some("DeadlineExceeded"));
    // Without an earlier status the pod started when its sandbox was created (at 99).
    let fresh = case(spec.clone(), "c=Running").compose(&pod);
    assert_eq!(fresh.start_time.unwrap().0, timestamp(99));
    assert_eq!(fresh.phase.as_deref(), Some("Failed"));
}

// ---- containers ----

fn old_with(state: Value, more: Value) -> PodStatus {
    let mut container = json!({"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 2,
        "state": state, "containerID": "containerd://c/0"});
    for (key, value) in more.as_object().into_iter().flatten() {
        container[key] = value.clone();
    }
    serde_json::from_value(json!({"phase": "Running", "containerStatuses": [container]})).unwrap()
}

fn container_after(old: &PodStatus, now: &str, deleting: bool) -> Value {
    let pod = api_pod(json!({"containers": [{"name": "c", "image": "i"}]}));
    let runtime = runtime(instances(now));
    let node = NodeAddresses::default();
    let inputs = Inputs { old: Some(old), deleting, ..Inputs::new(&pod, &runtime, &node, timestamp(200)) };
    let status = compose(&inputs);
    let mut shown = serde_json::to_value(&status.container_statuses.unwrap()[0]).unwrap();
    shown["phase"] = json!(status.phase);
    shown
}

#[test]
fn vanished_container_is_counted_once_as_a_restart() {
    let running = old_with(json!({"running": {}}), json!({}));
    let lost = json!({"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "message":
        "The container could not be located when the pod was deleted.  The container used to be Running"}});
    let shown = container_after(&running, "", false);
    assert_eq!(shown["lastState"], lost);
    assert_eq!(shown["state"], json!({"waiting": {"reason": "ContainerCreating"}}));
    assert_eq!((&shown["restartCount"], &shown["phase"]), (&json!(3), &json!("Running")));
    assert_eq!(container_after(&running, "", true)["restartCount"], 2);
    // When the status is composed again, the restart is not counted again.
    let again = old_with(json!({"waiting": {}}), json!({"restartCount": 3, "lastState": lost}));
    let shown = container_after(&again, "", false);
    assert_eq!((&shown["restartCount"], &shown["lastState"]), (&json!(3), &lost));
    // If the old status has a last state, this stays and no restart is counted.
    let ended = json!({"terminated": {"exitCode": 1}});
    let shown = container_after(&old_with(json!({"running": {}}), json!({"lastState": ended})), "", false);
    assert_eq!(
        (&shown["restartCount"], &shown["lastState"]["terminated"]["exitCode"]),
        (&json!(2), &json!(1))
    );
    // A container that had ended stays unchanged.
    let shown = container_after(&old_with(ended.clone(), json!({})), "", false);
    assert_eq!((&shown["state"]["terminated"]["exitCode"], &shown["restartCount"]), (&json!(1), &json!(2)));
    // A container that never ran is waiting and has no last state.
    let shown = container_after(&old_with(json!({"waiting": {}}), json!({})), "", false);
    assert_eq!((&shown["lastState"], &shown["phase"]), (&json!({}), &json!("Pending")));
}

#[test]
fn running_container_in_unknown_state_is_shown_as_terminated() {
    let running = old_with(json!({"running": {}}), json!({}));
    let shown = container_after(&running, "c=Unknown", false);
    let terminated = json!({"exitCode": 137, "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated"});
    assert_eq!(shown["state"]["terminated"], terminated);
    assert_eq!(shown["restartCount"], 3);
    let again = old_with(shown["state"].clone(), json!({"restartCount": 3}));
    let shown = container_after(&again, "c=Unknown", false);
    assert_eq!((&shown["state"]["terminated"], &shown["restartCount"]), (&terminated, &json!(3)));
    let shown = container_after(&old_with(json!({"waiting": {}}), json!({})), "c=Unknown", false);
    assert_eq!(shown["state"], json!({"waiting": {}}));
}

#[test]
fn init_container_without_a_record_is_shown_as_completed() {
    let pod = api_pod(json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "i"}, {"name": "s", "restartPolicy": "Always"}]}));
    let node = NodeAddresses::default();
    let runtime = runtime(instances("c=Running"));
    let status = compose(&Inputs::new(&pod, &runtime, &node, timestamp(200)));
    let init = serde_json::to_value(status.init_container_statuses.unwrap()).unwrap();
    assert_eq!(init[0]["state"]["terminated"]["reason"], "Completed");
    assert_eq!(init[0]["ready"], true);
    assert_eq!(init[1]["state"]["waiting"]["reason"], "PodInitializing");
}

#[test]
fn a_start_failure_is_shown_only_if_the_container_will_start() {
    let failures = |_: &str| Some(StartReason { reason: "CrashLoopBackOff", message: "back-off".into() });
    let node = NodeAddresses::default();
    let check = |policy: &str, now: &str, deleting: bool, shown: bool| {
        let pod = api_pod(json!({"restartPolicy": policy, "containers": [{"name": "c"}]}));
        let runtime = runtime(instances(now));
        let inputs =
            Inputs { failures: &failures, deleting, ..Inputs::new(&pod, &runtime, &node, timestamp(200)) };
        let status = compose(&inputs).container_statuses.unwrap().remove(0);
        let state = status.state.unwrap();
        let reason = state.waiting.as_ref().and_then(|waiting| waiting.reason.as_deref());
        assert_eq!(reason == Some("CrashLoopBackOff"), shown, "{policy} {now}");
        if shown && now.starts_with("c=Exited") {
            let last = status.last_state.unwrap().terminated.unwrap();
            assert_eq!(last.container_id.as_deref(), Some("containerd://c/0"));
        }
    };
    check("Always", "c=Exited:1", false, true);
    check("Always", "c=Exited", false, true);
    check("Always", "", false, true);
    check("Always", "c=Running", false, false);
    check("Always", "c=Exited:1", true, false);
    check("OnFailure", "c=Exited:1", false, true);
    check("OnFailure", "c=Exited", false, false);
    check("Never", "c=Exited:1", false, false);
}

#[test]
fn started_and_ready_follow_the_probes() {
    use Verdict::{Assumed, Failure, NoProbe, Pending, Success};
    let pod = api_pod(json!({"containers": [{"name": "c"}]}));
    let node = NodeAddresses::default();
    let runtime = runtime(instances("c=Running"));
    let was = old_with(json!({"running": {}}), json!({"started": true}));
    let was_not = old_with(json!({"running": {}}), json!({"started": false, "ready": false}));
    for (startup, readiness, old, started, ready) in [
        (NoProbe, NoProbe, None, true, true),
        (NoProbe, Pending, None, true, false),
        (NoProbe, Success, None, true, true),
        (NoProbe, Failure, Some(&was), true, false),
        (Pending, Success, None, false, false),
        (Failure, Success, Some(&was), false, false),
        (Success, Success, None, true, true),
        // With `Assumed` the old values stay, or are true if there are none.
        (Assumed, Assumed, Some(&was), true, true),
        (Assumed, Assumed, Some(&was_not), false, false),
        (Assumed, Assumed, None, true, true),
        (Pending, Pending, Some(&was), false, false),
    ] {
        let status = compose(&Inputs {
            old,
            startup: &|_| startup,
            readiness: &|_| readiness,
            ..Inputs::new(&pod, &runtime, &node, timestamp(200))
        });
        let shown = &status.container_statuses.unwrap()[0];
        assert_eq!((shown.started, shown.ready), (Some(started), ready), "{startup:?} {readiness:?}");
    }
}

/// The cases of Go: test/e2e_node/container_lifecycle_test.go, of pods whose readiness probes fail. The
/// status from before the start is only in the API server's object.
#[test]
fn pod_that_is_not_ready_stays_so_over_a_restart_of_the_agent() {
    use Verdict::{Assumed, NoProbe};
    let node = NodeAddresses::default();
    for (sidecar, regular, startup) in [
        (None, &["a"][..], NoProbe),
        (None, &["a"][..], Assumed),
        (None, &["a", "b"][..], NoProbe),
        (None, &["a", "b"][..], Assumed),
        (Some("s"), &["a"][..], NoProbe),
        (Some("s"), &["a"][..], Assumed),
    ] {
        let names: Vec<&str> = sidecar.into_iter().chain(regular.iter().copied()).collect();
        let text: Vec<String> = names.iter().map(|name| format!("{name}=Running")).collect();
        let runtime = runtime(instances(&text.join(" ")));
        let before = |name: &&str| {
            json!({"name": name, "image": "i", "imageID": "", "ready": false, "started": true,
                "restartCount": 0, "state": {"running": {}}, "containerID": format!("containerd://{name}/0")})
        };
        let statuses_of = |names: &[&str]| names.iter().map(before).collect::<Vec<Value>>();
        let sidecars: Vec<&str> = sidecar.into_iter().collect();
        let plain: Vec<Value> = regular.iter().map(|name| json!({"name": name})).collect();
        let first: Vec<Value> =
            sidecars.iter().map(|name| json!({"name": name, "restartPolicy": "Always"})).collect();
        let pod = pod(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 1},
            "spec": {"initContainers": first, "containers": plain},
            "status": {"phase": "Running", "initContainerStatuses": statuses_of(&sidecars),
                "containerStatuses": statuses_of(regular)},
        }));
        let status = compose(&Inputs {
            startup: &|_| startup,
            readiness: &|_| Assumed,
            ..Inputs::new(&pod, &runtime, &node, timestamp(200))
        });
        let shown = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
        let shown: Vec<_> = shown.map(|shown| (shown.started, shown.ready, shown.restart_count)).collect();
        assert_eq!(shown, vec![(Some(true), false, 0); names.len()], "{names:?} {startup:?}");
        let ready = status.conditions.unwrap().into_iter().find(|condition| condition.type_ == "Ready");
        assert_eq!(ready.unwrap().status, "False", "{names:?} {startup:?}");
    }
}

#[test]
fn readiness_of_a_terminating_pod_follows_its_probes() {
    let pod = api_pod(json!({"containers": [{"name": "c"}]}));
    let node = NodeAddresses::default();
    let runtime = runtime(instances("c=Running"));
    for (readiness, expected) in [(Verdict::Success, true), (Verdict::Failure, false)] {
        let status = compose(&Inputs {
            deleting: true,
            readiness: &|_| readiness,
            ..Inputs::new(&pod, &runtime, &node, timestamp(200))
        });
        let ready = status.conditions.unwrap().into_iter().find(|condition| condition.type_ == "Ready");
        assert_eq!(ready.unwrap().status == "True", expected, "{readiness:?}");
        assert_eq!(status.container_statuses.unwrap()[0].ready, expected, "{readiness:?}");
    }
}

#[test]
fn ephemeral_containers_are_neither_started_nor_ready() {
    let pod = api_pod(json!({"containers": [{"name": "c"}], "ephemeralContainers": [{"name": "e"}]}));
    let node = NodeAddresses::default();
    for state in ["", "e=Created", "e=Running", "e=Exited", "e=Unknown"] {
        let runtime = runtime(instances(&format!("c=Running {state}")));
        let status = compose(&Inputs::new(&pod, &runtime, &node, timestamp(200)));
        let shown = serde_json::to_value(&status.ephemeral_container_statuses.unwrap()[0]).unwrap();
        assert_eq!((shown.get("started"), &shown["ready"]), (None, &json!(false)), "{state}");
        assert_eq!(status.container_statuses.unwrap()[0].started, Some(true));
    }
}

#[test]
fn pod_is_ready_only_when_its_readiness_gates_are_true() {
    let check = |conditions: Value, status: &str, message: Option<&str>| {
        let pod = pod(json!({"metadata": {"name": "p"}, "status": {"conditions": conditions},
            "spec": {"containers": [{"name": "c"}], "readinessGates": [{"conditionType": "x/y"}]}}));
        let node = NodeAddresses::default();
        let runtime = runtime(instances("c=Running"));
        let composed = compose(&Inputs::new(&pod, &runtime, &node, timestamp(200)));
        let ready =
            composed.conditions.iter().flatten().find(|condition| condition.type_ == "Ready").unwrap();
        assert_eq!((ready.status.as_str(), ready.message.as_deref()), (status, message));
        let foreign =
            composed.conditions.iter().flatten().filter(|condition| condition.type_ == "x/y").count();
        assert_eq!(foreign, conditions.as_array().unwrap().len());
    };
    let missing = "corresponding condition of pod readiness gate \"x/y\" does not exist.";
    check(json!([]), "False", Some(missing));
    check(
        json!([{"type": "x/y", "status": "False"}]),
        "False",
        Some("the status of pod readiness gate \"x/y\" is not \"True\", but False"),
    );
    check(json!([{"type": "x/y", "status": "True"}]), "True", None);
}

#[test]
fn first_pod_ip_has_the_family_of_the_first_host_ip() {
    let check = |host_network: bool, hosts: &[&str], ips: &[&str], old: &[&str], expected: &[&str]| {
        let pod = api_pod(json!({"hostNetwork": host_network, "containers": [{"name": "c"}]}));
        let parse = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect();
        let mut runtime = runtime(vec![]);
        runtime.ips = parse(ips);
        if ips.is_empty() {
            runtime.sandboxes.clear();
        }
        let pod_ips = old.iter().map(|ip| api::PodIP { ip: (*ip).to_owned() }).collect();
        let old = PodStatus { pod_ips: Some(pod_ips), ..PodStatus::default() };
        let node = NodeAddresses { host_ips: parse(hosts) };
        let status =
            compose(&Inputs { old: Some(&old), ..Inputs::new(&pod, &runtime, &node, timestamp(200)) });
        let found: Vec<String> = status.pod_ips.into_iter().flatten().map(|ip| ip.ip).collect();
        assert_eq!(found, expected);
        assert_eq!(status.pod_ip.as_deref(), expected.first().copied());
        assert_eq!(status.host_ip.as_deref(), hosts.first().copied());
    };
    check(false, &["192.0.2.1"], &["fd00::5", "10.0.0.5"], &[], &["10.0.0.5", "fd00::5"]);
    check(false, &["fd00::1"], &["10.0.0.5", "fd00::5", "10.0.0.6"], &[], &["fd00::5", "10.0.0.5"]);
    check(false, &[], &["10.0.0.5"], &["10.0.0.4"], &["10.0.0.5"]);
    check(false, &[], &[], &["10.0.0.4"], &["10.0.0.4"]);
    check(true, &["192.0.2.1"], &["10.0.0.5"], &[], &["192.0.2.1"]);
    check(true, &["192.0.2.1", "fd00::1"], &[], &["192.0.2.1"], &["192.0.2.1", "fd00::1"]);
    check(true, &["192.0.2.2"], &[], &["192.0.2.1"], &["192.0.2.1"]);
    check(true, &[], &[], &[], &[]);
}

#[test]
fn pod_ips_equal_those_in_the_composed_status() {
    let check =
        |host_network: bool, hosts: &[&str], found: &[&str], old: Option<&[&str]>, expected: &[&str]| {
            let pod = api_pod(json!({"hostNetwork": host_network, "containers": [{"name": "c"}]}));
            let parse = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
            let old = old.map(|old| PodStatus {
                pod_ips: Some(old.iter().map(|ip| api::PodIP { ip: (*ip).to_owned() }).collect()),
                ..PodStatus::default()
            });
            let node = NodeAddresses { host_ips: parse(hosts) };
            let ips = pod_ips(&pod, &parse(found), old.as_ref(), &node);
            assert_eq!(ips, parse(expected));
            let mut runtime = runtime(vec![]);
            runtime.ips = parse(found);
            let status =
                compose(&Inputs { old: old.as_ref(), ..Inputs::new(&pod, &runtime, &node, timestamp(200)) });
            let shown: Vec<IpAddr> =
                status.pod_ips.iter().flatten().filter_map(|ip| ip.ip.parse().ok()).collect();
            assert_eq!(ips, shown);
        };
    // A pod on the host's network has the node's addresses, even before its first status.
    check(true, &["192.0.2.1", "fd00::1"], &[], None, &["192.0.2.1", "fd00::1"]);
    check(true, &["192.0.2.2"], &["10.0.0.5"], Some(&["192.0.2.1"]), &["192.0.2.1"]);
    check(true, &["192.0.2.2"], &[], Some(&["rubbish"]), &[]);
    check(true, &[], &[], None, &[]);
    check(false, &["fd00::1"], &["10.0.0.5", "fd00::5", "10.0.0.6"], None, &["fd00::5", "10.0.0.5"]);
    check(false, &[], &["fd00::5", "10.0.0.5"], None, &["10.0.0.5", "fd00::5"]);
}

// ---- with an API server ----

fn shown_pod(spec: Value, status: Value) -> Pod {
    pod(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 2}, "spec": spec,
        "status": status}))
}

/// Another client wrote a terminal phase to the API server: the phase and its reason stay.
#[test]
fn terminal_phase_at_the_api_server_replaces_the_computed_one() {
    let status = json!({"phase": "Failed", "reason": "Evicted", "message": "m"});
    let pod = shown_pod(json!({"containers": [{"name": "c"}]}), status);
    let runtime = runtime(instances("c=Running"));
    let node = NodeAddresses::default();
    for old in [None, Some(json!({"phase": "Running", "reason": "x"})), Some(json!({"phase": "Succeeded"}))] {
        let old: Option<PodStatus> = old.map(|old| serde_json::from_value(old).unwrap());
        let inputs = Inputs { old: old.as_ref(), ..Inputs::new(&pod, &runtime, &node, timestamp(5)) };
        let status = compose(&inputs);
        let reported = (status.phase.as_deref(), status.reason.as_deref(), status.message.as_deref());
        assert_eq!(reported, (Some("Failed"), Some("Evicted"), Some("m")), "{old:?}");
    }
}

#[test]
fn conditions_of_other_writers_at_the_api_server_stay() {
    let shown = json!({"phase": "Pending", "conditions": [{"type": "x/y", "status": "Unknown"},
        {"type": "Ready", "status": "True"}]});
    let pod = shown_pod(json!({"containers": [{"name": "c"}]}), shown);
    let (runtime, node) = (runtime(vec![]), NodeAddresses::default());
    let mut status = compose(&Inputs::new(&pod, &runtime, &node, timestamp(5)));
    let kinds = |status: &PodStatus| -> Vec<String> {
        status
            .conditions
            .iter()
            .flatten()
            .map(|condition| format!("{}={}", condition.type_, condition.status))
            .collect()
    };
    let ours = [
        "PodReadyToStartContainers=True",
        "Initialized=True",
        "Ready=False",
        "ContainersReady=False",
        "PodScheduled=True",
    ];
    assert_eq!(kinds(&status), [&["x/y=Unknown"], ours.as_slice()].concat());
    assert_eq!(status.observed_generation, Some(2));
    let generations =
        status.conditions.iter().flatten().skip(1).map(|condition| condition.observed_generation);
    assert!(generations.into_iter().all(|generation| generation == Some(2)));
    // The condition that the agent set when it decided to end the pod stays.
    disrupt(&pod, &mut status, "why", timestamp(6));
    disrupt(&pod, &mut status, "why", timestamp(7));
    let next = compose(&Inputs { old: Some(&status), ..Inputs::new(&pod, &runtime, &node, timestamp(8)) });
    assert_eq!(kinds(&next), [&["x/y=Unknown", "DisruptionTarget=True"], ours.as_slice()].concat());
    let disruption = serde_json::to_value(conditions::find(
        next.conditions.as_deref(),
        condition_types::DISRUPTION_TARGET,
    ))
    .unwrap();
    assert_eq!(
        disruption,
        json!({"type": "DisruptionTarget", "status": "True", "message": "why",
        "reason": "TerminationByKubelet", "observedGeneration": 2,
        "lastTransitionTime": "1970-01-01T00:00:06Z"})
    );
}

#[test]
fn changed_readiness_gates_at_the_api_server_are_detected() {
    let spec = json!({"containers": [{"name": "c"}], "readinessGates": [{"conditionType": "x/y"}]});
    let gated =
        |status: &str| shown_pod(spec.clone(), json!({"conditions": [{"type": "x/y", "status": status}]}));
    let (runtime, node) = (runtime(instances("c=Running")), NodeAddresses::default());
    let closed = compose(&Inputs::new(&gated("False"), &runtime, &node, timestamp(5)));
    assert!(!gates_differ(&gated("False"), &closed));
    assert!(gates_differ(&gated("Unknown"), &closed), "the message names the status");
    assert!(gates_differ(&gated("True"), &closed));
    let open = compose(&Inputs::new(&gated("True"), &runtime, &node, timestamp(5)));
    assert!(!gates_differ(&gated("True"), &open) && gates_differ(&gated("False"), &open));
    let plain = shown_pod(json!({"containers": [{"name": "c"}]}), json!({}));
    assert!(!gates_differ(&plain, &closed));
}

#[test]
fn restart_of_all_containers_is_shown_as_a_condition() {
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let pod = api_pod(json!({"restartPolicy": "Never",
        "containers": [{"name": "c", "restartPolicy": "Never", "restartPolicyRules": rules}]}));
    let node = NodeAddresses::default();
    for (now, status, reason) in [
        ("c=Running", "False", None),
        ("c=Exited:42", "True", Some("RestartAllContainersStarted")),
        ("c=Exited:1", "False", Some("PodFailed")),
        ("c=Exited:0", "False", Some("PodCompleted")),
    ] {
        let status_of = compose(&Inputs::new(&pod, &runtime(instances(now)), &node, timestamp(5)));
        let found = conditions::find(status_of.conditions.as_deref(), "AllContainersRestarting").unwrap();
        assert_eq!((found.status.as_str(), found.reason.as_deref()), (status, reason), "{now}");
        assert_eq!(found.observed_generation, None);
    }
}
