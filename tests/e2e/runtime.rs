//! CRI calls without an agent on a real containerd: the clients of `cri`, and the set-up of all
//! other tests.

use std::path::Path;
use std::time::{Duration, Instant};

use coracle::cri::{self, Settings};
use coracle::transport::generated::{MessageField, runtime as rt};
use coracle::util::stop;

use crate::support::containerd::Containerd;
use crate::support::node::{FOREVER, LONG};
use crate::support::wait::wait_until;

// Runtimes: containerd 1, containerd 2.
#[test]
fn cri_calls_run_a_pod_on_containerd() {
    let base = std::env::var("E2E_DIR").expect("the end-to-end tests run through: tests/run e2e");
    let dir = Path::new(&base).join("bare");
    std::fs::create_dir_all(dir.join("logs")).expect("the directory can be made");
    let containerd = Containerd::start(&dir);
    let (runtime, images) = cri::connect(Settings {
        runtime_endpoint: containerd.endpoint(),
        image_endpoint: None,
        request_timeout: Duration::from_secs(60),
    })
    .expect("a local endpoint");
    let version = runtime.version().expect("Version");
    println!("{version:?}");
    let status = runtime.status().expect("Status");
    assert_eq!(status.ready, Ok(()));
    assert_eq!(status.network_ready, Ok(()));
    // The CRI plugin lists each imported image a moment after its import.
    wait_until("the images", LONG, || {
        let images = images.list_images().expect("ListImages");
        let names: Vec<String> = images.into_iter().flat_map(|image| image.repo_tags).collect();
        ["localhost/busybox:1", "localhost/pause:1"]
            .iter()
            .all(|wanted| names.iter().any(|name| name == wanted))
    });

    let sandbox_config = rt::PodSandboxConfig {
        metadata: MessageField::some(rt::PodSandboxMetadata {
            name: "bare".to_owned(),
            uid: "0123".to_owned(),
            namespace: "default".to_owned(),
            ..Default::default()
        }),
        hostname: "bare".to_owned(),
        log_directory: dir.join("logs").display().to_string(),
        linux: MessageField::some(rt::LinuxPodSandboxConfig::default()),
        ..Default::default()
    };
    let begun = Instant::now();
    let sandbox = runtime.run_pod_sandbox(sandbox_config.clone(), "").expect("RunPodSandbox");
    let container_config = rt::ContainerConfig {
        metadata: MessageField::some(rt::ContainerMetadata { name: "main".to_owned(), ..Default::default() }),
        image: MessageField::some(rt::ImageSpec {
            image: "localhost/busybox:1".to_owned(),
            ..Default::default()
        }),
        command: ["sh", "-c", FOREVER].map(str::to_owned).into(),
        log_path: "main.log".to_owned(),
        linux: MessageField::some(rt::LinuxContainerConfig::default()),
        ..Default::default()
    };
    let container =
        runtime.create_container(&sandbox, container_config, &sandbox_config).expect("CreateContainer");
    runtime.start_container(&container).expect("StartContainer");
    println!("bare calls: started after {:?}", begun.elapsed());

    let network = runtime.pod_sandbox_status(&sandbox).expect("PodSandboxStatus").network;
    assert!(network.ip.starts_with("10.213."), "an address of the private bridge: {}", network.ip);
    let (_source, token) = stop::pair();
    let command = ["sh", "-c", "hostname; id -u; exit 4"].map(str::to_owned).into();
    let output = runtime.exec_sync(&container, command, LONG, &token).expect("ExecSync");
    assert_eq!((output.stdout.as_slice(), output.exit_code), (b"bare\n0\n".as_slice(), 4));

    let pods = cri::list_pods(&runtime, None).expect("lists");
    println!("{pods:?}");
    let status = runtime.container_status(&container).expect("ContainerStatus");
    assert_eq!(status.state.enum_value_or_default(), rt::ContainerState::CONTAINER_RUNNING);
    runtime.stop_container(&container, Duration::from_secs(5), &token).expect("StopContainer");
    runtime.remove_container(&container).expect("RemoveContainer");
    runtime.stop_pod_sandbox(&sandbox).expect("StopPodSandbox");
    runtime.remove_pod_sandbox(&sandbox).expect("RemovePodSandbox");
    wait_until("no task", LONG, || containerd.tasks().is_empty());
    wait_until("no record", LONG, || containerd.record_ids().is_empty());
}
