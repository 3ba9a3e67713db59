//! What a start finds on the disk: volumes of pods, and volumes that are staged. Directories are
//! listed up to a limit, and their content is not trusted. A directory that cannot be read is not an
//! empty one: a disk whose volume counted as gone would be detached while it is mounted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::{Form, VolumeLocation};
use super::super::paths;
use super::error::io;
use super::mounter::Mounter;
use super::names::{self, DIRECTORY, GLOBAL_MOUNT, Layout};
use super::record::{Record, RecordFile};
use super::request::Lifecycle;
use crate::model::ids::PodUid;

/// Entries of one directory that are read.
const MAX_ENTRIES: usize = 10_000;

/// A volume of a pod that an earlier agent has published, or was about to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FoundVolume {
    pub(super) location: VolumeLocation,
    pub(super) unique_name: String,
    pub(super) is_persistent: bool,
}

/// What is on the disk.
#[derive(Debug, Default)]
pub(super) struct PodVolumes {
    /// The volumes of pods.
    pub(super) readable: Vec<FoundVolume>,
    /// Pods have volumes there whose record is damaged.
    pub(super) damaged: Vec<VolumeLocation>,
}

/// What is staged on the node, or was about to be, also without a pod.
#[derive(Debug, Default)]
pub(super) struct StagedVolumes {
    /// The unique names of the volumes.
    pub(super) readable: Vec<String>,
    /// The names of block volumes whose record is damaged.
    pub(super) damaged_blocks: Vec<String>,
    /// Whether the record of a file system is damaged.
    pub(super) has_damaged: bool,
}

/// Directories that cannot be read, and why. What is in them is not known.
#[derive(Debug, Default)]
pub(super) struct UnreadableDirs(BTreeMap<PathBuf, String>);

impl UnreadableDirs {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces what is known, and logs what has changed.
    pub(super) fn replace(&mut self, now: UnreadableDirs) {
        for (dir, error) in now.0.iter().filter(|(dir, _)| !self.0.contains_key(*dir)) {
            let dir = dir.display();
            log::error!("CSI volumes: {dir} cannot be read, and what may be there is not detached: {error}");
        }
        for dir in self.0.keys().filter(|dir| !now.0.contains_key(*dir)) {
            log::info!("CSI volumes: {} can be read again", dir.display());
        }
        *self = now;
    }

    /// The names in a directory as far as it can be read; none if there is no directory.
    fn list(&mut self, dir: &Path) -> Vec<String> {
        let mut names = Vec::new();
        if let Err(error) = read_names(dir, &mut names) {
            self.0.insert(dir.to_owned(), error.to_string());
        }
        names.sort();
        names
    }

    /// Whether volumes of any driver may be there, and pods that use them.
    pub(super) fn hides_pods(&self, layout: &Layout) -> bool {
        self.0.keys().any(|dir| driver_of(layout, dir).is_none())
    }

    /// Whether the volume of this unique name may be there.
    pub(super) fn may_have(&self, layout: &Layout, name: &str) -> bool {
        let is_its = |driver: &str, dir: &Path| driver_of(layout, dir).is_none_or(|own| own == driver);
        names::parts(name).is_some_and(|(driver, _)| self.0.keys().any(|dir| is_its(driver, dir)))
    }

    /// # Errors
    /// If there is one.
    pub(super) fn result(&self) -> Result<(), VolumeError> {
        let fails = |(dir, error): (&PathBuf, &String)| {
            io("list the volumes in", dir)(std::io::Error::other(error.clone()))
        };
        self.0.iter().next().map_or(Ok(()), |first| Err(fails(first)))
    }
}

/// The driver whose staged file systems are in this directory, and nothing else.
fn driver_of<'a>(layout: &Layout, dir: &'a Path) -> Option<&'a str> {
    let name = dir.file_name()?.to_str()?;
    (dir.parent()? == layout.shared() && name != "volumeDevices").then_some(name)
}

