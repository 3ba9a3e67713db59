//! Volumes made of files that the agent writes, kept up to date.

use std::cell::Cell;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rustix::io::Errno;

use super::atomic_writer::{self, MAX_DEPTH, MAX_ENTRIES, PathError, Payload};
use super::empty_dir::{self, Medium, VolumeDir};
use super::error::VolumeError;
use super::ownership::{self, Access, Policy};
use super::plugin::Files;
use crate::model::api::{EmptyDirVolumeSource, VolumeMount};
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::util::stop::StopToken;

/// The pod whose volumes are set up, and its directory.
pub(super) struct TargetPod<'a> {
    pub(super) pod: &'a Pod,
    /// `pods/<uid>`.
    pub(super) path: &'a Path,
    /// The opened directory `path`.
    pub(super) dir: BorrowedFd<'a>,
    pub(super) stop: &'a StopToken,
    nested: OnceCell<Nested>,
}

impl<'a> TargetPod<'a> {
    pub(super) fn new(
        pod: &'a Pod,
        path: &'a Path,
        dir: BorrowedFd<'a>,
        stop: &'a StopToken,
    ) -> TargetPod<'a> {
        TargetPod { pod, path, dir, stop, nested: OnceCell::new() }
    }
}

/// Makes the volume if it does not exist, and writes `payload` to its files.
pub(super) fn set_up(
    target: &TargetPod<'_>,
    kind: &dyn Files,
    volume: &str,
    payload: &Payload,
    allocatable_memory: Amount,
) -> Result<MountedVolume, VolumeError> {
    let TargetPod { pod, path: pod_path, dir: pod_dir, stop, .. } = *target;
    let (plugin, marker) = (kind.name().replace('/', "~"), format!("wrapped_{volume}"));
    let place = VolumeDir { pod_path, pod_dir, plugin: &plugin, volume, marker };
    let medium = if kind.is_on_disk() {
        Medium::Disk
    } else {
        let source = EmptyDirVolumeSource::default();
        Medium::Memory { bytes: empty_dir::memory_size(pod, &source, allocatable_memory) }
    };
    let dir = empty_dir::make(&place, medium, empty_dir::fs_group(pod), stop)?;
    fill(target, &place, dir.as_fd(), payload)?;
    Ok(MountedVolume {
        volume: volume.to_owned(),
        host_path: place.path(),
        // A write would be lost, and would be seen by other containers.
        read_only: true,
        selinux_relabel: true,
    })
}

fn fill(
    target: &TargetPod<'_>,
    place: &VolumeDir<'_>,
    dir: BorrowedFd<'_>,
    payload: &Payload,
) -> Result<(), VolumeError> {
    let path = place.path();
    let stop = target.stop;
    let failed = |attempt: &'static str, errno: Errno| match errno {
        Errno::CANCELED => VolumeError::Stopping,
        errno => VolumeError::io(attempt, &path)(errno),
    };
    if let Some(points) =
        target.nested.get_or_init(|| Nested::from_pod(target.pod)).of_volume(place.volume)?
    {
        atomic_writer::make_dirs(dir, points.iter().map(PathBuf::as_path), stop)
            .map_err(|errno| failed("make nested mount points in", errno))?;
    }
    let gid = empty_dir::fs_group(target.pod);
    let broken = Cell::new(None);
    let own = || {
        let Some(gid) = gid else { return Ok(()) };
        let stops = std::slice::from_ref(stop);
        let given = ownership::change_group(dir, gid, (Access::Read, Policy::Always), stops, &mut |_| {});
        given.map(drop).map_err(|error| {
            broken.set(Some(error));
            Errno::CANCELED
        })
    };
    let written = atomic_writer::write(dir, payload, Timestamp::now(), &own, stop);
    written.map(drop).map_err(|errno| match broken.take() {
        Some(error) => error.into_error(&path),
        None => failed("write the files of", errno),
    })
}

/// The mount points of other volumes inside a volume, in any container. The runtime cannot
/// make these directories: volumes of files are read-only in the container (Go:
/// pkg/volume/util/nested_volumes.go).
#[derive(Debug, Default)]
pub(super) struct Nested {
    /// For each volume, paths relative to its root.
    points: HashMap<String, BTreeSet<PathBuf>>,
}

impl Nested {
    pub(super) fn from_pod(pod: &Pod) -> Nested {
        let mut nested = Nested::default();
        for container in pod.all_containers() {
            nested.add(container.volume_mounts.as_deref().unwrap_or_default());
        }
        for container in pod.spec().ephemeral_containers.iter().flatten() {
            nested.add(container.volume_mounts.as_deref().unwrap_or_default());
        }
        nested
    }

    /// Adds the mounts of one container. Each belongs only to the nearest mount above it: a mount
    /// in an inner volume is part of that volume.
    fn add(&mut self, mounts: &[VolumeMount]) {
        // Paths compare element by element: what lies below a path follows right after it. Of two
        // volumes at one path the later one is visible.
        let sorted: BTreeMap<PathBuf, &str> = mounts
            .iter()
            .filter_map(|mount| Some((clean(&mount.mount_path)?, mount.name.as_str())))
            .collect();
        let mut above: Vec<(&Path, &str)> = Vec::new();
        for (path, volume) in &sorted {
            while above.last().is_some_and(|(outer, _)| !path.starts_with(outer)) {
                above.pop();
            }
            if let Some((outer, outer_volume)) = above.last()
                && let Ok(point) = path.strip_prefix(outer)
            {
                self.points.entry((*outer_volume).to_owned()).or_default().insert(point.to_owned());
            }
            above.push((path, volume));
        }
    }

