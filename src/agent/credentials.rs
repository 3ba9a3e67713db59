//! The agent's credentials for the API server: from the kubeconfig, or from a bootstrap token until
//! the node's first certificate is issued.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;

use super::error::StartError;
use crate::config::{self, AgentArgs, KubeletConfiguration};
use crate::kube::certificates::{
    self, ClientRenewal, Identity, OpenBootstrap, Purpose, Store, Template, bootstrap,
};
use crate::kube::client::{Client, CredentialError, CredentialSource, Credentials, IssuedCredentials};
use crate::kube::{added_authorities, kubeconfig};
use crate::model::kubeconfig::Kubeconfig;
use crate::transport::api::Breaker;

/// Credentials before the first certificate: each request fails without a connection.
#[derive(Debug)]
struct BootstrapPending;

impl CredentialSource for BootstrapPending {
    fn current(&self, _: Instant, _: &Breaker) -> Result<IssuedCredentials, CredentialError> {
        Err("the node's first certificate has not been issued yet".to_owned().into())
    }

    fn refused(&self, _: &IssuedCredentials) -> bool {
        false
    }
}

/// The credentials for the API server, and the certificate that is renewed. `None` without
/// `--kubeconfig`.
pub(super) fn credentials(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    node_name: &str,
) -> Result<Option<(Credentials, Option<ClientRenewal>)>, StartError> {
    let Some(path) = &args.kubeconfig else { return Ok(None) };
    let now = Timestamp::now();
    let store = Store::new(&args.cert_dir, Purpose::Client);
    // Authorities that were added with `coracle offline trust`.
    let directory = args.offline.then(|| args.root_dir.join(config::OFFLINE_DIR));
    let added = directory.as_deref();
    let (mut own, mut expired) = (None, None);
    if path.exists() {
        own = read_own(path, args.bootstrap_kubeconfig.as_deref(), added)?;
        let identity = own.as_ref().and_then(|(_, credentials)| credentials.endpoint.identity.as_ref());
        let reason = identity
            .and_then(|identity| bootstrap::bootstrap_reason(Some(identity.certificate.reveal()), now));
        if let (Some(reason), Some(bootstrap)) = (reason, args.bootstrap_kubeconfig.as_deref()) {
            match read(bootstrap, added) {
                // DIFFERS: upstream does not start. Stored pods need no API server, and kubeadm removes the
                // file after the node has joined.
                Err(error) if args.offline => {
                    log::warn!("{}: {reason}, and no new one can be requested: {error}", path.display());
                }
                _ => {
                    log::info!("{}: {reason}; requesting a new one", path.display());
                    expired = own.take().and_then(|(_, credentials)| credentials.endpoint.identity);
                }
            }
        }
    }
    let opener = args.bootstrap_kubeconfig.clone().map(|path| -> OpenBootstrap {
        let directory = directory.clone();
        Box::new(move || {
            let (_, credentials) = read(&path, directory.as_deref()).map_err(|error| error.to_string())?;
            Ok(Client::new(credentials, None).map_err(|error| error.to_string())?)
        })
    });
    if let Some((_, mut credentials)) = own {
        let identity = credentials.endpoint.identity.as_ref();
        if !config.rotate_certificates || identity.is_none() {
            return Ok(Some((credentials, None)));
        }
        // The latest certificate; a kubeconfig with embedded data has the first one.
        let current = certificates::client_identity(&store, identity, now);
        if let Some(current) = current.as_ref().filter(|current| !current.facts.is_expired(now)) {
            credentials.endpoint.identity = Some(current.for_client());
        }
        return Ok(Some((credentials, Some(ClientRenewal { current, bootstrap: opener, kubeconfig: None }))));
    }
    let Some(first) = &args.bootstrap_kubeconfig else {
        return Err(StartError::Refused(format!(
            "kubeconfig {}: no such file, and no --bootstrap-kubeconfig to make it with",
            path.display()
        )));
    };
    let (file, mut credentials) = read(first, added)?;
    let cluster = bootstrap::Cluster::of_kubeconfig(&file, first).unwrap_or_default();
    let current = bootstrap::valid_identity(&store, &Template::client(node_name), now)
        .filter(|current| is_usable(current, &credentials, &store));
    // No request uses the expired one, because `BootstrapPending` comes first: reports and events name its end.
    credentials.endpoint.identity = current.as_ref().map(Identity::for_client).or(expired);
    credentials.token =
        current.is_none().then(|| -> Arc<dyn CredentialSource> { Arc::new(BootstrapPending) });
    let renewed = ClientRenewal { current, bootstrap: opener, kubeconfig: Some((path.clone(), cluster)) };
    Ok(Some((credentials, Some(renewed))))
}

