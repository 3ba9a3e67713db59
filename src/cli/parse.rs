//! Parses the command line. Reads no files, and reports all invalid flags together.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use lexopt::Arg;
use serde_json::{Map, Value, json};

use super::flags::{FLAGS, Flag, FlagEffect, REMOVED, Syntax, find};
use super::local::{COMMANDS, LocalCommand, parse_local};
use crate::config::check::closest;
use crate::config::fields::{FieldType, field};
use crate::config::{AgentArgs, GoDuration, Override, Problem};
use crate::model::names::{is_dns_subdomain, is_label_value, is_qualified_name};
use crate::model::quantity::Amount;
use crate::server::LOCAL_SOCKET;
use crate::util::encoding::from_digits;

/// A parsed command line.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Run the agent.
    Agent(Box<AgentArgs>),
    /// Check flags and configuration.
    CheckConfig(Box<AgentArgs>),
    /// Print the effective configuration.
    PrintConfig(Box<AgentArgs>),
    /// Print the help.
    Help,
    /// Print the help on one command.
    LocalHelp(&'static str),
    /// Print the version.
    Version,
    /// Print the version in the words of the Go kubelet.
    KubeletVersion,
    /// Run a subcommand.
    Local(LocalCommand),
}

/// Parses the arguments of a program that was called by the name `program`, which may be a path.
/// Called as `kubelet` it is the agent: it has the flags, and no commands.
///
/// Go: cmd/kubelet/app, NewKubeletCommand, which refuses every word.
///
/// # Errors
/// All problems that were found.
pub fn parse<I>(program: &OsStr, args: I) -> Result<Command, Vec<Problem>>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    let mut parser = lexopt::Parser::from_args(args);
    let mut line = CommandLine::new(Path::new(program).file_name() == Some(OsStr::new("kubelet")));
    loop {
        match parser.next() {
            Ok(None) => break,
            Ok(Some(Arg::Value(word))) => {
                let word = word.to_string_lossy().into_owned();
                if line.is_kubelet {
                    line.fail("", format!("unknown command {word:?}"));
                    continue;
                }
                if let Some(name) = line.local_command(&word) {
                    let command = parse_local(name, parser, line.args, line.problems)?;
                    return Ok(command.map_or(Command::LocalHelp(name), Command::Local));
                }
                if word == "help" {
                    let named = parser.next().ok().flatten();
                    let named = named.and_then(|named| match named {
                        Arg::Value(name) => line.local_command(&name.to_string_lossy()),
                        _ => None,
                    });
                    return Ok(named.map_or(Command::Help, Command::LocalHelp));
                }
                line.unknown_command(&word);
            }
            Ok(Some(arg)) => {
                let name = match arg {
                    Arg::Long(name) => name.to_owned(),
                    Arg::Short(letter) => letter.to_string(),
                    Arg::Value(_) => continue,
                };
                line.flag(&name, &mut parser);
            }
            Err(error) => {
                line.fail("", error.to_string());
                break;
            }
        }
    }
    line.finish()
}

/// The values of the arguments that were parsed so far.
struct CommandLine {
    args: AgentArgs,
    problems: Vec<Problem>,
    /// Names of the flags that were given.
    given: Vec<&'static str>,
    is_kubelet: bool,
    help: bool,
    version: bool,
    check: bool,
    print: bool,
}

impl CommandLine {
    fn new(is_kubelet: bool) -> Self {
        CommandLine {
            args: AgentArgs::new(LOCAL_SOCKET),
            problems: Vec::new(),
            given: Vec::new(),
            is_kubelet,
            help: false,
            version: false,
            check: false,
            print: false,
        }
    }

    fn fail(&mut self, flag: &str, message: impl Into<String>) {
        let problem =
            Problem { place: "command line".to_owned(), field: flag.to_owned(), message: message.into() };
        self.problems.push(problem);
    }

