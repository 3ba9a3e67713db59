//! The resources of a pod and its containers, without the rest of the pod.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::model::Quantity;
use crate::model::api::{Container, ResourceRequirements};
use crate::model::pod::Pod;
use crate::model::quantity::amount;
use crate::model::typed;
use crate::pods::plan::resize::{Resource, needs_restart};

type Quantities = BTreeMap<String, Quantity>;

const CONTAINERS: &str = "ContainerResources";
const POD: &str = "PodLevelResources";

/// The resources of a pod and of each container, by the containers' names.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PodResources {
    containers: BTreeMap<String, ResourceRequirements>,
    pod: Option<ResourceRequirements>,
}

impl PodResources {
    /// The values of the specification.
    #[must_use]
    pub fn from_pod(pod: &Pod) -> PodResources {
        PodResources {
            containers: pod
                .all_containers()
                .map(|container| (container.name.clone(), requests_and_limits(container.resources.as_ref())))
                .collect(),
            pod: pod.spec().resources.as_ref().map(|own| requests_and_limits(Some(own))),
        }
    }

    /// Reads an entry of a state file.
    #[must_use]
    pub fn parse(text: &str) -> Option<PodResources> {
        let entry: Value = serde_json::from_str(text).ok()?;
        let read = |value: &Value| typed::decode::<ResourceRequirements>(value).ok();
        let containers = entry.get(CONTAINERS).and_then(Value::as_object).into_iter().flatten();
        Some(PodResources {
            containers: containers
                .map(|(name, value)| Some((name.clone(), read(value)?)))
                .collect::<Option<_>>()?,
            pod: entry.get(POD).filter(|own| !own.is_null()).and_then(read),
        })
    }

    /// Writes an entry of a state file.
    pub fn to_text(&self) -> String {
        let containers: Map<String, Value> =
            self.containers.iter().map(|(name, own)| (name.clone(), value(Some(own)))).collect();
        let mut entry = Map::from_iter([(CONTAINERS.to_owned(), Value::Object(containers))]);
        if let Some(own) = &self.pod {
            entry.insert(POD.to_owned(), value(Some(own)));
        }
        Value::Object(entry).to_string()
    }

    /// The resources of one container.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&ResourceRequirements> {
        self.containers.get(name)
    }

    /// Whether the resources of the pod as a whole are known.
    #[must_use]
    pub fn has_pod_level(&self) -> bool {
        self.pod.is_some()
    }

    /// Copies the resources of the pod as a whole.
    pub fn set_pod_level(&mut self, pod: &Pod) {
        self.pod = pod.spec().resources.as_ref().map(|own| requests_and_limits(Some(own)));
    }

    /// Copies all values that a container of `pod` has in the runtime.
    pub fn set(&mut self, pod: &Pod, container: &Container) {
        self.containers.insert(container.name.clone(), in_effect(pod, container));
    }

    /// Records that a container has no resources in the runtime.
    pub fn set_none(&mut self, container: &Container) {
        self.containers.insert(container.name.clone(), ResourceRequirements::default());
    }

    /// Copies the value of one resource that a container of `pod` has in the runtime.
    pub fn set_one(&mut self, pod: &Pod, container: &Container, resource: Resource) {
        let from = in_effect(pod, container);
        let to = self.containers.entry(container.name.clone()).or_default();
        for (to, from) in [(&mut to.requests, from.requests), (&mut to.limits, from.limits)] {
            let name = resource.name();
            match from.and_then(|mut from| from.remove(name)) {
                Some(amount) => drop(to.get_or_insert_default().insert(name.to_owned(), amount)),
                None => drop(to.as_mut().map(|to| to.remove(name))),
            }
        }
    }

    /// Gives a known container the pod's limits in the place of missing ones, of resources whose
    /// change would restart it.
    pub fn complete(&mut self, pod: &Pod, container: &Container) {
        if let Some(own) = self.containers.get_mut(&container.name) {
            inherit(pod, own, &|resource| needs_restart(container, resource));
        }
    }

    /// The pod with these resources. A container without an entry keeps its own.
    #[must_use]
    pub fn applied_to(&self, pod: &Pod) -> Pod {
        let differs = |container: &Container| {
            self.container(&container.name)
                .is_some_and(|own| !equal_amounts(container.resources.as_ref(), Some(own)))
        };
        if !pod.all_containers().any(differs)
            && equal_amounts(pod.spec().resources.as_ref(), self.pod.as_ref())
        {
            return pod.clone();
        }
        let mut object = pod.clone().into_object();
        if let Some(spec) = &mut object.spec {
            if !equal_amounts(spec.resources.as_ref(), self.pod.as_ref()) {
                replace(&mut spec.resources, self.pod.as_ref());
            }
            for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
                if differs(container) {
                    let own = self.containers.get(&container.name);
                    replace(&mut container.resources, own);
                }
            }
        }
        Pod::from(object)
    }
}

