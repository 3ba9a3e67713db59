//! Reads credentials from a kubeconfig (Go: client-go/tools/clientcmd).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::client::{CredentialError, CredentialSource, Credentials, IssuedCredentials};
use super::exec_plugin::{self, ExecPlugin};
use super::relative_path::resolve;
use crate::model::kubeconfig::{Cluster, Context, Kubeconfig, User};
use crate::transport::api::{Breaker, Endpoint, Identity, Roots};
use crate::transport::dial::UrlParts;
use crate::transport::proxy::{Environment, Proxy};
use crate::util::encoding::{escape_percent, from_percent};
use crate::util::lock::LockExt;
use crate::util::secret::Secret;
use crate::util::untrusted;

/// The largest file of authorities, a certificate or a key.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;
/// A token file is read again after this time.
const TOKEN_PERIOD: Duration = Duration::from_secs(60);
/// Certificate files are read again after this time.
const IDENTITY_PERIOD: Duration = Duration::from_secs(300);

/// Why a kubeconfig cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum KubeconfigError {
    /// The context, or an entry that it names, does not exist.
    #[error("{kind} {name:?} does not exist")]
    Missing {
        /// `context`, `cluster` or `user`.
        kind: &'static str,
        name: String,
    },
    /// Two entries have the same name.
    #[error("duplicate name {name:?} in list of {kind}s")]
    Duplicate {
        /// `context`, `cluster` or `user`.
        kind: &'static str,
        name: String,
    },
    /// No context is set.
    #[error("no configuration has been provided: current-context is not set")]
    Empty,
    #[error("cluster {cluster:?}: {what}")]
    Cluster { cluster: String, what: String },
    #[error("user {user:?}: {what}")]
    User { user: String, what: String },
    /// A file that it names cannot be read.
    #[error("unable to read {field} {path}: {error}")]
    File { field: &'static str, path: String, error: String },
}

/// Reads the current context of `config`, which was read from `file`. Relative paths start at the
/// file's directory. Without a `proxy-url`, the proxies of the environment are used.
///
/// # Errors
/// When a part is missing, contradictory, unreadable or not supported.
pub fn credentials(config: &Kubeconfig, file: &Path) -> Result<Credentials, KubeconfigError> {
    credentials_in(config, file, Environment::of_process())
}

fn credentials_in(
    config: &Kubeconfig,
    file: &Path,
    environment: &Environment,
) -> Result<Credentials, KubeconfigError> {
    let context_name = config.current_context.as_deref().unwrap_or_default();
    let contexts =
        config.contexts.iter().flatten().map(|entry| (entry.name.as_str(), entry.context.as_ref()));
    let context = match find("context", contexts, context_name) {
        // As upstream, an entry without a name is that of a configuration that names none.
        Err(KubeconfigError::Missing { .. }) if context_name.is_empty() => Context::default(),
        found => found?.cloned().unwrap_or_default(),
    };
    let clusters =
        config.clusters.iter().flatten().map(|entry| (entry.name.as_str(), entry.cluster.as_ref()));
    let cluster = match find("cluster", clusters, &context.cluster) {
        Err(KubeconfigError::Missing { .. }) if context_name.is_empty() && context.cluster.is_empty() => {
            return Err(KubeconfigError::Empty);
        }
        found => found?.cloned().unwrap_or_default(),
    };
    let users = config.users.iter().flatten().map(|entry| (entry.name.as_str(), entry.user.as_ref()));
    let user = match find("user", users, &context.user) {
        // A context without a user.
        // DIFFERS: upstream also sends no credentials if the user does not exist.
        Err(KubeconfigError::Missing { .. }) if context.user.is_empty() => User::default(),
        found => found?.cloned().unwrap_or_default(),
    };
    let directory = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let directory = directory.parent().map_or_else(PathBuf::new, Path::to_owned);
    let resolve_path = |path: &str| resolve(&directory, path);
    let (mut credentials, roots_pem) = endpoint(&cluster, &context.cluster, &resolve_path, environment)?;
    let user_error = |what: &str| KubeconfigError::User { user: context.user.clone(), what: what.to_owned() };
    reject(&user).map_err(user_error)?;
    let https = credentials.endpoint.https;
    let identity = identity(&user, &resolve_path, https, &user_error)?;
    let fixed = set(&user.token).map(|token| Secret::new(token.to_owned()));
    let token = match set(&user.token_file) {
        Some(path) => Some(Token::File(TokenFile::new(resolve_path(path), fixed))),
        None => fixed.map(Token::Fixed),
    };
    if !https {
        // As upstream, nothing that is secret is sent without TLS.
        user.exec.as_ref().map_or(Ok(()), exec_plugin::check).map_err(|what| user_error(&what))?;
        return Ok(credentials);
    }
    let plugin = user.exec.as_ref().map(|exec| ExecPlugin::new(exec, &directory, &cluster, roots_pem));
    let plugin = plugin.transpose().map_err(|what| user_error(&what))?;
    // A token in the file takes precedence.
    if let Some(plugin) = plugin
        && token.is_none()
    {
        credentials.endpoint.identity = identity.map(|certificate| certificate.current);
        credentials.token = Some(Arc::new(plugin));
        return Ok(credentials);
    }
    let certificate_files = match &identity {
        Some(Certificate { current, files }) => {
            credentials.endpoint.identity = Some(current.clone());
            files.clone()
        }
        None => None,
    };
    if token.is_some() || certificate_files.is_some() {
        let current = credentials.endpoint.identity.clone();
        let identity = certificate_files.map(|paths| IdentityFiles::new(paths, current));
        credentials.token = Some(Arc::new(Files { token, identity }));
    }
    Ok(credentials)
}

