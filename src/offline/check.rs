//! `coracle offline check`: whether the objects that a start of the pods would read are stored and can be
//! used.

use std::collections::BTreeSet;

use serde::de::IgnoredAny;

use super::files::FileError;
use super::handle::Offline;
use super::key::{Key, Kind};
use super::state::{CheckReport, PodCheck, SealState};
use crate::model::pod::Pod;
use crate::util::secret::Secret;

/// Returns the body of a stored object.
pub(super) type ReadStored<'a> = &'a dyn Fn(&Key) -> Option<Secret<Vec<u8>>>;

/// What rooms know of the needs of a pod.
pub struct PodNeeds<'a> {
    /// The keys of all objects that its start reads, of those of [`super::Deps::needs`].
    pub keys: &'a dyn Fn(&Pod, ReadStored<'_>) -> BTreeSet<Key>,
    /// Why it waits for the API server besides.
    pub others: &'a dyn Fn(&Pod, ReadStored<'_>) -> Vec<String>,
    /// Of its images, those for which the registry is needed, and why.
    pub images: &'a dyn Fn(&Pod) -> Vec<String>,
}

impl Offline {
    /// Checks the pods that would start if the agent started now without the API server. Reads their files,
    /// and changes nothing.
    #[must_use]
    pub fn check(&self, needs: &PodNeeds<'_>) -> CheckReport {
        let mut report = CheckReport::default();
        if let Err(reason) = self.stored(&Key::node()) {
            report.problems.push(format!(
                "the Node object is {reason}: no pod starts alone until this node has reached the API server"
            ));
        }
        if self.shared.files.seal_state() == SealState::NoKey {
            report.problems.push("the key cannot be used: Secrets and tokens are not stored".to_owned());
        }
        let known = self.shared.state().decider.known().to_vec();
        let starts =
            |pod: &&Pod| !pod.is_mirror() && !pod.is_static() && !pod.is_over() && !pod.is_deleting();
        report.pods = known.iter().filter(starts).map(|pod| self.check_pod(pod, needs)).collect();
        report.pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        report
    }

    fn check_pod(&self, pod: &Pod, needs: &PodNeeds<'_>) -> PodCheck {
        let read = |key: &Key| self.shared.files.read(key).ok().flatten();
        let images = (needs.images)(pod);
        // Only a pull needs the Secrets for it. Without them, a registry that responds refuses the image.
        let keys = match images.is_empty() && !always_pulls(pod) {
            true => (needs.keys)(&without_pull_secrets(pod), &read),
            false => (needs.keys)(pod, &read),
        };
        let mut missing: Vec<String> = Vec::new();
        for key in &keys {
            if let Err(reason) = self.stored(key) {
                missing.push(format!("{}: {reason}", shown(key)));
            }
        }
        missing.extend((needs.others)(pod, &read));
        missing.extend(images);
        PodCheck {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            uid: pod.uid().to_string(),
            missing,
        }
    }

    /// Whether an object can be used from its file, as a start reads it. That the API server has none is
    /// stored, too.
    fn stored(&self, key: &Key) -> Result<(), String> {
        match self.shared.files.read(key) {
            Ok(Some(body)) if serde_json::from_slice::<IgnoredAny>(body.reveal()).is_ok() => Ok(()),
            Ok(Some(_)) => Err("stored in another form".to_owned()),
            Ok(None) => Err("not stored".to_owned()),
            Err(FileError::NotStored(SealState::NoKey)) => {
                Err("sealed, and the key cannot be used".to_owned())
            }
            Err(FileError::NotStored(_)) => Err("not stored (--offline-secrets=none)".to_owned()),
            Err(error) => Err(format!("stored, but cannot be used: {error}")),
        }
    }
}

/// Whether an image of the pod has the policy `Always`.
fn always_pulls(pod: &Pod) -> bool {
    let containers = pod.all_containers().map(|container| container.image_pull_policy.as_deref());
    let volumes = pod.spec().volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    containers
        .chain(volumes.map(|source| source.pull_policy.as_deref()))
        .any(|policy| policy == Some("Always"))
}

fn without_pull_secrets(pod: &Pod) -> Pod {
    let mut object = pod.object().clone();
    if let Some(spec) = &mut object.spec {
        spec.image_pull_secrets = None;
    }
    Pod::from(object)
}

