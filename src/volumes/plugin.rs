//! What each kind of volume offers to this room (Go: pkg/volume `VolumePlugin`). A plugin is the
//! source of one volume, as the API has it; `plugin_table` finds it. A volume whose data are
//! outside of the root directory has a [`Storage`](super::persistent::Storage) too.

use super::atomic_writer::Payload;
use super::error::VolumeError;
use super::files::TargetPod;
use crate::kube::objects::{Key, Kind};
use crate::kube::{LocalObjects, PodDependencies, PodObjects};
use crate::model::event::EventSink;
use crate::model::fields::NodeAllocatable;
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::util::stop::StopToken;

/// The source of a volume.
pub(super) trait Plugin {
    /// The Go kubelet's name of the plugin: in metrics and, with `~` in the place of `/`, in the paths
    /// of volumes.
    fn name(&self) -> &'static str;

    /// The object, driver, server or path, for `coracle volumes`.
    fn describe(&self) -> Option<String> {
        None
    }

    /// The files of a volume that consists of files which the agent writes.
    fn files(&self) -> Option<&dyn Files> {
        None
    }

    /// Sets up another volume that is only in the agent's own directories. `None`: the set-up may hang,
    /// and is that of [`Storage`](super::persistent::Storage).
    fn set_up(
        &self,
        target: &TargetPod<'_>,
        volume: &str,
        allocatable_memory: Amount,
    ) -> Option<Result<MountedVolume, VolumeError>> {
        let _ = (target, volume, allocatable_memory);
        None
    }
}

/// A volume of files that the agent writes, and brings up to date at each sync of the pod.
pub(super) trait Files: Plugin {
    /// The files. May wait for the API server.
    ///
    /// # Errors
    /// When they are not complete.
    fn payload(&self, request: &FilesRequest<'_>) -> Result<Payload, VolumeError>;

    /// Whether the agent has all that the files are made of, so that nothing has to be requested.
    fn is_at_hand(&self, request: &FilesRequest<'_>) -> bool;

    /// Whether the files may be on a disk, and not only in memory: they are no secret.
    fn is_on_disk(&self) -> bool {
        false
    }
}

/// A volume whose files are wanted.
pub(super) struct FilesRequest<'a> {
    pub(super) pod: &'a Pod,
    /// Its name in the pod.
    pub(super) volume: &'a str,
    pub(super) sources: &'a FileSources<'a>,
    pub(super) stop: &'a StopToken,
}

/// Where the files of volumes come from.
pub(super) struct FileSources<'a> {
    pub(super) api: Option<&'a PodDependencies>,
    pub(super) local: &'a LocalObjects,
    pub(super) allocatable: &'a NodeAllocatable,
    /// The sink of warnings about certificates.
    pub(super) events: &'a EventSink,
    /// The feature gate `AtomicWriteVolumeUserFields`: the pod may name the owners of files.
    pub(super) has_user_fields: bool,
}

impl<'a> FilesRequest<'a> {
    /// The ConfigMaps and Secrets of the pod.
    ///
    /// # Errors
    /// When there is no source of them.
    pub(super) fn objects(&self) -> Result<PodObjects<'a>, VolumeError> {
        let objects = PodObjects::for_pod(self.pod, self.sources.api, self.sources.local);
        objects.ok_or_else(|| VolumeError::Content {
            problem: "not supported due to running kubelet in standalone mode".to_owned(),
        })
    }

    /// Whether reading the object needs no request.
    pub(super) fn has(&self, kind: Kind, name: &str) -> bool {
        let key = Key::new(kind, self.pod.namespace(), name);
        self.objects().map_or(true, |objects| objects.is_cached(&key))
    }
}
