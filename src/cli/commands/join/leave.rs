//! `coracle leave`: stops the agent, and removes what `coracle join` wrote and what the agent made for
//! the cluster. Pods are evicted only with `--drain`: the credentials of a node may not do that.
//!
//! Go: cmd/kubeadm/app/cmd/reset.go, which also removes the data of pods.

use std::fs;
use std::path::Path;

use crate::cli::join_options::LeaveOptions;
use crate::server::NodeReport;

use crate::cli::commands::client::Client;
use crate::cli::commands::console::Console;
use crate::cli::commands::error::Outcome;

use super::arguments::{self, Arguments};
use super::files::{self, Paths, Record, Removal};
use super::refusal::{Reason, Refusal};
use super::{drain, exit, lock, preflight, progress, service, step};

pub(crate) fn run(client: &Client, console: &mut Console<'_>, options: &LeaveOptions) -> Outcome {
    Ok(exit("leave", leave(client, console, options)))
}

fn leave(client: &Client, console: &mut Console<'_>, options: &LeaveOptions) -> Result<(), Refusal> {
    let paths = Paths {
        kubernetes_dir: options.kubernetes_dir.clone(),
        root_dir: options.root_dir.clone(),
        units_dir: service::UNITS.into(),
    };
    if !options.dry_run && !rustix::process::geteuid().is_root() {
        return Err(Refusal::new(Reason::NotRoot, "only root can do this", "run it with sudo"));
    }
    let has_root = !options.dry_run && paths.root_dir.exists();
    let _lock = has_root.then(|| lock::acquire(&paths)).transpose()?;
    let Some(record) = files::read_record(&paths)? else {
        let text = format!("coracle join has written nothing here: there is no {}", paths.record().display());
        let advice = "a node of kubeadm leaves with kubeadm reset; one that was joined by hand, by hand";
        return Err(Refusal::new(Reason::NotJoined, text, advice));
    };
    let system = Path::new("/");
    let uses_systemd = uses_systemd(&record, &paths, Path::new(service::SYSTEMD).exists());
    if options.dry_run {
        if !uses_systemd {
            for file in &arguments::find(system, &paths)? {
                show_arguments(console, "would write", file);
            }
        }
        for removal in &files::removals(&record, &paths)? {
            show(console, "would remove", removal);
        }
        return Ok(());
    }
    if let Some(pid) = preflight::kubelet_with(Path::new("/proc"), &paths.kubeconfig()) {
        let text = format!("a kubelet runs with {}: process {pid}", paths.kubeconfig().display());
        let advice = "if it has taken the node over, the files are its own: remove only coracle-join.json; \
                      otherwise stop it, and run the same command again";
        return Err(Refusal::new(Reason::OtherKubelet, text, advice));
    }
    if let Some(kubeconfig) = &options.drain {
        // The agent ends the pods, so it still runs.
        let own = paths.kubeconfig();
        drain::drain(kubeconfig, &record, &own, options.timeout, &mut |line| progress(console, line))?;
    }
    let has_drop_in = uses_systemd && paths.drop_in().exists();
    if can_stop(has_drop_in, service::has_unit, service::is_active) {
        progress(console, "stop: stopping coracle.service; containers keep running");
        step("stop", service::stop())?;
    } else if client.get::<NodeReport>("/v1/status").is_ok() {
        let text = "stop: an agent runs here, and not with the drop-in of coracle join";
        let advice = "stop it (systemctl stop coracle, rc-service coracle stop, or \
                      /usr/local/lib/coracle/supervise stop coracle), and run the same command again";
        return Err(Refusal::new(Reason::Service, text, advice));
    }
    if must_disable(&record, uses_systemd, service::has_unit) {
        progress(console, "stop: disabling coracle.service, which coracle join has enabled");
        step("stop", service::disable())?;
    }
    if !uses_systemd {
        for file in &arguments::find(system, &paths)? {
            if let Arguments::Installed { path, content } = file {
                step("files", arguments::write(path, content))?;
            }
            show_arguments(console, "wrote", file);
        }
    }
    // Until it was stopped, the agent made more.
    for removal in &files::removals(&record, &paths)? {
        if let Removal::Remove(path) = removal {
            step("files", files::remove(path))?;
        }
        show(console, "removed", removal);
    }
    remove_directories(&paths, uses_systemd);
    if uses_systemd {
        step("stop", service::reload())?;
    }
    let is_enabled = uses_systemd && service::is_enabled();
    for line in left(&record, &paths, count(&paths.root_dir.join("pods")), is_enabled) {
        progress(console, format!("left: {line}"));
    }
    if let Some(line) = arguments::starts_with_machine(system).filter(|_| !uses_systemd) {
        progress(console, format!("left: {line}"));
    }
    Ok(())
}

