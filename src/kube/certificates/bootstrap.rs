//! The bootstrap of a node from a bootstrap kubeconfig: the first certificate, and a kubeconfig
//! that uses it (Go: client-go's certificate bootstrap, pkg/kubelet/certificate/bootstrap).

use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::csr::Template;
use super::error::Error;
use super::store::{self, Identity, Store, facts_of_pem};
use crate::model::kubeconfig::Kubeconfig;
use crate::util::disk_writes;
use crate::util::error_chain::chain;
use crate::util::secret::Secret;

/// The cluster that a kubeconfig names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cluster {
    /// `server`.
    pub server: String,
    /// `certificate-authority`, an absolute path.
    pub ca_file: Option<PathBuf>,
    /// `certificate-authority-data` as written (base64); only without a file.
    pub ca_data: Option<String>,
    /// `insecure-skip-tls-verify`.
    pub insecure: bool,
    /// `tls-server-name`.
    pub tls_server_name: Option<String>,
    /// `proxy-url`, which may hold a password.
    pub proxy_url: Option<Secret<String>>,
}

impl Cluster {
    /// The cluster of the current context of a kubeconfig that was read from `file`; `None` if the
    /// current context names no cluster.
    #[must_use]
    pub fn of_kubeconfig(config: &Kubeconfig, file: &Path) -> Option<Cluster> {
        let wanted = config.current_context.as_deref()?;
        let context =
            config.contexts.iter().flatten().find(|context| context.name == wanted)?.context.as_ref()?;
        let named = config.clusters.iter().flatten().find(|cluster| cluster.name == context.cluster)?;
        let cluster = named.cluster.as_ref()?;
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let relative_to_file =
            |path: String| file.parent().map_or_else(|| PathBuf::from(&path), |dir| dir.join(&path));
        let data = cluster.certificate_authority_data.as_ref().filter(|data| !data.0.is_empty());
        // The conversion to JSON encodes the bytes in base64.
        let data = data.and_then(|data| serde_json::to_value(data).ok());
        Some(Cluster {
            server: set(&cluster.server)?,
            ca_file: set(&cluster.certificate_authority).map(relative_to_file),
            ca_data: data.and_then(|data| data.as_str().map(str::to_owned)),
            insecure: cluster.insecure_skip_tls_verify.unwrap_or_default(),
            tls_server_name: set(&cluster.tls_server_name),
            proxy_url: set(&cluster.proxy_url).map(Secret::new),
        })
    }
}

/// The reason why a node that has a kubeconfig must bootstrap again, or `None`.
/// `client_certificate` is the PEM that the kubeconfig names or contains.
#[must_use]
pub fn bootstrap_reason(client_certificate: Option<&[u8]>, now: Timestamp) -> Option<&'static str> {
    let Some(text) = client_certificate else { return Some("it has no client certificate") };
    match facts_of_pem(text) {
        Err(reason) => Some(reason),
        Ok(facts) if facts.iter().any(|facts| facts.is_expired(now)) => {
            Some("a client certificate has expired")
        }
        Ok(_) => None,
    }
}

/// Writes the node's kubeconfig: the cluster of the bootstrap kubeconfig, and the current client
/// certificate of `store`.
///
/// # Errors
/// When the file or its directory cannot be written.
pub fn write_kubeconfig(path: &Path, cluster: &Cluster, store: &Store) -> Result<(), Error> {
    if let Some(dir) = path.parent() {
        disk_writes::make_directories(dir, 0o777)
            .map_err(|source| Error::Write { path: dir.to_owned(), source })?;
    }
    let current = store.current_path();
    // Relative paths in a kubeconfig start at its own directory.
    let current = std::path::absolute(&current).unwrap_or(current);
    store::write(path, &kubeconfig(cluster, &current))
}

/// The text of a node's kubeconfig.
fn kubeconfig(cluster: &Cluster, certificate: &Path) -> String {
    // A JSON string is a YAML string.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let certificate = quoted(&certificate.to_string_lossy());
    let mut text =
        String::from("apiVersion: v1\nkind: Config\nclusters:\n- name: default-cluster\n  cluster:\n");
    let mut field = |name: &str, value: &str| {
        text.push_str(&format!("    {name}: {value}\n"));
    };
    field("server", &quoted(&cluster.server));
    match (&cluster.ca_file, &cluster.ca_data) {
        (Some(file), _) => field("certificate-authority", &quoted(&file.to_string_lossy())),
        (None, Some(data)) => field("certificate-authority-data", &quoted(data)),
        (None, None) => {}
    }
    if cluster.insecure {
        field("insecure-skip-tls-verify", "true");
    }
    if let Some(name) = &cluster.tls_server_name {
        field("tls-server-name", &quoted(name));
    }
    if let Some(url) = &cluster.proxy_url {
        field("proxy-url", &quoted(url.reveal()));
    }
    text.push_str(&format!(
        "contexts:\n- name: default-context\n  context:\n    cluster: default-cluster\n    \
         namespace: default\n    user: default-auth\ncurrent-context: default-context\n\
         users:\n- name: default-auth\n  user:\n    client-certificate: {certificate}\n    \
         client-key: {certificate}\n"
    ));
    text
}

