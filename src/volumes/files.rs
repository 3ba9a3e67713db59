//! Volumes made of files that the agent writes, kept up to date.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use jiff::Timestamp;
use rustix::io::Errno;

use super::atomic_writer::{self, Payload};
use super::empty_dir::{self, Medium, Place};
use super::ownership::{self, Access, Broken, Policy};
use super::{VolumeError, paths, tree};
use crate::model::api::{Container, EmptyDirVolumeSource};
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::util::stop::StopToken;

/// Makes the volume if it is not there, and brings its files to `payload`.
pub(super) fn set_up(
    pod: &Pod,
    (plugin, volume): (&'static str, &str),
    payload: &Payload,
    (pod_path, pod_dir): (&Path, BorrowedFd<'_>),
    allocatable_memory: Amount,
    stop: &StopToken,
) -> Result<MountedVolume, VolumeError> {
    let place = Place { pod_path, pod_dir, plugin, volume, marker: format!("wrapped_{volume}") };
    // A ConfigMap is no secret: it may lie on the disk.
    let medium = if plugin == paths::CONFIG_MAP {
        Medium::Disk
    } else {
        let source = EmptyDirVolumeSource::default();
        Medium::Memory { bytes: empty_dir::memory_size(pod, &source, allocatable_memory) }
    };
    let dir = empty_dir::make(&place, medium, empty_dir::fs_group(pod), stop)?;
    fill(pod, &place, dir.as_fd(), payload, stop)?;
    Ok(MountedVolume {
        volume: volume.to_owned(),
        host_path: place.path(),
        // Writing would not last, and would be read by others as if it were true.
        read_only: true,
        selinux_relabel: true,
    })
}

fn fill(
    pod: &Pod,
    place: &Place<'_>,
    dir: BorrowedFd<'_>,
    payload: &Payload,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let path = place.path();
    for point in nested(pod, place.volume) {
        make_point(dir, &point).map_err(VolumeError::io("make nested mount point", &path.join(&point)))?;
    }
    let gid = empty_dir::fs_group(pod);
    let own = || match gid {
        None => Ok(()),
        Some(gid) => match ownership::give(dir, gid, (Access::Read, Policy::Always), stop, &mut |_| {}) {
            Ok(_) => Ok(()),
            Err(Broken::Failed(errno)) => Err(errno),
            Err(Broken::Stopping) => Err(Errno::CANCELED),
        },
    };
    match atomic_writer::write(dir, payload, Timestamp::now(), &own) {
        Ok(_) => Ok(()),
        Err(Errno::CANCELED) => Err(VolumeError::Stopping),
        Err(errno) => Err(VolumeError::io("write the files of", &path)(errno)),
    }
}

/// Where other volumes are mounted inside this one, relative to it. The runtime cannot make
/// these directories: the volume is read-only in the container.
fn nested(pod: &Pod, volume: &str) -> BTreeSet<String> {
    let mut points = BTreeSet::new();
    for container in pod.all_containers() {
        let own = mount_paths(container, |name| name == volume);
        let all = mount_paths(container, |_| true);
        for mine in &own {
            let mut outer: Option<&String> = None;
            for path in all.iter().filter(|path| below(path, mine).is_some()) {
                // What lies in an inner volume is that volume's.
                if outer.is_some_and(|outer| path == outer || below(path, outer).is_some()) {
                    continue;
                }
                outer = Some(path);
                points.extend(below(path, mine).map(str::to_owned));
            }
        }
    }
    points
}

/// The cleaned mount paths of a container's volumes, sorted so that outer ones come first.
fn mount_paths(container: &Container, of: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let mounts = container.volume_mounts.iter().flatten().filter(|mount| of(&mount.name));
    mounts.filter_map(|mount| clean(&mount.mount_path)).collect()
}

/// Without empty and `.` elements; `None` for one that climbs.
fn clean(path: &str) -> Option<String> {
    let mut clean = String::new();
    for element in path.split('/').filter(|element| !matches!(*element, "" | ".")) {
        if element == ".." {
            return None;
        }
        clean.push('/');
        clean.push_str(element);
    }
    Some(clean)
}

fn below<'a>(path: &'a str, outer: &str) -> Option<&'a str> {
    path.strip_prefix(outer)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

fn make_point(dir: BorrowedFd<'_>, point: &str) -> rustix::io::Result<()> {
    let mut above: Option<OwnedFd> = None;
    for element in point.split('/') {
        let name = paths::c_name(element).map_err(|_| Errno::INVAL)?;
        let parent = above.as_ref().map_or(dir, OwnedFd::as_fd);
        above = Some(tree::make_at(parent, &name, 0o755)?.0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(mounts: &[(&str, &str)]) -> Pod {
        let mounts: Vec<_> =
            mounts.iter().map(|(name, path)| json!({"name": name, "mountPath": path})).collect();
        let value = json!({"metadata": {"name": "p", "uid": "u"},
            "spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn mounts_inside_a_volume_have_their_directories() {
        for (mounts, expected) in [
            (vec![("v", "/etc/x")], vec![]),
            (vec![("v", "/etc/x"), ("o", "/etc/x/in")], vec!["in"]),
            (vec![("o", "/etc//x/./in/"), ("v", "/etc/x/")], vec!["in"]),
            (vec![("v", "/a"), ("o", "/a/b/c"), ("p", "/a/b/c/d"), ("q", "/a/b-c")], vec!["b-c", "b/c"]),
            (vec![("v", "/a"), ("o", "/ab"), ("p", "/a/../c")], vec![]),
            (vec![("o", "/a"), ("v", "/a/b")], vec![]),
        ] {
            let found: Vec<String> = nested(&pod(&mounts), "v").into_iter().collect();
            assert_eq!(found, expected, "{mounts:?}");
        }
    }

    #[test]
    fn files_and_mount_points_go_together() {
        let root = tempfile::tempdir().unwrap();
        let dir = tree::open(root.path()).unwrap();
        let pod = pod(&[("v", "/a"), ("o", "/a/in/ner")]);
        let place = Place {
            pod_path: root.path(),
            pod_dir: dir.as_fd(),
            plugin: paths::DOWNWARD_API,
            volume: "v",
            marker: String::new(),
        };
        let mut payload = Payload::default();
        let file = atomic_writer::File::new(b"x".to_vec(), 0o644);
        payload.insert("file", file.clone()).unwrap();
        for _ in 0..2 {
            fill(&pod, &place, dir.as_fd(), &payload, &StopToken::never()).unwrap();
        }
        assert!(root.path().join("in/ner").is_dir());
        assert_eq!(std::fs::read_to_string(root.path().join("file")).unwrap(), "x");
        payload.insert("in/file", file).unwrap();
        let error = fill(&pod, &place, dir.as_fd(), &payload, &StopToken::never()).unwrap_err();
        assert!(error.to_string().starts_with("cannot write the files of"), "{error}");
    }
}
