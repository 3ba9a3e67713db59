//! Objects of the group `storage.k8s.io`, and the CSI source of a volume. They hold only the fields
//! that a node reads.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The name of a Secret and its namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct SecretReference {
    pub name: String,
    pub namespace: String,
}

/// `csi` of a persistent volume. For an inline volume the handle is empty until it is computed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct CsiVolumeSource {
    pub driver: String,
    pub volume_handle: String,
    pub read_only: bool,
    pub fs_type: Option<String>,
    pub volume_attributes: BTreeMap<String, String>,
    pub node_stage_secret_ref: Option<SecretReference>,
    pub node_publish_secret_ref: Option<SecretReference>,
    pub node_expand_secret_ref: Option<SecretReference>,
}

/// A CSIDriver object. A driver without one has the defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct CsiDriver {
    pub spec: CsiDriverSpec,
}

/// `spec` of a CSIDriver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct CsiDriverSpec {
    /// Absent: true.
    pub attach_required: Option<bool>,
    pub pod_info_on_mount: Option<bool>,
    pub fs_group_policy: Option<FsGroupPolicy>,
    pub volume_lifecycle_modes: Vec<String>,
    pub token_requests: Vec<TokenRequest>,
    pub requires_republish: Option<bool>,
    #[serde(rename = "seLinuxMount")]
    pub selinux_mount: Option<bool>,
    /// Seconds between updates of the allocatable count; absent: no updates.
    pub node_allocatable_update_period_seconds: Option<i64>,
    pub service_account_token_in_secrets: Option<bool>,
}

impl CsiDriverSpec {
    /// Whether a controller attaches the volumes of the driver to nodes.
    #[must_use]
    pub fn attaches(&self) -> bool {
        self.attach_required != Some(false)
    }
}

/// `spec.fsGroupPolicy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub enum FsGroupPolicy {
    #[default]
    ReadWriteOnceWithFSType,
    File,
    None,
}

/// An entry of `spec.tokenRequests`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct TokenRequest {
    pub audience: String,
    pub expiration_seconds: Option<i64>,
}

/// A VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct VolumeAttachment {
    pub metadata: AttachmentMeta,
    pub spec: VolumeAttachmentSpec,
    pub status: VolumeAttachmentStatus,
}

impl VolumeAttachment {
    /// Whether the volume is attached and stays so.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.status.attached && self.metadata.deletion_timestamp.is_none()
    }
}

/// `spec` of a VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct VolumeAttachmentSpec {
    pub source: AttachmentSource,
}

/// `spec.source` of a VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct AttachmentSource {
    pub persistent_volume_name: Option<String>,
}

/// `metadata` of a VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct AttachmentMeta {
    pub name: String,
    pub deletion_timestamp: Option<String>,
}

/// `status` of a VolumeAttachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct VolumeAttachmentStatus {
    pub attached: bool,
    pub attachment_metadata: BTreeMap<String, String>,
    pub attach_error: Option<AttachError>,
}

/// `status.attachError`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct AttachError {
    pub message: String,
    /// The gRPC code, if the driver gave one.
    pub error_code: Option<i32>,
}

/// An access mode of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub enum AccessMode {
    ReadWriteOnce,
    ReadOnlyMany,
    ReadWriteMany,
    ReadWriteOncePod,
}

impl AccessMode {
    /// The mode with this name in the API.
    #[must_use]
    pub fn parse(text: &str) -> Option<AccessMode> {
        Some(match text {
            "ReadWriteOnce" => AccessMode::ReadWriteOnce,
            "ReadOnlyMany" => AccessMode::ReadOnlyMany,
            "ReadWriteMany" => AccessMode::ReadWriteMany,
            "ReadWriteOncePod" => AccessMode::ReadWriteOncePod,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_read_with_defaults_for_absent_fields() {
        let driver: CsiDriver = serde_json::from_str(
            r#"{"kind":"CSIDriver","metadata":{"name":"d"},"spec":{"attachRequired":false,
            "podInfoOnMount":true,"fsGroupPolicy":"File","volumeLifecycleModes":["Ephemeral"],
            "tokenRequests":[{"audience":"a","expirationSeconds":3600}],"seLinuxMount":true}}"#,
        )
        .unwrap();
        let spec = driver.spec;
        assert_eq!(spec.attach_required, Some(false));
        assert_eq!(spec.fs_group_policy, Some(FsGroupPolicy::File));
        assert_eq!(spec.volume_lifecycle_modes, ["Ephemeral"]);
        assert_eq!(spec.token_requests.first().map(|request| request.audience.as_str()), Some("a"));
        assert_eq!((spec.selinux_mount, spec.requires_republish), (Some(true), None));
        let attachment: VolumeAttachment = serde_json::from_str(
            r#"{"metadata":{"name":"csi-1"},"status":{"attached":true,"attachmentMetadata":{"p":"/dev/x"}}}"#,
        )
        .unwrap();
        assert!(attachment.status.attached && attachment.status.attach_error.is_none());
        assert_eq!(serde_json::from_str::<VolumeAttachment>("{}").unwrap(), VolumeAttachment::default());
        assert_eq!(AccessMode::parse("ReadWriteOncePod"), Some(AccessMode::ReadWriteOncePod));
        assert_eq!(AccessMode::parse("x"), None);
    }
}
