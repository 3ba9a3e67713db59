//! The rules: a table, and for each a pure function of the facts.

use super::{FileFact, FileState, NodeFacts, RuleResult, RuleStatus};

/// What a rule found; becomes a [`RuleResult`] with the number and the title of the rule.
struct Finding {
    standing: RuleStatus,
    evidence: String,
    fix: String,
}

type Rule = (&'static str, &'static str, fn(&NodeFacts) -> Finding);

/// Numbers and settings are those of the CIS Kubernetes Benchmark 1.12 and of the Kubernetes STIG
/// (version 2); the titles are ours. 4.2.15 is in version 1.11 only.
const RULES: &[Rule] = &[
    ("4.1.1", "the files that start the agent have at most mode 600", |node| {
        // OpenRC runs no script that is not executable.
        let has_script = node.files.services.iter().any(|file| file.path.ends_with("init.d/coracle"));
        modes(&node.files.services, if has_script { 0o700 } else { 0o600 }, NO_SERVICE)
    }),
    ("4.1.2", "the files that start the agent belong to root:root", |node| {
        owners(&node.files.services, NO_SERVICE)
    }),
    ("4.1.3", "the kubeconfig of kube-proxy has at most mode 600", |node| {
        modes(&node.files.proxy, 0o600, NO_PROXY)
    }),
    ("4.1.4", "the kubeconfig of kube-proxy belongs to root:root", |node| {
        owners(&node.files.proxy, NO_PROXY)
    }),
    ("4.1.5", "the kubeconfig of the agent has at most mode 600", |node| {
        modes(&node.files.kubeconfig, 0o600, NO_KUBECONFIG)
    }),
    ("4.1.6", "the kubeconfig of the agent belongs to root:root", |node| {
        owners(&node.files.kubeconfig, NO_KUBECONFIG)
    }),
    ("4.1.7", "the authorities of clients have at most mode 644", |node| {
        // 600 before version 1.11 of the benchmark.
        modes(&node.files.client_ca, 0o644, NO_CLIENT_CA)
    }),
    ("4.1.8", "the authorities of clients belong to root:root", |node| {
        owners(&node.files.client_ca, NO_CLIENT_CA)
    }),
    ("4.1.9", "the configuration has at most mode 600", |node| modes(&node.files.configs, 0o600, NO_CONFIG)),
    ("4.1.10", "the configuration belongs to root:root", |node| owners(&node.files.configs, NO_CONFIG)),
    ("4.2.1", "requests without credentials are rejected", anonymous),
    ("4.2.2", "requests are authorized, not all allowed", authorization),
    ("4.2.3", "certificates of clients are checked", client_ca),
    ("4.2.4", "the port without authentication is off", read_only_port),
    ("4.2.5", "idle streams have a time limit", |node| idle_timeout(node, 1)),
    ("4.2.6", "the agent maintains its chains of the packet filter", iptables),
    ("4.2.7", "the name of the node is that of the machine", hostname),
    ("4.2.8", "the rate of events is limited, and high enough to record what happens", events),
    ("4.2.9", "the node API has a certificate that clients can check", certificate),
    ("4.2.10", "the client certificate is renewed", rotation),
    ("4.2.11", "the serving certificate is renewed", serving_rotation),
    ("4.2.12", "the node API has strong ciphers only", ciphers),
    ("4.2.13", "the processes of a pod are limited", pids),
    ("4.2.14", "pods have a seccomp profile by default", seccomp),
    ("4.2.15", "the service manager rejects addresses that are not allowed", |_| {
        let evidence = "IPAddressDeny is a setting of the systemd unit, and not of the agent";
        let fix = "set IPAddressDeny=any with IPAddressAllow= for the node, its pods and the API server in a \
                   drop-in of the unit, if the site demands it";
        manual(evidence, fix)
    }),
    ("4.3.1", "the metrics of kube-proxy are on loopback only", |_| {
        not_applicable("kube-proxy is not part of the agent: it runs as a pod of the cluster, if at all")
    }),
    ("V-242387", "the port without authentication is off", read_only_port),
    ("V-242391", "requests without credentials are rejected", anonymous),
    ("V-242392", "requests are authorized, not all allowed", authorization),
    ("V-242397", "there are no static pods", static_pods),
    ("V-242404", "the name of the node is that of the machine", hostname),
    ("V-242405", "the manifests of static pods belong to root:root", |node| {
        owners(&node.files.manifests, NO_MANIFEST)
    }),
    ("V-242406", "the configuration belongs to root:root", |node| owners(&node.files.configs, NO_CONFIG)),
    ("V-242407", "the configuration has at most mode 644", |node| {
        modes(&node.files.configs, 0o644, NO_CONFIG)
    }),
    ("V-242408", "the manifests of static pods have at most mode 644", |node| {
        modes(&node.files.manifests, 0o644, NO_MANIFEST)
    }),
    ("V-242420", "certificates of clients are checked", client_ca),
    ("V-242424", "the key of the node API is set", |node| {
        serving_file(node, "tlsPrivateKeyFile", &node.config.tls_private_key_file)
    }),
    ("V-242425", "the certificate of the node API is set", |node| {
        serving_file(node, "tlsCertFile", &node.config.tls_cert_file)
    }),
    ("V-242434", "the agent changes no parameters of the kernel", kernel_defaults),
    ("V-242449", "the authorities of clients have at most mode 644", |node| {
        modes(&node.files.client_ca, 0o644, NO_CLIENT_CA)
    }),
    ("V-242450", "the authorities of clients belong to root:root", |node| {
        owners(&node.files.client_ca, NO_CLIENT_CA)
    }),
    ("V-242452", "the kubeconfig of the agent has at most mode 644", |node| {
        modes(&node.files.kubeconfig, 0o644, NO_KUBECONFIG)
    }),
    ("V-242453", "the kubeconfig of the agent belongs to root:root", |node| {
        owners(&node.files.kubeconfig, NO_KUBECONFIG)
    }),
    ("V-242454", "the drop-in of kubeadm belongs to root:root", |node| {
        owners(&node.files.kubeadm, NO_KUBEADM)
    }),
    ("V-242455", "the drop-in of kubeadm has at most mode 644", |node| {
        modes(&node.files.kubeadm, 0o644, NO_KUBEADM)
    }),
    ("V-242456", "the configuration file has at most mode 644", |node| {
        modes(&node.files.configs, 0o644, NO_CONFIG)
    }),
    ("V-242457", "the configuration file belongs to root:root", |node| {
        owners(&node.files.configs, NO_CONFIG)
    }),
    ("V-245541", "idle streams have a time limit of at least 5 minutes", |node| idle_timeout(node, 300)),
];

