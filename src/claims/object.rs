//! What the node reads of a ResourceClaim, and whether a pod may use it (pure; Go:
//! k8s.io/dynamic-resource-allocation/resourceclaim `IsForPod` and `IsReservedForPod`).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::info::{ClaimId, ClaimInfo, ClaimKey};
use crate::model::Quantity;
use crate::model::meta::ObjectMeta;
use crate::model::pod::Pod;

/// A ResourceClaim (`resource.k8s.io/v1`), without the fields that only the scheduler reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceClaim {
    metadata: ObjectMeta,
    status: Option<Status>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Option<Vec<Consumer>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Option<Devices>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Devices {
    results: Option<Vec<Allocated>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Consumer {
    uid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    api_group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// One allocated device, or a part of one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocated {
    /// The driver that prepares it.
    pub driver: String,
    /// The pool of the device.
    pub pool: String,
    /// The device in the pool.
    pub device: String,
    /// The request in the claim.
    pub request: String,
    /// Whether it is for administration only, and may be in use elsewhere.
    pub admin_access: Option<bool>,
    /// Identifies this share of a device that several claims use.
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    /// What this claim consumes of a device that is shared by capacity.
    pub consumed_capacity: Option<BTreeMap<String, Quantity>>,
    /// The calls that the driver does not want for this device, such as `NodePrepareResources`; `*`: none.
    pub skip_node_operations: Option<Vec<String>>,
}

/// Why a pod cannot use a claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum UseError {
    #[error("ResourceClaim {claim} is not in the same namespace as Pod {pod}")]
    OtherNamespace { claim: ClaimKey, pod: String },
    #[error("ResourceClaim {claim} was not created for Pod {pod} (Pod is not owner)")]
    NotOwner { claim: ClaimKey, pod: String },
    #[error(
        "ResourceClaim {claim} was not created for Pod {pod} (neither Pod nor PodGroup {group} is the owner)"
    )]
    NoOwner { claim: ClaimKey, pod: String, group: String },
    #[error("pod {pod} ({pod_uid}) is not allowed to use ResourceClaim {claim} ({claim_uid})")]
    NotReserved { pod: String, pod_uid: String, claim: String, claim_uid: String },
    #[error("ResourceClaim {claim}: not allocated")]
    NotAllocated { claim: String },
    #[error("ResourceClaim {claim}: DRAOptionalNodeOperations feature gate is disabled on kubelet")]
    SkipsCalls { claim: String },
}

/// The API group of PodGroups.
const SCHEDULING: &str = "scheduling.k8s.io";

/// The name of the PodGroup of a pod.
#[must_use]
pub fn pod_group(pod: &Pod) -> Option<&str> {
    pod.spec().scheduling_group.as_ref()?.pod_group_name.as_deref()
}

impl Consumer {
    fn is_pod_group(&self, group: &str) -> bool {
        self.api_group.as_deref() == Some(SCHEDULING)
            && self.resource.as_deref() == Some("podgroups")
            && self.name.as_deref() == Some(group)
    }
}

impl ResourceClaim {
    fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// The claim without what changes by itself and is not read again.
    #[must_use]
    pub fn to_stored(&self) -> ResourceClaim {
        let metadata = ObjectMeta { managed_fields: None, resource_version: None, ..self.metadata.clone() };
        ResourceClaim { metadata, status: self.status.clone() }
    }

    /// What identifies the claim to drivers.
    #[must_use]
    pub fn identity(&self) -> ClaimId {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let key = ClaimKey { namespace: text(&self.metadata.namespace), name: text(&self.metadata.name) };
        ClaimId { key, uid: text(&self.metadata.uid) }
    }

    /// All allocated devices.
    pub fn allocated(&self) -> impl Iterator<Item = &Allocated> {
        let allocation = self.status.as_ref().and_then(|status| status.allocation.as_ref());
        allocation.and_then(|found| found.devices.as_ref()?.results.as_ref()).into_iter().flatten()
    }

