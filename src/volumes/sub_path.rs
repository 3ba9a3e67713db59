//! subPath: one object inside a volume, mounted at a path outside of the volume (Go:
//! pkg/volume/util/subpath).
//!
//! A process in the volume may replace directories with links at any moment. So the path is walked
//! with descriptors, each opened in the previous one without following links. A link inside the
//! volume is resolved by this code, as long as its target is inside; links outside are never
//! followed. The object at the end of the walk is bind-mounted by its descriptor.

use std::collections::VecDeque;
use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::{self, Errno};
use rustix::mount::UnmountFlags;

use super::error::VolumeError;
use super::manager::Volumes;
use super::mounts::Mount;
use super::operations::{OperationScope, Operations};
use super::{mounts, operations, paths};
use crate::model::ids::PodUid;
use crate::model::mount::{SubPath, SubPathFailure, SubPaths};
use crate::util::disk_writes;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;
use crate::util::tree::{self, RemovalError};

/// The most links in a path that are followed, as in the kernel.
const MAX_LINKS: usize = 40;
/// The most directories that are open at the same time.
const MAX_DEPTH: usize = 512;
/// The limit of stacked mounts at a target, left by agents that were killed.
const MAX_STACKED: usize = 16;

const HOLD: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The step at which a sub path failed, for the log.
#[derive(Debug)]
struct FailedStep {
    kind: SubPathFailure,
    what: &'static str,
    errno: Errno,
}

impl FailedStep {
    fn prepare(what: &'static str) -> impl FnOnce(Errno) -> FailedStep {
        move |errno| FailedStep { kind: SubPathFailure::Prepare, what, errno }
    }
}

impl SubPaths for Volumes {
    fn bind(&self, wanted: SubPath<'_>, stop: &StopToken) -> Result<PathBuf, SubPathFailure> {
        let SubPath { pod, container, index, volume, path } = wanted;
        let result = self.sub_path_target(&wanted).and_then(|target| {
            let (root, sub_path) = (volume.host_path.clone(), path.to_owned());
            let place = target.clone();
            let operation = SubPathOperation {
                operations: self.operations.clone(),
                pod: pod.clone(),
                // Not that of the volume's own operations, such as an update that waits for its driver.
                volume: format!("{}/{}", volume.volume, paths::SUB_PATHS),
            };
            let key = operation.volume.clone();
            let work = move || {
                let made = bind(&root, Path::new(&sub_path), &target, &operation);
                made.map(|()| target.path()).map_err(|failed| VolumeError::SubPath {
                    kind: failed.kind,
                    what: failed.what,
                    source: failed.errno.into(),
                })
            };
            if is_local(&volume.host_path, &place.pod_dir) {
                work()
            } else {
                let key = (pod, key.as_str(), &OperationScope::default());
                self.operations.run(key, operations::LIMIT, stop, move |_| work())
            }
        });
        result.map_err(|error| {
            if !stop.is_stopped() {
                log::warn!(
                    "cannot use sub path {path:?} of volume {:?} at {} for volumeMount {index} of container {container:?}: {} uid={pod}",
                    volume.volume,
                    volume.host_path.display(),
                    chain(&error),
                );
            }
            match error {
                VolumeError::SubPath { kind, .. } => kind,
                _ => SubPathFailure::Prepare,
            }
        })
    }
}

/// Whether a volume is one of those that are made of the agent's own directories and memory, which
/// do not hang. Other volumes below the pod's directory may be mounts of servers and disks.
fn is_local(volume: &Path, pod_dir: &Path) -> bool {
    let plugin = volume.strip_prefix(pod_dir.join("volumes")).ok().and_then(|way| way.iter().next());
    plugin.is_some_and(|plugin| paths::OWNED_CONTENT.iter().any(|owned| plugin == *owned))
}

/// `pods/<uid>/volume-subpaths/<volume>/<container>/<index>`.
#[derive(Debug, Clone)]
struct Target {
    pod_dir: PathBuf,
    /// The last element of the pod's directory.
    pod: CString,
    above: [CString; 3],
    name: CString,
}

impl Target {
    fn path(&self) -> PathBuf {
        let mut path = self.pod_dir.clone();
        path.extend(
            self.above.iter().chain([&self.name]).map(|name| OsString::from_vec(name.to_bytes().to_vec())),
        );
        path
    }
}

