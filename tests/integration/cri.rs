//! The clients of `cri` against the fake runtime.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use coracle::cri::{self, CgroupDriver, ErrorClass, RuntimeClient};
use coracle::model::ids::{ContainerId, PodUid, SandboxId};
use coracle::model::metrics;
use coracle::model::runtime::{ContainerState, SandboxState};
use coracle::transport::generated::{MessageField, runtime as rt};
use coracle::transport::grpc::Kind;
use coracle::util::metrics::Page;
use coracle::util::stop::{self, StopToken};
use coracle::util::threads::{OnDeath, Stack, spawn};
use serde_json::json;

use crate::support::fake_cri::{BUSYBOX, BUSYBOX_ID, FakeCri};

const LONG: Duration = Duration::from_secs(60);

fn pod_labels(uid: &str) -> BTreeMap<String, String> {
    [
        ("io.kubernetes.pod.name", format!("pod-{uid}")),
        ("io.kubernetes.pod.namespace", "default".to_owned()),
        ("io.kubernetes.pod.uid", uid.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn sandbox_config(uid: &str, attempt: u32) -> rt::PodSandboxConfig {
    rt::PodSandboxConfig {
        metadata: MessageField::some(rt::PodSandboxMetadata {
            name: format!("pod-{uid}"),
            uid: uid.to_owned(),
            namespace: "default".to_owned(),
            attempt,
            ..Default::default()
        }),
        labels: pod_labels(uid),
        ..Default::default()
    }
}

fn container_config(uid: &str, name: &str, command: &str) -> rt::ContainerConfig {
    let mut labels = pod_labels(uid);
    labels.insert("io.kubernetes.container.name".to_owned(), name.to_owned());
    rt::ContainerConfig {
        metadata: MessageField::some(rt::ContainerMetadata { name: name.to_owned(), ..Default::default() }),
        image: MessageField::some(rt::ImageSpec { image: BUSYBOX.to_owned(), ..Default::default() }),
        command: ["sh", "-c", command].map(str::to_owned).into(),
        labels,
        annotations: [
            ("io.kubernetes.container.hash", "c97bf8df"),
            ("io.kubernetes.container.restartCount", "3"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into(),
        ..Default::default()
    }
}

/// A sandbox with one started container.
fn run(client: &RuntimeClient, uid: &str, command: &str) -> (SandboxId, ContainerId) {
    let config = sandbox_config(uid, 0);
    let sandbox = client.run_pod_sandbox(config.clone(), "").unwrap();
    let container =
        client.create_container(&sandbox, container_config(uid, "main", command), &config).unwrap();
    client.start_container(&container).unwrap();
    (sandbox, container)
}

#[test]
fn every_runtime_call_reaches_the_runtime() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();

    let version = client.version().unwrap();
    assert_eq!((&*version.runtime_name, &*version.runtime_api_version), ("containerd", "v1"));
    assert_eq!(client.cgroup_driver().unwrap(), Some(CgroupDriver::Cgroupfs));
    client.update_runtime_config("10.88.0.0/24").unwrap();

    let (sandbox, container) = run(&client, "u1", "trap exit TERM; while :; do sleep 1; done");
    let listed = cri::list_pods(&client, None).unwrap();
    let pod = cri::inspect_pod(&client, &listed[&PodUid::from("u1")]).unwrap();
    assert_eq!((&*pod.name, &*pod.namespace), ("pod-u1", "default"));
    assert_eq!(pod.sandboxes.len(), 1);
    assert_eq!((&pod.sandboxes[0].id, pod.sandboxes[0].state), (&sandbox, SandboxState::Ready));
    assert_eq!(pod.ips, pod.sandboxes[0].ips);
    assert_eq!(pod.ips.len(), 1);
    let main = pod.newest("main").unwrap();
    assert_eq!((&main.id, main.state, &main.sandbox_id), (&container, ContainerState::Running, &sandbox));
    assert_eq!((main.hash, main.restart_count), (Some(0xc97b_f8df), 3));
    assert_eq!((&*main.image, main.image_id.as_str()), (BUSYBOX, BUSYBOX_ID));
    assert!(main.started_at.is_some() && main.finished_at.is_none());

    fake.on_exec(|name, command| {
        (7, format!("{name}: {}", command.join(" ")).into_bytes(), b"oops".to_vec())
    });
    let never = StopToken::never();
    let output =
        client.exec_sync(&container, vec!["ls".into(), "/".into()], Duration::from_secs(1), &never).unwrap();
    assert_eq!((output.exit_code, &*output.stdout, &*output.stderr), (7, &b"main: ls /"[..], &b"oops"[..]));
    client.reopen_container_log(&container).unwrap();
    let resources = rt::LinuxContainerResources { cpu_shares: 512, ..Default::default() };
    client.update_container_resources(&container, resources).unwrap();
    let status = client.container_status(&container).unwrap();
    assert_eq!(status.resources.linux.cpu_shares, 512);

    client.stop_container(&container, Duration::from_secs(2), &never).unwrap();
    let pod = cri::inspect_pod(&client, &listed[&PodUid::from("u1")]).unwrap();
    let main = pod.newest("main").unwrap();
    assert_eq!((main.state, main.exit_code, &*main.reason), (ContainerState::Exited, 0, "Completed"));
    assert!(main.finished_at >= main.started_at);
    client.remove_container(&container).unwrap();
    client.stop_pod_sandbox(&sandbox).unwrap();
    client.stop_pod_sandbox(&sandbox).unwrap();
    assert_eq!(
        client.pod_sandbox_status(&sandbox).unwrap().state,
        rt::PodSandboxState::SANDBOX_NOTREADY.into()
    );
    client.remove_pod_sandbox(&sandbox).unwrap();
    assert!(cri::list_pods(&client, None).unwrap().is_empty());
    // The older list still has them: objects that vanished are left out.
    let pod = cri::inspect_pod(&client, &listed[&PodUid::from("u1")]).unwrap();
    assert!(pod.sandboxes.is_empty() && pod.containers.is_empty());

    assert_eq!(
        fake.calls(),
        [
            "UpdateRuntimeConfig",
            "RunPodSandbox",
            "CreateContainer",
            "StartContainer",
            "ExecSync",
            "ReopenContainerLog",
            "UpdateContainerResources",
            "StopContainer",
            "RemoveContainer",
            "StopPodSandbox",
            "StopPodSandbox",
            "RemovePodSandbox",
        ]
    );
    assert_eq!(fake.journal()[7].request, json!({"container_id": container.as_str(), "timeout": "2"}));
    let exec = &fake.journal()[4].request;
    assert_eq!(*exec, json!({"container_id": container.as_str(), "cmd": ["ls", "/"], "timeout": "1"}));
}

#[test]
fn every_image_call_reaches_the_runtime() {
    let fake = FakeCri::start();
    let (_, client) = fake.connect();
    let named = |name: &str| rt::ImageSpec { image: name.to_owned(), ..Default::default() };
    assert_eq!(client.image_status(named(BUSYBOX)).unwrap().unwrap().id, BUSYBOX_ID);
    assert_eq!(client.image_status(named("example.org/app:1")).unwrap(), None);
    let auth = rt::AuthConfig { username: "me".into(), ..Default::default() };
    let config = sandbox_config("u1", 0);
    let never = StopToken::never();
    let pulled =
        client.pull_image(named("example.org/app:1"), Some(auth), Some(&config), None, &never).unwrap();
    assert_eq!(client.image_status(named("example.org/app:1")).unwrap().unwrap().id, pulled.as_str());
    assert_eq!(client.list_images().unwrap().len(), 2);
    client.remove_image(named(pulled.as_str())).unwrap();
    client.remove_image(named(pulled.as_str())).unwrap();
    assert_eq!(client.list_images().unwrap().len(), 1);
    assert_eq!(client.image_fs_info().unwrap().image_filesystems.len(), 1);
    let error = client.pull_image(named("example.org/missing:1"), None, None, None, &never).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Gone);
    assert!(error.to_string().starts_with("rpc error: code = NotFound desc = failed to pull"), "{error}");
    assert_eq!(error.object(), "example.org/missing:1");
}

#[test]
fn status_has_unready_conditions_and_handler_features() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    let status = client.status().unwrap();
    assert_eq!((status.ready, status.network_ready), (Ok(()), Ok(())));
    assert!(status.features.unwrap().supplemental_groups_policy);

    fake.set_condition("NetworkReady", false, "NetworkPluginNotReady", "cni plugin not initialized");
    let handler = |name: &str, user_namespaces| rt::RuntimeHandler {
        name: name.to_owned(),
        features: MessageField::some(rt::RuntimeHandlerFeatures { user_namespaces, ..Default::default() }),
        ..Default::default()
    };
    fake.with_state(|state| state.handlers = vec![handler("runc", true), handler("", false)]);
    let status = client.status().unwrap();
    assert_eq!(
        status.network_ready.as_ref().unwrap_err().to_string(),
        "NetworkReady=false reason:NetworkPluginNotReady message:cni plugin not initialized"
    );
    assert!(status.handler("runc").unwrap().user_namespaces);
    assert!(!status.handler("").unwrap().user_namespaces);
    assert_eq!(status.handler("kata"), None);

    fake.with_state(|state| state.conditions.remove("RuntimeReady"));
    let error = client.status().unwrap_err();
    assert_eq!((error.class(), error.kind()), (ErrorClass::Retry, None));
}

#[test]
fn error_codes_and_messages_are_preserved() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    let id = ContainerId::from("c1");
    for (kind, name) in [
        (Kind::Cancelled, "Canceled"),
        (Kind::Unknown, "Unknown"),
        (Kind::InvalidArgument, "InvalidArgument"),
        (Kind::DeadlineExceeded, "DeadlineExceeded"),
        (Kind::NotFound, "NotFound"),
        (Kind::AlreadyExists, "AlreadyExists"),
        (Kind::PermissionDenied, "PermissionDenied"),
        (Kind::ResourceExhausted, "ResourceExhausted"),
        (Kind::FailedPrecondition, "FailedPrecondition"),
        (Kind::Aborted, "Aborted"),
        (Kind::OutOfRange, "OutOfRange"),
        (Kind::Unimplemented, "Unimplemented"),
        (Kind::Internal, "Internal"),
        (Kind::Unavailable, "Unavailable"),
        (Kind::DataLoss, "DataLoss"),
        (Kind::Unauthenticated, "Unauthenticated"),
    ] {
        fake.fail_times("StartContainer", 1, kind, "the \"runtime\" says so: 100%");
        let error = client.start_container(&id).unwrap_err();
        assert_eq!(error.kind(), Some(kind));
        assert_eq!(
            error.to_string(),
            format!("rpc error: code = {name} desc = the \"runtime\" says so: 100%")
        );
        assert_eq!(error.desc(), "the \"runtime\" says so: 100%");
        assert_eq!((error.method(), error.object()), ("StartContainer", "c1"));
    }
    // Misbehavior is over after the stated number of calls.
    assert!(client.start_container(&id).unwrap_err().is_not_found());
}

#[test]
fn a_runtime_without_its_configuration_is_shown_in_the_metrics() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    fake.fail("RuntimeConfig", Kind::Unimplemented, "unknown method");
    for _ in 0..2 {
        assert_eq!(client.cgroup_driver().unwrap_err().class(), ErrorClass::Unsupported);
    }
    let mut page = Page::new();
    page.add(metrics::ALL);
    let page = page.into_text();
    assert!(page.contains("kubelet_cri_losing_support{version=\"1.38.0\"} 1\n"), "{page}");
}

