//! The `runtime` room against the fake runtime: calls, files, events and messages.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle::cri;
use coracle::images::{CredentialVerification, ImagePuller, ImageSet, PullDeps, PullSettings};
use coracle::model::api;
use coracle::model::event::{Event, EventSink, EventType, Regarding};
use coracle::model::ids::ContainerId;
use coracle::model::mount::{SubPath, SubPathFailure, SubPaths};
use coracle::model::pod::Pod;
use coracle::model::runtime::{ListedPod, PodRuntime};
use coracle::runtime::{
    ContainerKill, CrashBackoff, Deps, KnownPod, MachineNumbers, NewSandbox, Runtime, Settings, Start,
    StartFailure,
};
use coracle::transport::grpc::Kind;
use coracle::util::stop::{self, StopToken};
use crossbeam_channel::Receiver;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::support::fake_cri::{BUSYBOX, BUSYBOX_ID, FakeCri};

struct NoSubPaths;

impl SubPaths for NoSubPaths {
    fn bind(&self, _: SubPath<'_>, _: &StopToken) -> Result<PathBuf, SubPathFailure> {
        Err(SubPathFailure::Prepare)
    }
}

pub struct Node {
    pub fake: FakeCri,
    dir: tempfile::TempDir,
    pub runtime: Runtime,
    client: cri::RuntimeClient,
    events: Receiver<Box<Event>>,
}

impl Node {
    pub fn new() -> Node {
        Node::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Settings)) -> Node {
        Node::with_pulls(|settings, _| change(settings))
    }

    fn with_pulls(change: impl FnOnce(&mut Settings, &mut PullSettings)) -> Node {
        let fake = FakeCri::start();
        let dir = tempfile::tempdir().unwrap();
        let resolv_conf = dir.path().join("resolv.conf");
        std::fs::write(&resolv_conf, "nameserver 192.0.2.53\n").unwrap();
        let mut settings = Settings {
            root_dir: dir.path().join("root"),
            pod_logs_dir: dir.path().join("logs"),
            container_logs_dir: dir.path().join("links"),
            node_ips: vec!["192.0.2.10".parse().unwrap()],
            cluster_dns: Vec::new(),
            cluster_domain: "cluster.local".into(),
            resolv_conf,
            hosts_file: "/etc/hosts".into(),
            seccomp_default: false,
            cpu_cfs_quota: true,
            cpu_cfs_quota_period: Duration::from_millis(100),
            machine: MachineNumbers { memory_capacity_bytes: 1 << 34, ..MachineNumbers::default() },
            swap: coracle::model::container_memory::SwapBehavior::NoSwap,
            memory_qos: None,
            single_process_oom_kill: None,
            crash_backoff: CrashBackoff { first: Duration::from_secs(10), longest: Duration::from_secs(300) },
            stop_signals: false,
            user_namespace_ids: 65_536,
            default_sysctls: Default::default(),
            max_pods: 110,
        };
        let mut pulls = PullSettings {
            root_dir: dir.path().join("root"),
            registry_pull_qps: 5,
            registry_burst: 10,
            serialize_image_pulls: true,
            max_parallel_image_pulls: None,
            credential_providers: None,
            credential_verification: CredentialVerification::NotPreloaded,
        };
        change(&mut settings, &mut pulls);
        let (client, images) = fake.connect();
        let (sink, events) = EventSink::new();
        let cgroup_parent = Arc::new(|_: &_| String::new());
        let placement = Arc::new(());
        let pull_deps = PullDeps {
            images,
            events: sink.clone(),
            set: ImageSet::default(),
            api: None,
            local: Default::default(),
        };
        let deps = Deps {
            cri: client.clone(),
            images: Arc::new(ImagePuller::new(&pulls, pull_deps)),
            events: sink,
            api: None,
            local: Default::default(),
            cgroup_parent,
            placement,
            replaced: Default::default(),
        };
        Node { fake, dir, runtime: Runtime::new(settings, deps), client, events }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    /// Reason and message of each event since the last call.
    pub fn events(&self) -> Vec<(&'static str, String)> {
        self.events.try_iter().map(|event| (event.reason, event.message)).collect()
    }

    pub fn sandbox(&self, pod: &Pod) -> NewSandbox {
        self.runtime.create_sandbox(pod, 0, &StopToken::never()).unwrap()
    }

    pub fn observe(&self, pod: &Pod) -> (ListedPod, PodRuntime) {
        let listed = cri::list_pods(&self.client, Some(pod.uid())).unwrap().remove(pod.uid()).unwrap();
        let runtime = cri::inspect_pod(&self.client, &listed).unwrap();
        (listed, runtime)
    }

    pub fn start(&self, pod: &Pod, sandbox: &NewSandbox, name: &str) -> Result<ContainerId, StartFailure> {
        self.start_until(pod, sandbox, name, &StopToken::never())
    }

    pub fn start_until(
        &self,
        pod: &Pod,
        sandbox: &NewSandbox,
        name: &str,
        stop: &StopToken,
    ) -> Result<ContainerId, StartFailure> {
        self.runtime.start_container(Start {
            pod,
            container: pod
                .all_containers()
                .chain(&pod.ephemeral_containers())
                .find(|container| container.name == name)
                .unwrap(),
            sandbox_id: &sandbox.id,
            sandbox_attempt: 0,
            pod_ips: &sandbox.ips,
            host_ips: &[],
            runtime: &self.observe(pod).1,
            volumes: &[],
            sub_paths: &NoSubPaths,
            recursive_read_only_mounts: false,
            stop,
        })
    }
}

