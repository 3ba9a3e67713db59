//! The files with the node's configuration and flags.
//!
//! Go: cmd/kubeadm/app/phases/kubelet (`WriteConfigToDisk`, `WriteInstanceConfigToDisk`,
//! `buildKubeletArgs`), componentconfigs/kubelet.go (`Mutate`).

use std::net::IpAddr;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::defaults::{get, merge_patch, set};
use crate::config::yaml;

use super::refusal::{Reason, Refusal};

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
const KIND: &str = "KubeletConfiguration";

/// Where the resolver of systemd keeps the servers of the network. Its other file names itself, which a
/// pod cannot reach.
pub(super) const RESOLVED: &str = "/run/systemd/resolve/resolv.conf";

/// The sockets of runtimes, in the order of kubeadm.
const SOCKETS: [&str; 2] = ["/run/containerd/containerd.sock", "/run/crio/crio.sock"];

/// A document with a `KubeletConfiguration`.
fn fields(name: &str, text: &[u8], needs_kind: bool) -> Result<Value, Refusal> {
    let wrong = |reason: String| {
        Refusal::new(Reason::Configuration, format!("{name}: {reason}"), "correct it, and run this again")
    };
    let first = yaml::parse(text).first();
    let document = first.map_err(|error| wrong(format!("line {}: {}", error.line, error.message)))?;
    let value = document.map_or_else(|| json!({}), |document| document.value);
    if !value.is_object() {
        return Err(wrong("this is not a mapping of fields".to_owned()));
    }
    for (field, wanted) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        match value.get(field).and_then(Value::as_str) {
            Some(found) if found == wanted => {}
            None if !needs_kind => {}
            found => return Err(wrong(format!("{field} is {found:?}, not {wanted}"))),
        }
    }
    Ok(value)
}

/// The configuration of a cluster that offers none: what a node needs of a cluster.
fn usual(client_ca: &Path, manifests: &Path) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": KIND,
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": client_ca.display().to_string()},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": "cluster.local",
        "rotateCertificates": true,
        "staticPodPath": manifests.display().to_string(),
    })
}

/// Fields that a configuration of a cluster may lack, or have as an empty text.
const DEFAULTED: [&str; 6] = [
    "authentication.anonymous.enabled",
    "authentication.webhook.enabled",
    "authentication.x509.clientCAFile",
    "authorization.mode",
    "clusterDomain",
    "staticPodPath",
];

fn is_unset(config: &Value, path: &str) -> bool {
    get(config, path).is_none_or(|value| value.is_null() || value.as_str() == Some(""))
}

/// Completes the configuration of a cluster as kubeadm does it on each node: the ConfigMap may have only some
/// fields (Go: componentconfigs/kubelet.go `Default`). `usual`: the values.
///
/// DIFFERS: kubeadm computes `clusterDomain` and `clusterDNS` from its ConfigMap kubeadm-config. Here the domain
/// is the default, and the caller warns of absent servers.
fn complete(cluster: &mut Value, usual: &Value) {
    for path in DEFAULTED {
        if is_unset(cluster, path)
            && let Some(value) = get(usual, path)
        {
            set(cluster, path, value.clone());
        }
    }
    // The runtimes of such a cluster have it, unless they report another one.
    if is_unset(cluster, "cgroupDriver") {
        set(cluster, "cgroupDriver", Value::from("systemd"));
    }
    // Not even kubeadm distinguishes false from an absent field. Without it a node is lost when its first
    // certificate expires.
    set(cluster, "rotateCertificates", Value::from(true));
}

/// The configuration before the runtime's socket is known: the node's own over the cluster's.
///
/// `cluster`: the text of kube-system/kubelet-config. `own`: the name and the content of `--config`.
/// `resolver`: a file for `resolvConf`, unless the configuration has the field: an empty text means that
/// pods get no servers of the node.
pub(super) fn merge(
    cluster: Option<&str>,
    own: Option<(&str, &[u8])>,
    kubernetes_dir: &Path,
    resolver: Option<&str>,
) -> Result<Value, Refusal> {
    let mut merged = usual(&kubernetes_dir.join("pki/ca.crt"), &kubernetes_dir.join("manifests"));
    if let Some(text) = cluster {
        let mut cluster = fields("kube-system/kubelet-config", text.as_bytes(), true)?;
        complete(&mut cluster, &merged);
        merged = cluster;
    }
    if let Some((name, text)) = own {
        merge_patch(&mut merged, fields(name, text, false)?);
    }
    if let Some(resolver) = resolver
        && get(&merged, "resolvConf").is_none_or(Value::is_null)
    {
        set(&mut merged, "resolvConf", Value::from(resolver));
    }
    Ok(merged)
}

/// The endpoint of the runtime in a configuration.
fn endpoint(config: &Value) -> Option<&str> {
    get(config, "containerRuntimeEndpoint").and_then(Value::as_str).filter(|endpoint| !endpoint.is_empty())
}

/// Whether the node's own configuration has the socket of the runtime. `own`: as for [`merge`].
pub(super) fn sets_socket(own: Option<(&str, &[u8])>) -> bool {
    own.is_some_and(|(name, text)| fields(name, text, false).is_ok_and(|own| endpoint(&own).is_some()))
}

