//! `coracle join` makes this machine a node of a cluster, as `kubeadm join` does for a worker, and
//! `coracle leave` removes what it wrote. Needs no agent.
//!
//! Each step reads what is there and does what is missing, so the same command continues an interrupted
//! one. What is written before the agent starts is removed if a later step fails.
//!
//! Go: cmd/kubeadm/app/cmd/join.go, cmd/kubeadm/app/cmd/phases/join.

mod arguments;
mod bundle;
mod configuration;
mod discovery;
mod drain;
mod files;
pub(super) mod leave;
mod lock;
mod plane;
mod port;
mod preflight;
mod refusal;
mod service;
mod wait;
mod write_bundle;

use std::cell::RefCell;
use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cli::exit::Exit;
use crate::cli::join_options::{JoinMethod, JoinOptions};
use crate::cli::table::{visible, visible_lines};
use crate::config::defaults::get;
use crate::config::{LoadRequest, LoadedConfig, load_content};
use crate::model::names::is_dns_subdomain;
use crate::resources::{Roots, machine};
use crate::server::{KUBERNETES_VERSION, root_dir_owner};
use crate::util::error_chain::without_codes;
use crate::util::stop::StopToken;

use super::check;
use super::console::Console;
use super::error::{Outcome, print_stderr};

use bundle::JoinBundle;
use files::{Action, FilePlan, Paths, PlannedFile, Record};
use plane::{Cluster, Credentials, JoinError};
use preflight::{Course, Machine};
use refusal::{Reason, Refusal};
use wait::{Observation, UnitWatch};

/// The time between two readings of the node's state.
const INTERVAL: Duration = Duration::from_secs(1);

/// The most problems of a configuration that are printed.
const MAX_PROBLEMS: usize = 10;

pub(super) fn run(console: &mut Console<'_>, options: &JoinOptions) -> Outcome {
    let paths = Paths {
        kubernetes_dir: options.kubernetes_dir.clone(),
        root_dir: options.root_dir.clone(),
        units_dir: service::UNITS.into(),
    };
    let result = match &options.write_bundle {
        Some(target) => write_bundle::run(console, options, target, &mut std::io::stdin().lock()),
        None => join(console, options, &paths),
    };
    Ok(exit("join", result))
}

/// Makes this machine a node, with the options of the command and those of its bundle.
fn join(console: &mut Console<'_>, command: &JoinOptions, paths: &Paths) -> Result<(), Refusal> {
    let JoinMethod::Bundle(file) = &command.method else {
        return Attempt { console, options: command, bundle: None, paths }.run();
    };
    // Before the file, which only root reads.
    let is_root = rustix::process::geteuid().is_root();
    step("preflight", preflight::check_user(is_root, command.dry_run))?;
    let bundle = step("bundle", bundle::read(file))?;
    let options = step("bundle", bundle.options(command, file))?;
    Attempt { console, options: &options, bundle: Some(&bundle), paths }.run()
}

/// Prints why a command ended, and what to do.
fn exit(command: &str, result: Result<(), Refusal>) -> Exit {
    let Err(refusal) = result else { return Exit::Success };
    print_stderr(&format!("{command}: {}", refusal.text));
    if !refusal.advice.is_empty() {
        print_stderr(&format!("{command}: what to do: {}", refusal.advice));
    }
    refusal.exit()
}

/// Names the step in the text of its refusal.
fn step<T, E: Into<Refusal>>(name: &str, result: Result<T, E>) -> Result<T, Refusal> {
    result.map_err(|error| {
        let refusal: Refusal = error.into();
        Refusal { text: format!("{name}: {}", refusal.text), ..refusal }
    })
}

/// Prints a line of progress. The command goes on if the reader of its output is gone.
fn progress(console: &mut Console<'_>, text: impl Display) {
    let _ = writeln!(console.out, "{}", visible(&without_codes(&text.to_string())));
    let _ = console.out.flush();
}

