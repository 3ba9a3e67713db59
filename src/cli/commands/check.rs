//! `coracle check`: the machine, the runtime and the agent; each line with its fix.
//! Works without an agent.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cgroups::{CgroupError, Cgroups, Driver, Layout};
use crate::cli::local::Output;
use crate::cli::table::Color;
use crate::config::{self, KubeletConfiguration};
use crate::cri::{self, CgroupDriver};
use crate::resources::preflight::{self, CheckLine, CheckStatus};
use crate::resources::small_machine::{self, RuntimeProcess};
use crate::server::{NodeReport, connect_local};
use crate::sources;
use crate::util::cgroup_mounts::read_table;
use crate::util::error_chain::{chain, without_codes};

use super::age;
use super::client::Client;
use super::console::Console;
use super::error::{CommandError, Outcome, checked};

const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";

/// A runtime that takes longer for its status is unusable.
const RUNTIME_LIMIT: Duration = Duration::from_secs(10);

/// The limit of the environment of the runtime, in bytes; the kernel's is 2 MiB.
const MAX_ENVIRONMENT: u64 = 2 << 20;

/// The directory that exists while systemd is the machine's init (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";

/// The configuration that the agent's unit names, used unless `--config` names another.
pub(super) const CONFIG: &str = "/etc/coracle/config.yaml";

pub(super) fn run(
    client: &Client,
    console: &mut Console<'_>,
    output: Output,
    root_dir: PathBuf,
    config: Option<&Path>,
) -> Outcome {
    let agent = client.get::<NodeReport>("/v1/status");
    // Also that of a running agent matters: it may have changed since.
    let (config_line, config) = configuration(config, Path::new(CONFIG));
    let config_line = config_line.or_else(|| {
        let text = format!("no --config given, and no {CONFIG}: the defaults of the fields count");
        agent.is_err().then(|| line("config", CheckStatus::Warn, text, "coracle check --config FILE"))
    });
    let lines = inspect(&agent, root_dir, config_line, config.as_ref());
    let shown = match console.document(output, &lines) {
        Ok(false) => print(console, &lines).map_err(CommandError::from),
        shown => shown.map(drop),
    };
    checked(shown, lines.iter().any(|line| line.standing == CheckStatus::Fail))
}

/// The checks of a machine for an agent that will start with this configuration. One that runs already may
/// have started with another, which allows swap, or names another runtime: it does not count.
pub(super) fn machine(root_dir: PathBuf, config: &KubeletConfiguration) -> Vec<CheckLine> {
    let absent = Err(CommandError::NotListening(PathBuf::new()));
    inspect(&absent, root_dir, None, Some(config))
}

fn inspect(
    agent: &Result<NodeReport, CommandError>,
    root_dir: PathBuf,
    config_line: Option<CheckLine>,
    config: Option<&KubeletConfiguration>,
) -> Vec<CheckLine> {
    let mut settings = preflight::Settings { root_dir, ..preflight::Settings::default() };
    if agent.is_ok() {
        // The configuration of a running agent allows what the defaults forbid.
        settings.fail_swap_on = false;
        settings.fail_cgroup_v1 = false;
    }
    if let Some(config) = config {
        apply(&mut settings, config, agent.is_ok());
    }
    let mut lines = preflight::preflight(&settings);
    // A running agent reports the problems itself, and may have another directory.
    if agent.is_err() {
        lines.extend(local_objects(&settings.root_dir.join(config::LOCAL_OBJECTS)));
    }
    lines.extend(config_line);
    lines.extend(config.and_then(cgroup_root));
    let configured = config.map(|config| config.container_runtime_endpoint.as_str());
    let endpoint = match agent {
        Ok(report) if !report.runtime.endpoint.is_empty() => report.runtime.endpoint.as_str(),
        _ => configured.filter(|endpoint| !endpoint.is_empty()).unwrap_or(DEFAULT_ENDPOINT),
    };
    lines.extend(small_machine::check(&settings.roots, || runtime_process(endpoint, Path::new("/proc"))));
    let runtime = runtime(endpoint, config, Path::new(SYSTEMD).exists());
    // A network that works may be configured elsewhere.
    if runtime.iter().any(|line| line.name == "pod network" && line.standing == CheckStatus::Ok) {
        lines.retain(|line| line.name != "cni config" || line.standing == CheckStatus::Ok);
    }
    lines.extend(runtime);
    lines.extend(agent_lines(agent));
    for line in &mut lines {
        line.message = without_codes(&line.message);
    }
    lines
}