impl Volumes {
    fn sub_path_target(&self, wanted: &SubPath<'_>) -> Result<Target, VolumeError> {
        Ok(Target {
            pod_dir: paths::pod(&self.settings.root_dir, wanted.pod)?,
            pod: paths::c_name(wanted.pod.as_str())?,
            above: [
                paths::c_name(paths::SUB_PATHS)?,
                paths::c_name(&wanted.volume.volume)?,
                paths::c_name(wanted.container)?,
            ],
            name: paths::c_name(&wanted.index.to_string())?,
        })
    }
}

/// The operation that makes a sub path, as the removal of the pod's volumes knows it. The server of
/// the volume may not respond.
#[derive(Debug, Default)]
struct SubPathOperation {
    operations: Operations,
    pod: PodUid,
    volume: String,
}

impl SubPathOperation {
    fn leave_pod_dir(&self) {
        self.operations.leave_pod_dir(&self.pod, &self.volume);
    }

    fn enter_pod_dir(&self) -> Result<(), FailedStep> {
        let ended = |_| FailedStep::prepare("wait for a pod that is removed")(Errno::CANCELED);
        self.operations.enter_pod_dir(&self.pod, &self.volume).map_err(ended)
    }
}

fn bind(
    root: &Path,
    sub_path: &Path,
    target: &Target,
    operation: &SubPathOperation,
) -> Result<(), FailedStep> {
    operation.leave_pod_dir();
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = fs::open(root, flags, Mode::empty()).map_err(FailedStep::prepare("open the volume"))?;
    let object = walk(root, sub_path)?;
    let stat = fs::fstat(&object).map_err(FailedStep::prepare("inspect the object"))?;
    operation.enter_pod_dir()?;
    let parent = target_parent(target).map_err(FailedStep::prepare("make the directory above the target"))?;
    operation.leave_pod_dir();
    let table = mounts::table().unwrap_or_default();
    if !is_foreign(&table, &target.path(), &stat)
        && is_at(parent.as_fd(), target, &stat).map_err(FailedStep::prepare("inspect the target"))?
    {
        return Ok(());
    }
    operation.enter_pod_dir()?;
    clear(parent.as_fd(), target).map_err(FailedStep::prepare("clear the target"))?;
    let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let place =
        make_target(parent.as_fd(), target, is_dir).map_err(FailedStep::prepare("make the target"))?;
    let fd_path = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::mount::mount_bind(fd_path(&object), fd_path(&place)).map_err(FailedStep::prepare("mount"))?;
    operation.leave_pod_dir();
    match is_at(parent.as_fd(), target, &stat) {
        Ok(true) => Ok(()),
        Ok(false) => Err(FailedStep::prepare("verify the mount")(Errno::STALE)),
        Err(errno) => Err(FailedStep::prepare("verify the mount")(errno)),
    }
}

/// One element of the rest of the path.
struct PathElement {
    name: OsString,
    /// The target of a link must exist: only elements of the manifest's path are created.
    from_link: bool,
}

