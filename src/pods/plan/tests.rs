//! Each check has a pod, the state of its containers, and the expected plan.

use serde_json::{Value, json};

use super::*;
use crate::model::api;
use crate::model::runtime::{ContainerStatus, SandboxState, SandboxStatus};

const IMAGE: &str = "localhost/busybox:1";

pub(super) fn pod(spec: Value) -> Pod {
    let mut spec = spec;
    for list in ["containers", "initContainers"] {
        for container in spec[list].as_array_mut().into_iter().flatten() {
            container["image"] = json!(IMAGE);
        }
    }
    Pod::from(serde_json::from_value::<api::Pod>(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap())
}

pub(super) fn sandbox(attempt: u32, state: SandboxState) -> SandboxStatus {
    SandboxStatus {
        id: format!("s{attempt}").as_str().into(),
        attempt,
        state,
        created_at: None,
        host_network: false,
        network_reported: true,
        ips: vec!["10.0.0.1".parse().unwrap()],
    }
}

/// `c=Running`, `c=Exited:3`, `c=Running#old` (another hash), `c=Exited@s0` (another sandbox).
pub(super) fn instance(text: &str) -> ContainerStatus {
    let (text, sandbox) = text.split_once('@').unwrap_or((text, "s1"));
    let (text, stale) = text.split_once('#').map_or((text, false), |(text, _)| (text, true));
    let (text, code) = text.split_once(':').unwrap_or((text, "0"));
    let (name, state) = text.split_once('=').unwrap();
    ContainerStatus {
        exit_code: code.parse().unwrap(),
        image: IMAGE.to_owned(),
        image_id: "sha256:1".into(),
        hash: Some(container_hash(name, IMAGE) ^ u32::from(stale)),
        sandbox_id: sandbox.into(),
        ..ContainerStatus::blank(
            name,
            name,
            match state {
                "Created" => ContainerState::Created,
                "Running" => ContainerState::Running,
                "Exited" => ContainerState::Exited,
                _ => ContainerState::Unknown,
            },
        )
    }
}

fn runtime(sandboxes: Vec<SandboxStatus>, instances: &str) -> PodRuntime {
    let containers = instances.split_whitespace().map(instance).collect();
    PodRuntime { sandboxes, containers, ..PodRuntime::default() }
}

pub(super) fn ready(instances: &str) -> PodRuntime {
    runtime(vec![sandbox(1, SandboxState::Ready)], instances)
}

/// A plan in short: `pod sandbox! kill=[c:LivenessProbe] init=[0] start=[0, 1]`.
pub(super) fn short(plan: &Plan) -> String {
    let mut words = Vec::new();
    if plan.kill_pod {
        words.push("pod".to_owned());
    }
    if plan.create_sandbox {
        let mark = if plan.sandbox_changed { "!" } else { "" };
        words.push(format!("sandbox{mark}{}", plan.attempt));
    }
    if !plan.kill.is_empty() {
        let kills: Vec<_> = plan.kill.iter().map(|kill| format!("{}:{:?}", kill.name, kill.reason)).collect();
        words.push(format!("kill=[{}]", kills.join(" ")));
    }
    if !plan.reset.is_empty() {
        let describe = |reset: &Reset| {
            let (stop, trigger) = (if reset.stop { "-" } else { "" }, if reset.trigger { "!" } else { "" });
            format!("{stop}{}{trigger}", reset.id)
        };
        words.push(format!("reset=[{}]", plan.reset.iter().map(describe).collect::<Vec<_>>().join(" ")));
    }
    if !plan.resize.is_empty() {
        let describe = |resize: &Resize| format!("{}:{:?}", resize.name, resize.resource);
        words.push(format!("resize=[{}]", plan.resize.iter().map(describe).collect::<Vec<_>>().join(" ")));
    }
    let lists = [("ephemeral", &plan.start_ephemeral), ("init", &plan.start_init), ("start", &plan.start)];
    for (word, list) in lists {
        if !list.is_empty() {
            words.push(format!("{word}={list:?}"));
        }
    }
    assert_eq!(words.is_empty(), plan.is_empty());
    words.join(" ")
}

fn plan_of(pod: &Pod, runtime: &PodRuntime, liveness: &str, startup: &str) -> Plan {
    // `c+` succeeded, `c-` failed; nothing: no verdict yet.
    let verdict = |table: &str, id: &ContainerId| {
        if table.contains(&format!("{id}+")) {
            Verdict::Success
        } else if table.contains(&format!("{id}-")) {
            Verdict::Failure
        } else {
            Verdict::Pending
        }
    };
    compute(&Inputs {
        pod,
        runtime,
        liveness: &|id| verdict(liveness, id),
        startup: &|id| verdict(startup, id),
        reset_held: false,
    })
}

fn check(spec: Value, runtime: PodRuntime, expected: &str) {
    check_probed(spec, runtime, ("", ""), expected);
}

fn check_probed(spec: Value, runtime: PodRuntime, probes: (&str, &str), expected: &str) {
    let pod = pod(spec);
    let plan = plan_of(&pod, &runtime, probes.0, probes.1);
    let states: Vec<_> = runtime
        .containers
        .iter()
        .map(|container| format!("{}={:?}", container.name, container.state))
        .collect();
    assert_eq!(short(&plan), expected, "{} {:?} {states:?}", pod.restart_policy(), probes);
}

fn single_container(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "c"}]})
}