#[test]
fn failed_start_reports_the_reason_of_the_runtime() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    let config = sandbox_config("u1", 0);
    let sandbox = client.run_pod_sandbox(config.clone(), "").unwrap();
    let bad =
        rt::ContainerConfig { command: vec!["/no/such/binary".into()], ..container_config("u1", "main", "") };
    let container = client.create_container(&sandbox, bad, &config).unwrap();
    let error = client.start_container(&container).unwrap_err();
    assert!(error.desc().starts_with("failed to create containerd task: "), "{}", error.desc());
    let pods = cri::list_pods(&client, Some(&PodUid::from("u1"))).unwrap();
    let pod = cri::inspect_pod(&client, &pods[&PodUid::from("u1")]).unwrap();
    let main = pod.newest("main").unwrap();
    assert_eq!((main.exit_code, &*main.reason, main.started_at), (128, "StartError", None));
    assert_eq!(main.message, error.desc());
    assert_eq!(fake.journal().last().unwrap().error.as_ref().unwrap().message, error.desc());
}

#[test]
fn lists_filter_by_pod_and_are_newest_first() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    let (old, _) = run(&client, "u1", "exit 3");
    run(&client, "u2", "sleep 1000");
    fake.kill_sandbox(old.as_str());
    let new = client.run_pod_sandbox(sandbox_config("u1", 1), "").unwrap();
    // The sandbox of another client.
    client
        .run_pod_sandbox(rt::PodSandboxConfig { labels: BTreeMap::new(), ..sandbox_config("u3", 0) }, "")
        .unwrap();

    let all = cri::list_pods(&client, None).unwrap();
    assert_eq!(all.keys().map(PodUid::as_str).collect::<Vec<_>>(), ["u1", "u2"]);
    let uid = PodUid::from("u1");
    let filtered = cri::list_pods(&client, Some(&uid)).unwrap();
    assert_eq!(filtered.len(), 1);
    assert_eq!(filtered[&uid], all[&uid]);
    assert_eq!(
        filtered[&uid].sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect::<Vec<_>>(),
        [new.clone(), old]
    );

    fake.clear_journal();
    let pod = cri::inspect_pod(&client, &filtered[&uid]).unwrap();
    assert_eq!(pod.newest_sandbox().unwrap().id, new);
    assert_eq!(pod.ips, pod.newest_sandbox().unwrap().ips);
    assert_eq!(pod.newest("main").unwrap().exit_code, 3);
    // The old, stopped sandbox costs no call of its own.
    assert_eq!((fake.count("PodSandboxStatus"), fake.count("ContainerStatus")), (1, 1));

    // Any other error than "gone" fails the whole inspection.
    fake.fail("ContainerStatus", Kind::Unavailable, "busy");
    assert_eq!(cri::inspect_pod(&client, &filtered[&uid]).unwrap_err().kind(), Some(Kind::Unavailable));
}