/// All volumes of pods on the disk, and the locations of those whose record is damaged. Those without a
/// record are left out: their directories are removed with the pod, if they are empty.
pub(super) fn find_all(root_dir: &Path, unread: &mut UnreadableDirs) -> PodVolumes {
    let layout = Layout::new(root_dir);
    let (mut locations, mut all) = (BTreeSet::new(), PodVolumes::default());
    for pod in unread.list(&paths::pods(root_dir)) {
        let pod = PodUid::from(pod.as_str());
        locations.extend(in_pod(root_dir, &pod, unread));
    }
    // A device is published before it is linked in the pod's directory.
    for spec_name in block_volumes(&layout, unread) {
        let Ok(block) = layout.block_paths(&spec_name) else { continue };
        for pod in unread.list(&block.publish) {
            let pod = PodUid::from(pod.as_str());
            locations.insert(VolumeLocation { pod, spec_name: spec_name.clone(), form: Form::Block });
        }
    }
    for location in locations {
        match found(&layout, &location) {
            Some(Ok(found)) => all.readable.push(found),
            Some(Err(())) => all.damaged.push(location),
            None => {}
        }
    }
    all
}

/// The volumes in a pod's own directory, with and without a record.
fn in_pod(root_dir: &Path, pod: &PodUid, unread: &mut UnreadableDirs) -> Vec<VolumeLocation> {
    let Ok(dir) = paths::pod(root_dir, pod) else { return Vec::new() };
    let forms = [(Form::Filesystem, "volumes"), (Form::Block, "volumeDevices")];
    let of_form = |(form, parent): (Form, &str)| {
        let found = unread.list(&dir.join(parent).join(DIRECTORY)).into_iter();
        found.map(move |spec_name| VolumeLocation { pod: pod.clone(), spec_name, form })
    };
    forms.into_iter().flat_map(of_form).collect()
}

/// What one pod has on the disk, with and without a record. What cannot be read is left out: the removal
/// of the pod's directory fails then.
pub(super) fn locations_of(layout: &Layout, root_dir: &Path, pod: &PodUid) -> BTreeSet<VolumeLocation> {
    let mut unread = UnreadableDirs::default();
    let mut locations: BTreeSet<VolumeLocation> = in_pod(root_dir, pod, &mut unread).into_iter().collect();
    for spec_name in block_volumes(layout, &mut unread) {
        let Ok(block) = layout.block_paths(&spec_name) else { continue };
        if std::fs::symlink_metadata(block.publish.join(pod.as_str())).is_ok() {
            locations.insert(VolumeLocation { pod: pod.clone(), spec_name, form: Form::Block });
        }
    }
    locations
}

/// The directory of the record.
fn record_dir(layout: &Layout, location: &VolumeLocation) -> Option<PathBuf> {
    match location.form {
        Form::Filesystem => layout.of_pod(location).ok(),
        Form::Block => Some(layout.block_paths(&location.spec_name).ok()?.data),
    }
}

/// What is at the place of a record of a pod.
pub(super) fn record_of(layout: &Layout, location: &VolumeLocation) -> RecordFile {
    record_dir(layout, location).map_or(RecordFile::Missing, |dir| Record::read(&dir))
}

fn found(layout: &Layout, location: &VolumeLocation) -> Option<Result<FoundVolume, ()>> {
    match record_of(layout, location) {
        RecordFile::Readable(record) => {
            let is_persistent = record.volume_lifecycle_mode != Lifecycle::Ephemeral.as_str();
            let (location, unique_name) = (location.clone(), record.unique_name());
            Some(Ok(FoundVolume { location, unique_name, is_persistent }))
        }
        RecordFile::Missing => None,
        RecordFile::Damaged(error) => {
            let VolumeLocation { pod, spec_name, .. } = location;
            log::warn!("the record of volume {spec_name} of pod {pod} is not usable: {error}");
            Some(Err(()))
        }
    }
}

