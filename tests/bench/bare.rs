//! The floor: the calls that every agent has to make, and nothing else.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle::model::ids::{ContainerId, SandboxId};
use coracle::transport::generated::{EnumOrUnknown, MessageField, runtime as rt};
use coracle::util::stop;

use crate::book::{BARE, Book};
use crate::process;
use crate::rounds::{self, GRACE, Plan};
use crate::runtime::{Runtime, millis, now_nanos};
use crate::support::node::FOREVER;
use crate::support::wait::pause;

struct BarePod {
    sandbox: SandboxId,
    sandbox_config: rt::PodSandboxConfig,
    container_config: rt::ContainerConfig,
    container: ContainerId,
}

fn sandbox_config(dir: &Path, name: &str) -> rt::PodSandboxConfig {
    let options = rt::NamespaceOption {
        network: EnumOrUnknown::new(rt::NamespaceMode::NODE),
        pid: EnumOrUnknown::new(rt::NamespaceMode::CONTAINER),
        ..Default::default()
    };
    let security = rt::LinuxSandboxSecurityContext {
        namespace_options: MessageField::some(options),
        ..Default::default()
    };
    rt::PodSandboxConfig {
        metadata: MessageField::some(rt::PodSandboxMetadata {
            name: name.to_owned(),
            uid: name.to_owned(),
            namespace: "default".to_owned(),
            ..Default::default()
        }),
        log_directory: dir.join(name).display().to_string(),
        labels: [("io.kubernetes.pod.name".to_owned(), name.to_owned())].into(),
        linux: MessageField::some(rt::LinuxPodSandboxConfig {
            security_context: MessageField::some(security),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn container_config(dir: &Path, name: &str, attempt: u32) -> rt::ContainerConfig {
    let options = rt::NamespaceOption {
        network: EnumOrUnknown::new(rt::NamespaceMode::NODE),
        pid: EnumOrUnknown::new(rt::NamespaceMode::CONTAINER),
        ..Default::default()
    };
    let security = rt::LinuxContainerSecurityContext {
        namespace_options: MessageField::some(options),
        ..Default::default()
    };
    rt::ContainerConfig {
        metadata: MessageField::some(rt::ContainerMetadata {
            name: "main".to_owned(),
            attempt,
            ..Default::default()
        }),
        image: MessageField::some(rt::ImageSpec {
            image: "localhost/busybox:1".to_owned(),
            ..Default::default()
        }),
        command: ["sh", "-c", FOREVER].map(str::to_owned).into(),
        mounts: vec![rt::Mount {
            container_path: "/data".to_owned(),
            host_path: dir.join(name).join("data").display().to_string(),
            ..Default::default()
        }],
        labels: [("io.kubernetes.pod.name".to_owned(), name.to_owned())].into(),
        log_path: format!("{attempt}.log"),
        linux: MessageField::some(rt::LinuxContainerConfig {
            security_context: MessageField::some(security),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn start(runtime: &Runtime, dir: &Path, name: &str) -> BarePod {
    std::fs::create_dir_all(dir.join(name).join("data")).expect("the volume can be made");
    let sandbox_config = sandbox_config(dir, name);
    let sandbox = runtime.client.run_pod_sandbox(sandbox_config.clone(), "").expect("RunPodSandbox");
    let container_config = container_config(dir, name, 0);
    let container = runtime
        .client
        .create_container(&sandbox, container_config.clone(), &sandbox_config)
        .expect("CreateContainer");
    runtime.client.start_container(&container).expect("StartContainer");
    BarePod { sandbox, sandbox_config, container_config, container }
}

fn stop(runtime: &Runtime, pod: &BarePod) {
    let (_source, token) = stop::pair();
    runtime.client.stop_container(&pod.container, GRACE, &token).expect("StopContainer");
    runtime.client.stop_pod_sandbox(&pod.sandbox).expect("StopPodSandbox");
}

fn remove(runtime: &Runtime, pod: &BarePod) {
    runtime.client.remove_container(&pod.container).expect("RemoveContainer");
    runtime.client.remove_pod_sandbox(&pod.sandbox).expect("RemovePodSandbox");
}

/// Runs `deed` for every number below `count`, `width` at a time.
fn at_once<T: Send>(count: usize, width: usize, deed: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return done;
            }
            done.push(deed(number));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..width).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|one| one.join().expect("a call failed")).collect()
    })
}

/// The time of the last start among what runs now.
fn last_start(runtime: &Runtime) -> i64 {
    runtime.started().iter().map(|one| one.at).max().unwrap_or(0)
}

/// Starts, stops and removes `count` pods, `width` at a time, under the three given names.
/// Gives the time of the start.
fn crowd(
    book: &mut Book,
    runtime: &Runtime,
    dir: &Path,
    (count, width): (usize, usize),
    names: &[String; 3],
) -> f64 {
    let [started, stopped, removed] = names;
    let begun = now_nanos();
    let pods = at_once(count, width, |number| start(runtime, dir, &format!("many{number}")));
    let took = millis(begun, last_start(runtime));
    book.put(BARE, started, "ms", took);
    pause(Duration::from_millis(500));
    let begun = now_nanos();
    at_once(count, width, |number| pods.get(number).map(|pod| stop(runtime, pod)));
    book.put(BARE, stopped, "ms", millis(begun, now_nanos()));
    at_once(count, width, |number| pods.get(number).map(|pod| remove(runtime, pod)));
    book.put(BARE, removed, "ms", millis(begun, now_nanos()));
    took
}

/// One pod, one restart, many pods at several widths.
pub fn measure(book: &mut Book, runtime: &Runtime, base: &Path, plan: &Plan) {
    let dir = base.join("bare");
    for number in 0..plan.singles {
        let name = format!("one{number}");
        let begun = now_nanos();
        let mut pod = start(runtime, &dir, &name);
        book.put(BARE, rounds::ONE_STARTED, "ms", millis(begun, last_start(runtime)));
        // The same container again, as after a death: without the look that finds the death.
        process::kill(runtime.pid(&pod.container));
        runtime.wait_count(0);
        let begun = now_nanos();
        pod.container_config.log_path = "1.log".to_owned();
        pod.container_config.metadata.mut_or_insert_default().attempt = 1;
        let old = pod.container.clone();
        pod.container = runtime
            .client
            .create_container(&pod.sandbox, pod.container_config.clone(), &pod.sandbox_config)
            .expect("CreateContainer");
        runtime.client.start_container(&pod.container).expect("StartContainer");
        book.put(BARE, rounds::RESTARTED, "ms", millis(begun, last_start(runtime)));
        // Until the shell has set its trap, SIGTERM goes by and the grace period runs out.
        pause(Duration::from_millis(500));
        let begun = now_nanos();
        stop(runtime, &pod);
        book.put(BARE, rounds::ONE_STOPPED, "ms", millis(begun, now_nanos()));
        let _ = runtime.client.remove_container(&old);
        remove(runtime, &pod);
    }
    for &count in &plan.crowds {
        let mut best = (f64::INFINITY, 1);
        for width in [1, 2, 4, 8] {
            let names = ["started", "stopped", "removed"]
                .map(|what| format!("{count} pods {what}, bare calls by {width}"));
            let took = crowd(book, runtime, &dir, (count, width), &names);
            if took < best.0 {
                best = (took, width);
            }
        }
        // The best width is the floor; measured again, or its luck would be the floor.
        let names = [rounds::started(count), rounds::stopped(count), rounds::removed(count)];
        for _ in 0..plan.rounds {
            crowd(book, runtime, &dir, (count, best.1), &names);
        }
    }
}
