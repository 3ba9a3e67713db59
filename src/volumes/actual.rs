//! The volumes that this process has mounted for each pod.
//!
//! After a start the table is empty; each pod's first set-up fills it from what is on disk and in
//! the mount table (markers, mounts, directories), without repeating an operation. Volumes without
//! a pod are found by the sweep of orphans, which reads the disk and not this table.

use std::collections::{BTreeMap, HashMap};

use super::atomic_writer::MAX_BYTES;
use super::error::VolumeError;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;

/// Memory that a file or directory of a volume in memory takes besides its content: a page, two
/// inodes and names, as measured.
pub(super) const FILE_MEMORY: usize = 6 << 10;
/// The limit of [`Size::memory`] for one pod: the largest volume, and some more.
pub(super) const MAX_MEMORY: usize = 64 << 20;
/// Memory that each pod may have, whatever others have: enough for its token and its secrets.
const OWN_MEMORY: usize = 1 << 20;
/// The least limit for all pods together.
const MIN_SHARE: usize = 128 << 20;
/// The limit for all pods together if the node's memory is not known.
const UNKNOWN_SHARE: usize = 512 << 20;

/// All mounted volumes, by pod and name.
#[derive(Debug)]
pub(super) struct ActualState {
    pods: HashMap<PodUid, BTreeMap<String, MountedVolume>>,
    sizes: HashMap<PodUid, Sizes>,
    /// The limit of memory for the files of all pods, apart from [`OWN_MEMORY`] of each.
    share: usize,
}

impl Default for ActualState {
    fn default() -> Self {
        ActualState::new(0)
    }
}

/// What the files of a volume take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Their content.
    pub(super) bytes: usize,
    /// Memory that the kernel charges to the agent; 0 for files on the disk.
    pub(super) memory: usize,
}

impl Size {
    /// For files on the disk.
    pub(super) fn on_disk(bytes: usize) -> Size {
        Size { bytes, memory: 0 }
    }

    /// For files in memory.
    pub(super) fn in_memory(bytes: usize, entries: usize) -> Size {
        Size { bytes, memory: entries.saturating_mul(FILE_MEMORY).saturating_add(bytes) }
    }
}

/// Which limit the files of a volume exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExceededLimit {
    /// The bytes of all volumes of the pod.
    Bytes,
    /// The memory of all volumes of the pod.
    Memory,
    /// The memory of all pods of the namespace, or of the node.
    Share {
        /// The limit in bytes.
        limit: usize,
    },
}

impl From<ExceededLimit> for VolumeError {
    fn from(exceeded: ExceededLimit) -> VolumeError {
        match exceeded {
            ExceededLimit::Bytes => VolumeError::FilesTooLarge,
            ExceededLimit::Memory => VolumeError::FilesTakeMemory { whose: "the pod", limit: MAX_MEMORY },
            ExceededLimit::Share { limit } => {
                VolumeError::FilesTakeMemory { whose: "all pods of the namespace or the node", limit }
            }
        }
    }
}

/// The sizes of the volumes of a pod whose files the agent writes.
#[derive(Debug, Default)]
struct Sizes {
    namespace: String,
    volumes: HashMap<String, Size>,
    total: Size,
}

impl Sizes {
    fn size(&self, volume: &str) -> Size {
        self.volumes.get(volume).copied().unwrap_or_default()
    }

    /// The sizes of all volumes, if this one had another size.
    fn with(&self, volume: &str, size: Size) -> Size {
        let before = self.size(volume);
        let replace =
            |total: usize, before: usize, size: usize| total.saturating_sub(before).saturating_add(size);
        Size {
            bytes: replace(self.total.bytes, before.bytes, size.bytes),
            memory: replace(self.total.memory, before.memory, size.memory),
        }
    }

    fn set(&mut self, volume: &str, size: Size) {
        self.total = self.with(volume, size);
        self.volumes.insert(volume.to_owned(), size);
    }
}

/// The part of a pod's memory that counts for its namespace and the node.
fn shared(memory: usize) -> usize {
    memory.saturating_sub(OWN_MEMORY)
}

