//! The settings of the collector of statistics, and its pages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::rooms::{Context, Rooms};
use super::settings::gates;
use crate::config::KubeletConfiguration;
use crate::model::api::{ResourceRequirements, Volume};
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, amount};
use crate::model::requests::{Overhead, pod_limits};
use crate::observe::Observe;
use crate::resources::Roots;
use crate::resources::stats::sample::FileSystem;
use crate::resources::stats::{self, Collector, DriverNumbers, PodVolume, StatsRequest};
use crate::server::Detail;
use crate::sync::view::View;
use crate::util::metrics::{Page, Type};
use crate::volumes::Volumes;
use crate::volumes::csi::{MeasuredVolume, VolumeStats};

/// Makes the collector, which reads only on request.
pub(super) fn collector(context: Context<'_>, rooms: &Rooms) -> Collector {
    let Context { args, config, host, .. } = context;
    let settings = stats::Settings {
        node: host.node_name.clone(),
        roots: Roots::default(),
        cgroups: host.cgroups.clone(),
        root_dir: args.root_dir.clone(),
        pod_logs_dir: config.pod_logs_dir.clone().into(),
        system: [
            ("kubelet", config.kubelet_cgroups.clone()),
            ("runtime", args.runtime_cgroups.clone()),
            ("misc", config.system_cgroups.clone()),
        ],
        started: Timestamp::now(),
        reserved_memory: reserved_memory(config),
        excludes_huge_pages: gates(config).enabled("HugepageAwareEviction"),
        volume_period: volume_period(config),
    };
    let (listed, cached) = (rooms.observe.clone(), rooms.observe.clone());
    let (view, volumes) = (rooms.view.clone(), Arc::clone(&rooms.volumes));
    let limits = rooms.view.clone();
    let (together, of_pod) = (rooms.cgroups.clone(), rooms.cgroups.clone());
    let deps = stats::Deps {
        cgroups: stats::PodCgroupPaths {
            together: Box::new(move || together.qos_paths()),
            pod: Box::new(move |uid| of_pod.path_of(uid)),
        },
        pods: Box::new(move || listed.listed()),
        pod: Box::new(move |uid| cached.cached(uid)),
        memory_limit: Box::new(move |uid| memory_limit(&pod_of(&limits, uid)?)),
        volumes: Box::new(move |uid| volumes_of(&view, &volumes, uid)),
        runtime: Box::new((rooms.cri.clone(), rooms.images.clone())),
    };
    Collector::new(settings, deps)
}

/// The time between two measurements of a volume; `None`: volumes are not measured.
pub(super) fn volume_period(config: &KubeletConfiguration) -> Option<Duration> {
    let period = config.volume_stats_agg_period;
    (period > crate::config::GoDuration::ZERO).then(|| period.to_std())
}

/// The memory that pods may not use, as a cgroup of all pods would be limited
/// (Go: pkg/kubelet/cm, getNodeAllocatableInternalAbsolute).
fn reserved_memory(config: &KubeletConfiguration) -> u64 {
    if !config.enforce_node_allocatable.iter().any(|part| part == "pods") {
        return 0;
    }
    let memory_amount = |map: &BTreeMap<String, String>| Amount::parse(map.get("memory")?).ok();
    let sum: Amount =
        [&config.kube_reserved, &config.system_reserved].into_iter().filter_map(memory_amount).sum();
    u64::try_from(sum.units()).unwrap_or(0)
}

/// The pod of the source, or its last version if it is terminating.
fn pod_of(view: &View, uid: &PodUid) -> Option<Pod> {
    let snapshot = view.get();
    snapshot.pods.get(uid)?.any_pod().cloned()
}

/// The limit of a pod's cgroup. If a container has no limit, the pod has none
/// (Go: pkg/kubelet/cm/helpers_linux.go, ResourceConfigForPod). A limit of zero is none.
fn memory_limit(pod: &Pod) -> Option<u64> {
    let has = |resources: Option<&ResourceRequirements>| {
        let limit = resources.and_then(|resources| resources.limits.as_ref()?.get("memory"));
        limit.is_some_and(|limit| amount(limit) > Amount::ZERO)
    };
    let mut containers = pod.containers().iter().chain(pod.init_containers());
    if !has(pod.spec().resources.as_ref()) && !containers.all(|container| has(container.resources.as_ref())) {
        return None;
    }
    let limit = pod_limits(pod, Overhead::Included).get("memory")?.units();
    u64::try_from(limit).ok().filter(|limit| *limit > 0)
}

/// The mounted volumes of a pod, as its specification describes them.
fn volumes_of(view: &View, volumes: &Volumes, uid: &PodUid) -> Vec<PodVolume> {
    let mounted = volumes.mounted(uid);
    if mounted.is_empty() {
        return Vec::new();
    }
    let Some(pod) = pod_of(view, uid) else { return Vec::new() };
    let of_drivers = volumes.of_drivers(uid);
    let measure = |volume: &Volume| {
        let mounted = mounted.iter().find(|mounted| mounted.volume == volume.name)?;
        let of_driver = of_drivers.iter().find(|measured| measured.volume == volume.name);
        measurement(volume, mounted, of_driver, pod.name())
    };
    pod.spec().volumes.iter().flatten().filter_map(measure).collect()
}

