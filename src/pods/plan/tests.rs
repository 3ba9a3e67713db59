//! Tables of the states of a pod's containers, each with its plan in words.

use expect_test::expect;
use serde_json::{Value, json};

use super::*;
use crate::model::api;
use crate::model::runtime::{ContainerStatus, SandboxState, SandboxStatus};
use crate::util::testing::{Table, table, table_of_policies};

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

/// `c=Running`, `c=Exited:3`, `c=OOMKilled` (its exit code is 0), `c=Running#old` (another hash),
/// `c=Exited@s0` (another sandbox).
pub(super) fn instance(text: &str) -> ContainerStatus {
    let (text, sandbox) = text.split_once('@').unwrap_or((text, "s1"));
    let (text, stale) = text.split_once('#').map_or((text, false), |(text, _)| (text, true));
    let (text, code) = text.split_once(':').unwrap_or((text, "0"));
    let (name, state) = text.split_once('=').unwrap();
    ContainerStatus {
        exit_code: code.parse().unwrap(),
        reason: if state == "OOMKilled" { state.to_owned() } else { String::new() },
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
                "Exited" | "OOMKilled" => ContainerState::Exited,
                _ => ContainerState::Unknown,
            },
        )
    }
}

/// A pod with these instances in a sandbox that is ready. Before them, `sandbox=none` and
/// `sandbox=NotReady` (the first one) may stand.
pub(super) fn ready(instances: &str) -> PodRuntime {
    let mut words = instances.split_whitespace().peekable();
    let sandboxes = match words.next_if(|word| word.starts_with("sandbox=")) {
        None => vec![sandbox(1, SandboxState::Ready)],
        Some("sandbox=none") => Vec::new(),
        Some(_) => vec![sandbox(0, SandboxState::NotReady)],
    };
    PodRuntime { sandboxes, containers: words.map(instance).collect(), ..PodRuntime::default() }
}

/// A plan in words, in the order of its fields.
pub(super) fn render(pod: &Pod, plan: &Plan) -> String {
    let mut words = Vec::new();
    if plan.kill_pod {
        words.push("stop the pod".to_owned());
    }
    if plan.create_sandbox {
        let what = if plan.sandbox_changed { "replace the sandbox" } else { "make a sandbox" };
        words.push(format!("{what} (attempt {})", plan.attempt));
    }
    words.extend(plan.kill.iter().map(|kill| format!("stop {} ({:?})", kill.name, kill.reason)));
    words.extend(plan.reset.iter().map(|reset| {
        let stop = if reset.stop { "stop and " } else { "" };
        let trigger = if reset.trigger { " (trigger)" } else { "" };
        format!("{stop}remove {}{trigger}", reset.id)
    }));
    words.extend(plan.resize.iter().map(|resize| format!("resize {} ({:?})", resize.name, resize.resource)));
    if plan.resize_pod {
        words.push("resize the pod".to_owned());
    }
    let ephemeral = pod.spec().ephemeral_containers.as_deref().unwrap_or_default();
    let ephemeral = plan.start_ephemeral.iter().map(|index| &ephemeral[*index].name);
    let init = plan.start_init.iter().map(|index| &pod.init_containers()[*index].name);
    let regular = plan.start.iter().map(|index| &pod.containers()[*index].name);
    words.extend(ephemeral.chain(init).chain(regular).map(|name| format!("start {name}")));
    assert_eq!(words.is_empty(), plan.is_empty());
    if words.is_empty() { "nothing".to_owned() } else { words.join(", ") }
}

/// The plan for a case: the instances as in [`ready`], and after a bar the verdicts of probes that are
/// known, `s=Running | startup:s=Success liveness:s=Failure`.
fn plan_of(pod: &Pod, case: &str) -> Plan {
    let (instances, probes) = case.split_once(" | ").unwrap_or((case, ""));
    let verdict = |kind: &str, id: &ContainerId| {
        let key = format!("{kind}:{id}=");
        match probes.split_whitespace().find_map(|word| word.strip_prefix(&key)) {
            Some("Success") => ProbeVerdict::Success,
            Some("Failure") => ProbeVerdict::Failure,
            _ => ProbeVerdict::Pending,
        }
    };
    compute(&Inputs {
        pod,
        runtime: &ready(instances),
        liveness: &|id| verdict("liveness", id),
        startup: &|id| verdict("startup", id),
        reset_held: false,
    })
}

