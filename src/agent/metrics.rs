//! Metrics that are read from snapshots at a scrape.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::handles::Handles;
use super::stats;
use crate::cgroups::tiers::ProtectedMemory;
use crate::config::Gates;
use crate::config::gates::{self, Stage};
use crate::kube::pod_certificates::PodCertificates;
use crate::model::metrics;
use crate::model::runtime::{ContainerState, SandboxState};
use crate::offline::{Offline, Phase};
use crate::pods::WorkerPhase;
use crate::probes::BUCKETS;
use crate::resources::Roots;
use crate::resources::agent_use::{self, AgentUse, NetworkBytes};
use crate::server::{KUBERNETES_VERSION, MetricsPage};
use crate::sync::view::Snapshot;
use crate::util::disk_writes;
use crate::util::lock::LockExt;
use crate::util::metrics::{Page, Type};

pub(super) fn write(handles: &Handles, which: MetricsPage, page: &mut Page) {
    match which {
        MetricsPage::Probes => {
            probes(handles, page);
            start_time(handles, page);
            return;
        }
        MetricsPage::Resource => return stats::resource(&handles.stats, page),
        MetricsPage::Cadvisor => return stats::cadvisor(&handles.stats, page),
        MetricsPage::Own => {}
    }
    // The Go kubelet shows these before anything has happened.
    metrics::RESTARTED_PODS.show([""]);
    metrics::RESTARTED_PODS.show(["true"]);
    metrics::SHUTDOWN_START.set_first(0.0);
    metrics::SHUTDOWN_END.set_first(0.0);
    page.add(metrics::ALL);
    stats::measured_metrics(&handles.stats, &handles.observe, page);
    certificates(page);
    pod_certificates(handles, page);
    agent_metrics(handles, page);
    node(handles, page);
    features(handles, page);
    runtime(handles, page);
    claims(handles, page);
    offline(handles, page);
    handles.plugins.write_metrics(page);
    pods(handles, page);
    process(handles, page);
}

/// What `--offline` does. Without the flag there are no such metrics.
fn offline(handles: &Handles, page: &mut Page) {
    let Some(report) = handles.offline.as_ref().map(Offline::report) else { return };
    let help = "Whose pods count with --offline: 1 for the present phase.";
    let mut family = page.family("coracle_offline_phase", help, Type::Gauge);
    for (phase, name) in [
        (Phase::Undecided, "undecided"),
        (Phase::Online, "online"),
        (Phase::Alone, "alone"),
        (Phase::Held, "held"),
    ] {
        family.series(&[("phase", name)], if report.phase == phase { 1.0 } else { 0.0 });
    }
    drop(family);
    if let Some(seconds) = report.seconds_since_contact {
        let help = "Seconds since the node's lease was renewed last.";
        page.gauge("coracle_offline_contact_age_seconds", help, seconds as f64);
    }
    let help = "Stored objects of the API server, by kind.";
    let mut family = page.family("coracle_offline_stored_objects", help, Type::Gauge);
    for (kind, count) in &report.objects {
        family.series(&[("kind", kind)], *count as f64);
    }
    drop(family);
    let help = "Bytes of all stored objects.";
    page.gauge("coracle_offline_stored_bytes", help, report.bytes as f64);
    let help = "Bytes of stored objects, by kind.";
    let mut family = page.family("coracle_offline_stored_kind_bytes", help, Type::Gauge);
    for (kind, bytes) in &report.kind_bytes {
        family.series(&[("kind", kind)], *bytes as f64);
    }
    drop(family);
    let help = "Copies of stored files that could not be used; at most 16 stay.";
    page.gauge("coracle_offline_damaged_files", help, report.damaged_files as f64);
    let help = "Problems of the store, such as objects that are not stored; at most 16 are counted.";
    page.gauge("coracle_offline_problems", help, report.problems.len() as f64);
    let help = "Pods that are stopped because the API server was away for too long.";
    page.gauge("coracle_offline_stopped_pods", help, report.stopped_pods as f64);
}

