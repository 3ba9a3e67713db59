//! Which ResourceClaims a pod and its containers refer to (pure; Go:
//! k8s.io/dynamic-resource-allocation/resourceclaim, pkg/kubelet/cm/dra).

use std::collections::BTreeMap;

use crate::model::api::{Container, PodResourceClaim};
use crate::model::pod::Pod;
use crate::model::quantity::amount;

/// Extended resources that a device class defines without a name of its own.
const CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// A claim that a pod refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference<'a> {
    /// The entry's name in `spec.resourceClaims`; empty for the claim of extended resources.
    pub entry: &'a str,
    /// The name of the ResourceClaim, in the pod's namespace.
    pub claim: &'a str,
    /// Whether it was made from a template: then this pod must own it.
    pub generated: bool,
}

/// Why a name is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum NameError {
    /// The controller has not made the claim yet.
    #[error("pod \"{namespace}/{pod}\": ResourceClaim not created yet")]
    NotCreated { namespace: String, pod: String },
    /// An entry without a source that is known here.
    #[error("pod \"{namespace}/{pod}\", spec.resourceClaim {entry:?}: none of the supported fields are set")]
    Unsupported { namespace: String, pod: String, entry: String },
}

/// The claim of one entry of `spec.resourceClaims`; `None`: it needs no claim.
///
/// # Errors
/// See [`NameError`].
pub fn reference<'a>(pod: &'a Pod, entry: &'a PodResourceClaim) -> Result<Option<Reference<'a>>, NameError> {
    let namespace = || pod.namespace().to_owned();
    if let Some(claim) = &entry.resource_claim_name {
        return Ok(Some(Reference { entry: &entry.name, claim, generated: false }));
    }
    if entry.resource_claim_template_name.is_none() {
        return Err(NameError::Unsupported {
            namespace: namespace(),
            pod: pod.name().to_owned(),
            entry: entry.name.clone(),
        });
    }
    let statuses = pod.object().status.iter().flat_map(|status| status.resource_claim_statuses.iter());
    match statuses.flatten().find(|status| status.name == entry.name) {
        Some(status) => {
            let claim = status.resource_claim_name.as_deref();
            Ok(claim.map(|claim| Reference { entry: &entry.name, claim, generated: true }))
        }
        None => Err(NameError::NotCreated { namespace: namespace(), pod: pod.name().to_owned() }),
    }
}

/// Whether the pod refers to any claim.
pub fn has_claims(pod: &Pod) -> bool {
    pod.spec().resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) || extended(pod).is_some()
}

/// All claims of a pod, that of extended resources last. No claim is named twice.
///
/// # Errors
/// See [`NameError`].
pub fn references(pod: &Pod) -> Result<Vec<Reference<'_>>, NameError> {
    let mut found: Vec<Reference<'_>> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    let mut all = Vec::new();
    for entry in pod.spec().resource_claims.iter().flatten() {
        all.extend(reference(pod, entry)?);
    }
    all.extend(extended(pod).map(|claim| Reference { entry: "", claim, generated: false }));
    for reference in all {
        match places.get(reference.claim).and_then(|place| found.get_mut(*place)) {
            // If one of the entries was made for this pod, the claim must be.
            Some(known) => known.generated |= reference.generated,
            None => {
                places.insert(reference.claim, found.len());
                found.push(reference);
            }
        }
    }
    Ok(found)
}

/// The claims of one container, with the requests whose devices it gets; an empty request means all
/// devices of the claim.
///
/// # Errors
/// See [`NameError`].
pub fn container_requests<'a>(
    pod: &'a Pod,
    container: &'a Container,
) -> Result<BTreeMap<&'a str, Vec<&'a str>>, NameError> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let resources = container.resources.as_ref();
    for entry in pod.spec().resource_claims.iter().flatten() {
        let uses = resources.and_then(|resources| resources.claims.as_ref()).into_iter().flatten();
        let mut uses = uses.filter(|claim| claim.name == entry.name).peekable();
        if uses.peek().is_none() {
            continue;
        }
        if let Some(resolved) = reference(pod, entry)? {
            let requests = uses.map(|claim| claim.request.as_deref().unwrap_or_default());
            found.entry(resolved.claim).or_default().extend(requests);
        }
    }
    let status = pod.object().status.as_ref();
    if let Some(status) = status.and_then(|status| status.extended_resource_claim_status.as_ref()) {
        let wanted = |name: &str| {
            is_extended(name)
                && resources
                    .and_then(|resources| resources.requests.as_ref()?.get(name))
                    .is_some_and(|quantity| !amount(quantity).is_zero())
        };
        for mapping in &status.request_mappings {
            if mapping.container_name == container.name && wanted(&mapping.resource_name) {
                found.entry(&status.resource_claim_name).or_default().push(&mapping.request_name);
            }
        }
    }
    Ok(found)
}

