//! The topology manager against the kubelet's.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use coracle::model::api::Container;
use coracle::model::pod::Pod;
use coracle::placement::numa::{Hint, NumaMask};
use coracle::placement::numa_nodes::NumaNode;
use coracle::placement::topology::{
    AllocateError, Candidate, Hints, Policy, Provider, Scope, TopologyManager,
};
use serde_json::{Value, json};

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, pick, rarely};

/// A provider whose answers are given.
struct FixedProvider {
    containers: Vec<Hints>,
    pod: Hints,
    fails: i64,
    chosen: Rc<RefCell<Vec<Value>>>,
}

/// The containers are called by their number.
fn number(container: &Container) -> usize {
    container.name.parse().unwrap()
}

impl Provider for FixedProvider {
    fn hints(&self, _: Candidate<'_>, container: &Container) -> Hints {
        self.containers[number(container)].clone()
    }

    fn pod_hints(&self, _: Candidate<'_>) -> Hints {
        self.pod.clone()
    }

    fn allocate(&mut self, _: Candidate<'_>, container: &Container, hint: Hint) -> Result<(), AllocateError> {
        self.chosen.borrow_mut().push(plain(hint));
        match number(container) as i64 == self.fails {
            true => Err(AllocateError::Unexpected("no room".into())),
            false => Ok(()),
        }
    }
}

pub fn plain(hint: Hint) -> Value {
    let nodes = hint.nodes.map(|nodes| nodes.iter().collect::<Vec<_>>());
    json!({"nodes": nodes, "preferred": hint.preferred})
}

/// NUMA nodes of one machine, with distances. Rarely their numbers have gaps, or distances are
/// missing.
pub fn nodes(random: &mut Random, gaps: bool) -> Vec<NumaNode> {
    let count = pick(random, &[1, 2, 2, 4, 4, 8, 8]);
    let step = if gaps && rarely(random, 4) { 1 + random.below(6) as u32 } else { 1 };
    let missing = rarely(random, 50);
    let levels = 1 + random.below(4);
    let mut nodes = Vec::new();
    for place in 0..count {
        let far = |to| if to == place { 10 } else { 11 + random.below(levels) * 5 };
        let distances = (!missing).then(|| (0..count).map(far).collect());
        nodes.push(NumaNode { number: place * step, distances, ..NumaNode::default() });
    }
    nodes
}

fn hint(random: &mut Random, nodes: &[NumaNode]) -> Hint {
    if rarely(random, 12) {
        return Hint { nodes: None, preferred: !rarely(random, 3) };
    }
    // Few sets, so that lists have some in common.
    let size = if rarely(random, 3) { random.below(nodes.len() as u64 + 1) } else { 1 + random.below(2) };
    let mut mask = NumaMask::default();
    for _ in 0..size {
        let number = if rarely(random, 100) { 63 } else { random.pick(nodes).unwrap().number };
        mask.0 |= 1 << number;
    }
    Hint { nodes: Some(mask), preferred: rarely(random, 2) }
}

/// Hints for both sides; each list has at most six, as Go tries all combinations.
fn hints(random: &mut Random, nodes: &[NumaNode]) -> (Hints, Value) {
    let mut ours = Hints::new();
    let mut theirs = serde_json::Map::new();
    for name in ["cpu", "memory", "hugepages-2Mi"].iter().take(random.below(3) as usize + 1) {
        if rarely(random, 12) {
            theirs.insert((*name).into(), Value::Null);
            continue;
        }
        let count = if rarely(random, 20) { 0 } else { 1 + random.below(6) };
        let list: Vec<Hint> = (0..count).map(|_| hint(random, nodes)).collect();
        theirs.insert((*name).into(), list.iter().map(|hint| plain(*hint)).collect());
        ours.insert((*name).into(), list);
    }
    let none = theirs.is_empty() || rarely(random, 15);
    match none {
        true => (Hints::new(), Value::Null),
        false => (ours, theirs.into()),
    }
}

