//! Compares composed statuses with the recorded ones, and tests rules that no recording covers.

use std::collections::BTreeMap;
use std::net::IpAddr;

use expect_test::expect;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::model::api::{self, PodStatus};
use crate::model::pod::Pod;
use crate::model::runtime::{
    AppliedResources, ContainerState, ContainerStatus as Instance, LinuxUser, PodRuntime, SandboxState,
    SandboxStatus,
};
use crate::model::verdict::ProbeVerdict;
use crate::util::testing::{Table, table, table_of_policies};

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

// ---- in words ----

/// ` (REASON): MESSAGE`, as far as they are given.
fn explained(reason: Option<&str>, message: Option<&str>) -> String {
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    reason + &message.map(|message| format!(": {message}")).unwrap_or_default()
}

fn render_phase(status: &PodStatus) -> String {
    let phase = status.phase.as_deref().unwrap_or("no phase");
    format!("{phase}{}", explained(status.reason.as_deref(), status.message.as_deref()))
}

/// The conditions whose type begins with one of `kinds`.
fn render_conditions(status: &PodStatus, kinds: &[&str]) -> String {
    let conditions = status.conditions.iter().flatten();
    let conditions = conditions.filter(|shown| kinds.iter().any(|kind| shown.type_.starts_with(kind)));
    let render = |shown: &api::PodCondition| {
        let explained = explained(shown.reason.as_deref(), shown.message.as_deref());
        format!("{}={}{explained}", shown.type_, shown.status)
    };
    conditions.map(render).collect::<Vec<_>>().join("; ")
}

fn render_state(state: &api::ContainerState) -> Option<String> {
    if let Some(waiting) = &state.waiting {
        return Some(format!("waiting{}", explained(waiting.reason.as_deref(), waiting.message.as_deref())));
    }
    if let Some(ended) = &state.terminated {
        let id = ended.container_id.as_ref().map(|id| format!("{id} ")).unwrap_or_default();
        let explained = explained(ended.reason.as_deref(), ended.message.as_deref());
        let time = ended.finished_at.as_ref().map(|time| format!(" at second {}", time.0.as_second()));
        let time = time.unwrap_or_default();
        return Some(format!("{id}ended with {}{time}{explained}", ended.exit_code));
    }
    state.running.as_ref().map(|_| "running".to_owned())
}

/// The state of a container; whether it has started, is ready, and was restarted; and its last state.
fn render_container(shown: &api::ContainerStatus) -> String {
    let mut words = vec![shown.state.as_ref().and_then(render_state).unwrap_or("no state".to_owned())];
    words.extend((shown.started == Some(true)).then(|| "started".to_owned()));
    words.extend(shown.ready.then(|| "ready".to_owned()));
    words.extend((shown.restart_count > 0).then(|| format!("{} restarts", shown.restart_count)));
    let last = shown.last_state.as_ref().and_then(render_state);
    words.extend(last.map(|last| format!("before: {last}")));
    words.join(", ")
}