    /// Whether the pod may use the claim; what is to be prepared. `group`: the pod's PodGroup, if claims of
    /// this group count.
    ///
    /// # Errors
    /// See [`UseError`].
    pub fn usable_by(&self, pod: &Pod, generated: bool, group: Option<&str>) -> Result<ClaimInfo, UseError> {
        let identity = self.identity();
        let full = || format!("{}/{}", pod.namespace(), pod.name());
        if generated {
            if identity.key.namespace != pod.namespace() {
                return Err(UseError::OtherNamespace { claim: identity.key, pod: full() });
            }
            if !self.is_controlled_by(pod, group) {
                let (claim, pod) = (identity.key, full());
                return Err(match group {
                    Some(group) => UseError::NoOwner { claim, pod, group: group.to_owned() },
                    None => UseError::NotOwner { claim, pod },
                });
            }
        }
        let reserved = self.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
        let is_pod = |consumer: &Consumer| consumer.uid == pod.uid().as_str();
        let is_group = |consumer: &Consumer| group.is_some_and(|group| consumer.is_pod_group(group));
        if !reserved.into_iter().any(|consumer| is_pod(consumer) || is_group(consumer)) {
            return Err(UseError::NotReserved {
                pod: pod.name().to_owned(),
                pod_uid: pod.uid().to_string(),
                claim: identity.key.name,
                claim_uid: identity.uid,
            });
        }
        if self.status.as_ref().is_none_or(|status| status.allocation.is_none()) {
            return Err(UseError::NotAllocated { claim: self.name().to_owned() });
        }
        if self.skips_calls() {
            return Err(UseError::SkipsCalls { claim: self.name().to_owned() });
        }
        let drivers = self.allocated().map(|result| (result.driver.clone(), Vec::new())).collect();
        Ok(ClaimInfo { drivers, ..ClaimInfo::new(identity) })
    }

    /// Whether a driver does not want one of its calls for any of its devices: only a kubelet with the gate
    /// `DRAOptionalNodeOperations` leaves it out (Go: `computeDriverStates`).
    fn skips_calls(&self) -> bool {
        // The calls that all devices of a driver skip; `None`: each call.
        let mut common: BTreeMap<&str, Option<BTreeSet<&str>>> = BTreeMap::new();
        for result in self.allocated() {
            let calls: BTreeSet<&str> =
                result.skip_node_operations.iter().flatten().map(String::as_str).collect();
            let calls = (!calls.contains("*")).then_some(calls);
            let before = common.entry(result.driver.as_str()).or_insert(None);
            *before = match (before.take(), calls) {
                (Some(before), Some(calls)) => Some(before.intersection(&calls).copied().collect()),
                (before, calls) => before.or(calls),
            };
        }
        common.values().any(|calls| calls.as_ref().is_none_or(|calls| !calls.is_empty()))
    }

