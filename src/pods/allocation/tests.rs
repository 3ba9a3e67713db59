use super::*;
use serde_json::{Value, json};

fn pod(uid: &str, generation: i64, cpu: &str, memory: &str) -> Pod {
    let resources = json!({
        "requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}});
    object(json!({
        "metadata": {"uid": uid, "name": "web", "generation": generation},
        "spec": {"containers": [{"name": "c", "resources": resources}]},
    }))
}

fn requested(pod: &Pod) -> ResizableResources {
    ResizableResources::for_container(pod, &pod.containers()[0])
}

fn object(value: Value) -> Pod {
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

fn cpu(pod: &Pod) -> String {
    let own = pod.containers()[0].resources.as_ref().unwrap();
    own.limits.as_ref().unwrap()["cpu"].0.clone()
}

#[test]
fn granted_resources_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let first = Allocations::load(dir.path());
    first.grant(&pod("u", 1, "1", "64Mi"));
    first.set_all_actuated(&pod("u", 1, "1", "64Mi"), &pod("u", 1, "1", "64Mi").containers()[0]);
    first.store().unwrap();

    let second = Allocations::load(dir.path());
    let wanted = pod("u", 2, "2", "64Mi");
    let granted = second.granted(&wanted);
    assert_eq!(cpu(&granted), "1");
    assert_eq!(granted.object().metadata.generation, Some(2));
    assert_eq!(second.actuated(wanted.uid(), "c"), Some(requested(&granted)));
    assert_eq!(second.actuated(wanted.uid(), "other"), None);
    // The same amounts in another notation are no other request.
    let same = pod("u", 3, "1000m", "65536Ki");
    assert_eq!(cpu(&second.granted(&same)), "1000m");

    second.set_actuated(&wanted, &wanted.containers()[0], Resource::Memory);
    assert_ne!(second.actuated(wanted.uid(), "c"), Some(requested(&wanted)));
    second.set_actuated(&wanted, &wanted.containers()[0], Resource::Cpu);
    assert_eq!(second.actuated(wanted.uid(), "c"), Some(requested(&wanted)));
    second.retain(|_| false);
    second.store().unwrap();
    assert_eq!(cpu(&Allocations::load(dir.path()).granted(&wanted)), "2");
}

/// `data` was written by the Go kubelet for a pod with one container.
#[test]
fn state_file_has_the_go_kubelets_format() {
    let dir = tempfile::tempdir().unwrap();
    let data = r#"{"entries":{"u":{"ContainerResources":{"c":{"limits":{"cpu":"1","memory":"64Mi"},"requests":{"cpu":"1","memory":"64Mi"}}}}}}"#;
    let entries = BTreeMap::from([(
        PodUid::from("u"),
        PodResources::from_pod(&pod("u", 1, "1", "64Mi")).to_text().into_boxed_str(),
    )]);
    let text = checkpoint::render(&entries);
    let file: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(file["data"], data);
    std::fs::write(dir.path().join(ALLOCATED), text).unwrap();
    assert_eq!(cpu(&Allocations::load(dir.path()).granted(&pod("u", 2, "2", "64Mi"))), "1");
}

#[test]
fn damaged_state_files_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(ALLOCATED), "").unwrap();
    std::fs::write(dir.path().join(ACTUATED), b"\xff").unwrap();
    let allocations = Allocations::load(dir.path());
    assert_eq!(allocations.problems().len(), 2);
    let pod = pod("u", 1, "1", "64Mi");
    allocations.grant(&pod);
    allocations.set_all_actuated(&pod, &pod.containers()[0]);
    allocations.store().unwrap();
    let again = Allocations::load(dir.path());
    assert!(again.problems().is_empty() && again.actuated(pod.uid(), "c") == Some(requested(&pod)));
}

#[test]
fn nothing_is_stored_for_pods_without_resources() {
    let dir = tempfile::tempdir().unwrap();
    let allocations = Allocations::load(dir.path());
    let bare = object(json!({"metadata": {"uid": "b"}, "spec": {"containers": [{"name": "c"}]}}));
    let store = |pod: &Pod| {
        allocations.grant(pod);
        allocations.set_all_actuated(pod, &pod.containers()[0]);
        allocations.store().unwrap();
        (dir.path().join(ALLOCATED).exists(), dir.path().join(ACTUATED).exists())
    };
    assert_eq!(store(&bare), (false, false));
    assert_eq!(store(&of_file(pod("f", 0, "1", "1Mi"))), (true, true));
}