fn find<'a, T>(
    kind: &'static str,
    all: impl Iterator<Item = (&'a str, Option<&'a T>)>,
    name: &str,
) -> Result<Option<&'a T>, KubeconfigError> {
    let mut fits = all.filter(|(candidate, _)| *candidate == name).map(|(_, value)| value);
    let found = fits.next().ok_or_else(|| KubeconfigError::Missing { kind, name: name.to_owned() })?;
    match fits.next() {
        Some(_) => Err(KubeconfigError::Duplicate { kind, name: name.to_owned() }),
        None => Ok(found),
    }
}

fn set(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

/// The content of a file. Without TLS it is of no use, and the file must only exist.
fn read(field: &'static str, path: &Path, https: bool) -> Result<Vec<u8>, KubeconfigError> {
    let content = match https {
        // A pipe in the place of a certificate must not stop the agent.
        true => untrusted::read_own(path, MAX_FILE_BYTES),
        false => untrusted::open_own(path).map(|_| Vec::new()),
    };
    content.map_err(|error| KubeconfigError::File {
        field,
        path: path.display().to_string(),
        error: error.to_string(),
    })
}

type Resolve<'a> = &'a dyn Fn(&str) -> PathBuf;

/// The server, without the user, and its authorities as PEM.
fn endpoint(
    cluster: &Cluster,
    name: &str,
    resolve_path: Resolve<'_>,
    environment: &Environment,
) -> Result<(Credentials, Option<Vec<u8>>), KubeconfigError> {
    let invalid = |what: String| KubeconfigError::Cluster { cluster: name.to_owned(), what };
    let server = set(&cluster.server).ok_or_else(|| invalid("no server found".to_owned()))?;
    let embedded = cluster.certificate_authority_data.as_ref().filter(|data| !data.0.is_empty());
    let file = set(&cluster.certificate_authority);
    let insecure = cluster.insecure_skip_tls_verify.unwrap_or_default();
    if embedded.is_some() && file.is_some() {
        return Err(invalid(
            "certificate-authority-data and certificate-authority are both specified".to_owned(),
        ));
    }
    let secure = embedded.is_some() || file.is_some() || insecure;
    let Server { https, host, port, path } =
        server_of(server, secure).ok_or_else(|| invalid(format!("server {server:?} is no URL")))?;
    let pem = match (embedded, file) {
        (Some(data), _) => Some(data.0.clone()),
        (None, Some(path)) => Some(read("certificate-authority", &resolve_path(path), https)?),
        (None, None) => None,
    };
    let roots = match pem.clone() {
        Some(_) if insecure && https => {
            return Err(invalid(
                "specifying a root certificates file with the insecure flag is not allowed".to_owned(),
            ));
        }
        _ if insecure => Roots::Unverified,
        Some(pem) => Roots::Pem(pem),
        None => Roots::System,
    };
    let server_name = set(&cluster.tls_server_name).map(str::to_owned);
    let proxy = match set(&cluster.proxy_url) {
        Some(text) => Some(Proxy::parse(text).map_err(|error| invalid(format!("proxy-url: {error}")))?),
        None => environment.proxy_for(https, &host, port).cloned(),
    };
    let endpoint = Endpoint { https, host, port, roots, server_name, identity: None, proxy };
    Ok((Credentials { endpoint, base_path: path, token: None }, pem))
}

struct Server {
    https: bool,
    host: String,
    port: u16,
    path: String,
}

/// `https://host:port/base`; without a scheme it is `http` unless TLS is configured.
///
/// DIFFERS: upstream never uses TLS without a scheme, and ignores a user, a query and a fragment.
fn server_of(text: &str, secure: bool) -> Option<Server> {
    let (https, rest) = match text.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => (true, rest),
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => (false, rest),
        Some(_) => return None,
        None => (secure, text),
    };
    let UrlParts { user, host, has_brackets, port, rest } = UrlParts::split(rest)?;
    let clean = rest.bytes().all(|byte| !byte.is_ascii_control() && !b"?# ".contains(&byte));
    let path = clean_path(rest)?;
    let of_host =
        |byte: u8| !byte.is_ascii() || byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=[]".contains(&byte);
    let is_host = match has_brackets {
        true => host.parse::<std::net::Ipv6Addr>().is_ok() && !host.ends_with(':'),
        false => !host.is_empty() && host.bytes().all(of_host),
    };
    let port = port.unwrap_or(if https { 443 } else { 80 });
    (clean && user.is_none() && is_host).then(|| Server { https, host: host.to_owned(), port, path })
}

