//! The log directories: `<pod logs>/<namespace>_<name>_<uid>/<container>/<n>.log`, and the
//! links `<container logs>/<pod>_<namespace>_<container>-<id>.log` that older tools follow.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, unlinkat};
use rustix::io::Errno;

use crate::model::ids::{ContainerId, PodUid};
use crate::model::log_line::LOG_LEVELS;
use crate::util::stop::StopToken;
use crate::util::tree::{self, RemovalError};
use crate::util::untrusted::{self, UntrustedPath};

/// The longest file name of ext4.
const MAX_NAME: usize = 255;

/// Entries of one directory that a round reads: far more than a node has, as a pod that can
/// write there may make any number. The rest is for a later round.
const ENTRIES: usize = 100_000;

/// The entries of the two directories that may have to be removed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LogTree {
    /// Names of pod directories, with the UID in each.
    pub pod_dirs: Vec<(String, PodUid)>,
    /// Names of dangling links, with the container id in each, or its beginning.
    pub dangling_links: Vec<(String, ContainerId)>,
}

impl LogTree {
    /// Reads both directories. One that is missing is empty; any other failure is returned, with
    /// the entries that could be read.
    pub(super) fn read(pod_logs: &Path, container_logs: &Path) -> (LogTree, Vec<String>) {
        let mut problems = Vec::new();
        let mut names = |dir: &Path| {
            list(dir).unwrap_or_else(|error| {
                problems.push(format!("cannot list {}: {error}", dir.display()));
                Vec::new()
            })
        };
        let pod_dirs =
            names(pod_logs).into_iter().filter_map(|name| Some((name.clone(), pod_uid(&name)?))).collect();
        let dangling_links = names(container_logs)
            .into_iter()
            .filter_map(|name| Some((name.clone(), container_id(&name)?)))
            .filter(|(name, _)| is_dangling(&container_logs.join(name)))
            .collect();
        (LogTree { pod_dirs, dangling_links }, problems)
    }
}

/// The name of the link for one container.
pub(crate) fn legacy_link_name(pod: &str, namespace: &str, container: &str, id: &ContainerId) -> String {
    const SUFFIX: &str = ".log";
    let mut name = format!("{pod}_{namespace}_{container}-{id}");
    // Upstream cuts the id, too.
    let mut end = name.len().min(MAX_NAME - SUFFIX.len());
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    name + SUFFIX
}

/// The directory of a pod's logs, below the directory of all logs.
pub(super) fn pod_dir_name(namespace: &str, pod: &str, uid: &PodUid) -> String {
    format!("{namespace}_{pod}_{uid}")
}

fn pod_uid(dir: &str) -> Option<PodUid> {
    let mut parts = dir.rsplitn(3, '_');
    let uid = parts.next().filter(|uid| !uid.is_empty())?;
    parts.nth(1)?;
    Some(PodUid::from(uid))
}

fn container_id(link: &str) -> Option<ContainerId> {
    let (_, id) = link.strip_suffix(".log")?.rsplit_once('-')?;
    // Ids of runtimes are longer.
    (id.len() >= 6).then(|| ContainerId::from(id))
}

fn is_dangling(path: &Path) -> bool {
    let is_link = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_symlink());
    is_link && fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn list(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    // The agent makes no names that are not UTF-8.
    let name = |entry: io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name().into_string().ok());
    entries.take(ENTRIES).filter_map(|entry| name(entry).transpose()).collect()
}

