use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::*;
use crate::util::stop::{self, StopToken};
use crate::util::threads::{OnDeath, Running, Stack, spawn};

/// What a server of a test does with a query: name, type (1 or 28), whether it came by TCP.
type Reaction = fn(&str, u16, bool) -> Reply;

enum Reply {
    Nothing,
    /// An answer with this code.
    Code(u16),
    Addresses(&'static [&'static str]),
    /// An empty answer with the mark of one that is too long.
    Truncated,
    /// Answers to other questions, then the address.
    AfterForged(&'static str),
    /// Other questions only, without end.
    OnlyForged,
}

/// A DNS server on this machine, by UDP and TCP.
struct Server {
    address: SocketAddr,
    queries: Arc<Mutex<Vec<String>>>,
    _running: [Running; 2],
}

impl Server {
    fn start(reaction: Reaction) -> Server {
        let (udp, tcp) = loop {
            let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()) {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let queries = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&queries);
        udp.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let by_udp = spawn("t/dns-udp", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let mut bytes = [0; 1500];
            while !stop.is_stopped() {
                let Ok((count, peer)) = udp.recv_from(&mut bytes) else { continue };
                for response in responses(&bytes[..count], reaction, false, &log) {
                    let _ = udp.send_to(&response, peer);
                }
            }
        });
        let log = Arc::clone(&queries);
        tcp.set_nonblocking(true).unwrap();
        let by_tcp = spawn("t/dns-tcp", Stack::Small, OnDeath::Unsupervised, move |stop| {
            while !stop.is_stopped() {
                let Ok((mut stream, _)) = tcp.accept() else {
                    let _ = stop.wait(Duration::from_millis(10));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                let mut length = [0; 2];
                stream.read_exact(&mut length).unwrap();
                let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
                stream.read_exact(&mut query).unwrap();
                for response in responses(&query, reaction, true, &log) {
                    let length = u16::try_from(response.len()).unwrap().to_be_bytes();
                    stream.write_all(&[&length[..], &response].concat()).unwrap();
                }
            }
        });
        Server { address, queries, _running: [by_udp.unwrap(), by_tcp.unwrap()] }
    }

    /// What was asked since the last call, as `name type`.
    fn queries(&self) -> Vec<String> {
        std::mem::take(&mut self.queries.lock().unwrap())
    }
}

fn responses(query: &[u8], reaction: Reaction, tcp: bool, log: &Mutex<Vec<String>>) -> Vec<Vec<u8>> {
    let (mut labels, mut offset) = (Vec::new(), 12);
    while query[offset] != 0 {
        let end = offset + 1 + usize::from(query[offset]);
        labels.push(String::from_utf8_lossy(&query[offset + 1..end]).into_owned());
        offset = end;
    }
    let name = labels.join(".");
    let kind = u16::from_be_bytes([query[offset + 1], query[offset + 2]]);
    let way = if tcp { " tcp" } else { "" };
    let edns = if query[11] == 1 { " edns" } else { "" };
    log.lock().unwrap().push(format!("{name} {kind}{way}{edns}"));
    let question = &query[12..offset + 5];
    let head = |flags: u16, count: u16| {
        [&query[..2], &flags.to_be_bytes(), &[0, 1], &count.to_be_bytes(), &[0; 4], question].concat()
    };
    let full = |addresses: &[&str]| {
        let mut response = head(0x8180, u16::try_from(addresses.len()).unwrap());
        for address in addresses {
            let data = match address.parse().unwrap() {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            response.extend(
                [&[0xc0, 12], &kind.to_be_bytes()[..], &[0, 1, 0, 0, 0, 60, 0], &[data.len() as u8], &data]
                    .concat(),
            );
        }
        response
    };
    let forged = |change: usize| {
        let mut response = full(if kind == 1 { &["10.66.66.66"] } else { &["fd66::66"] });
        response[change] ^= 1;
        response
    };
    match reaction(&name, kind, tcp) {
        Reply::Nothing => Vec::new(),
        Reply::Code(code) => vec![head(0x8180 | code, 0)],
        Reply::Addresses(addresses) => vec![full(addresses)],
        Reply::Truncated => vec![head(0x8380, 0)],
        // Another number, another name, another type, a query.
        Reply::AfterForged(address) => vec![
            forged(1),
            forged(14),
            forged(offset + 2),
            forged(2)
                .iter()
                .enumerate()
                .map(|(index, byte)| if index == 2 { byte & 0x7f } else { *byte })
                .collect(),
            b"x".to_vec(),
            full(&[address]),
        ],
        Reply::OnlyForged => vec![forged(1); 64],
    }
}

/// A server that never answers.
fn dead() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").unwrap()
}

