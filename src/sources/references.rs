//! Refuses static pods that name objects that only an API server has (Go: pkg/api/pod
//! HasAPIObjectReference).
//!
//! DIFFERS: upstream also refuses ConfigMaps and Secrets, and image pull secrets; here they come
//! from files of the node (`kube::LocalObjects`).

use super::problem::Fault;
use crate::model::api::{Pod, Volume};

/// All references to API objects in a static pod.
pub(super) fn forbidden(pod: &Pod) -> Vec<Fault> {
    let mut found = References(Vec::new());
    let Some(spec) = &pod.spec else { return found.0 };
    if !spec.service_account_name.as_deref().unwrap_or_default().is_empty() {
        let field = if spec.service_account_name == spec.service_account {
            "spec.serviceAccount"
        } else {
            "spec.serviceAccountName"
        };
        found.add(field, "serviceaccounts");
    }
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        found.add("spec.resourceClaims", "resourceclaims");
    }
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        found.volume(&format!("spec.volumes[{index}]"), volume);
    }
    found.0
}

struct References(Vec<Fault>);

impl References {
    fn add(&mut self, field: &str, resource: &str) {
        self.0.push(Fault::in_field(field, format!("static pods may not reference {resource}")));
    }

    fn volume(&mut self, path: &str, volume: &Volume) {
        for (set, name, resource) in [
            (volume.csi.is_some(), "csi", "csidrivers"),
            (volume.persistent_volume_claim.is_some(), "persistentVolumeClaim", "persistentvolumeclaims"),
            (volume.ephemeral.is_some(), "ephemeral", "persistentvolumeclaims"),
            (volume.glusterfs.is_some(), "glusterfs", "endpoints"),
            (volume.azure_file.is_some(), "azureFile", "secrets"),
        ] {
            if set {
                self.add(&format!("{path}.{name}"), resource);
            }
        }
        self.volume_secrets(path, volume);
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for (index, source) in sources.enumerate() {
            for (set, name, resource) in [
                (source.service_account_token.is_some(), "serviceAccountToken", "serviceaccounts"),
                (source.cluster_trust_bundle.is_some(), "clusterTrustBundle", "clustertrustbundles"),
                (source.pod_certificate.is_some(), "podCertificate", "podcertificates"),
            ] {
                if set {
                    self.add(&format!("{path}.projected.sources[{index}].{name}"), resource);
                }
            }
        }
    }

    /// Network volumes are allowed, but not with credentials from a secret.
    fn volume_secrets(&mut self, path: &str, volume: &Volume) {
        for (set, name) in [
            (volume.cephfs.as_ref().is_some_and(|source| source.secret_ref.is_some()), "cephfs"),
            (volume.cinder.as_ref().is_some_and(|source| source.secret_ref.is_some()), "cinder"),
            (volume.flex_volume.as_ref().is_some_and(|source| source.secret_ref.is_some()), "flexVolume"),
            (volume.rbd.as_ref().is_some_and(|source| source.secret_ref.is_some()), "rbd"),
            (volume.iscsi.as_ref().is_some_and(|source| source.secret_ref.is_some()), "iscsi"),
            (volume.storageos.as_ref().is_some_and(|source| source.secret_ref.is_some()), "storageos"),
            (volume.scale_io.is_some(), "scaleIO"),
        ] {
            if set {
                self.add(&format!("{path}.{name}.secretRef"), "secrets");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(spec: Value, expected: &[(&str, &str)]) {
        let mut spec = spec;
        spec.as_object_mut().unwrap().entry("containers").or_insert(json!([]));
        let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        let found: Vec<(String, String)> =
            forbidden(&pod).into_iter().map(|fault| (fault.field.unwrap(), fault.message)).collect();
        let expected: Vec<(String, String)> = expected
            .iter()
            .map(|(field, resource)| {
                ((*field).to_owned(), format!("static pods may not reference {resource}"))
            })
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn local_volumes_and_fields_are_accepted() {
        check(
            json!({"containers": [{"name": "c", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}],
                "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}},
                    {"name": "c", "downwardAPI": {}}, {"name": "d", "image": {}},
                    {"name": "e", "nfs": {"server": "s", "path": "/"}},
                    {"name": "f", "projected": {"sources": [{"downwardAPI": {}}]}}]}),
            &[],
        );
    }

    #[test]
    fn config_maps_and_secrets_are_accepted() {
        check(
            json!({"imagePullSecrets": [{"name": "x"}],
                "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "s"}}]}],
                "containers": [{"name": "c",
                    "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]}],
                "volumes": [{"name": "a", "secret": {"secretName": "s"}}, {"name": "b", "configMap": {"name": "m"}},
                    {"name": "c", "projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "m"}}]}}]}),
            &[],
        );
    }

    #[test]
    fn references_to_api_objects_are_refused() {
        check(json!({"serviceAccountName": "x"}), &[("spec.serviceAccountName", "serviceaccounts")]);
        check(json!({"resourceClaims": [{"name": "x"}]}), &[("spec.resourceClaims", "resourceclaims")]);
        check(
            json!({"volumes": [{"name": "a", "secret": {"secretName": "s"}},
                {"name": "b", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "c", "projected": {"sources": [{"downwardAPI": {}}, {"serviceAccountToken": {"path": "t"}}]}},
                {"name": "d", "rbd": {"image": "i", "monitors": [], "secretRef": {"name": "s"}}}]}),
            &[
                ("spec.volumes[1].persistentVolumeClaim", "persistentvolumeclaims"),
                ("spec.volumes[2].projected.sources[1].serviceAccountToken", "serviceaccounts"),
                ("spec.volumes[3].rbd.secretRef", "secrets"),
            ],
        );
    }
}