    /// A pod does not know the UID of its PodGroup.
    fn is_controlled_by(&self, pod: &Pod, group: Option<&str>) -> bool {
        let mut owners = self.metadata.owner_references.iter().flatten();
        let controller = owners.find(|owner| owner.controller == Some(true));
        controller.is_some_and(|owner| {
            let is_scheduling =
                || owner.api_version.strip_prefix(SCHEDULING).is_some_and(|rest| rest.starts_with('/'));
            owner.uid == pod.uid().as_str()
                || (group == Some(owner.name.as_str()) && owner.kind == "PodGroup" && is_scheduling())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::testing::{claim, pod};
    use serde_json::{Value, json};

    fn with(change: impl FnOnce(&mut Value)) -> ResourceClaim {
        let mut object = claim("c", "u1", &["gpu.example.com"]);
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_claim_names_its_drivers_and_the_parts_of_devices() {
        let claim = with(|object| {
            object["status"]["allocation"]["devices"]["results"] = json!([
                {"driver": "b", "pool": "p", "device": "d", "request": "r/small", "adminAccess": true},
                {"driver": "a", "pool": "p", "device": "d", "request": "r", "shareID": "s",
                    "consumedCapacity": {"memory": "1Gi"}, "bindingConditions": ["x"]},
                {"driver": "b", "pool": "p", "device": "e", "request": "r"}]);
        });
        let info = claim.usable_by(&pod(json!({}), json!({})), false, None).unwrap();
        assert_eq!(info.drivers.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((info.id.uid.as_str(), info.id.key.to_string().as_str()), ("u1", "n/c"));
        let parts: Vec<_> =
            claim.allocated().map(|result| (result.admin_access, result.share_id.as_deref())).collect();
        assert_eq!(parts, [(Some(true), None), (None, Some("s")), (None, None)]);
        let second = claim.allocated().nth(1).unwrap();
        assert_eq!(second.consumed_capacity.as_ref().unwrap()["memory"].0, "1Gi");
    }

    #[test]
    fn a_claim_without_devices_needs_no_driver() {
        let claim = with(|object| object["status"]["allocation"] = json!({"devices": {"results": null}}));
        assert!(claim.usable_by(&pod(json!({}), json!({})), false, None).unwrap().drivers.is_empty());
    }

    #[test]
    fn claim_whose_driver_skips_a_call_is_refused_as_without_the_gate() {
        let pod = pod(json!({}), json!({}));
        let outcome = |skips: &[Value]| {
            let results: Vec<Value> = skips
                .iter()
                .map(|skips| json!({"driver": "d", "pool": "p", "device": "x", "skipNodeOperations": skips}))
                .collect();
            let claim = with(|object| object["status"]["allocation"]["devices"]["results"] = json!(results));
            claim
                .usable_by(&pod, false, None)
                .map(|info| info.drivers.len())
                .map_err(|error| error.to_string())
        };
        let refused =
            Err("ResourceClaim c: DRAOptionalNodeOperations feature gate is disabled on kubelet".to_owned());
        let unprepare = json!(["NodeUnprepareResources"]);
        for skips in [
            vec![json!(["*"])],
            vec![unprepare.clone()],
            vec![json!(["*"]), unprepare.clone(), json!(["*"])],
            vec![json!(["NodePrepareResources", "NodeUnprepareResources"]), unprepare.clone()],
        ] {
            assert_eq!(outcome(&skips), refused, "{skips:?}");
        }
        // Another device of the driver needs the call.
        for skips in [
            vec![Value::Null],
            vec![json!([]), json!(["*"])],
            vec![unprepare.clone(), Value::Null, json!(["*"])],
            vec![json!(["NodePrepareResources"]), unprepare],
        ] {
            assert_eq!(outcome(&skips), Ok(1), "{skips:?}");
        }
    }

    #[test]
    fn a_claim_that_the_pod_may_not_use_is_refused_in_the_words_of_the_go_kubelet() {
        let pod = pod(json!({}), json!({}));
        let refused = |claim: &ResourceClaim| claim.usable_by(&pod, true, None).unwrap_err().to_string();
        let other = with(|object| object["metadata"]["namespace"] = json!("m"));
        assert_eq!(refused(&other), "ResourceClaim m/c is not in the same namespace as Pod n/p");
        let not_owner = "ResourceClaim n/c was not created for Pod n/p (Pod is not owner)";
        assert_eq!(refused(&with(|_| {})), not_owner);
        let owner =
            json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pod-uid", "controller": false}]);
        assert_eq!(refused(&with(|object| object["metadata"]["ownerReferences"] = owner.clone())), not_owner);
        let owned = |change: fn(&mut Value)| {
            with(|object| {
                object["metadata"]["ownerReferences"] = owner.clone();
                object["metadata"]["ownerReferences"][0]["controller"] = json!(true);
                change(object);
            })
        };
        assert!(owned(|_| {}).usable_by(&pod, true, None).is_ok());
        assert_eq!(
            refused(&owned(|object| object["status"]["reservedFor"] =
                json!([{"resource": "pods", "name": "p", "uid": "x"}]))),
            "pod p (pod-uid) is not allowed to use ResourceClaim c (u1)"
        );
        assert_eq!(
            refused(&owned(|object| object["status"]["allocation"] = Value::Null)),
            "ResourceClaim c: not allocated"
        );
    }

    #[test]
    fn claim_of_the_group_of_a_pod_is_usable_only_if_groups_count() {
        let pod = pod(json!({"schedulingGroup": {"podGroupName": "g"}}), json!({}));
        let of_group = |change: fn(&mut Value)| {
            with(|object| {
                object["metadata"]["ownerReferences"] = json!([{"apiVersion": "scheduling.k8s.io/v1alpha3",
                    "kind": "PodGroup", "name": "g", "uid": "group-uid", "controller": true}]);
                object["status"]["reservedFor"] = json!([{"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "group-uid"}]);
                change(object);
            })
        };
        let outcome = |claim: &ResourceClaim, group| {
            claim
                .usable_by(&pod, true, group)
                .map(|info| info.drivers.len())
                .map_err(|error| error.to_string())
        };
        let claim = of_group(|_| {});
        assert_eq!(outcome(&claim, pod_group(&pod)), Ok(1));
        // A stored claim has what is compared.
        assert_eq!(outcome(&claim.to_stored(), Some("g")), Ok(1));
        assert!(outcome(&claim, None).unwrap_err().ends_with("for Pod n/p (Pod is not owner)"));
        let no_owner =
            "ResourceClaim n/c was not created for Pod n/p (neither Pod nor PodGroup g is the owner)";
        let changes: [fn(&mut Value); 3] = [
            |object| object["metadata"]["ownerReferences"][0]["name"] = json!("h"),
            |object| object["metadata"]["ownerReferences"][0]["kind"] = json!("Job"),
            |object| object["metadata"]["ownerReferences"][0]["apiVersion"] = json!("scheduling.k8s.iox/v1"),
        ];
        for change in changes {
            assert_eq!(outcome(&of_group(change), Some("g")), Err(no_owner.to_owned()));
        }
        let changes: [fn(&mut Value); 3] = [
            |object| object["status"]["reservedFor"][0]["name"] = json!("h"),
            |object| object["status"]["reservedFor"][0]["resource"] = json!("pods"),
            |object| object["status"]["reservedFor"][0]["apiGroup"] = json!(""),
        ];
        for change in changes {
            let refused = outcome(&of_group(change), Some("g")).unwrap_err();
            assert_eq!(refused, "pod p (pod-uid) is not allowed to use ResourceClaim c (u1)");
        }
    }
}