/// A server has as long for its response as a busy machine needs.
fn config(servers: &[SocketAddr], text: &str) -> Config {
    let mut config = Config::parse(text.as_bytes(), "node");
    config.servers = servers.to_vec();
    config.timeout = Duration::from_secs(20);
    config
}

/// The same for servers of which some are silent: each query without a response takes this time.
fn hasty_config(servers: &[SocketAddr], text: &str) -> Config {
    Config { timeout: Duration::from_millis(700), ..config(servers, text) }
}

fn limit() -> Limit {
    Limit { deadline: Instant::now().checked_add(Duration::from_secs(60)), stop: StopToken::never() }
}

fn found(host: &str, config: &Config) -> Result<Vec<String>, Reason> {
    let found = search(host, config, &limit()).map_err(|failure| failure.reason)?;
    Ok(found.iter().map(ToString::to_string).collect())
}

fn found_with(reaction: Reaction, text: &str) -> Result<Vec<String>, Reason> {
    let server = Server::start(reaction);
    found("api.edge.test", &config(&[server.address], text))
}

/// The same if the server is silent.
fn found_in_haste(reaction: Reaction, text: &str) -> Result<Vec<String>, Reason> {
    let server = Server::start(reaction);
    found("api.edge.test", &hasty_config(&[server.address], text))
}

fn ok(addresses: &[&str]) -> Result<Vec<String>, Reason> {
    Ok(addresses.iter().map(|address| (*address).to_owned()).collect())
}

#[test]
fn address_is_found_whatever_the_response_for_the_other_type_is() {
    const V4: Reply = Reply::Addresses(&["10.0.0.1", "10.0.0.2"]);
    for reaction in [
        (|_, kind, _| if kind == 1 { V4 } else { Reply::Code(3) }) as Reaction,
        |_, kind, _| if kind == 1 { V4 } else { Reply::Code(2) },
        |_, kind, _| if kind == 1 { V4 } else { Reply::Code(5) },
        |_, kind, _| if kind == 1 { V4 } else { Reply::Addresses(&[]) },
    ] {
        assert_eq!(found_with(reaction, ""), ok(&["10.0.0.1", "10.0.0.2"]));
        assert_eq!(found_with(reaction, "options single-request"), ok(&["10.0.0.1", "10.0.0.2"]));
    }
    let half_silent: Reaction = |_, kind, _| if kind == 1 { V4 } else { Reply::Nothing };
    for text in ["", "options single-request"] {
        assert_eq!(found_in_haste(half_silent, text), ok(&["10.0.0.1", "10.0.0.2"]));
    }
    let v6: Reaction = |_, kind, _| if kind == 28 { Reply::Addresses(&["fd00::1"]) } else { Reply::Code(3) };
    assert_eq!(found_with(v6, ""), ok(&["fd00::1"]));
    assert_eq!(found_with(v6, "options no-aaaa"), Err(Reason::NoSuchHost));
    assert_eq!(found_with(|_, _, _| Reply::Code(3), ""), Err(Reason::NoSuchHost));
    assert_eq!(found_with(|_, _, _| Reply::Addresses(&[]), ""), Err(Reason::NoSuchHost));
    assert_eq!(found_with(|_, _, _| Reply::Code(2), ""), Err(Reason::Misbehaving));
    assert_eq!(found_in_haste(|_, _, _| Reply::Nothing, "options attempts:1"), Err(Reason::Timeout));
}

