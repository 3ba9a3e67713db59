//! Volumes that a controller attaches: the node waits until its own object shows them (Go:
//! pkg/volume/util/operationexecutor, `GenerateVerifyControllerAttachedVolumeFunc`). CSI volumes have
//! VolumeAttachments instead.

use std::sync::Arc;
use std::time::Instant;

use super::super::attachment::Holder;
use super::super::error::VolumeError;
use super::super::{paths, plugin_table};
use super::devices::{self, Device, Kind};
use super::host::mount_at;
use super::{Kinds, fc, iscsi};
use crate::model::ids::PodUid;
use crate::model::persistent::{Spec, VolumeMode};
use crate::model::pod::Pod;
use crate::util::lock::LockExt;

/// The name of the volume in a directory below `plugins` that an earlier agent has made.
fn named_by(device: &Device) -> Option<String> {
    match device.kind {
        Kind::Iscsi => iscsi::named_by(&device.dir),
        Kind::Fc => fc::named_by(&device.dir),
        Kind::Local | Kind::Flex(_) => None,
    }
}

impl Kinds {
    /// Whether a pod has this volume already, or had it when an earlier agent ended.
    fn is_set_up(&self, pod: &Pod, spec: &Spec) -> Result<bool, VolumeError> {
        let plugin = plugin_table::storage(&spec.source).directory();
        let path = paths::pod(&self.root_dir, pod.uid())?;
        if spec.mode == VolumeMode::Block {
            return Ok(path
                .join("volumeDevices")
                .join(plugin)
                .join(paths::element(&spec.name)?)
                .is_symlink());
        }
        let target = path.join("volumes").join(plugin).join(paths::element(&spec.name)?);
        Ok(mount_at(&self.host.mounts()?, &target).is_some())
    }

    /// Writes down which volumes must not be detached. Returns why devices may be missing.
    pub(super) fn show_attachable(&self) -> Option<VolumeError> {
        // Under the lock, so that the last change is the last list.
        let mut attachable = self.attachable();
        let found = devices::all(&self.root_dir);
        attachable.log_unread(&found);
        let names = attachable.names(&found, named_by);
        self.attachments.set(Holder::Devices, names);
        // Last: until then each volume stays in use that may be there.
        self.hidden.locked().update(&found);
        found.error()
    }

    /// Writes down the volumes of an earlier agent.
    pub(super) fn show_earlier(&self) {
        // It is logged, and returned by the next sweep.
        let _ = self.show_attachable();
        if !self.hidden.locked().is_empty() {
            let hidden = Arc::clone(&self.hidden);
            self.attachments.keep_if(Arc::new(move |name| hidden.locked().may_have(name)));
        }
    }

    pub(super) fn forget_attachable(&self, uid: &PodUid) {
        self.attachments.forget(uid);
        let is_known = self.attachable().wanted.remove(uid).is_some();
        if is_known {
            // It is logged, and returned by the next sweep.
            let _ = self.show_attachable();
        }
    }

    /// The volume is in use from now on. It may be mounted once the controller knows that and has
    /// attached it; the pod is woken then.
    ///
    /// DIFFERS: a static pod does not wait, because it also starts without an API server. The
    /// controller has nothing to do for these volumes but to list them.
    pub(super) fn check_attached(&self, pod: &Pod, spec: &Spec) -> Result<(), VolumeError> {
        let storage = plugin_table::storage(&spec.source);
        let Some(name) = storage.unique_name().filter(|_| self.attachments.is_controlled()) else {
            return Ok(());
        };
        let dir = storage.device_dir(&spec.name);
        let dir = dir.map(|dir| self.global(storage.name(), spec.mode, dir));
        {
            let mut attachable = self.attachable();
            attachable.wanted.entry(pod.uid().clone()).or_default().insert(name.clone());
            attachable.dirs.extend(dir.map(|dir| (dir, name.clone())));
        }
        let _ = self.show_attachable();
        self.hidden.locked().add_own(&name);
        if pod.is_static() || self.is_set_up(pod, spec)? {
            return Ok(());
        }
        Ok(self.attachments.may_mount(pod.uid(), &name, Instant::now())?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::super::super::plugin_table::storage;
    use super::super::devices::{Attachable, FoundDevices};
    use super::*;
    use crate::model::persistent::{Iscsi, Source};

    #[test]
    fn names_equal_those_of_the_controller() {
        let fc = |value: Value| storage(&Source::Fc(serde_json::from_value(value).unwrap())).unique_name();
        let name = fc(json!({"targetWWNs": ["a", "b"], "lun": 2}));
        assert_eq!(name.as_deref(), Some("kubernetes.io/fc/[a b]:2"));
        assert_eq!(fc(json!({"wwids": ["c"]})).as_deref(), Some("kubernetes.io/fc/[c]"));
        assert_eq!(fc(json!({"targetWWNs": ["a"]})), None);
        let iscsi: Iscsi =
            serde_json::from_value(json!({"targetPortal": "10.0.0.1:3260", "iqn": "iqn.x", "lun": 0}))
                .unwrap();
        let name = storage(&Source::Iscsi(iscsi)).unique_name();
        assert_eq!(name.as_deref(), Some("kubernetes.io/iscsi/10.0.0.1:3260:iqn.x:0"));
        assert_eq!(storage(&Source::Other("x".to_owned())).unique_name(), None);
    }

    #[test]
    fn volume_of_a_device_is_known_until_the_device_is_released() {
        let device = |kind, dir: &str| Device { kind, dir: PathBuf::from(dir), is_block: false };
        let devices = vec![
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
        let found = FoundDevices { devices, ..FoundDevices::default() };
        let names: Vec<String> = attachable.names(&found, named_by).into_iter().collect();
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
        assert!(
            attachable.names(&FoundDevices::default(), named_by).is_empty() && attachable.dirs.is_empty()
        );
    }

    /// All names stayed while any directory could not be read, also those of volumes that were used since.
    #[test]
    fn volume_stays_in_use_only_while_its_own_directory_cannot_be_read() {
        let device = |kind, dir: &str| Device { kind, dir: PathBuf::from(dir), is_block: false };
        let iscsi = device(Kind::Iscsi, "/p/iscsi/iface-default/10.0.0.1:3260-iqn.x-lun-0");
        let fc = device(Kind::Fc, "/p/fc/c_d");
        let (iscsi_name, fc_name) = ("kubernetes.io/iscsi/10.0.0.1:3260:iqn.x:0", "kubernetes.io/fc/[c d]");
        let found = |devices: &[&Device], unread: &[&str]| FoundDevices {
            devices: devices.iter().map(|device| (*device).clone()).collect(),
            unread: unread.iter().map(|dir| (PathBuf::from(dir), std::io::Error::other("x"))).collect(),
        };
        let mut attachable = Attachable::default();
        attachable.dirs.insert(fc.dir.clone(), fc_name.to_owned());
        let mut names =
            |found: &FoundDevices| attachable.names(found, named_by).into_iter().collect::<Vec<_>>();
        assert_eq!(names(&found(&[&iscsi, &fc], &[])), [fc_name, iscsi_name]);
        // Also that of an earlier agent, and as long as it lasts.
        for unread in ["/p/iscsi/iface-default", "/p/iscsi", "/p/iscsi"] {
            assert_eq!(names(&found(&[&fc], &[unread])), [fc_name, iscsi_name], "{unread}");
        }
        assert_eq!(names(&found(&[], &["/p/iscsi"])), [iscsi_name]);
        assert_eq!(names(&found(&[], &["/p/iscsi/iface-other", "/p/fc", "/p/local-volume/mounts"])), [""; 0]);
    }
}
