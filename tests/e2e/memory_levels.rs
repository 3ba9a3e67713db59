//! The kernel's notification of memory levels, in a cgroup of the test's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle::config::KubeletConfiguration;
use coracle::eviction::kernel::{Armed, KernelFiles, RemainingMemory, Signals};
use coracle::eviction::notify::Reading;
use coracle::eviction::thresholds;
use coracle::eviction::watch::WatchPlan;

use crate::support::cgroups::CgroupRoot;
use crate::support::node::LONG;
use crate::support::wait::wait_until;

/// Only the levels: stalls may be caused by other programs of the machine.
// Runtimes: containerd 1, containerd 2.
#[test]
fn kernel_signals_memory_use_above_the_level() {
    let root = CgroupRoot::make("evlevel");
    let below = root.path().trim_start_matches('/');
    let v1 = Path::new("/sys/fs/cgroup/memory").join(below);
    let is_v2 = !v1.exists();
    let cgroup = if is_v2 { Path::new("/sys/fs/cgroup").join(below) } else { v1 };
    let (memory, pods_path) = match is_v2 {
        true => (PathBuf::from("/sys/fs/cgroup"), Some(root.path().to_owned())),
        false => (cgroup.clone(), None),
    };
    let files = KernelFiles { memory, is_v2, stalls: PathBuf::from("/none") };
    let mut config = KubeletConfiguration::default();
    config.eviction_hard.insert("memory.available".to_owned(), "100Mi".to_owned());
    let thresholds = thresholds(&config, false).expect("thresholds");
    let mut signals = Signals::open(files, |kernel| WatchPlan::new(&thresholds, kernel));
    let machine = Some(Reading { usage: 0, headroom: 64 << 20 });
    // The cgroup of version 2 is new and uses nothing.
    let armed = signals.arm(&RemainingMemory { machine, pods: None, pods_usage: Some(0), pods_path });
    assert_eq!(armed, Armed::Set);
    let is_signaled = |signals: &Signals| {
        let descriptors = signals.descriptors();
        assert!(!descriptors.is_empty());
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds: Vec<_> = descriptors
            .iter()
            .map(|(fd, flags)| rustix::event::PollFd::from_borrowed_fd(*fd, *flags))
            .collect();
        rustix::event::poll(&mut fds, Some(&now)).expect("poll") > 0
    };
    assert!(!is_signaled(&signals), "nothing uses memory");
    let procs = cgroup.join("cgroup.procs").display().to_string();
    let script = format!("echo $$ >{procs}; dd if=/dev/zero bs=200M count=1 | sleep 100000");
    let mut eater = Command::new("setsid").args(["sh", "-c", &script]).spawn().expect("a shell");
    wait_until("the kernel to signal", LONG, || is_signaled(&signals));
    for pid in fs::read_to_string(&procs).unwrap_or_default().lines() {
        let _ = Command::new("kill").args(["-9", pid]).status();
    }
    let _ = eater.wait();
    drop(signals);
    drop(root);
}