#[test]
fn call_ends_at_its_deadline() {
    let fake = FakeCri::start();
    let settings = cri::Settings { request_timeout: Duration::from_millis(200), ..fake.settings() };
    let (client, _) = cri::connect(settings).unwrap();
    let _gate = fake.hang("StartContainer");
    let start = Instant::now();
    let error = client.start_container(&ContainerId::from("c1")).unwrap_err();
    assert_eq!(error.to_string(), "rpc error: code = DeadlineExceeded desc = context deadline exceeded");
    assert_eq!(error.class(), ErrorClass::Retry);
    assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < LONG);

    // A StopContainer call may take longer by the grace period.
    fake.delay("StopContainer", Duration::from_millis(300));
    client.stop_container(&ContainerId::from("c1"), LONG, &StopToken::never()).unwrap();
    // A sandbox may take twice as long. A busy machine adds to its second beyond the limit.
    let settings = cri::Settings { request_timeout: Duration::from_secs(9), ..fake.settings() };
    let (client, _) = cri::connect(settings).unwrap();
    fake.delay("RunPodSandbox", Duration::from_secs(10));
    client.run_pod_sandbox(sandbox_config("u1", 0), "").unwrap();
}

#[test]
fn stop_cancels_a_hanging_call() {
    let fake = FakeCri::start();
    let (client, images) = fake.connect();
    let (_, container) = run(&client, "u1", "sleep 1000");
    type Verb = Box<dyn FnOnce(&StopToken) -> Result<(), cri::CriError> + Send>;
    let (stopping, executing, waiting) = (client.clone(), client.clone(), client.clone());
    let (stopped, executed, waited) = (container.clone(), container.clone(), container.clone());
    let verbs: [(&str, Verb); 4] = [
        ("StopContainer", Box::new(move |stop| stopping.stop_container(&stopped, LONG, stop))),
        (
            "ExecSync",
            Box::new(move |stop| {
                executing.exec_sync(&executed, vec!["true".into()], Duration::ZERO, stop).map(drop)
            }),
        ),
        (
            "PullImage",
            Box::new(move |stop| {
                images.pull_image(rt::ImageSpec::default(), None, None, None, stop).map(drop)
            }),
        ),
        ("RemoveContainer", Box::new(move |stop| waiting.with_stop(stop.clone()).remove_container(&waited))),
    ];
    for (method, verb) in verbs {
        let gate = fake.hang(method);
        let (source, token) = stop::pair();
        let (tx, rx) = mpsc::channel();
        let _running = spawn("t/hang", Stack::Small, OnDeath::Unsupervised, move |_| {
            let _ = tx.send(verb(&token));
        })
        .unwrap();
        fake.wait_until("the call hangs", |_| gate.waiting() == 1);
        assert!(rx.try_recv().is_err(), "{method}");
        drop(source);
        let error = rx.recv_timeout(LONG).unwrap().unwrap_err();
        assert_eq!((error.class(), error.method()), (ErrorClass::Stopping, method));
        fake.behave(method);
    }
    // A stop token that is already stopped ends a call before it starts.
    let (source, token) = stop::pair();
    drop(source);
    let before = fake.count("StopContainer");
    let error = client.stop_container(&container, LONG, &token).unwrap_err();
    assert_eq!((error.class(), fake.count("StopContainer")), (ErrorClass::Stopping, before));
}