/// A key for people: names of tokens are digests.
fn shown(key: &Key) -> String {
    match key.kind {
        Kind::Token => "token of its service account".to_owned(),
        Kind::Pod => "the pod itself".to_owned(),
        kind => format!("{} {}", kind.word(), key.name),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, pod};
    use super::*;

    fn keys(pod: &Pod, read: ReadStored<'_>) -> BTreeSet<Key> {
        let mut keys = BTreeSet::from([
            Key::new(Kind::Pod, pod.uid().as_str()),
            Key::namespaced(Kind::ConfigMap, "n", "m"),
            Key::new(Kind::Token, &format!("{}/1", pod.uid())),
        ]);
        if pod.spec().image_pull_secrets.is_some() {
            keys.insert(Key::namespaced(Kind::Secret, "n", "pull"));
        }
        if read(&Key::namespaced(Kind::ConfigMap, "n", "m")).is_some() {
            keys.insert(Key::new(Kind::Volume, "v"));
        }
        keys
    }

    fn check(offline: &Offline, images: &[&str]) -> CheckReport {
        offline.check(&PodNeeds {
            keys: &keys,
            others: &|_, _| Vec::new(),
            images: &|_| images.iter().map(|&image| image.to_owned()).collect(),
        })
    }

    #[test]
    fn each_object_that_is_missing_or_damaged_is_named_for_its_pod() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let missing = |offline: &Offline, images: &[&str]| check(offline, images).pods.remove(0).missing;
        assert_eq!(
            missing(&offline, &[]),
            ["configmap n/m: not stored", "token of its service account: not stored"]
        );
        let files = &offline.shared.files;
        files.write(&Key::namespaced(Kind::ConfigMap, "n", "m"), b"{}").unwrap();
        files.write(&Key::new(Kind::Token, "a/1"), b"{}").unwrap();
        assert_eq!(missing(&offline, &[]), ["volume v: not stored"]);
        // That there is no such object is known.
        files.write(&Key::new(Kind::Volume, "v"), b"null").unwrap();
        let report = check(&offline, &[]);
        assert!(!report.has_problems() && report.pods.len() == 1, "{report:?}");
        let path = testing::path(root.path(), &Key::new(Kind::Volume, "v"));
        let mut content = std::fs::read(&path).unwrap();
        content[3] ^= 1;
        std::fs::write(&path, content).unwrap();
        assert_eq!(missing(&offline, &[]), ["volume v: stored, but cannot be used: its checksum is wrong"]);
        assert!(path.exists(), "a check changes nothing");
        std::fs::remove_file(testing::path(root.path(), &Key::node())).unwrap();
        let report = check(&offline, &[]);
        assert_eq!(
            report.problems,
            ["the Node object is not stored: no pod starts alone until this node has reached the API server"]
        );
    }

    #[test]
    fn pull_secrets_count_only_if_an_image_has_to_be_pulled() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &[]);
        let mut object = pod("a").into_object();
        object.spec.as_mut().unwrap().image_pull_secrets =
            serde_json::from_value(serde_json::json!([{"name": "pull"}])).unwrap();
        offline.server_set(vec![Pod::from(object.clone())], true);
        let has_secret = |images: &[&str]| {
            let missing = check(&offline, images).pods.remove(0).missing;
            missing.iter().any(|line| line == "secret n/pull: not stored")
        };
        assert!(!has_secret(&[]) && has_secret(&["image i: not on the node"]));
        // Its registry may respond.
        object.spec.as_mut().unwrap().containers =
            serde_json::from_value(serde_json::json!([{"name": "c", "imagePullPolicy": "Always"}])).unwrap();
        offline.server_set(vec![Pod::from(object)], true);
        assert!(has_secret(&[]));
    }

    #[test]
    fn pods_that_would_not_start_are_not_checked() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &[]);
        let mut deleting = pod("a").into_object();
        deleting.metadata.deletion_timestamp =
            serde_json::from_value(serde_json::json!("2026-01-01T00:00:00Z")).unwrap();
        let mut over = pod("b").into_object();
        over.status = serde_json::from_value(serde_json::json!({"phase": "Succeeded"})).unwrap();
        offline.server_set(vec![Pod::from(deleting), Pod::from(over), pod("c")], true);
        let names: Vec<_> = check(&offline, &[]).pods.into_iter().map(|pod| pod.name).collect();
        assert_eq!(names, ["c"]);
    }
}