fn of_file(pod: Pod) -> Pod {
    let mut object = pod.into_object();
    object.metadata.annotations =
        Some(BTreeMap::from([(crate::model::pod::CONFIG_SOURCE.to_owned(), "file".to_owned())]));
    Pod::from(object)
}

#[test]
fn granted_resources_of_a_static_pod_survive_a_restart_until_its_manifest_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let first = Allocations::load(dir.path());
    first.grant(&of_file(pod("u", 0, "1", "64Mi")));
    first.store().unwrap();

    let second = Allocations::load(dir.path());
    let wanted = of_file(pod("u", 0, "2", "64Mi"));
    assert_eq!(cpu(&second.granted(&wanted)), "1");
    second.revoke(wanted.uid());
    assert_eq!(cpu(&second.granted(&wanted)), "2");
    second.store().unwrap();
    assert_eq!(cpu(&Allocations::load(dir.path()).granted(&wanted)), "2");
}

/// Manifests have no generation by which versions could be told apart.
#[test]
fn worker_with_an_older_manifest_neither_ends_nor_fails_the_resize() {
    let allocations = Allocations::default();
    let (old, new) = (of_file(pod("u", 0, "1", "1Mi")), of_file(pod("u", 0, "2", "1Mi")));
    allocations.grant(&old);
    allocations.grant(&new);
    allocations.begin(&new);
    assert_eq!(allocations.complete(&old), None);
    assert!(!allocations.fail(&old, "no"));
    assert_eq!(conditions(&allocations, "u"), "PodResizeInProgress@0 : ");
    assert_eq!(allocations.complete(&new), Some(0));
}

