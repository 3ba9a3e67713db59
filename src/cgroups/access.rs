//! The cgroups of this agent on the machine: made, read, changed, removed, listed.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::param::page_size;

use super::dir::{Dir, text};
use super::error::CgroupError;
use super::files::{self, PERIOD, QUOTA, Write};
use super::names::{Driver, Layout, Name};
use super::reap::{self, Removal};
use super::sent::SentValues;
use super::systemd::Systemd;
use super::units;
use super::values::Values;
use super::{v1, v2};
use crate::model::ids::PodUid;
use crate::model::metrics::CGROUP_OPERATIONS;
use crate::model::pod::QosClass;
use crate::util::cgroup_mounts::{Hierarchy, MountError, Mounts, Version};
use crate::util::stop::StopToken;

/// The cgroups of this agent. Clones are cheap; operations on different cgroups may run at the same
/// time. All block for as long as the kernel or systemd does.
#[derive(Debug, Clone)]
pub struct Cgroups {
    layout: Layout,
    mounts: Mounts,
    /// Sizes of huge pages in bytes.
    page_sizes: Vec<u64>,
    /// D-Bus address of the system's bus; used with the driver of systemd only.
    bus: String,
    sent: SentValues,
}

/// What an operation wrote.
#[derive(Debug, Default)]
pub struct CgroupWrites {
    /// Whether the cgroup was made, in at least one hierarchy.
    pub made: bool,
    /// Files that were written; those that had their value already are not.
    pub written: Vec<String>,
    /// Files that could not be written. The others were.
    pub failed: Vec<CgroupError>,
}

impl CgroupWrites {
    /// The first failure, as an error.
    ///
    /// # Errors
    /// When a file could not be written.
    pub fn into_result(self) -> Result<CgroupWrites, CgroupError> {
        let CgroupWrites { made, written, failed } = self;
        match failed.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(CgroupWrites { made, written, failed: Vec::new() }),
        }
    }
}

/// A cgroup that has the form of a pod's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodCgroup {
    /// The UID in its name.
    pub uid: PodUid,
    /// The tier in which it is.
    pub class: QosClass,
    directory: String,
}

/// Counts the duration of an operation, also of one that fails.
struct Timer {
    operation: &'static str,
    begun: Instant,
}

impl Timer {
    fn start(operation: &'static str) -> Timer {
        Timer { operation, begun: Instant::now() }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        CGROUP_OPERATIONS.observe_duration([self.operation], self.begun.elapsed());
    }
}

impl Cgroups {
    /// From the text of `/proc/self/mountinfo` and the path of the cgroups, usually
    /// `/sys/fs/cgroup`. `page_sizes`: those of the machine's huge pages in bytes.
    ///
    /// # Errors
    /// When no cgroups are mounted, or controllers are missing.
    pub fn new(
        layout: Layout,
        mountinfo: &str,
        root: &Path,
        page_sizes: Vec<u64>,
        bus: &str,
    ) -> Result<Cgroups, CgroupError> {
        let mounts = Mounts::parse(mountinfo, root)?;
        mounts.check()?;
        Ok(Cgroups { layout, mounts, page_sizes, bus: bus.to_owned(), sent: SentValues::default() })
    }

    #[cfg(test)]
    pub(super) fn with_mounts(layout: Layout, mounts: Mounts, page_sizes: Vec<u64>, bus: &str) -> Cgroups {
        Cgroups { layout, mounts, page_sizes, bus: bus.to_owned(), sent: SentValues::default() }
    }

    #[cfg(test)]
    pub(super) fn with_bus(self, bus: &str) -> Cgroups {
        Cgroups { bus: bus.to_owned(), ..self }
    }

    #[cfg(test)]
    pub(super) fn clone_mounts(&self) -> Mounts {
        self.mounts.clone()
    }

    /// The names of these cgroups, and the driver that makes them.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The version of the hierarchies that are mounted.
    #[must_use]
    pub fn version(&self) -> Version {
        self.mounts.version
    }

    /// Checks that `cgroupRoot` exists. It is a path of directories with both drivers (Go:
    /// `NewContainerManager`).
    ///
    /// # Errors
    /// When it does not exist, or not in all hierarchies.
    pub fn check_root(&self) -> Result<(), CgroupError> {
        self.check_directories(self.layout.root(), &self.layout.root().directories(Driver::Cgroupfs))
    }

    /// Whether a cgroup exists, in the sense of [`Cgroups::check`].
    pub fn exists(&self, name: &Name) -> bool {
        self.check(name).is_ok()
    }

    /// Checks that a cgroup exists: with version 1 in all hierarchies in which it has to be, with
    /// version 2 with all controllers that it has to have.
    ///
    /// # Errors
    /// [`CgroupError::Missing`] if it does not.
    pub fn check(&self, name: &Name) -> Result<(), CgroupError> {
        self.check_directories(name, &name.directories(self.layout.driver()))
    }

