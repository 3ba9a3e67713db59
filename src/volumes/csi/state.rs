//! What is known of the CSI volumes of this node. The operations on volumes share it; no driver is called
//! here.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::super::attachment::{Attachments, Holder};
use super::super::error::VolumeError;
use super::super::kind::{Form, VolumeLocation};
use super::super::operations::Operations;
use super::super::selinux_labels::SelinuxLabels;
use super::cluster::Cluster;
use super::damaged::DamagedBlocks;
use super::key_mutex::{KeyGuard, KeyMutex};
use super::measured::{MeasuredVolume, Measurements};
use super::mounter::Mounter;
use super::names::{self, GLOBAL_MOUNT, Layout, TARGET};
use super::rebuild::{self, PodVolumes, UnreadableDirs};
use super::record::{Record, RecordFile};
use super::registry::Registry;
use super::users::Users;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// The configuration of CSI volumes.
#[derive(Debug, Clone)]
pub struct CsiSettings {
    /// `--root-dir`, as drivers know it: links are not resolved.
    pub root_dir: PathBuf,
    /// The node's name, in the names of VolumeAttachments.
    pub node_name: String,
    /// The SELinux labels of all volumes of the node.
    pub(crate) selinux: SelinuxLabels,
    /// The sink of events about walks that take long.
    pub events: EventSink,
    /// The running operations, which know what ends a walk.
    pub(crate) operations: Operations,
}

/// All CSI volumes of the node.
pub struct Csi {
    pub(super) settings: CsiSettings,
    pub(super) layout: Layout,
    pub(super) registry: Arc<Registry>,
    pub(super) cluster: Arc<dyn Cluster>,
    pub(super) mounter: Arc<dyn Mounter>,
    pub(super) attachments: Arc<Attachments>,
    /// One operation per volume at a time.
    pub(super) locks: KeyMutex,
    /// Held for look-ups only.
    damaged: Arc<Mutex<DamagedBlocks>>,
    /// The directories that could not be read. Held for look-ups only.
    pub(super) unread: Arc<Mutex<UnreadableDirs>>,
    /// Held for look-ups only, never across a call or a system call.
    users: Mutex<Users>,
    /// Likewise.
    measured: Mutex<Measurements>,
}

impl fmt::Debug for Csi {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Csi({})", self.settings.root_dir.display())
    }
}

impl Csi {
    /// Finds the volumes on the disk. No driver is called yet.
    #[must_use]
    pub(crate) fn new(
        settings: CsiSettings,
        registry: Arc<Registry>,
        cluster: Arc<dyn Cluster>,
        mounter: Arc<dyn Mounter>,
        attachments: Arc<Attachments>,
    ) -> Csi {
        let layout = Layout::new(&settings.root_dir);
        let csi = Csi {
            settings,
            layout,
            registry,
            cluster,
            mounter,
            attachments,
            locks: KeyMutex::default(),
            damaged: Arc::default(),
            unread: Arc::default(),
            users: Mutex::default(),
            measured: Mutex::default(),
        };
        let has_damaged = csi.read_disk().unwrap_or(true);
        if has_damaged || !csi.unread.locked().is_empty() || csi.damaged().is_any() {
            let (layout, damaged) = (csi.layout.clone(), Arc::clone(&csi.damaged));
            let unread = Arc::clone(&csi.unread);
            csi.attachments.keep_if(Arc::new(move |name| {
                unread.locked().may_have(&layout, name)
                    || rebuild::is_staged(&layout, name)
                    || damaged.locked().may_be(name)
            }));
        }
        csi
    }

    /// Finds what is on the disk, at the start, and later what could not be read then. Operations may run
    /// meanwhile: what is found is not there any more perhaps. Returns whether the record of a staged
    /// file system is damaged.
    pub(super) fn read_disk(&self) -> Result<bool, VolumeError> {
        let mut unread = UnreadableDirs::default();
        let PodVolumes { readable, damaged } = rebuild::find_all(&self.settings.root_dir, &mut unread);
        let staged = rebuild::staged(&self.layout, &mut unread);
        let mut is_complete = true;
        for volume in readable {
            if self.users().name_at(&volume.location).is_some() {
                continue;
            }
            let name = volume.unique_name;
            // An operation on it may hang, and all other volumes would wait for it.
            let Some(_guard) = self.locks.try_lock(&name) else {
                is_complete = false;
                continue;
            };
            match rebuild::record_of(&self.layout, &volume.location) {
                RecordFile::Missing => {}
                found => {
                    if let RecordFile::Readable(record) = &found {
                        self.restore_label(record, &volume.location);
                    }
                    self.users().add(&name, &volume.location);
                }
            }
        }
        for location in damaged {
            if self.users().name_at(&location).is_some() {
                continue;
            }
            self.users().add_unknown(location.clone());
            match rebuild::record_of(&self.layout, &location) {
                RecordFile::Damaged(_) => {}
                RecordFile::Missing => self.users().remove_unknown(&location),
                RecordFile::Readable(record) => {
                    self.restore_label(&record, &location);
                    self.users().add(&record.unique_name(), &location);
                }
            }
        }
        self.change(|users| {
            for name in &staged.readable {
                users.add_found(name);
            }
            users.set_hidden(!is_complete || unread.hides_pods(&self.layout));
        });
        let all = self.users().all();
        self.damaged().add(&staged.damaged_blocks, all);
        for spec_name in staged.damaged_blocks {
            let data = self.layout.block_paths(&spec_name)?.data;
            match Record::read(&data) {
                RecordFile::Damaged(_) => {}
                RecordFile::Missing => self.damaged().remove(&spec_name),
                RecordFile::Readable(record) => {
                    let name = record.unique_name();
                    self.change(|users| users.add_found(&name));
                    self.damaged().set_known(&name, Some(&spec_name));
                }
            }
        }
        // Last: until then each volume stays in use that may be there.
        if is_complete {
            self.unread.locked().replace(unread);
        }
        Ok(staged.has_damaged)
    }

