//! What a cluster says about its nodes (Go: cmd/kubeadm/app/componentconfigs, cmd/kubeadm/app/cmd/phases/join
//! `runKubeletStartJoinPhase`).

use serde_json::Value;

use super::cluster::Cluster;
use super::credentials::Credentials;
use super::error::JoinError;
use super::requests::{Server, Verification};
use super::retry::Retry;
use crate::util::clip;

const KUBELET_CONFIG: &str = "ConfigMap kube-system/kubelet-config";
const KUBELET_CONFIG_PATH: &str = "/api/v1/namespaces/kube-system/configmaps/kubelet-config";
/// The largest configuration: etcd stores no larger object.
const MAX_CONFIGURATION_BYTES: usize = 1536 * 1024;
/// The longest text of a condition or a version that is shown.
const MAX_TEXT_BYTES: usize = 500;
/// The longest name of an object (RFC 1123 subdomain).
const MAX_NAME_BYTES: usize = 253;

/// Whether the cluster has a node, and its condition Ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeState {
    /// The name is free.
    Absent,
    /// The condition Ready is not True, or is absent: a node that joined before.
    NotReady {
        /// The condition's reason; may be empty.
        reason: String,
        /// The condition's message; may be empty.
        message: String,
    },
    /// A node that works. kubeadm refuses to join with its name.
    Ready,
}

/// The kubelet configuration of the cluster, YAML: the key `kubelet` of ConfigMap
/// `kube-system/kubelet-config`. It is the text of the cluster, not checked.
///
/// # Errors
/// [`JoinError::Denied`] and [`JoinError::Missing`] at once: clusters that kubeadm did not make have none.
/// Otherwise after a minute.
pub fn kubelet_configuration(cluster: &Cluster, credentials: &Credentials) -> Result<String, JoinError> {
    kubelet_configuration_within(cluster, credentials, &Retry::request())
}

/// As [`kubelet_configuration`], with other limits.
///
/// # Errors
/// As [`kubelet_configuration`], and when the breaker was tripped.
pub fn kubelet_configuration_within(
    cluster: &Cluster,
    credentials: &Credentials,
    retry: &Retry<'_>,
) -> Result<String, JoinError> {
    let server = connect(cluster, credentials, retry)?;
    let map = retry.run(|| server.get(KUBELET_CONFIG, KUBELET_CONFIG_PATH))?;
    let text = map.get("data").and_then(|data| data.get("kubelet")?.as_str()).unwrap_or_default();
    if text.trim().is_empty() {
        return Err(server.malformed(KUBELET_CONFIG, "there is no key kubelet with the configuration"));
    }
    if text.len() > MAX_CONFIGURATION_BYTES {
        return Err(server.malformed(KUBELET_CONFIG, "the configuration is larger than 1.5 MiB"));
    }
    Ok(text.to_owned())
}

/// The state of the node `name` in the cluster. Bootstrap tokens of kubeadm may read nodes; those of other
/// distributions may not, which is [`JoinError::Denied`].
///
/// # Errors
/// When the name is invalid, access is denied, or there is no response within a minute.
pub fn node_state(cluster: &Cluster, credentials: &Credentials, name: &str) -> Result<NodeState, JoinError> {
    node_state_within(cluster, credentials, name, &Retry::request())
}

