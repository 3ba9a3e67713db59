//! The values of containers that depend on the node: swap, and memory protection. The runtime
//! writes them, so they are part of requests to it (pure).

use std::collections::BTreeMap;

use super::api::Container;
use super::pod::{Pod, QosClass};
use super::quantity::{Amount, amount};

/// `memoryReservationPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryReservationPolicy {
    /// No memory is protected from reclaim.
    #[default]
    Nothing,
    /// The memory that pods request is protected: `memory.min` for Guaranteed pods, and the weaker
    /// `memory.low` for Burstable ones.
    Tiered,
}

/// `memorySwap.swapBehavior`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SwapBehavior {
    /// Containers have no swap.
    #[default]
    NoSwap,
    /// Some containers of Burstable pods have their share of the machine's.
    LimitedSwap,
}

/// What the limit of swap depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapSettings {
    /// The configured behavior.
    pub behavior: SwapBehavior,
    /// Whether the machine has version 2.
    pub cgroup_v2: bool,
    /// Whether the kernel can limit swap.
    pub controller: bool,
    /// Memory of the machine.
    pub memory_bytes: i64,
    /// Swap space of the machine.
    pub swap_bytes: i64,
}

/// How a container's swap is limited in requests to the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapLimit {
    /// Not at all: the kernel cannot.
    Nothing,
    /// Version 1: the limit of memory and swap together is the limit of memory
    /// (`memory_swap_limit_in_bytes`).
    AsMemory,
    /// Version 2: `memory.swap.max` in bytes (`unified`).
    Bytes(i64),
}

/// The limit of a container's swap (Go: kuberuntime `configureContainerSwapResources`).
#[must_use]
pub fn swap_limit(pod: &Pod, container: &Container, settings: &SwapSettings) -> SwapLimit {
    if !settings.controller {
        return SwapLimit::Nothing;
    }
    if !settings.cgroup_v2 {
        return SwapLimit::AsMemory;
    }
    let (request, _) = memory(container);
    let gets_some = has_swap(pod, container, settings);
    SwapLimit::Bytes(if gets_some { share_of_swap(request.units(), settings) } else { 0 })
}

/// Whether a container has a share of the machine's swap (Go: kuberuntime
/// `GetContainerSwapBehavior`).
#[must_use]
pub fn has_swap(pod: &Pod, container: &Container, settings: &SwapSettings) -> bool {
    let (request, limit) = memory(container);
    settings.behavior == SwapBehavior::LimitedSwap
        && settings.controller
        && settings.cgroup_v2
        && !pod.is_critical()
        && pod.qos() == QosClass::Burstable
        && !(request.is_zero() && limit.is_zero())
        && request != limit
}

/// The share of swap is that of memory. Computed as upstream, so that the numbers are the same.
fn share_of_swap(request: i64, settings: &SwapSettings) -> i64 {
    if settings.memory_bytes <= 0 || request > settings.memory_bytes {
        return 0;
    }
    let share = request.max(0) as f64 / settings.memory_bytes as f64;
    (share * settings.swap_bytes.max(0) as f64) as i64
}

/// Where `memory.high` of containers and pods is set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throttling {
    /// `memoryThrottlingFactor`, above 0 and at most 1.
    pub factor: f64,
    /// Size of a page of memory in bytes.
    pub page_bytes: i64,
}

impl Throttling {
    /// The bytes of `memory.high` between a request and the most that may be used, in whole pages;
    /// `None`: at or below the request there is none. Computed as upstream, so that the numbers are
    /// the same (Go: pkg/kubelet/cm `memoryHighForPod`).
    #[must_use]
    pub fn memory_high(&self, request: i64, most: i64) -> Option<i64> {
        let high = request as f64 + (most as f64 - request as f64) * self.factor;
        let page = self.page_bytes.max(1);
        let high = ((high.floor() / page as f64) as i64).saturating_mul(page);
        Some(high).filter(|high| *high > 0 && *high > request)
    }
}

/// What the memory protection of containers depends on. Only with the gate `MemoryQoS`, and on
/// version 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProtectionSettings {
    /// `memoryReservationPolicy`.
    pub reservation_policy: MemoryReservationPolicy,
    /// `None`: no container has a `memory.high`.
    pub throttling: Option<Throttling>,
    /// Memory of the machine less what is reserved; thresholds of eviction are not subtracted. 0: unknown.
    pub allocatable_memory: i64,
}

