//! The settings of the resource managers, and what runs when a state file is lost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crossbeam_channel::{Receiver, bounded};

use super::error::{StartError, thread_error};
use super::host::Host;
use super::rooms::Rooms;
use super::settings;
use crate::claims::api::{ClaimApiClient, ResourceClaimApi, StoredClaims};
use crate::claims::{self, ResourceClaims};
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::cri::{self, CriError, RuntimeClient};
use crate::devices::{self, Devices};
use crate::kube::client::Client;
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::quantity::{Amount, amount};
use crate::model::reasons;
use crate::model::requests::Amounts;
use crate::model::runtime::{ContainerState, ListedPod};
use crate::observe::Observe;
use crate::offline::Offline;
use crate::placement::cpu::options::{Gates, Options};
use crate::placement::cpu::policy::{Reservation, StaticPolicy};
use crate::placement::cpus::CpuSet;
use crate::placement::machine::Machine;
use crate::placement::memory::Reserved;
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::{self, NumaNode};
use crate::placement::topology::{Policy, Scope, TopologyManager};
use crate::pods::assignments::{Assignments, ObservedContainer, RunningContainers, Settings};
use crate::sync::view::Entry;
use crate::util::mailbox::Post;
use crate::util::threads::{OnDeath, Running};

/// The devices of the machine.
const SYSTEM: &str = "/sys/devices/system";

/// Most cgroups that are searched for those of containers.
const MAX_CGROUPS: usize = 50_000;

/// Opens the assignments of CPUs and memory: checks the configuration, and reads the state files.
///
/// # Errors
/// When the configuration does not fit the machine.
pub(super) fn open(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    cri: &RuntimeClient,
    events: &EventSink,
) -> Result<Assignments, StartError> {
    let (settings, _) = settings(args, config, host)?;
    let cpusets = host.cgroups.dir("cpuset");
    Ok(Assignments::open(settings, &|| running(cri, &cpusets), events))
}

/// Opens the device manager. Pods whose devices change are posted to `changed`.
///
/// # Errors
/// When the NUMA nodes of the machine cannot be read.
pub(super) fn open_devices(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    events: &EventSink,
    changed: Post<PodUid, ()>,
) -> Result<Devices, StartError> {
    let (_, nodes) = settings(args, config, host)?;
    let settings = devices::Settings {
        directory: args.root_dir.join(devices::DIRECTORY),
        nodes,
        wait: devices::WAIT_LIMIT,
        limits: devices::Limits::default(),
    };
    let on_change = move |change: &devices::Change| {
        change.pods.iter().for_each(|uid| changed.put(uid.clone(), ()));
    };
    let (devices, found) = Devices::open(settings, Box::new(on_change));
    if let Some(problem) = found.problem {
        events.raise(Regarding::Node, EventType::Warning, reasons::UNUSABLE_STATE_FILE, problem);
    }
    Ok(devices)
}

/// Opens the resource claims. Pods whose devices change are posted to `changed`. Also returns what
/// [`start_claims`] needs.
pub(super) fn open_claims(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    events: &EventSink,
    (client, offline): (Option<&Client>, Option<Offline>),
    changed: Post<PodUid, ()>,
) -> (ResourceClaims, Receiver<()>) {
    // One slot: a bell.
    let (bell, rings) = bounded(1);
    let settings = claims::Settings {
        root_dir: args.root_dir.clone(),
        node: host.node_name.clone(),
        pod_groups: settings::gates(config).enabled("DRAWorkloadResourceClaims"),
    };
    let api = client.map(|client| -> Box<dyn ResourceClaimApi> {
        let api: Box<dyn ResourceClaimApi> = Box::new(ClaimApiClient::new(client));
        match offline {
            Some(offline) => Box::new(StoredClaims::new(api, offline)),
            None => api,
        }
    });
    let on_change = move |uid: &PodUid| changed.put(uid.clone(), ());
    let claims = ResourceClaims::open(settings, api, Box::new(on_change), bell);
    for problem in claims.problems() {
        let problem = problem.as_str();
        events.raise(Regarding::Node, EventType::Warning, reasons::UNUSABLE_STATE_FILE, problem);
    }
    (claims, rings)
}