/// The class of a static pod may change with its manifest.
#[test]
fn pod_that_loses_its_resources_has_them_in_no_file() {
    let allocations = Allocations::default();
    let full = pod("u", 0, "1", "1Mi");
    allocations.grant(&full);
    allocations.set_all_actuated(&full, &full.containers()[0]);
    let bare = object(json!({"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "c"}]}}));
    allocations.grant(&bare);
    allocations.set_all_actuated(&bare, &bare.containers()[0]);
    assert_eq!(allocations.granted(&bare), bare);
    assert_eq!(allocations.actuated(bare.uid(), "c"), Some(ResizableResources::default()));
}

fn conditions(allocations: &Allocations, uid: &str) -> String {
    let describe = |condition: PodCondition| {
        let text = |text: Option<String>| text.unwrap_or_default();
        let generation = condition.observed_generation.unwrap_or(0);
        format!("{}@{generation} {}: {}", condition.type_, text(condition.reason), text(condition.message))
    };
    let list = allocations.conditions(&uid.into());
    list.into_iter().map(describe).collect::<Vec<_>>().join("; ")
}

#[test]
fn conditions_show_each_stage_of_the_newest_resize() {
    let allocations = Allocations::default();
    let second = pod("u", 2, "2", "1Mi");
    assert_eq!(allocations.set_pending(&second, PendingReason::Deferred, "fuller"), PendingChange::Reason);
    // What is in use changes with each other pod: that is no event.
    assert_eq!(allocations.set_pending(&second, PendingReason::Deferred, "full"), PendingChange::Message);
    assert_eq!(allocations.set_pending(&second, PendingReason::Deferred, "full"), PendingChange::Nothing);
    assert_eq!(conditions(&allocations, "u"), "PodResizePending@2 Deferred: full");
    let deferred = BTreeMap::from([("normal", 1)]);
    assert_eq!(allocations.counts(), Counts { deferred, ..Counts::default() });
    assert_eq!(allocations.end_pending(second.uid(), Resolution::Accepted), Some(PendingReason::Deferred));
    allocations.begin(&second);
    assert_eq!(conditions(&allocations, "u"), "PodResizeInProgress@2 : ");
    assert!(allocations.fail(&second, "no"));
    assert!(!allocations.fail(&second, "no"));
    allocations.continue_resize(&second);
    assert_eq!(conditions(&allocations, "u"), "PodResizeInProgress@2 Error: no");
    assert_eq!(allocations.counts(), Counts { in_progress: 1, ..Counts::default() });

    // A worker that has not received the next resize does not end it.
    let third = pod("u", 3, "3", "1Mi");
    allocations.begin(&third);
    assert_eq!(allocations.set_pending(&third, PendingReason::Infeasible, "never"), PendingChange::Reason);
    assert_eq!(allocations.complete(&second), None);
    assert!(!allocations.fail(&second, "no"), "the newer resize has not failed");
    assert_eq!(
        conditions(&allocations, "u"),
        "PodResizePending@3 Infeasible: never; PodResizeInProgress@3 : "
    );
    assert_eq!(allocations.complete(&third), Some(3));
    assert_eq!(allocations.complete(&third), None);
    let infeasible = BTreeMap::from([("normal", 1)]);
    assert_eq!(allocations.counts(), Counts { infeasible, ..Counts::default() });
    assert_eq!(allocations.end_pending(third.uid(), Resolution::Reverted), Some(PendingReason::Infeasible));
    assert_eq!((conditions(&allocations, "u"), allocations.counts()), (String::new(), Counts::default()));
}

fn with_priority(uid: &str, priority: Option<i32>) -> Pod {
    object(json!({
        "metadata": {"uid": uid, "name": "web", "generation": 2},
        "spec": {"priority": priority, "containers": [{"name": "c"}]},
    }))
}

#[test]
fn pending_resizes_are_counted_by_priority() {
    let allocations = Allocations::default();
    for (index, (priority, bucket)) in [
        (Some(2_000_001_000), "system-critical"),
        (Some(2_000_000_000), "system-critical"),
        (Some(1_999_999_999), "high"),
        (Some(100_000), "high"),
        (Some(99_999), "medium"),
        (Some(1), "medium"),
        (Some(0), "normal"),
        (None, "normal"),
        (Some(-1), "low"),
        (Some(-999), "low"),
        (Some(-1000), "very-low"),
        (Some(i32::MIN), "very-low"),
    ]
    .into_iter()
    .enumerate()
    {
        let pod = with_priority(&index.to_string(), priority);
        assert_eq!(priority_bucket(&pod), bucket, "{priority:?}");
        let reason = if index == 0 { PendingReason::Infeasible } else { PendingReason::Deferred };
        allocations.set_pending(&pod, reason, "full");
    }
    let deferred =
        [("system-critical", 1), ("high", 2), ("medium", 2), ("normal", 2), ("low", 2), ("very-low", 2)];
    let infeasible = BTreeMap::from([("system-critical", 1)]);
    assert_eq!(allocations.counts(), Counts { deferred: deferred.into(), infeasible, in_progress: 0 });
}

#[test]
fn wait_of_a_deferred_resize_begins_with_its_reason() {
    let pod = |generation| pod("u", generation, "2", "1Mi");
    let mut resizing = Resizing::default();
    let seconds = |resizing: &Resizing, later: i64| {
        let now = Timestamp::now() + jiff::SignedDuration::from_secs(later);
        resizing.seconds_deferred(now)
    };
    assert_eq!(seconds(&resizing, 0), None);
    resizing.set_pending(&pod(2), PendingReason::Infeasible, "never");
    assert_eq!(seconds(&resizing, 10), None, "it does not wait");
    // Other messages and generations do not begin it again.
    let since = Timestamp::now() - jiff::SignedDuration::from_secs(3600);
    let mut shown = pod(2).into_object();
    shown.status = serde_json::from_value(json!({"conditions": [
        {"type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "full",
            "observedGeneration": 2, "lastTransitionTime": since.to_string()}]}))
    .unwrap();
    let mut resizing = Resizing::from_status(&Pod::from(shown));
    assert!(seconds(&resizing, 0).is_some_and(|seconds| seconds >= 3599.0));
    assert_eq!(resizing.set_pending(&pod(3), PendingReason::Deferred, "still full"), PendingChange::Reason);
    assert!(seconds(&resizing, 0).is_some_and(|seconds| seconds >= 3599.0));
    resizing.set_pending(&pod(4), PendingReason::Infeasible, "never");
    resizing.set_pending(&pod(5), PendingReason::Deferred, "full");
    assert!(seconds(&resizing, 10).is_some_and(|seconds| (10.0..3599.0).contains(&seconds)));
    assert_eq!(seconds(&resizing, -60), Some(0.0), "the clock was set back");
}

#[test]
fn end_of_a_deferred_resize_is_counted_by_its_resolution() {
    // No other test has pods of this priority.
    let waiting = |uid: &str| {
        let allocations = Allocations::default();
        let pod = with_priority(uid, Some(-5000));
        allocations.set_pending(&pod, PendingReason::Deferred, "full");
        (allocations, pod.uid().clone())
    };
    let count = |resolution: &'static str, priority: &'static str| {
        metrics::DEFERRED_RESIZE_DURATION.count([resolution, priority])
    };
    let (allocations, uid) = waiting("a");
    allocations.end_pending(&uid, Resolution::Accepted);
    allocations.end_pending(&uid, Resolution::Accepted);
    allocations.end_pending(&waiting("b").1, Resolution::Accepted);
    assert_eq!(count("accepted", "very-low"), 1);
    let (allocations, uid) = waiting("c");
    allocations.end_pending(&uid, Resolution::Reverted);
    assert_eq!(count("reverted", "very-low"), 1);
    let (allocations, uid) = waiting("d");
    allocations.end(&uid);
    assert_eq!(count("terminated", "very-low"), 1);
    // The pod is not known any more.
    let before = count("terminated", "unknown");
    let (allocations, _) = waiting("e");
    allocations.retain(|_| false);
    assert!(count("terminated", "unknown") > before);
    // A resize that can never be granted did not wait.
    let allocations = Allocations::default();
    let pod = with_priority("f", Some(-5000));
    allocations.set_pending(&pod, PendingReason::Infeasible, "never");
    allocations.end_pending(pod.uid(), Resolution::Reverted);
    assert_eq!(count("reverted", "very-low"), 1);
}

#[test]
fn ended_pod_has_no_resize_conditions() {
    let allocations = Allocations::default();
    let second = pod("u", 2, "2", "1Mi");
    allocations.begin(&second);
    allocations.set_pending(&second, PendingReason::Deferred, "full");
    allocations.end(second.uid());
    assert_eq!((conditions(&allocations, "u"), allocations.counts()), (String::new(), Counts::default()));
}

#[test]
fn resize_conditions_are_restored_from_the_api_server() {
    let mut shown = pod("u", 2, "2", "1Mi").into_object();
    shown.status = serde_json::from_value(json!({"conditions": [
        {"type": "Ready", "status": "True"},
        {"type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "full",
            "observedGeneration": 2}]}))
    .unwrap();
    let shown = Pod::from(shown);
    let allocations = Allocations::default();
    allocations.restore(&shown);
    assert_eq!(conditions(&allocations, "u"), "PodResizePending@2 Deferred: full");
    let again = allocations.set_pending(&shown, PendingReason::Deferred, "full");
    assert_eq!(again, PendingChange::Nothing, "the condition was reported before");
    allocations.retain(|_| false);
    assert_eq!(conditions(&allocations, "u"), "");
}

#[test]
fn resize_events_contain_the_containers_new_resources() {
    let pod = object(json!({"metadata": {"uid": "u"}, "spec": {
        "initContainers": [{"name": "i"}],
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}}]}}));
    assert_eq!(
        summary("started", &pod, 2, ""),
        r#"Pod resize started: {"initContainers":[{"name":"i","resources":{}}],"containers":[{"name":"c","resources":{"limits":{"cpu":"2"},"requests":{"cpu":"1"}}}],"generation":2}"#
    );
    let plain = object(json!({"spec": {"containers": [{"name": "c"}]}}));
    assert_eq!(
        summary("error", &plain, 3, "no \"c\""),
        r#"Pod resize error: {"containers":[{"name":"c","resources":{}}],"generation":3,"error":"no \"c\""}"#
    );
}