pub(super) fn staged(layout: &Layout, unread: &mut UnreadableDirs) -> StagedVolumes {
    let mut staged = StagedVolumes::default();
    for dir in staged_dirs(layout, unread) {
        match Record::read(&dir) {
            RecordFile::Readable(record) => staged.readable.push(record.unique_name()),
            RecordFile::Missing => {}
            RecordFile::Damaged(_) => staged.has_damaged = true,
        }
    }
    for name in block_volumes(layout, unread) {
        match layout.block_paths(&name).map(|block| Record::read(&block.data)) {
            Ok(RecordFile::Readable(record)) => staged.readable.push(record.unique_name()),
            Ok(RecordFile::Damaged(_)) => staged.damaged_blocks.push(name),
            Ok(RecordFile::Missing) | Err(_) => {}
        }
    }
    staged
}

/// Whether the volume of this unique name is a staged file system. Its record may be damaged.
pub(super) fn is_staged(layout: &Layout, name: &str) -> bool {
    let dir = names::parts(name).and_then(|(driver, handle)| layout.staged(driver, handle).ok());
    dir.is_some_and(|dir| Record::read(&dir) != RecordFile::Missing)
}

/// Whether the volume of this unique name has anything on the disk of the node, or may have, apart from
/// block volumes with a damaged record. It may if a directory cannot be read that may have it.
pub(super) fn may_be_staged(layout: &Layout, name: &str) -> bool {
    let mut unread = UnreadableDirs::default();
    staged(layout, &mut unread).readable.iter().any(|staged| staged == name)
        || unread.may_have(layout, name)
        || is_staged(layout, name)
}

/// Whether anything of a block volume is left on the node apart from its record: a mount, or what a
/// driver has made.
pub(super) fn has_block_parts(mounter: &dyn Mounter, layout: &Layout, spec_name: &str) -> bool {
    let Ok(block) = layout.block_paths(spec_name) else { return false };
    let is_file = std::fs::symlink_metadata(&block.staging).is_ok_and(|metadata| !metadata.is_dir());
    is_any_below(mounter, &block.home)
        || !is_empty(&block.publish)
        || is_file
        || !is_empty(&block.staging)
        || mounter.is_mount_point(&block.staging).unwrap_or(true)
}

/// The directories of staged file systems.
pub(super) fn staged_dirs(layout: &Layout, unread: &mut UnreadableDirs) -> Vec<PathBuf> {
    let shared = layout.shared();
    let mut dirs = Vec::new();
    for driver in unread.list(&shared).into_iter().filter(|driver| driver != "volumeDevices") {
        let dir = shared.join(driver);
        dirs.extend(unread.list(&dir).into_iter().filter(|name| is_hash(name)).map(|hash| dir.join(hash)));
    }
    dirs
}

/// The names of block volumes on the node.
pub(super) fn block_volumes(layout: &Layout, unread: &mut UnreadableDirs) -> Vec<String> {
    let all = unread.list(&layout.devices()).into_iter();
    all.filter(|name| name != "staging" && name != "publish").collect()
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
fn entries(dir: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    read_names(dir, &mut names)?;
    names.sort();
    Ok(names)
}

/// Adds the names in a directory.
///
/// # Errors
/// When the directory cannot be read, or has too many entries; some names were added perhaps.
fn read_names(dir: &Path, names: &mut Vec<String>) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        // Drivers may have files beside their directories.
        Err(error)
            if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
        {
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for (number, entry) in entries.enumerate() {
        let entry = entry?;
        if number >= MAX_ENTRIES {
            return Err(std::io::Error::other(format!("it has more than {MAX_ENTRIES} entries")));
        }
        names.extend(entry.file_name().into_string().ok());
    }
    Ok(())
}

/// Whether nothing is in a directory, as far as it can be read.
fn is_empty(dir: &Path) -> bool {
    entries(dir).is_ok_and(|names| names.is_empty())
}