#[test]
fn servers_are_queried_in_order_until_one_responds() {
    let good = Server::start(|_, kind, _| match kind {
        1 => Reply::Addresses(&["10.0.0.1"]),
        _ => Reply::Code(3),
    });
    let no_such_name = Server::start(|_, _, _| Reply::Code(3));
    let broken = Server::start(|_, _, _| Reply::Code(2));
    let silent_socket = dead();
    let silent = silent_socket.local_addr().unwrap();
    // The kernel refuses packets from others than the server that a socket is connected to.
    let refusing_socket = dead();
    refusing_socket.connect(silent).unwrap();
    let refusing = refusing_socket.local_addr().unwrap();
    let ask = |servers: &[SocketAddr]| found("api", &config(servers, ""));
    assert_eq!(found("api", &hasty_config(&[silent, good.address], "")), ok(&["10.0.0.1"]));
    for first in [broken.address, refusing] {
        assert_eq!(ask(&[first, good.address]), ok(&["10.0.0.1"]), "{first}");
    }
    // The first answer counts, and not the first one that says no.
    good.queries();
    assert_eq!(ask(&[good.address, no_such_name.address]), ok(&["10.0.0.1"]));
    assert!(no_such_name.queries().is_empty());
    good.queries();
    assert_eq!(ask(&[no_such_name.address, good.address]), Err(Reason::NoSuchHost));
    assert!(good.queries().is_empty());
    assert!(matches!(ask(&[refusing]), Err(Reason::Unreachable(_))));
    // With this option look-ups begin with the servers in turn.
    let turns = config(&[good.address, no_such_name.address], "options rotate");
    let outcomes: Vec<bool> = (0..8).map(|_| found("api", &turns).is_ok()).collect();
    assert!(outcomes.contains(&true) && outcomes.contains(&false), "{outcomes:?}");
}

#[test]
fn long_responses_come_by_tcp() {
    let server = Server::start(|_, kind, tcp| match (kind, tcp) {
        (1, true) => Reply::Addresses(&["10.0.0.1"]),
        (1, false) => Reply::Truncated,
        _ => Reply::Code(3),
    });
    assert_eq!(found("api", &config(&[server.address], "")), ok(&["10.0.0.1"]));
    assert_eq!(server.queries(), ["api 1", "api 28", "api 1 tcp"]);
    assert_eq!(found("api", &config(&[server.address], "options use-vc")), ok(&["10.0.0.1"]));
    assert_eq!(server.queries(), ["api 1 tcp", "api 28 tcp"]);
}

#[test]
fn responses_to_other_questions_are_ignored() {
    let forged: Reaction = |_, kind, _| match kind {
        1 => Reply::AfterForged("10.0.0.1"),
        _ => Reply::AfterForged("fd00::1"),
    };
    assert_eq!(found_with(forged, ""), ok(&["10.0.0.1", "fd00::1"]));
    assert_eq!(found_in_haste(|_, _, _| Reply::OnlyForged, "options attempts:1"), Err(Reason::Timeout));
}

