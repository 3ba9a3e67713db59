//! Which volumes are mounted for which pod, as far as this process has seen to it.
//!
//! After a start the table is empty; each pod's first set-up fills it from what is on disk
//! and in the mount table (markers, mounts, directories), without doing anything twice. What
//! no pod wants is found by the sweep of orphans, which asks the disk and not this table.

use std::collections::{BTreeMap, HashMap};

use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;

/// All mounted volumes, by pod and name.
#[derive(Debug, Default)]
pub(super) struct Actual {
    pods: HashMap<PodUid, BTreeMap<String, MountedVolume>>,
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

    /// The volume is mounted.
    pub(super) fn mounted(&mut self, uid: &PodUid, volume: &MountedVolume) {
        let volumes = self.pods.entry(uid.clone()).or_default();
        volumes.insert(volume.volume.clone(), volume.clone());
    }

    /// Nothing of the pod can be relied on any more.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_until_told_to_forget() {
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
}
