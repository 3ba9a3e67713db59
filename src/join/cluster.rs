//! The cluster of a kubeconfig (Go: cmd/kubeadm/app/util/kubeconfig `GetClusterFromKubeConfig`,
//! `EnsureCertificateAuthorityIsEmbedded`).

use std::path::Path;

use k8s_openapi::ByteString;

use super::authority::Authorities;
use super::credentials::{self, Credentials};
use crate::kube;
use crate::model::kubeconfig::{self, Kubeconfig, User};
use crate::transport::dial::join_host_port;
use crate::util::untrusted;

/// The longest URL of a server.
const MAX_SERVER_BYTES: usize = 2048;
/// The largest file that a kubeconfig names.
pub(super) const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The API server of a cluster, and who signs its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// `https://HOST:PORT`, with a path only if the API server is below one.
    pub server: String,
    /// The certificates of the authorities, PEM: one or more.
    pub authority: String,
}

/// The parts of a kubeconfig that a node needs.
#[derive(Debug)]
pub(super) struct KubeconfigParts {
    pub(super) server: String,
    /// `None` if the kubeconfig has none.
    pub(super) authority: Option<Authorities>,
    /// `None` if the kubeconfig has none.
    pub(super) credentials: Option<Credentials>,
    /// The name of the user, empty without one.
    pub(super) user: String,
}

/// Where a kubeconfig is from.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// From a server, or from a token: it must not name files of this machine.
    Remote,
    /// A file of this machine in this directory: it may name other files.
    File(&'a Path),
}

/// Reads the parts of a kubeconfig; the error is its reason, without values of the kubeconfig that may be
/// secrets.
pub(super) fn parts(config: &Kubeconfig, origin: Origin<'_>) -> Result<KubeconfigParts, String> {
    let contexts = || config.contexts.iter().flatten();
    let current = config.current_context.as_deref().unwrap_or_default();
    let context = contexts().find(|entry| entry.name == current).and_then(|entry| entry.context.as_ref());
    let find = |name: &str| {
        let found = config.clusters.iter().flatten().find(|entry| entry.name == name);
        found.and_then(|entry| entry.cluster.as_ref())
    };
    // cluster-info has one cluster without a name, and no context.
    let cluster = find("").or_else(|| find(&context?.cluster));
    let cluster = cluster.ok_or_else(|| match context {
        Some(_) => format!("the context {current:?} names no cluster of the kubeconfig"),
        None => format!("current-context {current:?} is no context of the kubeconfig"),
    })?;
    let name = context.map(|context| context.user.as_str()).unwrap_or_default();
    let user = config.users.iter().flatten().find(|entry| entry.name == name && !name.is_empty());
    let user = user.and_then(|entry| entry.user.as_ref());
    Ok(KubeconfigParts {
        server: server_url(cluster.server.as_deref().unwrap_or_default())?,
        authority: authority(cluster, origin)?,
        credentials: user.map_or(Ok(None), |user: &User| credentials::from_user(user, origin))?,
        user: name.to_owned(),
    })
}

/// Settings of the cluster that a node would need in its own kubeconfig, and the authorities.
fn authority(cluster: &kubeconfig::Cluster, origin: Origin<'_>) -> Result<Option<Authorities>, String> {
    let set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    if cluster.insecure_skip_tls_verify == Some(true) {
        return Err("insecure-skip-tls-verify is set: the API server must be verified".to_owned());
    }
    for (field, value) in [("tls-server-name", &cluster.tls_server_name), ("proxy-url", &cluster.proxy_url)] {
        if set(value) {
            return Err(format!(
                "{field} is not supported by join: start the agent itself with this file as its \
                 --bootstrap-kubeconfig"
            ));
        }
    }
    let embedded = cluster.certificate_authority_data.as_ref().filter(|data| !data.0.is_empty());
    let file = cluster.certificate_authority.as_deref().filter(|path| !path.is_empty());
    let pem = match (embedded, file, origin) {
        (Some(ByteString(pem)), _, _) => pem.clone(),
        (None, None, _) => return Ok(None),
        (None, Some(_), Origin::Remote) => {
            return Err(
                "certificate-authority names a file; only certificate-authority-data is read".to_owned()
            );
        }
        (None, Some(path), Origin::File(directory)) => read_file("certificate-authority", directory, path)?,
    };
    Authorities::parse(&pem).map(Some).map_err(|reason| format!("certificate-authority-data: {reason}"))
}

/// Reads a file that a kubeconfig in `directory` names.
pub(super) fn read_file(field: &str, directory: &Path, path: &str) -> Result<Vec<u8>, String> {
    let path = directory.join(path);
    untrusted::read_own(&path, MAX_FILE_BYTES)
        .map_err(|error| format!("{field}: {} cannot be read: {error}", path.display()))
}

/// A URL of a server with its port, and without `/` at its end. Only `https` is accepted, without a user,
/// a query and a fragment.
pub(super) fn server_url(text: &str) -> Result<String, String> {
    let shown = || crate::util::clip::line(text, 200);
    let scheme = text.split_once("://").map(|(scheme, _)| scheme);
    if text.len() > MAX_SERVER_BYTES || !scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")) {
        return Err(format!("the server {:?} is no https URL", shown()));
    }
    let cluster = kubeconfig::Cluster {
        server: Some(text.to_owned()),
        insecure_skip_tls_verify: Some(true),
        ..kubeconfig::Cluster::default()
    };
    let found = resolve(cluster).map_err(|_| format!("the server {:?} is no https URL", shown()))?;
    let endpoint = found.endpoint;
    if endpoint.port == 0 {
        return Err(format!("the server {:?} has the port 0", shown()));
    }
    Ok(format!("https://{}{}", join_host_port(&endpoint.host, endpoint.port), found.base_path))
}

