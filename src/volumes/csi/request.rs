//! What a driver is asked for, computed from the volume and the pod (pure).

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, VolumeLocation};
use super::super::ownership::Policy;
use super::super::selinux::PodSelinuxLabels;
use super::driver::{DriverCapabilities, Pairs, VolumeCapability};
use super::names::{self, GLOBAL_MOUNT, Layout, path_text};
use super::record::Record;
use crate::model::ids::PodUid;
use crate::model::storage::{AccessMode, CsiDriverSpec, CsiVolumeSource, FsGroupPolicy};

/// The key of the tokens, in the volume's context or in its secrets.
pub(super) const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// What a driver may learn of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    pub uid: PodUid,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    /// See [`crate::kube::volume_claims::uses_attached`].
    pub uses_attached: bool,
}

/// How a volume came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifecycle {
    /// It is a persistent volume.
    Persistent,
    /// It is in the pod's specification, and ends with the pod.
    Ephemeral,
}

impl Lifecycle {
    /// The name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Lifecycle::Persistent => "Persistent",
            Lifecycle::Ephemeral => "Ephemeral",
        }
    }
}

/// A volume of a pod.
#[derive(Debug, Clone)]
pub struct VolumeRequest {
    /// The pod.
    pub pod: PodFacts,
    /// The volume's name in the pod.
    pub volume: String,
    /// The persistent volume's name, or the volume's name in the pod.
    pub spec_name: String,
    /// Driver, handle, attributes, names of secrets. The handle of an ephemeral volume is
    /// [`names::inline_handle`].
    pub source: CsiVolumeSource,
    /// Persistent or ephemeral.
    pub lifecycle: Lifecycle,
    /// File system or device.
    pub form: Form,
    /// The persistent volume's modes. The first one is what the driver is asked for.
    pub access_modes: Vec<AccessMode>,
    /// Options for mount, of the persistent volume.
    pub mount_options: Vec<String>,
    /// Whether the claim or the pod wants it read-only.
    pub read_only: bool,
    /// The pod's group for files, and whether a root that matches is enough.
    pub fs_group: Option<u32>,
    /// `fsGroupChangePolicy: OnRootMismatch`.
    pub fs_group_on_root_mismatch: bool,
    /// The SELinux labels of the containers that mount it, on nodes that use SELinux.
    pub selinux: PodSelinuxLabels,
    /// The size in bytes that the file system must be grown to, if it must.
    pub grow_to: Option<i64>,
}

impl VolumeRequest {
    pub(super) fn location(&self) -> VolumeLocation {
        VolumeLocation { pod: self.pod.uid.clone(), spec_name: self.spec_name.clone(), form: self.form }
    }

    pub(super) fn unique_name(&self) -> String {
        names::unique_name(&self.source.driver, &self.source.volume_handle)
    }

    pub(super) fn is_ephemeral(&self) -> bool {
        self.lifecycle == Lifecycle::Ephemeral
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only || self.source.read_only
    }

    /// The use of the volume in the driver's terms. `label`: the SELinux label to mount with; empty: none.
    pub(super) fn volume_capability(
        &self,
        capabilities: DriverCapabilities,
        label: &str,
    ) -> VolumeCapability {
        let access_mode = access_mode(self.access_modes.first().copied(), capabilities);
        if self.form == Form::Block {
            return VolumeCapability { is_block: true, access_mode, ..VolumeCapability::default() };
        }
        let mut mount_flags = self.mount_options.clone();
        if !label.is_empty() {
            mount_flags.push(format!("context=\"{label}\""));
        }
        VolumeCapability {
            is_block: false,
            fs_type: self.source.fs_type.clone().unwrap_or_default(),
            mount_flags,
            mount_group: self.fs_group.filter(|_| capabilities.mount_group),
            access_mode,
        }
    }

    /// The staging target, for the driver; empty if the volume is not staged.
    pub(super) fn staging_path(
        &self,
        capabilities: DriverCapabilities,
        layout: &Layout,
    ) -> Result<String, VolumeError> {
        if !capabilities.stage || self.is_ephemeral() {
            return Ok(String::new());
        }
        let source = &self.source;
        path_text(&match self.form {
            Form::Filesystem => layout.staged(&source.driver, &source.volume_handle)?.join(GLOBAL_MOUNT),
            Form::Block => layout.block_paths(&self.spec_name)?.staging,
        })
    }

    /// The record of the volume of the pod, mounted with this label, on the node with this name.
    pub(super) fn record(&self, label: &str, node: &str) -> Record {
        let (source, lifecycle) = (&self.source, self.lifecycle.as_str());
        Record {
            selinux_context: label.to_owned(),
            ..Record::of_pod(&self.spec_name, &source.driver, &source.volume_handle, lifecycle, node)
        }
    }

