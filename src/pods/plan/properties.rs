//! What holds for every plan, tried on many random pods that live through random events.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::tests::{instance, pod, sandbox, short};
use super::*;
use crate::model::pod::is_sidecar;
use crate::model::runtime::SandboxState;

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
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

fn random_spec(dice: &mut Dice) -> Value {
    let policies = ["Always", "OnFailure", "Never"];
    let init: Vec<Value> = (0..dice.below(4))
        .map(|number| {
            let mut container = json!({"name": format!("i{number}")});
            if dice.one_in(2) {
                container["restartPolicy"] = json!("Always");
                if dice.one_in(2) {
                    container["startupProbe"] = json!({"exec": {"command": ["true"]}});
                }
            }
            container
        })
        .collect();
    let regular: Vec<Value> = (0..1 + dice.below(3))
        .map(|number| {
            let mut container = json!({"name": format!("c{number}")});
            if dice.one_in(3) {
                container["restartPolicy"] = json!(dice.pick(&policies));
                let action = dice.pick(&["Restart", "RestartAllContainers"]);
                container["restartPolicyRules"] =
                    json!([{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]);
            }
            container
        })
        .collect();
    let ephemeral: Vec<Value> =
        (0..dice.below(2)).map(|number| json!({"name": format!("e{number}")})).collect();
    json!({"restartPolicy": dice.pick(&policies), "initContainers": init, "containers": regular,
        "ephemeralContainers": ephemeral})
}

/// A runtime that does what plans say.
struct World {
    pod: Pod,
    runtime: PodRuntime,
    made: u32,
}

impl World {
    fn new(spec: Value) -> Self {
        World { pod: pod(spec), runtime: PodRuntime::default(), made: 0 }
    }

    fn plan(&self) -> Plan {
        let startup = |_: &ContainerId| Verdict::Success;
        let inputs = Inputs {
            pod: &self.pod,
            runtime: &self.runtime,
            liveness: &|_| Verdict::Success,
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

    /// Carries a plan out. Answers whether the pod goes on.
    fn apply(&mut self, plan: &Plan) -> bool {
        for reset in &plan.reset {
            self.runtime.containers.retain(|one| one.id != reset.id);
        }
        let killed: BTreeSet<ContainerId> = if plan.kill_pod {
            self.runtime.running().map(|one| one.id.clone()).collect()
        } else {
            plan.kill.iter().map(|kill| kill.id.clone()).collect()
        };
        for one in self.runtime.containers.iter_mut().filter(|one| killed.contains(&one.id)) {
            one.state = ContainerState::Exited;
            one.exit_code = 137;
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
            let mut one = instance(&format!("{name}=Running"));
            one.id = format!("{name}-{}", self.made).as_str().into();
            one.sandbox_id = self.runtime.sandboxes[0].id.clone();
            self.runtime.containers.insert(0, one);
        }
        true
    }

    /// Nothing runs twice, and nothing runs before its time.
    fn check_start(&self, name: &str) {
        assert!(self.runtime.running().all(|one| one.name != name), "{name} would run twice");
        let here = &self.runtime.sandboxes[0].id;
        let instances = |name: &str| {
            let of = |one: &&ContainerStatus| one.name == name && one.sandbox_id == *here;
            self.runtime.containers.iter().filter(of).collect::<Vec<_>>()
        };
        let is_regular = |name: &str| self.pod.containers().iter().any(|one| one.name == name);
        let init = self.pod.init_containers();
        // Once a regular container was made, the init containers have done their work.
        let initialized = self.pod.containers().iter().any(|one| !instances(&one.name).is_empty());
        let earlier = match init.iter().position(|one| one.name == name) {
            Some(at) => at,
            None if is_regular(name) => init.len(),
            None => 0,
        };
        for container in init.iter().take(earlier).filter(|_| !initialized) {
            let fine = if is_sidecar(container) {
                // It has started; that it may have died since holds nobody up.
                !instances(&container.name).is_empty()
            } else {
                let done = |one: &&ContainerStatus| one.state == ContainerState::Exited && one.exit_code == 0;
                instances(&container.name).iter().any(done)
            };
            assert!(fine, "{name} starts before {}", container.name);
        }
    }

    fn event(&mut self, dice: &mut Dice) {
        if dice.one_in(12) && !self.runtime.sandboxes.is_empty() {
            self.runtime.sandboxes[0].state = SandboxState::NotReady;
            for one in &mut self.runtime.containers {
                if one.state == ContainerState::Running {
                    (one.state, one.exit_code) = (ContainerState::Exited, 137);
                }
            }
            return;
        }
        let code = [0, 0, 0, 1, 42, 137][usize::try_from(dice.below(6)).unwrap()];
        let running: Vec<ContainerId> = self.runtime.running().map(|one| one.id.clone()).collect();
        if running.is_empty() {
            return;
        }
        let chosen = &running[usize::try_from(dice.below(running.len() as u64)).unwrap()];
        for one in self.runtime.containers.iter_mut().filter(|one| one.id == *chosen) {
            (one.state, one.exit_code) = (ContainerState::Exited, code);
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
                self.pod.init_containers().iter().any(|one| one.name == name && !is_sidecar(one))
            };
            let Some(at) = self
                .runtime
                .containers
                .iter()
                .position(|one| one.state == ContainerState::Running && waits(&one.name))
            else {
                return true;
            };
            let one = &mut self.runtime.containers[at];
            (one.state, one.exit_code) = (ContainerState::Exited, 0);
        }
        panic!("the plan never empties: {} {:?}", short(&self.plan()), self.runtime.containers);
    }
}

#[test]
fn pods_that_live_through_anything() {
    let mut dice = Dice(7);
    let mut lived = 0;
    for _ in 0..400 {
        let spec = random_spec(&mut dice);
        let mut world = World::new(spec);
        for _ in 0..30 {
            if dice.one_in(2) {
                world.event(&mut dice);
            } else {
                let plan = world.plan();
                if !world.apply(&plan) {
                    break;
                }
            }
        }
        if world.settle() {
            lived += 1;
            // Settled means as it should be: every container runs, or may stay as it is.
            assert!(world.plan().is_empty());
            for container in world.pod.containers() {
                let newest = world.runtime.newest(&container.name);
                assert!(
                    newest.is_some_and(|one| one.state == ContainerState::Running)
                        || !restart::should_start(&world.pod, container, newest),
                    "{} does not run",
                    container.name
                );
            }
            for sidecar in world.pod.init_containers().iter().filter(|one| is_sidecar(one)) {
                let newest = world.runtime.newest(&sidecar.name);
                assert!(newest.is_some_and(|one| one.state == ContainerState::Running), "{}", sidecar.name);
            }
        }
    }
    assert!(lived > 100, "{lived}");
}

#[test]
fn a_twin_of_anything_is_stopped() {
    let spec = json!({"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
        "containers": [{"name": "c"}], "ephemeralContainers": [{"name": "e"}]});
    for name in ["s", "c", "e"] {
        let mut world = World::new(spec.clone());
        assert!(world.settle());
        let mut twin = instance(&format!("{name}=Running"));
        twin.id = "twin".into();
        world.runtime.containers.push(twin);
        assert_eq!(short(&world.plan()), format!("kill=[{name}:Twin]"));
        assert!(world.settle());
    }
}
