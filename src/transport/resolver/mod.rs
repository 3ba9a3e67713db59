//! Look-ups of the addresses of names, by the files `hosts` and `resolv.conf` and by DNS, as on a
//! machine with glibc (resolv.conf(5), hosts(5), RFC 1035).
//!
//! The C library of the static build asks all servers at once and takes the first answer that a name
//! does not exist, also for only one of the two types of addresses. Its look-ups cannot be
//! interrupted, either. So all builds look up names here:
//!
//! - `config`, `hosts`: the two files, which are read for each look-up.
//! - `message`: queries and answers (pure).
//! - `exchange`: questions to one server.
//! - `order`: which address is tried first (pure).
//!
//! Invariants: every wait has a deadline and a stop token; no thread is needed; an answer is
//! accepted only from the server that was asked, to the port, the random number and the question.
//!
//! DIFFERS: `nsswitch.conf`, `gai.conf` and the variables `RES_OPTIONS` and `LOCALDOMAIN` are not
//! read: the order is the file `hosts`, then DNS.

mod config;
mod exchange;
#[cfg(test)]
pub(super) mod fuzz;
mod hosts;
mod message;
mod order;
pub(super) mod zone;

use std::io::BufReader;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use config::Config;
use exchange::{Outcome, QueryOptions};
use message::Kind;

use super::dial::socket::Limit;
use crate::util::{threads, untrusted};

/// The limit of `resolv.conf`.
const MAX_CONFIG: u64 = 64 << 10;

/// Why a name has no address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    /// The server that was asked last.
    pub(super) server: Option<SocketAddr>,
    pub(super) reason: Reason,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    /// The name does not exist, or it has no address.
    NoSuchHost,
    /// A server failed.
    Misbehaving,
    /// No server can be reached, with the kernel's reason for the last one.
    Unreachable(String),
    /// No server answered in time.
    Timeout,
    /// The caller's stop token.
    Stopped,
}

/// The addresses of a name, in the order in which they are to be tried. The limit has a deadline.
pub(super) fn resolve(host: &str, limit: &Limit) -> Result<Vec<IpAddr>, Failure> {
    let _waiting = threads::waiting("name look-up");
    if message::encode(host).is_none_or(|name| name.len() < 2) {
        return Err(Failure { server: None, reason: Reason::NoSuchHost });
    }
    let local = from_hosts(Path::new("/etc/hosts"), host);
    let mut found = match local {
        found if !found.is_empty() => found,
        // RFC 6761: such names never leave the machine.
        _ if is_this_machine(host) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        _ => {
            // Without a readable file the server is this machine, as in the C library.
            let text =
                untrusted::read_own(Path::new("/etc/resolv.conf"), MAX_CONFIG).unwrap_or_else(|error| {
                    log::debug!("/etc/resolv.conf: {error}");
                    Vec::new()
                });
            let machine = rustix::system::uname();
            let config = Config::parse(&text, &machine.nodename().to_string_lossy());
            search(host, &config, limit)?
        }
    };
    order::sort(&mut found, source);
    Ok(found)
}

fn from_hosts(path: &Path, host: &str) -> Vec<IpAddr> {
    let read = std::fs::File::open(path).and_then(|file| hosts::find(BufReader::new(file), host));
    read.unwrap_or_else(|error| {
        log::debug!("{}: {error}", path.display());
        Vec::new()
    })
}

fn is_this_machine(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let last = host.rsplit('.').next().unwrap_or(host);
    last.eq_ignore_ascii_case("localhost")
}