impl ActualState {
    /// An empty table on a node with this much memory in bytes; 0: it is not known.
    pub(super) fn new(memory: u64) -> ActualState {
        let eighth = usize::try_from(memory / 8).unwrap_or(usize::MAX);
        let share = if memory == 0 { UNKNOWN_SHARE } else { eighth.max(MIN_SHARE) };
        ActualState { pods: HashMap::new(), sizes: HashMap::new(), share }
    }

    /// The volume, if it is mounted for the pod.
    pub(super) fn get(&self, uid: &PodUid, volume: &str) -> Option<MountedVolume> {
        self.pods.get(uid)?.get(volume).cloned()
    }

    /// All volumes that are mounted for the pod.
    pub(super) fn volumes_of(&self, uid: &PodUid) -> Vec<MountedVolume> {
        self.pods.get(uid).map(|volumes| volumes.values().cloned().collect()).unwrap_or_default()
    }

    /// Records that the volume is mounted.
    pub(super) fn mounted(&mut self, uid: &PodUid, volume: &MountedVolume) {
        let volumes = self.pods.entry(uid.clone()).or_default();
        volumes.insert(volume.volume.clone(), volume.clone());
    }

    /// Whether the pod may have files of this size in the volume, in addition to those of its other
    /// volumes. The size counts from now on. A volume whose update fails keeps its old files, so the
    /// larger size counts until [`ActualState::wrote`]. The old files and the new ones exist at the same time
    /// during the write. The sum does not count: a pod above half of a limit would keep an expired token
    /// or a revoked secret.
    ///
    /// DIFFERS: upstream has no limits, so that a few objects of many small keys take the node's
    /// memory.
    pub(super) fn reserve(
        &mut self,
        (uid, namespace): (&PodUid, &str),
        volume: &str,
        size: Size,
    ) -> Result<(), ExceededLimit> {
        let (mut of_node, mut of_namespace) = (0_usize, 0_usize);
        for (_, sizes) in self.sizes.iter().filter(|(other, _)| *other != uid) {
            let memory = shared(sizes.total.memory);
            of_node = of_node.saturating_add(memory);
            if sizes.namespace == namespace {
                of_namespace = of_namespace.saturating_add(memory);
            }
        }
        let share = self.share;
        let sizes = self.sizes.entry(uid.clone()).or_default();
        namespace.clone_into(&mut sizes.namespace);
        let (now, after) = (sizes.total, sizes.with(volume, size));
        let own = shared(after.memory);
        // An update that takes no more than before is never refused.
        let grows = after.memory > now.memory && own > 0;
        if after.bytes > MAX_BYTES {
            return Err(ExceededLimit::Bytes);
        }
        if grows && after.memory > MAX_MEMORY {
            return Err(ExceededLimit::Memory);
        }
        for (others, limit) in [(of_namespace, share / 2), (of_node, share)] {
            if grows && others.saturating_add(own) > limit {
                return Err(ExceededLimit::Share { limit });
            }
        }
        let before = sizes.size(volume);
        let larger = Size { bytes: before.bytes.max(size.bytes), memory: before.memory.max(size.memory) };
        sizes.set(volume, larger);
        Ok(())
    }

    /// Records that the files of the volume have this size.
    pub(super) fn wrote(&mut self, uid: &PodUid, volume: &str, size: Size) {
        self.sizes.entry(uid.clone()).or_default().set(volume, size);
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
        let mut actual = ActualState::default();
        let (first, two) = (PodUid::from("1"), PodUid::from("2"));
        let volume = MountedVolume {
            volume: "v".into(),
            host_path: "/v".into(),
            read_only: false,
            selinux_relabel: false,
        };
        actual.mounted(&first, &volume);
        assert_eq!(actual.get(&first, "v"), Some(volume));
        assert_eq!(actual.get(&first, "w"), None);
        assert_eq!((actual.volumes_of(&first).len(), actual.volumes_of(&two).len()), (1, 0));
        assert_eq!(actual.get(&two, "v"), None);
        actual.forget(&first);
        assert_eq!(actual.get(&first, "v"), None);
        assert!(actual.pods.is_empty());
    }

