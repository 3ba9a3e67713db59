//! The requests to the API server (Go: `ResourceClaims().Get`, `ResourceSlices().DeleteCollection`).
//! With a store (`--offline`) claims are stored, and stored ones come before requests while the API server
//! does not count.

use std::time::Duration;

use super::info::ClaimKey;
use super::object::ResourceClaim;
use crate::kube::client::Client;
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::offline::{Key as StoredKey, Kind as StoredKind, Offline};

/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Why a claim could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ReadError {
    /// The text of the API server or of the client.
    pub text: String,
    /// Whether the API server did not respond: what was known before still holds.
    pub unavailable: bool,
    /// Whether the claim does not exist.
    pub is_missing: bool,
}

/// The requests; a trait so that tests need no server.
pub trait ResourceClaimApi: Send + Sync {
    /// Reads a claim.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError>;

    /// Deletes all ResourceSlices that a field selector matches.
    ///
    /// # Errors
    /// That of the request.
    fn delete_slices(&self, selector: &str) -> Result<(), ApiError>;
}

/// Requests by a client of the node.
#[derive(Debug)]
pub struct ClaimApiClient {
    client: Client,
}

impl ClaimApiClient {
    /// Uses the rate and the credentials of this client.
    #[must_use]
    pub fn new(client: &Client) -> ClaimApiClient {
        ClaimApiClient { client: client.with_timeout(TIMEOUT) }
    }
}

impl ResourceClaimApi for ClaimApiClient {
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError> {
        let target = Target::resource_claim(&key.namespace, &key.name);
        // Right after a pod was bound, the API server may not know yet that this node may read its claims.
        let claim = self.client.repeat_while_caches_lag(ApiError::is_forbidden, || self.client.get(&target));
        claim.map_err(|error| ReadError {
            text: error.to_string(),
            unavailable: error.is_transport(),
            is_missing: error.is_not_found(),
        })
    }

    fn delete_slices(&self, selector: &str) -> Result<(), ApiError> {
        match self.client.delete_collection(&Target::resource_slices(), selector) {
            // An API server without this kind has no slices.
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

/// Requests with a store.
pub struct StoredClaims {
    api: Box<dyn ResourceClaimApi>,
    offline: Offline,
}

impl StoredClaims {
    /// Stores what `api` reads.
    #[must_use]
    pub fn new(api: Box<dyn ResourceClaimApi>, offline: Offline) -> StoredClaims {
        StoredClaims { api, offline }
    }
}

impl ResourceClaimApi for StoredClaims {
    fn read(&self, key: &ClaimKey) -> Result<ResourceClaim, ReadError> {
        let stored = StoredKey::namespaced(StoredKind::ResourceClaim, &key.namespace, &key.name);
        if !self.offline.accepts_absence()
            && let Some(claim) = self.offline.read_json(&stored)
        {
            return Ok(claim);
        }
        let found = self.api.read(key);
        match &found {
            Ok(claim) => self.offline.put_json(stored, &claim.to_stored()),
            Err(error) if error.is_missing => self.offline.remove(stored),
            Err(_) => {}
        }
        found
    }

    fn delete_slices(&self, selector: &str) -> Result<(), ApiError> {
        self.api.delete_slices(selector)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::offline::Phase;
    use crate::offline::test_store::TestStore;
    use serde_json::json;

    type Response = Arc<Mutex<Result<ResourceClaim, ReadError>>>;

    struct Fixed(Response);

    impl ResourceClaimApi for Fixed {
        fn read(&self, _: &ClaimKey) -> Result<ResourceClaim, ReadError> {
            self.0.lock().unwrap().clone()
        }
        fn delete_slices(&self, _: &str) -> Result<(), ApiError> {
            Ok(())
        }
    }

    #[test]
    fn stored_claim_serves_while_the_server_is_away_and_is_removed_when_it_is_gone() {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"name": "gpu", "namespace": "n", "uid": "c",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true}]},
            "status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
                "allocation": {"devices": {"results": [{"driver": "d", "pool": "l", "device": "0", "request": "r",
                    "shareID": "s", "consumedCapacity": {"memory": "1Gi"}}]}}}}))
        .unwrap();
        let error =
            |unavailable| ReadError { text: "none".to_owned(), unavailable, is_missing: !unavailable };
        let response = Response::new(Mutex::new(Ok(claim.clone())));
        let store = TestStore::new();
        let claims = StoredClaims::new(Box::new(Fixed(Arc::clone(&response))), store.offline.clone());
        let key = |name: &str| ClaimKey { namespace: "n".to_owned(), name: name.to_owned() };
        store.enter(Phase::Online);
        assert_eq!(claims.read(&key("gpu")), Ok(claim.clone()));
        let stored = StoredKey::namespaced(StoredKind::ResourceClaim, "n", "gpu");
        assert_eq!(store.changes().into_keys().collect::<Vec<_>>(), std::slice::from_ref(&stored));
        *response.lock().unwrap() = Err(error(true));
        assert_eq!(claims.read(&key("gpu")), Err(error(true)), "the server counts");
        store.enter(Phase::Held);
        assert_eq!(claims.read(&key("gpu")), Ok(claim));
        assert_eq!(claims.read(&key("other")), Err(error(true)));
        store.enter(Phase::Online);
        *response.lock().unwrap() = Err(error(false));
        assert_eq!(claims.read(&key("gpu")), Err(error(false)));
        assert_eq!(store.changes(), [(stored, None)].into());
    }
}
