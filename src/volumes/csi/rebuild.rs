//! What a start finds on the disk: volumes of pods, and volumes that are staged. Directories are
//! listed up to a limit, and their content is not trusted.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::super::kind::{Form, Place};
use super::super::paths;
use super::mounter::Mounter;
use super::names::{DIRECTORY, GLOBAL_MOUNT, Layout};
use super::record::{Look, Record};
use crate::model::ids::PodUid;

/// Entries of one directory that are read.
const MAX_ENTRIES: usize = 10_000;

/// A volume of a pod that an earlier agent has published, or was about to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Where it is.
    pub place: Place,
    /// The driver's name.
    pub driver: String,
    /// The driver's name of the volume.
    pub handle: String,
}

/// All volumes of pods on the disk. Those without a readable record are left out: their directories
/// are removed with the pod, if they are empty.
#[must_use]
pub fn find(root_dir: &Path) -> Vec<Found> {
    let layout = Layout::new(root_dir);
    let mut places = BTreeSet::new();
    for pod in names(&paths::pods(root_dir)) {
        places.extend(linked(root_dir, &PodUid::from(pod.as_str())));
    }
    // A device is published before it is linked in the pod's directory.
    for spec_name in block_volumes(&layout) {
        let Ok(publish) = layout.block_publish(&spec_name) else { continue };
        for pod in names(&publish) {
            let pod = PodUid::from(pod.as_str());
            places.insert(Place { pod, spec_name: spec_name.clone(), form: Form::Block });
        }
    }
    places.into_iter().filter_map(|place| found(&layout, place)).collect()
}

/// The volumes in a pod's own directory, with and without a record.
fn linked(root_dir: &Path, pod: &PodUid) -> Vec<Place> {
    let Ok(dir) = paths::pod(root_dir, pod) else { return Vec::new() };
    let mut places = Vec::new();
    for (form, parent) in [(Form::Filesystem, "volumes"), (Form::Block, "volumeDevices")] {
        let found = names(&dir.join(parent).join(DIRECTORY)).into_iter();
        places.extend(found.map(|spec_name| Place { pod: pod.clone(), spec_name, form }));
    }
    places
}

/// What one pod has on the disk, with and without a record.
pub(super) fn places_of(layout: &Layout, root_dir: &Path, pod: &PodUid) -> BTreeSet<Place> {
    let mut places: BTreeSet<Place> = linked(root_dir, pod).into_iter().collect();
    for spec_name in block_volumes(layout) {
        let Ok(publish) = layout.block_publish(&spec_name) else { continue };
        if std::fs::symlink_metadata(publish.join(pod.as_str())).is_ok() {
            places.insert(Place { pod: pod.clone(), spec_name, form: Form::Block });
        }
    }
    places
}

fn found(layout: &Layout, place: Place) -> Option<Found> {
    let dir = match place.form {
        Form::Filesystem => layout.of_pod(&place).ok()?,
        Form::Block => layout.block(&place.spec_name).ok()?.join("data"),
    };
    match Record::read(&dir) {
        Look::Record(record) => {
            Some(Found { place, driver: record.driver_name, handle: record.volume_handle })
        }
        Look::Missing => None,
        Look::Damaged(why) => {
            log::warn!("the record of a volume in {} is not usable: {why}", dir.display());
            None
        }
    }
}

/// The directories of staged file systems.
pub(super) fn staged_dirs(layout: &Layout) -> Vec<PathBuf> {
    let shared = layout.shared();
    let drivers = names(&shared).into_iter().filter(|driver| driver != "volumeDevices");
    drivers
        .flat_map(|driver| {
            let dir = shared.join(driver);
            let hashes = names(&dir).into_iter().filter(|name| is_hash(name));
            hashes.map(|hash| dir.join(hash)).collect::<Vec<_>>()
        })
        .collect()
}

/// The names of block volumes on the node.
pub(super) fn block_volumes(layout: &Layout) -> Vec<String> {
    let all = names(&layout.shared().join("volumeDevices"));
    all.into_iter().filter(|name| name != "staging" && name != "publish").collect()
}

/// Whether something is mounted at one of the usual places in `dir`. An unreadable table counts as
/// a mount.
pub(super) fn is_any_below(mounter: &dyn Mounter, dir: &Path) -> bool {
    let is_mounted = |path: PathBuf| mounter.is_mount_point(&path).unwrap_or(true);
    is_mounted(dir.join(GLOBAL_MOUNT))
        || names(&dir.join("dev")).iter().any(|pod| is_mounted(dir.join("dev").join(pod)))
}

/// Drivers keep their own files beside the staged volumes.
fn is_hash(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let names = entries.flatten().take(MAX_ENTRIES);
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
