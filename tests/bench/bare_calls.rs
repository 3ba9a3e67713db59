//! The floor: the calls that every agent has to make, and nothing else. Once with the least that
//! a runtime takes, and once with requests like a kubelet's, for what a sandbox or a container is
//! to be (a seccomp filter, masked paths, mounts, limits) is work for the runtime.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle::model::ids::{ContainerId, SandboxId};
use coracle::runtime::{MASKED_PATHS, READONLY_PATHS};
use coracle::transport::generated::{EnumOrUnknown, MessageField, runtime as rt};
use coracle::util::stop;

use crate::process;
use crate::results::{BARE, Results, SAME};
use crate::rounds::{self, GRACE, Plan};
use crate::runtime::{Runtime, millis, now_nanos};
use crate::support::node::FOREVER;
use crate::support::wait::pause;

/// What the calls ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Requests {
    Least,
    /// As a kubelet's for this pod.
    Kubelets,
}

impl Requests {
    fn subject(self) -> &'static str {
        match self {
            Requests::Least => BARE,
            Requests::Kubelets => SAME,
        }
    }
}

struct BarePod {
    sandbox: SandboxId,
    sandbox_config: rt::PodSandboxConfig,
    container_config: rt::ContainerConfig,
    container: ContainerId,
}

fn sandbox_config(dir: &Path, name: &str, requests: Requests) -> rt::PodSandboxConfig {
    let options = rt::NamespaceOption {
        network: EnumOrUnknown::new(rt::NamespaceMode::NODE),
        pid: EnumOrUnknown::new(rt::NamespaceMode::CONTAINER),
        ..Default::default()
    };
    let security = rt::LinuxSandboxSecurityContext {
        namespace_options: MessageField::some(options),
        ..Default::default()
    };
    let least = rt::PodSandboxConfig {
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
    };
    if requests == Requests::Least { least } else { as_a_kubelets_sandbox(least, name) }
}

fn texts<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn as_a_kubelets_sandbox(mut config: rt::PodSandboxConfig, name: &str) -> rt::PodSandboxConfig {
    config
        .labels
        .extend(texts([("io.kubernetes.pod.namespace", "default"), ("io.kubernetes.pod.uid", name)]));
    config.annotations = texts([
        ("kubernetes.io/config.hash", name),
        ("kubernetes.io/config.seen", "2026-01-01T00:00:00.000000000Z"),
        ("kubernetes.io/config.source", "file"),
    ]);
    config.dns_config = MessageField::some(rt::DNSConfig {
        servers: vec!["198.51.100.1".to_owned()],
        searches: vec!["host.example".to_owned()],
        ..Default::default()
    });
    let linux = config.linux.mut_or_insert_default();
    linux.resources = MessageField::some(least_share());
    linux.overhead = MessageField::some(rt::LinuxContainerResources::default());
    // The runtime's own profile.
    linux.security_context.mut_or_insert_default().seccomp =
        MessageField::some(rt::SecurityProfile::default());
    config
}

/// What a container without requests gets of the processor.
fn least_share() -> rt::LinuxContainerResources {
    rt::LinuxContainerResources { cpu_period: 100_000, cpu_shares: 2, ..Default::default() }
}

