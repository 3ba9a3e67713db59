//! The values of a pod's cgroup, computed from the pod (pure).

use std::collections::BTreeMap;

use crate::model::api::Container;
use crate::model::container_memory::pod_level_memory_limit;
pub use crate::model::container_memory::{MemoryReservationPolicy, Throttling};
use crate::model::pod::{Pod, QosClass, has_pod_level_resources, limit};
use crate::model::quantity::{Amount, amount};
use crate::model::requests::{Amounts, Overhead, pod_limits, pod_requests};

use super::values::{HugePages, Quota, Values, quota};
use crate::model::cpu_shares::{MIN_SHARES, millicores_of_shares, shares};

/// What the configuration says about the cgroups of pods.
#[derive(Debug, Clone, PartialEq)]
pub struct PodSettings {
    /// `cpuCFSQuota`.
    pub cfs_quota: bool,
    /// `cpuCFSQuotaPeriod` in microseconds.
    pub cfs_period: u64,
    /// `podPidsLimit`; 0 or less: none.
    pub pids_limit: i64,
    /// `memoryReservationPolicy`; `None` without the gate `MemoryQoS` and on version 1.
    pub memory_qos: Option<MemoryReservationPolicy>,
    /// `memoryThrottlingFactor`; `None` without it, without the gate `MemoryQoS` and on version 1.
    pub throttling: Option<Throttling>,
}

/// The values with which a pod's cgroup is made (Go: pkg/kubelet/cm `ResourceConfigForPod`).
/// The pod has the resources that it was granted. `exclusive_cpus`: at least one of its containers
/// has CPUs of its own, and then no quota slows them down.
#[must_use]
pub fn pod_values(pod: &Pod, exclusive_cpus: bool, settings: &PodSettings) -> Values {
    let requests = pod_requests(pod, Overhead::Included);
    let limits = pod_limits(pod, Overhead::Included);
    let class = pod.qos();
    let amount = |amounts: &Amounts, resource: &str| amounts.get(resource).copied().unwrap_or_default();
    let cpu_quota = Quota {
        microseconds: quota(amount(&limits, "cpu").milli(), settings.cfs_period)
            .filter(|_| settings.cfs_quota && !exclusive_cpus),
        period: settings.cfs_period,
    };
    let limited = |resource| match class {
        QosClass::Guaranteed => true,
        QosClass::Burstable => is_limited(pod, resource),
        QosClass::BestEffort => false,
    };
    let memory = amount(&limits, "memory").units();
    let protected = Some(amount(&requests, "memory").units())
        .filter(|bytes| settings.memory_qos == Some(MemoryReservationPolicy::Tiered) && *bytes > 0);
    let guaranteed = class == QosClass::Guaranteed;
    Values {
        cpu_shares: Some(match class {
            QosClass::BestEffort => MIN_SHARES,
            _ => shares(amount(&requests, "cpu").milli()),
        }),
        cpu_quota: limited("cpu").then_some(cpu_quota),
        memory_bytes: Some(memory).filter(|bytes| *bytes > 0 && limited("memory")),
        pids: Some(settings.pids_limit).filter(|limit| *limit > 0),
        huge_pages: HugePages::Limits(huge_pages(&requests)),
        cpus: None,
        memory_min: protected.filter(|_| guaranteed),
        memory_low: protected.filter(|_| !guaranteed),
        memory_high: settings
            .throttling
            .and_then(|throttling| memory_high(pod, amount(&requests, "memory").units(), memory, throttling)),
    }
}

/// Where the memory of a pod is throttled; only of one with resources as a whole. That throttles each
/// of its containers, for the kernel checks all cgroups above a process (Go: pkg/kubelet/cm
/// `ApplyPodLevelMemoryHigh`).
fn memory_high(pod: &Pod, request: i64, limit: i64, throttling: Throttling) -> Option<i64> {
    let is_limited = pod_level_memory_limit(pod).is_some() || each_container_is_limited(pod, "memory");
    let is_even = request == limit && request != 0;
    if !has_pod_level_resources(pod.spec()) || !is_limited || is_even || limit == 0 {
        return None;
    }
    throttling.memory_high(request, limit)
}

