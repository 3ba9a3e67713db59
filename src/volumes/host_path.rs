//! hostPath: a path of the node, which is checked or created according to its type.

use std::fs::{FileType, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::VolumeError;
use super::files::TargetPod;
use super::persistent::{Kinds, Request, Storage};
use super::plugin::Plugin;
use crate::model::api::HostPathVolumeSource;
use crate::model::mount::MountedVolume;
use crate::model::quantity::Amount;
use crate::util::disk_writes;

impl Plugin for HostPathVolumeSource {
    fn name(&self) -> &'static str {
        "kubernetes.io/host-path"
    }

    fn describe(&self) -> Option<String> {
        Some(self.path.clone())
    }

    fn set_up(
        &self,
        _: &TargetPod<'_>,
        volume: &str,
        _: Amount,
    ) -> Option<Result<MountedVolume, VolumeError>> {
        // Without a type, nothing is checked.
        self.type_.as_deref().unwrap_or_default().is_empty().then(|| set_up(volume, self))
    }
}

impl Storage for HostPathVolumeSource {
    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        // Nothing is made in the pod's directory.
        kinds.leave_pod_dir(request);
        let found = set_up(&request.volume.name, self)?;
        Ok(MountedVolume { read_only: request.spec.read_only, ..found })
    }
}

/// Checks the type. The types `…OrCreate` create the file or directory if it is missing.
fn set_up(volume: &str, source: &HostPathVolumeSource) -> Result<MountedVolume, VolumeError> {
    let path = Path::new(&source.path);
    if source.path.split('/').any(|part| part == "..") {
        return Err(VolumeError::HostPathBacksteps { path: source.path.clone() });
    }
    match source.type_.as_deref().unwrap_or_default() {
        "" => {}
        "DirectoryOrCreate" => {
            if !exists(path) {
                make_directory(path)?;
            }
            want(path, FileType::is_dir, "a directory")?;
        }
        "Directory" => want(path, FileType::is_dir, "a directory")?,
        "FileOrCreate" => {
            if !exists(path) {
                make_file(path)?;
            }
            want(path, FileType::is_file, "a file")?;
        }
        "File" => want(path, FileType::is_file, "a file")?,
        "Socket" => want(path, FileType::is_socket, "a socket file")?,
        "CharDevice" => want(path, FileType::is_char_device, "a character device")?,
        "BlockDevice" => want(path, FileType::is_block_device, "a block device")?,
        other => {
            return Err(VolumeError::HostPathKind { path: source.path.clone(), kind: other.to_owned() });
        }
    }
    Ok(MountedVolume {
        volume: volume.to_owned(),
        host_path: PathBuf::from(&source.path),
        read_only: false,
        selinux_relabel: false,
    })
}

fn exists(path: &Path) -> bool {
    std::fs::metadata(path).is_ok()
}

fn want(path: &Path, is: fn(&FileType) -> bool, wanted: &'static str) -> Result<(), VolumeError> {
    let shown = path.display().to_string();
    let unknown = |reason: String| (format!("unable to determine its type: {reason}"), false);
    let (found, is_known) = match std::fs::metadata(path) {
        Ok(metadata) if is(&metadata.file_type()) => return Ok(()),
        Ok(metadata) => match kind_of(&metadata.file_type()) {
            Some(kind) => (format!("it's a {kind}"), true),
            None => unknown(
                "only recognise file, directory, socket, block device and character device".to_owned(),
            ),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => {
            unknown(format!("path {shown:?} does not exist"))
        }
        Err(error) => unknown(error.to_string()),
    };
    Err(VolumeError::HostPathType { path: shown, wanted, found, is_known })
}

/// The type in the words of the API; `None` for a pipe, which has none.
fn kind_of(kind: &FileType) -> Option<&'static str> {
    let kinds = [
        ("Directory", kind.is_dir()),
        ("File", kind.is_file()),
        ("Socket", kind.is_socket()),
        ("CharDevice", kind.is_char_device()),
        ("BlockDevice", kind.is_block_device()),
    ];
    kinds.into_iter().find(|(_, is_kind)| *is_kind).map(|(name, _)| name)
}