#[test]
fn sandbox_is_needed_if_missing_dead_or_unsuitable() {
    let with = |change: fn(&mut SandboxStatus)| {
        let mut newest = sandbox(3, SandboxState::Ready);
        change(&mut newest);
        runtime(vec![newest], "")
    };
    let check = |spec: Value, runtime: PodRuntime, needed, attempt, replaces: Option<&str>| {
        let found = check_sandbox(&pod(spec), &runtime);
        assert_eq!((found.needed(), found.attempt), (needed, attempt));
        assert_eq!(found.replaces.as_ref().map(SandboxId::as_str), replaces);
    };
    let host = json!({"hostNetwork": true, "containers": [{"name": "c"}]});
    check(single_container("Always"), runtime(vec![], ""), true, 0, None);
    check(single_container("Always"), with(|_| {}), false, 3, Some("s3"));
    check(
        single_container("Always"),
        with(|sandbox| sandbox.state = SandboxState::NotReady),
        true,
        4,
        Some("s3"),
    );
    check(host.clone(), with(|_| {}), true, 4, None);
    check(host.clone(), with(|sandbox| sandbox.host_network = true), false, 3, Some("s3"));
    check(single_container("Always"), with(|sandbox| sandbox.host_network = true), true, 4, None);
    check(single_container("Always"), with(|sandbox| sandbox.ips.clear()), true, 4, Some("s3"));
    let silent = |sandbox: &mut SandboxStatus| {
        sandbox.ips.clear();
        sandbox.network_reported = false;
    };
    check(single_container("Always"), with(silent), false, 3, Some("s3"));
    let no_address = |sandbox: &mut SandboxStatus| {
        sandbox.ips.clear();
        sandbox.host_network = true;
    };
    check(host, with(no_address), false, 3, Some("s3"));
    let two = vec![sandbox(3, SandboxState::Ready), sandbox(2, SandboxState::Ready)];
    check(single_container("Always"), runtime(two, ""), true, 4, Some("s3"));
    let one_ready = vec![sandbox(3, SandboxState::Ready), sandbox(2, SandboxState::NotReady)];
    check(single_container("Always"), runtime(one_ready, ""), false, 3, Some("s3"));
}

/// Go: pkg/kubelet/types `PodSandboxNotReadyMsg…`.
#[test]
fn need_of_a_sandbox_is_explained_in_the_words_of_upstream() {
    let problem =
        |sandboxes| check_sandbox(&pod(single_container("Always")), &runtime(sandboxes, "")).problem;
    let with = |change: fn(&mut SandboxStatus)| {
        let mut newest = sandbox(3, SandboxState::Ready);
        change(&mut newest);
        problem(vec![newest])
    };
    assert_eq!(problem(vec![]), Some("no pod sandbox exists"));
    assert_eq!(
        problem(vec![sandbox(3, SandboxState::Ready), sandbox(2, SandboxState::Ready)]),
        Some("multiple pod sandboxes are ready and need to be reconciled")
    );
    assert_eq!(with(|newest| newest.state = SandboxState::NotReady), Some("pod sandbox is not ready"));
    assert_eq!(
        with(|newest| newest.host_network = true),
        Some("network namespace mode changed and sandbox needs to be recreated")
    );
    assert_eq!(with(|newest| newest.ips.clear()), Some("pod sandbox has no IP address"));
    assert_eq!(with(|_| {}), None);
}