/// A prefix of paths without empty parts, `.` and `..`, and without a slash at its end. `None` with an
/// invalid `%` (Go: the client joins the decoded path with `path.Join`, and net/url escapes it).
fn clean_path(path: &str) -> Option<String> {
    let decoded = from_percent(path)?;
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in decoded.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let mut clean = String::new();
    for part in parts {
        clean.push('/');
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~$&+,:;=@".contains(&byte);
        escape_percent(part, is_plain, &mut clean);
    }
    Some(clean)
}

/// Refuses authentication methods that are not supported, or that exclude each other.
fn reject(user: &User) -> Result<(), &'static str> {
    let basic = set(&user.username).is_some() || set(&user.password).is_some();
    let token = set(&user.token).is_some() || set(&user.token_file).is_some();
    if user.auth_provider.as_ref().is_some_and(|provider| !provider.is_null()) {
        return Err("auth-provider is not supported, use exec");
    }
    if basic && token {
        return Err(
            "more than one authentication method found: found [token basicAuth], only one is allowed",
        );
    }
    if basic {
        return Err("basic authentication (username, password) is not supported: API servers do not know it");
    }
    if set(&user.act_as).is_some() {
        return Err("impersonation (as) is not supported");
    }
    Ok(())
}

struct Certificate {
    current: Identity,
    files: Option<CertificatePaths>,
}

/// The files of a certificate and its key.
#[derive(Debug, Clone)]
struct CertificatePaths {
    certificate: PathBuf,
    key: PathBuf,
}

fn identity(
    user: &User,
    resolve_path: Resolve<'_>,
    https: bool,
    invalid: &dyn Fn(&str) -> KubeconfigError,
) -> Result<Option<Certificate>, KubeconfigError> {
    let embedded = |data: &Option<k8s_openapi::ByteString>| {
        data.as_ref().map(|data| data.0.clone()).filter(|data| !data.is_empty())
    };
    let (certificate_data, key_data) =
        (embedded(&user.client_certificate_data), embedded(&user.client_key_data));
    let (certificate_file, key_file) = (set(&user.client_certificate), set(&user.client_key));
    if certificate_data.is_some() && certificate_file.is_some() {
        return Err(invalid("client-certificate-data and client-certificate are both specified"));
    }
    let has_certificate = certificate_data.is_some() || certificate_file.is_some();
    let has_key = key_data.is_some() || key_file.is_some();
    match (has_certificate, has_key) {
        (false, false) => return Ok(None),
        (true, false) => {
            return Err(invalid(
                "client-key-data or client-key must be specified to use the clientCert authentication method",
            ));
        }
        // DIFFERS: upstream ignores the key.
        (false, true) => return Err(invalid("a client key without a client certificate is of no use")),
        (true, true) => {}
    }
    if key_data.is_some() && key_file.is_some() {
        return Err(invalid("client-key-data and client-key are both specified"));
    }
    let get = |data: Option<Vec<u8>>, field, file: Option<&str>| match (data, file) {
        (Some(data), _) => Ok(data),
        (None, file) => read(field, &resolve_path(file.unwrap_or_default()), https),
    };
    let current = Identity {
        certificate: get(certificate_data, "client-certificate", certificate_file)?.into(),
        key: get(key_data, "client-key", key_file)?.into(),
    };
    let files = certificate_file.zip(key_file).map(|(certificate, key)| CertificatePaths {
        certificate: resolve_path(certificate),
        key: resolve_path(key),
    });
    Ok(Some(Certificate { current, files }))
}

