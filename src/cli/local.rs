//! The commands that ask a running agent: their options and their parsing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use lexopt::Arg;

use super::parse::Command;
use crate::config::{AgentArgs, GoDuration, Problem};

/// How a command prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// A table for people.
    #[default]
    Table,
    /// A table with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// A command with the agent it asks.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalCommand {
    /// The socket that the agent answers at.
    pub socket: PathBuf,
    /// What is asked.
    pub ask: Ask,
}

/// What is asked of a running agent.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// `coracle pods`.
    Pods {
        /// `-o`.
        output: Output,
        /// `-w`.
        watch: bool,
        /// `-n`.
        namespace: Option<String>,
    },
    /// `coracle describe POD`.
    Describe {
        /// The pod: a name, namespace/name or UID.
        pod: String,
        /// `-n`.
        namespace: Option<String>,
    },
    /// `coracle logs POD`.
    Logs {
        /// The pod: a name, namespace/name or UID.
        pod: String,
        /// `-n`.
        namespace: Option<String>,
        /// `-c`.
        container: Option<String>,
        /// `-f`.
        follow: bool,
        /// `-p`.
        previous: bool,
        /// `--tail`.
        tail: Option<u64>,
        /// `--since`.
        since: Option<GoDuration>,
        /// `--timestamps`.
        timestamps: bool,
    },
    /// `coracle debug POD`.
    Debug {
        /// The pod: a name, namespace/name or UID.
        pod: String,
        /// `-n`.
        namespace: Option<String>,
        /// `--image`.
        image: String,
        /// `--target`.
        target: Option<String>,
        /// `-c`.
        name: Option<String>,
        /// `-i`.
        stdin: bool,
        /// `-t`.
        tty: bool,
        /// What comes after `--`.
        command: Vec<String>,
    },
    /// `coracle exec POD -- COMMAND`, or `coracle attach POD` without one.
    Exec {
        /// The pod: a name, namespace/name or UID.
        pod: String,
        /// `-n`.
        namespace: Option<String>,
        /// `-c`.
        container: Option<String>,
        /// `-i`.
        stdin: bool,
        /// `-t`.
        tty: bool,
        /// What comes after the pod.
        command: Vec<String>,
    },
    /// `coracle port-forward POD PORT...`.
    PortForward {
        /// The pod: a name, namespace/name or UID.
        pod: String,
        /// `-n`.
        namespace: Option<String>,
        /// `--address`.
        addresses: Vec<IpAddr>,
        /// Here, where 0 is any, and in the pod.
        ports: Vec<(u16, u16)>,
    },
    /// `coracle status`.
    Status {
        /// `-o`.
        output: Output,
    },
    /// `coracle events [POD]`.
    Events {
        /// The pod, if only one is of interest.
        pod: Option<String>,
        /// `-n`.
        namespace: Option<String>,
        /// `-o`.
        output: Output,
        /// `-w`.
        watch: bool,
    },
    /// `coracle top`.
    Top {
        /// `--once`.
        once: bool,
        /// `-n`.
        namespace: Option<String>,
        /// `-o`.
        output: Output,
    },
    /// `coracle images`.
    Images {
        /// `-o`.
        output: Output,
    },
    /// `coracle check`.
    Check {
        /// `-o`.
        output: Output,
        /// `--root-dir`.
        root_dir: PathBuf,
    },
    /// `coracle validate FILE...`: the only command that needs no agent and asks none.
    Validate {
        /// Manifests, and directories of manifests.
        files: Vec<PathBuf>,
        /// `-o`.
        output: Output,
    },
    /// `coracle version`.
    Version,
}

/// The commands: name, synopsis, meaning.
pub const COMMANDS: &[(&str, &str, &str)] = &[
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
        "be connected with a container's first process",
    ),
    (
        "port-forward",
        "port-forward POD [-n NAMESPACE] [--address ADDRESS,...] [LOCAL:]REMOTE...",
        "listen here for connections to a pod's ports",
    ),
    ("status", "status [-o json|yaml]", "node, runtime, sources, threads, memory, problems"),
    ("events", "events [POD] [-n NAMESPACE] [-o json|yaml] [-w]", "recent events"),
    (
        "top",
        "top [--once] [-n NAMESPACE] [-o json|yaml]",
        "CPU and memory of pods and containers, every two seconds; --once prints one table",
    ),
    ("images", "images [-o json|yaml]", "the images on this machine"),
    (
        "check",
        "check [-o json|yaml] [--root-dir DIR]",
        "preflight: what would keep pods from running, and the fix",
    ),
    (
        "validate",
        "validate FILE... [-o json|yaml]",
        "check manifests and directories of manifests; no agent is needed",
    ),
    ("version", "version", "the version"),
];

/// Every option of every command; each command takes those in its row of [`TAKES`].
#[derive(Default)]
struct Options {
    output: Output,
    watch: bool,
    namespace: Option<String>,
    container: Option<String>,
    follow: bool,
    once: bool,
    previous: bool,
    tail: Option<u64>,
    since: Option<GoDuration>,
    timestamps: bool,
    image: Option<String>,
    target: Option<String>,
    stdin: bool,
    tty: bool,
    addresses: Vec<IpAddr>,
    root_dir: PathBuf,
    words: Vec<String>,
    /// Whether the option that is being read is one letter behind one dash.
    is_letter: bool,
}

/// Options by command; `local-socket` and `help` go with all of them.
const TAKES: &[(&str, &[&str])] = &[
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
    ("images", &["output"]),
    ("check", &["output", "root-dir"]),
    ("validate", &["output"]),
    ("version", &[]),
];