/// A certificate in `store` that is valid for this node now.
#[must_use]
pub fn valid_identity(store: &Store, template: &Template, now: Timestamp) -> Option<Identity> {
    match store.load() {
        Ok(identity) => {
            identity.filter(|identity| !identity.facts.is_expired(now) && template.is_met_by(&identity.facts))
        }
        Err(error) => {
            log::warn!("{}", chain(&error));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::certificates::csr::{Purpose, ServingNames};
    use jiff::SignedDuration;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_kubeconfig_is_as_upstream_names_it() {
        let cluster = Cluster {
            server: "https://10.0.0.1:6443".into(),
            ca_data: Some("QUJD".into()),
            tls_server_name: Some("api \"x\"".into()),
            ..Cluster::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etc/kubelet.conf");
        let store = Store::new(Path::new("/pki"), Purpose::Client);
        write_kubeconfig(&path, &cluster, &store).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let expected = r#"apiVersion: v1
kind: Config
clusters:
- name: default-cluster
  cluster:
    server: "https://10.0.0.1:6443"
    certificate-authority-data: "QUJD"
    tls-server-name: "api \"x\""
contexts:
- name: default-context
  context:
    cluster: default-cluster
    namespace: default
    user: default-auth
current-context: default-context
users:
- name: default-auth
  user:
    client-certificate: "/pki/kubelet-client-current.pem"
    client-key: "/pki/kubelet-client-current.pem"
"#;
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        let other = Cluster {
            server: "http://x".into(),
            ca_file: Some("/ca.crt".into()),
            ca_data: Some("no".into()),
            insecure: true,
            proxy_url: Some(Secret::new("http://p".into())),
            ..Cluster::default()
        };
        let text = kubeconfig(&other, Path::new("/c"));
        for part in ["authority: \"/ca.crt\"", "skip-tls-verify: true", "proxy-url: \"http://p\""] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("data"), "{text}");
    }

    #[test]
    fn the_cluster_comes_from_the_bootstrap_kubeconfig() {
        let config = serde_json::json!({
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "other"}, {"name": "k", "cluster": {
                "server": "https://10.0.0.1:6443",
                "certificate-authority": "pki/ca.crt",
                "certificate-authority-data": "QUJD",
                "proxy-url": "",
            }}],
        });
        let read = |value: &serde_json::Value| serde_json::from_value::<Kubeconfig>(value.clone()).unwrap();
        let cluster = Cluster::of_kubeconfig(&read(&config), Path::new("/etc/k/bootstrap.conf")).unwrap();
        let expected = Cluster {
            server: "https://10.0.0.1:6443".into(),
            ca_file: Some("/etc/k/pki/ca.crt".into()),
            ca_data: Some("QUJD".into()),
            ..Cluster::default()
        };
        assert_eq!(cluster, expected);
        for missing in ["current-context", "contexts", "clusters"] {
            let mut config = config.clone();
            config[missing] = serde_json::Value::Null;
            assert_eq!(Cluster::of_kubeconfig(&read(&config), Path::new("/b")), None, "{missing}");
        }
    }

    #[test]
    fn a_kubeconfig_with_a_good_certificate_needs_no_bootstrap() {
        let key = crate::kube::certificates::csr::PrivateKey::generate().unwrap();
        let from = Timestamp::from_second(1_700_000_000).unwrap();
        let day = std::time::Duration::from_secs(86400);
        let pem = Template::self_signed("n", &ServingNames::default(), &key, from, day).unwrap();
        let after = |second| from + SignedDuration::from_secs(second);
        assert_eq!(bootstrap_reason(Some(pem.as_bytes()), after(0)), None);
        assert_eq!(bootstrap_reason(Some(pem.as_bytes()), after(86400)), None);
        assert_eq!(
            bootstrap_reason(Some(pem.as_bytes()), after(86401)),
            Some("a client certificate has expired")
        );
        assert_eq!(bootstrap_reason(Some(b"x"), after(0)), Some("there is no certificate"));
        assert_eq!(bootstrap_reason(None, after(0)), Some("it has no client certificate"));
    }
}
