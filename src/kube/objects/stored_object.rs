//! The stored form of ConfigMaps and Secrets (pure).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Key, Kind, Object};
use crate::model::ByteString;
use crate::offline::{Key as StoredKey, Kind as StoredKind};

/// A ConfigMap or a Secret. It cannot be printed.
#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct StoredObject {
    uid: String,
    resource_version: String,
    secret_type: String,
    immutable: bool,
    data: BTreeMap<String, ByteString>,
    binary_data: BTreeMap<String, ByteString>,
}

impl From<&Object> for StoredObject {
    fn from(object: &Object) -> StoredObject {
        let encode = |data: &BTreeMap<String, Vec<u8>>| {
            data.iter().map(|(key, bytes)| (key.clone(), ByteString(bytes.clone()))).collect()
        };
        StoredObject {
            uid: object.uid.clone(),
            resource_version: object.resource_version.clone(),
            secret_type: object.secret_type.clone(),
            immutable: object.immutable,
            data: encode(&object.data),
            binary_data: encode(&object.binary_data),
        }
    }
}

impl From<StoredObject> for Object {
    fn from(stored: StoredObject) -> Object {
        let decode = |data: BTreeMap<String, ByteString>| {
            data.into_iter().map(|(key, bytes)| (key, bytes.0)).collect()
        };
        Object {
            uid: stored.uid,
            resource_version: stored.resource_version,
            secret_type: stored.secret_type,
            immutable: stored.immutable,
            data: decode(stored.data),
            binary_data: decode(stored.binary_data),
        }
    }
}

/// The key of a ConfigMap or a Secret.
pub(crate) fn object_key(key: &Key) -> StoredKey {
    let kind = match key.kind {
        Kind::ConfigMap => StoredKind::ConfigMap,
        Kind::Secret => StoredKind::Secret,
    };
    StoredKey::namespaced(kind, &key.namespace, &key.name)
}