    /// The step of a failure before the volume is staged, and of its staging.
    pub(super) fn stage_phase(&self) -> Phase {
        match self.form {
            Form::Filesystem => Phase::MountDevice,
            Form::Block => Phase::SetUpDevice,
        }
    }

    /// The step of a failed publication.
    pub(super) fn publish_phase(&self) -> Phase {
        match self.form {
            Form::Filesystem => Phase::SetUp,
            Form::Block => Phase::MapPodDevice,
        }
    }

    /// Whether a controller attaches the volume to nodes.
    pub(super) fn is_attached(&self, driver: &CsiDriverSpec) -> bool {
        !self.is_ephemeral() && driver.attaches()
    }

    /// When the agent changes the group of all files.
    pub(super) fn group_policy(&self) -> Policy {
        if self.fs_group_on_root_mismatch { Policy::OnRootMismatch } else { Policy::Always }
    }

    /// The group that the agent gives to all files, if it does.
    pub(super) fn group_to_set(
        &self,
        driver: &CsiDriverSpec,
        capabilities: DriverCapabilities,
    ) -> Option<u32> {
        let gid = self.fs_group.filter(|_| !capabilities.mount_group && self.form == Form::Filesystem)?;
        let applies = match driver.fs_group_policy.unwrap_or_default() {
            FsGroupPolicy::None => false,
            FsGroupPolicy::File => true,
            FsGroupPolicy::ReadWriteOnceWithFSType => {
                let is_single = |mode: &AccessMode| {
                    matches!(mode, AccessMode::ReadWriteOnce | AccessMode::ReadWriteOncePod)
                };
                let has_type = self.source.fs_type.as_deref().is_some_and(|kind| !kind.is_empty());
                has_type && (self.is_ephemeral() || self.access_modes.iter().any(is_single))
            }
        };
        (applies && !self.is_read_only()).then_some(gid)
    }

    /// The volume's attributes, with facts of the pod if the driver wants them.
    pub(super) fn context(&self, driver: &CsiDriverSpec) -> Pairs {
        let mut context = self.source.volume_attributes.clone();
        if driver.pod_info_on_mount == Some(true) {
            let pod = &self.pod;
            for (key, value) in [
                ("pod.name", pod.name.as_str()),
                ("pod.namespace", &pod.namespace),
                ("pod.uid", pod.uid.as_str()),
                ("serviceAccount.name", &pod.service_account),
                ("ephemeral", if self.is_ephemeral() { "true" } else { "false" }),
            ] {
                context.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
            }
        }
        context
    }

    /// Whether the driver supports volumes of this life cycle; the text is upstream's.
    pub(super) fn check_lifecycle(&self, driver: &CsiDriverSpec) -> Result<(), String> {
        let modes = &driver.volume_lifecycle_modes;
        let default = [Lifecycle::Persistent.as_str().to_owned()];
        let modes: &[String] = if modes.is_empty() { &default } else { modes };
        let mode = self.lifecycle.as_str();
        if modes.iter().any(|other| other == mode) {
            return Ok(());
        }
        let name = &self.source.driver;
        let only: Vec<String> = modes.iter().map(|mode| format!("{mode:?}")).collect();
        Err(format!(
            "volume mode {mode:?} not supported by driver {name} (only supports [{}])",
            only.join(" ")
        ))
    }
}

