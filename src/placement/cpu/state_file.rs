//! The state file `cpu_manager_state`, in the formats of the Go kubelet (Go:
//! pkg/kubelet/cm/cpumanager/state/checkpoint.go, state_checkpoint.go).
//!
//! It is written in format 4 (since 1.37), which has all fields of format 2: every Go kubelet since 1.18
//! reads it. Formats 2, 3 and 4 are read; format 1 (before 1.18) is not, as in the Go kubelet.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::policy::StaticPolicy;
use super::state::{ByContainer, State};
use crate::model::checksum::{Value, checksum, in_go_json};
use crate::model::ids::PodUid;
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
#[expect(missing_docs, reason = "the names of fields say what the values are")]
pub enum StateError {
    /// It is not JSON of one of the formats.
    #[error("the content has none of the known formats: {message}")]
    Format { message: String },
    /// The checksum is wrong: the file was changed by hand, or is damaged.
    #[error("the checksum {found} does not fit the content")]
    Checksum { found: u64 },
    /// Another policy wrote it.
    #[error("configured policy {configured:?} differs from state checkpoint policy {found:?}")]
    Policy { configured: String, found: String },
    /// A set is not a list of CPUs.
    #[error("the CPUs of {owner} are invalid: {text:?}")]
    Cpus { owner: String, text: String },
    /// There are exclusive CPUs and no shared ones.
    #[error("default cpuset cannot be empty")]
    NothingShared,
    /// Reserved CPUs are not shared.
    #[error("not all reserved cpus {reserved} are present in defaultCpuSet {shared}")]
    ReservedNotShared { reserved: CpuSet, shared: CpuSet },
    /// Strictly reserved CPUs are shared.
    #[error("some of the strictly reserved cpus {reserved} are present in defaultCpuSet {shared}")]
    ReservedShared { reserved: CpuSet, shared: CpuSet },
    /// The CPUs of a container are also shared.
    #[error("pod {pod}, container {container}: cpuset {cpus} overlaps with default cpuset {shared}")]
    Overlap { pod: PodUid, container: String, cpus: CpuSet, shared: CpuSet },
    /// Two pods have the same CPU.
    #[error("pod {pod}, container {container}: cpuset {cpus} overlaps with another pod's")]
    TwoPods { pod: PodUid, container: String, cpus: CpuSet },
    /// The CPUs of a pod are also shared, or another pod's.
    #[error("pod {pod}: cpuset {cpus} overlaps with default cpuset or another pod's")]
    Pod { pod: PodUid, cpus: CpuSet },
    /// The machine has other CPUs than the file.
    #[error("current set of available CPUs {online} does not match with CPUs in state {known}")]
    OtherCpus { online: CpuSet, known: CpuSet },
}

/// CPUs by container name, by pod UID.
type Entries = BTreeMap<String, BTreeMap<String, String>>;

/// Formats 2 to 4: the fields of format 2 (and `podEntries` in format 3), and in format 4 `data`.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Content {
    policy_name: String,
    default_cpu_set: String,
    #[serde(deserialize_with = "or_default")]
    entries: Entries,
    #[serde(deserialize_with = "or_default")]
    pod_entries: BTreeMap<String, PodEntry>,
    checksum: u64,
    #[serde(deserialize_with = "or_default")]
    data: String,
    data_checksum: u64,
}

/// What `data` of format 4 is as JSON.
#[derive(Deserialize, Serialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Data {
    policy_name: String,
    default_cpu_set: String,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    entries: Entries,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    baselines: BTreeMap<String, BTreeMap<String, Baseline>>,
}

#[derive(Deserialize, Serialize, Default)]
#[serde(default)]
struct PodEntry {
    #[serde(rename = "cpuSet", skip_serializing_if = "String::is_empty")]
    cpus: String,
}

#[derive(Deserialize, Serialize, Default)]
#[serde(default)]
struct Baseline {
    baseline: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    policy_name: &'a str,
    default_cpu_set: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    entries: &'a Entries,
    checksum: u32,
    data: &'a str,
    data_checksum: u32,
}