    /// The local command of this name. Reports the flags before it that it does not accept.
    fn local_command(&mut self, word: &str) -> Option<&'static str> {
        let (command, ..) = COMMANDS.iter().find(|(name, ..)| *name == word)?;
        for name in std::mem::take(&mut self.given) {
            if name != "local-socket" && (word, name) != ("check", "root-dir") {
                self.fail(&dashed(name), format!("cannot be used with the command {word}"));
            }
        }
        Some(command)
    }

    fn unknown_command(&mut self, word: &str) {
        let near = closest(word, COMMANDS.iter().map(|(name, ..)| *name));
        let hint = near.map_or(String::new(), |near| format!("; did you mean {near}?"));
        self.fail("", format!("unknown command {word:?}{hint}"));
    }

    fn flag(&mut self, name: &str, parser: &mut lexopt::Parser) {
        let known = match name {
            "h" => find("help"),
            "V" => find("version"),
            name => find(name),
        };
        let Some(flag) = known else {
            self.unknown_flag(name, parser);
            return;
        };
        let shown = dashed(flag.name);
        let text = match (flag.syntax, parser.optional_value()) {
            (_, Some(value)) => value,
            (Syntax::Bool, None) => OsString::from("true"),
            (_, None) => match parser.value() {
                Ok(value) => value,
                Err(_) => {
                    self.fail(&shown, format!("needs a value: {shown}={}", flag.placeholder()));
                    return;
                }
            },
        };
        let Ok(text) = text.into_string() else {
            self.fail(&shown, "the value is not UTF-8 text");
            return;
        };
        self.given.push(flag.name);
        // These two flags do not run the agent, so they are not among its effective flags.
        if !matches!(flag.name, "check-config" | "print-config") {
            self.args.given.insert(flag.name, text.clone());
        }
        if let FlagEffect::Refused(reason) = flag.effect()
            && parse_bool(&text) != Some(false)
        {
            self.fail(&shown, reason);
            return;
        }
        if flag.field.is_empty() {
            self.own(flag, &text);
        } else {
            match self.field_value(flag, &text) {
                Ok(value) => {
                    self.args.request.overrides.retain(|before| before.path != flag.field);
                    self.args.request.overrides.push(Override { flag: shown, path: flag.field, value });
                }
                Err(message) => self.fail(&shown, message),
            }
        }
    }

    fn unknown_flag(&mut self, name: &str, parser: &mut lexopt::Parser) {
        let shown = if name.chars().count() == 1 { format!("-{name}") } else { format!("--{name}") };
        let plain = name.replace('_', "-");
        let message = match REMOVED.iter().find(|(removed, _)| *removed == plain) {
            Some((_, instead)) => format!("no longer a flag: {instead}"),
            None => match closest(&plain, FLAGS.iter().map(|flag| flag.name)) {
                Some(near) => format!("unknown flag; did you mean --{near}?"),
                None => "unknown flag".to_owned(),
            },
        };
        self.fail(&shown, message);
        // The next argument may be the flag's value: it must not be reported as a second problem.
        if parser.optional_value().is_none()
            && let Some(mut rest) = parser.try_raw_args()
            && rest.peek().is_some_and(|next| !next.to_string_lossy().starts_with('-'))
        {
            let _ = rest.next();
        }
    }

    /// The value of a flag that sets a field. A repeated flag adds to its list or map.
    fn field_value(&self, flag: &Flag, text: &str) -> Result<Value, String> {
        let before = self.args.request.overrides.iter().find(|change| change.path == flag.field);
        let value = read_value(flag, text)?;
        Ok(match (before.map(|change| change.value.clone()), value) {
            (Some(Value::Array(mut items)), Value::Array(more)) => {
                items.extend(more);
                Value::Array(items)
            }
            (Some(Value::Object(mut entries)), Value::Object(more)) => {
                for (key, value) in more {
                    match (entries.get_mut(&key), value) {
                        (Some(Value::Array(items)), Value::Array(more)) => items.extend(more),
                        (_, value) => {
                            entries.insert(key, value);
                        }
                    }
                }
                Value::Object(entries)
            }
            (_, value) => value,
        })
    }

    fn own(&mut self, flag: &Flag, text: &str) {
        if let Err(message) = self.set_own(flag, text) {
            self.fail(&dashed(flag.name), message);
        }
    }

    fn set_own(&mut self, flag: &Flag, text: &str) -> Result<(), String> {
        let args = &mut self.args;
        let path = || (!text.is_empty()).then(|| PathBuf::from(text));
        match flag.name {
            "config" => args.request.file = path(),
            "config-dir" => args.request.drop_ins = path(),
            "root-dir" => {
                args.root_dir = path().ok_or("must not be empty")?;
            }
            "image-registry" => args.image_registry = registry_address(text)?,
            "image-mirror-file" => {
                let file = path().filter(|path| path.is_absolute() && path.file_name().is_some());
                args.image_mirror_file = Some(file.ok_or("must be an absolute path")?);
            }
            "images-dir" => {
                let before = args.images_dirs.len();
                args.images_dirs.extend(parts(text).map(PathBuf::from));
                if args.images_dirs.len() == before {
                    return Err("must not be empty".to_owned());
                }
            }
            "local-objects" => args.local_objects = path().ok_or("must not be empty")?,
            // For a command, a relative path works.
            "local-socket" => args.local_socket = path().ok_or("must not be empty")?,
            "offline" => args.offline = bool_value(text)?,
            "offline-accept-after" => args.offline_accept_after = offline_time(text)?,
            "offline-key" => {
                if path().is_some_and(|path| !path.is_absolute()) {
                    return Err("must be an absolute path".to_owned());
                }
                args.offline_key = path();
            }
            "offline-secrets" => {
                args.offline_secrets = match text {
                    "sealed" => true,
                    "none" => false,
                    _ => return Err(format!("{text:?} must be sealed or none")),
                };
            }
            "offline-stop-after" => args.offline_stop_after = offline_time(text)?,
            "offline-wait" => args.offline_wait = offline_time(text)?,
            "container-logs-quota" => args.container_logs_quota = log_quota(text)?,
            "remove-damaged-images" => args.remove_damaged_images = bool_value(text)?,
            "local-socket-any-namespace" => args.local_socket_any_namespace = bool_value(text)?,
            "cert-dir" => args.cert_dir = path().ok_or("must not be empty")?,
            "kubeconfig" => args.kubeconfig = path(),
            "bootstrap-kubeconfig" => args.bootstrap_kubeconfig = path(),
            "lock-file" => args.lock_file = path(),
            "image-credential-provider-config" => args.image_credential_provider_config = path(),
            "image-credential-provider-bin-dir" => args.image_credential_provider_bin_dir = path(),
            "exit-on-lock-contention" => args.exit_on_lock_contention = bool_value(text)?,
            "experimental-allocatable-ignore-eviction" => {
                args.allocatable_ignores_eviction = bool_value(text)?;
            }
            "runtime-cgroups" => args.runtime_cgroups = text.to_owned(),
            "cloud-provider" => {
                if !matches!(text, "" | "external") {
                    return Err(format!("{text:?} must be empty or external"));
                }
                args.cloud_provider = text.to_owned();
            }
            "hostname-override" => {
                let name = text.trim().to_lowercase();
                if !name.is_empty() && !is_dns_subdomain(&name) {
                    return Err(format!("{text:?} is not a node name: want a lower-case DNS name"));
                }
                args.hostname_override = name;
            }
            "node-ip" => args.node_ips = node_ips(text)?,
            "node-labels" => args.node_labels.extend(node_labels(text)?),
            "minimum-container-ttl-duration" => args.minimum_container_ttl = duration(text)?.to_std(),
            "maximum-dead-containers" => args.maximum_dead_containers = int32(text)?,
            "maximum-dead-containers-per-container" => {
                args.maximum_dead_containers_per_container = int32(text)?
            }
            "help" => self.help = bool_value(text)?,
            "version" => self.version = text == "raw" || bool_value(text)?,
            "check-config" => self.check = bool_value(text)?,
            "print-config" => self.print = bool_value(text)?,
            // The flag has no effect, but a value of the wrong form is still an error.
            _ => match flag.syntax {
                Syntax::Bool => drop(bool_value(text)?),
                Syntax::Int => drop(int32(text)?),
                Syntax::Duration => drop(duration(text)?),
                _ => {}
            },
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Command, Vec<Problem>> {
        // Help is printed even if there are problems.
        if self.help {
            return Ok(Command::Help);
        }
        if !self.args.local_socket.is_absolute() {
            self.fail("--local-socket", "must be an absolute path");
        }
        let args = &self.args;
        if args.lock_file.is_none() && args.exit_on_lock_contention {
            self.fail("--exit-on-lock-contention", "cannot be used without --lock-file");
        }
        if self.args.offline && self.args.kubeconfig.is_none() {
            self.fail("--offline", "cannot be used without --kubeconfig");
        }
        let (config, directory) =
            (&self.args.image_credential_provider_config, &self.args.image_credential_provider_bin_dir);
        if config.is_some() != directory.is_some() {
            self.fail(
                "--image-credential-provider-config",
                "must be used together with --image-credential-provider-bin-dir",
            );
        }
        if !self.problems.is_empty() {
            return Err(self.problems);
        }
        let args = Box::new(self.args);
        Ok(match (self.version, self.check, self.print) {
            (true, ..) if self.is_kubelet => Command::KubeletVersion,
            (true, ..) => Command::Version,
            (_, true, _) => Command::CheckConfig(args),
            (_, _, true) => Command::PrintConfig(args),
            _ => Command::Agent(args),
        })
    }
}

/// A duration that is not negative and not longer than a year.
fn offline_time(text: &str) -> Result<std::time::Duration, String> {
    const YEAR: std::time::Duration = std::time::Duration::from_secs(366 * 24 * 3600);
    if text.trim_start().starts_with('-') {
        return Err(format!("{text:?} must not be negative"));
    }
    let time = duration(text)?.to_std();
    if time > YEAR { Err(format!("{text:?} is longer than a year")) } else { Ok(time) }
}

fn dashed(name: &str) -> String {
    if name.len() == 1 { format!("-{name}") } else { format!("--{name}") }
}

/// Converts a flag's text into a value of its field's type.
fn read_value(flag: &Flag, text: &str) -> Result<Value, String> {
    Ok(match flag.syntax {
        Syntax::Bool => Value::Bool(bool_value(text)?),
        Syntax::Int => {
            // Go: pflag `ParseInt`, and component-base `ParseUint`.
            let number: Option<i64> = match flag.field {
                "logging.verbosity" => from_digits(text),
                _ => text.parse().ok(),
            };
            let number = number.ok_or_else(|| format!("{text:?} is not a whole number"))?;
            if field(flag.field).is_some_and(|field| field.kind == FieldType::Int32)
                && i32::try_from(number).is_err()
            {
                return Err(format!("{text:?} does not fit 32 bits"));
            }
            Value::from(number)
        }
        Syntax::Duration => Value::from(duration(text)?.to_string()),
        Syntax::Text => {
            if field(flag.field).is_some_and(|field| field.kind == FieldType::Quantity) {
                Amount::parse(text).map_err(|error| error.to_string())?;
            }
            Value::from(text)
        }
        Syntax::List => parts(text).map(Value::from).collect::<Vec<_>>().into(),
        Syntax::Pairs => pairs(text, '=')?.into(),
        Syntax::Thresholds => pairs(text, '<')?.into(),
        Syntax::Gates => {
            let mut gates = Map::new();
            for (name, value) in pairs(text, '=')? {
                let on = value.as_str().and_then(parse_bool);
                let on = on.ok_or_else(|| format!("{name} must be true or false, not {value}"))?;
                gates.insert(name, Value::Bool(on));
            }
            gates.into()
        }
        Syntax::Headers => {
            let mut headers: BTreeMap<String, Vec<Value>> = BTreeMap::new();
            for (name, value) in split_pairs(text, ':')? {
                headers.entry(name).or_default().push(Value::from(value));
            }
            headers
                .into_iter()
                .map(|(name, values)| (name, Value::Array(values)))
                .collect::<Map<_, _>>()
                .into()
        }
        Syntax::Taints => parts(text).map(taint).collect::<Result<Vec<_>, _>>()?.into(),
        Syntax::NumaMemory => numa_memory(text)?.into(),
        Syntax::Vmodule => {
            let mut rules = Vec::new();
            for (pattern, level) in split_pairs(text, '=')? {
                let level =
                    from_digits::<i32>(&level).ok_or_else(|| format!("{level:?} is not a verbosity"))?;
                rules.push(json!({"filePattern": pattern, "verbosity": level}));
            }
            rules.into()
        }
    })
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn split_pairs(text: &str, between: char) -> Result<Vec<(String, String)>, String> {
    parts(text)
        .map(|part| match part.split_once(between) {
            Some((key, value)) if !key.trim().is_empty() => {
                Ok((key.trim().to_owned(), value.trim().to_owned()))
            }
            _ => Err(format!("{part:?} is not of the form key{between}value")),
        })
        .collect()
}

fn pairs(text: &str, between: char) -> Result<Map<String, Value>, String> {
    Ok(split_pairs(text, between)?.into_iter().map(|(key, value)| (key, Value::from(value))).collect())
}

fn taint(text: &str) -> Result<Value, String> {
    let (rest, effect) =
        text.rsplit_once(':').ok_or_else(|| format!("{text:?} is not of the form key=value:effect"))?;
    let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
    Ok(json!({"key": key, "value": value, "effect": effect}))
}

fn numa_memory(text: &str) -> Result<Vec<Value>, String> {
    let wrong = |part: &str| format!("{part:?} is not of the form 0:memory=1Gi,hugepages-2Mi=2Gi");
    let mut nodes = Vec::new();
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let (node, limits) = part.split_once(':').ok_or_else(|| wrong(part))?;
        let node: i32 = node.trim().parse().map_err(|_| wrong(part))?;
        let limits = pairs(limits, '=')?;
        for amount in limits.values() {
            Amount::parse(amount.as_str().unwrap_or_default()).map_err(|error| error.to_string())?;
        }
        nodes.push(json!({"numaNode": node, "limits": limits}));
    }
    Ok(nodes)
}

/// The spellings of a bool that Go accepts.
fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn bool_value(text: &str) -> Result<bool, String> {
    parse_bool(text).ok_or_else(|| format!("{text:?} is neither true nor false"))
}

fn int32(text: &str) -> Result<i32, String> {
    text.parse().map_err(|_| format!("{text:?} is not a whole number of 32 bits"))
}

fn duration(text: &str) -> Result<GoDuration, String> {
    GoDuration::parse(text).map_err(|error| error.to_string())
}

/// `None`: off.
fn registry_address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == "off" {
        return Ok(None);
    }
    let address: SocketAddr =
        text.parse().map_err(|_| format!("{text:?} is neither an address with a port nor off"))?;
    match address.ip().is_loopback() {
        true => Ok(Some(address)),
        false => Err(format!("{text:?} is not a loopback address: the registry is for this node only")),
    }
}