pub fn pod(spec: Value) -> Pod {
    let pod = json!({"metadata": {"name": "web", "namespace": "ns", "uid": "u1"}, "spec": spec});
    Pod::from(serde_json::from_value::<api::Pod>(pod).unwrap())
}

fn container(name: &str, image: &str, policy: &str) -> Value {
    json!({"name": name, "image": image, "imagePullPolicy": policy, "command": ["run"],
        "terminationMessagePath": "/dev/termination-log"})
}

fn plain() -> Pod {
    pod(json!({"containers": [container("c", BUSYBOX, "IfNotPresent")], "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 7}))
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn pod_start_creates_files_calls_and_events() {
    let node = Node::new();
    node.fake.write_logs();
    let pod = plain();
    let sandbox = node.sandbox(&pod);
    assert_eq!(sandbox.ips.len(), 1);
    assert_eq!(mode(&node.path("logs/ns_web_u1")), 0o755);
    let id = node.start(&pod, &sandbox, "c").unwrap();
    assert_eq!(node.fake.calls(), ["RunPodSandbox", "CreateContainer", "StartContainer"]);
    assert_eq!(
        node.events(),
        [
            (
                "Pulled",
                format!(
                    "Container image {BUSYBOX:?} already present on machine and can be accessed by the pod"
                )
            ),
            ("Created", "Container created".to_owned()),
            ("Started", "Container started".to_owned()),
        ]
    );
    let made = node.fake.container("c").unwrap();
    assert_eq!(made.config.image.image, BUSYBOX_ID);
    let hosts = std::fs::read_to_string(node.path("root/pods/u1/etc-hosts")).unwrap();
    assert!(hosts.ends_with(&format!("{}\tweb\n", sandbox.ips[0])));
    let log = made.config.mounts.iter().find(|mount| mount.container_path == "/dev/termination-log").unwrap();
    assert_eq!(mode(Path::new(&log.host_path)), 0o666);
    let link = node.path(&format!("links/web_ns_c-{id}.log"));
    assert_eq!(std::fs::read_link(link).unwrap(), node.path("logs/ns_web_u1/c/0.log"));
}

#[test]
fn restart_counts_survive_lost_runtime_records() {
    let node = Node::new();
    let pod = plain();
    let sandbox = node.sandbox(&pod);
    let first = node.start(&pod, &sandbox, "c").unwrap();
    node.fake.kill_container(first.as_str(), 1);
    node.start(&pod, &sandbox, "c").unwrap();
    assert_eq!(node.fake.container("c").unwrap().config.log_path, "c/1.log");
    for container in node.fake.containers() {
        node.client.remove_container(&ContainerId::from(container.status.id.as_str())).unwrap();
    }
    std::fs::write(node.path("logs/ns_web_u1/c/4.log.20260101-000000"), "").unwrap();
    node.start(&pod, &sandbox, "c").unwrap();
    let made = node.fake.container("c").unwrap();
    assert_eq!((made.config.metadata.attempt, made.config.log_path.as_str()), (5, "c/5.log"));
}

#[test]
fn sandbox_failures_are_reported() {
    let node = Node::new();
    let create = |pod: &Pod| node.runtime.create_sandbox(pod, 0, &StopToken::never());
    node.fake.fail_times("RunPodSandbox", 1, Kind::Unknown, "no network");
    create(&plain()).unwrap_err();
    node.fake.fail_times("PodSandboxStatus", 1, Kind::Internal, "no status");
    create(&plain()).unwrap_err();
    create(&pod(json!({"containers": [], "runtimeClassName": "gvisor"}))).unwrap_err();
    create(&pod(json!({"containers": [], "hostname": "Ö"}))).unwrap_err();
    let events = node.events();
    let expected = [
        (
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox: rpc error: code = Unknown desc = no network",
        ),
        (
            "FailedPodSandBoxStatus",
            "Unable to get pod sandbox status: rpc error: code = Internal desc = no status",
        ),
        (
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox: runtimeclass.node.k8s.io \"gvisor\" not found",
        ),
        (
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox: spec.hostname \"Ö\" of pod \"web\" is not a valid DNS label",
        ),
    ];
    assert_eq!(events, expected.map(|(reason, message)| (reason, message.to_owned())));
}

#[test]
fn start_failures_have_reasons_messages_and_events() {
    let node = Node::new();
    let sandbox = node.sandbox(&plain());
    let check = |container: Value, reason: &str, message: &str, last_event: &str| {
        let pod = pod(json!({"containers": [container]}));
        let _ = node.events();
        let failure = node.start(&pod, &sandbox, "c").unwrap_err();
        assert_eq!((failure.reason, failure.message.as_str()), (reason, message));
        assert!(!failure.stopping);
        assert_eq!(node.events().pop().unwrap(), ("Failed", format!("Error: {last_event}")));
    };
    check(
        container("c", "localhost/none:1", "Never"),
        "ErrImageNeverPull",
        "Container image \"localhost/none:1\" is not present with pull policy of Never",
        "ErrImageNeverPull",
    );
    check(
        container("c", "UPPER/case:!", "IfNotPresent"),
        "InvalidImageName",
        "Failed to apply default image tag \"UPPER/case:!\": couldn't parse image name \"UPPER/case:!\": invalid reference format",
        "InvalidImageName",
    );
    let mut from_map = container("c", BUSYBOX, "IfNotPresent");
    from_map["env"] = json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]);
    let message = "couldn't get configMap ns/m, no kubeClient defined";
    check(from_map, "CreateContainerConfigError", message, message);
    let leftovers = std::fs::read_dir(node.path("root/pods/u1/containers/c")).unwrap().count();
    assert_eq!(leftovers, 0, "a termination log of a container that was never made");

    let good = || container("c", BUSYBOX, "IfNotPresent");
    node.fake.fail_times("CreateContainer", 1, Kind::Unknown, "no space");
    check(good(), "CreateContainerError", "no space", "no space");
    node.fake.fail_times("ImageStatus", 1, Kind::Unavailable, "away");
    let inspect = "Failed to inspect image \"\": rpc error: code = Unavailable desc = away";
    check(good(), "ImageInspectError", inspect, "ImageInspectError");
    let mut broken = good();
    broken["command"] = json!(["/no/such/binary"]);
    let pod = pod(json!({"containers": [broken]}));
    let failure = node.start(&pod, &sandbox, "c").unwrap_err();
    assert_eq!(failure.reason, "RunContainerError");
    assert!(!failure.message.contains("rpc error"), "{failure}");
}

#[test]
fn pulls_back_off_per_pod() {
    let node = Node::new();
    let pod = pod(json!({"containers": [container("c", "r.example/missing", "IfNotPresent")]}));
    let sandbox = node.sandbox(&pod);
    let _ = node.events();
    let text = "rpc error: code = NotFound desc = failed to pull and unpack image \"r.example/missing:latest\": failed to resolve reference \"r.example/missing:latest\": r.example/missing:latest: not found";
    let before = Timestamp::now();
    let failure = node.start(&pod, &sandbox, "c").unwrap_err();
    let after = Timestamp::now();
    assert_eq!((failure.reason, failure.message.as_str()), ("ErrImagePull", text));
    let reasons = |node: &Node| node.events().iter().map(|(reason, _)| *reason).collect::<Vec<_>>();
    assert_eq!(reasons(&node), ["Pulling", "Failed", "Failed"]);
    let failure = node.start(&pod, &sandbox, "c").unwrap_err();
    assert_eq!(failure.reason, "ImagePullBackOff");
    assert_eq!(
        failure.message,
        format!("Back-off pulling image \"r.example/missing\": ErrImagePull: {text}")
    );
    // Ten seconds after it failed.
    let failed_at = failure.retry_at.unwrap().checked_sub(Duration::from_secs(10)).unwrap();
    assert!((before..=after).contains(&failed_at), "{before} {failed_at} {after}");
    assert_eq!(reasons(&node), ["BackOff", "Failed"]);
    assert_eq!(node.fake.count("PullImage"), 1);
}

#[test]
fn missing_pull_secret_is_reported_only_after_a_failed_pull() {
    let node = Node::new();
    let (here, missing) = ("r.example/here:1", "r.example/missing");
    let object = json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "u1",
            "annotations": {"kubernetes.io/config.source": "file"}},
        "spec": {
            "containers": [
                container("present", here, "IfNotPresent"),
                container("pulled", "r.example/app", "Always"),
                container("a", missing, "IfNotPresent"),
                container("b", "other.example/missing", "IfNotPresent"),
            ],
            "imagePullSecrets": [{"name": "gone"}],
        },
    });
    let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
    assert!(pod.is_static());
    node.fake.add_image(here);
    let sandbox = node.sandbox(&pod);
    let reports = |name: &str| {
        let _ = node.start(&pod, &sandbox, name);
        let events = node.events();
        events.iter().filter(|(reason, _)| *reason == "FailedToRetrieveImagePullSecret").count()
    };
    assert_eq!((reports("present"), reports("pulled")), (0, 0));
    // Both fail in one sync of the pod; then they are in back-off.
    assert_eq!((reports("a"), reports("b")), (1, 0));
    assert_eq!((reports("a"), reports("b")), (0, 0));
}

