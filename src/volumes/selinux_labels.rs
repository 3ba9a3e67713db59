//! With which SELinux label the pods of this node have the volumes that they share (Go:
//! pkg/kubelet/volumemanager/cache/desired_state_of_world.go).
//!
//! The label is an option of the mount of a file system, which all pods of the node share: pods that
//! need different labels of a volume cannot have it at the same time.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::selinux::{self, FileContext, PodSelinuxLabels, SelinuxLabelError};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::storage::AccessMode;
use crate::util::lock::LockExt;

/// The labels of all volumes of this node. All kinds of volumes share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SelinuxLabels {
    /// The label of files of containers; `None`: the node does not use SELinux.
    node: Option<FileContext>,
    /// The feature gate `SELinuxMount`. Without it only volumes that one pod alone may use are mounted
    /// with a label.
    has_all_modes: bool,
    table: Arc<Mutex<LabelsByVolume>>,
}

/// A volume that a pod shall have.
pub(super) struct SelinuxLabelRequest<'a> {
    /// The name of the volume on this node, which is the same for all pods that share it.
    pub(super) unique_name: &'a str,
    /// The name of the persistent volume, or of the volume in the pod.
    pub(super) name: &'a str,
    /// The plugin, with the name of a CSI driver.
    pub(super) plugin: String,
    pub(super) is_persistent: bool,
    pub(super) access_modes: &'a [AccessMode],
    /// Whether its plugin can mount it with a label.
    pub(super) is_mountable: bool,
    pub(super) labels: &'a PodSelinuxLabels,
    /// The label with which the pod has it already; empty: none.
    pub(super) mounted: Option<String>,
}

impl SelinuxLabelRequest<'_> {
    /// The widest access mode, as metrics have it.
    fn access_mode(&self) -> &'static str {
        const MODES: [(AccessMode, &str); 4] = [
            (AccessMode::ReadWriteMany, "RWX"),
            (AccessMode::ReadOnlyMany, "ROX"),
            (AccessMode::ReadWriteOnce, "RWO"),
            (AccessMode::ReadWriteOncePod, "RWOP"),
        ];
        if !self.is_persistent {
            return "inline";
        }
        MODES.iter().find(|(mode, _)| self.access_modes.contains(mode)).map_or("", |(_, name)| *name)
    }
}

impl SelinuxLabels {
    /// Of the node whose files are below `root`. `has_all_modes`: the feature gate `SELinuxMount`.
    pub(crate) fn read(root: &Path, has_all_modes: bool) -> SelinuxLabels {
        SelinuxLabels { node: FileContext::read(root), has_all_modes, table: Arc::default() }
    }

    /// A node that uses SELinux.
    #[cfg(test)]
    pub(super) fn for_tests(has_all_modes: bool) -> SelinuxLabels {
        SelinuxLabels { node: Some(FileContext::for_tests()), has_all_modes, table: Arc::default() }
    }

    /// Whether the node uses SELinux. If not, no volume has a label.
    pub(super) fn is_enabled(&self) -> bool {
        self.node.is_some()
    }

    /// What the pod's containers want of a volume.
    pub(super) fn of_pod(&self, pod: &Pod, volume: &str) -> PodSelinuxLabels {
        selinux::labels(pod, volume, self.node.as_ref())
    }