/// Finds the cluster of a command, and prints why that takes longer. `input`: standard input.
fn discover(
    console: &mut Console<'_>,
    options: &JoinOptions,
    bundle: Option<&JoinBundle>,
    input: &mut dyn Read,
) -> Result<(Cluster, Credentials), Refusal> {
    progress(console, "discovery: reading the address and the authority of the cluster");
    let shown = RefCell::new((console, String::new()));
    let report = |error: &JoinError| {
        let mut shown = shown.borrow_mut();
        let (console, last) = &mut *shown;
        repeated(console, last, error);
    };
    step("discovery", discovery::discover(options, bundle, input, &report))
}

/// Prints why a request is repeated. `last`: the reason of the repetition before, which is not printed again.
fn repeated(console: &mut Console<'_>, last: &mut String, error: &JoinError) {
    let text = error.to_string();
    if text != *last {
        progress(console, format!("discovery: trying again: {text}"));
        *last = text;
    }
}

/// The name of the machine, as the agent reads it.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase()
}

/// Whether the command starts the agent as a unit.
fn uses_systemd(options: &JoinOptions) -> bool {
    !options.no_start && Path::new(service::SYSTEMD).exists()
}

/// The processes of the agent that the node has already: the one that has the lock of its root directory, and
/// that of the unit, which the start replaces also if it has another root directory.
fn own_agents(paths: &Paths, uses_systemd: bool) -> Vec<u32> {
    let of_unit = if uses_systemd { service::main_process() } else { None };
    root_dir_owner(&paths.root_dir).into_iter().chain(of_unit).collect()
}

/// How the unit is put back after a start that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reversion {
    stops: bool,
    disables: bool,
}

/// Puts the unit back if its drop-in, or the record by which `leave` disables it, is removed: a unit that was
/// not started with the machine would start an agent without a cluster. `created`: the files that are removed.
/// `was_active`: whether the unit ran before; a start that took too long may still be queued.
fn reversion(record: &Record, created: &[PathBuf], paths: &Paths, was_active: bool) -> Reversion {
    let is_reverted = [paths.drop_in(), paths.record()].iter().any(|path| created.contains(path));
    Reversion { stops: is_reverted && !was_active, disables: is_reverted && record.enabled }
}

/// One call of the command.
struct Attempt<'a, 'c> {
    console: &'a mut Console<'c>,
    options: &'a JoinOptions,
    /// Of `--from-bundle`.
    bundle: Option<&'a JoinBundle>,
    paths: &'a Paths,
}

/// What the step of the files needs of the steps before.
struct Found {
    cluster: Cluster,
    bootstrap: String,
    config: String,
    socket: String,
}

