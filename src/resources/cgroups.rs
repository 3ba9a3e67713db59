//! Which cgroup version the node has, and which controllers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::kernel_files::{ResourceError, list, read};

/// How cgroups are mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One tree per controller.
    V1,
    /// One tree per controller, and a second version without the controllers in use.
    Hybrid,
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
pub struct Cgroups {
    /// Where they are mounted, usually `/sys/fs/cgroup`.
    pub root: PathBuf,
    pub version: Version,
    /// Controllers by their kernel names.
    pub controllers: BTreeSet<String>,
}

impl Cgroups {
    /// Reads what is mounted at `root`.
    pub fn detect(root: &Path) -> Result<Self, ResourceError> {
        let of = |version, controllers| Cgroups { root: root.to_owned(), version, controllers };
        let unified = root.join("cgroup.controllers");
        if unified.exists() {
            let controllers = read(&unified)?.split_whitespace().map(str::to_owned).collect();
            return Ok(of(Version::V2, controllers));
        }
        let mut version = Version::V1;
        let mut controllers = BTreeSet::new();
        for dir in list(root)? {
            let at = root.join(&dir);
            if at.join("cgroup.controllers").exists() {
                version = Version::Hybrid;
                controllers
                    .extend(read(&at.join("cgroup.controllers"))?.split_whitespace().map(str::to_owned));
            } else if at.join("cgroup.procs").exists() && dir != "systemd" {
                // `cpu,cpuacct` is one tree with two controllers.
                controllers.extend(dir.split(',').map(str::to_owned));
            }
        }
        if controllers.is_empty() {
            return Err(ResourceError::NoCgroups { path: root.to_owned() });
        }
        Ok(of(version, controllers))
    }

    /// Whether a container's swap can be limited. Version 2 has the file in every cgroup
    /// but the root.
    pub fn limits_swap(&self) -> bool {
        if self.version.is_v2() {
            let below = list(&self.root).unwrap_or_default();
            return below.iter().any(|dir| self.root.join(dir).join("memory.swap.max").exists());
        }
        self.root.join("memory/memory.memsw.limit_in_bytes").exists()
    }

    /// The controllers of `wanted` that the node lacks.
    pub fn missing<'a>(&self, wanted: &[&'a str]) -> Vec<&'a str> {
        wanted.iter().copied().filter(|name| !self.controllers.contains(*name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn check(files: &[(&str, &str)], expected: Option<(Version, &[&str])>) {
        let root = tempfile::tempdir().unwrap();
        for (file, content) in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let found = Cgroups::detect(root.path());
        match (&found, expected) {
            (Ok(found), Some((version, controllers))) => {
                assert_eq!(found.version, version);
                assert_eq!(found.controllers.iter().map(String::as_str).collect::<Vec<_>>(), controllers);
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
            let cgroups = Cgroups { root: root.path().to_owned(), version, controllers: BTreeSet::new() };
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
        let none = Cgroups::detect(Path::new("/no/such/cgroup"));
        assert!(matches!(none, Err(ResourceError::Io { .. })));
    }

    #[test]
    fn names_what_is_missing() {
        let cgroups = Cgroups {
            root: PathBuf::new(),
            version: Version::V2,
            controllers: ["cpu".to_owned()].into_iter().collect(),
        };
        assert_eq!(cgroups.missing(&["cpu", "memory", "pids"]), ["memory", "pids"]);
    }
}
