//! The arguments of the agent on a machine without systemd: an installation that joins has written the flags of
//! the node there (`set_join_arguments` of packaging/install), and without its files the agent does not start
//! with them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::util::atomic_file;

use super::files::{self, Paths};
use super::refusal::Refusal;
use super::service;

/// A file with the arguments, as `packaging/node` has it.
struct ArgumentsFile {
    path: &'static str,
    /// What comes before the flags, in the line that sets them.
    start: &'static str,
    /// The line of a standalone agent; `None`: without the line it is one.
    standalone: Option<&'static str>,
}

const FILES: [ArgumentsFile; 2] = [
    ArgumentsFile { path: "etc/conf.d/coracle", start: "CORACLE_ARGS=\"", standalone: None },
    ArgumentsFile {
        path: "usr/local/lib/coracle/services/coracle",
        start: "command=\"/usr/local/bin/coracle ",
        standalone: Some("command=\"/usr/local/bin/coracle --config /etc/coracle/config.yaml\""),
    },
];

/// The link with which OpenRC starts the agent.
const RUNLEVEL: &str = "etc/runlevels/default/coracle";

/// The options of `join` that become flags (`configuration::flags_file`).
const OPTIONS: [&str; 3] = ["--hostname-override=", "--node-ip=", "--node-labels="];

/// A file that has the flags of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Arguments {
    /// An installation wrote them: the content for a standalone agent.
    Installed { path: PathBuf, content: String },
    /// The operator did, or has changed them.
    Changed(PathBuf),
}

/// The files with the flags of the node. `root`: the root of the file system.
pub(super) fn find(root: &Path, paths: &Paths) -> Result<Vec<Arguments>, Refusal> {
    let flags = service::flags(paths).join(" ");
    let kubeconfig = paths.kubeconfig().display().to_string();
    let mut found = Vec::new();
    for file in &FILES {
        let path = root.join(file.path);
        if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_file()) {
            continue;
        }
        let Some(bytes) = files::read(&path)? else { continue };
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let content = standalone(&text, file, &flags);
        let rest = content.as_deref().unwrap_or(&text);
        let mut settings = rest.lines().filter(|line| !line.trim_start().starts_with('#'));
        if settings.any(|line| line.contains(&kubeconfig)) {
            found.push(Arguments::Changed(path));
        } else if let Some(content) = content {
            found.push(Arguments::Installed { path, content });
        }
    }
    Ok(found)
}

/// The text of a file without the lines of an installation; `None`: it has none.
fn standalone(text: &str, file: &ArgumentsFile, flags: &str) -> Option<String> {
    let is_installed = |line: &&str| is_installed(line, file.start, flags);
    if !text.lines().any(|line| is_installed(&line)) {
        return None;
    }
    let rest = text.lines().filter(|line| !is_installed(line)).chain(file.standalone);
    Some(rest.map(|line| format!("{line}\n")).collect())
}

/// Whether a line has the flags of the node, the options of `join` and `--offline`, and nothing else.
fn is_installed(line: &str, start: &str, flags: &str) -> bool {
    let Some(arguments) = line.strip_prefix(start).and_then(|rest| rest.strip_suffix('"')) else {
        return false;
    };
    let arguments = arguments.strip_prefix("--offline ").unwrap_or(arguments);
    let Some(options) = arguments.strip_prefix(flags) else { return false };
    let is_option = |word: &str| OPTIONS.iter().any(|option| word.starts_with(option));
    (options.is_empty() || options.starts_with(' ')) && options.split_ascii_whitespace().all(is_option)
}

/// Writes the arguments of a standalone agent. The file keeps its mode.
pub(super) fn write(path: &Path, content: &str) -> Result<(), Refusal> {
    let written = || -> std::io::Result<()> {
        let mode = fs::metadata(path)?.permissions().mode() & 0o777;
        // What a kill leaves behind begins with a dot: `supervise boot` starts each other file.
        let directory = path.parent().unwrap_or(Path::new("/"));
        let new = directory.join(".coracle-leave");
        atomic_file::write(&new, content.as_bytes(), mode)?;
        fs::rename(&new, path)?;
        atomic_file::sync_directory(directory)
    };
    written().map_err(|error| Refusal::file("write", path, &error))
}