#[test]
fn connection_recovers_after_a_runtime_restart() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    let (_, container) = run(&client, "u1", "sleep 1000");
    fake.go_down();
    let error = client.version().unwrap_err();
    assert_eq!((error.kind(), error.class()), (Some(Kind::Unavailable), ErrorClass::Retry));
    // Long enough for the dial back-off to grow.
    let start = Instant::now();
    fake.wait_until("two seconds are over", |_| {
        assert!(client.version().is_err());
        start.elapsed() > Duration::from_secs(2)
    });
    fake.go_up();
    let start = Instant::now();
    fake.wait_until("the runtime answers", |_| client.version().is_ok());
    // The back-off is 3 s at most, with some jitter; the rest is for a busy machine.
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
    assert_eq!(client.container_status(&container).unwrap().id, container.as_str());

    // A call that is open when the server ends fails at once.
    let gate = fake.hang("ExecSync");
    let (tx, rx) = mpsc::channel();
    let caller = client.clone();
    let _running = spawn("t/open", Stack::Small, OnDeath::Unsupervised, move |_| {
        let _ = tx.send(caller.exec_sync(&container, vec!["true".into()], LONG, &StopToken::never()));
    })
    .unwrap();
    fake.wait_until("the call hangs", |_| gate.waiting() == 1);
    fake.restart();
    let error = rx.recv_timeout(LONG).unwrap().unwrap_err();
    assert_eq!(error.class(), ErrorClass::Retry, "{error}");
}

