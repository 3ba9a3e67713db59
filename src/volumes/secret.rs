//! secret: the keys of a Secret as files that never reach a disk.

use super::atomic_writer::Payload;
use super::config_map::Choice;
use super::error::VolumeError;
use super::file_owner::FileOwners;
use super::plugin::{Files, FilesRequest, Plugin};
use crate::kube::PodObjects;
use crate::kube::objects::Kind;
use crate::model::api::SecretVolumeSource;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

impl Plugin for SecretVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/secret"
    }

    fn describe(&self) -> Option<String> {
        self.secret_name.clone()
    }

    fn files(&self) -> Option<&dyn Files> {
        Some(self)
    }
}

impl Files for SecretVolumeSource {
    fn payload(&self, request: &FilesRequest<'_>) -> Result<Payload, VolumeError> {
        let owners = FileOwners::new(request.sources.has_user_fields, self.default_user);
        payload(request.objects()?, request.pod, self, owners, request.stop)
    }

    fn is_at_hand(&self, request: &FilesRequest<'_>) -> bool {
        request.has(Kind::Secret, self.secret_name.as_deref().unwrap_or_default())
    }
}

/// The files of a secret volume.
pub(super) fn payload(
    objects: PodObjects<'_>,
    pod: &Pod,
    source: &SecretVolumeSource,
    owners: FileOwners,
    stop: &StopToken,
) -> Result<Payload, VolumeError> {
    let name = source.secret_name.as_deref().unwrap_or_default();
    let items = source.items.as_deref();
    let choice = Choice {
        kind: Kind::Secret,
        name,
        items,
        default_mode: source.default_mode,
        owners,
        optional: source.optional,
    };
    choice.payload(objects.secret(pod.namespace(), name, stop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::objects::{Key, Object, Objects};
    use serde_json::{Value, json};

    #[test]
    fn missing_secret_or_key_has_upstreams_error() {
        let object = Object { data: [("pw".to_owned(), b"x".to_vec())].into(), ..Object::default() };
        let objects = Objects::fixed(vec![(Key::new(Kind::Secret, "n", "s"), object)]);
        objects.set(&Key::new(Kind::Secret, "n", "nope"), None);
        let pod =
            json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
        let collect = |source: Value| {
            let source: SecretVolumeSource = serde_json::from_value(source).unwrap();
            let owners = FileOwners::new(true, source.default_user);
            payload(PodObjects::Api(&objects), &pod, &source, owners, &StopToken::never())
                .map_err(|error| error.to_string())
        };
        let files = collect(json!({"secretName": "s", "defaultMode": 0o400})).unwrap();
        assert_eq!(files.get("pw").map(|file| (&*file.data, file.mode)), Some((&b"x"[..], 0o400)));
        let owned = collect(json!({"secretName": "s", "defaultUser": 1000})).unwrap();
        assert_eq!(owned.get("pw").map(|file| (file.mode, file.owner)), Some((0o644, Some(1000))));
        assert!(!format!("{files:?}").contains("120"), "content is not printed");
        assert_eq!(collect(json!({"secretName": "nope"})).unwrap_err(), "secret \"nope\" not found");
        assert_eq!(
            collect(json!({"secretName": "s", "items": [{"key": "k", "path": "p"}]})).unwrap_err(),
            "references non-existent secret key: k"
        );
    }
}
