//! Paths of container logs: directories, restart counts in file names, and the links by container
//! id that log collectors follow.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::Dir;

use crate::model::ids::ContainerId;
use crate::model::log_line::LOG_LEVELS;
use crate::model::pod::Pod;
use crate::util::disk_writes;
use crate::util::untrusted;

use super::gc::legacy_link_name;

/// Readable for log collectors.
const MODE: u32 = 0o755;

/// Entries of a container's log directory that are read: the container may make any number.
const ENTRIES: usize = 100_000;

/// Makes `dir` and its parents.
pub(super) fn make_directory(dir: &Path) -> io::Result<()> {
    disk_writes::make_directories(dir, MODE)
}

/// Makes a container's log directory, `<pod>/<container>`, and its parents. A link at one of the
/// two paths is an error: the directory, and the log, would be made at its target.
pub(super) fn make_log_directory(dir: &Path) -> io::Result<()> {
    untrusted::make_directory(dir, LOG_LEVELS, MODE).map(drop)
}

/// The restart count that follows from the logs in a container's log directory: one more
/// than the highest number, or 0. So the count outlives the runtime's records.
pub(super) fn next_restart_count(container_dir: &Path) -> u32 {
    let number = |name: &str| -> Option<u32> {
        let (digits, rest) = name.split_once(".log")?;
        let numbered = digits.bytes().all(|b| b.is_ascii_digit());
        (numbered && (rest.is_empty() || rest.starts_with('.'))).then(|| digits.parse().ok()).flatten()
    };
    let listed = untrusted::directory(container_dir, LOG_LEVELS).ok().and_then(|dir| Dir::new(dir).ok());
    listed
        .into_iter()
        .flat_map(|dir| dir.take(ENTRIES))
        .filter_map(|entry| number(entry.ok()?.file_name().to_str().ok()?))
        .max()
        .map_or(0, |highest| highest.saturating_add(1))
}

/// The container's link in `dir`.
pub(super) fn link_path(dir: &Path, pod: &Pod, container: &str, id: &ContainerId) -> PathBuf {
    dir.join(legacy_link_name(pod.name(), pod.namespace(), container, id))
}

/// Makes the container's link to its log file, if the runtime has made that file.
pub(super) fn link(link: &Path, log: &Path) -> io::Result<()> {
    if !log.exists() {
        return Ok(());
    }
    let make = || disk_writes::created(std::os::unix::fs::symlink(log, link));
    match make() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            link.parent().map_or(Ok(()), make_directory).and_then(|()| make())
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            std::fs::remove_file(link).and_then(|()| make())
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_restart_count_follows_from_log_names() {
        let dir = tempfile::tempdir().unwrap();
        let check = |name: Option<&str>, expected| {
            if let Some(name) = name {
                std::fs::write(dir.path().join(name), "").unwrap();
            }
            assert_eq!(next_restart_count(dir.path()), expected, "{name:?}");
        };
        check(None, 0);
        check(Some("x.log"), 0);
        check(Some("7.logs"), 0);
        check(Some("+5.log"), 0);
        check(Some("0.log"), 1);
        check(Some("3.log.20260101-000000.gz"), 4);
        check(Some("10.log"), 11);
        check(Some("99999999999.log"), 11);
        assert_eq!(next_restart_count(Path::new("/no/such/dir")), 0);
    }

    #[test]
    fn log_directories_are_made_through_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let path_to = |name: &str| dir.path().join(name);
        make_log_directory(&path_to("logs/pod/c")).unwrap();
        make_log_directory(&path_to("logs/pod/c")).unwrap();
        assert!(path_to("logs/pod/c").is_dir());
        std::fs::create_dir(path_to("outside")).unwrap();
        for (link, made) in [("logs/other", "logs/other/c"), ("logs/pod/d", "logs/pod/d")] {
            std::os::unix::fs::symlink(path_to("outside"), path_to(link)).unwrap();
            assert!(make_log_directory(&path_to(made)).is_err(), "{link}");
        }
        assert_eq!(std::fs::read_dir(path_to("outside")).unwrap().count(), 0);
        // Nor are the numbers of another container's logs this one's.
        std::fs::write(path_to("outside/7.log"), "").unwrap();
        assert_eq!(next_restart_count(&path_to("logs/pod/d")), 0);
    }

    #[test]
    fn links_appear_with_their_directory_and_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let pod = Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(
                serde_json::json!({"metadata": {"name": "p", "namespace": "n"}}),
            )
            .unwrap(),
        );
        let path = link_path(&dir.path().join("links"), &pod, "c", &ContainerId::from("abc"));
        assert_eq!(path, dir.path().join("links/p_n_c-abc.log"));
        let (first, second) = (dir.path().join("one"), dir.path().join("two"));
        link(&path, &first).unwrap();
        assert!(!path.is_symlink());
        std::fs::write(&first, "").unwrap();
        std::fs::write(&second, "").unwrap();
        link(&path, &first).unwrap();
        link(&path, &second).unwrap();
        assert_eq!(std::fs::read_link(&path).unwrap(), second);
    }
}
