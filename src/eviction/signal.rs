//! The signals of thresholds, the resources that they stand for, and the node conditions that they
//! cause (Go: pkg/kubelet/eviction/api/types.go, helpers.go).

/// What a threshold compares. The order is the order in which signals of the same urgency are
/// handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    /// Memory of the node that is not in use, in bytes.
    MemoryAvailable,
    /// Memory that the cgroup of all pods may still use, in bytes. Only the agent makes thresholds
    /// of it.
    AllocatableMemoryAvailable,
    /// Bytes of the root directory's file system.
    NodeFsAvailable,
    /// Inodes of the root directory's file system.
    NodeFsInodesFree,
    /// Bytes of the file system with images.
    ImageFsAvailable,
    /// Inodes of the file system with images.
    ImageFsInodesFree,
    /// Bytes of the file system with writable layers.
    ContainerFsAvailable,
    /// Inodes of the file system with writable layers.
    ContainerFsInodesFree,
    /// Process ids.
    PidAvailable,
}

impl Signal {
    /// All signals.
    pub const ALL: [Signal; 9] = [
        Signal::MemoryAvailable,
        Signal::AllocatableMemoryAvailable,
        Signal::NodeFsAvailable,
        Signal::NodeFsInodesFree,
        Signal::ImageFsAvailable,
        Signal::ImageFsInodesFree,
        Signal::ContainerFsAvailable,
        Signal::ContainerFsInodesFree,
        Signal::PidAvailable,
    ];

    /// The name in the configuration and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Signal::MemoryAvailable => "memory.available",
            Signal::AllocatableMemoryAvailable => "allocatableMemory.available",
            Signal::NodeFsAvailable => "nodefs.available",
            Signal::NodeFsInodesFree => "nodefs.inodesFree",
            Signal::ImageFsAvailable => "imagefs.available",
            Signal::ImageFsInodesFree => "imagefs.inodesFree",
            Signal::ContainerFsAvailable => "containerfs.available",
            Signal::ContainerFsInodesFree => "containerfs.inodesFree",
            Signal::PidAvailable => "pid.available",
        }
    }

    /// The signal of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Signal> {
        Signal::ALL.into_iter().find(|signal| signal.as_str() == name)
    }

    /// The resource that is short.
    pub fn resource(self) -> Resource {
        match self {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => Resource::Memory,
            Signal::NodeFsAvailable | Signal::ImageFsAvailable | Signal::ContainerFsAvailable => {
                Resource::EphemeralStorage
            }
            Signal::NodeFsInodesFree | Signal::ImageFsInodesFree | Signal::ContainerFsInodesFree => {
                Resource::Inodes
            }
            Signal::PidAvailable => Resource::Pids,
        }
    }

    /// The condition of the node.
    pub fn pressure(self) -> Pressure {
        match self.resource() {
            Resource::Memory => Pressure::Memory,
            Resource::EphemeralStorage | Resource::Inodes => Pressure::Disk,
            Resource::Pids => Pressure::Pid,
        }
    }

    /// Whether it measures the file system with writable layers.
    pub fn is_container_fs(self) -> bool {
        matches!(self, Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree)
    }
}

/// A resource as messages and annotations name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Resource {
    Memory,
    EphemeralStorage,
    Inodes,
    Pids,
}

impl Resource {
    /// The name in texts, which for memory and local storage is also the name of the resource in
    /// pod specifications.
    pub fn as_str(self) -> &'static str {
        match self {
            Resource::Memory => "memory",
            Resource::EphemeralStorage => "ephemeral-storage",
            Resource::Inodes => "inodes",
            Resource::Pids => "pids",
        }
    }
}

/// A condition of the node. The order is the order in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum Pressure {
    Memory,
    Disk,
    Pid,
}

impl Pressure {
    /// All conditions.
    pub const ALL: [Pressure; 3] = [Pressure::Memory, Pressure::Disk, Pressure::Pid];

    /// The type of the condition.
    pub fn as_str(self) -> &'static str {
        match self {
            Pressure::Memory => "MemoryPressure",
            Pressure::Disk => "DiskPressure",
            Pressure::Pid => "PIDPressure",
        }
    }
}

/// The conditions that the node reports now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pressures {
    /// Memory is short.
    pub memory: bool,
    /// Disk space or inodes are short.
    pub disk: bool,
    /// Process ids are short.
    pub pid: bool,
}

impl Pressures {
    /// Whether this condition holds.
    #[must_use]
    pub fn has(self, pressure: Pressure) -> bool {
        match pressure {
            Pressure::Memory => self.memory,
            Pressure::Disk => self.disk,
            Pressure::Pid => self.pid,
        }
    }

    /// The conditions that hold, in the order of messages.
    pub fn held(self) -> impl Iterator<Item = Pressure> {
        Pressure::ALL.into_iter().filter(move |pressure| self.has(*pressure))
    }
}

impl FromIterator<Pressure> for Pressures {
    fn from_iter<I: IntoIterator<Item = Pressure>>(held: I) -> Self {
        let mut all = Pressures::default();
        for pressure in held {
            match pressure {
                Pressure::Memory => all.memory = true,
                Pressure::Disk => all.disk = true,
                Pressure::Pid => all.pid = true,
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signal_has_its_name_resource_and_condition() {
        for signal in Signal::ALL {
            assert_eq!(Signal::parse(signal.as_str()), Some(signal));
        }
        assert_eq!(Signal::parse("memory.free"), None);
        let texts = |signal: Signal| (signal.resource().as_str(), signal.pressure().as_str());
        assert_eq!(texts(Signal::AllocatableMemoryAvailable), ("memory", "MemoryPressure"));
        assert_eq!(texts(Signal::ImageFsAvailable), ("ephemeral-storage", "DiskPressure"));
        assert_eq!(texts(Signal::ContainerFsInodesFree), ("inodes", "DiskPressure"));
        assert_eq!(texts(Signal::PidAvailable), ("pids", "PIDPressure"));
    }

    #[test]
    fn pressures_list_what_holds() {
        let some: Pressures = [Pressure::Pid, Pressure::Memory].into_iter().collect();
        assert_eq!(some.held().collect::<Vec<_>>(), [Pressure::Memory, Pressure::Pid]);
        assert!(!some.has(Pressure::Disk));
    }
}