/// The claim that the scheduler made for the pod's extended resources.
fn extended(pod: &Pod) -> Option<&str> {
    let status = pod.object().status.as_ref()?.extended_resource_claim_status.as_ref()?;
    Some(status.resource_claim_name.as_str())
}

/// Whether a device class can stand behind this resource.
fn is_extended(name: &str) -> bool {
    name.starts_with(CLASS_PREFIX)
        || name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

/// The request of a reference to one of its alternatives: `gpu` for `gpu/large`.
pub fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::testing::pod;
    use serde_json::json;

    #[test]
    fn names_come_from_the_specification_or_the_status() {
        let named = pod(
            json!({"resourceClaims": [{"name": "a", "resourceClaimName": "shared"},
                {"name": "b", "resourceClaimTemplateName": "t"}, {"name": "c", "resourceClaimTemplateName": "t"},
                {"name": "d", "resourceClaimName": "p-b-x"}]}),
            json!({"resourceClaimStatuses": [{"name": "c"}, {"name": "b", "resourceClaimName": "p-b-x"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "ext", "requestMappings": []}}),
        );
        let found: Vec<_> = references(&named)
            .unwrap()
            .iter()
            .map(|reference| (reference.entry, reference.claim, reference.generated))
            .collect();
        assert_eq!(found, [("a", "shared", false), ("b", "p-b-x", true), ("", "ext", false)]);
        assert!(has_claims(&named));
        assert!(!has_claims(&pod(json!({"resourceClaims": []}), json!({}))));
    }

    #[test]
    fn missing_names_have_the_messages_of_the_go_kubelet() {
        let early =
            pod(json!({"resourceClaims": [{"name": "b", "resourceClaimTemplateName": "t"}]}), json!({}));
        assert_eq!(references(&early).unwrap_err().to_string(), "pod \"n/p\": ResourceClaim not created yet");
        let strange = pod(json!({"resourceClaims": [{"name": "b"}]}), json!({}));
        assert_eq!(
            references(&strange).unwrap_err().to_string(),
            "pod \"n/p\", spec.resourceClaim \"b\": none of the supported fields are set"
        );
    }

    #[test]
    fn a_container_gets_the_requests_that_it_names() {
        let pod = pod(
            json!({"resourceClaims": [{"name": "a", "resourceClaimName": "one"}, {"name": "b", "resourceClaimName": "two"}],
                "containers": [{"name": "c", "resources": {"claims": [{"name": "a", "request": "r1"}, {"name": "a", "request": "r2"}],
                    "requests": {"example.com/gpu": "1", "example.com/none": "0", "cpu": "1", "deviceclass.resource.kubernetes.io/x": "1"}}},
                    {"name": "d", "resources": {"claims": [{"name": "b"}]}}, {"name": "e"}]}),
            json!({"extendedResourceClaimStatus": {"resourceClaimName": "ext", "requestMappings": [
                {"containerName": "c", "resourceName": "example.com/gpu", "requestName": "container-0-request-0"},
                {"containerName": "c", "resourceName": "example.com/none", "requestName": "container-0-request-1"},
                {"containerName": "c", "resourceName": "cpu", "requestName": "container-0-request-2"},
                {"containerName": "c", "resourceName": "deviceclass.resource.kubernetes.io/x", "requestName": "container-0-request-3"},
                {"containerName": "d", "resourceName": "example.com/gpu", "requestName": "container-1-request-0"}]}}),
        );
        let requests = |index: usize| container_requests(&pod, &pod.containers()[index]).unwrap();
        let first = BTreeMap::from([
            ("one", vec!["r1", "r2"]),
            ("ext", vec!["container-0-request-0", "container-0-request-3"]),
        ]);
        assert_eq!(requests(0), first);
        assert_eq!(requests(1), BTreeMap::from([("two", vec![""])]));
        assert!(requests(2).is_empty());
    }

    #[test]
    fn alternatives_belong_to_their_request() {
        assert_eq!(base_request("gpu/large"), "gpu");
        assert_eq!(base_request("gpu"), "gpu");
    }
}
