//! Each rule with facts that meet it and with facts that do not.

use std::path::PathBuf;

use super::*;
use crate::config::GoDuration;

fn file(path: &str, mode: u32, user: u32) -> Vec<FileFact> {
    vec![FileFact { path: PathBuf::from(path), state: FileState::Present { mode, user, group: 0 } }]
}

/// A node of a cluster that meets every rule.
fn hardened() -> NodeFacts {
    let mut node = NodeFacts { has_flags: true, is_in_cluster: true, ..NodeFacts::default() };
    let config = &mut node.config;
    config.enable_server = true;
    config.authorization.mode = "Webhook".to_owned();
    config.authentication.x509.client_ca_file = "/ca.crt".to_owned();
    config.streaming_connection_idle_timeout = GoDuration::from_secs(4 * 3600);
    config.make_iptables_util_chains = true;
    config.event_record_qps = 50;
    config.tls_cert_file = "/tls.crt".to_owned();
    config.tls_private_key_file = "/tls.key".to_owned();
    config.rotate_certificates = true;
    config.pod_pids_limit = 4096;
    config.seccomp_default = true;
    config.protect_kernel_defaults = true;
    let name = |name: &str| file(name, 0o600, 0);
    node.files = NodeFiles {
        services: name("/unit"),
        kubeadm: name("/10-kubeadm.conf"),
        proxy: name("/proxy.conf"),
        kubeconfig: name("/kubelet.conf"),
        client_ca: name("/ca.crt"),
        configs: name("/config.yaml"),
        manifests: name("/manifests/web.yaml"),
    };
    node
}

fn result(node: &NodeFacts, id: &str) -> RuleResult {
    check(node).into_iter().find(|rule| rule.id == id).unwrap_or_else(|| panic!("there is no rule {id}"))
}

/// A change of the facts, the rules that fail then, and words of their evidence and of their fix.
type Case = (fn(&mut NodeFacts), &'static [&'static str], &'static str, &'static str);

const CASES: &[Case] = &[
    (|node| node.files.services = file("/unit", 0o644, 0), &["4.1.1"], "/unit: mode 644", "chmod 600 /unit"),
    (
        |node| node.files.services = file("/unit", 0o600, 7),
        &["4.1.2"],
        "owner 7:root",
        "chown root:root /unit",
    ),
    (|node| node.files.proxy = file("/p", 0o640, 0), &["4.1.3"], "mode 640", "chmod 600 /p"),
    (|node| node.files.proxy = file("/p", 0o600, 7), &["4.1.4"], "owner 7", "chown root:root /p"),
    (|node| node.files.kubeconfig = file("/k", 0o644, 0), &["4.1.5"], "mode 644", "chmod 600 /k"),
    (|node| node.files.kubeconfig = file("/k", 0o600, 7), &["4.1.6", "V-242453"], "owner 7", "chown"),
    (|node| node.files.kubeconfig = file("/k", 0o664, 0), &["4.1.5", "V-242452"], "mode 664", "chmod 6"),
    (|node| node.files.client_ca = file("/c", 0o664, 0), &["4.1.7", "V-242449"], "mode 664", "chmod 644 /c"),
    (|node| node.files.client_ca = file("/c", 0o600, 7), &["4.1.8", "V-242450"], "owner 7", "chown"),
    (|node| node.files.configs = file("/c", 0o644, 0), &["4.1.9"], "mode 644", "chmod 600 /c"),
    (
        |node| node.files.configs = file("/c", 0o664, 0),
        &["4.1.9", "V-242407", "V-242456"],
        "mode 664",
        "chmod 6",
    ),
    (
        |node| node.files.configs = file("/c", 0o600, 7),
        &["4.1.10", "V-242406", "V-242457"],
        "owner 7",
        "chown root:root /c",
    ),
    (|node| node.files.manifests = file("/m", 0o600, 7), &["V-242405"], "owner 7", "chown root:root /m"),
    (|node| node.files.manifests = file("/m", 0o664, 0), &["V-242408"], "mode 664", "chmod 644 /m"),
    (|node| node.files.kubeadm = file("/d", 0o600, 7), &["V-242454"], "owner 7", "chown root:root /d"),
    (|node| node.files.kubeadm = file("/d", 0o664, 0), &["V-242455"], "mode 664", "chmod 644 /d"),
    (
        |node| node.config.authentication.anonymous.enabled = true,
        &["4.2.1", "V-242391"],
        "authentication.anonymous.enabled: true (default)",
        "authentication.anonymous.enabled",
    ),
    (
        |node| node.config.authorization.mode = "AlwaysAllow".to_owned(),
        &["4.2.2", "V-242392"],
        "AlwaysAllow",
        "authorization.mode to Webhook",
    ),
    (
        |node| node.config.authentication.x509.client_ca_file.clear(),
        &["4.2.3", "V-242420"],
        "clientCAFile: not set",
        "--client-ca-file",
    ),
    (|node| node.config.read_only_port = 10255, &["4.2.4", "V-242387"], "10255", "readOnlyPort to 0"),
    (
        |node| node.config.streaming_connection_idle_timeout = GoDuration::ZERO,
        &["4.2.5", "V-245541"],
        "0s",
        "streamingConnectionIdleTimeout",
    ),
    (
        |node| node.config.streaming_connection_idle_timeout = GoDuration::from_secs(299),
        &["V-245541"],
        "4m59s",
        "5m or more",
    ),
    (|node| node.config.make_iptables_util_chains = false, &["4.2.6"], "false", "makeIPTablesUtilChains"),
    (
        |node| node.hostname_override = "other".to_owned(),
        &["4.2.7", "V-242404"],
        "--hostname-override: other",
        "remove --hostname-override",
    ),
    (|node| node.config.tls_cert_file.clear(), &["4.2.9", "V-242425"], "tlsCertFile: not set", "tlsCertFile"),
    (
        |node| node.config.tls_private_key_file.clear(),
        &["4.2.9", "V-242424"],
        "tlsPrivateKeyFile: not set",
        "tlsPrivateKeyFile",
    ),
    (|node| node.config.rotate_certificates = false, &["4.2.10"], "false", "rotateCertificates to true"),
    (
        |node| node.config.tls_cipher_suites = vec!["TLS_RSA_WITH_3DES_EDE_CBC_SHA".to_owned()],
        &["4.2.12"],
        "3DES",
        "remove tlsCipherSuites",
    ),
    (|node| node.config.pod_pids_limit = -1, &["4.2.13"], "-1", "podPidsLimit"),
    (|node| node.config.seccomp_default = false, &["4.2.14"], "false", "seccompDefault to true"),
    (|node| node.config.protect_kernel_defaults = false, &["V-242434"], "false", "protectKernelDefaults"),
    (
        |node| node.config.static_pod_path = "/manifests".to_owned(),
        &["V-242397"],
        "/manifests",
        "remove staticPodPath",
    ),
    (
        |node| node.config.static_pod_url = "http://user:word@host/pods".to_owned(),
        &["V-242397"],
        "staticPodURL: set",
        "staticPodURL",
    ),
];