/// The instances of a case, and the words after its bar: `c=Running | terminal`.
fn split(case: &str) -> (&str, &str) {
    case.split_once(" | ").unwrap_or((case, ""))
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
    let node = NodeAddresses { host_ips: vec!["192.0.2.10".parse().unwrap()], ..NodeAddresses::default() };
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

/// The phase of an API pod, or with the word `static` of a static pod. With `terminal` its containers do
/// not start again, with `startup:Pending` startup probes have not decided.
fn phase(spec: Value, case: &str) -> String {
    let (now, words) = split(case);
    let pod = if words.contains("static") { static_pod(spec) } else { api_pod(spec) };
    let startup =
        if words.contains("startup:Pending") { ProbeVerdict::Pending } else { ProbeVerdict::NoProbe };
    let (runtime, node) = (runtime(instances(now)), NodeAddresses::default());
    let status = compose(&Inputs {
        terminal: words.contains("terminal"),
        startup: &|_| startup,
        ..Inputs::new(&pod, &runtime, &node, timestamp(200))
    });
    render_phase(&status)
}

fn phases(spec: &Value) -> Table<impl Fn(&str) -> String> {
    table(move |case| phase(spec.clone(), case))
}

/// As [`phases`], for each restart policy of the pod.
fn phases_of_policies(spec: &Value) -> Table<impl Fn(&str) -> String> {
    table_of_policies(move |policy, case| {
        let mut spec = spec.clone();
        spec["restartPolicy"] = json!(policy);
        phase(spec, case)
    })
}

#[test]
fn phase_follows_regular_containers_and_restart_policy() {
    phases_of_policies(&json!({"containers": [{"name": "a"}, {"name": "b"}]})).check(expect![[r#"
        none                                    -> Pending
        a=Running                               -> Pending
        a=Created b=Running                     -> Pending
        a=Running b=Running                     -> Running
        a=Running b=Exited:1                    -> Running
        a=Exited b=Exited                       -> Always: Running; OnFailure, Never: Succeeded
        a=Exited b=Exited:1                     -> Always, OnFailure: Running; Never: Failed
        a=Exited:1 b=Exited:1                   -> Always, OnFailure: Running; Never: Failed
        a=Exited b=Exited | terminal            -> Succeeded
        a=Exited b=Exited:1 | terminal          -> Failed
        a=Exited:1 b=Exited:1 | terminal        -> Failed
        # A static pod that is stopped gets no terminal phase.
        a=Exited b=Exited | terminal static     -> Always: Running; OnFailure, Never: Succeeded
        a=Exited b=Exited:1 | terminal static   -> Always, OnFailure: Running; Never: Failed
        a=Exited:1 b=Exited:1 | terminal static -> Always, OnFailure: Running; Never: Failed
    "#]]);
    phases(&json!({"restartPolicy": "Never", "containers": [{"name": "a", "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]}))
    .check(expect![[r#"
        a=Exited:42 -> Running
        a=Exited:41 -> Failed
    "#]]);
}

#[test]
fn pod_is_pending_or_failed_until_initialization_succeeds() {
    phases_of_policies(
        &json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}, {"name": "j"}]}),
    )
    .check(expect![[r#"
        none                        -> Pending
        i=Running                   -> Pending
        i=Exited                    -> Pending
        i=Exited j=Exited           -> Pending
        i=Exited j=Exited c=Running -> Running
        i=Exited:1                  -> Always, OnFailure: Pending; Never: Failed
        i=Exited j=Exited:1         -> Always, OnFailure: Pending; Never: Failed
        # Only the records of the init containers were removed: the pod continues.
        c=Running                   -> Running
    "#]]);
}

#[test]
fn sidecar_start_and_end_delay_the_phase_but_restarts_do_not() {
    phases(&json!({"restartPolicy": "Never", "containers": [{"name": "c"}],
        "initContainers": [{"name": "s", "restartPolicy": "Always"}]}))
    .check(expect![[r#"
        none                                  -> Pending
        s=Running                             -> Pending
        s=Running c=Running                   -> Running
        s=Exited:1 c=Running                  -> Running
        s=Running | startup:Pending           -> Pending
        # Once regular containers exist, a restarting sidecar does not change the phase.
        s=Running c=Running | startup:Pending -> Running
        s=Running c=Exited                    -> Running
        s=Exited:137 c=Exited                 -> Succeeded
        s=Exited c=Exited:1                   -> Failed
    "#]]);
}

#[test]
fn terminal_phase_and_its_reason_do_not_change() {
    let spec = json!({"containers": [{"name": "a"}, {"name": "b"}]});
    let node = NodeAddresses::default();
    let evicted = PodStatus {
        phase: Some("Failed".into()),
        reason: Some("Evicted".into()),
        message: Some("The node was low on resource: memory.".into()),
        ..PodStatus::default()
    };
    let (ended, runs) = (runtime(instances("a=Exited b=Exited")), runtime(instances("a=Running b=Running")));
    let pod_of_evicted = api_pod(spec.clone());
    let inputs = Inputs::new(&pod_of_evicted, &ended, &node, timestamp(200));
    let status = compose(&Inputs { old: Some(&evicted), terminal: true, ..inputs });
    expect!["Failed (Evicted): The node was low on resource: memory."].assert_eq(&render_phase(&status));
    // A terminal phase that only the API server shows does not change either.
    let pod = pod(json!({"metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Succeeded"}}));
    let status = compose(&Inputs::new(&pod, &runs, &node, timestamp(200)));
    expect!["Succeeded"].assert_eq(&render_phase(&status));
}

/// Go: `SyncTerminatingPod` sets the phase of an evicted pod while it runs, and computes it again at its end.
#[test]
fn pod_that_was_failed_while_it_ran_succeeds_if_its_containers_exit_with_zero() {
    let preempted: PodStatus = serde_json::from_value(json!({"phase": "Failed", "reason": "Preempting",
        "message": "m", "conditions": [{"type": "DisruptionTarget", "status": "True", "message": "why"}]}))
    .unwrap();
    let node = NodeAddresses::default();
    let composed = |policy: &str, case: &str| {
        let (now, words) = split(case);
        let spec = json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]});
        let pod = match words {
            "static" => static_pod(spec),
            "failed at the API server" => shown_pod(spec, json!({"phase": "Failed"})),
            _ => api_pod(spec),
        };
        let runtime = runtime(instances(now));
        let delayed = StartReason { reason: "CrashLoopBackOff", message: "m".to_owned() };
        compose(&Inputs {
            old: Some(&preempted),
            terminal: true,
            exit_codes_decide: words != "none ran",
            failures: &|name| (words == "restart delayed" && name == "b").then(|| delayed.clone()),
            deleting: true,
            ..Inputs::new(&pod, &runtime, &node, timestamp(200))
        })
    };
    table_of_policies(|policy, case| render_phase(&composed(policy, case))).check(expect![[r#"
        s=Exited:137 a=Exited b=Exited                        -> Succeeded
        s=Exited a=Exited b=Exited:143                        -> Failed (Preempting): m
        # A regular container has not started, or is lost.
        s=Exited a=Exited                                     -> Failed (Preempting): m
        s=Exited a=Exited b=Unknown                           -> Failed (Preempting): m
        # It did not complete by its last runs.
        s=Exited a=Exited b=Exited | none ran                 -> Failed (Preempting): m
        s=Exited a=Exited b=Exited | restart delayed          -> Always: Failed (Preempting): m; OnFailure, Never: Succeeded
        s=Exited a=Exited b=Exited | failed at the API server -> Failed (Preempting): m
        # The restart policy of a static pod decides, because it may start again.
        s=Exited a=Exited b=Exited | static                   -> Always: Failed (Preempting): m; OnFailure, Never: Succeeded
        s=Exited a=Exited b=Exited:1 | static                 -> Failed (Preempting): m
    "#]]);
    let status = composed("Never", "s=Exited a=Exited b=Exited");
    expect!["DisruptionTarget=True: why; Ready=False (PodCompleted)"]
        .assert_eq(&render_conditions(&status, &["DisruptionTarget", "Ready"]));
    // It was the end: no later status changes it.
    let pod = api_pod(json!({"containers": [{"name": "a"}, {"name": "b"}]}));
    let ended = runtime(instances("a=Exited b=Exited:1"));
    let inputs = Inputs { terminal: true, ..Inputs::new(&pod, &ended, &node, timestamp(300)) };
    for exit_codes_decide in [false, true] {
        let later = compose(&Inputs { old: Some(&status), exit_codes_decide, ..inputs });
        assert_eq!(render_phase(&later), "Succeeded");
    }
}

#[test]
fn active_deadline_fails_a_pod_that_runs_longer() {
    let spec = json!({"restartPolicy": "Never", "activeDeadlineSeconds": 50, "containers": [{"name": "c"}]});
    let pod = api_pod(spec);
    let started = |second| PodStatus {
        start_time: Some(crate::model::meta::Time(timestamp(second))),
        ..PodStatus::default()
    };
    let seconds = std::time::Duration::from_secs;
    assert_eq!(
        (known_start(&pod, None), known_start(&pod, Some(&started(160)))),
        (None, Some(timestamp(160)))
    );
    assert_eq!(active_deadline(&pod, seconds(40)), Some(Deadline::Remaining(seconds(10))));
    assert_eq!(active_deadline(&pod, seconds(50)), Some(Deadline::Exceeded));
    let none = api_pod(json!({"containers": [{"name": "c"}]}));
    assert_eq!(active_deadline(&none, seconds(200)), None);

    let node = NodeAddresses::default();
    let composed = |old: Option<&PodStatus>, now: &str, terminal: bool| {
        let runtime = runtime(instances(now));
        compose(&Inputs { old, terminal, ..Inputs::new(&pod, &runtime, &node, timestamp(200)) })
    };
    let render =
        |status: &PodStatus| format!("{}; {}", render_phase(status), render_conditions(status, &["Ready"]));
    let over = composed(Some(&started(150)), "c=Running", false);
    // At second 200, of a pod that started at the given second.
    table(|case| match case.split_once(' ').unwrap() {
        ("over", now) => render(&composed(Some(&over), now, true)),
        ("unknown", now) => render(&composed(None, now, false)),
        (second, now) => render(&composed(Some(&started(second.parse().unwrap())), now, false)),
    })
    .check(expect![[r#"
        160 c=Running     -> Running; Ready=True
        150 c=Running     -> Failed (DeadlineExceeded): Pod was active on the node longer than the specified deadline; Ready=False (PodFailed)
        # The container ended by itself before the deadline was checked.
        150 c=Exited      -> Succeeded; Ready=False (PodCompleted)
        # A pod that exceeded its deadline stays failed although its container exits with 0.
        over c=Exited     -> Failed (DeadlineExceeded): Pod was active on the node longer than the specified deadline; Ready=False (PodFailed)
        # Without an earlier status the pod started when its sandbox was created (at 99).
        unknown c=Running -> Failed (DeadlineExceeded): Pod was active on the node longer than the specified deadline; Ready=False (PodFailed)
    "#]]);
    assert_eq!(composed(None, "c=Running", false).start_time.unwrap().0, timestamp(99));

    // It also stays failed if it has to make room while it stops.
    let ended = runtime(instances("c=Exited"));
    let inputs = Inputs { terminal: true, ..Inputs::new(&pod, &ended, &node, timestamp(200)) };
    let status = compose(&Inputs { old: Some(&over), exit_codes_decide: true, ..inputs });
    assert_eq!(render_phase(&status), render_phase(&over));

    // The active time that the worker measures comes before the time of day, in both directions.
    let runtime = runtime(instances("c=Running"));
    for (start, active, phase) in [(0, 49, "Running"), (190, 50, "Failed")] {
        let old = started(start);
        let inputs = Inputs::new(&pod, &runtime, &node, timestamp(200));
        let status = compose(&Inputs { old: Some(&old), active: Some(seconds(active)), ..inputs });
        assert_eq!(status.phase.as_deref(), Some(phase), "{start}");
    }
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

/// The status of the pod's only container, and in words with its phase.
fn container_after(old: &PodStatus, now: &str, deleting: bool) -> (api::ContainerStatus, String) {
    let pod = api_pod(json!({"containers": [{"name": "c", "image": "i"}]}));
    let runtime = runtime(instances(now));
    let node = NodeAddresses::default();
    let inputs = Inputs { old: Some(old), deleting, ..Inputs::new(&pod, &runtime, &node, timestamp(200)) };
    let mut status = compose(&inputs);
    let shown = status.container_statuses.as_mut().unwrap().remove(0);
    let text = format!("{}; {}\n", render_phase(&status), render_container(&shown));
    (shown, text)
}

#[test]
fn vanished_container_is_counted_once_as_a_restart() {
    let running = old_with(json!({"running": {}}), json!({}));
    let lost = container_after(&running, "", false).0.last_state;
    let ended = json!({"terminated": {"exitCode": 1}});
    let rows = [
        ("running", &running, false),
        ("running, in a pod that is being deleted", &running, true),
        // The restart is not counted again, nor one after a state that is known.
        ("lost", &old_with(json!({"waiting": {}}), json!({"restartCount": 3, "lastState": lost})), false),
        ("running again", &old_with(json!({"running": {}}), json!({"lastState": ended})), false),
        ("ended", &old_with(ended.clone(), json!({})), false),
        ("waiting", &old_with(json!({"waiting": {}}), json!({})), false),
    ];
    let rows = rows.map(|(was, old, deleting)| format!("{was}: {}", container_after(old, "", deleting).1));
    expect![[r#"
        running: Running; waiting (ContainerCreating), 3 restarts, before: ended with 137 (ContainerStatusUnknown): The container could not be located when the pod was deleted.  The container used to be Running
        running, in a pod that is being deleted: Running; waiting (ContainerCreating), 2 restarts, before: ended with 137 (ContainerStatusUnknown): The container could not be located when the pod was deleted.  The container used to be Running
        lost: Running; waiting (ContainerCreating), 3 restarts, before: ended with 137 (ContainerStatusUnknown): The container could not be located when the pod was deleted.  The container used to be Running
        running again: Running; waiting (ContainerCreating), 2 restarts, before: ended with 1
        ended: Running; ended with 1, 2 restarts
        waiting: Pending; waiting (ContainerCreating), 2 restarts
    "#]]
    .assert_eq(&rows.concat());
}

#[test]
fn running_container_in_unknown_state_is_shown_as_terminated() {
    let running = old_with(json!({"running": {}}), json!({}));
    let (shown, first) = container_after(&running, "c=Unknown", false);
    let again = old_with(serde_json::to_value(shown.state).unwrap(), json!({"restartCount": 3}));
    let again = container_after(&again, "c=Unknown", false).1;
    let waiting = container_after(&old_with(json!({"waiting": {}}), json!({})), "c=Unknown", false).1;
    expect![[r#"
        Running; ended with 137 (ContainerStatusUnknown): The container could not be located when the pod was terminated, 3 restarts
        Running; ended with 137 (ContainerStatusUnknown): The container could not be located when the pod was terminated, 3 restarts
        Pending; waiting
    "#]]
    .assert_eq(&(first + &again + &waiting));
}

#[test]
fn init_container_without_a_record_is_shown_as_completed() {
    let pod = api_pod(json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "i"}, {"name": "s", "restartPolicy": "Always"}]}));
    let node = NodeAddresses::default();
    let runtime = runtime(instances("c=Running"));
    let status = compose(&Inputs::new(&pod, &runtime, &node, timestamp(200)));
    let init = status.init_container_statuses.unwrap();
    let init: Vec<String> =
        init.iter().map(|shown| format!("{}: {}\n", shown.name, render_container(shown))).collect();
    expect![[r#"
        i: ended with 0 (Completed): Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally, ready
        s: waiting (PodInitializing)
    "#]]
    .assert_eq(&init.concat());
}

#[test]
fn a_start_failure_is_shown_only_if_the_container_will_start() {
    let failures = |_: &str| Some(StartReason { reason: "CrashLoopBackOff", message: "back-off".into() });
    let node = NodeAddresses::default();
    let shown = |policy: &str, case: &str| {
        let pod = api_pod(json!({"restartPolicy": policy, "containers": [{"name": "c"}]}));
        let (now, words) = split(case);
        let (runtime, deleting) = (runtime(instances(now)), words == "deleting");
        let inputs =
            Inputs { failures: &failures, deleting, ..Inputs::new(&pod, &runtime, &node, timestamp(200)) };
        render_container(&compose(&inputs).container_statuses.unwrap()[0])
    };
    table_of_policies(shown).check(expect![[r#"
        none                  -> waiting (CrashLoopBackOff): back-off
        c=Running             -> running, started, ready
        c=Exited:1            -> Always, OnFailure: waiting (CrashLoopBackOff): back-off, before: containerd://c/0 ended with 1 at second 102; Never: containerd://c/0 ended with 1 at second 102
        c=Exited              -> Always: waiting (CrashLoopBackOff): back-off, before: containerd://c/0 ended with 0 at second 102; OnFailure, Never: containerd://c/0 ended with 0 at second 102
        c=Exited:1 | deleting -> containerd://c/0 ended with 1 at second 102
    "#]]);
}

#[test]
fn started_and_ready_follow_the_probes() {
    let verdict = |text: &str| match text {
        "Assumed" => ProbeVerdict::Assumed,
        "Failure" => ProbeVerdict::Failure,
        "NoProbe" => ProbeVerdict::NoProbe,
        "Pending" => ProbeVerdict::Pending,
        "Success" => ProbeVerdict::Success,
        other => panic!("{other}"),
    };
    let pod = api_pod(json!({"containers": [{"name": "c"}]}));
    let node = NodeAddresses::default();
    let runtime = runtime(instances("c=Running"));
    let was = old_with(json!({"running": {}}), json!({"started": true}));
    let was_not = old_with(json!({"running": {}}), json!({"started": false, "ready": false}));
    // The verdicts of the startup probe and the readiness probe, and the status before.
    table(|case| {
        let (verdicts, before) = split(case);
        let (startup, readiness) = verdicts.split_once(' ').unwrap();
        let old = match before {
            "was ready" => Some(&was),
            "was not ready" => Some(&was_not),
            _ => None,
        };
        let status = compose(&Inputs {
            old,
            startup: &|_| verdict(startup),
            readiness: &|_| verdict(readiness),
            ..Inputs::new(&pod, &runtime, &node, timestamp(200))
        });
        render_container(&status.container_statuses.unwrap()[0])
    })
    .check(expect![[r#"
        NoProbe NoProbe                 -> running, started, ready
        NoProbe Pending                 -> running, started
        NoProbe Success                 -> running, started, ready
        NoProbe Failure | was ready     -> running, started
        Pending Success                 -> running
        Failure Success | was ready     -> running
        Success Success                 -> running, started, ready
        Pending Pending | was ready     -> running
        # With `Assumed` the old values stay, or are true if there are none.
        Assumed Assumed | was ready     -> running, started, ready
        Assumed Assumed | was not ready -> running
        Assumed Assumed                 -> running, started, ready
    "#]]);
}

/// The cases of Go: test/e2e_node/container_lifecycle_test.go, of pods whose readiness probes fail. The
/// status from before the start is only in the API server's object.
#[test]
fn pod_that_is_not_ready_stays_so_over_a_restart_of_the_agent() {
    use ProbeVerdict::{Assumed, NoProbe};
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
    for (readiness, expected) in [(ProbeVerdict::Success, true), (ProbeVerdict::Failure, false)] {
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
    table(|conditions| {
        let conditions: Value = serde_json::from_str(conditions).unwrap();
        let pod = pod(json!({"metadata": {"name": "p"}, "status": {"conditions": conditions},
            "spec": {"containers": [{"name": "c"}], "readinessGates": [{"conditionType": "x/y"}]}}));
        let node = NodeAddresses::default();
        let runtime = runtime(instances("c=Running"));
        let status = compose(&Inputs::new(&pod, &runtime, &node, timestamp(200)));
        render_conditions(&status, &["x/y", "Ready"])
    })
    .check(expect![[r#"
        []                                   -> Ready=False (ReadinessGatesNotReady): corresponding condition of pod readiness gate "x/y" does not exist.
        [{"type": "x/y", "status": "False"}] -> x/y=False; Ready=False (ReadinessGatesNotReady): the status of pod readiness gate "x/y" is not "True", but False
        [{"type": "x/y", "status": "True"}]  -> x/y=True; Ready=True
    "#]]);
}

/// The first address has the family of the node's first one. A pod on the host's network has the node's
/// addresses, even before its first status. What [`pod_ips`] returns differs only where it is shown.
#[test]
fn pod_has_the_addresses_of_its_sandbox_or_of_the_node() {
    let outcome = |case: &str| {
        let fields: Vec<&str> = case.split("; ").collect();
        let list = |name: &str| {
            let field = fields.iter().find_map(|field| field.strip_prefix(name));
            field.map(|field| field.split(' ').collect::<Vec<_>>())
        };
        let parse = |name: &str| {
            let ips = list(name).unwrap_or_default();
            ips.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>()
        };
        let host_network = fields[0] == "host network";
        let pod = api_pod(json!({"hostNetwork": host_network, "containers": [{"name": "c"}]}));
        let (hosts, found) = (parse("node "), parse("sandbox "));
        let mut runtime = runtime(vec![]);
        runtime.ips.clone_from(&found);
        if found.is_empty() {
            runtime.sandboxes.clear();
        }
        let old = list("before ").map(|ips| PodStatus {
            pod_ips: Some(ips.iter().map(|ip| api::PodIP { ip: (*ip).to_owned() }).collect()),
            ..PodStatus::default()
        });
        let are_own = fields.contains(&"own");
        let node = NodeAddresses { host_ips: hosts.clone(), are_own };
        let inputs = Inputs::new(&pod, &runtime, &node, timestamp(200));
        let status = compose(&Inputs { old: old.as_ref(), ..inputs });
        let shown: Vec<String> = status.pod_ips.into_iter().flatten().map(|ip| ip.ip).collect();
        assert_eq!(status.pod_ip.as_ref(), shown.first());
        assert_eq!(status.host_ip, hosts.first().map(IpAddr::to_string));
        let used =
            pod_ips(&pod, &found, old.as_ref(), &node).iter().map(IpAddr::to_string).collect::<Vec<_>>();
        let join = |ips: &[String]| if ips.is_empty() { "none".to_owned() } else { ips.join(" ") };
        let used = if used == shown { String::new() } else { format!(" (pod_ips: {})", join(&used)) };
        join(&shown) + &used
    };
    table(outcome).check(expect![[r#"
        pod network; node 192.0.2.1; sandbox fd00::5 10.0.0.5               -> 10.0.0.5 fd00::5
        pod network; node fd00::1; sandbox 10.0.0.5 fd00::5 10.0.0.6        -> fd00::5 10.0.0.5
        pod network; sandbox fd00::5 10.0.0.5                               -> 10.0.0.5 fd00::5
        pod network; sandbox 10.0.0.5; before 10.0.0.4                      -> 10.0.0.5
        pod network; before 10.0.0.4                                        -> 10.0.0.4 (pod_ips: none)
        host network; node 192.0.2.1; sandbox 10.0.0.5                      -> 192.0.2.1
        host network; node 192.0.2.1 fd00::1                                -> 192.0.2.1 fd00::1
        host network; node 192.0.2.1 fd00::1; before 192.0.2.1              -> 192.0.2.1 fd00::1
        host network; node 192.0.2.2; before 192.0.2.1                      -> 192.0.2.1
        host network; node 192.0.2.2; sandbox 10.0.0.5; before 192.0.2.1    -> 192.0.2.1
        host network; node 192.0.2.2; before rubbish                        -> rubbish (pod_ips: none)
        host network                                                        -> none
        host network; own; node 192.0.2.2; before 192.0.2.1                 -> 192.0.2.2
        host network; own; node 192.0.2.2 fd00::2; before 192.0.2.1 fd00::1 -> 192.0.2.2 fd00::2
        host network; own; node 192.0.2.1 fd00::2; before 192.0.2.1         -> 192.0.2.1 fd00::2
        host network; own; node fd00::2; before 192.0.2.1                   -> fd00::2
        host network; own; before 192.0.2.1                                 -> 192.0.2.1
    "#]]);
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
        assert_eq!(render_phase(&status), "Failed (Evicted): m", "{old:?}");
    }
}

#[test]
fn conditions_of_other_writers_at_the_api_server_stay() {
    let shown = json!({"phase": "Pending", "conditions": [{"type": "x/y", "status": "Unknown"},
        {"type": "Ready", "status": "True"}]});
    let pod = shown_pod(json!({"containers": [{"name": "c"}]}), shown);
    let (runtime, node) = (runtime(vec![]), NodeAddresses::default());
    let mut status = compose(&Inputs::new(&pod, &runtime, &node, timestamp(5)));
    let all = |status: &PodStatus| render_conditions(status, &[""]).replace("; ", "\n") + "\n";
    expect![[r#"
        x/y=Unknown
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False (ContainersNotReady): containers with unready status: [c]
        ContainersReady=False (ContainersNotReady): containers with unready status: [c]
        PodScheduled=True
    "#]]
    .assert_eq(&all(&status));
    assert_eq!(status.observed_generation, Some(2));
    let generations =
        status.conditions.iter().flatten().skip(1).map(|condition| condition.observed_generation);
    assert!(generations.into_iter().all(|generation| generation == Some(2)));
    // The condition that the agent set when it decided to end the pod stays.
    disrupt(&pod, &mut status, "why", timestamp(6));
    disrupt(&pod, &mut status, "why", timestamp(7));
    let next = compose(&Inputs { old: Some(&status), ..Inputs::new(&pod, &runtime, &node, timestamp(8)) });
    expect![[r#"
        x/y=Unknown
        DisruptionTarget=True (TerminationByKubelet): why
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False (ContainersNotReady): containers with unready status: [c]
        ContainersReady=False (ContainersNotReady): containers with unready status: [c]
        PodScheduled=True
    "#]]
    .assert_eq(&all(&next));
    let disruption =
        conditions::find(next.conditions.as_deref(), condition_types::DISRUPTION_TARGET).unwrap();
    assert_eq!(disruption.observed_generation, Some(2));
    assert_eq!(disruption.last_transition_time.as_ref().map(|time| time.0), Some(timestamp(6)));
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
    table(|now| {
        let status = compose(&Inputs::new(&pod, &runtime(instances(now)), &node, timestamp(5)));
        let found = conditions::find(status.conditions.as_deref(), "AllContainersRestarting").unwrap();
        assert_eq!(found.observed_generation, None);
        render_conditions(&status, &["AllContainersRestarting"])
    })
    .check(expect![[r#"
        c=Running   -> AllContainersRestarting=False
        c=Exited:42 -> AllContainersRestarting=True (RestartAllContainersStarted): container exited with restart policy rule
        c=Exited:1  -> AllContainersRestarting=False (PodFailed)
        c=Exited:0  -> AllContainersRestarting=False (PodCompleted)
    "#]]);
}
