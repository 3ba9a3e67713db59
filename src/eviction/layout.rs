//! How images, writable layers and the root directory share file systems, and what follows for
//! eviction (Go: eviction `buildSignalToRankFunc`, `buildSignalToNodeReclaimFuncs`; stats
//! `HasDedicatedImageFs`, `HasDedicatedContainerFs`).

use super::signal::Signal;

/// The arrangement of the node's file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Everything is on the file system of the root directory.
    Single,
    /// Images and writable layers are together on a file system of their own.
    Images,
    /// Images are on one file system, writable layers on another; upstream assumes that the other
    /// one is that of the root directory.
    Split,
}

/// Something that frees space without evicting a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaim {
    /// Remove all containers that have ended.
    DeadContainers,
    /// Remove all images that no container uses.
    UnusedImages,
}

/// A part of a pod's use of disks (Go: eviction `fsStatsType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsStatsType {
    /// The writable layers of containers.
    Layers,
    /// The log files of containers.
    Logs,
    /// Volumes on the node's disk: hostPath, emptyDir on disk, configMap, gitRepo.
    Volumes,
}

impl Layout {
    /// From the device numbers of the file systems; `layers` is `None` if the runtime reports no
    /// separate file system for writable layers.
    #[must_use]
    pub fn from_devices(root: u64, images: u64, layers: Option<u64>) -> Layout {
        match layers.unwrap_or(images) {
            layers if layers != images => Layout::Split,
            _ if images != root => Layout::Images,
            _ => Layout::Single,
        }
    }

    /// Whether images or writable layers are not on the file system of the root directory.
    pub fn has_image_fs(self) -> bool {
        self != Layout::Single
    }

    /// What to try, in order, before a pod is evicted for this signal.
    pub fn reclaim(self, signal: Signal) -> &'static [Reclaim] {
        use Reclaim::{DeadContainers, UnusedImages};
        match (self, file_system(signal)) {
            (_, None) | (Layout::Images, Some(FileSystem::Node)) => &[],
            (Layout::Single, _) | (Layout::Images, _) => &[DeadContainers, UnusedImages],
            (Layout::Split, Some(FileSystem::Images)) => &[UnusedImages],
            (Layout::Split, _) => &[DeadContainers],
        }
    }

    /// What counts as a pod's use when pods are ranked for this signal.
    pub fn counted_fs_stats(self, signal: Signal) -> &'static [FsStatsType] {
        use FsStatsType::{Layers, Logs, Volumes};
        match (self, file_system(signal)) {
            (_, None) => &[],
            (Layout::Single, _) => &[Layers, Logs, Volumes],
            (Layout::Images, Some(FileSystem::Node)) => &[Logs, Volumes],
            (Layout::Images, _) => &[Layers],
            // A pod has no share of the images.
            (Layout::Split, Some(FileSystem::Images)) => &[],
            (Layout::Split, _) => &[Logs, Volumes, Layers],
        }
    }

    /// The signals whose thresholds those of the file system with writable layers are copies of:
    /// for bytes and for inodes.
    pub(super) fn container_fs_source(self) -> [(Signal, Signal); 2] {
        let (bytes, inodes) = match self {
            Layout::Single | Layout::Split => (Signal::NodeFsAvailable, Signal::NodeFsInodesFree),
            Layout::Images => (Signal::ImageFsAvailable, Signal::ImageFsInodesFree),
        };
        [(bytes, Signal::ContainerFsAvailable), (inodes, Signal::ContainerFsInodesFree)]
    }
}

#[derive(Clone, Copy)]
enum FileSystem {
    Node,
    Images,
    Containers,
}

fn file_system(signal: Signal) -> Option<FileSystem> {
    match signal {
        Signal::NodeFsAvailable | Signal::NodeFsInodesFree => Some(FileSystem::Node),
        Signal::ImageFsAvailable | Signal::ImageFsInodesFree => Some(FileSystem::Images),
        Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree => Some(FileSystem::Containers),
        Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable | Signal::PidAvailable => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_follows_from_devices() {
        assert_eq!(Layout::from_devices(1, 1, None), Layout::Single);
        assert_eq!(Layout::from_devices(1, 1, Some(1)), Layout::Single);
        assert_eq!(Layout::from_devices(1, 2, None), Layout::Images);
        assert_eq!(Layout::from_devices(1, 2, Some(2)), Layout::Images);
        assert_eq!(Layout::from_devices(1, 2, Some(1)), Layout::Split);
        assert_eq!(Layout::from_devices(1, 2, Some(3)), Layout::Split);
        assert_eq!(Layout::from_devices(1, 1, Some(2)), Layout::Split);
    }

    #[test]
    fn reclaim_and_use_depend_on_the_layout() {
        use FsStatsType::{Layers, Logs, Volumes};
        use Reclaim::{DeadContainers, UnusedImages};
        use Signal::{ContainerFsAvailable, ImageFsInodesFree, NodeFsAvailable};
        let check = |layout: Layout, signal, reclaim: &[Reclaim], parts: &[FsStatsType]| {
            assert_eq!(layout.reclaim(signal), reclaim, "{layout:?} {signal:?}");
            assert_eq!(layout.counted_fs_stats(signal), parts, "{layout:?} {signal:?}");
        };
        for signal in [NodeFsAvailable, ImageFsInodesFree, ContainerFsAvailable] {
            check(Layout::Single, signal, &[DeadContainers, UnusedImages], &[Layers, Logs, Volumes]);
        }
        check(Layout::Images, NodeFsAvailable, &[], &[Logs, Volumes]);
        check(Layout::Images, ImageFsInodesFree, &[DeadContainers, UnusedImages], &[Layers]);
        check(Layout::Images, ContainerFsAvailable, &[DeadContainers, UnusedImages], &[Layers]);
        check(Layout::Split, NodeFsAvailable, &[DeadContainers], &[Logs, Volumes, Layers]);
        check(Layout::Split, ContainerFsAvailable, &[DeadContainers], &[Logs, Volumes, Layers]);
        check(Layout::Split, ImageFsInodesFree, &[UnusedImages], &[]);
        for layout in [Layout::Single, Layout::Images, Layout::Split] {
            check(layout, Signal::MemoryAvailable, &[], &[]);
            check(layout, Signal::PidAvailable, &[], &[]);
        }
    }
}
