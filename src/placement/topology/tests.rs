use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::model::api::Container;
use crate::model::pod::Pod;
use crate::placement::numa::{Hint, NumaMask};
use crate::placement::numa_nodes::NumaNode;
use proptest::prelude::*;
use serde_json::json;

fn nodes(count: u32) -> Vec<NumaNode> {
    let distance = |from: u32, to: u32| match from.abs_diff(to) {
        0 => 10,
        1 if from / 2 == to / 2 => 11,
        _ => 20,
    };
    let distances = |from| Some((0..count).map(|to| distance(from, to)).collect());
    (0..count)
        .map(|number| NumaNode { number, distances: distances(number), ..NumaNode::default() })
        .collect()
}

fn all(count: u32) -> NumaMask {
    NumaMask::from_numbers(0..count)
}

fn hint(nodes: &[u32], preferred: bool) -> Hint {
    Hint { nodes: Some(NumaMask::from_numbers(nodes.iter().copied())), preferred }
}

const ANY: Hint = Hint { nodes: None, preferred: true };
const NONE: Hint = Hint { nodes: None, preferred: false };

fn check(policy: Policy, count: u32, lists: &[&[Hint]], expected: Hint) {
    assert_eq!(merge(policy, lists, all(count), None), expected, "{policy:?} {lists:?}");
}

#[test]
fn preferred_hints_that_all_resources_share_win() {
    use Policy::{BestEffort, Restricted, SingleNumaNode};
    let wide = hint(&[0, 1], false);
    for policy in [BestEffort, Restricted, SingleNumaNode] {
        let both = [hint(&[0], true), hint(&[1], true), wide];
        check(policy, 2, &[&both, &[hint(&[1], true), wide]], hint(&[1], true));
        check(policy, 2, &[&both, &[ANY]], hint(&[0], true));
        check(policy, 2, &[&both, &both], hint(&[0], true));
    }
    // Without a resource that matters, all nodes are preferred.
    check(BestEffort, 2, &[], hint(&[0, 1], true));
    check(BestEffort, 2, &[&[ANY]], hint(&[0, 1], true));
    check(SingleNumaNode, 2, &[&[ANY]], ANY);
    check(SingleNumaNode, 1, &[&[hint(&[0], true)]], ANY);
    // Preferred sets that differ are no preferred combination.
    check(BestEffort, 4, &[&[hint(&[0, 1], true)], &[hint(&[1, 2], true)]], hint(&[1], false));
    check(SingleNumaNode, 2, &[&[hint(&[0], true)], &[hint(&[1], true)]], NONE);
    check(SingleNumaNode, 2, &[&[hint(&[0, 1], true)]], NONE);
}

#[test]
fn other_combinations_are_ranked_by_the_nodes_that_are_needed() {
    let check = |lists: &[&[Hint]], expected| check(Policy::BestEffort, 4, lists, expected);
    // A resource that nothing can provide.
    check(&[&[]], hint(&[0, 1, 2, 3], false));
    check(&[&[hint(&[2], true)], &[]], hint(&[2], false));
    // Two nodes are needed by the second resource.
    let wide = [hint(&[0, 1], false), hint(&[2, 3], false)];
    check(&[&[hint(&[0, 2, 3], false), hint(&[0], false)], &wide], hint(&[2, 3], false));
    // Nothing in common.
    check(&[&[hint(&[0], true)], &[hint(&[1], true)]], hint(&[0, 1, 2, 3], false));
}

#[test]
fn the_closest_nodes_win_if_distances_count() {
    let machine = nodes(4);
    let options = BTreeMap::from([("prefer-closest-numa-nodes".to_owned(), "true".to_owned())]);
    let topology = TopologyManager::new(Policy::BestEffort, Scope::Container, &options, &machine).unwrap();
    let list = [hint(&[0, 2], true), hint(&[2, 3], true), hint(&[0, 1, 2], true)];
    let merged = |distances| merge(Policy::BestEffort, &[&list], all(4), distances);
    assert_eq!(merged(topology.distances.as_ref()), hint(&[2, 3], true));
    assert_eq!(merged(None), hint(&[0, 2], true));
    let mut unknown = nodes(2);
    unknown[1].distances = None;
    let error = TopologyManager::new(Policy::BestEffort, Scope::Pod, &options, &unknown).unwrap_err();
    assert_eq!(error, TopologyError::NoDistances { node: 1 });
    assert!(TopologyManager::new(Policy::None, Scope::Pod, &options, &unknown).is_ok());
}