/// Loads the configuration that `given` names, or else `usual` if it exists.
fn configuration(given: Option<&Path>, usual: &Path) -> (Option<CheckLine>, Option<KubeletConfiguration>) {
    let Some(file) = given.or_else(|| usual.exists().then_some(usual)) else { return (None, None) };
    let request = config::LoadRequest { file: Some(file.to_owned()), ..config::LoadRequest::default() };
    match config::load(&request) {
        Ok(loaded) => {
            (Some(line("config", CheckStatus::Ok, file.display().to_string(), "")), Some(loaded.config))
        }
        Err(problems) => {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let fix = "correct it; coracle --check-config --config FILE shows all problems";
            (Some(line("config", CheckStatus::Fail, problems.join("; "), fix)), None)
        }
    }
}

/// A running agent has started with its configuration, so swap and cgroups do not forbid that.
fn apply(settings: &mut preflight::Settings, config: &KubeletConfiguration, runs: bool) {
    settings.fail_swap_on = config.fail_swap_on && !runs;
    settings.fail_cgroup_v1 = config.fail_cgroup_v1 && !runs;
    settings.protect_kernel_defaults = config.protect_kernel_defaults;
    settings.limited_swap = config.memory_swap.swap_behavior == "LimitedSwap";
}

/// The ConfigMaps and Secrets for static pods; nothing without their directory.
fn local_objects(directory: &Path) -> Vec<CheckLine> {
    const NAME: &str = "local objects";
    match sources::local::check(directory) {
        None => Vec::new(),
        Some(problems) if problems.is_empty() => {
            vec![line(NAME, CheckStatus::Ok, directory.display().to_string(), "")]
        }
        Some(problems) => {
            let fix = "correct the file; static pods that need its objects do not start";
            problems.into_iter().map(|problem| line(NAME, CheckStatus::Warn, problem, fix)).collect()
        }
    }
}

/// With systemd's driver, cgroups are made by systemd. A runtime that does not report its driver
/// has the configured one.
fn driver(
    reported: Option<CgroupDriver>,
    config: Option<&KubeletConfiguration>,
    systemd_runs: bool,
) -> CheckLine {
    let name = "cgroup driver";
    let configured = config.map_or("cgroupfs", |config| config.cgroup_driver.as_str());
    let (driver, by) = match reported {
        Some(CgroupDriver::Systemd) => ("systemd", "the runtime"),
        Some(CgroupDriver::Cgroupfs) => ("cgroupfs", "the runtime"),
        None => (configured, "the configuration"),
    };
    if driver == "systemd" && !systemd_runs {
        let fix = "use the driver cgroupfs (containerd: SystemdCgroup = false; CRI-O: cgroup_manager), or run systemd";
        return line(name, CheckStatus::Fail, format!("systemd, says {by}, but systemd does not run"), fix);
    }
    if reported.is_none() && config.is_some() {
        let message = format!("{driver}, says the configuration; the runtime does not report its own");
        let fix = "make sure that the runtime has the same, or update the runtime";
        return line(name, CheckStatus::Warn, message, fix);
    }
    line(name, CheckStatus::Ok, format!("{driver}, says {by}"), "")
}