/// How a volume's usage is measured; `None`: it is not measured.
fn measurement(
    volume: &Volume,
    mounted: &MountedVolume,
    of_driver: Option<&MeasuredVolume>,
    pod: &str,
) -> Option<PodVolume> {
    let driver =
        of_driver.and_then(|measured| measured.stats.as_ref()).map(|(time, stats)| numbers(*time, stats));
    // Directories of the node, images, and block devices that no driver measures.
    let has_sizes = driver.as_ref().is_some_and(|numbers| numbers.space.is_some());
    let is_device =
        of_driver.is_some_and(|measured| measured.is_block) || mounted.host_path.starts_with("/dev");
    if volume.host_path.is_some() || volume.image.is_some() || (is_device && !has_sizes) {
        return None;
    }
    let claimed = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.clone());
    let generated = volume.ephemeral.as_ref().map(|_| format!("{pod}-{}", volume.name));
    let claim = claimed.or(generated);
    let in_memory = |medium: &str| !medium.is_empty();
    let empty_dir = volume.empty_dir.as_ref();
    let on_disk = empty_dir.is_some_and(|dir| !dir.medium.as_deref().is_some_and(in_memory));
    let files = volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some();
    Some(PodVolume {
        name: volume.name.clone(),
        path: mounted.host_path.clone(),
        walk: empty_dir.is_some() || files,
        ephemeral: on_disk || volume.config_map.is_some(),
        claim,
        driver,
    })
}

/// The numbers of a CSI driver. Negative ones are unknown.
fn numbers(time: Timestamp, stats: &VolumeStats) -> DriverNumbers {
    let number = |value: i64| u64::try_from(value).ok();
    let mut space = FileSystem { time, ..FileSystem::default() };
    if let Some(bytes) = &stats.bytes {
        (space.capacity, space.available) = (number(bytes.total), number(bytes.available));
        space.used = number(bytes.used);
    }
    if let Some(inodes) = &stats.inodes {
        (space.inodes, space.inodes_free) = (number(inodes.total), number(inodes.available));
        space.inodes_used = number(inodes.used);
    }
    let has_sizes = stats.bytes.is_some() || stats.inodes.is_some();
    DriverNumbers { space: has_sizes.then_some(space) }
}

/// `/stats/summary`, in JSON.
pub(super) fn summary(collector: &Collector, detail: Detail) -> Result<Vec<u8>, String> {
    let wanted = match detail {
        Detail::Whole => StatsRequest::SUMMARY,
        Detail::CpuAndMemory => StatsRequest::BRIEF,
    };
    let snapshot = collector.snapshot(wanted).map_err(|error| error.to_string())?;
    serde_json::to_vec(&stats::json(&snapshot)).map_err(|error| error.to_string())
}

/// `/metrics/resource`.
pub(super) fn resource(collector: &Collector, page: &mut Page) {
    let snapshot = collector.snapshot(StatsRequest::RESOURCE);
    if let Err(error) = &snapshot {
        log::warn!("no numbers for /metrics/resource: {error}");
    }
    stats::resource(snapshot.ok().as_deref(), page);
}

/// `/metrics/cadvisor`.
pub(super) fn cadvisor(collector: &Collector, page: &mut Page) {
    let failed = match collector.snapshot(StatsRequest::CADVISOR) {
        Ok(snapshot) => {
            stats::cadvisor(&snapshot, collector.roots(), page);
            snapshot.incomplete
        }
        Err(error) => {
            log::warn!("no numbers for /metrics/cadvisor: {error}");
            true
        }
    };
    let help = "Whether something could not be found out.";
    page.gauge("container_scrape_error", help, if failed { 1.0 } else { 0.0 });
}