/// Starts the thread of the claims.
pub(super) fn start_claims(rooms: &Rooms, on_death: OnDeath) -> Result<Running, StartError> {
    let view = rooms.view.clone();
    let active = move || {
        let snapshot = view.get();
        let may_use = |entry: &Entry| match &entry.worker {
            Some(worker) => !worker.report().has_stopped(),
            None => entry.pod.as_ref().is_some_and(|pod| !entry.rejected && !pod.is_over()),
        };
        let pods = snapshot.pods.iter().filter(|(_, entry)| may_use(entry)).map(|(uid, _)| uid.clone());
        snapshot.has_all_pods.then(|| pods.collect())
    };
    let running = rooms.claims.start(Box::new(active), rooms.claim_rings.clone(), on_death);
    running.map_err(thread_error("claims"))
}

/// The names of a pod's containers that the runtime has last listed as running.
pub(super) fn running_containers(observe: &Observe) -> RunningContainers {
    let observe = observe.clone();
    Arc::new(move |uid| {
        let listed = observe.listed();
        let containers = listed.get(uid).into_iter().flat_map(|pod| &pod.containers);
        let running = containers.filter(|container| container.state == ContainerState::Running);
        running.map(|container| container.name.clone()).collect()
    })
}

/// The settings, and the NUMA nodes if resources are aligned.
fn settings(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
) -> Result<(Settings, Vec<u32>), StartError> {
    let refused = |error: &dyn std::fmt::Display| StartError::Refused(error.to_string());
    let policy = Policy::parse(&config.topology_manager_policy).unwrap_or(Policy::None);
    let scope = Scope::parse(&config.topology_manager_scope).unwrap_or_default();
    let huge_pages: BTreeMap<u64, u64> =
        host.machine.huge_pages.iter().map(|pages| (pages.size_bytes, pages.total)).collect();
    let is_cpu_static = config.cpu_manager_policy == "static";
    let is_memory_static = config.memory_manager_policy == "Static";
    let nodes = match policy != Policy::None || is_memory_static {
        true => numa_nodes::read(&Path::new(SYSTEM).join("node"), host.machine.memory_bytes, &huge_pages)
            .map_err(|error| refused(&error))?,
        false => Vec::new(),
    };
    let options = &config.topology_manager_policy_options;
    let numbers = nodes.iter().map(|node| node.number).collect();
    let topology = TopologyManager::new(policy, scope, options, &nodes).map_err(|error| refused(&error))?;
    let topology = topology.with_pod_level(settings::gates(config).enabled("PodLevelResourceManagers"));
    let cpu = match is_cpu_static {
        true => Some(cpu(config, policy == Policy::SingleNumaNode).map_err(|error| refused(&error))?),
        false if config.cpu_manager_policy_options.is_empty() => None,
        false => {
            let given = go_map(&config.cpu_manager_policy_options);
            let message = format!("new none policy error: none policy: received unsupported options={given}");
            return Err(StartError::Refused(message));
        }
    };
    let memory = match is_memory_static {
        true => Some(memory(args, config, host, nodes)?),
        false => None,
    };
    let settings = Settings {
        topology,
        cpu,
        memory,
        root_dir: args.root_dir.clone(),
        without_quota: settings::gates(config).enabled("DisableCPUQuotaWithExclusiveCPUs"),
        retry: config.cpu_manager_reconcile_period.to_std().max(std::time::Duration::from_secs(1)),
    };
    Ok((settings, numbers))
}

/// A map as Go prints it.
fn go_map(map: &BTreeMap<String, String>) -> String {
    let items: Vec<String> = map.iter().map(|(key, value)| format!("{key}:{value}")).collect();
    format!("map[{}]", items.join(" "))
}