#[test]
fn new_sandbox_starts_only_containers_that_must_run_again() {
    let gone = |instances| runtime(vec![sandbox(0, SandboxState::NotReady)], instances);
    let init = json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}, {"name": "j"}]});
    check(single_container("Always"), runtime(vec![], ""), "pod sandbox0 start=[0]");
    check(single_container("Always"), gone("c=Exited:1"), "pod sandbox!1 start=[0]");
    check(init.clone(), runtime(vec![], ""), "pod sandbox0 init=[0]");
    check(init, gone("c=Exited i=Exited j=Exited"), "pod sandbox!1 init=[0]");
    // With policy Never no second sandbox is made once there were containers.
    check(single_container("Never"), runtime(vec![], ""), "pod sandbox0 start=[0]");
    check(single_container("Never"), gone(""), "pod sandbox!1 start=[0]");
    check(single_container("Never"), gone("c=Exited:1"), "pod");
    // With OnFailure only failed containers start again; if there is none, no sandbox is made.
    let two = json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}, {"name": "b"}]});
    check(two.clone(), gone("a=Exited b=Exited:1"), "pod sandbox!1 start=[1]");
    check(two, gone("a=Exited b=Exited"), "pod");
    // The container's own policy wins over the pod's.
    let own = json!({"containers": [{"name": "a", "restartPolicy": "OnFailure"}, {"name": "b"}]});
    check(own, gone("a=Exited b=Exited"), "pod sandbox!1 start=[1]");
    // A changed network mode is no failure of the sandbox.
    let host = json!({"hostNetwork": true, "containers": [{"name": "c"}]});
    check(host, ready("c=Running"), "pod sandbox2 start=[0]");
}