    /// The label to mount a file system with; empty: none. The pod has the volume from now on, until
    /// [`SelinuxLabels::remove`] or [`SelinuxLabels::forget`]. A volume that it has already stays as it is:
    /// an earlier release may have mounted it with another label.
    ///
    /// # Errors
    /// If the containers of the pod, or other pods, need another label. For volumes that are never
    /// mounted with a label this is counted only.
    pub(super) fn admit(
        &self,
        pod: &PodUid,
        volume: &SelinuxLabelRequest<'_>,
    ) -> Result<String, SelinuxLabelError> {
        if !self.is_enabled() {
            return Ok(String::new());
        }
        if let Some(label) = &volume.mounted {
            if volume.is_mountable {
                self.table.locked().add(volume.unique_name, pod, label);
            }
            return Ok(label.clone());
        }
        let mode = volume.access_mode();
        let is_supported = volume.is_persistent
            && (self.has_all_modes || volume.access_modes == [AccessMode::ReadWriteOncePod]);
        let mut is_mountable = volume.is_mountable;
        let wanted = match is_mountable {
            true => volume.labels.to_mount_with(),
            false => volume.labels.single().map(|_| ""),
        };
        let label = match wanted {
            Ok(label) => label,
            Err(problem) => {
                let is_of_pod = matches!(problem, SelinuxLabelError::Several { .. });
                match (is_of_pod, is_supported) {
                    (true, true) => metrics::SELINUX_POD_ERRORS.add([mode], 1),
                    (true, false) => metrics::SELINUX_POD_WARNINGS.add([mode], 1),
                    (false, true) => metrics::SELINUX_CONTAINER_ERRORS.add([mode], 1),
                    (false, false) => metrics::SELINUX_CONTAINER_WARNINGS.add([mode], 1),
                }
                if is_supported {
                    return Err(problem);
                }
                is_mountable &= !is_of_pod;
                ""
            }
        };
        if is_mountable {
            self.share(pod, volume, label, is_supported)?;
        }
        Ok(if is_supported { label.to_owned() } else { String::new() })
    }

    /// Compares the label with those of other pods.
    fn share(
        &self,
        pod: &PodUid,
        volume: &SelinuxLabelRequest<'_>,
        label: &str,
        is_supported: bool,
    ) -> Result<(), SelinuxLabelError> {
        let series = || [volume.plugin.clone(), volume.access_mode().to_owned()];
        let mut table = self.table.locked();
        if let Some(present) = table.conflicting(volume.unique_name, pod, label) {
            if is_supported {
                metrics::SELINUX_VOLUME_ERRORS.add(series(), 1);
                let (volume, wanted) = (volume.name.to_owned(), label.to_owned());
                return Err(SelinuxLabelError::Conflict { volume, present: present.to_owned(), wanted });
            }
            metrics::SELINUX_VOLUME_WARNINGS.add(series(), 1);
        }
        if table.add(volume.unique_name, pod, label) && !label.is_empty() {
            metrics::SELINUX_VOLUMES.add(series(), 1);
        }
        Ok(())
    }

    /// A pod of an earlier agent has the volume, mounted with this label.
    pub(super) fn restore(&self, unique_name: &str, pod: &PodUid, label: &str) {
        if self.is_enabled() {
            self.table.locked().add(unique_name, pod, label);
        }
    }

    /// Whether the pod has the volume with another label than this one, or was about to.
    pub(super) fn has_other(&self, unique_name: &str, pod: &PodUid, label: &str) -> bool {
        let table = self.table.locked();
        let own = table.volumes.get(unique_name).and_then(|pods| pods.get(pod));
        own.is_some_and(|own| own != label)
    }

    /// The pod has the volume no more.
    pub(super) fn remove(&self, unique_name: &str, pod: &PodUid) {
        self.table.locked().remove(unique_name, pod);
    }

    /// The pod has no volume any more.
    pub(super) fn forget(&self, pod: &PodUid) {
        self.table.locked().forget(pod);
    }
}

/// The labels of the pods of each volume (pure).
#[derive(Debug, Default)]
struct LabelsByVolume {
    volumes: HashMap<String, BTreeMap<PodUid, String>>,
}

impl LabelsByVolume {
    /// The label of another pod that differs. A pod that has the volume already has no conflict.
    fn conflicting(&self, volume: &str, pod: &PodUid, label: &str) -> Option<&str> {
        let pods = self.volumes.get(volume).filter(|pods| !pods.contains_key(pod))?;
        pods.values().find(|other| *other != label).map(String::as_str)
    }

    /// Adds a pod, unless it is there. Returns whether no pod had the volume.
    fn add(&mut self, volume: &str, pod: &PodUid, label: &str) -> bool {
        let pods = self.volumes.entry(volume.to_owned()).or_default();
        let is_new = pods.is_empty();
        pods.entry(pod.clone()).or_insert_with(|| label.to_owned());
        is_new
    }

