//! One server's answers, by UDP and by TCP.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::message::{self, Kind, Response};
use crate::transport::dial::error;
use crate::transport::dial::socket::{Limit, Socket};
use crate::util::token;

/// Datagrams that answer no question, per question: more are an attempt to guess its number.
const MAX_FOREIGN: usize = 32;
/// The size of a datagram that is read; longer ones do not occur.
const DATAGRAM: usize = 4096;

/// The result of one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The name exists; it may have no address of the type.
    Found(Vec<IpAddr>),
    /// The name does not exist.
    NoName,
    /// The server cannot answer.
    Failed,
    /// The server cannot be reached.
    Unreachable(String),
    /// No answer in time.
    Silent,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct QueryOptions {
    pub(super) tcp: bool,
    pub(super) edns: bool,
    pub(super) patience: Duration,
}

/// Asks a server about the addresses of an encoded name, one question for each type at once.
pub(super) fn query(
    server: SocketAddr,
    name: &[u8],
    kinds: &[Kind],
    options: QueryOptions,
    limit: &Limit,
) -> Vec<Outcome> {
    let outcomes = match options.tcp {
        true => vec![None; kinds.len()],
        false => by_udp(server, name, kinds, options, &limit.within(options.patience)),
    };
    let finish = |(kind, outcome): (&Kind, Option<Outcome>)| match outcome {
        Some(outcome) => outcome,
        None => by_tcp(server, name, *kind, options, &limit.within(options.patience)),
    };
    kinds.iter().zip(outcomes).map(finish).collect()
}

/// `None`: the answer is too long for a datagram.
fn by_udp(
    server: SocketAddr,
    name: &[u8],
    kinds: &[Kind],
    options: QueryOptions,
    limit: &Limit,
) -> Vec<Option<Outcome>> {
    let mut outcomes = vec![Some(Outcome::Silent); kinds.len()];
    if let Err(error) = exchange(server, name, kinds, options, limit, &mut outcomes)
        && error.kind() != io::ErrorKind::TimedOut
    {
        let silent = outcomes.iter_mut().filter(|outcome| **outcome == Some(Outcome::Silent));
        silent.for_each(|outcome| *outcome = Some(Outcome::Unreachable(error::go_message(&error))));
    }
    outcomes
}

fn exchange(
    server: SocketAddr,
    name: &[u8],
    kinds: &[Kind],
    options: QueryOptions,
    limit: &Limit,
    outcomes: &mut [Option<Outcome>],
) -> io::Result<()> {
    // The kernel chooses a random port, and drops datagrams from other addresses.
    let any =
        if server.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(server)?;
    let mut pending = Vec::with_capacity(kinds.len());
    for (index, kind) in kinds.iter().enumerate() {
        let id = u16::from_be_bytes(token::bytes()?);
        socket.send(&message::query(id, name, *kind, options.edns))?;
        pending.push((index, id, *kind));
    }
    let mut bytes = [0; DATAGRAM];
    let mut foreign = 0;
    while !pending.is_empty() && foreign < MAX_FOREIGN * kinds.len() {
        let count = match socket.recv(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                limit.ready(socket.as_fd(), PollFlags::IN)?;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        let datagram = bytes.get(..count).unwrap_or_default();
        let before = pending.len();
        pending.retain(|(index, id, kind)| {
            let outcome = outcome(message::read(datagram, *id, name, *kind));
            match (outcomes.get_mut(*index), outcome) {
                (_, Err(Response::Foreign)) | (None, _) => return true,
                (Some(slot), outcome) => *slot = outcome.ok(),
            }
            false
        });
        foreign += usize::from(pending.len() == before);
    }
    Ok(())
}

/// An answer that is no outcome is an error.
fn outcome(response: Response) -> Result<Outcome, Response> {
    match response {
        Response::Found(addresses) => Ok(Outcome::Found(addresses)),
        Response::NoName => Ok(Outcome::NoName),
        Response::Failed => Ok(Outcome::Failed),
        Response::Foreign | Response::Truncated => Err(response),
    }
}

fn by_tcp(server: SocketAddr, name: &[u8], kind: Kind, options: QueryOptions, limit: &Limit) -> Outcome {
    match over_connection(server, name, kind, options, limit) {
        // A connection has no answers of others, and no limit that an answer could exceed.
        Ok(response) => outcome(response).unwrap_or(Outcome::Failed),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Outcome::Silent,
        Err(error) => Outcome::Unreachable(error::go_message(&error)),
    }
}

fn over_connection(
    server: SocketAddr,
    name: &[u8],
    kind: Kind,
    options: QueryOptions,
    limit: &Limit,
) -> io::Result<Response> {
    let mut socket = Socket::connect(server, limit, limit).map_err(|error| match error {
        _ if Instant::now() >= limit.deadline.unwrap_or_else(Instant::now) => io::ErrorKind::TimedOut.into(),
        error => io::Error::other(error.to_string()),
    })?;
    let id = u16::from_be_bytes(token::bytes()?);
    let query = message::query(id, name, kind, options.edns);
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    socket.write_all(&[&length.to_be_bytes()[..], &query].concat())?;
    let mut length = [0; 2];
    socket.read_exact(&mut length)?;
    let mut response = vec![0; usize::from(u16::from_be_bytes(length))];
    socket.read_exact(&mut response)?;
    Ok(message::read(&response, id, name, kind))
}