fn claims(handles: &Handles, page: &mut Page) {
    let help = "Prepared resource claims, by driver; <any> is all of them.";
    let mut family = page.family("dra_resource_claims_in_use", help, Type::Gauge);
    for (driver, number) in handles.claims.in_use() {
        family.series(&[("driver_name", &driver)], number as f64);
    }
}

fn pod_certificates(handles: &Handles, page: &mut Page) {
    let help = "Certificates of pods in projected volumes, by signer and state.";
    let mut family = page.family("kubelet_podcertificate_states", help, Type::Gauge);
    let states = handles.pod_certificates.as_ref().map(PodCertificates::states).unwrap_or_default();
    for ((signer, state), number) in states {
        family.series(&[("signer_name", &signer), ("state", state)], number as f64);
    }
}

/// Seconds since 1970 of a moment in the past.
fn unix_time(instant: Instant) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(instant.elapsed()).as_secs_f64()
}

fn start_time(handles: &Handles, page: &mut Page) {
    let time = unix_time(handles.started);
    page.gauge("process_start_time_seconds", "When the agent was started, in Unix time.", time);
}

/// On its own page, since its labels name pods.
fn probes(handles: &Handles, page: &mut Page) {
    let all = handles.probes.counters();
    let mut family = page.family("prober_probe_total", "Probes by their result.", Type::Counter);
    for probe in &all {
        for (result, count) in [("successful", probe.successful), ("failed", probe.failed)] {
            if count > 0 {
                let labels = [
                    ("probe_type", probe.kind.as_str()),
                    ("result", result),
                    ("container", &*probe.container),
                    ("pod", &*probe.pod),
                    ("namespace", &*probe.namespace),
                    ("pod_uid", probe.uid.as_str()),
                ];
                family.series(&labels, count as f64);
            }
        }
    }
    drop(family);
    let mut family =
        page.family("prober_probe_duration_seconds", "Duration of probes that succeeded.", Type::Histogram);
    for probe in all.iter().filter(|probe| probe.successful > 0) {
        let labels = [
            ("probe_type", probe.kind.as_str()),
            ("container", &*probe.container),
            ("pod", &*probe.pod),
            ("namespace", &*probe.namespace),
        ];
        family.histogram(&labels, &BUCKETS, &probe.buckets, probe.successful, probe.seconds);
    }
}

