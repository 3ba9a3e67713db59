//! The state file `cpu_manager_state`, in the formats of the Go kubelet (Go:
//! pkg/kubelet/cm/cpumanager/state/checkpoint.go, state_checkpoint.go).
//!
//! It is written in format 2, which every Go kubelet since 1.18 reads.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::policy::Static;
use super::state::{ByContainer, State};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::fnv32;
use crate::placement::cpus::CpuSet;

/// Its name in the root directory.
pub const FILE_NAME: &str = "cpu_manager_state";

/// The name of policy `none` in the file.
pub const NONE: &str = "none";

/// The name of policy `static` in the file.
pub const STATIC: &str = "static";

/// A state file cannot be used. The caller puts it aside and rebuilds the state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// It is not JSON of one of the formats.
    #[error("the content has none of the known formats: {message}")]
    Format {
        /// What the parser says.
        message: String,
    },
    /// The checksum is wrong: the file was changed by hand, or is damaged.
    #[error("the checksum {found} does not fit the content")]
    Checksum {
        /// The one in the file.
        found: u32,
    },
    /// Another policy wrote it.
    #[error("configured policy {configured:?} differs from state checkpoint policy {found:?}")]
    Policy {
        /// The policy of the configuration.
        configured: String,
        /// That of the file.
        found: String,
    },
    /// A set is not a list of CPUs.
    #[error("the CPUs of {owner} are invalid: {text:?}")]
    Cpus {
        /// The container, or `defaultCpuSet`.
        owner: String,
        /// The text.
        text: String,
    },
    /// A container of format 1 does not run any more.
    #[error("container {id:?} is unknown")]
    Container {
        /// Its id.
        id: String,
    },
    /// There are exclusive CPUs and no shared ones.
    #[error("default cpuset cannot be empty")]
    NothingShared,
    /// Reserved CPUs are not shared.
    #[error("not all reserved cpus {reserved} are present in defaultCpuSet {shared}")]
    ReservedNotShared {
        /// The reserved CPUs.
        reserved: CpuSet,
        /// The shared ones.
        shared: CpuSet,
    },
    /// Strictly reserved CPUs are shared.
    #[error("some of the strictly reserved cpus {reserved} are present in defaultCpuSet {shared}")]
    ReservedShared {
        /// The reserved CPUs.
        reserved: CpuSet,
        /// The shared ones.
        shared: CpuSet,
    },
    /// The CPUs of a container are also shared.
    #[error("pod {pod}, container {container}: cpuset {cpus} overlaps with default cpuset {shared}")]
    Overlap {
        /// The pod.
        pod: PodUid,
        /// The container.
        container: String,
        /// Its CPUs.
        cpus: CpuSet,
        /// The shared ones.
        shared: CpuSet,
    },
    /// Two pods have the same CPU.
    #[error("pod {pod}, container {container}: cpuset {cpus} overlaps with another pod's")]
    TwoPods {
        /// One of the pods.
        pod: PodUid,
        /// The container.
        container: String,
        /// Its CPUs.
        cpus: CpuSet,
    },
    /// The machine has other CPUs than the file.
    #[error("current set of available CPUs {online} does not match with CPUs in state {known}")]
    OtherCpus {
        /// The machine's CPUs.
        online: CpuSet,
        /// The file's CPUs.
        known: CpuSet,
    },
}

/// Container name by CPUs, by pod UID.
type Entries = BTreeMap<String, BTreeMap<String, String>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content<E, P> {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default)]
    entries: E,
    #[serde(default)]
    pod_entries: P,
    checksum: u32,
}

#[derive(Deserialize, Default)]
struct PodEntry {
    #[serde(rename = "cpuSet", default)]
    cpus: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    policy_name: &'a str,
    default_cpu_set: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    entries: Entries,
    checksum: u32,
}

