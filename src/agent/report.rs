//! Makes the server's documents from snapshots.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

use super::handles::Handles;
use crate::kube::client::{CERTIFICATE_REMEDY, Client};
use crate::model::api;
use crate::model::ids::{ImageRef, PodUid};
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::offline::{self, HeldReason, Phase, SealState};
use crate::pods::admission::Allocatable;
use crate::pods::cgroups::Numbers;
use crate::resources::{Roots, agent_use::AgentUse};
use crate::runtime::logs::read::resolve;
use crate::server::{
    AgentCheck, DiskWritesReport, ImageRow, LogSource, LogsReport, MemoryReport, NodeReport, PodCgroupReport,
    PodView, ProblemReport, QueueReport, ResourceReport, RuntimeReport, SourceReport, ThreadRow,
    ThresholdReport,
};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::{disk_writes, state_files, threads};
use crate::volumes::SlowOperation;

/// How long a removed log is searched for again.
const LOG_LIMIT: Duration = Duration::from_secs(1);

/// The time after which an operation on a volume is a problem.
const SLOW_VOLUME: Duration = Duration::from_secs(10);

/// The numbers of a pod's cgroup as the local API shows them.
pub(super) fn pod_cgroup(numbers: Numbers) -> PodCgroupReport {
    let milli =
        |(time, period): (i64, u64)| Some(u64::try_from(time).ok()?.saturating_mul(1000) / period.max(1));
    PodCgroupReport {
        path: numbers.path,
        cpu_shares: numbers.cpu_shares,
        cpu_limit_milli: numbers.cpu_quota.and_then(milli),
        throttled_periods: numbers.throttled_periods,
        memory_limit_bytes: numbers.memory_limit_bytes,
        memory_bytes: numbers.memory_bytes,
        oom_kills: numbers.oom_kills,
        pids_limit: numbers.pids_limit,
        pids: numbers.pids,
    }
}

fn cores(milli: i64) -> String {
    if milli % 1000 == 0 { (milli / 1000).to_string() } else { format!("{milli}m") }
}

/// Rows for CPU, memory, disk space and the number of pods.
fn resources([capacity, allocatable]: &[Allocatable; 2]) -> Vec<ResourceReport> {
    let row = |name: &str, amount: fn(&Allocatable) -> i64, text: fn(i64) -> String| {
        let (all, left) = (amount(capacity), amount(allocatable));
        // Not known.
        (all != i64::MAX).then(|| ResourceReport {
            name: name.to_owned(),
            capacity: text(all),
            reserved: text(all.saturating_sub(left)),
            allocatable: text(left),
        })
    };
    let rows = [
        row("cpu", |amounts| amounts.cpu_milli, cores),
        row("memory", |amounts| amounts.memory_bytes, |units| units.to_string()),
        row("ephemeral-storage", |amounts| amounts.ephemeral_bytes, |units| units.to_string()),
        row("pods", |amounts| amounts.pods, |units| units.to_string()),
    ];
    rows.into_iter().flatten().collect()
}

/// What an operator has to know about the offline store. Damaged files are among the state files.
fn offline_problems(report: &offline::Report) -> Vec<String> {
    let mut problems = Vec::new();
    if report.phase == Phase::Held {
        let reason = match report.held {
            Some(HeldReason::OtherCluster) => {
                "it is that of another cluster, or of one that was made again, and has none of the node's pods"
            }
            Some(HeldReason::OtherNode) => {
                "its Node object of this node is a new one, and it has none of the node's pods"
            }
            Some(HeldReason::NoNode) | None => "it knows neither this node nor any of its pods",
        };
        let end = match report.accepts {
            Some(time) => format!("; that happens by itself at {}", whole_seconds(time)),
            None => String::new(),
        };
        problems.push(format!(
            "the pods of the API server are held back, and the stored ones continue: {reason} \
             (restore its data, or run coracle offline accept, which takes over its pods and stops the others{end})"
        ));
    }
    if report.stopped_pods > 0 {
        problems.push(format!(
            "{} pods are stopped until the API server shows them again, because it was away for too long",
            report.stopped_pods
        ));
    }
    if report.seal == SealState::NoKey {
        problems.push(
            "offline: the key cannot be used: Secrets and tokens are neither stored nor read, and pods that \
             need them do not start without the API server"
                .to_owned(),
        );
    }
    problems.extend(report.problems.iter().map(|problem| format!("offline: {problem}")));
    problems
}