/// Whether the unit has the flags of the node, in its drop-in. Also on a machine with systemd, an installation
/// for another init system has written them to the arguments of the agent. `has_systemd`: whether it is the init.
fn uses_systemd(record: &Record, paths: &Paths, has_systemd: bool) -> bool {
    has_systemd && record.has_drop_in(paths)
}

/// Whether systemctl can stop the agent. A purge of the package stops the agent and removes the unit, but not
/// the drop-in while containers run; with a drop-in alone there is no unit.
fn can_stop(has_drop_in: bool, has_unit: impl Fn() -> bool, is_active: impl Fn() -> bool) -> bool {
    has_drop_in && (has_unit() || is_active())
}

/// Whether the unit is disabled: only if `join` has enabled it, also if the drop-in is gone. Without a unit
/// there is nothing to disable, and systemctl would fail.
fn must_disable(record: &Record, uses_systemd: bool, has_unit: impl Fn() -> bool) -> bool {
    uses_systemd && record.enabled && has_unit()
}

/// Removes the directories of files outside of the root directory that are gone. One in which the operator has
/// other files stays.
fn remove_directories(paths: &Paths, uses_systemd: bool) {
    let drop_in = uses_systemd.then(|| paths.drop_in());
    for file in std::iter::once(paths.authority()).chain(drop_in) {
        if let Some(directory) = file.parent() {
            let _ = fs::remove_dir(directory);
        }
    }
}

fn show(console: &mut Console<'_>, verb: &str, removal: &Removal) {
    match removal {
        Removal::Remove(path) => progress(console, format!("files: {verb} {}", path.display())),
        Removal::Changed(path) => {
            progress(console, format!("files: {} was changed after coracle join, and stays", path.display()));
        }
        Removal::Earlier(path) => {
            progress(console, format!("files: {} was there before coracle join, and stays", path.display()));
        }
    }
}

fn show_arguments(console: &mut Console<'_>, verb: &str, file: &Arguments) {
    match file {
        Arguments::Installed { path, .. } => {
            progress(console, format!("files: {verb} {} without the flags of the node", path.display()));
        }
        Arguments::Changed(path) => {
            let path = path.display();
            progress(console, format!("files: {path} has flags of the node with others, and stays"));
        }
    }
}

fn count(directory: &Path) -> usize {
    fs::read_dir(directory).map_or(0, |entries| entries.flatten().count())
}