fn node(handles: &Handles, page: &mut Page) {
    page.family("kubelet_node_name", "The node's name.", Type::Gauge).series(&[("node", &handles.node)], 1.0);
    let (major, minor) = KUBERNETES_VERSION
        .trim_start_matches('v')
        .split_once('.')
        .map_or(("", ""), |(major, rest)| (major, rest.split('.').next().unwrap_or_default()));
    page.family(
        "kubernetes_build_info",
        "The Kubernetes release whose kubelet this stands in for.",
        Type::Gauge,
    )
    .series(
        &[
            ("build_date", ""),
            ("compiler", "rustc"),
            ("git_commit", ""),
            ("git_tree_state", ""),
            ("git_version", KUBERNETES_VERSION),
            ("go_version", ""),
            ("major", major),
            ("minor", minor),
            ("platform", &format!("linux/{}", crate::node::arch())),
        ],
        1.0,
    );
    page.family("coracle_build_info", "The version of the agent.", Type::Gauge)
        .series(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    let version = if handles.cgroups == "v2" { 2.0 } else { 1.0 };
    page.gauge("kubelet_cgroup_version", "The version of the node's cgroups.", version);
    let (gates, _) = Gates::resolve(&handles.feature_gates);
    protected_memory(&gates, handles.pod_cgroups.protected_memory(), page);
    let help = "Bytes of image archives that were read to find and verify their images.";
    page.counter("coracle_image_archive_read_bytes_total", help, handles.image_set.bytes_read() as f64);
    page.counter(
        "coracle_events_dropped_total",
        "Events that were dropped because the recorder's queue was full.",
        handles.sink.lost() as f64,
    );
}

/// With the gate `MemoryQoS` on each machine, as upstream: 0 on cgroup v1 and without `cgroupsPerQOS`.
fn protected_memory(gates: &Gates, protected: Option<ProtectedMemory>, page: &mut Page) {
    if !gates.enabled("MemoryQoS") {
        return;
    }
    let protected = protected.unwrap_or_default();
    let help = "Memory that is protected for Guaranteed pods.";
    page.gauge("kubelet_memory_qos_node_memory_min_bytes", help, protected.guaranteed as f64);
    let help = "Memory that is protected for Burstable pods unless the node needs it.";
    page.gauge("kubelet_memory_qos_node_memory_low_bytes", help, protected.burstable as f64);
}

/// One series per feature gate.
fn features(handles: &Handles, page: &mut Page) {
    let (gates, _) = Gates::resolve(&handles.feature_gates);
    let mut family = page.family(
        "kubernetes_feature_enabled",
        "Whether a feature gate is on. Most gates are of other components or have no effect here.",
        Type::Gauge,
    );
    for gate in gates::known() {
        let stage = match gate.stage {
            Stage::Alpha => "ALPHA",
            Stage::Beta => "BETA",
            Stage::Stable => "",
            Stage::Deprecated => "DEPRECATED",
        };
        let on = if gates.enabled(gate.name) { 1.0 } else { 0.0 };
        family.series(&[("name", gate.name), ("stage", stage)], on);
    }
}

fn runtime(handles: &Handles, page: &mut Page) {
    let listed = handles.observe.listed();
    let running = listed
        .values()
        .filter(|pod| pod.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready))
        .count();
    page.gauge("kubelet_running_pods", "Pods with a running sandbox.", running as f64);
    let mut states = BTreeMap::from([("created", 0_u64), ("running", 0), ("exited", 0), ("unknown", 0)]);
    for container in listed.values().flat_map(|pod| &pod.containers) {
        let state = match container.state {
            ContainerState::Created => "created",
            ContainerState::Running => "running",
            ContainerState::Exited => "exited",
            ContainerState::Unknown => "unknown",
        };
        *states.entry(state).or_default() += 1;
    }
    // DIFFERS: in the Go kubelet the number of a state stays when its last container leaves it.
    let mut family =
        page.family("kubelet_running_containers", "Containers in the runtime, by state.", Type::Gauge);
    for (state, count) in states {
        family.series(&[("container_state", state)], count as f64);
    }
    drop(family);
    if let Some(last) = handles.observe.last_relist() {
        let help = "When all pods were listed last, in Unix time.";
        page.gauge("kubelet_pleg_last_seen_seconds", help, unix_time(last));
    }
}