/// The remedy for a server with a certificate of an unknown authority.
const UNSIGNED: &str = "offline: no known authority has signed the API server's certificate; if the cluster has a \
                        new authority, add it with coracle offline trust FILE";

/// Whether a request has failed because no known authority has signed the server's certificate.
fn is_unsigned(failure: &str) -> bool {
    failure.contains("certificate signed by unknown authority")
}

fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

impl Handles {
    /// The object of a pod with its current status.
    pub(super) fn object_of(&self, uid: &PodUid, pod: &Pod) -> api::Pod {
        let mut object = pod.object().clone();
        if let Some(status) = self.status.get(uid) {
            object.status = Some((*status).clone());
        }
        object
    }

    pub(super) fn start_time(&self) -> Timestamp {
        let up = SignedDuration::try_from(self.started.elapsed()).unwrap_or_default();
        Timestamp::now().checked_sub(up).unwrap_or(Timestamp::UNIX_EPOCH)
    }

    pub(super) fn each_pod_view(&self, each: &mut dyn FnMut(PodView)) {
        for (uid, entry) in &self.view.get().pods {
            // Also a pod whose manifest was removed, until it has ended.
            // DIFFERS: the Go kubelet's /pods omits it immediately, although it still runs.
            let Some(pod) = entry.any_pod() else { continue };
            let object = self.object_of(uid, pod);
            let worker = entry.worker.as_ref().map(|worker| worker.report()).unwrap_or_default();
            let phase = if entry.rejected { "Rejected" } else { worker.phase.as_str() };
            each(PodView {
                pod: object,
                phase: phase.to_owned(),
                last_error: worker.last_error,
                next_sync: worker.next_sync,
                held: self.assignments.held(uid).map(|held| held.lines()).unwrap_or_default(),
            });
        }
    }

    pub(super) fn image_rows(&self) -> Result<Vec<ImageRow>, String> {
        let images = self.images.list_images().map_err(|error| error.to_string())?;
        let listed = self.observe.listed();
        // The image of sandboxes is known from the runtime's configuration only.
        let sandbox_image = match listed.values().any(|pod| !pod.sandboxes.is_empty()) {
            true => self.cri.sandbox_image().unwrap_or_default(),
            false => None,
        };
        let snapshot = self.view.get();
        let wanted = snapshot.pods.values().filter_map(|entry| entry.any_pod());
        let volumes: Vec<_> = wanted.flat_map(crate::runtime::volume_image_names).collect();
        let used: std::collections::BTreeSet<&str> = listed
            .values()
            .flat_map(|pod| pod.containers.iter().map(|container| container.image_ref.as_str()))
            .chain(sandbox_image.as_deref())
            .chain(volumes.iter().map(ImageRef::as_str))
            .collect();
        Ok(images
            .into_iter()
            .map(|image| ImageRow {
                pinned: image.pinned
                    || self.image_set.protects(&image.repo_tags)
                    || self.image_set.protects(&image.repo_digests),
                in_use: used.contains(image.id.as_str())
                    || image
                        .repo_tags
                        .iter()
                        .chain(&image.repo_digests)
                        .any(|name| used.contains(name.as_str())),
                id: image.id,
                tags: image.repo_tags,
                digests: image.repo_digests,
                size_bytes: image.size,
            })
            .collect())
    }