/// Walks from the root to the object, and makes missing elements of the manifest's path.
fn walk(root: OwnedFd, sub_path: &Path) -> Result<OwnedFd, FailedStep> {
    let prepare = FailedStep::prepare;
    let stat = fs::fstat(&root).map_err(prepare("inspect the volume"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Err(prepare("enter the volume")(Errno::NOTDIR));
    }
    let mode = stat.st_mode & 0o7777;
    let mut steps: VecDeque<PathElement> =
        elements(sub_path, false).ok_or(Errno::XDEV).map_err(prepare("stay in the volume"))?.collect();
    // From the root down to where the walk is.
    let mut levels = vec![root];
    let mut links = 0;
    while let Some(step) = steps.pop_front() {
        let Some(here) = levels.last() else { return Err(prepare("stay in the volume")(Errno::XDEV)) };
        if step.name.as_bytes() == b".." {
            levels.pop();
            if levels.is_empty() {
                return Err(prepare("stay in the volume")(Errno::XDEV));
            }
            continue;
        }
        let name = CString::new(step.name.as_bytes())
            .map_err(|_| Errno::INVAL)
            .map_err(prepare("open an element"))?;
        let next = match fs::openat(here, &name, HOLD, Mode::empty()) {
            Err(Errno::NOENT) if !step.from_link => make(here.as_fd(), &name, mode).map_err(|errno| {
                FailedStep { kind: SubPathFailure::Create, what: "make a directory", errno }
            })?,
            result => result.map_err(prepare("open an element"))?,
        };
        let stat = fs::fstat(&next).map_err(prepare("inspect an element"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if levels.len() >= MAX_DEPTH => {
                return Err(prepare("go deeper")(Errno::NAMETOOLONG));
            }
            FileType::Directory => levels.push(next),
            FileType::Symlink => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(prepare("follow links")(Errno::LOOP));
                }
                let target = fs::readlinkat(&next, c"", Vec::new()).map_err(prepare("read a link"))?;
                follow(&target, &mut levels, &mut steps).map_err(prepare("stay in the volume"))?;
            }
            _ if steps.is_empty() => return Ok(next),
            _ => return Err(prepare("enter an element")(Errno::NOTDIR)),
        }
    }
    levels.pop().ok_or(Errno::XDEV).map_err(prepare("stay in the volume"))
}

/// Puts a link's target before the remaining steps. An absolute target is inside only if it is
/// below the volume's own path.
fn follow(target: &CString, levels: &mut Vec<OwnedFd>, steps: &mut VecDeque<PathElement>) -> io::Result<()> {
    let mut target = PathBuf::from(OsString::from_vec(target.to_bytes().to_vec()));
    if target.is_absolute() {
        levels.truncate(1);
        let root = levels.first().ok_or(Errno::XDEV)?;
        let own = fs::readlinkat(rustix::fs::CWD, format!("/proc/self/fd/{}", root.as_raw_fd()), Vec::new())?;
        let own = PathBuf::from(OsString::from_vec(own.into_bytes()));
        target = target.strip_prefix(&own).map_err(|_| Errno::XDEV)?.to_owned();
    }
    let more: Vec<PathElement> = elements(&target, true).ok_or(Errno::XDEV)?.collect();
    for step in more.into_iter().rev() {
        steps.push_front(step);
    }
    Ok(())
}

/// The elements of a relative path; `None` for an absolute one.
fn elements(path: &Path, from_link: bool) -> Option<impl Iterator<Item = PathElement>> {
    if path.is_absolute() {
        return None;
    }
    Some(path.components().filter_map(move |part| match part {
        Component::Normal(_) | Component::ParentDir => {
            Some(PathElement { name: part.as_os_str().to_owned(), from_link })
        }
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    }))
}

/// Makes a directory with the volume root's mode, regardless of the umask, and opens it.
fn make(parent: BorrowedFd<'_>, name: &CString, mode: u32) -> io::Result<OwnedFd> {
    match disk_writes::created(fs::mkdirat(parent, name, Mode::from_raw_mode(mode & 0o777))) {
        Ok(()) => {
            let dir = tree::open_at(parent, name)?;
            fs::fchmod(&dir, Mode::from_raw_mode(mode))?;
            Ok(dir)
        }
        // Another process has created it: the next step checks its type.
        Err(Errno::EXIST) => fs::openat(parent, name, HOLD, Mode::empty()),
        Err(errno) => Err(errno),
    }
}

fn target_parent(target: &Target) -> io::Result<OwnedFd> {
    let pods = tree::open(target.pod_dir.parent().ok_or(Errno::INVAL)?)?;
    let mut dir = tree::open_at(pods.as_fd(), &target.pod)?;
    for name in &target.above {
        dir = tree::make_at(dir.as_fd(), name, 0o750)?.0;
    }
    Ok(dir)
}

/// Whether the object is mounted at the target. (The target itself is in no volume.)
fn is_at(parent: BorrowedFd<'_>, target: &Target, object: &Stat) -> io::Result<bool> {
    let found = fs::statat(parent, &target.name, AtFlags::SYMLINK_NOFOLLOW);
    is_same(found.map(|found| (found.st_dev, found.st_ino)), (object.st_dev, object.st_ino))
}

