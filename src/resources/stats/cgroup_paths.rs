//! The paths of the cgroups of containers. The runtime chooses them; they have in common that the
//! last part of the path contains the container's id.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A cgroup that was not found is searched again after this time: such containers have no cgroup
/// here (a runtime in a virtual machine), and the walk takes time.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// The depth of the walk; no runtime nests the slices of a container deeper.
const DEPTH: usize = 8;

/// The limit of directories that one walk reads: far more than a node has.
const DIRECTORIES: usize = 20_000;

/// The known paths, and the ids without a path.
#[derive(Debug, Default)]
pub(super) struct CgroupPaths {
    found: BTreeMap<String, String>,
    missing: BTreeSet<String>,
    walked: Option<Instant>,
}

impl CgroupPaths {
    /// The path of a container or sandbox, relative to the tree's root.
    pub(super) fn get(&self, id: &str) -> Option<&str> {
        self.found.get(id).map(String::as_str)
    }

    /// Removes the path of a cgroup that does not exist any more.
    pub(super) fn forget(&mut self, id: &str) {
        self.found.remove(id);
    }

    /// Searches the unknown ones of `ids`, which have one parent, in the cgroup that the agent made
    /// for them. `parent` is called if there are any.
    pub(super) fn search_in(&mut self, top: &Path, ids: &[&str], parent: impl FnOnce() -> Option<String>) {
        let mut open: BTreeSet<&str> =
            ids.iter().copied().filter(|id| !self.found.contains_key(*id)).collect();
        let Some(parent) = Some(&open).filter(|open| !open.is_empty()).and_then(|_| parent()) else { return };
        let parent = parent.trim_matches('/');
        let entries = std::fs::read_dir(top.join(parent)).into_iter().flatten().flatten();
        for entry in
            entries.take(DIRECTORIES).filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        {
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(id) = open.take(id_in(name)) {
                self.found.insert(id.to_owned(), format!("{parent}/{name}"));
            }
        }
    }

    /// Searches the unknown ones of `wanted`, and forgets all others.
    pub(super) fn search(&mut self, top: &Path, wanted: &BTreeSet<&str>, now: Instant) {
        self.found.retain(|id, _| wanted.contains(id.as_str()));
        self.missing.retain(|id| wanted.contains(id.as_str()));
        let recently = self.walked.is_some_and(|walked| now.duration_since(walked) < SEARCH_INTERVAL);
        let new =
            wanted.iter().any(|id| !(self.found.contains_key(*id) || recently && self.missing.contains(*id)));
        if !new {
            return;
        }
        let mut open: BTreeSet<&str> =
            wanted.iter().copied().filter(|id| !self.found.contains_key(*id)).collect();
        walk(top, wanted, &mut open, &mut self.found);
        self.missing = open.into_iter().map(str::to_owned).collect();
        self.walked = Some(now);
    }
}

/// Moves the ids that it finds from `open` to `found`. It does not enter the cgroups of `wanted`: a
/// container may have made any cgroups in its own.
fn walk(
    top: &Path,
    wanted: &BTreeSet<&str>,
    open: &mut BTreeSet<&str>,
    found: &mut BTreeMap<String, String>,
) {
    let mut levels: Vec<(PathBuf, usize)> = vec![(PathBuf::new(), 0)];
    let mut seen = 0;
    while let Some((path, depth)) = levels.pop() {
        if open.is_empty() || seen > DIRECTORIES {
            return;
        }
        let Ok(entries) = std::fs::read_dir(top.join(&path)) else { continue };
        for entry in entries.flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            seen += 1;
            if seen > DIRECTORIES {
                return;
            }
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let below = path.join(name);
            if let Some(id) = open.take(id_in(name)) {
                found.insert(id.to_owned(), below.to_string_lossy().into_owned());
            } else if depth + 1 < DEPTH && !wanted.contains(id_in(name)) {
                levels.push((below, depth + 1));
            }
        }
    }
}

/// `cri-containerd-<id>.scope`, `crio-<id>.scope`, `crio-<id>` or just `<id>`.
fn id_in(name: &str) -> &str {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    name.rsplit(['-', ':']).next().unwrap_or(name)
}