/// The address from which this machine would connect to `to`.
fn source(to: IpAddr) -> Option<IpAddr> {
    let any = if to.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // A route is searched, and nothing is sent.
    socket.connect((to, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// The names to look up, in their order, without a final dot.
fn candidates(host: &str, config: &Config) -> Vec<String> {
    if let Some(host) = host.strip_suffix('.') {
        return vec![host.to_owned()];
    }
    let below = config.search.iter().map(|domain| match domain.as_str() {
        "" => host.to_owned(),
        domain => format!("{host}.{domain}"),
    });
    let mut names: Vec<String> = below.collect();
    let dots = host.bytes().filter(|byte| *byte == b'.').count();
    match dots >= config.dots {
        true => names.insert(0, host.to_owned()),
        false => names.push(host.to_owned()),
    }
    // The search list may have the root.
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

/// Looks up a name by DNS, below each search domain.
fn search(host: &str, config: &Config, limit: &Limit) -> Result<Vec<IpAddr>, Failure> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut servers = config.servers.clone();
    if config.rotate && !servers.is_empty() {
        let first = NEXT.fetch_add(1, Ordering::Relaxed) % servers.len();
        servers.rotate_left(first);
    }
    let mut last = Failure { server: None, reason: Reason::NoSuchHost };
    for name in candidates(host, config) {
        let Some(encoded) = message::encode(&name) else { continue };
        let failure = match look_up(&encoded, &servers, config, limit) {
            Ok(found) => return Ok(found),
            Err(failure) => failure,
        };
        match failure.reason {
            // A later name that does not exist does not prove that this one does not.
            Reason::NoSuchHost if last.reason == Reason::Misbehaving => {}
            Reason::NoSuchHost | Reason::Misbehaving => last = failure,
            // No other name would get an answer.
            _ => return Err(failure),
        }
    }
    Err(last)
}

/// Looks up an encoded name. Servers are asked in their order until the questions about both types
/// have answers; a server's answer that the name does not exist is final for its type.
fn look_up(
    name: &[u8],
    servers: &[SocketAddr],
    config: &Config,
    limit: &Limit,
) -> Result<Vec<IpAddr>, Failure> {
    let mut missing = if config.no_ipv6 { vec![Kind::A] } else { vec![Kind::A, Kind::Aaaa] };
    let mut found = Vec::new();
    let mut failure = Failure { server: None, reason: Reason::NoSuchHost };
    let mut reason = Reason::Timeout;
    for _ in 0..config.attempts {
        for (position, server) in servers.iter().enumerate() {
            let options =
                QueryOptions { tcp: config.tcp, edns: config.edns, patience: config.patience(position) };
            failure.server = Some(*server);
            let mut open = Vec::new();
            for (kind, outcome) in query_server(*server, name, &missing, options, config.sequential, limit) {
                if limit.stop.is_stopped() {
                    return Err(Failure { reason: Reason::Stopped, ..failure });
                }
                match outcome {
                    Outcome::Found(addresses) => found.extend(addresses),
                    Outcome::NoName => {}
                    other => {
                        open.push(kind);
                        reason = match other {
                            Outcome::Unreachable(message) => Reason::Unreachable(message),
                            Outcome::Silent => Reason::Timeout,
                            _ => Reason::Misbehaving,
                        };
                    }
                }
            }
            missing = open;
            // Some servers never answer about a type that they do not know.
            if missing.is_empty() || !found.is_empty() {
                return if found.is_empty() { Err(failure) } else { Ok(found) };
            }
            if limit.is_over() {
                return Err(Failure { reason: Reason::Timeout, ..failure });
            }
        }
    }
    Err(Failure { reason, ..failure })
}

/// Asks one server. What it does not answer beside another question, or not with an extension, it
/// is asked again alone, or without.
fn query_server(
    server: SocketAddr,
    name: &[u8],
    kinds: &[Kind],
    options: QueryOptions,
    sequential: bool,
    limit: &Limit,
) -> Vec<(Kind, Outcome)> {
    let each = |options: QueryOptions, kind: &Kind| exchange::query(server, name, &[*kind], options, limit);
    let mut outcomes: Vec<Outcome> = match sequential {
        true => kinds.iter().flat_map(|kind| each(options, kind)).collect(),
        false => exchange::query(server, name, kinds, options, limit),
    };
    let is_reachable =
        outcomes.iter().any(|outcome| !matches!(outcome, Outcome::Silent | Outcome::Unreachable(_)));
    for (kind, outcome) in kinds.iter().zip(&mut outcomes) {
        let again = match outcome {
            Outcome::Silent if is_reachable && !sequential => each(options, kind),
            Outcome::Failed if options.edns => each(QueryOptions { edns: false, ..options }, kind),
            _ => continue,
        };
        *outcome = again.into_iter().next().unwrap_or(Outcome::Silent);
    }
    kinds.iter().copied().zip(outcomes).collect()
}

#[cfg(test)]
mod tests;
