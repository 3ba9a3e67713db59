//! `NO_PROXY`: targets that are reached directly (Go: golang.org/x/net/http/httpproxy).

use std::net::IpAddr;

/// The targets that bypass the proxies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NoProxy(Vec<Entry>);

/// One entry of the list. Without a port it applies to all ports.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Everything,
    /// `10.0.0.0/8`: address and length of the prefix in bits.
    Network(IpAddr, u32),
    /// `10.0.0.1` or `10.0.0.1:443`
    Address(IpAddr, String),
    /// `example.com` or `.example.com:443`, in lower case and with the leading dot. `itself`: the
    /// name without the dot matches, too.
    Domain {
        suffix: String,
        itself: bool,
        port: String,
    },
}

impl NoProxy {
    /// Invalid entries are ignored.
    pub(super) fn parse(text: &str) -> NoProxy {
        let entries = text.split(',').map(|entry| entry.trim().to_lowercase());
        NoProxy(entries.filter_map(|entry| Entry::parse(&entry)).collect())
    }

    /// Whether a target is reached directly. This machine always is.
    pub(super) fn bypasses(&self, host: &str, port: u16) -> bool {
        let address = host.split_once('%').map_or(host, |(address, _zone)| address).parse::<IpAddr>().ok();
        let address = address.map(|address| address.to_canonical());
        if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
            return true;
        }
        let host = host.trim().to_lowercase();
        self.0.iter().any(|entry| entry.matches(&host, address, &port.to_string()))
    }
}

impl Entry {
    fn parse(text: &str) -> Option<Entry> {
        if text == "*" {
            return Some(Entry::Everything);
        }
        if let Some(network) = network(text) {
            return Some(network);
        }
        let (host, port) = split_host_port(text).unwrap_or((text, ""));
        if let Ok(address) = host.parse::<IpAddr>() {
            return Some(Entry::Address(address.to_canonical(), port.to_owned()));
        }
        let name = match host.strip_prefix('*') {
            Some(rest) if rest.starts_with('.') => rest,
            _ => host,
        };
        let itself = !name.starts_with('.');
        let suffix = if itself { format!(".{name}") } else { name.to_owned() };
        (!name.is_empty()).then(|| Entry::Domain { suffix, itself, port: port.to_owned() })
    }

    /// `host` is in lower case; `address` is its value if it is an address.
    fn matches(&self, host: &str, address: Option<IpAddr>, port: &str) -> bool {
        let on = |wanted: &str| wanted.is_empty() || wanted == port;
        match self {
            Entry::Everything => true,
            Entry::Network(network, bits) => {
                address.is_some_and(|address| contains(*network, *bits, address))
            }
            Entry::Address(excluded, wanted) => address == Some(*excluded) && on(wanted),
            Entry::Domain { suffix, itself, port: wanted } => {
                let same = *itself && suffix.strip_prefix('.') == Some(host);
                address.is_none() && (host.ends_with(suffix.as_str()) || same) && on(wanted)
            }
        }
    }
}

/// `10.0.0.0/8`; bits of the address beyond the prefix are ignored.
fn network(text: &str) -> Option<Entry> {
    let (address, bits) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let digits = !bits.is_empty() && bits.bytes().all(|byte| byte.is_ascii_digit());
    let bits = bits.parse::<u32>().ok().filter(|_| digits)?;
    let length = if address.is_ipv4() { 32 } else { 128 };
    (bits <= length).then(|| match address.to_canonical() {
        // An IPv4 network in IPv6 notation.
        short @ IpAddr::V4(_) if length == 128 && bits >= 96 => Entry::Network(short, bits - 96),
        _ => Entry::Network(address, bits),
    })
}

fn contains(network: IpAddr, bits: u32, address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => {
            let differ = network.to_bits() ^ address.to_bits();
            differ.checked_shr(32 - bits).unwrap_or(0) == 0
        }
        (IpAddr::V6(network), IpAddr::V6(address)) => {
            let differ = network.to_bits() ^ address.to_bits();
            differ.checked_shr(128 - bits).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// `host:port` or `[host]:port`; `None` for anything else, such as an IPv6 address.
fn split_host_port(text: &str) -> Option<(&str, &str)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let brackets = |part: &str| part.contains(['[', ']']);
    (!brackets(host) && !brackets(port)).then_some((host, port))
}
