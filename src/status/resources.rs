//! The resources in a status: the allocated ones, and those that the runtime reports as applied.

use std::collections::BTreeMap;

use crate::model::Quantity;
use crate::model::api::{Container, PodStatus, ResourceRequirements};
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, Form, canonical};
use crate::model::requests::{Amounts, Overhead, pod_limits, pod_requests};
use crate::model::runtime::{AppliedResources, ContainerState, ContainerStatus as Instance};

type Quantities = BTreeMap<String, Quantity>;

/// The minimum of CPU shares of a container. It also applies if the container requests fewer.
const MIN_SHARES: i64 = 2;
/// The minimum CPU limit in millicores that can be enforced.
const MIN_LIMIT_MILLICORES: i64 = 10;

fn canonical_map(map: Option<&Quantities>) -> Option<Quantities> {
    let map: Quantities =
        map?.iter().map(|(name, value)| (name.clone(), Quantity(canonical(&value.0)))).collect();
    (!map.is_empty()).then_some(map)
}

/// The requests of a container; a limit without a request is used as the request, too.
pub(super) fn allocated(spec: &Container) -> Option<Quantities> {
    let resources = spec.resources.as_ref()?;
    let maps = [&resources.limits, &resources.requests];
    let merged: Quantities =
        maps.into_iter().flatten().flatten().map(|(name, value)| (name.clone(), value.clone())).collect();
    canonical_map(Some(&merged))
}

/// The resources of a container: the allocation, in which the values that the runtime reports as
/// applied and `memory_request`, the request that is in effect, replace the allocated ones.
pub(super) fn of_container(
    spec: &Container,
    instance: &Instance,
    memory_request: Option<Amount>,
) -> ResourceRequirements {
    let own = spec.resources.as_ref();
    let mut limits = canonical_map(own.and_then(|resources| resources.limits.as_ref()));
    let mut requests = allocated(spec);
    // For a container that does not run, the allocation is shown.
    if let Some(applied) = instance.resources.filter(|_| instance.state == ContainerState::Running) {
        if let Some(limits) = &mut limits {
            correct(limits, "cpu", limit_millicores(&applied).map(Amount::from_milli), MIN_LIMIT_MILLICORES);
            let bytes = applied.memory_limit_bytes.filter(|bytes| *bytes > 0);
            correct(limits, "memory", bytes.map(Amount::from_units), 0);
        }
        if let Some(requests) = &mut requests {
            let shares = applied.cpu_shares.filter(|shares| *shares >= MIN_SHARES);
            let millicores = shares.map(|shares| shares.saturating_mul(1000).saturating_add(1023) / 1024);
            correct(requests, "cpu", millicores.map(Amount::from_milli), MIN_SHARES);
            correct(requests, "memory", memory_request, 0);
        }
    }
    ResourceRequirements { claims: own.and_then(|resources| resources.claims.clone()), limits, requests }
}

fn limit_millicores(applied: &AppliedResources) -> Option<i64> {
    let quota = applied.cpu_quota.filter(|quota| *quota > 0)?;
    let period = applied.cpu_period.filter(|period| *period > 0)?;
    Some(quota.saturating_mul(1000) / period).filter(|millicores| *millicores > 0)
}

/// Replaces an amount in `map` with the applied one, unless both are at most `floor_milli`: the
/// kernel applies the same minimum for both.
fn correct(map: &mut Quantities, name: &str, applied: Option<Amount>, floor_milli: i64) {
    let Some(applied) = applied else { return };
    let wanted = map.get(name).map(crate::model::quantity::amount);
    if wanted == Some(applied)
        || (applied.milli() <= floor_milli && wanted.unwrap_or_default().milli() <= floor_milli)
    {
        return;
    }
    let form = if name == "memory" { Form::Binary } else { Form::Decimal };
    map.insert(name.to_owned(), Quantity(applied.format(form)));
}

/// Sets `status.allocatedResources` and `status.resources`: the pod-level values of the spec if
/// there are any, and otherwise the sums over the containers. While a resize is open, `resources` has the
/// values that the pod and its containers still have, those of `has`: clients take a resize whose values
/// it shows for complete.
pub(super) fn set_pod_level(pod: &Pod, has: Option<&Pod>, status: &mut PodStatus) {
    let texts = |pod: &Pod, amounts: Amounts| -> Option<Quantities> {
        let map: Quantities = amounts
            .into_iter()
            .map(|(name, amount)| {
                let text = amount.format(form_in(pod, &name));
                (name, Quantity(text))
            })
            .collect();
        (!map.is_empty()).then_some(map)
    };
    let resources = |pod: &Pod| ResourceRequirements {
        limits: texts(pod, pod_limits(pod, Overhead::Excluded)),
        requests: texts(pod, pod_requests(pod, Overhead::Excluded)),
        claims: None,
    };
    let granted = resources(pod);
    status.allocated_resources.clone_from(&granted.requests);
    status.resources = Some(has.map_or(granted, resources));
}

