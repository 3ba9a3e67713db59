//! The values of the tiers, which follow the pods that are active (pure).

use crate::model::pod::{Pod, QosClass};
use crate::model::requests::{Overhead, pod_requests};

use super::pod::MemoryReservationPolicy;
use super::values::{HugePages, Values};
use crate::model::cpu_shares::{MIN_SHARES, shares};

/// What the configuration says about the tiers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierSettings {
    /// `memoryReservationPolicy`; `None` without the gate `MemoryQoS` and on version 1.
    pub memory_qos: Option<MemoryReservationPolicy>,
    /// `qosReserved` of memory in percent; `None` without it or without the gate `QOSReserved`.
    pub memory_reserved: Option<u8>,
    /// Memory of the machine without what is reserved; without thresholds of eviction.
    pub allocatable_memory: i64,
}

impl TierSettings {
    /// Whether the memory that pods request is protected.
    #[must_use]
    pub fn is_tiered(&self) -> bool {
        self.memory_qos == Some(MemoryReservationPolicy::Tiered)
    }
}

/// The values that remove from the cgroup of all pods, and from the Burstable tier, what an earlier
/// agent has protected there; `None`: nothing is protected (Go: pkg/kubelet/cm
/// qos_container_manager `Start`, node_container_manager `enforceNodeAllocatableCgroups`).
/// `has`: the values of the cgroup.
#[must_use]
pub fn unprotected(has: &Values) -> Option<Values> {
    let protects = |bytes: Option<i64>| bytes.is_some_and(|bytes| bytes != 0);
    let zero = |bytes: Option<i64>| Some(0).filter(|_| protects(bytes));
    let values =
        Values { memory_min: zero(has.memory_min), memory_low: zero(has.memory_low), ..Values::default() };
    (values != Values::default()).then_some(values)
}

/// The bytes of memory that pods of two classes request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub struct ProtectedMemory {
    pub guaranteed: i64,
    pub burstable: i64,
}

/// The values of the tiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiers {
    /// Of the cgroup of all pods, in addition to its limits.
    pub pods: Values,
    /// Of the Burstable tier.
    pub burstable: Values,
    /// Of the BestEffort tier.
    pub best_effort: Values,
    /// For the metrics `kubelet_memory_qos_node_memory_min_bytes` and `…_low_bytes`; 0 without memory
    /// protection.
    pub protected: ProtectedMemory,
}

/// The values for the active pods, with the resources that they were granted (Go: pkg/kubelet/cm
/// qos_container_manager `UpdateCgroups`).
#[must_use]
pub fn tier_values<'a>(pods: impl Iterator<Item = &'a Pod>, settings: &TierSettings) -> Tiers {
    let mut cpu_milli: i64 = 0;
    let (mut guaranteed, mut burstable): (i64, i64) = (0, 0);
    for pod in pods {
        let class = pod.qos();
        if class == QosClass::BestEffort {
            continue;
        }
        let requests = pod_requests(pod, Overhead::Included);
        let amount = |resource: &str| requests.get(resource).copied().unwrap_or_default();
        let memory = amount("memory").units().max(0);
        if class == QosClass::Guaranteed {
            guaranteed = guaranteed.saturating_add(memory);
        } else {
            burstable = burstable.saturating_add(memory);
            cpu_milli = cpu_milli.saturating_add(amount("cpu").milli().max(0));
        }
    }
    let tiered = settings.is_tiered();
    // What another policy has left is removed once, at the start.
    let protect = |bytes: i64| tiered.then_some(bytes);
    let plain = Values { huge_pages: HugePages::Unlimited, ..Values::default() };
    let limits = memory_limits(settings, guaranteed, burstable);
    Tiers {
        // A cgroup protects no more than the one above it does.
        pods: Values {
            memory_min: protect(guaranteed.saturating_add(burstable)),
            memory_low: protect(burstable),
            ..plain.clone()
        },
        burstable: Values {
            cpu_shares: Some(shares(cpu_milli)),
            memory_bytes: limits.map(|limits| limits.0),
            memory_low: protect(burstable),
            ..plain.clone()
        },
        best_effort: Values {
            cpu_shares: Some(MIN_SHARES),
            memory_bytes: limits.map(|limits| limits.1),
            ..plain
        },
        protected: if tiered {
            ProtectedMemory { guaranteed, burstable }
        } else {
            ProtectedMemory::default()
        },
    }
}

/// The limits of the Burstable and BestEffort tiers, so that a part of the memory that pods of
/// higher classes request is left to them. `None`: memory is not reserved.
///
/// DIFFERS: the Go kubelet writes negative numbers if more is reserved than there is; -1 would be no
/// limit. The least limit here is one page.
fn memory_limits(settings: &TierSettings, guaranteed: i64, burstable: i64) -> Option<(i64, i64)> {
    const LEAST: i64 = 4096;
    let percent = i128::from(settings.memory_reserved?);
    let allocatable = settings.allocatable_memory;
    if allocatable <= 0 {
        return None;
    }
    let part = |bytes: i64| i64::try_from(i128::from(bytes) * percent / 100).unwrap_or(i64::MAX);
    let burstable_limit = allocatable.saturating_sub(part(guaranteed)).max(LEAST);
    Some((burstable_limit, burstable_limit.saturating_sub(part(burstable)).max(LEAST)))
}

