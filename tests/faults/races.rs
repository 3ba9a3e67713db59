//! Two threads that handle one pod at the same time: stale knowledge of one must not damage the work
//! of the other.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::simple;
use crate::support::random::{Random, random_seed};
use crate::support::wait::{holds_for, pause, wait_for, wait_until};
use crate::{RICH, in_parallel, print_line, rich};

/// The directory of the pod's volume on disk.
fn disk(node: &FakeNode, name: &str) -> PathBuf {
    let uid = wait_for("the pod's UID", LONG, || node.pod(name)?.metadata.uid);
    node.root().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/disk")
}

/// The cleaner hangs in a call for a finished pod, and the same pod, with the same UID, is added
/// again: when the call ends, the rest of the cleaner's round must not touch the new incarnation.
#[test]
fn pod_readded_during_its_cleanup_is_not_damaged() {
    in_parallel(&["RemoveContainer", "RemovePodSandbox"], |method| {
        let node = FakeNode::start();
        node.fake.write_logs();
        node.apply(&rich("web"));
        node.assert_runs_once("web", &RICH);
        let gate = node.fake.hang_next(method);
        node.remove("web");
        wait_until(&format!("{method} to hang"), LONG, || gate.waiting() > 0);
        node.apply(&rich("web"));
        // Either it starts during the hanging call, or it waits for it.
        wait_until("the pod to be listed", LONG, || node.pod("web").is_some());
        let early = Instant::now();
        while node.running("web").len() < RICH.len() && early.elapsed() < Duration::from_secs(3) {
            pause(Duration::from_millis(20));
        }
        gate.open();
        node.assert_runs_once("web", &RICH);
        let precious = disk(&node, "web").join("precious");
        fs::write(&precious, "x").unwrap();
        let before = node.running("web");
        let logs: Vec<PathBuf> = node
            .containers("web")
            .into_iter()
            .filter(|container| container.is_running())
            .map(|container| container.status.log_path.into())
            .collect();
        // More rounds of the cleaner.
        node.apply(&simple("other"));
        node.assert_runs_once("other", &["main"]);
        node.remove("other");
        wait_until("another round of the cleaner", LONG, || node.containers("other").is_empty());
        holds_for("the pod and its files stay", Duration::from_secs(1), || {
            node.assert_no_duplicates();
            node.running("web") == before && precious.exists() && logs.iter().all(|log| log.exists())
        });
        node.finish();
    });
}

/// Pods are added and removed and die at random, while every list is so slow that it is out of date
/// when it arrives, and the agent is killed now and then.
#[test]
fn random_pod_changes_on_a_slow_runtime_converge() {
    const PODS: u64 = 8;
    let seed = match std::env::var("FAULTS_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => random_seed(),
    };
    print_line(&format!("random lives: FAULTS_SEED={seed}"));
    let mut random = Random::new(seed);
    let mut node = FakeNode::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    node.fake.write_logs();
    for method in ["ListPodSandbox", "ListContainers", "RemoveContainer", "StopContainer", "RunPodSandbox"] {
        node.fake.delay(method, Duration::from_millis(30));
    }
    let mut wanted = vec![None; PODS as usize];
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        let number = random.below(PODS);
        let name = format!("pod{number}");
        let slot = &mut wanted[number as usize];
        match (random.below(10), &slot) {
            (0..=4, None) | (0..=1, Some(_)) => {
                // Few versions: the same one, with the same UID, comes back often.
                let version = random.below(2);
                let mut pod = rich(&name);
                pod["metadata"]["labels"] = json!({"version": version.to_string()});
                node.apply(&pod);
                *slot = Some(version);
            }
            (2..=5, Some(_)) => {
                node.remove(&name);
                *slot = None;
            }
            (6..=8, Some(_)) => {
                let ids: Vec<String> = node.running(&name).into_values().flatten().collect();
                if !ids.is_empty() {
                    let id = &ids[random.below(ids.len() as u64) as usize];
                    node.fake.kill_container(id, 3);
                }
            }
            (9, Some(_)) if random.below(4) == 0 => {
                node.kill_agent();
                node.launch_agent();
            }
            _ => {}
        }
        node.assert_no_duplicates();
        pause(Duration::from_millis(random.below(120)));
    }
    node.wait_healthy();
    for method in ["ListPodSandbox", "ListContainers", "RemoveContainer", "StopContainer", "RunPodSandbox"] {
        node.fake.behave(method);
    }
    // Written last: when it runs, the agent has read all manifests.
    node.apply(&simple("last"));
    node.wait_ready("last");
    // A pod that was removed and written again with the same UID is still terminating: until that is
    // complete, the old containers run.
    let running = || (0..PODS).map(|number| node.running(&format!("pod{number}"))).collect::<Vec<_>>();
    let is_any_ending = || {
        let page = node.metrics();
        // The page has a series for each state, also of no pod.
        let mut workers =
            page.lines().filter(|line| line.starts_with("kubelet_working_pods{") && !line.ends_with(" 0"));
        let (runs, wanted) = ("lifecycle=\"sync\"", "config=\"desired\"");
        workers.any(|line| {
            line.contains("lifecycle=\"terminating\"") || (line.contains(runs) && !line.contains(wanted))
        })
    };
    wait_until("no pod to end, and the running containers to be the same for a while", LONG, || {
        let before = running();
        pause(Duration::from_millis(1500));
        running() == before && !is_any_ending()
    });
    for (number, version) in wanted.iter().enumerate() {
        let name = format!("pod{number}");
        match version {
            None => node.wait_gone(&name, LONG),
            Some(version) => {
                let version = version.to_string();
                node.wait_pod(&name, "the version that was written last", LONG, |pod| {
                    let labels = pod.metadata.labels.clone().unwrap_or_default();
                    labels.get("version") == Some(&version)
                });
                node.assert_runs_once(&name, &RICH);
                assert!(disk(&node, &name).is_dir(), "the volume of {name} is gone");
            }
        }
    }
    node.finish();
}
