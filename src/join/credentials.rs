//! The credentials with which a machine requests its first certificate (Go: cmd/kubeadm/app/util/kubeconfig
//! `EnsureAuthenticationInfoAreEmbedded`, `CreateWithToken`).

use std::fmt;

use k8s_openapi::ByteString;
use serde_json::json;

use super::cluster::{Cluster, Origin, read_file};
use crate::config::yaml::to_yaml;
use crate::model::kubeconfig::User;
use crate::util::encoding::base64;

/// The names that kubeadm gives to cluster and user.
const CLUSTER: &str = "kubernetes";
const USER: &str = "tls-bootstrap-token-user";
/// The longest bearer token. Tokens of service accounts have about a thousand bytes.
const MAX_TOKEN_BYTES: usize = 64 * 1024;

/// Credentials for the first requests. `Debug` shows no secret.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// A bearer token.
    Token(String),
    /// A client certificate with its key.
    ClientCertificate {
        /// The chain, leaf first, PEM.
        certificate_pem: String,
        /// The key, PEM.
        key_pem: String,
    },
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Credentials::Token(_) => "Token(..)",
            Credentials::ClientCertificate { .. } => "ClientCertificate(..)",
        })
    }
}

/// The kubeconfig text for the file of `--bootstrap-kubeconfig`, with everything embedded. The file needs
/// mode 0600.
#[must_use]
pub fn bootstrap_kubeconfig(cluster: &Cluster, credentials: &Credentials) -> String {
    let user = match credentials {
        Credentials::Token(token) => json!({ "token": token }),
        Credentials::ClientCertificate { certificate_pem, key_pem } => json!({
            "client-certificate-data": base64(certificate_pem.as_bytes()),
            "client-key-data": base64(key_pem.as_bytes()),
        }),
    };
    let context = format!("{USER}@{CLUSTER}");
    to_yaml(&json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": CLUSTER,
            "cluster": {
                "certificate-authority-data": base64(cluster.authority.as_bytes()),
                "server": cluster.server,
            },
        }],
        "contexts": [{ "name": context, "context": { "cluster": CLUSTER, "user": USER } }],
        "current-context": context,
        "users": [{ "name": USER, "user": user }],
    }))
}

/// The credentials of a user of a kubeconfig; `None` if it has none. The error is its reason, without
/// values.
pub(super) fn from_user(user: &User, origin: Origin<'_>) -> Result<Option<Credentials>, String> {
    let set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    for (field, is_set) in [
        ("exec", user.exec.is_some()),
        ("auth-provider", user.auth_provider.as_ref().is_some_and(|provider| !provider.is_null())),
        ("username", set(&user.username)),
        ("password", set(&user.password)),
        ("as", set(&user.act_as)),
    ] {
        if is_set {
            return Err(format!("the user's {field} is not supported: use a token or a client certificate"));
        }
    }
    let token =
        part("tokenFile", origin, user.token.as_deref().map(str::as_bytes), user.token_file.as_deref())?;
    if let Some(token) = token {
        let token = token.trim();
        let is_valid = token.len() <= MAX_TOKEN_BYTES && token.bytes().all(|byte| byte.is_ascii_graphic());
        return match is_valid && !token.is_empty() {
            true => Ok(Some(Credentials::Token(token.to_owned()))),
            false => Err("the user's token is no token".to_owned()),
        };
    }
    let data = |data: &'_ Option<ByteString>| data.clone().map(|data| data.0);
    let certificate_data = data(&user.client_certificate_data);
    let certificate = user.client_certificate.as_deref();
    let certificate = part("client-certificate", origin, certificate_data.as_deref(), certificate)?;
    let key_data = data(&user.client_key_data);
    let key = part("client-key", origin, key_data.as_deref(), user.client_key.as_deref())?;
    match (certificate, key) {
        (Some(certificate_pem), Some(key_pem)) => {
            Ok(Some(Credentials::ClientCertificate { certificate_pem, key_pem }))
        }
        (None, None) => Ok(None),
        _ => {
            Err("the user has a client certificate without its key, or a key without a certificate"
                .to_owned())
        }
    }
}