#[test]
fn container_starts_after_its_pull() {
    let node = Node::new();
    let pod = pod(json!({"containers": [container("c", "r.example/app", "Always")]}));
    let sandbox = node.sandbox(&pod);
    let _ = node.events();
    node.start(&pod, &sandbox, "c").unwrap();
    let events = node.events();
    assert_eq!(events[0], ("Pulling", "Pulling image \"r.example/app\"".to_owned()));
    assert_eq!(events[1].0, "Pulled");
    let message = &events[1].1;
    assert!(message.starts_with("Successfully pulled image \"r.example/app\" in "), "{message}");
    assert!(message.ends_with(" including waiting). Image size: 4000000 bytes."), "{message}");
    assert_eq!(node.fake.container("c").unwrap().config.image.user_specified_image, "r.example/app");
}

#[test]
fn too_many_pulls_per_second_fail_at_once() {
    let node = Node::with_pulls(|_, pulls| {
        pulls.registry_pull_qps = 1;
        pulls.registry_burst = 1;
    });
    let pod = pod(json!({"containers": [
        container("a", "r.example/one", "Always"), container("b", "r.example/two", "Always")]}));
    let sandbox = node.sandbox(&pod);
    node.start(&pod, &sandbox, "a").unwrap();
    // The next attempt is a second too early, unless the machine is slow.
    let failure = (0..100).find_map(|_| node.start(&pod, &sandbox, "b").err()).unwrap();
    assert_eq!((failure.reason, failure.message.as_str()), ("ErrImagePull", "pull QPS exceeded"));
}