/// `localhost`, and what is listened at without an `--address`.
const LOCALHOST: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// `REMOTE`, `LOCAL:REMOTE` or `:REMOTE`, which is any port here.
fn port_pair(text: &str) -> Result<(u16, u16), String> {
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let local = if local.is_empty() { Some(0) } else { port(local) };
    match (local, port(remote)) {
        (Some(local), Some(remote)) => Ok((local, remote)),
        _ => Err(format!("{text:?} is not of the form [LOCAL:]REMOTE")),
    }
}

/// Reads the rest of the line after the command's name. `before`: the flags that came before it.
///
/// # Errors
/// Every problem with it, after those found before.
pub fn parse_local(
    name: &str,
    mut parser: lexopt::Parser,
    before: AgentArgs,
    mut problems: Vec<Problem>,
) -> Result<Command, Vec<Problem>> {
    let AgentArgs { local_socket: mut socket, root_dir, .. } = before;
    let mut options = Options { root_dir, ..Options::default() };
    let takes = TAKES.iter().find(|(command, _)| *command == name).map_or(&[][..], |(_, takes)| takes);
    let mut help = false;
    loop {
        options.is_letter = false;
        let (shown, option) = match parser.next() {
            Ok(None) => break,
            Ok(Some(Arg::Value(word))) => {
                options.words.push(word.to_string_lossy().into_owned());
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
            option if takes.contains(&option) => options.set(option, &mut parser),
            "root-dir" => value(&mut parser)
                .and_then(|_| Err("unknown option: --local-socket names the agent to ask".to_owned())),
            _ => Err("unknown option".to_owned()),
        };
        if let Err(message) = outcome {
            problems.push(problem(name, &shown, message));
        }
    }
    if help && let Some((known, ..)) = COMMANDS.iter().find(|(known, ..)| *known == name) {
        return Ok(Command::LocalHelp(known));
    }
    let ask = options.ask(name);
    match ask {
        Ok(ask) if problems.is_empty() => Ok(Command::Local(LocalCommand { socket, ask })),
        Ok(_) => Err(problems),
        Err(message) => {
            problems.push(problem(name, "", message));
            Err(problems)
        }
    }
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
            "once" => self.once = switch(parser, self.is_letter)?,
            "namespace" => self.namespace = Some(value(parser)?),
            // What happens anyway; fingers that know kubectl type it.
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
            "image" => self.image = Some(value(parser)?),
            "target" => self.target = Some(value(parser)?),
            "tail" => {
                let text = value(parser)?;
                // -1 asks for all lines, as in kubectl.
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
                self.since = Some(since);
            }
            _ => return Err("unknown option".to_owned()),
        }
        Ok(())
    }

    fn ask(self, name: &str) -> Result<Ask, String> {
        let most = match name {
            "describe" | "logs" | "events" | "attach" => 1,
            // The pod, and a command of any length.
            "debug" | "exec" | "port-forward" | "validate" => usize::MAX,
            _ => 0,
        };
        if let Some(extra) = self.words.get(most) {
            return Err(format!("unexpected argument {extra:?}"));
        }
        if name == "validate" {
            if self.words.is_empty() {
                return Err("name a manifest or a directory of manifests".to_owned());
            }
            let files = self.words.into_iter().map(PathBuf::from).collect();
            return Ok(Ask::Validate { files, output: self.output });
        }
        let mut words = self.words.into_iter();
        let pod = words.next();
        let needed = |pod: Option<String>| pod.ok_or_else(|| "name a pod".to_owned());
        let (output, watch, namespace) = (self.output, self.watch, self.namespace);
        Ok(match name {
            "pods" => Ask::Pods { output, watch, namespace },
            "describe" => Ask::Describe { pod: needed(pod)?, namespace },
            "logs" => Ask::Logs {
                pod: needed(pod)?,
                namespace,
                container: self.container,
                follow: self.follow,
                previous: self.previous,
                tail: self.tail,
                since: self.since,
                timestamps: self.timestamps,
            },
            "debug" if self.tty && !self.stdin => {
                return Err("-t goes with -i only: a terminal is for somebody who types".to_owned());
            }
            "debug" => Ask::Debug {
                pod: needed(pod)?,
                namespace,
                image: self.image.ok_or_else(|| "--image: name an image".to_owned())?,
                target: self.target,
                name: self.container,
                stdin: self.stdin,
                tty: self.tty,
                command: words.collect(),
            },
            "exec" | "attach" => {
                let pod = needed(pod)?;
                let command: Vec<String> = words.collect();
                if name == "exec" && command.is_empty() {
                    return Err("name a command after --".to_owned());
                }
                let (container, stdin, tty) = (self.container, self.stdin, self.tty);
                Ask::Exec { pod, namespace, container, stdin, tty, command }
            }
            "port-forward" => {
                let pod = needed(pod)?;
                let ports = words.map(|word| port_pair(&word)).collect::<Result<Vec<_>, _>>()?;
                if ports.is_empty() {
                    return Err("name a port".to_owned());
                }
                let addresses = if self.addresses.is_empty() { LOCALHOST.to_vec() } else { self.addresses };
                Ask::PortForward { pod, namespace, addresses, ports }
            }
            "status" => Ask::Status { output },
            "events" => Ask::Events { pod, namespace, output, watch },
            "top" => Ask::Top { once: self.once, namespace, output },
            "images" => Ask::Images { output },
            "check" => Ask::Check { output, root_dir: self.root_dir },
            _ => Ask::Version,
        })
    }
}
