//! downwardAPI: files with fields of the pod and its resources.

use super::atomic_writer::{File, Payload};
use super::error::VolumeError;
use super::file_owner::FileOwners;
use super::plugin::{Files, FilesRequest, Plugin};
use crate::model::api::{DownwardAPIVolumeFile, DownwardAPIVolumeSource};
use crate::model::fields::{self, NodeAllocatable};
use crate::model::pod::Pod;

/// The API's default mode, if the manifest has none.
pub(super) const DEFAULT_MODE: i32 = 0o644;

/// The limit of problems that are reported for one volume; later items are not read.
/// DIFFERS: upstream reports all.
pub(super) const MAX_PROBLEMS: usize = 10;

impl Plugin for DownwardAPIVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/downward-api"
    }

    fn files(&self) -> Option<&dyn Files> {
        Some(self)
    }
}

impl Files for DownwardAPIVolumeSource {
    fn payload(&self, request: &FilesRequest<'_>) -> Result<Payload, VolumeError> {
        let owners = FileOwners::new(request.sources.has_user_fields, self.default_user);
        let defaults = (self.default_mode, owners);
        payload(request.pod, self.items.as_deref(), defaults, request.sources.allocatable)
    }

    fn is_at_hand(&self, _: &FilesRequest<'_>) -> bool {
        true
    }
}

/// The files of a downward API volume, or of that part of a projected one.
pub(super) fn payload(
    pod: &Pod,
    items: Option<&[DownwardAPIVolumeFile]>,
    (default_mode, owners): (Option<i32>, FileOwners),
    allocatable: &NodeAllocatable,
) -> Result<Payload, VolumeError> {
    let mut payload = Payload::default();
    let mut problems = Vec::new();
    for item in items.unwrap_or_default() {
        let value = if let Some(field) = &item.field_ref {
            fields::file_field(pod, &field.field_path)
        } else if let Some(selector) = &item.resource_field_ref {
            fields::resource_field(pod, None, selector, allocatable)
        } else {
            Ok(String::new())
        };
        match value {
            Ok(value) => {
                let mode = item.mode.or(default_mode).unwrap_or(DEFAULT_MODE);
                let mode = u32::try_from(mode).unwrap_or_default();
                let owner = owners.owner(item.user);
                payload.insert(&item.path, File { owner, ..File::new(value.into_bytes(), mode) })?;
            }
            Err(error) => problems.push(error.to_string()),
        }
        if problems.len() >= MAX_PROBLEMS {
            break;
        }
    }
    match problems.as_slice() {
        [] => Ok(payload),
        [problem] => Err(VolumeError::Content { problem: problem.clone() }),
        many => Err(VolumeError::Content { problem: format!("[{}]", many.join(", ")) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn collect(items: serde_json::Value, default_mode: Option<i32>) -> Result<Payload, String> {
        let pod = json!({"metadata": {"name": "p", "labels": {"b": "2", "a": "1"}},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "150m"}}}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let items: Vec<DownwardAPIVolumeFile> = serde_json::from_value(items).unwrap();
        let defaults = (default_mode, FileOwners::new(true, Some(5)));
        payload(&pod, Some(&items), defaults, &NodeAllocatable::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn files_have_the_owners_that_the_pod_names() {
        let mut own = field("own", "metadata.name");
        own["user"] = json!(7);
        let files = collect(json!([own, field("other", "metadata.name")]), None).unwrap();
        let owner = |path: &str| files.get(path).unwrap().owner;
        assert_eq!((owner("own"), owner("other")), (Some(7), Some(5)));
    }

    fn field(path: &str, field: &str) -> serde_json::Value {
        json!({"path": path, "fieldRef": {"fieldPath": field}})
    }

    #[test]
    fn files_have_values_and_modes() {
        let cpu = json!({"path": "cpu", "mode": 256,
            "resourceFieldRef": {"containerName": "main", "resource": "limits.cpu", "divisor": "1m"}});
        let items = json!([field("deep//labels", "metadata.labels"), cpu]);
        let files = collect(items.clone(), Some(0o440)).unwrap();
        let file = |path: &str| files.get(path).map(|file| (&*file.data, file.mode));
        assert_eq!(file("deep/labels"), Some((&b"a=\"1\"\nb=\"2\""[..], 0o440)));
        assert_eq!(file("cpu"), Some((&b"150"[..], 0o400)));
        let files = collect(items, None).unwrap();
        assert_eq!(files.get("deep/labels").map(|file| file.mode), Some(0o644));
        assert_eq!(collect(json!([]), None), Ok(Payload::default()));
    }

    #[test]
    fn error_names_all_invalid_items() {
        let unknown =
            json!({"path": "x", "resourceFieldRef": {"containerName": "no", "resource": "limits.cpu"}});
        assert_eq!(
            collect(json!([field("n", "spec.nodeName"), unknown]), None).unwrap_err(),
            "[unsupported fieldPath: spec.nodeName, container no not found]"
        );
        assert_eq!(
            collect(json!([field("../n", "metadata.name")]), None).unwrap_err(),
            "invalid path: must not contain '..': ../n"
        );
    }
}
