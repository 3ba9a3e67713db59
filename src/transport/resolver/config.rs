//! The file `resolv.conf`, read as by glibc (pure; resolv.conf(5)).

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use super::zone;

/// The port of DNS servers.
const PORT: u16 = 53;
/// The limits of the C library.
const MAX_SERVERS: usize = 3;
const MAX_DOTS: i64 = 15;
const MAX_SECONDS: i64 = 30;
const MAX_ATTEMPTS: i64 = 5;
/// The limit of search domains: each costs queries. The C library has none.
const MAX_SEARCH: usize = 64;

/// How names are looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Config {
    /// Servers, in the order in which they are asked.
    pub(super) servers: Vec<SocketAddr>,
    /// Domains that are appended to names, without a final dot.
    pub(super) search: Vec<String>,
    /// A name with as many dots is looked up as it is first.
    pub(super) dots: usize,
    /// How long the first server may take.
    pub(super) timeout: Duration,
    /// How often each server is asked.
    pub(super) attempts: u32,
    /// Whether look-ups begin with different servers.
    pub(super) rotate: bool,
    /// Whether IPv6 addresses are asked for after the answer about IPv4 addresses.
    pub(super) sequential: bool,
    /// Whether servers are asked by TCP.
    pub(super) tcp: bool,
    /// Whether queries permit long datagrams.
    pub(super) edns: bool,
    /// Whether IPv6 addresses are not asked for.
    pub(super) no_ipv6: bool,
}

impl Config {
    /// Reads the file; a missing one is empty. Unknown lines and invalid servers are ignored.
    /// Without a line for it, the search list is the domain of the machine's name.
    pub(super) fn parse(text: &[u8], machine: &str) -> Config {
        let text = String::from_utf8_lossy(text);
        let mut config = Config {
            servers: Vec::new(),
            search: Vec::new(),
            dots: 1,
            timeout: Duration::from_secs(5),
            attempts: 2,
            rotate: false,
            sequential: false,
            tcp: false,
            edns: false,
            no_ipv6: false,
        };
        let mut has_search = false;
        for line in text.lines() {
            // A keyword begins at the start of a line.
            let Some((keyword, rest)) = line.split_once([' ', '\t']) else { continue };
            let mut words = rest.split_ascii_whitespace();
            match keyword {
                "nameserver" if config.servers.len() < MAX_SERVERS => {
                    config.servers.extend(words.next().and_then(server));
                }
                // The last of these lines counts.
                "domain" | "search" => {
                    let limit = if keyword == "domain" { 1 } else { MAX_SEARCH };
                    let domains = words.take(limit).map(|word| word.trim_end_matches('.').to_owned());
                    let domains: Vec<String> = domains.collect();
                    if !domains.is_empty() {
                        (config.search, has_search) = (domains, true);
                    }
                }
                "options" => words.for_each(|word| config.set(word)),
                _ => {}
            }
        }
        if config.servers.is_empty() {
            config.servers.push((Ipv4Addr::LOCALHOST, PORT).into());
        }
        if !has_search && let Some((_, domain)) = machine.split_once('.') {
            config.search = vec![domain.trim_end_matches('.').to_owned()];
        }
        config
    }

    fn set(&mut self, option: &str) {
        let (name, value) = option.split_once(':').unwrap_or((option, ""));
        let number = |most: i64| match value.parse::<i64>() {
            Ok(number) => number.clamp(0, most),
            // As in C, text is zero.
            Err(_) => 0,
        };
        match name {
            "ndots" => self.dots = usize::try_from(number(MAX_DOTS)).unwrap_or(1),
            "timeout" => {
                self.timeout = Duration::from_secs(u64::try_from(number(MAX_SECONDS)).unwrap_or(1).max(1));
            }
            "attempts" => self.attempts = u32::try_from(number(MAX_ATTEMPTS)).unwrap_or(1).max(1),
            "rotate" => self.rotate = true,
            "single-request" | "single-request-reopen" => self.sequential = true,
            "use-vc" => self.tcp = true,
            "edns0" => self.edns = true,
            "no-aaaa" => self.no_ipv6 = true,
            _ => {}
        }
    }