#[test]
fn stop_cancels_a_hanging_pull_without_an_event() {
    let node = Node::new();
    let pod = pod(json!({"containers": [container("c", "r.example/app", "Always")]}));
    let sandbox = node.sandbox(&pod);
    let _ = node.events();
    let gate = node.fake.hang("PullImage");
    let (source, token) = stop::pair();
    let failure = std::thread::scope(|scope| {
        let start = scope.spawn(|| node.start_until(&pod, &sandbox, "c", &token).unwrap_err());
        node.fake.wait_until("the pull hangs", |_| gate.waiting() == 1);
        drop(source);
        start.join().unwrap()
    });
    assert!(failure.stopping);
    let reasons: Vec<_> = node.events().iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reasons, ["Pulling"]);
    // The runtime may have the image nevertheless. The record has the name in the pod, as upstream's.
    let records = std::fs::read_dir(node.path("root/image_manager/pulling")).unwrap().flatten();
    let records: String = records.map(|file| std::fs::read_to_string(file.path()).unwrap()).collect();
    assert!(records.contains(r#""image":"r.example/app"}"#), "{records}");
    node.fake.behave("PullImage");
}

#[test]
fn restart_back_off_grows() {
    let node = Node::new();
    let pod = plain();
    let sandbox = node.sandbox(&pod);
    let begun = Timestamp::now();
    let allowed = |now: Timestamp| {
        let runtime = node.observe(&pod).1;
        node.runtime.restart_allowed(&pod, &pod.containers()[0], &runtime, now)
    };
    allowed(begun).unwrap();
    let id = node.start(&pod, &sandbox, "c").unwrap();
    allowed(begun).unwrap();
    node.fake.kill_container(id.as_str(), 1);
    // The time at which it ended, however long that took.
    let now =
        Timestamp::from_nanosecond(node.fake.container("c").unwrap().status.finished_at.into()).unwrap();
    allowed(now).unwrap();
    let _ = node.events();
    let failure = allowed(now).unwrap_err();
    assert_eq!(failure.reason, "CrashLoopBackOff");
    assert_eq!(failure.message, "back-off 10s restarting failed container=c pod=web_ns(u1)");
    let wait = failure.retry_at.unwrap().duration_since(now).as_secs();
    assert!((9..=11).contains(&wait), "{wait}");
    let event = node.events.try_recv().unwrap();
    assert_eq!((event.kind, event.reason), (EventType::Warning, "BackOff"));
    assert_eq!(event.message, "Back-off restarting failed container c in pod web_ns(u1)");
    let Regarding::Pod { field_path, .. } = event.regarding else { panic!() };
    assert_eq!(field_path, "spec.containers{c}");
    let later = |seconds| now.checked_add(Duration::from_secs(seconds)).unwrap();
    allowed(later(15)).unwrap();
    let failure = allowed(later(16)).unwrap_err();
    assert!(failure.message.starts_with("back-off 20s "), "{failure}");
    node.runtime.collect_backoff_garbage();
}

fn pod_of_three() -> Pod {
    let containers: Vec<Value> = ["a", "b", "c"].map(|name| container(name, BUSYBOX, "Never")).into();
    pod(json!({"containers": containers, "terminationGracePeriodSeconds": 7}))
}

pub fn timeouts(node: &Node) -> Vec<Value> {
    let stops = node.fake.journal().into_iter().filter(|entry| entry.method == "StopContainer");
    stops.map(|entry| entry.request["timeout"].clone()).collect()
}

#[test]
fn containers_stop_in_parallel_before_their_sandboxes() {
    let node = Node::new();
    let pod = pod_of_three();
    let sandbox = node.sandbox(&pod);
    for name in ["a", "b", "c"] {
        node.start(&pod, &sandbox, name).unwrap();
    }
    let (_, runtime) = node.observe(&pod);
    let _ = node.events();
    node.fake.clear_journal();
    let gate = node.fake.hang("StopContainer");
    std::thread::scope(|scope| {
        let kill = scope.spawn(|| {
            node.runtime.kill_pod(Some(&pod), KnownPod::Runtime(&runtime), None, &StopToken::never())
        });
        node.fake.wait_until("all three are being stopped", |_| gate.waiting() == 3);
        assert_eq!(node.fake.count("StopPodSandbox"), 0);
        gate.open();
        kill.join().unwrap().unwrap();
    });
    assert_eq!(timeouts(&node), [json!("7"), json!("7"), json!("7")]);
    assert_eq!(node.fake.calls().last(), Some(&"StopPodSandbox"));
    let mut messages: Vec<_> = node.events().into_iter().map(|(_, message)| message).collect();
    messages.sort();
    assert_eq!(messages, ["Stopping container a", "Stopping container b", "Stopping container c"]);
}

#[test]
fn created_instance_is_removed_before_the_next_one() {
    let node = Node::new();
    let pod = plain();
    let sandbox = node.sandbox(&pod);
    node.fake.fail_times("StartContainer", 1, Kind::Unknown, "broken off");
    assert_eq!(node.start(&pod, &sandbox, "c").unwrap_err().reason, "RunContainerError");
    // While it cannot be removed, no new instance may start.
    node.fake.fail_times("RemoveContainer", 1, Kind::Unknown, "it is starting");
    let failure = node.start(&pod, &sandbox, "c").unwrap_err();
    assert_eq!((failure.reason, failure.message.as_str()), ("CreateContainerError", "it is starting"));
    assert_eq!(node.fake.containers().len(), 1);
    node.start(&pod, &sandbox, "c").unwrap();
    let all = node.fake.containers();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].config.metadata.attempt, 1);
}

