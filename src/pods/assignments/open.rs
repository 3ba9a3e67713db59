//! The state at the start: from the state files, or else from what runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crossbeam_channel::bounded;

use super::state::AssignmentState;
use super::store::Store;
use super::{Assignments, Settings, Shared, is_active};
use crate::cri::CriError;
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::reasons;
use crate::placement::cpu::policy::StaticPolicy;
use crate::placement::cpu::rebuild::{Observed, rebuild};
use crate::placement::cpu::request::{ContainerCpus, Kind, PodCpus};
use crate::placement::cpu::state::State;
use crate::placement::cpu::state_file;
use crate::placement::cpus::CpuSet;
use crate::placement::memory::{self, Memory};
use crate::placement::numa::NumaMask;
use crate::util::checkpoint_file::CheckpointFile;

const MEMORY_FILE: &str = "memory_manager_state";

/// A running container, as the runtime or its cgroup shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedContainer {
    /// Its pod.
    pub pod: PodUid,
    /// Its name.
    pub name: String,
    /// Its CPUs, if they are known.
    pub cpus: Option<CpuSet>,
    /// Its NUMA nodes, if they are known.
    pub nodes: Option<NumaMask>,
}

impl Assignments {
    /// Reads the state files. One that cannot be used is put aside, and the state is made from the
    /// containers that `running` finds.
    ///
    /// DIFFERS: the Go kubelet does not start with such a file; an operator has to drain the node.
    pub fn open(
        settings: Settings,
        running: &dyn Fn() -> Result<Vec<ObservedContainer>, CriError>,
        events: &EventSink,
    ) -> Assignments {
        let cpu_file = CheckpointFile::new(&settings.root_dir, state_file::FILE_NAME);
        let memory_file = CheckpointFile::new(&settings.root_dir, MEMORY_FILE);
        let mut problems = Vec::new();
        let cpu = load(&cpu_file, &mut problems, |text| match &settings.cpu {
            Some(policy) => {
                let state =
                    state_file::decode(text, state_file::STATIC).map_err(|error| error.to_string())?;
                state_file::check(policy, state).map_err(|error| error.to_string())
            }
            None => state_file::decode(text, state_file::NONE).map_err(|error| error.to_string()),
        });
        let memory = load(&memory_file, &mut problems, |text| match &settings.memory {
            Some((nodes, reserved)) => {
                Memory::restore(nodes, reserved, text).map(Some).map_err(|error| error.to_string())
            }
            None => memory::check_none(text).map(|()| None).map_err(|error| error.to_string()),
        });
        let is_lost = (settings.cpu.is_some() && matches!(cpu, Loaded::Unusable))
            || (settings.memory.is_some() && matches!(memory, Loaded::Unusable));
        let found = if is_lost { list_running(running, &mut problems) } else { Vec::new() };
        for problem in &problems {
            log::warn!("{problem}");
            events.raise(Regarding::Node, EventType::Warning, reasons::UNUSABLE_STATE_FILE, problem.as_str());
        }
        let is_absent = |is_good: bool| !is_good;
        let (write_cpu, write_memory) =
            (is_absent(matches!(cpu, Loaded::Good(_))), is_absent(matches!(memory, Loaded::Good(_))));
        let cpu_state = match (cpu, &settings.cpu) {
            (Loaded::Good(cpu_state), _) => cpu_state,
            (Loaded::Absent, Some(policy)) => policy.empty_state(),
            (Loaded::Unusable, Some(policy)) => infer_state(policy, &found),
            (_, None) => State::default(),
        };
        let memory_state = match (memory, &settings.memory) {
            (Loaded::Good(memory), _) => memory,
            (_, Some((nodes, reserved))) => Some(Memory::new(nodes, reserved)),
            (_, None) => None,
        };
        if settings.cpu.is_none() && write_cpu {
            write(&cpu_file, &state_file::encode(state_file::NONE, &State::default()));
        }
        if settings.memory.is_none() && write_memory {
            write(&memory_file, memory::NONE_STATE);
        }
        let problems = problems.into();
        if settings.cpu.is_none() {
            // The Go kubelet shows zeros with policy `none`.
            metrics::SHARED_CPUS.set(0.0);
            metrics::EXCLUSIVE_CPUS.set(0.0);
        }
        if !is_active(&settings) {
            return Assignments { shared: None, devices: None, claims: None, problems };
        }
        let mut state = AssignmentState::new(cpu_state, memory_state);
        if !write_cpu {
            state.cpu_text = state_file::encode(state_file::STATIC, &state.cpu);
        }
        for container in found {
            state.recovered.entry(container.pod).or_default().insert(container.name, container.nodes);
        }
        if let Some(policy) = &settings.cpu {
            state.update_metrics(policy);
        }
        let (bell, rings) = bounded(1);
        let store = Store::new(cpu_file, memory_file);
        let shared = Shared { settings, state: Mutex::new(state), store, bell, rings };
        shared.note_changes(&mut shared.state());
        shared.store();
        Assignments { shared: Some(Arc::new(shared)), devices: None, claims: None, problems }
    }
}