    /// How long the server at this position may take: later ones get more time.
    pub(super) fn patience(&self, position: usize) -> Duration {
        if position == 0 {
            return self.timeout;
        }
        let count = u32::try_from(self.servers.len().max(1)).unwrap_or(1);
        let doubled = self.timeout * (1 << position.min(MAX_SERVERS));
        (doubled / count).max(self.timeout.min(Duration::from_secs(1)))
    }
}

/// The address of a server, perhaps with a zone.
fn server(word: &str) -> Option<SocketAddr> {
    match word.parse::<IpAddr>() {
        Ok(address) => Some((address, PORT).into()),
        Err(_) => {
            let (address, zone) = zone::parse_scoped_address(word)?;
            Some(SocketAddrV6::new(address, PORT, 0, zone).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Config {
        Config::parse(text.as_bytes(), "node1.site.example")
    }

    fn servers(text: &str) -> Vec<String> {
        parse(text).servers.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn empty_file_means_this_machine_and_its_domain() {
        let config = parse("");
        assert_eq!(config.servers, ["127.0.0.1:53".parse().unwrap()]);
        assert_eq!(config.search, ["site.example"]);
        assert_eq!((config.dots, config.attempts, config.timeout), (1, 2, Duration::from_secs(5)));
        assert!(Config::parse(b"", "node1").search.is_empty());
    }

    #[test]
    fn first_three_valid_servers_are_used_in_order() {
        let text = "nameserver\t10.0.0.2 # first\nnameserver fd00::1\nnameserver x\nnameserver fe80::1%7\n\
                    nameserver 10.0.0.3\n";
        assert_eq!(servers(text), ["10.0.0.2:53", "[fd00::1]:53", "[fe80::1%7]:53"]);
        // Comments, blanks before the keyword, and other words.
        assert_eq!(
            servers("#nameserver 1.1.1.1\n;x\n nameserver 1.1.1.2\nnameservers 1.1.1.3\n"),
            ["127.0.0.1:53"]
        );
        assert_eq!(servers("nameserver 10.0.0.2\r\n\u{fffd}\n"), ["10.0.0.2:53"]);
    }

    #[test]
    fn last_search_list_counts() {
        assert_eq!(parse("search a.b. c\ndomain d e\n").search, ["d"]);
        assert_eq!(parse("domain d\nsearch a.b.\tc .\n").search, ["a.b", "c", ""]);
        assert_eq!(parse("search \n").search, ["site.example"]);
        assert_eq!(parse(&format!("search {}", "a ".repeat(100))).search.len(), 64);
    }

    #[test]
    fn options_are_limited_as_in_the_c_library() {
        let config =
            parse("options ndots:5 timeout:1\noptions attempts:3 rotate edns0 trust-ad no-aaaa use-vc");
        assert_eq!((config.dots, config.attempts, config.timeout), (5, 3, Duration::from_secs(1)));
        assert!(config.rotate && config.edns && config.no_ipv6 && config.tcp && !config.sequential);
        assert!(
            parse("options single-request").sequential && parse("options single-request-reopen").sequential
        );
        let config = parse("options ndots:99 timeout:99 attempts:99");
        assert_eq!((config.dots, config.attempts, config.timeout), (15, 5, Duration::from_secs(30)));
        let config = parse("options ndots:-1 timeout:0 attempts:x");
        assert_eq!((config.dots, config.attempts, config.timeout), (0, 1, Duration::from_secs(1)));
    }

    #[test]
    fn later_servers_get_more_time() {
        let seconds = |text: &str| [0, 1, 2].map(|index| parse(text).patience(index).as_secs());
        assert_eq!(seconds("nameserver 10.0.0.1"), [5, 10, 20]);
        assert_eq!(seconds("nameserver 10.0.0.1\nnameserver 10.0.0.2\nnameserver 10.0.0.3"), [5, 3, 6]);
        let short = "options timeout:1\nnameserver 10.0.0.1\nnameserver 10.0.0.2\nnameserver 10.0.0.3";
        assert_eq!(seconds(short), [1, 1, 1]);
    }
}