/// Removes `<log>` and everything whose name begins with it: its rotated files.
///
/// DIFFERS: unlike upstream, links at the paths of the pod's directories are not followed: they
/// could lead to the logs of another pod.
pub(super) fn remove_with_rotated(log: &Path, stop: &StopToken) -> io::Result<()> {
    let place = match UntrustedPath::find(log, LOG_LEVELS) {
        Ok(place) => place,
        // It does not exist, or is not a directory of logs.
        Err(error) if is_no_directory(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in Dir::read_from(place.dir())? {
        if stop.is_stopped() {
            // The container must not be removed: without it these files would never be removed.
            return Err(io::ErrorKind::Interrupted.into());
        }
        let entry = entry?;
        if entry.file_name().to_bytes().starts_with(place.name().as_bytes()) {
            match unlinkat(place.dir(), entry.file_name(), AtFlags::empty()) {
                // A directory is no log; it is removed with the pod's directory.
                Ok(()) | Err(Errno::NOENT | Errno::ISDIR | Errno::PERM) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

fn is_no_directory(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Removes a file or a link, not its target. A missing one is no error.
pub(super) fn remove_link(path: &Path) -> io::Result<()> {
    ignore_not_found(fs::remove_file(path))
}

/// Removes the directory `name` in `parent` with its content, however deep it is; links are not
/// followed, and nothing is removed on another file system.
pub(super) fn remove_tree(parent: &Path, name: &str, stop: &StopToken) -> io::Result<()> {
    let parent = match untrusted::directory(parent, 0) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let name = CString::new(name)?;
    match unlinkat(&parent, &*name, AtFlags::empty()) {
        // There is a link or a file instead of the directory.
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(errno) => return Err(errno.into()),
    }
    match tree::remove_at(parent.as_fd(), &name, stop) {
        Ok(()) => Ok(()),
        Err(RemovalError::Stopping) => Err(io::ErrorKind::Interrupted.into()),
        Err(RemovalError::Entry { path, errno }) => {
            Err(io::Error::new(io::Error::from(errno).kind(), format!("{path}: {errno}")))
        }
    }
}

fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::util::testing::unblocked;

    #[test]
    fn pod_and_container_ids_are_parsed_from_log_names() {
        assert_eq!(pod_uid("ns_pod_1234"), Some(PodUid::from("1234")));
        for name in ["", "x", "a_b", "a_b_", "pods"] {
            assert_eq!(pod_uid(name), None, "{name}");
        }
        let id = ContainerId::from("0123456789abcdef");
        let name = legacy_link_name("pod", "ns", "main", &id);
        assert_eq!(name, "pod_ns_main-0123456789abcdef.log");
        assert_eq!(container_id(&name), Some(id.clone()));
        let long = legacy_link_name(&"p".repeat(200), &"n".repeat(38), "c", &id);
        assert_eq!(long.len(), 255);
        assert_eq!(container_id(&long), Some(ContainerId::from("012345678")));
        for name in ["x.log", "a-b.log", "a-0123456789", "-.log"] {
            assert_eq!(container_id(name), None, "{name}");
        }
    }

    #[test]
    fn log_tree_is_listed_and_log_removed_with_rotated_files() {
        let dir = tempfile::tempdir().unwrap();
        let (pods, links) = (dir.path().join("pods"), dir.path().join("containers"));
        assert_eq!(LogTree::read(&pods, &links), (LogTree::default(), Vec::new()));
        let main = pods.join("ns_pod_uid1/main");
        fs::create_dir_all(&main).unwrap();
        fs::create_dir_all(&links).unwrap();
        fs::create_dir(pods.join("other")).unwrap();
        for name in ["0.log", "0.log.20260101-000000", "1.log", "10.log"] {
            fs::write(main.join(name), "x").unwrap();
        }
        symlink(main.join("0.log"), links.join("pod_ns_main-aaaaaaaa.log")).unwrap();
        symlink(main.join("9.log"), links.join("pod_ns_main-bbbbbbbb.log")).unwrap();
        fs::write(links.join("plain-cccccccc.log"), "x").unwrap();
        let (tree, problems) = LogTree::read(&pods, &links);
        assert_eq!(tree.pod_dirs, [("ns_pod_uid1".to_owned(), PodUid::from("uid1"))]);
        assert_eq!(
            tree.dangling_links,
            [("pod_ns_main-bbbbbbbb.log".to_owned(), ContainerId::from("bbbbbbbb"))]
        );
        assert!(problems.is_empty());
        let never = StopToken::never();
        fs::create_dir(main.join("0.log.d")).unwrap();
        remove_with_rotated(&main.join("0.log"), &never).unwrap();
        remove_with_rotated(&main.join("7.log"), &never).unwrap();
        remove_with_rotated(&pods.join("none/0.log"), &never).unwrap();
        let mut names = list(&main).unwrap();
        names.sort();
        assert_eq!(names, ["0.log.d", "1.log", "10.log"]);
        remove_tree(&pods, "ns_pod_uid1", &never).unwrap();
        remove_tree(&pods, "ns_pod_uid1", &never).unwrap();
        remove_tree(&pods.join("none"), "x", &never).unwrap();
        assert!(!pods.join("ns_pod_uid1").exists());
        remove_link(&links.join("none")).unwrap();
    }

    #[test]
    fn links_instead_of_directories_remove_no_logs_of_other_pods() {
        let dir = tempfile::tempdir().unwrap();
        let path_to = |name: &str| dir.path().join(name);
        let never = StopToken::never();
        fs::create_dir_all(path_to("ns_other_u2/c")).unwrap();
        fs::write(path_to("ns_other_u2/c/0.log"), "x").unwrap();
        fs::create_dir(path_to("ns_pod_u1")).unwrap();
        symlink(path_to("ns_other_u2/c"), path_to("ns_pod_u1/c")).unwrap();
        remove_with_rotated(&path_to("ns_pod_u1/c/0.log"), &never).unwrap();
        remove_tree(dir.path(), "ns_pod_u1", &never).unwrap();
        symlink(path_to("ns_other_u2"), path_to("ns_pod_u1")).unwrap();
        remove_with_rotated(&path_to("ns_pod_u1/c/0.log"), &never).unwrap();
        remove_tree(dir.path(), "ns_pod_u1", &never).unwrap();
        assert!(!path_to("ns_pod_u1").is_symlink());
        assert_eq!(fs::read_to_string(path_to("ns_other_u2/c/0.log")).unwrap(), "x");
    }

    /// Recursion would take stack for each level, and a container can make any number of levels.
    #[test]
    fn log_directory_of_any_depth_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut level = untrusted::directory(dir.path(), 0).unwrap();
        for _ in 0..4_000 {
            level = tree::make_at(level.as_fd(), c"ns_pod_u1", 0o755).unwrap().0;
        }
        let path = dir.path().to_owned();
        unblocked(move || remove_tree(&path, "ns_pod_u1", &StopToken::never()).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
