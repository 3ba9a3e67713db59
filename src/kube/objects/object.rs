//! A ConfigMap or Secret in the form that pods use, and the objects that a pod names.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Deserialize;

use crate::model::ByteString;
use crate::model::api::{EnvFromSource, EnvVar, VolumeProjection};
use crate::model::pod::Pod;

/// The two kinds of object whose content pods see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Kind {
    ConfigMap,
    Secret,
}

impl Kind {
    /// The name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::ConfigMap => "configmap",
            Kind::Secret => "secret",
        }
    }
}

/// Identifies an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// ConfigMap or Secret.
    pub kind: Kind,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl Key {
    /// The key of an object.
    #[must_use]
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Key {
        Key { kind, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// Whether it is the ConfigMap with the authorities of the cluster that the control plane publishes in
    /// each namespace (Go: pkg/controller/certificates/rootcacertpublisher).
    pub(super) fn is_root_authority(&self) -> bool {
        self.kind == Kind::ConfigMap && self.name == "kube-root-ca.crt"
    }
}

/// The content of an object. Only the names of its keys can be printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Object {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
    /// `type` of a Secret.
    pub secret_type: String,
    /// Whether it never changes.
    pub immutable: bool,
    /// `data`.
    pub data: BTreeMap<String, Vec<u8>>,
    /// `binaryData` of a ConfigMap.
    pub binary_data: BTreeMap<String, Vec<u8>>,
}

impl fmt::Debug for Object {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&String> = self.data.keys().chain(self.binary_data.keys()).collect();
        write!(out, "Object(version {}, keys {keys:?})", self.resource_version)
    }
}

impl Object {
    /// The bytes of a key, from either part.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.data.get(key).or_else(|| self.binary_data.get(key)).map(Vec::as_slice)
    }

    /// Whether all fields that pods see are equal.
    pub(super) fn is_version(&self, other: &Object) -> bool {
        !self.resource_version.is_empty()
            && (&self.uid, &self.resource_version) == (&other.uid, &other.resource_version)
    }
}

/// The JSON of a ConfigMap or a Secret, without the fields that pods do not see.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Stored {
    metadata: StoredMetadata,
    #[serde(rename = "type")]
    secret_type: Option<String>,
    immutable: Option<bool>,
    data: Option<BTreeMap<String, String>>,
    binary_data: Option<BTreeMap<String, ByteString>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct StoredMetadata {
    name: String,
    uid: String,
    resource_version: String,
}

impl Stored {
    /// `metadata.name`.
    pub fn name(&self) -> &str {
        &self.metadata.name
    }

    /// The content of the object. The values of a Secret are base64 text.
    #[must_use]
    pub fn into_object(self, kind: Kind) -> Object {
        let bytes = |text: String| match kind {
            Kind::ConfigMap => text.into_bytes(),
            // API servers store only valid base64.
            Kind::Secret => serde_json::from_value::<ByteString>(text.into()).unwrap_or_default().0,
        };
        let data = self.data.unwrap_or_default();
        let binary_data = self.binary_data.unwrap_or_default();
        Object {
            uid: self.metadata.uid,
            resource_version: self.metadata.resource_version,
            secret_type: self.secret_type.unwrap_or_default(),
            immutable: self.immutable.unwrap_or(false),
            data: data.into_iter().map(|(key, text)| (key, bytes(text))).collect(),
            binary_data: binary_data.into_iter().map(|(key, bytes)| (key, bytes.0)).collect(),
        }
    }
}

