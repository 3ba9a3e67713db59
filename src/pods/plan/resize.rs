//! Resources that change while a container runs (Go: pkg/kubelet/allocation and
//! computePodResizeAction in pkg/kubelet/kuberuntime). Pure; the caller stores what containers were
//! given and pods were granted.
//!
//! A changed manifest of a static pod is a new pod, unless it has a UID of its own: then the pod is
//! resized like those of the API server.

use crate::model::api::{Container, ResourceRequirements};
use crate::model::container_memory::{SwapSettings, has_swap};
use crate::model::ids::ContainerId;
use crate::model::pod::{Pod, QosClass, is_sidecar};
use crate::model::quantity::{Amount, amount};
use crate::model::requests::{Amounts, Overhead, pod_requests};
use crate::model::runtime::{ContainerState, PodRuntime};

use super::super::admission::Refusal;
use super::{KillContainer, KillReason, Plan};

/// The resources that can change. Memory comes before CPU everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Resource {
    Memory,
    Cpu,
}

impl Resource {
    /// Both resources, in the order in which they are changed.
    pub const ALL: [Resource; 2] = [Resource::Memory, Resource::Cpu];

    /// The name of the resource in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            Resource::Memory => "memory",
            Resource::Cpu => "cpu",
        }
    }
}

/// The request and limit of a container for one resource. Zero counts as none, as upstream's records
/// have it for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestAndLimit {
    /// The request.
    pub request: Option<Amount>,
    /// The limit.
    pub limit: Option<Amount>,
}

/// The requests and limits of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResizableResources {
    /// Memory.
    pub memory: RequestAndLimit,
    /// CPU.
    pub cpu: RequestAndLimit,
}

impl ResizableResources {
    /// The values that a container of `pod` has in the runtime: its own, and the pod's limits in the
    /// place of missing ones (Go: containerResourcesFromRequirements).
    #[must_use]
    pub fn for_container(pod: &Pod, container: &Container) -> ResizableResources {
        let (own, whole) = (ResizableResources::own(container), ResizableResources::whole(pod));
        let values = |own: RequestAndLimit, whole: RequestAndLimit| RequestAndLimit {
            limit: own.limit.or(whole.limit),
            ..own
        };
        ResizableResources { memory: values(own.memory, whole.memory), cpu: values(own.cpu, whole.cpu) }
    }

    /// The values of a container's specification.
    fn own(container: &Container) -> ResizableResources {
        container.resources.as_ref().map(ResizableResources::from_requirements).unwrap_or_default()
    }

    /// The values of the pod as a whole.
    fn whole(pod: &Pod) -> ResizableResources {
        pod.spec().resources.as_ref().map(ResizableResources::from_requirements).unwrap_or_default()
    }

    /// The values of requests and limits.
    #[must_use]
    pub fn from_requirements(resources: &ResourceRequirements) -> ResizableResources {
        let values = |resource: Resource| {
            let value = |map: &Option<std::collections::BTreeMap<String, crate::model::Quantity>>| {
                map.as_ref()?.get(resource.name()).map(amount).filter(|amount| !amount.is_zero())
            };
            RequestAndLimit { request: value(&resources.requests), limit: value(&resources.limits) }
        };
        ResizableResources { memory: values(Resource::Memory), cpu: values(Resource::Cpu) }
    }

    /// The values of one resource.
    #[must_use]
    pub fn values(&self, resource: Resource) -> RequestAndLimit {
        match resource {
            Resource::Memory => self.memory,
            Resource::Cpu => self.cpu,
        }
    }
}

/// One change of a running container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resize {
    /// The instance to resize.
    pub id: ContainerId,
    /// The container's name in the pod.
    pub name: String,
    /// The resource that changes.
    pub resource: Resource,
}

