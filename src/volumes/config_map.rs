//! configMap: the keys of a ConfigMap as files. Secrets and sources of projected volumes use the
//! same code.

use std::collections::HashMap;
use std::sync::Arc;

use super::atomic_writer::{File, PathError, Payload};
use super::downward_api::DEFAULT_MODE;
use super::error::VolumeError;
use super::file_owner::FileOwners;
use super::plugin::{Files, FilesRequest, Plugin};
use crate::kube::PodObjects;
use crate::kube::objects::{Kind, Object, ObjectError};
use crate::model::api::{ConfigMapVolumeSource, KeyToPath};
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

impl Plugin for ConfigMapVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/configmap"
    }

    fn describe(&self) -> Option<String> {
        Some(self.name.clone())
    }

    fn files(&self) -> Option<&dyn Files> {
        Some(self)
    }
}

impl Files for ConfigMapVolumeSource {
    fn payload(&self, request: &FilesRequest<'_>) -> Result<Payload, VolumeError> {
        let owners = FileOwners::new(request.sources.has_user_fields, self.default_user);
        payload(request.objects()?, request.pod, self, owners, request.stop)
    }

    fn is_at_hand(&self, request: &FilesRequest<'_>) -> bool {
        request.has(Kind::ConfigMap, &self.name)
    }

    fn is_on_disk(&self) -> bool {
        true
    }
}

/// The files of a configMap volume.
pub(super) fn payload(
    objects: PodObjects<'_>,
    pod: &Pod,
    source: &ConfigMapVolumeSource,
    owners: FileOwners,
    stop: &StopToken,
) -> Result<Payload, VolumeError> {
    let items = source.items.as_deref();
    let choice = Choice {
        kind: Kind::ConfigMap,
        name: &source.name,
        items,
        default_mode: source.default_mode,
        owners,
        optional: source.optional,
    };
    choice.payload(objects.config_map(pod.namespace(), &source.name, stop))
}

/// The keys of an object that become files, and their paths and modes.
pub(super) struct Choice<'a> {
    pub(super) kind: Kind,
    pub(super) name: &'a str,
    /// `None` or empty: all keys, each under its own name.
    pub(super) items: Option<&'a [KeyToPath]>,
    pub(super) default_mode: Option<i32>,
    pub(super) owners: FileOwners,
    /// Whether the object and its keys may be missing.
    pub(super) optional: Option<bool>,
}

