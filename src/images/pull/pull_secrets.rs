//! The registry credentials of a pod: its `imagePullSecrets` (Go: pkg/credentialprovider/secrets).

use std::collections::BTreeSet;
use std::sync::Arc;

use super::credentials::{self, Credential, CredentialFormat, Entries, Index, MAX_ENTRIES, index, lookup};
use super::records::PullSecret;
use crate::kube::PodObjects;
use crate::kube::objects::Object;
use crate::model::pod::Pod;
use crate::util::sha256;
use crate::util::stop::StopToken;

/// Types of Secrets that hold credentials, and the key that these are under.
const JSON: (&str, &str) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
const LEGACY: (&str, &str) = ("kubernetes.io/dockercfg", ".dockercfg");

/// A pod's own credentials.
#[derive(Default)]
pub(crate) struct PullSecrets {
    index: Index,
    /// Names of Secrets without credentials.
    missing: Vec<String>,
}

impl PullSecrets {
    /// Reads the pod's secrets. A pull may succeed without those that cannot be read.
    ///
    /// DIFFERS: one that holds no credentials counts as missing; upstream fails the pull.
    pub(crate) fn read(pod: &Pod, objects: Option<PodObjects<'_>>, stop: &StopToken) -> PullSecrets {
        let mut all = PullSecrets::default();
        let Some(objects) = objects else { return all };
        let mut seen = BTreeSet::new();
        for reference in pod.spec().image_pull_secrets.iter().flatten() {
            // The API allows references without a name. A Secret that is listed twice is read once.
            if reference.name.is_empty() || !seen.insert(reference.name.as_str()) {
                continue;
            }
            let (namespace, name) = (pod.namespace(), reference.name.as_str());
            let problem = match objects.secret(namespace, name, stop) {
                Ok(secret) => match entries(&secret).and_then(|entries| all.index_more(entries)) {
                    Ok(index) => {
                        let (uid, namespace, name) =
                            (secret.uid.clone(), namespace.to_owned(), name.to_owned());
                        all.add(index, &PullSecret { uid, namespace, name, ..PullSecret::default() });
                        continue;
                    }
                    Err(problem) => problem.to_owned(),
                },
                Err(error) => error.to_string(),
            };
            if !stop.is_stopped() {
                log::debug!(
                    "cannot use pull secret {namespace}/{name}: {problem} pod={} uid={}",
                    pod.name(),
                    pod.uid()
                );
            }
            all.missing.push(name.to_owned());
        }
        all
    }

    /// The names of Secrets that could not be read or hold no credentials.
    pub(super) fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Credentials that match `image`, the most specific first.
    pub(crate) fn for_image(&self, image: &str) -> Vec<Credential> {
        if self.index.is_empty() { Vec::new() } else { lookup(&self.index, image) }
    }

    /// The pod's proofs for `image`.
    pub(crate) fn proofs(&self, image: &str) -> Vec<PullSecret> {
        let proof = |credential: Credential| credential.secret.as_deref().cloned();
        self.for_image(image).into_iter().filter_map(proof).collect()
    }

    /// Indexes the entries of one more Secret, unless there are too many together: each costs time
    /// at each image.
    ///
    /// DIFFERS: upstream has no limit.
    fn index_more(&self, entries: Entries) -> Result<Index, &'static str> {
        let known: usize = self.index.values().map(Vec::len).sum();
        if known + entries.len() > MAX_ENTRIES {
            return Err("the pod's pull secrets name too many registries together");
        }
        index(entries).map_err(|_| "it names more registries than a Secret may")
    }

    fn add(&mut self, index: Index, secret: &PullSecret) {
        for (key, credentials) in index {
            let known = self.index.entry(key).or_default();
            known.extend(credentials.into_iter().map(|credential| Credential {
                secret: Some(Arc::new(PullSecret { credential_hash: hash(&credential), ..secret.clone() })),
                ..credential
            }));
        }
    }
}

/// The credentials in a secret. The decoder's message may contain one, so it is not returned.
fn entries(secret: &Object) -> Result<Entries, &'static str> {
    let data_of = |(kind, key): (&str, &str)| {
        let filled = secret.data.get(key).filter(|data| !data.is_empty());
        filled.filter(|_| secret.secret_type == kind)
    };
    if let Some(data) = data_of(JSON) {
        return credentials::entries(data, CredentialFormat::Current)
            .map_err(|_| "its .dockerconfigjson is not what is expected");
    }
    if let Some(data) = data_of(LEGACY) {
        return credentials::entries(data, CredentialFormat::Legacy)
            .map_err(|_| "its .dockercfg is not what is expected");
    }
    // As upstream, a Secret of another type has no credentials, and is no error.
    Ok(Entries::new())
}