    pub(super) fn node_report(&self) -> NodeReport {
        let snapshot = self.view.get();
        let health = self.observe.runtime_health();
        let mut problems = Vec::new();
        problems.extend(health.runtime.iter().map(|reason| format!("container runtime: {reason}")));
        problems.extend(health.network.iter().map(|reason| format!("network: {reason}")));
        problems.extend(self.assignments.problems().iter().cloned());
        for (path, text) in state_files::problems() {
            // `assignments` says more about its own.
            let path = path.display().to_string();
            if path.is_empty() || !problems.iter().any(|known| known.contains(&path)) {
                problems.push(text);
            }
        }
        problems.extend(self.local.problems());
        problems.extend(self.image_check.problems());
        problems.extend(self.image_set.problems());
        problems.extend(
            self.api.as_ref().and_then(Client::last_failure).map(|reason| format!("API server: {reason}")),
        );
        let now = Timestamp::now();
        problems.extend(self.api.as_ref().and_then(|api| api.certificate_problem(now)).map(|problem| {
            format!("{problem}: {CERTIFICATE_REMEDY} (the clock of this machine shows {now:.0})")
        }));
        problems.extend(self.serving.iter().filter_map(|serving| serving.problem(now)));
        let offline = self.offline.as_ref().map(|offline| self.with_authorities(offline.report()));
        if offline.is_some()
            && self.api.as_ref().and_then(Client::last_failure).is_some_and(|failure| is_unsigned(&failure))
        {
            problems.push(UNSIGNED.to_owned());
        }
        problems.extend(offline.iter().flat_map(offline_problems));
        let unremoved = self.volumes.unremoved_pods();
        problems.extend(unremoved.iter().map(|removal| {
            let (pod, seconds) = (self.pod_text(&removal.uid), removal.since.as_secs());
            format!("volumes of pod {pod} cannot be removed for {seconds} s: {}", removal.reason)
        }));
        problems.extend(self.volumes.unreleased().map(|(reason, since)| {
            format!("volumes that no pod uses cannot be released for {} s: {reason}", since.as_secs())
        }));
        let hung =
            crate::volumes::hung_calls().into_iter().filter(|operation| operation.since >= SLOW_VOLUME);
        problems.extend(hung.map(|operation| {
            format!(
                "{} of {} hangs for {} s",
                operation.call,
                operation.path.display(),
                operation.since.as_secs()
            )
        }));
        let slow = self.volumes.slow(SLOW_VOLUME);
        let mut pods: BTreeMap<String, usize> = BTreeMap::new();
        self.each_pod_view(&mut |view| {
            let phase = view.pod.status.as_ref().and_then(|status| status.phase.clone());
            *pods.entry(phase.unwrap_or_else(|| "Pending".to_owned())).or_default() += 1;
            let of_pod = slow
                .iter()
                .filter(|operation| view.pod.metadata.uid.as_deref() == Some(operation.uid.as_str()));
            problems.extend(of_pod.map(|operation| slow_volume(&view, operation)));
            if let Some(error) = &view.last_error {
                problems.push(format!("pod {}/{}: {error}", view.namespace(), view.name()));
            }
        });
        let sources = snapshot
            .sources
            .iter()
            .map(|(name, state)| {
                problems.extend(state.problems.iter().map(ToString::to_string));
                if !state.seen {
                    problems.push(format!("source {} has not been read yet", name.as_str()));
                }
                SourceReport {
                    name: name.as_str().to_owned(),
                    place: self.threads.source_locations.get(name).cloned().unwrap_or_default(),
                    seen: state.seen,
                    pods: state.pods,
                    problems: state
                        .problems
                        .iter()
                        .map(|problem| ProblemReport {
                            place: problem.place.clone(),
                            line: problem.line.map(u64::from),
                            field: problem.field.clone().unwrap_or_default(),
                            message: problem.message.clone(),
                            since: Some(problem.since),
                            kept: problem.pods_continue,
                        })
                        .collect(),
                }
            })
            .collect();
        let eviction = self.threads.eviction.get();
        let thresholds = eviction.rows.iter().map(|row| ThresholdReport {
            signal: row.signal.to_owned(),
            available: row.available.clone(),
            threshold: row.threshold.clone(),
            soft: row.soft,
            met: row.met,
            near: row.near,
        });
        let runtime = self.observe.runtime_version();
        let own = AgentUse::read(&Roots::default()).ok();
        NodeReport {
            node: self.node.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: Some(self.start_time()),
            uptime_seconds: self.started.elapsed().as_secs(),
            problems,
            runtime: RuntimeReport {
                name: runtime.runtime_name,
                version: runtime.runtime_version,
                endpoint: self.endpoint.clone(),
                not_ready: (!health.runtime.is_empty()).then(|| health.runtime.join("; ")),
                network_not_ready: health.network,
                changes: self.observe.mode().to_string(),
            },
            cgroups: self.cgroups.clone(),
            pods,
            sources,
            threads: threads::report()
                .into_iter()
                .map(|line| ThreadRow {
                    name: line.name,
                    waits_for: line.waits_for.to_owned(),
                    seconds: line.since.as_secs_f64(),
                })
                .collect(),
            memory: own.map_or_else(MemoryReport::default, |own| MemoryReport {
                rss_bytes: own.resident_bytes,
                peak_rss_bytes: own.peak_resident_bytes,
                ..MemoryReport::default()
            }),
            queues: vec![QueueReport {
                name: "events".to_owned(),
                depth: self.sink.depth(),
                lost: self.sink.lost(),
            }],
            disk_writes: disk_writes(),
            container_logs: container_logs(),
            pressures: self.threads.eviction.pressure_names(),
            thresholds: thresholds.collect(),
            resources: resources(&self.resources),
            offline,
        }
    }

