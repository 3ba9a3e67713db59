//! Which cgroup version the node has, and which controllers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::kernel_files::{ResourceError, Roots, list, read};
use crate::util::cgroup_mounts::{self, Mounts, UNIFIED};

/// Version 2: the controllers that a cgroup can use.
const CONTROLLERS: &str = "cgroup.controllers";

/// How cgroups are mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One tree per controller.
    V1,
    /// One tree per controller, and a second version without the controllers in use.
    Hybrid,
    /// One tree for all controllers.
    V2,
}

impl Version {
    /// For logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Version::V1 => "v1",
            Version::Hybrid => "v1 (hybrid)",
            Version::V2 => "v2",
        }
    }

    /// Whether containers are limited through the second version's files.
    pub fn is_v2(self) -> bool {
        self == Version::V2
    }
}

/// The cgroup file systems of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupHierarchies {
    /// Usually `/sys/fs/cgroup`. With version 2 it is mounted here.
    pub root: PathBuf,
    /// Which files limit containers.
    pub version: Version,
    /// Controllers by their kernel names, each with the directory in which its hierarchy is mounted.
    pub controllers: BTreeMap<String, PathBuf>,
}

impl CgroupHierarchies {
    /// Reads which hierarchies are mounted, from the mount table: version 1 can be mounted anywhere,
    /// with several controllers together. Without the table they are searched in `/sys/fs/cgroup`.
    pub fn detect(roots: &Roots) -> Result<Self, ResourceError> {
        let root = roots.sys.join("fs/cgroup");
        let table = read(&roots.proc.join("self/mountinfo")).unwrap_or_default();
        match Mounts::parse(&table, &root) {
            Ok(mounts) => CgroupHierarchies::mounted(root, &mounts),
            Err(_) => CgroupHierarchies::named(root),
        }
    }

    fn mounted(root: PathBuf, mounts: &Mounts) -> Result<Self, ResourceError> {
        if mounts.version == cgroup_mounts::Version::V2 {
            return CgroupHierarchies::version_2(root);
        }
        let mut found = CgroupHierarchies { root, version: Version::V1, controllers: BTreeMap::new() };
        if let Some(unified) = mounts.hierarchy(UNIFIED) {
            found.version = Version::Hybrid;
            found.add(&unified.mount)?;
        }
        let first = mounts.controllers().map(|(name, mount)| (name.to_owned(), mount.to_owned()));
        found.controllers.extend(first);
        Ok(found)
    }

    fn named(root: PathBuf) -> Result<Self, ResourceError> {
        if root.join(CONTROLLERS).exists() {
            return CgroupHierarchies::version_2(root);
        }
        let mut found = CgroupHierarchies { root, version: Version::V1, controllers: BTreeMap::new() };
        for dir in list(&found.root)? {
            let path = found.root.join(&dir);
            if path.join(CONTROLLERS).exists() {
                found.version = Version::Hybrid;
                found.add(&path)?;
            } else if path.join("cgroup.procs").exists() && dir != "systemd" {
                // `cpu,cpuacct` is one tree with two controllers.
                found.controllers.extend(dir.split(',').map(|name| (name.to_owned(), path.clone())));
            }
        }
        if found.controllers.is_empty() {
            return Err(ResourceError::NoCgroups { path: found.root });
        }
        Ok(found)
    }

    fn version_2(root: PathBuf) -> Result<Self, ResourceError> {
        let mut found =
            CgroupHierarchies { root: root.clone(), version: Version::V2, controllers: BTreeMap::new() };
        found.add(&root)?;
        Ok(found)
    }

    /// Adds the controllers of a hierarchy of version 2.
    fn add(&mut self, mount: &Path) -> Result<(), ResourceError> {
        let names = read(&mount.join(CONTROLLERS))?;
        self.controllers.extend(names.split_whitespace().map(|name| (name.to_owned(), mount.to_owned())));
        Ok(())
    }

    /// The directory in which the cgroups of a controller are.
    #[must_use]
    pub fn dir(&self, controller: &str) -> PathBuf {
        let known = self.controllers.get(controller).filter(|_| !self.version.is_v2());
        let own = || if self.version.is_v2() { self.root.clone() } else { self.root.join(controller) };
        known.cloned().unwrap_or_else(own)
    }

    /// Whether a container's swap can be limited. Version 2 has the file in every cgroup
    /// but the root.
    pub fn limits_swap(&self) -> bool {
        if self.version.is_v2() {
            let below = list(&self.root).unwrap_or_default();
            return below.iter().any(|dir| self.root.join(dir).join("memory.swap.max").exists());
        }
        self.dir("memory").join("memory.memsw.limit_in_bytes").exists()
    }