/// Adds to `plan` the changes that give running containers the resources of their specification.
/// `actuated` returns the last values that the runtime received for a container; a container for which
/// they are unknown is not changed.
pub fn add(
    pod: &Pod,
    runtime: &PodRuntime,
    actuated: &dyn Fn(&str) -> Option<ResizableResources>,
    plan: &mut Plan,
) {
    if plan.kill_pod || plan.create_sandbox || !plan.reset.is_empty() {
        return;
    }
    let mut changes: Vec<(Resource, bool, Resize)> = Vec::new();
    let init = pod.init_containers().iter().enumerate().map(|(index, container)| (true, index, container));
    let regular = pod.containers().iter().enumerate().map(|(index, container)| (false, index, container));
    for (is_init, index, container) in init.chain(regular) {
        let Some(status) = runtime.newest(&container.name) else { continue };
        let stopping = plan.kill.iter().any(|kill| kill.id == status.id);
        if status.state != ContainerState::Running || stopping {
            continue;
        }
        let Some(has) = actuated(&container.name) else { continue };
        let wants = ResizableResources::for_container(pod, container);
        let changed: Vec<Resource> = Resource::ALL
            .into_iter()
            .filter(|resource| has.values(*resource) != wants.values(*resource))
            .collect();
        let may_restart = !is_init || is_sidecar(container);
        if may_restart && changed.iter().any(|resource| needs_restart(container, *resource)) {
            plan.kill.push(KillContainer {
                id: status.id.clone(),
                name: container.name.clone(),
                message: format!("Container {} resize requires restart", container.name),
                reason: KillReason::Resize,
            });
            let starts = if is_init { &mut plan.start_init } else { &mut plan.start };
            starts.push(index);
            starts.sort_unstable();
            starts.dedup();
            continue;
        }
        for resource in changed {
            let change = Resize { id: status.id.clone(), name: container.name.clone(), resource };
            changes.push((resource, grows(has.values(resource), wants.values(resource)), change));
        }
    }
    // Decreases come first: they free room for increases. The sort is stable.
    changes.sort_by_key(|(resource, grows, _)| (*resource, *grows));
    plan.resize = changes.into_iter().map(|(_, _, change)| change).collect();
}

/// Whether any running container has other resources than its specification grants, even if the
/// plan stops it for another reason. Unknown last values count as correct.
pub fn is_due(
    pod: &Pod,
    runtime: &PodRuntime,
    actuated: &dyn Fn(&str) -> Option<ResizableResources>,
) -> bool {
    let differs = |container: &Container| {
        let runs =
            runtime.newest(&container.name).is_some_and(|status| status.state == ContainerState::Running);
        runs && actuated(&container.name)
            .is_some_and(|has| has != ResizableResources::for_container(pod, container))
    };
    pod.init_containers().iter().chain(pod.containers()).any(differs)
}

/// Whether the limit decreases. No limit is higher than any limit.
#[must_use]
pub fn lowers_limit(has: RequestAndLimit, wants: RequestAndLimit) -> bool {
    wants.limit.is_some_and(|wants| has.limit.is_none_or(|has| wants < has))
}

/// Whether the limit grows, or else the request. No limit is higher than any limit.
fn grows(has: RequestAndLimit, wants: RequestAndLimit) -> bool {
    match (has.limit, wants.limit) {
        (has, wants) if has == wants => {}
        (None, Some(_)) => return false,
        (Some(_), None) => return true,
        (has, wants) => return wants > has,
    }
    wants.request > has.request
}

/// Whether the container is to be restarted when this resource changes.
#[must_use]
pub fn needs_restart(container: &Container, resource: Resource) -> bool {
    container
        .resize_policy
        .iter()
        .flatten()
        .any(|policy| policy.resource_name == resource.name() && policy.restart_policy == "RestartContainer")
}

/// The decision about a request for other resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// No resource that can be resized differs.
    Unchanged,
    /// The pod gets what it requests: condition `PodResizeInProgress`, event `ResizeStarted`.
    Granted,
    /// The resize has to wait: condition `PodResizePending`, retried later.
    Deferred(Refusal),
    /// The resize is never possible on this node: condition `PodResizePending`.
    Infeasible {
        /// A message for users.
        message: String,
        /// The label of the metric.
        detail: &'static str,
    },
}

/// The resizes that this node's configuration excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResizeRules {
    /// `cpuManagerPolicy: static`: Guaranteed pods have CPUs of their own.
    pub static_cpu: bool,
    /// `memoryManagerPolicy: Static`: Guaranteed pods have memory of their own.
    pub static_memory: bool,
    /// How containers get swap; `None`: they get none.
    pub swap: Option<SwapSettings>,
    /// The gate `InPlacePodLevelResourcesVerticalScaling` is off.
    pub fixed_pod_level: bool,
}