/// A pod's values without its overhead, as the runtime receives them when the pod is resized: it
/// receives the overhead beside them (Go: kuberuntime `subtractOverheadFromResourceConfig`).
/// Values without a limit have none.
#[must_use]
pub fn without_overhead(values: &Values, pod: &Pod) -> Values {
    let overhead =
        |resource: &str| pod.spec().overhead.as_ref().and_then(|all| all.get(resource)).map(amount);
    let mut rest = values.clone();
    if let Some(cpu) = overhead("cpu").map(Amount::milli) {
        let own = values.cpu_shares.map(|own| millicores_of_shares(own).saturating_sub(cpu));
        rest.cpu_shares = own.map(shares);
        rest.cpu_quota = values.cpu_quota.map(|own| {
            let less = quota(cpu, own.period).unwrap_or(0);
            Quota { microseconds: own.microseconds.map(|time| time.saturating_sub(less).max(0)), ..own }
        });
    }
    if let Some(memory) = overhead("memory").map(Amount::units) {
        let less = |own: i64| if own > 0 { own.saturating_sub(memory).max(0) } else { own };
        rest.memory_bytes = values.memory_bytes.map(less);
    }
    rest
}

/// Whether the sum of the limits is a limit of the pod: one of the pod as a whole, or one of each
/// container.
fn is_limited(pod: &Pod, resource: &str) -> bool {
    let of_pod = pod.spec().resources.as_ref().and_then(|all| all.limits.as_ref()?.get(resource).map(amount));
    is_positive(of_pod) || each_container_is_limited(pod, resource)
}

/// Whether each regular and init container has a limit of its own.
fn each_container_is_limited(pod: &Pod, resource: &str) -> bool {
    let is_limited = |container: &Container| is_positive(limit(container, resource));
    pod.init_containers().iter().chain(pod.containers()).all(is_limited)
}

fn is_positive(amount: Option<Amount>) -> bool {
    amount.is_some_and(|amount| !amount.is_zero())
}