/// What is absent or null in Go's JSON.
fn or_default<'de, D, T>(value: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// The content of the file for a state.
///
/// Go kubelets since 1.18 read the fields of format 2, whose checksum does not cover `data`; those
/// since 1.37 read only `data`.
#[must_use]
pub fn encode(policy: &str, state: &State) -> String {
    let texts =
        |of_pod: &ByContainer| of_pod.iter().map(|(name, cpus)| (name.clone(), cpus.to_string())).collect();
    let entries: Entries =
        state.exclusive.iter().map(|(pod, of_pod)| (pod.as_str().to_owned(), texts(of_pod))).collect();
    let pool = |cpus: &CpuSet| PodEntry { cpus: cpus.to_string() };
    let data = Data {
        policy_name: policy.to_owned(),
        default_cpu_set: state.shared.to_string(),
        entries,
        pod_entries: state.pods.iter().map(|(pod, cpus)| (pod.as_str().to_owned(), pool(cpus))).collect(),
        baselines: baselines(state),
    };
    // INVARIANT: texts and maps with texts as keys are always JSON.
    let text = in_go_json(&serde_json::to_string(&data).unwrap_or_default());
    let checksum = fnv32(&dump("", policy, &data.default_cpu_set, &nested(&data.entries), None));
    let written = Written {
        policy_name: policy,
        default_cpu_set: &data.default_cpu_set,
        entries: &data.entries,
        checksum,
        data_checksum: of_text(&text),
        data: &text,
    };
    in_go_json(&serde_json::to_string(&written).unwrap_or_default())
}

/// The CPUs of each container at its admission. Only a kubelet with the gate
/// `InPlacePodVerticalScalingExclusiveCPUs` writes them, and it takes a container without an entry for
/// one without CPUs of its own. So there are none, or those of all containers.
fn baselines(state: &State) -> BTreeMap<String, BTreeMap<String, Baseline>> {
    if state.baselines.is_empty() {
        return BTreeMap::new();
    }
    let baseline = |pod: &PodUid, name: &String, cpus: &CpuSet| {
        let before = state.baselines.get(pod).and_then(|of_pod| of_pod.get(name));
        (name.clone(), Baseline { baseline: before.unwrap_or(cpus).to_string() })
    };
    let of_pod = |(pod, of_pod): (&PodUid, &ByContainer)| {
        let all = of_pod.iter().map(|(name, cpus)| baseline(pod, name, cpus)).collect();
        (pod.as_str().to_owned(), all)
    };
    state.exclusive.iter().map(of_pod).collect()
}

