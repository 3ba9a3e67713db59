//! The static pods that this node had when the agent started. Each release of Kubernetes derives other
//! UIDs from the same manifests, so a pod of another release is found by its own UID.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use crate::model::ids::PodUid;

/// By what a pod was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FoundBy {
    /// It has a directory, which may be left from a pod that has ended.
    Directory,
    /// It has allocated resources: it was to run until the last agent stopped.
    Allocation,
}

/// The UIDs of the pods that were on the node when the agent started. They do not change while it runs,
/// so that a manifest has the same UID each time it is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodsAtStart(BTreeMap<PodUid, FoundBy>);

impl PodsAtStart {
    /// Finds pods by their directories below `pods_dir`, and by their allocated resources (`allocated`).
    /// Only those are kept whose UIDs are hashes, as the Go kubelet and this agent give them to static
    /// pods. Without directories, static pods of other releases are restarted.
    pub(crate) fn find(pods_dir: &Path, allocated: impl IntoIterator<Item = PodUid>) -> PodsAtStart {
        let mut found = BTreeMap::new();
        match std::fs::read_dir(pods_dir) {
            Ok(directory) => {
                let names = directory.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
                found.extend(names.map(|name| (PodUid::from(name.as_str()), FoundBy::Directory)));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => log::warn!(
                "static pods of another release of Kubernetes may be restarted: cannot list {}: {error}",
                pods_dir.display()
            ),
        }
        found.extend(allocated.into_iter().map(|uid| (uid, FoundBy::Allocation)));
        found.retain(|uid, _| is_hash(uid.as_str()));
        PodsAtStart(found)
    }

    /// Whether no pod was found.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// By what the pod with this UID was found; `None`: it was not.
    pub(super) fn found_by(&self, uid: &str) -> Option<FoundBy> {
        self.0.get(&PodUid::from(uid)).copied()
    }
}

/// Whether a UID is a hash of 128 bits.
fn is_hash(uid: &str) -> bool {
    uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_found_by_directories_and_allocations() {
        let root = tempfile::tempdir().unwrap();
        let (ended, running, unseen) = ("0".repeat(32), "1".repeat(32), "f".repeat(32));
        let of_api = "2b2ff6a5-1c9c-4b0e-8d8e-5f7c3a0c6f11";
        for name in [ended.as_str(), &running, of_api, "A0000000000000000000000000000000"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let allocated = [running.as_str(), of_api].map(PodUid::from);
        let known = PodsAtStart::find(root.path(), allocated);
        assert_eq!(known.found_by(&ended), Some(FoundBy::Directory));
        assert_eq!(known.found_by(&running), Some(FoundBy::Allocation));
        assert_eq!((known.found_by(&unseen), known.0.len()), (None, 2));
        assert!(Some(FoundBy::Allocation) > Some(FoundBy::Directory) && Some(FoundBy::Directory) > None);
        assert!(PodsAtStart::find(&root.path().join("absent"), []).is_empty());
    }
}