#[test]
fn each_rule_passes_on_a_hardened_node_and_fails_on_its_change_only() {
    let failing = |node: &NodeFacts| {
        let is_wrong = |rule: &RuleResult| rule.standing == RuleStatus::Fail;
        check(node).into_iter().filter(is_wrong).map(|rule| rule.id).collect::<Vec<_>>()
    };
    assert_eq!(failing(&hardened()), Vec::<&str>::new());
    let mut covered: Vec<&str> = Vec::new();
    for (change, ids, evidence, fix) in CASES {
        let mut node = hardened();
        change(&mut node);
        assert_eq!(failing(&node), *ids);
        for id in *ids {
            assert_eq!(result(&hardened(), id).standing, RuleStatus::Pass, "{id}");
            let found = result(&node, id);
            assert!(found.evidence.contains(evidence), "{id}: {}", found.evidence);
            assert!(found.fix.contains(fix), "{id}: {}", found.fix);
        }
        covered.extend(*ids);
    }
    for rule in check(&hardened()) {
        // Three never fail: they are for a person, or about another program. 4.2.11 has its own test.
        let has_no_case = ["4.2.8", "4.2.11", "4.2.15", "4.3.1"].contains(&rule.id);
        assert!(has_no_case || covered.contains(&rule.id), "{} has no case", rule.id);
    }
}

#[test]
fn rules_for_people_and_for_other_programs_do_not_fail() {
    let mut node = hardened();
    assert_eq!(result(&node, "4.2.8").standing, RuleStatus::Pass);
    node.config.event_record_qps = 0;
    assert_eq!(result(&node, "4.2.8").standing, RuleStatus::Manual);
    assert_eq!(result(&node, "4.2.15").standing, RuleStatus::Manual);
    assert_eq!(result(&node, "4.3.1").standing, RuleStatus::NotApplicable);
    node.has_flags = false;
    assert_eq!(result(&node, "4.2.7").standing, RuleStatus::Manual);
    node.is_in_cluster = false;
    node.config.rotate_certificates = false;
    assert_eq!(result(&node, "4.2.10").standing, RuleStatus::NotApplicable);
    node.config.static_pod_path = "/m".to_owned();
    assert_eq!(result(&node, "V-242397").standing, RuleStatus::Manual);
}

#[test]
fn rules_of_the_node_api_do_not_apply_without_it() {
    let mut node = hardened();
    node.config = crate::config::KubeletConfiguration::default();
    for id in ["4.2.1", "4.2.2", "4.2.3", "4.2.4", "4.2.9", "4.2.11", "4.2.12", "V-242387", "V-242424"] {
        let found = result(&node, id);
        assert_eq!(found.standing, RuleStatus::NotApplicable, "{id}");
        assert!(found.evidence.starts_with("enableServer: false"), "{}", found.evidence);
    }
}