#[test]
fn regular_container_restarts_by_state_probes_and_policy() {
    for policy in ["Always", "OnFailure", "Never"] {
        check(single_container(policy), ready(""), "start=[0]");
        check(single_container(policy), ready("c=Created"), "start=[0]");
        check(single_container(policy), ready("c=Unknown"), "kill=[c:Unknown] start=[0]");
        check(single_container(policy), ready("c=Running"), "");
        check(single_container(policy), ready("c=Running#old"), "kill=[c:DefinitionChanged] start=[0]");
    }
    check(single_container("Always"), ready("c=Exited"), "start=[0]");
    check(single_container("Always"), ready("c=Exited:1"), "start=[0]");
    check(single_container("OnFailure"), ready("c=Exited:1"), "start=[0]");
    // No container is kept or started, so the pod ends.
    check(single_container("OnFailure"), ready("c=Exited"), "pod");
    check(single_container("Never"), ready("c=Exited"), "pod");
    check(single_container("Never"), ready("c=Exited:1"), "pod");
    for (policy, plan) in [("Always", " start=[0]"), ("OnFailure", " start=[0]"), ("Never", "")] {
        // A killed container counts neither as kept nor, under Never, as started.
        let pod = if plan.is_empty() { "pod " } else { "" };
        let expected = |reason: &str| format!("{pod}kill=[c:{reason}]{plan}");
        check_probed(single_container(policy), ready("c=Running"), ("c-", ""), &expected("LivenessProbe"));
        check_probed(single_container(policy), ready("c=Running"), ("", "c-"), &expected("StartupProbe"));
        check_probed(single_container(policy), ready("c=Running"), ("c+", "c+"), "");
    }
    let rules = json!({"restartPolicy": "Never", "containers": [{"name": "c", "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]});
    check(rules.clone(), ready("c=Exited:42"), "start=[0]");
    check(rules, ready("c=Exited:1"), "pod");
    // One container of two is enough to keep the pod.
    let two = json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]});
    check(two.clone(), ready("a=Exited b=Running"), "");
    check(two, ready("a=Exited"), "start=[1]");
}

#[test]
fn container_without_a_readable_hash_keeps_running() {
    let mut runtime = ready("c=Running");
    runtime.containers[0].hash = None;
    check(single_container("Always"), runtime, "");
}

#[test]
fn newest_instance_decides_and_older_running_ones_are_stopped() {
    check(single_container("Always"), ready("c=Running c=Exited:1 c=Unknown"), "");
    // An older instance that runs is stopped.
    let twin = |instances: &str| {
        let mut runtime = ready(instances);
        runtime.containers[1].id = "old".into();
        runtime
    };
    check(single_container("Always"), twin("c=Running c=Running"), "kill=[c:Twin]");
    check(single_container("Always"), twin("c=Exited:1 c=Running"), "kill=[c:Twin] start=[0]");
}

#[test]
fn deleted_pod_starts_no_container() {
    let object = json!({"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "c", "image": IMAGE}]}});
    let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
    assert_eq!(short(&compute(&Inputs::without_probes(&pod, &ready("c=Exited:1")))), "pod");
    assert_eq!(short(&compute(&Inputs::without_probes(&pod, &ready("c=Running")))), "");
}

#[test]
fn ephemeral_containers_start_once() {
    let spec = json!({"containers": [{"name": "c"}], "ephemeralContainers": [{"name": "d"}, {"name": "e"}]});
    check(spec.clone(), ready("c=Running"), "ephemeral=[0, 1]");
    check(spec.clone(), ready("c=Running d=Exited:1"), "ephemeral=[1]");
    check(spec.clone(), ready("c=Running d=Running e=Created"), "");
    // They start before the pod is initialized, too, to debug the initialization.
    let mut slow = spec.clone();
    slow["initContainers"] = json!([{"name": "i"}]);
    check(slow, ready("i=Running"), "ephemeral=[0, 1]");
    // They start neither in a pod that ends nor together with a new sandbox.
    let mut over = spec.clone();
    over["restartPolicy"] = json!("Never");
    check(over, ready("c=Exited d=Running"), "pod");
    check(spec, runtime(vec![], ""), "pod sandbox0 start=[0]");
}

#[test]
fn init_containers_run_in_order_and_are_retried_by_policy() {
    let spec = |policy: &str| {
        json!({"restartPolicy": policy, "containers": [{"name": "c"}],
            "initContainers": [{"name": "i"}, {"name": "j"}]})
    };
    for policy in ["Always", "OnFailure", "Never"] {
        check(spec(policy), ready(""), "init=[0]");
        check(spec(policy), ready("i=Created"), "init=[0]");
        check(spec(policy), ready("i=Running"), "");
        check(spec(policy), ready("i=Exited"), "init=[1]");
        check(spec(policy), ready("i=Exited j=Created"), "init=[1]");
        check(spec(policy), ready("i=Exited j=Running"), "");
        check(spec(policy), ready("i=Exited j=Exited"), "start=[0]");
        // Only the newest init container decides, even if the records of the others were removed.
        check(spec(policy), ready("j=Exited"), "start=[0]");
        // A regular container proves the initialization of its own sandbox.
        check(spec(policy), ready("c=Running"), "");
        for old in ["c=Created@s0", "c=Running@s0", "c=Exited:1@s0"] {
            check(spec(policy), ready(old), "init=[0]");
        }
    }
    // It may have ended, and the records of the init containers may have been removed.
    for policy in ["Always", "OnFailure"] {
        check(spec(policy), ready("c=Exited:1"), "start=[0]");
        check(spec(policy), ready("c=Created"), "start=[0]");
    }
    for policy in ["Always", "OnFailure"] {
        check(spec(policy), ready("i=Exited:1"), "init=[0]");
        check(spec(policy), ready("i=Exited j=Exited:1"), "init=[1]");
        check(spec(policy), ready("i=Unknown"), "kill=[i:Unknown] init=[0]");
    }
    check(spec("Never"), ready("i=Exited:1"), "pod");
    check(spec("Never"), ready("i=Unknown"), "pod");
    // Out of memory is a failure with any exit code.
    let mut oom = ready("i=Exited");
    oom.containers[0].reason = "OOMKilled".to_owned();
    check(spec("Always"), oom.clone(), "init=[0]");
    check(spec("OnFailure"), oom.clone(), "init=[0]");
    check(spec("Never"), oom, "pod");
    // Instances of a removed sandbox do not count.
    check(spec("Always"), ready("i=Exited@s0 j=Exited@s0"), "init=[0]");
}

fn sidecars() -> Value {
    json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "s", "restartPolicy": "Always",
         "startupProbe": {"exec": {"command": ["true"]}}, "livenessProbe": {"exec": {"command": ["true"]}}},
        {"name": "t", "restartPolicy": "Always"}]})
}