impl Attempt<'_, '_> {
    fn run(mut self) -> Result<(), Refusal> {
        let (options, paths) = (self.options, self.paths);
        let host = host_name();
        let node = if options.node_name.is_empty() { host.clone() } else { options.node_name.clone() };
        if !is_dns_subdomain(&node) {
            let text = format!("preflight: the host name {node:?} is no name of a node");
            let advice = "set a host name of lower-case letters, digits and hyphens, or give --node-name";
            return Err(Refusal::new(Reason::Configuration, text, advice));
        }
        let address = match &options.method {
            JoinMethod::Token { address } => address.as_str(),
            _ => "",
        };
        // Before the record, which only root reads.
        let is_root = rustix::process::geteuid().is_root();
        step("preflight", preflight::check_user(is_root, options.dry_run))?;
        let mut lock = None;
        if !options.dry_run {
            lock = Some(step("preflight", lock::acquire(paths))?);
        }
        let record = files::read_record(paths)?;
        let machine = Machine {
            kubelets: preflight::processes(Path::new("/proc"), "kubelet"),
            record: record.as_ref(),
            has_kubeconfig: paths.kubeconfig().exists(),
            has_bootstrap: paths.bootstrap().exists(),
        };
        let course = step("preflight", preflight::course(&machine, paths, address, &node, &options.ignored))?;
        let uses_systemd = uses_systemd(options);
        if uses_systemd && !service::has_unit() {
            let advice = "install packaging/coracle.service, or write only the files with --no-start";
            let text = "preflight: there is no unit coracle.service";
            return Err(Refusal::new(Reason::Service, text, advice));
        }
        let mut has_unit = uses_systemd;
        match course {
            Course::Continue => {
                if let (Some(record), Some(server)) =
                    (&record, discovery::named_server(&options.method, self.bundle))
                {
                    step("preflight", preflight::check_server(record, &server))?;
                }
                self.progress("files: the agent has its certificate already");
                if options.dry_run {
                    return Ok(());
                }
                // Without a drop-in, the operator has started the agent with the command that was printed.
                let has_drop_in = record.as_ref().is_some_and(|record| record.has_drop_in(paths));
                has_unit = uses_systemd && has_drop_in;
                if has_unit && !service::is_active() {
                    // The operator may have disabled it since the files were written.
                    if let Some(record) = &record {
                        step("start", files::note_enabling(record, paths, service::is_enabled))?;
                    }
                    self.progress("start: starting coracle.service");
                    step("start", service::start())?;
                }
            }
            Course::Begin => {
                if uses_systemd {
                    step(
                        "preflight",
                        preflight::check_drop_in(service::later_drop_in(paths), &options.ignored),
                    )?;
                }
                let found = self.find(&node)?;
                if let Some(record) = &record {
                    step("preflight", preflight::check_server(record, &found.cluster.server))?;
                }
                let new = Record {
                    server: found.cluster.server.clone(),
                    address: address.to_owned(),
                    node: node.clone(),
                    enabled: record.as_ref().is_some_and(|record| record.enabled)
                        || (uses_systemd && !options.dry_run && !service::is_enabled()),
                    earlier: step("files", files::earlier(paths))?,
                    ..Record::default()
                };
                let files = planned(&found, options, paths, (node.as_str(), host.as_str()), uses_systemd);
                let plan = step("files", files::plan(files, record.as_ref(), new))?;
                self.show(&plan);
                if options.dry_run {
                    return Ok(());
                }
                step("files", files::write(&plan, paths))?;
                if !uses_systemd {
                    self.show_command(&plan);
                    return Ok(());
                }
                let was_active = service::is_active();
                self.progress("start: starting coracle.service with the flags of the cluster");
                if let Err(refusal) = step("start", service::start()) {
                    let created = files::created(&plan, paths);
                    let reversion = reversion(&plan.record, &created, paths, was_active);
                    // Best effort: the first error is reported. The files go last: without the drop-in, the unit
                    // starts an agent without a cluster.
                    if reversion.stops {
                        let _ = service::stop();
                    }
                    if reversion.disables {
                        let _ = service::disable();
                    }
                    files::undo(&created);
                    let _ = service::reload();
                    return Err(refusal);
                }
            }
        }
        // The wait changes nothing that another command does.
        drop(lock);
        self.wait(&node, has_unit)
    }

    fn progress(&mut self, text: impl Display) {
        progress(self.console, text);
    }

    fn warn(&mut self, text: impl Display) {
        self.progress(format!("warning: {text}"));
    }