/// The files of version 2 that protect and throttle a container's memory, for `unified` of the
/// request to the runtime (Go: kuberuntime `generateLinuxContainerResources`). BestEffort containers
/// are throttled, too. A container without a limit in a pod that has one as a whole is not: the
/// pod's cgroup is.
#[must_use]
pub fn memory_protection(
    pod: &Pod,
    container: &Container,
    settings: &ProtectionSettings,
) -> BTreeMap<&'static str, i64> {
    let (request, limit) = memory(container);
    let (request, limit) = (request.units(), limit.units());
    let mut files = BTreeMap::new();
    if request != 0 && settings.reservation_policy == MemoryReservationPolicy::Tiered {
        let file = if pod.qos() == QosClass::Guaranteed { "memory.min" } else { "memory.low" };
        files.insert(file, request);
    } else {
        files.extend([("memory.min", 0), ("memory.low", 0)]);
    }
    let has_limited_pod = limit == 0 && pod_level_memory_limit(pod).is_some();
    let most = if limit != 0 { limit } else { settings.allocatable_memory };
    if let Some(throttling) = settings.throttling
        && !has_limited_pod
        && (request != limit || request == 0)
        && most > 0
    {
        files.extend(throttling.memory_high(request, most).map(|high| ("memory.high", high)));
    }
    files
}

/// The limit of memory of the pod as a whole, if it has one.
#[must_use]
pub fn pod_level_memory_limit(pod: &Pod) -> Option<Amount> {
    let limits = pod.spec().resources.as_ref()?.limits.as_ref()?;
    limits.get("memory").map(amount).filter(|limit| !limit.is_zero())
}

