//! Resource quantities as kernel limits: CPU shares and quota, memory
//! limits, huge pages, swap and `oom_score_adj` (Go: kuberuntime_container_linux, pkg/kubelet/qos).

use std::collections::{BTreeMap, HashMap};

use crate::model::api::{Container, ResourceRequirements};
use crate::model::container_memory::{SwapLimit, SwapSettings, memory_protection, swap_limit};
use crate::model::cpu_shares::shares;
use crate::model::pod::{Pod, QosClass, is_sidecar};
use crate::model::quantity::{Amount, amount};
use crate::model::requests::container_requests;
use crate::transport::generated::runtime::{HugepageLimit, LinuxContainerResources};

use super::settings::Settings;

/// The kernel refuses a shorter CFS quota.
const MIN_QUOTA_MICROSECONDS: i64 = 1000;
/// Score of processes that should be killed last.
const PROTECTED_SCORE: i64 = -997;
const BEST_EFFORT_SCORE: i64 = 1000;
/// The file of version 2 with the use of memory from which on a container is throttled.
pub(super) const MEMORY_HIGH: &str = "memory.high";
/// The text of a file of version 2 without a limit.
pub(super) const NO_LIMIT: &str = "max";

/// Relative CPU weight (cgroup v1 scale) of a request.
pub(super) fn cpu_shares(millicores: i64) -> i64 {
    i64::try_from(shares(millicores)).unwrap_or(i64::MAX)
}

/// CFS quota of a limit; 0 (no limit) without one.
pub(super) fn cpu_quota(millicores: i64, period_microseconds: i64) -> i64 {
    if millicores <= 0 {
        return 0;
    }
    (millicores.saturating_mul(period_microseconds) / 1000).max(MIN_QUOTA_MICROSECONDS)
}

/// The pod's resources as the sandbox request carries them: sums over the containers, at least
/// those of any init container. Overhead is not in it.
pub(super) fn sandbox_resources(pod: &Pod, settings: &Settings) -> LinuxContainerResources {
    let cpu_limit = pod_total(pod, RequestsOrLimits::Limits, "cpu").unwrap_or_default();
    let memory_limit = pod_total(pod, RequestsOrLimits::Limits, "memory").unwrap_or_default();
    cpu_and_memory(pod_total(pod, RequestsOrLimits::Requests, "cpu"), cpu_limit, memory_limit, settings)
}

/// The numbers of one container.
pub(super) fn container_resources(
    pod: &Pod,
    container: &Container,
    settings: &Settings,
) -> LinuxContainerResources {
    let own = container.resources.as_ref();
    let limit = |resource: &str| {
        let non_zero_limit = |requirements: Option<&ResourceRequirements>| {
            lookup(requirements, RequestsOrLimits::Limits, resource).filter(|amount| !amount.is_zero())
        };
        // A container without a limit has the pod's.
        non_zero_limit(own).or_else(|| non_zero_limit(pod.spec().resources.as_ref())).unwrap_or_default()
    };
    let request = lookup(own, RequestsOrLimits::Requests, "cpu");
    let mut resources = cpu_and_memory(request, limit("cpu"), limit("memory"), settings);
    resources.oom_score_adj = oom_score_adj(pod, container, settings.machine.memory_capacity_bytes);
    resources.hugepage_limits = hugepage_limits(pod, container, &settings.machine.hugepage_sizes);
    limit_swap(&mut resources, pod, container, settings);
    if let Some(protection) = &settings.memory_qos {
        let files = memory_protection(pod, container, protection);
        resources.unified.extend(files.into_iter().map(|(file, bytes)| (file.to_owned(), bytes.to_string())));
    } else if settings.machine.cgroup_v2 {
        // A resize removes what the gate has left.
        resources.unified.insert(MEMORY_HIGH.to_owned(), NO_LIMIT.to_owned());
    }
    resources
}

/// A RuntimeClass' overhead as the sandbox request carries it: requests are limits, too.
pub(super) fn overhead_resources(
    overhead: &BTreeMap<String, crate::model::Quantity>,
    settings: &Settings,
) -> LinuxContainerResources {
    let overhead_amount = |resource: &str| overhead.get(resource).map(amount);
    cpu_and_memory(
        overhead_amount("cpu"),
        overhead_amount("cpu").unwrap_or_default(),
        overhead_amount("memory").unwrap_or_default(),
        settings,
    )
}