/// A text that is embedded, or in a file; `None` if neither.
fn part(
    field: &str,
    origin: Origin<'_>,
    embedded: Option<&[u8]>,
    file: Option<&str>,
) -> Result<Option<String>, String> {
    let embedded = embedded.filter(|bytes| !bytes.is_empty());
    let file = file.filter(|path| !path.is_empty());
    let bytes = match (embedded, file, origin) {
        (Some(bytes), _, _) => bytes.to_vec(),
        (None, None, _) => return Ok(None),
        (None, Some(_), Origin::Remote) => return Err(format!("the user's {field} names a file")),
        (None, Some(path), Origin::File(directory)) => read_file(field, directory, path)?,
    };
    String::from_utf8(bytes).map(Some).map_err(|_| format!("the user's {field} is no text"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::kubeconfig::parse;
    use crate::join::cluster::parts;
    use crate::transport::testing::AUTHORITY;

    fn user(text: &str, origin: Origin<'_>) -> Result<Option<Credentials>, String> {
        let config = format!("users: [{{name: u, user: {text}}}]");
        let config = parse(config.as_bytes(), "test").unwrap();
        from_user(&config.users.unwrap()[0].user.clone().unwrap_or_default(), origin)
    }

    #[test]
    fn written_kubeconfig_is_read_back_with_server_authority_and_credentials() {
        let cluster = Cluster { server: "https://10.0.0.1:6443".to_owned(), authority: AUTHORITY.to_owned() };
        let certificate = Credentials::ClientCertificate {
            certificate_pem: "certificate\n".to_owned(),
            key_pem: "key\n".to_owned(),
        };
        // A number, and a text with a meaning in YAML.
        for credentials in
            [Credentials::Token("1e3".to_owned()), Credentials::Token("{#x: y".to_owned()), certificate]
        {
            let text = bootstrap_kubeconfig(&cluster, &credentials);
            let found = parts(&parse(text.as_bytes(), "test").unwrap(), Origin::Remote);
            let expected = match &credentials {
                Credentials::Token(token) if token.contains(' ') => {
                    Err("the user's token is no token".to_owned())
                }
                credentials => Ok(Some(credentials.clone())),
            };
            let found = found.map(|found| {
                assert_eq!((found.server.as_str(), found.user.as_str()), (cluster.server.as_str(), USER));
                assert!(found.authority.is_some());
                found.credentials
            });
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn debug_output_has_no_secret() {
        let (token, key) = (Credentials::Token("sesame".to_owned()), "sesame".to_owned());
        let certificate = Credentials::ClientCertificate { certificate_pem: "c".to_owned(), key_pem: key };
        assert!(!format!("{token:?} {certificate:?}").contains("sesame"));
    }

    #[test]
    fn files_are_read_only_for_a_kubeconfig_of_this_machine() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("token"), "abc\n").unwrap();
        std::fs::write(directory.path().join("huge"), vec![b'a'; 2 << 20]).unwrap();
        let local = Origin::File(directory.path());
        assert_eq!(user("{tokenFile: token}", local), Ok(Some(Credentials::Token("abc".to_owned()))));
        // As kubeadm, an embedded token takes precedence.
        assert_eq!(user("{token: x, tokenFile: token}", local), Ok(Some(Credentials::Token("x".to_owned()))));
        assert_eq!(
            user("{tokenFile: token}", Origin::Remote),
            Err("the user's tokenFile names a file".to_owned())
        );
        let missing = user("{client-certificate: none, client-key: none}", local).unwrap_err();
        assert!(
            missing.starts_with("client-certificate: ") && missing.contains("none cannot be read"),
            "{missing}"
        );
        assert!(user("{tokenFile: huge}", local).unwrap_err().contains("larger than 1048576 bytes"));
        assert!(user("{tokenFile: /dev/zero}", Origin::File(Path::new("/"))).is_err());
    }

    #[test]
    fn other_methods_and_halves_are_refused_without_values() {
        for text in [
            "{exec: {command: sesame}}",
            "{auth-provider: {name: sesame}}",
            "{username: sesame, password: sesame}",
            "{as: sesame, token: t}",
            "{token: 'sesame sesame'}",
            "{client-certificate-data: c2VzYW1l}",
            "{client-key-data: c2VzYW1l}",
            "{client-key-data: /w==, client-certificate-data: /w==}",
        ] {
            let error = user(text, Origin::Remote).unwrap_err();
            assert!(!error.contains("sesame"), "{text}: {error}");
        }
        assert_eq!(user("{}", Origin::Remote), Ok(None));
    }
}