    /// Reads from the control plane what the node needs, and checks the machine with it.
    fn find(&mut self, node: &str) -> Result<Found, Refusal> {
        let (options, paths) = (self.options, self.paths);
        let (cluster, credentials) =
            discover(self.console, options, self.bundle, &mut std::io::stdin().lock())?;
        let version = step("discovery", plane::server_version(&cluster, &credentials))?;
        self.progress(format!("discovery: {} runs Kubernetes {version}", cluster.server));
        if let Some(warning) = step("preflight", preflight::check_version(&version, KUBERNETES_VERSION))? {
            self.warn(warning);
        }
        let proxy = plane::environment_proxy(&cluster);
        if let Some(warning) = preflight::proxy_warning(&cluster.server, proxy.as_deref()) {
            self.warn(warning);
        }
        let named = plane::node_state(&cluster, &credentials, node);
        if let Some(warning) = step("preflight", preflight::check_name(named, node))? {
            self.warn(warning);
        }
        // Without a kubeconfig, the agent uses what it finds there.
        if let Some((file, own)) = plane::present_certificate(&paths.certificates(), node) {
            let outcome = plane::node_state(&cluster, &own, node);
            step("preflight", preflight::check_certificate(&file, outcome))?;
        }
        let is_kubeadm = matches!(options.method, JoinMethod::Token { .. })
            || self.bundle.is_some_and(|bundle| bundle.needs_configuration);
        let shared = cluster_configuration(self.console, &cluster, &credentials, is_kubeadm)?;
        let own = match (&options.config, self.bundle.and_then(|bundle| bundle.config.as_ref())) {
            (Some(file), _) => {
                Some((file.display().to_string(), step("configuration", own_configuration(file))?))
            }
            (None, Some(text)) => {
                Some(("the configuration in the bundle".to_owned(), text.clone().into_bytes()))
            }
            (None, None) => None,
        };
        let own = own.as_ref().map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
        let resolver = Path::new(configuration::RESOLVED).exists().then_some(configuration::RESOLVED);
        let merged = configuration::merge(shared.as_deref(), own, &paths.kubernetes_dir, resolver);
        let merged = step("configuration", merged)?;
        let exists = |path: &str| Path::new(path).exists();
        let is_own = configuration::sets_socket(own);
        let socket = configuration::socket(options.cri_socket.as_deref(), &merged, is_own, exists);
        let socket = step("preflight", socket)?;
        if get(&merged, "clusterDNS").and_then(|servers| servers.as_array()).is_none_or(Vec::is_empty) {
            self.warn("clusterDNS is not set: pods resolve no names of Services (set it with --config)");
        }
        if let Some(path) = preflight::standalone_network(Path::new(preflight::NETWORKS)) {
            let text = "is the network of a standalone node, and the runtime may use it in the place of the \
                        cluster's: remove it if the cluster has a network";
            self.warn(format!("{} {text}", path.display()));
        }
        let config = configuration::config_file(merged, &socket);
        let loaded = step("configuration", validated(paths, &config))?;
        self.check_machine(&loaded)?;
        let port = u16::try_from(loaded.config.port).unwrap_or_default();
        // Only root sees the descriptors of others.
        if rustix::process::geteuid().is_root() {
            let listeners = port::listeners(Path::new("/proc"), port);
            let own = own_agents(paths, uses_systemd(options));
            step("preflight", preflight::check_port(&listeners, &own, port, &options.ignored))?;
        }
        let bootstrap = plane::bootstrap_kubeconfig(&cluster, &credentials);
        Ok(Found { cluster, bootstrap, config, socket })
    }

    fn check_machine(&mut self, loaded: &LoadedConfig) -> Result<(), Refusal> {
        self.progress("preflight: checking the machine");
        let lines = check::machine(self.paths.root_dir.clone(), &loaded.config);
        let (failed, warned) = preflight::problems(lines, &self.options.ignored);
        // As with progress, a closed output does not end the command.
        let _ = check::print(self.console, &warned);
        let _ = check::print(self.console, &failed);
        if failed.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = failed.iter().map(|line| line.name.as_str()).collect();
        let text = format!("preflight: pods cannot run on this machine: {}", names.join(", "));
        let advice = "do what the lines after the arrows say, and run the same command again; \
                      --ignore-preflight-errors CHECK,... continues in spite of a check";
        Err(Refusal::new(Reason::Machine, text, advice))
    }

    fn show(&mut self, plan: &FilePlan) {
        let dry_run = self.options.dry_run;
        for (file, action) in &plan.files {
            let verb = match (action, dry_run) {
                (Action::Keep | Action::Refuse, _) => "has the wanted content:",
                (_, true) => "would write",
                (_, false) => "writing",
            };
            self.progress(format!("files: {verb} {} (mode {:04o})", file.path.display(), file.mode));
            if !dry_run || *action == Action::Keep {
                continue;
            }
            let content = if file.is_secret { "(secret)" } else { file.content.as_str() };
            for line in content.lines() {
                self.progress(format!("  | {line}"));
            }
        }
    }

