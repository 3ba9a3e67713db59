//! The unit of the agent: a drop-in with the flags of a node of a cluster, as the one of kubeadm for the
//! unit `kubelet`, and systemctl.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::util::atomic_file;
use crate::util::child::{self, Limits};
use crate::util::stop::StopToken;

use super::files::{self, HEADER, Paths};
use super::refusal::{Reason, Refusal};

const UNIT: &str = "coracle.service";

/// The directory that exists while systemd is the machine's init (sd_booted(3)).
pub(super) const SYSTEMD: &str = "/run/systemd/system";

/// Where units of the operator are.
pub(super) const UNITS: &str = "/etc/systemd/system";

/// Where a unit may be (systemd.unit(5)).
const UNIT_DIRECTORIES: [&str; 4] =
    [UNITS, "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

/// Flags of the operator (Go: the packages of kubeadm).
pub(super) const EXTRA: &str = "/etc/default/kubelet";

/// Where the program is installed.
const PROGRAMS: [&str; 2] = ["/usr/local/bin/coracle", "/usr/bin/coracle"];

/// systemctl only queues the start, which may take until the node has its certificate.
const LIMITS: Limits = Limits { time: Duration::from_secs(60), output_bytes: 64 * 1024 };

/// A query during the wait, which the next one repeats.
const QUERY_LIMITS: Limits = Limits { time: Duration::from_secs(10), output_bytes: 1024 * 1024 };

/// The last lines of the log that are shown, and the most characters of each.
const LINES: usize = 10;
const LINE_CHARS: usize = 500;

/// Whether the unit of the agent is installed.
pub(super) fn has_unit() -> bool {
    UNIT_DIRECTORIES.iter().any(|directory| Path::new(directory).join(UNIT).exists())
}

/// The text of the unit of the agent that counts. An unreadable one is none.
pub(super) fn unit() -> Option<String> {
    let read = |directory: &&str| files::read(&Path::new(directory).join(UNIT)).ok().flatten();
    let bytes = UNIT_DIRECTORIES.iter().find_map(read)?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The program that a unit starts.
fn program_of(unit: &str) -> Option<&str> {
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart="))?;
    // A path may have prefixes (systemd.service(5)).
    Some(line.split_whitespace().next()?.trim_start_matches(['-', '@', ':', '+', '!', '|']))
}

/// The program of the agent: that of its unit, which a package replaces in an upgrade; else an installed
/// one, else this one. `unit`: its text.
pub(super) fn program(unit: Option<&str>, exists: impl Fn(&str) -> bool) -> PathBuf {
    let started = unit.and_then(program_of);
    match started.into_iter().chain(PROGRAMS).find(|path| path.starts_with('/') && exists(path)) {
        Some(installed) => PathBuf::from(installed),
        None => std::env::current_exe().unwrap_or_else(|_| PathBuf::from("coracle")),
    }
}

/// The flags of the agent, without those of `kubeadm-flags.env`.
pub(super) fn flags(paths: &Paths) -> Vec<String> {
    let mut flags = vec![
        format!("--bootstrap-kubeconfig={}", paths.bootstrap().display()),
        format!("--kubeconfig={}", paths.kubeconfig().display()),
        format!("--config={}", paths.config().display()),
    ];
    if paths.root_dir != Path::new("/var/lib/kubelet") {
        flags.push(format!("--root-dir={}", paths.root_dir.display()));
        flags.push(format!("--cert-dir={}", paths.certificates().display()));
    }
    flags
}

/// The drop-in. As with that of kubeadm, flags of the operator are in `/etc/default/kubelet`;
/// `packaging/install --offline` adds its flag there.
pub(super) fn drop_in(program: &Path, paths: &Paths) -> String {
    format!(
        "{HEADER}\n[Service]\nEnvironmentFile=-{}\nEnvironmentFile=-{EXTRA}\nExecStart=\n\
         ExecStart={} {} $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS\n",
        paths.flags().display(),
        program.display(),
        flags(paths).join(" ")
    )
}

/// The command that starts the agent where no unit does. `file`: the content of `kubeadm-flags.env`.
pub(super) fn command_line(program: &Path, paths: &Paths, file: &str) -> String {
    let more = file.trim_end().trim_start_matches("KUBELET_KUBEADM_ARGS=").trim_matches('"');
    let line = format!("{} {} {more}", program.display(), flags(paths).join(" "));
    line.trim_end().to_owned()
}

/// Runs systemctl; returns its standard output.
fn systemctl(arguments: &[&str]) -> Result<String, Refusal> {
    let shown = format!("systemctl {}", arguments.join(" "));
    let failed = |reason: String| {
        let advice = "read the log of the agent: journalctl -u coracle; then run the same command again";
        Refusal::new(Reason::Service, format!("{shown}: {reason}"), advice)
    };
    let mut command = Command::new("systemctl");
    let output = child::run(command.args(arguments), &[], LIMITS, &StopToken::never())
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Whether the unit is started with the machine.
pub(super) fn is_enabled() -> bool {
    systemctl(&["is-enabled", UNIT]).is_ok_and(|state| enables(&state))
}

/// `state`: the output of systemctl(1). Other states than this one end with the machine, such as
/// `enabled-runtime`, or a unit has nothing to enable.
fn enables(state: &str) -> bool {
    state.trim() == "enabled"
}

/// Whether the unit runs, or is being started: that takes until the node has its certificate.
pub(super) fn is_active() -> bool {
    systemctl(&["show", "--property=ActiveState", UNIT]).is_ok_and(|property| is_started(&property))
}

/// The id of the process of the unit, if it runs.
pub(super) fn main_process() -> Option<u32> {
    main_process_of(&systemctl(&["show", "--property=MainPID", UNIT]).ok()?)
}

/// `property`: the output of systemctl(1), with 0 if there is no process.
fn main_process_of(property: &str) -> Option<u32> {
    property.trim().strip_prefix("MainPID=")?.parse().ok().filter(|pid| *pid > 0)
}

/// `property`: the output of systemctl(1).
fn is_started(property: &str) -> bool {
    matches!(
        property.trim().strip_prefix("ActiveState="),
        Some("active" | "activating" | "reloading" | "refreshing")
    )
}

/// What systemd reports of the unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct UnitState {
    pub active: String,
    /// Since the last manual start, which may be that of an earlier command (systemd 235).
    pub restarts: u64,
    /// Why it has ended, such as `exit-code`.
    pub result: String,
    /// A start or stop is still queued.
    pub has_job: bool,
}

/// The state of the unit; `None`: systemd does not respond.
pub(super) fn state() -> Option<UnitState> {
    let properties = ["ActiveState", "NRestarts", "Result", "Job"].map(|name| format!("--property={name}"));
    let arguments = std::iter::once("show").chain(properties.iter().map(String::as_str)).chain([UNIT]);
    Some(state_of(&query("systemctl", arguments)?))
}

/// `properties`: the output of systemctl(1), a line for each.
fn state_of(properties: &str) -> UnitState {
    let mut state = UnitState::default();
    for (name, value) in properties.lines().filter_map(|line| line.split_once('=')) {
        match name {
            "ActiveState" => value.clone_into(&mut state.active),
            "NRestarts" => state.restarts = value.parse().unwrap_or(0),
            "Result" => value.clone_into(&mut state.result),
            // Without a job there is no line, no value or the number 0.
            "Job" => state.has_job = !matches!(value, "" | "0"),
            _ => {}
        }
    }
    state
}

/// The last lines that the agent has logged; none without a journal.
pub(super) fn last_lines() -> Vec<String> {
    let lines = format!("--lines={LINES}");
    let unit = format!("--unit={UNIT}");
    let arguments = [unit.as_str(), lines.as_str(), "--no-pager", "--quiet", "--output=cat"];
    end_of(&query("journalctl", arguments).unwrap_or_default())
}

fn end_of(log: &str) -> Vec<String> {
    let lines: Vec<&str> = log.lines().collect();
    let last = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default();
    last.iter().map(|line| line.chars().take(LINE_CHARS).collect()).collect()
}

/// The standard output of a program that succeeds.
fn query<'a>(program: &str, arguments: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let mut command = Command::new(program);
    let output = child::run(command.args(arguments), &[], QUERY_LIMITS, &StopToken::never()).ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The drop-in with the arguments of the agent that counts in the place of the one of `join`, if there is
/// one: of all directories the last name wins, and a name counts in the first directory that has it
/// (systemd.unit(5)).
pub(super) fn later_drop_in(paths: &Paths) -> Option<PathBuf> {
    let mut directories = vec![paths.units_dir.clone(), PathBuf::from(SYSTEMD)];
    directories.extend(UNIT_DIRECTORIES.into_iter().map(PathBuf::from));
    last_drop_in(&directories, paths.drop_in().file_name()?)
}

fn last_drop_in(directories: &[PathBuf], own: &OsStr) -> Option<PathBuf> {
    let mut later: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    for directory in directories {
        let entries = fs::read_dir(directory.join(format!("{UNIT}.d"))).into_iter().flatten().flatten();
        for entry in entries {
            let (name, path) = (entry.file_name(), entry.path());
            if name.as_os_str() > own && path.extension().is_some_and(|extension| extension == "conf") {
                later.entry(name).or_insert(path);
            }
        }
    }
    let sets_arguments = |path: &PathBuf| {
        let text = files::read(path).ok().flatten().unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.lines().filter_map(|line| line.split_once('=')).any(|(name, _)| name.trim() == "ExecStart")
    };
    later.into_values().rev().find(sets_arguments)
}

/// Reads the drop-in, and starts the agent, now and with the machine.
pub(super) fn start() -> Result<(), Refusal> {
    systemctl(&["daemon-reload"])?;
    systemctl(&["enable", UNIT])?;
    sync_links(Path::new(UNITS));
    systemctl(&["restart", "--no-block", UNIT]).map(drop)
}

/// Stops the agent.
pub(super) fn stop() -> Result<(), Refusal> {
    systemctl(&["stop", UNIT]).map(drop)
}

/// The agent is no longer started with the machine.
pub(super) fn disable() -> Result<(), Refusal> {
    systemctl(&["disable", UNIT])?;
    sync_links(Path::new(UNITS));
    Ok(())
}

/// Makes a link of systemctl(1) permanent, which it does not do: the files of the node are synced, and after a
/// power cut a node that has joined would not start with the machine, or one that has left would.
fn sync_links(units: &Path) {
    for directory in link_directories(units) {
        // Best effort: the unit is enabled or disabled, and a power cut in the next seconds is rare.
        let _ = atomic_file::sync_directory(&directory);
    }
}

/// The directories in which units are enabled, and the one above them. `units`: that of the operator's units.
fn link_directories(units: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(units).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_of_links = |path: &PathBuf| {
        let named = path.extension().is_some_and(|extension| extension == "wants" || extension == "requires");
        named && path.is_dir()
    };
    entries.filter(is_of_links).chain([units.to_owned()]).collect()
}

/// Reads the units after the drop-in is gone.
pub(super) fn reload() -> Result<(), Refusal> {
    systemctl(&["daemon-reload"]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    fn paths(root_dir: &str) -> Paths {
        Paths { kubernetes_dir: "/etc/kubernetes".into(), root_dir: root_dir.into(), units_dir: UNITS.into() }
    }

    #[test]
    fn drop_in_replaces_the_flags_of_the_unit() {
        expect![[r#"
            # Written by coracle join, and removed by coracle leave.
            [Service]
            EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
            EnvironmentFile=-/etc/default/kubelet
            ExecStart=
            ExecStart=/usr/local/bin/coracle --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
        "#]]
        .assert_eq(&drop_in(Path::new("/usr/local/bin/coracle"), &paths("/var/lib/kubelet")));
    }

    #[test]
    fn unit_that_is_being_started_is_not_started_again() {
        for (state, expected) in [
            ("active", true),
            ("activating", true),
            ("reloading", true),
            ("inactive", false),
            ("failed", false),
        ] {
            assert_eq!(is_started(&format!("ActiveState={state}\n")), expected, "{state}");
        }
        assert!(!is_started(""));
    }

    #[test]
    fn unit_that_is_enabled_until_the_machine_ends_counts_as_disabled() {
        assert!(enables("enabled\n"));
        for state in ["enabled-runtime", "disabled", "static", "masked", ""] {
            assert!(!enables(state), "{state}");
        }
    }

    #[test]
    fn state_of_a_unit_that_restarts_is_read() {
        let text = "Job=0\nNRestarts=3\nActiveState=activating\nResult=exit-code\n";
        let expected = UnitState {
            active: "activating".into(),
            restarts: 3,
            result: "exit-code".into(),
            has_job: false,
        };
        assert_eq!(state_of(text), expected);
        assert!(state_of("Job=17\n").has_job && !state_of("Job=\nNRestarts=[not set]\n").has_job);
        assert_eq!(state_of("x\n"), UnitState::default());
    }

    #[test]
    fn only_the_end_of_a_log_is_shown() {
        let log: String = (0..30).map(|number| format!("line {number}\n")).collect();
        let lines = end_of(&log);
        assert_eq!((lines.len(), lines[0].as_str(), lines[9].as_str()), (10, "line 20", "line 29"));
        assert_eq!(end_of(&"ä".repeat(9000)), ["ä".repeat(500)]);
        assert!(end_of("").is_empty());
    }

    #[test]
    fn directories_of_the_links_of_units_are_synced_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["multi-user.target.wants", "x.target.requires", "coracle.service.d"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("file.wants"), "").unwrap();
        let mut found = link_directories(dir.path());
        found.sort();
        let expected = ["", "multi-user.target.wants", "x.target.requires"].map(|name| dir.path().join(name));
        assert_eq!(found, expected);
        let none = dir.path().join("none");
        assert_eq!(link_directories(&none), std::slice::from_ref(&none));
        sync_links(&none);
    }

    #[test]
    fn process_of_a_unit_that_does_not_run_is_none() {
        for (property, expected) in
            [("MainPID=17\n", Some(17)), ("MainPID=0", None), ("MainPID=", None), ("", None)]
        {
            assert_eq!(main_process_of(property), expected, "{property}");
        }
    }

    #[test]
    fn drop_in_that_overrides_the_arguments_of_join_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let [etc, usr] = ["etc", "usr"].map(|name| dir.path().join(name));
        let write = |root: &Path, name: &str, text: &str| {
            let path = root.join("coracle.service.d").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        let found = || last_drop_in(&[etc.clone(), usr.clone()], OsStr::new("10-join.conf"));
        for (name, text) in [
            ("05-early.conf", "[Service]\nExecStart=/x\n"),
            ("10-join.conf", "[Service]\nExecStart=/own\n"),
            ("20-nice.conf", "[Service]\nNice=5\n#ExecStart=/x\nExecStartPre=/x\n"),
            ("take-over.conf.bak", "[Service]\nExecStart=/x\n"),
        ] {
            write(&etc, name, text);
        }
        assert_eq!(found(), None);
        let take_over = write(&usr, "take-over.conf", "[Service]\nExecStart =\nExecStart=/x\n");
        assert_eq!(found(), Some(take_over));
        write(&etc, "take-over.conf", "");
        assert_eq!(found(), None, "the name counts in the first directory");
    }

    #[test]
    fn another_state_directory_becomes_flags() {
        let line =
            command_line(Path::new("/c"), &paths("/data"), "KUBELET_KUBEADM_ARGS=\"--node-ip=1.2.3.4\"\n");
        assert!(line.ends_with("--root-dir=/data --cert-dir=/data/pki --node-ip=1.2.3.4"), "{line}");
        let line = command_line(Path::new("/c"), &paths("/var/lib/kubelet"), "KUBELET_KUBEADM_ARGS=\"\"\n");
        assert!(line.ends_with("--config=/var/lib/kubelet/config.yaml"), "{line}");
    }

    #[test]
    fn installed_program_comes_before_this_one() {
        assert_eq!(program(None, |path| path == "/usr/bin/coracle"), Path::new("/usr/bin/coracle"));
        assert_eq!(program(None, |_| true), Path::new("/usr/local/bin/coracle"));
        assert_eq!(program(None, |_| false), std::env::current_exe().unwrap());
    }

    #[test]
    fn program_of_the_unit_comes_before_another_installation() {
        let unit = "[Service]\nEnvironmentFile=-/e\nExecStart=-/usr/bin/coracle $CORACLE_ARGS\n";
        assert_eq!(program(Some(unit), |_| true), Path::new("/usr/bin/coracle"));
        let gone = program(Some(unit), |path| path != "/usr/bin/coracle");
        assert_eq!(gone, Path::new("/usr/local/bin/coracle"));
        for other in ["", "[Service]\nExecStart=\n", "[Service]\nExecStart=coracle\n"] {
            assert_eq!(program(Some(other), |_| true), Path::new("/usr/local/bin/coracle"), "{other}");
        }
    }
}
