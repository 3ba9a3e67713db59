//! Volumes that a controller attaches: the node waits until its own object shows them (Go:
//! pkg/volume/util/operationexecutor, `GenerateVerifyControllerAttachedVolumeFunc`). CSI volumes have
//! VolumeAttachments instead.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::time::Instant;

use super::super::attachment::Holder;
use super::super::error::VolumeError;
use super::super::paths;
use super::devices::{self, Device, Kind};
use super::host::mount_at;
use super::{Kinds, fc, iscsi, plugin_of};
use crate::model::api::FCVolumeSource;
use crate::model::ids::PodUid;
use crate::model::persistent::{Iscsi, Mode, Source, Spec};
use crate::model::pod::Pod;

/// The name of a volume in the node's status; `None`: no controller attaches it.
fn unique_name(source: &Source) -> Option<String> {
    match source {
        Source::Iscsi(source) => Some(format!("kubernetes.io/iscsi/{}", of_iscsi(source))),
        Source::Fc(source) => Some(format!("kubernetes.io/fc/{}", of_fc(source)?)),
        _ => None,
    }
}

fn of_iscsi(source: &Iscsi) -> String {
    format!("{}:{}:{}", source.target_portal, source.iqn, source.lun)
}

/// The lists as Go prints them.
fn of_fc(source: &FCVolumeSource) -> Option<String> {
    let list = |names: &[String]| format!("[{}]", names.join(" "));
    let wwns = source.target_wwns.as_deref().unwrap_or_default();
    let wwids = source.wwids.as_deref().unwrap_or_default();
    match source.lun {
        Some(lun) if !wwns.is_empty() => Some(format!("{}:{lun}", list(wwns))),
        _ => (!wwids.is_empty()).then(|| list(wwids)),
    }
}

/// The name of the volume in a directory below `plugins` that an earlier agent has made. Names of FC
/// with dashes or underscores of their own cannot be told from those that the directory has in place
/// of separators and spaces.
fn named_by(device: &Device) -> Option<String> {
    match device.kind {
        Kind::Iscsi => {
            let disk = iscsi::Disk::from_dir(&device.dir)?;
            let portal = disk.portals.first()?;
            Some(format!("kubernetes.io/iscsi/{portal}:{}:{}", disk.iqn, disk.lun))
        }
        Kind::Fc => {
            let dir = device.dir.file_name()?.to_str()?;
            let list = |names: &str| format!("[{}]", names.replace('-', " "));
            Some(match dir.rsplit_once("-lun-") {
                Some((wwns, lun)) => format!("kubernetes.io/fc/{}:{lun}", list(wwns)),
                None => format!("kubernetes.io/fc/{}", list(dir)),
            })
        }
        Kind::Local | Kind::Flex(_) => None,
    }
}

/// The volumes that a controller attaches.
#[derive(Debug, Default)]
pub(super) struct Attachable {
    /// Those of pods.
    wanted: HashMap<PodUid, BTreeSet<String>>,
    /// By the directories below `plugins`, as far as this process has made them.
    dirs: HashMap<PathBuf, String>,
}

impl Attachable {
    /// The volumes that must not be detached, also those without a pod whose device is still here.
    fn names(&mut self, devices: &[Device]) -> BTreeSet<String> {
        let mut names: BTreeSet<String> = self.wanted.values().flatten().cloned().collect();
        self.dirs.retain(|dir, name| names.contains(name) || devices.iter().any(|it| it.dir == *dir));
        for device in devices {
            names.extend(self.dirs.get(&device.dir).cloned().or_else(|| named_by(device)));
        }
        names
    }
}

impl Kinds {
    /// Whether a pod has this volume already, or had it when an earlier agent ended.
    fn is_set_up(&self, pod: &Pod, spec: &Spec) -> Result<bool, VolumeError> {
        let plugin = plugin_of(&spec.source).replace('/', "~");
        let path = paths::pod(&self.root_dir, pod.uid())?;
        if spec.mode == Mode::Block {
            return Ok(path
                .join("volumeDevices")
                .join(plugin)
                .join(paths::element(&spec.name)?)
                .is_symlink());
        }
        let target = path.join("volumes").join(plugin).join(paths::element(&spec.name)?);
        Ok(mount_at(&self.host.mounts()?, &target).is_some())
    }