    /// The log of the newest instance, or of the one before. A restart may remove the previous
    /// instance and its log before the next inspection: then the log is searched for again.
    pub(super) fn find_log(
        &self,
        uid: &PodUid,
        container: &str,
        previous: bool,
    ) -> Result<LogSource, String> {
        let until = Instant::now() + LOG_LIMIT;
        loop {
            let found = self.known_log(uid, container, previous);
            let is_there = found.as_ref().is_ok_and(|found| found.path.exists());
            let may_come = previous && self.last_ended(uid, container).is_some();
            if is_there || !may_come || Instant::now() >= until {
                return found;
            }
            let _waiting = threads::waiting("a previous log");
            let _ = StopToken::never().wait(LOG_LIMIT / 20);
        }
    }

    fn known_log(&self, uid: &PodUid, container: &str, previous: bool) -> Result<LogSource, String> {
        let pod = self.observe.cached(uid).ok_or_else(|| "the runtime does not know this pod".to_owned())?;
        let instances: Vec<_> = pod.containers.iter().filter(|instance| instance.name == container).collect();
        let instance = if previous {
            self.last_ended(uid, container).and_then(|last| previous_of(&instances, &last))
        } else {
            instances.first().copied()
        };
        let instance = instance.ok_or_else(|| {
            let which = if previous { "previous " } else { "" };
            format!("there is no {which}instance of container {container}")
        })?;
        let (observe, uid, id) = (self.observe.clone(), uid.clone(), instance.id.clone());
        Ok(LogSource {
            path: resolve(PathBuf::from(&instance.log_path), &instance.id),
            running: Arc::new(move || {
                observe.cached(&uid).is_some_and(|pod| {
                    pod.containers
                        .iter()
                        .any(|instance| instance.id == id && instance.state == ContainerState::Running)
                })
            }),
        })
    }

    /// The id of the terminated instance in the status: during a back-off it is the newest one.
    fn last_ended(&self, uid: &PodUid, container: &str) -> Option<String> {
        let status = self.status.get(uid)?;
        [&status.container_statuses, &status.init_container_statuses]
            .into_iter()
            .flatten()
            .flatten()
            .find(|status| status.name == container)
            .and_then(|status| status.last_state.as_ref()?.terminated.as_ref()?.container_id.as_deref())
            .map(|id| id.split_once("://").map_or(id, |(_, id)| id).to_owned())
    }

    pub(super) fn run_check(&self, check: AgentCheck) -> Result<(), String> {
        match check {
            AgentCheck::SyncLoop => {
                let age = self.threads.turn.locked().elapsed();
                if age > self.turn_limit {
                    return Err(format!("sync Loop took longer than expected: last turn {age:.0?} ago"));
                }
                Ok(())
            }
            AgentCheck::Runtime => {
                let health = self.observe.runtime_health();
                if health.is_usable() { Ok(()) } else { Err(health.runtime.join("; ")) }
            }
            AgentCheck::Sources => {
                let snapshot = self.view.get();
                let problems = snapshot.sources.values().flat_map(|state| &state.problems);
                let problems: Vec<String> =
                    problems.filter(|problem| !problem.ignored).map(ToString::to_string).collect();
                if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
            }
        }
    }
}

