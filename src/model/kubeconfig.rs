//! The content of a kubeconfig (Go: client-go/tools/clientcmd/api/v1). Keys without a meaning for a
//! node, such as preferences and extensions, are left out.

use k8s_openapi::ByteString;
use serde::{Deserialize, Deserializer};

use crate::util::encoding::from_go_base64;

/// The file. Lists may be null.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Kubeconfig {
    /// Servers.
    pub clusters: Option<Vec<NamedCluster>>,
    /// Credentials.
    pub users: Option<Vec<NamedUser>>,
    /// Pairs of a server and credentials.
    pub contexts: Option<Vec<NamedContext>>,
    /// The name of the context to use.
    pub current_context: Option<String>,
}

/// A server with its name.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct NamedCluster {
    /// Its name in contexts.
    pub name: String,
    /// The server.
    pub cluster: Option<Cluster>,
}

/// A user with its name.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct NamedUser {
    /// Its name in contexts.
    pub name: String,
    /// The user.
    pub user: Option<User>,
}

/// A context with its name.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct NamedContext {
    /// The name in `current-context`.
    pub name: String,
    /// The context.
    pub context: Option<Context>,
}

/// A pair of a cluster and a user.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct Context {
    /// The cluster's name.
    pub cluster: String,
    /// The user's name.
    pub user: String,
}

/// Base64 in one line or in several, as `base64` writes it, or a list of bytes.
fn data<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ByteString>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Data {
        Base64(String),
        // As in Go, null is zero.
        Bytes(Vec<Option<u8>>),
    }
    let bytes = match Option::<Data>::deserialize(deserializer)? {
        Some(Data::Base64(text)) => {
            from_go_base64(&text).ok_or_else(|| serde::de::Error::custom("no base64"))?
        }
        Some(Data::Bytes(bytes)) => bytes.into_iter().map(Option::unwrap_or_default).collect(),
        None => return Ok(None),
    };
    Ok(Some(ByteString(bytes)))
}

/// A server.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Cluster {
    /// `https://10.0.0.1:6443`.
    pub server: Option<String>,
    /// The name in its certificate, if it is not the host.
    pub tls_server_name: Option<String>,
    /// Accept any certificate.
    pub insecure_skip_tls_verify: Option<bool>,
    /// A file with the certificates of its authorities.
    pub certificate_authority: Option<String>,
    /// The certificates of the authorities, in base64.
    #[serde(deserialize_with = "data")]
    pub certificate_authority_data: Option<ByteString>,
    /// A proxy for the connection.
    pub proxy_url: Option<String>,
}

/// Credentials. Not `Debug`: it contains secrets.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct User {
    /// A file with our certificate.
    pub client_certificate: Option<String>,
    /// Our certificate, in base64.
    #[serde(deserialize_with = "data")]
    pub client_certificate_data: Option<ByteString>,
    /// A file with our key.
    pub client_key: Option<String>,
    /// Our key, in base64.
    #[serde(deserialize_with = "data")]
    pub client_key_data: Option<ByteString>,
    /// A bearer token.
    pub token: Option<String>,
    /// A file with a token, which may change.
    #[serde(rename = "tokenFile")]
    pub token_file: Option<String>,
    /// The user to impersonate.
    #[serde(rename = "as")]
    pub act_as: Option<String>,
    /// For basic authentication.
    pub username: Option<String>,
    /// For basic authentication.
    pub password: Option<String>,
    /// An authentication method that older clients contained.
    pub auth_provider: Option<serde_json::Value>,
    /// A program that prints credentials.
    pub exec: Option<Exec>,
}

/// A program that prints credentials.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Exec {
    /// A path, or a name to be looked up in `PATH`.
    pub command: String,
    /// The arguments of the program.
    pub args: Option<Vec<String>>,
    /// Additional environment variables.
    pub env: Option<Vec<ExecVariable>>,
    /// `client.authentication.k8s.io/v1` or `…/v1beta1`.
    pub api_version: Option<String>,
    /// The message for an operator if the program is missing.
    pub install_hint: Option<String>,
    /// Whether the plugin receives the cluster's description.
    pub provide_cluster_info: bool,
    /// `Never`, `IfAvailable` or `Always`.
    pub interactive_mode: Option<String>,
}

/// A variable for a program.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct ExecVariable {
    /// The name of the variable.
    pub name: String,
    /// The value of the variable.
    pub value: String,
}
