//! What a start finds on the disk: volumes of pods, and volumes that are staged. Directories are
//! listed up to a limit, and their content is not trusted.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::super::kind::{Form, Place};
use super::super::paths;
use super::mounter::Mounter;
use super::names::{self, DIRECTORY, GLOBAL_MOUNT, Layout};
use super::record::{Look, Record};
use super::request::Lifecycle;
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
    /// Whether it is a persistent volume.
    pub is_persistent: bool,
}

/// All volumes of pods on the disk. Those without a readable record are left out.
#[must_use]
pub fn find(root_dir: &Path) -> Vec<Found> {
    find_all(root_dir).0
}

/// All volumes of pods on the disk, and the places of those whose record is damaged. Those without a
/// record are left out: their directories are removed with the pod, if they are empty.
pub(super) fn find_all(root_dir: &Path) -> (Vec<Found>, Vec<Place>) {
    let layout = Layout::new(root_dir);
    let mut places = BTreeSet::new();
    for pod in entries(&paths::pods(root_dir)) {
        places.extend(linked(root_dir, &PodUid::from(pod.as_str())));
    }
    // A device is published before it is linked in the pod's directory.
    for spec_name in block_volumes(&layout) {
        let Ok(publish) = layout.block_publish(&spec_name) else { continue };
        for pod in entries(&publish) {
            let pod = PodUid::from(pod.as_str());
            places.insert(Place { pod, spec_name: spec_name.clone(), form: Form::Block });
        }
    }
    let (mut readable, mut damaged) = (Vec::new(), Vec::new());
    for place in places {
        match found(&layout, &place) {
            Some(Ok(found)) => readable.push(found),
            Some(Err(())) => damaged.push(place),
            None => {}
        }
    }
    (readable, damaged)
}

/// The volumes in a pod's own directory, with and without a record.
fn linked(root_dir: &Path, pod: &PodUid) -> Vec<Place> {
    let Ok(dir) = paths::pod(root_dir, pod) else { return Vec::new() };
    let mut places = Vec::new();
    for (form, parent) in [(Form::Filesystem, "volumes"), (Form::Block, "volumeDevices")] {
        let found = entries(&dir.join(parent).join(DIRECTORY)).into_iter();
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

fn found(layout: &Layout, place: &Place) -> Option<Result<Found, ()>> {
    let dir = match place.form {
        Form::Filesystem => layout.of_pod(place).ok()?,
        Form::Block => layout.block(&place.spec_name).ok()?.join("data"),
    };
    match Record::read(&dir) {
        Look::Record(record) => {
            let is_persistent = record.volume_lifecycle_mode != Lifecycle::Ephemeral.as_str();
            let (driver, handle) = (record.driver_name, record.volume_handle);
            Some(Ok(Found { place: place.clone(), driver, handle, is_persistent }))
        }
        Look::Missing => None,
        Look::Damaged(why) => {
            log::warn!("the record of a volume in {} is not usable: {why}", dir.display());
            Some(Err(()))
        }
    }
}

/// The driver and the handle of each volume that is staged, or was about to be, also without a pod.
pub(super) fn staged(layout: &Layout) -> Vec<(String, String)> {
    let devices = block_volumes(layout).into_iter().filter_map(|name| layout.block(&name).ok());
    let dirs = staged_dirs(layout).into_iter().chain(devices.map(|dir| dir.join("data")));
    let named = dirs.filter_map(|dir| match Record::read(&dir) {
        Look::Record(record) => Some((record.driver_name, record.volume_handle)),
        Look::Missing | Look::Damaged(_) => None,
    });
    named.collect()
}

/// Whether the record of a staged file system is damaged.
pub(super) fn has_damaged(layout: &Layout) -> bool {
    staged_dirs(layout).iter().any(|dir| matches!(Record::read(dir), Look::Damaged(_)))
}

/// Whether the volume of this unique name may be staged, with a damaged record.
pub(super) fn is_damaged(layout: &Layout, name: &str) -> bool {
    let dir = names::parts(name).and_then(|(driver, handle)| layout.staged(driver, handle).ok());
    dir.is_some_and(|dir| matches!(Record::read(&dir), Look::Damaged(_)))
}

/// Whether the volume of this unique name has anything on the disk of the node, or may have, apart from
/// block volumes with a damaged record.
pub(super) fn may_be_staged(layout: &Layout, name: &str) -> bool {
    let is_it = |(driver, handle): &(String, String)| names::unique_name(driver, handle) == name;
    staged(layout).iter().any(is_it) || is_damaged(layout, name)
}

/// Whether anything of a block volume is left on the node apart from its record: a mount, or what a
/// driver has made.
pub(super) fn has_block_parts(mounter: &dyn Mounter, layout: &Layout, spec_name: &str) -> bool {
    let (Ok(home), Ok(publish), Ok(staging)) =
        (layout.block(spec_name), layout.block_publish(spec_name), layout.block_staging(spec_name))
    else {
        return false;
    };
    let is_file = std::fs::symlink_metadata(&staging).is_ok_and(|found| !found.is_dir());
    is_any_below(mounter, &home)
        || !entries(&publish).is_empty()
        || is_file
        || !entries(&staging).is_empty()
        || mounter.is_mount_point(&staging).unwrap_or(true)
}

/// The directories of staged file systems.
pub(super) fn staged_dirs(layout: &Layout) -> Vec<PathBuf> {
    let shared = layout.shared();
    let drivers = entries(&shared).into_iter().filter(|driver| driver != "volumeDevices");
    drivers
        .flat_map(|driver| {
            let dir = shared.join(driver);
            let hashes = entries(&dir).into_iter().filter(|name| is_hash(name));
            hashes.map(|hash| dir.join(hash)).collect::<Vec<_>>()
        })
        .collect()
}

/// The names of block volumes on the node.
pub(super) fn block_volumes(layout: &Layout) -> Vec<String> {
    let all = entries(&layout.shared().join("volumeDevices"));
    all.into_iter().filter(|name| name != "staging" && name != "publish").collect()
}

/// Whether something is mounted at one of the usual places in `dir`. An unreadable table counts as
/// a mount.
pub(super) fn is_any_below(mounter: &dyn Mounter, dir: &Path) -> bool {
    let is_mounted = |path: PathBuf| mounter.is_mount_point(&path).unwrap_or(true);
    is_mounted(dir.join(GLOBAL_MOUNT))
        || entries(&dir.join("dev")).iter().any(|pod| is_mounted(dir.join("dev").join(pod)))
}

/// Drivers keep their own files beside the staged volumes.
fn is_hash(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn entries(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let names = entries.flatten().take(MAX_ENTRIES);
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