impl Choice<'_> {
    /// The files, from the state of the object.
    pub(super) fn payload(&self, object: Result<Arc<Object>, ObjectError>) -> Result<Payload, VolumeError> {
        let optional = self.optional == Some(true);
        let object = match object {
            Ok(object) => object,
            Err(error) if optional && error.is_not_found() => Arc::default(),
            Err(ObjectError::Stopping) => return Err(VolumeError::Stopping),
            Err(error) => return Err(error.into()),
        };
        let file = |data: Arc<[u8]>, mode: Option<i32>, user: Option<i64>| {
            let mode = mode.or(self.default_mode).unwrap_or(DEFAULT_MODE);
            let owner = self.owners.owner(user);
            File { owner, ..File::new(data, u32::try_from(mode).unwrap_or_default()) }
        };
        let mut payload = Payload::default();
        match self.items.unwrap_or_default() {
            [] => {
                for (key, data) in object.data.iter().chain(&object.binary_data) {
                    payload
                        .insert(key, file(data.as_slice().into(), None, None))
                        .map_err(|error| self.refused(error))?;
                }
            }
            items => {
                // Items that refer to the same value share one copy.
                let mut copies: HashMap<&str, Arc<[u8]>> = HashMap::new();
                for item in items {
                    match object.get(&item.key) {
                        Some(data) => {
                            let data = copies.entry(&item.key).or_insert_with(|| data.into());
                            payload
                                .insert(&item.path, file(Arc::clone(data), item.mode, item.user))
                                .map_err(|error| self.refused(error))?;
                        }
                        None if optional => {}
                        None => return Err(self.missing(&item.key)),
                    }
                }
            }
        }
        Ok(payload)
    }

    /// A wrong path comes from the pod; the size also depends on the object.
    fn refused(&self, error: PathError) -> VolumeError {
        match error {
            PathError::TooMany | PathError::TooLarge => {
                VolumeError::Content { problem: format!("{} {:?}: {error}", self.kind.as_str(), self.name) }
            }
            error => error.into(),
        }
    }

    fn missing(&self, key: &str) -> VolumeError {
        let problem = match self.kind {
            Kind::ConfigMap => format!("configmap references non-existent config key: {key}"),
            Kind::Secret => format!("references non-existent secret key: {key}"),
        };
        VolumeError::Content { problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::objects::{Key, Objects};
    use serde_json::{Value, json};
    use std::collections::BTreeMap;

    fn collect(source: Value) -> Result<Payload, String> {
        let object = Object {
            data: [("a".to_owned(), b"1".to_vec()), ("b".to_owned(), b"2".to_vec())].into(),
            binary_data: [("raw".to_owned(), vec![0, 255])].into(),
            ..Object::default()
        };
        let objects = Objects::fixed(vec![(Key::new(Kind::ConfigMap, "n", "m"), object)]);
        objects.set(&Key::new(Kind::ConfigMap, "n", "gone"), None);
        let pod =
            json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let source: ConfigMapVolumeSource = serde_json::from_value(source).unwrap();
        let owners = FileOwners::new(true, source.default_user);
        payload(PodObjects::Api(&objects), &pod, &source, owners, &StopToken::never())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn files_have_the_owners_that_the_pod_names() {
        let items = json!([{"key": "a", "path": "x/a", "user": 7}, {"key": "b", "path": "b"}]);
        for (default_user, own, other) in [(json!(5), Some(7), Some(5)), (json!(null), Some(7), None)] {
            let source = json!({"name": "m", "defaultUser": default_user, "items": items});
            let files = collect(source).unwrap();
            let file = |path: &str| files.get(path).map(|file| (file.mode, file.owner));
            assert_eq!(file("x/a"), Some((0o644, own)));
            assert_eq!(file("b"), Some((0o644, other)));
        }
        let all = collect(json!({"name": "m", "defaultUser": 5})).unwrap();
        for path in ["a", "raw"] {
            assert_eq!(all.get(path).unwrap().owner, Some(5), "{path}");
        }
    }

    #[test]
    fn all_keys_or_selected_items_become_files() {
        let files = collect(json!({"name": "m", "defaultMode": 0o440})).unwrap();
        let file = |path: &str| files.get(path).map(|file| (&*file.data, file.mode));
        assert_eq!(file("a"), Some((&b"1"[..], 0o440)));
        assert_eq!(file("raw"), Some((&[0, 255][..], 0o440)));
        let items = json!([{"key": "b", "path": "deep/er"}, {"key": "a", "path": "a", "mode": 0o400}]);
        let files = collect(json!({"name": "m", "items": items})).unwrap();
        let file = |path: &str| files.get(path).map(|file| (&*file.data, file.mode));
        assert_eq!(file("deep/er"), Some((&b"2"[..], 0o644)));
        assert_eq!(file("a"), Some((&b"1"[..], 0o400)));
        assert_eq!(file("b"), None);
    }

    #[test]
    fn items_of_one_key_share_its_value() {
        let items = json!([{"key": "b", "path": "x"}, {"key": "b", "path": "y"}]);
        let files = collect(json!({"name": "m", "items": items})).unwrap();
        let data = |path: &str| &files.get(path).unwrap().data;
        assert!(Arc::ptr_eq(data("x"), data("y")));
    }

    /// An object of 1 MiB can have this many keys. They were compared with each other at each
    /// sync of the pod, for minutes.
    #[test]
    fn object_with_too_many_keys_is_refused_with_its_name() {
        let data = (0..150_000).map(|n| (format!("{n:x}"), Vec::new())).collect();
        for (kind, expected) in [
            (Kind::ConfigMap, "configmap \"m\": more than 10000 files and directories for one volume"),
            (Kind::Secret, "secret \"m\": more than 10000 files and directories for one volume"),
        ] {
            let object = Object { data: BTreeMap::clone(&data), ..Object::default() };
            let owners = FileOwners::default();
            let choice = Choice { kind, name: "m", items: None, default_mode: None, owners, optional: None };
            let found = choice.payload(Ok(Arc::new(object)));
            assert_eq!(found.unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn missing_object_or_key_is_an_error_unless_optional() {
        for (source, expected) in [
            (json!({"name": "gone"}), Err("configmap \"gone\" not found")),
            (json!({"name": "gone", "optional": true}), Ok(())),
            (json!({"name": "gone", "optional": true, "items": [{"key": "k", "path": "p"}]}), Ok(())),
            (
                json!({"name": "m", "items": [{"key": "k", "path": "p"}]}),
                Err("configmap references non-existent config key: k"),
            ),
            (json!({"name": "m", "optional": true, "items": [{"key": "k", "path": "p"}]}), Ok(())),
            (
                json!({"name": "m", "items": [{"key": "a", "path": "../p"}]}),
                Err("invalid path: must not contain '..': ../p"),
            ),
            (json!({"name": "other", "optional": true}), Err("object \"n\"/\"other\" not registered")),
        ] {
            let found = collect(source.clone()).map(|files| assert_eq!(files, Payload::default()));
            assert_eq!(found.as_ref().map_err(String::as_str).copied(), expected, "{source}");
        }
    }
}