#[test]
fn certificate_that_the_cluster_signs_passes_the_benchmark_and_is_for_a_person_in_the_stig() {
    let mut node = hardened();
    node.config.tls_cert_file.clear();
    node.config.tls_private_key_file.clear();
    node.config.server_tls_bootstrap = true;
    assert_eq!(result(&node, "4.2.9").standing, RuleStatus::Pass);
    for id in ["V-242424", "V-242425"] {
        assert_eq!(result(&node, id).standing, RuleStatus::Manual, "{id}");
    }
}

#[test]
fn only_a_certificate_that_the_cluster_signs_passes_as_renewed() {
    let mut node = hardened();
    let found = result(&node, "4.2.11");
    assert_eq!(found.standing, RuleStatus::NotApplicable, "{}", found.evidence);
    assert!(found.evidence.contains("serverTLSBootstrap: false (default)"), "{}", found.evidence);
    node.config.server_tls_bootstrap = true;
    assert_eq!(result(&node, "4.2.11").standing, RuleStatus::Pass);
    node.config.feature_gates.insert("RotateKubeletServerCertificate".to_owned(), false);
    let found = result(&node, "4.2.11");
    assert_eq!(found.standing, RuleStatus::Fail, "{}", found.evidence);
    assert!(found.fix.contains("featureGates"), "{}", found.fix);
    node.config.feature_gates = [("AllBeta".to_owned(), false)].into();
    assert_eq!(result(&node, "4.2.11").standing, RuleStatus::Fail);
}

#[test]
fn evidence_names_the_origin_of_a_value() {
    let mut node = hardened();
    node.origins.insert("readOnlyPort", "--read-only-port".to_owned());
    node.origins.insert("tlsCipherSuites", "/config.yaml:7".to_owned());
    node.config.tls_cipher_suites = vec!["TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384".to_owned()];
    node.config.tls_min_version = "VersionTLS13".to_owned();
    assert_eq!(result(&node, "4.2.4").evidence, "readOnlyPort: 0 (--read-only-port)");
    assert_eq!(result(&node, "4.2.14").evidence, "seccompDefault: true (default)");
    assert_eq!(
        result(&node, "4.2.12").evidence,
        "tlsCipherSuites: TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384 (/config.yaml:7), \
         tlsMinVersion: VersionTLS13 (default); the server has TLS 1.3 and later, and ECDHE with AEAD ciphers only"
    );
}

#[test]
fn script_of_openrc_stays_executable() {
    let mut node = hardened();
    node.files.services = file("/etc/init.d/coracle", 0o755, 0);
    let found = result(&node, "4.1.1");
    assert_eq!((found.standing, &*found.fix), (RuleStatus::Fail, "run chmod 700 /etc/init.d/coracle"));
    node.files.services = file("/etc/init.d/coracle", 0o700, 0);
    assert_eq!(result(&node, "4.1.1").standing, RuleStatus::Pass);
}

#[test]
fn absent_files_do_not_apply_and_unreadable_ones_are_for_a_person() {
    let mut node = hardened();
    node.files = NodeFiles::default();
    assert_eq!(result(&node, "4.1.1").standing, RuleStatus::NotApplicable);
    assert_eq!(result(&node, "4.1.3").standing, RuleStatus::NotApplicable);
    let state = FileState::Unreadable("Permission denied".to_owned());
    node.files.configs = vec![FileFact { path: "/c".into(), state }];
    let found = result(&node, "4.1.9");
    assert_eq!((found.standing, found.evidence.as_str()), (RuleStatus::Manual, "/c: Permission denied"));
    // A wrong file counts before those that cannot be read.
    node.files.configs.extend(file("/d", 0o644, 0));
    assert_eq!(result(&node, "4.1.9").standing, RuleStatus::Fail);
}

#[test]
fn authority_that_all_users_can_read_passes() {
    let mut node = hardened();
    node.files.client_ca = file("/ca.crt", 0o644, 0);
    for id in ["4.1.7", "V-242449"] {
        assert_eq!(result(&node, id).standing, RuleStatus::Pass, "{id}");
    }
}

#[test]
fn each_number_of_section_4_has_a_rule() {
    let numbers = [("4.1", 10), ("4.2", 15), ("4.3", 1)];
    let wanted: Vec<String> = numbers
        .iter()
        .flat_map(|(group, last)| (1..=*last).map(move |number| format!("{group}.{number}")))
        .collect();
    let rules = check(&hardened());
    let found: Vec<&str> = rules.iter().map(|rule| rule.id).filter(|id| id.starts_with("4.")).collect();
    assert_eq!(found, wanted);
}

#[test]
fn numbers_of_rules_are_unique_and_origins_of_their_fields_are_wanted() {
    let rules = check(&hardened());
    let ids: std::collections::BTreeSet<&str> = rules.iter().map(|rule| rule.id).collect();
    assert_eq!(ids.len(), rules.len());
    for field in FIELDS {
        assert!(crate::config::fields::field(field).is_some(), "{field}");
    }
}
