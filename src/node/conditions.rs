//! Conditions of the node and the events of their changes (pure).

use jiff::Timestamp;

use super::compose::NodeStatusInputs;
use crate::model::api::NodeCondition;
use crate::model::event::EventType;
use crate::model::meta::Time;
use crate::model::reasons;

/// Which resources the node is short of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pressures {
    /// Memory.
    pub memory: bool,
    /// Disk space or inodes.
    pub disk: bool,
    /// Process ids.
    pub pid: bool,
}

/// A change of the node that is reported to users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeEvent {
    /// The topic: a later change of the same topic replaces this one.
    pub(super) topic: &'static str,
    pub(super) kind: EventType,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl NodeEvent {
    pub(super) fn new(topic: &'static str, name: &str, reason: &'static str) -> Self {
        let message = format!("Node {name} status is now: {reason}");
        NodeEvent { topic, kind: EventType::Normal, reason, message }
    }
}

/// The texts of one condition when it holds and when it does not: reason, message, event.
struct ConditionTexts {
    topic: &'static str,
    when_true: (&'static str, &'static str, &'static str),
    when_false: (&'static str, &'static str, &'static str),
}

const MEMORY: ConditionTexts = ConditionTexts {
    topic: "MemoryPressure",
    when_true: (
        "KubeletHasInsufficientMemory",
        "kubelet has insufficient memory available",
        reasons::NODE_HAS_INSUFFICIENT_MEMORY,
    ),
    when_false: (
        "KubeletHasSufficientMemory",
        "kubelet has sufficient memory available",
        reasons::NODE_HAS_SUFFICIENT_MEMORY,
    ),
};
const DISK: ConditionTexts = ConditionTexts {
    topic: "DiskPressure",
    when_true: ("KubeletHasDiskPressure", "kubelet has disk pressure", reasons::NODE_HAS_DISK_PRESSURE),
    when_false: (
        "KubeletHasNoDiskPressure",
        "kubelet has no disk pressure",
        reasons::NODE_HAS_NO_DISK_PRESSURE,
    ),
};
const PID: ConditionTexts = ConditionTexts {
    topic: "PIDPressure",
    when_true: (
        "KubeletHasInsufficientPID",
        "kubelet has insufficient PID available",
        reasons::NODE_HAS_INSUFFICIENT_PID,
    ),
    when_false: (
        "KubeletHasSufficientPID",
        "kubelet has sufficient PID available",
        reasons::NODE_HAS_SUFFICIENT_PID,
    ),
};

/// The events of pressures that have begun or ended: reason and message. For a node without an object,
/// whose conditions nothing else compares.
#[must_use]
pub fn pressure_events(old: Pressures, new: Pressures, name: &str) -> Vec<(&'static str, String)> {
    [(MEMORY, old.memory, new.memory), (DISK, old.disk, new.disk), (PID, old.pid, new.pid)]
        .into_iter()
        .filter(|(_, was, is)| was != is)
        .map(|(texts, _, holds)| {
            let event =
                NodeEvent::new(texts.topic, name, if holds { texts.when_true.2 } else { texts.when_false.2 });
            (event.reason, event.message)
        })
        .collect()
}

/// The type of the condition that shows whether the node can run pods.
pub(super) const READY: &str = "Ready";

/// The type of the condition that shows what `--offline` does.
const OFFLINE: &str = "OfflineOperation";

/// Updates our conditions; those of other writers stay. Ready comes last.
pub(super) fn update(
    conditions: &mut Vec<NodeCondition>,
    name: &str,
    facts: &NodeStatusInputs,
    now: Timestamp,
) -> Vec<NodeEvent> {
    let mut events = Vec::new();
    let pressures = facts.pressures;
    for (texts, holds) in [(MEMORY, pressures.memory), (DISK, pressures.disk), (PID, pressures.pid)] {
        let (reason, message, event) = if holds { texts.when_true } else { texts.when_false };
        if set(conditions, texts.topic, holds, reason, message.to_owned(), now) {
            events.push(NodeEvent::new(texts.topic, name, event));
        }
    }
    if let Some(offline) = &facts.offline {
        set(conditions, OFFLINE, offline.holds, offline.reason, offline.message.clone(), now);
    }
    let problems = problems(facts);
    let ready = problems.is_empty();
    let first = !conditions.iter().any(|condition| condition.type_ == READY);
    let warning = warning(&facts.warnings);
    let (reason, message, event) = if ready {
        ("KubeletReady", "kubelet is posting ready status".to_owned(), reasons::NODE_READY)
    } else {
        ("KubeletNotReady", join_problems(&problems), reasons::NODE_NOT_READY)
    };
    let changed = set(conditions, READY, ready, reason, message + &warning, now);
    // A new node is not ready yet; this is not reported.
    if changed && (ready || !first) {
        events.push(NodeEvent::new(READY, name, event));
    }
    events
}

fn warning(warnings: &[String]) -> String {
    if warnings.is_empty() { String::new() } else { format!(". WARNING: {}", warnings.join(", ")) }
}

/// Why the node is not ready, in a fixed order.
fn problems(facts: &NodeStatusInputs) -> Vec<String> {
    let health = &facts.health;
    let runtime = health
        .runtime
        .iter()
        .map(|problem| prefixed(problem, "RuntimeReady=false", "container runtime not ready: "));
    let network = health
        .network
        .iter()
        .map(|problem| prefixed(problem, "NetworkReady=false", "container runtime network not ready: "));
    let missing = facts
        .capacity
        .is_none()
        .then(|| "missing node capacity for resources: cpu, memory, pods, ephemeral-storage".to_owned());
    let mut found: Vec<String> = Vec::new();
    for problem in runtime.chain(network).chain(facts.problems.iter().cloned()).chain(missing) {
        if !found.contains(&problem) {
            found.push(problem);
        }
    }
    found
}

fn prefixed(problem: &str, start: &str, prefix: &str) -> String {
    if problem.starts_with(start) { format!("{prefix}{problem}") } else { problem.to_owned() }
}

fn join_problems(problems: &[String]) -> String {
    match problems {
        [problem] => problem.clone(),
        several => format!("[{}]", several.join(", ")),
    }
}

/// Sets one condition; returns whether its status changed.
fn set(
    conditions: &mut Vec<NodeCondition>,
    kind: &str,
    holds: bool,
    reason: &str,
    message: String,
    now: Timestamp,
) -> bool {
    let status = if holds { "True" } else { "False" };
    let old = conditions.iter_mut().find(|condition| condition.type_ == kind);
    let changed = old.as_ref().is_none_or(|old| old.status != status);
    let since = match &old {
        Some(old) if !changed => old.last_transition_time.clone(),
        _ => None,
    };
    let new = NodeCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(since.unwrap_or(Time(now))),
    };
    match old {
        Some(old) => *old = new,
        None => conditions.push(new),
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::RuntimeHealth;

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn facts(runtime: &[&str], network: Option<&str>) -> NodeStatusInputs {
        NodeStatusInputs {
            capacity: Some(Default::default()),
            health: RuntimeHealth {
                runtime: runtime.iter().map(|problem| (*problem).to_owned()).collect(),
                network: network.map(str::to_owned),
            },
            ..NodeStatusInputs::default()
        }
    }

    fn reasons(events: &[NodeEvent]) -> Vec<&'static str> {
        events.iter().map(|event| event.reason).collect()
    }

    #[test]
    fn offline_condition_is_set_with_the_flag_only_and_stays_while_it_is_not_known() {
        let mut conditions = Vec::new();
        update(&mut conditions, "n", &facts(&[], None), timestamp(1));
        assert!(conditions.iter().all(|condition| condition.type_ != OFFLINE));
        let with = |holds, reason| NodeStatusInputs {
            offline: Some(super::super::compose::OfflineCondition { holds, reason, message: "m".to_owned() }),
            ..facts(&[], None)
        };
        update(&mut conditions, "n", &with(true, "ServerPodsHeld"), timestamp(2));
        update(&mut conditions, "n", &facts(&[], None), timestamp(3));
        let shown = |conditions: &[NodeCondition]| {
            let found = conditions.iter().find(|condition| condition.type_ == OFFLINE).unwrap();
            let since = found.last_transition_time.as_ref().unwrap().0.as_second();
            (found.status.clone(), found.reason.clone().unwrap(), since)
        };
        assert_eq!(shown(&conditions), ("True".to_owned(), "ServerPodsHeld".to_owned(), 2));
        update(&mut conditions, "n", &with(false, "ServerPodsRun"), timestamp(4));
        assert_eq!(shown(&conditions), ("False".to_owned(), "ServerPodsRun".to_owned(), 4));
    }

    #[test]
    fn times_change_with_the_status_only() {
        let foreign = NodeCondition {
            type_: "NetworkUnavailable".to_owned(),
            status: "False".to_owned(),
            ..NodeCondition::default()
        };
        let mut conditions = vec![foreign.clone()];
        let all = ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"];
        let down = facts(&["container runtime is down"], None);
        assert_eq!(reasons(&update(&mut conditions, "n", &down, timestamp(1))), all);
        let kinds: Vec<&str> = conditions.iter().map(|condition| condition.type_.as_str()).collect();
        assert_eq!(kinds, ["NetworkUnavailable", "MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]);
        let well = facts(&[], None);
        let events = update(&mut conditions, "n", &well, timestamp(2));
        assert_eq!(events[0].message, "Node n status is now: NodeReady");
        assert!(update(&mut conditions, "n", &well, timestamp(3)).is_empty());
        let times = |index: usize| {
            let seconds = |time: &Option<Time>| time.as_ref().unwrap().0.as_second();
            (
                seconds(&conditions[index].last_transition_time),
                seconds(&conditions[index].last_heartbeat_time),
            )
        };
        assert_eq!((times(1), times(4)), ((1, 3), (2, 3)));
        assert_eq!(conditions[0], foreign);
        let short = NodeStatusInputs {
            pressures: Pressures { memory: true, disk: true, pid: true },
            ..facts(&[], Some("network state unknown"))
        };
        assert_eq!(
            reasons(&update(&mut conditions, "n", &short, timestamp(4))),
            ["NodeHasInsufficientMemory", "NodeHasDiskPressure", "NodeHasInsufficientPID", "NodeNotReady"]
        );
        assert_eq!(conditions[2].message.as_deref(), Some("kubelet has disk pressure"));
        assert_eq!(conditions[4].message.as_deref(), Some("network state unknown"));
        // A node that is ready from the start is still reported.
        assert!(reasons(&update(&mut Vec::new(), "n", &well, timestamp(1))).contains(&"NodeReady"));
    }

    #[test]
    fn pressure_that_begins_or_ends_has_an_event_without_a_node_object() {
        let none = Pressures::default();
        let some = Pressures { memory: true, pid: true, ..none };
        let begun = pressure_events(none, some, "n");
        let expected = ["NodeHasInsufficientMemory", "NodeHasInsufficientPID"];
        assert_eq!(begun.iter().map(|(reason, _)| *reason).collect::<Vec<_>>(), expected);
        assert_eq!(begun[0].1, "Node n status is now: NodeHasInsufficientMemory");
        let ended = pressure_events(some, Pressures { disk: true, pid: true, ..none }, "n");
        let expected = ["NodeHasSufficientMemory", "NodeHasDiskPressure"];
        assert_eq!(ended.iter().map(|(reason, _)| *reason).collect::<Vec<_>>(), expected);
        assert_eq!(pressure_events(some, some, "n"), []);
    }

    #[test]
    fn reasons_for_not_ready_are_listed() {
        let check = |facts: &NodeStatusInputs, expected: &str| {
            let mut conditions = Vec::new();
            update(&mut conditions, "n", facts, timestamp(1));
            assert_eq!(conditions[3].message.as_deref(), Some(expected));
        };
        check(&facts(&["container runtime is down"], None), "container runtime is down");
        check(
            &facts(
                &["RuntimeReady=false reason:X message:y", "PLEG is not healthy: z"],
                Some("NetworkReady=false reason:N message:cni"),
            ),
            "[container runtime not ready: RuntimeReady=false reason:X message:y, PLEG is not healthy: z, \
             container runtime network not ready: NetworkReady=false reason:N message:cni]",
        );
        let more = NodeStatusInputs {
            problems: vec!["node is shutting down".to_owned(), "a".to_owned()],
            warnings: vec!["w".to_owned()],
            ..facts(&["a"], None)
        };
        check(&more, "[a, node is shutting down]. WARNING: w");
        check(
            &NodeStatusInputs { capacity: None, ..facts(&[], None) },
            "missing node capacity for resources: cpu, memory, pods, ephemeral-storage",
        );
        check(
            &NodeStatusInputs { warnings: vec!["w".to_owned()], ..facts(&[], None) },
            "kubelet is posting ready status. WARNING: w",
        );
    }
}
