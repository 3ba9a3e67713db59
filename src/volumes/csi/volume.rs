//! CSI as a kind of volume of this room.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::attachment::{Attachments, Holder};
use super::super::error::VolumeError;
use super::super::kind::{Form, Place, Ready, VolumeKeeper, VolumeKind};
use super::super::operations::Operations;
use super::super::paths;
use super::cluster::Cluster;
use super::driver::{Abilities, Driver, Pairs};
use super::lost::Lost;
use super::measure::Measured;
use super::mounter::Mounter;
use super::names::{self, Layout};
use super::publish::Walk;
use super::rebuild::{self, Unread};
use super::record::{Look, Record};
use super::registry::Registry;
use super::request::Wanted;
use super::selinux::FileContext;
use super::turns::{Turn, Turns};
use super::users::Users;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::storage::CsiDriverSpec;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// The configuration of CSI volumes.
#[derive(Debug, Clone)]
pub struct CsiSettings {
    /// `--root-dir`, as drivers know it: links are not resolved.
    pub root_dir: PathBuf,
    /// The node's name, in the names of VolumeAttachments.
    pub node_name: String,
    /// The label of files of containers, on a node that uses SELinux.
    pub(crate) selinux: Option<FileContext>,
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
    pub(super) turns: Turns,
    /// Held for look-ups only.
    pub(super) lost: Arc<Mutex<Lost>>,
    /// The directories that could not be read. Held for look-ups only.
    pub(super) unread: Arc<Mutex<Unread>>,
    /// Held for look-ups only, never across a call or a system call.
    users: Mutex<Users>,
    /// Likewise.
    measured: Mutex<Measured>,
}

impl fmt::Debug for Csi {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Csi({})", self.settings.root_dir.display())
    }
}

/// One volume of one pod.
#[derive(Debug, Clone)]
pub struct CsiVolume {
    csi: Arc<Csi>,
    wanted: Wanted,
}

/// A driver and what is known of it, for one operation.
pub(super) struct At {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) spec: CsiDriverSpec,
    pub(super) abilities: Abilities,
    pub(super) publish_context: Pairs,
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
            turns: Turns::default(),
            lost: Arc::default(),
            unread: Arc::default(),
            users: Mutex::default(),
            measured: Mutex::default(),
        };
        let has_damaged = csi.read_disk().unwrap_or(true);
        if has_damaged || !csi.unread.locked().is_empty() || csi.lost().is_any() {
            let (layout, lost, unread) = (csi.layout.clone(), Arc::clone(&csi.lost), Arc::clone(&csi.unread));
            csi.attachments.keep_if(Box::new(move |name| {
                unread.locked().may_have(&layout, name)
                    || rebuild::is_staged(&layout, name)
                    || lost.locked().may_be(name)
            }));
        }
        csi
    }

    /// Finds what is on the disk, at the start, and later what could not be read then. Operations may run
    /// meanwhile: what is found is not there any more perhaps. Returns whether the record of a staged
    /// file system is damaged.
    pub(super) fn read_disk(&self) -> Result<bool, VolumeError> {
        let mut unread = Unread::default();
        let rebuild::All { readable, damaged } = rebuild::find_all(&self.settings.root_dir, &mut unread);
        let staged = rebuild::staged(&self.layout, &mut unread);
        let mut is_complete = true;
        for found in readable {
            if self.users().name_at(&found.place).is_some() {
                continue;
            }
            let name = names::unique_name(&found.driver, &found.handle);
            // An operation on it may hang, and all other volumes would wait for it.
            let Some(_turn) = self.turns.try_take(&name) else {
                is_complete = false;
                continue;
            };
            if rebuild::look(&self.layout, &found.place) != Look::Missing {
                self.users().add(&name, &found.place);
            }
        }
        for place in damaged {
            if self.users().name_at(&place).is_some() {
                continue;
            }
            self.users().unknown(place.clone());
            match rebuild::look(&self.layout, &place) {
                Look::Damaged(_) => {}
                Look::Missing => self.users().gone(&place),
                Look::Record(record) => {
                    let name = names::unique_name(&record.driver_name, &record.volume_handle);
                    self.users().add(&name, &place);
                }
            }
        }
        self.change(|users| {
            for (driver, handle) in &staged.readable {
                users.found(&names::unique_name(driver, handle));
            }
            users.hide(!is_complete || unread.hides_pods(&self.layout));
        });
        let all = self.users().all();
        self.lost().found(&staged.damaged_blocks, all);
        for spec_name in staged.damaged_blocks {
            let data = self.layout.block(&spec_name)?.join("data");
            match Record::read(&data) {
                Look::Damaged(_) => {}
                Look::Missing => self.lost().gone(&spec_name),
                Look::Record(record) => {
                    let name = names::unique_name(&record.driver_name, &record.volume_handle);
                    self.change(|users| users.found(&name));
                    self.lost().known(&name, Some(&spec_name));
                }
            }
        }
        // Last: until then each volume stays in use that may be there.
        if is_complete {
            self.unread.locked().replace(unread);
        }
        Ok(staged.has_damaged)
    }

    pub(super) fn users(&self) -> MutexGuard<'_, Users> {
        self.users.locked()
    }

    /// Changes the table, and with it the list of volumes in use.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Users) -> T) -> T {
        let mut users = self.users();
        let result = change(&mut users);
        // Under the lock, so that the last change is the last list.
        self.attachments.set(Holder::Csi, users.names());
        result
    }

    pub(super) fn measured(&self) -> MutexGuard<'_, Measured> {
        self.measured.locked()
    }

    /// What a pod uses, or what all pods use, also found on the disk after a start.
    #[must_use]
    pub fn places(&self, pod: Option<&PodUid>) -> Vec<Place> {
        self.users().places(pod)
    }

    /// The persistent volumes of pods on the disk: their names, and the pods.
    pub(crate) fn persistent(&self) -> Vec<(String, PodUid)> {
        let found = rebuild::find(&self.settings.root_dir).into_iter().filter(|found| found.is_persistent);
        found.map(|found| (found.place.spec_name, found.place.pod)).collect()
    }

    /// What a pod has on the disk, or what is known of it in memory.
    pub(crate) fn places_of(&self, pod: &PodUid) -> Vec<Place> {
        let mut places = rebuild::places_of(&self.layout, &self.settings.root_dir, pod);
        places.extend(self.users().places(Some(pod)));
        places.into_iter().collect()
    }

    /// Whether anything of a volume may be left on the node.
    pub(crate) fn has_volumes(&self) -> bool {
        let mut unread = Unread::default();
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
            users.name_at(&Place { pod: pod.clone(), spec_name: spec_name.to_owned(), form })
        })?;
        // `kubernetes.io/csi/<driver>^<handle>`
        let (plugin_and_driver, _) = name.split_once('^')?;
        plugin_and_driver.rsplit('/').next().map(str::to_owned)
    }

    /// The drivers.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// A volume of a pod.
    #[must_use]
    pub fn volume(self: &Arc<Csi>, wanted: Wanted) -> CsiVolume {
        CsiVolume { csi: Arc::clone(self), wanted }
    }

    /// Waits for the turn of a volume.
    pub(super) fn turn(&self, name: &str, stop: &StopToken) -> Result<Turn, VolumeError> {
        self.turns.take(name, stop).ok_or(VolumeError::Stopping)
    }

    /// The staging target of a volume.
    pub(super) fn staging_path(&self, form: Form, record: &Record) -> Result<PathBuf, VolumeError> {
        match form {
            Form::Filesystem => {
                let dir = self.layout.staged(&record.driver_name, &record.volume_handle)?;
                Ok(dir.join(names::GLOBAL_MOUNT))
            }
            Form::Block => self.layout.block_staging(&record.spec_name),
        }
    }

    /// The publish target of a block volume.
    pub(super) fn publish_path(&self, place: &Place) -> Result<PathBuf, VolumeError> {
        Ok(self.layout.block_publish(&place.spec_name)?.join(place.pod.as_str()))
    }
}