fn as_a_kubelets_container(mut config: rt::ContainerConfig, dir: &Path, name: &str) -> rt::ContainerConfig {
    let own = [
        ("io.kubernetes.container.name", "main"),
        ("io.kubernetes.pod.namespace", "default"),
        ("io.kubernetes.pod.uid", name),
    ];
    config.labels.extend(texts(own));
    config.annotations = texts([
        ("io.kubernetes.container.hash", "c97bf8df"),
        ("io.kubernetes.container.restartCount", "0"),
        ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log"),
        ("io.kubernetes.container.terminationMessagePolicy", "File"),
        ("io.kubernetes.pod.terminationGracePeriod", "2"),
    ]);
    for (inside, file) in [("/etc/hosts", "hosts"), ("/dev/termination-log", "termination-log")] {
        config.mounts.push(rt::Mount {
            container_path: inside.to_owned(),
            host_path: dir.join(name).join(file).display().to_string(),
            ..Default::default()
        });
    }
    let linux = config.linux.mut_or_insert_default();
    let hugepage_limits =
        ["2MB", "1GB"].map(|size| rt::HugepageLimit { page_size: size.to_owned(), ..Default::default() });
    linux.resources = MessageField::some(rt::LinuxContainerResources {
        oom_score_adj: 1000,
        hugepage_limits: hugepage_limits.to_vec(),
        ..least_share()
    });
    let security = linux.security_context.mut_or_insert_default();
    security.masked_paths = MASKED_PATHS.map(str::to_owned).to_vec();
    security.readonly_paths = READONLY_PATHS.map(str::to_owned).to_vec();
    security.run_as_user = MessageField::some(rt::Int64Value::default());
    security.seccomp = MessageField::some(rt::SecurityProfile {
        profile_type: rt::security_profile::ProfileType::Unconfined.into(),
        ..Default::default()
    });
    config
}

fn container_config(dir: &Path, name: &str, requests: Requests) -> rt::ContainerConfig {
    let options = rt::NamespaceOption {
        network: EnumOrUnknown::new(rt::NamespaceMode::NODE),
        pid: EnumOrUnknown::new(rt::NamespaceMode::CONTAINER),
        ..Default::default()
    };
    let security = rt::LinuxContainerSecurityContext {
        namespace_options: MessageField::some(options),
        ..Default::default()
    };
    let least = rt::ContainerConfig {
        metadata: MessageField::some(rt::ContainerMetadata { name: "main".to_owned(), ..Default::default() }),
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
        log_path: "0.log".to_owned(),
        linux: MessageField::some(rt::LinuxContainerConfig {
            security_context: MessageField::some(security),
            ..Default::default()
        }),
        ..Default::default()
    };
    if requests == Requests::Least { least } else { as_a_kubelets_container(least, dir, name) }
}

fn start(runtime: &Runtime, dir: &Path, name: &str, requests: Requests) -> BarePod {
    std::fs::create_dir_all(dir.join(name).join("data")).expect("the volume can be made");
    if requests == Requests::Kubelets {
        for file in ["hosts", "termination-log"] {
            std::fs::write(dir.join(name).join(file), "").expect("the file can be made");
        }
    }
    let mut sandbox_config = sandbox_config(dir, name, requests);
    if requests == Requests::Kubelets {
        let cgroup = cgroup(name);
        for made in runtime.cgroups.make_child(&cgroup) {
            // Where the hierarchy has the file: the least weight, as of a pod without requests.
            for (file, value) in [("cpu.shares", "2"), ("cpu.weight", "1")] {
                if made.join(file).exists() {
                    std::fs::write(made.join(file), value).expect("the weight can be set");
                }
            }
        }
        sandbox_config.linux.mut_or_insert_default().cgroup_parent =
            format!("{}/{cgroup}", runtime.cgroups.path());
    }
    let sandbox = runtime.client.run_pod_sandbox(sandbox_config.clone(), "").expect("RunPodSandbox");
    let container_config = container_config(dir, name, requests);
    let container = runtime
        .client
        .create_container(&sandbox, container_config.clone(), &sandbox_config)
        .expect("CreateContainer");
    runtime.client.start_container(&container).expect("StartContainer");
    BarePod { sandbox, sandbox_config, container_config, container }
}

/// The cgroup of a pod in the place of an agent's.
fn cgroup(name: &str) -> String {
    format!("bare/pod{name}")
}

fn stop(runtime: &Runtime, pod: &BarePod) {
    let (_source, token) = stop::pair();
    runtime.client.stop_container(&pod.container, GRACE, &token).expect("StopContainer");
    runtime.client.stop_pod_sandbox(&pod.sandbox).expect("StopPodSandbox");
}

