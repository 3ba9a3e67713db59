//! Finds address and authorities of a cluster, and proves that they are the right ones (Go:
//! cmd/kubeadm/app/discovery/token, cmd/kubeadm/app/discovery/file; cluster-bootstrap/token/jws).
//!
//! By token: the first request goes to a server that is not verified. What it sends is used only if the
//! token's secret has signed it, and if an authority in it has a pinned key. The second request goes over
//! TLS that a pinned authority proves; the response must be the same.

use std::io::{Cursor, Read};
use std::path::Path;

use serde_json::Value;

use super::authority::{Authorities, AuthorityPin};
use super::cluster::{KubeconfigParts, MAX_FILE_BYTES, Origin, parts, server_url};
use super::credentials::Credentials;
use super::error::JoinError;
use super::requests::{Server, Verification};
use super::retry::Retry;
use super::token::BootstrapToken;
use crate::config::Problem;
use crate::config::kubeconfig;
use crate::transport::dial::UrlParts;
use crate::util::decompress::{self, Compression};
use crate::util::encoding::{base64_url, from_base64, from_base64_url};
use crate::util::hmac;

pub use super::cluster::Cluster;

/// How errors name the object.
const CLUSTER_INFO: &str = "ConfigMap kube-public/cluster-info";
const CLUSTER_INFO_PATH: &str = "/api/v1/namespaces/kube-public/configmaps/cluster-info";
/// The key of the kubeconfig in it.
const KUBECONFIG_KEY: &str = "kubeconfig";
/// Begins the key of the signature by a token; the token's ID follows.
const SIGNATURE_KEY: &str = "jws-kubeconfig-";
/// The longest join token of k0s, which has one kubeconfig.
const MAX_K0S_TOKEN_BYTES: usize = 1024 * 1024;
/// The user of k0s' tokens for controllers (k0s: pkg/token).
const K0S_CONTROLLER: &str = "controller-bootstrap";
const K0S_TOKEN: &str = "the join token of k0s";

/// What proves that the authority of cluster-info is that of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// It has one of these keys.
    Pins(Vec<AuthorityPin>),
    /// Nothing but the signature by the token, which every holder of the token can make: only with
    /// `--discovery-token-unsafe-skip-ca-verification`.
    Unverified,
}

/// Finds a cluster by ConfigMap `kube-public/cluster-info` of the API server at `address` (`HOST:PORT`).
///
/// # Errors
/// When the address is invalid, the server is away, a proof fails, or the breaker was tripped.
pub fn by_token_within(
    address: &str,
    token: &BootstrapToken,
    trust: &Trust,
    retry: &Retry<'_>,
) -> Result<Cluster, JoinError> {
    let url = url_of_address(address)?;
    if matches!(trust, Trust::Pins(pins) if pins.is_empty()) {
        let reason =
            "there is no hash, and --discovery-token-unsafe-skip-ca-verification is not set".to_owned();
        return Err(JoinError::Argument { flag: "--discovery-token-ca-cert-hash", reason });
    }
    let server = Server::new(&url, Verification::Unverified, None, &retry.breaker)?;
    let first = retry.run(|| cluster_info(&server, token))?;
    let (cluster, authorities) = cluster_of(&server, &first)?;
    let Trust::Pins(pins) = trust else { return Ok(cluster) };
    // DIFFERS: upstream verifies the second server with all authorities, if only one of them is pinned.
    // Then a holder of the token could add an authority of its own.
    let Some(pinned) = authorities.pinned(pins) else {
        let found = authorities.hashes();
        return Err(JoinError::WrongAuthority { server: server.name().to_owned(), found });
    };
    let pem = pinned.to_pem();
    let server = Server::new(&url, Verification::Authority(&pem), None, &retry.breaker)?;
    let second = retry.run(|| cluster_info(&server, token))?;
    if second != first {
        return Err(JoinError::Changed { server: server.name().to_owned() });
    }
    Ok(cluster)
}

/// The URL of the server in a kubeconfig file, as [`by_file_within`] returns it. Nothing is sent.
///
/// # Errors
/// When the file is invalid.
pub fn server_of_file(path: &Path) -> Result<String, JoinError> {
    parts_of_file(path).map(|found| found.server)
}