#[test]
fn machines_and_options_that_upstream_refuses_are_refused() {
    let new = |count, name: &str, value: &str| {
        let options: BTreeMap<String, String> = [(name, value)]
            .into_iter()
            .filter(|_| !name.is_empty())
            .map(|(a, b)| (a.into(), b.into()))
            .collect();
        TopologyManager::new(Policy::Restricted, Scope::Container, &options, &nodes(count))
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    let most = "max-allowable-numa-nodes";
    assert_eq!(new(8, "", ""), Ok(()));
    assert_eq!(new(9, most, "9"), Ok(()));
    assert_eq!(new(9, "", "").unwrap_err(), "unsupported on machines with more than 8 NUMA Nodes");
    assert_eq!(
        new(1, most, "7").unwrap_err(),
        "the minimum value of \"max-allowable-numa-nodes\" should not be less than 8"
    );
    assert!(new(1, most, "x").unwrap_err().starts_with("unable to convert policy option to integer"));
    assert!(new(1, "prefer-closest-numa-nodes", "yes").unwrap_err().starts_with("bad value for option"));
    assert_eq!(new(1, "x", "true").unwrap_err(), "unknown Topology Manager Policy option: \"x\"");
}

#[test]
fn many_resources_with_all_hints_are_merged_at_once() {
    // Upstream would try 255³⁰ combinations.
    let list: Vec<Hint> =
        (1_u64..256).map(|mask| Hint { nodes: Some(NumaMask(mask)), preferred: false }).collect();
    let lists: Vec<&[Hint]> = (0..30).map(|_| list.as_slice()).collect();
    check(Policy::BestEffort, 8, &lists, hint(&[0], false));
    // On larger machines combinations that are not preferred are not compared.
    check(Policy::BestEffort, 13, &lists, NONE);
    let preferred = [hint(&[12], true), hint(&[11], true), hint(&[1], false)];
    check(Policy::BestEffort, 13, &[&preferred, &[ANY]], hint(&[11], true));
}

/// All combinations, one by one, in the order of the rules of upstream's documentation.
fn tried(lists: &[Vec<Hint>], count: u32) -> Hint {
    let full = all(count);
    let needed = |list: &Vec<Hint>| list.iter().filter_map(|hint| hint.nodes).map(NumaMask::len).min();
    let wanted = lists.iter().filter_map(needed).max().unwrap_or(0);
    let mut combinations = vec![(full, BTreeSet::new(), true)];
    for list in lists {
        let mut next = Vec::new();
        for (nodes, sets, preferred) in &combinations {
            for hint in list {
                let mut sets: BTreeSet<NumaMask> = sets.clone();
                sets.extend(hint.nodes);
                next.push((nodes.and(hint.nodes.unwrap_or(full)), sets, *preferred && hint.preferred));
            }
        }
        combinations = next;
    }
    let key = |nodes: NumaMask, preferred: bool| {
        let rank = match nodes.len() {
            _ if preferred => 0,
            size if size == wanted => 1,
            size if size < wanted => 2 + wanted - size,
            _ => 100,
        };
        (rank, nodes.len(), nodes)
    };
    let usable = combinations.into_iter().filter(|(nodes, ..)| !nodes.is_empty());
    let ranked = usable.map(|(nodes, sets, preferred)| key(nodes, preferred && sets.len() <= 1));
    ranked.min().map_or(Hint { nodes: Some(full), preferred: false }, |(rank, _, nodes)| Hint {
        nodes: Some(nodes),
        preferred: rank == 0,
    })
}

proptest! {
    #[test]
    fn merging_equals_trying_all_combinations(
        count in 1_u32..6,
        lists in prop::collection::vec(
            prop::collection::vec((prop::option::weighted(0.9, 0_u64..32), any::<bool>()), 1..5),
            0..4,
        ),
    ) {
        let hint = |(nodes, preferred): (Option<u64>, bool)| Hint { nodes: nodes.map(NumaMask), preferred };
        let lists: Vec<Vec<Hint>> =
            lists.into_iter().map(|list| list.into_iter().map(hint).collect()).collect();
        let slices: Vec<&[Hint]> = lists.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(merge(Policy::BestEffort, &slices, all(count), None), tried(&lists, count));
    }

    #[test]
    fn no_hints_cause_a_panic(
        masks in prop::collection::vec(any::<u64>(), 0..20),
        all: u64,
        policy in 0_usize..4,
    ) {
        let hints: Vec<Hint> = masks
            .iter()
            .map(|mask| Hint { nodes: Some(NumaMask(*mask)), preferred: mask & 1 == 0 })
            .collect();
        let policies = [Policy::None, Policy::BestEffort, Policy::Restricted, Policy::SingleNumaNode];
        let _ = merge(policies[policy], &[&hints, &hints], NumaMask(all), None);
    }
}

/// Gives the same hints to each container, and notes the allocations.
#[derive(Default)]
struct FakeProvider {
    hints: Hints,
    fails: Option<(&'static str, AllocateError)>,
    allocated: Vec<(String, Hint)>,
}

impl Provider for FakeProvider {
    fn hints(&self, _: Candidate<'_>, _: &Container) -> Hints {
        self.hints.clone()
    }

    fn pod_hints(&self, _: Candidate<'_>) -> Hints {
        self.hints.clone()
    }

    fn allocate(&mut self, _: Candidate<'_>, container: &Container, hint: Hint) -> Result<(), AllocateError> {
        self.allocated.push((container.name.clone(), hint));
        match &self.fails {
            Some((name, error)) if *name == container.name => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

fn admit(policy: Policy, scope: Scope, first: &mut FakeProvider, second: &mut FakeProvider) -> Outcome {
    let spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap());
    let topology = TopologyManager::new(policy, scope, &BTreeMap::new(), &nodes(2)).unwrap();
    topology.admit(&pod, &mut [first, second])
}

#[test]
fn each_container_is_allocated_by_each_provider_with_the_merged_hint() {
    let mut first = FakeProvider {
        hints: Hints::from([("cpu".into(), vec![hint(&[1], true)])]),
        ..FakeProvider::default()
    };
    let mut second = FakeProvider::default();
    for (policy, scope, nodes, aligned) in [
        (Policy::None, Scope::Pod, NONE, 0),
        (Policy::BestEffort, Scope::Container, hint(&[1], true), 0),
        (Policy::Restricted, Scope::Pod, hint(&[1], true), 0),
        (Policy::SingleNumaNode, Scope::Container, hint(&[1], true), 3),
        (Policy::SingleNumaNode, Scope::Pod, hint(&[1], true), 1),
    ] {
        let outcome = admit(policy, scope, &mut first, &mut second);
        assert_eq!(outcome, Outcome { denial: None, aligned, unaligned: 0 });
        let expected = ["i", "a", "b"].map(|name| (name.to_owned(), nodes));
        assert_eq!(std::mem::take(&mut first.allocated), expected);
        assert_eq!(std::mem::take(&mut second.allocated), expected);
    }
}

#[test]
fn pod_with_resources_as_a_whole_is_allocated_once_with_scope_pod_and_the_gate() {
    #[derive(Default)]
    struct WholePods(FakeProvider, Vec<Hint>);
    impl Provider for WholePods {
        fn hints(&self, pod: Candidate<'_>, container: &Container) -> Hints {
            self.0.hints(pod, container)
        }

        fn pod_hints(&self, pod: Candidate<'_>) -> Hints {
            self.0.pod_hints(pod)
        }

        fn allocate(&mut self, pod: Candidate<'_>, own: &Container, hint: Hint) -> Result<(), AllocateError> {
            self.0.allocate(pod, own, hint)
        }

        fn allocate_pod(&mut self, pod: Candidate<'_>, hint: Hint) -> Result<(), AllocateError> {
            assert!(pod.as_whole && pod.exclusive);
            self.1.push(hint);
            Ok(())
        }
    }
    let amounts = json!({"cpu": "2", "memory": "1Gi"});
    let whole = json!({"limits": amounts, "requests": amounts});
    let spec = json!({"resources": whole, "containers": [{"name": "a"}, {"name": "b"}]});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(json!({"spec": spec})).unwrap());
    let admit = |policy, scope, gate, list: Vec<Hint>| {
        let topology = TopologyManager::new(policy, scope, &BTreeMap::new(), &nodes(2)).unwrap();
        let mut provider = WholePods::default();
        provider.0.hints = Hints::from([("cpu".into(), list)]);
        let mut devices = FakeProvider::default();
        let outcome = topology.with_pod_level(gate).admit(&pod, &mut [&mut devices, &mut provider]);
        (outcome, provider.1, provider.0.allocated.len(), devices.allocated)
    };
    let near = hint(&[1], true);
    let (outcome, whole, each, devices) = admit(Policy::SingleNumaNode, Scope::Pod, true, vec![near]);
    assert_eq!(outcome, Outcome { denial: None, aligned: 1, unaligned: 0 });
    assert_eq!((whole, each), (vec![near], 0));
    // Other resources are still those of containers.
    assert_eq!(devices, ["a", "b"].map(|name| (name.to_owned(), near)));
    for (policy, scope, gate) in [
        (Policy::SingleNumaNode, Scope::Pod, false),
        (Policy::SingleNumaNode, Scope::Container, true),
        (Policy::None, Scope::Pod, true),
    ] {
        let (_, whole, each, _) = admit(policy, scope, gate, vec![near]);
        assert_eq!((whole.len(), each), (0, 2), "{policy:?} {scope:?} {gate}");
    }
    for (scope, gate, message) in [
        (
            Scope::Pod,
            true,
            "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager",
        ),
        (
            Scope::Container,
            true,
            "Pod Scope pod with pod-level resources failed admission with a container-level topology manager",
        ),
        (Scope::Pod, false, "Resources cannot be allocated with Topology locality"),
    ] {
        let denial = admit(Policy::Restricted, scope, gate, Vec::new()).0.denial.unwrap();
        assert_eq!((denial.reason, denial.message.as_str()), ("TopologyAffinityError", message));
    }
}

#[test]
fn denials_have_upstreams_reasons_and_messages() {
    let denial = |outcome: &Outcome| {
        outcome.denial.clone().map(|denial| (denial.reason, denial.message)).unwrap_or_default()
    };
    let locality =
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality".to_owned());
    let mut first =
        FakeProvider { hints: Hints::from([("cpu".into(), Vec::new())]), ..FakeProvider::default() };
    let mut second = FakeProvider::default();
    for (policy, unaligned) in [(Policy::Restricted, 0), (Policy::SingleNumaNode, 1)] {
        for scope in [Scope::Container, Scope::Pod] {
            let outcome = admit(policy, scope, &mut first, &mut second);
            assert_eq!(denial(&outcome), locality);
            assert_eq!((outcome.aligned, outcome.unaligned), (0, unaligned));
            assert!(first.allocated.is_empty());
        }
    }
    assert_eq!(admit(Policy::BestEffort, Scope::Pod, &mut first, &mut second).denial, None);
    first = FakeProvider {
        fails: Some(("a", AllocateError::Unexpected("no room".into()))),
        ..FakeProvider::default()
    };
    let outcome = admit(Policy::None, Scope::Container, &mut first, &mut second);
    let message = "Allocate failed due to no room, which is unexpected".to_owned();
    assert_eq!(denial(&outcome), ("UnexpectedAdmissionError", message));
    assert_eq!(first.allocated.len(), 2);
    let own = AllocateError::Denied { reason: "SMTAlignmentError", message: "SMT".into() };
    first = FakeProvider { fails: Some(("i", own)), ..FakeProvider::default() };
    let outcome = admit(Policy::Restricted, Scope::Pod, &mut first, &mut second);
    assert_eq!(denial(&outcome), ("SMTAlignmentError", "SMT".to_owned()));
}