/// A `cgroupRoot` that does not exist, with which the agent does not start.
fn cgroup_root(config: &KubeletConfiguration) -> Option<CheckLine> {
    if !config.cgroups_per_qos || config.cgroup_root.is_empty() {
        return None;
    }
    let check = || -> Result<(), CgroupError> {
        let layout = Layout::new(&config.cgroup_root, Driver::Cgroupfs)?;
        let mountinfo = read_table(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        Cgroups::new(layout, &mountinfo, Path::new("/sys/fs/cgroup"), Vec::new(), "")?.check_root()
    };
    let error = check().err()?;
    let fix = "make this cgroup before the agent starts, or remove cgroupRoot from the configuration";
    Some(line("cgroup root", CheckStatus::Fail, error.to_string(), fix))
}

fn line(name: &str, standing: CheckStatus, message: String, fix: &str) -> CheckLine {
    CheckLine { name: name.to_owned(), standing, message, fix: fix.to_owned() }
}

fn runtime(endpoint: &str, config: Option<&KubeletConfiguration>, systemd_runs: bool) -> Vec<CheckLine> {
    let settings = cri::Settings {
        runtime_endpoint: endpoint.to_owned(),
        image_endpoint: None,
        request_timeout: RUNTIME_LIMIT,
    };
    let outcome = cri::connect(settings).and_then(|(runtime, _)| {
        let (version, status) = (runtime.version()?, runtime.status()?);
        // Older runtimes do not have this request.
        Ok((version, status, runtime.cgroup_driver().ok().flatten()))
    });
    let (version, status, reported) = match outcome {
        Ok(versions) => versions,
        Err(error) => {
            let message = format!("no usable runtime at {endpoint}: {}", chain(&error));
            let fix = fix_of_runtime(&message);
            return vec![line("runtime", CheckStatus::Fail, message, fix)];
        }
    };
    let name = format!("{} {} at {endpoint}", version.runtime_name, version.runtime_version);
    let mut lines = vec![match status.ready {
        Ok(()) => line("runtime", CheckStatus::Ok, name, ""),
        Err(error) => {
            let fix = "read the runtime's log";
            line("runtime", CheckStatus::Fail, format!("{name} is not ready: {error}"), fix)
        }
    }];
    if config.is_none_or(|config| config.cgroups_per_qos) {
        lines.push(driver(reported, config, systemd_runs));
    }
    if let Err(error) = status.network_ready {
        let fix = "install a CNI configuration; until then only pods with hostNetwork start";
        lines.push(line("pod network", CheckStatus::Warn, error.to_string(), fix));
    } else {
        lines.push(line("pod network", CheckStatus::Ok, "the runtime's network is ready".to_owned(), ""));
    }
    lines
}

/// The process behind the socket of the runtime, if this user may read its environment. Nothing is sent to it.
/// A socket of systemd's belongs to the first process, which is no runtime.
fn runtime_process(endpoint: &str, proc: &Path) -> Option<RuntimeProcess> {
    let socket = Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint));
    let connection = socket.is_absolute().then(|| connect_local(socket).ok()).flatten()?;
    let process = rustix::net::sockopt::socket_peercred(&connection).ok()?.pid.as_raw_nonzero().get();
    let process = u32::try_from(process).ok().filter(|process| *process != 1)?;
    let directory = proc.join(process.to_string());
    let name = std::fs::read_to_string(directory.join("comm")).ok()?.trim().to_owned();
    let mut environment = Vec::new();
    let file = std::fs::File::open(directory.join("environ")).ok()?;
    file.take(MAX_ENVIRONMENT).read_to_end(&mut environment).ok()?;
    Some(RuntimeProcess { name, process, environment })
}

/// What to do about a runtime that cannot be used. `message`: the error of its connection.
fn fix_of_runtime(message: &str) -> &'static str {
    // A server without the CRI. The package containerd.io has it switched off.
    if message.contains("unknown service") {
        "containerd: remove cri from disabled_plugins in /etc/containerd/config.toml, and restart it; \
         releases before 1.6 are too old"
    } else {
        "start a container runtime there, or set containerRuntimeEndpoint"
    }
}