/// The form in which a sum is written (binary or decimal): that of the first value in it.
fn form_in(pod: &Pod, name: &str) -> Form {
    let form = |resources: &ResourceRequirements| {
        [&resources.requests, &resources.limits]
            .into_iter()
            .flatten()
            .find_map(|map| map.get(name))
            .map(|value| Form::from_text(&value.0))
    };
    let own = pod.spec().resources.as_ref().and_then(form);
    own.or_else(|| {
        let containers = pod.containers().iter().chain(pod.init_containers());
        containers.filter_map(|container| container.resources.as_ref()).find_map(form)
    })
    .unwrap_or(Form::Decimal)
}

#[cfg(test)]
mod unit {
    use super::*;
    use serde_json::{Value, json};

    fn check(resources: Value, applied: AppliedResources, expected: Value) {
        let spec: Container = serde_json::from_value(json!({"name": "c", "resources": resources})).unwrap();
        let mut instance = super::super::tests::instance("c", ContainerState::Running);
        instance.resources = Some(applied);
        assert_eq!(serde_json::to_value(of_container(&spec, &instance, None)).unwrap(), expected);
    }

    #[test]
    fn open_resize_of_a_pod_shows_the_values_that_it_still_has() {
        let pod = |resources: &Value, of_container: &Value| {
            let pod: crate::model::api::Pod = serde_json::from_value(json!({
                "metadata": {"name": "p"},
                "spec": {
                    "resources": resources,
                    "containers": [{"name": "c", "resources": of_container}],
                },
            }))
            .unwrap();
            Pod::from(pod)
        };
        let shown = |pod: &Pod, has: Option<&Pod>| {
            let mut status = PodStatus::default();
            set_pod_level(pod, has, &mut status);
            serde_json::to_value((status.resources, status.allocated_resources)).unwrap()
        };
        let old = json!({"requests": {"memory": "20Mi"}, "limits": {"memory": "40Mi"}});
        let new = json!({"requests": {"memory": "10Ki"}, "limits": {"memory": "10Ki"}});
        for (nothing, is_whole) in [(json!({}), true), (Value::Null, false)] {
            let pod_with = |own: &Value| if is_whole { pod(own, &nothing) } else { pod(&nothing, own) };
            assert_eq!(shown(&pod_with(&new), None), json!([new, {"memory": "10Ki"}]));
            assert_eq!(shown(&pod_with(&new), Some(&pod_with(&old))), json!([old, {"memory": "10Ki"}]));
        }
        // Both: what the pod as a whole does not state is the sum of what its containers have.
        let cpu = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let has = pod(&old, &cpu("1"));
        let expected = json!([{"requests": {"memory": "20Mi", "cpu": "1"}, "limits": {"memory": "40Mi"}},
            {"memory": "10Ki", "cpu": "2"}]);
        assert_eq!(shown(&pod(&new, &cpu("2")), Some(&has)), expected);
    }

    #[test]
    fn status_shows_applied_instead_of_allocated_resources() {
        let none = AppliedResources::default();
        let applied = AppliedResources {
            cpu_shares: Some(102),
            cpu_quota: Some(15000),
            cpu_period: Some(100_000),
            memory_limit_bytes: Some(128 << 20),
        };
        let floor = AppliedResources {
            cpu_shares: Some(2),
            cpu_quota: Some(1000),
            cpu_period: Some(100_000),
            memory_limit_bytes: None,
        };
        check(json!({}), applied, json!({}));
        check(json!({"requests": {"cpu": "0.1"}}), applied, json!({"requests": {"cpu": "100m"}}));
        check(json!({"requests": {"cpu": "1"}}), applied, json!({"requests": {"cpu": "100m"}}));
        check(json!({"requests": {"memory": "5Mi"}}), floor, json!({"requests": {"memory": "5Mi"}}));
        check(
            json!({"limits": {"cpu": "1m", "memory": "1Gi"}}),
            floor,
            json!({"limits": {"cpu": "1m", "memory": "1Gi"}, "requests": {"cpu": "1m", "memory": "1Gi"}}),
        );
        check(
            json!({"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "2m"}}),
            applied,
            json!({"limits": {"cpu": "150m", "memory": "128Mi"}, "requests": {"cpu": "100m", "memory": "64Mi"}}),
        );
        check(
            json!({"limits": {"cpu": "1"}}),
            none,
            json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}),
        );
    }
}
