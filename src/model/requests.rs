//! The resources that a pod requests as a whole (Go: component-helpers resource.PodRequests/PodLimits).

use std::collections::BTreeMap;

use super::api::{Container, ResourceRequirements};
use super::pod::{Pod, is_sidecar};
use super::quantity::{Amount, amount};

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Amount>;

/// Whether the sandbox's overhead (`spec.overhead`) is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overhead {
    /// The overhead is added, as in the scheduler and in admission.
    Included,
    /// The overhead is not added.
    Excluded,
}

/// The requests that must be free on a node for the pod to run.
#[must_use]
pub fn pod_requests(pod: &Pod, overhead: Overhead) -> Amounts {
    let mut total = aggregate(pod, |resources| requests_of(Some(resources)));
    // Of the pod as a whole, a limit is not a request: the API server has set the defaults.
    let of_pod = pod.spec().resources.as_ref().and_then(|resources| resources.requests.as_ref());
    total.extend(of_pod.into_iter().flatten().map(|(name, value)| (name.clone(), amount(value))));
    if overhead == Overhead::Included {
        add(&mut total, &overhead_of(pod));
    }
    total
}

/// The sum of the containers' requests, whatever the pod as a whole requests.
#[must_use]
pub fn container_requests(pod: &Pod) -> Amounts {
    aggregate(pod, |resources| {
        resources.requests.iter().flatten().map(|(name, value)| (name.clone(), amount(value))).collect()
    })
}

/// The sum of the containers' limits, whatever the pod as a whole is limited to.
#[must_use]
pub fn container_limits(pod: &Pod) -> Amounts {
    aggregate(pod, limits_of)
}

/// The limits of the pod as a whole: the sum for its containers, for limited resources.
#[must_use]
pub fn pod_limits(pod: &Pod, overhead: Overhead) -> Amounts {
    let mut total = aggregate(pod, limits_of);
    if let Some(resources) = &pod.spec().resources {
        for (name, value) in limits_of(resources) {
            total.insert(name, value);
        }
    }
    if overhead == Overhead::Included {
        for (name, value) in overhead_of(pod) {
            // Resources without a limit stay unlimited, and a limit of zero is none.
            if let Some(sum) = total.get_mut(&name).filter(|sum| !sum.is_zero()) {
                *sum = *sum + value;
            }
        }
    }
    total
}

/// Requests, and limits if there is no request.
#[must_use]
pub fn requests_of(resources: Option<&ResourceRequirements>) -> Amounts {
    let Some(resources) = resources else { return Amounts::new() };
    let maps = [&resources.limits, &resources.requests];
    maps.into_iter().flatten().flatten().map(|(name, value)| (name.clone(), amount(value))).collect()
}

fn limits_of(resources: &ResourceRequirements) -> Amounts {
    resources.limits.iter().flatten().map(|(name, value)| (name.clone(), amount(value))).collect()
}

fn overhead_of(pod: &Pod) -> Amounts {
    pod.spec().overhead.iter().flatten().map(|(name, value)| (name.clone(), amount(value))).collect()
}

/// Regular containers and sidecars run together; an ordinary init container runs alone
/// with the sidecars before it. The larger of the two counts.
fn aggregate(pod: &Pod, select: impl Fn(&ResourceRequirements) -> Amounts) -> Amounts {
    let amounts_of = |container: &Container| container.resources.as_ref().map(&select).unwrap_or_default();
    let mut together = Amounts::new();
    for container in pod.containers() {
        add(&mut together, &amounts_of(container));
    }
    let mut sidecars = Amounts::new();
    let mut peak = Amounts::new();
    for container in pod.init_containers() {
        let own = amounts_of(container);
        if is_sidecar(container) {
            add(&mut together, &own);
            add(&mut sidecars, &own);
            raise(&mut peak, &sidecars);
        } else {
            let mut alone = sidecars.clone();
            add(&mut alone, &own);
            raise(&mut peak, &alone);
        }
    }
    raise(&mut together, &peak);
    together
}

fn add(total: &mut Amounts, more: &Amounts) {
    for (name, value) in more {
        let sum = total.entry(name.clone()).or_default();
        *sum = *sum + *value;
    }
}

fn raise(total: &mut Amounts, other: &Amounts) {
    for (name, value) in other {
        let top = total.entry(name.clone()).or_default();
        *top = (*top).max(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        Pod::from(serde_json::from_value::<super::super::api::Pod>(json!({"spec": spec})).unwrap())
    }

    fn check(spec: Value, requests: Value, limits: Value) {
        let pod = pod(spec);
        let expect = |value: Value| -> Amounts {
            let texts: BTreeMap<String, String> = serde_json::from_value(value).unwrap();
            texts.into_iter().map(|(name, text)| (name, Amount::parse(&text).unwrap())).collect()
        };
        assert_eq!(pod_requests(&pod, Overhead::Included), expect(requests));
        assert_eq!(pod_limits(&pod, Overhead::Included), expect(limits));
    }

    #[test]
    fn sums_containers_and_takes_the_init_peak() {
        let container = |cpu: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let sidecar = |cpu: &str| json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}});
        check(json!({"containers": [container("1"), container("500m")]}), json!({"cpu": "1500m"}), json!({}));
        check(
            json!({"containers": [container("1")], "initContainers": [container("3"), container("2")]}),
            json!({"cpu": "3"}),
            json!({}),
        );
        // Sidecar first: init 2 runs beside it (3), then the regular one beside it (2).
        check(
            json!({"containers": [container("1")], "initContainers": [sidecar("1"), container("2")]}),
            json!({"cpu": "3"}),
            json!({}),
        );
        check(
            json!({"containers": [container("1")], "initContainers": [container("2"), sidecar("1")]}),
            json!({"cpu": "2"}),
            json!({}),
        );
        check(
            json!({"containers": [container("1")], "overhead": {"cpu": "250m", "memory": "1Mi"}}),
            json!({"cpu": "1250m", "memory": "1Mi"}),
            json!({}),
        );
        // Overhead makes no limit where there is none.
        check(
            json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "0"}}}],
                   "overhead": {"cpu": "250m", "memory": "1Mi"}}),
            json!({"cpu": "1250m", "memory": "1Mi"}),
            json!({"cpu": "1250m", "memory": "0"}),
        );
        // A limit alone is a request, too; pod-level numbers replace the sums.
        check(
            json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}],
                   "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4"}}}),
            json!({"cpu": "2", "memory": "1Gi"}),
            json!({"cpu": "4", "memory": "1Gi"}),
        );
        // A pod-level limit alone is no request.
        check(
            json!({"containers": [{"name": "c"}], "resources": {"limits": {"memory": "1Gi"}}}),
            json!({}),
            json!({"memory": "1Gi"}),
        );
    }
}