impl ResizeRules {
    fn forbid(self, granted: &Pod, desired: &Pod) -> Option<Decision> {
        let never = |message: &str, detail| Decision::Infeasible { message: message.to_owned(), detail };
        if self.swap.is_some_and(|settings| changes_swap(granted, desired, &settings)) {
            let message = "In-place resize of containers with swap is not supported.";
            return Some(never(message, "swap_limitation"));
        }
        if self.fixed_pod_level && ResizableResources::whole(granted) != ResizableResources::whole(desired) {
            let message = "InPlacePodLevelResourcesVerticalScaling is disabled";
            return Some(never(message, "plr_feature_gate_off"));
        }
        if desired.qos() != QosClass::Guaranteed {
            return None;
        }
        let changes = |resource: Resource| {
            granted.all_containers().any(|container| {
                let wanted = desired.all_containers().find(|other| other.name == container.name);
                // Requests are limits.
                let request = |spec| ResizableResources::own(spec).values(resource).request;
                wanted.is_some_and(|wanted| request(wanted) != request(container))
            })
        };
        let (manager, policy, detail) = if self.static_cpu && changes(Resource::Cpu) {
            ("CPU", "static", "guaranteed_pod_cpu_manager_static_policy")
        } else if self.static_memory && changes(Resource::Memory) {
            ("Memory", "Static", "guaranteed_pod_memory_manager_static_policy")
        } else {
            return None;
        };
        let message = format!(
            "Resize is infeasible for Guaranteed Pods alongside {manager} Manager policy \"{policy}\""
        );
        Some(never(&message, detail))
    }
}

/// Whether a container with swap requests other memory, and may not be restarted for that: its limit
/// of swap, which depends on the request, cannot change while it runs (Go:
/// disallowResizeForSwappableContainers).
fn changes_swap(granted: &Pod, desired: &Pod, settings: &SwapSettings) -> bool {
    desired.all_containers().any(|wanted| {
        let Some(has) = granted.all_containers().find(|other| other.name == wanted.name) else {
            return false;
        };
        ResizableResources::own(wanted).memory.request != ResizableResources::own(has).memory.request
            && !needs_restart(has, Resource::Memory)
            && (has_swap(desired, wanted, settings) || has_swap(granted, has, settings))
    })
}

/// Whether two versions of a pod request different amounts of resources that can be resized.
#[must_use]
pub fn differs(pod: &Pod, other: &Pod) -> bool {
    ResizableResources::whole(pod) != ResizableResources::whole(other)
        || pod.all_containers().any(|container| {
            let counterpart = other.all_containers().find(|other| other.name == container.name);
            counterpart.is_some_and(|counterpart| {
                ResizableResources::own(counterpart) != ResizableResources::own(container)
            })
        })
}

/// Decides whether `desired` gets other resources than `granted`, the version that was admitted.
/// `fits` is the check of admission whether the node has room for it.
#[must_use]
pub fn decide(
    granted: &Pod,
    desired: &Pod,
    rules: ResizeRules,
    fits: &dyn Fn(&Pod) -> Result<(), Refusal>,
) -> Decision {
    if !differs(granted, desired) {
        return Decision::Unchanged;
    }
    if let Some(forbidden) = rules.forbid(granted, desired) {
        return forbidden;
    }
    match fits(desired) {
        Ok(()) => Decision::Granted,
        Err(refusal) => Decision::Deferred(refusal),
    }
}

/// The rank of a pod that waits for resources; the lowest is retried first: pods that request no more
/// than they have, then higher priority, then Guaranteed pods. Equal pods keep the order in which they
/// began to wait.
#[must_use]
pub fn retry_rank(granted: &Pod, desired: &Pod) -> impl Ord + use<> {
    let priority = i64::from(desired.spec().priority.unwrap_or(0));
    (wants_more(granted, desired), -priority, desired.qos() != QosClass::Guaranteed)
}