/// The node's kubeconfig. `None`: it cannot be read, or no connection can be made with its authorities,
/// certificate and key, for example because the write of its certificate was interrupted; but that of the
/// bootstrap can be read, which makes another one (Go: `isClientConfigStillValid`).
fn read_own(
    path: &Path,
    bootstrap: Option<&Path>,
    added: Option<&Path>,
) -> Result<Option<(Kubeconfig, Credentials)>, StartError> {
    let own = read(path, added);
    let Some(bootstrap) = bootstrap else { return own.map(Some) };
    let problem = match &own {
        Ok((_, credentials)) => Client::new(credentials.clone(), None)
            .err()
            .map(|error| format!("kubeconfig {}: {error}", path.display())),
        Err(error) => Some(error.to_string()),
    };
    match problem {
        Some(problem) if read(bootstrap, added).is_ok() => {
            log::warn!("{problem}; it is made again with {}", bootstrap.display());
            Ok(None)
        }
        _ => own.map(Some),
    }
}

/// Whether a connection can be made with the stored certificate: its key may be damaged, or that of another
/// one.
fn is_usable(current: &Identity, bootstrap: &Credentials, store: &Store) -> bool {
    let mut own = bootstrap.clone();
    own.endpoint.identity = Some(current.for_client());
    let problem = Client::new(own, None).err();
    if let Some(error) = &problem {
        log::warn!("{}: {error}; requesting a new certificate", store.current_path().display());
    }
    problem.is_none()
}