fn disk_writes() -> DiskWritesReport {
    // In this order: the total is never less than the part.
    let hour = disk_writes::written_last_hour();
    let all = disk_writes::written();
    DiskWritesReport {
        files: all.files,
        bytes: all.bytes,
        syncs: all.syncs,
        last_hour_files: hour.files,
        last_hour_bytes: hour.bytes,
        last_hour_syncs: hour.syncs,
    }
}

/// `None`: there is no quota, or no pass yet.
fn container_logs() -> Option<LogsReport> {
    Some(LogsReport {
        quota_bytes: metrics::LOGS_QUOTA.get()? as u64,
        used_bytes: metrics::LOGS_BYTES.get()? as u64,
        removed_files: metrics::LOGS_REMOVED.get(),
    })
}

/// An operation on a volume of a pod that takes long, with the file server that it may wait for.
fn slow_volume(view: &PodView, slow: &SlowOperation) -> String {
    let volumes = view.pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    let volume = volumes.iter().find(|volume| volume.name == slow.volume);
    let server = match volume.and_then(|volume| volume.nfs.as_ref()) {
        Some(nfs) => format!("; it is on the NFS server {}", nfs.server),
        None => String::new(),
    };
    let what = match slow.volume.as_str() {
        "" => "its volumes are not unmounted".to_owned(),
        name => format!("volume {name} is not mounted"),
    };
    let seconds = slow.since.as_secs();
    format!("pod {}/{}: {what} after {seconds} s{server}", view.namespace(), view.name())
}

/// The instance with this id, which the status has as the last terminated one. If it was removed,
/// another has ended since: the newest terminated one is meant.
fn previous_of<'a>(instances: &[&'a ContainerStatus], last: &str) -> Option<&'a ContainerStatus> {
    let known = instances.iter().find(|instance| instance.id.as_str() == last);
    known.or_else(|| instances.iter().find(|instance| instance.state == ContainerState::Exited)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_pods_a_missing_key_and_objects_that_are_not_stored_are_problems() {
        let mut report = offline::Report {
            phase: Phase::Held,
            held: Some(HeldReason::NoNode),
            accepts: Some("2026-01-01T01:00:00.25Z".parse().unwrap()),
            seal: SealState::NoKey,
            stopped_pods: 2,
            problems: vec!["secret default/big: too large".to_owned()],
            ..offline::Report::default()
        };
        expect_test::expect![[r#"
            the pods of the API server are held back, and the stored ones continue: it knows neither this node nor any of its pods (restore its data, or run coracle offline accept, which takes over its pods and stops the others; that happens by itself at 2026-01-01T01:00:00Z)
            2 pods are stopped until the API server shows them again, because it was away for too long
            offline: the key cannot be used: Secrets and tokens are neither stored nor read, and pods that need them do not start without the API server
            offline: secret default/big: too large
        "#]]
        .assert_eq(&(offline_problems(&report).join("\n") + "\n"));
        (report.held, report.accepts) = (Some(HeldReason::OtherNode), None);
        let problems = offline_problems(&report).join("\n");
        assert!(problems.contains("is a new one") && !problems.contains("by itself"), "{problems}");
        report.held = Some(HeldReason::OtherCluster);
        assert!(offline_problems(&report).join("\n").contains("it is that of another cluster"));
        for phase in [Phase::Undecided, Phase::Online, Phase::Alone] {
            assert_eq!(offline_problems(&offline::Report { phase, ..offline::Report::default() }), [""; 0]);
        }
    }

    #[test]
    fn previous_instance_is_the_newest_terminated_one() {
        let blank = |id: &str, state| ContainerStatus::blank(id, "main", state);
        let (running, third, second) = (
            blank("c4", ContainerState::Running),
            blank("c3", ContainerState::Exited),
            blank("c2", ContainerState::Exited),
        );
        let fourth = blank("c4", ContainerState::Exited);
        let found = |instances: &[&ContainerStatus], last| {
            previous_of(instances, last).map(|instance| instance.id.to_string())
        };
        assert_eq!(found(&[&running, &third], "c3").as_deref(), Some("c3"));
        // The instance in the status was removed.
        assert_eq!(found(&[&fourth], "c3").as_deref(), Some("c4"));
        assert_eq!(found(&[&running, &second], "c3").as_deref(), Some("c2"));
        assert_eq!(found(&[&running], "c3"), None);
    }
}