fn agent_lines(agent: &Result<NodeReport, CommandError>) -> Vec<CheckLine> {
    let report = match agent {
        Ok(report) => report,
        Err(error @ CommandError::NoPermission(_)) => {
            return vec![line("agent", CheckStatus::Warn, error.to_string(), "run this as root")];
        }
        Err(error) => {
            let fix = "start it: systemctl start coracle, rc-service coracle start, or /usr/local/lib/coracle/supervise start coracle";
            return vec![line("agent", CheckStatus::Warn, error.to_string(), fix)];
        }
    };
    let uptime = age::human(i64::try_from(report.uptime_seconds).unwrap_or(i64::MAX));
    let message = format!("coracle {} on {}, up {uptime}", report.version, report.node);
    let mut lines = vec![line("agent", CheckStatus::Ok, message, "")];
    let warn = |problem: &String| line("agent", CheckStatus::Warn, problem.clone(), "see coracle status");
    lines.extend(report.problems.iter().map(warn));
    lines
}

pub(super) fn print(console: &mut Console<'_>, lines: &[CheckLine]) -> std::io::Result<()> {
    let width = lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    for CheckLine { name, standing, message, fix } in lines {
        let (mark, color) = match standing {
            CheckStatus::Ok => ("ok  ", Color::Green),
            CheckStatus::Warn => ("warn", Color::Yellow),
            CheckStatus::Fail => ("fail", Color::Red),
        };
        let mark = console.paint.put(Some(color), mark);
        let message = crate::cli::table::visible(message);
        writeln!(console.out, "{mark}  {name:width$}  {message}")?;
        if !fix.is_empty() {
            writeln!(console.out, "{:6}{:width$}  → {fix}", "", "")?;
        }
    }
    console.out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use expect_test::expect;

    #[test]
    fn lines_are_printed_with_their_fixes() {
        let lines = [
            line("disk", CheckStatus::Ok, "10 GiB".into(), ""),
            line("runtime", CheckStatus::Fail, "away\u{1b}".into(), "start it"),
        ];
        let mut out = Vec::new();
        let now = jiff::Timestamp::UNIX_EPOCH;
        print(&mut Console { out: &mut out, paint: Paint::new(false), now }, &lines).unwrap();
        expect![[r#"
            ok    disk     10 GiB
            fail  runtime  away\u{1b}
                           → start it
        "#]]
        .assert_eq(&String::from_utf8(out).unwrap());
    }

    #[test]
    fn runtime_with_its_cri_switched_off_is_not_reported_as_absent() {
        let off = "rpc error: code = Unimplemented desc = unknown service runtime.v1.RuntimeService";
        assert!(fix_of_runtime(off).contains("disabled_plugins"));
        assert!(fix_of_runtime("No such file or directory").starts_with("start a container runtime"));
    }

    #[test]
    fn configuration_is_that_of_the_option_or_of_the_usual_file() {
        let dir = tempfile::tempdir().unwrap();
        let usual = dir.path().join("config.yaml");
        let checked = |given: Option<&Path>| {
            let (line, config) = configuration(given, &usual);
            (line.map(|line| line.standing), config.map(|config| config.fail_swap_on))
        };
        assert_eq!(checked(None), (None, None));
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        std::fs::write(&usual, format!("{head}failSwapOn: false\n")).unwrap();
        assert_eq!(checked(None), (Some(CheckStatus::Ok), Some(false)));
        let other = dir.path().join("other.yaml");
        std::fs::write(&other, head).unwrap();
        assert_eq!(checked(Some(&other)), (Some(CheckStatus::Ok), Some(true)));
        std::fs::write(&other, format!("{head}maxPods: many\n")).unwrap();
        assert_eq!(checked(Some(&other)), (Some(CheckStatus::Fail), None));
        assert_eq!(checked(Some(&dir.path().join("absent"))), (Some(CheckStatus::Fail), None));

        let mut settings = preflight::Settings::default();
        let (_, config) = configuration(None, &usual);
        let mut config = config.unwrap();
        config.protect_kernel_defaults = true;
        config.memory_swap.swap_behavior = "LimitedSwap".to_owned();
        config.fail_cgroup_v1 = true;
        apply(&mut settings, &config, false);
        assert!(!settings.fail_swap_on && settings.fail_cgroup_v1);
        assert!(settings.protect_kernel_defaults && settings.limited_swap);
        apply(&mut settings, &config, true);
        assert!(!settings.fail_cgroup_v1);
    }

    #[test]
    fn machine_is_checked_for_the_given_configuration_and_without_an_agent() {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = format!("unix://{}/none.sock", dir.path().display());
        let config = KubeletConfiguration {
            container_runtime_endpoint: endpoint.clone(),
            fail_swap_on: true,
            ..KubeletConfiguration::default()
        };
        let lines = machine(dir.path().to_owned(), &config);
        let found = |name: &str| lines.iter().find(|line| line.name == name).unwrap();
        assert_eq!(found("runtime").standing, CheckStatus::Fail);
        assert!(found("runtime").message.contains(&endpoint), "{}", found("runtime").message);
        assert_eq!(found("agent").standing, CheckStatus::Warn);
        // It would be that failSwapOn is false.
        assert!(!found("swap").message.contains("is false"), "{}", found("swap").message);
    }

    #[test]
    fn runtime_is_the_process_that_listens() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("runtime.sock");
        let endpoint = format!("unix://{}", socket.display());
        let proc = Path::new("/proc");
        assert_eq!(runtime_process(&endpoint, proc), None);
        assert_eq!(runtime_process("http://example.org", proc), None);
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let found = runtime_process(&endpoint, proc).unwrap();
        assert_eq!(found.process, std::process::id());
        let own = std::fs::read("/proc/self/environ").unwrap();
        assert!(!found.name.is_empty() && found.environment == own);
        assert_eq!(runtime_process(&socket.display().to_string(), proc), Some(found));
        // As if the environment could not be read.
        assert_eq!(runtime_process(&endpoint, dir.path()), None);
    }

    #[test]
    fn systemd_driver_without_systemd_fails() {
        let config = |driver: &str| KubeletConfiguration {
            cgroup_driver: driver.to_owned(),
            ..KubeletConfiguration::default()
        };
        let systemd = Some(CgroupDriver::Systemd);
        assert_eq!(driver(systemd, None, true).standing, CheckStatus::Ok);
        assert_eq!(driver(systemd, None, false).standing, CheckStatus::Fail);
        assert_eq!(driver(systemd, Some(&config("cgroupfs")), false).standing, CheckStatus::Fail);
        assert_eq!(
            driver(Some(CgroupDriver::Cgroupfs), Some(&config("systemd")), false).standing,
            CheckStatus::Ok
        );
        assert_eq!(driver(None, Some(&config("systemd")), false).standing, CheckStatus::Fail);
        assert_eq!(driver(None, Some(&config("systemd")), true).standing, CheckStatus::Warn);
        assert_eq!(driver(None, None, false).standing, CheckStatus::Ok);
    }

    #[test]
    fn problems_of_local_objects_are_warnings() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(local_objects(&dir.path().join("none")).len(), 0);
        assert_eq!(local_objects(dir.path())[0].standing, CheckStatus::Ok);
        std::fs::write(dir.path().join("a.yaml"), "kind: ConfigMap\n").unwrap();
        let lines = local_objects(dir.path());
        assert!(lines.iter().all(|line| line.standing == CheckStatus::Warn));
        let place = dir.path().join("a.yaml");
        assert_eq!(lines[0].message, format!("{}:1: apiVersion: Required value", place.display()));
    }

    #[test]
    fn an_absent_runtime_fails_and_an_absent_agent_warns() {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = format!("unix://{}/none.sock", dir.path().display());
        assert_eq!(runtime(&endpoint, None, true)[0].standing, CheckStatus::Fail);
        assert_eq!(runtime("http://example.org", None, true)[0].standing, CheckStatus::Fail);
        let absent = Client::new(&dir.path().join("coracle.sock")).get::<NodeReport>("/v1/status");
        assert_eq!(agent_lines(&absent)[0].standing, CheckStatus::Warn);
        let report = NodeReport { problems: vec!["x".into()], ..NodeReport::default() };
        assert_eq!(agent_lines(&Ok(report)).len(), 2);
    }
}