enum Loaded<T> {
    Absent,
    Good(T),
    Unusable,
}

fn load<T>(
    from: &CheckpointFile,
    problems: &mut Vec<String>,
    decode: impl FnOnce(&str) -> Result<T, String>,
) -> Loaded<T> {
    let reason = match from.read() {
        Ok(None) => return Loaded::Absent,
        Ok(Some(text)) => match decode(&text) {
            Ok(good) => return Loaded::Good(good),
            Err(reason) => reason,
        },
        Err(error) => error.to_string(),
    };
    let path = from.path().display();
    problems.push(match from.put_aside(&reason) {
        Ok(aside) => format!(
            "the state file {path} cannot be used: {reason}; it is now {}, and a new one is made from the \
             containers that run",
            aside.display()
        ),
        Err(error) => {
            format!("the state file {path} cannot be used: {reason}; it cannot be renamed: {error}")
        }
    });
    Loaded::Unusable
}

fn list_running(
    running: &dyn Fn() -> Result<Vec<ObservedContainer>, CriError>,
    problems: &mut Vec<String>,
) -> Vec<ObservedContainer> {
    running().unwrap_or_else(|error| {
        problems.push(format!("the containers that run are not known, so they may get other CPUs: {error}"));
        Vec::new()
    })
}

fn write(to: &CheckpointFile, text: &str) {
    if let Err(error) = to.write(text) {
        log::warn!("cannot write {}: {error}", to.path().display());
    }
}

/// The CPUs of containers whose pods are not known yet. One that runs without reserved CPUs has them
/// for itself: the shared CPUs include the reserved ones. With `strict-cpu-reservation` they do not:
/// there a container shares CPUs if another pod runs on the same.
///
/// Admission corrects what is wrong ([`AssignmentState::recover`]).
fn infer_state(policy: &StaticPolicy, found: &[ObservedContainer]) -> State {
    let (mut pods, mut observed) = (BTreeMap::<PodUid, PodCpus>::new(), Observed::new());
    for container in found {
        let Some(cpus) = container.cpus.as_ref().filter(|cpus| !cpus.is_empty() && **cpus != policy.usable())
        else {
            continue;
        };
        let is_shared = !cpus.is_disjoint(policy.reserved())
            || found.iter().any(|other| other.pod != container.pod && other.cpus.as_ref() == Some(cpus));
        if is_shared {
            continue;
        }
        let pod = pods.entry(container.pod.clone());
        let pod = pod.or_insert_with(|| PodCpus {
            uid: container.pod.clone(),
            containers: Vec::new(),
            whole: None,
        });
        pod.containers.push(ContainerCpus {
            name: container.name.clone(),
            kind: Kind::App,
            exclusive: cpus.len(),
        });
        observed.entry(container.pod.clone()).or_default().insert(container.name.clone(), cpus.clone());
    }
    let pods: Vec<PodCpus> = pods.into_values().collect();
    rebuild(policy, &pods, &observed).state
}