/// What still starts the agent with the machine. `root`: the root of the file system.
pub(super) fn starts_with_machine(root: &Path) -> Option<&'static str> {
    fs::symlink_metadata(root.join(RUNLEVEL)).is_ok().then_some(
        "the service coracle, which starts an agent without a cluster with the machine: rc-update del coracle \
         default",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: &str = "--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
                         --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml";

    fn paths() -> Paths {
        Paths {
            kubernetes_dir: "/etc/kubernetes".into(),
            root_dir: "/var/lib/kubelet".into(),
            units_dir: "/u".into(),
        }
    }

    fn put(root: &Path, path: &str, text: &str) -> PathBuf {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn files_of_an_installation_are_again_as_the_bundle_has_them() {
        let source = std::env::var_os("CARGO_MANIFEST_DIR").unwrap();
        let packaged =
            |name: &str| fs::read_to_string(Path::new(&source).join("packaging/node").join(name)).unwrap();
        for (file, name) in FILES.iter().zip(["coracle.confd", "services/coracle"]) {
            let original = packaged(name);
            let root = tempfile::tempdir().unwrap();
            for more in ["", " --node-ip=192.0.2.1 --node-labels=a=b,c="] {
                for offline in ["", "--offline "] {
                    let others = original.lines().filter(|line| !line.starts_with("command="));
                    let joined: String = others.map(|line| format!("{line}\n")).collect();
                    let joined = format!("{joined}{}{offline}{FLAGS}{more}\"\n", file.start);
                    let path = put(root.path(), file.path, &joined);
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
                    let expected = Arguments::Installed { path: path.clone(), content: original.clone() };
                    assert_eq!(find(root.path(), &paths()).unwrap(), [expected], "{joined}");
                    write(&path, &original).unwrap();
                    assert_eq!(fs::read_to_string(&path).unwrap(), original);
                    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
                    let directory = path.parent().unwrap();
                    assert_eq!(fs::read_dir(directory).unwrap().count(), 1);
                    assert!(find(root.path(), &paths()).unwrap().is_empty());
                }
            }
        }
    }

    #[test]
    fn flags_of_the_operator_are_named_and_those_of_another_node_are_not() {
        let root = tempfile::tempdir().unwrap();
        let path = FILES[0].path;
        for (text, is_changed) in [
            (format!("CORACLE_ARGS=\"{FLAGS} -v=4\"\n"), true),
            (format!("CORACLE_ARGS=\"{FLAGS}-other\"\n"), true),
            (format!("X=1; CORACLE_ARGS=\"{FLAGS}\"\n"), true),
            (format!("CORACLE_ARGS=\"{FLAGS}\"\nX=\"{FLAGS}\"\n"), true),
            (format!("#CORACLE_ARGS=\"{FLAGS}\"\n"), false),
            ("CORACLE_ARGS=\"--kubeconfig=/data/kubelet.conf\"\n".to_owned(), false),
        ] {
            let file = put(root.path(), path, &text);
            let expected = if is_changed { vec![Arguments::Changed(file)] } else { Vec::new() };
            assert_eq!(find(root.path(), &paths()).unwrap(), expected, "{text}");
        }
        fs::remove_file(root.path().join(path)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", root.path().join(path)).unwrap();
        assert!(find(root.path(), &paths()).is_ok_and(|found| found.is_empty()));
    }

    #[test]
    fn link_of_the_runlevel_is_named() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(starts_with_machine(root.path()), None);
        put(root.path(), RUNLEVEL, "");
        assert!(starts_with_machine(root.path()).unwrap().contains("rc-update del coracle"));
    }
}