/// `added`: the directory of the store.
fn read(path: &Path, added: Option<&Path>) -> Result<(Kubeconfig, Credentials), StartError> {
    let refused = |message: String| StartError::Refused(format!("kubeconfig {message}"));
    let file = config::kubeconfig::load(path).map_err(|problem| refused(problem.to_string()))?;
    let mut credentials = kubeconfig::credentials(&file, path)
        .map_err(|error| refused(format!("{}: {error}", path.display())))?;
    if let Some(directory) = added {
        added_authorities::use_stored(directory, &mut credentials);
    }
    Ok((file, credentials))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::certificates;

    /// With this user, and a server at which there is none.
    fn kubeconfig_text(user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
            clusters:\n- name: k\n  cluster: {{server: 'https://127.0.0.1:1', insecure-skip-tls-verify: true}}\n\
            contexts:\n- name: c\n  context: {{cluster: k, user: u}}\n\
            users:\n- name: u\n  user: {user}\n"
        )
    }

    const BY_FILE: &str = "{client-certificate: node.pem, client-key: node.pem}";

    fn arguments(dir: &Path) -> AgentArgs {
        let mut args = AgentArgs::new("/run/coracle/coracle.sock");
        args.kubeconfig = Some(dir.join("kubelet.conf"));
        args.bootstrap_kubeconfig = Some(dir.join("bootstrap-kubelet.conf"));
        args.cert_dir = dir.join("pki");
        args
    }

    #[test]
    fn kubeconfig_that_cannot_be_read_is_made_again_if_there_are_bootstrap_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let args = arguments(dir.path());
        let config = KubeletConfiguration::default();
        std::fs::write(dir.path().join("half.pem"), certificates::testing::valid_without_key()).unwrap();
        let half = kubeconfig_text("{client-certificate: half.pem, client-key: half.pem}");
        // The file that it names was not written before a power cut, or only in part; then a damaged file.
        for (own, is_read) in
            [(kubeconfig_text(BY_FILE), false), (half, true), ("clusters: 7".to_owned(), false)]
        {
            std::fs::write(dir.path().join("kubelet.conf"), own).unwrap();
            let bootstrap = dir.path().join("bootstrap-kubelet.conf");
            let _ = std::fs::remove_file(&bootstrap);
            // Without a key, the start ends when the client is made.
            assert_eq!(credentials(&args, &config, "n").is_ok(), is_read, "there are none");
            std::fs::write(&bootstrap, kubeconfig_text("{token: t}")).unwrap();
            let (pending, renewal) = credentials(&args, &config, "n").unwrap().unwrap();
            let renewal = renewal.unwrap();
            assert!(pending.endpoint.identity.is_none() && renewal.bootstrap.is_some());
            let (path, cluster) = renewal.kubeconfig.unwrap();
            assert_eq!(
                (Some(path), cluster.server.as_str()),
                (args.kubeconfig.clone(), "https://127.0.0.1:1")
            );
        }
    }

    /// The usual kubeconfig names the stored file: without the check it would be used again.
    #[test]
    fn stored_certificate_with_the_key_of_another_one_is_requested_again() {
        const KEY: &str = "-----BEGIN PRIVATE KEY";
        let dir = tempfile::tempdir().unwrap();
        let args = arguments(dir.path());
        let config = KubeletConfiguration::default();
        let current = args.cert_dir.join("kubelet-client-current.pem");
        std::fs::create_dir_all(&args.cert_dir).unwrap();
        std::fs::write(dir.path().join("bootstrap-kubelet.conf"), kubeconfig_text("{token: t}")).unwrap();
        let [first, second] = ["n"; 2].map(certificates::testing::valid_for);
        let (certificate, key) = (first.split_once(KEY).unwrap().0, second.split_once(KEY).unwrap().1);
        let mixed = format!("{certificate}{KEY}{key}");
        let is_used = || {
            let (pending, renewal) = credentials(&args, &config, "n").unwrap().unwrap();
            [pending.endpoint.identity.is_some(), renewal.unwrap().current.is_some()]
        };
        std::fs::write(&current, &first).unwrap();
        assert_eq!(is_used(), [true; 2]);
        std::fs::write(&current, mixed).unwrap();
        assert_eq!(is_used(), [false; 2]);
        let file = current.display();
        let own = kubeconfig_text(&format!("{{client-certificate: {file}, client-key: {file}}}"));
        std::fs::write(dir.path().join("kubelet.conf"), own).unwrap();
        assert_eq!(is_used(), [false; 2]);
    }

    #[test]
    fn expired_certificate_is_reported_while_a_new_one_is_requested() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("node.pem"), certificates::testing::expired()).unwrap();
        std::fs::write(dir.path().join("kubelet.conf"), kubeconfig_text(BY_FILE)).unwrap();
        std::fs::write(dir.path().join("bootstrap-kubelet.conf"), kubeconfig_text("{token: t}")).unwrap();
        let config = KubeletConfiguration::default();
        let (pending, renewal) = credentials(&arguments(dir.path()), &config, "n").unwrap().unwrap();
        assert!(pending.token.is_some() && renewal.is_some_and(|renewal| renewal.current.is_none()));
        let client = Client::new(pending, None).unwrap();
        let problem = client.certificate_problem(Timestamp::now()).unwrap();
        assert!(problem.starts_with("the client certificate expired at 2021-"), "{problem}");
    }

    #[test]
    fn expired_certificate_without_bootstrap_credentials_prevents_no_start_from_stored_pods() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("node.pem"), certificates::testing::expired()).unwrap();
        std::fs::write(dir.path().join("kubelet.conf"), kubeconfig_text(BY_FILE)).unwrap();
        let mut args = arguments(dir.path());
        for rotate_certificates in [false, true] {
            let config = KubeletConfiguration { rotate_certificates, ..KubeletConfiguration::default() };
            args.offline = true;
            let (own, renewal) = credentials(&args, &config, "n").unwrap().unwrap();
            assert!(own.endpoint.identity.is_some());
            // It requests a new one as soon as the file is there.
            assert_eq!(renewal.is_some_and(|renewal| renewal.bootstrap.is_some()), rotate_certificates);
            args.offline = false;
            assert!(credentials(&args, &config, "n").is_err());
        }
    }
}
