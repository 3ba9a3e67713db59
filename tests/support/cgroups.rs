//! The cgroups of a node under test: `cgroupRoot` is a directory of its own in each hierarchy. The
//! machine's `kubepods` may belong to another kubelet.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::launch::make_cgroup;
use super::wait::wait_until;

/// A `cgroupRoot`, removed with everything in it when it is dropped.
pub(crate) struct CgroupRoot(String);

impl CgroupRoot {
    /// Makes `/coracle-<namespace>-<process id>-<name>` in each hierarchy. Test programs that run at the
    /// same time often have the same process ID, each in a namespace of its own.
    pub(crate) fn make(name: &str) -> CgroupRoot {
        let namespace = fs::read_link("/proc/self/ns/pid").expect("the namespace of processes");
        let namespace = namespace.to_string_lossy().replace(|digit: char| !digit.is_ascii_digit(), "");
        let path = format!("/coracle-{namespace}-{}-{name}", std::process::id());
        for top in tops() {
            let dir = top.join(path.trim_start_matches('/'));
            make_cgroup(&dir);
            copy_cpus(&top, &dir);
        }
        CgroupRoot(path)
    }

    /// The value of `cgroupRoot`.
    pub(crate) fn path(&self) -> &str {
        &self.0
    }

    /// Makes a cgroup in each hierarchy; processes can run in it.
    pub(crate) fn make_child(&self, cgroup: &str) -> Vec<PathBuf> {
        let make = |top: PathBuf| {
            let mut dir = top.join(self.0.trim_start_matches('/'));
            for part in cgroup.split('/') {
                let parent = dir.clone();
                dir.push(part);
                fs::create_dir_all(&dir).expect("a cgroup can be made");
                copy_cpus(&parent, &dir);
            }
            dir
        };
        tops().into_iter().map(make).collect()
    }

    /// Removes a cgroup with those in it.
    pub(crate) fn remove_child(&self, cgroup: &str) {
        for top in tops() {
            remove(&top.join(self.0.trim_start_matches('/')).join(cgroup));
        }
    }

    /// Removes all cgroups below it, as the end of the machine does. Their processes have ended, or are
    /// ending.
    pub(crate) fn clear(&self) {
        wait_until("no cgroups", Duration::from_secs(60), || {
            for top in tops() {
                let root = top.join(self.0.trim_start_matches('/'));
                let entries = fs::read_dir(root).into_iter().flatten().flatten();
                let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
                entries.filter(is_directory).for_each(|entry| remove(&entry.path()));
            }
            self.tree().is_empty()
        });
    }

    /// All cgroups below it, by their path from it: each with the hierarchies that have it.
    pub(crate) fn tree(&self) -> BTreeMap<String, Vec<String>> {
        fn walk(top: &Path, dir: &Path, hierarchy: &str, tree: &mut BTreeMap<String, Vec<String>>) {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let path = entry.path();
                    let name = path.strip_prefix(top).expect("below the root").display().to_string();
                    tree.entry(name).or_default().push(hierarchy.to_owned());
                    walk(top, &path, hierarchy, tree);
                }
            }
        }
        let mut tree = BTreeMap::new();
        for top in tops() {
            let root = top.join(self.0.trim_start_matches('/'));
            let hierarchy = top.file_name().unwrap_or_default().to_string_lossy().into_owned();
            walk(&root, &root, &hierarchy, &mut tree);
        }
        tree
    }

    /// The cgroups of pods, without those of their containers.
    pub(crate) fn pods(&self) -> Vec<String> {
        let is_pod = |path: &String| path.rsplit('/').next().is_some_and(|name| name.starts_with("pod"));
        self.tree().into_keys().filter(is_pod).collect()
    }

    /// A file of a cgroup, such as `memory.limit_in_bytes` of `kubepods/burstable`, without the line
    /// feed; `None`: there is no such file.
    pub(crate) fn read(&self, cgroup: &str, file: &str) -> Option<String> {
        let text = |top: PathBuf| {
            fs::read_to_string(top.join(self.0.trim_start_matches('/')).join(cgroup).join(file)).ok()
        };
        tops().into_iter().find_map(text).map(|text| text.trim_end().to_owned())
    }

    /// The values of all files of all cgroups that limit something.
    pub(crate) fn values(&self) -> BTreeMap<String, String> {
        const FILES: [&str; 8] = [
            "cpu.shares",
            "cpu.cfs_quota_us",
            "cpu.max",
            "cpu.weight",
            "memory.limit_in_bytes",
            "memory.max",
            "pids.max",
            "cpuset.cpus",
        ];
        let mut values = BTreeMap::new();
        for cgroup in self.tree().into_keys() {
            for file in FILES {
                if let Some(value) = self.read(&cgroup, file) {
                    values.insert(format!("{cgroup}/{file}"), value);
                }
            }
        }
        values
    }
}

/// The trees of controllers.
fn tops() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    let entries = fs::read_dir(root).expect("cgroups are mounted").flatten().map(|entry| entry.path());
    // `cpu` and `cpuacct` may be links to one hierarchy.
    let mut tops: Vec<PathBuf> =
        entries.filter(|path| !path.is_symlink() && path.join("cgroup.procs").exists()).collect();
    // `unified` is the last one: it has a `cpu.stat` without limits.
    tops.sort();
    tops
}

/// Version 1: without CPUs nothing may run in a cgroup. With version 2 those of the parent count.
fn copy_cpus(parent: &Path, dir: &Path) {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let all = fs::read_to_string(parent.join(file)).unwrap_or_default();
        if !all.trim().is_empty() {
            fs::write(dir.join(file), all).expect("the processors of the parent");
        }
    }
}

/// A cgroup with processes stays.
fn remove(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

impl Drop for CgroupRoot {
    fn drop(&mut self) {
        for top in tops() {
            remove(&top.join(self.0.trim_start_matches('/')));
        }
    }
}
