//! What a start finds on the disk: volumes of pods, and volumes that are staged. Directories are
//! listed up to a limit, and their content is not trusted. A directory that cannot be read is not an
//! empty one: a disk whose volume counted as gone would be detached while it is mounted.

use std::collections::BTreeSet;
use std::io;
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

/// What is on the disk.
#[derive(Debug, Default)]
pub(super) struct All {
    /// The volumes of pods.
    pub(super) readable: Vec<Found>,
    /// Pods have volumes there whose record is damaged.
    pub(super) damaged: Vec<Place>,
    /// Why a directory could not be read: there may be more.
    pub(super) unread: Option<io::Error>,
}

/// All volumes of pods on the disk. Those without a readable record are left out.
#[must_use]
pub fn find(root_dir: &Path) -> Vec<Found> {
    find_all(root_dir).readable
}

/// All volumes of pods on the disk, and the places of those whose record is damaged. Those without a
/// record are left out: their directories are removed with the pod, if they are empty.
pub(super) fn find_all(root_dir: &Path) -> All {
    let layout = Layout::new(root_dir);
    let (mut places, mut all) = (BTreeSet::new(), All::default());
    let mut list = |found: io::Result<Vec<String>>| {
        found.unwrap_or_else(|error| {
            all.unread.get_or_insert(error);
            Vec::new()
        })
    };
    for pod in list(entries(&paths::pods(root_dir))) {
        let pod = PodUid::from(pod.as_str());
        let Ok(dir) = paths::pod(root_dir, &pod) else { continue };
        for (form, parent) in FORMS {
            let found = list(entries(&dir.join(parent).join(DIRECTORY))).into_iter();
            places.extend(found.map(|spec_name| Place { pod: pod.clone(), spec_name, form }));
        }
    }
    // A device is published before it is linked in the pod's directory.
    for spec_name in list(block_volumes(&layout)) {
        let Ok(publish) = layout.block_publish(&spec_name) else { continue };
        for pod in list(entries(&publish)) {
            let pod = PodUid::from(pod.as_str());
            places.insert(Place { pod, spec_name: spec_name.clone(), form: Form::Block });
        }
    }
    for place in places {
        match found(&layout, &place) {
            Some(Ok(found)) => all.readable.push(found),
            Some(Err(())) => all.damaged.push(place),
            None => {}
        }
    }
    all
}

/// The forms of volumes, with the directories in that of a pod.
const FORMS: [(Form, &str); 2] = [(Form::Filesystem, "volumes"), (Form::Block, "volumeDevices")];

/// The volumes in a pod's own directory, with and without a record.
fn linked(root_dir: &Path, pod: &PodUid) -> Vec<Place> {
    let Ok(dir) = paths::pod(root_dir, pod) else { return Vec::new() };
    let mut places = Vec::new();
    for (form, parent) in FORMS {
        let found = readable(&dir.join(parent).join(DIRECTORY)).into_iter();
        places.extend(found.map(|spec_name| Place { pod: pod.clone(), spec_name, form }));
    }
    places
}

/// What one pod has on the disk, with and without a record. What cannot be read is left out: the removal
/// of the pod's directory fails then.
pub(super) fn places_of(layout: &Layout, root_dir: &Path, pod: &PodUid) -> BTreeSet<Place> {
    let mut places: BTreeSet<Place> = linked(root_dir, pod).into_iter().collect();
    for spec_name in block_volumes(layout).unwrap_or_default() {
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
///
/// # Errors
/// When a directory cannot be read.
pub(super) fn staged(layout: &Layout) -> io::Result<Vec<(String, String)>> {
    let devices = block_volumes(layout)?.into_iter().filter_map(|name| layout.block(&name).ok());
    let dirs = staged_dirs(layout)?.into_iter().chain(devices.map(|dir| dir.join("data")));
    let named = dirs.filter_map(|dir| match Record::read(&dir) {
        Look::Record(record) => Some((record.driver_name, record.volume_handle)),
        Look::Missing | Look::Damaged(_) => None,
    });
    Ok(named.collect())
}

/// Whether the record of a staged file system is damaged.
pub(super) fn has_damaged(layout: &Layout) -> bool {
    let dirs = staged_dirs(layout).unwrap_or_default();
    dirs.iter().any(|dir| matches!(Record::read(dir), Look::Damaged(_)))
}

/// Whether the volume of this unique name may be staged, with a damaged record.
pub(super) fn is_damaged(layout: &Layout, name: &str) -> bool {
    let dir = names::parts(name).and_then(|(driver, handle)| layout.staged(driver, handle).ok());
    dir.is_some_and(|dir| matches!(Record::read(&dir), Look::Damaged(_)))
}

/// Whether the volume of this unique name has anything on the disk of the node, or may have, apart from
/// block volumes with a damaged record. It may if a directory cannot be read.
pub(super) fn may_be_staged(layout: &Layout, name: &str) -> bool {
    let is_it = |(driver, handle): &(String, String)| names::unique_name(driver, handle) == name;
    staged(layout).map_or(true, |staged| staged.iter().any(is_it)) || is_damaged(layout, name)
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
        || !is_empty(&publish)
        || is_file
        || !is_empty(&staging)
        || mounter.is_mount_point(&staging).unwrap_or(true)
}

/// The directories of staged file systems.
///
/// # Errors
/// When a directory cannot be read.
pub(super) fn staged_dirs(layout: &Layout) -> io::Result<Vec<PathBuf>> {
    let shared = layout.shared();
    let mut dirs = Vec::new();
    for driver in entries(&shared)?.into_iter().filter(|driver| driver != "volumeDevices") {
        let dir = shared.join(driver);
        dirs.extend(entries(&dir)?.into_iter().filter(|name| is_hash(name)).map(|hash| dir.join(hash)));
    }
    Ok(dirs)
}

/// The names of block volumes on the node.
///
/// # Errors
/// When their directory cannot be read.
pub(super) fn block_volumes(layout: &Layout) -> io::Result<Vec<String>> {
    let all = entries(&layout.shared().join("volumeDevices"))?;
    Ok(all.into_iter().filter(|name| name != "staging" && name != "publish").collect())
}

/// Whether something is mounted at one of the usual places in `dir`. An unreadable table or directory
/// counts as a mount.
pub(super) fn is_any_below(mounter: &dyn Mounter, dir: &Path) -> bool {
    let is_mounted = |path: PathBuf| mounter.is_mount_point(&path).unwrap_or(true);
    is_mounted(dir.join(GLOBAL_MOUNT))
        || entries(&dir.join("dev"))
            .map_or(true, |pods| pods.iter().any(|pod| is_mounted(dir.join("dev").join(pod))))
}

/// Drivers keep their own files beside the staged volumes.
fn is_hash(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The names in a directory; none if there is no directory.
fn entries(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        // Drivers may have files beside their directories.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries.take(MAX_ENTRIES) {
        names.extend(entry?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// As [`entries`]; none if it cannot be read.
fn readable(dir: &Path) -> Vec<String> {
    entries(dir).unwrap_or_default()
}

/// Whether nothing is in a directory, as far as it can be read.
fn is_empty(dir: &Path) -> bool {
    entries(dir).is_ok_and(|names| names.is_empty())
}