fn wants_more(granted: &Pod, desired: &Pod) -> bool {
    let total = |pod| pod_requests(pod, Overhead::Included);
    let (has, wants) = (total(granted), total(desired));
    Resource::ALL.iter().any(|resource| {
        let requested = |map: &Amounts| map.get(resource.name()).copied().unwrap_or_default();
        requested(&wants) > requested(&has)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{pod, ready, render};
    use super::*;
    use crate::util::testing::table;
    use expect_test::expect;
    use serde_json::{Value, json};

    /// `memory request/limit, CPU request/limit`; `-` for none.
    fn resources(text: &str) -> Value {
        let mut parts = text.split([' ', '/']).map(|part| (part != "-").then(|| part.to_owned()));
        let mut next_part = || parts.next().flatten();
        let (memory, memory_limit, cpu, cpu_limit) = (next_part(), next_part(), next_part(), next_part());
        let map = |memory: Option<String>, cpu: Option<String>| {
            let mut map = serde_json::Map::new();
            for (name, value) in [("memory", memory), ("cpu", cpu)] {
                if let Some(value) = value {
                    map.insert(name.to_owned(), json!(value));
                }
            }
            Value::Object(map)
        };
        json!({"requests": map(memory, cpu), "limits": map(memory_limit, cpu_limit)})
    }

    fn given(text: &str) -> ResizableResources {
        ResizableResources::from_requirements(&serde_json::from_value(resources(text)).unwrap())
    }

    fn plan_of(spec: Value, instances: &str, had: &[(&str, &str)]) -> String {
        let (pod, runtime) = (pod(spec), ready(instances));
        let mut plan = super::super::compute(&super::super::Inputs::without_probes(&pod, &runtime));
        let given =
            |name: &str| had.iter().find(|(container, _)| *container == name).map(|(_, text)| given(text));
        add(&pod, &runtime, &given, &mut plan);
        render(&pod, &plan)
    }

    #[test]
    fn running_container_is_resized_in_place_or_restarted_by_policy() {
        let plans = |policy: Value| {
            table(move |case| {
                let (had, wants) = case.split_once(" to ").unwrap();
                let spec = json!({"containers": [
                    {"name": "c", "resources": resources(wants), "resizePolicy": policy}]});
                plan_of(spec, "c=Running", &[("c", had)])
            })
        };
        plans(json!([])).check(expect![[r#"
            1Mi/2Mi 1/2 to 1Mi/2Mi 1/2        -> nothing
            1024Ki/2Mi 1000m/2 to 1Mi/2Mi 1/2 -> nothing
            1Mi/2Mi 1/2 to 1Mi/2Mi 1/3        -> resize c (Cpu)
            1Mi/2Mi 1/2 to 1Mi/2Mi 2/2        -> resize c (Cpu)
            1Mi/2Mi 1/2 to 1Mi/3Mi 1/3        -> resize c (Memory), resize c (Cpu)
            1Mi/2Mi 1/2 to 1Mi/- 1/2          -> resize c (Memory)
        "#]]);
        plans(json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"},
            {"resourceName": "cpu", "restartPolicy": "NotRequired"}]))
        .check(expect![[r#"
            1Mi/2Mi 1/2 to 1Mi/2Mi 1/3 -> resize c (Cpu)
            1Mi/2Mi 1/2 to 1Mi/3Mi 1/3 -> stop c (Resize), start c
            1Mi/2Mi 1/2 to 1Mi/2Mi 1/2 -> nothing
        "#]]);
    }

    #[test]
    fn static_pod_with_a_uid_of_its_own_is_resized() {
        let spec = json!({"containers": [{"name": "c", "resources": resources("1Mi/2Mi 1/2")}]});
        let mut object = pod(spec).into_object();
        let source = crate::model::pod::CONFIG_SOURCE.to_owned();
        object.metadata.annotations = Some([(source, "file".to_owned())].into());
        let (pod, runtime) = (Pod::from(object), ready("c=Running"));
        assert!(pod.is_static());
        let mut plan = super::super::compute(&super::super::Inputs::without_probes(&pod, &runtime));
        let has = |_: &str| Some(given("1Mi/2Mi 1/1"));
        add(&pod, &runtime, &has, &mut plan);
        assert_eq!(render(&pod, &plan), "resize c (Cpu)");
        assert!(is_due(&pod, &runtime, &has));
    }

    #[test]
    fn stopped_replaced_or_unknown_containers_are_not_resized() {
        let spec = json!({"containers": [{"name": "c", "resources": resources("1Mi/2Mi 1/2")}]});
        let had = [("c", "1Mi/2Mi 1/1")];
        assert_eq!(plan_of(spec.clone(), "c=Running", &had), "resize c (Cpu)");
        // The container's last values are unknown, it does not run, or it is replaced anyway.
        assert_eq!(plan_of(spec.clone(), "c=Running", &[]), "nothing");
        assert_eq!(plan_of(spec.clone(), "c=Exited:1", &had), "start c");
        assert_eq!(plan_of(spec, "c=Running#old", &had), "stop c (DefinitionChanged), start c");
    }

    /// A resize is also due if another part of the plan replaces the container.
    #[test]
    fn resize_is_due_while_a_running_container_has_other_resources() {
        let spec = json!({"containers": [{"name": "c", "resources": resources("1Mi/2Mi 1/2")}]});
        let pod = pod(spec);
        let check = |instances: &str, lost: bool, had: Option<&str>, expected: bool| {
            let mut runtime = ready(instances);
            if lost {
                runtime.sandboxes.clear();
            }
            let given = |_: &str| had.map(given);
            assert_eq!(is_due(&pod, &runtime, &given), expected, "{instances} {lost} {had:?}");
            let mut plan = super::super::compute(&super::super::Inputs::without_probes(&pod, &runtime));
            add(&pod, &runtime, &given, &mut plan);
            // If the plan contained the resize, the case would not test the difference.
            assert!(!lost || plan.resize.is_empty());
        };
        check("c=Running", false, Some("1Mi/2Mi 1/1"), true);
        check("c=Running", false, Some("1Mi/2Mi 1/2"), false);
        check("c=Running", true, Some("1Mi/2Mi 1/1"), true);
        check("c=Running#old", false, Some("1Mi/2Mi 1/1"), true);
        check("c=Exited:1", false, Some("1Mi/2Mi 1/1"), false);
        check("c=Running", false, None, false);
    }

    #[test]
    fn decreases_are_applied_first_and_memory_before_cpu() {
        let containers: Vec<Value> = ["3Mi/3Mi 1/1", "1Mi/1Mi 1/1", "2Mi/2Mi 2/2"]
            .iter()
            .zip(["a", "b", "c"])
            .map(|(text, name)| json!({"name": name, "resources": resources(text)}))
            .collect();
        let had = [("a", "2Mi/2Mi 1/1"), ("b", "2Mi/2Mi 1/1"), ("c", "3Mi/3Mi 1/1")];
        assert_eq!(
            plan_of(json!({"containers": containers}), "a=Running b=Running c=Running", &had),
            "resize b (Memory), resize c (Memory), resize a (Memory), resize c (Cpu)"
        );
    }

    #[test]
    fn resize_restarts_sidecars_but_not_init_containers() {
        let policy = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
        let spec = |policy_of_container: &str| {
            json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i",
                "restartPolicy": policy_of_container, "resources": resources("-/- 2/2"),
                "resizePolicy": policy.clone()}]})
        };
        let had = [("i", "-/- 1/1")];
        assert_eq!(plan_of(spec("Always"), "i=Running c=Running", &had), "stop i (Resize), start i");
        assert_eq!(plan_of(spec("Never"), "i=Running", &had), "resize i (Cpu)");
    }

    fn with(text: &str, priority: i32) -> Pod {
        let object = json!({"spec": {
            "priority": priority, "containers": [{"name": "c", "resources": resources(text)}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    #[test]
    fn resize_is_granted_if_it_fits_and_deferred_otherwise() {
        let (old, new) = (with("1Mi/1Mi 1/1", 0), with("1Mi/1Mi 2/2", 0));
        let refusal = || ("OutOfcpu".into(), "Node didn't have enough capacity".to_owned());
        let full = |_: &Pod| Err(refusal());
        let room = |_: &Pod| Ok(());
        let any = ResizeRules::default();
        assert_eq!(decide(&old, &old, any, &full), Decision::Unchanged);
        assert_eq!(decide(&old, &with("1024Ki/1Mi 1000m/1", 0), any, &full), Decision::Unchanged);
        assert_eq!(decide(&old, &new, any, &room), Decision::Granted);
        assert_eq!(decide(&old, &new, any, &full), Decision::Deferred(refusal()));
    }

    #[test]
    fn resize_of_guaranteed_pod_is_infeasible_with_static_managers() {
        let judge = |from: &str, to: &str, static_cpu, static_memory| {
            let rules = ResizeRules { static_cpu, static_memory, ..ResizeRules::default() };
            match decide(&with(from, 0), &with(to, 0), rules, &|_| Ok(())) {
                Decision::Infeasible { message, detail } => format!("{detail}: {message}"),
                other => format!("{other:?}"),
            }
        };
        let cpu = "guaranteed_pod_cpu_manager_static_policy: Resize is infeasible for Guaranteed Pods \
                   alongside CPU Manager policy \"static\"";
        let memory = "guaranteed_pod_memory_manager_static_policy: Resize is infeasible for Guaranteed Pods \
                      alongside Memory Manager policy \"Static\"";
        assert_eq!(judge("1Mi/1Mi 1/1", "1Mi/1Mi 2/2", true, true), cpu);
        assert_eq!(judge("1Mi/1Mi 1/1", "2Mi/2Mi 2/2", false, true), memory);
        assert_eq!(judge("1Mi/1Mi 1/1", "1Mi/1Mi 2/2", false, true), "Granted");
        assert_eq!(judge("1Mi/1Mi 1/1", "2Mi/2Mi 1/1", true, false), "Granted");
        assert_eq!(judge("1Mi/1Mi 1/2", "2Mi/2Mi 1/3", true, true), "Granted");
    }

    #[test]
    fn resize_of_memory_is_infeasible_with_swap_unless_the_container_restarts() {
        let swap = SwapSettings {
            behavior: crate::model::container_memory::SwapBehavior::LimitedSwap,
            cgroup_v2: true,
            controller: true,
            memory_bytes: 8 << 30,
            swap_bytes: 4 << 30,
        };
        let judge = |from: &str, to: &str, policy: Value, swap| {
            let pod = |text: &str| {
                let container = json!({"name": "c", "resources": resources(text), "resizePolicy": policy});
                pod(json!({"containers": [container]}))
            };
            let rules = ResizeRules { swap, ..ResizeRules::default() };
            match decide(&pod(from), &pod(to), rules, &|_| Ok(())) {
                Decision::Infeasible { message, detail } => format!("{detail}: {message}"),
                other => format!("{other:?}"),
            }
        };
        let refused = "swap_limitation: In-place resize of containers with swap is not supported.";
        let check = |from, to, expected| assert_eq!(judge(from, to, json!([]), Some(swap)), expected);
        check("1Gi/2Gi 1/2", "2Gi/3Gi 1/2", refused);
        // It has swap before, or else after.
        check("1Gi/2Gi 1/2", "2Gi/2Gi 1/2", refused);
        check("2Gi/2Gi 1/2", "1Gi/2Gi 1/2", refused);
        // Neither the request of memory changes, nor has the container swap.
        check("1Gi/2Gi 1/2", "1Gi/3Gi 2/2", "Granted");
        check("1Gi/1Gi 1/2", "2Gi/2Gi 1/2", "Granted");
        check("1Gi/1Gi 1/1", "2Gi/2Gi 1/1", "Granted");
        let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        assert_eq!(judge("1Gi/2Gi 1/2", "2Gi/3Gi 1/2", restart, Some(swap)), "Granted");
        assert_eq!(judge("1Gi/2Gi 1/2", "2Gi/3Gi 1/2", json!([]), None), "Granted");
    }

    #[test]
    fn pod_level_resize_is_infeasible_without_its_gate() {
        let whole = |text: &str| pod(json!({"resources": resources(text), "containers": [{"name": "c"}]}));
        let judge = |fixed_pod_level| {
            let rules = ResizeRules {
                fixed_pod_level,
                static_cpu: true,
                static_memory: true,
                ..ResizeRules::default()
            };
            decide(&whole("1Mi/1Mi 1/1"), &whole("1Mi/1Mi 2/2"), rules, &|_| Ok(()))
        };
        assert_eq!(judge(false), Decision::Granted, "no container has CPUs of its own");
        let message = "InPlacePodLevelResourcesVerticalScaling is disabled".to_owned();
        assert_eq!(judge(true), Decision::Infeasible { message, detail: "plr_feature_gate_off" });
    }

    /// A container without a limit has the pod's, and is resized with the pod.
    #[test]
    fn pod_level_resize_reaches_containers_that_have_the_pods_limit() {
        let plans = |policy: Value| {
            table(move |case| {
                let fields: Vec<&str> = case.split(", ").collect();
                let field = |name: &str| fields.iter().find_map(|field| field.strip_prefix(name)).unwrap();
                let spec = json!({"resources": resources(field("pod ")), "containers": [
                    {"name": "c", "resources": resources(field("own ")), "resizePolicy": policy}]});
                plan_of(spec, "c=Running", &[("c", field("had "))])
            })
        };
        plans(json!([])).check(expect![[r#"
            pod 2Mi/2Mi 1/1, own -/- -/-, had -/2Mi -/1       -> nothing
            pod 4Mi/4Mi 1/1, own -/- -/-, had -/2Mi -/1       -> resize c (Memory)
            pod 1Mi/1Mi 2/2, own -/- -/-, had -/2Mi -/1       -> resize c (Memory), resize c (Cpu)
            # A limit of its own stays, and so does one that comes and equals the pod's.
            pod 4Mi/4Mi 2/2, own 1Mi/2Mi -/-, had 1Mi/2Mi -/1 -> resize c (Cpu)
            pod 2Mi/2Mi 1/1, own -/2Mi -/1, had -/2Mi -/1     -> nothing
            # The records of the Go kubelet have zero for what a container does not have.
            pod 2Mi/2Mi 1/1, own -/- -/-, had 0/2Mi 0/1       -> nothing
        "#]]);
        plans(json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}])).check(expect![[r#"
            pod 4Mi/4Mi 1/1, own -/- -/-, had -/2Mi -/1 -> stop c (Resize), start c
            pod 2Mi/2Mi 2/2, own -/- -/-, had -/2Mi -/1 -> resize c (Cpu)
        "#]]);
    }

    #[test]
    fn pod_level_resize_is_due_until_its_containers_have_it() {
        let pod = pod(json!({"resources": resources("2Mi/2Mi 1/1"), "containers": [{"name": "c"}]}));
        let due = |had: &str| is_due(&pod, &ready("c=Running"), &|_| Some(given(had)));
        assert!(due("-/1Mi -/1") && due("-/- -/-") && !due("-/2Mi -/1"));
    }

    #[test]
    fn first_or_smaller_limit_counts_as_lowered() {
        for (has, wants, expected) in
            [("1/2", "1/1", true), ("1/-", "1/1", true), ("1/1", "1/2", false), ("1/1", "1/-", false)]
        {
            let share = |text: &str| given(&format!("{text} -/-")).memory;
            assert_eq!(lowers_limit(share(has), share(wants)), expected, "{has} -> {wants}");
        }
    }

    #[test]
    fn deferred_decreases_and_important_pods_are_retried_first() {
        let small = with("1Mi/1Mi 1/1", 0);
        let mut waiting = [
            ("burstable", small.clone(), with("1Mi/2Mi 2/2", 0)),
            ("guaranteed", small.clone(), with("2Mi/2Mi 2/2", 0)),
            ("important", small.clone(), with("1Mi/2Mi 2/2", 9)),
            ("less", with("1Mi/1Mi 3/3", 0), with("1Mi/1Mi 2/2", 0)),
        ];
        waiting.sort_by_key(|(_, granted, desired)| retry_rank(granted, desired));
        let names: Vec<_> = waiting.iter().map(|(name, ..)| *name).collect();
        assert_eq!(names, ["less", "important", "guaranteed", "burstable"]);
    }
}