/// As [`node_state`], with other limits.
///
/// # Errors
/// As [`node_state`], and when the breaker was tripped.
pub fn node_state_within(
    cluster: &Cluster,
    credentials: &Credentials,
    name: &str,
    retry: &Retry<'_>,
) -> Result<NodeState, JoinError> {
    if !is_node_name(name) {
        let shown = clip::line(name, MAX_NAME_BYTES);
        let reason = format!("{shown:?} is no node name: lower-case letters, digits, '-' and '.'");
        return Err(JoinError::Argument { flag: "--node-name", reason });
    }
    let server = connect(cluster, credentials, retry)?;
    let object = format!("Node {name}");
    let node = retry.run(|| match server.get(&object, &format!("/api/v1/nodes/{name}")) {
        Ok(node) => Ok(Some(node)),
        Err(JoinError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    })?;
    match node {
        None => Ok(NodeState::Absent),
        Some(node) if node.get("kind").and_then(Value::as_str) == Some("Node") => Ok(state(&node)),
        Some(_) => Err(server.malformed(&object, "the response is no Node")),
    }
}

/// The version of the API server, such as `v1.37.2`.
///
/// # Errors
/// When access is denied, or there is no response within a minute.
pub fn server_version(cluster: &Cluster, credentials: &Credentials) -> Result<String, JoinError> {
    server_version_within(cluster, credentials, &Retry::request())
}

/// As [`server_version`], with other limits.
///
/// # Errors
/// As [`server_version`], and when the breaker was tripped.
pub fn server_version_within(
    cluster: &Cluster,
    credentials: &Credentials,
    retry: &Retry<'_>,
) -> Result<String, JoinError> {
    const OBJECT: &str = "the version";
    let server = connect(cluster, credentials, retry)?;
    let version = retry.run(|| server.get(OBJECT, "/version"))?;
    let text = version.get("gitVersion").and_then(Value::as_str).unwrap_or_default();
    let is_version = text.len() <= 100
        && text.starts_with('v')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-+_".contains(&byte));
    match is_version {
        true => Ok(text.to_owned()),
        false => Err(server.malformed(OBJECT, &format!("gitVersion {text:?} is no version"))),
    }
}

fn connect(cluster: &Cluster, credentials: &Credentials, retry: &Retry<'_>) -> Result<Server, JoinError> {
    let verification = Verification::Authority(&cluster.authority);
    Server::new(&cluster.server, verification, Some(credentials), &retry.breaker)
}

/// A name that is one part of a path.
fn is_node_name(name: &str) -> bool {
    let is_end =
        |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let bytes = name.as_bytes();
    let is_inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(byte);
    name.len() <= MAX_NAME_BYTES
        && is_end(bytes.first())
        && is_end(bytes.last())
        && bytes.iter().all(is_inner)
}

fn state(node: &Value) -> NodeState {
    let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
    let text = |condition: &Value, field: &str| {
        let text = condition.get(field).and_then(Value::as_str).unwrap_or_default();
        clip::line(text, MAX_TEXT_BYTES)
    };
    let ready = conditions.into_iter().flatten().find(|condition| text(condition, "type") == "Ready");
    match ready {
        Some(condition) if text(condition, "status") == "True" => NodeState::Ready,
        Some(condition) => {
            NodeState::NotReady { reason: text(condition, "reason"), message: text(condition, "message") }
        }
        None => NodeState::NotReady { reason: String::new(), message: String::new() },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::transport::testing::{AUTHORITY, HttpsServer, json_response};

    fn once() -> Retry<'static> {
        Retry { limit: Duration::ZERO, ..Retry::request() }
    }

    fn cluster(server: &HttpsServer) -> Cluster {
        Cluster { server: format!("https://{}", server.address()), authority: AUTHORITY.to_owned() }
    }

    fn token() -> Credentials {
        Credentials::Token("abcdef.0123456789abcdef".to_owned())
    }

    fn server(status: u16, body: &Value) -> HttpsServer {
        let body = body.to_string();
        HttpsServer::start(move |_, _| json_response(status, &body))
    }

    fn status(message: &str) -> Value {
        json!({ "kind": "Status", "message": message })
    }

    #[test]
    fn kubelet_configuration_is_the_text_of_its_key() {
        let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let server = server(200, &json!({ "kind": "ConfigMap", "data": { "kubelet": text } }));
        let found = kubelet_configuration_within(&cluster(&server), &token(), &once());
        assert_eq!(found.as_deref(), Ok(text));
        let head = server.requests().remove(0);
        let path = "GET /api/v1/namespaces/kube-system/configmaps/kubelet-config HTTP/1.1\r\n";
        assert!(head.starts_with(path), "{head}");
        let bearer = "\r\nauthorization: bearer abcdef.0123456789abcdef\r\n";
        assert!(head.to_ascii_lowercase().contains(bearer), "{head}");
    }

    #[test]
    fn kubelet_configuration_that_is_denied_missing_or_malformed_is_an_error_at_once() {
        for (code, body, exit_code) in [
            (401, status("Unauthorized"), 28),
            (403, status("forbidden"), 28),
            (404, status("not found"), 29),
            (200, json!({ "data": {} }), 30),
            (200, json!({ "data": { "kubelet": " \n" } }), 30),
            (200, json!({ "data": { "kubelet": 5 } }), 30),
            (200, json!({ "data": { "kubelet": "a".repeat(MAX_CONFIGURATION_BYTES + 1) } }), 30),
        ] {
            let server = server(code, &body);
            // With the limit of a minute, which none of them needs.
            let error = kubelet_configuration(&cluster(&server), &token()).unwrap_err();
            assert_eq!(error.exit_code(), exit_code, "{error}");
            assert_eq!(server.requests().len(), 1, "{error}");
        }
    }

    #[test]
    fn busy_server_is_requested_again() {
        let server = HttpsServer::start(|number, _| match number {
            0 => json_response(503, ""),
            1 => json_response(429, ""),
            _ => json_response(200, r#"{"gitVersion":"v1.37.2"}"#),
        });
        let retry = Retry { interval: Duration::ZERO, ..Retry::request() };
        assert_eq!(server_version_within(&cluster(&server), &token(), &retry).as_deref(), Ok("v1.37.2"));
    }

    #[test]
    fn version_that_is_none_is_refused() {
        for version in
            [json!({}), json!({ "gitVersion": "1.37" }), json!({ "gitVersion": "v1\n$(x)" }), json!([])]
        {
            let server = server(200, &version);
            let error = server_version_within(&cluster(&server), &token(), &once()).unwrap_err();
            assert!(error.exit_code() == 30 && !error.to_string().contains('\n'), "{error}");
        }
    }

    fn node(ready: &str) -> Value {
        let ready = json!({ "type": "Ready", "status": ready, "reason": "R", "message": "m\nm" });
        let memory = json!({ "type": "MemoryPressure", "status": "True" });
        json!({ "kind": "Node", "metadata": { "name": "n" }, "status": { "conditions": [memory, ready] } })
    }

    #[test]
    fn state_of_a_node_is_that_of_its_condition() {
        let not_ready = |reason: &str, message: &str| NodeState::NotReady {
            reason: reason.to_owned(),
            message: message.to_owned(),
        };
        for (code, body, expected) in [
            (404, status("nodes \"n\" not found"), NodeState::Absent),
            (200, node("True"), NodeState::Ready),
            (200, node("False"), not_ready("R", "m m")),
            (200, node("Unknown"), not_ready("R", "m m")),
            (200, json!({ "kind": "Node" }), not_ready("", "")),
        ] {
            let server = server(code, &body);
            assert_eq!(node_state_within(&cluster(&server), &token(), "n", &once()), Ok(expected));
            assert!(server.requests().remove(0).starts_with("GET /api/v1/nodes/n HTTP/1.1\r\n"));
        }
    }

    #[test]
    fn state_that_cannot_be_read_is_not_absent() {
        let proxy = HttpsServer::start(|_, _| json_response(404, "404 page not found\n"));
        let error = node_state_within(&cluster(&proxy), &token(), "n", &once()).unwrap_err();
        assert_eq!(error.exit_code(), 30, "{error}");
        for (code, body, exit_code) in [(403, status("no"), 28), (200, json!({ "kind": "Pod" }), 30)] {
            let error =
                node_state_within(&cluster(&server(code, &body)), &token(), "n", &once()).unwrap_err();
            assert_eq!(error.exit_code(), exit_code, "{error}");
        }
    }

    #[test]
    fn node_names_cannot_change_the_path() {
        let server = server(200, &node("True"));
        for name in ["", ".", "..", "a/b", "a%2fb", "A", "-a", "a.", "a?b", "a b", "ä", &"a".repeat(254)] {
            let error = node_state_within(&cluster(&server), &token(), name, &once()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{name}");
        }
        assert!(server.requests().is_empty());
    }
}