fn parts_of_file(path: &Path) -> Result<KubeconfigParts, JoinError> {
    let config = kubeconfig::load(path).map_err(|problem| invalid_kubeconfig(&problem))?;
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let directory = absolute.parent().unwrap_or(Path::new("/"));
    parts(&config, Origin::File(directory))
        .map_err(|reason| JoinError::File { path: path.display().to_string(), reason })
}

/// Finds a cluster by a kubeconfig file (kubeadm: `--discovery-file`). Returns the credentials in the file, too,
/// if it has any. Files that it names are embedded. Its server must prove itself with its authority; without one
/// in the file, with an authority of this machine, and then the authority is read from `kube-public/cluster-info`.
///
/// # Errors
/// When the file is invalid, its server is away or not the right one, or the breaker was tripped.
pub fn by_file_within(path: &Path, retry: &Retry<'_>) -> Result<(Cluster, Option<Credentials>), JoinError> {
    let file_error = |reason: String| JoinError::File { path: path.display().to_string(), reason };
    let found = parts_of_file(path)?;
    let pem = found.authority.as_ref().map(Authorities::to_pem);
    let verification = pem.as_deref().map_or(Verification::System, Verification::Authority);
    let credentials = found.credentials;
    let server = Server::new(&found.server, verification, credentials.as_ref(), &retry.breaker)?;
    // DIFFERS: upstream repeats the request until the limit if the server denies it with 401, or has no
    // such object. The response alone proves the server, and only clusters of kubeadm have the object.
    let info = retry.run(|| match server.get(CLUSTER_INFO, CLUSTER_INFO_PATH) {
        Ok(info) => Ok(Some(info)),
        Err(error @ JoinError::Denied { status: 401, .. }) if credentials.is_some() => Err(error),
        Err(JoinError::Denied { .. } | JoinError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    })?;
    let authority = match pem {
        Some(pem) => pem,
        None => {
            let text = info.as_ref().and_then(|info| value_of(info, KUBECONFIG_KEY)).ok_or_else(|| {
                file_error("has no certificate-authority-data, and the server has no cluster-info".to_owned())
            })?;
            let (cluster, _) = cluster_of(&server, text)?;
            cluster.authority
        }
    };
    Ok((Cluster { server: found.server, authority }, credentials))
}

/// The cluster and the credentials of k0s' join token for workers: base64 of the gzip of a kubeconfig.
/// Nothing is sent.
///
/// # Errors
/// When the text is no such token. The error does not contain it.
pub fn by_k0s_token(text: &str) -> Result<(Cluster, Credentials), JoinError> {
    let invalid = |reason: &str| JoinError::File { path: K0S_TOKEN.to_owned(), reason: reason.to_owned() };
    if text.len() > MAX_K0S_TOKEN_BYTES {
        return Err(invalid("is larger than 1 MiB"));
    }
    let packed: String = text.split_whitespace().collect();
    let packed = from_base64(&packed).ok_or_else(|| invalid("is no base64"))?;
    let bytes = unpack(packed).ok_or_else(|| invalid("is no gzip of at most 1 MiB"))?;
    let config = kubeconfig::parse(&bytes, K0S_TOKEN).map_err(|problem| invalid_kubeconfig(&problem))?;
    let found = parts(&config, Origin::Remote).map_err(|reason| invalid(&reason))?;
    if found.user == K0S_CONTROLLER {
        return Err(invalid("is for controllers: `k0s token create --role=worker` makes one for workers"));
    }
    let authority = found.authority.ok_or_else(|| invalid("has no certificate-authority-data"))?.to_pem();
    let credentials = found.credentials.ok_or_else(|| invalid("has no credentials"))?;
    Ok((Cluster { server: found.server, authority }, credentials))
}

/// The cluster and the credentials of a kubeconfig that names no files, as
/// [`bootstrap_kubeconfig`](super::credentials::bootstrap_kubeconfig) makes it. `place` names it in errors.
/// Nothing is sent.
///
/// # Errors
/// When the text is no such kubeconfig. The error does not contain it.
pub fn by_kubeconfig(text: &str, place: &str) -> Result<(Cluster, Credentials), JoinError> {
    let invalid = |reason: &str| JoinError::File { path: place.to_owned(), reason: reason.to_owned() };
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(invalid("has a kubeconfig that is larger than 1 MiB"));
    }
    let config = kubeconfig::parse(text.as_bytes(), place).map_err(|problem| invalid_kubeconfig(&problem))?;
    let found = parts(&config, Origin::Remote).map_err(|reason| invalid(&reason))?;
    let authority = found.authority.ok_or_else(|| invalid("has no certificate-authority-data"))?.to_pem();
    let credentials = found.credentials.ok_or_else(|| invalid("has no credentials"))?;
    Ok((Cluster { server: found.server, authority }, credentials))
}