/// The socket of the runtime: the given one, else that of the node's own configuration, else that of the cluster
/// if this node has it, else the one that exists: nodes of a cluster may have different runtimes. `is_own`:
/// whether the configuration of the node sets it.
pub(super) fn socket(
    given: Option<&str>,
    config: &Value,
    is_own: bool,
    exists: impl Fn(&str) -> bool,
) -> Result<String, Refusal> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let configured = endpoint(config);
    let is_there = |endpoint: &&str| endpoint.strip_prefix("unix://").is_none_or(&exists);
    if let Some(configured) = configured.filter(|endpoint| is_own || is_there(endpoint)) {
        return Ok(configured.to_owned());
    }
    let found: Vec<&str> = SOCKETS.into_iter().filter(|path| exists(path)).collect();
    let advice = "start containerd or CRI-O, or name its socket with --cri-socket";
    match (&found[..], configured) {
        ([only], _) => Ok(format!("unix://{only}")),
        // The checks of the machine name it.
        ([], Some(configured)) => Ok(configured.to_owned()),
        ([], None) => Err(Refusal::new(Reason::Machine, "no container runtime has a socket in /run", advice)),
        _ => {
            let text = format!("there are several container runtimes: {}", found.join(", "));
            Err(Refusal::new(Reason::Machine, text, "choose one with --cri-socket"))
        }
    }
}

/// `config.yaml`.
pub(super) fn config_file(mut merged: Value, socket: &str) -> String {
    set(&mut merged, "containerRuntimeEndpoint", Value::from(socket));
    yaml::to_yaml(&merged)
}

/// `instance-config.yaml`: what kubeadm merges over the cluster's configuration in an upgrade.
pub(super) fn instance_file(socket: &str) -> String {
    let mut fields = Map::new();
    for (field, text) in [("apiVersion", API_VERSION), ("containerRuntimeEndpoint", socket), ("kind", KIND)] {
        fields.insert(field.to_owned(), Value::from(text));
    }
    yaml::to_yaml(&Value::Object(fields))
}