const NO_SERVICE: &str = "no unit of systemd and no script of OpenRC starts the agent";
const NO_PROXY: &str = "no kubeconfig of a kube-proxy is on this machine; in a pod, it has no file here";
const NO_KUBECONFIG: &str = "no --kubeconfig: the node belongs to no cluster";
const NO_CLIENT_CA: &str = "authentication.x509.clientCAFile is not set, so there is no file";
const NO_CONFIG: &str = "no --config and no --config-dir: there is no file";
const NO_MANIFEST: &str = "staticPodPath has no manifests";
const NO_KUBEADM: &str = "there is no drop-in of kubeadm";
const NO_API: &str = "the node API is off";

/// TLS 1.2 suites that the benchmark accepts, under both names that Go accepts, and those of TLS 1.3.
const STRONG_SUITES: &[&str] = &[
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
];

/// Applies all rules, in the order of the benchmark and then of the STIG.
pub(crate) fn check(node: &NodeFacts) -> Vec<RuleResult> {
    let result = |&(id, title, rule): &Rule| {
        let Finding { standing, evidence, fix } = rule(node);
        RuleResult { id, title, standing, evidence, fix }
    };
    RULES.iter().map(result).collect()
}

fn pass(evidence: impl Into<String>) -> Finding {
    Finding { standing: RuleStatus::Pass, evidence: evidence.into(), fix: String::new() }
}