fn pods(handles: &Handles, page: &mut Page) {
    let snapshot = handles.view.get();
    let mut desired = [0_u64; 2];
    let mut active = [0_u64; 2];
    let mut working: BTreeMap<(&str, &str, &str), u64> = BTreeMap::new();
    for lifecycle in ["sync", "terminating", "terminated"] {
        for (config, kinds) in
            [("desired", &["", "true"][..]), ("orphan", &["", "true"]), ("runtime_only", &["unknown"])]
        {
            working.extend(kinds.iter().map(|kind| ((lifecycle, config, *kind), 0)));
        }
    }
    for entry in snapshot.pods.values() {
        let is_static = entry.any_pod().map(|pod| pod.is_static());
        let phase = entry.worker.as_ref().map_or(WorkerPhase::New, |worker| worker.report().phase);
        let over = matches!(phase, WorkerPhase::Terminated | WorkerPhase::Finished);
        if entry.pod.is_some()
            && let Some(kind) = is_static
        {
            desired[usize::from(kind)] += 1;
            active[usize::from(kind)] += u64::from(!entry.rejected && !over);
        }
        let lifecycle = match phase {
            WorkerPhase::New => continue,
            WorkerPhase::Terminating => "terminating",
            WorkerPhase::Terminated | WorkerPhase::Finished => "terminated",
            _ => "sync",
        };
        let config = match (&entry.pod, &entry.removed) {
            (Some(_), _) => "desired",
            (None, Some(_)) => "orphan",
            (None, None) => "runtime_only",
        };
        let kind = match is_static {
            Some(true) => "true",
            Some(false) => "",
            None => "unknown",
        };
        *working.entry((lifecycle, config, kind)).or_default() += 1;
    }
    for (name, help, counts) in [
        ("kubelet_desired_pods", "Pods that are to be here.", desired),
        ("kubelet_active_pods", "Pods that were taken on and have not ended.", active),
    ] {
        page.family(name, help, Type::Gauge)
            .series(&[("static", "")], counts[0] as f64)
            .series(&[("static", "true")], counts[1] as f64);
    }
    let resizes = handles.allocations.counts();
    let mut family =
        page.family("kubelet_pod_pending_resizes", "Pods that wait for other resources.", Type::Gauge);
    for (reason, counts) in [("deferred", resizes.deferred), ("infeasible", resizes.infeasible)] {
        for (priority, count) in counts {
            family.series(&[("reason", reason), ("priority_bucket", priority)], count as f64);
        }
    }
    drop(family);
    let help = "Pods that are being given other resources.";
    page.gauge("kubelet_pod_in_progress_resizes", help, resizes.in_progress as f64);
    let ephemeral: usize = snapshot
        .pods
        .values()
        .filter_map(|entry| entry.any_pod())
        .map(|pod| pod.spec().ephemeral_containers.as_ref().map_or(0, Vec::len))
        .sum();
    volumes(handles, &snapshot, page);
    page.gauge("kubelet_managed_ephemeral_containers", "Ephemeral containers of all pods.", ephemeral as f64);
    let mut family = page.family("kubelet_working_pods", "Pods with a worker, by what it does.", Type::Gauge);
    for ((lifecycle, config, kind), count) in working {
        family.series(&[("lifecycle", lifecycle), ("config", config), ("static", kind)], count as f64);
    }
}

/// Desired and mounted volumes.
fn volumes(handles: &Handles, snapshot: &Snapshot, page: &mut Page) {
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for (uid, entry) in &snapshot.pods {
        let Some(pod) = entry.any_pod() else { continue };
        let mounted = handles.volumes.mounted(uid);
        for (plugin, name) in crate::volumes::plugins(pod) {
            let is_mounted = mounted.iter().any(|volume| volume.volume == name);
            *counts.entry((plugin, "desired_state_of_world")).or_default() += 1;
            *counts.entry((plugin, "actual_state_of_world")).or_default() += u64::from(is_mounted);
        }
    }
    let mut family = page.family("volume_manager_total_volumes", "Volumes of pods.", Type::Gauge);
    for ((plugin, state), count) in counts {
        family.series(&[("plugin_name", plugin), ("state", state)], count as f64);
    }
}

fn certificates(page: &mut Page) {
    // DIFFERS: the Go kubelet leaves out the series of a certificate that it does not renew.
    for (name, help, end) in [
        (
            "kubelet_certificate_manager_client_ttl_seconds",
            "What is left of the client certificate that is renewed here; none: infinite.",
            &metrics::CLIENT_CERTIFICATE_END,
        ),
        (
            "kubelet_certificate_manager_server_ttl_seconds",
            "What is left of the serving certificate that is renewed here; none: infinite.",
            &metrics::SERVING_CERTIFICATE_END,
        ),
    ] {
        page.gauge(name, help, stats::seconds_until(end.get()));
    }
}