    /// The command for a machine without systemd.
    fn show_command(&mut self, plan: &FilePlan) {
        let flags = plan.files.iter().find(|(file, _)| file.path == self.paths.flags());
        let flags = flags.map_or("", |(file, _)| file.content.as_str());
        let program = service::program(None, |path| Path::new(path).exists());
        let line = service::command_line(&program, self.paths, flags);
        self.progress("start: the files are there; start the agent with this command:");
        self.progress(format!("  {line}"));
        self.progress(
            "start: with OpenRC the flags go into CORACLE_ARGS of /etc/conf.d/coracle, and without an init \
             system into /usr/local/lib/coracle/services/coracle; then run the same command again, which \
             waits until the node is Ready",
        );
    }

    /// Waits until the node is Ready. `has_unit`: whether systemd runs the agent, so it can be seen to fail.
    fn wait(&mut self, node: &str, has_unit: bool) -> Result<(), Refusal> {
        let begin = Instant::now();
        let mut watch = UnitWatch::default();
        let mut shown = String::new();
        let never = StopToken::never();
        loop {
            let observation = self.observe(node);
            if matches!(observation, Observation::Node(_)) {
                // The node has its own certificate: the secret of all nodes does not stay.
                step("wait", files::remove_bootstrap(self.paths))?;
            }
            let Some(pending) = wait::pending(&observation, node) else { break };
            if pending.text != shown {
                self.progress(format!("wait: waiting for {}", pending.text));
                shown.clone_from(&pending.text);
            }
            let unit = if has_unit { service::state() } else { None };
            if let Some(reason) = unit.and_then(|unit| watch.step(&unit)) {
                for line in service::last_lines() {
                    self.progress(format!("  | {line}"));
                }
                return step("wait", Err(wait::unit_failed(&reason, &pending)));
            }
            if begin.elapsed() >= self.options.timeout {
                return Err(wait::overdue(&pending, begin.elapsed()));
            }
            let _ = never.wait(INTERVAL);
        }
        self.progress(format!("the node {node} has joined the cluster, and is Ready"));
        let has_proxy = !preflight::processes(Path::new("/proc"), "kube-proxy").is_empty();
        if let Some(note) = wait::note(has_proxy) {
            self.progress(format!("note: {note}"));
        }
        Ok(())
    }

    fn observe(&self, node: &str) -> Observation {
        let kubeconfig = self.paths.kubeconfig();
        if !kubeconfig.exists() {
            return Observation::NoCertificate;
        }
        match plane::own_state(&kubeconfig, node) {
            Err(error) => Observation::Unreadable(error.to_string()),
            Ok(None) => Observation::NoCertificate,
            Ok(Some(state)) => Observation::Node(state),
        }
    }
}

/// Reads the configuration of the cluster. `is_kubeadm`: the cluster has one, and without it nothing joins.
fn cluster_configuration(
    console: &mut Console<'_>,
    cluster: &Cluster,
    credentials: &Credentials,
    is_kubeadm: bool,
) -> Result<Option<String>, Refusal> {
    progress(console, "configuration: reading kube-system/kubelet-config");
    match plane::kubelet_configuration(cluster, credentials) {
        Ok(text) => Ok(Some(text)),
        // Clusters of other distributions have no such object. Another error could be that of a cluster that has
        // one, and its nodes would lack it.
        Err(error @ (JoinError::Missing { .. } | JoinError::Denied { status: 403, .. })) if !is_kubeadm => {
            let text = format!("no configuration of the cluster: {error}; only --config counts");
            progress(console, format!("warning: {text}"));
            Ok(None)
        }
        Err(error) => step("configuration", Err(error)),
    }
}

