//! A pod's resolver settings (Go: pkg/kubelet/network/dns).

use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::model::api::PodDNSConfig;
use crate::model::pod::Pod;
use crate::transport::generated::runtime::DNSConfig;
use crate::util::untrusted;

/// What the node adds to the settings of its pods.
#[derive(Debug, Clone, Copy)]
pub struct NodeDns<'a> {
    /// The node's resolver file; empty: none.
    pub resolv_conf: &'a Path,
    /// The cluster's servers.
    pub cluster_dns: &'a [IpAddr],
    /// The cluster's domain, or empty.
    pub cluster_domain: &'a str,
    /// The node's own addresses.
    pub node_ips: &'a [IpAddr],
}

const NAMESERVER_LIMIT: usize = 3;
const SEARCH_LIMIT: usize = 32;
const SEARCH_LINE_LIMIT: usize = 2048;
/// Longer search domains make some resolvers abort.
const DOMAIN_LIMIT: usize = 253;
const FILE_LIMIT: u64 = 10 << 20;

/// Resolver settings: servers, searches and options.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resolver {
    /// Addresses, as they were written.
    pub servers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// `name` or `name:value`.
    pub options: Vec<String>,
}

/// Why the node's resolver file cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the values are")]
pub enum DnsError {
    #[error("cannot read resolv.conf {}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    /// The file is larger than 10 MiB.
    #[error("resolv.conf {} is larger than {FILE_LIMIT} bytes", path.display())]
    TooLarge { path: PathBuf },
    /// A `nameserver` line names no address.
    #[error("{}:{line}: nameserver list is empty", path.display())]
    EmptyNameserver {
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
    },
}

/// Warnings for users about a pod's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DnsNotice {
    /// The pod wants the cluster's servers, but none are configured.
    MissingClusterDns,
    /// A part was omitted; the text has the applied settings.
    Forming(String),
}

/// The node's settings; nothing when no file is configured.
///
/// # Errors
/// See [`DnsError`].
pub fn read_host(path: &Path) -> Result<Resolver, DnsError> {
    if path.as_os_str().is_empty() {
        return Ok(Resolver::default());
    }
    let bytes = untrusted::read_own(path, FILE_LIMIT).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => DnsError::TooLarge { path: path.to_owned() },
        _ => DnsError::Read { path: path.to_owned(), error },
    })?;
    parse(&String::from_utf8_lossy(&bytes), path)
}

/// Reads the text of the file `path` (Go: `parseResolvConf`).
///
/// # Errors
/// When a line names no server.
pub fn parse(text: &str, path: &Path) -> Result<Resolver, DnsError> {
    let mut resolver = Resolver::default();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => match words.next() {
                Some(server) => resolver.servers.push(server.to_owned()),
                None => {
                    return Err(DnsError::EmptyNameserver { path: path.to_owned(), line: number + 1 });
                }
            },
            // The last search line replaces the earlier ones.
            Some("search") => {
                resolver.searches = words
                    .filter(|domain| *domain != ".")
                    .map(|domain| domain.strip_suffix('.').unwrap_or(domain).to_owned())
                    .collect();
            }
            Some("options") => {
                for option in words {
                    set_option(&mut resolver.options, option);
                }
            }
            _ => {}
        }
    }
    Ok(resolver)
}

/// The settings of `pod` and the warnings about them.
pub fn pod_resolver(pod: &Pod, host: Resolver, node: &NodeDns<'_>) -> (Resolver, Vec<DnsNotice>) {
    let mut notices = Vec::new();
    let mut resolver = match pod.spec().dns_policy.as_deref() {
        Some("None") => Resolver::default(),
        Some("Default") => of_host(host, node),
        Some("ClusterFirst") if pod.host_network() => of_host(host, node),
        _ if node.cluster_dns.is_empty() => {
            notices.push(DnsNotice::MissingClusterDns);
            of_host(host, node)
        }
        _ => of_cluster(pod, host, node),
    };
    if let Some(own) = &pod.spec().dns_config {
        append(&mut resolver, own);
    }
    fit(&mut resolver, &mut notices);
    (resolver, notices)
}

