//! The table of plugins: one row for each kind of volume.

use std::path::PathBuf;

use super::error::VolumeError;
use super::files::TargetPod;
use super::persistent::Storage;
use super::plugin::Plugin;
use crate::model::api::{EmptyDirVolumeSource, ImageVolumeSource, Volume};
use crate::model::mount::MountedVolume;
use crate::model::persistent::{Source, Spec};
use crate::model::pod::Pod;
use crate::model::quantity::Amount;

/// A row: the plugin of a volume if its source in the pod is of this kind.
type Row = fn(&Volume) -> Option<&dyn Plugin>;

/// The kinds of volumes of which there are no persistent ones, and hostPath. The others are in
/// [`storage`].
static PLUGINS: [Row; 7] = [
    |volume| row(volume.host_path.as_ref()),
    |volume| row(volume.empty_dir.as_ref()),
    |volume| row(volume.downward_api.as_ref()),
    |volume| row(volume.projected.as_ref()),
    |volume| row(volume.image.as_ref()),
    |volume| row(volume.config_map.as_ref()),
    |volume| row(volume.secret.as_ref()),
];

/// A volume without a source is an emptyDir by the API's defaults.
static NO_SOURCE: EmptyDirVolumeSource = EmptyDirVolumeSource { medium: None, size_limit: None, mode: None };

fn row<T: Plugin>(source: Option<&T>) -> Option<&dyn Plugin> {
    source.map(|source| source as &dyn Plugin)
}

/// The storage of a volume: that of a persistent volume, or one that helper programs or drivers mount.
pub(super) fn storage(source: &Source) -> &dyn Storage {
    match source {
        Source::HostPath(source) => source,
        Source::Local(source) => source,
        Source::Nfs(source) => source,
        Source::Iscsi(source) => source,
        Source::Fc(source) => source,
        Source::Flex(source) => source,
        Source::Csi(source) => source,
        Source::Other(kind) => kind,
    }
}

/// The plugin of a volume with a row in [`PLUGINS`].
pub(super) fn find(volume: &Volume) -> Option<&dyn Plugin> {
    let has_no_source = || *volume == Volume { name: volume.name.clone(), ..Volume::default() };
    let found = PLUGINS.iter().find_map(|row| row(volume));
    found.or_else(|| has_no_source().then_some(&NO_SOURCE as &dyn Plugin))
}

/// What the plugin of a volume says; `None`: the volume is one of a claim, or not supported.
pub(super) fn with_plugin<T>(pod: &Pod, volume: &Volume, read: impl FnOnce(&dyn Plugin) -> T) -> Option<T> {
    match find(volume) {
        Some(plugin) => Some(read(plugin)),
        None => Spec::inline(pod, volume).map(|spec| read(storage(&spec.source))),
    }
}

/// The runtime mounts it.
impl Plugin for ImageVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/image"
    }

    fn describe(&self) -> Option<String> {
        self.reference.clone()
    }

    fn set_up(
        &self,
        _: &TargetPod<'_>,
        volume: &str,
        _: Amount,
    ) -> Option<Result<MountedVolume, VolumeError>> {
        Some(Ok(MountedVolume {
            volume: volume.to_owned(),
            host_path: PathBuf::new(),
            read_only: true,
            selinux_relabel: false,
        }))
    }
}
