//! What the start of a pod needs of the API server and no stored object can show: such a pod waits for the
//! API server (pure, but for what `read` reads). Objects that are not stored are no gaps: see
//! [`super::start_keys_of`].

use std::collections::BTreeSet;

use super::super::volume_claims::{OFFLINE_VOLUMES, USE_ATTACHED, uses_attached};
use super::{Needs, Purpose, ReadStored, driver_key};
use crate::model::api::PodResourceClaim;
use crate::model::persistent::{self, Source, Spec};
use crate::model::pod::Pod;
use crate::model::storage::CsiDriver;

/// The gaps of a pod, each as the text for the user.
pub(super) fn gaps_of(pod: &Pod, read: ReadStored<'_>) -> Vec<String> {
    if pod.is_static() || pod.is_mirror() {
        return Vec::new();
    }
    let mut needs = Needs { pod, read, purpose: Purpose::Start, keys: BTreeSet::new() };
    let claims = pod.spec().resource_claims.iter().flatten();
    let unmade = claims.filter(|claim| !is_made(pod, claim));
    let mut gaps: Vec<String> = unmade
        .map(|claim| format!("resource claim {}: not made from its template when last seen", claim.name))
        .collect();
    for volume in pod.spec().volumes.iter().flatten() {
        let spec = match persistent::claim_name(pod, volume) {
            Some(wanted) => needs.claim(&wanted),
            None => Spec::inline(pod, volume),
        };
        let gap = spec.and_then(|spec| gap_of_spec(&needs, &spec));
        gaps.extend(gap.map(|what| format!("volume {}: {what}", volume.name)));
    }
    gaps
}

/// Whether the name of the claim is known, or that there is none: a controller writes that into the status.
fn is_made(pod: &Pod, claim: &PodResourceClaim) -> bool {
    let status = pod.object().status.as_ref();
    let made = status.and_then(|status| status.resource_claim_statuses.as_ref());
    claim.resource_claim_template_name.is_none()
        || claim.resource_claim_name.is_some()
        || made.into_iter().flatten().any(|made| made.name == claim.name)
}

fn gap_of_spec(needs: &Needs<'_>, spec: &Spec) -> Option<String> {
    // Every kind, so that the compiler reports a new one.
    match &spec.source {
        Source::HostPath(_) | Source::Local(_) | Source::Nfs(_) | Source::Flex(_) | Source::Other(_) => None,
        Source::Iscsi(_) | Source::Fc(_) => {
            Some("a controller attaches it, and only the API server knows whether it is attached".to_owned())
        }
        Source::Csi(source) => {
            let driver = needs.stored::<Option<CsiDriver>>(&driver_key(&source.driver)).flatten();
            // An inline volume is made for the pod, and attached by nothing.
            let is_attached = spec.is_persistent && driver.unwrap_or_default().spec.attaches();
            (is_attached && !uses_attached(needs.pod)).then(|| {
                format!(
                    "a controller attaches it, and the pod has no annotation {OFFLINE_VOLUMES}: {USE_ATTACHED}"
                )
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::api;
    use crate::offline::{Key, Kind};
    use crate::util::secret::Secret;
    use serde_json::{Value, json};

    fn gaps(mut object: Value, stored: &[(Key, Value)]) -> Vec<String> {
        for (field, value) in [("name", "p"), ("namespace", "n"), ("uid", "u")] {
            object["metadata"][field] = json!(value);
        }
        object["spec"]["containers"] = json!([{"name": "c", "image": "i"}]);
        let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
        gaps_of(&pod, &|key| {
            let (_, body) = stored.iter().find(|(other, _)| other == key)?;
            Some(Secret::new(body.to_string().into_bytes()))
        })
    }

    #[test]
    fn what_is_stored_when_it_is_read_is_no_gap() {
        let spec = json!({"resourceClaims": [{"name": "gpu", "resourceClaimName": "x"}], "volumes": [
            {"name": "map", "configMap": {"name": "m"}}, {"name": "host", "hostPath": {"path": "/x"}},
            {"name": "ca", "projected": {"sources": [
                {"serviceAccountToken": {"path": "t"}},
                {"clusterTrustBundle": {"name": "b", "path": "ca.pem"}},
                {"podCertificate": {"signerName": "example.org/s", "keyType": "ED25519"}}]}},
            {"name": "inline", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}}]});
        assert!(gaps(json!({"spec": spec}), &[]).is_empty());
    }

    #[test]
    fn claim_of_a_template_is_a_gap_until_a_controller_has_made_it() {
        let spec = json!({"resourceClaims": [
            {"name": "gpu", "resourceClaimTemplateName": "t"}, {"name": "nic", "resourceClaimTemplateName": "t"}]});
        let gap = |name: &str| format!("resource claim {name}: not made from its template when last seen");
        assert_eq!(gaps(json!({"spec": spec}), &[]), [gap("gpu"), gap("nic")]);
        // One needs no claim.
        let statuses = json!([{"name": "gpu", "resourceClaimName": "p-gpu-x"}, {"name": "nic"}]);
        let object = json!({"spec": spec, "status": {"resourceClaimStatuses": statuses}});
        assert!(gaps(object, &[]).is_empty());
    }

    #[test]
    fn attached_volume_has_a_gap_unless_the_pod_has_the_annotation() {
        let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]);
        let plain = json!({"metadata": {}, "spec": {"volumes": volumes}});
        let mut bold = plain.clone();
        bold["metadata"]["annotations"][OFFLINE_VOLUMES] = json!(USE_ATTACHED);
        let claim = (
            Key::namespaced(Kind::Claim, "n", "c"),
            json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {"volumeName": "v"},
                "status": {"phase": "Bound"}}),
        );
        let volume = |source: Value| {
            let spec = json!({"spec": source, "metadata": {"name": "v"}});
            (Key::new(Kind::Volume, "v"), spec)
        };
        let csi = volume(json!({"csi": {"driver": "d", "volumeHandle": "h"}}));
        let driver =
            |attaches: bool| (Key::new(Kind::CsiDriver, "d"), json!({"spec": {"attachRequired": attaches}}));
        let attached = "volume data: a controller attaches it, and the pod has no annotation \
                        coracle.dev/offline-volumes: use-attached";
        assert_eq!(gaps(plain.clone(), &[claim.clone(), csi.clone()]), [attached], "the default");
        assert_eq!(gaps(plain.clone(), &[claim.clone(), csi.clone(), driver(true)]), [attached]);
        assert!(gaps(plain.clone(), &[claim.clone(), csi.clone(), driver(false)]).is_empty());
        assert!(gaps(bold.clone(), &[claim.clone(), csi, driver(true)]).is_empty());
        // Of these, no attachment is stored.
        let fc = volume(json!({"fc": {"targetWWNs": ["50060e801049cfd1"], "lun": 0}}));
        let only =
            "volume data: a controller attaches it, and only the API server knows whether it is attached";
        assert_eq!(gaps(plain, &[claim.clone(), fc.clone()]), [only]);
        assert_eq!(gaps(bold, &[claim, fc]), [only]);
    }
}
