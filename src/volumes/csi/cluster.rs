//! What volumes need from the API server. A trait: the requests are made by other rooms, and a node
//! may have no API server.

use std::collections::BTreeMap;

use crate::kube::PodDependencies;
use crate::kube::volume_claims::ReadError;
use crate::model::api;
use crate::model::pod::Pod;
use crate::model::storage::{CsiDriver, SecretReference, VolumeAttachment};
use crate::util::stop::StopToken;

use super::driver::Secrets;
use super::request::PodFacts;

/// A request that failed, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ClusterError(pub String);

/// What the API server says of a VolumeAttachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachmentLookup {
    /// It is for the persistent volume of this name; empty: for the volume of a pod itself.
    Volume(String),
    /// It does not exist.
    Missing,
    /// This node may not read it. A node is forbidden to read what has no relation to it, so also what
    /// does not exist (Go: plugin/pkg/auth/authorizer/node). For a moment after its start the API server
    /// does not know the relations; what is attached is in the node's object then.
    Forbidden,
}

/// A token for a driver. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenText {
    /// The token.
    pub token: String,
    /// When it expires, as the API writes times.
    pub expires: String,
}

impl std::fmt::Debug for TokenText {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "TokenText(expires {})", self.expires)
    }
}

/// Reads objects. Each call has its own deadline, and that for a token ends at the stop signal.
#[expect(clippy::missing_errors_doc, reason = "all fail as requests do")]
pub trait Cluster: Send + Sync {
    /// The CSIDriver object; `None` if there is none. It may be a cached one.
    fn csi_driver(&self, name: &str, stop: &StopToken) -> Result<Option<CsiDriver>, ClusterError>;

    /// The VolumeAttachment of this name, read now.
    fn attachment(&self, name: &str, stop: &StopToken) -> Result<VolumeAttachment, ClusterError>;

    /// The volume of the VolumeAttachment of this name.
    fn attached_volume(&self, name: &str, stop: &StopToken) -> Result<AttachmentLookup, ClusterError> {
        let _ = (name, stop);
        Ok(AttachmentLookup::Missing)
    }

    /// The VolumeAttachment as it was read last, if the volume was attached then; only after a start
    /// without the API server (`--offline`).
    fn last_attachment(&self, name: &str) -> Option<VolumeAttachment> {
        let _ = name;
        None
    }

    /// The content of a Secret.
    fn secret(&self, name: &SecretReference, stop: &StopToken) -> Result<Secrets, ClusterError>;

    /// A token of the pod's service account for an audience; empty: the API server's own.
    fn token(
        &self,
        pod: &PodFacts,
        audience: &str,
        seconds: Option<i64>,
        stop: &StopToken,
    ) -> Result<TokenText, ClusterError>;
}

/// The API server, with the rights of this node. The client ends its requests when the agent stops.
#[derive(Debug, Clone)]
pub struct PodCluster(pub PodDependencies);

impl Cluster for PodCluster {
    fn csi_driver(&self, name: &str, _: &StopToken) -> Result<Option<CsiDriver>, ClusterError> {
        self.0.claims.driver(name).map_err(failed)
    }

    fn attachment(&self, name: &str, _: &StopToken) -> Result<VolumeAttachment, ClusterError> {
        self.0.claims.attachment(name).map_err(failed)
    }

    fn attached_volume(&self, name: &str, _: &StopToken) -> Result<AttachmentLookup, ClusterError> {
        match self.0.claims.attachment(name) {
            Ok(found) => {
                Ok(AttachmentLookup::Volume(found.spec.source.persistent_volume_name.unwrap_or_default()))
            }
            Err(ReadError::NotFound { .. }) => Ok(AttachmentLookup::Missing),
            Err(ReadError::Forbidden { .. }) => Ok(AttachmentLookup::Forbidden),
            Err(error) => Err(failed(error)),
        }
    }

    fn last_attachment(&self, name: &str) -> Option<VolumeAttachment> {
        self.0.claims.last_attachment(name)
    }

    fn secret(&self, name: &SecretReference, _: &StopToken) -> Result<Secrets, ClusterError> {
        let object = self.0.claims.secret(&name.namespace, &name.name).map_err(failed)?;
        // The protocol has only text.
        let text =
            |(key, value): (&String, &Vec<u8>)| (key.clone(), String::from_utf8_lossy(value).into_owned());
        Ok(Secrets::new(object.data.iter().map(text).collect()))
    }

    fn token(
        &self,
        pod: &PodFacts,
        audience: &str,
        seconds: Option<i64>,
        stop: &StopToken,
    ) -> Result<TokenText, ClusterError> {
        let token = self.0.tokens.get(&bound_to(pod), audience, seconds, stop);
        let token = token.map_err(|error| ClusterError(error.to_string()))?;
        Ok(TokenText { token: token.expose().to_owned(), expires: token.expires().to_string() })
    }
}