/// The content of the file of `--config`.
fn own_configuration(file: &Path) -> Result<Vec<u8>, Refusal> {
    let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
    files::read(file)?.ok_or_else(|| Refusal::file("read", file, &missing()))
}

/// Loads the configuration as the agent will.
fn validated(paths: &Paths, config: &str) -> Result<LoadedConfig, Refusal> {
    let request = LoadRequest {
        file: Some(paths.config()),
        memory_bytes: machine::memory_bytes(&Roots::default()),
        ..LoadRequest::default()
    };
    load_content(&request, config.as_bytes()).map_err(|problems| {
        let lines: Vec<String> = problems.iter().take(MAX_PROBLEMS).map(ToString::to_string).collect();
        let text = format!("the agent does not start with this configuration: {}", lines.join("; "));
        let advice = "correct it in the file of --config, or in kube-system/kubelet-config; --dry-run shows \
                      the whole configuration once it is valid";
        Refusal::new(Reason::Configuration, visible_lines(&text), advice)
    })
}

/// The files in the order in which they are written. `names`: those of the node and of the machine.
fn planned(
    found: &Found,
    options: &JoinOptions,
    paths: &Paths,
    (node, host): (&str, &str),
    uses_systemd: bool,
) -> Vec<PlannedFile> {
    let file = |path, content, mode| PlannedFile { path, content, mode, is_secret: false };
    let public = |path, content| file(path, content, 0o644);
    let flags = configuration::flags_file(node, host, &options.node_ips, &options.node_labels);
    let authority = format!("{}\n", found.cluster.authority.trim_end());
    let mut files = vec![
        PlannedFile {
            path: paths.bootstrap(),
            content: found.bootstrap.clone(),
            mode: 0o600,
            is_secret: true,
        },
        public(paths.authority(), authority),
        public(paths.instance(), configuration::instance_file(&found.socket)),
        // kubeadm: 0644, which rule 4.1.9 of the CIS benchmark rejects. An upgrade by kubeadm keeps the mode.
        file(paths.config(), found.config.clone(), 0o600),
        public(paths.flags(), flags),
    ];
    if uses_systemd {
        let program = service::program(service::unit().as_deref(), |path| Path::new(path).exists());
        // As the unit that coracle installs.
        let content = service::drop_in(&program, paths);
        files.push(file(paths.drop_in(), content, 0o600));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use crate::resources::compliance::{self, NodeFacts, NodeFiles, RuleStatus};

    fn found() -> Found {
        Found {
            cluster: Cluster { server: "https://a:6443".into(), authority: "PEM\n\n".into() },
            bootstrap: "secret".into(),
            config: "kind: KubeletConfiguration\n".into(),
            socket: "unix:///s".into(),
        }
    }

    #[test]
    fn files_have_the_places_of_kubeadm_and_the_configuration_is_for_root_only() {
        let paths = Paths {
            kubernetes_dir: "/etc/kubernetes".into(),
            root_dir: "/var/lib/kubelet".into(),
            units_dir: service::UNITS.into(),
        };
        let files = planned(&found(), &JoinOptions::default(), &paths, ("n", "h"), true);
        let shown: Vec<String> = files
            .iter()
            .map(|file| format!("{} {:o} {}", file.path.display(), file.mode, file.is_secret))
            .collect();
        assert_eq!(
            shown,
            [
                "/etc/kubernetes/bootstrap-kubelet.conf 600 true",
                "/etc/kubernetes/pki/ca.crt 644 false",
                "/var/lib/kubelet/instance-config.yaml 644 false",
                "/var/lib/kubelet/config.yaml 600 false",
                "/var/lib/kubelet/kubeadm-flags.env 644 false",
                "/etc/systemd/system/coracle.service.d/10-join.conf 600 false",
            ]
        );
        assert_eq!(files[1].content, "PEM\n");
        assert!(files[4].content.contains("--hostname-override=n"));
        let without = planned(&found(), &JoinOptions::default(), &paths, ("n", "n"), false);
        assert_eq!(without.len(), 5);
    }

    #[test]
    fn unit_is_as_before_a_start_that_failed() {
        let paths =
            Paths { kubernetes_dir: "/k".into(), root_dir: "/r".into(), units_dir: service::UNITS.into() };
        let all = [paths.record(), paths.config(), paths.drop_in()];
        let others = [paths.config()];
        let unit = |enabled, created: &[PathBuf], was_active| {
            let record = Record { enabled, ..Record::default() };
            let Reversion { stops, disables } = reversion(&record, created, &paths, was_active);
            (stops, disables)
        };
        // Disabled and stopped before.
        assert_eq!(unit(true, &all, false), (true, true));
        // A standalone agent.
        assert_eq!(unit(false, &all, true), (false, false));
        assert_eq!(unit(false, &all, false), (true, false));
        assert_eq!(unit(true, &all, true), (false, true));
        // An earlier join was killed before the drop-in, or had it already.
        assert_eq!(unit(true, &all[2..], false), (true, true));
        assert_eq!(unit(true, &others, false), (false, false));
    }

    #[test]
    fn reason_of_repetitions_is_printed_once_until_it_changes() {
        let error = |reason: &str| JoinError::Unreachable {
            server: "https://a:1".to_owned(),
            reason: reason.to_owned(),
        };
        let mut out = Vec::new();
        let mut console = Console { out: &mut out, paint: Paint::new(false), now: jiff::Timestamp::now() };
        let mut last = String::new();
        for reason in ["refused", "refused", "reset\u{1b}[31m", "refused"] {
            repeated(&mut console, &mut last, &error(reason));
        }
        let lines = String::from_utf8(out).unwrap();
        assert_eq!(lines.matches("trying again").count(), 3, "{lines}");
        assert!(lines.starts_with("discovery: trying again: ") && !lines.contains('\u{1b}'), "{lines}");
    }

    #[test]
    fn files_pass_the_rules_of_the_benchmark_for_modes_and_owners() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            kubernetes_dir: dir.path().join("etc/kubernetes"),
            root_dir: dir.path().join("var/lib/kubelet"),
            units_dir: dir.path().join("etc/systemd/system"),
        };
        let files = planned(&found(), &JoinOptions::default(), &paths, ("n", "n"), true);
        let plan = files::plan(files, None, Record::default()).unwrap();
        files::write(&plan, &paths).unwrap();
        let configs = [paths.config()];
        let (bootstrap, authority) = (paths.bootstrap(), paths.authority());
        let files = NodeFiles::read(dir.path(), Some(&bootstrap), &authority, &configs, Path::new(""));
        assert_eq!(files.services.len(), 1, "the drop-in");
        let results = compliance::check(&NodeFacts { files, ..NodeFacts::default() });
        let mut rules = vec!["4.1.1", "4.1.5", "4.1.7", "4.1.9"];
        // The files belong to the user of the test.
        if rustix::process::geteuid().is_root() {
            rules.extend(["4.1.2", "4.1.6", "4.1.8", "4.1.10"]);
        }
        for id in rules {
            let rule = results.iter().find(|rule| rule.id == id).unwrap();
            assert_eq!(rule.standing, RuleStatus::Pass, "{id}: {}", rule.evidence);
        }
    }

    #[test]
    fn refusal_names_its_step() {
        let refused: Result<(), Refusal> = Err(Refusal::new(Reason::Version, "too old", "wait"));
        assert_eq!(step("discovery", refused).unwrap_err().text, "discovery: too old");
    }

    #[test]
    fn invalid_configuration_is_refused_with_its_field() {
        let paths = Paths { kubernetes_dir: "/k".into(), root_dir: "/r".into(), units_dir: "/u".into() };
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let refusal = validated(&paths, &format!("{head}maxPods: many\n")).unwrap_err();
        assert!(refusal.text.contains("/r/config.yaml") && refusal.text.contains("maxPods"), "{refusal:?}");
        assert!(validated(&paths, &format!("{head}maxPods: 5\n")).is_ok());
    }
}