#[test]
fn failed_stop_does_not_prevent_other_stops() {
    let node = Node::new();
    let pod = pod_of_three();
    let sandbox = node.sandbox(&pod);
    for name in ["a", "b", "c"] {
        node.start(&pod, &sandbox, name).unwrap();
    }
    let (listed, runtime) = node.observe(&pod);
    node.fake.fail_times("StopContainer", 1, Kind::Unknown, "stuck");
    let kill = |observed: KnownPod<'_>| node.runtime.kill_pod(None, observed, Some(0), &StopToken::never());
    let error = kill(KnownPod::Runtime(&runtime)).unwrap_err();
    assert_eq!(error.unstopped.len(), 1);
    let text = error.to_string();
    assert!(text.starts_with("failed to \"KillContainer\" for "), "{text}");
    assert!(text.ends_with("with KillContainerError: \"rpc error: code = Unknown desc = stuck\""), "{text}");
    assert_eq!(node.fake.count("StopPodSandbox"), 1);
    assert_eq!(timeouts(&node), [json!("2"), json!("2"), json!("2")]);
    // A container that does not exist any more counts as stopped.
    for container in node.fake.containers() {
        node.client.remove_container(&ContainerId::from(container.status.id.as_str())).unwrap();
    }
    kill(KnownPod::Listed(&listed)).unwrap();
}

