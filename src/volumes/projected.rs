//! projected: files of several sources in one volume.
//!
//! DIFFERS: without an API server the Go kubelet refuses every projected volume. Files that
//! follow from the pod alone need none, and are made here.

use super::VolumeError;
use super::atomic_writer::Payload;
use super::downward_api;
use crate::model::api::ProjectedVolumeSource;
use crate::model::fields::NodeAllocatable;
use crate::model::pod::Pod;

/// The files of the volume; of two with one path the later source's.
pub(super) fn payload(
    pod: &Pod,
    volume: &str,
    source: &ProjectedVolumeSource,
    allocatable: &NodeAllocatable,
) -> Result<Payload, VolumeError> {
    let mut payload = Payload::default();
    for projection in source.sources.iter().flatten() {
        let from_the_api = projection.config_map.is_some()
            || projection.secret.is_some()
            || projection.service_account_token.is_some()
            || projection.cluster_trust_bundle.is_some()
            || projection.pod_certificate.is_some();
        if from_the_api {
            return Err(VolumeError::Content {
                problem: format!(
                    "cannot setup projected volume {volume} because kube client is not configured"
                ),
            });
        }
        if let Some(downward) = &projection.downward_api {
            let mode = source.default_mode;
            payload.extend(downward_api::payload(pod, downward.items.as_deref(), mode, allocatable)?)?;
        }
    }
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn collect(source: serde_json::Value) -> Result<Payload, String> {
        let pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": []}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let source: ProjectedVolumeSource = serde_json::from_value(source).unwrap();
        payload(&pod, "v", &source, &NodeAllocatable::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn later_sources_win() {
        let source = |path: &str, field: &str| json!({"downwardAPI": {"items": [{"path": path, "fieldRef": {"fieldPath": field}}]}});
        let files = collect(json!({"defaultMode": 256, "sources": [
            source("a", "metadata.name"), source("b", "metadata.name"), source("a", "metadata.uid")]}))
        .unwrap();
        let file = |path: &str| files.get(path).map(|file| (file.data.as_slice(), file.mode));
        assert_eq!(file("a"), Some((&b"u"[..], 0o400)));
        assert_eq!(file("b"), Some((&b"p"[..], 0o400)));
        assert_eq!(collect(json!({})), Ok(Payload::default()));
    }

    #[test]
    fn what_needs_an_api_server_says_so() {
        for source in [
            json!({"secret": {"name": "s"}}),
            json!({"configMap": {"name": "c"}}),
            json!({"serviceAccountToken": {"path": "token"}}),
            json!({"clusterTrustBundle": {"path": "ca"}}),
        ] {
            assert_eq!(
                collect(json!({"sources": [source]})).unwrap_err(),
                "cannot setup projected volume v because kube client is not configured"
            );
        }
    }
}