/// The pod's own cgroup, if the parent of its sandbox's is one.
pub(super) fn pod_cgroup<'a>(sandbox: &'a str, uid: &str) -> Option<&'a str> {
    let (parent, _) = sandbox.rsplit_once('/')?;
    let name = parent.rsplit('/').next()?;
    (name.contains(uid) || name.contains(&uid.replace('-', "_"))).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn containers_are_found_at_all_paths_of_runtimes() {
        let dir = tempfile::tempdir().unwrap();
        for path in [
            "k8s.io/aaa",
            "kubepods.slice/kubepods-pod1.slice/cri-containerd-bbb.scope/inner/ccc",
            "kubepods/burstable/podx/ccc",
            "system.slice/ssh.service",
            "machine/crio-ddd",
        ] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let mut cgroup_paths = CgroupPaths::default();
        let now = Instant::now();
        let wanted: BTreeSet<&str> = ["aaa", "bbb", "ccc", "ddd", "none"].into();
        cgroup_paths.search(dir.path(), &wanted, now);
        assert_eq!(cgroup_paths.get("aaa"), Some("k8s.io/aaa"));
        assert_eq!(
            cgroup_paths.get("bbb"),
            Some("kubepods.slice/kubepods-pod1.slice/cri-containerd-bbb.scope")
        );
        assert_eq!(cgroup_paths.get("ccc"), Some("kubepods/burstable/podx/ccc"));
        assert_eq!(cgroup_paths.get("ddd"), Some("machine/crio-ddd"));
        assert_eq!(cgroup_paths.get("none"), None);

        // An id missing a moment ago is not searched again, except together with a new one.
        fs::create_dir_all(dir.path().join("k8s.io/none")).unwrap();
        cgroup_paths.search(dir.path(), &wanted, now + Duration::from_secs(1));
        assert_eq!(cgroup_paths.get("none"), None);
        cgroup_paths.search(dir.path(), &wanted, now + SEARCH_INTERVAL);
        assert_eq!(cgroup_paths.get("none"), Some("k8s.io/none"));
        cgroup_paths.search(dir.path(), &["aaa"].into(), now + SEARCH_INTERVAL);
        assert_eq!((cgroup_paths.get("aaa").is_some(), cgroup_paths.get("bbb")), (true, None));
        cgroup_paths.forget("aaa");
        assert_eq!(cgroup_paths.get("aaa"), None);
    }

    #[test]
    fn cgroups_that_a_container_made_are_not_searched() {
        let dir = tempfile::tempdir().unwrap();
        let (mut cgroup_paths, now) = (CgroupPaths::default(), Instant::now());
        fs::create_dir_all(dir.path().join("k8s.io/aaa/inner/cri-containerd-bbb.scope")).unwrap();
        for wanted in [&["aaa"][..], &["aaa", "bbb"]] {
            cgroup_paths.search(dir.path(), &wanted.iter().copied().collect(), now);
            assert_eq!((cgroup_paths.get("aaa"), cgroup_paths.get("bbb")), (Some("k8s.io/aaa"), None));
        }
    }

    #[test]
    fn containers_are_found_in_the_cgroup_of_their_pod_without_a_walk() {
        let dir = tempfile::tempdir().unwrap();
        // A walk would find the one with an early name.
        for path in ["a/aaa", "kubepods/podx/aaa", "kubepods/podx/crio-bbb.scope"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let (mut cgroup_paths, now) = (CgroupPaths::default(), Instant::now());
        cgroup_paths.search_in(dir.path(), &["aaa", "bbb"], || Some("/kubepods/podx".to_owned()));
        assert_eq!(cgroup_paths.get("bbb"), Some("kubepods/podx/crio-bbb.scope"));
        cgroup_paths.search(dir.path(), &["aaa", "bbb"].into(), now);
        assert_eq!((cgroup_paths.get("aaa"), cgroup_paths.walked), (Some("kubepods/podx/aaa"), None));
        // Known ones are not searched.
        cgroup_paths.search_in(dir.path(), &["aaa"], || panic!("not needed"));
        // One that the runtime put elsewhere, and one without a cgroup of its pod.
        cgroup_paths.forget("aaa");
        cgroup_paths.search_in(dir.path(), &["aaa"], || Some("/kubepods/pody".to_owned()));
        cgroup_paths.search_in(dir.path(), &["aaa"], || None);
        cgroup_paths.search(dir.path(), &["aaa", "bbb"].into(), now);
        assert!(cgroup_paths.get("aaa").is_some() && cgroup_paths.walked.is_some());
    }

    #[test]
    fn pod_cgroup_is_the_parent_with_the_uid() {
        let uid = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";
        for (path, expected) in [
            ("k8s.io/abc", None),
            ("abc", None),
            (
                "kubepods/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/abc",
                Some("kubepods/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427"),
            ),
            (
                "a.slice/b-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice/cri-containerd-x.scope",
                Some("a.slice/b-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice"),
            ),
        ] {
            assert_eq!(pod_cgroup(path, uid), expected);
        }
    }
}
