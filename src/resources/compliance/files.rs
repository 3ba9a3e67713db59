//! The files that the rules are about, with their modes and owners.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::util::error_chain::system_error;

use super::{FileFact, FileState};

/// Files of service managers that start the agent. Those of a kubelet count because the agent may have
/// its name and its unit (`docs/take-over.md`).
const SERVICES: &[&str] = &[
    "etc/systemd/system/coracle.service",
    "usr/local/lib/systemd/system/coracle.service",
    "usr/lib/systemd/system/coracle.service",
    "lib/systemd/system/coracle.service",
    "etc/systemd/system/kubelet.service",
    "usr/local/lib/systemd/system/kubelet.service",
    "usr/lib/systemd/system/kubelet.service",
    "lib/systemd/system/kubelet.service",
    "etc/init.d/coracle",
];

/// Directories of drop-ins of these units. The packages of kubeadm have theirs in `usr/lib`.
const DROP_INS: &[&str] = &[
    "etc/systemd/system/coracle.service.d",
    "usr/local/lib/systemd/system/coracle.service.d",
    "usr/lib/systemd/system/coracle.service.d",
    "lib/systemd/system/coracle.service.d",
    "etc/systemd/system/kubelet.service.d",
    "usr/local/lib/systemd/system/kubelet.service.d",
    "usr/lib/systemd/system/kubelet.service.d",
    "lib/systemd/system/kubelet.service.d",
];

/// The drop-in of kubeadm for the unit of a kubelet.
const KUBEADM: &[&str] = &[
    "etc/systemd/system/kubelet.service.d/10-kubeadm.conf",
    "usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf",
];

/// Kubeconfig files of a kube-proxy that runs outside of a pod.
const PROXY: &[&str] = &["etc/kubernetes/proxy.conf", "var/lib/kube-proxy/kubeconfig"];

/// The limit of files of one directory.
const MAX_FILES: usize = 1000;

/// The files of the rules, by what they are for. A list is empty if the node has none of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeFiles {
    /// Units, their drop-ins and scripts that start the agent.
    pub services: Vec<FileFact>,
    /// The drop-in of kubeadm.
    pub kubeadm: Vec<FileFact>,
    /// Kubeconfig files of a kube-proxy on the host.
    pub proxy: Vec<FileFact>,
    /// `--kubeconfig`.
    pub kubeconfig: Vec<FileFact>,
    /// `authentication.x509.clientCAFile`.
    pub client_ca: Vec<FileFact>,
    /// `--config` and the files of `--config-dir`.
    pub configs: Vec<FileFact>,
    /// The manifests of static pods.
    pub manifests: Vec<FileFact>,
}

impl NodeFiles {
    /// Reads modes and owners below `root`, which is `/` except in tests. `static_pods`: the file or
    /// directory of manifests; empty: none.
    pub(crate) fn read(
        root: &Path,
        kubeconfig: Option<&Path>,
        client_ca: &Path,
        configs: &[PathBuf],
        static_pods: &Path,
    ) -> NodeFiles {
        let mut services = existing(root, SERVICES);
        for directory in DROP_INS {
            services.extend(files_of(&root.join(directory), |name| name.ends_with(".conf")));
        }
        // `lib` is a link to `usr/lib` on most machines.
        let mut seen = BTreeSet::new();
        services.retain(|file| {
            seen.insert(std::fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone()))
        });
        let manifests = match static_pods {
            none if none.as_os_str().is_empty() => Vec::new(),
            file if !file.is_dir() => existing_file(file).into_iter().collect(),
            directory => files_of(directory, |name| !name.starts_with('.')),
        };
        NodeFiles {
            services,
            kubeadm: existing(root, KUBEADM),
            proxy: existing(root, PROXY),
            kubeconfig: kubeconfig.map(fact).into_iter().collect(),
            client_ca: Some(client_ca)
                .filter(|file| !file.as_os_str().is_empty())
                .map(fact)
                .into_iter()
                .collect(),
            configs: configs.iter().map(|file| fact(file)).collect(),
            manifests,
        }
    }
}

fn existing(root: &Path, names: &[&str]) -> Vec<FileFact> {
    names.iter().filter_map(|name| existing_file(&root.join(name))).collect()
}