/// As upstream has it in its records: the hash of the JSON form, written the way Go does.
fn hash(credential: &Credential) -> String {
    let mut fields = Vec::new();
    for (name, value) in [("username", &credential.username), ("password", &credential.password)] {
        if !value.is_empty() {
            // A text always serializes.
            let value = serde_json::to_string(value).unwrap_or_default();
            fields.push(format!("\"{name}\":{}", go_escaped(&value)));
        }
    }
    sha256::sha256_hex(format!("{{{}}}", fields.join(",")).as_bytes())
}

/// Go escapes characters of a JSON text that have a meaning in HTML or JavaScript.
fn go_escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            _ => text.push(character),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::objects::{Key, Kind, Objects};
    use serde_json::json;

    fn secret(kind: &str, key: &str, content: &str) -> Object {
        Object {
            uid: "u1".into(),
            secret_type: kind.into(),
            data: [(key.to_owned(), content.as_bytes().to_vec())].into(),
            ..Object::default()
        }
    }

    fn pod(names: &[&str]) -> Pod {
        let names: Vec<_> = names.iter().map(|name| json!({"name": name})).collect();
        let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [], "imagePullSecrets": names}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn secrets_of_both_types_are_tried_and_missing_ones_named() {
        let many = |count| {
            let entries = (0..count).map(|n| format!("\"r{n}.example\":{{\"auth\":\"dTpw\"}}"));
            secret(LEGACY.0, LEGACY.1, &format!("{{{}}}", entries.collect::<Vec<_>>().join(",")))
        };
        let secrets = [
            (
                "new",
                secret(
                    JSON.0,
                    JSON.1,
                    r#"{"auths": {"r.example": {"auth": "dTpw"}, "r.example/team": {"username": "t", "password": "<&>"}}}"#,
                ),
            ),
            (
                "old",
                secret(
                    LEGACY.0,
                    LEGACY.1,
                    r#"{"https://r.example/v1/": {"username": "o", "password": "x"}}"#,
                ),
            ),
            ("hub", secret(JSON.0, JSON.1, r#"{"auths": {"docker.io": {"auth": "dTpw"}}}"#)),
            ("other", secret("Opaque", JSON.1, r#"{"auths": {"r.example": {"auth": "dTpw"}}}"#)),
            ("many", many(1_001)),
            // With the three entries of the others.
            ("rest", many(998)),
            ("broken", secret(JSON.0, JSON.1, "{")),
        ];
        let secrets = secrets.into_iter().map(|(name, object)| (Key::new(Kind::Secret, "n", name), object));
        let objects = Objects::fixed(secrets.collect());
        objects.set(&Key::new(Kind::Secret, "n", "gone"), None);
        let source = Some(PodObjects::Api(&objects));
        let read_named = |names: &[&str]| PullSecrets::read(&pod(names), source, &StopToken::never());
        let found = read_named(&["gone", "", "old", "old", "new", "other", "broken", "gone", "many", "rest"]);
        assert_eq!(found.missing(), ["gone", "broken", "many", "rest"]);
        assert!(read_named(&["rest"]).missing().is_empty());
        let users = |image: &str| -> Vec<String> {
            found.for_image(image).into_iter().map(|credential| credential.username).collect()
        };
        assert_eq!(users("r.example/x"), ["o", "u"]);
        assert_eq!(users("r.example/team/x:1"), ["t", "o", "u"]);
        assert!(users("s.example/x").is_empty());
        let hub = read_named(&["hub"]);
        assert_eq!(hub.proofs("team/app:1")[0].name, "hub");
        let proofs = found.proofs("r.example/x");
        assert_eq!((proofs[1].name.as_str(), proofs[1].uid.as_str()), ("new", "u1"));
        // {"username":"u","password":"p"}
        assert_eq!(proofs[1].credential_hash, sha256::sha256_hex(br#"{"username":"u","password":"p"}"#));
        let special = &found.proofs("r.example/team/x")[0].credential_hash;
        assert_eq!(*special, sha256::sha256_hex(br#"{"username":"t","password":"\u003c\u0026\u003e"}"#));
        let none = PullSecrets::read(&pod(&["old"]), None, &StopToken::never());
        assert!(none.for_image("r.example/x").is_empty() && none.missing().is_empty());
    }
}
