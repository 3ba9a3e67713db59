//! flexVolume: a program of the administrator that mounts volumes (Go: pkg/volume/flexvolume).
//!
//! Drivers are in `<volumePluginDir>/<vendor>~<driver>/<driver>`. A driver is called with a command,
//! its arguments and a JSON text of options, and answers with JSON. Its output is limited, and it
//! is killed at its deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use serde::Deserialize;

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::filesystem::tool;
use super::host::Host;
use super::tools::clip;
use crate::model::persistent::{Flex, Spec};
use crate::model::pod::Pod;
use crate::util::encoding;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// The limit of a call.
const LIMIT: Duration = Duration::from_secs(110);
/// Commands that drivers do not support are remembered for at most this many drivers.
const MAX_DRIVERS: usize = 256;

/// What a driver can do; a driver that says nothing can do everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Capabilities {
    pub(super) attach: bool,
    pub(super) selinux_relabel: bool,
    #[serde(rename = "fsGroup")]
    pub(super) fs_group: bool,
    /// Whether the node grows the file system of a volume that has become larger.
    #[serde(rename = "requiresFSResize")]
    pub(super) fs_resize: bool,
}

impl Default for Capabilities {
    fn default() -> Capabilities {
        Capabilities { attach: true, selinux_relabel: true, fs_group: true, fs_resize: true }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DriverStatus {
    status: String,
    message: String,
    device: String,
    #[serde(alias = "Capabilities")]
    capabilities: Option<Capabilities>,
}

/// The drivers of the node.
#[derive(Debug, Default)]
pub(super) struct Drivers {
    dir: PathBuf,
    features: Mutex<BTreeMap<String, DriverFeatures>>,
}

#[derive(Debug, Clone, Default)]
struct DriverFeatures {
    capabilities: Option<Capabilities>,
    unsupported: BTreeSet<String>,
}

/// The result of a call: `None` if the driver does not support the command.
type CallResult = Option<DriverStatus>;

impl Drivers {
    pub(super) fn new(dir: &Path) -> Drivers {
        Drivers { dir: dir.to_owned(), features: Mutex::default() }
    }

    /// The driver's capabilities. Its first use calls `init`.
    pub(super) fn init(
        &self,
        host: &dyn Host,
        driver: &str,
        stop: &StopToken,
    ) -> Result<Capabilities, VolumeError> {
        let capabilities = self.with(driver, |features| features.capabilities);
        if let Some(capabilities) = capabilities {
            return Ok(capabilities);
        }
        let status = self.call(host, driver, &["init"], stop)?.unwrap_or_default();
        let capabilities = status.capabilities.unwrap_or_default();
        self.with(driver, |features| features.capabilities = Some(capabilities));
        Ok(capabilities)
    }

    /// Mounts the volume at `target`. `false`: the driver leaves this to the agent.
    pub(super) fn mount(
        &self,
        host: &dyn Host,
        (driver, target): (&str, &Path),
        options: &str,
        stop: &StopToken,
    ) -> Result<bool, VolumeError> {
        let target = target.to_string_lossy();
        Ok(self.call(host, driver, &["mount", &target, options], stop)?.is_some())
    }

    /// Unmounts the volume at `target`. `false`: the driver leaves this to the agent.
    pub(super) fn unmount(
        &self,
        host: &dyn Host,
        (driver, target): (&str, &Path),
        stop: &StopToken,
    ) -> Result<bool, VolumeError> {
        let target = target.to_string_lossy();
        Ok(self.call(host, driver, &["unmount", &target], stop)?.is_some())
    }

    /// Attaches the volume to this node, and waits for its device. Empty: the driver does not attach.
    pub(super) fn attach(
        &self,
        host: &dyn Host,
        (driver, node): (&str, &str),
        options: &str,
        stop: &StopToken,
    ) -> Result<String, VolumeError> {
        let device = self.call(host, driver, &["attach", options, node], stop)?.unwrap_or_default().device;
        let waited = self.call(host, driver, &["waitforattach", &device, options], stop)?;
        Ok(waited.map(|status| status.device).unwrap_or(device))
    }

    /// Mounts the device once for all pods. `false`: the driver leaves this to the agent.
    pub(super) fn mount_device(
        &self,
        host: &dyn Host,
        (driver, target, device): (&str, &Path, &str),
        options: &str,
        stop: &StopToken,
    ) -> Result<bool, VolumeError> {
        let target = target.to_string_lossy();
        Ok(self.call(host, driver, &["mountdevice", &target, device, options], stop)?.is_some())
    }

    /// Unmounts the device. `false`: the driver leaves this to the agent.
    pub(super) fn unmount_device(
        &self,
        host: &dyn Host,
        (driver, target): (&str, &Path),
        stop: &StopToken,
    ) -> Result<bool, VolumeError> {
        let target = target.to_string_lossy();
        Ok(self.call(host, driver, &["unmountdevice", &target], stop)?.is_some())
    }

    /// Grows the file system at `target`, which is on `device`, to a size in bytes; the second size is the
    /// one that it had. `false`: the driver leaves this to the agent.
    pub(super) fn expand_fs(
        &self,
        host: &dyn Host,
        (driver, device, target): (&str, &str, &Path),
        options: &str,
        (new, old): (i64, i64),
        stop: &StopToken,
    ) -> Result<bool, VolumeError> {
        let (target, new, old) = (target.to_string_lossy(), new.to_string(), old.to_string());
        Ok(self.call(host, driver, &["expandfs", options, device, &target, &new, &old], stop)?.is_some())
    }

    /// Detaches the volume `name` from this node.
    pub(super) fn detach(
        &self,
        host: &dyn Host,
        (driver, name, node): (&str, &str, &str),
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        self.call(host, driver, &["detach", name, node], stop).map(drop)
    }

    fn call(
        &self,
        host: &dyn Host,
        driver: &str,
        args: &[&str],
        stop: &StopToken,
    ) -> Result<CallResult, VolumeError> {
        let command = args.first().copied().unwrap_or_default();
        if self.with(driver, |features| features.unsupported.contains(command)) {
            return Ok(None);
        }
        let program = self.program(driver)?;
        if !program.is_file() {
            return Err(fails(format!(
                "no volume plugin matched: flexVolume driver {driver} is not installed ({} does not exist)",
                program.display()
            )));
        }
        let ended = host.run(&program.to_string_lossy(), args, LIMIT, stop).map_err(tool)?;
        // Some drivers also print other texts; only the whole output counts, as upstream.
        let reply: DriverStatus = match serde_json::from_str(ended.output.trim()) {
            Ok(reply) => reply,
            Err(error) => {
                return Err(fails(format!(
                    "{command} command of flexVolume driver {driver} has an invalid answer: {error}: {:?}",
                    clip(&ended.output)
                )));
            }
        };
        match reply.status.as_str() {
            "Not supported" => {
                self.with(driver, |features| features.unsupported.insert(command.to_owned()));
                Ok(None)
            }
            "Success" if ended.is_fine() => Ok(Some(reply)),
            "Success" => Err(fails(ended.status())),
            status => Err(fails(format!(
                "{command} command failed, status: {}, reason: {}",
                clip(status),
                clip(&reply.message)
            ))),
        }
    }

    fn with<T: Default>(&self, driver: &str, act: impl FnOnce(&mut DriverFeatures) -> T) -> T {
        let mut features = self.features.locked();
        if features.len() >= MAX_DRIVERS && !features.contains_key(driver) {
            features.clear();
        }
        act(features.entry(driver.to_owned()).or_default())
    }

    /// `<dir>/<vendor>~<driver>/<driver>`.
    fn program(&self, driver: &str) -> Result<PathBuf, VolumeError> {
        let plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part
                    .chars()
                    .all(|character| character.is_ascii_alphanumeric() || "-_.".contains(character))
        };
        let (vendor, name) = driver.split_once('/').unwrap_or(("", driver));
        if !plain(name) || !(vendor.is_empty() || plain(vendor)) {
            return Err(fails(format!("{driver:?} cannot be the name of a flexVolume driver")));
        }
        Ok(self.dir.join(driver.replace('/', "~")).join(name))
    }
}

fn fails(what: String) -> VolumeError {
    VolumeError::device(Phase::SetUp, what)
}

/// The options of a call, as JSON.
pub(super) fn options(spec: &Spec, source: &Flex, more: &[(String, String)]) -> String {
    let mut options: BTreeMap<&str, &str> = BTreeMap::from([
        ("kubernetes.io/fsType", source.fs_type.as_str()),
        ("kubernetes.io/readwrite", if spec.read_only { "ro" } else { "rw" }),
        ("kubernetes.io/pvOrVolumeName", spec.name.as_str()),
    ]);
    options.extend(more.iter().map(|(key, value)| (key.as_str(), value.as_str())));
    options.extend(source.options.iter().map(|(key, value)| (key.as_str(), value.as_str())));
    serde_json::to_string(&options).unwrap_or_default()
}

/// The further options of a mount: the pod, its group, and values of the secret.
pub(super) fn pod_options(
    pod: &Pod,
    gid: Option<u32>,
    secret: &BTreeMap<String, Vec<u8>>,
) -> Vec<(String, String)> {
    let account = pod.spec().service_account_name.clone().unwrap_or_default();
    let mut more = vec![
        ("kubernetes.io/pod.name".to_owned(), pod.name().to_owned()),
        ("kubernetes.io/pod.namespace".to_owned(), pod.namespace().to_owned()),
        ("kubernetes.io/pod.uid".to_owned(), pod.uid().as_str().to_owned()),
        ("kubernetes.io/serviceAccount.name".to_owned(), account),
    ];
    if let Some(gid) = gid {
        more.push(("kubernetes.io/mounterArgs.FsGroup".to_owned(), gid.to_string()));
    }
    for (key, value) in secret {
        more.push((format!("kubernetes.io/secret/{key}"), encoding::base64(value)));
    }
    more
}

#[cfg(test)]
mod tests {
    use super::super::host::fake::FakeHost;
    use super::*;
    use crate::model::persistent::{Source, VolumeMode};