    /// The controllers of `wanted` that the node lacks.
    pub fn missing<'a>(&self, wanted: &[&'a str]) -> Vec<&'a str> {
        wanted.iter().copied().filter(|name| !self.controllers.contains_key(*name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// `files` are below `/sys/fs/cgroup`. In the mount table, `SYS` stands for `/sys`.
    fn detect(dir: &Path, files: &[(&str, &str)], table: &str) -> Result<CgroupHierarchies, ResourceError> {
        let roots = Roots { proc: dir.join("proc"), sys: dir.join("sys") };
        let root = roots.sys.join("fs/cgroup");
        fs::create_dir_all(&root).unwrap();
        for (file, content) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        let table = table.replace("SYS", &roots.sys.display().to_string());
        fs::write(roots.proc.join("self/mountinfo"), table).unwrap();
        CgroupHierarchies::detect(&roots)
    }

    /// The names of directories are those of no distribution: only the table knows the controllers.
    #[test]
    fn mounted_hierarchies_are_found_at_any_place() {
        let line = |mount: &str, kind: &str, options: &str| {
            format!("30 23 0:26 / {mount} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n")
        };
        let dir = tempfile::tempdir().unwrap();
        let first = [
            line("SYS/fs/cgroup", "tmpfs", "mode=755"),
            line("SYS/fs/cgroup/a", "cgroup", "cpu,cpuacct"),
            line("/dev/groups", "cgroup", "memory,pids"),
            line("SYS/fs/cgroup/systemd", "cgroup", "xattr,name=systemd"),
        ];
        let found = detect(dir.path(), &[("cpu/cgroup.procs", "")], &first.concat()).unwrap();
        assert_eq!(found.version, Version::V1);
        let names: Vec<&str> = found.controllers.keys().map(String::as_str).collect();
        assert_eq!(names, ["cpu", "cpuacct", "memory", "pids"]);
        assert_eq!(found.dir("memory"), Path::new("/dev/groups"));
        let mount = dir.path().join("sys/fs/cgroup/a");
        assert_eq!([found.dir("cpu"), found.dir("cpuacct")], [mount.clone(), mount]);
        assert_eq!(found.dir("blkio"), found.root.join("blkio"), "it is not mounted");

        let hybrid = format!("{}{}", first.concat(), line("SYS/fs/cgroup/u", "cgroup2", "nsdelegate"));
        let files = [("u/cgroup.controllers", "hugetlb memory\n")];
        let found = detect(dir.path(), &files, &hybrid).unwrap();
        assert_eq!(found.version, Version::Hybrid);
        assert_eq!(found.dir("hugetlb"), dir.path().join("sys/fs/cgroup/u"));
        assert_eq!(found.dir("memory"), Path::new("/dev/groups"));

        let second = line("SYS/fs/cgroup", "cgroup2", "nsdelegate");
        let found = detect(dir.path(), &[("cgroup.controllers", "cpu memory\n")], &second).unwrap();
        assert_eq!((found.version, found.dir("memory")), (Version::V2, found.root.clone()));
        assert!(found.missing(&["cpu", "memory"]).is_empty());
    }

    fn check(files: &[(&str, &str)], expected: Option<(Version, &[&str])>) {
        let dir = tempfile::tempdir().unwrap();
        let found = detect(dir.path(), files, "");
        match (&found, expected) {
            (Ok(found), Some((version, controllers))) => {
                assert_eq!(found.version, version);
                assert_eq!(found.controllers.keys().map(String::as_str).collect::<Vec<_>>(), controllers);
            }
            (Err(ResourceError::NoCgroups { .. }), None) => {}
            _ => panic!("{files:?}: {found:?}"),
        }
    }

    #[test]
    fn swap_can_be_limited_where_the_kernel_has_the_file() {
        for (version, file, expected) in [
            (Version::V1, "memory/memory.memsw.limit_in_bytes", true),
            (Version::V1, "memory/memory.limit_in_bytes", false),
            (Version::V1, "system.slice/memory.swap.max", false),
            (Version::V2, "system.slice/memory.swap.max", true),
            (Version::V2, "system.slice/memory.max", false),
            (Version::V2, "memory.swap.max", false),
        ] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
            let cgroups =
                CgroupHierarchies { root: root.path().to_owned(), version, controllers: BTreeMap::new() };
            assert_eq!(cgroups.limits_swap(), expected, "{version:?} {file}");
        }
    }

    #[test]
    fn detects_every_layout() {
        check(
            &[("cgroup.controllers", "cpuset cpu memory pids\n")],
            Some((Version::V2, &["cpu", "cpuset", "memory", "pids"])),
        );
        check(
            &[
                ("memory/cgroup.procs", ""),
                ("cpu,cpuacct/cgroup.procs", ""),
                ("systemd/cgroup.procs", ""),
                ("other/file", ""),
            ],
            Some((Version::V1, &["cpu", "cpuacct", "memory"])),
        );
        check(
            &[("memory/cgroup.procs", ""), ("unified/cgroup.controllers", "hugetlb\n")],
            Some((Version::Hybrid, &["hugetlb", "memory"])),
        );
        check(&[("other/file", "")], None);
        let nowhere = PathBuf::from("/no/such/root");
        let none = CgroupHierarchies::detect(&Roots { proc: nowhere.clone(), sys: nowhere });
        assert!(matches!(none, Err(ResourceError::Io { .. })));
    }

    #[test]
    fn names_what_is_missing() {
        let cgroups = CgroupHierarchies {
            root: PathBuf::new(),
            version: Version::V2,
            controllers: [("cpu".to_owned(), PathBuf::new())].into_iter().collect(),
        };
        assert_eq!(cgroups.missing(&["cpu", "memory", "pids"]), ["memory", "pids"]);
    }
}