/// The mode's number in the protocol. A volume without a mode is for one node.
fn access_mode(mode: Option<AccessMode>, capabilities: DriverCapabilities) -> i32 {
    const SINGLE_NODE_WRITER: i32 = 1;
    const MULTI_NODE_READER_ONLY: i32 = 3;
    const MULTI_NODE_MULTI_WRITER: i32 = 5;
    const SINGLE_NODE_SINGLE_WRITER: i32 = 6;
    const SINGLE_NODE_MULTI_WRITER: i32 = 7;
    match mode.unwrap_or(AccessMode::ReadWriteOnce) {
        AccessMode::ReadWriteOnce if capabilities.single_node_multi_writer => SINGLE_NODE_MULTI_WRITER,
        AccessMode::ReadWriteOncePod if capabilities.single_node_multi_writer => SINGLE_NODE_SINGLE_WRITER,
        AccessMode::ReadWriteOnce | AccessMode::ReadWriteOncePod => SINGLE_NODE_WRITER,
        AccessMode::ReadOnlyMany => MULTI_NODE_READER_ONLY,
        AccessMode::ReadWriteMany => MULTI_NODE_MULTI_WRITER,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn wanted(pod: &str, handle: &str) -> VolumeRequest {
        VolumeRequest {
            pod: PodFacts {
                uid: PodUid::from(pod),
                name: format!("{pod}-name"),
                namespace: "n".to_owned(),
                service_account: "default".to_owned(),
                uses_attached: false,
            },
            volume: format!("v-{handle}"),
            spec_name: format!("pv-{handle}"),
            source: CsiVolumeSource {
                driver: "d.example".to_owned(),
                volume_handle: handle.to_owned(),
                ..CsiVolumeSource::default()
            },
            lifecycle: Lifecycle::Persistent,
            form: Form::Filesystem,
            access_modes: vec![AccessMode::ReadWriteOnce],
            mount_options: Vec::new(),
            read_only: false,
            fs_group: None,
            fs_group_on_root_mismatch: false,
            selinux: PodSelinuxLabels::default(),
            grow_to: None,
        }
    }

    #[test]
    fn access_modes_have_the_numbers_of_the_protocol() {
        use AccessMode::{ReadOnlyMany, ReadWriteMany, ReadWriteOnce, ReadWriteOncePod};
        let able = DriverCapabilities { single_node_multi_writer: true, ..DriverCapabilities::default() };
        for (mode, plain, with_ability) in [
            (None, 1, 7),
            (Some(ReadWriteOnce), 1, 7),
            (Some(ReadWriteOncePod), 1, 6),
            (Some(ReadOnlyMany), 3, 3),
            (Some(ReadWriteMany), 5, 5),
        ] {
            assert_eq!(access_mode(mode, DriverCapabilities::default()), plain, "{mode:?}");
            assert_eq!(access_mode(mode, able), with_ability, "{mode:?}");
        }
    }

    #[test]
    fn group_is_set_by_agent_or_driver_according_to_the_policy() {
        use AccessMode::{ReadOnlyMany, ReadWriteOnce};
        let none = DriverCapabilities::default();
        let policy = |policy| CsiDriverSpec { fs_group_policy: Some(policy), ..CsiDriverSpec::default() };
        let mut volume = wanted("u", "h");
        volume.fs_group = Some(7);
        // The default: only with a type of file system, and for one node.
        let default = CsiDriverSpec::default();
        assert_eq!(volume.group_to_set(&default, none), None);
        volume.source.fs_type = Some("ext4".to_owned());
        assert_eq!(volume.group_to_set(&default, none), Some(7));
        volume.access_modes = vec![ReadOnlyMany];
        assert_eq!(volume.group_to_set(&default, none), None);
        assert_eq!(volume.group_to_set(&policy(FsGroupPolicy::File), none), Some(7));
        volume.access_modes = vec![ReadWriteOnce];
        assert_eq!(volume.group_to_set(&policy(FsGroupPolicy::None), none), None);
        let able = DriverCapabilities { mount_group: true, ..none };
        assert_eq!(volume.group_to_set(&default, able), None);
        assert_eq!(volume.volume_capability(able, "").mount_group, Some(7));
        assert_eq!(volume.volume_capability(none, "").mount_group, None);
        volume.read_only = true;
        assert_eq!(volume.group_to_set(&policy(FsGroupPolicy::File), none), None);
    }

    #[test]
    fn pod_is_described_only_to_drivers_that_want_it() {
        let mut volume = wanted("u", "h");
        volume.source.volume_attributes.insert("a".to_owned(), "b".to_owned());
        let mut driver = CsiDriverSpec::default();
        assert_eq!(volume.context(&driver).len(), 1);
        driver.pod_info_on_mount = Some(true);
        let context = volume.context(&driver);
        let get = |key: &str| context.get(&format!("csi.storage.k8s.io/{key}")).map(String::as_str);
        assert_eq!(get("pod.name"), Some("u-name"));
        assert_eq!(get("pod.namespace"), Some("n"));
        assert_eq!(get("pod.uid"), Some("u"));
        assert_eq!(get("serviceAccount.name"), Some("default"));
        assert_eq!(get("ephemeral"), Some("false"));
        assert_eq!(context.len(), 6);
    }

    #[test]
    fn life_cycle_must_be_one_of_the_driver() {
        let mut volume = wanted("u", "h");
        let mut driver = CsiDriverSpec::default();
        assert!(volume.check_lifecycle(&driver).is_ok());
        volume.lifecycle = Lifecycle::Ephemeral;
        assert_eq!(
            volume.check_lifecycle(&driver).unwrap_err(),
            r#"volume mode "Ephemeral" not supported by driver d.example (only supports ["Persistent"])"#
        );
        driver.volume_lifecycle_modes = vec!["Persistent".to_owned(), "Ephemeral".to_owned()];
        assert!(volume.check_lifecycle(&driver).is_ok());
    }

    #[test]
    fn label_is_an_option_of_the_mount() {
        let volume = VolumeRequest { mount_options: vec!["noatime".to_owned()], ..wanted("u", "h") };
        let flags = |label: &str| volume.volume_capability(DriverCapabilities::default(), label).mount_flags;
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        assert_eq!(flags(label), ["noatime", r#"context="system_u:object_r:container_file_t:s0:c1,c2""#]);
        assert_eq!(flags(""), ["noatime"]);
        assert_eq!(volume.record(label, "n").selinux_context, label);
    }
}
