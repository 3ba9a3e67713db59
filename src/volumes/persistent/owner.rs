//! The mount of a volume for its pod, and the group of its files.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::super::error::VolumeError;
use super::super::group_marker::{self, Marker, MarkerState};
use super::super::mounts::Mount;
use super::super::ownership::{self, Policy};
use super::super::{empty_dir, paths};
use super::devices::DeviceLock;
use super::filesystem::Mounting;
use super::host::mount_at;
use super::storage::Request;
use super::{Kinds, bind_options, remove_dir};
use crate::model::persistent::{Source, Spec};
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::tree;

/// The first event about a slow change of owners, and the time between later ones.
const OWNERS_SLOW: Duration = Duration::from_secs(30);
const OWNERS_AGAIN: Duration = Duration::from_secs(60);

impl Kinds {
    /// Binds a directory to the pod's volume, and sets the group of its files. `lock`, that of a disk, ends before the walk through the files: others wait for it.
    pub(super) fn bind(
        &self,
        request: &Request<'_>,
        Mounting { source: from, target }: Mounting<'_>,
        lock: Option<DeviceLock>,
    ) -> Result<(), VolumeError> {
        let Request { pod, volume, spec, .. } = *request;
        let table = self.host.mounts()?;
        let was_mounted = mount_at(&table, target).is_some();
        let gid = empty_dir::fs_group(pod).filter(|_| !spec.read_only);
        let marker = Marker::for_volume(target)?;
        if !was_mounted {
            if gid.is_some() && policy(pod) == Policy::Always {
                marker.make()?;
            }
            self.host.bind(from, target, &bind_options(spec)).inspect_err(|_| remove_dir(target))?;
        }
        // The mount table shows from now on that the pod uses the disk.
        drop(lock);
        let Some(gid) = gid else { return Ok(()) };
        // A walk that has begun is completed, also if another pod has got the volume meanwhile.
        let has_begun = was_mounted && marker.state() == MarkerState::Begun;
        if matches!(spec.source, Source::Local(_)) && !has_begun && self.is_shared(target)? {
            self.compare_group(pod, spec, target, gid);
            marker.remove();
            return Ok(());
        }
        self.own(pod, &volume.name, target, (gid, was_mounted))
    }

    /// Whether another pod has a mount of the same directory.
    fn is_shared(&self, target: &Path) -> Result<bool, VolumeError> {
        let table = self.host.mounts()?;
        let Some(own) = mount_at(&table, target) else { return Ok(false) };
        let pods = paths::pods(&self.root_dir);
        let is_same =
            |mount: &&Mount| mount.device == own.device && mount.root == own.root && mount.point != target;
        Ok(table
            .iter()
            .filter(is_same)
            .any(|mount| mount.point.starts_with(&pods) && is_volume(&mount.point)))
    }

    fn compare_group(&self, pod: &Pod, spec: &Spec, target: &Path, gid: u32) {
        let Ok(metadata) = std::fs::metadata(target) else { return };
        if metadata.mode() & 0o2000 != 0 && metadata.gid() != gid {
            let message = format!(
                "The requested fsGroup is {gid}, but the volume {} has GID {}. The volume may not be shareable.",
                spec.name,
                metadata.gid()
            );
            self.events.warning(pod, reasons::ALREADY_MOUNTED_VOLUME, message);
        }
    }

    /// Sets the group of all files, unless an earlier set-up has completed that. The walk continues when the set-up is over its time: each
    /// attempt would begin at the first file. It ends with the pod, the agent, and the removal of the
    /// pod's volumes.
    pub(super) fn own(
        &self,
        pod: &Pod,
        volume: &str,
        target: &Path,
        (gid, was_mounted): (u32, bool),
    ) -> Result<(), VolumeError> {
        let marker = Marker::for_volume(target)?;
        let policy = group_marker::policy(policy(pod), was_mounted, marker.state());
        if policy == Policy::Always {
            marker.begin()?;
        }
        let stops = self.operations.walk(pod.uid(), volume);
        let dir = tree::open(target).map_err(VolumeError::io("open", target))?;
        let mut next = Instant::now() + OWNERS_SLOW;
        let mut progress = |count: u64| {
            if Instant::now() >= next {
                next = Instant::now() + OWNERS_AGAIN;
                let name = target.file_name().unwrap_or_default().to_string_lossy();
                let message = format!(
                    "Setting volume ownership for {name} is taking longer than expected, processed {count} files"
                );
                self.events.warning(pod, reasons::VOLUME_PERMISSION_CHANGE, message);
            }
        };
        let access = (ownership::Access::Write, policy);
        let given = ownership::change_group(dir.as_fd(), gid, access, &stops, &mut progress);
        given.map_err(|broken| broken.into_error(target))?;
        marker.remove();
        Ok(())
    }
}

/// `fsGroupChangePolicy` of the pod.
pub(super) fn policy(pod: &Pod) -> Policy {
    let context = pod.spec().security_context.as_ref();
    match context.and_then(|context| context.fs_group_change_policy.as_deref()) {
        Some("OnRootMismatch") => Policy::OnRootMismatch,
        _ => Policy::Always,
    }
}

/// Whether a mount point is a volume of a pod, and not a sub path of one.
fn is_volume(point: &Path) -> bool {
    !point.components().any(|part| part.as_os_str() == paths::SUB_PATHS)
}
