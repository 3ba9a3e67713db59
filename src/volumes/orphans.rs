//! Directories of pods that are in no source any more.

use std::os::fd::AsFd;

use rustix::io::Errno;

use super::error::VolumeError;
use super::manager::Volumes;
use super::{empty_dir, mounts, paths};
use crate::model::ids::PodUid;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;
use crate::util::tree::{self, Leftover};

/// The result of one sweep.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OrphanReport {
    /// Pods whose directory was removed.
    pub removed: Vec<PodUid>,
    /// Pods whose directory could not be removed, with the reason.
    pub left: Vec<(PodUid, String)>,
}

impl Volumes {
    /// Removes the directory of every pod for which `known` is false. `known` must be true for pods
    /// with containers in the runtime, and for all pods until every source has reported. Mounts are
    /// unmounted first; if that fails the directory is not changed.
    ///
    /// # Errors
    /// When the directory of all pods cannot be read.
    pub fn orphans(
        &self,
        known: &dyn Fn(&PodUid) -> bool,
        stop: &StopToken,
    ) -> Result<OrphanReport, VolumeError> {
        let pods = paths::pods(&self.settings.root_dir);
        let dir = match tree::open(&pods) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => return Ok(OrphanReport::default()),
            Err(errno) => return Err(VolumeError::io("open", &pods)(errno)),
        };
        let mut report = OrphanReport::default();
        for name in tree::names(dir.as_fd()).map_err(VolumeError::io("list", &pods))? {
            let uid = PodUid::from(empty_dir::shown(&name));
            if known(&uid) || tree::open_at(dir.as_fd(), &name).is_err() {
                continue;
            }
            match self.remove_pod(&uid, stop) {
                Ok(()) => report.removed.push(uid),
                Err(VolumeError::Stopping) => break,
                Err(error) => {
                    let text = format!("orphaned pod {:?} found, but {}", uid.as_str(), chain(&error));
                    report.left.push((uid, text));
                }
            }
        }
        self.sweep_devices(stop);
        Ok(report)
    }

    fn remove_pod(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        self.tear_down(uid, stop)?;
        let path = paths::pod(&self.settings.root_dir, uid)?;
        let still = mounts::below(&mounts::read()?, &path);
        if let Some(mount) = still.first() {
            return Err(VolumeError::LeftBehind {
                volumes: still.iter().map(|mount| mount.display().to_string()).collect(),
                cause: format!("{} is mounted", mount.display()),
            });
        }
        let name = std::ffi::CString::new(uid.as_str())
            .map_err(|_| VolumeError::Name { name: uid.as_str().to_owned() })?;
        let pods = paths::pods(&self.settings.root_dir);
        let dir = tree::open(&pods).map_err(VolumeError::io("open", &pods))?;
        match tree::remove_at(dir.as_fd(), &name, stop) {
            Ok(()) => Ok(()),
            Err(Leftover::Stopping) => Err(VolumeError::Stopping),
            Err(Leftover::Entry { path: entry, errno }) => {
                Err(VolumeError::io("remove", &path.join(entry))(errno))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::manager::{Deps, Settings};
    use super::*;
    use crate::model::event::EventSink;

    #[test]
    fn directories_of_unknown_pods_are_removed_without_foreign_data() {
        let root = tempfile::tempdir().unwrap();
        let (events, _) = EventSink::new();
        let settings = Settings {
            root_dir: root.path().to_owned(),
            allocatable: Default::default(),
            plugin_dir: Default::default(),
            node: String::new(),
        };
        let volumes = Volumes::new(settings, Deps { events, api: None, local: Default::default() });
        let none = volumes.orphans(&|_| false, &StopToken::never()).unwrap();
        assert_eq!(none, OrphanReport::default());
        let pods = root.path().join("pods");
        for dir in [
            "known/volumes/kubernetes.io~empty-dir/e/data",
            "gone/volumes/kubernetes.io~empty-dir/e/data",
            "gone/containers/c",
            "foreign/volumes/kubernetes.io~csi/v/mount/data",
            "foreign/containers/c",
        ] {
            std::fs::create_dir_all(pods.join(dir)).unwrap();
        }
        std::fs::write(pods.join("gone/etc-hosts"), "x").unwrap();
        std::fs::write(pods.join("no-directory"), "x").unwrap();
        let report = volumes.orphans(&|uid| uid.as_str() == "known", &StopToken::never()).unwrap();
        assert_eq!(report.removed, [PodUid::from("gone")]);
        assert_eq!(report.left.len(), 1);
        let (uid, text) = &report.left[0];
        assert_eq!(uid.as_str(), "foreign");
        assert!(
            text.starts_with("orphaned pod \"foreign\" found, but mounted volumes=[kubernetes.io~csi/v]"),
            "{text}"
        );
        assert!(pods.join("foreign/volumes/kubernetes.io~csi/v/mount/data").exists());
        assert!(pods.join("known/volumes/kubernetes.io~empty-dir/e/data").exists());
        assert!(pods.join("no-directory").exists());
    }
}
