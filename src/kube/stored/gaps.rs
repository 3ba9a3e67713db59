//! What the start of a pod needs of the API server and the store does not have: such a pod waits for the
//! API server (pure, but for what `read` reads).

use std::collections::BTreeSet;

use super::{Needs, ReadStored, driver_key};
use crate::model::api::VolumeProjection;
use crate::model::persistent::{self, Source, Spec};
use crate::model::pod::Pod;
use crate::model::storage::CsiDriver;

/// The gaps of a pod, each as the text for the user.
pub(in crate::kube) fn gaps_of(pod: &Pod, read: ReadStored<'_>) -> Vec<String> {
    if pod.is_static() || pod.is_mirror() {
        return Vec::new();
    }
    let mut needs = Needs { pod, read, keys: BTreeSet::new() };
    let claims = pod.spec().resource_claims.iter().flatten();
    let mut gaps: Vec<String> =
        claims.map(|claim| format!("resource claim {}: never stored", claim.name)).collect();
    for volume in pod.spec().volumes.iter().flatten() {
        let name = &volume.name;
        for source in volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten()) {
            gaps.extend(gap_of_projection(source).map(|what| format!("volume {name}: {what}")));
        }
        let spec = match persistent::claim_name(pod, volume) {
            Some(wanted) => needs.claim(&wanted),
            None => Spec::inline(pod, volume),
        };
        if let Some(spec) = spec {
            gaps.extend(gaps_of_spec(&needs, &spec).into_iter().map(|what| format!("volume {name}: {what}")));
        }
    }
    gaps
}

fn gap_of_projection(source: &VolumeProjection) -> Option<&'static str> {
    // Every field, so that the compiler reports a new one.
    let VolumeProjection {
        config_map: _,
        secret: _,
        service_account_token: _,
        downward_api: _,
        cluster_trust_bundle,
        pod_certificate,
    } = source;
    if cluster_trust_bundle.is_some() {
        return Some("trust bundles are never stored");
    }
    pod_certificate.as_ref().map(|_| "certificates of pods are never stored")
}

fn gaps_of_spec(needs: &Needs<'_>, spec: &Spec) -> Vec<&'static str> {
    const ATTACHED: &str = "a controller attaches it, and only the API server knows whether it is attached";
    const SECRET: &str = "its Secret is never stored";
    // Every kind, so that the compiler reports a new one.
    let (is_attached, has_secret) = match &spec.source {
        Source::HostPath(_) | Source::Local(_) | Source::Nfs(_) | Source::Other(_) => (false, false),
        Source::Iscsi(source) => (true, source.secret_ref.is_some()),
        Source::Fc(_) => (true, false),
        Source::Flex(source) => (false, source.secret_ref.is_some()),
        Source::Csi(source) => {
            let driver = needs.stored::<Option<CsiDriver>>(&driver_key(&source.driver)).flatten();
            // An inline volume is made for the pod, and attached by nothing.
            let is_attached = spec.is_persistent && driver.unwrap_or_default().spec.attaches();
            let secrets = [&source.node_stage_secret_ref, &source.node_publish_secret_ref];
            (is_attached, secrets.iter().any(|secret| secret.is_some()))
        }
    };
    let gaps = [is_attached.then_some(ATTACHED), has_secret.then_some(SECRET)];
    gaps.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::api;
    use crate::offline::{Key, Kind};
    use crate::util::secret::Secret;
    use serde_json::{Value, json};

    fn gaps(spec: Value, stored: &[(Key, Value)]) -> Vec<String> {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
        gaps_of(&pod, &|key| {
            let (_, body) = stored.iter().find(|(other, _)| other == key)?;
            Some(Secret::new(body.to_string().into_bytes()))
        })
    }

    #[test]
    fn what_only_the_api_server_has_is_named() {
        let containers = json!([{"name": "c", "image": "i"}]);
        let plain = json!({"containers": containers, "volumes": [
            {"name": "map", "configMap": {"name": "m"}}, {"name": "host", "hostPath": {"path": "/x"}},
            {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]});
        assert!(gaps(plain, &[]).is_empty());
        let spec = json!({"containers": containers, "resourceClaims": [{"name": "gpu", "resourceClaimName": "x"}],
            "volumes": [
                {"name": "ca", "projected": {"sources": [
                    {"clusterTrustBundle": {"name": "b", "path": "ca.pem"}},
                    {"podCertificate": {"signerName": "example.org/s", "keyType": "ED25519"}}]}},
                {"name": "inline", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}}]});
        assert_eq!(
            gaps(spec, &[]),
            [
                "resource claim gpu: never stored",
                "volume ca: trust bundles are never stored",
                "volume ca: certificates of pods are never stored",
                "volume inline: its Secret is never stored",
            ]
        );
    }

    #[test]
    fn volume_of_a_driver_that_needs_no_attachment_has_no_gap() {
        let spec = json!({"containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]});
        let claim = (
            Key::namespaced(Kind::Claim, "n", "c"),
            json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {"volumeName": "v"},
                "status": {"phase": "Bound"}}),
        );
        let volume = (
            Key::new(Kind::Volume, "v"),
            json!({"metadata": {"name": "v"}, "spec": {"csi": {"driver": "d", "volumeHandle": "h"}}}),
        );
        let driver =
            |attaches: bool| (Key::new(Kind::CsiDriver, "d"), json!({"spec": {"attachRequired": attaches}}));
        let attached =
            "volume data: a controller attaches it, and only the API server knows whether it is attached";
        assert_eq!(gaps(spec.clone(), &[claim.clone(), volume.clone()]), [attached], "the default");
        assert_eq!(gaps(spec.clone(), &[claim.clone(), volume.clone(), driver(true)]), [attached]);
        assert!(gaps(spec, &[claim, volume, driver(false)]).is_empty());
    }
}