fn cpu_and_memory(
    cpu_request: Option<Amount>,
    cpu_limit: Amount,
    memory_limit: Amount,
    settings: &Settings,
) -> LinuxContainerResources {
    let mut resources = LinuxContainerResources {
        cpu_shares: cpu_shares(cpu_request.unwrap_or(cpu_limit).milli()),
        memory_limit_in_bytes: memory_limit.units(),
        ..LinuxContainerResources::default()
    };
    if settings.cpu_cfs_quota {
        let period = i64::try_from(settings.cpu_cfs_quota_period.as_micros()).unwrap_or(i64::MAX);
        resources.cpu_period = period;
        resources.cpu_quota = cpu_quota(cpu_limit.milli(), period);
    }
    if settings.machine.cgroup_v2 && !settings.single_process_oom_kill.unwrap_or(false) {
        resources.unified = BTreeMap::from([("memory.oom.group".to_owned(), "1".to_owned())]);
    }
    resources
}

fn limit_swap(
    resources: &mut LinuxContainerResources,
    pod: &Pod,
    container: &Container,
    settings: &Settings,
) {
    let machine = &settings.machine;
    let number = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let swap = SwapSettings {
        behavior: settings.swap,
        cgroup_v2: machine.cgroup_v2,
        controller: machine.swap_controller,
        memory_bytes: number(machine.memory_capacity_bytes),
        swap_bytes: number(machine.swap_capacity_bytes),
    };
    match swap_limit(pod, container, &swap) {
        SwapLimit::Nothing => {}
        // On v1 this number is memory and swap together.
        SwapLimit::AsMemory => resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes,
        SwapLimit::Bytes(bytes) => {
            resources.unified.insert("memory.swap.max".to_owned(), bytes.to_string());
        }
    }
}

#[derive(Clone, Copy)]
enum RequestsOrLimits {
    Requests,
    Limits,
}

fn lookup(
    requirements: Option<&ResourceRequirements>,
    which: RequestsOrLimits,
    resource: &str,
) -> Option<Amount> {
    let requirements = requirements?;
    let map = match which {
        RequestsOrLimits::Requests => requirements.requests.as_ref(),
        RequestsOrLimits::Limits => requirements.limits.as_ref(),
    };
    map?.get(resource).map(amount)
}

/// The pod's sum of `resource`, `None` if no container states any. A pod-level value counts
/// instead of the sum.
fn pod_total(pod: &Pod, which: RequestsOrLimits, resource: &str) -> Option<Amount> {
    if let Some(stated) = lookup(pod.spec().resources.as_ref(), which, resource) {
        return Some(stated);
    }
    let stated_amount = |container: &Container| lookup(container.resources.as_ref(), which, resource);
    let plus = |total: Option<Amount>, more: Option<Amount>| match (total, more) {
        (Some(total), Some(more)) => Some(total + more),
        (total, more) => total.or(more),
    };
    let mut running = pod.containers().iter().map(stated_amount).fold(None, plus);
    let (mut sidecars, mut peak) = (None, None);
    for container in pod.init_containers() {
        // While an init container runs, only the sidecars before it do, too.
        let needed = if is_sidecar(container) {
            running = plus(running, stated_amount(container));
            sidecars = plus(sidecars, stated_amount(container));
            sidecars
        } else {
            plus(sidecars, stated_amount(container))
        };
        peak = peak.max(needed);
    }
    running.max(peak)
}

