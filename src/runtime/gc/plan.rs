//! The containers, sandboxes and logs to remove, as data. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;

use super::log_tree::{self, LogTree};
use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::labels;
use crate::model::runtime::{ContainerState, ListedContainer, ListedPod, SandboxState};

/// No container gets less time to stop than this.
const MIN_GRACE: Duration = Duration::from_secs(2);
/// A list may be newer than `now` by this time.
const SKEW: jiff::SignedDuration = jiff::SignedDuration::from_secs(60);
/// How many dead containers are kept (three deprecated flags, still valid).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    /// `--minimum-container-ttl-duration`: younger ones stay.
    pub min_age: Duration,
    /// `--maximum-dead-containers-per-container`; `None` (a negative value): any number.
    pub max_per_pod_container: Option<usize>,
    /// `--maximum-dead-containers` on the node; `None` (a negative value): any number.
    pub max_containers: Option<usize>,
}

impl Default for Policy {
    fn default() -> Self {
        Policy { min_age: Duration::ZERO, max_per_pod_container: Some(1), max_containers: None }
    }
}

/// The agent's view of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodRetention {
    /// The pod should run, or is being stopped.
    Wanted,
    /// The pod has ended by itself and still exists: its last containers stay for their logs.
    Finished,
    /// The pod was deleted or evicted and has ended: all of it may be removed.
    Terminated,
    /// No source has it.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Dead containers according to the policy.
    Policy,
    /// Everything that no running pod needs, as the disk is nearly full.
    Everything,
}

/// The inputs of a plan.
pub(crate) struct Inputs<'a> {
    pub listed: &'a BTreeMap<PodUid, ListedPod>,
    pub standing: &'a dyn Fn(&PodUid) -> PodRetention,
    /// Whether every source has reported its pods: before that no pod counts as removed.
    pub sources_ready: bool,
    pub scope: Scope,
    pub policy: Policy,
    pub logs: &'a LogTree,
    pub now: Timestamp,
}

/// One dead container, with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeadContainer {
    pub pod: PodUid,
    pub id: ContainerId,
    pub sandbox: SandboxId,
    /// Its log below the directory of all pod logs; `None` if its names are not valid in a path.
    pub log: Option<PathBuf>,
    /// The name of its link in the directory of links; `None` likewise.
    pub link: Option<String>,
    /// Set when it may still run: it has to be stopped first, with this grace.
    pub stop_first: Option<Duration>,
}

/// One thing that has to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Removal {
    Container(DeadContainer),
    /// A sandbox without containers.
    Sandbox {
        pod: PodUid,
        id: SandboxId,
    },
    /// The log directory of a removed pod.
    LogDirectory {
        pod: PodUid,
        name: String,
    },
    Link {
        name: String,
    },
}

/// Decides what to remove, in a possible order: containers, then their sandboxes, then logs.
pub(crate) fn plan(inputs: &Inputs<'_>) -> Vec<Removal> {
    let removed = containers(inputs);
    let removed_ids: BTreeSet<&ContainerId> = removed.iter().map(|(_, container)| &container.id).collect();
    let remaining = || {
        let all = inputs.listed.values().flat_map(|pod| &pod.containers);
        all.filter(|container| !removed_ids.contains(&container.id))
    };
    let used: BTreeSet<&SandboxId> = remaining().map(|container| &container.sandbox_id).collect();
    let mut removals: Vec<Removal> =
        removed.iter().map(|(pod, container)| Removal::Container(dead_container(pod, container))).collect();
    for pod in inputs.listed.values() {
        let mut sandboxes: Vec<_> = pod.sandboxes.iter().collect();
        sandboxes.sort_by(|a, b| {
            (b.attempt, b.created_at).cmp(&(a.attempt, a.created_at)).then_with(|| a.id.cmp(&b.id))
        });
        // The newest sandbox of a pod that stays carries its address for the status.
        let keep = usize::from(!removes_all(inputs, &pod.uid));
        for sandbox in sandboxes.into_iter().skip(keep) {
            if sandbox.state == SandboxState::NotReady && !used.contains(&sandbox.id) {
                removals.push(Removal::Sandbox { pod: pod.uid.clone(), id: sandbox.id.clone() });
            }
        }
    }
    for (name, uid) in &inputs.logs.pod_dirs {
        let holds_containers = inputs
            .listed
            .get(uid)
            .is_some_and(|pod| pod.containers.iter().any(|container| !removed_ids.contains(&container.id)));
        if is_gone(inputs, uid) && !holds_containers {
            removals.push(Removal::LogDirectory { pod: uid.clone(), name: name.clone() });
        }
    }
    // During a rotation the link of a running container may lead nowhere for a moment.
    let alive: BTreeSet<&ContainerId> = remaining()
        .filter(|container| container.state != ContainerState::Exited)
        .map(|container| &container.id)
        .collect();
    for (name, id) in &inputs.logs.dangling_links {
        // In a long name the end of the id may be cut off.
        if !alive
            .range::<&ContainerId, _>(id..)
            .next()
            .is_some_and(|alive| alive.as_str().starts_with(id.as_str()))
        {
            removals.push(Removal::Link { name: name.clone() });
        }
    }
    removals
}

/// The dead instances of one container.
type Unit<'a> = Vec<(&'a ListedPod, &'a ListedContainer)>;