    /// The pod has the volume with the label of its record, unless nothing of the volume is mounted, as after a
    /// reboot: then the record says only how it was mounted before, perhaps by an earlier release.
    fn restore_label(&self, record: &Record, location: &VolumeLocation) {
        let labels = &self.settings.selinux;
        if !labels.is_enabled() || location.form != Form::Filesystem {
            return;
        }
        let staged = self.layout.staged(&record.driver_name, &record.volume_handle);
        let targets = [
            self.layout.of_pod(location).map(|dir| dir.join(TARGET)),
            staged.map(|dir| dir.join(GLOBAL_MOUNT)),
        ];
        if targets.into_iter().flatten().any(|target| self.mounter.is_mount_point(&target).unwrap_or(true)) {
            labels.restore(&record.unique_name(), &location.pod, &record.selinux_context);
            self.users().set_published(location);
        }
    }

    pub(super) fn users(&self) -> MutexGuard<'_, Users> {
        self.users.locked()
    }

    pub(super) fn damaged(&self) -> MutexGuard<'_, DamagedBlocks> {
        self.damaged.locked()
    }

    /// Changes the table, and with it the list of volumes in use.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Users) -> T) -> T {
        let mut users = self.users();
        let result = change(&mut users);
        // Under the lock, so that the last change is the last list.
        self.attachments.set(Holder::Csi, users.names());
        result
    }

    pub(super) fn measured(&self) -> MutexGuard<'_, Measurements> {
        self.measured.locked()
    }

    /// The persistent volumes of pods on the disk: their names, and the pods.
    pub(crate) fn persistent(&self) -> Vec<(String, PodUid)> {
        let volumes = rebuild::find_all(&self.settings.root_dir, &mut UnreadableDirs::default()).readable;
        let volumes = volumes.into_iter().filter(|volume| volume.is_persistent);
        volumes.map(|volume| (volume.location.spec_name, volume.location.pod)).collect()
    }

    /// What a pod has on the disk, or what is known of it in memory.
    pub(crate) fn locations_of(&self, pod: &PodUid) -> Vec<VolumeLocation> {
        let mut locations = rebuild::locations_of(&self.layout, &self.settings.root_dir, pod);
        locations.extend(self.users().locations(Some(pod)));
        locations.into_iter().collect()
    }

    /// Whether anything of a volume may be left on the node.
    pub(crate) fn has_volumes(&self) -> bool {
        let mut unread = UnreadableDirs::default();
        !rebuild::staged_dirs(&self.layout, &mut unread).is_empty()
            || !rebuild::block_volumes(&self.layout, &mut unread).is_empty()
            || !unread.is_empty()
            || !self.unread.locked().is_empty()
            || !self.users().unused().is_empty()
    }

    /// The driver of a volume that a pod uses, by the name of the volume's directory.
    pub(crate) fn driver_at(&self, pod: &PodUid, spec_name: &str) -> Option<String> {
        let users = self.users();
        let name = [Form::Filesystem, Form::Block].into_iter().find_map(|form| {
            users.name_at(&VolumeLocation { pod: pod.clone(), spec_name: spec_name.to_owned(), form })
        })?;
        names::parts(&name).map(|(driver, _)| driver.to_owned())
    }

    /// The volumes of a pod that this process has set up, with the last numbers of their drivers.
    #[must_use]
    pub fn measured_volumes(&self, pod: &PodUid) -> Vec<MeasuredVolume> {
        let volumes = self.users().of_pod(pod);
        let (measured, now) = (self.measured(), Instant::now());
        let with_stats = |(location, volume): (VolumeLocation, String)| MeasuredVolume {
            volume,
            is_block: location.form == Form::Block,
            stats: measured.get(&location, now),
        };
        volumes.into_iter().map(with_stats).collect()
    }

    /// The drivers.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Waits for the lock of a volume.
    pub(super) fn lock(&self, name: &str, stop: &StopToken) -> Result<KeyGuard, VolumeError> {
        self.locks.lock(name, stop).ok_or(VolumeError::Stopping)
    }

    /// The name of a volume in its pod, once this process has set it up.
    pub(crate) fn name_in_pod(&self, location: &VolumeLocation) -> Option<String> {
        self.users().pod_name(location).map(str::to_owned)
    }
}