/// The `oom_score_adj`: containers with a high one are killed first when memory runs out.
pub(super) fn oom_score_adj(pod: &Pod, container: &Container, memory_capacity_bytes: u64) -> i64 {
    let node_critical =
        pod.is_critical() && pod.spec().priority_class_name.as_deref() == Some("system-node-critical");
    match pod.qos() {
        _ if node_critical => return PROTECTED_SCORE,
        QosClass::Guaranteed => return PROTECTED_SCORE,
        QosClass::BestEffort => return BEST_EFFORT_SCORE,
        QosClass::Burstable => {}
    }
    let capacity = i128::from(memory_capacity_bytes.max(1));
    let request = |container: &Container| {
        lookup(container.resources.as_ref(), RequestsOrLimits::Requests, "memory").unwrap_or_default().units()
    };
    let score = |bytes: i64| BEST_EFFORT_SCORE - clamp(i128::from(bytes) * 1000 / capacity);
    let share = leftover_share(pod);
    let mut own = score(request(container).saturating_add(share));
    if is_sidecar(container) && pod.init_containers().iter().any(|init| init.name == container.name) {
        // A sidecar must not be killed before the containers that it serves.
        let smallest = pod.containers().iter().map(request).min().unwrap_or(0);
        own = own.min(score(smallest.saturating_add(share)));
    }
    // Stay between the protected and the best-effort pods.
    own.clamp(BEST_EFFORT_SCORE + PROTECTED_SCORE, BEST_EFFORT_SCORE - 1)
}

/// Each container's share of the part of a pod-level memory request beyond the containers' own, of
/// which init containers and regular ones do not run at the same time.
fn leftover_share(pod: &Pod) -> i64 {
    let Some(stated) = lookup(pod.spec().resources.as_ref(), RequestsOrLimits::Requests, "memory") else {
        return 0;
    };
    let sum = container_requests(pod).get("memory").copied().unwrap_or_default();
    let count = i64::try_from(pod.containers().len() + pod.init_containers().len()).unwrap_or(i64::MAX);
    stated.units().saturating_sub(sum.units()).max(0) / count.max(1)
}

