//! Names and paths that other programs know: drivers, controllers, other agents (pure).

use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::{Form, VolumeLocation};
use super::super::paths;
pub(super) use crate::kube::volume_claims::attachment_name;
use crate::util::sha256;

const PLUGIN: &str = "kubernetes.io/csi";
/// The plugin's directory below a pod.
pub(crate) const DIRECTORY: &str = "kubernetes.io~csi";
/// The file with what is needed to undo an operation.
pub(super) const RECORD: &str = "vol_data.json";
/// The staging target of a file system.
pub(super) const GLOBAL_MOUNT: &str = "globalmount";
/// The publish target of a file system, in the volume's directory.
pub(super) const TARGET: &str = "mount";

#[must_use]
pub(super) fn inline_handle(pod_uid: &str, volume: &str) -> String {
    format!("csi-{}", sha256::sha256_hex(format!("{pod_uid}{volume}").as_bytes()))
}

/// The name of a volume on this node.
pub(super) fn unique_name(driver: &str, handle: &str) -> String {
    format!("{PLUGIN}/{driver}^{handle}")
}

/// The driver and the handle of a unique name.
pub(super) fn parts(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(PLUGIN)?.strip_prefix('/')?.split_once('^')
}

/// A path for a driver.
pub(super) fn path_text(path: &Path) -> Result<String, VolumeError> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| VolumeError::Name { name: path.display().to_string() })
}

/// The files of a block volume on the node.
pub(super) struct BlockPaths {
    /// `volumeDevices/<volume>`.
    pub(super) home: PathBuf,
    /// The directory of the record.
    pub(super) data: PathBuf,
    /// The directory with one mount of the device per pod.
    pub(super) dev: PathBuf,
    pub(super) staging: PathBuf,
    /// The directory of publish targets, one per pod.
    pub(super) publish: PathBuf,
}

/// The directories of CSI below the root directory, as it is configured: drivers have the same paths
/// in their containers, where links of this node may lead nowhere.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    root_dir: PathBuf,
}

impl Layout {
    pub(super) fn new(root_dir: &Path) -> Layout {
        Layout { root_dir: root_dir.to_owned() }
    }

    /// `plugins/kubernetes.io/csi`: one directory per driver, and `volumeDevices`.
    pub(super) fn shared(&self) -> PathBuf {
        self.root_dir.join("plugins/kubernetes.io/csi")
    }

    /// The directory of a staged file system: its record, and the mount in it.
    pub(super) fn staged(&self, driver: &str, handle: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.shared().join(paths::element(driver)?).join(sha256::sha256_hex(handle.as_bytes())))
    }

    /// `volumeDevices`: the directory of block volumes.
    pub(super) fn devices(&self) -> PathBuf {
        self.shared().join("volumeDevices")
    }

    /// The files of a block volume.
    pub(super) fn block_paths(&self, spec_name: &str) -> Result<BlockPaths, VolumeError> {
        // Directories beside those of the volumes have these names.
        if matches!(spec_name, "staging" | "publish") {
            return Err(VolumeError::Name { name: spec_name.to_owned() });
        }
        let (devices, name) = (self.devices(), paths::element(spec_name)?);
        let home = devices.join(name);
        Ok(BlockPaths {
            data: home.join("data"),
            dev: home.join("dev"),
            home,
            staging: devices.join("staging").join(name),
            publish: devices.join("publish").join(name),
        })
    }

    /// A volume of a pod: the directory of a file system, or the link to a device.
    pub(super) fn of_pod(&self, location: &VolumeLocation) -> Result<PathBuf, VolumeError> {
        let kind = match location.form {
            Form::Filesystem => "volumes",
            Form::Block => "volumeDevices",
        };
        let pod = self.root_dir.join("pods").join(paths::element(location.pod.as_str())?);
        Ok(pod.join(kind).join(DIRECTORY).join(paths::element(&location.spec_name)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::PodUid;

    #[test]
    fn names_equal_those_of_controllers_and_the_go_kubelet() {
        // echo -n 'vol-1hostpath.csi.k8s.ion1' | sha256sum
        assert_eq!(
            attachment_name("vol-1", "hostpath.csi.k8s.io", "n1"),
            format!("csi-{}", sha256::sha256_hex(b"vol-1hostpath.csi.k8s.ion1"))
        );
        assert_eq!(inline_handle("u", "v"), format!("csi-{}", sha256::sha256_hex(b"uv")));
        assert_eq!(inline_handle("u", "v").len(), 68);
        assert_eq!(unique_name("d", "h"), "kubernetes.io/csi/d^h");
    }

    #[test]
    fn paths_equal_those_of_the_go_kubelet() {
        let layout = Layout::new(Path::new("/r"));
        let hash = sha256::sha256_hex(b"h/../x");
        let staged = layout.staged("d.io", "h/../x").unwrap();
        assert_eq!(staged, Path::new(&format!("/r/plugins/kubernetes.io/csi/d.io/{hash}")));
        for (form, path) in [
            (Form::Filesystem, "/r/pods/u/volumes/kubernetes.io~csi/pv"),
            (Form::Block, "/r/pods/u/volumeDevices/kubernetes.io~csi/pv"),
        ] {
            let location = VolumeLocation { pod: PodUid::from("u"), spec_name: "pv".to_owned(), form };
            assert_eq!(layout.of_pod(&location).unwrap(), Path::new(path));
        }
        let devices = "/r/plugins/kubernetes.io/csi/volumeDevices";
        let block = layout.block_paths("pv").unwrap();
        assert_eq!(block.home, Path::new(devices).join("pv"));
        assert_eq!(block.staging, Path::new(devices).join("staging/pv"));
        assert_eq!(block.publish, Path::new(devices).join("publish/pv"));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let layout = Layout::new(Path::new("/r"));
        assert!(layout.block_paths("staging").is_err() && layout.block_paths("publish").is_err());
        for name in ["..", ".", "", "a/b", "a\0"] {
            assert!(layout.staged(name, "h").is_err(), "{name:?}");
            assert!(layout.block_paths(name).is_err(), "{name:?}");
            let location =
                VolumeLocation { pod: PodUid::from("u"), spec_name: name.to_owned(), form: Form::Block };
            assert!(layout.of_pod(&location).is_err(), "{name:?}");
        }
    }
}