/// The part of `/metrics` that is measured at a scrape: logs, and volumes of claims.
pub(super) fn measured_metrics(collector: &Collector, observe: &Observe, page: &mut Page) {
    let listed = observe.listed();
    let help = "What the logs of a container take.";
    let mut family = page.family("kubelet_container_log_filesystem_used_bytes", help, Type::Gauge);
    for pod in listed.values().filter(|pod| pod.is_running()) {
        let mut names: Vec<&str> = pod.containers.iter().map(|container| container.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        for container in names {
            let labels = [
                ("uid", pod.uid.as_str()),
                ("namespace", &*pod.namespace),
                ("pod", &*pod.name),
                ("container", container),
            ];
            if let Some(bytes) = collector.log_bytes(pod, container) {
                family.series(&labels, bytes as f64);
            }
        }
    }
    drop(family);
    let claims: Vec<_> = listed
        .values()
        .flat_map(|pod| collector.claims(&pod.uid).into_iter().map(|volume| (&*pod.namespace, volume)))
        .collect();
    stats::volumes(claims.iter().map(|(namespace, volume)| (*namespace, volume)), page);
}

/// The seconds until a Unix time; infinite if it is unknown.
pub(super) fn seconds_until(until: Option<f64>) -> f64 {
    let now = Timestamp::now().duration_since(Timestamp::UNIX_EPOCH);
    until.map_or(f64::INFINITY, |until| until - SignedDuration::as_secs_f64(&now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::csi::Usage;
    use serde_json::{Value, json};

    #[test]
    fn volumes_are_measured_by_their_kind() {
        let mounted = MountedVolume {
            volume: "v".into(),
            host_path: "/v".into(),
            read_only: false,
            selinux_relabel: false,
        };
        for (source, expected) in [
            (json!({"emptyDir": {}}), Some((true, true, None))),
            (json!({"emptyDir": {"medium": "Memory"}}), Some((true, false, None))),
            (json!({"configMap": {"name": "c"}}), Some((true, true, None))),
            (json!({"secret": {"secretName": "s"}}), Some((true, false, None))),
            (json!({"persistentVolumeClaim": {"claimName": "c"}}), Some((false, false, Some("c")))),
            (json!({"ephemeral": {}}), Some((false, false, Some("p-v")))),
            (json!({"hostPath": {"path": "/x"}}), None),
            (json!({"image": {"reference": "x"}}), None),
        ] {
            let mut volume = source.clone();
            volume["name"] = json!("v");
            let volume: Volume = serde_json::from_value(volume).unwrap();
            let found = measurement(&volume, &mounted, None, "p");
            let found =
                found.as_ref().map(|measured| (measured.walk, measured.ephemeral, measured.claim.as_deref()));
            assert_eq!(found, expected, "{source}");
        }
        assert_driver_measures(&mounted);
        assert_eq!(seconds_until(None), f64::INFINITY);
        let soon = Timestamp::now().as_second() as f64 + 100.0;
        assert!((90.0..101.0).contains(&seconds_until(Some(soon))));
    }

    /// With and without numbers of its driver.
    fn assert_driver_measures(mounted: &MountedVolume) {
        let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        let volume: Volume = serde_json::from_value(volume).unwrap();
        let usage = Usage { available: -1, total: 5, used: 2 };
        let stats = VolumeStats { bytes: Some(usage), inodes: None };
        let known = Some((Timestamp::now(), Arc::new(stats)));
        for (is_block, stats, expected) in [
            (false, None, Some(None)),
            (true, None, None),
            (true, known.clone(), Some(Some((Some(5), None)))),
            (false, known, Some(Some((Some(5), None)))),
        ] {
            let of_driver = MeasuredVolume { volume: "v".to_owned(), is_block, stats };
            let found = measurement(&volume, mounted, Some(&of_driver), "p");
            let found = found.map(|measured| {
                let numbers = measured.driver?;
                let space = numbers.space?;
                Some((space.capacity, space.available))
            });
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn pod_is_limited_if_all_its_containers_are() {
        let container = |limit: Option<&str>| match limit {
            Some(limit) => json!({"name": "c", "resources": {"limits": {"memory": limit}}}),
            None => json!({"name": "c", "resources": {"limits": {"cpu": "1"}}}),
        };
        let check = |spec: Value, expected: Option<u64>| {
            let object = json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
            assert_eq!(memory_limit(&pod), expected, "{spec}");
        };
        let (small, large, none) = (container(Some("1Mi")), container(Some("4Mi")), container(None));
        check(json!({"containers": [small, large]}), Some(5 << 20));
        check(json!({"containers": [small, none]}), None);
        check(json!({"containers": [none]}), None);
        // An init container that is larger than all others together, and one without a limit.
        check(json!({"containers": [small], "initContainers": [large]}), Some(4 << 20));
        check(json!({"containers": [small], "initContainers": [none]}), None);
        check(json!({"containers": [small], "overhead": {"memory": "1Mi"}}), Some(2 << 20));
        // A limit of the pod as a whole counts alone.
        check(
            json!({"containers": [small, none], "resources": {"limits": {"memory": "9Mi"}}}),
            Some(9 << 20),
        );
        check(json!({"containers": [container(Some("0"))]}), None);
        check(json!({"containers": [small, container(Some("0"))]}), None);
        check(json!({"containers": [small], "initContainers": [container(Some("0"))]}), None);
        check(json!({"containers": [small, none], "resources": {"limits": {"memory": "0"}}}), None);
    }

    #[test]
    fn reserved_memory_counts_if_it_is_enforced() {
        let with = |enforced: &[&str]| {
            let reserved = |memory: &str| BTreeMap::from([("memory".to_owned(), memory.to_owned())]);
            reserved_memory(&KubeletConfiguration {
                enforce_node_allocatable: enforced.iter().map(|part| (*part).to_owned()).collect(),
                kube_reserved: reserved("1Mi"),
                system_reserved: reserved("512Ki"),
                ..KubeletConfiguration::default()
            })
        };
        assert_eq!((with(&["pods"]), with(&[])), (1_572_864, 0));
    }
}