#[test]
fn sidecars_start_in_order_and_restart_during_initialization() {
    check(sidecars(), ready(""), "init=[0]");
    check(sidecars(), ready("s=Created"), "init=[0]");
    check(sidecars(), ready("s=Running"), "");
    check_probed(sidecars(), ready("s=Running"), ("", "s-"), "kill=[s:StartupProbe] init=[0]");
    check_probed(sidecars(), ready("s=Running"), ("", "s+"), "init=[1]");
    // Liveness neither waits nor delays successors.
    check_probed(sidecars(), ready("s=Running"), ("s-", "s+"), "kill=[s:LivenessProbe] init=[0, 1]");
    check_probed(sidecars(), ready("s=Running#old"), ("", "s+"), "kill=[s:DefinitionChanged] init=[0]");
    check(sidecars(), ready("s=Exited"), "init=[0]");
    check(sidecars(), ready("s=Exited:1"), "init=[0]");
    check(sidecars(), ready("s=Unknown"), "kill=[s:Unknown] init=[0]");
    // For the last sidecar, which has no startup probe, running is enough.
    check(sidecars(), ready("s=Running t=Running"), "start=[0]");
    check(sidecars(), ready("s=Running t=Exited"), "init=[1]");
    let mixed = json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "s", "restartPolicy": "Always"}, {"name": "i"}]});
    check(mixed.clone(), ready("s=Running"), "init=[1]");
    check(mixed.clone(), ready("s=Running i=Running"), "");
    check(mixed, ready("s=Running i=Exited"), "start=[0]");
}

#[test]
fn earlier_sidecars_keep_running_during_initialization() {
    let probe = || json!({"exec": {"command": ["true"]}});
    let spec = |policy: &str| {
        json!({"restartPolicy": policy, "containers": [{"name": "c"}], "initContainers": [
            {"name": "s", "restartPolicy": "Always", "startupProbe": probe(), "livenessProbe": probe()},
            {"name": "h"}, {"name": "t", "restartPolicy": "Always"}, {"name": "i"}]})
    };
    for policy in ["Always", "OnFailure", "Never"] {
        let check = |instances: &str, probes: (&str, &str), expected: &str| {
            check_probed(spec(policy), ready(instances), probes, expected);
        };
        let nothing = ("", "");
        // The newest init container may run, be done, have a running successor, or be created.
        check("s=Exited h=Running", nothing, "init=[0]");
        check("s=Exited h=Exited", nothing, "init=[0, 2]");
        check("s=Exited:1 h=Exited t=Exited:1 i=Running", nothing, "init=[0, 2]");
        check("s=Exited h=Exited t=Running i=Exited", nothing, "init=[0] start=[0]");
        check("s=Exited h=Exited t=Exited i=Created", nothing, "init=[0, 2, 3]");
        check("s=Created h=Running", nothing, "init=[0]");
        check("h=Running", nothing, "init=[0]");
        check("s=Unknown h=Running", nothing, "kill=[s:Unknown] init=[0]");
        check("s=Running#old h=Running", nothing, "kill=[s:DefinitionChanged] init=[0]");
        check("s=Running h=Running", ("", "s-"), "kill=[s:StartupProbe] init=[0]");
        check("s=Running h=Running", ("s-", "s+"), "kill=[s:LivenessProbe] init=[0]");
        check("s=Running#old h=Exited t=Exited", nothing, "kill=[s:DefinitionChanged] init=[0, 2]");
        // A sidecar that starts again does not delay later containers.
        check("s=Running h=Exited", nothing, "init=[2]");
        check("s=Running h=Running", nothing, "");
        check("s=Running h=Exited t=Running i=Running", ("", "s+"), "");
    }
    for policy in ["Always", "OnFailure"] {
        check(spec(policy), ready("s=Exited h=Exited:1"), "init=[0, 1]");
        check(spec(policy), ready("s=Exited h=Unknown"), "kill=[h:Unknown] init=[0, 1]");
    }
    // The pod ends, so no container is started.
    check(spec("Never"), ready("s=Exited h=Exited:1"), "pod");
    check(spec("Never"), ready("s=Running#old h=Exited:1"), "pod");
}