/// The proxy of the environment through which this process reaches a cluster, without user name and password.
#[must_use]
pub fn environment_proxy(cluster: &Cluster) -> Option<String> {
    let cluster = kubeconfig::Cluster {
        server: Some(cluster.server.clone()),
        insecure_skip_tls_verify: Some(true),
        ..kubeconfig::Cluster::default()
    };
    resolve(cluster).ok()?.endpoint.proxy.map(|proxy| proxy.to_string())
}

/// How to connect to a cluster, with the proxy of the environment.
pub(super) fn resolve(
    cluster: kubeconfig::Cluster,
) -> Result<kube::client::Credentials, kube::kubeconfig::KubeconfigError> {
    const NAME: &str = "cluster";
    let config = Kubeconfig {
        clusters: Some(vec![kubeconfig::NamedCluster { name: NAME.to_owned(), cluster: Some(cluster) }]),
        users: None,
        contexts: Some(vec![kubeconfig::NamedContext {
            name: NAME.to_owned(),
            context: Some(kubeconfig::Context { cluster: NAME.to_owned(), user: String::new() }),
        }]),
        current_context: Some(NAME.to_owned()),
    };
    // It names no files.
    kube::kubeconfig::credentials(&config, Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::testing::AUTHORITY;
    use crate::util::encoding::base64;

    fn read(text: &str) -> Result<KubeconfigParts, String> {
        parts(&crate::config::kubeconfig::parse(text.as_bytes(), "test").unwrap(), Origin::Remote)
    }

    #[test]
    fn cluster_without_a_name_or_of_the_current_context_is_found() {
        let data = base64(AUTHORITY.as_bytes());
        let cluster = format!("{{server: 'https://10.0.0.1', certificate-authority-data: {data}}}");
        let found = read(&format!("clusters: [{{name: '', cluster: {cluster}}}]")).unwrap();
        assert_eq!((found.server.as_str(), found.user.as_str()), ("https://10.0.0.1:443", ""));
        assert!(found.authority.is_some() && found.credentials.is_none());
        let found = read(&format!(
            "clusters: [{{name: b, cluster: {{server: 'https://[fd00::1]:6443/a/'}}}}, {{name: a, cluster: {cluster}}}]\n\
             contexts: [{{name: c, context: {{cluster: b, user: u}}}}]\ncurrent-context: c\n\
             users: [{{name: u, user: {{token: t}}}}]"
        ))
        .unwrap();
        assert_eq!((found.server.as_str(), found.user.as_str()), ("https://[fd00::1]:6443/a", "u"));
        assert_eq!(found.credentials, Some(Credentials::Token("t".to_owned())));
        assert!(found.authority.is_none());
    }

    #[test]
    fn clusters_that_do_not_exist_are_named() {
        for (text, reason) in [
            ("{}", "current-context \"\" is no context of the kubeconfig"),
            ("current-context: c", "current-context \"c\" is no context of the kubeconfig"),
            (
                "contexts: [{name: c, context: {cluster: x}}]\ncurrent-context: c",
                "the context \"c\" names no cluster of the kubeconfig",
            ),
        ] {
            assert_eq!(read(text).unwrap_err(), reason);
        }
    }

    #[test]
    fn kubeconfig_of_a_server_cannot_name_files_or_switch_verification_off() {
        for (field, reason) in [
            ("certificate-authority: /etc/hostname", "certificate-authority names a file"),
            ("insecure-skip-tls-verify: true", "insecure-skip-tls-verify is set"),
            ("tls-server-name: other", "tls-server-name is not supported"),
            ("proxy-url: http://proxy:1", "proxy-url is not supported"),
            ("certificate-authority-data: AAAA", "certificate-authority-data: "),
        ] {
            let text = format!("clusters: [{{name: '', cluster: {{server: 'https://h:1', {field}}}}}]");
            assert!(read(&text).unwrap_err().starts_with(reason), "{field}");
        }
    }

    #[test]
    fn only_https_servers_are_accepted() {
        for (text, url) in [
            ("https://h", "https://h:443"),
            ("HTTPS://h:6443/", "https://h:6443"),
            ("https://[::1]:6443", "https://[::1]:6443"),
            ("https://h:1/a/../b//c/", "https://h:1/b/c"),
        ] {
            assert_eq!(server_url(text).as_deref(), Ok(url));
        }
        for text in [
            "",
            "h:6443",
            "http://h:6443",
            "unix:///run/x",
            "file:///etc/shadow",
            "https://",
            "https://u:p@h:1",
            "https://h:1?a",
            "https://h:1#a",
            "https://h:0",
            "https://h:99999",
            "https://h:1/\n",
            "https://h:1/%zz",
            "https://[h]:1",
            &format!("https://h:1/{}", "a".repeat(MAX_SERVER_BYTES)),
        ] {
            let error = server_url(text).unwrap_err();
            assert!(error.len() < 400 && !error.contains('\n'), "{error}");
        }
    }
}