fn cpu(config: &KubeletConfiguration, single_numa_node: bool) -> Result<StaticPolicy, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let reservation = match config.reserved_system_cpus.as_str() {
        "" => Reservation::Amount(reserved_cpus(config)?),
        list => Reservation::List(CpuSet::parse(list).map_err(|error| text(&error))?),
    };
    let machine = Machine::read(Path::new(SYSTEM)).map_err(|error| text(&error))?;
    let gates = settings::gates(config);
    let gates = Gates {
        alpha: gates.enabled("CPUManagerPolicyAlphaOptions"),
        beta: gates.enabled("CPUManagerPolicyBetaOptions"),
    };
    let failed = |error: &dyn std::fmt::Display| format!("new static policy error: {error}");
    let options =
        Options::parse(&config.cpu_manager_policy_options, gates).map_err(|error| failed(&error))?;
    StaticPolicy::new(machine, &reservation, options, single_numa_node).map_err(|error| failed(&error))
}

/// The CPUs of systemReserved and kubeReserved together. The texts are upstream's.
fn reserved_cpus(config: &KubeletConfiguration) -> Result<Amount, String> {
    let all = [&config.system_reserved, &config.kube_reserved];
    let cpu_amount = |reserved: &&BTreeMap<String, String>| {
        let amount = Amount::parse(reserved.get("cpu")?).ok()?;
        Some(Amount::from_milli(amount.nearest_milli()))
    };
    let found: Vec<Amount> = all.iter().filter_map(cpu_amount).collect();
    if found.is_empty() {
        return Err("[cpumanager] unable to determine reserved CPU resources for static policy".to_owned());
    }
    let sum = found.into_iter().fold(Amount::ZERO, |sum, more| sum + more);
    if sum.is_zero() {
        return Err("[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be \
                    greater than zero"
            .to_owned());
    }
    Ok(sum)
}

fn memory(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    nodes: Vec<NumaNode>,
) -> Result<(Vec<NumaNode>, Reserved), StartError> {
    let mut expected = Amounts::new();
    for reserved in [&config.system_reserved, &config.kube_reserved] {
        for (name, text) in reserved {
            let Ok(more) = Amount::parse(text) else { continue };
            let sum = expected.entry(name.clone()).or_default();
            *sum = *sum + more;
        }
    }
    let capacity = i64::try_from(host.machine.memory_bytes).unwrap_or(i64::MAX);
    let threshold = settings::reservations(args, config).thresholds(capacity, 0).memory_bytes;
    let sum = expected.entry("memory".to_owned()).or_default();
    *sum = *sum + Amount::from_units(threshold);
    let configured: Vec<(i64, Amounts)> = config
        .reserved_memory
        .iter()
        .map(|reservation| {
            let limits = reservation.limits.iter().map(|(name, value)| (name.clone(), amount(value)));
            (i64::from(reservation.numa_node), limits.collect())
        })
        .collect();
    let reserved = Reserved::new(&nodes, &configured, &expected);
    let reserved = reserved.map_err(|error| StartError::Refused(error.to_string()))?;
    Ok((nodes, reserved))
}

/// The running containers with their CPUs and NUMA nodes: as the runtime reports them, or else from
/// their cgroups below `cpusets`.
fn running(cri: &RuntimeClient, cpusets: &Path) -> Result<Vec<ObservedContainer>, CriError> {
    let read_cpusets = |id: &ContainerId| {
        let status = cri.container_status(id)?;
        let linux = &status.resources.linux;
        Ok((linux.cpuset_cpus.clone(), linux.cpuset_mems.clone()))
    };
    observed(cri::list_pods(cri, None)?, &read_cpusets, cpusets)
}

/// Reads the CPUs and memory nodes that a container may use, as lists of the kernel.
type ReadCpusets<'a> = dyn Fn(&ContainerId) -> Result<(String, String), CriError> + 'a;