/// Bytes; `None`: no quota.
fn log_quota(text: &str) -> Result<Option<u64>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let amount = Amount::parse(text).map_err(|error| error.to_string())?;
    // A smaller one would rotate logs in every pass.
    let bytes = u64::try_from(amount.units()).ok().filter(|bytes| *bytes >= 1 << 20);
    bytes.map(Some).ok_or_else(|| format!("{text:?} is less than 1Mi"))
}

pub(super) fn node_ips(text: &str) -> Result<Vec<IpAddr>, String> {
    let ips = parts(text)
        .map(|ip| ip.parse::<IpAddr>().map_err(|_| format!("{ip:?} is not an IP address")))
        .collect::<Result<Vec<_>, _>>()?;
    match ips.as_slice() {
        [] | [_] => Ok(ips),
        [first, second] if first.is_ipv4() != second.is_ipv4() => Ok(ips),
        _ => Err("must be one address, or an IPv4 and an IPv6 address".to_owned()),
    }
}

/// Labels in the domains of Kubernetes that a node may set on itself.
const OWN_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];

pub(super) fn node_labels(text: &str) -> Result<Vec<(String, String)>, String> {
    let labels = split_pairs(text, '=')?;
    for (key, value) in &labels {
        if !is_qualified_name(key) {
            return Err(format!("{key:?} is not a label key"));
        }
        if !is_label_value(value) {
            return Err(format!("{value:?} is not a label value"));
        }
        let domain = key.split_once('/').map_or("", |(domain, _)| domain);
        let under =
            |root: &str| domain == root || domain.strip_suffix(root).is_some_and(|rest| rest.ends_with('.'));
        let reserved = under("kubernetes.io") || under("k8s.io");
        if reserved
            && !OWN_LABELS.contains(&key.as_str())
            && !under("kubelet.kubernetes.io")
            && !under("node.kubernetes.io")
        {
            return Err(format!("{key:?} is in a domain of Kubernetes: nodes must not set this label"));
        }
    }
    Ok(labels)
}