    /// The mount points in a volume, which have the same limits as its files.
    pub(super) fn of_volume(&self, volume: &str) -> Result<Option<&BTreeSet<PathBuf>>, PathError> {
        let Some(points) = self.points.get(volume) else { return Ok(None) };
        let mut entries = 0;
        for point in points {
            let depth = point.iter().count();
            if depth > MAX_DEPTH {
                return Err(PathError::TooDeep);
            }
            entries += depth;
        }
        if entries > MAX_ENTRIES { Err(PathError::TooMany) } else { Ok(Some(points)) }
    }
}

/// An absolute path without empty and `.` elements; `None` for one with `..`.
fn clean(path: &str) -> Option<PathBuf> {
    let mut clean = String::from("/");
    for element in path.split('/').filter(|element| !matches!(*element, "" | ".")) {
        if element == ".." {
            return None;
        }
        if clean.len() > 1 {
            clean.push('/');
        }
        clean.push_str(element);
    }
    Some(PathBuf::from(clean))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::tree;
    use serde_json::json;

    fn pod(mounts: &[(&str, &str)]) -> Pod {
        let mounts: Vec<_> =
            mounts.iter().map(|(name, path)| json!({"name": name, "mountPath": path})).collect();
        let value = json!({"metadata": {"name": "p", "uid": "u"},
            "spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn nested_mounts_need_directories_in_outer_volume() {
        let nested = |pod: &Pod| -> Vec<String> {
            let nested = Nested::from_pod(pod);
            let points = nested.of_volume("v").unwrap().into_iter().flatten();
            points.map(|point| point.to_str().unwrap().to_owned()).collect()
        };
        for (mounts, expected) in [
            (vec![("v", "/etc/x")], vec![]),
            (vec![("v", "/etc/x"), ("o", "/etc/x/in")], vec!["in"]),
            (vec![("o", "/etc//x/./in/"), ("v", "/etc/x/")], vec!["in"]),
            (vec![("v", "/a"), ("o", "/a/b/c"), ("p", "/a/b/c/d"), ("q", "/a/b-c")], vec!["b/c", "b-c"]),
            // Another path comes between the two when they compare as texts.
            (vec![("v", "/a"), ("o", "/a/b"), ("p", "/a/b-c"), ("q", "/a/b/d")], vec!["b", "b-c"]),
            (vec![("v", "/a"), ("v", "/a/b"), ("o", "/a/b/c")], vec!["b", "c"]),
            (vec![("v", "/a"), ("o", "/ab"), ("p", "/a/../c")], vec![]),
            (vec![("o", "/a"), ("v", "/a/b")], vec![]),
            (vec![("v", "/"), ("o", "/a/b")], vec!["a/b"]),
        ] {
            assert_eq!(nested(&pod(&mounts)), expected, "{mounts:?}");
        }
        let mounts = json!([{"name": "v", "mountPath": "/a"}, {"name": "o", "mountPath": "/a/later"}]);
        let value = json!({"metadata": {"name": "p", "uid": "u"},
            "spec": {"containers": [], "ephemeralContainers": [{"name": "e", "volumeMounts": mounts}]}});
        let with_ephemeral = serde_json::from_value::<crate::model::api::Pod>(value).unwrap();
        assert_eq!(nested(&Pod::from(with_ephemeral)), ["later"]);
    }

    /// Comparing each mount with all others would take 2,500,000,000 steps for each volume.
    #[test]
    fn time_for_nested_mounts_grows_linearly() {
        const MOUNTS: usize = 50_000;
        let mount = |name: &str, mount_path: String| VolumeMount {
            name: name.to_owned(),
            mount_path,
            ..VolumeMount::default()
        };
        let mounts: Vec<VolumeMount> = (0..MOUNTS)
            .flat_map(|n| [mount("v", format!("/{n}")), mount("o", format!("/{n}/{n}"))])
            .collect();
        let mut nested = Nested::default();
        nested.add(&mounts);
        assert_eq!(nested.points["v"].len(), MOUNTS);
        assert_eq!(nested.of_volume("v"), Err(PathError::TooMany));
        assert_eq!(nested.of_volume("o"), Ok(None));
        let mut deep = Nested::default();
        deep.add(&[mount("v", "/a".into()), mount("o", format!("/a{}", "/b".repeat(MAX_DEPTH + 1)))]);
        assert_eq!(deep.of_volume("v"), Err(PathError::TooDeep));
    }

    #[test]
    fn volume_has_files_and_nested_mount_points() {
        let root = tempfile::tempdir().unwrap();
        let dir = tree::open(root.path()).unwrap();
        let pod = pod(&[("v", "/a"), ("o", "/a/in/ner")]);
        let place = VolumeDir {
            pod_path: root.path(),
            pod_dir: dir.as_fd(),
            plugin: super::super::paths::DOWNWARD_API,
            volume: "v",
            marker: String::new(),
        };
        let mut payload = Payload::default();
        let file = atomic_writer::File::new(b"x".to_vec(), 0o644);
        payload.insert("file", file.clone()).unwrap();
        let never = StopToken::never();
        let target = TargetPod::new(&pod, root.path(), dir.as_fd(), &never);
        for _ in 0..2 {
            fill(&target, &place, dir.as_fd(), &payload).unwrap();
        }
        assert!(root.path().join("in/ner").is_dir());
        assert_eq!(std::fs::read_to_string(root.path().join("file")).unwrap(), "x");
        payload.insert("in/file", file).unwrap();
        let error = fill(&target, &place, dir.as_fd(), &payload).unwrap_err();
        assert!(error.to_string().starts_with("cannot write the files of"), "{error}");
    }
}