fn make_directory(path: &Path) -> Result<(), VolumeError> {
    disk_writes::make_directories(path, 0o755).map_err(|source| VolumeError::Io {
        attempt: "make directory",
        path: path.to_owned(),
        source,
    })
}

/// The parent must exist: no directories are created for a file. A container may put a link, a pipe
/// or a device there just before the call; nothing that exists is opened.
///
/// DIFFERS: upstream creates the file to which a dangling link leads.
fn make_file(path: &Path) -> Result<(), VolumeError> {
    match disk_writes::created(OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)) {
        Ok(_) => Ok(()),
        // The caller checks what it is.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(source) => Err(VolumeError::Io { attempt: "make file", path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    fn check(path: &Path, kind: Option<&str>, expected: Option<&str>) {
        let source =
            HostPathVolumeSource { path: path.display().to_string(), type_: kind.map(str::to_owned) };
        match (set_up("v", &source), expected) {
            (Ok(volume), None) => assert_eq!(volume.host_path, path),
            (Err(error), Some(text)) => {
                assert_eq!(error.to_string(), text.replace('@', &path.display().to_string()));
            }
            (result, expected) => panic!("{path:?} {kind:?}: {result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn path_of_another_type_fails_the_check() {
        let dir = tempfile::tempdir().unwrap();
        let (file, socket, none) =
            (dir.path().join("file"), dir.path().join("socket"), dir.path().join("none"));
        std::fs::write(&file, "").unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        let not = |what: &str, found: &str| {
            Some(format!("hostPath type check failed: @ is not {what}, it's a {found}"))
        };
        let absent = "hostPath type check failed, @ is not a directory, unable to determine its type: \
                      path \"@\" does not exist";
        for (path, kind, expected) in [
            (none.as_path(), None, None),
            (&none, Some(""), None),
            (dir.path(), Some("Directory"), None),
            (&file, Some("Directory"), not("a directory", "File")),
            (&none, Some("Directory"), Some(absent.to_owned())),
            (&file, Some("DirectoryOrCreate"), not("a directory", "File")),
            (&file, Some("File"), None),
            (dir.path(), Some("File"), not("a file", "Directory")),
            (&socket, Some("FileOrCreate"), not("a file", "Socket")),
            (&socket, Some("Socket"), None),
            (&file, Some("Socket"), not("a socket file", "File")),
            (Path::new("/dev/null"), Some("CharDevice"), None),
            (&file, Some("CharDevice"), not("a character device", "File")),
            (Path::new("/dev/null"), Some("BlockDevice"), not("a block device", "CharDevice")),
            (&file, Some("Pipe"), Some("hostPath @: \"Pipe\" is an invalid volume type".to_owned())),
            (Path::new("/a/../b"), None, Some("invalid HostPath `@`: must not contain '..'".to_owned())),
            (Path::new("/tmp/a..b"), None, None),
        ] {
            check(path, kind, expected.as_deref());
        }
    }

    /// A container may have put them there.
    #[test]
    fn file_creation_opens_no_pipe_and_follows_no_dangling_link() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, link, target) = (dir.path().join("pipe"), dir.path().join("l"), dir.path().join("target"));
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let unknown = "hostPath type check failed, @ is not a file, unable to determine its type: ";
        for (path, reason) in [
            (&pipe, "only recognise file, directory, socket, block device and character device"),
            (&link, "path \"@\" does not exist"),
        ] {
            make_file(path).unwrap();
            check(path, Some("FileOrCreate"), Some(&format!("{unknown}{reason}")));
        }
        assert!(!target.exists());
    }

    #[test]
    fn missing_files_and_directories_are_created() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("a/b/c");
        check(&made, Some("DirectoryOrCreate"), None);
        assert_eq!(std::fs::metadata(&made).unwrap().permissions().mode() & 0o700, 0o700);
        let file = made.join("f");
        check(&file, Some("FileOrCreate"), None);
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o611, 0o600);
        let orphan = dir.path().join("x/y");
        let source = HostPathVolumeSource {
            path: orphan.display().to_string(),
            type_: Some("FileOrCreate".to_owned()),
        };
        assert!(matches!(set_up("v", &source), Err(VolumeError::Io { attempt: "make file", .. })));
        assert!(!orphan.exists());
    }
}