#[test]
fn search_domains_are_tried_in_the_order_of_ndots() {
    let server = Server::start(|name, kind, _| match (name, kind) {
        ("api.b.test" | "x.y.b.test", 1) => Reply::Addresses(&["10.0.0.1"]),
        ("broken.a.test", _) => Reply::Code(2),
        _ => Reply::Code(3),
    });
    let ask = |host: &str, text: &str| {
        let outcome = found(host, &config(&[server.address], text));
        let mut names: Vec<String> = server.queries();
        names.retain(|query| query.ends_with(" 1"));
        names.iter_mut().for_each(|name| name.truncate(name.len() - 2));
        (outcome, names.join(" "))
    };
    let both = "search a.test b.test";
    assert_eq!(ask("api", both), (ok(&["10.0.0.1"]), "api.a.test api.b.test".to_owned()));
    assert_eq!(ask("x.y", both), (ok(&["10.0.0.1"]), "x.y x.y.a.test x.y.b.test".to_owned()));
    let five = "search a.test b.test\noptions ndots:5";
    assert_eq!(ask("x.y", five), (ok(&["10.0.0.1"]), "x.y.a.test x.y.b.test".to_owned()));
    assert_eq!(ask("api.", both), (Err(Reason::NoSuchHost), "api".to_owned()));
    assert_eq!(ask("no", both), (Err(Reason::NoSuchHost), "no.a.test no.b.test no".to_owned()));
    assert_eq!(ask("no", "search ."), (Err(Reason::NoSuchHost), "no".to_owned()));
    // A failure is not hidden by names that do not exist.
    assert_eq!(ask("broken", "search a.test").0, Err(Reason::Misbehaving));
}

#[test]
fn server_without_extensions_is_queried_without_them() {
    static QUERIED: Mutex<Vec<u16>> = Mutex::new(Vec::new());
    // Only the first query of each type is refused.
    let server = Server::start(|_, kind, _| {
        let mut queried = QUERIED.lock().unwrap();
        let is_first = !queried.contains(&kind);
        queried.push(kind);
        match (is_first, kind) {
            (true, _) => Reply::Code(1),
            (_, 1) => Reply::Addresses(&["10.0.0.1"]),
            _ => Reply::Addresses(&[]),
        }
    });
    assert_eq!(found("api", &config(&[server.address], "options edns0")), ok(&["10.0.0.1"]));
    assert_eq!(server.queries(), ["api 1 edns", "api 28 edns", "api 1", "api 28"]);
}

#[test]
fn stop_and_deadline_end_a_look_up() {
    let silent = dead();
    let config = Config { timeout: Duration::from_secs(30), ..config(&[silent.local_addr().unwrap()], "") };
    let before = Instant::now();
    let short = Limit { deadline: before.checked_add(Duration::from_millis(300)), stop: StopToken::never() };
    assert_eq!(search("api", &config, &short).unwrap_err().reason, Reason::Timeout);
    let (source, token) = stop::pair();
    let limit = Limit { stop: token, ..limit() };
    let (tx, rx) = crossbeam_channel::bounded(1);
    let _asking = spawn("t/lookup", Stack::Small, OnDeath::Unsupervised, move |_| {
        let _ = tx.send(search("api", &config, &limit));
    });
    // The query has arrived: the look-up waits.
    silent.recv(&mut [0; 100]).unwrap();
    drop(source);
    let outcome = rx.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(outcome.unwrap_err().reason, Reason::Stopped);
    assert!(before.elapsed() < Duration::from_secs(25));
}

#[test]
fn names_of_this_machine_and_no_names_cause_no_query() {
    assert!(
        is_this_machine("localhost") && is_this_machine("a.LocalHost.") && !is_this_machine("localhost.a")
    );
    let local = resolve("localhost", &limit()).unwrap();
    assert!(!local.is_empty() && local.iter().all(IpAddr::is_loopback), "{local:?}");
    for bad in ["", ".", "a..b", "a b", "h\0st"] {
        let failure = Failure { server: None, reason: Reason::NoSuchHost };
        assert_eq!(resolve(bad, &limit()), Err(failure), "{bad:?}");
    }
    let directory = tempfile::tempdir().unwrap();
    let hosts = directory.path().join("hosts");
    assert!(from_hosts(&hosts, "api").is_empty());
    std::fs::write(&hosts, "10.0.0.1 api\nfd00::1 api\n").unwrap();
    assert_eq!(from_hosts(&hosts, "API").len(), 2);
}