/// The content of the file for a state.
#[must_use]
pub fn encode(policy: &str, state: &State) -> String {
    let texts =
        |of_pod: &ByContainer| of_pod.iter().map(|(name, cpus)| (name.clone(), cpus.to_string())).collect();
    let entries: Entries =
        state.exclusive.iter().map(|(pod, of_pod)| (pod.as_str().to_owned(), texts(of_pod))).collect();
    let default_cpu_set = state.shared.to_string();
    let checksum = fnv32(&dump("", policy, &default_cpu_set, &nested(&entries), None));
    let written = Written { policy_name: policy, default_cpu_set, entries, checksum };
    // INVARIANT: texts and maps with texts as keys are always JSON.
    serde_json::to_string(&written).unwrap_or_default()
}

/// The state of a file that `policy` wrote, not yet compared with the machine. `containers` are
/// those that the runtime knows, for files of format 1 (kubelets before 1.18).
///
/// # Errors
/// When the file cannot be used.
///
/// DIFFERS: format 3 (alpha gate `PodLevelResourceManagers`) is also read without the gate; the CPUs
/// that its pods have without a container are shared again.
pub fn decode(
    text: &str,
    policy: &str,
    containers: &BTreeMap<ContainerId, (PodUid, String)>,
) -> Result<State, FileError> {
    let (found, shared, entries, pods) = match parse(text) {
        Ok(Parsed::Old(old)) => {
            let mut entries = Entries::new();
            for (id, cpus) in old.entries {
                let known = containers.get(&ContainerId::from(id.as_str()));
                let Some((pod, name)) = known else { return Err(FileError::Container { id }) };
                entries.entry(pod.as_str().to_owned()).or_default().insert(name.clone(), cpus);
            }
            (old.policy_name, old.default_cpu_set, entries, BTreeMap::new())
        }
        Ok(Parsed::New(new)) => (new.policy_name, new.default_cpu_set, new.entries, new.pod_entries),
        Err(error) => return Err(error),
    };
    if found != policy {
        return Err(FileError::Policy { configured: policy.to_owned(), found });
    }
    let cpus = |owner: &str, text: &str| {
        let shown: String = text.chars().take(100).collect();
        CpuSet::parse(text).map_err(|_| FileError::Cpus { owner: owner.to_owned(), text: shown })
    };
    let mut state = State { shared: cpus("defaultCpuSet", &shared)?, ..State::default() };
    for (pod, of_pod) in &entries {
        for (name, text) in of_pod {
            let set = cpus(&format!("pod {pod}, container {name}"), text)?;
            state.exclusive.entry(PodUid::from(pod.as_str())).or_default().insert(name.clone(), set);
        }
    }
    let exclusive = state.all_exclusive();
    for (pod, entry) in &pods {
        let rest = cpus(&format!("pod {pod}"), &entry.cpus)?.difference(&exclusive);
        state.shared = state.shared.union(&rest);
    }
    Ok(state)
}

/// Whether a state that was read fits the policy and the machine. An empty state becomes the first
/// one of the policy.
///
/// # Errors
/// When it does not.
///
/// DIFFERS: with `strict-cpu-reservation` no CPU needs to be shared: upstream writes such a file, and
/// then does not start with it.
/// DIFFERS: upstream does not compare the CPUs of pods with each other.
pub fn check(policy: &Static, mut state: State) -> Result<State, FileError> {
    let strict = policy.options.strict_reservation;
    let reserved = || policy.reserved.clone();
    if state.shared.is_empty() && state.exclusive.is_empty() {
        state.shared = policy.usable();
        return Ok(state);
    }
    if state.shared.is_empty() && !strict {
        return Err(FileError::NothingShared);
    }
    let shared = || state.shared.clone();
    if strict && !policy.reserved.is_disjoint(&state.shared) {
        return Err(FileError::ReservedShared { reserved: reserved(), shared: shared() });
    }
    if !strict && !policy.reserved.is_subset(&state.shared) {
        return Err(FileError::ReservedNotShared { reserved: reserved(), shared: shared() });
    }
    let mut others = CpuSet::new();
    for (pod, of_pod) in &state.exclusive {
        let mut of_this = CpuSet::new();
        for (container, cpus) in of_pod {
            let (pod, container, cpus) = (pod.clone(), container.clone(), cpus.clone());
            if !cpus.is_disjoint(&state.shared) {
                return Err(FileError::Overlap { pod, container, cpus, shared: shared() });
            }
            if !cpus.is_disjoint(&others) {
                return Err(FileError::TwoPods { pod, container, cpus });
            }
            of_this = of_this.union(&cpus);
        }
        others = others.union(&of_this);
    }
    let known = state.shared.union(&others);
    if known != policy.usable() {
        return Err(FileError::OtherCpus { online: policy.usable(), known });
    }
    Ok(state)
}