/// The resources that a container of `pod` has in the runtime: its own, and the pod's limits in the
/// place of missing ones, as upstream records them (Go: setActuatedContainerResources).
fn in_effect(pod: &Pod, container: &Container) -> ResourceRequirements {
    let mut own = requests_and_limits(container.resources.as_ref());
    inherit(pod, &mut own, &|_| true);
    own
}

fn is_set(limit: &&Quantity) -> bool {
    !amount(limit).is_zero()
}

fn inherit(pod: &Pod, own: &mut ResourceRequirements, concerns: &dyn Fn(Resource) -> bool) {
    let whole = pod.spec().resources.as_ref().and_then(|whole| whole.limits.as_ref());
    for name in Resource::ALL.into_iter().filter(|resource| concerns(*resource)).map(Resource::name) {
        let Some(limit) = whole.and_then(|whole| whole.get(name)).filter(is_set) else { continue };
        let limits = own.limits.get_or_insert_default();
        if limits.get(name).filter(is_set).is_none() {
            limits.insert(name.to_owned(), limit.clone());
        }
    }
}

/// Requests and limits, without other fields.
fn requests_and_limits(resources: Option<&ResourceRequirements>) -> ResourceRequirements {
    let resources = resources.cloned().unwrap_or_default();
    ResourceRequirements { claims: None, ..resources }
}

fn replace(place: &mut Option<ResourceRequirements>, by: Option<&ResourceRequirements>) {
    let claims = place.take().and_then(|old| old.claims);
    let by = requests_and_limits(by);
    *place = Some(ResourceRequirements { claims, ..by });
}

/// Whether both have the same amounts, however they are written.
fn equal_amounts(a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>) -> bool {
    let amounts = |select: &dyn Fn(&ResourceRequirements) -> Option<Quantities>,
                   resources: Option<&ResourceRequirements>| {
        let map = resources.and_then(select).unwrap_or_default();
        map.into_iter().map(|(name, value)| (name, amount(&value))).collect::<BTreeMap<_, _>>()
    };
    let requests = |resources: &ResourceRequirements| resources.requests.clone();
    let limits = |resources: &ResourceRequirements| resources.limits.clone();
    amounts(&requests, a) == amounts(&requests, b) && amounts(&limits, a) == amounts(&limits, b)
}

/// Requests and limits as JSON, without other fields.
pub(super) fn value(resources: Option<&ResourceRequirements>) -> Value {
    let map = |quantities: &Option<Quantities>| {
        let pairs = quantities.iter().flatten();
        let map: Map<String, Value> =
            pairs.map(|(name, value)| (name.clone(), Value::from(value.0.as_str()))).collect();
        (!map.is_empty()).then_some(Value::Object(map))
    };
    let limits = resources.and_then(|own| map(&own.limits)).map(|map| ("limits".to_owned(), map));
    let requests = resources.and_then(|own| map(&own.requests)).map(|map| ("requests".to_owned(), map));
    Value::Object(limits.into_iter().chain(requests).collect())
}