/// A pod with resources as a whole, whose container has none of its own.
fn whole(cpu: &str) -> Pod {
    let both = json!({"cpu": cpu, "memory": "64Mi"});
    object(json!({"metadata": {"uid": "u"}, "spec": {
        "resources": {"requests": both, "limits": both}, "containers": [{"name": "c"}]}}))
}

#[test]
fn first_resources_of_a_running_pod_are_sent_to_the_runtime() {
    let allocations = Allocations::default();
    let bare = object(json!({"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "c"}]}}));
    allocations.grant(&bare);
    allocations.set_all_actuated(&bare, &bare.containers()[0]);
    let edited = pod("u", 2, "1", "64Mi");
    allocations.grant(&edited);
    allocations.begin(&edited);
    allocations.record_running(&edited, &[&edited.containers()[0]]);
    assert_eq!(allocations.actuated(edited.uid(), "c"), Some(ResizableResources::default()));
    // A container that is older than the records has what its pod was granted.
    let old = pod("old", 1, "1", "64Mi");
    allocations.record_running(&old, &[&old.containers()[0]]);
    assert_eq!(allocations.actuated(old.uid(), "c"), Some(requested(&old)));
}

/// `data` is as the Go kubelet writes it for such a pod.
#[test]
fn limits_from_the_pod_are_recorded_as_those_of_the_container() {
    let dir = tempfile::tempdir().unwrap();
    let allocations = Allocations::load(dir.path());
    let pod = whole("1");
    allocations.set_all_actuated(&pod, &pod.containers()[0]);
    allocations.set_pod_level_actuated(&pod);
    allocations.store().unwrap();
    let text = std::fs::read_to_string(dir.path().join(ACTUATED)).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    let data = r#"{"entries":{"u":{"ContainerResources":{"c":{"limits":{"cpu":"1","memory":"64Mi"}}},"PodLevelResources":{"limits":{"cpu":"1","memory":"64Mi"},"requests":{"cpu":"1","memory":"64Mi"}}}}}"#;
    assert_eq!(file["data"], data);
    assert_eq!(allocations.actuated(pod.uid(), "c"), Some(requested(&pod)));
    // Only one of both was changed.
    let grown = whole("2");
    assert_ne!(allocations.actuated(pod.uid(), "c"), Some(requested(&grown)));
    allocations.set_actuated(&grown, &grown.containers()[0], Resource::Cpu);
    assert_eq!(allocations.actuated(pod.uid(), "c"), Some(requested(&grown)));
}

#[test]
fn open_resize_shows_what_the_pod_and_its_containers_still_have() {
    let allocations = Allocations::default();
    let (old, new) = (pod("u", 1, "1", "64Mi"), pod("u", 2, "2", "64Mi"));
    allocations.set_all_actuated(&old, &old.containers()[0]);
    allocations.grant(&new);
    assert_eq!(allocations.in_resize(&new), None);
    allocations.begin(&new);
    let has = |allocations: &Allocations| allocations.in_resize(&new).map(|pod| cpu(&pod)).unwrap();
    assert_eq!(has(&allocations), "1");
    allocations.set_actuated(&new, &new.containers()[0], Resource::Cpu);
    assert_eq!(has(&allocations), "2");

    let allocations = Allocations::default();
    let (old, new) = (whole("1"), whole("2"));
    allocations.set_pod_level_actuated(&old);
    allocations.begin(&new);
    let has = allocations.in_resize(&new).unwrap();
    assert_eq!(has.spec().resources, old.spec().resources);
}

/// An upgrade of the agent must not restart containers. Limits that need no restart are sent once.
#[test]
fn records_of_earlier_versions_get_the_limits_that_would_restart_containers() {
    let with_policies = |cpu: &str, names: &[&str]| {
        let mut object = whole(cpu).into_object();
        let policy = |name: &&str| json!({"resourceName": name, "restartPolicy": "RestartContainer"});
        let policies = Value::Array(names.iter().map(policy).collect());
        object.spec.as_mut().unwrap().containers[0].resize_policy = serde_json::from_value(policies).unwrap();
        Pod::from(object)
    };
    let adopted = |names: &[&str]| {
        let (allocations, pod) = (Allocations::default(), with_policies("1", names));
        let earlier = r#"{"ContainerResources":{"c":{}}}"#;
        allocations.0.state.locked().actuated.set(pod.uid(), earlier.to_owned());
        allocations.record_running_pod_level(&pod, &[&pod.containers()[0]]);
        let (has, wants) = (allocations.actuated(pod.uid(), "c").unwrap(), requested(&pod));
        Resource::ALL.map(|resource| has.values(resource) == wants.values(resource))
    };
    assert_eq!(adopted(&[]), [false, false]);
    assert_eq!(adopted(&["memory"]), [true, false]);
    assert_eq!(adopted(&["cpu"]), [false, true]);
    let allocations = Allocations::default();
    let pod = with_policies("1", &["cpu", "memory"]);
    let earlier = r#"{"ContainerResources":{"c":{},"gone":{}}}"#;
    allocations.0.state.locked().actuated.set(pod.uid(), earlier.to_owned());
    assert_ne!(allocations.actuated(pod.uid(), "c"), Some(requested(&pod)));
    allocations.record_running_pod_level(&pod, &[&pod.containers()[0]]);
    assert_eq!(allocations.actuated(pod.uid(), "c"), Some(requested(&pod)));
    assert_eq!(allocations.actuated(pod.uid(), "gone"), Some(ResizableResources::default()));
    // A complete record stays.
    let grown = with_policies("2", &["cpu", "memory"]);
    allocations.record_running_pod_level(&grown, &[&grown.containers()[0]]);
    assert_eq!(allocations.actuated(pod.uid(), "c"), Some(requested(&pod)));
}

/// The recordings have the file before and after a resize, with `null` for what a pod does not have.
#[test]
fn recorded_files_of_the_go_kubelet_are_read() {
    fn files<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, inner)| match key.as_str() {
                ACTUATED if inner.get("data").is_some() => found.push(inner),
                _ => files(inner, found),
            }),
            Value::Array(list) => list.iter().for_each(|inner| files(inner, found)),
            _ => {}
        }
    }
    let text = include_str!("../../../tests/golden/resources/expected/a-edit-same-uid.json");
    let recording: Value = serde_json::from_str(text).unwrap();
    let mut found = Vec::new();
    files(&recording, &mut found);
    let dir = tempfile::tempdir().unwrap();
    let limits = |file: &&Value| {
        std::fs::write(dir.path().join(ACTUATED), file.to_string()).unwrap();
        let uid = PodUid::from("b5f3729e-5418-905a-d2b2-1ce186b1c01d");
        let allocations = Allocations::load(dir.path());
        let requested = allocations.actuated(&uid, "main").expect("it is there");
        [requested.cpu.request, requested.cpu.limit].map(|amount| amount.map(|amount| amount.milli()))
    };
    let all: Vec<_> = found.iter().map(limits).collect();
    assert_eq!(all[..2], [[Some(100), None], [Some(300), Some(500)]]);
}

/// Kubernetes 1.34 and 1.35 write only what containers have.
#[test]
fn static_pod_of_an_older_release_has_its_resources_as_a_whole() {
    let with = |uid: &str, source: &str| {
        object(json!({
            "metadata": {"uid": uid, "name": "web", "annotations": {"kubernetes.io/config.source": source}},
            "spec": {"containers": [{"name": "c"}], "resources": {"limits": {"cpu": "1", "memory": "64Mi"}}},
        }))
    };
    let derived = "0123456789abcdef0123456789abcdef";
    let allocations = Allocations::default();
    for (uid, source, stays) in
        [(derived, "file", true), (derived, "http", true), (derived, "api", false), ("u", "file", false)]
    {
        let pod = with(uid, source);
        let older = r#"{"ContainerResources":{"c":{}},"PodLevelResources":null}"#;
        allocations.0.state.locked().allocated.set(pod.uid(), older.to_owned());
        assert_eq!(allocations.granted(&pod) == pod, stays, "{uid} {source}");
    }
}