#[test]
fn grace_period_without_manifest_is_read_from_annotations() {
    let node = Node::new();
    let pod = plain();
    let sandbox = node.sandbox(&pod);
    node.start(&pod, &sandbox, "c").unwrap();
    let (listed, runtime) = node.observe(&pod);
    let stop = StopToken::never();
    node.runtime.kill_pod(None, KnownPod::Listed(&listed), None, &stop).unwrap();
    node.runtime.kill_pod(None, KnownPod::Runtime(&runtime), None, &stop).unwrap();
    assert_eq!(timeouts(&node), [json!("7"), json!("7")]);
}

#[test]
fn single_container_stop_records_the_given_message() {
    let node = Node::new();
    let pod = plain();
    let sandbox = node.sandbox(&pod);
    let id = node.start(&pod, &sandbox, "c").unwrap();
    let _ = node.events();
    let kill = ContainerKill {
        message: Some("Container c definition changed, will be restarted".into()),
        ..ContainerKill::for_container(&pod, &id, "c")
    };
    node.runtime.kill_container(&kill, &StopToken::never()).unwrap();
    assert_eq!(node.events(), [("Killing", "Container c definition changed, will be restarted".to_owned())]);
    assert_eq!(timeouts(&node), [json!("7")]);
    let gone = ContainerKill { id: ContainerId::from("gone"), ..kill };
    node.runtime.kill_container(&gone, &StopToken::never()).unwrap();
}

/// Makes the runtime's default handler support user namespaces.
fn can_user_namespaces(node: &Node) {
    node.fake.with_state(|state| {
        let features = state.handlers[0].features.mut_or_insert_default();
        features.user_namespaces = true;
    });
}