/// What `leave` does not remove, with how to remove it. `is_enabled`: whether the unit is started with the
/// machine.
fn left(record: &Record, paths: &Paths, pods: usize, is_enabled: bool) -> Vec<String> {
    let root = paths.root_dir.display();
    let mut lines = vec![format!(
        "the node {0} in the cluster: kubectl drain {0} --ignore-daemonsets, then kubectl delete node {0}",
        record.node
    )];
    if pods > 0 {
        lines.push(format!(
            "{pods} pods in {root}/pods, whose volumes may be mounted and whose containers run: crictl rmp -fa \
             ends them, findmnt shows the volumes"
        ));
    }
    if paths.root_dir.join(crate::config::OFFLINE_DIR).exists() {
        lines.push(format!(
            "the objects in {root}/offline, whose pods start in the next cluster with --offline: rm -r \
             {root}/offline removes them"
        ));
    }
    if is_enabled {
        lines.push(
            "coracle.service, which was enabled before coracle join, and starts with the machine: systemctl \
             disable coracle"
                .to_owned(),
        );
    }
    lines.push(format!("other state of the agent in {root}, and the images of the runtime"));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named_with_the_commands_that_remove_it() {
        let record = Record { node: "n1".into(), ..Record::default() };
        let paths = Paths { kubernetes_dir: "/k".into(), root_dir: "/r".into(), units_dir: "/u".into() };
        let lines = left(&record, &paths, 2, true).join("\n");
        for words in [
            "kubectl delete node n1",
            "2 pods in /r/pods",
            "systemctl disable coracle",
            "other state of the agent in /r",
        ] {
            assert!(lines.contains(words), "{words}: {lines}");
        }
        assert_eq!(left(&record, &paths, 0, false).len(), 2);
    }

    #[test]
    fn node_without_a_drop_in_has_its_flags_in_other_files_also_with_systemd() {
        let paths = Paths { kubernetes_dir: "/k".into(), root_dir: "/r".into(), units_dir: "/u".into() };
        let other = Record::default();
        let unit = Record { files: [(paths.drop_in(), String::new())].into(), ..Record::default() };
        for (record, has_systemd, expected) in
            [(&unit, true, true), (&other, true, false), (&unit, false, false), (&other, false, false)]
        {
            assert_eq!(uses_systemd(record, &paths, has_systemd), expected, "{record:?} {has_systemd}");
        }
    }

    #[test]
    fn node_leaves_after_its_unit_was_removed() {
        for (has_drop_in, has_unit, is_active, expected) in [
            (true, true, false, true),
            (true, false, true, true),
            (true, false, false, false),
            (false, true, true, false),
        ] {
            assert_eq!(can_stop(has_drop_in, || has_unit, || is_active), expected);
        }
    }

    #[test]
    fn unit_that_join_enabled_is_disabled_also_without_its_drop_in() {
        for (enabled, uses_systemd, has_unit, expected) in [
            (true, true, true, true),
            (false, true, true, false),
            (true, false, true, false),
            (true, true, false, false),
        ] {
            let record = Record { enabled, ..Record::default() };
            assert_eq!(must_disable(&record, uses_systemd, || has_unit), expected);
        }
    }

    #[test]
    fn directories_without_other_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            kubernetes_dir: dir.path().join("k"),
            root_dir: "/r".into(),
            units_dir: dir.path().join("u"),
        };
        let (authorities, drop_ins) = (dir.path().join("k/pki"), dir.path().join("u/coracle.service.d"));
        fs::create_dir_all(&authorities).unwrap();
        fs::create_dir_all(&drop_ins).unwrap();
        fs::write(drop_ins.join("20-own.conf"), "").unwrap();
        remove_directories(&paths, true);
        assert!(!authorities.exists() && paths.kubernetes_dir.exists() && drop_ins.exists());
        fs::remove_file(drop_ins.join("20-own.conf")).unwrap();
        remove_directories(&paths, false);
        assert!(drop_ins.exists());
        remove_directories(&paths, true);
        assert!(!drop_ins.exists());
    }

    #[test]
    fn stored_objects_of_the_cluster_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let paths =
            Paths { kubernetes_dir: "/k".into(), root_dir: dir.path().into(), units_dir: "/u".into() };
        fs::create_dir(dir.path().join("offline")).unwrap();
        let lines = left(&Record::default(), &paths, 0, false).join("\n");
        assert!(lines.contains(&format!("rm -r {}/offline", dir.path().display())), "{lines}");
    }
}