impl Csi {
    /// The name of a volume in its pod, once this process has set it up.
    pub(crate) fn name_in_pod(&self, place: &Place) -> Option<String> {
        self.users().pod_name(place).map(str::to_owned)
    }

    /// A path of [`Layout`], as the other parts of the room know it.
    pub(super) fn real(&self, path: &Path) -> PathBuf {
        paths::real(&self.settings.root_dir, path).1
    }
}

/// A path for a driver.
pub(super) fn text(path: &Path) -> Result<String, VolumeError> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| VolumeError::Name { name: path.display().to_string() })
}

impl CsiVolume {
    /// What a set-up does in the turn of the volume. Returns also what is left to do without it.
    pub(super) fn begin(&self, stop: &StopToken) -> Result<(Ready, Option<Walk>), VolumeError> {
        let _turn = self.csi.turn(&self.unique_name(), stop)?;
        match self.wanted.form {
            Form::Filesystem => self.csi.mount(&self.wanted, stop),
            Form::Block => Ok((self.csi.map(&self.wanted, stop)?, None)),
        }
    }

    /// The rest of the set-up. The pod's removal waits for its end; other pods do not.
    pub(super) fn finish(&self, walk: Option<Walk>) -> Result<(), VolumeError> {
        walk.map_or(Ok(()), |walk| self.csi.walk(&self.wanted, walk))
    }
}

impl VolumeKind for CsiVolume {
    fn unique_name(&self) -> String {
        self.wanted.unique_name()
    }

    fn requires_remount(&self) -> bool {
        self.csi.users().is_republished(&self.wanted.place())
    }

    fn set_up(&self, stop: &StopToken) -> Result<Ready, VolumeError> {
        let (ready, walk) = self.begin(stop)?;
        self.finish(walk)?;
        Ok(ready)
    }

    fn expand(&self, bytes: i64, stop: &StopToken) -> Result<Option<i64>, VolumeError> {
        let _turn = self.csi.turn(&self.unique_name(), stop)?;
        self.csi.grow(&self.wanted, bytes, stop)
    }
}

impl VolumeKeeper for Csi {
    fn directory(&self) -> &'static str {
        names::DIRECTORY
    }

    fn tear_down(&self, place: &Place, stop: &StopToken) -> Result<(), VolumeError> {
        self.measured().forget(place);
        match place.form {
            Form::Filesystem => self.unmount(place, stop),
            Form::Block => self.unmap(place, stop),
        }
    }

    fn release_unused(&self, stop: &StopToken) -> Result<(), VolumeError> {
        self.release_all(stop)
    }
}
