//! Random passes against the results of upstream's own eviction manager
//! (`tests/golden/resources/eviction_passes.jsonl`, one case a line; `tests/golden/README.md` says
//! how they were made). Each case has a configuration, pods, and passes with statistics in the form
//! of `/stats/summary`.
//!
//! A case has thresholds of one signal, as upstream takes any of several; at most one pod without
//! statistics; and no two pods with the same use, as upstream's order of equals is not stable.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;

use super::pass::{Action, EvictionManager, Settings};
use super::{Layout, Reclaim, Victim};
use crate::config::{GoDuration, KubeletConfiguration};
use crate::model::api;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::resources::stats::sample::{
    ContainerUse, FileSystem, NodeUse, Numbers, PodUse, ProcessLimit, Snapshot, VolumeUse,
};

fn numbers(value: &Value) -> Numbers {
    let memory = &value["memory"];
    Numbers {
        time: time(memory),
        available: memory["availableBytes"].as_u64(),
        working_set: memory["workingSetBytes"].as_u64(),
        processes: value["process_stats"]["process_count"].as_u64(),
        ..Numbers::default()
    }
}

fn time(value: &Value) -> Timestamp {
    value["time"].as_str().map_or_else(Timestamp::default, |text| text.parse().unwrap())
}

fn space(value: &Value) -> Option<FileSystem> {
    value.is_object().then(|| FileSystem {
        time: time(value),
        available: value["availableBytes"].as_u64(),
        capacity: value["capacityBytes"].as_u64(),
        used: value["usedBytes"].as_u64(),
        inodes_free: value["inodesFree"].as_u64(),
        inodes: value["inodes"].as_u64(),
        inodes_used: value["inodesUsed"].as_u64(),
    })
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn snapshot(summary: &Value) -> Snapshot {
    let node = &summary["node"];
    let pods = list(&summary["pods"]).map(|pod| PodUse {
        uid: PodUid::from(text(&pod["podRef"]["uid"])),
        name: text(&pod["podRef"]["name"]),
        numbers: numbers(pod),
        containers: list(&pod["containers"])
            .map(|container| ContainerUse {
                name: text(&container["name"]),
                numbers: numbers(container),
                rootfs: space(&container["rootfs"]),
                logs: space(&container["logs"]),
                ..ContainerUse::default()
            })
            .collect(),
        volumes: list(&pod["volume"])
            .map(|volume| VolumeUse {
                name: text(&volume["name"]),
                space: space(volume).unwrap(),
                ..VolumeUse::default()
            })
            .collect(),
        local_storage: space(&pod["ephemeral-storage"]),
        ..PodUse::default()
    });
    let rlimit = &node["rlimit"];
    let node = NodeUse {
        numbers: numbers(node),
        fs: space(&node["fs"]),
        image_fs: space(&node["runtime"]["imageFs"]),
        container_fs: space(&node["runtime"]["containerFs"]),
        processes: Some(ProcessLimit {
            time: time(rlimit),
            most: rlimit["maxpid"].as_u64(),
            now: rlimit["curproc"].as_u64(),
        }),
        ..NodeUse::default()
    };
    Snapshot { node, pods: pods.collect(), ..Snapshot::default() }
}

fn eviction(case: &Value) -> EvictionManager {
    let config = &case["config"];
    let map = |field: &str| -> BTreeMap<String, String> {
        let entries = config[field].as_object().into_iter().flatten();
        entries.map(|(name, value)| (name.clone(), text(value))).collect()
    };
    let config = KubeletConfiguration {
        eviction_hard: map("Hard"),
        eviction_soft: map("Soft"),
        eviction_soft_grace_period: map("Grace"),
        eviction_minimum_reclaim: map("Reclaim"),
        eviction_max_pod_grace_period: i32::try_from(config["Max"].as_i64().unwrap()).unwrap(),
        eviction_pressure_transition_period: GoDuration::from_secs(config["Transition"].as_i64().unwrap()),
        local_storage_capacity_isolation: config["Local"].as_bool().unwrap(),
        ..KubeletConfiguration::default()
    };
    let layout = match case["layout"].as_str().unwrap() {
        "one" => Layout::Single,
        "images" => Layout::Images,
        _ => Layout::Split,
    };
    EvictionManager::new(Settings::new(&config, false).unwrap(), layout)
}

/// What an eviction consists of, in the form of the file.
fn victim(victim: &Victim) -> Value {
    let mut found = serde_json::json!({
        "pod": victim.pod.name(),
        "grace": victim.grace_seconds,
        "message": victim.message,
    });
    if !victim.annotations.is_empty() {
        found["annotations"] = serde_json::json!(victim.annotations);
    }
    if victim.disruption_target {
        found["disruption"] = true.into();
    }
    found
}

/// The differences of one case.
fn check(case: &Value) -> Vec<String> {
    let pods: Vec<Pod> = list(&case["pods"])
        .map(|pod| Pod::from(serde_json::from_value::<api::Pod>(pod.clone()).unwrap()))
        .collect();
    let mut eviction = eviction(case);
    let mut gone: Vec<String> = Vec::new();
    let (mut problems, start) = (Vec::new(), Instant::now());
    for pass in list(&case["passes"]) {
        let active: Vec<Pod> =
            pods.iter().filter(|pod| !gone.iter().any(|gone| gone == pod.name())).cloned().collect();
        let now = start + Duration::from_secs(pass["at"].as_u64().unwrap());
        let outcome = eviction.pass(&snapshot(&pass["summary"]), &active, now);
        let (mut events, mut reclaimed, mut kills) = (Vec::new(), Vec::new(), Vec::new());
        match &outcome.action {
            Action::None => {}
            Action::Limits(victims) => kills.extend(victims.iter().map(victim)),
            Action::Shortage(shortage) => {
                events.push(format!("Warning EvictionThresholdMet {}", shortage.message));
                reclaimed.extend(shortage.reclaim.iter().map(|reclaim| match reclaim {
                    Reclaim::DeadContainers => "containers",
                    Reclaim::UnusedImages => "images",
                }));
                let after = pass.get("after").map(snapshot);
                if shortage.reclaim.is_empty() || !eviction.is_relieved(after.as_ref()) {
                    kills.extend(shortage.victim.as_ref().map(victim));
                }
            }
        }
        gone.extend(kills.iter().map(|kill| text(&kill["pod"])));
        let mut conditions: Vec<&str> = outcome.pressures.held().map(super::Pressure::as_str).collect();
        conditions.sort_unstable();
        let mut kills = Value::from(kills);
        for kill in kills.as_array_mut().into_iter().flatten() {
            // Upstream's worker, which the results do not have, raises the period to a second.
            let recorded = list(&pass["kills"]).find(|recorded| recorded["pod"] == kill["pod"]);
            if recorded.is_some_and(|recorded| recorded["grace"] == 0) && kill["grace"] == 1 {
                kill["grace"] = 0.into();
            }
        }
        for (what, ours) in [
            ("conditions", Value::from(conditions)),
            ("events", Value::from(events)),
            ("reclaimed", Value::from(reclaimed)),
            ("kills", kills),
        ] {
            let recorded = if pass[what].is_null() { Value::Array(Vec::new()) } else { pass[what].clone() };
            if recorded != ours {
                problems.push(format!("at {}: {what} were {recorded}, not {ours}", pass["at"]));
            }
        }
        if !problems.is_empty() {
            break;
        }
    }
    problems
}

#[test]
fn random_passes_decide_as_upstream() {
    let recorded = include_str!("../../tests/golden/resources/eviction_passes.jsonl");
    // More cases, made as tests/golden/README.md says.
    let more = std::env::var_os("EVICTION_PASSES").map(|path| std::fs::read_to_string(path).unwrap());
    let lines = recorded.lines().chain(more.iter().flat_map(|more| more.lines()));
    let (mut problems, mut cases, mut kills) = (Vec::new(), 0, 0);
    for line in lines {
        let case: Value = serde_json::from_str(line).unwrap();
        cases += 1;
        kills += list(&case["passes"]).map(|pass| list(&pass["kills"]).count()).sum::<usize>();
        problems.extend(check(&case).into_iter().map(|problem| format!("case {cases}: {problem}")));
    }
    problems.truncate(20);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(cases >= 60 && kills >= 25, "{cases} cases, {kills} evictions");
}