/// Credentials in files that may change.
#[derive(Debug)]
struct Files {
    token: Option<Token>,
    identity: Option<IdentityFiles>,
}

#[derive(Debug)]
enum Token {
    Fixed(Secret<String>),
    File(TokenFile),
}

impl CredentialSource for Files {
    fn current(&self, _: Instant, _: &Breaker) -> Result<IssuedCredentials, CredentialError> {
        let now = Instant::now();
        let token = match &self.token {
            Some(Token::Fixed(token)) => Some(token.clone()),
            Some(Token::File(file)) => Some(file.token(now)?),
            None => None,
        };
        Ok(IssuedCredentials {
            token,
            identity: self.identity.as_ref().and_then(|files| files.identity(now)),
        })
    }

    fn refused(&self, issued: &IssuedCredentials) -> bool {
        match &self.token {
            Some(Token::File(file)) => file.changed(issued.token.as_ref()),
            _ => false,
        }
    }
}

/// A token in a file that another program replaces.
///
/// DIFFERS: upstream ends at its start without the file.
#[derive(Debug)]
struct TokenFile {
    path: PathBuf,
    /// The token in the kubeconfig itself, for as long as the file cannot be read.
    fixed: Option<Secret<String>>,
    last: Mutex<Option<(Instant, Secret<String>)>>,
}

impl TokenFile {
    fn new(path: PathBuf, fixed: Option<Secret<String>>) -> TokenFile {
        TokenFile { path, fixed, last: Mutex::new(None) }
    }

    fn token(&self, now: Instant) -> Result<Secret<String>, String> {
        let mut last = self.last.locked();
        if let Some((read_at, token)) = &*last
            && now.saturating_duration_since(*read_at) < TOKEN_PERIOD
        {
            return Ok(token.clone());
        }
        match (self.read(), last.as_ref()) {
            (Ok(token), _) => {
                *last = Some((now, token.clone()));
                Ok(token)
            }
            (Err(error), Some((_, token))) => {
                log::error!("{error}; the old token stays in use");
                let token = token.clone();
                *last = Some((now, token.clone()));
                Ok(token)
            }
            (Err(error), None) => self.fixed.clone().ok_or(error),
        }
    }

    /// Whether the file contains another token now.
    fn changed(&self, refused: Option<&Secret<String>>) -> bool {
        let token = self.read().ok();
        let other = token.is_some() && token.as_ref() != refused;
        if let Some(token) = token.filter(|_| other) {
            *self.last.locked() = Some((Instant::now(), token));
        }
        other
    }

    fn read(&self) -> Result<Secret<String>, String> {
        let shown = self.path.display();
        let text = std::fs::read_to_string(&self.path)
            .map_err(|error| format!("unable to read token file {shown}: {error}"))?;
        match text.trim() {
            "" => Err(format!("read empty token from file {shown}")),
            token => Ok(Secret::new(token.to_owned())),
        }
    }
}

/// A certificate and its key in files that another program replaces.
#[derive(Debug)]
struct IdentityFiles {
    paths: CertificatePaths,
    last: Mutex<(Instant, Option<Identity>)>,
}

impl IdentityFiles {
    fn new(paths: CertificatePaths, current: Option<Identity>) -> IdentityFiles {
        IdentityFiles { paths, last: Mutex::new((Instant::now(), current)) }
    }

    /// The identity, if the files have changed since the last call.
    fn identity(&self, now: Instant) -> Option<Identity> {
        let mut last = self.last.locked();
        if now.saturating_duration_since(last.0) < IDENTITY_PERIOD {
            return None;
        }
        last.0 = now;
        let read = |path| std::fs::read(path).ok().map(Secret::new);
        let identity = Identity { certificate: read(&self.paths.certificate)?, key: read(&self.paths.key)? };
        if last.1.as_ref() == Some(&identity) {
            return None;
        }
        last.1 = Some(identity.clone());
        Some(identity)
    }
}

#[cfg(test)]
mod tests;
