//! The node API's port: its certificate, and how callers are authenticated and authorized.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;

use super::error::StartError;
use super::host::Host;
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::kube::certificates::serving::{CurrentServingCertificate, Source};
use crate::kube::client::Client;
use crate::kube::reviews::{Attributes, ReviewError, Reviewer, User};
use crate::server::{Auth, AuthSettings, MainPort, Mode, Reviews};
use crate::transport::tls::{Acceptor, Settings};
use crate::util::error_chain::chain;

/// Opens the serving certificate; `None`: the port is off.
pub(super) fn certificate(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
) -> Result<Option<CurrentServingCertificate>, StartError> {
    if !config.enable_server {
        return Ok(None);
    }
    let source = if config.server_tls_bootstrap {
        Source::Requested { dir: args.cert_dir.clone() }
    } else if !config.tls_cert_file.is_empty() {
        Source::Files {
            certificate: PathBuf::from(&config.tls_cert_file),
            key: PathBuf::from(&config.tls_private_key_file),
        }
    } else {
        Source::SelfSigned {
            dir: args.cert_dir.clone(),
            host: host.node_name.clone(),
            ips: host.addresses.get(),
        }
    };
    let serving = CurrentServingCertificate::open(&source, Timestamp::now());
    serving.map(Some).map_err(|error| StartError::Refused(format!("serving certificate: {}", chain(&error))))
}

/// The settings of the port; `None` without a certificate.
pub(super) fn main_port(
    config: &KubeletConfiguration,
    node_name: &str,
    serving: Option<CurrentServingCertificate>,
    client: Option<&Client>,
) -> Result<Option<MainPort>, StartError> {
    let Some(serving) = serving else { return Ok(None) };
    let refused = StartError::Refused;
    let authentication = &config.authentication;
    let client_ca = &authentication.x509.client_ca_file;
    let webhook = &config.authorization.webhook;
    let settings = AuthSettings {
        node: node_name.to_owned(),
        client_ca_file: (!client_ca.is_empty()).then(|| PathBuf::from(client_ca)),
        tokens: authentication.webhook.enabled.then(|| authentication.webhook.cache_ttl.to_std()),
        anonymous: authentication.anonymous.enabled,
        mode: match config.authorization.mode.as_str() {
            "AlwaysAllow" => Mode::AlwaysAllow,
            _ => Mode::Webhook {
                allowed: webhook.cache_authorized_ttl.to_std(),
                denied: webhook.cache_unauthorized_ttl.to_std(),
            },
        },
    };
    let tls = Settings {
        min_version: config.tls_min_version.clone(),
        cipher_suites: config.tls_cipher_suites.clone(),
        curves: config.tls_curve_preferences.iter().filter_map(|curve| u16::try_from(*curve).ok()).collect(),
        ask_for_certificates: settings.client_ca_file.is_some(),
    };
    let reviews = client.map(|client| -> Arc<dyn Reviews> {
        Arc::new(SeparateReviewers { tokens: Reviewer::new(client), accesses: Reviewer::new(client) })
    });
    let auth = Auth::new(settings, reviews).map_err(|error| refused(error.to_string()))?;
    let tls = Acceptor::new(&tls, Box::new(move || serving.current()))
        .map_err(|error| refused(error.to_string()))?;
    let ip: IpAddr = config.address.parse().map_err(|_| refused("address: not an IP address".to_owned()))?;
    let port = u16::try_from(config.port).map_err(|_| refused("port: not a port".to_owned()))?;
    if authentication.anonymous.enabled && config.authorization.mode == "AlwaysAllow" {
        log::warn!(
            "the node API on port {port} lets every client run commands in containers: set \
             authentication.anonymous.enabled: false, or authorization.mode: Webhook"
        );
    }
    Ok(Some(MainPort { address: SocketAddr::new(ip, port), tls, auth }))
}

/// Reviews tokens and access through separate clients with separate rate limits: unauthenticated
/// clients, whose tokens are reviewed, must not delay the authorization of users.
struct SeparateReviewers {
    tokens: Reviewer,
    accesses: Reviewer,
}

impl Reviews for SeparateReviewers {
    fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        self.tokens.token(token)
    }

    fn access(&self, user: &User, attributes: &Attributes<'_>) -> Result<bool, ReviewError> {
        self.accesses.access(user, attributes)
    }
}