#[test]
fn client_starts_while_the_runtime_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let settings = |endpoint: &str| cri::Settings {
        runtime_endpoint: endpoint.to_owned(),
        image_endpoint: None,
        request_timeout: Duration::from_secs(5),
    };
    let (client, images) =
        cri::connect(settings(&format!("unix://{}/no.sock", dir.path().display()))).unwrap();
    assert_eq!(client.version().unwrap_err().kind(), Some(Kind::Unavailable));
    assert_eq!(images.list_images().unwrap_err().kind(), Some(Kind::Unavailable));
    let error = cri::connect(settings("npipe:////./pipe/x")).err().unwrap();
    assert_eq!(error.to_string(), "containerRuntimeEndpoint");
}

#[test]
fn image_service_may_have_its_own_endpoint() {
    let (runtime, images) = (FakeCri::start(), FakeCri::start());
    let settings = cri::Settings { image_endpoint: Some(images.endpoint()), ..runtime.settings() };
    let (client, image_client) = cri::connect(settings).unwrap();
    client.version().unwrap();
    image_client.list_images().unwrap();
    assert_eq!((runtime.count("Version"), runtime.count("ListImages")), (1, 0));
    assert_eq!((images.count("Version"), images.count("ListImages")), (0, 1));
}

#[test]
fn five_hundred_pods_need_two_list_calls() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    for number in 0..500 {
        let uid = format!("{number:032x}");
        let config = sandbox_config(&uid, 0);
        let sandbox = client.run_pod_sandbox(config.clone(), "").unwrap();
        for name in ["main", "side"] {
            let id = client
                .create_container(&sandbox, container_config(&uid, name, "sleep 1000"), &config)
                .unwrap();
            client.start_container(&id).unwrap();
        }
    }
    fake.clear_journal();
    let pods = cri::list_pods(&client, None).unwrap();
    assert_eq!(pods.len(), 500);
    assert!(pods.values().all(|pod| pod.is_running() && pod.containers.len() == 2));
    assert_eq!(fake.counts(), BTreeMap::from([("ListContainers", 1), ("ListPodSandbox", 1)]));
}