fn failed(error: ReadError) -> ClusterError {
    ClusterError(error.to_string())
}

/// What a request for a token needs of a pod.
fn bound_to(facts: &PodFacts) -> Pod {
    let mut pod = api::Pod::default();
    pod.metadata.name = Some(facts.name.clone());
    pod.metadata.namespace = Some(facts.namespace.clone());
    pod.metadata.uid = Some(facts.uid.as_str().to_owned());
    let account = Some(facts.service_account.clone());
    pod.spec = Some(api::PodSpec { service_account_name: account, ..api::PodSpec::default() });
    Pod::from(pod)
}

/// A node without an API server: drivers have the defaults, and nothing is attached.
#[derive(Debug, Clone, Copy)]
pub struct NoCluster;

impl NoCluster {
    fn refused<T>(what: &str) -> Result<T, ClusterError> {
        Err(ClusterError(format!("cannot read {what} without an API server")))
    }
}

impl Cluster for NoCluster {
    fn csi_driver(&self, _: &str, _: &StopToken) -> Result<Option<CsiDriver>, ClusterError> {
        Ok(None)
    }

    fn attachment(&self, name: &str, _: &StopToken) -> Result<VolumeAttachment, ClusterError> {
        NoCluster::refused(&format!("VolumeAttachment {name}"))
    }

    fn secret(&self, name: &SecretReference, _: &StopToken) -> Result<Secrets, ClusterError> {
        NoCluster::refused(&format!("Secret {}/{}", name.namespace, name.name))
    }

    fn token(&self, _: &PodFacts, _: &str, _: Option<i64>, _: &StopToken) -> Result<TokenText, ClusterError> {
        NoCluster::refused("tokens")
    }
}

/// Reads the secret of a call, if it has one. `field` names the reference.
pub(super) fn read_secret(
    cluster: &dyn Cluster,
    reference: Option<&SecretReference>,
    field: &str,
    stop: &StopToken,
) -> Result<Secrets, String> {
    let Some(name) = reference else { return Ok(Secrets::default()) };
    cluster.secret(name, stop).map_err(|ClusterError(error)| {
        format!("fetching {field} {}/{} failed: {error}", name.namespace, name.name)
    })
}

/// Tokens by audience, as drivers expect them.
pub(super) fn tokens_json(tokens: &BTreeMap<String, TokenText>) -> String {
    let entry =
        |token: &TokenText| serde_json::json!({ "token": token.token, "expirationTimestamp": token.expires });
    let all: serde_json::Map<_, _> =
        tokens.iter().map(|(name, token)| (name.clone(), entry(token))).collect();
    serde_json::Value::Object(all).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::objects::{Object, Objects};
    use crate::kube::volume_claims::{VolumeClaimApi, VolumeClaims};
    use crate::model::persistent::{Claim, PersistentVolume};

    /// An API server with this response to each request for a VolumeAttachment.
    struct Server(Result<VolumeAttachment, ReadError>);

    impl VolumeClaimApi for Server {
        fn read_claim(&self, _: &str, _: &str) -> Result<Claim, ReadError> {
            Err(ReadError::Stopping)
        }
        fn read_volume(&self, _: &str) -> Result<PersistentVolume, ReadError> {
            Err(ReadError::Stopping)
        }
        fn read_secret(&self, _: &str, _: &str) -> Result<Object, ReadError> {
            Err(ReadError::Stopping)
        }
        fn read_attachment(&self, _: &str) -> Result<VolumeAttachment, ReadError> {
            self.0.clone()
        }
    }

    fn found(response: Result<VolumeAttachment, ReadError>) -> Result<AttachmentLookup, ClusterError> {
        let claims = VolumeClaims::new(Box::new(Server(response)));
        let api = PodDependencies { claims, ..PodDependencies::for_tests(Objects::fixed(Vec::new())) };
        PodCluster(api).attached_volume("csi-1", &StopToken::never())
    }

    #[test]
    fn response_for_an_attachment_names_its_volume_and_only_an_unavailable_server_is_an_error() {
        let text = || "words".to_owned();
        assert_eq!(found(Err(ReadError::NotFound { text: text() })), Ok(AttachmentLookup::Missing));
        assert_eq!(found(Err(ReadError::Forbidden { text: text() })), Ok(AttachmentLookup::Forbidden));
        assert_eq!(found(Err(ReadError::Unavailable { text: text() })), Err(ClusterError(text())));
        let mut attachment = VolumeAttachment::default();
        assert_eq!(found(Ok(attachment.clone())), Ok(AttachmentLookup::Volume(String::new())));
        attachment.spec.source.persistent_volume_name = Some("pv".to_owned());
        assert_eq!(found(Ok(attachment)), Ok(AttachmentLookup::Volume("pv".to_owned())));
    }
}