    fn reserve(actual: &mut ActualState, uid: &PodUid, volume: &str, bytes: usize) -> bool {
        actual.reserve((uid, "n"), volume, Size::on_disk(bytes)).is_ok()
    }

    #[test]
    fn volumes_of_one_pod_share_a_byte_limit() {
        let mut actual = ActualState::default();
        let (first, two) = (PodUid::from("1"), PodUid::from("2"));
        assert!(reserve(&mut actual, &first, "v", MAX_BYTES));
        // Nothing was written yet, or the update has failed.
        assert!(reserve(&mut actual, &first, "v", 1));
        assert!(!reserve(&mut actual, &first, "w", 1));
        actual.wrote(&first, "v", Size::on_disk(1));
        assert!(reserve(&mut actual, &first, "w", MAX_BYTES - 1));
        actual.wrote(&first, "w", Size::on_disk(MAX_BYTES - 1));
        assert!(!reserve(&mut actual, &first, "x", 1));
        // A volume whose update is refused keeps its old files and size.
        assert!(!reserve(&mut actual, &first, "v", 2));
        assert!(reserve(&mut actual, &first, "v", 1));
        assert!(reserve(&mut actual, &first, "x", 0));
        assert!(!reserve(&mut actual, &first, "x", usize::MAX));
        assert!(reserve(&mut actual, &two, "v", MAX_BYTES));
        actual.forget(&first);
        assert!(reserve(&mut actual, &first, "x", MAX_BYTES));
    }

    /// Seven volumes of 9,900 files with one byte each took 400 MiB that were charged to the agent.
    #[test]
    fn small_files_in_memory_of_one_pod_share_a_limit() {
        let mut actual = ActualState::default();
        let pod = PodUid::from("1");
        let many = Size::in_memory(9_900, 9_900);
        assert!(many.memory > 56 << 20);
        assert_eq!(actual.reserve((&pod, "n"), "v0", many), Ok(()));
        assert_eq!(actual.reserve((&pod, "n"), "v1", many), Err(ExceededLimit::Memory));
        // An update of what exists is possible, and so is a ConfigMap, which is on the disk.
        assert_eq!(actual.reserve((&pod, "n"), "v0", many), Ok(()));
        assert_eq!(actual.reserve((&pod, "n"), "map", Size::on_disk(9_900)), Ok(()));
        // The largest volume fits.
        actual.forget(&pod);
        assert_eq!(actual.reserve((&pod, "n"), "v0", Size::in_memory(1 << 20, 10_000)), Ok(()));
    }

    #[test]
    fn files_in_memory_of_all_pods_share_a_limit_and_leave_some_for_each() {
        let mut actual = ActualState::new(2 << 30);
        assert_eq!(
            (actual.share, ActualState::new(1 << 20).share, ActualState::new(0).share),
            (256 << 20, 128 << 20, 512 << 20)
        );
        let many = Size::in_memory(9_900, 9_900);
        let fill = |actual: &mut ActualState, namespace: &str| {
            let each = |n: usize| {
                let uid = PodUid::from(format!("{namespace}{n}").as_str());
                actual.reserve((&uid, namespace), "v", many)
            };
            let results: Vec<_> = (0..10).map(each).collect();
            (results.iter().filter(|result| result.is_ok()).count(), results.last().copied())
        };
        assert_eq!(fill(&mut actual, "a"), (2, Some(Err(ExceededLimit::Share { limit: 128 << 20 }))));
        assert_eq!(fill(&mut actual, "b"), (2, Some(Err(ExceededLimit::Share { limit: 128 << 20 }))));
        assert_eq!(fill(&mut actual, "c"), (0, Some(Err(ExceededLimit::Share { limit: 256 << 20 }))));
        // The token of a new pod has its place.
        for n in 0..1000 {
            let uid = PodUid::from(format!("t{n}").as_str());
            assert_eq!(actual.reserve((&uid, "a"), "token", Size::in_memory(5_000, 6)), Ok(()));
        }
    }
}