#[test]
fn events_arrive_as_they_happen_until_the_stream_ends() {
    let fake = FakeCri::start();
    let (client, _) = fake.connect();
    let never = StopToken::never();
    let mut events = client.container_events().unwrap();
    fake.wait_until("the stream is open", |fake| fake.listeners() == 1);
    let (sandbox, container) = run(&client, "u1", "sleep 1000");
    fake.kill_container(container.as_str(), 9);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let event = events.next(&never).unwrap().unwrap();
        assert!(event.sandbox_known && event.made_at.is_some());
        seen.push((event.id, event.uid.unwrap().to_string()));
    }
    let ids = [sandbox.as_str(), container.as_str(), container.as_str(), container.as_str()];
    assert_eq!(seen, ids.map(|id| (id.to_owned(), "u1".to_owned())));
    // An event of a removed container has no sandbox.
    client.remove_pod_sandbox(&sandbox).unwrap();
    for (id, known) in [(container.as_str(), true), (sandbox.as_str(), false)] {
        let event = events.next(&never).unwrap().unwrap();
        assert_eq!((event.id.as_str(), event.uid.is_some(), event.sandbox_known), (id, known, known));
    }
    fake.end_event_streams();
    assert_eq!(events.next(&never).unwrap(), None);

    // A stop ends the wait, a restart of the runtime breaks the stream.
    let mut events = client.container_events().unwrap();
    fake.wait_until("the stream is open", |fake| fake.listeners() == 1);
    let (source, token) = stop::pair();
    let (tx, rx) = mpsc::channel();
    let _running = spawn("t/events", Stack::Small, OnDeath::Unsupervised, move |_| {
        let _ = tx.send(events.next(&token));
    })
    .unwrap();
    drop(source);
    let error = rx.recv_timeout(LONG).unwrap().unwrap_err();
    assert_eq!(error.class(), ErrorClass::Stopping);
    let mut events = client.container_events().unwrap();
    fake.wait_until("the stream is open", |fake| fake.count("GetContainerEvents") == 3);
    fake.restart();
    assert_eq!(events.next(&never).unwrap_err().class(), ErrorClass::Retry);
    // A client that dials without a listener waits before it dials again.
    fake.wait_until("the runtime answers", |_| client.version().is_ok());

    // An older runtime does not offer it.
    fake.fail("GetContainerEvents", Kind::Unimplemented, "unknown method");
    let mut events = client.container_events().unwrap();
    assert_eq!(events.next(&never).unwrap_err().class(), ErrorClass::Unsupported);
}