/// Whether what was found at the target is the object, by device and inode. Pure.
fn is_same(found: io::Result<(u64, u64)>, object: (u64, u64)) -> io::Result<bool> {
    match found {
        Ok(found) => Ok(found == object),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) if is_broken(errno) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether the server or device of an older mount has gone or has restarted, so that the mount is replaced
/// (Go: mount-utils `IsCorruptedMnt`).
fn is_broken(errno: Errno) -> bool {
    let broken = [
        Errno::STALE,
        Errno::NOTCONN,
        Errno::IO,
        Errno::ACCESS,
        Errno::HOSTDOWN,
        Errno::AGAIN,
        Errno::NODEV,
        Errno::CONNABORTED,
    ];
    broken.contains(&errno)
}

/// Whether a mount at the target is one of another server than the object's. It is not inspected
/// further: its server may not respond.
fn is_foreign(table: &[Mount], target: &Path, object: &Stat) -> bool {
    let device = format!("{}:{}", fs::major(object.st_dev), fs::minor(object.st_dev));
    let found = table.iter().rev().find(|mount| mount.point == target);
    found.is_some_and(|mount| mount.is_remote() && mount.device != device)
}

/// Unmounts what an earlier container has mounted at the target, and removes the empty target. The
/// unmount is lazy: the earlier container may still use the mount, and its server may be gone.
fn clear(parent: BorrowedFd<'_>, target: &Target) -> io::Result<()> {
    // The path starts at a descriptor, because a link may have replaced a directory above.
    let mut path = OsString::from(format!("/proc/self/fd/{}/", parent.as_raw_fd()));
    path.push(OsStr::from_bytes(target.name.as_bytes()));
    for _ in 0..MAX_STACKED {
        match rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH) {
            Ok(()) => {}
            // The target is no mount point, or does not exist.
            Err(Errno::INVAL | Errno::NOENT) => break,
            // An agent without the right to unmount has mounted nothing either.
            Err(Errno::PERM) => break,
            Err(errno) => return Err(errno),
        }
    }
    remove_empty(parent, &target.name)
}

/// Removes an empty directory or a file of ours. A mount point refuses.
fn remove_empty(parent: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<()> {
    match fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR) => {}
        Err(errno) => return Err(errno),
    }
    // Our files are empty: any other content is that of a mount.
    let stat = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_size != 0 {
        return Err(Errno::BUSY);
    }
    fs::unlinkat(parent, name, AtFlags::empty())
}

fn make_target(parent: BorrowedFd<'_>, target: &Target, is_dir: bool) -> io::Result<OwnedFd> {
    if is_dir {
        fs::mkdirat(parent, &target.name, Mode::from_raw_mode(0o750))?;
    } else {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::openat(parent, &target.name, flags, Mode::from_raw_mode(0o640))?;
    }
    disk_writes::file(0);
    fs::openat(parent, &target.name, HOLD, Mode::empty())
}

/// Removes the targets below `volume-subpaths` of a pod: empty directories and files, never their
/// content.
pub(super) fn remove_targets(pod_dir: BorrowedFd<'_>) -> Result<(), RemovalError> {
    let top = match tree::open_same_mount(pod_dir, c"volume-subpaths") {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(RemovalError::Entry { path: String::new(), errno }),
    };
    let failed =
        |name: &CString, errno| RemovalError::Entry { path: super::empty_dir::name_text(name), errno };
    for volume in tree::names(top.as_fd()).unwrap_or_default() {
        let removed = tree::open_same_mount(top.as_fd(), &volume).and_then(|dir| {
            for container in tree::names(dir.as_fd())? {
                let targets = tree::open_same_mount(dir.as_fd(), &container)?;
                for target in tree::names(targets.as_fd())? {
                    remove_empty(targets.as_fd(), &target)?;
                }
                fs::unlinkat(&dir, &container, AtFlags::REMOVEDIR)?;
            }
            fs::unlinkat(&top, &volume, AtFlags::REMOVEDIR)
        });
        removed.map_err(|errno| failed(&volume, errno))?;
    }
    match fs::unlinkat(pod_dir, c"volume-subpaths", AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(RemovalError::Entry { path: String::new(), errno }),
    }
}

#[cfg(test)]
mod tests;
