//! The subcommands: their options and their parsing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use lexopt::Arg;

use super::join_options::{JoinOptions, LeaveOptions};
use super::options::own_options;
use crate::config::{AgentArgs, GoDuration, Problem};
use crate::util::encoding::from_digits;

/// The format of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Output {
    #[default]
    Table,
    /// A table with more columns.
    Wide,
    Json,
    Yaml,
}

/// A subcommand and the agent that it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalCommand {
    /// The agent's local socket.
    pub(super) socket: PathBuf,
    pub(super) subcommand: Subcommand,
}

/// A subcommand with its options. `pod` is a name, namespace/name or the beginning of a UID.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Subcommand {
    Pods(PodsOptions),
    Describe {
        pod: String,
    },
    Logs(LogsOptions),
    Debug(DebugOptions),
    /// `exec`, or `attach` without a command.
    Exec(ExecOptions),
    PortForward(ForwardOptions),
    Status {
        output: Output,
    },
    Events(EventsOptions),
    Top(TopOptions),
    Images {
        output: Output,
        command: ImagesCommand,
    },
    /// `setup runtime`. Needs no agent.
    Setup(SetupOptions),
    VerifyImages(VerifyOptions),
    Volumes(VolumesOptions),
    Devices {
        output: Output,
    },
    /// Stored objects of the API server, and whose pods count.
    Offline {
        output: Output,
        command: OfflineCommand,
    },
    /// Makes this machine a node of a cluster. Needs no agent.
    Join(Box<JoinOptions>),
    /// Removes what `join` wrote. Needs no agent.
    Leave(LeaveOptions),
    Check {
        output: Output,
        root_dir: PathBuf,
        /// `--config`; `None`: the usual file, if it exists.
        config: Option<PathBuf>,
        /// The rules of benchmarks instead of the machine.
        cis: bool,
    },
    /// Manifests, and directories of manifests. Needs no agent.
    Validate {
        files: Vec<PathBuf>,
        output: Output,
    },
    /// Pages about the node for a browser.
    Ui(UiOptions),
    Version,
}

/// The options of `coracle ui`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UiOptions {
    pub listen: SocketAddr,
    /// The files of the certificate and of its key, in PEM; `None`: no TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
}

/// What `coracle images` does.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ImagesCommand {
    /// Without a word: the images of the runtime.
    Runtime,
    /// Those of the runtime and of archives.
    List,
    Import {
        files: Vec<PathBuf>,
        /// Empty: those of the agent.
        directories: Vec<PathBuf>,
        /// Until the images are there.
        wait: bool,
    },
    Remove {
        /// An image, or an archive.
        name: String,
    },
    Export {
        name: String,
        file: PathBuf,
    },
}

/// What `coracle offline` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OfflineCommand {
    List,
    /// Accepts the set of pods that is held.
    Accept,
    /// Whether the pods that run could start from the store. `None`: all.
    Check {
        pod: Option<String>,
    },
    /// Removes stored objects.
    Purge(Purged),
    /// Adds authorities of the API server. `None`: removes them.
    Trust {
        file: Option<PathBuf>,
    },
}

