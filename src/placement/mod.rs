//! Room `placement`: which CPUs, memory and NUMA nodes containers get (Go: pkg/kubelet/cm/cpumanager,
//! memorymanager, topologymanager).

pub mod cpu;
pub mod cpus;
pub mod machine;
pub mod memory;
pub mod numa_nodes;
pub mod topology;

pub use crate::model::{checksum, numa};
pub use crate::util::checkpoint_file;
