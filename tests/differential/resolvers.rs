//! Resolver files and the settings of pods against the kubelet's package network/dns.

use std::net::IpAddr;
use std::path::Path;

use coracle::model::api;
use coracle::model::pod::Pod;
use coracle::runtime::dns::{DnsNotice, NodeDns, check_host, pod_resolver, read_host};
use serde_json::{Value, json};

use crate::peer::{Peer, decode};
use crate::random::Random;
use crate::{Cases, mutate, pick, rarely};

const SPACES: [&str; 12] =
    [" ", " ", " ", " ", "  ", "\t", " \t ", "\r", "\u{b}", "\u{c}", "\u{a0}", "\u{85}"];
const SERVERS: [&str; 10] = [
    "192.0.2.1",
    "192.0.2.1",
    "192.0.2.2",
    "192.0.2.3",
    "fd00::1",
    "fe80::1%eth0",
    "x",
    "010.0.0.1",
    "#",
    ";",
];
const DOMAINS: [&str; 14] = [
    "a.example",
    "a.example",
    "b.example.",
    "b.example",
    "c",
    ".",
    "..",
    "c..",
    "svc.cluster.local",
    "cluster.local",
    "n.svc.cluster.local",
    "#x",
    "\u{e9}.example",
    "UPPER.example",
];
const OPTIONS: [&str; 14] = [
    "ndots:5",
    "ndots:1",
    "ndots",
    "ndots:",
    "timeout:1",
    "timeout:1:2",
    "rotate",
    "rotate",
    "edns0",
    ":",
    ":x",
    "trust-ad",
    "a:b",
    "attempts:2",
];
const KEYWORDS: [&str; 16] = [
    "nameserver",
    "nameserver",
    "nameserver",
    "nameserver",
    "search",
    "search",
    "search",
    "options",
    "options",
    "domain",
    "sortlist",
    "#",
    ";",
    "Nameserver",
    "nameservers",
    "option",
];
const PIECES: [&str; 8] = ["\n", " ", "nameserver", "nameserver\n", "search", "\0", "#", "\r\n"];

fn space(random: &mut Random) -> &'static str {
    if rarely(random, 4) { pick(random, &SPACES) } else { " " }
}

fn domain(random: &mut Random) -> String {
    match random.below(40) {
        0 => format!("{}.example", "a".repeat(240 + random.below(20) as usize)),
        1 => format!("long{}.example", "b".repeat(random.below(250) as usize)),
        2..=5 => format!("d{}.example", random.below(50)),
        _ => pick(random, &DOMAINS).to_owned(),
    }
}

fn line(random: &mut Random) -> String {
    let mut line = if rarely(random, 6) { space(random).to_owned() } else { String::new() };
    let keyword = pick(random, &KEYWORDS);
    line += keyword;
    let many = rarely(random, 12);
    let count = match keyword {
        "nameserver" if !rarely(random, 60) => 1 + random.below(2),
        "nameserver" => 0,
        _ if many => random.below(60),
        _ => random.below(5),
    };
    for _ in 0..count {
        line += space(random);
        line += &match keyword {
            "nameserver" => pick(random, &SERVERS).to_owned(),
            "options" => pick(random, &OPTIONS).to_owned(),
            _ => domain(random),
        };
    }
    if rarely(random, 6) {
        line += space(random);
        line += pick(random, &["", "# c", "; c"]);
    }
    line + if rarely(random, 8) { "\r\n" } else { "\n" }
}

fn file(random: &mut Random) -> Vec<u8> {
    let mut text: String = (0..random.below(9)).map(|_| line(random)).collect();
    if rarely(random, 6) {
        let offset = text.floor_char_boundary(random.below(text.len() as u64 + 1) as usize);
        text.insert_str(offset, pick(random, &PIECES));
    }
    if rarely(random, 8) {
        text.pop();
    }
    let mut bytes = text.into_bytes();
    if rarely(random, 12) {
        mutate(random, &mut bytes);
    }
    bytes
}

fn pod(random: &mut Random) -> Value {
    let list = |random: &mut Random, make: fn(&mut Random) -> String| -> Vec<String> {
        (0..random.below(5)).map(|_| make(random)).collect()
    };
    let mut spec = json!({"containers": [], "hostNetwork": rarely(random, 3)});
    match pick(random, &["ClusterFirst", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None", ""]) {
        "" => {}
        policy => spec["dnsPolicy"] = policy.into(),
    }
    if rarely(random, 3) {
        let mut own = json!({});
        if rarely(random, 2) {
            own["nameservers"] = list(random, |random| pick(random, &SERVERS).to_owned()).into();
        }
        if rarely(random, 2) {
            own["searches"] = list(random, domain).into();
        }
        if rarely(random, 2) {
            let option = |random: &mut Random| {
                let name = pick(random, &["ndots", "timeout", "timeout:1", "rotate", "edns0"]);
                match pick(random, &["", "-", "2", "2:3"]) {
                    "-" => json!({"name": name}),
                    value => json!({"name": name, "value": value}),
                }
            };
            own["options"] = (0..random.below(4)).map(|_| option(random)).collect();
        }
        spec["dnsConfig"] = own;
    }
    json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec})
}