fn of_host(host: Resolver, node: &NodeDns<'_>) -> Resolver {
    if !node.resolv_conf.as_os_str().is_empty() {
        return host;
    }
    // No file: look-ups must end on this machine, in each family that the node has.
    let loopback = |ip: &IpAddr| if ip.to_canonical().is_ipv6() { "::1" } else { "127.0.0.1" }.to_owned();
    let mut servers: Vec<String> = node.node_ips.iter().map(loopback).collect();
    if servers.is_empty() {
        servers.push("127.0.0.1".to_owned());
    }
    Resolver { servers: unique(servers), searches: vec![".".to_owned()], options: Vec::new() }
}

fn of_cluster(pod: &Pod, host: Resolver, node: &NodeDns<'_>) -> Resolver {
    let domain = node.cluster_domain;
    let mut searches = host.searches;
    if !domain.is_empty() {
        let own = [format!("{}.svc.{domain}", pod.namespace()), format!("svc.{domain}"), domain.to_owned()];
        searches = unique(own.into_iter().chain(searches).collect());
    }
    Resolver {
        servers: node.cluster_dns.iter().map(|ip| ip.to_canonical().to_string()).collect(),
        searches,
        // The node's options are for the node's servers.
        options: vec!["ndots:5".to_owned()],
    }
}

fn append(resolver: &mut Resolver, own: &PodDNSConfig) {
    resolver.servers.extend(own.nameservers.iter().flatten().cloned());
    resolver.servers = unique(std::mem::take(&mut resolver.servers));
    resolver.searches.extend(own.searches.iter().flatten().cloned());
    resolver.searches = unique(std::mem::take(&mut resolver.searches));
    // A pod's option may have a colon in its name; an option without a value loses its colon.
    let mut options: Vec<(&str, &str)> =
        resolver.options.iter().map(|option| option.split_once(':').unwrap_or((option, ""))).collect();
    for option in own.options.iter().flatten() {
        let name = option.name.as_deref().unwrap_or_default();
        let value = option.value.as_deref().unwrap_or_default();
        match options.iter_mut().find(|(old, _)| *old == name) {
            Some((_, old)) => *old = value,
            None => options.push((name, value)),
        }
    }
    let text = |(name, value): (&str, &str)| match value {
        "" => name.to_owned(),
        value => format!("{name}:{value}"),
    };
    resolver.options = options.into_iter().map(text).collect();
}

/// Adds an option, or replaces the one of the same name.
fn set_option(options: &mut Vec<String>, option: &str) {
    fn name(option: &str) -> &str {
        option.split_once(':').map_or(option, |(name, _)| name)
    }
    match options.iter_mut().find(|old| name(old) == name(option)) {
        Some(old) => *old = option.to_owned(),
        None => options.push(option.to_owned()),
    }
}

fn unique(list: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    list.into_iter().filter(|item| seen.insert(item.clone())).collect()
}

/// Applies the limits of resolvers, with warnings.
fn fit(resolver: &mut Resolver, notices: &mut Vec<DnsNotice>) {
    if resolver.servers.len() > NAMESERVER_LIMIT {
        resolver.servers.truncate(NAMESERVER_LIMIT);
        notices.push(DnsNotice::Forming(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            resolver.servers.join(" ")
        )));
    }
    let before = resolver.searches.len();
    fit_searches(&mut resolver.searches);
    if resolver.searches.len() < before {
        notices.push(DnsNotice::Forming(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            resolver.searches.join(" ")
        )));
    }
}

