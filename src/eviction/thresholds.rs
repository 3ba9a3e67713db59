//! Thresholds, from the configuration (Go: eviction `ParseThresholdConfig`,
//! `UpdateContainerFsThresholds`, api `GetThresholdQuantity`).
//!
//! The configuration's own rules (`config::validate`) have checked most of this, with the same
//! names of fields. The defaults of `evictionHard`, and `mergeDefaultEvictionSettings`, are applied
//! when the configuration is loaded.

use std::collections::BTreeMap;
use std::time::Duration;

use super::layout::Layout;
use super::signal::Signal;
use crate::config::{GoDuration, KubeletConfiguration};
use crate::model::quantity::{Amount, Form, canonical};

/// The entry of `enforceNodeAllocatable` that limits all pods together.
const PODS: &str = "pods";

/// A value of the configuration is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct Problem {
    /// The path of the field, such as `evictionHard[memory.available]`.
    pub field: String,
    /// What is wrong.
    pub message: String,
}

/// An amount, or a share of the capacity.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An amount, with its text as the API writes it.
    Quantity(Amount, String),
    /// A share of the capacity: 0.1 is 10 %. Upstream's type has 32 bits; the result depends on it.
    Share(f32),
}

impl Value {
    /// The amount, of this capacity.
    #[must_use]
    pub fn amount(&self, capacity: i64) -> Amount {
        match self {
            Value::Quantity(amount, _) => *amount,
            // The conversion truncates and saturates; a share is a finite number.
            Value::Share(share) => Amount::from_units((capacity as f64 * f64::from(*share)) as i64),
        }
    }

    /// The amount as messages show it: as configured, or with binary suffixes, also of inodes.
    #[must_use]
    pub fn text(&self, capacity: i64) -> String {
        match self {
            Value::Quantity(_, text) => text.clone(),
            Value::Share(_) => self.amount(capacity).format(Form::Binary),
        }
    }
}

/// When to evict: while less than `value` is available.
#[derive(Debug, Clone, PartialEq)]
pub struct Threshold {
    /// What is compared.
    pub signal: Signal,
    /// The least that must be available.
    pub value: Value,
    /// How long the threshold must be met before pods are evicted; zero for a hard threshold.
    pub grace: Duration,
    /// How much more than `value` must be available before a threshold that led to evictions counts
    /// as not met any more.
    pub min_reclaim: Option<Value>,
}

impl Threshold {
    /// Whether pods are evicted at once, with the shortest grace period.
    pub fn is_hard(&self) -> bool {
        self.grace.is_zero()
    }
}

/// The thresholds of a configuration, hard ones first, without those of the file system with
/// writable layers (see [`with_container_fs`]). With `ignore_allocatable`
/// (`--experimental-allocatable-ignore-eviction`) there is none for the memory of all pods.
///
/// # Errors
/// All problems.
pub fn thresholds(
    config: &KubeletConfiguration,
    ignore_allocatable: bool,
) -> Result<Vec<Threshold>, Vec<Problem>> {
    let mut problems = Vec::new();
    let hard = statements("evictionHard", &config.eviction_hard, value, &mut problems);
    let soft = statements("evictionSoft", &config.eviction_soft, value, &mut problems);
    let graces =
        statements("evictionSoftGracePeriod", &config.eviction_soft_grace_period, grace, &mut problems);
    let reclaims =
        statements("evictionMinimumReclaim", &config.eviction_minimum_reclaim, reclaim, &mut problems);
    let make = |signal: Signal, value: Value, grace: Duration| Threshold {
        signal,
        value,
        grace,
        min_reclaim: reclaims.get(&signal).cloned(),
    };
    let mut found: Vec<Threshold> = Vec::new();
    found.extend(hard.into_iter().filter_map(|(signal, value)| Some(make(signal, value?, Duration::ZERO))));
    for (signal, value) in soft {
        let Some(value) = value else { continue };
        match graces.get(&signal) {
            Some(grace) => found.push(make(signal, value, *grace)),
            // An invalid grace period is reported as such.
            None if config.eviction_soft_grace_period.contains_key(signal.as_str()) => {}
            None => problems.push(Problem {
                field: format!("evictionSoft[{}]", signal.as_str()),
                message: "grace period must be specified for the soft eviction threshold".to_owned(),
            }),
        }
    }
    let enforced = config.enforce_node_allocatable.iter().any(|part| part == PODS);
    if enforced && !ignore_allocatable {
        let copies: Vec<Threshold> = found
            .iter()
            .filter(|threshold| threshold.signal == Signal::MemoryAvailable && threshold.is_hard())
            .map(|threshold| Threshold { signal: Signal::AllocatableMemoryAvailable, ..threshold.clone() })
            .collect();
        found.extend(copies);
    }
    if problems.is_empty() { Ok(found) } else { Err(problems) }
}

