//! Whether the files of a pod's volume have the group of the pod, as far as its mount does not show it.
//!
//! A walk through the files may break off, and the next set-up finds the volume mounted. With the policy
//! `OnRootMismatch` the root of the volume shows whether a walk was completed. With `Always` it does not:
//! the root may have the group since an earlier pod. So a marker is made before the volume is mounted,
//! and removed after the walk; without a mount it means nothing.
//!
//! It is a directory below `pods/<uid>/plugins`, which this agent and the Go kubelet remove with the
//! pod. (The Go kubelet removes the directory of a volume only if nothing else is in it.)

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::error::VolumeError;
use super::ownership::Policy;
use crate::util::disk_writes;

/// The directory of all markers of a pod, below its `plugins`.
pub(super) const DIRECTORY: &str = "coracle~fs-group";
/// The file in a marker that shows that the walk has begun.
const BEGUN: &str = "begun";

/// The marker of one volume of a pod.
#[derive(Debug)]
pub(super) struct Marker(PathBuf);

/// What a marker shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MarkerState {
    /// There is none: a volume that is mounted has the group.
    Given,
    /// The volume was about to be mounted.
    Due,
    /// The walk has begun.
    Begun,
}

impl Marker {
    /// The marker of the volume in `pods/<uid>/volumes/<plugin>/<name>`.
    pub(super) fn for_volume(volume: &Path) -> Result<Marker, VolumeError> {
        let place = || {
            let (name, plugin) = (volume.file_name()?, volume.parent()?.file_name()?);
            Some(volume.ancestors().nth(3)?.join("plugins").join(DIRECTORY).join(plugin).join(name))
        };
        place().map(Marker).ok_or_else(|| VolumeError::Name { name: volume.display().to_string() })
    }

    /// What an earlier set-up has left.
    pub(super) fn state(&self) -> MarkerState {
        let is_there = |path: &Path| match std::fs::symlink_metadata(path) {
            Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
            Ok(_) => true,
        };
        match (is_there(&self.0), is_there(&self.0.join(BEGUN))) {
            (false, _) => MarkerState::Given,
            (true, false) => MarkerState::Due,
            (true, true) => MarkerState::Begun,
        }
    }

    /// The volume will be mounted, and needs a walk.
    pub(super) fn make(&self) -> Result<(), VolumeError> {
        let path = &self.0;
        // That of an earlier mount, which is gone.
        self.remove();
        disk_writes::make_directories(path, 0o750).map_err(failed("make directory", path))
    }

    /// The walk begins.
    pub(super) fn begin(&self) -> Result<(), VolumeError> {
        let path = self.0.join(BEGUN);
        disk_writes::make_directories(&self.0, 0o750).map_err(failed("make directory", &self.0))?;
        // Whatever is there shows the same; a pipe would block.
        let made = std::fs::OpenOptions::new().write(true).create_new(true).open(&path);
        match disk_writes::created(made) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made.map(drop).map_err(failed("make file", &path)),
        }
    }

    /// The files have the group, or the volume is gone. If the marker stays, the next set-up walks
    /// again.
    pub(super) fn remove(&self) {
        let removed = match std::fs::remove_file(self.0.join(BEGUN)) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(error)
            }
            _ => std::fs::remove_dir(&self.0),
        };
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                log::warn!("cannot remove {}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

/// The policy of one set-up (pure). `wanted` is that of the pod.
pub(super) fn policy(wanted: Policy, was_mounted: bool, state: MarkerState) -> Policy {
    // A set-up that finds a complete volume does not walk again through all files.
    let is_complete = was_mounted && state == MarkerState::Given;
    if is_complete { Policy::OnRootMismatch } else { wanted }
}

fn failed<'a>(attempt: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> VolumeError + 'a {
    move |source| VolumeError::Io { attempt, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marker_shows_how_far_a_set_up_came() {
        let pod = tempfile::tempdir().unwrap();
        std::fs::create_dir(pod.path().join("plugins")).unwrap();
        let marker = |name: &str| {
            Marker::for_volume(&pod.path().join("volumes/kubernetes.io~csi").join(name)).unwrap()
        };
        let (marker, other) = (marker("pv"), marker("other"));
        assert_eq!(marker.state(), MarkerState::Given);
        marker.make().unwrap();
        other.begin().unwrap();
        assert_eq!((marker.state(), other.state()), (MarkerState::Due, MarkerState::Begun));
        marker.begin().unwrap();
        marker.begin().unwrap();
        assert_eq!(marker.state(), MarkerState::Begun);
        marker.make().unwrap();
        assert_eq!(marker.state(), MarkerState::Due, "an earlier walk was that of an earlier mount");
        marker.remove();
        marker.remove();
        assert_eq!((marker.state(), other.state()), (MarkerState::Given, MarkerState::Begun));
        assert!(Marker::for_volume(Path::new("pv")).is_err());
    }

    #[test]
    fn pipe_in_the_place_of_a_marker_does_not_block() {
        crate::util::testing::unblocked(|| {
            let pod = tempfile::tempdir().unwrap();
            let marker = Marker::for_volume(&pod.path().join("volumes/kubernetes.io~csi/pv")).unwrap();
            std::fs::create_dir_all(&marker.0).unwrap();
            crate::util::testing::fifo(&marker.0.join(BEGUN));
            marker.begin().unwrap();
            assert_eq!(marker.state(), MarkerState::Begun);
        });
    }

    #[test]
    fn complete_volume_is_not_walked_again() {
        for (was_mounted, state, expected) in [
            (false, MarkerState::Given, Policy::Always),
            (false, MarkerState::Begun, Policy::Always),
            (true, MarkerState::Given, Policy::OnRootMismatch),
            (true, MarkerState::Due, Policy::Always),
            (true, MarkerState::Begun, Policy::Always),
        ] {
            assert_eq!(policy(Policy::Always, was_mounted, state), expected);
            assert_eq!(policy(Policy::OnRootMismatch, was_mounted, state), Policy::OnRootMismatch);
        }
    }
}