fn fit_searches(searches: &mut Vec<String>) {
    searches.truncate(SEARCH_LIMIT);
    searches.retain(|domain| domain.len() <= DOMAIN_LIMIT);
    let line =
        |searches: &[String]| searches.iter().map(|search| search.len() + 1).sum::<usize>().saturating_sub(1);
    while line(searches) > SEARCH_LINE_LIMIT {
        searches.pop();
    }
}

/// Problems of the node's resolver file, for the check at start (event `CheckLimitsForResolvConf`).
/// Three searches are reserved for the cluster's.
pub fn check_host(resolver: &Resolver, path: &Path, cluster_domain: &str) -> Vec<String> {
    let allowed = if cluster_domain.is_empty() { SEARCH_LIMIT } else { SEARCH_LIMIT - 3 };
    let mut problems = Vec::new();
    if resolver.searches.len() > allowed {
        problems.push(format!(
            "Resolv.conf file '{}' contains search line consisting of more than {allowed} domains!",
            path.display()
        ));
    }
    for domain in resolver.searches.iter().filter(|domain| domain.len() > DOMAIN_LIMIT) {
        problems.push(format!(
            "Resolv.conf file {:?} contains a search path which length is more than allowed {DOMAIN_LIMIT} chars: {domain}",
            path.display().to_string()
        ));
    }
    if resolver.searches.join(" ").len() > SEARCH_LINE_LIMIT {
        problems.push(format!(
            "Resolv.conf file '{}' contains search line which length is more than allowed {SEARCH_LINE_LIMIT} chars!",
            path.display()
        ));
    }
    problems
}

impl From<Resolver> for DNSConfig {
    fn from(resolver: Resolver) -> Self {
        DNSConfig {
            servers: resolver.servers,
            searches: resolver.searches,
            options: resolver.options,
            ..DNSConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn host() -> Resolver {
        parse(
            "# c\nnameserver 192.0.2.1\ndomain x\nsearch old\noptions a:1 b\nsearch one. . two\n\toptions a:2 c\n",
            Path::new("f"),
        )
        .unwrap()
    }

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|word| (*word).to_owned()).collect()
    }