/// The thresholds with those of the file system with writable layers, which are copies: of the
/// root directory's, or of those of the images if both are on one file system of their own.
/// Configured ones are dropped, as upstream replaces them.
///
/// DIFFERS: upstream uses the copies from its second pass on. Their file system is that of the
/// originals, so no decision depends on this.
#[must_use]
pub fn with_container_fs(thresholds: &[Threshold], layout: Layout) -> Vec<Threshold> {
    let mut all: Vec<Threshold> =
        thresholds.iter().filter(|threshold| !threshold.signal.is_container_fs()).cloned().collect();
    for (source, copy) in layout.container_fs_source() {
        let copies = thresholds.iter().filter(|threshold| threshold.signal == source);
        all.extend(copies.map(|threshold| Threshold { signal: copy, ..threshold.clone() }));
    }
    all
}

/// The fields whose thresholds have no effect because the agent chooses them.
#[must_use]
pub fn ignored_fields(config: &KubeletConfiguration) -> Vec<String> {
    let maps = [("evictionHard", &config.eviction_hard), ("evictionSoft", &config.eviction_soft)];
    let named = maps.into_iter().flat_map(|(field, map)| map.keys().map(move |signal| (field, signal)));
    named
        .filter(|(_, signal)| Signal::parse(signal).is_some_and(Signal::is_container_fs))
        .map(|(field, signal)| format!("{field}[{signal}]"))
        .collect()
}

/// The entries of a map of the configuration, by signal.
fn statements<T>(
    field: &str,
    map: &BTreeMap<String, String>,
    parse: impl Fn(&str) -> Result<T, String>,
    problems: &mut Vec<Problem>,
) -> BTreeMap<Signal, T> {
    let mut found = BTreeMap::new();
    for (name, text) in map {
        let mut fail = |message| problems.push(Problem { field: format!("{field}[{name}]"), message });
        match (Signal::parse(name), parse(text)) {
            (None, _) => fail(format!("unsupported eviction signal {name}")),
            (_, Err(message)) => fail(message),
            (Some(signal), Ok(value)) => drop(found.insert(signal, value)),
        }
    }
    found
}