/// Bytes of huge pages by the size of a page.
fn huge_pages(amounts: &Amounts) -> BTreeMap<u64, u64> {
    let mut pages: BTreeMap<u64, u64> = BTreeMap::new();
    for (name, amount) in amounts {
        let Some(size) = name.strip_prefix("hugepages-").and_then(|size| Amount::parse(size).ok()) else {
            continue;
        };
        let bytes = u64::try_from(amount.units()).unwrap_or(0);
        if let Ok(size) = u64::try_from(size.units()) {
            let sum = pages.entry(size).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn settings() -> PodSettings {
        PodSettings {
            cfs_quota: true,
            cfs_period: 100_000,
            pids_limit: -1,
            memory_qos: None,
            throttling: None,
        }
    }

    fn pod(spec: Value) -> Pod {
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap())
    }

    /// Shares, quota (-1: none), memory.
    fn check(spec: Value, expected: (u64, Option<i64>, Option<i64>)) {
        let values = pod_values(&pod(spec.clone()), false, &settings());
        let found = (values.cpu_shares.unwrap(), values.cpu_quota.map(Quota::number), values.memory_bytes);
        assert_eq!(found, expected, "{spec}");
    }

    fn with(name: &str, requests: Value, limits: Value) -> Value {
        json!({"name": name, "resources": {"requests": requests, "limits": limits}})
    }

    fn sidecar(mut container: Value) -> Value {
        container["restartPolicy"] = json!("Always");
        container
    }

    #[test]
    fn classes_decide_which_values_are_written() {
        check(json!({"containers": [{"name": "c"}]}), (2, None, None));
        let limits = json!({"cpu": "500m", "memory": "100Mi"});
        check(
            json!({"containers": [with("c", limits.clone(), limits.clone())]}),
            (512, Some(50_000), Some(100 << 20)),
        );
        let burstable = with("c", json!({"cpu": "100m"}), limits.clone());
        check(json!({"containers": [burstable]}), (102, Some(50_000), Some(100 << 20)));
        // One container without a limit of memory: the pod has none.
        let half = with("b", json!({}), json!({"cpu": "100m"}));
        check(
            json!({"containers": [with("a", limits.clone(), limits.clone()), half]}),
            (614, Some(60_000), None),
        );
        check(json!({"containers": [with("c", json!({"memory": "1Gi"}), json!({}))]}), (2, None, None));
    }

    #[test]
    fn init_containers_and_sidecars_count() {
        let small = with("a", json!({"cpu": "100m"}), json!({"cpu": "200m", "memory": "64Mi"}));
        let large = with("i", json!({"cpu": "1"}), json!({"cpu": "1200m", "memory": "400Mi"}));
        let free = json!({"name": "free"});
        let spec = |inits: Vec<Value>| json!({"containers": [small.clone()], "initContainers": inits});
        check(spec(vec![large.clone()]), (1024, Some(120_000), Some(400 << 20)));
        check(spec(vec![large.clone(), free.clone()]), (1024, None, None));
        // A limited sidecar before it is no limit of the init container.
        let helper = sidecar(large.clone());
        check(spec(vec![helper.clone(), free.clone()]), (1126, None, None));
        check(spec(vec![helper.clone(), large.clone()]), (2048, Some(240_000), Some(800 << 20)));
        check(spec(vec![free, helper]), (1126, None, None));
    }

    #[test]
    fn resources_of_the_pod_and_overhead() {
        let limits = json!({"cpu": "600m", "memory": "200Mi"});
        let mut spec = json!({"containers": [{"name": "a"}], "resources": {"requests": {"cpu": "300m"}, "limits": limits}});
        check(spec.clone(), (307, Some(60_000), Some(200 << 20)));
        spec["overhead"] = json!({"cpu": "100m", "memory": "10Mi"});
        check(spec.clone(), (409, Some(70_000), Some(210 << 20)));
        // Overhead makes no limit where there is none.
        spec["resources"]["limits"] = json!({"cpu": "600m", "memory": "0"});
        check(spec, (409, Some(70_000), None));
    }

    #[test]
    fn the_runtime_receives_values_without_overhead() {
        let values = |time, memory, milli| Values {
            cpu_shares: Some(shares(milli)),
            cpu_quota: Some(Quota { microseconds: time, period: 100_000 }),
            memory_bytes: Some(memory),
            ..Values::default()
        };
        let with = |overhead: Value| pod(json!({"containers": [{"name": "c"}], "overhead": overhead}));
        let some = with(json!({"cpu": "100m", "memory": "10Mi"}));
        let all = values(Some(70_000), 210 << 20, 400);
        assert_eq!(without_overhead(&all, &some), values(Some(60_000), 200 << 20, 300));
        assert_eq!(without_overhead(&values(None, -1, 400), &some), values(None, -1, 300));
        assert_eq!(without_overhead(&all, &with(json!({}))), all);
        let most = with(json!({"cpu": "9223372036854775807", "memory": "9223372036854775807"}));
        assert_eq!(without_overhead(&all, &most), values(Some(0), 0, 0));
    }

    #[test]
    fn settings_and_exclusive_cpus_change_the_quota() {
        let limits = json!({"cpu": "500m", "memory": "100Mi"});
        let pod = pod(json!({"containers": [with("c", limits.clone(), limits)]}));
        let values_with = |exclusive, settings: PodSettings| pod_values(&pod, exclusive, &settings);
        let unlimited = Some(Quota { microseconds: None, period: 100_000 });
        assert_eq!(values_with(true, settings()).cpu_quota, unlimited);
        assert_eq!(values_with(false, PodSettings { cfs_quota: false, ..settings() }).cpu_quota, unlimited);
        let short = values_with(false, PodSettings { cfs_period: 20_000, pids_limit: 128, ..settings() });
        assert_eq!(short.cpu_quota, Some(Quota { microseconds: Some(10_000), period: 20_000 }));
        assert_eq!((short.pids, values_with(false, settings()).pids), (Some(128), None));
        for (policy, min) in [
            (None, None),
            (Some(MemoryReservationPolicy::Nothing), None),
            (Some(MemoryReservationPolicy::Tiered), Some(100 << 20)),
        ] {
            let values = values_with(false, PodSettings { memory_qos: policy, ..settings() });
            assert_eq!((values.memory_min, values.memory_low), (min, None));
        }
    }

    #[test]
    fn huge_pages_and_hostile_numbers() {
        let huge = json!({"hugepages-2Mi": "4Mi", "hugepages-1Gi": "1Gi", "memory": "1Gi", "cpu": "1", "hugepages-x": "1"});
        let values =
            pod_values(&pod(json!({"containers": [with("c", huge.clone(), huge)]})), false, &settings());
        assert_eq!(values.huge_pages, HugePages::Limits([(2 << 20, 4 << 20), (1 << 30, 1 << 30)].into()));
        let most = json!({"cpu": "9223372036854775807", "memory": "9223372036854775807", "hugepages-2Mi": "9223372036854775807"});
        let many: Vec<Value> = (0..1000).map(|_| with("c", most.clone(), most.clone())).collect();
        let spec = json!({"containers": many, "overhead": most});
        check(spec, (262_144, Some((1 << 44) - 1), Some(i64::MAX)));
        let small = json!({"cpu": "0.0000001", "memory": "0.1"});
        check(json!({"containers": [with("c", small.clone(), small)]}), (2, Some(1000), Some(1)));
    }

    #[test]
    fn only_pods_with_resources_as_a_whole_and_a_limit_of_memory_are_throttled() {
        let throttling = Some(Throttling { factor: 0.5, page_bytes: 4096 });
        let high = |spec: Value, throttling| {
            pod_values(&pod(spec), false, &PodSettings { throttling, ..settings() }).memory_high
        };
        let free = json!({"name": "free"});
        let limited = with("c", json!({"memory": "50Mi"}), json!({"memory": "100Mi"}));
        let of_pod = |resources: Value| json!({"containers": [free.clone()], "resources": resources});
        let whole = of_pod(json!({"requests": {"memory": "100Mi"}, "limits": {"memory": "300Mi"}}));
        assert_eq!(high(whole.clone(), throttling), Some(200 << 20));
        assert_eq!(high(whole, None), None);
        // A limit alone is no request of the pod as a whole.
        assert_eq!(high(of_pod(json!({"limits": {"memory": "300Mi"}})), throttling), Some(150 << 20));
        let even = json!({"requests": {"memory": "300Mi"}, "limits": {"memory": "300Mi"}});
        assert_eq!(high(of_pod(even), throttling), None);
        assert_eq!(high(of_pod(json!({"requests": {"memory": "100Mi"}})), throttling), None);
        assert_eq!(high(of_pod(json!({})), throttling), None);
        assert_eq!(high(json!({"containers": [limited.clone()]}), throttling), None);
        // The limits of all containers are a limit of the pod.
        let cpu = json!({"requests": {"cpu": "1"}});
        let spec = json!({"containers": [limited.clone()], "resources": cpu.clone()});
        assert_eq!(high(spec, throttling), Some(75 << 20));
        let spec = json!({"containers": [limited.clone(), free.clone()], "resources": cpu.clone()});
        assert_eq!(high(spec, throttling), None);
        let spec = json!({"containers": [limited], "initContainers": [free.clone()], "resources": cpu});
        assert_eq!(high(spec, throttling), None);
    }

    #[test]
    fn burstable_pods_are_protected_more_weakly() {
        let settings = PodSettings { memory_qos: Some(MemoryReservationPolicy::Tiered), ..settings() };
        let values = pod_values(
            &pod(json!({"containers": [with("c", json!({"memory": "1Gi"}), json!({}))]})),
            false,
            &settings,
        );
        assert_eq!((values.memory_min, values.memory_low), (None, Some(1 << 30)));
        let nothing = pod_values(&pod(json!({"containers": [{"name": "c"}]})), false, &settings);
        assert_eq!((nothing.memory_min, nothing.memory_low), (None, None));
    }
}