/// The values of a tier after they could not be set: a limit below the usage becomes the usage, so
/// that the tier at least grows no more (Go: `retrySetMemoryReserve`).
#[must_use]
pub fn raised_to_usage(values: &Values, usage_bytes: i64) -> Values {
    let memory_bytes = values.memory_bytes.map(|limit| limit.max(usage_bytes));
    Values { memory_bytes, ..values.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(requests: Value, limits: Value) -> Pod {
        let spec =
            json!({"containers": [{"name": "c", "resources": {"requests": requests, "limits": limits}}]});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap())
    }

    fn some() -> Vec<Pod> {
        let all = json!({"cpu": "1", "memory": "100Mi"});
        vec![
            pod(all.clone(), all),
            pod(json!({"cpu": "250m", "memory": "200Mi"}), json!({})),
            pod(json!({"cpu": "500m"}), json!({"memory": "1Gi"})),
            pod(json!({}), json!({})),
        ]
    }

    #[test]
    fn burstable_has_the_shares_of_its_pods() {
        let shares = |pods: &[Pod]| {
            let tiers = tier_values(pods.iter(), &TierSettings::default());
            assert_eq!(tiers.best_effort.cpu_shares, Some(2));
            assert_eq!(tiers.pods, Values { huge_pages: HugePages::Unlimited, ..Values::default() });
            assert_eq!((tiers.burstable.memory_low, tiers.burstable.memory_bytes), (None, None));
            tiers.burstable.cpu_shares.unwrap()
        };
        assert_eq!((shares(&[]), shares(&some())), (2, 768));
        let most = json!({"cpu": "9223372036854775807", "memory": "9223372036854775807"});
        assert_eq!(shares(&vec![pod(most, json!({})); 1000]), 262_144);
    }

    #[test]
    fn memory_is_protected_with_the_tiered_policy() {
        let tiers_with = |policy| {
            tier_values(some().iter(), &TierSettings { memory_qos: policy, ..TierSettings::default() })
        };
        let tiers = tiers_with(Some(MemoryReservationPolicy::Tiered));
        // A limit of memory alone is also a request.
        let burstable = (200 << 20) + (1 << 30);
        assert_eq!(tiers.pods.memory_min, Some((100 << 20) + burstable));
        // Otherwise the protection of the tier would have no effect.
        assert_eq!(tiers.pods.memory_low, Some(burstable));
        assert_eq!((tiers.burstable.memory_min, tiers.burstable.memory_low), (None, Some(burstable)));
        assert_eq!(
            (tiers.best_effort.memory_low, tiers.protected),
            (None, ProtectedMemory { guaranteed: 100 << 20, burstable })
        );
        for policy in [Some(MemoryReservationPolicy::Nothing), None] {
            let tiers = tiers_with(policy);
            assert_eq!((tiers.pods.memory_min, tiers.pods.memory_low), (None, None));
            assert_eq!((tiers.burstable.memory_low, tiers.protected), (None, ProtectedMemory::default()));
        }
    }

    #[test]
    fn only_what_is_protected_is_reset() {
        let values = |min: Option<i64>, low| Values { memory_min: min, memory_low: low, ..Values::default() };
        let all =
            Values { cpu_shares: Some(512), memory_bytes: Some(1 << 30), ..values(Some(4096), Some(0)) };
        assert_eq!(unprotected(&all), Some(values(Some(0), None)));
        assert_eq!(unprotected(&values(Some(0), Some(8192))), Some(values(None, Some(0))));
        // `max` is read as -1.
        assert_eq!(unprotected(&values(Some(-1), Some(-1))), Some(values(Some(0), Some(0))));
        assert_eq!(unprotected(&values(Some(0), Some(0))), None);
        assert_eq!(unprotected(&values(None, None)), None, "version 1");
    }

    #[test]
    fn memory_is_reserved_for_higher_classes() {
        let all = json!({"cpu": "1", "memory": "100Mi"});
        let pods = [pod(all.clone(), all), pod(json!({"memory": "200Mi"}), json!({}))];
        let check = |percent, allocatable, expected: (Option<i64>, Option<i64>)| {
            let settings =
                TierSettings { memory_reserved: percent, allocatable_memory: allocatable, memory_qos: None };
            let tiers = tier_values(pods.iter(), &settings);
            assert_eq!((tiers.burstable.memory_bytes, tiers.best_effort.memory_bytes), expected);
        };
        let gibibyte = 1 << 30;
        check(Some(50), gibibyte, (Some(gibibyte - (50 << 20)), Some(gibibyte - (150 << 20))));
        check(Some(100), 50 << 20, (Some(4096), Some(4096)));
        check(None, gibibyte, (None, None));
        check(Some(50), 0, (None, None));
        let limited = Values { memory_bytes: Some(100), ..Values::default() };
        assert_eq!(raised_to_usage(&limited, 150).memory_bytes, Some(150));
        assert_eq!(raised_to_usage(&limited, 50).memory_bytes, Some(100));
        assert_eq!(raised_to_usage(&Values::default(), 50).memory_bytes, None);
    }
}