#[test]
fn sidecars_restart_after_initialization_until_the_pod_ends() {
    check(sidecars(), ready("c=Running s=Running t=Running"), "");
    check(sidecars(), ready("c=Running"), "init=[0, 1]");
    check(sidecars(), ready("c=Running s=Created t=Running"), "init=[0]");
    check(sidecars(), ready("c=Running s=Exited t=Exited:1"), "init=[0, 1]");
    check(sidecars(), ready("c=Running s=Unknown t=Running"), "kill=[s:Unknown] init=[0]");
    check(sidecars(), ready("c=Running s=Running#old t=Running"), "kill=[s:DefinitionChanged] init=[0]");
    let both = || ready("c=Running s=Running t=Running");
    check_probed(sidecars(), both(), ("s-", "s+"), "kill=[s:LivenessProbe] init=[0]");
    check_probed(sidecars(), both(), ("", "s-"), "kill=[s:StartupProbe] init=[0]");
    check_probed(sidecars(), both(), ("t-", "t-"), "");
    // A created regular container counts as initialized.
    check(sidecars(), ready("c=Created s=Running t=Running"), "start=[0]");
    // Ordinary init containers are not inspected any more.
    let mixed = json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "i"}, {"name": "s", "restartPolicy": "Always"}]});
    check(mixed.clone(), ready("c=Running i=Exited:1 s=Running"), "");
    check(mixed.clone(), ready("c=Running i=Unknown s=Exited"), "init=[1]");
    check(mixed, ready("c=Running s=Running"), "");
    // Sidecars do not keep a finished pod running, and do not start again in it.
    let mut done = sidecars();
    done["restartPolicy"] = json!("Never");
    check(done.clone(), ready("c=Exited s=Running t=Running"), "pod");
    check(done, ready("c=Exited s=Exited t=Running"), "pod");
}

#[test]
fn killing_event_has_upstreams_message_for_each_reason() {
    let message = |spec: Value, instances: &str, probes: (&str, &str)| {
        let plan = plan_of(&pod(spec), &ready(instances), probes.0, probes.1);
        plan.kill.first().map(|kill| kill.message.clone()).unwrap_or_default()
    };
    for (policy, instances, probes, expected) in [
        ("Always", "c=Running#x", ("", ""), "Container c definition changed, will be restarted"),
        ("Never", "c=Running#x", ("", ""), "Container c definition changed, will be restarted"),
        ("Always", "c=Running", ("c-", ""), "Container c failed liveness probe, will be restarted"),
        ("Never", "c=Running", ("c-", ""), "Container c failed liveness probe"),
        ("Always", "c=Running", ("", "c-"), "Container c failed startup probe, will be restarted"),
        ("Never", "c=Unknown", ("", ""), "Container is in \"unknown\" state, try killing it before restart"),
    ] {
        assert_eq!(message(single_container(policy), instances, probes), expected);
    }
    for (instances, probes, expected) in [
        ("s=Running#x", ("", ""), "Init container s definition changed"),
        ("s=Running", ("s-", "s+"), "Init container s failed liveness probe"),
        ("s=Running", ("", "s-"), "Init container s failed startup probe"),
        ("s=Unknown", ("", ""), "Init container is in \"unknown\" state, try killing it before restart"),
    ] {
        assert_eq!(message(sidecars(), instances, probes), expected);
    }
}