enum Parsed {
    /// Format 1: CPUs by container id.
    Old(Content<BTreeMap<String, String>, ()>),
    /// Formats 2 and 3.
    New(Content<Entries, BTreeMap<String, PodEntry>>),
}

/// Finds the format, and checks the checksum. 0 is accepted in formats 1 and 2, for files from
/// before there were checksums.
fn parse(text: &str) -> Result<Parsed, FileError> {
    let wrong = |error: serde_json::Error| FileError::Format { message: error.to_string() };
    match serde_json::from_str::<Content<Entries, BTreeMap<String, PodEntry>>>(text) {
        Ok(new) => {
            let entries = nested(&new.entries);
            let (policy, shared) = (&new.policy_name, &new.default_cpu_set);
            let sum = |version: &str| fnv32(&dump(version, policy, shared, &entries, None));
            let as_pods = || {
                pod_entries(&new.pod_entries)
                    .map(|pods| fnv32(&dump("", policy, shared, &entries, Some(&pods))))
            };
            let fits = new.checksum == 0
                || new.checksum == sum("")
                || new.checksum == sum("V2")
                || as_pods() == Some(new.checksum);
            if fits { Ok(Parsed::New(new)) } else { Err(FileError::Checksum { found: new.checksum }) }
        }
        Err(error) => {
            let Ok(old) = serde_json::from_str::<Content<BTreeMap<String, String>, ()>>(text) else {
                return Err(wrong(error));
            };
            let entries = format!("(map[string]string){}", flat(&old.entries));
            let fits = old.checksum == 0
                || old.checksum == fnv32(&dump("", &old.policy_name, &old.default_cpu_set, &entries, None));
            if fits { Ok(Parsed::Old(old)) } else { Err(FileError::Checksum { found: old.checksum }) }
        }
    }
}

/// The text whose FNV-1a is the checksum: the Go value with its types.
fn dump(version: &str, policy: &str, shared: &str, entries: &str, pods: Option<&str>) -> String {
    let pods = pods.map(|pods| format!(" PodEntries:(state.PodCPUAssignments){pods}")).unwrap_or_default();
    format!(
        "(*state.CPUManagerCheckpoint{version}){{PolicyName:(string){policy} DefaultCPUSet:(string){shared} \
         Entries:{entries}{pods} Checksum:(checksum.Checksum)0}}"
    )
}

fn nested(entries: &Entries) -> String {
    let mut text = String::from("(map[string]map[string]string)map[");
    for (index, (pod, of_pod)) in entries.iter().enumerate() {
        let _ = write!(text, "{}{pod}:{}", if index == 0 { "" } else { " " }, flat(of_pod));
    }
    text + "]"
}

fn flat(entries: &BTreeMap<String, String>) -> String {
    let items: Vec<String> = entries.iter().map(|(key, value)| format!("{key}:{value}")).collect();
    format!("map[{}]", items.join(" "))
}

/// `None` if a set is invalid.
fn pod_entries(pods: &BTreeMap<String, PodEntry>) -> Option<String> {
    let mut items = Vec::new();
    for (pod, entry) in pods {
        let cpus: Vec<String> =
            CpuSet::parse(&entry.cpus).ok()?.iter().map(|cpu| format!("{cpu}:{{}}")).collect();
        items.push(format!(
            "{pod}:{{CPUSet:(cpuset.CPUSet){{elems:(map[int]struct {{}})map[{}]}}}}",
            cpus.join(" ")
        ));
    }
    Some(format!("map[{}]", items.join(" ")))
}