fn remove(runtime: &Runtime, pod: &BarePod) {
    runtime.client.remove_container(&pod.container).expect("RemoveContainer");
    runtime.client.remove_pod_sandbox(&pod.sandbox).expect("RemovePodSandbox");
    // An agent removes the cgroup when the pod has ended.
    if !pod.sandbox_config.linux.cgroup_parent.is_empty() {
        runtime.cgroups.remove_child(&cgroup(&pod.sandbox_config.metadata.name));
    }
}

/// Runs `operation` for every number below `count`, `width` at a time.
fn in_parallel<T: Send>(count: usize, width: usize, operation: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return done;
            }
            done.push(operation(number));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..width).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a call failed")).collect()
    })
}

/// The time of the last start among what runs now.
fn last_start(runtime: &Runtime) -> i64 {
    runtime.started().iter().map(|container| container.started_at).max().unwrap_or(0)
}

/// Starts, stops and removes `count` pods, `width` at a time, under the three given names.
/// Gives the time of the start.
fn many_pods(
    results: &mut Results,
    runtime: &Runtime,
    dir: &Path,
    (count, width): (usize, usize),
    requests: Requests,
    names: &[String; 3],
) -> f64 {
    let subject = requests.subject();
    let [started, stopped, removed] = names;
    let begun = now_nanos();
    let pods = in_parallel(count, width, |number| start(runtime, dir, &format!("many{number}"), requests));
    let took = millis(begun, last_start(runtime));
    results.put(subject, started, "ms", took);
    pause(Duration::from_millis(500));
    let begun = now_nanos();
    in_parallel(count, width, |number| pods.get(number).map(|pod| stop(runtime, pod)));
    results.put(subject, stopped, "ms", millis(begun, now_nanos()));
    in_parallel(count, width, |number| pods.get(number).map(|pod| remove(runtime, pod)));
    results.put(subject, removed, "ms", millis(begun, now_nanos()));
    took
}

/// One pod, and a restart of its container.
fn single(results: &mut Results, runtime: &Runtime, dir: &Path, number: usize, requests: Requests) {
    let subject = requests.subject();
    let name = format!("one{number}");
    let begun = now_nanos();
    let mut pod = start(runtime, dir, &name, requests);
    results.put(subject, rounds::ONE_STARTED, "ms", millis(begun, last_start(runtime)));
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
    results.put(subject, rounds::RESTARTED, "ms", millis(begun, last_start(runtime)));
    // Until the shell has set its trap, SIGTERM goes by and the grace period runs out.
    pause(Duration::from_millis(500));
    let begun = now_nanos();
    stop(runtime, &pod);
    results.put(subject, rounds::ONE_STOPPED, "ms", millis(begun, now_nanos()));
    let _ = runtime.client.remove_container(&old);
    remove(runtime, &pod);
}

/// One pod, one restart, many pods at several widths.
pub fn measure(results: &mut Results, runtime: &Runtime, base: &Path, plan: &Plan) {
    let dir = base.join("bare");
    for number in 0..plan.singles {
        single(results, runtime, &dir, number, Requests::Least);
        single(results, runtime, &dir, number, Requests::Kubelets);
    }
    for &count in &plan.pod_counts {
        let best = [Requests::Least, Requests::Kubelets].map(|requests| {
            let took = [1, 2, 4, 8].map(|width| {
                let names = ["started", "stopped", "removed"]
                    .map(|what| format!("{count} pods {what}, bare calls by {width}"));
                (many_pods(results, runtime, &dir, (count, width), requests, &names), width)
            });
            let best = took.into_iter().min_by(|left, right| left.0.total_cmp(&right.0));
            (requests, best.map_or(1, |best| best.1))
        });
        // The best width is the floor; measured again, or its luck would be the floor.
        let names = [rounds::started(count), rounds::stopped(count), rounds::removed(count)];
        for round in 0..plan.rounds {
            // A machine that becomes slower must not always do it to the same ones.
            for turn in 0..best.len() {
                let Some((requests, width)) = best.get((round + turn) % best.len()) else { continue };
                many_pods(results, runtime, &dir, (count, *width), *requests, &names);
            }
        }
    }
}