/// `None`: `0%` and `100%` switch the threshold off.
pub(super) fn value(text: &str) -> Result<Option<Value>, String> {
    if text == "0%" || text == "100%" {
        return Ok(None);
    }
    if text.ends_with('%') {
        return match share(text)? {
            share if share < 0.0 => Err(format!("{text:?} must not be below 0%")),
            share if share > 1.0 => Err(format!("{text:?} must not be above 100%")),
            share => Ok(Some(Value::Share(share))),
        };
    }
    match Amount::parse(text) {
        Ok(amount) if amount.is_negative() || amount.is_zero() => Err(format!("{text:?} must be positive")),
        Ok(amount) => Ok(Some(Value::Quantity(amount, canonical(text)))),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) fn reclaim(text: &str) -> Result<Value, String> {
    if text.ends_with('%') {
        return match share(text)? {
            share if share > 0.0 => Ok(Value::Share(share)),
            _ => Err(format!("{text:?} must be positive")),
        };
    }
    match Amount::parse(text) {
        Ok(amount) if amount.is_negative() => Err(format!("{text:?} must not be negative")),
        Ok(amount) => Ok(Value::Quantity(amount, canonical(text))),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) fn grace(text: &str) -> Result<Duration, String> {
    match GoDuration::parse(text) {
        Ok(grace) if grace.is_negative() => Err(format!("{text:?} must not be negative")),
        Ok(grace) => Ok(grace.to_std()),
        Err(error) => Err(error.to_string()),
    }
}

/// A percentage as a share.
///
/// DIFFERS: Go also accepts hexadecimal numbers, several percent signs, `NaN` and `Inf`, of which
/// the last two make a threshold that is never met.
fn share(text: &str) -> Result<f32, String> {
    let number = text.strip_suffix('%').and_then(|number| number.parse::<f32>().ok());
    let share = number.filter(|number| number.is_finite()).map(|number| number / 100.0);
    share.ok_or_else(|| format!("{text:?} is not a percentage"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::config::fields::HARD_EVICTION;

    fn config(fields: serde_json::Value) -> KubeletConfiguration {
        serde_json::from_value(fields).unwrap()
    }

    fn shown(thresholds: &[Threshold]) -> Vec<String> {
        let show = |threshold: &Threshold| {
            let reclaim = threshold.min_reclaim.as_ref().map(|reclaim| format!(" +{}", reclaim.text(1000)));
            let (signal, value) = (threshold.signal.as_str(), threshold.value.text(1000));
            format!("{signal}<{value} {:?}{}", threshold.grace, reclaim.unwrap_or_default())
        };
        thresholds.iter().map(show).collect()
    }

    #[test]
    fn defaults_have_a_copy_for_the_memory_of_all_pods() {
        let defaults: BTreeMap<&str, &str> = HARD_EVICTION.iter().copied().collect();
        let with =
            |enforced: &[&str]| config(json!({"evictionHard": defaults, "enforceNodeAllocatable": enforced}));
        let found = thresholds(&with(&["system-reserved", "pods"]), false).unwrap();
        assert_eq!(
            shown(&found),
            [
                "memory.available<100Mi 0ns",
                "nodefs.available<100 0ns",
                "nodefs.inodesFree<50 0ns",
                "imagefs.available<150 0ns",
                "imagefs.inodesFree<50 0ns",
                "allocatableMemory.available<100Mi 0ns",
            ]
        );
        assert_eq!(thresholds(&with(&["pods"]), true).unwrap().len(), 5);
        assert_eq!(thresholds(&with(&["none"]), false).unwrap().len(), 5);
    }

    #[test]
    fn soft_thresholds_have_grace_and_reclaim() {
        let found = thresholds(
            &config(json!({
                "evictionHard": {"memory.available": "1Gi", "pid.available": "0%", "nodefs.available": "100%"},
                "evictionSoft": {
                    "memory.available": "1500M",
                    "imagefs.available": "12.5%",
                    "nodefs.available": "0.5Gi",
                    "pid.available": "0%",
                },
                "evictionSoftGracePeriod": {
                    "memory.available": "1m30s",
                    "imagefs.available": "0s",
                    "nodefs.available": "1s",
                },
                "evictionMinimumReclaim": {"memory.available": "500Mi", "imagefs.available": "2%"},
                "enforceNodeAllocatable": ["pods"],
            })),
            false,
        )
        .unwrap();
        assert_eq!(
            shown(&found),
            [
                "memory.available<1Gi 0ns +500Mi",
                "memory.available<1500M 90s +500Mi",
                "nodefs.available<512Mi 1s",
                // 2 % in 32 bits is a little less.
                "imagefs.available<125 0ns +19",
                "allocatableMemory.available<1Gi 0ns +500Mi",
            ]
        );
        assert!(
            found.iter().find(|threshold| threshold.signal == Signal::ImageFsAvailable).unwrap().is_hard()
        );
    }

    #[test]
    fn every_problem_names_its_field() {
        let mut broken = KubeletConfiguration::default();
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        broken.eviction_hard = map(&[
            ("memory.free", "1Gi"),
            ("memory.available", "0"),
            ("nodefs.available", "101%"),
            ("imagefs.available", "-1%"),
            ("pid.available", "NaN%"),
        ]);
        broken.eviction_soft = map(&[
            ("memory.available", "1Gi"),
            ("nodefs.available", "1Gi"),
            ("imagefs.available", "0%"),
            ("pid.available", "x"),
        ]);
        broken.eviction_soft_grace_period = map(&[("memory.available", "-1s"), ("pid.available", "1s")]);
        broken.eviction_minimum_reclaim =
            map(&[("memory.available", "0%"), ("nodefs.available", "-1"), ("pid.available", "0")]);
        let problems = thresholds(&broken, false).unwrap_err();
        let fields: Vec<&str> = problems.iter().map(|problem| problem.field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "evictionHard[imagefs.available]",
                "evictionHard[memory.available]",
                "evictionHard[memory.free]",
                "evictionHard[nodefs.available]",
                "evictionHard[pid.available]",
                "evictionSoft[pid.available]",
                "evictionSoftGracePeriod[memory.available]",
                "evictionMinimumReclaim[memory.available]",
                "evictionMinimumReclaim[nodefs.available]",
                "evictionSoft[nodefs.available]",
            ]
        );
    }

    /// The results of Go 1.26 with `float32(value) / 100` and the product in 64 bits.
    #[test]
    fn shares_have_32_bits_and_amounts_are_truncated() {
        for (text, capacity, expected) in [
            ("10%", 1000, 100),
            ("15%", 100, 15),
            ("10%", 25_276_502_016, 2_527_650_239),
            ("5%", 25_276_502_016, 1_263_825_119),
            ("12.5%", 1001, 125),
            ("33.3%", i64::MAX, 3_071_382_927_855_058_944),
            ("0.0001%", 1000, 0),
        ] {
            let Some(share) = value(text).unwrap() else { panic!("{text} is off") };
            assert_eq!(share.amount(capacity), Amount::from_units(expected), "{text} of {capacity}");
        }
    }

    #[test]
    fn writable_layers_have_copies_of_the_right_thresholds() {
        let found = thresholds(
            &config(json!({
                "evictionHard": {
                    "nodefs.available": "1Gi",
                    "imagefs.available": "2Gi",
                    "containerfs.available": "3Gi",
                    "imagefs.inodesFree": "5%",
                },
                "evictionSoft": {"imagefs.available": "4Gi"},
                "evictionSoftGracePeriod": {"imagefs.available": "1s"},
            })),
            false,
        )
        .unwrap();
        let copies = |layout| {
            let all = with_container_fs(&found, layout);
            assert!(all.len() >= 4);
            shown(&all.into_iter().filter(|threshold| threshold.signal.is_container_fs()).collect::<Vec<_>>())
        };
        assert_eq!(copies(Layout::Single), ["containerfs.available<1Gi 0ns"]);
        assert_eq!(copies(Layout::Split), ["containerfs.available<1Gi 0ns"]);
        assert_eq!(
            copies(Layout::Images),
            [
                "containerfs.available<2Gi 0ns",
                "containerfs.available<4Gi 1s",
                "containerfs.inodesFree<50 0ns",
            ]
        );
    }

    #[test]
    fn thresholds_of_writable_layers_are_named_as_ignored() {
        let config =
            config(json!({"evictionHard": {"containerfs.available": "3Gi", "memory.available": "1Mi"}}));
        assert_eq!(ignored_fields(&config), ["evictionHard[containerfs.available]"]);
    }

    proptest! {
        #[test]
        fn no_value_causes_a_panic_or_an_amount_below_zero(text: String, capacity in 0..=i64::MAX) {
            if let Ok(Some(found)) = value(&text) {
                prop_assert!(!found.amount(capacity).is_negative());
                let _ = found.text(capacity);
            }
            if let Ok(found) = reclaim(&text) {
                prop_assert!(!found.amount(capacity).is_negative());
            }
            let _ = grace(&text);
        }

        #[test]
        fn a_share_is_at_most_the_capacity(percent in 0.0_f32..=100.0, capacity in 0..=(1_i64 << 53)) {
            if let Some(found) = value(&format!("{percent}%")).unwrap() {
                // 100 % and a rounding error of 32 bits.
                prop_assert!(found.amount(capacity).units() <= capacity + (capacity >> 23));
            }
        }
    }
}