    fn check_directories(&self, name: &Name, directories: &[String]) -> Result<(), CgroupError> {
        let (missing, what) = match self.mounts.version {
            Version::V1 => (v1::missing_hierarchies(&self.mounts, directories)?, "paths"),
            Version::V2 => (v2::missing(self.mount()?, directories)?, "controllers"),
        };
        if missing.is_empty() {
            return Ok(());
        }
        Err(CgroupError::Missing { name: name.to_string(), what, missing })
    }

    /// Makes a cgroup of this agent and sets its values. One that exists, also in a part of the
    /// hierarchies only, is completed and gets the values. As upstream, it is made even if a value
    /// cannot be set ([`CgroupWrites::failed`]).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make(&self, name: &Name, values: &Values, stop: &StopToken) -> Result<CgroupWrites, CgroupError> {
        self.check_own(name)?;
        let _timer = Timer::start("create");
        let mut systemd = self.systemd(stop)?;
        if let Some(systemd) = &mut systemd {
            self.sent.forget(&name.slice());
            systemd.start(&name.slice(), &units::new_slice_properties(name, self.mounts.version))?;
        }
        let directories = name.directories(self.layout.driver());
        let made = match self.mounts.version {
            Version::V1 => v1::make(&self.mounts, &directories)?,
            Version::V2 => v2::make(self.mount()?, &directories, self.layout.root().parts().len())?,
        };
        let set = match self.set(name, values, systemd.as_mut()) {
            Ok(set) => set,
            Err(error) => CgroupWrites { failed: vec![error], ..CgroupWrites::default() },
        };
        Ok(CgroupWrites { made, ..set })
    }

    /// Changes values of a cgroup of this agent.
    ///
    /// # Errors
    /// When the cgroup is not one of this agent's, or systemd refuses.
    pub fn update(
        &self,
        name: &Name,
        values: &Values,
        stop: &StopToken,
    ) -> Result<CgroupWrites, CgroupError> {
        self.check_own(name)?;
        let _timer = Timer::start("update");
        self.change(name, values, stop)
    }

    /// Changes values of an existing cgroup that the configuration names, of daemons. It is neither
    /// made nor removed.
    ///
    /// # Errors
    /// When it does not exist, or a value cannot be set.
    pub fn limit_daemons(&self, cgroup: &str, values: &Values, stop: &StopToken) -> Result<(), CgroupError> {
        let name = Name::parse_literal(cgroup, self.layout.driver())?;
        self.check(&name)?;
        let _timer = Timer::start("update");
        self.change(&name, values, stop)?.into_result().map(drop)
    }

    /// The values that a cgroup has; of files that cannot be read there are none.
    #[must_use]
    pub fn read(&self, name: &Name) -> Values {
        let directories = name.directories(self.layout.driver());
        files::read(self.mounts.version, |controller, file| {
            self.open(self.mounts.hierarchy(controller)?, &directories).ok()??.read(file).ok()?
        })
    }

    /// The text of a file of a cgroup; `None`: it cannot be read.
    #[must_use]
    pub fn read_file(&self, name: &Name, controller: &str, file: &str) -> Option<String> {
        let directories = name.directories(self.layout.driver());
        self.open(self.mounts.hierarchy(controller)?, &directories).ok()??.read(file).ok()?
    }

    /// The bytes of memory that a cgroup uses.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn memory_usage(&self, name: &Name) -> Result<u64, CgroupError> {
        let file = match self.mounts.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        let path = format!("{}/{file}", self.layout.path(name));
        let read = |hierarchy: &Hierarchy| -> io::Result<Option<String>> {
            match self.open(hierarchy, &name.directories(self.layout.driver()))? {
                Some(dir) => dir.read(file),
                None => Ok(None),
            }
        };
        let text = self.mounts.hierarchy("memory").map_or(Ok(None), read);
        let text = text.map_err(|source| CgroupError::io("read", &path, source))?;
        text.and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| CgroupError::io("read", path, io::ErrorKind::NotFound))
    }

    /// Removes a pod's cgroup with all cgroups and processes in it, from all hierarchies. It is no
    /// error if it does not exist.
    ///
    /// # Errors
    /// When it is not a pod's cgroup of this agent, or something is left. Try again later.
    pub fn remove_pod(&self, name: &Name, stop: &StopToken) -> Result<(), CgroupError> {
        let parent = name.parent();
        let tiers = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
        let is_tier = tiers.iter().any(|class| *name == self.layout.tier(*class));
        if is_tier || !tiers.iter().any(|class| parent == self.layout.tier(*class)) {
            return Err(CgroupError::Foreign(name.to_string()));
        }
        let directories = name.directories(self.layout.driver());
        let unit = (self.layout.driver() == Driver::Systemd).then(|| name.slice());
        self.remove(&directories, unit.as_deref(), stop)
    }

    /// Removes a cgroup that [`Cgroups::list_pods`] has listed.
    ///
    /// # Errors
    /// When something is left. Try again later.
    pub fn remove_listed(&self, listed: &PodCgroup, stop: &StopToken) -> Result<(), CgroupError> {
        let tier = self.layout.tier(listed.class);
        let mut directories = tier.directories(self.layout.driver());
        directories.push(listed.directory.clone());
        // Only a slice of this tier is a unit that this agent made.
        let prefix = format!("{}-", tier.slice().trim_end_matches(".slice"));
        let is_unit = listed.directory.starts_with(&prefix) && listed.directory.ends_with(".slice");
        let unit =
            Some(listed.directory.as_str()).filter(|_| self.layout.driver() == Driver::Systemd && is_unit);
        self.remove(&directories, unit, stop)
    }

    /// Changes values of a cgroup that [`Cgroups::list_pods`] has listed.
    ///
    /// # Errors
    /// When a value cannot be set.
    pub fn update_listed(
        &self,
        listed: &PodCgroup,
        values: &Values,
        stop: &StopToken,
    ) -> Result<(), CgroupError> {
        let name = self.layout.pod(&listed.uid, listed.class)?;
        self.update(&name, values, stop)?.into_result().map(drop)
    }

    fn remove(
        &self,
        directories: &[String],
        unit: Option<&str>,
        stop: &StopToken,
    ) -> Result<(), CgroupError> {
        let Some((name, above)) = directories.split_last() else { return Ok(()) };
        let _timer = Timer::start("destroy");
        let mut removals = Vec::new();
        for hierarchy in &self.mounts.hierarchies {
            let path = format!("{}/{}", hierarchy.mount.display(), directories.join("/"));
            let failed = |source| CgroupError::io("remove", &path, source);
            if let Some(parent) = self.open(hierarchy, above).map_err(failed)? {
                let name = text(name).map_err(failed)?;
                removals.push(Removal { parent, name, path });
            }
        }
        // DIFFERS: the Go kubelet kills the processes and then tells systemd to stop the slice, and
        // does not remove the directories if systemd does not. Here they are removed anyway.
        let stopped = match unit {
            Some(unit) => {
                self.sent.forget(unit);
                Systemd::connect(&self.bus, stop).and_then(|mut systemd| systemd.stop(unit))
            }
            None => Ok(()),
        };
        reap::destroy(&removals, stop)?;
        stopped
    }

    /// All cgroups that have the form of a pod's, in at least one hierarchy.
    ///
    /// # Errors
    /// When a tier cannot be read.
    pub fn list_pods(&self) -> Result<Vec<PodCgroup>, CgroupError> {
        let mut found = BTreeSet::new();
        for hierarchy in &self.mounts.hierarchies {
            for class in [QosClass::BestEffort, QosClass::Burstable, QosClass::Guaranteed] {
                let tier = self.layout.tier(class);
                let path = || format!("{}{}", hierarchy.mount.display(), self.layout.path(&tier));
                let list = || -> io::Result<Vec<std::ffi::CString>> {
                    match self.open(hierarchy, &tier.directories(self.layout.driver()))? {
                        Some(dir) => dir.children(),
                        None => Ok(Vec::new()),
                    }
                };
                for name in list().map_err(|source| CgroupError::io("list", path(), source))? {
                    let Ok(directory) = name.into_string() else { continue };
                    if let Some(uid) = self.layout.pod_of(&directory) {
                        found.insert(PodCgroup { uid, class, directory });
                    }
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    /// The cgroup of all pods, and those below it, are this agent's.
    fn check_own(&self, name: &Name) -> Result<(), CgroupError> {
        if name.is_within(self.layout.pods()) { Ok(()) } else { Err(CgroupError::Foreign(name.to_string())) }
    }

    fn mount(&self) -> Result<&PathBuf, CgroupError> {
        let first = self.mounts.hierarchies.first().map(|hierarchy| &hierarchy.mount);
        first.ok_or_else(|| MountError("no cgroups are mounted".to_owned()).into())
    }

    fn open(&self, hierarchy: &Hierarchy, directories: &[String]) -> io::Result<Option<Dir>> {
        Dir::open(&hierarchy.mount)?.find(directories)
    }

    /// A connection to systemd, if it is the driver.
    fn systemd(&self, stop: &StopToken) -> Result<Option<Systemd>, CgroupError> {
        match self.layout.driver() {
            Driver::Cgroupfs => Ok(None),
            Driver::Systemd => Systemd::connect(&self.bus, stop).map(Some),
        }
    }

    /// Sets values of a cgroup that exists. No request is sent if nothing has changed.
    fn change(&self, name: &Name, values: &Values, stop: &StopToken) -> Result<CgroupWrites, CgroupError> {
        if self.layout.driver() == Driver::Systemd && self.has_values(name, values) {
            return Ok(CgroupWrites::default());
        }
        self.set(name, values, self.systemd(stop)?.as_mut())
    }

    /// Whether systemd has received these values, and the files have them. If a file has another
    /// one, systemd may have lost the unit.
    fn has_values(&self, name: &Name, values: &Values) -> bool {
        let Some(rounded) = self.sent.rounded(&name.slice(), values) else { return false };
        let directories = name.directories(self.layout.driver());
        let is_written = |write: &Write| match self.find_file(&directories, write) {
            Ok(found) => found.is_same,
            Err(error) => write.optional && error.is_missing(),
        };
        files::writes(&rounded, self.mounts.version, self.page_sizes()).iter().all(is_written)
    }

    /// Sets values: with systemd as properties of the unit first.
    fn set(
        &self,
        name: &Name,
        values: &Values,
        systemd: Option<&mut Systemd>,
    ) -> Result<CgroupWrites, CgroupError> {
        let Some(systemd) = systemd else { return Ok(self.write(name, values)) };
        let version = systemd.version()?;
        let (properties, rounded) = units::properties(values, self.mounts.version, version);
        self.sent.forget(&name.slice());
        systemd.set(&name.slice(), &properties)?;
        self.sent.accepted(name.slice(), values, &rounded);
        Ok(self.write(name, &rounded))
    }

    /// Writes the files that have another value.
    fn write(&self, name: &Name, values: &Values) -> CgroupWrites {
        let directories = name.directories(self.layout.driver());
        let mut changes = CgroupWrites::default();
        let mut later: Option<Write> = None;
        for write in files::writes(values, self.mounts.version, self.page_sizes()) {
            match self.write_file(&directories, &write) {
                Ok(true) => changes.written.push(write.file.clone()),
                Ok(false) => {}
                // The kernel refuses a period with which the old quota is too large: the quota is
                // written first then.
                Err(CgroupError::Io { source, .. })
                    if write.file == PERIOD && source.kind() == io::ErrorKind::InvalidInput =>
                {
                    later = Some(write);
                    continue;
                }
                Err(error) if write.optional && error.is_missing() => {}
                Err(error) => changes.failed.push(error),
            }
            if write.file == QUOTA
                && let Some(period) = later.take()
            {
                match self.write_file(&directories, &period) {
                    Ok(_) => changes.written.push(period.file),
                    Err(error) => changes.failed.push(error),
                }
            }
        }
        changes
    }

    /// The sizes that the kernel limits.
    fn page_sizes(&self) -> &[u64] {
        if self.limits_huge_pages() { &self.page_sizes } else { &[] }
    }

    /// With version 2 the files show whether the kernel does.
    fn limits_huge_pages(&self) -> bool {
        let v2 = || {
            let root = Dir::open(self.mount().ok()?).ok()?;
            root.read("cgroup.controllers").ok()?
        };
        match self.mounts.version {
            Version::V1 => self.mounts.hierarchy("hugetlb").is_some(),
            Version::V2 => v2().is_some_and(|all| all.split_whitespace().any(|name| name == "hugetlb")),
        }
    }

    /// Writes a file unless it has the value. Returns whether it was written.
    fn write_file(&self, directories: &[String], write: &Write) -> Result<bool, CgroupError> {
        let CgroupFile { dir, path, is_same } = self.find_file(directories, write)?;
        if !is_same {
            dir.write(&write.file, &write.text).map_err(|source| CgroupError::io("write", path, source))?;
        }
        Ok(!is_same)
    }

    fn find_file(&self, directories: &[String], write: &Write) -> Result<CgroupFile, CgroupError> {
        let Write { controller, file, text, .. } = write;
        let Some(hierarchy) = self.mounts.hierarchy(controller) else {
            return Err(CgroupError::Controller { controller, file: file.clone() });
        };
        let path = format!("{}/{}/{file}", hierarchy.mount.display(), directories.join("/"));
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let dir = self.open(hierarchy, directories).and_then(|dir| dir.ok_or_else(missing));
        let dir = dir.map_err(|source| CgroupError::io("open", &path, source))?;
        let current = dir.read(file).and_then(|text| text.ok_or_else(missing));
        // A file that cannot be read may still be written.
        let current = match current {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CgroupError::io("write", path, error));
            }
            current => current.unwrap_or_default(),
        };
        Ok(CgroupFile { is_same: files::is_same(file, &current, text, page_bytes()), dir, path })
    }
}

/// The bytes of a page of memory of the machine.
fn page_bytes() -> u64 {
    u64::try_from(page_size()).unwrap_or(4096)
}

struct CgroupFile {
    dir: Dir,
    path: String,
    /// Whether it has the value.
    is_same: bool,
}