fn clamp(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// One entry for every size the node knows: zero unless the container (or else the pod) requests
/// it.
fn hugepage_limits(pod: &Pod, container: &Container, sizes: &[String]) -> Vec<HugepageLimit> {
    let stated_limits = |requirements: Option<&ResourceRequirements>| -> HashMap<String, u64> {
        let limits = requirements.and_then(|requirements| requirements.limits.as_ref());
        limits
            .into_iter()
            .flatten()
            .filter_map(|(resource, quantity)| {
                let size = page_size_name(Amount::parse(resource.strip_prefix("hugepages-")?).ok()?.units());
                Some((size, u64::try_from(amount(quantity).units()).unwrap_or(0)))
            })
            .collect()
    };
    let mut limits = stated_limits(pod.spec().resources.as_ref());
    limits.extend(stated_limits(container.resources.as_ref()));
    sizes
        .iter()
        .map(|size| HugepageLimit {
            page_size: size.clone(),
            limit: limits.get(size).copied().unwrap_or(0),
            ..HugepageLimit::default()
        })
        .collect()
}

/// `2MB` for 2 MiB: the notation of the CRI and of the hugetlb cgroup files.
pub(super) fn page_size_name(bytes: i64) -> String {
    let (mut size, mut unit) = (bytes, 0);
    const UNITS: [&str; 6] = ["B", "KB", "MB", "GB", "TB", "PB"];
    while size >= 1024 && size % 1024 == 0 && unit + 1 < UNITS.len() {
        size /= 1024;
        unit += 1;
    }
    format!("{size}{}", UNITS.get(unit).copied().unwrap_or("B"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::container_memory::{
        MemoryReservationPolicy, ProtectionSettings, SwapBehavior, Throttling,
    };
    use serde_json::json;

    fn settings() -> Settings {
        let mut settings = super::super::tests::settings();
        settings.machine.memory_capacity_bytes = 1000 << 20;
        settings
    }

    fn pod(spec: serde_json::Value) -> Pod {
        Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(
                json!({"metadata": {"name": "p"}, "spec": spec}),
            )
            .unwrap(),
        )
    }

    #[test]
    fn cpu_shares_and_quota_follow_from_millicores() {
        for (milli, shares, quota) in [
            (0, 2, 0),
            (1, 2, 1000),
            (100, 102, 10_000),
            (1000, 1024, 100_000),
            (300_000, 262_144, 30_000_000),
        ] {
            assert_eq!((cpu_shares(milli), cpu_quota(milli, 100_000)), (shares, quota), "{milli}");
        }
        assert_eq!(cpu_shares(i64::MAX), 262_144);
        assert_eq!(cpu_quota(i64::MAX, i64::MAX), i64::MAX / 1000);
    }

    #[test]
    fn sandbox_resources_are_sum_or_largest_init_container() {
        let cpu = |name: &str, cpu: &str, extra: serde_json::Value| {
            let mut container =
                json!({"name": name, "resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}});
            container.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            container
        };
        let check = |spec, milli| {
            let resources = sandbox_resources(&pod(spec), &settings());
            assert_eq!(resources.cpu_quota, cpu_quota(milli, 100_000));
            assert_eq!(resources.cpu_shares, cpu_shares(milli));
        };
        let no = json!({});
        let sidecar = json!({"restartPolicy": "Always"});
        check(json!({"containers": [cpu("a", "100m", no.clone()), cpu("b", "200m", no.clone())]}), 300);
        check(
            json!({"containers": [cpu("a", "100m", no.clone())], "initContainers": [cpu("i", "500m", no.clone())]}),
            500,
        );
        check(
            json!({"containers": [cpu("a", "100m", no.clone())], "initContainers": [
                cpu("s", "50m", sidecar.clone()), cpu("i", "500m", no.clone()), cpu("t", "60m", sidecar)]}),
            550,
        );
        check(
            json!({"containers": [cpu("a", "100m", no)], "resources": {"requests": {"cpu": "700m"},
                "limits": {"cpu": "700m"}}}),
            700,
        );
        let nothing = sandbox_resources(&pod(json!({"containers": [{"name": "c"}]})), &settings());
        assert_eq!((nothing.cpu_shares, nothing.cpu_quota, nothing.memory_limit_in_bytes), (2, 0, 0));
    }

    #[test]
    fn oom_score_follows_from_qos_and_memory_request() {
        let check = |spec: serde_json::Value, container: &str, expected| {
            let pod = pod(spec);
            let container = pod.all_containers().find(|candidate| candidate.name == container).unwrap();
            assert_eq!(oom_score_adj(&pod, container, 1000 << 20), expected);
        };
        let memory =
            |name: &str, memory: &str| json!({"name": name, "resources": {"requests": {"memory": memory}}});
        check(json!({"containers": [{"name": "c"}]}), "c", 1000);
        check(json!({"containers": [memory("c", "100Mi")]}), "c", 900);
        check(json!({"containers": [memory("c", "1Ki")]}), "c", 999);
        check(json!({"containers": [memory("c", "5000Mi")]}), "c", 3);
        check(
            json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}}]}),
            "c",
            -997,
        );
        check(
            json!({"containers": [memory("c", "1Mi")], "priority": 2_000_001_000,
                "priorityClassName": "system-node-critical"}),
            "c",
            -997,
        );
        let mut sidecar = memory("s", "10Mi");
        sidecar["restartPolicy"] = json!("Always");
        let spec =
            json!({"containers": [memory("a", "200Mi"), memory("b", "50Mi")], "initContainers": [sidecar]});
        check(spec.clone(), "s", 950);
        check(spec, "a", 800);
        check(
            json!({"containers": [memory("a", "200Mi"), {"name": "b"}], "resources": {"requests": {"memory": "400Mi"}}}),
            "b",
            900,
        );
    }

    #[test]
    fn oom_score_shares_the_request_of_the_pod_that_is_left() {
        let memory =
            |name: &str, memory: &str| json!({"name": name, "resources": {"requests": {"memory": memory}}});
        let score = |spec: &serde_json::Value, name: &str| {
            let pod = pod(spec.clone());
            let container = pod.all_containers().find(|container| container.name == name).unwrap();
            oom_score_adj(&pod, container, 1000 << 20)
        };
        // The larger of init and regular containers counts: 400 less 100, in two parts.
        let spec = json!({"containers": [memory("a", "50Mi")], "initContainers": [memory("i", "100Mi")],
            "resources": {"requests": {"memory": "400Mi"}}});
        assert_eq!((score(&spec, "a"), score(&spec, "i")), (800, 750));
        // The request of the pod is smaller than those of its containers: nothing is left to share.
        let spec = json!({"containers": [memory("a", "150Mi"), memory("b", "50Mi")],
            "resources": {"requests": {"memory": "100Mi"}}});
        assert_eq!((score(&spec, "a"), score(&spec, "b")), (850, 950));
        // A sidecar is protected like the smallest regular container, which has its part, too.
        let mut sidecar = memory("s", "50Mi");
        sidecar["restartPolicy"] = json!("Always");
        let spec = json!({"containers": [memory("a", "150Mi")], "initContainers": [sidecar],
            "resources": {"requests": {"memory": "400Mi"}}});
        assert_eq!((score(&spec, "a"), score(&spec, "s")), (750, 750));
    }

    #[test]
    fn limited_swap_and_memory_qos_are_in_unified() {
        let pod = pod(json!({"containers": [{"name": "c", "resources": {
            "requests": {"memory": "100Mi"}, "limits": {"memory": "200Mi"}}}]}));
        let unified = |settings: &Settings| {
            container_resources(&pod, &pod.containers()[0], settings).unified.into_iter().collect::<Vec<_>>()
        };
        let expect = |files: &[(&str, i64)]| -> Vec<(String, String)> {
            files.iter().map(|(file, bytes)| ((*file).to_owned(), bytes.to_string())).collect()
        };
        let unthrottled = |swap: i64| {
            let files = [("memory.oom.group", 1), ("memory.swap.max", swap)];
            let high = [("memory.high".to_owned(), "max".to_owned())];
            high.into_iter().chain(expect(&files)).collect::<Vec<_>>()
        };
        let mut settings = settings();
        settings.machine.cgroup_v2 = true;
        settings.machine.swap_capacity_bytes = 500 << 20;
        assert_eq!(unified(&settings), unthrottled(0));
        settings.swap = SwapBehavior::LimitedSwap;
        // A tenth of the machine's 1000 MiB is requested.
        assert_eq!(unified(&settings), unthrottled(50 << 20));
        let protection = ProtectionSettings {
            reservation_policy: MemoryReservationPolicy::Tiered,
            throttling: Some(Throttling { factor: 0.5, page_bytes: 4096 }),
            allocatable_memory: 1000 << 20,
        };
        settings.swap = SwapBehavior::NoSwap;
        settings.memory_qos = Some(protection);
        let low = [
            ("memory.high", 150 << 20),
            ("memory.low", 100 << 20),
            ("memory.oom.group", 1),
            ("memory.swap.max", 0),
        ];
        assert_eq!(unified(&settings), expect(&low));
        settings.memory_qos =
            Some(ProtectionSettings { reservation_policy: MemoryReservationPolicy::Nothing, ..protection });
        let nothing = [
            ("memory.high", 150 << 20),
            ("memory.low", 0),
            ("memory.min", 0),
            ("memory.oom.group", 1),
            ("memory.swap.max", 0),
        ];
        assert_eq!(unified(&settings), expect(&nothing));
    }

    #[test]
    fn huge_pages_swap_and_oom_group_depend_on_cgroup_version() {
        let pod = pod(json!({"containers": [{"name": "c", "resources": {"limits": {
            "hugepages-2Mi": "4Mi", "memory": "64Mi"}}}]}));
        let mut settings = settings();
        settings.machine.hugepage_sizes = vec!["2MB".into(), "1GB".into()];
        let v1 = container_resources(&pod, &pod.containers()[0], &settings);
        let pages: Vec<_> = v1.hugepage_limits.iter().map(|l| (l.page_size.as_str(), l.limit)).collect();
        assert_eq!(pages, [("2MB", 4 << 20), ("1GB", 0)]);
        assert_eq!(v1.memory_swap_limit_in_bytes, 64 << 20);
        assert!(v1.unified.is_empty());
        settings.machine.cgroup_v2 = true;
        let v2 = container_resources(&pod, &pod.containers()[0], &settings);
        assert_eq!(v2.memory_swap_limit_in_bytes, 0);
        assert_eq!(v2.unified["memory.swap.max"], "0");
        assert_eq!(v2.unified["memory.oom.group"], "1");
        settings.single_process_oom_kill = Some(true);
        let single = container_resources(&pod, &pod.containers()[0], &settings);
        assert!(!single.unified.contains_key("memory.oom.group"));
        assert_eq!(page_size_name(64 << 10), "64KB");
    }
}