/// What `coracle offline purge` removes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Purged {
    /// Copies of damaged files.
    Damaged,
    All,
    /// `KIND/NAMESPACE/NAME`.
    Object(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Runtime {
    Containerd,
    Crio,
}

/// The options of `coracle setup runtime`.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct SetupOptions {
    pub dry_run: bool,
    /// `None`: the one whose directory of configuration exists.
    pub runtime: Option<Runtime>,
    pub containerd_config: Option<PathBuf>,
    pub certs_dir: Option<PathBuf>,
    /// `--registries-dir`, of CRI-O.
    pub registries_dir: Option<PathBuf>,
    /// `--registry`; empty: the usual ones.
    pub registries: Vec<String>,
    /// `--image-registry` of the agent, with a fixed port.
    pub address: Option<SocketAddr>,
    /// `--image-mirror-file` of the agent; `None`: beside its local socket.
    pub mirror_file: Option<PathBuf>,
    /// `--root-dir` of the agent.
    pub root_dir: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct PodsOptions {
    pub output: Output,
    pub watch: bool,
    pub namespace: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct VolumesOptions {
    pub output: Output,
    pub namespace: Option<String>,
}

impl VolumesOptions {
    /// Whether a namespace is wanted.
    pub(super) fn is_in(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|wanted| wanted == namespace)
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct LogsOptions {
    pub pod: String,
    pub container: Option<String>,
    pub follow: bool,
    pub previous: bool,
    pub tail: Option<u64>,
    pub since: Option<Duration>,
    pub timestamps: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct DebugOptions {
    pub pod: String,
    pub image: String,
    pub target: Option<String>,
    pub name: Option<String>,
    pub stdin: bool,
    pub tty: bool,
    pub command: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ExecOptions {
    pub pod: String,
    pub container: Option<String>,
    pub stdin: bool,
    pub tty: bool,
    /// Empty: `attach`.
    pub command: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ForwardOptions {
    pub pod: String,
    pub addresses: Vec<IpAddr>,
    /// The local port, where 0 is any, and the pod's.
    pub ports: Vec<(u16, u16)>,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct EventsOptions {
    pub pod: Option<String>,
    pub namespace: Option<String>,
    pub output: Output,
    pub watch: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct VerifyOptions {
    /// Empty: all images.
    pub images: Vec<String>,
    pub digests: bool,
    pub output: Output,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct TopOptions {
    pub once: bool,
    pub namespace: Option<String>,
    pub output: Output,
}

/// The commands: name, synopsis, meaning.
pub(super) const COMMANDS: &[(&str, &str, &str)] = &[
    ("pods", "pods [-o json|yaml|wide] [-w] [-n NAMESPACE]", "list the pods; -w keeps watching"),
    ("describe", "describe POD [-n NAMESPACE]", "everything about one pod"),
    (
        "logs",
        "logs POD [-n NAMESPACE] [-c CONTAINER] [-f] [-p] [--tail N] [--since DURATION] [--timestamps]",
        "a container's log; -f follows, -p shows the instance before",
    ),
    (
        "debug",
        "debug POD --image IMAGE [-n NAMESPACE] [--target CONTAINER] [-c NAME] [-i] [-t] [-- COMMAND...]",
        "run an ephemeral container in a pod; --target shares that container's processes, -i stays with it",
    ),
    (
        "exec",
        "exec POD [-n NAMESPACE] [-c CONTAINER] [-i] [-t] -- COMMAND...",
        "run a command in a container; -i passes the input on, -t gives it a terminal",
    ),
    (
        "attach",
        "attach POD [-n NAMESPACE] [-c CONTAINER] [-i] [-t]",
        "connect to a container's first process",
    ),
    (
        "port-forward",
        "port-forward POD [-n NAMESPACE] [--address ADDRESS,...] [LOCAL:]REMOTE...",
        "listen here for connections to a pod's ports",
    ),
    (
        "status",
        "status [-o json|yaml|wide]",
        "node, runtime, sources, memory, problems; wide adds all thresholds and the threads",
    ),
    ("events", "events [POD] [-n NAMESPACE] [-o json|yaml] [-w]", "recent events"),
    (
        "top",
        "top [--once] [-n NAMESPACE] [-o json|yaml]",
        "CPU and memory of pods and containers, every two seconds; --once prints one table",
    ),
    ("images", "images [-o json|yaml]", "the images of the runtime"),
    (
        "images",
        "images list [-o json|yaml]",
        "the images of the runtime and of archives: source, whether they are kept, state",
    ),
    (
        "images",
        "images import FILE... [--images-dir DIR,...] [--no-wait]",
        "copy image archives to the first writable directory of archives, and wait for their images; \
         an interrupted import continues",
    ),
    ("images", "images rm IMAGE|ARCHIVE", "remove an image archive, and release its images"),
    ("images", "images export IMAGE -o FILE", "write an OCI archive of an image of the archives"),
    (
        "images",
        "images verify [--digests] [IMAGE...] [-o json|yaml]",
        "compare the files of images with their layers, with --digests also the contents",
    ),
    (
        "volumes",
        "volumes [-n NAMESPACE] [-o json|yaml]",
        "the volumes of pods: kind, state, the last error; also those that cannot be unmounted",
    ),
    (
        "devices",
        "devices [-o json|yaml]",
        "devices of device plugins and of resource claims, who has them, and the plugins",
    ),
    (
        "offline",
        "offline list [-o wide|json|yaml]",
        "what is stored for a start without the API server, with -o wide each object, and whose pods count",
    ),
    (
        "offline",
        "offline check [POD] [-n NAMESPACE] [-o json|yaml]",
        "whether each pod that runs could start from what is stored, and what is missing",
    ),
    (
        "offline",
        "offline purge --damaged|KIND/NAMESPACE/NAME|--all --yes [-o json|yaml]",
        "remove copies of damaged files, an object, or all that is stored; --all also makes another key",
    ),
    (
        "offline",
        "offline trust FILE|--remove [-o json|yaml]",
        "trust the new authority of the API server, which must have signed its certificate; --remove undoes it",
    ),
    (
        "offline",
        "offline accept [-o json|yaml]",
        "take over the pods of an API server that knows neither this node nor its pods; others stop",
    ),
    (
        "setup",
        "setup runtime [--dry-run] [--runtime containerd|crio] [--containerd-config FILE] [--certs-dir DIR] \
         [--registries-dir DIR] [--registry HOST,...] [--image-registry ADDRESS] [--image-mirror-file FILE] \
         [--root-dir DIR]",
        "make the container runtime pull from image archives first; needs no agent",
    ),
    (
        "join",
        "join HOST:PORT --token ID.SECRET \
         --discovery-token-ca-cert-hash sha256:HASH|--discovery-token-unsafe-skip-ca-verification \
         [--tls-bootstrap-token ID.SECRET] [--token-file FILE] [--node-name NAME] [--node-ip IP,...] \
         [--node-labels KEY=VALUE,...] [--cri-socket SOCKET] [--config FILE] [--root-dir DIR] \
         [--kubernetes-dir DIR] [--ignore-preflight-errors CHECK,...] [--timeout DURATION] [--no-start] \
         [--dry-run]",
        "make this machine a node of a cluster, as kubeadm join does, and wait until it is ready; the same \
         command continues an interrupted one; a token or a file of - is standard input",
    ),
    (
        "join",
        "join --discovery-file FILE|--bootstrap-kubeconfig FILE|--k0s-token FILE [the same options]",
        "the same with a kubeconfig of the cluster, or with a token of k0s",
    ),
    (
        "join",
        "join HOST:PORT --write-bundle FILE [the same options]",
        "check these options with the cluster, and write them with token and authority to a file for several \
         nodes, which install of a bundle uses; changes nothing here",
    ),
    (
        "join",
        "join --from-bundle FILE [the same options]",
        "join with that file; an option of the command has precedence over the same one in the file",
    ),
    (
        "leave",
        "leave [--drain --kubeconfig FILE] [--timeout DURATION] [--root-dir DIR] [--kubernetes-dir DIR] \
         [--dry-run]",
        "stop the agent, remove what coracle join wrote, and list what is left; --drain evicts the pods before",
    ),
    (
        "check",
        "check [-o json|yaml] [--root-dir DIR] [--config FILE]",
        "preflight: what would keep pods from running, and the fix",
    ),
    (
        "check",
        "check --cis [-o json|yaml] [--config FILE]",
        "the rules of the CIS Kubernetes Benchmark (4.x) and of the Kubernetes STIG for this node",
    ),
    (
        "validate",
        "validate FILE... [-o json|yaml]",
        "check manifests and directories of manifests; no agent is needed",
    ),
    (
        "ui",
        "ui [--listen ADDRESS:PORT] [--tls-cert FILE --tls-key FILE] [--insecure-listen]",
        "read-only pages about this node for a browser, on 127.0.0.1:10280 unless --listen names another \
         address; prints a link that works once, and runs until it is interrupted",
    ),
    ("version", "version", "the version"),
];

/// The options of all commands; each command takes those in its row of [`OPTIONS_OF_COMMANDS`].
#[derive(Default)]
struct Options {
    output: Output,
    watch: bool,
    namespace: Option<String>,
    container: Option<String>,
    follow: bool,
    once: bool,
    digests: bool,
    previous: bool,
    tail: Option<u64>,
    since: Option<Duration>,
    timestamps: bool,
    image: Option<String>,
    target: Option<String>,
    stdin: bool,
    tty: bool,
    addresses: Vec<IpAddr>,
    root_dir: PathBuf,
    config: Option<PathBuf>,
    /// Of `check`.
    cis: bool,
    /// `-o` of `images export`.
    file: Option<PathBuf>,
    images_dirs: Vec<PathBuf>,
    no_wait: bool,
    /// Of `offline purge`.
    damaged: bool,
    all: bool,
    yes: bool,
    /// Of `offline trust`.
    remove: bool,
    setup: SetupOptions,
    /// Of `ui`.
    listen: Option<SocketAddr>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    insecure_listen: bool,
    join: JoinOptions,
    /// Of `leave`.
    drain: bool,
    kubeconfig: Option<PathBuf>,
    /// The pod, and what comes after it.
    arguments: Vec<String>,
    /// Whether the option that is being read is one letter behind one dash.
    is_letter: bool,
}

/// Options by command; `local-socket` and `help` go with all of them.
pub(super) const OPTIONS_OF_COMMANDS: &[(&str, &[&str])] = &[
    ("pods", &["output", "watch", "namespace", "all-namespaces"]),
    ("describe", &["namespace"]),
    ("logs", &["namespace", "container", "follow", "previous", "tail", "since", "timestamps"]),
    ("debug", &["namespace", "image", "target", "container", "stdin", "tty"]),
    ("exec", &["namespace", "container", "stdin", "tty"]),
    ("attach", &["namespace", "container", "stdin", "tty"]),
    ("port-forward", &["namespace", "address"]),
    ("status", &["output"]),
    ("events", &["output", "watch", "namespace", "all-namespaces"]),
    ("top", &["once", "namespace", "all-namespaces", "output"]),
    ("images", &["output", "images-dir", "no-wait", "digests"]),
    (
        "setup",
        &[
            "dry-run",
            "runtime",
            "containerd-config",
            "certs-dir",
            "registries-dir",
            "registry",
            "image-registry",
            "image-mirror-file",
            "root-dir",
        ],
    ),
    ("volumes", &["output", "namespace", "all-namespaces"]),
    ("devices", &["output"]),
    ("offline", &["output", "namespace", "damaged", "all", "yes", "remove"]),
    (
        "join",
        &[
            "token",
            "token-file",
            "discovery-token-ca-cert-hash",
            "discovery-token-unsafe-skip-ca-verification",
            "discovery-file",
            "tls-bootstrap-token",
            "k0s-token",
            "bootstrap-kubeconfig",
            "node-name",
            "node-ip",
            "node-labels",
            "cri-socket",
            "config",
            "root-dir",
            "kubernetes-dir",
            "ignore-preflight-errors",
            "timeout",
            "no-start",
            "write-bundle",
            "from-bundle",
            "dry-run",
        ],
    ),
    ("leave", &["drain", "kubeconfig", "timeout", "root-dir", "kubernetes-dir", "dry-run"]),
    ("check", &["output", "root-dir", "config", "cis"]),
    ("validate", &["output"]),
    ("ui", &["listen", "tls-cert", "tls-key", "insecure-listen"]),
    ("version", &[]),
];

/// Where `coracle ui` listens without `--listen`: a port that stays the same, so that a tunnel can name it.
const UI_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10_280);

/// `localhost`, and the default of `--address`.
const LOCALHOST: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// `REMOTE`, `LOCAL:REMOTE` or `:REMOTE`, which is any port here, as is 0 (Go: client-go
/// tools/portforward `parsePorts`).
fn port_pair(text: &str) -> Result<(u16, u16), String> {
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let local = if local.is_empty() { Some(0) } else { from_digits(local) };
    match (local, from_digits(remote)) {
        (Some(local), Some(remote)) if remote > 0 => Ok((local, remote)),
        _ => Err(format!("{text:?} is not of the form [LOCAL:]REMOTE")),
    }
}

/// Parses the arguments after the command's name. `before`: the flags in front of it. `None`:
/// they have `--help`.
///
/// # Errors
/// Every problem with them, after `problems`.
pub(super) fn parse_local(
    name: &str,
    mut parser: lexopt::Parser,
    before: AgentArgs,
    mut problems: Vec<Problem>,
) -> Result<Option<LocalCommand>, Vec<Problem>> {
    let AgentArgs { local_socket: mut socket, root_dir, request, .. } = before;
    let mut options = Options { root_dir, config: request.file, ..Options::default() };
    let takes = own_options(name);
    let mut help = false;
    loop {
        options.is_letter = false;
        let (shown, option) = match parser.next() {
            Ok(None) => break,
            Ok(Some(Arg::Value(word))) => {
                options.arguments.push(word.to_string_lossy().into_owned());
                continue;
            }
            Ok(Some(Arg::Short(letter))) => {
                options.is_letter = true;
                (format!("-{letter}"), short(letter).unwrap_or_default().to_owned())
            }
            Ok(Some(Arg::Long(long))) => (format!("--{long}"), long.to_owned()),
            Err(error) => {
                problems.push(problem(name, "", error.to_string()));
                break;
            }
        };
        let outcome = match option.as_str() {
            "help" => {
                help = true;
                Ok(())
            }
            "local-socket" => value(&mut parser).map(|text| socket = PathBuf::from(text)),
            // There it is a file, not a format.
            "output"
                if name == "images" && options.arguments.first().is_some_and(|word| word == "export") =>
            {
                value(&mut parser).map(|text| options.file = Some(PathBuf::from(text)))
            }
            option if takes.contains(&option) => options.set(option, &mut parser),
            "root-dir" => value(&mut parser)
                .and_then(|_| Err("unknown option: --local-socket selects the agent".to_owned())),
            _ => Err("unknown option".to_owned()),
        };
        if let Err(message) = outcome {
            problems.push(problem(name, &shown, message));
        }
    }
    if help {
        return Ok(None);
    }
    match options.subcommand(name) {
        Ok(subcommand) if problems.is_empty() => return Ok(Some(LocalCommand { socket, subcommand })),
        Ok(_) => {}
        Err(message) => problems.push(problem(name, "", message)),
    }
    Err(problems)
}

fn problem(command: &str, field: &str, message: String) -> Problem {
    Problem { place: command.to_owned(), field: field.to_owned(), message }
}

fn short(letter: char) -> Option<&'static str> {
    Some(match letter {
        'o' => "output",
        'w' => "watch",
        'n' => "namespace",
        'A' => "all-namespaces",
        'c' => "container",
        'f' => "follow",
        'p' => "previous",
        'i' => "stdin",
        't' => "tty",
        'h' => "help",
        _ => return None,
    })
}

/// A path in a file that other programs read must not depend on the working directory.
fn absolute(parser: &mut lexopt::Parser) -> Result<PathBuf, String> {
    let path = PathBuf::from(value(parser)?);
    if path.is_absolute() { Ok(path) } else { Err("must be an absolute path".to_owned()) }
}

fn value(parser: &mut lexopt::Parser) -> Result<String, String> {
    let value = parser.value().map_err(|_| "needs a value".to_owned())?;
    match value.into_string() {
        Ok(text) if text.is_empty() => Err("needs a value".to_owned()),
        Ok(text) => Ok(text),
        Err(_) => Err("the value is not UTF-8 text".to_owned()),
    }
}

/// A bool that may stand alone, or be `=true` or `=false`. Behind one dash it stands alone:
/// what follows is the next letter.
fn switch(parser: &mut lexopt::Parser, is_letter: bool) -> Result<bool, String> {
    if is_letter {
        return Ok(true);
    }
    match parser.optional_value() {
        None => Ok(true),
        Some(text) if text == "true" => Ok(true),
        Some(text) if text == "false" => Ok(false),
        Some(text) => Err(format!("{:?} is neither true nor false", text.to_string_lossy())),
    }
}

impl Options {
    fn set(&mut self, option: &str, parser: &mut lexopt::Parser) -> Result<(), String> {
        match option {
            "output" => {
                let text = value(parser)?;
                self.output = match text.as_str() {
                    "table" => Output::Table,
                    "wide" => Output::Wide,
                    "json" => Output::Json,
                    "yaml" => Output::Yaml,
                    other => return Err(format!("{other:?} must be one of table, wide, json, yaml")),
                };
            }
            "watch" => self.watch = switch(parser, self.is_letter)?,
            "follow" => self.follow = switch(parser, self.is_letter)?,
            "previous" => self.previous = switch(parser, self.is_letter)?,
            "timestamps" => self.timestamps = switch(parser, self.is_letter)?,
            "digests" => self.digests = switch(parser, self.is_letter)?,
            "once" => self.once = switch(parser, self.is_letter)?,
            "namespace" => self.namespace = Some(value(parser)?),
            // The default; kubectl's users type it.
            "all-namespaces" => {
                if switch(parser, self.is_letter)? {
                    self.namespace = None;
                }
            }
            "container" => self.container = Some(value(parser)?),
            "stdin" => self.stdin = switch(parser, self.is_letter)?,
            "tty" => self.tty = switch(parser, self.is_letter)?,
            "address" => {
                for text in value(parser)?.split(',') {
                    match text.trim() {
                        "localhost" => self.addresses.extend(LOCALHOST),
                        text => self
                            .addresses
                            .push(text.parse().map_err(|_| format!("{text:?} is not an IP address"))?),
                    }
                }
            }
            "root-dir" => self.root_dir = PathBuf::from(value(parser)?),
            "images-dir" => {
                self.images_dirs
                    .extend(value(parser)?.split(',').filter(|dir| !dir.is_empty()).map(PathBuf::from));
            }
            "no-wait" => self.no_wait = switch(parser, self.is_letter)?,
            "damaged" => self.damaged = switch(parser, self.is_letter)?,
            "all" => self.all = switch(parser, self.is_letter)?,
            "yes" => self.yes = switch(parser, self.is_letter)?,
            "remove" => self.remove = switch(parser, self.is_letter)?,
            "dry-run" => self.setup.dry_run = switch(parser, self.is_letter)?,
            "runtime" => {
                self.setup.runtime = Some(match value(parser)?.as_str() {
                    "containerd" => Runtime::Containerd,
                    "crio" | "cri-o" => Runtime::Crio,
                    other => return Err(format!("{other:?} must be containerd or crio")),
                });
            }
            "containerd-config" => self.setup.containerd_config = Some(absolute(parser)?),
            "certs-dir" => self.setup.certs_dir = Some(absolute(parser)?),
            "registries-dir" => self.setup.registries_dir = Some(absolute(parser)?),
            "registry" => {
                let names = value(parser)?;
                self.setup.registries.extend(names.split(',').map(|name| name.trim().to_owned()));
            }
            "image-registry" => {
                let text = value(parser)?;
                let address: SocketAddr =
                    text.parse().map_err(|_| format!("{text:?} is not an address with a port"))?;
                self.setup.address = Some(address);
            }
            "listen" => {
                let text = value(parser)?;
                self.listen =
                    Some(text.parse().map_err(|_| format!("{text:?} is not an IP address with a port"))?);
            }
            "tls-cert" => self.tls_cert = Some(PathBuf::from(value(parser)?)),
            "tls-key" => self.tls_key = Some(PathBuf::from(value(parser)?)),
            "insecure-listen" => self.insecure_listen = switch(parser, self.is_letter)?,
            "image-mirror-file" => self.setup.mirror_file = Some(absolute(parser)?),
            "config" => self.config = Some(PathBuf::from(value(parser)?)),
            "cis" => self.cis = switch(parser, self.is_letter)?,
            "image" => self.image = Some(value(parser)?),
            "target" => self.target = Some(value(parser)?),
            "tail" => {
                let text = value(parser)?;
                // -1 means all lines, as in kubectl.
                self.tail = match text.as_str() {
                    "-1" => None,
                    text => Some(text.parse().map_err(|_| format!("{text:?} is not a number of lines"))?),
                };
            }
            "since" => {
                let since = GoDuration::parse(&value(parser)?).map_err(|error| error.to_string())?;
                if since <= GoDuration::ZERO {
                    return Err(format!("{since} must be greater than zero"));
                }
                self.since = Some(since.to_std());
            }
            "drain" => self.drain = switch(parser, self.is_letter)?,
            "kubeconfig" => self.kubeconfig = Some(PathBuf::from(value(parser)?)),
            "no-start" => self.join.no_start = switch(parser, self.is_letter)?,
            "discovery-token-unsafe-skip-ca-verification" => {
                self.join.is_unverified = switch(parser, self.is_letter)?;
            }
            other => return self.join.set(other, &value(parser)?),
        }
        Ok(())
    }

    fn images_command(self) -> Result<ImagesCommand, String> {
        let mut words = self.arguments.into_iter();
        let word = words.next();
        let mut rest: Vec<String> = words.collect();
        let only_argument = |rest: &mut Vec<String>, what: &str| match rest.get(1) {
            Some(extra) => Err(format!("unexpected argument {extra:?}")),
            None => rest.pop().ok_or_else(|| format!("name {what}")),
        };
        let command = match word.as_deref() {
            None => ImagesCommand::Runtime,
            Some("list") => ImagesCommand::List,
            Some("import") if rest.is_empty() => return Err("name an image archive".to_owned()),
            Some("import") => {
                let files = rest.drain(..).map(PathBuf::from).collect();
                ImagesCommand::Import { files, directories: self.images_dirs, wait: !self.no_wait }
            }
            Some("rm") => ImagesCommand::Remove { name: only_argument(&mut rest, "an image or an archive")? },
            Some("export") => ImagesCommand::Export {
                name: only_argument(&mut rest, "an image")?,
                file: self.file.ok_or_else(|| "-o: name the file to write".to_owned())?,
            },
            Some(other) => {
                let commands = "list, import, rm, export and verify";
                return Err(format!("images has no command {other:?}; it has {commands}"));
            }
        };
        match rest.first() {
            Some(extra) => Err(format!("unexpected argument {extra:?}")),
            None => Ok(command),
        }
    }

    fn offline_command(self) -> Result<OfflineCommand, String> {
        let mut words = self.arguments.into_iter();
        let word = words.next().unwrap_or_default();
        let (argument, extra) = (words.next(), words.next());
        let is_pod_wanted = word == "check" && argument.is_some();
        for (option, is_set, is_known) in [
            ("--namespace", self.namespace.is_some(), is_pod_wanted),
            ("--damaged", self.damaged, word == "purge"),
            ("--all", self.all, word == "purge"),
            ("--yes", self.yes, word == "purge"),
            ("--remove", self.remove, word == "trust"),
        ] {
            if is_set && !is_known {
                let owner = match option {
                    "--namespace" => "check with a pod",
                    "--remove" => "trust",
                    _ => "purge",
                };
                return Err(format!("{option} is for offline {owner}"));
            }
        }
        let unexpected = match word.as_str() {
            "check" | "purge" | "trust" => extra,
            _ => argument.clone(),
        };
        let command = match (word.as_str(), self.damaged, self.all, argument) {
            ("list", ..) => OfflineCommand::List,
            ("accept", ..) => OfflineCommand::Accept,
            ("check", .., pod) => OfflineCommand::Check {
                pod: pod.map(|pod| match &self.namespace {
                    Some(namespace) if !pod.contains('/') => format!("{namespace}/{pod}"),
                    _ => pod,
                }),
            },
            ("purge", true, false, None) => OfflineCommand::Purge(Purged::Damaged),
            ("purge", false, true, None) if self.yes => OfflineCommand::Purge(Purged::All),
            ("purge", false, true, None) => {
                let text =
                    "removes all that is stored, also the key of Secrets and tokens; confirm it with --yes";
                return Err(format!("purge --all {text}"));
            }
            ("purge", false, false, Some(object)) => OfflineCommand::Purge(Purged::Object(object)),
            ("purge", ..) => {
                return Err("purge: name one of --damaged, --all or KIND/NAMESPACE/NAME".to_owned());
            }
            ("trust", .., None) if self.remove => OfflineCommand::Trust { file: None },
            ("trust", .., Some(file)) if !self.remove => {
                OfflineCommand::Trust { file: Some(PathBuf::from(file)) }
            }
            ("trust", ..) => return Err("trust: name either a file or --remove".to_owned()),
            ("", ..) => return Err("name a command: list, check, purge, trust or accept".to_owned()),
            (other, ..) => {
                return Err(format!(
                    "offline has no command {other:?}; it has list, check, purge, trust and accept"
                ));
            }
        };
        match unexpected {
            Some(extra) => Err(format!("unexpected argument {extra:?}")),
            None => Ok(command),
        }
    }

    fn ui_options(self) -> Result<UiOptions, String> {
        let listen = self.listen.unwrap_or(UI_ADDRESS);
        let tls = match (self.tls_cert, self.tls_key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) => return Err("--tls-cert needs --tls-key".to_owned()),
            (None, Some(_)) => return Err("--tls-key needs --tls-cert".to_owned()),
        };
        if !listen.ip().is_loopback() && tls.is_none() && !self.insecure_listen {
            return Err(format!(
                "--listen: {listen} can be reached from other machines, and without TLS they can read the \
                 link: give --tls-cert and --tls-key, or --insecure-listen"
            ));
        }
        Ok(UiOptions { listen, tls })
    }

    fn subcommand(self, name: &str) -> Result<Subcommand, String> {
        let most = match name {
            "describe" | "logs" | "events" | "attach" | "join" => 1,
            // The pod, and a command of any length.
            "debug" | "exec" | "port-forward" | "validate" | "images" | "offline" | "setup" => usize::MAX,
            _ => 0,
        };
        if let Some(extra) = self.arguments.get(most) {
            return Err(format!("unexpected argument {extra:?}"));
        }
        if name == "setup" {
            return match self.arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["runtime"] => Ok(Subcommand::Setup(SetupOptions { root_dir: self.root_dir, ..self.setup })),
                ["runtime", extra, ..] => Err(format!("unexpected argument {extra:?}")),
                [] => Err("name what to set up: runtime".to_owned()),
                [first, ..] => Err(format!("cannot set up {first:?}, only runtime")),
            };
        }
        if name == "join" || name == "leave" {
            let Options { mut arguments, root_dir, config, setup, join, drain, kubeconfig, .. } = self;
            let join = JoinOptions { root_dir, config, dry_run: setup.dry_run, ..join };
            return match name {
                "join" => Ok(Subcommand::Join(Box::new(join.complete(arguments.pop())?))),
                _ => Ok(Subcommand::Leave(join.into_leave(drain, kubeconfig)?)),
            };
        }
        if name == "images" && self.arguments.first().is_some_and(|first| first == "verify") {
            let images = self.arguments.into_iter().skip(1).collect();
            return Ok(Subcommand::VerifyImages(VerifyOptions {
                images,
                digests: self.digests,
                output: self.output,
            }));
        }
        if self.digests {
            return Err("--digests is for images verify".to_owned());
        }
        if name == "images" {
            return Ok(Subcommand::Images { output: self.output, command: self.images_command()? });
        }
        if name == "ui" {
            return Ok(Subcommand::Ui(self.ui_options()?));
        }
        if name == "offline" {
            return Ok(Subcommand::Offline { output: self.output, command: self.offline_command()? });
        }
        let Options { output, watch, namespace, container, stdin, tty, .. } = self;
        if name == "validate" {
            if self.arguments.is_empty() {
                return Err("name a manifest or a directory of manifests".to_owned());
            }
            let files = self.arguments.into_iter().map(PathBuf::from).collect();
            return Ok(Subcommand::Validate { files, output });
        }
        let mut arguments = self.arguments.into_iter();
        let named = arguments.next();
        // For the commands that need a pod.
        let pod = match (&named, &namespace) {
            (Some(pod), Some(namespace)) if !pod.contains('/') => Ok(format!("{namespace}/{pod}")),
            (Some(pod), _) => Ok(pod.clone()),
            (None, _) => Err("name a pod".to_owned()),
        };
        Ok(match name {
            "pods" => Subcommand::Pods(PodsOptions { output, watch, namespace }),
            "describe" => Subcommand::Describe { pod: pod? },
            "logs" => Subcommand::Logs(LogsOptions {
                pod: pod?,
                container,
                follow: self.follow,
                previous: self.previous,
                tail: self.tail,
                since: self.since,
                timestamps: self.timestamps,
            }),
            "debug" if tty && !stdin => return Err("-t needs -i: a terminal is for input".to_owned()),
            "debug" => Subcommand::Debug(DebugOptions {
                pod: pod?,
                image: self.image.ok_or_else(|| "--image: name an image".to_owned())?,
                target: self.target,
                name: container,
                stdin,
                tty,
                command: arguments.collect(),
            }),
            "exec" | "attach" => {
                let (pod, command) = (pod?, arguments.collect::<Vec<_>>());
                if name == "exec" && command.is_empty() {
                    return Err("name a command after --".to_owned());
                }
                Subcommand::Exec(ExecOptions { pod, container, stdin, tty, command })
            }
            "port-forward" => {
                let pod = pod?;
                let ports = arguments.map(|text| port_pair(&text)).collect::<Result<Vec<_>, _>>()?;
                if ports.is_empty() {
                    return Err("name a port".to_owned());
                }
                let addresses = if self.addresses.is_empty() { LOCALHOST.to_vec() } else { self.addresses };
                Subcommand::PortForward(ForwardOptions { pod, addresses, ports })
            }
            "status" => Subcommand::Status { output },
            "events" => Subcommand::Events(EventsOptions { pod: named, namespace, output, watch }),
            "top" => Subcommand::Top(TopOptions { once: self.once, namespace, output }),
            "volumes" => Subcommand::Volumes(VolumesOptions { output, namespace }),
            "devices" => Subcommand::Devices { output },
            "check" => {
                Subcommand::Check { output, root_dir: self.root_dir, config: self.config, cis: self.cis }
            }
            _ => Subcommand::Version,
        })
    }
}
