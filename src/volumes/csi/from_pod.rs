//! The request for a volume of a pod (pure).

use std::sync::Arc;

use super::super::empty_dir;
use super::super::error::VolumeError;
use super::super::kind::{Form, Phase};
use super::super::selinux::PodSelinuxLabels;
use super::error::not_begun;
use super::names;
use super::request::{Lifecycle, PodFacts, VolumeRequest};
use super::state::Csi;
use super::volume::CsiVolume;
use crate::kube::volume_claims::uses_attached;
use crate::model::persistent::{Source, Spec, VolumeMode};
use crate::model::pod::Pod;

impl Csi {
    /// The volume of one pod. `spec.source` is [`Source::Csi`].
    ///
    /// # Errors
    /// When the pod cannot have the volume.
    pub(crate) fn of_spec(
        self: &Arc<Csi>,
        pod: &Pod,
        volume: &str,
        spec: &Spec,
    ) -> Result<CsiVolume, VolumeError> {
        let selinux = self.settings.selinux.of_pod(pod, volume);
        Ok(self.volume(request(pod, volume, spec, selinux)?))
    }
}

/// What the pod wants of its volume.
fn request(
    pod: &Pod,
    volume: &str,
    spec: &Spec,
    selinux: PodSelinuxLabels,
) -> Result<VolumeRequest, VolumeError> {
    let Source::Csi(source) = &spec.source else {
        return Err(VolumeError::Unsupported { kind: volume.to_owned() });
    };
    let mut source = source.clone();
    let lifecycle = if spec.is_persistent {
        Lifecycle::Persistent
    } else {
        source.volume_handle = names::inline_handle(pod.uid().as_str(), volume);
        Lifecycle::Ephemeral
    };
    if source.driver.is_empty() || source.volume_handle.is_empty() {
        let text = "kubernetes.io/csi: the volume has no driver or no handle";
        return Err(not_begun(Phase::SetUp, text));
    }
    let context = pod.spec().security_context.as_ref();
    let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
    Ok(VolumeRequest {
        pod: PodFacts {
            uid: pod.uid().clone(),
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            service_account: pod.spec().service_account_name.clone().unwrap_or_default(),
            uses_attached: uses_attached(pod),
        },
        volume: volume.to_owned(),
        spec_name: spec.name.clone(),
        source,
        lifecycle,
        form: match spec.mode {
            VolumeMode::Filesystem => Form::Filesystem,
            VolumeMode::Block => Form::Block,
        },
        access_modes: spec.access_modes.clone(),
        mount_options: spec.mount_options.clone(),
        read_only: spec.read_only,
        fs_group: empty_dir::fs_group(pod),
        fs_group_on_root_mismatch: policy == Some("OnRootMismatch"),
        selinux,
        grow_to: spec.grow_to(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::persistent::{Claim, ClaimName, PersistentVolume};
    use crate::model::storage::AccessMode;

    fn pod() -> Pod {
        let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {
            "containers": [], "serviceAccountName": "a",
            "securityContext": {"fsGroup": 7, "fsGroupChangePolicy": "OnRootMismatch"},
            "volumes": [{"name": "v", "csi": {"driver": "d", "readOnly": true}}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn inline_volume_has_a_handle_of_its_pod() {
        let pod = pod();
        let spec = Spec::inline(&pod, &pod.spec().volumes.as_ref().unwrap()[0]).unwrap();
        let wanted = request(&pod, "v", &spec, PodSelinuxLabels::default()).unwrap();
        assert_eq!(wanted.source.volume_handle, names::inline_handle("u", "v"));
        assert_eq!((wanted.lifecycle, wanted.form), (Lifecycle::Ephemeral, Form::Filesystem));
        assert!(wanted.read_only && wanted.fs_group_on_root_mismatch && wanted.grow_to.is_none());
        assert_eq!((wanted.fs_group, wanted.pod.service_account.as_str()), (Some(7), "a"));
    }

    #[test]
    fn persistent_volume_that_is_larger_than_its_claim_is_grown() {
        let claim: Claim =
            serde_json::from_value(json!({"status": {"capacity": {"storage": "1Gi"}}})).unwrap();
        let volume = |handle: &str| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": {
                "capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteMany", "Unknown"],
                "volumeMode": "Block", "csi": {"driver": "d", "volumeHandle": handle}}}))
            .unwrap()
        };
        let name = ClaimName { name: "c".to_owned(), read_only: false, is_ephemeral: false };
        let from_handle = |handle: &str| {
            request(
                &pod(),
                "v",
                &Spec::persistent(&name, &claim, &volume(handle)),
                PodSelinuxLabels::default(),
            )
        };
        let grown = from_handle("h").unwrap();
        assert_eq!((grown.grow_to, grown.form), (Some(2 << 30), Form::Block));
        assert_eq!((grown.spec_name.as_str(), grown.source.volume_handle.as_str()), ("pv", "h"));
        assert_eq!(grown.access_modes, [AccessMode::ReadWriteMany]);
        assert!(from_handle("").is_err());
    }
}