    fn drivers(root: &Path) -> Drivers {
        let dir = root.join("exec");
        std::fs::create_dir_all(dir.join("a~b")).unwrap();
        std::fs::write(dir.join("a~b/b"), "").unwrap();
        Drivers::new(&dir)
    }

    #[test]
    fn driver_is_called_with_command_and_options() {
        let root = tempfile::tempdir().unwrap();
        let (host, drivers, never) = (FakeHost::default(), drivers(root.path()), StopToken::never());
        let program = root.path().join("exec/a~b/b").display().to_string();
        let respond = |command: &str, text: &str| host.respond(&format!("{program} {command}"), 0, text);
        respond("init", r#"{"status": "Success", "capabilities": {"attach": false}}"#);
        let capabilities = drivers.init(&host, "a/b", &never).unwrap();
        assert_eq!(capabilities, Capabilities { attach: false, ..Capabilities::default() });
        assert_eq!(drivers.init(&host, "a/b", &never).unwrap(), capabilities);
        respond("mount", r#"{"status": "Success"}"#);
        assert!(drivers.mount(&host, ("a/b", Path::new("/t")), "{}", &never).unwrap());
        respond("unmount", r#"{"status": "Success"}"#);
        assert!(drivers.unmount(&host, ("a/b", Path::new("/t")), &never).unwrap());
        assert_eq!(
            host.log(),
            [format!("{program} init"), format!("{program} mount /t {{}}"), format!("{program} unmount /t")]
        );
        // A command that is not supported is called once.
        respond("attach", r#"{"status": "Not supported"}"#);
        respond("waitforattach", r#"{"status": "Success", "device": "/dev/x"}"#);
        respond("waitforattach", r#"{"status": "Success", "device": "/dev/y"}"#);
        assert_eq!(drivers.attach(&host, ("a/b", "n"), "{}", &never).unwrap(), "/dev/x");
        assert_eq!(drivers.attach(&host, ("a/b", "n"), "{}", &never).unwrap(), "/dev/y");
        assert_eq!(
            host.log(),
            [
                format!("{program} attach {{}} n"),
                format!("{program} waitforattach  {{}}"),
                format!("{program} waitforattach  {{}}"),
            ]
        );
    }

    #[test]
    fn failure_and_invalid_response_of_a_driver_are_errors() {
        let root = tempfile::tempdir().unwrap();
        let (host, drivers, never) = (FakeHost::default(), drivers(root.path()), StopToken::never());
        let text = |driver: &str| {
            drivers.mount(&host, (driver, Path::new("/t")), "{}", &never).unwrap_err().to_string()
        };
        let prefix = root.path().join("exec").display().to_string();
        host.respond(&prefix, 1, r#"{"status": "Failure", "message": "no disk"}"#);
        assert_eq!(text("a/b"), "mount command failed, status: Failure, reason: no disk");
        host.respond(&prefix, 3, r#"{"status": "Success"}"#);
        assert_eq!(text("a/b"), "exit status 3");
        host.respond(&prefix, 0, "nonsense\x1b");
        assert!(text("a/b").contains("has an invalid answer"));
        host.respond(&prefix, 0, "[[[[");
        assert!(text("a/b").contains("has an invalid answer"));
        assert!(text("a/other").contains("is not installed"));
        for name in ["../x", "a/../b", "a/b/c", "", "a/"] {
            assert!(text(name).contains("cannot be the name"), "{name}");
        }
    }

    #[test]
    fn options_have_upstreams_keys() {
        let source = Flex {
            fs_type: "ext4".to_owned(),
            options: [("k".to_owned(), "v".to_owned())].into(),
            ..Flex::default()
        };
        let spec = Spec {
            name: "pv".to_owned(),
            source: Source::Flex(source.clone()),
            read_only: true,
            mount_options: Vec::new(),
            mode: VolumeMode::Filesystem,
            access_modes: Vec::new(),
            is_single_pod: false,
            size: None,
            has_grown: false,
            expansion: Default::default(),
            is_persistent: true,
            nodes: None,
        };
        let object = serde_json::json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        let more = pod_options(&pod, Some(7), &[("pw".to_owned(), b"hi".to_vec())].into());
        let text: serde_json::Value = serde_json::from_str(&options(&spec, &source, &more)).unwrap();
        assert_eq!(
            text,
            serde_json::json!({"k": "v", "kubernetes.io/fsType": "ext4", "kubernetes.io/readwrite": "ro",
                "kubernetes.io/pvOrVolumeName": "pv", "kubernetes.io/pod.name": "p",
                "kubernetes.io/pod.namespace": "n", "kubernetes.io/pod.uid": "u",
                "kubernetes.io/serviceAccount.name": "", "kubernetes.io/mounterArgs.FsGroup": "7",
                "kubernetes.io/secret/pw": "aGk="})
        );
    }
}
