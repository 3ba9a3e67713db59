//! Parses requests for streams (pure).

use crate::cri::Streams;
use crate::server::backend::Switches;
use crate::transport::http1::RequestHead;

use super::rejection::Rejection;
use super::{channels, tunnel};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Exec,
    Attach,
    PortForward,
}

impl Verb {
    /// The name of the verb in metrics.
    pub(super) fn subresource(self) -> &'static str {
        match self {
            Verb::Exec => "exec",
            Verb::Attach => "attach",
            Verb::PortForward => "portforward",
        }
    }
}

/// How bytes are moved between the client and the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// The client has not requested an upgrade.
    Plain,
    /// Bytes are passed on unchanged.
    Splice,
    /// Converted from WebSocket (`v5.channel.k8s.io`) to SPDY (`v4.channel.k8s.io`).
    Channels,
    /// SPDY in WebSocket messages. The client offers these protocols for the SPDY connection.
    Tunnel(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StreamRequest {
    pub verb: Verb,
    pub namespace: String,
    pub pod: String,
    /// Empty if the path has no UID.
    pub uid: String,
    /// Empty for port-forward.
    pub container: String,
    pub streams: Streams,
    pub command: Vec<String>,
    pub ports: Vec<u16>,
    pub mode: Mode,
}

impl StreamRequest {
    pub(super) fn read(head: &RequestHead, switches: Switches) -> Result<StreamRequest, Rejection> {
        if !switches.debugging {
            return Err(Rejection::closing(405, "Debug endpoints are disabled.\n"));
        }
        let mut request = path(&head.target.path)?;
        if !matches!(head.method.as_str(), "GET" | "POST") {
            return Err(Rejection::closing(405, "405: Method Not Allowed"));
        }
        request.mode = mode(head, request.verb, switches.websockets);
        match request.verb {
            Verb::PortForward => {
                let names_ports = head.is_websocket() && !matches!(request.mode, Mode::Tunnel(_));
                request.ports = if names_ports { ports(head)? } else { Vec::new() };
            }
            Verb::Exec | Verb::Attach => {
                request.streams = streams(head)?;
                request.command = head.target.all("command").map(str::to_owned).collect();
            }
        }
        Ok(request)
    }
}

fn path(path: &str) -> Result<StreamRequest, Rejection> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let verb = match parts.first() {
        Some(&"exec") => Verb::Exec,
        Some(&"attach") => Verb::Attach,
        _ => Verb::PortForward,
    };
    let (namespace, pod, uid, container) = match (verb, parts.get(1..).unwrap_or_default()) {
        (Verb::PortForward, &[namespace, pod]) => (namespace, pod, "", ""),
        (Verb::PortForward, &[namespace, pod, uid]) => (namespace, pod, uid, ""),
        (Verb::Exec | Verb::Attach, &[namespace, pod, container]) => (namespace, pod, "", container),
        (Verb::Exec | Verb::Attach, &[namespace, pod, uid, container]) => (namespace, pod, uid, container),
        _ => return Err(Rejection::closing(404, "404: Page Not Found")),
    };
    Ok(StreamRequest {
        verb,
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        uid: uid.to_owned(),
        container: container.to_owned(),
        streams: Streams::default(),
        command: Vec::new(),
        ports: Vec::new(),
        mode: Mode::Plain,
    })
}

fn streams(head: &RequestHead) -> Result<Streams, Rejection> {
    let is_on = |key: &str| head.target.get(key) == Some("1");
    let (tty, stdin, stdout) = (is_on("tty"), is_on("input"), is_on("output"));
    // A terminal has no separate stderr.
    let stderr = is_on("error") && !tty;
    if !(stdin || stdout || stderr) {
        return Err(Rejection::closing(400, "you must specify at least 1 of stdin, stdout, stderr"));
    }
    Ok(Streams { stdin, stdout, stderr, tty })
}

fn ports(head: &RequestHead) -> Result<Vec<u16>, Rejection> {
    let rejected = |text: String| Err(Rejection::closing(400, text));
    let mut ports = Vec::new();
    for text in head.target.all("port").flat_map(|value| value.split(',')) {
        if text.is_empty() {
            return rejected("query parameter \"port\" cannot be empty".to_owned());
        }
        let reason = match text.parse::<u64>().map(u16::try_from) {
            Ok(_) if text.starts_with('+') => "invalid syntax",
            Ok(Ok(0)) => return rejected(format!("port {text:?} must be > 0")),
            Ok(Ok(port)) => {
                ports.push(port);
                continue;
            }
            Ok(Err(_)) => "value out of range",
            Err(_) => "invalid syntax",
        };
        return rejected(format!(
            "unable to parse {text:?} as a port: strconv.ParseUint: parsing {text:?}: {reason}"
        ));
    }
    if ports.is_empty() {
        return rejected("query parameter \"port\" is required".to_owned());
    }
    Ok(ports)
}

fn mode(head: &RequestHead, verb: Verb, websockets: bool) -> Mode {
    if !head.fields.has_element("Connection", "upgrade") {
        return Mode::Plain;
    }
    if !websockets || !head.is_websocket() {
        return Mode::Splice;
    }
    let offered = || head.fields.elements("Sec-WebSocket-Protocol");
    match verb {
        Verb::PortForward => {
            let hidden: Vec<String> = offered()
                .filter_map(|offer| offer.strip_prefix(tunnel::PREFIX))
                .filter(|protocol| protocol.ends_with(".k8s.io"))
                .map(str::to_owned)
                .collect();
            if hidden.is_empty() { Mode::Splice } else { Mode::Tunnel(hidden) }
        }
        Verb::Exec | Verb::Attach if offered().any(|offer| offer == channels::CLIENT_PROTOCOL) => {
            Mode::Channels
        }
        Verb::Exec | Verb::Attach => Mode::Splice,
    }
}
