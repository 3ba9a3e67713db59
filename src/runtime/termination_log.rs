//! The file behind `terminationMessagePath`: one per container instance.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::model::api::Container;
use crate::model::pod::Pod;
use crate::util::backoff::random_u64;
use crate::util::untrusted;

use super::config_error::ConfigError;

/// `<uid>/containers/<name>`.
const LEVELS: usize = 3;

/// Makes an empty file that everyone may write, and returns its path.
/// `None` if the container wants none.
///
/// # Errors
/// When the directory or the file cannot be made.
pub(super) fn create(
    root_dir: &Path,
    pod: &Pod,
    container: &Container,
) -> Result<Option<PathBuf>, ConfigError> {
    if container.termination_message_path.as_deref().unwrap_or_default().is_empty() {
        return Ok(None);
    }
    let path = root_dir.join("pods").join(pod.uid().as_str()).join("containers").join(&container.name);
    let dir = untrusted::make_directory(&path, LEVELS, 0o750).map_err(file_error("make directory", &path))?;
    let name = format!("{:08x}", random_u64() as u32);
    let path = path.join(&name);
    // No existing file is opened.
    untrusted::create_at(dir.as_fd(), Path::new(&name), 0o666)
        // The umask may have removed bits.
        .and_then(|file| file.set_permissions(std::fs::Permissions::from_mode(0o666)))
        .map_err(file_error("create termination log", &path))?;
    Ok(Some(path))
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ConfigError {
    let path = path.to_owned();
    move |error| ConfigError::File { what, path, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_instance_gets_a_new_writable_file() {
        let root = tempfile::tempdir().unwrap();
        let object = serde_json::json!({"metadata": {"uid": "u"}, "spec": {"containers": []}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        let mut container = Container { name: "c".into(), ..Container::default() };
        assert_eq!(create(root.path(), &pod, &container).unwrap(), None);
        container.termination_message_path = Some("/dev/termination-log".into());
        let first = create(root.path(), &pod, &container).unwrap().unwrap();
        let second = create(root.path(), &pod, &container).unwrap().unwrap();
        assert_ne!(first, second);
        assert_eq!(std::fs::metadata(&first).unwrap().permissions().mode() & 0o777, 0o666);
        assert_eq!(first.file_name().unwrap().len(), 8);
        // No file is created behind a link.
        let own = first.parent().unwrap();
        let outside = root.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::rename(own, root.path().join("moved")).unwrap();
        std::os::unix::fs::symlink(&outside, own).unwrap();
        assert!(create(root.path(), &pod, &container).is_err());
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }
}