fn containers<'a>(inputs: &Inputs<'a>) -> Unit<'a> {
    let min_age = jiff::SignedDuration::try_from(inputs.policy.min_age).unwrap_or(jiff::SignedDuration::MAX);
    let newest_to_go = inputs.now.saturating_sub(min_age).unwrap_or(Timestamp::MIN);
    // A later creation time means that the clock was set back.
    // DIFFERS: the Go kubelet keeps it until the clock has come as far again.
    let future = inputs.now.saturating_add(SKEW).unwrap_or(Timestamp::MAX);
    let mut removed = Vec::new();
    let mut units: Vec<Unit<'a>> = Vec::new();
    for pod in inputs.listed.values() {
        let mut of_pod: BTreeMap<&str, Unit<'a>> = BTreeMap::new();
        let everything = removes_all(inputs, &pod.uid);
        for container in &pod.containers {
            let old = container.created_at.is_none_or(|created| created <= newest_to_go || created > future);
            // DIFFERS: the Go kubelet counts a container that is about to be started among the dead
            // ones, and so may remove the one whose termination the status has to show.
            let starting = !everything && is_about_to_start(pod, container);
            if container.state != ContainerState::Running && old && !starting {
                of_pod.entry(&container.name).or_default().push((pod, container));
            }
        }
        for (_, mut unit) in of_pod {
            newest_first(&mut unit);
            if everything {
                removed.append(&mut unit);
            } else if let Some(keep) = inputs.policy.max_per_pod_container {
                removed.extend(split_oldest(&mut unit, keep));
            }
            units.push(unit);
        }
    }
    units.retain(|unit| !unit.is_empty());
    if let Some(most) = inputs.policy.max_containers {
        let total = |units: &[Unit<'_>]| units.iter().map(Vec::len).sum::<usize>();
        if total(&units) > most {
            let share = most.checked_div(units.len()).unwrap_or(0).max(1);
            for unit in &mut units {
                removed.extend(split_oldest(unit, share));
            }
            let mut all: Unit<'a> = units.into_iter().flatten().collect();
            // Containers of different names have no common attempt number, so the creation time
            // decides.
            all.sort_by(|(_, a), (_, b)| b.created_at.cmp(&a.created_at).then_with(|| a.id.cmp(&b.id)));
            removed.extend(split_oldest(&mut all, most));
        }
    }
    removed
}

/// Whether this is the newest instance of its name, and only created so far.
fn is_about_to_start(pod: &ListedPod, container: &ListedContainer) -> bool {
    container.state == ContainerState::Created
        && !pod.containers.iter().any(|other| other.name == container.name && age(other) > age(container))
}

/// The sort key of instances of one name. The attempt is first, as clocks can be set back.
fn age(container: &ListedContainer) -> (u32, Option<Timestamp>) {
    (container.attempt, container.created_at)
}

/// Sorts the instances of one name.
fn newest_first(unit: &mut Unit<'_>) {
    unit.sort_by(|(_, a), (_, b)| age(b).cmp(&age(a)).then_with(|| a.id.cmp(&b.id)));
}

fn split_oldest<'a>(unit: &mut Unit<'a>, keep: usize) -> Unit<'a> {
    unit.split_off(keep.min(unit.len()))
}

/// Whether the pod is deleted or unknown for certain.
pub(super) fn is_gone(inputs: &Inputs<'_>, uid: &PodUid) -> bool {
    inputs.sources_ready && matches!((inputs.standing)(uid), PodRetention::Terminated | PodRetention::Unknown)
}

/// Whether nothing of the pod is worth keeping.
fn removes_all(inputs: &Inputs<'_>, uid: &PodUid) -> bool {
    is_gone(inputs, uid)
        || (inputs.scope == Scope::Everything && (inputs.standing)(uid) == PodRetention::Finished)
}

fn dead_container(pod: &ListedPod, container: &ListedContainer) -> DeadContainer {
    let number = |key: &str| container.annotations.get(key)?.parse::<u32>().ok();
    let restarts = number(labels::CONTAINER_RESTART_COUNT).unwrap_or(container.attempt);
    let grace = number(labels::POD_TERMINATION_GRACE_PERIOD)
        .map_or(MIN_GRACE, |seconds| Duration::from_secs(seconds.into()));
    DeadContainer {
        pod: pod.uid.clone(),
        id: container.id.clone(),
        sandbox: container.sandbox_id.clone(),
        log: log_path(&pod.namespace, &pod.name, &pod.uid, &container.name, restarts),
        link: link_name(&pod.namespace, &pod.name, &container.name, &container.id),
        stop_first: (container.state == ContainerState::Unknown).then_some(grace.max(MIN_GRACE)),
    }
}

/// Names come from labels in the runtime, which other clients can write, too: if one is not a plain
/// path element, no log is removed.
fn log_path(namespace: &str, pod: &str, uid: &PodUid, container: &str, restarts: u32) -> Option<PathBuf> {
    let dir = log_tree::pod_dir_name(namespace, pod, uid);
    let plain = |name: &str| !name.contains('/') && !matches!(name, "" | "." | "..");
    (plain(&dir) && plain(container))
        .then(|| PathBuf::from(dir).join(container).join(format!("{restarts}.log")))
}

fn link_name(namespace: &str, pod: &str, container: &str, id: &ContainerId) -> Option<String> {
    let name = log_tree::legacy_link_name(pod, namespace, container, id);
    (!name.contains('/')).then_some(name)
}