/// What coracle makes of a case, in the form of the answer.
struct OwnResolver {
    lists: [Vec<String>; 3],
    events: Vec<String>,
    limits: Vec<String>,
}

fn ours(pod: &Value, node: &NodeDns<'_>) -> Result<OwnResolver, String> {
    let host = read_host(node.resolv_conf).map_err(|error| error.to_string())?;
    let limits = check_host(&host, node.resolv_conf, node.cluster_domain);
    let pod = Pod::from(serde_json::from_value::<api::Pod>(pod.clone()).unwrap());
    let (mut resolver, notices) = pod_resolver(&pod, host, node);
    resolver.options.sort();
    let event = |notice| match notice {
        DnsNotice::MissingClusterDns => "Warning MissingClusterDNS".to_owned(),
        DnsNotice::Forming(text) => format!("Warning DNSConfigForming {text}"),
    };
    let events = notices.into_iter().map(event).collect();
    Ok(OwnResolver { lists: [resolver.servers, resolver.searches, resolver.options], events, limits })
}

fn texts(value: &Value) -> Vec<String> {
    let text = |item: &Value| String::from_utf8_lossy(&decode(item)).into_owned();
    value.as_array().into_iter().flatten().map(text).collect()
}

fn lines(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// The settings of a pod are the same, and so are the warnings about the limits of resolvers.
#[test]
fn resolver_settings_of_pods_equal_those_of_the_kubelet() {
    let (mut cases, mut random) = Cases::new("resolv.conf", 20_000);
    let mut peer = Peer::managers();
    let place = tempfile::NamedTempFile::new().unwrap();
    while cases.next() {
        let bytes = file(&mut random);
        std::fs::write(place.path(), &bytes).unwrap();
        let pod = pod(&mut random);
        let path = if rarely(&mut random, 12) { Path::new("") } else { place.path() };
        let servers: Vec<&str> = match random.below(4) {
            0 => Vec::new(),
            1 => vec!["10.96.0.10", "::ffff:10.96.0.11", "fd00:0::a", "10.96.0.12"],
            _ => vec!["10.96.0.10"],
        };
        let node_ips = pick(&mut random, &[&[][..], &["192.0.2.9"], &["fd00::9"], &["fd00::9", "192.0.2.9"]]);
        let domain = pick(&mut random, &["cluster.local", "cluster.local", "c", ""]);
        let theirs = peer.ask(&json!({
            "ask": "dns", "pod": pod, "file": path, "servers": servers, "domain": domain, "node_ips": node_ips,
        }));
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let (cluster_dns, node_ips) = (ips(&servers), ips(node_ips));
        let node = NodeDns {
            resolv_conf: path,
            cluster_dns: &cluster_dns,
            cluster_domain: domain,
            node_ips: &node_ips,
        };
        let shown = || format!("{theirs} {pod} {servers:?} {domain:?} {}", bytes.escape_ascii());
        let found = match (ours(&pod, &node), theirs["error"].as_str()) {
            (Ok(found), None) => found,
            (Err(error), Some(_)) if error.ends_with("nameserver list is empty") => {
                cases.count("refused by both");
                continue;
            }
            (Err(error), _) => {
                cases.differs(&format!("refused here only, {error}: {}", shown()));
                continue;
            }
            (Ok(_), Some(_)) => {
                cases.differs(&format!("refused by Go only: {}", shown()));
                continue;
            }
        };
        let mut read = [texts(&theirs["servers"]), texts(&theirs["searches"]), texts(&theirs["options"])];
        // Go keeps them in a map.
        read[2].sort();
        let event = |text: String| match text.starts_with("Warning MissingClusterDNS") {
            true => "Warning MissingClusterDNS".to_owned(),
            false => text,
        };
        let events: Vec<String> = lines(&theirs["events"]).into_iter().map(event).collect();
        // Go stops at the first limit, and does not name the domain that is too long.
        let limit = lines(&theirs["limits"]).into_iter().next();
        let limits_agree = match (found.limits.first(), limit) {
            (Some(ours), Some(limit)) => {
                format!("Warning CheckLimitsForResolvConf {ours}").starts_with(limit.trim_end_matches('!'))
            }
            (ours, limit) => ours.is_none() && limit.is_none(),
        };
        let is_text = std::str::from_utf8(&bytes).is_ok();
        match (found.lists == read && found.events == events, limits_agree) {
            (true, true) => cases.count("read alike"),
            // A replaced byte takes three, which counts for the limits.
            _ if !is_text => cases.count("bytes that are no text"),
            _ => cases.differs(&format!(
                "{:?} {:?} {:?}, in Go {read:?}: {}",
                found.lists,
                found.events,
                found.limits,
                shown()
            )),
        }
    }
    cases.end("read alike", 2);
}
