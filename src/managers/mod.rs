//! Room `managers`: which CPUs, memory and NUMA nodes containers get (Go: pkg/kubelet/cm/cpumanager,
//! memorymanager, topologymanager).

pub mod checkpoint_file;
pub mod checksum;
pub mod cpu;
pub mod cpus;
pub mod machine;
pub mod memory;
pub mod numa;
pub mod numa_nodes;
pub mod topology;