    fn resolve(
        spec: serde_json::Value,
        settings: &super::super::settings::Settings,
    ) -> (Resolver, Vec<DnsNotice>) {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec});
        pod_resolver(
            &Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap()),
            host(),
            &settings.dns(),
        )
    }

    #[test]
    fn resolv_conf_is_parsed_and_empty_nameserver_refused() {
        let host = host();
        assert_eq!(host.servers, ["192.0.2.1"]);
        assert_eq!(host.searches, ["one", "two"]);
        assert_eq!(host.options, ["a:2", "b", "c"]);
        let error = parse("\nnameserver\n", Path::new("/etc/x")).unwrap_err();
        assert_eq!(error.to_string(), "/etc/x:2: nameserver list is empty");
        assert!(read_host(Path::new("/no/such/file")).is_err());
        assert_eq!(read_host(Path::new("")).unwrap(), Resolver::default());
    }

    #[test]
    fn dns_policy_selects_servers_and_searches() {
        let mut settings = super::super::tests::settings();
        settings.cluster_dns = vec!["10.96.0.10".parse().unwrap()];
        settings.cluster_domain = "cluster.local".into();
        settings.resolv_conf = "/etc/resolv.conf".into();
        let cluster = words(&["n.svc.cluster.local", "svc.cluster.local", "cluster.local", "one", "two"]);
        for (spec, searches) in [
            (json!({}), &cluster),
            (json!({"dnsPolicy": "ClusterFirst"}), &cluster),
            (json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}), &words(&["one", "two"])),
            (json!({"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}), &cluster),
            (json!({"dnsPolicy": "Default"}), &words(&["one", "two"])),
            (json!({"dnsPolicy": "None"}), &vec![]),
            (json!({"dnsPolicy": "None", "dnsConfig": {"searches": ["x", "x"]}}), &words(&["x"])),
        ] {
            assert_eq!(resolve(spec.clone(), &settings).0.searches, *searches, "{spec}");
        }
        let (resolver, _) = resolve(
            json!({"dnsConfig": {"options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
                "nameservers": ["10.96.0.10", "192.0.2.7"]}}),
            &settings,
        );
        assert_eq!(resolver.options, ["ndots:2", "edns0"]);
        assert_eq!(resolver.servers, ["10.96.0.10", "192.0.2.7"]);
        settings.cluster_dns.clear();
        let (resolver, notices) = resolve(json!({}), &settings);
        assert_eq!(resolver.servers, ["192.0.2.1"]);
        assert_eq!(notices, [DnsNotice::MissingClusterDns]);
        settings.resolv_conf = PathBuf::new();
        settings.node_ips = vec!["192.0.2.10".parse().unwrap(), "fd00::1".parse().unwrap()];
        let (resolver, _) = resolve(json!({"dnsPolicy": "Default"}), &settings);
        assert_eq!((resolver.servers, resolver.searches), (words(&["127.0.0.1", "::1"]), words(&["."])));
    }

    #[test]
    fn repeated_searches_of_the_machine_stay_without_a_cluster_domain() {
        let mut settings = super::super::tests::settings();
        settings.cluster_dns = vec!["10.96.0.10".parse().unwrap()];
        let twice = parse("search a b a\n", Path::new("f")).unwrap();
        let pod = Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(
                json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": []}}),
            )
            .unwrap(),
        );
        let searches = |domain| {
            let node = NodeDns { cluster_domain: domain, ..settings.dns() };
            pod_resolver(&pod, twice.clone(), &node).0.searches
        };
        assert_eq!(searches(""), ["a", "b", "a"]);
        assert_eq!(searches("c"), ["n.svc.c", "svc.c", "c", "a", "b"]);
    }

    #[test]
    fn excess_servers_and_searches_are_cut_with_a_notice() {
        let settings = super::super::tests::settings();
        let many: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
        let (resolver, notices) = resolve(
            json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["1", "2", "3", "4"], "searches": many}}),
            &settings,
        );
        assert_eq!((resolver.servers.len(), resolver.searches.len()), (3, 32));
        let [DnsNotice::Forming(servers), DnsNotice::Forming(searches)] = notices.as_slice() else {
            panic!("{notices:?}");
        };
        assert!(servers.ends_with("the applied nameserver line is: 1 2 3"));
        assert!(searches.starts_with("Search Line limits were exceeded"));
        let mut long: Vec<String> = (0..12).map(|n| format!("{n}{}", "a".repeat(200))).collect();
        long.push("b".repeat(254));
        fit_searches(&mut long);
        assert_eq!(long.len(), 10);
    }

    /// As upstream merges and prints them.
    #[test]
    fn options_and_servers_are_written_as_by_go() {
        let mut settings = super::super::tests::settings();
        settings.cluster_dns = vec!["::ffff:10.96.0.10".parse().unwrap(), "fd00:0::a".parse().unwrap()];
        let (resolver, _) = resolve(json!({}), &settings);
        assert_eq!(resolver.servers, ["10.96.0.10", "fd00::a"]);
        let pod = |own| {
            let pod = json!({"metadata": {"name": "p", "namespace": "n"},
                "spec": {"containers": [], "dnsPolicy": "Default", "dnsConfig": own}});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(pod).unwrap());
            let host = parse("options ndots: timeout:1:2 rotate\n", Path::new("f")).unwrap();
            pod_resolver(&pod, host, &settings.dns()).0.options
        };
        assert_eq!(pod(json!(null)), ["ndots:", "timeout:1:2", "rotate"]);
        assert_eq!(pod(json!({})), ["ndots", "timeout:1:2", "rotate"]);
        assert_eq!(
            pod(json!({"options": [{"name": "timeout:1", "value": ""}, {"name": "rotate", "value": "x"}]})),
            ["ndots", "timeout:1:2", "rotate:x", "timeout:1"]
        );
    }
}