fn options(random: &mut Random) -> BTreeMap<String, String> {
    let mut options = BTreeMap::new();
    if rarely(random, 2) {
        let value = pick(random, &["true", "true", "true", "1", "T", "false", "yes", ""]);
        options.insert("prefer-closest-numa-nodes".into(), value.into());
    }
    if rarely(random, 6) {
        let value = pick(random, &["8", "+9", "16", "7", "-1", "x", "99999999999999999999"]);
        options.insert("max-allowable-numa-nodes".into(), value.into());
    }
    if rarely(random, 60) {
        options.insert("unknown".into(), "true".into());
    }
    options
}

#[test]
fn admissions_equal_those_of_the_topology_manager() {
    let (mut cases, mut random) = Cases::new("topology manager", 20_000);
    let mut peer = Peer::managers();
    while cases.next() {
        let random = &mut random;
        let policy = pick(random, &["none", "best-effort", "best-effort", "restricted", "single-numa-node"]);
        let scope = pick(random, &["container", "pod"]);
        let options = options(random);
        let nodes = nodes(random, options.is_empty());
        let containers = 1 + random.below(3) as usize;
        let chosen = Rc::new(RefCell::new(Vec::new()));
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..random.below(3) {
            let container_hints: Vec<(Hints, Value)> =
                (0..containers).map(|_| hints(random, &nodes)).collect();
            let (container_hints, container_values): (Vec<Hints>, Vec<Value>) =
                container_hints.into_iter().unzip();
            let (pod, pod_value) = hints(random, &nodes);
            let fails = if rarely(random, 10) { random.below(containers as u64) as i64 } else { -1 };
            theirs.push(json!({"containers": container_values, "pod": pod_value, "fails": fails}));
            ours.push(FixedProvider { containers: container_hints, pod, fails, chosen: chosen.clone() });
        }
        let list: Vec<Value> =
            nodes.iter().map(|node| json!({"id": node.number, "distances": node.distances})).collect();
        let question = json!({
            "ask": "topology", "policy": policy, "scope": scope, "options": options, "nodes": list,
            "containers": containers, "providers": theirs,
        });
        let response = peer.ask(&question);
        let error = response["error"].as_str().unwrap();
        let topology = TopologyManager::new(
            Policy::parse(policy).unwrap(),
            Scope::parse(scope).unwrap(),
            &options,
            &nodes,
        );
        let topology = match topology {
            Err(_) if !error.is_empty() => {
                cases.count("start refused by both");
                continue;
            }
            Ok(topology) if error.is_empty() => topology,
            other => {
                cases.differs(&format!("{question}: {other:?}, in Go {error:?}"));
                continue;
            }
        };
        let names: Vec<Value> =
            (0..containers).map(|number| json!({"name": format!("{number:02}")})).collect();
        let pod = json!({"metadata": {"uid": "pod"}, "spec": {"containers": names}});
        let pod = Pod::from(serde_json::from_value::<coracle::model::api::Pod>(pod).unwrap());
        let mut providers: Vec<&mut dyn Provider> =
            ours.iter_mut().map(|provider| provider as &mut dyn Provider).collect();
        let outcome = topology.admit(&pod, &mut providers);
        let (reason, message) =
            outcome.denial.as_ref().map_or(("", ""), |denial| (denial.reason, denial.message.as_str()));
        let chosen = Value::from(chosen.take());
        let found = json!([outcome.denial.is_none(), reason, message, chosen]);
        let their_chosen = if response["chosen"].is_null() { json!([]) } else { response["chosen"].clone() };
        let expected = json!([response["admit"], response["reason"], response["message"], their_chosen]);
        if found == expected {
            let preferred = chosen.as_array().unwrap().iter().all(|hint| hint["preferred"] == true);
            cases.count(match (outcome.denial.is_none(), preferred) {
                (false, _) => "denied by both",
                (true, true) => "admitted alike",
                (true, false) => "admitted alike, not preferred",
            });
        } else {
            cases.differs(&format!("{question}: {found}, in Go {expected}"));
        }
    }
    cases.end("admitted alike", 5);
}
