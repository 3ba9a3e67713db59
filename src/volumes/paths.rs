//! Paths below the root directory (reference: the kubelet's own layout).

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use super::error::VolumeError;
use crate::model::ids::PodUid;
use crate::util::tree;

/// Directory of the plugin of emptyDir volumes, below `volumes` and `plugins`.
pub(super) const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// Directory of the plugin of downward API volumes.
pub(super) const DOWNWARD_API: &str = "kubernetes.io~downward-api";

/// Directory of the plugin of configMap volumes.
pub(super) const CONFIG_MAP: &str = "kubernetes.io~configmap";

/// Directory of the plugin of secret volumes.
pub(super) const SECRET: &str = "kubernetes.io~secret";

/// Directory of the plugin of projected volumes.
pub(super) const PROJECTED: &str = "kubernetes.io~projected";

/// Sub paths' mounts, below the pod's directory.
pub(super) const SUB_PATHS: &str = "volume-subpaths";

/// Plugins whose content the agent can write again, or that belongs to the pod alone. It is removed
/// with the pod, also if another agent wrote it.
pub(super) const OWNED_CONTENT: [&str; 5] = [EMPTY_DIR, CONFIG_MAP, DOWNWARD_API, PROJECTED, SECRET];

/// `<root-dir>/pods`, or the directory that it leads to.
pub(super) fn pods(root_dir: &Path) -> PathBuf {
    real_dir(root_dir, "pods")
}

/// `<root-dir>/plugins`, or the directory that it leads to.
pub(super) fn plugins(root_dir: &Path) -> PathBuf {
    real_dir(root_dir, "plugins")
}

/// A directory of the root directory. An operator may have replaced it with a link to another disk,
/// and the mount table names mounts by their real path.
fn real_dir(root_dir: &Path, name: &str) -> PathBuf {
    let path = root_dir.join(name);
    if std::fs::read_link(&path).is_err() {
        return path;
    }
    std::fs::canonicalize(&path).unwrap_or(path)
}

/// The path in the mount table of a path in the root directory, and the directory without links
/// that contains it: the first is that directory. Both the root directory and the path may have links
/// of the operator, or be resolved already.
pub(super) fn real(root_dir: &Path, path: &Path) -> (PathBuf, PathBuf) {
    let real_root = std::fs::canonicalize(root_dir).unwrap_or_else(|_| root_dir.to_owned());
    for name in ["pods", "plugins"] {
        let top = real_dir(&real_root, name);
        let known = [root_dir.join(name), real_root.join(name), top.clone()];
        if let Some(rest) = known.iter().find_map(|dir| path.strip_prefix(dir).ok()) {
            let path = top.join(rest);
            return (top, path);
        }
    }
    let path = path.strip_prefix(root_dir).map_or_else(|_| path.to_owned(), |rest| real_root.join(rest));
    (real_root, path)
}

/// The root directory as other programs know it: absolute and without `.` and `..`, its links kept
/// (Go: `filepath.Clean`). If `..` follows a link, the path is that of the directory.
pub(super) fn configured(root_dir: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in std::path::absolute(root_dir).unwrap_or_else(|_| root_dir.to_owned()).components() {
        match part {
            Component::ParentDir => {
                clean.pop();
            }
            part => clean.push(part),
        }
    }
    match std::fs::canonicalize(root_dir) {
        Ok(real) if std::fs::canonicalize(&clean).ok().as_ref() != Some(&real) => real,
        _ => clean,
    }
}

/// `<root-dir>/pods/<uid>`, refused unless the UID is one path element.
pub(super) fn pod(root_dir: &Path, uid: &PodUid) -> Result<PathBuf, VolumeError> {
    Ok(pods(root_dir).join(element(uid.as_str())?))
}

/// Opens `<root-dir>/pods/<uid>`. If the pod's directory is a link, it is not followed; `pods` may
/// be a link that the operator made.
pub(super) fn open_pod(root_dir: &Path, uid: &PodUid) -> Result<OwnedFd, VolumeError> {
    let path = pod(root_dir, uid)?;
    let name = c_name(uid.as_str())?;
    tree::open(&pods(root_dir))
        .and_then(|pods| tree::open_at(pods.as_fd(), &name))
        .map_err(VolumeError::io("open", &path))
}

/// `name`, if it is one element of a path and neither `.` nor `..`.
pub(super) fn element(name: &str) -> Result<&str, VolumeError> {
    let fine = !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']) && name.len() <= 255;
    if fine { Ok(name) } else { Err(VolumeError::Name { name: name.to_owned() }) }
}

/// `name` for a system call, with the same check.
pub(super) fn c_name(name: &str) -> Result<CString, VolumeError> {
    let refused = || VolumeError::Name { name: name.to_owned() };
    CString::new(element(name)?).map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator moved the directory of the pods to a larger disk.
    #[test]
    fn directory_that_is_a_link_has_its_real_path() {
        let top = tempfile::tempdir().unwrap();
        let top = std::fs::canonicalize(top.path()).unwrap();
        let (root, disk) = (top.join("root"), top.join("disk"));
        std::fs::create_dir_all(root.join("plugins")).unwrap();
        std::fs::create_dir_all(disk.join("pods/u/volumes")).unwrap();
        std::os::unix::fs::symlink("../disk/pods", root.join("pods")).unwrap();
        assert_eq!(pods(&root), disk.join("pods"));
        assert_eq!(plugins(&root), root.join("plugins"));
        assert_eq!(pod(&root, &PodUid::from("u")).unwrap(), disk.join("pods/u"));
        open_pod(&root, &PodUid::from("u")).unwrap();
        assert_eq!(real(&root, &root.join("pods/u/v")), (disk.join("pods"), disk.join("pods/u/v")));
        let other = root.join("plugins/x");
        assert_eq!(real(&root, &other), (root.join("plugins"), other.clone()));
        assert_eq!(real(&root, &top.join("y")), (root.clone(), top.join("y")));
        // A path that is resolved already, and a root directory that is a link itself.
        let resolved = disk.join("pods/u/v");
        assert_eq!(real(&root, &resolved), (disk.join("pods"), resolved.clone()));
        let linked = top.join("linked");
        std::os::unix::fs::symlink("root", &linked).unwrap();
        for path in [linked.join("pods/u/v"), root.join("pods/u/v"), resolved.clone()] {
            assert_eq!(real(&linked, &path), (disk.join("pods"), resolved.clone()), "{}", path.display());
        }
        assert_eq!(real(&linked, &linked.join("plugins/x")), (root.join("plugins"), other));
        assert_eq!(real(&linked, &linked.join("y")), (root.clone(), root.join("y")));
        assert_eq!(configured(&linked), linked);
        assert_eq!(configured(&root.join("./plugins/../")), root);
        assert_eq!(configured(&linked.join("pods/..")), top.join("disk"));
        // A link that leads nowhere is named in the error of what is done there.
        std::fs::remove_file(root.join("pods")).unwrap();
        std::os::unix::fs::symlink("none", root.join("pods")).unwrap();
        assert_eq!(pods(&root), root.join("pods"));
    }

    #[test]
    fn only_plain_names_become_paths() {
        for name in ["a", "..a", "a b", "0b31"] {
            assert!(element(name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/", "a\0b"] {
            assert!(element(name).is_err(), "{name}");
        }
        let uid = PodUid::from("../../etc");
        assert!(pod(Path::new("/r"), &uid).is_err());
        assert_eq!(pod(Path::new("/r"), &PodUid::from("u")).unwrap(), Path::new("/r/pods/u"));
    }
}