/// The state of a file that `policy` wrote, not yet compared with the machine.
///
/// What a kubelet with the gates `PodLevelResourceManagers` and
/// `InPlacePodVerticalScalingExclusiveCPUs` has written is kept, whether these are on or not. The CPUs
/// of a pod without containers are shared again.
///
/// # Errors
/// When the file cannot be used.
pub fn decode(text: &str, policy: &str) -> Result<State, StateError> {
    let data = parse(text)?;
    if data.policy_name != policy {
        return Err(StateError::Policy { configured: policy.to_owned(), found: data.policy_name });
    }
    let cpus = |owner: &str, text: &str| {
        let shown: String = text.chars().take(100).collect();
        CpuSet::parse(text).map_err(|_| StateError::Cpus { owner: owner.to_owned(), text: shown })
    };
    let mut state = State { shared: cpus("defaultCpuSet", &data.default_cpu_set)?, ..State::default() };
    for (pod, of_pod) in &data.entries {
        for (name, text) in of_pod {
            let set = cpus(&format!("pod {pod}, container {name}"), text)?;
            state.exclusive.entry(PodUid::from(pod.as_str())).or_default().insert(name.clone(), set);
        }
    }
    let mut unused = CpuSet::new();
    for (pod, entry) in &data.pod_entries {
        let pool = cpus(&format!("pod {pod}"), &entry.cpus)?;
        let uid = PodUid::from(pod.as_str());
        if state.exclusive.contains_key(&uid) {
            state.pods.insert(uid, pool);
        } else {
            unused = unused.union(&pool);
        }
    }
    state.shared = state.shared.union(&unused.difference(&state.all_exclusive()));
    for (pod, of_pod) in &data.baselines {
        for (name, entry) in of_pod {
            let set = cpus(&format!("pod {pod}, container {name}"), &entry.baseline)?;
            let uid = PodUid::from(pod.as_str());
            if state.exclusive_of(&uid, name).is_some() {
                state.baselines.entry(uid).or_default().insert(name.clone(), set);
            }
        }
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
pub fn check(policy: &StaticPolicy, mut state: State) -> Result<State, StateError> {
    let strict = policy.options.strict_reservation;
    let reserved = || policy.reserved.clone();
    if state.shared.is_empty() && state.exclusive.is_empty() {
        state.shared = policy.usable();
        return Ok(state);
    }
    if state.shared.is_empty() && !strict {
        return Err(StateError::NothingShared);
    }
    let shared = || state.shared.clone();
    if strict && !policy.reserved.is_disjoint(&state.shared) {
        return Err(StateError::ReservedShared { reserved: reserved(), shared: shared() });
    }
    if !strict && !policy.reserved.is_subset(&state.shared) {
        return Err(StateError::ReservedNotShared { reserved: reserved(), shared: shared() });
    }
    let mut others = CpuSet::new();
    for (pod, of_pod) in &state.exclusive {
        let mut of_this = state.pods.get(pod).cloned().unwrap_or_default();
        if !of_this.is_disjoint(&state.shared) || !of_this.is_disjoint(&others) {
            return Err(StateError::Pod { pod: pod.clone(), cpus: of_this });
        }
        for (container, cpus) in of_pod {
            let (pod, container, cpus) = (pod.clone(), container.clone(), cpus.clone());
            if !cpus.is_disjoint(&state.shared) {
                return Err(StateError::Overlap { pod, container, cpus, shared: shared() });
            }
            if !cpus.is_disjoint(&others) {
                return Err(StateError::TwoPods { pod, container, cpus });
            }
            of_this = of_this.union(&cpus);
        }
        others = others.union(&of_this);
    }
    let known = state.shared.union(&others);
    if known != policy.usable() {
        return Err(StateError::OtherCpus { online: policy.usable(), known });
    }
    Ok(state)
}

/// Finds the format, and checks the checksum. 0 is accepted in format 2, for files from before there
/// were checksums. A file with `data` is of format 4, and of no older one if `data` is wrong.
fn parse(text: &str) -> Result<Data, StateError> {
    let wrong = |error: serde_json::Error| StateError::Format { message: error.to_string() };
    let content: Content = serde_json::from_str(text).map_err(wrong)?;
    if !content.data.is_empty() || content.data_checksum != 0 {
        if content.data_checksum != u64::from(of_text(&content.data)) {
            return Err(StateError::Checksum { found: content.data_checksum });
        }
        return serde_json::from_str(&content.data).map_err(wrong);
    }
    let entries = nested(&content.entries);
    let (policy, shared, found) = (&content.policy_name, &content.default_cpu_set, content.checksum);
    let pods = pod_entries(&content.pod_entries);
    let is_sum = |version: &str, pods: Option<&str>| {
        found == u64::from(fnv32(&dump(version, policy, shared, &entries, pods)))
    };
    let is_third = pods.as_deref().is_some_and(|pods| is_sum("", Some(pods)) || is_sum("V3", Some(pods)));
    if !is_third && found != 0 && !is_sum("", None) && !is_sum("V2", None) {
        return Err(StateError::Checksum { found });
    }
    let Content { policy_name, default_cpu_set, entries, pod_entries, .. } = content;
    let pod_entries = if is_third { pod_entries } else { BTreeMap::new() };
    Ok(Data { policy_name, default_cpu_set, entries, pod_entries, baselines: BTreeMap::new() })
}

/// The checksum of `data`.
fn of_text(text: &str) -> u32 {
    checksum("string", &Value::text(text))
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