    /// The directory below `plugins` that a volume gets.
    fn device_dir(&self, spec: &Spec) -> Option<PathBuf> {
        let (plugin, dir) = match &spec.source {
            Source::Iscsi(source) => ("iscsi", iscsi::Disk::of(&spec.name, source).dir()),
            Source::Fc(source) => ("fc", fc::Disk::of(source).ok()?.dir()),
            _ => return None,
        };
        let top = devices::plugins(&self.root_dir).join(plugin);
        Some(if spec.mode == Mode::Block { top.join("volumeDevices").join(dir) } else { top.join(dir) })
    }

    /// Writes down which volumes must not be detached.
    pub(super) fn show_attachable(&self) {
        // Under the lock, so that the last change is the last list.
        let mut attachable = self.attachable();
        let names = attachable.names(&devices::all(&self.root_dir));
        self.attachments.set(Holder::Devices, names);
    }

    pub(super) fn forget_attachable(&self, uid: &PodUid) {
        self.attachments.forget(uid);
        let is_known = self.attachable().wanted.remove(uid).is_some();
        if is_known {
            self.show_attachable();
        }
    }

    /// The volume is in use from now on. It may be mounted once the controller knows that and has
    /// attached it; the pod is woken then.
    ///
    /// DIFFERS: a static pod does not wait, because it also starts without an API server. The
    /// controller has nothing to do for these volumes but to list them.
    pub(super) fn check_attached(&self, pod: &Pod, spec: &Spec) -> Result<(), VolumeError> {
        let Some(name) = unique_name(&spec.source).filter(|_| self.attachments.is_controlled()) else {
            return Ok(());
        };
        let dir = self.device_dir(spec);
        {
            let mut attachable = self.attachable();
            attachable.wanted.entry(pod.uid().clone()).or_default().insert(name.clone());
            attachable.dirs.extend(dir.map(|dir| (dir, name.clone())));
        }
        self.show_attachable();
        if pod.is_static() || self.is_set_up(pod, spec)? {
            return Ok(());
        }
        Ok(self.attachments.may_mount(pod.uid(), &name, Instant::now())?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn names_equal_those_of_the_controller() {
        let fc = |value: Value| of_fc(&serde_json::from_value(value).unwrap());
        assert_eq!(fc(json!({"targetWWNs": ["a", "b"], "lun": 2})).as_deref(), Some("[a b]:2"));
        assert_eq!(fc(json!({"wwids": ["c"]})).as_deref(), Some("[c]"));
        assert_eq!(fc(json!({"targetWWNs": ["a"]})), None);
        let iscsi: Iscsi =
            serde_json::from_value(json!({"targetPortal": "10.0.0.1:3260", "iqn": "iqn.x", "lun": 0}))
                .unwrap();
        let name = unique_name(&Source::Iscsi(iscsi));
        assert_eq!(name.as_deref(), Some("kubernetes.io/iscsi/10.0.0.1:3260:iqn.x:0"));
        assert_eq!(unique_name(&Source::Other("x".to_owned())), None);
    }

    #[test]
    fn volume_of_a_device_is_known_until_the_device_is_released() {
        let device = |kind, dir: &str| Device { kind, dir: PathBuf::from(dir), is_block: false };
        let devices = [
            device(Kind::Iscsi, "/p/iscsi/iface-default/10.0.0.1:3260-iqn.x-lun-0"),
            device(Kind::Fc, "/p/fc/a-b-lun-2"),
            device(Kind::Fc, "/p/fc/c_d"),
            device(Kind::Local, "/p/local-volume/mounts/pv"),
        ];
        let mut attachable = Attachable::default();
        attachable.dirs.insert(devices[2].dir.clone(), "kubernetes.io/fc/[c d]".to_owned());
        attachable.dirs.insert(PathBuf::from("/p/fc/gone"), "kubernetes.io/fc/[gone]".to_owned());
        let wanted = BTreeSet::from(["kubernetes.io/fc/[w]".to_owned()]);
        attachable.wanted.insert(PodUid::from("u"), wanted);
        let names: Vec<String> = attachable.names(&devices).into_iter().collect();
        assert_eq!(
            names,
            [
                "kubernetes.io/fc/[a b]:2",
                "kubernetes.io/fc/[c d]",
                "kubernetes.io/fc/[w]",
                "kubernetes.io/iscsi/10.0.0.1:3260:iqn.x:0"
            ]
        );
        attachable.wanted.clear();
        assert!(attachable.names(&[]).is_empty() && attachable.dirs.is_empty());
    }
}
