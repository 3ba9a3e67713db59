//! The volumes that this process has mounted for each pod.
//!
//! After a start the table is empty; each pod's first set-up fills it from what is on disk and in
//! the mount table (markers, mounts, directories), without repeating an operation. Volumes without
//! a pod are found by the sweep of orphans, which reads the disk and not this table.

use std::collections::{BTreeMap, HashMap};

use super::atomic_writer::MAX_BYTES;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;

/// All mounted volumes, by pod and name.
#[derive(Debug, Default)]
pub(super) struct Actual {
    pods: HashMap<PodUid, BTreeMap<String, MountedVolume>>,
    sizes: HashMap<PodUid, Sizes>,
}

/// The sizes in bytes of the volumes of a pod whose files the agent writes.
#[derive(Debug, Default)]
struct Sizes {
    volumes: HashMap<String, usize>,
    total: usize,
}

impl Sizes {
    fn of(&self, volume: &str) -> usize {
        self.volumes.get(volume).copied().unwrap_or_default()
    }

    fn set(&mut self, volume: &str, bytes: usize) {
        let before = self.volumes.insert(volume.to_owned(), bytes).unwrap_or_default();
        self.total = self.total.saturating_sub(before).saturating_add(bytes);
    }
}

impl Actual {
    /// The volume, if it is mounted for the pod.
    pub(super) fn get(&self, uid: &PodUid, volume: &str) -> Option<MountedVolume> {
        self.pods.get(uid)?.get(volume).cloned()
    }

    /// All volumes that are mounted for the pod.
    pub(super) fn of(&self, uid: &PodUid) -> Vec<MountedVolume> {
        self.pods.get(uid).map(|volumes| volumes.values().cloned().collect()).unwrap_or_default()
    }

    /// Records that the volume is mounted.
    pub(super) fn mounted(&mut self, uid: &PodUid, volume: &MountedVolume) {
        let volumes = self.pods.entry(uid.clone()).or_default();
        volumes.insert(volume.volume.clone(), volume.clone());
    }

    /// Whether the pod may have this many bytes of files in the volume, in addition to those of its
    /// other volumes. The bytes count from now on. A volume whose update fails keeps its old files,
    /// so the larger size counts until [`Actual::wrote`].
    pub(super) fn reserve(&mut self, uid: &PodUid, volume: &str, bytes: usize) -> bool {
        let sizes = self.sizes.entry(uid.clone()).or_default();
        let before = sizes.of(volume);
        let fits = (sizes.total - before).saturating_add(bytes) <= MAX_BYTES;
        if fits {
            sizes.set(volume, before.max(bytes));
        }
        fits
    }

    /// Records that the files of the volume have this many bytes in all.
    pub(super) fn wrote(&mut self, uid: &PodUid, volume: &str, bytes: usize) {
        self.sizes.entry(uid.clone()).or_default().set(volume, bytes);
    }

    /// Forgets the pod's volumes, whose state is unknown now.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
        self.sizes.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_is_known_until_pod_is_forgotten() {
        let mut actual = Actual::default();
        let (one, two) = (PodUid::from("1"), PodUid::from("2"));
        let volume = MountedVolume {
            volume: "v".into(),
            host_path: "/v".into(),
            read_only: false,
            selinux_relabel: false,
        };
        actual.mounted(&one, &volume);
        assert_eq!(actual.get(&one, "v"), Some(volume));
        assert_eq!(actual.get(&one, "w"), None);
        assert_eq!((actual.of(&one).len(), actual.of(&two).len()), (1, 0));
        assert_eq!(actual.get(&two, "v"), None);
        actual.forget(&one);
        assert_eq!(actual.get(&one, "v"), None);
        assert!(actual.pods.is_empty());
    }

    #[test]
    fn volumes_of_one_pod_share_a_byte_limit() {
        let mut actual = Actual::default();
        let (one, two) = (PodUid::from("1"), PodUid::from("2"));
        assert!(actual.reserve(&one, "v", MAX_BYTES));
        // Nothing was written yet, or the update has failed.
        assert!(actual.reserve(&one, "v", 1));
        assert!(!actual.reserve(&one, "w", 1));
        actual.wrote(&one, "v", 1);
        assert!(actual.reserve(&one, "w", MAX_BYTES - 1));
        actual.wrote(&one, "w", MAX_BYTES - 1);
        assert!(!actual.reserve(&one, "x", 1));
        // A volume whose update is refused keeps its old files and size.
        assert!(!actual.reserve(&one, "v", 2));
        assert!(actual.reserve(&one, "v", 1));
        assert!(actual.reserve(&one, "x", 0));
        assert!(!actual.reserve(&one, "x", usize::MAX));
        assert!(actual.reserve(&two, "v", MAX_BYTES));
        actual.forget(&one);
        assert!(actual.reserve(&one, "x", MAX_BYTES));
    }
}