/// Every object that the pod names, whether a container uses it or not.
#[must_use]
pub fn references(pod: &Pod) -> BTreeSet<Key> {
    let mut found = References { namespace: pod.namespace(), keys: BTreeSet::new() };
    let spec = pod.spec();
    for secret in spec.image_pull_secrets.iter().flatten() {
        found.add(Kind::Secret, &secret.name);
    }
    for container in pod.all_containers() {
        found.environment(container.env.as_deref(), container.env_from.as_deref());
    }
    for container in spec.ephemeral_containers.iter().flatten() {
        found.environment(container.env.as_deref(), container.env_from.as_deref());
    }
    for volume in spec.volumes.iter().flatten() {
        if let Some(source) = &volume.config_map {
            found.add(Kind::ConfigMap, &source.name);
        }
        if let Some(name) = volume.secret.as_ref().and_then(|source| source.secret_name.as_ref()) {
            found.add(Kind::Secret, name);
        }
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for VolumeProjection { config_map, secret, .. } in sources {
            if let Some(source) = config_map {
                found.add(Kind::ConfigMap, &source.name);
            }
            if let Some(source) = secret {
                found.add(Kind::Secret, &source.name);
            }
        }
    }
    found.keys
}

struct References<'a> {
    namespace: &'a str,
    keys: BTreeSet<Key>,
}

impl References<'_> {
    fn add(&mut self, kind: Kind, name: &str) {
        // The API lets some names be empty; such an object cannot exist.
        if !name.is_empty() {
            self.keys.insert(Key::new(kind, self.namespace, name));
        }
    }

    fn environment(&mut self, env: Option<&[EnvVar]>, from: Option<&[EnvFromSource]>) {
        for source in env.into_iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            if let Some(selector) = &source.config_map_key_ref {
                self.add(Kind::ConfigMap, &selector.name);
            }
            if let Some(selector) = &source.secret_key_ref {
                self.add(Kind::Secret, &selector.name);
            }
        }
        for source in from.into_iter().flatten() {
            if let Some(source) = &source.config_map_ref {
                self.add(Kind::ConfigMap, &source.name);
            }
            if let Some(source) = &source.secret_ref {
                self.add(Kind::Secret, &source.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_names_objects_in_many_places() {
        let object: crate::model::api::Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "imagePullSecrets": [{"name": "pull"}, {"name": ""}],
                "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "from"}}, {"configMapRef": {"name": "from"}}]}],
                "containers": [{"name": "c", "env": [{"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "key", "key": "k"}}},
                    {"name": "C", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}]}],
                "ephemeralContainers": [{"name": "e", "envFrom": [{"secretRef": {"name": "late"}}]}],
                "volumes": [{"name": "a", "configMap": {"name": "vol"}}, {"name": "b", "secret": {"secretName": "vol"}},
                    {"name": "c", "projected": {"sources": [{"configMap": {"name": "kube-root-ca.crt"}},
                        {"secret": {"name": "part"}}, {"serviceAccountToken": {"path": "token"}}]}}]}}))
        .unwrap();
        let names = |kind| -> Vec<String> {
            let keys = references(&Pod::from(object.clone())).into_iter();
            keys.filter(|key| key.kind == kind && key.namespace == "n").map(|key| key.name).collect()
        };
        assert_eq!(names(Kind::ConfigMap), ["from", "key", "kube-root-ca.crt", "vol"]);
        assert_eq!(names(Kind::Secret), ["from", "key", "late", "part", "pull", "vol"]);
    }

    #[test]
    fn content_is_not_printed() {
        let secret: Stored = serde_json::from_value(json!({"kind": "Secret",
            "metadata": {"name": "s", "uid": "u", "resourceVersion": "7", "managedFields": []},
            "type": "Opaque", "data": {"pw": "aHVudGVyMg==", "bad": "?"}}))
        .unwrap();
        assert_eq!(secret.name(), "s");
        let object = secret.into_object(Kind::Secret);
        assert_eq!((object.get("bad"), object.secret_type.as_str()), (Some(&b""[..]), "Opaque"));
        assert_eq!(object.get("pw"), Some(&b"hunter2"[..]));
        assert_eq!(format!("{object:?}"), "Object(version 7, keys [\"bad\", \"pw\"])");
        let map: Stored = serde_json::from_value(json!({"metadata": {}, "immutable": true,
            "data": {"a": "1"}, "binaryData": {"b": "AP8="}}))
        .unwrap();
        let object = map.into_object(Kind::ConfigMap);
        assert_eq!((object.get("a"), object.get("b")), (Some(&b"1"[..]), Some(&[0, 255][..])));
        assert!(object.immutable);
        assert!(!object.is_version(&object));
    }
}
