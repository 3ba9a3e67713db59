//! What a kubeconfig says (Go: client-go/tools/clientcmd/api/v1). Keys that mean nothing to
//! a node, such as preferences and extensions, are left out.

use k8s_openapi::ByteString;
use serde::Deserialize;

/// The file. Lists may be null.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Kubeconfig {
    /// Servers.
    pub clusters: Option<Vec<NamedCluster>>,
    /// Ways to show who we are.
    pub users: Option<Vec<NamedUser>>,
    /// Pairs of both.
    pub contexts: Option<Vec<NamedContext>>,
    /// The pair to use.
    pub current_context: Option<String>,
}

/// A server with its name.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct NamedCluster {
    /// What contexts call it.
    pub name: String,
    /// The server.
    pub cluster: Option<Cluster>,
}

/// A user with its name.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct NamedUser {
    /// What contexts call it.
    pub name: String,
    /// The user.
    pub user: Option<User>,
}

/// A context with its name.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct NamedContext {
    /// What `current-context` calls it.
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

/// A server.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Cluster {
    /// `https://10.0.0.1:6443`.
    pub server: Option<String>,
    /// The name in its certificate, where it is not the host.
    pub tls_server_name: Option<String>,
    /// Take any certificate.
    pub insecure_skip_tls_verify: Option<bool>,
    /// A file with the certificates of its authorities.
    pub certificate_authority: Option<String>,
    /// The same in place.
    pub certificate_authority_data: Option<ByteString>,
    /// A proxy on the way.
    pub proxy_url: Option<String>,
}

/// A way to show who we are. Not `Debug`: it holds secrets.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct User {
    /// A file with our certificate.
    pub client_certificate: Option<String>,
    /// The same in place.
    pub client_certificate_data: Option<ByteString>,
    /// A file with our key.
    pub client_key: Option<String>,
    /// The same in place.
    pub client_key_data: Option<ByteString>,
    /// A bearer token.
    pub token: Option<String>,
    /// A file with one, which may change.
    #[serde(rename = "tokenFile")]
    pub token_file: Option<String>,
    /// Whom to act as.
    #[serde(rename = "as")]
    pub act_as: Option<String>,
    /// For basic authentication.
    pub username: Option<String>,
    /// For basic authentication.
    pub password: Option<String>,
    /// A way that was built into clients once.
    pub auth_provider: Option<serde_json::Value>,
    /// A program that knows.
    pub exec: Option<Exec>,
}

/// A program that prints credentials.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Exec {
    /// A path, or a name to be found in `PATH`.
    pub command: String,
    /// Its arguments.
    pub args: Option<Vec<String>>,
    /// Variables that it gets besides our own.
    pub env: Option<Vec<ExecVariable>>,
    /// `client.authentication.k8s.io/v1` or `…/v1beta1`.
    pub api_version: Option<String>,
    /// The message for an operator who does not have it.
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
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
}