/// The plans of cases.
pub(super) fn plans(spec: &Value) -> Table<impl Fn(&str) -> String> {
    let pod = pod(spec.clone());
    table(move |case| render(&pod, &plan_of(&pod, case)))
}

/// As [`plans`], for each restart policy of the pod.
fn plans_of_policies(spec: &Value) -> Table<impl Fn(&str) -> String> {
    table_of_policies(move |policy, case| {
        let mut spec = spec.clone();
        spec["restartPolicy"] = json!(policy);
        let pod = pod(spec);
        render(&pod, &plan_of(&pod, case))
    })
}

fn single_container(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "c"}]})
}

/// A need is explained in the words of upstream (Go: pkg/kubelet/types `PodSandboxNotReadyMsg…`).
#[test]
fn sandbox_is_needed_if_missing_dead_or_unsuitable() {
    let row = |case: &str, host_network: bool, sandboxes: Vec<SandboxStatus>| {
        let pod = pod(json!({"hostNetwork": host_network, "containers": [{"name": "c"}]}));
        let found = check_sandbox(&pod, &PodRuntime { sandboxes, ..PodRuntime::default() });
        let problem = found.problem.map_or("suitable".to_owned(), |problem| format!("needed: {problem}"));
        let replaces = found.replaces.as_ref().map_or("none", SandboxId::as_str);
        format!("{case:<25} attempt {}, replaces {replaces}, {problem}\n", found.attempt)
    };
    let with = |change: fn(&mut SandboxStatus)| {
        let mut newest = sandbox(3, SandboxState::Ready);
        change(&mut newest);
        vec![newest]
    };
    let and = |state| vec![sandbox(3, SandboxState::Ready), sandbox(2, state)];
    let rows = [
        row("none", false, vec![]),
        row("ready", false, with(|_| {})),
        row("not ready", false, with(|newest| newest.state = SandboxState::NotReady)),
        row("host network, without", true, with(|_| {})),
        row("host network, with", true, with(|newest| newest.host_network = true)),
        row("pod network, with host's", false, with(|newest| newest.host_network = true)),
        row("no address", false, with(|newest| newest.ips.clear())),
        row(
            "network is not reported",
            false,
            with(|newest| {
                newest.ips.clear();
                newest.network_reported = false;
            }),
        ),
        row(
            "host network, no address",
            true,
            with(|newest| {
                newest.ips.clear();
                newest.host_network = true;
            }),
        ),
        row("two ready", false, and(SandboxState::Ready)),
        row("one of two ready", false, and(SandboxState::NotReady)),
    ];
    expect![[r#"
        none                      attempt 0, replaces none, needed: no pod sandbox exists
        ready                     attempt 3, replaces s3, suitable
        not ready                 attempt 4, replaces s3, needed: pod sandbox is not ready
        host network, without     attempt 4, replaces none, needed: network namespace mode changed and sandbox needs to be recreated
        host network, with        attempt 3, replaces s3, suitable
        pod network, with host's  attempt 4, replaces none, needed: network namespace mode changed and sandbox needs to be recreated
        no address                attempt 4, replaces s3, needed: pod sandbox has no IP address
        network is not reported   attempt 3, replaces s3, suitable
        host network, no address  attempt 3, replaces s3, suitable
        two ready                 attempt 4, replaces s3, needed: multiple pod sandboxes are ready and need to be reconciled
        one of two ready          attempt 3, replaces s3, suitable
    "#]]
    .assert_eq(&rows.concat());
}

#[test]
fn new_sandbox_starts_only_containers_that_must_run_again() {
    // With policy Never no second sandbox is made once there were containers.
    plans_of_policies(&json!({"containers": [{"name": "c"}]})).check(expect![[r#"
        sandbox=none                -> stop the pod, make a sandbox (attempt 0), start c
        sandbox=NotReady            -> stop the pod, replace the sandbox (attempt 1), start c
        sandbox=NotReady c=Exited:1 -> Always, OnFailure: stop the pod, replace the sandbox (attempt 1), start c; Never: stop the pod
    "#]]);
    let init = json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}, {"name": "j"}]});
    plans(&init).check(expect![[r#"
        sandbox=none                                -> stop the pod, make a sandbox (attempt 0), start i
        sandbox=NotReady c=Exited i=Exited j=Exited -> stop the pod, replace the sandbox (attempt 1), start i
    "#]]);
    // With OnFailure only failed containers start again; if there is none, no sandbox is made.
    let two = json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}, {"name": "b"}]});
    plans(&two).check(expect![[r#"
        sandbox=NotReady a=Exited b=Exited:1 -> stop the pod, replace the sandbox (attempt 1), start b
        sandbox=NotReady a=Exited b=Exited   -> stop the pod
    "#]]);
    // The container's own policy wins over the pod's.
    let own = json!({"containers": [{"name": "a", "restartPolicy": "OnFailure"}, {"name": "b"}]});
    plans(&own).check(expect![[r#"
        sandbox=NotReady a=Exited b=Exited -> stop the pod, replace the sandbox (attempt 1), start b
    "#]]);
    // A changed network mode is no failure of the sandbox.
    plans(&json!({"hostNetwork": true, "containers": [{"name": "c"}]})).check(expect![[r#"
        c=Running -> stop the pod, make a sandbox (attempt 2), start c
    "#]]);
}

#[test]
fn regular_container_restarts_by_state_probes_and_policy() {
    plans_of_policies(&json!({"containers": [{"name": "c"}]})).check(expect![[r#"
        none                                             -> start c
        c=Created                                        -> start c
        c=Unknown                                        -> stop c (Unknown), start c
        c=Running                                        -> nothing
        c=Running#old                                    -> stop c (DefinitionChanged), start c
        # If no container is kept or started, the pod ends.
        c=Exited                                         -> Always: start c; OnFailure, Never: stop the pod
        c=Exited:1                                       -> Always, OnFailure: start c; Never: stop the pod
        # A killed container counts neither as kept nor, under Never, as started.
        c=Running | liveness:c=Failure                   -> Always, OnFailure: stop c (LivenessProbe), start c; Never: stop the pod, stop c (LivenessProbe)
        c=Running | startup:c=Failure                    -> Always, OnFailure: stop c (StartupProbe), start c; Never: stop the pod, stop c (StartupProbe)
        c=Running | liveness:c=Success startup:c=Success -> nothing
    "#]]);
    let rules = json!({"restartPolicy": "Never", "containers": [{"name": "c", "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]});
    plans(&rules).check(expect![[r#"
        c=Exited:42 -> start c
        c=Exited:1  -> stop the pod
    "#]]);
    // One container of two is enough to keep the pod.
    let two = json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]});
    plans(&two).check(expect![[r#"
        a=Exited b=Running -> nothing
        a=Exited           -> start b
    "#]]);
}

#[test]
fn container_without_a_readable_hash_keeps_running() {
    let (pod, mut runtime) = (pod(single_container("Always")), ready("c=Running"));
    runtime.containers[0].hash = None;
    assert_eq!(render(&pod, &compute(&Inputs::without_probes(&pod, &runtime))), "nothing");
}

#[test]
fn newest_instance_decides_and_older_running_ones_are_stopped() {
    let pod = pod(single_container("Always"));
    let outcome = |instances: &str| {
        let mut runtime = ready(instances);
        runtime.containers[1].id = "old".into();
        render(&pod, &compute(&Inputs::without_probes(&pod, &runtime)))
    };
    table(outcome).check(expect![[r#"
        c=Running c=Exited:1 c=Unknown -> nothing
        c=Running c=Running            -> stop c (Twin)
        c=Exited:1 c=Running           -> stop c (Twin), start c
    "#]]);
}

#[test]
fn deleted_pod_starts_no_container() {
    let object = json!({"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "c", "image": IMAGE}]}});
    let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
    assert_eq!(render(&pod, &plan_of(&pod, "c=Exited:1")), "stop the pod");
    assert_eq!(render(&pod, &plan_of(&pod, "c=Running")), "nothing");
}

#[test]
fn ephemeral_containers_start_once() {
    let spec = json!({"containers": [{"name": "c"}], "ephemeralContainers": [{"name": "d"}, {"name": "e"}]});
    plans(&spec).check(expect![[r#"
        c=Running                     -> start d, start e
        c=Running d=Exited:1          -> start e
        c=Running d=Running e=Created -> nothing
        # They do not start together with a new sandbox.
        sandbox=none                  -> stop the pod, make a sandbox (attempt 0), start c
    "#]]);
    // They start before the pod is initialized, too, to debug the initialization.
    let mut slow = spec.clone();
    slow["initContainers"] = json!([{"name": "i"}]);
    plans(&slow).check(expect![[r#"
        i=Running -> start d, start e
    "#]]);
    // They do not start in a pod that ends.
    let mut over = spec;
    over["restartPolicy"] = json!("Never");
    plans(&over).check(expect![[r#"
        c=Exited d=Running -> stop the pod
    "#]]);
}

#[test]
fn init_containers_run_in_order_and_are_retried_by_policy() {
    let spec = json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}, {"name": "j"}]});
    plans_of_policies(&spec).check(expect![[r#"
        none                    -> start i
        i=Created               -> start i
        i=Running               -> nothing
        i=Exited                -> start j
        i=Exited j=Created      -> start j
        i=Exited j=Running      -> nothing
        i=Exited j=Exited       -> start c
        i=Exited:1              -> Always, OnFailure: start i; Never: stop the pod
        i=Exited j=Exited:1     -> Always, OnFailure: start j; Never: stop the pod
        i=Unknown               -> Always, OnFailure: stop i (Unknown), start i; Never: stop the pod
        # Out of memory is a failure with any exit code.
        i=OOMKilled             -> Always, OnFailure: start i; Never: stop the pod
        # Only the newest init container decides, even if the records of the others were removed.
        j=Exited                -> start c
        # A regular container, even one that has ended, proves the initialization.
        c=Running               -> nothing
        c=Created               -> start c
        c=Exited:1              -> Always, OnFailure: start c; Never: stop the pod
        # Instances of a removed sandbox do not count.
        c=Created@s0            -> start i
        c=Running@s0            -> start i
        c=Exited:1@s0           -> start i
        i=Exited@s0 j=Exited@s0 -> start i
    "#]]);
}

fn sidecars() -> Value {
    json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "s", "restartPolicy": "Always",
         "startupProbe": {"exec": {"command": ["true"]}}, "livenessProbe": {"exec": {"command": ["true"]}}},
        {"name": "t", "restartPolicy": "Always"}]})
}

#[test]
fn sidecars_start_in_order_and_restart_during_initialization() {
    plans(&sidecars()).check(expect![[r#"
        none                                             -> start s
        s=Created                                        -> start s
        s=Running                                        -> nothing
        s=Running | startup:s=Failure                    -> stop s (StartupProbe), start s
        s=Running | startup:s=Success                    -> start t
        # Liveness neither waits nor delays successors.
        s=Running | liveness:s=Failure startup:s=Success -> stop s (LivenessProbe), start s, start t
        s=Running#old | startup:s=Success                -> stop s (DefinitionChanged), start s
        s=Exited                                         -> start s
        s=Exited:1                                       -> start s
        s=Unknown                                        -> stop s (Unknown), start s
        # For the last sidecar, which has no startup probe, running is enough.
        s=Running t=Running                              -> start c
        s=Running t=Exited                               -> start t
    "#]]);
    let mixed = json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "s", "restartPolicy": "Always"}, {"name": "i"}]});
    plans(&mixed).check(expect![[r#"
        s=Running           -> start i
        s=Running i=Running -> nothing
        s=Running i=Exited  -> start c
    "#]]);
}

#[test]
fn earlier_sidecars_keep_running_during_initialization() {
    let probe = || json!({"exec": {"command": ["true"]}});
    let spec = json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "s", "restartPolicy": "Always", "startupProbe": probe(), "livenessProbe": probe()},
        {"name": "h"}, {"name": "t", "restartPolicy": "Always"}, {"name": "i"}]});
    plans_of_policies(&spec).check(expect![[r#"
        # The newest init container may run, be done, have a running successor, or be created.
        s=Exited h=Running                                         -> start s
        s=Exited h=Exited                                          -> start s, start t
        s=Exited:1 h=Exited t=Exited:1 i=Running                   -> start s, start t
        s=Exited h=Exited t=Running i=Exited                       -> start s, start c
        s=Exited h=Exited t=Exited i=Created                       -> start s, start t, start i
        s=Created h=Running                                        -> start s
        h=Running                                                  -> start s
        s=Unknown h=Running                                        -> stop s (Unknown), start s
        s=Running#old h=Running                                    -> stop s (DefinitionChanged), start s
        s=Running h=Running | startup:s=Failure                    -> stop s (StartupProbe), start s
        s=Running h=Running | liveness:s=Failure startup:s=Success -> stop s (LivenessProbe), start s
        s=Running#old h=Exited t=Exited                            -> stop s (DefinitionChanged), start s, start t
        # A sidecar that starts again does not delay later containers.
        s=Running h=Exited                                         -> start t
        s=Running h=Running                                        -> nothing
        s=Running h=Exited t=Running i=Running | startup:s=Success -> nothing
        # If the pod ends, no container is started.
        s=Exited h=Exited:1                                        -> Always, OnFailure: start s, start h; Never: stop the pod
        s=Exited h=Unknown                                         -> Always, OnFailure: stop h (Unknown), start s, start h; Never: stop the pod
        s=Running#old h=Exited:1                                   -> Always, OnFailure: stop s (DefinitionChanged), start s, start h; Never: stop the pod
    "#]]);
}

#[test]
fn sidecars_restart_after_initialization_until_the_pod_ends() {
    plans(&sidecars()).check(expect![[r#"
        c=Running s=Running t=Running                                        -> nothing
        c=Running                                                            -> start s, start t
        c=Running s=Created t=Running                                        -> start s
        c=Running s=Exited t=Exited:1                                        -> start s, start t
        c=Running s=Unknown t=Running                                        -> stop s (Unknown), start s
        c=Running s=Running#old t=Running                                    -> stop s (DefinitionChanged), start s
        c=Running s=Running t=Running | liveness:s=Failure startup:s=Success -> stop s (LivenessProbe), start s
        c=Running s=Running t=Running | startup:s=Failure                    -> stop s (StartupProbe), start s
        c=Running s=Running t=Running | liveness:t=Failure startup:t=Failure -> nothing
        # A created regular container counts as initialized.
        c=Created s=Running t=Running                                        -> start c
    "#]]);
    // Ordinary init containers are not inspected any more.
    let mixed = json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "i"}, {"name": "s", "restartPolicy": "Always"}]});
    plans(&mixed).check(expect![[r#"
        c=Running i=Exited:1 s=Running -> nothing
        c=Running i=Unknown s=Exited   -> start s
        c=Running s=Running            -> nothing
    "#]]);
    // Sidecars do not keep a finished pod running, and do not start again in it.
    let mut done = sidecars();
    done["restartPolicy"] = json!("Never");
    plans(&done).check(expect![[r#"
        c=Exited s=Running t=Running -> stop the pod
        c=Exited s=Exited t=Running  -> stop the pod
    "#]]);
}

#[test]
fn killing_event_has_upstreams_message_for_each_reason() {
    let messages = |spec: Value| {
        let pod = pod(spec);
        table(move |case| plan_of(&pod, case).kill.remove(0).message)
    };
    messages(single_container("Always")).check(expect![[r#"
        c=Running#old                  -> Container c definition changed, will be restarted
        c=Running | liveness:c=Failure -> Container c failed liveness probe, will be restarted
        c=Running | startup:c=Failure  -> Container c failed startup probe, will be restarted
    "#]]);
    messages(single_container("Never")).check(expect![[r#"
        c=Running#old                  -> Container c definition changed, will be restarted
        c=Running | liveness:c=Failure -> Container c failed liveness probe
        c=Unknown                      -> Container is in "unknown" state, try killing it before restart
    "#]]);
    messages(sidecars()).check(expect![[r#"
        s=Running#old                                    -> Init container s definition changed
        s=Running | liveness:s=Failure startup:s=Success -> Init container s failed liveness probe
        s=Running | startup:s=Failure                    -> Init container s failed startup probe
        s=Unknown                                        -> Init container is in "unknown" state, try killing it before restart
    "#]]);
}