/// `None`: there is no such file. One whose existence is not known is unreadable, and not absent.
fn existing_file(path: &Path) -> Option<FileFact> {
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => None,
        Err(error) if is_absent(&error) => None,
        found => Some(fact_of(path, found)),
    }
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// The files of a directory with wanted names, sorted. A directory that cannot be listed, or that has more
/// than [`MAX_FILES`], is a file that cannot be read: no rule about its files passes.
fn files_of(directory: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<FileFact> {
    let unreadable =
        |reason: String| FileFact { path: directory.to_owned(), state: FileState::Unreadable(reason) };
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return Vec::new(),
        Err(error) => return vec![unreadable(system_error(&error))],
    };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| is_wanted(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .take(MAX_FILES + 1)
        .collect();
    let is_whole = paths.len() <= MAX_FILES;
    paths.sort();
    let mut facts: Vec<FileFact> = paths.iter().filter_map(|path| existing_file(path)).collect();
    if !is_whole {
        facts.push(unreadable(format!("it has more than {MAX_FILES} files, and not all were checked")));
    }
    facts
}

fn fact(path: &Path) -> FileFact {
    fact_of(path, std::fs::metadata(path))
}

fn fact_of(path: &Path, found: std::io::Result<std::fs::Metadata>) -> FileFact {
    let state = match found {
        Ok(found) => {
            FileState::Present { mode: found.mode() & 0o7777, user: found.uid(), group: found.gid() }
        }
        Err(error) => FileState::Unreadable(system_error(&error)),
    };
    FileFact { path: path.to_owned(), state }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn files_of_units_manifests_and_settings_have_their_modes() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, mode: u32| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        write("etc/systemd/system/coracle.service", 0o644);
        write("etc/systemd/system/kubelet.service.d/10-kubeadm.conf", 0o600);
        write("etc/systemd/system/kubelet.service.d/notes.txt", 0o600);
        let manifest = write("manifests/web.yaml", 0o640);
        write("manifests/.hidden", 0o640);
        let config = write("config.yaml", 0o600);
        let absent = root.path().join("absent");
        let files = NodeFiles::read(
            root.path(),
            Some(&absent),
            Path::new(""),
            &[config],
            &root.path().join("manifests"),
        );
        let names = |facts: &[FileFact]| {
            let name = |fact: &FileFact| fact.path.file_name().unwrap().to_string_lossy().into_owned();
            facts.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(&files.services), ["coracle.service", "10-kubeadm.conf"]);
        assert_eq!(names(&files.kubeadm), ["10-kubeadm.conf"]);
        assert_eq!(names(&files.manifests), ["web.yaml"]);
        assert_eq!(names(&files.configs), ["config.yaml"]);
        assert_eq!((&files.proxy, &files.client_ca), (&Vec::new(), &Vec::new()));
        let state = |fact: &FileFact| match &fact.state {
            FileState::Present { mode, .. } => format!("{mode:o}"),
            FileState::Unreadable(error) => error.clone(),
        };
        assert_eq!(state(&files.services[0]), "644");
        assert_eq!(state(&files.manifests[0]), "640");
        assert_eq!(state(&files.kubeconfig[0]), "No such file or directory");
        let single = NodeFiles::read(root.path(), None, Path::new(""), &[], &manifest);
        assert_eq!(names(&single.manifests), ["web.yaml"]);
    }

    #[test]
    fn drop_in_of_a_package_counts_once_and_a_link_to_its_directory_not_again() {
        let root = tempfile::tempdir().unwrap();
        let units = root.path().join("usr/lib/systemd/system");
        std::fs::create_dir_all(units.join("kubelet.service.d")).unwrap();
        std::fs::write(units.join("kubelet.service"), "").unwrap();
        std::fs::write(units.join("kubelet.service.d/10-kubeadm.conf"), "").unwrap();
        std::os::unix::fs::symlink("usr/lib", root.path().join("lib")).unwrap();
        let files = NodeFiles::read(root.path(), None, Path::new(""), &[], Path::new(""));
        let paths: Vec<_> = files.services.iter().map(|file| file.path.clone()).collect();
        assert_eq!(paths, [units.join("kubelet.service"), units.join("kubelet.service.d/10-kubeadm.conf")]);
    }

    #[test]
    fn drop_ins_are_checked_in_each_directory_of_units() {
        let root = tempfile::tempdir().unwrap();
        for place in SERVICES.iter().filter(|place| place.ends_with(".service")) {
            let directory = root.path().join(format!("{place}.d"));
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("flags.conf"), "").unwrap();
        }
        let files = NodeFiles::read(root.path(), None, Path::new(""), &[], Path::new(""));
        assert_eq!(files.services.len(), SERVICES.len() - 1, "{:?}", files.services);
    }

    #[test]
    fn directory_with_too_many_files_is_unreadable_in_part_and_an_absent_one_has_none() {
        let root = tempfile::tempdir().unwrap();
        for number in 0..=MAX_FILES {
            std::fs::write(root.path().join(format!("{number}.yaml")), "").unwrap();
        }
        let manifests = |path: &Path| NodeFiles::read(root.path(), None, Path::new(""), &[], path).manifests;
        let facts = manifests(root.path());
        let last = facts.last().unwrap();
        assert_eq!(last.path, root.path());
        assert!(matches!(&last.state, FileState::Unreadable(reason) if reason.contains("more than 1000")));
        assert!(manifests(&root.path().join("absent")).is_empty());
    }
}