/// Request and limit of memory; a request that is missing is zero, as in the object.
fn memory(container: &Container) -> (Amount, Amount) {
    let Some(resources) = &container.resources else { return (Amount::ZERO, Amount::ZERO) };
    let memory_of = |map: &Option<BTreeMap<String, crate::model::Quantity>>| {
        map.as_ref().and_then(|map| map.get("memory")).map(amount).unwrap_or_default()
    };
    (memory_of(&resources.requests), memory_of(&resources.limits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(requests: Value, limits: Value, priority: i64) -> Pod {
        let resources = json!({"requests": requests, "limits": limits});
        let spec = json!({"priority": priority, "containers": [{"name": "c", "resources": resources}]});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap())
    }

    fn swap() -> SwapSettings {
        SwapSettings {
            behavior: SwapBehavior::LimitedSwap,
            cgroup_v2: true,
            controller: true,
            memory_bytes: 8 << 30,
            swap_bytes: 4 << 30,
        }
    }

    #[test]
    fn burstable_containers_have_their_share_of_swap() {
        let check = |pod: &Pod, settings: SwapSettings, expected| {
            assert_eq!(swap_limit(pod, &pod.containers()[0], &settings), expected);
        };
        let burstable = pod(json!({"memory": "1Gi"}), json!({"memory": "2Gi"}), 0);
        let half = SwapLimit::Bytes(512 << 20);
        check(&burstable, swap(), half);
        check(&pod(json!({"memory": "1Gi"}), json!({}), 0), swap(), half);
        check(&burstable, SwapSettings { behavior: SwapBehavior::NoSwap, ..swap() }, SwapLimit::Bytes(0));
        check(&burstable, SwapSettings { controller: false, ..swap() }, SwapLimit::Nothing);
        check(&burstable, SwapSettings { cgroup_v2: false, ..swap() }, SwapLimit::AsMemory);
        check(&burstable, SwapSettings { memory_bytes: 0, ..swap() }, SwapLimit::Bytes(0));
        check(&burstable, SwapSettings { memory_bytes: 1 << 20, ..swap() }, SwapLimit::Bytes(0));
        let none = SwapLimit::Bytes(0);
        check(&pod(json!({"memory": "1Gi"}), json!({"memory": "2Gi"}), 2_000_000_000), swap(), none);
        check(&pod(json!({"memory": "1Gi", "cpu": "1"}), json!({"memory": "1Gi"}), 0), swap(), none);
        check(&pod(json!({"cpu": "1"}), json!({}), 0), swap(), none);
        check(&pod(json!({}), json!({}), 0), swap(), none);
        let most = json!({"memory": "1Gi", "cpu": "1"});
        check(&pod(most.clone(), most, 0), swap(), none);
    }

    fn throttled(factor: f64) -> Option<Throttling> {
        Some(Throttling { factor, page_bytes: 4096 })
    }

    #[test]
    fn memory_is_protected_and_throttled() {
        let settings = ProtectionSettings {
            reservation_policy: MemoryReservationPolicy::Tiered,
            throttling: throttled(0.9),
            allocatable_memory: 8 << 30,
        };
        let check = |pod: Pod, settings: ProtectionSettings, expected: &[(&'static str, i64)]| {
            let found = memory_protection(&pod, &pod.containers()[0], &settings);
            assert_eq!(found, expected.iter().copied().collect());
        };
        let all = json!({"memory": "100Mi", "cpu": "1"});
        check(pod(all.clone(), all, 0), settings, &[("memory.min", 100 << 20)]);
        let burstable = || pod(json!({"memory": "100Mi"}), json!({"memory": "200Mi"}), 0);
        check(burstable(), settings, &[("memory.low", 100 << 20), ("memory.high", 190 << 20)]);
        let nothing = ProtectionSettings { reservation_policy: MemoryReservationPolicy::Nothing, ..settings };
        check(burstable(), nothing, &[("memory.min", 0), ("memory.low", 0), ("memory.high", 190 << 20)]);
        // Without a limit, the memory of the node is the most.
        let high = (((100 << 20) as f64 + ((8_i64 << 30) - (100 << 20)) as f64 * 0.9) / 4096.0) as i64 * 4096;
        let free = || pod(json!({"memory": "100Mi"}), json!({}), 0);
        check(free(), settings, &[("memory.low", 100 << 20), ("memory.high", high)]);
        let unknown = ProtectionSettings { allocatable_memory: 0, ..settings };
        check(free(), unknown, &[("memory.low", 100 << 20)]);
        let best_effort = || pod(json!({}), json!({}), 0);
        let unknown = ProtectionSettings { allocatable_memory: 0, ..nothing };
        check(best_effort(), unknown, &[("memory.min", 0), ("memory.low", 0)]);
        // 0.9 × 8 GiB is 7730941132.8 bytes: 1887436 whole pages.
        let high = 1_887_436 * 4096;
        check(best_effort(), nothing, &[("memory.min", 0), ("memory.low", 0), ("memory.high", high)]);
        // Request and limit are equal, also if the request is the limit's default.
        let even = pod(json!({"memory": "100Mi"}), json!({"memory": "100Mi"}), 0);
        check(even, nothing, &[("memory.min", 0), ("memory.low", 0)]);
        let most = pod(json!({"memory": "1"}), json!({"memory": "9223372036854775807"}), 0);
        let found = memory_protection(
            &most,
            &most.containers()[0],
            &ProtectionSettings { throttling: Some(Throttling { factor: 0.9, page_bytes: 0 }), ..settings },
        );
        assert!(found["memory.high"] > 0);
    }

    #[test]
    fn without_a_factor_no_container_is_throttled() {
        let settings = ProtectionSettings {
            reservation_policy: MemoryReservationPolicy::Nothing,
            throttling: None,
            allocatable_memory: 8 << 30,
        };
        for (requests, limits) in [
            (json!({}), json!({})),
            (json!({"memory": "100Mi"}), json!({"memory": "200Mi"})),
            (json!({"memory": "100Mi"}), json!({})),
        ] {
            let pod = pod(requests, limits, 0);
            let found = memory_protection(&pod, &pod.containers()[0], &settings);
            assert_eq!(found, [("memory.min", 0), ("memory.low", 0)].into());
        }
    }

    #[test]
    fn throttling_of_a_limited_pod_replaces_that_of_containers_without_a_limit() {
        let settings = ProtectionSettings {
            reservation_policy: MemoryReservationPolicy::Nothing,
            throttling: throttled(0.5),
            allocatable_memory: 8 << 30,
        };
        let high = |resources: Value, of_pod: Value| {
            let spec = json!({"containers": [{"name": "c", "resources": resources}], "resources": of_pod});
            let pod =
                Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap());
            memory_protection(&pod, &pod.containers()[0], &settings).get("memory.high").copied()
        };
        let limited = json!({"limits": {"memory": "1Gi"}});
        assert_eq!(high(json!({}), limited.clone()), None);
        assert_eq!(high(json!({"requests": {"memory": "100Mi"}}), limited.clone()), None);
        let own = json!({"requests": {"memory": "100Mi"}, "limits": {"memory": "200Mi"}});
        assert_eq!(high(own, limited), Some(150 << 20));
        assert_eq!(high(json!({}), json!({"limits": {"cpu": "1"}})), Some(4 << 30));
    }

    #[test]
    fn throttling_begins_at_whole_pages_above_the_request() {
        let high =
            |factor, page_bytes, request, most| Throttling { factor, page_bytes }.memory_high(request, most);
        assert_eq!(high(0.9, 4096, 0, 10_000), Some(8192));
        assert_eq!(high(0.9, 65_536, 0, 10_000), None);
        assert_eq!(high(0.5, 4096, 4096, 12_288), Some(8192));
        // Within one page of the request.
        assert_eq!(high(0.5, 4096, 8192, 12_287), None);
        assert_eq!(high(1.0, 4096, 0, i64::MAX).map(|high| high > 0), Some(true));
        assert_eq!(high(0.9, 4096, 8192, 4096), None);
    }
}
