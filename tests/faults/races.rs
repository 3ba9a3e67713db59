//! Two sides at work on one pod at the same time: what one of them knew a moment ago must not
//! make it spoil what the other does now.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::dice::{Dice, random_seed};
use crate::support::node::simple;
use crate::support::solo::{LONG, Solo};
use crate::support::wait::{holds_for, pause, wait_for, wait_until};
use crate::{RICH, rich, side_by_side, tell};

/// The directory of the pod's volume on disk.
fn disk(solo: &Solo, name: &str) -> PathBuf {
    let uid = wait_for("the pod's UID", LONG, || solo.pod(name)?.metadata.uid);
    solo.root().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/disk")
}

/// The cleaner hangs in a call about a pod that is over, and the very same pod, with the same
/// UID, is wanted again: when the call ends, what is left of the cleaner's round must not
/// touch the new life of the pod.
#[test]
fn a_pod_comes_back_while_its_remains_are_removed() {
    side_by_side(&["RemoveContainer", "RemovePodSandbox"], |method| {
        let solo = Solo::start();
        solo.fake.write_logs();
        solo.apply(&rich("web"));
        solo.assert_runs_once("web", &RICH);
        let gate = solo.fake.hang_next(method);
        solo.remove("web");
        wait_until(&format!("{method} to hang"), LONG, || gate.waiting() > 0);
        solo.apply(&rich("web"));
        // Either it starts beside the hanging call, or it waits for it.
        wait_until("the pod to be listed", LONG, || solo.pod("web").is_some());
        let early = Instant::now();
        while solo.running("web").len() < RICH.len() && early.elapsed() < Duration::from_secs(3) {
            pause(Duration::from_millis(20));
        }
        gate.open();
        solo.assert_runs_once("web", &RICH);
        let precious = disk(&solo, "web").join("precious");
        fs::write(&precious, "x").unwrap();
        let before = solo.running("web");
        let logs: Vec<PathBuf> = solo
            .containers("web")
            .into_iter()
            .filter(|one| one.is_running())
            .map(|one| one.status.log_path.into())
            .collect();
        // More rounds of the cleaner.
        solo.apply(&simple("other"));
        solo.assert_runs_once("other", &["main"]);
        solo.remove("other");
        wait_until("another round of the cleaner", LONG, || solo.containers("other").is_empty());
        holds_for("the pod and its files stay", Duration::from_secs(1), || {
            solo.assert_no_twins();
            solo.running("web") == before && precious.exists() && logs.iter().all(|log| log.exists())
        });
        solo.finish();
    });
}

/// Pods that come, go, die and come back at random, while every list is slow enough to be out
/// of date when it arrives, and the agent is killed now and then.
#[test]
fn random_lives_on_a_slow_runtime() {
    const PODS: u64 = 8;
    let seed = match std::env::var("FAULTS_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => random_seed(),
    };
    tell(&format!("random lives: FAULTS_SEED={seed}"));
    let mut dice = Dice::new(seed);
    let mut solo = Solo::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    solo.fake.write_logs();
    for method in ["ListPodSandbox", "ListContainers", "RemoveContainer", "StopContainer", "RunPodSandbox"] {
        solo.fake.delay(method, Duration::from_millis(30));
    }
    let mut wanted = vec![None; PODS as usize];
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        let number = dice.below(PODS);
        let name = format!("pod{number}");
        let slot = &mut wanted[number as usize];
        match (dice.below(10), &slot) {
            (0..=4, None) | (0..=1, Some(_)) => {
                // Few versions: the same one, with the same UID, comes back often.
                let version = dice.below(2);
                let mut pod = rich(&name);
                pod["metadata"]["labels"] = json!({"version": version.to_string()});
                solo.apply(&pod);
                *slot = Some(version);
            }
            (2..=5, Some(_)) => {
                solo.remove(&name);
                *slot = None;
            }
            (6..=8, Some(_)) => {
                let ids: Vec<String> = solo.running(&name).into_values().flatten().collect();
                if !ids.is_empty() {
                    let id = &ids[dice.below(ids.len() as u64) as usize];
                    solo.fake.kill_container(id, 3);
                }
            }
            (9, Some(_)) if dice.below(4) == 0 => {
                solo.kill_agent();
                solo.launch_agent();
            }
            _ => {}
        }
        solo.assert_no_twins();
        pause(Duration::from_millis(dice.below(120)));
    }
    solo.wait_healthy();
    for method in ["ListPodSandbox", "ListContainers", "RemoveContainer", "StopContainer", "RunPodSandbox"] {
        solo.fake.behave(method);
    }
    // Written last: when it runs, an agent that was just started has read all that was written.
    solo.apply(&simple("last"));
    solo.wait_ready("last");
    // One that was removed and written again a moment ago, with the same UID, still ends: until
    // the agent has seen the last of it, what runs is of before.
    let running = || (0..PODS).map(|number| solo.running(&format!("pod{number}"))).collect::<Vec<_>>();
    wait_until("what runs to be the same for a while", LONG, || {
        let before = running();
        pause(Duration::from_millis(1500));
        running() == before
    });
    for (number, version) in wanted.iter().enumerate() {
        let name = format!("pod{number}");
        match version {
            None => solo.wait_gone(&name, LONG),
            Some(version) => {
                let version = version.to_string();
                solo.wait_pod(&name, "the version that was written last", LONG, |pod| {
                    let labels = pod.metadata.labels.clone().unwrap_or_default();
                    labels.get("version") == Some(&version)
                });
                solo.assert_runs_once(&name, &RICH);
                assert!(disk(&solo, &name).is_dir(), "the volume of {name} is gone");
            }
        }
    }
    solo.finish();
}