fn fail(evidence: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { standing: RuleStatus::Fail, evidence: evidence.into(), fix: fix.into() }
}

fn manual(evidence: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { standing: RuleStatus::Manual, evidence: evidence.into(), fix: fix.into() }
}

fn not_applicable(evidence: impl Into<String>) -> Finding {
    Finding { standing: RuleStatus::NotApplicable, evidence: evidence.into(), fix: String::new() }
}

fn decide(is_met: bool, evidence: String, fix: &str) -> Finding {
    if is_met { pass(evidence) } else { fail(evidence, fix) }
}

/// A field with its value and its origin.
fn value(node: &NodeFacts, field: &str, value: &str) -> String {
    let value = if value.is_empty() { "not set" } else { value };
    match node.origins.get(field) {
        Some(origin) => format!("{field}: {value} ({origin})"),
        None => format!("{field}: {value} (default)"),
    }
}

/// The rule does not apply while the node API is off.
fn of_api(node: &NodeFacts, rule: impl FnOnce() -> Finding) -> Finding {
    if node.config.enable_server {
        return rule();
    }
    not_applicable(format!("{}: {NO_API}", value(node, "enableServer", "false")))
}

/// Finds the first file that is not as wanted. `none`: why there may be no files.
fn files(
    files: &[FileFact],
    none: &str,
    is_met: impl Fn(u32, u32, u32) -> bool,
    fix: impl Fn(&str) -> String,
) -> Finding {
    if files.is_empty() {
        return not_applicable(none);
    }
    let (mut all, mut wrong, mut unreadable) = (Vec::new(), Vec::new(), Vec::new());
    for file in files {
        let path = file.path.display().to_string();
        match &file.state {
            FileState::Present { mode, user, group } => {
                let shown = format!("{path}: mode {mode:03o}, owner {}:{}", name(*user), name(*group));
                if !is_met(*mode, *user, *group) {
                    wrong.push((path, shown.clone()));
                }
                all.push(shown);
            }
            FileState::Unreadable(error) => unreadable.push(format!("{path}: {error}")),
        }
    }
    if !wrong.is_empty() {
        let (paths, shown): (Vec<_>, Vec<_>) = wrong.into_iter().unzip();
        return fail(shown.join("; "), fix(&paths.join(" ")));
    }
    if !unreadable.is_empty() {
        return manual(unreadable.join("; "), "make sure that the file exists, and run this again as root");
    }
    pass(all.join("; "))
}

/// `root`, or the number of a user or group.
fn name(id: u32) -> String {
    if id == 0 { "root".to_owned() } else { id.to_string() }
}

fn modes(facts: &[FileFact], most: u32, none: &str) -> Finding {
    files(facts, none, |mode, _, _| mode & !most == 0, |paths| format!("run chmod {most:o} {paths}"))
}

fn owners(facts: &[FileFact], none: &str) -> Finding {
    files(
        facts,
        none,
        |_, user, group| user == 0 && group == 0,
        |paths| format!("run chown root:root {paths}"),
    )
}

fn anonymous(node: &NodeFacts) -> Finding {
    of_api(node, || {
        let is_on = node.config.authentication.anonymous.enabled;
        let evidence = value(node, "authentication.anonymous.enabled", &is_on.to_string());
        decide(!is_on, evidence, "set authentication.anonymous.enabled to false (--anonymous-auth=false)")
    })
}

fn authorization(node: &NodeFacts) -> Finding {
    of_api(node, || {
        let mode = &node.config.authorization.mode;
        let evidence = value(node, "authorization.mode", mode);
        let fix = if node.is_in_cluster {
            "set authorization.mode to Webhook (--authorization-mode=Webhook)"
        } else {
            "set authorization.mode to Webhook on a node of a cluster; a node without one cannot review \
             permissions, so set enableServer to false there, or record the exception"
        };
        decide(mode == "Webhook", evidence, fix)
    })
}