    fn remove(&mut self, volume: &str, pod: &PodUid) {
        if let Some(pods) = self.volumes.get_mut(volume) {
            pods.remove(pod);
            if pods.is_empty() {
                self.volumes.remove(volume);
            }
        }
    }

    fn forget(&mut self, pod: &PodUid) {
        self.volumes.retain(|_, pods| {
            pods.remove(pod);
            !pods.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AccessMode::{ReadOnlyMany, ReadWriteMany, ReadWriteOnce, ReadWriteOncePod};

    fn volume<'a>(
        labels: &'a PodSelinuxLabels,
        access_modes: &'a [AccessMode],
        plugin: &str,
    ) -> SelinuxLabelRequest<'a> {
        SelinuxLabelRequest {
            unique_name: "kubernetes.io/csi/d^h",
            name: "pv",
            plugin: plugin.to_owned(),
            is_persistent: true,
            access_modes,
            is_mountable: true,
            labels,
            mounted: None,
        }
    }

    fn uid(name: &str) -> PodUid {
        PodUid::from(name)
    }

    #[test]
    fn volume_of_any_access_mode_is_mounted_with_the_label_of_its_pods() {
        let (first, second) = (PodSelinuxLabels::with_label("l1"), PodSelinuxLabels::with_label("l2"));
        for (number, mode) in
            [ReadWriteOnce, ReadOnlyMany, ReadWriteMany, ReadWriteOncePod].into_iter().enumerate()
        {
            let (node, plugin) = (SelinuxLabels::for_tests(true), format!("all-modes-{number}"));
            let name = ["RWO", "ROX", "RWX", "RWOP"][number];
            let modes = [mode];
            let admit = |pod: &str, labels: &PodSelinuxLabels| {
                node.admit(&uid(pod), &volume(labels, &modes, &plugin))
            };
            assert_eq!(admit("a", &first).as_deref(), Ok("l1"));
            assert_eq!(admit("b", &first).as_deref(), Ok("l1"));
            for _ in 0..2 {
                assert_eq!(
                    admit("c", &second).unwrap_err().to_string(),
                    r#"conflicting SELinux labels of volume pv: "l1" and "l2""#
                );
            }
            let none = admit("d", &PodSelinuxLabels::default()).unwrap_err().to_string();
            assert_eq!(none, r#"conflicting SELinux labels of volume pv: "l1" and """#);
            // It is repeated for a pod that has the volume.
            assert_eq!(admit("a", &first).as_deref(), Ok("l1"));
            let series = || [plugin.clone(), name.to_owned()];
            assert_eq!(metrics::SELINUX_VOLUMES.get(series()), 1);
            assert_eq!(metrics::SELINUX_VOLUME_ERRORS.get(series()), 3);
            node.remove("kubernetes.io/csi/d^h", &uid("a"));
            assert!(admit("c", &second).is_err());
            node.forget(&uid("b"));
            assert_eq!(admit("c", &second).as_deref(), Ok("l2"));
        }
    }

    #[test]
    fn without_the_gate_only_a_volume_of_one_pod_has_a_label() {
        let node = SelinuxLabels::for_tests(false);
        let (first, second) = (PodSelinuxLabels::with_label("l1"), PodSelinuxLabels::with_label("l2"));
        let admit = |pod: &str, labels: &PodSelinuxLabels, modes: &[AccessMode]| {
            node.admit(&uid(pod), &volume(labels, modes, "gate-off"))
        };
        assert_eq!(admit("a", &first, &[ReadWriteOncePod, ReadWriteOnce]).as_deref(), Ok(""));
        assert_eq!(admit("b", &second, &[ReadWriteOncePod, ReadWriteOnce]).as_deref(), Ok(""));
        let series = || ["gate-off".to_owned(), "RWO".to_owned()];
        assert_eq!(metrics::SELINUX_VOLUME_WARNINGS.get(series()), 1);
        assert_eq!(metrics::SELINUX_VOLUME_ERRORS.get(series()), 0);
        node.forget(&uid("a"));
        node.forget(&uid("b"));
        assert_eq!(admit("a", &first, &[ReadWriteOncePod]).as_deref(), Ok("l1"));
        assert!(admit("b", &second, &[ReadWriteOncePod]).is_err());
    }

    #[test]
    fn containers_with_different_labels_cannot_share_a_persistent_volume() {
        let several: PodSelinuxLabels = ["l1", "l2"].into_iter().collect();
        let node = SelinuxLabels::for_tests(true);
        let error = "multiple SELinux labels found: l1,l2";
        // Also if its plugin never mounts with a label.
        for is_mountable in [true, false] {
            let wanted = SelinuxLabelRequest { is_mountable, ..volume(&several, &[ReadWriteMany], "x") };
            assert_eq!(node.admit(&uid("a"), &wanted).unwrap_err().to_string(), error);
        }
        let inline = SelinuxLabelRequest { is_persistent: false, ..volume(&several, &[], "x") };
        let before = metrics::SELINUX_POD_WARNINGS.get(["inline"]);
        assert_eq!(node.admit(&uid("a"), &inline).as_deref(), Ok(""));
        assert!(metrics::SELINUX_POD_WARNINGS.get(["inline"]) > before);
        assert!(metrics::SELINUX_POD_ERRORS.get(["RWX"]) >= 2);
        // The pod has the volume from an earlier release.
        let mounted = Some(String::new());
        let present = SelinuxLabelRequest { mounted, ..volume(&several, &[ReadWriteMany], "x") };
        assert_eq!(node.admit(&uid("a"), &present).as_deref(), Ok(""));
    }

    #[test]
    fn volume_of_a_plugin_that_mounts_without_labels_is_shared_by_all_pods() {
        let node = SelinuxLabels::for_tests(true);
        for label in ["l1", "l2"] {
            let labels = PodSelinuxLabels::with_label(label);
            let wanted =
                SelinuxLabelRequest { is_mountable: false, ..volume(&labels, &[ReadWriteMany], "x") };
            assert_eq!(node.admit(&uid(label), &wanted).as_deref(), Ok(""));
        }
    }

    #[test]
    fn volume_of_an_earlier_agent_is_not_shared_with_another_label() {
        let node = SelinuxLabels::for_tests(true);
        node.restore("kubernetes.io/csi/d^h", &uid("a"), "l1");
        let (first, second) = (PodSelinuxLabels::with_label("l1"), PodSelinuxLabels::with_label("l2"));
        assert!(node.admit(&uid("b"), &volume(&second, &[ReadWriteMany], "x")).is_err());
        assert_eq!(node.admit(&uid("b"), &volume(&first, &[ReadWriteMany], "x")).as_deref(), Ok("l1"));
    }

    #[test]
    fn pod_that_waits_with_the_same_label_has_no_other() {
        let node = SelinuxLabels::for_tests(true);
        let (first, name) = (PodSelinuxLabels::with_label("l1"), "kubernetes.io/csi/d^h");
        node.admit(&uid("a"), &volume(&first, &[ReadWriteMany], "x")).unwrap();
        assert!(!node.has_other(name, &uid("a"), "l1") && !node.has_other(name, &uid("b"), "l2"));
        assert!(node.has_other(name, &uid("a"), "l2"));
    }

    #[test]
    fn node_without_selinux_mounts_without_labels() {
        let node = SelinuxLabels::default();
        let several: PodSelinuxLabels = ["l1", "l2"].into_iter().collect();
        node.restore("kubernetes.io/csi/d^h", &uid("b"), "l3");
        assert_eq!(node.admit(&uid("a"), &volume(&several, &[ReadWriteOncePod], "off")).as_deref(), Ok(""));
        assert!(node.table.locked().volumes.is_empty());
    }

    #[test]
    fn label_that_would_be_another_mount_option_is_refused() {
        let node = SelinuxLabels::for_tests(true);
        for level in ["s0\",errors=panic,x=\"", "s0 ", "s0\n", "s0\u{e4}"] {
            let labels = PodSelinuxLabels::with_label(&format!("u:r:t:{level}"));
            let error = node.admit(&uid("a"), &volume(&labels, &[ReadWriteMany], "x")).unwrap_err();
            assert!(error.to_string().contains("cannot be an option of a mount"), "{error}");
        }
    }
}