#[test]
fn user_namespace_is_allocated_once_per_pod() {
    let node = Node::new();
    let pod = pod(json!({"containers": [container("c", BUSYBOX, "IfNotPresent")], "hostUsers": false}));
    let create = || node.runtime.create_sandbox(&pod, 0, &StopToken::never());
    create().unwrap_err();
    assert_eq!(
        node.events(),
        [(
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox: can't set `spec.hostUsers: false`, runtime does not support user namespaces"
                .to_owned()
        )]
    );
    assert!(node.fake.sandboxes().is_empty());
    can_user_namespaces(&node);
    let sandbox = create().unwrap();
    node.start(&pod, &sandbox, "c").unwrap();
    let of_sandbox =
        node.fake.sandboxes()[0].config.linux.security_context.namespace_options.userns_options.clone();
    assert_eq!((of_sandbox.uids[0].host_id, of_sandbox.uids[0].length), (65_536, 65_536));
    let made = node.fake.container("c").unwrap();
    assert_eq!(made.config.linux.security_context.namespace_options.userns_options, of_sandbox);
    assert!(!made.config.mounts.is_empty());
    assert!(made.config.mounts.iter().all(|mount| mount.uidMappings == of_sandbox.uids));
    let file = std::fs::read_to_string(node.path("root/pods/u1/userns")).unwrap();
    assert!(file.starts_with(r#"{"uidMappings":[{"hostId":65536,"#), "{file}");
}

#[test]
fn strict_supplemental_groups_require_runtime_support() {
    let node = Node::new();
    let pod = pod(json!({"containers": [], "securityContext": {"supplementalGroupsPolicy": "Strict"}}));
    node.fake.with_state(|state| state.groups_policy = false);
    let error = node.runtime.create_sandbox(&pod, 0, &StopToken::never()).unwrap_err();
    assert_eq!(error.to_string(), "SupplementalGroupsPolicy=Strict is not supported in this node");
    node.fake.with_state(|state| state.groups_policy = true);
    node.sandbox(&pod);
}

#[test]
fn pulled_image_requires_verified_credentials() {
    let node = Node::new();
    let pod_of = |policy| pod(json!({"containers": [container("c", "r.example/app:1", policy)]}));
    let sandbox = node.sandbox(&pod_of("Always"));
    let pulls = || node.fake.count("PullImage");
    // An image that existed before is available to every pod.
    node.fake.add_image("r.example/app:1");
    node.start(&pod_of("Never"), &sandbox, "c").unwrap();
    assert_eq!(pulls(), 0);
    // So is an image that was pulled without a secret.
    node.start(&pod_of("Always"), &sandbox, "c").unwrap();
    node.start(&pod_of("Never"), &sandbox, "c").unwrap();
    assert_eq!(pulls(), 1);
    // An image that was pulled with the secret of a pod is not.
    let dir = node.path("root/image_manager/pulled");
    let record = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let text = std::fs::read_to_string(&record).unwrap();
    let secret = r#""kubernetesSecrets":[{"uid":"u","namespace":"n","name":"s","credentialHash":"h"}]"#;
    assert!(text.contains(r#""nodePodsAccessible":true"#), "{text}");
    std::fs::write(&record, text.replace(r#""nodePodsAccessible":true"#, secret)).unwrap();
    let failure = node.start(&pod_of("Never"), &sandbox, "c").unwrap_err();
    assert_eq!(
        (failure.reason, failure.message.as_str()),
        ("ErrImageNeverPull", "Container image \"r.example/app:1\" is not present with pull policy of Never")
    );
    node.fake.fail_times("PullImage", 1, Kind::Unknown, "denied");
    assert_eq!(node.start(&pod_of("IfNotPresent"), &sandbox, "c").unwrap_err().reason, "ErrImagePull");
    let other = json!({"metadata": {"name": "other", "namespace": "ns", "uid": "u2"},
        "spec": {"containers": [container("c", "r.example/app:1", "IfNotPresent")]}});
    let other = Pod::from(serde_json::from_value::<api::Pod>(other).unwrap());
    let sandbox = node.sandbox(&other);
    node.start(&other, &sandbox, "c").unwrap();
    assert_eq!(pulls(), 3);
}
