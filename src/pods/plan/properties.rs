//! Properties of every plan, tested with random pods and random events.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::tests::{instance, pod, ready, render, sandbox};
use super::*;
use crate::model::pod::is_sidecar;
use crate::model::runtime::SandboxState;

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == 0
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[usize::try_from(self.below(from.len() as u64)).unwrap()]
    }
}

fn random_spec(random: &mut Random) -> Value {
    let policies = ["Always", "OnFailure", "Never"];
    let init: Vec<Value> = (0..random.below(4))
        .map(|number| {
            let mut container = json!({"name": format!("i{number}")});
            if random.one_in(2) {
                container["restartPolicy"] = json!("Always");
                if random.one_in(2) {
                    container["startupProbe"] = json!({"exec": {"command": ["true"]}});
                }
            }
            container
        })
        .collect();
    let regular: Vec<Value> = (0..1 + random.below(3))
        .map(|number| {
            let mut container = json!({"name": format!("c{number}")});
            if random.one_in(3) {
                container["restartPolicy"] = json!(random.pick(&policies));
                let action = random.pick(&["Restart", "RestartAllContainers"]);
                container["restartPolicyRules"] =
                    json!([{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]);
            }
            container
        })
        .collect();
    let ephemeral: Vec<Value> =
        (0..random.below(2)).map(|number| json!({"name": format!("e{number}")})).collect();
    json!({"restartPolicy": random.pick(&policies), "initContainers": init, "containers": regular,
        "ephemeralContainers": ephemeral})
}

/// A runtime that carries out plans.
struct Fixture {
    pod: Pod,
    runtime: PodRuntime,
    made: u32,
}

impl Fixture {
    fn new(spec: Value) -> Self {
        Fixture { pod: pod(spec), runtime: PodRuntime::default(), made: 0 }
    }

    fn plan(&self) -> Plan {
        let startup = |_: &ContainerId| ProbeVerdict::Success;
        let inputs = Inputs {
            pod: &self.pod,
            runtime: &self.runtime,
            liveness: &|_| ProbeVerdict::Success,
            startup: &startup,
            reset_held: false,
        };
        let plan = compute(&inputs);
        assert_eq!(plan, compute(&inputs), "same inputs, same plan");
        for (list, count) in [
            (&plan.start_init, self.pod.init_containers().len()),
            (&plan.start, self.pod.containers().len()),
            (&plan.start_ephemeral, self.pod.spec().ephemeral_containers.as_ref().map_or(0, Vec::len)),
        ] {
            assert!(list.is_sorted_by(|a, b| a < b) && list.iter().all(|index| *index < count), "{plan:?}");
        }
        if plan.kill_pod && !plan.create_sandbox {
            assert!(plan.start.is_empty() && plan.start_init.is_empty() && plan.start_ephemeral.is_empty());
        }
        plan
    }

    /// Carries a plan out. Returns whether the pod continues.
    fn apply(&mut self, plan: &Plan) -> bool {
        for reset in &plan.reset {
            self.runtime.containers.retain(|container| container.id != reset.id);
        }
        let killed: BTreeSet<ContainerId> = if plan.kill_pod {
            self.runtime.running().map(|container| container.id.clone()).collect()
        } else {
            plan.kill.iter().map(|kill| kill.id.clone()).collect()
        };
        for container in self.runtime.containers.iter_mut().filter(|container| killed.contains(&container.id))
        {
            container.state = ContainerState::Exited;
            container.exit_code = 137;
        }
        if plan.kill_pod {
            for old in &mut self.runtime.sandboxes {
                old.state = SandboxState::NotReady;
            }
            if !plan.create_sandbox {
                return false;
            }
            self.runtime.sandboxes.insert(0, sandbox(plan.attempt, SandboxState::Ready));
        }
        let ephemeral = self.pod.spec().ephemeral_containers.clone().unwrap_or_default();
        let ephemeral = plan.start_ephemeral.iter().map(|index| ephemeral[*index].name.clone());
        let init = plan.start_init.iter().map(|index| self.pod.init_containers()[*index].name.clone());
        let regular = plan.start.iter().map(|index| self.pod.containers()[*index].name.clone());
        let names: Vec<String> = ephemeral.chain(init).chain(regular).collect();
        for name in names {
            self.check_start(&name);
            self.made += 1;
            let mut container = instance(&format!("{name}=Running"));
            container.id = format!("{name}-{}", self.made).as_str().into();
            container.sandbox_id = self.runtime.sandboxes[0].id.clone();
            self.runtime.containers.insert(0, container);
        }
        true
    }

    /// No container runs twice, and none starts too early.
    fn check_start(&self, name: &str) {
        assert!(self.runtime.running().all(|container| container.name != name), "{name} would run twice");
        let newest_sandbox = &self.runtime.sandboxes[0].id;
        let instances = |name: &str| {
            let is_current = |container: &&ContainerStatus| {
                container.name == name && container.sandbox_id == *newest_sandbox
            };
            self.runtime.containers.iter().filter(is_current).collect::<Vec<_>>()
        };
        let is_regular = |name: &str| self.pod.containers().iter().any(|container| container.name == name);
        let init = self.pod.init_containers();
        // When a regular container was made, the initialization is complete.
        let initialized =
            self.pod.containers().iter().any(|container| !instances(&container.name).is_empty());
        let earlier = match init.iter().position(|container| container.name == name) {
            Some(index) => index,
            None if is_regular(name) => init.len(),
            None => 0,
        };
        for container in init.iter().take(earlier).filter(|_| !initialized) {
            let may_start = if is_sidecar(container) {
                // The sidecar has started; later containers do not wait even if it has ended since.
                !instances(&container.name).is_empty()
            } else {
                let done = |container: &&ContainerStatus| {
                    container.state == ContainerState::Exited && container.exit_code == 0
                };
                instances(&container.name).iter().any(done)
            };
            assert!(may_start, "{name} starts before {}", container.name);
        }
    }

    fn event(&mut self, random: &mut Random) {
        if random.one_in(12) && !self.runtime.sandboxes.is_empty() {
            self.runtime.sandboxes[0].state = SandboxState::NotReady;
            for container in &mut self.runtime.containers {
                if container.state == ContainerState::Running {
                    (container.state, container.exit_code) = (ContainerState::Exited, 137);
                }
            }
            return;
        }
        let code = [0, 0, 0, 1, 42, 137][usize::try_from(random.below(6)).unwrap()];
        let running: Vec<ContainerId> =
            self.runtime.running().map(|container| container.id.clone()).collect();
        if running.is_empty() {
            return;
        }
        let chosen = &running[usize::try_from(random.below(running.len() as u64)).unwrap()];
        for container in self.runtime.containers.iter_mut().filter(|container| container.id == *chosen) {
            (container.state, container.exit_code) = (ContainerState::Exited, code);
        }
    }

    /// Ordinary init containers succeed, until the plan is empty.
    fn settle(&mut self) -> bool {
        for _ in 0..60 {
            let plan = self.plan();
            if !plan.is_empty() {
                if !self.apply(&plan) {
                    return false;
                }
                continue;
            }
            let waits = |name: &str| {
                self.pod
                    .init_containers()
                    .iter()
                    .any(|container| container.name == name && !is_sidecar(container))
            };
            let Some(index) =
                self.runtime.containers.iter().position(|container| {
                    container.state == ContainerState::Running && waits(&container.name)
                })
            else {
                return true;
            };
            let container = &mut self.runtime.containers[index];
            (container.state, container.exit_code) = (ContainerState::Exited, 0);
        }
        panic!("the plan never empties: {:?} {:?}", self.plan(), self.runtime.containers);
    }
}

#[test]
fn plans_reach_the_desired_state_after_random_events() {
    let mut random = Random(7);
    let mut lived = 0;
    for _ in 0..400 {
        let spec = random_spec(&mut random);
        let mut fixture = Fixture::new(spec);
        for _ in 0..30 {
            if random.one_in(2) {
                fixture.event(&mut random);
            } else {
                let plan = fixture.plan();
                if !fixture.apply(&plan) {
                    break;
                }
            }
        }
        if fixture.settle() {
            lived += 1;
            // In the desired state every container runs, or has ended and is not restarted.
            assert!(fixture.plan().is_empty());
            for container in fixture.pod.containers() {
                let newest = fixture.runtime.newest(&container.name);
                assert!(
                    newest.is_some_and(|container| container.state == ContainerState::Running)
                        || !restart::should_start(&fixture.pod, container, newest),
                    "{} does not run",
                    container.name
                );
            }
            for sidecar in fixture.pod.init_containers().iter().filter(|container| is_sidecar(container)) {
                let newest = fixture.runtime.newest(&sidecar.name);
                assert!(
                    newest.is_some_and(|container| container.state == ContainerState::Running),
                    "{}",
                    sidecar.name
                );
            }
        }
    }
    assert!(lived > 100, "{lived}");
}

#[test]
fn older_instance_of_any_container_is_stopped() {
    let spec = json!({"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
        "containers": [{"name": "c"}], "ephemeralContainers": [{"name": "e"}]});
    for name in ["s", "c", "e"] {
        let mut fixture = Fixture::new(spec.clone());
        assert!(fixture.settle());
        let mut twin = instance(&format!("{name}=Running"));
        twin.id = "twin".into();
        fixture.runtime.containers.push(twin);
        assert_eq!(render(&fixture.pod, &fixture.plan()), format!("stop {name} (Twin)"));
        assert!(fixture.settle());
    }
}

/// An init container and its present state.
#[derive(Debug, Clone)]
struct Init {
    sidecar: bool,
    /// The state in the notation of [`instance`]; empty: there is no instance.
    state: &'static str,
    /// The verdict of the startup probe, if there is one.
    startup: Option<ProbeVerdict>,
    /// The verdict of the liveness probe, if there is one.
    liveness: Option<ProbeVerdict>,
}

impl Init {
    /// Whether the container was made in the present sandbox.
    fn is_here(&self) -> bool {
        !self.state.is_empty() && !self.state.contains('@')
    }

    /// Whether a sidecar that was started once has to be stopped, and whether to be started.
    fn demands(&self) -> (bool, bool) {
        let failed = |verdict: Option<ProbeVerdict>| verdict == Some(ProbeVerdict::Failure);
        match self.state {
            "Running" if failed(self.startup) || failed(self.liveness) => (true, true),
            "Running" => (false, false),
            "Running#old" | "Unknown" => (true, true),
            _ => (false, true),
        }
    }
}

fn any_init() -> impl Strategy<Value = Init> {
    let states = vec![
        "",
        "Created",
        "Running",
        "Running",
        "Running#old",
        "Exited",
        "Exited",
        "Exited:1",
        "Unknown",
        "Exited@s0",
    ];
    let verdict = || {
        proptest::option::of(select(vec![
            ProbeVerdict::Pending,
            ProbeVerdict::Success,
            ProbeVerdict::Failure,
        ]))
    };
    (any::<bool>(), select(states), verdict(), verdict())
        .prop_map(|(sidecar, state, startup, liveness)| Init { sidecar, state, startup, liveness })
}

fn plan_for(policy: &str, init: &[Init], regular: &str) -> Plan {
    let (mut specs, mut states) = (Vec::new(), Vec::new());
    for (number, container) in init.iter().enumerate() {
        let mut spec = json!({"name": format!("i{number}")});
        if container.sidecar {
            spec["restartPolicy"] = json!("Always");
            for (field, probe) in [("startupProbe", container.startup), ("livenessProbe", container.liveness)]
            {
                if probe.is_some() {
                    spec[field] = json!({"exec": {"command": ["true"]}});
                }
            }
        }
        specs.push(spec);
        if !container.state.is_empty() {
            states.push(format!("i{number}={}", container.state));
        }
    }
    if !regular.is_empty() {
        states.push(format!("c={regular}"));
    }
    let pod = pod(json!({"restartPolicy": policy, "initContainers": specs, "containers": [{"name": "c"}]}));
    let verdict = |id: &ContainerId, probe: fn(&Init) -> Option<ProbeVerdict>| {
        let number = id.as_str().strip_prefix('i').and_then(|number| number.parse::<usize>().ok());
        number.and_then(|number| probe(&init[number])).unwrap_or(ProbeVerdict::NoProbe)
    };
    compute(&Inputs {
        pod: &pod,
        runtime: &ready(&states.join(" ")),
        liveness: &|id| verdict(id, |init| init.liveness),
        startup: &|id| verdict(id, |init| init.startup),
        reset_held: false,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn earlier_sidecars_follow_their_own_state_and_init_containers_run_once(
        policy in select(vec!["Always", "OnFailure", "Never"]),
        init in proptest::collection::vec(any_init(), 1..6),
        regular in select(vec!["", "", "Created", "Running", "Exited", "Exited:1"]),
    ) {
        let plan = plan_for(policy, &init, regular);
        let initialized = !regular.is_empty();
        // Number of init containers that were started: all after the initialization.
        let newest = init.iter().rposition(Init::is_here);
        let begun = if initialized { init.len() } else { newest.map_or(0, |newest| newest + 1) };
        if plan.kill_pod {
            let failed = newest.map(|newest| &init[newest]).is_some_and(|newest| {
                !initialized && !newest.sidecar && matches!(newest.state, "Exited:1" | "Unknown")
            });
            let over = match policy {
                "Never" => failed || regular.starts_with("Exited"),
                "OnFailure" => regular == "Exited",
                _ => false,
            };
            prop_assert!(over, "{plan:?}");
            prop_assert!(plan.start_init.is_empty(), "{plan:?}");
            return Ok(());
        }
        for (index, container) in init.iter().enumerate() {
            let killed = plan.kill.iter().any(|kill| kill.name == format!("i{index}"));
            let starts = plan.start_init.contains(&index);
            let what = format!("i{index}: {plan:?}");
            if container.sidecar && index < begun && (initialized || newest != Some(index)) {
                prop_assert_eq!((killed, starts), container.demands(), "{}", what);
            }
            let is_done = container.state == "Exited" && index < begun;
            if !container.sidecar && (initialized || newest != Some(index) && index < begun) {
                prop_assert!(!killed && !starts, "{}", what);
            }
            if !container.sidecar && (is_done || container.state.starts_with("Running")) {
                prop_assert!(!killed && !starts, "{}", what);
            }
            // Of the containers that were never started, only the next one may start.
            prop_assert!(!starts || index <= begun, "{}", what);
        }
    }
}