fn client_ca(node: &NodeFacts) -> Finding {
    of_api(node, || {
        let file = &node.config.authentication.x509.client_ca_file;
        let evidence = value(node, "authentication.x509.clientCAFile", file);
        let fix = "set authentication.x509.clientCAFile to the authorities of clients (--client-ca-file)";
        decide(!file.is_empty(), evidence, fix)
    })
}

fn read_only_port(node: &NodeFacts) -> Finding {
    of_api(node, || {
        let port = node.config.read_only_port;
        let evidence = value(node, "readOnlyPort", &port.to_string());
        decide(port == 0, evidence, "set readOnlyPort to 0 (--read-only-port=0)")
    })
}

fn idle_timeout(node: &NodeFacts, least_seconds: u64) -> Finding {
    let timeout = node.config.streaming_connection_idle_timeout;
    let shown = value(node, "streamingConnectionIdleTimeout", &timeout.to_string());
    let is_met = timeout.to_std().as_secs() >= least_seconds && !timeout.is_negative();
    let evidence = format!("{shown}; Kubernetes has no use for the field any more");
    decide(is_met, evidence, "set streamingConnectionIdleTimeout to 5m or more, or remove it")
}

fn iptables(node: &NodeFacts) -> Finding {
    let is_on = node.config.make_iptables_util_chains;
    let evidence = value(node, "makeIPTablesUtilChains", &is_on.to_string());
    decide(is_on, evidence, "set makeIPTablesUtilChains to true, or remove it")
}

fn hostname(node: &NodeFacts) -> Finding {
    const FLAG: &str = "--hostname-override";
    if !node.hostname_override.is_empty() {
        let evidence = format!("{FLAG}: {} (flag)", node.hostname_override);
        return fail(evidence, format!("remove {FLAG} from the command line of the agent"));
    }
    if !node.has_flags {
        let evidence = "no agent runs here, so its flags are not known";
        return manual(evidence, format!("start the agent without {FLAG}, and run this again"));
    }
    pass(format!("{FLAG}: not set"))
}

fn events(node: &NodeFacts) -> Finding {
    let rate = node.config.event_record_qps;
    let evidence = value(node, "eventRecordQPS", &rate.to_string());
    if rate > 0 {
        return pass(evidence);
    }
    manual(evidence, "0 is without a limit: set eventRecordQPS to a rate that the API server can take")
}

fn certificate(node: &NodeFacts) -> Finding {
    of_api(node, || {
        let config = &node.config;
        if config.server_tls_bootstrap {
            return pass(value(node, "serverTLSBootstrap", "true"));
        }
        let evidence = format!(
            "{}, {}",
            value(node, "tlsCertFile", &config.tls_cert_file),
            value(node, "tlsPrivateKeyFile", &config.tls_private_key_file)
        );
        let is_met = !config.tls_cert_file.is_empty() && !config.tls_private_key_file.is_empty();
        let fix = "set tlsCertFile and tlsPrivateKeyFile, or serverTLSBootstrap to true in a cluster that \
                   approves the requests; without them the certificate is self-signed";
        decide(is_met, evidence, fix)
    })
}

/// `file`: the value of a field for the serving certificate.
fn serving_file(node: &NodeFacts, field: &str, file: &str) -> Finding {
    of_api(node, || {
        let evidence = value(node, field, file);
        if !file.is_empty() {
            return pass(evidence);
        }
        let fix = format!("set {field} to a file of the site's authority");
        if node.config.server_tls_bootstrap {
            let signed = value(node, "serverTLSBootstrap", "true");
            return manual(format!("{evidence}, {signed}: the cluster signs the certificate"), fix);
        }
        fail(evidence, fix)
    })
}