/// Metrics that only this agent has.
fn agent_metrics(handles: &Handles, page: &mut Page) {
    let turn = handles.threads.turn.locked().elapsed();
    let help = "Since the last turn of the sync loop.";
    page.gauge("coracle_sync_turn_age_seconds", help, turn.as_secs_f64());
    let help = "Events that wait for the recorder.";
    page.gauge("coracle_events_queued", help, handles.sink.depth() as f64);
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    for line in crate::util::threads::report() {
        // A pod or a number follows the slash.
        let kind = line.name.split_once('/').map_or(&*line.name, |(kind, _)| kind);
        *kinds.entry(kind.to_owned()).or_default() += 1;
    }
    let mut family = page.family("coracle_threads", "Threads by kind.", Type::Gauge);
    for (kind, count) in &kinds {
        family.series(&[("kind", kind)], *count as f64);
    }
    drop(family);
    let written = disk_writes::written();
    let help = "Files, links and directories that the agent created or wrote.";
    page.counter("coracle_disk_files_written_total", help, written.files as f64);
    page.counter(
        "coracle_disk_written_bytes_total",
        "Bytes that the agent wrote to files.",
        written.bytes as f64,
    );
    page.counter(
        "coracle_disk_syncs_total",
        "Files and directories that the agent synced.",
        written.syncs as f64,
    );
    // From the CRI and from cgroups; there is no cAdvisor.
    page.family("kubelet_metrics_provider", "Where numbers of pods come from.", Type::Gauge)
        .series(&[("provider", "cri")], 1.0);
}

fn process(handles: &Handles, page: &mut Page) {
    start_time(handles, page);
    if let Ok(own) = AgentUse::read(&Roots::default()) {
        page.counter("process_cpu_seconds_total", "CPU time that was used.", own.cpu.as_secs_f64());
        page.gauge("process_resident_memory_bytes", "Resident memory.", own.resident_bytes as f64);
        page.gauge("coracle_peak_memory_bytes", "The most resident memory.", own.peak_resident_bytes as f64);
        page.gauge("process_open_fds", "Open file descriptors.", own.open_files as f64);
        // For panels of dashboards; there are no goroutines.
        page.gauge("go_goroutines", "Threads.", own.threads as f64);
        let help = "Times that a thread waited for something.";
        page.counter("coracle_voluntary_context_switches_total", help, own.voluntary_switches as f64);
    }
    if let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current {
        page.gauge("process_max_fds", "The most file descriptors that may be open.", limit as f64);
    }
    // Without a limit the largest number, as in other client libraries.
    let most = rustix::process::getrlimit(rustix::process::Resource::As).current.unwrap_or(u64::MAX);
    page.gauge("process_virtual_memory_max_bytes", "The most virtual memory.", most as f64);
    if let Some(bytes) = virtual_memory() {
        page.gauge("process_virtual_memory_bytes", "Virtual memory.", bytes as f64);
    }
    if let Some(NetworkBytes { received, sent }) = agent_use::network_bytes(&Roots::default()) {
        let help = "Bytes received by IP in the agent's network namespace.";
        page.counter("process_network_receive_bytes_total", help, received as f64);
        let help = "Bytes sent by IP in the agent's network namespace.";
        page.counter("process_network_transmit_bytes_total", help, sent as f64);
    }
}

fn virtual_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protected_memory_is_shown_with_the_gate_on_each_machine() {
        let shown = |enabled: bool, protected: Option<ProtectedMemory>| {
            let (gates, _) = Gates::resolve(&BTreeMap::from([("MemoryQoS".to_owned(), enabled)]));
            let mut page = Page::new();
            protected_memory(&gates, protected, &mut page);
            let text = page.into_text();
            text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
        };
        // In the order of their names.
        let lines = |min: u64, low: u64| {
            [("low", low), ("min", min)]
                .map(|(name, bytes)| format!("kubelet_memory_qos_node_memory_{name}_bytes {bytes}"))
                .to_vec()
        };
        let protected = ProtectedMemory { guaranteed: 4096, burstable: 8192 };
        assert_eq!(shown(true, Some(protected)), lines(4096, 8192));
        // Version 1 protects none.
        assert_eq!(shown(true, None), lines(0, 0));
        assert!(shown(false, None).is_empty());
    }
}
