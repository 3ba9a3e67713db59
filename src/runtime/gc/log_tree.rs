//! The log directories: `<pod logs>/<namespace>_<name>_<uid>/<container>/<n>.log`, and the
//! links `<container logs>/<pod>_<namespace>_<container>-<id>.log` that older tools follow.

use std::fs;
use std::io;
use std::path::Path;

use crate::model::ids::{ContainerId, PodUid};

/// The longest file name that ext4 takes.
const MAX_NAME: usize = 255;

/// What is in the two directories, as far as it may have to go.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogTree {
    /// Names of pod directories, with the UID in each.
    pub pod_dirs: Vec<(String, PodUid)>,
    /// Names of links that lead nowhere, with the container id in each, or its beginning.
    pub dangling_links: Vec<(String, ContainerId)>,
}

impl LogTree {
    /// Reads both directories. One that is missing is empty; any other failure is a
    /// problem, and the rest counts.
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
            .filter(|(name, _)| dangles(&container_logs.join(name)))
            .collect();
        (LogTree { pod_dirs, dangling_links }, problems)
    }
}

/// The name of the link for one container.
#[must_use]
pub fn legacy_link_name(pod: &str, namespace: &str, container: &str, id: &ContainerId) -> String {
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

/// The directory of a pod's logs, below the directory of all.
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
    // Shorter ones are no ids of any runtime.
    (id.len() >= 6).then(|| ContainerId::from(id))
}

fn dangles(path: &Path) -> bool {
    let is_link = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_symlink());
    is_link && fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn list(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    // Names that are not UTF-8 are none of ours.
    entries.filter_map(|entry| entry.map(|entry| entry.file_name().into_string().ok()).transpose()).collect()
}

/// Removes `<log>` and everything whose name begins with it: its rotated files.
pub(super) fn remove_with_rotated(log: &Path) -> io::Result<()> {
    let (Some(dir), Some(prefix)) = (log.parent(), log.file_name().and_then(|name| name.to_str())) else {
        return Ok(());
    };
    for name in list(dir)? {
        if name.starts_with(prefix) {
            remove_link(&dir.join(name))?;
        }
    }
    Ok(())
}

/// Removes a file or a link, not what it leads to. Gone is fine.
pub(super) fn remove_link(path: &Path) -> io::Result<()> {
    gone_is_fine(fs::remove_file(path))
}

/// Removes a directory with its content; links in it are not followed.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    gone_is_fine(fs::remove_dir_all(path))
}

fn gone_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids() {
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
    fn reads_and_removes() {
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
        std::os::unix::fs::symlink(main.join("0.log"), links.join("pod_ns_main-aaaaaaaa.log")).unwrap();
        std::os::unix::fs::symlink(main.join("9.log"), links.join("pod_ns_main-bbbbbbbb.log")).unwrap();
        fs::write(links.join("plain-cccccccc.log"), "x").unwrap();
        let (tree, problems) = LogTree::read(&pods, &links);
        assert_eq!(tree.pod_dirs, [("ns_pod_uid1".to_owned(), PodUid::from("uid1"))]);
        assert_eq!(
            tree.dangling_links,
            [("pod_ns_main-bbbbbbbb.log".to_owned(), ContainerId::from("bbbbbbbb"))]
        );
        assert!(problems.is_empty());
        remove_with_rotated(&main.join("0.log")).unwrap();
        remove_with_rotated(&main.join("7.log")).unwrap();
        remove_with_rotated(&pods.join("none/0.log")).unwrap();
        let mut names = list(&main).unwrap();
        names.sort();
        assert_eq!(names, ["1.log", "10.log"]);
        remove_tree(&pods.join("ns_pod_uid1")).unwrap();
        remove_tree(&pods.join("ns_pod_uid1")).unwrap();
        remove_link(&links.join("none")).unwrap();
    }
}