fn rotation(node: &NodeFacts) -> Finding {
    let is_on = node.config.rotate_certificates;
    let evidence = value(node, "rotateCertificates", &is_on.to_string());
    if !node.is_in_cluster && !is_on {
        return not_applicable(format!("{evidence}; the node belongs to no known cluster"));
    }
    decide(is_on, evidence, "set rotateCertificates to true (--rotate-certificates)")
}

fn serving_rotation(node: &NodeFacts) -> Finding {
    const GATE: &str = "RotateKubeletServerCertificate";
    of_api(node, || {
        let gates = &node.config.feature_gates;
        let set = gates.get(GATE).or_else(|| gates.get("AllBeta")).copied();
        let origin = match (set, node.origins.get("featureGates")) {
            (Some(_), Some(origin)) => origin.as_str(),
            _ => "default",
        };
        let is_on = set.unwrap_or(true);
        let is_signed = node.config.server_tls_bootstrap;
        let bootstrap = value(node, "serverTLSBootstrap", &is_signed.to_string());
        let evidence = format!("featureGates.{GATE}: {is_on} ({origin}), {bootstrap}");
        if is_on && !is_signed {
            return not_applicable(format!("{evidence}: the cluster does not sign the certificate"));
        }
        decide(is_on, evidence, "remove RotateKubeletServerCertificate from featureGates, or set it to true")
    })
}

fn ciphers(node: &NodeFacts) -> Finding {
    of_api(node, || {
        let suites = &node.config.tls_cipher_suites;
        // The server has no version before 1.2, and no other suites than those of STRONG_SUITES.
        let oldest = if node.config.tls_min_version == "VersionTLS13" { "1.3" } else { "1.2" };
        let version = value(node, "tlsMinVersion", &node.config.tls_min_version);
        let evidence = format!(
            "{}, {version}; the server has TLS {oldest} and later, and ECDHE with AEAD ciphers only",
            value(node, "tlsCipherSuites", &suites.join(","))
        );
        let is_met = suites.iter().all(|suite| STRONG_SUITES.contains(&suite.as_str()));
        let fix = format!("remove tlsCipherSuites, or set it to some of {}", STRONG_SUITES.join(","));
        decide(is_met, evidence, &fix)
    })
}

fn pids(node: &NodeFacts) -> Finding {
    let limit = node.config.pod_pids_limit;
    let evidence = value(node, "podPidsLimit", &limit.to_string());
    decide(limit > 0, evidence, "set podPidsLimit to a number of processes (--pod-max-pids), such as 4096")
}

fn seccomp(node: &NodeFacts) -> Finding {
    let is_on = node.config.seccomp_default;
    let evidence = value(node, "seccompDefault", &is_on.to_string());
    decide(is_on, evidence, "set seccompDefault to true (--seccomp-default)")
}

fn kernel_defaults(node: &NodeFacts) -> Finding {
    let is_on = node.config.protect_kernel_defaults;
    let evidence = value(node, "protectKernelDefaults", &is_on.to_string());
    let fix = "set protectKernelDefaults to true (--protect-kernel-defaults), after coracle check shows no \
               kernel parameter to change";
    decide(is_on, evidence, fix)
}

fn static_pods(node: &NodeFacts) -> Finding {
    let (path, url) = (&node.config.static_pod_path, &node.config.static_pod_url);
    // The URL can have credentials.
    let url_state = if url.is_empty() { "" } else { "set" };
    let evidence =
        format!("{}, {}", value(node, "staticPodPath", path), value(node, "staticPodURL", url_state));
    match (path.is_empty() && url.is_empty(), node.is_in_cluster) {
        (true, _) => pass(evidence),
        (false, true) => {
            fail(evidence, "remove staticPodPath (--pod-manifest-path) and staticPodURL (--manifest-url)")
        }
        (false, false) => manual(
            format!("{evidence}; the node belongs to no known cluster"),
            "static pods are the only pods of a node without an API server: record the exception, or remove \
             staticPodPath and staticPodURL on a node of a cluster",
        ),
    }
}