/// `kubeadm-flags.env`. The values are checked where they are parsed: none has a blank or a quote.
pub(super) fn flags_file(
    node_name: &str,
    host_name: &str,
    node_ips: &[IpAddr],
    labels: &[(String, String)],
) -> String {
    let mut flags = Vec::new();
    if node_name != host_name {
        flags.push(format!("--hostname-override={node_name}"));
    }
    if !node_ips.is_empty() {
        let ips: Vec<String> = node_ips.iter().map(ToString::to_string).collect();
        flags.push(format!("--node-ip={}", ips.join(",")));
    }
    if !labels.is_empty() {
        let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        flags.push(format!("--node-labels={}", labels.join(",")));
    }
    format!("KUBELET_KUBEADM_ARGS=\"{}\"\n", flags.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    const CLUSTER: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                           clusterDNS: [10.96.0.10]\nmaxPods: 110\nauthentication:\n  webhook: {enabled: true}\n";

    #[test]
    fn own_configuration_is_merged_over_that_of_the_cluster() {
        let own: &[u8] =
            b"maxPods: 17\nauthentication:\n  anonymous: {enabled: false}\nclusterDNS: [10.0.0.1]\n";
        let merged =
            merge(Some(CLUSTER), Some(("own.yaml", own)), Path::new("/etc/kubernetes"), Some(RESOLVED));
        expect![[r#"
            apiVersion: kubelet.config.k8s.io/v1beta1
            authentication:
              anonymous:
                enabled: false
              webhook:
                enabled: true
              x509:
                clientCAFile: /etc/kubernetes/pki/ca.crt
            authorization:
              mode: Webhook
            cgroupDriver: systemd
            clusterDNS:
            - "10.0.0.1"
            clusterDomain: cluster.local
            containerRuntimeEndpoint: unix:///run/x.sock
            kind: KubeletConfiguration
            maxPods: 17
            resolvConf: /run/systemd/resolve/resolv.conf
            rotateCertificates: true
            staticPodPath: /etc/kubernetes/manifests
        "#]]
        .assert_eq(&config_file(merged.unwrap(), "unix:///run/x.sock"));
    }

    #[test]
    fn fields_that_the_cluster_has_are_not_replaced_and_only_the_node_stops_rotation() {
        let cluster = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                       authentication: {anonymous: {enabled: true}, x509: {clientCAFile: ''}}\n\
                       authorization: {mode: AlwaysAllow}\ncgroupDriver: cgroupfs\nclusterDomain: other.example\n\
                       rotateCertificates: false\nstaticPodPath: null\n";
        let merged = merge(Some(cluster), None, Path::new("/k"), None).unwrap();
        for (path, expected) in [
            ("authentication.anonymous.enabled", json!(true)),
            ("authentication.webhook.enabled", json!(true)),
            ("authentication.x509.clientCAFile", json!("/k/pki/ca.crt")),
            ("authorization.mode", json!("AlwaysAllow")),
            ("cgroupDriver", json!("cgroupfs")),
            ("clusterDomain", json!("other.example")),
            ("rotateCertificates", json!(true)),
            ("staticPodPath", json!("/k/manifests")),
        ] {
            assert_eq!(get(&merged, path), Some(&expected), "{path}");
        }
        let own: &[u8] = b"rotateCertificates: false\nstaticPodPath: ''\n";
        let merged = merge(Some(cluster), Some(("own", own)), Path::new("/k"), None).unwrap();
        assert_eq!((&merged["rotateCertificates"], &merged["staticPodPath"]), (&json!(false), &json!("")));
    }

    #[test]
    fn configured_resolver_is_not_replaced() {
        let own: &[u8] = b"resolvConf: /etc/other\n";
        let merged = merge(Some(CLUSTER), Some(("own", own)), Path::new("/k"), Some(RESOLVED)).unwrap();
        assert_eq!(merged["resolvConf"], "/etc/other");
    }

    #[test]
    fn empty_resolver_stays_and_null_is_an_absent_field() {
        for (value, expected) in [("''", ""), ("null", RESOLVED)] {
            let cluster = format!("{CLUSTER}resolvConf: {value}\n");
            let merged = merge(Some(&cluster), None, Path::new("/k"), Some(RESOLVED)).unwrap();
            assert_eq!(merged["resolvConf"], expected, "{value}");
        }
    }

    #[test]
    fn cluster_without_configuration_gets_what_nodes_need() {
        let merged = merge(None, None, Path::new("/k"), None).unwrap();
        assert_eq!(merged["authentication"]["x509"]["clientCAFile"], "/k/pki/ca.crt");
        assert_eq!(merged["authorization"]["mode"], "Webhook");
        let text = config_file(merged, "unix:///s");
        let request = crate::config::LoadRequest {
            file: Some("/var/lib/kubelet/config.yaml".into()),
            ..crate::config::LoadRequest::default()
        };
        assert!(crate::config::load_content(&request, text.as_bytes()).is_ok(), "{text}");
    }

    #[test]
    fn other_kinds_and_broken_files_are_refused_with_their_name() {
        for (own, words) in [
            (&b"kind: Pod\n"[..], "own.yaml: kind is Some(\"Pod\")"),
            (&b"a: [\n"[..], "own.yaml: line "),
            (&b"- a\n"[..], "own.yaml: this is not a mapping"),
        ] {
            let refused = merge(Some(CLUSTER), Some(("own.yaml", own)), Path::new("/k"), None).unwrap_err();
            assert!(refused.text.starts_with(words), "{}", refused.text);
        }
        assert!(merge(Some("maxPods: 1\n"), None, Path::new("/k"), None).is_err());
    }

    #[test]
    fn socket_is_the_given_the_configured_or_the_only_one() {
        let config = json!({"containerRuntimeEndpoint": "unix:///configured"});
        assert_eq!(socket(Some("unix:///given"), &config, false, |_| true).unwrap(), "unix:///given");
        assert_eq!(socket(None, &config, false, |_| true).unwrap(), "unix:///configured");
        let none = json!({"containerRuntimeEndpoint": ""});
        let only = socket(None, &none, false, |path| path.contains("crio")).unwrap();
        assert_eq!(only, "unix:///run/crio/crio.sock");
        assert!(socket(None, &none, false, |_| true).unwrap_err().text.contains("several"));
        assert!(socket(None, &none, false, |_| false).is_err());
    }

    #[test]
    fn socket_of_the_cluster_gives_way_to_the_runtime_of_the_node_and_its_own_does_not() {
        let config = json!({"containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock"});
        let found = |is_own| socket(None, &config, is_own, |path| path.contains("crio")).unwrap();
        assert_eq!(found(false), "unix:///run/crio/crio.sock");
        assert_eq!(found(true), "unix:///run/containerd/containerd.sock");
        let missing = socket(None, &config, false, |_| false).unwrap();
        assert_eq!(missing, "unix:///run/containerd/containerd.sock");
        for (own, expected) in [
            (None, false),
            (Some("maxPods: 1\n"), false),
            (Some("containerRuntimeEndpoint: ''\n"), false),
            (Some("containerRuntimeEndpoint: unix:///x\n"), true),
        ] {
            assert_eq!(sets_socket(own.map(|text| ("own", text.as_bytes()))), expected, "{own:?}");
        }
    }

    #[test]
    fn flags_have_the_form_of_kubeadm() {
        assert_eq!(flags_file("a", "a", &[], &[]), "KUBELET_KUBEADM_ARGS=\"\"\n");
        let labels = [("zone".to_owned(), "a".to_owned()), ("x.y/z".to_owned(), String::new())];
        assert_eq!(
            flags_file("b", "a", &["192.0.2.1".parse().unwrap()], &labels),
            "KUBELET_KUBEADM_ARGS=\"--hostname-override=b --node-ip=192.0.2.1 --node-labels=zone=a,x.y/z=\"\n"
        );
        let text = instance_file("unix:///s");
        assert!(text.contains("containerRuntimeEndpoint: unix:///s\n") && text.contains("kind: Kubelet"));
    }
}