/// The data of gzip; `None` if they are damaged or too large.
fn unpack(packed: Vec<u8>) -> Option<Vec<u8>> {
    let (reader, compression) = decompress::open(Box::new(Cursor::new(packed)), MAX_FILE_BYTES).ok()?;
    if compression != Compression::Gzip {
        return None;
    }
    let mut bytes = Vec::new();
    // The reader has the limit, too.
    reader.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= MAX_FILE_BYTES).then_some(bytes)
}

fn invalid_kubeconfig(problem: &Problem) -> JoinError {
    let reason = match problem.field.as_str() {
        "" => problem.message.clone(),
        field => format!("{field}: {}", problem.message),
    };
    JoinError::File { path: problem.place.clone(), reason }
}

/// The URL of `HOST:PORT`.
fn url_of_address(address: &str) -> Result<String, JoinError> {
    let is_complete = UrlParts::split(address)
        .is_some_and(|parts| parts.user.is_none() && parts.port.is_some() && parts.rest.is_empty());
    let url = is_complete.then(|| server_url(&format!("https://{address}")).ok()).flatten();
    url.ok_or_else(|| {
        let shown = crate::util::clip::line(address, 200);
        let reason =
            format!("{shown:?} is not of the form HOST:PORT, such as 10.0.0.1:6443 or [fd00::1]:6443");
        JoinError::Argument { flag: "address of the API server", reason }
    })
}

/// The kubeconfig in cluster-info, if the token has signed it.
fn cluster_info(server: &Server, token: &BootstrapToken) -> Result<String, JoinError> {
    let info = server.get(CLUSTER_INFO, CLUSTER_INFO_PATH)?;
    let name = || server.name().to_owned();
    let signature = value_of(&info, &format!("{SIGNATURE_KEY}{}", token.id()))
        .ok_or_else(|| JoinError::UnknownToken { server: name(), id: token.id().to_owned() })?;
    let text = value_of(&info, KUBECONFIG_KEY).ok_or_else(|| {
        server.malformed(CLUSTER_INFO, "there is no key kubeconfig: the cluster does not support tokens")
    })?;
    match is_signed(text, signature, token) {
        true => Ok(text.to_owned()),
        false => Err(JoinError::Signature { server: name(), id: token.id().to_owned() }),
    }
}

/// A value of a ConfigMap; `None` if it is absent or empty.
fn value_of<'a>(config_map: &'a Value, key: &str) -> Option<&'a str> {
    config_map.get("data")?.get(key)?.as_str().filter(|value| !value.is_empty())
}

/// Whether `signature` is the JWS of `text` by the token, without its payload (RFC 7515, appendix F). As
/// upstream, exactly one header is accepted: no other algorithm, and no extension.
fn is_signed(text: &str, signature: &str, token: &BootstrapToken) -> bool {
    // An ID has letters and digits only.
    let header = base64_url(format!(r#"{{"alg":"HS256","kid":"{}"}}"#, token.id()).as_bytes());
    let tag = signature.split_once("..").filter(|(sent, _)| *sent == header);
    let Some(tag) = tag.and_then(|(_, tag)| from_base64_url(tag)) else { return false };
    let signed = format!("{header}.{}", base64_url(text.as_bytes()));
    hmac::verify(token.secret().as_bytes(), signed.as_bytes(), &tag)
}

/// The cluster of a kubeconfig from cluster-info.
fn cluster_of(server: &Server, text: &str) -> Result<(Cluster, Authorities), JoinError> {
    let malformed = |reason: &str| server.malformed(CLUSTER_INFO, reason);
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(malformed("the kubeconfig is larger than 1 MiB"));
    }
    let config = kubeconfig::parse(text.as_bytes(), KUBECONFIG_KEY)
        .map_err(|problem| malformed(&problem.to_string()))?;
    let found = parts(&config, Origin::Remote).map_err(|reason| malformed(&reason))?;
    let authorities =
        found.authority.ok_or_else(|| malformed("the kubeconfig has no certificate-authority-data"))?;
    Ok((Cluster { server: found.server, authority: authorities.to_pem() }, authorities))
}

#[cfg(test)]
mod tests;
