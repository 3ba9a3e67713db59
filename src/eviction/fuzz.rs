//! Hostile thresholds of a configuration.

use super::thresholds::{grace, reclaim, thresholds, value};
use crate::config::KubeletConfiguration;
use crate::util::fuzzing::{Budget, Target, repeated};
use crate::util::threads::Stack;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target {
        name: "eviction/thresholds",
        stack: Stack::Large,
        max_bytes: 1 << 20,
        budget: Budget { per_byte: 400, ..Budget::LINEAR },
        worst: |max| {
            vec![
                ("unknown signals", repeated("", |i| format!("s{i}<1\n"), "", max)),
                ("one signal", repeated("", |i| format!("memory.available<{i}Ki\n"), "", max)),
                ("a long quantity", [b"memory.available<".as_slice(), &b"9".repeat(max - 17)].concat()),
                ("a long share", [b"memory.available<0.".as_slice(), &b"1".repeat(max - 20), b"%"].concat()),
                ("percent signs", [b"memory.available<".as_slice(), &b"%".repeat(max - 17)].concat()),
                ("a long period", [b"memory.available<".as_slice(), &b"1h".repeat(max / 2 - 9)].concat()),
            ]
        },
        seeds: &[
            b"memory.available<100Mi\nnodefs.available<10%\npid.available<1k\n",
            b"imagefs.inodesFree<12.5%\nallocatableMemory.available<1m30s\n",
            b"memory.available<NaN%\nmemory.available<-inf%\nmemory.available<0%\n",
        ],
        run: |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let map: std::collections::BTreeMap<String, String> = text
                .lines()
                .filter_map(|line| line.split_once('<'))
                .map(|(signal, value)| (signal.to_owned(), value.to_owned()))
                .collect();
            for text in map.values() {
                if let Ok(Some(value)) = value(text) {
                    let _ = (value.amount(i64::MAX), value.text(0));
                }
                let _ = (reclaim(text), grace(text));
            }
            let config = KubeletConfiguration {
                eviction_hard: map.clone(),
                eviction_soft: map.clone(),
                eviction_soft_grace_period: map.clone(),
                eviction_minimum_reclaim: map,
                enforce_node_allocatable: vec!["pods".to_owned()],
                ..KubeletConfiguration::default()
            };
            let _ = thresholds(&config, false);
        },
    }]
}