/// The running ones of the listed containers. One that was removed after the list is left out.
fn observed(
    pods: BTreeMap<PodUid, ListedPod>,
    read_cpusets: &ReadCpusets<'_>,
    cpusets: &Path,
) -> Result<Vec<ObservedContainer>, CriError> {
    let mut cgroups = None;
    let mut found = Vec::new();
    for pod in pods.into_values() {
        for container in pod.containers.iter().filter(|container| container.state == ContainerState::Running)
        {
            let Some(mut sets) = cri::unless_gone(read_cpusets(&container.id))? else { continue };
            if sets.0.is_empty() {
                let all = cgroups.get_or_insert_with(|| container_cgroups(cpusets));
                let read = |file: &str| {
                    let path = all.get(container.id.as_str())?.join(file);
                    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
                };
                sets = (read("cpuset.cpus").unwrap_or_default(), read("cpuset.mems").unwrap_or_default());
            }
            let set = |text: &str| CpuSet::parse(text).ok().filter(|set| !set.is_empty());
            found.push(ObservedContainer {
                pod: pod.uid.clone(),
                name: container.name.clone(),
                cpus: set(&sets.0),
                nodes: set(&sets.1).map(|nodes| NumaMask::from_numbers(nodes.iter())),
            });
        }
    }
    Ok(found)
}

/// Cgroups by the last part of their name, which is a container's id with both drivers.
fn container_cgroups(top: &Path) -> BTreeMap<String, PathBuf> {
    let (mut found, mut open) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) || found.len() >= MAX_CGROUPS {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.trim_end_matches(".scope").rsplit(['-', ':']).next().unwrap_or_default();
            found.insert(id.to_owned(), entry.path());
            open.push(entry.path());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::runtime::ListedContainer;
    use crate::transport::grpc::{CallError, Kind};

    fn config(body: serde_json::Value) -> KubeletConfiguration {
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn container_that_is_removed_while_all_are_read_is_left_out() {
        let container = |name: &str, state| ListedContainer {
            id: name.into(),
            name: name.to_owned(),
            sandbox_id: "s".into(),
            state,
            attempt: 0,
            created_at: None,
            image_ref: "i".into(),
            annotations: Arc::default(),
        };
        let running = ["first", "gone", "last"].map(|name| container(name, ContainerState::Running));
        let containers = running.into_iter().chain([container("ended", ContainerState::Exited)]).collect();
        let pod = ListedPod { uid: "u".into(), containers, ..ListedPod::default() };
        let pods = BTreeMap::from([(pod.uid.clone(), pod)]);
        let observe = |kind| {
            let read_cpusets = |id: &ContainerId| match id.as_str() {
                "gone" => {
                    let error = CallError { method: "ContainerStatus", kind, message: String::new() };
                    Err(CriError::Call { object: id.to_string(), error })
                }
                _ => Ok(("0-1".to_owned(), "0".to_owned())),
            };
            observed(pods.clone(), &read_cpusets, Path::new("/nonexistent"))
        };
        let names = |found: Vec<ObservedContainer>| -> Vec<String> {
            found.into_iter().map(|container| container.name).collect()
        };
        assert_eq!(observe(Kind::NotFound).map(names), Ok(vec!["first".to_owned(), "last".to_owned()]));
        assert!(observe(Kind::Unavailable).is_err());
    }

    #[test]
    fn missing_and_empty_reservations_have_the_texts_of_upstream() {
        let message = |body| reserved_cpus(&config(body)).unwrap_err();
        assert_eq!(
            message(serde_json::json!({})),
            "[cpumanager] unable to determine reserved CPU resources for static policy"
        );
        assert_eq!(
            message(serde_json::json!({"kubeReserved": {"cpu": "0"}})),
            "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
        );
        let both = serde_json::json!({"kubeReserved": {"cpu": "500m"}, "systemReserved": {"cpu": "1"}});
        assert_eq!(reserved_cpus(&config(both)), Ok(Amount::from_milli(1500)));
    }
}
